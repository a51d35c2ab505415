//! What a configuration alone says of the kind of attachment. Pure.

use netlink::link::Link;

use crate::config::{Attach, ChildKind, Config};

/// What the configuration alone says of the kind.
///
/// Without `attach`, a device ID of an exclusive pool and a netdev named for moving mean `move`; a
/// shared device ID and a master mean a child of the kind that the link can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requested {
    /// `move`.
    Move,
    /// A child of this kind, or of the kind that fits the link.
    Child(Option<ChildKind>),
    /// `rdma-only`.
    RdmaOnly,
}

impl Requested {
    /// The kind of attachment, where the link does not decide it.
    pub fn attach(self) -> Option<Attach> {
        match self {
            Requested::Move => Some(Attach::Move),
            Requested::Child(kind) => kind.map(Attach::Child),
            Requested::RdmaOnly => Some(Attach::RdmaOnly),
        }
    }
}

impl Config {
    /// The kind that it asks for.
    pub fn requested(&self) -> Requested {
        let exclusive = self.allocation.as_ref().is_some_and(|allocation| {
            // A slot is an HCA as a whole, too.
            use hca::UnitId::{Exclusive, Slot};
            matches!(allocation.unit, Exclusive(_) | Slot { .. })
        });
        match self.attach {
            Some(Attach::Move) => Requested::Move,
            Some(Attach::Child(kind)) => Requested::Child(Some(kind)),
            Some(Attach::RdmaOnly) => Requested::RdmaOnly,
            None if self.master.is_some() => Requested::Child(None),
            None if self.device.is_some() || exclusive => Requested::Move,
            None => Requested::Child(None),
        }
    }
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
            hcas: Vec::new(),
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
            assert_eq!(config.requested(), expected, "{config:?}");
        }
        let on = |hardware| {
            kind_on(&Link {
                hardware,
                ..Link::default()
            })
        };
        assert_eq!((on(1), on(32)), (ChildKind::Macvlan, ChildKind::Ipoib));
    }
}
