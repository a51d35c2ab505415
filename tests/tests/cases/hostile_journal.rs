//! One record of the journal that cannot be read stops nothing for all others.

use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::cni::{Answer, Call};
use e2e::scene::{Scene, bounded};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::{Value, json};

cases! {
    a_child_reads_no_record_of_another_attachment: Macvlan => unread_records();
    an_empty_record_stops_nothing: Macvlan => damaged(|path, _| Ok(fs::write(path, "")?));
    a_truncated_record_stops_nothing: Macvlan => damaged(|path, _| {
        let bytes = fs::read(path)?;
        Ok(fs::write(path, bytes.get(..bytes.len() / 2).unwrap_or_default())?)
    });
    a_record_of_other_bytes_stops_nothing: Macvlan => damaged(|path, _| Ok(fs::write(path, [0xff; 4096])?));
    a_record_of_a_newer_version_stops_nothing: Macvlan => damaged(|path, _| change(path, "version", &json!(999)));
    a_record_of_no_version_stops_nothing: Macvlan => damaged(|path, _| change(path, "version", &json!("one")));
    a_record_with_wrong_types_stops_nothing: Macvlan => damaged(|path, _| {
        Ok(fs::write(path, r#"{"version":1,"containerId":7,"network":[],"ifname":{},"kind":null}"#)?)
    });
    a_record_that_is_a_list_stops_nothing: Macvlan => damaged(|path, _| Ok(fs::write(path, "[]")?));
    a_record_of_deep_nesting_stops_nothing: Macvlan =>
        damaged(|path, _| Ok(fs::write(path, "[".repeat(200_000))?));
    a_record_of_a_gibibyte_stops_nothing: Macvlan =>
        damaged(|path, _| Ok(File::create(path)?.set_len(1 << 30)?));
    a_fifo_in_a_records_place_stops_nothing: Macvlan => damaged(|path, _| {
        fs::remove_file(path)?;
        Ok(mkfifo(path, Mode::S_IRWXU)?)
    });
    a_directory_in_a_records_place_stops_nothing: Macvlan => damaged(|path, _| {
        fs::remove_file(path)?;
        Ok(fs::create_dir(path)?)
    });
    a_link_to_nothing_in_a_records_place_stops_nothing: Macvlan => damaged(|path, _| {
        fs::remove_file(path)?;
        Ok(symlink("/nonexistent", path)?)
    });
    a_link_to_itself_in_a_records_place_stops_nothing: Macvlan => damaged(|path, _| {
        fs::remove_file(path)?;
        Ok(symlink(path, path)?)
    });
    a_link_to_another_record_stops_nothing: Macvlan => damaged(|path, other| {
        fs::remove_file(path)?;
        Ok(symlink(other, path)?)
    });
    a_link_to_a_device_that_never_ends_stops_nothing: Macvlan => damaged(|path, _| {
        fs::remove_file(path)?;
        Ok(symlink("/dev/zero", path)?)
    });
    a_record_that_is_anothers_copy_stops_nothing: Macvlan => damaged(|path, other| {
        fs::copy(other, path)?;
        Ok(())
    });
    a_file_with_an_odd_name_beside_records_stops_nothing: Macvlan => damaged(|path, _| {
        let directory = path.parent().context("no directory")?;
        for name in [&b"\xff\xfe"[..], b"a\x1b[31m", b".tmp", b"..", b"x@y", b"@@@", b"a@b@c@d@e"] {
            if name != b".." {
                fs::write(directory.join(std::ffi::OsStr::from_bytes(name)), "{")?;
            }
        }
        Ok(())
    });
    a_state_directory_full_of_rubbish_stops_nothing: Macvlan => damaged(|path, _| {
        let directory = path.parent().context("no directory")?;
        for number in 0..500 {
            fs::write(directory.join(format!("rail0@x{number}@net1")), "{")?;
        }
        Ok(())
    });
    a_record_that_points_elsewhere_reaches_nothing: Macvlan => damaged(|path, _| {
        for (key, value) in [
            ("netns", json!("/proc/self/ns/net")),
            ("ifname", json!("peer0")),
            ("sysctls", json!([["../../../etc/passwd", "x"]])),
        ] {
            change(path, key, &value)?;
        }
        Ok(())
    });
}

/// Sets one key of a record, wherever in it.
fn change(path: &Path, key: &str, value: &Value) -> Result<()> {
    let mut record: Value = serde_json::from_slice(&fs::read(path)?)?;
    record[key] = value.clone();
    Ok(fs::write(path, record.to_string())?)
}

/// The record of a container: the one file of the attachments whose name has its ID.
fn record_of(scene: &Scene, container: &str) -> Result<PathBuf> {
    let directory = scene.host.state().join("attachments");
    let mut found = Vec::new();
    for entry in fs::read_dir(&directory)? {
        let path = entry?.path();
        let named = path
            .file_name()
            .is_some_and(|name| name.to_string_lossy().contains(&format!("@{container}@")));
        if named && path.is_file() {
            found.push(path);
        }
    }
    ensure!(found.len() == 1, "records of {container}: {found:?}");
    found.pop().context("no record")
}

/// A call that may have this much memory: a record is never read without end.
fn answer_of(call: &Call, command: &str, network: &Value) -> Result<Answer> {
    const MEMORY: &str = "--as=268435456";
    let mut limited = Call {
        plugin: "prlimit".into(),
        ..call.clone()
    }
    .command(command);
    limited.args([MEMORY, "--"]).arg(&call.plugin);
    bounded(&mut limited, network.to_string().as_bytes()).with_context(|| command.to_owned())
}

fn damaged(damage: impl Fn(&Path, &Path) -> Result<()>) -> Result<()> {
    let scene = Scene::furnished()?;
    scene.host.add_nic("nic1", "peer1")?;
    let mut upon_nic1 = scene.child();
    upon_nic1["master"] = "nic1".into();
    let pods = [
        scene.another_pod()?,
        scene.another_pod()?,
        scene.another_pod()?,
        scene.another_pod()?,
    ];
    let call = |index: usize| scene.call_of(&pods[index], &format!("c{index}"), "net1");
    let there = |index: usize| pods[index].ip("link show net1").is_ok();
    for index in 0..3 {
        answer_of(&call(index), "ADD", &upon_nic1)?.success()?;
    }
    // The first is damaged; the second ends as it should, the third died with its namespace.
    super::hostile_bytes::age(&scene)?;
    let (first, second) = (record_of(&scene, "c0")?, record_of(&scene, "c1")?);
    let second_text = fs::read(&second)?;
    damage(&first, &second)?;
    pods[2].delete()?;

    let started = Instant::now();
    answer_of(&call(3), "ADD", &upon_nic1)?
        .success()
        .context("ADD of another")?;
    answer_of(&call(3), "DEL", &upon_nic1)?
        .success()
        .context("DEL of another")?;
    answer_of(&call(3), "ADD", &scene.moving())?
        .success()
        .context("ADD by move of another")?;
    answer_of(&call(3), "STATUS", &upon_nic1)?;
    let listed = scene.listed("pods")?;
    let lists = |container: &str| listed.iter().any(|entry| entry["sandbox"] == container);
    ensure!(
        lists("c1") && lists("c3"),
        "the others are not listed: {listed:?}"
    );

    let reclaimed = scene.tool("rdmactl", &["reclaim"])?;
    let listed = scene.listed("pods")?;
    let died = listed.iter().any(|entry| entry["sandbox"] == "c2");
    ensure!(
        !died,
        "reclaim did not undo the dead pod's attachment: {} {}",
        reclaimed.stdout,
        reclaimed.stderr
    );
    ensure!(there(1) && there(3), "reclaim took from the living");

    if second.is_file() {
        ensure!(
            fs::read(&second)? == second_text,
            "the other's record was written to"
        );
    }
    let mut valid = upon_nic1.clone();
    valid["cni.dev/valid-attachments"] =
        json!([{"containerID": "c0", "ifname": "net1"}, {"containerID": "c3", "ifname": "net1"}]);
    answer_of(&call(1), "GC", &valid)?;
    ensure!(!there(1), "GC did not take what the runtime does not know");
    ensure!(there(3), "GC took what the runtime knows");
    answer_of(&call(1), "DEL", &upon_nic1)?
        .success()
        .context("DEL of what GC took")?;
    answer_of(&call(3), "DEL", &scene.moving())?
        .success()
        .context("DEL of the moved")?;
    ensure!(
        scene
            .host
            .netns
            .ip("addr show nic0")?
            .contains("10.9.0.1/24"),
        "nic0 is not back"
    );
    // Of the damaged one itself only an end is asked.
    answer_of(&call(0), "DEL", &upon_nic1)?;
    ensure!(
        started.elapsed() < Duration::from_secs(15),
        "it took {:?}",
        started.elapsed()
    );
    ensure!(
        scene.host.netns.ip("link show peer0").is_ok(),
        "a host link is gone"
    );
    Ok(())
}

/// What an ADD of a child costs does not grow with the number of pods on the node.
fn unread_records() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    let attachments = scene.host.state().join("attachments");
    let theirs: Vec<_> = (0..20)
        .map(|pod| attachments.join(format!("rail0@other{pod}@net1")))
        .collect();
    for record in &theirs {
        fs::write(record, "no record at all")?;
    }
    let other = scene.another_pod()?;
    let call = scene.call_of(&other, "c2", "net1");
    // Each record that is read and cannot be used is a warning.
    let answer = answer_of(&call, "ADD", &scene.child())?;
    answer.success()?;
    ensure!(!answer.stderr.contains("@other"), "{}", answer.stderr);
    answer_of(&call, "DEL", &scene.child())?.success()?;
    for record in &theirs {
        fs::remove_file(record)?;
    }
    scene.del_returns(&scene.child(), &before)
}
