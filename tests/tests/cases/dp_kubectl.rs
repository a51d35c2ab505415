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
];

/// Three nodes: one answers, one has no container, one never answers.
const KUBECTL: &str = r#"#!/bin/sh
[ "$1" = "--context=lab" ] && [ "$2" = "--namespace=rdma" ] || { echo "error: flags: $*" >&2; exit 1; }
shift 2
here=$(dirname "$0")
case "$*" in
"get pods --output=json --selector=app.kubernetes.io/name=rdma-netdev") cat "$here/pods.json" ;;
"get nodes --output=jsonpath="*) cat "$here/nodes" ;;
"exec plugin-n1 --container rdma-device-plugin -- rdmactl status --json")
	echo '{"version": 1, "notes": [], "addresses": [], "units": [{"resource": "rdma/a", "healthy": 7, "unhealthy": 1, "held": 2, "kubelet": "listening"}]}' ;;
"exec plugin-n2 --container rdma-device-plugin -- "*) echo "error: unable to upgrade connection: container not found" >&2; exit 1 ;;
"exec plugin-n3 --container rdma-device-plugin -- "*) exec sleep 60 ;;
"exec plugin-cut --container rdma-device-plugin -- rdmactl status --json") echo '{"version": 1, "uni' ;;
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
    let output = cluster.rdma(&["status", "--timeout", "2"])?;
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
            "NODE RESOURCE HEALTHY UNHEALTHY HELD KUBELET",
            "n1 rdma/a 7 1 2 listening",
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
    let output = cluster.rdma(&["status", "--json", "--nodes", "n1"])?;
    ensure!(output.status.success(), "{output:?}");
    let document: Value = serde_json::from_slice(&output.stdout)?;
    assert_eq!(document["version"], 1);
    assert_eq!(
        document["nodes"][0]["document"]["units"][0]["held"], 2,
        "{document}"
    );
    Ok(())
}

fn a_node_whose_kubelet_is_silent_is_named_at_once() -> Result<()> {
    let cluster = Cluster::of(&["n1", "n3"])?;
    fs::write(cluster.0.path().join("nodes"), "n1 False\nn3 Unknown\n")?;
    let started = Instant::now();
    let output = cluster.rdma(&["status"])?;
    ensure!(
        started.elapsed() < Duration::from_secs(20),
        "it waits for n3"
    );
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = String::from_utf8(output.stdout)?;
    ensure!(text.contains("n1    rdma/a"), "{text}");
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
        (&["status"][..], "is the daemon installed there"),
        (&["status", "--selector", "app=x"], "error: unknown command"),
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
    let output = Cluster::of(&["cut"])?.rdma(&["status"])?;
    let said = String::from_utf8(output.stderr)?;
    assert_eq!(output.status.code(), Some(1), "{said}");
    ensure!(said.contains("cut: no answer of plugin-cut"), "{said}");
    Ok(())
}

fn what_a_node_answers_steers_no_terminal() -> Result<()> {
    for arguments in [&["status"][..], &["reclaim", "--dry-run"]] {
        let output = Cluster::of(&["evil"])?.rdma(arguments)?;
        let printed = [output.stdout, output.stderr].concat();
        ensure!(!printed.contains(&0x1b), "{arguments:?}: {printed:?}");
    }
    Ok(())
}
