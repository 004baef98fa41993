//! The config file over the environment over the defaults.

use super::*;

fn resolved(
    file: FileSettings,
    vars: &[(&str, &str)],
) -> Result<Option<TraceSettings>, SettingError> {
    resolve(file, |name| {
        vars.iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| (*value).to_owned())
    })
}

fn some(file: FileSettings, vars: &[(&str, &str)]) -> TraceSettings {
    resolved(file, vars).unwrap().unwrap()
}

fn file(endpoint: &str) -> FileSettings {
    FileSettings {
        endpoint: Some(endpoint.to_owned()),
        ..FileSettings::default()
    }
}

const ENDPOINT: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://env:4317");

#[test]
fn without_an_address_spans_go_nowhere() {
    assert_eq!(resolved(FileSettings::default(), &[]), Ok(None));
    let empty = [("OTEL_EXPORTER_OTLP_ENDPOINT", "  ")];
    assert_eq!(resolved(FileSettings::default(), &empty), Ok(None));
    for off in [
        ("OTEL_SDK_DISABLED", "true"),
        ("OTEL_TRACES_EXPORTER", "none"),
    ] {
        assert_eq!(
            resolved(FileSettings::default(), &[ENDPOINT, off]),
            Ok(None)
        );
    }
}

#[test]
fn the_file_wins_over_the_environment_and_the_environment_over_defaults() {
    let vars = [
        ENDPOINT,
        ("OTEL_SERVICE_NAME", "from-env"),
        (
            "OTEL_RESOURCE_ATTRIBUTES",
            "region=eu,zone=a%2Cb,service.name=attribute",
        ),
        ("OTEL_TRACES_SAMPLER", "traceidratio"),
        ("OTEL_TRACES_SAMPLER_ARG", "0.25"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "1500"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "100"),
    ];
    let from_env = some(FileSettings::default(), &vars);
    assert_eq!(from_env.url.authority().unwrap().as_str(), "env:4317");
    let expected = Sampling {
        ratio: 0.25,
        parent: Parent::Ignored,
    };
    assert_eq!(from_env.sampling, expected);
    assert_eq!(from_env.timeout, Duration::from_millis(1500));
    assert_eq!((from_env.queue.spans, from_env.queue.batch), (100, 100));
    let value = |settings: &TraceSettings, key: &str| {
        let found = settings.resource.iter().find(|(name, _)| name == key);
        found.map(|(_, value)| value.clone())
    };
    assert_eq!(
        value(&from_env, "service.name").as_deref(),
        Some("from-env")
    );
    assert_eq!(value(&from_env, "zone").as_deref(), Some("a,b"));

    let from_file = some(
        FileSettings {
            service_name: Some("from-file".into()),
            sample_ratio: Some(0.5),
            protocol: Some(Protocol::HttpProtobuf),
            resource: vec![("region".into(), "us".into())],
            ..file("http://file:4318")
        },
        &vars,
    );
    assert_eq!(from_file.url, "http://file:4318/v1/traces");
    assert_eq!(from_file.sampling.ratio, 0.5);
    assert_eq!(
        value(&from_file, "service.name").as_deref(),
        Some("from-file")
    );
    assert_eq!(value(&from_file, "region").as_deref(), Some("us"));
    assert_eq!(value(&from_file, "zone").as_deref(), Some("a,b"));

    let defaults = some(file("http://c:4317"), &[]);
    assert_eq!(defaults.sampling.ratio, 1.0);
    assert_eq!(defaults.protocol, Protocol::Grpc);
    assert_eq!(
        value(&defaults, "service.name").as_deref(),
        Some("sidestep")
    );
}

#[test]
fn the_path_depends_on_the_protocol_and_on_who_gave_it() {
    let http = ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf");
    let at = |name, address| {
        some(FileSettings::default(), &[http, (name, address)])
            .url
            .to_string()
    };
    let all = "OTEL_EXPORTER_OTLP_ENDPOINT";
    assert_eq!(at(all, "http://c:4318"), "http://c:4318/v1/traces");
    assert_eq!(
        at(all, "http://c:4318/base/"),
        "http://c:4318/base/v1/traces"
    );
    let own = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
    assert_eq!(at(own, "http://c:4318/custom"), "http://c:4318/custom");
    let grpc = some(file("https://c:4317"), &[]).url;
    assert_eq!(grpc.scheme_str(), Some("https"));
    assert!(grpc.path().ends_with("TraceService/Export"), "{grpc}");
}

#[test]
fn a_variable_that_cannot_be_used_is_named_and_no_secret_is_shown() {
    for (name, value) in [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
        ("OTEL_RESOURCE_ATTRIBUTES", "no-value"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "collector:4317"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=to%0Aken"),
    ] {
        let error = resolved(FileSettings::default(), &[ENDPOINT, (name, value)]).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with(&format!("{name}: expected ")), "{text}");
        assert!(!text.contains("ken"), "{text}");
    }
    let arg = ("OTEL_TRACES_SAMPLER_ARG", "2");
    let sampler = ("OTEL_TRACES_SAMPLER", "parentbased_traceidratio");
    assert!(resolved(FileSettings::default(), &[ENDPOINT, sampler, arg]).is_err());
}

#[test]
fn headers_are_decoded_and_marked_as_secret() {
    let vars = [
        ENDPOINT,
        (
            "OTEL_EXPORTER_OTLP_HEADERS",
            "authorization=Bearer%20x, a=b",
        ),
    ];
    let headers = some(FileSettings::default(), &vars).headers;
    assert_eq!(headers["authorization"], "Bearer x");
    assert_eq!(headers["a"], "b");
    assert!(!format!("{headers:?}").contains("Bearer"));
}
