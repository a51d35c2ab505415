//! Blocks of addresses: brokers of several nodes on a real API server.

use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::api_server::Patch;
use e2e::case;
use e2e::cluster::{
    BrokerNode, NAMESPACE, api_server, blocks, blocks_of, eventually, need, network,
};
use e2e::harness::Case;
use node_wire::{ClientError, FailureKind};
use serde_json::{Value, json};

pub(crate) const CASES: &[Case] = &[
    case!(no_address_is_given_on_two_nodes, ApiServer, MountNamespace),
    case!(
        pods_start_without_the_api_while_there_is_room,
        ApiServer,
        MountNamespace
    ),
    case!(a_killed_broker_has_its_blocks_after_its_start, ApiServer),
    case!(an_empty_block_goes_to_the_node_that_needs_it, ApiServer),
    case!(
        blocks_of_a_removed_node_are_taken_after_the_cool_down,
        ApiServer
    ),
    case!(
        a_node_that_was_replaced_does_not_keep_a_block_of_another,
        ApiServer,
        MountNamespace
    ),
    case!(
        the_first_use_of_a_range_fixes_the_length_of_its_blocks,
        ApiServer
    ),
    case!(a_small_range_is_shared_by_single_addresses, ApiServer),
    case!(the_api_refuses_to_cut_a_range_otherwise, ApiServer),
    case!(
        each_node_has_a_network_of_its_own,
        ApiServer,
        MountNamespace
    ),
    case!(
        an_address_of_another_nodes_block_is_refused_by_its_node,
        ApiServer
    ),
    case!(
        blocks_are_claimed_again_when_their_objects_are_gone,
        ApiServer,
        MountNamespace
    ),
    case!(
        leases_of_a_file_store_have_their_blocks_once_it_is_the_clusters,
        ApiServer,
        MountNamespace
    ),
];

const RANGE: &str = "10.9.0.0/24";
const LATE: Duration = Duration::from_secs(60);

fn kind<T>(result: Result<T, ClientError>) -> Result<FailureKind> {
    let error = result.err().context("the broker granted it")?;
    let failure = error
        .failure()
        .with_context(|| format!("no answer: {error}"))?;
    Ok(failure.kind)
}

fn started(server: &e2e::api_server::ApiServer, name: &str) -> Result<BrokerNode> {
    let mut node = BrokerNode::new(server, name, &json!({}))?;
    node.start()?;
    Ok(node)
}

fn no_address_is_given_on_two_nodes() -> Result<()> {
    let server = api_server()?;
    let nodes = [started(&server, "n1")?, started(&server, "n2")?];
    let given: Vec<Result<Vec<String>>> = thread::scope(|scope| {
        let pods = nodes.iter().flat_map(|node| {
            (0..3).map(move |thread| {
                scope.spawn(move || {
                    (0..10)
                        .map(|pod| node.add(&format!("pod-{thread}-{pod}"), RANGE))
                        .collect()
                })
            })
        });
        let pods: Vec<_> = pods.collect();
        pods.into_iter()
            .map(|pod| {
                pod.join()
                    .unwrap_or_else(|_| Err(anyhow::anyhow!("a panic")))
            })
            .collect()
    });
    let mut addresses = Vec::new();
    for given in given {
        addresses.extend(given?);
    }
    let distinct: BTreeSet<&String> = addresses.iter().collect();
    ensure!(
        (addresses.len(), distinct.len()) == (60, 60),
        "{addresses:?}"
    );
    for node in &nodes {
        ensure!(node.granted()?.len() >= 2, "{:?}", node.granted());
    }
    for name in ["n1", "n2"] {
        let node = &nodes[usize::from(name == "n2")];
        ensure!(
            blocks_of(&server, name)? == node.granted()?,
            "{}",
            node.log()
        );
    }
    Ok(())
}

fn pods_start_without_the_api_while_there_is_room() -> Result<()> {
    let mut server = api_server()?;
    let mut node = started(&server, "n1")?;
    node.add("pod-0", RANGE)?;
    server.kill_api_server()?;
    for pod in 1..10 {
        node.add(&format!("pod-{pod}"), RANGE)?;
    }
    // The broker restarts, too, and believes its files.
    node.kill()?;
    node.start()?;
    node.add("pod-10", RANGE)?;
    let mut full = None;
    for pod in 11..40 {
        let answer = node.call("ADD", &format!("pod-{pod}"), RANGE)?;
        if !answer.status.success() {
            full = Some(answer.refusal()?);
            break;
        }
    }
    let (code, message) = full.context("an ADD without room is refused")?;
    ensure!(
        code == 11 && message.contains("Kubernetes API"),
        "{code}: {message}"
    );
    server.start_api_server()?;
    eventually("an ADD gets a block again", LATE, || {
        Ok(node.add("pod-40", RANGE).is_ok())
    })
}

