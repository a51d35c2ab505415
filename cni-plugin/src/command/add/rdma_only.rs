//! ADD of attach `rdma-only`: the RDMA devices of interfaces that another plugin of the chain made.
//! Stands in for the RDMA CNI plugin.
//!
//! In shared mode nothing is changed: the GIDs of the interface are waited for and reported, and the
//! previous result is passed on. The journal has the attachment all the same: CHECK asks for it.

use attachment::journal::{Part, RdmaDevice};
use cni_wire::{CniResult, Code};
use serde_json::Value;

use super::{Add, Nic};
use crate::{
    error::Error,
    rdma::{self, Numbers},
    report::{self, Reported},
    resolve::{PodInterface, RdmaOnly},
};

/// That it cannot be the first of a chain.
pub(super) fn needs_a_chain() -> Error {
    Error::new(
        Code::InvalidConfig,
        "prevResult is missing: attach rdma-only follows a plugin that makes an interface",
    )
    .with_details("put it behind that plugin in the list, or set attach to move")
}

impl Add<'_> {
    /// Journals and moves what is to move, and reports. `before` is the chain's result.
    pub(super) fn follow(&mut self, nics: Vec<Nic>, before: &CniResult) -> Result<Value, Error> {
        let moves_rdma = nics.iter().any(|nic| nic.moves_rdma);
        let target = RdmaOnly::joined(nics.into_iter().map(|nic| nic.resolved))?;
        let moved = match moves_rdma {
            true => rdma::describe(self.node, &target.names(), Numbers::Promised)?,
            false => Vec::new(),
        };
        let record = self.record_of(vec![Part {
            rdma: moved.clone(),
            ..Part::named(self.id.ifname.as_str())
        }]);
        self.node.journal.create(self.key, &record)?;
        rdma::move_in(self.node, self.pod, &moved, Numbers::Promised)
            .and_then(|()| self.report_behind(&target, before, &moved))
            .map_err(|first| self.undo(&record, first))
    }

    fn report_behind(
        &self,
        target: &RdmaOnly,
        before: &CniResult,
        moved: &[RdmaDevice],
    ) -> Result<Value, Error> {
        let id = self.id;
        let interfaces = &target.interfaces;
        let of = |interface: Option<&PodInterface>| {
            let position = interface.map(|interface| interface.position);
            let link = interface.map(|interface| interface.link.link());
            let ips = before.ips.iter();
            let ips = ips.filter(|ip| ip.interface.is_none() || ip.interface == position);
            // Of several interfaces each has the ports behind it, of one it has all.
            let is_behind = |device: &str| match interface {
                Some(interface) if interfaces.len() > 1 => interface.devices.contains(device),
                _ => true,
            };
            let moved = moved.iter().map(|device| device.name.clone());
            Reported {
                ifname: link.map_or_else(|| id.ifname.to_string(), |link| link.name.to_string()),
                ports: target
                    .ports()
                    .into_iter()
                    .filter(|port| is_behind(&port.device))
                    .collect(),
                addresses: ips.map(|ip| ip.address.addr).collect(),
                moved: moved.filter(|device| is_behind(device)).collect(),
                pci: link.and_then(|link| report::function(link, self.config)),
            }
        };
        let reported: Vec<Reported> = match interfaces.as_slice() {
            [] => vec![of(None)],
            some => some.iter().map(|interface| of(Some(interface))).collect(),
        };
        report::write(self.node, self.pod, id, self.config, &reported)?;
        Ok(before.to_json(self.request.config.version))
    }
}
