//! The process config: `kind: SidestepConfig`.
//!
//! Lives here: its defaults and ranges.
//! Never here: reading the files it names (see `load`).
//! Invariant: the listening addresses differ, and model names, aliases and adapters name one thing each.

use crate::config::diagnostic::Wrong;
use crate::config::node::NodeId;
use crate::config::parse::{Reading, kubernetes, pods, policy, values};
use crate::config::process::{
    Admin, AdminAccess, Conformance, DataPlane, Explain, IndexLimits, Limits, Listen, MetadataKey,
    ModelConfig, PodSource, PolicySource, Process, Protocol, Telemetry, Template, Tls, Tokenizer,
};
use crate::config::raw;
use crate::config::shape::{Field, Spot, Text, Whole};
use crate::fleet::PodSpec;
use crate::names::ModelName;
use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

/// The kind of a process config.
pub(crate) const KIND: &str = "SidestepConfig";

/// The name of a policy that is written in the process config.
const INLINE_POLICY: &str = "inline";

/// What a process config says; what it only refers to is not there.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub(crate) process: Process,
    pub(crate) models: Vec<ModelConfig>,
    /// The pods, if they are written here.
    pub(crate) pods: Option<Vec<PodSpec>>,
    /// The policy, if it is written here.
    pub(crate) policy: Option<policy::Spec>,
}

/// Reads a process config.
pub(crate) fn document(raw: &raw::Process, reading: &mut Reading<'_>) -> Parsed {
    reading.version(&raw.api_version, &raw.kind, raw.at, KIND);
    let (pod_source, pods) = pod_source(raw, reading);
    let (policy_source, policy) = policy_source(raw, &pod_source, reading);
    let listen = listen(&raw.listen, reading);
    Parsed {
        process: Process {
            listen,
            admin: admin(raw, listen, reading),
            tls: tls(&raw.tls, reading),
            limits: limits(&raw.limits, reading),
            pods: pod_source,
            policy: policy_source,
            index: index(&raw.index, reading),
            telemetry: telemetry(&raw.telemetry, reading),
            data_plane: data_plane(&raw.data_plane, reading),
        },
        models: models(&raw.models, reading),
        pods,
        policy,
    }
}

fn pod_source(raw: &raw::Process, reading: &mut Reading<'_>) -> (PodSource, Option<Vec<PodSpec>>) {
    let expected = "a file of pods, an inline list, or a pool in a cluster";
    let Some(Spot { at, value: raw }) = given(&raw.pods, (raw.at, "pods"), expected, reading)
    else {
        return (PodSource::Inline, None);
    };
    let given = [
        !matches!(raw.file, Field::Absent),
        !matches!(raw.inline, Field::Absent),
        !matches!(raw.kubernetes, Field::Absent),
    ];
    one_of(given, *at, reading);
    let inline = raw.inline.given();
    let pods = inline.map(|list| pods::pods(list.at, &list.value, reading));
    if let Some(section) = raw.kubernetes.given() {
        let discovery = kubernetes::pods(&section.value, reading);
        let source = discovery.map_or(PodSource::Inline, |discovery| {
            PodSource::Kubernetes(Box::new(discovery))
        });
        // None is known yet.
        return (source, Some(Vec::new()));
    }
    match reading.file(&raw.file) {
        Some(path) => (PodSource::File(path), pods),
        None => (PodSource::Inline, pods),
    }
}

fn policy_source(
    raw: &raw::Process,
    pods: &PodSource,
    reading: &mut Reading<'_>,
) -> (PolicySource, Option<policy::Spec>) {
    let in_cluster = raw
        .pods
        .given()
        .is_some_and(|pods| !matches!(pods.value.kubernetes, Field::Absent));
    let of_pods = match pods {
        PodSource::Kubernetes(discovery) => kubernetes::OfPods::Pool(discovery),
        _ if in_cluster => kubernetes::OfPods::Faulty,
        PodSource::Inline | PodSource::File(_) => kubernetes::OfPods::Elsewhere,
    };
    let expected = "a file with a policy, the spec of an inline one, or those of a cluster";
    let Some(Spot { at, value: raw }) = given(&raw.policy, (raw.at, "policy"), expected, reading)
    else {
        return (PolicySource::Inline, None);
    };
    let given = [
        !matches!(raw.file, Field::Absent),
        !matches!(raw.inline, Field::Absent),
        !matches!(raw.kubernetes, Field::Absent),
    ];
    one_of(given, *at, reading);
    let inline = raw.inline.given();
    let policy = inline.map(|spec| policy::spec(&spec.value, Arc::from(INLINE_POLICY), reading));
    if let Some(section) = raw.kubernetes.given() {
        let (objects, default) = kubernetes::policy(&section.value, of_pods, reading);
        let source = objects.map_or(PolicySource::Inline, PolicySource::Kubernetes);
        return (source, Some(default));
    }
    match reading.file(&raw.file) {
        Some(path) => (PolicySource::File(path), policy),
        None => (PolicySource::Inline, policy),
    }
}

