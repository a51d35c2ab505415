//! Whether what a request asks for fits the link that it resolves to, and what the interface is
//! given. Pure.

use std::fmt::Display;

use attachment::part::{ChildLink, IpoibMode};
use cni_wire::{Code, text::list};
use netlink::link::Link;
use netlink_packet_route::link::InfoKind;
use node::policy;

use super::{child_link, partition};
use crate::{
    config::{Attach, ChildKind, Config},
    error::Error,
    facts::{Facts, Found, HostLink, Nic},
};

/// The smallest MTU of a link with IPv6 (RFC 8200, section 5); below it the kernel takes IPv6 away.
const MIN_IPV6_MTU: u32 = 1280;

/// Refuses what the kernel would refuse with a worse message, or take and do something else.
///
/// # Errors
/// Code 7 naming the key and what to do instead; code 11 for a partition that the port is not in,
/// unless the policy allows that.
pub(super) fn fits(config: &Config, nic: &Nic, facts: &Facts<'_>) -> Result<(), Error> {
    let Some(host) = nic.found.host_link() else {
        return Ok(());
    };
    is_no_child(config.attach, host)?;
    carries(config.attach, config, &host.link)?;
    match &nic.found {
        Found::Child(ChildKind::Ipoib, parent) if !facts.policy.allow.inactive_partitions => {
            is_member(parent, partition(config, parent))
        }
        _ => Ok(()),
    }
}

/// Why a child will have no carrier, where that is known.
pub(super) fn lacks_carrier(
    config: &Config,
    kind: ChildKind,
    parent: &HostLink,
    ifname: &str,
) -> Option<String> {
    let why = match kind {
        _ if !parent.link.is_up() => {
            let name = &parent.link.name;
            format!("{name} is down on the host: ip link set {name} up, or linkUp in its pool")
        }
        ChildKind::Ipoib => is_member(parent, partition(config, parent))
            .err()?
            .msg
            .clone(),
        ChildKind::Macvlan | ChildKind::Ipvlan => return None,
    };
    Some(format!("{ifname} has no carrier: {why}"))
}

/// Refuses IPv6 on an interface whose MTU is too small for it. `given` says whether an
/// address or route of it needs IPv6.
pub fn carries_ipv6(mtu: u32, config: &Config, given: bool) -> Result<(), Error> {
    let asks = [
        ("an address or route", given),
        ("acceptRA", config.accept_ra),
        ("linkLocal", config.link_local == Some(true)),
    ];
    match asks.iter().find(|(_, asks)| *asks) {
        Some((what, _)) if mtu < MIN_IPV6_MTU => Err(invalid(
            format!("mtu: {mtu} is too small for IPv6, which {what} needs"),
            format!("set mtu to {MIN_IPV6_MTU} or more, or leave IPv6 out"),
        )),
        _ => Ok(()),
    }
}

/// What a link can carry, kind by kind.
fn carries(attach: Attach, config: &Config, link: &Link) -> Result<(), Error> {
    use ChildKind::{Ipoib, Ipvlan, Macvlan};
    mtu_fits(attach, config, link)?;
    let (on, is_ethernet, is_ib) = (&link.name, link.hardware == 1, link.is_infiniband());
    let (msg, remedy) = match attach {
        Attach::Move if config.mac.is_some() && !is_ethernet => (
            format!("mac: {on} is not an Ethernet link"),
            "leave mac out",
        ),
        Attach::Move if config.vf.node_guid.is_some() && !is_ib => (
            format!("guid: {on} is not an InfiniBand link"),
            "leave guid out",
        ),
        Attach::Child(kind @ (Macvlan | Ipvlan)) if !is_ethernet => (
            format!(
                "{on} is not an Ethernet link and cannot carry a {}",
                kind.as_str()
            ),
            match is_ib {
                true => {
                    "set attach to ipoib: each child has a queue pair, and with it an address, of its own"
                }
                false => "name an Ethernet netdev as master",
            },
        ),
        Attach::Child(Ipoib) if !is_ib => (
            format!("{on} is not an IP over InfiniBand link"),
            "set attach to macvlan for an Ethernet netdev",
        ),
        Attach::Move | Attach::Child(_) | Attach::RdmaOnly => return Ok(()),
    };
    Err(invalid(msg, remedy))
}

