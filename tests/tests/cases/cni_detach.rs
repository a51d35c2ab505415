//! Records and claims of moved NICs that outlived what they say: those of an earlier boot, of a NIC
//! that another pod has by now, of one that waits for its name, of a VF whose PF is away.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::host_state::{state, unchanged};
use e2e::scene::{Scene, TRY_AGAIN, answer_of, refusal};
use hca_trees::{NetdevSpec, On, PciSpec};
use serde_json::{Value, json};

cases! {
    a_del_after_a_reboot_restores_nothing_and_ends_its_claim => after_reboot();
    a_del_after_a_reboot_leaves_the_claim_of_another_pod => late("an earlier boot");
    a_nic_returns_though_the_boot_cannot_be_read => unknown_boot();
    a_late_del_leaves_a_nic_that_another_pod_claims => late("");
    a_record_that_waits_for_a_name_holds_nothing_else => waits();
    a_vf_with_a_pods_guid_is_no_other_pods_until_its_pf_is_back =>
        pf_away(&json!({"nodeGuid": "0200:0000:0000:0001", "portGuid": "0200:0000:0000:0001"}));
    a_vf_with_a_pods_settings_is_no_other_pods_until_its_pf_is_back =>
        pf_away(&json!({"trust": true}));
    check_names_a_vf_setting_that_is_lost => lost_setting();
}

/// The only record of the journal.
fn record_file(scene: &Scene) -> Result<PathBuf> {
    let mut entries = fs::read_dir(scene.host.state().join("attachments"))?;
    Ok(entries.next().context("a record")??.path())
}

fn record(scene: &Scene) -> Result<Value> {
    Ok(serde_json::from_slice(&fs::read(record_file(scene)?)?)?)
}

/// What the kernel and the administrator's network service made of the NIC at the boot stays.
fn after_reboot() -> Result<()> {
    let scene = Scene::furnished()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    let mut record = record(&scene)?;
    record["boot"] = "an earlier boot".into();
    fs::write(record_file(&scene)?, record.to_string())?;
    scene.pod_dies("net1")?;
    scene.on_host(&[
        "link set net1 name nic0",
        "link set nic0 mtu 1300",
        "link set nic0 up",
        "addr add 10.66.0.1/24 dev nic0",
    ])?;
    let booted = state(&scene.host.netns)?;
    answer_of(&scene.call(), "DEL", &scene.moving())?.success()?;
    unchanged(&booted, || state(&scene.host.netns), "after DEL")?;
    let left = scene.host.left_behind();
    ensure!(left.is_empty(), "{left:?}");
    Ok(())
}

/// As for want of memory, or where a container's procfs hides it. What the host's procfs does not
/// say is no evidence of another boot.
fn unknown_boot() -> Result<()> {
    let scene = Scene::with_hardware()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    let proc = scene.host_root().join("proc");
    fs::remove_file(&proc)?;
    fs::create_dir_all(proc.join("sys"))?;
    for entry in ["self", "thread-self", "net", "stat", "sys/net"] {
        symlink(Path::new("/proc").join(entry), proc.join(entry))?;
    }
    scene.del_returns(&scene.moving(), &before)
}

/// The DEL of an attachment whose NIC is another pod's by now. `boot` is the record's, where it is
/// not the present one.
fn late(boot: &str) -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    let (file, mut record) = (record_file(&scene)?, record(&scene)?);
    answer_of(&scene.call(), "DEL", &scene.moving())?.success()?;
    // As of an ADD that was killed before it took the NIC.
    if !boot.is_empty() {
        record["boot"] = boot.into();
    }
    fs::write(&file, record.to_string())?;
    let other = scene.another_pod()?;
    let next = scene.call_of(&other, "c2", "net1");
    answer_of(&next, "ADD", &scene.moving())?.success()?;
    let (inside, mut held) = (state(&other)?, scene.host.left_behind());
    ensure!(
        held.keys().any(|entry| entry.starts_with("claim")),
        "{held:?}"
    );
    answer_of(&scene.call(), "DEL", &scene.moving())?.success()?;
    unchanged(&inside, || state(&other), "in the other pod")?;
    held.remove("journal rail0@c1@net1");
    ensure!(
        scene.host.left_behind() == held,
        "{:?} and not {held:?}",
        scene.host.left_behind()
    );
    answer_of(&next, "DEL", &scene.moving())?.success()?;
    unchanged(&before, || scene.host_state(), "after both")
}

