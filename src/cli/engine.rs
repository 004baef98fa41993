//! `sidestep engine`: one simulated engine pod as a process.
//!
//! Lives here: the flags, reading the tokenizer's files, the line that tells the addresses.
//! Never here: what an engine does (`engine`).
//! Invariant: the first line on stdout is one JSON object with the addresses really bound, so that a
//! parent process can ask for port 0.

use crate::engine::timing::{Link, Pace};
use crate::engine::{Engine, EngineConfig, Listeners, LocalPrefill, Role};
use crate::names::ModelName;
use crate::prompt::{Encoder, Profile, ProfileFiles, Profiles};
use crate::units::{BlockSize, Blocks, Ratio, Tokens};
use anyhow::Context;
use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

/// Run a simulated OpenAI-compatible engine pod.
#[derive(Clone, Debug, clap::Args)]
pub struct EngineArgs {
    /// What the engine is for.
    #[arg(long, value_enum, default_value_t = RoleArg::Both)]
    pub role: RoleArg,
    /// Where the OpenAI API, /metrics and /health listen; port 0 takes a free one. Other engines are
    /// told this address, so it must be one they can reach when engines hand over.
    #[arg(long, default_value = "127.0.0.1:8000", value_name = "IP:PORT")]
    pub listen: SocketAddr,
    /// Where KV events are published (ZMQ PUB); port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:5557", value_name = "IP:PORT")]
    pub events: SocketAddr,
    /// Where KV events are replayed (ZMQ ROUTER); port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:5558", value_name = "IP:PORT")]
    pub replay: SocketAddr,
    /// First frame of event messages.
    #[arg(long, default_value = "")]
    pub topic: String,
    /// Event batches kept for replay.
    #[arg(long, default_value_t = 10_000, value_name = "BATCHES")]
    pub replay_batches: usize,
    /// The name the model is served under.
    #[arg(long, default_value = "sidestep-small", value_name = "NAME")]
    pub model: String,
    /// The name of an adapter (LoRA) served besides; may be repeated.
    #[arg(long = "adapter", value_name = "NAME")]
    pub adapters: Vec<String>,
    /// A tokenizer.json to use instead of the built-in one.
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// The tokenizer_config.json that belongs to it.
    #[arg(long, value_name = "FILE", requires = "tokenizer")]
    pub tokenizer_config: Option<PathBuf>,
    /// The chat template that belongs to it, unless the config holds it.
    #[arg(long, value_name = "FILE", requires = "tokenizer")]
    pub chat_template: Option<PathBuf>,
    /// Tokens per KV block.
    #[arg(long, default_value_t = 16, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub block_size: u32,
    /// KV blocks.
    #[arg(long, default_value_t = 16_384, value_name = "BLOCKS")]
    pub kv_blocks: u32,
    /// Longest prompt plus answer; by default what the cache holds, at most 131072.
    #[arg(long, value_name = "TOKENS")]
    pub max_model_len: Option<u64>,
    /// Tokens one scheduler pass may compute.
    #[arg(long, default_value_t = 8_192, value_name = "TOKENS")]
    pub max_num_batched_tokens: u64,
    /// Sequences that may run at once.
    #[arg(long, default_value_t = 256, value_name = "N")]
    pub max_num_seqs: u32,
    /// Sequences that may wait; beyond, requests get 503.
    #[arg(long, default_value_t = 4_096, value_name = "N")]
    pub max_waiting: u32,
    /// Every modelled duration is multiplied by this; 0 does not wait at all.
    #[arg(long, default_value = "1", value_name = "FACTOR", value_parser = ratio)]
    pub time_scale: Ratio,
    /// Bytes of KV cache per token.
    #[arg(long, default_value_t = 131_072, value_name = "BYTES")]
    pub kv_bytes_per_token: u32,
    /// Bandwidth of KV transfers in GB/s; 0 is instantaneous.
    #[arg(long, default_value = "25", value_name = "GB/S", value_parser = ratio)]
    pub kv_bandwidth: Ratio,
    /// Whether a decode engine can prefill when no prefill engine is named.
    #[arg(long, value_enum, default_value_t = LocalPrefillArg::Able)]
    pub local_prefill: LocalPrefillArg,
    /// Words after which an answer ends by itself.
    #[arg(long, default_value_t = 128, value_name = "TOKENS")]
    pub answer_tokens: u32,
    /// Seconds a prefill engine keeps blocks that no decode engine fetches.
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    pub kv_lease: u32,
    /// Remember the last N requests (headers, body hash) and show them under /sim/requests.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub record_requests: usize,
}

/// See [`Role`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum RoleArg {
    /// Computes prompts for decode engines.
    Prefill,
    /// Fetches prompts and decodes.
    Decode,
    /// Either.
    Both,
}

/// See [`LocalPrefill`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LocalPrefillArg {
    /// It can.
    Able,
    /// It refuses such requests with 400.
    Unable,
}

