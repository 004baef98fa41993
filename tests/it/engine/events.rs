//! What routers hear: live events, replay, eviction, reset.

use super::*;
use sidestep::kv::event::{Adapter, EngineHash, Extra, Stored};
use zeromq::SubSocket;

fn stored(events: &[Event]) -> Vec<&Stored> {
    events
        .iter()
        .filter_map(|event| match event {
            Event::Stored(stored) => Some(&**stored),
            Event::Removed(_) | Event::Cleared => None,
        })
        .collect()
}

fn removed(events: &[Event]) -> Vec<EngineHash> {
    events
        .iter()
        .filter_map(|event| match event {
            Event::Removed(removed) => Some(removed.hashes.clone()),
            Event::Stored(_) | Event::Cleared => None,
        })
        .flatten()
        .collect()
}

#[tokio::test]
async fn stored_events_carry_the_tokens_of_prompt_and_answer() {
    let engine = start(config(Role::Both)).await;
    let body = chat(&[("user", &essay("rivers"))], 40);
    let prompt = engine.tokens(&body).await;
    engine.chat(&body).await;
    let events = engine.events().await;
    let stored = stored(&events);
    let prompt_blocks = prompt.len() / BLOCK as usize;
    assert_eq!(stored[0].hashes.len(), prompt_blocks);
    assert_eq!(stored[0].tokens, prompt[..prompt_blocks * BLOCK as usize]);
    assert_eq!(stored[0].parent, None);
    assert_eq!(u64::from(stored[0].block_size), BLOCK);
    assert_eq!(stored[0].adapter, Adapter::None);
    let mut tokens = Vec::new();
    let mut last = None;
    for event in &stored {
        assert_eq!(event.parent, last, "each continues the one before");
        last = event.hashes.last().copied();
        tokens.extend_from_slice(&event.tokens);
    }
    let computed = prompt.len() + 40 - 1;
    assert_eq!(tokens.len(), computed / BLOCK as usize * BLOCK as usize);
    assert_eq!(tokens[..prompt.len()], prompt);
}

#[tokio::test]
async fn announced_blocks_are_the_ones_the_next_turn_reuses() {
    let engine = start(config(Role::Both)).await;
    let question = essay("glass");
    let said = {
        let first = engine.chat(&chat(&[("user", &question)], 50)).await;
        text_of(&first).to_owned()
    };
    let announced: Vec<u32> = stored(&engine.events().await)
        .iter()
        .flat_map(|event| event.tokens.clone())
        .collect();
    let turns = [
        ("user", &*question),
        ("assistant", &*said),
        ("user", "More"),
    ];
    let body = chat(&turns, 1);
    let prompt = engine.tokens(&body).await;
    let common = announced.iter().zip(&prompt).take_while(|(a, b)| a == b);
    let common = common.count() as u64 / BLOCK * BLOCK;
    assert_eq!(cached(&engine.chat(&body).await), common);
    assert_eq!(
        common,
        announced.len() as u64,
        "all of them, answer included"
    );
}

#[tokio::test]
async fn events_arrive_live_with_topic_and_contiguous_numbers() {
    let engine = start(EngineConfig {
        topic: "kv@pod@small".into(),
        ..config(Role::Both)
    })
    .await;
    let mut subscriber = SubSocket::new();
    let endpoint = format!("tcp://{}", engine.addresses.events);
    subscriber.connect(&endpoint).await.expect("a connection");
    subscriber.subscribe("kv@").await.expect("a subscription");
    // The subscription travels to the publisher; until it is there, nothing is sent.
    let mut live = Vec::new();
    for round in 0.. {
        assert!(round < 1_000, "no event ever arrived");
        let body = chat(&[("user", &essay(&format!("round {round}")))], 1);
        engine.chat(&body).await;
        let soon = Duration::from_millis(200);
        if let Ok(message) = tokio::time::timeout(soon, subscriber.recv()).await {
            live.push(message.expect("a message").into_vec());
            if live.len() == 3 {
                break;
            }
        }
    }
    let mut before = None;
    for frames in live {
        assert_eq!(frames.len(), 3);
        assert_eq!(frames[0].as_ref(), b"kv@pod@small");
        let seq = u64::from_be_bytes(frames[1].as_ref().try_into().expect("eight bytes"));
        assert!(before.is_none_or(|before: u64| before + 1 == seq));
        before = Some(seq);
        let batch = Batch::decode(&frames[2]).expect("a batch");
        assert_eq!(batch.rank, 0);
        assert_eq!(batch.skipped, Default::default());
        let replayed = engine.replay(seq).await;
        assert_eq!(replayed[0], (seq, batch), "replay repeats the live batch");
    }
}

