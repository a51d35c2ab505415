//! What a PF holds of its VFs: MAC address, VLAN, rates, spoof check, trust, link state, GUIDs.
//! They are set through the PF's netdev, which stays on the host, and outlast a VF's stay in a
//! pod; but drivers change some of them behind the VF's back, such as the MAC address when its
//! user sets one. They are recorded with the VF and restored with it, those alone that differ.
//! An attachment can set them for its time.
//!
//! A driver reads the GUIDs of an InfiniBand VF when it starts. So each change of them is made while
//! the VF has no driver: one that was cut off shows, and is made again.

use std::{
    fmt::{self, Display},
    io,
    path::Path,
};

use hca::{Guid, HcaId, Host, MacAddress, PciAddress, lookup};
use netlink::{
    Socket,
    link::{self, By, Link},
};
use netlink_packet_route::link::{
    LinkAttribute, LinkVfInfo, VfInfo, VfInfoGuid, VfInfoLinkState, VfInfoMac, VfInfoRate,
    VfInfoSpoofCheck, VfInfoTrust, VfLinkState, VfVlan, VfVlanInfo, VlanProtocol,
};
use serde::{Deserialize, Serialize};

/// A VF as its PF sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vf {
    /// PCI address of the PF.
    pub pf: String,
    /// The VF's number there, from 0.
    pub number: u32,
    /// What the PF's driver reported before the attachment.
    pub before: VfSettings,
    /// What the attachment sets.
    #[serde(default, skip_serializing_if = "VfSettings::is_empty")]
    pub set: VfSettings,
    /// Its driver, which reads GUIDs when it starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
}

/// What a PF holds of a VF: what it reports, what a network asks for, what differs. None is left alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct VfSettings {
    pub trust: Option<bool>,
    pub spoof_check: Option<bool>,
    pub vlan: Option<Vlan>,
    /// In Mb/s; 0 means unlimited. The kernel sets both rates together.
    pub min_tx_rate: Option<u32>,
    pub max_tx_rate: Option<u32>,
    pub link_state: Option<LinkState>,
    pub mac: Option<MacAddress>,
    pub node_guid: Option<Guid>,
    pub port_guid: Option<Guid>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vlan {
    /// 0 is none.
    pub id: u16,
    pub qos: u8,
    pub protocol: Protocol,
}

cni_wire::words! {
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub enum Protocol {
        #[default]
        Q = "802.1q",
        Ad = "802.1ad",
    }
}

cni_wire::words! {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum LinkState {
        Auto = "auto",
        Enable = "enable",
        Disable = "disable",
    }
}

impl Protocol {
    fn number(self) -> VlanProtocol {
        match self {
            Protocol::Q => VlanProtocol::Ieee8021Q,
            Protocol::Ad => VlanProtocol::Ieee8021Ad,
        }
    }
}

pub fn on_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

/// One setting as text, and as the kernel is asked for it.
type Request = (String, VfInfo);

/// What of the wanted settings of a VF differs from what it has now. Pure.
fn difference(now: &VfSettings, wanted: &VfSettings, vf: u32) -> Vec<Request> {
    let (now, mut differing) = (now.requests(vf), wanted.requests(vf));
    differing.retain(|request| !now.contains(request));
    differing
}

fn text_of(requests: &[Request]) -> String {
    let texts: Vec<&str> = requests.iter().map(|(text, _)| text.as_str()).collect();
    texts.join(", ")
}

impl VfSettings {
    pub fn is_empty(&self) -> bool {
        *self == VfSettings::default()
    }

