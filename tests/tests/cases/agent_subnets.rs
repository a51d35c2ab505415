//! Addresses whose owners the Kubernetes API knows: agents of several nodes on a real API server, and
//! the ADDs and DELs of their pods.

use std::collections::BTreeSet;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::api_server::{ApiServer, Patch};
use e2e::bin_under_test::product;
use e2e::case;
use e2e::cluster::{
    AgentNode, SUBNETS, api_server, document_name, eventually, network, network_with, parts,
    parts_of, serve_subnets, subnets, write_parts,
};
use e2e::harness::Case;
use e2e::proxy::{Proxy, Reach};
use node_wire::{FailureKind, Room};
use serde_json::{Value, json};

pub(crate) const CASES: &[Case] = &[
    case!(no_address_is_leased_on_two_nodes, ApiServer),
    case!(
        pods_start_without_the_api_while_the_node_has_room,
        ApiServer
    ),
    case!(an_api_that_hangs_fails_the_add_by_its_reason, ApiServer),
    case!(a_node_has_its_parts_after_a_reboot, ApiServer),
    case!(a_node_that_is_uninstalled_gives_its_parts_back, ApiServer),
    case!(an_administrator_assigns_and_releases_parts, ApiServer),
    case!(a_nodes_own_network_outlives_its_disk, ApiServer),
    case!(a_requested_address_moves_only_when_it_is_free, ApiServer),
    case!(nodes_share_a_small_range_to_its_last_address, ApiServer),
    case!(parts_of_a_deleted_node_are_taken, ApiServer),
    case!(a_node_that_is_back_in_time_keeps_its_parts, ApiServer),
    case!(a_node_of_another_name_has_nothing_of_its_disk, ApiServer),
    case!(a_restored_etcd_gives_no_address_twice, ApiServer),
    case!(
        a_deleted_document_stays_and_a_lost_one_is_written_anew,
        ApiServer
    ),
    case!(parts_that_overlap_are_not_leased_from, ApiServer),
    case!(what_is_missing_in_the_cluster_is_named, ApiServer),
];

const RANGE: &str = "10.9.0.0/24";
const LATE: Duration = Duration::from_secs(60);

fn document(server: &ApiServer) -> Result<Value> {
    let path = format!("{SUBNETS}/{}", document_name("10.9.0.0"));
    server.client().get(&path)?.expect_success()
}

fn no_address_is_leased_on_two_nodes() -> Result<()> {
    let server = api_server()?;
    let nodes = [
        AgentNode::started(&server, "n1")?,
        AgentNode::started(&server, "n2")?,
    ];
    let add = |node: &AgentNode, thread: usize| -> Result<Vec<String>> {
        let pods = 0..10;
        pods.map(|pod| node.add_in_the_end(&format!("pod-{thread}-{pod}"), RANGE))
            .collect()
    };
    let leased: Vec<Result<Vec<String>>> = thread::scope(|scope| {
        let each = nodes
            .iter()
            .flat_map(|node| (0..3).map(move |thread| (node, thread)));
        let pods: Vec<_> = each
            .map(|(node, thread)| scope.spawn(move || add(node, thread)))
            .collect();
        let joined = pods.into_iter().map(thread::ScopedJoinHandle::join);
        joined
            .map(|pod| pod.unwrap_or_else(|_| Err(anyhow::anyhow!("a panic"))))
            .collect()
    });
    let mut addresses = Vec::new();
    for leased in leased {
        addresses.extend(leased?);
    }
    let distinct: BTreeSet<&String> = addresses.iter().collect();
    ensure!(
        (addresses.len(), distinct.len()) == (60, 60),
        "{addresses:?}"
    );
    for node in &nodes {
        ensure!(
            node.owned()? == parts_of(&server, node.name())?,
            "{}",
            node.log()
        );
    }
    // What kubectl shows, and by which labels it finds the document.
    let one = document(&server)?;
    let sizes = parts(&server)?.into_iter().map(|(cidr, _)| {
        let prefix = cidr
            .rsplit_once('/')
            .and_then(|(_, prefix)| prefix.parse::<u32>().ok());
        Ok(1_u64 << (32 - prefix.context("a length")?))
    });
    let covered: u64 = sizes.collect::<Result<Vec<u64>>>()?.iter().sum();
    ensure!(
        one["status"]["nodes"] == 2
            && one["status"]["parts"] == parts(&server)?.len()
            && one["status"]["free"] == 256 - covered,
        "{one}"
    );
    let labels = one["metadata"]["labels"].as_object().context("labels")?;
    for node in &nodes {
        let label = format!("n.rdma-netdev.io/{:016x}", ipam::space::hash(node.name()));
        ensure!(labels.contains_key(&label), "{one}");
    }
    ensure!(
        one["metadata"]["finalizers"] == json!(["rdma-netdev.io/parts"]),
        "{one}"
    );
    // Metrics of it.
    let node = &nodes[0];
    ensure!(
        node.page("/readyz")?.0 == 200,
        "{:?}",
        node.page("/readyz")?
    );
    #[expect(clippy::cast_precision_loss, reason = "a count")]
    let owned = node.owned()?.len() as f64;
    ensure!(node.metric("parts")? == owned && node.metric("writes_total")? > 0.0);
    Ok(())
}

