//! Why an attachment cannot be made or undone, or the node not be used: what was attempted, on which
//! object, and what the person on call does about it.

use std::{fmt, io, path::Path, time::Duration};

use ::node::{policy::PolicyError, trust};

use crate::cdi_file::CdiError;

/// What callers tell apart. The CNI plugin has a code for each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    Policy,
    Kernel,
    /// Hardware or a CDI file cannot be read or changed.
    Io,
    /// The file system refused, or a file or directory is not trusted.
    File,
    /// A file is damaged, or of a newer version, or links cannot be told apart.
    State,
    /// A record is empty or cut off: it is of an earlier boot.
    Incomplete,
    /// The attachment has a record already.
    Exists,
    /// Another call holds a lock for longer than this one waits.
    Locked,
    /// A netdev or RDMA device has not returned yet.
    Nowhere,
    /// The child of this name may live in a namespace that cannot be found.
    ChildNowhere(String),
    /// The pod's namespace is over and something of the attachment is not found.
    Kept,
    /// Settings of a VF cannot be restored.
    VfKept,
    /// What the IPAM answered, or why it cannot be asked, with its own code.
    Ipam(cni_wire::Code),
}

/// A failure, and those of other parts of the same attachment.
#[derive(Debug)]
pub struct Error {
    pub kind: Kind,
    pub what: String,
    /// None where the message says it all.
    pub remedy: Option<String>,
    pub others: Vec<Error>,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        self.others
            .iter()
            .try_for_each(|other| write!(f, "; {other}"))
    }
}

impl std::error::Error for Error {}

impl Error {
    pub(crate) fn new(kind: Kind, what: impl fmt::Display) -> Self {
        Error {
            kind,
            what: what.to_string(),
            remedy: None,
            others: Vec::new(),
        }
    }

    #[must_use]
    pub(crate) fn with(self, remedy: impl Into<String>) -> Self {
        Error {
            remedy: Some(remedy.into()),
            ..self
        }
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
        Error::new(Kind::Nowhere, what)
            .with("a namespace that is being torn down still has it; try again")
    }

    /// An RDMA device does not change its namespace.
    pub fn rdma_move(error: netlink::Error) -> Self {
        let has_mode = !error.is(libc::EOPNOTSUPP);
        let refused = Error::from(error);
        match has_mode {
            true => refused,
            false => refused.with(
                "its driver cannot be moved between namespaces, or the RDMA subsystem is not in \
                 exclusive mode any more (rdma system show)",
            ),
        }
    }

    /// Whether something of an attachment was not found, and nothing else is wrong.
    pub(crate) fn is_nowhere(&self) -> bool {
        matches!(self.kind, Kind::Nowhere | Kind::ChildNowhere(_))
    }

    /// The failures of an attachment's parts as one; none without any.
    pub(crate) fn all(failures: Vec<Error>) -> Option<Error> {
        let mut failures = failures.into_iter();
        let first = failures.next()?;
        Some(Error {
            others: failures.collect(),
            ..first
        })
    }

    /// The failure with its remedy, for people.
    pub fn with_remedy(&self) -> String {
        let own = match &self.remedy {
            Some(remedy) => format!("{} ({remedy})", self.what),
            None => self.what.clone(),
        };
        let others = self.others.iter().map(Error::with_remedy);
        std::iter::once(own)
            .chain(others)
            .collect::<Vec<_>>()
            .join("; ")
    }
}

impl From<PolicyError> for Error {
    fn from(error: PolicyError) -> Self {
        Error::new(Kind::Policy, &error).with(error.remedy())
    }
}

impl From<netlink::Error> for Error {
    fn from(error: netlink::Error) -> Self {
        Error::new(Kind::Kernel, error)
    }
}

impl From<hca::Error> for Error {
    fn from(error: hca::Error) -> Self {
        Error::new(Kind::Io, error)
    }
}

impl From<CdiError> for Error {
    fn from(error: CdiError) -> Self {
        Error::new(Kind::Io, error)
    }
}

impl From<cni_wire::Error> for Error {
    fn from(error: cni_wire::Error) -> Self {
        Error {
            remedy: Some(error.details).filter(|details| !details.is_empty()),
            ..Error::new(Kind::Ipam(error.code), error.msg)
        }
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
            Some(_) => return Error::new(Kind::File, error),
            None => {
                "let root own stateDir of the node's policy, every directory above it and each file \
                 in it, mode 0755 or stricter; find out what put another file there, and remove it"
            }
        };
        Error::new(Kind::File, error).with(remedy)
    }
}
