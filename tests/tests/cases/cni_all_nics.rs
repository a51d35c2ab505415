//! `devices: all`: every NIC of a pod in one attachment.

use std::fs;

use anyhow::{Context, Result, ensure};
use e2e::bin_under_test::product;
use e2e::cases;
use e2e::cni::{Answer, Call};
use e2e::host_state::{State, state, unchanged};
use e2e::netns::Netns;
use e2e::node_socket::{NodeSocket, allocation, allocation_of_hcas};
use e2e::scene::{
    DENIED, INVALID_NETWORK, STATE, Scene, TRY_AGAIN, UNAVAILABLE, answer_of, bounded, pci_of,
    refusal,
};
use node_wire::{Allocation, Pod};
use serde_json::{Value, json};

/// NICs of the host.
const NICS: u8 = 4;
const KERNEL: u64 = 100;
const EXISTS: u64 = 103;
const DIFFERS: u64 = 104;

cases! {
    all_nics_are_moved_and_keep_their_addresses => moved_with_their_addresses();
    all_nics_get_macvlans_with_addresses_of_one_range: Macvlan => children("macvlan");
    all_nics_get_ipvlans_with_addresses_of_one_range: Ipvlan => children("ipvlan");
    each_rail_has_a_range_of_its_own_and_the_pod_one_host_number: Macvlan => ranges_by_rail();
    a_host_number_that_is_taken_on_one_rail_is_another_there: Macvlan => taken_host_number();
    the_policy_numbers_the_rails => numbered_by_policy();
    interfaces_may_keep_the_hosts_names => names_of_the_host();
    each_interface_is_a_rail_of_its_own: Macvlan => source_routing();
    one_unit_makes_one_interface => one_unit();
    two_shares_of_an_hca_make_one_interface: Macvlan => two_shares();
    the_units_of_all_containers_are_attached => two_containers();
    a_unit_of_a_whole_pool_stands_for_its_hcas: Macvlan => pool_unit();
    an_attached_pod_is_not_attached_again => again();
    check_sees_what_one_interface_lost: Macvlan => checked();
    the_journal_lists_each_interface => listed();
    gids_of_all_interfaces_are_reported: Macvlan => gids_reported();
    rdma_only_behind_several_interfaces_needs_units: Macvlan => chain_of_several();
    gc_returns_all_nics => collected();
    nics_of_a_dead_pod_are_returned_by_reclaim => reclaimed();
    nics_of_a_dead_pod_are_taken_by_the_next => taken_from_the_dead();
    a_pod_without_units_is_denied => denied(&[], 0);
    a_forged_unit_is_denied => denied(&[1, 2], 0);
    another_pods_units_are_denied => of_another_pod();
    without_the_daemon_it_is_for_later => no_daemon();
    one_nic_that_the_policy_denies_refuses_all => one_is_denied();
    a_failure_at_the_last_nic_undoes_all: Macvlan => last_fails();
    names_that_cannot_be_are_refused_before_anything => wrong_names();
    rails_that_are_not_clear_are_refused_before_anything => wrong_rails();
    what_is_about_one_interface_is_refused => about_one();
    status_knows_what_cannot_be_served => status();
    a_damaged_record_is_named_and_kept => damaged_record();
    a_record_of_a_newer_version_is_named_and_kept => newer_record();
}

fn pod_named(name: &str) -> Pod {
    Pod {
        namespace: "ml".into(),
        name: name.into(),
        uid: Some(format!("u-{name}")),
    }
}

/// A host whose pool has all NICs.
struct Host {
    scene: Scene,
    socket: NodeSocket,
    before: State,
}

/// A unit of a shared pool.
fn share(nic: u8, slot: u32) -> String {
    format!("{}_3e71787e_{slot}", pci_of(nic))
}

/// Units of NICs as our own daemon reports them.
fn of_pool(container: &str, units: &[String], nics: &[u8]) -> Allocation {
    let units: Vec<&str> = units.iter().map(String::as_str).collect();
    let hcas: Vec<String> = nics.iter().map(|nic| pci_of(*nic)).collect();
    let hcas: Vec<&str> = hcas.iter().map(String::as_str).collect();
    Allocation {
        pool: Some((0..NICS).map(pci_of).collect()),
        ..allocation_of_hcas(container, "rdma/nic", &units, &hcas)
    }
}

impl Host {
    fn new() -> Result<Self> {
        let scene = Scene::with_nics(NICS)?;
        // The same addresses again, whatever a case does before.
        let ipam = json!({"ipam": {"cooldown": "0s"}});
        scene.policy(&json!({"unallocated": null}), &ipam)?;
        let socket = NodeSocket::start(&scene.host_root().join("run/rdma-netdev/node.sock"))?;
        // Our own IPAM makes its directories at first use.
        Ok(Self {
            before: scene.host_state()?,
            scene,
            socket,
        })
    }

    /// The pod `a` has these NICs as a whole.
    fn holds(&self, nics: &[u8]) {
        self.pod_holds("a", nics);
    }

    fn pod_holds(&self, pod: &str, nics: &[u8]) {
        let units: Vec<String> = nics.iter().map(|nic| pci_of(*nic)).collect();
        let held = match nics {
            [] => vec![],
            _ => vec![of_pool("main", &units, nics)],
        };
        self.socket.hold(&pod_named(pod), held);
    }

