//! Where spans go: the config file over the standard `OTEL_*` variables over the defaults.
//!
//! Lives here: [`TraceSettings`] and the rules by which file and environment make them.
//! Never here: reading of files, use of the process's environment (a function is handed in).
//! Invariant: what the file says wins; a variable that cannot be used is a fault with its name, not a
//! default taken silently.

use std::collections::BTreeMap;
use std::time::Duration;

/// Path of the HTTP signal, added to an address without one.
const TRACES_PATH: &str = "/v1/traces";
/// Path of the gRPC method.
const EXPORT_METHOD: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";

/// What the config file says; absent parts are taken from the environment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FileSettings {
    /// Address of the receiver.
    pub endpoint: Option<String>,
    /// How it is spoken to.
    pub protocol: Option<Protocol>,
    /// `service.name`.
    pub service_name: Option<String>,
    /// Share of requests traced when the gateway does not say, 0..=1.
    pub sample_ratio: Option<f64>,
    /// Further resource attributes.
    pub resource: Vec<(String, String)>,
}

/// How spans are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// OTLP over gRPC.
    #[default]
    Grpc,
    /// OTLP over HTTP, in protobuf.
    HttpProtobuf,
}

impl Protocol {
    /// The word that OpenTelemetry uses.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Protocol::Grpc => "grpc",
            Protocol::HttpProtobuf => "http/protobuf",
        }
    }
}

/// Which requests are recorded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Share of traces that are recorded, 0..=1, where the parent does not decide.
    pub ratio: f64,
    /// Whether a parent decides.
    pub parent: Parent,
}

/// Whether a parent span decides about its children.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parent {
    /// A child is recorded exactly when its parent is.
    Decides,
    /// A parent makes no difference.
    Ignored,
}

/// Where spans go, complete.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceSettings {
    /// Address of the receiver, path included.
    pub url: http::Uri,
    /// How it is spoken to.
    pub protocol: Protocol,
    /// Further headers, such as a token.
    pub headers: http::HeaderMap,
    /// Longest time one export may take, and the flush at the end.
    pub timeout: Duration,
    /// Which requests are recorded.
    pub sampling: Sampling,
    /// Attributes of the resource, `service.name` among them.
    pub resource: Vec<(String, String)>,
    /// Bounds of the queue.
    pub queue: QueueSettings,
}

/// Bounds of the queue of spans that wait for export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueSettings {
    /// Most spans that wait. Further ones are dropped and counted.
    pub spans: usize,
    /// Spans that are sent at once; as many start an export.
    pub batch: usize,
    /// Longest wait before fewer are sent.
    pub delay: Duration,
}

impl Default for QueueSettings {
    fn default() -> Self {
        QueueSettings {
            spans: 16_384,
            batch: 512,
            delay: Duration::from_secs(1),
        }
    }
}

/// A setting that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}: expected {expected}, found {found:?}")]
pub struct SettingError {
    name: String,
    expected: &'static str,
    found: String,
}

impl SettingError {
    fn new(name: impl Into<String>, expected: &'static str, found: impl Into<String>) -> Self {
        SettingError {
            name: name.into(),
            expected,
            found: found.into(),
        }
    }
}

/// The settings that `file` and environment make together; nothing when spans go nowhere.
///
/// # Errors
/// When a variable that counts cannot be used.
pub fn resolve(
    file: FileSettings,
    env: impl Fn(&str) -> Option<String>,
) -> Result<Option<TraceSettings>, SettingError> {
    let env = Env(&env);
    let off = env
        .get("OTEL_SDK_DISABLED")
        .is_some_and(|word| word.eq_ignore_ascii_case("true"))
        || env
            .get("OTEL_TRACES_EXPORTER")
            .is_some_and(|word| word == "none");
    if file.endpoint.is_none() && off {
        return Ok(None);
    }
    let protocol = match file.protocol {
        Some(protocol) => protocol,
        None => protocol(&env)?,
    };
    let Some((name, address, whole)) = endpoint(&file, &env) else {
        return Ok(None);
    };
    let ratio = match file.sample_ratio {
        Some(ratio) => Sampling {
            ratio,
            parent: Parent::Decides,
        },
        None => sampling(&env)?,
    };
    Ok(Some(TraceSettings {
        url: url(name, &address, protocol, whole)?,
        protocol,
        headers: headers(&env)?,
        timeout: millis(
            &env,
            &[
                "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT",
                "OTEL_EXPORTER_OTLP_TIMEOUT",
            ],
            10_000,
        )?,
        sampling: ratio,
        resource: attributes(&file, &env)?,
        queue: queue(&env)?,
    }))
}

