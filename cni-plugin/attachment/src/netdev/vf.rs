//! What a PF holds of its VFs: MAC address, VLAN, rates, spoof check, trust, link state, GUIDs.
//! They are set through the PF's netdev, which stays on the host, and outlast a VF's stay in a
//! pod; but drivers change some of them behind the VF's back, such as the MAC address when its
//! user sets one. They are recorded with the VF and restored with it, those alone that differ.
//! An attachment can set them for its time.
//!
//! A driver reads the GUIDs of an InfiniBand VF when it starts. So each change of them is made while
//! the VF has no driver: one that was cut off shows, and is made again.

use std::{
    io,
    path::{Path, PathBuf},
};

use hca::{Guid, Host, MacAddress, PciAddress, lookup};
use netlink::{
    Socket,
    link::{self, By, Link},
};
use netlink_packet_route::link::{
    LinkAttribute, LinkMessage, LinkVfInfo, VfInfo, VfInfoGuid, VfInfoLinkState, VfInfoMac,
    VfInfoRate, VfInfoSpoofCheck, VfInfoTrust, VfLinkState, VfVlan, VfVlanInfo, VlanProtocol,
};
use serde::{Deserialize, Serialize};

use super::snapshot::Message;

/// A VF as its PF sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vf {
    /// PCI address of the PF.
    pub pf: String,
    /// The VF's number there, from 0.
    pub number: u32,
    /// Its properties, as kernel messages.
    pub properties: Vec<Message>,
    /// What an attachment sets, as kernel messages.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub set: Vec<Message>,
    /// The driver that has read GUIDs of an attachment; none where those were left alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
}

/// What an attachment sets of a VF.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    pub guid: Option<Guid>,
    pub vlan: Option<Vlan>,
    pub trust: Option<bool>,
    pub spoof_check: Option<bool>,
    pub link_state: Option<VfLinkState>,
    /// In Mb/s; 0 is no limit. Without one of the two, the VF keeps it.
    pub min_tx_rate: Option<u32>,
    pub max_tx_rate: Option<u32>,
    pub mac: Option<MacAddress>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vlan {
    /// 0 is none.
    pub id: u16,
    /// None is 0.
    pub qos: Option<u8>,
    /// None is 802.1q.
    pub protocol: Option<VlanProtocol>,
}

/// What became of the GUIDs of a VF that returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guids {
    Unchanged,
    /// Its driver has read its own again: it has another netdev now.
    Renewed,
    /// It may have an attachment's settings: the PF has no netdev on the host, or says nothing of it.
    PfAway,
}

impl Vf {
    /// The properties of the VF with this PCI address; none for what is not a VF, or whose PF has no
    /// netdev on the host.
    pub fn take(host: &Host, socket: &mut Socket, address: &str) -> netlink::Result<Option<Vf>> {
        let Some((pf, number)) = place(host, address) else {
            return Ok(None);
        };
        let found = netdev_of(host, socket, pf, number)?;
        Ok(found.map(|(_, properties)| Vf {
            pf: pf.to_string(),
            number,
            properties: kept(&properties.unwrap_or_default()),
            set: Vec::new(),
            driver: None,
        }))
    }

    /// Writes down what an attachment sets. Pure.
    pub fn plan(&mut self, settings: &Settings) {
        let vf = self.number;
        let rates = |info| match info {
            VfInfo::Rate(rate) => Some(rate),
            _ => None,
        };
        let now = infos(&self.properties).find_map(rates).unwrap_or_default();
        let rate = match (settings.min_tx_rate, settings.max_tx_rate) {
            (None, None) => None,
            (min, max) => Some(VfInfo::Rate(VfInfoRate::new(
                vf,
                min.unwrap_or(now.min_tx_rate),
                max.unwrap_or(now.max_tx_rate),
            ))),
        };
        let vlan = |vlan: Vlan| {
            let (qos, protocol) = (vlan.qos.unwrap_or(0), vlan.protocol.unwrap_or_default());
            let info = VfVlanInfo::new(vf, vlan.id.into(), qos.into(), protocol);
            VfInfo::VlanList(vec![VfVlan::Info(info)])
        };
        let trust = |on| VfInfo::Trust(VfInfoTrust::new(vf, on));
        let spoof_check = |on| VfInfo::SpoofCheck(VfInfoSpoofCheck::new(vf, on));
        let link_state = |state| VfInfo::LinkState(VfInfoLinkState::new(vf, state));
        let mac = |mac: &MacAddress| VfInfo::Mac(VfInfoMac::new(vf, mac.bytes()));
        let guids = |guid: Guid| GUIDS.map(|kind| kind(VfInfoGuid::new(vf, guid.0)));
        let set = [
            settings.trust.map(trust),
            settings.spoof_check.map(spoof_check),
            settings.vlan.map(vlan),
            rate,
            settings.link_state.map(link_state),
            settings.mac.as_ref().map(mac),
        ];
        let set = set.into_iter().flatten();
        let set = set.chain(settings.guid.into_iter().flat_map(guids));
        // After the PF has set an address, some drivers refuse any other to the VF (igb, ixgbe).
        let has_it = |p: &Message| is_mac(p) && self.properties.contains(p);
        self.set = set.filter_map(message).filter(|p| !has_it(p)).collect();
    }

