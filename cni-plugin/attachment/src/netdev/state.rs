//! The state of a netdev as one table: each attribute has its key in the journal, how it is read,
//! how it is written, and what counts as the same.
//!
//! The snapshot, the restoration and the message about what could not be restored all walk
//! [`ATTRIBUTES`]. Its order is the order of the writes.

mod addresses;
mod attributes;
mod ethtool;

use std::{collections::BTreeMap, path::Path};

use netlink::{
    Socket,
    ethtool::Ethtool,
    link::{self, By, Link},
};
use netlink_packet_route::AddressFamily;
use serde::{Deserialize, Serialize};

use super::{
    restore::{HostContext, Returned},
    snapshot::Snapshot,
};
pub use addresses::{ADDRESS, NEIGHBOUR, ROUTE, RULE};
use attributes::ATTRIBUTES;
pub use attributes::{ALTNAME, MAC, STEERING_RULE, TCX_PROGRAM, XDP_PROGRAM};

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
        let is_recorded = |attribute: &&Attribute| {
            matches!(attribute.kind, Kind::Value | Kind::Driver | Kind::Item)
        };
        let known = ATTRIBUTES.iter().filter(is_recorded).map(|known| known.key);
        match attributes
            .keys()
            .find(|key| !known.clone().any(|known| known == *key))
        {
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
        for attribute in ATTRIBUTES {
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
    /// Opened when it is first needed; the inner one is none on a kernel without ethtool over
    /// netlink.
    ethtool: Option<Option<Ethtool>>,
    /// The tables that have routes out of it, once those are read.
    tables: Vec<(AddressFamily, u32)>,
}

impl<'a> Netdev<'a> {
    fn new(socket: &'a mut Socket, proc: &'a Path, link: Link) -> Self {
        Netdev {
            socket,
            proc,
            link,
            ethtool: None,
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

/// A read that fails ends the whole.
struct Attribute {
    /// In the journal and in messages; as `ip link` calls it, where that has a name for it.
    key: &'static str,
    kind: Kind,
    read: fn(&mut Netdev<'_>) -> netlink::Result<Entries>,
    /// A failure is a warning.
    write: fn(&mut Restoration<'_>, Entry<'_>) -> Written,
    /// Whether the first value, which was recorded, is restored by the second.
    same: fn(&str, &str) -> bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Value,
    /// As a value, but a driver may have it at one time only; it is read again only when it was
    /// written.
    Driver,
    /// Always written, because an entry that exists may differ in parts. Entries that are new on the
    /// host are not reported.
    Item,
    /// What a netdev does not have when it is moved, so that the pod added it. A write removes it.
    Foreign,
    /// What others of the table depend on. A failure ends the restoration.
    Step,
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

    /// Writes what is not as it was, and warns of what is not so afterwards.
    pub(super) fn run(mut self) -> netlink::Result<()> {
        let mut unwritten = State::default();
        for attribute in ATTRIBUTES {
            let before = self.before.state.entries(attribute.key);
            let entries = match attribute.kind {
                Kind::Step => {
                    (attribute.write)(&mut self, Entry::default())?;
                    continue;
                }
                Kind::Item => before.to_vec(),
                Kind::Foreign => match (attribute.read)(&mut self.netdev) {
                    Ok(found) => found,
                    Err(e) => {
                        self.attempt(Err(e));
                        continue;
                    }
                },
                Kind::Value | Kind::Driver => {
                    let now = (attribute.read)(&mut self.netdev)?;
                    attribute.differing(before, &now)
                }
            };
            for (name, value) in &entries {
                let what = attribute.what(name, value, self.before);
                let what = what.as_str();
                let written = (attribute.write)(&mut self, Entry { what, name, value });
                self.attempt(written);
            }
            if entries.is_empty() {
                unwritten.set(attribute.key, before.to_vec());
            } else if attribute.kind != Kind::Item {
                self.refresh()?;
            }
        }
        self.verify(&unwritten)
    }

    fn verify(mut self, unwritten: &State) -> netlink::Result<()> {
        let name = &self.before.name;
        if !self.refresh()? {
            let gone = format!("{name} went away while it was restored");
            self.report.warnings.push(gone);
            return Ok(());
        }
        let mut now = State::default();
        for attribute in ATTRIBUTES {
            let key = attribute.key;
            let entries = match attribute.kind {
                Kind::Driver if unwritten.0.contains_key(key) => unwritten.entries(key).to_vec(),
                // The removal has said why it cannot be read.
                Kind::Foreign => (attribute.read)(&mut self.netdev).unwrap_or_default(),
                _ => (attribute.read)(&mut self.netdev)?,
            };
            now.set(key, entries);
        }
        let wrong = differences(&self.before.state, &now, &self.expired);
        let wrong = wrong.into_iter().map(|what| format!("{name}: {what}"));
        self.report.warnings.extend(wrong);
        Ok(())
    }

    fn attempt(&mut self, done: Written) {
        self.report
            .warnings
            .extend(done.err().map(|e| e.to_string()));
    }

    /// Reads the link again, of which some values follow from others. False when it is gone.
    fn refresh(&mut self) -> netlink::Result<bool> {
        let now = link::get(self.netdev.socket, By::Index(self.netdev.link.index))?;
        let is_there = now.is_some();
        self.netdev.link = now.unwrap_or_else(|| self.netdev.link.clone());
        Ok(is_there)
    }
}

impl Attribute {
    /// The values that are another now, with what they were.
    fn differing(&self, before: &[(String, String)], now: &[(String, String)]) -> Entries {
        let differs = |(name, was): &&(String, String)| {
            value_of(now, name).is_some_and(|now| !(self.same)(was, now))
        };
        before.iter().filter(differs).cloned().collect()
    }

    fn what(&self, name: &str, value: &str, of: &Snapshot) -> String {
        let verb = match self.kind {
            Kind::Foreign => "remove",
            _ => "restore",
        };
        let value = match self.kind {
            Kind::Value => value,
            _ => "",
        };
        let words = [verb, self.key, name, value];
        let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
        format!("{} of {}", words.join(" "), of.name)
    }
}

fn value_of<'a>(entries: &'a [(String, String)], name: &str) -> Option<&'a str> {
    let found = entries.iter().find(|(known, _)| known == name);
    found.map(|(_, value)| value.as_str())
}

/// What is not as it was. Pure.
fn differences(before: &State, now: &State, expired: &[String]) -> Vec<String> {
    let mut wrong = Vec::new();
    for attribute in ATTRIBUTES {
        let key = attribute.key;
        let (before, now) = (before.entries(key), now.entries(key));
        let named = |name: &str| match name {
            "" => key.to_owned(),
            name => format!("{key} {name}"),
        };
        let missing = |(name, _): &&(String, String)| value_of(now, name).is_none();
        match attribute.kind {
            Kind::Value | Kind::Driver => {
                for (name, was) in attribute.differing(before, now) {
                    let now = value_of(now, &name).unwrap_or_default();
                    wrong.push(format!("{} is {now}, was {was}", named(&name)));
                }
                let lost = before.iter().filter(missing);
                for (name, was) in lost.filter(|_| attribute.kind == Kind::Value) {
                    wrong.push(format!("{} is unreadable, was {was}", named(name)));
                }
            }
            Kind::Item | Kind::Foreign => {
                let lost = before.iter().filter(missing);
                for (name, _) in lost.filter(|(name, _)| !expired.contains(name)) {
                    wrong.push(format!("{} did not come back", named(name)));
                }
                let is_exact = attribute.kind == Kind::Foreign || key == ALTNAME;
                let is_new = |(name, _): &&(String, String)| value_of(before, name).is_none();
                for (name, _) in now.iter().filter(|entry| is_exact && is_new(entry)) {
                    wrong.push(format!("{} of the pod is still there", named(name)));
                }
            }
            Kind::Step => {}
        }
    }
    wrong
}

#[cfg(test)]
mod tests;
