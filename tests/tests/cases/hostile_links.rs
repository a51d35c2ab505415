//! `linkInContainer` and every way to say which link is meant: a link of the pod is never
//! mistaken for one of the host.

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::host_state::{State, state, unchanged};
use e2e::scene::{
    DENIED, INVALID_NETWORK, Scene, TRY_AGAIN, UNAVAILABLE, answer_of, index_of, mac_of, refusal,
};
use serde_json::{Value, json};

cases! {
    link_in_container_without_attach_never_touches_a_host_link: Macvlan => every_key(None);
    link_in_container_with_move_never_touches_a_host_link => every_key(Some("move"));
    link_in_container_with_macvlan_never_touches_a_host_link: Macvlan => every_key(Some("macvlan"));
    link_in_container_with_ipvlan_never_touches_a_host_link => every_key(Some("ipvlan"));
    link_in_container_with_ipoib_never_touches_a_host_link => every_key(Some("ipoib"));
    link_in_container_with_rdma_only_never_touches_a_host_link => every_key(Some("rdma-only"));
    link_in_container_with_an_exclusive_unit_does_not_take_the_link_of_the_same_index =>
        in_pod_with_way_out(&json!({"linkInContainer": true, "deviceID": "0000:3b:00.0"}));
    link_in_container_with_a_shared_unit_does_not_take_the_link_of_the_same_index =>
        in_pod_with_way_out(&json!({"linkInContainer": true, "deviceID": "0000:3b:00.0_3e71787e_1"}));
    link_in_container_with_a_unit_of_multus_does_not_take_the_link_of_the_same_index =>
        in_pod_with_way_out(&json!({"linkInContainer": true, "runtimeConfig": {"deviceID": "0000:3b:00.0"}}));
    a_master_in_the_container_has_its_child_there: Macvlan => child_in_the_pod();
    a_master_in_the_container_named_like_a_host_link_is_the_containers: Macvlan => same_name();
    link_in_container_must_be_a_boolean => not_a_boolean();
    a_device_beside_a_master_is_refused => both();
    a_virtual_link_is_not_moved_unless_the_policy_says_so => virtual_link();
    a_macvlan_of_the_host_is_not_moved_unless_the_policy_says_so: Macvlan => virtual_child();
    a_macvlan_of_the_host_is_no_master_of_a_macvlan: Macvlan =>
        above_the_uplink("macvlan mode bridge", "macvlan");
    a_macvlan_of_the_host_is_no_master_of_an_ipvlan: Macvlan =>
        above_the_uplink("macvlan mode bridge", "ipvlan");
    a_macvtap_of_the_host_is_no_master_of_a_macvlan: Macvlan =>
        above_the_uplink("macvtap mode bridge", "macvlan");
    an_ipvlan_of_the_host_is_no_master_of_an_ipvlan: Ipvlan =>
        above_the_uplink("ipvlan mode l2", "ipvlan");
    an_ipvlan_of_the_host_is_no_master_of_a_macvlan: Ipvlan =>
        above_the_uplink("ipvlan mode l2", "macvlan");
    a_macvlan_that_is_the_way_out_is_no_master_where_uplinks_are_allowed: Macvlan => shim_is_the_way_out();
    a_macvlan_of_the_pod_on_the_hosts_uplink_is_no_master_of_a_macvlan: Macvlan =>
        pods_own_on_the_uplink("macvlan mode bridge", "macvlan");
    a_macvtap_of_the_pod_on_the_hosts_uplink_is_no_master_of_a_macvlan: Macvlan =>
        pods_own_on_the_uplink("macvtap mode bridge", "macvlan");
    an_ipvlan_of_the_pod_on_the_hosts_uplink_is_no_master_of_an_ipvlan: Ipvlan =>
        pods_own_on_the_uplink("ipvlan mode l2", "ipvlan");
    a_macvlan_of_the_pod_on_the_pods_link_is_no_master_of_a_macvlan: Macvlan => pods_own_on_its_own();
    a_child_of_the_pods_link_does_not_hold_the_host_link_of_the_same_index: Macvlan => same_index();
    a_master_that_a_pod_has_is_for_later: Macvlan => taken(&json!({"attach": "macvlan", "master": "nic0"}));
    a_unit_that_a_pod_has_is_for_later =>
        taken_hardware(&json!({"attach": "macvlan", "deviceID": "0000:3b:00.0"}));
    a_link_of_another_pod_is_no_master: Macvlan =>
        of_another_pod(&json!({"attach": "macvlan", "master": "theirs"}));
    a_link_of_another_pod_is_no_device => of_another_pod(&json!({"attach": "move", "device": "theirs"}));
    loopback_is_never_given => loopback();
    an_index_is_no_name => index_for_name();
}

