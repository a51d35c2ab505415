//! A netdev leaves the host only for a pod to which the kubelet allocated it; `passthru` needs the
//! policy's permission.

use std::fs;
use std::os::unix::fs::symlink;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::cni::Call;
use e2e::host_state::{state, unchanged};
use e2e::node_socket::{Behaviour, NodeSocket, allocation, allocation_of_hcas};
use e2e::scene::{
    DENIED, INVALID_ENVIRONMENT, INVALID_NETWORK, PCI, STATE, Scene, TRY_AGAIN, answer_of, pci_of,
    refusal,
};
use hca_trees::{NetdevSpec, On, PciSpec, PortSpec, RdmaSpec, Tree};
use node_wire::{Failure, FailureKind, Pod};
use serde_json::{Value, json};

cases! {
    without_the_daemon_a_move_is_for_later => no_daemon(&json!({"attach": "move", "deviceID": PCI}));
    without_the_daemon_a_named_device_is_for_later => no_daemon(&json!({"attach": "move", "device": "nic0"}));
    without_the_daemon_passthru_is_for_later: Macvlan =>
        no_daemon(&json!({"attach": "macvlan", "master": "nic0", "mode": "passthru"}));
    without_the_daemon_a_bridged_child_works: Macvlan => child_without_daemon();
    with_allow_unallocated_no_daemon_is_asked => no_daemon_asked();
    the_holder_of_the_unit_has_the_nic => holds(&[PCI], &json!({"attach": "move", "deviceID": PCI}), None);
    the_holder_of_the_unit_has_the_nic_by_its_name =>
        holds(&[PCI], &json!({"attach": "move", "device": "nic0"}), None);
    the_holder_of_a_unit_of_another_plugin_has_the_nic_by_pci_address => other_plugin();
    a_forged_unit_is_denied => holds(&[], &json!({"attach": "move", "deviceID": PCI}), Some(PCI));
    a_unit_of_another_nic_does_not_serve =>
        holds(&["0000:99:00.0"], &json!({"attach": "move", "deviceID": PCI}), Some(PCI));
    a_share_of_the_nic_does_not_serve_for_a_move =>
        holds(&["0000:3b:00.0_3e71787e_1"], &json!({"attach": "move", "deviceID": PCI}), Some(PCI));
    a_share_of_a_pool_does_not_serve_for_a_move =>
        holds(&["pool_3e71787e_1"], &json!({"attach": "move", "device": "nic0"}), Some(PCI));
    a_unit_of_a_similar_name_does_not_serve =>
        holds(&["0000:3b:00.00", "0000:3b:00.0 ", "0000:3B:00.1", ""], &json!({"attach": "move", "deviceID": PCI}), Some(PCI));
    a_share_does_not_serve_for_passthru: Macvlan => holds(
        &["0000:3b:00.0_3e71787e_1"],
        &json!({"attach": "macvlan", "master": "nic0", "mode": "passthru"}),
        Some(PCI),
    );
    a_virtual_netdev_is_no_unit => virtual_netdev();
    another_pods_unit_does_not_serve => another_pod();
    a_denied_pod_does_not_learn_who_has_the_nic: Macvlan => denied_while_in_use();
    a_namesake_with_another_uid_is_denied => namesake();
    a_uid_that_the_daemon_could_not_check_is_a_warning => unchecked_uid();
    a_pod_that_the_kubelet_does_not_know_is_for_later => unknown_pod();
    a_call_that_names_no_pod_is_refused => no_pod();
    a_daemon_that_is_slow_is_for_later => slow();
    a_daemon_that_is_a_little_slow_is_waited_for => a_little_slow();
    a_daemon_that_was_killed_is_for_later => broken(Broken::Dead);
    a_daemon_that_closes_is_for_later => broken(Broken::Behaves(Behaviour::Close));
    a_daemon_that_answers_nonsense_is_for_later => broken(Broken::Behaves(Behaviour::Bytes(b"{}".to_vec())));
    a_daemon_that_answers_bytes_is_for_later =>
        broken(Broken::Behaves(Behaviour::Bytes(vec![0xff; 300_000])));
    a_daemon_that_fails_is_for_later => broken(Broken::Behaves(Behaviour::Fail(Failure::new(
        FailureKind::NotAllowed,
        "no\u{1b}[31m",
    ))));
    a_socket_that_is_a_file_is_for_later => broken(Broken::File);
    a_socket_that_is_a_link_is_for_later => broken(Broken::Link);
    a_socket_in_a_directory_for_everybody_is_not_asked => broken(Broken::WritableDirectory);
    del_asks_no_daemon => del_without_daemon();
    a_master_of_another_hca_than_the_unit_is_refused: Macvlan => another_hca(
        &json!({"attach": "macvlan", "deviceID": "0000:3b:00.0_3e71787e_1", "master": "nic1"}),
        &["nic1", "0000:3b:00.0_3e71787e_1", "0000:3c:00.0"],
    );
    a_device_of_another_hca_than_the_unit_is_refused => another_hca(
        &json!({"attach": "move", "device": "nic1", "deviceID": PCI}),
        &["nic1", PCI, "0000:3c:00.0"],
    );
    a_netdev_without_hca_is_not_the_units: Macvlan => another_hca(
        &json!({"attach": "macvlan", "deviceID": "0000:3b:00.0_3e71787e_1", "master": "plain"}),
        &["plain", "does not belong to an HCA", PCI],
    );
    a_unit_that_is_not_on_this_host_is_refused: Macvlan => another_hca(
        &json!({"attach": "macvlan", "deviceID": "0000:99:00.0_3e71787e_1", "master": "nic0"}),
        &["0000:99:00.0"],
    );
    a_unit_of_a_whole_pool_leaves_the_master_free: Macvlan =>
        child_of(&json!({"attach": "macvlan", "deviceID": "pool_3e71787e_1", "master": "nic1"}), "nic1");
    a_vlan_on_the_units_nic_is_its_master: Vlan =>
        stacked(&["link add link nic0 name top0 type vlan id 7", "link set top0 up"], "vlan");
    a_bridge_on_the_units_nic_is_its_master: Macvlan => stacked(
        &["link add top0 type bridge", "link set nic0 master top0", "link set top0 up"],
        "bridge",
    );
    a_unit_of_a_bonded_hca_makes_its_child_on_the_bond: Kind("bond") => bonded();
    a_unit_whose_nic_is_another_function_is_attached: Macvlan => apart();
    a_nic_of_another_rail_than_the_networks_is_refused: Macvlan => of_rails(
        &json!({"nic0": 0, "nic1": 1}),
        &json!({"attach": "macvlan", "deviceID": "0000:3c:00.0_3e71787e_1", "rail": 0}),
        Err((DENIED, &["nic1", "rail 1", "rail 0"])),
    );
    a_nic_that_the_policy_puts_on_no_rail_is_refused: Macvlan => of_rails(
        &json!({"nic0": 0}),
        &json!({"attach": "macvlan", "deviceID": "0000:3c:00.0_3e71787e_1", "rail": 1}),
        Err((DENIED, &["nic1", "rails"])),
    );
    a_single_nic_has_its_address_of_the_range_of_its_rail: Macvlan => of_rails(
        &json!({"0000:3c:00.0": 1}),
        &json!({"attach": "macvlan", "deviceID": "0000:3c:00.0_3e71787e_1"}),
        Ok("10.64.1."),
    );
    a_network_says_its_rail_where_the_policy_does_not: Macvlan => of_rails(
        &json!({}),
        &json!({"attach": "macvlan", "deviceID": "0000:3c:00.0_3e71787e_1", "rail": 0}),
        Ok("10.64.0."),
    );
    ranges_of_rails_on_a_nic_of_no_rail_are_refused: Macvlan => of_rails(
        &json!({}),
        &json!({"attach": "macvlan", "deviceID": "0000:3c:00.0_3e71787e_1"}),
        Err((INVALID_NETWORK, &["the rail of the NIC is unknown", "rails"])),
    );
    a_rail_without_a_range_is_refused: Macvlan => of_rails(
        &json!({"nic1": 7}),
        &json!({"attach": "macvlan", "deviceID": "0000:3c:00.0_3e71787e_1", "rail": 7}),
        Err((INVALID_NETWORK, &["rail 7"])),
    );
    an_exclusive_nic_is_no_master_for_another_pod: Macvlan => exclusive_master();
    exclusive_nics_that_cannot_be_read_are_no_masters: Macvlan => exclusive_unknown();
    passthru_is_refused_without_its_key: Macvlan => passthru_refused(&json!({"mode": "passthru"}), DENIED, "allow.passthru");
    passthru_by_an_altname_is_refused_without_its_key: Macvlan =>
        passthru_refused(&json!({"attach": "macvlan", "mode": "passthru", "master": "enp59s0np0"}), DENIED, "allow.passthru");
    passthru_in_capitals_is_no_mode: Macvlan => passthru_refused(&json!({"mode": "PASSTHRU"}), INVALID_NETWORK, "mode");
    passthru_with_a_space_is_no_mode: Macvlan => passthru_refused(&json!({"mode": "passthru "}), INVALID_NETWORK, "mode");
    passthru_is_no_mode_of_ipvlan => passthru_refused(&json!({"attach": "ipvlan", "mode": "passthru"}), INVALID_NETWORK, "mode");
    a_pod_that_changes_its_mac_in_passthru_does_not_change_the_nics: Macvlan => passthru(&[
        "link set net1 address 02:66:66:66:66:66",
    ]);
    a_pod_that_is_promiscuous_in_passthru_leaves_the_nic_as_it_was: Macvlan => passthru(&[
        // Not allmulticast: the kernel itself leaves that behind (macvlan_stop, drivers/net/macvlan.c).
        "link set net1 promisc on",
        "maddr add 33:33:00:00:66:66 dev net1",
        "link set net1 mtu 300",
    ]);
    a_pod_that_deletes_its_passthru_child_leaves_the_nic_as_it_was: Macvlan => passthru(&[
        "link set net1 address 02:66:66:66:66:66",
        "link del net1",
    ]);
    a_passthru_child_that_died_with_its_namespace_leaves_the_nic_as_it_was: Macvlan => passthru_died();
}