fn a_killed_broker_has_its_blocks_after_its_start() -> Result<()> {
    let server = api_server()?;
    let mut node = started(&server, "n1")?;
    node.ask(RANGE, 40)?;
    let before = node.granted()?;
    ensure!(before.len() == 3, "{before:?}");
    node.kill()?;
    node.start()?;
    let again = node.ask(RANGE, 1)?;
    ensure!(
        node.granted()?.len() == 4 && !before.contains(&again[0]),
        "{again:?}"
    );
    ensure!(blocks_of(&server, "n1")? == node.granted()?);
    node.stop()?;
    ensure!(
        blocks_of(&server, "n1")? == node.granted()?,
        "an end gives nothing back"
    );
    Ok(())
}

fn an_empty_block_goes_to_the_node_that_needs_it() -> Result<()> {
    let server = api_server()?;
    let (one, other) = (started(&server, "n1")?, started(&server, "n2")?);
    one.ask(RANGE, 254)?;
    ensure!(one.granted()?.len() == 16, "{:?}", one.granted());
    // Not at once: an ADD may be about to use them.
    ensure!(kind(other.ask(RANGE, 1))? == FailureKind::Exhausted);
    eventually("the other node gets a block", LATE, || {
        Ok(other.ask(RANGE, 1).is_ok())
    })?;
    let (ones, others) = (one.granted()?, other.granted()?);
    ensure!(
        !others.is_empty() && others.iter().all(|block| !ones.contains(block)),
        "{ones:?} {others:?}"
    );
    Ok(())
}

fn blocks_of_a_removed_node_are_taken_after_the_cool_down() -> Result<()> {
    let server = api_server()?;
    let (mut one, other) = (started(&server, "n1")?, started(&server, "n2")?);
    one.ask(RANGE, 254)?;
    one.kill()?;
    ensure!(
        kind(other.ask(RANGE, 1))? == FailureKind::Exhausted,
        "its node is there"
    );
    server.delete_node("n1")?;
    eventually("a block of the removed node is taken", LATE, || {
        Ok(other.ask(RANGE, 1).is_ok())
    })?;
    let taken = other.granted()?;
    let object = blocks(&server)?
        .into_iter()
        .find(|object| object["spec"]["block"] == taken[0].as_str())
        .context("its object")?;
    ensure!(
        object["spec"]["node"] == "n2" && object["spec"]["epoch"] == 2,
        "{object}"
    );
    Ok(())
}

fn a_node_that_was_replaced_does_not_keep_a_block_of_another() -> Result<()> {
    let server = api_server()?;
    let (mut one, other) = (started(&server, "n1")?, started(&server, "n2")?);
    one.ask(RANGE, 254)?;
    for pod in 0..3 {
        one.add(&format!("pod-{pod}"), RANGE)?;
    }
    let before = one.granted()?;
    one.kill()?;
    server.delete_node("n1")?;
    eventually("all blocks are taken", LATE, || {
        let _ = other.ask(RANGE, 254);
        Ok(other.granted()?.len() == before.len())
    })?;
    server.add_node("n1")?;
    one.start()?;
    eventually("the node that is back drops the blocks", LATE, || {
        Ok(one.granted()?.is_empty())
    })?;
    // It drops them first, and says then which leases they had.
    eventually("its broker names the leases", LATE, || {
        let log = one.log();
        Ok(log.contains("another node may give these addresses")
            && log.contains("pod default/pod-0"))
    })
}

fn the_first_use_of_a_range_fixes_the_length_of_its_blocks() -> Result<()> {
    let server = api_server()?;
    let one = started(&server, "n1")?;
    one.ask(RANGE, 1)?;
    let mut other = BrokerNode::new(&server, "n2", &json!({"blocks": {"ipv4": 32}}))?;
    other.start()?;
    let given = other.ask(RANGE, 1)?;
    ensure!(
        given.iter().all(|block| block.ends_with("/28")),
        "{given:?}"
    );
    // Cut by its own policy, another range is, and one that overlaps the first is refused.
    let given = other.ask("10.10.0.0/20", 1)?;
    ensure!(
        given.iter().all(|block| block.ends_with("/27")),
        "{given:?}"
    );
    let error = other
        .ask("10.9.0.0/16", 1)
        .err()
        .context("granted")?
        .to_string();
    ensure!(error.contains("/28") && error.contains("/27"), "{error}");
    ensure!(kind(other.ask("10.9.0.0/16", 1))? == FailureKind::Mismatch);
    Ok(())
}

