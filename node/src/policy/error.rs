//! What can be wrong with the node's policy file.

use std::io;
use std::path::PathBuf;

/// Why a policy file was refused. The message says what and where; the remedy
/// is apart, so that a CNI error can carry it in `details`.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// The file or its directory cannot be read.
    #[error("read node policy {}: {source}", path.display())]
    Read {
        /// The object of the failed call.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Somebody other than root could change the file.
    #[error("node policy {} is not trusted: {why}", path.display())]
    Untrusted {
        /// The file, or the directory that holds it.
        path: PathBuf,
        /// Which rule it breaks.
        why: &'static str,
    },
    /// The file is not a JSON object.
    #[error("node policy {}: {why}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Line, column and cause.
        why: String,
    },
    /// A key is not known.
    #[error("node policy {}: unknown key {key:?}{}", path.display(), meant(*nearest))]
    UnknownKey {
        /// The file.
        path: PathBuf,
        /// Full path of the key, for example `ipam.cooldwon`.
        key: String,
        /// The known key that was probably meant.
        nearest: Option<&'static str>,
    },
    /// A value breaks a rule.
    #[error("node policy {}: {key}: {rule}, not {value}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// Full path of the key.
        key: String,
        /// The value as it stands in the file.
        value: String,
        /// What the value must be.
        rule: &'static str,
    },
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
            Self::Read { .. } => {
                "make the file readable for root, or remove it to run with the defaults"
            }
            Self::Untrusted { .. } => {
                "let root own the file and its directory, mode 0644 and 0755 or stricter"
            }
            Self::Syntax { .. } | Self::UnknownKey { .. } | Self::Value { .. } => {
                "correct the file; pods can be torn down meanwhile, none can be attached"
            }
        }
    }
}

pub(super) fn meant(nearest: Option<&'static str>) -> String {
    nearest
        .map(|key| format!("; did you mean {key:?}?"))
        .unwrap_or_default()
}
