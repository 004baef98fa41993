//! `sidestep demo`: a whole deployment on this machine, and traffic through it.
//!
//! Lives here: arguments, the run, progress, what is printed when.
//! Never here: any part of the picker; the demo drives the same commands that a user would.
//! Invariant: every process it starts ends with it, however it ends.

pub mod client;
pub mod envoy;
pub mod gateway;
pub mod picker;
pub mod process;
mod report;
mod stack;
mod workload;

use crate::cli::demo::client::{Answer, Client};
use crate::cli::demo::report::{Row, Summary};
use crate::cli::demo::stack::{Stack, Urls};
use crate::cli::demo::workload::Conversation;
use anyhow::Context as _;
use futures_util::future::join_all;
use futures_util::{StreamExt as _, stream};
use serde_json::{Value, json};
use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

/// Arguments of `sidestep demo`.
#[derive(Debug, clap::Args)]
pub struct DemoArgs {
    /// How many requests are sent.
    #[arg(long, value_name = "N", default_value_t = 120)]
    requests: usize,
    /// How many conversations go on at once.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    concurrency: u16,
    /// What the traffic is drawn from; the same seed gives the same prompts.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// How slow the simulated engines are; 1 is about a GPU, 0 answers at once.
    #[arg(long, value_name = "FACTOR", default_value_t = 2.0)]
    time_scale: f64,
    /// The policy to decide by (`kind: DisaggregationPolicy`), instead of the demo's own.
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// Print one JSON object per request on stdout, and nothing else there.
    #[arg(long)]
    json: bool,
    /// Leave everything running afterwards, until Ctrl-C.
    #[arg(long)]
    keep: bool,
    /// Print where Envoy is, fetching it if need be, and do nothing else.
    #[arg(long, hide = true)]
    print_envoy: bool,
}

/// Runs the demo.
///
/// # Errors
/// When Envoy cannot be had, or the deployment does not come up.
pub async fn run(args: DemoArgs) -> anyhow::Result<ExitCode> {
    // Before anything is started, so that no signal finds children and nobody who ends them.
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let stop = async {
        tokio::select! {
            _ = interrupt.recv() => 130,
            _ = terminate.recv() => 143,
            _ = hangup.recv() => 129,
        }
    };
    tokio::select! {
        result = demo(args) => result,
        // Dropping the run drops its processes, which kills them.
        code = stop => Ok(ExitCode::from(code)),
    }
}

async fn demo(args: DemoArgs) -> anyhow::Result<ExitCode> {
    if let Some(Err(diagnostics)) = args.policy.as_deref().map(crate::config::check) {
        eprintln!("{diagnostics}");
        return Ok(ExitCode::from(2));
    }
    let envoy = envoy::find().await?;
    if args.print_envoy {
        println!("{}", envoy.display());
        return Ok(ExitCode::SUCCESS);
    }
    let mut stack = Stack::start(&stack::Options {
        envoy,
        policy: args.policy.clone(),
        time_scale: args.time_scale,
    })
    .await?;
    let summary = play(&args, &mut stack).await?;
    if args.keep {
        eprint!("{}", stack.urls().invitation());
        // Ends with Ctrl-C, or when a process that should run does not.
        stack.ended().await?;
    }
    let failed = 0 < summary.failed() || summary.requests() < args.requests;
    if failed {
        stack.keep_logs();
    }
    stack.stop().await;
    Ok(ExitCode::from(u8::from(failed)))
}

