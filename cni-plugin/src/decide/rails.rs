//! On which rail each NIC of an attachment is, and with `devices: all` what its interface is called
//! in the pod. Decided for all of them before anything is changed. Pure.
//!
//! A rail has the same number on every node, or the attachment is refused: addresses and names of a
//! job's pods are compared by it. The node's policy numbers the rails; without that, the position of a
//! NIC in its pool does, where nothing shows that positions differ from node to node.

use attachment::part::Part;
use cni_wire::{Code, IfName, text::list};
use netlink::sysctl;
use node::policy::RailCandidate;

use crate::{
    allocation::Devices as Units,
    config::{Attach, Config, Devices, Names},
    error::Error,
    facts::{Facts, HostLink, Nic},
};

/// The rail of each NIC of an attachment, in their order; none where nothing asks for it. STATUS and
/// `validate` ask without a NIC.
///
/// # Errors
/// Code 7: two NICs are one netdev, nothing says the rail, or there are no ranges for it. Code 101: the
/// policy puts a NIC on another rail or two NICs on one, says nothing of a NIC, or two things. Code 50:
/// nothing numbers the rails of this node as those of other nodes are.
pub(super) fn number(network: &Config, facts: &Facts<'_>) -> Result<Vec<Option<u32>>, Error> {
    let is_asked = network.rail.is_some() || facts.ranges.is_some() || facts.devices.is_some();
    if network.attach == Attach::RdmaOnly || !is_asked {
        return Ok(vec![None; facts.nics.len()]);
    }
    if facts.nics.is_empty() && network.devices == Devices::One {
        return match network.rail {
            Some(rail) => has_range(rail, "the NIC", facts).map(|()| Vec::new()),
            None if facts.policy.rails.is_empty() => Err(unknown(facts)),
            None => Ok(Vec::new()),
        };
    }
    let mut numbered: Vec<(&Nic, &HostLink, u32)> = Vec::new();
    for nic in &facts.nics {
        let Some(host) = nic.found.host_link() else {
            continue;
        };
        let (name, rail) = (host.link.name.to_string(), rail(network, facts, nic, host)?);
        for (other, there, other_rail) in &numbered {
            apart((other, there, *other_rail), (nic, host, rail), facts)?;
        }
        has_range(rail, &name, facts)?;
        numbered.push((nic, host, rail));
    }
    Ok(numbered.iter().map(|(.., rail)| Some(*rail)).collect())
}

/// Refuses two NICs of a pod that are one netdev, or on one rail.
fn apart(
    (other, there, other_rail): (&Nic, &HostLink, u32),
    (nic, host, rail): (&Nic, &HostLink, u32),
    facts: &Facts<'_>,
) -> Result<(), Error> {
    let hca = |nic: &Nic| {
        nic.unit
            .as_ref()
            .map_or(String::new(), |unit| unit.text.clone())
    };
    let (one, two, name) = (hca(other), hca(nic), &host.link.name);
    if there.link.index == host.link.index {
        return Err(Error::advise(
            Code::InvalidConfig,
            format_args!(
                "HCAs {one} and {two} of the pod have one netdev, {name}, which can be one interface \
                 only"
            ),
            "leave devices out and name the netdev with master or device; or offer one of the two \
             HCAs in the pool",
        ));
    }
    if other_rail == rail {
        let (there, path) = (&there.link.name, facts.policy_path.display());
        return Err(Error::advise(
            Code::Policy,
            format_args!(
                "{there} ({one}) and {name} ({two}) are both on rail {rail}, but a pod has one NIC on \
                 a rail"
            ),
            format_args!("give each NIC a number of its own: rails in {path}"),
        ));
    }
    Ok(())
}

fn rail(network: &Config, facts: &Facts<'_>, nic: &Nic, host: &HostLink) -> Result<u32, Error> {
    let by_policy = match facts.policy.rails.is_empty() {
        true => None,
        false => Some(by_policy(nic, host, facts)?),
    };
    match (network.rail, by_policy, &facts.devices) {
        (Some(asked), Some(rail), _) if asked != rail => {
            let (name, path) = (&host.link.name, facts.policy_path.display());
            Err(Error::advise(
                Code::Policy,
                format_args!("{name} is on rail {rail}, but the network is for rail {asked}"),
                format_args!(
                    "request the resource whose NICs are on rail {asked}, or correct rail in the \
                     network, or rails in {path}"
                ),
            ))
        }
        (_, Some(rail), _) | (Some(rail), None, _) => Ok(rail),
        (None, None, Some(devices)) => by_pool(nic, devices, facts),
        (None, None, None) => Err(unknown(facts)),
    }
}

fn unknown(facts: &Facts<'_>) -> Error {
    let path = facts.policy_path.display();
    Error::advise(
        Code::InvalidConfig,
        "ipam.ranges has ranges of rails, and the rail of the NIC is unknown",
        format_args!("set rail in the network, or number the NICs of this node: rails in {path}"),
    )
}

fn has_range(rail: u32, netdev: &str, facts: &Facts<'_>) -> Result<(), Error> {
    let (ranges, path) = (facts.ranges.as_ref(), facts.policy_path.display());
    match ranges.is_none_or(|ranges| ranges.contains(&rail)) {
        true => Ok(()),
        false => Err(Error::advise(
            Code::InvalidConfig,
            format_args!("ipam.ranges has nothing for rail {rail}, on which {netdev} is"),
            format_args!("add \"{rail}\", or correct rails in {path}"),
        )),
    }
}