fn pods_start_without_the_api_while_the_node_has_room() -> Result<()> {
    let mut server = api_server()?;
    let mut node = AgentNode::started(&server, "n1")?;
    // More than half of a first part.
    for pod in 0..3 {
        node.add_in_the_end(&format!("pod-{pod}"), RANGE)?;
    }
    let before = node.owned()?;
    server.kill_api_server()?;
    node.add("pod-3", RANGE)?;
    // An agent that starts now has what its disk says.
    node.kill()?;
    node.start()?;
    let mut refused = None;
    for pod in 4..40 {
        let answer = node.call("ADD", &format!("pod-{pod}"), &network(RANGE))?;
        if !answer.status.success() {
            refused = Some(answer.refusal()?);
            break;
        }
        node.del(&format!("pod-{pod}"), RANGE)?;
        node.add(&format!("pod-{pod}"), RANGE)?;
    }
    let (code, message) = refused.context("an ADD without room succeeded")?;
    ensure!(
        code == 11 && message.contains("Kubernetes API"),
        "{code}: {message}"
    );
    eventually("/readyz says so", LATE, || {
        let (status, text) = node.page("/readyz")?;
        Ok(status == 503 && text.contains("Kubernetes API"))
    })?;
    ensure!(node.owned()? == before, "{:?}", node.owned()?);
    server.start_api_server()?;
    node.add_in_the_end("pod-40", RANGE)?;
    eventually("the agent is ready again", LATE, || {
        Ok(node.page("/readyz")?.0 == 200)
    })?;
    ensure!(parts_of(&server, "n1")? == node.owned()?);
    Ok(())
}

fn an_api_that_hangs_fails_the_add_by_its_reason() -> Result<()> {
    let server = api_server()?;
    let proxy = Proxy::start(server.kubeconfig(), 1)?;
    let mut node = AgentNode::new(&server, "n1")?;
    node.set_kubeconfig(&proxy.kubeconfig(node.root().join("kubeconfig"))?);
    node.start()?;
    let address = node.add_in_the_end("pod-0", RANGE)?;
    proxy.set_reach(Reach::Hangs);
    let asked = Instant::now();
    let (code, message) = node.refusal("pod-1", "10.10.0.0/24")?;
    ensure!(
        code == 11 && message.contains("the Kubernetes API has not answered"),
        "{code}: {message}"
    );
    ensure!(
        asked.elapsed() < Duration::from_secs(30),
        "{:?}",
        asked.elapsed()
    );
    // The other range has room, and DEL asks nobody.
    node.del("pod-0", RANGE)?;
    ensure!(node.add("pod-2", RANGE)? == address);
    eventually("/readyz names what hangs", LATE, || {
        let (status, text) = node.page("/readyz")?;
        Ok(status == 503 && text.contains("the Kubernetes API has not answered"))
    })?;
    proxy.set_reach(Reach::Open);
    node.add_in_the_end("pod-1", "10.10.0.0/24")?;
    Ok(())
}

