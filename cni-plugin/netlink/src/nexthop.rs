//! Nexthop objects (`ip nexthop`), which have no types in the packet crates: `struct nhmsg` and
//! `NHA_*` of `include/uapi/linux/nexthop.h`.

use std::fmt;

use netlink_packet_core::{DecodeError, Emitable, NLM_F_CREATE, NLM_F_REPLACE, Parseable};

use super::{
    Result, Socket,
    attribute::{self, Raw},
};

const RTM_NEWNEXTHOP: u16 = 104;
const RTM_GETNEXTHOP: u16 = 106;
/// `sizeof(struct nhmsg)`
const HEADER_BYTES: usize = 8;
/// Where `nh_flags` begins in it.
const FLAGS: usize = 4;
/// `RTNH_F_ONLINK`, which is set by whoever makes one; the other flags are the kernel's.
const ONLINK: u32 = 4;

const NHA_ID: u16 = 1;
const NHA_GROUP: u16 = 2;
const NHA_OIF: u16 = 5;
const NHA_GROUPS: u16 = 9;
const NHA_RES_GROUP: u16 = 12;
const NHA_RES_GROUP_UNBALANCED_TIME: u16 = 4;
/// What the kernel takes back: group, its type, blackhole, interface, gateway, encapsulation, bridge
/// entries, resilient groups. The rest is counters.
const KEPT: [u16; 10] = [NHA_ID, NHA_GROUP, 3, 4, NHA_OIF, 6, 7, 8, 11, NHA_RES_GROUP];

/// A nexthop object, or a group of them, as the kernel describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nexthop(Raw);

impl Nexthop {
    fn attribute(&self, wanted: u16) -> Option<Vec<u8>> {
        let mut found = None;
        let attributes = self.0.as_bytes().get(HEADER_BYTES..).unwrap_or_default();
        attribute::each(attributes, |kind, value| {
            if kind == wanted {
                found = Some(value.to_vec());
            }
        });
        found
    }

    fn number(&self, wanted: u16) -> Option<u32> {
        self.attribute(wanted)
            .and_then(|value| attribute::number(&value))
    }

    /// The number that routes name it by.
    pub fn id(&self) -> u32 {
        self.number(NHA_ID).unwrap_or(0)
    }

    /// The numbers of a group's members (`struct nexthop_grp`, 8 bytes each); empty for an object.
    pub fn members(&self) -> Vec<u32> {
        let group = self.attribute(NHA_GROUP).unwrap_or_default();
        let members = group.chunks_exact(8);
        members.filter_map(attribute::number).collect()
    }

    /// The same through another link.
    #[must_use]
    pub fn through(&self, from: u32, to: u32) -> Self {
        let bytes = self.0.as_bytes();
        let (header, attributes) = bytes.split_at_checked(HEADER_BYTES).unwrap_or((bytes, &[]));
        let mut header = header.to_vec();
        // Scope and a reserved byte, which the kernel takes as zero alone (`rtm_to_nh_config()`).
        for at in [1, 3] {
            if let Some(byte) = header.get_mut(at) {
                *byte = 0;
            }
        }
        if let Some(flags) = header.get_mut(FLAGS..HEADER_BYTES) {
            let kept = attribute::number(flags).unwrap_or(0) & ONLINK;
            flags.copy_from_slice(&kept.to_ne_bytes());
        }
        let mut message = Raw::new(&header);
        attribute::each(attributes, |kind, value| {
            if kind == NHA_OIF && attribute::number(value) == Some(from) {
                message = std::mem::take(&mut message).with(kind, &to.to_ne_bytes());
            } else if kind == NHA_RES_GROUP {
                let mut group = Raw::default();
                attribute::each(value, |kind, value| {
                    if kind != NHA_RES_GROUP_UNBALANCED_TIME && kind != 0 {
                        group = std::mem::take(&mut group).with(kind, value);
                    }
                });
                message = std::mem::take(&mut message).nest(kind, &group);
            } else if KEPT.contains(&kind) {
                message = std::mem::take(&mut message).with(kind, value);
            }
        });
        Nexthop(message)
    }
}

impl fmt::Display for Nexthop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nexthop {}", self.id())?;
        match self.members().as_slice() {
            [] => Ok(()),
            members => write!(f, " of group {members:?}"),
        }
    }
}

impl Emitable for Nexthop {
    fn buffer_len(&self) -> usize {
        self.0.buffer_len()
    }

    fn emit(&self, buffer: &mut [u8]) {
        self.0.emit(buffer);
    }
}

impl Parseable<[u8]> for Nexthop {
    fn parse(payload: &[u8]) -> std::result::Result<Self, DecodeError> {
        if payload.len() < HEADER_BYTES {
            return Err(DecodeError::from("a nexthop shorter than its header"));
        }
        Ok(Nexthop(Raw::new(payload)))
    }
}

