//! Leases as whereabouts' objects: brokers of two nodes, and what whereabouts left, on a real API
//! server.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::api_server::ApiServer;
use e2e::case;
use e2e::cluster::{BrokerNode, eventually, network};
use e2e::harness::Case;
use e2e::lease_store::addresses;
use e2e::whereabouts::{
    api_server, make_pool, make_reservation, pool, remove_lease, remove_reservation, reservation,
    reservations, serve_both_kinds,
};
use node_wire::{AddressAction, AddressQuestion, AttachmentId, RangeWanted, Taking};
use serde_json::{Value, json};

pub(crate) const CASES: &[Case] = &[
    case!(two_nodes_give_no_address_of_whereabouts_twice, ApiServer),
    case!(
        leases_are_written_as_whereabouts_writes_them,
        ApiServer,
        MountNamespace
    ),
    case!(
        what_whereabouts_leased_is_not_given,
        ApiServer,
        MountNamespace
    ),
    case!(
        a_lease_that_whereabouts_made_is_freed_by_del,
        ApiServer,
        MountNamespace
    ),
    case!(
        a_pod_keeps_its_address_in_a_new_container,
        ApiServer,
        MountNamespace
    ),
    case!(
        halves_of_a_lease_are_healed_by_add_del_and_sweep,
        ApiServer,
        MountNamespace
    ),
    case!(
        an_attachment_has_all_its_addresses_or_none,
        ApiServer,
        MountNamespace
    ),
    case!(
        gc_frees_what_this_node_took_and_no_more,
        ApiServer,
        MountNamespace
    ),
    case!(
        what_the_objects_cannot_hold_is_refused,
        ApiServer,
        MountNamespace
    ),
    case!(
        without_broker_or_api_the_runtime_tries_again,
        ApiServer,
        MountNamespace
    ),
    case!(
        blocks_that_come_after_it_give_no_address_that_is_leased_there,
        ApiServer,
        MountNamespace
    ),
];

const RANGE: &str = "10.9.0.0/24";
const POOL: &str = "10.9.0.0-24";
const LATE: Duration = Duration::from_secs(60);

fn node(server: &ApiServer, name: &str) -> Result<BrokerNode> {
    let mut node = BrokerNode::new(server, name, &json!({"objects": "whereabouts"}))?;
    node.start()?;
    Ok(node)
}

/// Networks went on from whereabouts' objects to blocks while pods had leases there.
fn blocks_that_come_after_it_give_no_address_that_is_leased_there() -> Result<()> {
    let server = e2e::cluster::api_server()?;
    serve_both_kinds(&server)?;
    // In each block of 16 the pool has eight addresses, and a reservation alone one.
    let leased = (1..255).filter(|at| at % 16 < 8);
    let leased: serde_json::Map<String, Value> = leased
        .map(|at| (at.to_string(), lease("old", "old")))
        .collect();
    make_pool(&server, POOL, RANGE, &Value::Object(leased))?;
    for block in 0..16 {
        let reserved = format!("10.9.0.{}", block * 16 + 8);
        make_reservation(&server, &reserved, "default/old", "net1")?;
    }
    let mut node = BrokerNode::new(&server, "n1", &json!({"after": "before"}))?;
    node.start()?;
    // ADDs of the store before may be on their way.
    let (code, message) = node.call("ADD", "c", RANGE)?.refusal()?;
    ensure!(
        code == 11 && message.contains("comes after store \"before\""),
        "{code}: {message}"
    );
    let mut given = Vec::new();
    eventually("the first address is given", LATE, || {
        given.extend(node.add("pod-0", RANGE));
        Ok(!given.is_empty())
    })?;
    for pod in 1..20 {
        given.push(node.add(&format!("pod-{pod}"), RANGE)?);
    }
    let offset = |address: &String| -> Result<u8> {
        let last = address.rsplit('.').next().context("four bytes")?;
        Ok(last.parse()?)
    };
    for address in &given {
        ensure!(offset(address)? % 16 > 8, "{address} of {given:?}");
    }
    let distinct: BTreeSet<&String> = given.iter().collect();
    ensure!(distinct.len() == 20, "{given:?}");
    // A certain address is refused by the store that has it.
    let first = given.first().context("an address")?;
    let of_block = offset(first)? / 16 * 16;
    let wanted = node_wire::BlockNeed {
        address: Some(format!("10.9.0.{}", of_block + 3).parse()?),
        ..e2e::cluster::need(RANGE, 1)
    };
    let refused = node.ask_for(&wanted).err().context("granted")?.to_string();
    ensure!(
        refused.contains("is leased in store \"before\""),
        "{refused}"
    );
    // Leases there end, and their addresses are given.
    for at in of_block.max(1)..of_block + 8 {
        remove_lease(&server, POOL, &at.to_string())?;
    }
    remove_reservation(&server, &format!("10.9.0.{}", of_block + 8))?;
    node.kill()?;
    node.start()?;
    eventually("the addresses are given", LATE, || {
        Ok(node.ask_for(&wanted).is_ok())
    })?;
    let before = node.granted()?;
    for pod in 20..24 {
        let address = node.add(&format!("pod-{pod}"), RANGE)?;
        ensure!(offset(&address)? / 16 * 16 == of_block, "{address}");
    }
    ensure!(node.granted()? == before);
    Ok(())
}

