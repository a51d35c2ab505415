//! Reads configuration files in JSON into types: as Go's decoder does, for what other CNI plugins answer and for files of the RDMA shared
//! and the SR-IOV device plugin, or strictly, for the node's policy.
//!
//! Those plugins are Go programs, and files that work today lean on what Go's decoder forgives: keys
//! match without regard to case, `null` is the zero value, a key that appears twice is decoded
//! twice into the same place (so the later scalar or list wins and objects merge), unknown keys are
//! ignored. A strict serde derive would refuse such files. What Go refuses (a string where a
//! number belongs, `1e3` for an integer, text after the document) is refused here too.
//!
//! Unknown keys are the one thing treated better than in Go: they are still ignored, but reported
//! with the nearest known key, because a misspelt selector silently widens a pool. The strict reading
//! refuses them, and repeated keys and `null`.

use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{
    self, Deserialize, DeserializeOwned, DeserializeSeed, Deserializer, IntoDeserializer,
    MapAccess, SeqAccess, Visitor,
};

use crate::{section::same_key, spelling::nearest};

/// A JSON value with its keys in file order and duplicates kept.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number, kept as written until somebody asks for a type.
    Number(serde_json::Number),
    /// A text.
    String(String),
    /// A list.
    Array(Vec<Value>),
    /// An object, in file order, duplicates kept.
    Object(Vec<(String, Value)>),
}

