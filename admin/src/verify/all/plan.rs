//! What is tested, decided before anything is made: networks, the pod of each node, and rounds of
//! pairs. Pure functions.
//!
//! The rounds are the first ones of a round-robin tournament: in a round each node has at most one
//! partner, and never one that it had before.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use anyhow::bail;
use serde_json::{Map, Value, json};

use crate::documents::name_of;

/// On all pods of this command.
pub(super) const NAME: &str = "rdma-verify";
/// The label with the name of the run.
pub(super) const RUN: &str = "rdma-netdev.io/verify-run";
/// The container of each.
pub(super) const CONTAINER: &str = "verify";
const GPU: &str = "nvidia.com/gpu";
/// What `kubectl rdma plan` wrote.
const MANAGED_BY: &str = "/metadata/labels/app.kubernetes.io~1managed-by";
const ANNOTATION: &str = "k8s.v1.cni.cncf.io/resourceName";
const RESOURCE: &str = "/metadata/annotations/k8s.v1.cni.cncf.io~1resourceName";

/// How many units of its resource a pod asks for, to test all NICs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Takes {
    /// A share of the NIC.
    One,
    /// All, by one name of the network (`devices: all`).
    All,
    /// All, by one name of the network for each: a NIC moves into the pod.
    Each,
}

/// A network of ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Network {
    /// `NAMESPACE/NAME`.
    pub name: String,
    /// The resource of its NICs.
    pub resource: String,
    takes: Takes,
    is_managed: bool,
}

impl Network {
    /// A network that attaches NICs of a resource; `None` for others.
    pub(super) fn of(definition: &Value) -> Option<Self> {
        let text = |pointer: &str| definition.pointer(pointer).and_then(Value::as_str);
        let config: Value = serde_json::from_str(text("/spec/config")?).ok()?;
        let plugins = config.get("plugins").and_then(Value::as_array);
        let plugins = plugins.map_or(std::slice::from_ref(&config), Vec::as_slice);
        let plugin = plugins
            .iter()
            .find(|plugin| plugin["type"] == "rdma-netdev")?;
        let takes = match (plugin["devices"].as_str(), plugin["attach"].as_str()) {
            (Some("all"), _) => Takes::All,
            (_, Some("move" | "rdma-only")) => Takes::Each,
            _ => Takes::One,
        };
        let namespace = text("/metadata/namespace").unwrap_or("default");
        Some(Self {
            name: format!("{namespace}/{}", name_of(definition)),
            resource: text(RESOURCE)?.to_owned(),
            takes,
            is_managed: text(MANAGED_BY) == Some("kubectl-rdma"),
        })
    }
}

/// The networks that were named, in `namespace` unless a name says another. If none was, those in it
/// that `kubectl rdma plan` wrote, or the only one.
pub(super) fn choose(
    mut found: Vec<Network>,
    named: &[String],
    namespace: &str,
) -> anyhow::Result<Vec<Network>> {
    let prefix = format!("{namespace}/");
    if !named.is_empty() {
        let full = |name: &String| match name.contains('/') {
            true => name.clone(),
            false => format!("{prefix}{name}"),
        };
        let named: Vec<String> = named.iter().map(full).collect();
        found.retain(|network| named.contains(&network.name));
        let is_missing = |name: &&String| found.iter().all(|network| network.name != **name);
        if let Some(name) = named.iter().find(is_missing) {
            bail!("{name} is not a network of type rdma-netdev with the annotation {ANNOTATION}");
        }
        return Ok(found);
    }
    found.retain(|network| network.name.starts_with(&prefix));
    if found.iter().any(|network| network.is_managed) {
        found.retain(|network| network.is_managed);
        return Ok(found);
    }
    let names: Vec<&str> = found.iter().map(|network| network.name.as_str()).collect();
    match names.as_slice() {
        [_] => Ok(found),
        [] => bail!(
            "namespace {namespace} has no network of type rdma-netdev with the annotation {ANNOTATION}: \
             name one with --network NAMESPACE/NAME, or the resource of HCAs without netdevs with \
             --resource"
        ),
        _ => bail!(
            "several networks can be tested: name those that a pod has together with --network: {}",
            names.join(", ")
        ),
    }
}

