//! A macvlan, an ipvlan, or a partition of an InfiniBand port.
//!
//! Name, MAC address and index are chosen before the link exists: the record names it whenever the
//! ADD is cut off, and nothing of it is patched. Its pod can rename it, but not change its kind or what
//! it is on; a pod that moves it to another namespace and back under another index hides it from DEL, as
//! one that leaves it there does.

use std::{
    fmt,
    hash::Hasher,
    thread,
    time::{Duration, Instant},
};

use cni_wire::Code;
use fnv::FnvHasher;
use netlink::{
    Namespace, Socket,
    link::{self, By, Change, Link, NewLink},
};
use netlink_packet_route::link::{
    InfoData, InfoIpVlan, InfoIpoib, InfoKind, InfoMacVlan, IpVlanMode, LinkInfo, MacVlanMode,
};
use serde::{Deserialize, Serialize};

use super::{Interface, Part};
use crate::{
    detach::living,
    error::{Error, Kind},
    journal::{Record, Slot},
    netdev::identity::LinkScope,
    node::{HostNetns, Node},
};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Child {
    pub interface: Interface,
    pub link: ChildLink,
    pub parent: Parent,
    /// Its index in the pod.
    pub index: u32,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub slots: Vec<Slot>,
    /// Whether it may be without a carrier: its partition can become active later
    /// (`allow.inactivePartitions`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub may_lack_carrier: bool,
    /// Why it will have no carrier, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

/// The netdev of the host that a child is on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Parent {
    pub name: String,
    pub index: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    rename_all = "camelCase",
    rename_all_fields = "camelCase",
    deny_unknown_fields
)]
pub enum ChildLink {
    /// With a MAC address of its own.
    Macvlan {
        mode: MacvlanMode,
        /// Packets that the broadcast queue holds; none for the kernel's choice.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        broadcast_queue: Option<u32>,
    },
    /// With its parent's MAC address.
    Ipvlan { mode: IpvlanMode },
    Ipoib {
        /// With the membership bit.
        pkey: u16,
        mode: IpoibMode,
        /// Whether user space may join multicast groups.
        user_multicast: bool,
    },
}

cni_wire::words! {
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub enum MacvlanMode {
        #[default]
        Bridge = "bridge",
        Private = "private",
        Vepa = "vepa",
        Passthru = "passthru",
    }
}

cni_wire::words! {
    /// In the order of the kernel's numbers.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub enum IpvlanMode {
        #[default]
        L2 = "l2",
        L3 = "l3",
        L3s = "l3s",
    }
}

cni_wire::words! {
    /// In the order of the kernel's numbers.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum IpoibMode {
        Datagram = "datagram",
        Connected = "connected",
    }
}

impl ChildLink {
    /// The kernel's name of the kind, which is `attach` of the network.
    pub fn kind(self) -> &'static str {
        match self {
            ChildLink::Macvlan { .. } => "macvlan",
            ChildLink::Ipvlan { .. } => "ipvlan",
            ChildLink::Ipoib { .. } => "ipoib",
        }
    }

    /// For a request to the kernel (`IFLA_LINKINFO`).
    fn info(self) -> Vec<LinkInfo> {
        let (kind, data) = match self {
            ChildLink::Macvlan {
                mode,
                broadcast_queue,
            } => {
                let mode = match mode {
                    MacvlanMode::Bridge => MacVlanMode::Bridge,
                    MacvlanMode::Private => MacVlanMode::Private,
                    MacvlanMode::Vepa => MacVlanMode::Vepa,
                    MacvlanMode::Passthru => MacVlanMode::Passthrough,
                };
                let mut data = vec![InfoMacVlan::Mode(mode)];
                data.extend(broadcast_queue.map(InfoMacVlan::BcQueueLen));
                (InfoKind::MacVlan, InfoData::MacVlan(data))
            }
            ChildLink::Ipvlan { mode } => {
                let mode = InfoIpVlan::Mode(IpVlanMode::from(mode as u16));
                (InfoKind::IpVlan, InfoData::IpVlan(vec![mode]))
            }
            ChildLink::Ipoib {
                pkey,
                mode,
                user_multicast,
            } => {
                let data = vec![
                    InfoIpoib::Pkey(pkey),
                    InfoIpoib::Mode((mode as u16).into()),
                    InfoIpoib::UmCast(user_multicast.into()),
                ];
                (InfoKind::Ipoib, InfoData::Ipoib(data))
            }
        };
        vec![LinkInfo::Kind(kind), LinkInfo::Data(data)]
    }
}

