//! A process of a pod that answers in the kernel's place: it sends forged netlink messages to every
//! socket of its network namespace, and to those that will be opened next.
//!
//! `netlink-sprayer FORGERY...` where a forgery is `done`, `ack`, `refusal`, `flood`, or
//! `links REAL DECOY`, which lists DECOY with all that the kernel says of REAL. The process needs
//! `CAP_NET_ADMIN` over its network namespace and no right on the host. It prints `ready`, and ends
//! with the process that started it.

#![expect(
    clippy::print_stdout,
    reason = "its caller waits for the word on standard output"
)]

use std::io::Write;
use std::{env, fs};

use anyhow::{Context, Result, bail};
use e2e::raw_netlink::{Netlink, attributes, four, message};
use nix::errno::Errno;
use nix::sys::socket::SockProtocol;
use nix::unistd::getppid;

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_MULTI: u16 = 2;
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const IFLA_IFNAME: u16 = 3;
const LINK_HEADER_BYTES: usize = 16;
/// A socket's requests have the sequence numbers from 1.
const SEQUENCES: std::ops::RangeInclusive<u32> = 1..=40;
/// How many processes that are started next are guessed: the kernel names a socket by its process.
const GUESSED: u32 = 6;
/// By number in `/proc/net/netlink`: route, netfilter, generic, RDMA.
const PROTOCOLS: [(u32, SockProtocol); 4] = [
    (0, SockProtocol::NetlinkRoute),
    (12, SockProtocol::NetlinkNetFilter),
    (16, SockProtocol::NetlinkGeneric),
    (20, SockProtocol::NetlinkRDMA),
];

enum Forgery {
    Done,
    Ack,
    Refusal,
    Flood,
    Links { real: String, decoy: String },
}

fn main() -> Result<()> {
    let mut arguments = env::args().skip(1);
    let mut forgeries = Vec::new();
    while let Some(word) = arguments.next() {
        let mut name = || arguments.next().context("links REAL DECOY");
        forgeries.push(match word.as_str() {
            "done" => Forgery::Done,
            "ack" => Forgery::Ack,
            "refusal" => Forgery::Refusal,
            "flood" => Forgery::Flood,
            "links" => Forgery::Links {
                real: name()?,
                decoy: name()?,
            },
            other => bail!("no forgery {other}"),
        });
    }
    let sockets: Vec<(u32, Netlink)> = PROTOCOLS
        .into_iter()
        .filter_map(|(number, protocol)| Some((number, Netlink::open(protocol).ok()?)))
        .collect();
    let own: Vec<u32> = sockets
        .iter()
        .map(|(_, socket)| socket.port())
        .collect::<Result<_>>()?;
    let reader = Netlink::open(SockProtocol::NetlinkRoute)?;
    let own = [own, vec![reader.port()?]].concat();
    println!("ready");
    std::io::stdout().flush()?;
    let parent = getppid();
    while getppid() == parent {
        for forgery in &forgeries {
            let Some(forged) = forgery.message(&reader)? else {
                continue;
            };
            let open = fs::read_to_string("/proc/net/netlink")?;
            let open = open
                .lines()
                .filter_map(socket_of)
                .filter(|(_, port)| !own.contains(port));
            let last: u32 = fs::read_to_string("/proc/loadavg")?
                .split_whitespace()
                .last()
                .and_then(|last| last.parse().ok())
                .context("no last process in /proc/loadavg")?;
            let next = (last.saturating_sub(1)..=last + GUESSED).map(|port| (0, port));
            for (protocol, port) in open.chain(next) {
                let from = sockets.iter().find(|(number, _)| *number == protocol);
                if let Some((_, socket)) = from {
                    // Most ports are nobody's.
                    let _ = socket.send_to(port, &forged);
                }
            }
        }
    }
    Ok(())
}

/// Protocol and port of a line of `/proc/net/netlink`; none for the kernel's own.
fn socket_of(line: &str) -> Option<(u32, u32)> {
    let mut fields = line.split_whitespace().skip(1);
    let (protocol, port) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    (port != 0).then_some((protocol, port))
}

impl Forgery {
    /// One datagram for all sequence numbers; none where there is nothing to forge yet.
    fn message(&self, reader: &Netlink) -> Result<Option<Vec<u8>>> {
        let status = |kind, flags, errno: i32| -> Result<Vec<u8>> {
            let body = [errno.to_ne_bytes().as_slice(), &[0; 16]].concat();
            let all = SEQUENCES.map(|sequence| message(kind, flags, sequence, &body));
            Ok(all.collect::<Result<Vec<_>>>()?.concat())
        };
        Ok(Some(match self {
            Self::Done => status(NLMSG_DONE, NLM_F_MULTI, 0)?,
            Self::Ack => status(NLMSG_ERROR, 0, 0)?,
            Self::Refusal => status(NLMSG_ERROR, 0, -(Errno::EPERM as i32))?,
            // As much as a socket takes at once.
            Self::Flood => vec![0; 100_000],
            Self::Links { real, decoy } => {
                let links = reader.dump(RTM_GETLINK, &[0; LINK_HEADER_BYTES])?;
                let (Some(real), Some(decoy)) = (named(&links, real)?, named(&links, decoy)?)
                else {
                    return Ok(None);
                };
                let mut listed = real.clone();
                listed.splice(4..8, four(decoy, 4)?);
                let mut all = Vec::new();
                for sequence in SEQUENCES {
                    all.extend(message(RTM_NEWLINK, NLM_F_MULTI, sequence, &listed)?);
                    all.extend(message(NLMSG_DONE, NLM_F_MULTI, sequence, &[0; 4])?);
                }
                all
            }
        }))
    }
}

/// The link of this name.
fn named<'a>(links: &'a [Vec<u8>], name: &str) -> Result<Option<&'a Vec<u8>>> {
    for link in links {
        for (kind, value) in attributes(link.get(LINK_HEADER_BYTES..).unwrap_or_default())? {
            if kind == IFLA_IFNAME && value.strip_suffix(&[0]) == Some(name.as_bytes()) {
                return Ok(Some(link));
            }
        }
    }
    Ok(None)
}