#[tokio::test]
async fn replay_begins_where_asked_and_forgets_the_oldest() {
    let engine = start(EngineConfig {
        replay_batches: 3,
        ..config(Role::Both)
    })
    .await;
    for round in 0..5 {
        let body = chat(&[("user", &essay(&format!("round {round}")))], 1);
        engine.chat(&body).await;
    }
    let numbers = |batches: Vec<(u64, Batch)>| batches.into_iter().map(|(seq, _)| seq);
    let all: Vec<u64> = numbers(engine.replay(0).await).collect();
    assert_eq!(all, [2, 3, 4]);
    let tail: Vec<u64> = numbers(engine.replay(4).await).collect();
    assert_eq!(tail, [4]);
    assert!(engine.replay(9).await.is_empty());
}

#[tokio::test]
async fn a_malformed_replay_request_does_not_stop_replay() {
    let engine = start(config(Role::Both)).await;
    engine.chat(&chat(&[("user", &essay("wind"))], 1)).await;
    let mut dealer = DealerSocket::new();
    let endpoint = format!("tcp://{}", engine.addresses.replay);
    dealer.connect(&endpoint).await.expect("a connection");
    let garbage = ZmqMessage::from(Bytes::from_static(b"garbage"));
    dealer.send(garbage).await.expect("sent");
    assert_eq!(engine.replay(0).await.len(), 1);
}

#[tokio::test]
async fn a_full_cache_withdraws_what_it_evicts() {
    let engine = start(EngineConfig {
        blocks: Blocks(64),
        max_model_len: Tokens(1_024),
        ..config(Role::Both)
    })
    .await;
    let first = chat(&[("user", &essay("one"))], 1);
    engine.chat(&first).await;
    for topic in ["two", "three"] {
        engine.chat(&chat(&[("user", &essay(topic))], 1)).await;
    }
    let events = engine.events().await;
    let gone = removed(&events);
    assert!(!gone.is_empty());
    let mut held: Vec<EngineHash> = Vec::new();
    for event in &events {
        match event {
            Event::Stored(stored) => held.extend(&stored.hashes),
            Event::Removed(removed) => {
                for hash in &removed.hashes {
                    let at = held.iter().position(|held| held == hash);
                    held.remove(at.expect("only what was announced is withdrawn"));
                }
            }
            Event::Cleared => panic!("nothing was reset"),
        }
    }
    assert!(held.len() <= 64);
    // What is left of the first prompt is what its second use finds.
    let of_first = stored(&events)[0].hashes.clone();
    let left = of_first.iter().take_while(|hash| held.contains(hash));
    let expected = left.count() as u64 * BLOCK;
    assert_eq!(cached(&engine.chat(&first).await), expected);
}

#[tokio::test]
async fn a_reset_is_announced_with_the_next_request() {
    let engine = start(config(Role::Both)).await;
    let body = chat(&[("user", &essay("sand"))], 1);
    engine.chat(&body).await;
    let (status, ..) = engine.text("POST", "/reset_prefix_cache", &[], "").await;
    assert_eq!(status, StatusCode::OK);
    assert!(!engine.events().await.contains(&Event::Cleared));
    assert_eq!(cached(&engine.chat(&body).await), 0);
    let last = engine.replay(1).await.pop().expect("a batch").1;
    assert_eq!(last.events[0], Event::Cleared);
    assert!(matches!(last.events[1], Event::Stored(_)));
}

#[tokio::test]
async fn adapters_and_salts_are_named_in_their_events() {
    let engine = start(config(Role::Both)).await;
    let mut body = chat(&[("user", &essay("tides"))], 1);
    body["model"] = json!(ADAPTER);
    body["cache_salt"] = json!("tenant-a");
    engine.chat(&body).await;
    let events = engine.events().await;
    let first = stored(&events)[0];
    assert_eq!(first.adapter, Adapter::Named(ADAPTER.into()));
    let name = || Extra::Text(ADAPTER.into());
    assert_eq!(first.extra[0], [name(), Extra::Text("tenant-a".into())]);
    assert!(first.extra[1..].iter().all(|keys| *keys == [name()]));
}
