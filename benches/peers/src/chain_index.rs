//! The index of the crate `kv-index`: run-length chains, read without locks.

use crate::workload::Workload;
use kv_index::{ChainBlockMap, ChainIndex, ContentHash, SequenceHash, StoredBlock};

/// The most pods it takes.
const MOST: usize = 1_024;

pub struct Chains {
    index: ChainIndex,
    /// Leading blocks per pod.
    pub scores: Vec<u32>,
}

impl Chains {
    pub fn new(workload: &Workload) -> Chains {
        let index = ChainIndex::with_max_workers(MOST);
        let ids: Vec<u32> = (0..workload.pods)
            .map(|pod| {
                let id = index.intern_worker(&pod.to_string());
                id.expect("there are fewer pods than it takes")
            })
            .collect();
        let mut maps: Vec<ChainBlockMap> = ids.iter().map(|_| ChainBlockMap::new()).collect();
        for store in &workload.stores {
            let talk = &workload.conversations[store.conversation];
            let blocks: Vec<StoredBlock> = (store.from..store.to)
                .map(|at| StoredBlock {
                    seq_hash: SequenceHash(talk.names[at]),
                    content_hash: ContentHash(talk.contents[at]),
                })
                .collect();
            let parent = store.from.checked_sub(1).map(|at| talk.names[at]);
            let (worker, map) = (ids[store.pod], &mut maps[store.pod]);
            index
                .apply_stored(worker, &blocks, parent.map(SequenceHash), map)
                .expect("every parent was stored");
        }
        // Pods are numbered in the order they were named.
        assert!(ids.iter().copied().eq(0..workload.pods as u32));
        Chains {
            scores: vec![0; ids.len()],
            index,
        }
    }

    /// Fills `scores`.
    pub fn look_up(&mut self, query: &[u64]) {
        self.scores.fill(0);
        let scores = &mut self.scores;
        let fill = |worker: u32, score| scores[worker as usize] = score;
        self.index.score_into(query, |hash| *hash, false, fill);
    }

    /// Only counts the pods.
    pub fn count(&self, query: &[u64]) -> u32 {
        let mut pods = 0;
        self.index
            .score_into(query, |hash| *hash, false, |_, _| pods += 1);
        pods
    }
}