    /// Whether the PF says which GUIDs the VF has, so that they can be restored.
    pub fn has_guids(&self) -> bool {
        self.properties.iter().filter(|p| is_guid(p)).count() == GUIDS.len()
    }

    /// Sets what is planned for the VF at a PCI address; `driver` reads its GUIDs.
    ///
    /// # Errors
    /// What PF or driver refuse, and what the PF does not say afterwards.
    pub fn apply(&self, sys: &Path, socket: &mut Socket, address: &str) -> netlink::Result<()> {
        let Some((pf, _)) = self.now(sys, socket)? else {
            let what = format_args!("set VF {} of {}", self.number, self.pf);
            return Err(netlink::Error::call(what, io::ErrorKind::NotFound));
        };
        let (guids, others): (Vec<_>, Vec<_>) = self.set.iter().partition(|p| is_guid(p));
        for property in others {
            self.set(socket, &pf, property)?;
        }
        if !guids.is_empty() {
            self.renew(sys, socket, &pf, address, guids.into_iter())?;
        }
        match self.unset(sys, socket)? {
            Some(unset) => {
                let what = format_args!("set VF {} of {}: {unset}", self.number, pf.name);
                let reason = "the PF's driver took it, and does not say that the VF has it";
                Err(netlink::Error::call(what, io::Error::other(reason)))
            }
            None => Ok(()),
        }
    }

    /// The first of what the attachment set that the VF does not have, as text; none while the PF has
    /// no netdev on the host.
    pub fn unset(&self, sys: &Path, socket: &mut Socket) -> netlink::Result<Option<&str>> {
        if self.set.is_empty() {
            return Ok(None);
        }
        let Some((_, now)) = self.now(sys, socket)? else {
            return Ok(None);
        };
        let unset = self.set.iter().find(|p| !now.contains(p));
        Ok(unset.map(|p| p.text.as_str()))
    }

    /// Whether a change of GUIDs was cut off.
    pub fn lacks_driver(&self, sys: &Path, address: &str) -> bool {
        let function = sys.join("bus/pci/devices").join(address);
        self.driver.is_some() && function.exists() && !function.join("driver").exists()
    }

    /// Restores the GUIDs if an attachment has changed them. Says also of other settings of an
    /// attachment when they cannot be restored.
    pub fn restore_guid(
        &self,
        sys: &Path,
        socket: &mut Socket,
        address: &str,
    ) -> netlink::Result<Guids> {
        if self.driver.is_none() && self.set.is_empty() {
            return Ok(Guids::Unchanged);
        }
        let Some((pf, now)) = self.now(sys, socket)? else {
            return Ok(Guids::PfAway);
        };
        if self.driver.is_none() {
            return Ok(Guids::Unchanged);
        }
        let guids = || self.properties.iter().filter(|p| is_guid(p));
        if guids().all(|guid| now.contains(guid)) && !self.lacks_driver(sys, address) {
            return Ok(Guids::Unchanged);
        }
        self.renew(sys, socket, &pf, address, guids())?;
        Ok(Guids::Renewed)
    }

