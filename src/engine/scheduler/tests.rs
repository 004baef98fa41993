use super::*;
use crate::engine::answer::{Answer, Opening, Vocabulary, Word, seed};
use crate::engine::cache::{BlockHash, Space};
use crate::engine::timing::{Link, Pace};
use crate::units::{BlockSize, Ratio};
use proptest::prelude::*;
use std::sync::Arc;

fn limits() -> Limits {
    Limits {
        block_size: BlockSize::new(4).expect("not zero"),
        blocks: 64,
        batch_tokens: 8_192,
        sequences: 256,
        waiting: 4_096,
        waiting_tokens: 1 << 24,
        lease: Duration::from_secs(30),
        link: Link {
            bytes_per_token: 1_000_000,
            gigabytes_per_second: Ratio::ONE,
        },
        pace: Pace(Ratio::ONE),
    }
}

fn job(prompt: std::ops::Range<u32>, max_tokens: u32) -> Job {
    let prompt: Vec<u32> = prompt.collect();
    let words = (1_000..1_040).map(|id| Word {
        id,
        text: " w".into(),
    });
    Job {
        space: Arc::new(Space::default()),
        answer: Answer {
            vocabulary: Arc::new(Vocabulary {
                opening: Vec::new(),
                following: words.collect(),
                end: 9,
            }),
            seed: seed(&prompt),
            opening: Opening::Message,
            length: u32::MAX,
        },
        prompt,
        max_tokens,
        start: Start::Compute,
        keep: Keep::Evictable,
    }
}

/// A scheduler with its virtual clock.
struct Engine {
    scheduler: Scheduler,
    now: Duration,
    changes: Vec<Change>,
}

impl Engine {
    fn new(limits: Limits) -> Engine {
        Engine {
            scheduler: Scheduler::new(limits),
            now: Duration::ZERO,
            changes: Vec::new(),
        }
    }

    fn submit(&mut self, job: Job) -> SequenceId {
        self.scheduler.submit(vec![job]).expect("room")[0]
    }

    /// One pass, waiting for it if need be; `None` when idle.
    fn pass(&mut self) -> Option<(Pass, Vec<Output>)> {
        loop {
            match self.scheduler.start(self.now) {
                Next::Idle => return None,
                Next::WaitUntil(at) => {
                    assert!(self.now < at, "a wait must end in the future");
                    self.now = at;
                }
                Next::Run(pass) => {
                    self.now += pass.duration;
                    let report = self.scheduler.complete(self.now);
                    self.changes.extend(report.changes);
                    return Some((pass, report.outputs));
                }
            }
        }
    }

    fn drain(&mut self) -> Vec<Output> {
        let mut outputs = Vec::new();
        while let Some((_, more)) = self.pass() {
            outputs.extend(more);
        }
        outputs
    }

    /// Number of blocks announced as stored, and of blocks withdrawn.
    fn stored_and_removed(&mut self) -> (usize, usize) {
        let mut counts = (0, 0);
        for change in std::mem::take(&mut self.changes) {
            match change {
                Change::Stored { hashes, .. } => counts.0 += hashes.len(),
                Change::Removed(_) => counts.1 += 1,
                Change::Cleared => {}
            }
        }
        counts
    }
}

fn source(outputs: &[Output], id: SequenceId) -> PromptSource {
    outputs
        .iter()
        .filter(|output| output.sequence == id)
        .find_map(|output| output.first)
        .expect("a first token")
}

fn tokens(cached: u64, external: u64, computed: u64) -> PromptSource {
    PromptSource {
        cached: Tokens(cached),
        external: Tokens(external),
        computed: Tokens(computed),
    }
}

#[test]
fn a_prompt_is_computed_once_and_its_second_use_recomputes_only_the_tail() {
    let mut engine = Engine::new(limits());
    let first = engine.submit(job(0..18, 4));
    let outputs = engine.drain();
    assert_eq!(source(&outputs, first), tokens(0, 0, 18));
    assert_eq!(outputs.len(), 4);
    let second = engine.submit(job(0..18, 1));
    assert_eq!(source(&engine.drain(), second), tokens(16, 0, 2));
}