fn lease(container: &str, pod: &str) -> Value {
    json!({"id": container, "podref": format!("default/{pod}"), "ifname": "net1"})
}

fn allocations(server: &ApiServer, name: &str) -> Result<Value> {
    Ok(pool(server, name)?.context("the pool")?["allocations"].clone())
}

fn two_nodes_give_no_address_of_whereabouts_twice() -> Result<()> {
    let server = api_server()?;
    let nodes = [node(&server, "n1")?, node(&server, "n2")?];
    let taken: Vec<Result<IpAddr>> = thread::scope(|scope| {
        let pods = (0..200).map(|pod| {
            let socket = nodes[pod % 2].socket();
            scope.spawn(move || take(&socket, pod))
        });
        let pods: Vec<_> = pods.collect();
        pods.into_iter()
            .map(|pod| {
                pod.join()
                    .unwrap_or_else(|_| Err(anyhow::anyhow!("a panic")))
            })
            .collect()
    });
    let taken: Vec<IpAddr> = taken.into_iter().collect::<Result<_>>()?;
    let distinct: BTreeSet<&IpAddr> = taken.iter().collect();
    ensure!(distinct.len() == 200, "{taken:?}");
    let entries = allocations(&server, POOL)?;
    let entries = entries.as_object().context("a map")?;
    let reserved = reservations(&server)?;
    let of_taken: BTreeSet<String> = taken.iter().map(ToString::to_string).collect();
    ensure!(
        of_taken
            .iter()
            .eq(&reserved.iter().cloned().collect::<BTreeSet<_>>()),
        "{reserved:?}"
    );
    let of_pool: BTreeSet<String> = entries.keys().map(|at| format!("10.9.0.{at}")).collect();
    ensure!(of_pool == of_taken, "{entries:?}");
    Ok(())
}

/// Asks until there is an answer, as a runtime's pods do.
fn take(socket: &std::path::Path, pod: usize) -> Result<IpAddr> {
    let question = AddressQuestion {
        store: "default".into(),
        network: "rail".into(),
        action: AddressAction::Take(Taking {
            attachment: AttachmentId {
                container: format!("c{pod}"),
                interface: "net1".into(),
            },
            pod: format!("default/pod-{pod}"),
            network_name: None,
            ranges: vec![RangeWanted {
                range: RANGE.into(),
                spans: vec![([10, 9, 0, 1].into(), [10, 9, 0, 254].into())],
                address: None,
            }],
        }),
    };
    let end = Instant::now() + LATE;
    loop {
        match node_wire::addresses(socket, &question, Duration::from_secs(10)) {
            Ok(answer) => return answer.addresses.first().copied().context("an address"),
            Err(error) if Instant::now() > end => return Err(error.into()),
            Err(_) => thread::sleep(Duration::from_millis(200)),
        }
    }
}

