//! Messages of RDMA netlink as bytes: requests out, answers in. No I/O.
//!
//! A message is a netlink header (16 bytes, host byte order) and attributes: length (2), type
//! (2), value, padded to four. There is no family header. The message type is
//! `client << 10 | command` with client 5. Numbers are those of
//! `include/uapi/rdma/rdma_netlink.h`.

use std::os::fd::{AsRawFd, BorrowedFd};

use crate::address::Guid;
use crate::chardev::{DeviceNumber, number_of};
use crate::nldev::NetnsMode;

/// `RDMA_NL_NLDEV << 10`.
const CLIENT: u16 = 5 << 10;
const HEADER: usize = 16;

mod command {
    pub(super) const GET: u16 = 1;
    pub(super) const SET: u16 = 2;
    pub(super) const SYS_GET: u16 = 6;
    pub(super) const GET_CHARDEV: u16 = 15;
}

mod attribute {
    pub(super) const DEV_INDEX: u16 = 1;
    pub(super) const DEV_NAME: u16 = 2;
    pub(super) const PORT_INDEX: u16 = 3;
    pub(super) const NODE_GUID: u16 = 6;
    pub(super) const NETNS_MODE: u16 = 66;
    pub(super) const DEV_PROTOCOL: u16 = 67;
    pub(super) const NET_NS_FD: u16 = 68;
    pub(super) const CHARDEV_TYPE: u16 = 69;
    pub(super) const CHARDEV_NAME: u16 = 70;
    pub(super) const CHARDEV: u16 = 72;
    /// The two high bits of a type are flags (`NLA_F_NESTED`, `NLA_F_NET_BYTEORDER`).
    pub(super) const TYPE_MASK: u16 = 0x3fff;
}

mod flag {
    pub(super) const REQUEST: u16 = 1;
    pub(super) const ACK: u16 = 4;
    pub(super) const DUMP: u16 = 0x300;
    /// In an error: the request is not repeated in full.
    pub(super) const CAPPED: u16 = 0x100;
    /// In an error: attributes follow.
    pub(super) const ACK_TLVS: u16 = 0x200;
}

/// `NLMSG_ERROR` and `NLMSG_DONE`.
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// `NLMSGERR_ATTR_MSG`: the kernel's text about a refusal.
const ERROR_MESSAGE: u16 = 1;

/// What an answer lacks or gets wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// A length points outside of the message.
    #[error("a message of {0} bytes is cut short")]
    Short(usize),
    /// An attribute that every kernel sends is not there, or has another size.
    #[error("attribute {0} is missing or of the wrong size")]
    Attribute(u16),
}

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    command: u16,
    flags: u16,
    attributes: Vec<u8>,
}

impl Request {
    /// Asks how the subsystem treats namespaces; answered by [`netns_mode`].
    #[must_use]
    pub fn system() -> Self {
        Self::new(command::SYS_GET, 0)
    }

    /// Asks for all devices of the socket's namespace; answered by [`Device`]s.
    #[must_use]
    pub fn devices() -> Self {
        Self::new(command::GET, flag::DUMP)
    }

    /// Asks for a device's verbs node; answered by a [`Node`].
    #[must_use]
    pub fn uverbs(device: u32) -> Self {
        Self::new(command::GET_CHARDEV, 0)
            .with(attribute::CHARDEV_TYPE, b"uverbs\0")
            .with(attribute::DEV_INDEX, &device.to_ne_bytes())
    }

    /// Asks to move a device into the namespace that `namespace` is open on. The socket must be
    /// of the namespace the device is in. This crate only spells the request; whoever sends it
    /// changes the host.
    #[must_use]
    pub fn set_netns(device: u32, namespace: BorrowedFd<'_>) -> Self {
        // The kernel reads it as u32; a descriptor is never negative.
        let descriptor = namespace.as_raw_fd().to_ne_bytes();
        Self::new(command::SET, flag::ACK)
            .with(attribute::DEV_INDEX, &device.to_ne_bytes())
            .with(attribute::NET_NS_FD, &descriptor)
    }

