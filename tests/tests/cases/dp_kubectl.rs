//! `kubectl rdma`: one view of all nodes. A script stands in for kubectl, and is as strict: flags
//! before the command, the container by its name, what it does not know is an error.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use e2e::bin_under_test::product;
use e2e::case;
use e2e::harness::Case;
use serde_json::{Value, json};
use tempfile::TempDir;

pub(crate) const CASES: &[Case] = &[
    case!(all_nodes_are_one_table_and_a_silent_one_is_named),
    case!(a_node_whose_kubelet_is_silent_is_named_at_once),
    case!(a_node_that_is_not_fit_fails_the_whole),
    case!(what_kubectl_says_is_shown),
    case!(an_answer_that_was_cut_off_is_none),
    case!(what_a_node_answers_steers_no_terminal),
    case!(what_the_api_knows_is_printed_and_no_node_is_asked),
    case!(pods_are_shown_with_their_hcas_and_interfaces),
    case!(without_rdma_nodes_the_message_says_what_to_do),
];

/// Three nodes: one answers, one has no container, one never answers.
const KUBECTL: &str = r#"#!/bin/sh
[ "$1" = "--context=lab" ] && [ "$2" = "--namespace=rdma" ] || { echo "error: flags: $*" >&2; exit 1; }
shift 2
[ "$1" = "--request-timeout=30s" ] && shift
here=$(dirname "$0")
case "$*" in
"get pods --output=json --selector=app.kubernetes.io/name=rdma-netdev") cat "$here/pods.json" ;;
"get nodes --output=jsonpath="*) cat "$here/nodes" ;;
"get rdmanodes.rdma-netdev.io --output=json")
	cat "$here/rdmanodes.json" || { echo "error: the server doesn't have a resource type \"rdmanodes\"" >&2; exit 1; } ;;
"get network-attachment-definitions.k8s.cni.cncf.io --all-namespaces --output=json") echo '{"items": []}' ;;
"get pods --field-selector=status.phase!=Succeeded,status.phase!=Failed --namespace=rdma --output=json") cat "$here/users.json" ;;
"exec plugin-n1 --container rdma-device-plugin -- rdmactl addresses --json")
	echo '{"version": 1, "leases": [{"node": "n1", "address": "10.0.0.7", "networkName": null, "pod": {"namespace": "ml", "name": "w-0"}, "interface": "net1"}]}' ;;
"exec plugin-n2 --container rdma-device-plugin -- "*) echo "error: unable to upgrade connection: container not found" >&2; exit 1 ;;
"exec plugin-n3 --container rdma-device-plugin -- "*) exec sleep 60 ;;
"exec plugin-cut --container rdma-device-plugin -- rdmactl addresses --json") echo '{"version": 1, "lea' ;;
"exec plugin-evil --container rdma-device-plugin -- "*) printf 'rdmactl: \033[2J\n' >&2; exit 1 ;;
"exec plugin-n1 --container rdma-device-plugin -- rdmactl preflight --only=L --json")
	echo '{"version": 1, "summary": {"fail": 1, "warn": 0, "pass": 3}, "checks": [{"id": "L01", "verdict": "fail"}]}'
	echo "rdmactl: 1 check failed: L01" >&2; exit 1 ;;
*) echo "error: unknown command: $*" >&2; exit 1 ;;
esac
"#;

struct Cluster(TempDir);

impl Cluster {
    fn of(nodes: &[&str]) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let kubectl = directory.path().join("kubectl");
        fs::write(&kubectl, KUBECTL)?;
        fs::set_permissions(&kubectl, fs::Permissions::from_mode(0o755))?;
        symlink(product("rdmactl")?, directory.path().join("kubectl-rdma"))?;
        let pod = |node: &&str| {
            json!({"metadata": {"name": format!("plugin-{node}")}, "spec": {"nodeName": node},
                "status": {"phase": "Running"}})
        };
        let pods: Vec<Value> = nodes.iter().map(pod).collect();
        let list = json!({"kind": "List", "items": pods});
        fs::write(directory.path().join("pods.json"), list.to_string())?;
        Ok(Self(directory))
    }

    fn rdma(&self, arguments: &[&str]) -> Result<Output> {
        Ok(Command::new(self.0.path().join("kubectl-rdma"))
            .args(["--context", "lab", "--namespace", "rdma", "--kubectl"])
            .arg(self.0.path().join("kubectl"))
            .args(arguments)
            .output()?)
    }
}

