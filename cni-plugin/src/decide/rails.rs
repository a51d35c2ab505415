//! On which rail each NIC of an attachment is, and with `devices: all` what its interface is called
//! in the pod. Decided for all of them before anything is changed. Pure.
//!
//! A rail has the same number on every node, or the attachment is refused: addresses and names of a
//! job's pods are compared by it. The node's policy numbers the rails; without that, the place of a
//! NIC in its pool does, where nothing shows that places differ from node to node.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::Path,
};

use attachment::part::Part;
use cni_wire::{Code, IfName, text::list};
use hca::HcaId;
use netlink::sysctl;
use node::policy::{RailCandidate, Rails};

use crate::{
    allocation::Devices as Units,
    config::{Attach, Config, Devices, Names},
    error::Error,
    facts::{Facts, HostLink, Nic},
};

/// A NIC of the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RailNic {
    pub hca: HcaId,
    /// Index of its netdev on the host.
    pub index: u32,
    /// The netdev's name on the host.
    pub netdev: String,
    /// The netdev's addresses on the host.
    pub addresses: Vec<IpAddr>,
}

impl RailNic {
    /// None for what no unit decides.
    fn of(nic: &Nic) -> Option<RailNic> {
        let host = nic.found.host_link()?;
        Some(RailNic {
            hca: nic.unit.as_ref()?.hcas.first()?.clone(),
            index: host.link.index,
            netdev: host.link.name.to_string(),
            addresses: host.addresses.clone(),
        })
    }
}

/// The rail of each NIC of an attachment, in their order. STATUS and `validate` ask without a NIC.
pub(super) fn number(network: &Config, facts: &Facts<'_>) -> Result<Vec<Option<u32>>, Error> {
    let numbering = Numbering {
        asked: network.rail,
        ranges: facts.ranges.as_ref(),
        rails: &facts.policy.rails,
        path: facts.policy_path,
    };
    let hosts = facts.nics.iter().map(|nic| nic.found.host_link());
    match (network.attach, &facts.devices) {
        (Attach::RdmaOnly, _) => Ok(vec![None; facts.nics.len()]),
        (_, Some(devices)) => {
            let described: Vec<_> = facts.nics.iter().filter_map(RailNic::of).collect();
            let rails = numbering.all(&described, devices)?;
            Ok(rails.into_iter().map(Some).collect())
        }
        (_, None) if network.devices == Devices::All => Ok(Vec::new()),
        (_, None) if facts.nics.is_empty() => numbering.one(None).map(|_| Vec::new()),
        (_, None) => hosts.map(|host| numbering.one(host)).collect(),
    }
}

/// Names the interfaces of an attachment with `devices: all`, which are in the order of their rails.
/// `ifname` is that of the call.
///
/// # Errors
/// Code 7: one is not a name for an interface, or two are the same.
pub(super) fn name(parts: &mut [Part], pattern: &Names, ifname: &str) -> Result<(), Error> {
    let nics = parts.iter();
    let nics = nics.filter_map(|part| Some((part.rail()?, part.netdev()?)));
    let names = names(pattern, ifname, nics)?;
    for (interface, name) in parts.iter_mut().filter_map(Part::interface_mut).zip(names) {
        interface.name = name.to_string();
    }
    Ok(())
}

/// What says on which rails NICs are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbering<'a> {
    /// `rail` of the network.
    pub asked: Option<u32>,
    /// The rails for which the network has ranges of addresses; none where it has not one for each.
    pub ranges: Option<&'a BTreeSet<u32>>,
    /// The policy's.
    pub rails: &'a Rails,
    /// The policy's file, for messages.
    pub path: &'a Path,
}

