//! Which netdevs a node's policy lets the CNI plugin take or use: selectors
//! with the keys of the RDMA shared device plugin's `selectors`, and a few more.
//!
//! Pure: a selector is compared with facts somebody else looked up.

/// One entry of `allow.netdevs`. Any word of a list will do, and every list
/// must; an empty list demands nothing. `*` and `?` stand for any text and any letter.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selector {
    /// Netdev names on the host, for example `ens1f*`.
    pub if_names: Vec<String>,
    /// PCI addresses (`0000:3b:00.0`) or auxiliary device names (`mlx5_core.sf.4`).
    pub pci_addresses: Vec<String>,
    /// PCI vendor IDs, four hex digits without `0x`, lower case.
    pub vendors: Vec<String>,
    /// PCI device IDs, four hex digits without `0x`, lower case.
    pub device_ids: Vec<String>,
    /// Kernel drivers, for example `mlx5_core`.
    pub drivers: Vec<String>,
    /// `ether` or `infiniband`.
    pub link_types: Vec<String>,
    /// RDMA device names, for example `mlx5_0`.
    pub rdma_devices: Vec<String>,
}

/// What is known about a netdev that somebody wants to use. An unknown fact
/// fails a selector that asks for it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Candidate<'a> {
    /// Name on the host.
    pub if_name: &'a str,
    /// PCI address or auxiliary device name.
    pub pci_address: Option<&'a str>,
    /// PCI vendor, four lower-case hex digits.
    pub vendor: Option<&'a str>,
    /// PCI device, four lower-case hex digits.
    pub device_id: Option<&'a str>,
    /// Kernel driver of the bus device.
    pub driver: Option<&'a str>,
    /// `ether` or `infiniband`.
    pub link_type: Option<&'a str>,
    /// RDMA device of this netdev.
    pub rdma_device: Option<&'a str>,
}

impl Selector {
    /// Whether every list that demands something accepts `candidate`.
    #[must_use]
    pub fn matches(&self, candidate: &Candidate<'_>) -> bool {
        let ok = |wanted: &[String], fact: Option<&str>| {
            wanted.is_empty() || fact.is_some_and(|fact| wanted.iter().any(|w| glob(w, fact)))
        };
        ok(&self.if_names, Some(candidate.if_name))
            && ok(&self.pci_addresses, candidate.pci_address)
            && ok(&self.vendors, candidate.vendor)
            && ok(&self.device_ids, candidate.device_id)
            && ok(&self.drivers, candidate.driver)
            && ok(&self.link_types, candidate.link_type)
            && ok(&self.rdma_devices, candidate.rdma_device)
    }
}

/// `*` matches any run of bytes, `?` any single byte.
fn glob(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut p, mut t) = (0, 0);
    // Where to go on after the last `*` when a literal fails.
    let mut retry: Option<(usize, usize)> = None;
    while let Some(&byte) = text.get(t) {
        match pattern.get(p) {
            Some(b'*') => {
                retry = Some((p + 1, t));
                p += 1;
            }
            Some(&want) if want == b'?' || want == byte => {
                p += 1;
                t += 1;
            }
            _ => match retry {
                Some((after, from)) => {
                    retry = Some((after, from + 1));
                    p = after;
                    t = from + 1;
                }
                None => return false,
            },
        }
    }
    pattern
        .get(p..)
        .is_none_or(|rest| rest.iter().all(|b| *b == b'*'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(words: &[&str]) -> Vec<String> {
        words.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn lists_are_ored_inside_and_anded_together() {
        let selector = Selector {
            if_names: list(&["ens1f*", "ib0"]),
            vendors: list(&["15b3"]),
            ..Selector::default()
        };
        let nic = Candidate {
            if_name: "ens1f0np0",
            vendor: Some("15b3"),
            ..Candidate::default()
        };
        assert!(selector.matches(&nic));
        assert!(selector.matches(&Candidate {
            if_name: "ib0",
            ..nic
        }));
        assert!(!selector.matches(&Candidate {
            if_name: "eth0",
            ..nic
        }));
        assert!(!selector.matches(&Candidate {
            vendor: Some("8086"),
            ..nic
        }));
        assert!(
            !selector.matches(&Candidate {
                vendor: None,
                ..nic
            }),
            "an unknown fact matched"
        );
    }

    #[test]
    fn an_empty_selector_demands_nothing() {
        assert!(Selector::default().matches(&Candidate::default()));
    }

    #[test]
    fn globs() {
        for (pattern, text, is) in [
            ("*", "", true),
            ("ens*f?", "ens1f0", true),
            ("ens*f?", "ens1f0np0", false),
            ("ens*f?*", "ens1f0np0", true),
            ("*0", "a0b0", true),
            ("*0", "a0b", false),
            ("", "x", false),
            ("0000:3b:00.*", "0000:3b:00.1", true),
            ("a**b", "ab", true),
        ] {
            assert_eq!(glob(pattern, text), is, "{pattern} {text}");
        }
    }
}
