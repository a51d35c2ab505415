//! DEL: an attachment is undone by its record; without one its leases are released.

use std::{fmt, time::Duration};

use attachment::{
    addresses::Ipam,
    detach::detach,
    error::Kind,
    journal::{Key, Lock, Record},
    netdev::restore,
    node::Node,
    part::Defect,
};
use cni_wire::{AttachmentId, Code, Request};

use super::add::ATTACHMENT_LOCK_TIMEOUT;
use crate::{bind, error::Error};

/// Serves DEL.
///
/// # Errors
/// Something is left and another DEL may remove it; code 11 when it only takes time.
pub fn run(mut node: Node, request: &Request) -> Result<(), Error> {
    let id = request.attachment()?;
    // A name too long for the journal was refused by ADD.
    let Some(key) = Key::of(&request.config.name, id) else {
        return Ok(());
    };
    let what = format!("DEL of {id}");
    // Nothing is made in the built-in directory where the policy can name another one.
    if !node.journal.exists() {
        is_known(&node, &what)?;
    }
    let _attachment = lock(&node, &key, ATTACHMENT_LOCK_TIMEOUT)?;
    if let Some(record) = node.journal.read(&key)? {
        return end(&mut node, &key, &record);
    }
    is_known(&node, &what)?;
    let ipam = Ipam::of_release(&node, request);
    // Another IPAM may release by container and interface alone.
    if !matches!(ipam, Ipam::Own)
        && let Some(network) = other_network(&node, &key, id)?
    {
        node.log.info(format_args!(
            "nothing to undo: {id} is attached to network {network}"
        ));
        return node.journal.forget(&key);
    }
    // An ADD that died before its record may have bound a slot.
    bind::unbind_unrecorded(&node, id.container_id.as_str(), request);
    // Leases are found by container, interface and network, whatever the journal knew. A configuration whose
    // IPAM cannot be read or found, or is not allowed, had none leased by us.
    ipam.del(&node, request)?;
    node.journal.forget(&key)
}

/// Undoes an attachment by its record. DEL succeeds although a returned NIC carries a child, and, after a
/// first DEL, although a VF has this attachment's settings: the daemon goes on.
fn end(node: &mut Node, key: &Key, record: &Record) -> Result<(), Error> {
    match detach(node, key, record, restore::RETURN_TIMEOUT) {
        Err(kept)
            if kept.kind == Kind::Kept(Defect::Child)
                || kept.kind == Kind::Kept(Defect::Vf) && record.is_returned() =>
        {
            node.log.warn(kept);
        }
        done => done?,
    }
    let units = record.slots().map(|slot| slot.unit.clone()).collect();
    bind::unbind(node, &record.container_id, units);
    Ok(())
}

/// Fails where it is not known what is attached: a record may be where a policy says that cannot be
/// read, and the runtime must repeat the call.
pub(super) fn is_known(node: &Node, what: impl fmt::Display) -> Result<(), Error> {
    match &node.policy.fault {
        None => Ok(()),
        Some(fault) => Err(Error::advise(
            Code::TryAgain,
            format_args!("{what}: no record is found, and where records are is not known: {fault}"),
            fault.remedy(),
        )),
    }
}

/// The attachment's lock, which the IPAM programs that this call runs hold as well. A state
/// directory that takes no lock takes no record: an existing one is undone without the lock.
pub(super) fn lock(node: &Node, key: &Key, timeout: Duration) -> Result<Option<Lock>, Error> {
    match node.journal.lock_attachment(key, timeout) {
        Ok(lock) => {
            lock.share_with_programs()?;
            Ok(Some(lock))
        }
        Err(e) if e.kind == Kind::Locked => Err(e),
        Err(e) => {
            node.log.warn(format_args!(
                "another call of this attachment is not kept out: {e}"
            ));
            Ok(None)
        }
    }
}

/// The network that the container's interface of this name is attached to by another record. A
/// refused ADD is followed by a DEL, which must not touch it.
fn other_network(node: &Node, key: &Key, id: &AttachmentId) -> Result<Option<String>, Error> {
    let all = node.journal.list()?;
    Ok(all
        .into_iter()
        .find(|(other, _, attached)| other != key && attached == id)
        .map(|(_, network, _)| network))
}
