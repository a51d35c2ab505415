//! The numbers by which one network namespace knows another (`nsid`).

use netlink_packet_core::Parseable;
use netlink_packet_route::nsid::{NsidAttribute, NsidMessage};

use crate::{Error, Namespace, Result, Socket};

const RTM_NEWNSID: u16 = 88;
const RTM_GETNSID: u16 = 90;

/// The number by which the socket's namespace knows another one; none when it has none.
pub fn known_number(socket: &mut Socket, other: &Namespace) -> Result<Option<i32>> {
    ask_number(socket, &number_of(other), other)
}

/// The number by which the socket's namespace knows another one; made when there is none.
pub fn namespace_number(socket: &mut Socket, other: &Namespace) -> Result<i32> {
    let message = number_of(other);
    if let Some(number) = ask_number(socket, &message, other)? {
        return Ok(number);
    }
    let mut assign = message.clone();
    assign.attributes.push(NsidAttribute::Id(-1));
    let what = format_args!("number namespace {}", other.path().display()).to_string();
    match socket.request(&what, RTM_NEWNSID, 0, &assign) {
        // Another attachment of the pod was quicker.
        Err(e) if e.is(libc::EEXIST) => {}
        done => done?,
    }
    ask_number(socket, &message, other)?.ok_or(Error::Answer {
        what,
        cause: "it has no number although it was given one".into(),
    })
}

fn number_of(other: &Namespace) -> NsidMessage {
    let mut message = NsidMessage::default();
    let descriptor = other.fd().cast_unsigned();
    message.attributes.push(NsidAttribute::Fd(descriptor));
    message
}

fn ask_number(
    socket: &mut Socket,
    message: &NsidMessage,
    other: &Namespace,
) -> Result<Option<i32>> {
    let what = format_args!("ask for the number of namespace {}", other.path().display());
    socket.get(what, RTM_GETNSID, message, |payload| {
        let attributes = NsidMessage::parse(payload)?.attributes.into_iter();
        let number = |attribute| match attribute {
            NsidAttribute::Id(id) if id >= 0 => Some(id),
            _ => None,
        };
        Ok(attributes.filter_map(number).next())
    })
}
