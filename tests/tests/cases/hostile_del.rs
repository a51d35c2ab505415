//! DEL ends what its ADD began, and nothing else.

use std::fs;

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::host_state::{state, unchanged};
use e2e::netns::Netns;
use e2e::scene::{Running, Scene, answer_of, index_of, refusal};
use serde_json::{Value, json};

cases! {
    a_del_after_a_refused_add_leaves_another_networks_child: Macvlan => after_refused(Kind::Child, Kind::Child);
    a_del_after_a_refused_move_leaves_another_networks_child: Macvlan => after_refused(Kind::Child, Kind::Move);
    a_del_after_a_refused_child_leaves_another_networks_nic: Macvlan => after_refused(Kind::Move, Kind::Child);
    a_del_after_a_refused_move_leaves_another_networks_nic => after_refused(Kind::Move, Kind::Move);
    a_del_of_a_network_that_was_never_added_leaves_the_others: Macvlan => never_added();
    a_veth_of_the_clusters_network_stays => foreign(&["link add eth0 type veth peer name cable", "link set eth0 up"], "eth0");
    a_macvlan_of_another_plugin_stays: Macvlan => foreign_child();
    loopback_stays => foreign(&[], "lo");
    a_del_of_another_container_leaves_it: Macvlan => other_name("c9", "net1");
    a_del_of_another_interface_leaves_it: Macvlan => other_name("c1", "net9");
    a_del_with_another_pods_namespace_ends_its_own_alone: Macvlan => other_namespace();
    a_del_by_a_network_that_was_rewritten_returns_what_was_taken => rewritten();
    a_del_with_every_wrong_key_returns_what_was_taken => wrong_keys();
    a_del_with_a_value_nested_too_deep_returns_what_was_taken => nested_too_deep();
    two_dels_at_once_both_succeed => at_once();
    a_gc_of_another_network_leaves_it: Macvlan => gc_elsewhere();
    a_gc_leaves_links_that_it_did_not_make => gc_foreign();
    a_del_without_the_journal_releases_the_leases_alone: Macvlan => journal_lost();
    a_child_that_got_another_mac_and_name_in_its_pod_ends: Macvlan => changed(
        "macvlan",
        &["link set net1 down", "link set net1 name evil address 02:aa:aa:aa:aa:aa"],
    );
    an_ipvlan_that_its_pod_renamed_ends: Ipvlan => changed("ipvlan", &["link set net1 name evil"]);
    a_child_that_changed_places_with_one_of_the_pod_ends: Macvlan => swapped();
    a_link_that_got_the_index_of_a_child_stays: Macvlan => index_reused();
    a_child_that_its_pod_deleted_is_no_warning: Macvlan => deleted();
    a_child_that_a_killed_add_left_on_the_host_ends: Macvlan => left_on_host("nic0", true);
    a_child_that_a_killed_add_left_on_the_host_ends_after_its_pod: Macvlan =>
        left_after_pod();
    a_link_with_that_index_on_another_netdev_stays: Macvlan => left_on_host("peer0", false);
}

#[derive(Clone, Copy)]
enum Kind {
    Child,
    Move,
}

fn network(scene: &Scene, kind: Kind, name: &str, nic: &str) -> Value {
    let (key, attach) = match kind {
        Kind::Child => ("master", "macvlan"),
        Kind::Move => ("device", "move"),
    };
    let ipam = scene.host.own_ipam("10.9.0.0/24", "10.9.0.100", &json!({}));
    scene.network(&json!({"name": name, "attach": attach, key: nic, "ipam": ipam}))
}

fn after_refused(first: Kind, second: Kind) -> Result<()> {
    let scene = Scene::furnished()?;
    scene.host.add_nic("nic1", "peer1")?;
    let empty = scene.host_state()?;
    let (mine, theirs) = (
        network(&scene, first, "rail0", "nic0"),
        network(&scene, second, "rail1", "nic1"),
    );
    answer_of(&scene.call(), "ADD", &mine)?.success()?;
    // `refuses` compares host, leases, journal and pod after the refusal and after the DEL.
    scene.refuses(&theirs, &[], &["net1"])?;
    scene.refuses(&theirs, &[], &["net1"])?;
    answer_of(&scene.call(), "DEL", &mine)?.success()?;
    unchanged(
        &empty,
        || scene.host_state(),
        "after the first network's DEL",
    )
}

