//! DEL: whatever is left of an attachment goes; what is gone already is success.

use std::{
    fmt, mem,
    path::Path,
    time::{Duration, Instant},
};

use attachment::{
    addresses::Ipam,
    detach::detach,
    error::Kind,
    journal::{Key, Lock, Record},
    netdev::restore,
    node::Node,
};
use cni_wire::{AttachmentId, Code, Interface, Request};
use netlink::{
    Namespace, Socket,
    link::{self, By, Change, Link},
};
use netlink_packet_route::link::InfoKind;

use super::add::ATTACHMENT_LOCK_TIMEOUT;
use crate::{
    bind,
    config::{Attach, Devices},
    error::Error,
};

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
    // One limit for all journals: the runtime does not wait for each of them.
    let started = Instant::now();
    let left = || ATTACHMENT_LOCK_TIMEOUT.saturating_sub(started.elapsed());
    let _attachment = lock(&node, &key, left())?;
    if let Some(record) = node.journal.read(&key)? {
        return end(&mut node, &key, &record);
    }
    for earlier in node.earlier_journals()? {
        let current = mem::replace(&mut node.journal, earlier);
        let _attachment = lock(&node, &key, left())?;
        if let Some(record) = node.journal.read(&key)? {
            return end(&mut node, &key, &record);
        }
        node.journal = current;
    }
    is_known(&node, format_args!("DEL of {id}"))?;
    if let Some(network) = other_network(&node, &key, id)? {
        node.log.info(format_args!(
            "nothing to undo: {id} is attached to network {network}"
        ));
        return node.journal.forget(&key);
    }
    // An ADD that died before its record may have bound a slot.
    bind::unbind_unrecorded(&node, id.container_id.as_str(), request);
    // A network of attach rdma-only has no interface of its own in the pod.
    if !matches!(Attach::of(request), Ok(Some(Attach::RdmaOnly))) {
        sweep(&mut node, request, id)?;
    }
    // Leases are found by container, interface and network, whatever the journal knew. A configuration whose
    // IPAM cannot be read or found, or is not allowed, had none leased by us.
    Ipam::of_release(&node, request).del(&node, request)?;
    node.journal.forget(&key)
}

/// Undoes an attachment by its record. A child that stands on a NIC that returned is no reason to keep
/// the pod, nor are a VF's settings after a first DEL: the daemon goes on.
fn end(node: &mut Node, key: &Key, record: &Record) -> Result<(), Error> {
    match detach(node, key, record, restore::RETURN_TIMEOUT) {
        Err(kept)
            if kept.kind == Kind::CarriesChild
                || kept.kind == Kind::VfKept && record.is_returned() =>
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
        Some(fault) => Err(Error::new(
            Code::TryAgain,
            format!("{what}: no record is found, and where records are is not known: {fault}"),
        )
        .with_details(fault.remedy())),
    }
}

/// The attachment's lock, which the IPAM programs that this call runs hold as well. A state
/// directory that takes no lock takes no record either: what is there is undone all the same.
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

/// Without a record: an attachment of a plugin this one replaced, or of a journal that is lost. The
/// result of its ADD, which the runtime kept, says which interface was made: a child that is still
/// it is deleted. A physical netdev was put there by the host-device plugin and returns.
fn sweep(node: &mut Node, request: &Request, id: &AttachmentId) -> Result<(), Error> {
    let Some(path) = &request.env.netns else {
        return Ok(());
    };
    let Some(pod) = Namespace::open(Path::new(path))? else {
        return Ok(());
    };
    if pod.id() == node.netns.namespace.id() {
        return Ok(());
    }
    let mut inside = pod.socket(&node.netns.namespace)?;
    // With `devices: all` ADD made all interfaces of its result, else the call's.
    let devices = request.config.root().text("devices").ok().flatten();
    let all = devices == Some(Devices::All.as_str());
    // A previous result that cannot be read says nothing where nothing is left.
    let name = By::Name(id.ifname.as_str().as_bytes());
    if !all && link::get(&mut inside, name)?.is_none() {
        return Ok(());
    }
    let made = request.config.prev_result()?.unwrap_or_default().interfaces;
    let ours = |made: &&Interface| {
        made.sandbox == request.env.netns && (all || made.name == id.ifname.as_str())
    };
    for made in made.iter().filter(ours) {
        let is_same = |link: &Link| {
            (made.mac.as_ref()).is_none_or(|known| known.eq_ignore_ascii_case(&link.mac_text()))
        };
        // By its name in this namespace alone: an alternative name may be another link's.
        let found = link::get(&mut inside, By::Name(made.name.as_bytes()))?;
        if let Some(found) = found.filter(|link| link.name == *made.name && is_same(link)) {
            sweep_link(node, &mut inside, &found)?;
        }
    }
    Ok(())
}

/// Removes a child, or returns hardware. What it was called on the host nobody knows but the pod, which
/// may set its alias and its alternative names.
fn sweep_link(node: &mut Node, inside: &mut Socket, found: &Link) -> Result<(), Error> {
    match &found.kind {
        Some(InfoKind::MacVlan | InfoKind::IpVlan) => Ok(link::delete(inside, found)?),
        None => {
            let Some(device) = &found.bus_device else {
                return Ok(());
            };
            let change = Change {
                netns: Some(&node.netns.namespace),
                name: Some(restore::ANY_TEMPORARY),
                alias: Some(b""),
                ..Change::default()
            };
            let what = format!("return {}, which is {device}, to the host", found.name);
            link::change(inside, what, found.index, &change)?;
            let alias = found.alias.clone().unwrap_or_default();
            node.log.warn(format_args!(
                "{device} is back on the host under a name that begins with rdma-dev, because no record \
                 says what it was called; its alias in the pod was '{alias}', which the pod can set. \
                 Rename it: ip link set rdma-dev0 name NAME"
            ));
            Ok(())
        }
        _ => Ok(()),
    }
}