fn ratio(text: &str) -> Result<Ratio, String> {
    let number = text.parse().ok().and_then(Ratio::new);
    number.ok_or_else(|| "expected a finite number of at least 0".to_owned())
}

/// Runs the engine until SIGTERM or SIGINT.
///
/// # Errors
/// When a file cannot be read or makes no tokenizer, an address cannot be bound, or the sizes
/// contradict each other.
pub async fn run(args: EngineArgs) -> anyhow::Result<()> {
    let config = config(&args)?;
    let http = TcpListener::bind(args.listen)
        .await
        .with_context(|| format!("--listen {}", args.listen))?;
    let listeners = Listeners {
        http,
        events: args.events,
        replay: args.replay,
    };
    let engine = Engine::bind(config, listeners).await?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{}", serde_json::to_string(&engine.addresses())?)?;
    stdout.flush()?;
    engine
        .serve(async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        })
        .await;
    Ok(())
}

fn config(args: &EngineArgs) -> anyhow::Result<EngineConfig> {
    let model = ModelName::from(args.model.as_str());
    let adapters = args.adapters.iter().map(|name| ModelName::from(&**name));
    let profile = profile(args)?.named(model.clone(), adapters.collect());
    let encoder = Encoder::new(Profiles::new(vec![profile])?, 0);
    let role = match args.role {
        RoleArg::Prefill => Role::Prefill,
        RoleArg::Decode => Role::Decode,
        RoleArg::Both => Role::Both,
    };
    let block_size =
        BlockSize::new(args.block_size).context("--block-size: expected at least 1, found 0")?;
    let config = EngineConfig::new(role, model, Arc::new(encoder), block_size);
    let blocks = Blocks(args.kv_blocks);
    let fitting = block_size.tokens(blocks).min(config.max_model_len);
    Ok(EngineConfig {
        local_prefill: match args.local_prefill {
            LocalPrefillArg::Able => LocalPrefill::Able,
            LocalPrefillArg::Unable => LocalPrefill::Unable,
        },
        blocks,
        max_model_len: args.max_model_len.map_or(fitting, Tokens),
        batch_tokens: Tokens(args.max_num_batched_tokens),
        sequences: args.max_num_seqs,
        waiting: args.max_waiting,
        link: Link {
            bytes_per_token: args.kv_bytes_per_token,
            gigabytes_per_second: args.kv_bandwidth,
        },
        pace: Pace(args.time_scale),
        answer_tokens: args.answer_tokens,
        lease: Duration::from_secs(u64::from(args.kv_lease)),
        topic: args.topic.clone(),
        replay_batches: args.replay_batches,
        record_requests: args.record_requests,
        ..config
    })
}

fn profile(args: &EngineArgs) -> anyhow::Result<Profile> {
    let Some(tokenizer) = &args.tokenizer else {
        return Ok(Profile::builtin()?);
    };
    let read = |path: &PathBuf| {
        std::fs::read(path).with_context(|| format!("{}: cannot be read", path.display()))
    };
    let tokenizer_json = read(tokenizer)?;
    let tokenizer_config = args.tokenizer_config.as_ref().map(read).transpose()?;
    let chat_template = args.chat_template.as_ref().map(read).transpose()?;
    let chat_template = chat_template
        .map(|bytes| String::from_utf8(bytes).context("--chat-template: expected UTF-8"))
        .transpose()?;
    Ok(Profile::load(&ProfileFiles {
        tokenizer_json: &tokenizer_json,
        tokenizer_config: tokenizer_config.as_deref(),
        chat_template: chat_template.as_deref(),
        ..ProfileFiles::default()
    })?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        engine: EngineArgs,
    }

    fn config_of(flags: &[&str]) -> anyhow::Result<EngineConfig> {
        let flags = std::iter::once("engine").chain(flags.iter().copied());
        config(&Command::try_parse_from(flags)?.engine)
    }

    #[test]
    fn defaults_make_an_engine() {
        let config = config_of(&[]).expect("defaults");
        assert_eq!(config.role, Role::Both);
        assert_eq!(config.max_model_len, Tokens(131_072));
    }

    #[test]
    fn the_longest_request_shrinks_with_the_cache() {
        let config = config_of(&["--kv-blocks", "100"]).expect("a small cache");
        assert_eq!(config.max_model_len, Tokens(1_600));
    }

    #[test]
    fn senseless_flags_are_refused() {
        for flags in [
            ["--block-size", "0"],
            ["--time-scale", "-1"],
            ["--time-scale", "NaN"],
            ["--kv-bandwidth", "inf"],
            ["--role", "router"],
            ["--tokenizer", "/nonexistent"],
        ] {
            assert!(config_of(&flags).is_err(), "{flags:?}");
        }
    }

    #[test]
    fn adapters_are_served_beside_the_model() {
        let config = config_of(&["--model", "m", "--adapter", "a"]).expect("flags");
        let adapter = config.encoder.profiles().resolve(&"a".into());
        assert_eq!(adapter.and_then(|found| found.adapter), Some("a".into()));
    }
}
