//! Netdevs that resemble each other: DEL returns the one that the host had, or says that it cannot,
//! and leaves every other one where it is.

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::cni::Answer;
use e2e::host_state::{State, state, unchanged};
use e2e::netns::Netns;
use e2e::scene::{DENIED, Scene, answer_of, index_of, mac_of};
use serde_json::{Value, json};

cases! {
    of_two_veths_with_one_mac_the_right_one_comes_back => twins(Made::Veth, How::Del);
    of_two_veths_with_one_mac_the_right_one_comes_back_from_a_dead_namespace =>
        twins(Made::Veth, How::Died);
    of_two_veths_with_one_mac_both_in_pods_each_comes_back => both(Made::Veth);
    a_vxlan_that_a_pod_could_imitate_is_refused => imitable(Made::Vxlan, "vxlan");
    of_two_vlans_of_one_nic_with_one_mac_the_right_one_comes_back: Vlan => twins(Made::Vlan, How::Del);
    of_two_vlans_of_one_nic_with_one_mac_both_in_pods_each_comes_back: Vlan => both(Made::Vlan);
    a_dummy_that_a_pod_could_imitate_is_refused: Dummy => imitable(Made::Dummy, "dummy");
    a_macvlan_that_a_pod_could_imitate_is_refused: Macvlan => imitable(Made::Macvlan, "macvlan");
    an_ipvlan_that_a_pod_could_imitate_is_refused: Ipvlan => imitable(Made::Ipvlan, "ipvlan");
    a_veth_whose_peer_is_in_a_pod_is_refused => peer_elsewhere();
    veths_whose_pod_exchanged_them_return_each_as_itself => exchanged(Made::Veth);
    vlans_whose_pod_exchanged_them_return_each_as_itself: Vlan => exchanged(Made::Vlan);
    a_mac_that_two_netdevs_have_is_refused => ambiguous_mac();
    a_decoy_with_the_nics_name_and_mac_is_left_in_the_pod => decoy(&[
        "link set net1 name real",
        "link add net1 address {mac} type veth peer name decoypeer",
    ]);
    a_decoy_with_the_nics_mac_is_left_in_the_pod_when_the_nic_changed_its_own => decoy(&[
        "link set net1 address 02:66:66:66:66:66",
        "link set net1 name real",
        "link add net1 address {mac} type veth peer name decoypeer",
    ]);
    a_decoy_with_the_nics_names_alias_and_mac_is_left_in_the_pod => decoy(&[
        "link property del dev net1 altname enp59s0np0",
        "link set net1 name real",
        "link set real alias nobody",
        "link add net1 address {mac} type veth peer name decoypeer",
        "link set net1 alias rail-zero",
        "link property add dev net1 altname enp59s0np0",
        "link property add dev net1 altname nic0",
    ]);
    a_decoy_upon_the_nic_with_its_mac_is_left_in_the_pod: Macvlan => decoy(&[
        "link set net1 name real",
        "link add net1 link real address {mac} type macvlan mode passthru",
    ]);
    a_nic_in_a_namespace_of_the_pods_own_with_a_decoy_left_behind_comes_back_or_del_says_so =>
        nested(&["link add net1 address {mac} type veth peer name decoypeer"]);
    a_nic_back_from_a_dead_namespace_of_the_pods_own_is_returned => nested_died();
    a_nic_that_the_host_has_already_is_made_whole => brought_back_by_hand();
    a_new_netdev_with_the_lost_ones_name_mac_and_index_is_left_alone => replaced();
    a_netdev_that_the_pod_deleted_and_made_anew_is_not_the_hosts => recreated_in_the_pod();
    a_child_that_the_pod_deleted_and_made_anew_is_left_alone: Macvlan => child_recreated();
    a_child_with_the_mac_of_its_master_does_not_take_it_along: Macvlan => child_like_master();
    a_host_link_with_the_childs_index_and_mac_is_left_alone: Macvlan => host_link_like_child();
}

