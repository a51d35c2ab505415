//! The shipped pods on the shipped network: from manifest to addresses on both
//! interfaces, with the kubelet's and Multus' stand-ins before our CNI plugins.
//! A pair of veths plays the uplink; the lab has it with RDMA.

use std::fs;
use std::net::UdpSocket;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use e2e::bin_under_test::product;
use e2e::case;
use e2e::cni::Answer;
use e2e::harness::Case;
use e2e::kubelet::Pod;
use e2e::netns::{Netns, run};
use serde_json::{Value, json};

use crate::multus_node::MultusNode;

pub(crate) const CASES: &[Case] = &[
    case!(
        the_shipped_pods_reach_each_other_and_leave_nothing,
        Root,
        Netns,
        Macvlan,
        ReferencePlugins
    ),
    case!(
        a_pod_whose_namespace_went_first_leaves_nothing,
        Root,
        Netns,
        Macvlan,
        ReferencePlugins
    ),
    case!(
        a_pod_that_cannot_have_its_network_keeps_no_part_of_it,
        Root,
        Netns,
        Macvlan,
        ReferencePlugins
    ),
];

const RESOURCE: &str = "rdma/hca_shared_devices_a";
/// The uplink that the shipped definition names.
const UPLINK: &str = "ens2f0";

struct World {
    node: MultusNode,
    host_before: Value,
}

impl World {
    fn new() -> Result<Self> {
        let default = json!({"cniVersion": "1.0.0", "name": "default-net", "plugins": [{
            "type": "bridge", "bridge": "cni0",
            "ipam": {"type": "host-local", "subnet": "10.244.0.0/24"},
        }]});
        let node = MultusNode::new(RESOURCE, &["pool_3e71787e_0", "pool_3e71787e_1"], &default)?;
        let default = default.to_string().replace(
            r#""type":"host-local""#,
            &format!(
                r#""type":"host-local","dataDir":"{}""#,
                node.path("host-local").display()
            ),
        );
        fs::write(node.path("default.conflist"), default)?;
        for program in ["rdma-netdev", "rdma-ipam"] {
            symlink(product(program)?, node.path("bin").join(program))?;
        }
        let shipped = manifests().join("examples/perftest/nad.yaml");
        fs::copy(&shipped, node.path("networks/nad.yaml"))
            .with_context(|| format!("copy {}", shipped.display()))?;
        e2e::host_root::make(&node.path("root"))?;
        let policy = json!({
            "version": 1,
            "node": "node1",
            "stateDir": node.path("netdev"),
            "allow": {"nonRdma": true},
        });
        fs::write(node.path("policy.json"), policy.to_string())?;
        node.host.ip(&format!(
            "link add {UPLINK} mtu 4200 type veth peer name wire"
        ))?;
        node.host.ip(&format!("link set {UPLINK} up"))?;
        node.host.ip("link set wire up")?;
        // The bridge plugin makes its bridge once and leaves it.
        node.host.ip("link add cni0 type bridge")?;
        node.host.ip("link set cni0 up")?;
        let mut world = Self {
            node,
            host_before: Value::Null,
        };
        world.host_before = world.host()?;
        Ok(world)
    }

    /// The host's links: names, MTUs, whether they are meant to be up.
    fn host(&self) -> Result<Value> {
        let links = self.node.host.ip_json("link show")?;
        let links = links.as_array().context("no links")?.iter().map(|link| {
            let flags = link["flags"].as_array();
            let up = flags.is_some_and(|flags| flags.contains(&json!("UP")));
            json!([link["ifname"], link["mtu"], up])
        });
        Ok(links.collect())
    }

    fn pod(&self, file: &str) -> Result<Pod> {
        let manifest = fs::read_to_string(manifests().join("examples/perftest").join(file))?;
        let pod = Pod::from_manifest(&manifest)?
            .pop()
            .context("no pod in the manifest")?;
        self.node.kubelet.admit(pod.clone())?;
        Ok(pod)
    }

    fn call(&self, command: &str, pod: &Pod, netns: &Path) -> Result<Answer> {
        let call = self.node.multus(pod, netns)?;
        let call = call.env("RDMA_NETDEV_POLICY", self.node.path("policy.json"));
        let call = call.env("RDMA_HOST_ROOT", self.node.path("root"));
        call.run(command, &self.node.multus_conf())
    }

    /// Addresses that are leased, by the administrator's tool.
    fn leases(&self) -> Result<Vec<String>> {
        let mut list = self.node.host.command(product("rdmactl")?);
        list.env("RDMA_NETDEV_POLICY", self.node.path("policy.json"))
            .env("RDMA_HOST_ROOT", self.node.path("root"))
            .args(["addresses", "--json"]);
        let document: Value = serde_json::from_str(&run(&mut list)?)?;
        let leases = document["leases"].as_array().context("no list")?;
        let address = |lease: &Value| lease["address"].as_str().map(str::to_owned);
        leases
            .iter()
            .map(|lease| address(lease).context("a lease without an address"))
            .collect()
    }

