//! A pod with a user namespace whose process answers in the kernel's place: it sends forged netlink
//! messages to every socket of the pod's network namespace, all the time. ADD and DEL must not differ
//! from those in a pod without it.

use std::fs;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::cni::{Answer, Call};
use e2e::host_state::unchanged;
use e2e::scene::{CALL_TIMEOUT, Running, Scene, Sprayer, answer_of, bounded, index_of, refusal};
use e2e::trace;
use serde_json::Value;

use super::hostile_stacked::Nameless;

cases! {
    a_hundred_macvlans_come_and_go_under_forged_answers: Macvlan, UserNamespace =>
        children("macvlan", 100, Sprayed::AddAndDel, &["done", "ack", "refusal", "flood"]);
    a_hundred_nics_come_and_go_under_forged_answers: UserNamespace => moves(
        100,
        Sprayed::AddAndDel,
        &["done", "ack", "refusal", "flood", "links", "net1", "decoy"],
    );
    a_forged_end_of_a_dump_keeps_no_macvlan: Macvlan, UserNamespace =>
        children("macvlan", 24, Sprayed::Del, &["done"]);
    a_forged_end_of_a_dump_keeps_no_ipvlan: Ipvlan, UserNamespace =>
        children("ipvlan", 8, Sprayed::Del, &["done"]);
    a_forged_acknowledgement_keeps_no_macvlan: Macvlan, UserNamespace =>
        children("macvlan", 24, Sprayed::Del, &["ack"]);
    a_forged_refusal_fails_no_macvlan: Macvlan, UserNamespace =>
        children("macvlan", 8, Sprayed::AddAndDel, &["refusal"]);
    a_flood_fails_no_macvlan: Macvlan, UserNamespace =>
        children("macvlan", 8, Sprayed::AddAndDel, &["flood"]);
    a_forged_end_of_a_dump_keeps_no_nic: UserNamespace => moves(8, Sprayed::Del, &["done"]);
    a_forged_refusal_keeps_no_nic: UserNamespace => moves(8, Sprayed::Del, &["refusal"]);
    a_flood_keeps_no_nic: UserNamespace => moves(8, Sprayed::Del, &["flood"]);
    a_forged_list_of_links_returns_no_decoy: UserNamespace =>
        moves(8, Sprayed::Del, &["links", "net1", "decoy"]);
    a_forged_answer_fails_no_check: Macvlan, UserNamespace => check();
    a_decoy_that_takes_the_nics_index_during_del_stays_in_the_pod: Strace => swapped_nic();
}

/// During which calls the pod sends.
#[derive(Clone, Copy, PartialEq)]
enum Sprayed {
    AddAndDel,
    Del,
}

/// An ADD during which the pod sends, or does not.
fn add(scene: &Scene, sprayer: &Sprayer, sprayed: Sprayed, network: &Value) -> Result<Value> {
    let add = || answer_of(&scene.call(), "ADD", network)?.success();
    match sprayed {
        Sprayed::AddAndDel => add(),
        Sprayed::Del => sprayer.pausing(add),
    }
}

/// Calls of ADD and DEL, after each of which the pod has the interface with its address and no other,
/// or none: an address that is free again is nobody's.
fn children(attach: &str, rounds: u32, sprayed: Sprayed, forgeries: &[&str]) -> Result<()> {
    let mut scene = Scene::furnished()?;
    let sprayer = scene.sprayed(forgeries)?;
    let in_pod = |arguments: &str| sprayer.pausing(|| scene.pod.ip(arguments));
    let mut network = scene.child();
    network["attach"] = attach.into();
    let before = scene.host_state()?;
    for round in 0..rounds {
        let added =
            add(&scene, &sprayer, sprayed, &network).with_context(|| format!("ADD {round}"))?;
        let address = added["ips"][0]["address"].as_str().context("no address")?;
        let shown = in_pod("-o -4 addr show scope global")?;
        ensure!(
            shown.lines().count() == 1 && shown.contains(address),
            "after ADD {round}, which gave {address}: {shown}"
        );
        answer_of(&scene.call(), "DEL", &network)?
            .success()
            .with_context(|| format!("DEL {round}"))?;
        let left = in_pod("-d -o link show")?;
        ensure!(!left.contains("vlan"), "after DEL {round}: {left}");
    }
    unchanged(&before, || scene.host_state(), "after all")
}