    /// The pod `a` has a share of each of these NICs.
    fn shares(&self, nics: &[u8]) {
        let units: Vec<String> = nics.iter().map(|nic| share(*nic, 5)).collect();
        let held = vec![of_pool("main", &units, nics)];
        self.socket.hold(&pod_named("a"), held);
    }

    fn call(&self) -> Call {
        self.call_of("a", &self.scene.pod, "c1")
    }

    fn call_of(&self, pod: &str, netns: &Netns, container: &str) -> Call {
        let mut call = self.scene.call_of(netns, container, "net1");
        call.args =
            format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=ml;K8S_POD_NAME={pod};K8S_POD_UID=u-{pod}");
        call
    }

    /// The network, with the unit that Multus passes and these keys.
    fn network(&self, unit: &str, keys: &Value) -> Value {
        let mut network = self.scene.network(
            &json!({"attach": "move", "devices": "all", "deviceID": unit,
            "pciBusID": unit}),
        );
        if let (Some(network), Some(keys)) = (network.as_object_mut(), keys.as_object()) {
            network.extend(keys.clone());
            network.retain(|_, value| !value.is_null());
        }
        network
    }

    fn moving(&self, keys: &Value) -> Value {
        self.network(&pci_of(0), keys)
    }

    fn add(&self, network: &Value) -> Result<Value> {
        answer_of(&self.call(), "ADD", network)?.success()
    }

    /// DEL, once and again, leaves the host as it was and nothing in the pod.
    fn del(&self, network: &Value) -> Result<()> {
        self.scene.del_returns(network, &self.before)?;
        let links = links(&self.scene.pod)?;
        ensure!(links == ["lo"], "left in the pod: {links:?}");
        let rules = self.scene.pod.ip("rule")?;
        ensure!(!rules.contains("16777"), "rules are left:\n{rules}");
        Ok(())
    }

    fn refuses(&self, network: &Value, codes: &[u64], words: &[&str]) -> Result<()> {
        self.scene.refuses_call(&self.call(), network, codes, words)
    }

    /// Our own IPAM with these keys.
    fn ipam(&self, keys: &Value) -> Value {
        let mut ipam = json!({"type": "rdma-ipam"});
        if let (Some(ipam), Some(keys)) = (ipam.as_object_mut(), keys.as_object()) {
            ipam.extend(keys.clone());
        }
        ipam
    }

    /// A range for each rail, with gateways.
    fn by_rail(&self, rails: u8) -> Value {
        let ranges: serde_json::Map<String, Value> = (0..rails)
            .map(|rail| {
                let range = json!({"range": format!("10.64.{rail}.0/24"),
                    "range_start": format!("10.64.{rail}.10"), "gateway": format!("10.64.{rail}.1")});
                (rail.to_string(), range)
            })
            .collect();
        self.ipam(&json!({"ranges": ranges}))
    }
}

/// Names of a namespace's links.
fn links(netns: &Netns) -> Result<Vec<String>> {
    let links = netns.ip_json("link show")?;
    let names = links.as_array().into_iter().flatten();
    Ok(names
        .filter_map(|link| Some(link["ifname"].as_str()?.to_owned()))
        .collect())
}

/// The interfaces of a result in their order, each with its addresses.
fn interfaces(result: &Value) -> Result<Vec<(String, Vec<String>)>> {
    let interfaces = result["interfaces"].as_array().context("interfaces")?;
    let ips = result["ips"].as_array().cloned().unwrap_or_default();
    let of = |(number, interface): (usize, &Value)| {
        let own = ips.iter().filter(|ip| ip["interface"] == json!(number));
        let own = own.filter_map(|ip| Some(ip["address"].as_str()?.to_owned()));
        let name = interface["name"].as_str().unwrap_or_default().to_owned();
        (name, own.collect())
    };
    Ok(interfaces.iter().enumerate().map(of).collect())
}

/// `rdmactl pods` shows the interfaces of a result with their addresses.
fn lists(scene: &Scene, result: &Value) -> Result<()> {
    let row = |row: &Value| {
        let addresses = row["addresses"].as_array().into_iter().flatten();
        let addresses = addresses.filter_map(|one| Some(one.as_str()?.to_owned()));
        let name = row["interface"].as_str().unwrap_or_default().to_owned();
        (name, addresses.collect())
    };
    let listed: Vec<(String, Vec<String>)> = scene.listed("pods")?.iter().map(row).collect();
    assert_eq!(listed, interfaces(result)?);
    Ok(())
}

fn names(result: &Value) -> Result<Vec<String>> {
    Ok(interfaces(result)?
        .into_iter()
        .map(|(name, _)| name)
        .collect())
}

/// The first address that a NIC has on the host.
fn address_of(nic: u8) -> String {
    match nic {
        0 => "10.9.0.1/24".to_owned(),
        _ => format!("10.19.{nic}.1/24"),
    }
}

fn in_order(rails: &[u8]) -> Vec<String> {
    rails.iter().map(|rail| format!("net1-{rail}")).collect()
}

