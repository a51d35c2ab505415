//! What a configured range means: which addresses it may give.
//!
//! Pure arithmetic on 128 bits for both families; nothing is enumerated, so a
//! /8 of IPv6 costs what a /29 of IPv4 costs. The rules are whereabouts', read
//! in one of two [`Profile`]s: `Compatible` keeps its leniencies (a bound that
//! makes no sense is passed over), `Strict` refuses what cannot be meant and
//! makes /31 (RFC 3021), /127 (RFC 6164) and single addresses usable.

mod parse;
mod per_node;
mod span;

pub use per_node::gateway_in;
pub use span::Span;

use crate::space::{longest, network_around};
use ipnetwork::IpNetwork;
use node::policy::Profile;
use node_wire::PerNode;
use std::fmt::Display;
use std::net::IpAddr;

pub(crate) use parse::{address, has_leading_zero, with_length};

/// An address and the prefix length written with it, if one was.
pub type IpAddrWithLength = (IpAddr, Option<u8>);

/// A range as it stands in a configuration.
#[derive(Debug, Clone, Copy, Default)]
pub struct Spec<'a> {
    /// `net/len` or `start-end/len`.
    pub range: &'a str,
    pub start: Option<&'a str>,
    pub end: Option<&'a str>,
    /// `exclude`: addresses, CIDRs and, in the strict profile, `start-end`.
    pub exclude: &'a [&'a str],
    /// Addresses that other machines have, as the gateway, or that the network itself gives:
    /// they are never leased.
    pub reserved: &'a [IpAddr],
    /// `perNode`.
    pub per_node: Option<PerNode>,
}

/// Of so many networks of nodes one with an address for a pod is searched, for an example.
const MOST_TRIED: usize = 64;

/// A range that was checked.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Range {
    subnet: IpNetwork,
    window: Span,
    spans: Vec<Span>,
    per_node: Option<PerNode>,
}

/// Why a range cannot be used. It begins with the key, relative to the object the range stands in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RangeError(String);

impl RangeError {
    fn of(key: &str, why: impl Display) -> Self {
        Self(format!("{key}: {why}"))
    }

    /// A text is not an address, CIDR or pair of addresses.
    fn syntax(key: &str, value: &str, expected: &str) -> Self {
        Self::of(key, format_args!("{value:?} is not {expected}"))
    }

    /// A bound or exclusion of the other family, or elsewhere.
    fn outside(key: &str, value: &str, subnet: IpNetwork) -> Self {
        Self::of(key, format_args!("{value:?} does not lie in {subnet}"))
    }
}

impl Range {
    /// Reads a range by the rules of `profile`.
    pub fn new(spec: &Spec<'_>, profile: Profile) -> Result<Self, RangeError> {
        let strict = profile == Profile::Strict;
        if strict {
            refuse_leading_zeros(spec)?;
        }
        let (subnet, bounds) = parse::range(spec.range)?;
        if strict {
            refuse_reserved(subnet)?;
        }
        if let Some(per_node) = spec.per_node {
            per_node::check(per_node, subnet).map_err(|why| RangeError::of("perNode", why))?;
        }
        let window = match usable(subnet) {
            // The first and the last address are those of nodes' networks.
            _ if spec.per_node.is_some() => Span::of(subnet),
            Some(window) => window,
            None if strict => Span::of(subnet),
            None => {
                let why = format!("{subnet} has no address between its first and its last");
                return Err(RangeError::of("range", why));
            }
        };
        let bounds = match bounds {
            // The dash form replaces explicit bounds, as in whereabouts.
            Some((start, end)) => (Some(start), Some(end)),
            None => (
                bound("range_start", spec.start, subnet, strict)?,
                bound("range_end", spec.end, subnet, strict)?,
            ),
        };
        let window = clip(subnet, window, bounds, strict)?;
        let mut taken = Vec::new();
        for (index, text) in spec.exclude.iter().enumerate() {
            taken.extend(exclusion(index, text, subnet, strict)?);
        }
        let reserved = spec.reserved.iter();
        taken.extend(
            reserved
                .filter(|address| subnet.contains(**address))
                .map(|address| Span::single(bits(*address))),
        );
        let spans = span::without(window, taken);
        if strict && spans.is_empty() {
            let why = format!(
                "exclusions, gateway, next hops and fixed addresses leave no address of {subnet}"
            );
            return Err(RangeError::of("exclude", why));
        }
        Ok(Self {
            subnet,
            window,
            spans,
            per_node: spec.per_node,
        })
    }