/// A node of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Node {
    /// Its name.
    pub name: String,
    /// Version of its kubelet.
    pub kubelet: String,
    is_ready: bool,
    allocatable: BTreeMap<String, u64>,
    capacity: BTreeMap<String, u64>,
}

impl Node {
    pub(super) fn of(object: &Value) -> Self {
        let status = |key: &str| object.pointer(&format!("/status/{key}"));
        let conditions = status("conditions").and_then(Value::as_array);
        let is_ready = |state: &Value| state["type"] == "Ready" && state["status"] == "True";
        let units = |key: &str| {
            let units = status(key).and_then(Value::as_object);
            let units = units.into_iter().flatten().filter_map(|(name, count)| {
                let count = quantity(count.as_str()?)?;
                Some((name.clone(), count))
            });
            units.collect()
        };
        let kubelet = status("nodeInfo/kubeletVersion").and_then(Value::as_str);
        Self {
            name: name_of(object).to_owned(),
            kubelet: kubelet.unwrap_or("-").to_owned(),
            is_ready: conditions.into_iter().flatten().any(is_ready),
            allocatable: units("allocatable"),
            capacity: units("capacity"),
        }
    }

    fn units(&self, resource: &str) -> u64 {
        self.allocatable.get(resource).copied().unwrap_or(0)
    }

    /// Units that the node has and its daemon does not offer, as of a port that is down.
    fn withheld(&self, resource: &str) -> Option<String> {
        let all = *self.capacity.get(resource)?;
        let withheld = all.saturating_sub(self.units(resource));
        (withheld > 0).then(|| format!("{withheld} of {all} {resource} cannot be used"))
    }
}

/// A count as the API writes it: 1000 is `1k`.
fn quantity(text: &str) -> Option<u64> {
    match text.strip_suffix('k') {
        Some(thousands) => thousands.parse::<u64>().ok()?.checked_mul(1000),
        None => text.parse().ok(),
    }
}

/// What all pods of a run have.
#[derive(Debug)]
pub(super) struct PodTemplate<'a> {
    /// Name of the run.
    pub run: &'a str,
    /// Their image.
    pub image: &'a str,
    /// After which the kubelet ends them, whatever happened to this program.
    pub deadline_seconds: u64,
    /// With a GPU where the node has one.
    pub gpu: bool,
    /// Resources of HCAs without a netdev, of which a pod has all without a network.
    pub resources: &'a [String],
}

/// A pod to make.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Pod {
    /// Its name.
    pub name: String,
    /// It asks for a GPU.
    pub gpu: bool,
    /// What it cannot ask for, in words.
    pub withheld: Vec<String>,
    /// What the API is sent.
    pub object: Value,
}

