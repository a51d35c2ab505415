//! What a report keeps: of an object the fields that are listed, of a text all but secrets.

use cni_wire::text::printable;
use serde_json::Value;

/// What stands for a secret.
const REMOVED: &str = "[removed]";
/// Ends of the names of settings whose value is a secret, without `-`, `_` and `.`.
const SECRETS: &str = "token password passwd passphrase pwd secret apikey accesskey secretkey privatekey \
    authkey psk credentials authorization signature sig auth pass pat cookie keydata";

fn is_secret(name: &str) -> bool {
    let letters = name.chars().filter(|c| !"-_.".contains(*c));
    let name: String = letters.map(|c| c.to_ascii_lowercase()).collect();
    SECRETS.split(' ').any(|end| name.ends_with(end))
}

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
                match clean == inner {
                    true => text(&string).into(),
                    false => clean.to_string().into(),
                }
            }
            _ => text(&string).into(),
        },
        // Arguments: a flag, then its value.
        Value::Array(items) => {
            let mut is_value = false;
            let items = items.into_iter().map(|item| {
                let is_hidden = is_value && item.is_string();
                is_value = item
                    .as_str()
                    .is_some_and(|text| text.starts_with('-') && is_secret(text));
                match is_hidden {
                    true => REMOVED.into(),
                    false => document(item),
                }
            });
            items.collect()
        }
        Value::Object(fields) => {
            // A variable: its name, then its value.
            let name = fields.get("name").and_then(Value::as_str);
            let names_secret = name.is_some_and(is_secret);
            let fields = fields.into_iter().map(|(key, value)| {
                let is_hidden = is_secret(&key) || (names_secret && key == "value");
                let value = match is_hidden && !value.is_boolean() {
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
        // A key that was cut off does not hide what follows.
        let goes_on = is_base64(raw.trim()) || raw.contains("-----END");
        let is_hidden = begins || (is_in_key && goes_on) || is_key_material(raw);
        is_in_key = (begins || is_in_key && goes_on) && !raw.contains("-----END");
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
    let is_hash = line.bytes().all(|byte| byte.is_ascii_hexdigit());
    line.len() >= 60 && is_base64(line) && !is_hash
}

fn is_base64(line: &str) -> bool {
    line.bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte))
}

fn line(raw: &str) -> String {
    let (mut clean, mut after) = (String::with_capacity(raw.len()), 0);
    let mut before = ' ';
    for (at, c) in raw.char_indices().filter(|(_, c)| *c != '\r') {
        let starts_word = !is_inside_name(before);
        before = c;
        if at < after {
            continue;
        }
        let rest = raw.get(at..).unwrap_or_default();
        match secret(rest, starts_word) {
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

fn is_inside_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || "-_.".contains(c)
}

/// If a secret begins here: the length of what names it, and its own.
fn secret(rest: &str, starts_word: bool) -> Option<(usize, usize)> {
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
    if !starts_word {
        return None;
    }
    let (name, after) = rest.split_at(rest.find(|c| !is_inside_name(c)).unwrap_or(rest.len()));
    if name.is_empty() {
        return None;
    }
    let signed = after.trim_start_matches(['"', '\'', '\\']).trim_start();
    let value = match signed.strip_prefix([':', '=']) {
        Some(value) if is_secret(name) => value,
        _ => {
            let is_flag = name.starts_with("--") && is_secret(name);
            let names_next = is_flag || name.eq_ignore_ascii_case("bearer");
            after.strip_prefix(' ').filter(|_| names_next)?
        }
    };
    // Quotes and escapes say where a value ends, in as many ways as there are programs: the line ends here.
    let value = value.trim_start_matches(' ');
    (!value.is_empty()).then_some((rest.len() - value.len(), value.len()))
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
                "-H 'Authorization: Bearer abc.def' x",
                "-H 'Authorization: [removed]",
            ),
            (
                "Proxy-Authorization: Basic abc",
                "Proxy-Authorization: [removed]",
            ),
            ("client-key-data: LS0t", "client-key-data: [removed]"),
            (r#"{"auth": "abc"}"#, r#"{"auth": [removed]"#),
            ("DB_PASS=abc GITHUB_PAT=def", "DB_PASS=[removed]"),
            (
                r#"{"x":1,"password":"a\"b"}"#,
                r#"{"x":1,"password":[removed]"#,
            ),
            ("with Bearer abc x", "with Bearer [removed]"),
            ("X-Auth-Token: abc x", "X-Auth-Token: [removed]"),
            ("  password: hunter2", "  password: [removed]"),
            ("secretKey = \"a b\" x", "secretKey = [removed]"),
            ("run --token abc x", "run --token [removed]"),
            (
                "GET /?x=1&X-Amz-Signature=abc",
                "GET /?x=1&X-Amz-Signature=[removed]",
            ),
            ("GET /?sig=abc", "GET /?sig=[removed]"),
            (r#"{"pkey": "0x8001"}"#, r#"{"pkey": "0x8001"}"#),
            (
                r#"config "{\"password\":\"abc\"}""#,
                r#"config "{\"password\":[removed]"#,
            ),
            ("GET /?api_key=abc&x=1", "GET /?api_key=[removed]"),
            ("HF_TOKEN=abc run", "HF_TOKEN=[removed]"),
            (
                "dial http://u:p@proxy:1/x",
                "dial http://[removed]@proxy:1/x",
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
        let cut = format!("-----BEGIN PRIVATE KEY-----\n{body}\nlevel=info b");
        assert!(text(&cut).ends_with("[removed]\nlevel=info b"));
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
        let arguments = document(json!(["--token", "planted", "--x", "y"]));
        assert_eq!(arguments, json!(["--token", "[removed]", "--x", "y"]));
        let variable = document(json!({"name": "HF_TOKEN", "value": "planted"}));
        assert_eq!(variable, json!({"name": "HF_TOKEN", "value": "[removed]"}));
        // Of two equal keys the last is read.
        let double = document(json!(r#"{"a":"token=planted", "a":1}"#)).to_string();
        assert!(!double.contains("planted"), "{double}");
    }

    #[test]
    fn a_long_line_is_read_once() {
        for c in [" ", "\"", "\\", "'"] {
            assert_eq!(text(&c.repeat(1 << 18)).trim_end().is_empty(), c == " ");
        }
        let long = text(&"eyJ:// token=a ".repeat(100_000));
        assert_eq!(long, "eyJ:// token=[removed]");
        let long = text(&"eyJ:// a://b@c ".repeat(100_000));
        assert_eq!(long, "eyJ:// a://[removed]@c ".repeat(100_000));
    }
}