    /// The range of a network that gives these addresses, from first to last, ascending.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn of_parts(subnet: IpNetwork, parts: &[(IpAddr, IpAddr)]) -> Result<Self, &'static str> {
        let mut spans: Vec<Span> = Vec::new();
        for (first, last) in parts {
            if !subnet.contains(*first) || !subnet.contains(*last) {
                return Err("a span is not in it");
            }
            let (first, last) = (bits(*first), bits(*last));
            if first > last || spans.last().is_some_and(|before| before.last >= first) {
                return Err("its spans do not ascend");
            }
            spans.push(Span { first, last });
        }
        let (Some(lowest), Some(highest)) = (spans.first(), spans.last()) else {
            return Err("it has no span");
        };
        Ok(Self {
            subnet: IpNetwork::new(subnet.network(), subnet.prefix()).unwrap_or(subnet),
            window: Span {
                first: lowest.first,
                last: highest.last,
            },
            spans,
            per_node: None,
        })
    }

    /// The same range, divided by networks of nodes.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn divided(self, per_node: Option<PerNode>) -> Result<Self, String> {
        if let Some(per_node) = per_node {
            per_node::check(per_node, self.subnet)?;
        }
        Ok(Self { per_node, ..self })
    }

    /// How it is divided among nodes, if it is.
    #[must_use]
    pub fn per_node(&self) -> Option<PerNode> {
        self.per_node
    }

    /// The network of an interface with an address of it.
    pub(crate) fn network_of(&self, address: IpAddr) -> IpNetwork {
        let of_node = self.per_node.map(|of| network_around(address, of.prefix));
        of_node.flatten().unwrap_or(self.subnet)
    }

    /// Prefix length that goes with its addresses.
    #[must_use]
    pub fn prefix(&self) -> u8 {
        self.per_node
            .map_or(self.subnet.prefix(), |per_node| per_node.prefix)
    }

    /// The gateway of the node's network that has an address.
    #[must_use]
    pub fn gateway_of(&self, address: IpAddr) -> Option<IpAddr> {
        gateway_in(self.per_node?, self.network_of(address))
    }

    /// The range that gives every address of a network.
    #[must_use]
    pub fn whole(subnet: IpNetwork) -> Self {
        let window = Span::of(subnet);
        Self {
            subnet,
            window,
            spans: vec![window],
            per_node: None,
        }
    }

    /// How many of its addresses a network has.
    #[must_use]
    pub fn size_within(&self, network: IpNetwork) -> u128 {
        self.within(&[network]).size()
    }

    /// The same range, of which no address of some networks is given.
    #[must_use]
    pub fn without(&self, networks: &[IpNetwork]) -> Self {
        Self {
            subnet: self.subnet,
            window: self.window,
            spans: spans_without(self.subnet.is_ipv4(), &self.spans, networks),
            per_node: self.per_node,
        }
    }

    /// The same range, of which only addresses of some networks are given; of nodes' networks those of
    /// pods.
    #[must_use]
    pub fn within(&self, networks: &[IpNetwork]) -> Self {
        let mut networks: Vec<Span> = networks
            .iter()
            .filter(|network| network.is_ipv4() == self.subnet.is_ipv4())
            .flat_map(|network| match self.per_node {
                Some(per_node) => per_node::of_pods(per_node, *network),
                None => vec![Span::of(*network)],
            })
            .collect();
        networks.sort_by_key(|network| network.first);
        let of_network = |network: Span| {
            self.spans
                .iter()
                .filter_map(move |span| span.intersection(network))
        };
        Self {
            subnet: self.subnet,
            window: self.window,
            spans: networks.into_iter().flat_map(of_network).collect(),
            per_node: self.per_node,
        }
    }

    /// The network, host bits zero. Its prefix length goes into the result.
    #[must_use]
    pub fn subnet(&self) -> IpNetwork {
        self.subnet
    }

    /// Whether an address is among those that are given.
    #[must_use]
    pub fn gives(&self, address: IpAddr) -> bool {
        let same_family = self.subnet.is_ipv4() == address.is_ipv4();
        same_family && self.spans.iter().any(|span| span.contains(bits(address)))
    }

    /// First and last address that could be given if nothing were excluded.
    #[must_use]
    pub fn window(&self) -> (IpAddr, IpAddr) {
        let v4 = self.subnet.is_ipv4();
        (
            from_bits(v4, self.window.first),
            from_bits(v4, self.window.last),
        )
    }

    /// The addresses that may be given, ascending and disjoint.
    #[must_use]
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// The lowest address that may be given.
    #[must_use]
    pub fn lowest(&self) -> Option<IpAddr> {
        self.spans
            .first()
            .map(|span| from_bits(self.subnet.is_ipv4(), span.first))
    }

    /// An address that a pod can have.
    #[must_use]
    pub fn example(&self) -> Option<IpAddr> {
        let Some(per_node) = self.per_node else {
            return self.lowest();
        };
        let v4 = self.subnet.is_ipv4();
        let host_bits = u32::from(longest(v4).checked_sub(per_node.prefix)?);
        let number = |address: u128| address.checked_shr(host_bits).unwrap_or(0);
        let spans = self.spans.iter();
        let numbers = spans.flat_map(|span| number(span.first)..=number(span.last));
        let mut networks = numbers.take(MOST_TRIED).filter_map(|number| {
            let first = number.checked_shl(host_bits).unwrap_or(0);
            IpNetwork::new(from_bits(v4, first), per_node.prefix).ok()
        });
        networks.find_map(|network| self.within(&[network]).lowest())
    }

    /// Whether `address` may be given on explicit request: any host address of
    /// the network. Exclusions and bounds fence off what is given unasked.
    #[must_use]
    pub fn may_be_requested(&self, address: IpAddr) -> bool {
        let hosts = per_node::hosts(self.network_of(address));
        self.subnet.contains(address) && hosts.contains(bits(address))
    }

    /// How many addresses may be given; `u128::MAX` stands for that or more.
    #[must_use]
    pub fn size(&self) -> u128 {
        self.spans
            .iter()
            .fold(0, |sum: u128, span| sum.saturating_add(span.size()))
    }
}