struct Env<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Env<'_> {
    fn get(&self, name: &str) -> Option<String> {
        // An empty variable counts as one that is not set (OpenTelemetry specification, "Environment
        // Variable Specification").
        (self.0)(name).filter(|value| !value.trim().is_empty())
    }

    /// The first of `names` that is set.
    fn first(&self, names: &[&'static str]) -> Option<(&'static str, String)> {
        names
            .iter()
            .find_map(|name| self.get(name).map(|value| (*name, value)))
    }
}

/// The address, where it was found, and whether its path is complete.
fn endpoint(file: &FileSettings, env: &Env<'_>) -> Option<(&'static str, String, bool)> {
    if let Some(address) = &file.endpoint {
        return Some(("telemetry.otlpEndpoint", address.clone(), false));
    }
    let (traces, all) = (
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        "OTEL_EXPORTER_OTLP_ENDPOINT",
    );
    let own = env.get(traces).map(|address| (traces, address, true));
    own.or_else(|| env.get(all).map(|address| (all, address, false)))
}

fn url(
    name: &str,
    address: &str,
    protocol: Protocol,
    whole: bool,
) -> Result<http::Uri, SettingError> {
    let expected = "the address of an OTLP receiver, such as http://127.0.0.1:4317";
    let wrong = || SettingError::new(name, expected, address);
    let base: http::Uri = address.trim().parse().map_err(|_| wrong())?;
    let (Some("http" | "https"), Some(authority)) = (base.scheme_str(), base.authority()) else {
        return Err(wrong());
    };
    let path = match protocol {
        Protocol::Grpc => EXPORT_METHOD.to_owned(),
        Protocol::HttpProtobuf if whole => base.path().to_owned(),
        Protocol::HttpProtobuf => {
            let given = base.path().trim_end_matches('/');
            match given.ends_with(TRACES_PATH) {
                true => given.to_owned(),
                false => format!("{given}{TRACES_PATH}"),
            }
        }
    };
    http::Uri::builder()
        .scheme(base.scheme_str().unwrap_or("http"))
        .authority(authority.as_str())
        .path_and_query(path)
        .build()
        .map_err(|_| wrong())
}

fn protocol(env: &Env<'_>) -> Result<Protocol, SettingError> {
    let names = [
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
        "OTEL_EXPORTER_OTLP_PROTOCOL",
    ];
    match env.first(&names) {
        None => Ok(Protocol::Grpc),
        Some((_, word)) if word == Protocol::Grpc.as_str() => Ok(Protocol::Grpc),
        Some((_, word)) if word == Protocol::HttpProtobuf.as_str() => Ok(Protocol::HttpProtobuf),
        Some((name, word)) => Err(SettingError::new(name, "grpc or http/protobuf", word)),
    }
}

fn sampling(env: &Env<'_>) -> Result<Sampling, SettingError> {
    let name = "OTEL_TRACES_SAMPLER";
    let Some(word) = env.get(name) else {
        return Ok(Sampling {
            ratio: 1.0,
            parent: Parent::Decides,
        });
    };
    let (parent, rest) = match word.strip_prefix("parentbased_") {
        Some(rest) => (Parent::Decides, rest),
        None => (Parent::Ignored, word.as_str()),
    };
    let ratio = match rest {
        "always_on" => 1.0,
        "always_off" => 0.0,
        "traceidratio" => {
            let name = "OTEL_TRACES_SAMPLER_ARG";
            match env.get(name) {
                None => 1.0,
                Some(text) => text
                    .trim()
                    .parse()
                    .ok()
                    .filter(|ratio| (0.0..=1.0).contains(ratio))
                    .ok_or_else(|| SettingError::new(name, "a share from 0 to 1", text))?,
            }
        }
        _ => {
            let expected =
                "always_on, always_off or traceidratio, each with or without parentbased_";
            return Err(SettingError::new(name, expected, word));
        }
    };
    Ok(Sampling { ratio, parent })
}

