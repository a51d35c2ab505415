//! Odd hosts and what a dead pod leaves on them: settings of all interfaces, names, clocks, full and
//! read-only disks.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::host_state::unchanged;
use e2e::netns::{Netns, run};
use e2e::scene::{INVALID_ENVIRONMENT, INVALID_NETWORK, Scene, answer_of, refusal};
use serde_json::{Value, json};

use super::hostile_bytes::age;

cases! {
    a_nic_called_all_changes_no_setting_of_all_interfaces => called("all");
    a_nic_called_default_changes_no_setting_of_new_interfaces => called("default");
    an_interface_called_all_is_refused => ifname("all");
    an_interface_called_default_is_refused => ifname("default");
    a_name_that_a_dead_pod_chose_does_not_stay_on_the_host => chosen_name();
    an_attachment_from_before_the_clock_was_set_back_is_reclaimed => clock_set_back();
    a_nic_comes_back_though_the_state_directory_is_read_only => read_only();
    a_full_disk_keeps_no_nic_and_no_lease => full();
    an_rdma_device_like_a_path_is_only_a_name => rdma_device_like_a_path();
}

/// The settings of a namespace that are of no interface in particular.
fn general_settings(netns: &Netns) -> Result<Vec<(PathBuf, String)>> {
    netns.enter(|| {
        let mut all = Vec::new();
        for group in ["ipv4/conf", "ipv6/conf", "ipv4/neigh", "ipv6/neigh"] {
            for name in ["all", "default"] {
                let directory = Path::new("/proc/sys/net").join(group).join(name);
                for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
                    let value = fs::read_to_string(entry.path()).unwrap_or_default();
                    all.push((entry.path(), value));
                }
            }
        }
        all.sort();
        Ok(all)
    })
}

/// The kernel gives no interface the name of the settings of all of them, but one whose MTU is too
/// small for IPv6: so a NIC of a dead pod can have it, and its own name may be taken on the host.
fn called(name: &str) -> Result<()> {
    let scene = Scene::furnished()?;
    scene.on_host(&[
        "sysctl ipv4/conf/nic0/forwarding 1",
        "sysctl ipv4/conf/nic0/proxy_arp 1",
        "sysctl ipv6/conf/nic0/accept_ra 2",
    ])?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    scene.in_pod(&[
        "link set net1 down",
        "link set net1 mtu 1000",
        &format!("link set net1 name {name}"),
    ])?;
    scene.pod_dies(name)?;
    scene.on_host(&["link add nic0 type veth peer name other"])?;
    let settings = general_settings(&scene.host.netns)?;
    ensure!(settings.len() > 50, "{settings:?}");
    age(&scene)?;
    scene.tool("rdmactl", &["reclaim"])?;
    let now = general_settings(&scene.host.netns)?;
    let changed: Vec<_> = settings
        .iter()
        .zip(&now)
        .filter(|(was, is)| was != is)
        .collect();
    ensure!(
        changed.is_empty() && settings.len() == now.len(),
        "changed: {changed:?}"
    );
    scene.on_host(&["link del nic0"])?;
    scene.tool("rdmactl", &["reclaim"])?;
    unchanged(&before, || scene.host_state(), "after the repair")?;
    ensure!(
        settings == general_settings(&scene.host.netns)?,
        "changed by the repair"
    );
    Ok(())
}

fn ifname(name: &str) -> Result<()> {
    let scene = Scene::furnished()?;
    scene.on_host(&["link set nic0 mtu 1000"])?;
    let settings = general_settings(&scene.pod)?;
    let before = scene.host_state()?;
    let call = scene.call_of(&scene.pod, "c1", name);
    for network in [scene.moving(), scene.child()] {
        let answer = answer_of(&call, "ADD", &network)?;
        refusal(&answer, &[INVALID_ENVIRONMENT], &["CNI_IFNAME", name])?;
        answer_of(&call, "DEL", &network)?.success()?;
        unchanged(&before, || scene.host_state(), "after DEL")?;
    }
    ensure!(
        settings == general_settings(&scene.pod)?,
        "settings of the pod"
    );
    Ok(())
}

/// The name of a NIC that is away, under which a network of another tenant asks for it.
fn chosen_name() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    scene.in_pod(&["link set net1 down", "link set net1 name uplink"])?;
    scene.pod_dies("uplink")?;
    scene.on_host(&["link add nic0 type veth peer name other"])?;
    age(&scene)?;
    scene.tool("rdmactl", &["reclaim"])?;
    ensure!(
        scene.host.netns.ip("link show uplink").is_err(),
        "the pod's name is still there"
    );
    scene.on_host(&["link del nic0"])?;
    scene.tool("rdmactl", &["reclaim"])?;
    unchanged(&before, || scene.host_state(), "after the repair")
}

