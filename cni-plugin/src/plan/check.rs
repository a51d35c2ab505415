//! Whether what a request asks for fits what it resolves to: the keys, and the link. Pure.

use cni_wire::Code;
use netlink::link::Link;
use netlink_packet_route::link::{IpoibMode, MacVlanMode};
use node::policy;

use super::{ipoib_of, partition};
use crate::{
    config::{Attach, ChildKind, Config},
    error::Error,
    resolve::{HostLink, Resolved},
};

/// Refuses keys that have no meaning for what the request resolved to, and what the kernel would
/// refuse with a worse message, or take and do something else.
///
/// # Errors
/// Code 7 or 2 naming the key and what to do instead.
pub fn check(resolved: &Resolved, config: &Config, ipam: Option<&str>) -> Result<(), Error> {
    let (attach, link) = match resolved {
        Resolved::Move(nic) => (Attach::Move, &nic.link),
        Resolved::Child { kind, parent } => (Attach::Child(*kind), parent.link()),
        Resolved::RdmaOnly(_) => return keys_of_rdma_only(config),
    };
    keys_are_placed(attach, config)?;
    fits(attach, config, link, ipam)?;
    match (partition(resolved, config), resolved.host_link()) {
        (Some(pkey), Some(host)) => is_member(host, pkey),
        _ => Ok(()),
    }
}

/// What [`check`] can say of the keys before it is known which link is meant.
///
/// # Errors
/// As [`check`].
pub fn keys(attach: Attach, config: &Config) -> Result<(), Error> {
    if attach == Attach::RdmaOnly {
        return keys_of_rdma_only(config);
    }
    keys_are_placed(attach, config)?;
    keys_of_one_kind(attach, config)
}

fn keys_are_placed(attach: Attach, config: &Config) -> Result<(), Error> {
    if attach == Attach::Move {
        let misplaced = [
            ("master", config.master.is_some()),
            ("mode", config.mode.is_some()),
            ("linkInContainer", config.link_in_container),
        ];
        return refuse_misplaced(attach, &misplaced);
    }
    if config.device.is_none() {
        return Ok(());
    }
    Err(Error::new(
        Code::InvalidConfig,
        format!(
            "device, hwaddr, kernelpath, pciBusID and rdmaDevice name a netdev to be moved, but \
             the request comes to a child, {}",
            attach.as_str()
        ),
    )
    .with_details("name the netdev below the child with master"))
}

fn keys_of_rdma_only(config: &Config) -> Result<(), Error> {
    let misplaced = [
        ("master", config.master.is_some()),
        ("mode", config.mode.is_some()),
        ("linkInContainer", config.link_in_container),
        ("mtu", config.mtu.is_some()),
        ("pkey", config.pkey.is_some()),
        ("bcqueuelen", config.broadcast_queue.is_some()),
    ];
    refuse_misplaced(Attach::RdmaOnly, &misplaced)
}

fn refuse_misplaced(attach: Attach, keys: &[(&str, bool)]) -> Result<(), Error> {
    match keys.iter().find(|(_, set)| *set) {
        None => Ok(()),
        Some((key, _)) => Err(attach.has_no(key).into()),
    }
}

/// What a link can carry, kind by kind.
fn fits(attach: Attach, config: &Config, link: &Link, ipam: Option<&str>) -> Result<(), Error> {
    mtu_fits(attach, config, link)?;
    match attach {
        Attach::Move if config.mac.is_some() && link.hardware != 1 => {
            return Err(invalid(
                format!("mac: {} is no Ethernet link", link.name),
                "leave mac out",
            ));
        }
        Attach::Move | Attach::RdmaOnly => {}
        Attach::Child(ChildKind::Macvlan) => macvlan_fits(config, link)?,
        Attach::Child(ChildKind::Ipvlan) => ipvlan_fits(config, link, ipam)?,
        Attach::Child(ChildKind::Ipoib) => ipoib_fits(config, link, ipam)?,
    }
    keys_of_one_kind(attach, config)
}

