//! The state of a node in the Kubernetes API: the real daemon on a machine of files, its agent, and a real
//! API server.

use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::api_server::ApiServer;
use e2e::case;
use e2e::cluster::{AgentNode, api_server, eventually, serve_subnets};
use e2e::harness::Case;
use nix::sys::signal::Signal;
use node_wire::{ForgetQuestion, ask};
use serde_json::{Value, json};

use super::dp_node_socket::{CALL_TIMEOUT, Node, WAIT_TIMEOUT, free_address, start};

pub(crate) const CASES: &[Case] = &[
    case!(
        a_port_that_goes_down_is_in_the_api_by_one_write,
        Root,
        ApiServer
    ),
    case!(
        an_hca_that_does_not_come_back_is_missing_in_the_api,
        Root,
        ApiServer
    ),
    case!(a_nodes_state_goes_with_its_node, Root, ApiServer),
    case!(
        addresses_are_served_without_the_definition_of_rdma_nodes,
        Root,
        ApiServer
    ),
];

const RDMA_NODES: &str = "/apis/rdma-netdev.io/v1alpha1/rdmanodes";
const CONFIG: &str = "version: 1\npools:\n- resource: rdma/nic\n  mode: shared\n  shares: 4\n  select: {linkTypes: [ether]}\n";
/// Condition and taint follow soon.
const HOLD: &str = "version: 1\nhealth: {flapHold: 2s}\n";
const RESOURCE: &str = "rdma/nic";
/// Longer than the agent waits between two writes.
const QUIET: Duration = Duration::from_secs(8);

fn read(server: &ApiServer) -> Result<Option<Value>> {
    let answer = server.client().get(&format!("{RDMA_NODES}/n1"))?;
    match answer.status {
        404 => Ok(None),
        _ => answer.expect_success().map(Some),
    }
}

/// A field of the object; nothing where there is none.
fn field(server: &ApiServer, pointer: &str) -> Result<Value> {
    let object = read(server)?.unwrap_or_default();
    Ok(object.pointer(pointer).cloned().unwrap_or_default())
}

fn version(server: &ApiServer) -> Result<Value> {
    field(server, "/metadata/resourceVersion")
}

fn problem(server: &ApiServer) -> Result<String> {
    let problem = field(server, "/status/summary/problem")?;
    Ok(problem.as_str().unwrap_or("no object").to_owned())
}

fn has_problem(server: &ApiServer, agent: &AgentNode, text: &str) -> Result<()> {
    let mut last = String::new();
    let waited = eventually("the problem", WAIT_TIMEOUT, || {
        last = problem(server)?;
        Ok(last.contains(text) && last.is_empty() == text.is_empty())
    });
    waited.with_context(|| format!("{last:?}, not {text:?}: {}", agent.log()))
}

/// Events are not among what the server has of Kubernetes.
fn serve_events(server: &ApiServer) -> Result<()> {
    let crd = json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": "events.events.k8s.io",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {
            "group": "events.k8s.io",
            "scope": "Namespaced",
            "names": {"kind": "Event", "plural": "events"},
            "versions": [{
                "name": "v1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": {
                    "type": "object", "x-kubernetes-preserve-unknown-fields": true}},
            }],
        },
    });
    server.apply_crd(&crd.to_string())
}

/// Kinds, names, reasons and notes of the events, in the order of their time.
fn events(server: &ApiServer) -> Result<Vec<[String; 4]>> {
    let list = server.client().get("/apis/events.k8s.io/v1/events")?;
    let list = list.expect_success()?;
    let mut events = list["items"].as_array().context("items")?.clone();
    events.sort_by_key(|event| event["eventTime"].to_string());
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let event = |one: &Value| {
        let of = &one["regarding"];
        [&of["kind"], &of["name"], &one["reason"], &one["note"]].map(text)
    };
    Ok(events.iter().map(event).collect())
}

/// The status of the Node's condition; null where there is none.
fn ready(server: &ApiServer) -> Result<Value> {
    let node = server.client().get("/api/v1/nodes/n1")?.expect_success()?;
    let conditions = node["status"]["conditions"].as_array();
    let mut conditions = conditions.into_iter().flatten();
    let ready = conditions.find(|one| one["type"] == "RdmaReady");
    Ok(ready.map(|one| one["status"].clone()).unwrap_or_default())
}

fn is_tainted(server: &ApiServer) -> Result<bool> {
    let node = server.client().get("/api/v1/nodes/n1")?.expect_success()?;
    Ok(node["spec"].to_string().contains("rdma-netdev.io/missing"))
}

/// The Node's labels of ours, and node-feature-discovery's file.
fn labels(server: &ApiServer, agent: &AgentNode) -> Result<[String; 2]> {
    let node = server.client().get("/api/v1/nodes/n1")?.expect_success()?;
    let labels = node["metadata"]["labels"].as_object().into_iter().flatten();
    let own = labels.filter(|(name, _)| name.starts_with("rdma-netdev.io/"));
    let lines = own.map(|(name, value)| format!("{name}={}\n", value.as_str().unwrap_or_default()));
    let file = std::fs::read_to_string(agent.features().join("rdma-netdev"));
    Ok([lines.collect(), file.unwrap_or_default()])
}

