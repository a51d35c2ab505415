//! Data centre bridging of a netdev: priority flow control and the application table, asked of
//! the kernel (`RTM_GETDCB`, `include/uapi/linux/dcbnl.h`).
//!
//! The packet crates do not know these messages; one request and its answer are spelled out here.

use netlink::{Result, Socket};
use netlink_packet_core::{DecodeError, Emitable};

const RTM_GETDCB: u16 = 78;
const DCB_CMD_IEEE_GET: u8 = 21;
const DCB_ATTR_IFNAME: u16 = 1;
const DCB_ATTR_IEEE: u16 = 13;
const DCB_ATTR_IEEE_PFC: u16 = 2;
const DCB_ATTR_IEEE_APP_TABLE: u16 = 3;
const DCB_ATTR_IEEE_APP: u16 = 1;
/// `IEEE_8021QAZ_APP_SEL_DSCP`.
const BY_DSCP: u8 = 5;
/// Flags in an attribute's type (`NLA_F_NESTED`, `NLA_F_NET_BYTEORDER`).
const TYPE: u16 = 0x3fff;
/// `struct dcbmsg`.
const HEADER: usize = 4;

/// What a netdev does with priorities.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Dcb {
    /// Priorities with flow control, one bit each.
    pub pfc: Option<u8>,
    /// Pause frames sent and received, all priorities together.
    pub pauses: Option<(u64, u64)>,
    /// DSCP values with their priorities, if the netdev uses DSCP.
    pub by_dscp: Vec<(u16, u8)>,
}

/// Asks for a netdev of this namespace.
///
/// # Errors
/// What the kernel says; `EOPNOTSUPP` of drivers without it.
pub(crate) fn ask(netdev: &str) -> Result<Dcb> {
    let mut dcb = Dcb::default();
    let request = Request { netdev };
    Socket::open()?.ask(
        format_args!("ask for the priorities of {netdev}"),
        RTM_GETDCB,
        0,
        &request,
        |payload| {
            dcb = parse(payload)?;
            Ok(())
        },
    )?;
    Ok(dcb)
}

/// `struct dcbmsg` and the netdev's name.
struct Request<'a> {
    netdev: &'a str,
}

impl Emitable for Request<'_> {
    fn buffer_len(&self) -> usize {
        // Attributes are padded to four bytes.
        HEADER + (4 + self.netdev.len() + 1).next_multiple_of(4)
    }

    fn emit(&self, buffer: &mut [u8]) {
        let length = u16::try_from(4 + self.netdev.len() + 1).unwrap_or(u16::MAX);
        let mut bytes = vec![0, DCB_CMD_IEEE_GET, 0, 0];
        bytes.extend(length.to_ne_bytes());
        bytes.extend(DCB_ATTR_IFNAME.to_ne_bytes());
        bytes.extend(self.netdev.as_bytes());
        bytes.resize(buffer.len(), 0);
        buffer.copy_from_slice(&bytes);
    }
}

fn parse(payload: &[u8]) -> std::result::Result<Dcb, DecodeError> {
    let mut dcb = Dcb::default();
    let body = payload
        .get(HEADER..)
        .ok_or_else(|| DecodeError::from("a short answer"))?;
    for (kind, value) in attributes(body) {
        if kind != DCB_ATTR_IEEE {
            continue;
        }
        for (kind, value) in attributes(value) {
            match kind {
                DCB_ATTR_IEEE_PFC => {
                    dcb.pfc = value.get(1).copied();
                    dcb.pauses = pauses(value);
                }
                DCB_ATTR_IEEE_APP_TABLE => dcb.by_dscp = by_dscp(value),
                _ => {}
            }
        }
    }
    Ok(dcb)
}