    /// The VF of this host, other than this one, that has a GUID by what its PF says; as text.
    pub fn other_with(
        &self,
        host: &Host,
        socket: &mut Socket,
        guid: Guid,
    ) -> netlink::Result<Option<String>> {
        let pf = self.netdev(host, socket)?;
        for link in link::list(socket)?
            .iter()
            .filter(|link| link.is_infiniband())
        {
            let is_pf = pf.as_ref().is_some_and(|(pf, _)| link.index == pf.index);
            for property in link::vfs(socket, link.index)?.iter().flatten() {
                if let VfInfo::IbNodeGuid(p) | VfInfo::IbPortGuid(p) = property
                    && p.guid == guid.0
                    && !(is_pf && p.vf_id == self.number)
                {
                    return Ok(Some(format!("VF {} of {}", p.vf_id, link.name)));
                }
            }
        }
        Ok(None)
    }

    fn renew<'a>(
        &self,
        sys: &Path,
        socket: &mut Socket,
        pf: &Link,
        address: &str,
        mut guids: impl Iterator<Item = &'a Message>,
    ) -> netlink::Result<()> {
        let driver = self.driver.as_deref().unwrap_or_default();
        link::without_driver(sys, driver, address, || {
            guids.try_for_each(|guid| self.set(socket, pf, guid))
        })
    }

    /// The PF's netdev and the VF's properties; none while the PF has no netdev on the host, or says
    /// nothing of the VF.
    fn now(
        &self,
        sys: &Path,
        socket: &mut Socket,
    ) -> netlink::Result<Option<(Link, Vec<Message>)>> {
        let host = Host {
            sys: sys.to_owned(),
            dev: PathBuf::new(),
            proc: PathBuf::new(),
        };
        let found = self.netdev(&host, socket)?;
        Ok(found.and_then(|(pf, properties)| Some((pf, kept(&properties?)))))
    }

    fn netdev(&self, host: &Host, socket: &mut Socket) -> netlink::Result<Option<Described>> {
        match self.pf.parse() {
            Ok(pf) => netdev_of(host, socket, pf, self.number),
            Err(_) => Ok(None),
        }
    }

    fn set(&self, socket: &mut Socket, pf: &Link, property: &Message) -> netlink::Result<()> {
        let what = format!("set VF {} of {}: {}", self.number, pf.name, property.text);
        let message = property.parse::<LinkMessage>();
        let message = message.map_err(|e| {
            let damaged = io::Error::new(io::ErrorKind::InvalidData, e.to_string());
            netlink::Error::call(&what, damaged)
        })?;
        link::set(socket, &what, pf.index, message.attributes)
    }

    /// Restores what differs of what the VF may do: all but its address, which it may then
    /// set itself. One that the PF sets for it it could not change again before its driver is
    /// loaded anew (`igb_ndo_set_vf_mac`); an address of zeros ends that.
    pub fn restore_rights(&self, sys: &Path, socket: &mut Socket) -> netlink::Result<Vec<String>> {
        self.rights().restore(sys, socket)
    }

    fn rights(&self) -> Vf {
        let mut rights = self.clone();
        rights.properties.retain(|p| !is_mac(p));
        if self.set.iter().any(is_mac) {
            let zeros = VfInfo::Mac(VfInfoMac::new(self.number, &[0; 6]));
            rights.properties.extend(message(zeros));
        }
        rights
    }

    /// Restores what differs. Returns what could not be, as text.
    pub fn restore(&self, sys: &Path, socket: &mut Socket) -> netlink::Result<Vec<String>> {
        let Some((pf, now)) = self.now(sys, socket)? else {
            return Ok(vec![format!(
                "PF {} has no netdev on the host, or says nothing of its VF {}: its properties were \
                 not read",
                self.pf, self.number
            )]);
        };
        let differing = self.properties.iter().filter(|p| !now.contains(p));
        let refused = differing.filter_map(|p| self.set(socket, &pf, p).err());
        Ok(refused.map(|e| e.to_string()).collect())
    }

    /// What the attachment set that the VF still has and did not have before, as text; the first of it
    /// while nothing says what the VF has.
    pub fn still_set(&self, sys: &Path, socket: &mut Socket) -> netlink::Result<Option<&str>> {
        let Some(first) = self.set.first() else {
            return Ok(None);
        };
        Ok(match self.now(sys, socket)? {
            Some((_, now)) => self.kept_of(&now),
            None => Some(&first.text),
        })
    }

    fn kept_of(&self, now: &[Message]) -> Option<&str> {
        let is_kept = |p: &&Message| now.contains(p) && !self.properties.contains(p);
        let kept = self.set.iter().find(is_kept);
        kept.map(|p| p.text.as_str())
    }
}

