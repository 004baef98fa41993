//! `sidestep policy`: translate the settings of another router into a policy.

use crate::config::convert::{Converted, Settings, from_dynamo, from_llm_d};
use crate::config::{Diagnostics, MAX_FILE_BYTES};
use anyhow::Context;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Arguments of `sidestep policy`.
#[derive(Debug, clap::Args)]
pub struct PolicyArgs {
    #[command(subcommand)]
    from: From,
}

#[derive(Debug, clap::Subcommand)]
enum From {
    /// From Dynamo's conditional disaggregation: its JSON config, its flags, or its environment.
    FromDynamo {
        /// A JSON config, or a text with the router's flags, such as a command line; `-` is standard input.
        #[arg(
            value_name = "FILE",
            required_unless_present = "env",
            conflicts_with = "env"
        )]
        file: Option<PathBuf>,
        /// Read this process's environment: DYN_ROUTER_CONDITIONAL_DISAGG and what begins with it.
        #[arg(long)]
        env: bool,
        /// The router's queue threshold, which counts where no threshold for busy prefill is given.
        #[arg(long, value_name = "NUMBER", value_parser = threshold)]
        queue_threshold: Option<f64>,
    },
    /// From the EndpointPickerConfig of llm-d's router.
    FromLlmD {
        /// The config; `-` is standard input.
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

fn threshold(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| 0.0 <= *number);
    number.ok_or_else(|| "expected a number of at least 0".to_owned())
}

/// Prints the policy, and on standard error what it does not say. Exit code 2 when the input is at fault.
///
/// # Errors
/// When the input cannot be read.
pub fn run(args: &PolicyArgs) -> anyhow::Result<ExitCode> {
    let converted = match &args.from {
        From::FromDynamo {
            file: Some(file),
            queue_threshold,
            ..
        } => from_dynamo(Settings::Text(&read(file)?, file), *queue_threshold),
        From::FromDynamo {
            file: None,
            queue_threshold,
            ..
        } => from_dynamo(Settings::Environment(&environment()), *queue_threshold),
        From::FromLlmD { file } => from_llm_d(&read(file)?, file),
    };
    Ok(print(converted))
}

fn print(converted: Result<Converted, Diagnostics>) -> ExitCode {
    match converted {
        Ok(Converted { yaml, notes }) => {
            print!("{yaml}");
            for note in notes {
                eprintln!("{note}");
            }
            ExitCode::SUCCESS
        }
        Err(faults) => {
            eprintln!("{faults}");
            ExitCode::from(2)
        }
    }
}

/// Variables whose names or values are not Unicode are none of the router's.
fn environment() -> Vec<(String, String)> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}

fn read(path: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    let most = MAX_FILE_BYTES as u64;
    let read = if path.as_os_str() == "-" {
        std::io::stdin().lock().take(most).read_to_string(&mut text)
    } else {
        std::fs::File::open(path).and_then(|file| file.take(most).read_to_string(&mut text))
    };
    read.with_context(|| format!("{}: cannot be read", path.display()))?;
    Ok(text)
}