fn moved_with_their_addresses() -> Result<()> {
    let host = Host::new()?;
    // The kubelet names units in no order.
    host.holds(&[2, 0, 3, 1]);
    let network = host.network(&pci_of(2), &json!({"mtu": 1400}));
    let result = host.add(&network)?;
    ensure!(names(&result)? == in_order(&[0, 1, 2, 3]), "{result:#}");
    for (nic, (name, addresses)) in (0..).zip(interfaces(&result)?) {
        let own = address_of(nic);
        ensure!(addresses.contains(&own), "{result:#}");
        let shown = host.scene.pod.ip(&format!("addr show {name}"))?;
        ensure!(
            shown.contains(&own) && shown.contains("mtu 1400"),
            "{shown}"
        );
    }
    // Runtimes search for the name of the call.
    let first = host.scene.pod.ip_json("link show net1")?;
    ensure!(first[0]["ifname"] == "net1-0", "{first}");
    ensure!(
        !links(&host.scene.host.netns)?.contains(&"nic3".to_owned()),
        "nic3 did not leave"
    );
    // The pod may do with them what it likes.
    host.scene.in_pod(&[
        "link set net1-2 down",
        "link set net1-2 name mine",
        "addr flush dev net1-3",
    ])?;
    host.del(&network)
}

fn children(attach: &str) -> Result<()> {
    let host = Host::new()?;
    host.shares(&[0, 1, 2, 3]);
    let ipam = host.ipam(&json!({"range": "10.64.0.0/24"}));
    let network = host.network(&share(3, 5), &json!({"attach": attach, "ipam": ipam}));
    let result = host.add(&network)?;
    let expected: Vec<(String, Vec<String>)> = in_order(&[0, 1, 2, 3])
        .into_iter()
        .zip(1..)
        .map(|(name, n)| (name, vec![format!("10.64.0.{n}/24")]))
        .collect();
    ensure!(interfaces(&result)? == expected, "{result:#}");
    lists(&host.scene, &result)?;
    let mut check = network.clone();
    check["prevResult"] = result;
    answer_of(&host.call(), "CHECK", &check)?.success()?;
    let below = |name: &str| -> Result<Value> {
        let link = host.scene.pod.ip_json(&format!("-d link show {name}"))?;
        ensure!(link[0]["linkinfo"]["info_kind"] == attach, "{link}");
        Ok(link[0]["link_index"].clone())
    };
    for rail in 0..NICS {
        let nic = host
            .scene
            .host
            .netns
            .ip_json(&format!("link show nic{rail}"))?;
        ensure!(
            below(&format!("net1-{rail}"))? == nic[0]["ifindex"],
            "net1-{rail} stands on another NIC"
        );
    }
    host.del(&network)
}

fn ranges_by_rail() -> Result<()> {
    let host = Host::new()?;
    host.shares(&[0, 1, 2, 3]);
    let mut ipam = host.by_rail(NICS);
    ipam["routes"] = json!([{"dst": "10.64.0.0/16"}]);
    let network = host.network(&share(0, 5), &json!({"attach": "macvlan", "ipam": ipam}));
    let result = host.add(&network)?;
    for (rail, (_, addresses)) in interfaces(&result)?.iter().enumerate() {
        ensure!(*addresses == [format!("10.64.{rail}.10/24")], "{result:#}");
    }
    // Other rails are reached through the rail's own gateway.
    let routes = result["routes"].as_array().context("routes")?;
    let gateways: Vec<&str> = routes
        .iter()
        .filter_map(|route| route["gw"].as_str())
        .collect();
    ensure!(
        gateways == ["10.64.0.1", "10.64.1.1", "10.64.2.1", "10.64.3.1"],
        "{result:#}"
    );
    let way = host.scene.pod.ip("route get 10.64.9.9 from 10.64.2.10")?;
    ensure!(way.contains("via 10.64.2.1 dev net1-2"), "{way}");
    let mut check = network.clone();
    check["prevResult"] = result;
    answer_of(&host.call(), "CHECK", &check)?.success()?;
    host.del(&network)?;
    // Fewer NICs of the same pool have the same rails.
    host.shares(&[3, 1]);
    let result = host.add(&network_of(&network, &share(1, 5)))?;
    lists(&host.scene, &result)?;
    ensure!(names(&result)? == in_order(&[1, 3]), "{result:#}");
    host.del(&network)
}

fn network_of(network: &Value, unit: &str) -> Value {
    let mut network = network.clone();
    network["deviceID"] = json!(unit);
    network["pciBusID"] = json!(unit);
    network
}

fn taken_host_number() -> Result<()> {
    let host = Host::new()?;
    host.shares(&[0, 1, 2, 3]);
    let other = host.scene.another_pod()?;
    let ipam = host.ipam(&json!({"range": "10.64.2.0/24", "range_start": "10.64.2.10"}));
    let single = host
        .scene
        .network(&json!({"attach": "macvlan", "master": "nic2", "ipam": ipam}));
    let call = host.call_of("b", &other, "c2");
    answer_of(&call, "ADD", &single)?.success()?;
    let network = host.network(
        &share(0, 5),
        &json!({"attach": "macvlan", "ipam": host.by_rail(NICS)}),
    );
    let result = host.add(&network)?;
    let addresses: Vec<String> = interfaces(&result)?
        .into_iter()
        .flat_map(|(_, ips)| ips)
        .collect();
    let expected = [
        "10.64.0.10/24",
        "10.64.1.10/24",
        "10.64.2.11/24",
        "10.64.3.10/24",
    ];
    ensure!(addresses == expected, "{addresses:?}");
    answer_of(&call, "DEL", &single)?.success()?;
    host.del(&network)
}

