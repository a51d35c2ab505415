//! A kernel for tests: it keeps links, addresses, routes, rules and RDMA devices of a few namespaces,
//! does what netlink asks, and writes down each request in words. No root, no namespaces.
//!
//! It is for code that takes sockets and namespaces, such as apply, undo and check. It does no more than
//! that code needs: no traffic, no sysctls (give a temporary directory as `/proc`), no packet sockets,
//! no BPF. What the kernel really does is proved in namespaces, by the cases of `tests/`.
//!
//! ```
//! # use netlink::{fake::Kernel, link::{self, Change, Link}};
//! let kernel = Kernel::default();
//! let (host, pod) = (kernel.namespace("host"), kernel.namespace("pod"));
//! kernel.add_link("host", &Link { index: 3, name: "ens1f0".into(), hardware: 1, ..Link::default() });
//! let mut socket = host.socket(&host)?;
//! let moved = Change { netns: Some(&pod), ..Change::name(b"net1") };
//! link::change(&mut socket, "move ens1f0", 3, &moved)?;
//! assert_eq!(kernel.changes(), ["host: link set dev 3 netns pod name net1"]);
//! kernel.refuse("pod: link delete", libc::EBUSY, "in use");
//! assert!(link::delete(&mut pod.socket(&host)?, &kernel.link("pod", "net1")).is_err());
//! # Ok::<(), netlink::Error>(())
//! ```
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_possible_wrap,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::cast_possible_truncation,
    reason = "tests only"
)]

