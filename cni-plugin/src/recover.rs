//! Returning NICs of dead pods that a request means, before anything is resolved.
//!
//! A pod whose namespace died without a DEL leaves its NIC on the host under whatever name the
//! kernel gave it, without its state, or the kernel is still returning it. The journal knows it: it
//! is restored for the earlier attachment, whose DEL, should it still come, finds nothing to do.
//! Nothing is returned out of the namespace of a pod that is there.

use std::time::Duration;

use attachment::{
    addresses::Ipam,
    detach::{self, living},
    journal::{Key, Lock, Ownership, Part, Record},
    netdev::{
        obstacle::{self, Addresses},
        restore::{self, return_netdev},
        snapshot::{Identity, Snapshot},
        vf::Vf,
    },
    node::Node,
    rdma,
};
use cni_wire::Code;
use hca::HcaId;
use netlink::{
    Name,
    link::{self, By, Link},
};

use node::policy::FabricAddresses;

use crate::{config::Target, error::Error, resolve};

/// A NIC that is this request's until the lock is dropped.
#[derive(Debug, Default)]
pub(crate) struct Recovered {
    /// No other process moves it meanwhile; none where the request means no NIC that is there.
    pub _lock: Option<Lock>,
    /// The name it is to have on the host, where it has another one at present.
    pub true_name: Option<Name>,
}

/// Returns the NIC that a request to move means, if a dead pod left it, and locks it.
///
/// # Errors
/// Code 11 when a pod that is there has it, it has not arrived yet, or another attachment holds its
/// lock too long.
pub(crate) fn recover(
    node: &mut Node,
    target: &Target,
    port: Option<u32>,
) -> Result<Recovered, Error> {
    if find(node, target, port)?.is_none() {
        return_orphan(node, target)?;
    }
    let Some(nic) = find(node, target, port)? else {
        // Whatever is wrong with the request is for the next step to say.
        return Ok(Recovered::default());
    };
    settle(node, &Identity::on(&node.roots, &nic))
}

/// The NIC on the host.
fn find(node: &mut Node, target: &Target, port: Option<u32>) -> Result<Option<Link>, Error> {
    match resolve::name_of(&node.roots, target, port) {
        Ok(name) => Ok(link::get(
            &mut node.netns.socket,
            By::Name(name.as_bytes()),
        )?),
        Err(_) => Ok(None),
    }
}

/// Brings back the NIC that a pod had whose namespace is gone.
fn return_orphan(node: &mut Node, target: &Target) -> Result<(), Error> {
    for (_, record) in node.records()? {
        if !node.is_of_this_boot(&record.boot) {
            continue;
        }
        let Some(part) = record.parts.iter().find(|part| target.means(part)) else {
            continue;
        };
        let Some(moved) = &part.moved else {
            continue;
        };
        if !part.returned && living(&record)?.is_some() {
            return Err(in_use(&moved.name, &record));
        }
        let _lock = node.journal.lock(&moved.identity)?;
        let returned = return_netdev(
            &mut node.host_context(),
            moved,
            None,
            restore::RETURN_TIMEOUT,
        )?;
        detach::report(node, moved, &returned);
        rdma::return_devices(node, &part.rdma, None, restore::RETURN_TIMEOUT)?;
        return Ok(());
    }
    Ok(())
}

fn in_use(netdev: &Name, record: &Record) -> Error {
    Error::new(
        Code::TryAgain,
        format!("{netdev} is in use by {}", record.owner()),
    )
    .with_details("it returns to the host when that pod is deleted")
}

impl Target {
    /// Whether the netdev that was moved for a part of an attachment is the one that is meant. Pure.
    pub fn means(&self, part: &Part) -> bool {
        let Some(moved) = &part.moved else {
            return false;
        };
        let rdma = &part.rdma;
        let stands_on = |device: &str| moved.identity.bus_device.as_deref() == Some(device);
        match self {
            Target::Name(name) => {
                moved.name == *name || moved.has_altname(&Name::from(name.as_str()))
            }
            Target::Mac(mac) => {
                let mac = mac.to_string();
                moved.mac() == mac || moved.identity.permanent_mac.as_ref() == Some(&mac)
            }
            Target::Hca(HcaId::NodeGuid(guid)) => {
                let guid = guid.to_string();
                let by_guid = rdma.iter().any(|d| d.node_guid.as_ref() == Some(&guid));
                by_guid
                    || part
                        .hcas
                        .contains(&format!("guid-{}", guid.replace(':', "")))
            }
            Target::Hca(hca) => {
                let hca = hca.to_string();
                part.hcas.contains(&hca) || stands_on(&hca)
            }
            Target::KernelPath(path) => path.split('/').next_back().is_some_and(stands_on),
            Target::RdmaDevice(name) => rdma.iter().any(|device| device.name == *name),
        }
    }
}