fn numbered_by_policy() -> Result<()> {
    let host = Host::new()?;
    host.holds(&[0, 1, 2, 3]);
    let rails = json!({pci_of(0): 7, "nic1": 5, "10.19.2.0/24": 3, "nic[3-9]": 1});
    host.scene
        .policy(&json!({"unallocated": null}), &json!({"rails": rails}))?;
    let network = host.moving(&json!({"names": "rail{rail}"}));
    let result = host.add(&network)?;
    ensure!(
        names(&result)? == ["rail1", "rail3", "rail5", "rail7"],
        "{result:#}"
    );
    let addresses: Vec<String> = interfaces(&result)?
        .into_iter()
        .filter_map(|(_, ips)| ips.into_iter().next())
        .collect();
    let expected = [3, 2, 1, 0].map(address_of);
    ensure!(addresses == expected, "{addresses:?}");
    host.del(&network)
}

fn names_of_the_host() -> Result<()> {
    let host = Host::new()?;
    host.holds(&[0, 1, 2, 3]);
    let network = host.moving(&json!({"names": "{host}"}));
    let result = host.add(&network)?;
    ensure!(
        names(&result)? == ["nic0", "nic1", "nic2", "nic3"],
        "{result:#}"
    );
    let first = host.scene.pod.ip_json("link show net1")?;
    ensure!(first[0]["ifname"] == "nic0", "{first}");
    host.del(&network)?;
    // An interface that has the name of the call needs no other.
    let network = host.moving(&json!({"names": "net{rail}"}));
    let result = host.add(&network)?;
    ensure!(
        names(&result)? == ["net0", "net1", "net2", "net3"],
        "{result:#}"
    );
    let second = host.scene.pod.ip_json("link show net1")?;
    ensure!(
        second[0]["ifname"] == "net1" && second[0].get("altnames").is_none(),
        "{second}"
    );
    host.del(&network)
}

fn source_routing() -> Result<()> {
    let host = Host::new()?;
    host.shares(&[0, 1, 2, 3]);
    let ipam = host.ipam(&json!({"range": "10.64.0.0/24"}));
    let network = host.network(&share(0, 5), &json!({"attach": "macvlan", "ipam": ipam}));
    let routed = |network: &Value, tables: &[&str]| -> Result<()> {
        host.add(network)?;
        for rail in 0..NICS {
            let from = format!("10.64.0.{}", rail + 1);
            let way = host
                .scene
                .pod
                .ip(&format!("route get 10.64.0.99 from {from}"))?;
            ensure!(way.contains(&format!("dev net1-{rail} ")), "{way}");
        }
        let rules = host.scene.pod.ip("rule")?;
        for table in tables {
            ensure!(rules.contains(&format!("lookup {table}")), "{rules}");
        }
        Ok(())
    };
    routed(&network, &[])?;
    host.del(&network)?;
    let mut numbered = network.clone();
    numbered["sourceRouting"] = json!({"table": 700});
    routed(&numbered, &["700", "701", "702", "703"])?;
    host.del(&numbered)?;
    let mut off = network;
    off["sourceRouting"] = json!(false);
    let plain = host.scene.pod.ip("rule")?;
    host.add(&off)?;
    ensure!(
        host.scene.pod.ip("rule")? == plain,
        "rules in spite of sourceRouting: false"
    );
    host.del(&off)
}

fn one_unit() -> Result<()> {
    let host = Host::new()?;
    host.holds(&[2]);
    let network = host.network(&pci_of(2), &json!({}));
    let result = host.add(&network)?;
    ensure!(names(&result)? == in_order(&[2]), "{result:#}");
    host.del(&network)
}

fn two_shares() -> Result<()> {
    let host = Host::new()?;
    let units = [share(1, 5), share(1, 6), share(2, 0)];
    host.socket
        .hold(&pod_named("a"), vec![of_pool("main", &units, &[1, 2])]);
    let network = host.network(&share(1, 6), &json!({"attach": "macvlan"}));
    let result = host.add(&network)?;
    ensure!(names(&result)? == in_order(&[1, 2]), "{result:#}");
    host.del(&network)
}

fn two_containers() -> Result<()> {
    let host = Host::new()?;
    host.socket.hold(
        &pod_named("a"),
        vec![
            of_pool("one", &[pci_of(3)], &[3]),
            allocation("one", "nvidia.com/gpu", &["GPU-1"]),
            // Another resource's are another network's.
            allocation("one", "rdma/other", &[&pci_of(2)]),
            of_pool("two", &[pci_of(0)], &[0]),
        ],
    );
    let network = host.network(&pci_of(3), &json!({}));
    let result = host.add(&network)?;
    ensure!(names(&result)? == in_order(&[0, 3]), "{result:#}");
    host.del(&network)
}

fn pool_unit() -> Result<()> {
    let host = Host::new()?;
    let unit = "pool_3e71787e_1".to_owned();
    let held = of_pool("main", std::slice::from_ref(&unit), &[0, 1, 2, 3]);
    host.socket.hold(&pod_named("a"), vec![held]);
    let network = host.network(&unit, &json!({"attach": "macvlan"}));
    let result = host.add(&network)?;
    ensure!(names(&result)? == in_order(&[0, 1, 2, 3]), "{result:#}");
    host.del(&network)
}

fn again() -> Result<()> {
    let host = Host::new()?;
    host.holds(&[0, 1, 2, 3]);
    let network = host.moving(&json!({}));
    host.add(&network)?;
    let attached = (host.scene.host_state()?, state(&host.scene.pod)?);
    refusal(
        &answer_of(&host.call(), "ADD", &network)?,
        &[EXISTS],
        &["net1", "DEL it first"],
    )?;
    unchanged(&attached.0, || host.scene.host_state(), "after another ADD")?;
    unchanged(&attached.1, || state(&host.scene.pod), "in the pod")?;
    // Another pod that claims to have the same.
    let other = host.scene.another_pod()?;
    host.pod_holds("b", &[0, 1, 2, 3]);
    let answer = answer_of(&host.call_of("b", &other, "c2"), "ADD", &network)?;
    refusal(&answer, &[TRY_AGAIN], &["nic0", "ml/a"])?;
    unchanged(
        &attached.0,
        || host.scene.host_state(),
        "after another pod's ADD",
    )?;
    host.del(&network)
}

