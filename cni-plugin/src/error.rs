//! What a call fails with. The codes of the specification are given here, once: netlink, the journal
//! and the policy know no CNI.

use std::{fmt, ops::Deref};

use attachment::error::Kind;
use cni_wire::Code;

use crate::authorize::Denied;

/// The specification's error object, as the calls of this program make it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error(cni_wire::Error);

impl Error {
    pub fn new(code: Code, msg: impl Into<String>) -> Self {
        Error(cni_wire::Error::new(code, msg))
    }

    /// Adds what to do instead, or what else is known; earlier details stay.
    #[must_use]
    pub fn with_details(self, details: impl AsRef<str>) -> Self {
        Error(self.0.with_details(details))
    }

    /// The same for STATUS, which has a code of its own for every reason.
    #[must_use]
    pub fn unavailable(self) -> Self {
        Error(cni_wire::Error {
            code: Code::Unavailable,
            ..self.0
        })
    }

    /// Puts the object or attempt before the message.
    #[must_use]
    pub fn context(self, what: impl fmt::Display) -> Self {
        Error(self.0.context(what))
    }
}

impl Deref for Error {
    type Target = cni_wire::Error;

    fn deref(&self) -> &cni_wire::Error {
        &self.0
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Error {}

impl From<cni_wire::Error> for Error {
    fn from(error: cni_wire::Error) -> Self {
        Error(error)
    }
}

impl From<Error> for cni_wire::Error {
    fn from(error: Error) -> Self {
        error.0
    }
}

impl From<netlink::Error> for Error {
    fn from(error: netlink::Error) -> Self {
        Error::new(Code::Kernel, error.to_string())
    }
}

impl From<attachment::Error> for Error {
    fn from(error: attachment::Error) -> Self {
        let code = match &error.kind {
            Kind::Policy => Code::Policy,
            Kind::Kernel => Code::Kernel,
            Kind::Exists => Code::Exists,
            Kind::Locked | Kind::Nowhere | Kind::ChildNowhere(_) | Kind::VfKept | Kind::Kept => {
                Code::TryAgain
            }
            Kind::File | Kind::State | Kind::Incomplete => Code::State,
            Kind::Io => Code::Io,
            Kind::Ipam(code) => *code,
        };
        let others = error.others.iter().map(attachment::Error::with_remedy);
        error
            .remedy
            .iter()
            .cloned()
            .chain(others)
            .fold(Error::new(code, error.what.clone()), |coded, details| {
                coded.with_details(details)
            })
    }
}

impl From<Denied> for Error {
    fn from(denied: Denied) -> Self {
        Error::new(Code::Policy, denied.to_string()).with_details(&denied.remedy)
    }
}
