//! Files of operators: the bad ones with what is said of them, the good ones with what they become.

use sidestep::config::{self, Diagnostics};
use std::path::{Path, PathBuf};

const GOLDEN: &str = "tests/golden/config";

/// Every bad file in `folder`, with what is said of it. `BLESS=1` writes the expectations anew.
fn golden(folder: &str, load: impl Fn(&Path) -> Result<(), Diagnostics>) -> usize {
    let folder = Path::new(GOLDEN).join(folder);
    let mut files: Vec<PathBuf> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "yaml"))
        .collect();
    files.sort();
    let prefix = format!("{}/", folder.display());
    let mut wrong = Vec::new();
    for path in &files {
        let said = match load(path) {
            Ok(()) => "accepted\n".to_owned(),
            Err(faults) => format!("{faults}\n").replace(&prefix, ""),
        };
        let expected_at = path.with_extension("expected");
        if std::env::var_os("BLESS").is_some() {
            std::fs::write(&expected_at, &said).unwrap();
        }
        let expected = std::fs::read_to_string(&expected_at).unwrap_or_default();
        if said != expected {
            wrong.push(format!(
                "{}\n  expected:\n{expected}\n  found:\n{said}",
                path.display()
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    files.len()
}

#[test]
fn each_bad_policy_is_refused_with_its_faults() {
    let cases = golden("policy", |path| config::load_policy(path).map(drop));
    assert!(50 <= cases, "{cases} cases");
}

#[test]
fn each_bad_list_of_pods_is_refused_with_its_faults() {
    let cases = golden("pods", |path| config::load_pods(path).map(drop));
    assert!(10 <= cases, "{cases} cases");
}

#[test]
fn each_bad_process_config_is_refused_with_its_faults() {
    let cases = golden("process", |path| config::load(path).map(drop));
    assert!(15 <= cases, "{cases} cases");
}
