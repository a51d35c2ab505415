//! DEL: whatever is left of an attachment goes; what is gone already is success.

use std::path::Path;

use cni_wire::{AttachmentId, Error, IfName, Request};
use netlink_packet_route::link::InfoKind;

use super::rdma_only;
use crate::{
    addresses::Ipam,
    detach::detach,
    journal::Key,
    kernel::{
        Namespace,
        link::{self, By, Change},
    },
    netdev::restore,
    node::Node,
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
    if let Some(record) = node.store.read(&key)? {
        return detach(&mut node, &key, &record, restore::ON_ITS_WAY);
    }
    let imported = rdma_only::import(&node, request, id);
    // A network of attach rdma-only has no interface of its own in the pod.
    let swept = match rdma_only::is_meant(request) {
        true => imported,
        false => imported.and(sweep(&mut node, request, id)),
    };
    // Leases go by container and interface, whatever the journal knew. A configuration whose
    // IPAM cannot be read or found, or is not allowed, had none leased by us.
    let released = Ipam::of_release(&node, request).del(&node, request);
    swept.and(released)?;
    Ok(node.store.forget(&key)?)
}

/// Without a record: an attachment of a plugin this one replaced, or of a journal that is lost.
/// A child under the name is deleted. A physical netdev whose alias is a name of the host's was
/// put there by the host-device plugin and goes home under it.
fn sweep(node: &mut Node, request: &Request, id: &AttachmentId) -> Result<(), Error> {
    let Some(path) = &request.env.netns else {
        return Ok(());
    };
    let Some(pod) = Namespace::open(Path::new(path))? else {
        return Ok(());
    };
    if pod.id() == node.home.id() {
        return Ok(());
    }
    let mut inside = pod.socket(&node.home)?;
    let Some(found) = link::get(&mut inside, By::Name(id.ifname.as_str().as_bytes()))? else {
        return Ok(());
    };
    match &found.kind {
        Some(InfoKind::MacVlan | InfoKind::IpVlan) => Ok(link::delete(&mut inside, &found)?),
        None if found.bus_device.is_some() => {
            let Some(name) = found
                .alias
                .as_ref()
                .and_then(|alias| IfName::parse(alias.as_text()?).ok())
            else {
                return Ok(());
            };
            if link::get(&mut node.socket, By::Name(name.as_str().as_bytes()))?.is_some() {
                return Ok(());
            }
            let change = Change {
                netns: Some(&node.home),
                name: Some(name.as_str().as_bytes()),
                alias: Some(b""),
                ..Change::down()
            };
            let what = format!("move {} home as {name}", found.name);
            link::change(&mut inside, what, found.index, &change)?;
            node.log.info(format_args!("{name} is home, by its alias"));
            Ok(())
        }
        _ => Ok(()),
    }
}