fn a_node_has_its_parts_after_a_reboot() -> Result<()> {
    let mut server = api_server()?;
    let mut nodes = [
        AgentNode::started(&server, "n1")?,
        AgentNode::started(&server, "n2")?,
    ];
    for node in &nodes {
        node.add_in_the_end("pod-0", RANGE)?;
    }
    let before = parts(&server)?;
    let owned = nodes[0].owned()?;
    nodes[0].reboot()?;
    nodes[0].start()?;
    let first = nodes[0].add_in_the_end("pod-1", RANGE)?;
    ensure!(
        nodes[0].owned()? == owned && parts(&server)? == before,
        "{:?}",
        parts(&server)?
    );
    // Nobody confirms a part of another boot but the API.
    nodes[0].reboot()?;
    server.kill_api_server()?;
    nodes[0].start()?;
    let (code, message) = nodes[0].refusal("pod-2", RANGE)?;
    ensure!(
        code == 11 && message.contains("Kubernetes API"),
        "{code}: {message}"
    );
    server.start_api_server()?;
    let again = nodes[0].add_in_the_end("pod-2", RANGE)?;
    ensure!(
        first == again && nodes[0].owned()? == owned,
        "{first} {again}"
    );
    // A disk that is lost leaves parts that nobody can be seen to use: they are marked.
    nodes[0].reinstall()?;
    nodes[0].start()?;
    eventually("the forgotten part is marked", LATE, || {
        let parts = parts(&server)?;
        let of_n1 = parts.iter().filter(|(_, part)| part["node"] == "n1");
        Ok(of_n1.clone().count() > 0 && of_n1.clone().any(|(_, part)| part.get("over").is_some()))
    })?;
    let new = nodes[0].add_in_the_end("pod-3", RANGE)?;
    ensure!(
        new != first && new != nodes[1].add("pod-1", RANGE)?,
        "{new}"
    );
    Ok(())
}

fn a_node_that_is_uninstalled_gives_its_parts_back() -> Result<()> {
    let server = api_server()?;
    let mut node = AgentNode::started(&server, "n1")?;
    node.add_in_the_end("pod-0", RANGE)?;
    let kept = node.addresses(&["give-back", "--json"])?;
    ensure!(
        kept.status.code() == Some(1) && kept.stderr.contains("leased or cool down"),
        "{kept:?}"
    );
    let uninstall = |node: &AgentNode| -> Result<(bool, String)> {
        let root = node.root();
        let output = Command::new(product("rdma-device-plugin")?)
            .args(["uninstall", "--yes", "--node", "n1", "--policy"])
            .arg(node.policy())
            .arg("--host-root")
            .arg(&root)
            .arg("--cni-bin-dir")
            .arg(root.join("bin"))
            .arg("--features-dir")
            .arg(node.features())
            .arg("--cdi-dir")
            .arg(root.join("cdi"))
            .arg("--run-dir")
            .arg(root.join("run/rdma-netdev"))
            .output()?;
        Ok((output.status.success(), String::from_utf8(output.stderr)?))
    };
    let (done, said) = uninstall(&node)?;
    ensure!(!done && said.contains("addresses are leased"), "{said}");
    node.del("pod-0", RANGE)?;
    node.kill()?;
    let (done, said) = uninstall(&node)?;
    ensure!(
        !done && said.contains("run rdma-agent on this node"),
        "{said}"
    );
    ensure!(
        !parts_of(&server, "n1")?.is_empty(),
        "given back without an agent"
    );
    node.start()?;
    let begun = Instant::now();
    while let (false, said) = uninstall(&node)? {
        ensure!(begun.elapsed() < LATE, "{said}");
        thread::sleep(Duration::from_millis(200));
    }
    // The last part took the document along.
    ensure!(subnets(&server)?.is_empty(), "{:?}", subnets(&server)?);
    Ok(())
}

