//! What is set of a VF, decided before anything is changed.

use attachment::{
    netdev::vf::{Vf, VfSettings},
    part::is_held,
};
use cni_wire::Code;
use netlink::Name;
use node::policy::AllowVf;

use crate::{
    config::{self, Config},
    error::Error,
};

/// What the network asks of a VF. A MAC address that the policy does not allow is left to the VF.
pub(crate) fn wanted(config: &Config, before: Option<&Vf>, allow: &AllowVf) -> VfSettings {
    VfSettings {
        mac: config.mac.clone().filter(|_| before.is_some() && allow.mac),
        ..config.vf.clone()
    }
}

/// The VF of netdev `name` with what is set, if it is one; `holder` is what else of this host has the
/// wanted GUID. Pure.
///
/// # Errors
/// Code 7 for what is not a VF of a PF that is on the host, and for a GUID that could not be restored;
/// code 11 where another port of this host has it.
pub(super) fn decide(
    before: Option<Vf>,
    wanted: &VfSettings,
    holder: Option<String>,
    name: &Name,
) -> Result<Option<Vf>, Error> {
    if wanted.is_empty() {
        return Ok(before);
    }
    let Some(mut vf) = before else {
        let key = config::vf::denied(wanted, &AllowVf::default());
        let key = key.map(|(key, _)| key).unwrap_or_default();
        return Err(Error::advise(
            Code::InvalidConfig,
            format_args!(
                "{key}: {name} is not a virtual function whose physical function has a netdev on the host"
            ),
            format_args!(
                "set it where the physical function is (ip link set PF vf N ...), and leave {key} out"
            ),
        ));
    };
    if let Some(guid) = wanted.node_guid
        && !vf.has_guids()
    {
        return Err(Error::advise(
            Code::InvalidConfig,
            format_args!(
                "guid: {name} cannot get {guid}: the driver of its physical function does not report \
                 the GUIDs that it has, so that they could not be restored"
            ),
            "use a driver that does (mlx5 of Linux 5.5 or newer), or leave guid out",
        ));
    }
    if let (Some(guid), Some(holder)) = (wanted.node_guid, holder) {
        return Err(is_held(guid, &holder));
    }
    vf.plan(wanted);
    Ok(Some(vf))
}

#[cfg(test)]
mod tests {
    use hca::Guid;

    use super::*;

    const WANTED: VfSettings = VfSettings {
        trust: Some(true),
        node_guid: Some(Guid(8)),
        port_guid: Some(Guid(8)),
        spoof_check: None,
        vlan: None,
        min_tx_rate: None,
        max_tx_rate: None,
        link_state: None,
        mac: None,
    };

    fn vf(before: VfSettings) -> Option<Vf> {
        Some(Vf {
            pf: "0000:3b:00.0".to_owned(),
            number: 3,
            before,
            set: VfSettings::default(),
            driver: None,
        })
    }

    #[test]
    fn what_is_set_is_decided_with_what_was_before() {
        let name = Name::from("ib0");
        let before = VfSettings {
            node_guid: Some(Guid(7)),
            port_guid: Some(Guid(7)),
            ..VfSettings::default()
        };
        let decided = decide(vf(before.clone()), &WANTED, None, &name).unwrap();
        let decided = decided.unwrap();
        assert_eq!((&decided.before, &decided.set), (&before, &WANTED));
        let nothing = VfSettings::default();
        assert_eq!(decide(None, &nothing, None, &name), Ok(None));
        let left = decide(vf(before.clone()), &nothing, None, &name);
        assert_eq!(left, Ok(vf(before)), "restored all the same");
    }

    #[test]
    fn what_cannot_be_set_or_restored_is_refused_before_anything_is_changed() {
        let known = VfSettings {
            node_guid: Some(Guid(7)),
            port_guid: Some(Guid(7)),
            ..VfSettings::default()
        };
        let name = Name::from("ib0");
        for (before, holder, code, word) in [
            (
                None,
                None,
                Code::InvalidConfig,
                "guid: ib0 is not a virtual function",
            ),
            (
                vf(VfSettings::default()),
                None,
                Code::InvalidConfig,
                "does not report",
            ),
            (
                vf(known),
                Some("VF 1 of ib1"),
                Code::TryAgain,
                "VF 1 of ib1 of this node has",
            ),
        ] {
            let refused = decide(before, &WANTED, holder.map(str::to_owned), &name).unwrap_err();
            assert_eq!(refused.code, code, "{refused}");
            assert!(
                refused.msg.contains(word) && !refused.details.is_empty(),
                "{refused}"
            );
        }
    }
}
