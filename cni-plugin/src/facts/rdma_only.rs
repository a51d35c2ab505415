//! `attach: rdma-only`: which interface of the chain and which RDMA devices a request means.

use std::collections::BTreeSet;

use cni_wire::{CniResult, Code, Request, text::list};
use hca::{HcaId, Host, NetnsMode, PortId, RdmaDevice, lookup};
use netlink::{
    Socket,
    link::{self, By, Link},
};

use super::{HostLink, NodeNetwork, Reading, read_named, target::names_no_hca, unreadable};
use crate::{
    config::{Config, Devices, Target, UnitHcas},
    error::Error,
    rdma::MovableRdma,
};

/// RDMA devices for an interface that another plugin of the chain made.
#[derive(Clone, Debug)]
pub struct RdmaOnly {
    /// The interface of the call's name, else the only one of the pod.
    pub interface: Option<PodInterface>,
    /// The devices, in order of name; never empty.
    pub devices: Vec<RdmaTarget>,
    /// How the RDMA subsystem treats namespaces.
    pub mode: Option<NetnsMode>,
    /// The devices as they move; read where they do.
    pub rdma: Result<MovableRdma, Error>,
}

/// An interface of the pod that the previous result names.
#[derive(Clone, Debug)]
pub struct PodInterface {
    pub link: Link,
    /// Its place among the interfaces of the previous result.
    pub position: usize,
}

/// An RDMA device of the host.
#[derive(Clone, Debug)]
pub struct RdmaTarget {
    pub device: RdmaDevice,
    /// The HCA it belongs to; none for a device that no unit can name.
    pub hca: Option<HcaId>,
    /// The netdevs of the host that have it.
    pub netdevs: Vec<HostLink>,
}

impl RdmaOnly {
    /// What messages call the interface.
    pub fn interface_name(&self) -> String {
        name(self.interface.as_ref())
    }

    pub fn names(&self) -> BTreeSet<String> {
        let devices = self.devices.iter();
        devices.map(|target| target.device.name.clone()).collect()
    }

    /// All ports of the devices.
    pub fn ports(&self) -> Vec<PortId> {
        let of_device = |target: &RdmaTarget| {
            let name = target.device.name.clone();
            let ports = target.device.ports.iter();
            ports
                .map(|port| PortId {
                    device: name.clone(),
                    port: port.number,
                })
                .collect::<Vec<_>>()
        };
        self.devices.iter().flat_map(of_device).collect()
    }
}

fn name(interface: Option<&PodInterface>) -> String {
    interface.map_or("the chain".to_owned(), |one| one.link.name.to_string())
}

/// That it cannot be the first of a chain.
pub(crate) fn needs_a_chain() -> Error {
    Error::new(
        Code::InvalidConfig,
        "prevResult is missing: attach rdma-only follows a plugin that makes an interface",
    )
    .with_details("put it behind that plugin in the list, or set attach to move")
}

/// Reads what `attach: rdma-only` means.
///
/// # Errors
/// Code 7: no RDMA device is meant, or it does not exist.
pub(super) fn read(
    reading: &mut Reading<'_>,
    unit: Option<&UnitHcas>,
    network: &mut NodeNetwork,
) -> Result<RdmaOnly, Error> {
    let (node, config) = (&mut *reading.node, reading.config);
    let interface = interface(reading.before, reading.request, reading.inside)?;
    let name = name(interface.as_ref());
    let behind = match &interface {
        Some(interface) => of_nic(&node.roots, &interface.link)?,
        None => BTreeSet::new(),
    };
    let names = selected(&node.roots, config, unit)?.unwrap_or_else(|| behind.clone());
    if names.is_empty() {
        return Err(Error::new(
            Code::InvalidConfig,
            format!("no RDMA device is selected, and {name} is not the netdev of one"),
        )
        .with_details(
            "let Multus pass a deviceID (k8s.v1.cni.cncf.io/resourceName), or set rdmaDevice",
        ));
    }
    if let (Some(unit), Devices::One) = (unit, config.devices)
        && !behind.is_empty()
        && names.is_disjoint(&behind)
    {
        return Err(Error::new(
            Code::InvalidConfig,
            format!(
                "{name} of the chain is on {}, but deviceID {} is a unit of {}",
                list(behind),
                unit.text,
                list(names)
            ),
        )
        .with_details("let the plugin that makes the interface have the same deviceID"));
    }
    let mut devices = Vec::new();
    for name in &names {
        let device = hca::rdma::read(&node.roots, name)
            .map_err(|e| Error::new(Code::InvalidConfig, e.to_string()))?;
        let mut netdevs = Vec::new();
        for netdev in device.netdevs() {
            netdevs.push(read_named(node, netdev, network)?);
        }
        devices.push(RdmaTarget {
            hca: HcaId::of(&device).ok(),
            device,
            netdevs,
        });
    }
    Ok(RdmaOnly {
        interface,
        devices,
        mode: hca::netns_mode(&node.roots)?,
        rdma: Ok(MovableRdma::default()),
    })
}

