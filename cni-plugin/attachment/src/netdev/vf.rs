//! What a PF holds of its VFs: MAC address, VLAN, rates, spoof check, trust, link state, GUIDs.
//! They are set through the PF's netdev, which stays on the host, and outlast a VF's stay in a
//! pod; but drivers change some of them behind the VF's back, such as the MAC address when its
//! user sets one. They are taken down with the VF and given back with it, those alone that differ.
//!
//! A driver reads the GUIDs of an InfiniBand VF when it starts. So each change of them is made while
//! the VF has no driver: one that was cut off shows, and is made again.

use std::{
    io,
    path::{Path, PathBuf},
};

use hca::{Guid, Host, PciAddress, lookup};
use netlink::{
    Socket,
    link::{self, By, Link},
};
use netlink_packet_route::link::{LinkAttribute, LinkMessage, LinkVfInfo, VfInfo, VfInfoGuid};
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
    /// The driver that has read GUIDs of an attachment; none where those were left alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
}

/// What became of the GUIDs of a VF that returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guids {
    Unchanged,
    /// Its driver has read its own again: it has another netdev now.
    Renewed,
    /// It may have an attachment's: the PF has no netdev on the host.
    PfAway,
}

impl Vf {
    /// The properties of the VF with this PCI address; none for what is no VF, or whose PF has no
    /// netdev on the host.
    pub fn take(host: &Host, socket: &mut Socket, address: &str) -> netlink::Result<Option<Vf>> {
        let Some((pf, number)) = place(host, address) else {
            return Ok(None);
        };
        let Some(netdev) = netdev_of(host, pf) else {
            return Ok(None);
        };
        let Some(index) = link::get(socket, By::Name(netdev.as_bytes()))?.map(|link| link.index)
        else {
            return Ok(None);
        };
        let properties = link::vf_properties(socket, index, number)?;
        Ok(Some(Vf {
            pf: pf.to_string(),
            number,
            properties: properties.iter().filter_map(kept).collect(),
            driver: None,
        }))
    }

    /// Whether the PF says which GUIDs the VF has, so that they can be restored.
    pub fn has_guids(&self) -> bool {
        self.properties.iter().filter(|p| is_guid(p)).count() == GUIDS.len()
    }

    /// Sets node and port GUID of the VF at a PCI address, and has `driver` read them.
    pub fn set_guid(
        &self,
        sys: &Path,
        socket: &mut Socket,
        address: &str,
        guid: Guid,
    ) -> netlink::Result<()> {
        let guids = GUIDS.map(|kind| kind(VfInfoGuid::new(self.number, guid.0)));
        let guids: Vec<Message> = guids.iter().filter_map(kept).collect();
        let Some((pf, _)) = self.now(sys, socket)? else {
            let what = format_args!("set the GUIDs of VF {} of {}", self.number, self.pf);
            return Err(netlink::Error::call(what, io::ErrorKind::NotFound));
        };
        self.renew(sys, socket, &pf, address, guids.iter())
    }

    /// Whether a change of GUIDs was cut off.
    pub fn lacks_driver(&self, sys: &Path, address: &str) -> bool {
        let function = sys.join("bus/pci/devices").join(address);
        self.driver.is_some() && function.exists() && !function.join("driver").exists()
    }