fn an_administrator_assigns_and_releases_parts() -> Result<()> {
    let server = api_server()?;
    let mut one = AgentNode::started(&server, "n1")?;
    let other = AgentNode::started(&server, "n2")?;
    one.add_in_the_end("pod-0", RANGE)?;
    let own = one.owned()?.into_iter().next().context("a part")?;
    let assigned = other.addresses(&["assign", "10.9.4.16/28", "--node", "n1", "--json"])?;
    ensure!(
        assigned.success()?["changed"] == json!(["10.9.4.16/28"]),
        "{assigned:?}"
    );
    let ipam = json!({"type": "rdma-ipam", "range": "10.9.4.0/24",
        "perNode": {"prefix": 28, "gateway": "first"}});
    let config = network_with(&ipam);
    let mut result = Value::Null;
    eventually(
        "the node leases from the network it was assigned",
        LATE,
        || {
            let answer = one.call("ADD", "pod-1", &config)?;
            result = answer.success().unwrap_or_default();
            Ok(answer.status.success())
        },
    )?;
    ensure!(
        result["ips"][0]["address"] == "10.9.4.18/28" && result["ips"][0]["gateway"] == "10.9.4.17",
        "{result}"
    );
    // What pods of a running node have is not released from under them.
    for (node, arguments, why) in [
        (&one, ["--part", own.as_str()], "leased or cool down"),
        (&one, ["--node", "n1"], "give-back"),
        (&one, ["--part", "10.9.0.240/30"], "is not a part"),
        (&other, ["--node", "n9"], "node n9 has no part"),
    ] {
        let refused = node.addresses(&[&["release", "--yes"][..], &arguments].concat())?;
        ensure!(
            !refused.status.success() && refused.stderr.contains(why),
            "{refused:?}"
        );
        ensure!(
            node.page("/readyz")?.0 == 200,
            "{why}: {:?}",
            node.page("/readyz")
        );
    }
    // Of a node that will not come back, all goes.
    one.kill()?;
    let mut released = other.addresses(&["release", "--node", "n1", "--yes", "--json"])?;
    if released.stderr.contains("the agent ends") {
        // The thread of a space without parts had ended just now.
        released = other.addresses(&["release", "--node", "n1", "--yes", "--json"])?;
    }
    let mut changed: Vec<Value> = released.success()?["changed"]
        .as_array()
        .context("changed")?
        .clone();
    changed.sort_by_key(ToString::to_string);
    ensure!(
        changed == [json!(own), json!("10.9.4.16/28")],
        "{released:?}"
    );
    ensure!(parts_of(&server, "n1")?.is_empty());
    // It does come back, and leases from no part that is not its own any more.
    let at_once = other.add_in_the_end("pod-0", "10.9.0.0/29")?;
    one.start()?;
    let late = one.add_in_the_end("pod-2", "10.9.0.0/29")?;
    ensure!(at_once != late, "{late} twice");
    Ok(())
}

fn a_nodes_own_network_outlives_its_disk() -> Result<()> {
    let server = api_server()?;
    let mut nodes = [
        AgentNode::started(&server, "n1")?,
        AgentNode::started(&server, "n2")?,
    ];
    let ipam = json!({
        "type": "rdma-ipam", "range": "10.9.4.0/24", "perNode": {"prefix": 30, "gateway": "first"},
        "ipRanges": [{"range": "fd00:9::/64", "perNode": {"prefix": 126, "gateway": 1}}],
    });
    let config = network_with(&ipam);
    let add = |node: &AgentNode, pod: &str| -> Result<Value> {
        let mut result = Value::Null;
        eventually("an ADD succeeds", LATE, || {
            let answer = node.call("ADD", pod, &config)?;
            result = answer.success().unwrap_or_default();
            Ok(answer.status.success())
        })?;
        Ok(result["ips"].clone())
    };
    let (first, other) = (add(&nodes[0], "pod-0")?, add(&nodes[1], "pod-0")?);
    ensure!(first != other, "{first} twice");
    let (code, message) = nodes[0].call("ADD", "pod-1", &config)?.refusal()?;
    ensure!(
        code == 102 && message.contains("is used up"),
        "{code}: {message}"
    );
    let networks = parts_of(&server, "n1")?;
    ensure!(networks.len() == 2, "{networks:?}");
    nodes[0].reinstall()?;
    server.delete_node("n1")?;
    server.add_node("n1")?;
    nodes[0].start()?;
    ensure!(
        add(&nodes[0], "pod-2")? == first,
        "another network than before"
    );
    ensure!(parts_of(&server, "n1")? == networks);
    Ok(())
}

