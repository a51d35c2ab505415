//! What a plan would change in objects that the cluster has. Pure.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::documents::{name_of, objects};

/// An object as a person edits it: what it contains as text is read.
pub(crate) fn content(object: &Value) -> Value {
    let mut content = Map::new();
    for key in ["labels", "annotations"] {
        let entries = object
            .pointer(&format!("/metadata/{key}"))
            .and_then(Value::as_object);
        // Others add theirs, as kubectl does.
        let ours = entries.into_iter().flatten().filter(|(key, _)| {
            key.as_str() == super::render::LABEL.0 || key.ends_with("/resourceName")
        });
        content.extend(ours.map(|(key, value)| (key.clone(), value.clone())));
    }
    for part in ["data", "spec"] {
        let entries = object.get(part).and_then(Value::as_object);
        for (key, value) in entries.into_iter().flatten() {
            let text = value.as_str().unwrap_or_default();
            let read = objects(key, text).ok().and_then(|mut one| one.pop());
            content.insert(key.clone(), named(read.unwrap_or_else(|| value.clone())));
        }
    }
    Value::Object(content)
}

/// Entries of lists under their resource names, so that each is compared with itself.
fn named(value: Value) -> Value {
    const NAMES: [&str; 2] = ["resource", "resourceName"];
    match value {
        Value::Object(object) => object
            .into_iter()
            .map(|(key, value)| (key, named(value)))
            .collect::<Map<_, _>>()
            .into(),
        Value::Array(items) => {
            let name = |item: &Value| {
                NAMES
                    .iter()
                    .find_map(|key| Some(item.get(key)?.as_str()?.to_owned()))
            };
            let names: Option<Vec<String>> = items.iter().map(name).collect();
            match names.filter(|names| !names.is_empty()) {
                Some(names) => names.into_iter().zip(items).collect::<Map<_, _>>().into(),
                None => items.into(),
            }
        }
        other => other,
    }
}

/// Keys that the object has and the plan does not set, which applying the plan removes.
pub(crate) fn dropped(present: &Value, planned: &Value) -> Vec<String> {
    let mut dropped = Vec::new();
    walk(present, planned, "", &mut |path, _, planned| {
        if planned.is_none() {
            dropped.push(path.to_owned());
        }
    });
    dropped
}

/// Lines with the values of keys that differ, before and after.
pub(crate) fn difference(present: &Value, planned: &Value) -> Vec<String> {
    let mut lines = BTreeMap::new();
    let line = |sign: &str, path: &str, value: &Value| format!("{sign} {path}: {value}");
    walk(present, planned, "", &mut |path, present, planned| {
        let planned = planned.map(|planned| line("+", path, planned));
        let both = [Some(line("-", path, present)), planned]
            .into_iter()
            .flatten();
        lines.insert(path.to_owned(), both.collect::<Vec<_>>());
    });
    walk(planned, present, "", &mut |path, planned, present| {
        if present.is_none() {
            lines.insert(path.to_owned(), vec![line("+", path, planned)]);
        }
    });
    lines.into_values().flatten().collect()
}

/// Calls `see` with each part of `one` that `other` does not have, or has otherwise.
fn walk(
    one: &Value,
    other: &Value,
    path: &str,
    see: &mut impl FnMut(&str, &Value, Option<&Value>),
) {
    let (Value::Object(fields), Value::Object(_)) = (one, other) else {
        if one != other {
            see(path, one, Some(other));
        }
        return;
    };
    for (key, value) in fields {
        let path = if path.is_empty() {
            key.clone()
        } else {
            format!("{path} {key}")
        };
        match other.get(key) {
            Some(other) => walk(value, other, &path, see),
            None => see(&path, value, None),
        }
    }
}

/// Kind, namespace and name, for a person.
pub(crate) fn title(object: &Value) -> String {
    let kind = object
        .get("kind")
        .and_then(Value::as_str)
        .unwrap_or_default();
    let namespace = object
        .pointer("/metadata/namespace")
        .and_then(Value::as_str);
    format!(
        "{kind} {}/{}",
        namespace.unwrap_or_default(),
        name_of(object)
    )
}
