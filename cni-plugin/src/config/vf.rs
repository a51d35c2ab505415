//! The settings of a VF, in the forms of `sriov-cni` and `ib-sriov-cni`. Pure.

use attachment::netdev::vf::{Protocol, VfSettings, Vlan, on_off};
use cni_wire::Error;
use hca::Guid;
use node::policy::AllowVf;

use super::{Keys, invalid};

cni_wire::words! {
    /// As `sriov-cni` writes true and false.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Switch {
        On = "on",
        Off = "off",
    }
}

/// # Errors
/// Code 7 naming the key.
pub(super) fn settings(keys: &Keys, guid: Option<Guid>) -> Result<VfSettings, Error> {
    let (min_tx_rate, max_tx_rate) = (keys.min_tx_rate, keys.max_tx_rate);
    if let (Some(min), Some(max @ 1..)) = (min_tx_rate, max_tx_rate)
        && min > max
    {
        let msg = format!("min_tx_rate: {min} is more than the max_tx_rate {max}");
        return Err(invalid(msg, "exchange them, or leave one out"));
    }
    let is_on = |switch| switch == Switch::On;
    Ok(VfSettings {
        trust: keys.trust.map(is_on),
        spoof_check: keys.spoofchk.map(is_on),
        vlan: vlan(keys)?,
        min_tx_rate,
        max_tx_rate,
        link_state: keys.link_state,
        mac: None,
        node_guid: guid,
        port_guid: guid,
    })
}

fn vlan(keys: &Keys) -> Result<Option<Vlan>, Error> {
    let (qos, protocol) = (
        keys.vlan_qos.unwrap_or(0),
        keys.vlan_proto.unwrap_or_default(),
    );
    let is_plain = qos == 0 && protocol == Protocol::Q;
    match keys.vlan {
        Some(id) if id > 0 || is_plain => Ok(Some(Vlan { id, qos, protocol })),
        None if is_plain => Ok(None),
        _ => {
            let key = if qos > 0 { "vlanQoS" } else { "vlanProto" };
            Err(invalid(
                format!("{key}: has a meaning only with a VLAN"),
                "set vlan to 1 or more, or leave it out",
            ))
        }
    }
}

fn text<T: ToString>(value: Option<T>) -> Option<String> {
    value.map(|value| value.to_string())
}

/// The first key that asks for what the policy does not allow, with its value. Pure.
pub(crate) fn denied(vf: &VfSettings, allow: &AllowVf) -> Option<(&'static str, String)> {
    let (guid, id) = (vf.node_guid, vf.vlan.map(|vlan| vlan.id));
    let qos = vf.vlan.map(|vlan| vlan.qos).filter(|qos| *qos > 0);
    let protocol = vf.vlan.map(|vlan| vlan.protocol);
    let protocol = protocol.filter(|protocol| *protocol != Protocol::Q);
    let guids = guid.is_some_and(|guid| allow.guid.iter().any(|range| range.contains(&guid.0)));
    let vlans = id.is_some_and(|id| allow.vlan.iter().any(|range| range.contains(&id)));
    let keys = [
        ("guid", text(guid), guids),
        ("vlan", text(id), vlans),
        ("vlanQoS", text(qos), allow.vlan_qos),
        ("vlanProto", text(protocol), allow.vlan_proto),
        ("trust", text(vf.trust.map(on_off)), allow.trust),
        ("spoofchk", text(vf.spoof_check.map(on_off)), allow.spoofchk),
        ("link_state", text(vf.link_state), allow.link_state),
        ("min_tx_rate", text(vf.min_tx_rate), allow.min_tx_rate),
        ("max_tx_rate", text(vf.max_tx_rate), allow.max_tx_rate),
    ];
    let mut keys = keys.into_iter();
    keys.find_map(|(key, value, is_allowed)| Some((key, value.filter(|_| !is_allowed)?)))
}

#[cfg(test)]
mod tests {
    use attachment::netdev::vf::LinkState;
    use cni_wire::Section;
    use serde_json::{Value, json};

    use super::*;

    fn with_guid(keys: Value, guid: Option<Guid>) -> Result<VfSettings, Error> {
        let keys = cni_wire::json::parse(keys.to_string()).unwrap();
        settings(&super::super::keys::read(&Section::root(&keys))?, guid)
    }

    fn read(keys: Value) -> Result<VfSettings, Error> {
        with_guid(keys, None)
    }

