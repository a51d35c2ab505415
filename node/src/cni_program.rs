//! The programs that a container runtime executes on this node, and what they answer.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The CNI programs of this project, by file name.
pub const NAMES: [&str; 2] = ["rdma-netdev", "rdma-ipam"];

const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
const ANSWER_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// The version that an installed program prints for `--version`; `None` for a link, or a program
/// that does not run or prints none. A CNI program that is started by hand prints it on stderr,
/// others on stdout.
#[must_use]
pub fn version_of(program: &Path) -> Option<String> {
    if !program.symlink_metadata().ok()?.is_file() {
        return None;
    }
    let mut asked = Command::new(program);
    asked.env_clear().arg("--version");
    let answer = ask(&mut asked, b"").ok()?;
    let output = [answer.stdout, answer.stderr].concat();
    let line = String::from_utf8_lossy(&output).lines().next()?.to_owned();
    let mut words = line.split(' ').map(|word| word.trim_start_matches('v'));
    words
        .find(|word| word.starts_with(|c: char| c.is_ascii_digit()))
        .map(str::to_owned)
}

/// Runs a program that is expected to answer at once, and not more than pipes hold.
///
/// # Errors
/// It cannot be started, or has not ended after ten seconds.
pub fn ask(command: &mut Command, input: &[u8]) -> Result<Output, String> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| error.to_string())?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that answers without reading is fine: its answer is what counts.
        let _ = stdin.write_all(input);
    }
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    while child
        .try_wait()
        .map_err(|error| error.to_string())?
        .is_none()
    {
        if Instant::now() >= deadline {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("no answer within {} s", ANSWER_TIMEOUT.as_secs()));
        }
        std::thread::sleep(ANSWER_POLL_INTERVAL);
    }
    child.wait_with_output().map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_version_is_read_from_either_stream() {
        let dir = tempfile::tempdir().unwrap();
        let program = |name: &str, script: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
            version_of(&path)
        };
        assert_eq!(program("a", "echo a 1.2.3").as_deref(), Some("1.2.3"));
        assert_eq!(
            program("b", "echo CNI b plugin v1.3.0 >&2").as_deref(),
            Some("1.3.0")
        );
        assert_eq!(program("c", "echo no number"), None);
        assert_eq!(version_of(&dir.path().join("absent")), None);
        std::os::unix::fs::symlink(dir.path().join("a"), dir.path().join("link")).unwrap();
        assert_eq!(version_of(&dir.path().join("link")), None);
    }
}
