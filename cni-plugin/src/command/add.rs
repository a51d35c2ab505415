//! ADD: request → bind → recover → resolve → authorize → plan → journal → apply → result.
//!
//! - *bind* asks the daemon which HCA a slot becomes, with `devices: all` each of the pod's;
//! - *recover* returns the NIC that a dead pod left, if the request means it;
//! - *resolve* reads which links and RDMA devices the request comes to;
//! - *authorize* asks policy and kubelet about what it comes to, never about how it is written;
//! - *number* says which rail each NIC is on and what it is called, with `devices: all`;
//! - *plan* says what will be done, as plain data;
//! - *apply* does it.
//!
//! Before the record is in the journal nothing of the host is changed but leases, which the IPAM
//! finds by container and interface. After it, whatever fails is undone by the same function
//! that serves DEL, and the same holds when this process dies. The attachment is locked from the
//! beginning to the end, so that no DEL and no second ADD of it comes in between.

mod guid;
mod interface;
mod rdma_only;
mod several;

use std::time::Duration;

use attachment::{
    addresses::Ipam,
    detach::{detach, living},
    journal::{
        Key, Part, Record,
        record::{Netns, VERSION},
    },
    netdev::{restore, snapshot::Snapshot},
    node::{Node, now},
};
use cni_wire::{AttachmentId, CniResult, Code, IfName, Request};
use netlink::{
    Namespace, Socket,
    link::{self, By},
    sysctl,
};
use serde_json::Value;

use super::pod_namespace;
use crate::{
    allocation::{self, Allocated},
    authorize::{Asked, Rules, authorize},
    bind::{self, Bound},
    config::{ChildKind, Config, Devices},
    error::Error,
    parts::{Numbering, OneRail},
    plan,
    rdma::{self, RdmaRequirement},
    recover::{self, Recovered},
    resolve::{self, NodeNetwork, Requested, Resolved, resolve},
};
use several::Units;

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
    let mut config = Config::read(request, &node.policy.values.pkeys)?;
    if !config.notes.is_empty() {
        node.log.warn(format_args!(
            "network {}: {}",
            request.config.name,
            config.notes.join("; ")
        ));
    }
    let before = request.config.prev_result()?;
    let requested = config.requested();
    if requested == Requested::RdmaOnly && before.is_none() {
        return Err(rdma_only::needs_a_chain());
    }
    let mut before = before.unwrap_or_default();
    before
        .check_indexes()
        .map_err(|e| e.context("prevResult"))?;
    let ipam = Ipam::of(&node, request)?;
    let chain = match requested {
        Requested::Child(Some(ChildKind::Ipvlan)) => {
            interface::inherit(&mut config, &mut before, &ipam)?
        }
        _ => None,
    };
    if config.devices == Devices::All {
        several::check(&config, &ipam, chain.as_ref())?;
    }
    let pod = pod_namespace(&node, request)?;
    let attachment = node
        .journal
        .lock_attachment(&key, ATTACHMENT_LOCK_TIMEOUT)?;
    attachment.share_with_programs()?;
    let mut inside = pod.socket(&node.netns.namespace)?;
    undo_earlier(&mut node, &key, &pod, &mut inside, requested)?;
    if requested != Requested::RdmaOnly {
        name_is_free(&mut inside, &id.ifname, &pod)?;
    }

    let bound = bind::bind(&node, request, &mut config)?;
    let mut add = Add {
        node: &mut node,
        request,
        id,
        key: &key,
        config: &config,
        pod: &pod,
        inside: &mut inside,
        ipam: &ipam,
        bound: bound.as_ref(),
    };
    let mut added = add.attach(before, chain);
    // A GUID is set, and recorded, before there is anything else to undo.
    if config.guid.is_some()
        && added.is_err()
        && let Some(record) = add.node.journal.read(&key)?
    {
        added = added.map_err(|first| add.undo(&record, first));
    }
    if let (Err(_), Some(bound)) = (&added, &bound) {
        bound.unbind(&node);
    }
    added
}

/// An ADD whose request was read, on a pod that is free for it.
struct Add<'a> {
    node: &'a mut Node,
    request: &'a Request,
    id: &'a AttachmentId,
    key: &'a Key,
    config: &'a Config,
    pod: &'a Namespace,
    /// A socket of `pod`.
    inside: &'a mut Socket,
    ipam: &'a Ipam,
    bound: Option<&'a Bound>,
}