fn checked() -> Result<()> {
    let host = Host::new()?;
    host.shares(&[0, 1, 2, 3]);
    let network = host.network(
        &share(0, 5),
        &json!({"attach": "macvlan", "ipam": host.by_rail(NICS)}),
    );
    let losses: [(&[&str], &str); 4] = [
        (&["link set net1-2 down"], "net1-2 is down"),
        (&["addr del 10.64.3.10/24 dev net1-3"], "10.64.3.10/24"),
        (&["rule del from 10.64.1.10"], "net1-1 has lost the rule"),
        (&["link del net1-3"], "net1-3 is gone"),
    ];
    for (commands, word) in losses {
        let mut check = network.clone();
        check["prevResult"] = host.add(&network)?;
        answer_of(&host.call(), "CHECK", &check)?.success()?;
        host.scene.in_pod(commands)?;
        let answer = answer_of(&host.call(), "CHECK", &check)?;
        refusal(&answer, &[DIFFERS], &[word])?;
        host.del(&network)?;
    }
    // A result that does not name one of them.
    let mut check = network.clone();
    check["prevResult"] = host.add(&network)?;
    let interfaces = check["prevResult"]["interfaces"]
        .as_array_mut()
        .context("interfaces")?;
    interfaces.truncate(3);
    let ips = check["prevResult"]["ips"].as_array_mut().context("ips")?;
    ips.truncate(3);
    refusal(
        &answer_of(&host.call(), "CHECK", &check)?,
        &[DIFFERS],
        &["net1-3"],
    )?;
    host.del(&network)
}

fn listed() -> Result<()> {
    let host = Host::new()?;
    host.holds(&[0, 1, 2, 3]);
    let network = host.moving(&json!({}));
    host.add(&network)?;
    let list = host.scene.listed("pods")?;
    let shown: Vec<Value> = list
        .iter()
        .map(|one| {
            json!([
                one["interface"],
                one["network"],
                one["sandbox"],
                one["netdev"],
                one["kind"]
            ])
        })
        .collect();
    let expected: Vec<Value> = (0..NICS)
        .map(|rail| {
            json!([
                format!("net1-{rail}"),
                "rail0",
                "c1",
                format!("nic{rail}"),
                "move"
            ])
        })
        .collect();
    ensure!(shown == expected, "{list:#?}");
    host.del(&network)
}

/// The device information file that Multus names.
const DEVICE_INFO: &str = "/run/k8s.cni.cncf.io/devinfo/cni/ml-rails-c1_net1";

impl Host {
    /// The table of `mlx5_N` has the GID of an IPv4 address of an interface.
    fn lay_gid(&self, nic: u8, address: [u8; 4], interface: &str) -> Result<()> {
        let tree = self.scene.tree()?;
        let port = format!("/sys/class/infiniband/mlx5_{nic}/ports/1");
        let [a, b, c, d] = address;
        let gid = format!("0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}");
        tree.file(format!("{port}/gids/3"), gid);
        tree.file(format!("{port}/gid_attrs/types/3"), "RoCE v2");
        tree.file(format!("{port}/gid_attrs/ndevs/3"), interface);
        Ok(())
    }

    /// What the device information file says of RDMA devices, and of GIDs.
    fn device_info(&self) -> Result<(Value, Vec<(String, String)>)> {
        let path = self
            .scene
            .host_root()
            .join(DEVICE_INFO.trim_start_matches('/'));
        let info: Value = serde_json::from_str(&fs::read_to_string(path)?)?;
        let gids = info["rdma-gids"].as_array().cloned().unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let gids = gids
            .iter()
            .map(|gid| (text(&gid["device"]), text(&gid["address"])));
        Ok((info["pci"]["rdma-device"].clone(), gids.collect()))
    }
}

fn gids_reported() -> Result<()> {
    let host = Host::new()?;
    host.shares(&[0, 1, 2, 3]);
    for nic in 0..NICS {
        host.lay_gid(nic, [10, 64, nic, 10], &format!("net1-{nic}"))?;
    }
    let network = host.network(
        &share(0, 5),
        &json!({"attach": "macvlan", "ipam": host.by_rail(NICS),
            "runtimeConfig": {"CNIDeviceInfoFile": DEVICE_INFO}}),
    );
    host.add(&network)?;
    let (devices, gids) = host.device_info()?;
    ensure!(devices == "mlx5_0,mlx5_1,mlx5_2,mlx5_3", "{devices}");
    let expected: Vec<(String, String)> = (0..NICS)
        .map(|nic| (format!("mlx5_{nic}"), format!("10.64.{nic}.10")))
        .collect();
    ensure!(gids == expected, "{gids:?}");
    host.del(&network)?;
    // One that does not come is named with its interface.
    host.lay_gid(2, [10, 64, 2, 99], "net1-2")?;
    let answer = answer_of(&host.call(), "ADD", &network)?;
    answer.success()?;
    let warned = answer
        .stderr
        .contains("10.64.2.10 of net1-2 has no RoCE v2 GID on mlx5_2");
    ensure!(
        warned && !answer.stderr.contains("net1-1"),
        "{}",
        answer.stderr
    );
    host.del(&network)
}