/// Why a document, or one value in it, cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The text is not one JSON document.
    #[error("not valid JSON: {0}")]
    Syntax(#[source] serde_json::Error),
    /// A value that its key cannot have.
    #[error("{}{rule}{}", before(path, ": "), after(", found ", found))]
    Value {
        /// Which value, as in `configList[0].selectors`.
        path: String,
        /// What it must be.
        rule: String,
        /// What it is; empty if the rule says that.
        found: String,
    },
    /// A key that its object does not have. Only strict reading refuses it.
    #[error("unknown key {path:?}; {hint}")]
    UnknownKey {
        /// Where it is, with its name.
        path: String,
        /// What may have been meant.
        hint: String,
    },
    /// What the type that is read says of a value, until its path is known.
    #[error("{0}")]
    Rule(String),
    /// A key that must be there, until the path of its object is known.
    #[error("{0} is missing")]
    Missing(&'static str),
}

fn before(text: &str, separator: &str) -> String {
    match text {
        "" => String::new(),
        text => format!("{text}{separator}"),
    }
}

fn after(separator: &str, text: &str) -> String {
    match text {
        "" => String::new(),
        text => format!("{separator}{text}"),
    }
}

impl Error {
    /// With the path of the value that it is about.
    fn at(self, path: String, found: String) -> Self {
        match self {
            Error::Rule(rule) => Error::Value { path, rule, found },
            Error::Missing(key) => Error::Value {
                path: before(&path, ".") + key,
                rule: "is missing".to_owned(),
                found: String::new(),
            },
            placed => placed,
        }
    }
}

/// Reads one document; anything after it is an error, as in Go.
pub fn parse(text: impl AsRef<[u8]>) -> Result<Value, Error> {
    serde_json::from_slice(text.as_ref()).map_err(Error::Syntax)
}

impl Value {
    /// What the value is, for messages: `the string "x"`, `the number 3`, `a list`.
    fn describe(&self) -> String {
        match self {
            Value::Null => "null".into(),
            Value::Bool(value) => format!("{value}"),
            Value::Number(value) => format!("the number {value}"),
            Value::String(value) => format!("the string {value:?}"),
            Value::Array(list) => match list.as_slice() {
                [first @ (Value::Number(_) | Value::String(_))] => {
                    format!("a list of {}", first.describe())
                }
                _ => "a list".into(),
            },
            Value::Object(_) => "an object".into(),
        }
    }

    fn mismatch(&self, path: &str, expected: &str) -> Error {
        Error::Value {
            path: path.into(),
            rule: format!("expected {expected}"),
            found: self.describe(),
        }
    }

    /// The value of a key, if this is an object that has it.
    pub fn get_mut(&mut self, key: &str) -> Option<&mut Value> {
        match self {
            Value::Object(fields) => fields.iter_mut().find(|(k, _)| k == key).map(|(_, v)| v),
            _ => None,
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

/// The known key that an unknown one was probably meant to be, else all of them.
fn hint(key: &str, known: &[&str]) -> String {
    match nearest(key, known) {
        Some(near) => format!("did you mean {near:?}?"),
        None => format!("known keys: {}", known.join(", ")),
    }
}

/// The warning for a key that no peer knows, with the nearest known one if it is near.
pub fn unknown_key(path: &str, key: &str, known: &[&str]) -> String {
    let at = after(" in ", path);
    format!("unknown key {key:?}{at} is ignored; {}", hint(key, known))
}

/// Decodes a document, or one value of it at `path`, into a type whose keys all have defaults. `unknown`
/// gets a sentence for each key that the type does not have.
///
/// # Errors
/// The first value of another type than its key asks for.
pub fn decode<T: DeserializeOwned>(
    value: &Value,
    path: &str,
    unknown: &mut Vec<String>,
) -> Result<T, Error> {
    let decoder = Decoder {
        value: value.clone(),
        path: path.to_owned(),
        reading: Reading::Go(&RefCell::new(unknown)),
    };
    decoder.read(PhantomData)
}

/// Decodes a document into a type that says everything that may be in it.
///
/// # Errors
/// The first key or value that the type does not have, or that is there twice.
pub fn decode_strictly<T: DeserializeOwned>(value: &Value) -> Result<T, Error> {
    let decoder = Decoder {
        value: value.clone(),
        path: String::new(),
        reading: Reading::Strict,
    };
    decoder.read(PhantomData)
}

#[derive(Clone, Copy)]
enum Reading<'u> {
    /// With warnings about unknown keys.
    Go(&'u RefCell<&'u mut Vec<String>>),
    Strict,
}

struct Decoder<'u> {
    value: Value,
    path: String,
    reading: Reading<'u>,
}

impl<'u> Decoder<'u> {
    fn below(&self, value: Value, path: String) -> Self {
        Decoder {
            value,
            path,
            reading: self.reading,
        }
    }

    fn field(&self, key: &str, value: Value) -> Self {
        self.below(value, before(&self.path, ".") + key)
    }

    fn read<'de, S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, Error> {
        if let (Reading::Strict, Value::Null) = (self.reading, &self.value) {
            return Err(self.value.mismatch(&self.path, "a value"));
        }
        // An object is not repeated in a message about it.
        let found = match &self.value {
            Value::Object(_) => String::new(),
            value => value.describe(),
        };
        let path = self.path.clone();
        seed.deserialize(self)
            .map_err(|error| error.at(path, found))
    }

    /// The values of an object whose keys are `known`.
    fn known_fields(&self, known: &'static [&'static str]) -> Result<Vec<Field<'u>>, Error> {
        let mut merged: Vec<Field<'u>> = Vec::new();
        for (key, value) in self.value.fields(&self.path)? {
            let name = match self.reading {
                Reading::Go(unknown) => {
                    let name = resolve(known, key);
                    if name.is_none() {
                        let warning = unknown_key(&self.path, key, known);
                        unknown.borrow_mut().push(warning);
                    }
                    name
                }
                Reading::Strict if known.contains(&key.as_str()) => Some(key.as_str()),
                Reading::Strict => {
                    return Err(Error::UnknownKey {
                        path: before(&self.path, ".") + key,
                        hint: hint(key, known),
                    });
                }
            };
            let Some(name) = name else { continue };
            match merged.iter_mut().find(|(other, _)| *other == name) {
                Some((_, decoder)) => {
                    self.check_repeated(&decoder.path)?;
                    let earlier = std::mem::replace(&mut decoder.value, Value::Null);
                    decoder.value = merge(earlier, value);
                }
                None => merged.push((name.to_owned(), self.field(key, value.clone()))),
            }
        }
        if let Reading::Go(_) = self.reading {
            // The type's default is Go's zero value.
            merged.retain(|(_, one)| one.value != Value::Null);
        }
        Ok(merged)
    }

    fn check_repeated(&self, path: &str) -> Result<(), Error> {
        match self.reading {
            Reading::Go(_) => Ok(()),
            Reading::Strict => Err(Error::Value {
                path: path.to_owned(),
                rule: "the key is there twice".to_owned(),
                found: String::new(),
            }),
        }
    }
}