fn a_requested_address_moves_only_when_it_is_free() -> Result<()> {
    let server = api_server()?;
    let nodes = [
        AgentNode::started(&server, "n1")?,
        AgentNode::started(&server, "n2")?,
    ];
    let (config, wanted) = (network(RANGE), "IP=10.9.0.77");
    let add = |node: &AgentNode, pod: &str| node.call_with("ADD", pod, &config, wanted);
    add(&nodes[0], "db")?.success()?;
    ensure!(parts_of(&server, "n1")?.contains(&"10.9.0.77/32".to_owned()));
    let (code, message) = add(&nodes[1], "db")?.refusal()?;
    ensure!(code == 11 && message.contains("n1"), "{code}: {message}");
    // The pod moves.
    nodes[0].del("db", RANGE)?;
    eventually("the address is leased on the other node", LATE, || {
        Ok(add(&nodes[1], "db")?.status.success())
    })?;
    ensure!(
        parts_of(&server, "n2")? == ["10.9.0.77/32"],
        "{:?}",
        parts(&server)?
    );
    // A reserved one is refused by name, and the agent is not at fault.
    write_parts(
        &server,
        "10.9.0.0",
        &json!({"10.9.0.80/32": {"reserved": "router of rail 3"}}),
    )?;
    let answer = nodes[0].call_with("ADD", "x", &config, "IP=10.9.0.80")?;
    let (_, message) = answer.refusal()?;
    ensure!(message.contains("reserved: router of rail 3"), "{message}");
    ensure!(nodes[0].page("/readyz")?.0 == 200);
    Ok(())
}

fn nodes_share_a_small_range_to_its_last_address() -> Result<()> {
    const SMALL: &str = "10.9.1.0/29";
    let server = api_server()?;
    let names = ["n1", "n2", "n3"];
    let nodes = names.map(|name| AgentNode::started(&server, name));
    let nodes = nodes.into_iter().collect::<Result<Vec<AgentNode>>>()?;
    // One node has it all, and no pod of it needs that any more but one.
    let mut held = BTreeSet::new();
    for pod in 0..6 {
        nodes[0].add_in_the_end(&format!("a-{pod}"), SMALL)?;
    }
    let (code, message) = nodes[0].refusal("a-6", SMALL)?;
    for part in ["lease the addresses of ", "a-6", "10.9.1.0/29 is exhausted"] {
        ensure!(code == 102 && message.contains(part), "{code}: {message}");
    }
    for pod in 1..6 {
        nodes[0].del(&format!("a-{pod}"), SMALL)?;
    }
    for (at, node) in nodes.iter().enumerate().skip(1) {
        for pod in 0..2 {
            let begun = Instant::now();
            let address = node.add_in_the_end(&format!("b-{at}-{pod}"), SMALL)?;
            ensure!(begun.elapsed() < LATE, "{:?}", begun.elapsed());
            ensure!(held.insert(address.clone()), "{address} twice");
        }
    }
    let last = nodes[0].add_in_the_end("a-7", SMALL)?;
    ensure!(held.insert(last.clone()), "{last} twice");
    let (code, message) = nodes[1].refusal("b-9", SMALL)?;
    ensure!(
        [11, 102].contains(&code) && message.contains(SMALL),
        "{code}: {message}"
    );
    Ok(())
}

