//! ADD: request → bind → recover → resolve → authorize → plan → journal → apply → result.
//!
//! - *bind* asks the daemon which HCA a slot becomes;
//! - *recover* returns the NIC that a dead pod left, if the request means it;
//! - *resolve* reads which links and RDMA devices the request comes to;
//! - *authorize* asks policy and kubelet about what it comes to, never about how it is written;
//! - *plan* says what will be done, as plain data;
//! - *apply* does it.
//!
//! Before the record is in the journal nothing of the host is changed but leases, which the IPAM
//! finds by container and interface. After it, whatever fails is undone by the same function
//! that serves DEL, and the same holds when this process dies. The attachment is locked from the
//! beginning to the end, so that no DEL and no second ADD of it comes in between.

mod interface;
mod rdma_only;

use std::time::Duration;

use attachment::{
    addresses::Ipam,
    detach::{detach, living},
    journal::{
        Key, Record,
        record::{self, Netns},
    },
    netdev::restore,
    node::{Node, now},
};
use cni_wire::{AttachmentId, CniResult, Code, Request};
use netlink::{
    Namespace, Socket,
    link::{self, By},
    sysctl,
};
use serde_json::Value;

use super::pod_namespace;
use crate::{
    allocation,
    authorize::{Asked, Rules, authorize},
    bind::{self, Bound},
    config::{ChildKind, Config},
    error::Error,
    plan,
    rdma::{self, RdmaRequirement},
    recover,
    resolve::{self, Requested, Resolved, resolve},
};

/// The longest configuration, with `prevResult`, that is attached: a page is usual.
const MAX_CONFIG_BYTES: usize = 1 << 20;

/// How long an ADD or DEL of the same container and interface may take before a call fails with
/// "try again": an IPAM plugin that asks a server takes its time.
pub(super) const ATTACHMENT_LOCK_TIMEOUT: Duration = Duration::from_secs(60);

/// Serves ADD.
///
/// # Errors
/// The first failure; nothing is left then.
pub fn run(mut node: Node, request: &Request) -> Result<Value, Error> {
    let id = request.attachment()?;
    name_is_of_an_interface(id)?;
    let key = key_of(request, id)?;
    if request.config.raw().len() > MAX_CONFIG_BYTES {
        return Err(Error::new(
            Code::InvalidConfig,
            format!("the network configuration is longer than {MAX_CONFIG_BYTES} bytes"),
        )
        .with_details("the journal keeps it until DEL; leave out what no plugin reads"));
    }
    request.config.has_each_key_once()?;
    let mut config = Config::read(request)?;
    let mut before = request.config.prev_result()?.unwrap_or_default();
    before
        .check_indexes()
        .map_err(|e| e.context("prevResult"))?;
    let ipam = Ipam::of(&node, request)?;
    let requested = resolve::requested(&config)?;
    // An interface without an IPAM passes the chain's result on as it is.
    if matches!(ipam, Ipam::None) && matches!(requested, Requested::Child(_)) {
        before.fits(request.config.version)?;
    }
    let chain = match requested {
        Requested::Child(Some(ChildKind::Ipvlan)) => {
            interface::inherit(&mut config, &mut before, &ipam)?
        }
        Requested::RdmaOnly => {
            rdma_only::needs_a_chain(request)?;
            None
        }
        _ => None,
    };
    let pod = pod_namespace(&node, request)?;
    let _attachment = node
        .journal
        .lock_attachment(&key, ATTACHMENT_LOCK_TIMEOUT)?;
    let mut inside = pod.socket(&node.netns.namespace)?;
    undo_earlier(&mut node, &key, &pod, &mut inside, requested)?;
    if requested != Requested::RdmaOnly {
        name_is_free(&mut inside, id, &pod)?;
    }

    let bound = bind::bind(&node, request, &mut config)?;
    let call = Call {
        request,
        id,
        key: &key,
        config: &config,
        requested,
        pod: &pod,
        ipam: &ipam,
        bound: bound.as_ref(),
    };
    let added = call.attach(&mut node, &mut inside, before, chain);
    if let (Err(_), Some(bound)) = (&added, &bound) {
        bound.unbind(&node);
    }
    added
}

