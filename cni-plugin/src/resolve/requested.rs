//! What a configuration alone says of the kind of attachment. Pure.

use cni_wire::Code;
use netlink::link::Link;

use crate::{
    config::{Attach, ChildKind, Config},
    error::Error,
};

/// What the configuration alone says of the kind.
///
/// Without `attach`, a device ID of an exclusive pool and a netdev named for moving mean `move`; a
/// shared device ID, a master and `linkInContainer` mean a child of the kind that the link can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requested {
    /// `move`.
    Move,
    /// A child of this kind, or of the kind that fits the link.
    Child(Option<ChildKind>),
    /// `rdma-only`.
    RdmaOnly,
}

/// The kind that a configuration asks for.
///
/// # Errors
/// Code 7: `linkInContainer` with a netdev of the host.
pub fn requested(config: &Config) -> Result<Requested, Error> {
    let exclusive = config.allocation.as_ref().is_some_and(|allocation| {
        // A slot is an HCA as a whole, too.
        use hca::UnitId::{Exclusive, Slot};
        matches!(allocation.unit, Exclusive(_) | Slot { .. })
    });
    let requested = match config.attach {
        Some(Attach::Move) => Requested::Move,
        Some(Attach::Child(kind)) => Requested::Child(Some(kind)),
        Some(Attach::RdmaOnly) => Requested::RdmaOnly,
        None if config.master.is_some() => Requested::Child(None),
        None if config.device.is_some() || exclusive => Requested::Move,
        None => Requested::Child(None),
    };
    if config.link_in_container && !matches!(requested, Requested::Child(_)) {
        return Err(Error::new(
            Code::InvalidConfig,
            "linkInContainer: the request is about a netdev of the host, not about an interface of \
             the pod",
        )
        .with_details(
            "set attach to macvlan or ipvlan and master to an interface of the pod, or leave \
             linkInContainer out",
        ));
    }
    Ok(requested)
}

/// The kind of child that a link carries where the configuration does not say.
pub(super) fn kind_on(link: &Link) -> ChildKind {
    match link.is_infiniband() {
        true => ChildKind::Ipoib,
        false => ChildKind::Macvlan,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Target;

    fn unit(text: &str) -> Option<crate::config::Allocation> {
        Some(crate::config::Allocation {
            unit: text.parse().unwrap(),
            text: text.into(),
            slot: None,
        })
    }

    #[test]
    fn the_allocation_decides_the_kind_unless_the_configuration_does() {
        let exclusive = Config {
            allocation: unit("0000:3b:00.0"),
            ..Config::default()
        };
        let slot = Config {
            allocation: unit("slot_3e71787e_0"),
            ..Config::default()
        };
        let shared = Config {
            allocation: unit("0000:3b:00.0_3e71787e_17"),
            ..Config::default()
        };
        let master = Config {
            master: Some("eth1".into()),
            ..exclusive.clone()
        };
        let ipvlan = Config {
            attach: Some(Attach::Child(ChildKind::Ipvlan)),
            ..exclusive.clone()
        };
        let device = Config {
            device: Some(Target::Name("e".into())),
            ..Config::default()
        };
        for (config, expected) in [
            (&exclusive, Requested::Move),
            (&device, Requested::Move),
            (&slot, Requested::Move),
            (&shared, Requested::Child(None)),
            (&master, Requested::Child(None)),
            (&ipvlan, Requested::Child(Some(ChildKind::Ipvlan))),
        ] {
            assert_eq!(requested(config).unwrap(), expected, "{config:?}");
        }
        let on = |hardware| {
            kind_on(&Link {
                hardware,
                ..Link::default()
            })
        };
        assert_eq!((on(1), on(32)), (ChildKind::Macvlan, ChildKind::Ipoib));
    }

    #[test]
    fn link_in_container_excludes_a_netdev_of_the_host() {
        let within = Config {
            link_in_container: true,
            ..Config::default()
        };
        assert_eq!(requested(&within).unwrap(), Requested::Child(None));
        for config in [
            Config {
                device: Some(Target::Name("eth1".into())),
                ..within.clone()
            },
            Config {
                allocation: unit("0000:3b:00.0"),
                ..within.clone()
            },
            Config {
                attach: Some(Attach::Move),
                ..within.clone()
            },
            Config {
                attach: Some(Attach::RdmaOnly),
                ..within.clone()
            },
        ] {
            let error = requested(&config).unwrap_err();
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(error.msg.contains("linkInContainer"), "{error}");
        }
    }
}
