//! NICs and GPUs on PCI, as objects of checks.

use hca::RdmaDevice;
use hca::topology::{Gpu, Nic};

use super::context::Context;
use super::engine::{Object, some};
use crate::verdict::{Finding, NO_NIC};

impl Object for Nic {
    fn name(&self) -> Option<String> {
        Some(format!("{} {}", self.title(), self.place.address))
    }
}

impl Object for Gpu {
    fn name(&self) -> Option<String> {
        Some(format!("GPU{} {}", self.ordinal, self.place.address))
    }
}

/// NICs with RDMA devices that are hardware: speed and ordering do not matter to soft ones.
pub(super) fn hardware(context: &Context) -> Result<Vec<&Nic>, Finding> {
    let is_hardware = |nic: &&Nic| {
        let mut devices = nic.hca.rdma_devices.iter();
        !devices.any(RdmaDevice::is_soft)
    };
    some(context.machine()?.nics.iter().filter(is_hardware), NO_NIC)
}

/// GPUs of a node that has NICs, too.
pub(super) fn gpus_and_nics(context: &Context) -> Result<(&[Gpu], Vec<&Nic>), Finding> {
    match context.machine()?.gpus.as_slice() {
        [] => Err(Finding::not_applicable("no GPU on this node")),
        gpus => Ok((gpus, hardware(context)?)),
    }
}
