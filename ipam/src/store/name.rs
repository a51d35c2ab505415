//! How things are called in the store.
//!
//! ```text
//! FORMAT                                   version and identity
//! leases/<space>/<shard>/<address>@<n>     held, for the n-th time
//! leases/<space>/<shard>/<address>~<n>.<t> freed after the n-th time, at t (Unix ms)
//! owners/<node>/<hh>/<container>:<ifname>:<i>   the same file, found by its owner
//! pods/<hh>/<hash>                         the same file, found by its pod
//! ```
//! One file has all lease entries of an order.
//!
//! A space is a `network_name`: addresses are unique in one. A shard is 256
//! addresses. A range with `enable_overlapping_ranges: false` is a space of its
//! own within the space: its lease names carry a tag, `<address>+<tag>@<n>`.

use crate::lease::{Lease, Pod, Record};
use crate::range::{bits, from_bits};
use ipnetwork::IpNetwork;
use std::fmt::Write;
use std::net::IpAddr;

/// Whom a lease is unique among: all of a space, or one range in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Class(Option<u32>);

/// The name of an address in the store, read: leased or released, for which time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LeaseName {
    pub(crate) address: IpAddr,
    pub(crate) class: Class,
    pub(crate) generation: u64,
    /// Unix milliseconds when it was freed; `None` while it is held.
    pub(crate) freed: Option<u64>,
}

impl Class {
    pub(crate) const SHARED: Self = Self(None);

    pub(crate) fn of(range: IpNetwork, overlapping: bool) -> Self {
        if overlapping {
            Self::SHARED
        } else {
            Self(Some(hash32(&range.to_string())))
        }
    }
}

impl LeaseName {
    pub(crate) fn of(lease: &Lease) -> Self {
        Self {
            address: lease.address,
            class: Class::of(lease.range, lease.overlapping),
            generation: lease.generation,
            freed: None,
        }
    }

    /// The lease of a record that has this name, held or freed.
    pub(crate) fn in_record<'r>(&self, record: &'r Record) -> Option<&'r Lease> {
        let freed = self.freed;
        record.leases().iter().find(|lease| {
            Self {
                freed,
                ..Self::of(lease)
            } == *self
        })
    }

    pub(crate) fn name(&self) -> String {
        let mut name = self.address.to_string();
        // Writing to a String cannot fail.
        if let Class(Some(tag)) = self.class {
            let _ = write!(name, "+{tag:08x}");
        }
        let _ = match self.freed {
            None => write!(name, "@{}", self.generation),
            Some(freed) => write!(name, "~{}.{freed}", self.generation),
        };
        name
    }

    pub(crate) fn parse(name: &str) -> Option<Self> {
        let (left, generation, freed) = match name.split_once('@') {
            Some((left, generation)) => (left, number(generation)?, None),
            None => {
                let (left, right) = name.split_once('~')?;
                let (generation, freed) = right.split_once('.')?;
                (left, number(generation)?, Some(number(freed)?))
            }
        };
        let (address, class) = match left.split_once('+') {
            None => (left, Class::SHARED),
            Some((address, tag)) if is_tag(tag) => {
                (address, Class(Some(u32::from_str_radix(tag, 16).ok()?)))
            }
            Some(_) => return None,
        };
        Some(Self {
            address: address_of(address)?,
            class,
            generation,
            freed,
        })
    }
}

// One spelling only of each part, or one address would have several exclusive names.

fn number(text: &str) -> Option<u64> {
    let plain = text.starts_with(|first: char| matches!(first, '1'..='9')) || text == "0";
    plain.then(|| text.parse().ok()).flatten()
}

fn is_tag(text: &str) -> bool {
    text.len() == 8 && text.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'))
}

fn address_of(text: &str) -> Option<IpAddr> {
    let address: IpAddr = text.parse().ok()?;
    // Of IPv4 the standard library reads one spelling: four numbers without leading zeros.
    (address.is_ipv4() || address.to_string() == text).then_some(address)
}

/// Whether a name in a shard is a lease name of this address, in its one spelling.
pub(crate) fn is_lease_name_of(address: &str, name: &str) -> bool {
    name.strip_prefix(address)
        .is_some_and(|rest| rest.starts_with(['@', '~', '+']))
}

/// The directory of a space.
pub(crate) fn space(network_name: Option<&str>) -> String {
    network_name.map_or_else(|| "default".to_owned(), |name| format!("net.{name}"))
}

/// The `network_name` of a space's directory.
pub(crate) fn network_name(space: &str) -> Option<Option<String>> {
    match space.strip_prefix("net.") {
        Some(name) => Some(Some(name.to_owned())),
        None => (space == "default").then_some(None),
    }
}

/// Which shard an address is in: 256 addresses each.
pub(crate) fn shard_number(address: u128) -> u128 {
    address >> 8
}

/// A shard's directory: its first address and prefix length, `10.0.3.0-24`.
pub(crate) fn shard(v4: bool, number: u128) -> String {
    let length = if v4 { 24 } else { 120 };
    format!("{}-{length}", from_bits(v4, number << 8))
}

/// Family and number of a shard's directory.
pub(crate) fn parse_shard(name: &str) -> Option<(bool, u128)> {
    let (first, _) = name.rsplit_once('-')?;
    let first: IpAddr = first.parse().ok()?;
    let number = shard_number(bits(first));
    (shard(first.is_ipv4(), number) == name).then_some((first.is_ipv4(), number))
}

