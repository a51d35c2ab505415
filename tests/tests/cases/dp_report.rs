//! `kubectl rdma report`: the archive has what support needs, and none of the planted secrets. A script
//! stands in for kubectl; what it does not know, such as reading Secrets, is an error.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use e2e::bin_under_test::product;
use e2e::case;
use e2e::harness::Case;
use serde_json::{Value, json};
use tempfile::TempDir;

pub(crate) const CASES: &[Case] = &[
    case!(a_report_of_a_cluster_has_its_parts_and_no_secret),
    case!(a_node_that_hangs_costs_its_own_part),
    case!(a_report_without_rights_has_the_rest),
    case!(a_report_of_one_node_needs_no_kubectl),
];

/// Node n1 answers, n2 does not, and the pod of n3 is pending.
const KUBECTL: &str = r#"#!/bin/sh
[ "$1" = "--namespace=rdma" ] || { echo "error: flags: $*" >&2; exit 1; }
shift
here=$(dirname "$0")
echo "$*" >>"$here/log"
[ ! -e "$here/forbidden" ] || case "$*" in
*--all-namespaces*) echo "Error from server (Forbidden): not allowed" >&2; exit 1 ;;
esac
selector=--selector=app.kubernetes.io/name=rdma-netdev
case "$*" in
"get nodes --output=jsonpath="*) echo "Error from server (Forbidden): nodes" >&2; exit 1 ;;
"version --output=json") echo '{"serverVersion": {"gitVersion": "v1.33.1"}}' ;;
"get daemonsets $selector --output=json") cat "$here/daemonsets.json" ;;
"get pods $selector --output=json") cat "$here/pods.json" ;;
"get configmaps --output=json") cat "$here/configmaps.json" ;;
"get network-attachment-definitions.k8s.cni.cncf.io --all-namespaces --output=json") cat "$here/networks.json" ;;
"get rdmanodes"*) echo '{"items": []}' ;;
"get address"*) echo 'error: the server doesn'"'"'t have a resource type "addresssubnets"' >&2; exit 1 ;;
"logs --tail=20000 --limit-bytes=10485760 --previous=false --container=rdma-device-plugin -- plugin-n1") cat "$here/log.txt" ;;
"logs --tail=20000 --limit-bytes=10485760 --previous=true --container=rdma-device-plugin -- plugin-n1") echo "ended before" ;;
"exec plugin-n1 --container rdma-device-plugin -- rdmactl preflight --json") echo '{"version": 1, "checks": []}'; echo "1 check failed: L01" >&2; exit 1 ;;
"exec plugin-n1 --container rdma-device-plugin -- rdmactl topology --json") echo '{"vers' ;;
"exec plugin-n1 --container rdma-device-plugin -- rdmactl "*" --json") echo '{"version": 1, "notes": []}' ;;
"exec plugin-n2 "*) [ ! -e "$here/hangs" ] || exec sleep 60; echo "error: no route to n2" >&2; exit 1 ;;
*) echo "error: unknown command: $*" >&2; exit 1 ;;
esac
"#;

struct Cluster(TempDir);

