//! `sidestep crd`: print the CustomResourceDefinition of policies.

use std::process::ExitCode;

/// Prints it, as YAML.
///
/// # Errors
/// When it cannot be written out.
pub fn run() -> anyhow::Result<ExitCode> {
    print!("{}", crate::config::crd::crd()?);
    Ok(ExitCode::SUCCESS)
}