/// Refuses a macvlan, ipvlan, macvtap or ipvtap as master.
///
/// The kernel makes a macvlan on a macvlan on the link below that (`macvlan_common_newlink()`), and an
/// ipvlan on an ipvlan likewise (`ipvlan_link_new()`), in whichever namespace that link is. What is
/// judged, recorded and printed must be the link that is used. The frames of one kind on the other
/// leave by the link below, too.
fn is_no_child(attach: Attach, host: &HostLink) -> Result<(), Error> {
    use InfoKind::{IpVlan, IpVtap, MacVlan, MacVtap};
    let (Attach::Child(child), Some(kind @ (MacVlan | MacVtap | IpVlan | IpVtap))) =
        (attach, &host.link.kind)
    else {
        return Ok(());
    };
    let (name, child) = (&host.link.name, child.as_str());
    let (through, remedy) = match &host.below {
        Some(below) => (below.as_str(), format!("name {below} as master instead")),
        None => (
            "a link in another network namespace",
            "name a netdev of the host as master that is not a macvlan or ipvlan".to_owned(),
        ),
    };
    Err(invalid(
        format_args!(
            "master: {name} is a {kind}; its {child} child would send and receive through {through}"
        ),
        remedy,
    ))
}

fn invalid(msg: impl Display, remedy: impl Display) -> Error {
    Error::advise(Code::InvalidConfig, msg, remedy)
}

fn mtu_fits(attach: Attach, config: &Config, link: &Link) -> Result<(), Error> {
    let most = match attach {
        Attach::Move => link.max_mtu,
        // Connected mode has an MTU of its own, beyond that of the port.
        Attach::Child(ChildKind::Ipoib) if is_connected(config, link)? => link.max_mtu,
        Attach::Child(_) | Attach::RdmaOnly => link.mtu,
    };
    match config.mtu {
        Some(mtu) if most != 0 && mtu > most => Err(invalid(
            format!("mtu: {mtu} is more than the {most} of {}", link.name),
            "lower it, or raise the MTU of the netdev on the host",
        )),
        _ => Ok(()),
    }
}

fn is_connected(config: &Config, link: &Link) -> Result<bool, Error> {
    let child = child_link(config, ChildKind::Ipoib, link)?;
    Ok(matches!(
        child,
        ChildLink::Ipoib {
            mode: IpoibMode::Connected,
            ..
        }
    ))
}

