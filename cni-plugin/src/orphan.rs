//! The NICs that a network moves: locked, and returned where an orphaned attachment left them, before
//! anything else is read of them.
//!
//! A pod whose namespace died without a DEL leaves its NIC on the host under whatever name the
//! kernel gave it, without its state, or the kernel is still returning it. A claim names the attachment
//! that has a NIC, whose record says how it was: the NIC alone is restored, and the claim ends. The
//! record stays for DEL or the daemon, which find no claim, and release the rest. Nothing is returned out
//! of the namespace of a pod that is there.

use std::time::{Duration, Instant};

use attachment::{
    detach::living,
    journal::{Key, Lock, Record, Sharing},
    netdev::snapshot::Identity,
    node::Node,
    part::{Defect, Move, Part},
};
use cni_wire::{Code, Request};
use hca::HcaId;
use netlink::{
    Name,
    link::{self, By},
};

use crate::{
    config::{Attach, Config, Target},
    decide,
    error::Error,
    facts::{self, HostLink, Units},
};

/// How long an ADD waits for the DEL of the pod that had the NIC before: the kubelet frees a unit before
/// it calls DEL.
const DEL_TIMEOUT: Duration = Duration::from_secs(3);

/// The NICs that a network moves. No other process moves them until this is dropped.
#[derive(Debug, Default)]
pub(crate) struct OwnNics {
    _lock: Option<Lock>,
    /// By NIC, the name that it is to have on the host, where it has another one at present.
    pub true_names: Vec<Option<Name>>,
    /// Records that have nothing else to undo: they go once this attachment has the NIC.
    pub ended: Vec<Key>,
}

impl OwnNics {
    /// # Errors
    /// Code 101 or 11 when a pod that is there has one, by whether the kubelet allocated it to this pod;
    /// code 11 when one has not arrived yet, or another attachment holds its lock too long.
    pub(crate) fn take(
        node: &mut Node,
        request: &Request,
        config: &Config,
        units: &Units,
    ) -> Result<OwnNics, Error> {
        if config.attach != Attach::Move {
            return Ok(OwnNics::default());
        }
        let started = Instant::now();
        if !node.policy.values.allow.unallocated {
            // Each move needs the answer, and no lock is held yet.
            let _ = units.allocated(node, request);
        }
        loop {
            let (key, record, moved) = match OwnNics::reclaim(node, request, config, units)? {
                Ok(own) => return Ok(own),
                Err(in_use) => in_use,
            };
            let left = match node.policy.values.allow.unallocated {
                false => DEL_TIMEOUT.saturating_sub(started.elapsed()),
                // Nobody has freed it for this pod.
                true => Duration::ZERO,
            };
            // A watch that fails counts as a record that stays.
            if !node.journal.wait_for_del(&key, left).unwrap_or_default() {
                return Err(in_use(&record, &moved));
            }
        }
    }

    /// Locks the NICs and returns those of orphaned attachments to the host, or says which attachment
    /// has one whose pod is there.
    fn reclaim(
        node: &mut Node,
        request: &Request,
        config: &Config,
        units: &Units,
    ) -> Result<Result<OwnNics, (Key, Record, Move)>, Error> {
        let mut identities = Vec::new();
        for unit in &units.nics {
            let target = facts::move_target(config, unit.as_ref())?;
            identities.push(identity(node, &target, config.port)?);
        }
        let here = identities.iter().flatten();
        let lock = node.journal.lock_all(here, Sharing::Exclusive)?;
        let mut own = OwnNics::default();
        for identity in &identities {
            // Whatever is wrong with a request without an identity is for the facts to say.
            let identity = identity.as_ref();
            let found = identity.map_or(Ok(None), |identity| claimant(node, identity))?;
            let Some((key, record, moved)) = found else {
                own.true_names.push(None);
                continue;
            };
            may_have(node, request, units, &moved)?;
            if moved.returned.is_none() && living(&record)?.is_some() {
                return Ok(Err((key, record, moved)));
            }
            own.true_names.push(moved.reclaim(node, &record)?);
            let has_more = record.ipam.is_some() || record.slots().next().is_some();
            own.ended
                .extend((record.parts.len() == 1 && !has_more).then_some(key));
        }
        own._lock = Some(lock);
        Ok(Ok(own))
    }
}

/// The NIC that a target means: on the host, or by the record of the attachment that has it.
fn identity(
    node: &mut Node,
    target: &Target,
    port: Option<u32>,
) -> Result<Option<Identity>, Error> {
    if let Ok(name) = facts::name_of(&node.roots, target, port)
        && let Some(nic) = link::get(&mut node.netns.socket, By::Name(name.as_bytes()))?
    {
        return Ok(Some(Identity::on(&node.roots, &nic)));
    }
    Ok(holder(node, target)?.map(|(_, moved)| moved.host.identity))
}

