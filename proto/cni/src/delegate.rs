//! Running another plugin by the specification's rules (section "Plugin delegation").
//!
//! The delegate gets this process' environment (with that the runtime's trace context), the request's
//! own variables and the whole configuration. Its standard streams are files in memory: nobody waits
//! for a reader, nor for a process that the delegate leaves behind. Writing to them fails (EPERM) far
//! behind the longest answer. What it writes to stderr goes to ours when it has ended, printable and
//! bounded. No deadline is set here: the runtime has one for the whole call, and an IPAM that asks a
//! server may need most of it.

use std::{
    fs::File,
    io::{self, Seek, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Command as Process, Output},
};

use libc::{EACCES, ENOENT, ENOEXEC, ENOTDIR, EPERM};
use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::memfd::{MFdFlags, memfd_create},
};
use serde::Deserialize;

use crate::{
    CniResult, Code, Command, Error, Request, json,
    text::{bounded, fit},
};

/// More than this is not an answer of an IPAM.
const MAX_ANSWER_BYTES: usize = 1 << 20;
/// The most bytes of a delegate's stderr in the log.
const MAX_TEXT_BYTES: usize = 4 << 10;
/// What an error message shows of an answer that cannot be read, and of stderr.
const EXCERPT_BYTES: usize = 400;
/// Another plugin, found.
#[derive(Clone, Debug)]
pub struct Delegate {
    program: PathBuf,
    name: String,
}

/// The error object of the specification.
#[derive(Deserialize)]
struct Reported {
    code: Option<u32>,
    msg: String,
    details: Option<String>,
}

impl Delegate {
    /// Searches the directories of `CNI_PATH` for a plugin, in order.
    ///
    /// # Errors
    /// Code 7: the name is not that of a file, or none of the directories has it; code 5: one of them
    /// cannot be searched.
    pub fn find(name: &str, path: &[PathBuf]) -> Result<Self, Error> {
        if name.is_empty() || name.contains(['/', '\0']) || [".", ".."].contains(&name) {
            let what = format!("plugin type {:?} is not a file name", bounded(name, 100));
            return Err(Error::new(Code::InvalidConfig, what));
        }
        use io::ErrorKind::{NotADirectory, NotFound};
        let mut failure = None;
        for directory in path {
            let (program, name) = (directory.join(name), name.to_owned());
            match program.metadata().map(|found| found.is_file()) {
                Ok(true) => return Ok(Delegate { program, name }),
                Err(e) if !matches!(e.kind(), NotFound | NotADirectory) => {
                    let what = format!("search for plugin {}: {e}", program.display());
                    failure.get_or_insert(Error::new(Code::Io, what));
                }
                _ => {}
            }
        }
        Err(failure.unwrap_or_else(|| {
            let searched = std::env::join_paths(path).unwrap_or_default();
            Error::advise(
                Code::InvalidConfig,
                format_args!("plugin {name} is not in CNI_PATH ({})", searched.display()),
                format_args!("install {name} on this node, or name another type"),
            )
        }))
    }

    /// The file that runs.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Asks for addresses.
    pub fn add(&self, request: &Request) -> Result<CniResult, Error> {
        let answer = self.start(Command::Add, request)??;
        let value = json::parse(&answer).map_err(|e| {
            let what = format!("the answer of {} to ADD is {e}", self.name);
            Error::advise(Code::Decode, what, excerpt(&answer))
        })?;
        CniResult::parse(&value, Some(request.config.version))
            .map_err(|e| e.context(format_args!("result of {}", self.name)))
    }

    /// Runs a command without an answer: DEL, CHECK, STATUS, GC.
    pub fn call(&self, command: Command, request: &Request) -> Result<(), Error> {
        self.start(command, request)?.map(drop)
    }

    /// Runs a command. Returns what it wrote on stdout, or why it failed: the error object that it
    /// wrote; code 6 without one.
    ///
    /// # Errors
    /// Code 5: the file cannot be started, now or later: it is not a program, may not be executed, or
    /// its interpreter is missing.
    pub fn start(
        &self,
        command: Command,
        request: &Request,
    ) -> Result<Result<Vec<u8>, Error>, Error> {
        let ended = match self.run(command, request) {
            Ok(ended) => ended,
            Err(e) => {
                let what = format!("run {} {command}: {e}", self.program.display());
                let error = Error::new(Code::Io, what);
                return match e.raw_os_error() {
                    Some(ENOENT | ENOTDIR | EACCES | EPERM | ENOEXEC) => Err(error),
                    _ => Ok(Err(error)),
                };
            }
        };
        let stderr = String::from_utf8_lossy(&ended.stderr);
        let stderr = fit(stderr.trim(), MAX_TEXT_BYTES);
        if !stderr.is_empty() {
            let _ = writeln!(io::stderr().lock(), "{}: {stderr}", self.name);
        }
        Ok(answer(ended, &stderr, command).map_err(|e| e.context(&self.name)))
    }

    fn run(&self, command: Command, request: &Request) -> io::Result<Output> {
        let mut stdin = memory()?;
        stdin.write_all(request.config.raw())?;
        stdin.rewind()?;
        let (mut stdout, mut stderr) = (limited()?, limited()?);
        let mut process = Process::new(&self.program);
        process
            .env("CNI_COMMAND", command.as_str())
            .envs(request.env.variables())
            .stdin(stdin)
            .stdout(stdout.try_clone()?)
            .stderr(stderr.try_clone()?);
        let status = process.status()?;
        Ok(Output {
            status,
            stdout: written(&mut stdout, MAX_ANSWER_BYTES + 1)?,
            stderr: written(&mut stderr, MAX_ANSWER_BYTES)?,
        })
    }
}