fn all_nodes_are_one_table_and_a_silent_one_is_named() -> Result<()> {
    let cluster = Cluster::of(&["n3", "n1", "n2"])?;
    let started = Instant::now();
    let output = cluster.rdma(&["addresses", "--timeout", "2"])?;
    ensure!(
        started.elapsed() < Duration::from_secs(20),
        "they are asked in parallel, and not for ever"
    );
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = String::from_utf8(output.stdout)?;
    let lines: Vec<String> = text
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    assert_eq!(
        lines,
        [
            "NODE ADDRESS NETWORK NAME POD INTERFACE",
            "n1 10.0.0.7 - ml/w-0 net1",
        ],
        "{text}"
    );
    let said = String::from_utf8(output.stderr)?;
    for expected in [
        "n2: no answer of plugin-n2: error: unable to upgrade connection: container not found",
        "n3: no answer of plugin-n3: no answer within 2 s",
    ] {
        ensure!(said.contains(expected), "{said}");
    }
    let output = cluster.rdma(&["addresses", "--json", "--nodes", "n1"])?;
    ensure!(output.status.success(), "{output:?}");
    let document: Value = serde_json::from_slice(&output.stdout)?;
    assert_eq!(document["version"], 1);
    assert_eq!(
        document["nodes"][0]["document"]["leases"][0]["address"], "10.0.0.7",
        "{document}"
    );
    Ok(())
}

fn a_node_whose_kubelet_is_silent_is_named_at_once() -> Result<()> {
    let cluster = Cluster::of(&["n1", "n3"])?;
    fs::write(cluster.0.path().join("nodes"), "n1 False\nn3 Unknown\n")?;
    let started = Instant::now();
    let output = cluster.rdma(&["addresses"])?;
    ensure!(
        started.elapsed() < Duration::from_secs(20),
        "it waits for n3"
    );
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = String::from_utf8(output.stdout)?;
    ensure!(text.contains("n1    10.0.0.7"), "{text}");
    let said = String::from_utf8(output.stderr)?;
    ensure!(
        said.contains("n3: no answer of plugin-n3: the node is NotReady"),
        "{said}"
    );
    Ok(())
}

fn a_node_that_is_not_fit_fails_the_whole() -> Result<()> {
    let cluster = Cluster::of(&["n1"])?;
    let output = cluster.rdma(&["preflight", "--only", "L"])?;
    let (text, said) = (
        String::from_utf8(output.stdout)?,
        String::from_utf8(output.stderr)?,
    );
    assert_eq!(output.status.code(), Some(1), "{text}{said}");
    ensure!(
        text.lines()
            .any(|line| line.starts_with("n1") && line.ends_with("L01")),
        "{text}"
    );
    ensure!(said.contains("1 of 1 nodes report a problem"), "{said}");
    Ok(())
}

fn what_kubectl_says_is_shown() -> Result<()> {
    let cluster = Cluster::of(&[])?;
    for (arguments, expected) in [
        (&["addresses"][..], "is the daemon installed there"),
        (
            &["addresses", "--selector", "app=x"],
            "error: unknown command",
        ),
        (&["status", "--kubeconfig", "/nonexistent"], "error: flags"),
    ] {
        let output = cluster.rdma(arguments)?;
        let said = String::from_utf8(output.stderr)?;
        assert_eq!(output.status.code(), Some(1), "{said}");
        ensure!(
            said.starts_with("kubectl rdma: ") && said.contains(expected),
            "{said}"
        );
    }
    for (arguments, expected) in [
        (&["addresses", "--paralel", "3"], "--parallel"),
        (
            &["status", "--host-root", "/x"],
            "--host-root is for one node: run rdmactl there",
        ),
    ] {
        let output = cluster.rdma(arguments)?;
        let said = String::from_utf8(output.stderr)?;
        assert_eq!(output.status.code(), Some(2), "{said}");
        ensure!(said.contains(expected), "{said}");
    }
    Ok(())
}

fn an_answer_that_was_cut_off_is_none() -> Result<()> {
    let output = Cluster::of(&["cut"])?.rdma(&["addresses"])?;
    let said = String::from_utf8(output.stderr)?;
    assert_eq!(output.status.code(), Some(1), "{said}");
    ensure!(said.contains("cut: no answer of plugin-cut"), "{said}");
    Ok(())
}

