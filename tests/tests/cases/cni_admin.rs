//! `rdmactl pods` and `reclaim`, as an administrator calls them on the node, and `uninstall`.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::bin_under_test::product;
use e2e::case;
use e2e::cni::Call;
use e2e::cni_host::{CniHost, same};
use e2e::harness::Case;
use e2e::netns::{Netns, run};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

pub(crate) const CASES: &[Case] = &[
    case!(
        attachments_are_listed_and_the_dead_ones_reclaimed,
        Root,
        Netns,
        Macvlan
    ),
    case!(
        an_interface_that_its_pod_lost_is_shown_as_gone,
        Root,
        Netns,
        Macvlan
    ),
    case!(
        reclaim_gives_a_nic_its_name_as_soon_as_that_is_free,
        Root,
        Netns
    ),
    case!(
        a_denied_add_leaves_the_repair_of_a_nic_to_be_done,
        Root,
        Netns
    ),
    case!(
        a_nic_without_its_name_is_another_pods_and_gets_its_name_after_that,
        Root,
        Netns
    ),
    case!(
        a_node_is_cleaned_only_once_no_pod_has_anything,
        Root,
        Netns,
        Macvlan
    ),
    case!(
        a_node_is_cleaned_in_a_container_after_a_try_that_failed_half_way,
        Root,
        Netns,
        Macvlan
    ),
    case!(
        what_a_dead_pod_leased_is_freed_by_the_wait_for_it,
        Root,
        Netns
    ),
    case!(a_container_that_stays_ends_at_sigterm, Root, Netns),
    case!(networks_are_checked_before_a_pod_asks_for_them),
    case!(a_node_without_attachments_has_an_empty_list, Root, Netns),
    case!(a_policy_that_is_not_there_is_no_empty_node, Root, Netns),
    case!(
        reclaim_is_refused_outside_of_the_hosts_namespace,
        Root,
        Netns
    ),
];

fn command(host: &CniHost, from: &Netns, arguments: &[&str]) -> Result<Command> {
    let mut command = from.command(product("rdmactl")?);
    command
        .args(arguments)
        .env("RDMA_NETDEV_POLICY", host.directory().join("policy.json"));
    Ok(command)
}

fn tool(host: &CniHost, from: &Netns, arguments: &[&str]) -> Result<String> {
    run(&mut command(host, from, arguments)?)
}

fn listed(host: &CniHost) -> Result<Vec<Value>> {
    // Without a daemon and a kubelet it fails, and shows what the journal has.
    let output = command(host, &host.netns, &["pods", "--json"])?.output()?;
    let document: Value = serde_json::from_slice(&output.stdout)?;
    assert_eq!(document["version"], 1);
    document["pods"].as_array().cloned().context("no list")
}

/// Lets a container's attachment be as old as the hills.
fn age(host: &CniHost, container: &str) -> Result<()> {
    let mut aged = 0;
    for entry in fs::read_dir(host.state().join("attachments"))? {
        let path = entry?.path();
        let mut record: Value = serde_json::from_slice(&fs::read(&path)?)?;
        if record["containerId"] == container {
            record["created"] = json!(1);
            fs::write(&path, record.to_string())?;
            aged += 1;
        }
    }
    ensure!(aged == 1, "{aged} records of {container}");
    Ok(())
}