fn pod_named(name: &str, uid: Option<&str>) -> Pod {
    Pod {
        namespace: "ml".into(),
        name: name.into(),
        uid: uid.map(str::to_owned),
    }
}

/// A host where the kubelet is asked, and its socket.
fn asked() -> Result<(Scene, NodeSocket)> {
    let scene = Scene::with_hardware()?;
    scene.allow(&json!({"unallocated": null, "passthru": true}))?;
    let socket = NodeSocket::start(&scene.host_root().join("run/rdma-netdev/node.sock"))?;
    Ok((scene, socket))
}

fn call_of(scene: &Scene, name: &str, uid: &str) -> Call {
    let mut call = scene.call();
    call.args =
        format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=ml;K8S_POD_NAME={name};K8S_POD_UID={uid}");
    call
}

/// On a host with two HCAs and a netdev that is of neither.
fn another_hca(keys: &Value, words: &[&str]) -> Result<()> {
    let scene = Scene::with_nics(2)?;
    scene.on_host(&[
        "link add plain type veth peer name plainpeer",
        "link set plain up",
    ])?;
    scene.refuses(&scene.network(keys), &[INVALID_NETWORK], words)
}

fn child_of(keys: &Value, below: &str) -> Result<()> {
    made_on(&Scene::with_nics(2)?, keys, below)
}

