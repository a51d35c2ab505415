//! One JSON object of a configuration, read as Go's decoder reads it.
//!
//! The runtimes, Multus and all peers of these plugins are written in Go. Its decoder
//! matches keys without regard to case, takes the last of several, and leaves a field
//! alone where the value is null; configurations in the field rely on that (libcni itself
//! writes `CNIVersion` into a `prevResult`). A strict reader would silently miss those keys.

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use crate::{Code, Error, json};

/// A JSON object and where in the configuration it stands.
#[derive(Clone, Debug)]
pub struct Section<'a> {
    path: String,
    map: Option<&'a Map<String, Value>>,
    known: Option<&'static [&'static str]>,
}

impl<'a> Section<'a> {
    /// The outermost object.
    pub fn root(map: &'a Map<String, Value>) -> Self {
        Section {
            path: String::new(),
            map: Some(map),
            known: None,
        }
    }

    /// With the keys that are read from it: reading another one panics where assertions are
    /// compiled, so that a list of known keys has each that is read.
    #[must_use]
    pub fn with_known(self, keys: &'static [&'static str]) -> Self {
        Section {
            known: Some(keys),
            ..self
        }
    }

    /// An object that is not there: every key is absent.
    pub fn absent(path: &str) -> Self {
        Section {
            path: path.to_owned(),
            map: None,
            known: None,
        }
    }

    /// Where this object stands, as in `ipam.ranges[0]`; empty for the outermost.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The name of a key of this object in messages.
    pub fn path_of(&self, key: &str) -> String {
        if self.path.is_empty() {
            key.to_owned()
        } else {
            format!("{}.{key}", self.path)
        }
    }

    /// Whether the object has no key at all, or is not there.
    pub fn is_empty(&self) -> bool {
        self.map.is_none_or(Map::is_empty)
    }

    /// The keys as written.
    pub fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.map.into_iter().flat_map(Map::keys).map(String::as_str)
    }

    /// The keys as written and their values, without those that are null.
    pub fn entries(&self) -> impl Iterator<Item = (&'a str, &'a Value)> {
        let entries = self.map.into_iter().flatten();
        let entries = entries.map(|(key, value)| (key.as_str(), value));
        entries.filter(|(_, value)| !value.is_null())
    }

    /// The value of a key; null counts as absent.
    pub fn value(&self, key: &str) -> Option<&'a Value> {
        debug_assert!(
            self.known.is_none_or(|known| known.contains(&key)),
            "{key} is read and not among the known keys"
        );
        self.map?
            .iter()
            .rev()
            .find(|(written, value)| !value.is_null() && same_key(written, key))
            .map(|(_, value)| value)
    }

    /// The value of a key as a type.
    ///
    /// # Errors
    /// Code 7 naming the key when the value has another type.
    pub fn get<T: Deserialize<'a>>(&self, key: &str) -> Result<Option<T>, Error> {
        self.value(key)
            .map(T::deserialize)
            .transpose()
            // serde's word for a text that is not copied means nothing to who wrote the key.
            .map_err(|e| self.wrong(key, e.to_string().replace("a borrowed string", "a text")))
    }

    /// A key that must be there.
    ///
    /// # Errors
    /// Code 7 naming the key when it is absent or has another type.
    pub fn require<T: Deserialize<'a>>(&self, key: &str) -> Result<T, Error> {
        self.get(key)?.ok_or_else(|| {
            Error::new(
                Code::InvalidConfig,
                format!("{} is missing", self.path_of(key)),
            )
        })
    }

    /// A text; an empty one counts as absent, as it does for the Go plugins.
    ///
    /// # Errors
    /// Code 7 naming the key when the value is not a text.
    pub fn text(&self, key: &str) -> Result<Option<&'a str>, Error> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        match value.as_str() {
            Some(text) => Ok(Some(text).filter(|text| !text.is_empty())),
            None => Err(wrong_kind(&self.path_of(key), "a text", value)),
        }
    }

    /// The texts of a list under a key; an absent list is empty.
    ///
    /// # Errors
    /// Code 7 naming the key or the element that has another type.
    pub fn texts(&self, key: &str) -> Result<Vec<&'a str>, Error> {
        let path = self.path_of(key);
        let Some(value) = self.value(key) else {
            return Ok(Vec::new());
        };
        let list = value
            .as_array()
            .ok_or_else(|| wrong_kind(&path, "a list of texts", value))?;
        let text = |(index, element): (usize, &'a Value)| {
            let at = || wrong_kind(&format!("{path}[{index}]"), "a text", element);
            element.as_str().ok_or_else(at)
        };
        list.iter().enumerate().map(text).collect()
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
        let Some(value) = self.value(key) else {
            return Ok(Vec::new());
        };
        let list = value
            .as_array()
            .ok_or_else(|| wrong_kind(&path, "a list", value))?;
        list.iter()
            .enumerate()
            .map(|(index, element)| Section::of(element, format!("{path}[{index}]")))
            .collect()
    }

    /// The object as a type; keys that the type does not have are ignored.
    ///
    /// # Errors
    /// Code 7 naming the key that is missing or has another type.
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T, Error> {
        let fields = self.map.into_iter().flatten();
        let fields = fields.map(|(key, value)| Ok((key.clone(), json::Value::deserialize(value)?)));
        let object = fields
            .collect::<Result<_, serde_json::Error>>()
            .map(json::Value::Object);
        object
            .map_err(json::Error::Syntax)
            .and_then(|object| json::decode(&object, &self.path, &mut Vec::new()))
            .map_err(|error| Error::new(Code::InvalidConfig, error.to_string()))
    }

    /// A value as an object, standing at a path.
    ///
    /// # Errors
    /// Code 7 naming the path when the value is not an object.
    pub fn of(value: &'a Value, path: String) -> Result<Section<'a>, Error> {
        match value.as_object() {
            Some(map) => Ok(Section {
                path,
                map: Some(map),
                known: None,
            }),
            None => Err(wrong_kind(&path, "an object", value)),
        }
    }

    /// Code 7 for a key of this object, with the reason.
    pub fn wrong(&self, key: &str, reason: impl std::fmt::Display) -> Error {
        Error::new(
            Code::InvalidConfig,
            format!("{}: {reason}", self.path_of(key)),
        )
    }
}

