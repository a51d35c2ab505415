//! Every way to say which link is meant: a link of the pod is never mistaken for one of the host.

use anyhow::{Context, Result};
use e2e::cases;
use e2e::host_state::{state, unchanged};
use e2e::scene::{
    DENIED, INVALID_NETWORK, Scene, TRY_AGAIN, UNAVAILABLE, answer_of, index_of, refusal,
};
use serde_json::{Value, json};

cases! {
    link_in_container_is_refused => link_in_container();
    a_link_of_the_pod_is_no_master => pods_link();
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

fn link_in_container() -> Result<()> {
    let scene = pod_with_way_out()?;
    for keys in [
        json!({}),
        json!({"attach": "move", "device": "nic0"}),
        json!({"attach": "macvlan", "master": "eth0"}),
        json!({"attach": "ipvlan", "master": "nic0"}),
        json!({"attach": "move", "deviceID": "0000:3b:00.0"}),
        json!({"attach": "macvlan", "deviceID": "0000:3b:00.0_3e71787e_1"}),
        json!({"attach": "move", "runtimeConfig": {"deviceID": "0000:3b:00.0"}}),
    ] {
        let mut all = keys.clone();
        all["linkInContainer"] = true.into();
        scene
            .refuses(
                &scene.network(&all),
                &[2],
                &[
                    "linkInContainer: rdma-netdev does not support this key",
                    "master",
                ],
            )
            .with_context(|| keys.to_string())?;
    }
    Ok(())
}

fn pods_link() -> Result<()> {
    let scene = pod_with_way_out()?;
    for attach in ["macvlan", "ipvlan", "ipoib"] {
        let network = scene.network(&json!({"attach": attach, "master": "eth0"}));
        scene.refuses(&network, &[INVALID_NETWORK], &["eth0"])?;
    }
    Ok(())
}

fn both() -> Result<()> {
    let scene = Scene::furnished()?;
    for (keys, word) in [
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

fn same_index() -> Result<()> {
    let scene = pod_with_way_out()?;
    scene.in_pod(&["link add own link eth0 type macvlan mode bridge"])?;
    let other = scene.another_pod()?;
    let call = scene.call_of(&other, "c2", "net1");
    let before = scene.host_state()?;
    answer_of(&call, "ADD", &scene.moving())?.success()?;
    answer_of(&call, "DEL", &scene.moving())?.success()?;
    unchanged(&before, || scene.host_state(), "after the move")
}