fn attachments_are_listed_and_the_dead_ones_reclaimed() -> Result<()> {
    let host = CniHost::new()?;
    let config = host.config(&json!({
        "attach": "macvlan", "master": "nic0",
        "ipam": host.own_ipam("10.9.0.0/24", "10.9.0.10", &json!({})),
    }));
    let pods = [host.pod()?, host.pod()?, host.pod()?];
    for (pod, container) in pods.iter().zip(["old", "young", "alive"]) {
        let arguments = format!("K8S_POD_NAMESPACE=default;K8S_POD_NAME={container}");
        let call = host.call(pod, container, "net1").env("CNI_ARGS", arguments);
        call.run("ADD", config.to_string().as_bytes())?.success()?;
    }
    let all = listed(&host)?;
    assert_eq!(all.len(), 3);
    for container in ["old", "young", "alive"] {
        let entry = all
            .iter()
            .find(|entry| entry["sandbox"] == container)
            .context("missing")?;
        let expected = json!([
            format!("default/{container}"),
            "net1",
            "rail0",
            "macvlan",
            "nic0",
            "alive"
        ]);
        let keys = [
            "pod",
            "interface",
            "network",
            "kind",
            "netdev",
            "netnsState",
        ];
        assert_eq!(
            keys.map(|key| entry[key].clone()).to_vec(),
            *expected.as_array().unwrap()
        );
    }
    for container in ["old", "alive"] {
        age(&host, container)?;
    }
    let nothing = tool(&host, &host.netns, &["reclaim"])?;
    assert_eq!(
        nothing,
        "attachments: 0 undone, 0 failed, 3 kept\n\
         leases: 0 freed, 0 pending a second check, 0 failed, 3 kept\n"
    );

    // Two namespaces go; of the younger attachment the ADD might still be running.
    pods[0].delete()?;
    pods[1].delete()?;
    let gone = listed(&host)?;
    let gone = gone.iter().filter(|entry| entry["netnsState"] == "gone");
    assert_eq!(gone.count(), 2);
    let would = tool(&host, &host.netns, &["reclaim", "--dry-run"])?;
    assert!(
        would.contains("1 would be undone, 0 failed, 2 kept"),
        "{would}"
    );
    assert!(would.contains("its network namespace is gone"), "{would}");
    assert_eq!(listed(&host)?.len(), 3, "a dry run changed something");

    let done: Value = serde_json::from_str(&tool(&host, &host.netns, &["reclaim", "--json"])?)?;
    assert_eq!(done["undone"][0]["container"], "old", "{done}");
    assert_eq!(done["undone"][0]["error"], Value::Null, "{done}");
    assert_eq!(listed(&host)?.len(), 2);
    age(&host, "young")?;
    tool(&host, &host.netns, &["reclaim"])?;
    let left = listed(&host)?;
    assert_eq!(
        (left.len(), &left[0]["sandbox"]),
        (1, &json!("alive")),
        "{left:?}"
    );
    assert!(
        pods[2].ip("link show net1").is_ok(),
        "a living pod lost its interface"
    );

    let call = host.call(&pods[2], "alive", "net1");
    call.run("DEL", config.to_string().as_bytes())?.success()?;
    assert!(host.left_behind().is_empty(), "{:?}", host.left_behind());
    Ok(())
}

/// What `rdmactl pods`, started by `runner`, prints.
fn pods_as_text(mut runner: Command, host: &CniHost) -> Result<String> {
    runner
        .arg(product("rdmactl")?)
        .arg("pods")
        .env("RDMA_NETDEV_POLICY", host.directory().join("policy.json"));
    Ok(String::from_utf8(runner.output()?.stdout)?)
}

/// By the kernel, of children and of moved NICs, wherever in the table: what the journal says is older.
fn an_interface_that_its_pod_lost_is_shown_as_gone() -> Result<()> {
    let host = CniHost::new()?;
    host.add_nic("nic1", "peer1")?;
    let child = host.config(&json!({"attach": "macvlan", "master": "nic0"}));
    let moved = host.config(&json!({"attach": "move", "device": "nic1"}));
    let pods = [host.pod()?, host.pod()?, host.pod()?];
    for (pod, (container, config)) in
        pods.iter()
            .zip([("deleted", &child), ("renamed", &child), ("moved", &moved)])
    {
        let arguments = format!("K8S_POD_NAMESPACE=ml;K8S_POD_NAME={container}");
        let call = host.call(pod, container, "net1").env("CNI_ARGS", arguments);
        call.run("ADD", config.to_string().as_bytes())?.success()?;
    }
    let states = || -> Result<String> {
        let all = listed(&host)?;
        let shown = all
            .iter()
            .map(|one| format!("{}={}", one["sandbox"], one["interfaceState"]));
        Ok(shown.collect::<Vec<_>>().join(" ").replace('"', ""))
    };
    ensure!(
        states()? == "deleted=present moved=present renamed=present",
        "{}",
        states()?
    );
    pods[0].ip("link del net1")?;
    pods[1].ip("link set net1 down")?;
    pods[1].ip("link set net1 name other")?;
    // Another link under the name and on another master is not it.
    pods[0].ip("link add net1 type veth peer name net2")?;
    ensure!(
        states()? == "deleted=gone moved=present renamed=present",
        "{}",
        states()?
    );
    pods[2].ip("link del net1")?;
    // The daemon's container, where kubectl rdma runs it, has this capability only.
    let mut contained = host.netns.command("setpriv");
    contained.args(["--bounding-set", "-all,+net_admin"]);
    let text = pods_as_text(contained, &host)?;
    ensure!(
        text.matches("net1 (gone from the pod)").count() == 2,
        "{text}"
    );
    let note =
        "ml/deleted: net1 is gone from the pod. Delete the pod; its controller makes a new one";
    ensure!(text.contains(note), "{text}");

    // Where the host's links cannot be told from a pod's, nothing is claimed. `ip netns exec` would
    // show the namespace's own /sys.
    let mut elsewhere = Command::new("nsenter");
    elsewhere.arg(format!("--net={}", pods[1].path().display()));
    let text = pods_as_text(elsewhere, &host)?;
    ensure!(
        text.matches("net1 (unknown)").count() == 3
            && text.contains(
                "unknown, because this process is not in the host's network namespace: ml/deleted"
            ),
        "{text}"
    );
    for (pod, container) in pods.iter().zip(["deleted", "renamed", "moved"]) {
        let config = if container == "moved" { &moved } else { &child };
        let call = host.call(pod, container, "net1");
        call.run("DEL", config.to_string().as_bytes())?.success()?;
    }
    assert!(host.left_behind().is_empty(), "{:?}", host.left_behind());
    Ok(())
}