/// ADD makes a child on this netdev of the host, and DEL leaves nothing.
fn made_on(scene: &Scene, keys: &Value, below: &str) -> Result<()> {
    let (network, before) = (scene.network(keys), scene.host_state()?);
    answer_of(&scene.call(), "ADD", &network)?
        .success()
        .with_context(|| keys.to_string())?;
    let host = scene.host.netns.ip_json(&format!("link show {below}"))?;
    let link = scene.pod.ip_json("link show net1")?;
    ensure!(
        link[0]["link_index"] == host[0]["ifindex"],
        "net1 is not on {below}: {link}"
    );
    scene.del_returns(&network, &before)
}

/// `top0` stands on `nic0`.
fn stacked(commands: &[&str], kind: &str) -> Result<()> {
    let scene = Scene::with_nics(2)?;
    scene.on_host(commands)?;
    scene.tree()?.netdev(&NetdevSpec {
        name: "top0",
        kind,
        lowers: &["nic0"],
        ..NetdevSpec::default()
    });
    let of = |nic: u8| json!({"attach": "macvlan", "deviceID": format!("{}_3e71787e_1", pci_of(nic)), "master": "top0"});
    let answer = answer_of(&scene.call(), "ADD", &scene.network(&of(1)))?;
    refusal(&answer, &[INVALID_NETWORK], &[&*pci_of(1), "top0", PCI])?;
    // A bridge counts time in its ports, so the host is not compared.
    answer_of(&scene.call(), "ADD", &scene.network(&of(0)))?.success()?;
    let (host, link) = (
        scene.host.netns.ip_json("link show top0")?,
        scene.pod.ip_json("link show net1")?,
    );
    ensure!(
        link[0]["link_index"] == host[0]["ifindex"],
        "net1 is not on top0: {link}"
    );
    answer_of(&scene.call(), "DEL", &scene.network(&of(0)))?.success()?;
    Ok(())
}

