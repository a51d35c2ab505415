//! Undoing an attachment: the one function behind DEL, GC, reclaim and a failed ADD.
//!
//! It starts from the journal's record alone and asks for states, not for changes, so it can
//! begin wherever an ADD or an earlier DEL was cut off. What is gone is undone. Every part is
//! attempted whatever became of the others; the record goes when all is done, so the next DEL
//! or the reclaim loop finds what is left.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use netlink::{Namespace, Socket, rule};
use netlink_packet_route::rule::RuleMessage;

use crate::{
    addresses,
    cdi_file::CdiDirectory,
    child,
    error::Error,
    journal::{Key, Part, Record},
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
    let mut awaiting_names = Vec::new();
    // First: no container starts with device nodes that are another pod's a moment later.
    failures.extend(remove_cdi_files(node, record).err());
    // Links and namespaces of an earlier boot ended with that.
    if node.is_of_this_boot(&record.boot) {
        let pod = living(record);
        match pod {
            Ok(pod) => {
                // RDMA devices first: netdevs of InfiniBand stand on them.
                let limit = Limit::of(timeout);
                for part in &record.parts {
                    let rdma = rdma::return_devices(node, &part.rdma, pod.as_ref(), limit.left());
                    failures.extend(rdma.err());
                }
                let limit = Limit::of(timeout);
                for part in &record.parts {
                    let Some(taken) = &part.moved else {
                        continue;
                    };
                    match return_netdev(node, key, taken, pod.as_ref(), limit.left()) {
                        Ok(true) => awaiting_names.push(part),
                        Ok(false) => {}
                        Err(e) => failures.push(e),
                    }
                }
                for part in &record.parts {
                    failures.extend(child::remove_unmoved(node, record, part).err());
                }
                match &pod {
                    Some(pod) => failures.extend(clear_pod(node, record, pod)),
                    None => {
                        let limit = Limit::of(timeout);
                        for child in record.parts.iter().filter_map(|part| part.child.as_ref()) {
                            let left = limit.left();
                            failures
                                .extend(child::remove_returned(node, record, child, left).err());
                        }
                    }
                }
            }
            Err(e) => failures.push(e),
        }
    } else {
        for taken in record.parts.iter().filter_map(|part| part.moved.as_ref()) {
            failures.extend(disown(node, key, taken).err());
        }
    }
    failures.extend(addresses::release(node, record).err().map(Error::from));
    if let Some(failed) = Error::all(failures) {
        return Err(failed);
    }
    if awaiting_names.is_empty() {
        return Ok(node.journal.forget(key)?);
    }
    // Their names are somebody else's for now: the record stays for the repair, and holds
    // nothing else.
    let rest = |part: &Part| Part {
        awaits_name: true,
        child: None,
        rdma: Vec::new(),
        slots: Vec::new(),
        rules: Vec::new(),
        ..part.clone()
    };
    let rest = Record {
        parts: awaiting_names.into_iter().map(rest).collect(),
        ipam: None,
        ..record.clone()
    };
    Ok(node.journal.replace(key, &rest)?)
}

/// A limit of time for several waits together.
struct Limit {
    started: Instant,
    timeout: Duration,
}

impl Limit {
    fn of(timeout: Duration) -> Self {
        Limit {
            started: Instant::now(),
            timeout,
        }
    }

    fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.started.elapsed())
    }
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

/// Returns a moved netdev to the host, unless it belongs to another attachment by now. True when
/// its name has to be repaired later.
fn return_netdev(
    node: &mut Node,
    key: &Key,
    taken: &Snapshot,
    pod: Option<&Namespace>,
    timeout: Duration,
) -> Result<bool, Error> {
    let _lock = node.journal.lock(&taken.identity)?;
    match node.journal.claim(&taken.identity)? {
        Some(claim) if claim.owner == key.as_str() => {}
        Some(_) => return Ok(false),
        // Not claimed, or the claim was cut off: it was never moved.
        None => {
            node.journal.release(&taken.identity)?;
            return Ok(false);
        }
    }
    let returned = restore::return_netdev(&mut node.host_context(), taken, pod, timeout)?;
    report(node, taken, &returned);
    if returned.goes_by.is_some() {
        return Ok(true);
    }
    node.journal.release(&taken.identity)?;
    Ok(false)
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

/// Removes the children and the rules of an attachment from a namespace that lives. Answers what
/// failed.
fn clear_pod(node: &Node, record: &Record, pod: &Namespace) -> Vec<Error> {
    let has_any = |part: &&Part| part.child.is_some() || !part.rules.is_empty();
    let parts: Vec<&Part> = record.parts.iter().filter(has_any).collect();
    if parts.is_empty() {
        return Vec::new();
    }
    let mut socket = match pod.socket(&node.netns.namespace) {
        Ok(socket) => socket,
        Err(e) => return vec![e.into()],
    };
    let cleared = parts
        .into_iter()
        .map(|part| clear_part(node, record, part, pod, &mut socket));
    cleared.filter_map(Result::err).collect()
}

fn clear_part(
    node: &Node,
    record: &Record,
    part: &Part,
    pod: &Namespace,
    socket: &mut Socket,
) -> Result<(), Error> {
    for message in &part.rules {
        if let Ok(parsed) = message.parse::<RuleMessage>() {
            rule::delete(socket, &format!("remove rule {}", message.text), &parsed)?;
        }
    }
    match &part.child {
        Some(child) => child::remove(node, record, part, child, pod, socket),
        None => Ok(()),
    }
}
