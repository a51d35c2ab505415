//! Making what a record says: every change that an ADD makes outside the journal and the lease store.
//! What fails here is undone by [`crate::detach`], not step by step.

use std::time::Instant;

use cni_wire::Code;
use netlink::{
    Name, Namespace, Socket,
    link::{self, Link},
};

use crate::{
    error::Error,
    interface::IPOIB_CARRIER_TIMEOUT,
    journal::{Key, Lock, Record},
    node::Node,
    part::Part,
    rdma::{self, DeviceNodes},
};

/// Makes all interfaces of an attachment, in the pod `inside` is a socket of. Returns each interface as
/// it is then; none for `rdma-only`. `parents` keeps netdevs of children from being moved.
///
/// # Errors
/// The first failure.
pub fn attach(
    node: &mut Node,
    key: &Key,
    record: &Record,
    pod: &Namespace,
    inside: &mut Socket,
    parents: Lock,
) -> Result<Vec<Option<Link>>, Error> {
    for moved in record.parts.iter().filter_map(Part::moved) {
        node.journal.take(&moved.host.identity, key)?;
    }
    let nodes = DeviceNodes::of(record);
    let mut nics = Vec::new();
    for moved in record.parts.iter().filter_map(Part::moved) {
        nics.push(moved.apply_vf(node, nodes)?);
    }
    let mut nics = nics.into_iter();
    let devices: Vec<_> = record.rdma().cloned().collect();
    rdma::move_in(node, pod, &devices, nodes)?;
    let mut links = Vec::new();
    for part in &record.parts {
        links.push(match part {
            Part::Move(moved) => match nics.next() {
                Some(nic) => Some(moved.apply(&mut node.netns, pod, inside, &nic)?),
                None => None,
            },
            Part::Child(child) => {
                let made = child.apply(&mut node.netns, pod, inside);
                Some(made.map_err(|refused| child.name_rival(node, refused))?)
            }
            Part::RdmaOnly(_) => None,
        });
    }
    drop(parents);
    add_altname(inside, &record.ifname, &links)?;
    configure(node, record, pod, inside, &mut links)?;
    check_carriers(node, record, &links)?;
    Ok(links)
}

/// Runtimes search for an interface of the call's name.
fn add_altname(inside: &mut Socket, ifname: &str, links: &[Option<Link>]) -> Result<(), Error> {
    let name = Name::from(ifname);
    let mut links = links.iter().flatten();
    match links.clone().next() {
        Some(first) if links.all(|link| link.name != name) => {
            Ok(link::add_altname(inside, first, &name)?)
        }
        _ => Ok(()),
    }
}

/// Gives the interfaces their settings, addresses, routes and rules, and announces them.
fn configure(
    node: &Node,
    record: &Record,
    pod: &Namespace,
    inside: &mut Socket,
    links: &mut [Option<Link>],
) -> Result<(), Error> {
    let proc = &node.roots.proc;
    pod.enter(&node.netns.namespace, || {
        for (part, link) in record.parts.iter().zip(&mut *links) {
            if let (Some(link), Some(interface)) = (link, part.interface()) {
                *link = interface.config.apply(inside, proc, link)?;
            }
        }
        let deadline = Instant::now() + IPOIB_CARRIER_TIMEOUT;
        for (part, link) in record.parts.iter().zip(links) {
            if let (Some(link), Some(interface)) = (link, part.interface())
                && !interface.config.announce(inside, link, deadline)?
                && !link.is_infiniband()
            {
                let name = &link.name;
                node.log.warn(format_args!(
                    "{name} has no carrier: neighbours learn its addresses when the pod first sends"
                ));
            }
        }
        Ok(())
    })?
}

/// Refuses IPoIB children without a carrier, unless the policy allows them.
fn check_carriers(node: &Node, record: &Record, links: &[Option<Link>]) -> Result<(), Error> {
    for (part, link) in record.parts.iter().zip(links) {
        let (Some(link), Some(interface)) = (link, part.interface()) else {
            continue;
        };
        let child = part.child();
        let warning = child.and_then(|child| child.warning.as_deref());
        if !link.is_infiniband() || link.carrier || interface.config.addresses.is_empty() {
            if let Some(warning) = warning {
                let owner = record.owner();
                node.log.warn(format_args!("{owner}: {warning}"));
            }
            continue;
        }
        let warning = warning.map_or_else(
            || {
                let why = "the port is not active, or the subnet manager has not made the broadcast \
                           group of its partition; ibstat shows the port";
                format!("{} has no carrier: {why}", link.name)
            },
            str::to_owned,
        );
        if child.is_some_and(|child| !child.may_lack_carrier) {
            return Err(Error::new(Code::TryAgain, warning).with_details(format!(
                "to start pods before the partition is active, set allow.inactivePartitions in {}",
                node.policy.path.display()
            )));
        }
        node.log.warn(format_args!("{}: {warning}", record.owner()));
    }
    Ok(())
}
