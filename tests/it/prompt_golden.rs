//! Chat templates against renders by Jinja2, the reference.

use crate::prompt_difference::difference;
use serde_json::Value;
use std::collections::BTreeMap;

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"))
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
