//! Files that change while they are watched.

use sidestep::config::watch::{self, Watch};
use sidestep::config::{self, Content, LoadedPolicy};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// The clock is paused and runs ahead whenever everybody waits, so this costs no time.
const EVERY: Duration = Duration::from_millis(500);

fn policy(name: &str) -> String {
    format!(
        "apiVersion: sidestep.dev/v1alpha1\nkind: DisaggregationPolicy\n\
         metadata: {{name: {name}}}\nspec: {{rules: [{{bypass: {{type: Never}}}}]}}\n"
    )
}

/// A policy file in a folder of its own.
struct Watched {
    _folder: TempDir,
    path: PathBuf,
}

impl Watched {
    fn new() -> Watched {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("policy.yaml");
        std::fs::write(&path, policy("first")).unwrap();
        Watched {
            _folder: folder,
            path,
        }
    }

    fn write(&self, content: &str) {
        std::fs::write(&self.path, content).unwrap();
    }

    fn watch(&self) -> Watch<LoadedPolicy> {
        let loaded = config::load_policy(&self.path).unwrap();
        watch::policy(self.path.clone(), EVERY, loaded.content)
    }
}

/// The name of the next policy, or the first fault.
async fn next(watch: &mut Watch<LoadedPolicy>) -> String {
    let next = tokio::time::timeout(Duration::from_secs(60), watch.next());
    match next.await.expect("an update within a minute").unwrap() {
        Ok(loaded) => loaded.policy.name.to_string(),
        Err(faults) => faults.faults[0].message.clone(),
    }
}

async fn nothing_comes(watch: &mut Watch<LoadedPolicy>) {
    let next = tokio::time::timeout(EVERY * 20, watch.next()).await;
    assert!(next.is_err(), "{next:?}");
}

#[tokio::test(start_paused = true)]
async fn what_was_loaded_is_not_reported_and_what_changes_is_once() {
    let file = Watched::new();
    let mut watch = file.watch();
    nothing_comes(&mut watch).await;
    file.write(&policy("second"));
    assert_eq!(next(&mut watch).await, "second");
    nothing_comes(&mut watch).await;
    file.write(&policy("second"));
    nothing_comes(&mut watch).await;
}

#[tokio::test(start_paused = true)]
async fn a_change_between_loading_and_watching_is_not_missed() {
    let file = Watched::new();
    let loaded = config::load_policy(&file.path).unwrap();
    file.write(&policy("between"));
    let mut watch = watch::policy(file.path.clone(), EVERY, loaded.content);
    assert_eq!(next(&mut watch).await, "between");
}

#[tokio::test(start_paused = true)]
async fn a_bad_file_is_reported_once_and_the_next_good_one_picked_up() {
    let file = Watched::new();
    let mut watch = file.watch();
    file.write(&policy("second").replace("Never", "Nver"));
    assert_eq!(
        next(&mut watch).await,
        "expected Never, Always, IslBounding, PrefillLoad or IslOrLoad, found the text \"Nver\""
    );
    nothing_comes(&mut watch).await;
    file.write("");
    assert_eq!(
        next(&mut watch).await,
        "expected a DisaggregationPolicy, found an empty file"
    );
    file.write(&policy("third"));
    assert_eq!(next(&mut watch).await, "third");
}

#[tokio::test(start_paused = true)]
async fn a_file_that_goes_is_reported_once_and_picked_up_when_it_is_back() {
    let file = Watched::new();
    let mut watch = file.watch();
    std::fs::remove_file(&file.path).unwrap();
    assert_eq!(
        next(&mut watch).await,
        "expected a file that can be read, found nothing"
    );
    nothing_comes(&mut watch).await;
    file.write(&policy("first"));
    assert_eq!(next(&mut watch).await, "first");
}

#[tokio::test(start_paused = true)]
async fn a_file_in_the_middle_of_being_written_is_not_read() {
    let file = Watched::new();
    let mut watch = file.watch();
    // Each part is a right policy by itself, and is there for less than the time to come to rest.
    for part in 0..5 {
        file.write(&policy(&format!("part-{part}")));
        let next = tokio::time::timeout(EVERY / 6, watch.next()).await;
        assert!(next.is_err(), "{next:?}");
    }
    file.write(&policy("whole"));
    assert_eq!(next(&mut watch).await, "whole");
}

/// Mounts `content` as the kubelet does: the file is a link through `..data`, which is swapped.
fn mount(folder: &Path, version: &str, content: &str) {
    let data = folder.join(format!("..{version}"));
    std::fs::create_dir(&data).unwrap();
    std::fs::write(data.join("policy.yaml"), content).unwrap();
    symlink(format!("..{version}"), folder.join("..data_tmp")).unwrap();
    std::fs::rename(folder.join("..data_tmp"), folder.join("..data")).unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_mounted_config_map_is_followed_through_its_swaps() {
    let folder = tempfile::tempdir().unwrap();
    mount(folder.path(), "2026_01", &policy("first"));
    let path = folder.path().join("policy.yaml");
    symlink("..data/policy.yaml", &path).unwrap();
    let loaded = config::load_policy(&path).unwrap();
    let mut watch = watch::policy(path, EVERY, loaded.content);
    nothing_comes(&mut watch).await;
    mount(folder.path(), "2026_02", &policy("second"));
    std::fs::remove_dir_all(folder.path().join("..2026_01")).unwrap();
    assert_eq!(next(&mut watch).await, "second");
    mount(folder.path(), "2026_03", "rules: 7");
    assert!(next(&mut watch).await.starts_with("expected"));
    mount(folder.path(), "2026_04", &policy("fourth"));
    assert_eq!(next(&mut watch).await, "fourth");
}

#[tokio::test(start_paused = true)]
async fn whoever_is_slow_gets_the_newest_content_in_the_end() {
    let file = Watched::new();
    let mut watch = file.watch();
    for version in 0..10 {
        file.write(&policy(&format!("v{version}")));
        tokio::time::sleep(EVERY * 4).await;
    }
    let mut last = next(&mut watch).await;
    while last != "v9" {
        last = next(&mut watch).await;
    }
    nothing_comes(&mut watch).await;
}

#[tokio::test(start_paused = true)]
async fn a_list_of_pods_is_watched_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pods.yaml");
    std::fs::write(&path, "pods: []").unwrap();
    let mut watch = watch::pods(path.clone(), EVERY, Content::default());
    let first = watch.next().await.unwrap().unwrap();
    assert_eq!(first.pods, Vec::new());
    std::fs::write(
        &path,
        "pods: [{name: d, address: '10.0.0.1:1', role: both}]",
    )
    .unwrap();
    let second = watch.next().await.unwrap().unwrap();
    assert_eq!(&*second.pods[0].name, "d");
}
