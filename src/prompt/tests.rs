use super::openai::Truncation;
use super::profile::{ClientTemplate, DeclinedTools};
use super::*;
use crate::names::ModelName;
use crate::units::BlockSize;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::{Arc, LazyLock};

const BLOCK: u32 = 4;

fn size() -> BlockSize {
    BlockSize::new(BLOCK).unwrap()
}

/// The built-in model as `m` with adapter `lora`, and `raw`, which has no tokenizer.
static PROFILES: LazyLock<Profiles> = LazyLock::new(|| {
    let exact = Profile::builtin().unwrap();
    let exact = exact.named("m".into(), vec!["lora".into()]);
    let estimate = Profile::byte_estimate("raw".into(), vec!["raw-lora".into()]);
    Profiles::new(vec![exact, estimate]).unwrap()
});

fn encoder(memo_bytes: usize) -> Encoder {
    Encoder::new(PROFILES.clone(), memo_bytes)
}

fn request(api: Api, body: &Value) -> Request {
    parse(api, body.to_string().as_bytes()).unwrap()
}

fn chat(body: &Value) -> Request {
    request(Api::ChatCompletions, body)
}

fn completion(body: &Value) -> Request {
    request(Api::Completions, body)
}

/// The text whose tokens the engine sees.
fn seen(encoder: &Encoder, request: &Request) -> String {
    let ids = encoder.token_ids(request).unwrap().remove(0);
    let model = encoder.profiles().resolve(&request.model).unwrap().profile;
    model.tokenizer().unwrap().decode(&ids).unwrap()
}

fn keys(prompt: &Prompt) -> &[crate::blocks::BlockKey] {
    &prompt.chains[0].keys
}

#[test]
fn a_chat_is_counted_with_the_model_s_template() {
    let encoder = encoder(0);
    let request = chat(&json!({"model": "m", "messages": [{"role": "user", "content": "Hello"}]}));
    assert_eq!(
        seen(&encoder, &request),
        "<|bos|><|turn|>user\nHello<|end|>\n<|turn|>assistant\n"
    );
    let ids = encoder.token_ids(&request).unwrap().remove(0);
    let prompt = encoder.encode(&request, &[size()]);
    assert_eq!(prompt.tokens, Tokens(ids.len() as u64));
    assert_eq!(prompt.counted, Counted::Exact);
    assert_eq!(prompt.trouble, None);
    assert_eq!(keys(&prompt).len(), ids.len() / BLOCK as usize);
}

#[test]
fn a_begin_of_sequence_token_is_part_of_a_plain_prompt() {
    let encoder = encoder(0);
    let text = "The weather in Paris is mild and cloudy, with a little rain in the afternoon.";
    // What the engine stores: BOS, then the text.
    let model = (encoder.profiles().resolve(&"m".into())).unwrap();
    let tokenizer = model.profile.tokenizer().unwrap();
    let bos = tokenizer.added_token("<|bos|>").unwrap();
    assert_eq!(tokenizer.prefix(), [bos]);
    let mut engine = vec![bos];
    tokenizer.encode_into(text, &mut engine).unwrap();
    let as_ids = encoder.encode(
        &completion(&json!({"model": "m", "prompt": engine})),
        &[size()],
    );

    let plain = encoder.encode(
        &completion(&json!({"model": "m", "prompt": text})),
        &[size()],
    );
    assert_eq!(keys(&plain), keys(&as_ids));
    assert_eq!(plain.tokens, Tokens(engine.len() as u64));

    let without = json!({"model": "m", "prompt": text, "add_special_tokens": false});
    let without = encoder.encode(&completion(&without), &[size()]);
    assert_eq!(without.tokens, Tokens(engine.len() as u64 - 1));
    assert_ne!(keys(&without)[0], keys(&plain)[0]);
}