#[test]
fn a_prompt_of_whole_blocks_leaves_its_last_block_to_compute() {
    let mut engine = Engine::new(limits());
    engine.submit(job(0..16, 1));
    engine.drain();
    let again = engine.submit(job(0..16, 1));
    assert_eq!(source(&engine.drain(), again), tokens(12, 0, 4));
}

#[test]
fn decoded_blocks_are_stored_as_they_fill_except_for_the_token_never_computed() {
    let mut engine = Engine::new(limits());
    engine.submit(job(0..10, 7));
    engine.drain();
    // 10 + 7 tokens, of which 16 are computed: the last one's KV never is.
    assert_eq!(engine.stored_and_removed(), (4, 0));
}

#[test]
fn each_stored_event_continues_its_parent_and_carries_its_tokens() {
    let mut engine = Engine::new(limits());
    engine.submit(job(0..9, 8));
    engine.drain();
    let mut last = None;
    let mut seen = Vec::new();
    for change in &engine.changes {
        let Change::Stored {
            parent,
            hashes,
            tokens,
            ..
        } = change
        else {
            panic!("nothing was evicted");
        };
        assert_eq!(*parent, last);
        assert_eq!(tokens.len(), hashes.len() * 4);
        last = hashes.last().copied();
        seen.extend_from_slice(tokens);
    }
    assert_eq!(seen.len(), 16);
    assert_eq!(seen[..9], (0..9).collect::<Vec<u32>>());
}

#[test]
fn a_local_prefill_stalls_the_decodes_running_beside_it() {
    let limits = Limits {
        blocks: 4_096,
        ..limits()
    };
    let mut engine = Engine::new(limits);
    let decoding = engine.submit(job(0..8, 100));
    engine.pass();
    let (quiet, _) = engine.pass().expect("it decodes");
    engine.submit(job(10_000..12_048, 1));
    let (stalled, outputs) = engine.pass().expect("both run");
    assert!(outputs.iter().any(|output| output.sequence == decoding));
    assert_eq!(stalled.prefill, Tokens(2_048));
    assert_eq!(
        stalled.duration,
        timing::prefill(Tokens(2_048)) + timing::decode(Tokens(10), Tokens(4_096 * 4))
    );
    assert!(quiet.duration * 8 < stalled.duration);
}

#[test]
fn a_fetched_prompt_costs_a_transfer_and_no_prefill() {
    let mut engine = Engine::new(limits());
    let mut fetched = job(0..18, 3);
    fetched.start = Start::Pull;
    let id = engine.submit(fetched);
    let (pass, outputs) = engine.pass().expect("it decodes");
    assert_eq!(
        (pass.prefill, pass.decodes, outputs.len()),
        (Tokens(0), 1, 1)
    );
    assert_eq!(source(&outputs, id), tokens(0, 18, 0));
    // 18 tokens of 1 MB at 1 GB/s, then one decode pass.
    assert_eq!(engine.now, Duration::from_millis(18) + pass.duration);
    assert_eq!(engine.stored_and_removed(), (4, 0));
}

#[test]
fn only_what_is_not_held_is_fetched() {
    let mut engine = Engine::new(limits());
    engine.submit(job(0..18, 1));
    engine.drain();
    let before = engine.now;
    let mut fetched = job(0..28, 1);
    fetched.start = Start::Pull;
    let id = engine.submit(fetched);
    let (pass, outputs) = engine.pass().expect("it decodes");
    assert_eq!(source(&outputs, id), tokens(16, 12, 0));
    assert_eq!(
        engine.now,
        before + Duration::from_millis(12) + pass.duration
    );
}

#[test]
fn transfers_share_the_link_in_turn() {
    let mut engine = Engine::new(limits());
    for from in [0, 100] {
        let mut fetched = job(from..from + 10, 1);
        fetched.start = Start::Pull;
        engine.submit(fetched);
    }
    engine.drain();
    assert!(Duration::from_millis(20) <= engine.now);
}

#[test]
fn fetching_does_not_stall_decodes() {
    let mut engine = Engine::new(limits());
    engine.submit(job(0..8, 3));
    engine.pass();
    let mut fetched = job(100..110, 1);
    fetched.start = Start::Pull;
    engine.submit(fetched);
    let (pass, _) = engine.pass().expect("the first one decodes on");
    assert_eq!((pass.prefill, pass.decodes), (Tokens(0), 1));
}