/// Another plugin made two interfaces, of which none has the name of the call.
fn chain_of_several() -> Result<()> {
    let host = Host::new()?;
    let pod = host.scene.pod.name();
    let mut interfaces = Vec::new();
    for nic in [0, 1] {
        let name = format!("rail{nic}");
        host.scene.on_host(&[&format!(
            "link add link nic{nic} name {name} netns {pod} type macvlan"
        )])?;
        host.lay_gid(nic, [10, 64, nic, 7], &name)?;
        interfaces.push(json!({"name": name, "sandbox": host.scene.pod.path()}));
    }
    let before = json!({"cniVersion": "1.1.0", "interfaces": interfaces, "routes": [], "dns": {},
        "ips": [{"address": "10.64.0.7/24", "interface": 0}, {"address": "10.64.1.7/24", "interface": 1}]});
    host.shares(&[0, 1]);
    let keys = json!({"attach": "rdma-only", "prevResult": before,
        "runtimeConfig": {"CNIDeviceInfoFile": DEVICE_INFO}});
    let unnamed = host.scene.network(&keys);
    host.refuses(&unnamed, &[INVALID_NETWORK], &["deviceID", "rdmaDevice"])?;
    let network = host.network(&share(0, 5), &keys);
    let result = answer_of(&host.call(), "ADD", &network)?.success()?;
    ensure!(
        result["interfaces"] == before["interfaces"] && result["ips"] == before["ips"],
        "{result:#}"
    );
    let (devices, _) = host.device_info()?;
    ensure!(devices == "mlx5_0,mlx5_1", "{devices}");
    // Its driver failed, or a pod that ends has it still.
    host.scene.tree()?.hide_rdma("mlx5_1");
    let network = host.network(&share(0, 5), &keys);
    let (code, message) = answer_of(&host.call(), "ADD", &network)?.refusal()?;
    ensure!(
        code == TRY_AGAIN && message.contains("has no RDMA device"),
        "{code}: {message}"
    );
    let network = host.scene.network(&keys);
    answer_of(&host.call(), "DEL", &network)?.success()?;
    ensure!(
        links(&host.scene.pod)?.len() == 3,
        "DEL took what another plugin made"
    );
    Ok(())
}

fn collected() -> Result<()> {
    let host = Host::new()?;
    host.holds(&[0, 1, 2, 3]);
    let network = host.moving(&json!({}));
    host.add(&network)?;
    let mut gc = network.clone();
    gc["cni.dev/valid-attachments"] = json!([{"containerID": "c1", "ifname": "net1"}]);
    answer_of(&host.call(), "GC", &gc)?.success()?;
    ensure!(
        links(&host.scene.pod)?.len() == 5,
        "GC took a valid attachment"
    );
    gc["cni.dev/valid-attachments"] = json!([]);
    answer_of(&host.call(), "GC", &gc)?.success()?;
    unchanged(&host.before, || host.scene.host_state(), "after GC")?;
    host.del(&network)
}

/// The pod's namespace ends, and the kernel returns its NICs under the names they have there.
fn dies(host: &Host) -> Result<()> {
    for rail in 0..NICS {
        let name = format!("net1-{rail}");
        let to = host.scene.host.netns.name();
        host.scene
            .in_pod(&[&format!("link set {name} netns {to}")])?;
    }
    host.scene.pod.delete()
}

fn reclaimed() -> Result<()> {
    let host = Host::new()?;
    host.holds(&[0, 1, 2, 3]);
    let network = host.moving(&json!({}));
    host.add(&network)?;
    dies(&host)?;
    // Young records are left alone: theirs may be an ADD that still runs.
    let path = host.scene.host.state().join("attachments/rail0@c1@net1");
    let mut record: Value = serde_json::from_str(&fs::read_to_string(&path)?)?;
    record["created"] = json!(1);
    fs::write(&path, record.to_string())?;
    // By the real sysfs: the tree of files does not show what came back.
    let mut reclaim = host.scene.host.netns.command(product("rdmactl")?);
    reclaim
        .arg("reclaim")
        .arg("--policy")
        .arg(host.scene.policy_file());
    let answer = bounded(&mut reclaim, b"")?;
    ensure!(answer.status.success(), "{}", answer.stderr);
    for rail in 0..NICS {
        ensure!(
            answer.stdout.contains(&format!("net1-{rail}")),
            "{}",
            answer.stdout
        );
    }
    unchanged(&host.before, || host.scene.host_state(), "after reclaim")
}

fn taken_from_the_dead() -> Result<()> {
    let host = Host::new()?;
    host.holds(&[0, 1, 2, 3]);
    let network = host.moving(&json!({}));
    host.add(&network)?;
    dies(&host)?;
    // One of the four goes to a pod of its own, the others to a third together.
    let (second, third) = (host.scene.another_pod()?, host.scene.another_pod()?);
    host.pod_holds("b", &[2]);
    host.pod_holds("c", &[0, 1, 3]);
    let single = host
        .scene
        .network(&json!({"attach": "move", "deviceID": pci_of(2)}));
    let call = host.call_of("b", &second, "c2");
    answer_of(&call, "ADD", &single)?.success()?;
    let others = host.call_of("c", &third, "c3");
    let result = answer_of(&others, "ADD", &network)?.success()?;
    ensure!(names(&result)? == in_order(&[0, 1, 3]), "{result:#}");
    // The late DEL of the first has nothing to take.
    let mut late = host.call();
    late.netns = std::path::PathBuf::new();
    answer_of(&late, "DEL", &network)?.success()?;
    ensure!(links(&third)?.len() == 4, "a late DEL took NICs");
    answer_of(&others, "DEL", &network)?.success()?;
    answer_of(&call, "DEL", &single)?.success()?;
    unchanged(&host.before, || host.scene.host_state(), "after all DELs")
}