#[derive(Clone, Copy)]
enum Made {
    Veth,
    Vxlan,
    Vlan,
    Dummy,
    Macvlan,
    Ipvlan,
}

#[derive(Clone, Copy, PartialEq)]
enum How {
    Del,
    Died,
}

const MAC: &str = "02:0a:0b:0c:0d:0e";

/// A host with `one` and `two`, which have one MAC address and addresses of their own.
fn with_twins(made: Made) -> Result<Scene> {
    let scene = Scene::furnished()?;
    for (name, number) in [("one", 1), ("two", 2)] {
        let make = match made {
            Made::Veth => format!("link add {name} address {MAC} type veth peer name {name}peer"),
            Made::Vxlan => format!(
                "link add {name} address {MAC} type vxlan id {number} dev nic0 dstport 4789"
            ),
            Made::Vlan => format!("link add {name} link nic0 address {MAC} type vlan id {number}"),
            Made::Dummy => format!("link add {name} address {MAC} type dummy"),
            Made::Macvlan => format!("link add {name} link nic0 type macvlan mode private"),
            Made::Ipvlan => format!("link add {name} link nic0 type ipvlan mode l2"),
        };
        scene.on_host(&[
            &make,
            &format!("sysctl ipv6/conf/{name}/accept_dad 0"),
            &format!("link set {name} up alias twin-{number} mtu 139{number}"),
            &format!("addr add 10.6{number}.0.1/24 dev {name}"),
        ])?;
        if matches!(made, Made::Veth) {
            scene.on_host(&[
                &format!("sysctl ipv6/conf/{name}peer/accept_dad 0"),
                &format!("link set {name}peer up"),
            ])?;
        }
    }
    Ok(scene)
}

fn taking(scene: &Scene, device: &str) -> Value {
    scene.network(&json!({"name": format!("net-{device}"), "attach": "move", "device": device}))
}

fn twins(made: Made, how: How) -> Result<()> {
    let scene = with_twins(made)?;
    let before = scene.host_state()?;
    for device in ["one", "two"] {
        let pod = scene.another_pod()?;
        let call = scene.call_of(&pod, "c1", "net1");
        let network = taking(&scene, device);
        answer_of(&call, "ADD", &network)?
            .success()
            .with_context(|| format!("ADD of {device}"))?;
        scene.perform(&pod, &["link set net1 down", "link set net1 name mine"])?;
        if how == How::Died {
            scene.perform(
                &pod,
                &[&format!("link set mine netns {}", scene.host.netns.name())],
            )?;
            pod.delete()?;
        }
        answer_of(&call, "DEL", &network)?
            .success()
            .with_context(|| format!("DEL of {device}"))?;
        unchanged(&before, || scene.host_state(), &format!("after {device}"))?;
    }
    Ok(())
}

fn both(made: Made) -> Result<()> {
    let scene = with_twins(made)?;
    let before = scene.host_state()?;
    let pods = [scene.another_pod()?, scene.another_pod()?];
    let calls = [
        scene.call_of(&pods[0], "c1", "net1"),
        scene.call_of(&pods[1], "c2", "net1"),
    ];
    for (call, device) in calls.iter().zip(["one", "two"]) {
        answer_of(call, "ADD", &taking(&scene, device))?
            .success()
            .context(device)?;
    }
    for (pod, mtu) in pods.iter().zip([1391, 1392]) {
        let link = pod.ip_json("link show dev net1")?;
        ensure!(link[0]["mtu"] == mtu, "not the right one: {link}");
    }
    // Each pod dresses its own up as the other's.
    scene.perform(&pods[0], &["link set net1 mtu 1392 alias twin-2"])?;
    scene.perform(&pods[1], &["link set net1 mtu 1391 alias twin-1"])?;
    for (call, device) in calls.iter().zip(["one", "two"]) {
        answer_of(call, "DEL", &taking(&scene, device))?
            .success()
            .context(device)?;
    }
    unchanged(&before, || scene.host_state(), "after both")
}