impl Cluster {
    fn new() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let at = |name: &str| directory.path().join(name);
        fs::write(at("kubectl"), KUBECTL)?;
        fs::set_permissions(at("kubectl"), fs::Permissions::from_mode(0o755))?;
        symlink(product("rdmactl")?, at("kubectl-rdma"))?;
        let metadata = |name: &str| {
            json!({"name": name, "namespace": "rdma", "uid": format!("uid-{name}"),
                "managedFields": [{"manager": "planted-in-managed-fields"}],
                "annotations": {
                    "kubectl.kubernetes.io/last-applied-configuration": "{\"a\": \"planted-in-last-applied\"}",
                    "vault/token": "planted-in-annotation",
                    "k8s.v1.cni.cncf.io/networks": "net-a"}})
        };
        let container = json!({"name": "rdma-device-plugin", "image": "plugin:1", "args": ["run"],
            "env": [{"name": "RDMA_LOG", "value": "planted-in-environment"},
                    {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "of-a-secret", "key": "k"}}}]});
        // Injected by another controller.
        let sidecar = json!({"name": "sidecar", "image": "planted:1", "args": ["--token=planted-in-argument"]});
        let pod = |node: &str, phase: &str| {
            let statuses = match node {
                "n1" => {
                    json!([{"name": "rdma-device-plugin", "restartCount": 1, "state": {"running": {}},
                    "lastState": {"terminated": {"exitCode": 1}}},
                    {"name": "sidecar", "state": {"running": {}},
                    "lastState": {"terminated": {"message": "planted-in-last-words"}}}])
                }
                _ => {
                    json!([{"name": "rdma-device-plugin", "state": {"waiting": {"reason": "ImagePullBackOff"}}}])
                }
            };
            json!({"metadata": metadata(&format!("plugin-{node}")), "spec": {"nodeName": node, "containers": [container, sidecar]},
                "status": {"phase": phase, "containerStatuses": statuses}})
        };
        let list = |items: Vec<Value>| json!({"kind": "List", "items": items});
        let set = json!({"metadata": metadata("rdma"), "spec": {"template": {"metadata": metadata("x"), "spec": {
            "containers": [container, sidecar], "volumes": [{"name": "config", "configMap": {"name": "rdma-config"}}]}}}});
        let config = r#"{"configList": [{"resourceName": "hca", "rdmaHcaMax": 63, "selectors": {"vendors": ["15b3"]}}]}"#;
        let network = json!({"metadata": metadata("net-a"), "spec": {"config":
            r#"{"type": "rdma-netdev", "master": "ens1", "x": "planted-in-network", "args": {"x": "planted-in-args"},
                "ipam": {"type": "x", "etcd_password": "planted-in-network"}}"#}});
        let chain = json!({"metadata": metadata("net-b"), "spec": {"config": r#"{"plugins": [
            {"type": "macvlan", "x": "planted-in-network",
                "ipam": {"type": "rdma-ipam", "range": "10.0.0.0/24", "etcd_password": "planted-in-network"}},
            {"type": "tuning", "x": "planted-in-network"}]}"#}});
        let other = json!({"metadata": metadata("other"), "spec": {"config":
            r#"{"type": "other", "x": "planted-in-another-network"}"#}});
        for (file, document) in [
            ("daemonsets", list(vec![set])),
            (
                "pods",
                list(vec![
                    pod("n1", "Running"),
                    pod("n2", "Running"),
                    pod("../n3", "Pending"),
                ]),
            ),
            (
                "configmaps",
                list(vec![
                    json!({"metadata": metadata("rdma-config"), "data": {"pools.json": config,
                        "policy.json": "{}", "other": "planted-in-other-key"}}),
                    json!({"metadata": metadata("other"), "data": {"pools.json": "planted-in-other-map"}}),
                ]),
            ),
            ("networks", list(vec![network, chain, other])),
        ] {
            fs::write(at(&format!("{file}.json")), document.to_string())?;
        }
        fs::write(at("log.txt"), "started\nended\n")?;
        Ok(Self(directory))
    }

    fn report(&self, file: &str, options: &[&str]) -> Result<Output> {
        Ok(Command::new(self.0.path().join("kubectl-rdma"))
            .args(["--namespace", "rdma", "--kubectl"])
            .arg(self.0.path().join("kubectl"))
            .args(options)
            .args(["report", file])
            .current_dir(self.0.path())
            .output()?)
    }

    /// The one folder of the archive.
    fn unpacked(&self, archive: &str) -> Result<std::path::PathBuf> {
        unpacked(&self.0.path().join(archive), self.0.path())
    }
}

fn unpacked(archive: &Path, at: &Path) -> Result<std::path::PathBuf> {
    let to = at.join("unpacked");
    fs::create_dir(&to)?;
    let tar = Command::new("tar")
        .arg("-xzf")
        .arg(archive)
        .arg("-C")
        .arg(&to)
        .output()?;
    ensure!(tar.status.success(), "{tar:?}");
    let tops: Vec<_> = fs::read_dir(&to)?.collect::<Result<_, _>>()?;
    ensure!(tops.len() == 1, "{tops:?}");
    Ok(tops.first().context("no folder")?.path())
}

fn files(at: &Path, below: &str, found: &mut BTreeSet<String>) -> Result<()> {
    for entry in fs::read_dir(at.join(below))? {
        let entry = entry?;
        let name = format!("{below}{}", entry.file_name().to_string_lossy());
        match entry.file_type()?.is_dir() {
            true => files(at, &format!("{name}/"), found)?,
            false => drop(found.insert(name)),
        }
    }
    Ok(())
}

fn json_of(top: &Path, file: &str) -> Result<Value> {
    let text = fs::read(top.join(file)).with_context(|| file.to_owned())?;
    Ok(serde_json::from_slice(&text)?)
}

fn a_report_of_a_cluster_has_its_parts_and_no_secret() -> Result<()> {
    let cluster = Cluster::new()?;
    let output = cluster.report("a.tar.gz", &[])?;
    let again = cluster.report("a.tar.gz", &[])?;
    let again = String::from_utf8(again.stderr)?;
    ensure!(
        again.contains("create the new file a.tar.gz: File exists"),
        "{again}"
    );
    let no_file = String::from_utf8(cluster.report("-", &[])?.stderr)?;
    ensure!(
        no_file.starts_with("kubectl rdma: the archive is a file: name one"),
        "{no_file}"
    );
    let said = String::from_utf8(output.stderr)?;
    let printed = String::from_utf8(output.stdout)?;
    assert_eq!(output.status.code(), Some(1), "{said}");
    ensure!(
        printed.contains("Read it before you send it on"),
        "{printed}"
    );
    for expected in [
        "nodes/n2/status.json is missing: error: no route to n2",
        "nodes/_.._n3 is missing: its pod is Pending",
        "nodes/n1/topology.json is missing: its answer is not a JSON document",
    ] {
        ensure!(said.contains(expected), "{said}");
    }
    let top = cluster.unpacked("a.tar.gz")?;
    let mut found = BTreeSet::new();
    files(&top, "", &mut found)?;
    let expected = [
        "cluster/addresssubnets.json",
        "cluster/rdmanodes.json",
        "cluster/configmaps.json",
        "cluster/daemonsets.json",
        "cluster/network-attachment-definitions.json",
        "cluster/pods.json",
        "cluster/version.json",
        "contents.json",
        "nodes/n1/addresses.json",
        "nodes/n1/discover.json",
        "nodes/n1/logs/plugin-n1/rdma-device-plugin.log",
        "nodes/n1/logs/plugin-n1/rdma-device-plugin.previous.log",
        "nodes/n1/pods.json",
        "nodes/n1/preflight.json",
        "nodes/n1/status.json",
    ];
    assert_eq!(found, expected.map(str::to_owned).into());
    for file in &found {
        let text = fs::read_to_string(top.join(file))?;
        ensure!(!text.contains("planted"), "{file}:\n{text}");
    }
    ensure!(
        !said.contains("planted") && !printed.contains("planted"),
        "{said}{printed}"
    );
    let log = fs::read_to_string(cluster.0.path().join("log"))?;
    ensure!(!log.contains("secret"), "{log}");

    // What support needs is there.
    let log = fs::read_to_string(top.join("nodes/n1/logs/plugin-n1/rdma-device-plugin.log"))?;
    ensure!(
        log.starts_with("started\n") && log.ends_with("ended\n"),
        "{log}"
    );
    let networks = json_of(&top, "cluster/network-attachment-definitions.json")?;
    let plugins: Vec<&Value> = networks["items"]
        .as_array()
        .context("no networks")?
        .iter()
        .map(|network| &network["plugins"])
        .collect();
    assert_eq!(
        json!(plugins),
        json!([
            [{"type": "rdma-netdev", "master": "ens1", "ipam": {"type": "x"}}],
            [{"type": "macvlan", "ipam": {"type": "rdma-ipam", "range": "10.0.0.0/24"}}],
        ])
    );
    let set = json_of(&top, "cluster/daemonsets.json")?;
    let env = &set["items"][0]["spec"]["template"]["spec"]["containers"][0]["env"];
    assert_eq!(env[0], json!({"name": "RDMA_LOG"}));
    assert_eq!(env[1]["valueFrom"]["secretKeyRef"]["name"], "of-a-secret");
    let config = json_of(&top, "cluster/configmaps.json")?;
    ensure!(config.to_string().contains("15b3"), "{config}");
    let contents = json_of(&top, "contents.json")?;
    assert_eq!(contents["missing"], 3, "{contents}");
    let parts = contents["parts"].as_array().context("no contents")?;
    let preflight = parts
        .iter()
        .find(|part| part["file"] == "nodes/n1/preflight.json");
    assert_eq!(
        preflight.context("no preflight")?["note"],
        "1 check failed: L01"
    );
    Ok(())
}

/// On a busy machine n1 may not answer in so short a time either: only n2's part is looked at.
fn a_node_that_hangs_costs_its_own_part() -> Result<()> {
    let cluster = Cluster::new()?;
    fs::write(cluster.0.path().join("hangs"), "")?;
    let output = cluster.report("a.tar.gz", &["--timeout", "2"])?;
    let said = String::from_utf8(output.stderr)?;
    ensure!(
        said.contains("nodes/n2/status.json is missing: no answer within 2 s"),
        "{said}"
    );
    let top = cluster.unpacked("a.tar.gz")?;
    ensure!(top.join("contents.json").exists(), "it has its contents");
    Ok(())
}

fn a_report_without_rights_has_the_rest() -> Result<()> {
    let cluster = Cluster::new()?;
    fs::write(cluster.0.path().join("forbidden"), "")?;
    let output = cluster.report("b.tar.gz", &[])?;
    let said = String::from_utf8(output.stderr)?;
    assert_eq!(output.status.code(), Some(1), "{said}");
    ensure!(
        said.contains(
            "cluster/network-attachment-definitions.json is missing: Error from server (Forbidden)"
        ),
        "{said}"
    );
    let top = cluster.unpacked("b.tar.gz")?;
    json_of(&top, "nodes/n1/status.json")?;
    Ok(())
}

fn a_report_of_one_node_needs_no_kubectl() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let policy = directory.path().join("policy.json");
    let log = directory.path().join("cni.log");
    fs::write(
        &policy,
        json!({"node": "n1", "stateDir": directory.path(), "log": {"file": log}}).to_string(),
    )?;
    // Others may write to a log's directory.
    let secret = directory.path().join("secret");
    fs::write(&secret, "planted")?;
    std::os::unix::fs::symlink(&secret, &log)?;
    let rdmactl = product("rdmactl")?;
    let report = || -> Result<Output> {
        Ok(Command::new(&rdmactl)
            .arg("--host-root")
            .arg(directory.path())
            .arg("--policy")
            .arg(&policy)
            .args(["report", "--json"])
            .current_dir(directory.path())
            .env("PATH", "/nonexistent")
            .output()?)
    };
    let output = report()?;
    let document: Value = serde_json::from_slice(&output.stdout).context(format!("{output:?}"))?;
    let file = directory
        .path()
        .join(document["file"].as_str().context("no file")?);
    assert_eq!(fs::metadata(&file)?.permissions().mode() & 0o777, 0o600);
    let top = unpacked(&file, directory.path())?;
    let policy = json_of(&top, "nodes/n1/policy.json")?;
    assert_eq!(policy["node"], "n1");
    json_of(&top, "nodes/n1/status.json")?;
    ensure!(!top.join("nodes/n1/cni.log").exists());
    let said = String::from_utf8(output.stderr)?;
    ensure!(said.contains("nodes/n1/cni.log is missing"), "{said}");
    Ok(())
}
