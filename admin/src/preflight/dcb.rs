//! Data centre bridging of a netdev: priority flow control and the application table, asked of
//! the kernel (`RTM_GETDCB`, `include/uapi/linux/dcbnl.h`).

use netlink::attribute::{Raw, each};
use netlink::{Result, Socket};
use netlink_packet_core::DecodeError;

const RTM_GETDCB: u16 = 78;
const DCB_CMD_IEEE_GET: u8 = 21;
const DCB_ATTR_IFNAME: u16 = 1;
const DCB_ATTR_IEEE: u16 = 13;
const DCB_ATTR_IEEE_PFC: u16 = 2;
const DCB_ATTR_IEEE_APP_TABLE: u16 = 3;
const DCB_ATTR_IEEE_APP: u16 = 1;
/// `IEEE_8021QAZ_APP_SEL_DSCP`.
const BY_DSCP: u8 = 5;
/// `struct dcbmsg`.
const HEADER: usize = 4;

/// What a netdev does with priorities.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Dcb {
    /// Priorities with flow control, one bit each.
    pub pfc: Option<u8>,
    /// DSCP values with their priorities, if the netdev uses DSCP.
    pub by_dscp: Vec<(u16, u8)>,
}

/// Asks for a netdev of this namespace.
///
/// # Errors
/// What the kernel says; `EOPNOTSUPP` of drivers without it.
pub(crate) fn ask(netdev: &str) -> Result<Dcb> {
    let what = format_args!("ask for the priorities of {netdev}");
    let answer = Socket::open()?.ask(what, RTM_GETDCB, 0, &request(netdev), parse)?;
    Ok(answer.unwrap_or_default())
}

/// `struct dcbmsg` and the netdev's name.
fn request(netdev: &str) -> Raw {
    Raw::new(&[0, DCB_CMD_IEEE_GET, 0, 0])
        .with(DCB_ATTR_IFNAME, &[netdev.as_bytes(), b"\0"].concat())
}

fn parse(payload: &[u8]) -> std::result::Result<Dcb, DecodeError> {
    let mut dcb = Dcb::default();
    let body = payload
        .get(HEADER..)
        .ok_or_else(|| DecodeError::from("a short answer"))?;
    let mut ieee = |kind, value: &[u8]| match kind {
        DCB_ATTR_IEEE_PFC => dcb.pfc = value.get(1).copied(),
        DCB_ATTR_IEEE_APP_TABLE => dcb.by_dscp = by_dscp(value),
        _ => {}
    };
    each(body, |kind, value| {
        if kind == DCB_ATTR_IEEE {
            each(value, &mut ieee);
        }
    });
    Ok(dcb)
}

/// `struct dcb_app` entries that go by DSCP.
fn by_dscp(table: &[u8]) -> Vec<(u16, u8)> {
    let mut found = Vec::new();
    each(table, |kind, app| {
        if let (DCB_ATTR_IEEE_APP, [BY_DSCP, priority, a, b]) = (kind, app) {
            found.push((u16::from_ne_bytes([*a, *b]), *priority));
        }
    });
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An answer laid out as `dcbnl_ieee_fill` does (kernel `net/dcb/dcbnl.c`).
    fn answer() -> Vec<u8> {
        let mut pfc = vec![0; 136];
        pfc[0] = 8;
        pfc[1] = 1 << 3;
        let dscp = [[BY_DSCP, 3].as_slice(), &26_u16.to_ne_bytes()].concat();
        let ethertype = [[1, 4].as_slice(), &0x8915_u16.to_ne_bytes()].concat();
        let table = Raw::default()
            .with(DCB_ATTR_IEEE_APP, &ethertype)
            .with(DCB_ATTR_IEEE_APP, &dscp);
        let ieee = Raw::default()
            .with(1, &[0; 56])
            .with(DCB_ATTR_IEEE_PFC, &pfc)
            .nest(DCB_ATTR_IEEE_APP_TABLE, &table);
        let answer = Raw::new(&[0, DCB_CMD_IEEE_GET, 0, 0])
            .with(DCB_ATTR_IFNAME, b"ens1\0")
            .with(DCB_ATTR_IEEE, ieee.as_bytes());
        answer.as_bytes().to_vec()
    }

    #[test]
    fn an_answer_is_understood() {
        let expected = Dcb {
            pfc: Some(8),
            by_dscp: vec![(26, 3)],
        };
        assert_eq!(parse(&answer()).unwrap(), expected);
        assert_eq!(parse(&[0, DCB_CMD_IEEE_GET, 0, 0]).unwrap(), Dcb::default());
        assert!(parse(&[0]).is_err());
    }

    #[test]
    fn the_request_names_the_netdev() {
        let request = request("ens1f0");
        let bytes = request.as_bytes();
        assert_eq!(bytes.len(), 16);
        assert_eq!(bytes[..2], [0, DCB_CMD_IEEE_GET]);
        assert_eq!(bytes[8..15], *b"ens1f0\0");
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
