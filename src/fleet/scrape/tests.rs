//! When a pod stops being ready, answer by answer, on a paused clock.
use super::*;
use crate::fleet::status::Changed;
use std::collections::VecDeque;

/// What comes of one scrape.
#[derive(Clone, Copy, Debug)]
enum Comes {
    Answer,
    /// Nothing, until time is up.
    Nothing,
    /// The end of the connection.
    Broken,
    /// Nothing listens.
    Closed,
    Status503,
}

use Comes::{Answer, Broken, Closed, Nothing, Status503};

/// A pod that answered until now, and what it says after each further scrape. `None` is the default.
async fn after_each(threshold: Option<u32>, script: &[Comes]) -> Vec<Availability> {
    let threshold = threshold.map_or(Probe::FAILURE_THRESHOLD, |threshold| {
        NonZeroU32::new(threshold).unwrap()
    });
    let status = Arc::new(Status::new(Availability::NotReady, Changed::default()));
    let target = Target {
        pod: Arc::from("d1"),
        uri: Uri::from_static("http://10.0.0.1:8000/metrics"),
        status: Arc::clone(&status),
        phase: Duration::from_millis(500),
        failure_threshold: threshold,
        missed: 0,
    };
    let settings = Settings::default();
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let mut script: VecDeque<Comes> = script.iter().copied().collect();
    let mut count = script.len();
    let asking = move || {
        // That this scrape is asked for says that the one before was noted.
        let _ = tell.send(());
        let comes = script.pop_front();
        async move {
            // The test looks before the answer is noted.
            tokio::time::sleep(Duration::from_millis(1)).await;
            match comes {
                None => std::future::pending().await,
                Some(Answer) => Ok(Reported::default()),
                Some(Closed) => Err(Trouble::Closed),
                Some(Broken) => Err(Trouble::Connect("its end".into())),
                Some(Status503) => Err(Trouble::Refused(StatusCode::SERVICE_UNAVAILABLE)),
                Some(Nothing) => {
                    tokio::time::sleep(settings.timeout - Duration::from_millis(1)).await;
                    Err(Trouble::Late)
                }
            }
        }
    };
    let task = tokio::spawn(target.run(asking, settings));
    let mut seen = Vec::new();
    told.recv().await;
    while 0 < count {
        told.recv().await;
        seen.push(status.availability());
        count -= 1;
    }
    task.abort();
    seen
}

const READY: Availability = Availability::Ready;
const UNREACHABLE: Availability = Availability::Unreachable;

#[tokio::test(start_paused = true)]
async fn one_missed_answer_changes_nothing_and_two_in_a_row_do() {
    for missed in [Nothing, Broken] {
        assert_eq!(
            after_each(
                None,
                &[Answer, missed, Answer, missed, missed, Answer, missed]
            )
            .await,
            [READY, READY, READY, READY, UNREACHABLE, READY, READY],
            "{missed:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn misses_of_different_kinds_are_counted_together() {
    assert_eq!(
        after_each(None, &[Answer, Nothing, Broken]).await,
        [READY, READY, UNREACHABLE]
    );
}

#[tokio::test(start_paused = true)]
async fn a_refused_connection_counts_at_once() {
    assert_eq!(
        after_each(Some(9), &[Answer, Closed, Answer]).await,
        [READY, UNREACHABLE, READY]
    );
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_says_no_is_not_ready_at_once_and_misses_nothing_by_it() {
    assert_eq!(
        after_each(None, &[Answer, Nothing, Status503, Answer, Nothing]).await,
        [READY, READY, Availability::NotReady, READY, READY]
    );
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_never_answered_is_not_taken_for_ready() {
    assert_eq!(
        after_each(None, &[Nothing, Nothing]).await,
        [UNREACHABLE, UNREACHABLE]
    );
    // Nor does a miss bring back what was lost.
    assert_eq!(
        after_each(None, &[Answer, Closed, Nothing]).await,
        [READY, UNREACHABLE, UNREACHABLE]
    );
}

#[tokio::test(start_paused = true)]
async fn how_many_misses_are_borne_is_what_was_set() {
    assert_eq!(
        after_each(Some(1), &[Answer, Nothing]).await,
        [READY, UNREACHABLE]
    );
    assert_eq!(
        after_each(Some(4), &[Answer, Nothing, Nothing, Nothing, Nothing]).await,
        [READY, READY, READY, READY, UNREACHABLE]
    );
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_hangs_is_noticed_within_its_misses() {
    let began = Instant::now();
    let seen = after_each(None, &[Answer, Nothing, Nothing]).await;
    assert_eq!(seen.last(), Some(&UNREACHABLE));
    // Half a second to the second scrape, then twice the timeout, and the third one is due by then.
    assert_eq!(began.elapsed(), Duration::from_millis(1 + 500 + 2 * 1000));
}
