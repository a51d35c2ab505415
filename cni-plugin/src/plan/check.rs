//! Whether what a request asks for fits the link that it resolves to, and what the interface is
//! given. Pure.

use cni_wire::Code;
use netlink::link::Link;

use crate::{
    config::{Attach, ChildKind, Config},
    error::Error,
    resolve::Resolved,
};

/// The smallest MTU of a link with IPv6 (RFC 8200, section 5); below it the kernel takes IPv6 away.
const MIN_IPV6_MTU: u32 = 1280;

/// Refuses what the kernel would refuse with a worse message, or take and do something else.
///
/// # Errors
/// Code 7 naming the key and what to do instead.
pub fn check(resolved: &Resolved, config: &Config) -> Result<(), Error> {
    let link = resolved.link();
    link.map_or(Ok(()), |link| fits(resolved.attach(), config, link))
}

/// Refuses IPv6 on an interface whose MTU is too small for it. `given` says whether an
/// address or route of it needs IPv6.
///
/// # Errors
/// Code 7.
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
fn fits(attach: Attach, config: &Config, link: &Link) -> Result<(), Error> {
    mtu_fits(attach, config, link)?;
    match attach {
        Attach::Move if config.mac.is_some() && link.hardware != 1 => Err(invalid(
            format!("mac: {} is not an Ethernet link", link.name),
            "leave mac out",
        )),
        Attach::Child(ChildKind::Macvlan) if link.is_infiniband() => Err(invalid(
            format!(
                "{} is IP over InfiniBand, which has no MAC addresses for a macvlan",
                link.name
            ),
            "set attach to ipoib for a child with a partition key of its own, or to ipvlan",
        )),
        Attach::Child(ChildKind::Macvlan) => is_ethernet(ChildKind::Macvlan, link),
        Attach::Child(ChildKind::Ipvlan) if !link.is_infiniband() => {
            is_ethernet(ChildKind::Ipvlan, link)
        }
        Attach::Child(ChildKind::Ipoib) if !link.is_infiniband() => Err(invalid(
            format!("{} is not an IP over InfiniBand link", link.name),
            "set attach to macvlan for an Ethernet netdev",
        )),
        Attach::Move | Attach::Child(_) | Attach::RdmaOnly => Ok(()),
    }
}

fn invalid(msg: String, remedy: impl AsRef<str>) -> Error {
    Error::new(Code::InvalidConfig, msg).with_details(remedy)
}

fn mtu_fits(attach: Attach, config: &Config, link: &Link) -> Result<(), Error> {
    let most = match attach {
        Attach::Move => link.max_mtu,
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

fn is_ethernet(kind: ChildKind, link: &Link) -> Result<(), Error> {
    match link.hardware {
        1 => Ok(()),
        _ => Err(invalid(
            format!(
                "{} is not an Ethernet link and cannot carry a {}",
                link.name,
                kind.as_str()
            ),
            "name an Ethernet netdev as master",
        )),
    }
}

#[cfg(test)]
mod tests {
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
        let error = fits(attach, config, &link(hardware)).unwrap_err();
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
        refuses(MACVLAN, &config(), INFINIBAND, "InfiniBand");
        refuses(IPOIB, &config(), ETHERNET, "InfiniBand");
        // ARPHRD_LOOPBACK
        refuses(MACVLAN, &config(), 772, "not an Ethernet");
        refuses(IPVLAN, &config(), 772, "not an Ethernet");
        fits(IPVLAN, &config(), &link(INFINIBAND)).unwrap();
        fits(IPOIB, &config(), &link(INFINIBAND)).unwrap();
    }

    #[test]
    fn a_netdev_that_moves_takes_an_address_on_ethernet_only() {
        refuses(Attach::Move, &with_mac(), INFINIBAND, "mac");
        fits(Attach::Move, &with_mac(), &link(ETHERNET)).unwrap();
    }

    #[test]
    fn an_mtu_is_bounded_by_master_and_netdev() {
        let mtu = |mtu| Config {
            mtu: Some(mtu),
            ..config()
        };
        refuses(MACVLAN, &mtu(1501), ETHERNET, "mtu");
        refuses(Attach::Move, &mtu(9001), ETHERNET, "mtu");
        fits(MACVLAN, &mtu(1500), &link(ETHERNET)).unwrap();
        fits(Attach::Move, &mtu(9000), &link(ETHERNET)).unwrap();
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
