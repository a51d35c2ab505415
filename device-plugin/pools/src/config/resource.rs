//! The name of an extended resource, checked by the kubelet's own rules before it sees it.

use std::fmt;

use serde::Deserialize;

/// Bytes that the API server needs for `requests.` in front of the name in a quota.
const QUOTA_PREFIX: &str = "requests.";
/// Longest DNS subdomain.
const PREFIX_MAX: usize = 253;
/// Longest name part of a qualified name.
const NAME_MAX: usize = 63;

/// An extended resource name, `prefix/name`, that every kubelet accepts.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub struct ResourceName(String);

impl TryFrom<String> for ResourceName {
    type Error = String;

    fn try_from(full: String) -> Result<Self, String> {
        Self::parse(&full)
    }
}

impl ResourceName {
    /// Checks `prefix/name` as the kubelet does in Register
    /// (`IsExtendedResourceName` of Kubernetes' core helpers).
    pub fn parse(full: &str) -> Result<Self, String> {
        let refuse = |reason: String| format!("resource name {full:?}: {reason}");
        let Some((prefix, name)) = full.split_once('/') else {
            return Err(refuse(
                "no \"/\"; write it as prefix/name, for example rdma/hca".into(),
            ));
        };
        check_prefix(prefix).map_err(refuse)?;
        check_name(name).map_err(refuse)?;
        Ok(Self(full.into()))
    }

    /// The name of a resource in a peer's file, which allows letters, digits and what is in `also`.
    pub(super) fn of_peer(prefix: &str, name: &str, also: &str) -> Result<Self, String> {
        if name.is_empty() {
            return Err("resourceName is missing".into());
        }
        let legal = |c: char| c.is_ascii_alphanumeric() || also.contains(c);
        if let Some(bad) = name.chars().find(|c| !legal(*c)) {
            return Err(format!(
                "resourceName {name:?} has the character {bad:?}; letters, digits and {also:?} are \
                 allowed"
            ));
        }
        Self::parse(&format!("{prefix}/{name}"))
    }

    /// The whole name, as the kubelet and pods write it.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ResourceName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

fn check_prefix(prefix: &str) -> Result<(), String> {
    if prefix.is_empty() {
        return Err("nothing before the \"/\"; the prefix is a DNS name such as rdma".into());
    }
    // A plain substring in the kubelet: "mykubernetes.io/x" counts as one of its own.
    if prefix.ends_with("kubernetes.io") {
        return Err("the prefix kubernetes.io belongs to Kubernetes; use your own domain".into());
    }
    if prefix.starts_with(QUOTA_PREFIX) {
        return Err("a prefix that begins with \"requests.\" is reserved for quotas".into());
    }
    let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    let allowed = "lower-case letters, digits, \"-\" and \".\"";
    check_part(
        "prefix",
        prefix,
        PREFIX_MAX - QUOTA_PREFIX.len(),
        legal,
        allowed,
    )?;
    if !prefix.split('.').all(is_framed) {
        return Err("each part of the prefix begins and ends with a letter or digit".into());
    }
    Ok(())
}

fn check_part(
    what: &str,
    text: &str,
    max: usize,
    is_legal: impl Fn(char) -> bool,
    allowed: &str,
) -> Result<(), String> {
    let bytes = text.len();
    if bytes > max {
        return Err(format!("the {what} has {bytes} bytes, at most {max} fit"));
    }
    match text.chars().find(|c| !is_legal(*c)) {
        Some(bad) => Err(format!(
            "character {bad:?} in the {what}; {allowed} are allowed"
        )),
        None => Ok(()),
    }
}

fn is_framed(label: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric();
    label.starts_with(is_plain) && label.ends_with(is_plain)
}

fn check_name(name: &str) -> Result<(), String> {
    if name.is_empty() {
        return Err("the name is empty".into());
    }
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let allowed = "letters, digits, \"-\", \"_\" and \".\"";
    check_part("name", name, NAME_MAX, legal, allowed)?;
    if !is_framed(name) {
        return Err("the name begins and ends with a letter or digit".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_what_the_kubelet_accepts() {
        let longest = format!("{}/{}", "p".repeat(244), "n".repeat(63));
        for name in [
            "a/b",
            "nvidia.com/mlnx-rdma.0",
            "x.y-z/A_b",
            "openshift.io/1",
            &longest,
        ] {
            ResourceName::parse(name).unwrap();
        }
    }

    #[test]
    fn refuses_what_the_kubelet_refuses_and_says_why() {
        let too_long = format!("{}/x", "p".repeat(245));
        let long_name = format!("rdma/{}", "n".repeat(64));
        let cases = [
            ("hca", "no \"/\""),
            ("/hca", "nothing before"),
            ("rdma/", "the name is empty"),
            ("rdma/hca a", "character ' ' in the name"),
            ("rdma/hca:a", "character ':' in the name"),
            ("rdma/hca/a", "character '/' in the name"),
            ("rdma/hca_", "begins and ends"),
            ("rdma/-hca", "begins and ends"),
            ("RDMA/hca", "character 'R' in the prefix"),
            ("rd_ma/hca", "character '_' in the prefix"),
            ("rdma./hca", "each part"),
            (".rdma/hca", "each part"),
            ("kubernetes.io/hca", "belongs to Kubernetes"),
            ("node.kubernetes.io/hca", "belongs to Kubernetes"),
            ("mykubernetes.io/hca", "belongs to Kubernetes"),
            ("requests.rdma/hca", "reserved for quotas"),
            (&too_long, "at most 244 fit"),
            (&long_name, "at most 63"),
            ("rdma/hcá", "character 'á'"),
        ];
        for (name, expected) in cases {
            let message = ResourceName::parse(name).unwrap_err();
            assert!(message.contains(expected), "{name}: {message}");
        }
    }
}
