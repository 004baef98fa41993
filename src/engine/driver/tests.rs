use super::*;
use crate::engine::answer::{Answer, Opening, Vocabulary, Word};
use crate::engine::cache::Space;
use crate::engine::events::{self, Framing};
use crate::engine::scheduler::{Finish, Keep, Start};
use crate::engine::timing::{self, Link, Pace};
use crate::units::{BlockSize, Ratio, Tokens};
use std::net::{Ipv4Addr, SocketAddr};

const BLOCKS: u32 = 1_024;

fn limits(pace: f64) -> Limits {
    Limits {
        block_size: BlockSize::new(16).expect("not zero"),
        blocks: BLOCKS,
        batch_tokens: 8_192,
        sequences: 8,
        waiting: 8,
        waiting_tokens: 1 << 20,
        lease: Duration::from_secs(30),
        link: Link {
            bytes_per_token: 1_000_000,
            gigabytes_per_second: Ratio::ONE,
        },
        pace: Pace(Ratio::new(pace).expect("a ratio")),
    }
}

fn job(tokens: u32, max_tokens: u32) -> Job {
    Job {
        prompt: (0..tokens).collect(),
        space: Arc::new(Space::default()),
        answer: Answer {
            vocabulary: Arc::new(Vocabulary {
                opening: Vec::new(),
                following: vec![Word {
                    id: 7,
                    text: " w".into(),
                }],
                end: 9,
            }),
            seed: 0,
            opening: Opening::Continuation,
            length: u32::MAX,
        },
        max_tokens,
        start: Start::Compute,
        keep: Keep::Evictable,
    }
}

/// A running driver; the clock is the test's.
async fn running(pace: f64) -> (Handle, tokio::task::JoinHandle<()>) {
    let free = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let framing = Framing {
        topic: String::new(),
        buffer: 10,
        block_size: 16,
    };
    let (publisher, ..) = events::bind(free, free, framing).await.expect("free ports");
    let (driver, handle) = Driver::new(limits(pace), publisher);
    (handle, tokio::spawn(driver.run()))
}

async fn told(ticket: &mut Ticket) -> u32 {
    let mut tokens = 0;
    while let Some(output) = ticket.next().await {
        tokens += 1;
        if let Some(finish) = output.finish {
            assert_eq!(finish, Finish::Length);
            break;
        }
    }
    tokens
}

fn submit(handle: &Handle, job: Job) -> Ticket {
    handle.submit(vec![job]).expect("room").remove(0)
}

#[tokio::test(start_paused = true)]
async fn an_answer_takes_as_long_as_its_passes_whatever_the_timer_rounds() {
    for pace in [1.0, 0.1] {
        let (handle, task) = running(pace).await;
        let begin = Instant::now();
        let mut ticket = submit(&handle, job(2_048, 200));
        assert_eq!(told(&mut ticket).await, 200);
        let capacity = Tokens(u64::from(BLOCKS) * 16);
        let decodes = (2_049..2_248).map(|context| timing::decode(Tokens(context), capacity));
        let modelled = timing::prefill(Tokens(2_048)) + decodes.sum::<Duration>();
        let (modelled, took) = (modelled.mul_f64(pace), begin.elapsed());
        let late = took.saturating_sub(modelled).as_secs_f64();
        assert!(modelled <= took + Duration::from_millis(1), "{took:?}");
        assert!(
            late < 0.01 * modelled.as_secs_f64() + 0.006,
            "{took:?} for {modelled:?}"
        );
        task.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn at_pace_zero_nothing_waits() {
    let (handle, task) = running(0.0).await;
    let begin = Instant::now();
    let mut fetched = job(4_096, 50);
    fetched.start = Start::Pull;
    assert_eq!(told(&mut submit(&handle, fetched)).await, 50);
    assert_eq!(begin.elapsed(), Duration::ZERO);
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn a_transfer_delays_the_first_token() {
    let (handle, task) = running(1.0).await;
    let begin = Instant::now();
    let mut fetched = job(1_000, 1);
    fetched.start = Start::Pull;
    let mut ticket = submit(&handle, fetched);
    ticket.next().await.expect("a token");
    // 1 GB at 1 GB/s, and one decode pass.
    let took = begin.elapsed();
    assert!(
        Duration::from_secs(1) < took && took < Duration::from_millis(1_020),
        "{took:?}"
    );
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn a_dropped_ticket_cancels_its_sequence() {
    let (handle, task) = running(1.0).await;
    let mut ticket = submit(&handle, job(1_000, 1_000));
    ticket.next().await.expect("a token");
    assert_eq!(handle.look().0.running, 1);
    drop(ticket);
    let (load, totals) = handle.look();
    assert_eq!((load.running, load.used, totals.aborted), (0, 0, 1));
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn a_finished_ticket_cancels_nothing() {
    let (handle, task) = running(1.0).await;
    let mut ticket = submit(&handle, job(100, 2));
    assert_eq!(told(&mut ticket).await, 2);
    assert_eq!(ticket.next().await, None);
    drop(ticket);
    assert_eq!(handle.look().1.aborted, 0);
    task.abort();
}