#[test]
fn a_chat_template_writes_its_own_special_tokens() {
    let encoder = encoder(0);
    let with = |special: Value| {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}]});
        body["add_special_tokens"] = special;
        seen(&encoder, &chat(&body))
    };
    assert!(with(Value::Null).starts_with("<|bos|><|turn|>"));
    assert!(with(json!(false)).starts_with("<|bos|><|turn|>"));
    assert!(with(json!(true)).starts_with("<|bos|><|bos|><|turn|>"));
}

#[test]
fn special_tokens_in_a_user_s_text_are_special() {
    let encoder = encoder(0);
    let request = completion(&json!({"model": "m", "prompt": "a<|end|>b"}));
    let ids = encoder.token_ids(&request).unwrap().remove(0);
    assert_eq!(ids.len(), 4, "BOS, a, the token, b: {ids:?}");
}

#[test]
fn tools_arguments_and_continuations_make_different_prompts() {
    let encoder = encoder(0);
    let messages = json!([
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "It is"},
    ]);
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let texts = [
        json!({}),
        json!({"tools": tools}),
        json!({"chat_template_kwargs": {"enable_thinking": false}}),
        json!({"add_generation_prompt": false, "continue_final_message": true}),
    ]
    .map(|mut body| {
        body["model"] = json!("m");
        body["messages"] = messages.clone();
        seen(&encoder, &chat(&body))
    });
    let turns = "<|turn|>user\nWeather?<|end|>\n<|turn|>assistant\nIt is";
    assert_eq!(
        texts,
        [
            format!("<|bos|>{turns}<|end|>\n<|turn|>assistant\n"),
            format!(
                "<|bos|><|turn|>tools\n{{\"type\": \"function\", \"function\": {{\"name\": \"f\"}}}}\n<|end|>\n{turns}<|end|>\n<|turn|>assistant\n"
            ),
            format!("<|bos|>{turns}<|end|>\n<|turn|>assistant\n<|think|><|think_end|>\n"),
            format!("<|bos|>{turns}"),
        ]
    );
}

#[test]
fn a_batch_is_as_long_as_its_prompts_and_chained_by_its_first() {
    let encoder = encoder(0);
    let count = |prompt: Value| {
        encoder.encode(
            &completion(&json!({"model": "m", "prompt": prompt})),
            &[size()],
        )
    };
    let (first, second) = ("What is the weather in Paris today?", "Hello");
    let (one, two) = (count(json!(first)), count(json!(second)));
    let both = count(json!([first, second]));
    assert_eq!(both.tokens, Tokens(one.tokens.0 + two.tokens.0));
    assert_eq!(keys(&both), keys(&one));

    let ids = count(json!([[1, 2, 3, 4, 5], [6, 7]]));
    assert_eq!(ids.tokens, Tokens(7));
    assert_eq!(keys(&ids), keys(&count(json!([1, 2, 3, 4]))));

    let none = count(json!([]));
    assert_eq!((none.tokens, keys(&none).len()), (Tokens(0), 0));
    assert_eq!(count(json!("")).tokens, Tokens(1), "BOS alone");
}

#[test]
fn token_ids_need_no_tokenizer() {
    let encoder = encoder(0);
    let ids = |model| completion(&json!({"model": model, "prompt": [1, 15339, 15339, 7, 9]}));
    let raw = encoder.encode(&ids("raw"), &[size()]);
    assert_eq!((raw.tokens, raw.counted), (Tokens(5), Counted::Exact));
    assert_eq!(keys(&raw), keys(&encoder.encode(&ids("m"), &[size()])));
    let adapted = encoder.encode(&ids("raw-lora"), &[size()]);
    assert_ne!(keys(&raw), keys(&adapted));
}