fn invalid(msg: String, remedy: impl AsRef<str>) -> Error {
    Error::new(Code::InvalidConfig, msg).with_details(remedy)
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

fn macvlan_fits(config: &Config, link: &Link) -> Result<(), Error> {
    if link.is_infiniband() {
        return Err(invalid(
            format!(
                "{} is IP over InfiniBand, which has no MAC addresses for a macvlan",
                link.name
            ),
            "set attach to ipoib: each child has a queue pair, and with it an address, of its own",
        ));
    }
    is_ethernet(ChildKind::Macvlan, link)?;
    if config.macvlan_mode()? == MacVlanMode::Passthrough && config.mac.is_some() {
        return Err(invalid(
            "mac: a macvlan in mode passthru has its master's address".into(),
            "leave mac out, or use mode bridge",
        ));
    }
    Ok(())
}

fn ipvlan_fits(config: &Config, link: &Link, ipam: Option<&str>) -> Result<(), Error> {
    if link.is_infiniband() {
        return Err(invalid(
            format!(
                "{} is IP over InfiniBand, and the kernel makes an ipvlan on Ethernet only",
                link.name
            ),
            "set attach to ipoib: each child has a queue pair, and with it an address, of its own",
        ));
    }
    is_ethernet(ChildKind::Ipvlan, link)?;
    has_its_masters_address(ChildKind::Ipvlan, config, link, ipam)?;
    config.ipvlan_mode()?;
    Ok(())
}

fn ipoib_fits(config: &Config, link: &Link, ipam: Option<&str>) -> Result<(), Error> {
    if !link.is_infiniband() {
        return Err(invalid(
            format!("{} is no IP over InfiniBand link", link.name),
            "set attach to macvlan for an Ethernet netdev",
        ));
    }
    has_its_masters_address(ChildKind::Ipoib, config, link, ipam)?;
    config.ipoib_mode()?;
    Ok(())
}

fn is_connected(config: &Config, link: &Link) -> Result<bool, Error> {
    let (_, of_parent) = ipoib_of(link);
    Ok(config.ipoib_mode()?.unwrap_or(of_parent) == IpoibMode::Connected)
}

/// A child in a partition that the port is not a member of would have no carrier. The subnet manager
/// makes the port a member, so the request can succeed later.
fn is_member(host: &HostLink, pkey: u16) -> Result<(), Error> {
    let Some(keys) = &host.pkeys else {
        return Ok(());
    };
    if keys
        .iter()
        .any(|key| policy::partition(*key) == policy::partition(pkey))
    {
        return Ok(());
    }
    let port = host.rdma.first().map(ToString::to_string);
    // The highest bit is set for a full member (InfiniBand Architecture 10.9.1.1).
    let membership = |key: &u16| match key & 0x8000 {
        0 => format!("{key:#06x} (limited)"),
        _ => format!("{key:#06x} (full)"),
    };
    Err(Error::new(
        Code::TryAgain,
        format!(
            "pkey {pkey:#06x}: the port below {} ({}) is not a member of that partition; its keys are \
             {}",
            host.link.name,
            port.unwrap_or_default(),
            keys.iter().map(membership).collect::<Vec<_>>().join(", ")
        ),
    )
    .with_details(
        "name one of these, or add the port's GUID to the partition in the subnet manager's \
         configuration (OpenSM: partitions.conf)",
    ))
}

fn is_ethernet(kind: ChildKind, link: &Link) -> Result<(), Error> {
    match link.hardware {
        1 => Ok(()),
        _ => Err(invalid(
            format!(
                "{} is no Ethernet link and cannot carry a {}",
                link.name,
                kind.as_str()
            ),
            "name an Ethernet netdev as master",
        )),
    }
}

/// For kinds whose children have one hardware address, their master's.
fn has_its_masters_address(
    kind: ChildKind,
    config: &Config,
    link: &Link,
    ipam: Option<&str>,
) -> Result<(), Error> {
    let kind = kind.as_str();
    if config.mac.is_some() {
        return Err(invalid(
            format!("mac: an {kind} has its master's address"),
            "leave mac out, or use attach macvlan",
        ));
    }
    if ipam == Some("dhcp") {
        return Err(invalid(
            format!(
                "ipam.type dhcp cannot distinguish the {kind} children of {}",
                link.name
            ),
            "they share one hardware address; use another IPAM",
        ));
    }
    Ok(())
}

/// Refuses keys that one kind of children has, set for another.
fn keys_of_one_kind(attach: Attach, config: &Config) -> Result<(), Error> {
    let keys = [
        (
            "bcqueuelen",
            config.broadcast_queue.is_some(),
            ChildKind::Macvlan,
        ),
        ("pkey", config.pkey.is_some(), ChildKind::Ipoib),
    ];
    let misplaced = keys
        .into_iter()
        .find(|(_, set, kind)| *set && attach != Attach::Child(*kind));
    match misplaced {
        None => Ok(()),
        Some((key, _, kind)) => Err(invalid(
            format!("{key} belongs to {}", kind.as_str()),
            format!("leave it out, or set attach to {}", kind.as_str()),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::Parent;

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
    fn refuses(attach: Attach, config: &Config, hardware: u16, ipam: Option<&str>, word: &str) {
        let error = fits(attach, config, &link(hardware), ipam).unwrap_err();
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
    fn a_child_stands_on_a_link_that_can_carry_it() {
        refuses(MACVLAN, &config(), INFINIBAND, None, "InfiniBand");
        refuses(IPOIB, &config(), ETHERNET, None, "InfiniBand");
        // ARPHRD_LOOPBACK
        refuses(MACVLAN, &config(), 772, None, "no Ethernet");
        refuses(IPVLAN, &config(), 772, None, "no Ethernet");
        refuses(
            IPVLAN,
            &config(),
            INFINIBAND,
            None,
            "ipvlan on Ethernet only",
        );
        fits(IPOIB, &config(), &link(INFINIBAND), None).unwrap();
    }

    #[test]
    fn children_with_their_masters_address_take_no_other_and_no_dhcp() {
        refuses(IPVLAN, &config(), ETHERNET, Some("dhcp"), "dhcp");
        refuses(IPOIB, &config(), INFINIBAND, Some("dhcp"), "dhcp");
        refuses(IPVLAN, &with_mac(), ETHERNET, None, "mac");
        fits(MACVLAN, &config(), &link(ETHERNET), Some("dhcp")).unwrap();
        fits(MACVLAN, &with_mac(), &link(ETHERNET), None).unwrap();
        let passthru = |config: Config| Config {
            mode: Some("passthru".into()),
            ..config
        };
        refuses(MACVLAN, &passthru(with_mac()), ETHERNET, None, "passthru");
        fits(MACVLAN, &passthru(config()), &link(ETHERNET), None).unwrap();
    }

    #[test]
    fn a_netdev_that_moves_takes_an_address_on_ethernet_only() {
        refuses(Attach::Move, &with_mac(), INFINIBAND, None, "mac");
        fits(Attach::Move, &with_mac(), &link(ETHERNET), None).unwrap();
    }

    #[test]
    fn an_mtu_is_bounded_by_master_and_netdev() {
        let mtu = |mtu| Config {
            mtu: Some(mtu),
            ..config()
        };
        refuses(MACVLAN, &mtu(1501), ETHERNET, None, "mtu");
        refuses(Attach::Move, &mtu(9001), ETHERNET, None, "mtu");
        fits(MACVLAN, &mtu(1500), &link(ETHERNET), None).unwrap();
        fits(Attach::Move, &mtu(9000), &link(ETHERNET), None).unwrap();
        refuses(IPOIB, &mtu(4092), INFINIBAND, None, "mtu");
        let connected = Config {
            mode: Some("connected".into()),
            ..mtu(4092)
        };
        fits(IPOIB, &connected, &link(INFINIBAND), None).unwrap();
    }

    #[test]
    fn a_partition_that_the_port_is_not_in_is_refused_with_those_it_is_in() {
        let on = |pkeys: Option<Vec<u16>>| Resolved::Child {
            kind: ChildKind::Ipoib,
            parent: Parent::OfHost(HostLink {
                link: link(INFINIBAND),
                rdma: vec![hca::PortId {
                    device: "mlx5_0".into(),
                    port: 1,
                }],
                pkeys,
                ..HostLink::default()
            }),
        };
        let pkey = |pkey| Config {
            pkey: Some(pkey),
            ..config()
        };
        let table = || Some(vec![0xffff, 0x8001, 0x0002]);
        let error = check(&on(table()), &pkey(0x8009), None).unwrap_err();
        assert_eq!(error.code, Code::TryAgain);
        for word in ["0x8009", "mlx5_0", "0x8001 (full), 0x0002 (limited)"] {
            assert!(error.msg.contains(word), "{word}: {error}");
        }
        // The bit of the membership is not part of the partition's number.
        check(&on(table()), &pkey(0x8002), None).unwrap();
        check(&on(table()), &pkey(0x0001), None).unwrap();
        check(&on(None), &pkey(0x8009), None).unwrap();
        // A parent that says nothing of itself is in the default partition.
        check(&on(table()), &config(), None).unwrap();
    }

    #[test]
    fn a_key_of_one_kind_is_refused_for_another() {
        let pkey = Config {
            pkey: Some(0x8001),
            ..config()
        };
        let queue = Config {
            broadcast_queue: Some(9),
            ..config()
        };
        refuses(MACVLAN, &pkey, ETHERNET, None, "pkey");
        refuses(Attach::Move, &pkey, ETHERNET, None, "pkey");
        refuses(IPVLAN, &queue, ETHERNET, None, "bcqueuelen");
        fits(IPOIB, &pkey, &link(INFINIBAND), None).unwrap();
        fits(MACVLAN, &queue, &link(ETHERNET), None).unwrap();
    }

    #[test]
    fn rdma_only_has_no_interface_to_describe() {
        keys_of_rdma_only(&config()).unwrap();
        let text = || Some("word".to_owned());
        for (key, config) in [
            (
                "master",
                Config {
                    master: text(),
                    ..config()
                },
            ),
            (
                "mode",
                Config {
                    mode: text(),
                    ..config()
                },
            ),
            (
                "linkInContainer",
                Config {
                    link_in_container: true,
                    ..config()
                },
            ),
            (
                "mtu",
                Config {
                    mtu: Some(1500),
                    ..config()
                },
            ),
            (
                "pkey",
                Config {
                    pkey: Some(1),
                    ..config()
                },
            ),
            (
                "bcqueuelen",
                Config {
                    broadcast_queue: Some(1),
                    ..config()
                },
            ),
        ] {
            let error = keys_of_rdma_only(&config).unwrap_err();
            assert!(error.msg.starts_with(key), "{key}: {error}");
        }
    }

    #[test]
    fn keys_are_checked_against_what_the_request_resolves_to() {
        let nic = || {
            Resolved::Move(HostLink {
                link: link(1),
                ..HostLink::default()
            })
        };
        let child = || Resolved::Child {
            kind: ChildKind::Macvlan,
            parent: Parent::OfHost(HostLink {
                link: link(1),
                ..HostLink::default()
            }),
        };
        let mode = Config {
            mode: Some("bridge".into()),
            ..config()
        };
        let within = Config {
            link_in_container: true,
            ..config()
        };
        let device = Config {
            device: Some(crate::config::Target::Name("eth2".into())),
            ..config()
        };
        for (resolved, config, key) in [
            (nic(), &mode, "mode"),
            (nic(), &within, "linkInContainer"),
            (child(), &device, "device"),
        ] {
            let error = check(&resolved, config, None).unwrap_err();
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(
                error.msg.contains(key) && !error.details.is_empty(),
                "{error}"
            );
        }
        check(&nic(), &device, None).unwrap();
        check(&child(), &mode, None).unwrap();
    }
}