/// The section in `field`; that it is absent is reported.
fn given<'a, T>(
    field: &'a Field<T>,
    (section, key): (NodeId, &'static str),
    expected: &str,
    reading: &mut Reading<'_>,
) -> Option<&'a Spot<T>> {
    if let Field::Absent = field {
        reading.report.missing(section, key, expected);
    }
    field.given()
}

/// Demands exactly one of file, inline and kubernetes in the section `at`.
fn one_of(given: [bool; 3], at: NodeId, reading: &mut Reading<'_>) {
    let found = match given.iter().filter(|given| **given).count() {
        1 => return,
        0 => "none of them",
        _ => "several of them",
    };
    reading
        .report
        .fault(at, Wrong::new("one of file, inline and kubernetes", found));
}

fn listen(raw: &Field<raw::Listen>, reading: &mut Reading<'_>) -> Listen {
    let any = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    let mut listen = Listen {
        ext_proc: SocketAddr::new(any, 9002),
        health: SocketAddr::new(any, 9003),
        admin: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9090),
    };
    let Some(Spot { at, value: raw }) = raw.given() else {
        return listen;
    };
    let address = |text: &Text| values::listen_address(text);
    listen.ext_proc = reading.or(&raw.ext_proc, listen.ext_proc, address);
    listen.health = reading.or(&raw.health, listen.health, address);
    listen.admin = reading.or(&raw.admin, listen.admin, address);
    let all = [
        ("extProc", listen.ext_proc),
        ("health", listen.health),
        ("admin", listen.admin),
    ];
    for (index, (name, address)) in all.iter().enumerate() {
        let clash = all[..index]
            .iter()
            .find(|(_, other)| clash(*other, *address));
        if let Some((other, _)) = clash {
            let expected = format!("another port for {name} than for {other}");
            let found = format!("{} for both", address.port());
            reading.report.fault(*at, Wrong::new(expected, found));
        }
    }
    listen
}

/// Whether two sockets cannot listen at once.
fn clash(a: SocketAddr, b: SocketAddr) -> bool {
    let shared = a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified();
    a.port() != 0 && a.port() == b.port() && shared
}

fn admin(raw: &raw::Process, listen: Listen, reading: &mut Reading<'_>) -> Admin {
    let mut admin = Admin::default();
    if let Some(Spot { value: section, .. }) = raw.admin.given() {
        if let Some(Spot { at, value: token }) = section.token.given() {
            if let Field::Absent = token.file {
                reading.report.missing(*at, "file", "the path of a file");
            }
            if let Some(path) = reading.file(&token.file) {
                admin.access = AdminAccess::TokenFile(path);
            }
        }
        let words = [
            ("Enabled", Explain::Enabled),
            ("Disabled", Explain::Disabled),
        ];
        admin.explain = reading.or(&section.explain, Explain::Disabled, |text| {
            values::word(text, &words)
        });
        admin.trace_link = reading.optional(&section.trace_link, values::trace_link);
    }
    let token = raw.admin.given().map(|spot| &spot.value.token);
    if !listen.admin.ip().is_loopback()
        && matches!(token, None | Some(Field::Absent))
        && let Some(spot) = raw.listen.given().and_then(|spot| spot.value.admin.given())
    {
        let message = "is reached over the network and there is no admin.token: there, only metrics and \
                       health are answered; pods, policy and decisions are shown on loopback";
        reading.report.warn(spot.at, message);
    }
    admin
}

