//! The log of the CNI programs, whatever its file is and whoever writes at the same time.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::host_state::unchanged;
use e2e::scene::{Running, Scene, answer_of, refusal};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::{Map, Value, json};

use super::hostile_bytes::well_formed;

cases! {
    lines_begin_with_a_time_of_rfc_3339: Macvlan => lines();
    debug_shows_every_netlink_request_and_info_none: Macvlan, Strace => debug();
    a_request_that_the_kernel_refuses_is_shown_with_its_answer: Macvlan => refused_request();
    lines_of_processes_at_once_are_not_mixed: Macvlan => at_once();
    a_link_as_log_file_is_not_followed: Macvlan => odd_file(|path, other| Ok(symlink(other, path)?));
    a_link_to_nothing_as_log_file_makes_no_file: Macvlan => odd_file(|path, other| {
        fs::remove_file(other)?;
        Ok(symlink(other, path)?)
    });
    a_fifo_as_log_file_does_not_hang: Macvlan => odd_file(|path, _| Ok(mkfifo(path, Mode::S_IRWXU)?));
    a_directory_as_log_file_stops_nothing: Macvlan => odd_file(|path, _| Ok(fs::create_dir(path)?));
    a_device_as_log_file_stops_nothing: Macvlan => odd_file(|path, _| Ok(symlink("/dev/full", path)?));
    a_log_file_in_no_directory_stops_nothing: Macvlan => odd_path("none/cni.log");
    a_log_file_below_a_file_stops_nothing: Macvlan => odd_path("policy.json/cni.log");
    passwords_of_a_network_are_not_logged: Macvlan => secrets();
    a_log_file_is_for_root_alone: Macvlan => mode();
    calls_that_fail_are_errors: Macvlan => failures();
    failures_that_pass_are_warnings: Macvlan => passing_failures();
    a_wrong_policy_is_an_error_in_the_log: Macvlan => wrong_policy();
    a_failure_of_our_ipam_is_an_error => failure_of_ipam();
    a_refused_add_writes_few_kilobytes => refused_adds();
    an_add_with_thousands_of_forged_addresses_writes_few_kilobytes => forged_addresses();
}

fn with_log(level: &str) -> Result<(Scene, PathBuf)> {
    let scene = Scene::furnished()?;
    let log = scene.host.directory().join("cni.log");
    scene.policy(&json!({}), &json!({"log": {"file": log, "level": level}}))?;
    Ok((scene, log))
}

/// ADD and DEL of both kinds; the log.
fn logged(level: &str) -> Result<String> {
    let (scene, log) = with_log(level)?;
    for network in [scene.child(), scene.moving()] {
        answer_of(&scene.call(), "ADD", &network)?.success()?;
        answer_of(&scene.call(), "DEL", &network)?.success()?;
    }
    let text = String::from_utf8(fs::read(&log).context("the log")?)?;
    well_formed(&text)?;
    Ok(text)
}

fn lines() -> Result<()> {
    for level in ["info", "debug"] {
        let text = logged(level)?;
        ensure!(!text.is_empty(), "level {level} logs nothing of an ADD");
        ensure!(
            text.contains("net1") && text.contains("c1"),
            "whose call is it? {text}"
        );
    }
    Ok(())
}

/// As many lines with an answer and its time as requests were sent; none at level info.
fn debug() -> Result<()> {
    let answers = |text: &str| text.lines().filter(|line| line.ends_with("µs")).count();
    let text = logged("debug")?;
    ensure!(
        text.contains(": ok, ") && text.contains("errno "),
        "no answers in the log:\n{text}"
    );
    let (scene, log) = with_log("debug")?;
    let trace = scene.host.directory().join("trace");
    let call = scene.call();
    let mut strace = e2e::cni::Call {
        plugin: "strace".into(),
        ..call.clone()
    }
    .command("ADD");
    strace
        .args(["-qq", "-yy", "-e", "trace=sendto,sendmsg", "-o"])
        .arg(&trace)
        .arg("--")
        .arg(&call.plugin);
    e2e::scene::bounded(&mut strace, scene.moving().to_string().as_bytes())?.success()?;
    let sent = fs::read_to_string(&trace)?
        .lines()
        .filter(|line| line.contains("NETLINK"))
        .count();
    let shown = answers(&fs::read_to_string(&log)?);
    ensure!(sent > 10, "only {sent} requests seen");
    ensure!(
        shown >= sent,
        "{sent} requests were sent, {shown} answers are in the log"
    );
    answer_of(&call, "DEL", &scene.moving())?.success()?;
    let text = logged("info")?;
    ensure!(
        answers(&text) == 0,
        "requests in the log of level info:\n{text}"
    );
    Ok(())
}

