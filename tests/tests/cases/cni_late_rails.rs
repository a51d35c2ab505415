//! `devices: all` with slots: one attachment brings every NIC that the pod's slots became.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::case;
use e2e::harness::Case;
use e2e::host_state::{State, unchanged};
use e2e::kubelet::{Container, Pod};
use e2e::scene::{DENIED, TRY_AGAIN, answer_of};
use serde_json::{Value, json};

use super::cni_faults::{at_least_ten_killed, inject, spread, trace, was_killed};
use super::cni_late::WAIT_TIMEOUT;
use super::cni_late_faults::Killer;
use super::cni_late_machine::{Admitted, NETDEVS, NIC, NICS, Node, is_late, links};

pub(crate) const CASES: &[Case] = &[
    case!(all_slots_of_a_pod_are_one_attachment, Root, Netns),
    case!(slots_of_all_containers_are_one_attachment, Root, Netns),
    case!(
        a_pod_on_gke_has_the_names_and_addresses_of_its_nics,
        Root,
        Netns
    ),
    case!(the_policy_numbers_the_rails_of_slots, Root, Netns),
    case!(
        children_of_all_slots_have_one_host_number,
        Root,
        Netns,
        Macvlan
    ),
    case!(one_nic_that_the_policy_denies_frees_all_slots, Root, Netns),
    case!(one_nic_without_its_node_undoes_all, Root, Netns),
    case!(
        a_killed_add_of_all_slots_leaves_nothing,
        Root,
        Netns,
        Strace
    ),
    case!(
        an_add_of_all_slots_after_a_killed_one_heals,
        Root,
        Netns,
        Strace
    ),
    case!(
        a_killed_del_of_all_slots_is_finished_by_the_next,
        Root,
        Netns,
        Strace
    ),
    case!(del_of_all_slots_needs_no_daemon, Root, Netns),
    case!(
        a_daemon_killed_between_the_files_of_two_slots_leaves_nothing,
        Root,
        Netns,
        Strace
    ),
];

/// Interfaces of a result by name, each with its addresses.
fn interfaces(result: &Value) -> Vec<(String, Vec<String>)> {
    let interfaces = result["interfaces"].as_array().into_iter().flatten();
    let ips = result["ips"].as_array().cloned().unwrap_or_default();
    let of = |(number, interface): (usize, &Value)| {
        let own = ips.iter().filter(|ip| ip["interface"] == json!(number));
        let own = own.filter_map(|ip| Some(ip["address"].as_str()?.to_owned()));
        let name = interface["name"].as_str().unwrap_or_default().to_owned();
        (name, own.collect())
    };
    interfaces.enumerate().map(of).collect()
}

fn names(result: &Value) -> Vec<String> {
    interfaces(result)
        .into_iter()
        .map(|(name, _)| name)
        .collect()
}

fn hcas(numbers: &[usize]) -> BTreeSet<String> {
    numbers.iter().map(|nic| NICS[*nic].to_owned()).collect()
}

/// After DEL the host is as before, nothing is bound, and the pod has no interface.
fn returned(node: &Node, pod: &Admitted, before: &State, when: &str) -> Result<()> {
    unchanged(before, || node.scene.host_state(), when)?;
    node.nothing_is_left().context(when.to_owned())?;
    ensure!(links(pod)?.is_empty(), "{when}: {:?}", links(pod)?);
    Ok(())
}

