//! One blocking netlink exchange, with the kernel's own text on refusal.

use std::{
    fmt, io,
    ops::ControlFlow,
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use hca::KernelSocket;
use netlink_packet_core::{
    DecodeError, Emitable, NLM_F_ACK, NLM_F_ACK_TLVS, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST,
    NetlinkBuffer, NlasIterator, Parseable,
};
use netlink_sys::protocols::{NETLINK_RDMA, NETLINK_ROUTE};

use super::attribute;

/// `NLMSG_ERROR`: an acknowledgement, or a refusal.
const ERROR: u16 = 2;
/// `NLMSG_DONE`: the end of a dump.
const DONE: u16 = 3;
/// `NLMSGERR_ATTR_MSG`: the extended acknowledgement's text.
const ATTR_MSG: u16 = 1;
/// Bytes of a netlink header.
const HEADER: usize = 16;
/// What the kernel says when it lacks memory for a moment; the request is then not done.
const PASSING: [i32; 3] = [libc::ENOBUFS, libc::ENOMEM, libc::EAGAIN];
/// How long it is given before it is asked once more.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// How often a dump that a concurrent change made inconsistent is asked for again.
const DUMP_ATTEMPTS: u32 = 8;

/// Why a request to the kernel failed: what was attempted on which object, and what the kernel said.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {}{}", plain(.cause), in_parentheses(.message))]
pub struct Error {
    what: String,
    /// Without an errno where an answer was lost or not understood: the request may have been served.
    cause: io::Error,
    /// The kernel's text beside the errno.
    message: Option<String>,
}

/// Of everything in this room.
pub type Result<T> = std::result::Result<T, Error>;

/// What an answer says, or why it cannot be read.
type Parsed<T> = std::result::Result<T, DecodeError>;

impl Error {
    /// A system call that failed.
    pub fn call(what: impl fmt::Display, cause: impl Into<io::Error>) -> Self {
        Error {
            what: what.to_string(),
            cause: cause.into(),
            message: None,
        }
    }

    /// The errno, where there is one.
    pub fn errno(&self) -> Option<i32> {
        self.cause.raw_os_error()
    }

    /// Whether the kernel answered with this errno.
    pub fn is(&self, errno: i32) -> bool {
        self.errno() == Some(errno)
    }

    /// Of an answer that was lost, or is not understood.
    pub(crate) fn answer(what: impl fmt::Display, cause: impl fmt::Display) -> Self {
        let cause = format!("the kernel's answer cannot be read: {cause}");
        Error::call(what, io::Error::other(cause))
    }
}

/// The answer; `instead` for a refusal with one of these errnos, which says the same.
pub fn on_errno<T>(answer: Result<T>, errnos: &[i32], instead: T) -> Result<T> {
    match answer {
        Err(e) if e.errno().is_some_and(|errno| errnos.contains(&errno)) => Ok(instead),
        answer => answer,
    }
}

/// The errno's text without Rust's "(os error N)".
fn plain(cause: &io::Error) -> String {
    let text = cause.to_string();
    match text.split_once(" (os error") {
        Some((text, _)) => text.to_lowercase(),
        None => text,
    }
}

fn in_parentheses(text: &Option<String>) -> String {
    let shown = text.as_ref().map(|text| format!(" (kernel: {text})"));
    shown.unwrap_or_default()
}

/// What is called with a line for the debug log.
type Observer = Box<dyn Fn(&dyn fmt::Display) + Send + Sync>;

static OBSERVER: OnceLock<Observer> = OnceLock::new();

/// Has `observer` called with each request of this process, and how long it took. The first observer
/// stays; without one nothing is measured or formatted.
pub fn observe(observer: impl Fn(&dyn fmt::Display) + Send + Sync + 'static) {
    let _ = OBSERVER.set(Box::new(observer));
}

/// The observer, for what else takes time in this process.
pub fn observer() -> Option<&'static Observer> {
    OBSERVER.get()
}

/// Who answers requests: the kernel, or in tests the fake of one.
pub trait Peer: fmt::Debug + Send + Sync {
    fn send(&self, request: &[u8]) -> io::Result<()>;

    /// Receives the next answers, in place of what is in `buffer`.
    fn receive(&self, buffer: &mut Vec<u8>) -> io::Result<()>;

