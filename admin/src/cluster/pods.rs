//! `kubectl rdma pods`: pods that have HCAs, by their own objects and by the nodes' `RdmaNode`s.

use std::collections::{BTreeMap, BTreeSet};

use node::table::cell;
use node_wire::rdma_node::{HcaState, NodeState};
use node_wire::status::NearGpu;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Flags;
use super::nodes::{KnownNode, read};
use crate::documents::{name_of, plugins, text_at};
use crate::global::Global;
use crate::kubectl::NETWORKS;
use crate::output::{Ended, Exit, optional, page, table};
use crate::state_rows::gpus;

/// Where Multus writes what interfaces a pod has
/// (Network Plumbing Working Group, de-facto standard 1.3, section 5).
const NETWORK_STATUS: &str = "/metadata/annotations/k8s.v1.cni.cncf.io~1network-status";
/// Pods that have ended hold nothing.
const RUNNING: &str = "--field-selector=status.phase!=Succeeded,status.phase!=Failed";

/// An interface in [`NETWORK_STATUS`].
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Interface {
    name: String,
    interface: String,
    ips: Vec<String>,
    /// The cluster's own network.
    default: bool,
    #[serde(rename = "device-info")]
    device: Option<Value>,
}

/// An HCA of a pod, an interface of it, or both.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
struct ClusterRow {
    node: String,
    pod: String,
    resource: Option<String>,
    hca: Option<String>,
    gpus: Vec<NearGpu>,
    interface: Option<String>,
    network: Option<String>,
    addresses: Vec<String>,
}

pub(super) async fn print(flags: &Flags, global: &Global) -> Ended {
    let (nodes, mut notes) = read(flags).await?;
    let scope = match &flags.kubectl.namespace {
        Some(namespace) => format!("--namespace={namespace}"),
        None => "--all-namespaces".to_owned(),
    };
    let pods = flags.kubectl.objects(&["pods", RUNNING, &scope]).await?;
    let networks = flags.kubectl.objects(&[NETWORKS, "--all-namespaces"]).await;
    let networks = networks.map(|all| all.iter().filter_map(ours).collect::<BTreeSet<String>>());
    let networks = networks.unwrap_or_else(|error| {
        notes.push(format!(
            "pods that have our networks and no HCA are not known: {error:#}"
        ));
        BTreeSet::new()
    });
    let rows = rows(&nodes, &pods, &networks);
    notes.extend(unknown(&nodes, &rows));
    global.say(json!({"pods": rows, "notes": notes}), || {
        let table = match rows.is_empty() && notes.is_empty() {
            true => "no pod has an HCA or a network of ours\n".to_owned(),
            false => table(HEADER, rows.iter().map(columns)),
        };
        page(vec![table], &notes)
    });
    Ok(Exit::good_if(notes.is_empty()))
}

/// The name of a network, if our plugin makes it.
fn ours(definition: &Value) -> Option<String> {
    let is_ours = |plugin: &Value| text_at(plugin, "/type") == "rdma-netdev";
    let is_ours = plugins(definition).iter().any(is_ours);
    let namespace = text_at(definition, "/metadata/namespace");
    is_ours.then(|| format!("{namespace}/{}", name_of(definition)))
}

/// Nodes of which pods are shown, and nothing else is known.
fn unknown(nodes: &[KnownNode], rows: &[ClusterRow]) -> BTreeSet<String> {
    let is_unknown = |row: &&ClusterRow| !nodes.iter().any(|known| known.node == row.node);
    let rows = rows.iter().filter(is_unknown);
    rows.map(|row| {
        format!(
            "{}: no RdmaNode: which HCAs its pods have is not known",
            row.node
        )
    })
    .collect()
}

const HEADER: &str = "NODE  POD  RESOURCE  HCA  GPUS  INTERFACE  NETWORK  ADDRESSES";

fn columns(row: &ClusterRow) -> Vec<String> {
    vec![
        cell(&row.node),
        cell(&row.pod),
        optional(row.resource.as_deref()),
        optional(row.hca.as_deref()),
        cell(&gpus(&row.gpus)),
        optional(row.interface.as_deref()),
        optional(row.network.as_deref()),
        cell(&row.addresses.join(" ")),
    ]
}

