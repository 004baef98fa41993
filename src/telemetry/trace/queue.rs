//! Finished spans that wait for export.
//!
//! Lives here: [`Queue`], [`ExportStats`].
//! Never here: sending, waiting on a request's behalf.
//! Invariant: never more than the limits wait, in spans and in bytes; what finds no room is dropped and
//! counted, and nobody is held up.

use crate::telemetry::trace::settings::QueueSettings;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::Notify;

/// Most bytes that wait.
const MOST_BYTES: usize = 64 << 20;
/// Most bytes in one export: a gRPC receiver takes 4 MiB unless told otherwise.
const BATCH_BYTES: usize = 3 << 20;

/// The spans of one request: its own and the finished ones below it, framed.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) own: super::wire::Framed,
    pub(super) children: Vec<u8>,
    pub(super) spans: usize,
}

impl Entry {
    fn bytes(&self) -> usize {
        self.own.as_slice().len() + self.children.len()
    }
}

/// What became of spans so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportStats {
    /// Taken by the receiver.
    pub exported: u64,
    /// Dropped because the queue was full.
    pub dropped_queue_full: u64,
    /// Dropped because the receiver did not take them.
    pub dropped_export_failed: u64,
}

/// Where spans wait.
#[derive(Debug)]
pub(super) struct Queue {
    settings: QueueSettings,
    waiting: Mutex<Waiting>,
    /// Wakes the exporter when a batch is full.
    pub(super) full: Notify,
    exported: AtomicU64,
    dropped_queue_full: AtomicU64,
    dropped_export_failed: AtomicU64,
}

#[derive(Debug, Default)]
struct Waiting {
    entries: VecDeque<Entry>,
    spans: usize,
    bytes: usize,
}

/// Spans taken from the queue to be sent.
#[derive(Debug, Default)]
pub(super) struct Batch {
    entries: Vec<Entry>,
    /// Length of its frames.
    bytes: usize,
    pub(super) spans: usize,
}

impl Batch {
    /// An `ExportTraceServiceRequest` of these spans, after `prefix` bytes of room. Written once, from
    /// where the spans were written.
    pub(super) fn request(&self, resource: &[u8], prefix: usize) -> Vec<u8> {
        super::wire::request(resource, self.bytes, prefix, |out| {
            for entry in &self.entries {
                out.extend_from_slice(entry.own.as_slice());
                out.extend_from_slice(&entry.children);
            }
        })
    }
}

impl Queue {
    pub(super) fn new(settings: QueueSettings) -> Queue {
        Queue {
            settings,
            waiting: Mutex::default(),
            full: Notify::new(),
            exported: AtomicU64::new(0),
            dropped_queue_full: AtomicU64::new(0),
            dropped_export_failed: AtomicU64::new(0),
        }
    }

    /// Adds the spans of a request, or drops them.
    pub(super) fn push(&self, entry: Entry) {
        let (spans, bytes) = (entry.spans, entry.bytes());
        let mut waiting = self.waiting.lock();
        if self.settings.spans < waiting.spans + spans || MOST_BYTES < waiting.bytes + bytes {
            drop(waiting);
            self.dropped_queue_full
                .fetch_add(spans as u64, Ordering::Relaxed);
            return;
        }
        let before = waiting.spans;
        waiting.spans += spans;
        waiting.bytes += bytes;
        waiting.entries.push_back(entry);
        let filled = before < self.settings.batch && self.settings.batch <= waiting.spans;
        drop(waiting);
        if filled {
            self.full.notify_one();
        }
    }

    /// Takes up to a batch; nothing when nothing waits.
    pub(super) fn take(&self) -> Option<Batch> {
        let mut taken = Vec::new();
        let mut batch = Batch::default();
        let mut bytes = 0;
        let mut waiting = self.waiting.lock();
        while let Some(entry) = waiting.entries.front() {
            let fits = batch.spans + entry.spans <= self.settings.batch
                && bytes + entry.bytes() <= BATCH_BYTES;
            if !fits && !taken.is_empty() {
                break;
            }
            let Some(entry) = waiting.entries.pop_front() else {
                break;
            };
            batch.spans += entry.spans;
            bytes += entry.bytes();
            taken.push(entry);
        }
        waiting.spans -= batch.spans;
        waiting.bytes -= bytes;
        drop(waiting);
        batch.bytes = bytes;
        batch.entries = taken;
        (!batch.entries.is_empty()).then_some(batch)
    }

    /// Whether a whole batch waits.
    pub(super) fn holds_batch(&self) -> bool {
        self.settings.batch <= self.waiting.lock().spans
    }

    /// Longest wait before spans are sent.
    pub(super) fn delay(&self) -> std::time::Duration {
        self.settings.delay
    }

    pub(super) fn exported(&self, spans: usize) {
        self.exported.fetch_add(spans as u64, Ordering::Relaxed);
    }

    pub(super) fn failed(&self, spans: usize) {
        self.dropped_export_failed
            .fetch_add(spans as u64, Ordering::Relaxed);
    }

    pub(super) fn stats(&self) -> ExportStats {
        ExportStats {
            exported: self.exported.load(Ordering::Relaxed),
            dropped_queue_full: self.dropped_queue_full.load(Ordering::Relaxed),
            dropped_export_failed: self.dropped_export_failed.load(Ordering::Relaxed),
        }
    }
}
