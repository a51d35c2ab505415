//! whereabouts' objects in the Kubernetes API: how they are named, and what they can hold.
//!
//! Pure. An `IPPool` has the leases of one range: a map from an address' distance to the range's
//! network address, written in decimals, to container, pod and interface. An
//! `OverlappingRangeIPReservation` has the lease of one address among all ranges of a network name, and
//! its name stands for the address. The names are those of whereabouts 0.9, because an object under
//! another name is one that whereabouts does not see.

use ipnetwork::IpNetwork;
use std::net::IpAddr;

/// API group of both kinds.
pub const GROUP: &str = "whereabouts.cni.cncf.io";
/// Version of both kinds.
pub const VERSION: &str = "v1alpha1";
/// The largest distance that whereabouts reads: it writes unsigned numbers, and reads signed ones.
pub const MAX_OFFSET: u64 = i64::MAX.unsigned_abs();
/// The longest name of an object.
const NAME_MAX_BYTES: usize = 253;

/// Why an attachment's addresses cannot be recorded in whereabouts' objects.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unrecordable {
    /// `enable_overlapping_ranges: false`.
    #[error(
        "enable_overlapping_ranges is false: without it there is no OverlappingRangeIPReservation, \
         whose name decides who has an address"
    )]
    NotReserved,
    /// `node_slice_size`.
    #[error(
        "node_slice_size: which node has which slice is decided by whereabouts' own controller"
    )]
    Sliced,
    /// Two ranges of one attachment have addresses in common.
    #[error(
        "the ranges {0} and {1} of one attachment overlap: an OverlappingRangeIPReservation names pod and \
         interface, so one address would stand for both"
    )]
    Overlapping(IpNetwork, IpNetwork),
    /// A range or network name cannot be part of an object's name.
    #[error("{0:?} is no name for an object: lower-case letters, digits, '-' and '.'")]
    Name(String),
    /// The address is too far from the range's network address.
    #[error(
        "{0} is more than {MAX_OFFSET} addresses behind the first of {1}, which whereabouts writes and does \
         not read again"
    )]
    TooFar(IpAddr, IpNetwork),
}

impl Unrecordable {
    /// What to do.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::NotReserved => {
                "leave the key out; networks that may use the same addresses get a network_name each"
            }
            Self::Sliced => "leave the key out, or use a store that has blocks of addresses",
            Self::Overlapping(..) => "give the attachment ranges apart from each other",
            Self::Name(_) => "use another network_name or range",
            Self::TooFar(..) => "use a range_end, or a longer prefix",
        }
    }
}

/// Checks what a network asks for against what the objects can hold.
///
/// # Errors
/// [`Unrecordable`].
pub fn check(
    ranges: &[IpNetwork],
    network_name: Option<&str>,
    overlapping: bool,
    sliced: bool,
) -> Result<(), Unrecordable> {
    if sliced {
        return Err(Unrecordable::Sliced);
    }
    if !overlapping {
        return Err(Unrecordable::NotReserved);
    }
    for (number, range) in ranges.iter().enumerate() {
        let name = pool_name(*range, network_name);
        if !is_object_name(&name) {
            return Err(Unrecordable::Name(name));
        }
        let overlaps =
            |other: &&IpNetwork| other.contains(range.network()) || range.contains(other.network());
        if let Some(other) = ranges.iter().take(number).find(overlaps) {
            return Err(Unrecordable::Overlapping(*other, *range));
        }
    }
    Ok(())
}

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

/// The `network_name` that stands before the range in a pool's name.
#[must_use]
pub fn network_name_of_pool(name: &str, range: IpNetwork) -> Option<&str> {
    name.strip_suffix(&pool_name(range, None))?
        .strip_suffix('-')
}

/// Whether Kubernetes takes a name for an object's (a DNS subdomain of RFC 1123).
#[must_use]
pub fn is_object_name(name: &str) -> bool {
    let alphanumeric = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    name.len() <= NAME_MAX_BYTES
        && name.split('.').all(|part| {
            let part = part.as_bytes();
            part.first().is_some_and(|b| alphanumeric(*b))
                && part.last().is_some_and(|b| alphanumeric(*b))
                && part.iter().all(|b| alphanumeric(*b) || *b == b'-')
        })
}

/// The distance of an address to its range's network address.
///
/// # Errors
/// It is too large for whereabouts, or the address is not of the range.
pub fn offset(range: IpNetwork, address: IpAddr) -> Result<u64, Unrecordable> {
    let distance = match (range.network(), address) {
        (IpAddr::V4(first), IpAddr::V4(address)) => {
            u128::from(address.to_bits()).checked_sub(u128::from(first.to_bits()))
        }
        (IpAddr::V6(first), IpAddr::V6(address)) => address.to_bits().checked_sub(first.to_bits()),
        _ => None,
    };
    distance
        .and_then(|distance| u64::try_from(distance).ok())
        .filter(|offset| *offset <= MAX_OFFSET && range.contains(address))
        .ok_or(Unrecordable::TooFar(address, range))
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
            assert!(is_object_name(name), "{name}");
            assert_eq!(network_name_of_pool(name, net(range)), network_name);
        }
        assert_eq!(network_name_of_pool("other", net("10.0.0.0/8")), None);
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
            assert_eq!(offset(net(range), ip(address_)), Ok(distance), "{address_}");
            assert_eq!(address(net(range), distance), Some(ip(address_)));
        }
        for (range, address) in [
            ("fd00::/64", "fd00::8000:0:0:0"),
            ("fd00::/48", "fd00:0:0:1::"),
            ("10.0.0.0/24", "10.0.1.0"),
            ("10.0.0.0/24", "9.255.255.255"),
            ("10.0.0.0/24", "fd00::1"),
        ] {
            let refused = offset(net(range), ip(address));
            assert_eq!(refused, Err(Unrecordable::TooFar(ip(address), net(range))));
        }
        assert_eq!(address(net("10.0.0.0/24"), 256), None);
        assert_eq!(address(net("255.255.255.0/24"), u64::MAX), None);
        assert_eq!(address(net("fd00::/120"), 256), None);
    }

    #[test]
    fn what_the_objects_cannot_hold_is_refused_by_name() {
        let one = [net("10.0.0.0/24")];
        let two = [net("10.0.0.0/24"), net("fd00::/64")];
        assert_eq!(check(&two, Some("blue"), true, false), Ok(()));
        assert_eq!(
            check(&one, None, false, false),
            Err(Unrecordable::NotReserved)
        );
        assert_eq!(check(&one, None, true, true), Err(Unrecordable::Sliced));
        for other in ["10.0.0.0/24", "10.0.0.128/25", "10.0.0.0/8"] {
            let both = [net("10.0.0.0/24"), net(other)];
            let refused = check(&both, None, true, false);
            assert_eq!(
                refused,
                Err(Unrecordable::Overlapping(both[0], both[1])),
                "{other}"
            );
        }
        for name in ["Blue", "b_l", "-b", ".b"] {
            assert!(
                matches!(
                    check(&one, Some(name), true, false),
                    Err(Unrecordable::Name(_))
                ),
                "{name}"
            );
        }
        assert!(matches!(
            check(&[net("::/64")], None, true, false),
            Err(Unrecordable::Name(_))
        ));
    }
}
