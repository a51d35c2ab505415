//! What the log of the CNI programs has at level `debug`.

use std::fs;

use anyhow::{Context, Result};
use e2e::case;
use e2e::cni_host::CniHost;
use e2e::harness::Case;
use e2e::locked::locked;
use serde_json::json;

pub(crate) const CASES: &[Case] = &[case!(
    debug_logs_requests_to_the_kernel_and_the_ipam,
    Root,
    Netns,
    Macvlan
)];

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
    for said in [": ok, ", "IPAM rdma-ipam ADD: ", "10.9.0.100", "errno 19"] {
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
