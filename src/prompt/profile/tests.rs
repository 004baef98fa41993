use super::*;
use minijinja::context;

const TOKENIZER: &[u8] = include_bytes!("../builtin/tokenizer.json");

fn load(files: ProfileFiles) -> Result<Profile, ProfileError> {
    Profile::load(&ProfileFiles {
        tokenizer_json: TOKENIZER,
        ..files
    })
}

/// Renders with the profile's own variables only.
fn render(profile: &Profile, tools: bool) -> String {
    let exact = profile.exact().unwrap();
    let variables: Value = exact.variables.iter().cloned().collect();
    exact.template(tools).unwrap().render(variables).unwrap()
}

#[test]
fn a_model_s_config_gives_its_special_tokens_and_template() {
    let config = br#"{"bos_token":"<s>","eos_token":{"content":"</s>","lstrip":false},
        "pad_token":null,"chat_template":"{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}"}"#;
    let profile = load(ProfileFiles {
        tokenizer_config: Some(config),
        ..ProfileFiles::default()
    });
    assert_eq!(render(&profile.unwrap(), false), "<s></s>False");

    let overridden = load(ProfileFiles {
        tokenizer_config: Some(config),
        chat_template: Some("own {{ bos_token }}{{ colour }}"),
        special_tokens: &[("bos_token", "<b>")],
        template_args: Some(r#"{"colour":"red"}"#),
        ..ProfileFiles::default()
    });
    assert_eq!(render(&overridden.unwrap(), true), "own <b>red");

    let parts = load(ProfileFiles {
        chat_template: Some("text"),
        content_format: Some(ContentFormat::Parts),
        ..ProfileFiles::default()
    });
    assert_eq!(parts.unwrap().content_format(), Some(ContentFormat::Parts));
}

#[test]
fn a_separate_template_for_tools_is_used_for_tools() {
    let config = br#"{"chat_template":[{"name":"default","template":"plain"},
        {"name":"rag","template":"rag"},{"name":"tool_use","template":"tools"}]}"#;
    let profile = load(ProfileFiles {
        tokenizer_config: Some(config),
        ..ProfileFiles::default()
    })
    .unwrap();
    assert_eq!(render(&profile, false), "plain");
    assert_eq!(render(&profile, true), "tools");
}

#[test]
fn faulty_files_are_told_apart() {
    let error = |files| load(files).unwrap_err().to_string();
    let config = error(ProfileFiles {
        tokenizer_config: Some(b"[]"),
        ..ProfileFiles::default()
    });
    assert!(config.starts_with("tokenizer_config.json: "), "{config}");
    let template = error(ProfileFiles {
        chat_template: Some("{% if %}"),
        ..ProfileFiles::default()
    });
    assert!(template.starts_with("chat template: "), "{template}");
    let arguments = error(ProfileFiles {
        template_args: Some("7"),
        ..ProfileFiles::default()
    });
    assert!(
        arguments.starts_with("default template arguments: "),
        "{arguments}"
    );
    let tokenizer = Profile::load(&ProfileFiles::default()).unwrap_err();
    assert!(
        matches!(tokenizer, ProfileError::Tokenizer(_)),
        "{tokenizer}"
    );
}

#[test]
fn models_and_adapters_are_found_by_their_own_names() {
    let profile = |name: &str, adapters: &[&str]| {
        let adapters = adapters.iter().map(|name| ModelName::from(*name));
        Profile::byte_estimate(name.into(), adapters.collect())
    };
    let profiles = Profiles::new(vec![profile("a", &["x", "y"]), profile("b", &[])]).unwrap();
    let found = |name: &str| {
        let resolved = profiles.resolve(&name.into())?;
        Some((
            resolved.model_name().to_string(),
            resolved.adapter.map(|name| name.to_string()),
        ))
    };
    assert_eq!(found("a"), Some(("a".into(), None)));
    assert_eq!(found("y"), Some(("a".into(), Some("y".into()))));
    assert_eq!(found("b"), Some(("b".into(), None)));
    assert_eq!(found("c"), None);
    assert_eq!(profiles.names().count(), 4);

    let twice = Profiles::new(vec![profile("a", &["b"]), profile("b", &[])]);
    assert_eq!(twice.unwrap_err(), ProfileError::Duplicate("b".into()));
}

#[test]
fn the_builtin_model_is_small_and_takes_plain_texts() {
    let profile = Profile::builtin().unwrap();
    assert!(TOKENIZER.len() < 400_000);
    assert_eq!(profile.name().as_str(), crate::prompt::builtin::NAME);
    assert_eq!(profile.content_format(), Some(ContentFormat::Text));
    let messages = [context! { role => "user", content => "hi" }];
    let rendered = profile.render(context! { messages }).unwrap().unwrap();
    assert_eq!(rendered, "<|turn|>user\nhi<|end|>\n");
}
