//! What a report keeps: of an object the fields that are listed, of a text all but secrets.

use cni_wire::text::printable;
use serde_json::Value;

/// What stands for a secret.
const REMOVED: &str = "[removed]";
/// Ends of the names of settings whose value is a secret.
const SECRETS: [&str; 7] = [
    "token", "password", "passwd", "secret", "apikey", "api-key", "_key",
];

/// The fields of an object that `paths` name, such as `spec.containers.image`. A path goes through lists, and
/// ends at a value that is kept whole.
pub(crate) fn keep(value: &Value, paths: &[&str]) -> Value {
    let field = |(key, value): (&String, &Value)| {
        let below = paths
            .iter()
            .filter_map(|path| path.strip_prefix(key.as_str()));
        let below: Vec<&str> = below.collect();
        if below.contains(&"") {
            return Some((key.clone(), value.clone()));
        }
        let below = below.iter().filter_map(|path| path.strip_prefix('.'));
        let below: Vec<&str> = below.collect();
        let is_named = !below.is_empty() && (value.is_object() || value.is_array());
        is_named.then(|| (key.clone(), keep(value, &below)))
    };
    match value {
        Value::Array(items) => items.iter().map(|item| keep(item, paths)).collect(),
        Value::Object(fields) => Value::Object(fields.iter().filter_map(field).collect()),
        _ => Value::Null,
    }
}

/// A document without secrets, also in the documents that its texts are.
pub(crate) fn document(value: Value) -> Value {
    match value {
        Value::String(string) => match serde_json::from_str::<Value>(&string) {
            Ok(inner @ (Value::Object(_) | Value::Array(_))) => {
                let clean = document(inner.clone());
                // As it was written, where there was nothing to remove.
                let is_clean = clean == inner;
                text(&if is_clean { string } else { clean.to_string() }).into()
            }
            _ => text(&string).into(),
        },
        Value::Array(items) => items.into_iter().map(document).collect(),
        Value::Object(fields) => {
            let fields = fields.into_iter().map(|(key, value)| {
                let name = key.to_ascii_lowercase();
                let is_secret = SECRETS.iter().any(|word| name.ends_with(word));
                let value = match is_secret && !value.is_boolean() {
                    true => REMOVED.into(),
                    false => document(value),
                };
                (text(&key), value)
            });
            Value::Object(fields.collect())
        }
        other => other,
    }
}

