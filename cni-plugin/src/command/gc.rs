//! GC: of this network, everything goes that the runtime does not know any more.

use cni_wire::{Command, Error, Request};

use crate::{addresses::Ipam, detach::detach, netdev::restore, node::Node};

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
    for (key, network, id) in node.store.list()? {
        if network != request.config.name || valid.contains(&id) {
            continue;
        }
        let done = match node.store.read(&key) {
            Ok(Some(record)) => detach(&mut node, &key, &record, restore::ON_ITS_WAY),
            Ok(None) => node.store.forget(&key).map_err(Error::from),
            Err(e) => Err(e.into()),
        };
        failures.extend(done.err().map(|e| e.context(format_args!("collect {id}"))));
    }
    let asked = Ipam::of_release(&node, request).ask(&node, Command::Gc, request);
    failures.extend(asked.err());
    let mut failures = failures.into_iter();
    match failures.next() {
        None => Ok(()),
        Some(first) => {
            Err(failures.fold(first, |first, other| first.with_details(other.to_string())))
        }
    }
}
