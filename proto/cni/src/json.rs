//! Reads JSON into types. One decoder, three readings.
//!
//! *Go*: what other CNI plugins answer, and files of the RDMA shared and the SR-IOV device plugin. Those
//! are Go programs, and files that work today can depend on Go's decoder: keys match without
//! regard to case, `null` is the zero value, of a key that appears twice the later scalar or list wins
//! (an object that appears twice is an error here), unknown keys are ignored. What Go refuses
//! (a string where a number belongs, `1e3` for an integer, text after the document) is refused here too.
//! A misspelt selector silently widens a pool, so an unknown key can be reported with the nearest one.
//!
//! *Network*: keys of a network, which a runtime in Go passes on: without regard to case, and `null` and
//! an empty text are absent. Unknown and repeated keys are errors.
//!
//! *Strict*: the node's policy. Unknown and repeated keys, another case and `null` are errors.

use std::cell::RefCell;
use std::iter::Enumerate;
use std::marker::PhantomData;
use std::{fmt, slice, vec};

use serde::de::{
    self, Deserialize, DeserializeOwned, DeserializeSeed, Deserializer, IntoDeserializer,
    MapAccess, SeqAccess, Visitor,
};

use crate::{Code, spelling::nearest, text::one_of};

/// A JSON value with its keys in file order and duplicates kept.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number, kept as written until somebody asks for a type.
    Number(serde_json::Number),
    /// A string.
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
    /// A value that its key cannot have: where, what it must be, and what it is.
    #[error("{0}")]
    Value(String),
    /// A key that its object does not have.
    #[error("unknown key {path:?}; {}", hint(key, known))]
    UnknownKey {
        /// Where it is, with its name.
        path: String,
        /// Its name.
        key: String,
        /// The keys that the object can have.
        known: &'static [&'static str],
    },
    /// The rule that a value breaks, until its path is known.
    #[error("{0}")]
    Rule(String),
    /// Of which type a value must be, until its path is known.
    #[error("expected {0}")]
    Type(String),
    /// A key that must be there, until the path of its object is known.
    #[error("{0} is missing")]
    Missing(&'static str),
}

impl From<Error> for crate::Error {
    fn from(error: Error) -> Self {
        crate::Error::new(Code::InvalidConfig, error.to_string())
    }
}

/// Reads one document; anything after it is an error, as in Go.
pub fn parse(text: impl AsRef<[u8]>) -> Result<Value, Error> {
    serde_json::from_slice(text.as_ref()).map_err(Error::Syntax)
}

impl Value {
    /// What the value is, for messages: `the string "x"`, `the number 3`, `a list`.
    pub fn describe(&self) -> String {
        match self {
            Value::Null => "null".into(),
            Value::Bool(value) => format!("{value}"),
            Value::Number(value) => format!("the number {value}"),
            Value::String(value) => format!("the string {value:?}"),
            Value::Array(_) => "a list".into(),
            Value::Object(_) => "an object".into(),
        }
    }

    /// The value of a key, if this is an object that has it.
    pub fn get_mut(&mut self, key: &str) -> Option<&mut Value> {
        match self {
            Value::Object(fields) => fields.iter_mut().find(|(k, _)| k == key).map(|(_, v)| v),
            _ => None,
        }
    }

    /// The fields of an object; none of another value.
    pub fn fields(&self) -> &[(String, Value)] {
        match self {
            Value::Object(fields) => fields,
            _ => &[],
        }
    }

    /// The first key of an object that it has twice, also in two cases of letters: readers differ in
    /// which one they take.
    pub fn repeated_key(&self) -> Option<&str> {
        let mut seen = std::collections::BTreeSet::new();
        let mut keys = self.fields().iter().map(|(key, _)| key.as_str());
        keys.find(|key| !seen.insert(key.chars().map(fold).collect::<String>()))
    }
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

/// Finds which of `known` a key of the file means: the exact one first, else one that Go takes for
/// the same.
pub fn resolve<'k>(known: &[&'k str], key: &str) -> Option<&'k str> {
    let exact = known.iter().find(|candidate| **candidate == key);
    let meant = exact.or_else(|| known.iter().find(|candidate| same_key(key, candidate)));
    meant.copied()
}

/// The known key that an unknown one was probably meant to be, else all of them.
fn hint(key: &str, known: &[&str]) -> String {
    match nearest(key, known) {
        Some(near) => format!("did you mean {near:?}?"),
        None => format!("known keys: {}", known.join(", ")),
    }
}