/// The name of a child of this pod until it gets its own, where it cannot be made with that: 15 bytes.
pub(super) fn temporary_name(netns_inode: u64, ifname: &str) -> String {
    let mut hasher = FnvHasher::default();
    hasher.write(&netns_inode.to_le_bytes());
    hasher.write(ifname.as_bytes());
    format!("rdma-tmp{:07x}", hasher.finish() & 0xfff_ffff)
}

impl Child {
    /// Makes the link; it is in the pod then, down and without addresses.
    ///
    /// # Errors
    /// The kernel's refusal, with what can be done about it; code 11 where the index is taken.
    pub fn apply(
        &self,
        host: &mut HostNetns,
        pod: &Namespace,
        inside: &mut Socket,
    ) -> Result<Link, Error> {
        let name = self.interface.name.as_str();
        let temporary = temporary_name(pod.id().inode, name);
        let made = match self.link {
            // The kernel makes IPoIB children beside their parent only.
            ChildLink::Ipoib { .. } => {
                self.create(&mut host.socket, &temporary, None)?;
                let change = Change {
                    netns: Some(pod),
                    new_index: Some(self.index),
                    ..Change::name(name.as_bytes())
                };
                let what = format!("move {temporary} into {} as {name}", pod.path().display());
                match link::change(&mut host.socket, what, self.index, &change) {
                    // Of an index (`dev_change_net_namespace()`).
                    Err(e) if e.is(libc::EBUSY) => return Err(self.taken(&e)),
                    moved => moved?,
                }
                self.get(inside)?
            }
            // From inside the pod: the final name at once, whatever the host calls its own.
            ChildLink::Macvlan { .. } | ChildLink::Ipvlan { .. } => {
                let parent = Some(link::namespace_number(inside, &host.namespace)?);
                match self.create(inside, name, parent) {
                    // Kernels before 6.15 make a link in its parent's namespace and move it from
                    // there (`rtnl_newlink()`), so that a name of the host's stands in the way even
                    // of a link asked for from inside the pod.
                    Err(e) if e.kind == Kind::NameTaken => {
                        self.create(inside, &temporary, parent)?;
                        let what = format!("name {temporary} {name}");
                        link::change(inside, what, self.index, &Change::name(name.as_bytes()))?;
                        self.get(inside)?
                    }
                    made => made?,
                }
            }
        };
        // The driver of IPoIB gives a new child an MTU by its mode, whatever was asked for.
        self.interface.set(inside, &made, self.interface.mtu)?;
        Ok(made)
    }

    fn create(
        &self,
        socket: &mut Socket,
        name: &str,
        parent_netns: Option<i32>,
    ) -> Result<Link, Error> {
        let new = NewLink {
            name,
            index: self.index,
            kind: self.link.kind(),
            info: self.link.info(),
            parent: self.parent.index,
            parent_netns,
            mtu: self.interface.mtu,
            mac: self.interface.mac.as_ref().map(|mac| mac.bytes().to_vec()),
        };
        let made = link::create(socket, &new).map_err(|e| self.explain(&e))?;
        made.ok_or_else(|| self.vanished())
    }

    fn get(&self, inside: &mut Socket) -> Result<Link, Error> {
        link::get(inside, By::Index(self.index))?.ok_or_else(|| self.vanished())
    }

    fn vanished(&self) -> Error {
        let what = format!("{} went away while it was made", self.interface.name);
        Error::new(Code::TryAgain, what)
    }

    fn taken(&self, error: &netlink::Error) -> Error {
        let what = format!("{error} (on {})", self.parent.name);
        Error::of(Kind::NameTaken, what)
            .with_details("name or index is taken in the pod or on the host; try again")
    }

