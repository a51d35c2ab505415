//! The state of a netdev as two tables: each attribute has its key in the journal, how it is read and
//! how it is written.
//!
//! The snapshot and the restoration walk [`VALUES`] and [`ITEMS`]. Their order is the order of the
//! writes. Rows are independent: what fails in one is a warning that names it.

mod addresses;
mod attributes;

use std::{collections::BTreeMap, path::Path};

use netlink::{
    Socket, bpf,
    link::{self, By, Link},
};
use netlink_packet_route::AddressFamily;
use serde::{Deserialize, Serialize};

use crate::node::Node;
use hca::Host;

use super::{identity::port_part, restore::Returned, snapshot::Snapshot};
pub use addresses::{ADDRESS, NEIGHBOUR, ROUTE, RULE};
pub(crate) use attributes::IPOIB_MODE;
pub use attributes::{ALTNAME, MAC};
use attributes::{ITEMS, VALUES};

/// Names and values. A value that is alone has no name; a kernel's message is named by its text, and
/// its value is the bytes in hexadecimal.
pub type Entries = Vec<(String, String)>;

/// Attributes by their keys. One that has no entries is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State(BTreeMap<String, Entries>);

impl State {
    pub fn entries(&self, key: &str) -> &[(String, String)] {
        self.0.get(key).map(Vec::as_slice).unwrap_or_default()
    }

    pub fn set(&mut self, key: &str, entries: Entries) {
        self.0.insert(key.to_owned(), entries);
    }

    /// The state of a netdev of the namespace that the thread and the socket are in.
    pub(super) fn read(socket: &mut Socket, proc: &Path, link: &Link) -> netlink::Result<Self> {
        let mut netdev = Netdev {
            socket,
            proc,
            link: link.clone(),
            tables: Vec::new(),
        };
        let mut state = State::default();
        for attribute in VALUES.iter().chain(ITEMS) {
            let entries = (attribute.read)(&mut netdev)?;
            if !entries.is_empty() {
                state.set(attribute.key, entries);
            }
        }
        Ok(state)
    }
}

/// A netdev of the namespace that the thread and the socket are in.
struct Netdev<'a> {
    socket: &'a mut Socket,
    proc: &'a Path,
    link: Link,
    /// The tables that have routes out of it.
    tables: Vec<(AddressFamily, u32)>,
}

type Written = netlink::Result<()>;

/// One entry that is written.
#[derive(Clone, Copy, Default)]
struct Entry<'a> {
    /// What the error begins with.
    what: &'a str,
    name: &'a str,
    value: &'a str,
}

struct Attribute {
    /// In the journal and in messages; as `ip link` calls it, where that has a name for it.
    key: &'static str,
    read: fn(&mut Netdev<'_>) -> netlink::Result<Entries>,
    write: fn(&mut Restoration<'_>, Entry<'_>) -> Written,
}

/// Restores the state of a netdev of the host.
pub(super) fn restore(node: &mut Node, before: &Snapshot, link: Link, report: &mut Returned) {
    Restoration {
        netdev: Netdev {
            socket: &mut node.netns.socket,
            proc: &node.roots.proc,
            link,
            tables: Vec::new(),
        },
        host: &node.roots,
        before,
        report,
    }
    .run();
}

struct Restoration<'a> {
    netdev: Netdev<'a>,
    host: &'a Host,
    before: &'a Snapshot,
    report: &'a mut Returned,
}

impl<'a> Restoration<'a> {
    /// Writes what is not as it was, and warns of what is refused.
    ///
    /// Programs go before the MTU is written, which XDP limits; what the PF allows is restored before
    /// the MAC address; addresses are written after `up`.
    fn run(mut self) {
        self.detach_programs();
        if let Some(vf) = &self.before.vf {
            vf.restore_rights(self.host, self.netdev.socket);
        }
        for attribute in VALUES {
            let before = self.before.state.entries(attribute.key);
            let now = (attribute.read)(&mut self.netdev).unwrap_or_else(|e| {
                self.attempt(Err(e));
                Entries::new()
            });
            let differing = differing(attribute.key, before, &now);
            if !differing.is_empty() {
                self.write(attribute, &differing);
                self.refresh();
            }
        }
        self.restore_vf();
        self.remove_altnames();
        self.remove_mislabelled();
        for attribute in ITEMS {
            // Those that exist, too: an entry may differ in parts.
            self.write(attribute, self.before.state.entries(attribute.key));
        }
    }

    /// XDP and tcx programs: a netdev that has one is not moved, so that they are the pod's.
    fn detach_programs(&mut self) {
        let (index, name) = (self.netdev.link.index, &self.before.name);
        for (mode, id) in std::mem::take(&mut self.netdev.link.xdp) {
            let what = format!("remove XDP program {id} of {name}");
            let detached = match link::detach_xdp(self.netdev.socket, what, index, mode) {
                Err(e) if e.is(libc::EBUSY) => bpf::detach_xdp_link(index, id),
                done => done,
            };
            self.attempt(detached);
        }
        match bpf::tcx(index) {
            Ok(programs) => {
                for program in &programs {
                    self.attempt(bpf::detach_tcx(index, program));
                }
            }
            Err(e) => self.attempt(Err(e)),
        }
    }

    fn write(&mut self, attribute: &Attribute, entries: &[(String, String)]) {
        for (name, value) in entries {
            let text = if name.is_empty() { value } else { name };
            let what = format!("restore {} {text} of {}", attribute.key, self.before.name);
            let what = what.as_str();
            let written = (attribute.write)(self, Entry { what, name, value });
            self.attempt(written);
        }
    }

    fn restore_vf(&mut self) {
        let Some(vf) = &self.before.vf else {
            return;
        };
        let (refused, kept) = vf.undo(self.host, self.netdev.socket);
        if kept.is_some() {
            self.report.vf_kept = kept;
        }
        self.report.warnings.extend(refused);
    }

    fn remove_altnames(&mut self) {
        let link = self.netdev.link.clone();
        for name in link
            .altnames
            .iter()
            .filter(|name| !self.before.has_altname(name))
        {
            let removed = link::remove_altname(self.netdev.socket, &link, name);
            self.attempt(removed);
        }
    }

    fn attempt(&mut self, done: Written) {
        self.report.attempt(done);
    }

    /// Reads the link again, of which some values follow from others.
    fn refresh(&mut self) {
        match link::get(self.netdev.socket, By::Index(self.netdev.link.index)) {
            Ok(Some(now)) => self.netdev.link = now,
            // What is written next is refused.
            Ok(None) => {}
            Err(e) => self.attempt(Err(e)),
        }
    }
}

/// The values that are another now or are not read, with what they were. Pure.
fn differing(key: &str, before: &[(String, String)], now: &[(String, String)]) -> Entries {
    let is_same = |was: &str, now: &str| match key {
        MAC => port_part(was) == port_part(now),
        _ => was == now,
    };
    let is_kept = |(name, was): &(String, String)| {
        now.iter()
            .any(|(known, now)| known == name && is_same(was, now))
    };
    before
        .iter()
        .filter(|entry| !is_kept(entry))
        .cloned()
        .collect()
}

#[cfg(test)]
mod tests;
