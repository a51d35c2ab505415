//! A function's configuration space, as far as preflight asks: capabilities and a few of their
//! registers (PCI Express Base Specification, chapter 7; register names as in the kernel's
//! `include/uapi/linux/pci_regs.h`).
//!
//! The kernel shows the first 64 bytes to everybody, the rest to `CAP_SYS_ADMIN`.

use std::path::Path;

use super::engine::{Fact, Unread};
use super::read;

/// `PCI_STATUS`, with the bit that says there is a list of capabilities.
const STATUS: usize = 0x06;
const STATUS_CAP_LIST: u16 = 0x10;
/// Where the list of capabilities starts.
const CAPABILITY_LIST: usize = 0x34;
/// Capability of PCI Express, and its device control register.
const CAP_EXPRESS: u8 = 0x10;
const DEVICE_CONTROL: usize = 0x08;
/// Where extended capabilities start.
const EXTENDED: usize = 0x100;
/// Access control services, and their control register.
const EXT_ACS: u16 = 0x0d;
const ACS_CONTROL: usize = 0x06;

/// Its size for those without the right.
const WITHOUT_RIGHT: usize = 64;

/// The registers of a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ConfigSpace {
    bytes: Vec<u8>,
}

impl ConfigSpace {
    /// Reads the function in this directory of sysfs.
    pub(crate) fn read(function: &Path) -> Fact<Self> {
        let file = function.join("config");
        match read::bytes(&file) {
            Ok(bytes) if bytes.len() > WITHOUT_RIGHT => Ok(Self { bytes }),
            Ok(_) => Err(Unread(
                "cannot read PCI configuration space: needs CAP_SYS_ADMIN; run rdmactl on the node"
                    .into(),
            )),
            Err(error) => Err(Unread(format!("cannot read {}: {error}", file.display()))),
        }
    }

    /// PCI Express device control: maximum read request size, relaxed ordering. `None` of a function
    /// without this capability.
    pub(crate) fn device_control(&self) -> Option<u16> {
        self.word(self.capability(CAP_EXPRESS)? + DEVICE_CONTROL)
    }

    /// Control of access control services.
    pub(crate) fn acs_control(&self) -> Option<u16> {
        self.word(self.extended(EXT_ACS)? + ACS_CONTROL)
    }

    /// Where a capability is, if the function has it. A list that loops ends after as many steps as fit.
    fn capability(&self, wanted: u8) -> Option<usize> {
        let has_list = self.word(STATUS)? & STATUS_CAP_LIST != 0;
        let mut at = usize::from(self.byte(CAPABILITY_LIST).filter(|_| has_list)? & !3);
        for _ in 0..48 {
            let (id, next) = (self.byte(at)?, self.byte(at + 1)?);
            if at == 0 || id == wanted {
                return (at > 0).then_some(at);
            }
            at = usize::from(next & !3);
        }
        None
    }

    /// The same of extended capabilities. A function whose whole space is 256 bytes, as a conventional
    /// or virtual one, has none.
    fn extended(&self, wanted: u16) -> Option<usize> {
        let mut at = EXTENDED;
        for _ in 0..480 {
            let (id, link) = (self.word(at)?, self.word(at + 2)?);
            if id == wanted {
                return Some(at);
            }
            at = usize::from(link >> 4) & !3;
            if at < EXTENDED {
                break;
            }
        }
        None
    }

    fn byte(&self, at: usize) -> Option<u8> {
        self.bytes.get(at).copied()
    }

    fn word(&self, at: usize) -> Option<u16> {
        Some(u16::from_le_bytes([self.byte(at)?, self.byte(at + 1)?]))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A function with these control registers, as a switch port or a NIC has them.
    pub(crate) fn space(device: u16, acs: Option<u16>) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        let mut put = |at: usize, word: u16| bytes[at..at + 2].copy_from_slice(&word.to_le_bytes());
        put(STATUS, STATUS_CAP_LIST);
        put(CAPABILITY_LIST, 0x40);
        // Power management first, then PCI Express.
        put(0x40, 0x6001);
        put(0x60, 0x0010);
        put(0x60 + DEVICE_CONTROL, device);
        let mut at = EXTENDED;
        // Advanced error reporting leads the extended ones.
        let extended = [(0x01, Some(0)), (EXT_ACS, acs)];
        let present: Vec<(u16, u16)> = extended
            .into_iter()
            .filter_map(|(id, control)| Some((id, control?)))
            .collect();
        for (index, (id, control)) in present.iter().enumerate() {
            let next = if index + 1 < present.len() {
                at + 0x40
            } else {
                0
            };
            put(at, *id);
            put(at + 2, u16::try_from(next).unwrap() << 4 | 1);
            if *id != 0x01 {
                put(at + 6, *control);
            }
            at += 0x40;
        }
        bytes
    }

    #[test]
    fn registers_are_found_through_their_lists() {
        let config = ConfigSpace {
            bytes: space(0x5936, Some(0x001d)),
        };
        assert_eq!(config.device_control(), Some(0x5936));
        assert_eq!(config.acs_control(), Some(0x001d));
        let plain = ConfigSpace {
            bytes: space(0x2810, None),
        };
        assert_eq!(plain.acs_control(), None);
        let conventional = ConfigSpace {
            bytes: vec![0; 256],
        };
        assert_eq!(conventional.device_control(), None);
        assert_eq!(conventional.acs_control(), None);
    }

    #[test]
    fn what_may_not_be_read_is_not_what_a_function_lacks() {
        let directory = tempfile::tempdir().unwrap();
        assert!(ConfigSpace::read(directory.path()).is_err());
        let file = directory.path().join("config");
        std::fs::write(&file, space(0x2810, Some(0)).get(..64).unwrap()).unwrap();
        let Unread(why) = ConfigSpace::read(directory.path()).unwrap_err();
        assert!(why.contains("needs CAP_SYS_ADMIN"), "{why}");
        std::fs::write(&file, space(0x2810, Some(0))).unwrap();
        let space = ConfigSpace::read(directory.path()).unwrap();
        assert_eq!(space.acs_control(), Some(0));
    }

    proptest! {
        #[test]
        fn no_content_makes_the_walk_panic_or_hang(
            bytes in prop::collection::vec(any::<u8>(), 0..4096)
        ) {
            let config = ConfigSpace { bytes };
            let _ = (config.device_control(), config.acs_control());
        }
    }
}