/// A NIC of the attachment, resolved and allowed, and the interface that is made of it.
#[derive(Debug)]
struct Nic {
    /// The interface's name in the pod.
    ifname: IfName,
    /// The rail, with `devices: all` or where the network asks for one.
    rail: Option<u32>,
    /// The configuration; of several NICs each has its own allocation.
    config: Config,
    /// What it is made of.
    resolved: Resolved,
    /// What keeps other processes off the NIC.
    recovered: Recovered,
    /// Whether RDMA devices move with it.
    moves_rdma: bool,
    /// The netdev before its GUID was set, where a record names it already.
    taken: Option<Snapshot>,
}

impl Add<'_> {
    /// From recovering to the result. `before` is the chain's result, `chain` what of it is the
    /// interface's.
    fn attach(&mut self, before: CniResult, chain: Option<CniResult>) -> Result<Value, Error> {
        let units = match &self.config.allocation {
            Some(named) if self.config.devices == Devices::All => {
                Some(several::ask(self.node, self.request, named, self.bound)?)
            }
            _ => None,
        };
        let mut nics = self.nics(units.as_ref(), &before)?;
        if self.config.requested() == Requested::RdmaOnly {
            return self.follow(nics, &before);
        }
        self.number(&mut nics, units.as_ref())?;
        self.make(nics, before, chain)
    }

    /// Recovers, resolves, authorizes and checks each NIC that the request means.
    fn nics(&mut self, units: Option<&Units>, before: &CniResult) -> Result<Vec<Nic>, Error> {
        // Of a slot the daemon has asked the kubelet.
        let allocated = match self.bound {
            Some(bound) => Some(bound.allocated()),
            None => units.map(|units| units.allocated.clone()),
        };
        let configs = match units {
            None => vec![self.config.clone()],
            Some(units) => several::configs(self.config, &units.devices, self.bound),
        };
        // All are back on the host before the first is judged.
        let mut recovered = Vec::new();
        for config in &configs {
            recovered.push(recover(self.node, config)?);
        }
        let mut network = NodeNetwork::default();
        let mut nics = Vec::new();
        for (config, recovered) in configs.into_iter().zip(recovered) {
            let mut resolved = resolve(
                self.node,
                self.request,
                &config,
                before,
                self.pod,
                self.inside,
                &mut network,
            )?;
            config.fits(resolved.attach(), self.request.config.ipam_type()?)?;
            let moves_rdma = moves_rdma(self.node, &config, &resolved)?;
            self.allow(&config, &resolved, moves_rdma, allocated.as_ref())?;
            plan::check(&resolved, &config, &self.node.policy.values.allow)?;
            let mut taken = None;
            if let (Some(guid), Resolved::Move(host)) = (config.guid, &resolved) {
                let snapshot = interface::snapshot(self.node, self.ipam, host, &recovered)?;
                taken = Some(self.set_guid(host, snapshot, guid)?);
                network = NodeNetwork::default();
                resolved = resolve(
                    self.node,
                    self.request,
                    &config,
                    before,
                    self.pod,
                    self.inside,
                    &mut network,
                )?;
            }
            nics.push(Nic {
                taken,
                ifname: self.id.ifname.clone(),
                rail: None,
                config,
                resolved,
                recovered,
                moves_rdma,
            });
        }
        Ok(nics)
    }

    /// Asks the policy, and the kubelet where the request takes something from the host; `allocated` is
    /// its answer where it was asked already.
    fn allow(
        &self,
        config: &Config,
        resolved: &Resolved,
        moves_rdma: bool,
        allocated: Option<&Allocated>,
    ) -> Result<(), Error> {
        let node = &*self.node;
        let exclusive = node.exclusive_hcas()?;
        let rules = Rules {
            allow: &node.policy.values.allow,
            path: &node.policy.path,
            exclusive: &exclusive,
        };
        let asked = Asked {
            passthru: config.mode.as_deref() == Some("passthru"),
            moves_rdma,
            pkey: plan::partition(resolved, config),
            guid: config.guid,
        };
        authorize(resolved, asked, rules, || match allocated {
            Some(allocated) => Ok(allocated.clone()),
            None => {
                let args = &self.request.env.args;
                Ok(allocation::ask(&node.daemon_socket(), args, &node.log)?.allocated())
            }
        })
    }

    /// Says which rail each NIC is on, with `devices: all` also what its interface is called, by the
    /// order of the rails.
    fn number(&mut self, nics: &mut [Nic], units: Option<&Units>) -> Result<(), Error> {
        let ranges = self.ipam.rails(self.node, self.request)?;
        let policy = &self.node.policy;
        match units {
            None => {
                let rail = OneRail {
                    asked: self.config.rail,
                    ranges: ranges.as_ref(),
                    rails: &policy.values.rails,
                    path: &policy.path,
                };
                for nic in nics {
                    nic.rail = rail.number(nic.resolved.host_link())?;
                }
            }
            Some(units) => {
                let numbering = Numbering {
                    rails: &policy.values.rails,
                    path: &policy.path,
                    devices: &units.devices,
                    ranges: ranges.as_ref(),
                };
                several::number(self.config, self.id, numbering, nics)?;
                for nic in nics {
                    name_is_free(self.inside, &nic.ifname, self.pod)?;
                }
            }
        }
        Ok(())
    }

    /// Undoes what failed after its record was written. The first error stays the first.
    fn undo(&mut self, record: &Record, first: Error) -> Error {
        match detach(self.node, self.key, record, restore::RETURN_TIMEOUT) {
            Ok(()) => first,
            Err(e) => first.with_details(format!("undoing it failed too: {}", e.with_remedy())),
        }
    }

    /// A record of the attachment with these parts.
    fn record_of(&self, parts: Vec<Part>) -> Record {
        let netns = self.pod.id();
        let args = &self.request.env.args;
        let pod = (args.get("K8S_POD_NAMESPACE"), args.get("K8S_POD_NAME"));
        Record {
            version: VERSION,
            network: self.request.config.name.clone(),
            container_id: self.id.container_id.to_string(),
            ifname: self.id.ifname.to_string(),
            pod: match pod {
                (Some(namespace), Some(name)) => Some(format!("{namespace}/{name}")),
                _ => None,
            },
            created: now(),
            boot: self.node.boot.clone(),
            netns: Netns {
                path: self.pod.path().display().to_string(),
                device: netns.device,
                inode: netns.inode,
                cookie: self.pod.cookie(&self.node.netns.namespace).ok(),
            },
            parts,
            ipam: None,
        }
    }
}

