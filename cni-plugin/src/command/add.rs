//! ADD: request → bind → recover → resolve → authorize → number → lease → plan → journal → apply →
//! result.
//!
//! - *bind* asks the daemon which HCAs the pod's slots become;
//! - *recover* returns the NIC that a dead pod left;
//! - *resolve* reads which links and RDMA devices the request comes to;
//! - *authorize* asks policy and kubelet about these, never about how the request is written;
//! - *number* gives each NIC its rail and name, with `devices: all`;
//! - *plan* says what will be done, as plain data; *apply* does it.
//!
//! One NIC is a list of one; `rdma-only` is a NIC without an interface. Before the record is in the
//! journal, only leases change, which the IPAM finds by container and interface. After it, a failure
//! or a killed process is undone by the function that serves DEL. The attachment is locked throughout.

mod answer;
mod give;
mod nics;
mod record;
mod undo;
mod vf;

use std::time::Duration;

use attachment::{
    addresses::Ipam,
    journal::{Key, Lock, Record, Sharing},
    netdev::snapshot::Identity,
    node::Node,
};
use cni_wire::{AttachmentId, CniResult, Code, IfName, Request};
use netlink::{
    Namespace, Socket,
    link::{self, By, Link},
    sysctl,
};
use serde_json::Value;

use super::pod_namespace;
use crate::{
    apply,
    bind::{self, Bound},
    config::{Attach, ChildKind, Config, Devices},
    error::Error,
    parts,
    plan::Plan,
    rdma,
    recover::{self, Recovered},
    resolve::{self, HostLink, Resolved},
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
        let (name, notes) = (&request.config.name, config.notes.join("; "));
        node.log.warn(format_args!("network {name}: {notes}"));
    }
    let before = request.config.prev_result()?;
    if config.attach == Attach::RdmaOnly && before.is_none() {
        return Err(resolve::needs_a_chain());
    }
    let mut before = before.unwrap_or_default();
    before
        .check_indexes()
        .map_err(|e| e.context("prevResult"))?;
    let ipam = Ipam::of(&node, request)?;
    let chain = match config.attach {
        Attach::Child(ChildKind::Ipvlan) => {
            answer::inherit(&mut config, &mut before, &ipam, &node.policy.values.allow)?
        }
        _ => None,
    };
    if config.devices == Devices::All {
        parts::check(&config, &ipam, chain.is_some())?;
    }
    let pod = pod_namespace(&node, request)?;
    let attachment = node
        .journal
        .lock_attachment(&key, ATTACHMENT_LOCK_TIMEOUT)?;
    attachment.share_with_programs()?;
    let mut inside = pod.socket(&node.netns.namespace)?;
    undo::earlier(&mut node, &key, &pod, &mut inside, config.attach)?;
    if config.attach != Attach::RdmaOnly {
        name_is_free(&mut inside, &id.ifname, &pod)?;
    }
    let bound = bind::bind(&node, request, &config)?;
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
        record: None,
    };
    add.attach(before, chain).map_err(|first| add.undo(first))
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
    /// What is in the journal.
    record: Option<Record>,
}

/// A NIC of the attachment, resolved and allowed.
struct Nic {
    plan: Plan,
    /// What keeps other processes off the NIC.
    _lock: Recovered,
    /// Its addresses and routes by the IPAM or the chain.
    leased: Option<CniResult>,
    /// The interface, once it is made.
    link: Option<Link>,
}

