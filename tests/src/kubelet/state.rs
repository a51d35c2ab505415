//! What the kubelet knows of devices: the lists plugins sent, who holds what,
//! and what the Node object says. Plain data; no socket, no file, no clock.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::{Duration, Instant};

use kubelet_api::deviceplugin::{ContainerAllocateResponse, Device, HEALTHY};
use thiserror::Error;

/// NUMA key of devices that came without a topology, in checkpoints and assignments.
pub(super) const NO_NUMA: i64 = -1;

/// One resource of the Node object, and how much of it pods hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Quantity {
    /// All devices the plugin listed.
    pub capacity: usize,
    /// The healthy ones.
    pub allocatable: usize,
    /// Devices assigned to containers.
    pub in_use: usize,
}

/// The Node object's extended resources by name. A resource once seen keeps its key.
pub type Node = BTreeMap<String, Quantity>;

/// What one container holds of one resource.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Assignment {
    pub(super) pod_uid: String,
    pub(super) container: String,
    pub(super) resource: String,
    /// IDs by NUMA node; one on two nodes is there twice, one on none under [`NO_NUMA`].
    pub(super) devices: BTreeMap<i64, Vec<String>>,
    pub(super) response: ContainerAllocateResponse,
}

impl Assignment {
    pub(super) fn ids(&self) -> BTreeSet<String> {
        self.devices.values().flatten().cloned().collect()
    }
}

/// The lists of one resource after its plugin's last message.
#[derive(Debug, Default)]
struct Listed {
    all: BTreeMap<String, Device>,
    // Two sets, so an ID listed as both is counted in both, as in the kubelet.
    healthy: BTreeSet<String>,
    unhealthy: BTreeSet<String>,
}

/// Why a container cannot get its devices; the kubelet's admission fails with it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refused {
    /// The container has devices already, but not as many as it now asks for.
    #[error("container {container} changed its request for {resource} from {had} to {wanted}")]
    Changed {
        /// Name of the container.
        container: String,
        /// The resource.
        resource: String,
        /// Devices it has.
        had: usize,
        /// Devices it asks for.
        wanted: usize,
    },
    /// No plugin has listed devices of the resource since the kubelet started.
    #[error("cannot allocate unregistered device {0}")]
    Unregistered(String),
    /// None of the resource's devices is healthy.
    #[error("no healthy devices present; cannot allocate unhealthy devices {0}")]
    NoneHealthy(String),
    /// A device the container already has is no longer healthy.
    #[error(
        "previously allocated devices are no longer healthy; cannot allocate unhealthy devices {0}"
    )]
    HeldUnhealthy(String),
    /// Fewer free healthy devices than asked for.
    #[error(
        "requested number of devices unavailable for {resource}: requested {wanted}, available {available}"
    )]
    TooFew {
        /// The resource.
        resource: String,
        /// Devices asked for.
        wanted: usize,
        /// Healthy devices that no pod holds.
        available: usize,
    },
}

/// The next step towards a container's devices.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// It has them: no call to the plugin.
    Held,
    /// These, all reused from init containers.
    Reused(BTreeSet<String>),
    /// Ask the plugin which of these it would rather give, if it advertises an opinion.
    Open(Open),
}

/// A choice among free devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Open {
    /// Free devices and those in `must_include`.
    pub(super) available: BTreeSet<String>,
    /// Devices reused from init containers.
    pub(super) must_include: BTreeSet<String>,
    /// Devices in all.
    pub(super) size: usize,
}

impl Open {
    /// The devices to allocate, given the plugin's preference: what of it is
    /// free first, then any free one. "Any" differs from run to run, as in the
    /// kubelet, so that no test relies on an order.
    pub(super) fn settle(self, preferred: &[String]) -> BTreeSet<String> {
        let free: HashSet<&String> = self.available.difference(&self.must_include).collect();
        let wanted = preferred.iter().filter(|id| free.contains(id));
        let mut chosen = self.must_include.clone();
        for id in wanted.chain(free.iter().copied()) {
            if chosen.len() == self.size {
                break;
            }
            chosen.insert(id.clone());
        }
        chosen
    }
}

