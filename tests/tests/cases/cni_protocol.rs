//! The CNI protocol of `rdma-netdev`: environment, configuration, versions, errors.

use std::io::Write;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use e2e::bin_under_test::product;
use e2e::cni::{Answer, Call, answer};
use e2e::cni_host::CniHost;
use e2e::harness::Case;
use e2e::{case, netns::Netns};
use serde_json::{Value, json};

pub(crate) const CASES: &[Case] = &[
    case!(version_is_answered_whatever_stdin_does),
    case!(by_hand_it_says_what_it_is),
    case!(missing_variables_are_named_together),
    case!(wrong_documents_are_refused),
    case!(commands_exist_since_their_version),
    case!(a_namespace_must_be_a_pods_own, Root, Netns),
    case!(status_says_whether_add_could_be_served, Root, Netns),
    case!(status_refuses_kernels_that_are_too_old, Root, Netns),
];

const NET: &str = r#"{"cniVersion":"1.0.0","name":"rail0","type":"rdma-netdev"}"#;

fn call() -> Result<Call> {
    let plugin = product("rdma-netdev")?;
    Ok(Call::new(&plugin, "c1", "/run/netns/none".as_ref(), "net1"))
}

fn code(answer: &Answer) -> Result<u64> {
    Ok(answer.refusal()?.0)
}

fn version_is_answered_whatever_stdin_does() -> Result<()> {
    let plugin = product("rdma-netdev")?;
    let supported = |text: &str| -> Result<Vec<Value>> {
        let document: Value = serde_json::from_str(text)?;
        assert_eq!(document["cniVersion"], "1.1.0");
        Ok(document["supportedVersions"]
            .as_array()
            .cloned()
            .unwrap_or_default())
    };
    let mut command = std::process::Command::new(&plugin);
    command.env_clear().env("CNI_COMMAND", "VERSION");
    let closed = command.stdin(Stdio::null()).output()?;
    assert!(closed.status.success());
    let versions = supported(&String::from_utf8(closed.stdout)?)?;
    let all = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];
    assert_eq!(versions, all.map(Value::from));

    // A pipe that is neither written to nor closed.
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let pipe = child.stdin.take();
    assert!(child.wait()?.success());
    drop(pipe);
    Ok(())
}

fn by_hand_it_says_what_it_is() -> Result<()> {
    let mut command = std::process::Command::new(product("rdma-netdev")?);
    let output = command.env_clear().stdin(Stdio::null()).output()?;
    assert!(output.status.success());
    assert!(output.stdout.is_empty());
    let said = String::from_utf8(output.stderr)?;
    assert!(
        said.contains("rdma-netdev") && said.contains("1.1.0"),
        "{said}"
    );
    Ok(())
}

fn missing_variables_are_named_together() -> Result<()> {
    let all = ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"];
    let without = |command: &str, missing: &[&str]| -> Result<Answer> {
        let mut process = call()?.command(command);
        for name in missing {
            process.env_remove(name);
        }
        answer(&mut process, NET.as_bytes())
    };
    for name in all {
        let (code, message) = without("ADD", &[name])?.refusal()?;
        assert_eq!(code, 4);
        assert!(message.contains(name), "{message}");
    }
    let (_, message) = without("ADD", &all)?.refusal()?;
    assert!(all.iter().all(|name| message.contains(name)), "{message}");
    let (code, _) = without("GC", &["CNI_PATH"])?.refusal()?;
    assert_eq!(code, 4);
    Ok(())
}