impl Numbering<'_> {
    /// The rail of each of the pod's NICs, in their order.
    ///
    /// # Errors
    /// Code 7: two NICs are one netdev, or on one rail. Code 101: the policy says nothing of a NIC, or
    /// two things. Code 50: nothing numbers the rails of this node as those of other nodes are.
    pub(crate) fn all(self, nics: &[RailNic], devices: &Units) -> Result<Vec<u32>, Error> {
        let mut netdevs: BTreeMap<u32, &RailNic> = BTreeMap::new();
        for nic in nics {
            if let Some(other) = netdevs.insert(nic.index, nic) {
                return Err(Error::new(
                    Code::InvalidConfig,
                    format!(
                        "HCAs {} and {} of the pod have one netdev, {}, which can be one interface \
                         only",
                        other.hca, nic.hca, nic.netdev
                    ),
                )
                .with_details(
                    "leave devices out and name the netdev with master or device; or offer one of \
                     the two HCAs in the pool",
                ));
            }
        }
        let mut numbers = Vec::new();
        for nic in nics {
            numbers.push(match self.rails.is_empty() {
                true => self.by_pool(nic, devices)?,
                false => self.by_policy(&nic.netdev, &[nic.hca.to_string()], &nic.addresses)?,
            });
        }
        let mut taken: BTreeMap<u32, &RailNic> = BTreeMap::new();
        for (nic, rail) in nics.iter().zip(&numbers) {
            if let Some(other) = taken.insert(*rail, nic) {
                return Err(Error::new(
                    Code::Policy,
                    format!(
                        "{} ({}) and {} ({}) are both on rail {rail}, but a pod has one NIC on a rail",
                        other.netdev, other.hca, nic.netdev, nic.hca
                    ),
                )
                .with_details(format!(
                    "give each NIC a number of its own: rails in {}",
                    self.path.display()
                )));
            }
        }
        for (nic, rail) in nics.iter().zip(&numbers) {
            self.has_range(*rail, &nic.netdev)?;
        }
        Ok(numbers)
    }

    /// The rail of the only NIC; none where nothing asks for one. `host` is its netdev, none where that
    /// is not known or is the pod's.
    ///
    /// # Errors
    /// Code 101: the policy puts the NIC on another rail, says nothing of it, or two things. Code 7:
    /// nothing says the rail, or there are no ranges for it.
    pub(crate) fn one(self, host: Option<&HostLink>) -> Result<Option<u32>, Error> {
        if self.asked.is_none() && self.ranges.is_none() {
            return Ok(None);
        }
        let path = self.path.display();
        let name = host.map(|host| host.link.name.to_string());
        let name = name.as_deref().unwrap_or("the NIC");
        let by_policy = host.filter(|_| !self.rails.is_empty()).map(|host| {
            let hcas: Vec<String> = host.hcas.iter().map(ToString::to_string).collect();
            self.by_policy(name, &hcas, &host.addresses)
        });
        let rail = match (self.asked, by_policy.transpose()?) {
            (Some(asked), Some(rail)) if asked != rail => {
                let msg = format!("{name} is on rail {rail}, but the network is for rail {asked}");
                return Err(Error::new(Code::Policy, msg).with_details(format!(
                    "request the resource whose NICs are on rail {asked}, or correct rail in the \
                     network, or rails in {path}"
                )));
            }
            (_, Some(rail)) | (Some(rail), None) => rail,
            (None, None) if !self.rails.is_empty() && host.is_none() => return Ok(None),
            (None, None) => {
                return Err(Error::new(
                    Code::InvalidConfig,
                    "ipam.ranges has ranges of rails, and the rail of the NIC is unknown",
                )
                .with_details(format!(
                    "set rail in the network, or number the NICs of this node: rails in {path}"
                )));
            }
        };
        self.has_range(rail, name)?;
        Ok(Some(rail))
    }

    fn has_range(self, rail: u32, netdev: &str) -> Result<(), Error> {
        if self.ranges.is_none_or(|ranges| ranges.contains(&rail)) {
            return Ok(());
        }
        let msg = format!("ipam.ranges has nothing for rail {rail}, on which {netdev} is");
        Err(Error::new(Code::InvalidConfig, msg).with_details(format!(
            "add \"{rail}\", or correct rails in {}",
            self.path.display()
        )))
    }

    /// By any of a netdev's HCAs. A netdev without one is meant by its name or its addresses.
    fn by_policy(self, netdev: &str, hcas: &[String], addresses: &[IpAddr]) -> Result<u32, Error> {
        let (policy, all) = (self.path.display(), hcas.join(", "));
        let names = hcas.iter().map(String::as_str);
        let mut found = None;
        for hca in names.chain(hcas.is_empty().then_some("")) {
            let candidate = RailCandidate {
                hca,
                netdev,
                addresses,
            };
            let rail = self.rails.of(&candidate).map_err(|conflict| {
                let msg = format!("which rail {netdev} ({all}) is on is not clear: {conflict}");
                Error::new(Code::Policy, msg).with_details(format!("correct rails in {policy}"))
            })?;
            found = found.or(rail);
        }
        found.ok_or_else(|| {
            let msg = format!("the node's policy does not say which rail {netdev} ({all}) is on");
            Error::new(Code::Policy, msg).with_details(format!(
                "add its PCI address, its name or its network to rails in {policy}"
            ))
        })
    }

    /// By its place in its pool.
    fn by_pool(self, nic: &RailNic, devices: &Units) -> Result<u32, Error> {
        let unclear = |why: String| {
            let resource = &devices.resource;
            let msg = format!("the rails of {resource} on this node have no numbers: {why}");
            Err(Error::new(Code::Unavailable, msg).with_details(format!(
                "set rails in {}, the same on all nodes",
                self.path.display()
            )))
        };
        let Some(pool) = &devices.pool else {
            return unclear("the daemon does not report which HCAs its pool has".to_owned());
        };
        // A node that lacks a NIC would number those behind it one lower than the others do.
        if let Some(ranges) = self.ranges
            && !ranges
                .iter()
                .map(|rail| u64::from(*rail))
                .eq(0..pool.len() as u64)
        {
            return unclear(format!(
                "the pool has {} HCAs here, but ipam.ranges has rails {}",
                pool.len(),
                list(ranges)
            ));
        }
        let place = pool.iter().position(|hca| *hca == nic.hca);
        match place.and_then(|place| u32::try_from(place).ok()) {
            Some(place) => Ok(place),
            None => unclear(format!("HCA {} is not in its pool any more", nic.hca)),
        }
    }
}

