//! Names of the units that a node offers: what the kubelet calls a device ID.
//!
//! A name is unique over all resources of a node and survives restarts, reboots and renamed netdevs.
//! So it is made of the hardware's address. It travels through the kubelet's checkpoint and Multus.
//!
//! | pool | form | example |
//! |---|---|---|
//! | exclusive | `<hca>` | `0000:3b:00.0`, `mlx5_core.sf.4`, `guid-505400fffe000001` |
//! | shared | `<hca>_<pool>_<share>` | `0000:3b:00.0_3e71787e_17` |
//! | shared, all HCAs to each unit | `pool_<pool>_<share>` | `pool_3e71787e_17` |
//! | late binding | `slot_<pool>_<slot>` | `slot_3e71787e_3` |
//!
//! `<pool>` is made of the resource name ([`PoolTag`]). A name has at most 63 characters of
//! `[A-Za-z0-9_.:-]`. Auxiliary names end in `.<digits>`, so none reads as a shared unit.

use std::fmt;
use std::hash::Hasher as _;
use std::str::FromStr;

use fnv::FnvHasher;

use crate::address::{Guid, ParseError, hex};
use crate::pci::PciAddress;

/// The longest name of a unit, in bytes.
pub const MAX_LENGTH: usize = 63;

/// What names of units look like, for those who wrote another.
const FORMS: &str = "the name of a unit: a PCI address (0000:3b:00.0), an auxiliary device \
    (mlx5_core.sf.4), guid-<16 digits>, <hca>_<pool>_<share>, pool_<pool>_<share> or \
    slot_<pool>_<slot>";

/// What an HCA is called, whatever its netdev or RDMA device is named today.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HcaId {
    /// A PCI function.
    Pci(PciAddress),
    /// A device on the auxiliary bus, `<module>.<kind>.<number>`: a sub-function such as `mlx5_core.sf.4`.
    Auxiliary(String),
    /// A device with neither, by its node GUID.
    NodeGuid(Guid),
}

/// Eight digits that stand for a resource name inside a unit's name.
///
/// They are FNV-1a, 64 bits folded to 32: the same on every build and machine, and with the few
/// resources of a node as good as unique. A configuration reader compares the tags of its pools
/// and refuses two that are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolTag(u32);

impl PoolTag {
    /// The tag of a full resource name such as `rdma/hca_shared_devices_a`.
    #[must_use]
    pub fn of(resource: &str) -> Self {
        let mut hasher = FnvHasher::default();
        hasher.write(resource.as_bytes());
        let hash = hasher.finish();
        let folded = (hash >> 32) ^ (hash & 0xffff_ffff);
        #[expect(clippy::cast_possible_truncation, reason = "folded to 32 bits above")]
        Self(folded as u32)
    }
}

impl fmt::Display for PoolTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

/// A unit: what one count of a resource stands for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum UnitId {
    /// A whole HCA.
    Exclusive(HcaId),
    /// One of many shares of an HCA.
    Shared {
        /// The HCA.
        hca: HcaId,
        /// The pool it is offered in.
        pool: PoolTag,
        /// Which share, from 0.
        share: u32,
    },
    /// One of many shares of all HCAs of a pool together.
    Pool {
        /// The pool.
        pool: PoolTag,
        /// Which share, from 0.
        share: u32,
    },
    /// A whole HCA of a pool, which one is decided when the pod's network is made.
    Slot {
        /// The pool.
        pool: PoolTag,
        /// Which slot, from 0.
        slot: u32,
    },
}

impl UnitId {
    /// The HCA it names; `None` for a share of a whole pool and for a slot.
    #[must_use]
    pub fn hca(&self) -> Option<&HcaId> {
        match self {
            Self::Exclusive(hca) | Self::Shared { hca, .. } => Some(hca),
            Self::Pool { .. } | Self::Slot { .. } => None,
        }
    }
}

impl HcaId {
    /// The identity of what stands on this PCI function and auxiliary device; `None` for what is on no
    /// bus, whose identity is an attribute.
    #[must_use]
    pub fn of_place(pci: Option<PciAddress>, auxiliary: Option<&str>) -> Option<Self> {
        match (auxiliary, pci) {
            (Some(name), Some(_)) if is_subfunction(name) => name.parse().ok(),
            (_, Some(address)) => Some(Self::Pci(address)),
            (name, None) => name?.parse().ok(),
        }
    }
}

