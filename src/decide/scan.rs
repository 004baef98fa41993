//! One look at every pod: the inner loop of a selection.
//!
//! Lives here: [`open`], the choice among all eligible pods.
//! Never here: pins and sessions, which leave one pod (`select`); what a pod costs (`cost`).
//! Invariant: a pod is eligible here exactly where `View::check` says so, and costs what
//! `View::price` says; only the order of the work differs.

use crate::decide::cost::Sized;
use crate::decide::select::{Purpose, View};
use crate::decide::snapshot::{Serves, Serving};

/// Position of the cheapest eligible pod, or of one drawn by cost when the policy has a temperature.
pub(super) fn open(view: &View<'_>, draw: u64) -> Option<usize> {
    let temperature = view.terms.scoring.temperature.get();
    if 0.0 < temperature {
        let mut costs = Vec::new();
        each(view, |at, cost| costs.push((at, cost)));
        return sampled(costs, temperature, draw);
    }
    let mut best = Best {
        least: f64::INFINITY,
        at: None,
        fewest: 0,
        ties: 0,
        draw,
    };
    let loads = view.snapshot.loads();
    each(view, |at, cost| {
        // Rarely true, and then the processor has guessed wrong; everything else waits for nothing.
        if cost <= best.least {
            best.take(at, cost, loads[at].requests);
        }
    });
    best.at
}

/// Calls `visit` with the position and cost of every eligible pod.
fn each(view: &View<'_>, visit: impl FnMut(usize, f64)) {
    let purpose = view.purpose;
    let members = view.snapshot.board().members();
    let (serves, terms) = (view.snapshot.serves(), view.terms);
    match (serves, terms.allowed.all(purpose), terms.taken) {
        (Serving::All, true, None) => sized(view, |_| true, visit),
        (serves, all, taken) => {
            let also = |at: usize| {
                let pod = &members[at];
                serves.at(at) == Serves::Yes
                    && (all || terms.allowed.holds(pod.endpoint, purpose))
                    && taken != Some(pod.pod)
            };
            sized(view, also, visit);
        }
    }
}

fn sized(view: &View<'_>, also: impl Fn(usize) -> bool, visit: impl FnMut(usize, f64)) {
    let board = view.snapshot.board();
    match board.block_size() {
        Some(size) => {
            let sized = view.pricer.sized(size);
            priced(view, also, |_| sized, visit);
        }
        None => {
            let members = board.members();
            let sized = |at: usize| view.pricer.sized(members[at].block_size);
            priced(view, also, sized, visit);
        }
    }
}

fn priced(
    view: &View<'_>,
    also: impl Fn(usize) -> bool,
    sized: impl Fn(usize) -> Sized,
    visit: impl FnMut(usize, f64),
) {
    if view.pricer.is_plain(view.snapshot.has_tiers()) {
        visited::<true>(view, also, sized, visit);
    } else {
        visited::<false>(view, also, sized, visit);
    }
}

fn visited<const PLAIN: bool>(
    view: &View<'_>,
    also: impl Fn(usize) -> bool,
    sized: impl Fn(usize) -> Sized,
    mut visit: impl FnMut(usize, f64),
) {
    let (snapshot, pricer, purpose) = (view.snapshot, view.pricer, view.purpose);
    let uses = snapshot.board().uses().iter();
    let pods = uses.zip(snapshot.cached()).zip(snapshot.loads());
    let eligible = pods
        .enumerate()
        .filter(|(at, ((uses, _), _))| uses.allow(purpose) && also(*at));
    match purpose {
        Purpose::PrefillAndDecode | Purpose::Prefill => {
            eligible.for_each(|(at, ((_, cached), load))| {
                visit(
                    at,
                    pricer.prefill_cost::<PLAIN>(sized(at), cached, load).total,
                );
            });
        }
        Purpose::DecodeOnly => eligible.for_each(|(at, ((_, cached), load))| {
            visit(
                at,
                pricer.decode_cost::<PLAIN>(sized(at), cached, load).total,
            );
        }),
    }
}

/// The cheapest pod so far. Among equals one with the fewest requests, so that a burst of equal
/// requests spreads; among those each with the same probability over `draw`.
struct Best {
    least: f64,
    at: Option<usize>,
    fewest: u32,
    ties: u64,
    draw: u64,
}

impl Best {
    /// A pod that costs no more than the cheapest so far.
    #[inline(never)]
    fn take(&mut self, at: usize, cost: f64, requests: u32) {
        if self.at.is_none() || cost < self.least || requests < self.fewest {
            self.ties = 1;
        } else if requests == self.fewest {
            self.ties += 1;
            // One in `ties` replaces the one before: each ends with the same probability.
            if scale(mix(self.draw, self.ties), self.ties) != 0 {
                return;
            }
        } else {
            return;
        }
        (self.least, self.at, self.fewest) = (cost, Some(at), requests);
    }
}

/// A pod drawn by softmax of its cost, negated and scaled to `0..=1` between the cheapest and the
/// dearest.
fn sampled(mut costs: Vec<(usize, f64)>, temperature: f64, draw: u64) -> Option<usize> {
    let all = || costs.iter().map(|(_, cost)| *cost);
    let (least, most) = (all().fold(f64::MAX, f64::min), all().fold(0.0, f64::max));
    let mut sum = 0.0;
    for (_, cost) in &mut costs {
        let share = if least < most {
            (*cost - least) / (most - least)
        } else {
            0.0
        };
        *cost = (-share / temperature).exp();
        sum += *cost;
    }
    // 53 bits, so that the product stays below the sum.
    let mut left = (draw >> 11) as f64 / (1_u64 << 53) as f64 * sum;
    for (at, weight) in &costs {
        if left < *weight {
            return Some(*at);
        }
        left -= weight;
    }
    costs.last().map(|(at, _)| *at)
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
