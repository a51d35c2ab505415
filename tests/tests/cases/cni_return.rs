//! The way of a NIC from a pod to the host: when it is waited for, when it is given up, what stands
//! in its way, and what a restoration says.

use std::fs;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::cni::Answer;
use e2e::host_state::unchanged;
use e2e::netns::run;
use e2e::scene::{PCI, Running, Scene, TRY_AGAIN, answer_of, bounded, index_of, refusal};
use serde_json::json;

use super::cni_faults::traced;
use super::hostile_leases::{Holder, ip_in};

cases! {
    a_nic_that_arrives_late_is_waited_for => arrives_late();
    a_nic_that_left_its_bus_is_gone => unplugged();
    a_nic_moves_to_the_host_under_a_neutral_name => neutral_name();
    altnames_of_a_pod_that_died_are_removed => altnames_of_a_dead_pod();
    an_altname_that_another_netdev_has_is_a_warning => altname_taken();
    a_restored_nic_is_not_set_down_by_another_del => restored_twice();
    a_route_that_the_kernel_refuses_is_a_warning => refused_route();
    settings_that_cannot_be_opened_are_written: Strace =>
        unreadable("ipv4/neigh/nic0", "?open,openat", "proc/sys/net/ipv4/neigh/nic0: i/o error");
    settings_that_cannot_be_listed_are_written: Strace =>
        unreadable("ipv4/conf/nic0", "getdents64", "proc/sys/net/ipv4/conf/nic0: i/o error");
    a_setting_that_cannot_be_read_is_written: Strace =>
        unreadable("ipv4/conf/nic0/rp_filter", "read", "");
    a_nic_without_its_name_is_named_by_its_index => named_by_index();
    a_nic_that_its_pod_called_all_has_its_addresses_again => called("all", Ends::Never);
    a_nic_called_all_when_its_namespace_died_has_its_addresses_again => called("all", Ends::BeforeDel);
    a_nic_called_default_when_its_namespace_died_has_its_addresses_again =>
        called("default", Ends::BeforeDel);
    an_orphans_ipam_does_not_fail_the_next_pod => ipam_of_orphan();
    a_rule_that_is_not_text_is_left_alone => rule_of_bytes();
    a_nic_has_its_index_again => index_again();
    an_index_that_another_netdev_has_is_a_warning => index_taken();
    a_nic_with_another_index_after_its_namespace_died_is_a_warning => index_after_pod();
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ends {
    Never,
    BeforeDel,
}

fn del(scene: &Scene) -> Result<Answer> {
    let answer = answer_of(&scene.call(), "DEL", &scene.moving())?;
    answer.success().context("DEL")?;
    Ok(answer)
}

/// Its addresses are for its own DEL, or the daemon.
fn ipam_of_orphan() -> Result<()> {
    let mut scene = Scene::with_hardware()?;
    scene.allow(&json!({"ipam": ["canned"]}))?;
    let ipam = scene.host.directory().join("cni");
    fs::create_dir_all(&ipam)?;
    let program = ipam.join("canned");
    let answer = r#"{"cniVersion":"1.1.0","ips":[{"address":"10.9.0.7/24"}]}"#;
    fs::write(
        &program,
        format!(
            "#!/bin/sh\n[ \"$CNI_COMMAND\" = ADD ] && echo '{answer}' && exit 0\n\
             [ -e {}/away ] && exit 1\nexit 0\n",
            ipam.display()
        ),
    )?;
    fs::set_permissions(
        &program,
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )?;
    let mut network = scene.moving();
    network["ipam"] = json!({"type": "canned"});
    let mut call = scene.call();
    call.path = ipam.clone().into();
    answer_of(&call, "ADD", &network)?.success()?;
    scene.pod_dies("net1")?;
    fs::write(ipam.join("away"), "")?;
    scene.pod = scene.another_pod()?;
    let next = scene.call_of(&scene.pod, "c2", "net1");
    answer_of(&next, "ADD", &scene.moving())?.success()?;
    answer_of(&next, "DEL", &scene.moving())?.success()?;
    let left = scene.host.left_behind();
    ensure!(
        left.keys().any(|entry| entry.starts_with("journal")),
        "the first has still to release its address: {left:?}"
    );
    fs::remove_file(ipam.join("away"))?;
    answer_of(&call, "DEL", &network)?.success()?;
    let left = scene.host.left_behind();
    ensure!(left.is_empty(), "{left:?}");
    Ok(())
}

/// Without the name it would be a rule for all traffic.
fn rule_of_bytes() -> Result<()> {
    let scene = Scene::furnished()?;
    let add = "ip route add 10.99.0.0/24 dev nic0 table 101; \
               ip rule add pref 950 iif \"$(printf 'ni\\377')\" lookup 101";
    run(scene.host.netns.command("sh").args(["-c", add]))?;
    let rules = || scene.host.netns.ip("rule show");
    let before = rules()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    del(&scene)?;
    ensure!(rules()? == before, "{} and not {before}", rules()?);
    Ok(())
}

/// DEL has nothing to warn of.
fn silent_del(scene: &Scene) -> Result<()> {
    let answer = del(scene)?;
    ensure!(!answer.stderr.contains(" warn "), "{}", answer.stderr);
    Ok(())
}

/// A namespace with the NIC ends some time after the pod's.
fn arrives_late() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    let holder = Holder::start(&scene.pod)?;
    scene.in_pod(&[&format!("link set net1 netns {}", holder.tid)])?;
    let hidden = holder.hide()?;
    let network = scene.moving().to_string();
    let del = Running::start(&mut scene.call().command("DEL"), network.as_bytes())?;
    sleep(Duration::from_millis(1500));
    let host = scene.host.netns.name();
    ip_in(hidden, &format!("link set net1 netns {host}"))?;
    del.answer()?.success()?;
    unchanged(&before, || scene.host_state(), "after DEL")
}

