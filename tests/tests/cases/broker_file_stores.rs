//! Leases of nodes that are gone, in a directory that nodes share: brokers on a real API server.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::api_server::ApiServer;
use e2e::case;
use e2e::cluster::{BrokerNode, api_server, eventually};
use e2e::harness::Case;
use serde_json::Value;
use tempfile::TempDir;

pub(crate) const CASES: &[Case] = &[
    case!(
        leases_of_a_removed_node_are_freed_and_nobody_elses,
        ApiServer,
        MountNamespace
    ),
    case!(
        nothing_is_freed_while_the_api_is_down_or_refuses,
        ApiServer,
        MountNamespace
    ),
    case!(
        a_node_of_another_cluster_keeps_its_leases,
        ApiServer,
        MountNamespace
    ),
];

const RANGE: &str = "10.9.0.0/24";
const LATE: Duration = Duration::from_secs(90);
/// Longer than a broker takes from its start until it would have freed something: the first time it
/// asks, the shortest time that a node is gone, and some more.
const IN_VAIN: Duration = Duration::from_secs(30);

/// A node whose broker has announced it in the store, where it has a lease.
fn announced(server: &ApiServer, name: &str, store: &Path) -> Result<(BrokerNode, String)> {
    let mut node = BrokerNode::sharing(server, name, &format!("machine-{name}"), store)?;
    let address = node.add(&format!("pod-of-{name}"), RANGE)?;
    node.start()?;
    let file = store.join("nodes").join(name);
    eventually("the broker announces its node", LATE, || Ok(file.exists()))?;
    Ok((node, address))
}

/// The containers that have a lease, sorted.
fn holders(store: &Path) -> Result<Vec<String>> {
    fn search(directory: &Path, found: &mut Vec<String>) -> Result<()> {
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            if path.is_dir() {
                search(&path, found)?;
                continue;
            }
            let name = path.file_name().and_then(|name| name.to_str());
            if name.context("a name")?.contains('@') {
                let record: Value = serde_json::from_slice(&fs::read(&path)?)?;
                found.push(
                    record["container"]
                        .as_str()
                        .context("container")?
                        .to_owned(),
                );
            }
        }
        Ok(())
    }
    let mut found = Vec::new();
    search(&store.join("leases"), &mut found)?;
    found.sort();
    Ok(found)
}

fn shared_directory() -> Result<TempDir> {
    let place = TempDir::new()?;
    fs::create_dir(place.path().join("store"))?;
    Ok(place)
}

fn leases_of_a_removed_node_are_freed_and_nobody_elses() -> Result<()> {
    let server = api_server()?;
    let place = shared_directory()?;
    let store = place.path().join("store");
    let (mut one, _) = announced(&server, "n1", &store)?;
    // By a name that was set by hand: its broker finds no Node of it, and announces nothing.
    let mut by_hand = BrokerNode::sharing(&server, "by-hand", "machine-by-hand", &store)?;
    server.delete_node("by-hand")?;
    by_hand.add("pod-by-hand", RANGE)?;
    by_hand.start()?;
    // A lease of the removed node's name and another machine.
    let other_machine = BrokerNode::sharing(&server, "n1", "machine-other", &store)?;
    other_machine.add("pod-of-other-machine", RANGE)?;
    let (mut two, kept) = announced(&server, "n2", &store)?;
    eventually("the other broker has seen the node", LATE, || {
        Ok(two.seen() == ["n1"])
    })?;
    one.kill()?;
    two.kill()?;
    server.delete_node("n1")?;
    two.start()?;
    eventually("the removed node's leases are freed", LATE, || {
        Ok(!holders(&store)?.contains(&"pod-of-n1".to_owned()))
    })?;
    let left = ["pod-by-hand", "pod-of-n2", "pod-of-other-machine"];
    ensure!(holders(&store)? == left, "{:?}", holders(&store)?);
    // The leases go first.
    eventually("the announcement is removed, and said", LATE, || {
        let log = two.log();
        Ok(!store.join("nodes/n1").exists()
            && log.contains("freed the lease of a node that is gone")
            && log.contains("node n1 is gone"))
    })?;
    ensure!(!store.join("nodes/by-hand").exists());
    ensure!(two.add("pod-of-n2", RANGE)? == kept);
    Ok(())
}

fn nothing_is_freed_while_the_api_is_down_or_refuses() -> Result<()> {
    let mut server = api_server()?;
    let place = shared_directory()?;
    let store = place.path().join("store");
    let (mut one, _) = announced(&server, "n1", &store)?;
    let (mut two, _) = announced(&server, "n2", &store)?;
    eventually("the other broker has seen the node", LATE, || {
        Ok(two.seen() == ["n1"])
    })?;
    one.kill()?;
    two.kill()?;
    server.delete_node("n1")?;
    let both = ["pod-of-n1", "pod-of-n2"];
    // Whoever is not in system:masters gets 403.
    two.start_as(&server.kubeconfig_of("stranger", &[])?)?;
    thread::sleep(IN_VAIN);
    ensure!(two.log().contains("403"), "{}", two.log());
    ensure!(holders(&store)? == both, "{:?}", holders(&store)?);
    two.kill()?;
    server.kill_api_server()?;
    two.start()?;
    thread::sleep(IN_VAIN);
    ensure!(two.log().contains("does not answer"), "{}", two.log());
    ensure!(holders(&store)? == both, "{:?}", holders(&store)?);
    two.kill()?;
    server.start_api_server()?;
    two.start()?;
    eventually("the removed node's leases are freed", LATE, || {
        Ok(holders(&store)? == ["pod-of-n2"])
    })
}

fn a_node_of_another_cluster_keeps_its_leases() -> Result<()> {
    let (server, another) = (api_server()?, api_server()?);
    let place = shared_directory()?;
    let store = place.path().join("store");
    let (_elsewhere, _) = announced(&another, "elsewhere", &store)?;
    let (two, _) = announced(&server, "n2", &store)?;
    thread::sleep(IN_VAIN);
    ensure!(two.seen().is_empty(), "{:?}", two.seen());
    let both = ["pod-of-elsewhere", "pod-of-n2"];
    ensure!(holders(&store)? == both, "{:?}", holders(&store)?);
    ensure!(store.join("nodes/elsewhere").exists());
    Ok(())
}
