//! Queueing disciplines, as far as it takes to know whether an administrator set any.

use netlink_packet_core::NLM_F_ECHO;
use netlink_packet_route::tc::{TcAttribute, TcHandle, TcMessage};

use super::{
    Result, Socket,
    socket::{self, on_errno},
};

/// `sizeof(struct tcmsg)`
const HEADER_BYTES: usize = 20;
const RTM_GETQDISC: u16 = 38;

/// The queueing disciplines of a link that somebody set, by kind.
#[derive(Debug, Default)]
pub struct Qdiscs {
    /// The kernel's own choices have no handle and are left out.
    pub root: Option<String>,
    /// `ingress` or `clsact`.
    pub ingress: Option<String>,
}

pub fn get(socket: &mut Socket, link: u32) -> Result<Qdiscs> {
    let root = read(socket, link, TcHandle::ROOT)?;
    Ok(Qdiscs {
        root: root
            .filter(|root| root.header.handle != TcHandle::UNSPEC)
            .map(kind),
        ingress: read(socket, link, TcHandle::INGRESS)?.map(kind),
    })
}

fn kind(qdisc: TcMessage) -> String {
    let mut attributes = qdisc.attributes.into_iter();
    let kind = attributes.find_map(|attribute| match attribute {
        TcAttribute::Kind(kind) => Some(kind),
        _ => None,
    });
    kind.unwrap_or_default()
}

fn read(netlink: &mut Socket, link: u32, parent: TcHandle) -> Result<Option<TcMessage>> {
    let mut message = TcMessage::with_index(link.cast_signed());
    message.header.parent = parent;
    let what = format_args!("read queueing disciplines of netdev {link}");
    // The answer is a notification, of which the asker has no part without the flag
    // (`qdisc_get_notify()`).
    let asked = netlink.ask(what, RTM_GETQDISC, NLM_F_ECHO, &message, |payload| {
        socket::parse_leniently::<TcMessage>(payload, HEADER_BYTES)
    });
    // There is none; a kernel without traffic control.
    on_errno(asked, &[libc::ENOENT, libc::EOPNOTSUPP], None)
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::RouteNetlinkMessage;

    use super::*;
    use crate::fake::Kernel;

    #[test]
    fn a_qdisc_that_an_administrator_set_is_named() {
        let kernel = Kernel::default();
        let host = kernel.namespace("host");
        let mut socket = host.socket(&host).unwrap();
        let add = |link: i32, parent: TcHandle, major: u16, kind: &str| {
            let mut message = TcMessage::with_index(link);
            message.header.parent = parent;
            message.header.handle = TcHandle { major, minor: 0 };
            message.attributes = vec![TcAttribute::Kind(kind.into())];
            kernel.add("host", &RouteNetlinkMessage::NewQueueDiscipline(message));
        };
        add(2, TcHandle::ROOT, 0, "mq");
        add(3, TcHandle::ROOT, 1, "htb");
        add(3, TcHandle::INGRESS, 0xffff, "clsact");
        let set = |socket: &mut Socket, link| {
            let found = get(socket, link).unwrap();
            (found.root, found.ingress)
        };
        assert_eq!(set(&mut socket, 2), (None, None));
        let expected = (Some("htb".into()), Some("clsact".into()));
        assert_eq!(set(&mut socket, 3), expected);
    }
}
