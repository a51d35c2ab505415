//! docs/CONFIG.md says what the programs do: its examples are read by them, and no key that they
//! know is missing from it.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use e2e::bin_under_test::product;
use e2e::case;
use e2e::cni::Call;
use e2e::harness::Case;
use serde_json::{Value, json};
use tempfile::TempDir;

pub(crate) const CASES: &[Case] = &[
    case!(every_example_is_read_by_its_program, Root),
    case!(every_key_of_a_pool_is_explained),
    case!(every_key_of_an_ipam_is_explained, Root),
];

fn page() -> Result<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("docs").join("CONFIG.md");
    fs::read_to_string(&path).with_context(|| path.display().to_string())
}

/// The fenced blocks of a page, each with its language.
fn blocks(page: &str) -> Vec<(&str, &str)> {
    let fenced = page.split("\n```").skip(1).step_by(2);
    fenced.filter_map(|block| block.split_once('\n')).collect()
}

fn daemon(arguments: &[&str]) -> Result<std::result::Result<(), String>> {
    let output = Command::new(product("rdma-device-plugin")?).args(arguments).output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Ok(output.status.success().then_some(()).ok_or(said))
}

/// A node of its own, as far as STATUS looks.
fn status(network: &Value, at: &TempDir) -> Result<std::result::Result<(), String>> {
    let policy = at.path().join("policy.json");
    let leases = json!({"type": "file", "directory": at.path().join("leases")});
    let text = json!({"stateDir": at.path().join("state"), "stores": {"default": leases}});
    fs::write(&policy, text.to_string())?;
    let mut network = network.clone();
    // The command that reads a configuration and touches nothing is as young as that.
    network["cniVersion"] = json!("1.1.0");
    if let Some(master) = network.get_mut("master") {
        // The one netdev that every machine has.
        *master = json!("lo");
    }
    let plugin = product(network["type"].as_str().context("no type")?)?;
    let call = Call::new(&plugin, "x", Path::new(""), "x").env("RDMA_NETDEV_POLICY", &policy);
    let answer = call.run("STATUS", network.to_string().as_bytes())?;
    Ok(answer.status.success().then_some(()).ok_or(answer.stdout))
}

fn every_example_is_read_by_its_program() -> Result<()> {
    let page = page()?;
    let mut read = [0; 3];
    for (language, text) in blocks(&page) {
        let at = tempfile::tempdir()?;
        let file = at.path().join("example");
        fs::write(&file, text)?;
        let name = file.to_str().context("path")?;
        let document: Option<Value> = serde_json::from_str(text).ok();
        let has = |key: &str| document.as_ref().is_some_and(|d| d.get(key).is_some());
        let (which, outcome) = if language == "yaml" || has("configList") || has("resourceList") {
            (0, daemon(&["validate", "--config-file", name])?)
        } else if has("cniVersion") {
            (1, status(&document.clone().unwrap_or_default(), &at)?)
        } else if has("stores") {
            fs::create_dir(at.path().join("etc"))?;
            fs::create_dir(at.path().join("bin"))?;
            let given = format!("--policy={name}");
            let to = format!("--policy-to={}/etc/policy.json", at.path().display());
            let bin = format!("--to={}/bin", at.path().display());
            (2, daemon(&["install", &given, &to, &bin])?)
        } else {
            bail!("an example that no program reads:\n{text}");
        };
        if let Err(said) = outcome {
            bail!("{said}\nof the example\n{text}");
        }
        read[which] += 1;
    }
    ensure!(read.iter().all(|count| *count > 0), "examples of each kind: {read:?}");
    Ok(())
}

/// The keys that a refusal of an unknown one lists, and that the page does not have.
fn missing(refusal: &str, page: &str) -> Result<Vec<String>> {
    let (_, list) = refusal.split_once("known keys: ").with_context(|| refusal.to_owned())?;
    let keys = list.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let keys = keys.take_while(|key| *key != "n").filter(|key| !key.is_empty());
    let explained = |key: &str| page.contains(&format!("{key}`")) || page.contains(&format!("`{key}"));
    Ok(keys.filter(|key| !explained(key)).map(str::to_owned).collect())
}

fn every_key_of_a_pool_is_explained() -> Result<()> {
    let page = page()?;
    let pool = |key: &str| format!("version: 1\npools:\n- resource: a/b\n  mode: shared\n  {key}\n");
    let texts = [
        "version: 1\nqqqqqqqqqqqq: 1\n".to_owned(),
        pool("qqqqqqqqqqqq: 1"),
        pool("nodes: {qqqqqqqqqqqq: 1}"),
        pool("select: {qqqqqqqqqqqq: 1}"),
    ];
    let at = tempfile::tempdir()?;
    let file = at.path().join("config");
    for text in texts {
        fs::write(&file, &text)?;
        let name = file.to_str().context("path")?;
        let Err(said) = daemon(&["validate", "--config-file", name])? else {
            bail!("accepted:\n{text}");
        };
        let missing = missing(&said, &page)?;
        ensure!(missing.is_empty(), "not in docs/CONFIG.md: {missing:?}");
    }
    Ok(())
}

fn every_key_of_an_ipam_is_explained() -> Result<()> {
    let page = page()?;
    let ipam = json!({"type": "rdma-ipam", "range": "10.0.0.0/24", "qqqqqqqqqqqq": 1});
    let network = json!({"name": "a", "type": "rdma-ipam", "ipam": ipam});
    let Err(said) = status(&network, &tempfile::tempdir()?)? else {
        bail!("an unknown key was accepted");
    };
    let missing = missing(&said, &page)?;
    ensure!(missing.is_empty(), "not in docs/CONFIG.md: {missing:?}");
    Ok(())
}
