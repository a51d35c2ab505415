//! What the kernel has, each as the message by which it tells of it.

use super::*;

/// Something that a namespace has: the message by which the kernel tells of it.
#[derive(Clone, Debug)]
pub(super) struct Object {
    pub(super) namespace: String,
    pub(super) kind: u16,
    pub(super) header: Vec<u8>,
    pub(super) attributes: Vec<(u16, Vec<u8>)>,
}

pub(super) const NEWLINK: u16 = 16;
pub(super) const NEWADDR: u16 = 20;
pub(super) const NEWROUTE: u16 = 24;
pub(super) const NEWNEIGH: u16 = 28;
pub(super) const NEWRULE: u16 = 32;
pub(super) const NEWQDISC: u16 = 36;
pub(super) const NEWNSID: u16 = 88;
pub(super) const NEWNEXTHOP: u16 = 104;
pub(super) const NEWLINKPROP: u16 = 108;
pub(super) const RDMA_DEVICE: u16 = 5 << 10 | 1;
pub(super) const RDMA_SET: u16 = 5 << 10 | 2;
pub(super) const RDMA_CHARDEV: u16 = 5 << 10 | 15;

pub(super) const IFLA_ADDRESS: u16 = 1;
pub(super) const IFLA_IFNAME: u16 = 3;
pub(super) const IFLA_MTU: u16 = 4;
pub(super) const IFLA_LINK: u16 = 5;
pub(super) const IFLA_MASTER: u16 = 10;
pub(super) const IFLA_LINKINFO: u16 = 18;
pub(super) const IFLA_IFALIAS: u16 = 20;
pub(super) const IFLA_AF_SPEC: u16 = 26;
pub(super) const IFLA_NET_NS_FD: u16 = 28;
pub(super) const IFLA_EXT_MASK: u16 = 29;
pub(super) const IFLA_LINK_NETNSID: u16 = 37;
pub(super) const IFLA_NEW_IFINDEX: u16 = 49;
pub(super) const IFLA_PROP_LIST: u16 = 52;
pub(super) const IFLA_ALT_IFNAME: u16 = 53;

/// Messages of a kind: the length of their header, and what they are of.
pub(super) fn family(kind: u16) -> (usize, u16, &'static str) {
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

impl Object {
    pub(super) fn new(namespace: &str, kind: u16, payload: &[u8]) -> Self {
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

    pub(super) fn payload(&self) -> Vec<u8> {
        let raw = Raw::new(&self.header);
        let all = self.attributes.iter();
        let raw = all.fold(raw, |raw, (kind, value)| raw.with(*kind, value));
        raw.as_bytes().to_vec()
    }

    pub(super) fn get(&self, kind: u16) -> Option<&[u8]> {
        let mut all = self.attributes.iter();
        all.find(|(k, _)| *k == kind)
            .map(|(_, value)| value.as_slice())
    }

    pub(super) fn set(&mut self, kind: u16, value: &[u8]) {
        match self.attributes.iter_mut().find(|(k, _)| *k == kind) {
            Some((_, old)) => *old = value.to_vec(),
            None => self.attributes.push((kind, value.to_vec())),
        }
    }

    /// Name and alternative names of a link.
    pub(super) fn names(&self) -> Vec<Name> {
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
    pub(super) fn index_at(&self) -> Option<usize> {
        match family(self.kind).1 {
            NEWLINK | NEWLINKPROP | NEWADDR | NEWNEIGH | NEWQDISC => Some(4),
            _ => None,
        }
    }

    /// Whether both are the same thing, whatever its flags and lifetimes.
    pub(super) fn is_like(&self, other: &Object) -> bool {
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

    pub(super) fn has_all(&self, of: &Object) -> bool {
        let mut wanted = of.attributes.iter();
        self.namespace == of.namespace
            && self.header.first() == of.header.first()
            && self.index_at().map(|at| word(&self.header, at))
                == self.index_at().map(|at| word(&of.header, at))
            && wanted.all(|attribute| self.attributes.contains(attribute))
    }
}
