//! One JSON object of a configuration and where it is in it. Its values are read by the decoder of
//! [`json`](crate::json): keys without regard to case, the last of several, `null` is absent.

use serde::de::DeserializeOwned;

use crate::{
    Code, Error,
    json::{self, Reading, Value, same_key},
};

/// A JSON object and where it is in the configuration.
#[derive(Clone, Debug)]
pub struct Section<'a> {
    path: String,
    object: &'a Value,
}

impl<'a> Section<'a> {
    /// The outermost object.
    pub fn root(object: &'a Value) -> Self {
        let path = String::new();
        Section { path, object }
    }

    /// An object that is not there: every key is absent.
    pub fn absent(path: &str) -> Self {
        let (path, object) = (path.to_owned(), &Value::Null);
        Section { path, object }
    }

    /// A value as an object at a path.
    ///
    /// # Errors
    /// Code 7 naming the path when the value is not an object.
    pub fn of(object: &'a Value, path: String) -> Result<Section<'a>, Error> {
        match object {
            Value::Object(_) => Ok(Section { path, object }),
            other => Err(expected("an object", &path, other)),
        }
    }

    /// Where this object is, as in `ipam.ranges[0]`; empty for the outermost.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The name of a key of this object in messages.
    pub fn path_of(&self, key: &str) -> String {
        match self.path.as_str() {
            "" => key.to_owned(),
            path => format!("{path}.{key}"),
        }
    }

    /// Whether the object has no key at all, or is not there.
    pub fn is_empty(&self) -> bool {
        self.object.fields().is_empty()
    }

    /// The keys as written.
    pub fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.object.fields().iter().map(|(key, _)| key.as_str())
    }

    /// The keys as written and their values, without those that are null.
    pub fn entries(&self) -> impl Iterator<Item = (&'a str, &'a Value)> {
        let entries = self.object.fields().iter();
        let entries = entries.map(|(key, value)| (key.as_str(), value));
        entries.filter(|(_, value)| **value != Value::Null)
    }

    /// The value of a key; null counts as absent.
    pub fn value(&self, key: &str) -> Option<&'a Value> {
        let mut last = self.object.fields().iter().rev();
        let found = last.find(|(written, value)| *value != Value::Null && same_key(written, key));
        found.map(|(_, value)| value)
    }

    /// The value of a key as a type; an object as [`Section::read`].
    ///
    /// # Errors
    /// Code 7 naming the key when the value has another type.
    pub fn get<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, Error> {
        let read = |value| json::read(value, &self.path_of(key), Reading::Network);
        Ok(self.value(key).map(read).transpose()?)
    }

    /// A key that must be there.
    ///
    /// # Errors
    /// Code 7 naming the key when it is absent or has another type.
    pub fn require<T: DeserializeOwned>(&self, key: &str) -> Result<T, Error> {
        let msg = || format!("{} is missing", self.path_of(key));
        let missing = || Error::new(Code::InvalidConfig, msg());
        self.get(key)?.ok_or_else(missing)
    }

    /// A text; an empty one counts as absent, as it does for the Go plugins.
    ///
    /// # Errors
    /// Code 7 naming the key when the value is not a text.
    pub fn text(&self, key: &str) -> Result<Option<&'a str>, Error> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.as_str()).filter(|text| !text.is_empty())),
            Some(other) => Err(expected("a string", &self.path_of(key), other)),
        }
    }

    /// The object under a key; an absent one has no keys.
    ///
    /// # Errors
    /// Code 7 naming the key when the value is not an object.
    pub fn section(&self, key: &str) -> Result<Section<'a>, Error> {
        let path = self.path_of(key);
        match self.value(key) {
            None => Ok(Section::absent(&path)),
            Some(value) => Section::of(value, path),
        }
    }

    /// The objects of a list under a key; an absent list is empty. A null in it is an error: what is
    /// left of the list could mean something else.
    ///
    /// # Errors
    /// Code 7 naming the key or the element that has another type.
    pub fn sections(&self, key: &str) -> Result<Vec<Section<'a>>, Error> {
        let path = self.path_of(key);
        let list = match self.value(key) {
            None => return Ok(Vec::new()),
            Some(Value::Array(list)) => list.iter().enumerate(),
            Some(other) => return Err(expected("a list", &path, other)),
        };
        list.map(|(index, element)| Section::of(element, format!("{path}[{index}]")))
            .collect()
    }

    /// The object as a type; a key that the type does not have, or a repeated one, is refused.
    ///
    /// # Errors
    /// Code 7 naming the key.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, Error> {
        Ok(json::read(self.object, &self.path, Reading::Network)?)
    }

    /// The object as a type, as Go reads it: keys that the type does not have are ignored.
    ///
    /// # Errors
    /// Code 7 naming the key that is missing or has another type.
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T, Error> {
        Ok(json::read(self.object, &self.path, Reading::Go(None))?)
    }

    /// Code 7 for a key of this object, with the reason.
    pub fn wrong(&self, key: &str, reason: impl std::fmt::Display) -> Error {
        let msg = format!("{}: {reason}", self.path_of(key));
        Error::new(Code::InvalidConfig, msg)
    }
}