/// Everything the kubelet knows of devices.
#[derive(Debug, Default)]
pub(super) struct State {
    listed: BTreeMap<String, Listed>,
    /// Resources that have a plugin, or had one: when its connection ended.
    stopped: BTreeMap<String, Option<Instant>>,
    /// Resources whose grace is over: they stay on the Node with nothing.
    past: BTreeSet<String>,
    pub(super) assignments: Vec<Assignment>,
}

impl State {
    /// The state of a kubelet that has just read its checkpoint: registered
    /// resources are known, but have nothing until their plugin is back.
    pub(super) fn restored(
        assignments: Vec<Assignment>,
        registered: impl IntoIterator<Item = String>,
        now: Instant,
    ) -> Self {
        let mut state = Self {
            assignments,
            ..Self::default()
        };
        for resource in registered {
            state.stopped.insert(resource.clone(), Some(now));
            state.listed.insert(resource, Listed::default());
        }
        state
    }

    /// A plugin was connected.
    pub(super) fn connected(&mut self, resource: &str) {
        self.stopped.insert(resource.to_owned(), None);
    }

    /// A ListAndWatch message: the complete list, whatever was known before.
    pub(super) fn snapshot(&mut self, resource: &str, devices: Vec<Device>) {
        let mut listed = Listed::default();
        for device in devices {
            let by_health = if device.health == HEALTHY {
                &mut listed.healthy
            } else {
                &mut listed.unhealthy
            };
            by_health.insert(device.id.clone());
            listed.all.insert(device.id.clone(), device);
        }
        self.listed.insert(resource.to_owned(), listed);
    }

    /// The plugin's connection ended: nothing of the resource is healthy any more.
    pub(super) fn disconnected(&mut self, resource: &str, now: Instant) {
        let Some(stopped) = self.stopped.get_mut(resource) else {
            return;
        };
        *stopped = Some(now);
        let listed = self.listed.entry(resource.to_owned()).or_default();
        listed.unhealthy.append(&mut listed.healthy);
    }

    /// The Node object at `now`. Resources whose plugin has been away for
    /// longer than `grace` are forgotten here, but keep their key.
    pub(super) fn node(&mut self, now: Instant, grace: Duration) -> Node {
        let expired: Vec<_> = self
            .stopped
            .iter()
            .filter(|(_, stopped)| stopped.is_some_and(|at| now.duration_since(at) > grace))
            .map(|(resource, _)| resource.clone())
            .collect();
        for resource in expired {
            self.stopped.remove(&resource);
            if self.listed.remove(&resource).is_some() {
                self.past.insert(resource);
            }
        }
        let past = self
            .past
            .iter()
            .map(|resource| (resource.clone(), Quantity::default()));
        let mut node: Node = past.collect();
        for (resource, listed) in &self.listed {
            let quantity = Quantity {
                capacity: listed.healthy.len() + listed.unhealthy.len(),
                allocatable: listed.healthy.len(),
                in_use: self.in_use(resource).len(),
            };
            node.insert(resource.clone(), quantity);
        }
        node
    }

    /// Resources for the checkpoint: those listed, with their healthy IDs.
    pub(super) fn registered(&self) -> BTreeMap<String, Vec<String>> {
        let ids = |listed: &Listed| listed.healthy.iter().cloned().collect();
        self.listed
            .iter()
            .map(|(resource, listed)| (resource.clone(), ids(listed)))
            .collect()
    }

    /// The devices in a resource's last list, by ID.
    pub(super) fn devices(&self, resource: &str) -> BTreeMap<String, Device> {
        self.listed
            .get(resource)
            .map(|listed| listed.all.clone())
            .unwrap_or_default()
    }

