//! `rdmactl blocks` on a real API server, with a kubectl that stands in for the real one.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::api_server::ApiServer;
use e2e::case;
use e2e::cluster::{BrokerNode, NAMESPACE, api_server, blocks, eventually, rdmactl_blocks};
use e2e::cni::Answer;
use e2e::harness::Case;
use serde_json::{Value, json};

pub(crate) const CASES: &[Case] = &[
    case!(blocks_of_all_nodes_are_listed, ApiServer),
    case!(
        a_block_of_a_ready_node_is_released_only_by_force_and_its_broker_obeys,
        ApiServer,
        MountNamespace
    ),
    case!(
        a_block_of_a_node_that_is_not_ready_is_released_and_taken,
        ApiServer
    ),
    case!(
        blocks_of_a_node_registered_anew_stay_with_its_pods,
        ApiServer,
        MountNamespace
    ),
    case!(
        fsck_finds_what_api_and_grants_do_not_agree_on,
        ApiServer,
        MountNamespace
    ),
    case!(what_kubectl_refuses_is_printed, ApiServer),
];

const RANGE: &str = "10.9.0.0/24";
const LATE: Duration = Duration::from_secs(60);

fn started(server: &ApiServer, name: &str) -> Result<BrokerNode> {
    let mut node = BrokerNode::new(server, name, &json!({}))?;
    node.start()?;
    Ok(node)
}

/// The document of a call, and its exit status.
fn document(answer: &Answer) -> Result<(Value, i32)> {
    let document: Value = serde_json::from_str(&answer.stdout)
        .with_context(|| format!("{}{}", answer.stdout, answer.stderr))?;
    ensure!(document["version"] == 1, "{document}");
    Ok((document, answer.status.code().context("a code")?))
}

fn listed(answer: &Answer) -> Result<Vec<(String, String)>> {
    let (document, code) = document(answer)?;
    ensure!(code == 0, "{code}: {document}");
    let all = document["blocks"].as_array().context("blocks")?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Ok(all
        .iter()
        .map(|block| (text(&block["block"]), text(&block["node"])))
        .collect())
}

fn findings(answer: &Answer) -> Result<Vec<String>> {
    let (document, code) = document(answer)?;
    let all = document["findings"].as_array().context("findings")?;
    ensure!((code == 0) == all.is_empty(), "{code}: {document}");
    Ok(all
        .iter()
        .map(|finding| {
            let text = |key: &str| finding[key].as_str().unwrap_or_default().to_owned();
            format!("{}: {}", text("object"), text("what"))
        })
        .collect())
}

fn blocks_of_all_nodes_are_listed() -> Result<()> {
    let server = api_server()?;
    let (one, other) = (started(&server, "n1")?, started(&server, "n2")?);
    let nothing = one.tool(&[])?;
    ensure!(nothing.status.code() == Some(1), "{}", nothing.stdout);
    ensure!(nothing.stderr.contains(NAMESPACE), "{}", nothing.stderr);
    one.ask(RANGE, 20)?;
    other.ask(RANGE, 1)?;
    let mut expected: Vec<(String, String)> = Vec::new();
    for (node, name) in [(&one, "n1"), (&other, "n2")] {
        let granted = node.granted()?.into_iter();
        expected.extend(granted.map(|block| (block, name.to_owned())));
    }
    let mut all = listed(&one.tool(&["--json"])?)?;
    all.sort();
    expected.sort();
    ensure!(all == expected && all.len() == 3, "{all:?} {expected:?}");
    let own = listed(&one.tool(&["--node", "n1", "--json"])?)?;
    ensure!(own.len() == 2 && own.iter().all(|(_, node)| node == "n1"));
    let table = one.tool(&[])?.stdout;
    let header = table.lines().next().unwrap_or_default();
    for title in [
        "BLOCK",
        "NETWORK NAME",
        "NODE",
        "USED",
        "FREE",
        "AGE",
        "STATE",
    ] {
        ensure!(header.contains(title), "{table}");
    }
    ensure!(table.lines().count() == 4, "{table}");
    let none = one.tool(&["--network-name", "blue"])?;
    ensure!(none.status.code() == Some(1));
    Ok(())
}

