//! For which kinds of attachment each key has a meaning, and which keys exclude each other. Pure.

use attachment::part::{IpoibMode, IpvlanMode, MacvlanMode};
use cni_wire::{Error, text::one_of};
use hca::UnitId;

use super::{Attach, ChildKind, Config, Devices, Keys, invalid};
use crate::rdma::RdmaRequirement::{Off, Required};

const MOVE: Attach = Attach::Move;
const MACVLAN: Attach = Attach::Child(ChildKind::Macvlan);
const IPVLAN: Attach = Attach::Child(ChildKind::Ipvlan);
const IPOIB: Attach = Attach::Child(ChildKind::Ipoib);
const RDMA_ONLY: Attach = Attach::RdmaOnly;
const CHILDREN: &[Attach] = &[MACVLAN, IPVLAN, IPOIB];
/// Those with a netdev of their own.
const NETDEVS: &[Attach] = &[MOVE, MACVLAN, IPVLAN, IPOIB];
/// Those that take a device from the host.
const TAKING: &[Attach] = &[MOVE, RDMA_ONLY];

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

const ANY: &[Decider] = &[Device, Units, Slot];
/// Those that are a unit of the pod.
const UNIT: &[Decider] = &[Units, Slot];

/// Keys that name a netdev to be moved, in the order of the host-device plugin. Multus writes pciBusID
/// into every configuration.
const NAMING: [&str; 4] = ["device", "hwaddr", "kernelpath", "rdmaDevice"];

