//! Why an attachment cannot be made or undone, or the node not be used: the specification's error
//! object, and what undoing has to know of it.

use std::{fmt, io, ops::Deref, path::Path, time::Duration};

use ::node::{policy::PolicyError, trust};
use cni_wire::Code;

use crate::{cdi_file::CdiError, part::Defect};

/// What callers tell apart beside the codes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    #[default]
    Other,
    /// A record is empty or cut off: it is of an earlier boot.
    Incomplete,
    /// Another call holds a lock for longer than this one waits.
    Locked,
    /// A netdev is back on the host, and cannot be used yet: it has settings or a child of its pod.
    Kept(Defect),
    /// The name or the index of a new link is taken.
    NameTaken,
}

/// A failure, as it is reported to the runtime.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{wire}")]
pub struct Error {
    pub wire: cni_wire::Error,
    pub kind: Kind,
}

impl Deref for Error {
    type Target = cni_wire::Error;

    fn deref(&self) -> &cni_wire::Error {
        &self.wire
    }
}

impl From<cni_wire::Error> for Error {
    fn from(wire: cni_wire::Error) -> Self {
        let kind = Kind::Other;
        Error { wire, kind }
    }
}

impl From<Error> for cni_wire::Error {
    fn from(error: Error) -> Self {
        error.wire
    }
}

impl Error {
    pub fn new(code: Code, msg: impl fmt::Display) -> Self {
        cni_wire::Error::new(code, msg).into()
    }

    /// One with what to do about it.
    pub fn advise(code: Code, msg: impl fmt::Display, remedy: impl fmt::Display) -> Self {
        cni_wire::Error::advise(code, msg, remedy).into()
    }

    /// One that passes.
    pub(crate) fn of(kind: Kind, msg: impl fmt::Display) -> Self {
        Error {
            kind,
            ..Error::new(Code::TryAgain, msg)
        }
    }

    /// Adds what to do instead, or what else is known; earlier details stay.
    #[must_use]
    pub fn with_details(mut self, details: impl AsRef<str>) -> Self {
        self.wire = self.wire.with_details(details);
        self
    }

    /// Puts the object or attempt before the message.
    #[must_use]
    pub fn context(mut self, what: impl fmt::Display) -> Self {
        self.wire = self.wire.context(what);
        self
    }

    /// The file system refused `attempt` on `path`.
    pub(crate) fn file(attempt: &'static str, path: impl AsRef<Path>, source: io::Error) -> Self {
        let path = path.as_ref().to_owned();
        trust::Error::Io {
            attempt,
            path,
            source,
        }
        .into()
    }

    /// `what` did not return.
    pub(crate) fn nowhere(what: impl fmt::Display, waited: Duration) -> Self {
        let what =
            format!("{what} is neither on the host nor in the pod's namespace after {waited:?}");
        Error::new(Code::TryAgain, what)
            .with_details("a namespace that is being torn down still has it, or one that the pod moved it to; try again")
    }

    /// An RDMA device does not change its namespace.
    pub fn rdma_move(error: netlink::Error) -> Self {
        let has_mode = !error.is(libc::EOPNOTSUPP);
        let refused = Error::from(error);
        match has_mode {
            true => refused,
            false => refused.with_details(
                "its driver cannot be moved between namespaces, or the RDMA subsystem is not in \
                 exclusive mode any more (rdma system show)",
            ),
        }
    }

    /// All failures as one; none without any.
    pub fn all(failures: Vec<Error>) -> Option<Error> {
        let failures = failures.into_iter();
        failures.reduce(|first, other| first.with_details(other.to_string()))
    }
}

impl From<PolicyError> for Error {
    fn from(error: PolicyError) -> Self {
        Error::new(Code::Policy, &error).with_details(error.remedy())
    }
}

impl From<netlink::Error> for Error {
    fn from(error: netlink::Error) -> Self {
        Error::new(Code::Kernel, error)
    }
}

impl From<hca::Error> for Error {
    fn from(error: hca::Error) -> Self {
        Error::new(Code::Io, error)
    }
}

impl From<CdiError> for Error {
    fn from(error: CdiError) -> Self {
        Error::new(Code::Io, error)
    }
}

impl From<trust::Error> for Error {
    fn from(error: trust::Error) -> Self {
        let remedy = match error.kind() {
            Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {
                "no attachment can be recorded: make room, and free inodes, on the file system of \
                 stateDir of the node's policy"
            }
            Some(io::ErrorKind::ReadOnlyFilesystem) => {
                "no attachment can be recorded: mount the file system of stateDir of the node's \
                 policy writable"
            }
            Some(_) => return Error::new(Code::State, error),
            None => {
                "let root own stateDir of the node's policy, every directory above it and each file \
                 in it, mode 0755 or stricter; find out what put another file there, and remove it"
            }
        };
        Error::new(Code::State, error).with_details(remedy)
    }
}
