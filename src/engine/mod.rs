//! A simulated engine pod.
pub mod answer;
pub mod cache;
mod driver;
mod events;
pub mod scheduler;
pub mod timing;
