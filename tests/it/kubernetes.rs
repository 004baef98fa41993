//! What objects of a cluster mean: pools and pods in, endpoints out.

use serde_json::{Value, json};
use sidestep::decide::snapshot::{LocalPrefill, Role};
use sidestep::fleet::kubernetes::endpoints::{Pool, PoolFault, endpoints};
use sidestep::fleet::kubernetes::objects::{PodObject, PolicyObject, PoolObject};
use sidestep::fleet::kubernetes::picture::{Follow, Heard, Picture};
use sidestep::fleet::kubernetes::{Discovery, KvPorts, RoleLabels, Template, Unlabelled};
use sidestep::fleet::{Listed, PodSpec, Probe, Roster};
use sidestep::names::ModelName;
use sidestep::units::{BlockSize, Blocks, Tokens};
use std::sync::Arc;

fn discovery() -> Discovery {
    Discovery {
        namespace: None,
        pool: Arc::from("pool"),
        roles: RoleLabels::default(),
        template: Template {
            kv_events: None,
            models: Vec::new(),
            adapters: Vec::new(),
            local_prefill: LocalPrefill::Able,
            block_size: None,
            kv_blocks: None,
            prefill_batch_tokens: None,
            probe: Probe::Off,
        },
    }
}

fn pool_object(labels: &[(&str, &str)], ports: &[u32]) -> PoolObject {
    let labels: serde_json::Map<String, Value> = labels
        .iter()
        .map(|(key, value)| ((*key).to_owned(), json!(value)))
        .collect();
    let ports: Vec<Value> = ports.iter().map(|port| json!({"number": port})).collect();
    serde_json::from_value(json!({
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": "pool", "uid": "p", "resourceVersion": "1"},
        "spec": {
            "selector": {"matchLabels": labels},
            "targetPorts": ports,
            "endpointPickerRef": {"name": "sidestep"},
        },
    }))
    .unwrap()
}

fn pool(ports: &[u32]) -> Pool {
    Pool::new(&pool_object(&[("app", "engine")], ports).spec).unwrap()
}

/// A pod as an API server sends it.
fn sent(name: &str, ip: &str, role: Option<&str>) -> Value {
    let mut labels = json!({"app": "engine", "pod-template-hash": "x"});
    if let Some(role) = role {
        labels["llm-d.ai/role"] = json!(role);
    }
    json!({
        "metadata": {
            "name": name, "namespace": "n", "uid": format!("uid-{name}"), "resourceVersion": "7",
            "labels": labels, "annotations": {"kubectl.kubernetes.io/restartedAt": "now"},
            "managedFields": [{"manager": "kubelet"}],
        },
        "spec": {"containers": [{"name": "engine", "image": "vllm"}]},
        "status": {
            "phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}],
            "conditions": [
                {"type": "Initialized", "status": "True"},
                {"type": "Ready", "status": "True", "lastTransitionTime": null},
            ],
        },
    })
}

fn object(value: Value) -> PodObject {
    serde_json::from_value(value).unwrap()
}

fn pod(name: &str, ip: &str, role: &str) -> PodObject {
    object(sent(name, ip, Some(role)))
}

fn listed(pods: &[PodObject]) -> Vec<PodSpec> {
    endpoints(&pool(&[8000]), pods, &discovery()).pods
}

fn names(pods: &[PodSpec]) -> Vec<String> {
    pods.iter()
        .map(|pod| format!("{}={}", pod.name, pod.endpoint))
        .collect()
}

#[test]
fn a_ready_pod_is_an_endpoint_with_the_role_of_its_label() {
    for (label, role) in [
        ("prefill", Role::Prefill),
        ("encode-prefill", Role::Prefill),
        ("decode", Role::Decode),
        ("both", Role::Both),
        ("prefill-decode", Role::Both),
        ("encode-prefill-decode", Role::Both),
    ] {
        let found = listed(&[pod("a", "10.0.0.1", label)]);
        assert_eq!(found.len(), 1, "{label}");
        assert_eq!(found[0].role, role, "{label}");
        assert_eq!(found[0].listed, Listed::Ready);
        assert_eq!(&*found[0].uid, "uid-a");
        assert_eq!(found[0].endpoint.to_string(), "10.0.0.1:8000");
    }
}

