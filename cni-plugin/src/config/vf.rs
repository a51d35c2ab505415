//! The settings of a VF, in the forms of `sriov-cni` and `ib-sriov-cni`. Pure.

use attachment::netdev::vf::{LinkState, Protocol, VfSettings, Vlan, on_off};
use cni_wire::{Error, Section};
use hca::Guid;
use node::policy::{AllowVf, MAX_VLAN};

/// # Errors
/// Code 7 naming the key.
pub(super) fn read(root: &Section<'_>, guid: Option<Guid>) -> Result<VfSettings, Error> {
    let (min_tx_rate, max_tx_rate) = (root.get("min_tx_rate")?, root.get("max_tx_rate")?);
    if let (Some(min), Some(max @ 1..)) = (min_tx_rate, max_tx_rate)
        && min > max
    {
        let why = format_args!("{min} is more than the max_tx_rate {max}");
        return Err(root.wrong("min_tx_rate", why));
    }
    Ok(VfSettings {
        trust: word(root, "trust", &[true, false], on_off)?,
        spoof_check: word(root, "spoofchk", &[true, false], on_off)?,
        vlan: vlan(root)?,
        min_tx_rate,
        max_tx_rate,
        link_state: word(root, "link_state", &LinkState::ALL, LinkState::as_str)?,
        mac: None,
        node_guid: guid,
        port_guid: guid,
    })
}

fn vlan(root: &Section<'_>) -> Result<Option<Vlan>, Error> {
    let (id, qos) = (root.get("vlan")?, root.get("vlanQoS")?.unwrap_or(0));
    let protocol = word(root, "vlanProto", &Protocol::ALL, Protocol::as_str)?;
    let protocol = protocol.unwrap_or_default();
    let id = match (id, qos, protocol) {
        (None, 0, Protocol::Q) => return Ok(None),
        (Some(0), 0, Protocol::Q) => 0,
        (Some(id @ 1..=MAX_VLAN), 0..=7, _) => id,
        (None | Some(0), qos, _) => {
            let key = if qos > 0 { "vlanQoS" } else { "vlanProto" };
            let wrong = root.wrong(key, "has a meaning only with a VLAN");
            return Err(wrong.with_details("set vlan to 1 or more, or leave it out"));
        }
        (Some(1..=MAX_VLAN), ..) => {
            return Err(root.wrong("vlanQoS", format_args!("{qos} is not from 0 to 7")));
        }
        (Some(id), ..) => {
            let why = format_args!("{id} is not a VLAN from 0 to {MAX_VLAN}");
            return Err(root.wrong("vlan", why));
        }
    };
    Ok(Some(Vlan { id, qos, protocol }))
}

/// A word without regard to its case.
fn word<T: Copy>(
    root: &Section<'_>,
    key: &str,
    all: &[T],
    as_str: fn(T) -> &'static str,
) -> Result<Option<T>, Error> {
    let words: Vec<&str> = all.iter().map(|value| as_str(*value)).collect();
    let expected = |wrong: Error| wrong.with_details(format!("expected {}", words.join(", ")));
    let Some(text) = root.text(key).map_err(expected)? else {
        return Ok(None);
    };
    let meant = all
        .iter()
        .find(|value| as_str(**value).eq_ignore_ascii_case(text));
    let wrong = || expected(root.wrong(key, format_args!("{text:?} is not one of its words")));
    meant.copied().map(Some).ok_or_else(wrong)
}

/// The keys that a network sets, each with its value and whether the policy allows that. A VLAN's
/// priority 0 and 802.1q are what a VLAN has without these keys.
fn keys(settings: &VfSettings, allow: &AllowVf) -> Vec<(&'static str, String, bool)> {
    let (guid, vlan) = (settings.node_guid, settings.vlan);
    let id = vlan.map(|vlan| vlan.id);
    let qos = vlan.map(|vlan| vlan.qos).filter(|qos| *qos > 0);
    let protocol = vlan.map(|vlan| vlan.protocol);
    let protocol = protocol.filter(|protocol| *protocol != Protocol::Q);
    let guids = guid.is_some_and(|guid| allow.guid.iter().any(|range| range.contains(&guid.0)));
    let vlans = id.is_some_and(|id| allow.vlan.iter().any(|range| range.contains(&id)));
    let on = |value: Option<bool>| value.map(|on| on_off(on).to_owned());
    let keys = [
        ("guid", guid.map(|guid| guid.to_string()), guids),
        ("vlan", id.map(|id| id.to_string()), vlans),
        ("vlanQoS", qos.map(|qos| qos.to_string()), allow.vlan_qos),
        (
            "vlanProto",
            protocol.map(|p| p.as_str().to_owned()),
            allow.vlan_proto,
        ),
        ("trust", on(settings.trust), allow.trust),
        ("spoofchk", on(settings.spoof_check), allow.spoofchk),
        (
            "link_state",
            settings.link_state.map(|s| s.as_str().to_owned()),
            allow.link_state,
        ),
        (
            "min_tx_rate",
            settings.min_tx_rate.map(|rate| rate.to_string()),
            allow.min_tx_rate,
        ),
        (
            "max_tx_rate",
            settings.max_tx_rate.map(|rate| rate.to_string()),
            allow.max_tx_rate,
        ),
    ];
    let set = |(key, value, is_allowed): (_, Option<String>, bool)| Some((key, value?, is_allowed));
    keys.into_iter().filter_map(set).collect()
}

/// The first key that the policy does not allow, with its value. The default policy allows none.
pub(crate) fn denied(settings: &VfSettings, allow: &AllowVf) -> Option<(&'static str, String)> {
    let mut keys = keys(settings, allow).into_iter();
    let denied = keys.find(|(_, _, is_allowed)| !is_allowed);
    denied.map(|(key, value, _)| (key, value))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(keys: Value) -> Result<VfSettings, Error> {
        super::read(
            &Section::root(&cni_wire::json::parse(keys.to_string()).unwrap()),
            None,
        )
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
        // 0 is no limit.
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
        let settings = super::read(
            &Section::root(&cni_wire::json::parse(all.to_string()).unwrap()),
            Some(Guid(0x0200_0000_0000_0008)),
        );
        let settings = settings.unwrap();
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