/// Whether a PCI address is that of a VF with one netdev. In a virtual machine that was given one
/// only its driver's name shows it (`igbvf`, `ixgbevf`, `iavf`). mlx4 has the netdevs of both its
/// ports on one function, and keeps their burnt-in addresses.
pub fn is_single_port_vf(host: &Host, address: &str) -> bool {
    let function = address
        .parse()
        .ok()
        .and_then(|address| hca::pci::read(host, address).ok());
    function.is_some_and(|function| {
        let driver = function.driver.unwrap_or_default();
        let is_virtual = matches!(function.sriov, hca::pci::Sriov::Virtual { .. });
        driver != "mlx4_core" && (is_virtual || driver.ends_with("vf"))
    })
}

/// The PF of a VF, and the VF's number.
fn place(host: &Host, address: &str) -> Option<(PciAddress, u32)> {
    let function = hca::pci::read(host, address.parse().ok()?).ok()?;
    match function.sriov {
        hca::pci::Sriov::Virtual { physical, index } => Some((physical, index?)),
        _ => None,
    }
}

/// The PF's netdev, and what it says of a VF ([`link::vf_properties`]).
type Described = (Link, Option<Vec<VfInfo>>);

/// The PF's netdev, with what it says of a VF. In switchdev mode the representors of VFs are netdevs of
/// the PF, which say nothing of VFs; of the two ports of an mlx4, settings go through any.
fn netdev_of(
    host: &Host,
    socket: &mut Socket,
    pf: PciAddress,
    number: u32,
) -> netlink::Result<Option<Described>> {
    let occupants = lookup::on_pci(host, pf);
    let mut first = None;
    for netdev in occupants.into_iter().flat_map(|found| found.netdevs) {
        if let Some(link) = link::get(socket, By::Name(netdev.name.as_bytes()))? {
            let properties = link::vf_properties(socket, link.index, number)?;
            if properties.as_ref().is_some_and(|all| !all.is_empty()) {
                return Ok(Some((link, properties)));
            }
            first = first.or(Some((link, properties)));
        }
    }
    Ok(first)
}

/// What a property that is an address begins with.
const MAC: &str = "MAC address ";

fn is_mac(property: &Message) -> bool {
    property.text.starts_with(MAC)
}

/// Both GUIDs of a VF.
const GUIDS: [fn(VfInfoGuid) -> VfInfo; 2] = [VfInfo::IbNodeGuid, VfInfo::IbPortGuid];
/// What the text of each has in it.
const GUID: &str = " GUID ";

fn is_guid(property: &Message) -> bool {
    property.text.contains(GUID)
}

/// No driver takes a GUID of zero, which stands for none. All ones are none to a subnet manager.
fn settable(guid: u64) -> u64 {
    if guid == 0 { u64::MAX } else { guid }
}

/// The properties in messages.
fn infos(messages: &[Message]) -> impl Iterator<Item = VfInfo> {
    let parsed = messages
        .iter()
        .filter_map(|m| m.parse::<LinkMessage>().ok());
    let attributes = parsed.flat_map(|message| message.attributes);
    let lists = attributes.filter_map(|attribute| match attribute {
        LinkAttribute::VfInfoList(list) => Some(list),
        _ => None,
    });
    lists.flatten().flat_map(|vf| vf.0)
}

/// The properties worth keeping, as messages. A VLAN with its protocol stands for one without.
fn kept(properties: &[VfInfo]) -> Vec<Message> {
    let has_protocol = properties.iter().any(|p| matches!(p, VfInfo::VlanList(_)));
    let is_kept = |p: &&VfInfo| !(has_protocol && matches!(p, VfInfo::Vlan(_)));
    properties
        .iter()
        .filter(is_kept)
        .cloned()
        .filter_map(message)
        .collect()
}