fn the_api_refuses_to_cut_a_range_otherwise() -> Result<()> {
    let server = api_server()?;
    let node = started(&server, "n1")?;
    node.ask(RANGE, 1)?;
    let path = format!("/apis/rdma-netdev.io/v1alpha1/namespaces/{NAMESPACE}/addressranges/");
    let path = path + "default.default.10.9.0.0-24";
    let range = server.client().get(&path)?.expect_success()?;
    ensure!(range["spec"]["confirmed"] == true, "{range}");
    for spec in [
        json!({"blockPrefix": 27}),
        json!({"range": "10.9.0.0/16"}),
        json!({"networkName": "blue"}),
        json!({"static": ["10.9.0.5/32"]}),
        json!({"confirmed": false}),
    ] {
        let answer = server
            .client()
            .patch(&path, Patch::Merge, &json!({"spec": spec}))?;
        ensure!(answer.expect_success().is_err(), "{spec}");
    }
    Ok(())
}

fn each_node_has_a_network_of_its_own() -> Result<()> {
    let server = api_server()?;
    let nodes = [started(&server, "n1")?, started(&server, "n2")?];
    let ipam = json!({
        "type": "rdma-ipam", "range": "10.9.4.0/24", "perNode": {"prefix": 31, "gateway": "first"},
        "ipRanges": [{"range": "fd00:9::/64", "perNode": {"prefix": 120, "gateway": 1}}],
        "routes": [{"dst": "10.9.0.0/16"}],
    });
    for (name, node) in ["n1", "n2"].iter().zip(&nodes) {
        let add = |pod: &str, ipam: &Value| node.call_as("ADD", pod, pod, &network(ipam));
        let mut twice = ipam.clone();
        twice["ipRanges"] =
            json!([{"range": "10.9.4.0/24", "perNode": {"prefix": 31, "gateway": "first"}}]);
        let (code, message) = add("pod-3", &twice)?.refusal()?;
        ensure!(
            code == 102 && message.contains("2 addresses are wanted at once"),
            "{code}: {message}"
        );
        let result = add("pod-0", &ipam)?.success()?;
        let text = |pointer: &str| {
            let text = result.pointer(pointer).and_then(Value::as_str);
            text.with_context(|| format!("{pointer} of {result}"))
        };
        let (address, gateway) = (text("/ips/0/address")?, text("/ips/0/gateway")?);
        let (address, prefix) = address.split_once('/').context("no prefix length")?;
        let address: std::net::Ipv4Addr = address.parse()?;
        let other: std::net::Ipv4Addr = gateway.parse()?;
        ensure!(
            prefix == "31" && u32::from(address) == u32::from(other) + 1,
            "{result}"
        );
        let (six, gateway_six) = (text("/ips/1/address")?, text("/ips/1/gateway")?);
        ensure!(
            six.ends_with("02/120") && gateway_six.ends_with("01"),
            "{result}"
        );
        let all = blocks(&server)?;
        let object = all.iter().find(|one| one["spec"]["gateway"] == gateway);
        let object = object.context("the gateway is in no AddressBlock")?;
        ensure!(object["spec"]["node"] == *name, "{object}");
        let (code, message) = add("pod-1", &ipam)?.refusal()?;
        ensure!(
            code == 102 && message.contains("a node has one network of range 10.9.4.0/24"),
            "{code}: {message}"
        );
        let mut other = ipam.clone();
        other["perNode"]["gateway"] = json!("last");
        let (code, message) = add("pod-2", &other)?.refusal()?;
        ensure!(
            code == 101 && message.contains("AddressRange default.default.10.9.4.0-24"),
            "{code}: {message}"
        );
        ensure!(node.granted()?.len() == 2, "{:?}", node.granted());
    }
    let path = format!("/apis/rdma-netdev.io/v1alpha1/namespaces/{NAMESPACE}/addressranges/");
    let unlike = json!({"apiVersion": "rdma-netdev.io/v1alpha1", "kind": "AddressRange",
        "metadata": {"name": "default.default.10.9.5.0-24"}, "spec": {"store": "default",
        "range": "10.9.5.0/24", "blockPrefix": 30, "perNode": {"prefix": 31}}});
    let answer = server.client().post(path.trim_end_matches('/'), &unlike)?;
    ensure!(
        answer.expect_success().is_err(),
        "blockPrefix is not perNode.prefix"
    );
    let path = path + "default.default.10.9.4.0-24";
    for per_node in [
        json!(null),
        json!({"gateway": "last"}),
        json!({"prefix": 30}),
    ] {
        let spec = json!({"spec": {"perNode": per_node}});
        let answer = server.client().patch(&path, Patch::Merge, &spec)?;
        ensure!(answer.expect_success().is_err(), "{spec}");
    }
    Ok(())
}

