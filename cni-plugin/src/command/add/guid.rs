//! The GUID of an InfiniBand VF.
//!
//! The VF's driver reads it when it starts, and makes another netdev and another RDMA device then. So
//! it is set before anything else is planned: a record says how the netdev was, and what the request
//! means is resolved again afterwards.

use std::{
    collections::BTreeSet,
    thread,
    time::{Duration, Instant},
};

use attachment::{
    journal::Part,
    netdev::{identity::Place, restore::DRIVER_TIMEOUT, snapshot::Snapshot},
    node::Node,
    rdma::{parents, verbs},
};
use cni_wire::Code;
use hca::Guid;
use netlink::link::{self, Change};

use super::Add;
use crate::{
    error::Error,
    rdma::{self, Numbers},
    resolve::HostLink,
};

impl Add<'_> {
    /// Sets node and port GUID of a VF, and waits for its netdev, which keeps its name. `taken` is its
    /// state. Returns that with what restores the GUIDs.
    ///
    /// # Errors
    /// Code 7 for what is not a VF of a PF that is on the host; code 11 where the VF would not keep its
    /// character device, or its netdev does not come; the refusal of kernel or driver.
    pub(super) fn set_guid(
        &mut self,
        nic: &HostLink,
        mut taken: Snapshot,
        guid: Guid,
    ) -> Result<Snapshot, Error> {
        let numbers = Numbers::of(self.bound.is_some());
        let refused = |why: &str, remedy: &str| {
            let msg = format!("guid: {} {why}", nic.link.name);
            Error::new(Code::InvalidConfig, msg).with_details(remedy)
        };
        let (Some(vf), Some(address)) = (&mut taken.vf, taken.identity.bus_device.clone()) else {
            return Err(refused(
                "is not a virtual function whose physical function has a netdev on the host",
                "set the GUID where the physical function is (ip link set PF vf N node_guid GUID), and \
             leave guid out",
            ));
        };
        if !vf.has_guids() {
            return Err(refused(
                "had GUIDs that the driver of its physical function does not report, so that they \
             could not be restored",
                "use a driver that does (mlx5 of Linux 5.5 or newer), or leave guid out",
            ));
        }
        let function = address.parse().ok();
        let function = function.and_then(|address| hca::pci::read(&self.node.roots, address).ok());
        vf.driver = function.and_then(|function| function.driver);
        let names = rdma::of_netdev(&self.node.roots, &nic.link, &nic.rdma)?;
        rdma::describe(self.node, &names, numbers)?;
        let part = Part {
            moved: Some(taken.clone()),
            ..Part::named(self.id.ifname.as_str())
        };
        let record = self.record_of(vec![part]);
        self.node.journal.create(self.key, &record)?;
        self.node
            .journal
            .take(&taken.identity, self.key, &self.node.boot)?;
        let _lock = self.node.journal.lock_rdma()?;
        let before = verbs_nodes(self.node, &address)?;
        if let Some(vf) = &taken.vf {
            vf.set_guid(
                &self.node.roots.sys,
                &mut self.node.netns.socket,
                &address,
                guid,
            )?;
        }
        let started = Instant::now();
        loop {
            let links = link::list(&mut self.node.netns.socket)?;
            let after = verbs_nodes(self.node, &address)?;
            let has_nodes = match numbers {
                Numbers::Promised => after == before,
                Numbers::ReadAfterwards => after.len() == before.len(),
            };
            if let (Ok(Some(renewed)), true) = (taken.identity.find(&links, Place::Host), has_nodes)
            {
                if renewed.name != taken.name {
                    let what = format!("rename {} to {}", renewed.name, taken.name);
                    let change = Change {
                        name: Some(taken.name.as_bytes()),
                        ..Change::default()
                    };
                    link::change(&mut self.node.netns.socket, what, renewed.index, &change)?;
                }
                return Ok(taken);
            }
            if started.elapsed() > DRIVER_TIMEOUT {
                let shown: Vec<String> = after.into_iter().collect();
                return Err(Error::new(
                Code::TryAgain,
                format!(
                    "VF {address} has no netdev, or another character device ({}), after its driver \
                     was bound again for guid",
                    shown.join(", ")
                ),
            )
            .with_details("dmesg says what the driver did"));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The verbs nodes of the RDMA devices on a PCI function.
fn verbs_nodes(node: &Node, address: &str) -> Result<BTreeSet<String>, Error> {
    let parents = parents(&node.roots)?;
    let nodes = verbs(&node.roots)?.into_iter();
    let of_function = nodes.filter(|(owner, _)| parents.get(owner).is_some_and(|on| on == address));
    Ok(of_function.map(|(_, node)| node.name).collect())
}
