//! `kubectl rdma verify --all`: a whole cluster, and how it ends when something goes wrong.
//!
//! A script stands in for kubectl and the pods. It is strict: a command, flag or pod that it does not
//! know ends it with a message. A ping locks the NIC of both ends, and writes down a lock that another
//! test has.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::bin_under_test::product;
use e2e::case;
use e2e::harness::Case;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tempfile::TempDir;

pub(crate) const CASES: &[Case] = &[
    case!(a_dead_node_and_a_bad_rail_of_a_hundred_are_found),
    case!(each_step_is_done_between_nodes),
    case!(pods_are_deleted_after_sigint),
    case!(pods_are_deleted_when_the_time_is_over),
    case!(pods_of_another_run_are_named_or_awaited),
    case!(what_cannot_be_tested_is_refused),
    case!(cordoned_and_unready_nodes_are_left_out_by_name),
];

/// `$FAULTS` has words such as `dead:3`, with the number of a pod.
const KUBECTL: &str = r#"#!/bin/sh
here=${0%/*} limit=--request-timeout=30s others=
die() { echo "error: $*" >&2; exit 1; }
faulty() { case " $FAULTS " in *" $1 "*) true;; *) false;; esac; }
[ "$1" = --context=lab ] || die "unknown flag: $1"
shift
case "$*" in
"--namespace=rdma get pods --output=json --selector=app.kubernetes.io/name=rdma-netdev") exec cat "$here/daemons";;
"--namespace=rdma $limit config view --minify --output=jsonpath={.current-context}") printf lab; exit;;
"--namespace=rdma get nodes --output=jsonpath="*) exit;;
"--namespace=rdma $limit get nodes --output=json") exec cat "$here/nodes";;
"--namespace=rdma $limit get network-attachment-definitions.k8s.cni.cncf.io --all-namespaces --output=json") exec cat "$here/networks";;
"--namespace=hpc $limit create --filename=-") exec cat >"$here/created";;
"--namespace=hpc $limit get pods --selector=rdma-netdev.io/verify-run --output=json")
    # One that leaves is gone at the second look.
    faulty other && others='{"metadata":{"name":"rdma-verify-0-7"}}'
    faulty leaving && (set -C; : >"$here/left") 2>/dev/null && others='{"metadata":{"name":"rdma-verify-0-7","deletionTimestamp":"t"}}'
    echo "others $others" >>"$here/log"
    echo "{\"items\":[$others]}"
    exit;;
"--namespace=hpc $limit get pods --selector=rdma-netdev.io/verify-run="*" --output=json")
    ready='"status":{"conditions":[{"type":"Ready","status":"True"}]}'
    full='"status":{"conditions":[{"type":"PodScheduled","reason":"Unschedulable","message":"1 Insufficient rdma/nic."}]}'
    pending=${FAULTS##*pending:}
    sed 's/{"apiVersion":"v1","kind":"Pod"/\n&/g' "$here/created" |
        sed -e "/-$pending\"/s|\"kind\":\"Pod\"|&,$full|" -e "/-$pending\"/!s|\"kind\":\"Pod\"|&,$ready|"
    exit;;
"--namespace=hpc $limit delete pods --selector=rdma-netdev.io/verify-run="*" --wait=false --ignore-not-found")
    echo delete >>"$here/log"; faulty delete && exec sleep 60; exit 0;;
"exec -n hpc rdma-verify-"*" -c verify -- timeout "*) ;;
*) die "unknown command: $*";;
esac
pod=$4 number=${4##*-}
faulty "dead:$number" && die "unable to upgrade <b>connection</b>: container not found"
shift 9
host=$((number + 1))
case $1 in
sh)
    printf 'tool ping\ntool rping\ntool ib_write_bw\ncm\n'
    for rail in 0 1; do
        faulty "down:$number:$rail" && { printf 'open mlx5_%d\nport mlx5_%d 1 1 100 Ethernet\n' $rail $rail; continue; }
        printf 'open mlx5_%d\nport mlx5_%d 1 4 100 Ethernet\n' $rail $rail
        printf 'gid mlx5_%d 1 3 0000:0000:0000:0000:0000:ffff:0a%02x:00%02x rdma%d 1500 RoCE v2\n' $rail $rail $host $rail
        printf 'fib |-- 10.%d.0.%d\nfib /32 host LOCAL\n' $rail $host
    done
    exit;;
ping)
    for address; do :; done
    rail=${address#10.} other=$((${address##*.} - 1))
    rail=${rail%%.*}
    echo "ping $number $other" >>"$here/log"
    faulty "hang:$number:$other" && exec sleep 60
    for nic in $number.$rail $other.$rail; do
        (set -C; : >"$here/nic.$nic") 2>/dev/null || echo "$nic" >>"$here/violations"
    done
    back=3
    faulty "ping:$number:$rail" && back=0
    faulty "ping:$other:$rail" && back=0
    echo "3 packets transmitted, $back received, 0% packet loss, time 2ms"
    sleep 0.02
    exec rm "$here/nic.$number.$rail" "$here/nic.$other.$rail";;
rping) for echo in 0 1 2 3 4; do echo "ping data: rdma-ping-$echo: ABC"; done;;
ib_write_bw)
    case $* in *--use_cuda=0*) echo "gpu $number" >>"$here/log"; exec cat "$here/table.gpu";; esac
    exec cat "$here/table";;
*) die "exec: \"$1\": executable file not found in \$PATH";;
esac
"#;

struct Cluster(TempDir);

impl Cluster {
    /// Nodes n000 and on, each with two NICs and GPUs, and one network of both.
    fn of(nodes: usize) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let path = |name: &str| directory.path().join(name);
        fs::write(path("kubectl"), KUBECTL)?;
        fs::set_permissions(path("kubectl"), fs::Permissions::from_mode(0o755))?;
        symlink(product("rdmactl")?, path("kubectl-rdma"))?;
        let name = |number: usize| format!("n{number:03}");
        let node = |number: usize| {
            json!({"metadata": {"name": name(number)}, "status": {
                "nodeInfo": {"kubeletVersion": "v1.34.1"},
                "conditions": [{"type": "Ready", "status": "True"}],
                "allocatable": {"rdma/nic": "2", "nvidia.com/gpu": "8"}}})
        };
        let daemon = |number: usize| {
            json!({"metadata": {"name": format!("plugin-{number}")},
                "spec": {"nodeName": name(number)}, "status": {"phase": "Running"}})
        };
        let list = |items: Vec<Value>| json!({"kind": "List", "items": items}).to_string();
        fs::write(path("nodes"), list((0..nodes).map(node).collect()))?;
        fs::write(path("daemons"), list((0..nodes).map(daemon).collect()))?;
        fs::write(path("networks"), list(vec![network("rdma-near")]))?;
        fs::write(path("log"), "")?;
        let captures = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .with_file_name("admin")
            .join("src/verify/captures");
        fs::copy(captures.join("write-bw-100g-host.txt"), path("table"))?;
        fs::copy(captures.join("write-bw-100g-gpu.txt"), path("table.gpu"))?;
        Ok(Self(directory))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn verify(&self, faults: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.path("kubectl-rdma"));
        command
            .args(["--context", "lab", "--namespace", "rdma", "--kubectl"])
            .arg(self.path("kubectl"))
            .args(["verify", "--all", "--pod-namespace", "hpc"])
            .args(arguments)
            .env("FAULTS", faults)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn log(&self) -> Result<String> {
        Ok(fs::read_to_string(self.path("log"))?)
    }

    fn wait_for(&self, line: &str) -> Result<()> {
        let started = Instant::now();
        while !self.log()?.lines().any(|logged| logged == line) {
            ensure!(started.elapsed() < Duration::from_secs(20), "no {line}");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

fn network(name: &str) -> Value {
    let plugin = json!({"type": "rdma-netdev", "attach": "move", "devices": "all"});
    json!({
        "metadata": {"name": name, "namespace": "hpc",
            "annotations": {"k8s.v1.cni.cncf.io/resourceName": "rdma/nic"}},
        "spec": {"config": json!({"plugins": [plugin]}).to_string()},
    })
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The document, and what was said on standard error.
fn document(output: &Output) -> Result<(Value, String)> {
    let said = text(&output.stderr);
    let document = serde_json::from_slice(&output.stdout).with_context(|| said.clone())?;
    Ok((document, said))
}

/// `NODE RAIL`, and what its cell says.
fn cells(document: &Value) -> BTreeMap<String, String> {
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let cells = document["cells"].as_array().into_iter().flatten();
    cells
        .map(|cell| {
            (
                format!("{} {}", word(&cell["node"]), word(&cell["rail"])),
                word(&cell["text"]),
            )
        })
        .collect()
}

fn a_dead_node_and_a_bad_rail_of_a_hundred_are_found() -> Result<()> {
    let cluster = Cluster::of(100)?;
    let page = cluster.path("page.html");
    fs::write(&page, "old")?;
    let html = page.to_str().context("path")?;
    let output = cluster
        .verify(
            "dead:17 ping:23:1",
            &["--only", "ping", "--json", "--html", html],
        )
        .output()?;
    let (document, said) = document(&output)?;
    assert_eq!(output.status.code(), Some(1), "{said}");
    ensure!(said.contains("3 of 200 rails did not pass"), "{said}");

    let cells = cells(&document);
    assert_eq!(cells.len(), 200);
    for (cell, found) in &cells {
        let expected = match cell.as_str() {
            "n017 rdma0" | "n017 rdma1" => "FAIL ends",
            "n023 rdma1" => "FAIL ping",
            _ => "pass",
        };
        assert_eq!(found, expected, "{cell}");
    }
    let rounds = document["rounds"].as_u64().context("rounds")?;
    ensure!(rounds <= 2 * 7 + 1, "{rounds} rounds");
    let mut busy = BTreeSet::new();
    for test in document["tests"].as_array().context("tests")? {
        for node in test["nodes"].as_array().context("nodes")? {
            let key = (test["round"].as_u64(), node.as_str());
            ensure!(busy.insert(key), "twice in a round: {key:?}");
        }
    }
    ensure!(!cluster.path("violations").exists(), "two tests on one NIC");
    ensure!(cluster.log()?.ends_with("delete\n"));

    let page = fs::read_to_string(&page)?;
    let mut links = 0;
    for link in page.split("href=\"#").skip(1) {
        let anchor = link.split('"').next().unwrap_or_default();
        ensure!(
            page.contains(&format!("id=\"{anchor}\"")),
            "nowhere: {anchor}"
        );
        links += 1;
    }
    assert_eq!(links, 200, "a cell leads to the log of its test");
    ensure!(page.contains("unable to upgrade &lt;b&gt;connection&lt;/b&gt;"));
    for needs in [
        "http:", "https:", "src=", "url(", "<script", "<b>", "@import",
    ] {
        ensure!(!page.contains(needs), "{needs}");
    }
    Ok(())
}

fn each_step_is_done_between_nodes() -> Result<()> {
    let cluster = Cluster::of(3)?;
    let faults = "down:1:1 pending:2";
    let output = cluster.verify(faults, &["--gpu"]).output()?;
    let (out, said) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{out}{said}");
    let lines: Vec<&str> = out.lines().take(4).collect();
    assert_eq!(
        lines,
        [
            "NODE  rdma0         rdma1",
            "n000  WARN 82 Gb/s  not tested",
            "n001  WARN 82 Gb/s  FAIL ends",
            "n002  not tested    not tested",
        ],
        "{out}"
    );
    for expected in [
        "n001 rdma1: mlx5_1/1: its port is not ACTIVE (state 1)",
        "do    kubectl rdma status --nodes n001",
        "gpu  WARN",
        "n002: its pod cannot be scheduled: 1 Insufficient rdma/nic.",
    ] {
        ensure!(out.contains(expected), "{expected}: {out}");
    }
    let log = cluster.log()?;
    assert_eq!(log.matches("gpu").count(), 2, "both ends: {log}");
    Ok(())
}

fn interrupt(child: &Child) -> Result<()> {
    Ok(kill(Pid::from_raw(child.id().try_into()?), Signal::SIGINT)?)
}

/// The first round of four is 0 with 2 and 1 with 3, the second 0 with 1 and 2 with 3.
fn pods_are_deleted_after_sigint() -> Result<()> {
    let cluster = Cluster::of(4)?;
    let child = cluster.verify("hang:1:0", &["--only", "ping"]).spawn()?;
    cluster.wait_for("ping 1 0")?;
    interrupt(&child)?;
    let output = child.wait_with_output()?;
    let (out, said) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{said}");
    ensure!(said.contains("not complete: stopped by SIGINT"), "{said}");
    ensure!(
        out.contains("n000  pass   pass\n"),
        "what was measured: {out}"
    );
    ensure!(cluster.log()?.ends_with("delete\n"));

    fs::write(cluster.path("log"), "")?;
    let child = cluster
        .verify("hang:1:0 hang:3:1 delete", &["--only", "ping"])
        .spawn()?;
    cluster.wait_for("ping 3 1")?;
    interrupt(&child)?;
    cluster.wait_for("delete")?;
    interrupt(&child)?;
    let said = text(&child.wait_with_output()?.stderr);
    ensure!(
        said.contains("--context=lab -n hpc delete pods -l rdma-netdev.io/verify-run="),
        "{said}"
    );
    Ok(())
}

fn pods_are_deleted_when_the_time_is_over() -> Result<()> {
    let cluster = Cluster::of(4)?;
    let output = cluster
        .verify("hang:1:0", &["--only", "ping", "--timeout", "3", "--json"])
        .output()?;
    let (document, said) = document(&output)?;
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert_eq!(document["ended"], "--timeout 3 is over", "{said}");
    ensure!(cluster.log()?.ends_with("delete\n"));
    Ok(())
}

fn pods_of_another_run_are_named_or_awaited() -> Result<()> {
    let cluster = Cluster::of(2)?;
    let output = cluster.verify("other", &["--only", "ping"]).output()?;
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for expected in [
        "another run has pods, such as rdma-verify-0-7",
        "--context=lab -n hpc delete pods -l rdma-netdev.io/verify-run\n",
    ] {
        ensure!(said.contains(expected), "{said}");
    }
    ensure!(!cluster.path("created").exists(), "two runs at a time");

    let output = cluster.verify("leaving", &["--only", "ping"]).output()?;
    ensure!(output.status.success(), "{}", text(&output.stderr));
    let log = cluster.log()?;
    let looks = log.lines().filter(|line| line.starts_with("others"));
    assert_eq!(looks.count(), 3, "{log}");
    Ok(())
}

fn what_cannot_be_tested_is_refused() -> Result<()> {
    let cluster = Cluster::of(2)?;
    let list = |items: &[Value]| json!({"items": items}).to_string();
    let refused = |arguments: &[&str], code: i32, expected: &str| {
        let output = cluster.verify("", arguments).output()?;
        let said = text(&output.stderr);
        ensure!(
            output.status.code() == Some(code) && said.contains(expected),
            "{said}"
        );
        ensure!(output.stdout.is_empty() && !cluster.path("created").exists());
        Ok(())
    };
    let page = cluster.path("page.html");
    let page = page.to_str().context("path")?;
    let one_node = ["--nodes", "n001", "--html", page];
    refused(&one_node, 1, "a test needs two nodes")?;
    ensure!(!Path::new(page).exists(), "a page without a result");
    refused(&["--html", "/proc/none/page"], 1, "write /proc/none/page")?;
    refused(&["--only", "gpu"], 1, "needs --gpu")?;
    refused(&["--network", "other"], 1, "hpc/other is not a network")?;
    refused(&["pod:a", "pod:b"], 2, "cannot be used with")?;
    let two = list(&[network("rdma-near"), network("rdma-far")]);
    fs::write(cluster.path("networks"), two)?;
    refused(&[], 1, "--network: hpc/rdma-near, hpc/rdma-far")?;
    let output = Command::new(product("rdmactl")?)
        .args(["verify", "--all"])
        .output()?;
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stderr);
    ensure!(said.contains("run \"kubectl rdma verify --all\""), "{said}");
    Ok(())
}

fn cordoned_and_unready_nodes_are_left_out_by_name() -> Result<()> {
    let cluster = Cluster::of(4)?;
    let mut nodes: Value = serde_json::from_slice(&fs::read(cluster.path("nodes"))?)?;
    nodes["items"][1]["spec"] = json!({"unschedulable": true});
    nodes["items"][3]["status"]["conditions"][0]["status"] = json!("Unknown");
    fs::write(cluster.path("nodes"), nodes.to_string())?;
    let output = cluster.verify("", &["--only", "ping"]).output()?;
    let (out, said) = (text(&output.stdout), text(&output.stderr));
    // A node that is NotReady is not tested, which is a fault; one that is cordoned is meant to be so.
    assert_eq!(output.status.code(), Some(1), "{out}{said}");
    for expected in [
        "n000  pass        pass\n",
        "n003  not tested  not tested\n",
        "n003: the node is NotReady",
        "; left out because cordoned: n001\n",
    ] {
        ensure!(out.contains(expected), "{expected}: {out}");
    }
    ensure!(!out.contains("n001  "), "{out}");
    let named = ["--only", "ping", "--nodes", "n000,n001"];
    let output = cluster.verify("", &named).output()?;
    ensure!(output.status.success(), "{}", text(&output.stderr));
    ensure!(text(&output.stdout).contains("n001  pass"), "{output:?}");
    Ok(())
}