/// The message that sets a property; none for counters, and for what follows from others.
fn message(mut property: VfInfo) -> Option<Message> {
    if let VfInfo::IbNodeGuid(p) | VfInfo::IbPortGuid(p) = &mut property {
        p.guid = settable(p.guid);
    }
    let text = match &property {
        VfInfo::Mac(p) => format!("{MAC}{}", MacAddress::new(p.mac.get(..6)?)),
        VfInfo::Vlan(p) => format!("VLAN {} priority {}", p.vlan_id, p.qos),
        VfInfo::VlanList(list) => match list.as_slice() {
            [VfVlan::Info(p)] => {
                let protocol = match p.protocol {
                    VlanProtocol::Ieee8021Ad => "802.1ad",
                    _ => "802.1q",
                };
                format!("VLAN {} priority {} {protocol}", p.vlan_id, p.qos)
            }
            _ => return None,
        },
        VfInfo::Rate(p) => format!("rate {} to {} Mb/s", p.min_tx_rate, p.max_tx_rate),
        VfInfo::SpoofCheck(p) => format!("spoof check {}", p.enabled),
        VfInfo::LinkState(p) => format!("link state {:?}", p.state),
        VfInfo::RssQueryEn(p) => format!("RSS query {}", p.enabled),
        VfInfo::Trust(p) => format!("trust {}", p.enabled),
        VfInfo::IbNodeGuid(p) => format!("node{GUID}{:016x}", p.guid),
        VfInfo::IbPortGuid(p) => format!("port{GUID}{:016x}", p.guid),
        _ => return None,
    };
    let mut message = LinkMessage::default();
    let info = LinkVfInfo(vec![property]);
    message.attributes = vec![LinkAttribute::VfInfoList(vec![info])];
    Some(Message::of(&message, text))
}

#[cfg(test)]
mod tests {
    use hca_trees::{NetdevSpec, On, PciSpec, Tree};
    use netlink_packet_core::Emitable;
    use netlink_packet_route::link::VfInfoVlan;

    use super::*;

    fn vlan(id: u32, qos: u32, protocol: VlanProtocol) -> VfInfo {
        VfInfo::VlanList(vec![VfVlan::Info(VfVlanInfo::new(3, id, qos, protocol))])
    }

    fn vf(properties: &[VfInfo]) -> Vf {
        Vf {
            pf: "0000:3b:00.0".to_owned(),
            number: 3,
            properties: kept(properties),
            set: Vec::new(),
            driver: None,
        }
    }

    fn texts(messages: &[Message]) -> Vec<&str> {
        messages.iter().map(|m| m.text.as_str()).collect()
    }

    #[test]
    fn settings_are_planned_in_full_and_keep_the_other_rate() {
        let mut vf = vf(&[VfInfo::Rate(VfInfoRate::new(3, 100, 1000))]);
        vf.plan(&Settings::default());
        assert!(vf.set.is_empty());
        vf.plan(&Settings {
            guid: Some(Guid(0x0200_0000_0000_0001)),
            vlan: Some(Vlan {
                id: 100,
                qos: Some(5),
                protocol: None,
            }),
            trust: Some(true),
            spoof_check: Some(false),
            link_state: Some(VfLinkState::Enable),
            min_tx_rate: None,
            max_tx_rate: Some(2000),
            mac: "02:00:00:00:00:09".parse().ok(),
        });
        let planned = [
            "trust true",
            "spoof check false",
            "VLAN 100 priority 5 802.1q",
            "rate 100 to 2000 Mb/s",
            "link state Enable",
            "MAC address 02:00:00:00:00:09",
            "node GUID 0200000000000001",
            "port GUID 0200000000000001",
        ];
        assert_eq!(texts(&vf.set), planned);
        let written = serde_json::to_value(&vf).unwrap();
        assert_eq!(written["set"][0]["text"], "trust true");
        assert_eq!(serde_json::from_value::<Vf>(written).unwrap(), vf);
    }

    #[test]
    fn a_setting_that_the_vf_keeps_is_named_unless_it_was_so_before() {
        let trust = |on| VfInfo::Trust(VfInfoTrust::new(3, on));
        let check = |on| VfInfo::SpoofCheck(VfInfoSpoofCheck::new(3, on));
        let mut vf = vf(&[trust(false), check(false)]);
        vf.plan(&Settings {
            trust: Some(true),
            spoof_check: Some(false),
            ..Settings::default()
        });
        let kept = |now: &[VfInfo]| vf.kept_of(&kept(now));
        assert_eq!(kept(&[trust(true), check(false)]), Some("trust true"));
        assert_eq!(kept(&[trust(false), check(false)]), None);
        assert_eq!(kept(&[]), None);
    }

