//! The shape of the source: which module may use which, and what the kernel may not contain.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Module → modules it may use. The order is bottom up; `main` and `cli` come last.
const MAY_USE: &[(&str, &[&str])] = &[
    ("units", &[]),
    ("names", &[]),
    ("blocks", &["names", "units"]),
    ("revision", &[]),
    ("decide", &["names", "units"]),
    ("prompt", &["blocks", "names", "units"]),
    ("kv", &["blocks", "decide", "names", "revision", "units"]),
    ("fleet", &["decide", "names", "revision", "units"]),
    ("load", &["blocks", "decide", "names", "units"]),
    (
        "observe",
        &[
            "blocks", "decide", "fleet", "kv", "load", "names", "revision", "units",
        ],
    ),
    ("route", &["decide", "names", "units"]),
    ("config", &["decide", "fleet", "names", "units"]),
    ("telemetry", &["decide", "names"]),
    (
        "pick",
        &[
            "blocks",
            "decide",
            "fleet",
            "load",
            "names",
            "observe",
            "prompt",
            "route",
            "telemetry",
            "units",
        ],
    ),
    ("extproc", &["decide", "names", "pick", "route"]),
    ("admin", &["config", "decide", "pick", "telemetry", "units"]),
    ("engine", &["kv", "names", "prompt", "units"]),
    (
        "app",
        &[
            "admin",
            "config",
            "decide",
            "extproc",
            "fleet",
            "kv",
            "load",
            "names",
            "observe",
            "pick",
            "prompt",
            "route",
            "telemetry",
            "units",
        ],
    ),
    (
        "cli",
        &[
            "app",
            "config",
            "engine",
            "names",
            "prompt",
            "telemetry",
            "units",
        ],
    ),
    ("lib", &[]),
    ("main", &["cli"]),
];

/// Words that may stand only in the named files.
const ONLY_IN: &[(&str, &[&str])] = &[
    ("envoy_types::", &["src/extproc/wire", "src/extproc/server"]),
    ("serde_yaml::", &["src/config/"]),
    ("opentelemetry::", &[]),
    ("opentelemetry_sdk::", &[]),
    ("hyper_rustls::", &["src/telemetry/trace/export.rs"]),
    ("kube::", &["src/fleet/kubernetes/"]),
    ("k8s_openapi::", &["src/fleet/kubernetes/"]),
    ("zeromq::", &["src/kv/feed", "src/engine/"]),
    ("minijinja::", &["src/prompt/", "src/cli/demo/"]),
    ("tokenizers::", &["src/prompt/tokenizer"]),
];

/// Words that may not stand in the pure modules.
const PURE: &[&str] = &[
    "src/decide/",
    "src/route/",
    "src/blocks.rs",
    "src/units.rs",
    "src/names.rs",
    "src/extproc/session",
];
const IMPURE: &[&str] = &[
    "async fn",
    "tokio::",
    "tonic::",
    "hyper::",
    "Instant::now",
    "SystemTime::now",
    "std::env",
    "std::fs",
    "rand::",
    "tracing::",
    "Mutex",
    "RwLock",
];

fn sources(dir: &Path, out: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, out);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            out.push(path);
        }
    }
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Path relative to the repository, and the text without comments, of every source file.
fn code() -> Vec<(String, String)> {
    let mut files = Vec::new();
    sources(&root().join("src"), &mut files);
    files
        .into_iter()
        .map(|path| {
            let text = fs::read_to_string(&path).unwrap();
            let code = text
                .lines()
                .map(|line| {
                    if line.trim_start().starts_with("//") {
                        ""
                    } else {
                        line
                    }
                })
                .collect::<Vec<_>>()
                .join("\n");
            let relative = path.strip_prefix(root()).unwrap();
            (relative.to_string_lossy().into_owned(), code)
        })
        .collect()
}

/// `src/decide/cost.rs` → (`decide`, [`decide`, `cost`]).
fn module(path: &str) -> Vec<String> {
    let inner = path
        .strip_prefix("src/")
        .unwrap()
        .strip_suffix(".rs")
        .unwrap();
    inner
        .split('/')
        .filter(|part| *part != "mod")
        .map(str::to_owned)
        .collect()
}

