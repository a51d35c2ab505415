//! Files of the node that another user wrote or can write, or that are no files: what they say is
//! neither done nor executed, and nothing waits for them. A policy that cannot be read is no reason to
//! answer a DEL without doing anything.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::cni::{Answer, Call};
use e2e::host_state::unchanged;
use e2e::scene::{DENIED, STATE, Scene, TRY_AGAIN, answer_of, refusal};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::{Value, json};

use super::hostile_ipam::{ANSWER, executed, upon_nic0, with_program};

cases! {
    a_record_that_others_can_write_is_not_executed: Macvlan => record(|path| chmod(path, 0o622));
    a_record_of_another_user_is_not_executed: Macvlan => record(|path| Ok(chown(path, Some(65534), None)?));
    a_link_to_a_record_is_not_executed: Macvlan => record(link);
    a_fifo_for_a_record_ends_del_at_once: Macvlan => record(fifo);
    a_record_of_three_gigabytes_ends_del_at_once: Macvlan => record(huge);
    a_state_directory_of_another_user_is_not_executed: Macvlan =>
        record(|path| Ok(chown(above(path, 2), Some(65534), None)?));
    a_state_directory_that_others_can_write_is_not_executed: Macvlan =>
        record(|path| chmod(above(path, 2), 0o777));
    a_directory_of_records_that_others_can_write_is_not_executed: Macvlan =>
        record(|path| chmod(above(path, 1), 0o720));
    gc_believes_no_state_directory_that_del_does_not: Macvlan => gc();
    node_addresses_that_others_can_write_stop_add: Macvlan => state_file("node-addresses", |path| chmod(path, 0o666));
    a_fifo_for_node_addresses_stops_add_at_once: Macvlan => state_file("node-addresses", fifo);
    a_link_for_exclusive_hcas_stops_add: Macvlan => state_file("exclusive-hcas", link);
    exclusive_hcas_of_three_gigabytes_stop_add_at_once: Macvlan => state_file("exclusive-hcas", huge);
    a_fifo_for_a_policy_stops_add_at_once => policy_file(fifo);
    a_policy_of_three_gigabytes_stops_add_at_once => policy_file(huge);
    a_link_to_a_policy_is_refused => policy_file(link);
    del_is_repeated_while_the_policy_is_garbage => without_policy(|path| Ok(fs::write(path, "garbage")?));
    del_is_repeated_while_the_policy_is_cut_off => without_policy(|path| {
        let text = fs::read(path)?;
        Ok(fs::write(path, text.get(..text.len() / 2).unwrap_or_default())?)
    });
    del_is_repeated_while_others_can_write_the_policy => without_policy(|path| chmod(path, 0o666));
    del_is_repeated_while_the_policy_is_a_fifo => without_policy(fifo);
    del_returns_the_nic_when_the_policy_has_an_unknown_key => unknown_key();
    del_without_policy_and_record_is_repeated => nothing_known();
    gc_without_policy_releases_nothing: Macvlan => gc_without_policy();
    a_node_name_that_no_program_accepts_is_refused => node_name();
}

/// No call that is refused for such a file takes as long: the largest would be read for seconds.
const AT_ONCE: Duration = Duration::from_secs(3);

fn chmod(path: &Path, mode: u32) -> Result<()> {
    Ok(fs::set_permissions(path, Permissions::from_mode(mode))?)
}

fn fifo(path: &Path) -> Result<()> {
    fs::remove_file(path)?;
    Ok(mkfifo(path, Mode::S_IRUSR | Mode::S_IWUSR)?)
}

/// To a file with the same content.
fn link(path: &Path) -> Result<()> {
    let target = path.with_extension("target");
    fs::rename(path, &target)?;
    Ok(symlink(target, path)?)
}

fn huge(path: &Path) -> Result<()> {
    Ok(File::options().write(true).open(path)?.set_len(3 << 30)?)
}

fn above(path: &Path, levels: usize) -> &Path {
    path.ancestors().nth(levels).unwrap_or(path)
}

/// The only record.
fn record_of(scene: &Scene) -> Result<PathBuf> {
    let attachments = scene.host.state().join("attachments");
    let mut records = fs::read_dir(attachments)?.map(|entry| Ok(entry?.path()));
    records.next().context("no record")?
}

/// Puts back what was spoilt.
fn mend(path: &Path, text: &[u8]) -> Result<()> {
    let _ = fs::remove_file(path.with_extension("target"));
    fs::remove_file(path)?;
    fs::write(path, text)?;
    chmod(path, 0o600)
}

fn at_once(call: &Call, command: &str, network: &Value) -> Result<Answer> {
    let started = Instant::now();
    let answer = answer_of(call, command, network)?;
    let took = started.elapsed();
    ensure!(took < AT_ONCE, "{command} took {took:?}");
    Ok(answer)
}

/// An attachment with an IPAM by exec, whose record or its directories are spoilt.
fn record(spoil: impl Fn(&Path) -> Result<()>) -> Result<()> {
    let (scene, call) = with_program("helper", ANSWER)?;
    scene.allow(&json!({"ipam": ["helper"]}))?;
    let before = scene.host_state()?;
    let network = upon_nic0(&scene, &json!({"type": "helper"}));
    answer_of(&call, "ADD", &network)?.success()?;
    let path = record_of(&scene)?;
    let text = fs::read(&path)?;
    spoil(&path)?;
    let answer = at_once(&call, "DEL", &network)?;
    refusal(&answer, &[STATE], &[&scene.host.state().to_string_lossy()])?;
    ensure!(executed(&scene) == "ADD", "executed: {}", executed(&scene));
    ensure!(
        scene.pod.ip("link show net1").is_ok(),
        "a record was believed"
    );
    for directory in [above(&path, 1), above(&path, 2)] {
        chown(directory, Some(0), None)?;
        chmod(directory, 0o700)?;
    }
    mend(&path, &text)?;
    scene_returns(&scene, &call, &network, &before)?;
    ensure!(executed(&scene) == "ADD DEL", "{}", executed(&scene));
    Ok(())
}