impl Add<'_> {
    /// `before` is the chain's result, `chain` what of it is the interface's.
    fn attach(&mut self, before: CniResult, chain: Option<CniResult>) -> Result<Value, Error> {
        let (allocated, devices) = self.units()?;
        let mut nics = self.nics(allocated.as_ref(), devices.as_ref(), &before)?;
        self.number(&mut nics, devices.as_ref())?;
        let dns = self.request.config.dns()?;
        self.lease(&mut nics, chain)?;
        let kept = match self.plan(&mut nics) {
            Ok(kept) => kept,
            Err(error) => {
                let (node, request) = (&*self.node, self.request);
                return Err(self.ipam.release_after(node, request, error.into()).into());
            }
        };
        self.make(&mut nics)?;
        drop(kept);
        self.configure(&mut nics)?;
        let (made, gid_indexes) = self.answer(&nics, &before)?;
        if let Some(bound) = self.bound {
            bound.commit(self.node, gid_indexes)?;
        }
        let mut result = before;
        if !made.interfaces.is_empty() {
            answer::merge(&mut result, made, dns);
        }
        Ok(result.to_json(self.request.config.version))
    }

    /// Leases the addresses of all interfaces, by their order; none where the chain gave them.
    fn lease(&mut self, nics: &mut [Nic], chain: Option<CniResult>) -> Result<(), Error> {
        let leased = match chain {
            Some(of_chain) => vec![Some(of_chain)],
            None => {
                let rails: Vec<_> = nics.iter().map(|nic| nic.plan.rail).collect();
                self.ipam.add(self.node, self.request, &rails)?
            }
        };
        for (nic, leased) in nics.iter_mut().zip(leased) {
            nic.leased = leased;
        }
        Ok(())
    }

    /// Completes the plans and writes them down. Netdevs of the host are kept from being moved until the
    /// children on them are made: a move that was quicker has taken the netdev, and the kernel refuses
    /// the child.
    fn plan(&mut self, nics: &mut [Nic]) -> Result<Lock, Error> {
        if self.config.attach != Attach::RdmaOnly {
            self.give(nics)?;
        }
        for Nic { plan, .. } in &*nics {
            self.node.log.debug(format_args!("plan: {plan}"));
        }
        let below = nics.iter().filter_map(|nic| match &nic.plan.resolved {
            Resolved::Child { parent, .. } => Some(parent),
            _ => None,
        });
        let of = |host: &HostLink| Identity::on(&self.node.roots, &host.link);
        let identities: Vec<Identity> = below.clone().map(of).collect();
        let kept = self.node.journal.lock_all(&identities, Sharing::Shared)?;
        for host in below {
            recover::check_unclaimed(self.node, host)?;
        }
        let parts = nics.iter().map(|nic| nic.plan.part()).collect();
        let record = self.record_of(parts)?;
        self.write_down(record)?;
        Ok(kept)
    }

    /// Makes the interfaces; RDMA devices move first.
    fn make(&mut self, nics: &mut [Nic]) -> Result<(), Error> {
        let mut devices = Vec::new();
        let numbers = self.numbers();
        for Nic { plan, .. } in &mut *nics {
            if let (Some(taken), Resolved::Move(host)) = (&plan.snapshot, &mut plan.resolved) {
                let journal = &self.node.journal;
                journal.take(&taken.identity, self.key, &self.node.boot)?;
                host.link = vf::apply(self.node, taken, host.link.clone(), numbers)?;
            }
            devices.extend(plan.rdma.iter().cloned());
        }
        rdma::move_in(self.node, self.pod, &devices, numbers)?;
        for nic in &mut *nics {
            nic.link = apply::make(&mut self.node.netns, self.pod, self.inside, &nic.plan)
                .map_err(|refused| resolve::explain(self.node, &nic.plan.resolved, refused))?;
        }
        Ok(())
    }

    /// Gives the interfaces what they are to have, and announces them.
    fn configure(&mut self, nics: &mut [Nic]) -> Result<(), Error> {
        let name = netlink::Name::from(self.id.ifname.as_str());
        let mut links = nics.iter().filter_map(|nic| nic.link.as_ref());
        // Runtimes search for an interface of the call's name.
        if let Some(first) = links
            .clone()
            .next()
            .filter(|_| links.all(|link| link.name != name))
        {
            link::add_altname(self.inside, first, &name)?;
        }
        let (inside, proc) = (&mut *self.inside, &self.node.roots.proc);
        self.pod.enter(&self.node.netns.namespace, || {
            for nic in &mut *nics {
                if let (Some(link), Some(given)) = (&mut nic.link, &nic.plan.given) {
                    *link = apply::configure(inside, proc, link, given)?;
                }
            }
            let made = nics.iter_mut().filter_map(|Nic { plan, link, .. }| {
                Some((link.as_mut()?, plan.given.as_ref()?, plan.config.attach))
            });
            apply::announce(inside, made)
        })??;
        self.note_carriers(nics)
    }
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
            "CNI_IFNAME {name} is not a name for an interface: /proc/sys/net has settings of all \
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