#[test]
fn a_pod_with_a_role_of_nobodys_is_left_out_and_named() {
    let found = endpoints(
        &pool(&[8000]),
        &[pod("p1", "10.0.0.1", "encode")],
        &discovery(),
    );
    assert!(found.pods.is_empty());
    assert_eq!(
        found.warnings[0].to_string(),
        "pod p1: label llm-d.ai/role: expected one of both, decode, encode-prefill, \
         encode-prefill-decode, prefill, prefill-decode, found \"encode\""
    );
}

#[test]
fn a_pod_without_a_role_decodes_unless_it_is_said_otherwise() {
    let plain = object(sent("a", "10.0.0.1", None));
    assert_eq!(listed(std::slice::from_ref(&plain))[0].role, Role::Decode);
    let mut strict = discovery();
    strict.roles.unlabelled = Unlabelled::Ignored;
    let found = endpoints(&pool(&[8000]), [&plain], &strict);
    assert!(found.pods.is_empty());
    assert!(found.warnings[0].to_string().ends_with("found nothing"));
}

#[test]
fn roles_are_read_from_whatever_label_and_values_are_configured() {
    let mut own = discovery();
    own.roles = RoleLabels {
        key: Arc::from("app"),
        values: [(Arc::from("engine"), Role::Both)].into(),
        unlabelled: Unlabelled::Ignored,
    };
    let found = endpoints(&pool(&[8000]), &[pod("a", "10.0.0.1", "prefill")], &own);
    assert_eq!(found.pods[0].role, Role::Both);
}

#[test]
fn each_port_is_a_rank_with_its_own_event_ports() {
    let mut with_events = discovery();
    with_events.template.kv_events = Some(KvPorts {
        events: 5557,
        replay: Some(5657),
        topic: Arc::from("kv"),
    });
    let pods = [
        pod("a", "10.0.0.1", "decode"),
        pod("b", "fd00::b", "decode"),
    ];
    let found = endpoints(&pool(&[8000, 8100, 8200]), &pods, &with_events).pods;
    assert_eq!(
        names(&found),
        [
            "a=10.0.0.1:8000",
            "a/1=10.0.0.1:8100",
            "a/2=10.0.0.1:8200",
            "b=[fd00::b]:8000",
            "b/1=[fd00::b]:8100",
            "b/2=[fd00::b]:8200",
        ]
    );
    let events = found[2].kv_events.as_ref().unwrap();
    assert_eq!(events.events, "tcp://10.0.0.1:5559");
    assert_eq!(events.replay.as_deref(), Some("tcp://10.0.0.1:5659"));
    assert_eq!(events.topic, "kv");
    let six = found[4].kv_events.as_ref().unwrap();
    assert_eq!(six.events, "tcp://[fd00::b]:5558");
}