use std::{
    collections::{BTreeMap, VecDeque},
    fs::File,
    io,
    net::IpAddr,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use hca::MacAddress;
use netlink_packet_core::{
    NLM_F_ACK_TLVS, NLM_F_CREATE, NLM_F_DUMP, NLM_F_ECHO, NLM_F_EXCL, NetlinkSerializable,
};
use netlink_packet_route::{
    RouteNetlinkMessage, address::AddressMessage, link::LinkAttribute, link::LinkInfo,
    link::LinkMessage, neighbour::NeighbourMessage, route::RouteMessage, rule::RuleMessage,
};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::{
    Name, Namespace, Socket,
    attribute::{self, Raw, number, put, word},
    link::{self, By, Link},
    netns::Id,
    socket::{Peer, parse_leniently},
};

/// A machine of several namespaces. Clones are the same machine.
#[derive(Clone, Debug, Default)]
pub struct Kernel(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    objects: Vec<Object>,
    /// By the descriptors of [`Namespace`]s.
    namespaces: BTreeMap<i32, String>,
    /// Of a namespace, the names of the others that it has numbers for.
    numbers: BTreeMap<String, Vec<String>>,
    requests: Vec<String>,
    refusals: Vec<(String, i32, String)>,
}

/// Something that a namespace has: the message by which the kernel tells of it.
#[derive(Clone, Debug)]
struct Object {
    namespace: String,
    kind: u16,
    header: Vec<u8>,
    attributes: Vec<(u16, Vec<u8>)>,
}

/// A namespace of the machine, as a socket asks it.
#[derive(Debug)]
pub(crate) struct Port {
    kernel: Kernel,
    namespace: String,
    answers: Mutex<VecDeque<Vec<u8>>>,
}

const NEWLINK: u16 = 16;
const NEWADDR: u16 = 20;
const NEWROUTE: u16 = 24;
const NEWNEIGH: u16 = 28;
const NEWRULE: u16 = 32;
const NEWQDISC: u16 = 36;
const NEWNSID: u16 = 88;
const NEWNEXTHOP: u16 = 104;
const NEWLINKPROP: u16 = 108;
const RDMA_DEVICE: u16 = 5 << 10 | 1;
const RDMA_SET: u16 = 5 << 10 | 2;
const RDMA_CHARDEV: u16 = 5 << 10 | 15;

const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_LINK: u16 = 5;
const IFLA_MASTER: u16 = 10;
const IFLA_LINKINFO: u16 = 18;
const IFLA_IFALIAS: u16 = 20;
const IFLA_AF_SPEC: u16 = 26;
const IFLA_NET_NS_FD: u16 = 28;
const IFLA_EXT_MASK: u16 = 29;
const IFLA_LINK_NETNSID: u16 = 37;
const IFLA_NEW_IFINDEX: u16 = 49;
const IFLA_PROP_LIST: u16 = 52;
const IFLA_ALT_IFNAME: u16 = 53;

/// Messages of a kind: the length of their header, and what they are of.
fn family(kind: u16) -> (usize, u16, &'static str) {
    match kind {
        16..=19 => (16, NEWLINK, "link"),
        20..=23 => (8, NEWADDR, "address"),
        24..=27 => (12, NEWROUTE, "route"),
        28..=31 => (12, NEWNEIGH, "neigh"),
        32..=35 => (12, NEWRULE, "rule"),
        36..=39 => (20, NEWQDISC, "qdisc"),
        88..=91 => (4, NEWNSID, "netns number"),
        104..=107 => (8, NEWNEXTHOP, "nexthop"),
        108..=110 => (16, NEWLINKPROP, "altname"),
        RDMA_DEVICE | RDMA_SET => (0, RDMA_DEVICE, "rdma"),
        RDMA_CHARDEV => (0, RDMA_CHARDEV, "chardev"),
        other => panic!("the fake kernel does not know messages of type {other}"),
    }
}

impl Kernel {
    /// A namespace, new or there, with a loopback link.
    pub fn namespace(&self, name: &str) -> Namespace {
        let file = File::from(memfd_create(name, MFdFlags::MFD_CLOEXEC).unwrap());
        let there = self.state().namespaces.values().any(|known| known == name);
        if !there {
            let lo = Link {
                index: 1,
                name: "lo".into(),
                hardware: 772,
                ..Link::default()
            };
            self.add_link(name, &lo);
        }
        let inode = name
            .bytes()
            .fold(0, |hash: u64, byte| hash.rotate_left(8) ^ u64::from(byte));
        let namespace = Namespace {
            file,
            id: Id { device: 0, inode },
            path: Path::new("/run/netns").join(name),
            fake: Some((self.clone(), name.to_owned())),
        };
        let mut state = self.state();
        state.namespaces.insert(namespace.fd(), name.to_owned());
        namespace
    }

    pub(crate) fn socket(&self, namespace: &str) -> Socket {
        Socket::to(Box::new(Port {
            kernel: self.clone(),
            namespace: namespace.to_owned(),
            answers: Mutex::default(),
        }))
    }

    /// Adds a link as it is, without a request.
    pub fn add_link(&self, namespace: &str, link: &Link) {
        let mut header = [0; 16];
        put(&mut header, 2, &link.hardware.to_ne_bytes());
        put(&mut header, 4, &link.index.to_ne_bytes());
        put(&mut header, 8, &link.flags.bits().to_ne_bytes());
        let mut object = Object {
            namespace: namespace.to_owned(),
            kind: NEWLINK,
            header: header.to_vec(),
            attributes: Vec::new(),
        };
        object.set(IFLA_IFNAME, &link.name.to_attribute());
        object.set(IFLA_ADDRESS, &link.mac);
        object.set(IFLA_MTU, &link.mtu.to_ne_bytes());
        // IFLA_OPERSTATE, IF_OPER_UP or IF_OPER_DOWN.
        object.set(16, &[if link.carrier { 6 } else { 2 }]);
        let numbers = [
            (13, Some(link.tx_queue_length)),
            (51, Some(link.max_mtu)),
            (IFLA_LINK, link.parent),
            (IFLA_LINK_NETNSID, link.parent_netns.map(i32::cast_unsigned)),
            (IFLA_MASTER, link.controller),
        ];
        for (kind, value) in numbers {
            let _ = value.map(|value| object.set(kind, &value.to_ne_bytes()));
        }
        let texts = [(56, &link.bus_device), (57, &link.bus), (38, &link.port)];
        for (kind, text) in texts {
            let text = text.as_deref().map(Name::from);
            let _ = text.map(|text| object.set(kind, &text.to_attribute()));
        }
        if let Some(alias) = &link.alias {
            object.set(IFLA_IFALIAS, &alias.to_attribute());
        }
        if !link.permanent_mac.is_empty() {
            object.set(54, &link.permanent_mac);
        }
        let names = (link.altnames.iter()).fold(Raw::default(), |list, name| {
            list.with(IFLA_ALT_IFNAME, &name.to_attribute())
        });
        object.set(IFLA_PROP_LIST, names.as_bytes());
        if let Some(kind) = &link.kind {
            let data = (link.info.iter()).fold(Raw::default(), |data, (kind, value)| {
                data.with(*kind, value)
            });
            let kind = Name::from(kind.to_string().as_str());
            let info = Raw::default().with(1, &kind.to_attribute()).nest(2, &data);
            object.set(IFLA_LINKINFO, info.as_bytes());
        }
        self.state().objects.push(object);
    }

    /// Adds an address, a route, a rule or a neighbour as it is: `RouteNetlinkMessage::NewAddress` and
    /// so on.
    pub fn add(&self, namespace: &str, message: &RouteNetlinkMessage) {
        let mut payload = vec![0; NetlinkSerializable::buffer_len(message)];
        message.serialize(&mut payload);
        let object = Object::new(namespace, message.message_type(), &payload);
        self.state().objects.push(object);
    }

    /// Adds an RDMA device with a verbs node.
    pub fn add_rdma(&self, namespace: &str, index: u32, name: &str, verbs: (&str, u64)) {
        let index = Raw::default().with(1, &index.to_ne_bytes());
        let device = index.clone().with(2, &Name::from(name).to_attribute());
        let node = index
            .with(70, &Name::from(verbs.0).to_attribute())
            .with(72, &verbs.1.to_ne_bytes());
        let objects = [(RDMA_DEVICE, device), (RDMA_CHARDEV, node)];
        let objects = objects.map(|(kind, raw)| Object::new(namespace, kind, raw.as_bytes()));
        self.state().objects.extend(objects);
    }

    /// Refuses requests whose words, as in [`Kernel::requests`], contain `words`.
    pub fn refuse(&self, words: &str, errno: i32, text: &str) {
        let refusal = (words.to_owned(), errno, text.to_owned());
        self.state().refusals.push(refusal);
    }

    /// Refuses nothing any longer.
    pub fn refuse_nothing(&self) {
        self.state().refusals.clear();
    }

    /// All requests, in order, as `NAMESPACE: OBJECT VERB ...`.
    pub fn requests(&self) -> Vec<String> {
        self.state().requests.clone()
    }

    /// The requests that change something.
    pub fn changes(&self) -> Vec<String> {
        let all = self.requests().into_iter();
        let reads = [" get", " list"];
        all.filter(|request| !reads.iter().any(|verb| request.contains(verb)))
            .collect()
    }

    /// A link that a namespace has, by its name.
    pub fn link(&self, namespace: &str, name: &str) -> Link {
        let found = link::get(&mut self.socket(namespace), By::Name(name.as_bytes())).unwrap();
        self.state().requests.pop();
        found.unwrap_or_else(|| panic!("{namespace} has no link {name}"))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Namespace {
    pub(crate) fn is_fake(&self) -> bool {
        self.fake.is_some()
    }
}

impl Peer for Port {
    fn send(&self, request: &[u8]) -> io::Result<()> {
        let kind = u16::from_ne_bytes([request[4], request[5]]);
        let flags = u16::from_ne_bytes([request[6], request[7]]);
        let mut state = self.kernel.state();
        let asked = Object::new(&self.namespace, kind, &request[16..]);
        let words = state.words(&asked, flags);
        state.requests.push(words.clone());
        let mut refusals = state.refusals.iter();
        let refused = refusals.find(|(part, _, _)| words.contains(part));
        let done = match refused {
            Some((_, errno, text)) => Err((*errno, text.clone())),
            None => state
                .act(&asked, flags)
                .map_err(|errno| (errno, String::new())),
        };
        let is_dump = flags & NLM_F_DUMP == NLM_F_DUMP;
        let is_get = kind & 3 == 2 || kind == RDMA_CHARDEV;
        let mut answers = self.answers.lock().unwrap();
        let mut answer = |kind: u16, flags: u16, payload: &[u8]| {
            let length = (16 + payload.len()) as u32;
            let mut message = length.to_ne_bytes().to_vec();
            message.extend(kind.to_ne_bytes());
            message.extend(flags.to_ne_bytes());
            message.extend(&request[8..16]);
            message.extend(payload);
            answers.push_back(message);
        };
        // NLMSG_DONE, or NLMSG_ERROR with the header of the request.
        let (last, between) = if is_dump { (3, 0) } else { (2, 16) };
        match done {
            Ok(objects) => {
                for object in &objects {
                    answer(object.kind, 0, &object.payload());
                }
                if is_dump || !is_get || flags & netlink_packet_core::NLM_F_ACK != 0 {
                    answer(last, 0, &vec![0; 4 + between]);
                }
            }
            Err((errno, text)) => {
                let mut payload = (-errno).to_ne_bytes().to_vec();
                payload.resize(4 + between, 0);
                let text = Name::from(text.as_str()).to_attribute();
                payload.extend(Raw::default().with(1, &text).as_bytes());
                let flags = if text.len() > 1 { NLM_F_ACK_TLVS } else { 0 };
                answer(last, flags, &payload);
            }
        }
        Ok(())
    }

    fn receive(&self, buffer: &mut Vec<u8>) -> io::Result<()> {
        buffer.clear();
        let next = self.answers.lock().unwrap().pop_front();
        buffer.extend(next.expect("an answer: no request waits for one"));
        Ok(())
    }

    fn another(&self) -> io::Result<Box<dyn Peer>> {
        Ok(Box::new(Port {
            kernel: self.kernel.clone(),
            namespace: self.namespace.clone(),
            answers: Mutex::default(),
        }))
    }
}

/// What a request is answered with, or the errno.
type Done = Result<Vec<Object>, i32>;

impl State {
    fn act(&mut self, asked: &Object, flags: u16) -> Done {
        let (_, new, _) = family(asked.kind);
        let is_dump = flags & NLM_F_DUMP == NLM_F_DUMP;
        match asked.kind {
            _ if is_dump => Ok(self.matching(new, asked)),
            18 => Ok(vec![self.objects[self.link(asked)?].clone()]),
            NEWLINK if flags & NLM_F_CREATE != 0 => self.create(asked, flags),
            NEWLINK | 19 => self.set_link(asked),
            17 => {
                let link = self.link(asked)?;
                self.forget(link);
                Ok(Vec::new())
            }
            NEWLINKPROP | 109 => self.set_altnames(asked),
            NEWNSID | 90 => {
                let other =
                    self.namespaces[&number(asked.get(3).unwrap()).unwrap().cast_signed()].clone();
                let numbers = self.numbers.entry(asked.namespace.clone()).or_default();
                if asked.kind == NEWNSID {
                    numbers.push(other);
                    return Ok(Vec::new());
                }
                let known = numbers.iter().position(|name| *name == other);
                let mut answer = asked.clone();
                answer.kind = NEWNSID;
                answer.set(1, &known.map_or(-1, |number| number as i32).to_ne_bytes());
                Ok(vec![answer])
            }
            38 => match self.matching(new, asked) {
                none if none.is_empty() => Err(libc::ENOENT),
                found => Ok(found),
            },
            RDMA_CHARDEV | RDMA_SET => self.rdma(asked),
            // RTM_NEW* and RTM_DEL* of addresses, routes, rules and neighbours.
            kind if kind & 3 == 0 => {
                if flags & NLM_F_EXCL != 0 && self.objects.iter().any(|o| o.is_like(asked)) {
                    return Err(libc::EEXIST);
                }
                self.objects.retain(|object| !object.is_like(asked));
                self.objects.push(asked.clone());
                Ok(Vec::new())
            }
            _ => {
                let is_it = |object: &Object| object.kind == new && object.has_all(asked);
                let Some(at) = self.objects.iter().position(is_it) else {
                    let missing = [(NEWADDR, libc::EADDRNOTAVAIL), (NEWROUTE, libc::ESRCH)];
                    let errno = missing.iter().find(|(kind, _)| *kind == new);
                    return Err(errno.map_or(libc::ENOENT, |(_, errno)| *errno));
                };
                self.objects.remove(at);
                Ok(Vec::new())
            }
        }
    }

    /// The objects that a dump with this filter shows.
    fn matching(&self, kind: u16, filter: &Object) -> Vec<Object> {
        let all = self.objects.iter();
        let of_kind = all.filter(|o| o.kind == kind && o.namespace == filter.namespace);
        let is_shown = |object: &&Object| {
            // Families, links by index, and in attributes the controller, the table or the link.
            let family = filter.header.first().copied().unwrap_or(0);
            let at = filter.index_at();
            let index = at.map_or(0, |at| word(&filter.header, at));
            let parent = if kind == NEWQDISC { 12 } else { 0 };
            let mut filters = filter
                .attributes
                .iter()
                .filter(|(k, _)| *k != IFLA_EXT_MASK);
            (family == 0 || object.header[0] == family)
                && (index == 0 || at.is_some_and(|at| word(&object.header, at) == index))
                && (parent == 0 || object.header[parent..16] == filter.header[parent..16])
                && match kind {
                    NEWNEIGH => filters
                        .filter(|(k, _)| *k == 8)
                        .all(|(_, link)| word(&object.header, 4) == number(link).unwrap()),
                    _ => filters.all(|wanted| object.attributes.contains(wanted)),
                }
        };
        of_kind.filter(is_shown).cloned().collect()
    }

    /// Where the link is that a request names.
    fn link(&self, asked: &Object) -> Result<usize, i32> {
        let index = word(&asked.header, 4);
        let name = [IFLA_IFNAME, IFLA_ALT_IFNAME].map(|kind| asked.get(kind));
        let name = name.into_iter().flatten().next().map(Name::of_attribute);
        let mut objects = self.objects.iter();
        let found = objects.position(|object| {
            let is_it = match (index, &name) {
                (0, Some(name)) => object.names().contains(name),
                (index, _) => word(&object.header, 4) == index,
            };
            object.kind == NEWLINK && object.namespace == asked.namespace && is_it
        });
        found.ok_or(libc::ENODEV)
    }

    fn by(&self, namespace: &str, index: u32, name: Option<&[u8]>) -> Option<usize> {
        let mut asked = Object::new(namespace, NEWLINK, &[0; 16]);
        put(&mut asked.header, 4, &index.to_ne_bytes());
        let _ = name.map(|name| asked.set(IFLA_IFNAME, name));
        self.link(&asked).ok()
    }

    fn create(&mut self, asked: &Object, flags: u16) -> Done {
        let mut made = asked.clone();
        let name = made.get(IFLA_IFNAME).unwrap().to_vec();
        let index = word(&made.header, 4);
        let is_taken = |index| self.by(&made.namespace, index, None).is_some();
        // A clash of indexes is EEXIST here, and EBUSY in a move.
        if self.by(&made.namespace, 0, Some(&name)).is_some() || index != 0 && is_taken(index) {
            return Err(libc::EEXIST);
        }
        let index = match index {
            0 => (2..).find(|index| !is_taken(*index)).unwrap(),
            index => index,
        };
        put(&mut made.header, 4, &index.to_ne_bytes());
        if let Some(parent) = made.get(IFLA_LINK).and_then(number) {
            let namespace = match made.get(IFLA_LINK_NETNSID).and_then(number) {
                Some(number) => &self.numbers[&made.namespace][number as usize],
                None => &made.namespace,
            };
            let parent = self.by(namespace, parent, None).ok_or(libc::ENODEV)?;
            let parent = &self.objects[parent];
            put(&mut made.header, 2, &parent.header[2..4]);
            for kind in [IFLA_ADDRESS, IFLA_MTU] {
                if made.get(kind).is_none() {
                    let value = parent.get(kind).unwrap_or_default().to_vec();
                    made.set(kind, &value);
                }
            }
        }
        self.objects.push(made.clone());
        Ok(if flags & NLM_F_ECHO != 0 {
            vec![made]
        } else {
            Vec::new()
        })
    }

    fn set_link(&mut self, asked: &Object) -> Done {
        let at = self.link(asked)?;
        let mut link = self.objects[at].clone();
        let mask = word(&asked.header, 12);
        let flags = word(&link.header, 8) & !mask | word(&asked.header, 8) & mask;
        put(&mut link.header, 8, &flags.to_ne_bytes());
        for (kind, value) in &asked.attributes {
            match *kind {
                IFLA_NET_NS_FD => {
                    let descriptor = number(value).unwrap().cast_signed();
                    link.namespace = self.namespaces[&descriptor].clone();
                }
                IFLA_NEW_IFINDEX | IFLA_AF_SPEC => {}
                IFLA_IFALIAS if value.is_empty() => link.attributes.retain(|(k, _)| k != kind),
                _ => link.set(*kind, value),
            }
        }
        let old = self.objects[at].clone();
        let name = link.get(IFLA_IFNAME).unwrap();
        let same = self.by(&link.namespace, 0, Some(name));
        if same.is_some_and(|other| other != at) {
            return Err(libc::EEXIST);
        }
        if link.namespace != old.namespace {
            let is_taken = |index| self.by(&link.namespace, index, None).is_some();
            let index = match asked.get(IFLA_NEW_IFINDEX).and_then(number) {
                Some(index) if is_taken(index) => return Err(libc::EBUSY),
                Some(index) => index,
                None => Some(word(&link.header, 4))
                    .filter(|index| !is_taken(*index))
                    .or_else(|| (2..).find(|index| !is_taken(*index)))
                    .unwrap(),
            };
            put(&mut link.header, 4, &index.to_ne_bytes());
            put(&mut link.header, 8, &(flags & !1).to_ne_bytes());
            self.forget(at);
            self.objects.push(link);
        } else {
            self.objects[at] = link;
        }
        Ok(Vec::new())
    }

    /// Removes a link with its addresses, routes and neighbours.
    fn forget(&mut self, link: usize) {
        let link = self.objects.remove(link);
        let index = word(&link.header, 4);
        self.objects.retain(|object| {
            let on = match object.kind {
                NEWADDR | NEWNEIGH => word(&object.header, 4),
                NEWROUTE => object.get(4).and_then(number).unwrap_or(0),
                _ => 0,
            };
            object.namespace != link.namespace || on != index
        });
    }

    fn set_altnames(&mut self, asked: &Object) -> Done {
        let at = self.link(asked)?;
        let mut names = self.objects[at].names().split_off(1);
        let mut result = Ok(Vec::new());
        attribute::each(asked.get(IFLA_PROP_LIST).unwrap_or_default(), |_, name| {
            let is_taken = self.by(&asked.namespace, 0, Some(name)).is_some();
            match asked.kind {
                NEWLINKPROP if is_taken => result = Err(libc::EEXIST),
                NEWLINKPROP => names.push(Name::of_attribute(name)),
                _ => names.retain(|known| *known != Name::of_attribute(name)),
            }
        });
        let list = (names.iter()).fold(Raw::default(), |list, name| {
            list.with(IFLA_ALT_IFNAME, &name.to_attribute())
        });
        self.objects[at].set(IFLA_PROP_LIST, list.as_bytes());
        result
    }

    /// Moves or renames an RDMA device, or shows its character device.
    fn rdma(&mut self, asked: &Object) -> Done {
        let is_it = |object: &&mut Object| {
            let kinds = [RDMA_DEVICE, RDMA_CHARDEV];
            kinds.contains(&object.kind)
                && object.namespace == asked.namespace
                && object.get(1) == asked.get(1)
        };
        let mut found: Vec<_> = self.objects.iter_mut().filter(is_it).collect();
        if found.is_empty() {
            return Err(libc::ENODEV);
        }
        if asked.kind == RDMA_CHARDEV {
            found.retain(|object| object.kind == RDMA_CHARDEV);
            return Ok(found.into_iter().map(|object| object.clone()).collect());
        }
        for object in found {
            if let Some(descriptor) = asked.get(68).and_then(number) {
                object.namespace = self.namespaces[&descriptor.cast_signed()].clone();
            }
            if let Some(name) = asked.get(2)
                && object.kind == RDMA_DEVICE
            {
                object.set(2, name);
            }
        }
        Ok(Vec::new())
    }

    /// A request as ip(8) would say it.
    fn words(&self, asked: &Object, flags: u16) -> String {
        let (_, new, noun) = family(asked.kind);
        let verb = match asked.kind {
            _ if flags & NLM_F_DUMP == NLM_F_DUMP => "list",
            RDMA_CHARDEV => "get",
            RDMA_SET => "set",
            NEWLINK if flags & NLM_F_CREATE == 0 => "set",
            kind => ["add", "delete", "get", "set"][usize::from(kind & 3)],
        };
        let mut words = format!("{}: {noun} {verb}", asked.namespace);
        let mut say = |word: &str| {
            words.push(' ');
            words.push_str(word.trim());
        };
        if let Some(index) = asked.index_at().map(|at| word(&asked.header, at))
            && index != 0
        {
            say(&format!("dev {index}"));
        }
        if new == NEWLINK {
            let (set, mask) = (word(&asked.header, 8), word(&asked.header, 12));
            let names = [(1, "up", "down"), (0x80, "arp off", "arp on")];
            for (flag, on, off) in names.iter().filter(|(flag, _, _)| mask & flag != 0) {
                say(if set & flag != 0 { on } else { off });
            }
            if mask & !0x81 != 0 {
                say(&format!("flags {:#x}/{:#x}", set & !0x81, mask & !0x81));
            }
        }
        for (kind, value) in &asked.attributes {
            say(&self.attribute_words(asked, *kind, value));
        }
        words.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    fn attribute_words(&self, asked: &Object, kind: u16, value: &[u8]) -> String {
        let mut alone = asked.clone();
        alone.attributes = vec![(kind, value.to_vec())];
        let payload = alone.payload();
        let header = asked.header.len();
        let (source, destination) = (asked.header.get(2), asked.header.get(1));
        let with_length = |ip: &dyn std::fmt::Debug, length: Option<&u8>| {
            format!("{ip:?}/{}", length.copied().unwrap_or_default())
        };
        let plain = match family(asked.kind).1 {
            NEWLINK | NEWLINKPROP => match kind {
                IFLA_EXT_MASK => return String::new(),
                IFLA_IFNAME | IFLA_ALT_IFNAME => {
                    return format!("name {}", Name::of_attribute(value));
                }
                IFLA_IFALIAS => return format!("alias {}", Name::of_attribute(value)),
                IFLA_ADDRESS => return format!("address {}", MacAddress::new(value)),
                IFLA_NEW_IFINDEX => return format!("index {}", number(value).unwrap_or(0)),
                IFLA_NET_NS_FD => {
                    let descriptor = number(value).unwrap_or(0).cast_signed();
                    return format!("netns {}", self.namespaces[&descriptor]);
                }
                IFLA_PROP_LIST => {
                    let mut names = String::new();
                    attribute::each(value, |_, name| {
                        names.push_str(&Name::of_attribute(name).to_string());
                    });
                    return names;
                }
                IFLA_AF_SPEC => return inet_words(value),
                _ => parse_leniently::<LinkMessage>(&payload, header).map(|message| {
                    let words = |attribute: &LinkAttribute| match attribute {
                        LinkAttribute::LinkInfo(infos) => infos.iter().map(info_words).collect(),
                        other => plain_words(other),
                    };
                    message.attributes.iter().map(words).collect::<String>()
                }),
            },
            NEWADDR => parse_leniently::<AddressMessage>(&payload, header).map(|message| {
                let words = |attribute: &_| match attribute {
                    netlink_packet_route::address::AddressAttribute::Local(ip) => {
                        with_length(ip as &IpAddr, destination)
                    }
                    other => plain_words(other),
                };
                message.attributes.iter().map(words).collect()
            }),
            NEWROUTE => parse_leniently::<RouteMessage>(&payload, header).map(|message| {
                let words = |attribute: &_| match attribute {
                    netlink_packet_route::route::RouteAttribute::Destination(to) => {
                        plain_words(&with_length(to, destination))
                    }
                    other => plain_words(other),
                };
                message.attributes.iter().map(words).collect()
            }),
            NEWRULE => parse_leniently::<RuleMessage>(&payload, header).map(|message| {
                let words = |attribute: &_| match attribute {
                    netlink_packet_route::rule::RuleAttribute::Source(from) => {
                        format!("from {}", with_length(from, source))
                    }
                    netlink_packet_route::rule::RuleAttribute::Destination(to) => {
                        format!("to {}", with_length(to, destination))
                    }
                    other => plain_words(other),
                };
                message.attributes.iter().map(words).collect()
            }),
            NEWNEIGH => parse_leniently::<NeighbourMessage>(&payload, header)
                .map(|message| message.attributes.iter().map(plain_words).collect()),
            RDMA_DEVICE | RDMA_CHARDEV => {
                return match kind {
                    1 => format!("index {}", number(value).unwrap_or(0)),
                    2 => format!("name {}", Name::of_attribute(value)),
                    68 => {
                        let descriptor = number(value).unwrap_or(0).cast_signed();
                        format!("netns {}", self.namespaces[&descriptor])
                    }
                    _ => String::new(),
                };
            }
            NEWNSID => {
                let other = number(value).and_then(|fd| self.namespaces.get(&fd.cast_signed()));
                return other.filter(|_| kind == 3).cloned().unwrap_or_default();
            }
            _ => Ok(String::new()),
        };
        plain.unwrap_or_default()
    }
}

/// `Mode(Bridge)` is `mode bridge`.
fn plain_words(attribute: &impl std::fmt::Debug) -> String {
    let text = format!("{attribute:?} ").to_lowercase();
    text.replace(['(', '[', '{'], " ")
        .replace([')', ']', '}', '"', ','], "")
}

fn info_words(info: &LinkInfo) -> String {
    match info {
        LinkInfo::Kind(kind) => format!("type {kind} "),
        // Without the kind, which stands there once more.
        LinkInfo::Data(data) => match plain_words(data).split_once(' ') {
            Some((_, words)) => words.to_owned(),
            None => String::new(),
        },
        other => plain_words(other),
    }
}

/// Settings by their numbers: `inet 22=1 inet6 8=1`.
fn inet_words(value: &[u8]) -> String {
    let mut words = String::new();
    attribute::each(value, |family, settings| {
        let name = if family == 2 { "inet" } else { "inet6" };
        attribute::each(settings, |kind, value| match family {
            2 => attribute::each(value, |kind, value| {
                words.push_str(&format!("{name} {kind}={} ", number(value).unwrap_or(0)));
            }),
            _ => words.push_str(&format!("{name} {kind}={} ", number(value).unwrap_or(0))),
        });
    });
    words
}

impl Object {
    fn new(namespace: &str, kind: u16, payload: &[u8]) -> Self {
        let (header, rest) = payload.split_at(family(kind).0.min(payload.len()));
        let mut attributes = Vec::new();
        attribute::each(rest, |kind, value| attributes.push((kind, value.to_vec())));
        Object {
            namespace: namespace.to_owned(),
            kind,
            header: header.to_vec(),
            attributes,
        }
    }

    fn payload(&self) -> Vec<u8> {
        let raw = Raw::new(&self.header);
        let all = self.attributes.iter();
        let raw = all.fold(raw, |raw, (kind, value)| raw.with(*kind, value));
        raw.as_bytes().to_vec()
    }

    fn get(&self, kind: u16) -> Option<&[u8]> {
        let mut all = self.attributes.iter();
        all.find(|(k, _)| *k == kind)
            .map(|(_, value)| value.as_slice())
    }

    fn set(&mut self, kind: u16, value: &[u8]) {
        match self.attributes.iter_mut().find(|(k, _)| *k == kind) {
            Some((_, old)) => *old = value.to_vec(),
            None => self.attributes.push((kind, value.to_vec())),
        }
    }

    /// Name and alternative names of a link.
    fn names(&self) -> Vec<Name> {
        let mut names: Vec<_> = self
            .get(IFLA_IFNAME)
            .map(Name::of_attribute)
            .into_iter()
            .collect();
        attribute::each(self.get(IFLA_PROP_LIST).unwrap_or_default(), |_, name| {
            names.push(Name::of_attribute(name));
        });
        names
    }

    /// Where its header has the index of a link.
    fn index_at(&self) -> Option<usize> {
        match family(self.kind).1 {
            NEWLINK | NEWLINKPROP | NEWADDR | NEWNEIGH | NEWQDISC => Some(4),
            _ => None,
        }
    }

    /// Whether both are the same thing, whatever its flags and lifetimes.
    fn is_like(&self, other: &Object) -> bool {
        let key = |object: &Object| match object.kind {
            // IFA_LOCAL, IFA_ADDRESS; NDA_DST.
            NEWADDR => [2, 1]
                .iter()
                .find_map(|kind| object.get(*kind))
                .map(<[u8]>::to_vec),
            NEWNEIGH => object.get(1).map(<[u8]>::to_vec),
            _ => Some(object.payload()),
        };
        self.kind == other.kind
            && self.namespace == other.namespace
            && self.index_at().map(|at| word(&self.header, at))
                == other.index_at().map(|at| word(&other.header, at))
            && key(self) == key(other)
    }

    fn has_all(&self, of: &Object) -> bool {
        let mut wanted = of.attributes.iter();
        self.namespace == of.namespace
            && self.header.first() == of.header.first()
            && self.index_at().map(|at| word(&self.header, at))
                == self.index_at().map(|at| word(&of.header, at))
            && wanted.all(|attribute| self.attributes.contains(attribute))
    }
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::{
        address::AddressAttribute,
        link::{InfoData, InfoIpVlan, InfoKind, InfoMacVlan, IpVlanMode, MacVlanMode},
    };

    use super::*;
    use crate::{Result, address, link::Change, rdma, route, rule};

    fn nic() -> Link {
        Link {
            index: 3,
            name: "ens1f0".into(),
            altnames: vec!["enp1s0".into()],
            hardware: 1,
            mac: vec![2, 0, 0, 0, 0, 3],
            mtu: 9000,
            carrier: true,
            bus_device: Some("0000:01:00.0".into()),
            bus: Some("pci".into()),
            ..Link::default()
        }
    }

    fn machine() -> (Kernel, Namespace, Namespace) {
        let kernel = Kernel::default();
        let (host, pod) = (kernel.namespace("host"), kernel.namespace("pod"));
        kernel.add_link("host", &nic());
        (kernel, host, pod)
    }

    /// A child on index 3 of the namespace with this number.
    fn create(
        socket: &mut Socket,
        name: &str,
        index: u32,
        more: Vec<LinkAttribute>,
        (kind, data): (InfoKind, InfoData),
    ) -> Result<Link> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.attributes = vec![LinkAttribute::IfName(name.into()), LinkAttribute::Link(3)];
        message.attributes.extend(more);
        let info = vec![LinkInfo::Kind(kind), LinkInfo::Data(data)];
        message.attributes.push(LinkAttribute::LinkInfo(info));
        socket.request("create", NEWLINK, NLM_F_CREATE | NLM_F_EXCL, &message)?;
        Ok(link::get(socket, By::Index(index))?.unwrap())
    }

    fn macvlan() -> (InfoKind, InfoData) {
        let mode = InfoMacVlan::Mode(MacVlanMode::Bridge);
        (InfoKind::MacVlan, InfoData::MacVlan(vec![mode]))
    }

    #[test]
    fn a_child_is_created_and_deleted() {
        let (kernel, host, pod) = machine();
        let mut inside = pod.socket(&host).unwrap();
        assert_eq!(link::known_number(&mut inside, &host).unwrap(), None);
        let number = link::namespace_number(&mut inside, &host).unwrap();
        let more = || {
            vec![
                LinkAttribute::LinkNetNsId(number),
                LinkAttribute::Mtu(1500),
                LinkAttribute::Address(vec![2, 0, 0, 0, 0, 9]),
            ]
        };
        let chosen = 1 << 20;
        let made = create(&mut inside, "net1", chosen, more(), macvlan()).unwrap();
        assert_eq!((made.index, made.hardware, made.mtu), (chosen, 1, 1500));
        assert_eq!(
            (made.kind.clone(), made.parent),
            (Some(InfoKind::MacVlan), Some(3))
        );
        for (name, index) in [("net1", 9), ("net2", chosen)] {
            let taken = create(&mut inside, name, index, more(), macvlan()).unwrap_err();
            assert!(taken.is(libc::EEXIST), "{name}");
        }
        link::delete(&mut inside, &made).unwrap();
        assert_eq!(link::list(&mut inside).unwrap().len(), 1, "loopback stays");
        let changes = kernel.changes();
        assert_eq!(
            changes[1],
            "pod: link add dev 1048576 name net1 link 3 linknetnsid 0 mtu 1500 \
             address 02:00:00:00:00:09 type macvlan mode bridge"
        );
        assert_eq!(changes.last().unwrap(), "pod: link delete dev 1048576");
    }

    #[test]
    fn a_link_moves_there_and_back_with_its_index() {
        let (kernel, host, pod) = machine();
        let (mut outside, mut inside) = (host.socket(&host).unwrap(), pod.socket(&host).unwrap());
        let into_pod = Change {
            netns: Some(&pod),
            ..Change::name(b"net1")
        };
        link::change(&mut outside, "move", 3, &into_pod).unwrap();
        link::change(&mut inside, "up", 3, &Change::up()).unwrap();
        assert_eq!(kernel.link("pod", "net1").altnames, ["enp1s0"]);
        kernel.refuse("netns host", libc::EBUSY, "busy for a test");
        let home = Change {
            netns: Some(&host),
            ..Change::name(b"ens1f0")
        };
        let refused = link::change(&mut inside, "move net1", 3, &home).unwrap_err();
        assert!(
            refused.to_string().ends_with("(kernel: busy for a test)"),
            "{refused}"
        );
        kernel.refuse_nothing();
        link::change(&mut inside, "move", 3, &home).unwrap();
        assert_eq!(kernel.link("host", "ens1f0"), nic(), "down again");
        assert_eq!(
            kernel.changes(),
            [
                "host: link set dev 3 netns pod name net1",
                "pod: link set dev 3 up",
                "pod: link set dev 3 netns host name ens1f0",
                "pod: link set dev 3 netns host name ens1f0",
            ]
        );
    }

    #[test]
    fn addresses_rules_and_names_are_kept() {
        let (kernel, host, _pod) = machine();
        let mut socket = host.socket(&host).unwrap();
        let mut own = AddressMessage::default();
        own.header.family = netlink_packet_route::AddressFamily::Inet;
        own.header.prefix_len = 24;
        own.header.index = 3;
        own.attributes
            .push(AddressAttribute::Local("10.0.0.5".parse().unwrap()));
        address::add(&mut socket, "add", &own).unwrap();
        assert!(
            address::add(&mut socket, "add", &own)
                .unwrap_err()
                .is(libc::EEXIST)
        );
        assert_eq!(address::list(&mut socket, 3).unwrap(), [own.clone()]);
        assert!(address::list(&mut socket, 1).unwrap().is_empty());
        address::delete(&mut socket, "delete", &own).unwrap();
        address::delete(&mut socket, "delete", &own).unwrap();
        assert!(address::list(&mut socket, 0).unwrap().is_empty());
        assert_eq!(kernel.changes()[0], "host: address add dev 3 10.0.0.5/24");

        let mut from = RuleMessage::default();
        from.header.family = netlink_packet_route::AddressFamily::Inet;
        from.header.src_len = 32;
        from.attributes = vec![
            netlink_packet_route::rule::RuleAttribute::Source("10.0.0.5".parse().unwrap()),
            netlink_packet_route::rule::RuleAttribute::Table(1000),
        ];
        rule::add(&mut socket, "add", &from).unwrap();
        assert_eq!(
            kernel.changes()[4],
            "host: rule add from 10.0.0.5/32 table 1000"
        );
        let v4 = rule::list(&mut socket, route::FAMILIES[0]).unwrap();
        assert_eq!(v4.iter().map(rule::table_of).collect::<Vec<_>>(), [1000]);
        assert!(
            rule::list(&mut socket, route::FAMILIES[1])
                .unwrap()
                .is_empty()
        );
        rule::delete(&mut socket, "delete", &from).unwrap();
        assert!(
            rule::list(&mut socket, route::FAMILIES[0])
                .unwrap()
                .is_empty()
        );

        let link = kernel.link("host", "enp1s0");
        link::remove_altname(&mut socket, &link, &"enp1s0".into()).unwrap();
        assert_eq!(link::get(&mut socket, By::Name(b"enp1s0")).unwrap(), None);
        link::add_altname(&mut socket, &kernel.link("host", "ens1f0"), &"fast".into()).unwrap();
        assert_eq!(kernel.link("host", "fast").index, 3);
        assert_eq!(
            kernel.changes().last().unwrap(),
            "host: altname add dev 3 fast"
        );
    }

    #[test]
    fn a_refused_dump_has_the_text() {
        let (kernel, host, _pod) = machine();
        let mut socket = host.socket(&host).unwrap();
        kernel.refuse("route list", libc::EINVAL, "no such thing");
        let refused = route::list(&mut socket, route::FAMILIES[0], 3).unwrap_err();
        assert!(refused.is(libc::EINVAL));
        assert!(
            refused.to_string().ends_with("(kernel: no such thing)"),
            "{refused}"
        );
    }

    #[test]
    fn an_rdma_device_moves() {
        let (kernel, host, pod) = machine();
        kernel.add_rdma("host", 7, "mlx5_0", ("uverbs0", 0xe700));
        let mut outside = rdma::socket(&host, &host).unwrap().unwrap();
        let device = rdma::list(&mut outside).unwrap().remove(0);
        let node = rdma::verbs_node(&mut outside, &device).unwrap().unwrap();
        assert_eq!(node.name, "uverbs0");
        rdma::give(&mut outside, &device, &pod).unwrap();
        assert!(rdma::list(&mut outside).unwrap().is_empty());
        let mut inside = rdma::socket(&pod, &host).unwrap().unwrap();
        rdma::rename(&mut inside, &device, "rdma0").unwrap();
        assert_eq!(rdma::list(&mut inside).unwrap()[0].name, "rdma0");
        assert_eq!(
            kernel.changes(),
            [
                "host: rdma set index 7 netns pod",
                "pod: rdma set index 7 name rdma0"
            ]
        );
    }

    #[test]
    fn kinds_of_children_are_said_as_ip_says_them() {
        let (kernel, host, _pod) = machine();
        let mut socket = host.socket(&host).unwrap();
        let mode = InfoIpVlan::Mode(IpVlanMode::L3S);
        let ipvlan = (InfoKind::IpVlan, InfoData::IpVlan(vec![mode]));
        let made = create(&mut socket, "net2", 1 << 20, Vec::new(), ipvlan).unwrap();
        assert_eq!((made.mac, made.mtu), (nic().mac, 9000));
        assert_eq!(
            kernel.changes(),
            ["host: link add dev 1048576 name net2 link 3 type ipvlan mode l3s"]
        );
    }
}