fn never_added() -> Result<()> {
    let scene = Scene::furnished()?;
    answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    let (host, pod) = (scene.host_state()?, state(&scene.pod)?);
    for kind in [Kind::Child, Kind::Move] {
        let other = network(&scene, kind, "rail7", "nic0");
        answer_of(&scene.call(), "DEL", &other)?.success()?;
        unchanged(&host, || scene.host_state(), "after DEL of another network")?;
        unchanged(
            &pod,
            || state(&scene.pod),
            "in the pod, after DEL of another network",
        )?;
    }
    Ok(())
}

/// DEL of every kind, for an interface that somebody else made.
fn leaves(scene: &Scene, ifname: &str) -> Result<()> {
    let (host, pod) = (scene.host_state()?, state(&scene.pod)?);
    let call = scene.call_of(&scene.pod, "c1", ifname);
    for keys in [
        json!({"attach": "move", "device": "nic0"}),
        json!({"attach": "macvlan", "master": "nic0"}),
        json!({"attach": "ipvlan", "master": "nic0"}),
        json!({"attach": "ipoib", "master": "nic0"}),
        json!({"type": "rdma"}),
        json!({}),
    ] {
        answer_of(&call, "DEL", &scene.network(&keys))?
            .success()
            .with_context(|| keys.to_string())?;
        unchanged(&host, || scene.host_state(), "after DEL")?;
        unchanged(
            &pod,
            || state(&scene.pod),
            &format!("in the pod, after DEL with {keys}"),
        )?;
    }
    Ok(())
}

fn foreign(pod: &[&str], ifname: &str) -> Result<()> {
    let scene = Scene::furnished()?;
    scene.in_pod(pod)?;
    leaves(&scene, ifname)
}

fn foreign_child() -> Result<()> {
    let scene = Scene::furnished()?;
    scene.on_host(&[
        "link add eth0 link nic0 type macvlan mode bridge",
        &format!("link set eth0 netns {}", scene.pod.name()),
    ])?;
    scene.in_pod(&["link set eth0 up"])?;
    leaves(&scene, "eth0")
}

fn other_name(container: &str, ifname: &str) -> Result<()> {
    let scene = Scene::furnished()?;
    for network in [scene.child(), scene.moving()] {
        let before = scene.host_state()?;
        answer_of(&scene.call(), "ADD", &network)?.success()?;
        let (host, pod) = (scene.host_state()?, state(&scene.pod)?);
        let other = scene.call_of(&scene.pod, container, ifname);
        answer_of(&other, "DEL", &network)?.success()?;
        unchanged(&host, || scene.host_state(), "after the other's DEL")?;
        unchanged(
            &pod,
            || state(&scene.pod),
            "in the pod, after the other's DEL",
        )?;
        scene.del_returns(&network, &before)?;
    }
    Ok(())
}

fn other_namespace() -> Result<()> {
    let scene = Scene::furnished()?;
    let other = scene.another_pod()?;
    let neighbour = scene.call_of(&other, "c2", "net1");
    let mut theirs = scene.child();
    theirs["master"] = "peer0".into();
    let before = scene.host_state()?;
    answer_of(&neighbour, "ADD", &theirs)?.success()?;
    let inside = state(&other)?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    let mut call = scene.call();
    call.netns = other.path().into();
    answer_of(&call, "DEL", &scene.moving())?.success()?;
    unchanged(&inside, || state(&other), "in the other pod")?;
    ensure!(
        scene
            .host
            .netns
            .ip("addr show nic0")?
            .contains("10.9.0.1/24"),
        "nic0 is not back"
    );
    answer_of(&neighbour, "DEL", &theirs)?.success()?;
    unchanged(&before, || scene.host_state(), "after both")
}

fn rewritten() -> Result<()> {
    let scene = Scene::furnished()?;
    scene.host.add_nic("nic1", "peer1")?;
    for keys in [
        json!({"attach": "macvlan", "master": "nic1"}),
        json!({"attach": "move", "device": "nic1"}),
        json!({"attach": "move", "device": "gone"}),
        json!({"type": "rdma"}),
        json!({"cniVersion": "0.3.1"}),
    ] {
        let before = scene.host_state()?;
        answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
        scene
            .del_returns(&scene.network(&keys), &before)
            .with_context(|| keys.to_string())?;
    }
    Ok(())
}