    /// Asks to rename a device of the socket's namespace. As with [`Request::set_netns`], whoever
    /// sends it changes the host.
    #[must_use]
    pub fn set_name(device: u32, name: &str) -> Self {
        let mut text = name.as_bytes().to_vec();
        text.push(0);
        Self::new(command::SET, flag::ACK)
            .with(attribute::DEV_INDEX, &device.to_ne_bytes())
            .with(attribute::DEV_NAME, &text)
    }

    fn new(command: u16, flags: u16) -> Self {
        Self {
            command,
            flags: flags | flag::REQUEST,
            attributes: Vec::new(),
        }
    }

    fn with(mut self, kind: u16, value: &[u8]) -> Self {
        // The longest value is a name, 64 bytes with its end (`IB_DEVICE_NAME_MAX`).
        let length = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
        self.attributes.extend(length.to_ne_bytes());
        self.attributes.extend(kind.to_ne_bytes());
        self.attributes.extend(value);
        self.attributes
            .resize(self.attributes.len().next_multiple_of(4), 0);
        self
    }

    /// The request as a datagram with this sequence number.
    #[must_use]
    pub fn encode(&self, sequence: u32) -> Vec<u8> {
        let length = u32::try_from(HEADER + self.attributes.len()).unwrap_or(u32::MAX);
        let mut bytes = Vec::with_capacity(HEADER + self.attributes.len());
        bytes.extend(length.to_ne_bytes());
        bytes.extend((CLIENT | self.command).to_ne_bytes());
        bytes.extend(self.flags.to_ne_bytes());
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend(0_u32.to_ne_bytes());
        bytes.extend(&self.attributes);
        bytes
    }

    /// True if the answer is a series of messages that ends with [`Part::Done`].
    #[must_use]
    pub fn is_dump(&self) -> bool {
        self.flags & flag::DUMP == flag::DUMP
    }
}

/// One message of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part<'a> {
    /// Attributes of an object.
    Payload(&'a [u8]),
    /// The request was carried out; there is no data.
    Acknowledged,
    /// The end of a dump.
    Done,
    /// The request was refused.
    Refused {
        /// The error number, positive.
        errno: i32,
        /// The kernel's explanation, if it gave one.
        message: Option<String>,
    },
}

/// Splits a datagram into the messages that answer the request of this sequence number; others
/// (notifications, late answers) are skipped.
///
/// # Errors
/// [`Malformed::Short`] if a length leads outside of the datagram.
pub fn parts(datagram: &[u8], sequence: u32) -> Result<Vec<Part<'_>>, Malformed> {
    let mut parts = Vec::new();
    let mut rest = datagram;
    while !rest.is_empty() {
        let short = Malformed::Short(rest.len());
        let length = usize::try_from(u32_at(rest, 0).ok_or_else(|| short.clone())?)
            .map_err(|_| short.clone())?;
        let message = rest
            .get(..length)
            .filter(|m| m.len() >= HEADER)
            .ok_or(short)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        let (Some(kind), Some(flags)) = (u16_at(message, 4), u16_at(message, 6)) else {
            continue;
        };
        if u32_at(message, 8) != Some(sequence) {
            continue;
        }
        let payload = message.get(HEADER..).unwrap_or(&[]);
        parts.push(match kind {
            ERROR => refusal(payload, flags)?,
            DONE => match i32_at(payload, 0) {
                // A dump that failed on the way ends with the error.
                Some(code) if code < 0 => Part::Refused {
                    errno: code.saturating_neg(),
                    message: None,
                },
                _ => Part::Done,
            },
            _ => Part::Payload(payload),
        });
    }
    Ok(parts)
}

