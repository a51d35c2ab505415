//! The codes of the CNI specification, given once: what failed below knows no CNI.

use cni_wire::{Code, Error};

use crate::{authorize::Denied, journal, kernel};

impl From<kernel::Error> for Error {
    fn from(error: kernel::Error) -> Self {
        Error::new(Code::Kernel, error.to_string())
    }
}

impl From<journal::Error> for Error {
    fn from(error: journal::Error) -> Self {
        let code = match error {
            journal::Error::Exists { .. } => Code::Exists,
            journal::Error::Locked { .. } => Code::TryAgain,
            _ => Code::State,
        };
        let told = Error::new(code, error.to_string());
        match error.remedy() {
            Some(remedy) => told.with_details(remedy),
            None => told,
        }
    }
}

impl From<Denied> for Error {
    fn from(denied: Denied) -> Self {
        Error::new(Code::Policy, denied.to_string()).with_details(&denied.remedy)
    }
}