fn what_a_node_answers_steers_no_terminal() -> Result<()> {
    for arguments in [&["addresses"][..], &["reclaim", "--dry-run"]] {
        let output = Cluster::of(&["evil"])?.rdma(arguments)?;
        let printed = [output.stdout, output.stderr].concat();
        ensure!(!printed.contains(&0x1b), "{arguments:?}: {printed:?}");
    }
    Ok(())
}

/// A node with two HCAs of an exclusive resource: a pod has one, the port of the other is down.
fn rdma_node(name: &str, problems: &[&str]) -> Value {
    let hca = |id: &str, state: &str, message: Option<&str>, pod: Option<&str>| {
        let port = json!({"name": "mlx5_0:1", "netdev": "ens1", "linkLayer": "ether", "state": state, "rateMbps": 400_000});
        json!({"id": id, "function": "pf", "rdmaDevices": ["mlx5_0"], "numaNode": 0, "rail": 3,
            "gpus": [{"gpu": "0000:8f:00.0", "class": "PIX"}], "ports": [port], "resource": "rdma/nic",
            "healthy": message.is_none(), "message": message, "pod": pod,
            "serves": [{"gpu": "0000:8f:00.0", "class": "PIX"}]})
    };
    let resource = json!({"name": "rdma/nic", "mode": "late", "registered": true, "nics": 2, "expected": 3,
        "healthy": 1, "units": 3, "healthyUnits": 2, "allocatedUnits": 1});
    let hcas = [
        hca("0000:3b:00.0", "UNKNOWN", None, Some("rdma/w-0")),
        hca("0000:5e:00.0", "DOWN", Some("mlx5_0 port 1 is DOWN"), None),
    ];
    let missing = json!({"id": "0000:9d:00.0", "rdmaDevices": ["mlx5_2"], "since": "2026-01-01T09:12:00Z", "rail": 5});
    json!({"metadata": {"name": name}, "status": {"resources": [resource], "hcas": hcas, "missing": [missing],
        "problems": problems, "aKeyOfANewerAgent": 1}})
}

fn with_rdma_nodes() -> Result<Cluster> {
    let cluster = Cluster::of(&[])?;
    let nodes = [
        rdma_node("n2", &[]),
        rdma_node("n1", &["0000:5e:00.0 (rail 3): mlx5_0 port 1 is DOWN"]),
    ];
    let list = json!({"kind": "List", "items": nodes});
    fs::write(cluster.0.path().join("rdmanodes.json"), list.to_string())?;
    Ok(cluster)
}

/// The words of each line.
fn lines(output: &Output) -> Vec<String> {
    let text = String::from_utf8_lossy(&output.stdout);
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    text.lines().map(words).collect()
}