/// Directory and name of an owner's record, within `owners/<node>`.
pub(crate) fn owner(container: &str, interface: &str, index: usize) -> (String, String) {
    // Node names come from elsewhere; container and interface have no ':'.
    (
        bucket(container),
        format!("{container}:{interface}:{index}"),
    )
}

/// The name of the owner's next record.
pub(crate) fn next_owned(name: &str) -> Option<String> {
    let (owner, index) = name.rsplit_once(':')?;
    let next = index.parse::<usize>().ok()?.checked_add(1)?;
    Some(format!("{owner}:{next}"))
}

/// Directory and name of a pod's entry for one range, within `pods`.
pub(crate) fn pod(
    network_name: Option<&str>,
    range: IpNetwork,
    pod: &Pod,
    interface: &str,
) -> (String, String) {
    let key = format!("{}\n{range}\n{pod}\n{interface}", space(network_name));
    (bucket(&key), format!("{:016x}", hash64(&key)))
}

/// The same by the record of a lease.
pub(crate) fn pod_of(lease: &Lease) -> Option<(String, String)> {
    let of = lease.holder.pod.as_ref()?;
    Some(pod(
        lease.network_name.as_deref(),
        lease.range,
        of,
        &lease.holder.interface,
    ))
}

fn bucket(key: &str) -> String {
    format!("{:02x}", hash64(key) >> 56)
}

/// FNV-1a with a final mix, so that the high bits depend on all of the key.
/// Names on disk depend on it: it is part of the format.
pub(crate) fn hash64(key: &str) -> u64 {
    let hash = crate::block::hash(key);
    let hash = (hash ^ (hash >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    hash ^ (hash >> 32)
}

fn hash32(key: &str) -> u32 {
    let [a, b, c, d, ..] = hash64(key).to_be_bytes();
    u32::from_be_bytes([a, b, c, d])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_are_for_people() {
        let lease = crate::lease::tests::lease("10.0.3.5", "10.0.0.0/16");
        let held = LeaseName::of(&lease);
        assert_eq!(held.name(), "10.0.3.5@1");
        assert_eq!(
            LeaseName {
                freed: Some(7),
                ..held
            }
            .name(),
            "10.0.3.5~1.7"
        );
        assert_eq!(
            shard(true, shard_number(bits(lease.address))),
            "10.0.3.0-24"
        );
        assert_eq!(
            parse_shard("fd00::1200-120"),
            Some((false, bits("fd00::1200".parse().unwrap()) >> 8))
        );
        assert_eq!(owner("c1", "net1", 0).1, "c1:net1:0");
        assert_eq!(next_owned("c1:net1:9").as_deref(), Some("c1:net1:10"));
        assert_eq!(
            (space(None).as_str(), space(Some("x")).as_str()),
            ("default", "net.x")
        );
        assert_eq!(
            network_name(&space(Some("default"))),
            Some(Some("default".into()))
        );
    }

    #[test]
    fn the_hash_is_part_of_the_format() {
        assert_eq!(hash64("0123456789abcdef"), 0xe074_a3f0_c140_4cda);
        let tagged = LeaseName::parse("10.0.3.5+0a0b0c0d@2").unwrap();
        assert_ne!(tagged.class, Class::SHARED);
    }

    #[test]
    fn other_spellings_are_other_files() {
        for name in [
            "10.0.3.5",
            "10.0.3.5@",
            "10.0.3.5@01",
            "10.0.3.5@1~2.3",
            "10.0.3.5~1",
            "10.0.3.5~1.+2",
            "010.0.3.5@1",
            "FD00::5@1",
            "fd00:0::5@1",
            "10.0.3.5+ABCDEF01@1",
            "10.0.3.5+1@1",
            "",
            "@1",
        ] {
            assert_eq!(LeaseName::parse(name), None, "{name}");
        }
        for name in [
            "10.0.3.1-24",
            "10.0.3.0-25",
            "10.0.3.0",
            "fd00::1-120",
            "-24",
        ] {
            assert_eq!(parse_shard(name), None, "{name}");
        }
    }

    proptest! {
        #[test]
        fn lease_names_read_back(
            v4 in any::<bool>(), raw in any::<u128>(), generation in any::<u64>(),
            freed in proptest::option::of(any::<u64>()), tag in proptest::option::of(any::<u32>()),
        ) {
            let address = from_bits(v4, if v4 { raw & 0xffff_ffff } else { raw | 1 << 127 });
            let lease_name = LeaseName { address, class: Class(tag), generation, freed };
            prop_assert_eq!(LeaseName::parse(&lease_name.name()), Some(lease_name));
            prop_assert!(is_lease_name_of(&address.to_string(), &lease_name.name()));
            let number = shard_number(bits(address));
            prop_assert_eq!(parse_shard(&shard(v4, number)), Some((v4, number)));
        }

        #[test]
        fn a_lease_has_one_name(
            name in prop_oneof![
                "[0-9a-f:.@~+-]{0,40}",
                r"[0-9]{1,3}(\.[0-9]{1,3}){3}(\+[0-9a-fA-F]{8})?[@~][+0-9]{1,4}(\.[+0-9]{1,4})?",
                r"[0-9a-fA-F]{0,4}::[0-9a-f]{0,4}(\+[0-9a-f]{8})?@[0-9]{1,3}",
            ],
        ) {
            let _ = parse_shard(&name);
            if let Some(lease_name) = LeaseName::parse(&name) {
                prop_assert_eq!(&lease_name.name(), &name, "a second spelling");
            }
        }
    }
}
