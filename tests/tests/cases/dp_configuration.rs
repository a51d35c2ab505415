//! The configuration file while the daemon runs: wrong, replaced, or no file at all.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use e2e::case;
use e2e::harness::Case;
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::dp_hostile::{EXCLUSIVE, Scene, WAIT_TIMEOUT};

pub(crate) const CASES: &[Case] = &[
    case!(at_the_start_the_last_good_file_replaces_a_wrong_one, Root),
    case!(a_replaced_configuration_directory_is_noticed, Root),
    case!(a_second_configuration_beside_it_is_named, Root),
    case!(
        what_is_no_configuration_file_changes_nothing_and_freezes_nothing,
        Root
    ),
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
    ensure!(
        daemon.log().contains("configuration rejected"),
        "{}",
        daemon.log()
    );
    scene.until("/readyz", &daemon, |_, body| {
        body.contains("configuration file is refused")
    })?;
    // Mended, it is in force without a restart.
    fs::write(&scene.file, EXCLUSIVE.replace("rdma/nic", "rdma/other"))?;
    scene.wait(&kubelet, &daemon, "rdma/other", 2)?;
    scene.until("/readyz", &daemon, |status, body| {
        status == 200 && !body.contains("refused")
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
        let reported = |status: u16, body: &str| status == 200 && body.contains("file is refused");
        scene.until("/readyz", &daemon, reported).context(what)?;
        scene.wait(&kubelet, &daemon, "rdma/nic", 2).context(what)?;
        remove()?;
        fs::write(&scene.file, EXCLUSIVE)?;
        let mended = |status: u16, body: &str| status == 200 && !body.contains("refused");
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