/// One RDMA device stands for both members, on the first one's function.
fn bonded() -> Result<()> {
    let scene = Scene::with_nics(2)?;
    scene.on_host(&[
        "link set nic0 down",
        "link set nic1 down",
        "link add bond0 type bond mode active-backup",
        "link set nic0 master bond0",
        "link set nic1 master bond0",
        "link set bond0 up",
    ])?;
    let tree = scene.tree()?;
    tree.hide_rdma("mlx5_1");
    tree.netdev(&NetdevSpec {
        name: "bond0",
        kind: "bond",
        lowers: &["nic0", "nic1"],
        ..NetdevSpec::default()
    });
    for keys in [
        json!({"attach": "macvlan", "deviceID": "0000:3b:00.0_3e71787e_1"}),
        json!({"deviceID": PCI, "attach": "macvlan"}),
        json!({"attach": "macvlan", "deviceID": PCI, "master": "bond0"}),
    ] {
        made_on(&scene, &keys, "bond0")?;
    }
    let moving = scene.network(&json!({"deviceID": PCI, "attach": "move"}));
    scene.refuses(&moving, &[DENIED], &["nic0", "bond0"])
}

/// As eRDMA and pvrdma are: the GID table of the RDMA function names the netdev.
fn apart() -> Result<()> {
    let lay = |tree: &Tree| {
        for address in ["0000:0b:00.0", "0000:0b:00.1"] {
            tree.pci(&PciSpec {
                address,
                ..PciSpec::MLX5
            });
        }
        tree.netdev(&NetdevSpec {
            name: "ens192",
            on: On::Pci("0000:0b:00.0"),
            mac: "00:50:56:00:00:01",
            ..NetdevSpec::default()
        });
        tree.rdma(&RdmaSpec {
            name: "vmw_pvrdma0",
            on: On::Pci("0000:0b:00.1"),
            ports: &[PortSpec {
                gids: &[(0, "fe80::250:56ff:fe00:1", "RoCE v2", "ens192")],
                ..PortSpec::ROCE
            }],
            ..RdmaSpec::default()
        });
    };
    let scene = Scene::laid(lay, &["ens192"])?;
    made_on(
        &scene,
        &json!({"attach": "macvlan", "deviceID": "0000:0b:00.1_3e71787e_1"}),
        "ens192",
    )?;
    scene.returns(
        &scene.network(&json!({"attach": "move", "deviceID": "0000:0b:00.1"})),
        &[],
    )
}

