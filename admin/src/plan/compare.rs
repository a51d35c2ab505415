//! What a plan would change in objects that the cluster has. Pure.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::documents::{name_of, objects, text_at};

/// Values of an object by their keys; texts that are documents are read.
type Keys = BTreeMap<String, String>;

/// What a person edits of an object.
fn keys(object: &Value) -> Keys {
    let mut keys = Keys::new();
    for part in ["data", "spec"] {
        for (key, value) in object[part].as_object().into_iter().flatten() {
            let documents = objects(key, value.as_str().unwrap_or_default());
            let document = documents.ok().and_then(|mut documents| documents.pop());
            flatten(document.as_ref().unwrap_or(value), key, &mut keys);
        }
    }
    // Other annotations are kubectl's and others'.
    let resource = object.pointer("/metadata/annotations/k8s.v1.cni.cncf.io~1resourceName");
    keys.extend(resource.map(|resource| ("resourceName".to_owned(), resource.to_string())));
    keys
}

/// Items of lists are known by their resource or type, other lists are values.
fn flatten(value: &Value, path: &str, keys: &mut Keys) {
    let name = |item: &'_ Value| {
        Some(
            item["resource"]
                .as_str()
                .or(item["type"].as_str())?
                .to_owned(),
        )
    };
    let named: Option<Vec<(String, &Value)>> = match value {
        Value::Object(fields) => Some(
            fields
                .iter()
                .map(|(key, value)| (key.clone(), value))
                .collect(),
        ),
        Value::Array(items) => items.iter().map(|item| Some((name(item)?, item))).collect(),
        _ => None,
    };
    match named.filter(|parts| !parts.is_empty()) {
        Some(parts) => {
            for (name, part) in parts {
                flatten(part, &format!("{path} {name}"), keys);
            }
        }
        None => _ = keys.insert(path.to_owned(), value.to_string()),
    }
}

/// Lines with the values of keys that differ, before and after.
pub(crate) fn difference(present: &Value, planned: &Value) -> Vec<String> {
    let (present, planned) = (keys(present), keys(planned));
    let mut lines = Vec::new();
    let all: BTreeSet<&String> = present.keys().chain(planned.keys()).collect();
    for key in all {
        let (before, after) = (present.get(key), planned.get(key));
        for (sign, value) in [("-", before), ("+", after)] {
            lines.extend(
                value
                    .filter(|_| before != after)
                    .map(|value| format!("{sign} {key}: {value}")),
            );
        }
    }
    lines
}

/// Kind, namespace and name, for a person.
pub(crate) fn title(object: &Value) -> String {
    let (kind, namespace) = (
        text_at(object, "/kind"),
        text_at(object, "/metadata/namespace"),
    );
    format!("{kind} {namespace}/{}", name_of(object))
}