/// Reads a document, or one value of it at `path`, as Go does. `unknown` gets a sentence for each key
/// that the type does not have.
///
/// # Errors
/// The first value of another type than its key asks for.
pub fn decode<T: DeserializeOwned>(
    value: &Value,
    path: &str,
    unknown: &mut Vec<String>,
) -> Result<T, Error> {
    let warnings = RefCell::new(std::mem::take(unknown));
    let read = read(value, path, Reading::Go(Some(&warnings)));
    *unknown = warnings.into_inner();
    read
}

/// Reads a document strictly.
///
/// # Errors
/// The first key or value that the type does not have, or that is there twice.
pub fn decode_strictly<T: DeserializeOwned>(value: &Value) -> Result<T, Error> {
    read(value, "", Reading::Strict)
}

/// The keys of a type, as its `Deserialize` is derived.
#[must_use]
pub fn keys_of<T: DeserializeOwned>() -> &'static [&'static str] {
    let unknown = Value::Object(vec![(String::new(), Value::Null)]);
    match decode_strictly::<T>(&unknown) {
        Err(Error::UnknownKey { known, .. }) => known,
        _ => &[],
    }
}

pub(crate) fn read<T: DeserializeOwned>(
    value: &Value,
    path: &str,
    reading: Reading<'_>,
) -> Result<T, Error> {
    let path = Path::Root(path);
    let decoder = Decoder {
        value,
        path,
        reading,
    };
    decoder.read(PhantomData)
}

#[derive(Clone, Copy)]
pub(crate) enum Reading<'d> {
    /// With a list for warnings about unknown keys.
    Go(Option<&'d RefCell<Vec<String>>>),
    Network,
    Strict,
}

/// Where a value is; a text is made of it only for a message.
#[derive(Clone, Copy)]
enum Path<'d> {
    Root(&'d str),
    Key(&'d Path<'d>, &'d str),
    Index(&'d Path<'d>, usize),
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Path::Root(path) => f.write_str(path),
            Path::Key(Path::Root(""), key) => f.write_str(key),
            Path::Key(object, key) => write!(f, "{object}.{key}"),
            Path::Index(list, index) => write!(f, "{list}[{index}]"),
        }
    }
}

struct Decoder<'d> {
    value: &'d Value,
    path: Path<'d>,
    reading: Reading<'d>,
}

type Field<'d> = (&'d str, &'d Value);

impl<'d> Decoder<'d> {
    fn read<'de, S: DeserializeSeed<'de>>(&self, seed: S) -> Result<S::Value, Error> {
        let read = match (self.reading, self.value) {
            (Reading::Strict, Value::Null) => Err(expected("a value")),
            _ => seed.deserialize(self),
        };
        let found = || self.value.describe();
        read.map_err(|error| match (error, self.value) {
            (Error::Missing(key), _) => self.wrong(key, "is missing"),
            (Error::Type(what), _) => self.placed(format!("expected {what}, found {}", found())),
            // An object is not repeated in a message about its keys.
            (Error::Rule(rule), Value::Object(_)) => self.placed(rule),
            (Error::Rule(rule), _) => self.placed(format!("{rule}, found {}", found())),
            (placed, _) => placed,
        })
    }

    /// A value of this one.
    fn inner<'i>(&self, value: &'i Value, path: Path<'i>) -> Decoder<'i>
    where
        'd: 'i,
    {
        let reading = self.reading;
        Decoder {
            value,
            path,
            reading,
        }
    }

    fn placed(&self, rule: String) -> Error {
        Error::Value(match self.path {
            Path::Root("") => rule,
            path => format!("{path}: {rule}"),
        })
    }

    /// What is wrong with a key of this object.
    fn wrong(&self, key: &str, rule: &str) -> Error {
        Error::Value(format!("{}: {rule}", Path::Key(&self.path, key)))
    }

    fn object(&self) -> Result<&'d [(String, Value)], Error> {
        match self.value {
            Value::Null => Ok(&[]),
            Value::Object(fields) => Ok(fields),
            _ => Err(expected("an object")),
        }
    }

    /// The fields of an object with these keys.
    fn known_fields(&self, known: &'static [&'static str]) -> Result<Vec<Field<'d>>, Error> {
        let mut fields: Vec<Field<'d>> = Vec::new();
        for (key, value) in self.object()? {
            let name = match self.reading {
                Reading::Strict => known.iter().copied().find(|name| name == key),
                Reading::Go(_) | Reading::Network => resolve(known, key),
            };
            let Some(name) = name else {
                match self.reading {
                    Reading::Go(None) => {}
                    Reading::Go(Some(warnings)) => {
                        let (path, hint) = (Path::Key(&self.path, key), hint(key, known));
                        let warning = format!("unknown key \"{path}\" is ignored; {hint}");
                        warnings.borrow_mut().push(warning);
                    }
                    Reading::Network | Reading::Strict => {
                        let path = Path::Key(&self.path, key).to_string();
                        let key = key.clone();
                        return Err(Error::UnknownKey { path, key, known });
                    }
                }
                continue;
            };
            let earlier = fields.iter_mut().find(|(other, _)| *other == name);
            match (earlier, self.reading, value) {
                (None, ..) => fields.push((name, value)),
                (Some(_), Reading::Go(_), Value::Null) => {}
                // Go decodes both objects into one place.
                (Some(_), _, Value::Object(_)) => return Err(self.repeated(key)),
                (Some(earlier), Reading::Go(_), _) => earlier.1 = value,
                (Some(_), ..) => return Err(self.repeated(key)),
            }
        }
        if !matches!(self.reading, Reading::Strict) {
            // The type's default is Go's zero value.
            fields.retain(|(_, value)| **value != Value::Null);
        }
        Ok(fields)
    }

    fn repeated(&self, key: &str) -> Error {
        self.wrong(key, "the key is there twice")
    }
}

