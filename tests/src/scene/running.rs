//! A program that is given its input and has to end in time.

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::cni::Answer;

/// No call may take longer, whatever a tenant wrote.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(20);

/// A program that is being waited for; killed when dropped.
#[derive(Debug)]
pub struct Running {
    child: Child,
    started: Instant,
    stdout: Option<thread::JoinHandle<Vec<u8>>>,
    stderr: Option<thread::JoinHandle<Vec<u8>>>,
}

impl Running {
    /// Starts a program and hands it its standard input.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(command: &mut Command, stdin: &[u8]) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("start {}", command.get_program().display()))?;
        if let Some(mut input) = child.stdin.take() {
            let stdin = stdin.to_vec();
            // One that answers without reading has closed the pipe already.
            thread::spawn(move || drop(input.write_all(&stdin)));
        }
        let stdout = child.stdout.take().map(collect);
        let stderr = child.stderr.take().map(collect);
        Ok(Self {
            child,
            started: Instant::now(),
            stdout,
            stderr,
        })
    }

    /// Sends SIGKILL.
    pub fn kill(&mut self) {
        // One that has ended needs no signal.
        let _ = self.child.kill();
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It does not come within [`CALL_TIMEOUT`], or the program panicked.
    pub fn answer(mut self) -> Result<Answer> {
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            if self.started.elapsed() > CALL_TIMEOUT {
                bail!("no answer within {CALL_TIMEOUT:?}");
            }
            thread::sleep(Duration::from_millis(2));
        };
        let text = |reader: Option<thread::JoinHandle<Vec<u8>>>| -> Result<String> {
            let reader = reader.context("read once")?;
            let bytes = reader.join().map_err(|_| anyhow!("the reader panicked"))?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        let answer = Answer {
            status,
            stdout: text(self.stdout.take())?,
            stderr: text(self.stderr.take())?,
        };
        ensure!(!answer.stderr.contains("panicked at"), "{}", answer.stderr);
        Ok(answer)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
        let _ = self.child.wait();
    }
}

fn collect(mut pipe: impl Read + Send + 'static) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // What was read before an error is what there is.
        let _ = pipe.read_to_end(&mut bytes);
        bytes
    })
}

/// Runs a program to its end, which must come within [`CALL_TIMEOUT`].
///
/// # Errors
/// It does not, or the program panicked.
pub fn bounded(command: &mut Command, stdin: &[u8]) -> Result<Answer> {
    Running::start(command, stdin)?.answer()
}