fn parts_of_a_deleted_node_are_taken() -> Result<()> {
    const SMALL: &str = "10.9.1.0/30";
    let server = api_server()?;
    let (mut one, mut other) = (
        AgentNode::started(&server, "n1")?,
        AgentNode::started(&server, "n2")?,
    );
    for pod in 0..2 {
        one.add_in_the_end(&format!("pod-{pod}"), SMALL)?;
    }
    one.kill()?;
    // Not because it does not answer.
    let (code, message) = other.refusal("pod-0", SMALL)?;
    ensure!([11, 102].contains(&code), "{code}: {message}");
    ensure!(!parts_of(&server, "n1")?.is_empty());
    server.delete_node("n1")?;
    // What it knows of Nodes is believed for a minute.
    other.kill()?;
    other.start()?;
    let taken = other.add_in_the_end("pod-0", SMALL)?;
    // The node is back and runs its pods still: their addresses are not its own any more.
    server.add_node("n1")?;
    one.start()?;
    eventually("the node that is back drops what was taken", LATE, || {
        Ok(one.owned()? == parts_of(&server, "n1")?)
    })?;
    let outside = one.addresses(&["--json"])?;
    ensure!(
        outside.status.code() == Some(1) && outside.stderr.contains(&taken),
        "{outside:?}"
    );
    eventually("the page of the agent names its document", LATE, || {
        let (_, page) = one.page("/readyz")?;
        Ok(page.contains("which is not in a part of this node"))
    })?;
    // A node that is out of service is as gone as a deleted one.
    other.kill()?;
    let taint = json!({"spec": {"taints": [{"key": "node.kubernetes.io/out-of-service",
        "value": "nodeshutdown", "effect": "NoExecute"}]}});
    server
        .client()
        .patch("/api/v1/nodes/n2", Patch::Merge, &taint)?
        .expect_success()?;
    for pod in 0..2 {
        one.del(&format!("pod-{pod}"), SMALL)?;
    }
    for pod in 2..4 {
        let added = one.add_in_the_end(&format!("pod-{pod}"), SMALL);
        added.with_context(|| format!("{:?}", parts(&server)))?;
    }
    ensure!(parts_of(&server, "n2")?.is_empty(), "{:?}", parts(&server)?);
    Ok(())
}

fn a_node_that_is_back_in_time_keeps_its_parts() -> Result<()> {
    let server = api_server()?;
    let mut node = AgentNode::started(&server, "n1")?;
    let address = node.add_in_the_end("pod-0", RANGE)?;
    let owned = node.owned()?;
    let part = owned.first().context("a part")?.clone();
    for is_up in [false, true] {
        if !is_up {
            node.kill()?;
        }
        let over = json!({"since": "2026-01-01T00:00:00Z", "why": "node n1 is gone"});
        write_parts(&server, "10.9.0.0", &json!({part.as_str(): {"over": over}}))?;
        let label = format!("n.rdma-netdev.io/{:016x}", ipam::space::hash("n1"));
        let path = format!("{SUBNETS}/{}", document_name("10.9.0.0"));
        let asked = json!({"metadata": {"labels": {label: "asked"}}});
        server
            .client()
            .patch(&path, Patch::Merge, &asked)?
            .expect_success()?;
        if !is_up {
            node.start()?;
        }
        eventually("the node says that it is not over", LATE, || {
            let document = document(&server)?;
            Ok(document["spec"]["parts"][&part].get("over").is_none())
        })?;
        eventually("the node has the part", LATE, || Ok(node.owned()? == owned))?;
    }
    ensure!(node.add("pod-1", RANGE)? != address);
    Ok(())
}

