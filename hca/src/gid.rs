//! GIDs and a port's GID table.
//!
//! A port has a table of up to 1024 entries, most of them empty: an empty entry reads as the zero
//! GID, and its `gid_attrs` answer `EINVAL`. The kernel fills the lowest empty one
//! (drivers/infiniband/core/cache.c), and a pod that ends leaves a gap of any size. So all entries
//! that the directory lists are read, one file each; the attributes only of those that are filled.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::address::ParseError;
use crate::host::{self, Host, Result};
use crate::port::{LinkLayer, link_layer, port_of};
use crate::port_id::PortId;

/// Type of a GID of RoCE v2 (UDP, routable), as sysfs names it. `IB/RoCE v1` is InfiniBand's, or RoCE v1.
pub const ROCE_V2: &str = "RoCE v2";

/// A 128-bit GID. Displayed as sysfs does: eight groups of four digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// True for the content of an empty entry.
    #[must_use]
    pub fn is_zero(self) -> bool {
        self.0 == [0; 16]
    }

    /// True for a GID under the link-local prefix `fe80::/64`, which is not routable by RoCE v2.
    #[must_use]
    pub fn is_link_local(self) -> bool {
        self.0.starts_with(&[0xfe, 0x80, 0, 0, 0, 0, 0, 0])
    }

    /// The IP address this GID stands for on RoCE; an IPv4-mapped GID gives an IPv4 address.
    #[must_use]
    pub fn ip(self) -> IpAddr {
        Ipv6Addr::from(self.0).to_canonical()
    }
}

impl From<IpAddr> for Gid {
    /// The RoCE GID of an address; IPv4 is mapped to `::ffff:a.b.c.d`.
    fn from(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(ip) => Self(ip.to_ipv6_mapped().octets()),
            IpAddr::V6(ip) => Self(ip.octets()),
        }
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, group) in Ipv6Addr::from(self.0).segments().iter().enumerate() {
            write!(f, "{}{group:04x}", if i == 0 { "" } else { ":" })?;
        }
        Ok(())
    }
}

impl FromStr for Gid {
    type Err = ParseError;

    /// Reads sysfs' form; any other spelling of an IPv6 address is taken too.
    fn from_str(text: &str) -> std::result::Result<Self, ParseError> {
        text.parse::<Ipv6Addr>()
            .map(|ip| Self(ip.octets()))
            .map_err(|_| {
                let expected = "a GID such as fe80:0000:0000:0000:5054:00ff:fe00:0001";
                ParseError::new(text, expected)
            })
    }
}

crate::json::by_text!(Gid);

/// One filled entry of a GID table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GidEntry {
    /// Its index: the GID index that verbs programs ask for.
    pub index: u32,
    /// The GID.
    pub gid: Gid,
    /// Its type in sysfs's words; `None` where the kernel does not say.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// The netdev it belongs to, by its name in its own network namespace: a pod's macvlan child
    /// shows up as `net1` here. `None` on InfiniBand and iWARP.
    pub netdev: Option<String>,
}

/// A port's GID table.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GidTable {
    /// Entries the table has, filled or not: what the addresses of all pods on the port share.
    pub size: usize,
    /// The filled ones in order of index.
    pub entries: Vec<GidEntry>,
}

/// Addresses of a pod's interface that get a GID: one IPv4 or IPv6 address and the link-local one.
const ADDRESSES_PER_POD: usize = 2;

impl GidTable {
    /// Pods with an interface of their own on this RoCE port that find room in the table, next to the
    /// host's own addresses; `None` where its size is not known. An address takes an entry of RoCE v1
    /// and one of v2, but for a port whose entries are of v2 alone.
    #[must_use]
    pub fn pods(&self) -> Option<u32> {
        if self.size == 0 {
            return None;
        }
        let v2 = |entry: &GidEntry| entry.kind.as_deref() == Some(ROCE_V2);
        let only_v2 = !self.entries.is_empty() && self.entries.iter().all(v2);
        let kinds = if only_v2 { 1 } else { 2 };
        let pods = (self.size / kinds / ADDRESSES_PER_POD).saturating_sub(1);
        u32::try_from(pods.max(1)).ok()
    }
}

/// Reads the table of the port whose directory is `port`.
pub(crate) fn table(port: &Path) -> Result<GidTable> {
    let indexes = host::indexes(&port.join("gids"))?;
    let mut entries = Vec::new();
    for &index in &indexes {
        if let Some(gid) = gid(port, index)?.filter(|gid| !gid.is_zero()) {
            entries.push(entry(port, index, gid)?);
        }
    }
    Ok(GidTable {
        size: indexes.len(),
        entries,
    })
}

/// Whether IP addresses of a port's netdevs become GIDs of it: true for RoCE, not for InfiniBand
/// and iWARP.
///
/// # Errors
/// [`host::Error::Missing`] if there is no such RDMA device; [`host::Error::Read`] if sysfs
/// cannot be read.
pub fn follow_addresses(host: &Host, port: &PortId) -> Result<bool> {
    let directory = host.rdma_device(&port.device)?;
    let adapter = host::attribute(&directory, "node_type")?;
    let layer = link_layer(&port_of(&directory, port.port))?;
    Ok(adapter.is_some_and(|kind| kind.starts_with("1:")) && layer == LinkLayer::Ethernet)
}

/// Finds the RoCE v2 entry of an IP address in a port's table, however sparse that is.
///
/// `netdev` narrows it to entries of that netdev, which matters where two of them carry the same
/// address. A new address appears in the table a moment after it was set: asking again is the
/// caller's business.
///
/// # Errors
/// [`host::Error::Missing`] if there is no such RDMA device; [`host::Error::Read`] if sysfs
/// cannot be read.
pub fn find_roce_v2(
    host: &Host,
    port: &PortId,
    ip: IpAddr,
    netdev: Option<&str>,
) -> Result<Option<GidEntry>> {
    let directory = host.rdma_device(&port.device)?;
    let directory = port_of(&directory, port.port);
    let wanted = Gid::from(ip);
    // Empty entries are read as the zero GID; only those past the end of the table are absent.
    for index in 0.. {
        match gid(&directory, index)? {
            None => break,
            Some(gid) if gid == wanted => {}
            Some(_) => continue,
        }
        let entry = entry(&directory, index, wanted)?;
        if entry.kind.as_deref() == Some(ROCE_V2)
            && (netdev.is_none() || entry.netdev.as_deref() == netdev)
        {
            return Ok(Some(entry));
        }
    }
    Ok(None)
}

/// The GID of an entry; `None` if there is no such entry.
fn gid(port: &Path, index: u32) -> Result<Option<Gid>> {
    host::parsed(port, &format!("gids/{index}"))
}

/// What else the kernel says about a filled entry.
fn entry(port: &Path, index: u32, gid: Gid) -> Result<GidEntry> {
    Ok(GidEntry {
        index,
        gid,
        kind: host::attribute(port, &format!("gid_attrs/types/{index}"))?,
        netdev: host::attribute(port, &format!("gid_attrs/ndevs/{index}"))?,
    })
}
