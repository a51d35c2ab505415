//! The numbers by which one network namespace knows another (`nsid`).

use netlink_packet_core::Parseable;
use netlink_packet_route::nsid::{NsidAttribute, NsidMessage};

use crate::{Error, Namespace, Result, Socket, socket::on_errno};

const RTM_NEWNSID: u16 = 88;
const RTM_GETNSID: u16 = 90;

/// The number by which the socket's namespace knows another one; none when it has none.
pub fn known_number(socket: &mut Socket, other: &Namespace) -> Result<Option<i32>> {
    let what = format_args!("ask for the number of namespace {}", other.path().display());
    socket.get(what, RTM_GETNSID, &number_of(other, None), |payload| {
        let attributes = NsidMessage::parse(payload)?.attributes.into_iter();
        let number = |attribute| match attribute {
            NsidAttribute::Id(id) if id >= 0 => Some(id),
            _ => None,
        };
        Ok(attributes.filter_map(number).next())
    })
}

/// The number by which the socket's namespace knows another one; made when there is none.
pub fn namespace_number(socket: &mut Socket, other: &Namespace) -> Result<i32> {
    if let Some(number) = known_number(socket, other)? {
        return Ok(number);
    }
    let what = format_args!("number namespace {}", other.path().display());
    let any = Some(NsidAttribute::Id(-1));
    let assigned = socket.request(what, RTM_NEWNSID, 0, &number_of(other, any));
    // Another attachment of the pod was quicker.
    on_errno(assigned, &[libc::EEXIST], ())?;
    let missing = || Error::answer(what, "it has no number although it was given one");
    known_number(socket, other)?.ok_or_else(missing)
}

fn number_of(other: &Namespace, number: Option<NsidAttribute>) -> NsidMessage {
    let mut message = NsidMessage::default();
    let descriptor = other.fd().cast_unsigned();
    message.attributes.push(NsidAttribute::Fd(descriptor));
    message.attributes.extend(number);
    message
}
