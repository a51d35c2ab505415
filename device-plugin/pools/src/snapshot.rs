//! What is sent to the kubelet about one resource: immutable once made, shared by reference.

use std::fmt;
use std::sync::Arc;

use hca::topology::Machine;
use hca::topology::distance::{Distance, distance};
use hca::unit::{HcaId, PoolTag, UnitId};
use kubelet_api::deviceplugin::{
    Device, HEALTHY, ListAndWatchResponse, NumaNode, TopologyInfo, UNHEALTHY,
};
use node_wire::status::UnitCounts;
use serde::Serialize;

use crate::config::{Late, NodeClass, PoolConfig, ResourceName, Sharing};
use hca::Hca;

/// One resource at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    pool: Arc<PoolConfig>,
    tag: PoolTag,
    /// Units that each stand for all members; 0 in other pools.
    shared_units: u32,
    members: Vec<Member>,
    /// The units of a pool with late binding; empty in others.
    slots: Vec<Slot>,
    machine: Arc<Machine>,
}

/// One HCA in a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// The HCA, as it was seen last.
    pub hca: Arc<Hca>,
    /// Nodes that a container gets with it, in a fixed order.
    pub nodes: Vec<DeviceNode>,
    /// Units it is good for in a pool of shares.
    pub shares: u32,
    /// Whether it can be used.
    pub health: Health,
}

/// A unit of a pool with late binding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    /// Its number, from 0.
    pub number: u32,
    /// The NUMA node that the daemon reports to the kubelet.
    pub numa_node: Option<u32>,
    /// Whether the kubelet may allocate it.
    pub health: Health,
    /// The HCA that it is bound to.
    pub bound: Option<HcaId>,
}

/// A character device of the host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceNode {
    /// What it is.
    pub class: NodeClass,
    /// Path on the host, which is also the path in the container.
    pub path: String,
}

/// All that keeps an HCA from being used, worst first; nothing if it can be used.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Health(Vec<UnhealthyReason>);

/// Why an HCA cannot be used. The order is the rank: the first one is the worst.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum UnhealthyReason {
    /// It was there and is not any more.
    Gone,
    /// It is there, but not for this pool any more.
    Excluded,
    /// Another pool offered it, and which pods hold it is to be asked.
    Handover(String),
    /// Another pool chooses HCAs of this one, and which of them it has is decided late.
    Overlap(String),
    /// The namespace mode of the RDMA subsystem does not allow what the pool is for.
    NetnsMode(String),
    /// What the pool waits for is not there yet.
    WaitFor(String),
    /// It is there, and an attribute of it cannot be read: what was read and what the kernel said.
    Unreadable(String),
    /// What containers would need to get it could not be put in place.
    Delivery(String),
    /// Its netdev returned from a pod that left a child on it.
    Child(String),
    /// A process of an ended pod uses it.
    InUse(String),
    /// A device node that the pool requires is missing.
    DeviceNode(String),
    /// No port can carry traffic.
    Port(String),
    /// A port that can, but has changed too often of late.
    Flapping(String),
}

impl fmt::Display for UnhealthyReason {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UnhealthyReason::Gone => formatter.write_str("not seen on this host any more"),
            UnhealthyReason::Excluded => formatter.write_str("not chosen for this pool any more"),
            UnhealthyReason::Unreadable(reason)
            | UnhealthyReason::WaitFor(reason)
            | UnhealthyReason::Delivery(reason)
            | UnhealthyReason::DeviceNode(reason)
            | UnhealthyReason::Port(reason)
            | UnhealthyReason::Flapping(reason)
            | UnhealthyReason::Overlap(reason)
            | UnhealthyReason::Handover(reason)
            | UnhealthyReason::Child(reason)
            | UnhealthyReason::InUse(reason)
            | UnhealthyReason::NetnsMode(reason) => formatter.write_str(reason),
        }
    }
}

impl Member {
    /// Whether another pool offered it until a moment ago.
    pub fn waits_for_kubelet(&self) -> bool {
        self.health
            .has(|reason| matches!(reason, UnhealthyReason::Handover(_)))
    }