    /// What the person on call can do about a refusal of the kernel.
    fn explain(&self, error: &netlink::Error) -> Error {
        let (parent, kind) = (&self.parent.name, self.link.kind());
        let explained = Error::new(Code::Kernel, format!("{error} (on {parent})"));
        match error.errno() {
            Some(libc::EEXIST) => self.taken(error),
            Some(libc::EBUSY) => explained.with_details(format!(
                "{parent} is in other use: macvlan and ipvlan children exclude each other, passthru \
                 excludes all others, and a port of a bridge or bond carries none"
            )),
            Some(libc::ENODEV) => Error::new(Code::TryAgain, format!("{parent} went away: {error}"))
                .with_details("another pod was quicker to take it, or it was removed; try again"),
            Some(libc::EOPNOTSUPP) => explained.with_details(format!(
                "this kernel has no {kind} links, or its module is not loaded"
            )),
            _ => explained,
        }
    }

    /// Names the child of another kind that keeps the kernel from making this one: both want the only
    /// handler of received frames that a netdev has (`netdev_rx_handler_register()`). The journal is
    /// read for that only after a refusal.
    pub(crate) fn name_rival(&self, node: &mut Node, refused: Error) -> Error {
        let (kind, parent) = (self.link.kind(), &self.parent.name);
        match self.rival(node) {
            Ok(Some((other, owner))) if other != kind => Error::new(
                Code::InvalidConfig,
                format!(
                    "attach {kind} on {parent} is refused: it carries {other} children ({owner}), and \
                     a netdev carries children of one of these kinds"
                ),
            )
            .with_details(format!("set attach to {other}, or name another netdev"))
            .with_details(refused.to_string()),
            _ => refused,
        }
    }

    fn rival(&self, node: &mut Node) -> Result<Option<(String, String)>, Error> {
        for link in link::list(&mut node.netns.socket)? {
            if let Some(kind @ (InfoKind::MacVlan | InfoKind::IpVlan)) = &link.kind
                && link.stands_on(self.parent.index)
            {
                return Ok(Some((
                    kind.to_string(),
                    format!("{} of the host", link.name),
                )));
            }
        }
        let of_pod = child_on(node, self.parent.index)?;
        Ok(of_pod.map(|(kind, owner)| (kind.to_owned(), owner)))
    }

    /// Removes the link from its pod, if that is there, or from the host.
    ///
    /// The kernel makes a child of IPoIB beside its parent, so an ADD that was killed leaves it there.
    /// It deletes other children with their namespace, but gives one of IPoIB to the host, down and
    /// under any name (`netns_refund` of `ipoib_link_ops`), some time after the namespace is gone:
    /// `timeout` is how long it may take.
    pub(crate) fn undo(
        &self,
        node: &mut Node,
        record: &Record,
        pod: Option<&Namespace>,
        timeout: Duration,
    ) -> Result<(), Error> {
        if let Some(pod) = pod {
            let host = &node.netns.namespace;
            let mut inside = pod.socket(host)?;
            let scope = LinkScope::of(&mut inside, pod, host)?;
            if self.delete(&mut inside, scope)? {
                return Ok(());
            }
        }
        let is_ipoib = matches!(self.link, ChildLink::Ipoib { .. });
        let started = Instant::now();
        loop {
            if self.delete(&mut node.netns.socket, LinkScope::Host)? {
                return Ok(());
            }
            if pod.is_some() || !is_ipoib || started.elapsed() >= timeout {
                break;
            }
            thread::sleep(Duration::from_millis(20));
        }
        let (kind, name, parent) = (self.link.kind(), &self.interface.name, &self.parent.name);
        let owner = record.owner();
        if pod.is_some() {
            node.log.info(format_args!(
                "{kind} {name} on {parent} is gone from {owner}; nothing to remove"
            ));
        } else if is_ipoib {
            node.log.warn(format_args!(
                "the IPoIB child of {owner} on {parent} is not on the host {timeout:?} after its \
                 pod's network namespace ended: its pod deleted it, or something still holds the \
                 namespace. If the child appears later, delete it: ip link delete NAME (it had index \
                 {})",
                self.index
            ));
        }
        Ok(())
    }

