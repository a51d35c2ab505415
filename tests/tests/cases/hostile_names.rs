//! Names that are too long, taken, or the same on both sides: the NIC comes back, at the latest
//! when its name is free again.

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::host_state::{State, state, unchanged};
use e2e::netns::Netns;
use e2e::scene::{INVALID_ENVIRONMENT, INVALID_NETWORK, Scene, answer_of, index_of, mac_of};
use serde_json::json;

use super::hostile_bytes::age;

cases! {
    an_altname_of_16_bytes_is_a_device => long_device(16);
    an_altname_of_127_bytes_is_a_device => long_device(127);
    an_altname_of_16_bytes_is_a_master: Macvlan => long_master(16);
    an_altname_of_127_bytes_is_a_master: Macvlan => long_master(127);
    a_name_of_5000_bytes_is_refused_in_few_words => longer();
    a_long_name_that_nothing_has_is_refused => unknown_long();
    long_altnames_of_other_links_stop_nothing: Macvlan => long_elsewhere();
    five_hundred_altnames_of_a_pod_stop_nothing => many_altnames(&"a".repeat(118), 500);
    an_altname_like_a_path_is_only_a_name => path_altname();
    an_interface_name_of_15_bytes_works: Macvlan => ifname_of_15();
    an_interface_name_of_16_bytes_is_refused => ifname(&"n".repeat(16));
    an_interface_name_of_300_bytes_is_refused => ifname(&"n".repeat(300));
    the_interface_may_have_the_name_that_it_has_on_the_host => same_name("nic0");
    the_interface_may_have_the_altname_that_it_has_on_the_host => same_name("enp59s0np0");
    the_interface_may_have_the_name_of_another_host_link => same_name("peer0");
    a_pod_that_gives_its_nic_the_hosts_name_as_altname_loses_it =>
        pod_takes(&["link property add dev net1 altname nic0"]);
    a_pod_that_gives_another_link_the_hosts_name_loses_the_nic =>
        pod_takes(&["link add nic0 type veth peer name other"]);
    a_pod_that_gives_another_link_the_hosts_name_as_altname_loses_the_nic => pod_takes(&[
        "link add other type veth peer name another",
        "link property add dev other altname nic0",
    ]);
    a_pod_that_gives_another_link_the_hosts_altname_loses_the_nic => pod_takes(&[
        "link property del dev net1 altname enp59s0np0",
        "link add enp59s0np0 type veth peer name another",
    ]);
    a_pod_that_gives_its_nic_the_altname_of_another_host_link_loses_it =>
        pod_takes(&["link property add dev net1 altname peer0"]);
    a_name_taken_by_another_netdev_is_repaired_by_the_next_add: Macvlan =>
        taken("link add nic0 type veth peer name other", "link del nic0", Repair::Add);
    a_name_taken_by_another_netdev_is_repaired_by_the_next_del: Macvlan =>
        taken("link add nic0 type veth peer name other", "link del nic0", Repair::Del);
    a_name_taken_by_another_netdev_is_repaired_by_reclaim =>
        taken("link add nic0 type veth peer name other", "link del nic0", Repair::Reclaim);
    a_name_taken_as_an_altname_is_repaired_by_the_next_add: Macvlan => taken(
        "link property add dev peer0 altname nic0",
        "link property del dev peer0 altname nic0",
        Repair::Add,
    );
    a_name_taken_as_an_altname_is_repaired_by_reclaim => taken(
        "link property add dev peer0 altname nic0",
        "link property del dev peer0 altname nic0",
        Repair::Reclaim,
    );
    the_netdev_that_took_the_name_is_left_alone => taker_untouched();
    taken_names_for_the_time_between_do_not_strand_the_nic => temporary_names_taken();
    a_name_taken_when_the_namespace_died_is_repaired_by_reclaim => taken_and_dead();
    a_nic_that_is_up_is_renamed_on_the_way_back => renamed_while_up();
}

fn long(length: usize) -> String {
    let mut name = "rail-zero-of-".to_owned();
    name.extend(std::iter::repeat_n('x', length - name.len()));
    name
}

fn long_device(length: usize) -> Result<()> {
    let scene = Scene::furnished()?;
    let name = long(length);
    scene.on_host(&[&format!("link property add dev nic0 altname {name}")])?;
    let network = scene.network(&json!({"attach": "move", "device": name}));
    scene.returns(&network, &["link set net1 name mine"])
}

fn long_master(length: usize) -> Result<()> {
    let scene = Scene::furnished()?;
    let name = long(length);
    scene.on_host(&[&format!("link property add dev nic0 altname {name}")])?;
    let network = scene.network(&json!({"attach": "macvlan", "master": name}));
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &network)?.success()?;
    scene.del_returns(&network, &before)
}

