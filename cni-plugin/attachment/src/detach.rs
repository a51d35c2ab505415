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

use netlink::{Namespace, rule};

use crate::{
    addresses,
    cdi_file::CdiDirectory,
    error::Error,
    journal::{Key, Record},
    netdev::display,
    node::Node,
    part::Part,
    rdma,
};

/// Undoes an attachment, all of its interfaces.
///
/// `timeout` limits the wait for what returns from a dying namespace: all of it returns together.
///
/// # Errors
/// All failures, the first one first; [`Kind::Kept`](crate::error::Kind::Kept) where the host has all
/// again, and a netdev cannot be used yet: its record stays.
pub fn detach(node: &mut Node, key: &Key, record: &Record, timeout: Duration) -> Result<(), Error> {
    let mut failures = Vec::new();
    let (mut rest, mut kept) = (Vec::new(), None);
    // First: no container starts with device nodes that are another pod's a moment later.
    failures.extend(remove_cdi_files(node, record).err());
    // Links and namespaces of an earlier boot ended with that.
    match node.is_of_this_boot(&record.boot) {
        false => {
            for moved in record.parts.iter().filter_map(Part::moved) {
                failures.extend(moved.disown(node, key).err());
            }
        }
        true => match living(record) {
            Err(e) => failures.push(e),
            Ok(pod) => {
                let pod = pod.as_ref();
                let started = Instant::now();
                for part in &record.parts {
                    let left = timeout.saturating_sub(started.elapsed());
                    match part {
                        Part::Move(moved) => match moved.undo(node, key, pod, left) {
                            Ok(returned) => {
                                let defect = returned.defect();
                                kept = kept.or(moved.unusable(&returned, record));
                                rest.extend(defect.map(|defect| moved.left_with(defect)));
                            }
                            Err(e) => failures.push(e),
                        },
                        Part::Child(child) => {
                            failures.extend(child.undo(node, record, pod, left).err());
                        }
                        Part::RdmaOnly(only) => {
                            match rdma::return_devices(node, &only.rdma, pod, left) {
                                // The kernel returned them, and another attachment can have them.
                                Err(error) if pod.is_none() => node.log.warn(error),
                                returned => failures.extend(returned.err()),
                            }
                        }
                    }
                }
                // The pod's own affair, which nothing of the host waits for.
                if let Some(Err(error)) = pod.map(|pod| remove_rules(node, record, pod)) {
                    node.log.warn(error);
                }
            }
        },
    }
    // What may still be there may still use its address.
    if failures.is_empty() {
        failures.extend(addresses::release(node, record).err().map(Error::from));
    }
    if let Some(failed) = Error::all(failures) {
        return Err(failed);
    }
    if rest.is_empty() {
        return node.journal.forget(key);
    }
    // A record is kept for the repair, and holds nothing else.
    let rest = Record {
        parts: rest,
        ipam: None,
        ..record.clone()
    };
    node.journal.write(key, &rest)?;
    kept.map_or(Ok(()), Err)
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
    let of = &record.netns;
    // What a runtime calls /var/run is /run alone in a container (`node::netns`).
    let other = of.path.strip_prefix("/var/run/");
    let other = other.map(|rest| format!("/run/{rest}"));
    for path in [Some(of.path.clone()), other].into_iter().flatten() {
        let is_it = |pod: &Namespace| (pod.id().device, pod.id().inode) == (of.device, of.inode);
        if let Some(pod) = Namespace::open(Path::new(&path))?.filter(is_it) {
            return Ok(Some(pod));
        }
    }
    Ok(None)
}

/// Removes the rules of an attachment from a namespace that lives.
fn remove_rules(node: &Node, record: &Record, pod: &Namespace) -> Result<(), Error> {
    let interfaces = record.parts.iter().filter_map(Part::interface);
    let mut rules = interfaces.flat_map(|one| &one.config.rules).peekable();
    if rules.peek().is_none() {
        return Ok(());
    }
    let mut socket = pod.socket(&node.netns.namespace)?;
    for message in rules {
        let what = format!("remove rule {}", display::rule(message));
        rule::delete(&mut socket, &what, message)?;
    }
    Ok(())
}