    #[test]
    fn settings_have_the_forms_of_sriov_cni() {
        let all = json!({"vlan": 100, "vlanQoS": 5, "vlanProto": "802.1AD", "trust": "on",
            "spoofchk": "off", "link_state": "enable", "min_tx_rate": 100, "max_tx_rate": 200});
        let settings = VfSettings {
            vlan: Some(Vlan {
                id: 100,
                qos: 5,
                protocol: Protocol::Ad,
            }),
            trust: Some(true),
            spoof_check: Some(false),
            link_state: Some(LinkState::Enable),
            min_tx_rate: Some(100),
            max_tx_rate: Some(200),
            ..VfSettings::default()
        };
        assert_eq!(read(all), Ok(settings));
        let nothing = json!({"trust": "", "vlan": null, "vlanQoS": 0, "vlanProto": "802.1q"});
        assert_eq!(read(nothing), Ok(VfSettings::default()));
        assert_eq!(
            read(json!({"vlan": 0, "vlanQoS": 0}))
                .unwrap()
                .vlan
                .unwrap()
                .id,
            0
        );
        // 0 means without a limit.
        assert!(read(json!({"min_tx_rate": 9, "max_tx_rate": 0})).is_ok());
    }

    #[test]
    fn wrong_settings_are_refused_by_name() {
        for (keys, named) in [
            (json!({"vlan": 4095}), "vlan"),
            (json!({"vlan": -1}), "vlan"),
            (json!({"vlan": "7"}), "vlan"),
            (json!({"vlan": 7, "vlanQoS": 8}), "vlanQoS"),
            (json!({"vlanQoS": 1}), "vlanQoS"),
            (json!({"vlan": 0, "vlanQoS": 1}), "vlanQoS"),
            (json!({"vlan": 0, "vlanProto": "802.1ad"}), "vlanProto"),
            (json!({"vlan": 7, "vlanProto": "802.1x"}), "vlanProto"),
            (json!({"trust": true}), "trust"),
            (json!({"trust": "yes"}), "trust"),
            (json!({"spoofchk": "1"}), "spoofchk"),
            (json!({"link_state": "up"}), "link_state"),
            (json!({"min_tx_rate": -1}), "min_tx_rate"),
            (json!({"min_tx_rate": 2, "max_tx_rate": 1}), "min_tx_rate"),
        ] {
            let error = read(keys.clone()).unwrap_err();
            assert!(error.msg.starts_with(named), "{keys}: {error}");
        }
    }

    #[test]
    fn each_key_needs_its_own_word_in_the_policy() {
        let all = json!({"vlan": 100, "vlanQoS": 1, "vlanProto": "802.1ad", "trust": "off",
            "spoofchk": "on", "link_state": "auto", "min_tx_rate": 0, "max_tx_rate": 0});
        let settings = with_guid(all, Some(Guid(0x0200_0000_0000_0008))).unwrap();
        let mut allow = AllowVf::default();
        type Grant = fn(&mut AllowVf);
        let grants: [(&str, Grant); 9] = [
            ("guid", |allow| {
                allow.guid = vec![1..=1, 0x0200_0000_0000_0000..=0x0200_0000_0000_0008];
            }),
            ("vlan", |allow| allow.vlan = vec![7..=7, 100..=199]),
            ("vlanQoS", |allow| allow.vlan_qos = true),
            ("vlanProto", |allow| allow.vlan_proto = true),
            ("trust", |allow| allow.trust = true),
            ("spoofchk", |allow| allow.spoofchk = true),
            ("link_state", |allow| allow.link_state = true),
            ("min_tx_rate", |allow| allow.min_tx_rate = true),
            ("max_tx_rate", |allow| allow.max_tx_rate = true),
        ];
        for (key, grant) in grants {
            assert_eq!(denied(&settings, &allow).unwrap().0, key);
            grant(&mut allow);
        }
        assert_eq!(denied(&settings, &allow), None);
        allow.guid = vec![1..=0x0200_0000_0000_0007];
        allow.vlan = vec![0..=99, 101..=4094];
        let first = denied(&settings, &allow).unwrap();
        assert_eq!(first, ("guid", "0200:0000:0000:0008".to_owned()));
        allow.guid = vec![0..=u64::MAX];
        assert_eq!(denied(&settings, &allow), Some(("vlan", "100".to_owned())));
    }
}
