//! Dynamo's side of the kernel: for each half of a request one pool with its books and its selector.
//!
//! The projection overwrites a map that is kept, as Dynamo's queue does. Selection is its built-in
//! policy at temperature 0.

use crate::facts::{BLOCK, CAPACITY, Half, PROMPT, Pod, Told, contents, mix};
use dynamo_kv_router::indexer::TieredMatchDetails;
use dynamo_kv_router::protocols::{
    OverlapScores, PrefillLoadHint, WorkerConfigLike, WorkerId, WorkerWithDpRank,
};
use dynamo_kv_router::scheduling::{OverlapAnalysis, OverlapSignals, ScheduleMode};
use dynamo_kv_router::{
    ActiveSequencesMultiWorker, DefaultWorkerSelector, KvRouterConfig, NoopSequencePublisher,
    SchedulingRequest, SequenceRequest, WorkerLoadProjection, WorkerSelectionInput, WorkerSelector,
};
use std::collections::HashMap;
use std::time::Duration;
use tokio::time::Instant;

struct Worker;

impl WorkerConfigLike for Worker {
    fn data_parallel_start_rank(&self) -> u32 {
        0
    }

    fn data_parallel_size(&self) -> u32 {
        1
    }

    fn max_num_batched_tokens(&self) -> Option<u64> {
        None
    }

    fn total_kv_blocks(&self) -> Option<u64> {
        Some(u64::from(CAPACITY))
    }
}

/// Both pools.
pub struct Dynamo {
    prefill: Pool,
    decode: Pool,
}

struct Pool {
    workers: HashMap<WorkerId, Worker>,
    books: ActiveSequencesMultiWorker<NoopSequencePublisher>,
    selector: DefaultWorkerSelector,
    request: SchedulingRequest,
}

impl Dynamo {
    pub fn new(pods: &[Pod], told: Told) -> Dynamo {
        Dynamo {
            prefill: Pool::new(pods, Half::Prefill, told),
            decode: Pool::new(pods, Half::Decode, told),
        }
    }

    /// Both projections and both selections.
    pub fn route(&mut self) -> (u64, u64) {
        let prefill = self.prefill.project().select();
        (prefill, self.decode.project().select())
    }

    /// The same with a new map for each projection.
    pub fn route_anew(&mut self) -> (u64, u64) {
        let prefill = self.prefill.project_anew().select();
        (prefill, self.decode.project_anew().select())
    }

    /// Both halves of a request of `blocks` blocks for which the index has answered `found`. How long
    /// the answer took to become what the selector reads is returned apart.
    pub fn route_by(&mut self, blocks: usize, found: OverlapScores) -> ((u64, u64), Duration) {
        let start = Instant::now();
        let mut tiered = TieredMatchDetails::default();
        tiered.device.overlap_scores = found;
        for pool in [&mut self.prefill, &mut self.decode] {
            pool.request.isl_tokens = blocks * BLOCK as usize;
            let config = &pool.selector.kv_router_config;
            pool.request.overlap = OverlapAnalysis::new(config, BLOCK, &tiered).signals();
        }
        let converting = start.elapsed();
        (self.route(), converting)
    }

    pub fn project(&mut self) {
        self.prefill.project();
        self.decode.project();
    }

    pub fn select(&self) -> (u64, u64) {
        (self.prefill.select(), self.decode.select())
    }

    /// What was projected for `pod`: requests, tokens to prefill, blocks in use, and how many of
    /// them are the request's.
    pub fn load(&self, pod: &Pod) -> [u64; 4] {
        let worker = WorkerWithDpRank::from_worker_id(u64::from(pod.id));
        let of = |pool: &Pool| pool.request.worker_loads.get(&worker).copied();
        let (prefill, decode) = (of(&self.prefill), of(&self.decode));
        let either: WorkerLoadProjection = prefill.or(decode).unwrap_or_default();
        let decode = decode.unwrap_or_default();
        let told = self.decode.request.token_seq.as_ref().map_or(0, Vec::len);
        [
            either.active_requests,
            prefill.unwrap_or_default().active_prefill_tokens,
            decode.active_decode_blocks,
            if pod.decodes {
                told - decode.additional_active_blocks
            } else {
                0
            },
        ]
        .map(|n| n as u64)
    }
}

