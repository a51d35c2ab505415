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
    config::{Allocation, ChildKind, Config, Devices},
    error::Error,
    parts::OneRail,
    plan,
    rdma::{self, RdmaRequirement},
    recover,
    resolve::{self, NodeNetwork, RdmaOnly, Requested, Resolved, resolve},
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
    let mut config = Config::read(request, &node.policy.values.pkeys)?;
    if !config.notes.is_empty() {
        node.log.warn(format_args!(
            "network {}: {}",
            request.config.name,
            config.notes.join("; ")
        ));
    }
    let mut before = request.config.prev_result()?.unwrap_or_default();
    before
        .check_indexes()
        .map_err(|e| e.context("prevResult"))?;
    let ipam = Ipam::of(&node, request)?;
    let requested = resolve::requested(&config)?;
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
    let named = match config.devices {
        Devices::One => None,
        Devices::All => Some(several::check(&config, &ipam, chain.as_ref())?.clone()),
    };
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
    let prepared = Prepared {
        request,
        id,
        key: &key,
        config: &config,
        requested,
        named: named.as_ref(),
        pod: &pod,
        ipam: &ipam,
        bound: bound.as_ref(),
    };
    let mut added = prepared.attach(&mut node, &mut inside, before, chain);
    // A GUID is set, and recorded, before there is anything else to undo.
    if config.guid.is_some()
        && added.is_err()
        && let Some(record) = node.journal.read(&key)?
    {
        added = added.map_err(|first| undo(&mut node, &key, &record, first));
    }
    if let (Err(_), Some(bound)) = (&added, &bound) {
        bound.unbind(&node);
    }
    added
}

/// A request that was read, on a pod that is free for it.
struct Prepared<'a> {
    request: &'a Request,
    id: &'a AttachmentId,
    key: &'a Key,
    config: &'a Config,
    requested: Requested,
    /// With `devices: all`: the unit that the runtime passed.
    named: Option<&'a Allocation>,
    pod: &'a Namespace,
    ipam: &'a Ipam,
    bound: Option<&'a Bound>,
}

impl Prepared<'_> {
    /// From recovering to the result. `before` is the chain's result, `chain` what of it is the
    /// interface's.
    fn attach(
        &self,
        node: &mut Node,
        inside: &mut Socket,
        before: CniResult,
        chain: Option<CniResult>,
    ) -> Result<Value, Error> {
        let Prepared {
            request,
            id,
            key,
            config,
            requested,
            named,
            pod,
            ipam,
            bound,
        } = *self;
        let devices = match named {
            None => None,
            Some(named) => Some(several::ask(node, request, named, bound)?),
        };
        let configs = match &devices {
            None => vec![config.clone()],
            Some(all) => several::configs(config, requested, &all.devices, bound),
        };
        let call = Call {
            request,
            before: &before,
            pod,
            allocated: match (bound, &devices) {
                (Some(bound), _) => Some(bound.allocated()),
                (None, devices) => devices.as_ref().map(|all| all.allocated.clone()),
            },
        };
        // All are back on the host before the first is judged.
        let mut recovered = Vec::new();
        for config in &configs {
            recovered.push(recover(node, config)?);
        }
        let mut network = NodeNetwork::default();
        let mut nics = Vec::new();
        for (config, recovered) in configs.into_iter().zip(recovered) {
            let (mut resolved, moves_rdma) = call.resolve(node, inside, &config, &mut network)?;
            let mut taken = None;
            if let (Some(guid), Resolved::Move(nic)) = (config.guid, &resolved) {
                let snapshot = interface::snapshot(node, ipam, &config, nic, &recovered)?;
                taken = Some(self.set_guid(node, nic, snapshot, guid)?);
                network = NodeNetwork::default();
                resolved = resolve(node, request, &config, &before, pod, inside, &mut network)?;
            }
            nics.push(Nic {
                taken,
                config,
                resolved,
                recovered,
                moves_rdma,
            });
        }
        if requested == Requested::RdmaOnly {
            let moves_rdma = nics.iter().any(|nic| nic.moves_rdma);
            let target = RdmaOnly::joined(nics.into_iter().map(|nic| nic.resolved))?;
            let attachment = rdma_only::Attachment {
                node,
                request,
                config,
                key,
                pod,
                target: &target,
            };
            return attachment.add(&before, moves_rdma);
        }
        let (wanted, recovered) = match &devices {
            None => {
                let ranges = ipam.rails(node, request)?;
                let rail = OneRail {
                    asked: config.rail,
                    ranges: ranges.as_ref(),
                    rails: &node.policy.values.rails,
                    path: &node.policy.path,
                };
                let interfaces = nics.into_iter().map(|nic| {
                    let rail = rail.number(nic.resolved.host_link())?;
                    Ok(nic.interface(id.ifname.clone(), rail))
                });
                let interfaces: Vec<_> = interfaces.collect::<Result<_, Error>>()?;
                interfaces.into_iter().unzip()
            }
            Some(all) => {
                let ranges = ipam.rails(node, request)?;
                several::interfaces(node, config, id, &all.devices, ranges.as_ref(), nics)?
            }
        };
        if devices.is_some() {
            for wanted in &wanted {
                name_is_free(inside, &wanted.ifname, pod)?;
            }
        }
        let attachment = interface::Attachment {
            node,
            request,
            id,
            wanted: &wanted,
            pod,
            inside,
            ipam,
            bound,
        };
        attachment.add(key, recovered, before, chain)
    }
}