fn all_slots_of_a_pod_are_one_attachment() -> Result<()> {
    let node = Node::new()?;
    let before = node.scene.host_state()?;
    let keys = json!({});
    let pod = node.admit("a", &[0, 1, 6, 7])?;
    ensure!(
        node.kubelet.run_options("default/a", "main").is_err(),
        "a container starts before its NICs are there"
    );
    let result = node.add(&pod, &keys)?;
    // Rails are the places in the pool, as with units that name their HCA.
    ensure!(
        names(&result) == ["net1-0", "net1-1", "net1-6", "net1-7"],
        "{result:#}"
    );
    assert_eq!(node.hcas(&pod)?, hcas(&[0, 1, 6, 7]));
    node.kubelet.run_options("default/a", "main")?;
    let first = pod.netns.ip_json("link show net1")?;
    ensure!(first[0]["ifname"] == "net1-0", "{first}");
    let mut check = node.network(&pod, &keys);
    check["prevResult"] = result;
    answer_of(&pod.call, "CHECK", &check)?.success()?;
    // The same again is refused, and takes nothing away.
    let again = answer_of(&pod.call, "ADD", &node.network(&pod, &keys))?;
    let (code, text) = again.refusal()?;
    ensure!(code == 103, "{code} {text}");
    assert_eq!(node.hcas(&pod)?, hcas(&[0, 1, 6, 7]));
    node.kubelet.run_options("default/a", "main")?;
    // Another pod of the node has the others.
    let other = node.admit("b", &[2, 5])?;
    let result = node.add(&other, &keys)?;
    ensure!(names(&result).len() == 2, "{result:#}");
    let (own, others) = (node.hcas(&pod)?, node.hcas(&other)?);
    ensure!(own.is_disjoint(&others), "{own:?} {others:?}");
    node.del(&other, &keys)?;
    assert_eq!(node.hcas(&pod)?, hcas(&[0, 1, 6, 7]));
    node.del(&pod, &keys)?;
    node.del(&pod, &keys)?;
    returned(&node, &pod, &before, "after DEL")
}

fn slots_of_all_containers_are_one_attachment() -> Result<()> {
    let node = Node::new()?;
    let before = node.scene.host_state()?;
    let keys = json!({});
    let containers = ["one", "two"].map(|name| Container::with_limits(name, &[(NIC, 2)]));
    let pod = Pod::of_containers("a", Vec::new(), containers.to_vec())?;
    let pod = node.admit_pod(pod, &[])?;
    assert_eq!(pod.slots.len(), 4);
    let result = node.add(&pod, &keys)?;
    assert_eq!(names(&result).len(), 4, "{result:#}");
    for container in ["one", "two"] {
        let options = node.kubelet.run_options("default/a", container)?;
        assert_eq!(options.cdi_devices.len(), 2, "{container}");
    }
    node.del(&pod, &keys)?;
    returned(&node, &pod, &before, "after DEL")
}

/// The policy and the network that are shipped for GKE, on its machine: addresses by DHCP, each NIC with
/// a route to the fabric by its gateway.
fn a_pod_on_gke_has_the_names_and_addresses_of_its_nics() -> Result<()> {
    let manifests = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("manifests");
    let read = |name: &str| fs::read_to_string(manifests.join(name));
    let values: Value = serde_saphyr::from_str(&read("chart/values/gke.yaml")?)?;
    let policy = &values["policy"];
    let plugin = |example: &str| -> Result<Value> {
        let kustomization = read(&format!("examples/{example}/kustomization.yaml"))?;
        let kustomization: Value = serde_saphyr::from_str(&kustomization)?;
        let patch = kustomization["patches"][0]["patch"].as_str();
        let patch: Value = serde_saphyr::from_str(patch.context("the network's patch")?)?;
        let network = patch[0]["value"].as_str().context("a network")?;
        let network: Value = serde_json::from_str(network)?;
        Ok(network["plugins"][0].clone())
    };
    let shipped = plugin("gke")?;
    assert_eq!(shipped, plugin("rails-gib")?, "jobs and workers");

    let node = Node::new()?;
    let cdi = node.scene.host.directory().join("cdi");
    let keys = json!({"cdiDir": cdi, "fabricAddresses": policy["fabricAddresses"]});
    node.scene.policy(&json!({"unallocated": null}), &keys)?;
    for (number, netdev) in NETDEVS.iter().enumerate() {
        let subnet = format!("192.168.{}", number + 1);
        for line in [
            format!("link set {netdev} up mtu 8896"),
            format!("addr add {subnet}.4/32 dev {netdev} valid_lft 3600 preferred_lft 3600"),
            format!("route add {subnet}.1 dev {netdev} scope link"),
            format!("route add {subnet}.0/24 via {subnet}.1 dev {netdev}"),
        ] {
            node.scene.on_host(&[&line])?;
        }
    }
    let before = node.scene.host_state()?;
    ensure!(shipped.get("ipam").is_none(), "the fabric's addresses stay");
    let keys = json!({"attach": shipped["attach"], "names": shipped["names"]});
    let pod = node.admit("job", &[0, 1, 6, 7])?;
    let result = node.add(&pod, &keys)?;
    let expected = [0, 1, 6, 7].map(|number| {
        let address = format!("192.168.{}.4/32", number + 1);
        (NETDEVS[number].to_owned(), vec![address])
    });
    assert_eq!(interfaces(&result), expected, "{result:#}");
    let routes = pod.netns.ip("route show")?;
    ensure!(
        routes.contains("192.168.7.0/24 via 192.168.7.1 dev gpu6rdma0"),
        "{routes}"
    );
    let link = pod.netns.ip_json("link show gpu6rdma0")?;
    ensure!(link[0]["mtu"] == 8896, "{link}");
    node.del(&pod, &keys)?;
    returned(&node, &pod, &before, "after DEL")
}

