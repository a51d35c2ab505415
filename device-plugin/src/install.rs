//! Puts the CNI programs and the node's policy where the node's runtime finds them: what the
//! DaemonSet's init container does, in an image that has no shell.
//!
//! A runtime may start a program, or a program read the policy, at any moment, so a file is
//! never written in place. It is written beside its place under an unused name
//! (`.rdma-netdev.new`), synced, proved, renamed over the old one, and the directory synced.
//! Dying anywhere before the rename leaves what was there; a left-over is overwritten by the
//! next run. Two installers of one directory (an old and a new pod during a roll-out) take
//! turns by a lock on the directory, which the kernel drops when its holder dies.
//!
//! The proof of a program is that it runs here and answers `VERSION`: an image of another
//! architecture, or a directory mounted `noexec`, never replaces a working program. One that is
//! there already is proved each time, because the directory may be mounted otherwise now. An older
//! version may replace a newer one, because rolling a DaemonSet back must work.

use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, anyhow};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::statvfs::{FsFlags, statvfs};
use node::cni_program::{NAMES, ask, version_of};
use node::policy::{Policy, PolicyError};
use serde_json::Value;

/// What became of a file, for people. `old` is the version of the one that was there, where it could say,
/// and `new` that of the one that is there now.
fn outcome(was_there: bool, old: Option<String>, new: Option<&str>) -> String {
    let what = if was_there { "replaced" } else { "installed" };
    let old = old.map(|old| format!(" version {old}")).unwrap_or_default();
    let new = new.map(|new| format!(", now version {new}"));
    format!("{what}{old}{}", new.unwrap_or_default())
}

/// The same content was there already; nothing was written.
const UNCHANGED: &str = "already up to date";

/// Installs the program at `source` into `directory`, under the same name. Returns what became of it.
///
/// # Errors
/// Why it is not installed; the directory is as it was.
pub(crate) fn program(source: &Path, directory: &Path) -> anyhow::Result<String> {
    let content = std::fs::read(source).with_context(failed("read", source))?;
    let target = directory.join(source.file_name().unwrap_or_default());
    let _turn = take_turn(directory)?;
    let before = present(&target);
    let prove = |program: &Path| {
        runs(program, &target).map_err(|why| {
            let (source, directory) = (source.display(), directory.display());
            match is_noexec(program) {
                true => anyhow!(
                    "{source} does not run on this node: {directory} is mounted noexec; install into \
                     another directory that the runtime searches (--to, the chart's cni.binDir)"
                ),
                false => anyhow!(
                    "{source} does not run on this node: {why}; the image may be of another architecture"
                ),
            }
        })
    };
    if before.as_ref() == Some(&content) && executable(&target) {
        // The node may have changed since it was installed.
        prove(&target)?;
        return Ok(UNCHANGED.to_owned());
    }
    let old = before.as_ref().and_then(|_| version_of(&target));
    place(&content, 0o755, &target, prove)?;
    let new = env!("CARGO_PKG_VERSION");
    Ok(outcome(before.is_some(), old, Some(new)))
}

/// Installs the policy at `source` as `target`, with `node` as its `node` unless it names one.
///
/// The programs on the node and the daemon in its pod must mean the same by "this node", or one
/// would take the other's leases for another node's; the host name is no substitute, for a node's
/// name in the cluster may differ from it.
///
/// # Errors
/// Why it is not installed; the policy in force is as it was.
pub(crate) fn policy(source: &Path, target: &Path, node: Option<&str>) -> anyhow::Result<String> {
    let mut text = std::fs::read(source).with_context(failed("read", source))?;
    check_policy(source, &text)?;
    if let (Some(node), Ok(Value::Object(mut keys))) = (node, serde_json::from_slice(&text)) {
        keys.entry("node").or_insert_with(|| node.into());
        text = format!("{:#}\n", Value::Object(keys)).into_bytes();
        check_policy(source, &text)?;
    }
    let directory = target.parent().unwrap_or(Path::new("/"));
    let _turn = take_turn(directory)?;
    let before = present(target);
    if before.as_ref() == Some(&text) {
        return Ok(UNCHANGED.to_owned());
    }
    place(&text, 0o644, target, |beside| {
        // Once more where it will lie: whether others could write there counts too.
        let trusted = Policy::load(beside);
        trusted.map(drop).map_err(|wrong| refused(&wrong))
    })?;
    Ok(outcome(before.is_some(), None, None))
}

