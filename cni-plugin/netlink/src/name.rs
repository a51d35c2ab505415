//! Names and aliases of links: bytes, as the kernel has them.
//!
//! The kernel takes any byte in a link's name but `/`, `:` and white space (`dev_valid_name()`,
//! net/core/dev.c), and any byte at all in an alias. A pod may set both, so neither is text.

use std::{ffi::OsStr, fmt, os::unix::ffi::OsStrExt, path::Path};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The longest primary name, in bytes: `IFNAMSIZ` less the NUL. Longer ones are alternative names,
/// up to 127 bytes (`ALTIFNAMSIZ`).
pub const LONGEST_NAME_BYTES: usize = 15;

/// A name, an alternative name or an alias of a link, without its NUL.
///
/// It is displayed, and kept in the journal, as text without control characters: what is not
/// printable UTF-8, and the backslash, stands there as `\xNN`. That text reads back as the same
/// bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Vec<u8>);

impl Name {
    /// Of an attribute's value, with or without its NUL.
    pub fn of_attribute(value: &[u8]) -> Self {
        let name = value.split(|byte| *byte == 0).next();
        Name(name.unwrap_or_default().to_vec())
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// As an attribute's value, with its NUL.
    pub fn to_attribute(&self) -> Vec<u8> {
        let mut value = self.0.clone();
        value.push(0);
        value
    }

    /// The same bytes, out of what [`fmt::Display`] made of them; none for text that it makes of
    /// no name.
    pub fn parse_display(text: &str) -> Option<Self> {
        let mut bytes = Vec::with_capacity(text.len());
        let mut rest = text;
        while let Some((before, escaped)) = rest.split_once('\\') {
            bytes.extend_from_slice(before.as_bytes());
            let digits = escaped.strip_prefix('x')?.get(..2)?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = escaped.get(3..)?;
        }
        bytes.extend_from_slice(rest.as_bytes());
        Some(Name(bytes))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for chunk in self.0.utf8_chunks() {
            for character in chunk.valid().chars() {
                match character.is_control() || character == '\\' {
                    true => escape(f, character.encode_utf8(&mut [0; 4]).as_bytes())?,
                    false => write!(f, "{character}")?,
                }
            }
            escape(f, chunk.invalid())?;
        }
        Ok(())
    }
}

fn escape(f: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    let mut bytes = bytes.iter();
    bytes.try_for_each(|byte| write!(f, "\\x{byte:02x}"))
}

impl<T: AsRef<[u8]> + ?Sized> From<&T> for Name {
    fn from(name: &T) -> Self {
        Name(name.as_ref().to_vec())
    }
}

impl<T: AsRef<[u8]> + ?Sized> PartialEq<T> for Name {
    fn eq(&self, name: &T) -> bool {
        self.0 == name.as_ref()
    }
}

/// For the directories that sysfs and procfs have for each link.
impl AsRef<Path> for Name {
    fn as_ref(&self) -> &Path {
        Path::new(OsStr::from_bytes(&self.0))
    }
}

impl Serialize for Name {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Name::parse_display(&text).ok_or_else(|| {
            de::Error::custom(format!("{text:?} is not a link name: \\xNN expected"))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_name_ends_at_its_nul() {
        assert_eq!(Name::of_attribute(b"eth0\0"), "eth0");
        assert_eq!(Name::of_attribute(b"eth0"), "eth0");
        assert_eq!(Name::of_attribute(b"a\0b\0"), "a");
        assert_eq!(Name::from("eth0").to_attribute(), b"eth0\0");
    }

    #[test]
    fn what_is_not_printable_utf8_is_escaped() {
        assert_eq!(
            Name::from(&b"a\xff\x1b\\"[..]).to_string(),
            "a\\xff\\x1b\\x5c"
        );
    }

    proptest! {
        #[test]
        fn every_name_reads_back_from_the_journal(bytes in proptest::collection::vec(1u8.., 0..40)) {
            let name = Name(bytes);
            let text = name.to_string();
            prop_assert!(!text.chars().any(char::is_control));
            let json = serde_json::to_string(&name).unwrap();
            prop_assert_eq!(serde_json::from_str::<Name>(&json).unwrap(), name);
        }
    }
}