fn longer() -> Result<()> {
    let scene = Scene::furnished()?;
    for (attach, key) in [("move", "device"), ("macvlan", "master")] {
        let network = scene.network(&json!({"attach": attach, key: "x".repeat(5000)}));
        scene.refuses(&network, &[INVALID_NETWORK], &[])?;
        let answer = answer_of(&scene.call(), "ADD", &network)?;
        let said = answer.stdout.len() + answer.stderr.len();
        ensure!(said < 4000, "{said} bytes about one name");
    }
    Ok(())
}

fn unknown_long() -> Result<()> {
    let scene = Scene::furnished()?;
    for length in [16, 127, 128, 129, 255] {
        for (attach, key) in [("move", "device"), ("macvlan", "master")] {
            let network = scene.network(&json!({"attach": attach, key: long(length)}));
            scene.refuses(&network, &[INVALID_NETWORK], &[])?;
        }
    }
    Ok(())
}

fn long_elsewhere() -> Result<()> {
    let scene = Scene::furnished()?;
    scene.on_host(&[
        &format!("link property add dev peer0 altname {}", long(127)),
        &format!("link property add dev nic0 altname {}", long(126)),
    ])?;
    scene.in_pod(&[
        "link add other type veth peer name another",
        &format!("link property add dev other altname {}", long(125)),
    ])?;
    for network in [scene.child(), scene.moving()] {
        let before = scene.host_state()?;
        answer_of(&scene.call(), "ADD", &network)?.success()?;
        scene.del_returns(&network, &before)?;
    }
    Ok(())
}

/// A link's message is longer then than the buffers that most programs read with.
fn many_altnames(stem: &str, count: usize) -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    let names: Vec<String> = (0..count)
        .map(|n| format!("property add dev net1 altname {stem}{n:04}"))
        .collect();
    let batch = scene.host.directory().join("batch");
    let lines: String = names.iter().map(|line| format!("link {line}\n")).collect();
    std::fs::write(&batch, lines)?;
    // The kernel ends the list at 64 KiB; what fitted is there.
    let _ = scene.in_pod(&[&format!("-force -batch {}", batch.display())]);
    let other = scene.another_pod()?;
    let child = scene.call_of(&other, "c2", "net1");
    let mut upon_peer = scene.child();
    upon_peer["master"] = "peer0".into();
    answer_of(&child, "ADD", &upon_peer)?
        .success()
        .context("ADD of another pod")?;
    answer_of(&child, "DEL", &upon_peer)?
        .success()
        .context("DEL of another pod")?;
    scene.del_returns(&scene.moving(), &before)
}

fn path_altname() -> Result<()> {
    let scene = Scene::furnished()?;
    scene.refuses(
        &scene.network(&json!({"attach": "move", "device": "../../class/net/nic0"})),
        &[INVALID_NETWORK],
        &[],
    )?;
    scene.returns(
        &scene.moving(),
        &[
            "altname net1 ../../../../etc",
            "altname net1 a:b",
            "altname net1 %d",
            "altname net1 a\\x20b\\x09c",
            "altname net1 /",
            "altname net1 ..",
        ],
    )
}

fn ifname_of_15() -> Result<()> {
    let scene = Scene::furnished()?;
    let name = "n".repeat(15);
    for network in [scene.child(), scene.moving()] {
        let before = scene.host_state()?;
        let call = scene.call_of(&scene.pod, "c1", &name);
        answer_of(&call, "ADD", &network)?.success()?;
        ensure!(scene.pod.ip(&format!("link show {name}")).is_ok());
        answer_of(&call, "DEL", &network)?.success()?;
        unchanged(&before, || scene.host_state(), "after DEL")?;
    }
    Ok(())
}

fn ifname(name: &str) -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    for network in [scene.child(), scene.moving()] {
        for command in ["ADD", "CHECK"] {
            let answer = answer_of(&scene.call_of(&scene.pod, "c1", name), command, &network)?;
            e2e::scene::refusal(&answer, &[INVALID_ENVIRONMENT], &["CNI_IFNAME"])?;
        }
        unchanged(&before, || scene.host_state(), "after refusals")?;
    }
    Ok(())
}

fn same_name(name: &str) -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let call = scene.call_of(&scene.pod, "c1", name);
    answer_of(&call, "ADD", &scene.moving())?
        .success()
        .context("ADD")?;
    let link = scene.pod.ip_json(&format!("link show dev {name}"))?;
    ensure!(link[0]["ifname"] == name, "{link}");
    answer_of(&call, "DEL", &scene.moving())?
        .success()
        .context("DEL")?;
    unchanged(&before, || scene.host_state(), "after DEL")
}

fn pod_takes(pod: &[&str]) -> Result<()> {
    let scene = Scene::furnished()?;
    scene.returns(&scene.moving(), pod)
}

#[derive(Clone, Copy)]
enum Repair {
    Add,
    Del,
    Reclaim,
}