fn check_policy(source: &Path, text: &[u8]) -> anyhow::Result<()> {
    let parsed = Policy::parse(source, text);
    parsed.map(drop).map_err(|wrong| refused(&wrong))
}

fn refused(wrong: &PolicyError) -> anyhow::Error {
    anyhow!("{wrong}; {}", wrong.remedy())
}

fn failed(what: &str, path: &Path) -> impl FnOnce() -> String {
    let text = format!("{what} {}", path.display());
    move || text
}

fn take_turn(directory: &Path) -> anyhow::Result<Flock<File>> {
    let opened = File::open(directory).with_context(failed("open", directory))?;
    Flock::lock(opened, FlockArg::LockExclusive)
        .map_err(|(_, errno)| errno)
        .with_context(failed("lock", directory))
}

/// What lies at `path`; a link, or anything else that is not a file, is replaced unread.
fn present(path: &Path) -> Option<Vec<u8>> {
    let meta = path.symlink_metadata().ok()?;
    if meta.is_file() {
        std::fs::read(path).ok()
    } else {
        Some(Vec::new())
    }
}

fn executable(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|meta| meta.permissions().mode() & 0o7777 == 0o755)
}

/// Writes `content` beside `target`, has it proved there, and gives it `target`'s name.
fn place(
    content: &[u8],
    mode: u32,
    target: &Path,
    prove: impl FnOnce(&Path) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let directory = target.parent().unwrap_or(Path::new("/"));
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    let beside = directory.join(format!(".{name}.new"));
    let put = || {
        write_synced(&beside, content, mode).with_context(failed("write", &beside))?;
        prove(&beside)?;
        std::fs::rename(&beside, target).with_context(failed("rename to", target))?;
        File::open(directory)
            .and_then(|opened| opened.sync_all())
            .with_context(failed("sync", directory))
    };
    put().inspect_err(|_| {
        // The first error is the one to report; a left-over does no harm.
        let _ = std::fs::remove_file(&beside);
    })
}

fn write_synced(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = File::options()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)?;
    file.write_all(content)?;
    // Whatever the umask took away.
    file.set_permissions(Permissions::from_mode(mode))?;
    file.sync_all()
}

/// Whether the program that is to be `target` runs on this node.
fn runs(program: &Path, target: &Path) -> Result<(), String> {
    let name = target.file_name().unwrap_or_default();
    if NAMES.iter().any(|plugin| name == *plugin) {
        return answers_version(program);
    }
    let version = version_of(program);
    version
        .map(drop)
        .ok_or_else(|| "it prints no version".to_owned())
}

fn is_noexec(path: &Path) -> bool {
    statvfs(path).is_ok_and(|found| found.flags().contains(FsFlags::ST_NOEXEC))
}

