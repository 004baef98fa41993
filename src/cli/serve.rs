//! `sidestep serve`: run the picker.

use crate::app::App;
use std::path::PathBuf;
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};

/// Arguments of `sidestep serve`.
#[derive(Debug, clap::Args)]
pub struct ServeArgs {
    /// Process config (`kind: SidestepConfig`).
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

/// Runs the picker until SIGTERM or SIGINT, then drains.
///
/// # Errors
/// When a port cannot be bound or a file named by the config cannot be used.
pub async fn run(args: ServeArgs) -> anyhow::Result<ExitCode> {
    // Before anything else, so that a signal during the start is not lost.
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let loaded = match crate::config::load(&args.config) {
        Ok(loaded) => loaded,
        Err(diagnostics) => {
            eprintln!("{diagnostics}");
            return Ok(ExitCode::from(2));
        }
    };
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
    }
    let app = App::start(loaded).await?;
    let stop = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    app.run(stop).await?;
    Ok(ExitCode::SUCCESS)
}
