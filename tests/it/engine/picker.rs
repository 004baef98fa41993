//! The picker's view against the engine's own: an index fed over the engine's real sockets predicts
//! the engine's prefix hits, through turns, handoffs, eviction and reset.

use super::*;
use sidestep::decide::snapshot::KvSource;
use sidestep::kv::feed::{Feed, FeedSource, spawn};
use sidestep::kv::index::{Index, Limits, Overlaps};
use sidestep::names::PodId;
use sidestep::prompt::{Api, parse};

/// An engine as the picker knows it.
struct Watched {
    engine: Running,
    index: Arc<Index>,
    pod: PodId,
    feed: Feed,
}

async fn watch(config: EngineConfig) -> Watched {
    let engine = start(config).await;
    let index = Arc::new(Index::new(Limits::default()));
    let pod = PodId {
        slot: 0,
        generation: 0,
    };
    index.add_pod(pod);
    let source = FeedSource {
        events: format!("tcp://{}", engine.addresses.events),
        replay: Some(format!("tcp://{}", engine.addresses.replay)),
        topic: String::new(),
    };
    let feed = spawn(index.clone(), pod, source);
    Watched {
        engine,
        index,
        pod,
        feed,
    }
}

impl Watched {
    /// Waits until the feed has heard all the engine has said.
    async fn settled(&self) {
        let last = self.engine.replay(0).await.last().map(|(seq, _)| *seq);
        let heard = async {
            while self.feed.stats().last_seq != last {
                tokio::task::yield_now().await;
            }
        };
        let waited = tokio::time::timeout(PATIENCE, heard).await;
        waited.unwrap_or_else(|_| panic!("{:?} instead of {last:?}", self.feed.stats()));
    }

    /// The tokens of `body`'s prompt that the engine will find, by the picker's account: it holds
    /// whole blocks, and always computes at least the last token.
    async fn predicted(&self, body: &Value) -> u64 {
        self.settled().await;
        let bytes = body.to_string();
        let request = parse(Api::ChatCompletions, bytes.as_bytes()).expect("a body");
        let size = BlockSize::new(BLOCK as u32).expect("not zero");
        let prompt = encoder().encode(&request, &[size]);
        let mut overlaps = Overlaps::new();
        self.index.overlaps(&prompt.chains, &mut overlaps);
        let held = u64::from(overlaps.get(self.pod).total().0) * BLOCK;
        held.min((prompt.tokens.0 - 1) / BLOCK * BLOCK)
    }
}

fn grown(turns: &mut Vec<(String, String)>, question: &str, max_tokens: u32) -> Value {
    turns.push(("user".into(), question.into()));
    let messages: Vec<(&str, &str)> = turns
        .iter()
        .map(|(role, text)| (&**role, &**text))
        .collect();
    chat(&messages, max_tokens)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_index_predicts_every_turn_of_crowded_conversations() {
    let watched = watch(EngineConfig {
        blocks: Blocks(90),
        max_model_len: Tokens(1_440),
        ..config(Role::Both)
    })
    .await;
    let mut conversations = [Vec::new(), Vec::new(), Vec::new()];
    let (mut hits, mut misses) = (0, 0);
    for turn in 0..5 {
        for (at, turns) in conversations.iter_mut().enumerate() {
            let question = essay(&format!("conversation {at} turn {turn}"));
            let body = grown(turns, &question[..400], 37);
            let predicted = watched.predicted(&body).await;
            let answer = watched.engine.chat(&body).await;
            assert_eq!(cached(&answer), predicted, "conversation {at} turn {turn}");
            turns.push(("assistant".into(), text_of(&answer).into()));
            match predicted {
                0 => misses += 1,
                _ => hits += 1,
            }
        }
    }
    assert!(0 < hits && 3 <= misses, "{hits} hits, {misses} misses");
    let events = watched.engine.events().await;
    let removed = events
        .iter()
        .any(|event| matches!(event, Event::Removed(_)));
    assert!(removed, "the cache was crowded");
    assert_eq!(watched.feed.state(), KvSource::Live);
    let stats = watched.feed.stats();
    assert_eq!((stats.malformed, stats.skipped, stats.gaps), (0, 0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_index_predicts_the_bypass_after_a_handoff_and_forgets_with_a_reset() {
    let prefill = start(config(Role::Prefill)).await;
    let decode = watch(config(Role::Decode)).await;
    let mut turns = Vec::new();
    let body = grown(&mut turns, &essay("harbours"), 40);
    assert_eq!(decode.predicted(&body).await, 0);
    let prefiller = prefill.addresses.http.to_string();
    let headers = [("x-prefiller-host-port", &*prefiller)];
    let (_, answer) = decode
        .engine
        .post_with("/v1/chat/completions", &headers, &body)
        .await;
    turns.push(("assistant".into(), text_of(&answer).into()));
    let body = grown(&mut turns, "And the ships?", 3);
    let predicted = decode.predicted(&body).await;
    assert_eq!(predicted, (prompt_tokens(&answer) + 39) / BLOCK * BLOCK);
    assert_eq!(cached(&decode.engine.chat(&body).await), predicted);

    decode
        .engine
        .text("POST", "/reset_prefix_cache", &[], "")
        .await;
    decode
        .engine
        .chat(&chat(&[("user", "Something else")], 1))
        .await;
    assert_eq!(decode.predicted(&body).await, 0);
}

/// Report 8: contents that are null, missing or lists of parts are rendered as the engine renders them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conversation_with_tool_calls_is_found_again_whole() {
    let watched = watch(config(Role::Both)).await;
    let call = json!([{"id": "c1", "type": "function", "function":
        {"name": "get_weather", "arguments": "{\"city\":\"Paris\"}"}}]);
    let answer = json!([{"type": "text", "text": format!("{{\"temp\":20}} {}", essay("weather"))}]);
    for assistant in [
        json!({"role": "assistant", "content": null, "tool_calls": call}),
        json!({"role": "assistant", "tool_calls": call}),
    ] {
        let mut body = chat(&[("user", &essay("Paris"))], 1);
        let messages = body["messages"].as_array_mut().expect("a list");
        messages.push(assistant);
        messages.push(json!({"role": "tool", "tool_call_id": "c1", "content": answer}));
        let first = watched.engine.chat(&body).await;
        let predicted = watched.predicted(&body).await;
        assert_eq!(predicted, (prompt_tokens(&first) - 1) / BLOCK * BLOCK);
        assert_eq!(cached(&watched.engine.chat(&body).await), predicted);
    }
}