/// DEL is done, so that neither the age of the attachment nor its namespace, which lives, matters;
/// and its addresses were released by that DEL.
/// The NIC is back from a pod, and another netdev has its name.
fn misnamed(host: &CniHost) -> Result<Value> {
    let config = host.config(&json!({"attach": "move", "device": "nic0"}));
    let pod = host.pod()?;
    let call = host.call(&pod, "c1", "net1");
    call.run("ADD", config.to_string().as_bytes())?.success()?;
    host.netns.ip("link add nic0 type veth peer name other")?;
    call.run("DEL", config.to_string().as_bytes())?.success()?;
    let links = host.netns.ip("-o link show")?;
    let name = links
        .split_whitespace()
        .find(|word| word.starts_with("rdma-dev"));
    let name = name.context("no name of ours")?.trim_end_matches(':');
    let name = name.split('@').next().unwrap_or_default();
    Ok(host.config(&json!({"attach": "move", "device": name})))
}

/// Whoever may not have the NIC ends nothing that was begun for it.
fn a_denied_add_leaves_the_repair_of_a_nic_to_be_done() -> Result<()> {
    let host = CniHost::new()?;
    let before = host.picture()?;
    let config = misnamed(&host)?;
    let other = host.pod()?;
    let mut denied = config.clone();
    denied["trust"] = "on".into();
    let mut leased = config;
    leased["ipam"] = host.own_ipam(
        "10.9.0.0/31",
        "10.9.0.0",
        &json!({"exclude": ["10.9.0.0/31"]}),
    );
    for config in [denied, leased] {
        let call = host.call(&other, "c2", "net1");
        call.run("ADD", config.to_string().as_bytes())?.refusal()?;
        call.run("DEL", config.to_string().as_bytes())?.success()?;
    }
    host.netns.ip("link del nic0")?;
    let done = tool(&host, &host.netns, &["reclaim"])?;
    assert!(done.contains("1 undone, 0 failed, 0 kept"), "{done}");
    same(&before, &host.picture()?, "after the repair")?;
    assert!(host.left_behind().is_empty(), "{:?}", host.left_behind());
    Ok(())
}

fn a_nic_without_its_name_is_another_pods_and_gets_its_name_after_that() -> Result<()> {
    let host = CniHost::new()?;
    let before = host.picture()?;
    let config = misnamed(&host)?.to_string();
    let pod = host.pod()?;
    let call = host.call(&pod, "c2", "net1");
    call.run("ADD", config.as_bytes())?.success()?;
    // The late DEL of the first does not touch it.
    let first = host.pod()?;
    host.call(&first, "c1", "net1")
        .run("DEL", config.as_bytes())?
        .success()?;
    assert!(pod.ip("link show net1").is_ok(), "the pod lost its NIC");
    host.netns.ip("link del nic0")?;
    call.run("DEL", config.as_bytes())?.success()?;
    same(&before, &host.picture()?, "after both")?;
    assert!(host.left_behind().is_empty(), "{:?}", host.left_behind());
    Ok(())
}

