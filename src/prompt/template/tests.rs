use super::*;
use crate::prompt::Api;
use crate::prompt::openai::{ChatInput, Input, parse};

/// Prints roles and contents, tools, tool-call arguments and reasoning.
const TEMPLATE: &str = "\
{%- for tool in tools or [] %}{{ tool | tojson }};{% endfor %}
{%- for m in messages %}[{{ m.role }}]{{ m.content }}
{%- for c in m.tool_calls or [] %}({{ c.function.name }}:{{ c.function.arguments | tojson }}){% endfor %}
{%- if m.tool_calls is defined and not m.tool_calls %}(no calls){% endif %}
{%- if m.reasoning is defined %}<{{ m.reasoning }}/{{ m.reasoning_content }}>{% endif %}
{%- if m.name is defined %}={{ m.name }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}
{%- if enable_thinking is defined %}{{ enable_thinking }}{% endif %}
{%- if colour is defined %}{{ colour }}{% endif %}
{%- if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}";

fn chat(fields: &str) -> Box<ChatInput> {
    let body = format!(r#"{{"model":"m",{fields}}}"#);
    match parse(Api::ChatCompletions, body.as_bytes()).unwrap().prompt {
        Input::Chat(chat) => chat,
        other => panic!("expected a chat, found {other:?}"),
    }
}

fn render_with(template: &str, fields: &str) -> Option<String> {
    let template = Template::compile(template).unwrap();
    let arguments = arguments(&chat(fields), template.format(), &[]).ok()?;
    arguments.cut(template.render(&arguments.values).unwrap())
}

fn render(fields: &str) -> String {
    render_with(TEMPLATE, fields).unwrap()
}

#[test]
fn null_missing_and_listed_contents_become_text() {
    let conversation = |assistant: &str| {
        format!(
            r#""messages":[{{"role":"user","content":"Weather in Paris?"}},
            {{"role":"assistant",{assistant}"tool_calls":[{{"id":"c1","type":"function","function":{{"name":"get_weather","arguments":"{{\"city\":\"Paris\"}}"}}}}]}},
            {{"role":"tool","tool_call_id":"c1","content":[{{"type":"text","text":"{{\"temp\":20}}"}}]}}]"#
        )
    };
    let expected = "[user]Weather in Paris?[assistant](get_weather:{\"city\": \"Paris\"})[tool]{\"temp\":20}[assistant]";
    assert_eq!(render(&conversation(r#""content":null,"#)), expected);
    assert_eq!(render(&conversation("")), expected);
}

#[test]
fn texts_of_several_parts_are_joined_by_line_ends() {
    assert_eq!(
        render(
            r#""messages":[{"role":"user","content":[{"type":"text","text":"a"},"b",{"type":"input_text","text":""},{"type":"refusal","refusal":"c"},{"text":"d"}]}]"#
        ),
        "[user]a\nb\nc\nd[assistant]"
    );
}

#[test]
fn a_template_for_parts_gets_parts() {
    let template = "{% for m in messages %}{% for part in m.content %}<{{ part.type }}:{{ part.text }}>{% endfor %}{% endfor %}";
    assert_eq!(
        render_with(template, r#""messages":[{"role":"user","content":"a"},{"role":"user","content":[{"type":"text","text":"b"},{"type":"text","text":""}]},{"role":"assistant"}]"#).unwrap(),
        "<text:a><text:b><text:>"
    );
}

#[test]
fn a_tool_s_answer_is_one_text_unless_it_refers_to_tools() {
    let template = "{% for m in messages %}{% for part in m.content %}{% endfor %}{{ m.content | tojson }}{% endfor %}";
    let render = |parts: &str| {
        let fields = format!(r#""messages":[{{"role":"tool","content":[{parts}]}}]"#);
        (
            render_with(template, &fields).unwrap(),
            render_with("{{ messages[0].content }}", &fields).unwrap(),
        )
    };
    let two = r#"{"type":"text","text":"a"},{"type":"text","text":""},{"type":"text"},"b""#;
    assert_eq!(render(two), ("\"a\\n\\nb\"".into(), "a\nb".into()));
    let reference = r#"{"type":"text","text":"a"},{"type":"tool_reference","name":"f"}"#;
    assert_eq!(
        render(reference),
        (
            r#"[{"type": "text", "text": "a"}, {"type": "tool_reference", "name": "f"}]"#.into(),
            "a\nf".into()
        )
    );
}

#[test]
fn anything_but_text_is_left_to_the_engine() {
    for part in [
        r#"{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}"#,
        r#"{"type":"input_audio","input_audio":{}}"#,
        r#"{"type":"text","text":7}"#,
        r#"{"image_url":{"url":"x"}}"#,
        r#"{"type":7,"text":"a"}"#,
        "7",
    ] {
        let fields = format!(r#""messages":[{{"role":"user","content":[{part}]}}]"#);
        assert_eq!(render_with(TEMPLATE, &fields), None, "{part}");
    }
    assert_eq!(
        render_with(
            TEMPLATE,
            r#""messages":[{"role":"user","content":{"a":1}}]"#
        ),
        None
    );
}

#[test]
fn tool_call_arguments_reach_the_template_as_objects() {
    let with = |arguments: &str| {
        render(&format!(
            r#""messages":[{{"role":"assistant","content":"","tool_calls":[{{"function":{{"name":"f","arguments":{arguments}}}}}]}}],"add_generation_prompt":false"#
        ))
    };
    assert_eq!(
        with(r#""{\"z\":1,\"a\":[1.0,1e-7],\"ü\":\"it's <b>\"}""#),
        "[assistant](f:{\"z\": 1, \"a\": [1.0, 1e-07], \"ü\": \"it's <b>\"})"
    );
    assert_eq!(with(r#"{"z":1}"#), "[assistant](f:{\"z\": 1})");
    // As in Python: whatever the text says.
    assert_eq!(with("\"null\""), "[assistant](f:null)");
    assert_eq!(with("[]"), "[assistant](f:[])");
    for nothing in ["null", "7", "\"\"", "\"{broken\"", "\"{} {}\"", "{}"] {
        assert_eq!(with(nothing), "[assistant](f:{})", "{nothing}");
    }
    assert_eq!(
        render(
            r#""messages":[{"role":"assistant","content":"x","tool_calls":[]}],"add_generation_prompt":false"#
        ),
        "[assistant]x"
    );
}

#[test]
fn reasoning_goes_under_both_its_names_and_names_are_kept() {
    for key in ["reasoning", "reasoning_content"] {
        let fields = format!(r#""messages":[{{"role":"assistant","content":"x","{key}":"why"}}]"#);
        assert_eq!(render(&fields), "[assistant]x<why/why>[assistant]");
    }
    // Only the assistant reasons.
    assert_eq!(
        render(r#""messages":[{"role":"user","content":"x","reasoning":"why","name":"anna"}]"#),
        "[user]x=anna[assistant]"
    );
}

#[test]
fn tools_arguments_and_prompts_all_reach_the_template() {
    let messages = r#""messages":[{"role":"user","content":"x"}]"#;
    let with = |more: &str| render(&format!("{messages}{more}"));
    assert_eq!(with(""), "[user]x[assistant]");
    assert_eq!(
        with(r#","tools":[{"type":"function","function":{"name":"f","b":1,"a":2}}]"#),
        "{\"type\": \"function\", \"function\": {\"name\": \"f\", \"b\": 1, \"a\": 2}};[user]x[assistant]"
    );
    assert_eq!(with(r#","tools":[]"#), "[user]x[assistant]");
    assert_eq!(
        with(r#","chat_template_kwargs":{"enable_thinking":false,"colour":"red"}"#),
        "[user]x[assistant]Falsered"
    );
    assert_eq!(with(r#","add_generation_prompt":false"#), "[user]x");
    // A client cannot replace what is its own field of the request.
    assert_eq!(
        with(r#","chat_template_kwargs":{"messages":[],"tools":[1]}"#),
        "[user]x[assistant]"
    );
    assert_eq!(
        with(r#","reasoning_effort":"none""#),
        "[user]x[assistant]Falsenone"
    );
    assert_eq!(
        with(r#","reasoning_effort":"high""#),
        "[user]x[assistant]Truehigh"
    );
    assert_eq!(
        with(r#","reasoning_effort":"high","chat_template_kwargs":{"enable_thinking":false}"#),
        "[user]x[assistant]Falsehigh"
    );
}

#[test]
fn a_model_s_own_arguments_give_way_to_the_client_s() {
    let template = Template::compile("{{ bos_token }}{{ colour }}").unwrap();
    let base = [("bos_token", "<s>"), ("colour", "blue")].map(|(k, v)| (k.into(), v.into()));
    let render = |fields: &str| {
        let arguments = arguments(&chat(fields), template.format(), &base).unwrap();
        template.render(&arguments.values).unwrap()
    };
    assert_eq!(render(r#""messages":[]"#), "<s>blue");
    assert_eq!(
        render(r#""messages":[],"chat_template_kwargs":{"colour":"red"}"#),
        "<s>red"
    );
}

#[test]
fn a_continued_message_is_the_end_of_the_text() {
    let keeps = "{% for m in messages %}<{{ m.content }}>\n{% endfor %}";
    let trims = "{% for m in messages %}<{{ m.content | trim }}>\n{% endfor %}";
    let parts =
        "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}";
    let fields = r#""messages":[{"role":"user","content":"a"},{"role":"assistant","content":"It is "}],"add_generation_prompt":false,"continue_final_message":true"#;
    assert_eq!(render_with(keeps, fields).unwrap(), "<a>\n<It is ");
    assert_eq!(render_with(trims, fields).unwrap(), "<a>\n<It is");
    assert_eq!(render_with(parts, fields).unwrap(), "<a><It is ");
    // A template that leaves the message out cannot continue it.
    assert_eq!(render_with("nothing", fields), None);
    assert_eq!(
        render_with(keeps, r#""messages":[],"continue_final_message":true"#).unwrap(),
        ""
    );
}

#[test]
fn a_refusal_carries_a_place_and_no_text() {
    let template =
        Template::compile("\n{{ raise_exception('no: ' + messages[0].content) }}").unwrap();
    let arguments = arguments(
        &chat(r#""messages":[{"content":"SECRET-4711"}]"#),
        template.format(),
        &[],
    )
    .unwrap();
    let error = template.render(&arguments.values).unwrap_err();
    assert_eq!(error.line, 2);
    assert!(!format!("{error} {error:?}").contains("SECRET"));

    let error = Template::compile("{{ 1 }}\n{% for x %}").unwrap_err();
    assert_eq!(error.line, 2);
}

#[test]
fn a_panic_of_the_template_engine_is_a_refusal() {
    // minijinja 2.24 indexes an empty list here; once it does not, the empty render is right.
    let template = Template::compile("{% for m in messages[::-1] %}{{ m }}{% endfor %}").unwrap();
    let rendered = template.render(minijinja::context! { messages => Vec::<String>::new() });
    assert!(
        rendered.is_err() || rendered.as_deref() == Ok(""),
        "{rendered:?}"
    );
}

#[test]
fn the_date_of_the_day_is_in_the_template_s_reach() {
    let before = clock::strftime(SystemTime::now(), "%Y-%m-%d");
    let rendered = Template::compile("{{ strftime_now('%Y-%m-%d') }}")
        .unwrap()
        .render(())
        .unwrap();
    let after = clock::strftime(SystemTime::now(), "%Y-%m-%d");
    assert!(before <= rendered && rendered <= after, "{rendered}");
}
