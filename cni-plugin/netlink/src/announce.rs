//! Gratuitous ARP and unsolicited neighbour advertisements: neighbours and switches learn at
//! once where an address now is, also when it was a moment ago at another pod.
//!
//! Frames are written as the wire has them, through a packet socket bound to the interface.
//! Ethernet and IP over InfiniBand differ only in the hardware address's length and in what
//! stands before the payload, so both go the same way. RFC 5227 (the request form, which the kernel
//! sends with `arp_notify`), RFC 4861 7.2.6, RFC 4391 and 4392 (IPoIB).

use std::{
    mem,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::{AsRawFd, OwnedFd},
};

use nix::sys::socket::{
    AddressFamily, LinkAddr, MsgFlags, SockFlag, SockType, SockaddrLike, bind, send, socket,
};

use super::{Error, Result, link::Link};

const ETHERTYPE_ARP: u16 = 0x0806;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const ARP_REQUEST: u8 = 1;

/// Announces these addresses to the link's neighbours, if its hardware type has such. Call from within
/// the link's namespace.
///
/// # Errors
/// The system call that failed; ENETDOWN when the link is not up.
pub fn announce(link: &Link, addresses: impl Iterator<Item = IpAddr>) -> Result<()> {
    if !matches!((link.hardware, link.mac.len()), (1, 6) | (32, 20)) {
        return Ok(());
    }
    let what = format_args!("announce addresses on {}", link.name);
    let failed = |e: nix::Error| Error::call(what, e);
    let (family, raw) = (AddressFamily::Packet, SockType::Raw);
    let socket = socket(family, raw, SockFlag::SOCK_CLOEXEC, None).map_err(failed)?;
    bind_to(&socket, link.index).map_err(failed)?;
    for address in addresses {
        let frame = frame(link.hardware, &link.mac, address);
        send(socket.as_raw_fd(), &frame, MsgFlags::MSG_DONTWAIT).map_err(failed)?;
    }
    Ok(())
}