/// The host's list of devices on the bus says whether the NIC is there.
fn unplugged() -> Result<()> {
    let scene = Scene::with_hardware()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    // As of a NIC, which a kernel without one does not report.
    let state = scene.host.state();
    for (directory, is_record) in [("attachments", true), ("devices", false)] {
        let mut entries = fs::read_dir(state.join(directory))?;
        let path = entries.next().context(directory)??.path();
        if !is_record {
            fs::rename(&path, path.with_file_name(PCI.replace(':', "-")))?;
            continue;
        }
        let mut record: serde_json::Value = serde_json::from_slice(&fs::read(&path)?)?;
        record["parts"][0]["move"]["host"]["bus"] = "pci".into();
        record["parts"][0]["move"]["host"]["identity"] = json!({"busDevice": PCI, "index": 4711});
        fs::write(&path, record.to_string())?;
    }
    let devices = scene.host_root().join("sys/bus/pci/devices");
    ensure!(devices.join(PCI).exists(), "no {}", devices.display());
    let away = |when| -> Result<()> {
        let answer = answer_of(&scene.call(), "DEL", &scene.moving())?;
        refusal(&answer, &[TRY_AGAIN], &["nic0", "neither"]).context(when)?;
        Ok(())
    };
    away("the device is on its bus")?;
    fs::rename(&devices, devices.with_file_name("hidden"))?;
    away("the bus is not to be seen")?;
    fs::rename(devices.with_file_name("hidden"), &devices)?;
    fs::remove_file(devices.join(PCI))?;
    let answer = del(&scene)?;
    ensure!(
        answer.stderr.contains("nic0 is gone from the host"),
        "{}",
        answer.stderr
    );
    let left = scene.host.left_behind();
    ensure!(left.is_empty(), "{left:?}");
    Ok(())
}

