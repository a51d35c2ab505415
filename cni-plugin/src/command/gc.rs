//! GC: of this network, everything goes that the runtime does not know any more.

use std::time::Duration;

use attachment::{
    addresses::Ipam, detach::detach, error::Kind, journal::Key, netdev::restore, node::Node,
};
use cni_wire::{Command, Request};

use super::del;
use crate::error::Error;

/// An ADD or DEL of an attachment may be running; the next GC finds what it leaves.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Serves GC.
///
/// # Errors
/// The first failure; its details name the others. Everything was attempted.
pub fn run(mut node: Node, request: &Request) -> Result<(), Error> {
    // A runtime that does not say which attachments are valid has not said that none is.
    let Some(valid) = request.config.valid_attachments()? else {
        return Ok(());
    };
    let mut failures = Vec::new();
    for (key, network, id) in node.journal.list()? {
        if network != request.config.name || valid.contains(&id) {
            continue;
        }
        if let Err(e) = collect(&mut node, &key) {
            failures.push(e.context(format_args!("collect {id}")));
        }
    }
    let network = &request.config.name;
    failures.extend(del::is_known(&node, format_args!("GC of network {network}")).err());
    // An interface that is still there may still use its address.
    if failures.is_empty() {
        let asked = Ipam::of_release(&node, request).ask(&node, Command::Gc, request, None);
        failures.extend(asked.err().map(Error::from));
    }
    Error::all(failures).map_or(Ok(()), Err)
}

/// Ends an attachment.
fn collect(node: &mut Node, key: &Key) -> Result<(), Error> {
    let _attachment = del::lock(node, key, LOCK_TIMEOUT)?;
    let Some(record) = node.journal.read(key)? else {
        return node.journal.forget(key);
    };
    match detach(node, key, &record, restore::RETURN_TIMEOUT) {
        Err(kept) if matches!(kept.kind, Kind::Kept(_)) => {
            node.log.warn(kept);
            Ok(())
        }
        done => done,
    }
}
