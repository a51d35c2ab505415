//! Asks a server of the node, blocking, within one time limit for everything.

use std::fs::{self, Metadata};
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::sockopt::{PeerCredentials, SendTimeout};
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, UnixAddr};
use nix::sys::time::TimeVal;
use nix::unistd::geteuid;

use crate::document::{self, Ask, Failure};
use crate::{ANSWER_MAX_BYTES, QUESTION_MAX_BYTES, VERSION};

/// Permission bits that let somebody else than the owner write.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// A program of the node that answers questions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Server {
    /// `rdma-device-plugin`.
    Daemon,
    /// `rdma-agent`.
    Agent,
}

/// A server at its socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Which server.
    pub server: Server,
    /// Path of its socket.
    pub socket: PathBuf,
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let server = match self.server {
            Server::Daemon => "the node's RDMA daemon",
            Server::Agent => "the node's agent",
        };
        write!(f, "{server} at {}", self.socket.display())
    }
}

/// Why there is no answer. The text says what was attempted and what to do.
#[derive(Debug, thiserror::Error)]
#[error("ask {peer}: {fault}")]
pub struct ClientError {
    /// Who was asked.
    pub peer: Peer,
    /// What went wrong.
    pub fault: Fault,
}

/// What went wrong with a question.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// There is no socket.
    #[error("there is no such socket; is the DaemonSet rdma-netdev running on this node?")]
    NoSocket,
    /// There is a socket, and no process listens on it.
    #[error(
        "connection refused, the process that made this socket has ended; is the DaemonSet \
         rdma-netdev running on this node?"
    )]
    Refused,
    /// The socket may be somebody else's. Nothing was asked. With what is wrong, of which object.
    #[error(
        "it is not asked: {0}; only root may be able to put a socket there: remove it and restart the \
         DaemonSet rdma-netdev on this node"
    )]
    NotTrusted(String),
    /// The time limit passed.
    #[error(
        "{step} took longer than the limit of {limit:?} for the whole question; see the log of the \
         DaemonSet rdma-netdev on this node"
    )]
    TimedOut {
        /// What it was spent on.
        step: Step,
        /// The limit.
        limit: Duration,
    },
    /// The kernel refused.
    #[error("{step}: {source}")]
    Io {
        /// What was attempted.
        step: Step,
        /// What the kernel said.
        source: io::Error,
    },
    /// The server closed the connection first.
    #[error(
        "it closed the connection without an answer; see the log of the DaemonSet rdma-netdev \
         on this node"
    )]
    Closed,
    /// The question is longer than [`QUESTION_MAX_BYTES`]. Nothing was asked.
    #[error("the question has {0} bytes, more than {QUESTION_MAX_BYTES}")]
    QuestionTooLarge(usize),
    /// The answer is longer than [`ANSWER_MAX_BYTES`].
    #[error(
        "the answer is longer than {ANSWER_MAX_BYTES} bytes: install all programs of one release"
    )]
    AnswerTooLarge,
    /// The answer is not a valid document.
    #[error("the answer is malformed: {0}; install all programs of one release")]
    Malformed(String),
    /// The answer is of another version of the documents.
    #[error(
        "the answer has version {0}, this program knows version {VERSION}: install all programs of one \
         release"
    )]
    Version(u64),
    /// The server answered with a failure.
    #[error("it answered: {0}")]
    Failed(Failure),
}

impl Fault {
    fn io(step: Step, source: io::Error) -> Self {
        Self::Io { step, source }
    }
}

impl ClientError {
    /// The server's own failure, if it answered.
    #[must_use]
    pub fn failure(&self) -> Option<&Failure> {
        match &self.fault {
            Fault::Failed(failure) => Some(failure),
            _ => None,
        }
    }
}

/// A step of asking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Reading owner and permissions of the socket and its directory.
    Check,
    /// Connecting.
    Connect,
    /// Writing the question.
    Write,
    /// Reading the answer.
    Read,
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Check => "reading owner and permissions of the socket",
            Self::Connect => "connecting",
            Self::Write => "writing the question",
            Self::Read => "reading the answer",
        })
    }
}

/// Asks the server behind a socket. `limit` is for connect, write and read together.
///
/// # Errors
/// [`ClientError`]; nothing is asked of a socket that somebody else than root or this process's
/// own user could have made.
pub fn ask<Q: Ask>(socket: &Path, question: &Q, limit: Duration) -> Result<Q::Answer, ClientError> {
    let asked = || {
        let document = question.question().encode();
        if document.len() > QUESTION_MAX_BYTES {
            return Err(Fault::QuestionTooLarge(document.len()));
        }
        let call = Call {
            socket,
            limit,
            deadline: Instant::now() + limit,
            own_uid: geteuid().as_raw(),
        };
        call.check_path()?;
        let mut stream = call.connect()?;
        call.check_peer(&stream)?;
        call.write(&mut stream, &document)?;
        document::decode_answer(&call.read(&mut stream)?)
    };
    asked().map_err(|fault| ClientError {
        peer: Peer {
            server: Q::SERVER,
            socket: socket.into(),
        },
        fault,
    })
}

struct Call<'c> {
    socket: &'c Path,
    limit: Duration,
    deadline: Instant,
    own_uid: u32,
}

