//! `attach: rdma-only`: which interfaces of the chain and which RDMA devices a request means.

use std::collections::BTreeSet;

use attachment::node::Node;
use cni_wire::{CniResult, Code, Request, text::list};
use hca::{HcaId, Host, NetnsMode, PortId, RdmaDevice, lookup};
use netlink::{
    Namespace, Socket,
    link::{self, By, Link},
    sysfs::Sysfs,
};

use super::{HostLink, NodeNetwork, name_of, read_named, target::names_none, unreadable};
use crate::{
    config::{Config, Devices, Target},
    error::Error,
};

/// RDMA devices for interfaces that another plugin of the chain made.
#[derive(Clone, Debug)]
pub struct RdmaOnly {
    /// The interface of the call's name, else all of the pod's.
    pub interfaces: Vec<PodInterface>,
    /// The devices, in order of name; never empty.
    pub devices: Vec<RdmaTarget>,
    /// How the RDMA subsystem treats namespaces.
    pub mode: Option<NetnsMode>,
}

/// An interface of the pod that the previous result names.
#[derive(Clone, Debug)]
pub struct PodInterface {
    pub link: Link,
    /// Its place among the interfaces of the previous result.
    pub position: usize,
    /// Names of the RDMA devices behind it; only read where a unit names the devices, or the chain made
    /// several interfaces.
    pub devices: BTreeSet<String>,
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
        name(&self.interfaces)
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

fn name(interfaces: &[PodInterface]) -> String {
    match interfaces.is_empty() {
        true => "the chain".to_owned(),
        false => list(interfaces.iter().map(|interface| &interface.link.name)),
    }
}

/// That it cannot be the first of a chain.
pub(crate) fn needs_a_chain() -> Error {
    Error::new(
        Code::InvalidConfig,
        "prevResult is missing: attach rdma-only follows a plugin that makes an interface",
    )
    .with_details("put it behind that plugin in the list, or set attach to move")
}

/// Resolves a request of attach `rdma-only`.
///
/// # Errors
/// Code 7: no RDMA device is meant, or it does not exist.
pub(super) fn resolve(
    node: &mut Node,
    request: &Request,
    config: &Config,
    before: &CniResult,
    pod: &Namespace,
    inside: &mut Socket,
    network: &mut NodeNetwork,
) -> Result<RdmaOnly, Error> {
    let mut interfaces = interfaces(before, request, inside)?;
    let unit = config.allocation.as_ref();
    let unit = unit.filter(|_| config.devices == Devices::One);
    if interfaces.len() > 1 || unit.is_some() {
        for interface in &mut interfaces {
            interface.devices = of_interface(node, pod, &interface.link)?;
        }
    }
    let names = devices(node, config, pod, &interfaces)?;
    let behind: BTreeSet<&String> = interfaces.iter().flat_map(|i| &i.devices).collect();
    if let Some(unit) = unit
        && !behind.is_empty()
        && !names.iter().any(|name| behind.contains(name))
    {
        return Err(Error::new(
            Code::InvalidConfig,
            format!(
                "{} of the chain is on {}, but deviceID {} is a unit of {}",
                name(&interfaces),
                list(behind),
                unit.text,
                list(names)
            ),
        )
        .with_details("let the plugin that makes the interface have the same deviceID"));
    }
    if names.is_empty() {
        let name = name(&interfaces);
        return Err(Error::new(
            Code::InvalidConfig,
            format!("no RDMA device belongs to {name}, and nothing else names one"),
        )
        .with_details(
            "let Multus pass a deviceID (k8s.v1.cni.cncf.io/resourceName), or set rdmaDevice",
        ));
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
        interfaces,
        devices,
        mode: hca::netns_mode(&node.roots)?,
    })
}

