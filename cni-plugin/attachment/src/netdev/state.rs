//! The state of a netdev as two tables: each attribute has its key in the journal, how it is read and
//! how it is written.
//!
//! The snapshot, the restoration and the message about what could not be restored all walk [`VALUES`]
//! and [`ITEMS`]. Their order is the order of the writes.

mod addresses;
mod attributes;

use std::{collections::BTreeMap, path::Path};

use netlink::{
    Socket, bpf,
    link::{self, By, Link},
};
use netlink_packet_route::AddressFamily;
use serde::{Deserialize, Serialize};

use super::{
    identity::port_part,
    restore::{HostContext, Returned},
    snapshot::Snapshot,
};
pub use addresses::{ADDRESS, NEIGHBOUR, ROUTE, RULE};
pub use attributes::{ALTNAME, MAC};
use attributes::{ITEMS, VALUES};

/// Names and values. A value that is alone has no name; a kernel's message is named by its text, and
/// its value is the bytes in hexadecimal.
pub type Entries = Vec<(String, String)>;

/// Attributes by their keys. One that has no entries is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<String, Entries>")]
pub struct State(BTreeMap<String, Entries>);

impl TryFrom<BTreeMap<String, Entries>> for State {
    type Error = String;

    fn try_from(attributes: BTreeMap<String, Entries>) -> Result<Self, String> {
        let is_known = |key: &String| all().any(|known| known.key == key);
        match attributes.keys().find(|key| !is_known(key)) {
            Some(key) => Err(format!("a netdev has no attribute {key}")),
            None => Ok(State(attributes)),
        }
    }
}

impl State {
    pub fn entries(&self, key: &str) -> &[(String, String)] {
        self.0.get(key).map(Vec::as_slice).unwrap_or_default()
    }

    /// Of an attribute with one value.
    pub fn value(&self, key: &str) -> Option<&str> {
        self.entries(key).first().map(|(_, value)| value.as_str())
    }

    pub fn set(&mut self, key: &str, entries: Entries) {
        self.0.insert(key.to_owned(), entries);
    }

    /// The state of a netdev of the namespace that the thread and the socket are in.
    pub(super) fn read(socket: &mut Socket, proc: &Path, link: &Link) -> netlink::Result<Self> {
        let mut netdev = Netdev::new(socket, proc, link.clone());
        let mut state = State::default();
        for attribute in all() {
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
    /// The tables that have routes out of it, or had when it moved.
    tables: Vec<(AddressFamily, u32)>,
}

impl<'a> Netdev<'a> {
    fn new(socket: &'a mut Socket, proc: &'a Path, link: Link) -> Self {
        Netdev {
            socket,
            proc,
            link,
            tables: Vec::new(),
        }
    }
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

fn all() -> impl Iterator<Item = &'static Attribute> {
    VALUES.iter().chain(ITEMS)
}

/// Restores the state of a netdev of the host.
pub(super) struct Restoration<'a> {
    netdev: Netdev<'a>,
    sys: &'a Path,
    before: &'a Snapshot,
    report: &'a mut Returned,
    /// The texts of addresses that are not restored because their lifetime is over.
    expired: Vec<String>,
}

impl<'a> Restoration<'a> {
    pub(super) fn new(
        host: &'a mut HostContext<'_>,
        before: &'a Snapshot,
        link: Link,
        report: &'a mut Returned,
    ) -> Self {
        Restoration {
            netdev: Netdev::new(host.socket, host.proc, link),
            sys: host.sys,
            before,
            report,
            expired: Vec::new(),
        }
    }