/// A child in a partition that the port is not a member of would have no carrier. The subnet manager
/// makes the port a member, so the request can succeed later.
fn is_member(host: &HostLink, pkey: u16) -> Result<(), Error> {
    let Some(keys) = &host.pkeys else {
        return Ok(());
    };
    let mut numbers = keys.iter().map(|key| policy::partition(*key));
    if numbers.any(|number| number == policy::partition(pkey)) {
        return Ok(());
    }
    let port = host.rdma.first().map(ToString::to_string);
    Err(Error::advise(
        Code::TryAgain,
        format_args!(
            "pkey {pkey:#06x}: the port below {} ({}) is not a member of that partition; its keys are \
             {}",
            host.link.name,
            port.unwrap_or_default(),
            list(keys.iter().copied().map(policy::membership))
        ),
        "name one of these, or add the port's GUID to the partition in the subnet manager's \
         configuration (OpenSM: partitions.conf); to start pods before that, set \
         allow.inactivePartitions in the node's policy",
    ))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use attachment::netdev::vf::VfSettings;
    use node::policy::Policy;

    use super::*;

    fn config() -> Config {
        Config::default()
    }

    fn link(hardware: u16) -> Link {
        Link {
            name: "eth1".into(),
            hardware,
            mtu: 1500,
            max_mtu: 9000,
            ..Link::default()
        }
    }

    const MACVLAN: Attach = Attach::Child(ChildKind::Macvlan);
    const IPVLAN: Attach = Attach::Child(ChildKind::Ipvlan);
    const IPOIB: Attach = Attach::Child(ChildKind::Ipoib);
    const ETHERNET: u16 = 1;
    const INFINIBAND: u16 = 32;

    /// It is refused with what to do instead, and the message contains the word.
    fn refuses(attach: Attach, config: &Config, hardware: u16, word: &str) {
        let error = carries(attach, config, &link(hardware)).unwrap_err();
        assert_eq!(error.code, Code::InvalidConfig);
        assert!(
            error.msg.contains(word) && !error.details.is_empty(),
            "{word}: {error}"
        );
    }

    fn with_mac() -> Config {
        Config {
            mac: Some("02:00:00:00:00:01".parse().unwrap()),
            ..config()
        }
    }

    #[test]
    fn a_child_is_on_a_link_that_can_carry_it() {
        refuses(MACVLAN, &config(), INFINIBAND, "not an Ethernet");
        refuses(IPOIB, &config(), ETHERNET, "InfiniBand");
        // ARPHRD_LOOPBACK
        refuses(MACVLAN, &config(), 772, "not an Ethernet");
        refuses(IPVLAN, &config(), 772, "not an Ethernet");
        refuses(IPVLAN, &config(), INFINIBAND, "not an Ethernet");
        carries(IPOIB, &config(), &link(INFINIBAND)).unwrap();
    }

    #[test]
    fn a_netdev_that_moves_takes_an_address_on_ethernet_only() {
        refuses(Attach::Move, &with_mac(), INFINIBAND, "mac");
        let guid = Config {
            vf: VfSettings {
                node_guid: Some(hca::Guid(7)),
                ..VfSettings::default()
            },
            ..config()
        };
        refuses(Attach::Move, &guid, ETHERNET, "guid");
        carries(Attach::Move, &guid, &link(INFINIBAND)).unwrap();
        carries(Attach::Move, &with_mac(), &link(ETHERNET)).unwrap();
    }

    #[test]
    fn an_mtu_is_bounded_by_master_and_netdev() {
        let mtu = |mtu| Config {
            mtu: Some(mtu),
            ..config()
        };
        refuses(MACVLAN, &mtu(1501), ETHERNET, "mtu");
        refuses(Attach::Move, &mtu(9001), ETHERNET, "mtu");
        carries(MACVLAN, &mtu(1500), &link(ETHERNET)).unwrap();
        carries(Attach::Move, &mtu(9000), &link(ETHERNET)).unwrap();
        refuses(IPOIB, &mtu(4092), INFINIBAND, "mtu");
        let connected = Config {
            mode: Some("connected".into()),
            ..mtu(4092)
        };
        carries(IPOIB, &connected, &link(INFINIBAND)).unwrap();
    }

    #[test]
    fn a_partition_that_the_port_is_not_in_is_refused_with_those_it_is_in() {
        let on = |pkeys: Option<Vec<u16>>| HostLink {
            link: link(INFINIBAND),
            rdma: vec![hca::PortId {
                device: "mlx5_0".into(),
                port: 1,
            }],
            pkeys,
            ..HostLink::default()
        };
        let pkey = |pkey| Config {
            pkey: Some(pkey),
            ..config()
        };
        let table = || Some(vec![0xffff, 0x8001, 0x0002]);
        let check_with = |parent: &HostLink, config: &Config, inactive_partitions: bool| {
            let mut policy = Policy::default();
            policy.allow.inactive_partitions = inactive_partitions;
            let facts = Facts::without_pod(&policy, Path::new("/etc/policy.json"));
            let nic = Nic {
                unit: None,
                is_of_unit: true,
                found: Found::Child(ChildKind::Ipoib, Box::new(parent.clone())),
                random: (1 << 20, "02:00:00:00:00:01".parse().unwrap()),
            };
            let config = Config {
                attach: IPOIB,
                ..config.clone()
            };
            fits(&config, &nic, &facts)
        };
        let check = |parent: &HostLink, config: &Config| check_with(parent, config, false);
        let error = check(&on(table()), &pkey(0x8009)).unwrap_err();
        assert_eq!(error.code, Code::TryAgain);
        for word in ["0x8009", "mlx5_0", "0x8001 (full), 0x0002 (limited)"] {
            assert!(error.msg.contains(word), "{word}: {error}");
        }
        // The bit of the membership is not part of the partition's number.
        check(&on(table()), &pkey(0x8002)).unwrap();
        check(&on(table()), &pkey(0x0001)).unwrap();
        check(&on(None), &pkey(0x8009)).unwrap();
        check_with(&on(table()), &pkey(0x8009), true).unwrap();
        // A parent that says nothing of itself is in the default partition.
        check(&on(table()), &config()).unwrap();
    }

    #[test]
    fn an_mtu_below_1280_carries_no_ipv6() {
        let ra = Config {
            accept_ra: true,
            ..config()
        };
        let link_local = Config {
            link_local: Some(true),
            ..config()
        };
        for (config, addresses) in [(&config(), true), (&ra, false), (&link_local, false)] {
            let error = carries_ipv6(1279, config, addresses).unwrap_err();
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(
                error.msg.contains("1279") && error.details.contains("1280"),
                "{error}"
            );
            carries_ipv6(1280, config, addresses).unwrap();
        }
        carries_ipv6(68, &config(), false).unwrap();
    }
}
