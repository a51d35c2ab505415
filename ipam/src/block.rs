//! Blocks: the aligned networks that an address space is cut into, each some node's or nobody's.
//!
//! Pure. Where Kubernetes says which node has which block, a block is one object, and its name
//! follows from its space and its addresses. All blocks of a range have one length, which an object
//! of the range fixes. So two nodes that want one address want one name, which the API gives to one
//! of them. A range of few blocks is cut into single addresses, or a few nodes would have all of it.

use crate::range::{Span, from_bits, spans_without};
use fnv::FnvHasher;
use ipnetwork::IpNetwork;
use node::policy::BlockLength;
use std::fmt;
use std::hash::Hasher;
use std::net::IpAddr;

/// A range of which fewer blocks could be cut is cut into single addresses.
pub const MIN_BLOCKS: u128 = 16;
/// The longest sanitized part of an object's name that stands for a name of ours.
const MAX_READABLE: usize = 40;

/// Addresses that are unique: those of one store and one `network_name`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AddressSpace {
    /// Name of the store in the policy.
    pub store: String,
    pub network_name: Option<String>,
}

impl AddressSpace {
    /// The space of a store and a `network_name`.
    #[must_use]
    pub fn new(store: &str, network_name: Option<&str>) -> Self {
        Self {
            store: store.to_owned(),
            network_name: network_name.map(str::to_owned),
        }
    }

    /// What names of objects begin with: a DNS subdomain (RFC 1123), distinct for distinct spaces.
    #[must_use]
    pub fn object_name(&self) -> String {
        let space = match &self.network_name {
            Some(name) => format!("net-{}", label(name)),
            None => "default".to_owned(),
        };
        format!("{}.{space}", label(&self.store))
    }

    /// Name of the object of one of its blocks, or of one of its ranges.
    #[must_use]
    pub fn block_name(&self, block: IpNetwork) -> String {
        let first = match block.network() {
            IpAddr::V4(first) => first.to_string(),
            IpAddr::V6(first) => {
                let groups: Vec<String> = first
                    .segments()
                    .iter()
                    .map(|group| format!("{group:x}"))
                    .collect();
                groups.join("-")
            }
        };
        format!("{}.{first}-{}", self.object_name(), block.prefix())
    }

    /// Name of a file that this node keeps of it: `default`, or `default+blue`.
    #[must_use]
    pub fn file_name(&self) -> String {
        match &self.network_name {
            None => self.store.clone(),
            Some(name) => format!("{}+{name}", self.store),
        }
    }

    /// The space whose file has a name.
    #[must_use]
    pub fn of_file_name(file: &str) -> Option<Self> {
        let (store, name) = match file.split_once('+') {
            None => (file, None),
            Some((store, name)) => (store, Some(name)),
        };
        let is_name = node::identity::is_name;
        (is_name(store) && name.is_none_or(is_name)).then(|| Self::new(store, name))
    }
}

impl fmt::Display for AddressSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "store {:?}", self.store)?;
        match &self.network_name {
            Some(name) => write!(f, ", network_name {name:?}"),
            None => Ok(()),
        }
    }
}

/// A name as a part of an object's name: itself if it is a DNS label, else what can be read of it
/// and a hash of the whole.
fn label(name: &str) -> String {
    let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_label = (1..=MAX_READABLE).contains(&name.len())
        && name.bytes().all(fits)
        && !name.starts_with('-')
        && !name.ends_with('-')
        && !is_hashed(name);
    if is_label {
        return name.to_owned();
    }
    let readable: String = name
        .chars()
        .map(|c| c.to_ascii_lowercase())
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .take(MAX_READABLE)
        .collect();
    let readable = readable.trim_matches('-');
    match readable {
        "" => format!("x-{:016x}", hash(name)),
        _ => format!("{readable}-{:016x}", hash(name)),
    }
}