/// Of these a pod can make others, or the kernel allows several on one link.
fn imitable(made: Made, kind: &str) -> Result<()> {
    let scene = with_twins(made)?;
    let words = ["one", kind, "cannot be told"];
    scene.refuses(&taking(&scene, "one"), &[DENIED], &words)
}

/// The index of its peer is one of another namespace's.
fn peer_elsewhere() -> Result<()> {
    let scene = Scene::furnished()?;
    let other = scene.another_pod()?;
    scene.on_host(&[
        "link add one type veth peer name far",
        &format!("link set far netns {}", other.name()),
    ])?;
    let words = ["one", "veth", "cannot be told"];
    scene.refuses(&taking(&scene, "one"), &[DENIED], &words)
}

/// In one pod, which gives each the name of the other, another index, and a decoy the index that it
/// had.
fn exchanged(made: Made) -> Result<()> {
    let scene = with_twins(made)?;
    let before = scene.host_state()?;
    let calls = [
        scene.call_of(&scene.pod, "c1", "net1"),
        scene.call_of(&scene.pod, "c1", "net2"),
    ];
    for (call, device) in calls.iter().zip(["one", "two"]) {
        answer_of(call, "ADD", &taking(&scene, device))?
            .success()
            .context(device)?;
    }
    let (first, second) = (index_of(&scene.pod, "net1")?, index_of(&scene.pod, "net2")?);
    let inner = scene.another_pod()?;
    for name in ["net1", "net2"] {
        scene.in_pod(&[&format!("link set {name} netns {}", inner.name())])?;
    }
    scene.in_pod(&[&format!(
        "link add decoy index {first} address {MAC} type veth peer name far index {second}"
    )])?;
    let pod = scene.pod.name();
    inner.ip(&format!("link set net1 netns {pod} name net2"))?;
    inner.ip(&format!("link set net2 netns {pod} name net1"))?;
    ensure!(
        ![first, second].contains(&index_of(&scene.pod, "net1")?),
        "it has its index again"
    );
    for (call, device) in calls.iter().zip(["one", "two"]) {
        answer_of(call, "DEL", &taking(&scene, device))?
            .success()
            .context(device)?;
    }
    ensure!(scene.pod.ip("link show decoy").is_ok(), "the decoy is gone");
    unchanged(&before, || scene.host_state(), "after both")
}

fn ambiguous_mac() -> Result<()> {
    let scene = with_twins(Made::Veth)?;
    let network = scene.network(&json!({"attach": "move", "hwaddr": MAC}));
    scene.refuses(&network, &[7], &[MAC])
}

/// Commands with `{mac}` as the address that the NIC has.
fn with_mac(commands: &[&str], mac: &str) -> Vec<String> {
    commands
        .iter()
        .map(|command| command.replace("{mac}", mac))
        .collect()
}

fn perform(scene: &Scene, netns: &Netns, commands: &[String]) -> Result<()> {
    let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
    scene.perform(netns, &commands)
}

fn decoy(pod: &[&str]) -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    let mac = mac_of(&scene.pod, "net1")?;
    perform(&scene, &scene.pod, &with_mac(pod, &mac))?;
    answer_of(&scene.call(), "DEL", &scene.moving())?
        .success()
        .context("DEL")?;
    unchanged(&before, || scene.host_state(), "after DEL")?;
    // What the pod made itself is its own, whatever it is called; a child of the NIC may be gone.
    if pod.iter().any(|command| command.contains("type veth")) {
        ensure!(
            scene.pod.ip("link show net1").is_ok(),
            "the pod's own link is gone"
        );
    }
    ensure!(
        scene.pod.ip("link show real").is_err(),
        "the NIC is still in the pod"
    );
    Ok(())
}

