//! Which programs `ipam.type` may run, and what becomes of addresses whose program is gone.

use std::fs;
use std::os::unix::fs::symlink;

use anyhow::{Context, Result};
use e2e::bin_under_test::product;
use e2e::case;
use e2e::cni::Call;
use e2e::cni_host::{CniHost, same};
use e2e::harness::Case;
use e2e::netns::Netns;
use serde_json::{Value, json};

use super::cni_delegate::install;

pub(crate) const CASES: &[Case] = &[
    case!(
        programs_the_policy_does_not_list_are_refused,
        Root,
        Netns,
        Macvlan
    ),
    case!(
        this_plugin_is_refused_as_ipam_even_if_listed,
        Root,
        Netns,
        Macvlan
    ),
    case!(
        whereabouts_is_ours_only_as_a_link_to_ours,
        Root,
        Netns,
        Macvlan
    ),
    case!(del_without_a_record_runs_only_what_is_allowed, Root, Netns),
    case!(
        an_ipam_that_is_gone_does_not_keep_the_rest,
        Root,
        Netns,
        Macvlan
    ),
];

/// A host whose programs are in the case's directory alone, and whose policy allows `ipam`.
fn setup(ipam: &[&str]) -> Result<(CniHost, Netns, Call)> {
    let host = CniHost::new()?;
    allow(&host, ipam)?;
    for program in ["rdma-netdev", "rdma-ipam"] {
        symlink(product(program)?, host.directory().join(program))?;
    }
    let pod = host.pod()?;
    let mut call = host.call(&pod, "c1", "net1");
    call.path = host.directory().as_os_str().to_owned();
    Ok((host, pod, call))
}

fn allow(host: &CniHost, ipam: &[&str]) -> Result<()> {
    host.policy(&json!({"allow": {"nonRdma": true, "ipam": ipam}}))
}

fn config(host: &CniHost, kind: &str) -> String {
    let range = json!({"type": kind, "range": "10.9.0.0/24", "range_start": "10.9.0.100"});
    let keys = json!({"cniVersion": "1.1.0", "attach": "macvlan", "master": "nic0", "ipam": range});
    host.config(&keys).to_string()
}

/// A program that writes each command to `calls`, and answers ADD.
const GIVES: &str = "echo $CNI_COMMAND >> $(dirname $0)/calls
[ $CNI_COMMAND = ADD ] || exit 0
echo '{\"cniVersion\":\"1.0.0\",\"ips\":[{\"address\":\"10.9.0.7/24\"}]}'";

fn calls(host: &CniHost) -> String {
    let text = fs::read_to_string(host.directory().join("calls")).unwrap_or_default();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn programs_the_policy_does_not_list_are_refused() -> Result<()> {
    let (host, _pod, call) = setup(&["rdma-ipam", "static"])?;
    install(&host, "host-local", GIVES)?;
    let before = host.picture()?;
    let config = config(&host, "host-local");
    for (command, expected) in [("ADD", 101), ("STATUS", 50)] {
        let answer = call.run(command, config.as_bytes())?;
        let (code, message) = answer.refusal()?;
        assert_eq!(code, expected, "{message}");
        assert!(
            message.contains("host-local") && message.contains("rdma-ipam, static"),
            "{message}"
        );
        let document: Value = serde_json::from_str(&answer.stdout)?;
        let details = document["details"].as_str().context("details")?;
        let policy = host.directory().join("policy.json").display().to_string();
        assert!(
            details.contains("allow.ipam") && details.contains(&policy),
            "{details}"
        );
    }
    assert_eq!(calls(&host), "");
    same(&before, &host.picture()?, "after the refusals")?;
    // A file that the network names by its path is not a type at all.
    for kind in ["../bin/true", "/bin/true", "..", "a\\u0000b"] {
        let config = config.replace("host-local", kind);
        let (code, message) = call.run("ADD", config.as_bytes())?.refusal()?;
        assert_eq!(code, 101, "{kind}: {message}");
    }
    allow(&host, &["host-local"])?;
    call.run("ADD", config.as_bytes())?.success()?;
    call.run("DEL", config.as_bytes())?.success()?;
    assert_eq!(calls(&host), "ADD DEL");
    Ok(())
}

fn this_plugin_is_refused_as_ipam_even_if_listed() -> Result<()> {
    let kinds = ["rdma-netdev", "rdma", "alias"];
    let (host, _pod, call) = setup(&kinds)?;
    install(&host, "rdma", GIVES)?;
    symlink("rdma-netdev", host.directory().join("alias"))?;
    let before = host.picture()?;
    for kind in kinds {
        let config = config(&host, kind);
        let (code, message) = call.run("ADD", config.as_bytes())?.refusal()?;
        assert_eq!(code, 101, "{kind}: {message}");
        assert!(
            message.contains(kind) && message.contains("not an IPAM"),
            "{message}"
        );
        call.run("DEL", config.as_bytes())?.success()?;
    }
    assert_eq!(calls(&host), "");
    same(&before, &host.picture()?, "after the refusals")
}

fn whereabouts_is_ours_only_as_a_link_to_ours() -> Result<()> {
    let (host, _pod, call) = setup(&["rdma-ipam"])?;
    let config = config(&host, "whereabouts");
    install(&host, "whereabouts", GIVES)?;
    assert_eq!(call.run("ADD", config.as_bytes())?.refusal()?.0, 101);
    fs::remove_file(host.directory().join("whereabouts"))?;
    symlink("rdma-ipam", host.directory().join("whereabouts"))?;
    let result = call.run("ADD", config.as_bytes())?.success()?;
    assert_eq!(result["ips"][0]["address"], "10.9.0.100/24");
    // The link is gone before the pod is; its leases are ours all the same.
    fs::remove_file(host.directory().join("whereabouts"))?;
    call.run("DEL", config.as_bytes())?.success()?;
    assert!(host.left_behind().is_empty(), "{:?}", host.left_behind());
    assert_eq!(calls(&host), "");
    Ok(())
}

fn del_without_a_record_runs_only_what_is_allowed() -> Result<()> {
    let (host, _pod, call) = setup(&["static"])?;
    for name in ["static", "other"] {
        install(&host, name, GIVES)?;
    }
    let answer = call.run("DEL", config(&host, "other").as_bytes())?;
    answer.success()?;
    assert!(answer.stderr.contains("\"other\""), "{}", answer.stderr);
    assert_eq!(calls(&host), "");
    call.run("DEL", config(&host, "static").as_bytes())?
        .success()?;
    assert_eq!(calls(&host), "DEL");
    Ok(())
}

fn an_ipam_that_is_gone_does_not_keep_the_rest() -> Result<()> {
    let (host, pod, call) = setup(&["canned"])?;
    let mut config: Value = serde_json::from_str(&config(&host, "canned"))?;
    let before = host.picture()?;
    for command in ["DEL", "GC"] {
        install(&host, "canned", GIVES)?;
        call.run("ADD", config.to_string().as_bytes())?.success()?;
        fs::remove_file(host.directory().join("canned"))?;
        config["cni.dev/valid-attachments"] = json!([]);
        let answer = call.run(command, config.to_string().as_bytes())?;
        answer.success().context(command)?;
        assert!(
            answer.stderr.contains("canned") && answer.stderr.contains("c1"),
            "{}",
            answer.stderr
        );
        assert!(pod.ip("link show net1").is_err());
        same(&before, &host.picture()?, command)?;
    }
    Ok(())
}