/// Sums of `requests` and `indications` in `struct ieee_pfc`, which start at bytes 8 and 72.
fn pauses(pfc: &[u8]) -> Option<(u64, u64)> {
    let sum = |bytes: &[u8]| {
        let numbers = bytes
            .chunks_exact(8)
            .map(|b| b.try_into().map(u64::from_ne_bytes));
        numbers.flatten().fold(0_u64, u64::saturating_add)
    };
    Some((sum(pfc.get(8..72)?), sum(pfc.get(72..136)?)))
}

/// `struct dcb_app` entries that go by DSCP.
fn by_dscp(table: &[u8]) -> Vec<(u16, u8)> {
    let entries = attributes(table).filter(|(kind, _)| *kind == DCB_ATTR_IEEE_APP);
    entries
        .filter_map(|(_, app)| match app {
            [BY_DSCP, priority, a, b] => Some((u16::from_ne_bytes([*a, *b]), *priority)),
            _ => None,
        })
        .collect()
}

/// Attributes one after another; ends at the first that does not fit.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes([*bytes.first()?, *bytes.get(1)?]));
        let kind = u16::from_ne_bytes([*bytes.get(2)?, *bytes.get(3)?]) & TYPE;
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = u16::try_from(4 + value.len())
            .unwrap()
            .to_ne_bytes()
            .to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    /// An answer laid out as `dcbnl_ieee_fill` does (kernel `net/dcb/dcbnl.c`).
    fn answer() -> Vec<u8> {
        let mut pfc = vec![0; 136];
        pfc[0] = 8;
        pfc[1] = 1 << 3;
        pfc[8 + 3 * 8..8 + 4 * 8].copy_from_slice(&17_u64.to_ne_bytes());
        pfc[72 + 3 * 8..72 + 4 * 8].copy_from_slice(&5_u64.to_ne_bytes());
        let dscp = [[BY_DSCP, 3].as_slice(), &26_u16.to_ne_bytes()].concat();
        let ethertype = [[1, 4].as_slice(), &0x8915_u16.to_ne_bytes()].concat();
        let table = [
            attribute(DCB_ATTR_IEEE_APP, &ethertype),
            attribute(DCB_ATTR_IEEE_APP, &dscp),
        ];
        let ieee = [
            attribute(1, &[0; 56]),
            attribute(DCB_ATTR_IEEE_PFC, &pfc),
            attribute(DCB_ATTR_IEEE_APP_TABLE | 0x8000, &table.concat()),
        ];
        let body = [
            attribute(DCB_ATTR_IFNAME, b"ens1\0"),
            attribute(DCB_ATTR_IEEE, &ieee.concat()),
        ];
        [vec![0, DCB_CMD_IEEE_GET, 0, 0], body.concat()].concat()
    }

    #[test]
    fn an_answer_is_understood() {
        let expected = Dcb {
            pfc: Some(8),
            pauses: Some((17, 5)),
            by_dscp: vec![(26, 3)],
        };
        assert_eq!(parse(&answer()).unwrap(), expected);
        assert_eq!(parse(&[0, DCB_CMD_IEEE_GET, 0, 0]).unwrap(), Dcb::default());
        assert!(parse(&[0]).is_err());
    }

    #[test]
    fn the_request_names_the_netdev() {
        let request = Request { netdev: "ens1f0" };
        let mut bytes = vec![0xff; request.buffer_len()];
        request.emit(&mut bytes);
        assert_eq!(bytes.len(), 16);
        assert_eq!(&bytes[..2], &[0, DCB_CMD_IEEE_GET]);
        let name: Vec<_> = attributes(&bytes[4..]).collect();
        assert_eq!(name, [(DCB_ATTR_IFNAME, b"ens1f0\0".as_slice())]);
    }

    #[test]
    fn the_running_kernel_answers_or_refuses_in_its_own_words() {
        // The loopback device has no such thing: EOPNOTSUPP, or EINVAL of a kernel without DCB.
        assert!(ask("lo").is_err());
        assert!(ask("nosuchnetdev").is_err());
    }

    proptest! {
        #[test]
        fn no_answer_makes_the_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&bytes);
        }
    }
}
