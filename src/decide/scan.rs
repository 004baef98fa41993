//! One look at every pod: the inner loop of a selection.
//!
//! Lives here: [`open`], the choice among all eligible pods.
//! Never here: pins and sessions, which leave one pod (`select`); what a pod costs (`cost`).
//! Invariant: a pod is eligible here exactly where `View::check` says so, and costs what
//! `View::price` says; only the order of the work differs.

use crate::decide::cost::Sized;
use crate::decide::eligibility::Allowed;
use crate::decide::select::View;
use crate::decide::snapshot::{PodLoad, Serves, Serving};

/// Costs are compared so many at a time.
const LANES: usize = 4;

/// Position of the cheapest eligible pod, or of one drawn by cost when the policy has a temperature.
pub(super) fn open(view: &View<'_>, draw: u64) -> Option<usize> {
    let costs = costs(view);
    let least = least(&costs);
    if least == f64::INFINITY {
        return None;
    }
    let temperature = view.terms.scoring.temperature.get();
    if 0.0 < temperature {
        sampled(costs, least, temperature, draw)
    } else {
        fewest(&costs, least, view.snapshot.loads(), draw)
    }
}

/// What each pod costs; infinity for one that is not eligible.
fn costs(view: &View<'_>) -> Vec<f64> {
    let purpose = view.purpose;
    let uses = view.snapshot.board().uses();
    let members = view.snapshot.board().members();
    let usable = |at: usize| uses[at].allow(purpose);
    let (serves, terms) = (view.snapshot.serves(), view.terms);
    match (serves, &terms.allowed, terms.taken) {
        (Serving::All, Allowed::All, None) => priced(view, usable),
        (serves, allowed, taken) => priced(view, |at| {
            let pod = &members[at];
            usable(at)
                && serves.at(at) == Serves::Yes
                // The subset concerns destinations; see `check`.
                && (purpose == crate::decide::Purpose::Prefill || allowed.holds(pod.endpoint))
                && taken != Some(pod.pod)
        }),
    }
}

fn priced(view: &View<'_>, eligible: impl Fn(usize) -> bool) -> Vec<f64> {
    let board = view.snapshot.board();
    match board.block_size() {
        Some(size) => {
            let sized = view.pricer.sized(size);
            priced_as(view, eligible, |_| sized)
        }
        None => {
            let members = board.members();
            priced_as(view, eligible, |at| view.pricer.sized(members[at].block_size))
        }
    }
}

fn priced_as(
    view: &View<'_>,
    eligible: impl Fn(usize) -> bool,
    sized: impl Fn(usize) -> Sized,
) -> Vec<f64> {
    let pricer = view.pricer;
    let pods = view.snapshot.cached().iter().zip(view.snapshot.loads());
    pods.enumerate()
        .map(|(at, (cached, load))| {
            if eligible(at) {
                pricer.price(sized(at), cached, load).total
            } else {
                f64::INFINITY
            }
        })
        .collect()
}

/// The least of `costs`. Several minima are kept at a time: each comparison alone would wait for the
/// one before.
fn least(costs: &[f64]) -> f64 {
    let smaller = |a: f64, b: f64| if b < a { b } else { a };
    let mut minima = [f64::INFINITY; LANES];
    let (chunks, rest) = costs.as_chunks::<LANES>();
    for chunk in chunks {
        for (least, cost) in minima.iter_mut().zip(chunk) {
            *least = smaller(*least, *cost);
        }
    }
    let all = minima.iter().chain(rest);
    all.fold(f64::INFINITY, |least, cost| smaller(least, *cost))
}

/// Among the pods that cost `least`, one with the fewest requests, so that a burst of equal requests
/// spreads; among those each with the same probability over `draw`.
fn fewest(costs: &[f64], least: f64, loads: &[PodLoad], draw: u64) -> Option<usize> {
    let mut best: Option<(usize, u32)> = None;
    let mut ties = 1;
    for (at, _) in costs.iter().enumerate().filter(|(_, cost)| **cost == least) {
        let requests = loads[at].requests;
        match best {
            Some((_, fewest)) if fewest < requests => {}
            Some((_, fewest)) if fewest == requests => {
                ties += 1;
                // One in `ties` replaces the one before: each ends with the same probability.
                if scale(mix(draw, ties), ties) == 0 {
                    best = Some((at, requests));
                }
            }
            _ => {
                ties = 1;
                best = Some((at, requests));
            }
        }
    }
    best.map(|(at, _)| at)
}

/// A pod drawn by softmax of its cost, negated and scaled to `0..=1` between the cheapest and the
/// dearest.
fn sampled(mut costs: Vec<f64>, least: f64, temperature: f64, draw: u64) -> Option<usize> {
    let finite = costs.iter().filter(|cost| cost.is_finite());
    let most = finite.fold(least, |most, cost| most.max(*cost));
    let mut sum = 0.0;
    for cost in &mut costs {
        let share = if !cost.is_finite() {
            f64::INFINITY
        } else if least < most {
            (*cost - least) / (most - least)
        } else {
            0.0
        };
        *cost = (-share / temperature).exp();
        sum += *cost;
    }
    // 53 bits, so that the product stays below the sum.
    let mut left = (draw >> 11) as f64 / (1_u64 << 53) as f64 * sum;
    let mut last = None;
    for (at, weight) in costs.iter().enumerate() {
        // A pod that is not eligible weighs nothing.
        if *weight <= 0.0 {
            continue;
        }
        if left < *weight {
            return Some(at);
        }
        left -= weight;
        last = Some(at);
    }
    last
}

/// A number that looks unrelated for each `step` of one `draw` (the finalizer of SplitMix64).
fn mix(draw: u64, step: u64) -> u64 {
    let mut x = draw.wrapping_add(step.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// `random` as a number below `bound`.
fn scale(random: u64, bound: u64) -> u64 {
    ((u128::from(random) * u128::from(bound)) >> 64) as u64
}