/// A configuration that ADD refuses is no reason to keep a NIC.
fn wrong_keys() -> Result<()> {
    let scene = Scene::furnished()?;
    for keys in [
        json!({"attach": 7}),
        json!({"attach": "bridge"}),
        json!({"mtu": "x", "device": [], "master": {}, "linkInContainer": "x"}),
        json!({"ipam": "x"}),
        json!({"ipam": {"type": "../x"}}),
        json!({"atach": "move"}),
        json!({"runtimeConfig": []}),
        json!({"prevResult": "x"}),
        json!({"args": 7, "capabilities": "x", "dns": 7}),
    ] {
        let before = scene.host_state()?;
        answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
        scene
            .del_returns(&scene.network(&keys), &before)
            .with_context(|| keys.to_string())?;
    }
    Ok(())
}

/// Go reads 10,000 levels.
fn nested_too_deep() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    let (open, close) = ("[".repeat(5000), "]".repeat(5000));
    let text = scene.moving().to_string();
    let deep = text.replacen('{', &format!(r#"{{"args":{open}{close},"#), 1);
    for _ in 0..2 {
        e2e::scene::answer_to(&scene.call(), "DEL", deep.as_bytes())?.success()?;
        unchanged(&before, || scene.host_state(), "after DEL")?;
    }
    let answer = e2e::scene::answer_to(&scene.call(), "ADD", deep.as_bytes())?;
    refusal(&answer, &[6], &["recursion"])?;
    unchanged(&before, || scene.host_state(), "after the refused ADD")
}

fn at_once() -> Result<()> {
    let scene = Scene::furnished()?;
    for _ in 0..5 {
        let before = scene.host_state()?;
        answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
        let document = scene.moving().to_string();
        let both = [
            Running::start(&mut scene.call().command("DEL"), document.as_bytes())?,
            Running::start(&mut scene.call().command("DEL"), document.as_bytes())?,
        ];
        for running in both {
            let answer = running.answer()?;
            // One may get "try again" while the other works.
            if !answer.status.success() {
                refusal(&answer, &[e2e::scene::TRY_AGAIN], &[])?;
            }
        }
        scene.del_returns(&scene.moving(), &before)?;
    }
    Ok(())
}

fn gc_elsewhere() -> Result<()> {
    let scene = Scene::furnished()?;
    answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    let (host, pod) = (scene.host_state()?, state(&scene.pod)?);
    for name in ["rail", "rail00", "rail0.", "rail0@c1", "other"] {
        let mut network = scene.child();
        network["name"] = name.into();
        network["cni.dev/valid-attachments"] = json!([]);
        answer_of(&scene.call(), "GC", &network)?;
        unchanged(&host, || scene.host_state(), name)?;
        unchanged(&pod, || state(&scene.pod), name)?;
    }
    Ok(())
}

fn gc_foreign() -> Result<()> {
    let scene = Scene::furnished()?;
    scene.in_pod(&[
        "link add eth0 type veth peer name cable",
        "link set eth0 alias nic0",
    ])?;
    let (host, pod) = (scene.host_state()?, state(&scene.pod)?);
    let mut network = scene.moving();
    network["cni.dev/valid-attachments"] = json!([]);
    answer_of(&scene.call_of(&scene.pod, "c1", "eth0"), "GC", &network)?.success()?;
    unchanged(&host, || scene.host_state(), "after GC")?;
    unchanged(&pod, || state(&scene.pod), "in the pod, after GC")
}

fn journal_lost() -> Result<()> {
    let scene = Scene::furnished()?;
    scene.in_pod(&[
        "link add eth0 type veth peer name cable",
        "link set eth0 up",
    ])?;
    answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    fs::remove_dir_all(scene.host.state())?;
    let leases = scene.host.left_behind();
    ensure!(!leases.is_empty(), "no lease");
    let (host, pod) = (state(&scene.host.netns)?, state(&scene.pod)?);
    for ifname in ["net1", "eth0"] {
        answer_of(
            &scene.call_of(&scene.pod, "c1", ifname),
            "DEL",
            &scene.child(),
        )?
        .success()?;
        unchanged(&host, || state(&scene.host.netns), "after DEL")?;
        unchanged(&pod, || state(&scene.pod), "in the pod, after DEL")?;
    }
    let leases = scene.host.left_behind();
    ensure!(leases.is_empty(), "after DEL: {leases:?}");
    Ok(())
}

/// That network puts a child of this kind with a lease of our own IPAM upon `nic0`.
fn child_of(scene: &Scene, attach: &str) -> Value {
    let mut network = scene.child();
    network["attach"] = attach.into();
    network
}

/// No child is left in a namespace.
fn no_child(netns: &Netns, when: &str) -> Result<()> {
    let links = netns.ip("-d -o link show")?;
    ensure!(
        !links.contains("macvlan") && !links.contains("ipvlan"),
        "{when}, a child is left:\n{links}"
    );
    Ok(())
}

fn changed(attach: &str, pod: &[&str]) -> Result<()> {
    let scene = Scene::furnished()?;
    let network = child_of(&scene, attach);
    scene.returns(&network, pod)?;
    no_child(&scene.pod, "after DEL")
}

/// The pod's own macvlan, made by another plugin, takes over name and MAC address of ours.
fn swapped() -> Result<()> {
    let scene = Scene::furnished()?;
    scene.on_host(&[
        "link add theirs link nic0 type macvlan mode bridge",
        &format!("link set theirs netns {}", scene.pod.name()),
    ])?;
    scene.in_pod(&["link set theirs name eth0", "link set eth0 up"])?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    let ours = index_of(&scene.pod, "net1")?;
    let mac = e2e::scene::mac_of(&scene.pod, "net1")?;
    scene.in_pod(&[
        "link set net1 down",
        "link set net1 address 02:aa:aa:aa:aa:aa",
        "link set net1 name evil",
        "link set evil up",
        "link set eth0 down",
        &format!("link set eth0 address {mac}"),
        "link set eth0 name net1",
        "link set net1 up",
    ])?;
    answer_of(&scene.call(), "DEL", &scene.child())?.success()?;
    unchanged(&before, || scene.host_state(), "after DEL")?;
    ensure!(index_of(&scene.pod, "net1")? != ours);
    ensure!(scene.pod.ip("link show evil").is_err(), "evil is left");
    Ok(())
}

fn index_reused() -> Result<()> {
    let scene = Scene::furnished()?;
    let nic = index_of(&scene.host.netns, "nic0")?;
    scene.in_pod(&[&format!("link add below index {nic} type bridge")])?;
    let before = scene.host_state()?;
    for made in [
        "link add net9 index {index} type bridge",
        // On a link of the pod that has the index of the master.
        "link add net9 index {index} link below type macvlan mode bridge",
    ] {
        answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
        let index = index_of(&scene.pod, "net1")?;
        scene.in_pod(&["link del net1"])?;
        scene.in_pod(&[&made.replace("{index}", &index.to_string())])?;
        scene.del_returns(&scene.child(), &before)?;
        ensure!(scene.pod.ip("link show net9").is_ok(), "{made} is gone");
        scene.in_pod(&["link del net9"])?;
    }
    Ok(())
}

fn deleted() -> Result<()> {
    let scene = Scene::furnished()?;
    let log = scene.host.directory().join("cni.log");
    scene.policy(&json!({}), &json!({"log": {"file": log, "level": "warn"}}))?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    scene.in_pod(&["link del net1"])?;
    scene.del_returns(&scene.child(), &before)?;
    answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    scene.del_returns(&scene.child(), &before)?;
    let text = fs::read_to_string(&log).unwrap_or_default();
    ensure!(text.is_empty(), "{text}");
    Ok(())
}

/// ADD, and its child is not in the pod but on the host, where the kernel makes one of IPoIB: ADD was
/// killed before it moved it.
fn killed_before_the_move(scene: &Scene, master: &str) -> Result<()> {
    answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    let index = index_of(&scene.pod, "net1")?;
    scene.in_pod(&["link del net1"])?;
    scene.on_host(&[&format!(
        "link add left index {index} link {master} type macvlan mode bridge"
    )])
}

fn left_on_host(master: &str, ends: bool) -> Result<()> {
    let scene = Scene::furnished()?;
    killed_before_the_move(&scene, master)?;
    answer_of(&scene.call(), "DEL", &scene.child())?.success()?;
    let links = scene.host.netns.ip("-o link show")?;
    ensure!(links.contains("left@") != ends, "after DEL: {links}");
    if !ends {
        scene.on_host(&["link del left"])?;
    }
    scene.returns(&scene.moving(), &[])
}

fn left_after_pod() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    killed_before_the_move(&scene, "nic0")?;
    scene.pod.delete()?;
    answer_of(&scene.call(), "DEL", &scene.child())?.success()?;
    unchanged(&before, || scene.host_state(), "after DEL")
}
