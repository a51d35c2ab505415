//! Decides what each pool consists of: pure functions of the configuration and a scan.
//!
//! Once listed, an HCA stays: what disappears is Unhealthy, not dropped, because the kubelet takes
//! a unit that is missing from a list for one that never was, and shows pods that hold it as well.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use hca::uplink::{Uplinks, Why};
use hca::{FunctionKind, Hca, HcaId, LinkLayer, NetnsMode, Reserved};

use crate::config::selector::Match;
use crate::config::{Config, Exclude, PoolConfig, PortHealth, ResourceName, Sharing};
use crate::device_nodes::HcaDevices;
use crate::holdings::{HcaAllocation, Holder};
use crate::host_snapshot::HostSnapshot;
use crate::plan::World;
use crate::snapshot::{Health, Member, Snapshot, UnhealthyReason};

/// Shares of an HCA whose ports have no GID table that pods fill (InfiniBand).
const DEFAULT_SHARES: u32 = 128;
/// Bytes of one message that the kubelet's gRPC client accepts.
const MESSAGE_BYTES: usize = 4 * 1024 * 1024;
/// Bytes of a unit in that message next to its identity: field headers, health, topology.
const UNIT_BYTES: usize = 24;

/// All pools of a configuration at one moment, in its order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pools {
    /// One for each configured pool.
    pub snapshots: Vec<Snapshot>,
    /// HCAs that a pool's selectors choose and that are not in it, and why.
    pub excluded: Vec<Excluded>,
    /// What an administrator should know about the way this configuration meets this host.
    pub remarks: Vec<String>,
}

/// An HCA that is chosen by a pool and is not in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Excluded {
    /// The pool.
    pub resource: ResourceName,
    /// The HCA.
    pub id: HcaId,
    /// Why.
    pub reason: Reason,
}

/// Why a pool does not have an HCA that its selectors choose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    /// It serves the platform.
    Reserved(Reserved),
    /// Another pool has it, and at least one of the two is exclusive.
    Claimed(ResourceName),
    /// It has virtual functions.
    HasVfs(usize),
    /// The node itself needs its netdev, and why.
    Uplink(String, Why),
    /// Whether the node itself needs its netdev is not known.
    UplinksUnknown(String),
    /// A pod holds it by a unit of this resource, and one of the two has it for itself.
    Held(String, Holder),
}

impl Reason {
    /// How much it matters to an administrator.
    pub fn level(&self) -> tracing::Level {
        match self {
            Self::Claimed(_) | Self::UplinksUnknown(_) => tracing::Level::ERROR,
            Self::Held(..) => tracing::Level::WARN,
            Self::HasVfs(_) | Self::Uplink(..) | Self::Reserved(_) => tracing::Level::INFO,
        }
    }
}

impl fmt::Display for Excluded {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            resource,
            id,
            reason,
        } = self;
        match reason {
            Reason::Reserved(reserved) => {
                write!(formatter, "{id} is excluded from {resource}: {reserved}")
            }
            Reason::Claimed(by) => write!(
                formatter,
                "{id} is chosen by {by} and by {resource}, and at least one of them is \
                 exclusive; {by}, which comes first, has it; narrow the selectors of one of them"
            ),
            Reason::HasVfs(count) => write!(
                formatter,
                "{id} is excluded from {resource}: it has {count} virtual functions, which are what \
                 can be offered"
            ),
            Reason::Uplink(netdev, why) => write!(
                formatter,
                "{id} is excluded from {resource}: the node itself needs {netdev}: {why}; if pods may \
                 have it, set exclude for this pool without uplinks"
            ),
            Reason::Held(by, pod) => write!(
                formatter,
                "{id} is excluded from {resource} until {pod} ends, which holds it as {by}"
            ),
            Reason::UplinksUnknown(reason) => write!(
                formatter,
                "{id} is excluded from {resource}: whether the node itself needs its netdev is not \
                 known: {reason}; mount the host's /proc, or set exclude for this pool without uplinks"
            ),
        }
    }
}

/// Makes the pools from the candidates of a scan; `previous` are the ones made before from
/// the same configuration.
pub fn assemble(
    config: &Config,
    candidates: &[Hca],
    seen: &HostSnapshot,
    previous: &[Arc<Snapshot>],
) -> Pools {
    let world = World::default();
    assemble_on(config, candidates, seen, previous, &world, &Held::new())
}

/// HCAs that pods hold. What one of them has for itself, by whatever resource, is not offered to
/// another one. So a changed configuration cannot offer an HCA twice.
pub type Held = BTreeMap<HcaId, Vec<HcaAllocation>>;