    /// The healthy devices of all resources, taken or not.
    pub(super) fn healthy_devices(&self) -> impl Iterator<Item = (&str, &Device)> {
        self.listed.iter().flat_map(|(resource, listed)| {
            let healthy = listed
                .all
                .iter()
                .filter(|(id, _)| listed.healthy.contains(*id));
            healthy.map(|(_, device)| (resource.as_str(), device))
        })
    }

    /// Device IDs of a resource that containers hold.
    pub(super) fn in_use(&self, resource: &str) -> BTreeSet<String> {
        let of_resource = self
            .assignments
            .iter()
            .filter(|held| held.resource == resource);
        of_resource.flat_map(Assignment::ids).collect()
    }

    /// What a container holds of a resource.
    pub(super) fn held(
        &self,
        pod_uid: &str,
        container: &str,
        resource: &str,
    ) -> Option<&Assignment> {
        self.assignments.iter().find(|held| {
            held.pod_uid == pod_uid && held.container == container && held.resource == resource
        })
    }

    /// Which devices `container` should get; `reusable` are those of the pod's init containers.
    pub(super) fn choose(
        &self,
        pod_uid: &str,
        container: &str,
        resource: &str,
        wanted: usize,
        reusable: &BTreeSet<String>,
    ) -> Result<Choice, Refused> {
        let held = self.held(pod_uid, container, resource).map(Assignment::ids);
        if let Some(held) = &held
            && held.len() != wanted
        {
            return Err(Refused::Changed {
                container: container.to_owned(),
                resource: resource.to_owned(),
                had: held.len(),
                wanted,
            });
        }
        let Some(listed) = self.listed.get(resource) else {
            return Err(Refused::Unregistered(resource.to_owned()));
        };
        if listed.healthy.is_empty() {
            return Err(Refused::NoneHealthy(resource.to_owned()));
        }
        if held
            .as_ref()
            .is_some_and(|held| !held.is_subset(&listed.healthy))
        {
            return Err(Refused::HeldUnhealthy(resource.to_owned()));
        }
        if held.is_some() || wanted == 0 {
            return Ok(Choice::Held);
        }
        let reused: BTreeSet<_> = reusable.iter().take(wanted).cloned().collect();
        if reused.len() == wanted {
            return Ok(Choice::Reused(reused));
        }
        let in_use = self.in_use(resource);
        let free: BTreeSet<_> = listed.healthy.difference(&in_use).cloned().collect();
        if free.len() < wanted - reused.len() {
            return Err(Refused::TooFew {
                resource: resource.to_owned(),
                wanted: wanted - reused.len(),
                available: free.len(),
            });
        }
        let available = free.union(&reused).cloned().collect();
        Ok(Choice::Open(Open {
            available,
            must_include: reused,
            size: wanted,
        }))
    }

    /// Records what a plugin answered for the chosen devices.
    pub(super) fn assign(
        &mut self,
        pod_uid: &str,
        container: &str,
        resource: &str,
        ids: BTreeSet<String>,
        response: ContainerAllocateResponse,
    ) {
        let all = self.listed.get(resource).map(|listed| &listed.all);
        let mut devices: BTreeMap<i64, Vec<String>> = BTreeMap::new();
        for id in ids {
            let device = all.and_then(|all| all.get(&id));
            let topology = device.and_then(|device| device.topology.as_ref());
            let mut nodes: Vec<_> = topology
                .iter()
                .flat_map(|t| &t.nodes)
                .map(|n| n.id)
                .collect();
            if nodes.is_empty() {
                nodes.push(NO_NUMA);
            }
            for node in nodes {
                devices.entry(node).or_default().push(id.clone());
            }
        }
        self.assignments.push(Assignment {
            pod_uid: pod_uid.to_owned(),
            container: container.to_owned(),
            resource: resource.to_owned(),
            devices,
            response,
        });
    }