fn reclaim_gives_a_nic_its_name_as_soon_as_that_is_free() -> Result<()> {
    let host = CniHost::new()?;
    let config = host.config(&json!({
        "attach": "move", "device": "nic0",
        "ipam": host.own_ipam("10.9.0.0/24", "10.9.0.10", &json!({})),
    }));
    let before = host.picture()?;
    let pod = host.pod()?;
    let call = host.call(&pod, "c1", "net1");
    call.run("ADD", config.to_string().as_bytes())?.success()?;
    host.netns.ip("link add nic0 type veth peer name other")?;
    call.run("DEL", config.to_string().as_bytes())?.success()?;

    let mut records = fs::read_dir(host.state().join("attachments"))?;
    let path = records.next().context("no record of the repair")??.path();
    let record: Value = serde_json::from_slice(&fs::read(path)?)?;
    assert_eq!(record["parts"][0]["move"]["returned"], "name", "{record}");
    assert_eq!(record["ipam"], Value::Null, "{record}");
    let would = tool(&host, &host.netns, &["reclaim", "--dry-run"])?;
    assert!(would.contains("its NIC is back"), "{would}");

    host.netns.ip("link del nic0")?;
    let done = tool(&host, &host.netns, &["reclaim"])?;
    assert!(done.contains("1 undone, 0 failed, 0 kept"), "{done}");
    assert!(
        pod.ip("link show lo").is_ok(),
        "the pod's namespace is gone"
    );
    same(&before, &host.picture()?, "after the repair")?;
    assert!(host.left_behind().is_empty(), "{:?}", host.left_behind());
    Ok(())
}

fn a_node_without_attachments_has_an_empty_list() -> Result<()> {
    let host = CniHost::new()?;
    assert_eq!(listed(&host)?, Vec::<Value>::new());
    let nothing = tool(&host, &host.netns, &["reclaim"])?;
    assert!(nothing.starts_with("attachments: 0 undone, 0 failed, 0 kept\n"));
    assert!(host.left_behind().is_empty(), "{:?}", host.left_behind());
    // With a policy that is wrong, too: the error is printed, with what to do.
    host.policy(&json!({"alow": {}}))?;
    let mut reclaim = command(&host, &host.netns, &["reclaim"])?;
    let output = reclaim.output()?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{complaint}");
    assert!(
        complaint.contains(r#"unknown key "alow""#) && complaint.contains("correct the file"),
        "{complaint}"
    );
    Ok(())
}

fn reclaim_is_refused_outside_of_the_hosts_namespace() -> Result<()> {
    let host = CniHost::new()?;
    // `ip netns exec` shows the namespace's own /sys; the host's is what a container has.
    let elsewhere = host.pod()?;
    let mut command = std::process::Command::new("nsenter");
    command
        .arg(format!("--net={}", elsewhere.path().display()))
        .arg(product("rdmactl")?)
        .arg("reclaim")
        .env("RDMA_NETDEV_POLICY", host.directory().join("policy.json"));
    let refused = run(&mut command).err().context("it was not refused")?;
    assert!(
        format!("{refused:#}").contains("run this on the host"),
        "{refused:#}"
    );
    Ok(())
}

/// Else the journal of the default state directory would be reclaimed.
fn a_policy_that_is_not_there_is_no_empty_node() -> Result<()> {
    let host = CniHost::new()?;
    for arguments in [&["addresses"][..], &["reclaim"], &["reclaim", "--json"]] {
        let mut command = command(&host, &host.netns, arguments)?;
        command.args(["--policy", "/none/policy.json"]);
        let output = command.output()?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(!output.status.success(), "{arguments:?} succeeded");
        ensure!(
            output.stdout.is_empty() && stderr.contains("/none/policy.json is not there"),
            "{arguments:?}: {stderr}"
        );
    }
    Ok(())
}

/// All networks of the examples with the lab's policy, and one that this policy does not allow.
fn networks_are_checked_before_a_pod_asks_for_them() -> Result<()> {
    let manifests = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("manifests");
    let directory = tempfile::tempdir()?;
    let policy = directory.path().join("policy.json");
    fs::copy(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("lab/policy.json"),
        &policy,
    )?;
    let validate = |file: &Path, flags: &[&str]| -> Result<Output> {
        Ok(Command::new(product("rdmactl")?)
            .arg("validate")
            .arg(file)
            .arg("--policy")
            .arg(&policy)
            .args(flags)
            .output()?)
    };
    let mut networks = 0;
    for example in fs::read_dir(manifests.join("examples"))? {
        let example = example?.path();
        if !example.is_dir() {
            continue;
        }
        for file in fs::read_dir(example)? {
            let file = file?.path();
            let has_network =
                fs::read_to_string(&file)?.contains("kind: NetworkAttachmentDefinition");
            // A patch of a kustomization names networks and has none.
            if !has_network || file.ends_with("kustomization.yaml") {
                continue;
            }
            let output = validate(&file, &["--json"])?;
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            ensure!(output.status.success(), "{}: {said}", file.display());
            let document: Value = serde_json::from_slice(&output.stdout)?;
            assert_eq!(document["version"], 1);
            let files = document["files"].as_array().context("files")?;
            networks += files.iter().filter(|one| one["kind"] == "network").count();
        }
    }
    ensure!(networks >= 4, "only {networks}");

    let file = directory.path().join("net.conflist");
    let denied = r#"{"cniVersion": "1.0.0", "name": "n", "plugins": [
        {"type": "rdma-netdev", "attach": "macvlan", "master": "e0", "ipam": {"type": "host-local"}}]}"#;
    fs::write(&file, denied)?;
    let output = validate(&file, &[])?;
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr)?;
    ensure!(
        said.contains("net.conflist: ") && said.contains("allow.ipam"),
        "{said}"
    );
    // All that is wrong, at one time.
    for (plugin, wrong) in [
        (
            json!({"attach": "move", "devices": "all", "ipam": {"type": "static"}}),
            &["no deviceID says of which", "static gives addresses to one"][..],
        ),
        (
            json!({"attach": "move", "devices": "all", "names": "a-name-too-long{rail}"}),
            &["\"a-name-too-long0\" at the shortest"][..],
        ),
    ] {
        let mut plugin = plugin;
        plugin["type"] = "rdma-netdev".into();
        let list = json!({"cniVersion": "1.0.0", "name": "n", "plugins": [plugin]});
        fs::write(&file, list.to_string())?;
        let document: Value = serde_json::from_slice(&validate(&file, &["--json"])?.stdout)?;
        let errors = document["files"][0]["errors"].as_array();
        let errors = errors.context("errors")?;
        assert_eq!(errors.len(), wrong.len(), "{errors:?}");
        for part in wrong {
            let is_said = |error: &Value| error.as_str().is_some_and(|text| text.contains(part));
            ensure!(errors.iter().any(is_said), "{part}: {errors:?}");
        }
    }
    Ok(())
}