fn wrong_kind(path: &str, expected: &str, value: &Value) -> Error {
    let found = match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    Error::new(
        Code::InvalidConfig,
        format!("{path}: expected {expected}, found {found}"),
    )
}

/// Whether a key as written means a known key, by the rule of Go's `encoding/json`: ASCII
/// letters without case, and the two letters beyond ASCII that fold into it.
#[must_use]
pub fn same_key(written: &str, known: &str) -> bool {
    written == known || written.chars().map(fold).eq(known.chars().map(fold))
}

fn fold(letter: char) -> char {
    match letter {
        '\u{17f}' => 's',
        '\u{212a}' => 'k',
        other => other.to_ascii_lowercase(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn keys_match_as_in_go() {
        let value =
            json!({"CNIVersion": "1.0.0", "prevresult": {"IPs": []}, "mTu": 9000, "\u{212a}ey": 1});
        let root = Section::root(value.as_object().unwrap());
        assert_eq!(root.text("cniVersion").unwrap(), Some("1.0.0"));
        assert_eq!(root.get::<u32>("mtu").unwrap(), Some(9000));
        assert_eq!(root.get::<u32>("key").unwrap(), Some(1));
        assert!(root.section("prevResult").unwrap().value("ips").is_some());
        assert!(root.value("name").is_none());
    }

    #[test]
    fn the_last_key_wins_and_null_is_absent() {
        let value =
            json!({"Mode": "vepa", "mode": "bridge", "MODE": null, "mac": null, "ipam": null});
        let root = Section::root(value.as_object().unwrap());
        assert_eq!(root.text("mode").unwrap(), Some("bridge"));
        assert_eq!(root.text("mac").unwrap(), None);
        assert!(root.section("ipam").unwrap().is_empty());
    }

    #[test]
    fn a_wrong_type_is_named_with_its_place() {
        let value =
            json!({"ipam": {"ranges": [[], {"a": 1}, 3]}, "mtu": "x", "name": 5, "master": ""});
        let root = Section::root(value.as_object().unwrap());
        assert!(
            root.get::<u32>("mtu")
                .unwrap_err()
                .msg
                .starts_with("mtu: invalid type")
        );
        assert_eq!(
            root.text("name").unwrap_err().msg,
            "name: expected a text, found a number"
        );
        assert_eq!(
            root.require::<&str>("name").unwrap_err().msg,
            "name: invalid type: integer `5`, expected a text"
        );
        let ipam = root.section("ipam").unwrap();
        assert_eq!(
            ipam.sections("ranges").unwrap_err().msg,
            "ipam.ranges[0]: expected an object, found a list"
        );
        assert_eq!(
            root.section("mtu").unwrap_err().msg,
            "mtu: expected an object, found a text"
        );
        assert_eq!(
            ipam.require::<String>("type").unwrap_err().msg,
            "ipam.type is missing"
        );
        assert_eq!(root.text("master").unwrap(), None);
    }

    #[test]
    fn a_list_of_texts_names_the_element_that_is_none() {
        let value = json!({"ips": ["a", "b"], "one": "a", "mixed": ["a", 5]});
        let root = Section::root(value.as_object().unwrap());
        assert_eq!(root.texts("ips").unwrap(), ["a", "b"]);
        assert!(root.texts("none").unwrap().is_empty());
        for (key, message) in [
            ("one", "one: expected a list of texts, found a text"),
            ("mixed", "mixed[1]: expected a text, found a number"),
        ] {
            assert_eq!(root.texts(key).unwrap_err().msg, message);
        }
    }
}
