//! whereabouts' objects in the Kubernetes API: how they are named, and how leases are written as such.
//!
//! Pure. An `IPPool` has the leases of one range: a map from an address' distance to the range's
//! network address, written in decimals, to container, pod and interface. An
//! `OverlappingRangeIPReservation` has the lease of one address among all ranges of a network name, and
//! its name stands for the address. The names are those of whereabouts 0.9, because an object under
//! another name is one that whereabouts does not see.

mod export;

pub use export::{Export, export};

use ipnetwork::IpNetwork;
use std::net::IpAddr;

/// API group of both kinds.
pub const GROUP: &str = "whereabouts.cni.cncf.io";
pub const VERSION: &str = "v1alpha1";
/// The largest distance that whereabouts reads: it writes unsigned numbers, and reads signed ones.
pub const MAX_OFFSET: u64 = i64::MAX.unsigned_abs();

/// The name of a range's `IPPool`.
#[must_use]
pub fn pool_name(range: IpNetwork, network_name: Option<&str>) -> String {
    let range = format!("{}/{}", range.network(), range.prefix());
    with_network_name(&normalized(&range), network_name)
}

/// The name of an address' `OverlappingRangeIPReservation`.
#[must_use]
pub fn reservation_name(address: IpAddr, network_name: Option<&str>) -> String {
    with_network_name(&normalized(&address.to_string()), network_name)
}

/// The address that an `OverlappingRangeIPReservation` of a network name stands for.
#[must_use]
pub fn address_of_reservation(name: &str, network_name: Option<&str>) -> Option<IpAddr> {
    let text = match network_name {
        Some(network_name) => name.strip_prefix(network_name)?.strip_prefix('-')?,
        None => name,
    };
    let address: IpAddr = text
        .parse()
        .or_else(|_| text.replace('-', ":").parse())
        .ok()?;
    (reservation_name(address, network_name) == name).then_some(address)
}

fn with_network_name(name: &str, network_name: Option<&str>) -> String {
    match network_name {
        Some(network_name) => format!("{network_name}-{name}"),
        None => name.to_owned(),
    }
}

/// A range or an address as part of an object's name.
#[must_use]
fn normalized(text: &str) -> String {
    let name = text.replace([':', '/'], "-");
    match text.ends_with(':') {
        true => name + "0",
        false => name,
    }
}

/// What stands before the range in the name of its pool: network name, node or both; empty where
/// nothing does. `None` of a name that is not of this range.
#[must_use]
pub fn owner_of_pool(name: &str, range: IpNetwork) -> Option<&str> {
    match name.strip_suffix(&pool_name(range, None))? {
        "" => Some(""),
        owner => owner.strip_suffix('-'),
    }
}

/// The distance of an address to its range's network address; `None` of an address that is not of the
/// range, or too far for whereabouts.
#[must_use]
pub fn offset(range: IpNetwork, address: IpAddr) -> Option<u64> {
    let distance = match (range.network(), address) {
        (IpAddr::V4(first), IpAddr::V4(address)) => {
            u128::from(address.to_bits()).checked_sub(u128::from(first.to_bits()))
        }
        (IpAddr::V6(first), IpAddr::V6(address)) => address.to_bits().checked_sub(first.to_bits()),
        _ => None,
    };
    let offset = u64::try_from(distance?).ok()?;
    (offset <= MAX_OFFSET && range.contains(address)).then_some(offset)
}

/// The address at a distance from its range's network address; `None` outside of the range.
#[must_use]
pub fn address(range: IpNetwork, offset: u64) -> Option<IpAddr> {
    let address = match range.network() {
        IpAddr::V4(first) => IpAddr::V4(
            first
                .to_bits()
                .checked_add(u32::try_from(offset).ok()?)?
                .into(),
        ),
        IpAddr::V6(first) => IpAddr::V6(first.to_bits().checked_add(offset.into())?.into()),
    };
    range.contains(address).then_some(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> IpNetwork {
        text.parse().unwrap()
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// The first two are expectations of whereabouts' own test of names.
    #[test]
    fn pools_are_named_as_whereabouts_names_them() {
        for (range, network_name, name) in [
            ("10.0.0.0/8", None, "10.0.0.0-8"),
            ("10.0.0.0/8", Some("test"), "test-10.0.0.0-8"),
            ("192.168.2.225/28", None, "192.168.2.224-28"),
            ("fd00:1::/64", None, "fd00-1---64"),
            (
                "2001:db8:480:603d:0:0:0:0/64",
                Some("blue"),
                "blue-2001-db8-480-603d---64",
            ),
        ] {
            assert_eq!(pool_name(net(range), network_name), name);
            let owner = network_name.unwrap_or_default();
            assert_eq!(owner_of_pool(name, net(range)), Some(owner));
        }
        assert_eq!(owner_of_pool("other", net("10.0.0.0/8")), None);
    }

    #[test]
    fn reservations_are_named_as_whereabouts_names_them() {
        for (address, network_name, name) in [
            ("10.0.0.5", None, "10.0.0.5"),
            ("10.0.0.5", Some("test"), "test-10.0.0.5"),
            ("fd00:0:0:1::5", None, "fd00-0-0-1--5"),
            ("fd00::", None, "fd00--0"),
            ("fd00::", Some("test"), "test-fd00--0"),
        ] {
            assert_eq!(reservation_name(ip(address), network_name), name);
            assert_eq!(
                address_of_reservation(name, network_name),
                Some(ip(address))
            );
        }
        assert_eq!(address_of_reservation("test-10.0.0.5", None), None);
        assert_eq!(address_of_reservation("10.0.0.5", Some("test")), None);
        assert_eq!(address_of_reservation("a-b-10.0.0.5", Some("a")), None);
    }

    #[test]
    fn an_offset_counts_from_the_network_address() {
        for (range, address_, distance) in [
            ("10.0.0.0/24", "10.0.0.1", 1),
            ("10.0.0.0/8", "10.255.255.254", 0x00ff_fffe),
            ("192.168.2.225/28", "192.168.2.238", 14),
            ("fd00::/64", "fd00::ffff", 0xffff),
            ("fd00::/64", "fd00::7fff:ffff:ffff:ffff", MAX_OFFSET),
            ("fd00::/48", "fd00::1", 1),
        ] {
            assert_eq!(
                offset(net(range), ip(address_)),
                Some(distance),
                "{address_}"
            );
            assert_eq!(address(net(range), distance), Some(ip(address_)));
        }
        for (range, address) in [
            ("fd00::/64", "fd00::8000:0:0:0"),
            ("fd00::/48", "fd00:0:0:1::"),
            ("10.0.0.0/24", "10.0.1.0"),
            ("10.0.0.0/24", "9.255.255.255"),
            ("10.0.0.0/24", "fd00::1"),
        ] {
            assert_eq!(offset(net(range), ip(address)), None, "{address}");
        }
        assert_eq!(address(net("10.0.0.0/24"), 256), None);
        assert_eq!(address(net("255.255.255.0/24"), u64::MAX), None);
        assert_eq!(address(net("fd00::/120"), 256), None);
    }
}
