//! From a path (or a text) to valid types: both stages, one after the other.
//!
//! Lives here: opening files, within bounds; following the files that a process config names.
//! Never here: what a key means (see `parse`), watching (see `watch`).
//! Invariant: a file is read once per call, and everything said of it is about that one content.

use crate::config::diagnostic::{Diagnostics, Finding, Position, Report, Text, Wrong};
use crate::config::node::{self, Node, SyntaxFault, Value, quoted};
use crate::config::parse::{Reading, pods, policy, process};
use crate::config::shape::Shape;
use crate::config::{Loaded, LoadedPods, LoadedPolicy, PodSource, PolicySource, Shadow, lint};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

/// The longest file: twice what a ConfigMap can hold.
pub const MAX_FILE_BYTES: usize = 2 << 20;

/// Tells whether a file's content has changed: a hash of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Content(u128);

impl Content {
    pub(crate) fn of(bytes: &[u8]) -> Content {
        Content(xxhash_rust::xxh3::xxh3_128(bytes))
    }
}

/// Loads the process config at `path`, and the policy and pods it names.
///
/// # Errors
/// All faults of all these files.
pub fn load(path: &Path) -> Result<Loaded, Diagnostics> {
    process_from(&read(path)?, path)
}

fn process_from(bytes: &[u8], path: &Path) -> Result<Loaded, Diagnostics> {
    let (parsed, outcome) = process_document(&text(bytes, path)?);
    let mut gathered = Gathered::default();
    gathered.warnings_of(outcome);
    let Some(parsed) = parsed else {
        return Err(gathered.faults.unwrap_or_default());
    };
    // A file that is not there has been reported where it is named.
    let policy = match &parsed.process.policy {
        PolicySource::File(path) if path.is_file() => gathered.take(load_policy(path)),
        _ => parsed.policy.map(|spec| LoadedPolicy {
            policy: spec.policy,
            handoff: spec.handoff,
            shadow: spec.shadow,
            target: spec.target,
            warnings: Vec::new(),
            content: Content::default(),
        }),
    };
    let pods = match &parsed.process.pods {
        PodSource::File(path) if path.is_file() => gathered.take(load_pods(path)),
        _ => parsed.pods.map(|pods| LoadedPods {
            pods,
            warnings: Vec::new(),
            content: Content::default(),
        }),
    };
    if let Some(policy) = &policy {
        gathered.shadow_of(policy);
        if let Shadow::Named(name) = &policy.shadow {
            let message = format!(
                "has no effect: a policy that comes from a file names its shadow by file, not by \
                 the name {}",
                quoted(name)
            );
            gathered.note("spec.shadow", message, path);
        }
    }
    let (None, Some(policy), Some(pods)) = (&gathered.faults, policy, pods) else {
        return Err(gathered.faults.unwrap_or_default());
    };
    let mut loaded = Loaded {
        process: parsed.process,
        policy: policy.policy,
        handoff: policy.handoff,
        shadow: policy.shadow,
        pods: pods.pods,
        models: parsed.models,
        warnings: gathered.warnings,
        policy_content: policy.content,
        pods_content: pods.content,
    };
    loaded.warnings.extend(policy.warnings);
    loaded.warnings.extend(pods.warnings);
    let across = lint::across((&loaded.policy, &loaded.pods, &loaded.models), path);
    loaded.warnings.extend(across);
    Ok(loaded)
}

/// Loads the policy at `path`.
///
/// # Errors
/// All its faults.
pub fn load_policy(path: &Path) -> Result<LoadedPolicy, Diagnostics> {
    policy_from(&read(path)?, path)
}

/// Loads the list of pods at `path`.
///
/// # Errors
/// All its faults.
pub fn load_pods(path: &Path) -> Result<LoadedPods, Diagnostics> {
    pods_from(&read(path)?, path)
}

/// Reads a policy from `source`; `origin` is the file it is said to come from, beside which the files
/// it names are looked for.
///
/// # Errors
/// All its faults.
pub fn parse_policy(source: &str, origin: &Path) -> Result<LoadedPolicy, Diagnostics> {
    policy_from(source.as_bytes(), origin)
}

/// Reads a list of pods from `source`, said to come from `origin`.
///
/// # Errors
/// All its faults.
pub fn parse_pods(source: &str, origin: &Path) -> Result<LoadedPods, Diagnostics> {
    pods_from(source.as_bytes(), origin)
}