    /// Deletes the link in the namespace of `socket`. False where it is not there.
    fn delete(&self, socket: &mut Socket, scope: LinkScope) -> netlink::Result<bool> {
        match link::get(socket, By::Index(self.index))? {
            Some(link) if self.is(&link, scope) => link::delete(socket, &link).map(|()| true),
            _ => Ok(false),
        }
    }

    /// Whether the pod still has it.
    ///
    /// # Errors
    /// Code 104: it is gone, or another link has its name.
    pub fn check(&self, link: &Link) -> Result<(), Error> {
        match self.is_like(link) {
            true => Ok(()),
            false => Err(Error::new(
                Code::Differs,
                format!(
                    "{} is not the {} on {} that was made for the pod",
                    link.name,
                    self.link.kind(),
                    self.parent.name
                ),
            )),
        }
    }

    fn is_like(&self, link: &Link) -> bool {
        let kind = link.kind.as_ref().map(ToString::to_string);
        // Where both indexes are one number and both links are in one namespace, or of IPoIB, the
        // kernel leaves it out (`nla_put_iflink()`).
        let parent = link.parent.unwrap_or(link.index);
        link.index == self.index
            && kind.as_deref() == Some(self.link.kind())
            && parent == self.parent.index
    }

    /// Whether a link of a namespace is the child. Pure.
    pub(crate) fn is(&self, link: &Link, scope: LinkScope) -> bool {
        // IPoIB does not report the namespace of the link below (`ipoib_get_link_ops()`).
        let is_ipoib = matches!(self.link, ChildLink::Ipoib { .. });
        self.is_like(link) && (scope.is_on_host(link) || is_ipoib && link.parent_netns.is_none())
    }
}

/// A child that this plugin made on the netdev with this index, in a namespace that is still there: its
/// kind and its owner, as messages name them.
///
/// # Errors
/// The journal cannot be listed, or the namespace of such a child cannot be read.
pub fn child_on(node: &Node, index: u32) -> Result<Option<(&'static str, String)>, Error> {
    for (_, record) in node.records()? {
        let mut children = record.parts.iter().filter_map(Part::child);
        let Some(child) = children.find(|child| child.parent.index == index) else {
            continue;
        };
        if node.is_of_this_boot(&record.boot) && living(&record)?.is_some() {
            return Ok(Some((child.link.kind(), record.owner())));
        }
    }
    Ok(None)
}

