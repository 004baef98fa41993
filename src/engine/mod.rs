//! A simulated engine pod.
pub mod answer;
pub mod cache;
pub mod scheduler;
pub mod timing;
