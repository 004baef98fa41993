//! Dynamo's fastest index, its compressed concurrent radix tree, called directly.

use crate::workload::{Store, Workload};
use dynamo_kv_router::ConcurrentRadixTreeCompressed;
use dynamo_kv_router::indexer::{SyncIndexer, WorkerTask};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent,
};

/// Events handed over at once; all of them together would be larger than the index.
const HANDED: usize = 65_536;

pub struct Tree(ConcurrentRadixTreeCompressed);

impl Tree {
    pub fn new(workload: &Workload) -> Tree {
        let tree = ConcurrentRadixTreeCompressed::new();
        std::thread::scope(|scope| {
            let (sender, receiver) = flume::bounded(HANDED);
            scope.spawn(|| tree.worker(receiver, None));
            for (id, store) in workload.stores.iter().enumerate() {
                let event = WorkerTask::Event(event(id as u64 + 1, store, workload));
                sender.send(event).expect("the tree's thread runs");
            }
        });
        Tree(tree)
    }

    pub fn look_up(&self, query: &[LocalBlockHash]) -> OverlapScores {
        self.0.find_matches(query, false)
    }
}

pub fn query(contents: &[u64]) -> Vec<LocalBlockHash> {
    contents.iter().copied().map(LocalBlockHash).collect()
}

fn event(event_id: u64, store: &Store, workload: &Workload) -> RouterEvent {
    let talk = &workload.conversations[store.conversation];
    let name = |at: usize| ExternalSequenceBlockHash(talk.names[at]);
    let blocks = (store.from..store.to).map(|at| KvCacheStoredBlockData {
        block_hash: name(at),
        tokens_hash: LocalBlockHash(talk.contents[at]),
        mm_extra_info: None,
    });
    let data = KvCacheStoreData {
        parent_hash: store.from.checked_sub(1).map(name),
        start_position: None,
        blocks: blocks.collect(),
    };
    let event = KvCacheEvent {
        event_id,
        data: KvCacheEventData::Stored(data),
        dp_rank: 0,
    };
    RouterEvent::new(store.pod as u64, event)
}
