//! Ports of an RDMA device.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::address::{Guid, ParseError};
use crate::gid::{self, GidTable};
use crate::host::{self, Host, Result};
use crate::json;
use crate::port_id::PortId;
use crate::unit::is_number;

/// An entry of a partition table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pkey {
    /// Where it stands.
    pub index: u32,
    /// The key; its high bit is full membership.
    #[serde(serialize_with = "json::hex16", deserialize_with = "json::hex")]
    pub key: u16,
}

/// One port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Port {
    /// Port number as verbs counts, from 1.
    pub number: u32,
    /// Logical state.
    pub state: PortState,
    /// Physical state in sysfs's words, such as `LinkUp`.
    pub phys_state: String,
    /// Signalling rate; `None` if the driver does not report it.
    pub rate: Option<Rate>,
    /// What the port is configured for.
    pub link_layer: LinkLayer,
    /// Local identifier given by the subnet manager; 0 on Ethernet.
    pub lid: u32,
    /// Subnet manager's LID; 0 without one.
    pub sm_lid: u32,
    /// Path MTU in bytes that RDMA traffic of this port can use. sysfs does not show it: on
    /// Ethernet it follows from the netdev's MTU as in the kernel ([`roce_mtu`]), on InfiniBand
    /// it is `None`.
    pub active_mtu: Option<u32>,
    /// The GID table.
    pub gids: GidTable,
    /// Filled entries of the partition table.
    pub pkeys: Vec<Pkey>,
    /// The netdev of this port: the Ethernet netdev for RoCE and iWARP, the parent IPoIB netdev
    /// for InfiniBand. `None` if there is none, or if it is in another network namespace.
    pub netdev: Option<String>,
    /// Whether applications can use it. A port of a multi-port RDMA device that has no netdev, where
    /// others have one, is of the switch inside the HCA.
    pub carries_data: bool,
}

impl Port {
    /// True if the port can carry traffic now.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.state == PortState::Active
    }

    /// The port's GUID: the second half of its first GID.
    #[must_use]
    pub fn guid(&self) -> Option<Guid> {
        let first = self.gids.entries.iter().find(|entry| entry.index == 0)?;
        let [.., a, b, c, d, e, f, g, h] = first.gid.0;
        Some(Guid(u64::from_be_bytes([a, b, c, d, e, f, g, h])))
    }
}

/// Logical state of a port (IBA 14.2.5.6; sysfs `state`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum PortState {
    /// No link.
    Down,
    /// Link up, waiting for a subnet manager.
    Init,
    /// Configured, not yet activated by the subnet manager.
    Armed,
    /// Usable.
    Active,
    /// Active, link lost a moment ago.
    ActiveDefer,
    /// The driver reports none, or one unknown to this program.
    Unknown,
}

impl PortState {
    fn parse(text: &str) -> Self {
        match text.split(':').next() {
            Some("1") => Self::Down,
            Some("2") => Self::Init,
            Some("3") => Self::Armed,
            Some("4") => Self::Active,
            Some("5") => Self::ActiveDefer,
            _ => Self::Unknown,
        }
    }
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Down => "DOWN",
            Self::Init => "INIT",
            Self::Armed => "ARMED",
            Self::Active => "ACTIVE",
            Self::ActiveDefer => "ACTIVE_DEFER",
            Self::Unknown => "UNKNOWN",
        })
    }
}

/// What kind of network a port speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LinkLayer {
    /// RoCE or iWARP.
    Ethernet,
    /// Native InfiniBand.
    InfiniBand,
    /// Neither, or not known.
    Unknown,
}

impl LinkLayer {
    /// The word of configurations; none can name the third one.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Ethernet => "ether",
            Self::InfiniBand => "infiniband",
            Self::Unknown => "other",
        }
    }
}

/// A port's rate, as in `100 Gb/sec (4X EDR)`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rate {
    /// Megabits a second.
    pub mbps: u32,
    text: String,
}