/// Spans without the addresses of some networks.
pub(crate) fn spans_without(v4: bool, spans: &[Span], networks: &[IpNetwork]) -> Vec<Span> {
    let holes: Vec<Span> = networks
        .iter()
        .filter(|network| network.is_ipv4() == v4)
        .map(|network| Span::of(*network))
        .collect();
    let left = |whole: &Span| span::without(*whole, holes.clone());
    spans.iter().flat_map(left).collect()
}

/// The number an address is.
#[must_use]
pub fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(v4.to_bits()),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

/// The address a number is.
pub fn from_bits(v4: bool, bits: u128) -> IpAddr {
    match u32::try_from(bits) {
        Ok(bits) if v4 => IpAddr::V4(bits.into()),
        _ => IpAddr::V6(bits.into()),
    }
}

/// Blocks whose addresses the kernel takes for none of an interface's: RFC 1122 3.2.1.3, RFC 5771,
/// RFC 4291 2.4. Link-local ones are an interface's.
const RESERVED: [(&str, &str); 6] = [
    ("0.0.0.0/8", "a host without an address"),
    ("127.0.0.0/8", "the loopback interface"),
    ("224.0.0.0/4", "multicast"),
    ("::/128", "a host without an address"),
    ("::1/128", "the loopback interface"),
    ("ff00::/8", "multicast"),
];