/// Of each pod the HCAs that it has for itself, the shared resources that it asks for, and its
/// interfaces, each with its HCA where the interface names one. A pod without an HCA is there for an
/// interface of one of `networks`.
fn rows(nodes: &[KnownNode], pods: &[Value], networks: &BTreeSet<String>) -> Vec<ClusterRow> {
    let nothing = NodeState::default();
    let nodes: BTreeMap<&str, &NodeState> = nodes
        .iter()
        .map(|known| (&*known.node, &known.state))
        .collect();
    let mut all = Vec::new();
    for pod in pods {
        let node = text_at(pod, "/spec/nodeName");
        let state = nodes.get(node).copied().unwrap_or(&nothing);
        let whose = ClusterRow {
            node: node.to_owned(),
            pod: format!("{}/{}", text_at(pod, "/metadata/namespace"), name_of(pod)),
            ..ClusterRow::default()
        };
        let mut rows = held(state, &whose);
        rows.extend(shared(state, pod, &whose));
        let has_hca = !rows.is_empty();
        for interface in interfaces(pod) {
            if has_hca || networks.contains(&interface.name) {
                join(&mut rows, state, interface, &whose);
            }
        }
        all.extend(rows);
    }
    all.sort_by(|a, b| (&a.pod, &a.interface, &a.hca).cmp(&(&b.pod, &b.interface, &b.hca)));
    all
}

/// HCAs that a pod has for itself.
fn held(state: &NodeState, whose: &ClusterRow) -> Vec<ClusterRow> {
    let own = state
        .hcas
        .iter()
        .filter(|hca| hca.pod.as_ref() == Some(&whose.pod));
    let row = |hca: &HcaState| ClusterRow {
        resource: hca.resource.clone(),
        hca: Some(hca.hardware.id.clone()),
        gpus: hca.serves.clone(),
        ..whose.clone()
    };
    own.map(row).collect()
}

/// Shared resources that its containers ask for.
fn shared(state: &NodeState, pod: &Value, whose: &ClusterRow) -> Vec<ClusterRow> {
    let lists = ["/spec/containers", "/spec/initContainers"];
    let lists = lists
        .iter()
        .filter_map(|list| pod.pointer(list)?.as_array());
    let limits = lists.flatten();
    let limits: Vec<&Value> = limits
        .filter_map(|one| one.pointer("/resources/limits"))
        .collect();
    let shared = state.resources.iter().filter(|one| one.mode == "shared");
    let is_asked = |name: &str| limits.iter().any(|limits| limits.get(name).is_some());
    let asked = shared.filter(|one| is_asked(&one.name));
    asked
        .map(|one| ClusterRow {
            resource: Some(one.name.clone()),
            ..whose.clone()
        })
        .collect()
}

fn interfaces(pod: &Value) -> Vec<Interface> {
    let all: Vec<Interface> =
        serde_json::from_str(text_at(pod, NETWORK_STATUS)).unwrap_or_default();
    all.into_iter().filter(|one| !one.default).collect()
}

/// Puts an interface on the line of its HCA, else on one of a shared resource, else on its own.
fn join(rows: &mut Vec<ClusterRow>, state: &NodeState, interface: Interface, whose: &ClusterRow) {
    let hca = interface.device.as_ref().and_then(|device| {
        let [address, rdma] =
            ["/pci/pci-address", "/pci/rdma-device"].map(|at| text_at(device, at));
        let is_it = |hca: &&HcaState| {
            hca.hardware.id == address || hca.hardware.rdma_devices.iter().any(|name| name == rdma)
        };
        state.hcas.iter().find(is_it).map(|hca| &hca.hardware.id)
    });
    let is_free =
        |row: &ClusterRow, of: Option<&String>| row.interface.is_none() && row.hca.as_ref() == of;
    let at = rows
        .iter()
        .position(|row| hca.is_some() && is_free(row, hca));
    let at = at.or_else(|| rows.iter().position(|row| is_free(row, None)));
    let row = match at {
        Some(at) => rows.get_mut(at),
        None => {
            rows.push(whose.clone());
            rows.last_mut()
        }
    };
    if let Some(row) = row {
        if let Some(hca) = hca {
            row.hca = Some(hca.clone());
        }
        row.interface = Some(interface.interface);
        row.network = Some(interface.name);
        row.addresses = interface.ips;
    }
}

