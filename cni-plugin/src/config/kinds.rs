//! For which kinds of attachment each key has a meaning, and which keys exclude each other. Pure.

use attachment::part::MacvlanMode;
use cni_wire::{Code, Error, Section, json::Value, json::resolve};
use hca::UnitId;

use super::{Attach, ChildKind, Config, Devices, attach::one_of, keys};
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

/// Keys that name a netdev to be moved, in the order of the host-device plugin. Multus writes pciBusID
/// into every configuration.
pub(super) const NAMING: [&str; 4] = ["device", "hwaddr", "kernelpath", "rdmaDevice"];

/// Keys in which 0, false and nothing in braces mean that they are not given.
const ZERO_IS_ABSENT: [&str; 5] = ["acceptRA", "bcqueuelen", "dad", "ipam", "mtu"];

const RDMA_ONLY: &str = "attach: rdma-only";

/// The kinds of attachment that a key has a meaning for, and beside what it has none.
fn row(key: &str) -> Option<(&'static [Attach], &'static [Decider])> {
    Some(match key {
        "device" | "hwaddr" | "kernelpath" | "pciBusID" => (&[MOVE], &[Units, Slot]),
        "rdmaDevice" => (TAKING, &[Units, Slot]),
        "master" => (CHILDREN, &[Device, Units, Slot]),
        "mode" => (CHILDREN, &[]),
        "mac" => (&[MOVE, MACVLAN], &[Units]),
        "guid" => (&[MOVE], &[Units]),
        "vlan" | "trust" | "spoofchk" | "link_state" | "min_tx_rate" | "max_tx_rate" => {
            (&[MOVE], &[])
        }
        "bcqueuelen" => (&[MACVLAN], &[]),
        "pkey" | "umcast" => (&[IPOIB], &[]),
        "rail" => (INTERFACES, &[Units]),
        "mtu" | "linkLocal" | "acceptRA" | "dad" | "sourceRouting" | "ipam" | "rdma: off" => {
            (INTERFACES, &[])
        }
        "rdma: required" => (TAKING, &[]),
        RDMA_ONLY => (&[Attach::RdmaOnly], &[Slot]),
        _ => return None,
    })
}

/// The keys that ask for something, those too that runtime and pod add. `by_bus` is whether pciBusID
/// names a netdev, and is not the runtime's word for an allocation.
pub(super) fn given(root: &Section<'_>, config: &Config, by_bus: bool) -> Vec<&'static str> {
    let all = keys::all();
    let asks = |(key, value): (&str, &Value)| {
        let key = resolve(&all, key)?;
        let is_absent = match ZERO_IS_ABSENT.contains(&key) {
            true => keys::asks_for_nothing(value),
            false => *value == Value::String(String::new()),
        };
        (!is_absent).then_some(key)
    };
    let derived = [
        ("pciBusID", by_bus),
        ("mac", config.mac.is_some()),
        ("guid", config.vf.node_guid.is_some()),
        ("pkey", config.pkey.is_some()),
        ("rdma: required", config.rdma == RdmaRequirement::Required),
        ("rdma: off", config.rdma == RdmaRequirement::Off),
        (RDMA_ONLY, config.attach == Attach::RdmaOnly),
    ];
    let written = root.entries().filter_map(asks);
    let written = written.filter(|key| derived.iter().all(|(other, _)| other != key));
    let derived = derived.iter().filter(|(_, is_given)| *is_given);
    written.chain(derived.map(|(key, _)| *key)).collect()
}

/// Refuses keys that have no meaning for the kind of attachment, or beside each other.
pub(super) fn check(config: &Config, given: &[&'static str]) -> Result<(), Error> {
    let attach = config.attach;
    let device = given.iter().find(|key| NAMING.contains(key));
    let units = (config.devices == Devices::All).then(|| "devices: all".to_owned());
    let slot = config.allocation.as_ref();
    let slot = slot.filter(|a| matches!(a.unit, UnitId::Slot { .. }));
    let deciders = [
        (
            Device,
            device.map(|key| (*key).to_owned()),
            "which names a netdev of the host to be moved",
        ),
        (
            Units,
            units,
            "where each of the pod's units decides about its own interface",
        ),
        (
            Slot,
            slot.map(|slot| format!("deviceID {}", slot.text)),
            "which is a slot and decides the netdev",
        ),
    ];
    let rows = || given.iter().filter_map(|key| Some((key, row(key)?)));
    for (decider, by, why) in deciders {
        let Some(by) = by else { continue };
        if let Some((key, _)) = rows().find(|(_, (_, beside))| beside.contains(&decider)) {
            return Err(invalid(
                format!("{key}: has no meaning beside {by}, {why}"),
                format!("leave out {key}, or {by}"),
            ));
        }
    }
    if let Some((key, (kinds, _))) = rows().find(|(_, (kinds, _))| !kinds.contains(&attach)) {
        return Err(invalid(
            format!("{key}: has no meaning for attach {}", attach.as_str()),
            format!(
                "leave it out, or set attach to {}",
                one_of(kinds.iter().map(|kind| kind.as_str()))
            ),
        ));
    }
    if config.accept_ra && config.source_routing.wanted == Some(true) {
        return Err(invalid(
            "acceptRA: a default route of router advertisements is not in the routing table that \
             sourceRouting makes"
                .to_owned(),
            "name the gateway in ipam, or set sourceRouting to false",
        ));
    }
    match attach {
        MACVLAN if config.macvlan_mode()? == MacvlanMode::Passthru && config.mac.is_some() => {
            Err(invalid(
                "mac: a macvlan in mode passthru has its master's address".to_owned(),
                "leave mac out, or use mode bridge",
            ))
        }
        IPVLAN => config.ipvlan_mode().map(drop),
        IPOIB => config.ipoib_mode().map(drop),
        _ => Ok(()),
    }
}

fn invalid(msg: String, remedy: impl AsRef<str>) -> Error {
    Error::new(Code::InvalidConfig, msg).with_details(remedy)
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn router_advertisements_and_source_routing_exclude_each_other() {
        with(MACVLAN, &json!({"acceptRA": true})).unwrap();
        let both = json!({"acceptRA": true, "sourceRouting": true});
        refuses(MACVLAN, &both, "acceptRA");
    }
}
