//! Texts of addresses, networks, ranges and exclusions.
//!
//! As whereabouts reads them: leading zeros in IPv4 octets are decimal, and an
//! IPv4 address written in IPv6 (`::ffff:10.0.0.0/112`) is an IPv4 address.

use super::{RangeError, Span, bits};
use ipnetwork::IpNetwork;
use std::net::IpAddr;

/// An address; leading zeros are dropped.
pub(crate) fn address(text: &str) -> Option<IpAddr> {
    let address = match text.parse() {
        Ok(address) => address,
        Err(_) => IpAddr::V4(without_leading_zeros(text)?.parse().ok()?),
    };
    Some(plain(address))
}

/// An address with prefix length, host bits kept.
fn network(text: &str) -> Option<IpNetwork> {
    let (left, length) = text.split_once('/')?;
    let plain = address(left)?;
    if length.is_empty() || length.len() > 3 || !length.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let length: u8 = length.parse().ok()?;
    // The length of a mapped address counts from the IPv6 side.
    let mapped = plain.is_ipv4() && left.contains(':');
    let length = if mapped {
        length.checked_sub(96)?
    } else {
        length
    };
    IpNetwork::new(plain, length).ok()
}

/// An address, with the prefix length if one is written.
pub(crate) fn with_length(text: &str) -> Option<(IpAddr, Option<u8>)> {
    match text.contains('/') {
        true => network(text).map(|network| (network.ip(), Some(network.prefix()))),
        false => address(text).map(|address| (address, None)),
    }
}

/// `net/len` or `start-end/len`: the network and, for the second form, its bounds.
pub(super) fn range(text: &str) -> Result<(IpNetwork, Option<(IpAddr, IpAddr)>), RangeError> {
    let wrong = || {
        let expected =
            "a CIDR (10.0.0.0/24) or a pair of addresses with prefix length (10.0.0.5-10.0.0.9/24)";
        RangeError::syntax("range", text, expected)
    };
    let Some((start, end)) = text.split_once('-') else {
        return Ok((masked(network(text).ok_or_else(wrong)?), None));
    };
    let start = address(start).ok_or_else(wrong)?;
    let end_with_length = network(end).ok_or_else(wrong)?;
    let (subnet, end) = (masked(end_with_length), end_with_length.ip());
    if !subnet.contains(start) {
        let why = format!("{start} does not lie in {subnet}, the network of {end}");
        return Err(RangeError::of("range", why));
    }
    Ok((subnet, Some((start, end))))
}

/// An exclusion and whether it is IPv4. Leniently no pairs and no leading
/// zeros, as in whereabouts, whose reader for these is another one.
pub(super) fn exclusion(text: &str, strict: bool) -> Option<(bool, Span)> {
    if !strict && without_leading_zeros(text).is_some_and(|plain| plain != text) {
        return None;
    }
    if let Some((first, last)) = text.split_once('-') {
        let (first, last) = (address(first)?, address(last)?);
        let span = Span {
            first: bits(first),
            last: bits(last),
        };
        let sound = strict && first.is_ipv4() == last.is_ipv4() && first <= last;
        return sound.then_some((first.is_ipv4(), span));
    }
    if let Some(single) = address(text) {
        return Some((single.is_ipv4(), Span::single(bits(single))));
    }
    let subnet = network(text)?;
    Some((subnet.is_ipv4(), Span::of(subnet)))
}

/// Whether a number of an IPv4 address, or a prefix length, is written with a leading zero: some
/// programs read it as octal.
pub(crate) fn has_leading_zero(text: &str) -> bool {
    let padded = |number: &str| {
        number.len() > 1 && number.starts_with('0') && number.bytes().all(|b| b.is_ascii_digit())
    };
    text.split('-').any(|part| {
        let (address, length) = part.split_once('/').unwrap_or((part, ""));
        // The end of an IPv6 address may be written as an IPv4 address.
        let dotted = address.rsplit(':').next().filter(|end| end.contains('.'));
        dotted.is_some_and(|dotted| dotted.split('.').any(padded)) || padded(length)
    })
}

fn masked(network: IpNetwork) -> IpNetwork {
    IpNetwork::new(network.network(), network.prefix()).unwrap_or(network)
}

fn plain(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(v6) => v6.to_ipv4_mapped().map_or(address, IpAddr::V4),
        IpAddr::V4(_) => address,
    }
}

