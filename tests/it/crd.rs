//! The policy as a kind of Kubernetes: the file in `manifests/crds`, and its rules beside our own.

use kube_cel::{CompiledSchema, Validator, compile_schema};
use serde_json::{Value, json};
use sidestep::config::{self, crd};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const FILE: &str = "manifests/crds/disaggregationpolicies.yaml";

#[test]
fn the_crd_in_the_repository_is_that_of_the_source() {
    let written = crd::crd().unwrap();
    if std::env::var_os("SIDESTEP_BLESS").is_some() {
        fs::write(FILE, &written).unwrap();
    }
    let file = fs::read_to_string(FILE).unwrap_or_default();
    assert!(
        file == written,
        "{FILE} is not what `sidestep crd` prints; run the test with SIDESTEP_BLESS=1"
    );
}

/// The rules of the CRD, ready to be looked at.
struct Rules(Validator, CompiledSchema);

fn compiled() -> Rules {
    let compiled = compile_schema(&crd::schema());
    let errors = compiled.compilation_errors();
    assert!(errors.is_empty(), "{errors:#?}");
    Rules(Validator::new(), compiled)
}

/// Every schema below `schema` with its path.
fn walk(schema: &Value, path: &str, visit: &mut impl FnMut(&str, &Value)) {
    visit(path, schema);
    if let Some(properties) = schema["properties"].as_object() {
        for (name, below) in properties {
            walk(below, &format!("{path}.{name}"), visit);
        }
    }
    if schema["items"].is_object() {
        walk(&schema["items"], &format!("{path}[]"), visit);
    }
}

#[test]
fn every_key_of_the_spec_is_described_typed_and_bounded() {
    let mut keys = 0;
    walk(
        &crd::schema()["properties"]["spec"],
        "spec",
        &mut |path, schema| {
            keys += 1;
            let kind = schema["type"].as_str().unwrap_or_default();
            assert!(!kind.is_empty(), "{path} has no type");
            match kind {
                "string" => assert!(schema["maxLength"].is_u64(), "{path} is unbounded"),
                "array" => assert!(schema["maxItems"].is_u64(), "{path} is unbounded"),
                _ => {}
            }
            if !path.ends_with("[]") {
                assert!(schema["description"].is_string(), "{path} is not described");
            }
            assert!(
                !matches!(schema.get("default"), Some(Value::Null)),
                "{path}"
            );
            for rule in schema["x-kubernetes-validations"]
                .as_array()
                .into_iter()
                .flatten()
            {
                let message = rule["message"].as_str().unwrap();
                assert!(message.starts_with("expected "), "{path}: {message}");
                assert!(!message.contains('\n'), "{path}: {message}");
            }
        },
    );
    assert!(35 <= keys, "{keys} keys");
}

/// What the rules of the CRD say of `object`, as `path: message`.
fn said_by_crd(Rules(validator, compiled): &Rules, object: &Value) -> BTreeSet<String> {
    match validator.validate_compiled(compiled, object, None) {
        Ok(()) => BTreeSet::new(),
        // A path from the root begins with a point here.
        Err(errors) => {
            let text = |error: &kube_cel::ValidationError| error.to_string();
            let errors = errors.as_slice().iter().map(text);
            errors
                .map(|text| text.trim_start_matches('.').to_owned())
                .collect()
        }
    }
}

fn said_by_us(yaml: &str) -> BTreeSet<String> {
    match config::parse_policy(yaml, Path::new("p.yaml")) {
        Ok(_) => BTreeSet::new(),
        Err(faults) => faults
            .faults
            .iter()
            .map(|fault| format!("{}: {}", fault.path, fault.message))
            .collect(),
    }
}

/// Whether `value` has the types of `schema` and no key that is unknown to it: if not, an API server
/// refuses it in its own words, before any rule is looked at.
fn typed(schema: &Value, value: &Value) -> bool {
    match schema["type"].as_str().unwrap_or_default() {
        "string" => value.is_string(),
        "integer" => value.is_i64(),
        "number" => value.is_number(),
        "array" => value
            .as_array()
            .is_some_and(|items| items.iter().all(|item| typed(&schema["items"], item))),
        "object" => {
            let Some(properties) = schema["properties"].as_object() else {
                return value.is_object();
            };
            value.as_object().is_some_and(|entries| {
                entries.iter().all(|(key, value)| {
                    // A null is dropped before types are looked at.
                    properties
                        .get(key)
                        .is_some_and(|below| value.is_null() || typed(below, value))
                })
            })
        }
        _ => true,
    }
}

/// `value` without the keys that hold nulls, as an API server drops them.
fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(entries) => entries
            .into_iter()
            .filter(|(_, value)| !value.is_null())
            .map(|(key, value)| (key, without_nulls(value)))
            .collect(),
        Value::Array(items) => items.into_iter().map(without_nulls).collect(),
        value => value,
    }
}

fn golden() -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir("tests/golden/config/policy")
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "yaml"))
        .collect();
    files.sort();
    files
}

