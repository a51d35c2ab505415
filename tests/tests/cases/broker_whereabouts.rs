//! Blocks beside what whereabouts left in its objects, on a real API server.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::case;
use e2e::cluster::{BrokerNode, eventually};
use e2e::harness::Case;
use e2e::whereabouts::{
    NAMESPACE, make_pool, make_reservation, remove_lease, remove_reservation, serve_both_kinds,
};
use serde_json::{Value, json};

pub(crate) const CASES: &[Case] = &[case!(
    blocks_give_no_address_that_whereabouts_leases,
    ApiServer,
    MountNamespace
)];

const RANGE: &str = "10.9.0.0/24";
const POOL: &str = "10.9.0.0-24";
const LATE: Duration = Duration::from_secs(60);

/// Networks changed from whereabouts to blocks while pods had leases of whereabouts.
fn blocks_give_no_address_that_whereabouts_leases() -> Result<()> {
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
    let mut node = BrokerNode::new(&server, "n1", &json!({"after": {"whereabouts": NAMESPACE}}))?;
    node.start()?;
    // ADDs of whereabouts may still run.
    let (code, message) = node.call("ADD", "c", RANGE)?.refusal()?;
    ensure!(
        code == 11 && message.contains("comes after whereabouts"),
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
    // A certain address is refused while whereabouts leases it.
    let first = given.first().context("an address")?;
    let of_block = offset(first)? / 16 * 16;
    let wanted = node_wire::BlockNeed {
        address: Some(format!("10.9.0.{}", of_block + 3).parse()?),
        ..e2e::cluster::need(RANGE, 1)
    };
    let refused = node.ask_for(&wanted).err().context("granted")?.to_string();
    ensure!(refused.contains("whereabouts leases"), "{refused}");
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
