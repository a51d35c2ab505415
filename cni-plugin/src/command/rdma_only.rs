//! `attach: rdma-only`: the RDMA devices of an interface that another plugin of the chain made.
//! Stands in for the RDMA CNI plugin, whose state files are read so that pods it served can end.
//!
//! In shared mode nothing is changed and nothing journalled: the GIDs of the interface are waited
//! for and reported, and the previous result is passed on.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use cni_wire::{AttachmentId, CniResult, Code, Error, Request};
use hca::{HcaId, Host, PortId, lookup};
use ipam::policy::Candidate;
use serde::Deserialize;
use serde_json::Value;

use super::{add, pod_namespace};
use crate::{
    config::{Attach, Config, Target},
    detach::{detach, living},
    find, guard,
    journal::{Key, RdmaDevice, Record},
    kernel::{
        Namespace,
        link::{self, By, Link},
        sysfs::Sysfs,
    },
    netdev::restore,
    node::Node,
    rdma,
    report::{self, Reported},
};

/// Serves ADD.
///
/// # Errors
/// Code 7 without a previous result or without a device; the policy's refusal; code 50 where the
/// mode of the RDMA subsystem does not allow what is asked for.
pub(super) fn add(
    node: &mut Node,
    request: &Request,
    config: &Config,
    key: &Key,
) -> Result<Value, Error> {
    let id = request.attachment()?;
    let Some(before) = request.config.prev_result()? else {
        return Err(Error::new(
            Code::InvalidConfig,
            "prevResult is missing: attach rdma-only follows a plugin that makes an interface",
        )
        .with_details("put it behind that plugin in the list, or set attach to move"));
    };
    let pod = pod_namespace(node, request)?;
    heal(node, key, &pod)?;
    let interface = interface(node, &pod, &before, request)?;
    let devices = devices(node, config, &pod, interface.as_ref())?;
    let mode = rdma::mode(&node.host)?;
    let name = interface.as_ref().map_or_else(
        || "the chain".to_owned(),
        |interface| interface.link.name.to_string(),
    );
    let moves = rdma::moves(
        config.rdma,
        Attach::RdmaOnly,
        mode,
        !devices.is_empty(),
        &name,
    )?;
    if devices.is_empty() {
        return Err(Error::new(
            Code::InvalidConfig,
            format!("no RDMA device belongs to {name}, and nothing else names one"),
        )
        .with_details(
            "let Multus pass a deviceID (k8s.v1.cni.cncf.io/resourceName), or set rdmaDevice",
        ));
    }
    let ports = ports(node, &devices)?;
    let mut moved = Vec::new();
    if moves {
        for device in &devices {
            allowed(node, device)?;
        }
        moved = rdma::take_down(node, &devices)?;
        give(node, request, key, &pod, &moved)?;
    }
    let ifname = interface.as_ref().map(|interface| interface.position);
    let function = interface
        .as_ref()
        .and_then(|interface| report::function(&interface.link, config));
    let reported = Reported {
        ports: &ports,
        addresses: before
            .ips
            .iter()
            .filter(|ip| ip.interface.is_none() || ip.interface == ifname)
            .map(|ip| ip.address.addr)
            .collect(),
        moved: moved.iter().map(|device| device.name.as_str()).collect(),
        pci: function.as_deref(),
    };
    let told = report::tell(node, &pod, id, config, &reported)
        .and_then(|()| before.to_json(request.config.version));
    told.map_err(|first| match node.store.read(key) {
        Ok(Some(record)) => undo(node, key, &record, first),
        _ => first,
    })
}

/// Undoes what an ADD that died left under the same name. One that lives is an error.
fn heal(node: &mut Node, key: &Key, pod: &Namespace) -> Result<(), Error> {
    let Some(old) = node.store.read(key)? else {
        // A record that was cut off says that nothing was done.
        return Ok(node.store.forget(key)?);
    };
    let living = living(&old)?.is_some_and(|there| there.id() == pod.id());
    let has_interface = old.moved.is_some() || old.child.is_some();
    if living && (has_interface || rdma::check(node, pod, &old.rdma).is_ok()) {
        return Err(Error::new(
            Code::Exists,
            format!("{} is attached to network {} already", old.owner(), old.network),
        )
        .with_details(if has_interface {
            "this plugin made the interface; leave rdma out there and attach rdma-only out of the list"
        } else {
            "the runtime must DEL it first"
        }));
    }
    // An ADD that died: its devices are looked for before new ones move.
    detach(node, key, &old, restore::ON_ITS_WAY)
        .map_err(|e| e.context("undo an earlier attachment"))
}

/// Journals and moves.
fn give(
    node: &mut Node,
    request: &Request,
    key: &Key,
    pod: &Namespace,
    devices: &[RdmaDevice],
) -> Result<(), Error> {
    let record = Record {
        rdma: devices.to_vec(),
        ..add::blank_record(node, request, pod)?
    };
    node.store.create(key, &record)?;
    rdma::move_in(node, pod, devices).map_err(|first| undo(node, key, &record, first))
}

