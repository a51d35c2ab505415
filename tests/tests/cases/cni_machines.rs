//! One pod on each machine of the corpus but GKE's, which `cni_late_rails` has. The machine's tree is its
//! sysfs, and veths with the names, MAC addresses and MTUs of its netdevs are its NICs. Pool, policy and
//! network are those that `kubectl rdma plan` writes for it (`admin/tests/plans`), with two exceptions:
//! the store is the node's alone, and the policy allows virtual links.
//!
//! On machines without netdevs the plan has no network: the pod's HCAs are bound when its container
//! starts. A network of attach `rdma-only` is tried behind another plugin there. The RDMA subsystem is in
//! shared mode; only the lab can move RDMA devices.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::cni::Call;
use e2e::host_state::unchanged;
use e2e::kubelet::Pod;
use e2e::netns::Netns;
use e2e::scene::{Scene, answer_of};
use hca_trees::{Tree, cloud, machine};
use serde_json::{Value, json};

use super::cni_late_machine::{Admitted, GPU, Node, links};

cases! {
    an_azure_nd_h100_pod_has_an_infiniband_function_of_its_socket => pod_on(&Machine {
        plan: "azure-nd-h100",
        lay: cloud::azure_nd_h100,
        uplink: "eth0",
        units: 8,
        gpus: &[5],
        devices: &["mlx5_5"],
        ..BARE
    });
    an_azure_nd_gb300_pod_has_a_vf_of_its_cpu => pod_on(&Machine {
        plan: "azure-nd-gb300",
        lay: cloud::azure_nd_gb300,
        uplink: "eth0",
        units: 4,
        gpus: &[2],
        devices: &["mlx5_2"],
        ..BARE
    });
    an_oci_pod_has_the_vfs_of_its_gpus_card => pod_on(&Machine {
        plan: "oci",
        lay: cloud::oci,
        uplink: "eth0",
        each: "-6 route add default via fe80::1 dev {} proto ra metric 10#",
        units: 16,
        gpus: &[3],
        devices: &["mlx5_22", "mlx5_23"],
        moved: &["rdma6v0", "rdma7v0"],
        interfaces: &[("rdma6", "10.70.0.1/16"), ("rdma7", "10.71.0.1/16")],
    });
    a_p5_pod_has_the_efa_devices_of_its_gpus_switch => pod_on(&Machine {
        plan: "p5",
        lay: p5,
        uplink: "ens5",
        units: 32,
        gpus: &[1],
        devices: &["rdmap96s0", "rdmap97s0", "rdmap98s0", "rdmap99s0"],
        ..BARE
    });
    an_erdma_pod_has_the_virtio_nic_with_its_address => pod_on(&Machine {
        plan: "erdma",
        lay: cloud::erdma,
        uplink: "eth0",
        // As DHCP does.
        each: "addr add 10.1.#.2/32 dev {} valid_lft 9000 preferred_lft 9000",
        devices: &["erdma_0"],
        moved: &["eth1"],
        interfaces: &[("eth1", "10.1.0.2/32")],
        ..BARE
    });
    a_pvrdma_pod_has_the_vmxnet3_nic_of_function_0 => pod_on(&Machine {
        plan: "pvrdma",
        lay: cloud::pvrdma,
        uplink: "ens160",
        devices: &["vmw_pvrdma0"],
        moved: &["ens192"],
        interfaces: &[("rdma0", "10.64.0.1/16")],
        ..BARE
    });
    an_hgx_b200_pod_has_its_gpus_nic_and_no_nvswitch => pod_on(&Machine {
        plan: "hgx-b200",
        lay: cloud::hgx_b200,
        uplink: "eno1",
        units: 8,
        gpus: &[0],
        devices: &["mlx5_4"],
        ..BARE
    });
    a_pod_has_thor_pollara_and_e810_ports => pod_on(&Machine {
        plan: "other-vendors",
        lay: cloud::other_vendors,
        units: 3,
        devices: &["bnxt_re0", "ionic_0", "irdma0"],
        moved: &["ens1np0", "ens2", "ens3f0"],
        interfaces: &[
            ("rdma0", "10.64.0.1/16"),
            ("rdma1", "10.65.0.1/16"),
            ("rdma2", "10.66.0.1/16"),
        ],
        ..BARE
    });
    a_gb200_pod_has_a_nic_of_its_cpu => pod_on(&Machine {
        plan: "gb200",
        lay: machine::gb200,
        units: 4,
        gpus: &[3],
        devices: &["mlx5_3"],
        moved: &["ib3"],
        interfaces: &[("rdma3", "10.67.0.1/16")],
        ..BARE
    });
    a_gb300_pod_has_the_nic_that_is_crosswise_to_its_gpu => pod_on(&Machine {
        plan: "gb300",
        lay: machine::gb300,
        units: 4,
        gpus: &[0],
        devices: &["mlx5_1"],
        moved: &["ib1"],
        interfaces: &[("rdma1", "10.65.0.1/16")],
        ..BARE
    });
    a_pod_has_vfs_with_and_without_a_node_guid => pod_on(&Machine {
        plan: "vf-without-guid",
        lay: cloud::vf_without_guid,
        units: 2,
        devices: &["mlx5_1", "mlx5_2"],
        moved: &["ens1v0", "ens1v1"],
        interfaces: &[("net1", "10.64.0.1/16"), ("net2", "10.64.0.2/16")],
        ..BARE
    });
}

