//! ADD: read → decide → lease → complete → write → act → answer.
//!
//! - *read*: the network, the chain's result, what the kubelet allocated, and the [`Facts`];
//! - *decide*: [`decide`], pure: the parts, and whether the pod may have them;
//! - *lease*: addresses for all of them; nothing of the host has changed yet;
//! - *complete*: [`addressing`], pure: addresses, routes and rules of each;
//! - *write*: the record, once; nothing of it is patched;
//! - *act*: [`attach`] makes what the record says;
//! - *answer*: the result, device information, GIDs.
//!
//! Before that, an earlier ADD of this attachment that died is undone, and a NIC that an orphaned
//! attachment left is reclaimed. Until the record is written, only leases change, which the IPAM finds by
//! container and interface. After it, a failure or a killed process is undone by the function that
//! serves DEL. The attachment is locked throughout.

use std::{collections::BTreeSet, time::Duration};

use attachment::{
    addresses::{self, Ipam},
    attach::attach,
    detach::{detach, living},
    journal::{
        Key, Record,
        record::{Netns, VERSION},
    },
    netdev::restore,
    node::{Node, now},
    part::Part,
    rdma,
};
use cni_wire::{AttachmentId, CniResult, Code, Dns, Request};
use hca::NetnsMode;
use netlink::{
    Namespace, Socket,
    link::{self, By},
    sysctl,
};
use serde_json::Value;

use super::pod_namespace;
use crate::{
    addressing::{self, addressing},
    answer::{self, Chain, Made},
    bind::{self, Bound},
    config::{Attach, ChildKind, Config},
    decide::{decide, refusals},
    error::Error,
    facts::{self, Facts, NodeNetwork, Reading, Units},
    orphan::{self, OwnNics},
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
    let call = Call::read(&node, request)?;
    // A network that is wrong for every NIC is refused before anything waits.
    if let Some(first) = refusals(&call.config, &call.facts(&node))
        .into_iter()
        .next()
    {
        return Err(first);
    }
    let pod = pod_namespace(&node, request)?;
    let attachment = node
        .journal
        .lock_attachment(&call.key, ATTACHMENT_LOCK_TIMEOUT)?;
    attachment.share_with_programs()?;
    let mut inside = pod.socket(&node.netns.namespace)?;
    undo_earlier(&mut node, &call, &pod, &mut inside)?;
    if call.config.attach != Attach::RdmaOnly {
        name_is_free(&mut inside, call.id.ifname.as_str(), &pod)?;
    }
    let bound = bind::bind(&node, request, &call.config)?;
    let mut recorded = None;
    let added = add(
        &mut node,
        &call,
        &pod,
        &mut inside,
        bound.as_ref(),
        &mut recorded,
    );
    let result =
        added.map_err(|first| undo(&mut node, &call.key, recorded, bound.as_ref(), first))?;
    Ok(result.to_json(request.config.version))
}

/// The way from facts to the answer; `recorded` is the record, once it is in the journal.
fn add(
    node: &mut Node,
    call: &Call<'_>,
    pod: &Namespace,
    inside: &mut Socket,
    bound: Option<&Bound>,
    recorded: &mut Option<Record>,
) -> Result<CniResult, Error> {
    let Call {
        request,
        config,
        ipam,
        ..
    } = call;
    let units = Units::read(node, request, config, bound)?;
    let own = OwnNics::take(node, request, config, &units)?;
    let mut reading = Reading {
        node,
        request,
        config,
        ipam,
        units: &units,
        network: NodeNetwork::default(),
    };
    let nics = reading.nics(&own.true_names)?;
    let facts = call
        .facts(node)
        .with_nics(node, request, config, units, nics)?;
    let parts = decide(config, &facts)?;
    for part in parts
        .iter()
        .filter(|part| part.name() != call.id.ifname.as_str())
    {
        name_is_free(inside, part.name(), pod)?;
    }
    if matches!(ipam, Ipam::None) {
        warn_of_left_addresses(node, &parts);
    }

    let leased = match &call.chain.taken {
        Some(of_chain) => vec![Some(of_chain.clone())],
        None => {
            let rails: Vec<_> = parts.iter().map(Part::rail).collect();
            ipam.add(node, request, &rails)?
        }
    };
    let completed = complete(config, &facts, parts, &leased, inside).and_then(|(parts, given)| {
        let record = call.record(node, pod, parts)?;
        for part in &record.parts {
            node.log.debug(format_args!("plan: {part}"));
        }
        let kept = orphan::keep_parents(node, &facts.parents())?;
        node.journal.write(&call.key, &record)?;
        Ok((record, given, kept))
    });
    let (record, given, kept) =
        completed.map_err(|error| ipam.release_after(node, request, error.into()))?;
    let nics = facts.nics;
    let record = recorded.insert(record);

    let links = attach(node, &call.key, record, pod, inside, kept)?;
    for ended in &own.ended {
        node.journal.forget(ended)?;
    }

    let of_part = record.parts.iter().zip(given).zip(links);
    let made = Made {
        dns: &call.dns,
        node,
        request,
        config,
        pod,
        record,
        interfaces: of_part
            .filter_map(|((part, given), link)| Some((facts::nic_of(&nics, part)?, given, link)))
            .collect(),
    };
    let gid_indexes = made.report(&call.chain.result)?;
    let result = made.result(call.chain.result.clone());
    if let Some(bound) = bound {
        bound.commit(node, gid_indexes)?;
    }
    Ok(result)
}

