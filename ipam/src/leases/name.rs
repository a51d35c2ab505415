//! How things are called in the directory of leases.
//!
//! A space is a store and a `network_name`; a range with `enable_overlapping_ranges: false` is a space
//! of its own. A subnet is 256 addresses. The names in a subnet are the last bytes of addresses: `5` is
//! leased, `5-120000` was freed when the boot was 120,000 ms old.

use crate::lease::Lease;
use crate::range::{Range, bits, from_bits};
use crate::space::AddressSpace;
use ipnetwork::IpNetwork;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

/// Whom a leased address is unique among.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LeaseSpace {
    pub space: AddressSpace,
    /// The range, where it is compared with no other one.
    pub alone: Option<IpNetwork>,
}

impl LeaseSpace {
    pub(crate) fn of(space: &AddressSpace, range: &Range, overlapping: bool) -> Self {
        Self {
            space: space.clone(),
            alone: (!overlapping).then(|| range.subnet()),
        }
    }

    #[must_use]
    pub fn of_lease(lease: &Lease) -> Self {
        Self {
            space: AddressSpace::new(&lease.store, lease.network_name.as_deref()),
            alone: (!lease.overlapping).then_some(lease.range),
        }
    }

    /// Its directory: `default+`, `default+blue`, `default+blue+10.0.0.0-24`. No part of it has a `+`, and
    /// no other file's name has one.
    pub(crate) fn directory(&self) -> String {
        let AddressSpace {
            store,
            network_name,
        } = &self.space;
        let name = network_name.as_deref().unwrap_or_default();
        match self.alone {
            None => format!("{store}+{name}"),
            Some(range) => {
                let (first, length) = (range.network(), range.prefix());
                format!("{store}+{name}+{first}-{length}")
            }
        }
    }

    pub(crate) fn parse(directory: &str) -> Option<Self> {
        let mut parts = directory.split('+');
        let (store, name, range) = (parts.next()?, parts.next()?, parts.next());
        let alone = match range {
            None => None,
            Some(text) => {
                let (first, length) = text.split_once('-')?;
                Some(IpNetwork::new(first.parse().ok()?, length.parse().ok()?).ok()?)
            }
        };
        let space = AddressSpace::new(store, Some(name).filter(|name| !name.is_empty()));
        let parsed = Self { space, alone };
        (parts.next().is_none() && parsed.directory() == directory).then_some(parsed)
    }
}

/// 256 addresses: a /24, or a /120 of IPv6.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Subnet {
    v4: bool,
    /// The address without its last byte.
    number: u128,
}

impl Subnet {
    pub(crate) fn of(address: IpAddr) -> Self {
        Self::at(address.is_ipv4(), bits(address))
    }

    pub(crate) fn at(v4: bool, bits: u128) -> Self {
        Self {
            v4,
            number: bits >> 8,
        }
    }

    pub(crate) fn address(self, byte: u8) -> IpAddr {
        from_bits(self.v4, self.first() | u128::from(byte))
    }

    pub(crate) fn first(self) -> u128 {
        self.number << 8
    }

    pub(crate) fn last(self) -> u128 {
        self.first() | 0xff
    }

    /// `10.56.3`, or `fd00::100`.
    pub(crate) fn name(self) -> String {
        match self.address(0) {
            IpAddr::V4(first) => {
                let [a, b, c, _] = first.octets();
                format!("{a}.{b}.{c}")
            }
            IpAddr::V6(first) => first.to_string(),
        }
    }

    pub(crate) fn parse(name: &str) -> Option<Self> {
        let first: IpAddr = match name.contains(':') {
            true => name.parse::<Ipv6Addr>().ok()?.into(),
            false => format!("{name}.0").parse::<Ipv4Addr>().ok()?.into(),
        };
        Some(Self::of(first)).filter(|subnet| subnet.name() == name)
    }
}

/// The last byte of an address, by which it is called in its subnet.
pub(crate) fn byte_of(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(v4) => v4.octets()[3],
        IpAddr::V6(v6) => v6.octets()[15],
    }
}

/// What an address of a subnet is said to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    Leased,
    /// When it was freed, since the boot.
    Freed(Duration),
}

/// The name of a leased address.
pub(crate) fn leased(address: IpAddr) -> String {
    byte_of(address).to_string()
}

/// The name of an address that was freed when the boot was so old.
pub(crate) fn freed(address: IpAddr, at: Duration) -> String {
    format!("{}-{}", byte_of(address), at.as_millis())
}

/// Reads a name of a subnet.
pub(crate) fn entry(name: &str) -> Option<(u8, Use)> {
    let (byte, at) = match name.split_once('-') {
        None => (name, Use::Leased),
        Some((byte, at)) => (byte, Use::Freed(Duration::from_millis(at.parse().ok()?))),
    };
    let number: u8 = byte.parse().ok()?;
    // One spelling of each, or one address would have several names.
    (number.to_string() == byte).then_some((number, at))
}

/// The name of an attachment's record: neither part has a colon.
pub(crate) fn record(container: &str, interface: &str) -> String {
    format!("{container}:{interface}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        for text in ["10.56.3.5", "0.0.0.0", "255.255.255.255", "fd00::1ff", "::"] {
            let address: IpAddr = text.parse().unwrap();
            let subnet = Subnet::of(address);
            assert_eq!(Subnet::parse(&subnet.name()), Some(subnet), "{text}");
            assert_eq!(subnet.address(byte_of(address)), address);
            let at = Duration::from_millis(7);
            assert_eq!(
                entry(&leased(address)),
                Some((byte_of(address), Use::Leased))
            );
            assert_eq!(
                entry(&freed(address, at)),
                Some((byte_of(address), Use::Freed(at)))
            );
        }
        for strange in ["10.56", "10.56.3.5", "010.1.1", "fd00::1", "x"] {
            assert_eq!(Subnet::parse(strange), None, "{strange}");
        }
        for strange in ["05", "256", "-1", "5-", "5-x", "+5", ""] {
            assert_eq!(entry(strange), None, "{strange}");
        }
    }

    #[test]
    fn spaces_read_back() {
        for (name, alone) in [
            (None, None),
            (Some("blue"), None),
            (None, Some("10.0.0.0/25")),
            (Some("blue"), Some("fd00::/64")),
        ] {
            let space = LeaseSpace {
                space: AddressSpace::new("default", name),
                alone: alone.map(|range: &str| range.parse().unwrap()),
            };
            assert_eq!(LeaseSpace::parse(&space.directory()), Some(space));
        }
        assert_eq!(LeaseSpace::parse("a+b+c+d"), None);
        assert_eq!(LeaseSpace::parse("a+b+10.0.0.1-24"), None);
    }
}