    /// What a PF reports of a VF. No driver takes a GUID of zero, which stands for none: all ones are
    /// none to a subnet manager.
    fn of(reported: &[VfInfo]) -> Self {
        let guid = |p: &VfInfoGuid| Some(Guid(if p.guid == 0 { u64::MAX } else { p.guid }));
        let vlan = |id: u32, qos: u32, protocol| {
            let (id, qos) = (id.try_into().ok()?, qos.try_into().ok()?);
            Some(Vlan { id, qos, protocol })
        };
        let mut read = VfSettings::default();
        for property in reported {
            match property {
                VfInfo::Trust(p) => read.trust = Some(p.enabled),
                VfInfo::SpoofCheck(p) => read.spoof_check = Some(p.enabled),
                // A VLAN with its protocol stands for one without.
                VfInfo::Vlan(p) => read.vlan = read.vlan.or(vlan(p.vlan_id, p.qos, Protocol::Q)),
                VfInfo::VlanList(list) => {
                    if let [VfVlan::Info(p)] = list.as_slice() {
                        let is_it = |protocol: &Protocol| protocol.number() == p.protocol;
                        let protocol = Protocol::ALL.into_iter().find(is_it);
                        read.vlan = vlan(p.vlan_id, p.qos, protocol.unwrap_or_default());
                    }
                }
                VfInfo::Rate(p) => {
                    read.min_tx_rate = Some(p.min_tx_rate);
                    read.max_tx_rate = Some(p.max_tx_rate);
                }
                VfInfo::LinkState(p) => {
                    let is_it = |state: &LinkState| p.state == VfLinkState::from(*state as u32);
                    read.link_state = LinkState::ALL.into_iter().find(is_it);
                }
                VfInfo::Mac(p) => read.mac = p.mac.get(..6).map(MacAddress::new),
                VfInfo::IbNodeGuid(p) => read.node_guid = guid(p),
                VfInfo::IbPortGuid(p) => read.port_guid = guid(p),
                _ => {}
            }
        }
        read
    }

    /// What the kernel is asked for, each with its text, in the order in which it is set. Pure.
    fn requests(&self, vf: u32) -> Vec<Request> {
        let mut all = Vec::new();
        let mut ask = |text: String, info| all.push((text, info));
        if let Some(on) = self.trust {
            let info = VfInfo::Trust(VfInfoTrust::new(vf, on));
            ask(format!("trust {}", on_off(on)), info);
        }
        if let Some(on) = self.spoof_check {
            let info = VfInfo::SpoofCheck(VfInfoSpoofCheck::new(vf, on));
            ask(format!("spoof check {}", on_off(on)), info);
        }
        if let Some(Vlan { id, qos, protocol }) = self.vlan {
            let info = VfVlanInfo::new(vf, id.into(), qos.into(), protocol.number());
            let text = format!("VLAN {id} priority {qos} {}", protocol.as_str());
            ask(text, VfInfo::VlanList(vec![VfVlan::Info(info)]));
        }
        if let (Some(min), Some(max)) = (self.min_tx_rate, self.max_tx_rate) {
            let info = VfInfo::Rate(VfInfoRate::new(vf, min, max));
            ask(format!("rate {min} to {max} Mb/s"), info);
        }
        if let Some(state) = self.link_state {
            let info = VfInfoLinkState::new(vf, VfLinkState::from(state as u32));
            let text = format!("link state {}", state.as_str());
            ask(text, VfInfo::LinkState(info));
        }
        if let Some(mac) = &self.mac {
            let info = VfInfo::Mac(VfInfoMac::new(vf, mac.bytes()));
            ask(format!("MAC address {mac}"), info);
        }
        if let Some(guid) = self.node_guid {
            let info = VfInfo::IbNodeGuid(VfInfoGuid::new(vf, guid.0));
            ask(format!("node GUID {guid}"), info);
        }
        if let Some(guid) = self.port_guid {
            let info = VfInfo::IbPortGuid(VfInfoGuid::new(vf, guid.0));
            ask(format!("port GUID {guid}"), info);
        }
        all
    }

    /// The GUIDs alone, which a driver reads when it starts.
    fn guids(&self) -> VfSettings {
        VfSettings {
            node_guid: self.node_guid,
            port_guid: self.port_guid,
            ..VfSettings::default()
        }
    }
}

impl Display for VfSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&text_of(&self.requests(0)))
    }
}

impl Vf {
    /// The VF with this PCI address; none for what is not a VF, or whose PF has no netdev on the host.
    pub fn read(host: &Host, socket: &mut Socket, address: &str) -> netlink::Result<Option<Vf>> {
        let Some((pf, number, driver)) = place(host, address) else {
            return Ok(None);
        };
        let found = netdev_of(host, socket, pf, number)?;
        Ok(found.map(|(_, reported)| Vf {
            pf: pf.to_string(),
            number,
            before: VfSettings::of(&reported.unwrap_or_default()),
            set: VfSettings::default(),
            driver,
        }))
    }

    /// Writes down what an attachment sets: of the two rates the VF keeps the one that is not wanted.
    /// Pure.
    pub fn plan(&mut self, wanted: &VfSettings) {
        let mut set = wanted.clone();
        if set.min_tx_rate.is_some() || set.max_tx_rate.is_some() {
            let kept = |rate: Option<u32>| rate.or(Some(0));
            set.min_tx_rate = set.min_tx_rate.or(kept(self.before.min_tx_rate));
            set.max_tx_rate = set.max_tx_rate.or(kept(self.before.max_tx_rate));
        }
        // After the PF has set an address, some drivers refuse any other to the VF (igb, ixgbe).
        set.mac = set.mac.filter(|mac| self.before.mac.as_ref() != Some(mac));
        self.set = set;
    }

