//! The policy as a kind of Kubernetes, and as a table for people.
//!
//! Lives here: the CustomResourceDefinition and the table of keys, both made from `raw`.
//! Never here: keys, ranges, messages (see `raw`, `rules`); talking to a cluster.
//! Invariant: nothing of the spec is written here a second time.
//!
//! Form of a CRD: <https://kubernetes.io/docs/reference/kubernetes-api/extend-resources/custom-resource-definition-v1/>.

use crate::config::conditions::{ConditionReason, ConditionType};
use crate::config::keys::{Key, Kind, Note, Presence, Section};
use crate::config::parse::{API_VERSION, policy};
use crate::config::raw;
use crate::config::rules::{CelRule, Must};
use crate::decide::reason::Because;
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// The longest text that an API server looks at: more than any rule allows, so that it is the rule that
/// speaks of a text that is too long. Without a bound the server refuses the rules as too costly.
const LONGEST_TEXT: usize = 300;

/// The most items that an API server looks at in a list of at most `most`: more than the rule allows, for
/// the same reason.
fn looked_at(most: usize) -> usize {
    most + most / 4
}

/// The CustomResourceDefinition, in YAML.
///
/// # Errors
/// Never in fact: what is written is a constant.
pub fn crd() -> Result<String, serde_yaml::Error> {
    let yaml = serde_yaml::to_string(&definition())?;
    Ok(format!(
        "# Written by `sidestep crd`; a test compares the two.\n{yaml}"
    ))
}

/// The CustomResourceDefinition.
#[must_use]
pub fn definition() -> Value {
    let (group, version) = API_VERSION.split_once('/').unwrap_or((API_VERSION, ""));
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("disaggregationpolicies.{group}")},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {
                "kind": policy::KIND,
                "listKind": format!("{}List", policy::KIND),
                "plural": "disaggregationpolicies",
                "singular": "disaggregationpolicy",
                "shortNames": ["dpol"],
                "categories": ["sidestep"],
            },
            "versions": [{
                "name": version,
                "served": true,
                "storage": true,
                "subresources": {"status": {}},
                "additionalPrinterColumns": columns(),
                "schema": {"openAPIV3Schema": schema()},
            }],
        },
    })
}

fn columns() -> Value {
    let first = ".spec.rules[0].bypass";
    let condition = |kind: ConditionType| {
        format!(
            ".status.conditions[?(@.type==\"{}\")].status",
            kind.as_str()
        )
    };
    let column = |name: &str, kind: &str, path: String, about: &str| json!({"name": name, "type": kind, "jsonPath": path, "description": about});
    json!([
        column("Type", "string", format!("{first}.type"), "Bypass type of the first rule."),
        column("Threshold", "integer", format!("{first}.effectiveIslThreshold"), "Its bound on net-new tokens, where given."),
        column("Ratio", "number", format!("{first}.effectiveIslRatioThreshold"), "Its bound on their share of the prompt, where given."),
        column("Accepted", "string", condition(ConditionType::Accepted), "Whether the policy is valid and the only one of its target."),
        column("Effective", "string", condition(ConditionType::Effective), "Whether requests are judged by it."),
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ])
}

/// The structural schema of the kind.
#[must_use]
pub fn schema() -> Value {
    let root = raw::policy();
    let mut schema = section(&root);
    if let Some(properties) = schema["properties"].as_object_mut() {
        for key in ["apiVersion", "kind"] {
            properties.insert(key.to_owned(), json!({"type": "string"}));
        }
        properties.insert("metadata".to_owned(), json!({"type": "object"}));
        properties.insert("status".to_owned(), status());
    }
    schema
}

fn section(of: &Section) -> Value {
    let properties: Map<String, Value> = of
        .keys
        .iter()
        .map(|key| (key.name.to_owned(), property(key)))
        .collect();
    let mut rules: Vec<CelRule> = of
        .keys
        .iter()
        .filter_map(|key| Some(CelRule::required(key.name, &key.note.wanted()?)))
        .collect();
    rules.extend(of.rules.iter().cloned());
    let mut schema = json!({"type": "object", "description": of.doc, "properties": properties});
    held_to(&mut schema, &rules);
    schema
}

fn property(key: &Key) -> Value {
    let mut schema = of_kind(&key.kind, key.note.must.as_ref());
    schema["description"] = json!(described(key));
    if let Presence::Written(default) = key.note.presence {
        // The table holds JSON; that it does is proved by a test.
        schema["default"] = serde_json::from_str(default).unwrap_or(Value::Null);
    }
    schema
}

fn of_kind(kind: &Kind, must: Option<&Must>) -> Value {
    let mut schema = match kind {
        Kind::Text => json!({"type": "string", "maxLength": LONGEST_TEXT}),
        Kind::Whole => json!({"type": "integer", "format": "int64"}),
        Kind::Number => json!({"type": "number"}),
        Kind::Section(of) => section(of),
        Kind::Other => json!({}),
        Kind::List(of) => {
            let each = match must {
                Some(Must::Each(_, each) | Must::SomeOf(_, each)) => Some(*each),
                _ => None,
            };
            let mut list = json!({
                "type": "array",
                "x-kubernetes-list-type": "atomic",
                "items": of_kind(of, each),
            });
            if let Some(Must::Most(most) | Must::Each(most, _) | Must::SomeOf(most, _)) = must {
                list["maxItems"] = json!(looked_at(*most));
            }
            list
        }
    };
    if let Some(must) = must {
        held_to(&mut schema, &must.cel());
    }
    schema
}