fn what_the_api_knows_is_printed_and_no_node_is_asked() -> Result<()> {
    let cluster = with_rdma_nodes()?;
    let output = cluster.rdma(&["status"])?;
    assert_eq!(
        lines(&output),
        [
            "NODE RESOURCE MODE NICS EXPECTED HEALTHY UNITS ALLOCATED",
            "n1 rdma/nic late 2 3 1 2 of 3 1",
            "n2 rdma/nic late 2 3 1 2 of 3 1",
            "",
            "n1: 0000:5e:00.0 (rail 3): mlx5_0 port 1 is DOWN",
        ]
    );
    assert_eq!(output.status.code(), Some(1), "a node has a problem");
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(said.contains("1 of 2 nodes have a problem"), "{said}");
    let output = cluster.rdma(&["discover", "--nodes", "n2"])?;
    assert_eq!(
        lines(&output),
        [
            "NODE HCA DEVICE NETDEV NUMA RAIL LINK RATE STATE RESOURCE POD HEALTH",
            "n2 0000:3b:00.0 mlx5_0 ens1 0 3 ether 400 Gb/s UNKNOWN rdma/nic rdma/w-0 healthy",
            "n2 0000:5e:00.0 mlx5_0 ens1 0 3 ether - DOWN rdma/nic - mlx5_0 port 1 is DOWN",
            "n2 0000:9d:00.0 mlx5_2 - - 5 - - - - - missing since 2026-01-01T09:12:00Z",
        ]
    );
    assert_eq!(output.status.code(), Some(0));
    let output = cluster.rdma(&["topology", "--nodes", "n2"])?;
    assert_eq!(
        lines(&output)[..2],
        [
            "NODE HCA DEVICE NUMA RAIL NEAREST GPUS POD",
            "n2 0000:3b:00.0 mlx5_0 0 3 PIX 0000:8f:00.0 rdma/w-0",
        ]
    );
    let wide = lines(&cluster.rdma(&["status", "-o", "wide"])?);
    for part in ["n1 rdma/nic late", "n1 0000:3b:00.0 mlx5_0"] {
        ensure!(wide.iter().any(|line| line.starts_with(part)), "{wide:?}");
    }
    let output = cluster.rdma(&["status", "--json"])?;
    let document: Value = serde_json::from_slice(&output.stdout)?;
    let first = &document["nodes"][0];
    assert_eq!(
        (&first["node"], &first["state"]["hcas"][1]["healthy"]),
        (&json!("n1"), &json!(false))
    );
    for (arguments, code, expected) in [
        (&["status", "--nodes", "n7"][..], 1, "no RdmaNode n7"),
        (
            &["discover", "--gids"],
            2,
            "--gids is for one node: run rdmactl there",
        ),
    ] {
        let output = cluster.rdma(arguments)?;
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{said}");
        ensure!(said.contains(expected), "{said}");
    }
    // An object of another version is named, and hides no other one.
    let other = json!({"metadata": {"name": "n3"}, "status": {"hcas": 7}});
    let list = json!({"kind": "List", "items": [rdma_node("n2", &[]), other]});
    fs::write(cluster.0.path().join("rdmanodes.json"), list.to_string())?;
    let output = cluster.rdma(&["status"])?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(said.contains("1 of 2 nodes have a problem"), "{said}");
    let text = lines(&output).join("\n");
    for part in ["n2 rdma/nic late", "n3: its RdmaNode is of another version"] {
        ensure!(text.contains(part), "{text}");
    }
    fs::write(cluster.0.path().join("nodes"), "n1 True\nn2 Unknown\n")?;
    let old = lines(&cluster.rdma(&["status"])?);
    ensure!(
        old.iter()
            .any(|line| line.starts_with("n2: its kubelet does not report")),
        "{old:?}"
    );
    Ok(())
}

fn pods_are_shown_with_their_hcas_and_interfaces() -> Result<()> {
    let cluster = with_rdma_nodes()?;
    let status = json!([
        {"name": "cbr0", "interface": "eth0", "ips": ["10.9.0.1"], "default": true},
        {"name": "rdma/rails", "interface": "net1", "ips": ["10.0.0.7"],
         "device-info": {"type": "pci", "pci": {"pci-address": "0000:3b:00.0"}}},
    ]);
    let pod = json!({
        "metadata": {"namespace": "rdma", "name": "w-0",
            "annotations": {"k8s.v1.cni.cncf.io/network-status": status.to_string()}},
        "spec": {"nodeName": "n2", "containers": [{"resources": {"limits": {"rdma/nic": "1"}}}]},
    });
    let other = json!({"metadata": {"namespace": "rdma", "name": "x"}, "spec": {"nodeName": "n2", "containers": []}});
    let list = json!({"kind": "List", "items": [pod, other]});
    fs::write(cluster.0.path().join("users.json"), list.to_string())?;
    let output = cluster.rdma(&["pods"])?;
    assert_eq!(
        lines(&output),
        [
            "NODE POD RESOURCE HCA GPUS INTERFACE NETWORK ADDRESSES",
            "n2 rdma/w-0 rdma/nic 0000:3b:00.0 PIX 0000:8f:00.0 net1 rdma/rails 10.0.0.7",
        ],
        "{output:?}"
    );
    Ok(())
}

fn without_rdma_nodes_the_message_says_what_to_do() -> Result<()> {
    let cluster = Cluster::of(&["n1"])?;
    let said = |output: Output| {
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let absent = said(cluster.rdma(&["status"])?);
    for part in ["doesn't have a resource type", "run rdmactl on the node"] {
        ensure!(absent.contains(part), "{absent}");
    }
    let list = json!({"kind": "List", "items": []});
    fs::write(cluster.0.path().join("rdmanodes.json"), list.to_string())?;
    let none = said(cluster.rdma(&["pods"])?);
    for part in [
        "no RdmaNode objects",
        "rdmaNodes.enabled",
        "run rdmactl on the node",
    ] {
        ensure!(none.contains(part), "{none}");
    }
    Ok(())
}
