//! Nexthop objects (`ip nexthop`), which have no types in the packet crates: `struct nhmsg` and
//! `NHA_*` of `include/uapi/linux/nexthop.h`.

use super::{
    Result, Socket,
    attribute::{self, Raw},
};

const RTM_GETNEXTHOP: u16 = 106;
/// `sizeof(struct nhmsg)`
const HEADER_BYTES: usize = 8;

const NHA_ID: u16 = 1;
const NHA_GROUP: u16 = 2;
const NHA_OIF: u16 = 5;

/// A nexthop object, or a group of them.
#[derive(Debug, Default)]
struct Nexthop {
    /// By which routes name it.
    id: u32,
    link: Option<u32>,
    /// The numbers of a group's objects.
    members: Vec<u32>,
}

impl Nexthop {
    fn parse(payload: &[u8]) -> Option<Self> {
        let mut found = Nexthop::default();
        attribute::each(payload.get(HEADER_BYTES..)?, |kind, value| match kind {
            NHA_ID => found.id = attribute::word(value, 0),
            NHA_OIF => found.link = attribute::number(value),
            // `struct nexthop_grp`, 8 bytes each.
            NHA_GROUP => {
                let members = value.chunks_exact(8);
                found.members = members.filter_map(attribute::number).collect();
            }
            _ => {}
        });
        Some(found)
    }
}

/// The links that the object or group with this number leaves through.
pub fn links(socket: &mut Socket, id: u32) -> Result<Vec<u32>> {
    let all = Raw::new(&[0; HEADER_BYTES]);
    let parse = |payload: &[u8]| Ok(Nexthop::parse(payload));
    let listed = socket.dump("list nexthops", RTM_GETNEXTHOP, &all, parse)?;
    Ok(links_of(&listed, id))
}

/// A group has objects as members, never groups (`nh_check_attr_group()`). Pure.
fn links_of(all: &[Nexthop], id: u32) -> Vec<u32> {
    let of_id = |object: &&Nexthop| object.id == id;
    let groups = all.iter().filter(of_id);
    let members: Vec<u32> = groups.flat_map(|group| group.members.clone()).collect();
    let objects = all.iter();
    objects
        .filter(|object| of_id(object) || members.contains(&object.id))
        .filter_map(|object| object.link)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(group.members, [7, 8]);
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
        assert!(Nexthop::parse(&[0; 4]).is_none());
    }
}