fn the_policy_numbers_the_rails_of_slots() -> Result<()> {
    let node = Node::new()?;
    let rails = json!({NICS[6]: 70, NETDEVS[7]: 60, "gpu[0-5]rdma0": 1});
    let policy = json!({"rails": rails, "cdiDir": node.scene.host.directory().join("cdi")});
    node.scene.policy(&json!({"unallocated": null}), &policy)?;
    let before = node.scene.host_state()?;
    let keys = json!({"names": "rail{rail}"});
    let pod = node.admit("a", &[6, 7])?;
    let result = node.add(&pod, &keys)?;
    ensure!(names(&result) == ["rail60", "rail70"], "{result:#}");
    node.del(&pod, &keys)?;
    returned(&node, &pod, &before, "after DEL")?;
    node.remove(&pod)?;
    // Two NICs on one rail: nothing is bound for a pod that is refused.
    let pod = node.admit("b", &[0, 1])?;
    let refused = answer_of(&pod.call, "ADD", &node.network(&pod, &keys))?;
    let (code, text) = refused.refusal()?;
    ensure!(code == DENIED && text.contains("rail 1"), "{code} {text}");
    returned(&node, &pod, &before, "after the refusal")
}

fn children_of_all_slots_have_one_host_number() -> Result<()> {
    let node = Node::new()?;
    let before = node.scene.host_state()?;
    let ranges: serde_json::Map<String, Value> = (0..8)
        .map(|rail| {
            let range = json!({"range": format!("10.64.{rail}.0/24"),
                "range_start": format!("10.64.{rail}.10")});
            (rail.to_string(), range)
        })
        .collect();
    let keys = json!({"attach": "macvlan", "ipam": {"type": "rdma-ipam", "ranges": ranges}});
    let pod = node.admit("a", &[2, 3, 4])?;
    let result = node.add(&pod, &keys)?;
    let found = interfaces(&result);
    assert_eq!(found.len(), 3);
    for (name, addresses) in &found {
        let rail = name.trim_start_matches("net1-");
        ensure!(*addresses == [format!("10.64.{rail}.10/24")], "{result:#}");
    }
    node.kubelet.run_options("default/a", "main")?;
    node.del(&pod, &keys)?;
    returned(&node, &pod, &before, "after DEL")
}

fn one_nic_that_the_policy_denies_frees_all_slots() -> Result<()> {
    let node = Node::new()?;
    let before = node.scene.host_state()?;
    let cdi = json!({"cdiDir": node.scene.host.directory().join("cdi")});
    let allow = json!({"unallocated": null, "netdevs": [{"ifNames": ["gpu[0-6]rdma0"]}]});
    node.scene.policy(&allow, &cdi)?;
    let keys = json!({});
    let pod = node.admit("a", &[0, 6, 7])?;
    let refused = answer_of(&pod.call, "ADD", &node.network(&pod, &keys))?;
    let (code, text) = refused.refusal()?;
    ensure!(
        code == DENIED && text.contains("gpu7rdma0"),
        "{code} {text}"
    );
    returned(&node, &pod, &before, "after the refusal")?;
    node.del(&pod, &keys)?;
    returned(&node, &pod, &before, "after DEL")
}

