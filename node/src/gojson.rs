//! JSON as Go's decoder reads it, for configuration files of the RDMA shared and the SR-IOV device
//! plugin.
//!
//! Both are Go programs, and files that work today lean on what Go's decoder forgives: keys
//! match without regard to case, `null` is the zero value, a key that appears twice is decoded
//! twice into the same place (so the later scalar or list wins and objects merge), unknown keys are
//! ignored. A strict serde derive would refuse such files. What Go refuses (a string where a
//! number belongs, `1e3` for an integer, text after the document) is refused here too.
//!
//! [`cni_wire::section`] reads network configurations and has the rule by which Go matches keys. It
//! needs neither repeated keys nor warnings.
//!
//! Unknown keys are the one thing treated better than in Go: they are still ignored, but reported
//! with the nearest known key, because a misspelt selector silently widens a pool.

use std::fmt;

use cni_wire::section::same_key;
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::spelling::nearest;

/// A JSON value with its keys in file order and duplicates kept.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Null,
    Bool(bool),
    /// A number, kept as written until somebody asks for a type.
    Number(serde_json::Number),
    String(String),
    Array(Vec<Value>),
    /// An object, in file order, duplicates kept.
    Object(Vec<(String, Value)>),
}

/// Why a document, or one value in it, cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("not valid JSON: {0}")]
    Syntax(#[source] serde_json::Error),
    /// A value of another type than its key asks for.
    #[error("{path}: expected {expected}, found {found}")]
    Type {
        path: String,
        expected: &'static str,
        found: String,
    },
}

/// Reads one document; anything after it is an error, as in Go.
pub fn parse(text: &str) -> Result<Value, Error> {
    serde_json::from_str(text).map_err(Error::Syntax)
}

impl Value {
    /// What the value is, for messages: `the string "x"`, `the number 3`, `a list`.
    fn describe(&self) -> String {
        match self {
            Value::Null => "null".into(),
            Value::Bool(value) => format!("{value}"),
            Value::Number(value) => format!("the number {value}"),
            Value::String(value) => format!("the string {value:?}"),
            Value::Array(_) => "a list".into(),
            Value::Object(_) => "an object".into(),
        }
    }

    fn mismatch(&self, path: &str, expected: &'static str) -> Error {
        Error::Type {
            path: path.into(),
            expected,
            found: self.describe(),
        }
    }

    /// The keys of an object; of `null` none.
    pub fn fields(&self, path: &str) -> Result<&[(String, Value)], Error> {
        match self {
            Value::Null => Ok(&[]),
            Value::Object(fields) => Ok(fields),
            other => Err(other.mismatch(path, "an object")),
        }
    }

    /// The elements of a list; of `null` none.
    pub fn elements(&self, path: &str) -> Result<&[Value], Error> {
        match self {
            Value::Null => Ok(&[]),
            Value::Array(elements) => Ok(elements),
            other => Err(other.mismatch(path, "a list")),
        }
    }

    /// A string; `null` is the empty one.
    pub fn string(&self, path: &str) -> Result<String, Error> {
        match self {
            Value::Null => Ok(String::new()),
            Value::String(value) => Ok(value.clone()),
            other => Err(other.mismatch(path, "a string")),
        }
    }

    /// A list of strings; `null` is the empty list, a `null` in it the empty string.
    pub fn strings(&self, path: &str) -> Result<Vec<String>, Error> {
        let elements = self.elements(path)?;
        elements
            .iter()
            .enumerate()
            .map(|(i, e)| e.string(&format!("{path}[{i}]")))
            .collect()
    }

    /// An integer, or `None` for `null`. Go takes no fraction and no exponent for an `int`.
    pub fn integer(&self, path: &str) -> Result<Option<i64>, Error> {
        match self {
            Value::Null => Ok(None),
            Value::Number(value) => value
                .as_i64()
                // Go reads -0 as an integer; serde_json has it as a float.
                .or_else(|| (value.as_f64()?.to_bits() == (-0.0_f64).to_bits()).then_some(0))
                .map(Some)
                .ok_or_else(|| self.mismatch(path, "an integer of at most 64 bits")),
            other => Err(other.mismatch(path, "an integer")),
        }
    }

    /// A boolean; `null` is false.
    pub fn boolean(&self, path: &str) -> Result<bool, Error> {
        match self {
            Value::Null => Ok(false),
            Value::Bool(value) => Ok(*value),
            other => Err(other.mismatch(path, "true or false")),
        }
    }
}

