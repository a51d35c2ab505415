//! What a plan would change in objects that the cluster has. Pure.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::documents::{name_of, objects};

/// Values of an object by their keys; texts that are documents are read.
pub(crate) type Keys = BTreeMap<String, String>;

/// What a person edits of an object.
pub(crate) fn keys(object: &Value) -> Keys {
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

fn flatten(value: &Value, path: &str, keys: &mut Keys) {
    let named = |item: &Value| {
        item["resource"]
            .as_str()
            .or(item["type"].as_str())
            .map(str::to_owned)
    };
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (key, value) in fields {
                flatten(value, &format!("{path} {key}"), keys);
            }
        }
        Value::Array(items)
            if !items.is_empty() && items.iter().all(|item| named(item).is_some()) =>
        {
            for item in items {
                flatten(
                    item,
                    &format!("{path} {}", named(item).unwrap_or_default()),
                    keys,
                );
            }
        }
        _ => _ = keys.insert(path.to_owned(), value.to_string()),
    }
}

/// Lines with the values of keys that differ, before and after.
pub(crate) fn difference(present: &Keys, planned: &Keys) -> Vec<String> {
    let mut lines = Vec::new();
    let all: BTreeSet<&String> = present.keys().chain(planned.keys()).collect();
    for key in all
        .into_iter()
        .filter(|key| present.get(*key) != planned.get(*key))
    {
        for (sign, keys) in [("-", present), ("+", planned)] {
            lines.extend(keys.get(key).map(|value| format!("{sign} {key}: {value}")));
        }
    }
    lines
}

/// Kind, namespace and name, for a person.
pub(crate) fn title(object: &Value) -> String {
    let text = |path| {
        object
            .pointer(path)
            .and_then(Value::as_str)
            .unwrap_or_default()
    };
    format!(
        "{} {}/{}",
        text("/kind"),
        text("/metadata/namespace"),
        name_of(object)
    )
}