/// A machine with one unit, and without GPUs, netdevs for pods or an uplink.
const BARE: Machine<'_> = Machine {
    plan: "",
    lay: |_| {},
    uplink: "",
    each: "",
    units: 1,
    gpus: &[],
    devices: &[],
    moved: &[],
    interfaces: &[],
};

/// `rdma_ucm` is not loaded where only EFA devices are.
fn p5(tree: &Tree) {
    cloud::p5(tree);
    tree.remove("/sys/class/misc/rdma_cm");
}

struct Machine<'a> {
    plan: &'a str,
    lay: fn(&Tree),
    /// The netdev that has the default route.
    uplink: &'a str,
    /// What is done to each other netdev, `{}`, of number `#`.
    each: &'a str,
    /// Units that the daemon reports to the kubelet.
    units: usize,
    /// The pod's GPUs.
    gpus: &'a [usize],
    /// RDMA devices that the pod gets: as many as it requests.
    devices: &'a [&'a str],
    /// Netdevs that are not on the host while the pod has them.
    moved: &'a [&'a str],
    /// The pod's interfaces, with their addresses.
    interfaces: &'a [(&'a str, &'a str)],
}

/// What the values of a machine's plan are: pools, policy, and the plugin of its network.
struct Plan {
    pools: Value,
    policy: Value,
    network: Option<Value>,
}

impl Plan {
    fn read(name: &str) -> Result<Self> {
        let file = format!("../admin/tests/plans/{name}.yaml");
        let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file))?;
        let values: Value = serde_saphyr::from_str(&text)?;
        let mut policy = values["policy"].clone();
        policy.as_object_mut().context("policy")?.remove("stores");
        let networks = values["networks"].as_object();
        let network = networks.and_then(|all| all.iter().next());
        let network = network.map(|(name, network)| {
            let mut plugin = network["plugins"][0].clone();
            plugin["cniVersion"] = json!("1.0.0");
            plugin["name"] = json!(name);
            plugin
        });
        let pools = values["pools"].clone();
        Ok(Self {
            pools,
            policy,
            network,
        })
    }
}

impl Machine<'_> {
    fn scene(&self, plan: &Plan) -> Result<Scene> {
        let lay = |tree: &Tree| {
            tree.rdma_core(true);
            (self.lay)(tree);
        };
        let scene = Scene::laid(lay, &[])?;
        let class = scene.tree()?.path("/sys/class/net");
        let mut netdevs = Vec::new();
        for entry in fs::read_dir(&class)? {
            netdevs.push(entry?.file_name().to_string_lossy().into_owned());
        }
        netdevs.retain(|name| name != self.uplink);
        netdevs.sort();
        for name in netdevs.iter().map(String::as_str).chain([self.uplink]) {
            if name.is_empty() {
                continue;
            }
            scene.host.add_nic(name, &format!("p-{name}"))?;
            let read = |attribute| fs::read_to_string(class.join(name).join(attribute));
            let (mac, mtu) = (read("address")?, read("mtu")?);
            scene.on_host(&[
                &format!("link set {name} down address {mac} mtu {mtu}"),
                &format!("link set {name} up"),
            ])?;
        }
        for (number, name) in netdevs.iter().enumerate().filter(|_| !self.each.is_empty()) {
            let command = self
                .each
                .replace("{}", name)
                .replace('#', &number.to_string());
            scene.host.netns.ip(&command)?;
        }
        if !self.uplink.is_empty() {
            let address = format!("addr add 192.0.2.7/24 dev {}", self.uplink);
            scene.on_host(&[&address, "route add default via 192.0.2.1"])?;
        }
        let mut keys = plan.policy.clone();
        keys["cdiDir"] = json!(scene.host.directory().join("cdi"));
        scene.policy(&json!({"nonRdma": null, "unallocated": null}), &keys)?;
        Ok(scene)
    }

    fn pod(&self, resource: &str) -> Result<Pod> {
        let mut limits = vec![(resource, u64::try_from(self.devices.len())?)];
        if !self.gpus.is_empty() {
            limits.push((GPU, u64::try_from(self.gpus.len())?));
        }
        Pod::with_limits("worker", &limits)
    }
}

/// PCI addresses of the HCAs of a pod, by RDMA device.
fn hcas(node: &Node, pod: &Admitted) -> Result<BTreeMap<String, String>> {
    let mut hcas = node.hcas(pod)?;
    if hcas.is_empty() {
        hcas.extend(pod.slots.iter().cloned());
    }
    let mut named = BTreeMap::new();
    for hca in hcas {
        for device in fs::read_dir(node.function(&hca)?.join("infiniband"))? {
            let name = device?.file_name().to_string_lossy().into_owned();
            named.insert(name, hca.clone());
        }
    }
    Ok(named)
}

