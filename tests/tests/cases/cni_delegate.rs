//! IPAM of others, by exec: what they get, and what becomes of what they answer.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use anyhow::Result;
use e2e::case;
use e2e::cni::Call;
use e2e::cni_host::{CniHost, same};
use e2e::harness::Case;
use e2e::netns::Netns;
use serde_json::json;

pub(crate) const CASES: &[Case] = &[
    case!(a_delegate_gets_what_the_runtime_gave, Root, Netns, Macvlan),
    case!(a_bad_answer_leaves_nothing, Root, Netns, Macvlan),
    case!(a_missing_delegate_is_named, Root, Netns),
    case!(
        an_exhausted_pool_leaves_nothing,
        Root,
        Netns,
        Macvlan,
        ReferencePlugins
    ),
    case!(
        an_address_the_kernel_refuses_is_released,
        Root,
        Netns,
        Macvlan
    ),
];

/// Puts a shell script into the case's directory, as an IPAM plugin.
pub(super) fn install(host: &CniHost, name: &str, script: &str) -> Result<()> {
    let file = host.directory().join(name);
    fs::write(&file, format!("#!/bin/sh\n{script}\n"))?;
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

fn setup(script: &str) -> Result<(CniHost, Netns, Call, String)> {
    let host = CniHost::new()?;
    install(&host, "canned", script)?;
    let pod = host.pod()?;
    let mut call = host.call(&pod, "c1", "net1");
    call.path = host.directory().as_os_str().to_owned();
    let keys = json!({"attach": "macvlan", "master": "nic0", "ipam": {"type": "canned"}});
    let config = host.config(&keys).to_string();
    Ok((host, pod, call, config))
}

/// Writes each command to `calls` and answers ADD with `answer`.
fn recording(answer: &str) -> String {
    format!("echo $CNI_COMMAND >> $(dirname $0)/calls\n[ $CNI_COMMAND = ADD ] || exit 0\n{answer}")
}

fn calls(host: &CniHost) -> String {
    let text = fs::read_to_string(host.directory().join("calls")).unwrap_or_default();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn a_delegate_gets_what_the_runtime_gave() -> Result<()> {
    let (host, _pod, mut call, config) = setup(
        "env > $(dirname $0)/env; cat > $(dirname $0)/stdin; echo 'from the delegate' >&2
         echo '{\"cniVersion\":\"1.0.0\",\"ips\":[{\"address\":\"10.9.0.7/24\"}]}'",
    )?;
    call.args = "IgnoreUnknown=1;K8S_POD_NAME=a".into();
    let call = call.env("TRACEPARENT", "00-1-2-01");
    let answer = call.run("ADD", config.as_bytes())?;
    answer.success()?;
    assert!(
        answer.stderr.contains("from the delegate"),
        "{}",
        answer.stderr
    );
    assert_eq!(fs::read_to_string(host.directory().join("stdin"))?, config);
    let env = fs::read_to_string(host.directory().join("env"))?;
    for line in [
        "CNI_COMMAND=ADD",
        "CNI_CONTAINERID=c1",
        "CNI_IFNAME=net1",
        "CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAME=a",
        "TRACEPARENT=00-1-2-01",
    ] {
        assert!(env.lines().any(|l| l == line), "no {line} in:\n{env}");
    }
    call.run("DEL", config.as_bytes())?.success()?;
    Ok(())
}

fn a_bad_answer_leaves_nothing() -> Result<()> {
    for (answer, expected) in [
        ("echo garbage", 6),
        ("true", 6),
        ("echo '{}{}'", 6),
        ("echo '{\"cniVersion\":\"1.0.0\"}'", 6),
        ("echo '{\"code\":11,\"msg\":\"later\"}'; exit 1", 11),
        ("exit 3", 6),
        (
            "echo '{\"cniVersion\":\"1.0.0\",\"ips\":[{\"address\":\"10.9.0.7\"}]}'",
            7,
        ),
    ] {
        let (host, pod, call, config) = setup(&recording(answer))?;
        let before = host.picture()?;
        let (code, message) = call.run("ADD", config.as_bytes())?.refusal()?;
        assert_eq!(code, expected, "{answer}: {message}");
        assert_eq!(calls(&host), "ADD DEL", "{answer}");
        assert!(pod.ip("link show net1").is_err());
        same(&before, &host.picture()?, answer)?;
    }
    Ok(())
}

fn a_missing_delegate_is_named() -> Result<()> {
    let (host, _pod, call, config) = setup("true")?;
    fs::remove_file(host.directory().join("canned"))?;
    let (code, message) = call.run("ADD", config.as_bytes())?.refusal()?;
    assert_eq!(code, 7);
    assert!(
        message.contains("canned") && message.contains("CNI_PATH"),
        "{message}"
    );
    // What was never there holds nothing.
    call.run("DEL", config.as_bytes())?.success()?;
    Ok(())
}

fn an_exhausted_pool_leaves_nothing() -> Result<()> {
    let host = CniHost::new()?;
    let ipam = host.host_local(&[("10.9.0.0/30", "10.9.0.2")], &json!({}));
    let keys = json!({"attach": "macvlan", "master": "nic0", "ipam": ipam});
    let config = host.config(&keys).to_string();
    let first = host.pod()?;
    host.call(&first, "c1", "net1")
        .run("ADD", config.as_bytes())?
        .success()?;
    let before = host.picture()?;
    let second = host.pod()?;
    let refused = host
        .call(&second, "c2", "net1")
        .run("ADD", config.as_bytes())?;
    assert!(refused.refusal()?.1.contains("host-local"));
    assert!(second.ip("link show net1").is_err());
    same(&before, &host.picture()?, "after the refusal")?;
    host.call(&first, "c1", "net1")
        .run("DEL", config.as_bytes())?
        .success()?;
    assert!(host.left_behind().is_empty(), "{:?}", host.left_behind());
    Ok(())
}

fn an_address_the_kernel_refuses_is_released() -> Result<()> {
    // The same address twice: the second one is refused when the link is there already.
    let twice = "echo '{\"cniVersion\":\"1.0.0\",\"ips\":[{\"address\":\"10.9.0.7/24\"},\
                 {\"address\":\"10.9.0.7/24\"}]}'";
    let (host, pod, call, config) = setup(&recording(twice))?;
    let before = host.picture()?;
    let (code, message) = call.run("ADD", config.as_bytes())?.refusal()?;
    assert_eq!(code, 100, "{message}");
    assert!(message.contains("10.9.0.7/24"), "{message}");
    assert_eq!(calls(&host), "ADD DEL");
    assert!(pod.ip("link show net1").is_err());
    same(&before, &host.picture()?, "after the refusal")
}