fn expected(what: &str) -> Error {
    Error::Type(what.to_owned())
}

impl<'de> Deserializer<'de> for &Decoder<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.value {
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

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.value {
            Value::Null => visitor.visit_str(""),
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match (self.reading, self.value) {
            (_, Value::Null) => visitor.visit_none(),
            (Reading::Network, Value::String(text)) if text.is_empty() => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let elements = match self.value {
            Value::Null => &[],
            Value::Array(elements) => elements.as_slice(),
            _ => return Err(expected("a list")),
        };
        visitor.visit_seq(Elements(self, elements.iter().enumerate()))
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let mut fields: Vec<Field<'_>> = Vec::new();
        let may_repeat = matches!(self.reading, Reading::Go(_));
        for (key, value) in self.object()? {
            if !may_repeat && fields.iter().any(|(other, _)| other == key) {
                return Err(self.repeated(key));
            }
            fields.push((key, value));
        }
        visitor.visit_map(Fields(self, fields.into_iter(), None))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        known: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        let fields = self.known_fields(known)?;
        visitor.visit_map(Fields(self, fields.into_iter(), None))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        words: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.value {
            Value::String(word) => visitor.visit_enum(word.as_str().into_deserializer()),
            _ => Err(de::Error::unknown_variant("", words)),
        }
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str bytes byte_buf unit unit_struct
        newtype_struct tuple tuple_struct identifier ignored_any
    }
}

struct Elements<'d>(&'d Decoder<'d>, Enumerate<slice::Iter<'d, Value>>);

impl<'de> SeqAccess<'de> for Elements<'_> {
    type Error = Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, Error> {
        let element = self.1.next().map(|(index, value)| {
            let path = Path::Index(&self.0.path, index);
            self.0.inner(value, path).read(seed)
        });
        element.transpose()
    }
}

/// With the field whose key was read last.
struct Fields<'d>(&'d Decoder<'d>, vec::IntoIter<Field<'d>>, Option<Field<'d>>);

impl<'de> MapAccess<'de> for Fields<'_> {
    type Error = Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, Error> {
        self.2 = self.1.next();
        let key = self.2.as_ref().map(|(key, _)| key.into_deserializer());
        key.map(|key| seed.deserialize(key)).transpose()
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Error> {
        let field = self.2.take();
        let (key, value) = field.ok_or_else(|| de::Error::custom("a value without a key"))?;
        let path = Path::Key(&self.0.path, key);
        self.0.inner(value, path).read(seed)
    }
}

impl de::Error for Error {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Error::Rule(message.to_string())
    }

    fn missing_field(field: &'static str) -> Self {
        Error::Missing(field)
    }

    fn invalid_value(found: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Self::invalid_type(found, expected)
    }

    fn invalid_type(_: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        let expected = expected.to_string();
        Error::Type(match expected.as_str() {
            "u8" => "a number from 0 to 255".to_owned(),
            "u16" => "a number from 0 to 65535".to_owned(),
            "u32" => "a number from 0 to 4294967295".to_owned(),
            "i64" => "an integer of at most 64 bits".to_owned(),
            "a boolean" => "true or false".to_owned(),
            _ => expected,
        })
    }

    fn unknown_variant(_: &str, words: &'static [&'static str]) -> Self {
        let words = words.iter().map(|word| format!("{word:?}"));
        Error::Rule(format!("must be {}", one_of(words)))
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
        let number = serde_json::Number::from_f64(value).map(Value::Number);
        number.ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut elements = Vec::new();
        while let Some(element) = access.next_element()? {
            elements.push(element);
        }
        Ok(Value::Array(elements))
    }

    fn visit_map<A: MapAccess<'de>>(self, access: A) -> Result<Value, A::Error> {
        let Members(fields) = Members(Vec::new()).visit_map(access)?;
        Ok(Value::Object(fields))
    }
}

