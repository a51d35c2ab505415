//! The journal beside what others, or earlier versions, left in its directory.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use anyhow::{Context, Result};
use e2e::case;
use e2e::cni_host::CniHost;
use e2e::harness::Case;
use serde_json::json;

pub(crate) const CASES: &[Case] = &[
    case!(
        one_unreadable_record_stops_no_other_attachment,
        Root,
        Netns,
        Macvlan
    ),
    case!(
        a_state_directory_others_can_write_is_refused,
        Root,
        Netns,
        Macvlan
    ),
];

fn mode(path: &Path, mode: u32) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).context("chmod")
}

fn one_unreadable_record_stops_no_other_attachment() -> Result<()> {
    let host = CniHost::new()?;
    let records = host.state().join("attachments");
    fs::create_dir_all(&records)?;
    fs::write(records.join("rail0@newer@net1"), r#"{"version": 99}"#)?;
    fs::write(records.join("rail0@garbage@net1"), "no JSON")?;
    fs::write(records.join("rail0@half@net1"), r#"{"version": 1, "netw"#)?;
    fs::create_dir(records.join("rail0@directory@net1"))?;
    symlink("/dev/zero", records.join("rail0@link@net1"))?;
    e2e::netns::run(std::process::Command::new("mkfifo").arg(records.join("rail0@fifo@net1")))?;
    let log = host.directory().join("log");
    host.policy(&json!({"log": {"file": log}}))?;
    let pod = host.pod()?;
    for keys in [
        json!({"attach": "macvlan", "master": "nic0"}),
        json!({"attach": "move", "device": "nic0"}),
    ] {
        let config = host.config(&keys).to_string();
        let call = host.call(&pod, "c1", "net1");
        call.run("ADD", config.as_bytes())?
            .success()
            .with_context(|| keys.to_string())?;
        call.run("DEL", config.as_bytes())?
            .success()
            .with_context(|| keys.to_string())?;
    }
    // Searched in the whole journal, since the host does not have it.
    let config = host
        .config(&json!({"attach": "move", "device": "nic9"}))
        .to_string();
    let (code, _) = host
        .call(&pod, "c1", "net1")
        .run("ADD", config.as_bytes())?
        .refusal()?;
    assert_eq!(code, 7);
    let log = fs::read_to_string(log)?;
    for name in ["newer", "garbage", "directory", "link", "fifo"] {
        assert!(log.contains(&format!("rail0@{name}@net1")), "{name}: {log}");
    }
    Ok(())
}

fn a_state_directory_others_can_write_is_refused() -> Result<()> {
    let host = CniHost::new()?;
    let pod = host.pod()?;
    let config = host
        .config(&json!({"cniVersion": "1.1.0", "attach": "macvlan", "master": "nic0"}))
        .to_string();
    let call = host.call(&pod, "c1", "net1");
    call.run("ADD", config.as_bytes())?.success()?;
    mode(&host.state(), 0o777)?;
    let other = host.call(&pod, "c2", "net2");
    for (command, expected) in [("ADD", 105), ("STATUS", 50), ("DEL", 105)] {
        let (code, message) = other.run(command, config.as_bytes())?.refusal()?;
        assert_eq!(code, expected, "{command}: {message}");
        assert!(message.contains("writable"), "{message}");
    }
    mode(&host.state(), 0o700)?;
    call.run("DEL", config.as_bytes())?.success()?;
    assert!(pod.ip("link show net1").is_err());
    Ok(())
}