/// The kernel has no macvlan upon a macvlan in passthru: it says so, and so must the log.
fn refused_request() -> Result<()> {
    let (scene, log) = with_log("debug")?;
    scene.on_host(&["link add mine link nic0 type macvlan mode passthru"])?;
    let before = scene.host_state()?;
    let network = scene.network(&json!({"attach": "macvlan", "master": "nic0"}));
    let answer = answer_of(&scene.call(), "ADD", &network)?;
    let (_, message) = answer.refusal()?;
    unchanged(&before, || scene.host_state(), "after the refusal")?;
    let text = fs::read_to_string(&log)?;
    well_formed(&text)?;
    ensure!(
        !message.is_empty() && text.to_lowercase().contains("net1"),
        "{text}"
    );
    Ok(())
}

fn at_once() -> Result<()> {
    let (scene, log) = with_log("debug")?;
    let before = scene.host_state()?;
    let pods = (0..8)
        .map(|_| scene.another_pod())
        .collect::<Result<Vec<_>>>()?;
    let document = scene.child().to_string();
    for command in ["ADD", "DEL"] {
        let mut running = Vec::new();
        for (index, pod) in pods.iter().enumerate() {
            let call = scene.call_of(pod, &format!("c{index}"), "net1");
            running.push(Running::start(
                &mut call.command(command),
                document.as_bytes(),
            )?);
        }
        for one in running {
            one.answer()?.success()?;
        }
    }
    let text = String::from_utf8(fs::read(&log)?)?;
    well_formed(&text)?;
    for index in 0..8 {
        ensure!(text.contains(&format!("c{index}")), "nothing of c{index}");
    }
    unchanged(&before, || scene.host_state(), "after all")
}

/// The file is something else; another file, which must not be written to, is at hand.
fn odd_file(make: impl Fn(&Path, &Path) -> Result<()>) -> Result<()> {
    let (scene, log) = with_log("debug")?;
    let other = scene.host.directory().join("other-file");
    fs::write(&other, "theirs\n")?;
    make(&log, &other)?;
    let expected = other.exists().then_some("theirs\n".to_owned());
    let before = scene.host_state()?;
    for network in [scene.child(), scene.moving()] {
        answer_of(&scene.call(), "ADD", &network)?
            .success()
            .context("ADD")?;
        scene.del_returns(&network, &before)?;
        ensure!(
            fs::read_to_string(&other).ok() == expected,
            "another file was written to"
        );
    }
    Ok(())
}

fn odd_path(path: &str) -> Result<()> {
    let scene = Scene::furnished()?;
    let log = scene.host.directory().join(path);
    scene.policy(&json!({}), &json!({"log": {"file": log, "level": "debug"}}))?;
    let before = scene.host_state()?;
    let answer = answer_of(&scene.call(), "ADD", &scene.child())?;
    answer.success().context("ADD")?;
    ensure!(
        answer.stderr.matches("is not written").count() == 1,
        "{}",
        answer.stderr
    );
    scene.del_returns(&scene.child(), &before)
}

