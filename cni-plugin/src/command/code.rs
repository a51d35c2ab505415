//! The codes of the CNI specification, given once: what failed below knows no CNI.

use cni_wire::{Code, Error};

use crate::kernel;

impl From<kernel::Error> for Error {
    fn from(error: kernel::Error) -> Self {
        Error::new(Code::Kernel, error.to_string())
    }
}
