//! Asks a server of the node, blocking, within one time limit for everything.

use std::fs;
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

use crate::document::{self, Ask, Failure, NoAnswer};
use crate::{ANSWER_MAX_BYTES, QUESTION_MAX_BYTES};

/// Permission bits that let somebody else than the owner write.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// A program of the node that answers questions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Server {
    /// `rdma-device-plugin`.
    Daemon,
    /// `rdma-ipam-broker`.
    Broker,
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
            Server::Broker => "the node's address broker",
        };
        write!(f, "{server} at {}", self.socket.display())
    }
}

/// Why there is no answer. The text says what was attempted and what to do.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no socket.
    #[error(
        "ask {peer}: there is no such socket; \
         is the DaemonSet rdma-device-plugin running on this node?"
    )]
    NoSocket {
        /// Who was asked.
        peer: Peer,
    },
    /// There is a socket, and no process listens on it.
    #[error(
        "ask {peer}: connection refused, the process that made this \
         socket has ended; is the DaemonSet rdma-device-plugin running on this node?"
    )]
    Refused {
        /// Who was asked.
        peer: Peer,
    },
    /// The socket may be somebody else's. Nothing was asked.
    #[error(
        "{peer} is not asked: {why}; only root may be able to put a \
         socket there: remove it and restart the DaemonSet rdma-device-plugin on this node"
    )]
    NotTrusted {
        /// Who was asked.
        peer: Peer,
        /// What is wrong, and with which object.
        why: String,
    },
    /// The time limit passed.
    #[error(
        "ask {peer}: {step} took longer than the limit of {limit:?} \
         for the whole question; see the log of the DaemonSet rdma-device-plugin on this node"
    )]
    TimedOut {
        /// Who was asked.
        peer: Peer,
        /// What it was spent on.
        step: Step,
        /// The limit.
        limit: Duration,
    },
    /// The kernel refused.
    #[error("ask {peer}: {step}: {source}")]
    Io {
        /// Who was asked.
        peer: Peer,
        /// What was attempted.
        step: Step,
        /// What the kernel said.
        source: io::Error,
    },
    /// The daemon closed the connection first.
    #[error(
        "ask {peer}: it closed the connection without an answer; \
         see the log of the DaemonSet rdma-device-plugin on this node"
    )]
    Closed {
        /// Who was asked.
        peer: Peer,
    },
    /// The question is longer than [`QUESTION_MAX_BYTES`]. Nothing was asked.
    #[error("the question to {peer} has {bytes} bytes, more than {QUESTION_MAX_BYTES}")]
    QuestionTooLarge {
        /// Who was to be asked.
        peer: Peer,
        /// Its length.
        bytes: usize,
    },
    /// The answer is longer than [`ANSWER_MAX_BYTES`].
    #[error(
        "the answer of {peer} is longer than {ANSWER_MAX_BYTES} bytes: \
         install both programs of one release"
    )]
    AnswerTooLarge {
        /// Who was asked.
        peer: Peer,
    },
    /// The answer is no valid document.
    #[error(
        "the answer of {peer} is malformed: {why}; \
         install both programs of one release"
    )]
    Malformed {
        /// Who was asked.
        peer: Peer,
        /// What is wrong.
        why: String,
    },
    /// The answer is of another version of the documents.
    #[error(
        "the answer of {peer} has version {version}, this program \
         knows version {}: install both programs of one release",
        crate::VERSION
    )]
    Version {
        /// Who was asked.
        peer: Peer,
        /// The answer's version.
        version: u64,
    },
    /// The daemon answered with a failure.
    #[error("{peer} answered: {failure}")]
    Failed {
        /// Who was asked.
        peer: Peer,
        /// What it said.
        failure: Failure,
    },
}

impl ClientError {
    /// The daemon's own failure, if the daemon answered.
    #[must_use]
    pub fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Failed { failure, .. } => Some(failure),
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
    let document = question.question().encode();
    let peer = Peer {
        server: Q::SERVER,
        socket: socket.into(),
    };
    if document.len() > QUESTION_MAX_BYTES {
        return Err(ClientError::QuestionTooLarge {
            peer,
            bytes: document.len(),
        });
    }
    let call = Call {
        socket,
        peer,
        limit,
        deadline: Instant::now() + limit,
        own_uid: geteuid().as_raw(),
    };
    call.check_path()?;
    let mut stream = call.connect()?;
    call.check_peer(&stream)?;
    call.write(&mut stream, &document)?;
    let answer = call.read(&mut stream)?;
    match document::decode_answer(&answer) {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(failure)) => Err(ClientError::Failed {
            peer: call.peer.clone(),
            failure,
        }),
        Err(NoAnswer::Malformed(why)) => Err(ClientError::Malformed {
            peer: call.peer.clone(),
            why,
        }),
        Err(NoAnswer::Version(version)) => Err(ClientError::Version {
            peer: call.peer.clone(),
            version,
        }),
    }
}

