//! Which node may lease which addresses: one document for each *subnet*, 256 addresses of a space.
//!
//! A document is a map of disjoint *parts*, each a node's or reserved; what no part covers is free. It
//! changes only by read, [`change`] and compare-and-swap, so nodes need not agree on how a range is
//! cut. Pure: no file, socket or clock.
//!
//! - this file: the document and its JSON form;
//! - [`mod@change`]: every change that there is;
//! - [`piece`]: aligned pieces of a subnet, and which of them are free;
//! - [`mod@size`]: how much a node claims, and in which subnet it looks first.

pub mod change;
pub mod piece;
pub mod size;

#[cfg(test)]
mod explore;
#[cfg(test)]
mod tests;

use crate::space::{network_around, overlap};
use ipnetwork::IpNetwork;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

pub use change::{Change, Changed, Handover, Holder, Refused, Wanted, change};
pub use size::{claim_size, subnets};

/// Addresses of a subnet.
pub const ADDRESSES: usize = 256;
/// The most wants that stand on one part.
pub const MAX_WANTS: usize = 4;

/// One subnet of a space.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Document {
    /// Name of the store.
    pub store: String,
    /// `network_name` of the space; empty for the space without one.
    #[serde(default)]
    pub network_name: String,
    pub subnet: IpNetwork,
    #[serde(default, deserialize_with = "parts")]
    pub parts: BTreeMap<IpNetwork, Part>,
}

/// A piece of a subnet that is not free: a node's, or reserved.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Part {
    /// The node that has it; empty for a reserved one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub node: String,
    /// Chosen by the claimant at random. A part that an administrator assigned has none until its node
    /// takes it up. Pieces cut from a part keep its ID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Nodes that ask for a piece of it, the first one first.
    #[serde(
        default,
        deserialize_with = "wants",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub wanted: Vec<Want>,
    /// Its node is gone, or has forgotten it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over: Option<Over>,
    /// It is its node's own network: kept when empty, never taken, never cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<OwnNetwork>,
    /// For whom it is reserved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserved: Option<String>,
}

/// A node asks for a piece of another node's part.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Want {
    pub node: String,
    /// The ID that the piece will have.
    pub id: String,
    /// How many addresses, at most.
    pub size: u16,
    /// First and last address of those that the asker can use.
    pub among: (IpAddr, IpAddr),
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Over {
    /// For people: an RFC 3339 time.
    pub since: String,
    pub why: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct OwnNetwork {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
}

/// Reads each part by itself, so that a bad one does not hide the others: nobody can lease from it. A key that
/// is not a CIDR is left out.
fn parts<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<IpNetwork, Part>, D::Error> {
    let all = BTreeMap::<String, Value>::deserialize(from)?;
    let read = |(piece, part): (String, Value)| {
        let unreadable = |error: serde_json::Error| Part {
            reserved: Some(format!("it cannot be read: {error}")),
            ..Part::default()
        };
        let piece = piece.parse().ok()?;
        Some((piece, Part::deserialize(part).unwrap_or_else(unreadable)))
    };
    Ok(all.into_iter().filter_map(read).collect())
}

/// Any node writes them into any part.
fn wants<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Want>, D::Error> {
    let all = Vec::<Value>::deserialize(from)?.into_iter();
    Ok(all
        .filter_map(|want| Want::deserialize(want).ok())
        .collect())
}

impl Part {
    /// A node's.
    #[must_use]
    pub fn of(holder: &Holder) -> Self {
        Self {
            node: holder.node.clone(),
            id: Some(holder.id.clone()),
            ..Self::default()
        }
    }

    /// Whether this node has it by this ID.
    #[must_use]
    pub fn is_of(&self, holder: &Holder) -> bool {
        self.node == holder.node && self.id.as_ref() == Some(&holder.id)
    }
}

impl Document {
    /// One without parts.
    #[must_use]
    pub fn empty(store: &str, network_name: &str, subnet: IpNetwork) -> Self {
        Self {
            store: store.to_owned(),
            network_name: network_name.to_owned(),
            subnet,
            parts: BTreeMap::new(),
        }
    }

    /// The parts that nobody may lease from: not aligned, not in the subnet, or not disjoint from
    /// another one. [`change`] makes none.
    #[must_use]
    pub fn in_doubt(&self) -> BTreeSet<IpNetwork> {
        let parts: Vec<IpNetwork> = self.parts.keys().copied().collect();
        let wrong = |part: &IpNetwork| {
            let fits = piece::is_piece(self.subnet, *part);
            let mut others = parts.iter().filter(|other| *other != part);
            let is_whose = |part: &Part| part.node.is_empty() == part.reserved.is_some();
            !fits
                || others.any(|other| overlap(*part, *other))
                || !self.parts.get(part).is_some_and(is_whose)
        };
        parts.iter().copied().filter(wrong).collect()
    }

    /// The part that has an ID.
    #[must_use]
    pub fn by_id(&self, id: &str) -> Option<(IpNetwork, &Part)> {
        let mut parts = self.parts.iter();
        let found = parts.find(|(_, part)| part.id.as_deref() == Some(id));
        found.map(|(piece, part)| (*piece, part))
    }

    /// The pieces that a node has by an ID.
    #[must_use]
    pub fn pieces_of(&self, holder: &Holder) -> Vec<IpNetwork> {
        let parts = self.parts.iter().filter(|(_, part)| part.is_of(holder));
        parts.map(|(piece, _)| *piece).collect()
    }

    /// Whether the document lets this node lease from a piece that it has by this ID.
    #[must_use]
    pub fn confirms(&self, holder: &Holder, piece: IpNetwork) -> bool {
        let doubt = self.in_doubt();
        self.parts.iter().any(|(whole, part)| {
            part.is_of(holder)
                && part.over.is_none()
                && piece::covers(*whole, piece)
                && !doubt.contains(whole)
        })
    }
}

/// The subnet that an address is in.
#[must_use]
pub fn subnet_of(address: IpAddr) -> IpNetwork {
    let prefix = if address.is_ipv4() { 24 } else { 120 };
    // Both lengths are valid for their family.
    network_around(address, prefix).unwrap_or_else(|| address.into())
}