/// Changes every record of the journal.
fn change_records(scene: &Scene, change: impl Fn(&mut Value)) -> Result<()> {
    for entry in fs::read_dir(scene.host.state().join("attachments"))? {
        let path = entry?.path();
        let mut record: Value = serde_json::from_slice(&fs::read(&path)?)?;
        change(&mut record);
        fs::write(&path, record.to_string())?;
    }
    Ok(())
}

fn clock_set_back() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let mut network = scene.moving();
    network["ipam"] = scene.host.own_ipam("10.9.0.0/24", "10.9.0.100", &json!({}));
    answer_of(&scene.call(), "ADD", &network)?.success()?;
    // Written by a clock that was years ahead when the node had just booted.
    change_records(&scene, |record| {
        record["created"] = json!(4_000_000_000_u64)
    })?;
    scene.pod_dies("net1")?;
    let answer = scene.tool("rdmactl", &["reclaim"])?;
    ensure!(answer.status.success(), "{}", answer.stderr);
    unchanged(&before, || scene.host_state(), "after reclaim")
}

/// A file system over the state directory, until it is dropped.
struct Mounted(PathBuf);

impl Mounted {
    fn tmpfs(at: &Path, options: &str) -> Result<Self> {
        fs::create_dir_all(at)?;
        run(Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(at))?;
        Ok(Self(at.to_owned()))
    }

    fn remount(&self, options: &str) -> Result<()> {
        run(Command::new("mount")
            .args(["-o", &format!("remount,{options}")])
            .arg(&self.0))
        .map(drop)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = run(Command::new("umount").args(["-l"]).arg(&self.0));
    }
}

/// As after an error of the disk. What is done cannot be written down; the NIC is not kept for that.
fn read_only() -> Result<()> {
    let scene = Scene::furnished()?;
    let mounted = Mounted::tmpfs(&scene.host.state(), "mode=0700")?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    mounted.remount("ro")?;
    let answer = answer_of(&scene.call(), "DEL", &scene.moving())?;
    refusal(&answer, &[], &["ead-only file system"])?;
    ensure!(
        scene
            .host
            .netns
            .ip("addr show nic0")?
            .contains("10.9.0.1/24"),
        "the NIC is not back: {}",
        answer.stdout
    );
    mounted.remount("rw")?;
    scene.del_returns(&scene.moving(), &before)
}

fn full() -> Result<()> {
    let scene = Scene::furnished()?;
    let mounted = Mounted::tmpfs(&scene.host.state(), "mode=0700,size=64k,nr_inodes=200")?;
    let before = scene.host_state()?;
    let filler = scene.host.state().join("filler");
    for left in [0_usize, 4096, 8192, 12288, 16384, 24576] {
        // Fills the disk but for some pages.
        let room = 64 * 1024 - left;
        let written = fs::write(&filler, vec![0_u8; room]);
        if written.is_err() && left > 0 {
            drop(written);
        }
        let mut network = scene.moving();
        network["ipam"] = scene.host.own_ipam("10.9.0.0/24", "10.9.0.100", &json!({}));
        for network in [scene.moving(), scene.child(), network] {
            let answer = answer_of(&scene.call(), "ADD", &network)?;
            let deleted = answer_of(&scene.call(), "DEL", &network)?;
            deleted
                .success()
                .with_context(|| format!("DEL with {left} bytes left"))?;
            if !answer.status.success() {
                let (code, message) = answer.refusal()?;
                ensure!(
                    message.contains("No space left"),
                    "{left} bytes: {code} {message}"
                );
            }
            let mut now = scene.host_state()?;
            now.retain(|key, _| !key.contains("filler"));
            e2e::cni_host::same(&before, &now, &format!("with {left} bytes left"))?;
        }
        fs::remove_file(&filler)?;
    }
    drop(mounted);
    Ok(())
}

fn rdma_device_like_a_path() -> Result<()> {
    let scene = Scene::with_hardware()?;
    for name in [
        "../infiniband/mlx5_0",
        "mlx5_0/../mlx5_0",
        "./mlx5_0",
        "mlx5_0/",
        "..",
        ".",
        "",
        "../net/nic0/device/infiniband/mlx5_0",
        "mlx5_0\u{0}",
    ] {
        for attach in ["move", "rdma-only"] {
            let mut network = scene.network(&json!({"attach": attach, "rdmaDevice": name}));
            network["prevResult"] = json!({"cniVersion": "1.1.0", "interfaces": []});
            scene
                .refuses(&network, &[INVALID_NETWORK], &[])
                .with_context(|| format!("{attach} {name:?}"))?;
        }
    }
    Ok(())
}
