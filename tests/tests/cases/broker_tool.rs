//! `rdmactl blocks release` on a real API server, with a kubectl that stands in for the real one.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::api_server::ApiServer;
use e2e::case;
use e2e::cluster::{BrokerNode, api_server, blocks, eventually};
use e2e::cni::Answer;
use e2e::harness::Case;
use serde_json::{Value, json};

pub(crate) const CASES: &[Case] = &[
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
            .any(|what| what.contains("this node does not own")),
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
    Ok(())
}

fn what_kubectl_refuses_is_printed() -> Result<()> {
    let server = api_server()?;
    let node = started(&server, "n1")?;
    // Nobody's certificate may read nothing.
    let stranger = server.kubeconfig_of("stranger", &[])?;
    let refused = node.tool_with(&stranger, &["release", "--block", "10.9.0.0/28"])?;
    ensure!(
        refused.status.code() == Some(1) && refused.stderr.contains("(Forbidden)"),
        "{}",
        refused.stderr
    );
    Ok(())
}