fn a_node_of_another_name_has_nothing_of_its_disk() -> Result<()> {
    const SMALL: &str = "10.9.1.0/29";
    let server = api_server()?;
    let mut original = AgentNode::started(&server, "n1")?;
    let mut addresses = BTreeSet::new();
    for pod in 0..2 {
        addresses.insert(original.add_in_the_end(&format!("pod-{pod}"), SMALL)?);
    }
    let owned = original.owned()?;
    original.kill()?;
    let mut copy = AgentNode::with_disk_of(&server, "n2", &original)?;
    copy.start()?;
    let address = copy.add_in_the_end("pod-0", SMALL)?;
    ensure!(!addresses.contains(&address), "{address}: {addresses:?}");
    ensure!(copy.owned()? == parts_of(&server, "n2")?, "{}", copy.log());
    original.start()?;
    eventually("the original has its parts", LATE, || {
        Ok(original.owned()? == owned && parts_of(&server, "n1")? == owned)
    })?;
    // The copy is called otherwise after a reboot, and its old Node is deleted.
    copy.reboot()?;
    copy.rename(&server, "n3")?;
    server.delete_node("n2")?;
    copy.start()?;
    for pod in 1..5 {
        addresses.insert(copy.add_in_the_end(&format!("pod-{pod}"), SMALL)?);
    }
    ensure!(addresses.len() == 6, "{addresses:?}");
    ensure!(parts_of(&server, "n2")?.is_empty(), "{:?}", parts(&server)?);
    Ok(())
}

fn a_restored_etcd_gives_no_address_twice() -> Result<()> {
    let mut server = api_server()?;
    let nodes = [
        AgentNode::started(&server, "n1")?,
        AgentNode::started(&server, "n2")?,
    ];
    // Before the backup n1 has a part, after it n2 and n1 one more.
    nodes[0].add_in_the_end("pod-0", RANGE)?;
    server.back_up()?;
    let mut leased = BTreeSet::new();
    for pod in 0..3 {
        leased.insert(nodes[1].add_in_the_end(&format!("pod-{pod}"), RANGE)?);
    }
    for pod in 1..12 {
        leased.insert(nodes[0].add_in_the_end(&format!("pod-{pod}"), RANGE)?);
    }
    let before: Vec<Vec<String>> = nodes.iter().map(AgentNode::owned).collect::<Result<_>>()?;
    server.restore()?;
    for (node, before) in nodes.iter().zip(&before) {
        eventually("each node's parts are in the document again", LATE, || {
            Ok(parts_of(&server, node.name())? == *before)
        })
        .with_context(|| format!("{before:?}: {}", node.log()))?;
        ensure!(node.owned()? == *before, "{:?}", node.owned()?);
    }
    // Who has room goes on; nobody claims.
    let room = nodes[1].add("pod-9", RANGE)?;
    ensure!(!leased.contains(&room), "{room} twice");
    let (code, message) = nodes[1].refusal("pod-10", "10.10.0.0/24")?;
    ensure!(
        code == 11 && message.contains("older than one that was read before"),
        "{code}: {message}"
    );
    eventually("/readyz names it", LATE, || {
        Ok(nodes[1]
            .page("/readyz")?
            .1
            .contains("older than one that was read before"))
    })
}

fn a_deleted_document_stays_and_a_lost_one_is_written_anew() -> Result<()> {
    let server = api_server()?;
    let mut node = AgentNode::started(&server, "n1")?;
    let address = node.add_in_the_end("pod-0", RANGE)?;
    let owned = node.owned()?;
    let path = format!("{SUBNETS}/{}", document_name("10.9.0.0"));
    server.client().delete(&path)?.expect_success()?;
    let kept = document(&server)?;
    ensure!(
        kept["metadata"].get("deletionTimestamp").is_some(),
        "{kept}"
    );
    // It goes on: more pods, and a part that goes back with its last pod.
    for pod in 1..12 {
        node.add_in_the_end(&format!("pod-{pod}"), RANGE)?;
    }
    // Who removes the finalizer by hand removes what nodes own.
    let before = node.owned()?;
    ensure!(before.len() > owned.len(), "{before:?}");
    let finalizers = json!({"metadata": {"finalizers": null}});
    server
        .client()
        .patch(&path, Patch::Merge, &finalizers)?
        .expect_success()?;
    ensure!(subnets(&server)?.is_empty());
    node.kill()?;
    node.start()?;
    eventually("what the disk has is in a document again", LATE, || {
        Ok(parts_of(&server, "n1")? == before)
    })
    .with_context(|| node.log())?;
    ensure!(node.owned()? == before);
    node.del("pod-0", RANGE)?;
    ensure!(node.add("pod-0", RANGE)? == address);
    Ok(())
}

