//! What becomes the pod's interface, decided before anything is changed. Pure: nothing here asks
//! the kernel, a file or a clock.

use cni_wire::{Code, Error};
use netlink_packet_route::link::IpoibMode;

use crate::{
    config::{Attach, Config},
    kernel::link::{Child, Link},
};

/// The kind of attachment a configuration comes to.
///
/// Without `attach`, a device ID of an exclusive pool and a netdev named for moving mean
/// `move`; a shared device ID and a master mean a child of the kind that the link can have.
pub fn kind(config: &Config) -> Kind {
    let exclusive = config
        .allocation
        .as_ref()
        .is_some_and(|allocation| matches!(allocation.unit, hca::UnitId::Exclusive(_)));
    match config.attach {
        Some(attach) => Kind::Known(attach),
        None if config.master.is_some() => Kind::Child,
        None if config.device.is_some() || exclusive => Kind::Known(Attach::Move),
        None => Kind::Child,
    }
}

/// What [`kind`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// This one.
    Known(Attach),
    /// macvlan on Ethernet, ipoib on InfiniBand.
    Child,
}

impl Kind {
    /// With the link at hand.
    pub fn on(self, link: &Link) -> Attach {
        match self {
            Kind::Known(attach) => attach,
            Kind::Child if link.is_infiniband() => Attach::Ipoib,
            Kind::Child => Attach::Macvlan,
        }
    }
}

/// Refuses what the kernel would refuse in worse words, or take and do something else.
///
/// # Errors
/// Code 7 or 2 naming the key and what to do instead.
pub fn check(
    attach: Attach,
    config: &Config,
    link: &Link,
    ipam: Option<&str>,
) -> Result<(), Error> {
    let name = &link.name;
    let invalid =
        |msg: String, remedy: &str| Err(Error::new(Code::InvalidConfig, msg).with_details(remedy));
    if let Some(mtu) = config.mtu {
        let most = if attach == Attach::Move {
            link.max_mtu
        } else {
            link.mtu
        };
        if most != 0 && mtu > most {
            return invalid(
                format!("mtu: {mtu} is more than the {most} of {name}"),
                "lower it, or raise the MTU of the netdev on the host",
            );
        }
    }
    match attach {
        Attach::Move => {}
        Attach::Macvlan | Attach::Ipvlan if link.hardware != 1 && !link.is_infiniband() => {
            return invalid(
                format!(
                    "{name} is no Ethernet link and cannot carry a {}",
                    attach.as_str()
                ),
                "name an Ethernet netdev as master",
            );
        }
        Attach::Macvlan if link.is_infiniband() => {
            return invalid(
                format!("{name} is IP over InfiniBand, which has no MAC addresses for a macvlan"),
                "set attach to ipoib for a child with a partition key of its own, or to ipvlan",
            );
        }
        Attach::Ipoib if !link.is_infiniband() => {
            return invalid(
                format!("{name} is no IP over InfiniBand link"),
                "set attach to macvlan for an Ethernet netdev",
            );
        }
        Attach::Macvlan | Attach::Ipvlan | Attach::Ipoib | Attach::RdmaOnly => {}
    }
    if attach == Attach::Macvlan {
        let passthru = config.mode.as_deref() == Some("passthru");
        config.macvlan_mode()?;
        if passthru && config.mac.is_some() {
            return invalid(
                "mac: a macvlan in mode passthru has its master's address".into(),
                "leave mac out, or use mode bridge",
            );
        }
    } else if config.broadcast_queue.is_some() {
        return invalid("bcqueuelen belongs to macvlan".into(), "leave it out");
    }
    if matches!(attach, Attach::Ipvlan | Attach::Ipoib) {
        if config.mac.is_some() {
            return invalid(
                format!("mac: an {} has its master's address", attach.as_str()),
                "leave mac out, or use attach macvlan",
            );
        }
        if ipam == Some("dhcp") {
            return invalid(
                format!(
                    "ipam.type dhcp cannot tell the {} children of {name} apart",
                    attach.as_str()
                ),
                "they share one hardware address; use another IPAM",
            );
        }
    }
    if attach == Attach::Move && config.mac.is_some() && link.hardware != 1 {
        return invalid(format!("mac: {name} is no Ethernet link"), "leave mac out");
    }
    if attach == Attach::Ipvlan {
        config.ipvlan_mode()?;
    }
    if attach == Attach::Ipoib {
        config.ipoib_mode()?;
    } else if config.pkey.is_some() {
        return invalid(
            "pkey belongs to ipoib".into(),
            "leave it out, or set attach to ipoib",
        );
    }
    Ok(())
}