/// One verbs device has no node yet: udev is late.
fn one_nic_without_its_node_undoes_all() -> Result<()> {
    let node = Node::new()?;
    let before = node.scene.host_state()?;
    let keys = json!({});
    let pod = node.admit("a", &[0, 1, 6, 7])?;
    let devices = node.scene.tree()?.path("/dev/infiniband");
    let (own, aside) = (devices.join("uverbs6"), devices.join("aside"));
    fs::rename(&own, &aside)?;
    let refused = answer_of(&pod.call, "ADD", &node.network(&pod, &keys))?;
    let (code, text) = refused.refusal()?;
    ensure!(code == TRY_AGAIN, "{code} {text}");
    returned(&node, &pod, &before, "after the refusal")?;
    fs::rename(&aside, &own)?;
    let started = Instant::now();
    while let Err(refused) = node.add(&pod, &keys) {
        ensure!(started.elapsed() < WAIT_TIMEOUT, "{refused:#}");
        node.del(&pod, &keys)?;
        thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(node.hcas(&pod)?, hcas(&[0, 1, 6, 7]));
    node.del(&pod, &keys)?;
    returned(&node, &pod, &before, "after DEL")
}

/// A pod with two slots, whose first ADD set up directories.
struct Faults {
    node: Node,
    pod: Admitted,
    keys: Value,
    before: State,
}

impl Faults {
    fn new() -> Result<Self> {
        let node = Node::new()?;
        let before = node.scene.host_state()?;
        let pod = node.admit("a", &[0, 7])?;
        let faults = Self {
            node,
            pod,
            keys: json!({}),
            before,
        };
        faults.works("at first")?;
        Ok(faults)
    }

    fn config(&self) -> String {
        self.node.network(&self.pod, &self.keys).to_string()
    }

    fn add(&self) -> Result<()> {
        self.node.add(&self.pod, &self.keys).map(drop)
    }

    fn del(&self, when: &str) -> Result<()> {
        self.node
            .del(&self.pod, &self.keys)
            .context(when.to_owned())?;
        returned(&self.node, &self.pod, &self.before, when)
    }

    fn works(&self, when: &str) -> Result<()> {
        self.add().context(when.to_owned())?;
        assert_eq!(self.node.hcas(&self.pod)?.len(), 2, "{when}");
        self.node.kubelet.run_options("default/a", "main")?;
        self.del(when)
    }
}

fn a_killed_add_of_all_slots_leaves_nothing() -> Result<()> {
    let faults = Faults::new()?;
    let (call, config) = (&faults.pod.call, faults.config());
    at_least_ten_killed(|| {
        let points = trace(&faults.node.scene.host, call, "ADD", &config)?;
        faults.del("after the traced ADD")?;
        let mut killed = 0;
        for point in spread(&points, 24) {
            let answer = inject(call, "ADD", &config, &point, "signal=KILL")?;
            killed += usize::from(was_killed(&answer));
            faults.del(&format!("after a kill at {point:?} and DEL"))?;
        }
        Ok(killed)
    })?;
    faults.works("at the end")
}

fn an_add_of_all_slots_after_a_killed_one_heals() -> Result<()> {
    let faults = Faults::new()?;
    let (call, config) = (&faults.pod.call, faults.config());
    at_least_ten_killed(|| {
        let points = trace(&faults.node.scene.host, call, "ADD", &config)?;
        faults.del("after the traced ADD")?;
        let mut killed = 0;
        for point in spread(&points, 20) {
            let answer = inject(call, "ADD", &config, &point, "signal=KILL")?;
            killed += usize::from(was_killed(&answer));
            let network = faults.node.network(&faults.pod, &faults.keys);
            let again = answer_of(call, "ADD", &network)?;
            if again.status.success() {
                assert_eq!(faults.node.hcas(&faults.pod)?.len(), 2, "{point:?}");
                faults.node.kubelet.run_options("default/a", "main")?;
            } else {
                // Refused only because the interfaces are there: the runtime's DEL is due first.
                let (code, message) = again.refusal()?;
                ensure!(code == 103, "after a kill at {point:?}: {code} {message}");
            }
            faults.del(&format!("after a kill at {point:?}, ADD and DEL"))?;
        }
        Ok(killed)
    })
}

fn a_killed_del_of_all_slots_is_finished_by_the_next() -> Result<()> {
    let faults = Faults::new()?;
    let (call, config) = (&faults.pod.call, faults.config());
    at_least_ten_killed(|| {
        faults.add()?;
        let points = trace(&faults.node.scene.host, call, "DEL", &config)?;
        let mut killed = 0;
        for point in spread(&points, 20) {
            faults.add()?;
            let answer = inject(call, "DEL", &config, &point, "signal=KILL")?;
            killed += usize::from(was_killed(&answer));
            faults.del(&format!("after a DEL killed at {point:?} and another"))?;
        }
        Ok(killed)
    })?;
    faults.works("at the end")
}

fn del_of_all_slots_needs_no_daemon() -> Result<()> {
    let mut node = Node::new()?;
    let before = node.scene.host_state()?;
    let keys = json!({});
    let pod = node.admit("a", &[3, 4])?;
    node.add(&pod, &keys)?;
    node.kill_daemon()?;
    node.del(&pod, &keys)?;
    unchanged(&before, || node.scene.host_state(), "after DEL")?;
    ensure!(links(&pod)?.is_empty(), "{:?}", links(&pod)?);
    node.start_daemon()?;
    node.remove(&pod)?;
    // All HCAs can be given again, those that no daemon was told of among them.
    let all: Vec<usize> = (0..NICS.len()).collect();
    let next = node.admit("b", &all)?;
    let result = node.add(&next, &keys)?;
    assert_eq!(names(&result).len(), NICS.len());
    node.del(&next, &keys)?;
    returned(&node, &next, &before, "after the next pod")
}

/// Bindings are made by `linkat`, CDI files and their notes are put in place by `rename`: the daemon
/// dies before each of them, with one slot done and the other not. The plugin undoes all, and the
/// pod's next sandbox gets both NICs from the next daemon, whether the runtime's DEL came or not.
fn a_daemon_killed_between_the_files_of_two_slots_leaves_nothing() -> Result<()> {
    let mut faults = Faults::new()?;
    let mut killed = Vec::new();
    let container = faults.pod.call.container_id.clone();
    for (syscall, most) in [("linkat", 3), ("rename", 8), ("unlink", 8)] {
        let mut number = 0;
        let mut late = 0;
        while number < most {
            number += 1;
            // A new sandbox: the files of the one before are removed, and its own are made.
            faults.pod.call.container_id = format!("{container}-{syscall}-{number}");
            let when = format!("after a kill of the daemon at {syscall} {number}");
            let killer = Killer::attach(&faults.node.daemon, syscall, number)?;
            let network = faults.node.network(&faults.pod, &faults.keys);
            let added = answer_of(&faults.pod.call, "ADD", &network)?;
            let limit = match added.status.success() {
                true => Duration::from_millis(200),
                false => Duration::from_secs(2),
            };
            let is_over = faults.node.daemon.ended(limit).is_ok();
            drop(killer);
            if !is_over && !added.status.success() && late < 5 && is_late(&added)? {
                late += 1;
                number -= 1;
                faults.del(&when)?;
                continue;
            }
            if added.status.success() {
                // It has no more such calls, or was killed after its answer.
                let (node, pod) = (&faults.node, &faults.pod);
                node.del(pod, &faults.keys).context(when.clone())?;
                if !is_over {
                    break;
                }
            } else {
                let (code, text) = added.refusal()?;
                ensure!(code == TRY_AGAIN && is_over, "{when}: {code} {text}");
                unchanged(&faults.before, || faults.node.scene.host_state(), &when)?;
                let started = faults.node.kubelet.run_options("default/a", "main");
                ensure!(started.is_err(), "{when} a container starts");
                if number % 2 == 0 {
                    let (node, pod) = (&faults.node, &faults.pod);
                    node.del(pod, &faults.keys).context(when.clone())?;
                }
            }
            killed.push((syscall, number));
            faults.node.start_daemon()?;
            faults.pod.call.container_id += "-next";
            // The daemon knows its pool after its first scan.
            let started = Instant::now();
            while let Err(refused) = faults.add() {
                ensure!(started.elapsed() < WAIT_TIMEOUT, "{when}: {refused:#}");
                faults.node.del(&faults.pod, &faults.keys)?;
                thread::sleep(Duration::from_millis(100));
            }
            assert_eq!(faults.node.hcas(&faults.pod)?.len(), 2, "{when}");
            faults.node.kubelet.run_options("default/a", "main")?;
            faults.del(&when)?;
        }
    }
    ensure!(
        killed.len() >= 6,
        "only these kills took effect: {killed:?}"
    );
    Ok(())
}