/// The interface of the call's name, else all of the pod's.
fn interfaces(
    before: &CniResult,
    request: &Request,
    inside: &mut Socket,
) -> Result<Vec<PodInterface>, Error> {
    let id = request.attachment()?;
    let in_pod = |i: &cni_wire::Interface| i.sandbox.as_deref() == request.env.netns.as_deref();
    let of_pod = before
        .interfaces
        .iter()
        .enumerate()
        .filter(|(_, i)| in_pod(i));
    let mut meant: Vec<(usize, &cni_wire::Interface)> = of_pod.collect();
    if let Some(named) = meant.iter().find(|(_, i)| i.name == id.ifname.as_str()) {
        meant = vec![*named];
    }
    let mut found = Vec::new();
    for (position, interface) in meant {
        let link = link::get(inside, By::Name(interface.name.as_bytes()))?;
        found.extend(link.map(|link| PodInterface {
            link,
            position,
            devices: BTreeSet::new(),
        }));
    }
    Ok(found)
}

/// The RDMA devices that are meant: of the allocation, of the configuration, of the interfaces.
fn devices(
    node: &mut Node,
    config: &Config,
    pod: &Namespace,
    interfaces: &[PodInterface],
) -> Result<BTreeSet<String>, Error> {
    if let Some(allocation) = &config.allocation {
        let mut devices = BTreeSet::new();
        for hca in &allocation.hcas {
            let of_hca = of_hca(&node.roots, hca)?;
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
        return match allocation.hcas.is_empty() {
            false => Ok(devices),
            true => Err(names_none(config, "name the RDMA device with rdmaDevice")),
        };
    }
    match &config.device {
        Some(Target::RdmaDevice(name)) => return Ok(BTreeSet::from([name.clone()])),
        Some(Target::Hca(hca)) => return of_hca(&node.roots, hca),
        Some(target) => {
            let name = name_of(&node.roots, target, config.port)?;
            return of_netdev(&node.roots, &name);
        }
        None => {}
    }
    match interfaces {
        [only] => of_interface(node, pod, &only.link),
        several => Ok(several
            .iter()
            .flat_map(|interface| interface.devices.clone())
            .collect()),
    }
}

/// The RDMA devices behind an interface of the pod.
fn of_interface(node: &mut Node, pod: &Namespace, link: &Link) -> Result<BTreeSet<String>, Error> {
    if let Some(hca) = link.bus_device.as_deref().and_then(|d| d.parse().ok()) {
        let devices = of_hca(&node.roots, &hca)?;
        if !devices.is_empty() {
            return Ok(devices);
        }
    }
    // A child: the netdev below it is the host's, when the pod's namespace has the host's number
    // for it. Any other index is one of another namespace.
    let parent = match (link.parent, link.parent_netns) {
        (Some(parent), Some(number)) if is_host(node, pod, number)? => {
            link::get(&mut node.netns.socket, By::Index(parent))?
        }
        _ => None,
    };
    match parent {
        Some(parent) => of_netdev(&node.roots, &parent.name.to_string()),
        None => software_on(node, pod, &link.name.to_string()),
    }
}

/// Whether a pod's namespace knows the host's by this number.
fn is_host(node: &Node, pod: &Namespace, number: i32) -> Result<bool, Error> {
    let mut socket = pod.socket(&node.netns.namespace)?;
    Ok(link::known_number(&mut socket, &node.netns.namespace)? == Some(number))
}

/// Soft RoCE is not below its NIC; it stayed when that was moved.
fn software_on(node: &Node, pod: &Namespace, name: &str) -> Result<BTreeSet<String>, Error> {
    let sysfs = Sysfs::of(pod, &node.netns.namespace)?;
    let there = Host {
        sys: sysfs.path(),
        ..node.roots.clone()
    };
    match lookup::software_on_netdev_of(&node.roots, &there, name) {
        Ok(ports) => Ok(ports.into_iter().map(|port| port.device).collect()),
        Err(e) => Err(Error::new(Code::Io, e.to_string())),
    }
}

fn of_hca(roots: &Host, hca: &HcaId) -> Result<BTreeSet<String>, Error> {
    match lookup::on_hca(roots, hca) {
        Ok(occupants) => Ok(occupants.rdma_devices.into_iter().collect()),
        Err(e) => Err(unreadable(&e)),
    }
}

fn of_netdev(roots: &Host, netdev: &str) -> Result<BTreeSet<String>, Error> {
    match lookup::ports_of_netdev(roots, netdev) {
        Ok(ports) => Ok(ports.into_iter().map(|port| port.device).collect()),
        Err(e) if e.is_missing() => Ok(BTreeSet::new()),
        Err(e) => Err(unreadable(&e)),
    }
}
