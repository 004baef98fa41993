//! A memory of the last generation requests, for tests that ask what really arrived.
//!
//! Lives here: [`Recorder`], behind `/sim/requests`; it keeps nothing unless asked to.
//! Never here: prompt text: a body is kept as its XXH3-128 hash and length only.
//! Invariant: at most `capacity` requests, with at most [`MAX_HEADERS`] headers each.

use parking_lot::Mutex;
use serde::Serialize;
use std::collections::VecDeque;

/// Headers kept of one request.
pub(super) const MAX_HEADERS: usize = 128;

/// One request as it arrived.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Record {
    method: String,
    path: String,
    /// In order of arrival, duplicates included.
    headers: Vec<(String, String)>,
    body_xxh3: String,
    body_bytes: usize,
}

/// The last requests.
pub(super) struct Recorder {
    capacity: usize,
    records: Mutex<VecDeque<Record>>,
}

impl Recorder {
    /// One that keeps `capacity` requests; 0 keeps none.
    pub(super) fn new(capacity: usize) -> Recorder {
        Recorder {
            capacity,
            records: Mutex::default(),
        }
    }

    /// Remembers one request.
    pub(super) fn add(&self, head: &http::request::Parts, body: &[u8]) {
        if self.capacity == 0 {
            return;
        }
        let headers = head.headers.iter().take(MAX_HEADERS);
        let record = Record {
            method: head.method.to_string(),
            path: head.uri.path().to_owned(),
            headers: headers
                .map(|(name, value)| {
                    let value = String::from_utf8_lossy(value.as_bytes());
                    (name.as_str().to_owned(), value.into_owned())
                })
                .collect(),
            body_xxh3: format!("{:032x}", xxhash_rust::xxh3::xxh3_128(body)),
            body_bytes: body.len(),
        };
        let mut records = self.records.lock();
        while self.capacity <= records.len() {
            records.pop_front();
        }
        records.push_back(record);
    }

    /// What is remembered, oldest first; `None` when nothing ever is.
    pub(super) fn all(&self) -> Option<Vec<Record>> {
        (0 < self.capacity).then(|| self.records.lock().iter().cloned().collect())
    }
}