/// The child to be made; none for a move.
///
/// `parent_pkey` and `parent_mode` are those of an IPoIB parent.
///
/// # Errors
/// Code 7 naming the mode.
pub fn child(
    attach: Attach,
    config: &Config,
    parent_pkey: u16,
    parent_mode: IpoibMode,
) -> Result<Option<Child>, Error> {
    Ok(match attach {
        Attach::Move | Attach::RdmaOnly => None,
        Attach::Macvlan => Some(Child::Macvlan {
            mode: config.macvlan_mode()?,
            broadcast_queue: config.broadcast_queue,
        }),
        Attach::Ipvlan => Some(Child::Ipvlan {
            mode: config.ipvlan_mode()?,
        }),
        Attach::Ipoib => Some(Child::Ipoib {
            // The kernel wants the membership bit set and works it out from the port's table.
            pkey: config.pkey.unwrap_or(parent_pkey) | 0x8000,
            mode: config.ipoib_mode()?.unwrap_or(parent_mode),
            user_multicast: config.user_multicast,
        }),
    })
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

    fn unit(text: &str) -> Option<crate::config::Allocation> {
        Some(crate::config::Allocation {
            unit: text.parse().unwrap(),
            text: text.into(),
        })
    }

    #[test]
    fn the_allocation_decides_what_is_made_unless_the_configuration_says() {
        let exclusive = Config {
            allocation: unit("0000:3b:00.0"),
            ..config()
        };
        let shared = Config {
            allocation: unit("0000:3b:00.0_3e71787e_17"),
            ..config()
        };
        let master = Config {
            master: Some("eth1".into()),
            ..exclusive.clone()
        };
        let said = Config {
            attach: Some(Attach::Ipvlan),
            ..exclusive.clone()
        };
        let device = Config {
            device: Some(crate::config::Target::Name("e".into())),
            ..config()
        };
        assert_eq!(kind(&exclusive), Kind::Known(Attach::Move));
        assert_eq!(kind(&device), Kind::Known(Attach::Move));
        assert_eq!(kind(&shared), Kind::Child);
        assert_eq!(kind(&master), Kind::Child);
        assert_eq!(kind(&said), Kind::Known(Attach::Ipvlan));
        assert_eq!(Kind::Child.on(&link(1)), Attach::Macvlan);
        assert_eq!(Kind::Child.on(&link(32)), Attach::Ipoib);
    }

    #[test]
    fn impossible_attachments_are_refused_with_what_to_do_instead() {
        let mac: hca::MacAddress = "02:00:00:00:00:01".parse().unwrap();
        let mtu = |mtu| Config {
            mtu: Some(mtu),
            ..config()
        };
        let with_mac = Config {
            mac: Some(mac),
            ..config()
        };
        let passthru = Config {
            mode: Some("passthru".into()),
            ..with_mac.clone()
        };
        let pkey = Config {
            pkey: Some(0x8001),
            ..config()
        };
        let queue = Config {
            broadcast_queue: Some(9),
            ..config()
        };
        for (attach, config, link, ipam, word) in [
            (Attach::Macvlan, config(), link(32), None, "InfiniBand"),
            (Attach::Ipoib, config(), link(1), None, "InfiniBand"),
            (Attach::Macvlan, config(), link(772), None, "no Ethernet"),
            (Attach::Ipvlan, config(), link(1), Some("dhcp"), "dhcp"),
            (Attach::Ipoib, config(), link(32), Some("dhcp"), "dhcp"),
            (Attach::Ipvlan, with_mac.clone(), link(1), None, "mac"),
            (Attach::Move, with_mac, link(32), None, "mac"),
            (Attach::Macvlan, passthru, link(1), None, "passthru"),
            (Attach::Macvlan, mtu(1501), link(1), None, "mtu"),
            (Attach::Move, mtu(9001), link(1), None, "mtu"),
            (Attach::Macvlan, pkey, link(1), None, "pkey"),
            (Attach::Ipvlan, queue, link(1), None, "bcqueuelen"),
        ] {
            let error = check(attach, &config, &link, ipam).unwrap_err();
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(
                error.msg.contains(word) && !error.details.is_empty(),
                "{word}: {error}"
            );
        }
        check(Attach::Macvlan, &mtu(1500), &link(1), Some("dhcp")).unwrap();
        check(Attach::Move, &mtu(9000), &link(1), None).unwrap();
    }
}
