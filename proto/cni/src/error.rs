//! The error object of the specification (section "Error") and its codes.

use std::fmt;

use serde_json::{Map, Value, json};

use crate::{Version, text};

/// What kind of failure it is, for the runtime's own decisions.
///
/// 1 to 99 belong to the specification, 100 and above to these plugins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// 1: the version asked for is not one of ours.
    IncompatibleVersion,
    /// 2: a field of the configuration is not supported; the message names key and value.
    UnsupportedField,
    /// 3: the container is unknown; the runtime need not clean up.
    UnknownContainer,
    /// 4: an environment variable is missing or wrong; the message names it.
    InvalidEnvironment,
    /// 5: reading or writing failed.
    Io,
    /// 6: what was read cannot be decoded.
    Decode,
    /// 7: the network configuration is wrong.
    InvalidConfig,
    /// 8: the network namespace cannot be used (the Go library's extension).
    InvalidNetns,
    /// 11: a passing condition; the runtime should try again.
    TryAgain,
    /// 50: the plugin cannot serve ADD.
    Unavailable,
    /// 51: the plugin cannot serve ADD and attached containers may be cut off.
    UnavailableLimited,
    /// 100: the kernel refused a request.
    Kernel,
    /// 101: the node's policy refuses what was asked for.
    Policy,
    /// 102: the address pool has no free address.
    Exhausted,
    /// 103: an attachment of this container and interface exists already.
    Exists,
    /// 104: what CHECK found differs from what ADD made.
    Differs,
    /// 105: the state directory or the lease store cannot be used.
    State,
    /// 999: an error that should not happen; the Go library's code for everything else.
    Internal,
    /// A code that another plugin answered and that has no name here.
    Other(u32),
}

const CODES: &[(u32, Code)] = &[
    (1, Code::IncompatibleVersion),
    (2, Code::UnsupportedField),
    (3, Code::UnknownContainer),
    (4, Code::InvalidEnvironment),
    (5, Code::Io),
    (6, Code::Decode),
    (7, Code::InvalidConfig),
    (8, Code::InvalidNetns),
    (11, Code::TryAgain),
    (50, Code::Unavailable),
    (51, Code::UnavailableLimited),
    (100, Code::Kernel),
    (101, Code::Policy),
    (102, Code::Exhausted),
    (103, Code::Exists),
    (104, Code::Differs),
    (105, Code::State),
    (999, Code::Internal),
];

impl Code {
    /// The number on the wire.
    pub fn number(self) -> u32 {
        if let Code::Other(number) = self {
            return number;
        }
        CODES
            .iter()
            .find(|(_, code)| *code == self)
            .map_or(999, |(number, _)| *number)
    }
}

impl From<u32> for Code {
    fn from(number: u32) -> Self {
        CODES
            .iter()
            .find(|(known, _)| *known == number)
            .map_or(Code::Other(number), |(_, code)| *code)
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
    pub fn new(code: Code, msg: impl Into<String>) -> Self {
        Error {
            code,
            msg: msg.into(),
            details: String::new(),
        }
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
        let mut object = Map::new();
        object.insert("cniVersion".into(), json!(version.as_str()));
        object.insert("code".into(), json!(self.code.number()));
        object.insert("msg".into(), json!(fit(&self.msg, MAX_MESSAGE_BYTES)));
        if !self.details.is_empty() {
            object.insert("details".into(), json!(fit(&self.details, MAX_TEXT_BYTES)));
        }
        Value::Object(object)
    }
}

/// The most bytes of a message, and of its details, that a runtime is given: it writes them into
/// its log, the events of the pod, and the pod's status.
pub const MAX_TEXT_BYTES: usize = 8 << 10;

/// The same of a message alone, which repeats what a network or an environment says.
const MAX_MESSAGE_BYTES: usize = 2 << 10;

fn fit(text: &str, limit: usize) -> String {
    text::bounded(&text::printable(text), limit)
}

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
    fn numbers_and_names_agree_both_ways() {
        for number in 0..1100 {
            assert_eq!(Code::from(number).number(), number);
        }
        assert_eq!(Code::from(7), Code::InvalidConfig);
        assert_eq!(Code::from(42), Code::Other(42));
    }

    #[test]
    fn a_runtime_is_given_neither_control_characters_nor_megabytes() {
        let error = Error::new(Code::Io, "a\u{1b}[2J\n").with_details("x".repeat(1 << 20));
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
