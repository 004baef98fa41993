//! `sidestep top`: live pods and decisions in the terminal.
//!
//! Lives here: arguments, following a picker's admin port, when to draw.
//! Never here: how it looks (see `screen`), anything that the admin port does not tell.
//! Invariant: memory does not grow with time, and the terminal is left as it was found.

mod screen;

use crate::cli::demo::client::{Client, Events};
use anyhow::{Context as _, bail};
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use screen::{Decision, Outcome, Pod, Policy, Screen, Style};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// How long one answer may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long to wait before a lost picker is asked again.
const PAUSE: Duration = Duration::from_secs(1);
/// The longest event: far above what the picker sends.
const LONGEST_EVENT: usize = 16 << 20;

/// Arguments of `sidestep top`.
#[derive(Debug, clap::Args)]
pub struct TopArgs {
    /// Where the picker's admin port is.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:9090")]
    url: String,
    /// A file with the admin token, where one is set.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Print one table and exit, as when the output is no terminal.
    #[arg(long)]
    once: bool,
    /// Seconds between two looks at the pods.
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=3600))]
    every: u64,
}

/// Shows pods and decisions until Ctrl-C, or once.
///
/// # Errors
/// When the picker cannot be reached (with `--once`), or the terminal cannot be written to.
pub async fn run(args: TopArgs) -> anyhow::Result<ExitCode> {
    let source = Source::new(&args)?;
    let terminal = std::io::stdout().is_terminal();
    if args.once || !terminal {
        let mut screen = Screen::default();
        screen.look(source.pods().await?, source.policy().await?);
        let mut feed = Feed::open(&source).await?;
        // The first event says what there is; it may be nothing.
        if let Some(told) = feed.next().await? {
            told.add_to(&mut screen);
        }
        print!(
            "{}",
            screen.draw(&source.url, Style::Plain, (160, usize::MAX))
        );
        return Ok(ExitCode::SUCCESS);
    }
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let style = match std::env::var_os("NO_COLOR") {
        Some(set) if !set.is_empty() => Style::Plain,
        _ => Style::Colour,
    };
    let _screen = Alternate::enter()?;
    tokio::select! {
        _ = interrupt.recv() => Ok(ExitCode::SUCCESS),
        _ = terminate.recv() => Ok(ExitCode::SUCCESS),
        shown = show(&source, Duration::from_secs(args.every), style) => shown,
    }
}

/// Follows the picker and draws, for ever.
async fn show(source: &Source, every: Duration, style: Style) -> anyhow::Result<ExitCode> {
    let mut screen = Screen::default();
    loop {
        if let Err(lost) = follow(source, every, style, &mut screen).await {
            screen.lost(format!("{lost:#}"));
        }
        draw(source, style, &screen)?;
        tokio::time::sleep(PAUSE).await;
    }
}

/// Follows one live stream to its end.
async fn follow(
    source: &Source,
    every: Duration,
    style: Style,
    screen: &mut Screen,
) -> anyhow::Result<()> {
    let mut feed = Feed::open(source).await?;
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            told = feed.next() => match told? {
                Some(told) => told.add_to(screen),
                None => bail!("the picker ended the stream"),
            },
            _ = ticks.tick() => {
                screen.look(source.pods().await?, source.policy().await?);
                draw(source, style, screen)?;
            }
        }
    }
}

fn draw(source: &Source, style: Style, screen: &Screen) -> anyhow::Result<()> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout())
        .map(|size| (usize::from(size.ws_col), usize::from(size.ws_row)))
        .ok()
        .filter(|(columns, lines)| 0 < *columns && 0 < *lines)
        .unwrap_or((80, 24));
    let text = screen.draw(&source.url, style, size);
    let mut stdout = std::io::stdout().lock();
    // Home; each line cleared to its end; what was below cleared: no flicker.
    let text = text.replace('\n', "\x1b[K\r\n");
    write!(stdout, "\x1b[H{}\x1b[J", text.trim_end_matches("\r\n"))?;
    stdout.flush().context("writing to the terminal")
}

/// The terminal's other screen, left when this is dropped.
struct Alternate;

