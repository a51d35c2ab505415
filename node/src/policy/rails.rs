//! `rails` of the policy: which rail of the fabric a NIC of this node is on.
//!
//! A key is a PCI address, a pattern of the netdev's name on the host or of its auxiliary device, or
//! a network that has an address of the netdev; its value is the rail's number. A key with `/` is a
//! network and one with `:` a PCI address, because no netdev's name has either.

use super::read;
use crate::pattern::Pattern;
use ipnetwork::IpNetwork;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// The highest number of a rail.
pub const MAX_RAIL: u32 = 255;

/// The rails of a node's NICs; empty where the policy says nothing of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "BTreeMap<String, read::Rail>")]
pub struct Rails(pub(super) Vec<Entry>);

/// One key and its rail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) nic: Nic,
    pub(super) rail: u32,
}

/// Which NICs a key means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Nic {
    Pci(Pattern),
    Name(Pattern),
    Subnet(IpNetwork),
}

/// What a NIC is compared by.
#[derive(Debug, Clone, Copy)]
pub struct RailCandidate<'a> {
    /// The HCA, as units name it.
    pub hca: &'a str,
    /// The netdev's name on the host.
    pub netdev: &'a str,
    /// The netdev's addresses on the host.
    pub addresses: &'a [IpAddr],
}

impl TryFrom<BTreeMap<String, read::Rail>> for Rails {
    type Error = String;

    fn try_from(rails: BTreeMap<String, read::Rail>) -> Result<Self, String> {
        let entry = |(key, read::Rail(rail)): (String, read::Rail)| match Nic::parse(&key) {
            Some(nic) => Ok(Entry { key, nic, rail }),
            None => Err(format!(
                "the key {key:?} must be a PCI address, a netdev's name or pattern, or a network \
                 (10.1.0.0/24)"
            )),
        };
        rails
            .into_iter()
            .map(entry)
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

impl Rails {
    /// Whether the policy says nothing of rails.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The rail of a NIC; none where no key means it.
    ///
    /// # Errors
    /// Two keys mean it and name different rails.
    pub fn of(&self, nic: &RailCandidate<'_>) -> Result<Option<u32>, String> {
        let mut entries = self.0.iter().filter(|entry| entry.nic.means(nic));
        let Some(first) = entries.next() else {
            return Ok(None);
        };
        match entries.find(|other| other.rail != first.rail) {
            None => Ok(Some(first.rail)),
            Some(other) => Err(format!(
                "{:?} puts it on rail {}, {:?} on rail {}",
                first.key, first.rail, other.key, other.rail
            )),
        }
    }
}

impl Nic {
    /// Reads a key; none for one that is not an address, no network and no pattern.
    pub(super) fn parse(key: &str) -> Option<Self> {
        if key.contains('/') {
            return read::network(key).map(Nic::Subnet);
        }
        if key.is_empty() {
            return None;
        }
        match key.contains(':') {
            // People write PCI addresses in capitals, too.
            true => Pattern::parse(&key.to_ascii_lowercase()).ok().map(Nic::Pci),
            false => Pattern::parse(key).ok().map(Nic::Name),
        }
    }

    fn means(&self, nic: &RailCandidate<'_>) -> bool {
        match self {
            Nic::Pci(pattern) => pattern.matches(nic.hca),
            Nic::Name(pattern) => pattern.matches(nic.netdev) || pattern.matches(nic.hca),
            Nic::Subnet(network) => nic.addresses.iter().any(|a| network.contains(*a)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rails(entries: &[(&str, u32)]) -> Rails {
        let entry = |(key, rail): &(&str, u32)| Entry {
            key: (*key).to_owned(),
            nic: Nic::parse(key).unwrap(),
            rail: *rail,
        };
        Rails(entries.iter().map(entry).collect())
    }

    fn of(rails: &Rails, hca: &str, netdev: &str, addresses: &[&str]) -> Option<u32> {
        let addresses: Vec<IpAddr> = addresses.iter().map(|a| a.parse().unwrap()).collect();
        let nic = RailCandidate {
            hca,
            netdev,
            addresses: &addresses,
        };
        rails.of(&nic).unwrap()
    }

    #[test]
    fn a_nic_is_meant_by_its_pci_address_its_name_or_its_network() {
        let rails = rails(&[
            ("0000:3B:00.0", 0),
            ("ens2*", 1),
            ("mlx5_core.sf.4", 2),
            ("10.3.0.0/16", 3),
            ("fd04::/64", 4),
        ]);
        assert_eq!(of(&rails, "0000:3b:00.0", "ens1", &[]), Some(0));
        assert_eq!(of(&rails, "0000:5e:00.0", "ens2f0", &[]), Some(1));
        assert_eq!(of(&rails, "mlx5_core.sf.4", "en3f0pf0sf4", &[]), Some(2));
        assert_eq!(of(&rails, "x", "y", &["192.0.2.1", "10.3.9.9"]), Some(3));
        assert_eq!(of(&rails, "x", "y", &["fd04::7"]), Some(4));
        assert_eq!(of(&rails, "x", "y", &["10.4.0.1", "fd05::7"]), None);
        assert_eq!(of(&Rails::default(), "0000:3b:00.0", "ens1", &[]), None);
    }

    #[test]
    fn two_keys_may_mean_a_nic_if_they_agree() {
        let agree = rails(&[("0000:3b:00.0", 3), ("ens1", 3)]);
        assert_eq!(of(&agree, "0000:3b:00.0", "ens1", &[]), Some(3));
        let disagree = rails(&[("0000:3b:00.0", 3), ("10.0.0.0/8", 3), ("ens*", 4)]);
        let nic = RailCandidate {
            hca: "0000:3b:00.0",
            netdev: "ens1",
            addresses: &[],
        };
        let conflict = disagree.of(&nic).unwrap_err();
        assert_eq!(
            conflict.to_string(),
            "\"0000:3b:00.0\" puts it on rail 3, \"ens*\" on rail 4"
        );
    }

    #[test]
    fn a_network_is_compared_by_its_length() {
        let all = rails(&[("0.0.0.0/0", 1)]);
        assert_eq!(of(&all, "x", "y", &["203.0.113.9"]), Some(1));
        assert_eq!(of(&all, "x", "y", &["fd00::1"]), None);
        let one = rails(&[("10.0.0.7/32", 1), ("::/0", 2)]);
        assert_eq!(of(&one, "x", "y", &["10.0.0.7"]), Some(1));
        assert_eq!(of(&one, "x", "y", &["10.0.0.8"]), None);
        assert_eq!(of(&one, "x", "y", &["fd00::1"]), Some(2));
        for wrong in ["", "10.0.0.0/33", "x/8", "fd00::/129", "10.0.0.0/"] {
            assert_eq!(Nic::parse(wrong), None, "{wrong:?}");
        }
    }
}