/// The same of `nic0`, in a pod that has a link `decoy`.
fn moves(rounds: u32, sprayed: Sprayed, forgeries: &[&str]) -> Result<()> {
    let mut scene = Scene::furnished()?;
    let sprayer = scene.sprayed(forgeries)?;
    sprayer.pausing(|| scene.in_pod(&["link add decoy type veth peer name decoypeer"]))?;
    let before = scene.host_state()?;
    for round in 0..rounds {
        add(&scene, &sprayer, sprayed, &scene.moving()).with_context(|| format!("ADD {round}"))?;
        answer_of(&scene.call(), "DEL", &scene.moving())?
            .success()
            .with_context(|| format!("DEL {round}"))?;
        let links = scene.host.netns.ip_json("link show dev nic0")?;
        ensure!(
            links[0]["link"] == "peer0",
            "after DEL {round}, nic0 is another link: {links}"
        );
    }
    sprayer.pausing(|| {
        let left = scene.pod.ip("-o link show")?;
        ensure!(
            left.contains("decoy@") && !left.contains("net1"),
            "in the pod: {left}"
        );
        Ok(())
    })?;
    unchanged(&before, || scene.host_state(), "after all")
}

/// A macvlan of another plugin in the pod that forges stands on the NIC that another pod wants. The
/// plugin pauses before each request, so that the forged answer is there first.
fn check() -> Result<()> {
    let mut scene = Scene::furnished()?;
    let sprayer = scene.sprayed(&["done", "ack", "refusal"])?;
    let before = scene.host_state()?;
    let mut network = scene.child();
    let added = add(&scene, &sprayer, Sprayed::Del, &network)?;
    network["prevResult"] = added;
    for round in 0..40 {
        let checked = answer_of(&scene.call(), "CHECK", &network)?;
        ensure!(
            checked.status.success(),
            "CHECK {round}: {}",
            checked.stdout
        );
    }
    answer_of(&scene.call(), "DEL", &network)?.success()?;
    unchanged(&before, || scene.host_state(), "after DEL")
}

/// A call under strace with these options.
pub(super) fn traced(call: &Call, command: &str, options: &[String]) -> Command {
    let mut strace = Call {
        plugin: "strace".into(),
        ..call.clone()
    }
    .command(command);
    strace.args(options).arg("--").arg(&call.plugin);
    strace
}

/// A DEL under which `meanwhile` is done to the pod, between the request for the number of the host's
/// namespace and the next ones, each of which waits. Of a socket in another namespace than its own
/// strace does not know the protocol, so that it writes types as numbers.
fn del_with(
    scene: &Scene,
    network: &Value,
    meanwhile: impl FnOnce() -> Result<()>,
) -> Result<Answer> {
    const RTM_GETNSID: &str = "nlmsg_type=0x5a ";
    let add = || answer_of(&scene.call(), "ADD", network)?.success();
    let document = network.to_string();
    let log = scene.host.directory().join("trace");
    let recording = trace::record(&log);
    let options = recording.get(1..).unwrap_or_default();
    add()?;
    bounded(
        &mut traced(&scene.call(), "DEL", options),
        document.as_bytes(),
    )?
    .success()?;
    let points = trace::points(&log)?;
    let point = points.iter().find(|point| point.line.contains(RTM_GETNSID));
    let first = point.context("no request for a number")?.occurrence + 1;
    add()?;
    fs::remove_file(&log)?;
    let slowly = format!(
        "inject=sendto:delay_enter=200000:when={first}..{}",
        first + 15
    );
    let options = [options, &["-e".to_owned(), slowly]].concat();
    let del = Running::start(
        &mut traced(&scene.call(), "DEL", &options),
        document.as_bytes(),
    )?;
    let started = Instant::now();
    while !fs::read_to_string(&log).is_ok_and(|log| log.contains(RTM_GETNSID)) {
        ensure!(started.elapsed() < CALL_TIMEOUT, "no request for a number");
        sleep(Duration::from_millis(5));
    }
    meanwhile()?;
    del.answer()
}

/// Between the list of the pod's links and the move to the host, the NIC leaves for a namespace that
/// the pod made, and a link of the pod's has its index. DEL finds the NIC there, or fails.
fn swapped_nic() -> Result<()> {
    let scene = Scene::furnished()?;
    let nested = Nameless::start(scene.pod.name())?;
    let before = scene.host_state()?;
    let index = index_of(&scene.host.netns, "nic0")?;
    let answer = del_with(&scene, &scene.moving(), || {
        scene.in_pod(&[
            &format!("link set net1 netns {}", nested.pid()),
            &format!("link add decoy index {index} type veth peer name decoypeer"),
        ])
    })?;
    if answer.status.success() {
        let links = scene.host.netns.ip_json("link show dev nic0")?;
        ensure!(links[0]["link"] == "peer0", "nic0 is another link: {links}");
        return unchanged(&before, || scene.host_state(), "after DEL");
    }
    refusal(&answer, &[], &["nic0"])?;
    let links = scene.host.netns.ip("-o link show")?;
    ensure!(
        !links.contains(" nic0@"),
        "the pod's link is on the host: {links}"
    );
    nested.ip(&format!("link set net1 netns {}", scene.pod.name()))?;
    scene.del_returns(&scene.moving(), &before)
}