fn a_small_range_is_shared_by_single_addresses() -> Result<()> {
    let server = api_server()?;
    let (one, other) = (started(&server, "n1")?, started(&server, "n2")?);
    let small = "10.9.1.0/29";
    let mut given = one.ask(small, 3)?;
    given.extend(other.ask(small, 3)?);
    given.sort();
    given.dedup();
    ensure!(
        given.len() == 6 && given.iter().all(|block| block.ends_with("/32")),
        "{given:?}"
    );
    ensure!(kind(one.ask(small, 1))? == FailureKind::Exhausted);
    // A longer range around it would be cut otherwise.
    let error = one.ask("10.9.1.0/24", 1).err().context("granted")?;
    let error = error.to_string();
    ensure!(error.contains("overlaps range 10.9.1.0/29"), "{error}");
    ensure!(
        error.contains("delete its AddressBlocks and AddressRange"),
        "{error}"
    );
    Ok(())
}

fn an_address_of_another_nodes_block_is_refused_by_its_node() -> Result<()> {
    let server = api_server()?;
    let fixed = json!({"static": ["10.9.2.5/32"]});
    let mut one = BrokerNode::new(&server, "n1", &fixed)?;
    let mut other = BrokerNode::new(&server, "n2", &fixed)?;
    one.start()?;
    other.start()?;
    let wanted = node_wire::BlockNeed {
        address: Some([10, 9, 0, 77].into()),
        ..need(RANGE, 1)
    };
    ensure!(one.ask_for(&wanted)? == ["10.9.0.64/28"]);
    let error = other.ask_for(&wanted).err().context("granted")?;
    ensure!(error.to_string().contains("of node n1"), "{error}");
    ensure!(kind(other.ask_for(&wanted))? == FailureKind::HeldByAnotherNode);
    // By itself, as of a network that is not cut into blocks, it follows its pod.
    let single = node_wire::BlockNeed {
        address: Some([10, 9, 2, 5].into()),
        single: true,
        ..need("10.9.2.0/23", 1)
    };
    ensure!(one.ask_for(&single)? == ["10.9.2.5/32"]);
    eventually("the address goes to the other node", LATE, || {
        Ok(other.ask_for(&single).is_ok())
    })
}

fn blocks_are_claimed_again_when_their_objects_are_gone() -> Result<()> {
    let server = api_server()?;
    let mut node = started(&server, "n1")?;
    let address = node.add("pod-0", RANGE)?;
    let before = node.granted()?;
    node.stop()?;
    for block in blocks(&server)? {
        let name = block["metadata"]["name"].as_str().context("a name")?;
        let path =
            format!("/apis/rdma-netdev.io/v1alpha1/namespaces/{NAMESPACE}/addressblocks/{name}");
        server.client().delete(&path)?.expect_success()?;
    }
    node.start()?;
    eventually("the object is there again", LATE, || {
        Ok(blocks_of(&server, "n1")? == before)
    })?;
    ensure!(node.add("pod-0", RANGE)? == address);
    Ok(())
}

fn leases_of_a_file_store_have_their_blocks_once_it_is_the_clusters() -> Result<()> {
    let server = api_server()?;
    let alone = json!({"type": "file"});
    let mut nodes = [
        BrokerNode::new(&server, "n1", &alone)?,
        BrokerNode::new(&server, "n2", &alone)?,
    ];
    // Each gives out the same addresses, and then some of its own.
    for node in &nodes {
        ensure!(node.add("pod-0", RANGE)? == "10.9.0.1");
    }
    for pod in 1..20 {
        nodes[1].add(&format!("pod-{pod}"), RANGE)?;
    }
    for node in &mut nodes {
        node.set_store(&json!({}))?;
        node.start()?;
    }
    // Which node was first is the race's; the other one's leases there are shown until they end.
    let (shared, own) = ("10.9.0.0/28".to_owned(), "10.9.0.16/28".to_owned());
    let have = |number: usize, block: &String| anyhow::Ok(nodes[number].granted()?.contains(block));
    eventually("the blocks of the leases are the nodes'", LATE, || {
        Ok(have(1, &own)? && (have(0, &shared)? || have(1, &shared)?))
    })?;
    let (winner, loser) = if have(0, &shared)? { (0, 1) } else { (1, 0) };
    ensure!(!have(loser, &shared)?, "two nodes have {shared}");
    eventually("the leases that are in conflict are counted", LATE, || {
        let conflicts = |node: usize| nodes[node].metric("conflicts");
        Ok(conflicts(loser)?.is_some_and(|count| count > 0.0) && conflicts(winner)? == Some(0.0))
    })?;
    // A new pod gets no address that is in use on either.
    let mut used = BTreeSet::new();
    for pod in 0..5 {
        for node in &nodes {
            let address = node.add(&format!("new-{pod}"), RANGE)?;
            ensure!(used.insert(address.clone()), "{address} twice");
        }
    }
    ensure!(!used.contains("10.9.0.1"));
    // The pods from before end without a fault.
    for node in &nodes {
        node.del("pod-0", RANGE)?;
    }
    Ok(())
}