/// Asks `program` for the CNI versions it speaks.
fn answers_version(program: &Path) -> Result<(), String> {
    let mut asked = Command::new(program);
    asked.env_clear().env("CNI_COMMAND", "VERSION");
    let answer = ask(&mut asked, br#"{"cniVersion":"1.0.0"}"#)?;
    if !answer.status.success() {
        let status = answer.status;
        return Err(format!(
            "asked for its CNI versions, it ended with {status}"
        ));
    }
    let answer: Option<Value> = serde_json::from_slice(&answer.stdout).ok();
    match answer.as_ref().and_then(|a| a.get("supportedVersions")) {
        Some(Value::Array(versions)) if !versions.is_empty() => Ok(()),
        _ => Err("asked for its CNI versions, it answered something else".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    struct Node {
        _dir: tempfile::TempDir,
        source: PathBuf,
        target: PathBuf,
    }

    fn node(policy_given: &str) -> Node {
        let dir = tempfile::tempdir().unwrap();
        let (source, etc) = (dir.path().join("given.json"), dir.path().join("etc"));
        std::fs::write(&source, policy_given).unwrap();
        std::fs::create_dir(&etc).unwrap();
        Node {
            source,
            target: etc.join("policy.json"),
            _dir: dir,
        }
    }

    #[test]
    fn the_policy_says_which_node_it_is_on() {
        let n = node(r#"{"version": 1, "allow": {"uplinks": true}}"#);
        let first = policy(&n.source, &n.target, Some("gpu-17")).unwrap();
        assert_eq!(first, "installed");
        let installed = Policy::load(&n.target).unwrap();
        assert_eq!(installed.node.as_deref(), Some("gpu-17"));
        assert!(installed.allow.uplinks);

        let again = policy(&n.source, &n.target, Some("gpu-17")).unwrap();
        assert_eq!(again, UNCHANGED);
        let renamed = policy(&n.source, &n.target, Some("gpu-18")).unwrap();
        assert_eq!(renamed, "replaced");
    }

    #[test]
    fn an_unchanged_program_that_does_not_run_is_an_error() {
        let n = node("#!/bin/false\n");
        let source = n.source.with_file_name("rdma-netdev");
        std::fs::rename(&n.source, &source).unwrap();
        let directory = n.target.parent().unwrap();
        let target = directory.join("rdma-netdev");
        std::fs::copy(&source, &target).unwrap();
        std::fs::set_permissions(&target, Permissions::from_mode(0o755)).unwrap();
        let error = program(&source, directory).unwrap_err().to_string();
        assert!(error.contains("does not run on this node"), "{error}");
        assert!(target.exists());
    }

    #[test]
    fn a_policy_that_names_its_node_is_believed() {
        let n = node(r#"{"node": "rack-3"}"#);
        policy(&n.source, &n.target, Some("gpu-17")).unwrap();
        let installed = Policy::load(&n.target).unwrap();
        assert_eq!(installed.node.as_deref(), Some("rack-3"));
    }

    #[test]
    fn a_wrong_policy_never_takes_the_place_of_a_right_one() {
        let n = node(r#"{"version": 1}"#);
        policy(&n.source, &n.target, None).unwrap();
        let before = std::fs::read(&n.target).unwrap();
        for wrong in ["", "[]", r#"{"versoin": 1}"#, r#"{"version": 2}"#] {
            std::fs::write(&n.source, wrong).unwrap();
            let error = policy(&n.source, &n.target, Some("gpu-17")).unwrap_err();
            assert!(error.to_string().contains("given.json"), "{error}");
            assert_eq!(std::fs::read(&n.target).unwrap(), before);
        }
        let left: Vec<_> = std::fs::read_dir(n.target.parent().unwrap())
            .unwrap()
            .collect();
        assert_eq!(left.len(), 1, "{left:?}");
    }

    #[test]
    fn a_policy_is_refused_where_others_could_change_it() {
        let n = node(r#"{"version": 1}"#);
        let etc = n.target.parent().unwrap();
        std::fs::set_permissions(etc, Permissions::from_mode(0o777)).unwrap();
        let error = policy(&n.source, &n.target, None).unwrap_err();
        assert!(error.to_string().contains("not trusted"), "{error}");
        assert!(!n.target.exists());
    }

    #[test]
    fn a_link_in_the_place_is_replaced_and_its_target_left_alone() {
        let n = node(r#"{"version": 1}"#);
        let elsewhere = n.source.with_file_name("precious");
        std::fs::write(&elsewhere, "precious").unwrap();
        std::os::unix::fs::symlink(&elsewhere, &n.target).unwrap();
        policy(&n.source, &n.target, None).unwrap();
        assert_eq!(std::fs::read_to_string(&elsewhere).unwrap(), "precious");
        assert!(n.target.symlink_metadata().unwrap().is_file());
    }
}