fn a_node_is_cleaned_only_once_no_pod_has_anything() -> Result<()> {
    let host = CniHost::new()?;
    let config = host.config(&json!({
        "attach": "macvlan", "master": "nic0",
        "ipam": host.own_ipam("10.9.0.0/24", "10.9.0.10", &json!({})),
    }));
    let pod = host.pod()?;
    let call = || {
        let arguments = "K8S_POD_NAMESPACE=team;K8S_POD_NAME=worker-0";
        host.call(&pod, "c1", "net1").env("CNI_ARGS", arguments)
    };
    call()
        .run("ADD", config.to_string().as_bytes())?
        .success()?;
    let programs = host.directory().join("programs");
    let run = host.directory().join("run");
    fs::create_dir_all(&programs)?;
    fs::create_dir_all(&run)?;
    for program in ["rdma-netdev", "rdma-ipam"] {
        fs::copy(product(program)?, programs.join(program))?;
    }
    fs::write(programs.join("macvlan"), "another's")?;
    let uninstall_by = |policy: &str, flags: &[&str]| -> Result<Output> {
        let mut command = host.netns.command(product("rdma-device-plugin")?);
        command.arg("uninstall").args(flags);
        command.arg("--policy").arg(host.directory().join(policy));
        command.arg("--cni-bin-dir").arg(&programs);
        command.arg("--run-dir").arg(&run);
        command.arg("--cdi-dir").arg(host.directory().join("cdi"));
        command
            .arg("--features-dir")
            .arg(host.directory().join("features"));
        Ok(command.output()?)
    };
    let uninstall = |flags: &[&str]| uninstall_by("policy.json", flags);
    let output = uninstall_by("polcy.json", &["--yes"])?;
    let said = String::from_utf8(output.stderr)?;
    ensure!(
        !output.status.success() && said.contains("polcy.json is not there"),
        "a name that is misspelt is no node without a policy: {said}"
    );
    let output = uninstall(&["--yes"])?;
    let said = String::from_utf8(output.stderr)?;
    assert_eq!(output.status.code(), Some(1), "{said}");
    ensure!(
        said.contains("attachments are there: team/worker-0 (net1)"),
        "{said}"
    );
    ensure!(
        programs.join("rdma-netdev").exists(),
        "refused, and removed"
    );

    call()
        .run("DEL", config.to_string().as_bytes())?
        .success()?;
    let output = uninstall(&[])?;
    let said = String::from_utf8(output.stderr)?;
    ensure!(
        output.status.code() == Some(2) && said.contains("--yes"),
        "removed without a yes: {said}"
    );
    let output = uninstall(&["--dry-run"])?;
    ensure!(output.status.success(), "{output:?}");
    ensure!(
        programs.join("rdma-netdev").exists(),
        "a dry run removed something"
    );
    let output = uninstall(&["--yes"])?;
    let printed = String::from_utf8(output.stdout)?;
    ensure!(
        output.status.success(),
        "{printed}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    for gone in [
        programs.join("rdma-netdev"),
        host.state().join("attachments"),
        host.directory().join("policy.json"),
    ] {
        ensure!(!gone.exists(), "{} is there: {printed}", gone.display());
    }
    ensure!(programs.join("macvlan").exists(), "it is another's");
    Ok(())
}