/// Its pod may have given it the name of another netdev of the host.
fn neutral_name() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let log = scene.host.directory().join("log");
    scene.policy(&json!({}), &json!({"log": {"file": log, "level": "debug"}}))?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    scene.in_pod(&["link set net1 down", "link set net1 name mine"])?;
    let index = index_of(&scene.pod, "mine")?;
    fs::write(&log, "")?;
    del(&scene)?;
    let said = fs::read_to_string(&log)?;
    for step in [
        format!("rename mine to rdma-dev{index}"),
        format!("move mine to the host as rdma-dev{index}"),
        format!("rename rdma-dev{index} to nic0"),
    ] {
        ensure!(said.contains(&step), "{step}: {said}");
    }
    unchanged(&before, || scene.host_state(), "after DEL")
}

/// The host's own name of the NIC among them.
fn altnames_of_a_dead_pod() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    scene.in_pod(&[
        "link property add dev net1 altname nic0",
        "link property add dev net1 altname sneaky",
    ])?;
    scene.pod_dies("net1")?;
    silent_del(&scene)?;
    unchanged(&before, || scene.host_state(), "after DEL")
}

fn altname_taken() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    scene.in_pod(&[
        "link property add dev net1 altname peer0",
        "link property add dev net1 altname sneaky",
    ])?;
    scene.on_host(&["link property add dev peer0 altname enp59s0np0"])?;
    let answer = del(&scene)?;
    let said = |name: &str| {
        let text = format!("give alternative name {name} of nic0: ");
        answer.stderr.contains(&text)
    };
    ensure!(said("enp59s0np0"), "{}", answer.stderr);
    // The pod's are removed, whoever has them.
    ensure!(!said("peer0") && !said("sneaky"), "{}", answer.stderr);
    scene.on_host(&[
        "link property del dev peer0 altname enp59s0np0",
        "link property add dev nic0 altname enp59s0np0",
    ])?;
    unchanged(&before, || scene.host_state(), "but for the name")
}

/// As after a DEL that was killed before it forgot the attachment.
fn restored_twice() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    let only = |directory: &str| -> Result<PathBuf> {
        let mut entries = fs::read_dir(scene.host.state().join(directory))?;
        Ok(entries.next().context("empty")??.path())
    };
    let (record, claim) = (only("attachments")?, only("devices")?);
    let (text, owner) = (fs::read(&record)?, fs::read_link(&claim)?);
    silent_del(&scene)?;
    let times_down = || {
        let mut cat = scene.host.netns.command("cat");
        e2e::netns::run(cat.arg("/sys/class/net/nic0/carrier_down_count"))
    };
    let down = times_down()?;
    fs::write(&record, text)?;
    std::os::unix::fs::symlink(owner, &claim)?;
    silent_del(&scene)?;
    ensure!(times_down()? == down, "its link was interrupted");
    unchanged(&before, || scene.host_state(), "after both")
}

/// Its gateway was reached by an address whose lifetime ended in the pod.
fn refused_route() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    scene.on_host(&[
        "addr add 10.44.0.1/24 dev nic0 valid_lft 3 preferred_lft 3",
        "route add 10.45.0.0/16 via 10.44.0.254",
        "route add default via 10.44.0.254 table 202",
        "rule add from 10.9.0.1 lookup 202 pref 2000",
    ])?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    sleep(Duration::from_millis(3100));
    let answer = del(&scene)?;
    for words in [
        "restore route 10.45.0.0/16 via 10.44.0.254",
        "restore route default via 10.44.0.254 table 202",
    ] {
        ensure!(answer.stderr.contains(words), "{words}: {}", answer.stderr);
    }
    // That comes back, also without the routes of its table.
    ensure!(!answer.stderr.contains("rule 2000"), "{}", answer.stderr);
    scene.on_host(&["rule del pref 2000"])?;
    unchanged(&before, || scene.host_state(), "after DEL")
}

