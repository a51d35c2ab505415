//! Writing the recorded state back. Each value goes in a request of its own: a failed one becomes a
//! warning that names it, and the others are written.

use std::fmt;

use hca::Host;
use netlink::{
    Socket, address, bpf, clock,
    link::{self, By, Change, Link},
    sysctl,
};
use netlink_packet_route::link::{LinkAttribute, LinkFlags};

use super::Returned;
use crate::{
    interface::Sysctl,
    netdev::{
        display,
        identity::{is_same_mac, mac_of},
        replay,
        snapshot::Snapshot,
        state::{KEPT_FLAGS, families},
    },
    node::Node,
};

/// Restores the state of a netdev of the host.
pub(super) fn restore(node: &mut Node, before: &Snapshot, link: Link, report: &mut Returned) {
    Restoration {
        socket: &mut node.netns.socket,
        host: &node.roots,
        link,
        before,
        report,
    }
    .run();
}

struct Restoration<'a> {
    socket: &'a mut Socket,
    host: &'a Host,
    link: Link,
    before: &'a Snapshot,
    report: &'a mut Returned,
}

impl Restoration<'_> {
    /// Programs go before the MTU is written, which XDP limits. What the PF allows is restored before
    /// the MAC address. Sysctls come after the MTU: one too small for IPv6 removes them. Addresses are
    /// written while the netdev is up, routes after the addresses that they need.
    fn run(mut self) {
        self.detach_programs();
        if let Some(vf) = &self.before.vf {
            vf.restore_rights(self.host, self.socket);
        }
        self.restore_link();
        self.restore_sysctls();
        self.restore_flags(LinkFlags::Up);
        self.restore_vf();
        self.restore_altnames();
        self.restore_addresses();
        let (config, name) = (&self.before.state.config, &self.before.name);
        for done in config.connect(self.socket, "restore", self.link.index, name) {
            self.report.attempt(done);
        }
    }

    /// XDP and tcx programs: a netdev that has one is not moved, so that they are the pod's.
    fn detach_programs(&mut self) {
        let (index, name) = (self.link.index, &self.before.name);
        for (mode, id) in std::mem::take(&mut self.link.xdp) {
            let what = format!("remove XDP program {id} of {name}");
            let detached = match link::detach_xdp(self.socket, what, index, mode) {
                Err(e) if e.is(libc::EBUSY) => bpf::detach_xdp_link(index, id),
                done => done,
            };
            self.report.attempt(detached);
        }
        match bpf::tcx(index) {
            Ok(programs) => {
                for program in &programs {
                    self.report.attempt(bpf::detach_tcx(index, program));
                }
            }
            Err(e) => self.report.attempt(Err(e)),
        }
    }

    /// What a link takes only while it is down comes before `up`.
    fn restore_link(&mut self) {
        let was = &self.before.state;
        self.restore_mac();
        // Before the MTU: each mode has its own largest.
        for (number, value) in &was.ipoib_mode {
            if self.link.info.get(number) != Some(value) {
                let what = self.what("IPoIB mode", number);
                let index = self.link.index;
                let set = link::set_info(self.socket, what, index, "ipoib", (*number, value));
                self.written(set);
            }
        }
        // A netdev that came to its namespace under the name `all` or `default` has no settings
        // (`sysctl_dev_name_is_allowed()`), so that it takes no address. The kernel makes them anew when
        // the MTU changes (`inetdev_event()`, `addrconf_notify()`).
        if !families(&self.host.proc, &self.link.name).is_superset(&was.families) {
            // The least MTU with IPv4, which most drivers have for their least.
            const LEAST: u32 = 68;
            let other = match self.link.mtu {
                mtu if mtu > LEAST => mtu - 1,
                mtu => mtu + 1,
            };
            self.set("IP", other, LinkAttribute::Mtu(other));
        }
        if self.link.mtu != was.mtu {
            self.set("mtu", was.mtu, LinkAttribute::Mtu(was.mtu));
        }
        if self.link.tx_queue_length != was.tx_queue_length {
            let length = was.tx_queue_length;
            self.set("txqueuelen", length, LinkAttribute::TxQueueLen(length));
        }
        if self.link.alias.clone().unwrap_or_default() != was.alias {
            let change = Change {
                alias: Some(was.alias.as_bytes()),
                ..Change::default()
            };
            self.change("alias", &was.alias, &change);
        }
        self.restore_flags(KEPT_FLAGS);
    }

    /// Of IPoIB the address ends with the port's GUID (its last 8 bytes): the rest is the kernel's.
    fn restore_mac(&mut self) {
        let now = mac_of(&self.link.mac);
        let (Some(was), Some(now)) = (&self.before.state.mac, &now) else {
            return;
        };
        if is_same_mac(was, now) || was.bytes().len() != now.bytes().len() {
            return;
        }
        let mac = match (now.bytes().get(..12), was.bytes().get(12..20)) {
            (Some(of_kernel), Some(guid)) => [of_kernel, guid].concat(),
            _ => was.bytes().to_vec(),
        };
        // Most drivers take none while the link is up (`eth_prepare_mac_addr_change()`), and the kernel
        // changes the address before the flags (`do_setlink()`).
        if self.link.is_up() {
            self.change("MAC address", was, &Change::down());
        }
        self.set("MAC address", was, LinkAttribute::Address(mac));
    }

    fn restore_flags(&mut self, among: LinkFlags) {
        let was = LinkFlags::from_bits_retain(self.before.state.flags) & among;
        if self.link.flags & among != was {
            let change = Change {
                flags: Some((was, among)),
                ..Change::default()
            };
            self.change("flags", format_args!("{was:?}"), &change);
        }
    }

    fn restore_sysctls(&mut self) {
        let (proc, name) = (&self.host.proc, &self.link.name);
        let now = sysctl::read_all(proc, name);
        let now = now.unwrap_or_else(|e| {
            self.report.attempt(Err(e));
            Default::default()
        });
        for one @ Sysctl { key, value } in &self.before.state.config.sysctls {
            if now.get(&**key).is_none_or(|now| now != value) {
                let (group, file) = one.group_and_file();
                let written = sysctl::write(proc, group, name, file, value);
                self.report.attempt(written);
            }
        }
    }

    fn restore_vf(&mut self) {
        let Some(vf) = &self.before.vf else {
            return;
        };
        let (refused, kept) = vf.undo(self.host, self.socket);
        if kept.is_some() {
            self.report.vf_kept = kept;
        }
        self.report.warnings.extend(refused);
    }

    fn restore_altnames(&mut self) {
        let was = &self.before.state.altnames;
        for name in self.link.altnames.iter().filter(|name| !was.contains(name)) {
            let removed = link::remove_altname(self.socket, &self.link, name);
            self.report.attempt(removed);
        }
        for name in was {
            let added = link::add_altname(self.socket, &self.link, name);
            self.report.attempt(added);
        }
    }

    /// Those that exist, too: one may differ in parts. A renaming gives addresses another label
    /// (`inetdev_changename()`), which replacing them does not change.
    fn restore_addresses(&mut self) {
        let (was, index) = (&self.before.state.config.addresses, self.link.index);
        let now = address::list(self.socket, index).unwrap_or_else(|e| {
            self.report.attempt(Err(e));
            Vec::new()
        });
        for now in &now {
            let same = was.iter().find(|was| replay::is_same(was, now));
            if same.is_some_and(|was| replay::label(was) != replay::label(now)) {
                let what = format!("restore the label of {}", display::address(now));
                self.report
                    .attempt(address::delete(self.socket, &what, now));
            }
        }
        let passed = passed_since(self.before).unwrap_or_else(|e| {
            self.report.attempt(Err(e));
            0
        });
        let name = &self.before.name;
        for message in was {
            let text = display::address(message);
            match replay::aged(&replay::address(message, index), passed) {
                Some(address) => {
                    let what = format!("restore address {text} of {name}");
                    let done = address::replace(self.socket, &what, &address);
                    self.report.attempt(done);
                }
                None => self.report.notes.push(format!(
                    "address {text} of {name} is not restored: its lifetime is over"
                )),
            }
        }
    }

    fn what(&self, key: &str, value: impl fmt::Display) -> String {
        format!("restore {key} {value} of {}", self.before.name)
    }

    fn set(&mut self, key: &str, value: impl fmt::Display, attribute: LinkAttribute) {
        let what = self.what(key, value);
        let set = link::set(self.socket, what, self.link.index, vec![attribute]);
        self.written(set);
    }

    fn change(&mut self, key: &str, value: impl fmt::Display, change: &Change<'_>) {
        let what = self.what(key, value);
        let changed = link::change(self.socket, what, self.link.index, change);
        self.written(changed);
    }

    /// Reads the link again, of which some values follow from others.
    fn written(&mut self, done: netlink::Result<()>) {
        self.report.attempt(done);
        match link::get(self.socket, By::Index(self.link.index)) {
            Ok(Some(now)) => self.link = now,
            // What is written next is refused.
            Ok(None) => {}
            Err(e) => self.report.attempt(Err(e)),
        }
    }
}

/// How many seconds of its addresses' lifetimes have passed since a snapshot was taken. Those of
/// static addresses begin again: the address was in use as the node's, and what renews it on the host
/// could not.
fn passed_since(before: &Snapshot) -> netlink::Result<u64> {
    if before.static_addresses {
        return Ok(0);
    }
    let now = clock::since_boot()?.as_secs();
    Ok(now.saturating_sub(before.taken_at))
}