/// Success means that the NIC is back; else the answer says which NIC is missing.
fn back_or_reported(scene: &Scene, before: &State, answer: &Answer) -> Result<bool> {
    if answer.status.success() {
        unchanged(before, || scene.host_state(), "after a DEL that succeeded")?;
        return Ok(true);
    }
    let (_, message) = answer.refusal()?;
    ensure!(
        message.contains("nic0"),
        "it does not say which NIC is missing: {message}"
    );
    Ok(false)
}

fn nested(left_behind: &[&str]) -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    let mac = mac_of(&scene.pod, "net1")?;
    let inner = scene.another_pod()?;
    scene.in_pod(&[&format!("link set net1 netns {}", inner.name())])?;
    scene.perform(&inner, &["link set net1 name deep", "link set deep up"])?;
    perform(&scene, &scene.pod, &with_mac(left_behind, &mac))?;
    let answer = answer_of(&scene.call(), "DEL", &scene.moving())?;
    if back_or_reported(&scene, &before, &answer)? {
        return Ok(());
    }
    ensure!(
        !scene.listed("pods")?.is_empty(),
        "no record says that the NIC is away"
    );
    // It is wherever the pod's process put it; the next DEL finds it once it is back in the pod.
    if scene.pod.ip("link show net1").is_ok() {
        scene.in_pod(&["link del net1"])?;
    }
    scene.perform(
        &inner,
        &[&format!("link set deep netns {}", scene.pod.name())],
    )?;
    answer_of(&scene.call(), "DEL", &scene.moving())?
        .success()
        .context("the DEL after that")?;
    unchanged(&before, || scene.host_state(), "after the DEL after that")
}

/// The kernel brings hardware from any dead namespace to the host, not to the one above.
fn nested_died() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    let inner = scene.another_pod()?;
    scene.in_pod(&[&format!("link set net1 netns {}", inner.name())])?;
    scene.perform(&inner, &["link set net1 name peer0"])?;
    scene.perform(&inner, &["link set peer0 name dev7"])?;
    scene.perform(
        &inner,
        &[&format!("link set dev7 netns {}", scene.host.netns.name())],
    )?;
    inner.delete()?;
    answer_of(&scene.call(), "DEL", &scene.moving())?.success()?;
    unchanged(&before, || scene.host_state(), "after DEL")
}

fn brought_back_by_hand() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    scene.in_pod(&[
        "link set net1 mtu 300",
        &format!("link set net1 netns {}", scene.host.netns.name()),
    ])?;
    scene.on_host(&[
        "link set net1 name nic0",
        "addr add 10.9.0.1/24 dev nic0",
        "link set nic0 up",
    ])?;
    answer_of(&scene.call(), "DEL", &scene.moving())?.success()?;
    unchanged(&before, || scene.host_state(), "after DEL")
}

/// The NIC was unplugged while a pod had it, and the host has another netdev since.
fn replaced() -> Result<()> {
    let scene = Scene::furnished()?;
    let (mac, index) = (
        mac_of(&scene.host.netns, "nic0")?,
        index_of(&scene.host.netns, "nic0")?,
    );
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    scene.on_host(&["link del peer0"])?;
    ensure!(
        scene.pod.ip("link show net1").is_err(),
        "it was not unplugged"
    );
    scene.on_host(&[
        &format!("link add nic0 index {index} address {mac} type veth peer name newpeer"),
        "sysctl ipv6/conf/nic0/accept_dad 0",
        "sysctl ipv6/conf/newpeer/accept_dad 0",
        "link set nic0 mtu 1234 alias new up",
        "link set newpeer up",
        "addr add 10.71.0.1/24 dev nic0",
    ])?;
    std::thread::sleep(std::time::Duration::from_millis(50));
    let network_state = || state(&scene.host.netns);
    let before = network_state()?;
    let answer = answer_of(&scene.call(), "DEL", &scene.moving())?;
    let text = answer.stdout.clone() + &answer.stderr;
    ensure!(
        text.contains("nic0"),
        "it does not say that nic0 is lost: {text:?}"
    );
    unchanged(&before, network_state, "the new netdev, after DEL")?;
    // Reclaim must not take it for the lost one later, either.
    scene.tool("rdmactl", &["reclaim"])?;
    unchanged(&before, network_state, "the new netdev, after reclaim")
}

