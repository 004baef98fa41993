//! Projection and selection beside reading loads and deciding.

use crate::dynamo::Dynamo;
use crate::facts::{Fleet, Half, Pod, Told, pods};
use crate::ours::{Ours, considered};
use crate::rounds::medians;
use std::cell::RefCell;
use std::hint::black_box;

/// Median nanoseconds of one call.
struct Row {
    project: f64,
    select: f64,
    dynamo: f64,
    anew: f64,
    read: f64,
    decide: f64,
    ours: f64,
}

impl Row {
    /// Of ours to Dynamo's, its maps kept or new.
    fn ratios(&self) -> [f64; 2] {
        [self.dynamo, self.anew].map(|dynamo| self.ours / dynamo)
    }
}

/// Prints the table; the ratios at 1,000 pods.
pub fn run() -> Vec<(String, f64)> {
    println!("Kernel: one request, both halves. Microseconds, medians of alternating rounds.");
    println!(
        "{:>6} {:>6} {:>7} | {:>8} {:>8} {:>8} {:>8} | {:>8} {:>8} {:>8} | {:>11} {:>9}",
        "pods",
        "fleet",
        "told",
        "project",
        "select",
        "dynamo",
        "new maps",
        "read",
        "decide",
        "ours",
        "ours/dynamo",
        "/new maps"
    );
    let mut at_thousand = Vec::new();
    for told in [Told::Loads, Told::Blocks] {
        for fleet in [Fleet::Split, Fleet::Both] {
            for count in [8, 64, 256, 1_000] {
                let row = measure(count, fleet, told);
                let [kept, new] = row.ratios();
                let name = [format!("{fleet:?}"), format!("{told:?}")].map(|s| s.to_lowercase());
                let micro = |nanos: f64| format!("{:>8.2}", nanos / 1e3);
                println!(
                    "{count:>6} {:>6} {:>7} | {} {} {} {} | {} {} {} | {kept:>11.3} {new:>9.3}",
                    name[0],
                    name[1],
                    micro(row.project),
                    micro(row.select),
                    micro(row.dynamo),
                    micro(row.anew),
                    micro(row.read),
                    micro(row.decide),
                    micro(row.ours),
                );
                if count == 1_000 {
                    at_thousand.push((name.join(", "), kept));
                }
            }
        }
    }
    at_thousand
}

fn measure(count: u16, fleet: Fleet, told: Told) -> Row {
    let pods = pods(count, fleet);
    let (mut dynamo, mut ours) = (Dynamo::new(&pods, told), Ours::new(&pods, told));
    agree(&pods, &mut dynamo, &mut ours);
    let (dynamo, ours) = (RefCell::new(dynamo), RefCell::new(ours));
    let calls = (4_000 / usize::from(count)).max(1);
    let [project, select, both, anew, read, decide, all] = medians(
        calls,
        [
            &mut |_| dynamo.borrow_mut().project(),
            &mut |_| {
                black_box(dynamo.borrow().select());
            },
            &mut |_| {
                black_box(dynamo.borrow_mut().route());
            },
            &mut |_| {
                black_box(dynamo.borrow_mut().route_anew());
            },
            &mut |_| ours.borrow_mut().read(),
            &mut |draw| {
                black_box(ours.borrow_mut().decide(draw));
            },
            &mut |draw| {
                black_box(ours.borrow_mut().route(draw));
            },
        ],
    );
    Row {
        project,
        select,
        dynamo: both,
        anew,
        read,
        decide,
        ours: all,
    }
}

/// Both sides read the same loads; where both weigh the same things they choose equally good pods.
/// On a pod of both roles sidestep's prefill counts what decodes there, which Dynamo's does not.
fn agree(pods: &[Pod], dynamo: &mut Dynamo, ours: &mut Ours) {
    let theirs = dynamo.route();
    let ours_chose = considered(&ours.route(1));
    for pod in pods {
        assert_eq!(ours.load(pod), dynamo.load(pod), "loads of pod {}", pod.id);
        let prefills = u64::from(pod.prefill_tokens());
        assert!(!pod.prefills || ours.load(pod)[1] == prefills);
        assert!(!pod.decodes || ours.load(pod)[2] == u64::from(pod.blocks()));
    }
    let cost = |id: u64, half| pods[id as usize].cost(half);
    let least = |half| {
        let costs = pods.iter().filter(|pod| pod.takes(half));
        costs.map(|pod| pod.cost(half)).fold(f64::MAX, f64::min)
    };
    for (id, half) in [
        (theirs.0, Half::Prefill),
        (theirs.1, Half::Decode),
        (ours_chose.1, Half::Decode),
    ] {
        assert_eq!(cost(id, half), least(half), "{half:?} chose pod {id}");
    }
    if pods.iter().all(|pod| pod.prefills != pod.decodes) {
        assert_eq!(cost(ours_chose.0, Half::Prefill), least(Half::Prefill));
    }
}
