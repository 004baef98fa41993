//! Envoy's static configuration: one template for the demo, the tests and `manifests/envoy/`.
//!
//! Lives here: [`GatewayConfig`] and its rendering.
//! Never here: starting Envoy (see `stack`), finding it (see `envoy`).
//! Invariant: the text depends on the fields alone, so that a test can compare it with the shipped manifest.

use anyhow::Context as _;
use serde::Serialize;
use std::net::SocketAddr;

const TEMPLATE: &str = include_str!("envoy.yaml.j2");

/// One Envoy in front of one picker.
#[derive(Clone, Debug)]
pub struct GatewayConfig {
    /// Where clients connect.
    pub listener: SocketAddr,
    /// Where Envoy's own admin page listens.
    pub admin: Option<SocketAddr>,
    /// Where the picker listens for ext_proc.
    pub picker: SocketAddr,
    /// How Envoy speaks to the picker.
    pub transport: Transport,
    /// How request bodies reach the picker.
    pub request_body: RequestBody,
    /// How response bodies reach the picker.
    pub response_body: ResponseBody,
    /// Which addresses the picker may name.
    pub pods: Pods,
    /// What happens to a client's own destination header before the picker sees the request.
    pub client_headers: ClientHeaders,
    /// Where Envoy sends its spans.
    pub tracing: Tracing,
    /// How often a request whose pod cannot be reached is sent to another.
    pub retries: u32,
    /// Bytes buffered per connection.
    pub buffer_limit_bytes: u32,
}

/// How Envoy speaks to the picker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// TLS with a certificate that is not verified: the picker's default is self-signed.
    Tls,
    /// HTTP/2 without encryption.
    Plaintext,
}

/// How request bodies reach the picker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestBody {
    /// Chunk by chunk, both ways, without waiting.
    FullDuplexStreamed,
    /// The whole body in one message, at most `buffer_limit_bytes`.
    Buffered,
}

/// How response bodies reach the picker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseBody {
    /// Each chunk is shown and waits for its answer.
    Streamed,
    /// Chunk by chunk, both ways, without waiting.
    FullDuplexStreamed,
}

/// Which addresses the picker may name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pods {
    /// These (Envoy's `override_host` policy).
    Known(Vec<SocketAddr>),
    /// Any address (Envoy's `ORIGINAL_DST` cluster, as gateways that follow a pool use it).
    AnyAddress,
}

/// What happens to a client's own destination header before the picker sees the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientHeaders {
    /// Envoy removes it.
    Stripped,
    /// It is left to the picker, which overwrites it.
    LeftToPicker,
}

/// Where Envoy sends its spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tracing {
    /// Envoy does not trace.
    Off,
    /// To this OTLP collector, by gRPC.
    Otlp(SocketAddr),
}

impl GatewayConfig {
    /// What the demo runs and `manifests/envoy/` shows.
    #[must_use]
    pub fn new(listener: SocketAddr, picker: SocketAddr, pods: Vec<SocketAddr>) -> GatewayConfig {
        GatewayConfig {
            listener,
            admin: None,
            picker,
            transport: Transport::Tls,
            request_body: RequestBody::FullDuplexStreamed,
            response_body: ResponseBody::Streamed,
            pods: Pods::Known(pods),
            client_headers: ClientHeaders::Stripped,
            tracing: Tracing::Off,
            retries: 2,
            buffer_limit_bytes: 1024 * 1024,
        }
    }

    /// The YAML that `envoy -c` reads.
    ///
    /// # Errors
    /// When the template shipped with this program does not render: a defect of ours.
    pub fn to_yaml(&self) -> anyhow::Result<String> {
        let mut jinja = minijinja::Environment::new();
        jinja.set_undefined_behavior(minijinja::UndefinedBehavior::Strict);
        jinja.set_keep_trailing_newline(true);
        jinja
            .render_str(TEMPLATE, Fields::from(self))
            .context("the gateway's configuration does not render")
    }
}

#[derive(Serialize)]
struct Fields {
    listener: Address,
    admin: Option<Address>,
    picker: Address,
    picker_tls: bool,
    request_body: &'static str,
    request_trailers: &'static str,
    response_body: &'static str,
    response_trailers: &'static str,
    known_pods: Vec<Address>,
    strip_client_headers: bool,
    tracing: Option<Address>,
    retries: u32,
    buffer_limit_bytes: u32,
}