/// Denies a netdev that another pod has to a pod that the kubelet did not allocate it to. A tenant learns
/// whose it is only after this.
///
/// # Errors
/// Code 101: the pod has not; why the kubelet could not be asked.
pub(crate) fn may_have(
    node: &Node,
    request: &Request,
    units: &Units,
    moved: &Move,
) -> Result<(), Error> {
    if node.policy.values.allow.unallocated {
        return Ok(());
    }
    let allocated = units.allocated(node, request).as_ref();
    let allocated = allocated.map_err(Error::clone)?;
    let hcas = moved.hcas.iter().filter_map(|hca| hca.parse().ok());
    let (name, path) = (&moved.host.name, &node.policy.path);
    let what = format!("use of netdev {name}");
    decide::is_allocated(&what, name, &hcas.collect(), allocated, path)
}

pub(crate) fn in_use(record: &Record, moved: &Move) -> Error {
    let (name, owner) = (&moved.host.name, record.owner());
    Error::advise(
        Code::TryAgain,
        format_args!("netdev {name} is in use by {owner}"),
        "it returns to the host when that pod is deleted",
    )
}

/// The attachment of this boot that has the netdev a target means, by all records: for a netdev that is
/// not on the host.
///
/// # Errors
/// The journal cannot be listed.
pub(crate) fn holder(node: &Node, target: &Target) -> Result<Option<(Record, Move)>, Error> {
    for (_, record) in node.records()? {
        if !node.is_of_this_boot(&record.boot) {
            continue;
        }
        let mut moved = record.parts.iter().filter_map(Part::moved);
        if let Some(moved) = moved.find(|moved| target.means(moved)).cloned() {
            return Ok(Some((record, moved)));
        }
    }
    Ok(None)
}

/// The attachment of this boot that has claimed a netdev, if it is in the journal.
fn claimant(node: &Node, identity: &Identity) -> Result<Option<(Key, Record, Move)>, Error> {
    let Some(key) = node.journal.claimant(identity)? else {
        return Ok(None);
    };
    let record = node.journal.read(&key)?;
    let Some(record) = record.filter(|record| node.is_of_this_boot(&record.boot)) else {
        return Ok(None);
    };
    let of_identity = |moved: &&Move| moved.host.identity.key() == identity.key();
    let moved = record.parts.iter().filter_map(Part::moved);
    let moved = moved.clone().find(of_identity).cloned();
    Ok(moved.map(|moved| (key, record, moved)))
}

/// Keeps the netdevs of children from being moved until the children are made, and refuses one that an
/// attachment moved into its pod: the pod can send it back to the host under any name, MAC address and
/// alias.
///
/// # Errors
/// Code 11 with the attachment; the claim cannot be read.
pub(crate) fn keep_parents(node: &Node, parents: &[&HostLink]) -> Result<Lock, Error> {
    let on_host = parents
        .iter()
        .map(|host| Identity::on(&node.roots, &host.link));
    let identities: Vec<Identity> = on_host.collect();
    let lock = node.journal.lock_all(&identities, Sharing::Shared)?;
    for (host, identity) in parents.iter().zip(&identities) {
        let Some((_, record, moved)) = claimant(node, identity)? else {
            continue;
        };
        let what = match moved.returned {
            Some(Defect::Child) => moved.left_child(&record),
            _ => format!(
                "netdev {} is {}, which belongs to {}",
                host.link.name,
                moved.host.name,
                record.owner()
            ),
        };
        return Err(Error::advise(
            Code::TryAgain,
            what,
            "it can be used when the attachment is undone, by DEL or the daemon",
        ));
    }
    Ok(lock)
}

impl Target {
    /// Whether the netdev that was moved for a part of an attachment is the one that is meant. Pure.
    fn means(&self, moved: &Move) -> bool {
        let (host, rdma) = (&moved.host, &moved.rdma);
        let is_at = |device: &str| host.identity.bus_device.as_deref() == Some(device);
        match self {
            Target::Name(name) => {
                let name = Name::from(name.as_str());
                host.name == name || host.state.altnames.contains(&name)
            }
            Target::Mac(mac) => {
                let macs = [&host.state.mac, &host.identity.permanent_mac];
                macs.contains(&&Some(mac.clone()))
            }
            Target::Hca(hca) => {
                let name = hca.to_string();
                let has_guid = |guid: &hca::Guid| {
                    let guid = guid.to_string();
                    rdma.iter().any(|device| device.node_guids.contains(&guid))
                };
                moved.hcas.contains(&name)
                    || is_at(&name)
                    || matches!(hca, HcaId::NodeGuid(guid) if has_guid(guid))
            }
            Target::KernelPath(path) => path.split('/').next_back().is_some_and(is_at),
            Target::RdmaDevice(name) => rdma.iter().any(|device| device.name == *name),
        }
    }
}
