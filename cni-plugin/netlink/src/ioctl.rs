//! The rules by which a NIC steers what it receives, which have no netlink message.

use std::{io, os::fd::AsRawFd};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use super::{
    Error, Name, Result,
    attribute::{put, word},
};

const SIOCETHTOOL: libc::Ioctl = 0x8946;

const ETHTOOL_GRXCLSRLCNT: u32 = 0x2e;
const ETHTOOL_GRXCLSRLALL: u32 = 0x30;
const ETHTOOL_SRXCLSRLDEL: u32 = 0x31;

/// Where the parts of `struct ethtool_rxnfc` (include/uapi/linux/ethtool.h) begin, and its size.
const RULE_LOCATION: usize = 16 + 160;
const RULE_COUNT: usize = 184;
const RULE_LOCATIONS: usize = 188;
const RXNFC_BYTES: usize = 192;
/// One request about rules; `buffer` is a `struct ethtool_rxnfc` with room for as many locations as
/// it says. The socket is one of the namespace that the thread is in.
fn rules(interface: &Name, buffer: &mut [u8]) -> io::Result<()> {
    let room = word(buffer, RULE_COUNT) as usize * 4;
    let mut name: [libc::c_char; libc::IFNAMSIZ] = [0; libc::IFNAMSIZ];
    if buffer.len() < RXNFC_BYTES
        || buffer.len() < RULE_LOCATIONS + room
        || interface.as_bytes().len() >= name.len()
    {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in name.iter_mut().zip(interface.as_bytes()) {
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    let mut request = libc::ifreq {
        ifr_name: name,
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            ifru_data: buffer.as_mut_ptr().cast(),
        },
    };
    let (domain, kind) = (AddressFamily::Inet, SockType::Datagram);
    let socket = socket(domain, kind, SockFlag::SOCK_CLOEXEC, None)?;
    // SAFETY: the kernel reads and writes one `struct ifreq`, and behind its pointer one
    // `struct ethtool_rxnfc` with the room that it names, which `buffer` has.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) };
    match done {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

fn rxnfc(command: u32, locations: u32) -> Vec<u8> {
    let room = locations as usize * 4;
    let mut buffer = vec![0; (RULE_LOCATIONS + room).max(RXNFC_BYTES)];
    put(&mut buffer, 0, &command.to_ne_bytes());
    put(&mut buffer, RULE_COUNT, &locations.to_ne_bytes());
    buffer
}

/// The places in the NIC's table that have a rule; none where the driver has no such table. Call from
/// within the NIC's namespace.
pub fn flow_rules(interface: &Name) -> Result<Vec<u32>> {
    let read = || -> io::Result<Vec<u32>> {
        let mut count = rxnfc(ETHTOOL_GRXCLSRLCNT, 0);
        rules(interface, &mut count)?;
        let count = word(&count, RULE_COUNT);
        if count == 0 {
            return Ok(Vec::new());
        }
        let mut all = rxnfc(ETHTOOL_GRXCLSRLALL, count);
        rules(interface, &mut all)?;
        let found = word(&all, RULE_COUNT).min(count);
        let locations = 0..found as usize;
        Ok(locations
            .map(|number| word(&all, RULE_LOCATIONS + number * 4))
            .collect())
    };
    match read() {
        Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL)) => {
            Ok(Vec::new())
        }
        done => {
            done.map_err(|e| Error::call(format_args!("read steering rules of {interface}"), e))
        }
    }
}

pub fn delete_flow_rule(interface: &Name, location: u32) -> Result<()> {
    let mut buffer = rxnfc(ETHTOOL_SRXCLSRLDEL, 0);
    put(&mut buffer, RULE_LOCATION, &location.to_ne_bytes());
    rules(interface, &mut buffer).map_err(|e| {
        Error::call(
            format_args!("remove steering rule {location} of {interface}"),
            e,
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_the_kernels_layout() {
        // offsetof() and sizeof() of gcc 12 on x86-64 and arm64.
        assert_eq!(rxnfc(ETHTOOL_GRXCLSRLCNT, 0).len(), 192);
        assert_eq!(rxnfc(ETHTOOL_GRXCLSRLALL, 3).len(), 200);
    }

    #[test]
    fn a_buffer_without_room_is_refused_before_the_kernel_writes_into_it() {
        let mut short = rxnfc(ETHTOOL_GRXCLSRLALL, 0);
        put(&mut short, RULE_COUNT, &100u32.to_ne_bytes());
        let error = rules(&"lo".into(), &mut short).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        let mut whole = rxnfc(ETHTOOL_GRXCLSRLALL, 0);
        let error = rules(&"a-name-that-is-too-long".into(), &mut whole).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }
}