    /// One more route socket of the same namespace, which the thread must be in.
    fn another(&self) -> io::Result<Box<dyn Peer>>;
}

impl Peer for KernelSocket {
    fn send(&self, request: &[u8]) -> io::Result<()> {
        netlink_sys::Socket::send(self, request, 0).map(drop)
    }

    fn receive(&self, buffer: &mut Vec<u8>) -> io::Result<()> {
        KernelSocket::receive(self, buffer)
    }

    fn another(&self) -> io::Result<Box<dyn Peer>> {
        kernel(NETLINK_ROUTE)
    }
}

/// A socket of the namespace that the thread is in.
fn kernel(protocol: isize) -> io::Result<Box<dyn Peer>> {
    let socket = KernelSocket::open(protocol, 0)?;
    // Dumps honour their filter (kernel 4.20) instead of passing over what they do not know.
    socket.set_netlink_get_strict_chk(true)?;
    Ok(Box::new(socket))
}

/// A netlink socket of one namespace.
#[derive(Debug)]
pub struct Socket {
    peer: Box<dyn Peer>,
    /// For dumps that are not read to the end.
    spare: Option<Box<Socket>>,
    sequence: u32,
    received: Vec<u8>,
}

impl Socket {
    /// Opens a socket in the namespace the thread is in.
    pub fn open() -> Result<Self> {
        let peer = kernel(NETLINK_ROUTE);
        peer.map(Socket::to)
            .map_err(|e| Error::call("open a route netlink socket", e))
    }

    /// Opens a socket for RDMA netlink in the namespace the thread is in; none without an RDMA stack.
    pub fn open_rdma() -> Result<Option<Self>> {
        match kernel(NETLINK_RDMA) {
            Err(e) if e.raw_os_error() == Some(libc::EPROTONOSUPPORT) => Ok(None),
            Err(e) => Err(Error::call("open an RDMA netlink socket", e)),
            Ok(peer) => Ok(Some(Socket::to(peer))),
        }
    }

    pub fn to(peer: Box<dyn Peer>) -> Self {
        Socket {
            peer,
            spare: None,
            sequence: 0,
            received: Vec::new(),
        }
    }

    /// Sends a request and waits until it is acknowledged.
    ///
    /// `what` names the attempt and its object, for the error. A refusal for want of memory is
    /// answered with the same request, once.
    pub fn request(
        &mut self,
        what: impl fmt::Display,
        kind: u16,
        flags: u16,
        body: &impl Emitable,
    ) -> Result<()> {
        self.ask(what, kind, flags, body, |_| Ok(())).map(drop)
    }

    /// The same, with the message that comes before the acknowledgement, if one does.
    pub fn ask<T>(
        &mut self,
        what: impl fmt::Display,
        kind: u16,
        flags: u16,
        body: &impl Emitable,
        parse: impl Fn(&[u8]) -> Parsed<T>,
    ) -> Result<Option<T>> {
        repeat(&what, || {
            let mut object = None;
            let done = self.exchange(&what, kind, flags | NLM_F_ACK, body, &mut |payload| {
                object = Some(parse(payload)?);
                Ok(ControlFlow::Continue(()))
            })?;
            Ok(done.map(|()| object))
        })
    }

    /// Asks for one object. The kernel answers with it or with a refusal; an acknowledgement as well
    /// would be one more message to wait for.
    pub fn get<T>(
        &mut self,
        what: impl fmt::Display,
        kind: u16,
        body: &impl Emitable,
        parse: impl Fn(&[u8]) -> Parsed<T>,
    ) -> Result<T> {
        repeat(&what, || {
            let mut object = None;
            self.exchange(&what, kind, 0, body, &mut |payload| {
                object = Some(parse(payload)?);
                Ok(ControlFlow::Break(()))
            })?;
            let missing = || Error::answer(&what, "it has no object");
            object.ok_or_else(missing).map(Some)
        })
    }

    /// Asks for all objects that match `body`. One that `parse` does not understand is passed over:
    /// it may be of anybody's making, a pod's too, and must not hide the others.
    pub fn dump<T>(
        &mut self,
        what: impl fmt::Display,
        kind: u16,
        body: &impl Emitable,
        parse: impl Fn(&[u8]) -> Parsed<Option<T>>,
    ) -> Result<Vec<T>> {
        repeat(&what, || {
            let mut list = Vec::new();
            let read = self.exchange(&what, kind, NLM_F_DUMP, body, &mut |payload| {
                list.extend(parse(payload).ok().flatten());
                Ok(ControlFlow::Continue(()))
            })?;
            Ok(read.map(|()| list))
        })
    }

