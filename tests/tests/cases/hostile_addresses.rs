//! Addresses that end by themselves: on the way into a pod and back they neither become
//! permanent nor live longer.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::host_state::unchanged;
use e2e::netns::Netns;
use e2e::scene::{Scene, answer_of};
use serde_json::Value;

cases! {
    a_lifetime_of_ipv6_stays_with_the_host_and_comes_back_shorter => there_and_back_ipv6();
    an_address_that_ended_in_the_pod_does_not_come_back => ended();
    an_address_that_ended_unseen_does_not_return_from_a_dead_namespace => ended_dead();
    an_address_about_to_end_does_not_fail_the_add => about_to_end();
    a_deprecated_address_stays_deprecated => deprecated();
    a_pod_cannot_prolong_an_address_of_the_host => prolonged();
    an_address_with_the_longest_lifetime_stays_finite => longest();
}

/// What is left of an address, valid and preferred, in seconds; nothing without the address.
fn left(netns: &Netns, link: &str, address: &str) -> Result<Option<(u64, u64)>> {
    let links = netns.ip_json(&format!("addr show dev {link}"))?;
    let all = links[0]["addr_info"].as_array().context("no addresses")?;
    let found = all.iter().find(|entry| entry["local"] == address);
    let seconds = |entry: &Value, key: &str| entry[key].as_u64().context("no lifetime");
    found
        .map(|entry| {
            Ok((
                seconds(entry, "valid_life_time")?,
                seconds(entry, "preferred_life_time")?,
            ))
        })
        .transpose()
}

fn with_address(command: &str) -> Result<Scene> {
    let scene = Scene::furnished()?;
    scene.on_host(&[command])?;
    Ok(scene)
}

fn there_and_back_ipv6() -> Result<()> {
    const ADDRESS: &str = "fd09::77";
    let scene =
        with_address("addr add fd09::77/64 dev nic0 nodad valid_lft 9000 preferred_lft 8000")?;
    // The kernel makes the route of the address a moment later.
    let has_route = || -> Result<bool> {
        let routes = scene
            .host
            .netns
            .ip_json("-6 route show table local dev nic0")?;
        let routes = routes.as_array().context("routes")?;
        Ok(routes.iter().any(|route| route["dst"] == ADDRESS))
    };
    let begun = Instant::now();
    while !has_route()? {
        ensure!(begun.elapsed() < Duration::from_secs(20), "no route");
        sleep(Duration::from_millis(20));
    }
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    sleep(Duration::from_millis(1200));
    // Nothing would renew it there.
    ensure!(
        left(&scene.pod, "net1", ADDRESS)?.is_none(),
        "the pod has {ADDRESS}"
    );
    answer_of(&scene.call(), "DEL", &scene.moving())?.success()?;
    unchanged(&before, || scene.host_state(), "after DEL")?;
    let after = left(&scene.host.netns, "nic0", ADDRESS)?.context("the address is not back")?;
    for (what, back, at_first) in [("valid", after.0, 9000), ("preferred", after.1, 8000)] {
        ensure!(
            back < at_first,
            "{what} is {back} of {at_first} seconds, after one second"
        );
        ensure!(
            back + 60 > at_first,
            "{what} is {back} of {at_first} seconds, after two seconds"
        );
    }
    Ok(())
}

fn ended() -> Result<()> {
    let scene = Scene::furnished()?;
    let without = scene.host_state()?;
    scene.on_host(&[
        "addr add 10.9.7.1/24 dev nic0 valid_lft 2 preferred_lft 1",
        "addr add fd09::77/64 dev nic0 nodad valid_lft 2 preferred_lft 1",
    ])?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    sleep(Duration::from_millis(2500));
    let answer = answer_of(&scene.call(), "DEL", &scene.moving())?;
    answer.success()?;
    ensure!(
        !answer.stderr.contains("10.9.7.1"),
        "an expected end is not a warning: {}",
        answer.stderr
    );
    unchanged(&without, || scene.host_state(), "after DEL")
}

fn ended_dead() -> Result<()> {
    let scene = Scene::furnished()?;
    let without = scene.host_state()?;
    scene.on_host(&["addr add 10.9.7.1/24 dev nic0 valid_lft 2 preferred_lft 2"])?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    scene.pod_dies("net1")?;
    sleep(Duration::from_millis(2500));
    answer_of(&scene.call(), "DEL", &scene.moving())?.success()?;
    unchanged(&without, || scene.host_state(), "after DEL")
}

/// It may end between the snapshot and the pod's set-up.
fn about_to_end() -> Result<()> {
    let scene = Scene::furnished()?;
    let without = scene.host_state()?;
    for round in 0..4 {
        scene.on_host(&["addr add 10.9.7.1/24 dev nic0 valid_lft 1 preferred_lft 1"])?;
        sleep(Duration::from_millis(600 + round * 130));
        answer_of(&scene.call(), "ADD", &scene.moving())?
            .success()
            .context("ADD")?;
        let inside = left(&scene.pod, "net1", "10.9.7.1")?;
        ensure!(
            inside.is_none_or(|(valid, _)| valid <= 1),
            "it lives on in the pod: {inside:?}"
        );
        answer_of(&scene.call(), "DEL", &scene.moving())?.success()?;
        unchanged(&without, || scene.host_state(), "once it has ended")?;
    }
    Ok(())
}

fn deprecated() -> Result<()> {
    let scene =
        with_address("addr add fd09::77/64 dev nic0 nodad valid_lft forever preferred_lft 0")?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    let inside = left(&scene.pod, "net1", "fd09::77")?.context("it is not in the pod")?;
    ensure!(
        inside.1 == 0,
        "preferred for {} seconds in the pod",
        inside.1
    );
    scene.del_returns(&scene.moving(), &before)?;
    let after = left(&scene.host.netns, "nic0", "fd09::77")?.context("it is not back")?;
    ensure!(
        after.1 == 0,
        "preferred for {} seconds on the host",
        after.1
    );
    Ok(())
}

fn prolonged() -> Result<()> {
    let scene = with_address("addr add 10.9.7.1/24 dev nic0 valid_lft 9000 preferred_lft 8000")?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    scene.in_pod(&["addr change 10.9.7.1/24 dev net1 valid_lft forever preferred_lft forever"])?;
    scene.del_returns(&scene.moving(), &before)?;
    let after = left(&scene.host.netns, "nic0", "10.9.7.1")?.context("it is not back")?;
    ensure!(after.0 <= 9000 && after.1 <= 8000, "{after:?}");
    Ok(())
}

fn longest() -> Result<()> {
    let scene = with_address(
        "addr add 10.9.7.1/24 dev nic0 valid_lft 4294967294 preferred_lft 4294967294",
    )?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    scene.del_returns(&scene.moving(), &before)
}
