//! How a scenario of `page.mjs` is run, for the tests of the page and those of the page under load.

use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::process::Command;

/// How long a scenario may take: a debug build and a browser share few cores.
pub(crate) const PATIENCE: Duration = Duration::from_secs(240);

fn artefacts() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("browser");
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// Runs one scenario; `settings` reach it as environment variables.
pub(crate) async fn scenario(name: &str, settings: &[(&str, &str)]) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/browser");
    assert!(
        folder.join("node_modules/playwright-core").exists(),
        "playwright-core is not there: run `npm ci` in tests/browser, or `tests/run browser`"
    );
    let mut command = Command::new("node");
    command
        .arg("page.mjs")
        .arg(name)
        .current_dir(&folder)
        .env("ARTEFACTS", artefacts())
        .envs(settings.iter().copied())
        .kill_on_drop(true);
    let status = tokio::time::timeout(PATIENCE, command.status());
    let status = status
        .await
        .expect("the scenario ends in time")
        .expect("node can be run");
    assert!(status.success(), "scenario {name}: {status}");
}