#[test]
fn a_long_prompt_is_computed_in_chunks_of_the_budget() {
    let mut engine = Engine::new(Limits {
        batch_tokens: 8,
        ..limits()
    });
    engine.submit(job(0..20, 1));
    let chunks: Vec<(u64, usize)> = std::iter::from_fn(|| engine.pass())
        .map(|(pass, outputs)| (pass.prefill.0, outputs.len()))
        .collect();
    assert_eq!(chunks, [(8, 0), (8, 0), (4, 1)]);
}

#[test]
fn decodes_come_before_prefills_in_the_budget() {
    let mut engine = Engine::new(Limits {
        batch_tokens: 8,
        ..limits()
    });
    engine.submit(job(0..8, 5));
    engine.pass();
    engine.submit(job(100..120, 1));
    let (pass, _) = engine.pass().expect("both run");
    assert_eq!((pass.prefill, pass.decodes), (Tokens(7), 1));
}

#[test]
fn no_more_sequences_run_than_there_are_seats() {
    let mut engine = Engine::new(Limits {
        sequences: 2,
        ..limits()
    });
    for from in [0, 100, 200] {
        engine.submit(job(from..from + 4, 2));
    }
    engine.scheduler.start(Duration::ZERO);
    let load = engine.scheduler.load();
    assert_eq!((load.running, load.waiting), (2, 1));
}

#[test]
fn a_full_cache_evicts_idle_blocks_and_announces_it() {
    let mut engine = Engine::new(Limits {
        blocks: 8,
        ..limits()
    });
    engine.submit(job(0..16, 1));
    engine.drain();
    engine.submit(job(100..124, 1));
    engine.drain();
    assert_eq!(engine.stored_and_removed(), (10, 2));
    let again = engine.submit(job(0..16, 1));
    assert_eq!(source(&engine.drain(), again), tokens(8, 0, 8));
}

#[test]
fn a_decode_without_room_preempts_the_youngest_and_both_finish() {
    let mut engine = Engine::new(Limits {
        blocks: 8,
        ..limits()
    });
    let old = engine.submit(job(0..12, 12));
    let young = engine.submit(job(100..112, 12));
    let outputs = engine.drain();
    let of = |id| {
        outputs
            .iter()
            .filter(|output| output.sequence == id)
            .count()
    };
    assert_eq!((of(old), of(young)), (12, 12));
    assert!(0 < engine.scheduler.totals().preemptions);
    assert_eq!(engine.scheduler.load().used, 0);
}

#[test]
fn cancelling_frees_blocks_wherever_the_sequence_is() {
    let mut engine = Engine::new(Limits {
        sequences: 1,
        ..limits()
    });
    let running = engine.submit(job(0..8, 50));
    let waiting = engine.submit(job(100..108, 50));
    engine.pass();
    engine.scheduler.cancel(waiting);
    engine.scheduler.cancel(running);
    engine.scheduler.cancel(running);
    let load = engine.scheduler.load();
    assert_eq!((load.running, load.waiting, load.used), (0, 0, 0));
    let mut fetched = job(0..20, 1);
    fetched.start = Start::Pull;
    let pulling = engine.submit(fetched);
    assert!(matches!(
        engine.scheduler.start(engine.now),
        Next::WaitUntil(_)
    ));
    engine.scheduler.cancel(pulling);
    assert_eq!(engine.scheduler.load().used, 0);
    assert_eq!(engine.scheduler.totals().aborted, 3);
}

#[test]
fn cancelling_in_the_middle_of_a_pass_gives_no_token() {
    let mut engine = Engine::new(limits());
    let id = engine.submit(job(0..8, 5));
    assert!(matches!(
        engine.scheduler.start(Duration::ZERO),
        Next::Run(_)
    ));
    engine.scheduler.cancel(id);
    let report = engine.scheduler.complete(Duration::from_secs(1));
    assert!(report.outputs.is_empty());
    assert_eq!(report.changes.len(), 1, "the block is content all the same");
}