/// A key, whether it asks for something, the kinds of attachment that it has a meaning for, and the
/// deciders beside which it has none.
type Row = (&'static str, bool, &'static [Attach], &'static [Decider]);

/// The keys that are not for all kinds. `has_bus` is whether pciBusID names a netdev, and not the
/// allocation.
fn rows(keys: &Keys, config: &Config, has_bus: bool, has_ipam: bool) -> [Row; 28] {
    let (vf, rdma, queue) = (&config.vf, config.rdma, config.broadcast_queue);
    let is_rdma_only = config.attach == RDMA_ONLY;
    [
        ("device", keys.device.is_some(), &[MOVE], UNIT),
        ("hwaddr", keys.hwaddr.is_some(), &[MOVE], UNIT),
        ("kernelpath", keys.kernelpath.is_some(), &[MOVE], UNIT),
        ("pciBusID", has_bus, &[MOVE], UNIT),
        ("rdmaDevice", keys.rdma_device.is_some(), TAKING, UNIT),
        ("master", config.master.is_some(), CHILDREN, ANY),
        ("mode", config.mode.is_some(), CHILDREN, &[]),
        ("mac", config.mac.is_some(), &[MOVE, MACVLAN], &[Units]),
        ("guid", vf.node_guid.is_some(), &[MOVE], &[Units]),
        ("vlan", vf.vlan.is_some(), &[MOVE], &[]),
        ("trust", vf.trust.is_some(), &[MOVE], &[]),
        ("spoofchk", vf.spoof_check.is_some(), &[MOVE], &[]),
        ("link_state", vf.link_state.is_some(), &[MOVE], &[]),
        ("min_tx_rate", vf.min_tx_rate.is_some(), &[MOVE], &[]),
        ("max_tx_rate", vf.max_tx_rate.is_some(), &[MOVE], &[]),
        ("bcqueuelen", queue.is_some(), &[MACVLAN], &[]),
        ("pkey", config.pkey.is_some(), &[IPOIB], &[]),
        ("umcast", config.user_multicast.is_some(), &[IPOIB], &[]),
        ("rail", config.rail.is_some(), NETDEVS, &[Units]),
        ("mtu", config.mtu.is_some(), NETDEVS, &[]),
        ("linkLocal", config.link_local.is_some(), NETDEVS, &[]),
        ("acceptRA", config.accept_ra, NETDEVS, &[]),
        ("dad", config.dad, NETDEVS, &[]),
        ("sourceRouting", keys.source_routing.is_some(), NETDEVS, &[]),
        ("ipam", has_ipam, NETDEVS, &[]),
        ("rdma: off", rdma == Off, NETDEVS, &[]),
        ("rdma: required", rdma == Required, TAKING, &[]),
        ("attach: rdma-only", is_rdma_only, &[RDMA_ONLY], &[Slot]),
    ]
}

/// Refuses keys that have no meaning for the kind of attachment, or beside each other. Returns notes
/// about those without effect.
pub(super) fn check(
    keys: &Keys,
    config: &Config,
    has_bus: bool,
    has_ipam: bool,
) -> Result<Vec<String>, Error> {
    let attach = config.attach;
    let mut given = rows(keys, config, has_bus, has_ipam).to_vec();
    given.retain(|(_, asks, ..)| *asks);
    let naming = given.iter().map(|(key, ..)| *key);
    let naming: Vec<&str> = naming.filter(|key| NAMING.contains(key)).collect();
    let device = naming.first().copied();
    let slot = config.allocation.as_ref();
    let slot = slot.filter(|a| matches!(a.unit, UnitId::Slot { .. }));
    let units = (config.devices == Devices::All).then(|| "devices: all".to_owned());
    let deciders = [
        (Device, device.map(str::to_owned)),
        (Units, units),
        (Slot, slot.map(|slot| format!("the slot {}", slot.text))),
    ];
    for (decider, by) in deciders {
        let mut rows = given.iter();
        if let (Some(by), Some((key, ..))) = (by, rows.find(|row| row.3.contains(&decider))) {
            return Err(invalid(
                format!("{key}: has no meaning beside {by}, which selects the netdevs"),
                format!("leave out {key}, or {by}"),
            ));
        }
    }
    if let Some((key, _, kinds, _)) = given.iter().find(|row| !row.2.contains(&attach)) {
        let kinds = one_of(kinds.iter().map(|kind| kind.as_str()));
        return Err(invalid(
            format!("{key}: has no meaning for attach {}", attach.as_str()),
            format!("leave it out, or set attach to {kinds}"),
        ));
    }
    match attach {
        MACVLAN if config.mode()? == Some(MacvlanMode::Passthru) && config.mac.is_some() => {
            return Err(invalid(
                "mac: a macvlan in mode passthru has its master's address",
                "leave mac out, or use mode bridge",
            ));
        }
        IPVLAN => drop(config.mode::<IpvlanMode>()?),
        IPOIB => drop(config.mode::<IpoibMode>()?),
        _ => {}
    }
    let idle = naming.iter().skip(1);
    let note = |key| format!("{key} has no effect beside {}", device.unwrap_or_default());
    Ok(idle.map(note).collect())
}

#[cfg(test)]
mod tests {
    use cni_wire::Code;
    use serde_json::{Value, json};

    use super::*;
    use crate::config::tests::read;

    fn with(attach: Attach, keys: &Value) -> Result<Config, Error> {
        let mut keys = keys.clone();
        keys["attach"] = json!(attach.as_str());
        read(keys)
    }

    /// It is refused with what to do instead, and the message contains the word.
    fn refuses(attach: Attach, keys: &Value, word: &str) {
        let error = with(attach, keys).unwrap_err();
        assert_eq!(error.code, Code::InvalidConfig);
        assert!(
            error.msg.contains(word) && !error.details.is_empty(),
            "{word}: {error}"
        );
    }

    #[test]
    fn a_key_is_refused_for_kinds_that_it_has_no_meaning_for() {
        for (key, value, refused, fits) in [
            (
                "pkey",
                json!("0x8001"),
                &[MACVLAN, MOVE, Attach::RdmaOnly][..],
                IPOIB,
            ),
            ("umcast", json!(true), &[MACVLAN, IPVLAN, MOVE], IPOIB),
            ("bcqueuelen", json!(9), &[IPVLAN, Attach::RdmaOnly], MACVLAN),
            ("mode", json!("bridge"), &[MOVE, Attach::RdmaOnly], MACVLAN),
            (
                "mac",
                json!("02:00:00:00:00:01"),
                &[IPVLAN, IPOIB, Attach::RdmaOnly],
                MOVE,
            ),
            ("device", json!("eth2"), CHILDREN, MOVE),
            ("device", json!("eth2"), &[Attach::RdmaOnly], MOVE),
            ("pciBusID", json!("0000:3b:00.0"), &[], MOVE),
            ("rdmaDevice", json!("mlx5_0"), CHILDREN, Attach::RdmaOnly),
            ("vlan", json!(0), CHILDREN, MOVE),
            ("mtu", json!(1500), &[Attach::RdmaOnly], MOVE),
            ("acceptRA", json!(true), &[Attach::RdmaOnly], MOVE),
            ("sourceRouting", json!(false), &[Attach::RdmaOnly], MOVE),
            ("ipam", json!({"type": "static"}), &[Attach::RdmaOnly], MOVE),
        ] {
            for attach in refused {
                refuses(*attach, &json!({ key: value }), key);
            }
            with(fits, &json!({ key: value })).unwrap();
        }
        let nothing = json!({"mtu": 0, "acceptRA": false, "dad": false, "ipam": {}, "mode": ""});
        with(Attach::RdmaOnly, &nothing).unwrap();
    }

    #[test]
    fn a_slot_and_a_link_together_are_refused_by_name() {
        let slot = "slot_3e71787e_0";
        with(MOVE, &json!({ "deviceID": slot })).unwrap();
        for (attach, keys, named) in [
            (MACVLAN, json!({"master": "eth1"}), "master"),
            (MOVE, json!({"device": "eth1"}), "device"),
            (Attach::RdmaOnly, json!({}), "rdma-only"),
        ] {
            let mut keys = keys;
            keys["deviceID"] = json!(slot);
            let error = with(attach, &keys).unwrap_err();
            assert_eq!(error.code, Code::InvalidConfig);
            let both = error.msg.contains(named) && error.msg.contains(slot);
            assert!(both, "{error}");
        }
    }

    #[test]
    fn a_macvlan_in_mode_passthru_has_no_mac_of_its_own() {
        with(MACVLAN, &json!({"mode": "passthru"})).unwrap();
        let with_mac = json!({"mode": "passthru", "mac": "02:00:00:00:00:01"});
        refuses(MACVLAN, &with_mac, "passthru");
    }
}