impl Alternate {
    fn enter() -> anyhow::Result<Alternate> {
        let mut stdout = std::io::stdout().lock();
        write!(stdout, "\x1b[?1049h\x1b[?25l").context("writing to the terminal")?;
        Ok(Alternate)
    }
}

impl Drop for Alternate {
    fn drop(&mut self) {
        let mut stdout = std::io::stdout().lock();
        let left = write!(stdout, "\x1b[?25h\x1b[?1049l");
        left.and_then(|()| stdout.flush()).ok();
    }
}

/// A picker's admin port.
struct Source {
    client: Client,
    url: String,
    token: Option<String>,
}

impl Source {
    fn new(args: &TopArgs) -> anyhow::Result<Source> {
        let token = args
            .token_file
            .as_ref()
            .map(|path| std::fs::read_to_string(path).with_context(|| path.display().to_string()));
        let url = args.url.trim_end_matches('/').to_owned();
        if !url.starts_with("http://") {
            bail!("--url: expected an address such as http://127.0.0.1:9090, found {url}");
        }
        Ok(Source {
            client: Client::default(),
            url,
            token: token.transpose()?.map(|token| token.trim().to_owned()),
        })
    }

    async fn pods(&self) -> anyhow::Result<Vec<Pod>> {
        self.json("/v1/pods").await
    }

    async fn policy(&self) -> anyhow::Result<Policy> {
        self.json("/v1/policy").await
    }

    async fn json<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        let answer = async {
            let body = self.open(path).await?.collect().await;
            anyhow::Ok(body.with_context(|| path.to_owned())?.to_bytes())
        };
        let body = tokio::time::timeout(PATIENCE, answer)
            .await
            .with_context(|| format!("{}{path}: no answer in time", self.url))??;
        serde_json::from_slice(&body)
            .with_context(|| format!("{}{path}: not what a picker answers", self.url))
    }

    /// The body of a successful answer.
    async fn open(&self, path: &str) -> anyhow::Result<Incoming> {
        let url = format!("{}{path}", self.url);
        let mut request = Request::get(&url);
        if let Some(token) = &self.token {
            request = request.header(http::header::AUTHORIZATION, format!("Bearer {token}"));
        }
        let request = request.body(Full::<Bytes>::default()).context("request")?;
        let response = self
            .client
            .send(request)
            .await
            .with_context(|| url.clone())?;
        let status = response.status();
        if status.is_success() {
            return Ok(response.into_body());
        }
        let body = response.into_body().collect().await?.to_bytes();
        let body: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
        let message = body["error"]["message"]
            .as_str()
            .unwrap_or("no reason given");
        bail!("{url} answers {status}: {}", screen::printable(message))
    }
}

/// What one event says.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Told {
    Decisions { records: Vec<Decision> },
    Outcomes(Vec<Outcome>),
}

impl Told {
    fn add_to(self, screen: &mut Screen) {
        match self {
            Told::Decisions { records } => screen.decided(records),
            Told::Outcomes(outcomes) => screen.settled(outcomes),
        }
    }
}

/// The live stream.
struct Feed {
    body: Incoming,
    events: Events,
    told: std::collections::VecDeque<String>,
    unread: usize,
}

impl Feed {
    async fn open(source: &Source) -> anyhow::Result<Feed> {
        let opened = tokio::time::timeout(PATIENCE, source.open("/v1/decisions/stream")).await;
        Ok(Feed {
            body: opened.context("no answer in time")??,
            events: Events::default(),
            told: std::collections::VecDeque::new(),
            unread: 0,
        })
    }

    /// The next event; nothing at the end. Can be dropped and called again.
    async fn next(&mut self) -> anyhow::Result<Option<Told>> {
        loop {
            if let Some(data) = self.told.pop_front() {
                let told = serde_json::from_str(&data).context("not what a picker sends")?;
                return Ok(Some(told));
            }
            let Some(frame) = self.body.frame().await else {
                return Ok(None);
            };
            let frame = frame.context("the stream broke off")?;
            if let Some(data) = frame.data_ref() {
                self.unread += data.len();
                let told = self.events.push(data);
                if !told.is_empty() {
                    self.unread = 0;
                }
                self.told.extend(told);
                if LONGEST_EVENT < self.unread {
                    bail!("an event without an end");
                }
            }
        }
    }
}