/// A request whose slot is bound, if it has one.
struct Call<'a> {
    request: &'a Request,
    id: &'a AttachmentId,
    key: &'a Key,
    config: &'a Config,
    requested: Requested,
    pod: &'a Namespace,
    ipam: &'a Ipam,
    bound: Option<&'a Bound>,
}

impl Call<'_> {
    /// From recovering to the result. `before` is the chain's result, `chain` what of it is the
    /// interface's.
    fn attach(
        &self,
        node: &mut Node,
        inside: &mut Socket,
        before: CniResult,
        chain: Option<CniResult>,
    ) -> Result<Value, Error> {
        let Call {
            request,
            config,
            pod,
            ..
        } = *self;
        let recovered = match self.requested {
            Requested::Move => recover::recover(node, &resolve::move_target(config)?, config.port)?,
            _ => recover::Recovered::default(),
        };
        let resolved = resolve(node, request, config, &before, pod, inside)?;
        let moves_rdma = moves_rdma(node, config, &resolved)?;
        self.allow(node, &resolved, moves_rdma)?;
        plan::check(&resolved, config, request.config.ipam_type()?)?;
        match resolved {
            Resolved::RdmaOnly(target) => {
                let attachment = rdma_only::Attachment {
                    node,
                    request,
                    config,
                    key: self.key,
                    pod,
                    target: &target,
                };
                attachment.add(&before, moves_rdma)
            }
            resolved => {
                let attachment = interface::Attachment {
                    node,
                    request,
                    id: self.id,
                    config,
                    resolved: &resolved,
                    pod,
                    inside,
                    ipam: self.ipam,
                    bound: self.bound,
                };
                attachment.add(self.key, recovered, before, chain, moves_rdma)
            }
        }
    }

    /// Asks the policy, and the kubelet where the request takes something from the host. For a slot
    /// the daemon has asked the kubelet already.
    fn allow(&self, node: &Node, resolved: &Resolved, moves_rdma: bool) -> Result<(), Error> {
        let exclusive = node.exclusive_hcas()?;
        let rules = Rules {
            allow: &node.policy.values.allow,
            path: &node.policy.path,
            exclusive: &exclusive,
        };
        let asked = Asked {
            passthru: self.config.mode.as_deref() == Some("passthru"),
            moves_rdma,
        };
        authorize(resolved, asked, rules, || match self.bound {
            Some(bound) => Ok(bound.allocated()),
            None => allocation::ask(&node.daemon_socket(), &self.request.env.args, &node.log),
        })
    }
}

/// Whether RDMA devices leave the host for the pod.
fn moves_rdma(node: &Node, config: &Config, resolved: &Resolved) -> Result<bool, Error> {
    let (mode, has_rdma, name) = match resolved {
        Resolved::RdmaOnly(target) => (target.mode, true, target.interface_name()),
        Resolved::Move(_) | Resolved::Child { .. } => {
            let Some(host) = resolved.host_link() else {
                return Ok(false);
            };
            let mode = match config.rdma {
                RdmaRequirement::Required => attachment::rdma::mode(&node.roots)?,
                RdmaRequirement::Auto | RdmaRequirement::Off => host.mode,
            };
            (mode, !host.rdma.is_empty(), host.link.name.to_string())
        }
    };
    rdma::moves(config.rdma, resolved.attach(), mode, has_rdma, &name)
}

