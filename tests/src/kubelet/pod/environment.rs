//! Environment variables of a container: given, from a field of the pod, with others in them.

use std::net::IpAddr;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use super::Pod;

/// An environment variable.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EnvVar {
    /// Name.
    pub name: String,
    /// Value.
    #[serde(default)]
    pub value: String,
    /// A field of the pod instead.
    #[serde(default)]
    pub value_from: Option<ValueFrom>,
}

/// Where a variable's value comes from.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ValueFrom {
    /// A field of the pod.
    pub field_ref: FieldRef,
}

/// A field of the pod.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FieldRef {
    /// `spec.nodeName`, `status.hostIP`, `status.hostIPs`, `metadata.name`,
    /// `metadata.namespace` or `metadata.uid`.
    pub field_path: String,
}

impl EnvVar {
    /// Its value in a pod on the node of this name and address; references to other variables
    /// are still in it.
    ///
    /// # Errors
    /// It is taken from a field that the stand-in does not know.
    pub fn value_in(&self, pod: &Pod, node: &str, address: IpAddr) -> Result<String> {
        let Some(from) = &self.value_from else {
            return Ok(self.value.clone());
        };
        let metadata = &pod.metadata;
        Ok(match from.field_ref.field_path.as_str() {
            "spec.nodeName" => node.to_owned(),
            // The kubelet joins a dual-stack node's two addresses with a comma; this node has one.
            "status.hostIP" | "status.hostIPs" => address.to_string(),
            "metadata.name" => metadata.name.clone(),
            "metadata.namespace" => metadata.namespace.clone(),
            "metadata.uid" => metadata.uid.clone(),
            other => bail!("variable {}: no field {other} is known here", self.name),
        })
    }
}

/// Puts values in the place of `$(NAME)`; `$$` stands for a dollar sign, and a name that is not
/// known stays as it is, as the kubelet has it.
#[must_use]
pub fn expanded(text: &str, known: &[(String, String)]) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        out.push_str(before);
        if let Some(after) = after.strip_prefix('$') {
            out.push('$');
            rest = after;
            continue;
        }
        let named = after.strip_prefix('(').and_then(|a| a.split_once(')'));
        let value = named.and_then(|(name, after)| {
            let (_, value) = known.iter().rev().find(|(known, _)| known == name)?;
            Some((value, after))
        });
        match value {
            Some((value, after)) => {
                out.push_str(value);
                rest = after;
            }
            None => {
                out.push('$');
                rest = after;
            }
        }
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_put_in() {
        let known = [
            ("A".to_owned(), "1".to_owned()),
            ("B".to_owned(), "2".to_owned()),
        ];
        for (text, wanted) in [
            ("$(A):9834", "1:9834"),
            ("$(A)$(B)", "12"),
            ("$(C) $A $", "$(C) $A $"),
            ("$$(A)", "$(A)"),
        ] {
            assert_eq!(expanded(text, &known), wanted);
        }
    }
}