    /// Frees what a pod holds.
    pub(super) fn release(&mut self, pod_uid: &str) {
        self.assignments.retain(|held| held.pod_uid != pod_uid);
    }
}

#[cfg(test)]
mod tests {
    use kubelet_api::deviceplugin::{NumaNode, TopologyInfo, UNHEALTHY};

    use super::*;

    const HCA: &str = "rdma/hca";

    fn device(id: &str, health: &str) -> Device {
        Device {
            id: id.to_owned(),
            health: health.to_owned(),
            topology: None,
        }
    }

    fn with_healthy(ids: &[&str]) -> State {
        let mut state = State::default();
        state.connected(HCA);
        state.snapshot(HCA, ids.iter().map(|id| device(id, HEALTHY)).collect());
        state
    }

    fn quantity(state: &mut State) -> (usize, usize) {
        let quantity = state.node(Instant::now(), Duration::MAX)[HCA];
        (quantity.capacity, quantity.allocatable)
    }

    fn set(ids: &[&str]) -> BTreeSet<String> {
        ids.iter().map(|&id| id.to_owned()).collect()
    }

    fn give(state: &mut State, pod: &str, ids: &[&str]) {
        state.assign(
            pod,
            "main",
            HCA,
            set(ids),
            ContainerAllocateResponse::default(),
        );
    }

    #[test]
    fn every_message_is_the_whole_list() {
        let mut state = with_healthy(&["a", "b", "c"]);
        state.snapshot(HCA, vec![device("b", HEALTHY)]);
        assert_eq!(quantity(&mut state), (1, 1));
        state.snapshot(HCA, Vec::new());
        assert_eq!(quantity(&mut state), (0, 0));
    }

    #[test]
    fn only_the_exact_word_is_healthy() {
        let mut state = with_healthy(&[]);
        let words = [HEALTHY, UNHEALTHY, "healthy", "HEALTHY", "", "Healthy "];
        let devices = words
            .iter()
            .enumerate()
            .map(|(n, word)| device(&n.to_string(), word));
        state.snapshot(HCA, devices.collect());
        assert_eq!(quantity(&mut state), (6, 1));
    }

    #[test]
    fn an_id_listed_twice_with_both_healths_counts_twice() {
        let mut state = with_healthy(&[]);
        state.snapshot(HCA, vec![device("a", HEALTHY), device("a", UNHEALTHY)]);
        assert_eq!(quantity(&mut state), (2, 1));
    }

    #[test]
    fn a_lost_plugin_has_nothing_allocatable_and_keeps_capacity_for_the_grace() {
        let mut state = with_healthy(&["a", "b"]);
        let lost = Instant::now();
        let grace = Duration::from_secs(300);
        state.disconnected(HCA, lost);

        let within = state.node(lost + grace, grace)[HCA];
        assert_eq!((within.capacity, within.allocatable), (2, 0));
        let after = state.node(lost + grace + Duration::from_secs(1), grace)[HCA];
        assert_eq!(
            (after.capacity, after.allocatable),
            (0, 0),
            "and the key stays"
        );

        let refused = state.choose("pod", "main", HCA, 1, &BTreeSet::new());
        assert_eq!(refused, Err(Refused::Unregistered(HCA.to_owned())));
    }

    #[test]
    fn a_plugin_back_in_time_is_as_if_never_away() {
        let mut state = with_healthy(&["a"]);
        let lost = Instant::now();
        state.disconnected(HCA, lost);
        state.connected(HCA);
        state.snapshot(HCA, vec![device("a", HEALTHY)]);
        let later = state.node(lost + Duration::from_secs(3600), Duration::from_secs(300))[HCA];
        assert_eq!((later.capacity, later.allocatable), (1, 1));
    }