#[cfg(test)]
mod tests {
    use node_wire::rdma_node::ResourceState;
    use node_wire::status::HostHca;

    use super::*;

    fn hca(id: &str, pod: Option<&str>) -> HcaState {
        HcaState {
            hardware: HostHca {
                id: id.into(),
                ..HostHca::default()
            },
            resource: Some("rdma/nic".into()),
            pod: pod.map(str::to_owned),
            ..HcaState::default()
        }
    }

    fn node(mode: &str, hcas: Vec<HcaState>) -> KnownNode {
        let resource = ResourceState {
            name: "rdma/nic".into(),
            mode: mode.into(),
            ..ResourceState::default()
        };
        KnownNode {
            node: "n1".into(),
            state: NodeState {
                resources: vec![resource],
                hcas,
                ..NodeState::default()
            },
        }
    }

    fn pod(name: &str, resource: &str, status: &Value) -> Value {
        json!({
            "metadata": {"namespace": "ml", "name": name,
                "annotations": {"k8s.v1.cni.cncf.io/network-status": status.to_string()}},
            "spec": {"nodeName": "n1", "containers": [
                {"resources": {"limits": {"cpu": "1"}}}, {"resources": {"limits": {resource: "1"}}}]},
        })
    }

    fn interface(name: &str, address: &str) -> Value {
        json!({"name": "default/rail", "interface": name, "ips": ["10.0.0.7"],
            "device-info": {"type": "pci", "pci": {"pci-address": address}}})
    }

    fn shown(rows: &[ClusterRow]) -> Vec<String> {
        let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "-".to_owned());
        let row =
            |row: &ClusterRow| [row.pod.clone(), text(&row.hca), text(&row.interface)].join(" ");
        rows.iter().map(row).collect()
    }

    #[test]
    fn an_interface_is_on_the_line_of_its_hca() {
        let nodes = [node(
            "exclusive",
            vec![hca("a", Some("ml/p")), hca("b", Some("ml/p"))],
        )];
        let default =
            json!({"name": "cbr0", "interface": "eth0", "default": true, "ips": ["1.2.3.4"]});
        let status = json!([default, interface("net1", "b"), interface("net2", "a")]);
        let pods = [
            pod("p", "rdma/nic", &status),
            pod("other", "nvidia.com/gpu", &json!([default])),
        ];
        let expected = ["ml/p b net1", "ml/p a net2"];
        assert_eq!(shown(&rows(&nodes, &pods, &BTreeSet::new())), expected);
    }

    #[test]
    fn a_pod_without_an_hca_is_there_for_a_network_of_ours() {
        let definition = |name: &str, plugin: &str| {
            let config = json!({"plugins": [{"type": plugin}, {"type": "tuning"}]});
            json!({"metadata": {"namespace": "default", "name": name}, "spec": {"config": config.to_string()}})
        };
        assert_eq!(
            ours(&definition("rail", "rdma-netdev")).unwrap(),
            "default/rail"
        );
        assert_eq!(ours(&definition("other", "bridge")), None);
        let pods = [pod("p", "cpu", &json!([interface("net1", "x")]))];
        let networks = BTreeSet::from(["default/rail".to_owned()]);
        let found = rows(&[], &pods, &networks);
        assert_eq!(shown(&found), ["ml/p - net1"]);
        assert_eq!(unknown(&[], &found).len(), 1);
        assert!(rows(&[], &pods, &BTreeSet::new()).is_empty());
    }

    #[test]
    fn a_pod_with_a_share_has_the_hca_of_its_interface() {
        let nodes = [node("shared", vec![hca("a", None)])];
        let with = pod("with", "rdma/nic", &json!([interface("net1", "a")]));
        let without = pod("without", "rdma/nic", &json!("not a list"));
        let expected = ["ml/with a net1", "ml/without - -"];
        assert_eq!(
            shown(&rows(&nodes, &[without, with], &BTreeSet::new())),
            expected
        );
    }
}