/// `struct nlmsgerr`: the code, the request's header (and all of it unless capped), attributes.
fn refusal(payload: &[u8], flags: u16) -> Result<Part<'static>, Malformed> {
    let short = || Malformed::Short(payload.len());
    let code = i32_at(payload, 0).ok_or_else(short)?;
    if code == 0 {
        return Ok(Part::Acknowledged);
    }
    let mut message = None;
    if flags & flag::ACK_TLVS != 0 {
        let repeated = if flags & flag::CAPPED != 0 {
            HEADER
        } else {
            u32_at(payload, 4)
                .and_then(|l| usize::try_from(l).ok())
                .ok_or_else(short)?
        };
        let start = repeated
            .checked_next_multiple_of(4)
            .and_then(|r| r.checked_add(4));
        let attributes = start.and_then(|s| payload.get(s..)).ok_or_else(short)?;
        message = string(attributes, ERROR_MESSAGE)?;
    }
    Ok(Part::Refused {
        errno: code.saturating_neg(),
        message,
    })
}

/// The subsystem's mode out of an answer to [`Request::system`].
///
/// # Errors
/// [`Malformed`] if the answer does not have it.
pub fn netns_mode(payload: &[u8]) -> Result<NetnsMode, Malformed> {
    match find(payload, attribute::NETNS_MODE)? {
        Some([0]) => Ok(NetnsMode::Exclusive),
        Some([_]) => Ok(NetnsMode::Shared),
        _ => Err(Malformed::Attribute(attribute::NETNS_MODE)),
    }
}

/// A device, as netlink reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Index, by which requests name the device. A move keeps it; a driver that binds again gives
    /// another.
    pub index: u32,
    /// Name.
    pub name: String,
    /// Number of ports.
    pub ports: u32,
    /// Node GUID; `None` if zero.
    pub node_guid: Option<Guid>,
    /// Protocol: `roce`, `ib`, `iw`, `opa`, `usnic`; older kernels do not report it.
    pub protocol: Option<String>,
}

impl Device {
    /// Reads one message of the answer to [`Request::devices`].
    ///
    /// # Errors
    /// [`Malformed`] if it lacks index, name or ports.
    pub fn decode(payload: &[u8]) -> Result<Self, Malformed> {
        Ok(Self {
            index: number(payload, attribute::DEV_INDEX)?,
            name: required(string(payload, attribute::DEV_NAME)?, attribute::DEV_NAME)?,
            ports: number(payload, attribute::PORT_INDEX)?,
            node_guid: long(payload, attribute::NODE_GUID)?
                .filter(|&g| g != 0)
                .map(Guid),
            protocol: string(payload, attribute::DEV_PROTOCOL)?,
        })
    }
}

/// A character device, as the kernel knows it at this moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Name, such as `uverbs0`.
    pub name: String,
    /// Its number.
    pub number: DeviceNumber,
}

impl Node {
    /// Reads the answer to [`Request::uverbs`].
    ///
    /// # Errors
    /// [`Malformed`] if it lacks name or number.
    pub fn decode(payload: &[u8]) -> Result<Self, Malformed> {
        let device = required(long(payload, attribute::CHARDEV)?, attribute::CHARDEV)?;
        Ok(Self {
            name: required(
                string(payload, attribute::CHARDEV_NAME)?,
                attribute::CHARDEV_NAME,
            )?,
            number: number_of(device),
        })
    }
}

/// The value of the first attribute of a kind.
fn find(payload: &[u8], wanted: u16) -> Result<Option<&[u8]>, Malformed> {
    let mut rest = payload;
    while !rest.is_empty() {
        let short = || Malformed::Short(rest.len());
        let length = usize::from(u16_at(rest, 0).ok_or_else(short)?);
        let kind = u16_at(rest, 2).ok_or_else(short)? & attribute::TYPE_MASK;
        let value = rest.get(4..length).ok_or_else(short)?;
        if kind == wanted {
            return Ok(Some(value));
        }
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or(&[]);
    }
    Ok(None)
}

fn string(payload: &[u8], kind: u16) -> Result<Option<String>, Malformed> {
    Ok(find(payload, kind)?.map(|value| {
        let text = value.split(|&b| b == 0).next().unwrap_or(&[]);
        String::from_utf8_lossy(text).into_owned()
    }))
}

