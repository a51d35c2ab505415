//! Undoing an attachment: the one function behind DEL, GC, reclaim and a failed ADD.
//!
//! It starts from the journal's record alone and asks for states, not for changes, so it can
//! begin wherever an ADD or an earlier DEL was cut off. What is gone is undone. Every part is
//! attempted whatever became of the others; the record goes when all is done, so the next DEL
//! or the reclaim loop finds what is left. Addresses are released when all interfaces are gone by
//! the kernel's word.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use netlink::{Name, Namespace, rule};
use netlink_packet_route::rule::RuleMessage;

use crate::{
    addresses,
    cdi_file::CdiDirectory,
    child,
    error::{Error, Kind},
    journal::{Key, Part, RdmaDevice, Record},
    netdev::{
        restore::{self, Returned},
        snapshot::Snapshot,
    },
    node::Node,
    rdma,
};

/// Undoes an attachment, all of its interfaces.
///
/// `timeout` limits the wait for RDMA devices, then for netdevs, then for IPoIB children, that return
/// from a dying namespace: they return together.
///
/// # Errors
/// All failures, the first one first.
pub fn detach(node: &mut Node, key: &Key, record: &Record, timeout: Duration) -> Result<(), Error> {
    let mut failures = Vec::new();
    let mut unfinished = Vec::new();
    let mut kept = None;
    let limited = || {
        let started = Instant::now();
        move || timeout.saturating_sub(started.elapsed())
    };
    // First: no container starts with device nodes that are another pod's a moment later.
    failures.extend(remove_cdi_files(node, record).err());
    // Links and namespaces of an earlier boot ended with that.
    if node.is_of_this_boot(&record.boot) {
        match living(record) {
            Ok(pod) => {
                // RDMA devices first: netdevs of InfiniBand stand on them.
                let left = limited();
                for part in &record.parts {
                    failures.extend(return_rdma(node, key, part, pod.as_ref(), left()).err());
                }
                let left = limited();
                for part in &record.parts {
                    let Some(taken) = &part.moved else {
                        continue;
                    };
                    match return_netdev(node, key, taken, pod.as_ref(), left()) {
                        Ok(returned) if returned.is_whole() => {}
                        Ok(returned) => {
                            kept = kept.or(unusable(record, taken, &returned));
                            unfinished.push((part, returned.carries_child));
                        }
                        Err(e) => failures.push(e),
                    }
                }
                let left = limited();
                for part in &record.parts {
                    let Some(child) = &part.child else {
                        continue;
                    };
                    let removed = child::remove(node, record, part, child, pod.as_ref(), left());
                    failures.extend(removed.err());
                }
                if let Some(pod) = &pod {
                    failures.extend(remove_rules(node, record, pod).err());
                }
            }
            Err(e) => failures.push(e),
        }
    } else {
        for taken in record.parts.iter().filter_map(|part| part.moved.as_ref()) {
            failures.extend(disown(node, key, taken).err());
        }
    }
    // What may still be there may still use its address.
    if failures.is_empty() {
        failures.extend(addresses::release(node, record).err().map(Error::from));
    }
    if let Some(failed) = Error::all(failures) {
        return Err(failed);
    }
    if unfinished.is_empty() {
        return node.journal.forget(key);
    }
    // It has not its name, the VF still has this attachment's settings, or a child stands on the
    // netdev. A record is kept for the repair, and holds nothing else.
    let rest = |(part, carries_child): (&Part, bool)| Part {
        returned: true,
        carries_child,
        child: None,
        rdma: Vec::new(),
        slots: Vec::new(),
        rules: Vec::new(),
        ..part.clone()
    };
    let rest = Record {
        parts: unfinished.into_iter().map(rest).collect(),
        ipam: None,
        ..record.clone()
    };
    node.journal.replace(key, &rest)?;
    kept.map_or(Ok(()), Err)
}

/// Why no pod can have a netdev that returned from an attachment yet, if so.
pub fn unusable(record: &Record, taken: &Snapshot, returned: &Returned) -> Option<Error> {
    let (name, owner) = (&taken.name, record.owner());
    if let Some(why) = &returned.vf_kept {
        let what = format!("{name} may have VF settings of {owner}: {why}");
        return Some(Error::of(Kind::VfKept, what).with_details(
            "no pod gets the VF until they are restored: return the PF's netdev to the host, then \
             run rdmactl reclaim, or let the next ADD do it",
        ));
    }
    returned.carries_child.then(|| {
        Error::of(Kind::CarriesChild, left_child(name, record)).with_details(
            "no pod gets the netdev until the child is gone: end what holds that namespace (lsns -t \
             net shows those of processes); the daemon asks the kernel again, and so does the next ADD",
        )
    })
}

/// That a netdev that returned from an attachment carries a child.
pub fn left_child(netdev: &Name, record: &Record) -> String {
    format!(
        "{netdev} carries a macvlan or ipvlan in another network namespace, made by {}",
        record.owner()
    )
}

