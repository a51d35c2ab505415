//! What is tested, decided before anything is made: networks, the pod of each node, and the pairs of
//! each round. Pure functions.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::bail;
use serde_json::{Map, Value, json};

use crate::documents::{name_of, plugins, text_at};
use crate::verify::Verify;

/// On all pods of this command.
const NAME: &str = "rdma-verify";
/// The label with the name of the run.
pub(super) const RUN: &str = "rdma-netdev.io/verify-run";
/// The container of each.
pub(super) const CONTAINER: &str = "verify";
const GPU: &str = "nvidia.com/gpu";
const RESOURCE: &str = "k8s.v1.cni.cncf.io/resourceName";

/// A network of ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TestedNetwork {
    /// `NAMESPACE/NAME`.
    pub name: String,
    /// The resource of its NICs.
    resource: String,
    /// How many units of it a pod asks for, at most: all NICs, or a share of each.
    takes: usize,
    /// The pod names it once for each unit: a NIC moves into the pod.
    is_named_for_each: bool,
    is_managed: bool,
}

impl TestedNetwork {
    /// A network that attaches NICs of a resource; `None` for others.
    pub(super) fn of(definition: &Value) -> Option<Self> {
        let text = |pointer: &str| text_at(definition, pointer);
        let plugins = plugins(definition);
        let plugin = plugins.iter().find(|one| one["type"] == "rdma-netdev")?;
        let takes_devices = plugin["devices"] == "all";
        let is_shared = ["macvlan", "ipvlan", "ipoib"]
            .iter()
            .any(|kind| plugin["attach"] == *kind);
        let rails = plugin.pointer("/ipam/ranges").and_then(Value::as_object);
        let is_moved = plugin["attach"] == "move" || plugin["attach"] == "rdma-only";
        let resource = text("/metadata/annotations/k8s.v1.cni.cncf.io~1resourceName");
        let label = text("/metadata/labels/app.kubernetes.io~1managed-by");
        (!resource.is_empty()).then(|| Self {
            name: format!("{}/{}", text("/metadata/namespace"), name_of(definition)),
            resource: resource.to_owned(),
            takes: match takes_devices || is_moved {
                true if is_shared => rails.map_or(1, Map::len),
                true => usize::MAX,
                false => 1,
            },
            is_named_for_each: is_moved && !takes_devices,
            is_managed: label == "kubectl-rdma",
        })
    }
}

/// The networks that were named, in `namespace` unless a name says another. If none was, those in it
/// that `kubectl rdma plan` wrote, or the only one.
pub(super) fn choose(
    mut found: Vec<TestedNetwork>,
    named: &[String],
    namespace: &str,
) -> anyhow::Result<Vec<TestedNetwork>> {
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
            bail!("{name} is not a network of type rdma-netdev with the annotation {RESOURCE}");
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
            "namespace {namespace} has no network of type rdma-netdev with the annotation {RESOURCE}: \
             name one with --network NAMESPACE/NAME, or the resource of HCAs without netdevs with \
             --resource"
        ),
        _ => bail!(
            "several networks can be tested: name those that a pod has together with --network: {}",
            names.join(", ")
        ),
    }
}

/// How many units of a resource a node has, by `allocatable` or `capacity`.
fn units(node: &Value, of: &str, resource: &str) -> usize {
    let count = node
        .get("status")
        .and_then(|status| status.get(of)?.get(resource)?.as_str());
    // The API writes 1000 as 1k.
    let count = count.unwrap_or("0").replace('k', "000");
    count.parse().unwrap_or(0)
}

/// Units of the resources that are not healthy, which no pod gets.
pub(super) fn shortage(
    verify: &Verify,
    node: &Value,
    networks: &[TestedNetwork],
) -> Option<String> {
    let resources = networks.iter().map(|network| &network.resource);
    resources.chain(&verify.all.resource).find_map(|resource| {
        let [healthy, all] = ["allocatable", "capacity"].map(|of| units(node, of, resource));
        (healthy < all).then(|| format!("{healthy} of {all} units of {resource} are healthy"))
    })
}

