//! Where an attachment's addresses come from and go to: no IPAM, ours in this process, or any
//! other by exec.

use cni_wire::{
    AttachmentId, CniResult, Code, Command, ContainerId, Environment, Error, IfName, NetworkConfig,
    Request, delegate::Delegate,
};

use crate::{
    journal::{Record, record},
    node::Node,
};

/// Our own type.
const OWN: &str = "rdma-ipam";
/// The type whose configuration ours reads, too.
const COMPATIBLE: &str = "whereabouts";

/// An IPAM, found.
#[derive(Debug)]
pub enum Ipam {
    /// None: no addresses are given.
    None,
    /// Ours.
    Own,
    /// Another one.
    Other(Delegate),
}

impl Ipam {
    /// The IPAM of a request.
    ///
    /// `whereabouts` is served here only where the node's `whereabouts` is a link to our
    /// `rdma-ipam`: a cluster that runs the real one must not get a second allocator for its
    /// ranges.
    ///
    /// # Errors
    /// Code 7: `ipam` is wrong, or the type is not installed.
    pub fn of(request: &Request) -> Result<Ipam, Error> {
        match request.config.ipam_type()? {
            None => Ok(Ipam::None),
            Some(OWN) => Ok(Ipam::Own),
            Some(kind) => {
                let delegate = Delegate::find(kind, &request.env.path)?;
                let real = |delegate: &Delegate| delegate.program().canonicalize().ok();
                let ours = kind == COMPATIBLE
                    && Delegate::find(OWN, &request.env.path)
                        .is_ok_and(|own| real(&own).is_some() && real(&own) == real(&delegate));
                Ok(if ours {
                    Ipam::Own
                } else {
                    Ipam::Other(delegate)
                })
            }
        }
    }

    /// Whether the interface must be there and up before addresses can be asked for.
    pub fn needs_the_link(&self) -> bool {
        matches!(self, Ipam::Other(delegate) if delegate.program().ends_with("dhcp"))
    }

    /// Asks for addresses; none without an IPAM. Nothing stays leased on failure, also when the
    /// IPAM itself failed half-way.
    ///
    /// # Errors
    /// The IPAM's; code 6 for an answer without an address.
    pub fn add(&self, node: &Node, request: &Request) -> Result<Option<CniResult>, Error> {
        let answer = match self {
            Ipam::None => return Ok(None),
            Ipam::Own => node.ipam.add(request),
            Ipam::Other(delegate) => delegate.add(request),
        };
        let answer = answer.and_then(|result| {
            if result.ips.is_empty() {
                return Err(
                    Error::new(Code::Decode, "the IPAM answered without an address")
                        .with_details("leave ipam out for an interface without addresses"),
                );
            }
            Ok(result)
        });
        answer
            .map(Some)
            .map_err(|error| self.release_after(node, request, error))
    }

    /// Releases what a failed ADD may hold; the first error stays the first.
    pub fn release_after(&self, node: &Node, request: &Request, first: Error) -> Error {
        match self.del(node, request) {
            Ok(()) => first,
            Err(e) if e.msg == first.msg => first,
            Err(e) => first.with_details(format!("its addresses could not be released: {e}")),
        }
    }

    /// Releases all addresses of the attachment.
    ///
    /// # Errors
    /// The IPAM's.
    pub fn del(&self, node: &Node, request: &Request) -> Result<(), Error> {
        match self {
            Ipam::None => Ok(()),
            Ipam::Own => node.ipam.del(request),
            Ipam::Other(delegate) => match delegate.call(Command::Del, request) {
                // It does not speak the configuration's version, so it never gave an address.
                Err(e) if e.code == Code::IncompatibleVersion => Ok(()),
                done => done,
            },
        }
    }

    /// CHECK, STATUS or GC.
    ///
    /// # Errors
    /// The IPAM's.
    pub fn ask(&self, node: &Node, command: Command, request: &Request) -> Result<(), Error> {
        match self {
            Ipam::None => Ok(()),
            Ipam::Own => match command {
                Command::Check => node.ipam.check(request),
                Command::Status => node.ipam.status(request),
                Command::Gc => node.ipam.gc(request),
                Command::Add | Command::Del | Command::Version => Ok(()),
            },
            Ipam::Other(delegate) => delegate.call(command, request),
        }
    }
}

/// What the journal keeps for the release; none without an IPAM.
///
/// # Errors
/// Code 7: `ipam` is wrong.
pub fn note(request: &Request) -> Result<Option<record::Ipam>, Error> {
    Ok(request.config.ipam_type()?.map(|kind| record::Ipam {
        kind: kind.to_owned(),
        config: String::from_utf8_lossy(request.config.raw()).into_owned(),
        args: request.env.args.to_string(),
        path: request.env.path.clone(),
    }))
}

/// Releases the addresses of a journalled attachment, as its own DEL would.
///
/// # Errors
/// The IPAM's, or code 7 when it is not installed any more.
pub fn release(node: &Node, record: &Record) -> Result<(), Error> {
    let Some(noted) = &record.ipam else {
        return Ok(());
    };
    let request = Request {
        env: Environment {
            command: Command::Del,
            attachment: Some(AttachmentId {
                container_id: ContainerId::parse(&record.container_id)?,
                ifname: IfName::parse(&record.ifname)
                    .map_err(|reason| Error::new(Code::State, format!("journal: {reason}")))?,
            }),
            netns: Some(record.netns.path.clone()),
            args: cni_wire::Args::parse(&noted.args)?,
            path: noted.path.clone(),
            netns_override: false,
        },
        config: NetworkConfig::parse(noted.config.as_bytes())?,
    };
    Ipam::of(&request)?.del(node, &request)
}