    #[test]
    fn an_address_by_the_pf_is_taken_back_before_the_vf_sets_its_own() {
        let own = VfInfo::Mac(VfInfoMac::new(3, &[2, 0, 0, 0, 0, 1]));
        let mut vf = vf(&[own, VfInfo::Trust(VfInfoTrust::new(3, false))]);
        assert_eq!(texts(&vf.rights().properties), ["trust false"]);
        let mut set = |mac: &str| {
            vf.plan(&Settings {
                mac: mac.parse().ok(),
                ..Settings::default()
            });
            (vf.set.len(), vf.rights().properties.len())
        };
        assert_eq!(set("02:00:00:00:00:01"), (0, 1), "its own");
        assert_eq!(set("02:00:00:00:00:09"), (1, 2));
        let last = vf.rights().properties.pop().unwrap();
        assert_eq!(last.text, "MAC address 00:00:00:00:00:00");
    }

    #[test]
    fn a_vlan_is_recorded_with_its_protocol() {
        let plain = VfInfo::Vlan(VfInfoVlan::new(3, 100, 2));
        let tagged = vlan(100, 2, VlanProtocol::Ieee8021Ad);
        let recorded = kept(&[plain.clone(), tagged]);
        assert_eq!(texts(&recorded), ["VLAN 100 priority 2 802.1ad"]);
        assert_eq!(texts(&kept(&[plain])), ["VLAN 100 priority 2"]);
    }

    /// `IFLA_VFINFO_LIST` as `ip link set PF vf 3 …` of iproute2 6.1 sends it, by strace.
    #[test]
    fn properties_are_set_as_ip_does() {
        let mac = [
            &[
                0x30, 0, 22, 0, 0x2c, 0, 1, 0, 0x28, 0, 1, 0, 3, 0, 0, 0, 2, 0, 0, 0, 0, 9,
            ][..],
            &[0; 26],
        ]
        .concat();
        for (property, captured) in [
            (VfInfo::Mac(VfInfoMac::new(3, &[2, 0, 0, 0, 0, 9])), mac),
            (
                VfInfo::Vlan(VfInfoVlan::new(3, 100, 2)),
                vec![
                    0x18, 0, 22, 0, 0x14, 0, 1, 0, 0x10, 0, 2, 0, 3, 0, 0, 0, 100, 0, 0, 0, 2, 0,
                    0, 0,
                ],
            ),
            (
                vlan(100, 2, VlanProtocol::Ieee8021Ad),
                vec![
                    0x20, 0, 22, 0, 0x1c, 0, 1, 0, 0x18, 0, 12, 0, 0x14, 0, 1, 0, 3, 0, 0, 0, 100,
                    0, 0, 0, 2, 0, 0, 0, 0x88, 0xa8, 0, 0,
                ],
            ),
            (
                VfInfo::SpoofCheck(VfInfoSpoofCheck::new(3, true)),
                vec![
                    0x14, 0, 22, 0, 0x10, 0, 1, 0, 12, 0, 4, 0, 3, 0, 0, 0, 1, 0, 0, 0,
                ],
            ),
            (
                VfInfo::LinkState(VfInfoLinkState::new(3, VfLinkState::Enable)),
                vec![
                    0x14, 0, 22, 0, 0x10, 0, 1, 0, 12, 0, 5, 0, 3, 0, 0, 0, 1, 0, 0, 0,
                ],
            ),
            (
                VfInfo::Rate(VfInfoRate::new(3, 100, 1000)),
                vec![
                    0x18, 0, 22, 0, 0x14, 0, 1, 0, 0x10, 0, 6, 0, 3, 0, 0, 0, 100, 0, 0, 0, 0xe8,
                    3, 0, 0,
                ],
            ),
            // As the kernel has it: struct ifla_vf_guid, with four bytes of padding.
            (
                VfInfo::IbNodeGuid(VfInfoGuid::new(3, 0x0011_2233_4455_6677)),
                vec![
                    0x1c, 0, 22, 0, 0x18, 0, 1, 0, 0x14, 0, 10, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0x77,
                    0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0,
                ],
            ),
            // Zero is not set.
            (
                VfInfo::IbPortGuid(VfInfoGuid::new(3, 0)),
                [
                    &[
                        0x1c, 0, 22, 0, 0x18, 0, 1, 0, 0x14, 0, 11, 0, 3, 0, 0, 0, 0, 0, 0, 0,
                    ][..],
                    &[0xff; 8],
                ]
                .concat(),
            ),
            (
                VfInfo::Trust(VfInfoTrust::new(3, true)),
                vec![
                    0x14, 0, 22, 0, 0x10, 0, 1, 0, 12, 0, 9, 0, 3, 0, 0, 0, 1, 0, 0, 0,
                ],
            ),
        ] {
            let message = message(property).unwrap();
            let parsed: LinkMessage = message.parse().unwrap();
            let [attribute] = parsed.attributes.as_slice() else {
                panic!("{parsed:?}")
            };
            let mut sent = vec![0; attribute.buffer_len()];
            attribute.emit(&mut sent);
            assert_eq!(sent, captured, "{}", message.text);
        }
        assert_eq!(message(VfInfo::Stats(vec![])), None);
    }