    /// Writes what is not as it was, and warns of what is not so afterwards, or cannot be read.
    ///
    /// Programs go before the MTU is written, which XDP limits; what the PF allows is restored before
    /// the MAC address; addresses are written after `up`.
    pub(super) fn run(mut self) {
        self.detach_programs();
        if let Some(vf) = &self.before.vf {
            vf.restore_rights(self.sys, self.netdev.socket);
        }
        for attribute in VALUES {
            self.restore_values(attribute);
        }
        self.restore_vf();
        self.remove_altnames();
        self.remove_mislabelled();
        for attribute in ITEMS {
            // Those that exist, too: an entry may differ in parts.
            self.write(attribute, self.before.state.entries(attribute.key));
        }
        self.verify();
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

    fn restore_values(&mut self, attribute: &Attribute) {
        let before = self.before.state.entries(attribute.key);
        // What cannot be read is written, and named by `verify()`.
        let differing = match (attribute.read)(&mut self.netdev) {
            Ok(now) => attribute.differing(before, &now),
            Err(_) => before.to_vec(),
        };
        if !differing.is_empty() {
            self.write(attribute, &differing);
            self.refresh();
        }
    }

    fn write(&mut self, attribute: &Attribute, entries: &[(String, String)]) {
        for (name, value) in entries {
            let what = attribute.what(name, value, self.before);
            let what = what.as_str();
            let written = (attribute.write)(self, Entry { what, name, value });
            self.attempt(written);
        }
    }

    fn restore_vf(&mut self) {
        let Some(vf) = &self.before.vf else {
            return;
        };
        let (refused, kept) = vf.undo(self.sys, self.netdev.socket);
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

    fn verify(mut self) {
        let name = &self.before.name;
        if !self.refresh() {
            let gone = format!("{name} went away while it was restored");
            self.report.warnings.push(gone);
            return;
        }
        for attribute in all() {
            let before = self.before.state.entries(attribute.key);
            // Nothing can be missing. To read the routes the kernel walks all those of the node.
            if before.is_empty() {
                continue;
            }
            let wrong = match (attribute.read)(&mut self.netdev) {
                Ok(now) => attribute.differences(before, &now, &self.expired),
                Err(e) => vec![e.to_string()],
            };
            let wrong = wrong.into_iter().map(|what| format!("{name}: {what}"));
            self.report.warnings.extend(wrong);
        }
    }

    fn attempt(&mut self, done: Written) {
        self.report
            .warnings
            .extend(done.err().map(|e| e.to_string()));
    }

    /// Reads the link again, of which some values follow from others. False when it is gone.
    fn refresh(&mut self) -> bool {
        match link::get(self.netdev.socket, By::Index(self.netdev.link.index)) {
            Ok(Some(now)) => self.netdev.link = now,
            Ok(None) => return false,
            Err(e) => {
                let unread = format!("{}: {e}", self.before.name);
                self.report.warnings.push(unread);
            }
        }
        true
    }
}

impl Attribute {
    fn is_item(&self) -> bool {
        ITEMS.iter().any(|item| item.key == self.key)
    }

    /// The values that are another now or are not read, with what they were.
    fn differing(&self, before: &[(String, String)], now: &[(String, String)]) -> Entries {
        let is_same = |was: &str, now: &str| match self.key {
            MAC => port_part(was) == port_part(now),
            _ => was == now,
        };
        let differs = |(name, was): &&(String, String)| {
            value_of(now, name).is_none_or(|now| !is_same(was, now))
        };
        before.iter().filter(differs).cloned().collect()
    }

    fn what(&self, name: &str, value: &str, of: &Snapshot) -> String {
        let value = if self.is_item() { "" } else { value };
        let words = ["restore", self.key, name, value];
        let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
        format!("{} of {}", words.join(" "), of.name)
    }

    /// What is not as it was, as text. Entries that are new on the host are no difference. Pure.
    fn differences(
        &self,
        before: &[(String, String)],
        now: &[(String, String)],
        expired: &[String],
    ) -> Vec<String> {
        let named = |name: &str| match name {
            "" => self.key.to_owned(),
            name => format!("{} {name}", self.key),
        };
        if self.is_item() {
            let missing = |(name, _): &&(String, String)| value_of(now, name).is_none();
            let lost = before.iter().filter(missing);
            let lost = lost.filter(|(name, _)| !expired.contains(name));
            return lost
                .map(|(name, _)| format!("{} did not come back", named(name)))
                .collect();
        }
        let differing = self.differing(before, now).into_iter();
        let differing = differing.map(|(name, was)| match value_of(now, &name) {
            Some(now) => format!("{} is {now}, was {was}", named(&name)),
            None => format!("{} is unreadable, was {was}", named(&name)),
        });
        differing.collect()
    }
}

fn value_of<'a>(entries: &'a [(String, String)], name: &str) -> Option<&'a str> {
    let found = entries.iter().find(|(known, _)| known == name);
    found.map(|(_, value)| value.as_str())
}

#[cfg(test)]
mod tests;
