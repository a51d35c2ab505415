//! ADD of attach `rdma-only`: the RDMA devices of interfaces that another plugin of the chain made.
//! Stands in for the RDMA CNI plugin.
//!
//! In shared mode nothing is changed: the GIDs of the interface are waited for and reported, and the
//! previous result is passed on. The journal has the attachment all the same: CHECK asks for it.

use attachment::{
    journal::{Key, Part, RdmaDevice, Record},
    node::Node,
};
use cni_wire::{CniResult, Code, Request};
use netlink::Namespace;
use serde_json::Value;

use super::{blank_record, undo};
use crate::{
    config::Config,
    error::Error,
    rdma::{self, Numbers},
    report::{self, Reported},
    resolve::{PodInterface, RdmaOnly},
};

/// What an ADD works with once everything is resolved and allowed.
pub(super) struct Attachment<'a> {
    pub(super) node: &'a mut Node,
    pub(super) request: &'a Request,
    pub(super) config: &'a Config,
    pub(super) key: &'a Key,
    pub(super) pod: &'a Namespace,
    pub(super) target: &'a RdmaOnly,
}

/// Refuses to be the first of a chain.
///
/// # Errors
/// Code 7.
pub(super) fn needs_a_chain(request: &Request) -> Result<(), Error> {
    match request.config.prev_result()? {
        Some(_) => Ok(()),
        None => Err(Error::new(
            Code::InvalidConfig,
            "prevResult is missing: attach rdma-only follows a plugin that makes an interface",
        )
        .with_details("put it behind that plugin in the list, or set attach to move")),
    }
}

impl Attachment<'_> {
    /// Journals and moves what is to move, and reports. `before` is the chain's result.
    pub(super) fn add(self, before: &CniResult, moves_rdma: bool) -> Result<Value, Error> {
        let moved = match moves_rdma {
            true => rdma::describe(self.node, &self.target.names(), Numbers::Promised)?,
            false => Vec::new(),
        };
        let part = Part {
            rdma: moved.clone(),
            ..Part::named(self.request.attachment()?.ifname.as_str())
        };
        let record = Record {
            parts: vec![part],
            ..blank_record(self.node, self.request, self.pod)?
        };
        self.node.journal.create(self.key, &record)?;
        rdma::move_in(self.node, self.pod, &moved, Numbers::Promised)
            .and_then(|()| self.report(before, &moved))
            .map_err(|first| undo(self.node, self.key, &record, first))
    }

    fn report(&self, before: &CniResult, moved: &[RdmaDevice]) -> Result<Value, Error> {
        let id = self.request.attachment()?;
        let interfaces = &self.target.interfaces;
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
                ports: self
                    .target
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