fn secrets() -> Result<()> {
    let (scene, log) = with_log("debug")?;
    let mut network = scene.child();
    network["ipam"]["etcd_password"] = "hunter-two".into();
    network["ipam"]["etcd_username"] = "hunter-name".into();
    let mut said = String::new();
    for command in ["ADD", "DEL"] {
        let answer = answer_of(&scene.call(), command, &network)?;
        said += &(answer.stdout + &answer.stderr);
    }
    said += &fs::read_to_string(&log)?;
    ensure!(!said.contains("hunter-two"), "a password is shown: {said}");
    Ok(())
}

fn mode() -> Result<()> {
    use std::os::unix::fs::MetadataExt;
    let (scene, log) = with_log("debug")?;
    answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    let mode = fs::metadata(&log)?.mode();
    ensure!(mode & 0o022 == 0, "others may write the log: {mode:o}");
    answer_of(&scene.call(), "DEL", &scene.child())?.success()?;
    Ok(())
}

/// The lines of a level that say that a call failed.
fn failed(log: &Path, level: &str) -> Result<Vec<String>> {
    let text = fs::read_to_string(log).unwrap_or_default();
    well_formed(&text)?;
    let says =
        |line: &&str| line.contains(&format!("Z {level} ")) && line.contains("failed with code ");
    Ok(text.lines().filter(says).map(str::to_owned).collect())
}

fn failures() -> Result<()> {
    let (scene, log) = with_log("error")?;
    let denied = scene.network(&json!({"attach": "move", "device": "lo"}));
    let wrong = scene.network(&json!({"attach": "bridge"}));
    for (command, network, code) in [
        ("ADD", &denied, 101),
        ("ADD", &wrong, 7),
        ("CHECK", &scene.child(), 7),
    ] {
        let (said, _) = answer_of(&scene.call(), command, network)?.refusal()?;
        ensure!(said == code, "{command} {network}: {said}");
        let lines = failed(&log, "error")?;
        let of_call = |line: &&String| {
            line.contains(&format!(
                "] {command} rail0 net1 of container c1: failed with code {code}: "
            ))
        };
        ensure!(
            lines.iter().filter(of_call).count() == 1,
            "{command} {code}: {lines:?}"
        );
    }
    // A call that did what it was to do is none.
    let known = fs::read(&log)?;
    answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    answer_of(&scene.call(), "DEL", &scene.child())?.success()?;
    ensure!(fs::read(&log)? == known, "{}", fs::read_to_string(&log)?);
    Ok(())
}

fn passing_failures() -> Result<()> {
    let (scene, log) = with_log("warn")?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    let other = scene.another_pod()?;
    let (code, _) =
        answer_of(&scene.call_of(&other, "c2", "net1"), "ADD", &scene.moving())?.refusal()?;
    ensure!(code == 11, "{code}");
    let absent = scene.network(&json!({"attach": "macvlan", "master": "nic9"}));
    let (code, _) = answer_of(&scene.call(), "STATUS", &absent)?.refusal()?;
    ensure!(code == 50, "{code}");
    let lines = failed(&log, "warn")?;
    ensure!(
        lines.len() == 2 && lines[0].contains("code 11") && lines[1].contains("code 50"),
        "{lines:?}"
    );
    ensure!(failed(&log, "error")?.is_empty());
    answer_of(&scene.call(), "DEL", &scene.moving())?.success()?;
    Ok(())
}

fn wrong_policy() -> Result<()> {
    let (scene, log) = with_log("warn")?;
    scene.policy(
        &json!({"nonRdma": "perhaps"}),
        &json!({"log": {"file": log, "level": "warn"}}),
    )?;
    let (code, _) = answer_of(&scene.call(), "ADD", &scene.child())?.refusal()?;
    ensure!(code == 101, "{code}");
    let lines = failed(&log, "error")?;
    ensure!(
        lines.len() == 1 && lines[0].contains("nonRdma"),
        "{lines:?}"
    );
    Ok(())
}