fn waits() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let mut leased = scene.moving();
    leased["ipam"] = scene.host.own_ipam("10.9.0.0/24", "10.9.0.100", &json!({}));
    for (network, held) in [(scene.moving(), "rules"), (leased, "ipam")] {
        answer_of(&scene.call(), "ADD", &network)?.success()?;
        let mut journalled = record(&scene)?;
        let config = |of: &Value| of["parts"][0]["move"]["interface"]["config"].clone();
        let is_held = |of: &Value| of.get(held).is_some() || config(of).get(held).is_some();
        ensure!(is_held(&journalled), "no {held}: {journalled}");
        // As of a NIC whose RDMA device went along.
        journalled["parts"][0]["move"]["rdma"] = json!([{"name": "mlx5_0", "index": 7}]);
        fs::write(record_file(&scene)?, journalled.to_string())?;
        scene.on_host(&["link add nic0 type veth peer name other"])?;
        answer_of(&scene.call(), "DEL", &network)?.success()?;
        let rest = record(&scene)?;
        let part = &rest["parts"][0]["move"];
        ensure!(part["returned"] == "name", "{rest}");
        for key in ["ipam", "rules", "rdma", "slots"] {
            let has_none = [&rest, part, &config(&rest)]
                .iter()
                .all(|of| of.get(key).is_none());
            ensure!(has_none, "it has {key}: {rest}");
        }
        scene.on_host(&["link del nic0"])?;
        answer_of(&scene.call(), "DEL", &network)?.success()?;
        unchanged(&before, || scene.host_state(), "after the repair")?;
    }
    Ok(())
}

const PF: &str = "0000:99:00.0";

/// As ADD writes it of a VF that it sets something of.
fn write_vf(scene: &Scene, set: &Value) -> Result<()> {
    let mut journalled = record(scene)?;
    journalled["parts"][0]["move"]["host"]["vf"] =
        json!({"pf": PF, "number": 0, "before": {}, "set": set, "driver": "mlx5_core"});
    fs::write(record_file(scene)?, journalled.to_string())?;
    Ok(())
}

/// A netdev on the PF's PCI function.
fn return_pf(scene: &Scene) -> Result<()> {
    let tree = scene.tree()?;
    tree.pci(&PciSpec {
        address: PF,
        ..PciSpec::MLX5
    });
    tree.netdev(&NetdevSpec {
        name: "peer0",
        on: On::Pci(PF),
        ..NetdevSpec::default()
    });
    Ok(())
}

fn lost_setting() -> Result<()> {
    let scene = Scene::with_hardware()?;
    let mut network = scene.moving();
    network["prevResult"] = answer_of(&scene.call(), "ADD", &network)?.success()?;
    write_vf(&scene, &json!({"trust": true}))?;
    answer_of(&scene.call(), "CHECK", &network)?.success()?;
    return_pf(&scene)?;
    let checked = answer_of(&scene.call(), "CHECK", &network)?;
    refusal(&checked, &[104], &["nic0", "trust on"])?;
    answer_of(&scene.call(), "DEL", &network)?.success()?;
    let left = scene.host.left_behind();
    ensure!(left.is_empty(), "{left:?}");
    Ok(())
}

/// The first DEL says it, and the pod ends all the same.
fn pf_away(set: &Value) -> Result<()> {
    let scene = Scene::with_hardware()?;
    let before = state(&scene.host.netns)?;
    let mut leased = scene.moving();
    leased["ipam"] = scene.host.own_ipam("10.9.0.0/24", "10.9.0.100", &json!({}));
    answer_of(&scene.call(), "ADD", &leased)?.success()?;
    write_vf(&scene, set)?;

    let said = answer_of(&scene.call(), "DEL", &leased)?;
    refusal(&said, &[TRY_AGAIN], &["nic0", PF, "reclaim"])?;
    for _ in 0..2 {
        let rest = record(&scene)?;
        ensure!(rest["parts"][0]["move"]["returned"] == "vf", "{rest}");
        ensure!(rest.get("ipam").is_none(), "it has its lease: {rest}");
        answer_of(&scene.call(), "DEL", &leased)?.success()?;
    }
    let other = scene.host.pod()?;
    let next = scene.call_of(&other, "c2", "net1");
    refusal(
        &answer_of(&next, "ADD", &scene.moving())?,
        &[TRY_AGAIN],
        &["nic0", PF, "c1"],
    )?;
    let host = || state(&scene.host.netns);
    unchanged(&before, host, "while the PF is away")?;

    return_pf(&scene)?;
    // The VF stands on no function here, and has its driver.
    fs::create_dir(scene.host_root().join("sys/bus/pci/devices/driver"))?;
    answer_of(&next, "ADD", &scene.moving())?.success()?;
    answer_of(&next, "DEL", &scene.moving())?.success()?;
    unchanged(&before, host, "after both")?;
    let left = scene.host.left_behind();
    ensure!(left.is_empty(), "{left:?}");
    Ok(())
}
