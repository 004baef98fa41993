//! Where two renders of a chat template part.

use serde_json::Value;
use sidestep::prompt::template::Template;

/// The difference between a render and the reference, if any; a refusal is `None`.
pub(crate) fn difference(template: &str, values: &Value, expected: Option<&str>) -> Option<String> {
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