fn tls(raw: &Field<raw::Tls>, reading: &mut Reading<'_>) -> Tls {
    #[derive(Clone, Copy, PartialEq)]
    enum Mode {
        SelfSigned,
        Plaintext,
        Files,
    }
    let Some(Spot { value: raw, .. }) = raw.given() else {
        return Tls::SelfSigned;
    };
    let words = [
        ("SelfSigned", Mode::SelfSigned),
        ("Plaintext", Mode::Plaintext),
        ("Files", Mode::Files),
    ];
    let expected = "SelfSigned, Plaintext or Files";
    let mode = reading.required(&raw.mode, (raw.at, "mode"), expected, |text| {
        values::word(text, &words)
    });
    if mode == Some(Mode::Files) {
        for (field, key) in [(&raw.cert_file, "certFile"), (&raw.key_file, "keyFile")] {
            if let Field::Absent = field {
                let expected = "a PEM file, which the mode Files needs";
                reading.report.missing(raw.at, key, expected);
            }
        }
        let cert = reading.file(&raw.cert_file);
        let key = reading.file(&raw.key_file);
        if let (Some(cert), Some(key)) = (cert, key) {
            return Tls::Files { cert, key };
        }
    } else if mode.is_some() {
        let why = "the mode is not Files";
        reading.no_effect(&raw.cert_file, why);
        reading.no_effect(&raw.key_file, why);
    }
    match mode {
        Some(Mode::Plaintext) => Tls::Plaintext,
        _ => Tls::SelfSigned,
    }
}

fn limits(raw: &Field<raw::Limits>, reading: &mut Reading<'_>) -> Limits {
    let mut limits = Limits {
        request_bytes: 16 << 20,
        in_flight: 4096,
        body_timeout: Duration::from_secs(30),
        decision_timeout: Duration::from_secs(5),
        drain_timeout: Duration::from_secs(30),
    };
    let Some(Spot { value: raw, .. }) = raw.given() else {
        return limits;
    };
    let time = |text: &Text| values::duration(text);
    limits.request_bytes = reading.or(&raw.request_bytes, limits.request_bytes, |size| {
        values::bytes(size, 1 << 10, 1 << 30)
    });
    limits.in_flight = reading.or(&raw.in_flight, limits.in_flight, |value| {
        values::whole(value, 1, 1_000_000)
    });
    limits.body_timeout = reading.or(&raw.body_timeout, limits.body_timeout, time);
    limits.decision_timeout = reading.or(&raw.decision_timeout, limits.decision_timeout, time);
    limits.drain_timeout = reading.or(&raw.drain_timeout, limits.drain_timeout, time);
    limits
}

fn models(raw: &Field<Vec<Spot<raw::Model>>>, reading: &mut Reading<'_>) -> Vec<ModelConfig> {
    let mut names = HashSet::new();
    raw.given().map_or(Vec::new(), |list| {
        list.value
            .iter()
            .filter_map(|raw| model(&raw.value, &mut names, reading))
            .collect()
    })
}

fn model(
    raw: &raw::Model,
    names: &mut HashSet<String>,
    reading: &mut Reading<'_>,
) -> Option<ModelConfig> {
    let expected = "the name of the model";
    let name = reading.required(&raw.name, (raw.at, "name"), expected, values::name);
    let aliases = reading.each(&raw.aliases, values::name);
    let adapters = reading.each(&raw.adapters, values::name);
    let spots = raw.name.given().into_iter();
    let lists = [&raw.aliases, &raw.adapters];
    let lists = lists.iter().filter_map(|list| list.given());
    for spot in spots.chain(lists.flat_map(|list| &list.value)) {
        if !names.insert(spot.value.found.clone()) {
            let found = format!("{} a second time", spot.value.found);
            let expected = "a name that no other model, alias or adapter has";
            reading.report.fault(spot.at, Wrong::new(expected, found));
        }
    }
    let tokenizer = tokenizer(raw, reading);
    let block_size = pods::block_size(&raw.block_size, reading);
    Some(ModelConfig {
        name: ModelName(name?),
        aliases: aliases.into_iter().map(ModelName).collect(),
        adapters: adapters.into_iter().map(ModelName).collect(),
        tokenizer,
        block_size,
    })
}

fn tokenizer(raw: &raw::Model, reading: &mut Reading<'_>) -> Tokenizer {
    let template = match raw.chat_template.given() {
        Some(Spot { at, value }) => {
            if let Field::Absent = value.file {
                reading.report.missing(*at, "file", "the path of a file");
            }
            reading.file(&value.file).map(Template::File)
        }
        None => None,
    };
    let Some(Spot { at, value: section }) = raw.tokenizer.given() else {
        reading.no_effect(&raw.chat_template, "the model has no tokenizer");
        return Tokenizer::ByteEstimate;
    };
    let file = reading.file(&section.file);
    let builtin = reading.or(&section.builtin, false, |flag| {
        flag.parse("true or false", |flag| Some(*flag))
    });
    let found = match (&section.builtin, &section.file) {
        (Field::Absent, Field::Absent) => Some("neither"),
        (Field::Given(spot), Field::Absent) if spot.value.value == Some(false) => {
            Some("builtin: false")
        }
        (Field::Given(_), Field::Given(_)) if builtin => Some("both"),
        _ => None,
    };
    if let Some(found) = found {
        let wrong = Wrong::new("either builtin: true or a file", found);
        reading.report.fault(*at, wrong);
    }
    if builtin {
        let why = "the built-in tokenizer has its own template";
        reading.no_effect(&raw.chat_template, why);
    }
    match file {
        Some(tokenizer) => Tokenizer::File {
            tokenizer,
            template: template.unwrap_or(Template::BesideTokenizer),
        },
        None if builtin => Tokenizer::Builtin,
        None => Tokenizer::ByteEstimate,
    }
}

