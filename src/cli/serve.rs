//! `sidestep serve`: run the picker.

use crate::app::App;
use std::path::PathBuf;
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// Arguments of `sidestep serve`.
#[derive(Debug, clap::Args)]
pub struct ServeArgs {
    /// Process config (`kind: SidestepConfig`).
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

/// Runs the picker until SIGTERM or SIGINT, then drains; a second signal ends it at once, with exit code 1.
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
    let mut signals = async || {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    let (stop, stopped) = oneshot::channel::<()>();
    let twice = async {
        signals().await;
        drop(stop);
        signals().await;
    };
    tokio::select! {
        ended = app.run(async { drop(stopped.await) }) => {
            ended?;
            Ok(ExitCode::SUCCESS)
        }
        () = twice => {
            tracing::error!("a second signal came before the streams that run had ended; they are cut");
            Ok(ExitCode::FAILURE)
        }
    }
}
