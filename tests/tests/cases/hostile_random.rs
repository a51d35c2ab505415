//! Random networks of all keys against a real host: no link of the host that the policy does not
//! allow is changed, whatever a tenant writes.

use anyhow::{Result, ensure};
use e2e::cases;
use e2e::host_state::{printable, state, unchanged};
use e2e::random::Random;
use e2e::scene::{Scene, answer_of, mac_of};
use serde_json::{Map, Value, json};

cases! {
    no_random_network_changes_a_link_that_the_policy_denies: Macvlan => random_networks();
}

/// Networks tried, from this seed on: a failure names its number.
const NETWORKS: u64 = 150;
const SEED: u64 = 0x5eed;

/// Every key, with values that mean links of the host and of the pod alike.
fn network(random: &mut Random, denied_mac: &str) -> Value {
    let links = [
        "denied",
        "nic0",
        "vlan7",
        "eth0",
        "lo",
        "peer0",
        "none",
        "alt-of-denied-longer",
    ];
    let kinds = [
        "move",
        "move",
        "macvlan",
        "macvlan",
        "ipvlan",
        "ipoib",
        "rdma-only",
    ];
    let keys: [(&str, Vec<Value>); 21] = [
        ("device", links.map(Value::from).to_vec()),
        ("master", links.map(Value::from).to_vec()),
        (
            "hwaddr",
            vec![json!(denied_mac), json!("02:00:00:00:00:77")],
        ),
        (
            "kernelpath",
            vec![
                json!("/sys/devices/virtual/net/denied/.."),
                json!("/sys/devices/x"),
            ],
        ),
        (
            "pciBusID",
            vec![json!("0000:3b:00.0"), json!("0000:5e:00.0")],
        ),
        ("rdmaDevice", vec![json!("mlx5_0"), json!("mlx5_9")]),
        (
            "deviceID",
            vec![
                json!("0000:3b:00.0"),
                json!("pool_3e71787e_1"),
                json!("x.sf.1"),
            ],
        ),
        ("linkInContainer", vec![json!(true), json!(false)]),
        (
            "mode",
            ["bridge", "passthru", "private", "l2", "l3", "datagram"]
                .map(Value::from)
                .to_vec(),
        ),
        ("mtu", vec![json!(1400), json!(9000), json!(0), json!(-1)]),
        ("mac", vec![json!("02:00:00:00:00:99"), json!(denied_mac)]),
        ("port", vec![json!(1), json!(2)]),
        ("pkey", vec![json!("0x8001")]),
        ("umcast", vec![json!(true)]),
        ("bcqueuelen", vec![json!(100)]),
        (
            "rdma",
            ["auto", "off", "required"].map(Value::from).to_vec(),
        ),
        (
            "sourceRouting",
            vec![json!(true), json!({"table": 7}), json!(false)],
        ),
        ("linkLocal", vec![json!(true), json!(false)]),
        ("acceptRA", vec![json!(true)]),
        ("dad", vec![json!(true)]),
        (
            "ipam",
            vec![
                json!({"type": "rdma-ipam", "range": "10.66.0.0/24"}),
                json!({"type": "static", "addresses": [{"address": "10.66.1.1/24"}]}),
                json!({"type": "host-device"}),
                json!({}),
            ],
        ),
    ];
    let mut map = Map::new();
    map.insert("cniVersion".into(), json!("1.0.0"));
    map.insert("name".into(), json!("random"));
    map.insert("type".into(), json!("rdma-netdev"));
    let kind = *random.one(&kinds);
    map.insert("attach".into(), kind.into());
    let key = if kind == "move" { "device" } else { "master" };
    map.insert(key.into(), json!(random.one(&links)));
    for (key, values) in &keys {
        // Few keys at a time: a key that does not fit the others would refuse nearly all of them.
        if random.in_(10) {
            map.insert((*key).to_owned(), random.one(values).clone());
        }
    }
    if random.in_(3) {
        map.insert(
            "prevResult".into(),
            json!({"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "x"}]}),
        );
    }
    Value::Object(map)
}

fn random_networks() -> Result<()> {
    let scene = Scene::new()?;
    scene.on_host(&[
        "link add denied type veth peer name denied0",
        "link property add dev denied altname alt-of-denied-longer",
        "addr add 10.8.0.1/24 dev denied",
        "link set denied up",
        "link add vlan7 type veth peer name vlan70",
        "route add default via 10.8.0.254 dev denied",
    ])?;
    // The pod's own default route leaves through a link that has an index of the host's, too.
    scene.in_pod(&[
        "link add eth0 type veth peer name cable",
        "link set cable up",
        "addr add 10.244.0.2/24 dev eth0",
        "link set eth0 up",
        "route add default via 10.244.0.1 dev eth0",
    ])?;
    scene.allow(&json!({"netdevs": [{"ifNames": ["nic0"]}]}))?;
    let denied_mac = mac_of(&scene.host.netns, "denied")?;
    let before = scene.host_state()?;
    let pod_before = state(&scene.pod)?;
    let mut random = Random(SEED);
    let mut attached = 0_u32;
    for number in 0..NETWORKS {
        let network = network(&mut random, &denied_mac);
        let what = format!(
            "network {number}: {}",
            printable(network.to_string().as_bytes())
        );
        let call = scene.call();
        let answer = answer_of(&call, "ADD", &network)?;
        let added = answer.status.success();
        attached += u32::from(added);
        // While it is attached, too: only what is allowed may have left or have a child.
        let links = scene.host.netns.ip("-br link show")?;
        for kept in ["denied", "vlan7", "peer0"] {
            ensure!(
                links.contains(kept),
                "{what}: {kept} left the host:\n{links}"
            );
        }
        let removed = answer_of(&call, "DEL", &network)?;
        ensure!(removed.status.success(), "{what}: DEL failed: {removed:?}");
        if added || number % 10 == 0 || number + 1 == NETWORKS {
            unchanged(&before, || scene.host_state(), &what)?;
            unchanged(&pod_before, || state(&scene.pod), &what)?;
        }
    }
    ensure!(
        attached > 0,
        "not one of the networks was attached: nothing was shown"
    );
    Ok(())
}