impl PodTemplate<'_> {
    /// The pod that has all NICs of the networks on a node, or why there can be none.
    pub(super) fn pod(
        &self,
        number: usize,
        node: &Node,
        networks: &[Network],
    ) -> Result<Pod, String> {
        if !node.is_ready {
            return Err("the node is not Ready".to_owned());
        }
        let mut limits: BTreeMap<&str, u64> = BTreeMap::new();
        let mut names: Vec<&str> = Vec::new();
        for network in networks {
            let units = node.units(&network.resource);
            let (ask, times) = match network.takes {
                _ if units == 0 => continue,
                Takes::One => (1, 1),
                Takes::All => (units, 1),
                Takes::Each => (units, usize::try_from(units).unwrap_or(1)),
            };
            let asked = limits.entry(&network.resource).or_default();
            *asked = units.min(*asked + ask);
            names.extend(std::iter::repeat_n(network.name.as_str(), times));
        }
        for resource in self.resources {
            let units = node.units(resource);
            if units > 0 {
                limits.insert(resource, units);
            }
        }
        if limits.is_empty() {
            let of_networks = networks.iter().map(|network| &network.resource);
            let resources = of_networks.chain(self.resources).map(String::as_str);
            let resources: BTreeSet<&str> = resources.collect();
            let resources: Vec<&str> = resources.into_iter().collect();
            return Err(format!("the node offers no {}", resources.join(", ")));
        }
        let withheld = limits.keys().filter_map(|resource| node.withheld(resource));
        let withheld = withheld.collect();
        let gpu = self.gpu && node.units(GPU) > 0;
        if gpu {
            limits.insert(GPU, 1);
        }
        let name = format!("{NAME}-{}-{number}", self.run);
        let mut labels = Map::new();
        labels.insert("app.kubernetes.io/name".to_owned(), NAME.into());
        labels.insert(RUN.to_owned(), self.run.into());
        let mut annotations = Map::new();
        if !names.is_empty() {
            annotations.insert(
                "k8s.v1.cni.cncf.io/networks".to_owned(),
                names.join(", ").into(),
            );
        }
        let object = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "labels": labels,
                "annotations": annotations,
            },
            "spec": {
                "restartPolicy": "Never",
                "activeDeadlineSeconds": self.deadline_seconds,
                "terminationGracePeriodSeconds": 1,
                "automountServiceAccountToken": false,
                // By the scheduler, which knows what is free, unlike with nodeName.
                "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchFields": [
                        {"key": "metadata.name", "operator": "In", "values": [node.name]}]}]}}},
                "tolerations": [{"operator": "Exists"}],
                "containers": [{
                    "name": CONTAINER,
                    "image": self.image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["sleep", "infinity"],
                    "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                    "resources": {"requests": limits, "limits": limits},
                }],
            },
        });
        Ok(Pod {
            name,
            gpu,
            withheld,
            object,
        })
    }
}

/// Two nodes of a test: where the server runs, and the client.
pub(super) type Pair = [usize; 2];

/// Rounds for these nodes: ⌈log2 n⌉, and one more where a node sits out in each.
pub(super) fn schedule(nodes: &[usize]) -> Vec<Vec<Pair>> {
    let count = nodes.len();
    if count < 2 {
        return Vec::new();
    }
    // The circle method: i and j meet in the round i + j modulo an odd number. With an even number of
    // nodes the last one meets whom the others leave out.
    let odd = count - 1 + count % 2;
    let logarithm = count.next_power_of_two().ilog2() as usize;
    let rounds = (logarithm + count % 2).min(odd);
    let round = |number: usize| {
        // Sums far apart: nodes with names in a row, often of one rack, meet others each time.
        let sum = number * odd / rounds;
        let meets = (0..odd).filter_map(|node| match (sum + odd - node) % odd {
            partner if partner == node => Some([*nodes.get(node)?, *nodes.get(odd)?]),
            partner if partner < node => None,
            partner => Some([*nodes.get(node)?, *nodes.get(partner)?]),
        });
        meets.collect()
    };
    (0..rounds).map(round).collect()
}

