//! Requests through the gRPC service and the real picker: what reaches the pod, what is booked.

use crate::decide_fixture;
use crate::extproc_gateway::{Gateway, PATIENCE, http_body, http_headers, streamed, until};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Ask;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response as Answer;
use envoy_types::pb::envoy::service::ext_proc::v3::{HeaderMutation, ProcessingResponse};
use envoy_types::pb::google::protobuf::value::Kind;
use sidestep::decide::policy::{Bypass, OnNoPrefill};
use sidestep::decide::snapshot::{LocalPrefill, PodLoad, Role};
use sidestep::extproc::conformance::Conformance;
use sidestep::extproc::counters::Counters;
use sidestep::extproc::server::{Limits, Settings, Tls, serve, tls_material};
use sidestep::extproc::wire::MetadataKeys;
use sidestep::fleet::{Listed, PodSpec, Probe, Roster};
use sidestep::kv::index::Index;
use sidestep::load::Ledger;
use sidestep::names::{Endpoint, ModelName};
use sidestep::observe::{Observer, Sources};
use sidestep::pick::{InForce, Parts, Picker};
use sidestep::prompt::{Encoder, Profile, Profiles};
use sidestep::route::{Dialect, names};
use sidestep::telemetry::journal::Journal;
use sidestep::telemetry::metrics::Metrics;
use sidestep::telemetry::trace::Tracing;
use sidestep::units::BlockSize;
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::Barrier;
use tokio::task::{JoinHandle, JoinSet};
use tonic::transport::Channel;

const D1: &str = "127.0.0.11:8000";
const P1: &str = "127.0.0.21:8000";
const FORGED: &str = "169.254.169.254:80";
const PREFILLER: &str = names::PREFILLER;
const DESTINATION: &str = names::DESTINATION;

struct Bench {
    picker: Arc<Picker>,
    counters: Arc<Counters>,
    channel: Channel,
    task: JoinHandle<()>,
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn pod(endpoint: &str, role: Role) -> PodSpec {
    PodSpec {
        name: endpoint.into(),
        uid: endpoint.into(),
        endpoint: Endpoint(endpoint.parse().unwrap()),
        role,
        models: Vec::new(),
        adapters: Vec::new(),
        local_prefill: LocalPrefill::Able,
        kv_events: None,
        block_size: BlockSize::new(16),
        kv_blocks: None,
        prefill_batch_tokens: None,
        probe: Probe::Off,
        listed: Listed::Ready,
    }
}

impl Bench {
    async fn start(bypass: Bypass, pods: Vec<PodSpec>) -> Bench {
        let roster = Arc::new(Roster::new());
        roster.apply(pods);
        let model = Profile::byte_estimate(ModelName::from("m"), Vec::new());
        let picker = Arc::new(Picker::new(Parts {
            encoder: Encoder::new(Profiles::new(vec![model]).unwrap(), 1 << 20),
            observer: Observer::new(
                roster,
                Arc::new(Index::new(Default::default())),
                Arc::new(Sources::default()),
                BlockSize::new(16).unwrap(),
            ),
            ledger: Ledger::default(),
            in_force: InForce {
                policy: decide_fixture::policy([decide_fixture::rule(bypass)]),
                dialect: Dialect::DecodeFirst,
            },
            metrics: Metrics::new(),
            tracing: Tracing::Off,
            journal: Journal::new(64),
        }));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let counters = Arc::new(Counters::default());
        let settings = Settings {
            limits: Limits::default(),
            tls: tls_material(&Tls::Plaintext).unwrap(),
            metadata: MetadataKeys::default(),
            conformance: Conformance::Disabled,
            counters: Arc::clone(&counters),
        };
        let served = Arc::clone(&picker);
        let task = tokio::spawn(async move {
            serve(listener, served, settings, std::future::pending())
                .await
                .unwrap();
        });
        let channel = Channel::from_shared(format!("http://{address}"))
            .unwrap()
            .connect()
            .await
            .unwrap();
        Bench {
            picker,
            counters,
            channel,
            task,
        }
    }

    async fn pair(bypass: Bypass) -> Bench {
        Bench::start(bypass, vec![pod(D1, Role::Decode), pod(P1, Role::Prefill)]).await
    }

