//! The pod annotation `k8s.v1.cni.cncf.io/networks`: `namespace/name@interface`
//! separated by commas, or a JSON list.

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::{Map, Value};

/// One network a pod asks for.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct Selection {
    pub(super) name: String,
    #[serde(default)]
    pub(super) namespace: String,
    #[serde(default)]
    pub(super) interface: Option<String>,
    #[serde(default)]
    pub(super) ips: Option<Vec<String>>,
    #[serde(default)]
    pub(super) mac: Option<String>,
    #[serde(default)]
    pub(super) infiniband_guid: Option<String>,
    #[serde(default)]
    pub(super) cni_args: Option<Map<String, Value>>,
}

/// The networks of an annotation, in its order; those without a namespace are the pod's.
pub(super) fn parse(annotation: &str, pod_namespace: &str) -> Result<Vec<Selection>> {
    let mut selections = if annotation.contains(['[', '{', '"']) {
        serde_json::from_str(annotation).context("parse the networks annotation as JSON")?
    } else {
        annotation
            .split(',')
            .map(parse_short)
            .collect::<Result<Vec<_>>>()?
    };
    for selection in &mut selections {
        if selection.namespace.is_empty() {
            pod_namespace.clone_into(&mut selection.namespace);
        }
    }
    Ok(selections)
}

fn parse_short(item: &str) -> Result<Selection> {
    let (namespace, rest) = item.trim().split_once('/').unwrap_or(("", item.trim()));
    let (name, interface) = match rest.split_once('@') {
        None => (rest, None),
        Some((name, interface)) => (name, Some(interface.to_owned())),
    };
    let label = |text: &str| {
        let inner = text
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
        inner && !text.is_empty() && !text.starts_with('-') && !text.ends_with('-')
    };
    if !label(name) || !(namespace.is_empty() || label(namespace)) {
        bail!("invalid network object {item:?} in the networks annotation");
    }
    Ok(Selection {
        name: name.to_owned(),
        namespace: namespace.to_owned(),
        interface,
        ips: None,
        mac: None,
        infiniband_guid: None,
        cni_args: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_short_form() {
        let found = parse("net-a, other/net-b@rail0", "default").unwrap();
        let seen: Vec<_> = found
            .iter()
            .map(|s| {
                (
                    s.namespace.as_str(),
                    s.name.as_str(),
                    s.interface.as_deref(),
                )
            })
            .collect();
        assert_eq!(
            seen,
            [
                ("default", "net-a", None),
                ("other", "net-b", Some("rail0"))
            ]
        );
    }

    #[test]
    fn reads_the_json_form() {
        let text = r#"[{"name": "net", "interface": "rail0", "ips": ["10.0.0.9/24"],
            "mac": "02:00:00:00:00:01", "infiniband-guid": "c2:11:22:33:44:55:66:77",
            "cni-args": {"rail": 0}}]"#;
        let found = parse(text, "default").unwrap().remove(0);
        assert_eq!(found.namespace, "default");
        assert_eq!(found.ips, Some(vec!["10.0.0.9/24".to_owned()]));
        assert_eq!(found.cni_args.unwrap()["rail"], 0);
    }

    #[test]
    fn refuses_what_it_cannot_honour() {
        for text in [
            "",
            "a/b/c",
            "Net",
            "net,",
            "[{\"name\": \"net\", \"default-route\": []}]",
        ] {
            assert!(parse(text, "default").is_err(), "{text}");
        }
    }
}