/// A pod whose default route leaves by `eth0`, which has the index that `nic0` has on the host.
fn pod_with_way_out() -> Result<Scene> {
    let scene = Scene::with_hardware()?;
    let index = index_of(&scene.host.netns, "nic0")?;
    scene.in_pod(&[
        &format!("link add eth0 index {index} type veth peer name cable"),
        "link set eth0 up",
        "link set cable up",
        "addr add 10.244.0.5/24 dev eth0",
        "route add default via 10.244.0.1",
    ])?;
    Ok(scene)
}

/// ADD is refused or makes a child of a link of the pod; host and pod are as before after DEL.
fn within_the_pod(scene: &Scene, before: &[State; 2], keys: &Value) -> Result<()> {
    let network = scene.network(keys);
    let answer = answer_of(&scene.call(), "ADD", &network)?;
    if answer.status.success() {
        let link = scene.pod.ip_json("link show dev net1")?;
        let parent = link[0]["link"]
            .as_str()
            .context("net1 is no child of a link here")?;
        ensure!(
            parent == "eth0" || parent == "cable",
            "net1 is upon {parent}"
        );
        ensure!(
            link[0].get("link_netnsid").is_none(),
            "net1 is upon a link of the host: {link}"
        );
    } else {
        refusal(&answer, &[], &[])?;
    }
    answer_of(&scene.call(), "DEL", &network)?
        .success()
        .context("DEL")?;
    unchanged(&before[0], || scene.host_state(), "after DEL")?;
    unchanged(&before[1], || state(&scene.pod), "in the pod, after DEL")
}

fn every_key(attach: Option<&str>) -> Result<()> {
    let scene = pod_with_way_out()?;
    let before = [scene.host_state()?, state(&scene.pod)?];
    let mac = mac_of(&scene.host.netns, "nic0")?;
    let path = "/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/net/nic0";
    for keys in [
        json!({}),
        json!({"device": "nic0"}),
        json!({"device": "eth0"}),
        json!({"device": "enp59s0np0"}),
        json!({"master": "nic0"}),
        json!({"master": "peer0"}),
        json!({"master": "eth0"}),
        json!({"deviceID": "0000:3b:00.0"}),
        json!({"deviceID": "0000:3b:00.0", "master": "nic0"}),
        json!({"deviceID": "0000:3b:00.0_3e71787e_1"}),
        json!({"hwaddr": mac}),
        json!({"kernelpath": path}),
        json!({"pciBusID": "0000:3b:00.0"}),
        json!({"rdmaDevice": "mlx5_0"}),
    ] {
        let mut all = keys.clone();
        all["linkInContainer"] = true.into();
        if let Some(attach) = attach {
            all["attach"] = attach.into();
        }
        within_the_pod(&scene, &before, &all).with_context(|| keys.to_string())?;
    }
    Ok(())
}

fn in_pod_with_way_out(keys: &Value) -> Result<()> {
    let scene = pod_with_way_out()?;
    let before = [scene.host_state()?, state(&scene.pod)?];
    within_the_pod(&scene, &before, keys)
}

fn child_in_the_pod() -> Result<()> {
    let scene = pod_with_way_out()?;
    let network =
        scene.network(&json!({"attach": "macvlan", "master": "eth0", "linkInContainer": true}));
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &network)?.success()?;
    let link = scene.pod.ip_json("link show dev net1")?;
    ensure!(
        link[0]["link"] == "eth0" && link[0].get("link_netnsid").is_none(),
        "{link}"
    );
    scene.del_returns(&network, &before)
}

fn same_name() -> Result<()> {
    let scene = Scene::furnished()?;
    scene.in_pod(&[
        "link add nic0 type veth peer name cable",
        "link set nic0 up",
    ])?;
    let network =
        scene.network(&json!({"attach": "macvlan", "master": "nic0", "linkInContainer": true}));
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &network)?.success()?;
    let link = scene.pod.ip_json("link show dev net1")?;
    ensure!(
        link[0]["link"] == "nic0" && link[0].get("link_netnsid").is_none(),
        "{link}"
    );
    scene.del_returns(&network, &before)
}