/// Finds which of `known` a key of the file means: the exact one first, else one that Go takes for
/// the same.
pub fn resolve<'k>(known: &[&'k str], key: &str) -> Option<&'k str> {
    known
        .iter()
        .find(|candidate| **candidate == key)
        .or_else(|| known.iter().find(|candidate| same_key(key, candidate)))
        .copied()
}

/// The warning for a key that no peer knows, with the nearest known one if it is near.
pub fn unknown_key(path: &str, key: &str, known: &[&str]) -> String {
    let at = if path.is_empty() {
        String::new()
    } else {
        format!(" in {path}")
    };
    match nearest(key, known) {
        Some(near) => format!("unknown key {key:?}{at} is ignored; did you mean {near:?}?"),
        None => format!(
            "unknown key {key:?}{at} is ignored; known keys: {}",
            known.join(", ")
        ),
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Value, E> {
        serde_json::Number::from_f64(value)
            .map(Value::Number)
            .ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.into()))
    }

    fn visit_string<E: de::Error>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut elements = Vec::new();
        while let Some(element) = access.next_element()? {
            elements.push(element);
        }
        Ok(Value::Array(elements))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut fields = Vec::new();
        while let Some(field) = access.next_entry()? {
            fields.push(field);
        }
        Ok(Value::Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_duplicates_in_file_order() {
        let value = parse(r#"{"a": 1, "A": [null, "x"], "a": null}"#).unwrap();
        let fields = value.fields("").unwrap();
        let keys: Vec<_> = fields.iter().map(|(key, _)| key.as_str()).collect();
        assert_eq!(keys, ["a", "A", "a"]);
        assert_eq!(fields[1].1.strings("A").unwrap(), ["", "x"]);
    }

    #[test]
    fn null_is_the_zero_value_of_every_type() {
        assert!(Value::Null.fields("x").unwrap().is_empty());
        assert!(Value::Null.elements("x").unwrap().is_empty());
        assert_eq!(Value::Null.string("x").unwrap(), "");
        assert_eq!(Value::Null.integer("x").unwrap(), None);
        assert!(!Value::Null.boolean("x").unwrap());
    }

    #[test]
    fn integers_are_as_strict_as_go() {
        for text in [
            "1.5",
            "1e3",
            "1.0",
            "99999999999999999999",
            "\"5\"",
            "true",
            "[1]",
        ] {
            let error = parse(text)
                .unwrap()
                .integer("configList[0].rdmaHcaMax")
                .unwrap_err();
            assert!(
                error
                    .to_string()
                    .starts_with("configList[0].rdmaHcaMax: expected an integer")
            );
        }
        assert_eq!(parse("-7").unwrap().integer("x").unwrap(), Some(-7));
        assert_eq!(parse("-0").unwrap().integer("x").unwrap(), Some(0));
    }

    #[test]
    fn a_wrong_type_is_named_with_its_place() {
        let error = parse(r#""eth0""#)
            .unwrap()
            .strings("selectors.ifNames")
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            r#"selectors.ifNames: expected a list, found the string "eth0""#
        );
    }

    #[test]
    fn text_after_the_document_is_refused() {
        assert!(
            parse("{} {}")
                .unwrap_err()
                .to_string()
                .starts_with("not valid JSON")
        );
        assert!(parse("").is_err());
    }

    #[test]
    fn keys_fold_case_but_an_exact_one_is_preferred() {
        let known = ["deviceIDs", "devices"];
        assert_eq!(resolve(&known, "DEVICEids"), Some("deviceIDs"));
        assert_eq!(resolve(&known, "devices"), Some("devices"));
        assert_eq!(resolve(&known, "device"), None);
        assert_eq!(resolve(&["A", "a"], "a"), Some("a"));
        // The long s and the sign for kelvin, which Go folds into s and k.
        assert_eq!(resolve(&["pKeys"], "p\u{212a}ey\u{17f}"), Some("pKeys"));
    }

    #[test]
    fn an_unknown_key_is_reported_with_the_nearest() {
        let known = ["resourceName", "rdmaHcaMax", "selectors"];
        assert!(unknown_key("configList[0]", "rdmaHCAMx", &known).contains("\"rdmaHcaMax\"?"));
        assert!(unknown_key("", "colour", &known).contains("known keys: resourceName"));
    }
}
