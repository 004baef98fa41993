//! Whole prompts against what a real engine made of them.
//!
//! `SIDESTEP_ENGINE_CAPTURE` names a recording of requests to a running vLLM: `{"steps": [{"path",
//! "request", "status", "response"}]}`, where a render's response carries `token_ids`, and a
//! tokenization's `tokens`. `SIDESTEP_ENGINE_MODEL` names the folder of that engine's
//! `tokenizer.json` and `tokenizer_config.json`. Neither belongs to this repository.

use crate::{read, variable};
use serde_json::Value;
use sidestep::prompt::{Api, Encoder, Profile, ProfileFiles, Profiles, parse};
use sidestep::units::Tokens;

fn ids(list: &Value) -> Vec<u32> {
    serde_json::from_value(list.clone()).unwrap()
}

/// The token lists the engine reports for one step, one per prompt.
fn engine_ids(step: &Value) -> Vec<Vec<u32>> {
    let response = &step["response"];
    match response {
        Value::Array(prompts) => prompts.iter().map(|one| ids(&one["token_ids"])).collect(),
        _ if response["token_ids"].is_array() => vec![ids(&response["token_ids"])],
        _ if response["tokens"].is_array() => vec![ids(&response["tokens"])],
        _ => Vec::new(),
    }
}

#[test]
fn prompts_have_the_engine_s_tokens() {
    let model = variable("SIDESTEP_ENGINE_MODEL");
    let profile = Profile::load(&ProfileFiles {
        tokenizer_json: &read(&format!("{model}/tokenizer.json")),
        tokenizer_config: Some(&read(&format!("{model}/tokenizer_config.json"))),
        ..ProfileFiles::default()
    })
    .unwrap();
    let capture: Value =
        serde_json::from_slice(&read(&variable("SIDESTEP_ENGINE_CAPTURE"))).unwrap();
    let name = capture["steps"][0]["request"]["model"].as_str().unwrap();
    let profile = profile.named(name.into(), Vec::new());
    let encoder = Encoder::new(Profiles::new(vec![profile]).unwrap(), 0);

    let (mut rendered, mut counted) = (0, 0);
    for step in capture["steps"].as_array().unwrap() {
        let (name, path) = (
            step["step"].as_str().unwrap(),
            step["path"].as_str().unwrap(),
        );
        let request = &step["request"];
        let api = match path.trim_end_matches("/render") {
            "/v1/chat/completions" => Api::ChatCompletions,
            "/v1/completions" => Api::Completions,
            "/tokenize" if request["messages"].is_array() => Api::ChatCompletions,
            "/tokenize" => Api::Completions,
            _ => continue,
        };
        if step["status"] != 200 {
            continue;
        }
        let request = parse(api, request.to_string().as_bytes()).unwrap();
        let ours = encoder.token_ids(&request).unwrap();
        let theirs = engine_ids(step);
        if !theirs.is_empty() {
            assert_eq!(ours, theirs, "{name}");
            rendered += 1;
        }
        if let Some(tokens) = step["response"]["usage"]["prompt_tokens"].as_u64() {
            assert_eq!(
                encoder.encode(&request, &[]).tokens,
                Tokens(tokens),
                "{name}"
            );
            counted += 1;
        }
    }
    assert!(0 < rendered && 0 < counted, "{rendered} {counted}");
    println!("{rendered} renders, {counted} counts");
}