/// Removes what containers of the attachment's pod got their slots by. A CDI directory that cannot be
/// trusted has nothing of ours, and is no reason to keep the pod's devices from the host: no container
/// of this pod starts any more.
fn remove_cdi_files(node: &Node, record: &Record) -> Result<(), Error> {
    if record.slots().next().is_none() {
        return Ok(());
    }
    let directory = match CdiDirectory::open(&node.policy.values.cdi_dir) {
        Ok(directory) => directory,
        Err(error) => {
            if !error.is_missing() {
                node.log.warn(format_args!(
                    "{error}; CDI files of {} are not removed from it",
                    record.owner()
                ));
            }
            return Ok(());
        }
    };
    for slot in record.slots() {
        directory.remove(&slot.cdi_file)?;
    }
    Ok(())
}

/// The attachment's namespace; none when it is gone, or another one has its path now.
///
/// # Errors
/// It is there and cannot be opened.
pub fn living(record: &Record) -> Result<Option<Namespace>, Error> {
    let pod = Namespace::open(Path::new(&record.netns.path))?;
    Ok(pod.filter(|pod| {
        let id = pod.id();
        (id.device, id.inode) == (record.netns.device, record.netns.inode)
    }))
}

/// Returns a moved netdev to the host, unless it belongs to another attachment by now.
fn return_netdev(
    node: &mut Node,
    key: &Key,
    taken: &Snapshot,
    pod: Option<&Namespace>,
    timeout: Duration,
) -> Result<Returned, Error> {
    let _lock = node.journal.lock(&taken.identity)?;
    match node.journal.claim(&taken.identity)? {
        Some(claim) if claim.owner == key.as_str() => {}
        Some(_) => return Ok(Returned::default()),
        // Not claimed, or the claim was cut off: it was never moved.
        None => {
            node.journal.release(&taken.identity)?;
            return Ok(Returned::default());
        }
    }
    let returned = restore::return_netdev(&mut node.host_context(), taken, pod, timeout)?;
    report(node, taken, &returned);
    if returned.is_whole() {
        node.journal.release(&taken.identity)?;
    }
    Ok(returned)
}

/// Returns RDMA devices out of `pod`. When the pod is over the kernel returned them, and another one can
/// have them by now.
fn return_rdma(
    node: &Node,
    key: &Key,
    part: &Part,
    pod: Option<&Namespace>,
    timeout: Duration,
) -> Result<(), Error> {
    let devices = match pod {
        Some(_) => part.rdma.clone(),
        None => without_those_of_others(node, key, &part.rdma)?,
    };
    rdma::return_devices(node, &devices, pod, timeout)
}

/// The devices that no other attachment has whose namespace lives.
fn without_those_of_others(
    node: &Node,
    key: &Key,
    devices: &[RdmaDevice],
) -> Result<Vec<RdmaDevice>, Error> {
    let mut left = devices.to_vec();
    if left.is_empty() {
        return Ok(left);
    }
    let (records, _) = node.journal.records()?;
    for (other, record) in &records {
        let has = |device: &RdmaDevice| record.rdma().any(|theirs| theirs.is(device));
        if other != key
            && node.is_of_this_boot(&record.boot)
            && left.iter().any(has)
            && living(record)?.is_some()
        {
            left.retain(|device| !has(device));
        }
    }
    Ok(left)
}

/// A claim of an earlier boot says nothing any more.
fn disown(node: &Node, key: &Key, taken: &Snapshot) -> Result<(), Error> {
    let _lock = node.journal.lock(&taken.identity)?;
    match node.journal.claim(&taken.identity)? {
        Some(claim) if claim.owner == key.as_str() => Ok(node.journal.release(&taken.identity)?),
        _ => Ok(()),
    }
}

/// Logs what could not be restored.
pub fn report(node: &Node, taken: &Snapshot, returned: &Returned) {
    for warning in &returned.warnings {
        node.log.warn(warning);
    }
    for note in &returned.notes {
        node.log.info(note);
    }
    if returned.hardware_gone {
        node.log.warn(format_args!(
            "{} is gone from the host; nothing to restore",
            taken.name
        ));
    } else {
        node.log
            .info(format_args!("{} is back on the host", taken.name));
    }
}

/// Removes the rules of an attachment from a namespace that lives.
fn remove_rules(node: &Node, record: &Record, pod: &Namespace) -> Result<(), Error> {
    let mut rules = record.parts.iter().flat_map(|part| &part.rules).peekable();
    if rules.peek().is_none() {
        return Ok(());
    }
    let mut socket = pod.socket(&node.netns.namespace)?;
    for message in rules {
        if let Ok(parsed) = message.parse::<RuleMessage>() {
            rule::delete(
                &mut socket,
                &format!("remove rule {}", message.text),
                &parsed,
            )?;
        }
    }
    Ok(())
}
