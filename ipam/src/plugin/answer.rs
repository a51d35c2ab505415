//! From the store's faults to the specification's error object.

use crate::store::StoreError;
use cni_wire::{Code, Error};
use nix::errno::Errno;
use std::fmt::Display;

/// The CNI error for a fault of the store, with what was attempted and what to do.
pub(crate) fn to_error(error: &StoreError, attempt: impl Display) -> Error {
    Error::new(code(error), format!("{attempt}: {error}")).with_details(error.remedy())
}

fn code(error: &StoreError) -> Code {
    match error {
        StoreError::Dir(error) => match error.source {
            Errno::ESTALE
            | Errno::ETIMEDOUT
            | Errno::EAGAIN
            | Errno::EINTR
            | Errno::ENFILE
            | Errno::EMFILE => Code::TryAgain,
            _ => Code::State,
        },
        StoreError::Overtaken { .. } | StoreError::NeedsBlock(_) => Code::TryAgain,
        StoreError::Unknown { .. } => Code::Policy,
        StoreError::Held { .. } | StoreError::Exhausted { .. } => Code::Exhausted,
        StoreError::Oversize { .. } => Code::InvalidConfig,
        StoreError::Grants(_)
        | StoreError::Format { .. }
        | StoreError::Damaged { .. }
        | StoreError::Writable { .. }
        | StoreError::Identity { .. }
        | StoreError::NotShared { .. }
        | StoreError::Forgotten { .. }
        | StoreError::Remember { .. }
        | StoreError::Unfit { .. }
        | StoreError::Squashed { .. }
        | StoreError::Foreign { .. }
        | StoreError::Node(_) => Code::State,
    }
}
