//! `kubectl rdma plan`: from the answers of nodes to a file.
//! A script stands in for kubectl; the nodes are trees of files.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use e2e::bin_under_test::product;
use e2e::case;
use e2e::harness::Case;
use hca_trees::{Tree, machine};
use serde_json::{Value, json};
use tempfile::TempDir;

pub(crate) const CASES: &[Case] = &[case!(a_cluster_is_planned_from_its_nodes_alone)];

/// Two nodes that answer and one that does not.
const KUBECTL: &str = r#"#!/bin/sh
[ "$1" = "--namespace=kube-system" ] || [ "$1" = "--namespace=default" ] || { echo "error: flags: $*" >&2; exit 1; }
shift
[ "$1" = "--request-timeout=30s" ] && shift
here=$(dirname "$0")
case "$*" in
"get pods --output=json --selector=app.kubernetes.io/name=rdma-netdev") cat "$here/pods.json" ;;
"exec plugin-gpu-3 "*) echo "error: container not found" >&2; exit 1 ;;
"exec plugin-"*" --container rdma-device-plugin -- rdmactl discover --json") cat "$here/discover.json" ;;
"get configmap --ignore-not-found --output=json -- fabric-rdma-netdev") cat "$here/configmap.json" ;;
"get daemonsets --selector=app.kubernetes.io/name=rdma-netdev --output=json") cat "$here/daemonsets.json" ;;
*) echo "error: unknown command: $*" >&2; exit 1 ;;
esac
"#;

const INSTALLED_POLICY: &str = r#"{"stores": {"default": {"type": "file"}}}"#;

struct Cluster(TempDir);

impl Cluster {
    fn new() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let at = directory.path();
        let kubectl = at.join("kubectl");
        fs::write(&kubectl, KUBECTL)?;
        fs::set_permissions(&kubectl, fs::Permissions::from_mode(0o755))?;
        symlink(product("rdmactl")?, at.join("kubectl-rdma"))?;
        let pod = |node: &str| {
            json!({"metadata": {"name": format!("plugin-{node}")}, "spec": {"nodeName": node},
                "status": {"phase": "Running"}})
        };
        let pods = ["gpu-3", "gpu-2", "gpu-1"].map(pod);
        let pods = json!({"kind": "List", "items": pods});
        fs::write(at.join("pods.json"), pods.to_string())?;
        let set = |release: &str| {
            let labels = json!({"app.kubernetes.io/instance": release});
            json!({"metadata": {"name": format!("{release}-rdma-netdev"), "labels": labels}})
        };
        let sets = json!({"kind": "List", "items": [set("fabric"), set("storage")]});
        fs::write(at.join("daemonsets.json"), sets.to_string())?;
        let map = json!({"data": {"policy.json": INSTALLED_POLICY}});
        fs::write(at.join("configmap.json"), map.to_string())?;
        let root = at.join("root");
        fs::create_dir(&root)?;
        let tree = Tree::new(&root);
        tree.rdma_core(true);
        machine::a4(&tree);
        let output = Command::new(product("rdmactl")?)
            .args(["discover", "--json", "--host-root"])
            .arg(&root)
            .output()?;
        let mut document: Value =
            serde_json::from_slice(&output.stdout).with_context(|| format!("{output:?}"))?;
        let facts = &mut document["facts"];
        // Nodes of a tree are plain files.
        for hca in facts["hcas"].as_array_mut().into_iter().flatten() {
            hca["obstacle"] = Value::Null;
        }
        facts["addresses"] = json!([]);
        fs::write(at.join("discover.json"), document.to_string())?;
        Ok(Self(directory))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// A plan that validate accepts.
    fn valid(&self, flags: &[&str]) -> Result<String> {
        let plan = self.plan(flags)?;
        ensure!(plan.status.success(), "{plan:?}");
        let file = self.path().join("plan.yaml");
        fs::write(&file, &plan.stdout)?;
        let validated = Command::new(product("rdmactl")?)
            .arg("validate")
            .arg(&file)
            .output()?;
        ensure!(validated.status.success(), "{validated:?}");
        Ok(String::from_utf8(plan.stdout)?)
    }

    fn plan(&self, flags: &[&str]) -> Result<Output> {
        Ok(Command::new(self.path().join("kubectl-rdma"))
            .arg("--kubectl")
            .arg(self.path().join("kubectl"))
            .arg("plan")
            .args(flags)
            .output()?)
    }
}

fn a_cluster_is_planned_from_its_nodes_alone() -> Result<()> {
    let cluster = Cluster::new()?;
    let all = cluster.plan(&[])?;
    let said = String::from_utf8(all.stderr)?;
    assert_eq!(all.status.code(), Some(1), "{said}");
    for expected in [
        "gpu-3 is not in this plan: error: container not found",
        "assumed: 10.64.0.0/13 for pods",
        "warning: several DaemonSets, and this is for fabric-rdma-netdev",
    ] {
        ensure!(said.contains(expected), "{said}");
    }
    ensure!(!said.contains("CDI"), "{said}");
    let text = String::from_utf8(all.stdout)?;
    for expected in [
        "helm upgrade --install fabric CHART --namespace kube-system -f FILE",
        "# WARNING: gpu-3 is not in this plan",
    ] {
        ensure!(text.contains(expected), "{text}");
    }

    let two = ["--nodes", "gpu-1,gpu-2"];
    let values = cluster.valid(&two)?;
    let values: Value = serde_saphyr::from_str(&values)?;
    assert_eq!(values["pools"]["pools"][0]["resource"], "rdma/nic");
    assert_eq!(values["networks"]["rdma-nic"]["namespace"], "default");
    let manifests = [&two[..], &["--manifests"]].concat();
    let text = cluster.valid(&manifests)?;
    ensure!(
        text.contains("rollout restart daemonset/fabric-rdma-netdev"),
        "{text}"
    );
    let objects: Vec<Value> = serde_saphyr::from_multiple(&text)?;
    let names = objects.iter().map(|object| &object["metadata"]["name"]);
    assert_eq!(
        names.collect::<Vec<_>>(),
        ["fabric-rdma-netdev-plan", "rdma-nic"]
    );
    let file = |name: &str| -> Result<Value> {
        let text = objects[0]["data"][name].as_str().context("not text")?;
        Ok(serde_json::from_str(text)?)
    };
    assert_eq!(file("pools.json")?, values["pools"]);
    let mut policy: Value = serde_json::from_str(INSTALLED_POLICY)?;
    for (key, value) in values["policy"].as_object().context("a policy")? {
        policy[key] = value.clone();
    }
    assert_eq!(file("policy.json")?, policy);
    let json = cluster.plan(&[&two[..], &["--json"]].concat())?;
    let json: Value = serde_json::from_slice(&json.stdout)?;
    assert_eq!(json["objects"], json!(objects));
    let other = cluster.plan(&[&two[..], &["--range", "10.8.0.0/16"]].concat())?;
    let other = String::from_utf8(other.stdout)?;
    // A part of it for each rail.
    ensure!(other.contains("10.8.224.0/19"), "{other}");
    Ok(())
}
