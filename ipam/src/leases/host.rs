//! Whether an address is this host's own: no pod gets it.

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::net::IpAddr;

// Of linux/netlink.h and linux/rtnetlink.h.
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const NLM_F_REQUEST: u16 = 1;
const RTA_DST: u16 = 1;
const RTN_LOCAL: u8 = 2;
const HEADER_BYTES: usize = 16;
const ROUTE_BYTES: usize = 12;
/// Where a route says of which type it is.
const TYPE_AT: usize = HEADER_BYTES + 7;

/// One question to the kernel: the route to the address, in the network namespace of this process. An
/// address without a route is not the host's.
pub(super) fn has(address: IpAddr) -> Result<bool, Errno> {
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        // NETLINK_ROUTE is 0.
        None,
    )?;
    // The kernel alone answers then.
    rustix::net::connect(&socket, &SocketAddrNetlink::new(0, 0))?;
    rustix::net::send(&socket, &question(address), SendFlags::empty())?;
    let mut answer = [0; 1024];
    // The kernel has answered before send() returned.
    let (length, _) = rustix::net::recv(&socket, &mut answer, RecvFlags::DONTWAIT)?;
    Ok(is_local(answer.get(..length).unwrap_or_default()))
}

fn question(address: IpAddr) -> Vec<u8> {
    let (family, bytes) = match address {
        IpAddr::V4(v4) => (nix::libc::AF_INET, v4.octets().to_vec()),
        IpAddr::V6(v6) => (nix::libc::AF_INET6, v6.octets().to_vec()),
    };
    let attribute = 4 + bytes.len();
    let length = HEADER_BYTES + ROUTE_BYTES + attribute;
    let mut message = Vec::with_capacity(length);
    let short = |value: usize| u16::try_from(value).unwrap_or(0).to_ne_bytes();
    message.extend(u32::try_from(length).unwrap_or(0).to_ne_bytes());
    message.extend(RTM_GETROUTE.to_ne_bytes());
    message.extend(NLM_F_REQUEST.to_ne_bytes());
    message.extend([0; 8]);
    message.push(u8::try_from(family).unwrap_or(0));
    message.push(u8::try_from(bytes.len() * 8).unwrap_or(0));
    message.extend([0; ROUTE_BYTES - 2]);
    message.extend(short(attribute));
    message.extend(RTA_DST.to_ne_bytes());
    message.extend(bytes);
    message
}

fn is_local(answer: &[u8]) -> bool {
    let kind = answer
        .get(4..6)
        .map(|kind| kind == RTM_NEWROUTE.to_ne_bytes());
    kind == Some(true) && answer.get(TYPE_AT) == Some(&RTN_LOCAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_address_is_the_hosts() {
        for (address, own) in [
            ("127.0.0.1", true),
            ("127.9.9.9", true),
            ("198.51.100.7", false),
            ("2001:db8::7", false),
        ] {
            assert_eq!(has(address.parse().unwrap()), Ok(own), "{address}");
        }
    }

    #[test]
    fn an_answer_that_is_short_or_an_error_says_no() {
        assert!(!is_local(&[]));
        let mut error = [0; 40];
        error[4] = 2;
        error[TYPE_AT] = RTN_LOCAL;
        assert!(!is_local(&error));
    }
}
