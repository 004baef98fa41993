//! Placeholder until the feed lands.
use crate::decide::snapshot::KvSource;
use crate::kv::index::Index;
use crate::names::PodId;
use std::sync::Arc;
use std::time::Duration;
/// x
#[derive(Debug)]
pub struct Feed;
/// x
#[derive(Debug)]
pub struct FeedSource {
    /// x
    pub events: String,
    /// x
    pub replay: Option<String>,
    /// x
    pub topic: String,
}
/// x
#[derive(Debug, Default)]
pub struct FeedStats {
    /// x
    pub batches: u64,
    /// x
    pub events: u64,
    /// x
    pub malformed: u64,
    /// x
    pub skipped: u64,
    /// x
    pub gaps: u64,
    /// x
    pub resets: u64,
    /// x
    pub replays: u64,
    /// x
    pub reconnects: u64,
    /// x
    pub last_event_age: Option<Duration>,
}
impl Feed {
    /// x
    pub fn state(&self) -> KvSource {
        KvSource::Absent
    }
    /// x
    pub fn stats(&self) -> FeedStats {
        FeedStats::default()
    }
}
/// x
pub fn spawn(_: Arc<Index>, _: PodId, _: FeedSource) -> Feed {
    Feed
}
