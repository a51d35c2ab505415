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
    let mut all_ended = true;
    for (key, network, id) in node.journal.list()? {
        if network != request.config.name || valid.contains(&id) {
            continue;
        }
        match collect(&mut node, &key) {
            Ok(ended) => all_ended &= ended,
            Err(e) => failures.push(e.context(format_args!("collect {id}"))),
        }
    }
    let network = &request.config.name;
    failures.extend(del::is_known(&node, format_args!("GC of network {network}")).err());
    // An interface that is still there may still use its address.
    if failures.is_empty() && all_ended {
        let asked = Ipam::of_release(&node, request).ask(&node, Command::Gc, request);
        failures.extend(asked.err().map(Error::from));
    }
    Error::all(failures).map_or(Ok(()), Err)
}

/// Ends an attachment. False where its namespace is over and not all of it is found.
fn collect(node: &mut Node, key: &Key) -> Result<bool, Error> {
    let _attachment = del::lock(node, key, LOCK_TIMEOUT)?;
    match node.journal.read(key)? {
        Some(record) => match detach(node, key, &record, restore::RETURN_TIMEOUT) {
            Err(kept) if kept.kind == Kind::Kept => {
                node.log.warn(kept);
                Ok(false)
            }
            Err(kept) if kept.kind == Kind::VfKept => {
                node.log.warn(kept);
                Ok(true)
            }
            done => done.map(|()| true),
        },
        None => node.journal.forget(key).map(|()| true),
    }
}