fn parts_that_overlap_are_not_leased_from() -> Result<()> {
    let server = api_server()?;
    let nodes = [
        AgentNode::started(&server, "n1")?,
        AgentNode::started(&server, "n2")?,
    ];
    nodes[0].add_in_the_end("pod-0", RANGE)?;
    nodes[1].add_in_the_end("pod-0", RANGE)?;
    let part = nodes[0].owned()?.into_iter().next().context("a part")?;
    let address = part.split('/').next().context("an address")?.to_owned();
    let written = json!({format!("{address}/32"): {"node": "n2", "id": "abc-1"}});
    write_parts(&server, "10.9.0.0", &written)?;
    for node in &nodes {
        let mut node_owned = Vec::new();
        eventually("nobody owns what overlaps", LATE, || {
            // Documents are read at the next need.
            let _ = node.ask(RANGE, Room::Addresses(40));
            node_owned = node.owned()?;
            Ok(!node_owned
                .iter()
                .any(|owned| owned.starts_with(&format!("{address}/"))))
        })
        .with_context(|| format!("{node_owned:?}"))?;
        eventually("/readyz names the document", LATE, || {
            let (status, text) = node.page("/readyz")?;
            Ok(status == 503 && text.contains("10.9.0.0/24: parts overlap"))
        })
        .with_context(|| format!("{:?} {:?}", node.page("/readyz"), parts(&server)))?;
        ensure!(node.metric("documents_in_doubt")? > 0.0);
        node.add_in_the_end("pod-9", RANGE)?;
    }
    // A pod of the first node has an address of its part: nobody else gets that.
    ensure!(
        parts_of(&server, "n1")?.contains(&part),
        "{:?}",
        parts(&server)?
    );
    Ok(())
}

fn what_is_missing_in_the_cluster_is_named() -> Result<()> {
    let server = ApiServer::start()?;
    let mut node = AgentNode::started(&server, "n1")?;
    let (code, message) = node.refusal("pod-0", RANGE)?;
    ensure!(
        code == 11 && message.contains("install the CustomResourceDefinition"),
        "{code}: {message}"
    );
    ensure!(
        node.page("/readyz")?.1.contains("CustomResourceDefinition"),
        "{:?}",
        node.page("/readyz")
    );
    serve_subnets(&server)?;
    node.add_in_the_end("pod-0", RANGE)?;
    eventually("the agent is ready", LATE, || {
        Ok(node.page("/readyz")?.0 == 200)
    })?;
    // A token without rights: what the node has it leases, and the rest has a reason.
    let stranger = server.kubeconfig_of("stranger", &[])?;
    node.stop()?;
    node.set_kubeconfig(&stranger);
    node.start()?;
    let (code, message) = node.refusal("pod-1", "10.10.0.0/24")?;
    ensure!(
        code == 11 && message.contains("403 Forbidden"),
        "{code}: {message}"
    );
    ensure!(
        node.page("/readyz")?.1.contains("403 Forbidden"),
        "{:?}",
        node.page("/readyz")
    );
    node.del("pod-0", RANGE)?;
    node.add("pod-2", RANGE)?;
    let asked = node.ask("10.10.0.0/24", Room::Addresses(1));
    let kind = asked
        .err()
        .context("an answer")?
        .failure()
        .map(|failure| failure.kind);
    ensure!(kind == Some(FailureKind::TryAgain), "{kind:?}");
    Ok(())
}