/// A virtual NIC can be deleted by its pod; what it makes then is its own.
fn recreated_in_the_pod() -> Result<()> {
    let scene = Scene::furnished()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    let (mac, index) = (mac_of(&scene.pod, "net1")?, index_of(&scene.pod, "net1")?);
    scene.in_pod(&[
        "link del net1",
        &format!("link add net1 index {index} address {mac} type veth peer name evil"),
        "link set net1 alias rail-zero",
        "link property add dev net1 altname enp59s0np0",
        "link set net1 up",
    ])?;
    let links = || -> Result<State> {
        let mut all = state(&scene.host.netns)?;
        all.retain(|key, _| key.starts_with("link ") || key.starts_with("address "));
        Ok(all)
    };
    let before = links()?;
    let answer = answer_of(&scene.call(), "DEL", &scene.moving())?;
    let text = answer.stdout.clone() + &answer.stderr;
    ensure!(
        text.contains("nic0"),
        "it does not say that nic0 is lost: {text:?}"
    );
    unchanged(&before, links, "after DEL")?;
    ensure!(
        scene.pod.ip("link show net1").is_ok(),
        "the pod's own link is gone"
    );
    Ok(())
}

fn child_recreated() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    let (mac, index) = (mac_of(&scene.pod, "net1")?, index_of(&scene.pod, "net1")?);
    scene.in_pod(&[
        "link del net1",
        &format!("link add net1 index {index} address {mac} type veth peer name evil"),
    ])?;
    answer_of(&scene.call(), "DEL", &scene.child())?.success()?;
    ensure!(
        scene.pod.ip("link show net1").is_ok(),
        "the pod's own link is gone"
    );
    unchanged(&before, || scene.host_state(), "after DEL")
}

fn child_like_master() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let network = scene.network(&json!({"attach": "macvlan", "master": "nic0", "mode": "vepa"}));
    answer_of(&scene.call(), "ADD", &network)?.success()?;
    let mac = mac_of(&scene.host.netns, "nic0")?;
    // The kernel refuses it in most modes; what it allows must not matter.
    let _ = scene.in_pod(&[
        "link set net1 down",
        &format!("link set net1 address {mac}"),
    ]);
    scene.in_pod(&["link set net1 name nic0", "link set nic0 alias nic0"])?;
    answer_of(&scene.call(), "DEL", &network)?.success()?;
    unchanged(&before, || scene.host_state(), "after DEL")
}

fn host_link_like_child() -> Result<()> {
    let scene = Scene::furnished()?;
    answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    let (mac, index) = (mac_of(&scene.pod, "net1")?, index_of(&scene.pod, "net1")?);
    scene.pod.delete()?;
    std::thread::sleep(std::time::Duration::from_millis(100));
    let index = if scene
        .host
        .netns
        .ip_json("link show")?
        .as_array()
        .is_some_and(|all| all.iter().any(|link| link["ifindex"] == index))
    {
        index + 1000
    } else {
        index
    };
    scene.on_host(&[
        &format!("link add net1 index {index} address {mac} type veth peer name other"),
        "sysctl ipv6/conf/net1/accept_dad 0",
        "sysctl ipv6/conf/other/accept_dad 0",
        "link set net1 up",
        "link set other up",
        "addr add 10.9.0.100/24 dev net1",
    ])?;
    std::thread::sleep(std::time::Duration::from_millis(50));
    let before = state(&scene.host.netns)?;
    answer_of(&scene.call(), "DEL", &scene.child())?.success()?;
    unchanged(&before, || state(&scene.host.netns), "after DEL")
}