/// The daemon, which frees what pods left on a node that crashed, is gone by the time of an uninstall.
fn what_a_dead_pod_leased_is_freed_by_the_wait_for_it() -> Result<()> {
    let host = CniHost::new()?;
    let config = json!({"cniVersion": "1.0.0", "name": "rail0",
        "type": "rdma-ipam", "ipam": host.own_ipam("10.9.0.0/24", "10.9.0.10", &json!({}))});
    let pods = [host.pod()?, host.pod()?];
    let program = product("rdma-ipam")?;
    let call = |pod: &Netns, container: &str| {
        Call::new(&program, container, pod.path(), "net1")
            .on_host(&host.netns)
            .env("RDMA_NETDEV_POLICY", host.directory().join("policy.json"))
            .env("RDMA_NODE_NAME", "node-1")
            .env("RDMA_HOST_ROOT", host.root())
    };
    for (pod, container) in pods.iter().zip(["crashed", "alive"]) {
        call(pod, container)
            .run("ADD", config.to_string().as_bytes())?
            .success()?;
    }
    let record = e2e::host_root::leases(&host.root()).join("records/crashed:net1");
    let mut lease: Value = serde_json::from_slice(&fs::read(&record)?)?;
    lease["netns"] = json!("/run/netns/of-a-pod-that-ended");
    lease["sinceBootMs"] = json!(0);
    fs::write(&record, lease.to_string())?;
    let uninstall = || -> Result<Command> {
        let mut command = host.netns.command(product("rdma-device-plugin")?);
        command.args(["uninstall", "--yes", "--policy"]);
        command.arg(host.directory().join("policy.json"));
        for (flag, place) in [
            ("--cni-bin-dir", "bin"),
            ("--run-dir", "run"),
            ("--cdi-dir", "cdi"),
            ("--features-dir", "features"),
        ] {
            command.arg(flag).arg(host.directory().join(place));
        }
        Ok(command)
    };
    let output = uninstall()?.output()?;
    let said = String::from_utf8(output.stderr)?;
    ensure!(
        !output.status.success()
            && said.contains("addresses are leased: 10.9.0.10 (")
            && said.contains("10.9.0.11 ("),
        "by hand: {said}"
    );
    let mut command = uninstall()?;
    command.arg("--wait").env("RDMA_NODE_NAME", "node-1");
    let mut waiting = command.stderr(Stdio::piped()).spawn()?;
    let said = waiting.stderr.take().context("its errors")?;
    let mut lines = BufReader::new(said).lines().map_while(Result::ok);
    let mut wait_for = |words: &str| -> Result<String> {
        let mut seen = String::new();
        for line in lines.by_ref() {
            seen += &line;
            seen.push('\n');
            if line.contains(words) {
                return Ok(seen);
            }
        }
        anyhow::bail!("it ended without {words:?}: {seen}")
    };
    let seen = wait_for("freed: 10.9.0.10")?;
    ensure!(seen.contains("its network namespace is gone"), "{seen}");
    // The other pod runs.
    let seen = wait_for("addresses are leased: 10.9.0.11")?;
    ensure!(!seen.contains("freed: 10.9.0.11"), "{seen}");
    call(&pods[1], "alive")
        .run("DEL", config.to_string().as_bytes())?
        .success()?;
    ensure!(waiting.wait()?.success(), "not cleaned in the end");
    ensure!(!host.directory().join("policy.json").exists());
    Ok(())
}

