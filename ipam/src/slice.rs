//! Node slices: a range cut into equal parts, one for each node.
//!
//! Pure; which node has which part is the store's business.

use crate::range::{bits, from_bits};
use ipnetwork::IpNetwork;

/// Refuses a slice length that cannot cut `subnet`.
///
/// # Errors
/// The reason.
pub fn check(subnet: IpNetwork, length: u8) -> Result<(), String> {
    let longest = if subnet.is_ipv4() { 32 } else { 128 };
    if length < subnet.prefix() {
        return Err(format!("/{length} is larger than the range {subnet}"));
    }
    if length > longest {
        return Err(format!("/{length} is longer than an address of {subnet}"));
    }
    Ok(())
}

/// How many slices there are; `u128::MAX` for all of IPv6 cut into addresses.
#[must_use]
pub fn count(subnet: IpNetwork, length: u8) -> u128 {
    1u128
        .checked_shl(u32::from(length.saturating_sub(subnet.prefix())))
        .unwrap_or(u128::MAX)
}

/// The slice with a number, from 0.
#[must_use]
pub fn nth(subnet: IpNetwork, length: u8, number: u128) -> Option<IpNetwork> {
    if number >= count(subnet, length) {
        return None;
    }
    let longest = if subnet.is_ipv4() { 32 } else { 128 };
    let offset = number.checked_shl(longest - u32::from(length)).unwrap_or(0);
    let first = from_bits(subnet.is_ipv4(), bits(subnet.network()) | offset);
    IpNetwork::new(first, length).ok()
}

/// The number of the slice that an address of the network lies in.
#[must_use]
pub(crate) fn number_of(subnet: IpNetwork, length: u8, address: u128) -> u128 {
    let longest = if subnet.is_ipv4() { 32 } else { 128 };
    let offset = address - bits(subnet.network()).min(address);
    offset.checked_shr(longest - u32::from(length)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slices(subnet: &str, length: u8) -> Vec<String> {
        let subnet = subnet.parse().unwrap();
        (0..count(subnet, length))
            .map(|n| nth(subnet, length, n).unwrap().to_string())
            .collect()
    }

    #[test]
    fn slices_tile_the_range() {
        assert_eq!(slices("10.0.0.0/8", 8), ["10.0.0.0/8"]);
        assert_eq!(
            slices("10.0.0.0/10", 12),
            [
                "10.0.0.0/12",
                "10.16.0.0/12",
                "10.32.0.0/12",
                "10.48.0.0/12"
            ]
        );
        let six = slices("fd00::/48", 52);
        assert_eq!((six.len(), six[15].as_str()), (16, "fd00:0:0:f000::/52"));
    }

    #[test]
    fn each_address_lies_in_the_slice_of_its_number() {
        for (subnet, length, number) in [
            ("10.0.0.0/8", 26, 131_072),
            ("10.0.0.0/24", 24, 0),
            ("10.0.0.0/24", 32, 255),
            ("fd00::/48", 52, 15),
            ("::/0", 128, u128::MAX - 1),
            ("::/0", 0, 0),
        ] {
            let subnet: IpNetwork = subnet.parse().unwrap();
            let slice = nth(subnet, length, number).unwrap();
            for address in [slice.network(), slice.broadcast()] {
                assert_eq!(number_of(subnet, length, bits(address)), number, "{slice}");
            }
        }
    }

    #[test]
    fn the_widest_cuts_do_not_overflow() {
        let all: IpNetwork = "::/0".parse().unwrap();
        assert_eq!(count(all, 128), u128::MAX);
        assert_eq!(nth(all, 128, 7).unwrap().to_string(), "::7/128");
        assert_eq!(nth(all, 0, 0).unwrap().to_string(), "::/0");
        assert_eq!(nth(all, 0, 1), None);
        assert_eq!(nth("10.0.0.0/24".parse().unwrap(), 26, 4), None);
    }

    #[test]
    fn lengths_that_cut_nothing_are_refused() {
        let subnet = "10.0.0.0/24".parse().unwrap();
        assert!(check(subnet, 20).is_err());
        assert!(check(subnet, 33).is_err());
        assert!(check(subnet, 24).is_ok() && check(subnet, 32).is_ok());
    }
}