impl fmt::Display for HcaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pci(address) => address.fmt(f),
            Self::Auxiliary(name) => f.write_str(name),
            Self::NodeGuid(guid) => write!(f, "guid-{:016x}", guid.0),
        }
    }
}

impl FromStr for HcaId {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let hca = match (text.strip_prefix("guid-"), text.parse()) {
            (Some(digits), _) => hex(digits, 16..=16).map(|guid| Self::NodeGuid(Guid(guid))),
            (_, Ok(address)) => Some(Self::Pci(address)),
            _ => is_auxiliary(text).then(|| Self::Auxiliary(text.to_owned())),
        };
        // One unit, one name: capitals would be a second spelling.
        let hca = hca.filter(|hca| hca.to_string() == text);
        hca.ok_or_else(|| ParseError::new(text, FORMS))
    }
}

impl fmt::Display for UnitId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exclusive(hca) => hca.fmt(f),
            Self::Shared { hca, pool, share } => write!(f, "{hca}_{pool}_{share}"),
            Self::Pool { pool, share } => write!(f, "pool_{pool}_{share}"),
            Self::Slot { pool, slot } => write!(f, "slot_{pool}_{slot}"),
        }
    }
}

impl FromStr for UnitId {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        if text.len() > MAX_LENGTH {
            let expected = "the name of a unit, which has at most 63 characters";
            return Err(ParseError::new(text, expected));
        }
        let Some((rest, pool, number)) = split_number(text) else {
            return text.parse().map(Self::Exclusive);
        };
        let (share, slot) = (number, number);
        let unit = match rest {
            "pool" => Some(Self::Pool { pool, share }),
            "slot" => Some(Self::Slot { pool, slot }),
            hca => (hca.parse().ok()).map(|hca| Self::Shared { hca, pool, share }),
        };
        let unit = unit.filter(|unit| unit.to_string() == text);
        unit.ok_or_else(|| ParseError::new(text, FORMS))
    }
}

/// Splits `<rest>_<pool>_<number>`.
fn split_number(text: &str) -> Option<(&str, PoolTag, u32)> {
    let (rest, number) = text.rsplit_once('_')?;
    let (rest, pool) = rest.rsplit_once('_')?;
    let pool = u32::try_from(hex(pool, 8..=8)?).ok()?;
    Some((rest, PoolTag(pool), number.parse().ok()?))
}

/// True for a name of the auxiliary bus, `<module>.<kind>.<number>`.
fn is_auxiliary(text: &str) -> bool {
    let is_plain = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
    let is_word = |part: &str| !part.is_empty() && part.bytes().all(is_plain);
    let parts: Vec<&str> = text.split('.').collect();
    matches!(parts.as_slice(), [module, kind, number]
        if is_word(module) && is_word(kind) && is_number(number))
        && text.len() <= MAX_LENGTH
}

pub(crate) fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

/// True for the auxiliary name of a sub-function, `<driver>.sf.<number>`.
pub(crate) fn is_subfunction(auxiliary: &str) -> bool {
    let mut parts = auxiliary.rsplit('.');
    parts.next().is_some_and(is_number) && parts.next() == Some("sf")
}