/// A network with ranges for rails 0 and 1 and these keys, on a node whose policy has these rails: an
/// address that begins so, which CHECK knows, or a refusal.
fn of_rails(rails: &Value, keys: &Value, expected: Result<&str, (u64, &[&str])>) -> Result<()> {
    let scene = Scene::with_nics(2)?;
    scene.policy(&json!({}), &json!({"rails": rails}))?;
    let mut network = scene.network(keys);
    let ranges = json!({"0": {"range": "10.64.0.0/24"}, "1": {"range": "10.64.1.0/24"}});
    network["ipam"] = json!({"type": "rdma-ipam", "ranges": ranges});
    let address = match expected {
        Ok(address) => address,
        Err((code, words)) => return scene.refuses(&network, &[code], words),
    };
    let result = answer_of(&scene.call(), "ADD", &network)?.success()?;
    let ip = result["ips"][0]["address"].as_str().unwrap_or_default();
    ensure!(ip.starts_with(address), "{result}");
    let mut checked = network.clone();
    checked["prevResult"] = result;
    answer_of(&scene.call(), "CHECK", &checked)?.success()?;
    answer_of(&scene.call(), "DEL", &network)?.success()?;
    ensure!(
        scene.listed("addresses")?.is_empty(),
        "an address is still leased"
    );
    Ok(())
}

fn no_daemon(keys: &Value) -> Result<()> {
    let (scene, mut socket) = asked()?;
    socket.be_absent()?;
    let network = scene.network(keys);
    scene.refuses_call(
        &call_of(&scene, "a", "u1"),
        &network,
        &[TRY_AGAIN],
        &["node.sock"],
    )?;
    fs::remove_dir_all(scene.host_root().join("run/rdma-netdev"))?;
    scene.refuses_call(
        &call_of(&scene, "a", "u1"),
        &network,
        &[TRY_AGAIN],
        &["node.sock"],
    )
}

fn child_without_daemon() -> Result<()> {
    let (scene, mut socket) = asked()?;
    socket.be_absent()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    scene.del_returns(&scene.child(), &before)
}

fn no_daemon_asked() -> Result<()> {
    let (scene, socket) = asked()?;
    scene.allow(&json!({}))?;
    scene.returns(
        &scene.network(&json!({"attach": "move", "deviceID": PCI})),
        &[],
    )?;
    ensure!(
        socket.questions().is_empty(),
        "asked: {:?}",
        socket.questions()
    );
    Ok(())
}

/// A pod that holds these units asks for a network; denied with a word, or attached.
fn holds(units: &[&str], keys: &Value, denied: Option<&str>) -> Result<()> {
    let (scene, socket) = asked()?;
    socket.hold(
        &pod_named("a", Some("u1")),
        vec![allocation("main", "rdma/rail", units)],
    );
    let call = call_of(&scene, "a", "u1");
    let network = scene.network(keys);
    if let Some(word) = denied {
        scene.refuses_call(&call, &network, &[DENIED], &[word])?;
        ensure!(!socket.questions().is_empty(), "the daemon was not asked");
        return Ok(());
    }
    let before = scene.host_state()?;
    answer_of(&call, "ADD", &network)?.success()?;
    ensure!(
        socket.questions() == [pod_named("a", Some("u1"))],
        "asked: {:?}",
        socket.questions()
    );
    scene.in_pod(&["link set net1 mtu 400"])?;
    scene.del_returns(&network, &before)
}

fn other_plugin() -> Result<()> {
    let (scene, socket) = asked()?;
    let theirs = allocation_of_hcas("main", "nvidia.com/rail0", &[PCI], &[PCI]);
    socket.hold(
        &pod_named("a", Some("u1")),
        vec![allocation("main", "cpu", &["0"]), theirs],
    );
    let network = scene.network(&json!({"attach": "move", "deviceID": PCI, "pciBusID": PCI}));
    let before = scene.host_state()?;
    answer_of(&call_of(&scene, "a", "u1"), "ADD", &network)?.success()?;
    scene.del_returns(&network, &before)
}

fn virtual_netdev() -> Result<()> {
    let (scene, socket) = asked()?;
    scene.on_host(&["link add plain type veth peer name plainpeer"])?;
    socket.hold(
        &pod_named("a", Some("u1")),
        vec![allocation("main", "x", &["plain", PCI])],
    );
    let network = scene.network(&json!({"attach": "move", "device": "plain"}));
    scene.refuses_call(&call_of(&scene, "a", "u1"), &network, &[DENIED], &["plain"])
}