/// Without an IPAM a moved netdev takes its addresses along, but for those with a lifetime.
fn warn_of_left_addresses(node: &Node, parts: &[Part]) {
    for host in parts
        .iter()
        .filter_map(Part::moved)
        .map(|moved| &moved.host)
    {
        let stay = host.leased_addresses();
        if !host.static_addresses && !stay.is_empty() {
            node.log.warn(format_args!(
                "{} leaves addresses with a lifetime on the host: {}; to take them along, set \
                 \"fabricAddresses\": \"static\" in {}",
                host.name,
                stay.join(", "),
                node.policy.path.display()
            ));
        }
    }
}

/// Gives each interface its addresses, routes and rules, and says what is answered of them.
fn complete(
    config: &Config,
    facts: &Facts<'_>,
    mut parts: Vec<Part>,
    leased: &[Option<CniResult>],
    inside: &mut Socket,
) -> Result<(Vec<Part>, Vec<CniResult>), Error> {
    let request = |(part, leased)| -> Option<addressing::Request<'_>> {
        let (part, leased): (&Part, &Option<CniResult>) = (part, leased);
        let interface = part.interface()?;
        let host = facts::nic_of(&facts.nics, part)?.found.host_link();
        Some(addressing::Request {
            ifname: &interface.name,
            rail: interface.rail,
            config,
            mtu: interface.mtu.or(host.map(|host| host.link.mtu)),
            leased: leased.as_ref(),
            moved: part.moved().map(|moved| &moved.host),
        })
    };
    let requests: Vec<_> = parts.iter().zip(leased).filter_map(request).collect();
    let all = addressing(&requests, &facts::pod(inside, &requests)?)?;
    if all.is_empty() {
        return Ok((parts, vec![CniResult::default()]));
    }
    let interfaces = parts.iter_mut().filter_map(Part::interface_mut);
    let given = interfaces.zip(all).map(|(interface, addressing)| {
        interface.config = addressing.interface;
        addressing.result
    });
    let given = given.collect();
    Ok((parts, given))
}

/// What the runtime says, before anything of the host is read.
struct Call<'a> {
    request: &'a Request,
    id: &'a AttachmentId,
    key: Key,
    config: Config,
    chain: Chain,
    ipam: Ipam,
    dns: Dns,
    ranges: Option<BTreeSet<u32>>,
    mode: Option<Option<NetnsMode>>,
}

impl<'a> Call<'a> {
    fn read(node: &Node, request: &'a Request) -> Result<Self, Error> {
        let id = request.attachment()?;
        name_is_of_an_interface(id)?;
        let key = key_of(request, id)?;
        if request.config.raw().len() > MAX_CONFIG_BYTES {
            return Err(Error::advise(
                Code::InvalidConfig,
                format_args!("the network configuration is longer than {MAX_CONFIG_BYTES} bytes"),
                "the journal keeps it until DEL; leave out what no plugin reads",
            ));
        }
        request.config.has_each_key_once()?;
        let (policy, name) = (&node.policy.values, &request.config.name);
        let of_network = |e: cni_wire::Error| e.context(format_args!("network {name}"));
        let mut config = Config::read(request, &policy.pkeys).map_err(of_network)?;
        if !config.notes.is_empty() {
            let notes = config.notes.join("; ");
            node.log.warn(format_args!("network {name}: {notes}"));
        }
        let before = request.config.prev_result()?;
        if config.attach == Attach::RdmaOnly && before.is_none() {
            return Err(facts::needs_a_chain());
        }
        let before = before.unwrap_or_default();
        before
            .check_indexes()
            .map_err(|e| e.context("prevResult"))?;
        let is_ipvlan = config.attach == Attach::Child(ChildKind::Ipvlan);
        if is_ipvlan && config.master.is_none() && config.allocation.is_none() {
            config.master = answer::only_interface(&before)?;
        }
        let ipam = Ipam::of(node, request)?;
        Ok(Call {
            request,
            id,
            key,
            chain: Chain::of(before, is_ipvlan, &ipam, &policy.allow)?,
            dns: request.config.dns()?,
            ranges: ipam.rails(node, request).map_err(of_network)?,
            mode: facts::mode(node, &config)?,
            config,
            ipam,
        })
    }

