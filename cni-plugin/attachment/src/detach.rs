//! Undoing an attachment: the one function behind DEL, GC, reclaim and a failed ADD.
//!
//! It starts from the journal's record alone and asks for states, not for changes, so it can
//! begin wherever an ADD or an earlier DEL was cut off. What is gone is undone. Every part is
//! attempted whatever became of the others; the record goes when all is done, so the next DEL
//! or the reclaim loop finds what is left. Addresses are released when all interfaces are gone by
//! the kernel's word.

use std::{
    collections::BTreeSet,
    path::Path,
    time::{Duration, Instant},
};

use netlink::{Namespace, Socket, rule};
use netlink_packet_route::rule::RuleMessage;

use crate::{
    addresses,
    cdi_file::CdiDirectory,
    child,
    error::{Error, Kind},
    journal::{Key, Part, RdmaDevice, Record},
    namespaces::{self, Search},
    netdev::{
        restore::{self, Origin, Returned},
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
    let mut vf_kept = None;
    let limited = || {
        let started = Instant::now();
        move || timeout.saturating_sub(started.elapsed())
    };
    // First: no container starts with device nodes that are another pod's a moment later.
    failures.extend(remove_cdi_files(node, record).err());
    let mut is_over = true;
    // Links and namespaces of an earlier boot ended with that.
    if node.is_of_this_boot(&record.boot) {
        match find_living(node, record) {
            Ok(pod) => {
                is_over = pod.is_none();
                // RDMA devices first: netdevs of InfiniBand stand on them.
                let left = limited();
                for part in &record.parts {
                    failures.extend(return_rdma(node, key, part, pod.as_ref(), left()).err());
                }
                let left = limited();
                let origin = pod.as_ref().map(Origin::new);
                for part in &record.parts {
                    let Some(taken) = &part.moved else {
                        continue;
                    };
                    match return_netdev(node, key, taken, origin.as_ref(), left()) {
                        Ok(returned) if returned.is_whole() => {}
                        Ok(returned) => {
                            unfinished.push(part);
                            let why = returned.vf_kept;
                            vf_kept = why
                                .map(|why| self::vf_kept(record, taken, &why))
                                .or(vf_kept);
                        }
                        Err(e) => failures.push(e),
                    }
                }
                for part in &record.parts {
                    failures.extend(child::remove_unmoved(node, record, part).err());
                }
                match &pod {
                    Some(pod) => failures.extend(clear_pod(node, record, pod)),
                    None => {
                        let left = limited();
                        for part in &record.parts {
                            let Some(child) = &part.child else {
                                continue;
                            };
                            failures.extend(child::remove_moved(node, child).err());
                            match child::remove_returned(node, record, child, left()) {
                                Ok(false) if child.strayed => {
                                    failures.push(child::nowhere(record, part, child));
                                }
                                done => failures.extend(done.err()),
                            }
                        }
                    }
                }
                let noted = note_strayed(node, key, record, &failures);
                failures.extend(noted.err());
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
    let is_nowhere = |e: &Error| matches!(e.kind, Kind::Nowhere | Kind::ChildNowhere(_));
    if is_over && !failures.is_empty() && failures.iter().all(is_nowhere) {
        let failures: Vec<&str> = failures.iter().map(|e| e.msg.as_str()).collect();
        let (owner, failures) = (record.owner(), failures.join("; "));
        let what = format!("the record and the addresses of {owner} stay: {failures}");
        return Err(Error::of(Kind::Kept, what).with_details(child::REMEDY));
    }
    if let Some(failed) = Error::all(failures) {
        return Err(failed);
    }
    if unfinished.is_empty() {
        return node.journal.forget(key);
    }
    // Their names are somebody else's for now, or a VF has their settings: the record stays for the repair, and
    // holds nothing else.
    let rest = |part: &Part| Part {
        returned: true,
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
    vf_kept.map_or(Ok(()), Err)
}

/// The VF that returns from an attachment may have its settings still, and why.
pub fn vf_kept(record: &Record, vf: &Snapshot, why: &str) -> Error {
    let (vf, owner) = (&vf.name, record.owner());
    let what = format!("{vf} may have VF settings of {owner}: {why}");
    Error::of(Kind::VfKept, what).with_details(
        "no pod gets the VF until they are restored: return the PF's netdev to the host, then run \
         rdmactl reclaim, or let the next ADD do it",
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

/// As [`living`], and one that a thread keeps after its path is gone.
fn find_living(node: &Node, record: &Record) -> Result<Option<Namespace>, Error> {
    if let Some(pod) = living(record)? {
        return Ok(Some(pod));
    }
    let has_any = |part: &Part| part.has_interface() || !part.rdma.is_empty();
    let Some(cookie) = record
        .netns
        .cookie
        .filter(|_| record.parts.iter().any(has_any))
    else {
        return Ok(None);
    };
    for other in Namespace::of_threads(&node.roots.proc, BTreeSet::new()) {
        let id = other.id();
        // Another one has the number of one that ended.
        if (id.device, id.inode) == (record.netns.device, record.netns.inode)
            && other.cookie(&node.netns.namespace)? == cookie
        {
            return Ok(Some(other));
        }
    }
    Ok(None)
}

/// Writes down which children may live in a namespace that was not found, before the pod's ends.
fn note_strayed(node: &Node, key: &Key, record: &Record, failures: &[Error]) -> Result<(), Error> {
    let mut noted = record.clone();
    for part in &mut noted.parts {
        let is_it = |e: &Error| e.kind == Kind::ChildNowhere(part.ifname.clone());
        if let Some(child) = &mut part.child {
            child.strayed |= failures.iter().any(is_it);
        }
    }
    match noted == *record {
        true => Ok(()),
        false => Ok(node.journal.replace(key, &noted)?),
    }
}

/// Returns a moved netdev to the host, unless it belongs to another attachment by now.
fn return_netdev(
    node: &mut Node,
    key: &Key,
    taken: &Snapshot,
    origin: Option<&Origin<'_>>,
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
    let returned = return_from_anywhere(node, taken, origin, timeout)?;
    report(node, taken, &returned);
    if returned.is_whole() {
        node.journal.release(&taken.identity)?;
    }
    Ok(returned)
}

/// Returns RDMA devices out of `pod`, or out of a namespace that they were moved to. When the pod is
/// over the kernel returned them, and another one can have them by now.
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
    let from =
        |other: Option<&Namespace>, timeout| rdma::return_devices(node, &devices, other, timeout);
    let missing = match from(pod, timeout) {
        Err(missing) if missing.kind == Kind::Nowhere => missing,
        done => return done,
    };
    let (host, proc) = (&node.netns.namespace, &node.roots.proc);
    let found = namespaces::search_outside(host, proc, pod, |other| {
        match from(Some(other), Duration::ZERO) {
            Err(e) if e.kind == Kind::Nowhere => Ok(false),
            done => done.map(|()| true),
        }
    })?;
    match found {
        Search::Found => Ok(()),
        Search::Nowhere | Search::Unknown => Err(missing),
    }
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

/// Returns a netdev out of its pod, or out of a namespace that it was moved to from there.
fn return_from_anywhere(
    node: &mut Node,
    taken: &Snapshot,
    origin: Option<&Origin<'_>>,
    timeout: Duration,
) -> Result<Returned, Error> {
    let pod = origin.map(|origin| origin.pod);
    let mut context = node.host_context();
    // A namespace that is torn down still has it for a while; one that lives has it or not.
    let first = match pod {
        Some(_) => Duration::ZERO,
        None => timeout,
    };
    let returned = restore::return_netdev(&mut context, taken, origin, first);
    let ended = match (&returned, pod) {
        (Err(e), _) if e.kind == Kind::Nowhere => false,
        // A virtual link that is not found may have ended.
        (Ok(report), Some(_)) if report.hardware_gone && taken.identity.is_virtual() => true,
        _ => return returned,
    };
    let (host, proc) = (context.namespace, context.proc);
    let mut found = None;
    let return_from = |other: &Namespace| match restore::return_netdev(
        &mut context,
        taken,
        Some(&Origin::new(other)),
        Duration::ZERO,
    ) {
        Ok(report) if report.hardware_gone => Ok(false),
        Ok(report) => {
            found = Some(report);
            Ok(true)
        }
        Err(e) if e.kind == Kind::Nowhere => Ok(false),
        Err(e) => Err(e),
    };
    let search = namespaces::search_outside(host, proc, pod, return_from)?;
    match (found, pod) {
        (Some(found), _) => Ok(found),
        (None, Some(_)) if ended && search == Search::Unknown => {
            Err(Error::nowhere(&taken.name, Duration::ZERO))
        }
        (None, Some(_)) if !ended => {
            restore::return_netdev(&mut node.host_context(), taken, origin, timeout)
        }
        (None, _) => returned,
    }
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
