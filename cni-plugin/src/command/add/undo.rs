//! Undoing an ADD that failed, and one that died.

use attachment::{
    detach::{detach, living},
    journal::{Key, Part, Record},
    netdev::restore,
    node::Node,
};
use cni_wire::Code;
use netlink::{
    Namespace, Socket,
    link::{self, By},
};

use super::Add;
use crate::{config::Attach, error::Error, rdma};

impl Add<'_> {
    /// Undoes what was recorded, and frees the slots. The first error stays the first.
    pub(super) fn undo(&mut self, first: Error) -> Error {
        let record = self.record.take();
        let undone = record.map_or(Ok(()), |record| {
            detach(self.node, self.key, &record, restore::RETURN_TIMEOUT)
        });
        if let Some(bound) = self.bound {
            bound.unbind(self.node);
        }
        match undone {
            Ok(()) => first,
            Err(e) => first.with_details(format!("undoing it failed too: {e}")),
        }
    }
}

/// Undoes what an ADD that died left under the same name. One that lives is an error.
pub(super) fn earlier(
    node: &mut Node,
    key: &Key,
    pod: &Namespace,
    inside: &mut Socket,
    attach: Attach,
) -> Result<(), Error> {
    let Some(record) = node.journal.read(key)? else {
        return node.journal.forget(key);
    };
    let lives = living(&record)?.is_some_and(|there| there.id() == pod.id());
    let has_interface = record.parts.iter().any(Part::has_interface);
    let is_attached = match (lives, has_interface) {
        (false, _) => false,
        (true, true) => has_all(inside, &record)?,
        (true, false) => {
            let rdma: Vec<_> = record.rdma().cloned().collect();
            !rdma.is_empty() && rdma::check(node, pod, &rdma).is_ok()
        }
    };
    if is_attached {
        let remedy = match (has_interface, attach) {
            (true, Attach::RdmaOnly) => {
                "this plugin made the interface; leave rdma out there and attach rdma-only out of \
                 the list"
            }
            _ => "the runtime must DEL it first",
        };
        return Err(Error::new(
            Code::Exists,
            format!(
                "{} is attached to network {} already",
                record.owner(),
                record.network
            ),
        )
        .with_details(remedy));
    }
    detach(node, key, &record, restore::RETURN_TIMEOUT).map_err(|e| {
        e.context(format_args!(
            "undo an earlier attachment of {}",
            record.owner()
        ))
    })
}

/// Whether all interfaces of an attachment are there. An ADD that was killed between two of them was
/// never answered, so that it is undone like one that made none.
fn has_all(inside: &mut Socket, record: &Record) -> Result<bool, Error> {
    for part in &record.parts {
        if link::get(inside, By::Name(part.ifname.as_bytes()))?.is_none() {
            return Ok(false);
        }
    }
    Ok(true)
}