impl Call<'_> {
    /// Directory and socket belong to root or to this process's user, and no other user can write
    /// to them. So no other user can put another socket in place between this and the connect.
    fn check_path(&self) -> Result<(), Fault> {
        let directory = match self.socket.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        // A link's target may be anybody's; `symlink_metadata` makes it neither of the two.
        let is_socket = |meta: &Metadata| meta.file_type().is_socket();
        self.check(directory, "directory", Metadata::is_dir)?;
        self.check(self.socket, "socket", is_socket)
    }

    fn check(&self, path: &Path, kind: &str, is: fn(&Metadata) -> bool) -> Result<(), Fault> {
        let meta = fs::symlink_metadata(path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => Fault::NoSocket,
            _ => Fault::io(Step::Check, error),
        })?;
        let why = if !is(&meta) {
            format!("is not a {kind}")
        } else if !self.trusts(meta.uid()) {
            format!("belongs to uid {}", meta.uid())
        } else if meta.mode() & WRITABLE_BY_OTHERS != 0 {
            format!("is writable by others (mode {:04o})", meta.mode() & 0o7777)
        } else {
            return Ok(());
        };
        Err(Fault::NotTrusted(format!("{} {why}", path.display())))
    }

    fn trusts(&self, uid: u32) -> bool {
        uid == 0 || uid == self.own_uid
    }

    /// A connect to a unix socket waits while the listener's backlog is full, and keeps to the
    /// sender's time limit there (`net/unix/af_unix.c`, `unix_stream_connect`).
    fn connect(&self) -> Result<UnixStream, Fault> {
        let failed = |errno: Errno| match errno {
            Errno::ENOENT => Fault::NoSocket,
            Errno::ECONNREFUSED => Fault::Refused,
            Errno::EAGAIN => self.late(Step::Connect),
            errno => Fault::io(Step::Connect, errno.into()),
        };
        let address = UnixAddr::new(self.socket).map_err(failed)?;
        let file = socket::socket(
            AddressFamily::Unix,
            SockType::Stream,
            SockFlag::SOCK_CLOEXEC,
            None,
        )
        .map_err(failed)?;
        loop {
            let left = self.left(Step::Connect)?;
            let micros = i64::try_from(left.as_micros()).unwrap_or(i64::MAX).max(1);
            let left = TimeVal::new(micros / 1_000_000, micros % 1_000_000);
            socket::setsockopt(&file, SendTimeout, &left).map_err(failed)?;
            match socket::connect(file.as_raw_fd(), &address) {
                Ok(()) => return Ok(UnixStream::from(file)),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(failed(errno)),
            }
        }
    }

    /// The process that listens is of root or of this process's user.
    fn check_peer(&self, stream: &UnixStream) -> Result<(), Fault> {
        let peer = socket::getsockopt(stream, PeerCredentials)
            .map_err(|errno| Fault::io(Step::Connect, errno.into()))?;
        if self.trusts(peer.uid()) {
            return Ok(());
        }
        Err(Fault::NotTrusted(format!(
            "process {} of uid {} listens on it",
            peer.pid(),
            peer.uid()
        )))
    }

    fn write(&self, stream: &mut UnixStream, document: &[u8]) -> Result<(), Fault> {
        let mut rest = document;
        while !rest.is_empty() {
            let left = self.left(Step::Write)?;
            let written = stream
                .set_write_timeout(Some(left))
                .and_then(|()| stream.write(rest));
            match written {
                Ok(count) => rest = rest.get(count..).unwrap_or_default(),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // It may have said why before it closed.
                Err(error) if is_closed(&error) => return Ok(()),
                Err(error) => return Err(self.failed(Step::Write, error)),
            }
        }
        match stream.shutdown(Shutdown::Write) {
            Err(error) if error.kind() != ErrorKind::NotConnected => {
                Err(self.failed(Step::Write, error))
            }
            _ => Ok(()),
        }
    }

    fn read(&self, stream: &mut UnixStream) -> Result<Vec<u8>, Fault> {
        let mut answer = Vec::new();
        let mut piece = [0; 4096];
        loop {
            let left = self.left(Step::Read)?;
            let read = stream
                .set_read_timeout(Some(left))
                .and_then(|()| stream.read(&mut piece));
            match read {
                Ok(0) => break,
                Ok(count) => answer.extend_from_slice(piece.get(..count).unwrap_or_default()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // The daemon closed with our question unread: what it wrote came first.
                Err(error) if is_closed(&error) => break,
                Err(error) => return Err(self.failed(Step::Read, error)),
            }
            if answer.len() > ANSWER_MAX_BYTES {
                return Err(Fault::AnswerTooLarge);
            }
        }
        if answer.is_empty() {
            return Err(Fault::Closed);
        }
        Ok(answer)
    }

    /// Time that is left; never zero, which the kernel takes for no limit.
    fn left(&self, step: Step) -> Result<Duration, Fault> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(self.late(step));
        }
        Ok(left)
    }

    fn failed(&self, step: Step, error: io::Error) -> Fault {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => self.late(step),
            _ => Fault::io(step, error),
        }
    }

    fn late(&self, step: Step) -> Fault {
        let limit = self.limit;
        Fault::TimedOut { step, limit }
    }
}

fn is_closed(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset
    )
}

#[cfg(test)]
mod tests;