#[test]
fn kept_blocks_survive_until_fetched() {
    let mut engine = Engine::new(Limits {
        blocks: 8,
        ..limits()
    });
    let mut prefill = job(0..16, 1);
    prefill.keep = Keep::ForDecode;
    let id = engine.submit(prefill);
    let (_, outputs) = engine.pass().expect("it prefills");
    assert_eq!(outputs[0].kept.len(), 4);
    assert!(engine.scheduler.keeps(id));
    assert_eq!(engine.scheduler.load().used, 4);
    assert!(engine.scheduler.release(id));
    assert!(!engine.scheduler.release(id), "only once");
    assert_eq!(engine.scheduler.load().used, 0);
}

#[test]
fn a_lease_that_nobody_claims_expires_and_lets_others_in() {
    let mut engine = Engine::new(Limits {
        blocks: 8,
        ..limits()
    });
    let mut prefill = job(0..24, 1);
    prefill.keep = Keep::ForDecode;
    let kept = engine.submit(prefill);
    engine.pass();
    let next = engine.submit(job(100..124, 1));
    let outputs = engine.drain();
    assert_eq!(source(&outputs, next), tokens(0, 0, 24));
    assert!(Duration::from_secs(30) <= engine.now);
    assert!(!engine.scheduler.keeps(kept));
    assert_eq!(engine.scheduler.totals().expired, 1);
}

#[test]
fn an_answer_that_ends_at_once_keeps_nothing() {
    let mut engine = Engine::new(limits());
    let mut prefill = job(0..16, 1);
    prefill.keep = Keep::ForDecode;
    prefill.answer.length = 0;
    let id = engine.submit(prefill);
    let outputs = engine.drain();
    assert_eq!(outputs[0].finish, Some(Finish::Stop));
    assert!(outputs[0].kept.is_empty() && !engine.scheduler.keeps(id));
}

#[test]
fn a_reset_is_announced_with_the_next_pass_and_refused_while_in_use() {
    let mut engine = Engine::new(limits());
    engine.submit(job(0..8, 2));
    engine.pass();
    assert!(!engine.scheduler.reset());
    engine.drain();
    engine.changes.clear();
    assert!(engine.scheduler.reset());
    assert_eq!(engine.pass(), None);
    assert!(engine.changes.is_empty(), "nothing before the next pass");
    let again = engine.submit(job(0..8, 1));
    assert_eq!(source(&engine.drain(), again), tokens(0, 0, 8));
    assert_eq!(engine.changes[0], Change::Cleared);
    assert!(matches!(engine.changes[1], Change::Stored { .. }));
}

#[test]
fn the_queue_is_bounded_in_sequences_and_in_tokens() {
    let mut engine = Engine::new(Limits {
        waiting: 2,
        waiting_tokens: 10,
        ..limits()
    });
    let submit = |engine: &mut Engine, jobs: Vec<Job>| engine.scheduler.submit(jobs).is_ok();
    assert!(!submit(
        &mut engine,
        vec![job(0..1, 1), job(0..1, 1), job(0..1, 1)]
    ));
    assert_eq!(engine.scheduler.load().waiting, 0, "all or none");
    assert!(submit(&mut engine, vec![job(0..8, 1)]));
    assert!(!submit(&mut engine, vec![job(0..8, 1)]));
    assert!(submit(&mut engine, vec![job(0..2, 1)]));
}

#[test]
fn a_landed_prompt_and_a_preempted_one_do_not_wait_for_each_other() {
    let mut engine = Engine::new(Limits {
        blocks: 8,
        ..limits()
    });
    engine.submit(job(0..12, 16));
    engine.pass();
    let mut fetched = job(100..116, 12);
    fetched.start = Start::Pull;
    engine.submit(fetched);
    let outputs = engine.drain();
    let finished = outputs.iter().filter(|output| output.finish.is_some());
    assert_eq!(finished.count(), 2);
    assert_eq!(engine.scheduler.load().used, 0);
}

#[test]
fn a_fetched_prompt_that_is_preempted_is_computed_the_second_time() {
    let mut engine = Engine::new(Limits {
        blocks: 8,
        ..limits()
    });
    engine.submit(job(0..12, 16));
    engine.pass();
    let mut fetched = job(100..116, 12);
    fetched.start = Start::Pull;
    let id = engine.submit(fetched);
    let outputs = engine.drain();
    assert_eq!(source(&outputs, id), tokens(0, 16, 0));
    let totals = engine.scheduler.totals();
    assert!(0 < totals.preemptions);
    assert_eq!(totals.external_hits, 16, "fetched once");
}