fn number(payload: &[u8], kind: u16) -> Result<u32, Malformed> {
    let value = find(payload, kind)?
        .and_then(|v| v.try_into().ok())
        .map(u32::from_ne_bytes);
    required(value, kind)
}

fn long(payload: &[u8], kind: u16) -> Result<Option<u64>, Malformed> {
    Ok(find(payload, kind)?
        .and_then(|v| v.try_into().ok())
        .map(u64::from_ne_bytes))
}

fn required<T>(value: Option<T>, kind: u16) -> Result<T, Malformed> {
    value.ok_or(Malformed::Attribute(kind))
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes
        .get(at..)?
        .first_chunk()
        .copied()
        .map(u16::from_ne_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes
        .get(at..)?
        .first_chunk()
        .copied()
        .map(u32::from_ne_bytes)
}

fn i32_at(bytes: &[u8], at: usize) -> Option<i32> {
    bytes
        .get(at..)?
        .first_chunk()
        .copied()
        .map(i32::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::fd::AsFd;

    /// An answer made of attributes, as the kernel frames it.
    fn framed(kind: u16, flags: u16, sequence: u32, payload: &[u8]) -> Vec<u8> {
        let mut bytes = u32::try_from(HEADER + payload.len())
            .unwrap()
            .to_ne_bytes()
            .to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(flags.to_ne_bytes());
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend(0_u32.to_ne_bytes());
        bytes.extend(payload);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_readers_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parts(&bytes, 1);
            let _ = (netns_mode(&bytes), Device::decode(&bytes), Node::decode(&bytes));
        }

        #[test]
        fn wrong_lengths_inside_a_frame_do_not_either(
            kind in 0_u16..6, flags: u16, payload in prop::collection::vec(any::<u8>(), 0..120)
        ) {
            let _ = parts(&framed(kind, flags, 1, &payload), 1);
        }

        #[test]
        fn every_message_of_a_datagram_is_seen(lengths in prop::collection::vec(0_usize..40, 0..8)) {
            let datagram: Vec<u8> =
                lengths.iter().flat_map(|n| framed(CLIENT | 1, 2, 9, &vec![7; *n])).collect();
            let seen: Vec<usize> = parts(&datagram, 9)
                .unwrap()
                .iter()
                .map(|part| match part { Part::Payload(p) => p.len(), other => panic!("{other:?}") })
                .collect();
            prop_assert_eq!(seen, lengths);
        }
    }

    fn bytes(hex: &str) -> Vec<u8> {
        let digits = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        (0..hex.len()).step_by(2).map(digits).collect()
    }

    /// Payloads of answers as Linux 6.1 gave them to these very requests, with soft RoCE.
    mod linux_6_1 {
        pub(super) const SYSTEM_SHARED: &str = "0500420001000000050060000000000005005d0001000000";
        pub(super) const SYSTEM_EXCLUSIVE: &str =
            "0500420000000000050060000000000005005d0001000000";
        pub(super) const DEVICE: &str = "080001000300000009000200727865330000000008000300010000000c\
             000400763c2201000000000c000600070100feff0054500c000700070100feff00545005000e0001000000\
             050054000000000009004300726f636500000000";
        pub(super) const UVERBS: &str = "080049000e0000000c004800c3e70000000000000c0047000200000000\
             0000000c0046007576657262733300";
    }

    #[test]
    fn the_mode_is_read_from_a_kernels_answer() {
        assert_eq!(
            netns_mode(&bytes(linux_6_1::SYSTEM_SHARED)),
            Ok(NetnsMode::Shared)
        );
        assert_eq!(
            netns_mode(&bytes(linux_6_1::SYSTEM_EXCLUSIVE)),
            Ok(NetnsMode::Exclusive)
        );
    }

    #[test]
    fn a_device_is_read_from_a_kernels_answer() {
        let device = Device {
            index: 3,
            name: "rxe3".into(),
            ports: 1,
            node_guid: Some(Guid(0x5054_00ff_fe00_0107)),
            protocol: Some("roce".into()),
        };
        assert_eq!(Device::decode(&bytes(linux_6_1::DEVICE)), Ok(device));
    }

    #[test]
    fn a_verbs_node_is_read_from_a_kernels_answer() {
        let number = DeviceNumber {
            major: 231,
            minor: 195,
        };
        let node = Node {
            name: "uverbs3".into(),
            number,
        };
        assert_eq!(Node::decode(&bytes(linux_6_1::UVERBS)), Ok(node));
    }

    /// What rdma(8) of iproute2 6.1 sends, as strace shows it; its sequence numbers are those of
    /// the capture, and the fd of a namespace is 4 there.
    mod rdma_tool {
        pub(super) const DEVICES: (u32, &str) = (0x6b01_3467, "10000000011405036734016b00000000");
        pub(super) const RENAME: &str = "24000000021405006834016b00000000\
             08000100000000000b0002006d6c78355f370000";
        pub(super) const MOVE: &str =
            "20000000021405006834016b0000000008000100000000000800440004000000";
    }

    #[test]
    fn changes_are_asked_for_as_the_rdma_tool_does() {
        let sequence = 0x6b01_3468;
        assert_eq!(
            Request::set_name(0, "mlx5_7").encode(sequence),
            bytes(rdma_tool::RENAME)
        );
        let file = std::fs::File::open("/dev/null").unwrap();
        let mut expected = bytes(rdma_tool::MOVE);
        let descriptor = expected.len() - 4;
        expected.truncate(descriptor);
        expected.extend(file.as_raw_fd().to_ne_bytes());
        assert_eq!(
            Request::set_netns(0, file.as_fd()).encode(sequence),
            expected
        );
    }

    #[test]
    fn devices_are_listed_as_the_rdma_tool_does() {
        let (sequence, request) = rdma_tool::DEVICES;
        let mut expected = bytes(request);
        // It asks for an acknowledgement of the dump, too, which the kernel does not give.
        expected[6] &= !u8::try_from(flag::ACK).unwrap();
        assert_eq!(Request::devices().encode(sequence), expected);
    }

    #[test]
    fn a_refusal_carries_the_kernels_reason() {
        // Linux 6.1 to the move of a device that cannot be moved: EOPNOTSUPP, capped.
        let mut payload = (-95_i32).to_ne_bytes().to_vec();
        payload.extend(framed(0x1402, 5, 4, &[])); // the request's header alone
        let datagram = framed(ERROR, flag::CAPPED, 4, &payload);
        assert_eq!(
            parts(&datagram, 4),
            Ok(vec![Part::Refused {
                errno: libc::EOPNOTSUPP,
                message: None
            }])
        );

        let text = b"no such namespace\0";
        payload.extend(u16::try_from(4 + text.len()).unwrap().to_ne_bytes());
        payload.extend(ERROR_MESSAGE.to_ne_bytes());
        payload.extend(text);
        let datagram = framed(ERROR, flag::CAPPED | flag::ACK_TLVS, 4, &payload);
        let message = Some("no such namespace".to_owned());
        assert_eq!(
            parts(&datagram, 4),
            Ok(vec![Part::Refused {
                errno: libc::EOPNOTSUPP,
                message
            }])
        );
    }

    #[test]
    fn answers_to_other_requests_are_skipped() {
        let mut datagram = framed(CLIENT | 6, 0, 1, &[1, 2, 3, 4]);
        datagram.extend(framed(ERROR, 0, 2, &0_i32.to_ne_bytes()));
        assert_eq!(parts(&datagram, 2), Ok(vec![Part::Acknowledged]));
    }

    #[test]
    fn a_dump_that_fails_on_the_way_is_a_refusal() {
        let datagram = framed(DONE, 2, 1, &(-12_i32).to_ne_bytes());
        assert_eq!(
            parts(&datagram, 1),
            Ok(vec![Part::Refused {
                errno: libc::ENOMEM,
                message: None
            }])
        );
    }
}