/// The members of an object as they are written, repeated ones too.
pub(crate) struct Members<T>(pub(crate) Vec<(String, T)>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Members<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(Members(Vec::new()))
    }
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for Members<T> {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut access: A) -> Result<Self, A::Error> {
        while let Some(member) = access.next_entry()? {
            self.0.push(member);
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn go<T: DeserializeOwned>(text: &str) -> Result<T, Error> {
        decode(&parse(text).unwrap(), "x", &mut Vec::new())
    }

    #[test]
    fn duplicates_are_kept_in_file_order() {
        let value = parse(r#"{"a": 1, "A": [null, "x"], "a": null}"#).unwrap();
        let keys: Vec<_> = value.fields().iter().map(|(key, _)| key.as_str()).collect();
        assert_eq!(keys, ["a", "A", "a"]);
        let strings: Vec<String> = decode(&value.fields()[1].1, "A", &mut Vec::new()).unwrap();
        assert_eq!(strings, ["", "x"]);
    }

    #[test]
    fn null_is_the_zero_value_in_go() {
        assert!(
            go::<std::collections::BTreeMap<String, u8>>("null")
                .unwrap()
                .is_empty()
        );
        assert!(go::<Vec<String>>("null").unwrap().is_empty());
        assert_eq!(go::<String>("null").unwrap(), "");
    }

    #[test]
    fn integers_are_as_strict_as_in_go() {
        for text in [
            "1.5",
            "1e3",
            "1.0",
            "99999999999999999999",
            "\"5\"",
            "true",
            "[1]",
        ] {
            let error = go::<i64>(text).unwrap_err().to_string();
            assert!(error.starts_with("x: expected an integer"), "{error}");
        }
        assert_eq!(go::<i64>("-7").unwrap(), -7);
    }

    #[derive(Debug, Default, PartialEq, serde::Deserialize)]
    #[serde(default, rename_all = "camelCase")]
    struct Keys {
        master: Option<String>,
        mtu: Option<u32>,
        inner: Option<Box<Keys>>,
    }

    #[test]
    fn a_network_reads_keys_without_their_case_and_refuses_others() {
        let network = |text: &str| {
            let read: Result<Keys, _> = read(&parse(text).unwrap(), "", Reading::Network);
            read.map_err(|error| error.to_string())
        };
        let nothing = r#"{"MASTER": "", "mtu": null, "inner": ""}"#;
        assert_eq!(network(nothing), Ok(Keys::default()));
        let read = network(r#"{"ma\u017fter": "eth1", "Inner": {"mTU": 9000}}"#).unwrap();
        assert_eq!(read.master.as_deref(), Some("eth1"));
        assert_eq!(read.inner.unwrap().mtu, Some(9000));
        for (text, message) in [
            (
                r#"{"master": "a", "ma\u017fter": "b"}"#,
                "ma\u{17f}ter: the key is there twice",
            ),
            (
                r#"{"inner": {"mtu": 1, "mtu": 1}}"#,
                "inner.mtu: the key is there twice",
            ),
            (
                r#"{"inner": {"mtuu": 1}}"#,
                r#"unknown key "inner.mtuu"; did you mean "mtu"?"#,
            ),
            (
                r#"{"x": 1}"#,
                r#"unknown key "x"; known keys: master, mtu, inner"#,
            ),
            (
                r#"{"mtu": "1"}"#,
                r#"mtu: expected a number from 0 to 4294967295, found the string "1""#,
            ),
            (
                r#"{"mtu": {}}"#,
                "mtu: expected a number from 0 to 4294967295, found an object",
            ),
            (
                r#"{"master": {}}"#,
                "master: expected a string, found an object",
            ),
            (
                r#"{"inner": []}"#,
                "inner: expected an object, found a list",
            ),
        ] {
            assert_eq!(network(text).unwrap_err(), message);
        }
        assert_eq!(keys_of::<Keys>(), ["master", "mtu", "inner"]);
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
        assert_eq!(hint("rdmaHCAMx", &known), "did you mean \"rdmaHcaMax\"?");
        assert!(hint("colour", &known).starts_with("known keys: resourceName"));
        let mut warnings = Vec::new();
        let value = parse(r#"{"mtuu": 1}"#).unwrap();
        decode::<Keys>(&value, "list[0]", &mut warnings).unwrap();
        let warning = r#"unknown key "list[0].mtuu" is ignored; did you mean "mtu"?"#;
        assert_eq!(warnings, [warning]);
    }
}
