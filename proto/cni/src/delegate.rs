//! Running another plugin by the specification's rules (section "Plugin delegation").
//!
//! The delegate gets this process' environment (with that the runtime's trace context), the
//! request's own variables and the whole configuration; its stderr is ours. What it answers is read to the end and must
//! be one document. No deadline is set here: the runtime has one for the whole call, and a
//! DHCP client may rightly need most of it.

use std::{
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process::{Child, Command as Process, Stdio},
    thread,
    time::Duration,
};

use serde_json::Value;

use crate::{CniResult, Code, Command, Error, Request, Section};

/// More than this is no answer of an IPAM.
const MAX_ANSWER: u64 = 1 << 20;

/// Waits between attempts while the file is being written ("text file busy"), in
/// milliseconds: an installer that replaces it in place needs that long.
const BUSY_WAITS_MS: [u64; 7] = [5, 10, 20, 40, 80, 160, 320];

/// Another plugin, found.
#[derive(Clone, Debug)]
pub struct Delegate {
    program: PathBuf,
    name: String,
}

impl Delegate {
    /// Looks a plugin up in the directories of `CNI_PATH`, in order.
    ///
    /// # Errors
    /// Code 7 for a name that is a path, or that none of the directories has.
    pub fn find(name: &str, path: &[PathBuf]) -> Result<Self, Error> {
        if name.is_empty() || name.contains('/') || matches!(name, "." | "..") {
            return Err(Error::new(
                Code::InvalidConfig,
                format!("plugin type {name:?} is not a file name"),
            ));
        }
        path.iter()
            .map(|directory| directory.join(name))
            .find(|program| program.metadata().is_ok_and(|meta| meta.is_file()))
            .map(|program| Delegate {
                program,
                name: name.to_owned(),
            })
            .ok_or_else(|| {
                let searched: Vec<String> = path.iter().map(|p| p.display().to_string()).collect();
                Error::new(
                    Code::InvalidConfig,
                    format!("plugin {name} is not in CNI_PATH ({})", searched.join(":")),
                )
                .with_details(format!("install {name} on this node, or name another type"))
            })
    }

    /// The file that runs.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Asks for addresses.
    ///
    /// # Errors
    /// The delegate's own error object, or code 5 or 6 when there is none; see
    /// [`Delegate::run`].
    pub fn add(&self, request: &Request) -> Result<CniResult, Error> {
        let answer = self.run(Command::Add, request)?;
        let value: Value = serde_json::from_slice(&answer).map_err(|e| {
            Error::new(
                Code::Decode,
                format!("{} answered ADD with no JSON document: {e}", self.name),
            )
            .with_details(excerpt(&answer))
        })?;
        CniResult::parse(&value, Some(request.config.version))
            .map_err(|e| e.context(format_args!("result of {}", self.name)))
    }

    /// Runs a command without an answer: DEL, CHECK, STATUS, GC.
    ///
    /// # Errors
    /// As [`Delegate::run`].
    pub fn call(&self, command: Command, request: &Request) -> Result<(), Error> {
        self.run(command, request).map(drop)
    }

    /// Runs a command and returns what it wrote on stdout.
    ///
    /// # Errors
    /// The error object the delegate wrote; code 6 when it failed without one; code 5 when it
    /// could not be run.
    pub fn run(&self, command: Command, request: &Request) -> Result<Vec<u8>, Error> {
        let io_failure = |e: io::Error| {
            Error::new(
                Code::Io,
                format!("run {} {}: {e}", self.program.display(), command.as_str()),
            )
        };
        let mut child = self.spawn(command, request).map_err(io_failure)?;
        let answer = exchange(&mut child, request.config.raw());
        let status = child.wait().map_err(io_failure)?;
        let answer = answer.map_err(io_failure)?;
        if status.success() {
            return Ok(answer);
        }
        Err(self.failure(command, &answer, &status.to_string()))
    }

    fn spawn(&self, command: Command, request: &Request) -> io::Result<Child> {
        let mut waits = BUSY_WAITS_MS.iter();
        loop {
            let mut process = Process::new(&self.program);
            process
                .env("CNI_COMMAND", command.as_str())
                .envs(request.env.variables());
            let spawned = process
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::inherit())
                .spawn();
            match spawned {
                Err(e) if e.kind() == io::ErrorKind::ExecutableFileBusy => match waits.next() {
                    // A third of jitter by process ID: parallel pods do not come back as one.
                    Some(wait) => thread::sleep(Duration::from_millis(
                        wait + wait * u64::from(std::process::id() % 16) / 48,
                    )),
                    None => return Err(e),
                },
                other => return other,
            }
        }
    }

    fn failure(&self, command: Command, answer: &[u8], status: &str) -> Error {
        let object = serde_json::from_slice::<Value>(answer).ok();
        let told = object.as_ref().and_then(|value| {
            let section = Section::of(value, String::new()).ok()?;
            let code = section.get::<u32>("code").ok()??;
            let mut error = Error::new(Code::from(code), section.text("msg").ok()??);
            error.details = section.text("details").ok()?.unwrap_or_default().to_owned();
            Some(error)
        });
        told.unwrap_or_else(|| {
            Error::new(
                Code::Decode,
                format!(
                    "{} failed without an error object ({status})",
                    command.as_str()
                ),
            )
            .with_details(excerpt(answer))
        })
        .context(&self.name)
    }
}

/// Writes the configuration while reading the answer, so that neither side can block the
/// other whatever the sizes.
fn exchange(child: &mut Child, config: &[u8]) -> io::Result<Vec<u8>> {
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let mut answer = Vec::new();
    thread::scope(|scope| {
        // A delegate need not read its input: a closed pipe is no failure of ours.
        scope.spawn(move || stdin.map(|mut pipe| pipe.write_all(config)));
        if let Some(pipe) = stdout {
            pipe.take(MAX_ANSWER).read_to_end(&mut answer)?;
        }
        Ok::<(), io::Error>(())
    })?;
    Ok(answer)
}

