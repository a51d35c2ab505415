//! What a call fails with. The codes of the specification are given here, once: netlink, the journal
//! and the policy know no CNI.

use std::{fmt, ops::Deref};

use attachment::{journal, netdev::restore};
use cni_wire::Code;

use crate::authorize::Denied;

/// The specification's error object, as the calls of this program make it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error(cni_wire::Error);

impl Error {
    /// An error without details.
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

impl From<journal::Error> for Error {
    fn from(error: journal::Error) -> Self {
        attachment::Error::from(error).into()
    }
}

impl From<attachment::Error> for Error {
    fn from(error: attachment::Error) -> Self {
        let coded = Error::new(code(&error), message(&error));
        let coded = match error.remedy() {
            Some(remedy) => coded.with_details(remedy),
            None => coded,
        };
        match &error {
            attachment::Error::Several { others, .. } => {
                others.iter().fold(coded, |coded, other| {
                    coded.with_details(other.with_remedy())
                })
            }
            _ => coded,
        }
    }
}

fn code(error: &attachment::Error) -> Code {
    match error {
        attachment::Error::Policy(_) => Code::Policy,
        attachment::Error::Kernel(_)
        | attachment::Error::RdmaMove(_)
        | attachment::Error::Netdev(restore::Error::Kernel(_)) => Code::Kernel,
        attachment::Error::Journal(journal::Error::Exists { .. }) => Code::Exists,
        attachment::Error::Journal(journal::Error::Locked { .. })
        | attachment::Error::Netdev(restore::Error::Nowhere { .. })
        | attachment::Error::RdmaNowhere { .. }
        | attachment::Error::ChildNowhere { .. }
        | attachment::Error::PfAway { .. }
        | attachment::Error::Kept { .. } => Code::TryAgain,
        attachment::Error::Journal(_)
        | attachment::Error::State { .. }
        | attachment::Error::Netdev(restore::Error::Ambiguous { .. }) => Code::State,
        attachment::Error::Hardware(_) | attachment::Error::Cdi(_) => Code::Io,
        attachment::Error::Ipam(error) => error.code,
        attachment::Error::Several { first, .. } => code(first),
    }
}

/// What happened, without the remedy and without what else failed: these are details.
fn message(error: &attachment::Error) -> String {
    match error {
        attachment::Error::Ipam(error) => error.msg.clone(),
        attachment::Error::Several { first, .. } => message(first),
        _ => error.to_string(),
    }
}

impl From<Denied> for Error {
    fn from(denied: Denied) -> Self {
        Error::new(Code::Policy, denied.to_string()).with_details(&denied.remedy)
    }
}