impl Pool {
    fn new(pods: &[Pod], half: Half, told: Told) -> Pool {
        let pods: Vec<&Pod> = pods.iter().filter(|pod| pod.takes(half)).collect();
        let label = match half {
            Half::Prefill => "prefill",
            Half::Decode => "decode",
        };
        let ids = pods.iter().map(|pod| (u64::from(pod.id), (0, 1)));
        let books = ActiveSequencesMultiWorker::new_without_expiry(
            NoopSequencePublisher,
            BLOCK as usize,
            ids.collect(),
            false,
            0,
            label,
        );
        for pod in &pods {
            run_all(&books, pod, half);
        }
        Pool {
            workers: pods.iter().map(|pod| (u64::from(pod.id), Worker)).collect(),
            books,
            selector: DefaultWorkerSelector::new(Some(KvRouterConfig::default()), label),
            request: request(&pods, half, told),
        }
    }

    fn project(&mut self) -> &mut Pool {
        self.books.bench_project_worker_loads_into(
            self.request.token_seq.as_deref(),
            Instant::now(),
            &mut self.request.worker_loads,
        );
        self
    }

    fn project_anew(&mut self) -> &mut Pool {
        self.request.worker_loads = self
            .books
            .project_worker_loads(self.request.token_seq.as_deref(), Instant::now());
        self
    }

    fn select(&self) -> u64 {
        let input = WorkerSelectionInput::configured(
            &self.workers,
            &self.request,
            self.request.eligibility(),
            BLOCK,
        );
        let selected = self.selector.select_worker(input);
        selected.expect("every worker is eligible").worker.worker_id
    }
}

/// Books what runs on `pod`: tokens to prefill in the pool that prefills, blocks in the other.
fn run_all(books: &ActiveSequencesMultiWorker<NoopSequencePublisher>, pod: &Pod, half: Half) {
    for running in &pod.running {
        let tokens = running.prefill_tokens() as usize;
        let prefills = half == Half::Prefill;
        let request = SequenceRequest {
            request_id: running.id.to_string(),
            token_sequence: (!prefills).then(|| names(running.id, running.blocks)),
            track_prefill_tokens: prefills,
            expected_output_tokens: None,
            prefill_load_hint: prefills.then_some(PrefillLoadHint {
                initial_effective_prefill_tokens: tokens,
                expected_prefill_duration: None,
            }),
            worker: WorkerWithDpRank::from_worker_id(u64::from(pod.id)),
            lora_name: None,
        };
        books
            .add_request(request, Instant::now())
            .expect("the worker is known and the request new");
    }
}

/// Sequence hashes: to the books they are opaque.
fn names(id: u32, blocks: u32) -> Vec<u64> {
    let chained = contents(id, blocks).scan(7, |name, block| {
        *name = mix(*name ^ block);
        Some(*name)
    });
    chained.collect()
}

fn request(pods: &[&Pod], half: Half, told: Told) -> SchedulingRequest {
    let worker = |pod: &&Pod| WorkerWithDpRank::from_worker_id(u64::from(pod.id));
    let mut overlap = OverlapSignals {
        effective_overlap_blocks: pods
            .iter()
            .map(|pod| (worker(pod), f64::from(pod.held)))
            .collect(),
        effective_cached_tokens: pods
            .iter()
            .map(|pod| (worker(pod), (pod.held * BLOCK) as usize))
            .collect(),
        ..OverlapSignals::default()
    };
    if told == Told::Blocks {
        let held = pods.iter().map(|pod| (worker(pod), pod.held as usize));
        overlap.tier_overlap_blocks.device = held.collect();
    }
    SchedulingRequest {
        mode: ScheduleMode::QueryOnly { request_id: None },
        token_seq: (told == Told::Blocks && half == Half::Decode).then(|| names(0, PROMPT)),
        isl_tokens: (PROMPT * BLOCK) as usize,
        lora_name: None,
        expected_output_tokens: Some(256),
        affinity_target: None,
        pinned_worker: None,
        allowed_worker_ids: None,
        routing_constraints: Default::default(),
        router_config_override: None,
        track_prefill_tokens: half == Half::Prefill,
        priority_jump: 0.0,
        strict_priority: 0,
        policy_class: None,
        session_context: None,
        overlap,
        kv_transfer_candidates: None,
        retain_kv_transfer_chain: false,
        shared_cache_hits: None,
        worker_loads: Default::default(),
        resp_tx: None,
    }
}