crate::json::by_text!(HcaId, UnitId);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hca() -> impl Strategy<Value = HcaId> {
        prop_oneof![
            (any::<u32>(), any::<u8>(), 0_u8..32, 0_u8..8).prop_map(
                |(domain, bus, device, function)| HcaId::Pci(PciAddress {
                    domain,
                    bus,
                    device,
                    function
                })
            ),
            "[a-z0-9_]{1,12}[.][a-z]{1,5}[.](0|[1-9][0-9]{0,5})".prop_map(HcaId::Auxiliary),
            any::<u64>().prop_map(|guid| HcaId::NodeGuid(Guid(guid))),
        ]
    }

    fn unit() -> impl Strategy<Value = UnitId> {
        let pool = "[a-z./_]{1,30}".prop_map(|name| PoolTag::of(&name));
        prop_oneof![
            hca().prop_map(UnitId::Exclusive),
            (hca(), pool.clone(), any::<u32>()).prop_map(|(hca, pool, share)| UnitId::Shared {
                hca,
                pool,
                share
            }),
            (pool.clone(), any::<u32>()).prop_map(|(pool, share)| UnitId::Pool { pool, share }),
            (pool, any::<u32>()).prop_map(|(pool, slot)| UnitId::Slot { pool, slot }),
        ]
    }

    /// Sub-functions are HCAs of their own; the RDMA auxiliary device of a function is not.
    #[test]
    fn a_device_in_another_namespace_is_known_by_what_it_stands_on() {
        let pci = "0000:3b:00.2";
        for (on, auxiliary, expected) in [
            (Some(pci), None, Some(pci)),
            (Some(pci), Some("mlx5_core.sf.4"), Some("mlx5_core.sf.4")),
            (Some(pci), Some("mlx5_core.rdma.0"), Some(pci)),
            (None, Some("mlx5_core.rdma.0"), Some("mlx5_core.rdma.0")),
            (None, Some("mlx5_core"), None),
            (None, None, None),
        ] {
            let id = HcaId::of_place(on.map(|on| on.parse().unwrap()), auxiliary);
            let id = id.map(|id| id.to_string());
            assert_eq!(id.as_deref(), expected, "{on:?} {auxiliary:?}");
        }
    }

    proptest! {
        #[test]
        fn a_unit_reads_back_as_named(unit in unit()) {
            prop_assert_eq!(unit.to_string().parse(), Ok(unit));
        }

        #[test]
        fn a_name_is_short_and_of_harmless_characters(unit in unit()) {
            let name = unit.to_string();
            prop_assert!(name.len() <= MAX_LENGTH, "{}", name);
            prop_assert!(
                name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.:-".contains(&b)),
                "{}", name
            );
        }

        #[test]
        fn a_text_that_is_accepted_is_the_only_spelling(text in "(guid-)?[0-9a-fA-F]{1,4}[:._0-9a-f]{0,30}") {
            if let Ok(unit) = text.parse::<UnitId>() {
                prop_assert_eq!(unit.to_string(), text);
            }
        }

        #[test]
        fn no_text_makes_the_reader_panic(text in "\\PC*") {
            let _ = text.parse::<UnitId>();
        }
    }

    #[test]
    fn the_forms_are_distinguished() {
        let pool = PoolTag::of("rdma/hca_shared_devices_a");
        let pci: PciAddress = "0000:3b:00.0".parse().unwrap();
        for (text, expected) in [
            (
                "0000:3b:00.0".to_owned(),
                UnitId::Exclusive(HcaId::Pci(pci)),
            ),
            (
                "mlx5_core.sf.4".to_owned(),
                UnitId::Exclusive(HcaId::Auxiliary("mlx5_core.sf.4".to_owned())),
            ),
            (
                "guid-505400fffe000001".to_owned(),
                UnitId::Exclusive(HcaId::NodeGuid(Guid(0x5054_00ff_fe00_0001))),
            ),
            (
                format!("0000:3b:00.0_{pool}_17"),
                UnitId::Shared {
                    hca: HcaId::Pci(pci),
                    pool,
                    share: 17,
                },
            ),
            (format!("pool_{pool}_0"), UnitId::Pool { pool, share: 0 }),
            (format!("slot_{pool}_3"), UnitId::Slot { pool, slot: 3 }),
        ] {
            assert_eq!(text.parse::<UnitId>(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn names_of_other_things_are_refused() {
        for text in [
            "",
            "mlx5_0",
            "ens1f0",
            "3b:00.0",
            "0000:3B:00.0",
            "pool_0badcafe_01",
            "pool_0BADCAFE_1",
            "pool_0badcafe_",
            "slot_0badcafe_03",
            "slot__0badcafe_3",
            "guid-5054",
            "mlx5_core.sf",
            "mlx5_core.sf.x",
            "a/b.sf.1",
            "../x.sf.1",
            "0000:3b:00.0_0badcafe_-1",
            "_0badcafe_1",
        ] {
            assert!(text.parse::<UnitId>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_pools_tag_is_the_same_on_every_build() {
        // A changed tag would rename all units of a node under running pods.
        assert_eq!(
            PoolTag::of("rdma/hca_shared_devices_a").to_string(),
            "3e71787e"
        );
        assert_ne!(PoolTag::of("rdma/a"), PoolTag::of("rdma/b"));
    }

    #[test]
    fn a_name_that_got_too_long_is_an_error_not_a_cut() {
        let long = format!("{}.sf.4", "m".repeat(50));
        let unit = UnitId::Shared {
            hca: HcaId::Auxiliary(long),
            pool: PoolTag::of("x"),
            share: 1,
        };
        let error = unit.to_string().parse::<UnitId>().unwrap_err();
        assert!(error.to_string().contains("63 characters"), "{error}");
    }
}