fn another_pod() -> Result<()> {
    let (scene, socket) = asked()?;
    socket.hold(
        &pod_named("b", Some("u2")),
        vec![allocation("main", "rdma/rail", &[PCI])],
    );
    socket.hold(&pod_named("a", Some("u1")), vec![]);
    let network = scene.network(&json!({"attach": "move", "deviceID": PCI}));
    scene.refuses_call(
        &call_of(&scene, "a", "u1"),
        &network,
        &[DENIED],
        &[PCI, "ml/a"],
    )?;
    let before = scene.host_state()?;
    answer_of(&call_of(&scene, "b", "u2"), "ADD", &network)?.success()?;
    scene.del_returns(&network, &before)
}

/// Another tenant's pod has moved the NIC. The kubelet allocated nothing to the one that asks.
fn denied_while_in_use() -> Result<()> {
    let (scene, socket) = asked()?;
    let holder = pod_named("b", Some("u2"));
    socket.hold(&holder, vec![allocation("main", "rdma/rail", &[PCI])]);
    socket.hold(&pod_named("a", Some("u1")), vec![]);
    let pod = scene.another_pod()?;
    let mut call = call_of(&scene, "b", "u2");
    (call.netns, call.container_id) = (pod.path().to_owned(), "c2".to_owned());
    let moving = scene.network(&json!({"attach": "move", "deviceID": PCI}));
    answer_of(&call, "ADD", &moving)?.success()?;
    for keys in [
        json!({"attach": "move", "deviceID": PCI}),
        json!({"attach": "move", "device": "nic0"}),
        json!({"attach": "macvlan", "master": "nic0"}),
        json!({"attach": "macvlan", "deviceID": PCI}),
    ] {
        let denied = call_of(&scene, "a", "u1");
        let answer = answer_of(&denied, "ADD", &scene.network(&keys))?;
        let (_, message) =
            refusal(&answer, &[DENIED], &["nic0", "ml/a"]).with_context(|| keys.to_string())?;
        ensure!(!message.contains("ml/b"), "{keys}: {message}");
    }
    answer_of(&call, "DEL", &moving)?.success().map(drop)
}

fn namesake() -> Result<()> {
    let (scene, socket) = asked()?;
    socket.hold(
        &pod_named("a", Some("u1")),
        vec![allocation("main", "rdma/rail", &[PCI])],
    );
    let network = scene.network(&json!({"attach": "move", "deviceID": PCI}));
    scene.refuses_call(
        &call_of(&scene, "a", "other"),
        &network,
        &[DENIED],
        &["ml/a"],
    )
}

fn unchecked_uid() -> Result<()> {
    let (scene, socket) = asked()?;
    socket.hold(
        &pod_named("a", Some("u1")),
        vec![allocation("main", "rdma/rail", &[PCI])],
    );
    let network = scene.network(&json!({"attach": "move", "deviceID": PCI}));
    let before = scene.host_state()?;
    let warned = |arguments: &str| -> Result<bool> {
        let mut call = scene.call();
        call.args = format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=ml;K8S_POD_NAME=a{arguments}");
        let answer = answer_of(&call, "ADD", &network)?;
        answer.success()?;
        scene.del_returns(&network, &before)?;
        let of_uid = |line: &&str| {
            line.contains(" warn rdma-netdev[") && line.contains("UID was not checked")
        };
        Ok(answer
            .stderr
            .lines()
            .filter(of_uid)
            .any(|line| line.contains("ml/a")))
    };
    ensure!(!warned(";K8S_POD_UID=u1")?, "it was checked");
    socket.behave(Behaviour::AnswerUnchecked);
    ensure!(warned(";K8S_POD_UID=u1")?, "no warning");
    for none in ["", ";K8S_POD_UID="] {
        ensure!(!warned(none)?, "the runtime gave no UID");
    }
    Ok(())
}

fn unknown_pod() -> Result<()> {
    let (scene, _socket) = asked()?;
    let network = scene.network(&json!({"attach": "move", "deviceID": PCI}));
    scene.refuses_call(
        &call_of(&scene, "unknown", "u9"),
        &network,
        &[TRY_AGAIN, DENIED],
        &["ml/unknown"],
    )
}