fn undo(node: &mut Node, key: &Key, record: &Record, first: Error) -> Error {
    match detach(node, key, record, restore::ON_ITS_WAY) {
        Ok(()) => first,
        Err(e) => first.with_details(format!("undoing it failed too: {e}")),
    }
}

/// The pod's interface that the chain made.
struct Made {
    link: Link,
    position: usize,
}

/// The interface of the call's name, else the only one of the pod's.
fn interface(
    node: &Node,
    pod: &Namespace,
    before: &CniResult,
    request: &Request,
) -> Result<Option<Made>, Error> {
    let id = request.attachment()?;
    let in_pod = |i: &cni_wire::Interface| i.sandbox.as_deref() == request.env.netns.as_deref();
    let mine = before
        .interfaces
        .iter()
        .position(|i| in_pod(i) && i.name == id.ifname.as_str());
    let position = mine.or_else(|| {
        let mut of_pod = before
            .interfaces
            .iter()
            .enumerate()
            .filter(|(_, i)| in_pod(i));
        match (of_pod.next(), of_pod.next()) {
            (Some((position, _)), None) => Some(position),
            _ => None,
        }
    });
    let Some(position) = position else {
        return Ok(None);
    };
    let name = before
        .interfaces
        .get(position)
        .map_or("", |i| i.name.as_str());
    let mut inside = pod.socket(&node.home)?;
    Ok(link::get(&mut inside, By::Name(name.as_bytes()))?.map(|link| Made { link, position }))
}

/// The RDMA devices that are meant: of the allocation, of the configuration, of the interface.
fn devices(
    node: &mut Node,
    config: &Config,
    pod: &Namespace,
    interface: Option<&Made>,
) -> Result<BTreeSet<String>, Error> {
    if let Some(allocation) = &config.allocation {
        return match allocation.unit.hca() {
            Some(hca) => of_hca(node, hca),
            None => Err(Error::new(
                Code::InvalidConfig,
                format!(
                    "deviceID {} is a share of several HCAs and names none",
                    allocation.text
                ),
            )
            .with_details("name the RDMA device with rdmaDevice")),
        };
    }
    match &config.device {
        Some(Target::RdmaDevice(name)) => return Ok(BTreeSet::from([name.clone()])),
        Some(Target::Hca(hca)) => return of_hca(node, hca),
        Some(target) => {
            let name = find::name_of(&node.host, target, config.port)?;
            return of_name(node, &name);
        }
        None => {}
    }
    let Some(Made { link, .. }) = interface else {
        return Ok(BTreeSet::new());
    };
    if let Some(hca) = link.bus_device.as_deref().and_then(|d| d.parse().ok()) {
        let devices = of_hca(node, &hca)?;
        if !devices.is_empty() {
            return Ok(devices);
        }
    }
    // A child: the netdev below it is the host's, when the plugin made it from there.
    let parent = match (link.parent, link.parent_netns) {
        (Some(parent), Some(_)) => link::get(&mut node.socket, By::Index(parent))?,
        _ => None,
    };
    match parent {
        Some(parent) => of_name(node, &parent.name.to_string()),
        None => software_on(node, pod, link),
    }
}

/// Soft RoCE is not below its NIC; it stayed when that was moved.
fn software_on(node: &Node, pod: &Namespace, link: &Link) -> Result<BTreeSet<String>, Error> {
    let sysfs = Sysfs::of(pod, &node.home)?;
    let there = Host {
        sys: sysfs.path(),
        ..node.host.clone()
    };
    match lookup::software_on_netdev_of(&node.host, &there, &link.name.to_string()) {
        Ok(ports) => Ok(ports.into_iter().map(|port| port.device).collect()),
        Err(e) => Err(Error::new(Code::Io, e.to_string())),
    }
}

fn of_hca(node: &Node, hca: &HcaId) -> Result<BTreeSet<String>, Error> {
    match lookup::on_hca(&node.host, hca) {
        Ok(occupants) => Ok(occupants.rdma_devices.into_iter().collect()),
        Err(e) if e.is_missing() => Err(Error::new(Code::InvalidConfig, e.to_string())),
        Err(e) => Err(Error::new(Code::Io, e.to_string())),
    }
}

fn of_name(node: &Node, netdev: &str) -> Result<BTreeSet<String>, Error> {
    match lookup::ports_of_netdev(&node.host, netdev) {
        Ok(ports) => Ok(ports.into_iter().map(|port| port.device).collect()),
        Err(e) if e.is_missing() => Ok(BTreeSet::new()),
        Err(e) => Err(Error::new(Code::Io, e.to_string())),
    }
}

