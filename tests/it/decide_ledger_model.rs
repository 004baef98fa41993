//! The ledger against its definition: the books are the sum of the bookings that live.

use crate::decide_fixture::{BLOCK, ask, chain_of, decode, endpoint, holding, policy, rule};
use crate::decide_ledger::World;
use proptest::prelude::*;
use sidestep::blocks::BlockChain;
use sidestep::decide::policy::{Bypass, ClientPins};
use sidestep::decide::snapshot::{PodLoad, Role};
use sidestep::load::Booking;
use sidestep::names::PodId;
use std::collections::HashSet;

const PODS: u16 = 4;

/// Tokens that every pod holds of every prompt.
const CACHED: u64 = 64;

/// A live booking, and what it was charged, kept by hand.
struct Live {
    booking: Booking,
    decode: PodId,
    prefill: Option<(PodId, u64)>,
    local_tokens: u64,
    chain: BlockChain,
    prompt: u64,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Admit {
        decode: u16,
        prefill: Option<u16>,
        prompt: u64,
        branch: u64,
    },
    PrefillDone(usize),
    ServedBy(usize, u16),
    End(usize),
    Replace(u16),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let prefill = prop::option::of(0..PODS);
    let step = prop_oneof![
        5 => (0..PODS, prefill, 1..400_u64, 0..400_u64).prop_map(
            |(decode, prefill, prompt, branch)| Step::Admit { decode, prefill, prompt, branch }
        ),
        2 => any::<usize>().prop_map(Step::PrefillDone),
        1 => (any::<usize>(), 0..PODS).prop_map(|(which, pod)| Step::ServedBy(which, pod)),
        3 => any::<usize>().prop_map(Step::End),
        1 => (0..PODS).prop_map(Step::Replace),
    ];
    prop::collection::vec(step, 1..60)
}

struct Model {
    world: World,
    live: Vec<Live>,
    gone: HashSet<PodId>,
}

impl Model {
    fn new() -> Model {
        let mut policy = policy([rule(Bypass::Always)]);
        policy.client_pins = ClientPins::Honor;
        let both = |slot| {
            let mut pod = holding(decode(slot), CACHED);
            pod.role = Role::Both;
            pod
        };
        Model {
            world: World::new((0..PODS).map(both), policy),
            live: Vec::new(),
            gone: HashSet::new(),
        }
    }

    fn pod(&self, slot: u16) -> PodId {
        self.world.pods[usize::from(slot)].pod
    }

    fn step(&mut self, step: Step) {
        let count = self.live.len();
        match step {
            Step::Admit {
                decode,
                prefill,
                prompt,
                branch,
            } => self.admit((decode, prefill), prompt, branch),
            Step::Replace(slot) => {
                let pod = &mut self.world.pods[usize::from(slot)].pod;
                self.world.ledger.forget(*pod);
                self.gone.insert(*pod);
                pod.generation += 1;
            }
            _ if count == 0 => {}
            Step::PrefillDone(which) => {
                let live = &mut self.live[which % count];
                live.booking.prefill_done();
                live.prefill = None;
                live.local_tokens = 0;
            }
            Step::ServedBy(which, slot) => {
                let pod = self.pod(slot);
                let live = &mut self.live[which % count];
                live.booking.served_by(pod);
                live.decode = pod;
            }
            Step::End(which) => drop(self.live.swap_remove(which % count)),
        }
    }

    /// Pins say who decodes and who prefills; no prefill pin, or the same pod, means a local route.
    fn admit(&mut self, (decode, prefill): (u16, Option<u16>), prompt: u64, branch: u64) {
        let mut ask = ask(prompt);
        ask.decode_pin = Some(endpoint(decode).into());
        ask.prefill_pin = prefill.map(|slot| endpoint(slot).into());
        let mut tokens = vec![1; usize::try_from(prompt).unwrap()];
        tokens[usize::try_from(branch.min(prompt)).unwrap()..].fill(2);
        let chain = chain_of(&tokens);
        let (_, booking) = self.world.admit(&ask, &chain).unwrap();
        let net_new = prompt.saturating_sub(CACHED);
        let elsewhere = prefill.filter(|slot| *slot != decode);
        self.live.push(Live {
            booking,
            decode: self.pod(decode),
            prefill: elsewhere.map(|slot| (self.pod(slot), net_new)),
            local_tokens: if elsewhere.is_none() { net_new } else { 0 },
            chain,
            prompt,
        });
    }

    fn load(&self, pod: PodId) -> PodLoad {
        let mut load = PodLoad::default();
        let mut keys = HashSet::new();
        if self.gone.contains(&pod) {
            return load;
        }
        for live in &self.live {
            if live.decode == pod {
                load.requests += 1;
                load.prefill_tokens.0 += live.local_tokens;
                keys.extend(live.chain.keys.iter().copied());
                let partial = live.prompt % u64::from(BLOCK) != 0;
                load.decode_blocks.0 += u32::from(partial);
            }
            if let Some((prefill, tokens)) = live.prefill
                && prefill == pod
            {
                load.requests += 1;
                load.prefill_tokens.0 += tokens;
            }
        }
        load.decode_blocks.0 += u32::try_from(keys.len()).unwrap();
        load
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_books_are_the_sum_of_the_bookings_that_live(steps in steps()) {
        let mut model = Model::new();
        for step in steps {
            model.step(step);
            let now = (0..PODS).map(|slot| model.pod(slot));
            for pod in now.chain(model.gone.iter().copied()) {
                prop_assert_eq!(model.world.ledger.load(pod), model.load(pod), "{}", pod);
            }
        }
        model.live.clear();
        for slot in 0..PODS {
            prop_assert_eq!(model.world.ledger.load(model.pod(slot)), PodLoad::default());
        }
    }
}
