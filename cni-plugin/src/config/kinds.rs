//! For which kinds of attachment each key has a meaning, and which keys exclude each other. Pure.

use attachment::part::MacvlanMode;
use cni_wire::{Code, Error};
use hca::UnitId;

use super::{Attach, ChildKind, Config, Devices, Target, attach::one_of};
use crate::rdma::RdmaRequirement;

const MOVE: Attach = Attach::Move;
const MACVLAN: Attach = Attach::Child(ChildKind::Macvlan);
const IPVLAN: Attach = Attach::Child(ChildKind::Ipvlan);
const IPOIB: Attach = Attach::Child(ChildKind::Ipoib);
const CHILDREN: &[Attach] = &[MACVLAN, IPVLAN, IPOIB];
/// Those with an interface of their own.
const INTERFACES: &[Attach] = &[MOVE, MACVLAN, IPVLAN, IPOIB];
/// Those that take a device from the host.
const TAKING: &[Attach] = &[MOVE, Attach::RdmaOnly];

/// What decides in the place of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decider {
    /// A key that names a netdev of the host to be moved.
    Device,
    /// `devices: all`: each of the pod's units.
    Units,
    /// A slot, which the daemon binds to an HCA.
    Slot,
}

use Decider::{Device, Slot, Units};

/// A key that a configuration has, the kinds that it has a meaning for, and beside what it has none.
type Key = (&'static str, &'static [Attach], &'static [Decider]);

impl Config {
    fn keys(&self) -> impl Iterator<Item = Key> {
        const DEVICE: &str = "device, hwaddr, kernelpath or pciBusID";
        let by_rdma_device = matches!(self.device, Some(Target::RdmaDevice(_)));
        let vf = &self.vf;
        let required = self.rdma == RdmaRequirement::Required;
        let off = self.rdma == RdmaRequirement::Off;
        let rdma_only = self.attach == Attach::RdmaOnly;
        let keys: [(bool, Key); 24] = [
            (
                self.device.is_some() && !by_rdma_device,
                (DEVICE, &[MOVE], &[Units, Slot]),
            ),
            (by_rdma_device, ("rdmaDevice", TAKING, &[Units, Slot])),
            (
                self.master.is_some(),
                ("master", CHILDREN, &[Device, Units, Slot]),
            ),
            (self.mode.is_some(), ("mode", CHILDREN, &[])),
            (self.mtu.is_some(), ("mtu", INTERFACES, &[])),
            (self.mac.is_some(), ("mac", &[MOVE, MACVLAN], &[Units])),
            (vf.node_guid.is_some(), ("guid", &[MOVE], &[Units])),
            (vf.vlan.is_some(), ("vlan", &[MOVE], &[])),
            (vf.trust.is_some(), ("trust", &[MOVE], &[])),
            (vf.spoof_check.is_some(), ("spoofchk", &[MOVE], &[])),
            (vf.link_state.is_some(), ("link_state", &[MOVE], &[])),
            (vf.min_tx_rate.is_some(), ("min_tx_rate", &[MOVE], &[])),
            (vf.max_tx_rate.is_some(), ("max_tx_rate", &[MOVE], &[])),
            (
                self.broadcast_queue.is_some(),
                ("bcqueuelen", &[MACVLAN], &[]),
            ),
            (self.pkey.is_some(), ("pkey", &[IPOIB], &[])),
            (self.user_multicast.is_some(), ("umcast", &[IPOIB], &[])),
            (self.link_local.is_some(), ("linkLocal", INTERFACES, &[])),
            (self.accept_ra, ("acceptRA", INTERFACES, &[])),
            (self.dad, ("dad", INTERFACES, &[])),
            (self.rail.is_some(), ("rail", INTERFACES, &[Units])),
            (self.rails.wanted.is_some(), ("rails", INTERFACES, &[])),
            (required, ("rdma: required", TAKING, &[])),
            (off, ("rdma: off", INTERFACES, &[])),
            (
                rdma_only,
                ("attach: rdma-only", &[Attach::RdmaOnly], &[Slot]),
            ),
        ];
        keys.into_iter()
            .filter_map(|(is_set, key)| is_set.then_some(key))
    }

    /// Refuses keys beside what decides in their place.
    pub(super) fn agrees(&self) -> Result<(), Error> {
        let slot = self.allocation.as_ref();
        let slot = slot.filter(|a| matches!(a.unit, UnitId::Slot { .. }));
        let deciders = [
            (
                Device,
                self.device_key().map(str::to_owned),
                "which names a netdev of the host to be moved",
            ),
            (
                Units,
                (self.devices == Devices::All).then(|| "devices: all".to_owned()),
                "where each of the pod's units decides about its own interface",
            ),
            (
                Slot,
                slot.map(|slot| format!("deviceID {}", slot.text)),
                "which is a slot and decides the netdev",
            ),
        ];
        for (decider, by, why) in deciders {
            let Some(by) = by else { continue };
            let idle = |(_, _, beside): &Key| beside.contains(&decider);
            if let Some((key, ..)) = self.keys().find(idle) {
                return Err(invalid(
                    format!("{key}: has no meaning beside {by}, {why}"),
                    format!("leave out {key}, or {by}"),
                ));
            }
        }
        Ok(())
    }

    /// Refuses keys that have no meaning for the kind of attachment, or beside each other.
    pub(super) fn fits(&self, ipam: Option<&str>) -> Result<(), Error> {
        let attach = self.attach;
        let ipam_key = ipam.map(|_| -> Key { ("ipam", INTERFACES, &[]) });
        let mut given = self.keys().chain(ipam_key);
        if let Some((key, kinds, _)) = given.find(|(_, kinds, _)| !kinds.contains(&attach)) {
            return Err(invalid(
                format!("{key}: has no meaning for attach {}", attach.as_str()),
                format!(
                    "leave it out, or set attach to {}",
                    one_of(kinds.iter().map(|kind| kind.as_str()))
                ),
            ));
        }
        if self.accept_ra && self.rails.wanted == Some(true) {
            return Err(invalid(
                "acceptRA: a default route of router advertisements is not in the routing table that rails make".to_owned(),
                "name the gateway in ipam, or set rails to false",
            ));
        }
        match attach {
            MACVLAN if self.macvlan_mode()? == MacvlanMode::Passthru && self.mac.is_some() => {
                Err(invalid(
                    "mac: a macvlan in mode passthru has its master's address".to_owned(),
                    "leave mac out, or use mode bridge",
                ))
            }
            Attach::Child(ChildKind::Ipvlan) => self.ipvlan_mode().map(drop),
            Attach::Child(ChildKind::Ipoib) => self.ipoib_mode().map(drop),
            _ => Ok(()),
        }
    }
}

fn invalid(msg: String, remedy: impl AsRef<str>) -> Error {
    Error::new(Code::InvalidConfig, msg).with_details(remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It is refused with what to do instead, and the message contains the word.
    fn refuses(attach: Attach, config: &Config, ipam: Option<&str>, word: &str) {
        let error = as_kind(attach, config).fits(ipam).unwrap_err();
        assert_eq!(error.code, Code::InvalidConfig);
        assert!(
            error.msg.contains(word) && !error.details.is_empty(),
            "{word}: {error}"
        );
    }

    fn as_kind(attach: Attach, config: &Config) -> Config {
        Config {
            attach,
            ..config.clone()
        }
    }

    fn with(change: impl Fn(&mut Config)) -> Config {
        let mut config = Config::default();
        change(&mut config);
        config
    }

    #[test]
    fn a_key_is_refused_for_kinds_that_it_has_no_meaning_for() {
        let pkey = with(|c| c.pkey = Some(0x8001));
        let umcast = with(|c| c.user_multicast = Some(true));
        let queue = with(|c| c.broadcast_queue = Some(9));
        let mode = with(|c| c.mode = Some("bridge".into()));
        let mac = with(|c| c.mac = "02:00:00:00:00:01".parse().ok());
        let device = with(|c| c.device = Some(Target::Name("eth2".into())));
        let rdma_device = with(|c| c.device = Some(Target::RdmaDevice("mlx5_0".into())));
        for (config, key, refused, fits) in [
            (
                &pkey,
                "pkey",
                &[MACVLAN, Attach::Move, Attach::RdmaOnly][..],
                IPOIB,
            ),
            (&umcast, "umcast", &[MACVLAN, IPVLAN, Attach::Move], IPOIB),
            (&queue, "bcqueuelen", &[IPVLAN, Attach::RdmaOnly], MACVLAN),
            (&mode, "mode", &[Attach::Move, Attach::RdmaOnly], MACVLAN),
            (
                &mac,
                "mac",
                &[IPVLAN, IPOIB, Attach::RdmaOnly],
                Attach::Move,
            ),
            (&device, "device", CHILDREN, Attach::Move),
            (&device, "device", &[Attach::RdmaOnly], Attach::Move),
            (&rdma_device, "rdmaDevice", CHILDREN, Attach::RdmaOnly),
        ] {
            for attach in refused {
                refuses(*attach, config, None, key);
            }
            as_kind(fits, config).fits(None).unwrap();
        }
        for (config, key) in [
            (with(|c| c.mtu = Some(1500)), "mtu"),
            (with(|c| c.accept_ra = true), "acceptRA"),
            (with(|c| c.rails.wanted = Some(false)), "rails"),
        ] {
            refuses(Attach::RdmaOnly, &config, None, key);
        }
        refuses(Attach::RdmaOnly, &Config::default(), Some("static"), "ipam");
    }

    #[test]
    fn a_slot_and_a_link_together_are_refused_by_name() {
        let unit: UnitId = "slot_3e71787e_0".parse().unwrap();
        let slot = with(|c| {
            c.allocation = Some(crate::config::Allocation {
                unit: unit.clone(),
                text: "slot_3e71787e_0".into(),
            });
        });
        slot.agrees().unwrap();
        let with_link = |change: &dyn Fn(&mut Config)| {
            let mut config = slot.clone();
            change(&mut config);
            config
        };
        let device = Target::Name("eth1".into());
        for (config, named) in [
            (with_link(&|c| c.master = Some("eth1".into())), "master"),
            (with_link(&|c| c.device = Some(device.clone())), "device"),
            (with_link(&|c| c.attach = Attach::RdmaOnly), "rdma-only"),
        ] {
            let error = config.agrees().unwrap_err();
            assert_eq!(error.code, Code::InvalidConfig);
            let both = error.msg.contains(named) && error.msg.contains("slot_3e71787e_0");
            assert!(both, "{error}");
        }
    }

    #[test]
    fn a_macvlan_in_mode_passthru_has_no_mac_of_its_own() {
        let passthru = with(|c| c.mode = Some("passthru".into()));
        as_kind(MACVLAN, &passthru).fits(None).unwrap();
        let with_mac = Config {
            mac: "02:00:00:00:00:01".parse().ok(),
            ..passthru
        };
        refuses(MACVLAN, &with_mac, None, "passthru");
    }

    #[test]
    fn router_advertisements_and_rails_exclude_each_other() {
        let mut config = with(|c| c.accept_ra = true);
        config.fits(None).unwrap();
        config.rails.wanted = Some(true);
        refuses(MACVLAN, &config, None, "acceptRA");
    }
}
