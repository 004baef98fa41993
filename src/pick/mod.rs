//! The picker: a request in, a plan and what must be released later out.
pub mod head;
pub mod refusal;
pub mod usage;

pub use head::{Head, Headers};
pub use refusal::Refusal;