/// The objects that leave through a link, then the groups of which they are members. None on a
/// kernel before 5.3.
///
/// # Errors
/// The kernel's refusal.
pub fn list(socket: &mut Socket, link: u32) -> Result<Vec<Nexthop>> {
    let filter = Raw::new(&[0; HEADER_BYTES]).with(NHA_OIF, &link.to_ne_bytes());
    let mut objects = dump(socket, &filter)?;
    if objects.is_empty() {
        return Ok(objects);
    }
    let groups = Raw::new(&[0; HEADER_BYTES]).with(NHA_GROUPS, &[]);
    let ids: Vec<u32> = objects.iter().map(Nexthop::id).collect();
    let groups = dump(socket, &groups)?;
    objects.extend(
        groups
            .into_iter()
            .filter(|group| group.members().iter().any(|id| ids.contains(id))),
    );
    Ok(objects)
}

/// The links that the object or group with this number leaves through.
///
/// # Errors
/// The kernel's refusal.
pub fn links(socket: &mut Socket, id: u32) -> Result<Vec<u32>> {
    let all = dump(socket, &Raw::new(&[0; HEADER_BYTES]))?;
    Ok(links_of(&all, id))
}

/// A group has objects as members, never groups (`nh_check_attr_group()`). Pure.
fn links_of(all: &[Nexthop], id: u32) -> Vec<u32> {
    let members: Vec<u32> = all
        .iter()
        .filter(|object| object.id() == id)
        .flat_map(Nexthop::members)
        .collect();
    all.iter()
        .filter(|object| object.id() == id || members.contains(&object.id()))
        .filter_map(|object| object.number(NHA_OIF))
        .collect()
}

fn dump(socket: &mut Socket, filter: &Raw) -> Result<Vec<Nexthop>> {
    let parse = |payload: &[u8]| Nexthop::parse(payload).map(Some);
    match socket.dump("list nexthops", RTM_GETNEXTHOP, filter, parse) {
        Err(e) if e.is(libc::EOPNOTSUPP) => Ok(Vec::new()),
        done => done,
    }
}

/// Adds an object or a group, or puts it in the place of the one that has its number.
///
/// # Errors
/// The kernel's refusal: ENETDOWN while its link is down.
pub fn replace(socket: &mut Socket, what: &str, nexthop: &Nexthop) -> Result<()> {
    socket.request(what, RTM_NEWNEXTHOP, NLM_F_CREATE | NLM_F_REPLACE, nexthop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_goes_through_another_link_without_the_kernels_flags() {
        // Scope 253; RTNH_F_ONLINK and RTNH_F_LINKDOWN
        let object = Raw::new(&[2, 253, 4, 0, 4 | 16, 0, 0, 0])
            .with(NHA_ID, &7u32.to_ne_bytes())
            .with(NHA_OIF, &3u32.to_ne_bytes())
            .with(6, &[10, 0, 0, 1])
            .with(14, &[1, 2, 3, 4]);
        let object = Nexthop::parse(object.as_bytes()).unwrap().through(3, 9);
        assert_eq!((object.id(), object.number(NHA_OIF)), (7, Some(9)));
        assert_eq!(object.attribute(6), Some(vec![10, 0, 0, 1]));
        assert_eq!(object.attribute(14), None, "counters");
        assert_eq!(object.0.as_bytes().get(4..8), Some(&4u32.to_ne_bytes()[..]));
        assert_eq!(
            object.0.as_bytes().get(..4),
            Some(&[2, 0, 4, 0][..]),
            "no scope"
        );
        assert_eq!(object.to_string(), "nexthop 7");
    }

    #[test]
    fn a_group_names_its_members() {
        let mut members = Vec::new();
        for id in [7u32, 8] {
            members.extend(id.to_ne_bytes());
            members.extend([0; 4]);
        }
        let group = Raw::new(&[0; 8])
            .with(NHA_ID, &20u32.to_ne_bytes())
            .with(NHA_GROUP, &members);
        let group = Nexthop::parse(group.as_bytes()).unwrap();
        assert_eq!(group.members(), [7, 8]);
        let object = |id: u32, link: u32| {
            let raw = Raw::new(&[0; 8])
                .with(NHA_ID, &id.to_ne_bytes())
                .with(NHA_OIF, &link.to_ne_bytes());
            Nexthop::parse(raw.as_bytes()).unwrap()
        };
        let all = [object(7, 2), object(8, 3), object(9, 4), group];
        assert_eq!(links_of(&all, 20), [2, 3]);
        assert_eq!(links_of(&all, 9), [4]);
        assert!(links_of(&all, 6).is_empty());
        assert!(Nexthop::parse(&[0; 4]).is_err());
    }
}