fn refuse_reserved(subnet: IpNetwork) -> Result<(), RangeError> {
    let range = Span::of(subnet);
    let overlaps = |block: &str| {
        let block = block.parse::<IpNetwork>().ok();
        block.is_some_and(|block| {
            block.is_ipv4() == subnet.is_ipv4() && range.intersection(Span::of(block)).is_some()
        })
    };
    match RESERVED.into_iter().find(|(block, _)| overlaps(block)) {
        None => Ok(()),
        Some((block, purpose)) => Err(RangeError::of(
            "range",
            format_args!(
                "{subnet} has addresses of {block}, which are for {purpose}: no interface of a pod can have them"
            ),
        )),
    }
}

fn refuse_leading_zeros(spec: &Spec<'_>) -> Result<(), RangeError> {
    let bounds = [("range_start", spec.start), ("range_end", spec.end)];
    let bounds = bounds
        .into_iter()
        .filter_map(|(key, text)| Some((key.to_owned(), text?)));
    let exclude = spec.exclude.iter().enumerate();
    let exclude = exclude.map(|(index, text)| (format!("exclude[{index}]"), *text));
    let mut texts = std::iter::once(("range".to_owned(), spec.range))
        .chain(bounds)
        .chain(exclude);
    match texts.find(|(_, text)| parse::has_leading_zero(text)) {
        None => Ok(()),
        Some((key, text)) => Err(RangeError::of(
            &key,
            format_args!(
                "{text:?} has a number with a leading zero, which may be meant as octal; leave the zero out"
            ),
        )),
    }
}

/// All but the first and last address, in both families, as whereabouts has it.
fn usable(subnet: IpNetwork) -> Option<Span> {
    let whole = Span::of(subnet);
    (whole.last - whole.first >= 3).then(|| Span {
        first: whole.first + 1,
        last: whole.last - 1,
    })
}

fn bound(
    key: &str,
    text: Option<&str>,
    subnet: IpNetwork,
    strict: bool,
) -> Result<Option<IpAddr>, RangeError> {
    let Some(text) = text else { return Ok(None) };
    let parsed = parse::address(text).filter(|address| subnet.contains(*address));
    if !strict {
        return Ok(parsed);
    }
    match parse::address(text) {
        None => Err(RangeError::syntax(key, text, "an address")),
        Some(_) if parsed.is_none() => Err(RangeError::outside(key, text, subnet)),
        Some(_) => Ok(parsed),
    }
}

/// Applies the bounds. Strictly, bounds without a host address between them are refused;
/// leniently, a bound that does not fit is not a bound.
fn clip(
    subnet: IpNetwork,
    window: Span,
    (start, end): (Option<IpAddr>, Option<IpAddr>),
    strict: bool,
) -> Result<Span, RangeError> {
    if strict {
        if let (Some(start), Some(end)) = (start, end)
            && end < start
        {
            let why = format!("{end} comes before {start}, where the range starts");
            return Err(RangeError::of("range_end", why));
        }
        let (start, end) = (
            start.unwrap_or(subnet.network()),
            end.unwrap_or(subnet.broadcast()),
        );
        let stated = Span {
            first: bits(start),
            last: bits(end),
        };
        return stated
            .intersection(window)
            .ok_or_else(|| RangeError::of("range", format_args!("{subnet} has no address for a pod from {start} to {end}: its first and last address are not given")));
    }
    let inside = |address: IpAddr| Some(bits(address)).filter(|bits| window.contains(*bits));
    let first = start.and_then(inside).unwrap_or(window.first);
    let last = end
        .and_then(inside)
        .filter(|last| *last >= first)
        .unwrap_or(window.last);
    Ok(Span { first, last })
}