fn wrong_documents_are_refused() -> Result<()> {
    for (document, expected, word) in [
        ("", 6, "empty"),
        (" \n", 6, "empty"),
        ("{", 6, "not JSON"),
        ("[]", 6, "object"),
        (r#"{"cniVersion":"x.y","name":"a"}"#, 6, "x.y"),
        (r#"{"cniVersion":"9.9.9","name":"a"}"#, 1, "9.9.9"),
        (r#"{"cniVersion":"0.2.0","name":"a"}"#, 1, "0.2.0"),
        (r#"{"name":"a"}"#, 1, "0.1.0"),
        (r#"{"cniVersion":"1.0.0"}"#, 7, "name"),
        (r#"{"cniVersion":"1.0.0","name":""}"#, 7, "name"),
        (r#"{"cniVersion":"1.0.0","name":"-bad"}"#, 7, "-bad"),
        (r#"{"cniVersion":"1.0.0","name":"a/b"}"#, 7, "a/b"),
    ] {
        for command in ["ADD", "DEL"] {
            let (code, message) = call()?.run(command, document.as_bytes())?.refusal()?;
            assert_eq!(code, expected, "{command} {document:?}: {message}");
            assert!(message.contains(word), "{document:?}: {message}");
        }
    }
    let details: Value = serde_json::from_str(
        &call()?
            .run("ADD", br#"{"cniVersion":"9.9.9","name":"a"}"#)?
            .stdout,
    )?;
    let details = details["details"].as_str().context("details")?.to_owned();
    assert!(
        details.contains("0.3.0, 0.3.1") && details.contains("1.1.0"),
        "{details}"
    );
    Ok(())
}

fn commands_exist_since_their_version() -> Result<()> {
    for (command, version) in [("CHECK", "0.3.1"), ("STATUS", "1.0.0"), ("GC", "1.0.0")] {
        let net = json!({"cniVersion": version, "name": "rail0", "type": "rdma-netdev"});
        let (code, message) = call()?
            .run(command, net.to_string().as_bytes())?
            .refusal()?;
        assert_eq!(code, 1, "{command}: {message}");
        let document: Value =
            serde_json::from_str(&call()?.run(command, net.to_string().as_bytes())?.stdout)?;
        assert_eq!(document["cniVersion"], version);
    }
    Ok(())
}

fn a_namespace_must_be_a_pods_own() -> Result<()> {
    let host = CniHost::new()?;
    let pod = host.pod()?;
    let config = host
        .config(&json!({"attach": "macvlan", "master": "nic0"}))
        .to_string();
    let before = host.picture()?;
    let file = host.directory().join("no-namespace");
    std::fs::File::create(&file)?.write_all(b"x")?;
    for netns in [
        "/run/netns/none".as_ref(),
        file.as_path(),
        host.netns.path(),
    ] {
        let call = Call {
            netns: netns.into(),
            ..host.call(&pod, "c1", "net1")
        };
        let (code, message) = call.run("ADD", config.as_bytes())?.refusal()?;
        assert_eq!(code, 8, "{message}");
        // What is gone needs no DEL, but runtimes send it.
        call.run("DEL", config.as_bytes())?.success()?;
    }
    e2e::cni_host::same(&before, &host.picture()?, "after refused calls")?;
    let own = Call {
        netns: host.netns.path().into(),
        ..host.call(&pod, "c1", "net1")
    }
    .env("CNI_NETNS_OVERRIDE", "1");
    own.run("ADD", config.as_bytes())?.success()?;
    own.run("DEL", config.as_bytes())?.success()?;
    e2e::cni_host::same(&before, &host.picture()?, "after the override")
}

fn status_says_whether_add_could_be_served() -> Result<()> {
    let host = CniHost::new()?;
    let pod: Netns = host.pod()?;
    let call = host.call(&pod, "c1", "net1");
    let status = |keys: Value| {
        let mut config = host.config(&keys);
        config["cniVersion"] = "1.1.0".into();
        call.run("STATUS", config.to_string().as_bytes())
    };
    let fine = status(json!({"attach": "macvlan", "master": "nic0"}))?;
    assert_eq!(fine.success()?, Value::Null);
    for (keys, word) in [
        (
            json!({"attach": "move", "ipam": {"type": "nowhere"}}),
            "nowhere",
        ),
        (json!({}), "attach is missing"),
        (json!({"attach": "bridge"}), "attach"),
        (json!({"attach": "macvlan", "master": "nic9"}), "nic9"),
    ] {
        let (code, message) = status(keys)?.refusal()?;
        assert_eq!(code, 50, "{message}");
        assert!(message.contains(word), "{message}");
    }
    // A directory below a file cannot be made.
    host.policy(&json!({"stateDir": host.directory().join("policy.json/state")}))?;
    assert_eq!(code(&status(json!({"attach": "move"}))?)?, 50);
    host.policy(&json!({"unknown": 1}))?;
    let (code, message) = status(json!({"attach": "move"}))?.refusal()?;
    ensure!(code == 50 && message.contains("unknown"), "{message}");
    Ok(())
}

fn status_refuses_kernels_that_are_too_old() -> Result<()> {
    let host = CniHost::new()?;
    let pod: Netns = host.pod()?;
    let proc = host.directory().join("old/proc");
    std::fs::create_dir_all(proc.join("sys/kernel"))?;
    for name in ["self", "thread-self"] {
        std::os::unix::fs::symlink(format!("/proc/{name}"), proc.join(name))?;
    }
    let call = host
        .call(&pod, "c1", "net1")
        .env("RDMA_HOST_ROOT", host.directory().join("old"));
    let keys = json!({"cniVersion": "1.1.0", "attach": "move"});
    let config = host.config(&keys).to_string();
    std::fs::write(proc.join("sys/kernel/osrelease"), "5.13.19-2-pve\n")?;
    let (code, message) = call.run("STATUS", config.as_bytes())?.refusal()?;
    ensure!(
        code == 50 && message.contains("5.13.19") && message.contains("5.14"),
        "{message}"
    );
    std::fs::write(proc.join("sys/kernel/osrelease"), "5.14.0-427.el9.x86_64\n")?;
    call.run("STATUS", config.as_bytes())?.success()?;
    Ok(())
}