/// Whether all that is wrong is within the spec, and within an object: neither a question of YAML, nor of
/// numbers that JSON does not have, nor of other files.
fn in_spec(said: &BTreeSet<String>) -> bool {
    said.iter().all(|line| {
        line.starts_with("spec")
            && !line.contains("expected each key once")
            && !line.contains("expected a file that can be read")
            && !line.contains("infinity")
            && !line.contains("found NaN")
    })
}

#[test]
fn each_bad_policy_is_refused_by_the_crd_with_the_same_messages() {
    let compiled = compiled();
    let schema = crd::schema();
    let mut same = 0;
    for path in golden() {
        let Ok(text) = fs::read_to_string(&path) else {
            continue;
        };
        // What is no JSON never gets as far as the rules.
        let Ok(object) = serde_yaml::from_str::<Value>(&text) else {
            continue;
        };
        let object = without_nulls(object);
        let ours = said_by_us(&text);
        if !typed(&schema, &object) || !in_spec(&ours) {
            continue;
        }
        assert_eq!(said_by_crd(&compiled, &object), ours, "{}", path.display());
        same += 1;
    }
    assert!(30 <= same, "{same} policies");
}

#[test]
fn each_good_policy_is_accepted_by_the_crd() {
    let compiled = compiled();
    for entry in fs::read_dir("manifests/policies").unwrap() {
        let path = entry.unwrap().path();
        let object: Value = serde_yaml::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        assert!(typed(&crd::schema(), &object), "{}", path.display());
        assert_eq!(
            said_by_crd(&compiled, &object),
            BTreeSet::new(),
            "{}",
            path.display()
        );
    }
}

/// A policy with every key that may be beside all others.
fn full() -> Value {
    json!({
        "apiVersion": "sidestep.dev/v1alpha1",
        "kind": "DisaggregationPolicy",
        "metadata": {"name": "p"},
        "spec": {
            "targetRef": {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "pool"},
            "rules": [{
                "match": {"models": ["a"], "policyClasses": ["b"], "minPriority": 0},
                "bypass": {
                    "type": "IslOrLoad",
                    "effectiveIslThreshold": 1,
                    "effectiveIslRatioThreshold": 0.5,
                    "coldBypassBelow": 1,
                    "tierCredit": "Full",
                    "prefillBusyThreshold": 1,
                    "decodeBusyThreshold": 0.5,
                    "trustCapacity": ["Reported"],
                },
                "onNoPrefill": "Local",
            }],
            "scoring": {
                "overlapCredit": 1,
                "hostTier": 1,
                "diskTier": 1,
                "prefillLoadScale": 1,
                "activeRequestWeight": 1,
                "temperature": 1,
            },
            "sessionAffinity": {"mode": "Soft", "header": "x-session-id", "ttl": "5m"},
            "handoff": {"dialect": "decodeFirst"},
            "shadow": {"name": "other"},
            "clientPins": "Ignore",
        },
    })
}

/// Values of a JSON type that some rule is particular about.
fn values_of(schema: &Value) -> Vec<Value> {
    let long = |length: usize| "x".repeat(length);
    match schema["type"].as_str().unwrap_or_default() {
        "string" => {
            let texts = [
                "",
                " ",
                "a",
                "A",
                "a b",
                " a",
                "a ",
                "\u{a0}a",
                "a*",
                "*",
                "**",
                "a*b",
                "*a",
                "a *",
                "é",
                "é*",
                "a.b",
                "a..b",
                "-a",
                "a-",
                "a_b",
                "a:b",
                "a\"b",
                "a'b",
                "a`b|~!#$%&^_+",
                "a/b",
                "a(b",
                "5m",
                "0s",
                "1ms",
                "720h",
                "720h1ms",
                "721h",
                "1h30m",
                "30m1h",
                "1m1m",
                "1.5s",
                "-5s",
                "+5s",
                "5",
                "ms",
                "5 m",
                "2592000000ms",
                "2592000001ms",
                "9999999999ms",
                "99999999999ms",
                "0005s",
                "00000005s",
                "Never",
                "never",
                "IslBounding",
                "None",
                "Off",
                "Soft",
                "Hard",
                "Local",
                "Fail",
                "Ignore",
                "Honor",
                "Reported",
                "Full",
                "Weighted",
                "decodeFirst",
                "prefillFirst",
                "decode_first",
                "InferencePool",
                "x-session-id",
                "X-Session",
                "/a/b.yaml",
            ];
            let mut values: Vec<Value> = texts.iter().map(|text| json!(text)).collect();
            values.extend([60, 61, 63, 64, 253, 254].map(|length| json!(long(length))));
            values.push(json!(format!("K{}", long(62))));
            values.push(json!(format!("{}*", long(253))));
            values.push(json!("é".repeat(126)));
            values.push(json!("é".repeat(127)));
            values
        }
        "integer" => {
            let numbers: [i64; 12] = [
                i64::MIN,
                -2_147_483_649,
                -2_147_483_648,
                -1,
                0,
                1,
                2048,
                2_147_483_647,
                2_147_483_648,
                1_000_000_000,
                1_000_000_001,
                i64::MAX,
            ];
            numbers.iter().map(|number| json!(number)).collect()
        }
        "number" => vec![
            json!(-1),
            json!(-0.25),
            json!(-0.0),
            json!(0),
            json!(0.5),
            json!(1),
            json!(1.0),
            json!(1.5),
            json!(1_000_000),
            json!(1_000_001),
            json!(2),
            json!(-7),
        ],
        _ => Vec::new(),
    }
}