    /// What is known without a NIC.
    fn facts<'n>(&self, node: &'n Node) -> Facts<'n> {
        Facts {
            ifname: self.id.ifname.to_string(),
            by_unit: self.config.allocation.is_some(),
            for_one: self.for_one(),
            ranges: self.ranges.clone(),
            mode: self.mode,
            ..Facts::without_pod(&node.policy.values, &node.policy.path)
        }
    }

    /// Why the addresses are not for several interfaces, if so.
    fn for_one(&self) -> Option<Error> {
        if self.chain.taken.is_none() {
            return self.ipam.serves_one().map(Error::from);
        }
        Some(Error::advise(
            Code::InvalidConfig,
            "the addresses of the list's interface cannot go over to several ipvlans",
            "set ipam, or leave devices out",
        ))
    }

    /// The IPAM is in it before it leases anything: a DEL that finds a record releases by that alone.
    fn record(&self, node: &Node, pod: &Namespace, parts: Vec<Part>) -> Result<Record, Error> {
        let netns = pod.id();
        let args = &self.request.env.args;
        let of_pod = (args.get("K8S_POD_NAMESPACE"), args.get("K8S_POD_NAME"));
        Ok(Record {
            version: VERSION,
            network: self.request.config.name.clone(),
            container_id: self.id.container_id.to_string(),
            ifname: self.id.ifname.to_string(),
            pod: match of_pod {
                (Some(namespace), Some(name)) => Some(format!("{namespace}/{name}")),
                _ => None,
            },
            created: now(),
            boot: node.boot.clone(),
            netns: Netns {
                path: pod.path().display().to_string(),
                device: netns.device,
                inode: netns.inode,
            },
            parts,
            ipam: addresses::note(self.request)?,
        })
    }
}

/// The journal's name for the attachment.
fn key_of(request: &Request, id: &AttachmentId) -> Result<Key, Error> {
    let name = &request.config.name;
    Key::of(name, id).ok_or_else(|| {
        Error::advise(
            Code::InvalidConfig,
            format_args!("name {name} is too long to keep a journal under"),
            "network name, container ID and interface together have at most 248 bytes",
        )
    })
}

/// Refuses names under which the kernel keeps the settings of all interfaces of the pod.
fn name_is_of_an_interface(id: &AttachmentId) -> Result<(), Error> {
    let name = id.ifname.as_str();
    if !sysctl::OF_NO_INTERFACE.contains(&name) {
        return Ok(());
    }
    Err(Error::advise(
        Code::InvalidEnvironment,
        format_args!(
            "CNI_IFNAME {name} is not a name for an interface: /proc/sys/net has settings of all \
             interfaces under it"
        ),
        "ask for another interface name",
    ))
}

fn name_is_free(inside: &mut Socket, name: &str, pod: &Namespace) -> Result<(), Error> {
    let Some(link) = link::get(inside, By::Name(name.as_bytes()))? else {
        return Ok(());
    };
    let kind = link.kind.map_or("link".to_owned(), |kind| kind.to_string());
    let pod = pod.path().display();
    Err(Error::advise(
        Code::Exists,
        format_args!("{pod} has an interface {name} already, a {kind}"),
        "ask for another interface name",
    ))
}

/// Undoes what was recorded, and frees the slots. The first error stays the first.
fn undo(
    node: &mut Node,
    key: &Key,
    recorded: Option<Record>,
    bound: Option<&Bound>,
    first: Error,
) -> Error {
    let undone = recorded.map_or(Ok(()), |record| {
        detach(node, key, &record, restore::RETURN_TIMEOUT)
    });
    if let Some(bound) = bound {
        bound.unbind(node);
    }
    match undone {
        Ok(()) => first,
        Err(e) => first.with_details(format!("undoing it failed too: {e}")),
    }
}

/// Undoes what an ADD that died left under the same name. One that lives is an error.
fn undo_earlier(
    node: &mut Node,
    call: &Call<'_>,
    pod: &Namespace,
    inside: &mut Socket,
) -> Result<(), Error> {
    let key = &call.key;
    let Some(record) = node.journal.read(key)? else {
        return node.journal.forget(key);
    };
    let lives = living(&record)?.is_some_and(|there| there.id() == pod.id());
    let mut interfaces = record.parts.iter().filter_map(Part::interface).peekable();
    let has_interface = interfaces.peek().is_some();
    let mut is_attached = lives;
    // An ADD that was killed between two of them was never answered, so that it is undone like one that
    // made none.
    for interface in interfaces {
        let name = By::Name(interface.name.as_bytes());
        is_attached = is_attached && link::get(inside, name)?.is_some();
    }
    if is_attached && !has_interface {
        let devices: Vec<_> = record.rdma().cloned().collect();
        is_attached = !devices.is_empty() && rdma::check(node, pod, &devices).is_ok();
    }
    let owner = record.owner();
    if is_attached {
        let remedy = match (has_interface, call.config.attach) {
            (true, Attach::RdmaOnly) => {
                "this plugin made the interface; leave rdma out there and attach rdma-only out of \
                 the list"
            }
            _ => "the runtime must DEL it first",
        };
        let network = &record.network;
        let what = format_args!("{owner} is attached to network {network} already");
        return Err(Error::advise(Code::Exists, what, remedy));
    }
    detach(node, key, &record, restore::RETURN_TIMEOUT)
        .map_err(|e| e.context(format_args!("undo an earlier attachment of {owner}")))
}