/// The start of what a delegate wrote, fit for an error message.
fn excerpt(answer: &[u8]) -> String {
    let start: String = String::from_utf8_lossy(answer)
        .trim()
        .chars()
        .take(200)
        .collect();
    if start.is_empty() {
        "it wrote nothing on stdout".to_owned()
    } else {
        format!("it wrote {start:?}")
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;
    use crate::{Args, AttachmentId, ContainerId, Environment, IfName, NetworkConfig};

    fn plugin(directory: &Path, name: &str, script: &str) {
        let file = directory.join(name);
        fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn request_of(config: &str) -> Request {
        Request {
            env: Environment {
                command: Command::Add,
                attachment: Some(AttachmentId {
                    container_id: ContainerId::parse("pod-1").unwrap(),
                    ifname: IfName::parse("net1").unwrap(),
                }),
                netns: Some("/run/netns/x".into()),
                args: Args::parse("IgnoreUnknown=1;K8S_POD_NAME=a").unwrap(),
                path: vec!["/opt/cni/bin".into(), "/b".into()],
                netns_override: false,
            },
            config: NetworkConfig::parse(config.as_bytes()).unwrap(),
        }
    }

    fn request() -> Request {
        request_of(r#"{"cniVersion":"1.0.0","name":"a","ipam":{"type":"x"}}"#)
    }

    #[test]
    fn a_delegate_gets_command_and_configuration_and_its_answer_is_read() {
        let dir = tempfile::tempdir().unwrap();
        plugin(
            dir.path(),
            "echo-ipam",
            r#"grep -q '"type":"x"' || exit 9
               [ "$CNI_COMMAND" = ADD ] || exit 8
               [ "$CNI_CONTAINERID $CNI_IFNAME $CNI_NETNS" = "pod-1 net1 /run/netns/x" ] || exit 7
               [ "$CNI_ARGS $CNI_PATH" = "IgnoreUnknown=1;K8S_POD_NAME=a /opt/cni/bin:/b" ] || exit 6
               echo '{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.7/24"}]}'"#,
        );
        let delegate = Delegate::find("echo-ipam", &[dir.path().to_owned()]).unwrap();
        assert_eq!(
            delegate.add(&request()).unwrap().ips[0].address.to_string(),
            "10.0.0.7/24"
        );
        let error = delegate.call(Command::Del, &request()).unwrap_err();
        assert_eq!(error.code, Code::Decode);
        assert!(error.msg.contains("exit status: 8"), "{}", error.msg);
    }

    #[test]
    fn an_error_object_is_handed_on_with_its_code() {
        let dir = tempfile::tempdir().unwrap();
        plugin(
            dir.path(),
            "full",
            r#"echo '{"code":11,"msg":"no address","details":"wait"}'; exit 1"#,
        );
        let error = Delegate::find("full", &[dir.path().to_owned()])
            .unwrap()
            .add(&request())
            .unwrap_err();
        assert_eq!(
            (error.code, error.msg.as_str()),
            (Code::TryAgain, "full: no address")
        );
        assert_eq!(error.details, "wait");
    }

    #[test]
    fn garbage_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let answers = [
            ("garbage", "echo hello"),
            ("empty", "true"),
            ("two", "echo '{}{}'"),
            ("list", "echo '[]'"),
        ];
        for (name, script) in answers {
            plugin(dir.path(), name, script);
            let delegate = Delegate::find(name, &[dir.path().to_owned()]).unwrap();
            assert_eq!(
                delegate.add(&request()).unwrap_err().code,
                Code::Decode,
                "{name}"
            );
        }
    }

    #[test]
    fn a_missing_plugin_is_named_with_the_places_searched() {
        let error =
            Delegate::find("nowhere", &[PathBuf::from("/a"), PathBuf::from("/b")]).unwrap_err();
        assert_eq!(error.code, Code::InvalidConfig);
        assert!(
            error.msg.contains("nowhere") && error.msg.contains("/a:/b"),
            "{}",
            error.msg
        );
        for name in ["", "..", "a/b", "/bin/sh"] {
            assert_eq!(
                Delegate::find(name, &[PathBuf::from("/bin")])
                    .unwrap_err()
                    .code,
                Code::InvalidConfig
            );
        }
    }

    #[test]
    fn a_large_configuration_does_not_block() {
        let dir = tempfile::tempdir().unwrap();
        plugin(dir.path(), "deaf", "echo '{}'");
        let raw = format!(
            r#"{{"cniVersion":"1.0.0","name":"a","pad":"{}"}}"#,
            "x".repeat(1 << 20)
        );
        let delegate = Delegate::find("deaf", &[dir.path().to_owned()]).unwrap();
        assert_eq!(
            delegate.add(&request_of(&raw)).unwrap(),
            CniResult::default()
        );
    }

    #[test]
    fn a_file_being_written_is_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        plugin(dir.path(), "busy", "echo '{}'");
        fs::copy("/bin/true", dir.path().join("busy")).unwrap();
        let writer = fs::OpenOptions::new()
            .append(true)
            .open(dir.path().join("busy"))
            .unwrap();
        let delegate = Delegate::find("busy", &[dir.path().to_owned()]).unwrap();
        let release = thread::spawn(move || {
            thread::sleep(Duration::from_millis(30));
            drop(writer);
        });
        delegate.call(Command::Del, &request()).unwrap();
        release.join().unwrap();
    }
}