    /// Whether its nodes can be handed over, whatever its ports do.
    pub fn is_deliverable(&self) -> bool {
        self.health.obstacle().is_none()
    }
}

impl<T: IntoIterator<Item = UnhealthyReason>> From<T> for Health {
    fn from(reasons: T) -> Self {
        let mut health = Self::default();
        reasons.into_iter().for_each(|reason| health.add(reason));
        health
    }
}

impl Health {
    /// Whether it can be used.
    pub fn is_healthy(&self) -> bool {
        self.0.is_empty()
    }

    /// Why it cannot, worst first.
    pub fn reasons(&self) -> &[UnhealthyReason] {
        &self.0
    }

    /// The worst of the reasons.
    pub fn worst(&self) -> Option<&UnhealthyReason> {
        self.0.first()
    }

    /// The worst of the reasons that keep a container from getting it; what its ports do is none.
    pub fn obstacle(&self) -> Option<&UnhealthyReason> {
        self.0.iter().find(|reason| {
            !matches!(
                reason,
                UnhealthyReason::Port(_) | UnhealthyReason::Flapping(_)
            )
        })
    }

    /// Whether there is such a reason.
    pub fn has(&self, is_one: impl Fn(&UnhealthyReason) -> bool) -> bool {
        self.0.iter().any(is_one)
    }

    /// Adds a reason.
    pub fn add(&mut self, reason: UnhealthyReason) {
        let place = self.0.partition_point(|known| *known < reason);
        if self.0.get(place) != Some(&reason) {
            self.0.insert(place, reason);
        }
    }

    /// Removes such reasons.
    pub fn remove(&mut self, is_one: impl Fn(&UnhealthyReason) -> bool) {
        self.0.retain(|reason| !is_one(reason));
    }
}