    async fn gateway(&self) -> Gateway {
        Gateway::duplex(&self.channel).await
    }

    /// What is booked on all pods together.
    fn booked(&self) -> (u32, u64, u32) {
        let view = self.picker.observer().roster.view();
        let loads = view
            .pods
            .iter()
            .map(|pod| self.picker.ledger().load(pod.id));
        loads.fold((0, 0, 0), |sum, load: PodLoad| {
            (
                sum.0 + load.requests,
                sum.1 + load.prefill_tokens.0,
                sum.2 + load.decode_blocks.0,
            )
        })
    }

    fn last_record(&self) -> serde_json::Value {
        let records = self.picker.journal().after(0, 64);
        let newest = records.iter().max_by_key(|record| record.sequence).unwrap();
        serde_json::to_value(&**newest).unwrap()
    }
}

/// A completion request whose prompt makes some hundred tokens.
fn prompt() -> Vec<u8> {
    let text = "word ".repeat(400);
    format!(r#"{{"model":"m","prompt":"{text}"}}"#).into_bytes()
}

fn ask(gateway: &Gateway, headers: &[(&str, &str)], body: &[u8]) {
    let mut all = vec![(":method", "POST"), (":path", "/v1/completions")];
    all.extend_from_slice(headers);
    gateway.tell(Ask::RequestHeaders(http_headers(&all, false)));
    gateway.tell(Ask::RequestBody(http_body(body, true)));
}

fn mutation(message: &ProcessingResponse) -> &HeaderMutation {
    match message.response.as_ref().unwrap() {
        Answer::RequestHeaders(reply) => reply.response.as_ref(),
        Answer::RequestBody(reply) => reply.response.as_ref(),
        other => panic!("{other:?}"),
    }
    .unwrap()
    .header_mutation
    .as_ref()
    .unwrap()
}

fn set(message: &ProcessingResponse, name: &str) -> Vec<String> {
    let headers = mutation(message).set_headers.iter();
    headers
        .filter_map(|option| option.header.as_ref())
        .filter(|header| header.key == name)
        .map(|header| String::from_utf8(header.raw_value.clone()).unwrap())
        .collect()
}

fn removed(message: &ProcessingResponse, name: &str) -> bool {
    mutation(message)
        .remove_headers
        .iter()
        .any(|header| header == name)
}

fn destination_metadata(message: &ProcessingResponse) -> String {
    let metadata = message.dynamic_metadata.as_ref().unwrap();
    let Some(Kind::StructValue(inner)) = &metadata.fields["envoy.lb"].kind else {
        panic!("{metadata:?}");
    };
    match &inner.fields[DESTINATION].kind {
        Some(Kind::StringValue(endpoint)) => endpoint.clone(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_bypass_removes_the_clients_prefill_pod() {
    let bench = Bench::pair(Bypass::Always).await;
    let mut gateway = bench.gateway().await;
    ask(&gateway, &[(PREFILLER, FORGED)], &prompt());
    let message = gateway.message().await;
    assert!(removed(&message, PREFILLER) && set(&message, PREFILLER).is_empty());
    assert_eq!(set(&message, names::BYPASS), ["policy_always"]);
    assert_eq!(set(&message, DESTINATION), [D1]);
}

#[tokio::test]
async fn a_remote_prefill_names_exactly_our_prefill_pod() {
    let bench = Bench::pair(Bypass::Never).await;
    let mut gateway = bench.gateway().await;
    ask(&gateway, &[(PREFILLER, FORGED)], &prompt());
    let message = gateway.message().await;
    assert_eq!(set(&message, PREFILLER), [P1]);
    assert!(!removed(&message, PREFILLER));
    assert_eq!(set(&message, DESTINATION), [D1]);
    assert!(removed(&message, names::BYPASS));
}

#[tokio::test]
async fn every_legal_prompt_shape_is_routed_and_counted() {
    let bench = Bench::pair(Bypass::Never).await;
    for (prompt, tokens, because) in [
        (r#""hi""#, 1, "policy_never"),
        (r#"["hi","there"]"#, 3, "several_sequences"),
        ("[1,15339,15339]", 3, "policy_never"),
        (r#""" "#, 0, "policy_never"),
        ("[[1,2],[3]]", 3, "several_sequences"),
        ("[]", 0, "policy_never"),
    ] {
        let mut gateway = bench.gateway().await;
        let body = format!(r#"{{"model":"m","prompt":{prompt}}}"#);
        ask(&gateway, &[], body.as_bytes());
        assert_eq!(set(&gateway.message().await, DESTINATION), [D1], "{prompt}");
        let record = bench.last_record();
        assert_eq!(record["prompt_tokens"], tokens, "{prompt}");
        assert_eq!(record["because"], because, "{prompt}");
    }
}

#[tokio::test]
async fn a_request_for_several_sequences_is_never_handed_over() {
    let bench = Bench::pair(Bypass::Never).await;
    for fields in [r#""n":2"#, r#""best_of":3"#, r#""n":2,"n":1,"best_of":2"#] {
        let mut gateway = bench.gateway().await;
        let body = format!(r#"{{"model":"m","prompt":"hi",{fields}}}"#);
        ask(&gateway, &[(PREFILLER, FORGED)], body.as_bytes());
        let message = gateway.message().await;
        assert!(removed(&message, PREFILLER), "{fields}");
        assert_eq!(set(&message, DESTINATION), [D1]);
        // The policy had no say in it, so it is no bypass.
        assert!(removed(&message, names::BYPASS), "{fields}");
    }
    let mut gateway = bench.gateway().await;
    ask(&gateway, &[], br#"{"model":"m","prompt":"hi","n":1}"#);
    assert_eq!(set(&gateway.message().await, PREFILLER), [P1]);
}

#[tokio::test]
async fn a_forged_destination_is_overwritten_in_header_and_metadata() {
    let bench = Bench::pair(Bypass::Always).await;
    for modes in [
        (BodySendMode::FullDuplexStreamed, BodySendMode::None),
        (BodySendMode::Buffered, BodySendMode::None),
    ] {
        let mut gateway = Gateway::open(&bench.channel, modes).await;
        ask(&gateway, &[(DESTINATION, "10.0.0.66:22")], &prompt());
        let mut message = gateway.message().await;
        if modes.0 == BodySendMode::Buffered {
            assert!(matches!(message.response, Some(Answer::RequestHeaders(_))));
            message = gateway.message().await;
        }
        assert_eq!(set(&message, DESTINATION), [D1]);
        assert_eq!(destination_metadata(&message), D1);
    }
}

#[tokio::test]
async fn requests_without_a_body_get_a_decode_pod_and_the_same_treatment() {
    let bench = Bench::pair(Bypass::Never).await;
    for method in ["GET", "HEAD", "OPTIONS"] {
        let mut gateway = bench.gateway().await;
        gateway.tell(Ask::RequestHeaders(http_headers(
            &[
                (":method", method),
                (":path", "/v1/models"),
                (DESTINATION, FORGED),
                (PREFILLER, FORGED),
            ],
            true,
        )));
        let message = gateway.message().await;
        assert_eq!(set(&message, DESTINATION), [D1]);
        assert_eq!(destination_metadata(&message), D1);
        assert!(removed(&message, PREFILLER));
    }
}

#[tokio::test]
async fn without_a_pod_the_client_gets_a_503_and_routing_nothing() {
    let bench = Bench::start(Bypass::Always, Vec::new()).await;
    let mut gateway = bench.gateway().await;
    ask(&gateway, &[(DESTINATION, FORGED)], &prompt());
    let message = gateway.message().await;
    assert!(message.dynamic_metadata.is_none());
    let Some(Answer::ImmediateResponse(immediate)) = message.response else {
        panic!("{message:?}");
    };
    assert_eq!(immediate.status.unwrap().code, 503);
    assert!(!String::from_utf8(immediate.body).unwrap().contains(FORGED));
}

#[tokio::test]
async fn only_generations_that_were_served_count_as_times_to_the_first_bytes() {
    let bench = Bench::pair(Bypass::Always).await;
    let timed = || {
        bench
            .picker
            .metrics()
            .encode()
            .contains("first_bytes_seconds_count")
    };
    let answer = async |status: &str, generation: bool| {
        let mut gateway = bench.gateway().await;
        match generation {
            true => ask(&gateway, &[], &prompt()),
            false => gateway.headers("GET", "/v1/models", true),
        }
        gateway.message().await;
        let headers = http_headers(&[(":status", status)], false);
        gateway.tell(Ask::ResponseHeaders(headers));
        gateway.tell(Ask::ResponseBody(http_body(b"{}", true)));
        until("the answer is over", || bench.booked().0 == 0).await;
    };
    answer("503", true).await;
    answer("200", false).await;
    assert!(!timed());
    answer("200", true).await;
    assert!(timed());
}

/// Report 26, as the client sees it: a policy that insists on remote prefill says what it lacks.
#[tokio::test]
async fn a_policy_that_insists_on_remote_prefill_refuses_until_a_prefill_pod_is_there() {
    let bench = Bench::start(Bypass::Never, vec![pod(D1, Role::Decode)]).await;
    let mut insists = InForce::clone(&bench.picker.in_force());
    insists.policy.rules[0].on_no_prefill = OnNoPrefill::Fail;
    bench.picker.set_policy(insists);
    let mut refused = bench.gateway().await;
    ask(&refused, &[(PREFILLER, FORGED)], &prompt());
    let refusal = refused.refusal().await;
    assert_eq!(refusal.status.unwrap().code, 503);
    assert_eq!(refusal.details, "no_prefill_pod");
    assert!(String::from_utf8(refusal.body).unwrap().contains("prefill"));
    assert_eq!(bench.booked(), (0, 0, 0));

    let roster = &bench.picker.observer().roster;
    roster.apply(vec![pod(D1, Role::Decode), pod(P1, Role::Prefill)]);
    let mut served = bench.gateway().await;
    ask(&served, &[(PREFILLER, FORGED)], &prompt());
    assert_eq!(set(&served.message().await, PREFILLER), [P1]);
}

#[tokio::test]
async fn the_gateways_subset_is_never_left() {
    let bench = Bench::pair(Bypass::Always).await;
    let mut inside = bench.gateway().await;
    inside.metadata("envoy.lb.subset_hint", names::SUBSET, "127.0.0.11");
    ask(&inside, &[], &prompt());
    assert_eq!(set(&inside.message().await, DESTINATION), [D1]);
    for subset in ["127.0.0.99:8000", ""] {
        let mut outside = bench.gateway().await;
        outside.metadata("envoy.lb.subset_hint", names::SUBSET, subset);
        ask(&outside, &[], &prompt());
        assert_eq!(outside.refusal().await.status.unwrap().code, 503);
    }
}

/// The gateway sends a request to the pod that prefills when that comes first, and so does its subset
/// hold; otherwise nobody but the decode pod talks to it.
#[tokio::test]
async fn a_prefill_pod_outside_the_subset_is_used_only_where_the_gateway_does_not_send_to_it() {
    let bench = Bench::pair(Bypass::Never).await;
    let within = async |subset: &str| {
        let mut gateway = bench.gateway().await;
        gateway.metadata("envoy.lb.subset_hint", names::SUBSET, subset);
        ask(&gateway, &[], &prompt());
        gateway.message().await
    };
    let answer = within(D1).await;
    assert_eq!(set(&answer, DESTINATION), [D1]);
    assert_eq!(set(&answer, PREFILLER), [P1]);

    let mut prefill_first = InForce::clone(&bench.picker.in_force());
    prefill_first.dialect = Dialect::PrefillFirst;
    bench.picker.set_policy(prefill_first);
    let answer = within(D1).await;
    assert_eq!(set(&answer, DESTINATION), [D1]);
    assert_eq!(destination_metadata(&answer), D1);
    assert!(set(&answer, names::DECODER).is_empty());
    let answer = within("127.0.0.11,127.0.0.21").await;
    assert_eq!(set(&answer, DESTINATION), [P1]);
    assert_eq!(set(&answer, names::DECODER), [D1]);
}

#[tokio::test]
async fn a_body_that_is_no_json_is_a_400_that_does_not_repeat_it() {
    let bench = Bench::pair(Bypass::Always).await;
    let mut gateway = bench.gateway().await;
    ask(&gateway, &[], br#"{"model":"m","prompt":"SECRET-4711","#);
    let refusal = gateway.refusal().await;
    assert_eq!(refusal.status.unwrap().code, 400);
    assert!(!String::from_utf8(refusal.body).unwrap().contains("4711"));
}

#[tokio::test]
async fn a_gzip_body_is_counted_as_its_text_is() {
    let bench = Bench::pair(Bypass::Always).await;
    let mut plain = bench.gateway().await;
    ask(&plain, &[], &prompt());
    let expected = set(&plain.message().await, DESTINATION);
    let tokens = bench.last_record()["prompt_tokens"].clone();
    assert!(0 < tokens.as_u64().unwrap());

    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(&prompt()).unwrap();
    let compressed = encoder.finish().unwrap();
    let mut gateway = bench.gateway().await;
    ask(&gateway, &[("content-encoding", "gzip")], &compressed);
    assert_eq!(set(&gateway.message().await, DESTINATION), expected);
    assert_eq!(bench.last_record()["prompt_tokens"], tokens);
    assert_eq!(
        crate::extproc_gateway::streamed(gateway.answer().await),
        (compressed, true)
    );
}

#[tokio::test]
async fn an_end_of_stream_that_comes_twice_books_once() {
    let bench = Bench::pair(Bypass::Never).await;
    let mut gateway = bench.gateway().await;
    ask(&gateway, &[], &prompt());
    gateway.tell(Ask::RequestBody(http_body(&prompt(), true)));
    gateway.tell(Ask::RequestBody(http_body(b"", true)));
    assert!(matches!(gateway.answer().await, Answer::RequestHeaders(_)));
    let (back, end) = crate::extproc_gateway::streamed(gateway.answer().await);
    assert!(end && back == prompt());
    until("the repeats were seen", || {
        bench.counters.ignored_messages.get() == 2
    })
    .await;
    assert_eq!(bench.picker.journal().after(0, 64).len(), 1);
    let first = bench.booked();
    assert!(0 < first.0 && 0 < first.1);
    drop(gateway);
    until("the booking is released", || bench.booked() == (0, 0, 0)).await;
}

#[tokio::test]
async fn nothing_stays_booked_wherever_a_stream_breaks_off() {
    let bench = Bench::pair(Bypass::Never).await;
    let mut streams = Vec::new();
    for at in 0..60 {
        let mut gateway = bench.gateway().await;
        match at % 6 {
            0 => gateway.headers("POST", "/v1/completions", false),
            1 => {
                gateway.headers("POST", "/v1/completions", false);
                gateway.body(b"{", false);
            }
            step => {
                ask(&gateway, &[], &prompt());
                gateway.answer().await;
                gateway.answer().await;
                if 3 <= step {
                    gateway.respond();
                    gateway.answer().await;
                }
                if 4 <= step {
                    gateway.tell(Ask::ResponseBody(http_body(b"data: {}\n\n", false)));
                    gateway.answer().await;
                }
                if 5 <= step {
                    gateway.tell(Ask::ResponseBody(http_body(b"data: [DONE]\n\n", false)));
                    gateway.answer().await;
                }
            }
        }
        streams.push(gateway);
    }
    assert!(0 < bench.booked().0);
    drop(streams);
    until("nothing is booked", || {
        bench.booked() == (0, 0, 0) && bench.counters.open_streams() == 0
    })
    .await;
}

#[tokio::test]
async fn a_finished_response_releases_its_load_and_the_client_learns_the_decision() {
    let bench = Bench::pair(Bypass::Never).await;
    let mut gateway = bench.gateway().await;
    ask(&gateway, &[], &prompt());
    let id = set(&gateway.message().await, names::DECISION);
    gateway.answer().await;
    gateway.respond();
    let Answer::ResponseHeaders(reply) = gateway.answer().await else {
        panic!();
    };
    let told = reply.response.unwrap().header_mutation.unwrap();
    let told = told.set_headers[0].header.clone().unwrap();
    assert_eq!(told.key, names::DECISION);
    assert_eq!(vec![String::from_utf8(told.raw_value).unwrap()], id);
    gateway.tell(Ask::ResponseBody(http_body(b"{}", true)));
    gateway.answer().await;
    until("the booking is released", || bench.booked() == (0, 0, 0)).await;
    let record = bench.last_record();
    assert_eq!(record["id"].as_str(), Some(id[0].as_str()));
    assert_eq!(record["status"], 200);
}

/// Report 3 (b): the body comes at once although the gateway says that it waits for an answer.
#[tokio::test]
async fn a_body_that_comes_unasked_is_served_whatever_the_gateway_says_of_waiting() {
    let bench = Bench::pair(Bypass::Always).await;
    for does_not_wait in [false, true] {
        let mut gateway = bench.gateway().await;
        gateway.does_not_wait = does_not_wait;
        ask(&gateway, &[], &prompt());
        assert_eq!(set(&gateway.message().await, DESTINATION), [D1]);
        let (body, end) = streamed(gateway.answer().await);
        assert_eq!((body, end), (prompt(), true));
        // The mode in which the flag has a meaning is refused with either value of it.
        let modes = (BodySendMode::Streamed, BodySendMode::Streamed);
        let mut refused = Gateway::open(&bench.channel, modes).await;
        refused.does_not_wait = does_not_wait;
        ask(&refused, &[], &prompt());
        let refusal = refused.refusal().await;
        assert_eq!(refusal.details, "unsupported_processing_mode");
    }
    assert_eq!(bench.counters.unsupported_processing_mode.get(), 2);
}

/// A gateway in `observability_mode` does what it likes with its request: nothing may be booked for it.
#[tokio::test]
async fn a_gateway_that_only_shows_its_requests_gets_no_answer_and_books_nothing() {
    let bench = Bench::pair(Bypass::Always).await;
    let modes = (BodySendMode::Streamed, BodySendMode::Streamed);
    let scripts: [fn(&Gateway); 3] = [
        |gateway| ask(gateway, &[], &prompt()),
        |gateway| gateway.headers("GET", "/v1/models", true),
        |gateway| gateway.body(&prompt(), true),
    ];
    for script in scripts {
        let mut gateway = Gateway::open(&bench.channel, modes).await;
        gateway.only_shows = true;
        script(&gateway);
        gateway.respond();
        let end = tokio::time::timeout(PATIENCE, gateway.answers.message()).await;
        assert!(end.unwrap().unwrap().is_none(), "an end with OK");
    }
    until("the streams are gone", || {
        bench.counters.open_streams() == 0
    })
    .await;
    assert_eq!(bench.counters.only_shown.get(), 3);
    assert!(bench.counters.refusals().is_empty());
    assert!(bench.picker.journal().after(0, 64).is_empty(), "no pick");
    assert_eq!(bench.booked(), (0, 0, 0));
    assert_eq!(bench.counters.leases.get(), 0);
}

/// Report 21: a burst of requests that score the same on every pod.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_on_equal_pods_is_spread_evenly_over_them() {
    const PODS: usize = 8;
    const REQUESTS: usize = 400;
    let pods = (0..PODS).map(|at| pod(&format!("127.0.0.{}:8000", 11 + at), Role::Decode));
    let bench = Arc::new(Bench::start(Bypass::Always, pods.collect()).await);
    let start = Arc::new(Barrier::new(REQUESTS));
    let mut burst = JoinSet::new();
    for _ in 0..REQUESTS {
        let (bench, start) = (Arc::clone(&bench), Arc::clone(&start));
        burst.spawn(async move {
            let mut gateway = bench.gateway().await;
            start.wait().await;
            ask(&gateway, &[], &prompt());
            let message = gateway.message().await;
            let [destination] = &set(&message, DESTINATION)[..] else {
                panic!("one destination, not {message:?}");
            };
            // The stream stays open: its response has not come.
            (destination.clone(), gateway)
        });
    }
    let running = burst.join_all().await;
    let mut spread = BTreeMap::<&str, u32>::new();
    for (destination, _) in &running {
        *spread.entry(destination).or_default() += 1;
    }
    assert_eq!(spread.len(), PODS, "{spread:?}");
    for count in spread.values() {
        assert!((45..=55).contains(count), "{spread:?}");
    }
    // What is booked is what was told.
    let view = bench.picker.observer().roster.view();
    for pod in &view.pods {
        let booked = bench.picker.ledger().load(pod.id).requests;
        assert_eq!(spread[&*pod.spec.name], booked);
    }
    drop(running);
    until("all load is released", || bench.booked() == (0, 0, 0)).await;
}