struct Call<'c> {
    socket: &'c Path,
    peer: Peer,
    limit: Duration,
    deadline: Instant,
    own_uid: u32,
}

impl Call<'_> {
    /// Directory and socket belong to root or to this process's user, and no other user can write
    /// to them. So no other user can put another socket in place between this and the connect.
    fn check_path(&self) -> Result<(), ClientError> {
        let directory = match self.socket.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let meta = self.meta(directory)?;
        // A link's target may be anybody's; `symlink_metadata` makes it no directory.
        if !meta.is_dir() {
            return Err(self.distrust(format!("{} is not a directory", directory.display())));
        }
        self.check_owner(directory, &meta)?;
        let meta = self.meta(self.socket)?;
        if !meta.file_type().is_socket() {
            return Err(self.distrust(format!("{} is not a socket", self.socket.display())));
        }
        self.check_owner(self.socket, &meta)
    }

    fn meta(&self, path: &Path) -> Result<fs::Metadata, ClientError> {
        fs::symlink_metadata(path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => ClientError::NoSocket {
                peer: self.peer.clone(),
            },
            _ => self.io(Step::Check, error),
        })
    }

    fn check_owner(&self, path: &Path, meta: &fs::Metadata) -> Result<(), ClientError> {
        if !self.trusts(meta.uid()) {
            return Err(self.distrust(format!("{} belongs to uid {}", path.display(), meta.uid())));
        }
        if meta.mode() & WRITABLE_BY_OTHERS != 0 {
            return Err(self.distrust(format!(
                "{} is writable by others (mode {:04o})",
                path.display(),
                meta.mode() & 0o7777
            )));
        }
        Ok(())
    }

    fn trusts(&self, uid: u32) -> bool {
        uid == 0 || uid == self.own_uid
    }

    /// A connect to a unix socket waits while the listener's backlog is full, and keeps to the
    /// sender's time limit there (`net/unix/af_unix.c`, `unix_stream_connect`).
    fn connect(&self) -> Result<UnixStream, ClientError> {
        let failed = |errno: Errno| match errno {
            Errno::ENOENT => ClientError::NoSocket {
                peer: self.peer.clone(),
            },
            Errno::ECONNREFUSED => ClientError::Refused {
                peer: self.peer.clone(),
            },
            Errno::EAGAIN => self.late(Step::Connect),
            errno => self.io(Step::Connect, errno.into()),
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
    fn check_peer(&self, stream: &UnixStream) -> Result<(), ClientError> {
        let peer = socket::getsockopt(stream, PeerCredentials)
            .map_err(|errno| self.io(Step::Connect, errno.into()))?;
        if self.trusts(peer.uid()) {
            return Ok(());
        }
        Err(self.distrust(format!(
            "process {} of uid {} listens on it",
            peer.pid(),
            peer.uid()
        )))
    }

    fn write(&self, stream: &mut UnixStream, document: &[u8]) -> Result<(), ClientError> {
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

    fn read(&self, stream: &mut UnixStream) -> Result<Vec<u8>, ClientError> {
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
                return Err(ClientError::AnswerTooLarge {
                    peer: self.peer.clone(),
                });
            }
        }
        if answer.is_empty() {
            return Err(ClientError::Closed {
                peer: self.peer.clone(),
            });
        }
        Ok(answer)
    }

    /// Time that is left; never zero, which the kernel takes for no limit.
    fn left(&self, step: Step) -> Result<Duration, ClientError> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(self.late(step));
        }
        Ok(left)
    }

    fn failed(&self, step: Step, error: io::Error) -> ClientError {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => self.late(step),
            _ => self.io(step, error),
        }
    }

    fn late(&self, step: Step) -> ClientError {
        ClientError::TimedOut {
            peer: self.peer.clone(),
            step,
            limit: self.limit,
        }
    }

    fn io(&self, step: Step, source: io::Error) -> ClientError {
        ClientError::Io {
            peer: self.peer.clone(),
            step,
            source,
        }
    }

    fn distrust(&self, why: String) -> ClientError {
        ClientError::NotTrusted {
            peer: self.peer.clone(),
            why,
        }
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