/// The same on a node where more is known than its hardware.
pub fn assemble_on(
    config: &Config,
    candidates: &[Hca],
    seen: &HostSnapshot,
    previous: &[Arc<Snapshot>],
    world: &World,
    held: &Held,
) -> Pools {
    let candidates: Vec<_> = candidates.iter().cloned().map(Arc::new).collect();
    let mut remarks = Vec::new();
    let mut excluded = Vec::new();
    let mut claims: Vec<(&HcaId, &PoolConfig)> = Vec::new();
    let mut snapshots = Vec::new();
    let machine = Arc::new(seen.machine.clone());
    for pool in &config.pools {
        let withheld = withheld(pool, config, &candidates, world);
        let mut members = Vec::new();
        let before = previous
            .iter()
            .find(|before| *before.resource() == pool.resource);
        let before = before.iter().flat_map(|before| before.members());
        // What the pool has not offered yet is not kept in it.
        let before = before.filter(|old| !old.waits_for_kubelet());
        for candidate in &candidates {
            let held = held.get(&candidate.id).into_iter().flatten();
            // A unit that stands for the whole pool keeps no HCA in it.
            let is_pooled = matches!(pool.sharing, Sharing::Pooled { .. });
            let is_held = !is_pooled && held.clone().any(|holding| is_of(holding, pool));
            let is_chosen = match choice(pool, candidate) {
                Some(Match::Yes) => true,
                Some(Match::Hidden) => is_held,
                Some(Match::No) | None => false,
            };
            let obstacle = is_chosen.then(|| {
                held_otherwise(pool, held).or_else(|| obstacle(pool, candidate, seen, &claims))
            });
            match obstacle {
                Some(None) => {
                    // What is not offered does not keep an HCA from another pool.
                    if withheld.is_none() {
                        claims.push((&candidate.id, pool));
                    }
                    members.push(member(pool, candidate, seen, world));
                    continue;
                }
                Some(Some(reason)) => excluded.push(Excluded {
                    resource: pool.resource.clone(),
                    id: candidate.id.clone(),
                    reason,
                }),
                None => {}
            }
            // A container of its pod that starts again gets its nodes. Nobody else does.
            if is_held || before.clone().any(|old| old.hca.id == candidate.id) {
                let mut member = member(pool, candidate, seen, world);
                member.health.add(UnhealthyReason::Excluded);
                members.push(member);
            }
        }
        for old in before {
            if !candidates
                .iter()
                .any(|candidate| candidate.id == old.hca.id)
            {
                members.push(Member {
                    nodes: Vec::new(),
                    health: Health::from([UnhealthyReason::Gone]),
                    ..old.clone()
                });
            }
        }
        members.sort_by(|a, b| a.hca.id.cmp(&b.hca.id));
        if let Some(reason) = withheld {
            remarks.push(format!("{} is withheld: {reason}", pool.resource));
            for member in &mut members {
                member.health.add(reason.clone());
            }
        }
        let shared_units = units(pool, &mut members, &mut remarks);
        let mut pool = pool.clone();
        if !seen.vhost_net && !pool.extra_nodes.is_empty() {
            pool.extra_nodes.clear();
            remarks.push(format!(
                "{}: containers go without /dev/vhost-net and /dev/net/tun, which this host does not \
                 have; load vhost_net and tun",
                pool.resource
            ));
        }
        snapshots.push(Snapshot::new(
            Arc::new(pool),
            shared_units,
            members,
            machine.clone(),
        ));
    }
    Pools {
        snapshots,
        excluded,
        remarks,
    }
}

/// Why a pool with late binding has nothing to offer, if so. Its units name no HCA, so one that
/// another pool offers, too, could be given twice; and containers get them by CDI alone.
fn withheld(
    pool: &PoolConfig,
    config: &Config,
    candidates: &[Arc<Hca>],
    world: &World,
) -> Option<UnhealthyReason> {
    let Sharing::Late(_) = pool.sharing else {
        return None;
    };
    if let Some(obstacle) = world.undelivered.get(&pool.resource) {
        return Some(UnhealthyReason::Delivery(format!(
            "binding late needs CDI, and {obstacle}"
        )));
    }
    let for_pods = candidates.iter().filter(|one| one.reserved().is_none());
    let mut own = for_pods.filter(|one| is_chosen(pool, one));
    own.find_map(|candidate| {
        let others = config.pools.iter();
        let mut others = others.filter(|other| other.resource != pool.resource);
        let other = others.find(|other| is_chosen(other, candidate))?;
        Some(UnhealthyReason::Overlap(format!(
            "{} is chosen by {}, too, and a pool with binding late shares no HCA with another one; \
             narrow the selectors of one of them",
            candidate.id, other.resource
        )))
    })
}

/// What the best of a pool's selectors says.
fn choice(pool: &PoolConfig, candidate: &Hca) -> Option<Match> {
    pool.selectors
        .iter()
        .map(|one| one.matches(candidate))
        .max()
}

