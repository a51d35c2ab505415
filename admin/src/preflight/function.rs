//! NICs and GPUs on PCI, as P and D check them.

use hca::topology::{Gpu, Lanes, Machine, PciLocation, PcieLink};
use hca::{PciAddress, RdmaDevice};
use rdma_device_plugin::host_snapshot::HostSnapshot;

use super::context::Context;
use super::engine::Object;
use crate::verdict::NO_NIC;

/// A NIC or GPU.
#[derive(Debug, Clone)]
pub(super) struct Function {
    /// RDMA device or GPU number, with the address.
    pub name: String,
    pub address: PciAddress,
    /// What it hangs on, from the root port.
    pub chain: Vec<PciAddress>,
    pub link: PcieLink,
    /// Rate of its active ports together in Mb/s, of a NIC.
    pub rate_mbps: Option<u64>,
    /// A soft device stands on it: speed and ordering do not matter to RDMA.
    pub soft: bool,
    /// A GPU with a coherent link to its CPU.
    pub c2c: bool,
    pub nvidia: bool,
    /// The function that does a NIC's DMA to GPUs, where that is not the NIC itself.
    pub data_direct: Option<DataDirect>,
}

/// The Data Direct function of a NIC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DataDirect {
    pub address: PciAddress,
    /// GPUs on its switch.
    pub gpus: Vec<(String, PciAddress)>,
}

const NVIDIA: u16 = 0x10de;

impl Object for Function {
    fn name(&self) -> Option<String> {
        Some(self.name.clone())
    }
}

fn function(name: &str, place: &PciLocation, link: PcieLink) -> Function {
    Function {
        name: format!("{name} {}", place.address),
        address: place.address,
        chain: place.chain.clone(),
        link,
        rate_mbps: None,
        soft: false,
        c2c: false,
        nvidia: false,
        data_direct: None,
    }
}

/// The NICs with an RDMA device.
pub(super) fn nics(snapshot: &HostSnapshot) -> Vec<Function> {
    let inventory = &snapshot.inventory;
    let is_soft = |name: &String| inventory.rdma_device(name).is_some_and(RdmaDevice::is_soft);
    let nics = snapshot.machine.nics.iter();
    let nics = nics.filter(|nic| !nic.rdma_devices.is_empty());
    nics.map(|nic| Function {
        rate_mbps: nic.rate_mbps,
        soft: nic.rdma_devices.iter().any(is_soft),
        data_direct: data_direct(&snapshot.machine, &nic.place),
        ..function(&nic.title(), &nic.place, nic.link)
    })
    .collect()
}

/// The GPUs.
pub(super) fn gpus(snapshot: &HostSnapshot) -> Vec<Function> {
    let gpus = snapshot.machine.gpus.iter();
    gpus.map(|gpu| Function {
        c2c: gpu.c2c,
        nvidia: gpu.vendor == NVIDIA,
        ..function(&gpu_name(gpu), &gpu.place, gpu.link)
    })
    .collect()
}

fn gpu_name(gpu: &Gpu) -> String {
    format!("GPU{}", gpu.ordinal)
}

pub(super) fn data_direct(machine: &Machine, nic: &PciLocation) -> Option<DataDirect> {
    let function = nic.data_direct.as_deref()?;
    let is_beside = |gpu: &&Gpu| {
        let distance = machine.distance(&gpu.place, function);
        distance.class.is_peer_to_peer()
    };
    let gpus = machine.gpus.iter().filter(is_beside);
    Some(DataDirect {
        address: function.address,
        gpus: gpus.map(|gpu| (gpu_name(gpu), gpu.place.address)).collect(),
    })
}

impl Function {
    /// The most that the link can do: its own limit and that of the port above.
    pub(super) fn possible(&self, context: &Context) -> Option<Lanes> {
        let above = self.chain.iter().rev().nth(1);
        let above = above.and_then(|port| PcieLink::read(&context.pci(*port)).ok()?.most);
        let limits = self.link.most.into_iter().chain(above);
        limits.min_by_key(|lanes| lanes.mbps())
    }
}

/// NICs that are hardware.
pub(super) fn hardware(context: &Context) -> Result<Vec<&Function>, &'static str> {
    let nics: Vec<&Function> = context.nics.iter().filter(|nic| !nic.soft).collect();
    match nics.is_empty() {
        true => Err(NO_NIC),
        false => Ok(nics),
    }
}

/// NICs and GPUs of a node that has GPUs.
pub(super) fn hardware_and_gpus(context: &Context) -> Result<Vec<&Function>, &'static str> {
    let hardware = hardware(context)?;
    match context.gpus.is_empty() {
        true => Err(NO_GPU),
        false => Ok(hardware.into_iter().chain(&context.gpus).collect()),
    }
}

pub(super) const NO_GPU: &str = "no GPU on this node";