fn no_pod() -> Result<()> {
    let (scene, socket) = asked()?;
    let network = scene.network(&json!({"attach": "move", "deviceID": PCI}));
    for arguments in [
        "",
        "IgnoreUnknown=1;K8S_POD_NAME=a",
        "IgnoreUnknown=1;K8S_POD_NAMESPACE=ml;K8S_POD_NAME=",
    ] {
        let mut call = scene.call();
        call.args = arguments.to_owned();
        scene.refuses_call(
            &call,
            &network,
            &[INVALID_ENVIRONMENT, TRY_AGAIN, DENIED],
            &[],
        )?;
    }
    ensure!(
        socket.questions().iter().all(|pod| pod.name.is_empty()),
        "{:?}",
        socket.questions()
    );
    Ok(())
}

fn slow() -> Result<()> {
    let (scene, socket) = asked()?;
    socket.hold(
        &pod_named("a", Some("u1")),
        vec![allocation("main", "rdma/rail", &[PCI])],
    );
    socket.behave(Behaviour::AnswerAfter(Duration::from_secs(4)));
    let started = Instant::now();
    let network = scene.network(&json!({"attach": "move", "deviceID": PCI}));
    let answer = answer_of(&call_of(&scene, "a", "u1"), "ADD", &network)?;
    let took = started.elapsed();
    refusal(&answer, &[TRY_AGAIN], &["node.sock"])?;
    ensure!(took < Duration::from_millis(3500), "it waited for {took:?}");
    let before = scene.host_state()?;
    answer_of(&call_of(&scene, "a", "u1"), "DEL", &network)?.success()?;
    unchanged(&before, || scene.host_state(), "after DEL")
}

fn a_little_slow() -> Result<()> {
    let (scene, socket) = asked()?;
    socket.hold(
        &pod_named("a", Some("u1")),
        vec![allocation("main", "rdma/rail", &[PCI])],
    );
    socket.behave(Behaviour::AnswerAfter(Duration::from_millis(500)));
    let before = scene.host_state()?;
    let network = scene.network(&json!({"attach": "move", "deviceID": PCI}));
    answer_of(&call_of(&scene, "a", "u1"), "ADD", &network)?.success()?;
    scene.del_returns(&network, &before)
}

enum Broken {
    Dead,
    Behaves(Behaviour),
    File,
    Link,
    WritableDirectory,
}

fn broken(how: Broken) -> Result<()> {
    let (scene, mut socket) = asked()?;
    socket.hold(
        &pod_named("a", Some("u1")),
        vec![allocation("main", "rdma/rail", &[PCI])],
    );
    let path = scene.host_root().join("run/rdma-netdev/node.sock");
    let mut elsewhere = None;
    match how {
        Broken::Dead => socket.be_dead(),
        Broken::Behaves(behaviour) => socket.behave(behaviour),
        Broken::File => {
            socket.be_absent()?;
            fs::write(&path, "{}")?;
        }
        Broken::Link => {
            socket.be_absent()?;
            let other = scene.host.directory().join("elsewhere/node.sock");
            let forger = NodeSocket::start(&other)?;
            forger.hold(
                &pod_named("a", Some("u1")),
                vec![allocation("main", "rdma/rail", &[PCI])],
            );
            symlink(&other, &path)?;
            elsewhere = Some(forger);
        }
        Broken::WritableDirectory => {
            use std::os::unix::fs::PermissionsExt;
            let directory = path.parent().context("no directory")?;
            fs::set_permissions(directory, fs::Permissions::from_mode(0o777))?;
        }
    }
    let network = scene.network(&json!({"attach": "move", "deviceID": PCI}));
    scene.refuses_call(
        &call_of(&scene, "a", "u1"),
        &network,
        &[TRY_AGAIN],
        &["node.sock"],
    )?;
    drop(elsewhere);
    Ok(())
}

fn del_without_daemon() -> Result<()> {
    let (scene, mut socket) = asked()?;
    socket.hold(
        &pod_named("a", Some("u1")),
        vec![allocation("main", "rdma/rail", &[PCI])],
    );
    let before = scene.host_state()?;
    let network = scene.network(&json!({"attach": "move", "deviceID": PCI}));
    answer_of(&call_of(&scene, "a", "u1"), "ADD", &network)?.success()?;
    socket.be_absent()?;
    scene.del_returns(&network, &before)
}

