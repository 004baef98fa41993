//! The picker's configuration: one template for the demo and the tests.
//!
//! Lives here: [`PickerConfig`], [`Pod`], the arguments of a simulated engine.
//! Never here: what a configuration means (see `config`), starting anything (see `stack`).
//! Invariant: what is written here is what a user could have written.

use crate::cli::demo::gateway::Transport;
use anyhow::Context as _;
use serde::Serialize;
use std::net::SocketAddr;
use std::path::PathBuf;

/// The model that the demo's engines serve.
pub const MODEL: &str = "sidestep-small";

const TEMPLATE: &str = include_str!("picker.yaml.j2");

/// One picker.
#[derive(Clone, Debug)]
pub struct PickerConfig {
    /// Where Envoy finds it.
    pub ext_proc: SocketAddr,
    /// gRPC health.
    pub health: SocketAddr,
    /// Metrics and decisions.
    pub admin: SocketAddr,
    /// How Envoy speaks to it.
    pub transport: Transport,
    /// Limits other than the defaults, as `key`, `value` of the file's `limits`.
    pub limits: Vec<(String, String)>,
    /// The pods.
    pub pods: Vec<Pod>,
    /// The file with the policy.
    pub policy: PathBuf,
    /// Where spans go.
    pub otlp: Option<SocketAddr>,
}

/// One pod as the picker is told of it.
#[derive(Clone, Debug, Serialize)]
pub struct Pod {
    /// Its name.
    pub name: String,
    /// Where it serves HTTP.
    pub address: SocketAddr,
    /// `prefill`, `decode` or `both`.
    pub role: &'static str,
    /// Where it publishes KV events; a pod without is not asked for metrics either.
    pub events: Option<SocketAddr>,
    /// Where missed events can be asked for again.
    pub replay: Option<SocketAddr>,
    /// Prompt tokens it computes in one batch (vLLM's `max_num_batched_tokens`).
    pub batch_tokens: u32,
}

impl Pod {
    /// The arguments of the `sidestep engine` that is this pod.
    #[must_use]
    pub fn engine_arguments(&self, time_scale: f64) -> Vec<String> {
        let mut arguments = vec![
            "engine".to_owned(),
            format!("--role={}", self.role),
            format!("--listen={}", self.address),
            format!("--model={MODEL}"),
            format!("--time-scale={time_scale}"),
            format!("--max-num-batched-tokens={}", self.batch_tokens),
        ];
        if let Some(events) = self.events {
            arguments.push(format!("--events={events}"));
        }
        if let Some(replay) = self.replay {
            arguments.push(format!("--replay={replay}"));
        }
        arguments
    }
}

#[derive(Serialize)]
struct Fields<'a> {
    ext_proc: SocketAddr,
    health: SocketAddr,
    admin: SocketAddr,
    tls: &'static str,
    limits: &'a [(String, String)],
    model: &'static str,
    pods: &'a [Pod],
    policy: String,
    otlp: Option<SocketAddr>,
}

impl PickerConfig {
    /// The YAML that `sidestep serve --config` reads.
    ///
    /// # Errors
    /// When the template shipped with this program does not render: a defect of ours.
    pub fn to_yaml(&self) -> anyhow::Result<String> {
        let mut jinja = minijinja::Environment::new();
        jinja.set_undefined_behavior(minijinja::UndefinedBehavior::Strict);
        jinja.set_keep_trailing_newline(true);
        let fields = Fields {
            ext_proc: self.ext_proc,
            health: self.health,
            admin: self.admin,
            tls: match self.transport {
                Transport::Tls => "SelfSigned",
                Transport::Plaintext => "Plaintext",
            },
            limits: &self.limits,
            model: MODEL,
            pods: &self.pods,
            // A JSON string is a YAML string, whatever the path holds.
            policy: serde_json::Value::from(self.policy.to_string_lossy()).to_string(),
            otlp: self.otlp,
        };
        jinja
            .render_str(TEMPLATE, fields)
            .context("the picker's configuration does not render")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn the_configuration_and_the_demos_policy_are_accepted_without_a_warning() {
        let folder = tempfile::tempdir().unwrap();
        let policy = folder.path().join("a policy.yaml");
        std::fs::write(&policy, include_str!("policy.yaml")).unwrap();
        let at = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let pod = |name: &str, role, port| Pod {
            name: name.into(),
            address: at(port),
            role,
            events: Some(at(port + 1)),
            replay: Some(at(port + 2)),
            batch_tokens: 4096,
        };
        let silent = Pod {
            events: None,
            replay: None,
            ..pod("silent", "both", 30)
        };
        let config = PickerConfig {
            ext_proc: at(1),
            health: at(2),
            admin: at(3),
            transport: Transport::Plaintext,
            limits: vec![("inFlight".into(), "7".into())],
            pods: vec![pod("p", "prefill", 10), pod("d", "decode", 20), silent],
            policy,
            otlp: Some(at(4)),
        };
        let file = folder.path().join("picker.yaml");
        std::fs::write(&file, config.to_yaml().unwrap()).unwrap();
        let loaded = crate::config::load(&file).unwrap();
        assert_eq!(loaded.pods.len(), 3);
        assert_eq!(loaded.process.limits.in_flight, 7);
        assert_eq!(&*loaded.policy.name, "demo");
        // A pod without KV events is worth a warning; the demo has none such.
        let others: Vec<String> = loaded
            .warnings
            .iter()
            .map(ToString::to_string)
            .filter(|warning| !warning.contains("silent"))
            .collect();
        assert!(others.is_empty(), "{others:?}");
    }
}