/// What a unit's identity stands for.
#[derive(Debug, Clone, Copy)]
pub enum Unit<'s> {
    /// One member.
    Member(&'s Member),
    /// All members of the pool.
    Pool,
    /// A member that is decided late.
    Slot(&'s Slot),
}

impl Snapshot {
    /// A snapshot of a pool; members are in the order in which they are listed. `shared_units` is the
    /// number of units that each stand for all members.
    pub fn new(
        pool: Arc<PoolConfig>,
        shared_units: u32,
        members: Vec<Member>,
        machine: Arc<Machine>,
    ) -> Self {
        Self {
            tag: PoolTag::of(pool.resource.as_str()),
            pool,
            shared_units,
            members,
            slots: Vec::new(),
            machine,
        }
    }

    /// The pool as configured, without what this host does not have.
    pub fn pool(&self) -> &PoolConfig {
        &self.pool
    }

    /// How its units become HCAs, if that is decided late.
    pub fn late(&self) -> Option<Late> {
        match self.pool.sharing {
            Sharing::Late(late) => Some(late),
            _ => None,
        }
    }

    /// The machine that the members are in.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// How far two members are from each other in the machine.
    pub fn distance(&self, a: &Member, b: &Member) -> Option<Distance> {
        let (a, b) = (a.hca.place()?, b.hca.place()?);
        Some(distance(&a, &b, &self.machine.numa))
    }

    /// The resource.
    pub fn resource(&self) -> &ResourceName {
        &self.pool.resource
    }

    /// Units that each stand for all members; 0 in other pools.
    pub fn shared_units(&self) -> u32 {
        self.shared_units
    }

    /// The HCAs.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// The HCAs, to be changed before the snapshot is shown to anybody.
    pub fn members_mut(&mut self) -> &mut [Member] {
        &mut self.members
    }

    /// Whether a unit stands for all HCAs of the pool.
    pub fn is_pooled(&self) -> bool {
        matches!(self.pool.sharing, Sharing::Pooled { .. })
    }

    /// The units of a pool with late binding.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Sets the units of a pool with late binding, before the snapshot is shown to anybody.
    pub fn set_slots(&mut self, slots: Vec<Slot>) {
        self.slots = slots;
    }

    /// The name of a slot.
    pub fn slot_name(&self, number: u32) -> String {
        let pool = self.tag;
        UnitId::Slot { pool, slot: number }.to_string()
    }

    /// The number of a slot of this resource by its name.
    pub fn slot_number(&self, id: &str) -> Option<u32> {
        match id.parse() {
            Ok(UnitId::Slot { pool, slot }) if pool == self.tag => Some(slot),
            _ => None,
        }
    }

    /// Drops HCAs for good.
    pub fn forget(&mut self, is_over: impl Fn(&Member) -> bool) {
        self.members.retain(|member| !is_over(member));
    }

    /// The unit of this identity; `None` if the resource has none such.
    pub fn unit(&self, id: &str) -> Option<Unit<'_>> {
        let member = |hca: &HcaId| self.members.iter().find(|member| member.hca.id == *hca);
        match (self.pool.sharing, id.parse::<UnitId>().ok()?) {
            (Sharing::Pooled { .. }, UnitId::Pool { pool, share }) => {
                (pool == self.tag && share < self.shared_units && !self.members.is_empty())
                    .then_some(Unit::Pool)
            }
            (Sharing::Shares { .. }, UnitId::Shared { hca, pool, share }) => member(&hca)
                .filter(|member| pool == self.tag && share < member.shares)
                .map(Unit::Member),
            (Sharing::Exclusive { .. }, UnitId::Exclusive(hca)) => member(&hca).map(Unit::Member),
            (Sharing::Late(_), UnitId::Slot { pool, slot }) if pool == self.tag => {
                let slot = self.slots.iter().find(|known| known.number == slot);
                slot.map(Unit::Slot)
            }
            _ => None,
        }
    }

    /// The HCAs that a unit of this resource stands for; empty if the identity is none of ours.
    ///
    /// A pod may hold a unit that is not offered any more, from a time with more shares or another
    /// mode. Such a unit stands for its HCAs as well. A share of the whole pool stands for the
    /// members that the pool has now.
    pub fn hcas(&self, id: &str) -> Vec<HcaId> {
        match id.parse() {
            Ok(UnitId::Exclusive(hca)) => vec![hca],
            Ok(UnitId::Shared { hca, pool, .. }) if pool == self.tag => vec![hca],
            Ok(UnitId::Slot { pool, slot }) if pool == self.tag => {
                let slot = self.slots.iter().find(|known| known.number == slot);
                slot.into_iter()
                    .filter_map(|slot| slot.bound.clone())
                    .collect()
            }
            Ok(UnitId::Pool { pool, .. }) if pool == self.tag => {
                let present = self.members.iter().filter(|member| {
                    !member.health.has(|reason| {
                        matches!(
                            reason,
                            UnhealthyReason::Gone
                                | UnhealthyReason::Excluded
                                | UnhealthyReason::Handover(_)
                        )
                    })
                });
                present.map(|member| member.hca.id.clone()).collect()
            }
            _ => Vec::new(),
        }
    }

    /// What the names of a member's units begin with: its shares have a number after it.
    pub fn unit_prefix(&self, member: &Member) -> String {
        match self.pool.sharing.is_shared() {
            true => format!("{}_{}_", member.hca.id, self.tag),
            false => member.hca.id.to_string(),
        }
    }

    /// The units as the kubelet is to see them, healthy and not.
    fn groups(&self) -> Vec<Group> {
        let of_member = |member: &Member, prefix: String, shares: Option<u32>| Group {
            prefix,
            shares,
            healthy: member.health.is_healthy(),
            numa_node: member
                .hca
                .numa_node()
                .filter(|_| !self.pool.exclude_topology),
        };
        let members = self.members.iter();
        match self.pool.sharing {
            Sharing::Pooled { .. } if self.members.is_empty() => Vec::new(),
            Sharing::Pooled { .. } => vec![Group {
                prefix: format!("pool_{}_", self.tag),
                shares: Some(self.shared_units),
                // Its units stand for all members: it is usable while one is.
                healthy: members.clone().any(|member| member.health.is_healthy()),
                numa_node: None,
            }],
            Sharing::Shares { .. } => members
                .map(|member| of_member(member, self.unit_prefix(member), Some(member.shares)))
                .collect(),
            Sharing::Exclusive { .. } => members
                .map(|member| of_member(member, self.unit_prefix(member), None))
                .collect(),
            Sharing::Late(_) => {
                let group = |slot: &Slot| Group {
                    prefix: self.slot_name(slot.number),
                    shares: None,
                    healthy: slot.health.is_healthy(),
                    numa_node: slot.numa_node.filter(|_| !self.pool.exclude_topology),
                };
                self.slots.iter().map(group).collect()
            }
        }
    }

    /// Units, healthy and not.
    pub fn count(&self) -> UnitCounts {
        let mut counts = UnitCounts::default();
        for group in self.groups() {
            let count = match group.healthy {
                true => &mut counts.healthy,
                false => &mut counts.unhealthy,
            };
            *count += u64::from(group.shares.unwrap_or(1));
        }
        counts
    }

    /// Whether both snapshots give the kubelet the same list.
    pub fn lists_the_same(&self, other: &Self) -> bool {
        self.groups() == other.groups()
    }

    /// The list for the kubelet.
    pub fn listing(&self) -> ListAndWatchResponse {
        let groups = self.groups();
        let devices = groups.iter().flat_map(|group| {
            let shares = group.shares.into_iter().flat_map(|shares| 0..shares);
            let ids = shares.map(|share| format!("{}{share}", group.prefix));
            let whole = group.shares.is_none().then(|| group.prefix.clone());
            ids.chain(whole).map(|id| group.device(id))
        });
        ListAndWatchResponse {
            devices: devices.collect(),
        }
    }
}