fn taken(take: &str, free: &str, repair: Repair) -> Result<()> {
    let scene = Scene::furnished()?;
    scene.host.add_nic("nic1", "peer1")?;
    let before = scene.host_state()?;
    // An attachment of another pod, of a network that has nothing to do with it.
    let other = scene.another_pod()?;
    let call = scene.call_of(&other, "c2", "net1");
    let mut unrelated = scene.child();
    unrelated["name"] = "rail1".into();
    unrelated["master"] = "nic1".into();
    if matches!(repair, Repair::Del) {
        answer_of(&call, "ADD", &unrelated)?.success()?;
    }
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    let mac = mac_of(&scene.pod, "net1")?;
    scene.on_host(&[take])?;
    answer_of(&scene.call(), "DEL", &scene.moving())?
        .success()
        .context("DEL with the name taken")?;
    let on_host = by_mac(&scene.host.netns, &mac)?;
    ensure!(!on_host.is_empty(), "the NIC is lost");
    ensure!(
        scene.host.netns.ip("addr")?.contains("10.9.0.1/24"),
        "its address did not come back"
    );
    scene.on_host(&[free])?;
    match repair {
        // The next pod that wants the NIC finds it, whatever it is called.
        Repair::Add => {
            answer_of(&call, "ADD", &scene.moving())?
                .success()
                .context("the next ADD")?;
            answer_of(&call, "DEL", &scene.moving())?.success()?;
        }
        Repair::Del => drop(answer_of(&scene.call(), "DEL", &scene.moving())?.success()?),
        Repair::Reclaim => {
            let answer = scene.tool("rdmactl", &["reclaim"])?;
            ensure!(answer.status.success(), "{}", answer.stderr);
        }
    }
    answer_of(&call, "DEL", &unrelated)?.success()?;
    unchanged(&before, || scene.host_state(), "after the repair")
}

/// Names of the links with a MAC address.
fn by_mac(netns: &Netns, mac: &str) -> Result<Vec<String>> {
    let links = netns.ip_json("link show")?;
    let all = links.as_array().context("links")?;
    Ok(all
        .iter()
        .filter(|link| link["address"] == mac)
        .filter_map(|link| link["ifname"].as_str().map(str::to_owned))
        .collect())
}

/// What a namespace has of one link.
fn of_link(netns: &Netns, link: &str) -> Result<State> {
    let mut all = state(netns)?;
    all.retain(|key, _| key.split_whitespace().any(|word| word == link));
    Ok(all)
}

fn taker_untouched() -> Result<()> {
    let scene = Scene::furnished()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    scene.on_host(&[
        "link add nic0 type veth peer name other",
        "link set nic0 mtu 1234 alias mine",
        "addr add 10.55.0.1/24 dev nic0",
        "link set nic0 up",
        "link set other up",
        "link property add dev nic0 altname enp59s0np0",
    ])?;
    let taker = of_link(&scene.host.netns, "nic0")?;
    ensure!(taker.len() > 10, "{taker:?}");
    answer_of(&scene.call(), "DEL", &scene.moving())?.success()?;
    let mut now = of_link(&scene.host.netns, "nic0")?;
    // Rules and routes that the NIC had by name are its own again.
    now.retain(|key, _| taker.contains_key(key));
    e2e::cni_host::same(&taker, &now, "after DEL, of the netdev that took the name")
}

fn temporary_names_taken() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    let mac = mac_of(&scene.pod, "net1")?;
    let index = index_of(&scene.pod, "net1")?;
    let mut names = vec!["nic0".to_owned()];
    for number in (0..24).chain(index..index + 2) {
        names.extend([format!("rdma-dev{number}"), format!("dev{number}")]);
    }
    names.sort();
    names.dedup();
    for name in &names {
        scene.on_host(&[&format!("link property add dev peer0 altname {name}")])?;
    }
    answer_of(&scene.call(), "DEL", &scene.moving())?.success()?;
    ensure!(
        !by_mac(&scene.host.netns, &mac)?.is_empty(),
        "the NIC is lost"
    );
    for name in &names {
        scene.on_host(&[&format!("link property del dev peer0 altname {name}")])?;
    }
    scene.tool("rdmactl", &["reclaim"])?;
    unchanged(&before, || scene.host_state(), "after the repair")
}

fn taken_and_dead() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    scene.pod_dies("net1")?;
    scene.on_host(&["link add nic0 type veth peer name other"])?;
    age(&scene)?;
    let answer = scene.tool("rdmactl", &["reclaim"])?;
    ensure!(answer.status.success(), "{}", answer.stderr);
    ensure!(
        scene.host.netns.ip("addr")?.contains("10.9.0.1/24"),
        "its address did not come back"
    );
    scene.on_host(&["link del nic0"])?;
    scene.tool("rdmactl", &["reclaim"])?;
    unchanged(&before, || scene.host_state(), "after the repair")
}

fn renamed_while_up() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    // It comes back under the pod's name, and somebody sets it up before we come.
    scene.pod_dies("net1")?;
    scene.on_host(&["link set net1 up", "addr add 10.9.0.1/24 dev net1"])?;
    answer_of(&scene.call(), "DEL", &scene.moving())?.success()?;
    unchanged(&before, || scene.host_state(), "after DEL")
}
