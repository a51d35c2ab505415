//! A netlink socket that receives from the kernel only.
//!
//! Whoever has `CAP_NET_ADMIN` over a network namespace can send to every netlink socket in it, and
//! `/proc/net/netlink` names them all. Of a socket that is connected to the kernel the kernel refuses
//! what other sockets send, before it takes room in the queue (`netlink_getsockbyportid()`,
//! `net/netlink/af_netlink.c`). What was queued before the socket was connected is dropped here.

use std::io;
use std::ops::Deref;
use std::os::fd::{AsRawFd, RawFd};

use netlink_sys::{Socket, SocketAddr};

/// The kernel fills at most 32 KiB of a dump at once (`netlink_dump()`); a single answer about a link
/// may be longer.
const BUFFER_BYTES: usize = 128 << 10;

/// A netlink socket of the network namespace its thread was in when it was opened.
#[derive(Debug)]
pub struct KernelSocket(Socket);

impl KernelSocket {
    /// Opens a socket of a protocol, in these multicast groups. Refusals come with the kernel's text and
    /// without a copy of the request.
    pub fn open(protocol: isize, groups: u32) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        socket.set_ext_ack(true)?;
        socket.set_cap_ack(true)?;
        if groups != 0 {
            socket.bind(&SocketAddr::new(0, groups))?;
        }
        // It is bound to a port with that.
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self(socket))
    }

    /// Receives the kernel's next message into `buffer`, in place of what is there.
    pub fn receive(&self, buffer: &mut Vec<u8>) -> io::Result<()> {
        loop {
            buffer.clear();
            buffer.reserve(BUFFER_BYTES);
            match self.0.recv_from(buffer, libc::MSG_TRUNC) {
                Ok((_, sender)) if sender.port_number() != 0 => {}
                Ok((length, _)) if length > buffer.len() => {
                    return Err(io::Error::other(format!(
                        "a message of {length} bytes was cut"
                    )));
                }
                Ok(_) => return Ok(()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }
}

impl Deref for KernelSocket {
    type Target = Socket;

    fn deref(&self) -> &Socket {
        &self.0
    }
}

impl AsRawFd for KernelSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use netlink_sys::protocols::NETLINK_USERSOCK;

    use super::*;

    /// Of a protocol that lets any user send to any socket.
    fn foreign() -> Socket {
        let mut socket = Socket::new(NETLINK_USERSOCK).unwrap();
        socket.bind_auto().unwrap();
        socket
    }

    fn address(socket: &Socket) -> SocketAddr {
        let mut address = SocketAddr::new(0, 0);
        socket.get_address(&mut address).unwrap();
        address
    }

    #[test]
    fn the_kernel_refuses_what_another_socket_sends() {
        for groups in [0, 1] {
            let socket = KernelSocket::open(NETLINK_USERSOCK, groups).unwrap();
            let to = address(&socket);
            let refused = foreign().send_to(b"forged", &to, 0).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::ECONNREFUSED));
        }
    }

    #[test]
    fn a_message_that_is_not_the_kernels_is_dropped() {
        let mut early = Socket::new(NETLINK_USERSOCK).unwrap();
        early.bind(&SocketAddr::new(0, 1)).unwrap();
        foreign().send_to(b"forged", &address(&early), 0).unwrap();
        early.set_non_blocking(true).unwrap();
        let socket = KernelSocket(early);
        let mut buffer = Vec::new();
        let nothing = socket.receive(&mut buffer).unwrap_err();
        assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
    }
}
