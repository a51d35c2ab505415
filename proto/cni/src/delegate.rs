//! Running another plugin by the specification's rules (section "Plugin delegation").
//!
//! The delegate gets this process' environment (with that the runtime's trace context), the
//! request's own variables and the whole configuration. What it answers is read to the end and
//! must be one document. What it writes to stderr goes to ours when it has ended, printable and
//! bounded. A delegate that writes more than an answer has is killed. No deadline is set here: the
//! runtime has one for the whole call, and an IPAM that asks a server may need most of it.

use std::{
    fmt,
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process::{Child, Command as Process, ExitStatus, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use crate::{
    CniResult, Code, Command, Error, Request, Section, json,
    text::{bounded, printable},
};

/// More than this is not an answer of an IPAM.
const MAX_ANSWER_BYTES: usize = 1 << 20;
/// What is kept of a delegate's stderr, and of each text of its error object.
const MAX_TEXT_BYTES: usize = 4 << 10;
/// What stands in a message of a name that is none.
const MAX_NAME_BYTES: usize = 100;
/// How often a delegate whose stdout stays open is asked whether it has ended: a process that it
/// left behind may keep the pipe.
const ENDED_INTERVAL: Duration = Duration::from_millis(100);
/// How long a pipe of a delegate that has ended is read: what it wrote is there, but a process that
/// it left behind may never close the pipe.
const LEFT_OPEN_TIMEOUT: Duration = Duration::from_secs(2);

/// Waits between attempts while the file is being written ("text file busy"), in
/// milliseconds: an installer that replaces it in place needs that long.
const BUSY_WAITS_MS: [u64; 7] = [5, 10, 20, 40, 80, 160, 320];

/// `ENOEXEC` (`include/uapi/asm-generic/errno-base.h`): the file is not a program.
const ENOEXEC: i32 = 8;

/// Another plugin, found.
#[derive(Clone, Debug)]
pub struct Delegate {
    program: PathBuf,
    name: String,
}

/// Why a delegate gave no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The file cannot be started, now or later: it is not a program, may not be executed, or its
    /// interpreter is missing.
    NoProgram(Error),
    /// It was started and failed, or the system had no room for it.
    Failed(Error),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::NoProgram(error) | Failure::Failed(error) => error.fmt(f),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Failed(error)
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::NoProgram(error) | Failure::Failed(error) => error,
        }
    }
}

impl Delegate {
    /// Searches the directories of `CNI_PATH` for a plugin, in order; none when it is in none of
    /// them.
    ///
    /// # Errors
    /// Code 7 for a name that is none of a file; code 5 for a directory that cannot be searched,
    /// when no other has it.
    pub fn search(name: &str, path: &[PathBuf]) -> Result<Option<Self>, Error> {
        if !is_file_name(name) {
            return Err(Error::new(
                Code::InvalidConfig,
                format!(
                    "plugin type {:?} is not a file name",
                    bounded(name, MAX_NAME_BYTES)
                ),
            ));
        }
        let mut failure = None;
        for directory in path {
            let program = directory.join(name);
            match program.metadata() {
                Ok(found) if found.is_file() => {
                    return Ok(Some(Delegate {
                        program,
                        name: name.to_owned(),
                    }));
                }
                Ok(_) => {}
                Err(e)
                    if matches!(
                        e.kind(),
                        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                    ) => {}
                Err(e) => {
                    let what = format!("search for plugin {}: {e}", program.display());
                    failure.get_or_insert(Error::new(Code::Io, what));
                }
            }
        }
        failure.map_or(Ok(None), Err)
    }