#[test]
fn without_a_tokenizer_the_length_is_a_quarter_of_the_bytes() {
    let encoder = encoder(0);
    let count = |body: &Value, api| {
        let prompt = encoder.encode(&request(api, body), &[size()]);
        assert_eq!(prompt.counted, Counted::EstimatedFromBytes);
        assert!(prompt.chains.is_empty());
        (prompt.tokens.0, prompt.trouble)
    };
    let text = |text: &str| count(&json!({"model": "raw", "prompt": text}), Api::Completions);
    assert_eq!(text(""), (0, None));
    assert_eq!(text("a"), (1, None));
    assert_eq!(text("abcde"), (2, None));
    assert_eq!(
        count(
            &json!({"model": "raw", "prompt": ["abcde", "a"]}),
            Api::Completions
        ),
        (3, None)
    );
    // The role and the text, not the picture.
    let picture = "A".repeat(100_000);
    let body = json!({"model": "raw", "messages": [{"role": "user", "content": [
        {"type": "text", "text": "12345678"},
        {"type": "image_url", "image_url": {"url": picture}},
    ]}]});
    let (tokens, trouble) = count(&body, Api::ChatCompletions);
    assert!((2..10).contains(&tokens), "{tokens}");
    assert_eq!(trouble, None);
}

#[test]
fn what_cannot_be_counted_is_estimated_and_says_why() {
    let encoder = encoder(0);
    let trouble = |request: &Request| {
        let prompt = encoder.encode(request, &[size()]);
        assert_eq!(prompt.counted, Counted::EstimatedFromBytes);
        assert!(prompt.chains.is_empty() && Tokens(1) <= prompt.tokens);
        prompt.trouble
    };
    let message = |content: Value| {
        chat(&json!({"model": "m", "messages": [{"role": "user", "content": content}]}))
    };
    let image = json!([{"type": "image_url", "image_url": {"url": "http://x"}}, "what is it?"]);
    assert_eq!(trouble(&message(image)), Some(EncodeTrouble::Multimodal));
    let unknown = completion(&json!({"model": "other", "prompt": "x"}));
    assert_eq!(trouble(&unknown), Some(EncodeTrouble::UnknownModel));
    let embeddings = completion(&json!({"model": "m", "prompt_embeds": "AAAA"}));
    assert_eq!(trouble(&embeddings), Some(EncodeTrouble::Multimodal));
    // A message without a role: the template adds it to a string.
    let roleless = chat(&json!({"model": "m", "messages": [{"content": "hello"}]}));
    assert_eq!(trouble(&roleless), Some(EncodeTrouble::Template));
    let values = vec![0; openai::MAX_VALUES + 1];
    let complex = chat(
        &json!({"model": "m", "messages": [{"role": "user", "content": "hello"}], "documents": values}),
    );
    assert_eq!(trouble(&complex), Some(EncodeTrouble::TooComplex));
}

#[test]
fn tenants_and_adapters_share_no_blocks_and_sizes_each_get_a_chain() {
    let encoder = encoder(0);
    let text = "The weather in Paris is mild and cloudy, with a little rain.";
    let first_key = |model: &str, salt: Value| {
        let body = json!({"model": model, "prompt": text, "cache_salt": salt});
        keys(&encoder.encode(&completion(&body), &[size()]))[0]
    };
    let plain = first_key("m", Value::Null);
    assert_eq!(plain, first_key("m", json!("")));
    let others = [
        first_key("m", json!("a")),
        first_key("m", json!("b")),
        first_key("lora", Value::Null),
        first_key("lora", json!("a")),
    ];
    for (index, key) in others.iter().enumerate() {
        assert!(*key != plain && !others[..index].contains(key), "{index}");
    }

    let sizes = [2, 8, 4096].map(|size| BlockSize::new(size).unwrap());
    let prompt = encoder.encode(&completion(&json!({"model": "m", "prompt": text})), &sizes);
    let full: Vec<usize> = prompt.chains.iter().map(|chain| chain.keys.len()).collect();
    let tokens = usize::try_from(prompt.tokens.0).unwrap();
    assert_eq!(full, [tokens / 2, tokens / 8, 0]);
    assert_eq!(
        prompt
            .chains
            .iter()
            .map(|chain| chain.size)
            .collect::<Vec<_>>(),
        sizes
    );
}

