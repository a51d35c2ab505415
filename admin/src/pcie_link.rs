//! A function's PCIe link: how fast it runs, and how fast it could.

use std::fmt;
use std::fs;

use hca::{Host, PciAddress};
use serde::Serialize;

/// Speed and width, where sysfs shows them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PcieLink {
    /// What it runs at.
    pub current: Option<Lanes>,
    /// What the device is capable of.
    pub most: Option<Lanes>,
}

/// Speed and number of lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Lanes {
    /// Millions of transfers a second on each lane: 32000 is PCIe 5.
    pub mega_transfers: u32,
    /// Lanes.
    pub width: u32,
}

impl Lanes {
    /// The PCIe generation; `None` for a speed that no generation has.
    pub(crate) fn generation(self) -> Option<u8> {
        match self.mega_transfers {
            2_500 => Some(1),
            5_000 => Some(2),
            8_000 => Some(3),
            16_000 => Some(4),
            32_000 => Some(5),
            64_000 => Some(6),
            128_000 => Some(7),
            _ => None,
        }
    }

    /// What it carries in one direction, in Mb/s, after line coding (8b/10b up to PCIe 2,
    /// 128b/130b since); packet headers cost some per cent more.
    pub(crate) fn mbps(self) -> u64 {
        let raw = u64::from(self.mega_transfers) * u64::from(self.width);
        if self.mega_transfers <= 5_000 {
            raw * 8 / 10
        } else {
            raw * 128 / 130
        }
    }
}

impl fmt::Display for Lanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.generation() {
            Some(generation) => write!(f, "Gen{generation} x{}", self.width),
            None => write!(f, "{} MT/s x{}", self.mega_transfers, self.width),
        }
    }
}

impl PcieLink {
    /// Reads the link of a function. Virtual functions and virtual machines often say nothing.
    pub(crate) fn read(host: &Host, address: PciAddress) -> Self {
        let directory = host.sys.join("bus/pci/devices").join(address.to_string());
        let text = |name: &str| fs::read_to_string(directory.join(name)).ok();
        let lanes = |speed, width| {
            Some(Lanes {
                mega_transfers: mega_transfers(&text(speed)?)?,
                width: text(width)?.trim().parse().ok().filter(usable_width)?,
            })
        };
        Self {
            current: lanes("current_link_speed", "current_link_width"),
            most: lanes("max_link_speed", "max_link_width"),
        }
    }
}

/// 0 and 255 stand for an unknown width (kernel `drivers/pci/pci-sysfs.c`, VFs).
fn usable_width(width: &u32) -> bool {
    (1..=32).contains(width)
}

/// Reads `32.0 GT/s PCIe`, also in the older form without the last word.
fn mega_transfers(text: &str) -> Option<u32> {
    let number = text.split_once(" GT/s")?.0;
    let (whole, tenths) = number.split_once('.').unwrap_or((number, "0"));
    if tenths.len() != 1 {
        return None;
    }
    whole
        .parse::<u32>()
        .ok()?
        .checked_mul(1_000)?
        .checked_add(tenths.parse::<u32>().ok()? * 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_read_as_the_kernel_writes_them() {
        let cases = [
            ("32.0 GT/s PCIe", Some(32_000)),
            ("2.5 GT/s", Some(2_500)),
            ("8 GT/s", Some(8_000)),
            ("Unknown", None),
            ("Unknown speed", None),
            ("", None),
            ("-1 GT/s", None),
            ("9999999999 GT/s", None),
        ];
        for (text, expected) in cases {
            assert_eq!(mega_transfers(text), expected, "{text}");
        }
    }

    #[test]
    fn a_link_says_its_generation_and_what_it_carries() {
        let gen5 = Lanes {
            mega_transfers: 32_000,
            width: 16,
        };
        assert_eq!(gen5.to_string(), "Gen5 x16");
        assert_eq!(gen5.mbps(), 504_123);
        let gen1 = Lanes {
            mega_transfers: 2_500,
            width: 4,
        };
        assert_eq!(gen1.mbps(), 8_000);
        assert_eq!(
            Lanes {
                mega_transfers: 7_000,
                width: 1
            }
            .to_string(),
            "7000 MT/s x1"
        );
    }
}