/// Checks the file at `path`, a process config, a policy or a list of pods; returns its warnings.
///
/// # Errors
/// All faults of the file, and of the files it names.
pub fn check(path: &Path) -> Result<Vec<Finding>, Diagnostics> {
    let bytes = read(path)?;
    let text = text(&bytes, path)?;
    let root = tree(&text)?;
    let kind = root.get("kind").map(|node| &node.value);
    match kind {
        Some(Value::Text(kind)) if &**kind == policy::KIND => {
            let loaded = policy_from(&bytes, path)?;
            let mut gathered = Gathered::default();
            gathered.shadow_of(&loaded);
            gathered.warnings.splice(0..0, loaded.warnings);
            gathered.faults.map_or(Ok(gathered.warnings), Err)
        }
        None if root.get("pods").is_some() && root.get("apiVersion").is_none() => {
            pods_from(&bytes, path).map(|loaded| loaded.warnings)
        }
        Some(Value::Text(kind)) if &**kind != process::KIND => {
            let mut report = Report::default();
            let at = root.get("kind").map_or(root.id, |node| node.id);
            let expected = format!("{} or {}", process::KIND, policy::KIND);
            let found = format!("the text {}", quoted(kind));
            report.fault(at, Wrong::new(expected, found));
            report.finish(&text, &root)
        }
        _ => process_from(&bytes, path).map(|loaded| loaded.warnings),
    }
}

/// What several files gave so far.
#[derive(Default)]
struct Gathered {
    faults: Option<Diagnostics>,
    warnings: Vec<Finding>,
}

impl Gathered {
    fn take<T>(&mut self, outcome: Result<T, Diagnostics>) -> Option<T> {
        match outcome {
            Ok(value) => Some(value),
            Err(faults) => {
                self.faults = Some(match self.faults.take() {
                    Some(before) => before.and(faults),
                    None => faults,
                });
                None
            }
        }
    }

    /// Reads the file in which the shadow of `policy` is, for its faults and warnings alone.
    fn shadow_of(&mut self, policy: &LoadedPolicy) {
        let Shadow::File(path) = &policy.shadow else {
            return;
        };
        // A file that is not there has been reported where it is named.
        if !path.is_file() {
            return;
        }
        if let Some(shadow) = self.take(load_policy(path)) {
            self.warnings.extend(shadow.warnings);
            if shadow.shadow != Shadow::Off {
                let message = "has no effect: a policy in a shadow has no shadow of its own";
                self.note("spec.shadow", message.to_owned(), path);
            }
        }
    }

    fn note(&mut self, at: &str, message: String, file: &Path) {
        self.warnings.push(Finding {
            path: at.to_owned(),
            message,
            hint: String::new(),
            file: Arc::from(file),
            position: Position::WholeFile,
        });
    }

    fn warnings_of(&mut self, outcome: Result<Vec<Finding>, Diagnostics>) {
        let warnings = self.take(outcome).unwrap_or_default();
        self.warnings.extend(warnings);
    }
}

pub(crate) fn policy_from(bytes: &[u8], path: &Path) -> Result<LoadedPolicy, Diagnostics> {
    let text = text(bytes, path)?;
    let (spec, outcome) = document(&text, Some(policy::KIND), |raw, reading| {
        policy::document(raw, reading)
    });
    let warnings = outcome?;
    // Without a fault there is a spec; that it is so is not worth a panic.
    let spec = spec.ok_or_else(|| nothing(&text))?;
    Ok(LoadedPolicy {
        policy: spec.policy,
        handoff: spec.handoff,
        shadow: spec.shadow,
        target: spec.target,
        warnings,
        content: Content::of(bytes),
    })
}

pub(crate) fn pods_from(bytes: &[u8], path: &Path) -> Result<LoadedPods, Diagnostics> {
    let text = text(bytes, path)?;
    let (pods, outcome) = document(&text, None, |raw, reading| {
        Some(pods::document(raw, reading))
    });
    let warnings = outcome?;
    Ok(LoadedPods {
        pods: pods.ok_or_else(|| nothing(&text))?,
        warnings,
        content: Content::of(bytes),
    })
}

fn process_document(text: &Text) -> (Option<process::Parsed>, Outcome) {
    document(text, Some(process::KIND), |raw, reading| {
        Some(process::document(raw, reading))
    })
}

fn nothing(text: &Text) -> Diagnostics {
    let message = "expected a document, found nothing".to_owned();
    Diagnostics::of_file(Arc::clone(&text.file), message)
}

type Outcome = Result<Vec<Finding>, Diagnostics>;

