//! What people read of pods: `rdmactl pods`, the metric of late pods, the refusals in a pod's events.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use e2e::cases;
use e2e::daemon::page;
use e2e::kubelet::Pod;
use e2e::scene::{answer_of, refusal};
use serde_json::{Value, json};

use super::cni_late::WAIT_TIMEOUT;
use super::cni_late_machine::{
    Admitted, GPU, GPUS, LATE, METRICS, NETDEVS, NIC, NICS, Node, is_late,
};

const METRIC: &str = "rdma_device_plugin_alignment";

cases! {
    a_late_pods_gpus_stage_and_age_are_columns_of_pods => columns();
    the_daemon_serves_the_alignment_of_each_late_pod => alignment();
    five_refusals_name_object_reason_and_remedy => refusals();
}

/// Rows of `rdmactl pods -o wide`, each with these cells; an age counts as one, whatever it is.
fn shown(node: &Node) -> Result<Vec<[String; 5]>> {
    let root = node.kubelet.settings().root.clone();
    let (root, socket) = (root.to_string_lossy(), node.socket());
    let socket = socket.to_string_lossy();
    let sources = ["--kubelet-root-dir", &root, "--node-socket", &socket];
    let arguments = [&["pods", "-o", "wide"], &sources[..]].concat();
    let answer = node.scene.tool("rdmactl", &arguments)?;
    ensure!(answer.status.success(), "{}", answer.stderr);
    let mut lines = answer.stdout.lines();
    let header = lines.next().context("no header")?;
    let names = header.split_whitespace();
    let columns: Vec<(&str, usize)> = names
        .filter_map(|name| Some((name, header.find(name)?)))
        .collect();
    let rows = lines.take_while(|line| !line.is_empty()).map(|line| {
        let ends = columns.iter().skip(1).map(|(_, start)| *start);
        let cells = columns.iter().zip(ends.chain([line.len()]));
        let cells = cells
            .map(|((name, start), end)| (*name, line.get(*start..end).unwrap_or_default().trim()));
        let row: BTreeMap<&str, &str> = cells.collect();
        let age = row["AGE"].trim_end_matches('s');
        let is_age = !age.is_empty() && age.bytes().all(|byte| byte.is_ascii_digit());
        let age = if is_age { "seconds" } else { row["AGE"] };
        [row["POD"], row["HCA"], row["GPUS"], row["STAGE"], age].map(str::to_owned)
    });
    Ok(rows.collect())
}

fn columns() -> Result<()> {
    let mut node = Node::new()?;
    node.restart(&LATE.replace("binding: late", "binding: late\n  bindAtStart: true"))?;
    let pod = node.admit("a", &[0, 6])?;
    let near = |gpu: usize| format!("{} PIX", GPUS[gpu]);
    let rows = |stage, age| {
        [0, 6].map(|nic: usize| ["default/a", NICS[nic], &near(nic), stage, age].map(str::to_owned))
    };
    assert_eq!(shown(&node)?, [["default/a", "2 units", "-", "-", "-"]]);
    node.add(&pod, &json!({}))?;
    node.kubelet.run_options("default/a", "main")?;
    assert_eq!(shown(&node)?, rows("attached", "seconds"));
    // Its network is removed, its container runs.
    node.del(&pod, &json!({}))?;
    assert_eq!(shown(&node)?, rows("detached", "-"));
    node.remove(&pod)?;
    node.admit("b", &[1])?;
    node.kubelet.run_options("default/b", "main")?;
    let started = ["default/b", NICS[1], &near(1), "started", "-"];
    assert_eq!(shown(&node)?, [started]);
    Ok(())
}