fn leases_are_written_as_whereabouts_writes_them() -> Result<()> {
    let server = api_server()?;
    let node = node(&server, "n1")?;
    ensure!(node.add("pod-0", RANGE)? == "10.9.0.1");
    let written = pool(&server, POOL)?;
    let expected = json!({"range": RANGE, "allocations": {"1": lease("pod-0", "pod-0")}});
    ensure!(written.as_ref() == Some(&expected), "{written:?}");
    let written = reservation(&server, "10.9.0.1")?;
    let expected = json!({"podref": "default/pod-0", "ifname": "net1"});
    ensure!(written.as_ref() == Some(&expected), "{written:?}");
    let blue = network(&json!({"type": "rdma-ipam", "network_name": "blue",
        "ipRanges": [{"range": "fd00:9::1/64"}]}));
    let given = addresses(&node.call_as("ADD", "c1", "pod-1", &blue)?)?;
    ensure!(given == ["fd00:9::1"], "{given:?}");
    let written = pool(&server, "blue-fd00-9---64")?;
    let expected = json!({"range": "fd00:9::/64", "allocations": {"1": lease("c1", "pod-1")}});
    ensure!(written.as_ref() == Some(&expected), "{written:?}");
    ensure!(reservations(&server)? == ["10.9.0.1", "blue-fd00-9--1"]);
    node.call_as(
        "CHECK",
        "c1",
        "pod-1",
        &with_result(blue.clone(), "fd00:9::1/64"),
    )?
    .success()?;
    node.call_as("STATUS", "c1", "pod-1", &blue)?.success()?;
    node.call_as("DEL", "c1", "pod-1", &blue)?.success()?;
    node.del("pod-0", RANGE)?;
    ensure!(reservations(&server)?.is_empty());
    for name in [POOL, "blue-fd00-9---64"] {
        ensure!(allocations(&server, name)? == json!({}), "{name}");
    }
    Ok(())
}

fn with_result(mut config: Value, address: &str) -> Value {
    config["prevResult"] = json!({"cniVersion": "1.1.0", "ips": [{"address": address}]});
    config
}

fn what_whereabouts_leased_is_not_given() -> Result<()> {
    let server = api_server()?;
    let node = node(&server, "n1")?;
    // An entry of which the reservation is missing, and a reservation of another range.
    make_pool(&server, POOL, RANGE, &json!({"1": lease("x", "other")}))?;
    make_reservation(&server, "10.9.0.2", "default/third", "net1")?;
    ensure!(node.add("pod-0", RANGE)? == "10.9.0.3");
    ensure!(
        allocations(&server, POOL)?
            == json!({"1": lease("x", "other"), "3": lease("pod-0", "pod-0")})
    );
    let third = json!({"podref": "default/third", "ifname": "net1"});
    ensure!(reservation(&server, "10.9.0.2")? == Some(third));
    // What another range has reserved is as good as leased.
    make_reservation(&server, "10.9.0.1", "default/other", "net1")?;
    let small = network(&json!({"type": "rdma-ipam", "range": "10.9.0.0/30"}));
    let (code, message) = node.call_as("ADD", "c", "pod-9", &small)?.refusal()?;
    ensure!(
        code == 102 && message.contains("10.9.0.0/30"),
        "{code}: {message}"
    );
    Ok(())
}

