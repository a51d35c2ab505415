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

mod act;
mod object;
mod words;

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

use object::*;

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

/// A namespace of the machine, as a socket asks it.
#[derive(Debug)]
pub(crate) struct Port {
    kernel: Kernel,
    namespace: String,
    answers: Mutex<VecDeque<Vec<u8>>>,
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

#[cfg(test)]
mod tests;
