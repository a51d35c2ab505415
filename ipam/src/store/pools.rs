//! Which sets of addresses configurations have asked for: for people who want
//! to know how full a pool is, since leases alone do not show its size.
//!
//! `pools/<space>/<hash>`, one small file for each set, written once by the first
//! ADD that uses it; its time is that of the last ADD, to the hour. Of several sets of
//! one range the one that was used last is the pool: the others are what its
//! configuration was before. Nothing is decided by these files. Who writes networks decides what is in
//! them, so they are bounded: a set of too many parts is not noted, and so many files are read.

use super::dir::Found;
use super::release::timestamp;
use super::{Store, StoreError, name};
use crate::range::{Range, Span, from_bits};
use ipnetwork::IpNetwork;
use node_wire::PerNode;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Parts of a set that is noted.
const MAX_SPANS: usize = 128;
/// Of a file; more is not ours.
const MAX_BYTES: u64 = 16 << 10;
/// Files that are read.
const MAX_FILES: usize = 4096;
/// How exactly the time of the last ADD is known, in seconds.
const USED_SECONDS: i64 = 3600;

/// Network name, range, and whether overlapping ranges are compared.
type Key = (Option<String>, IpNetwork, bool);

/// A set of addresses that some configuration gives out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pool {
    pub range: IpNetwork,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_name: Option<String>,
    pub overlapping: bool,
    /// The CNI network that asked first.
    pub network: String,
    /// First and last address of each part, ascending.
    pub spans: Vec<(IpAddr, IpAddr)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_node: Option<PerNode>,
    /// When an ADD asked for it last, to the hour, in Unix seconds of the file server.
    #[serde(skip)]
    pub used: i64,
}

impl Pool {
    /// Whether an address belongs to it.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        self.spans
            .iter()
            .any(|(first, last)| *first <= address && address <= *last)
    }

    fn key(&self) -> Key {
        (self.network_name.clone(), self.range, self.overlapping)
    }

    /// How many addresses it has; `u128::MAX` stands for that or more.
    #[must_use]
    pub fn size(&self) -> u128 {
        let size = |(first, last): &(IpAddr, IpAddr)| {
            let (first, last) = (crate::range::bits(*first), crate::range::bits(*last));
            last.saturating_sub(first).saturating_add(1)
        };
        self.spans.iter().map(size).fold(0, u128::saturating_add)
    }
}

/// Another set of addresses has another file.
fn file_name(range: &Range, overlapping: bool) -> String {
    let spans = range.spans().iter();
    let spans: Vec<String> = spans
        .map(|span| format!("{:x}-{:x}", span.first, span.last))
        .collect();
    let mut set = format!("{} {}", range.subnet(), spans.join(","));
    if let Some(per_node) = range.per_node() {
        set += &per_node.to_string();
    }
    let set = name::hash64(&set);
    format!("{set:016x}{}", if overlapping { "" } else { "+" })
}

impl Store {
    /// Notes a set of addresses, unless it is noted.
    pub fn note_pool(
        &self,
        range: &Range,
        network_name: Option<&str>,
        overlapping: bool,
        network: &str,
    ) {
        let v4 = range.subnet().is_ipv4();
        if range.spans().len() > MAX_SPANS {
            return;
        }
        let noted = || -> Result<(), StoreError> {
            let dir = self.make_below(&["pools", &name::space(network_name)])?;
            let file = file_name(range, overlapping);
            if let Some(meta) = dir.meta(&file)? {
                if timestamp().as_second() - meta.modified >= USED_SECONDS {
                    dir.touch(&file)?;
                }
                return Ok(());
            }
            let ends = |span: &Span| (from_bits(v4, span.first), from_bits(v4, span.last));
            let pool = Pool {
                range: range.subnet(),
                network_name: network_name.map(str::to_owned),
                overlapping,
                network: network.to_owned(),
                spans: range.spans().iter().map(ends).collect(),
                per_node: range.per_node(),
                used: 0,
            };
            dir.create(
                &file,
                &serde_json::to_vec_pretty(&pool).unwrap_or_default(),
                false,
            )?;
            Ok(())
        };
        // A pool that is not noted is not listed; nothing else.
        let _ = noted();
    }

    /// The pools that were noted, each by the set of addresses that was used last.
    pub fn pools(&self) -> Result<Vec<Pool>, StoreError> {
        let mut pools: BTreeMap<Key, Pool> = BTreeMap::new();
        let Some(spaces) = self.open_below(&["pools"])? else {
            return Ok(Vec::new());
        };
        let mut left = MAX_FILES;
        for space in spaces.names()? {
            let Some(dir) = spaces.open(&space)? else {
                continue;
            };
            for file in dir.names()?.into_iter().take(left) {
                left -= 1;
                if let Some(Found::File(bytes, meta)) = dir.read(&file, MAX_BYTES)?
                    && let Ok(mut pool) = serde_json::from_slice::<Pool>(&bytes)
                {
                    pool.used = meta.modified;
                    let rank = |one: &Pool| (one.used, Reverse(one.spans.clone()));
                    let known = pools.get(&pool.key());
                    if known.is_none_or(|known| rank(known) < rank(&pool)) {
                        pools.insert(pool.key(), pool);
                    }
                }
            }
        }
        Ok(pools.into_values().collect())
    }
}
