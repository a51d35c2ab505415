//! The settings of a VF, in the forms of `sriov-cni` and `ib-sriov-cni`. Pure.

use attachment::netdev::vf::{Settings, Vlan};
use cni_wire::{Error, Section};
use hca::Guid;
use netlink_packet_route::link::{VfLinkState, VlanProtocol};
use node::policy::{AllowVf, MAX_VLAN};

const ON_OFF: &[(&str, bool)] = &[("on", true), ("off", false)];
const PROTOCOLS: &[(&str, VlanProtocol)] = &[
    ("802.1q", VlanProtocol::Ieee8021Q),
    ("802.1ad", VlanProtocol::Ieee8021Ad),
];
const LINK_STATES: &[(&str, VfLinkState)] = &[
    ("auto", VfLinkState::Auto),
    ("enable", VfLinkState::Enable),
    ("disable", VfLinkState::Disable),
];

/// # Errors
/// Code 7 naming the key.
pub(super) fn read(root: &Section<'_>, guid: Option<Guid>) -> Result<Settings, Error> {
    let (min_tx_rate, max_tx_rate) = (root.get("min_tx_rate")?, root.get("max_tx_rate")?);
    if let (Some(min), Some(max @ 1..)) = (min_tx_rate, max_tx_rate)
        && min > max
    {
        return Err(root.wrong(
            "min_tx_rate",
            format_args!("{min} is more than the max_tx_rate {max}"),
        ));
    }
    Ok(Settings {
        guid,
        vlan: vlan(root)?,
        trust: word(root, "trust", ON_OFF)?,
        spoof_check: word(root, "spoofchk", ON_OFF)?,
        link_state: word(root, "link_state", LINK_STATES)?,
        min_tx_rate,
        max_tx_rate,
        mac: None,
    })
}

fn vlan(root: &Section<'_>) -> Result<Option<Vlan>, Error> {
    let qos = root.get::<u8>("vlanQoS")?;
    let protocol = word(root, "vlanProto", PROTOCOLS)?;
    let of_vlan = match (qos, protocol) {
        (Some(1..), _) => Some("vlanQoS"),
        (_, Some(VlanProtocol::Ieee8021Ad)) => Some("vlanProto"),
        _ => None,
    };
    let vlan = match (root.get::<u16>("vlan")?, of_vlan) {
        (None | Some(0), Some(key)) => {
            let wrong = root.wrong(key, "has a meaning only with a VLAN");
            return Err(wrong.with_details("set vlan to 1 or more, or leave it out"));
        }
        (None, None) => return Ok(None),
        (Some(id), _) => Vlan { id, qos, protocol },
    };
    if vlan.id > MAX_VLAN {
        let why = format!("{} is not a VLAN from 0 to {MAX_VLAN}", vlan.id);
        return Err(root.wrong("vlan", why));
    }
    match qos {
        Some(qos @ 8..) => Err(root.wrong("vlanQoS", format_args!("{qos} is not from 0 to 7"))),
        _ => Ok(Some(vlan)),
    }
}

/// A word without regard to its case.
fn word<T: Copy>(root: &Section<'_>, key: &str, words: &[(&str, T)]) -> Result<Option<T>, Error> {
    let known: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
    let expected = |wrong: Error| wrong.with_details(format!("expected {}", known.join(", ")));
    let Some(text) = root.text(key).map_err(expected)? else {
        return Ok(None);
    };
    let mut meant = words
        .iter()
        .filter(|(word, _)| word.eq_ignore_ascii_case(text));
    if let Some((_, value)) = meant.next() {
        return Ok(Some(*value));
    }
    Err(expected(root.wrong(
        key,
        format_args!("{text:?} is not one of its words"),
    )))
}

/// The keys that a network sets, each with its value and whether the policy allows that.
pub(crate) fn keys(settings: &Settings, allow: &AllowVf) -> Vec<(&'static str, String, bool)> {
    fn written<T: PartialEq>(words: &[(&'static str, T)], value: T) -> String {
        let found = words.iter().find(|(_, known)| *known == value);
        found.map_or_else(String::new, |(word, _)| (*word).to_owned())
    }
    let (guid, vlan) = (settings.guid, settings.vlan);
    let is_listed = |guid: Guid| allow.guid.iter().any(|range| range.contains(&guid.0));
    let in_range = |vlan: Vlan| allow.vlan.iter().any(|range| range.contains(&vlan.id));
    let qos = vlan.and_then(|vlan| vlan.qos);
    let protocol = vlan.and_then(|vlan| vlan.protocol);
    let protocol = protocol.map(|protocol| written(PROTOCOLS, protocol));
    let on_off = |on| written(ON_OFF, on);
    let state = settings.link_state.map(|state| written(LINK_STATES, state));
    let number = |number: Option<u32>| number.map(|number| number.to_string());
    let id = number(vlan.map(|vlan| vlan.id.into()));
    let keys = [
        (
            "guid",
            guid.map(|guid| guid.to_string()),
            guid.is_some_and(is_listed),
        ),
        ("vlan", id, vlan.is_some_and(in_range)),
        ("vlanQoS", number(qos.map(Into::into)), allow.vlan_qos),
        ("vlanProto", protocol, allow.vlan_proto),
        ("trust", settings.trust.map(on_off), allow.trust),
        ("spoofchk", settings.spoof_check.map(on_off), allow.spoofchk),
        ("link_state", state, allow.link_state),
        (
            "min_tx_rate",
            number(settings.min_tx_rate),
            allow.min_tx_rate,
        ),
        (
            "max_tx_rate",
            number(settings.max_tx_rate),
            allow.max_tx_rate,
        ),
    ];
    let set = |(key, value, is_allowed): (_, Option<String>, bool)| Some((key, value?, is_allowed));
    keys.into_iter().filter_map(set).collect()
}

/// The first key that the policy does not allow, with its value.
pub(crate) fn denied(settings: &Settings, allow: &AllowVf) -> Option<(&'static str, String)> {
    let mut keys = keys(settings, allow).into_iter();
    let denied = keys.find(|(_, _, is_allowed)| !is_allowed);
    denied.map(|(key, value, _)| (key, value))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(keys: Value) -> Result<Settings, Error> {
        super::read(
            &Section::root(&cni_wire::json::parse(keys.to_string()).unwrap()),
            None,
        )
    }

    #[test]
    fn settings_have_the_forms_of_sriov_cni() {
        let all = json!({"vlan": 100, "vlanQoS": 5, "vlanProto": "802.1AD", "trust": "on",
            "spoofchk": "off", "link_state": "enable", "min_tx_rate": 100, "max_tx_rate": 200});
        let settings = Settings {
            vlan: Some(Vlan {
                id: 100,
                qos: Some(5),
                protocol: Some(VlanProtocol::Ieee8021Ad),
            }),
            trust: Some(true),
            spoof_check: Some(false),
            link_state: Some(VfLinkState::Enable),
            min_tx_rate: Some(100),
            max_tx_rate: Some(200),
            ..Settings::default()
        };
        assert_eq!(read(all), Ok(settings));
        let nothing = json!({"trust": "", "vlan": null, "vlanQoS": 0, "vlanProto": "802.1q"});
        assert_eq!(read(nothing), Ok(Settings::default()));
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
        let all = json!({"vlan": 100, "vlanQoS": 0, "vlanProto": "802.1q", "trust": "off",
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