    /// Links, leases and the journal are as before the first pod.
    fn assert_untouched(&self) -> Result<()> {
        // The kernel takes a dead namespace's links apart in its own time.
        let end = Instant::now() + Duration::from_secs(10);
        while self.host()? != self.host_before && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(self.host()?, self.host_before);
        let leases = self.leases()?;
        assert!(leases.is_empty(), "held: {leases:?}");
        assert!(
            self.journal().is_empty(),
            "in the journal: {:?}",
            self.journal()
        );
        Ok(())
    }

    /// Attachments that our plugin keeps account of.
    fn journal(&self) -> Vec<String> {
        fs::read_dir(self.node.path("netdev/attachments"))
            .into_iter()
            .flatten()
            .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
            .filter(|name| !name.starts_with('.'))
            .collect()
    }
}

fn manifests() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("manifests")
}

/// Address and MTU of `net1`.
fn net1(netns: &Netns) -> Result<(String, u64)> {
    let shown = netns.ip_json("-4 addr show dev net1")?;
    let address = shown[0]["addr_info"][0]["local"]
        .as_str()
        .context("net1 has no address")?;
    Ok((
        address.to_owned(),
        shown[0]["mtu"].as_u64().context("net1 has no MTU")?,
    ))
}

fn the_shipped_pods_reach_each_other_and_leave_nothing() -> Result<()> {
    let world = World::new()?;
    let pods = ["pod-1.yaml", "pod-2.yaml"].map(|file| world.pod(file));
    let netns = [Netns::new("pod")?, Netns::new("pod")?];
    let mut addresses = Vec::new();
    for (pod, netns) in pods.iter().zip(&netns) {
        let pod = pod.as_ref().unwrap();
        let result = world.call("ADD", pod, netns.path())?.success()?;
        let address = result["ips"][0]["address"].as_str().unwrap();
        assert!(
            address.starts_with("10.244.0."),
            "the runtime sees the default network: {result}"
        );
        let (address, mtu) = net1(netns)?;
        assert!(address.starts_with("192.168.111."), "{address}");
        assert_eq!(mtu, 4200, "the uplink's");
        addresses.push(address);
    }
    assert_ne!(addresses[0], addresses[1]);
    let (first, second) = (addresses[0].clone(), addresses[1].clone());
    let mut leases = world.leases()?;
    leases.sort();
    addresses.sort();
    assert_eq!(leases, addresses);
    assert_eq!(world.journal().len(), 2, "{:?}", world.journal());
    // From the first pod's address to the second's, which leaves no way but net1.
    let (from, to) = (format!("{first}:0"), format!("{second}:4791"));
    let listening = netns[1].enter(|| Ok(UdpSocket::bind(&to)?))?;
    listening.set_read_timeout(Some(Duration::from_secs(5)))?;
    let sending = netns[0].enter(|| Ok(UdpSocket::bind(&from)?))?;
    sending.send_to(b"hello", &to)?;
    let mut heard = [0; 8];
    let (count, _) = listening
        .recv_from(&mut heard)
        .context("nothing came through")?;
    assert_eq!(&heard[..count], b"hello");

    for (pod, netns) in pods.iter().zip(&netns) {
        let pod = pod.as_ref().unwrap();
        world.call("DEL", pod, netns.path())?.success()?;
        assert_eq!(
            netns.ip_json("link show")?.as_array().map(Vec::len),
            Some(1),
            "lo alone"
        );
        world.call("DEL", pod, netns.path())?.success()?;
    }
    world.assert_untouched()
}

fn a_pod_whose_namespace_went_first_leaves_nothing() -> Result<()> {
    let world = World::new()?;
    let pod = world.pod("pod-1.yaml")?;
    let netns = Netns::new("pod")?;
    world.call("ADD", &pod, netns.path())?.success()?;
    netns.delete()?;
    world.call("DEL", &pod, netns.path())?.success()?;
    world.assert_untouched()?;
    world.call("DEL", &pod, Path::new(""))?.success()?;
    Ok(())
}

fn a_pod_that_cannot_have_its_network_keeps_no_part_of_it() -> Result<()> {
    let mut world = World::new()?;
    let pod = world.pod("pod-1.yaml")?;
    world
        .node
        .host
        .ip(&format!("link set {UPLINK} name other"))?;
    world.host_before = world.host()?;
    let netns = Netns::new("pod")?;
    let (_, message) = world.call("ADD", &pod, netns.path())?.refusal()?;
    assert!(
        message.contains(UPLINK),
        "it says which netdev is missing: {message}"
    );
    assert_eq!(
        netns.ip_json("link show")?.as_array().map(Vec::len),
        Some(1),
        "lo alone"
    );
    world.assert_untouched()
}