fn a_block_of_a_ready_node_is_released_only_by_force_and_its_broker_obeys() -> Result<()> {
    let server = api_server()?;
    let (one, other) = (started(&server, "n1")?, started(&server, "n2")?);
    server.report_node("n1", true)?;
    let address = one.add("pod-0", RANGE)?;
    let block = one.granted()?.into_iter().next().context("a block")?;
    let refused = other.tool(&["release", "--block", &block, "--yes"])?;
    ensure!(refused.status.code() == Some(1), "{}", refused.stdout);
    for word in ["n1", "Ready", "--force", "Drain"] {
        ensure!(refused.stderr.contains(word), "{}", refused.stderr);
    }
    ensure!(one.granted()?.contains(&block), "it was taken all the same");
    let released = other.tool(&["release", "--block", &block, "--yes", "--force", "--json"])?;
    let (document, code) = document(&released)?;
    ensure!(
        code == 0 && document["released"]["over"]["administrator"] == true,
        "{document}"
    );
    eventually("its broker drops the block", LATE, || {
        Ok(!one.granted()?.contains(&block))
    })?;
    // It drops the block first, and says then which leases it had.
    eventually("its broker says why", LATE, || {
        let log = one.log();
        Ok(log.contains("an administrator took it") && log.contains(&address))
    })?;
    // Again it is done already, and begins nothing anew.
    let again = other.tool(&["release", "--block", &block, "--yes"])?;
    ensure!(again.status.success(), "{}", again.stderr);
    // What the broker reads again after its start does not bring it back.
    let mut one = one;
    one.kill()?;
    one.start()?;
    one.add("pod-1", RANGE)?;
    ensure!(!one.granted()?.contains(&block), "{:?}", one.granted());
    // The other node gets it, once it has rested.
    let wanted = node_wire::BlockNeed {
        address: Some(address.parse()?),
        ..e2e::cluster::need(RANGE, 1)
    };
    eventually("another node gets the block", LATE, || {
        Ok(other.ask_for(&wanted).is_ok())
    })?;
    let of_one = findings(&one.addresses(&["fsck", "--json"])?)?;
    ensure!(
        of_one
            .iter()
            .any(|what| what.contains("is in no block of this node")),
        "{of_one:?}"
    );
    Ok(())
}

fn a_block_of_a_node_that_is_not_ready_is_released_and_taken() -> Result<()> {
    let server = api_server()?;
    let (mut one, other) = (started(&server, "n1")?, started(&server, "n2")?);
    server.report_node("n1", false)?;
    one.ask(RANGE, 254)?;
    one.kill()?;
    let block = one.granted()?.into_iter().next().context("a block")?;
    let unasked = other.tool(&["release", "--block", &block])?;
    ensure!(
        !unasked.status.success() && unasked.stderr.contains("give --yes"),
        "{}",
        unasked.stderr
    );
    let released = other.tool(&["release", "--block", &block, "--yes"])?;
    ensure!(released.status.success(), "{}", released.stderr);
    eventually("another node gets the block", LATE, || {
        Ok(other.ask(RANGE, 1).is_ok())
    })?;
    ensure!(other.granted()? == std::slice::from_ref(&block));
    let object = blocks(&server)?
        .into_iter()
        .find(|object| object["spec"]["block"] == block.as_str())
        .context("its object")?;
    ensure!(
        object["spec"]["epoch"] == 2 && object["spec"].get("over").is_none(),
        "{object}"
    );
    // Its node comes back, and does not give what was taken from it.
    one.start()?;
    eventually("the node that is back drops the block", LATE, || {
        Ok(!one.granted()?.contains(&block))
    })?;
    for (argument, said) in [
        ("10.9.9.0/28", "no AddressBlock"),
        ("10.9.0.1/28", "is not a block"),
    ] {
        let wrong = other.tool(&["release", "--yes", "--block", argument])?;
        ensure!(
            !wrong.status.success() && wrong.stderr.contains(said),
            "{argument}: {}",
            wrong.stderr
        );
    }
    Ok(())
}