impl fmt::Display for Child {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, parent) = (self.link.kind(), &self.parent.name);
        write!(f, "make a {kind} with index {} on {parent}", self.index)
    }
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::Emitable;

    use super::*;

    const POD: LinkScope = LinkScope::Pod { host: Some(0) };

    const MACVLAN: ChildLink = ChildLink::Macvlan {
        mode: MacvlanMode::Bridge,
        broadcast_queue: None,
    };
    const IPOIB: ChildLink = ChildLink::Ipoib {
        pkey: 0x8001,
        mode: IpoibMode::Datagram,
        user_multicast: true,
    };

    fn child(link: ChildLink, index: u32) -> Child {
        Child {
            interface: Interface {
                name: "net1".into(),
                ..Interface::default()
            },
            link,
            parent: Parent {
                name: "ens1f0".into(),
                index: 3,
            },
            index,
            slots: Vec::new(),
            may_lack_carrier: false,
            warning: None,
        }
    }

    fn link(index: u32, kind: InfoKind) -> Link {
        Link {
            index,
            name: "evil".into(),
            kind: Some(kind),
            parent: Some(3),
            parent_netns: Some(0),
            ..Link::default()
        }
    }

    #[test]
    fn a_temporary_name_fits_and_is_of_one_interface() {
        let name = temporary_name(4_026_532_567, "net1");
        assert_eq!(name, "rdma-tmpb46d232");
        assert_ne!(name, temporary_name(4_026_532_568, "net1"));
        assert_ne!(name, temporary_name(4_026_532_567, "net2"));
    }

    #[test]
    fn another_index_kind_or_parent_is_not_the_child() {
        let ours = child(MACVLAN, 5);
        let of = |change: &dyn Fn(&mut Link)| {
            let mut one = link(5, InfoKind::MacVlan);
            change(&mut one);
            ours.is(&one, POD)
        };
        assert!(of(&|_| {}), "whatever its name");
        assert!(!of(&|link| link.index = 6));
        assert!(!of(&|link| link.kind = Some(InfoKind::IpVlan)));
        assert!(!of(&|link| link.kind = None));
        assert!(!of(&|link| link.parent = Some(4)));
        assert!(!of(&|link| link.parent_netns = Some(1)));
        assert!(!of(&|link| link.parent_netns = None));
        let unnumbered = LinkScope::Pod { host: None };
        assert!(
            !ours.is(&link(5, InfoKind::MacVlan), unnumbered),
            "no number, no link on one of the host"
        );
    }

    #[test]
    fn an_ipoib_child_is_known_by_the_little_that_is_reported() {
        let ours = child(IPOIB, 3);
        let reported = |index| Link {
            parent_netns: None,
            parent: None,
            ..link(index, InfoKind::Ipoib)
        };
        for scope in [POD, LinkScope::Host] {
            assert!(ours.is(&reported(3), scope));
            assert!(!ours.is(&reported(4), scope));
        }
    }

    #[test]
    fn a_child_reads_back_from_the_journal() {
        for link in [
            MACVLAN,
            IPOIB,
            ChildLink::Ipvlan {
                mode: IpvlanMode::L3s,
            },
        ] {
            let child = child(link, 1 << 20);
            let text = serde_json::to_string(&child).unwrap();
            assert_eq!(
                serde_json::from_str::<Child>(&text).unwrap(),
                child,
                "{text}"
            );
        }
    }

    /// `IFLA_LINKINFO` as ip(8) of iproute2 6.1 sends it, by strace: kind and data.
    fn captured(kind: &str, data: &[u8]) -> Vec<u8> {
        let attribute = |number: u16, value: &[u8]| {
            let mut bytes = u16::try_from(value.len() + 4)
                .unwrap()
                .to_ne_bytes()
                .to_vec();
            bytes.extend(number.to_ne_bytes());
            bytes.extend(value);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            bytes
        };
        // IFLA_INFO_KIND, with the text's end, which ip leaves out and the kernel does not mind
        // (`nla_strscpy()`); IFLA_INFO_DATA.
        let kind = format!("{kind}\0");
        [attribute(1, kind.as_bytes()), attribute(2, data)].concat()
    }

    fn sent(child: ChildLink) -> Vec<u8> {
        let infos = child.info();
        let mut bytes = Vec::new();
        for info in &infos {
            let mut buffer = vec![0; info.buffer_len()];
            info.emit(&mut buffer);
            bytes.extend(buffer);
        }
        bytes
    }

    #[test]
    fn children_are_asked_for_as_ip_does() {
        let ipoib = |pkey, mode, user_multicast| ChildLink::Ipoib {
            pkey,
            mode,
            user_multicast,
        };
        // type ipoib pkey 0x8001 mode datagram umcast 1
        let datagram = b"\x06\0\x01\0\x01\x80\0\0\x06\0\x02\0\0\0\0\0\x06\0\x03\0\x01\0\0\0";
        assert_eq!(
            sent(ipoib(0x8001, IpoibMode::Datagram, true)),
            captured("ipoib", datagram)
        );
        // type ipoib pkey 0x9002 mode connected umcast 0
        let connected = b"\x06\0\x01\0\x02\x90\0\0\x06\0\x02\0\x01\0\0\0\x06\0\x03\0\0\0\0\0";
        assert_eq!(
            sent(ipoib(0x9002, IpoibMode::Connected, false)),
            captured("ipoib", connected)
        );
        // type ipvlan mode l3s; ip sends flags of zero with it, which are the default.
        let l3s = b"\x06\0\x01\0\x02\0\0\0";
        let child = ChildLink::Ipvlan {
            mode: IpvlanMode::L3s,
        };
        assert_eq!(sent(child), captured("ipvlan", l3s));
    }
}