/// The pod with all NICs of the networks on a node, or why there can be none. The kubelet ends it,
/// whatever happens to this program.
pub(super) fn pod(
    verify: &Verify,
    run: &str,
    node: &Value,
    number: usize,
    networks: &[TestedNetwork],
) -> Result<Value, String> {
    let conditions = node.pointer("/status/conditions").and_then(Value::as_array);
    let is_ready = |state: &Value| state["type"] == "Ready" && state["status"] == "True";
    if !conditions.into_iter().flatten().any(is_ready) {
        return Err("the node is NotReady".to_owned());
    }
    let resources = verify.all.resource.iter();
    let mut limits: BTreeMap<&str, usize> = resources
        .map(|resource| (resource.as_str(), units(node, "allocatable", resource)))
        .collect();
    let mut names: Vec<&str> = Vec::new();
    for network in networks {
        let all = units(node, "allocatable", &network.resource);
        let limit = limits.entry(&network.resource).or_default();
        *limit = all.min(limit.saturating_add(network.takes));
        let times = if network.is_named_for_each {
            all
        } else {
            all.min(1)
        };
        names.extend(std::iter::repeat_n(network.name.as_str(), times));
    }
    if limits.values().all(|&units| units == 0) {
        let resources: Vec<&str> = limits.into_keys().collect();
        return Err(format!("the node offers no {}", resources.join(", ")));
    }
    if verify.gpu.is_some() {
        limits.insert(GPU, units(node, "allocatable", GPU).min(1));
    }
    limits.retain(|_, units| *units > 0);
    Ok(json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": format!("{NAME}-{run}-{number}"),
            "labels": {"app.kubernetes.io/name": NAME, RUN: run},
            "annotations": {"k8s.v1.cni.cncf.io/networks": names.join(", ")},
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": verify.timeout + 300,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": false,
            // By the scheduler, which knows what is free, unlike with nodeName.
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchFields": [
                    {"key": "metadata.name", "operator": "In", "values": [name_of(node)]}]}]}}},
            "tolerations": [{"operator": "Exists"}],
            "containers": [{
                "name": CONTAINER,
                "image": verify.all.image,
                "imagePullPolicy": "IfNotPresent",
                "command": ["sleep", "infinity"],
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                "resources": {"requests": limits, "limits": limits},
            }],
        },
    }))
}

/// Whether a pod asks for a GPU.
pub(super) fn has_gpu(pod: &Value) -> bool {
    let limits = pod.pointer("/spec/containers/0/resources/limits");
    limits.is_some_and(|limits| limits.get(GPU).is_some())
}

/// Two nodes of a test: where the server runs, and the client.
pub(super) type Pair = [String; 2];

/// How many rounds there are for so many nodes: ⌈log2 n⌉ + 1.
pub(super) fn rounds(nodes: usize) -> usize {
    nodes.next_power_of_two().ilog2() as usize + 1
}