#[test]
fn a_truncated_prompt_keeps_its_special_tokens() {
    let encoder = encoder(0);
    let ids = |more: Value| {
        let mut body = json!({"model": "m", "prompt": "one two three four five six"});
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        encoder.token_ids(&completion(&body)).unwrap().remove(0)
    };
    let all = ids(json!({}));
    let last = ids(json!({"truncate_prompt_tokens": 4}));
    assert_eq!(last, [&all[..1], &all[all.len() - 3..]].concat());
    let first = ids(json!({"truncate_prompt_tokens": 4, "truncation_side": "right"}));
    assert_eq!(first, all[..4]);
    let bare = ids(json!({"truncate_prompt_tokens": 4, "add_special_tokens": false}));
    assert_eq!(bare, all[all.len() - 4..]);
    assert_eq!(ids(json!({"truncate_prompt_tokens": 4000})), all);

    let listed =
        completion(&json!({"model": "m", "prompt": [1, 2, 3], "truncate_prompt_tokens": 2}));
    assert_eq!(listed.truncation, Truncation::KeepLast(2));
    assert_eq!(encoder.token_ids(&listed).unwrap(), [[2, 3]]);
    assert_eq!(encoder.encode(&listed, &[]).tokens, Tokens(2));
}

#[test]
fn a_client_s_template_counts_only_where_it_is_trusted() {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "chat_template": "mine: {{ messages[0].content }}"});
    let seen_by = |trust| {
        let name: ModelName = "m".into();
        let profile = Profile::builtin()
            .unwrap()
            .named(name, vec![])
            .client_template(trust);
        seen(
            &Encoder::new(Profiles::new(vec![profile]).unwrap(), 0),
            &chat(&body),
        )
    };
    assert_eq!(seen_by(ClientTemplate::Trusted), "mine: x");
    assert!(seen_by(ClientTemplate::Ignored).starts_with("<|bos|>"));
}

#[test]
fn declined_tools_are_shown_unless_the_engine_hides_them() {
    let body =
        json!({"model": "m", "messages": [], "tools": [{"name": "f"}], "tool_choice": "none"});
    let shown_by = |declined| {
        let name: ModelName = "m".into();
        let profile = Profile::builtin()
            .unwrap()
            .named(name, vec![])
            .declined_tools(declined);
        let encoder = Encoder::new(Profiles::new(vec![profile]).unwrap(), 0);
        seen(&encoder, &chat(&body)).contains("<|turn|>tools")
    };
    assert!(shown_by(DeclinedTools::Shown));
    assert!(!shown_by(DeclinedTools::Hidden));
}

/// A conversation as a client grows it: each turn repeats what was said before.
fn conversation(turns: &[String]) -> Request {
    let messages: Vec<Value> = (turns.iter().enumerate())
        .map(|(index, text)| {
            let role = if index % 2 == 0 { "user" } else { "assistant" };
            json!({"role": role, "content": text})
        })
        .collect();
    chat(&json!({"model": "m", "messages": messages}))
}

#[test]
fn a_growing_conversation_is_chained_as_if_from_scratch() {
    let (scratch, memo) = (encoder(0), encoder(1 << 20));
    let sizes = [size(), BlockSize::new(16).unwrap()];
    let words: Vec<String> = (0..40)
        .map(|turn| format!("Turn {turn}: ") + &"what is the weather in Paris? ".repeat(30))
        .collect();
    for turns in (1..=words.len()).step_by(2) {
        let request = conversation(&words[..turns]);
        assert_eq!(
            memo.encode(&request, &sizes),
            scratch.encode(&request, &sizes)
        );
        // Another key space must not be given the first one's chains.
        let other = Request {
            tenant: Some("t".into()),
            ..request.clone()
        };
        assert_eq!(
            memo.encode(&other, &sizes[..1]),
            scratch.encode(&other, &sizes[..1])
        );
        let special = Request {
            special_tokens: openai::SpecialTokens::Add,
            ..request
        };
        assert_eq!(
            memo.encode(&special, &sizes),
            scratch.encode(&special, &sizes)
        );
    }
    let MemoStats { bytes, hits, .. } = memo.memo();
    assert!(0 < bytes && bytes <= 1 << 20, "{bytes}");
    assert!(30 < hits, "{hits}");
}

