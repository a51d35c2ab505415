//! What can be wrong with the node's policy file.

use std::path::PathBuf;

use crate::{gojson, trust};

/// Why a policy file was refused. The message says what and where; the remedy
/// is apart, so that a CNI error can carry it in `details`.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// The file cannot be read or is not trusted.
    #[error("node policy: {0}")]
    File(#[from] trust::Error),
    /// Its content is not in order.
    #[error("node policy {}: {fault}", path.display())]
    Content { path: PathBuf, fault: gojson::Error },
}

impl PolicyError {
    /// The message with the remedy, where there is one line for both.
    #[must_use]
    pub fn with_remedy(&self) -> String {
        format!("{self} ({})", self.remedy())
    }

    /// What to do about it, one sentence for the person on call.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::File(trust::Error::Io { .. }) => {
                "make the file readable for root, or remove it to run with the defaults"
            }
            Self::File(_) => {
                "let root own the file, a regular one of at most 1 MiB, and each directory above \
                 it, mode 0644 and 0755 or stricter"
            }
            Self::Content { .. } => {
                "correct the file; pods can be torn down meanwhile, none can be attached"
            }
        }
    }
}
