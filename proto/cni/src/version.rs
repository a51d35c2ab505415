//! The versions of the CNI specification.

use serde_json::{Value, json};

use crate::{Code, Error, text::list};

words! {
    /// A supported version; ordered by age. 0.3.2 does not exist.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub enum Version {
        /// Several addresses and interfaces.
        V0_3_0 = "0.3.0",
        /// As 0.3.0.
        V0_3_1 = "0.3.1",
        /// CHECK.
        V0_4_0 = "0.4.0",
        /// Addresses without `version`.
        V1_0_0 = "1.0.0",
        /// STATUS, GC, MTU and PCI address of interfaces.
        V1_1_0 = "1.1.0",
    }
}

impl Version {
    /// The newest.
    pub const NEWEST: Version = {
        let [.., newest] = Version::ALL;
        newest
    };

    /// Reads `cniVersion`; an empty text means 0.1.0, as the specification says of a missing key.
    ///
    /// # Errors
    /// Code 6 for a text that is not a version, code 1 for a version that is not supported.
    pub fn parse(text: &str) -> Result<Version, Error> {
        let text = if text.is_empty() { "0.1.0" } else { text };
        Version::from_word(text).ok_or_else(|| {
            let code = match text.split('.').all(|field| field.parse::<u32>().is_ok()) {
                true => Code::IncompatibleVersion,
                false => Code::Decode,
            };
            Error::advise(
                code,
                format_args!("cniVersion {text} is not supported"),
                format_args!(
                    "supported versions: {}; without the key it is 0.1.0",
                    list(Version::ALL)
                ),
            )
        })
    }

    /// The answer to VERSION.
    pub fn document() -> Value {
        json!({
            "cniVersion": Version::NEWEST,
            "supportedVersions": Version::ALL,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn membership_is_exact() {
        for version in Version::ALL {
            assert_eq!(Version::parse(version.as_str()), Ok(version));
        }
        for (text, code) in [
            ("", Code::IncompatibleVersion),
            ("0.1.0", Code::IncompatibleVersion),
            ("0.2.0", Code::IncompatibleVersion),
            ("9.9.9", Code::IncompatibleVersion),
            ("0.3.2", Code::IncompatibleVersion),
            ("1.1", Code::IncompatibleVersion),
            ("x.y", Code::Decode),
            ("1.0.0.0", Code::IncompatibleVersion),
            ("1..0", Code::Decode),
            (" 1.0.0", Code::Decode),
        ] {
            let error = Version::parse(text).unwrap_err();
            assert_eq!(error.code, code, "{text}");
            assert!(error.details.contains("0.3.0, 0.3.1"), "{text}");
        }
        assert!(Version::parse("9.9.9").unwrap_err().msg.contains("9.9.9"));
    }
}