    /// Restores the GUIDs if an attachment has changed them.
    pub fn restore_guid(
        &self,
        sys: &Path,
        socket: &mut Socket,
        address: &str,
    ) -> netlink::Result<Guids> {
        if self.driver.is_none() {
            return Ok(Guids::Unchanged);
        }
        let Some((pf, now)) = self.now(sys, socket)? else {
            return Ok(Guids::PfAway);
        };
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
        let pf: Option<PciAddress> = self.pf.parse().ok();
        let pf = pf.and_then(|pf| netdev_of(host, pf));
        for link in link::list(socket)?
            .iter()
            .filter(|link| link.is_infiniband())
        {
            let is_pf = pf.as_ref().is_some_and(|pf| link.name == *pf);
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

    /// The PF's netdev and the VF's properties; none while the PF has no netdev on the host.
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
        let pf: Option<PciAddress> = self.pf.parse().ok();
        let Some(netdev) = pf.and_then(|pf| netdev_of(&host, pf)) else {
            return Ok(None);
        };
        let Some(link) = link::get(socket, By::Name(netdev.as_bytes()))? else {
            return Ok(None);
        };
        let now = link::vf_properties(socket, link.index, self.number)?;
        Ok(Some((link, now.iter().filter_map(kept).collect())))
    }

    fn set(&self, socket: &mut Socket, pf: &Link, property: &Message) -> netlink::Result<()> {
        let what = format!("set VF {} of {}: {}", self.number, pf.name, property.text);
        let message = property.parse::<LinkMessage>();
        let message = message.map_err(|e| {
            let damaged = io::Error::new(io::ErrorKind::InvalidData, e.to_string());
            netlink::Error::call(&what, damaged)
        })?;
        link::set_vf(socket, &what, pf.index, message.attributes)
    }

    /// Gives back what differs of what the VF may do: all but its address, which it may then
    /// set itself. One that the PF sets for it it could not change again before its driver is
    /// loaded anew (`igb_ndo_set_vf_mac`). Returns what could not be, as text.
    pub fn restore_rights(&self, sys: &Path, socket: &mut Socket) -> netlink::Result<Vec<String>> {
        let rights = Vf {
            properties: self
                .properties
                .iter()
                .filter(|p| !is_mac(p))
                .cloned()
                .collect(),
            ..self.clone()
        };
        rights.restore(sys, socket)
    }

    /// Gives back what differs. Returns what could not be, as text.
    pub fn restore(&self, sys: &Path, socket: &mut Socket) -> netlink::Result<Vec<String>> {
        let Some((pf, now)) = self.now(sys, socket)? else {
            return Ok(vec![format!(
                "PF {} has no netdev on the host; the properties of its VF {} were not read",
                self.pf, self.number
            )]);
        };
        let differing = self.properties.iter().filter(|p| !now.contains(p));
        let refused = differing.filter_map(|p| self.set(socket, &pf, p).err());
        Ok(refused.map(|e| e.to_string()).collect())
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

/// The PF's netdev; of several, VF settings go through any.
fn netdev_of(host: &Host, pf: PciAddress) -> Option<String> {
    let occupants = lookup::on_pci(host, pf).ok()?;
    occupants.netdevs.into_iter().next().map(|n| n.name)
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

/// A property worth keeping: not counters, nor what follows from others.
fn kept(property: &VfInfo) -> Option<Message> {
    let mut property = property.clone();
    if let VfInfo::IbNodeGuid(p) | VfInfo::IbPortGuid(p) = &mut property {
        p.guid = settable(p.guid);
    }
    let text = match &property {
        VfInfo::Mac(p) => format!("{MAC}{}", hca::MacAddress::new(p.mac.get(..6)?)),
        VfInfo::Vlan(p) => format!("VLAN {} priority {}", p.vlan_id, p.qos),
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
    use netlink_packet_route::link::{
        VfInfoLinkState, VfInfoMac, VfInfoRate, VfInfoSpoofCheck, VfInfoTrust, VfInfoVlan,
        VfLinkState,
    };

    use super::*;

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
            let message = kept(&property).unwrap();
            let parsed: LinkMessage = message.parse().unwrap();
            let [attribute] = parsed.attributes.as_slice() else {
                panic!("{parsed:?}")
            };
            let mut sent = vec![0; attribute.buffer_len()];
            attribute.emit(&mut sent);
            assert_eq!(sent, captured, "{}", message.text);
        }
        assert_eq!(kept(&VfInfo::Stats(vec![])), None);
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
            properties: guids.iter().filter_map(kept).collect(),
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
        assert_eq!(netdev_of(&host, pf).as_deref(), Some("ens1"));
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
