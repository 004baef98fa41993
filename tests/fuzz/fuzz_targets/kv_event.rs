//! Any bytes as a payload of KV events: no panic, bounded, and an index that can be emptied again.
//! The payloads in `tests/data/captures` make a good corpus.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidestep::kv::event::Batch;
use sidestep::kv::index::{Index, Limits};
use sidestep::names::PodId;

fuzz_target!(|payload: &[u8]| {
    let Ok(batch) = Batch::decode(payload) else {
        return;
    };
    let limits = Limits {
        blocks_per_pod: 1000,
        blocks: 1500,
    };
    let index = Index::new(limits);
    let pods = [0, 1].map(|slot| PodId {
        slot,
        generation: 0,
    });
    for pod in pods {
        index.add_pod(pod);
        // Again: everything is there already.
        index.apply(pod, &batch);
        index.apply(pod, &batch);
    }
    assert!(index.len() <= limits.blocks);
    for pod in pods {
        index.forget(pod);
    }
    assert_eq!(index.len(), 0);
});