fn not_a_boolean() -> Result<()> {
    let scene = pod_with_way_out()?;
    for value in [json!("true"), json!(1), json!([true]), json!({})] {
        let keys = json!({"attach": "macvlan", "master": "nic0", "linkInContainer": value});
        scene.refuses(
            &scene.network(&keys),
            &[INVALID_NETWORK],
            &["linkInContainer"],
        )?;
    }
    Ok(())
}

fn both() -> Result<()> {
    let scene = Scene::furnished()?;
    for (keys, word) in [
        (json!({"device": "nic0", "master": "nic0"}), "master"),
        (
            json!({"attach": "move", "device": "nic0", "master": "peer0"}),
            "master",
        ),
        (
            json!({"attach": "macvlan", "device": "nic0", "master": "peer0"}),
            "device",
        ),
    ] {
        scene.refuses(&scene.network(&keys), &[INVALID_NETWORK], &[word])?;
    }
    Ok(())
}

fn virtual_link() -> Result<()> {
    let scene = Scene::furnished()?;
    scene.allow(&json!({"virtual": null}))?;
    scene.refuses(&scene.moving(), &[DENIED], &["nic0", "allow.virtual"])?;
    scene.allow(&json!({"virtual": false}))?;
    scene.refuses(&scene.moving(), &[DENIED], &["nic0", "allow.virtual"])?;
    scene.allow(&json!({}))?;
    scene.returns(&scene.moving(), &[])
}

fn virtual_child() -> Result<()> {
    let scene = Scene::furnished()?;
    scene.on_host(&[
        "link add mv0 link nic0 type macvlan mode bridge",
        "link set mv0 up",
    ])?;
    let network = scene.network(&json!({"attach": "move", "device": "mv0"}));
    for allow in [json!({"virtual": null}), json!({})] {
        scene.allow(&allow)?;
        scene.refuses(&network, &[DENIED], &["mv0", "macvlan", "cannot be told"])?;
    }
    Ok(())
}

/// While the first pod has `nic0`, this network of another pod is refused for now.
fn taken_on(scene: &Scene, keys: &Value) -> Result<()> {
    let before = scene.host_state()?;
    let first = scene.another_pod()?;
    let holder = scene.call_of(&first, "holder", "net1");
    answer_of(&holder, "ADD", &scene.moving())?
        .success()
        .context("the first pod's ADD")?;
    let inside = state(&first)?;
    if let Ok(tree) = scene.tree() {
        tree.hide_netdev("nic0");
    }
    scene.refuses(&scene.network(keys), &[TRY_AGAIN], &[])?;
    unchanged(&inside, || state(&first), "in the pod that has the NIC")?;
    if scene.tree().is_ok() {
        scene.show_nic()?;
    }
    answer_of(&holder, "DEL", &scene.moving())?.success()?;
    unchanged(&before, || scene.host_state(), "after the first pod's DEL")?;
    scene.returns(&scene.network(keys), &[])
}

fn taken(keys: &Value) -> Result<()> {
    taken_on(&Scene::furnished()?, keys)
}

fn taken_hardware(keys: &Value) -> Result<()> {
    taken_on(&Scene::with_hardware()?, keys)
}

fn of_another_pod(keys: &Value) -> Result<()> {
    let scene = Scene::furnished()?;
    let other = scene.another_pod()?;
    scene.perform(
        &other,
        &[
            "link add theirs type veth peer name cable",
            "link set theirs up",
        ],
    )?;
    let before = state(&other)?;
    scene.refuses(
        &scene.network(keys),
        &[INVALID_NETWORK, TRY_AGAIN],
        &["theirs"],
    )?;
    unchanged(&before, || state(&other), "in the other pod")
}

fn loopback() -> Result<()> {
    let scene = Scene::furnished()?;
    scene.allow(&json!({"uplinks": true}))?;
    for keys in [
        json!({"attach": "move", "device": "lo"}),
        json!({"attach": "macvlan", "master": "lo"}),
        json!({"attach": "move", "hwaddr": "00:00:00:00:00:00"}),
    ] {
        scene.refuses(&scene.network(&keys), &[DENIED, INVALID_NETWORK], &[])?;
    }
    Ok(())
}

