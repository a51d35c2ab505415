//! Settings of drivers, over the generic netlink family `ethtool` (kernel 5.6): the few messages
//! that a snapshot needs, with the numbers of `include/uapi/linux/ethtool_netlink.h`.

use std::collections::BTreeMap;

use super::{
    Result, Socket,
    attribute::{self, Raw},
};

/// The family that names the others (`GENL_ID_CTRL`).
const CONTROL: u16 = 0x10;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
/// `sizeof(struct genlmsghdr)`
const HEADER_BYTES: usize = 4;

/// `ETHTOOL_A_*_HEADER`, the same in each message.
const HEADER: u16 = 1;
const HEADER_DEV_INDEX: u16 = 1;
const HEADER_FLAGS: u16 = 3;
/// `ETHTOOL_FLAG_COMPACT_BITSETS`
const COMPACT: u32 = 1;
const FEATURES_GET: u8 = 11;
const FEATURES_SET: u8 = 12;
const FEATURES_HW: u16 = 2;
const FEATURES_WANTED: u16 = 3;
const BITSET_BITS: u16 = 3;
const BITS_BIT: u16 = 1;
const BIT_NAME: u16 = 2;
const BIT_VALUE: u16 = 3;

/// Settings of a driver that are read together and written one by one.
#[derive(Debug, PartialEq, Eq)]
pub struct Group {
    /// What ethtool(8) calls them.
    pub name: &'static str,
    get: u8,
    /// None where the kernel cannot set them over netlink.
    set: Option<u8>,
    /// The attributes that are settings; others are limits or counters.
    settings: &'static [u16],
}

/// The settings of one group: attribute and value, as the kernel writes them.
pub type Settings = BTreeMap<u16, Vec<u8>>;

/// Channels before what depends on their number.
pub const GROUPS: [Group; 8] = [
    Group::new("channels", 17, Some(18), &[6, 7, 8, 9]),
    // Sizes, buffer length, splitting of headers, entry size, push.
    Group::new(
        "rings",
        15,
        Some(16),
        &[6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17],
    ),
    Group::new(
        "coalescing",
        19,
        Some(20),
        &[
            2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25,
            26, 27, 28,
        ],
    ),
    Group::new("pause frames", 21, Some(22), &[2, 3, 4]),
    Group::new("private flags", 13, Some(14), &[2]),
    // Speed and duplex follow the link; what is advertised is set.
    Group::new("link modes", 4, Some(5), &[2, 3]),
    Group::new("FEC", 29, Some(30), &[2, 3]),
    // Hash function, indirection table, key, symmetry.
    Group::new("receive side scaling", 38, None, &[3, 4, 5, 6]),
];

impl Group {
    const fn new(name: &'static str, get: u8, set: Option<u8>, settings: &'static [u16]) -> Self {
        Group {
            name,
            get,
            set,
            settings,
        }
    }

    /// Whether the kernel sets them over netlink.
    pub fn can_be_set(&self) -> bool {
        self.set.is_some()
    }
}

/// A socket that speaks to the family in the namespace the thread was in when it was opened.
#[derive(Debug)]
pub struct Ethtool {
    socket: Socket,
    family: u16,
}