fn denied(held: &[u8], named: u8) -> Result<()> {
    let host = Host::new()?;
    host.holds(held);
    let unit = pci_of(named);
    host.refuses(
        &host.network(&unit, &json!({})),
        &[DENIED],
        &[&unit, "ml/a"],
    )?;
    let macvlan = host.network(&share(named, 1), &json!({"attach": "macvlan"}));
    host.refuses(&macvlan, &[DENIED], &["did not allocate"])
}

fn of_another_pod() -> Result<()> {
    let host = Host::new()?;
    host.pod_holds("b", &[0, 1]);
    host.holds(&[2]);
    host.refuses(
        &host.network(&pci_of(0), &json!({})),
        &[DENIED],
        &[&pci_of(0), "ml/a"],
    )?;
    // Its own unit brings in its own alone.
    let network = host.network(&pci_of(2), &json!({}));
    let result = host.add(&network)?;
    ensure!(names(&result)? == in_order(&[2]), "{result:#}");
    host.del(&network)
}

fn no_daemon() -> Result<()> {
    let mut host = Host::new()?;
    host.holds(&[0, 1]);
    host.socket.be_absent()?;
    // Also where nothing needs the kubelet's word: nobody else knows the units.
    for allow in [json!({"unallocated": null}), json!({})] {
        host.scene.allow(&allow)?;
        host.refuses(&host.moving(&json!({})), &[TRY_AGAIN], &["node.sock"])?;
        let macvlan = host.network(&share(0, 1), &json!({"attach": "macvlan"}));
        host.refuses(&macvlan, &[TRY_AGAIN], &["node.sock"])?;
    }
    Ok(())
}

fn one_is_denied() -> Result<()> {
    let host = Host::new()?;
    host.holds(&[0, 1, 2, 3]);
    let allow = json!({"unallocated": null, "netdevs": [{"ifNames": ["nic[0-2]"]}]});
    host.scene.allow(&allow)?;
    host.refuses(&host.moving(&json!({})), &[DENIED], &["nic3"])?;
    // A NIC that something of the host stands on is not moved, and so none is.
    host.scene.allow(&json!({"unallocated": null}))?;
    host.scene
        .on_host(&["link add link nic2 name above type macvlan"])?;
    host.refuses(&host.moving(&json!({})), &[DENIED], &["nic2", "above"])
}

fn last_fails() -> Result<()> {
    let host = Host::new()?;
    host.shares(&[0, 1, 2, 3]);
    // A macvlan of this mode bears no other beside it.
    host.scene
        .on_host(&["link add link nic3 name rival type macvlan mode passthru"])?;
    let network = host.network(
        &share(0, 5),
        &json!({"attach": "macvlan", "ipam": host.by_rail(NICS)}),
    );
    host.refuses(&network, &[KERNEL], &["net1-3", "nic3"])?;
    host.scene.on_host(&["link del rival"])?;
    host.add(&network)?;
    host.del(&network)
}

fn wrong_names() -> Result<()> {
    let host = Host::new()?;
    host.holds(&[0, 1, 2, 3]);
    for (pattern, words) in [
        ("same", &["names", "makes one name for all interfaces"][..]),
        ("{nic}", &["names", "{nic}"]),
        ("a-much-too-long-name-{rail}", &["names", "15 bytes"]),
        ("a/{rail}", &["names", "'/'"]),
    ] {
        host.refuses(
            &host.moving(&json!({"names": pattern})),
            &[INVALID_NETWORK],
            words,
        )?;
    }
    // One that the pod has already.
    host.scene
        .in_pod(&["link add net1-2 type veth peer name far"])?;
    host.refuses(&host.moving(&json!({})), &[EXISTS], &["net1-2"])?;
    host.scene
        .in_pod(&["link del net1-2", "link add other type veth peer name far"])?;
    host.scene
        .in_pod(&["link property add dev other altname net1-3"])?;
    host.refuses(&host.moving(&json!({})), &[EXISTS], &["net1-3"])?;
    host.scene
        .in_pod(&["link property del dev other altname net1-3"])?;
    host.scene
        .in_pod(&["link property add dev other altname net1"])?;
    host.refuses(&host.moving(&json!({})), &[EXISTS], &["net1"])
}