#[derive(Serialize)]
struct Address {
    ip: String,
    port: u16,
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        Address {
            // Quoted: an IPv6 address in a YAML flow mapping would read as keys.
            ip: format!("\"{}\"", address.ip()),
            port: address.port(),
        }
    }
}

impl From<&GatewayConfig> for Fields {
    fn from(config: &GatewayConfig) -> Self {
        // Full-duplex bodies require their trailers: they may carry the end of the body.
        let (request_body, request_trailers) = match config.request_body {
            RequestBody::FullDuplexStreamed => ("FULL_DUPLEX_STREAMED", "SEND"),
            RequestBody::Buffered => ("BUFFERED", "SKIP"),
        };
        let (response_body, response_trailers) = match config.response_body {
            ResponseBody::Streamed => ("STREAMED", "SKIP"),
            ResponseBody::FullDuplexStreamed => ("FULL_DUPLEX_STREAMED", "SEND"),
        };
        Fields {
            listener: config.listener.into(),
            admin: config.admin.map(Address::from),
            picker: config.picker.into(),
            picker_tls: config.transport == Transport::Tls,
            request_body,
            request_trailers,
            response_body,
            response_trailers,
            known_pods: match &config.pods {
                Pods::Known(pods) => pods.iter().copied().map(Address::from).collect(),
                Pods::AnyAddress => Vec::new(),
            },
            strip_client_headers: config.client_headers == ClientHeaders::Stripped,
            tracing: match config.tracing {
                Tracing::Off => None,
                Tracing::Otlp(collector) => Some(collector.into()),
            },
            retries: config.retries,
            buffer_limit_bytes: config.buffer_limit_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr};
    use std::path::Path;

    /// What `manifests/envoy/` shows: Envoy in front of two decode pods, the picker beside it.
    fn shown() -> GatewayConfig {
        let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 10000));
        let picker = SocketAddr::from((Ipv4Addr::LOCALHOST, 9002));
        let pods = [11, 12].map(|host| SocketAddr::from((Ipv4Addr::new(10, 0, 0, host), 8000)));
        GatewayConfig {
            admin: Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 9901))),
            ..GatewayConfig::new(any, picker, pods.to_vec())
        }
    }

    fn compare_with_manifest(name: &str, config: &GatewayConfig) {
        let file = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("manifests/envoy")
            .join(name);
        let text = config.to_yaml().unwrap();
        if std::env::var_os("UPDATE_MANIFESTS").is_some() {
            std::fs::write(&file, &text).unwrap();
        }
        let shipped = std::fs::read_to_string(&file).unwrap_or_default();
        assert_eq!(
            shipped,
            text,
            "{} has drifted from its template; run this test with UPDATE_MANIFESTS=1",
            file.display()
        );
    }

    #[test]
    fn the_shipped_configuration_is_the_one_the_demo_runs() {
        compare_with_manifest("full-duplex.yaml", &shown());
    }

    #[test]
    fn the_shipped_buffered_configuration_is_the_one_the_tests_run() {
        let buffered = GatewayConfig {
            request_body: RequestBody::Buffered,
            buffer_limit_bytes: 16 * 1024 * 1024,
            ..shown()
        };
        compare_with_manifest("buffered.yaml", &buffered);
    }

    #[test]
    fn every_variant_is_yaml_and_says_what_was_asked_for() {
        let picker = SocketAddr::from((Ipv6Addr::LOCALHOST, 9002));
        let text = GatewayConfig {
            picker,
            transport: Transport::Plaintext,
            response_body: ResponseBody::FullDuplexStreamed,
            pods: Pods::AnyAddress,
            client_headers: ClientHeaders::LeftToPicker,
            tracing: Tracing::Otlp(SocketAddr::from((Ipv4Addr::LOCALHOST, 4317))),
            retries: 0,
            admin: None,
            ..shown()
        }
        .to_yaml()
        .unwrap();
        assert!(text.contains(r#"address: "::1", port_value: 9002"#));
        assert!(text.contains("type: ORIGINAL_DST"));
        assert!(text.contains("response_trailer_mode: SEND"));
        assert!(text.contains("OpenTelemetryConfig"));
        for absent in [
            "override_host",
            "UpstreamTlsContext",
            "early_header",
            "retry_policy",
            "admin:",
        ] {
            assert!(!text.contains(absent), "{absent}");
        }
    }
}