/// Sends all requests and prints what became of each.
async fn play(args: &DemoArgs, stack: &mut Stack) -> anyhow::Result<Summary> {
    let (rows, mut done) = mpsc::channel(64);
    let client = Client::default();
    let urls = stack.urls().clone();
    let groups = stream::iter(workload::plan(args.seed, args.requests));
    let traffic = groups.for_each_concurrent(usize::from(args.concurrency), |group| {
        let (client, urls, rows) = (client.clone(), urls.clone(), rows.clone());
        async move {
            let all = group.iter().map(|one| converse(&client, &urls, one, &rows));
            join_all(all).await;
        }
    });
    // Owns the receiver: when nobody reads our output, the senders must learn of it.
    let show = async move {
        let mut output = Output::new(args);
        while let Some(row) = done.recv().await {
            output.show(&row)?;
            if output.summary.requests() == args.requests {
                break;
            }
        }
        anyhow::Ok(output.finish())
    };
    if args.requests == 0 {
        return Ok(Summary::default());
    }
    let traffic = async {
        traffic.await;
        anyhow::Ok(())
    };
    tokio::select! {
        both = async { tokio::try_join!(traffic, show) } => both.map(|((), summary)| summary),
        ended = stack.ended() => Err(ended.err().unwrap_or_else(|| anyhow::anyhow!("a process ended"))),
    }
}

/// One conversation, turn by turn; each turn carries all before it, as chat clients do.
async fn converse(
    client: &Client,
    urls: &Urls,
    conversation: &Conversation,
    rows: &mpsc::Sender<Row>,
) {
    let mut messages = Vec::new();
    if let Some(system) = &conversation.system {
        messages.push(json!({"role": "system", "content": system}));
    }
    for (index, turn) in conversation.turns.iter().enumerate() {
        tokio::time::sleep(Duration::from_millis(turn.think_ms)).await;
        messages.push(json!({"role": "user", "content": turn.text}));
        let body = json!({
            "model": picker::MODEL,
            "messages": messages,
            "max_tokens": turn.max_tokens,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        let answer = client.chat(&urls.chat(), &conversation.id, &body).await;
        let row = match &answer {
            Ok(answer) => {
                let record = record(client, urls, answer).await;
                Row::answered(&conversation.id, index + 1, answer, record)
            }
            Err(error) => Row::unanswered(&conversation.id, index + 1, error),
        };
        // The receiver is gone only when the run is over.
        if rows.send(row).await.is_err() {
            return;
        }
        // A turn that failed is in the history without an answer, as a user would repeat it.
        if let Ok(answer) = answer {
            messages.push(json!({"role": "assistant", "content": answer.text}));
        }
    }
}

/// The picker's record of the decision behind `answer`.
async fn record(client: &Client, urls: &Urls, answer: &Answer) -> Option<Value> {
    let id = answer.decision.as_ref()?;
    let (status, body) = client.get(&urls.decision(id)).await.ok()?;
    if !status.is_success() {
        return None;
    }
    serde_json::from_slice(&body).ok()
}

/// Where rows go: a table, or JSON lines, and progress beside it.
struct Output {
    json: bool,
    requests: usize,
    /// Progress is drawn over itself on a terminal that shows nothing else.
    redraw: bool,
    summary: Summary,
}

impl Output {
    fn new(args: &DemoArgs) -> Output {
        if !args.json {
            println!("{}", report::header());
        }
        Output {
            json: args.json,
            requests: args.requests,
            redraw: std::io::stderr().is_terminal()
                && (args.json || !std::io::stdout().is_terminal()),
            summary: Summary::default(),
        }
    }

    fn show(&mut self, row: &Row) -> anyhow::Result<()> {
        self.summary.add(row);
        let line = if self.json {
            row.to_json().to_string()
        } else {
            row.to_line()
        };
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "{line}").context("writing to stdout")?;
        drop(stdout);
        if let (true, Some(failure)) = (self.json, row.failure()) {
            eprintln!("a request failed: {failure}");
        }
        let count = self.summary.requests();
        if self.redraw {
            eprint!("\r{count} of {} requests ", self.requests);
        } else if count.is_multiple_of(20) {
            eprintln!("{count} of {} requests", self.requests);
        }
        Ok(())
    }

    fn finish(self) -> Summary {
        if self.redraw {
            eprintln!();
        }
        if self.json {
            eprint!("{}", self.summary);
        } else {
            print!("\n{}", self.summary);
        }
        self.summary
    }
}