/// The text with the leading zeros of each dotted number dropped; nothing for
/// a text that has no dotted numbers or anything else besides.
fn without_leading_zeros(text: &str) -> Option<String> {
    let (numbers, rest) = text.split_at(text.find('/').unwrap_or(text.len()));
    if text.len() > 128 || !numbers.contains('.') {
        return None;
    }
    let strip = |number: &str| {
        let digits = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
        let short = number.trim_start_matches('0');
        digits.then(|| {
            if short.is_empty() {
                "0".to_owned()
            } else {
                short.to_owned()
            }
        })
    };
    let numbers: Vec<String> = numbers.split('.').map(strip).collect::<Option<_>>()?;
    Some(numbers.join(".") + rest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn leading_zeros_are_decimal() {
        assert_eq!(
            address("00192.00168.1.5"),
            Some("192.168.1.5".parse().unwrap())
        );
        assert_eq!(address("010.0.0.000"), Some("10.0.0.0".parse().unwrap()));
        assert_eq!(
            network("192.168.002.0/24"),
            Some("192.168.2.0/24".parse().unwrap())
        );
        assert_eq!(exclusion("192.168.002.1/32", false), None);
        assert!(exclusion("192.168.002.1/32", true).is_some());
    }

    #[test]
    fn leading_zeros_are_seen_in_every_form_of_ipv4() {
        for text in [
            "010.5.0.0/24",
            "10.5.0.00",
            "10.5.0.0/024",
            "10.5.0.1-10.5.0.09/24",
            "::ffff:010.0.0.1",
            "fd00::/064",
        ] {
            assert!(has_leading_zero(text), "{text}");
        }
        for text in [
            "10.0.0.0/24",
            "0.0.0.0/0",
            "fd00:0056::0/64",
            "10.0.0.1-10.0.0.9/8",
            "100.20.30.40",
            "::ffff:10.0.0.1",
            "",
        ] {
            assert!(!has_leading_zero(text), "{text}");
        }
    }

    #[test]
    fn mapped_addresses_are_ipv4() {
        assert_eq!(
            network("::ffff:10.1.0.0/112"),
            Some("10.1.0.0/16".parse().unwrap())
        );
        assert_eq!(
            address("::ffff:10.1.0.7"),
            Some("10.1.0.7".parse().unwrap())
        );
        assert_eq!(network("::ffff:10.1.0.0/64"), None);
    }

    #[test]
    fn texts_that_mean_nothing_are_refused() {
        for text in [
            "",
            "/",
            "10.0.0.0",
            "10.0.0.0/",
            "10.0.0.0/33",
            "10.0.0.0/-1",
            "10.0.0/24",
            "fd00::/129",
            " 10.0.0.0/24",
            "10.0.0.0/24 ",
            "10.0.0.0/+8",
            "10.0.0.256/24",
            "10.0.0.5 - 10.0.0.9/24",
            "10.0.0.5-10.0.0.9",
            "10.0.0.5-fd00::1/64",
            "10.0.0.0/0024",
        ] {
            assert!(range(text).is_err(), "{text:?}");
        }
        for text in [
            "",
            "nonsense",
            "100::2::1",
            "10.0.0.1/123",
            "10.0.0.9-10.0.0.2",
            "10.0.0.1-fd00::1",
        ] {
            assert!(exclusion(text, true).is_none(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "[0-9a-f:./-]{0,60}") {
            let _ = range(&text);
            let _ = exclusion(&text, true);
            let _ = exclusion(&text, false);
        }

        #[test]
        fn every_network_reads_back(bits in any::<u128>(), length in 0u8..=128, v4 in any::<bool>()) {
            let address = super::super::from_bits(v4, if v4 { bits & 0xffff_ffff } else { bits | 1 << 127 });
            let length = if v4 { length / 4 } else { length };
            let written = IpNetwork::new(address, length).unwrap();
            let (read, bounds) = range(&written.to_string()).unwrap();
            prop_assert_eq!(read.network(), written.network());
            prop_assert_eq!(read.prefix(), length);
            prop_assert!(bounds.is_none());
            prop_assert_eq!(Span::of(read).size(), if length == 0 && !v4 { u128::MAX } else {
                1u128 << (if v4 { 32 } else { 128 } - u32::from(length))
            });
        }
    }
}