/// Top-level modules that a file names through `crate::`, `sidestep::` or `super::` paths.
fn used(path: &str, code: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let depth = module(path).len();
    for (number, line) in code.lines().enumerate() {
        for start in ["crate::", "sidestep::"] {
            for (at, _) in line.match_indices(start) {
                let before = line[..at].chars().next_back();
                if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
                    continue;
                }
                for name in names_after(&line[at + start.len()..]) {
                    found.push((number + 1, name));
                }
            }
        }
        // `super::` as often as the module is deep leaves the module: then the next name is a top one.
        let climb = "super::".repeat(depth);
        if let Some(at) = line.find(&climb) {
            for name in names_after(&line[at + climb.len()..]) {
                found.push((number + 1, name));
            }
        }
    }
    found
}

fn names_after(rest: &str) -> Vec<String> {
    let head = |text: &str| {
        text.trim()
            .chars()
            .take_while(|c| c.is_alphanumeric() || *c == '_')
            .collect::<String>()
    };
    match rest.strip_prefix('{') {
        Some(list) => list
            .split('}')
            .next()
            .unwrap_or_default()
            .split(',')
            .map(head)
            .collect(),
        None => vec![head(rest)],
    }
}

#[test]
fn modules_use_only_what_the_layers_allow() {
    let table: BTreeMap<&str, &[&str]> = MAY_USE.iter().copied().collect();
    let mut faults = Vec::new();
    for (path, code) in code() {
        let own = module(&path).remove(0);
        let Some(allowed) = table.get(own.as_str()) else {
            faults.push(format!("{path}: module `{own}` has no row in MAY_USE"));
            continue;
        };
        for (line, name) in used(&path, &code) {
            if table.contains_key(name.as_str()) && name != own && !allowed.contains(&name.as_str())
            {
                faults.push(format!("{path}:{line}: `{own}` may not use `{name}`"));
            }
        }
    }
    assert!(faults.is_empty(), "wrong arrows:\n{}", faults.join("\n"));
}

#[test]
fn every_arrow_of_the_map_is_used() {
    let mut idle: BTreeMap<&str, Vec<&str>> = MAY_USE
        .iter()
        .map(|(own, allowed)| (*own, allowed.to_vec()))
        .collect();
    for (path, code) in code() {
        if let Some(allowed) = idle.get_mut(module(&path).remove(0).as_str()) {
            let names = used(&path, &code);
            allowed.retain(|name| names.iter().all(|(_, used)| used != name));
        }
    }
    idle.retain(|_, allowed| !allowed.is_empty());
    assert!(idle.is_empty(), "arrows that nothing uses: {idle:?}");
}

#[test]
fn foreign_types_stay_in_their_files() {
    let mut faults = Vec::new();
    for (path, code) in code() {
        for (word, places) in ONLY_IN {
            if code.contains(word) && !places.iter().any(|place| path.starts_with(place)) {
                faults.push(format!("{path}: `{word}` belongs in {places:?}"));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn the_kernel_is_pure() {
    let mut faults = Vec::new();
    for (path, code) in code() {
        if !PURE.iter().any(|place| path.starts_with(place)) {
            continue;
        }
        let code = code.split("#[cfg(test)]").next().unwrap_or_default();
        for word in IMPURE {
            if code.contains(word) {
                faults.push(format!("{path}: `{word}` in a pure module"));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn files_stay_short() {
    let long: Vec<String> = code()
        .into_iter()
        .filter(|(path, _)| !path.ends_with("tests.rs"))
        .map(|(path, code)| {
            let body = code
                .split("#[cfg(test)]")
                .next()
                .unwrap_or_default()
                .lines()
                .count();
            (path, body)
        })
        .filter(|(_, lines)| 600 < *lines)
        .map(|(path, lines)| format!("{path}: {lines} lines"))
        .collect();
    assert!(long.is_empty(), "over 600 lines:\n{}", long.join("\n"));
}

#[test]
fn every_module_says_what_lives_there() {
    let missing: Vec<String> = code()
        .into_iter()
        .map(|(path, _)| path)
        .filter(|path| !path.ends_with("tests.rs"))
        .filter(|path| {
            !fs::read_to_string(root().join(path))
                .unwrap()
                .starts_with("//!")
        })
        .collect();
    assert!(missing.is_empty(), "no module docs: {missing:?}");
}