fn failure_of_ipam() -> Result<()> {
    let (scene, log) = with_log("warn")?;
    let network = scene.network(&json!({"ipam": {"type": "rdma-ipam", "range": "nonsense"}}));
    let mut command = scene.call().command("ADD");
    let mut ipam = std::process::Command::new(e2e::bin_under_test::product("rdma-ipam")?);
    ipam.envs(
        command
            .get_envs()
            .filter_map(|(name, value)| Some((name, value?))),
    );
    command = ipam;
    let answer = e2e::scene::bounded(&mut command, network.to_string().as_bytes())?;
    let (code, _) = answer.refusal()?;
    ensure!(code == 7, "{code}");
    let lines = failed(&log, "error")?;
    ensure!(
        lines.len() == 1 && lines[0].contains(" rdma-ipam["),
        "{lines:?} {}",
        answer.stderr
    );
    Ok(())
}

/// Runtimes repeat an ADD that fails, and keep its answer.
fn refused_adds() -> Result<()> {
    const MOST_BYTES: usize = 8 << 10;
    let (scene, log) = with_log("info")?;
    let long = "x".repeat(1 << 19);
    let unknown = (0..10_000).map(|n| (format!("AAAAAAAA{n:05}"), json!(1)));
    let mut many: Map<String, Value> = unknown.collect();
    many.insert("attach".into(), "move".into());
    many.insert("device".into(), "lo".into());
    for keys in [
        Value::Object(many.clone()),
        json!({ "attach": long }),
        json!({"attach": "move", "device": long}),
        json!({"attach": "move", "hwaddr": long}),
        json!({"attach": "move", "deviceID": long}),
        json!({"attach": "move", "device": "nic0", "mac": long}),
        json!({"attach": "move", "device": "nic0", "rdma": long}),
        json!({"attach": "macvlan", "master": long}),
        json!({"attach": "macvlan", "master": "nic0", "mode": long}),
        json!({"attach": "macvlan", "master": "nic0", "ipam": {"type": long}}),
        json!({"attach": "macvlan", "master": "nic0", "ipam": {"type": "rdma-ipam", "range": long}}),
        json!({"attach": "macvlan", "master": "nic0", "ipam": {"type": "rdma-ipam", "x": many}}),
        json!({"attach": "rdma-only", "rdmaDevice": long, "prevResult": {"cniVersion": "1.1.0"}}),
        json!({"attach": "ipvlan", "prevResult": {"cniVersion": "1.1.0",
            "interfaces": vec![json!({"name": "x".repeat(50)}); 5000]}}),
    ] {
        let _ = fs::remove_file(&log);
        let answer = answer_of(&scene.call(), "ADD", &scene.network(&keys))?;
        let what: String = keys.to_string().chars().take(100).collect();
        refusal(&answer, &[], &[]).context(what.clone())?;
        let logged = fs::read_to_string(&log).unwrap_or_default().len() + answer.stderr.len();
        ensure!(
            logged < MOST_BYTES && answer.stdout.len() < MOST_BYTES,
            "{what}: {logged} bytes of log, an answer of {}",
            answer.stdout.len()
        );
    }
    Ok(())
}

fn forged_addresses() -> Result<()> {
    let scene = Scene::with_hardware()?;
    let log = scene.host.directory().join("cni.log");
    scene.policy(&json!({}), &json!({"log": {"file": log, "level": "info"}}))?;
    let ips = (0..5_000).map(|n| json!({"address": format!("10.{}.{}.7/24", n >> 8, n & 255)}));
    let network = scene.network(&json!({"attach": "rdma-only", "rdmaDevice": "mlx5_0",
        "prevResult": {"cniVersion": "1.1.0", "ips": ips.collect::<Vec<_>>(),
            "interfaces": [{"name": "lo", "sandbox": scene.pod.path()}]}}));
    answer_of(&scene.call(), "ADD", &network)?.success()?;
    let text = fs::read_to_string(&log)?;
    well_formed(&text)?;
    ensure!(
        text.contains("has no RoCE v2 GID") && text.len() < 40 << 10,
        "{} bytes of log",
        text.len()
    );
    answer_of(&scene.call(), "DEL", &network)?.success()?;
    Ok(())
}