fn expected(what: &str, path: &str, value: &Value) -> Error {
    let message = format!("{path}: expected {what}, found {}", value.describe());
    Error::new(Code::InvalidConfig, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_match_as_in_go() {
        let value = json::parse(
            r#"{"CNIVersion": "1.0.0", "prevresult": {"IPs": []}, "mTu": 9000, "\u212aey": 1}"#,
        )
        .unwrap();
        let root = Section::root(&value);
        assert_eq!(root.text("cniVersion").unwrap(), Some("1.0.0"));
        assert_eq!(root.get::<u32>("mtu").unwrap(), Some(9000));
        assert_eq!(root.get::<u32>("key").unwrap(), Some(1));
        assert!(root.section("prevResult").unwrap().value("ips").is_some());
        assert!(root.value("name").is_none());
    }

    #[test]
    fn the_last_key_wins_and_null_is_absent() {
        let value = json::parse(
            r#"{"Mode": "vepa", "mode": "bridge", "MODE": null, "mac": null, "ipam": null}"#,
        )
        .unwrap();
        let root = Section::root(&value);
        assert_eq!(root.text("mode").unwrap(), Some("bridge"));
        assert_eq!(root.text("mac").unwrap(), None);
        assert!(root.section("ipam").unwrap().is_empty());
    }

    #[test]
    fn a_wrong_type_is_named_with_its_place() {
        let value = json::parse(
            r#"{"ipam": {"ranges": [[], {"a": 1}, 3]}, "mtu": "x", "name": 5, "master": "",
                "ips": ["a", 5]}"#,
        )
        .unwrap();
        let root = Section::root(&value);
        let ipam = root.section("ipam").unwrap();
        for (error, message) in [
            (
                root.get::<u32>("mtu").unwrap_err(),
                "mtu: expected a number from 0 to 4294967295, found the string \"x\"",
            ),
            (
                root.text("name").unwrap_err(),
                "name: expected a string, found the number 5",
            ),
            (
                root.require::<String>("name").unwrap_err(),
                "name: expected a string, found the number 5",
            ),
            (
                root.get::<Vec<String>>("ips").unwrap_err(),
                "ips[1]: expected a string, found the number 5",
            ),
            (
                ipam.sections("ranges").unwrap_err(),
                "ipam.ranges[0]: expected an object, found a list",
            ),
            (
                root.section("mtu").unwrap_err(),
                "mtu: expected an object, found the string \"x\"",
            ),
            (
                ipam.require::<String>("type").unwrap_err(),
                "ipam.type is missing",
            ),
        ] {
            assert_eq!(error.msg, message);
        }
        assert_eq!(root.text("master").unwrap(), None);
    }
}