impl Rate {
    /// Width and generation, such as `4X EDR`, where the kernel adds them.
    #[must_use]
    pub fn signalling(&self) -> Option<&str> {
        self.text.split_once(" (")?.1.strip_suffix(')')
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for Rate {
    type Err = ParseError;

    fn from_str(text: &str) -> std::result::Result<Self, ParseError> {
        let mbps = mbps(text)
            .ok_or_else(|| ParseError::new(text, "a rate such as 100 Gb/sec (4X EDR)"))?;
        let text = text.to_owned();
        Ok(Self { mbps, text })
    }
}

fn mbps(text: &str) -> Option<u32> {
    let number = text.split_once(" Gb/sec")?.0;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if !is_number(whole) || !is_number(fraction) || fraction.len() > 3 {
        return None;
    }
    let thousandths: u32 = format!("{fraction:0<3}").parse().ok()?;
    let whole: u32 = whole.parse().ok()?;
    whole.checked_mul(1000)?.checked_add(thousandths)
}

json::by_text!(Rate);

/// Reads port `number` in `directory`, all but its netdev and what follows from that.
pub(crate) fn read(directory: &Path, number: u32) -> Result<Port> {
    let text = |name| host::attribute(directory, name);
    let state = text("state")?.map_or(PortState::Unknown, |s| PortState::parse(&s));
    let phys_state = text("phys_state")?.unwrap_or_default();
    let phys_word = phys_state.split_once(": ").map(|(_, word)| word);
    Ok(Port {
        number,
        state,
        phys_state: phys_word.unwrap_or("Unknown").to_owned(),
        rate: host::parsed(directory, "rate")?,
        link_layer: link_layer(directory)?,
        lid: host::hexadecimal(directory, "lid")?.unwrap_or(0),
        sm_lid: host::hexadecimal(directory, "sm_lid")?.unwrap_or(0),
        active_mtu: None,
        gids: gid::table(directory)?,
        pkeys: pkeys(directory)?,
        netdev: None,
        carries_data: true,
    })
}

/// The directory of a port of the RDMA device in `device`.
pub(crate) fn port_of(device: &Path, number: u32) -> PathBuf {
    device.join("ports").join(number.to_string())
}

pub(crate) fn link_layer(port: &Path) -> Result<LinkLayer> {
    Ok(match host::attribute(port, "link_layer")?.as_deref() {
        Some("Ethernet") => LinkLayer::Ethernet,
        Some("InfiniBand") => LinkLayer::InfiniBand,
        _ => LinkLayer::Unknown,
    })
}

/// The partition keys of a port, in order of their index.
///
/// # Errors
/// [`host::Error::Missing`] if there is no such RDMA device; [`host::Error::Read`] if sysfs
/// cannot be read.
pub fn partition_keys(host: &Host, port: &PortId) -> Result<Vec<u16>> {
    let directory = host.rdma_device(&port.device)?;
    let keys = pkeys(&port_of(&directory, port.port))?;
    Ok(keys.into_iter().map(|pkey| pkey.key).collect())
}

/// Filled entries of the partition table, which the subnet manager fills as it likes.
fn pkeys(port: &Path) -> Result<Vec<Pkey>> {
    let directory = port.join("pkeys");
    let mut pkeys = Vec::new();
    for index in host::indexes(&directory)? {
        let key = host::hexadecimal(&directory, &index.to_string())?;
        let key = key.and_then(|key| u16::try_from(key).ok());
        pkeys.extend(key.filter(|&key| key != 0).map(|key| Pkey { index, key }));
    }
    Ok(pkeys)
}

/// The RDMA path MTU, in bytes, that an Ethernet MTU leaves room for; `None` below 256.
///
/// The kernel takes the room of the headers a packet may need (GRH 40, UDP 8, BTH 12, XRC 4,
/// atomic 28, ICRC 4) and rounds down to a step (`iboe_get_mtu` in `include/rdma/ib_addr.h`).
#[must_use]
pub fn roce_mtu(netdev_mtu: u32) -> Option<u32> {
    const HEADERS: u32 = 40 + 8 + 12 + 4 + 28 + 4;
    let room = netdev_mtu.saturating_sub(HEADERS);
    [4096, 2048, 1024, 512, 256]
        .into_iter()
        .find(|&step| step <= room)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_rate_is_read_as_written(gbps in 0_u32..2_000, tenths in 0_u32..10, signalling in "[0-9]{1,2}X [A-Z]{3}") {
            let text = format!("{gbps}.{tenths} Gb/sec ({signalling})");
            let rate: Rate = text.parse().unwrap();
            prop_assert_eq!(rate.mbps, gbps * 1000 + tenths * 100);
            prop_assert_eq!(rate.signalling(), Some(signalling.as_str()));
            prop_assert_eq!(rate.to_string(), text);
        }

        #[test]
        fn no_text_makes_the_reader_panic(text in "\\PC*") {
            let _ = text.parse::<Rate>();
            let _ = PortState::parse(&text);
        }
    }

    #[test]
    fn rates_of_real_kernels_are_understood() {
        for (text, mbps, signalling) in [
            ("100 Gb/sec (4X EDR)", 100_000, Some("4X EDR")),
            ("2.5 Gb/sec (1X SDR)", 2500, Some("1X SDR")),
            ("2.5 Gb/sec", 2500, None),
            ("400 Gb/sec (4X NDR)", 400_000, Some("4X NDR")),
        ] {
            let rate: Rate = text.parse().unwrap();
            assert_eq!((rate.mbps, rate.signalling()), (mbps, signalling), "{text}");
        }
        for text in [
            "",
            "Gb/sec",
            "x Gb/sec",
            "1.2345 Gb/sec",
            "-1 Gb/sec",
            "4294968 Gb/sec",
        ] {
            assert!(text.parse::<Rate>().is_err(), "{text}");
        }
    }

    #[test]
    fn states_are_taken_from_their_number() {
        assert_eq!(PortState::parse("4: ACTIVE"), PortState::Active);
        assert_eq!(PortState::parse("1: DOWN"), PortState::Down);
        assert_eq!(PortState::parse("0: NOP"), PortState::Unknown);
    }

    #[test]
    fn the_path_mtu_leaves_room_for_headers() {
        for (mtu, expected) in [
            (9000, Some(4096)),
            (4192, Some(4096)),
            (4191, Some(2048)),
            (1500, Some(1024)),
            (100, None),
        ] {
            assert_eq!(roce_mtu(mtu), expected, "{mtu}");
        }
    }
}
