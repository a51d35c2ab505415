//! The log of the CNI programs: its lines, its levels, and files that are none.

use std::fs;

use anyhow::{Context, Result};
use e2e::case;
use e2e::cni_host::CniHost;
use e2e::harness::Case;
use e2e::locked::locked;
use serde_json::json;

use super::cni_delegate::install;

pub(crate) const CASES: &[Case] = &[
    case!(a_log_file_that_is_none_stops_no_call, Root, Netns, Macvlan),
    case!(
        debug_logs_requests_to_the_kernel_and_the_ipam,
        Root,
        Netns,
        Macvlan
    ),
    case!(what_others_write_forges_no_line, Root, Netns, Macvlan),
];

fn a_log_file_that_is_none_stops_no_call() -> Result<()> {
    let host = CniHost::new()?;
    let pod = host.pod()?;
    let fifo = host.directory().join("fifo");
    e2e::netns::run(std::process::Command::new("mkfifo").arg(&fifo))?;
    host.policy(&json!({"log": {"file": fifo, "level": "debug"}}))?;
    let config = host
        .config(&json!({"attach": "macvlan", "master": "nic0"}))
        .to_string();
    let call = host.call(&pod, "c1", "net1");
    let answer = call.run("ADD", config.as_bytes())?;
    answer.success()?;
    let said = answer
        .stderr
        .lines()
        .filter(|line| line.contains("is not written"))
        .count();
    assert_eq!(said, 1, "{}", answer.stderr);
    call.run("DEL", config.as_bytes())?.success()?;
    Ok(())
}

fn debug_logs_requests_to_the_kernel_and_the_ipam() -> Result<()> {
    let host = CniHost::new()?;
    let pod = host.pod()?;
    let log = host.directory().join("log");
    host.policy(&json!({"log": {"file": log, "level": "debug"}}))?;
    let ipam = host.own_ipam("10.9.0.0/24", "10.9.0.100", &json!({}));
    let config = host
        .config(&json!({"attach": "macvlan", "master": "nic0", "ipam": ipam}))
        .to_string();
    let call = host.call(&pod, "c1", "net1");
    call.run("ADD", config.as_bytes())?.success()?;
    let text = fs::read_to_string(&log)?;
    let pattern = |line: &str| {
        let mut words = line.split(' ');
        let time = words.next().unwrap_or_default();
        let level = words.next().unwrap_or_default();
        let program = words.next().unwrap_or_default();
        time.len() == 24
            && time.ends_with('Z')
            && ["debug", "info", "warn"].contains(&level)
            && program.starts_with("rdma-netdev[")
            && line.contains("] ADD rail0 net1 of container c1: ")
    };
    for line in text.lines() {
        assert!(pattern(line), "{line}");
    }
    for said in [
        "objects, ",
        ": ok, ",
        "IPAM rdma-ipam ADD: ",
        "10.9.0.100",
        "errno 19",
    ] {
        assert!(text.contains(said), "no {said:?} in\n{text}");
    }
    let held = locked(&host.state().join("lock")).context("hold the lock")?;
    let waiting = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(200));
        drop(held);
    });
    call.run("DEL", config.as_bytes())?.success()?;
    waiting.join().expect("held");
    let text = fs::read_to_string(&log)?;
    assert!(text.contains("µs for the lock of @c1@net1"), "{text}");
    Ok(())
}

fn what_others_write_forges_no_line() -> Result<()> {
    let host = CniHost::new()?;
    let pod = host.pod()?;
    let log = host.directory().join("log");
    host.policy(&json!({
        "log": {"file": log, "level": "debug"}, "allow": {"nonRdma": true, "ipam": ["canned"]},
    }))?;
    install(
        &host,
        "canned",
        r#"printf '{"code":0,"msg":"a\\nb\\u001b[2J"}'; printf 'c\nd\033[2J' >&2; exit 1"#,
    )?;
    let mut call = host.call(&pod, "c1", "net\u{1b}1");
    call.path = host.directory().as_os_str().to_owned();
    let keys = json!({"attach": "macvlan", "master": "nic0", "ipam": {"type": "canned"}});
    let answer = call.run("ADD", host.config(&keys).to_string().as_bytes())?;
    let (code, message) = answer.refusal()?;
    assert!(code >= 100, "{code}");
    assert!(message.contains("canned: a\\nb"), "{message}");
    let raw = |text: &str| text.chars().any(|c| c.is_control() && c != '\n');
    assert!(
        !raw(&answer.stdout) && !raw(&message) && !raw(&answer.stderr),
        "{answer:?}"
    );
    let text = fs::read_to_string(&log)?;
    assert!(!raw(&text), "{text}");
    assert!(
        text.lines().all(|line| line.contains(" rdma-netdev[")),
        "{text}"
    );
    Ok(())
}