/// By the HCA of the unit, else by any of the netdev's. A netdev without one is meant by its name or its
/// addresses.
fn by_policy(nic: &Nic, host: &HostLink, facts: &Facts<'_>) -> Result<u32, Error> {
    let units = nic.unit.iter().filter(|_| facts.devices.is_some());
    let mut hcas: Vec<String> = units.map(|unit| unit.text.clone()).collect();
    if hcas.is_empty() {
        hcas.extend(host.hcas.iter().map(ToString::to_string));
    }
    let (netdev, all) = (host.link.name.to_string(), list(&hcas));
    let path = facts.policy_path.display();
    let mut found = None;
    for hca in hcas
        .iter()
        .map(String::as_str)
        .chain(hcas.is_empty().then_some(""))
    {
        let candidate = RailCandidate {
            hca,
            netdev: &netdev,
            addresses: &host.addresses,
        };
        let rail = facts.policy.rails.of(&candidate).map_err(|conflict| {
            Error::advise(
                Code::Policy,
                format_args!("which rail {netdev} ({all}) is on is not clear: {conflict}"),
                format_args!("correct rails in {path}"),
            )
        })?;
        found = found.or(rail);
    }
    found.ok_or_else(|| {
        Error::advise(
            Code::Policy,
            format_args!("the node's policy does not say which rail {netdev} ({all}) is on"),
            format_args!("add its PCI address, its name or its network to rails in {path}"),
        )
    })
}

/// By its position in its pool. A node that lacks a NIC would number those behind it one lower than the
/// others do.
fn by_pool(nic: &Nic, devices: &Units, facts: &Facts<'_>) -> Result<u32, Error> {
    let hca = nic.unit.as_ref().and_then(|unit| unit.hcas.first());
    let why = match (&devices.pool, &facts.ranges) {
        (None, _) => "the daemon does not report which HCAs its pool has".to_owned(),
        (Some(pool), Some(ranges))
            if ranges.len() != pool.len()
                || !(0..).zip(pool).all(|(rail, _)| ranges.contains(&rail)) =>
        {
            let (count, rails) = (pool.len(), list(ranges));
            format!("the pool has {count} HCAs here, but ipam.ranges has rails {rails}")
        }
        (Some(pool), _) => match (0..).zip(pool).find(|(_, other)| Some(*other) == hca) {
            Some((rail, _)) => return Ok(rail),
            None => format!("HCA {} is not in its pool any more", list(hca)),
        },
    };
    let (resource, path) = (&devices.resource, facts.policy_path.display());
    Err(Error::advise(
        Code::Unavailable,
        format_args!("the rails of {resource} on this node have no numbers: {why}"),
        format_args!("set rails in {path}, the same on all nodes"),
    ))
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

/// By the rails and the host's names of the NICs.
fn names(
    pattern: &Names,
    ifname: &str,
    nics: impl IntoIterator<Item = (u32, String)>,
) -> Result<Vec<IfName>, Error> {
    let mut names: Vec<IfName> = Vec::new();
    for (rail, host) in nics {
        let name = pattern.of(ifname, rail, &host)?;
        let wrong = if sysctl::OF_NO_INTERFACE.contains(&name.as_str()) {
            "makes a name that the kernel has for all interfaces"
        } else if names.contains(&name) {
            "gives two interfaces one name"
        } else {
            names.push(name);
            continue;
        };
        return Err(Error::advise(
            Code::InvalidConfig,
            format_args!("names: {:?} {wrong}, {:?}", pattern.as_str(), name.as_str()),
            "use {rail} in it, as in \"r{rail}\"",
        ));
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, path::Path};

    use super::*;
    use crate::{
        config::{ChildKind, UnitHcas},
        facts::Found,
    };

    const POOL: [&str; 3] = ["0000:3b:00.0", "0000:5e:00.0", "0000:b1:00.0"];

    fn nics(positions: &[usize]) -> Vec<Nic> {
        let nic = |position: &usize| {
            let mut host = HostLink::default();
            host.link.index = 10 + u32::try_from(*position).unwrap();
            host.link.name = format!("ens{position}").as_str().into();
            Nic {
                unit: Some(UnitHcas {
                    text: POOL[*position].to_owned(),
                    hcas: vec![POOL[*position].parse().unwrap()],
                    slot: None,
                }),
                is_of_unit: true,
                found: Found::Child(ChildKind::Macvlan, Box::new(host)),
                random: (1 << 20, "02:00:00:00:00:01".parse().unwrap()),
            }
        };
        positions.iter().map(nic).collect()
    }

    fn numbered(
        nics: &[Nic],
        pool: Option<&[&str]>,
        policy: &str,
        ranges: Option<&[u32]>,
    ) -> Result<Vec<u32>, Error> {
        let text = format!(r#"{{"rails": {policy}}}"#);
        let path = Path::new("/etc/rdma-netdev/policy.json");
        let policy = node::policy::Policy::parse(path, text.as_bytes()).unwrap();
        let facts = Facts {
            ranges: ranges.map(|ranges| ranges.iter().copied().collect()),
            devices: Some(Units {
                resource: "rdma/nic".into(),
                hcas: BTreeSet::new(),
                pool: pool.map(|pool| pool.iter().map(|hca| hca.parse().unwrap()).collect()),
            }),
            nics: nics.to_vec(),
            ..Facts::without_pod(&policy, path)
        };
        let network = Config {
            attach: Attach::Child(ChildKind::Macvlan),
            devices: Devices::All,
            ..Config::default()
        };
        Ok(number(&network, &facts)?.into_iter().flatten().collect())
    }

    #[test]
    fn a_nics_position_in_its_pool_is_its_rail() {
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
        // One NIC is missing on this node: which, its position does not say.
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
        let Found::Child(_, host) = &mut two[1].found else {
            panic!()
        };
        host.link.index = 10;
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
