//! `CNIDeviceInfoFile`, a path that a tenant may write: no other file is ever written.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::scene::{PCI, Scene, answer_of};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::{Value, json};

cases! {
    the_attachments_own_file_is_written => own();
    a_file_elsewhere_is_not_written => not_written(|scene| {
        let path = scene.host.directory().join("ns-rail0-c1_net1");
        fs::write(&path, THEIRS)?;
        Ok((path.display().to_string(), path))
    });
    a_new_file_elsewhere_is_not_made => not_made("/etc/ns-rail0-c1_net1");
    a_new_file_in_cron_is_not_made => not_made("/etc/cron.d/c1_net1");
    a_file_by_two_dots_is_not_written => not_written(|scene| {
        let path = scene.host_root().join("run/c1_net1");
        fs::write(&path, THEIRS)?;
        Ok((format!("/{FILES}/../../../../c1_net1"), path))
    });
    a_file_by_two_dots_and_back_is_written_or_refused => not_written(|scene| {
        let path = scene.host_root().join("run/k8s.cni.cncf.io/devinfo/other-c1_net1");
        fs::write(&path, THEIRS)?;
        Ok((format!("/{FILES}/../other-c1_net1"), path))
    });
    another_containers_file_is_not_written => not_written(|scene| {
        let path = file(scene, "ns-rail0-c2_net1");
        fs::write(&path, THEIRS)?;
        Ok((format!("/{FILES}/ns-rail0-c2_net1"), path))
    });
    another_interfaces_file_is_not_written => not_written(|scene| {
        let path = file(scene, "ns-rail0-c1_net2");
        fs::write(&path, THEIRS)?;
        Ok((format!("/{FILES}/ns-rail0-c1_net2"), path))
    });
    a_container_whose_id_ends_like_ours_keeps_its_file => not_written(|scene| {
        let path = file(scene, "ns-rail0-xc1_net1");
        fs::write(&path, THEIRS)?;
        Ok((format!("/{FILES}/ns-rail0-xc1_net1"), path))
    });
    a_link_in_the_files_place_is_not_followed => not_written(|scene| {
        let path = scene.host.directory().join("target");
        fs::write(&path, THEIRS)?;
        symlink(&path, file(scene, NAME))?;
        Ok((format!("/{FILES}/{NAME}"), path))
    });
    a_link_to_nothing_in_the_files_place_makes_no_file => {
        let scene = hardware()?;
        let target = scene.host.directory().join("target");
        symlink(&target, file(&scene, NAME))?;
        round(&scene, &json!(format!("/{FILES}/{NAME}")))?;
        ensure!(!target.exists(), "the link was followed");
        Ok(())
    };
    a_link_on_the_way_is_not_followed => not_written(|scene| {
        let elsewhere = scene.host.directory().join("elsewhere");
        fs::create_dir(&elsewhere)?;
        symlink(&elsewhere, scene.host_root().join(FILES).join("sub"))?;
        let path = elsewhere.join(NAME);
        fs::write(&path, THEIRS)?;
        Ok((format!("/{FILES}/sub/{NAME}"), path))
    });
    a_fifo_in_the_files_place_does_not_hang => {
        let scene = hardware()?;
        mkfifo(&file(&scene, NAME), Mode::S_IRWXU)?;
        round(&scene, &json!(format!("/{FILES}/{NAME}")))
    };
    a_directory_in_the_files_place_stops_nothing => {
        let scene = hardware()?;
        fs::create_dir(file(&scene, NAME))?;
        round(&scene, &json!(format!("/{FILES}/{NAME}")))
    };
    a_hard_link_to_another_file_leaves_that_one => not_written(|scene| {
        let path = scene.host.directory().join("target");
        fs::write(&path, THEIRS)?;
        fs::hard_link(&path, file(scene, NAME))?;
        Ok((format!("/{FILES}/{NAME}"), path))
    });
    a_gibibyte_in_the_files_place_is_not_read => {
        let scene = hardware()?;
        fs::File::create(file(&scene, NAME))?.set_len(1 << 30)?;
        round(&scene, &json!(format!("/{FILES}/{NAME}")))
    };
    a_file_without_name_is_passed_over => odd(&json!(""));
    a_relative_file_is_not_made => odd(&json!("ns-rail0-c1_net1"));
    a_directory_for_a_file_is_passed_over => odd(&json!(format!("/{FILES}/")));
    a_file_of_5000_bytes_is_passed_over => odd(&json!(format!("/{FILES}/{}", "c1_net1".repeat(700))));
    a_file_with_a_nul_is_passed_over => odd(&json!(format!("/{FILES}/ns\0c1_net1")));
    a_file_with_a_newline_is_passed_over => odd(&json!(format!("/{FILES}/ns\n-c1_net1")));
    a_file_that_is_no_text_is_refused => not_text();
}