#[test]
fn a_pod_that_is_not_ready_or_leaving_stays_listed_as_such() {
    let mut unready = sent("unready", "10.0.0.1", Some("decode"));
    unready["status"]["conditions"][1]["status"] = json!("False");
    let mut unknown = sent("unknown", "10.0.0.2", Some("decode"));
    unknown["status"]["conditions"] = json!([]);
    let mut leaving = sent("leaving", "10.0.0.3", Some("decode"));
    leaving["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    let found = listed(&[object(unready), object(unknown), object(leaving)]);
    let states: Vec<_> = found.iter().map(|pod| (&*pod.name, pod.listed)).collect();
    assert_eq!(
        states,
        [
            ("unknown", Listed::NotReady),
            ("unready", Listed::NotReady),
            ("leaving", Listed::Leaving),
        ]
    );
}

#[test]
fn a_pod_that_is_over_or_has_no_address_is_left_out() {
    let mut failed = sent("failed", "10.0.0.1", Some("decode"));
    failed["status"]["phase"] = json!("Failed");
    let mut done = sent("done", "10.0.0.2", Some("decode"));
    done["status"]["phase"] = json!("Succeeded");
    let mut evicted = sent("evicted", "", Some("decode"));
    evicted["status"]["podIP"] = Value::Null;
    let mut starting = sent("starting", "", Some("decode"));
    starting["status"] = json!({"phase": "Pending"});
    let found = listed(&[failed, done, evicted, starting].map(object));
    assert_eq!(names(&found), [] as [&str; 0]);
    let strange = endpoints(
        &pool(&[8000]),
        &[pod("odd", "not-an-address", "decode")],
        &discovery(),
    );
    assert!(strange.pods.is_empty());
    assert_eq!(
        strange.warnings[0].to_string(),
        "pod odd: status.podIP: expected an address, found \"not-an-address\""
    );
}

#[test]
fn a_pod_of_other_labels_is_no_pod_of_the_pool() {
    let mut other = sent("other", "10.0.0.1", Some("decode"));
    other["metadata"]["labels"]["app"] = json!("web");
    assert!(listed(&[object(other)]).is_empty());
}

#[test]
fn of_two_pods_with_one_address_the_usable_one_counts() {
    let mut old = sent("a-old", "10.0.0.1", Some("decode"));
    old["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    let found = listed(&[object(old), pod("b-new", "10.0.0.1", "decode")]);
    let roster = Roster::new();
    let changes = roster.apply(found);
    assert_eq!(&*changes.added[0].spec.name, "b-new");
    assert_eq!(&*changes.refused[0].name, "a-old");
}

#[test]
fn annotations_say_what_differs_from_pod_to_pod() {
    let mut value = sent("a", "10.0.0.1", Some("decode"));
    value["metadata"]["annotations"] = json!({
        "sidestep.dev/models": "m1, m2",
        "sidestep.dev/adapters": "lora",
        "sidestep.dev/local-prefill": "unable",
        "sidestep.dev/block-size": "64",
        "sidestep.dev/kv-blocks": "1000",
        "sidestep.dev/prefill-tokens": "4096",
        "other.example/kv-blocks": "1",
    });
    let object = object(value);
    assert_eq!(object.metadata.annotations.len(), 6, "others are dropped");
    let found = listed(&[object]);
    assert_eq!(
        found[0].models,
        [ModelName::from("m1"), ModelName::from("m2")]
    );
    assert_eq!(found[0].adapters, [ModelName::from("lora")]);
    assert_eq!(found[0].local_prefill, LocalPrefill::Unable);
    assert_eq!(found[0].block_size, BlockSize::new(64));
    assert_eq!(found[0].kv_blocks, Some(Blocks(1000)));
    assert_eq!(found[0].prefill_batch_tokens, Some(Tokens(4096)));
}

#[test]
fn an_annotation_that_cannot_be_meant_is_named_and_changes_nothing() {
    for (key, text) in [
        ("kv-blocks", "many"),
        ("kv-blocks", "0"),
        ("block-size", "70000"),
        ("prefill-tokens", "-1"),
        ("local-prefill", "yes"),
        ("models", "a,,b"),
        ("adapters", ""),
    ] {
        let mut value = sent("a", "10.0.0.1", Some("decode"));
        value["metadata"]["annotations"] = json!({format!("sidestep.dev/{key}"): text});
        let found = endpoints(&pool(&[8000]), &[object(value)], &discovery());
        assert_eq!(
            found.pods,
            listed(&[pod("a", "10.0.0.1", "decode")]),
            "{key}"
        );
        let said = found.warnings[0].to_string();
        assert!(
            said.contains(&format!("annotation sidestep.dev/{key}: expected ")),
            "{said}"
        );
        assert!(said.ends_with(&format!("found {text:?}")), "{said}");
    }
}

#[test]
fn a_pool_that_can_mean_no_set_of_pods_is_refused() {
    let none: [(&str, &str); 0] = [];
    let fault = |labels: &[(&str, &str)], ports: &[u32]| {
        Pool::new(&pool_object(labels, ports).spec).unwrap_err()
    };
    assert_eq!(fault(&none, &[8000]), PoolFault::EmptySelector);
    assert_eq!(fault(&[("a", "b")], &[]), PoolFault::Ports(0));
    assert_eq!(fault(&[("a", "b")], &[1; 9]), PoolFault::Ports(9));
    assert_eq!(fault(&[("a", "b")], &[0]), PoolFault::Port(0));
    assert_eq!(fault(&[("a", "b")], &[70_000]), PoolFault::Port(70_000));
    assert_eq!(fault(&[("a", "b")], &[8000, 8000]), PoolFault::Port(8000));
    assert_eq!(
        Pool::new(&pool_object(&[("b", "2"), ("a", "1")], &[1]).spec)
            .unwrap()
            .selector(),
        "a=1,b=2"
    );
}

#[test]
fn nothing_is_given_out_before_pool_and_pods_were_heard_as_a_whole() {
    let mut picture = Picture::new(discovery());
    assert!(picture.endpoints().is_none());
    let step = picture.pool(Heard::Listed(vec![pool_object(
        &[("app", "engine")],
        &[8000],
    )]));
    assert_eq!(step.follow, Follow::Selector("app=engine".to_owned()));
    assert!(picture.endpoints().is_none());
    picture.pods(Heard::Applied(pod("early", "10.0.0.9", "decode")));
    assert!(picture.endpoints().is_none(), "no list has come");
    picture.pods(Heard::Listed(vec![pod("a", "10.0.0.1", "decode")]));
    let (pods, _) = picture.endpoints().unwrap();
    assert_eq!(names(&pods), ["a=10.0.0.1:8000"]);
}

#[test]
fn a_changed_pool_never_mixes_its_pods_with_those_of_the_old_one() {
    let mut picture = Picture::new(discovery());
    picture.pool(Heard::Listed(vec![pool_object(
        &[("app", "engine")],
        &[8000],
    )]));
    picture.pods(Heard::Listed(vec![pod("a", "10.0.0.1", "decode")]));
    // While the pods are listed anew, the pool changes: what was given out stays until the pods of the
    // new selector are known as a whole.
    let step = picture.pool(Heard::Applied(pool_object(&[("app", "other")], &[8001])));
    assert_eq!(step.follow, Follow::Selector("app=other".to_owned()));
    assert!(picture.endpoints().is_none());
    let mut other = sent("b", "10.0.0.2", Some("decode"));
    other["metadata"]["labels"]["app"] = json!("other");
    picture.pods(Heard::Listed(vec![
        object(other),
        pod("a", "10.0.0.1", "decode"),
    ]));
    let (pods, _) = picture.endpoints().unwrap();
    assert_eq!(names(&pods), ["b=10.0.0.2:8001"]);
}

#[test]
fn other_ports_need_no_new_list() {
    let mut picture = Picture::new(discovery());
    picture.pool(Heard::Listed(vec![pool_object(
        &[("app", "engine")],
        &[8000],
    )]));
    picture.pods(Heard::Listed(vec![pod("a", "10.0.0.1", "decode")]));
    let step = picture.pool(Heard::Applied(pool_object(&[("app", "engine")], &[9000])));
    assert_eq!(step.follow, Follow::Same);
    assert_eq!(names(&picture.endpoints().unwrap().0), ["a=10.0.0.1:9000"]);
}

#[test]
fn a_deleted_pool_has_no_pods_and_a_new_one_has_them_again() {
    let mut picture = Picture::new(discovery());
    let own = || pool_object(&[("app", "engine")], &[8000]);
    picture.pool(Heard::Listed(vec![own()]));
    picture.pods(Heard::Listed(vec![pod("a", "10.0.0.1", "decode")]));
    let step = picture.pool(Heard::Deleted(own()));
    assert_eq!(step.follow, Follow::Nothing);
    assert!(picture.endpoints().unwrap().0.is_empty());
    assert!(picture.pool_is_absent());
    let step = picture.pool(Heard::Applied(own()));
    assert_eq!(step.follow, Follow::Selector("app=engine".to_owned()));
    picture.pods(Heard::Listed(vec![pod("a", "10.0.0.1", "decode")]));
    assert_eq!(picture.endpoints().unwrap().0.len(), 1);
}

#[test]
fn a_pool_that_is_refused_leaves_the_last_one_in_force() {
    let mut picture = Picture::new(discovery());
    picture.pool(Heard::Listed(vec![pool_object(
        &[("app", "engine")],
        &[8000],
    )]));
    picture.pods(Heard::Listed(vec![pod("a", "10.0.0.1", "decode")]));
    let step = picture.pool(Heard::Applied(pool_object(&[], &[8000])));
    assert_eq!(step.fault, Some(PoolFault::EmptySelector));
    assert_eq!(step.follow, Follow::Same);
    assert_eq!(picture.endpoints().unwrap().0.len(), 1);
}

#[test]
fn another_pool_of_the_namespace_changes_nothing() {
    let mut picture = Picture::new(discovery());
    picture.pool(Heard::Listed(vec![pool_object(
        &[("app", "engine")],
        &[8000],
    )]));
    picture.pods(Heard::Listed(vec![pod("a", "10.0.0.1", "decode")]));
    let mut other = pool_object(&[("app", "web")], &[1]);
    other.metadata.name = Arc::from("other");
    assert_eq!(
        picture.pool(Heard::Applied(other.clone())).follow,
        Follow::Same
    );
    assert_eq!(picture.pool(Heard::Deleted(other)).follow, Follow::Same);
    assert_eq!(picture.endpoints().unwrap().0.len(), 1);
}

#[test]
fn a_new_list_drops_a_pod_whose_deletion_was_missed() {
    let mut picture = Picture::new(discovery());
    picture.pool(Heard::Listed(vec![pool_object(
        &[("app", "engine")],
        &[8000],
    )]));
    picture.pods(Heard::Listed(vec![
        pod("a", "10.0.0.1", "decode"),
        pod("b", "10.0.0.2", "decode"),
    ]));
    picture.pods(Heard::Listed(vec![pod("b", "10.0.0.2", "decode")]));
    assert_eq!(names(&picture.endpoints().unwrap().0), ["b=10.0.0.2:8000"]);
}

#[test]
fn a_late_deletion_does_not_remove_the_namesake_that_came_after() {
    let mut picture = Picture::new(discovery());
    picture.pool(Heard::Listed(vec![pool_object(
        &[("app", "engine")],
        &[8000],
    )]));
    let first = pod("a", "10.0.0.1", "decode");
    picture.pods(Heard::Listed(vec![first.clone()]));
    let mut second = sent("a", "10.0.0.2", Some("decode"));
    second["metadata"]["uid"] = json!("second");
    picture.pods(Heard::Applied(object(second)));
    picture.pods(Heard::Deleted(first));
    assert_eq!(names(&picture.endpoints().unwrap().0), ["a=10.0.0.2:8000"]);
}

#[test]
fn a_warning_is_given_once_while_it_holds() {
    let mut picture = Picture::new(discovery());
    picture.pool(Heard::Listed(vec![pool_object(
        &[("app", "engine")],
        &[8000],
    )]));
    picture.pods(Heard::Listed(vec![pod("p", "10.0.0.1", "encode")]));
    assert_eq!(picture.endpoints().unwrap().1.len(), 1);
    picture.pods(Heard::Applied(pod("d", "10.0.0.2", "decode")));
    assert_eq!(picture.endpoints().unwrap().1.len(), 0);
    picture.pods(Heard::Applied(pod("p", "10.0.0.1", "decode")));
    assert_eq!(picture.endpoints().unwrap().1.len(), 0);
    picture.pods(Heard::Applied(pod("p", "10.0.0.1", "encode")));
    assert_eq!(picture.endpoints().unwrap().1.len(), 1);
}

#[test]
fn a_flipped_role_and_readiness_keep_the_incarnation() {
    let roster = Roster::new();
    roster.apply(listed(&[pod("a", "10.0.0.1", "prefill")]));
    let before = roster.view().pods[0].id;
    let mut flipped = sent("a", "10.0.0.1", Some("decode"));
    flipped["status"]["conditions"][1]["status"] = json!("False");
    let changes = roster.apply(listed(&[object(flipped)]));
    assert_eq!(changes.respecified.len(), 1);
    let pod = Arc::clone(&roster.view().pods[0]);
    assert_eq!(pod.id, before);
    assert_eq!(pod.spec.role, Role::Decode);
    assert_eq!(
        pod.availability(),
        sidestep::decide::snapshot::Availability::NotReady
    );
}

#[test]
fn a_policy_object_is_a_document_of_its_own() {
    let object: PolicyObject = serde_json::from_value(json!({
        "metadata": {"name": "p", "uid": "u", "resourceVersion": "3", "generation": 2,
                     "creationTimestamp": "2026-01-01T00:00:00Z", "managedFields": [{"x": 1}]},
        "spec": {
            "targetRef": {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "pool"},
            "rules": [{"bypass": {"type": "Always"}}],
        },
        "status": {"conditions": []},
    }))
    .unwrap();
    assert_eq!(object.target.as_deref(), Some("pool"));
    assert_eq!(object.metadata.generation, 2);
    let loaded = sidestep::config::parse_policy(&object.document, "policy".as_ref()).unwrap();
    assert_eq!(&*loaded.policy.name, "p");
    assert_eq!(&*loaded.target.unwrap().name, "pool");
}