/// Returns the NIC that a configuration means, if a dead pod left it, and locks it.
fn recover(node: &mut Node, config: &Config) -> Result<Recovered, Error> {
    match config.requested() {
        Requested::Move => recover::recover(node, &resolve::move_target(config)?, config.port),
        Requested::Child(_) | Requested::RdmaOnly => Ok(Recovered::default()),
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
        return Ok(node.journal.forget(key)?);
    };
    let lives = living(&record)?.is_some_and(|there| there.id() == pod.id());
    let has_interface = record.parts.iter().any(Part::has_interface);
    let is_attached = match (lives, has_interface) {
        (false, _) => false,
        (true, true) => has_all(inside, &record)?,
        (true, false) => {
            let rdma: Vec<_> = record.rdma().cloned().collect();
            !rdma.is_empty() && rdma::check(node, pod, &rdma).is_ok()
        }
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

/// Whether all interfaces of an attachment are there. An ADD that was killed between two of them was
/// never answered, so that it is undone like one that made none.
fn has_all(inside: &mut Socket, record: &Record) -> Result<bool, Error> {
    for part in &record.parts {
        if link::get(inside, By::Name(part.ifname.as_bytes()))?.is_none() {
            return Ok(false);
        }
    }
    Ok(true)
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

fn name_is_free(inside: &mut Socket, name: &IfName, pod: &Namespace) -> Result<(), Error> {
    match link::get(inside, By::Name(name.as_str().as_bytes()))? {
        None => Ok(()),
        Some(link) => Err(Error::new(
            Code::Exists,
            format!("{} has an interface {name} already", pod.path().display()),
        )
        .with_details(match link.kind {
            Some(kind) => format!("a {kind}; ask for another interface name"),
            None => "ask for another interface name".to_owned(),
        })),
    }
}