/// A call, as each of its NICs is resolved for it.
struct Call<'a> {
    request: &'a Request,
    before: &'a CniResult,
    pod: &'a Namespace,
    /// What the kubelet allocated to the pod, where it was asked already: for a slot by the daemon.
    allocated: Option<Allocated>,
}

/// What an interface is to be made of, resolved and allowed.
struct Nic {
    config: Config,
    resolved: Resolved,
    recovered: recover::Recovered,
    moves_rdma: bool,
    /// The netdev before its GUID was set.
    taken: Option<Snapshot>,
}

impl Nic {
    /// The interface, and what keeps other processes off its NIC.
    fn interface(
        self,
        ifname: IfName,
        rail: Option<u32>,
    ) -> (interface::Wanted, recover::Recovered) {
        let wanted = interface::Wanted {
            ifname,
            rail,
            config: self.config,
            resolved: self.resolved,
            moves_rdma: self.moves_rdma,
            taken: self.taken,
        };
        (wanted, self.recovered)
    }
}

impl Call<'_> {
    /// Resolves, authorizes and checks what a configuration of one NIC asks for. Answers also whether
    /// RDMA devices leave the host with it.
    fn resolve(
        &self,
        node: &mut Node,
        inside: &mut Socket,
        config: &Config,
        network: &mut NodeNetwork,
    ) -> Result<(Resolved, bool), Error> {
        let (request, before, pod) = (self.request, self.before, self.pod);
        let resolved = resolve(node, request, config, before, pod, inside, network)?;
        config.fits(resolved.attach(), request.config.ipam_type()?)?;
        let moves_rdma = moves_rdma(node, config, &resolved)?;
        self.allow(node, config, &resolved, moves_rdma)?;
        plan::check(&resolved, config, &node.policy.values.allow)?;
        Ok((resolved, moves_rdma))
    }

    /// Asks the policy, and the kubelet where the request takes something from the host.
    fn allow(
        &self,
        node: &Node,
        config: &Config,
        resolved: &Resolved,
        moves_rdma: bool,
    ) -> Result<(), Error> {
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
            guid: config.guid.is_some(),
        };
        authorize(resolved, asked, rules, || match &self.allocated {
            Some(allocated) => Ok(allocated.clone()),
            None => {
                let args = &self.request.env.args;
                Ok(allocation::ask(&node.daemon_socket(), args, &node.log)?.allocated())
            }
        })
    }
}

/// Returns the NIC that a configuration means, if a dead pod left it, and locks it.
fn recover(node: &mut Node, config: &Config) -> Result<recover::Recovered, Error> {
    match resolve::requested(config)? {
        Requested::Move => recover::recover(node, &resolve::move_target(config)?, config.port),
        Requested::Child(_) | Requested::RdmaOnly => Ok(recover::Recovered::default()),
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

/// Undoes what failed after its record was written. The first error stays the first.
fn undo(node: &mut Node, key: &Key, record: &Record, first: Error) -> Error {
    match detach(node, key, record, restore::RETURN_TIMEOUT) {
        Ok(()) => first,
        Err(e) => first.with_details(format!("undoing it failed too: {}", e.with_remedy())),
    }
}

/// A record of the request's attachment without interfaces.
fn blank_record(node: &Node, request: &Request, pod: &Namespace) -> Result<Record, Error> {
    let id = request.attachment()?;
    let netns = pod.id();
    Ok(Record {
        version: VERSION,
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
            cookie: pod.cookie(&node.netns.namespace).ok(),
        },
        parts: Vec::new(),
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
