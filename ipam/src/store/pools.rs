//! Which sets of addresses configurations have asked for: for people who want
//! to know how full a pool is, since leases alone do not tell its size.
//!
//! `pools/<space>/<hash>`, one small file for each set, written once by the first
//! ADD that uses it. Nothing is decided by these files.

use super::dir::Found;
use super::hint::table_name;
use super::{Store, StoreError, name};
use crate::range::{Range, Span, from_bits};
use ipnetwork::IpNetwork;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// A set of addresses with few exclusions is a page; more is not ours.
const MAX_BYTES: u64 = 1 << 20;

/// A set of addresses that some configuration gives out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pool {
    /// The range's network.
    pub range: IpNetwork,
    /// `network_name`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_name: Option<String>,
    /// `enable_overlapping_ranges`.
    pub overlapping: bool,
    /// The CNI network that asked first.
    pub network: String,
    /// First and last address of each part, ascending.
    pub spans: Vec<(IpAddr, IpAddr)>,
}

impl Pool {
    /// Whether an address belongs to it.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        self.spans
            .iter()
            .any(|(first, last)| *first <= address && address <= *last)
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
        let noted = || -> Result<(), StoreError> {
            let dir = self.make_below(&["pools", &name::space(network_name)])?;
            let file = format!(
                "{}{}",
                table_name(range),
                if overlapping { "" } else { "+" }
            );
            if dir.meta(&file)?.is_some() {
                return Ok(());
            }
            let ends = |span: &Span| (from_bits(v4, span.first), from_bits(v4, span.last));
            let pool = Pool {
                range: range.subnet(),
                network_name: network_name.map(str::to_owned),
                overlapping,
                network: network.to_owned(),
                spans: range.spans().iter().map(ends).collect(),
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

    /// The sets of addresses that were noted.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn pools(&self) -> Result<Vec<Pool>, StoreError> {
        let mut pools = Vec::new();
        let Some(spaces) = self.open_below(&["pools"])? else {
            return Ok(pools);
        };
        for space in spaces.names()? {
            let Some(dir) = spaces.open(&space)? else {
                continue;
            };
            for file in dir.names()? {
                if let Some(Found::File(bytes, _)) = dir.read(&file, MAX_BYTES)?
                    && let Ok(pool) = serde_json::from_slice::<Pool>(&bytes)
                {
                    pools.push(pool);
                }
            }
        }
        pools.sort_by(|a, b| {
            (&a.network_name, a.range, &a.spans).cmp(&(&b.network_name, b.range, &b.spans))
        });
        Ok(pools)
    }
}