    /// Whether the PF reports which GUIDs the VF has, so that they can be restored.
    pub fn has_guids(&self) -> bool {
        self.before.node_guid.is_some() && self.before.port_guid.is_some()
    }

    /// Sets what is planned for the VF at a PCI address; `driver` reads its GUIDs.
    ///
    /// # Errors
    /// What PF or driver refuse, and what the PF does not report afterwards.
    pub fn apply(&self, host: &Host, socket: &mut Socket, address: &str) -> netlink::Result<()> {
        let Some((pf, _)) = self.now(host, socket)? else {
            let what = format_args!("set VF {} of {}", self.number, self.pf);
            return Err(netlink::Error::call(what, io::ErrorKind::NotFound));
        };
        let guids = self.set.guids();
        for request in difference(&guids, &self.set, self.number) {
            self.set(socket, &pf, request)?;
        }
        if !guids.is_empty() {
            self.renew(&host.sys, socket, &pf, address, &guids)?;
        }
        match self.check(host, socket)? {
            Some(unset) => {
                let what = format_args!("set VF {} of {}: {unset}", self.number, pf.name);
                let reason = "the PF's driver took it, and does not report that the VF has it";
                Err(netlink::Error::call(what, io::Error::other(reason)))
            }
            None => Ok(()),
        }
    }

    /// What the attachment set and the VF does not have; none while the PF has no netdev on the host.
    pub fn check(&self, host: &Host, socket: &mut Socket) -> netlink::Result<Option<String>> {
        if self.set.is_empty() {
            return Ok(None);
        }
        let now = self.now(host, socket)?;
        let unset = now.map(|(_, now)| difference(&now, &self.set, self.number));
        let unset = unset.filter(|unset| !unset.is_empty());
        Ok(unset.map(|unset| text_of(&unset)))
    }

    /// Whether a change of GUIDs was cut off.
    pub fn lacks_driver(&self, sys: &Path, address: &str) -> bool {
        let function = sys.join("bus/pci/devices").join(address);
        !self.set.guids().is_empty() && function.exists() && !function.join("driver").exists()
    }

    /// Restores the GUIDs if an attachment has changed them, and the PF is on the host. Returns whether
    /// the driver has started again, which makes another netdev.
    pub fn restore_guids(
        &self,
        host: &Host,
        socket: &mut Socket,
        address: &str,
    ) -> netlink::Result<bool> {
        if self.set.guids().is_empty() {
            return Ok(false);
        }
        let Some((pf, now)) = self.now(host, socket)? else {
            return Ok(false);
        };
        let guids = self.before.guids();
        if difference(&now, &guids, self.number).is_empty()
            && !self.lacks_driver(&host.sys, address)
        {
            return Ok(false);
        }
        self.renew(&host.sys, socket, &pf, address, &guids)?;
        Ok(true)
    }

    /// Restores what the VF may do: all but its address, which it may then set itself. One that the PF
    /// sets for it it could not change again before its driver is loaded anew
    /// (`igb_ndo_set_vf_mac`); an address of zeros ends that. [`Vf::undo`] reports what cannot be restored.
    pub fn restore_rights(&self, host: &Host, socket: &mut Socket) {
        drop(self.restore(host, socket, &self.rights()));
    }

    fn rights(&self) -> VfSettings {
        VfSettings {
            mac: self.set.mac.as_ref().map(|_| MacAddress::new([0; 6])),
            ..self.before.clone()
        }
    }

    /// Restores what differs. Returns as text what was refused, and why the VF may still have settings of
    /// the attachment that it did not have before.
    pub fn undo(&self, host: &Host, socket: &mut Socket) -> (Vec<String>, Option<String>) {
        let refused = self.restore(host, socket, &self.before);
        let refused = refused.unwrap_or_else(|e| vec![e.to_string()]);
        if self.set.is_empty() {
            return (refused, None);
        }
        let kept = match self.now(host, socket) {
            Ok(Some((_, now))) => self.kept_of(&now),
            Ok(None) => self.set.requests(self.number),
            Err(e) => return (refused, Some(e.to_string())),
        };
        let why = || {
            format!(
                "{} was not restored: {}",
                text_of(&kept),
                refused.join("; ")
            )
        };
        let kept = (!kept.is_empty()).then(why);
        (refused, kept)
    }

