//! What the log says, and what it must never say.

use crate::telemetry_support::{completion, head, picker, policy};
use bytes::Bytes;
use parking_lot::Mutex;
use sidestep::telemetry::trace::Tracing;
use std::io;
use std::sync::Arc;
use tracing_subscriber::EnvFilter;

const SECRET: &str = "SECRET-4711";

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Field report 44 (e).
#[tokio::test]
async fn one_line_per_decision_and_no_prompt_text_at_any_level() {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .json()
        .with_env_filter(EnvFilter::new("trace"))
        .with_writer(move || writer.clone())
        .finish();
    let _here = tracing::subscriber::set_default(subscriber);
    let picker = picker(policy(), &Tracing::Off);
    for _ in 0..3 {
        let picked = picker
            .pick(head(None, Some(SECRET)), completion(SECRET))
            .await
            .unwrap();
        let mut flight = picked.flight;
        let answer = format!(r#"{{"choices":[{{"text":"{SECRET}"}}],"usage":"{SECRET}"}}"#);
        flight.response_bytes(answer.as_bytes());
        flight.finish();
    }
    let long = "x".repeat(64 << 10);
    for broken in [
        format!(r#"{{"model":"m","prompt":"{SECRET}","#),
        format!(r#"{{"model":"m","prompt":{{"{SECRET}":1}}}}"#),
        format!(r#"{{"model":"m","prompt":"{long}{SECRET}"#),
    ] {
        let refusal = picker
            .pick(head(None, None), Some(Bytes::from(broken)))
            .await
            .unwrap_err();
        assert_eq!(refusal.status, 400);
        assert!(!refusal.message.contains(SECRET), "{}", refusal.message);
    }
    let text = String::from_utf8(lines.0.lock().clone()).unwrap();
    assert!(!text.contains(SECRET), "{text}");
    let decided: Vec<serde_json::Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .filter(|line: &serde_json::Value| line["fields"]["message"] == "decided")
        .collect();
    assert_eq!(decided.len(), 3, "{text}");
    for line in decided {
        assert_eq!(line["level"], "DEBUG");
        for field in [
            "id",
            "route",
            "because",
            "decode",
            "model",
            "prompt_tokens",
            "generation",
        ] {
            assert!(!line["fields"][field].is_null(), "{field}: {line}");
        }
    }
}
