//! The command line: one small file per command.
//!
//! Lives here: arguments, logging, the runtime, exit codes.
//! Never here: what a command does beyond reading its arguments and printing its result.
//! Invariant: exit code 0 means done, 1 that the command ran and failed, 2 that its input is at fault.

pub mod check;
pub mod crd;
pub mod demo;
pub mod engine;
pub mod explain;
mod logging;
pub mod policy;
pub mod probe;
pub mod rights;
pub mod serve;
pub mod top;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Envoy endpoint picker for disaggregated LLM serving.
#[derive(Debug, Parser)]
#[command(name = "sidestep", version, about, long_about = None)]
struct Arguments {
    /// Log filter, e.g. `info` or `sidestep=debug`; `RUST_LOG` when not given.
    #[arg(long, global = true, value_name = "FILTER")]
    log: Option<String>,
    /// Log as JSON, one object per line.
    #[arg(long, global = true)]
    log_json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the picker.
    Serve(serve::ServeArgs),
    /// Check config and policy files; prints every fault with its place.
    Check(check::CheckArgs),
    /// Print the rights that the picker uses in a cluster, as a Role.
    Rights(rights::RightsArgs),
    /// Say why a request would go where it would go, or why one went there.
    Explain(explain::ExplainArgs),
    /// Print the CustomResourceDefinition of policies, for `kubectl apply -f -`.
    Crd,
    /// Translate the settings of another router into a policy.
    Policy(policy::PolicyArgs),
    /// Show pods and decisions of a running picker, live.
    Top(top::TopArgs),
    /// Run a whole deployment on this machine: Envoy, picker, simulated engines, traffic.
    Demo(demo::DemoArgs),
    /// Ask a running deployment, as `helm test` does.
    Probe(probe::ProbeArgs),
    /// Run one simulated engine pod.
    Engine(Box<engine::EngineArgs>),
}

/// Runs the program.
#[must_use]
pub fn main() -> ExitCode {
    let arguments = arguments();
    let quiet = match &arguments.command {
        Command::Demo(_)
        | Command::Check(_)
        | Command::Crd
        | Command::Explain(_)
        | Command::Policy(_)
        | Command::Probe(_)
        | Command::Rights(_)
        | Command::Top(_) => "warn",
        Command::Serve(_) | Command::Engine(_) => "info",
    };
    logging::init(arguments.log.as_deref(), quiet, arguments.log_json);
    // A panic message of a library may quote its input, which may be a prompt: only the place is told.
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string);
        tracing::error!(
            place = place.as_deref().unwrap_or("unknown"),
            "a panic was caught"
        );
    }));
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("sidestep: the runtime could not be started: {error}");
            return ExitCode::from(1);
        }
    };
    let result = runtime.block_on(async {
        match arguments.command {
            Command::Serve(args) => serve::run(args).await,
            Command::Check(args) => check::run(&args),
            Command::Rights(args) => rights::run(&args),
            Command::Explain(args) => explain::run(args).await,
            Command::Crd => crd::run(),
            Command::Policy(args) => policy::run(&args),
            Command::Top(args) => top::run(args).await,
            Command::Demo(args) => demo::run(args).await,
            Command::Probe(args) => probe::run(args).await,
            Command::Engine(args) => engine::run(*args).await.map(|()| ExitCode::SUCCESS),
        }
    });
    // Blocking work that is still queued (a prompt of a request that nobody waits for) must not hold the exit.
    runtime.shutdown_timeout(std::time::Duration::from_millis(200));
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("sidestep: {error:#}");
            ExitCode::from(1)
        }
    }
}

/// The arguments. Called `kubectl-sidestep`, the program is a plugin, and its help says so.
fn arguments() -> Arguments {
    let called = std::env::args_os().next().map(PathBuf::from);
    let plugin = called
        .as_deref()
        .and_then(Path::file_stem)
        .is_some_and(|name| name == "kubectl-sidestep");
    let mut command = Arguments::command();
    if plugin {
        command = command.bin_name("kubectl sidestep");
    }
    match Arguments::from_arg_matches(&command.get_matches()) {
        Ok(arguments) => arguments,
        Err(error) => error.exit(),
    }
}