fn has_labels(server: &ApiServer, agent: &AgentNode) -> Result<()> {
    let expected = "rdma-netdev.io/link-layer=ether\nrdma-netdev.io/nics=2\n\
                    rdma-netdev.io/rails=2\nrdma-netdev.io/rate=100\n";
    let mut last = Default::default();
    eventually("the labels", WAIT_TIMEOUT, || {
        last = labels(server, agent)?;
        Ok(last == [expected; 2])
    })
    .with_context(|| format!("{last:?}: {}", agent.log()))
}

/// A daemon with two HCAs and its agent.
fn node(server: &ApiServer) -> Result<(Node, AgentNode)> {
    let node = Node::new(CONFIG, RESOURCE, 8)?;
    let mut agent = AgentNode::new(server, "n1")?;
    agent.set_daemon(&node.machine.node_socket());
    std::fs::create_dir(agent.features())?;
    agent.start()?;
    Ok((node, agent))
}

fn set_port(node: &Node, state: &str) -> Result<()> {
    let physical = if state.contains("ACTIVE") {
        "5: LinkUp"
    } else {
        "3: Disabled"
    };
    node.machine
        .tree
        .set_port_state("mlx5_1", 1, state, physical);
    node.daemon.signal(Signal::SIGHUP)
}

fn a_port_that_goes_down_is_in_the_api_by_one_write() -> Result<()> {
    let server = api_server()?;
    serve_events(&server)?;
    let (node, agent) = node(&server)?;
    has_problem(&server, &agent, "")?;
    let summary = field(&server, "/status/summary")?;
    let expected = json!({"resource": RESOURCE, "nics": "2", "expected": "2", "healthy": "2",
                          "allocated": "0", "problem": ""});
    ensure!(summary == expected, "{summary}");
    let port = field(&server, "/status/hcas/0/ports/0")?;
    ensure!(port.get("state") == Some(&json!("ACTIVE")), "{port}");
    for pod in 0..4 {
        node.admit(&format!("pod-{pod}"), &[(RESOURCE, 2)])?;
    }
    // Nothing happens, so nothing is written.
    thread::sleep(QUIET);
    let (before, writes) = (version(&server)?, agent.metric("node_object_writes_total")?);
    thread::sleep(QUIET);
    ensure!(version(&server)? == before, "written: {}", agent.log());

    ensure!(ready(&server)? == json!("True"));
    has_labels(&server, &agent)?;
    set_port(&node, "1: DOWN")?;
    has_problem(&server, &agent, "0000:d8:00.0 (rail 1): ")?;
    let hca = field(&server, "/status/hcas/1")?;
    ensure!(
        hca.get("healthy") == Some(&json!(false)) && hca.get("reason") == Some(&json!("port")),
        "{hca}"
    );
    thread::sleep(QUIET);
    ensure!(agent.metric("node_object_writes_total")? == writes + 1.0);
    has_labels(&server, &agent)?;
    // Not for half a minute: the port may flap.
    ensure!(ready(&server)? == json!("True"));

    // What a port does meanwhile is written once.
    for state in ["4: ACTIVE", "1: DOWN", "4: ACTIVE", "1: DOWN"] {
        set_port(&node, state)?;
        thread::sleep(Duration::from_millis(300));
    }
    thread::sleep(QUIET);
    let most = writes + 3.0;
    ensure!(agent.metric("node_object_writes_total")? <= most);
    has_problem(&server, &agent, "0000:d8:00.0 (rail 1): ")?;

    // One event for the Node, and one for each pod that has a share of the HCA.
    let events = events(&server)?;
    let of = |kind: &'static str| {
        events
            .iter()
            .filter(move |event| event[0] == kind && event[2] == "HcaUnhealthy")
    };
    let [node_event] = of("Node").collect::<Vec<_>>()[..] else {
        anyhow::bail!("{events:?}")
    };
    let note = "HCA 0000:d8:00.0 (rail 1) is unhealthy: ";
    ensure!(
        node_event[1] == "n1" && node_event[3].starts_with(note),
        "{node_event:?}"
    );
    let pods: BTreeSet<&str> = of("Pod").map(|event| event[1].as_str()).collect();
    ensure!(
        !pods.is_empty() && pods.len() == of("Pod").count(),
        "{events:?}"
    );
    ensure!(!agent.log().contains("an event is lost"), "{}", agent.log());
    Ok(())
}

