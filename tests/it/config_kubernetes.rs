//! What a process config says of a cluster, and what becomes of it.

use sidestep::config::{self, Conformance, Loaded, PodSource, PolicyObjects, PolicySource};
use sidestep::decide::policy::Bypass;
use sidestep::decide::snapshot::{LocalPrefill, Role};
use sidestep::fleet::Probe;
use sidestep::fleet::kubernetes::{Discovery, KvPorts, RoleLabels, Template, Unlabelled};
use sidestep::names::ModelName;
use sidestep::units::{BlockSize, Blocks, Tokens};
use std::sync::Arc;

fn load(sections: &str) -> Loaded {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sidestep.yaml");
    let text = format!("apiVersion: sidestep.dev/v1alpha1\nkind: SidestepConfig\n{sections}");
    std::fs::write(&path, text).unwrap();
    config::load(&path).unwrap_or_else(|faults| panic!("{faults}"))
}

fn discovery(loaded: &Loaded) -> &Discovery {
    match &loaded.process.pods {
        PodSource::Kubernetes(discovery) => discovery,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_name_of_a_pool_is_enough() {
    let loaded = load("pods: {kubernetes: {pool: vllm}}\npolicy: {kubernetes: {}}\n");
    assert_eq!(
        *discovery(&loaded),
        Discovery {
            namespace: None,
            pool: Arc::from("vllm"),
            roles: RoleLabels::default(),
            template: Template {
                kv_events: None,
                models: Vec::new(),
                adapters: Vec::new(),
                local_prefill: LocalPrefill::Able,
                block_size: None,
                kv_blocks: None,
                prefill_batch_tokens: None,
                probe: Probe::Metrics {
                    path: Arc::from("/metrics"),
                    failure_threshold: Probe::FAILURE_THRESHOLD,
                },
            },
        }
    );
    let roles = &discovery(&loaded).roles;
    assert_eq!(&*roles.key, "llm-d.ai/role");
    assert_eq!(roles.unlabelled, Unlabelled::Role(Role::Decode));
    assert_eq!(
        loaded.process.policy,
        PolicySource::Kubernetes(PolicyObjects {
            namespace: None,
            pool: Arc::from("vllm"),
            lease: Arc::from("sidestep-vllm"),
        })
    );
    assert!(loaded.pods.is_empty());
    assert_eq!(&*loaded.policy.name, "default");
    assert_eq!(loaded.policy.rules.len(), 1);
    assert_eq!(loaded.policy.rules[0].bypass, Bypass::Never);
    assert_eq!(loaded.warnings, Vec::new());
    assert_eq!(loaded.process.data_plane.conformance, Conformance::Disabled);
}

#[test]
fn every_key_of_a_cluster_is_what_it_says() {
    let loaded = load(
        "
pods:
  kubernetes:
    namespace: models
    pool: vllm
    roleLabel: example.com/part
    roles: {p: prefill, d: decode, pd: both}
    unlabelled: none
    kvEvents: {port: 5557, replayPort: 5657, topic: kv}
    models: [m]
    adapters: [a]
    capacity: {kvBlocks: 100, prefillTokens: 4096, blockSize: 64}
    localPrefill: unable
    probe: off
policy:
  kubernetes:
    namespace: policies
    pool: other
    lease: mine
    default: {rules: [{bypass: {type: Always}}]}
dataPlane: {conformance: Enabled}
",
    );
    let found = discovery(&loaded);
    assert_eq!(found.namespace.as_deref(), Some("models"));
    assert_eq!(&*found.roles.key, "example.com/part");
    assert_eq!(found.roles.values.len(), 3);
    assert_eq!(found.roles.values.get("pd"), Some(&Role::Both));
    assert_eq!(found.roles.unlabelled, Unlabelled::Ignored);
    assert_eq!(
        found.template,
        Template {
            kv_events: Some(KvPorts {
                events: 5557,
                replay: Some(5657),
                topic: Arc::from("kv"),
            }),
            models: vec![ModelName::from("m")],
            adapters: vec![ModelName::from("a")],
            local_prefill: LocalPrefill::Unable,
            block_size: BlockSize::new(64),
            kv_blocks: Some(Blocks(100)),
            prefill_batch_tokens: Some(Tokens(4096)),
            probe: Probe::Off,
        }
    );
    assert_eq!(
        loaded.process.policy,
        PolicySource::Kubernetes(PolicyObjects {
            namespace: Some(Arc::from("policies")),
            pool: Arc::from("other"),
            lease: Arc::from("mine"),
        })
    );
    assert_eq!(loaded.policy.rules[0].bypass, Bypass::Always);
    assert_eq!(loaded.process.data_plane.conformance, Conformance::Enabled);
}

#[test]
fn policies_are_looked_for_where_the_pods_are() {
    let loaded = load("pods: {kubernetes: {namespace: n, pool: vllm}}\npolicy: {kubernetes: {}}\n");
    let PolicySource::Kubernetes(objects) = &loaded.process.policy else {
        panic!("{:?}", loaded.process.policy);
    };
    assert_eq!(objects.namespace.as_deref(), Some("n"));
    assert_eq!(&*objects.pool, "vllm");
}

#[test]
fn policies_of_a_cluster_go_with_pods_of_a_file() {
    let loaded = load("pods: {inline: []}\npolicy: {kubernetes: {pool: vllm}}\n");
    assert_eq!(loaded.process.pods, PodSource::Inline);
    assert!(matches!(loaded.process.policy, PolicySource::Kubernetes(_)));
}