    #[test]
    fn a_restarted_kubelet_knows_the_resource_but_has_none_of_it() {
        let mut state = State::restored(Vec::new(), [HCA.to_owned()], Instant::now());
        assert_eq!(quantity(&mut state), (0, 0));
        let refused = state.choose("pod", "main", HCA, 1, &BTreeSet::new());
        assert_eq!(refused, Err(Refused::NoneHealthy(HCA.to_owned())));
    }

    #[test]
    fn devices_in_use_are_not_given_again() {
        let mut state = with_healthy(&["a", "b"]);
        give(&mut state, "one", &["a"]);
        let Ok(Choice::Open(open)) = state.choose("two", "main", HCA, 1, &BTreeSet::new()) else {
            panic!("b is free");
        };
        assert_eq!(open.settle(&[]), set(&["b"]));
        let refused = state.choose("two", "main", HCA, 2, &BTreeSet::new());
        let expected = Refused::TooFew {
            resource: HCA.to_owned(),
            wanted: 2,
            available: 1,
        };
        assert_eq!(refused, Err(expected));
        state.release("one");
        assert!(
            state
                .choose("two", "main", HCA, 2, &BTreeSet::new())
                .is_ok()
        );
    }

    #[test]
    fn a_preference_counts_as_far_as_it_is_free() {
        let open = Open {
            available: set(&["a", "b", "c", "d"]),
            must_include: set(&["d"]),
            size: 3,
        };
        let preferred = ["taken", "c", "c", "d"].map(str::to_owned);
        let chosen = open.settle(&preferred);
        assert_eq!(chosen.len(), 3);
        assert!(chosen.contains("c") && chosen.contains("d"), "{chosen:?}");
        assert!(!chosen.contains("taken"), "{chosen:?}");
    }

    #[test]
    fn a_restarted_container_keeps_its_devices_if_they_are_healthy() {
        let mut state = with_healthy(&["a", "b"]);
        give(&mut state, "pod", &["a"]);
        let none = BTreeSet::new();
        assert_eq!(state.choose("pod", "main", HCA, 1, &none), Ok(Choice::Held));
        assert!(matches!(
            state.choose("pod", "main", HCA, 2, &none),
            Err(Refused::Changed {
                had: 1,
                wanted: 2,
                ..
            })
        ));
        state.snapshot(HCA, vec![device("a", UNHEALTHY), device("b", HEALTHY)]);
        let refused = state.choose("pod", "main", HCA, 1, &none);
        assert_eq!(refused, Err(Refused::HeldUnhealthy(HCA.to_owned())));
    }

    #[test]
    fn init_containers_devices_are_used_first() {
        let mut state = with_healthy(&["a", "b", "c"]);
        give(&mut state, "pod", &["b"]);
        let reusable = set(&["b"]);
        let one = state.choose("pod", "app", HCA, 1, &reusable);
        assert_eq!(one, Ok(Choice::Reused(set(&["b"]))));
        let Ok(Choice::Open(open)) = state.choose("pod", "app", HCA, 2, &reusable) else {
            panic!("a and c are free");
        };
        assert_eq!(open.must_include, set(&["b"]));
        assert_eq!(open.available, set(&["a", "b", "c"]));
    }

    #[test]
    fn assignments_are_kept_by_numa_node() {
        let mut state = with_healthy(&[]);
        let mut both = device("both", HEALTHY);
        let nodes = vec![NumaNode { id: 0 }, NumaNode { id: 1 }];
        both.topology = Some(TopologyInfo { nodes });
        let mut empty = device("empty", HEALTHY);
        empty.topology = Some(TopologyInfo { nodes: Vec::new() });
        state.snapshot(HCA, vec![both, empty, device("none", HEALTHY)]);
        give(&mut state, "pod", &["both", "empty", "none"]);
        let held = state.held("pod", "main", HCA).unwrap();
        assert_eq!(held.devices[&0], ["both"]);
        assert_eq!(held.devices[&1], ["both"]);
        assert_eq!(held.devices[&NO_NUMA], ["empty", "none"]);
        assert_eq!(held.ids().len(), 3);
    }
}