const FILES: &str = "run/k8s.cni.cncf.io/devinfo/cni";
const NAME: &str = "ns-rail0-c1_net1";
const THEIRS: &str = "theirs";

fn hardware() -> Result<Scene> {
    let scene = Scene::with_hardware()?;
    fs::create_dir_all(scene.host_root().join(FILES))?;
    Ok(scene)
}

fn file(scene: &Scene, name: &str) -> PathBuf {
    scene.host_root().join(FILES).join(name)
}

/// ADD and DEL with this path; the interface is made in any case.
fn round(scene: &Scene, path: &Value) -> Result<()> {
    let before = scene.host_state()?;
    let network = scene.network(
        &json!({"attach": "move", "deviceID": PCI, "runtimeConfig": {"CNIDeviceInfoFile": path}}),
    );
    answer_of(&scene.call(), "ADD", &network)?
        .success()
        .context("ADD")?;
    scene.del_returns(&network, &before)
}

fn own() -> Result<()> {
    let scene = hardware()?;
    let network = scene.network(
        &json!({"attach": "move", "deviceID": PCI, "runtimeConfig": {"CNIDeviceInfoFile": format!("/{FILES}/{NAME}")}}),
    );
    answer_of(&scene.call(), "ADD", &network)?.success()?;
    let written: Value =
        serde_json::from_slice(&fs::read(file(&scene, NAME)).context("the file")?)?;
    ensure!(written["pci"]["pci-address"] == PCI, "{written}");
    answer_of(&scene.call(), "DEL", &network)?.success()?;
    Ok(())
}

fn not_written(make: impl Fn(&Scene) -> Result<(String, PathBuf)>) -> Result<()> {
    let scene = hardware()?;
    let (network, path) = make(&scene)?;
    round(&scene, &network.into())?;
    ensure!(
        fs::read_to_string(&path).ok().as_deref() == Some(THEIRS),
        "{} was written",
        path.display()
    );
    Ok(())
}

/// Neither on this machine nor below the tree of files that stands for the host's root.
fn not_made(path: &str) -> Result<()> {
    let scene = hardware()?;
    let below = scene.host_root().join(path.trim_start_matches('/'));
    fs::create_dir_all(below.parent().context("no directory")?)?;
    ensure!(!Path::new(path).exists(), "{path} is here already");
    round(&scene, &path.into())?;
    ensure!(
        !Path::new(path).exists() && !below.exists(),
        "{path} was made"
    );
    Ok(())
}

fn odd(path: &Value) -> Result<()> {
    let scene = hardware()?;
    let listing = || -> Result<Vec<PathBuf>> {
        let mut all = Vec::new();
        for directory in [
            scene.host_root().join(FILES),
            scene.host_root(),
            std::env::current_dir()?,
        ] {
            for entry in fs::read_dir(directory)? {
                all.push(entry?.path());
            }
        }
        all.sort();
        Ok(all)
    };
    let before = listing()?;
    round(&scene, path)?;
    let after = listing()?;
    ensure!(before == after, "there was {before:?}, there is {after:?}");
    Ok(())
}

fn not_text() -> Result<()> {
    let scene = hardware()?;
    for value in [json!(7), json!([]), json!({}), json!(true)] {
        let before = scene.host_state()?;
        let network =
            scene.network(&json!({"attach": "move", "deviceID": PCI, "runtimeConfig": {"CNIDeviceInfoFile": value}}));
        let answer = answer_of(&scene.call(), "ADD", &network)?;
        if !answer.status.success() {
            e2e::scene::refusal(&answer, &[6, 7], &["CNIDeviceInfoFile"])?;
        }
        scene.del_returns(&network, &before)?;
    }
    Ok(())
}