fn an_hca_that_does_not_come_back_is_missing_in_the_api() -> Result<()> {
    let server = api_server()?;
    serve_events(&server)?;
    let (mut node, agent) = node(&server)?;
    has_problem(&server, &agent, "")?;
    node.daemon.signal(Signal::SIGTERM)?;
    node.daemon.ended(WAIT_TIMEOUT)?;
    let tree = &node.machine.tree;
    tree.hide_rdma("mlx5_1");
    for link in [
        "infiniband_verbs/uverbs1",
        "infiniband_mad/umad1",
        "infiniband_mad/issm1",
    ] {
        tree.remove(format!("/sys/class/{link}"));
    }
    tree.hide_netdev("rdma1");
    tree.remove("/sys/bus/pci/devices/0000:d8:00.0");
    let config = CONFIG.replace("version: 1\n", HOLD);
    node.daemon = start(&node.machine, &config, free_address()?)?;
    has_problem(&server, &agent, "0000:d8:00.0 (rail 1) missing since 20")?;
    eventually("an event", WAIT_TIMEOUT, || {
        let is_told = |event: &[String; 4]| event[..3] == ["Node", "n1", "HcaMissing"];
        Ok(events(&server)?.iter().any(is_told))
    })?;
    eventually("a taint", WAIT_TIMEOUT, || is_tainted(&server))?;
    ensure!(ready(&server)? == json!("False"));
    has_labels(&server, &agent)?;
    let summary = field(&server, "/status/summary")?;
    let counts = ["nics", "expected", "healthy"].map(|key| summary.get(key).cloned());
    let counts: Vec<_> = counts.iter().flatten().collect();
    ensure!(counts == ["1", "2", "1"], "{summary}");
    let question = ForgetQuestion {
        hca: "0000:d8:00.0".into(),
    };
    ask(&node.machine.node_socket(), &question, CALL_TIMEOUT)?;
    has_problem(&server, &agent, "")?;
    ensure!(field(&server, "/status/summary/expected")? == "1");
    eventually("no taint", WAIT_TIMEOUT, || {
        Ok(!is_tainted(&server)? && ready(&server)? == json!("True"))
    })?;
    // A pool can say how many there must be.
    std::fs::write(
        node.machine.directory().join("config"),
        config.replace("  mode", "  expected: 4\n  mode"),
    )?;
    node.daemon.signal(Signal::SIGHUP)?;
    has_problem(&server, &agent, "rdma/nic: 1 of 4 HCAs")
}

fn a_nodes_state_goes_with_its_node() -> Result<()> {
    let server = api_server()?;
    let (node, agent) = node(&server)?;
    has_problem(&server, &agent, "")?;
    let uid = "/metadata/ownerReferences/0/uid";
    ensure!(field(&server, uid)? == server.node_uid("n1")?.context("a Node")?);
    // As the garbage collector of a cluster does.
    let path = format!("{RDMA_NODES}/n1");
    server.delete_node("n1")?;
    server.client().delete(&path)?.expect_success()?;
    thread::sleep(QUIET);
    set_port(&node, "1: DOWN")?;
    let mut page = String::new();
    eventually("the fault", WAIT_TIMEOUT, || {
        let (status, text) = agent.page("/readyz")?;
        ensure!(status == 200, "{status} {text}");
        page = text;
        Ok(page.contains("RdmaNode: read Node n1"))
    })
    .with_context(|| page.clone())?;
    ensure!(read(&server)?.is_none(), "an object without a Node");
    agent.add_in_the_end("pod", "10.9.0.0/24")?;
    let new = server.add_node("n1")?;
    has_problem(&server, &agent, "0000:d8:00.0")?;
    ensure!(field(&server, uid)? == new);
    eventually("no fault", WAIT_TIMEOUT, || {
        Ok(agent.page("/readyz")?.1 == "ready\n")
    })?;
    // A daemon that is gone is named once it is silent for long, and what was known stays.
    drop(node);
    let silent = "the daemon does not answer";
    eventually("silence", Duration::from_secs(60), || {
        Ok(problem(&server)?.starts_with(silent))
    })?;
    ensure!(field(&server, "/status/summary/nics")? == "2");
    Ok(())
}

fn addresses_are_served_without_the_definition_of_rdma_nodes() -> Result<()> {
    let server = ApiServer::start()?;
    serve_subnets(&server)?;
    let crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
    let crd = format!("{crds}/rdmanodes.rdma-netdev.io");
    server.client().delete(&crd)?.expect_success()?;
    let is_gone = || Ok(server.client().get(RDMA_NODES)?.status == 404);
    eventually("the kind is gone", WAIT_TIMEOUT, is_gone)?;
    let (_node, agent) = node(&server)?;
    eventually("the fault", WAIT_TIMEOUT, || {
        Ok(agent
            .page("/readyz")?
            .1
            .contains("CustomResourceDefinition"))
    })?;
    ensure!(agent.page("/readyz")?.0 == 200, "{}", agent.log());
    agent.add_in_the_end("pod", "10.9.0.0/24")?;
    ensure!(agent.metric("node_object_failing")? == 1.0);
    let told = agent.log().matches("cannot write RdmaNode").count();
    ensure!(told == 1, "{told} times: {}", agent.log());
    serve_subnets(&server)?;
    has_problem(&server, &agent, "")
}
