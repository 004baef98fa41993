//! sidestep beside its peers, on the same facts in the same process.
//!
//! `cargo run --release --manifest-path benches/peers/Cargo.toml [kernel | index]`. See
//! docs/performance.md for what is timed and what is not.

mod chain_index;
mod dynamo;
mod dynamo_index;
mod facts;
mod index;
mod kernel;
mod ours;
mod ours_index;
mod rounds;
mod workload;

use std::process::ExitCode;

/// A table that prints itself and returns its ratios at 1,000 pods, with what they are of.
type Part = fn() -> Vec<(String, f64)>;

fn main() -> ExitCode {
    let only = std::env::args().nth(1);
    let wanted = |name: &str| only.as_deref().is_none_or(|only| only == name);
    let parts: [(&str, Part); 2] = [("kernel", kernel::run), ("index", index::run)];
    let mut last = Vec::new();
    for (name, run) in parts.into_iter().filter(|(name, _)| wanted(name)) {
        let ratios = run().into_iter();
        let ratios = ratios.map(|(facts, ratio)| format!("{ratio:.3} ({facts})"));
        last.push(format!("{name} {}", ratios.collect::<Vec<_>>().join(", ")));
        println!();
    }
    if last.is_empty() {
        eprintln!("peers: the argument must be kernel or index, or there must be none");
        return ExitCode::FAILURE;
    }
    println!("ours/dynamo at 1,000 pods: {}", last.join("; "));
    ExitCode::SUCCESS
}