fn is_chosen(pool: &PoolConfig, candidate: &Hca) -> bool {
    choice(pool, candidate) == Some(Match::Yes)
}

/// Whether an HCA is held by a unit of this pool. One that was bound late is of no unit that names it.
fn is_of(holding: &HcaAllocation, pool: &PoolConfig) -> bool {
    let is_late = matches!(pool.sharing, Sharing::Late(_));
    holding.resource == pool.resource.as_str()
        && holding.exclusive != pool.sharing.is_shared()
        && (is_late || !holding.late)
}

/// The pod that keeps a pool from having an HCA, if there is one.
fn held_otherwise<'h>(
    pool: &PoolConfig,
    mut held: impl Iterator<Item = &'h HcaAllocation>,
) -> Option<Reason> {
    let conflicts = |holding: &&HcaAllocation| {
        !is_of(holding, pool) && (holding.exclusive || !pool.sharing.is_shared())
    };
    let holding = held.find(conflicts)?;
    Some(Reason::Held(
        holding.resource.clone(),
        holding.holder.clone(),
    ))
}

/// Why a pool cannot have an HCA that it chooses. An HCA may be in several pools only if all of
/// them share it.
fn obstacle(
    pool: &PoolConfig,
    candidate: &Hca,
    seen: &HostSnapshot,
    claims: &[(&HcaId, &PoolConfig)],
) -> Option<Reason> {
    if let Some(reserved) = candidate.reserved() {
        return Some(Reason::Reserved(reserved.clone()));
    }
    let claimed = claims.iter().find(|(id, by)| {
        **id == candidate.id && !(by.sharing.is_shared() && pool.sharing.is_shared())
    });
    if let Some((_, by)) = claimed {
        return Some(Reason::Claimed(by.resource.clone()));
    }
    let vfs = candidate.virtual_functions();
    if pool.exclude.contains(&Exclude::PfsWithVfs) && vfs > 0 {
        return Some(Reason::HasVfs(vfs));
    }
    if !pool.exclude.contains(&Exclude::Uplinks) || candidate.elsewhere {
        return None;
    }
    // A netdev in a pod is not an uplink. Another netdev can have its name now.
    let mut netdevs = candidate
        .netdev_names()
        .filter(|name| seen.inventory.netdev(name).is_some());
    match &seen.uplinks {
        Uplinks::Known(uplinks) => netdevs.find_map(|name| {
            let why = uplinks.get(name)?;
            Some(Reason::Uplink(name.to_owned(), why.clone()))
        }),
        Uplinks::Unknown(reason) => netdevs
            .next()
            .map(|_| Reason::UplinksUnknown(reason.clone())),
    }
}

fn member(pool: &PoolConfig, hca: &Arc<Hca>, seen: &HostSnapshot, world: &World) -> Member {
    let (nodes, lacking) = HcaDevices::scanned(hca, seen).nodes(&pool.nodes);
    let mode = (pool.sharing.is_shared()
        && seen.inventory.netns_mode == Some(NetnsMode::Exclusive))
    .then(|| {
        UnhealthyReason::NetnsMode(
            "the RDMA subsystem is in exclusive network namespace mode, in which an HCA cannot be \
             shared by pods; run: rdma system set netns shared"
                .into(),
        )
    });
    let missing = pool.wait_for.iter();
    let missing = missing.filter(|gate| seen.missing.contains(*gate));
    let missing: Vec<String> = missing.map(ToString::to_string).collect();
    let waits = (!missing.is_empty()).then(|| {
        UnhealthyReason::WaitFor(format!(
            "the pool waits for {} (waitFor)",
            missing.join(", ")
        ))
    });
    let is_late = matches!(pool.sharing, Sharing::Late(_));
    let undelivered = world.undelivered.get(&pool.resource).cloned();
    let undelivered = undelivered.filter(|_| !is_late);
    let child = world.children.get(&hca.id).cloned();
    let process = world.bindings.in_use.get(&hca.id).cloned();
    let process = process.filter(|_| !pool.sharing.is_shared());
    // Of an HCA that cannot be read, nodes and ports are not known.
    let of_hca = match &hca.fault {
        Some(fault) => vec![UnhealthyReason::Unreadable(fault.clone())],
        None => lacking
            .map(UnhealthyReason::DeviceNode)
            .into_iter()
            .chain(port_fault(pool, hca).map(UnhealthyReason::Port))
            .collect(),
    };
    let reasons = mode.into_iter().chain(waits);
    let reasons = reasons.chain(child.map(UnhealthyReason::Child));
    let reasons = reasons.chain(process.map(UnhealthyReason::InUse));
    let reasons = reasons.chain(undelivered.map(UnhealthyReason::Delivery));
    Member {
        hca: hca.clone(),
        nodes,
        shares: 0,
        health: Health::from(reasons.chain(of_hca)),
    }
}