fn scene_returns(
    scene: &Scene,
    call: &Call,
    network: &Value,
    before: &e2e::host_state::State,
) -> Result<()> {
    answer_of(call, "DEL", network)?.success().context("DEL")?;
    unchanged(before, || scene.host_state(), "after DEL")?;
    ensure!(scene.pod.ip("link show net1").is_err(), "net1 is left");
    Ok(())
}

fn gc() -> Result<()> {
    let (scene, call) = with_program("helper", ANSWER)?;
    scene.allow(&json!({"ipam": ["helper"]}))?;
    let before = scene.host_state()?;
    let network = upon_nic0(&scene, &json!({"type": "helper"}));
    answer_of(&call, "ADD", &network)?.success()?;
    chown(scene.host.state(), Some(65534), None)?;
    let mut none_valid = network.clone();
    none_valid["cni.dev/valid-attachments"] = json!([]);
    refusal(
        &answer_of(&call, "GC", &none_valid)?,
        &[STATE],
        &["not trusted"],
    )?;
    ensure!(executed(&scene) == "ADD", "{}", executed(&scene));
    chown(scene.host.state(), Some(0), None)?;
    scene_returns(&scene, &call, &network, &before)
}

fn state_file(name: &str, spoil: impl Fn(&Path) -> Result<()>) -> Result<()> {
    let scene = Scene::furnished()?;
    fs::create_dir_all(scene.host.state())?;
    chmod(&scene.host.state(), 0o700)?;
    let path = scene.host.state().join(name);
    fs::write(&path, "")?;
    spoil(&path)?;
    let answer = at_once(&scene.call(), "ADD", &scene.child())?;
    refusal(&answer, &[STATE], &[name])?;
    mend(&path, b"")?;
    answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    answer_of(&scene.call(), "DEL", &scene.child())?.success()?;
    Ok(())
}

fn policy_file(spoil: impl Fn(&Path) -> Result<()>) -> Result<()> {
    let scene = Scene::furnished()?;
    let text = fs::read(scene.policy_file())?;
    spoil(&scene.policy_file())?;
    let answer = at_once(&scene.call(), "ADD", &scene.moving())?;
    refusal(&answer, &[DENIED], &["node policy"])?;
    ensure!(
        scene.host.netns.ip("link show nic0").is_ok(),
        "nic0 was moved"
    );
    mend(&scene.policy_file(), &text)?;
    scene.returns(&scene.moving(), &[])
}

/// The policy has a state directory of its own, which nothing but the policy names.
fn without_policy(spoil: impl Fn(&Path) -> Result<()>) -> Result<()> {
    let scene = Scene::furnished()?;
    let mut network = scene.moving();
    network["ipam"] = scene.host.own_ipam("10.9.0.0/24", "10.9.0.100", &json!({}));
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &network)?.success()?;
    let policy = scene.policy_file();
    let (text, leased) = (fs::read(&policy)?, scene.host.left_behind());
    spoil(&policy)?;
    let answer = answer_of(&scene.call(), "DEL", &network)?;
    refusal(
        &answer,
        &[TRY_AGAIN],
        &["no record is found", "policy.json"],
    )?;
    ensure!(scene.host.left_behind() == leased, "something is released");
    fs::remove_file(&policy)?;
    fs::write(&policy, text)?;
    scene.del_returns(&network, &before)
}

fn unknown_key() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    scene.policy(&json!({}), &json!({"typo": 1}))?;
    answer_of(&scene.call(), "DEL", &scene.moving())?.success()?;
    scene.policy(&json!({}), &json!({}))?;
    unchanged(&before, || scene.host_state(), "after DEL")
}

fn nothing_known() -> Result<()> {
    let scene = Scene::furnished()?;
    scene.returns(&scene.moving(), &[])?;
    let text = fs::read(scene.policy_file())?;
    for spoilt in ["garbage", "{", r#"{"stateDir": 7}"#, r#"{"typo": {}}"#] {
        fs::write(scene.policy_file(), spoilt)?;
        let answer = answer_of(&scene.call(), "DEL", &scene.moving())?;
        refusal(
            &answer,
            &[TRY_AGAIN],
            &["no record is found", "policy.json"],
        )
        .context(spoilt)?;
    }
    fs::write(scene.policy_file(), text)?;
    answer_of(&scene.call(), "DEL", &scene.moving())?.success()?;
    Ok(())
}

fn gc_without_policy() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    let leased = scene.host.left_behind();
    let text = fs::read(scene.policy_file())?;
    fs::write(scene.policy_file(), "garbage")?;
    let mut none_valid = scene.child();
    none_valid["cni.dev/valid-attachments"] = json!([]);
    let answer = answer_of(&scene.call(), "GC", &none_valid)?;
    refusal(&answer, &[TRY_AGAIN], &["policy.json"])?;
    ensure!(
        scene.host.left_behind() == leased,
        "a living pod's lease is gone"
    );
    fs::write(scene.policy_file(), text)?;
    scene.del_returns(&scene.child(), &before)
}

fn node_name() -> Result<()> {
    let scene = Scene::furnished()?;
    for name in ["-x", ".x", ""] {
        scene.policy(&json!({}), &json!({"node": name}))?;
        let answer = answer_of(&scene.call(), "ADD", &scene.moving())?;
        refusal(&answer, &[DENIED], &["node: must be a name"]).context(name)?;
    }
    scene.policy(&json!({}), &json!({}))?;
    scene.returns(&scene.moving(), &[])
}