fn held_to(schema: &mut Value, rules: &[CelRule]) {
    if rules.is_empty() {
        return;
    }
    let rules = rules.iter().map(|rule| {
        let mut said = json!({"rule": rule.holds, "message": rule.message});
        if let Some(says) = &rule.says {
            said["messageExpression"] = json!(says);
        }
        if let Some(key) = rule.key {
            said["fieldPath"] = json!(format!(".{key}"));
            said["reason"] = json!("FieldValueRequired");
        }
        said
    });
    schema["x-kubernetes-validations"] = rules.collect();
}

/// What a key means, what its value must be, and what its absence means.
fn described(key: &Key) -> String {
    let mut said = key.doc.to_owned();
    if let Some(must) = allowed(&key.note) {
        let _ = write!(said, " Must be {must}.");
    }
    match key.note.presence {
        Presence::Required(_) => said.push_str(" Required."),
        Presence::Assumed(value) => {
            let _ = write!(said, " Default: {value}.");
        }
        Presence::Optional | Presence::Written(_) => {}
    }
    said
}

fn allowed(note: &Note) -> Option<String> {
    Some(match note.must.as_ref()? {
        Must::Most(most) => format!("a list of at most {most} items"),
        Must::Each(most, each) => {
            format!("a list of at most {most} items, each {}", each.expected())
        }
        Must::SomeOf(most, each) => {
            format!("a list of 1 to {most} items, each {}", each.expected())
        }
        must => must.expected(),
    })
}

fn status() -> Value {
    let words = |words: Vec<&str>| words.join(", ");
    let types = words(
        ConditionType::ALL
            .iter()
            .map(|kind| kind.as_str())
            .collect(),
    );
    let reasons = words(
        ConditionReason::ALL
            .iter()
            .map(|reason| reason.as_str())
            .collect(),
    );
    let because = words(
        Because::ALL
            .iter()
            .map(|because| because.as_str())
            .collect(),
    );
    let text = |about: &str, most: usize| json!({"type": "string", "description": about, "maxLength": most});
    json!({
        "type": "object",
        "description": "What a picker says of the policy.",
        "properties": {
            "conditions": {
                "type": "array",
                "description": "Whether the policy is in force, and why not.",
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
                "maxItems": 8,
                "items": {
                    "type": "object",
                    "required": ["type", "status", "reason", "message", "lastTransitionTime"],
                    "properties": {
                        "type": text(&format!("One of {types}."), 64),
                        "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
                        "reason": text(&format!("One word: {reasons}."), 64),
                        "message": text("The same for people.", 32768),
                        "lastTransitionTime": {"type": "string", "format": "date-time"},
                        "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
                    },
                },
            },
            "observed": {
                "type": "object",
                "description": "What was decided by the policy lately.",
                "properties": {
                    "windowSeconds": {
                        "type": "integer",
                        "format": "int64",
                        "description": "How long that is, in seconds.",
                    },
                    "decisions": {
                        "type": "integer",
                        "format": "int64",
                        "description": "Number of decisions.",
                    },
                    "byReason": {
                        "type": "object",
                        "description": format!("Number of decisions by reason: {because}."),
                        "additionalProperties": {"type": "integer", "format": "int64"},
                    },
                },
            },
        },
    })
}

/// The keys of a policy's spec as a table in Markdown.
#[must_use]
pub fn table() -> String {
    let mut table =
        String::from("| key | must be | default | meaning |\n| --- | --- | --- | --- |\n");
    let root = raw::policy();
    if let Some(spec) = root.keys.iter().find(|key| key.name == "spec")
        && let Kind::Section(section) = &spec.kind
    {
        rows(section, "", &mut table);
    }
    table
}

fn rows(section: &Section, above: &str, table: &mut String) {
    for key in &section.keys {
        let path = format!("{above}{}", key.name);
        let must = allowed(&key.note).unwrap_or_else(|| "a mapping".to_owned());
        let default = match key.note.presence {
            Presence::Required(_) => "required".to_owned(),
            Presence::Written(value) => format!("`{value}`"),
            Presence::Assumed(value) => format!("`{value}`"),
            Presence::Optional => String::new(),
        };
        let meaning = key.doc.replace('*', "\\*");
        let must = must.replace('*', "\\*");
        let _ = writeln!(table, "| `{path}` | {must} | {default} | {meaning} |");
        match &key.kind {
            Kind::Section(below) => rows(below, &format!("{path}."), table),
            Kind::List(of) => {
                if let Kind::Section(below) = &**of {
                    rows(below, &format!("{path}[]."), table);
                }
            }
            _ => {}
        }
    }
}
