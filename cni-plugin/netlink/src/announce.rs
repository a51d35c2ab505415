//! Gratuitous ARP and unsolicited neighbour advertisements: neighbours and switches learn at
//! once where an address now is, also when it was a moment ago at another pod.
//!
//! Frames are written as the wire has them, through a packet socket bound to the interface.
//! Ethernet and IP over InfiniBand differ only in the hardware address's length and in what
//! stands before the payload, so both go the same way. RFC 5227 (both forms of the ARP
//! announcement), RFC 4861 7.2.6, RFC 4391 and 4392 (IPoIB).

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
const ARP_REQUEST: u16 = 1;
const ARP_REPLY: u16 = 2;

/// Announces these addresses to the link's neighbours. Call from within the link's
/// namespace.
///
/// # Errors
/// The system call that failed; ENETDOWN when the link is not up.
pub fn announce(link: &Link, addresses: &[IpAddr]) -> Result<()> {
    let frames: Vec<Vec<u8>> = addresses
        .iter()
        .flat_map(|address| frames(link.hardware, &link.mac, *address))
        .collect();
    if frames.is_empty() {
        return Ok(());
    }
    let failed =
        |e: nix::Error| Error::call(format_args!("announce addresses on {}", link.name), e);
    let socket = socket(
        AddressFamily::Packet,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        None,
    )
    .map_err(failed)?;
    bind_to(&socket, link.index).map_err(failed)?;
    for frame in frames {
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

/// The frames for one address; none for a hardware type without neighbours.
fn frames(hardware: u16, mac: &[u8], address: IpAddr) -> Vec<Vec<u8>> {
    if !matches!((hardware, mac.len()), (1, 6) | (32, 20)) {
        return Vec::new();
    }
    match address {
        IpAddr::V4(address) => [ARP_REQUEST, ARP_REPLY]
            .into_iter()
            .map(|operation| {
                let mut frame = header(mac, &broadcast(mac), ETHERTYPE_ARP);
                frame.extend(arp(operation, hardware, mac, address));
                frame
            })
            .collect(),
        IpAddr::V6(address) => {
            let mut frame = header(mac, &all_nodes(mac), ETHERTYPE_IPV6);
            frame.extend(advertisement(mac, address));
            vec![frame]
        }
    }
}

/// What a packet socket puts before the payload: on Ethernet the frame's header, on IPoIB the
/// destination's hardware address (the driver takes it off, `ipoib_hard_header()`) and the
/// encapsulation header.
fn header(mac: &[u8], destination: &[u8], ethertype: u16) -> Vec<u8> {
    let mut header = destination.to_vec();
    if mac.len() == 6 {
        header.extend(mac);
        header.extend(ethertype.to_be_bytes());
    } else {
        header.extend(ethertype.to_be_bytes());
        header.extend([0, 0]);
    }
    header
}

fn broadcast(mac: &[u8]) -> Vec<u8> {
    if mac.len() == 6 {
        vec![0xff; 6]
    } else {
        multicast_ib(0x401b, [0xff; 4])
    }
}

/// The group of `ff02::1`.
fn all_nodes(mac: &[u8]) -> Vec<u8> {
    if mac.len() == 6 {
        vec![0x33, 0x33, 0, 0, 0, 1]
    } else {
        multicast_ib(0x601b, [0, 0, 0, 1])
    }
}

/// RFC 4391 4: multicast queue pair, then the group's GID with link-local scope, the
/// signature of the protocol and the partition. The partition is not known here and is filled
/// in by the driver (`ipoib_start_xmit()`).
fn multicast_ib(signature: u16, group: [u8; 4]) -> Vec<u8> {
    let mut address = vec![0x00, 0xff, 0xff, 0xff, 0xff, 0x12];
    address.extend(signature.to_be_bytes());
    address.extend([0xff, 0xff, 0, 0, 0, 0, 0, 0]);
    address.extend(group);
    address
}

fn arp(operation: u16, hardware: u16, mac: &[u8], address: Ipv4Addr) -> Vec<u8> {
    let mut packet = hardware.to_be_bytes().to_vec();
    packet.extend(0x0800u16.to_be_bytes());
    packet.push(if mac.len() == 6 { 6 } else { 20 });
    packet.push(4);
    packet.extend(operation.to_be_bytes());
    packet.extend(mac);
    packet.extend(address.octets());
    // The target's hardware address is zero in the request; in the reply it is ours.
    if operation == ARP_REQUEST {
        packet.extend(vec![0; mac.len()]);
    } else {
        packet.extend(mac);
    }
    packet.extend(address.octets());
    packet
}

/// IPv6 and `ICMPv6` headers, target, and the target's link-layer address.
fn advertisement(mac: &[u8], address: Ipv6Addr) -> Vec<u8> {
    let group = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    // Neighbour advertisement, overriding what is cached.
    let mut message = vec![136, 0, 0, 0, 0x20, 0, 0, 0];
    message.extend(address.octets());
    let option = (2 + mac.len()).next_multiple_of(8);
    message.extend([2, if option == 8 { 1 } else { 3 }]);
    message.extend(mac);
    message.resize(24 + option, 0);
    // RFC 4391 9.3: on IPoIB the option's address stands behind two reserved bytes.
    if mac.len() == 20 {
        message.truncate(26);
        message.extend([0, 0]);
        message.extend(mac);
    }
    let length = if mac.len() == 6 { 32u16 } else { 48 };
    let sum = checksum(address, group, length, &message);
    message.splice(2..4, sum.to_be_bytes());

    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend(length.to_be_bytes());
    packet.extend([58, 255]);
    packet.extend(address.octets());
    packet.extend(group.octets());
    packet.extend(message);
    packet
}

/// RFC 4443 2.3.
fn checksum(source: Ipv6Addr, destination: Ipv6Addr, length: u16, message: &[u8]) -> u16 {
    let words = |bytes: &[u8]| -> u32 {
        bytes
            .chunks(2)
            .map(|pair| match *pair {
                [high, low] => u32::from(u16::from_be_bytes([high, low])),
                [high] => u32::from(high) << 8,
                _ => 0,
            })
            .sum()
    };
    let mut sum = words(&source.octets())
        + words(&destination.octets())
        + u32::from(length)
        + 58
        + words(message);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    #[expect(clippy::cast_possible_truncation, reason = "folded to 16 bits above")]
    let sum = !(sum as u16);
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x05];

    #[test]
    fn arp_is_announced_in_both_forms() {
        let frames = frames(1, &MAC, "10.1.2.3".parse().unwrap());
        assert_eq!(frames.len(), 2);
        let mut request = vec![0xff; 6];
        request.extend(MAC);
        request.extend([0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 1]);
        request.extend(MAC);
        request.extend([10, 1, 2, 3, 0, 0, 0, 0, 0, 0, 10, 1, 2, 3]);
        assert_eq!(frames[0], request);
        assert_eq!(frames[1][20..22], [0, 2]);
        assert_eq!(frames[1][32..38], MAC);
    }

    #[test]
    fn a_neighbour_advertisement_has_a_right_checksum() {
        let address: Ipv6Addr = "fd00::5".parse().unwrap();
        let frames = frames(1, &MAC, address.into());
        assert_eq!(frames.len(), 1);
        let frame = &frames[0];
        assert_eq!(frame.len(), 14 + 40 + 32);
        assert_eq!(frame[..6], [0x33, 0x33, 0, 0, 0, 1]);
        assert_eq!(frame[14 + 4..14 + 8], [0, 32, 58, 255]);
        let message = &frame[54..];
        assert_eq!(message[0], 136);
        assert_eq!(message[24..32], [2, 1, 2, 0, 0, 0, 0, 5]);
        // A sum over everything, checksum included, comes out as zero.
        let group = "ff02::1".parse().unwrap();
        assert_eq!(checksum(address, group, 32, message), 0);
    }

    #[test]
    fn twenty_byte_addresses_keep_their_length() {
        let mac: Vec<u8> = (0..20).collect();
        let address: Ipv6Addr = "fd00::5".parse().unwrap();
        let advertisement = &frames(32, &mac, address.into())[0];
        assert_eq!(advertisement.len(), 24 + 40 + 48);
        assert_eq!(advertisement[20..24], [0x86, 0xdd, 0, 0]);
        let message = &advertisement[64..];
        assert_eq!(message[24..28], [2, 3, 0, 0]);
        assert_eq!(message[28..48], mac[..]);
        assert_eq!(
            checksum(address, "ff02::1".parse().unwrap(), 48, message),
            0
        );

        let request = &frames(32, &mac, "10.0.0.1".parse().unwrap())[0];
        assert_eq!(request.len(), 24 + 8 + 2 * 24);
        assert_eq!(request[24..32], [0, 32, 8, 0, 20, 4, 0, 1]);
        assert_eq!(request[32..52], mac[..]);
    }

    #[test]
    fn what_has_no_neighbours_is_not_announced() {
        assert!(frames(772, &[0; 6], "10.0.0.1".parse().unwrap()).is_empty());
        assert!(frames(1, &[0; 20], "10.0.0.1".parse().unwrap()).is_empty());
    }
}