/// Of two pods: one took both NICs of a switch for one GPU, the GPU of the other has none there.
fn alignment() -> Result<()> {
    let mut node = Node::new()?;
    node.restart(&LATE.replace("binding: late", "binding: late\n  strict: false"))?;
    let both = Pod::with_limits("near", &[(GPU, 1), (NIC, 2)])?;
    for pod in [node.admit_pod(both, &[0])?, node.admit("far", &[1])?] {
        node.add(&pod, &json!({}))?;
    }
    let served = || page(METRICS.parse()?, "/metrics");
    let started = Instant::now();
    let labels = |pod| format!("resource=\"{NIC}\",pod_namespace=\"default\",pod_name=\"{pod}\"");
    let lines = [("near", "1.0"), ("far", "0.0")];
    let lines = lines.map(|(pod, value)| format!("{METRIC}{{{}}} {value}", labels(pod)));
    loop {
        let (_, text) = node.scene.host.netns.enter(served)?;
        if lines.iter().all(|line| text.lines().any(|one| one == line)) {
            break;
        }
        ensure!(started.elapsed() < WAIT_TIMEOUT, "no {lines:?} in {text}");
        thread::sleep(Duration::from_millis(50));
    }
    let far = shown(&node)?
        .into_iter()
        .find(|row| row[0] == "default/far");
    let gpus = far.context("no row of the pod")?[2].clone();
    ensure!(gpus.ends_with("NODE (misaligned)"), "{gpus}");
    Ok(())
}

/// ADD fails with a text that has all of these: Multus and the runtime pass it on into the pod's events.
fn refused(node: &Node, pod: &Admitted, network: &Value, words: &[&str]) -> Result<()> {
    for _ in 0..5 {
        let answer = answer_of(&pod.call, "ADD", network)?;
        answer_of(&pod.call, "DEL", network)?.success()?;
        if !is_late(&answer)? {
            refusal(&answer, &[], words)?;
            return Ok(());
        }
    }
    bail!("the kubelet is late: {}", node.daemon.log())
}

fn refusals() -> Result<()> {
    let node = Node::new()?;
    let keys = json!({"cdiDir": node.scene.host.directory().join("cdi")});
    let selectors = json!([{"ifNames": ["gpu[0-6]rdma0"]}]);
    let allow = json!({"unallocated": null, "netdevs": selectors});
    node.scene.policy(&allow, &keys)?;
    let policy = node.scene.policy_file();
    let policy = policy.to_string_lossy();

    let pod = node.admit("denied", &[7])?;
    let words = [
        NETDEVS[7],
        "is denied",
        "the policy's selectors",
        "add it to allow.netdevs in",
        &policy,
    ];
    refused(&node, &pod, &node.network(&pod, &json!({})), &words)?;

    let last = json!({"range_end": "10.9.7.5"});
    let ipam = node.scene.host.own_ipam("10.9.7.0/24", "10.9.7.5", &last);
    let of_range = json!({"ipam": ipam});
    let pod = node.admit("first", &[0])?;
    node.add(&pod, &of_range)?;
    let pod = node.admit("second", &[1])?;
    let words = [
        "for pod default/second (net1",
        "range 10.9.7.0/24 is exhausted",
        "enlarge the range",
    ];
    refused(&node, &pod, &node.network(&pod, &of_range), &words)?;

    let misspelt = json!({"type": "rdma-ipam", "range": "10.9.7.0/24", "rnage_end": "10.9.7.5"});
    for (keys, key, meant) in [
        (json!({"mut": 9000}), "unknown key \"mut\"", "mtu"),
        (
            json!({"ipam": misspelt}),
            "ipam.rnage_end: unknown key",
            "range_end",
        ),
    ] {
        let words = [
            "network rail0: ",
            key,
            &format!("did you mean \"{meant}\"?"),
        ];
        refused(&node, &pod, &node.network(&pod, &keys), &words)?;
    }

    let pod = node.admit_pod(Pod::with_limits("stranger", &[])?, &[])?;
    let network = json!({"attach": "move", "device": NETDEVS[2]});
    let network = node.scene.network(&network);
    let words = [
        NETDEVS[2],
        "is denied: pod default/stranger: the kubelet did not allocate",
        NICS[2],
        "request the resource of an exclusive pool",
    ];
    refused(&node, &pod, &network, &words)?;

    let both = Pod::with_limits("both", &[(GPU, 1), (NIC, 2)])?;
    let pod = node.admit_pod(both, &[4])?;
    node.add(&pod, &json!({}))?;
    let pod = node.admit("late", &[5])?;
    let words = [
        "of pod default/late",
        "the nearest free NIC for GPU 5 is",
        "pod default/both",
        "has it",
        "strict: false for this pool takes what there is",
        "delete it, and a new one may go elsewhere",
    ];
    refused(&node, &pod, &node.network(&pod, &json!({})), &words)
}