/// The objects that differ from [`full`] in one value, or lack one key.
fn variants() -> Vec<Value> {
    fn go(schema: &Value, at: &str, full: &Value, variants: &mut Vec<Value>) {
        let replaced = |value: Value| {
            let mut object = full.clone();
            *object.pointer_mut(at).unwrap_or_else(|| panic!("{at}")) = value;
            object
        };
        variants.extend(values_of(schema).into_iter().map(replaced));
        if schema["type"] == "array" {
            let item = full.pointer(&format!("{at}/0")).unwrap();
            for length in [0, 8, 9, 32, 33, 64, 65] {
                variants.push(replaced(json!(vec![item; length])));
            }
            go(&schema["items"], &format!("{at}/0"), full, variants);
        }
        for (key, below) in schema["properties"].as_object().into_iter().flatten() {
            let path = format!("{at}/{key}");
            if full.pointer(&path).is_none() {
                continue;
            }
            let mut without = full.clone();
            without
                .pointer_mut(at)
                .unwrap()
                .as_object_mut()
                .unwrap()
                .remove(key);
            variants.push(without);
            go(below, &path, full, variants);
        }
    }
    let mut variants = Vec::new();
    let full = full();
    // One section at a time: the rules of the others would only be worked out again.
    for (key, value) in full["spec"].as_object().unwrap() {
        let mut alone = full.clone();
        alone["spec"] = json!({ key: value });
        let schema = &crd::schema()["properties"]["spec"]["properties"][key];
        go(schema, &format!("/spec/{key}"), &alone, &mut variants);
    }
    for shadow in [
        json!({}),
        json!({"file": "/dev/null"}),
        json!({"name": "a", "file": "/dev/null"}),
    ] {
        let mut object = full.clone();
        object["spec"]["shadow"] = shadow;
        variants.push(object);
    }
    for kind in ["Never", "PrefillLoad", "IslOrLoad", "Sometimes"] {
        let mut object = full.clone();
        object["spec"]["rules"][0]["bypass"] = json!({"type": kind});
        variants.push(object);
    }
    variants
}

#[test]
fn the_crd_says_of_any_value_what_we_say() {
    let compiled = compiled();
    let variants = variants();
    let mut refused = 0;
    for object in &variants {
        let text = object.to_string();
        let ours = said_by_us(&text);
        assert_eq!(said_by_crd(&compiled, object), ours, "{text}");
        refused += usize::from(!ours.is_empty());
    }
    assert!(
        500 <= refused && refused < variants.len(),
        "{refused} of {}",
        variants.len()
    );
}

#[test]
fn what_the_crd_writes_into_an_object_changes_nothing() {
    let least = json!({
        "apiVersion": "sidestep.dev/v1alpha1",
        "kind": "DisaggregationPolicy",
        "metadata": {"name": "p"},
        "spec": {"targetRef": {"kind": "InferencePool", "name": "pool"}, "rules": [{"bypass": {"type": "Never"}}]},
    });
    // An API server also goes on into what it has just written; this one does the second time.
    let once = kube_cel::apply_defaults(&crd::schema(), &least);
    let written = kube_cel::apply_defaults(&crd::schema(), &once);
    assert_ne!(written, least);
    assert_eq!(written["spec"]["scoring"]["hostTier"], json!(0.75));
    let read =
        |object: &Value| config::parse_policy(&object.to_string(), Path::new("p.yaml")).unwrap();
    let (before, after) = (read(&least), read(&written));
    assert_eq!(before.warnings, after.warnings);
    assert_eq!(
        (before.policy, before.handoff, before.target),
        (after.policy, after.handoff, after.target)
    );
}

#[test]
fn a_null_is_the_same_as_no_key_and_warned_of() {
    let text = "apiVersion: sidestep.dev/v1alpha1\nkind: DisaggregationPolicy\n\
                metadata: {name: p, creationTimestamp: null}\n\
                spec: {rules: [{bypass: {type: IslBounding, effectiveIslRatioThreshold: null}}]}\n";
    let loaded = config::parse_policy(text, Path::new("p.yaml")).unwrap();
    let warned: Vec<String> = loaded.warnings.iter().map(ToString::to_string).collect();
    assert_eq!(
        warned,
        [
            "spec.rules[0].bypass.effectiveIslRatioThreshold: has no effect: a null is the same as no key \
             (p.yaml, line 4, column 73)"
        ]
    );
    let absent = text.replace(", effectiveIslRatioThreshold: null", "");
    let absent = config::parse_policy(&absent, Path::new("p.yaml")).unwrap();
    assert_eq!(loaded.policy, absent.policy);
}