#[test]
fn the_memo_stays_within_its_limit() {
    let limit = 100_000;
    let memo = encoder(limit);
    for start in 0..60 {
        let text = format!("{start} <|turn|> words and words ").repeat(1500);
        let prompt = memo.encode(
            &completion(&json!({"model": "m", "prompt": text})),
            &[size()],
        );
        assert_eq!(prompt.counted, Counted::Exact);
        assert!(memo.memo().bytes <= limit);
    }
    assert!(0 < memo.memo().bytes);
}

#[test]
fn many_threads_get_one_thread_s_answers() {
    let encoder = Arc::new(encoder(1 << 20));
    let requests: Arc<Vec<Request>> = Arc::new(
        (0..8)
            .map(|turn| conversation(&vec![format!("{turn} hello there ").repeat(200); turn + 1]))
            .collect(),
    );
    let alone: Vec<Prompt> = requests
        .iter()
        .map(|r| encoder.encode(r, &[size()]))
        .collect();
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let (encoder, requests) = (Arc::clone(&encoder), Arc::clone(&requests));
            std::thread::spawn(move || -> Vec<Prompt> {
                requests
                    .iter()
                    .map(|r| encoder.encode(r, &[size()]))
                    .collect()
            })
        })
        .collect();
    for thread in threads {
        assert_eq!(thread.join().unwrap(), alone);
    }
}

/// Pieces of text that meet at special tokens, broken special tokens and white space.
fn turns() -> impl Strategy<Value = Vec<String>> {
    let piece = prop_oneof![
        prop::sample::select(vec![
            "<|end|>",
            "<|turn|>",
            "<|end",
            "|>",
            "<|",
            "<|bos|>",
            " ",
            "\n\n",
            "  x",
            "é",
            "日本",
            "it's",
            "12345",
            "<|tool_call|><|tool_call_end|>",
            "{\"a\": 1}",
        ])
        .prop_map(str::to_owned),
        "[a-zA-Z ]{1,40}",
        any::<String>(),
    ];
    let turn = prop::collection::vec(piece, 1..12).prop_map(|pieces| pieces.concat());
    prop::collection::vec(turn, 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// The memo looks at texts of 8 KiB and more, so each turn is repeated until it is long.
    #[test]
    fn the_memo_never_changes_an_answer(turns in turns()) {
        let (scratch, memo) = (encoder(0), encoder(1 << 20));
        let long: Vec<String> = turns.iter().map(|turn| turn.repeat(1 + 4000 / turn.len().max(1))).collect();
        for end in 1..=long.len() {
            let request = conversation(&long[..end]);
            prop_assert_eq!(memo.encode(&request, &[size()]), scratch.encode(&request, &[size()]));
            let plain = completion(&json!({"model": "m", "prompt": long[..end].concat()}));
            prop_assert_eq!(memo.encode(&plain, &[size()]), scratch.encode(&plain, &[size()]));
        }
    }

    #[test]
    fn a_longer_prompt_begins_with_the_shorter_one_s_blocks(
        ids in prop::collection::vec(any::<u32>(), 0..200),
        more in prop::collection::vec(any::<u32>(), 0..50),
    ) {
        let encoder = encoder(0);
        let chain = |ids: &[u32]| encoder.encode(&completion(&json!({"model": "m", "prompt": ids})), &[size()]);
        let (short, long) = (chain(&ids), chain(&[&ids[..], &more[..]].concat()));
        prop_assert!(keys(&long).starts_with(keys(&short)));
    }

    #[test]
    fn any_text_survives_the_tokenizer(text in any::<String>()) {
        let model = PROFILES.resolve(&"m".into()).unwrap().profile;
        let tokenizer = model.tokenizer().unwrap();
        let ids = tokenizer.encode(&text, false).unwrap();
        prop_assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    }
}
