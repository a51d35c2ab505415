//! Which netdevs a node's policy lets the CNI plugin take or use: selectors
//! with the keys of the RDMA shared device plugin's `selectors`, and a few more.
//!
//! Pure: a selector is compared with facts that the caller read.

use super::read;
use crate::pattern::Pattern;
use serde::Deserialize;

/// One entry of `allow.netdevs`. Any word of a list will do, and every list
/// must; an empty list demands nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Selector {
    /// Netdev names on the host, for example `ens1f*`.
    #[serde(deserialize_with = "read::patterns")]
    pub if_names: Vec<Pattern>,
    /// PCI addresses (`0000:3b:00.0`) or auxiliary device names (`mlx5_core.sf.4`).
    #[serde(deserialize_with = "read::patterns")]
    pub pci_addresses: Vec<Pattern>,
    /// PCI vendor IDs, four hex digits without `0x`, lower case.
    #[serde(deserialize_with = "read::hex_patterns")]
    pub vendors: Vec<Pattern>,
    /// PCI device IDs, four hex digits without `0x`, lower case.
    #[serde(rename = "deviceIDs", deserialize_with = "read::hex_patterns")]
    pub device_ids: Vec<Pattern>,
    /// Kernel drivers, for example `mlx5_core`.
    #[serde(deserialize_with = "read::patterns")]
    pub drivers: Vec<Pattern>,
    #[serde(deserialize_with = "read::patterns")]
    pub link_types: Vec<Pattern>,
    /// RDMA device names, for example `mlx5_0`.
    #[serde(deserialize_with = "read::patterns")]
    pub rdma_devices: Vec<Pattern>,
}

/// What is known about a netdev that somebody wants to use. An unknown fact
/// fails a selector that asks for it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Candidate<'a> {
    pub if_name: &'a str,
    /// PCI address or auxiliary device name.
    pub pci_address: Option<&'a str>,
    /// PCI vendor, four lower-case hex digits.
    pub vendor: Option<&'a str>,
    /// PCI device, four lower-case hex digits.
    pub device_id: Option<&'a str>,
    /// Kernel driver of the bus device.
    pub driver: Option<&'a str>,
    pub link_type: Option<&'a str>,
    /// RDMA device of this netdev.
    pub rdma_device: Option<&'a str>,
}

impl Selector {
    /// Whether every list that demands something accepts `candidate`.
    #[must_use]
    pub fn matches(&self, candidate: &Candidate<'_>) -> bool {
        let ok = |wanted: &[Pattern], fact: Option<&str>| {
            wanted.is_empty() || fact.is_some_and(|fact| wanted.iter().any(|w| w.matches(fact)))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn list(words: &[&str]) -> Vec<Pattern> {
        words
            .iter()
            .map(|word| Pattern::parse(word).unwrap())
            .collect()
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
}