#[test]
fn load_and_totals_follow_the_work() {
    let mut engine = Engine::new(limits());
    engine.submit(job(0..18, 3));
    engine.submit(job(0..18, 3));
    engine.drain();
    let totals = engine.scheduler.totals();
    assert_eq!(totals.prefix_queries, 36);
    // Both ran in the same pass: the second shared the blocks the first was about to compute.
    assert_eq!(totals.prefix_hits, 16);
    assert_eq!(totals.prompt, tokens(16, 0, 20));
    assert_eq!((totals.generated, totals.length), (6, 2));
}

/// Content that events, replayed in order, say is held, with the number of copies.
fn replayed(changes: &[Change]) -> std::collections::HashMap<BlockHash, usize> {
    let mut held = std::collections::HashMap::new();
    for change in changes {
        match change {
            Change::Cleared => held.clear(),
            Change::Stored { hashes, tokens, .. } => {
                assert_eq!(tokens.len(), hashes.len() * 4);
                for hash in hashes {
                    *held.entry(*hash).or_default() += 1;
                }
            }
            Change::Removed(hash) => match held.get_mut(hash) {
                Some(1) => {
                    held.remove(hash);
                }
                Some(copies) => *copies -= 1,
                None => panic!("withdrawn and never announced"),
            },
        }
    }
    held
}

#[derive(Clone, Debug)]
enum Step {
    Submit {
        from: u32,
        prompt: u32,
        max_tokens: u32,
        start: Start,
        keep: Keep,
    },
    Cancel(u64),
    Release(u64),
    Reset,
    Pass,
}

fn step() -> impl Strategy<Value = Step> {
    let job = (
        prop::sample::select(vec![0_u32, 0, 4, 100]),
        1..30_u32,
        1..12_u32,
        prop::sample::select(vec![Start::Compute, Start::Compute, Start::Pull]),
        prop::sample::select(vec![
            Keep::Evictable,
            Keep::Evictable,
            Keep::Evictable,
            Keep::ForDecode,
        ]),
    );
    prop_oneof![
        4 => job.prop_map(|(from, prompt, max_tokens, start, keep)| Step::Submit {
            from,
            prompt,
            max_tokens,
            start,
            keep,
        }),
        1 => (0..40_u64).prop_map(Step::Cancel),
        1 => (0..40_u64).prop_map(Step::Release),
        1 => Just(Step::Reset),
        6 => Just(Step::Pass),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(400)
    })]

    #[test]
    fn whatever_happens_every_sequence_ends_and_events_tell_what_is_held(
        steps in prop::collection::vec(step(), 1..80),
        batch_tokens in 1..40_usize,
        sequences in 1..6_usize,
    ) {
        let mut engine = Engine::new(Limits {
            blocks: 11,
            batch_tokens,
            sequences,
            ..limits()
        });
        let mut expected = std::collections::HashMap::new();
        let mut outputs = Vec::new();
        let mut cancelled = std::collections::HashSet::new();
        for step in steps {
            match step {
                Step::Submit { from, prompt, max_tokens, start, keep } => {
                    let mut job = job(from..from + prompt, max_tokens);
                    job.start = start;
                    job.keep = keep;
                    expected.insert(engine.submit(job), max_tokens as usize);
                }
                Step::Cancel(id) => {
                    engine.scheduler.cancel(SequenceId(id));
                    cancelled.insert(SequenceId(id));
                }
                Step::Release(id) => {
                    engine.scheduler.release(SequenceId(id));
                }
                Step::Reset => {
                    engine.scheduler.reset();
                }
                Step::Pass => outputs.extend(engine.pass().into_iter().flat_map(|(_, more)| more)),
            }
        }
        outputs.extend(engine.drain());
        for (id, tokens) in expected {
            let of = outputs.iter().filter(|output| output.sequence == id).count();
            prop_assert!(of == tokens || cancelled.contains(&id), "{of} of {tokens} tokens");
        }
        let load = engine.scheduler.load();
        prop_assert_eq!((load.running, load.waiting, load.used), (0, 0, 0));
        engine.changes.extend(engine.scheduler.changes());
        prop_assert_eq!(replayed(&engine.changes), engine.scheduler.pool.copies().into_iter().collect());
    }
}