    /// As [`Delegate::search`], for one that must be there.
    ///
    /// # Errors
    /// The same, and code 7 when none of the directories has it.
    pub fn find(name: &str, path: &[PathBuf]) -> Result<Self, Error> {
        Delegate::search(name, path)?.ok_or_else(|| {
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
    /// As [`Delegate::start`].
    pub fn add(&self, request: &Request) -> Result<CniResult, Error> {
        let answer = self.start(Command::Add, request)?;
        let value = json::parse(&answer).map_err(|e| {
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
    /// As [`Delegate::start`].
    pub fn call(&self, command: Command, request: &Request) -> Result<(), Error> {
        Ok(self.start(command, request).map(drop)?)
    }

    /// Runs a command and returns what it wrote on stdout.
    ///
    /// # Errors
    /// The error object the delegate wrote; code 6 when it failed without one; code 5 when it
    /// could not be run. A file that is not a program means something else to some callers than a
    /// program that failed: see [`Failure`].
    pub fn start(&self, command: Command, request: &Request) -> Result<Vec<u8>, Failure> {
        let io_failure = |e: io::Error| {
            Error::new(
                Code::Io,
                format!("run {} {}: {e}", self.program.display(), command.as_str()),
            )
        };
        let mut child = self.spawn(command, request).map_err(|e| {
            let never = matches!(
                e.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied
            ) || e.raw_os_error() == Some(ENOEXEC);
            let error = io_failure(e);
            match never {
                true => Failure::NoProgram(error),
                false => Failure::Failed(error),
            }
        })?;
        let said = exchange(&mut child, request.config.raw())
            .map_err(|e| Failure::Failed(io_failure(e)))?;
        if !said.stderr.is_empty() {
            let _ = writeln!(io::stderr().lock(), "{}: {}", self.name, said.stderr);
        }
        if said.too_long {
            let error = Error::new(
                Code::Decode,
                format!(
                    "{} {} wrote more than {MAX_ANSWER_BYTES} bytes and was ended",
                    self.name,
                    command.as_str()
                ),
            );
            return Err(error.with_details(excerpt(&said.stdout)).into());
        }
        if said.status.success() {
            return Ok(said.stdout);
        }
        Err(self.failure(command, &said).into())
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
                .stderr(Stdio::piped())
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

    fn failure(&self, command: Command, said: &Said) -> Error {
        let object = json::parse(&said.stdout).ok();
        let reported = object.as_ref().and_then(|value| {
            let section = Section::of(value, String::new()).ok()?;
            let code = match section.get::<u32>("code").ok()? {
                // 0 means success, which a runtime would believe.
                None | Some(0) => Code::Internal,
                Some(code) => Code::from(code),
            };
            let fit = |text: &str| bounded(&printable(text), MAX_TEXT_BYTES);
            let mut error = Error::new(code, fit(section.text("msg").ok()??));
            error.details = fit(section.text("details").ok()?.unwrap_or_default());
            Some(error)
        });
        reported
            .unwrap_or_else(|| {
                let failed = Error::new(
                    Code::Decode,
                    format!(
                        "{} failed without an error object ({})",
                        command.as_str(),
                        said.status
                    ),
                )
                .with_details(excerpt(&said.stdout));
                if said.stderr.is_empty() {
                    return failed;
                }
                failed.with_details(format!(
                    "on stderr: {}",
                    bounded(&said.stderr, EXCERPT_BYTES)
                ))
            })
            .context(&self.name)
    }
}

/// Whether a text names a file of a directory, and nothing else.
fn is_file_name(name: &str) -> bool {
    !name.is_empty() && !name.contains(['/', '\0']) && !matches!(name, "." | "..")
}

/// What a delegate left when it ended.
struct Said {
    status: ExitStatus,
    stdout: Vec<u8>,
    too_long: bool,
    /// Printable and bounded.
    stderr: String,
}

/// The start of what comes out of a pipe.
type Start = Arc<Mutex<Vec<u8>>>;

/// Writes the configuration while reading the answer, so that neither side can block the
/// other whatever the sizes.
fn exchange(child: &mut Child, config: &[u8]) -> io::Result<Said> {
    let stdin = child.stdin.take();
    let config = config.to_vec();
    // A delegate need not read its input: a closed pipe is no failure of ours.
    thread::spawn(move || stdin.map(|mut pipe| pipe.write_all(&config)));
    // Nothing waits for these threads but the loops below: a process that the delegate left
    // behind may hold its pipes for ever.
    let (stdout, stdout_ends) = collect(child.stdout.take(), MAX_ANSWER_BYTES);
    let (stderr, stderr_ends) = collect(child.stderr.take(), MAX_TEXT_BYTES);
    let end = loop {
        match stdout_ends.recv_timeout(ENDED_INTERVAL) {
            Err(RecvTimeoutError::Timeout) if child.try_wait()?.is_some() => {
                break stdout_ends.recv_timeout(LEFT_OPEN_TIMEOUT).ok();
            }
            Err(RecvTimeoutError::Timeout) => {}
            end => break end.ok(),
        }
    };
    let too_long = matches!(end, Some(End::Limit));
    if too_long {
        child.kill()?;
    }
    let status = child.wait()?;
    // Whoever holds stdout holds stderr, too.
    let rest = match end {
        Some(_) => LEFT_OPEN_TIMEOUT,
        None => Duration::ZERO,
    };
    let cut = matches!(stderr_ends.recv_timeout(rest), Ok(End::Limit));
    let stderr = taken(&stderr);
    let mut stderr = printable(String::from_utf8_lossy(&stderr).trim());
    if cut {
        stderr.push_str("… (the rest is cut)");
    }
    Ok(Said {
        status,
        stdout: taken(&stdout),
        too_long,
        stderr: bounded(&stderr, 2 * MAX_TEXT_BYTES),
    })
}

/// Why no more of a pipe is kept.
enum End {
    /// Everything was read.
    Closed,
    /// More came than is kept. It is read, so that the writer does not wait, and dropped.
    Limit,
}

/// Keeps the first `limit` bytes that come out of a pipe, and signals when it is done.
fn collect(pipe: Option<impl Read + Send + 'static>, limit: usize) -> (Start, mpsc::Receiver<End>) {
    let start = Start::default();
    let (end, ended) = mpsc::channel();
    let kept = Arc::clone(&start);
    thread::spawn(move || {
        let mut buffer = [0; 8 << 10];
        let mut pipe = pipe;
        while let Some(read) = pipe.as_mut().map(|pipe| pipe.read(&mut buffer)) {
            let read = match read {
                Ok(0) => break,
                Ok(length) => buffer.get(..length).unwrap_or_default(),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => break,
            };
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            let room = limit.saturating_sub(kept.len());
            kept.extend_from_slice(read.get(..room.min(read.len())).unwrap_or_default());
            if read.len() > room {
                // The receiver may be gone.
                let _ = end.send(End::Limit);
            }
        }
        let _ = end.send(End::Closed);
    });
    (start, ended)
}

fn taken(start: &Start) -> Vec<u8> {
    std::mem::take(&mut *start.lock().unwrap_or_else(PoisonError::into_inner))
}

/// How much of an answer that is none stands in an error message, in bytes.
const EXCERPT_BYTES: usize = 400;

/// The start of what a delegate wrote, fit for an error message.
fn excerpt(answer: &[u8]) -> String {
    let text = String::from_utf8_lossy(answer);
    match text.trim() {
        "" => "it wrote nothing on stdout".to_owned(),
        text => format!("it wrote {:?}", bounded(text, EXCERPT_BYTES)),
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
            assert_eq!(error.msg, format!("{name}: a\\nb\\u{{1b}}[2J"));
            assert!(error.details.len() < MAX_TEXT_BYTES + 40);
            assert!(error.details.ends_with("bytes cut)"), "{}", error.details);
        }
    }

    #[test]
    fn a_delegate_that_writes_without_end_is_ended() {
        let dir = tempfile::tempdir().unwrap();
        plugin(
            dir.path(),
            "flood",
            "trap '' PIPE; while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done",
        );
        let error = Delegate::find("flood", &[dir.path().to_owned()])
            .unwrap()
            .add(&request())
            .unwrap_err();
        assert_eq!(error.code, Code::Decode);
        assert!(
            error.msg.contains("flood") && error.msg.contains("was ended"),
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
