//! JSON or YAML files of an administrator: network configurations and objects of Kubernetes.

use anyhow::{Result, anyhow};
use serde_json::{Map, Value, json};

/// The JSON document, or the YAML documents, of a text; `place` is its file, for messages.
///
/// # Errors
/// It is neither.
pub(crate) fn documents(place: &str, text: &str) -> Result<Vec<Value>> {
    if let Ok(one) = serde_json::from_str(text) {
        return Ok(vec![one]);
    }
    // The objects of a large cluster are beyond the limits that hold for untrusted text.
    let options = serde_saphyr::options! { budget: None };
    serde_saphyr::from_multiple_with_options(text, options).map_err(|error| {
        let error = error.without_snippet();
        anyhow!("{place} is neither YAML nor JSON: {error}")
    })
}

/// The documents of a text, with the items of lists (`kind: List`) in their place.
///
/// # Errors
/// It is neither YAML nor JSON.
pub(crate) fn objects(place: &str, text: &str) -> Result<Vec<Value>> {
    let mut objects = Vec::new();
    for mut document in documents(place, text)? {
        let is_list = (document.get("kind").and_then(Value::as_str))
            .is_some_and(|kind| kind.ends_with("List"));
        let items = document.get_mut("items").filter(|_| is_list);
        match items.and_then(Value::as_array_mut).map(std::mem::take) {
            Some(items) => objects.extend(items),
            None => objects.push(document),
        }
    }
    Ok(objects)
}

/// Whether an object is a `NetworkAttachmentDefinition`.
pub(crate) fn is_definition(object: &Value) -> bool {
    (object.get("kind")).is_some_and(|kind| kind == "NetworkAttachmentDefinition")
}

/// The plugins in the configuration of a `NetworkAttachmentDefinition`, if it can be read.
pub(crate) fn plugins(definition: &Value) -> Vec<Value> {
    let config: Value =
        serde_json::from_str(text_at(definition, "/spec/config")).unwrap_or_default();
    match config.get("plugins").and_then(Value::as_array) {
        Some(plugins) => plugins.clone(),
        None => vec![config],
    }
}

/// The policy that the chart's values have by default.
pub(crate) fn default_policy() -> Value {
    json!({"version": 1, "stores": {"default": {"type": "kubernetes"}}})
}

/// The `NetworkAttachmentDefinition` that the chart makes of an entry of its value `networks`.
pub(crate) fn definition(name: &str, network: &Value) -> Value {
    let config = json!({"cniVersion": "1.0.0", "name": name, "plugins": network["plugins"]});
    let namespace = network["namespace"].as_str().unwrap_or("default");
    let mut metadata = json!({"name": name, "namespace": namespace});
    if let Some(resource) = network["resourceName"].as_str() {
        let annotations = json!({"k8s.v1.cni.cncf.io/resourceName": resource});
        put(&mut metadata, "annotations", annotations);
    }
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
        "metadata": metadata, "spec": {"config": format!("{config:#}\n")},
    })
}

/// The name of an object; empty where it has none.
pub(crate) fn name_of(object: &Value) -> &str {
    text_at(object, "/metadata/name")
}

/// Sets a field of an object; `null` becomes one.
pub(crate) fn put(object: &mut Value, key: &str, value: Value) {
    let mut fields = match object.take() {
        Value::Object(fields) => fields,
        _ => Map::new(),
    };
    fields.insert(key.to_owned(), value);
    *object = Value::Object(fields);
}

/// Sets the keys of `changes` in `object`, as Helm does with values.
pub(crate) fn merge(object: &mut Value, changes: &Value) {
    match (object, changes) {
        (Value::Object(object), Value::Object(changes)) => {
            for (key, change) in changes {
                merge(object.entry(key).or_insert(Value::Null), change);
            }
        }
        (object, change) => *object = change.clone(),
    }
}

/// Text in an object; empty where it has none.
pub(crate) fn text_at<'a>(object: &'a Value, pointer: &str) -> &'a str {
    let text = object.pointer(pointer).and_then(Value::as_str);
    text.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<Value>> {
        documents("objects.yaml", text)
    }

    #[test]
    fn documents_are_read_one_by_one_and_words_stay_words() {
        let two = read("id: '12e4'\n---\n# nothing\n---\nkind: 15b3\n").unwrap();
        assert_eq!(two, [json!({"id": "12e4"}), json!({"kind": "15b3"})]);
        assert_eq!(read("{\"a\":\t[1]}").unwrap(), [json!({"a": [1]})]);
        let error = read("a: 1\na: 2\n").unwrap_err().to_string();
        assert!(error.contains("neither YAML nor JSON"), "{error}");
    }

    #[test]
    fn quoted_text_may_continue_at_the_left_margin() {
        let text = "kind: NetworkAttachmentDefinition\nspec:\n  config: '{\n\t\"type\": \"x\"\n}'\n\
                    items:\n- a: \"b\nc\"\n- {d: 'e\nf'}\n";
        let expected = json!({
            "kind": "NetworkAttachmentDefinition",
            "spec": {"config": "{ \"type\": \"x\" }"},
            "items": [{"a": "b c"}, {"d": "e f"}],
        });
        assert_eq!(read(text).unwrap(), [expected]);
    }

    #[test]
    fn the_objects_of_a_large_cluster_are_read() {
        let text = "- 1\n".repeat(300_000);
        let read = read(&text).unwrap();
        assert_eq!(read[0].as_array().map(Vec::len), Some(300_000));
    }

    #[test]
    fn items_of_a_list_are_objects() {
        let text = "kind: List\nitems: [{a: 1}, {a: 2}]\n---\na: 3\n";
        let objects = objects("x", text).unwrap();
        assert_eq!(objects, [json!({"a": 1}), json!({"a": 2}), json!({"a": 3})]);
    }
}