/// Locks a NIC of the host and ends the claim of an earlier attachment that did not return it.
///
/// # Errors
/// Code 11 when another attachment holds the lock too long; the claim cannot be read or ended.
fn settle(node: &mut Node, identity: &Identity) -> Result<Recovered, Error> {
    let lock = node.journal.lock(identity)?;
    let mut true_name = None;
    if let Some(claim) = node.journal.claim(identity)? {
        if let Some((key, record)) = claimant(node, &claim)?
            && let Some((position, part, moved)) = part_with(&record, identity)
        {
            let returned = return_netdev(&mut node.host_context(), moved, None, Duration::ZERO)?;
            detach::report(node, moved, &returned);
            if let Some(unusable) = detach::unusable(&record, moved, &returned) {
                return Err(unusable);
            }
            true_name = returned.is_misnamed.then(|| moved.name.clone());
            rdma::return_devices(node, &part.rdma, None, Duration::ZERO)?;
            end(node, &key, &record, position)?;
        }
        node.journal.release(identity)?;
    }
    Ok(Recovered {
        _lock: Some(lock),
        true_name,
    })
}

/// Refuses a netdev as the master of a child that an attachment moved into its pod: the pod can send it
/// back to the host under any name, MAC address and alias. Ask with the netdev's lock held.
///
/// # Errors
/// Code 11 with the attachment; the claim cannot be read.
pub(crate) fn check_unclaimed(node: &Node, host: &resolve::HostLink) -> Result<(), Error> {
    let identity = Identity::on(&node.roots, &host.link);
    let Some(claim) = node.journal.claim(&identity)? else {
        return Ok(());
    };
    let claimant = claimant(node, &claim)?;
    let held = claimant
        .as_ref()
        .and_then(|(_, record)| Some((record, part_with(record, &identity)?)));
    let Some((record, (_, part, moved))) = held else {
        return Ok(());
    };
    let what = match part.carries_child {
        true => detach::left_child(&moved.name, record),
        false => format!(
            "netdev {} is {}, which belongs to {}",
            host.link.name,
            moved.name,
            record.owner()
        ),
    };
    Err(Error::new(Code::TryAgain, what)
        .with_details("it can be used when the attachment is undone, by DEL or the daemon"))
}

/// The attachment of this boot that a claim names, if it is in the journal.
fn claimant(node: &Node, claim: &Ownership) -> Result<Option<(Key, Record)>, Error> {
    if !node.is_of_this_boot(&claim.boot) {
        return Ok(None);
    }
    let Some((key, _, _)) = Key::parse(&claim.owner) else {
        return Ok(None);
    };
    let record = node.journal.read(&key)?;
    Ok(record.map(|record| (key, record)))
}

/// The part of an attachment that has a netdev, by what its claim is known by.
fn part_with<'a>(
    record: &'a Record,
    identity: &Identity,
) -> Option<(usize, &'a Part, &'a Snapshot)> {
    let parts = record.parts.iter().enumerate();
    let mut moved = parts.filter_map(|(n, part)| Some((n, part, part.moved.as_ref()?)));
    moved.find(|(_, _, moved)| moved.identity.key() == identity.key())
}

/// What is left of an attachment without one of its NICs: its other NICs and its leases, until its
/// own DEL.
fn end(node: &Node, key: &Key, record: &Record, position: usize) -> Result<(), Error> {
    let mut rest = record.clone();
    if let Some(part) = rest.parts.get_mut(position) {
        part.moved = None;
        part.rdma = Vec::new();
    }
    if rest.ipam.is_none() && !rest.parts.iter().any(Part::has_interface) {
        return node.journal.forget(key);
    }
    node.journal.replace(key, &rest)
}

/// The state of a netdev that is to move.
///
/// # Errors
/// Code 101 naming what keeps it from being moved; the kernel's refusal.
pub(crate) fn snapshot(
    node: &mut Node,
    ipam: &Ipam,
    nic: &resolve::HostLink,
    recovered: &Recovered,
) -> Result<Snapshot, Error> {
    let mut taken = Snapshot::take(&mut node.netns.socket, &node.roots.proc, &nic.link)?;
    taken.identity = Identity::on(&node.roots, &nic.link);
    if let Some(address) = &taken.identity.bus_device {
        taken.vf = Vf::take(&node.roots, &mut node.netns.socket, address)?;
    }
    let addresses = match ipam {
        Ipam::None => Addresses::OfHost,
        _ => Addresses::OfIpam,
    };
    let fabric = node.policy.values.fabric_addresses;
    taken.static_addresses =
        addresses == Addresses::OfHost && fabric == FabricAddresses::Static && !nic.rdma.is_empty();
    let socket = &mut node.netns.socket;
    let proc = &node.roots.proc;
    let found = obstacle::obstacles(socket, proc, &nic.link, &taken, addresses)?;
    if let Some(found) = Error::all(found) {
        let name = &nic.link.name;
        return Err(found.context(format_args!("moving netdev {name} is refused")));
    }
    let stay = taken.leased_addresses();
    if addresses == Addresses::OfHost && !taken.static_addresses && !stay.is_empty() {
        node.log.warn(format_args!(
            "{} leaves addresses with a lifetime on the host: {}; to take them along, set \
             \"fabricAddresses\": \"static\" in {}",
            taken.name,
            stay.join(", "),
            node.policy.path.display()
        ));
    }
    if let Some(name) = &recovered.true_name {
        taken.name.clone_from(name);
    }
    Ok(taken)
}
