//! Netlink as bytes: dumps whose attributes are compared without being understood, and the
//! settings that neither `ip` nor `tc` can make.
//!
//! An attribute that a newer kernel adds is thus part of a host's state without a line here.

use std::os::fd::{AsRawFd, OwnedFd};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, getsockname,
    recv, sendto, socket,
};

const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_DUMP: u16 = 0x300;
const NLM_F_EXCL: u16 = 0x200;
const NLM_F_CREATE: u16 = 0x400;
const NLM_F_APPEND: u16 = 0x800;
const NLA_F_NESTED: u16 = 0x8000;
const RTM_GETLINK: u16 = 18;
const RTM_NEWLINKPROP: u16 = 108;
const IFLA_IFNAME: u16 = 3;
const IFLA_PROP_LIST: u16 = 52;
const IFLA_ALT_IFNAME: u16 = 53;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const HEADER_BYTES: usize = 16;
/// More than the largest netlink message, whose attribute lists end at 64 KiB each.
const BUFFER_BYTES: usize = 512 * 1024;

/// A netlink socket of the namespace its thread is in.
#[derive(Debug)]
pub struct Netlink {
    socket: OwnedFd,
}

impl Netlink {
    /// A socket of one protocol.
    ///
    /// # Errors
    /// The kernel has no such protocol.
    pub fn open(protocol: SockProtocol) -> Result<Self> {
        let socket = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            protocol,
        )
        .context("open a netlink socket")?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, 0)).context("bind a netlink socket")?;
        Ok(Self { socket })
    }

    /// The port by which others reach it.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn port(&self) -> Result<u32> {
        Ok(getsockname::<NetlinkAddr>(self.socket.as_raw_fd())?.pid())
    }

    /// Sends bytes to another socket of the namespace, without waiting for room there.
    ///
    /// # Errors
    /// There is no such socket, or it does not take them.
    pub fn send_to(&self, port: u32, bytes: &[u8]) -> nix::Result<()> {
        let to = NetlinkAddr::new(port, 0);
        sendto(self.socket.as_raw_fd(), bytes, &to, MsgFlags::MSG_DONTWAIT).map(drop)
    }

    /// Every object that a dump of this type lists, each as the bytes behind its netlink header.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn dump(&self, kind: u16, body: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.exchange(kind, NLM_F_DUMP, body)
    }

    fn exchange(&self, kind: u16, flags: u16, body: &[u8]) -> Result<Vec<Vec<u8>>> {
        let message = message(kind, flags | NLM_F_REQUEST, 0, body)?;
        let kernel = NetlinkAddr::new(0, 0);
        sendto(
            self.socket.as_raw_fd(),
            &message,
            &kernel,
            MsgFlags::empty(),
        )
        .with_context(|| format!("send netlink message {kind}"))?;
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut answers = Vec::new();
        loop {
            let read = recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::MSG_TRUNC)?;
            ensure!(read <= BUFFER_BYTES, "a netlink message of {read} bytes");
            let mut rest = buffer.get(..read).unwrap_or_default();
            while rest.len() >= HEADER_BYTES {
                let length = word(rest, 0)?;
                let whole = rest.get(..length).context("a netlink message is cut off")?;
                let answer = whole
                    .get(HEADER_BYTES..)
                    .context("a netlink message ends early")?;
                match half(whole, 4)? {
                    NLMSG_DONE => return Ok(answers),
                    NLMSG_ERROR => match i32::from_ne_bytes(four(answer, 0)?) {
                        0 => return Ok(answers),
                        errno => bail!(
                            "netlink message {kind}: {}",
                            nix::errno::Errno::from_raw(-errno)
                        ),
                    },
                    _ => answers.push(answer.to_vec()),
                }
                rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            }
        }
    }
}

/// One message with its header.
///
/// # Errors
/// It is longer than 4 GiB.
pub fn message(kind: u16, flags: u16, sequence: u32, body: &[u8]) -> Result<Vec<u8>> {
    let length = u32::try_from(HEADER_BYTES + body.len())?;
    let mut message = length.to_ne_bytes().to_vec();
    message.extend(kind.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    message.extend(sequence.to_ne_bytes());
    message.extend([0; 4]);
    message.extend(body);
    message.resize(message.len().next_multiple_of(4), 0);
    Ok(message)
}

/// The attributes of a message or of a nested attribute, without the flags of their types.
///
/// # Errors
/// They do not fit their lengths.
pub fn attributes(mut bytes: &[u8]) -> Result<Vec<(u16, &[u8])>> {
    let mut found = Vec::new();
    while bytes.len() >= 4 {
        let length = usize::from(half(bytes, 0)?);
        let value = bytes.get(4..length).context("an attribute is cut off")?;
        found.push((half(bytes, 2)? & 0x3fff, value));
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(found)
}

/// One attribute, padded.
///
/// # Errors
/// It is longer than 64 KiB.
pub fn attribute(kind: u16, value: &[u8]) -> Result<Vec<u8>> {
    let mut bytes = u16::try_from(value.len() + 4)?.to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    Ok(bytes)
}

/// Four bytes of a message at an offset.
///
/// # Errors
/// It is shorter.
pub fn four(bytes: &[u8], at: usize) -> Result<[u8; 4]> {
    let slice = bytes.get(at..at + 4).context("a message ends early")?;
    Ok(slice.try_into()?)
}

fn word(bytes: &[u8], at: usize) -> Result<usize> {
    Ok(usize::try_from(u32::from_ne_bytes(four(bytes, at)?))?)
}

fn half(bytes: &[u8], at: usize) -> Result<u16> {
    let slice = bytes.get(at..at + 2).context("a message ends early")?;
    Ok(u16::from_ne_bytes(slice.try_into()?))
}

/// The index of a link of the thread's namespace, by its name.
///
/// # Errors
/// There is none.
pub fn index_here(name: &[u8]) -> Result<[u8; 4]> {
    let netlink = Netlink::open(SockProtocol::NetlinkRoute)?;
    for message in netlink.dump(RTM_GETLINK, &[0; 16])? {
        for (kind, value) in attributes(message.get(16..).unwrap_or_default())? {
            if kind == IFLA_IFNAME && value.strip_suffix(&[0]) == Some(name) {
                return four(&message, 4);
            }
        }
    }
    bail!("no link {}", String::from_utf8_lossy(name))
}

/// Gives a link of the thread's namespace one more name, of whatever bytes.
///
/// # Errors
/// The kernel refused.
pub fn add_altname(index: [u8; 4], name: &[u8]) -> Result<()> {
    let mut name = name.to_vec();
    name.push(0);
    let mut body = vec![0; 16];
    body.splice(4..8, index);
    let names = attribute(IFLA_ALT_IFNAME, &name)?;
    body.extend(attribute(NLA_F_NESTED | IFLA_PROP_LIST, &names)?);
    let netlink = Netlink::open(SockProtocol::NetlinkRoute)?;
    netlink.exchange(
        RTM_NEWLINKPROP,
        NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL | NLM_F_APPEND,
        &body,
    )?;
    Ok(())
}

/// Bytes as hex digits.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