fn a_lease_that_whereabouts_made_is_freed_by_del() -> Result<()> {
    let server = api_server()?;
    let node = node(&server, "n1")?;
    let leases = json!({"5": lease("c1", "pod-1"), "6": lease("c2", "pod-2")});
    make_pool(&server, POOL, RANGE, &leases)?;
    make_reservation(&server, "10.9.0.5", "default/pod-1", "net1")?;
    make_reservation(&server, "10.9.0.6", "default/pod-2", "net1")?;
    for _ in 0..2 {
        node.del("c1", RANGE)?;
        ensure!(allocations(&server, POOL)? == json!({"6": lease("c2", "pod-2")}));
        ensure!(reservations(&server)? == ["10.9.0.6"]);
    }
    // Without its configuration's range, too.
    let bare = network(&json!({"type": "rdma-ipam", "range": "junk"}));
    node.call_as("DEL", "c2", "pod-2", &bare)?.success()?;
    ensure!(allocations(&server, POOL)? == json!({}));
    ensure!(reservations(&server)?.is_empty());
    Ok(())
}

fn a_pod_keeps_its_address_in_a_new_container() -> Result<()> {
    let server = api_server()?;
    let (one, other) = (node(&server, "n1")?, node(&server, "n2")?);
    make_pool(&server, POOL, RANGE, &json!({"7": lease("old", "pod-1")}))?;
    make_reservation(&server, "10.9.0.7", "default/pod-1", "net1")?;
    let config = network(&json!({"type": "rdma-ipam", "range": RANGE}));
    for (node, container) in [(&one, "c1"), (&one, "c1"), (&other, "c2")] {
        let given = addresses(&node.call_as("ADD", container, "pod-1", &config)?)?;
        ensure!(given == ["10.9.0.7"], "{given:?}");
        ensure!(allocations(&server, POOL)? == json!({"7": lease(container, "pod-1")}));
    }
    // A late DEL of a container that has it no more.
    for (node, container) in [(&one, "c1"), (&other, "old")] {
        node.call_as("DEL", container, "pod-1", &config)?
            .success()?;
        ensure!(allocations(&server, POOL)? == json!({"7": lease("c2", "pod-1")}));
        ensure!(reservations(&server)? == ["10.9.0.7"]);
    }
    other.call_as("DEL", "c2", "pod-1", &config)?.success()?;
    ensure!(reservations(&server)?.is_empty() && allocations(&server, POOL)? == json!({}));
    Ok(())
}

fn halves_of_a_lease_are_healed_by_add_del_and_sweep() -> Result<()> {
    let server = api_server()?;
    let mut node = node(&server, "n1")?;
    // As an ADD that was killed between its two writes.
    ensure!(node.add("pod-0", RANGE)? == "10.9.0.1");
    remove_lease(&server, POOL, "1")?;
    ensure!(node.add("pod-0", RANGE)? == "10.9.0.1");
    ensure!(allocations(&server, POOL)? == json!({"1": lease("pod-0", "pod-0")}));
    remove_lease(&server, POOL, "1")?;
    node.del("pod-0", RANGE)?;
    ensure!(reservations(&server)?.is_empty(), "{}", node.log());
    node.add("pod-1", RANGE)?;
    node.add("pod-2", RANGE)?;
    remove_lease(&server, POOL, "1")?;
    node.kill()?;
    node.start()?;
    eventually("the sweep removes the reservation", LATE, || {
        Ok(reservations(&server)? == ["10.9.0.2"])
    })?;
    // As a DEL that was killed between its two writes.
    remove_reservation(&server, "10.9.0.2")?;
    node.del("pod-2", RANGE)?;
    ensure!(allocations(&server, POOL)? == json!({}));
    Ok(())
}

fn an_attachment_has_all_its_addresses_or_none() -> Result<()> {
    let server = api_server()?;
    let node = node(&server, "n1")?;
    let both = network(&json!({"type": "rdma-ipam",
        "ipRanges": [{"range": RANGE}, {"range": "10.9.1.0/30"}]}));
    let given = addresses(&node.call_as("ADD", "c1", "pod-1", &both)?)?;
    ensure!(given == ["10.9.0.1", "10.9.1.1"], "{given:?}");
    node.call_as("ADD", "c2", "pod-2", &both)?.success()?;
    let (code, message) = node.call_as("ADD", "c3", "pod-3", &both)?.refusal()?;
    ensure!(
        code == 102 && message.contains("10.9.1.0/30"),
        "{code}: {message}"
    );
    let entries = allocations(&server, POOL)?;
    ensure!(
        entries == json!({"1": lease("c1", "pod-1"), "2": lease("c2", "pod-2")}),
        "{entries}"
    );
    ensure!(reservations(&server)? == ["10.9.0.1", "10.9.0.2", "10.9.1.1", "10.9.1.2"]);
    Ok(())
}

