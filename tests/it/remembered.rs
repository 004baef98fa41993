//! What is remembered of decisions is bounded whatever clients and clusters do, and what is held is let go.

use crate::telemetry_support::{completion, head, pod, policy, remote_policy, rig};
use sidestep::decide::ask::{Subset, SubsetEntry};
use sidestep::decide::policy::Policy;
use sidestep::decide::snapshot::Role;
use sidestep::fleet::PodSpec;
use sidestep::names::{Endpoint, ModelName};
use sidestep::pick::recent::MOST_REMEMBERED;
use sidestep::pick::{Flight, Head, InShadow, Picker};
use sidestep::telemetry::trace::Tracing;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the memory of decisions may take.
const MOST_BYTES: usize = 32 << 20;

fn two_pods() -> Arc<Picker> {
    crate::telemetry_support::picker(policy(), &Tracing::Off)
}

async fn decide(picker: &Picker, head: Head) -> String {
    drop(picker.pick(head, completion("hello")).await.unwrap());
    picker.journal().after(0, 1000).last().unwrap().id.clone()
}

#[tokio::test]
async fn long_subsets_of_gateways_do_not_fill_the_memory() {
    let picker = two_pods();
    const ENTRIES: u16 = 10_000;
    let address = |port| Endpoint(SocketAddr::from(([127, 0, 0, 11], port)));
    for _ in 0..150 {
        let entries = (8000..8000 + ENTRIES).map(|port| SubsetEntry::Endpoint(address(port)));
        let subset = Subset::Only(entries.collect());
        let head = Head {
            subset,
            ..head(None, None)
        };
        decide(&picker, head).await;
    }
    let (_, remembered) = picker.hold(None);
    let each = usize::from(ENTRIES) * size_of::<SubsetEntry>();
    assert!(
        0 < remembered && remembered * each <= MOST_BYTES,
        "{remembered} of {each} bytes"
    );
}

#[tokio::test]
async fn lists_of_pods_that_are_gone_do_not_fill_the_memory() {
    const PODS: u16 = 400;
    const MODELS: usize = 400;
    let models: Vec<ModelName> = (0..MODELS)
        .map(|at| format!("m{at}").as_str().into())
        .collect();
    let list = |round: u32| -> Vec<PodSpec> {
        let one = |at: u16| {
            let [high, low] = at.to_be_bytes();
            PodSpec {
                models: if at == 0 {
                    models.clone()
                } else {
                    vec![ModelName::from("m")]
                },
                uid: if at == 0 {
                    round.to_string().into()
                } else {
                    "1".into()
                },
                ..pod(
                    &format!("d{at}"),
                    &format!("10.0.{high}.{low}:80"),
                    Role::Both,
                )
            }
        };
        (0..PODS).map(one).collect()
    };
    let picker = rig(policy(), &Tracing::Off, list(0));
    for round in 1..=300 {
        picker.observer().roster.apply(list(round));
        decide(&picker, head(None, None)).await;
    }
    let (_, remembered) = picker.hold(None);
    // Each list says of each model which pods serve it.
    let each = usize::from(PODS) * MODELS;
    assert!(
        0 < remembered && remembered * each <= MOST_BYTES,
        "{remembered} of {each} bytes"
    );
}

#[tokio::test]
async fn what_was_held_is_freed_when_its_time_is_over_whoever_asks_again() {
    let picker = two_pods();
    let id = decide(&picker, head(None, None)).await;
    let held = Arc::downgrade(&picker.record(&id).unwrap());
    let _ = picker.hold(None);
    let began = Instant::now();
    for _ in 0..MOST_REMEMBERED + 100 {
        decide(&picker, head(None, None)).await;
    }
    picker.end_holds(began + Duration::from_secs(590));
    assert!(picker.record(&id).is_some() && held.upgrade().is_some());
    picker.end_holds(began + Duration::from_secs(610));
    assert!(held.upgrade().is_none());
}

/// Opinions of the shadow that were counted.
fn opinions(picker: &Picker) -> u32 {
    let text = picker.metrics().encode();
    let family = "sidestep_shadow_decisions_total{";
    let lines = text.lines().filter(|line| line.starts_with(family));
    lines
        .map(|line| line.rsplit(' ').next().unwrap().parse::<u32>().unwrap())
        .sum()
}

fn named(name: &str) -> InShadow {
    InShadow::Policy(Policy {
        name: name.into(),
        ..remote_policy()
    })
}

fn shadow_of(picker: &Picker) -> serde_json::Value {
    let records = picker.journal().after(0, 1000);
    serde_json::to_value(records.last().unwrap()).unwrap()["shadow"]["policy"].clone()
}

#[tokio::test]
async fn an_opinion_is_counted_once_however_its_request_ends() {
    type End = fn(&Picker, Flight);
    let ends: [(&str, End); 7] = [
        ("dropped", |_, flight| drop(flight)),
        ("settled, then dropped", |_, mut flight| flight.settle()),
        ("settled twice, then over", |_, mut flight| {
            flight.settle();
            flight.settle();
            flight.finish();
        }),
        ("answered at once", |_, mut flight| {
            flight.response_headers(Some(200), None);
            flight.response_bytes(b"data");
            flight.finish();
        }),
        ("over", |_, flight| flight.finish()),
        ("another shadow meanwhile", |picker, mut flight| {
            picker.set_shadow(named("other"));
            flight.settle();
        }),
        ("no shadow any more", |picker, flight| {
            picker.set_shadow(InShadow::Nothing);
            flight.finish();
        }),
    ];
    for (how, end) in ends {
        let picker = two_pods();
        picker.set_shadow(named("shade"));
        let picked = picker
            .pick(head(None, None), completion("hello"))
            .await
            .unwrap();
        assert_eq!(
            shadow_of(&picker),
            serde_json::Value::Null,
            "{how}: not asked yet"
        );
        end(&picker, picked.flight);
        assert_eq!(opinions(&picker), 1, "{how}");
        assert_eq!(shadow_of(&picker), "shade", "{how}");
    }
    // Refused at once, so there is nothing to wait for.
    let prefill_only = vec![pod("p1", "127.0.0.21:8000", Role::Prefill)];
    let picker = rig(policy(), &Tracing::Off, prefill_only);
    picker.set_shadow(named("shade"));
    assert!(
        picker
            .pick(head(None, None), completion("hello"))
            .await
            .is_err()
    );
    assert_eq!(opinions(&picker), 1);
}

#[tokio::test]
async fn requests_on_their_way_keep_nothing_of_what_they_were_decided_from() {
    let picker = two_pods();
    picker.set_shadow(named("shade"));
    let seen = Arc::downgrade(&picker.observer().roster.view());
    let mut flights = Vec::new();
    for _ in 0..100 {
        let picked = picker
            .pick(head(None, None), completion("hello"))
            .await
            .unwrap();
        flights.push(picked.flight);
    }
    let other = vec![pod("d2", "127.0.0.12:8000", Role::Decode)];
    picker.observer().roster.apply(other);
    for _ in 0..=MOST_REMEMBERED {
        decide(&picker, head(None, None)).await;
    }
    assert!(seen.upgrade().is_some(), "the shadow was not asked");
    flights.iter_mut().for_each(Flight::settle);
    assert!(seen.upgrade().is_none());
}