fn headers(env: &Env<'_>) -> Result<http::HeaderMap, SettingError> {
    let mut headers = http::HeaderMap::new();
    let names = [
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
        "OTEL_EXPORTER_OTLP_HEADERS",
    ];
    let Some((name, list)) = env.first(&names) else {
        return Ok(headers);
    };
    for (key, value) in pairs(name, &list)? {
        // The value may be a secret, so it is not shown.
        let wrong = || SettingError::new(name, "header names and values", key.clone());
        let key = http::HeaderName::try_from(&key).map_err(|_| wrong())?;
        let mut value = http::HeaderValue::try_from(value).map_err(|_| wrong())?;
        value.set_sensitive(true);
        headers.insert(key, value);
    }
    Ok(headers)
}

/// `a=1,b=2`, percent-encoded.
fn pairs(name: &'static str, list: &str) -> Result<Vec<(String, String)>, SettingError> {
    let expected = "a list such as key=value,key=value";
    list.split(',')
        .map(str::trim)
        .filter(|pair| !pair.is_empty())
        .map(|pair| {
            let (key, value) = pair
                .split_once('=')
                .filter(|(key, _)| !key.trim().is_empty())
                .ok_or_else(|| SettingError::new(name, expected, "an entry without ="))?;
            let value = decoded(value.trim()).ok_or_else(|| {
                SettingError::new(name, expected, "a value with a bad % sequence")
            })?;
            Ok((key.trim().to_owned(), value))
        })
        .collect()
}

fn decoded(text: &str) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let digits = [bytes.next()?, bytes.next()?];
        let digits = std::str::from_utf8(&digits).ok()?;
        out.push(u8::from_str_radix(digits, 16).ok()?);
    }
    String::from_utf8(out).ok()
}

/// Resource attributes: those of the environment, then those of the file over them.
fn attributes(file: &FileSettings, env: &Env<'_>) -> Result<Vec<(String, String)>, SettingError> {
    let mut all = BTreeMap::new();
    all.insert("service.name".to_owned(), env!("CARGO_PKG_NAME").to_owned());
    all.insert(
        "service.version".to_owned(),
        env!("CARGO_PKG_VERSION").to_owned(),
    );
    let name = "OTEL_RESOURCE_ATTRIBUTES";
    if let Some(list) = env.get(name) {
        all.extend(pairs(name, &list)?);
    }
    if let Some(service) = env.get("OTEL_SERVICE_NAME") {
        all.insert("service.name".to_owned(), service);
    }
    all.extend(file.resource.iter().cloned());
    if let Some(service) = &file.service_name {
        all.insert("service.name".to_owned(), service.clone());
    }
    Ok(all.into_iter().collect())
}

fn queue(env: &Env<'_>) -> Result<QueueSettings, SettingError> {
    let default = QueueSettings::default();
    let spans = count(env, "OTEL_BSP_MAX_QUEUE_SIZE", default.spans)?;
    Ok(QueueSettings {
        spans,
        batch: count(env, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", default.batch)?.min(spans),
        delay: millis(env, &["OTEL_BSP_SCHEDULE_DELAY"], 1000)?,
    })
}

fn count(env: &Env<'_>, name: &'static str, default: usize) -> Result<usize, SettingError> {
    let Some(text) = env.get(name) else {
        return Ok(default);
    };
    text.trim()
        .parse()
        .ok()
        .filter(|count| (1..=1_000_000).contains(count))
        .ok_or_else(|| SettingError::new(name, "a whole number from 1 to 1000000", text))
}

fn millis(env: &Env<'_>, names: &[&'static str], default: u64) -> Result<Duration, SettingError> {
    let Some((name, text)) = env.first(names) else {
        return Ok(Duration::from_millis(default));
    };
    text.trim()
        .parse()
        .ok()
        .filter(|millis| (1..=600_000).contains(millis))
        .map(Duration::from_millis)
        .ok_or_else(|| SettingError::new(name, "milliseconds from 1 to 600000", text))
}

#[cfg(test)]
mod tests;