fn answer(ended: Output, stderr: &str, command: Command) -> Result<Vec<u8>, Error> {
    let (stdout, status) = (ended.stdout, ended.status);
    if stdout.len() > MAX_ANSWER_BYTES {
        let what = format!("{command} wrote more than {MAX_ANSWER_BYTES} bytes");
        return Err(Error::advise(Code::Decode, what, excerpt(&stdout)));
    }
    if status.success() {
        return Ok(stdout);
    }
    if let Ok(reported) = serde_json::from_slice::<Reported>(&stdout) {
        // 0 means success, which a runtime would believe.
        let code = reported.code.filter(|code| *code != 0).map(Code);
        let (code, details) = (code.unwrap_or(Code::Internal), reported.details);
        return Err(Error::advise(
            code,
            reported.msg,
            details.unwrap_or_default(),
        ));
    }
    let what = format!("{command} failed without an error object ({status})");
    let failed = Error::advise(Code::Decode, what, excerpt(&stdout));
    Err(match stderr {
        "" => failed,
        text => failed.with_details(format!("on stderr: {}", bounded(text, EXCERPT_BYTES))),
    })
}

fn memory() -> io::Result<File> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let no_exec = MFdFlags::from_bits_retain(libc::MFD_NOEXEC_SEAL);
    // Some nodes refuse files in memory that could be executed; kernels before 6.3 do not know of it.
    let file = memfd_create("cni", flags | no_exec).or_else(|_| memfd_create("cni", flags));
    Ok(file?.into())
}

/// A file that takes twice the longest answer.
fn limited() -> io::Result<File> {
    let file = memory()?;
    file.set_len(2 * MAX_ANSWER_BYTES as u64)?;
    fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_GROW))?;
    Ok(file)
}

/// What was written, up to the place that the writers share with us.
fn written(file: &mut File, limit: usize) -> io::Result<Vec<u8>> {
    let end = usize::try_from(file.stream_position()?).unwrap_or(limit);
    let mut bytes = vec![0; end.min(limit)];
    let length = file.read_at(&mut bytes, 0)?;
    bytes.truncate(length);
    Ok(bytes)
}

/// The start of what a delegate wrote, fit for an error message.
fn excerpt(answer: &[u8]) -> String {
    match String::from_utf8_lossy(answer).trim() {
        "" => "it wrote nothing on stdout".to_owned(),
        text => format!("it wrote {:?}", bounded(text, EXCERPT_BYTES)),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt, time::Duration};

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
    fn an_error_object_cannot_flood_forge_or_pass_for_success() {
        let dir = tempfile::tempdir().unwrap();
        for (name, code, expected) in [
            ("zero", r#""code":0,"#, Code::Internal),
            ("none", "", Code::Internal),
            ("busy", r#""code":11,"#, Code::TryAgain),
        ] {
            plugin(
                dir.path(),
                name,
                &format!(
                    r#"x=$(head -c 100000 /dev/zero | tr '\0' x)
                       printf '%s' '{{{code}"msg":"a\nb\u001b[2J","details":"'"$x"'"}}'; exit 1"#
                ),
            );
            let error = Delegate::find(name, &[dir.path().to_owned()])
                .unwrap()
                .add(&request())
                .unwrap_err();
            assert_eq!(error.code, expected, "{name}");
            let document = error.to_json(crate::Version::NEWEST);
            assert_eq!(document["msg"], format!("{name}: a\\nb\\u{{1b}}[2J"));
            let details = document["details"].as_str().unwrap();
            assert!(
                details.len() < 10_000 && details.ends_with("bytes cut)"),
                "{details}"
            );
        }
    }

    #[test]
    fn a_delegate_that_writes_too_much_is_named() {
        let dir = tempfile::tempdir().unwrap();
        plugin(dir.path(), "flood", "yes xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx");
        let error = Delegate::find("flood", &[dir.path().to_owned()])
            .unwrap()
            .add(&request())
            .unwrap_err();
        assert_eq!(error.code, Code::Decode);
        assert!(
            error.msg.contains("flood") && error.msg.contains("more than 1048576 bytes"),
            "{}",
            error.msg
        );
        plugin(
            dir.path(),
            "loud",
            "head -c 1000000 /dev/zero | tr '\\0' e >&2; echo '{}'",
        );
        let loud = Delegate::find("loud", &[dir.path().to_owned()]).unwrap();
        assert_eq!(loud.add(&request()).unwrap(), CniResult::default());
    }

    #[test]
    fn what_a_delegate_leaves_behind_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        plugin(dir.path(), "parent", "sleep 5 & echo '{}'");
        let started = std::time::Instant::now();
        let parent = Delegate::find("parent", &[dir.path().to_owned()]).unwrap();
        assert_eq!(parent.add(&request()).unwrap(), CniResult::default());
        assert!(started.elapsed() < Duration::from_secs(4));
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
        for name in ["", "..", ".", "a/b", "/bin/sh", "a\0b"] {
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
}