/// A text without private keys, tokens and passwords; nothing of it steers a terminal.
pub(crate) fn text(raw: &str) -> String {
    let mut is_in_key = false;
    let lines = raw.split('\n').map(|raw| {
        let begins = raw.contains("-----BEGIN") && raw.contains("PRIVATE KEY");
        let is_hidden = is_in_key || begins || is_key_material(raw);
        is_in_key = (is_in_key || begins) && !raw.contains("-----END");
        match is_hidden {
            true => REMOVED.to_owned(),
            false => line(raw),
        }
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// A line of a PEM file, whose first line the text need not have.
fn is_key_material(line: &str) -> bool {
    let line = line.trim();
    let is_base64 = |byte: u8| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte);
    let is_hash = line.bytes().all(|byte| byte.is_ascii_hexdigit());
    line.len() >= 60 && line.bytes().all(is_base64) && !is_hash
}

fn line(raw: &str) -> String {
    let lower = raw.to_ascii_lowercase();
    let (mut clean, mut after) = (String::with_capacity(raw.len()), 0);
    for (at, c) in raw.char_indices().filter(|(_, c)| *c != '\r') {
        if at < after {
            continue;
        }
        let rest = raw.get(at..).unwrap_or_default();
        match secret(rest, lower.get(at..).unwrap_or_default()) {
            Some((name, secret)) => {
                clean += rest.get(..name).unwrap_or_default();
                clean += REMOVED;
                after = at + name + secret;
            }
            None => clean.push(c),
        }
    }
    let words: Vec<String> = clean.split('\t').map(printable).collect();
    words.join("\t")
}

/// If a secret begins here: the length of what names it, and its own.
fn secret(rest: &str, lower: &str) -> Option<(usize, usize)> {
    // A JSON Web Token is base64 of {"...
    if rest.starts_with("eyJ") {
        let is_inside = |c: char| c.is_ascii_alphanumeric() || "-_.+/=".contains(c);
        let length = rest.find(|c| !is_inside(c)).unwrap_or(rest.len());
        return (length >= 20).then_some((0, length));
    }
    // scheme://user:password@host
    if let Some(authority) = rest.strip_prefix("://") {
        let authority = authority.split(['/', '"', ' ']).next()?;
        return Some((3, authority.rfind('@').filter(|at| *at > 0)?));
    }
    let words = ["bearer ", "authorization: basic "];
    let value = words.iter().find_map(|word| lower.strip_prefix(word));
    let value = value.or_else(|| {
        let after = SECRETS.iter().find_map(|word| lower.strip_prefix(word))?;
        let signs = ["=", "\":", "\\\":", "':"];
        signs.iter().find_map(|sign| after.strip_prefix(sign))
    })?;
    let opened = value.trim_start_matches(' ');
    let value = opened.trim_start_matches(['"', '\'', '\\']);
    let is_quoted = value.len() < opened.len();
    let is_end = |c: char| "\"'\\".contains(c) || (!is_quoted && (c == '&' || c.is_whitespace()));
    let length = value.find(is_end).unwrap_or(value.len());
    (length > 0).then_some((rest.len() - value.len(), length))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_listed_fields_are_kept() {
        let pod = json!({
            "metadata": {"name": "p", "managedFields": [1], "annotations": {
                "k8s.v1.cni.cncf.io/networks": "a", "vault/token": "planted"}},
            "spec": {"containers": [{"name": "c", "env": [
                {"name": "A", "value": "planted"},
                {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}]},
            "status": "planted",
        });
        let paths = [
            "metadata.name",
            "metadata.annotations.k8s.v1.cni.cncf.io/networks",
            "spec.containers.name",
            "spec.containers.env.name",
            "spec.containers.env.valueFrom",
            "status.phase",
        ];
        let expected = json!({
            "metadata": {"name": "p", "annotations": {"k8s.v1.cni.cncf.io/networks": "a"}},
            "spec": {"containers": [{"name": "c", "env": [
                {"name": "A"},
                {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}]},
        });
        assert_eq!(keep(&pod, &paths), expected);
    }

    #[test]
    fn secrets_of_a_text_are_removed_and_the_rest_stays() {
        let jwt = format!("eyJhbGciOiJSUzI1NiJ9.{}", "a".repeat(30));
        for (raw, expected) in [
            (
                &*format!("got {jwt}, trying again"),
                "got [removed], trying again",
            ),
            (
                "Authorization: Bearer abc.def x",
                "Authorization: Bearer [removed] x",
            ),
            (
                "Authorization: Basic dTpw",
                "Authorization: Basic [removed]",
            ),
            (
                r#"{"level":"info","Token": "abc"}"#,
                r#"{"level":"info","Token": "[removed]"}"#,
            ),
            (
                r#"config "{\"password\":\"abc\"}""#,
                r#"config "{\"password\":\"[removed]\"}""#,
            ),
            ("GET /?api_key=abc&x=1", "GET /?api_key=[removed]&x=1"),
            (
                r#"{"password": "a b, c", "x": 1}"#,
                r#"{"password": "[removed]", "x": 1}"#,
            ),
            ("HF_TOKEN=abc run", "HF_TOKEN=[removed] run"),
            (
                "dial http://u:p@proxy:1/x",
                "dial http://[removed]@proxy:1/x",
            ),
            (
                "cannot read token: not found",
                "cannot read token: not found",
            ),
            ("from https://[::1]:443/a@b", "from https://[::1]:443/a@b"),
            ("ä\u{1b}[2J\tb\r", "ä\\u{1b}[2J\tb"),
        ] {
            assert_eq!(text(raw), expected, "{raw}");
        }
        let sha = "0123456789abcdef".repeat(4);
        assert_eq!(text(&sha), sha);
    }

    #[test]
    fn a_private_key_is_removed_wherever_it_is_cut() {
        let body = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj";
        let key = format!(
            "-----BEGIN RSA PRIVATE KEY-----\n{body}\nMIIshort\n-----END RSA PRIVATE KEY-----"
        );
        let clean = text(&format!("a\n{key}\nb"));
        assert_eq!(clean.replace("[removed]\n", ""), "a\nb");
        assert_eq!(text(&format!("{body}\nb")), "[removed]\nb");
        let logged = key.replace('\n', "\\n");
        assert_eq!(text(&format!("key: {logged}\nb")), "[removed]\nb");
    }

    #[test]
    fn a_document_in_a_text_is_clean_too() {
        let config = r#"{"type":"x", "etcd":{"etcdPassword":"planted"}}"#;
        let clean = document(json!({"config": config, "text": "{\"a\": 1}", "mountToken": true}));
        assert_eq!(clean["text"], "{\"a\": 1}");
        assert_eq!(clean["mountToken"], true);
        let config: Value = serde_json::from_str(clean["config"].as_str().unwrap()).unwrap();
        let expected = json!({"type": "x", "etcd": {"etcdPassword": "[removed]"}});
        assert_eq!(config, expected);
        // Of two equal keys the last is read.
        let double = document(json!(r#"{"a":"token=planted", "a":1}"#)).to_string();
        assert!(!double.contains("planted"), "{double}");
    }

    #[test]
    fn a_long_line_is_read_once() {
        let long = text(&"eyJ:// token=a ".repeat(100_000));
        assert_eq!(long, "eyJ:// token=[removed] ".repeat(100_000));
    }
}
