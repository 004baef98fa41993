//! `sidestep probe`: ask a running deployment, as `helm test` does.
//!
//! Lives here: what is asked, and what counts as an answer.
//! Never here: HTTP (see `demo::client`).
//! Invariant: exit code 0 means that everything asked for was answered as it should be in time.

use crate::cli::demo::client::{Answer, Client};
use anyhow::{Context as _, bail};
use http::StatusCode;
use std::process::ExitCode;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout_at};

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(500);

/// Ask a running deployment; repeats until it answers or the time is over.
#[derive(Clone, Debug, clap::Args)]
pub struct ProbeArgs {
    /// A URL that has to answer 200, e.g. `http://picker:9090/readyz`.
    #[arg(long, value_name = "URL")]
    ready: Option<String>,
    /// Where to send a chat completion; it has to be answered by a pod that the picker chose.
    #[arg(long, value_name = "URL", requires = "model")]
    chat: Option<String>,
    /// The model to ask for.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Seconds until the probe gives up.
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    timeout: u64,
}

/// Asks until everything is answered.
///
/// # Errors
/// When the time is over; the message is that of the last attempt.
pub async fn run(args: ProbeArgs) -> anyhow::Result<ExitCode> {
    if args.ready.is_none() && args.chat.is_none() {
        bail!("expected --ready or --chat, found neither");
    }
    let client = Client::default();
    let deadline = Instant::now() + Duration::from_secs(args.timeout);
    if let Some(url) = &args.ready {
        patiently(deadline, || ready(&client, url)).await?;
        println!("{url}: ready");
    }
    if let (Some(url), Some(model)) = (&args.chat, &args.model) {
        let answer = patiently(deadline, || chat(&client, url, model)).await?;
        let decision = answer.decision.unwrap_or_default();
        println!("{url}: answered; the picker's decision was {decision}");
    }
    Ok(ExitCode::SUCCESS)
}

/// The first success of `attempt` before the deadline, or its last failure.
async fn patiently<T, F>(deadline: Instant, attempt: impl Fn() -> F) -> anyhow::Result<T>
where
    F: Future<Output = anyhow::Result<T>>,
{
    let mut last = None;
    loop {
        match timeout_at(deadline, attempt()).await {
            Ok(Ok(found)) => return Ok(found),
            Ok(Err(error)) if Instant::now() + PAUSE < deadline => last = Some(error),
            Ok(Err(error)) => return Err(error),
            Err(over) => return Err(last.unwrap_or(over.into())),
        }
        sleep(PAUSE).await;
    }
}

async fn ready(client: &Client, url: &str) -> anyhow::Result<()> {
    let (status, body) = client.get(url).await?;
    if status != StatusCode::OK {
        let body = String::from_utf8_lossy(&body);
        bail!("{url}: expected 200, found {status}: {}", body.trim());
    }
    Ok(())
}

async fn chat(client: &Client, url: &str, model: &str) -> anyhow::Result<Answer> {
    let body = serde_json::json!({
        "model": model, "stream": true, "max_tokens": 4,
        "messages": [{"role": "user", "content": "Say hello."}],
    });
    let answer = client
        .chat(url, "sidestep-probe", &body)
        .await
        .with_context(|| url.to_owned())?;
    match &answer.error {
        Some(error) => bail!(
            "{url}: expected 200, found {}: {}",
            answer.status,
            error.trim()
        ),
        None if answer.decision.is_none() => {
            bail!(
                "{url}: expected the header x-sidestep-decision, found none; the picker was not asked"
            )
        }
        None if !answer.complete => {
            bail!("{url}: expected a whole stream, found one that broke off")
        }
        None => Ok(answer),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[tokio::test(start_paused = true)]
    async fn the_last_failure_is_told_when_the_time_is_over() {
        let deadline = Instant::now() + Duration::from_secs(2);
        let tries = Cell::new(0);
        let found: anyhow::Result<()> = patiently(deadline, || {
            tries.set(tries.get() + 1);
            async { bail!("attempt {}", tries.get()) }
        })
        .await;
        assert_eq!(
            found.unwrap_err().to_string(),
            format!("attempt {}", tries.get())
        );
        assert!(tries.get() > 2);
    }

    #[tokio::test(start_paused = true)]
    async fn an_attempt_that_hangs_does_not_outlast_the_deadline() {
        let deadline = Instant::now() + Duration::from_secs(2);
        let found: anyhow::Result<()> = patiently(deadline, std::future::pending).await;
        assert!(found.is_err());
        assert_eq!(Instant::now(), deadline);
    }
}