type Field<'u> = (String, Decoder<'u>);

/// What Go has after it decoded both into one place: objects merge, of scalars and lists the later
/// one counts, and `null` empties a list alone.
fn merge(earlier: Value, later: &Value) -> Value {
    match (earlier, later) {
        (Value::Object(mut fields), Value::Object(more)) => {
            fields.extend(more.iter().cloned());
            Value::Object(fields)
        }
        (Value::Array(_), later) => later.clone(),
        (earlier, Value::Null) => earlier,
        (_, later) => later.clone(),
    }
}

impl<'de> Deserializer<'de> for Decoder<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match &self.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Number(value) => match (value.as_i64(), value.as_u64()) {
                (Some(value), _) => visitor.visit_i64(value),
                (None, Some(value)) => visitor.visit_u64(value),
                (None, None) => visitor.visit_f64(value.as_f64().unwrap_or_default()),
            },
            Value::String(value) => visitor.visit_str(value),
            Value::Array(_) => self.deserialize_seq(visitor),
            Value::Object(_) => self.deserialize_map(visitor),
        }
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_bool(self.value.boolean(&self.path)?)
    }

    fn deserialize_i64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_i64(self.value.integer(&self.path)?.unwrap_or_default())
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_string(self.value.string(&self.path)?)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.value {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let elements = self.value.elements(&self.path)?.iter().enumerate();
        let decoders: Vec<_> = elements
            .map(|(i, value)| self.below(value.clone(), format!("{}[{i}]", self.path)))
            .collect();
        visitor.visit_seq(Elements(decoders.into_iter()))
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let mut fields: Vec<Field<'_>> = Vec::new();
        for (key, value) in self.value.fields(&self.path)? {
            if let Some((_, earlier)) = fields.iter().find(|(other, _)| other == key) {
                self.check_repeated(&earlier.path)?;
            }
            fields.push((key.clone(), self.field(key, value.clone())));
        }
        visitor.visit_map(Fields(fields.into_iter(), None))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        known: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        let fields = self.known_fields(known)?;
        visitor.visit_map(Fields(fields.into_iter(), None))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        words: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.value {
            Value::String(word) if words.contains(&word.as_str()) => {
                visitor.visit_enum(word.into_deserializer())
            }
            _ => {
                let words: Vec<String> = words.iter().map(|word| format!("{word:?}")).collect();
                Err(Error::Rule(format!("must be {}", words.join(" or "))))
            }
        }
    }

    serde::forward_to_deserialize_any! {
        i8 i16 i32 u8 u16 u32 u64 f32 f64 char str bytes byte_buf unit unit_struct newtype_struct
        tuple tuple_struct identifier ignored_any
    }
}

struct Elements<'u>(std::vec::IntoIter<Decoder<'u>>);

impl<'de> SeqAccess<'de> for Elements<'_> {
    type Error = Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, Error> {
        self.0.next().map(|element| element.read(seed)).transpose()
    }
}

struct Fields<'u>(std::vec::IntoIter<Field<'u>>, Option<Decoder<'u>>);

impl<'de> MapAccess<'de> for Fields<'_> {
    type Error = Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, Error> {
        let Some((key, value)) = self.0.next() else {
            return Ok(None);
        };
        self.1 = Some(value);
        seed.deserialize(key.into_deserializer()).map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Error> {
        match self.1.take() {
            Some(value) => value.read(seed),
            None => Err(de::Error::custom("a value without a key")),
        }
    }
}

impl de::Error for Error {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Error::Rule(message.to_string())
    }

    fn missing_field(field: &'static str) -> Self {
        Error::Missing(field)
    }

    fn invalid_value(_: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Error::Rule(format!("expected {expected}"))
    }

    fn invalid_type(_: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Error::Rule(format!("expected {expected}"))
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
        let strings: Vec<String> = decode(&fields[1].1, "A", &mut Vec::new()).unwrap();
        assert_eq!(strings, ["", "x"]);
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
        let value = parse(r#""eth0""#).unwrap();
        let error =
            decode::<Vec<String>>(&value, "selectors.ifNames", &mut Vec::new()).unwrap_err();
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
