//! `rdma-device-plugin install`: whatever happens, a node keeps programs that work.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, ensure};
use e2e::bin_under_test::product;
use e2e::case;
use e2e::harness::Case;
use tempfile::TempDir;

pub(crate) const CASES: &[Case] = &[
    case!(a_node_gets_both_programs_and_the_policy),
    case!(a_program_that_does_not_run_here_replaces_nothing),
    case!(a_noexec_directory_is_named_as_the_cause, Root),
    case!(a_program_that_says_something_else_replaces_nothing),
    case!(a_wrong_policy_stops_everything),
    case!(a_missing_directory_is_named),
    case!(a_full_disk_leaves_the_old_program, Strace),
    case!(killed_anywhere_it_leaves_the_old_or_the_new, Strace),
    case!(two_at_once_take_turns),
    case!(versions_of_installed_programs_are_read),
];

const PROGRAMS: [&str; 2] = ["rdma-netdev", "rdma-ipam"];

/// A program of an earlier release.
const OLD: &str = r#"#!/bin/sh
if [ "$1" = --version ]; then echo "rdma-netdev 0.0.7"; exit; fi
echo '{"cniVersion":"1.0.0","supportedVersions":["1.0.0"]}'
"#;

struct Node {
    dir: TempDir,
}

impl Node {
    /// A node on which an earlier release is installed.
    fn new() -> Result<Self> {
        let node = Self {
            dir: tempfile::tempdir()?,
        };
        fs::create_dir(node.bin())?;
        fs::create_dir(node.dir.path().join("etc"))?;
        for name in PROGRAMS {
            script(&node.bin().join(name), OLD)?;
        }
        fs::write(node.given_policy(), r#"{"version": 1}"#)?;
        Ok(node)
    }

    fn bin(&self) -> PathBuf {
        self.dir.path().join("bin")
    }

    fn policy(&self) -> PathBuf {
        self.dir.path().join("etc/policy.json")
    }

    fn given_policy(&self) -> PathBuf {
        self.dir.path().join("given.json")
    }

    fn flags(&self) -> Vec<String> {
        vec![
            "install".to_owned(),
            format!("--to={}", self.bin().display()),
            format!("--policy={}", self.given_policy().display()),
            format!("--policy-to={}", self.policy().display()),
            "--node=gpu-17".to_owned(),
        ]
    }

    fn install(&self, further: &[String]) -> Result<Output> {
        let mut command = Command::new(product("rdma-device-plugin")?);
        Ok(command.args(self.flags()).args(further).output()?)
    }

    fn install_from(&self, directory: &Path) -> Result<Output> {
        self.install(&[format!("--from={}", directory.display())])
    }

    /// Installs under strace, which injects `fault` into `call`s on the program's place or beside it.
    fn install_with(&self, call: &str, fault: &str) -> Result<Output> {
        let beside = self.bin().join(".rdma-netdev.new");
        let mut command = Command::new("strace");
        command
            .args(["-f", "-qq", "-o", "/dev/null", "-P"])
            .arg(&beside);
        command.arg("-P").arg(self.bin().join("rdma-netdev"));
        command.args(["-e", &format!("inject=?{call}:{fault}")]);
        let output = command
            .arg(product("rdma-device-plugin")?)
            .args(self.flags())
            .output()?;
        Ok(output)
    }

    fn files(&self) -> Result<Vec<String>> {
        let entries: Result<Vec<_>, _> = fs::read_dir(self.bin())?.collect();
        let mut names: Vec<_> = entries?
            .iter()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        Ok(names)
    }

    fn has_old(&self, name: &str) -> Result<bool> {
        Ok(fs::read(self.bin().join(name))? == OLD.as_bytes())
    }

    fn has_new(&self, name: &str) -> Result<bool> {
        let place = self.bin().join(name);
        let mode = place.metadata()?.permissions().mode() & 0o7777;
        Ok(fs::read(&place)? == fs::read(product(name)?)? && mode == 0o755)
    }

    fn is_done(&self) -> Result<()> {
        for name in PROGRAMS {
            ensure!(self.has_new(name)?, "{name} is not the new one");
        }
        let files = self.files()?;
        ensure!(
            files == ["rdma-ipam", "rdma-netdev"],
            "left behind: {files:?}"
        );
        Ok(())
    }

    fn is_as_before(&self) -> Result<()> {
        for name in PROGRAMS {
            ensure!(self.has_old(name)?, "{name} is not the old one");
        }
        let files = self.files()?;
        ensure!(
            files == ["rdma-ipam", "rdma-netdev"],
            "left behind: {files:?}"
        );
        Ok(())
    }
}

fn script(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

fn said(output: &Output) -> String {
    let text = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&text).into_owned()
}

fn refused(output: &Output, words: &[&str]) -> Result<()> {
    let said = said(output);
    ensure!(output.status.code() == Some(1), "{}: {said}", output.status);
    for word in words {
        ensure!(said.contains(word), "no {word:?} in: {said}");
    }
    Ok(())
}

fn a_node_gets_both_programs_and_the_policy() -> Result<()> {
    let node = Node::new()?;
    let output = node.install(&[])?;
    let text = said(&output);
    ensure!(output.status.success(), "{text}");
    ensure!(
        text.contains("rdma-netdev: replaced version 0.0.7, now version"),
        "{text}"
    );
    node.is_done()?;
    let policy: serde_json::Value = serde_json::from_slice(&fs::read(node.policy())?)?;
    assert_eq!(policy, serde_json::json!({"version": 1, "node": "gpu-17"}));

    // A restarted pod changes nothing, not even a file's inode.
    let before = node.bin().join("rdma-netdev").metadata()?.ino();
    let output = node.install(&[])?;
    ensure!(output.status.success(), "{}", said(&output));
    assert_eq!(said(&output).matches("already up to date").count(), 3);
    assert_eq!(node.bin().join("rdma-netdev").metadata()?.ino(), before);
    Ok(())
}

/// An image of another architecture, rolled out to this node.
fn a_program_that_does_not_run_here_replaces_nothing() -> Result<()> {
    let node = Node::new()?;
    let image = tempfile::tempdir()?;
    for name in PROGRAMS {
        let mut elf = fs::read(product(name)?)?;
        let machine = elf.get_mut(18..20).context("no ELF header")?;
        // e_machine of ELF(5): s390, on which this test does not run.
        machine.copy_from_slice(&22u16.to_le_bytes());
        fs::write(image.path().join(name), elf)?;
    }
    let output = node.install_from(image.path())?;
    refused(
        &output,
        &["rdma-netdev does not run on this node", "architecture"],
    )?;
    node.is_as_before()
}

fn a_noexec_directory_is_named_as_the_cause() -> Result<()> {
    let node = Node::new()?;
    let script =
        r#"mount --bind "$1" "$1" && mount -o remount,bind,noexec "$1" && shift && exec "$@""#;
    let install = || -> Result<()> {
        let output = Command::new("unshare")
            .args(["-m", "sh", "-c", script, "sh"])
            .arg(node.bin())
            .arg(product("rdma-device-plugin")?)
            .args(node.flags())
            .output()?;
        refused(&output, &["bin is mounted noexec", "cni.binDir"])?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(!said.contains("architecture"), "{said}");
        Ok(())
    };
    install()?;
    node.is_as_before()?;
    // Also where the same programs are there already.
    ensure!(node.install(&[])?.status.success());
    install()
}

fn a_program_that_says_something_else_replaces_nothing() -> Result<()> {
    for program in ["#!/bin/sh\necho hello\n", "#!/bin/sh\nexit 1\n", ""] {
        let node = Node::new()?;
        let image = tempfile::tempdir()?;
        for name in PROGRAMS {
            script(&image.path().join(name), program)?;
        }
        let output = node.install_from(image.path())?;
        refused(&output, &["rdma-netdev does not run on this node"])?;
        node.is_as_before()?;
    }
    Ok(())
}

/// Programs do not run, not even for a moment, without the rules that were meant for them.
fn a_wrong_policy_stops_everything() -> Result<()> {
    let node = Node::new()?;
    fs::write(node.given_policy(), r#"{"alow": {}}"#)?;
    refused(&node.install(&[])?, &["given.json", "alow", "allow"])?;
    ensure!(!node.policy().exists());
    node.is_as_before()
}

fn a_missing_directory_is_named() -> Result<()> {
    let node = Node::new()?;
    let output = node.install(&["--from=/nonexistent".to_owned()])?;
    refused(&output, &["/nonexistent/rdma-netdev", "No such file"])?;
    node.is_as_before()?;
    fs::remove_dir_all(node.bin())?;
    refused(&node.install(&[])?, &["bin", "No such file"])
}

fn a_full_disk_leaves_the_old_program() -> Result<()> {
    for (call, error) in [("write", "ENOSPC"), ("fsync", "EIO"), ("rename", "EROFS")] {
        let node = Node::new()?;
        let output = node.install_with(call, &format!("error={error}"))?;
        refused(&output, &["rdma-netdev"])?;
        node.is_as_before()?;
    }
    Ok(())
}

fn killed_anywhere_it_leaves_the_old_or_the_new() -> Result<()> {
    let calls = [
        "open", "openat", "read", "write", "fchmod", "fsync", "close",
    ];
    let more = ["statx", "stat", "lstat", "execve", "rename", "unlink"];
    let mut kills = 0;
    for call in calls.into_iter().chain(more) {
        for nth in 1.. {
            let node = Node::new()?;
            let output = node.install_with(call, &format!("signal=KILL:when={nth}"))?;
            let sound = node.has_new("rdma-netdev")? || node.has_old("rdma-netdev")?;
            ensure!(
                sound,
                "killed at {call} {nth}: rdma-netdev is neither the old nor the new"
            );
            let again = node.install(&[])?;
            ensure!(
                again.status.success(),
                "after {call} {nth}: {}",
                said(&again)
            );
            node.is_done()
                .with_context(|| format!("after a kill at {call} {nth}"))?;
            if output.status.success() {
                break;
            }
            kills += 1;
        }
    }
    ensure!(
        kills >= 8,
        "only {kills} calls were met: the case no longer tests what it says"
    );
    Ok(())
}

fn two_at_once_take_turns() -> Result<()> {
    let node = Node::new()?;
    let runs: Result<Vec<_>> = (0..8)
        .map(|_| {
            let mut command = Command::new(product("rdma-device-plugin")?);
            Ok(command.args(node.flags()).stdout(Stdio::null()).spawn()?)
        })
        .collect();
    for mut run in runs? {
        ensure!(run.wait()?.success());
    }
    node.is_done()
}

fn versions_of_installed_programs_are_read() -> Result<()> {
    let node = Node::new()?;
    let with_rdmactl = ["--with-rdmactl".to_owned()];
    node.install(&with_rdmactl)?;
    for name in ["rdma-netdev", "rdma-ipam", "rdmactl"] {
        let path = node.bin().join(name);
        let mut changed = fs::read(&path)?;
        changed.push(0);
        fs::remove_file(&path)?;
        fs::write(&path, changed)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    }
    let output = node.install(&with_rdmactl)?;
    let said = String::from_utf8(output.stdout)?;
    let version = env!("CARGO_PKG_VERSION");
    let replaced = format!("replaced version {version}, now version {version}\n");
    assert_eq!(said.matches(&replaced).count(), 3, "{said}");
    Ok(())
}
