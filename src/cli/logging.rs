//! The log: one line per event, on standard error.
//!
//! Lives here: the filter and the format.
//! Never here: events.
//! Invariant: a warning that repeats is written once a minute per kind and pod (see
//! [`Throttle`]).

use crate::telemetry::throttle::Throttle;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

/// Always part of the filter, in front, so that a filter of the user's can say otherwise: the tokenizer
/// library tells about every file that it reads.
const LIBRARIES: &str = "tk_encode=warn,tokenizers=warn";

/// Starts logging. The filter is `filter`, else `RUST_LOG`, else `quiet`.
pub(super) fn init(filter: Option<&str>, quiet: &str, json: bool) {
    let filter = filter
        .map(str::to_owned)
        .or_else(|| std::env::var("RUST_LOG").ok())
        .unwrap_or_else(|| quiet.to_owned());
    let filter = EnvFilter::new(format!("{LIBRARIES},{filter}"));
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let lines = if json {
        lines.json().boxed()
    } else {
        lines.boxed()
    };
    let set = tracing_subscriber::registry()
        .with(filter)
        .with(Throttle::default())
        .with(lines)
        .try_init();
    if let Err(error) = set {
        eprintln!("sidestep: logging could not be set up: {error}");
    }
}
