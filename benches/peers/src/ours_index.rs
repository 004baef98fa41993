//! sidestep's index, fed with tokens as engines announce them.

use crate::facts::{BLOCK, mix};
use crate::workload::Workload;
use sidestep::blocks::{BlockChain, KeySpace};
use sidestep::decide::snapshot::TierBlocks;
use sidestep::kv::event::{Batch, EngineHash, Event, Stored};
use sidestep::kv::index::{Index, Limits, Overlaps};
use sidestep::names::PodId;
use sidestep::units::BlockSize;

pub struct Keyed {
    index: Index,
    overlaps: Overlaps,
}

impl Keyed {
    pub fn new(workload: &Workload) -> Keyed {
        let index = Index::new(Limits::default());
        (0..workload.pods).for_each(|slot| index.add_pod(pod(slot)));
        for store in &workload.stores {
            let talk = &workload.conversations[store.conversation];
            let names = &talk.names[store.from..store.to];
            let stored = Stored {
                hashes: names.iter().copied().map(EngineHash).collect(),
                parent: store
                    .from
                    .checked_sub(1)
                    .map(|at| EngineHash(talk.names[at])),
                tokens: tokens(&talk.contents[store.from..store.to]),
                block_size: BLOCK,
                ..Stored::default()
            };
            let batch = Batch {
                events: vec![Event::Stored(Box::new(stored))],
                ..Batch::default()
            };
            index.apply(pod(store.pod), &batch);
        }
        assert_eq!(index.len(), workload.memberships as u64);
        Keyed {
            index,
            overlaps: Overlaps::new(),
        }
    }

    /// Fills the overlaps.
    pub fn look_up(&mut self, query: &BlockChain) {
        self.index
            .overlaps(std::slice::from_ref(query), &mut self.overlaps);
    }

    /// What the pod in `slot` holds of what was looked up last.
    pub fn held(&self, slot: u16) -> TierBlocks {
        self.overlaps.get(pod(usize::from(slot)))
    }
}

pub fn query(contents: &[u64]) -> BlockChain {
    let space = KeySpace {
        block_size: BlockSize::new(BLOCK).expect("sixteen is a block size"),
        adapter: None,
        tenant: None,
    };
    BlockChain::new(&space, &tokens(contents))
}

fn tokens(contents: &[u64]) -> Vec<u32> {
    let tokens = |block: &u64| {
        let block = *block;
        (0..u64::from(BLOCK)).map(move |at| (mix(block.wrapping_add(at)) >> 12) as u32)
    };
    contents.iter().flat_map(tokens).collect()
}

fn pod(slot: usize) -> PodId {
    PodId {
        slot: u16::try_from(slot).expect("pods are numbered in 16 bits"),
        generation: 0,
    }
}