impl Ethtool {
    /// Opens a socket; none on a kernel without the family.
    pub fn open() -> Result<Option<Self>> {
        let mut socket = Socket::open_generic()?;
        let message = command(CTRL_CMD_GETFAMILY).with(CTRL_ATTR_FAMILY_NAME, b"ethtool\0");
        let asked = socket.get("look up ethtool", CONTROL, &message, |payload| {
            let mut family = None;
            each_of(payload, |kind, value| {
                if kind == CTRL_ATTR_FAMILY_ID {
                    family = value.first_chunk().map(|bytes| u16::from_ne_bytes(*bytes));
                }
            });
            Ok(family)
        });
        match asked {
            Ok(family) => Ok(family.map(|family| Ethtool { socket, family })),
            Err(e) if e.is(libc::ENOENT) => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn get(&mut self, what: &str, get: u8, index: u32, flags: u32) -> Result<Option<Settings>> {
        let message = command(get).nest(HEADER, &header(index, flags));
        let asked = self.socket.get(what, self.family, &message, |payload| {
            let mut found = Settings::new();
            each_of(payload, |kind, value| {
                found.insert(kind, value.to_vec());
            });
            Ok(found)
        });
        match asked {
            Ok(settings) => Ok(Some(settings)),
            // A driver that has no such settings, or a kernel that knows none.
            Err(e) if e.is(libc::EOPNOTSUPP) || e.is(libc::EINVAL) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// The settings of one group; none where the driver or the kernel has none.
    pub fn settings(&mut self, index: u32, group: &Group) -> Result<Option<Settings>> {
        let what = format!("read {} of netdev {index}", group.name);
        let found = self.get(&what, group.get, index, COMPACT)?;
        let found = found.map(|mut settings| {
            settings.retain(|kind, _| group.settings.contains(kind));
            settings
        });
        Ok(found.filter(|settings| !settings.is_empty()))
    }

    /// Sets some settings of one group.
    pub fn set(
        &mut self,
        what: &str,
        index: u32,
        group: &Group,
        settings: &Settings,
    ) -> Result<()> {
        let Some(set) = group.set else {
            return Ok(());
        };
        let mut message = command(set).nest(HEADER, &header(index, 0));
        for (kind, value) in settings {
            // Bit sets hold others; the kernel asks for the mark from version 5.2 on.
            let kind = match is_nested(group, *kind) {
                true => kind | netlink_packet_core::NLA_F_NESTED,
                false => *kind,
            };
            message = message.with(kind, value);
        }
        self.socket.request(what, self.family, 0, &message)
    }

    /// The features that can be changed, and whether each is wanted.
    pub fn features(&mut self, index: u32) -> Result<BTreeMap<String, bool>> {
        let what = format!("read features of netdev {index}");
        let found = self.get(&what, FEATURES_GET, index, 0)?.unwrap_or_default();
        let bits = |kind| found.get(&kind).map(|set| bits_of(set)).unwrap_or_default();
        let wanted = bits(FEATURES_WANTED);
        let changeable = bits(FEATURES_HW).into_iter().filter(|(_, value)| *value);
        Ok(changeable
            .map(|(name, _)| {
                // This set has no mask: what is listed is on.
                let on = wanted.contains_key(&name);
                (name, on)
            })
            .collect())
    }

    /// Wants features or does not. The driver may have its reasons for another state.
    pub fn set_features(
        &mut self,
        what: &str,
        index: u32,
        features: &BTreeMap<String, bool>,
    ) -> Result<()> {
        let mut bits = Raw::default();
        for (name, on) in features {
            let mut text = name.clone().into_bytes();
            text.push(0);
            let mut bit = Raw::default().with(BIT_NAME, &text);
            if *on {
                bit = bit.with(BIT_VALUE, &[]);
            }
            bits = bits.nest(BITS_BIT, &bit);
        }
        let wanted = Raw::default().nest(BITSET_BITS, &bits);
        let message = command(FEATURES_SET)
            .nest(HEADER, &header(index, 0))
            .nest(FEATURES_WANTED, &wanted);
        self.socket.request(what, self.family, 0, &message)
    }
}

/// Private flags, link modes and FEC modes are bit sets.
fn is_nested(group: &Group, kind: u16) -> bool {
    matches!(
        (group.name, kind),
        ("private flags" | "FEC", 2) | ("link modes", 3)
    )
}

fn command(command: u8) -> Raw {
    Raw::new(&[command, 1, 0, 0])
}

fn header(index: u32, flags: u32) -> Raw {
    let header = Raw::default().with(HEADER_DEV_INDEX, &index.to_ne_bytes());
    match flags {
        0 => header,
        flags => header.with(HEADER_FLAGS, &flags.to_ne_bytes()),
    }
}

fn each_of(payload: &[u8], each: impl FnMut(u16, &[u8])) {
    attribute::each(payload.get(HEADER_BYTES..).unwrap_or_default(), each);
}

/// The bits that a bit set lists, and whether each is set.
fn bits_of(set: &[u8]) -> BTreeMap<String, bool> {
    let mut found = BTreeMap::new();
    attribute::each(set, |kind, bits| {
        if kind == BITSET_BITS {
            attribute::each(bits, |_, bit| {
                let (mut name, mut value) = (String::new(), false);
                attribute::each(bit, |kind, inner| match kind {
                    BIT_NAME => name = super::Name::of_attribute(inner).to_string(),
                    BIT_VALUE => value = true,
                    _ => {}
                });
                found.insert(name, value);
            });
        }
    });
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bit_set_lists_names_and_values() {
        let bit = |name: &[u8], on| {
            let bit = Raw::default().with(1, &[0; 4]).with(BIT_NAME, name);
            if on { bit.with(BIT_VALUE, &[]) } else { bit }
        };
        let bits = Raw::default()
            .nest(BITS_BIT, &bit(b"rx-gro\0", true))
            .nest(BITS_BIT, &bit(b"rx-lro\0", false));
        let set = Raw::default()
            .with(2, &[64, 0, 0, 0])
            .nest(BITSET_BITS, &bits);
        let expected = [("rx-gro".to_owned(), true), ("rx-lro".to_owned(), false)];
        assert_eq!(bits_of(set.as_bytes()), BTreeMap::from(expected));
    }

    #[test]
    fn bit_sets_are_marked_as_nested_and_numbers_are_not() {
        let group = |name: &str| GROUPS.iter().find(|group| group.name == name).unwrap();
        assert!(is_nested(group("private flags"), 2));
        assert!(is_nested(group("link modes"), 3));
        assert!(!is_nested(group("link modes"), 2));
        assert!(!is_nested(group("rings"), 6));
        assert!(!group("receive side scaling").can_be_set());
    }
}
