//! Chat templates of real models against renders by `transformers`.

use crate::prompt_difference::difference;
use serde_json::Value;

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
fn templates_of_real_models_render_as_in_python() {
    let path = crate::variable("SIDESTEP_TEMPLATE_GOLDEN");
    let renders: Vec<Render> = serde_json::from_slice(&crate::read(&path)).unwrap();
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
