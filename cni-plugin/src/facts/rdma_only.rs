//! `attach: rdma-only`: which RDMA devices a request means.

use std::collections::BTreeSet;

use attachment::node::Node;
use cni_wire::Code;
use hca::{HcaId, Host, NetnsMode, PortId, RdmaDevice, lookup};

use super::{
    HostLink, NodeNetwork, read_named,
    target::{names_no_hca, unselected},
    unreadable,
};
use crate::{
    config::{Config, RdmaRequirement, Target, UnitHcas},
    error::Error,
    rdma::{self, MovableRdma},
};
use attachment::rdma::DeviceNodes;

/// RDMA devices for an interface that another plugin of the chain made.
#[derive(Clone, Debug)]
pub struct RdmaOnly {
    /// The devices, in order of name; never empty.
    pub devices: Vec<RdmaTarget>,
    /// The devices as they move; none where they stay on the host and are only reported.
    pub moving: Option<Result<MovableRdma, Error>>,
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

impl RdmaTarget {
    pub fn ports(&self) -> impl Iterator<Item = PortId> {
        self.device.ports.iter().map(|port| PortId {
            device: self.device.name.clone(),
            port: port.number,
        })
    }
}

/// That it cannot be the first of a chain.
pub(crate) fn needs_a_chain() -> Error {
    Error::advise(
        Code::InvalidConfig,
        "prevResult is missing: attach rdma-only follows a plugin that makes an interface",
        "put it behind that plugin in the list, or set attach to move",
    )
}

/// Reads the RDMA devices of the unit, else the one that the network names.
///
/// # Errors
/// Code 7: no RDMA device is meant, or it does not exist.
pub(super) fn read(
    node: &mut Node,
    config: &Config,
    unit: Option<&UnitHcas>,
    nodes: DeviceNodes,
    network: &mut NodeNetwork,
) -> Result<RdmaOnly, Error> {
    let names = match (unit, &config.device) {
        (Some(unit), _) => of_unit(&node.roots, unit)?,
        (None, Some(Target::RdmaDevice(name))) => BTreeSet::from([name.clone()]),
        (None, _) => return Err(unselected(config)),
    };
    let mut devices = Vec::new();
    for name in &names {
        let device =
            hca::rdma::read(&node.roots, name).map_err(|e| Error::new(Code::InvalidConfig, e))?;
        let mut netdevs = Vec::new();
        for netdev in device.netdevs() {
            netdevs.push(read_named(node, netdev, network)?);
        }
        devices.push(RdmaTarget {
            hca: HcaId::of(&device),
            device,
            netdevs,
        });
    }
    let moves = config.rdma != RdmaRequirement::Off
        && hca::netns_mode(&node.roots)? == Some(NetnsMode::Exclusive);
    let moving = moves.then(|| rdma::read(node, &names, None, nodes, None));
    Ok(RdmaOnly { devices, moving })
}

fn of_unit(roots: &Host, unit: &UnitHcas) -> Result<BTreeSet<String>, Error> {
    let mut devices = BTreeSet::new();
    for hca in &unit.hcas {
        let found = lookup::on_hca(roots, hca).map_err(|e| unreadable(&e))?;
        if found.rdma_devices.is_empty() {
            return Err(Error::advise(
                Code::TryAgain,
                format_args!("HCA {hca} of the pod has no RDMA device on the host"),
                "the pod that had it may still end; if it stays so, load the RDMA driver (rdma link show)",
            ));
        }
        devices.extend(found.rdma_devices);
    }
    match devices.is_empty() {
        false => Ok(devices),
        true => Err(names_no_hca(unit, "name the RDMA device with rdmaDevice")),
    }
}