/// Who deletes the Node of a machine that runs has it registered anew, under another UID.
fn blocks_of_a_node_registered_anew_stay_with_its_pods() -> Result<()> {
    let server = api_server()?;
    let (mut one, other) = (started(&server, "n1")?, started(&server, "n2")?);
    one.ask(RANGE, 254)?;
    let address = one.add("pod-0", RANGE)?;
    let granted = one.granted()?;
    one.kill()?;
    server.delete_node("n1")?;
    server.add_node("n1")?;
    server.report_node("n1", true)?;
    for block in &granted {
        let refused = other.tool(&["release", "--block", block, "--yes"])?;
        ensure!(
            refused.status.code() == Some(1) && refused.stderr.contains("--force"),
            "{}{}",
            refused.stdout,
            refused.stderr
        );
    }
    // For longer than cool-down and rest, and while the other node needs a block.
    for _ in 0..10 {
        ensure!(other.ask(RANGE, 1).is_err(), "{:?}", other.granted());
        std::thread::sleep(Duration::from_millis(500));
    }
    one.start()?;
    let uid = server.node_uid("n1")?.context("n1")?;
    eventually("its broker renews all blocks", LATE, || {
        let objects = blocks(&server)?;
        Ok(objects
            .iter()
            .all(|object| object["spec"]["nodeUID"] == uid.as_str()))
    })?;
    ensure!(one.granted()? == granted, "{:?}", one.granted());
    ensure!(one.add("pod-1", RANGE)? != address, "one address twice");
    let found = findings(&other.tool(&["fsck", "--json"])?)?;
    ensure!(found.is_empty(), "{found:#?}");
    Ok(())
}

fn fsck_finds_what_api_and_grants_do_not_agree_on() -> Result<()> {
    let server = api_server()?;
    let (mut one, mut other) = (started(&server, "n1")?, started(&server, "n2")?);
    one.add("pod-0", RANGE)?;
    other.ask(RANGE, 1)?;
    for node in [&one, &other] {
        let found = findings(&node.tool(&["fsck", "--json"])?)?;
        ensure!(found.is_empty(), "{found:?}");
    }
    one.stop()?;
    other.stop()?;
    let of_one = one.granted()?;
    let block = &of_one[0];
    let path = format!("/apis/rdma-netdev.io/v1alpha1/namespaces/{NAMESPACE}/addressblocks");
    let object = blocks(&server)?
        .into_iter()
        .find(|object| object["spec"]["block"] == block.as_str())
        .context("its object")?;
    let name = object["metadata"]["name"].as_str().context("a name")?;
    server
        .client()
        .delete(&format!("{path}/{name}"))?
        .expect_success()?;
    // A whole range of the other node, as no broker makes it.
    let mut wide = object.clone();
    wide["metadata"] = json!({"name": "default.default.10.9.0.0-24", "labels": {}});
    wide["spec"]["block"] = RANGE.into();
    server.client().post(&path, &wide)?.expect_success()?;
    let found = findings(&one.tool(&["fsck", "--json"])?)?;
    for said in [
        format!("{block} of store \"default\": this node gives its addresses, and no AddressBlock"),
        "overlaps 10.9.0.0/24".to_owned(),
        "10.9.0.0/24 is not a block of range 10.9.0.0/24, which is cut into /28".to_owned(),
    ] {
        ensure!(
            found.iter().any(|what| what.contains(&said)),
            "{said}: {found:#?}"
        );
    }
    let text = one.tool(&["fsck"])?;
    ensure!(
        text.status.code() == Some(1) && text.stdout.contains("3 findings"),
        "{}{}",
        text.stdout,
        text.stderr
    );
    // Where the policy has no such store, as on a workstation, only the cluster is read.
    let path = server.kubeconfig().with_file_name("no-store.json");
    fs::write(&path, "{}")?;
    let path = path.to_str().context("a path")?;
    let workstation = rdmactl_blocks(server.kubeconfig())?
        .args(["fsck", "--json", "--policy", path])
        .output()?;
    let read: Value = serde_json::from_slice(&workstation.stdout)?;
    ensure!(read["node"].is_null() && read["blocks"] == 2, "{read}");
    Ok(())
}

fn what_kubectl_refuses_is_printed() -> Result<()> {
    let server = api_server()?;
    let node = started(&server, "n1")?;
    // Nobody's certificate may read nothing.
    let stranger = server.kubeconfig_of("stranger", &[])?;
    for arguments in [&[][..], &["fsck"], &["release", "--block", "10.9.0.0/28"]] {
        let refused = node.tool_with(&stranger, arguments)?;
        ensure!(
            refused.status.code() == Some(1) && refused.stderr.contains("(Forbidden)"),
            "{arguments:?}: {}",
            refused.stderr
        );
    }
    Ok(())
}