/// The interface of the call's name, else the only one of the pod.
fn interface(
    before: &CniResult,
    request: &Request,
    inside: &mut Socket,
) -> Result<Option<PodInterface>, Error> {
    let id = request.attachment()?;
    let in_pod = |(_, i): &(usize, &cni_wire::Interface)| i.sandbox == request.env.netns;
    let of_pod: Vec<_> = before
        .interfaces
        .iter()
        .enumerate()
        .filter(in_pod)
        .collect();
    let named = of_pod.iter().find(|(_, i)| i.name == id.ifname.as_str());
    let (position, meant) = match (named, of_pod.as_slice()) {
        (Some(one), _) | (None, [one]) => *one,
        _ => return Ok(None),
    };
    let link = link::get(inside, By::Name(meant.name.as_bytes()))?;
    Ok(link.map(|link| PodInterface { link, position }))
}

/// The RDMA devices of the allocation, else the one that the configuration names.
fn selected(
    roots: &Host,
    config: &Config,
    unit: Option<&UnitHcas>,
) -> Result<Option<BTreeSet<String>>, Error> {
    let Some(unit) = unit else {
        return Ok(match &config.device {
            Some(Target::RdmaDevice(name)) => Some(BTreeSet::from([name.clone()])),
            _ => None,
        });
    };
    let mut devices = BTreeSet::new();
    for hca in &unit.hcas {
        let of_hca = of_hca(roots, hca)?;
        if of_hca.is_empty() {
            return Err(Error::new(
                Code::TryAgain,
                format!("HCA {hca}, which the pod was allocated, has no RDMA device on the host"),
            )
            .with_details(
                "the pod that had it may still end; if it stays so, load the RDMA driver (rdma link show)",
            ));
        }
        devices.extend(of_hca);
    }
    match devices.is_empty() {
        false => Ok(Some(devices)),
        true => Err(names_no_hca(unit, "name the RDMA device with rdmaDevice")),
    }
}

/// The RDMA devices of an interface that is a NIC itself.
fn of_nic(roots: &Host, link: &Link) -> Result<BTreeSet<String>, Error> {
    match link
        .bus_device
        .as_deref()
        .and_then(|device| device.parse().ok())
    {
        Some(hca) => of_hca(roots, &hca),
        None => Ok(BTreeSet::new()),
    }
}

fn of_hca(roots: &Host, hca: &HcaId) -> Result<BTreeSet<String>, Error> {
    match lookup::on_hca(roots, hca) {
        Ok(occupants) => Ok(occupants.rdma_devices.into_iter().collect()),
        Err(e) => Err(unreadable(&e)),
    }
}

#[cfg(test)]
mod tests {
    use hca_trees::{On, PciSpec, RdmaSpec, Tree};

    use super::*;

    #[test]
    fn a_nic_names_its_rdma_devices_and_a_child_none() {
        let dir = tempfile::tempdir().unwrap();
        let tree = Tree::new(dir.path());
        tree.pci(&PciSpec::MLX5);
        tree.rdma(&RdmaSpec {
            name: "mlx5_0",
            on: On::Pci(PciSpec::MLX5.address),
            ..RdmaSpec::default()
        });
        let roots = Host::at(dir.path());
        let on = |bus_device: Option<&str>| Link {
            bus_device: bus_device.map(str::to_owned),
            ..Link::default()
        };
        let nic = of_nic(&roots, &on(Some(PciSpec::MLX5.address))).unwrap();
        assert_eq!(nic, BTreeSet::from(["mlx5_0".to_owned()]));
        assert!(of_nic(&roots, &on(None)).unwrap().is_empty());
    }
}