/// A round of the nodes that answer. Those left over meet each other, if they have not, and those that
/// met fewest come first.
pub(super) fn without_silent(
    round: &[Pair],
    answering: &BTreeSet<usize>,
    met: &BTreeSet<Pair>,
) -> Vec<Pair> {
    let answers = |pair: &&Pair| pair.iter().all(|node| answering.contains(node));
    let mut pairs: Vec<Pair> = round.iter().filter(answers).copied().collect();
    let busy: BTreeSet<usize> = pairs.iter().flatten().copied().collect();
    let mut free: Vec<usize> = answering.difference(&busy).copied().collect();
    free.sort_by_key(|node| Reverse(met.iter().filter(|pair| pair.contains(node)).count()));
    while let Some(node) = free.pop() {
        let pair = |other: usize| [node.min(other), node.max(other)];
        if let Some(at) = free.iter().position(|&other| !met.contains(&pair(other))) {
            pairs.push(pair(free.remove(at)));
        }
    }
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_few_and_a_node_is_in_one_test_at_a_time() {
        for count in (2..=100).chain([1000]) {
            let nodes: Vec<usize> = (7..7 + count).collect();
            let rounds = schedule(&nodes);
            let logarithm = (0..).find(|&power| 1 << power >= count).unwrap();
            assert!(rounds.len() <= logarithm + 1, "{count}");
            let mut met = BTreeSet::new();
            let mut tests = BTreeMap::new();
            for round in &rounds {
                let mut busy = BTreeSet::new();
                for &pair in round {
                    assert!(pair[0] < pair[1] && met.insert(pair), "{count}: {pair:?}");
                    for node in pair {
                        assert!(busy.insert(node), "{count}: {node} is in two tests");
                        *tests.entry(node).or_insert(0) += 1;
                    }
                }
            }
            let least = logarithm.min(count - 1);
            let is_tested = |node| tests.get(node).is_some_and(|&count| count >= least);
            assert!(nodes.iter().all(is_tested), "{count}: {tests:?}");
            assert_eq!(rounds, schedule(&nodes));
        }
        assert!(schedule(&[]).is_empty() && schedule(&[1]).is_empty());
    }

    #[test]
    fn partners_of_a_silent_node_meet_each_other() {
        let round = [[0, 3], [1, 2], [4, 5]];
        let pairs = |answering: &[usize], met: &[Pair]| {
            let met = met.iter().copied().collect();
            without_silent(&round, &answering.iter().copied().collect(), &met)
        };
        assert_eq!(pairs(&[0, 1, 2, 3, 4, 5], &[]), round);
        assert_eq!(pairs(&[2, 3, 4, 5], &[]), [[4, 5], [2, 3]]);
        assert_eq!(pairs(&[2, 3, 4, 5], &[[2, 3]]), [[4, 5]], "not twice");
        assert_eq!(pairs(&[5], &[]), [[0; 2]; 0]);
        let met = [[1, 3], [0, 2], [1, 5]];
        let answering = [1, 3, 5].into_iter().collect();
        let pairs = without_silent(&[], &answering, &met.into_iter().collect());
        assert_eq!(pairs, [[3, 5]]);
    }

    fn definition(name: &str, managed: bool, plugin: Value) -> Value {
        let labels = match managed {
            true => json!({"app.kubernetes.io/managed-by": "kubectl-rdma"}),
            false => json!({}),
        };
        json!({
            "metadata": {"name": name, "namespace": "hpc", "labels": labels,
                "annotations": {"k8s.v1.cni.cncf.io/resourceName": "rdma/nic"}},
            "spec": {"config": json!({"plugins": [{"type": "tuning"}, plugin]}).to_string()},
        })
    }

    fn network(name: &str, managed: bool) -> Network {
        Network::of(&definition(name, managed, json!({"type": "rdma-netdev"}))).unwrap()
    }

    #[test]
    fn the_networks_are_those_of_the_plan_or_the_only_one() {
        let names = |found: Vec<Network>, asked: &[&str]| {
            let asked: Vec<String> = asked.iter().map(|&name| name.to_owned()).collect();
            let chosen = choose(found, &asked, "hpc").map_err(|error| error.to_string())?;
            Ok::<_, String>(chosen.into_iter().map(|n| n.name).collect::<Vec<_>>())
        };
        let (a, b, c) = (network("a", false), network("b", false), network("c", true));
        assert_eq!(names(vec![a.clone()], &[]).unwrap(), ["hpc/a"]);
        let all = || vec![a.clone(), b.clone(), c.clone()];
        assert_eq!(names(all(), &[]).unwrap(), ["hpc/c"]);
        assert_eq!(names(all(), &["b", "hpc/a"]).unwrap(), ["hpc/a", "hpc/b"]);
        let error = names(vec![a.clone(), b.clone()], &[]).unwrap_err();
        assert!(error.contains("--network: hpc/a, hpc/b"), "{error}");
        let other = || Network {
            name: "other/a".to_owned(),
            ..c.clone()
        };
        assert_eq!(names(vec![a.clone(), other()], &[]).unwrap(), ["hpc/a"]);
        let named = names(vec![a.clone(), other()], &["other/a"]);
        assert_eq!(named.unwrap(), ["other/a"]);
        assert!(names(all(), &["d"]).unwrap_err().contains("hpc/d is not"));
        assert!(
            names(vec![other()], &[])
                .unwrap_err()
                .contains("has no network")
        );
        let other = definition("x", false, json!({"type": "macvlan"}));
        assert_eq!(Network::of(&other), None);
    }

    #[test]
    fn a_pod_asks_for_what_its_network_needs() {
        let object = json!({"metadata": {"name": "n1"}, "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {"rdma/nic": "3", "rdma/shared": "1k", "nvidia.com/gpu": "8", "memory": "64Gi"},
            "capacity": {"rdma/nic": "4", "rdma/shared": "1k"}}});
        let template = PodTemplate {
            run: "7",
            image: "i",
            deadline_seconds: 9,
            gpu: true,
            resources: &[],
        };
        assert_eq!(Node::of(&object).units("rdma/shared"), 1000);
        let withheld = Node::of(&object).withheld("rdma/nic").unwrap();
        assert_eq!(withheld, "1 of 4 rdma/nic cannot be used");
        assert_eq!(Node::of(&object).withheld("rdma/shared"), None);
        let asks = |plugin: Value| {
            let network = Network::of(&definition("net", false, plugin)).unwrap();
            let pod = template
                .pod(4, &Node::of(&object), &[network])
                .unwrap()
                .object;
            let networks = &pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"];
            let limits = &pod["spec"]["containers"][0]["resources"]["limits"];
            assert_eq!(limits["nvidia.com/gpu"], 1);
            (
                networks.as_str().unwrap().to_owned(),
                limits["rdma/nic"].as_u64(),
            )
        };
        let plugin = |attach: &str, devices: &str| json!({"type": "rdma-netdev", "attach": attach, "devices": devices});
        let net = |count: usize| vec!["hpc/net"; count].join(", ");
        assert_eq!(asks(plugin("macvlan", "one")), (net(1), Some(1)));
        assert_eq!(asks(plugin("move", "all")), (net(1), Some(3)));
        assert_eq!(asks(plugin("move", "one")), (net(3), Some(3)));
    }

    #[test]
    fn a_node_without_a_pod_says_why() {
        let template = PodTemplate {
            run: "7",
            image: "i",
            deadline_seconds: 9,
            gpu: false,
            resources: &["rdma/efa".to_owned()],
        };
        let pod = |status: Value| {
            let node = Node::of(&json!({"metadata": {"name": "n"}, "status": status}));
            template.pod(0, &node, &[network("a", false)]).unwrap_err()
        };
        assert_eq!(pod(json!({})), "the node is not Ready");
        let ready = json!({"conditions": [{"type": "Ready", "status": "True"}]});
        assert_eq!(pod(ready), "the node offers no rdma/efa, rdma/nic");
    }

    #[test]
    fn a_pod_has_hcas_without_netdevs_without_a_network() {
        let template = PodTemplate {
            run: "7",
            image: "i",
            deadline_seconds: 9,
            gpu: false,
            resources: &["rdma/efa".to_owned()],
        };
        let node = Node::of(&json!({"metadata": {"name": "n"}, "status": {
            "conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"rdma/efa": "4"}}}));
        let pod = template.pod(0, &node, &[]).unwrap().object;
        assert_eq!(pod["metadata"]["annotations"], json!({}));
        let limits = &pod["spec"]["containers"][0]["resources"]["limits"];
        assert_eq!(*limits, json!({"rdma/efa": 4}));
    }
}