fn exclusion(
    index: usize,
    text: &str,
    subnet: IpNetwork,
    strict: bool,
) -> Result<Option<Span>, RangeError> {
    let key = format!("exclude[{index}]");
    let Some((v4, span)) = parse::exclusion(text, strict) else {
        let expected = if strict {
            "an address, a CIDR or a pair start-end"
        } else {
            "an address or a CIDR"
        };
        return Err(RangeError::syntax(&key, text, expected));
    };
    if v4 == subnet.is_ipv4() && span.intersection(Span::of(subnet)).is_some() {
        return Ok(Some(span));
    }
    if strict {
        return Err(RangeError::outside(&key, text, subnet));
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn strict(spec: &Spec<'_>) -> Result<Range, RangeError> {
        Range::new(spec, Profile::Strict)
    }

    fn lenient(spec: &Spec<'_>) -> Result<Range, RangeError> {
        Range::new(spec, Profile::Compatible)
    }

    fn assert_refused(range: Result<Range, RangeError>, why: &str) {
        let refused = range.unwrap_err().to_string();
        assert!(refused.contains(why), "{refused}");
    }

    fn window(range: &Range) -> (String, String) {
        let (first, last) = range.window();
        (first.to_string(), last.to_string())
    }

    #[test]
    fn addresses_that_no_interface_can_have_are_refused_when_strict() {
        for text in [
            "127.0.0.0/8",
            "127.1.2.0/24",
            "224.0.0.0/4",
            "239.1.0.0/16",
            "0.0.0.0/0",
            "0.0.0.0/24",
            "126.0.0.0/7",
            "::/0",
            "::/64",
            "ff02::/64",
        ] {
            let spec = Spec {
                range: text,
                ..Spec::default()
            };
            assert_refused(strict(&spec), "no interface of a pod can have them");
            assert!(lenient(&spec).is_ok(), "{text}");
        }
        for text in ["169.254.0.0/16", "fe80::/64", "1.0.0.0/8", "240.0.0.0/8"] {
            let spec = Spec {
                range: text,
                ..Spec::default()
            };
            assert!(strict(&spec).is_ok(), "{text}");
        }
    }

    #[test]
    fn leading_zeros_are_refused_when_strict() {
        let padded = ["10.0.0.07"];
        let net = Spec {
            range: "10.0.0.0/24",
            ..Spec::default()
        };
        for (spec, key) in [
            (
                Spec {
                    range: "010.0.0.0/24",
                    ..net
                },
                "range: ",
            ),
            (
                Spec {
                    start: Some("10.0.0.05"),
                    ..net
                },
                "range_start: ",
            ),
            (
                Spec {
                    end: Some("10.0.0.050"),
                    ..net
                },
                "range_end: ",
            ),
            (
                Spec {
                    exclude: &padded,
                    ..net
                },
                "exclude[0]: ",
            ),
        ] {
            let error = strict(&spec).unwrap_err().to_string();
            assert!(
                error.starts_with(key) && error.contains("leading zero"),
                "{error}"
            );
        }
        let spec = Spec {
            range: "010.0.0.0/24",
            start: Some("10.0.0.05"),
            ..net
        };
        assert_eq!(window(&lenient(&spec).unwrap()).0, "10.0.0.5");
    }

    #[test]
    fn senseless_bounds_are_refused_or_passed_over() {
        let net = Spec {
            range: "10.0.0.0/24",
            ..Spec::default()
        };
        for (start, end) in [
            (Some("10.0.1.5"), None),
            (Some("fd00::5"), None),
            (Some("five"), None),
            (None, Some("9.255.255.255")),
            (None, Some("")),
        ] {
            let spec = Spec { start, end, ..net };
            assert!(strict(&spec).is_err(), "{start:?} {end:?}");
            assert_eq!(window(&lenient(&spec).unwrap()).0, "10.0.0.1");
            assert_eq!(window(&lenient(&spec).unwrap()).1, "10.0.0.254");
        }
        let inverted = Spec {
            start: Some("10.0.0.9"),
            end: Some("10.0.0.4"),
            ..net
        };
        assert_refused(strict(&inverted), "comes before");
        assert_eq!(
            window(&lenient(&inverted).unwrap()),
            ("10.0.0.9".into(), "10.0.0.254".into())
        );
    }

    #[test]
    fn bounds_on_the_edge_give_nothing_outside_of_them() {
        let edge = Spec {
            range: "10.0.0.0/24",
            start: Some("10.0.0.0"),
            end: Some("10.0.0.255"),
            ..Spec::default()
        };
        assert_eq!(
            window(&strict(&edge).unwrap()),
            ("10.0.0.1".into(), "10.0.0.254".into())
        );
        for (range, start, end) in [
            ("10.0.0.0/24", Some("10.0.0.255"), None),
            ("10.0.0.0/24", None, Some("10.0.0.0")),
            ("10.0.0.255-10.0.0.255/24", None, None),
            ("10.0.0.0-10.0.0.0/24", None, None),
            ("fd00::-fd00::/64", None, None),
        ] {
            let spec = Spec {
                range,
                start,
                end,
                ..edge
            };
            assert_refused(strict(&spec), "has no address for a pod");
        }
        let whole = Spec {
            range: "10.0.0.0-10.0.0.1/31",
            ..Spec::default()
        };
        assert_eq!(strict(&whole).unwrap().size(), 2);
    }

    #[test]
    fn the_dash_form_bounds_the_network_of_its_end() {
        let spec = Spec {
            range: "10.0.0.5-10.0.0.9/24",
            start: Some("10.0.0.77"),
            ..Spec::default()
        };
        let range = strict(&spec).unwrap();
        assert_eq!(range.subnet().to_string(), "10.0.0.0/24");
        assert_eq!(window(&range), ("10.0.0.5".into(), "10.0.0.9".into()));
        let spec = Spec {
            range: "10.0.0.5-10.0.1.9/28",
            ..Spec::default()
        };
        assert_refused(lenient(&spec), "the network of 10.0.1.9");
        let spec = Spec {
            range: "10.0.0.9-10.0.0.5/24",
            ..Spec::default()
        };
        assert_refused(strict(&spec), "comes before");
    }

    #[test]
    fn exclusions_and_gateway_are_cut_out() {
        let exclude = ["10.0.0.0/30", "10.0.0.9", "10.0.0.6-10.0.0.7"];
        let spec = Spec {
            range: "10.0.0.0/28",
            exclude: &exclude,
            reserved: &[ip("10.0.0.4")],
            ..Spec::default()
        };
        let range = strict(&spec).unwrap();
        let given: Vec<u128> = range
            .spans()
            .iter()
            .flat_map(|s| s.first..=s.last)
            .collect();
        let base = bits(ip("10.0.0.0"));
        assert_eq!(given, [5, 8, 10, 11, 12, 13, 14].map(|n| base + n));
        let message = lenient(&spec).unwrap_err().to_string();
        assert!(
            message.contains("exclude[2]") && message.contains("10.0.0.6-"),
            "{message}"
        );
        let spec = Spec {
            exclude: &exclude[..2],
            ..spec
        };
        let read = lenient(&spec).unwrap();
        assert!(!read.spans().iter().any(|s| s.contains(base + 4)));
    }

    #[test]
    fn exclusions_elsewhere_are_refused_when_strict() {
        for elsewhere in ["10.1.0.0/24", "fd00::/64"] {
            let exclude = [elsewhere];
            let spec = Spec {
                range: "10.0.0.0/24",
                exclude: &exclude,
                ..Spec::default()
            };
            assert_refused(strict(&spec), "does not lie in");
            assert_eq!(lenient(&spec).unwrap().size(), 254);
        }
    }

    #[test]
    fn a_range_that_can_give_nothing_is_refused_when_strict() {
        let exclude = ["10.0.0.0/24"];
        let spec = Spec {
            range: "10.0.0.0/24",
            exclude: &exclude,
            ..Spec::default()
        };
        assert_refused(strict(&spec), "leave no address of");
        assert_eq!(lenient(&spec).unwrap().size(), 0);
    }

    #[test]
    fn any_host_address_may_be_requested() {
        let exclude = ["10.0.0.64/26"];
        let spec = Spec {
            range: "10.0.0.0/24",
            start: Some("10.0.0.128"),
            exclude: &exclude,
            ..Spec::default()
        };
        let range = strict(&spec).unwrap();
        for (address, may) in [
            ("10.0.0.1", true),
            ("10.0.0.70", true),
            ("10.0.0.0", false),
            ("10.0.0.255", false),
            ("10.0.1.1", false),
            ("fd00::1", false),
        ] {
            assert_eq!(range.may_be_requested(ip(address)), may, "{address}");
        }
    }
}