/// The daemon writes which HCAs belong to exclusive pools.
fn exclusive_master() -> Result<()> {
    let (scene, socket) = asked()?;
    fs::create_dir_all(scene.host.state())?;
    fs::write(
        scene.host.state().join("exclusive-hcas"),
        format!("{PCI}\n"),
    )?;
    socket.hold(
        &pod_named("b", Some("u2")),
        vec![allocation("main", "rdma/rail", &[PCI])],
    );
    socket.hold(&pod_named("a", Some("u1")), vec![]);
    for keys in [
        json!({"attach": "macvlan", "master": "nic0"}),
        json!({"attach": "macvlan", "master": "enp59s0np0"}),
        json!({"attach": "macvlan", "deviceID": PCI}),
        json!({"attach": "ipvlan", "master": "nic0"}),
    ] {
        let network = scene.network(&keys);
        scene
            .refuses_call(&call_of(&scene, "a", "u1"), &network, &[DENIED], &["nic0"])
            .with_context(|| keys.to_string())?;
    }
    let network = scene.network(&json!({"attach": "macvlan", "master": "nic0"}));
    let before = scene.host_state()?;
    answer_of(&call_of(&scene, "b", "u2"), "ADD", &network)?
        .success()
        .context("the holder")?;
    scene.del_returns(&network, &before)
}

/// What the daemon wrote cannot be read: that is not the same as no exclusive pool.
fn exclusive_unknown() -> Result<()> {
    let (scene, socket) = asked()?;
    socket.hold(&pod_named("a", Some("u1")), vec![]);
    fs::create_dir_all(scene.host.state())?;
    let file = scene.host.state().join("exclusive-hcas");
    let network = scene.network(&json!({"attach": "macvlan", "master": "nic0"}));
    for content in [None, Some(&b"\xff\xfe\n"[..]), Some(b"neither an HCA\n")] {
        match content {
            None => fs::create_dir(&file)?,
            Some(content) => fs::write(&file, content)?,
        }
        let call = call_of(&scene, "a", "u1");
        scene
            .refuses_call(&call, &network, &[STATE], &["exclusive-hcas"])
            .with_context(|| format!("{content:?}"))?;
        if content.is_none() {
            fs::remove_dir(&file)?;
        }
    }
    Ok(())
}

fn passthru_refused(keys: &Value, code: u64, word: &str) -> Result<()> {
    let scene = Scene::furnished()?;
    if code != DENIED {
        scene.allow(&json!({"passthru": true}))?;
    }
    let mut all = json!({"attach": "macvlan", "master": "nic0"});
    for (key, value) in keys.as_object().context("keys")? {
        all[key] = value.clone();
    }
    scene.refuses(&scene.network(&all), &[code], &[word])
}

fn with_passthru() -> Result<(Scene, Value)> {
    let scene = Scene::furnished()?;
    scene.allow(&json!({"passthru": true}))?;
    let ipam = scene.host.own_ipam("10.9.0.0/24", "10.9.0.100", &json!({}));
    let network = scene
        .network(&json!({"attach": "macvlan", "master": "nic0", "mode": "passthru", "ipam": ipam}));
    Ok((scene, network))
}

/// The kernel forgets the neighbours of a netdev whose MAC address changes, also the host's.
fn without_neighbours(scene: &Scene) -> Result<()> {
    scene.on_host(&["neigh del 10.9.0.254 dev nic0"])
}

fn passthru(pod: &[&str]) -> Result<()> {
    let (scene, network) = with_passthru()?;
    without_neighbours(&scene)?;
    scene.returns(&network, pod)
}

fn passthru_died() -> Result<()> {
    let (scene, network) = with_passthru()?;
    without_neighbours(&scene)?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &network)?.success()?;
    scene.in_pod(&["link set net1 address 02:66:66:66:66:66"])?;
    let host = state(&scene.host.netns)?;
    ensure!(
        host["link nic0 address"] == "026666666666",
        "the kernel does not hand it through"
    );
    scene.pod.delete()?;
    answer_of(&scene.call(), "DEL", &network)?.success()?;
    unchanged(&before, || scene.host_state(), "after DEL")
}
