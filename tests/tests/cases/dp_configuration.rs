//! The configuration file while the daemon runs: wrong, replaced, or no file at all.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::case;
use e2e::daemon::Machine;
use e2e::harness::Case;
use e2e::netns::Netns;
use nix::sched::{CloneFlags, setns};
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::dp_hostile::{EXCLUSIVE, Scene, WAIT_TIMEOUT, shared};

pub(crate) const CASES: &[Case] = &[
    case!(at_the_start_the_last_good_file_replaces_a_wrong_one, Root),
    case!(a_replaced_configuration_directory_is_noticed, Root),
    case!(a_second_configuration_beside_it_is_named, Root),
    case!(
        what_is_no_configuration_file_changes_nothing_and_freezes_nothing,
        Root
    ),
    case!(a_pools_mtu_is_set_when_its_netdevs_are_set_up, Root, Netns),
];

fn at_the_start_the_last_good_file_replaces_a_wrong_one() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let kubelet = scene.machine.kubelet()?;
    let mut daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    daemon.signal(Signal::SIGTERM)?;
    daemon.ended(WAIT_TIMEOUT)?;
    fs::write(&scene.file, "version: 1\npols: []\n")?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    ensure!(daemon.log().contains("config rejected"), "{}", daemon.log());
    scene.until("/readyz", &daemon, |_, body| {
        body.contains("config rejected, still running on the last good one")
    })?;
    // Mended, it is in force without a restart.
    fs::write(&scene.file, EXCLUSIVE.replace("rdma/nic", "rdma/other"))?;
    scene.wait(&kubelet, &daemon, "rdma/other", 2)?;
    scene.until("/readyz", &daemon, |status, body| {
        status == 200 && !body.contains("rejected")
    })?;
    Ok(())
}

/// As of a ConfigMap that was merged by the peer's key, `config.json`, with one of ours.
fn a_second_configuration_beside_it_is_named() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let kubelet = scene.machine.kubelet()?;
    ensure!(scene.file.ends_with("config.yaml"), "{:?}", scene.file);
    let beside = scene.file.with_file_name("config.json");
    fs::write(&beside, "{}")?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    let log = daemon.log();
    ensure!(
        log.contains(&format!("{} is there and is not read", beside.display())),
        "{log}"
    );
    Ok(())
}

/// Then there are no events from it any more.
fn a_replaced_configuration_directory_is_noticed() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    let directory = scene.file.parent().context("no directory")?;
    for resource in ["rdma/second", "rdma/third"] {
        fs::rename(
            directory,
            directory.with_extension(resource.replace('/', "-")),
        )?;
        fs::create_dir(directory)?;
        fs::write(&scene.file, EXCLUSIVE.replace("rdma/nic", resource))?;
        scene.wait(&kubelet, &daemon, resource, 2)?;
    }
    Ok(())
}

/// Whatever is put in the place of the file: what is in force stays, /readyz reports it, and a
/// file that comes after it is read. A FIFO blocks who opens it for reading.
fn what_is_no_configuration_file_changes_nothing_and_freezes_nothing() -> Result<()> {
    type Put = fn(&Path) -> Result<()>;
    let puts: [(&str, Put); 7] = [
        ("a FIFO", |file| Ok(mkfifo(file, Mode::S_IRUSR)?)),
        ("a directory", |file| Ok(fs::create_dir(file)?)),
        ("a link to itself", |file| {
            Ok(std::os::unix::fs::symlink(file, file)?)
        }),
        ("an endless device", |file| {
            Ok(std::os::unix::fs::symlink("/dev/zero", file)?)
        }),
        ("nothing", |_| Ok(())),
        ("a file that is too long", |file| {
            Ok(fs::write(file, "#".repeat(3 << 20))?)
        }),
        ("no text", |file| {
            Ok(fs::write(file, b"version: 1\n\xff\xfe")?)
        }),
    ];
    let scene = Scene::new(EXCLUSIVE)?;
    let kubelet = scene.machine.kubelet()?;
    let mut daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    let remove = || match fs::symlink_metadata(&scene.file) {
        Ok(meta) if meta.is_dir() => fs::remove_dir(&scene.file),
        Ok(_) => fs::remove_file(&scene.file),
        Err(_) => Ok(()),
    };
    for (what, put) in puts {
        remove()?;
        put(&scene.file).context(what)?;
        let reported = |status: u16, body: &str| status == 200 && body.contains("config rejected");
        scene.until("/readyz", &daemon, reported).context(what)?;
        scene.wait(&kubelet, &daemon, "rdma/nic", 2).context(what)?;
        remove()?;
        fs::write(&scene.file, EXCLUSIVE)?;
        let mended = |status: u16, body: &str| status == 200 && !body.contains("rejected");
        scene.until("/readyz", &daemon, mended).context(what)?;
    }
    // A daemon that starts then has what is kept.
    daemon.signal(Signal::SIGTERM)?;
    daemon.ended(WAIT_TIMEOUT)?;
    remove()?;
    mkfifo(&scene.file, Mode::S_IRUSR)?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)
}

/// On netdevs of a namespace that the machine's files describe. The kernel refuses the MTU of rdma1,
/// a macvlan on a netdev with a lower one.
fn a_pools_mtu_is_set_when_its_netdevs_are_set_up() -> Result<()> {
    let (machine, host) = (Machine::new()?, Netns::new("mtu")?);
    // For the daemons that this thread starts.
    setns(fs::File::open(host.path())?, CloneFlags::CLONE_NEWNET)?;
    host.ip("link add rdma0 type veth peer name peer")?;
    host.ip("link add rdma1 link peer type macvlan")?;
    let tree = &machine.tree;
    let show = |netdev: &str| -> Result<(u64, u64, bool)> {
        let link = host.ip_json(&format!("link show {netdev}"))?;
        let number = |key| link[0][key].as_u64().context("no number");
        let flags = link[0]["flags"].as_array().context("no flags")?;
        Ok((
            number("ifindex")?,
            number("mtu")?,
            flags.contains(&"UP".into()),
        ))
    };
    for netdev in ["rdma0", "rdma1"] {
        let (index, mtu, _) = show(netdev)?;
        for attribute in ["ifindex", "iflink"] {
            tree.file(format!("/sys/class/net/{netdev}/{attribute}"), index);
        }
        tree.file(format!("/sys/class/net/{netdev}/mtu"), mtu);
        tree.file(format!("/sys/class/net/{netdev}/flags"), "0x1002");
    }
    tree.file("/proc/self/net/dev", "\n\nrdma0: 0\nrdma1: 0\n");
    let _kubelet = machine.kubelet()?;
    let pool = shared().replace("  shares", "  linkUp: {mtu: 4200}\n  shares");
    let daemon = machine.daemon(&pool)?;
    let end = Instant::now() + WAIT_TIMEOUT;
    while !(show("rdma0")?.2 && show("rdma1")?.2) {
        ensure!(Instant::now() < end, "not up: {}", daemon.log());
        thread::sleep(Duration::from_millis(20));
    }
    ensure!((show("rdma0")?.1, show("rdma1")?.1) == (4200, 1500));
    let refused = "set the MTU of rdma1 to 4200 (linkUp of rdma/shared): ";
    ensure!(daemon.log().contains(refused), "{}", daemon.log());
    Ok(())
}