/// All of the NIC's state is restored.
fn unreadable(path: &str, calls: &str, warning: &str) -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    let path = format!("/proc/sys/net/{path}");
    // What is opened has the path below the host's root, what is read the kernel's.
    let below = format!("{}{path}", scene.host.root().display());
    let inject = format!("inject={calls}:error=EIO");
    let paths = ["-P", &path, "-P", &below];
    let options = [
        &["-f", "-qq", "-o", "/dev/null"],
        &paths[..],
        &["-e", &inject],
    ]
    .concat();
    let answer = bounded(
        &mut traced(&scene.call(), "DEL", &options),
        scene.moving().to_string().as_bytes(),
    )?;
    answer.success()?;
    let root = scene.host.root();
    let warning = match warning {
        "" => String::new(),
        path => format!("list {}", root.join(path).display()),
    };
    ensure!(answer.stderr.contains(&warning), "{}", answer.stderr);
    unchanged(&before, || scene.host_state(), "after DEL")
}

fn named_by_index() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    scene.pod_dies("net1")?;
    let index = index_of(&scene.host.netns, "net1")?;
    scene.on_host(&["link add nic0 type veth peer name other"])?;
    del(&scene)?;
    let name = format!("rdma-dev{index}");
    ensure!(
        index_of(&scene.host.netns, &name)? == index,
        "another has {name}"
    );
    scene.on_host(&["link del nic0"])?;
    del(&scene)?;
    unchanged(&before, || scene.host_state(), "after the repair")
}

/// A clash of names lets a pod choose a name for which the kernel keeps no settings of IPv4 and IPv6
/// (`sysctl_dev_name_is_allowed()`).
fn called(name: &str, ends: Ends) -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    let nested = scene.another_pod()?;
    nested.ip("link add net1 type veth peer name far")?;
    scene.in_pod(&[&format!(
        "link set net1 netns {} name {name}",
        nested.name()
    )])?;
    let leaves_to = match ends {
        Ends::Never => scene.pod.name(),
        Ends::BeforeDel => scene.host.netns.name(),
    };
    nested.ip(&format!("link set {name} netns {leaves_to}"))?;
    if ends == Ends::BeforeDel {
        scene.pod.delete()?;
    }
    del(&scene)?;
    unchanged(&before, || scene.host_state(), "after DEL")
}

/// Gives the NIC another index in the pod.
fn renumber(scene: &Scene) -> Result<()> {
    let index = index_of(&scene.pod, "net1")?;
    let nested = scene.another_pod()?;
    scene.in_pod(&[&format!("link set net1 netns {}", nested.name())])?;
    scene.in_pod(&[&format!(
        "link add decoy index {index} type veth peer name far"
    )])?;
    nested.ip(&format!("link set net1 netns {}", scene.pod.name()))?;
    ensure!(index_of(&scene.pod, "net1")? != index, "it has its index");
    Ok(())
}

fn index_again() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let index = index_of(&scene.host.netns, "nic0")?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    ensure!(
        index_of(&scene.pod, "net1")? == index,
        "not kept in the pod"
    );
    renumber(&scene)?;
    silent_del(&scene)?;
    ensure!(
        index_of(&scene.host.netns, "nic0")? == index,
        "another index"
    );
    unchanged(&before, || scene.host_state(), "after DEL")
}

fn warns_of_index(answer: &Answer, index: u64) -> Result<()> {
    let words = format!("not {index} as before: rules of nftables and tc that name the index");
    ensure!(answer.stderr.contains(&words), "{}", answer.stderr);
    Ok(())
}

fn index_taken() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let index = index_of(&scene.host.netns, "nic0")?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    scene.on_host(&[&format!(
        "link add other index {index} type veth peer name far"
    )])?;
    warns_of_index(&del(&scene)?, index)?;
    scene.on_host(&["link del other"])?;
    unchanged(&before, || scene.host_state(), "after DEL")
}

fn index_after_pod() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let index = index_of(&scene.host.netns, "nic0")?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    renumber(&scene)?;
    scene.pod_dies("net1")?;
    warns_of_index(&del(&scene)?, index)?;
    unchanged(&before, || scene.host_state(), "after DEL")
}
