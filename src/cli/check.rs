//! `sidestep check`: report every fault of config and policy files.

use crate::config::{Finding, Position};
use serde::Serialize;
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `sidestep check`.
#[derive(Debug, clap::Args)]
pub struct CheckArgs {
    /// Process configs, policies and pod lists, told apart by their `kind`.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// How to print what was found.
    #[arg(long, value_enum, default_value_t = Output::Text)]
    output: Output,
    /// Exit with 1 when there are warnings, too.
    #[arg(long)]
    strict: bool,
}

/// A form of output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    /// A line per finding, and one per valid file.
    Text,
    /// A JSON list of findings.
    Json,
}

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Severity {
    /// The file is not used.
    Error,
    /// The file is used, and probably does not mean what it says.
    Warning,
}

/// One finding as it is printed.
#[derive(Debug, Serialize)]
struct Printed<'a> {
    file: String,
    path: &'a str,
    /// Line and column, from 1; null for a file as a whole.
    line: Option<usize>,
    column: Option<usize>,
    severity: Severity,
    message: &'a str,
    /// What to do about it; often empty.
    hint: &'a str,
}

impl<'a> Printed<'a> {
    fn new(finding: &'a Finding, severity: Severity) -> Printed<'a> {
        let (line, column) = match finding.position {
            Position::At { line, column } => (Some(line), Some(column)),
            Position::WholeFile => (None, None),
        };
        Printed {
            file: finding.file.display().to_string(),
            path: &finding.path,
            line,
            column,
            severity,
            message: &finding.message,
            hint: &finding.hint,
        }
    }
}

/// Checks each file. Exit code 0 when all are valid, 1 when there are warnings and they are to count
/// (`--strict`), 2 when a file is not valid.
///
/// # Errors
/// When the output cannot be written out.
pub fn run(args: &CheckArgs) -> anyhow::Result<ExitCode> {
    let mut found: Vec<(Severity, Finding)> = Vec::new();
    let mut left_out = 0;
    for file in &args.files {
        match crate::config::check(file) {
            Ok(warnings) => {
                if args.output == Output::Text {
                    for warning in &warnings {
                        println!("warning: {warning}");
                    }
                    println!("{}: valid", file.display());
                }
                found.extend(warnings.into_iter().map(|one| (Severity::Warning, one)));
            }
            Err(faults) => {
                if args.output == Output::Text {
                    println!("{faults}");
                }
                left_out += faults.left_out;
                found.extend(faults.faults.into_iter().map(|one| (Severity::Error, one)));
            }
        }
    }
    if args.output == Output::Json {
        let printed: Vec<Printed<'_>> = found
            .iter()
            .map(|(severity, finding)| Printed::new(finding, *severity))
            .collect();
        println!("{}", serde_json::to_string_pretty(&printed)?);
        if left_out != 0 {
            eprintln!("sidestep: and {left_out} more");
        }
    }
    Ok(ExitCode::from(code(&found, args.strict)))
}

fn code(found: &[(Severity, Finding)], strict: bool) -> u8 {
    let any = |severity| found.iter().any(|(of, _)| *of == severity);
    if any(Severity::Error) {
        2
    } else {
        u8::from(strict && any(Severity::Warning))
    }
}