fn index(raw: &Field<raw::Index>, reading: &mut Reading<'_>) -> IndexLimits {
    let mut limits = IndexLimits {
        max_blocks: 16_000_000,
        max_blocks_per_pod: 2_000_000,
    };
    let Some(Spot { value: raw, .. }) = raw.given() else {
        return limits;
    };
    let blocks = |value: &Whole| values::whole(value, 1, 1_000_000_000);
    limits.max_blocks = reading.or(&raw.max_blocks, limits.max_blocks, blocks);
    limits.max_blocks_per_pod = reading.or(
        &raw.max_blocks_per_pod,
        limits.max_blocks_per_pod.min(limits.max_blocks),
        blocks,
    );
    if limits.max_blocks < limits.max_blocks_per_pod
        && let Some(spot) = raw.max_blocks_per_pod.given()
    {
        let expected = format!("at most maxBlocks, which is {}", limits.max_blocks);
        let found = limits.max_blocks_per_pod.to_string();
        reading.report.fault(spot.at, Wrong::new(expected, found));
    }
    limits
}

fn telemetry(raw: &Field<raw::Telemetry>, reading: &mut Reading<'_>) -> Telemetry {
    let mut telemetry = Telemetry::default();
    let Some(Spot { value: raw, .. }) = raw.given() else {
        return telemetry;
    };
    let words = [
        ("grpc", Protocol::Grpc),
        ("http/protobuf", Protocol::HttpProtobuf),
    ];
    telemetry.endpoint = reading.optional(&raw.otlp_endpoint, values::url);
    telemetry.protocol = reading.optional(&raw.otlp_protocol, |text| values::word(text, &words));
    telemetry.service_name = reading.optional(&raw.service_name, values::name);
    telemetry.sample_ratio = reading.optional(&raw.sample_ratio, |value| values::ratio(value, 1.0));
    if let Some(Spot { value: map, .. }) = raw.resource.given() {
        for (key, spot) in &map.0 {
            match (values::name(key), values::label(&spot.value)) {
                (Ok(key), Ok(value)) => telemetry.resource.push((key, value)),
                (Err(wrong), _) | (_, Err(wrong)) => reading.report.fault(spot.at, wrong),
            }
        }
    }
    telemetry
}

fn data_plane(raw: &Field<raw::DataPlane>, reading: &mut Reading<'_>) -> DataPlane {
    let raw = raw.given().map(|spot| &spot.value);
    let conformance = raw.map_or(Conformance::Disabled, |raw| {
        let words = [
            ("Disabled", Conformance::Disabled),
            ("Enabled", Conformance::Enabled),
        ];
        reading.or(&raw.conformance, Conformance::Disabled, |text| {
            values::word(text, &words)
        })
    });
    let mut key = |field: Option<&Field<raw::MetadataKey>>, namespace: &str, key: &str| {
        let raw = field.and_then(Field::given).map(|spot| &spot.value);
        let mut text = |field: Option<&Field<Text>>, default: &str| match field {
            Some(field) => reading.or(field, Arc::from(default), values::name),
            None => Arc::from(default),
        };
        MetadataKey {
            namespace: text(raw.map(|raw| &raw.namespace), namespace),
            key: text(raw.map(|raw| &raw.key), key),
        }
    };
    DataPlane {
        subset_hint: key(
            raw.map(|raw| &raw.subset_hint),
            "envoy.lb.subset_hint",
            "x-gateway-destination-endpoint-subset",
        ),
        destination: key(
            raw.map(|raw| &raw.destination),
            "envoy.lb",
            "x-gateway-destination-endpoint",
        ),
        served: key(
            raw.map(|raw| &raw.served),
            "envoy.lb",
            "x-gateway-destination-endpoint-served",
        ),
        conformance,
    }
}
