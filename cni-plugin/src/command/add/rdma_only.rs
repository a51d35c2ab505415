//! ADD of attach `rdma-only`: the RDMA devices of an interface that another plugin of the chain made.
//! Stands in for the RDMA CNI plugin.
//!
//! In shared mode nothing is changed and nothing journalled: the GIDs of the interface are waited
//! for and reported, and the previous result is passed on.

use attachment::{
    journal::{Key, RdmaDevice, Record},
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
    resolve::RdmaOnly,
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
        if moved.is_empty() {
            return self.report(before, &moved);
        }
        let record = Record {
            rdma: moved,
            ..blank_record(self.node, self.request, self.pod)?
        };
        self.node.journal.create(self.key, &record)?;
        rdma::move_in(self.node, self.pod, &record.rdma, Numbers::Promised)
            .and_then(|()| self.report(before, &record.rdma))
            .map_err(|first| undo(self.node, self.key, &record, first))
    }

    fn report(&self, before: &CniResult, moved: &[RdmaDevice]) -> Result<Value, Error> {
        let interface = self.target.interface.as_ref();
        let position = interface.map(|interface| interface.position);
        let function = interface.and_then(|made| report::function(made.link.link(), self.config));
        let of_interface = before
            .ips
            .iter()
            .filter(|ip| ip.interface.is_none() || ip.interface == position);
        let ports = self.target.ports();
        let reported = Reported {
            ports: &ports,
            addresses: of_interface.map(|ip| ip.address.addr).collect(),
            moved: moved.iter().map(|device| device.name.as_str()).collect(),
            pci: function.as_deref(),
        };
        let id = self.request.attachment()?;
        report::write(self.node, self.pod, id, self.config, &reported)?;
        Ok(before.to_json(self.request.config.version)?)
    }
}