/// The pairs of a round, counted from 1, of nodes that answer. Each is in one, with a partner that it
/// has not met; those that met fewest come first. Partners are far apart at first, then nearer: nodes
/// with names in a row, often of one rack, meet others.
pub(super) fn pairs(round: usize, nodes: &[&str], met: &BTreeSet<Pair>) -> Vec<Pair> {
    let mut free = nodes.to_vec();
    free.sort_by_cached_key(|node| {
        met.iter()
            .filter(|pair| pair.iter().any(|name| name == node))
            .count()
    });
    let mut pairs = Vec::new();
    while !free.is_empty() {
        let node = free.remove(0);
        let pair = |other: &str| [node.min(other).to_owned(), node.max(other).to_owned()];
        let start = free.len() >> round;
        let mut others = (start..free.len()).chain(0..start);
        if let Some(at) = others.find(|&at| {
            free.get(at)
                .is_some_and(|other| !met.contains(&pair(other)))
        }) {
            pairs.push(pair(free.remove(at)));
        }
    }
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verify(arguments: &[&str]) -> Verify {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            verify: Verify,
        }
        let line = ["verify", "--all"].iter().chain(arguments);
        <Line as clap::Parser>::parse_from(line).verify
    }

    #[test]
    fn rounds_are_few_and_a_node_is_in_one_test_at_a_time() {
        for count in (2..=100).chain([300]) {
            let names: Vec<String> = (0..count).map(|number| format!("n{number:03}")).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let logarithm = (0..).find(|&power| 1 << power >= count).unwrap();
            assert_eq!(rounds(count), logarithm + 1, "{count}");
            let mut met = BTreeSet::new();
            for round in 1..=rounds(count) {
                let mut busy = BTreeSet::new();
                for pair in pairs(round, &names, &met) {
                    for node in &pair {
                        assert!(busy.insert(node.clone()), "{count}: {node} is in two tests");
                    }
                    assert!(pair[0] < pair[1] && met.insert(pair), "{count}: twice");
                }
            }
            let least = logarithm.min(count - 1);
            let tests = |name: &&str| met.iter().flatten().filter(|node| node == name).count();
            assert!(names.iter().all(|name| tests(name) >= least), "{count}");
        }
        assert!(pairs(1, &[], &BTreeSet::new()).is_empty());
    }

    #[test]
    fn partners_of_a_silent_node_meet_each_other() {
        let pairs = |nodes: &[&str], met: &[[&str; 2]]| {
            let met = met.iter().map(|pair| pair.map(str::to_owned)).collect();
            pairs(9, nodes, &met)
        };
        assert_eq!(
            pairs(&["a", "c", "d"], &[["a", "b"], ["c", "d"]]),
            [["a", "c"]]
        );
        assert_eq!(pairs(&["a", "c"], &[["a", "c"]]), [[""; 2]; 0], "not twice");
        let met = [["b", "d"], ["a", "c"], ["b", "f"]];
        assert_eq!(pairs(&["b", "d", "f"], &met), [["d", "f"]], "fewest first");
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

    fn network(name: &str, managed: bool) -> TestedNetwork {
        TestedNetwork::of(&definition(name, managed, json!({"type": "rdma-netdev"}))).unwrap()
    }

    #[test]
    fn the_networks_are_those_of_the_plan_or_the_only_one() {
        let names = |found: Vec<TestedNetwork>, asked: &[&str]| {
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
        let other = || TestedNetwork {
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
        assert_eq!(TestedNetwork::of(&other), None);
    }

    #[test]
    fn a_pod_asks_for_what_its_network_needs() {
        let node = json!({"metadata": {"name": "n1"}, "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {"rdma/nic": "3", "rdma/shared": "1k", "nvidia.com/gpu": "8", "memory": "64Gi"}}});
        assert_eq!(units(&node, "allocatable", "rdma/shared"), 1000);
        let asks = |plugin: Value| {
            let network = TestedNetwork::of(&definition("net", false, plugin)).unwrap();
            let pod = pod(&verify(&["--gpu"]), "7", &node, 4, &[network]).unwrap();
            let networks = &pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"];
            let limits = &pod["spec"]["containers"][0]["resources"]["limits"];
            assert_eq!(limits["nvidia.com/gpu"], 1);
            assert!(has_gpu(&pod));
            let spec = &pod["spec"];
            let terms = "/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms";
            let expected = json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]);
            assert_eq!(spec.pointer(terms), Some(&expected), "on its node");
            assert_eq!(spec["tolerations"], json!([{"operator": "Exists"}]));
            assert!(
                spec["activeDeadlineSeconds"].as_u64().unwrap() > 3600,
                "it ends"
            );
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
        assert_eq!(asks(plugin("macvlan", "all")), (net(1), Some(1)));
        let mut rails = plugin("ipoib", "all");
        rails["ipam"] = json!({"ranges": {"0": {}, "1": {}}});
        assert_eq!(asks(rails), (net(1), Some(2)), "a share of each");
    }

    #[test]
    fn a_node_without_a_pod_says_why() {
        let verify = verify(&["--resource", "rdma/efa", "--gpu"]);
        let pod = |status: Value| {
            let node = json!({"metadata": {"name": "n"}, "status": status});
            pod(&verify, "7", &node, 0, &[network("a", false)]).unwrap_err()
        };
        assert_eq!(pod(json!({})), "the node is NotReady");
        let ready = json!({"conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {"nvidia.com/gpu": "8"}});
        assert_eq!(pod(ready), "the node offers no rdma/efa, rdma/nic");
    }

    #[test]
    fn unhealthy_units_are_a_shortage() {
        let node = |healthy: &str| json!({"status": {"capacity": {"rdma/nic": "8"}, "allocatable": {"rdma/nic": healthy}}});
        let shortage =
            |healthy: &str| shortage(&verify(&[]), &node(healthy), &[network("a", false)]);
        assert_eq!(shortage("8"), None);
        let expected = "7 of 8 units of rdma/nic are healthy";
        assert_eq!(shortage("7").as_deref(), Some(expected));
    }

    #[test]
    fn a_pod_has_hcas_without_netdevs_without_a_network() {
        let node = json!({"metadata": {"name": "n"}, "status": {
            "conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"rdma/efa": "4"}}});
        let verify = verify(&["--resource", "rdma/efa", "--gpu"]);
        let pod = pod(&verify, "7", &node, 0, &[network("a", false)]).unwrap();
        let networks = &pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"];
        assert_eq!(*networks, "", "the node has none of its NICs");
        let limits = &pod["spec"]["containers"][0]["resources"]["limits"];
        assert_eq!(*limits, json!({"rdma/efa": 4}));
    }
}