fn bind_to(socket: &OwnedFd, index: u32) -> nix::Result<()> {
    let index = i32::try_from(index).map_err(|_| nix::Error::ENODEV)?;
    let address = libc::sockaddr_ll {
        sll_family: u16::try_from(libc::AF_PACKET).map_err(|_| nix::Error::EAFNOSUPPORT)?,
        // No protocol: nothing is received.
        sll_protocol: 0,
        sll_ifindex: index,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let length = libc::socklen_t::try_from(mem::size_of_val(&address)).ok();
    let pointer = (&raw const address).cast();
    // SAFETY: `pointer` is to a whole `sockaddr_ll` that lives to the end of this function, its
    // family says so, and `length` is its size; the bytes are copied.
    let address = unsafe { LinkAddr::from_raw(pointer, length) }.ok_or(nix::Error::EINVAL)?;
    bind(socket.as_raw_fd(), &address)
}

/// A packet socket takes what stands before the payload, too: on Ethernet the frame's header, on IPoIB
/// the destination's hardware address (the driver takes it off, `ipoib_hard_header()`) and the
/// encapsulation header.
fn frame(hardware: u16, mac: &[u8], address: IpAddr) -> Vec<u8> {
    let is_ethernet = mac.len() == 6;
    // To all hosts, or to the group of `ff02::1`.
    let mut frame = match (address, is_ethernet) {
        (IpAddr::V4(_), true) => vec![0xff; 6],
        (IpAddr::V6(_), true) => vec![0x33, 0x33, 0, 0, 0, 1],
        (IpAddr::V4(_), false) => multicast_ib(0x401b, [0xff; 4]),
        (IpAddr::V6(_), false) => multicast_ib(0x601b, [0, 0, 0, 1]),
    };
    if is_ethernet {
        frame.extend(mac);
    }
    let (ethertype, payload) = match address {
        IpAddr::V4(address) => (ETHERTYPE_ARP, arp(hardware, mac, address)),
        IpAddr::V6(address) => (ETHERTYPE_IPV6, advertisement(mac, address)),
    };
    frame.extend(ethertype.to_be_bytes());
    if !is_ethernet {
        frame.extend([0, 0]);
    }
    frame.extend(payload);
    frame
}

/// RFC 4391 4: multicast queue pair, then the group's GID with link-local scope, the
/// signature of the protocol and the partition. The partition is not known here and is filled
/// in by the driver (`ipoib_start_xmit()`).
fn multicast_ib(signature: u16, group: [u8; 4]) -> Vec<u8> {
    let queue_pair_and_scope = [0x00, 0xff, 0xff, 0xff, 0xff, 0x12];
    let partition = [0xff, 0xff, 0, 0, 0, 0, 0, 0];
    [
        &queue_pair_and_scope[..],
        &signature.to_be_bytes(),
        &partition,
        &group,
    ]
    .concat()
}

/// A request for the own address; the target's hardware address is zero.
fn arp(hardware: u16, mac: &[u8], address: Ipv4Addr) -> Vec<u8> {
    let [high, low] = hardware.to_be_bytes();
    let length = if mac.len() == 6 { 6 } else { 20 };
    let header = [high, low, 0x08, 0x00, length, 4, 0, ARP_REQUEST];
    let (address, nobody) = (address.octets(), vec![0; mac.len()]);
    [&header[..], mac, &address, &nobody, &address].concat()
}

/// IPv6 and `ICMPv6` headers, target, and the target's link-layer address.
fn advertisement(mac: &[u8], address: Ipv6Addr) -> Vec<u8> {
    let group = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    // Neighbour advertisement, overriding what is cached.
    let mut message = vec![136, 0, 0, 0, 0x20, 0, 0, 0];
    message.extend(address.octets());
    // RFC 4391 9.3: on IPoIB the option's address stands behind two reserved bytes.
    let (option, length): (&[u8], u8) = match mac.len() {
        6 => (&[2, 1], 32),
        _ => (&[2, 3, 0, 0], 48),
    };
    message.extend(option);
    message.extend(mac);
    let hosts = [address.octets(), group.octets()].concat();
    let pseudo_header = [&hosts[..], &[0, 0, 0, length, 0, 0, 0, 58]].concat();
    let sum = checksum(&[&pseudo_header[..], &message].concat());
    message.splice(2..4, sum.to_be_bytes());
    [&[0x60, 0, 0, 0, 0, length, 58, 255], &hosts[..], &message].concat()
}

/// RFC 4443 2.3, of an even number of bytes.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.as_chunks().0.iter();
    !words.fold(0u16, |sum, word| {
        let (sum, carry) = sum.overflowing_add(u16::from_be_bytes(*word));
        sum + u16::from(carry)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x05];

    #[test]
    fn arp_asks_for_the_own_address() {
        let mut request = vec![0xff; 6];
        request.extend(MAC);
        request.extend([0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 1]);
        request.extend(MAC);
        request.extend([10, 1, 2, 3, 0, 0, 0, 0, 0, 0, 10, 1, 2, 3]);
        assert_eq!(frame(1, &MAC, "10.1.2.3".parse().unwrap()), request);
    }

    /// The sum over everything, checksum included.
    fn sum(packet: &[u8]) -> u16 {
        let length = [0, 0, 0, packet[5], 0, 0, 0, 58];
        checksum(&[&packet[8..], &length].concat())
    }

    #[test]
    fn a_neighbour_advertisement_has_a_right_checksum() {
        let address: Ipv6Addr = "fd00::5".parse().unwrap();
        let frame = frame(1, &MAC, address.into());
        assert_eq!(frame.len(), 14 + 40 + 32);
        assert_eq!(frame[..6], [0x33, 0x33, 0, 0, 0, 1]);
        assert_eq!(frame[14 + 4..14 + 8], [0, 32, 58, 255]);
        let message = &frame[54..];
        assert_eq!(message[0], 136);
        assert_eq!(message[24..32], [2, 1, 2, 0, 0, 0, 0, 5]);
        assert_eq!(sum(&frame[14..]), 0);
    }

    #[test]
    fn twenty_byte_addresses_keep_their_length() {
        let mac: Vec<u8> = (0..20).collect();
        let address: Ipv6Addr = "fd00::5".parse().unwrap();
        let advertisement = frame(32, &mac, address.into());
        assert_eq!(advertisement.len(), 24 + 40 + 48);
        assert_eq!(advertisement[20..24], [0x86, 0xdd, 0, 0]);
        let message = &advertisement[64..];
        assert_eq!(message[24..28], [2, 3, 0, 0]);
        assert_eq!(message[28..48], mac[..]);
        assert_eq!(sum(&advertisement[24..]), 0);

        let request = frame(32, &mac, "10.0.0.1".parse().unwrap());
        assert_eq!(request.len(), 24 + 8 + 2 * 24);
        assert_eq!(request[24..32], [0, 32, 8, 0, 20, 4, 0, 1]);
        assert_eq!(request[32..52], mac[..]);
    }

    #[test]
    fn a_link_without_neighbours_announces_nothing() {
        for (hardware, bytes) in [(772, 6), (1, 20)] {
            let link = Link {
                hardware,
                mac: vec![0; bytes],
                ..Link::default()
            };
            let addresses = ["10.0.0.1".parse().unwrap()];
            announce(&link, addresses.into_iter()).unwrap();
        }
    }
}