/// Whether a name ends like one that [`label`] makes, so it must be hashed itself.
fn is_hashed(name: &str) -> bool {
    name.rsplit_once('-')
        .is_some_and(|(_, end)| end.len() == 16 && end.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// FNV-1a: equal on all machines and in all versions.
#[must_use]
pub fn hash(text: &str) -> u64 {
    let mut hasher = FnvHasher::default();
    hasher.write(text.as_bytes());
    hasher.finish()
}

/// An address as a block of its own.
#[must_use]
pub fn single(address: IpAddr) -> IpNetwork {
    IpNetwork::from(address)
}

/// Addresses of a block, first and last of a subnet included.
#[must_use]
pub fn size(block: IpNetwork) -> u64 {
    u64::try_from(Span::of(block).size()).unwrap_or(u64::MAX)
}

/// The network of a prefix length around an address.
#[must_use]
pub fn network_around(address: IpAddr, prefix: u8) -> Option<IpNetwork> {
    let network = IpNetwork::new(address, prefix).ok()?.network();
    IpNetwork::new(network, prefix).ok()
}

/// Whether two networks have an address in common.
#[must_use]
pub fn overlap(one: IpNetwork, other: IpNetwork) -> bool {
    one.is_ipv4() == other.is_ipv4() && Span::of(one).intersection(Span::of(other)).is_some()
}

/// Prefix length of a single address.
#[must_use]
pub const fn longest(v4: bool) -> u8 {
    if v4 { 32 } else { 128 }
}

/// The blocks that a range can have: those with an address that may be given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocks {
    v4: bool,
    prefix: u8,
    /// Numbers of blocks, first and last, ascending and disjoint.
    runs: Vec<(u128, u128)>,
}

impl Blocks {
    /// Those of the parts of a range that may be given, ascending and disjoint. None has an address
    /// of `static_networks`, which must not be in a block with others.
    #[must_use]
    pub fn cut(v4: bool, spans: &[Span], prefix: u8, static_networks: &[IpNetwork]) -> Self {
        let whole = |network: &IpNetwork| match network.prefix() > prefix {
            true => network_around(network.network(), prefix),
            false => Some(*network),
        };
        let whole: Vec<IpNetwork> = static_networks.iter().filter_map(whole).collect();
        Self::with_prefix(v4, &spans_without(v4, spans, &whole), prefix)
    }

    /// The prefix length of blocks for these parts of a range, by the policy's length.
    #[must_use]
    pub fn prefix(
        v4: bool,
        spans: &[Span],
        length: BlockLength,
        static_networks: &[IpNetwork],
    ) -> u8 {
        let prefix = if v4 { length.ipv4 } else { length.ipv6 };
        match Self::cut(v4, spans, prefix, static_networks).count() < MIN_BLOCKS {
            true => longest(v4),
            false => prefix,
        }
    }

    fn with_prefix(v4: bool, spans: &[Span], prefix: u8) -> Self {
        let host_bits = u32::from(longest(v4) - prefix);
        let mut runs: Vec<(u128, u128)> = Vec::new();
        for span in spans {
            let number = |address: u128| address.checked_shr(host_bits).unwrap_or(0);
            let (first, last) = (number(span.first), number(span.last));
            match runs.last_mut() {
                // Spans ascend, so only the last block of one can be the first of the next.
                Some(run) if first <= run.1.saturating_add(1) => run.1 = run.1.max(last),
                _ => runs.push((first, last)),
            }
        }
        Self { v4, prefix, runs }
    }

    /// How many there are; `u128::MAX` stands for that or more.
    #[must_use]
    pub fn count(&self) -> u128 {
        let lengths = self
            .runs
            .iter()
            .map(|(first, last)| (last - first).saturating_add(1));
        lengths.fold(0, u128::saturating_add)
    }

    /// The block with a number, from 0, ascending.
    #[must_use]
    pub fn nth(&self, mut number: u128) -> Option<IpNetwork> {
        let host_bits = u32::from(longest(self.v4) - self.prefix);
        for (first, last) in &self.runs {
            let length = (last - first).saturating_add(1);
            if number < length {
                let address = (first + number).checked_shl(host_bits).unwrap_or(0);
                return IpNetwork::new(from_bits(self.v4, address), self.prefix).ok();
            }
            number -= length;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::range::{Range, Spec};
    use node::policy::Profile;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn range(text: &str, exclude: &[&str]) -> Range {
        let spec = Spec {
            range: text,
            exclude,
            ..Spec::default()
        };
        Range::new(&spec, Profile::Strict).unwrap()
    }

    /// As at the first use of a range.
    fn cut(range: &Range, length: BlockLength, static_networks: &[IpNetwork]) -> Blocks {
        let (v4, spans) = (range.subnet().is_ipv4(), range.spans());
        let prefix = Blocks::prefix(v4, spans, length, static_networks);
        Blocks::cut(v4, spans, prefix, static_networks)
    }

    fn all(blocks: &Blocks) -> Vec<String> {
        (0..blocks.count())
            .map(|number| blocks.nth(number).unwrap().to_string())
            .collect()
    }

    fn around(blocks: &Blocks, address: IpAddr) -> Option<IpNetwork> {
        let mut all = (0..blocks.count()).filter_map(|number| blocks.nth(number));
        all.find(|block| block.contains(address))
    }

    #[test]
    fn a_range_of_sixteen_blocks_is_cut_into_blocks() {
        let blocks = cut(&range("10.0.0.0/24", &[]), BlockLength::default(), &[]);
        let all = all(&blocks);
        assert_eq!(
            (all.len(), &*all[0], &*all[15]),
            (16, "10.0.0.0/28", "10.0.0.240/28")
        );
    }

    #[test]
    fn a_range_of_fewer_blocks_is_cut_into_its_single_addresses() {
        let blocks = cut(
            &range("10.0.0.0/29", &["10.0.0.3"]),
            BlockLength::default(),
            &[],
        );
        let singles = [
            "10.0.0.1/32",
            "10.0.0.2/32",
            "10.0.0.4/32",
            "10.0.0.5/32",
            "10.0.0.6/32",
        ];
        assert_eq!(all(&blocks), singles);
        // By what it gives, not by its prefix length.
        let few = cut(
            &range("10.0.0.10-10.0.0.30/24", &[]),
            BlockLength::default(),
            &[],
        );
        assert_eq!((few.count(), few.nth(0).unwrap().prefix()), (21, 32));
    }

    #[test]
    fn blocks_without_an_address_to_give_are_left_out() {
        let blocks = cut(
            &range("10.0.0.0/16", &["10.0.1.0/24", "10.0.2.8/29"]),
            BlockLength::default(),
            &[],
        );
        assert_eq!(blocks.count(), 4096 - 16);
        assert_eq!(blocks.nth(16).unwrap().to_string(), "10.0.2.0/28");
        assert_eq!(around(&blocks, "10.0.1.5".parse().unwrap()), None);
        let there = around(&blocks, "10.0.2.9".parse().unwrap()).unwrap();
        assert_eq!(there.to_string(), "10.0.2.0/28");
    }

    #[test]
    fn a_block_has_no_static_address() {
        let fixed: [IpNetwork; 2] =
            ["10.0.1.0/24", "10.0.2.5/32"].map(|text| text.parse().unwrap());
        let length = BlockLength::default();
        let blocks = cut(&range("10.0.0.0/16", &[]), length, &fixed);
        assert_eq!(blocks.count(), 4096 - 17);
        assert_eq!(around(&blocks, "10.0.2.9".parse().unwrap()), None);
        // Of a range that is cut into single addresses, only the static ones are left out.
        let few = cut(&range("10.0.2.0/29", &[]), length, &fixed);
        assert_eq!(few.count(), 5);
    }

    #[test]
    fn the_widest_ranges_do_not_overflow() {
        for (text, length, count) in [
            ("2000::/3", 112, 1u128 << 109),
            ("2000::/3", 128, (1 << 125) - 2),
            ("fd00::/64", 122, 1 << 58),
        ] {
            let length = BlockLength {
                ipv4: 28,
                ipv6: length,
            };
            let blocks = cut(&range(text, &[]), length, &[]);
            assert_eq!(blocks.count(), count, "{text}");
            let last = blocks.nth(count - 1).unwrap();
            assert!(last.network() > blocks.nth(0).unwrap().network());
            assert_eq!(blocks.nth(count), None);
        }
    }

    #[test]
    fn ranges_that_overlap_have_their_common_blocks_under_one_name() {
        let space = AddressSpace::new("default", None);
        let names = |text: &str| -> BTreeSet<String> {
            let blocks = cut(&range(text, &[]), BlockLength::default(), &[]);
            (0..blocks.count())
                .map(|n| space.block_name(blocks.nth(n).unwrap()))
                .collect()
        };
        let (wide, narrow) = (names("10.0.0.0/16"), names("10.0.3.0/24"));
        assert!(narrow.is_subset(&wide));
        assert!(narrow.contains("default.default.10.0.3.16-28"));
    }

    #[test]
    fn names_are_dns_subdomains_and_apart() {
        let six: IpNetwork = "fd00::40/122".parse().unwrap();
        let space = AddressSpace::new("default", None);
        assert_eq!(
            space.block_name(six),
            "default.default.fd00-0-0-0-0-0-0-40-122"
        );
        let mut seen = BTreeSet::new();
        let long = "n".repeat(253);
        let names = [
            "blue", "Blue", "blue-", "-blue", "bl ue", "", "ü", "日本", "a.b", "a-b", &long,
        ];
        let hashed = label("Blue");
        for name in names.into_iter().chain([&*hashed]) {
            let object = AddressSpace::new("default", Some(name)).block_name(six);
            assert!(object.len() <= 253, "{object}");
            for part in object.split('.') {
                let fits = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
                assert!(part.bytes().all(fits) && !part.is_empty(), "{object}");
                assert!(!part.starts_with('-') && !part.ends_with('-'), "{object}");
            }
            assert!(seen.insert(object.clone()), "{object}");
        }
        // A network named as the space without one.
        let named = AddressSpace::new("default", Some("default")).object_name();
        assert_ne!(named, space.object_name());
    }

    proptest! {
        #[test]
        fn each_address_lies_in_one_block_of_its_range(
            second: u8,
            length in 16u8..=30,
            excluded in 0u8..=255,
            prefix in 20u8..=32,
            address: [u8; 2],
        ) {
            let exclude = format!("10.{second}.0.{excluded}");
            let spec = Spec { range: &format!("10.{second}.0.0/{length}"), ..Spec::default() };
            let inside = Range::new(&spec, Profile::Strict).unwrap().may_be_requested(exclude.parse().unwrap());
            let exclude: &[&str] = if inside { &[&exclude] } else { &[] };
            let range = range(spec.range, exclude);
            let grid = BlockLength { ipv4: prefix, ipv6: 122 };
            let blocks = cut(&range, grid, &[]);
            let address = IpAddr::from([10, second, address[0], address[1]]);
            match around(&blocks, address) {
                Some(block) => {
                    prop_assert!(block.contains(address));
                    let all: Vec<IpNetwork> = (0..blocks.count()).filter_map(|n| blocks.nth(n)).collect();
                    prop_assert_eq!(all.iter().filter(|b| b.contains(address)).count(), 1);
                    prop_assert!(range.within(&[block]).size() > 0);
                    let whole: u128 = all.iter().map(|b| range.within(&[*b]).size()).sum();
                    prop_assert_eq!(whole, range.size());
                }
                None => prop_assert!(!range.gives(address)),
            }
        }
    }
}