/// Takes `text` through both stages. What is returned beside faults is there only to learn which
/// further files to look at.
fn document<R: Shape, T>(
    text: &Text,
    kind: Option<&'static str>,
    parse: impl FnOnce(&R, &mut Reading<'_>) -> Option<T>,
) -> (Option<T>, Outcome) {
    let root = match tree(text) {
        Ok(root) => root,
        Err(faults) => return (None, Err(faults)),
    };
    let mut report = Report::default();
    if let Err(wrong) = nonempty(&root, kind) {
        report.fault(root.id, wrong);
        return (None, report.finish(text, &root));
    }
    // Of a file of another kind, every key would be reported as unknown.
    if let (Some(node), Some(kind)) = (root.get("kind"), kind)
        && let Value::Text(found) = &node.value
        && &**found != kind
    {
        let found = format!("the text {}", quoted(found));
        report.fault(node.id, Wrong::new(kind, found));
        return (None, report.finish(text, &root));
    }
    if let (Some(node), None, None) = (root.get("kind"), root.get("pods"), kind) {
        report.fault(
            node.id,
            Wrong::new("a file of pods", format!("the kind {node}")),
        );
        return (None, report.finish(text, &root));
    }
    let parsed = R::read(&root, &mut report).and_then(|raw| {
        let mut reading = Reading {
            report: &mut report,
            folder: text.file.parent().unwrap_or(Path::new("")),
            named: Vec::new(),
        };
        let parsed = parse(&raw, &mut reading);
        look_for_files(reading);
        parsed
    });
    (parsed, report.finish(text, &root))
}

fn nonempty(root: &Node, kind: Option<&str>) -> Result<(), Wrong> {
    match root.value {
        Value::Null => {
            let expected = kind.map_or("a list of pods".to_owned(), |kind| format!("a {kind}"));
            Err(Wrong::new(expected, "an empty file"))
        }
        _ => Ok(()),
    }
}

fn look_for_files(reading: Reading<'_>) {
    for (at, path) in reading.named {
        let found = match std::fs::metadata(&path) {
            Ok(metadata) if metadata.is_dir() => "a folder".to_owned(),
            Ok(_) => continue,
            Err(error) => reason(&error),
        };
        let found = format!("{found} at {}", quoted(&path.display().to_string()));
        reading
            .report
            .fault(at, Wrong::new("a file that can be read", found));
    }
}

fn tree(text: &Text) -> Result<Node, Diagnostics> {
    node::read(&text.text).map_err(|SyntaxFault { problem, place }| {
        let mut message = format!("expected well-formed YAML, found an error: {problem}");
        let mut position = Position::WholeFile;
        if problem.contains("more than one document") {
            message = "expected one document, found several".to_owned();
        }
        if let Some((line, column)) = place {
            position = Position::At { line, column };
            let indentation = text
                .text
                .lines()
                .nth(line - 1)
                .map_or("", |text| &text[..text.len() - text.trim_start().len()]);
            if indentation.contains('\t') {
                message = "expected spaces, found a tab in the indentation".to_owned();
            }
        }
        Diagnostics {
            faults: vec![Finding {
                path: "file".to_owned(),
                message,
                hint: String::new(),
                file: Arc::clone(&text.file),
                position,
            }],
            left_out: 0,
        }
    })
}

/// The bytes of the file at `path`.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, Diagnostics> {
    let failed = |found: String| {
        let message = format!("expected a file that can be read, found {found}");
        Diagnostics::of_file(Arc::from(path), message)
    };
    let metadata = std::fs::metadata(path).map_err(|error| failed(reason(&error)))?;
    if metadata.is_dir() {
        return Err(failed("a folder".to_owned()));
    }
    let file = File::open(path).map_err(|error| failed(reason(&error)))?;
    let mut bytes = Vec::new();
    // One byte more than allowed is enough to know that it is too long, whatever its metadata say.
    file.take(MAX_FILE_BYTES as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| failed(reason(&error)))?;
    Ok(bytes)
}

fn reason(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::NotFound => "nothing".to_owned(),
        std::io::ErrorKind::PermissionDenied => "no permission".to_owned(),
        _ => error.to_string(),
    }
}

fn text(bytes: &[u8], path: &Path) -> Result<Text, Diagnostics> {
    let failed = |message: String, position: Position| Diagnostics {
        faults: vec![Finding {
            path: "file".to_owned(),
            message,
            hint: String::new(),
            file: Arc::from(path),
            position,
        }],
        left_out: 0,
    };
    if MAX_FILE_BYTES < bytes.len() {
        let message = format!("expected at most {MAX_FILE_BYTES} bytes, found more");
        return Err(failed(message, Position::WholeFile));
    }
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let before = &bytes[..error.valid_up_to()];
        let line_start = before.iter().rposition(|byte| *byte == b'\n');
        let line_start = line_start.map_or(0, |newline| newline + 1);
        let position = Position::At {
            line: before.iter().filter(|byte| **byte == b'\n').count() + 1,
            column: String::from_utf8_lossy(&before[line_start..])
                .chars()
                .count()
                + 1,
        };
        let byte = bytes.get(error.valid_up_to()).copied().unwrap_or_default();
        failed(
            format!("expected UTF-8 text, found the byte {byte:#04x}"),
            position,
        )
    })?;
    Ok(Text {
        file: Arc::from(path),
        text: Arc::from(text),
    })
}