fn index_for_name() -> Result<()> {
    let scene = Scene::furnished()?;
    let index = index_of(&scene.host.netns, "nic0")?;
    for name in [format!("if{index}"), index.to_string(), format!("#{index}")] {
        let keys = json!({"attach": "move", "device": name});
        scene.refuses(&scene.network(&keys), &[INVALID_NETWORK], &[&name])?;
    }
    Ok(())
}

/// The kernel puts a macvlan that is made on a macvlan on the link below that, and so with ipvlan.
fn above_the_uplink(shim: &str, attach: &str) -> Result<()> {
    let scene = Scene::furnished()?;
    scene.on_host(&[
        "route add default via 10.9.0.254 dev nic0",
        &format!("link add shim0 link nic0 type {shim}"),
        "link set shim0 up",
    ])?;
    let network = scene.network(&json!({"attach": attach, "master": "shim0"}));
    scene.refuses(&network, &[INVALID_NETWORK, DENIED], &["shim0", "nic0"])?;
    unavailable(&scene, &network, "shim0")?;
    let network = scene.network(&json!({"attach": attach, "master": "nic0"}));
    scene.refuses(&network, &[DENIED], &["nic0"])?;
    unavailable(&scene, &network, "default route")?;
    scene.host.add_nic("nic1", "peer1")?;
    let network = scene.network(&json!({"attach": attach, "master": "nic1"}));
    answer_of(&scene.call(), "STATUS", &network)?.success()?;
    Ok(())
}

/// STATUS says what ADD would.
fn unavailable(scene: &Scene, network: &Value, word: &str) -> Result<()> {
    let answer = answer_of(&scene.call(), "STATUS", network)?;
    refusal(&answer, &[UNAVAILABLE], &[word]).map(drop)
}

fn shim_is_the_way_out() -> Result<()> {
    let scene = Scene::furnished()?;
    scene.allow(&json!({"uplinks": true}))?;
    scene.on_host(&[
        "link add shim0 link nic0 type macvlan mode bridge",
        "link set shim0 up",
        "addr add 10.7.0.1/24 dev shim0",
        "route add default via 10.7.0.254",
    ])?;
    let network = scene.network(&json!({"attach": "macvlan"}));
    scene.refuses(&network, &[INVALID_NETWORK], &["shim0", "nic0"])
}

/// The pod's first interface, made by another plugin, is a child of the host's uplink.
fn pods_own_on_the_uplink(kind: &str, attach: &str) -> Result<()> {
    let scene = Scene::furnished()?;
    scene.on_host(&[
        "route add default via 10.9.0.254 dev nic0",
        &format!("link add theirs link nic0 type {kind}"),
        &format!("link set theirs netns {}", scene.pod.name()),
    ])?;
    scene.in_pod(&[
        "link set theirs name eth0",
        "link set eth0 up",
        "addr add 10.9.0.7/24 dev eth0",
        "route add default via 10.9.0.254",
    ])?;
    for keys in [
        json!({"attach": attach, "master": "eth0", "linkInContainer": true}),
        json!({"attach": attach, "linkInContainer": true}),
    ] {
        scene.refuses(
            &scene.network(&keys),
            &[INVALID_NETWORK, DENIED],
            &["eth0", attach],
        )?;
    }
    Ok(())
}

fn pods_own_on_its_own() -> Result<()> {
    let scene = pod_with_way_out()?;
    scene.in_pod(&["link add own link eth0 type macvlan mode bridge"])?;
    let network =
        scene.network(&json!({"attach": "macvlan", "master": "own", "linkInContainer": true}));
    scene.refuses(&network, &[INVALID_NETWORK], &["own", "eth0"])
}

fn same_index() -> Result<()> {
    let scene = pod_with_way_out()?;
    let within =
        scene.network(&json!({"attach": "macvlan", "master": "eth0", "linkInContainer": true}));
    answer_of(&scene.call(), "ADD", &within)?.success()?;
    let other = scene.another_pod()?;
    let call = scene.call_of(&other, "c2", "net1");
    let before = scene.host_state()?;
    answer_of(&call, "ADD", &scene.moving())?.success()?;
    answer_of(&call, "DEL", &scene.moving())?.success()?;
    unchanged(&before, || scene.host_state(), "after the move")?;
    answer_of(&scene.call(), "DEL", &within)?.success()?;
    Ok(())
}
