use super::*;
use proptest::prelude::*;

fn completion(prompt: &str) -> Result<Request, BodyError> {
    let body = format!(r#"{{"model":"m","prompt":{prompt}}}"#);
    parse(Api::Completions, body.as_bytes())
}

fn chat(body: &str) -> Request {
    parse(Api::ChatCompletions, body.as_bytes()).unwrap()
}

fn conversation(request: &Request) -> &ChatInput {
    match &request.prompt {
        Input::Chat(chat) => chat,
        other => panic!("expected a chat, found {other:?}"),
    }
}

#[test]
fn every_legal_prompt_shape_is_read() {
    let texts = |prompt| match completion(prompt).unwrap().prompt {
        Input::Text(texts) => texts,
        other => panic!("expected texts, found {other:?}"),
    };
    assert_eq!(texts(r#""hi""#), ["hi"]);
    assert_eq!(texts(r#""""#), [""]);
    assert_eq!(texts(r#"["hi","there"]"#), ["hi", "there"]);
    assert_eq!(texts("[]"), [""; 0]);
    let ids = |prompt| match completion(prompt).unwrap().prompt {
        Input::TokenIds(lists) => lists,
        other => panic!("expected token ids, found {other:?}"),
    };
    assert_eq!(ids("[1,15339,15339]"), [vec![1, 15339, 15339]]);
    assert_eq!(
        ids("[[1,2],[],[4294967295]]"),
        [vec![1, 2], vec![], vec![u32::MAX]]
    );
}

#[test]
fn any_other_prompt_shape_is_a_fault_of_prompt() {
    for (prompt, found, offset) in [
        ("null", JsonType::Null, 22),
        ("true", JsonType::Bool, 22),
        ("7", JsonType::Number, 22),
        (r#"{"a":[1,2]}"#, JsonType::Object, 22),
        (r#"["a",1]"#, JsonType::Number, 22),
        (r#"[1,"a",{"b":[]}]"#, JsonType::String, 22),
        ("[1,[2]]", JsonType::Array, 22),
        ("[-1]", JsonType::Number, 22),
        ("[1,4294967296]", JsonType::Number, 22),
        ("[1.5]", JsonType::Number, 22),
        (r#"[["a"]]"#, JsonType::String, 22),
        ("[[[1]]]", JsonType::Array, 22),
        ("[[1],2]", JsonType::Number, 22),
        ("[null]", JsonType::Null, 22),
    ] {
        match completion(prompt) {
            Err(BodyError::Wrong {
                param: "prompt",
                found: f,
                offset: o,
                ..
            }) => {
                assert_eq!((f, o), (found, offset), "{prompt}");
            }
            other => panic!("{prompt}: {other:?}"),
        }
    }
    let missing = parse(Api::Completions, br#"{"model":"m"}"#).unwrap_err();
    assert_eq!(missing.param(), Some("prompt"));
}

#[test]
fn embeddings_stand_for_a_prompt() {
    for body in [
        r#"{"model":"m","prompt_embeds":"AAAA"}"#,
        r#"{"model":"m","prompt":null,"prompt_embeds":["AAAA"]}"#,
        r#"{"model":"m","prompt":"","prompt_embeds":"AAAA"}"#,
    ] {
        let request = parse(Api::Completions, body.as_bytes()).unwrap();
        assert!(matches!(request.prompt, Input::Embeddings), "{body}");
    }
}

#[test]
fn of_a_repeated_key_the_last_value_counts() {
    let request = chat(
        r#"{"model":"allowed","messages":[{"role":"user","content":"first"}],"stream":true,
            "model":"blocked","messages":[{"role":"user","content":"last"}],"stream":false}"#,
    );
    assert_eq!(request.model.as_str(), "blocked");
    assert!(!request.stream);
    let content = conversation(&request).messages[0]
        .get_attr("content")
        .unwrap();
    assert_eq!(content.as_str(), Some("last"));

    let escaped = chat(r#"{"model":"a","mod\u0065l":"b","messages":[]}"#);
    assert_eq!(escaped.model.as_str(), "b");

    // A faulty value that is replaced is no fault; a good one replaced by a faulty one is.
    let mended = chat(r#"{"model":5,"messages":7,"model":"m","messages":[]}"#);
    assert_eq!(mended.model.as_str(), "m");
    let spoilt = parse(Api::Completions, br#"{"model":"m","prompt":"x","model":5}"#);
    assert!(
        matches!(
            spoilt,
            Err(BodyError::Wrong {
                param: "model",
                offset: 34,
                ..
            })
        ),
        "{spoilt:?}"
    );

    // Elsewhere a repeated key is nobody's business.
    chat(r#"{"model":"m","messages":[],"metadata":{"a":1,"a":2}}"#);
}

#[test]
fn a_repeated_key_inside_a_message_counts_last_at_the_first_one_s_place() {
    let request = chat(r#"{"model":"m","messages":[{"content":"a","role":"user","content":"b"}]}"#);
    assert_eq!(
        conversation(&request).messages[0].to_string(),
        r#"{"content": "b", "role": "user"}"#
    );
}

#[test]
fn unknown_fields_are_skipped_whatever_they_hold() {
    let deep = "[".repeat(50_000) + &"]".repeat(50_000);
    let body = format!(
        r#"{{"x":{deep},"seed":9007199254740993,"stop":["a",null],"y":{{"model":"no"}},"model":"m","prompt":"p","logit_bias":{{"1":-1e300}}}}"#
    );
    let request = parse(Api::Completions, body.as_bytes()).unwrap();
    assert_eq!(request.model.as_str(), "m");
    // Fields of the other API are unknown to this one.
    let request = parse(
        Api::Completions,
        br#"{"model":"m","prompt":"p","messages":5}"#,
    )
    .unwrap();
    assert!(matches!(request.prompt, Input::Text(_)));
}

#[test]
fn nesting_is_bounded_where_values_are_kept() {
    let deep = "[".repeat(200) + &"]".repeat(200);
    let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":{deep}}}]}}"#);
    let error = parse(Api::ChatCompletions, body.as_bytes()).unwrap_err();
    assert!(
        matches!(
            error,
            BodyError::Syntax {
                fault: "recursion limit exceeded",
                ..
            }
        ),
        "{error:?}"
    );
    let deep = "[".repeat(200) + &"]".repeat(200);
    assert!(matches!(completion(&deep), Err(BodyError::Syntax { .. })));
}

#[test]
fn a_body_without_a_usable_model_is_refused_by_name() {
    let refused = |body: &str| parse(Api::ChatCompletions, body.as_bytes()).unwrap_err();
    for body in [
        r#"{"messages":[]}"#,
        r#"{"model":null,"messages":[]}"#,
        r#"{"model":["m"],"messages":[]}"#,
        r#"{"model":{"name":"m"},"messages":[]}"#,
    ] {
        assert_eq!(refused(body).param(), Some("model"), "{body}");
    }
    assert_eq!(refused(r#"{"model":"m"}"#).param(), Some("messages"));
    assert_eq!(
        refused(r#"{"model":"m","messages":"hi"}"#).param(),
        Some("messages")
    );
    assert_eq!(
        refused(r#"{"model":"m","messages":["hi"]}"#).param(),
        Some("messages")
    );
    assert_eq!(
        refused(r#"{"model":7,"messages":[]}"#).to_string(),
        "model: expected a string, found a number at byte 9"
    );
    assert_eq!(
        refused(r#"{"model":"m"}"#).to_string(),
        "messages: expected a list of objects, found nothing"
    );
}

#[test]
fn a_body_that_is_no_object_says_what_it_is() {
    for (body, found) in [
        ("null", JsonType::Null),
        ("[1]", JsonType::Array),
        ("\"x\"", JsonType::String),
        ("1.5", JsonType::Number),
        ("false", JsonType::Bool),
    ] {
        let error = parse(Api::Completions, body.as_bytes()).unwrap_err();
        assert_eq!(error, BodyError::NotAnObject { found });
    }
    assert!(matches!(
        parse(Api::Completions, b""),
        Err(BodyError::Syntax { offset: 0, .. })
    ));
    assert!(matches!(
        parse(Api::Completions, b"{} {}"),
        Err(BodyError::Syntax { .. })
    ));
    assert!(
        parse(
            Api::Completions,
            b"\xEF\xBB\xBF{\"model\":\"m\",\"prompt\":\"p\"} \n"
        )
        .is_ok()
    );
}

#[test]
fn errors_and_debug_output_never_carry_text_of_the_body() {
    const SECRET: &str = "SECRET-4711";
    for body in [
        r#"{"model":"m","prompt":"SECRET-4711","#,
        r#"{"model":"m","prompt":"SECRET-4711" x}"#,
        r#"{"model":"m","prompt":"SECRET-4711\x"}"#,
        r#"{"model":"m","prompt":{"SECRET-4711":"SECRET-4711"}}"#,
        r#"{"model":"m","prompt":["SECRET-4711",1]}"#,
        r#"{"model":["SECRET-4711"],"prompt":"x"}"#,
        r#"{"model":"m","messages":{"SECRET-4711":1},"prompt":SECRET-4711}"#,
        r#"{"model":"m","messages":["SECRET-4711"],"prompt":["SECRET-4711",["x"]]}"#,
        r#""SECRET-4711""#,
        r#"SECRET-4711"#,
        r#"{SECRET-4711:1}"#,
        r#"{"SECRET-4711"}"#,
    ] {
        for api in [Api::Completions, Api::ChatCompletions] {
            let error = parse(api, body.as_bytes()).unwrap_err();
            assert!(!error.to_string().contains("SECRET"), "{error}");
            assert!(!format!("{error:?}").contains("SECRET"), "{error:?}");
        }
    }
    let request = completion(&format!("\"{SECRET}\"")).unwrap();
    assert!(!format!("{request:?}").contains("SECRET"));
    let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{SECRET}"}}]}}"#);
    assert!(!format!("{:?}", chat(&body)).contains("SECRET"));
}

#[test]
fn routing_fields_are_read_and_odd_ones_left_to_the_engine() {
    let read = |fields: &str| chat(&format!(r#"{{"model":"m","messages":[],{fields}}}"#));
    let session = |fields| read(fields).session.map(|session| session.to_string());
    assert_eq!(
        session(r#""session_id":"a","prompt_cache_key":"b""#).unwrap(),
        "a"
    );
    assert_eq!(
        session(r#""prompt_cache_key":"b","session_id":null"#).unwrap(),
        "b"
    );
    assert_eq!(
        session(r#""session_id":"","prompt_cache_key":7,"user":"u""#),
        None
    );
    let long = session(&format!(r#""session_id":"{}""#, "x".repeat(1 << 20))).unwrap();
    assert!(long.len() < 64, "{long}");

    assert_eq!(read(r#""cache_salt":"t""#).tenant.unwrap().as_str(), "t");
    assert_eq!(read(r#""cache_salt":"""#).tenant, None);
    assert_eq!(read(r#""priority":-3"#).priority, Some(-3));
    assert_eq!(read(r#""priority":1e300"#).priority, Some(i32::MAX));
    assert_eq!(read(r#""priority":"high""#).priority, None);
    assert_eq!(read(r#""n":2"#).sequences, Sequences::Several);
    assert_eq!(read(r#""n":2,"n":1"#).sequences, Sequences::One);
    assert_eq!(read(r#""n":null,"best_of":2"#).sequences, Sequences::One);
    assert_eq!(read(r#""max_tokens":5"#).max_tokens, Some(5));
    assert_eq!(
        read(r#""max_tokens":5,"max_completion_tokens":6.0"#).max_tokens,
        Some(6)
    );
    assert_eq!(read(r#""max_tokens":-1"#).max_tokens, None);
    assert_eq!(
        read(r#""max_tokens":18446744073709551615"#).max_tokens,
        Some(u32::MAX)
    );
    assert!(read(r#""stream":true"#).stream);
    assert!(!read(r#""stream":"true""#).stream);
    assert_eq!(
        read(r#""add_special_tokens":false"#).special_tokens,
        SpecialTokens::Skip
    );
    assert_eq!(
        read(r#""truncate_prompt_tokens":8"#).truncation,
        Truncation::KeepLast(8)
    );
    assert_eq!(
        read(r#""truncate_prompt_tokens":8,"truncation_side":"right""#).truncation,
        Truncation::KeepFirst(8)
    );
    assert_eq!(
        read(r#""truncate_prompt_tokens":-1"#).truncation,
        Truncation::Off
    );

    let request = read(
        r#""add_generation_prompt":false,"continue_final_message":true,"tool_choice":"none",
           "tools":[{"type":"function"}],"documents":null,"reasoning_effort":"low""#,
    );
    let chat = conversation(&request);
    assert!(!chat.add_generation_prompt && chat.continue_final_message && chat.tools_declined);
    assert_eq!(chat.tools.as_ref().unwrap().len(), Some(1));
    assert!(chat.documents.is_none());
    assert_eq!(chat.reasoning_effort.as_deref(), Some("low"));
    assert!(conversation(&read(r#""n":1"#)).add_generation_prompt);
}

#[test]
fn an_overly_complex_conversation_is_read_over_in_bounded_memory() {
    let zeros = "0,".repeat(MAX_VALUES + 10);
    let body =
        format!(r#"{{"model":"m","messages":[{{"content":[{zeros}0]}},{{"role":"user"}}]}}"#);
    let request = chat(&body);
    assert!(conversation(&request).too_complex);
    let small = chat(r#"{"model":"m","messages":[{"content":[0]}]}"#);
    assert!(!conversation(&small).too_complex);
}

#[test]
fn only_the_end_of_a_path_names_the_api() {
    for (path, api) in [
        ("/v1/chat/completions", Some(Api::ChatCompletions)),
        (
            "/v1/chat/completions/?x=/v1/completions",
            Some(Api::ChatCompletions),
        ),
        ("/gateway/team/v1/completions", Some(Api::Completions)),
        ("/completions#top", Some(Api::Completions)),
        ("/v1/models", None),
        ("/v1/completions/render", None),
        ("/xcompletions", None),
        ("completions", None),
        ("", None),
    ] {
        assert_eq!(Api::from_path(path), api, "{path}");
    }
}

/// Bytes that are nearly a body: pieces of JSON in any order, some of them broken.
fn nearly_json() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop::sample::select(vec![
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        "\"",
        "\\",
        "\\u00",
        "\\ud800",
        "\"model\"",
        "\"messages\"",
        "\"prompt\"",
        "\"role\"",
        "\"content\"",
        "\"tools\"",
        "\"mod\\u0065l\"",
        "null",
        "true",
        "-0",
        "1e999",
        "18446744073709551616",
        "\"x\"",
        "\u{feff}",
        " ",
        "\n",
        "é",
    ]);
    prop::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat().into_bytes())
}

proptest! {
    #[test]
    fn parsing_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        for api in [Api::ChatCompletions, Api::Completions] {
            let _ = parse(api, &bytes);
        }
    }

    #[test]
    fn parsing_nearly_json_never_panics_and_places_lie_inside(bytes in nearly_json()) {
        for api in [Api::ChatCompletions, Api::Completions] {
            let offset = match parse(api, &bytes) {
                Err(BodyError::Syntax { offset, .. } | BodyError::Wrong { offset, .. }) => offset,
                _ => 0,
            };
            prop_assert!(offset <= bytes.len());
        }
    }

    #[test]
    fn texts_survive_parsing(text in any::<String>()) {
        let body = serde_json::json!({ "model": "m", "prompt": text }).to_string();
        match parse(Api::Completions, body.as_bytes()).unwrap().prompt {
            Input::Text(texts) => prop_assert_eq!(texts, [text]),
            other => prop_assert!(false, "{:?}", other),
        }
    }
}
