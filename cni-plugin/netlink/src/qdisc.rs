//! Queueing disciplines, as far as it takes to know whether an administrator set any.

use netlink_packet_core::NLM_F_ECHO;

use super::{
    Name, Result, Socket,
    attribute::{self, Raw},
};

const RTM_GETQDISC: u16 = 38;
/// `sizeof(struct tcmsg)`, and where index, handle and parent begin in it.
const HEADER_BYTES: usize = 20;
const INDEX: usize = 4;
const HANDLE: usize = 8;
const PARENT: usize = 12;
/// `TC_H_ROOT`, `TC_H_INGRESS` (`include/uapi/linux/pkt_sched.h`)
const ROOT: u32 = 0xffff_ffff;
const INGRESS: u32 = 0xffff_fff1;
const TCA_KIND: u16 = 1;

/// The queueing disciplines of a link that somebody set: the root one (the kernel's own choices have
/// no handle), and `ingress` or `clsact`, by kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Qdiscs {
    pub root: Option<String>,
    /// `ingress` or `clsact`.
    pub ingress: Option<String>,
}

pub fn get(socket: &mut Socket, link: u32) -> Result<Qdiscs> {
    Ok(Qdiscs {
        root: one(socket, link, ROOT)?
            .filter(|(handle, _)| *handle != 0)
            .map(|(_, kind)| kind),
        ingress: one(socket, link, INGRESS)?.map(|(_, kind)| kind),
    })
}

fn one(socket: &mut Socket, link: u32, parent: u32) -> Result<Option<(u32, String)>> {
    let mut header = [0; HEADER_BYTES];
    for (at, value) in [(INDEX, link), (PARENT, parent)] {
        attribute::put(&mut header, at, &value.to_ne_bytes());
    }
    let mut found = None;
    // The answer is a notification, of which the asker has no part without the flag
    // (`qdisc_get_notify()`).
    let what = format!("read queueing disciplines of netdev {link}");
    let asked = socket.ask(
        what,
        RTM_GETQDISC,
        NLM_F_ECHO,
        &Raw::new(&header),
        |payload| {
            let handle = attribute::word(payload, HANDLE);
            attribute::each(
                payload.get(HEADER_BYTES..).unwrap_or_default(),
                |kind, value| {
                    if kind == TCA_KIND {
                        found = Some((handle, Name::of_attribute(value).to_string()));
                    }
                },
            );
            Ok(())
        },
    );
    match asked {
        Ok(()) => Ok(found),
        // There is none; a kernel without traffic control.
        Err(e) if e.is(libc::ENOENT) || e.is(libc::EOPNOTSUPP) => Ok(None),
        Err(e) => Err(e),
    }
}