    /// What the attachment changed and the VF still has. Pure.
    fn kept_of(&self, now: &VfSettings) -> Vec<Request> {
        let (now, mut kept) = (
            now.requests(self.number),
            difference(&self.before, &self.set, self.number),
        );
        kept.retain(|request| now.contains(request));
        kept
    }

    fn restore(
        &self,
        host: &Host,
        socket: &mut Socket,
        wanted: &VfSettings,
    ) -> netlink::Result<Vec<String>> {
        let Some((pf, now)) = self.now(host, socket)? else {
            return Ok(vec![format!(
                "PF {} has no netdev on the host, or reports nothing of its VF {}: its settings were \
                 not read",
                self.pf, self.number
            )]);
        };
        let requests = difference(&now, wanted, self.number).into_iter();
        let refused = requests.filter_map(|request| self.set(socket, &pf, request).err());
        Ok(refused.map(|e| e.to_string()).collect())
    }

    /// The VF of this host, other than this one, that has a GUID by what its PF reports; as text.
    pub fn other_with(&self, socket: &mut Socket, guid: Guid) -> netlink::Result<Option<String>> {
        let links = link::list(socket)?;
        for link in links.iter().filter(|link| link.is_infiniband()) {
            let is_pf = link.bus_device.as_ref() == Some(&self.pf);
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

    fn renew(
        &self,
        sys: &Path,
        socket: &mut Socket,
        pf: &Link,
        address: &str,
        guids: &VfSettings,
    ) -> netlink::Result<()> {
        let driver = self.driver.as_deref().unwrap_or_default();
        link::without_driver(sys, driver, address, || {
            let mut requests = guids.requests(self.number).into_iter();
            requests.try_for_each(|request| self.set(socket, pf, request))
        })
    }

    /// The PF's netdev and the VF's settings; none while the PF has no netdev on the host, or reports
    /// nothing of the VF.
    fn now(&self, host: &Host, socket: &mut Socket) -> netlink::Result<Option<(Link, VfSettings)>> {
        let Ok(pf) = self.pf.parse() else {
            return Ok(None);
        };
        let found = netdev_of(host, socket, pf, self.number)?;
        Ok(found.and_then(|(pf, reported)| Some((pf, VfSettings::of(&reported?)))))
    }

    fn set(&self, socket: &mut Socket, pf: &Link, (text, info): Request) -> netlink::Result<()> {
        let what = format_args!("set VF {} of {}: {text}", self.number, pf.name);
        link::set(socket, what, pf.index, vec![attribute(info)])
    }
}

fn attribute(info: VfInfo) -> LinkAttribute {
    LinkAttribute::VfInfoList(vec![LinkVfInfo(vec![info])])
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

/// The PF of a VF, the VF's number and its driver.
fn place(host: &Host, address: &str) -> Option<(PciAddress, u32, Option<String>)> {
    let function = hca::pci::read(host, address.parse().ok()?).ok()?;
    match function.sriov {
        hca::pci::Sriov::Virtual { physical, index } => Some((physical, index?, function.driver)),
        _ => None,
    }
}

/// The PF's netdev, with what it says of a VF, if anything. In switchdev mode the representors of VFs are netdevs of
/// the PF, which say nothing of VFs; of the two ports of an mlx4, settings go through any.
fn netdev_of(
    host: &Host,
    socket: &mut Socket,
    pf: PciAddress,
    number: u32,
) -> netlink::Result<Option<(Link, Option<Vec<VfInfo>>)>> {
    let occupants = lookup::on_hca(host, &HcaId::Pci(pf));
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

#[cfg(test)]
mod tests {
    use hca_trees::{NetdevSpec, On, PciSpec, Tree};
    use netlink_packet_core::Emitable;
    use netlink_packet_route::link::VfInfoVlan;

    use super::*;

    fn vf(before: VfSettings) -> Vf {
        Vf {
            pf: "0000:3b:00.0".to_owned(),
            number: 3,
            before,
            set: VfSettings::default(),
            driver: None,
        }
    }

    fn all() -> VfSettings {
        VfSettings {
            trust: Some(true),
            spoof_check: Some(false),
            vlan: Some(Vlan {
                id: 100,
                qos: 5,
                protocol: Protocol::Ad,
            }),
            min_tx_rate: Some(100),
            max_tx_rate: Some(2000),
            link_state: Some(LinkState::Enable),
            mac: "02:00:00:00:00:09".parse().ok(),
            node_guid: Some(Guid(0x0011_2233_4455_6677)),
            port_guid: Some(Guid(0x0011_2233_4455_6677)),
        }
    }

    #[test]
    fn settings_are_readable_in_the_journal() {
        let mut vf = vf(VfSettings::default());
        vf.plan(&all());
        let written = serde_json::to_value(&vf).unwrap();
        assert_eq!(written["before"]["trust"], serde_json::Value::Null);
        let set = serde_json::json!({
            "trust": true, "spoofCheck": false,
            "vlan": {"id": 100, "qos": 5, "protocol": "802.1ad"},
            "minTxRate": 100, "maxTxRate": 2000, "linkState": "enable", "mac": "02:00:00:00:00:09",
            "nodeGuid": "0011:2233:4455:6677", "portGuid": "0011:2233:4455:6677",
        });
        assert_eq!(written["set"], set);
        assert_eq!(serde_json::from_value::<Vf>(written).unwrap(), vf);
        assert_eq!(
            vf.set.to_string(),
            "trust on, spoof check off, VLAN 100 priority 5 802.1ad, rate 100 to 2000 Mb/s, link state \
             enable, MAC address 02:00:00:00:00:09, node GUID 0011:2233:4455:6677, port GUID \
             0011:2233:4455:6677"
        );
    }

    #[test]
    fn what_is_set_reads_back_and_differs_no_more() {
        let infos: Vec<VfInfo> = all()
            .requests(3)
            .into_iter()
            .map(|(_, info)| info)
            .collect();
        assert_eq!(VfSettings::of(&infos), all());
        let nothing = VfSettings::default();
        assert_eq!(difference(&nothing, &all(), 3), all().requests(3));
        assert!(difference(&all(), &all(), 3).is_empty());
        assert!(difference(&all(), &nothing, 3).is_empty());
        let slower = VfSettings {
            max_tx_rate: Some(1000),
            ..all()
        };
        let differing = text_of(&difference(&all(), &slower, 3));
        assert_eq!(differing, "rate 100 to 1000 Mb/s");
    }

    #[test]
    fn one_rate_is_set_with_the_other_that_the_vf_has() {
        let rates = |min, max| VfSettings {
            min_tx_rate: min,
            max_tx_rate: max,
            ..VfSettings::default()
        };
        let mut vf = vf(rates(Some(100), Some(1000)));
        vf.plan(&VfSettings::default());
        assert!(vf.set.is_empty());
        vf.plan(&rates(None, Some(2000)));
        assert_eq!(vf.set, rates(Some(100), Some(2000)));
        vf.before = VfSettings::default();
        vf.plan(&rates(Some(7), None));
        assert_eq!(vf.set, rates(Some(7), Some(0)));
    }

    #[test]
    fn a_setting_that_the_vf_keeps_is_named_unless_it_was_so_before() {
        let settings = |trust| VfSettings {
            trust: Some(trust),
            spoof_check: Some(false),
            ..VfSettings::default()
        };
        let mut vf = vf(settings(false));
        vf.plan(&settings(true));
        assert_eq!(text_of(&vf.kept_of(&settings(true))), "trust on");
        assert!(vf.kept_of(&settings(false)).is_empty());
        assert!(vf.kept_of(&VfSettings::default()).is_empty());
    }

    #[test]
    fn an_address_by_the_pf_is_taken_back_before_the_vf_sets_its_own() {
        let mac = |mac: &str| VfSettings {
            mac: mac.parse().ok(),
            ..VfSettings::default()
        };
        let mut vf = vf(mac("02:00:00:00:00:01"));
        assert_eq!(vf.rights().mac, None);
        vf.plan(&mac("02:00:00:00:00:01"));
        assert!(vf.set.is_empty(), "its own");
        vf.plan(&mac("02:00:00:00:00:09"));
        assert_eq!(vf.rights(), mac("00:00:00:00:00:00"));
    }

    #[test]
    fn a_vlan_is_read_with_its_protocol() {
        let plain = VfInfo::Vlan(VfInfoVlan::new(3, 100, 2));
        let info = VfVlanInfo::new(3, 100, 2, VlanProtocol::Ieee8021Ad);
        let tagged = VfInfo::VlanList(vec![VfVlan::Info(info)]);
        let protocol = |reported: &[VfInfo]| VfSettings::of(reported).vlan.unwrap().protocol;
        assert_eq!(protocol(&[plain.clone(), tagged.clone()]), Protocol::Ad);
        assert_eq!(protocol(&[tagged, plain.clone()]), Protocol::Ad);
        assert_eq!(protocol(&[plain]), Protocol::Q);
    }

    #[test]
    fn a_guid_of_zero_is_restored_as_none() {
        let zero = VfInfo::IbNodeGuid(VfInfoGuid::new(3, 0));
        let read = VfSettings::of(&[zero]);
        assert_eq!(read.node_guid, Some(Guid(u64::MAX)));
        assert!(!vf(read).has_guids(), "one of two");
        assert!(vf(all()).has_guids());
    }

    /// `IFLA_VFINFO_LIST` as `ip link set PF vf 3 …` of iproute2 6.1 sends it, by strace.
    #[test]
    fn settings_are_sent_as_ip_does() {
        // VLAN 100 priority 2 proto 802.1ad; the GUID as the kernel has it: struct ifla_vf_guid, with
        // four bytes of padding.
        let wanted = VfSettings {
            vlan: Some(Vlan {
                id: 100,
                qos: 2,
                protocol: Protocol::Ad,
            }),
            spoof_check: Some(true),
            max_tx_rate: Some(1000),
            port_guid: None,
            ..all()
        };
        let mac = [
            &[
                0x30, 0, 22, 0, 0x2c, 0, 1, 0, 0x28, 0, 1, 0, 3, 0, 0, 0, 2, 0, 0, 0, 0, 9,
            ][..],
            &[0; 26],
        ]
        .concat();
        let expected: [&[u8]; 7] = [
            &[
                0x14, 0, 22, 0, 0x10, 0, 1, 0, 12, 0, 9, 0, 3, 0, 0, 0, 1, 0, 0, 0,
            ],
            &[
                0x14, 0, 22, 0, 0x10, 0, 1, 0, 12, 0, 4, 0, 3, 0, 0, 0, 1, 0, 0, 0,
            ],
            &[
                0x20, 0, 22, 0, 0x1c, 0, 1, 0, 0x18, 0, 12, 0, 0x14, 0, 1, 0, 3, 0, 0, 0, 100, 0,
                0, 0, 2, 0, 0, 0, 0x88, 0xa8, 0, 0,
            ],
            &[
                0x18, 0, 22, 0, 0x14, 0, 1, 0, 0x10, 0, 6, 0, 3, 0, 0, 0, 100, 0, 0, 0, 0xe8, 3, 0,
                0,
            ],
            &[
                0x14, 0, 22, 0, 0x10, 0, 1, 0, 12, 0, 5, 0, 3, 0, 0, 0, 1, 0, 0, 0,
            ],
            &mac,
            &[
                0x1c, 0, 22, 0, 0x18, 0, 1, 0, 0x14, 0, 10, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0x77, 0x66,
                0x55, 0x44, 0x33, 0x22, 0x11, 0,
            ],
        ];
        let requests = wanted.requests(3);
        assert_eq!(requests.len(), expected.len());
        for ((text, info), expected) in requests.into_iter().zip(expected) {
            let attribute = attribute(info);
            let mut sent = vec![0; attribute.buffer_len()];
            attribute.emit(&mut sent);
            assert_eq!(sent, expected, "{text}");
        }
    }

    #[test]
    fn a_change_of_guids_that_was_cut_off_shows() {
        let sys = tempfile::tempdir().unwrap();
        let address = "0000:3b:00.2";
        let function = sys.path().join("bus/pci/devices").join(address);
        let mut vf = Vf {
            pf: "0000:3b:00.0".to_owned(),
            number: 0,
            before: VfSettings::default(),
            set: all(),
            driver: Some("mlx5_core".to_owned()),
        };
        assert!(!vf.lacks_driver(sys.path(), address), "it was removed");
        std::fs::create_dir_all(&function).unwrap();
        assert!(vf.lacks_driver(sys.path(), address));
        std::fs::create_dir(function.join("driver")).unwrap();
        assert!(!vf.lacks_driver(sys.path(), address));
        std::fs::remove_dir(function.join("driver")).unwrap();
        vf.set = VfSettings::default();
        assert!(!vf.lacks_driver(sys.path(), address), "left alone");
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
        let (pf, number, driver) = place(&host, "0000:3b:00.2").unwrap();
        assert_eq!(driver.as_deref(), Some("mlx5_core"));
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