/// Undoes what an ADD that died left under the same name. One that lives is an error.
fn undo_earlier(
    node: &mut Node,
    key: &Key,
    pod: &Namespace,
    inside: &mut Socket,
    requested: Requested,
) -> Result<(), Error> {
    let Some(record) = node.journal.read(key)? else {
        // A record that was cut off says that nothing was done.
        return Ok(node.journal.forget(key)?);
    };
    let lives = living(&record)?.is_some_and(|there| there.id() == pod.id());
    let has_interface = record.moved.is_some() || record.child.is_some();
    let is_attached = match (lives, has_interface) {
        (false, _) => false,
        (true, true) => link::get(inside, By::Name(record.ifname.as_bytes()))?.is_some(),
        (true, false) => !record.rdma.is_empty() && rdma::check(node, pod, &record.rdma).is_ok(),
    };
    if is_attached {
        let remedy = match (has_interface, requested) {
            (true, Requested::RdmaOnly) => {
                "this plugin made the interface; leave rdma out there and attach rdma-only out of \
                 the list"
            }
            _ => "the runtime must DEL it first",
        };
        return Err(Error::new(
            Code::Exists,
            format!(
                "{} is attached to network {} already",
                record.owner(),
                record.network
            ),
        )
        .with_details(remedy));
    }
    detach(node, key, &record, restore::RETURN_TIMEOUT).map_err(|e| {
        Error::from(e).context(format_args!(
            "undo an earlier attachment of {}",
            record.owner()
        ))
    })
}

/// Undoes what failed after its record was written. The first error stays the first.
fn undo(node: &mut Node, key: &Key, record: &Record, first: Error) -> Error {
    match detach(node, key, record, restore::RETURN_TIMEOUT) {
        Ok(()) => first,
        Err(e) => first.with_details(format!("undoing it failed too: {}", e.with_remedy())),
    }
}

/// A record of the request's attachment that says nothing was made.
fn blank_record(node: &Node, request: &Request, pod: &Namespace) -> Result<Record, Error> {
    let id = request.attachment()?;
    let netns = pod.id();
    Ok(Record {
        version: record::VERSION,
        network: request.config.name.clone(),
        container_id: id.container_id.to_string(),
        ifname: id.ifname.to_string(),
        pod: pod_name(request),
        created: now(),
        boot: node.boot.clone(),
        netns: Netns {
            path: pod.path().display().to_string(),
            device: netns.device,
            inode: netns.inode,
        },
        moved: None,
        awaits_name: false,
        hcas: Vec::new(),
        child: None,
        rdma: Vec::new(),
        slots: Vec::new(),
        rules: Vec::new(),
        ipam: None,
    })
}

fn pod_name(request: &Request) -> Option<String> {
    let args = &request.env.args;
    Some(format!(
        "{}/{}",
        args.get("K8S_POD_NAMESPACE")?,
        args.get("K8S_POD_NAME")?
    ))
}

/// The journal's name for the attachment.
fn key_of(request: &Request, id: &AttachmentId) -> Result<Key, Error> {
    Key::of(&request.config.name, id).ok_or_else(|| {
        Error::new(
            Code::InvalidConfig,
            format!(
                "name {} is too long to keep a journal under",
                request.config.name
            ),
        )
        .with_details("network name, container ID and interface together have at most 248 bytes")
    })
}

/// Refuses names under which the kernel keeps the settings of all interfaces of the pod.
fn name_is_of_an_interface(id: &AttachmentId) -> Result<(), Error> {
    let name = id.ifname.as_str();
    if !sysctl::OF_NO_INTERFACE.contains(&name) {
        return Ok(());
    }
    Err(Error::new(
        Code::InvalidEnvironment,
        format!(
            "CNI_IFNAME {name} is no name for an interface: /proc/sys/net has settings of all \
                 interfaces under it"
        ),
    )
    .with_details("ask for another interface name"))
}

fn name_is_free(inside: &mut Socket, id: &AttachmentId, pod: &Namespace) -> Result<(), Error> {
    match link::get(inside, By::Name(id.ifname.as_str().as_bytes()))? {
        None => Ok(()),
        Some(link) => Err(Error::new(
            Code::Exists,
            format!(
                "{} has an interface {} already",
                pod.path().display(),
                id.ifname
            ),
        )
        .with_details(match link.kind {
            Some(kind) => format!("a {kind}; ask for another interface name"),
            None => "ask for another interface name".to_owned(),
        })),
    }
}
