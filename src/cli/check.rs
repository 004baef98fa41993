//! `sidestep check`: report every fault of config and policy files.

use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `sidestep check`.
#[derive(Debug, clap::Args)]
pub struct CheckArgs {
    /// Process configs, policies and pod lists, told apart by their `kind`.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
}

/// Checks each file; exit code 0 when all are valid, 2 when one is not.
///
/// # Errors
/// Never; faults of files are printed.
pub fn run(args: &CheckArgs) -> anyhow::Result<ExitCode> {
    let mut code = ExitCode::SUCCESS;
    for file in &args.files {
        match crate::config::check(file) {
            Ok(warnings) => {
                for warning in &warnings {
                    println!("warning: {warning}");
                }
                println!("{}: valid", file.display());
            }
            Err(diagnostics) => {
                println!("{diagnostics}");
                code = ExitCode::from(2);
            }
        }
    }
    Ok(code)
}