/// The names of interfaces, by the rails and the host's names of their NICs. `ifname` is that of the
/// call.
///
/// # Errors
/// Code 7: one is not a name for an interface, or two are the same.
pub(crate) fn names(
    pattern: &Names,
    ifname: &str,
    nics: impl IntoIterator<Item = (u32, String)>,
) -> Result<Vec<IfName>, Error> {
    let mut names: Vec<IfName> = Vec::new();
    for (rail, host) in nics {
        let name = pattern.of(ifname, rail, &host)?;
        let wrong = |why: &str| {
            Error::new(
                Code::InvalidConfig,
                format!("names: {:?} {why}, {:?}", pattern.as_str(), name.as_str()),
            )
            .with_details("use {rail} in it, as in \"r{rail}\"")
        };
        if sysctl::OF_NO_INTERFACE.contains(&name.as_str()) {
            return Err(wrong("makes a name that the kernel has for all interfaces"));
        }
        if names.contains(&name) {
            return Err(wrong("gives two interfaces one name"));
        }
        names.push(name);
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    const POOL: [&str; 3] = ["0000:3b:00.0", "0000:5e:00.0", "0000:b1:00.0"];

    fn nics(places: &[usize]) -> Vec<RailNic> {
        let nic = |place: &usize| RailNic {
            hca: POOL[*place].parse().unwrap(),
            index: 10 + u32::try_from(*place).unwrap(),
            netdev: format!("ens{place}"),
            addresses: Vec::new(),
        };
        places.iter().map(nic).collect()
    }

    fn devices(pool: Option<&[&str]>) -> Units {
        Units {
            resource: "rdma/nic".into(),
            hcas: BTreeSet::new(),
            pool: pool.map(|pool| pool.iter().map(|hca| hca.parse().unwrap()).collect()),
        }
    }

    fn numbered(
        nics: &[RailNic],
        pool: Option<&[&str]>,
        policy: &str,
        ranges: Option<&[u32]>,
    ) -> Result<Vec<u32>, Error> {
        let text = format!(r#"{{"rails": {policy}}}"#);
        let path = Path::new("/etc/rdma-netdev/policy.json");
        let policy = node::policy::Policy::parse(path, text.as_bytes()).unwrap();
        let ranges = ranges.map(|ranges| ranges.iter().copied().collect());
        let numbering = Numbering {
            asked: None,
            rails: &policy.rails,
            path,
            ranges: ranges.as_ref(),
        };
        numbering.all(nics, &devices(pool))
    }

    #[test]
    fn a_nics_place_in_its_pool_is_its_rail() {
        let two = nics(&[2, 1]);
        assert_eq!(numbered(&two, Some(&POOL), "{}", None).unwrap(), [2, 1]);
        assert_eq!(
            numbered(&two, Some(&POOL), "{}", Some(&[0, 1, 2])).unwrap(),
            [2, 1]
        );
    }

    #[test]
    fn the_policys_rails_come_first() {
        let policy = r#"{"0000:b1:00.0": 0, "ens1": 7, "ens0": 8}"#;
        let numbers = |pool| numbered(&nics(&[1, 2]), pool, policy, Some(&[0, 7]));
        assert_eq!(numbers(None).unwrap(), [7, 0]);
        assert_eq!(numbers(Some(&POOL)).unwrap(), [7, 0]);
    }

    fn refused(code: Code, words: &[&str], numbers: Result<Vec<u32>, Error>) {
        let error = numbers.unwrap_err();
        assert_eq!(error.code, code, "{error}");
        for word in words {
            assert!(error.msg.contains(word), "{word}: {error}");
        }
        assert!(!error.details.is_empty(), "{error}");
    }

    #[test]
    fn rails_that_are_not_clear_are_refused() {
        let two = nics(&[0, 1]);
        let unavailable = Code::Unavailable;
        refused(
            unavailable,
            &["does not report"],
            numbered(&two, None, "{}", None),
        );
        refused(
            unavailable,
            &["0000:3b:00.0 is not in its pool"],
            numbered(&two, Some(&POOL[1..]), "{}", None),
        );
        // One NIC is missing on this node: which, its place does not say.
        refused(
            unavailable,
            &["2 HCAs here", "rails 0, 1, 2"],
            numbered(&two, Some(&POOL[..2]), "{}", Some(&[0, 1, 2])),
        );
        let of_policy = |policy, ranges| numbered(&two, Some(&POOL), policy, ranges);
        refused(
            Code::Policy,
            &["does not say", "ens1"],
            of_policy(r#"{"ens0": 0}"#, None),
        );
        let one = r#"{"ens*": 3}"#;
        refused(
            Code::Policy,
            &["ens0", "ens1", "both on rail 3"],
            of_policy(one, None),
        );
        let two_keys = r#"{"ens0": 1, "0000:3b:00.0": 2, "ens1": 3}"#;
        refused(
            Code::Policy,
            &["not clear", "rail 1", "rail 2"],
            of_policy(two_keys, None),
        );
        let beyond = r#"{"ens0": 0, "ens1": 9}"#;
        refused(
            Code::InvalidConfig,
            &["rail 9", "ens1"],
            of_policy(beyond, Some(&[0, 1])),
        );
    }

    #[test]
    fn two_hcas_with_one_netdev_are_refused() {
        let mut two = nics(&[0, 1]);
        two[1].index = two[0].index;
        let numbers = numbered(&two, Some(&POOL), "{}", None);
        refused(
            Code::InvalidConfig,
            &["0000:3b:00.0", "0000:5e:00.0"],
            numbers,
        );
    }

    #[test]
    fn names_are_different_and_names_of_interfaces() {
        let of = |pattern: &str, nics: &[(u32, &str)]| {
            let pattern = crate::config::Names::try_from(pattern.to_owned()).unwrap();
            names(
                &pattern,
                "net1",
                nics.iter().map(|(rail, host)| (*rail, (*host).to_owned())),
            )
        };
        let two: Vec<String> = of("{ifname}-{rail}", &[(0, "a"), (7, "b")])
            .unwrap()
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(two, ["net1-0", "net1-7"]);
        for (pattern, nics, word) in [
            ("{host}", &[(0, "a"), (1, "a")], "two interfaces"),
            ("{host}", &[(0, "all"), (1, "b")], "all interfaces"),
            ("{host}", &[(0, "a"), (1, "0123456789abcdef")], "15 bytes"),
        ] {
            let error = of(pattern, nics).unwrap_err();
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(error.msg.contains(word), "{error}");
        }
    }
}