fn wrong_rails() -> Result<()> {
    let host = Host::new()?;
    host.holds(&[0, 1, 2, 3]);
    let with_policy = |rails: &Value| host.scene.policy(&json!({"unallocated": null}), rails);
    let network = host.moving(&json!({}));
    with_policy(&json!({"rails": {"nic*": 1}}))?;
    host.refuses(&network, &[DENIED], &["nic0", "nic1", "rail 1"])?;
    with_policy(&json!({"rails": {"nic[0-2]": 1}}))?;
    host.refuses(&network, &[DENIED], &["rail"])?;
    with_policy(
        &json!({"rails": {"nic0": 0, "nic1": 1, "nic2": 2, "nic3": 3, "10.19.3.0/24": 4}}),
    )?;
    host.refuses(&network, &[DENIED], &["nic3", "rail 3", "rail 4"])?;
    with_policy(&json!({"rails": {"nic0": "first"}}))?;
    let answer = answer_of(&host.call(), "ADD", &network)?;
    refusal(&answer, &[DENIED], &["rails.nic0"])?;
    with_policy(&json!({}))?;
    // The network knows fewer rails than the pool has NICs: one of them is not what it seems.
    let network = host.moving(&json!({"ipam": host.by_rail(3)}));
    host.refuses(&network, &[UNAVAILABLE], &["4 HCAs", "rails 0, 1, 2"])?;
    // Another device plugin's resource has no order that is known.
    let units: Vec<String> = (0..NICS).map(pci_of).collect();
    let units: Vec<&str> = units.iter().map(String::as_str).collect();
    host.socket.hold(
        &pod_named("a"),
        vec![allocation("main", "nvidia.com/nic", &units)],
    );
    host.refuses(
        &host.moving(&json!({})),
        &[UNAVAILABLE],
        &["rails in", "does not report"],
    )?;
    let by_name = json!({"rails": {"nic0": 0, "nic1": 1, "nic2": 2, "nic3": 3}});
    with_policy(&by_name)?;
    let network = host.moving(&json!({}));
    host.add(&network)?;
    host.del(&network)
}

fn about_one() -> Result<()> {
    let host = Host::new()?;
    host.holds(&[0, 1, 2, 3]);
    let static_ipam = json!({"type": "static", "addresses": [{"address": "10.0.0.5/24"}]});
    let fixed =
        host.ipam(&json!({"range": "10.64.0.0/24", "addresses": [{"address": "10.0.0.5/24"}]}));
    for (keys, words) in [
        (
            json!({"deviceID": null, "pciBusID": null}),
            &["deviceID", "resourceName"][..],
        ),
        (json!({"device": "nic0"}), &["device"]),
        (json!({"attach": "macvlan", "master": "nic0"}), &["master"]),
        (json!({"mac": "02:00:00:00:00:01"}), &["mac"]),
        (json!({"ipam": static_ipam}), &["static", "rdma-ipam"]),
        (json!({"ipam": fixed}), &["ipam.addresses"]),
        (json!({"devices": "some"}), &["devices"]),
        (json!({"devices": null, "names": "r{rail}"}), &["names"]),
        (
            json!({"devices": null, "ipam": host.by_rail(NICS)}),
            &["ipam.ranges"],
        ),
    ] {
        host.refuses(&host.moving(&keys), &[INVALID_NETWORK, 2], words)
            .with_context(|| keys.to_string())?;
    }
    Ok(())
}

fn status() -> Result<()> {
    let host = Host::new()?;
    let asked = |ipam: &Value| -> Result<Answer> {
        let network = host.network(
            "",
            &json!({"deviceID": null, "pciBusID": null, "attach": "macvlan",
            "ipam": ipam}),
        );
        answer_of(&host.call(), "STATUS", &network)
    };
    asked(&host.by_rail(NICS))?.success()?;
    asked(&host.ipam(&json!({"range": "10.64.0.0/24"})))?.success()?;
    let other = json!({"type": "static", "addresses": [{"address": "10.0.0.5/24"}]});
    refusal(&asked(&other)?, &[UNAVAILABLE], &["static"])?;
    // A rail whose range is used up.
    let ranges = json!({"0": {"range": "10.65.0.0/24"}, "1": {"range": "10.66.0.4/32"}});
    let ipam = host.ipam(&json!({"ranges": ranges}));
    host.scene.policy(
        &json!({"unallocated": null}),
        &json!({"rails": {"nic0": 0, "nic1": 1}}),
    )?;
    host.shares(&[0, 1]);
    let network = host.network(&share(0, 5), &json!({"attach": "macvlan", "ipam": ipam}));
    asked(&ipam)?.success()?;
    host.add(&network)?;
    refusal(&asked(&ipam)?, &[UNAVAILABLE], &["10.66.0.4"])?;
    host.del(&network)
}

/// The record of an attachment, changed; DEL must name it and leave everything, and with the record
/// as it was return everything.
fn with_record(change: impl Fn(&mut Value), words: &[&str]) -> Result<()> {
    let host = Host::new()?;
    host.holds(&[0, 1, 2, 3]);
    let network = host.moving(&json!({"ipam": host.by_rail(NICS)}));
    host.add(&network)?;
    let path = host.scene.host.state().join("attachments/rail0@c1@net1");
    let whole = fs::read_to_string(&path)?;
    let mut record: Value = serde_json::from_str(&whole)?;
    change(&mut record);
    fs::write(&path, record.to_string())?;
    for command in ["DEL", "ADD"] {
        let answer = answer_of(&host.call(), command, &network)?;
        refusal(&answer, &[STATE], words).with_context(|| command.to_owned())?;
    }
    ensure!(links(&host.scene.pod)?.len() == 5, "NICs left the pod");
    fs::write(&path, whole)?;
    host.del(&network)
}

fn damaged_record() -> Result<()> {
    with_record(
        |record| record["parts"][2] = json!("gone"),
        &["rail0@c1@net1", "damaged"],
    )?;
    with_record(
        |record| {
            record["move"] = record["parts"][0]["move"].clone();
        },
        &["rail0@c1@net1", "damaged"],
    )
}

fn newer_record() -> Result<()> {
    with_record(
        |record| record["version"] = json!(2),
        &["version 2", "upgrade"],
    )
}