/// Why no port of an HCA can carry traffic, if so.
fn port_fault(pool: &PoolConfig, candidate: &Hca) -> Option<String> {
    // In a pod's namespace its ports cannot be seen: that pod judges them.
    if candidate.elsewhere || pool.port_health == PortHealth::Ignored {
        return None;
    }
    let ports: Vec<_> = candidate.ports().collect();
    let may_be_down = pool.port_health == PortHealth::ActiveUnlessSetDown;
    if ports
        .iter()
        .any(|(_, port)| port.is_active() || may_be_down && waits_for_cni(candidate, port))
    {
        return None;
    }
    let states: Vec<String> = ports
        .iter()
        .map(|(device, port)| {
            format!(
                "{}/{} is {} ({})",
                device.name, port.number, port.state, port.phys_state
            )
        })
        .collect();
    let states = if states.is_empty() {
        "it has no port".into()
    } else {
        states.join(", ")
    };
    Some(format!("no active port: {states}"))
}

/// Whether a port is down because the CNI plugin has yet to set it up: its netdev is
/// administratively down. On InfiniBand the netdev has no say in the port's state, but a VF's port
/// stays down until the VF has its GUID, and the CNI plugin gives it that.
fn waits_for_cni(candidate: &Hca, port: &hca::Port) -> bool {
    let is_down = candidate.netdev_of(port).is_some_and(|netdev| !netdev.up);
    match port.link_layer {
        LinkLayer::Ethernet => is_down,
        LinkLayer::InfiniBand | LinkLayer::Unknown => {
            is_down && candidate.function().kind == FunctionKind::Vf
        }
    }
}

/// Sets the units of each member, within what a GID table and one message can hold. Returns the number
/// of units that each stand for all members.
fn units(pool: &PoolConfig, members: &mut [Member], remarks: &mut Vec<String>) -> u32 {
    let room = |member: &Member| {
        let ports = member.hca.ports();
        let roce = ports.filter(|(_, port)| port.link_layer == LinkLayer::Ethernet);
        roce.filter_map(|(_, port)| port.gids.pods()).min()
    };
    match pool.sharing {
        Sharing::Exclusive { .. } | Sharing::Late(_) => {
            members.iter_mut().for_each(|member| member.shares = 1);
            0
        }
        Sharing::Pooled { units } => {
            let room = members.iter().filter_map(room).min();
            if let (Some(units), Some(room)) = (units, room)
                && units > room
            {
                remarks.push(too_many(pool, units, room));
            }
            units.or(room).unwrap_or(DEFAULT_SHARES)
        }
        Sharing::Shares { per_hca, .. } => {
            let mut warned = false;
            for member in members.iter_mut() {
                let room = room(member);
                if let (Some(shares), Some(room), false) = (per_hca, room, warned)
                    && shares > room
                {
                    remarks.push(too_many(pool, shares, room));
                    warned = true;
                }
                // One that is gone keeps the shares it had.
                member.shares = match (per_hca, member.shares) {
                    (Some(shares), _) => shares,
                    (None, 0) => room.unwrap_or(DEFAULT_SHARES),
                    (None, had) => had,
                };
            }
            fit_one_message(pool, members, remarks);
            0
        }
    }
}

fn too_many(pool: &PoolConfig, units: u32, room: u32) -> String {
    format!(
        "{} offers {units} units, but the GID table of its ports has room for the addresses of \
         about {room} pods; beyond that a pod's interface gets no GID and RoCE fails in it",
        pool.resource
    )
}

/// Lowers all members alike until the list fits one message, so that it is never refused whole.
fn fit_one_message(pool: &PoolConfig, members: &mut [Member], remarks: &mut Vec<String>) {
    let shares = members.iter().map(|member| member.shares);
    let asked = shares.max().unwrap_or_default();
    let unit = |member: &Member| {
        let identity = member.hca.id.to_string().len() + "_01234567_".len() + 5;
        identity + UNIT_BYTES
    };
    let bytes: usize = members.iter().map(unit).sum();
    let fits = u32::try_from(MESSAGE_BYTES / bytes.max(1)).unwrap_or(u32::MAX);
    if asked <= fits {
        return;
    }
    members
        .iter_mut()
        .for_each(|member| member.shares = member.shares.min(fits));
    remarks.push(format!(
        "{}: {asked} shares of each of {} HCAs do not fit one message to the kubelet (4 MiB); \
         {fits} of each are offered",
        pool.resource,
        members.len()
    ));
}

#[cfg(test)]
mod tests;
