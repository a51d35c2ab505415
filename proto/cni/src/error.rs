//! The error object of the specification (section "Error") and its codes.

use std::fmt;

use serde_json::{Value, json};

use crate::{Version, text::fit};

/// What kind of failure it is, for the runtime's own decisions.
///
/// 1 to 99 belong to the specification, 100 and above to these plugins. Another plugin may answer
/// a number that has no name here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(
    /// The number on the wire.
    pub u32,
);

#[expect(
    non_upper_case_globals,
    reason = "they read as the variants of an enum that others extend"
)]
impl Code {
    /// The version asked for is not one of ours.
    pub const IncompatibleVersion: Code = Code(1);
    /// A field of the configuration is not supported; the message names key and value.
    pub const UnsupportedField: Code = Code(2);
    /// The container is unknown; the runtime need not clean up.
    pub const UnknownContainer: Code = Code(3);
    /// An environment variable is missing or wrong; the message names it.
    pub const InvalidEnvironment: Code = Code(4);
    /// Reading or writing failed.
    pub const Io: Code = Code(5);
    /// What was read cannot be decoded.
    pub const Decode: Code = Code(6);
    /// The network configuration is wrong.
    pub const InvalidConfig: Code = Code(7);
    /// The network namespace cannot be used (the Go library's extension).
    pub const InvalidNetns: Code = Code(8);
    /// A passing condition; the runtime should try again.
    pub const TryAgain: Code = Code(11);
    /// The plugin cannot serve ADD.
    pub const Unavailable: Code = Code(50);
    /// The plugin cannot serve ADD and attached containers may be cut off.
    pub const UnavailableLimited: Code = Code(51);
    /// The kernel refused a request.
    pub const Kernel: Code = Code(100);
    /// The node's policy refuses what was asked for.
    pub const Policy: Code = Code(101);
    /// The address pool has no free address.
    pub const Exhausted: Code = Code(102);
    /// An attachment of this container and interface exists already.
    pub const Exists: Code = Code(103);
    /// What CHECK found differs from what ADD made.
    pub const Differs: Code = Code(104);
    /// The state directory or the lease store cannot be used.
    pub const State: Code = Code(105);
    /// An error that should not happen; the Go library's code for everything else.
    pub const Internal: Code = Code(999);

    /// Whether the number has a name here.
    pub fn is_known(self) -> bool {
        matches!(self.0, 1..=8 | 11 | 50 | 51 | 100..=105 | 999)
    }
}

/// A failed call: what was attempted on which object and why it failed (`msg`), and what
/// to do about it or what else is known (`details`, may be empty).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// What kind of failure it is.
    pub code: Code,
    /// What was attempted, on which object, and what the kernel or the file said.
    pub msg: String,
    /// What to do instead, or what clean-up said; empty when there is nothing to add.
    pub details: String,
}

impl Error {
    /// An error without details.
    pub fn new(code: Code, msg: impl fmt::Display) -> Self {
        Error::advise(code, msg, "")
    }

    /// An error with what to do about it.
    pub fn advise(code: Code, msg: impl fmt::Display, remedy: impl fmt::Display) -> Self {
        let (msg, details) = (msg.to_string(), remedy.to_string());
        Error { code, msg, details }
    }

    /// Adds what to do instead, or what else is known; earlier details stay.
    #[must_use]
    pub fn with_details(mut self, details: impl AsRef<str>) -> Self {
        if !self.details.is_empty() {
            self.details.push_str("; ");
        }
        self.details.push_str(details.as_ref());
        self
    }

    /// Puts the object or attempt before the message.
    #[must_use]
    pub fn context(mut self, what: impl fmt::Display) -> Self {
        self.msg = format!("{what}: {}", self.msg);
        self
    }

    /// The document for stdout: both texts printable and bounded.
    ///
    /// `version` is the configuration's, or the newest where none could be read.
    pub fn to_json(&self, version: Version) -> Value {
        let msg = fit(&self.msg, MAX_MESSAGE_BYTES);
        let mut document = json!({"cniVersion": version, "code": self.code.0, "msg": msg});
        if let (Value::Object(fields), false) = (&mut document, self.details.is_empty()) {
            let details = fit(&self.details, MAX_TEXT_BYTES);
            fields.insert("details".into(), details.into());
        }
        document
    }
}

/// The most bytes of a message, and of its details, that a runtime is given: it writes them into
/// its log, the events of the pod, and the pod's status.
pub const MAX_TEXT_BYTES: usize = 8 << 10;

/// The same of a message alone, which repeats what a network or an environment says.
const MAX_MESSAGE_BYTES: usize = 2 << 10;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.msg)?;
        if !self.details.is_empty() {
            write!(f, " ({})", self.details)?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_without_a_name_is_not_known() {
        for code in [Code::IncompatibleVersion, Code::State, Code::Internal] {
            assert!(code.is_known(), "{code:?}");
        }
        for number in [0, 9, 12, 42, 99, 106, 1000] {
            assert!(!Code(number).is_known(), "{number}");
        }
    }

    #[test]
    fn a_runtime_is_given_neither_control_characters_nor_megabytes() {
        let error = Error::advise(Code::Io, "a\u{1b}[2J\n", "x".repeat(1 << 20));
        let document = error.to_json(Version::V1_0_0);
        assert_eq!(document["msg"], "a\\u{1b}[2J\\n");
        let details = document["details"].as_str().unwrap();
        assert!(details.len() < MAX_TEXT_BYTES + 40, "{}", details.len());
        assert!(details.ends_with("bytes cut)"), "{details}");
    }

    #[test]
    fn details_are_left_out_when_there_are_none() {
        let error = Error::new(Code::TryAgain, "device busy");
        assert_eq!(
            error.to_json(Version::V1_0_0),
            json!({"cniVersion": "1.0.0", "code": 11, "msg": "device busy"})
        );
        let error = error
            .with_details("wait")
            .with_details("or not")
            .context("move eth1");
        assert_eq!(error.msg, "move eth1: device busy");
        assert_eq!(error.to_json(Version::V1_1_0)["details"], "wait; or not");
    }
}