fn ports(node: &Node, devices: &BTreeSet<String>) -> Result<Vec<PortId>, Error> {
    let mut ports = Vec::new();
    for name in devices {
        let device = hca::rdma::read(&node.host, name)
            .map_err(|e| Error::new(Code::InvalidConfig, e.to_string()))?;
        ports.extend(device.ports.iter().map(|port| PortId {
            device: name.clone(),
            port: port.number,
        }));
    }
    Ok(ports)
}

/// The policy is asked about the netdevs that would lose their RDMA device, and where it has
/// none on the host, about the device itself.
fn allowed(node: &mut Node, name: &str) -> Result<(), Error> {
    let device = hca::rdma::read(&node.host, name)
        .map_err(|e| Error::new(Code::InvalidConfig, e.to_string()))?;
    let known = node.known_addresses();
    let selectors = node.policy.allow.netdevs.is_some();
    let mut on_host = false;
    for netdev in device.netdevs() {
        on_host = true;
        let found = find::look(&node.host, &mut node.socket, netdev, selectors, &known)?;
        guard::check(
            &found,
            Attach::RdmaOnly,
            &node.policy.allow,
            &node.policy_path,
        )?;
    }
    let pci = device.pci.as_ref();
    let address = device
        .auxiliary
        .clone()
        .or_else(|| pci.map(|pci| pci.address.to_string()));
    let ids = pci.map(|pci| (format!("{:04x}", pci.vendor), format!("{:04x}", pci.device)));
    let candidate = Candidate {
        if_name: "",
        pci_address: address.as_deref(),
        vendor: ids.as_ref().map(|(vendor, _)| vendor.as_str()),
        device_id: ids.as_ref().map(|(_, id)| id.as_str()),
        driver: pci.and_then(|pci| pci.driver.as_deref()),
        link_type: None,
        rdma_device: Some(name),
    };
    if !on_host && !node.policy.allow.selects(&candidate) {
        return Err(Error::new(
            Code::Policy,
            format!("moving RDMA device {name} is refused: none of the policy's selectors has it"),
        )
        .with_details(format!(
            "add it to allow.netdevs in {}",
            node.policy_path.display()
        )));
    }
    Ok(())
}

/// What the RDMA CNI plugin wrote about an attachment: version 1.0 of its state.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct State {
    sandbox_rdma_dev_name: String,
    container_rdma_dev_name: String,
}

/// The file in which the RDMA CNI plugin kept an attachment.
fn state_file(root: &Path, network: &str, id: &AttachmentId) -> PathBuf {
    root.join("var/lib/cni/rdma")
        .join(format!("{network}-{}-{}", id.container_id, id.ifname))
}

/// Ends an attachment that the RDMA CNI plugin made before this one took its place. Without such
/// a file there is nothing to do.
///
/// # Errors
/// Code 5: the file cannot be read; the kernel's refusal.
pub(super) fn import(node: &Node, request: &Request, id: &AttachmentId) -> Result<(), Error> {
    let file = state_file(&node.root, &request.config.name, id);
    let text = match fs::read(&file) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => {
            return Err(Error::new(
                Code::Io,
                format!("read {}: {e}", file.display()),
            ));
        }
    };
    match serde_json::from_slice::<State>(&text) {
        Ok(state) => {
            let path = request.env.netns.as_deref().unwrap_or_default();
            let pod = Namespace::open(Path::new(path))?.filter(|pod| pod.id() != node.home.id());
            rdma::bring_home_by_name(
                node,
                &state.container_rdma_dev_name,
                &state.sandbox_rdma_dev_name,
                pod.as_ref(),
            )?;
        }
        Err(e) => node.log.warn(format_args!(
            "{} is not what the RDMA CNI plugin writes ({e}); removed",
            file.display()
        )),
    }
    fs::remove_file(&file)
        .map_err(|e| Error::new(Code::Io, format!("remove {}: {e}", file.display())))
}

/// Whether a network's DEL has no interface to look for.
pub(super) fn is_meant(request: &Request) -> bool {
    Attach::of(request).is_ok_and(|attach| attach == Some(Attach::RdmaOnly))
}

#[cfg(test)]
mod tests {
    use cni_wire::{ContainerId, IfName};

    use super::*;

    #[test]
    fn the_state_of_the_rdma_plugin_is_found_and_read() {
        let id = AttachmentId {
            container_id: ContainerId::parse("c1").unwrap(),
            ifname: IfName::parse("net1").unwrap(),
        };
        assert_eq!(
            state_file(Path::new("/"), "sriov-net", &id),
            Path::new("/var/lib/cni/rdma/sriov-net-c1-net1")
        );
        let text = r#"{"version": "1.0", "deviceID": "0000:3b:00.2",
            "sandboxRdmaDevName": "mlx5_2", "containerRdmaDevName": "mlx5_2"}"#;
        let state: State = serde_json::from_str(text).unwrap();
        assert_eq!(state.sandbox_rdma_dev_name, "mlx5_2");
        assert_eq!(state.container_rdma_dev_name, "mlx5_2");
    }
}
