//! GUIDs, link-layer and PCI addresses: the hardware's own names.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// A 64-bit InfiniBand GUID (EUI-64).
///
/// Displayed as sysfs prints it: `5054:00ff:fe00:0001`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Guid(pub u64);

impl Guid {
    /// True for the GUID that means "none", as of a VF whose GUID has not been set.
    #[must_use]
    pub fn is_zero(self) -> bool {
        self.0 == 0
    }
}

impl fmt::Display for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g, h, i] = self.0.to_be_bytes();
        write!(
            f,
            "{a:02x}{b:02x}:{c:02x}{d:02x}:{e:02x}{g:02x}:{h:02x}{i:02x}"
        )
    }
}

/// The text is not an address of the kind asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not {expected}")]
pub struct ParseError {
    /// The text as given.
    pub text: String,
    /// What would have been right, with an example.
    pub expected: &'static str,
}

impl ParseError {
    pub(crate) fn new(text: &str, expected: &'static str) -> Self {
        let text = text.to_owned();
        Self { text, expected }
    }
}

/// Hexadecimal digits, as many as `widths` has.
pub(crate) fn hex(digits: &str, widths: RangeInclusive<usize>) -> Option<u64> {
    let fits = widths.contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit());
    fits.then(|| u64::from_str_radix(digits, 16).ok()).flatten()
}

impl FromStr for Guid {
    type Err = ParseError;

    /// Reads the four-group form of sysfs.
    fn from_str(text: &str) -> Result<Self, ParseError> {
        let groups: Option<Vec<u64>> = text.split(':').map(|group| hex(group, 4..=4)).collect();
        match groups.as_deref() {
            Some([a, b, c, d]) => Ok(Self(a << 48 | b << 32 | c << 16 | d)),
            _ => Err(ParseError::new(text, "a GUID such as 5054:00ff:fe00:0001")),
        }
    }
}

crate::json::by_text!(Guid, MacAddress, PciAddress);

/// A PCI function's address, `domain:bus:device.function`.
///
/// Displayed as the kernel does (`%04x:%02x:%02x.%d`); domains above `ffff` exist (Intel VMD) and
/// simply have more digits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// PCI domain (segment).
    pub domain: u32,
    /// Bus number.
    pub bus: u8,
    /// Device (slot) number, 0 to 31.
    pub device: u8,
    /// Function number, 0 to 7.
    pub function: u8,
}

impl PciAddress {
    /// The card that the function is on: the address of the first function.
    #[must_use]
    pub fn card(self) -> Self {
        Self {
            function: 0,
            ..self
        }
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:04x}:{:02x}:{:02x}.{}",
            self.domain, self.bus, self.device, self.function
        )
    }
}

impl FromStr for PciAddress {
    type Err = ParseError;

    /// Reads the full form only: an address without its domain names a different function on
    /// another machine.
    fn from_str(text: &str) -> Result<Self, ParseError> {
        parse_address(text)
            .ok_or_else(|| ParseError::new(text, "a PCI address such as 0000:3b:00.0"))
    }
}

fn parse_address(text: &str) -> Option<PciAddress> {
    let (domain, rest) = text.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, function) = rest.split_once('.')?;
    let number = |digits, width| u8::try_from(hex(digits, width..=width)?).ok();
    // `00000:` would be a second spelling of `0000:`.
    if domain.len() > 4 && domain.starts_with('0') {
        return None;
    }
    Some(PciAddress {
        domain: u32::try_from(hex(domain, 4..=8)?).ok()?,
        bus: number(bus, 2)?,
        device: number(device, 2).filter(|&d| d < 32)?,
        function: number(function, 1).filter(|&f| f < 8)?,
    })
}

/// A netdev's link-layer address: 6 bytes on Ethernet, 20 on IPoIB, none on some virtual links.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MacAddress(Vec<u8>);

impl MacAddress {
    /// The address with these bytes.
    #[must_use]
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self(bytes.into())
    }

    /// The bytes in transmission order.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The port GUID inside an IPoIB address (its last eight bytes; RFC 4391 section 9.1.1).
    #[must_use]
    pub fn port_guid(&self) -> Option<Guid> {
        let bytes = self.0.last_chunk().filter(|_| self.0.len() == 20)?;
        Some(Guid(u64::from_be_bytes(*bytes)))
    }

    /// True if every byte is zero, as of the loopback device.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.0.iter().all(|&b| b == 0)
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, byte) in self.0.iter().enumerate() {
            write!(f, "{}{byte:02x}", if i == 0 { "" } else { ":" })?;
        }
        Ok(())
    }
}

impl FromStr for MacAddress {
    type Err = ParseError;

    /// Reads colon-separated bytes, up to the kernel's limit of 32 (`MAX_ADDR_LEN`).
    fn from_str(text: &str) -> Result<Self, ParseError> {
        let byte = |digits| u8::try_from(hex(digits, 2..=2)?).ok();
        let bytes: Option<Vec<u8>> = text.split(':').map(byte).collect();
        let bytes = bytes.filter(|bytes| bytes.len() <= 32);
        let expected = "a link-layer address such as 52:54:00:00:00:01";
        bytes
            .map(Self)
            .ok_or_else(|| ParseError::new(text, expected))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_guid_reads_back_as_written(value: u64) {
            prop_assert_eq!(Guid(value).to_string().parse::<Guid>(), Ok(Guid(value)));
        }

        #[test]
        fn a_mac_reads_back_as_written(bytes in prop::collection::vec(any::<u8>(), 1..=32)) {
            let mac = MacAddress::new(bytes);
            prop_assert_eq!(mac.to_string().parse::<MacAddress>(), Ok(mac));
        }

        #[test]
        fn no_text_makes_the_readers_panic(text in "\\PC*") {
            let _ = text.parse::<Guid>();
            let _ = text.parse::<MacAddress>();
        }
    }

    #[test]
    fn wrong_forms_are_refused() {
        for text in [
            "",
            "5054:00ff:fe00",
            "5054:00ff:fe00:0001:0001",
            "5054:00ff:fe00:001",
            "+054:00ff:fe00:0001",
        ] {
            assert!(text.parse::<Guid>().is_err(), "{text}");
        }
        for text in [
            "",
            "52:54:0:0:0:1",
            "52-54-00-00-00-01",
            "52:54:00:00:00:01:",
            "+1:54",
        ] {
            assert!(text.parse::<MacAddress>().is_err(), "{text}");
        }
    }

    #[test]
    fn an_ipoib_address_ends_in_the_port_guid() {
        let text = "00:00:10:49:fe:80:00:00:00:00:00:00:b8:59:9f:03:00:aa:bb:cc";
        let mac: MacAddress = text.parse().unwrap();
        assert_eq!(mac.port_guid(), Some(Guid(0xb859_9f03_00aa_bbcc)));
        assert_eq!(MacAddress::new([0; 6]).port_guid(), None);
    }
}
