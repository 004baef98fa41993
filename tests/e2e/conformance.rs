//! The conformance tests of the Gateway API Inference Extension that involve an endpoint picker, made
//! anew as black-box tests through a real Envoy.
//!
//! Lives here: GatewayFollowingEPPRouting, the same with data parallelism, GatewayDestinationEndpointServed,
//! the picker's part of GatewayWeightedAcrossTwoInferencePools (a pool's picker drops what is not its own),
//! and what happens with no endpoint and without a picker.
//! Never here: what only a gateway can answer for.

use crate::recorder::{Answer, Recorder};
use crate::stack::{Setup, Stack, eventually, recorded};
use http::{Request, StatusCode};
use sidestep::extproc::conformance::{SELECTION, SERVED_ECHO};
use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};

const SWITCH: &str = "\ndataPlane: {conformance: Enabled}\n";
/// Requests per case, as in the original, of which 10 run at a time.
const REQUESTS: usize = 100;

/// Three addresses with some ports each: an endpoint per rank.
async fn endpoints(ranks: usize) -> Vec<Recorder> {
    let mut pods = Vec::new();
    for host in 1..=3 {
        for _ in 0..ranks {
            let ip = Ipv4Addr::new(127, 0, 0, host);
            pods.push(Recorder::start_at(ip, Answer::Json).await);
        }
    }
    pods
}

fn setup(pods: &[Recorder]) -> Setup {
    let pods = pods.iter().enumerate();
    let pods = pods.map(|(index, pod)| recorded(&format!("pod-{index}"), "decode", pod));
    let mut setup = Setup::new(pods.collect());
    setup.sections = SWITCH.to_owned();
    setup
}

/// Sends the requests of a case; which endpoints the picker says served them.
async fn served(stack: &Stack, selection: &str) -> BTreeSet<SocketAddr> {
    let mut all = BTreeSet::new();
    for _ in 0..REQUESTS / 10 {
        let batch = (0..10).map(|_| async {
            let request = Request::get(stack.url("/")).header(SELECTION, selection);
            let response = stack.send(request, "").await;
            assert_eq!(response.status(), StatusCode::OK, "{selection}");
            let echo = response.headers().get(SERVED_ECHO).expect("the echo");
            echo.to_str().unwrap().parse().unwrap()
        });
        all.extend::<Vec<SocketAddr>>(futures_util::future::join_all(batch).await);
    }
    all
}

/// Which of the pods got a request since the last look, each without the test's header.
fn reached(pods: &mut [Recorder]) -> BTreeSet<SocketAddr> {
    let mut reached = BTreeSet::new();
    for pod in pods {
        while let Some(seen) = pod.arrived() {
            assert_eq!(seen.all(SELECTION), [] as [String; 0]);
            reached.insert(pod.address);
        }
    }
    reached
}

/// Every case: a selection, and the endpoints it allows. All of them are reached, and no other.
async fn follows(stack: &Stack, pods: &mut [Recorder], cases: &[(String, BTreeSet<SocketAddr>)]) {
    for (selection, allowed) in cases {
        let echoed = served(stack, selection).await;
        let reached = reached(pods);
        assert_eq!(&reached, allowed, "{selection}");
        assert_eq!(echoed, reached, "{selection}");
    }
}

fn set(addresses: impl IntoIterator<Item = SocketAddr>) -> BTreeSet<SocketAddr> {
    addresses.into_iter().collect()
}

#[tokio::test]
async fn the_gateway_follows_lists_of_one_two_and_three_endpoints() {
    let mut pods = endpoints(1).await;
    let stack = Stack::start(setup(&pods)).await;
    let at: Vec<SocketAddr> = pods.iter().map(|pod| pod.address).collect();
    let case = |chosen: &[usize]| {
        let ips: Vec<String> = chosen.iter().map(|pod| at[*pod].ip().to_string()).collect();
        (ips.join(","), set(chosen.iter().map(|pod| at[*pod])))
    };
    let cases = [case(&[0]), case(&[2]), case(&[0, 1]), case(&[0, 1, 2])];
    follows(&stack, &mut pods, &cases).await;
}

#[tokio::test]
async fn the_gateway_follows_ranks_by_address_and_by_address_and_port() {
    let mut pods = endpoints(3).await;
    let stack = Stack::start(setup(&pods)).await;
    let at: Vec<SocketAddr> = pods.iter().map(|pod| pod.address).collect();
    let cases = [
        // An address alone allows each of its ranks.
        (at[0].ip().to_string(), set(at[..3].to_vec())),
        (
            format!("{},{}", at[3].ip(), at[6].ip()),
            set(at[3..].to_vec()),
        ),
        // With its port, exactly that rank.
        (at[4].to_string(), set([at[4]])),
        (format!("{}, {}", at[1], at[8]), set([at[1], at[8]])),
        (
            format!("{},{}", at[2], at[3].ip()),
            set([at[2], at[3], at[4], at[5]]),
        ),
    ];
    follows(&stack, &mut pods, &cases).await;
}

#[tokio::test]
async fn without_the_switch_a_client_neither_chooses_nor_learns_its_endpoint() {
    let mut pods = endpoints(1).await;
    let mut setup = setup(&pods);
    setup.sections.clear();
    let stack = Stack::start(setup).await;
    let only = pods[0].address.ip().to_string();
    for _ in 0..REQUESTS {
        let request = Request::get(stack.url("/")).header(SELECTION, &only);
        let response = stack.send(request, "").await;
        assert_eq!(response.status(), StatusCode::OK);
        assert!(!response.headers().contains_key(SERVED_ECHO));
    }
    let all = set(pods.iter().map(|pod| pod.address));
    assert_eq!(reached(&mut pods), all);
}

#[tokio::test]
async fn a_picker_drops_what_the_gateway_does_not_allow_and_what_is_not_of_its_pool() {
    let mut pods = endpoints(1).await;
    let at: Vec<SocketAddr> = pods.iter().map(|pod| pod.address).collect();
    let mut setup = setup(&pods);
    setup.filters = format!(
        r#"          - name: envoy.filters.http.set_metadata
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config
              metadata:
              - metadata_namespace: envoy.lb.subset_hint
                value: {{x-gateway-destination-endpoint-subset: "{},{}"}}
"#,
        at[0], at[1]
    );
    let stack = Stack::start(setup).await;
    // The union of two pools' endpoints, one of which the gateway does not allow here.
    let union = format!("{},{},10.255.0.1,10.255.0.2:3000", at[1].ip(), at[2].ip());
    follows(&stack, &mut pods, &[(union, set([at[1]]))]).await;
}

#[tokio::test]
async fn without_an_endpoint_or_a_picker_the_client_gets_503() {
    let mut pods = endpoints(1).await;
    let mut stack = Stack::start(setup(&pods)).await;
    for selection in ["10.255.0.1", "10.255.0.1:3000", ""] {
        let request = Request::get(stack.url("/")).header(SELECTION, selection);
        let (status, _) = stack.ask(request, "").await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{selection:?}");
    }
    stack.kill_picker().await;
    eventually("Envoy refuses for want of a picker", async || {
        let (status, _) = stack.ask(Request::get(stack.url("/")), "").await;
        assert_ne!(status, StatusCode::OK, "it fails closed");
        (status == StatusCode::SERVICE_UNAVAILABLE).then_some(())
    })
    .await;
    assert_eq!(reached(&mut pods), set([]));
    stack.restart_picker();
    stack.wait_until_ready().await;
    eventually("requests go through again", async || {
        let (status, _) = stack.ask(Request::get(stack.url("/")), "").await;
        (status == StatusCode::OK).then_some(())
    })
    .await;
}