fn gc_frees_what_this_node_took_and_no_more() -> Result<()> {
    let server = api_server()?;
    let (one, other) = (node(&server, "n1")?, node(&server, "n2")?);
    make_pool(&server, POOL, RANGE, &json!({"9": lease("w", "theirs")}))?;
    one.add("pod-0", RANGE)?;
    one.add("pod-1", RANGE)?;
    other.add("pod-2", RANGE)?;
    let mut config = network(&json!({"type": "rdma-ipam", "range": RANGE}));
    config["cni.dev/valid-attachments"] = json!([{"containerID": "pod-1", "ifname": "net1"}]);
    one.call_as("GC", "", "", &config)?.success()?;
    let left = allocations(&server, POOL)?;
    let expected = json!({"2": lease("pod-1", "pod-1"), "3": lease("pod-2", "pod-2"), "9": lease("w", "theirs")});
    ensure!(left == expected, "{left}");
    ensure!(reservations(&server)? == ["10.9.0.2", "10.9.0.3"]);
    Ok(())
}

fn what_the_objects_cannot_hold_is_refused() -> Result<()> {
    let server = api_server()?;
    let node = node(&server, "n1")?;
    for (ipam, says) in [
        (
            json!({"range": RANGE, "enable_overlapping_ranges": false}),
            "enable_overlapping_ranges",
        ),
        (
            json!({"range": RANGE, "node_slice_size": "/26"}),
            "node_slice_size",
        ),
        (
            json!({"ipRanges": [{"range": RANGE}, {"range": "10.9.0.0/25"}]}),
            "overlap",
        ),
        (json!({"range": RANGE, "network_name": "Blue"}), "Blue"),
    ] {
        let mut ipam = ipam;
        ipam["type"] = json!("rdma-ipam");
        let (code, message) = node
            .call_as("ADD", "c", "pod", &network(&ipam))?
            .refusal()?;
        ensure!(
            code == 7 && message.contains(says),
            "{says}: {code}: {message}"
        );
    }
    ensure!(pool(&server, POOL)?.is_none() && reservations(&server)?.is_empty());
    // A pool whose entries count from another address.
    make_pool(&server, POOL, "10.9.0.3/24", &json!({}))?;
    let (code, message) = node.call("ADD", "c", RANGE)?.refusal()?;
    ensure!(
        code == 101 && message.contains("10.9.0.3/24"),
        "{code}: {message}"
    );
    Ok(())
}

fn without_broker_or_api_the_runtime_tries_again() -> Result<()> {
    let mut server = api_server()?;
    let mut node = node(&server, "n1")?;
    node.add("pod-0", RANGE)?;
    server.kill_api_server()?;
    for verb in ["ADD", "DEL"] {
        let (code, message) = node.call(verb, "pod-0", RANGE)?.refusal()?;
        ensure!(
            code == 11 && message.contains("Kubernetes API"),
            "{verb}: {code}: {message}"
        );
    }
    server.start_api_server()?;
    node.kill()?;
    for verb in ["ADD", "DEL"] {
        let (code, message) = node.call(verb, "pod-0", RANGE)?.refusal()?;
        ensure!(
            code == 11 && message.contains("broker"),
            "{verb}: {code}: {message}"
        );
    }
    node.start()?;
    ensure!(node.add("pod-0", RANGE)? == "10.9.0.1");
    node.del("pod-0", RANGE)?;
    ensure!(allocations(&server, POOL)? == json!({}));
    Ok(())
}
