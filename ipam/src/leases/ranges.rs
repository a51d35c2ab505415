//! The ranges of a space that are in use: for people who want to know how full one is, and where an ADD
//! looks first. Nothing is decided by them: a file that is lost or torn costs a search.

use super::name::{LeaseSpace, Subnet};
use super::{LeaseError, Leases};
use crate::range::{Range, bits};
use ipnetwork::IpNetwork;
use node_wire::PerNode;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::ops::Deref;

/// The file of a space.
pub(super) const FILE: &str = "ranges";
/// Of a range with more parts than this only the first and last address are noted.
const MAX_SPANS: usize = 128;
/// It has the last ones that came and fit: who writes networks chooses how many there are and how long,
/// and every ADD reads it.
const MAX_BYTES: usize = 1 << 16;

/// A set of addresses that a configuration gives out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// The space that it is of.
    pub space: LeaseSpace,
    pub noted: Noted,
}

/// What is noted of one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Noted {
    pub range: IpNetwork,
    /// The CNI network that asked first.
    pub network: String,
    /// First and last address of each part, ascending.
    pub spans: Vec<(IpAddr, IpAddr)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_node: Option<PerNode>,
    /// The first address of its lowest subnet with room, as far as is known.
    pub(super) room: IpAddr,
}

impl Deref for Pool {
    type Target = Noted;

    fn deref(&self) -> &Noted {
        &self.noted
    }
}

impl Noted {
    pub(super) fn of(range: &Range, network: &str, room: Subnet) -> Self {
        let v4 = range.subnet().is_ipv4();
        let mut spans: Vec<(IpAddr, IpAddr)> = range
            .spans()
            .iter()
            .map(|span| span.addresses(v4))
            .collect();
        if let (true, [(first, _), .., (_, last)]) = (spans.len() > MAX_SPANS, spans.as_slice()) {
            spans = vec![(*first, *last)];
        }
        Self {
            range: range.subnet(),
            network: network.to_owned(),
            spans,
            per_node: range.per_node(),
            room: room.address(0),
        }
    }

    /// Whether an address belongs to it.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        let mut spans = self.spans.iter();
        spans.any(|(first, last)| *first <= address && address <= *last)
    }

    /// How many addresses it has; `u128::MAX` stands for that or more.
    #[must_use]
    pub fn size(&self) -> u128 {
        let size = |(first, last): &(IpAddr, IpAddr)| {
            bits(*last).saturating_sub(bits(*first)).saturating_add(1)
        };
        self.spans.iter().map(size).fold(0, u128::saturating_add)
    }

    /// Whether one of its addresses is in a subnet.
    pub(super) fn reaches(&self, subnet: Subnet) -> bool {
        let (first, last) = (subnet.address(0), subnet.address(u8::MAX));
        let mut spans = self.spans.iter();
        spans.any(|(from, to)| *from <= last && first <= *to)
    }
}

/// The ranges of one space.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Ranges(pub(super) Vec<Noted>);

impl Ranges {
    /// Where a search begins: at an address as a number.
    pub(super) fn start(&self, range: &Range) -> u128 {
        let pool = self.0.iter().find(|pool| pool.range == range.subnet());
        pool.map_or(0, |pool| bits(pool.room))
    }

    /// Notes that an address of a range was leased in a subnet, and none is free below.
    pub(super) fn note(&mut self, range: &Range, network: &str, room: Subnet) {
        let new = Noted::of(range, network, room);
        match self.0.iter_mut().find(|pool| pool.range == new.range) {
            Some(known) => {
                known.spans = new.spans;
                known.per_node = new.per_node;
                known.room = new.room;
            }
            None => self.0.push(new),
        }
    }

    /// The last ones that fit into the file.
    fn encode(&self) -> String {
        let mut left = MAX_BYTES.saturating_sub(2);
        let last = self.0.iter().rev().map_while(|pool| {
            let text = serde_json::to_string(pool).ok()?;
            left = left.checked_sub(text.len() + 1)?;
            Some(text)
        });
        let mut texts: Vec<String> = last.collect();
        texts.reverse();
        format!("[{}]", texts.join(","))
    }

    /// Notes that an address was freed.
    pub(super) fn free(&mut self, address: IpAddr) {
        let subnet = Subnet::of(address);
        for pool in &mut self.0 {
            if pool.room > subnet.address(0) && pool.reaches(subnet) {
                pool.room = subnet.address(0);
            }
        }
    }
}

impl Leases {
    pub(super) fn ranges(&self, space: &LeaseSpace) -> Result<Ranges, LeaseError> {
        let path = format!("{}/{FILE}", space.directory());
        let text = self.dir.read(&path, MAX_BYTES as u64)?;
        let pools = text.and_then(|(text, _)| serde_json::from_slice(&text).ok());
        Ok(Ranges(pools.unwrap_or_default()))
    }

    pub(super) fn write_ranges(
        &self,
        space: &LeaseSpace,
        ranges: &Ranges,
    ) -> Result<(), LeaseError> {
        let path = format!("{}/{FILE}", space.directory());
        self.dir.write(&path, ranges.encode().as_bytes())
    }

    /// The ranges of all spaces that are in use.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn pools(&self) -> Result<Vec<Pool>, LeaseError> {
        let mut pools = Vec::new();
        for space in self.spaces()? {
            let of_space = self.ranges(&space)?.0.into_iter();
            let space = || space.clone();
            pools.extend(of_space.map(|noted| Pool {
                space: space(),
                noted,
            }));
        }
        Ok(pools)
    }
}