    /// Asks for the first objects that match `body`, up to the one that `parse` has no use for. The
    /// kernel keeps the rest ready for the socket, which is then of no use any more: so the dump has
    /// another one, in the namespace that the thread is in.
    pub fn dump_start<T>(
        &mut self,
        what: impl fmt::Display,
        kind: u16,
        body: &impl Emitable,
        parse: impl Fn(&[u8]) -> Parsed<Option<T>>,
    ) -> Result<Vec<T>> {
        repeat(&what, || {
            let mut socket = match self.spare.take() {
                Some(socket) => socket,
                None => {
                    let another = self.peer.another().map_err(|e| Error::call(&what, e))?;
                    Box::new(Socket::to(another))
                }
            };
            let (mut list, mut is_complete) = (Vec::new(), true);
            let asked = socket.exchange(&what, kind, NLM_F_DUMP, body, &mut |payload| {
                let object = parse(payload)?;
                is_complete = object.is_some();
                list.extend(object);
                Ok(match is_complete {
                    true => ControlFlow::Continue(()),
                    false => ControlFlow::Break(()),
                })
            });
            if is_complete && !matches!(&asked, Err(e) if e.errno().is_none()) {
                self.spare = Some(socket);
            }
            Ok(asked?.map(|()| list))
        })
    }

    /// None when a change interrupted a dump.
    fn exchange(
        &mut self,
        what: &dyn fmt::Display,
        kind: u16,
        flags: u16,
        body: &impl Emitable,
        each: &mut dyn FnMut(&[u8]) -> Parsed<ControlFlow<()>>,
    ) -> Result<Option<()>> {
        let unread = |error: DecodeError| Error::answer(what, error);
        self.sequence = self.sequence.wrapping_add(1);
        let sent = self.send(kind, flags, body);
        sent.map_err(|e| Error::call(what, e))?;
        let mut interrupted = false;
        loop {
            let received = self.peer.receive(&mut self.received);
            received.map_err(|e| Error::answer(what, plain(&e)))?;
            let mut rest = self.received.as_slice();
            while !rest.is_empty() {
                let message = NetlinkBuffer::new_checked(rest).map_err(unread)?;
                let length = usize::try_from(message.length()).unwrap_or(usize::MAX);
                if length < HEADER {
                    return Err(Error::answer(what, "message shorter than its header"));
                }
                rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
                if message.sequence_number() != self.sequence {
                    continue;
                }
                interrupted |= message.flags() & NLM_F_DUMP_INTR != 0;
                let (payload, flags) = (message.payload(), message.flags());
                match message.message_type() {
                    ERROR => return verdict(what, payload, flags, HEADER).map(Some),
                    DONE if interrupted => return Ok(None),
                    DONE => return verdict(what, payload, flags, 0).map(Some),
                    _ if each(payload).map_err(unread)?.is_continue() => {}
                    _ => return Ok((!interrupted).then_some(())),
                }
            }
        }
    }

    fn send(&self, kind: u16, flags: u16, body: &impl Emitable) -> io::Result<()> {
        let length = HEADER + body.buffer_len();
        let mut message = vec![0; length];
        let mut header = NetlinkBuffer::new(message.as_mut_slice());
        header.set_length(u32::try_from(length).map_err(|_| io::ErrorKind::InvalidInput)?);
        header.set_message_type(kind);
        header.set_flags(flags | NLM_F_REQUEST);
        header.set_sequence_number(self.sequence);
        body.emit(header.payload_mut());
        self.peer.send(&message)
    }
}

