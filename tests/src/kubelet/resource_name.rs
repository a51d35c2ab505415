//! Which names the kubelet accepts for a device plugin's resource.
//!
//! A registration is refused unless the name is that of an extended resource:
//! qualified, outside `kubernetes.io`, and still a qualified name with
//! `requests.` in front (as quota objects spell it).

use thiserror::Error;

/// Why a name is no extended resource.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotExtended {
    /// No `/`, or the domain `kubernetes.io`.
    #[error("it is a native resource (no prefix, or the prefix kubernetes.io)")]
    Native,
    /// It begins with `requests.`.
    #[error("it begins with requests.")]
    Requests,
    /// More than one `/`.
    #[error("it has more than one slash")]
    Slashes,
    /// The prefix is no DNS subdomain of at most 253 bytes, `requests.` included.
    #[error("its prefix is no DNS subdomain (lower-case letters, digits, - and .)")]
    Prefix,
    /// The part after the slash is not 1 to 63 of `[A-Za-z0-9._-]` between alphanumerics.
    #[error("its name part is not 1 to 63 of A-Z a-z 0-9 . _ - between alphanumerics")]
    Name,
}

/// Checks a resource name as the kubelet does in `Register`.
///
/// # Errors
/// The first rule it breaks.
pub fn check(resource: &str) -> Result<(), NotExtended> {
    if !resource.contains('/') || resource.contains("kubernetes.io/") {
        return Err(NotExtended::Native);
    }
    if resource.starts_with("requests.") {
        return Err(NotExtended::Requests);
    }
    let quota = format!("requests.{resource}");
    let (prefix, name) = quota.split_once('/').ok_or(NotExtended::Native)?;
    if name.contains('/') {
        return Err(NotExtended::Slashes);
    }
    if prefix.len() > 253 || !prefix.split('.').all(is_dns_label) {
        return Err(NotExtended::Prefix);
    }
    if name.len() > 63 || !between_alphanumerics(name, |byte| b"-_.".contains(&byte)) {
        return Err(NotExtended::Name);
    }
    Ok(())
}

fn is_dns_label(label: &str) -> bool {
    !label.bytes().any(|byte| byte.is_ascii_uppercase())
        && between_alphanumerics(label, |byte| byte == b'-')
}

fn between_alphanumerics(text: &str, inner: fn(u8) -> bool) -> bool {
    let ends = [text.bytes().next(), text.bytes().last()];
    ends.iter()
        .all(|end| end.is_some_and(|byte| byte.is_ascii_alphanumeric()))
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || inner(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_what_clusters_use() {
        for name in [
            "rdma/hca_shared_devices_a",
            "rdma/hca",
            "nvidia.com/gpu",
            "example.com/rail0",
            "a.b-c.d/X",
            "mellanox.com/A.b_c-9",
        ] {
            assert_eq!(check(name), Ok(()), "{name}");
        }
        let longest = format!("rdma/{}", "a".repeat(63));
        assert_eq!(check(&longest), Ok(()));
    }

    #[test]
    fn refuses_by_the_rule_broken() {
        let long_name = format!("rdma/{}", "a".repeat(64));
        let long_prefix = format!("{}/hca", ["a"; 123].join("."));
        for (name, rule) in [
            ("hca", NotExtended::Native),
            ("", NotExtended::Native),
            ("kubernetes.io/hca", NotExtended::Native),
            ("node.kubernetes.io/hca", NotExtended::Native),
            ("requests.rdma/hca", NotExtended::Requests),
            ("rdma/hca/0", NotExtended::Slashes),
            ("/hca", NotExtended::Prefix),
            ("RDMA/hca", NotExtended::Prefix),
            ("rd ma/hca", NotExtended::Prefix),
            ("rdma_x/hca", NotExtended::Prefix),
            ("-rdma/hca", NotExtended::Prefix),
            ("rdma./hca", NotExtended::Prefix),
            (&long_prefix, NotExtended::Prefix),
            ("rdma/", NotExtended::Name),
            ("rdma/_hca", NotExtended::Name),
            ("rdma/hca-", NotExtended::Name),
            ("rdma/h ca", NotExtended::Name),
            ("rdma/hcä", NotExtended::Name),
            (&long_name, NotExtended::Name),
        ] {
            assert_eq!(check(name), Err(rule), "{name}");
        }
    }
}
