//! A blocking RDMA netlink socket: one request, its answer.
//!
//! The kernel works a request off inside `send` and a dump inside `recv`, so an answer is there
//! when it is asked for; the deadline only keeps a broken kernel from hanging a pod's start.

use std::io;
use std::os::fd::AsFd;

use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::KernelSocket;
use crate::nldev::NetnsMode;
use crate::nldev::codec::{self, Device, Malformed, Node, Part, Request};

/// `NETLINK_RDMA`.
const PROTOCOL: isize = 20;
/// Seconds to wait for an answer.
const ANSWER_TIMEOUT_SECONDS: i64 = 5;

/// Why the kernel gave no usable answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The RDMA stack is not loaded.
    #[error("open an RDMA netlink socket: the kernel has no RDMA stack loaded (ib_core)")]
    NotLoaded,
    /// The socket could not be opened or used.
    #[error("{attempt}: {source}")]
    Io {
        /// What was attempted.
        attempt: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel refused the request.
    #[error("{attempt}: kernel: {}{}", io::Error::from_raw_os_error(*errno), explanation(message))]
    Refused {
        /// What was attempted.
        attempt: String,
        /// The error number.
        errno: i32,
        /// The kernel's explanation, if it gave one.
        message: Option<String>,
    },
    /// The answer is not of the form this program knows.
    #[error("{attempt}: the kernel's answer is not understood: {source}")]
    Malformed {
        /// What was attempted.
        attempt: String,
        /// What is wrong with it.
        source: Malformed,
    },
    /// There is no such RDMA device in the socket's network namespace.
    #[error("RDMA device {name} does not exist in this network namespace")]
    Missing {
        /// Its name.
        name: String,
    },
}

fn explanation(message: &Option<String>) -> String {
    message
        .as_ref()
        .map(|text| format!(" ({text})"))
        .unwrap_or_default()
}

/// A socket of the network namespace its thread was in when it was opened.
#[derive(Debug)]
pub struct Nldev {
    socket: KernelSocket,
    sequence: u32,
    received: Vec<u8>,
}

impl Nldev {
    /// Opens a socket.
    ///
    /// # Errors
    /// [`Error::NotLoaded`] without an RDMA stack; [`Error::Io`] if the process has no
    /// descriptors left.
    pub fn open() -> Result<Self, Error> {
        let failed = |source: io::Error| match source.raw_os_error() {
            Some(libc::EPROTONOSUPPORT) => Error::NotLoaded,
            _ => Error::Io {
                attempt: "open an RDMA netlink socket",
                source,
            },
        };
        let socket = KernelSocket::open(PROTOCOL, 0).map_err(failed)?;
        let deadline = TimeVal::seconds(ANSWER_TIMEOUT_SECONDS);
        setsockopt(&socket.as_fd(), sockopt::ReceiveTimeout, &deadline)
            .map_err(|errno| failed(errno.into()))?;
        Ok(Self {
            socket,
            sequence: 0,
            received: Vec::new(),
        })
    }

    /// How the subsystem treats namespaces.
    ///
    /// # Errors
    /// As [`Nldev::exchange`].
    pub fn netns_mode(&mut self) -> Result<NetnsMode, Error> {
        self.one(
            "read the netns mode of the RDMA subsystem",
            &Request::system(),
            codec::netns_mode,
        )
    }

    /// All devices of the socket's namespace.
    ///
    /// # Errors
    /// As [`Nldev::exchange`].
    pub fn devices(&mut self) -> Result<Vec<Device>, Error> {
        let attempt = "list RDMA devices";
        self.exchange(attempt, &Request::devices())?
            .iter()
            .map(|payload| Device::decode(payload).map_err(|e| malformed(attempt, e)))
            .collect()
    }

    /// The device of this name.
    ///
    /// # Errors
    /// [`Error::Missing`] if the socket's namespace has none; else as [`Nldev::exchange`].
    pub fn device(&mut self, name: &str) -> Result<Device, Error> {
        // The kernel finds devices by index only.
        let found = self
            .devices()?
            .into_iter()
            .find(|device| device.name == name);
        found.ok_or_else(|| Error::Missing {
            name: name.to_owned(),
        })
    }

    /// The verbs node that a device has now. After a move it can be another than before.
    ///
    /// # Errors
    /// As [`Nldev::exchange`].
    pub fn char_device(&mut self, device: &Device) -> Result<Node, Error> {
        let attempt = format!("find the verbs node of RDMA device {}", device.name);
        self.one(&attempt, &Request::uverbs(device.index), Node::decode)
    }

    fn one<T>(
        &mut self,
        attempt: &str,
        request: &Request,
        decode: impl Fn(&[u8]) -> Result<T, Malformed>,
    ) -> Result<T, Error> {
        let payloads = self.exchange(attempt, request)?;
        let payload = payloads.first().map_or(&[][..], Vec::as_slice);
        decode(payload).map_err(|e| malformed(attempt, e))
    }

    /// Sends a request and gathers the payloads of its answer; none for an acknowledgement.
    ///
    /// # Errors
    /// [`Error::Refused`] with the kernel's text, [`Error::Io`] if the socket fails or no answer
    /// comes, [`Error::Malformed`] if the answer cannot be split.
    pub fn exchange(&mut self, attempt: &str, request: &Request) -> Result<Vec<Vec<u8>>, Error> {
        self.sequence = self.sequence.wrapping_add(1);
        self.socket
            .send(&request.encode(self.sequence), 0)
            .map_err(|source| Error::Io {
                attempt: "send an RDMA netlink request",
                source,
            })?;
        let mut payloads = Vec::new();
        loop {
            let received = self.socket.receive(&mut self.received);
            received.map_err(|source| Error::Io {
                attempt: "receive an RDMA netlink answer",
                source,
            })?;
            let parts = codec::parts(&self.received, self.sequence);
            for part in parts.map_err(|e| malformed(attempt, e))? {
                match part {
                    Part::Payload(payload) => payloads.push(payload.to_vec()),
                    Part::Acknowledged | Part::Done => return Ok(payloads),
                    Part::Refused { errno, message } => {
                        return Err(Error::Refused {
                            attempt: attempt.to_owned(),
                            errno,
                            message,
                        });
                    }
                }
            }
            if !payloads.is_empty() && !request.is_dump() {
                return Ok(payloads);
            }
        }
    }
}

fn malformed(attempt: &str, source: Malformed) -> Error {
    Error::Malformed {
        attempt: attempt.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_reads_as_attempt_then_the_kernels_text() {
        let error = Error::Refused {
            attempt: "list RDMA devices".into(),
            errno: libc::EPERM,
            message: Some("not now".into()),
        };
        assert_eq!(
            error.to_string(),
            "list RDMA devices: kernel: Operation not permitted (os error 1) (not now)"
        );
    }

    #[test]
    fn a_host_without_the_rdma_stack_is_reported_as_such_or_answers() {
        // Which of the two depends on the machine; a wrong guess at the protocol is neither.
        match Nldev::open().and_then(|mut nldev| nldev.devices()) {
            Ok(_) | Err(Error::NotLoaded) => {}
            Err(error) => panic!("{error}"),
        }
    }
}
