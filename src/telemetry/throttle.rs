//! At most one warning per kind and subject and minute.
//!
//! Lives here: [`Throttle`], a layer of the log.
//! Never here: what a warning says.
//! Invariant: bounded memory; what is held back is counted, and errors and information are never held back.

use parking_lot::Mutex;
use rustc_hash::FxBuildHasher;
use std::collections::HashMap;
use std::fmt::Write;
use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// Time between two warnings of a kind.
const WINDOW: Duration = Duration::from_secs(60);
/// Most kinds and subjects remembered.
const MOST_KEYS: usize = 4096;
/// Fields that say what a warning is about.
const SUBJECTS: &[&str] = &[
    "message",
    "pod",
    "receiver",
    "served",
    "kind",
    "condition",
    "reason",
];

static HELD_BACK: AtomicU64 = AtomicU64::new(0);

/// Warnings that were held back by all filters of this process.
#[must_use]
pub fn held_back() -> u64 {
    HELD_BACK.load(Ordering::Relaxed)
}

/// Lets one warning per kind (its place in the source and its text) and subject through per minute.
#[derive(Debug, Default)]
pub struct Throttle {
    last: Mutex<HashMap<u64, Instant, FxBuildHasher>>,
}

impl Throttle {
    fn admits(&self, key: u64, now: Instant) -> bool {
        let mut last = self.last.lock();
        if let Some(before) = last.get(&key)
            && now.saturating_duration_since(*before) < WINDOW
        {
            return false;
        }
        if MOST_KEYS <= last.len() {
            last.retain(|_, before| now.saturating_duration_since(*before) < WINDOW);
        }
        if MOST_KEYS <= last.len() {
            // More subjects than can be told apart: better a warning too many.
            last.clear();
        }
        last.insert(key, now);
        true
    }
}

// A layer of its own and not a filter of the layer that writes: per-layer filters keep state between events
// that a rejection by `event_enabled` leaves behind (tracing-subscriber 0.3.23).
impl<S: Subscriber> Layer<S> for Throttle {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        if *event.metadata().level() != Level::WARN {
            return true;
        }
        let mut subject = Subject(String::new());
        event.record(&mut subject);
        let mut hasher = FxBuildHasher.build_hasher();
        event.metadata().callsite().hash(&mut hasher);
        subject.0.hash(&mut hasher);
        let admitted = self.admits(hasher.finish(), Instant::now());
        if !admitted {
            HELD_BACK.fetch_add(1, Ordering::Relaxed);
        }
        admitted
    }
}

struct Subject(String);

impl Visit for Subject {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if SUBJECTS.contains(&field.name()) {
            // Writing to a String cannot fail.
            let _ = writeln!(self.0, "{value:?}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::sync::Arc;
    use tracing_subscriber::EnvFilter;
    use tracing_subscriber::layer::SubscriberExt;

    #[test]
    fn one_per_key_and_minute() {
        let throttle = Throttle::default();
        let now = Instant::now();
        assert!(throttle.admits(1, now));
        assert!(!throttle.admits(1, now + Duration::from_secs(59)));
        assert!(throttle.admits(2, now));
        assert!(throttle.admits(1, now + Duration::from_secs(60)));
    }

    #[test]
    fn however_many_subjects_there_are_memory_is_bounded() {
        let throttle = Throttle::default();
        let now = Instant::now();
        for key in 0..20_000 {
            assert!(throttle.admits(key, now));
        }
        assert!(throttle.last.lock().len() <= MOST_KEYS);
    }

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn warnings_are_told_apart_by_kind_and_pod() {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::registry()
            .with(EnvFilter::new("info"))
            .with(Throttle::default())
            .with(tracing_subscriber::fmt::layer().with_writer(move || writer.clone()));
        tracing::subscriber::with_default(subscriber, || {
            for pod in ["a", "b", "a", "a"] {
                tracing::warn!(pod, count = 1, "slow");
                tracing::warn!(pod, "gone");
                tracing::info!(pod, "told");
                tracing::debug!(pod, "detail");
            }
        });
        let text = String::from_utf8(lines.0.lock().clone()).unwrap();
        let count = |word: &str| text.lines().filter(|line| line.contains(word)).count();
        assert_eq!(
            (count("slow"), count("gone"), count("told"), count("detail")),
            (2, 2, 4, 0)
        );
    }
}