/// Number 1 of a pid namespace does not end by a signal that it has no handler for.
fn a_container_that_stays_ends_at_sigterm() -> Result<()> {
    let host = CniHost::new()?;
    let mut command = host.netns.command("unshare");
    command.args(["--pid", "--fork"]);
    command.arg(product("rdma-device-plugin")?);
    command.args(["uninstall", "--yes", "--stay", "--policy"]);
    command.arg(host.directory().join("policy.json"));
    for flag in ["--cni-bin-dir", "--run-dir", "--cdi-dir", "--features-dir"] {
        command.arg(flag).arg(host.directory().join("nothing"));
    }
    let mut outer = command.stdout(Stdio::piped()).spawn()?;
    let said = BufReader::new(outer.stdout.take().context("its output")?);
    let mut lines = said.lines().map_while(Result::ok);
    ensure!(lines.any(|line| line == "uninstalled from this node"));
    let children = format!("/proc/{0}/task/{0}/children", outer.id());
    let inner: i32 = fs::read_to_string(children)?.trim().parse()?;
    kill(Pid::from_raw(inner), Signal::SIGTERM)?;
    let asked = Instant::now();
    while outer.try_wait()?.is_none() {
        if asked.elapsed() > Duration::from_secs(5) {
            kill(Pid::from_raw(inner), Signal::SIGKILL)?;
            outer.wait()?;
            anyhow::bail!("it still runs");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// As in the container of the DaemonSet: each directory is a mount point below a root that is read-only.
fn a_node_is_cleaned_in_a_container_after_a_try_that_failed_half_way() -> Result<()> {
    let host = CniHost::new()?;
    let config = host.config(&json!({
        "attach": "macvlan", "master": "nic0",
        "ipam": host.own_ipam("10.9.0.0/24", "10.9.0.10", &json!({})),
    }));
    let pod = host.pod()?;
    for verb in ["ADD", "DEL"] {
        let call = host.call(&pod, "c1", "net1");
        call.run(verb, config.to_string().as_bytes())?.success()?;
    }
    for directory in ["etc", "programs", "run", "cdi", "state/devices/kept"] {
        fs::create_dir_all(host.directory().join(directory))?;
    }
    let policy = host.directory().join("etc/policy.json");
    fs::rename(host.directory().join("policy.json"), &policy)?;
    let uninstall = |mount: &str| -> Result<Output> {
        let script = format!(
            "set -e; cd \"$1\"; shift; {mount}
            for directory in etc programs run cdi state; do
                mount --rbind $directory $directory
            done
            mount --rbind . .
            mount -o remount,bind,ro \"$PWD\"
            exec \"$@\""
        );
        let mut command = host.netns.command("unshare");
        command.args(["--mount", "bash", "-c", &script, "bash"]);
        command.arg(host.directory());
        command.arg(product("rdma-device-plugin")?);
        command
            .args(["uninstall", "--yes", "--policy"])
            .arg(&policy);
        for (flag, place) in [("--cni-bin-dir", "programs"), ("--run-dir", "run")] {
            command.arg(flag).arg(host.directory().join(place));
        }
        for (flag, place) in [("--cdi-dir", "cdi"), ("--features-dir", "features")] {
            command.arg(flag).arg(host.directory().join(place));
        }
        Ok(command.output()?)
    };

    let output = uninstall("mount --bind state/devices/kept state/devices/kept;")?;
    let said = String::from_utf8(output.stderr)?;
    assert_eq!(output.status.code(), Some(1), "{said}");
    ensure!(said.contains("state/devices"), "{said}");
    ensure!(policy.exists(), "the policy goes last");

    let output = uninstall("")?;
    let said = String::from_utf8(output.stderr)?;
    ensure!(output.status.success(), "{said}");
    for directory in ["etc", "state"] {
        let rest = fs::read_dir(host.directory().join(directory))?;
        let rest: Vec<_> = rest.collect::<Result<_, _>>()?;
        ensure!(rest.is_empty(), "{directory}: {rest:?}");
    }
    Ok(())
}