    #[test]
    fn a_change_of_guids_that_was_cut_off_shows() {
        let sys = tempfile::tempdir().unwrap();
        let address = "0000:3b:00.2";
        let function = sys.path().join("bus/pci/devices").join(address);
        let mut vf = Vf {
            pf: "0000:3b:00.0".to_owned(),
            number: 0,
            properties: Vec::new(),
            set: Vec::new(),
            driver: Some("mlx5_core".to_owned()),
        };
        assert!(!vf.lacks_driver(sys.path(), address), "it was removed");
        std::fs::create_dir_all(&function).unwrap();
        assert!(vf.lacks_driver(sys.path(), address));
        std::fs::create_dir(function.join("driver")).unwrap();
        assert!(!vf.lacks_driver(sys.path(), address));
        std::fs::remove_dir(function.join("driver")).unwrap();
        vf.driver = None;
        assert!(!vf.lacks_driver(sys.path(), address), "left alone");
    }

    #[test]
    fn a_record_says_which_guids_are_restored_and_by_which_driver() {
        let guids = GUIDS.map(|kind| kind(VfInfoGuid::new(1, 0x0011_2233_4455_6677)));
        let vf = Vf {
            pf: "0000:3b:00.0".to_owned(),
            number: 1,
            properties: kept(&guids),
            set: Vec::new(),
            driver: Some("mlx5_core".to_owned()),
        };
        let written = serde_json::to_value(&vf).unwrap();
        assert_eq!(
            written["properties"][0]["text"],
            "node GUID 0011223344556677"
        );
        let read: Vf = serde_json::from_value(written).unwrap();
        assert_eq!(read, vf);
        assert!(read.has_guids());
        let without = Vf {
            properties: vf.properties[..1].to_vec(),
            ..vf
        };
        assert!(!without.has_guids());
    }

    #[test]
    fn a_vf_is_known_by_its_pf_and_number() {
        let dir = tempfile::tempdir().unwrap();
        let tree = Tree::new(dir.path());
        tree.pci(&PciSpec {
            address: "0000:3b:00.0",
            ..PciSpec::MLX5
        });
        tree.netdev(&NetdevSpec {
            name: "ens1",
            on: On::Pci("0000:3b:00.0"),
            ..NetdevSpec::default()
        });
        tree.vf(
            "0000:3b:00.0",
            0,
            &PciSpec {
                address: "0000:3b:00.2",
                ..PciSpec::MLX5
            },
        );
        let host = Host::at(dir.path());
        let (pf, number) = place(&host, "0000:3b:00.2").unwrap();
        assert_eq!((pf.to_string().as_str(), number), ("0000:3b:00.0", 0));
        assert_eq!(place(&host, "0000:3b:00.0"), None);
        assert_eq!(place(&host, "virtio1"), None);
        // As a virtual machine sees one that it was given.
        tree.pci(&PciSpec {
            address: "0000:05:00.0",
            driver: "iavf",
            ..PciSpec::MLX5
        });
        tree.vf(
            "0000:3b:00.0",
            1,
            &PciSpec {
                address: "0000:3b:00.3",
                driver: "mlx4_core",
                ..PciSpec::MLX5
            },
        );
        for (address, single) in [
            ("0000:3b:00.0", false),
            ("0000:3b:00.2", true),
            ("0000:3b:00.3", false),
            ("0000:05:00.0", true),
            ("virtio1", false),
        ] {
            assert_eq!(is_single_port_vf(&host, address), single, "{address}");
        }
    }
}