/// Interfaces but loopback, with their IPv4 addresses.
fn addresses(netns: &Netns) -> Result<Vec<(String, String)>> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let links = netns.ip_json("-4 addr show")?;
    let links = links.as_array().into_iter().flatten();
    let mut found = Vec::new();
    for link in links.filter(|link| link["ifname"] != "lo") {
        for address in link["addr_info"].as_array().into_iter().flatten() {
            let address = format!("{}/{}", text(&address["local"]), address["prefixlen"]);
            found.push((text(&link["ifname"]), address));
        }
    }
    found.sort();
    Ok(found)
}

fn names(netns: &Netns) -> Result<BTreeSet<String>> {
    let links = netns.ip_json("link show")?;
    let names = links.as_array().into_iter().flatten();
    Ok(names
        .filter_map(|link| Some(link["ifname"].as_str()?.to_owned()))
        .collect())
}

fn pod_on(machine: &Machine<'_>) -> Result<()> {
    let plan = Plan::read(machine.plan)?;
    let pools = &plan.pools;
    let resource = pools["pools"][0]["resource"]
        .as_str()
        .context("a resource")?;
    let node = Node::on(
        machine.scene(&plan)?,
        &pools.to_string(),
        resource,
        machine.units,
    )?;
    let (before, host) = (node.scene.host_state()?, names(&node.scene.host.netns)?);
    let pod = node.admit_pod(machine.pod(resource)?, machine.gpus)?;
    let attached = match &plan.network {
        Some(network) => by_network(&node, &pod, network)?,
        None => Vec::new(),
    };
    let options = node.kubelet.run_options("default/worker", "main");
    let options = options.with_context(|| node.daemon.log())?;

    let hcas = hcas(&node, &pod)?;
    assert_eq!(Vec::from_iter(hcas.keys()), machine.devices);
    let given = options.devices.iter().map(|one| one.host_path.clone());
    let given = given.chain(node.cdi_devices()?.into_values().flatten());
    let given: BTreeSet<String> = given.filter(|path| path.contains("uverbs")).collect();
    let nodes = hcas
        .values()
        .map(|hca| Ok(format!("/dev/infiniband/{}", node.verbs(hca)?)));
    assert_eq!(given, nodes.collect::<Result<_>>()?);
    let gone: Vec<String> = host
        .difference(&names(&node.scene.host.netns)?)
        .cloned()
        .collect();
    assert_eq!(gone, machine.moved);
    let expected = machine
        .interfaces
        .iter()
        .map(|(name, address)| ((*name).to_owned(), (*address).to_owned()));
    assert_eq!(addresses(&pod.netns)?, Vec::from_iter(expected));
    if attached.is_empty() {
        behind_another_plugin(&node, &pod, &hcas)?;
    }

    for (call, network) in &attached {
        answer_of(call, "DEL", network)?.success().context("DEL")?;
    }
    ensure!(links(&pod)?.is_empty(), "{:?}", links(&pod)?);
    unchanged(&before, || node.scene.host_state(), "after DEL")?;
    node.remove(&pod)
}

/// The calls of Multus: one for all units if the network takes all, else one for each.
fn by_network(node: &Node, pod: &Admitted, network: &Value) -> Result<Vec<(Call, Value)>> {
    let takes_all = network["devices"] == "all";
    let units = pod
        .slots
        .iter()
        .take(if takes_all { 1 } else { usize::MAX });
    let mut attached = Vec::new();
    for (number, unit) in (1..).zip(units) {
        let mut call = pod.call.clone();
        call.ifname = format!("net{number}");
        let mut network = network.clone();
        network["runtimeConfig"] = json!({"deviceID": unit});
        node.add_by(&call, &network)?;
        attached.push((call, network));
    }
    Ok(attached)
}

/// Another plugin's interface keeps its result, and the device information for Multus names the RDMA device.
fn behind_another_plugin(
    node: &Node,
    pod: &Admitted,
    hcas: &BTreeMap<String, String>,
) -> Result<()> {
    let (device, hca) = hcas.first_key_value().context("no HCA")?;
    pod.netns.ip("link add net1 type veth peer name other")?;
    let chain = json!({"cniVersion": "1.0.0",
        "interfaces": [{"name": "net1", "sandbox": pod.netns.path()}]});
    let info = format!(
        "/run/k8s.cni.cncf.io/devinfo/cni/default-ib-{}_net1",
        pod.call.container_id
    );
    let network = json!({"cniVersion": "1.0.0", "name": "ib", "type": "rdma-netdev",
        "attach": "rdma-only", "prevResult": chain,
        "runtimeConfig": {"deviceID": hca, "CNIDeviceInfoFile": info}});
    assert_eq!(node.add_by(&pod.call, &network)?, chain);
    let told =
        fs::read_to_string(node.scene.tree()?.path(info)).context("no device information")?;
    let told: Value = serde_json::from_str(&told)?;
    assert_eq!(
        told["pci"],
        json!({"pci-address": hca, "rdma-device": device})
    );
    answer_of(&pod.call, "DEL", &network)?.success()?;
    pod.netns.ip("link del net1").map(drop)
}
