//! Chat templates against renders by Jinja2, the reference.

use serde_json::Value;
use sidestep::prompt::template::Template;
use std::collections::BTreeMap;

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The difference between a render and the reference, if any; a refusal is `None`.
fn difference(template: &str, values: &Value, expected: Option<&str>) -> Option<String> {
    let template = match Template::compile(template) {
        Ok(template) => template,
        Err(error) => return Some(error.to_string()),
    };
    match (template.render(values), expected) {
        (Ok(rendered), Some(expected)) if rendered == expected => None,
        (Err(_), None) => None,
        (Ok(rendered), _) => {
            let expected = expected.unwrap_or("a refusal");
            let same = (rendered.chars().zip(expected.chars()))
                .take_while(|(ours, theirs)| ours == theirs)
                .count();
            let tail = |text: &str| {
                text.chars()
                    .skip(same.saturating_sub(20))
                    .take(80)
                    .collect()
            };
            let (ours, theirs): (String, String) = (tail(&rendered), tail(expected));
            Some(format!(
                "at {same}:\n  ours:      {ours:?}\n  reference: {theirs:?}"
            ))
        }
        (Err(error), Some(_)) => Some(error.to_string()),
    }
}

/// `tests/tools/render_templates.py` made the reference renders, with Jinja2 itself.
#[test]
fn templates_render_as_in_python() {
    let data = "tests/data/prompt";
    let cases: BTreeMap<String, Vec<Value>> =
        serde_json::from_str(&read(&format!("{data}/templates.json"))).unwrap();
    let golden: BTreeMap<String, Vec<Option<String>>> =
        serde_json::from_str(&read(&format!("{data}/templates.golden.json"))).unwrap();
    assert_eq!(
        cases.keys().collect::<Vec<_>>(),
        golden.keys().collect::<Vec<_>>()
    );
    let mut wrong = Vec::new();
    for (name, inputs) in &cases {
        let template = match name.as_str() {
            "builtin" => read("src/prompt/builtin/chat_template.jinja"),
            name => read(&format!("{data}/templates/{name}.jinja")),
        };
        assert_eq!(inputs.len(), golden[name].len(), "{name}");
        for (index, (values, expected)) in inputs.iter().zip(&golden[name]).enumerate() {
            let difference = difference(&template, values, expected.as_deref());
            wrong.extend(difference.map(|text| format!("{name}[{index}] {text}")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[derive(serde::Deserialize)]
struct Render {
    model: String,
    template: String,
    vars: Value,
    expected: String,
}

/// Templates of real models are their vendors', so the file is not part of this repository: a list
/// of `{"model", "template", "vars", "expected"}`, rendered by `transformers`.
#[test]
#[ignore = "needs a file of golden renders, named by SIDESTEP_TEMPLATE_GOLDEN"]
fn templates_of_real_models_render_as_in_python() {
    let path = std::env::var("SIDESTEP_TEMPLATE_GOLDEN").expect("SIDESTEP_TEMPLATE_GOLDEN is set");
    let renders: Vec<Render> = serde_json::from_str(&read(&path)).unwrap();
    assert!(!renders.is_empty());
    let wrong: Vec<String> = (renders.iter().enumerate())
        .filter_map(|(index, render)| {
            let difference = difference(&render.template, &render.vars, Some(&render.expected));
            difference.map(|text| format!("{index} ({}) {text}", render.model))
        })
        .collect();
    let (wrong_count, all) = (wrong.len(), renders.len());
    assert!(
        wrong.is_empty(),
        "{wrong_count} of {all} renders differ:\n{}",
        wrong.join("\n")
    );
}