/// Asks until no change came between, and once more where the kernel lacked memory; shows it to the
/// observer.
fn repeat<T>(what: &dyn fmt::Display, mut ask: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let started = OBSERVER.get().map(|observer| (observer, Instant::now()));
    let (mut answer, mut again) = (Ok(None), false);
    for _ in 0..DUMP_ATTEMPTS {
        answer = ask();
        match &answer {
            Ok(None) => {}
            Err(error) if PASSING.iter().any(|errno| error.is(*errno)) && !again => {
                again = true;
                thread::sleep(RETRY_INTERVAL);
            }
            _ => break,
        }
    }
    let changed = format_args!("it changed during each of {DUMP_ATTEMPTS} readings");
    let answer = answer.and_then(|read| read.ok_or_else(|| Error::answer(what, changed)));
    let Some((observer, started)) = started else {
        return answer;
    };
    let micros = started.elapsed().as_micros();
    match &answer {
        Ok(_) => observer(&format_args!("{what}: ok, {micros} µs")),
        // It names the attempt itself.
        Err(error) => match error.errno() {
            Some(errno) => observer(&format_args!("{error}, errno {errno}, {micros} µs")),
            None => observer(&format_args!("{error}, {micros} µs")),
        },
    }
    answer
}

/// Reads a message of a header of `header` bytes and attributes, leaving out those attributes that
/// cannot be read: names that are no text, and whatever a newer kernel says in another form.
///
/// # Errors
/// The header cannot be read.
pub fn parse_leniently<T: Parseable<[u8]>>(payload: &[u8], header: usize) -> Parsed<T> {
    T::parse(payload).or_else(|error| {
        let (head, attributes) = payload.split_at_checked(header).ok_or(error)?;
        let mut readable = head.to_vec();
        for attribute in NlasIterator::new(attributes).map_while(std::result::Result::ok) {
            let length = usize::from(attribute.length());
            let mut alone = head.to_vec();
            alone.extend_from_slice(attribute.into_inner().get(..length).unwrap_or_default());
            alone.resize(alone.len().next_multiple_of(4), 0);
            if T::parse(&alone).is_ok() {
                readable.extend_from_slice(alone.get(header..).unwrap_or_default());
            }
        }
        T::parse(&readable)
    })
}

/// Reads the status of a request, or at the end of a dump. Behind it stand `between` bytes and then
/// attributes: in `struct nlmsgerr` the request's header (its body was waived), at the end of a dump
/// nothing (`netlink_dump_done()`).
fn verdict(what: &dyn fmt::Display, payload: &[u8], flags: u16, between: usize) -> Result<()> {
    let Some(status) = payload.first_chunk() else {
        return Err(Error::answer(what, "acknowledgement without a status"));
    };
    let status = i32::from_ne_bytes(*status);
    if status == 0 {
        return Ok(());
    }
    let attributes = payload
        .get(4 + between..)
        .filter(|_| flags & NLM_F_ACK_TLVS != 0);
    let mut message = None;
    attribute::each(attributes.unwrap_or_default(), |kind, value| {
        if kind == ATTR_MSG {
            let text = String::from_utf8_lossy(value);
            message = Some(text.trim_end_matches('\0').to_owned());
        }
    });
    let (what, cause) = (what.to_string(), io::Error::from_raw_os_error(-status));
    Err(Error {
        what,
        cause,
        message,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_carries_the_kernels_text() {
        // Captured on 6.18: RTM_NEWLINK of a macvlan on a bridge port.
        let mut payload = (-16i32).to_ne_bytes().to_vec();
        payload.extend([0; HEADER]);
        payload.extend([12, 0, 1, 0]);
        payload.extend(b"in use\0\0");
        let what = "create net1 on eth1";
        let error = verdict(&what, &payload, NLM_F_ACK_TLVS, HEADER).unwrap_err();
        assert!(error.is(libc::EBUSY));
        let text = error.to_string();
        assert!(text.starts_with("create net1 on eth1: "), "{text}");
        assert!(
            text.ends_with("(kernel: in use)") && !text.contains("os error"),
            "{text}"
        );
        assert!(verdict(&what, &0i32.to_ne_bytes(), 0, HEADER).is_ok());
    }

    #[test]
    fn a_refused_dump_carries_the_kernels_text() {
        // A dump of routes of a table that is not there.
        let mut payload = (-2i32).to_ne_bytes().to_vec();
        payload.extend([34, 0, 1, 0]);
        payload.extend(b"ipv4: FIB table does not exist\0\0");
        let error = verdict(&"list routes", &payload, NLM_F_ACK_TLVS, 0).unwrap_err();
        assert!(error.is(libc::ENOENT));
        let text = error.to_string();
        assert!(
            text.ends_with("(kernel: ipv4: FIB table does not exist)"),
            "{text}"
        );
    }
}