/// Units that are alike but for their numbers.
#[derive(PartialEq)]
struct Group {
    /// What their IDs begin with.
    prefix: String,
    /// How many there are, numbered from 0; one without a number if none.
    shares: Option<u32>,
    healthy: bool,
    numa_node: Option<u32>,
}

impl Group {
    fn device(&self, id: String) -> Device {
        let node = |node| NumaNode {
            id: i64::from(node),
        };
        Device {
            id,
            health: if self.healthy { HEALTHY } else { UNHEALTHY }.into(),
            topology: self.numa_node.map(|numa| TopologyInfo {
                nodes: vec![node(numa)],
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Policy;
    use crate::example::named;

    fn snapshot(sharing: Sharing, members: &[(&str, Health)]) -> Snapshot {
        let members = members.iter().map(|(id, health)| Member {
            shares: 2,
            health: health.clone(),
            ..Member::example(named(id, &[]))
        });
        let resource = ResourceName::parse("rdma/a").unwrap();
        let pool = PoolConfig::new(resource, sharing, Vec::new());
        Snapshot::new(Arc::new(pool), 2, members.collect(), Arc::default())
    }

    #[test]
    fn a_unit_that_is_no_longer_offered_stands_for_its_hcas() {
        let tag = PoolTag::of("rdma/a");
        let (near, far) = ("0000:3b:00.0", "0000:d8:00.0");
        let port_down = Health::from([UnhealthyReason::Port("down".into())]);
        let members = [
            (near, Health::default()),
            (far, port_down),
            ("0000:5e:00.0", Health::from([UnhealthyReason::Gone])),
            ("0000:5f:00.0", Health::from([UnhealthyReason::Excluded])),
        ];
        for sharing in [
            Sharing::Pooled { units: Some(2) },
            Sharing::Shares {
                per_hca: None,
                policy: Policy::Spread,
            },
        ] {
            let snapshot = snapshot(sharing, &members);
            let hcas = |id: &str| -> Vec<String> {
                let hcas = snapshot.hcas(id);
                hcas.iter().map(ToString::to_string).collect()
            };
            // Slot 7 is from a time with more of them.
            for slot in [0, 7] {
                assert_eq!(hcas(&format!("pool_{tag}_{slot}")), [near, far]);
                assert_eq!(hcas(&format!("{far}_{tag}_{slot}")), [far]);
            }
            assert_eq!(hcas(near), [near]);
            for foreign in [
                "pool_00000000_0",
                "0000:3b:00.0_00000000_0",
                "0",
                "GPU-7c2f",
            ] {
                assert_eq!(hcas(foreign), Vec::<String>::new(), "{foreign}");
            }
        }
    }
}
