//! What a network says is done, refused or noted: keys of other plugins, next hops, IPv6 on small
//! MTUs, addresses that stay on the host.

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::cni::Answer;
use e2e::host_state::unchanged;
use e2e::netns::Netns;
use e2e::random::Random;
use e2e::scene::{DENIED, INVALID_NETWORK, Scene, answer_of};
use serde_json::{Map, Value, json};

cases! {
    a_vlan_needs_the_policy_and_a_vf => vf_setting(&json!({"vlan": 7}), &json!({"vlan": ["5-7"]}));
    vlan_qos_needs_the_policy_and_a_vf =>
        vf_setting(&json!({"vlanQoS": 3, "vlan": 7}), &json!({"vlanQoS": true, "vlan": [7]}));
    trust_needs_the_policy_and_a_vf => vf_setting(&json!({"trust": "on"}), &json!({"trust": true}));
    spoofchk_needs_the_policy_and_a_vf =>
        vf_setting(&json!({"spoofchk": "off"}), &json!({"spoofchk": true}));
    link_state_needs_the_policy_and_a_vf =>
        vf_setting(&json!({"link_state": "disable"}), &json!({"link_state": true}));
    a_rate_needs_the_policy_and_a_vf =>
        vf_setting(&json!({"max_tx_rate": 100}), &json!({"max_tx_rate": true}));
    a_vlan_trunk_is_refused => foreign("vlanTrunk", &json!([7]));
    routes_beside_the_ipam_are_refused => foreign("routes", &json!([{"dst": "0.0.0.0/0"}]));
    an_interface_as_dranet_writes_it_is_refused => foreign("interface", &json!({"mtu": 4000}));
    sysctls_are_refused => foreign("sysctl", &json!({"net.ipv4.ip_forward": "1"}));
    a_bandwidth_that_the_runtime_adds_is_refused =>
        foreign("runtimeConfig", &json!({"bandwidth": {"egressRate": 1000}}));
    a_guid_in_the_annotation_needs_the_policy_and_infiniband => guid();
    a_misspelt_key_is_refused: Macvlan => misspelt_key();
    a_key_without_effect_is_noted_in_log_and_validate: Macvlan => noted();
    a_key_is_refused_for_a_kind_that_does_not_have_it => kinds();
    next_hops_out_of_reach_are_refused_by_add_and_validate => next_hops();
    a_gateway_of_another_family_is_refused => other_family();
    an_ipv4_route_leaves_by_its_ipv6_next_hop: Macvlan => via_ipv6();
    an_mtu_too_small_for_ipv6_is_refused => small_mtu();
    a_masters_mtu_too_small_for_ipv6_is_refused => small_master();
    router_advertisements_bring_no_second_default_route: Macvlan => advertised();
    leased_addresses_of_the_fabric_move_and_return => fabric_addresses();
    a_policy_with_another_word_for_fabric_addresses_is_refused => other_word();
    an_address_that_stays_on_the_host_is_a_warning => left_behind();
    rdma_only_in_shared_mode_passes_check: Macvlan => shared_rdma_only();
    a_master_that_is_down_is_a_warning_in_log_and_validate: Macvlan => master_down();
    what_validate_accepts_without_a_note_add_does_in_full: Macvlan => in_full();
    keys_that_whereabouts_does_not_have_are_noted: Macvlan => keys_of_whereabouts();
    a_network_without_a_range_is_refused_by_add_and_validate: Macvlan => no_range();
    validate_sends_no_status_below_cni_version_1_1: Netns => status_version();
}

fn own_ipam(more: &Value) -> Value {
    let mut ipam = json!({"type": "rdma-ipam", "range": "10.66.0.0/24"});
    if let (Some(ipam), Some(more)) = (ipam.as_object_mut(), more.as_object()) {
        ipam.extend(more.clone());
    }
    ipam
}

/// Errors and notes of `rdmactl validate`.
fn validated(scene: &Scene, network: &Value) -> Result<(Vec<String>, Vec<String>)> {
    validated_with(scene, &[], network)
}

fn validated_with(
    scene: &Scene,
    flags: &[&str],
    network: &Value,
) -> Result<(Vec<String>, Vec<String>)> {
    let file = scene.host.directory().join("network.json");
    std::fs::write(&file, network.to_string())?;
    let file = file.to_string_lossy().into_owned();
    let arguments = [&["validate", "--json"], flags, &[file.as_str()]].concat();
    let answer = scene.tool("rdmactl", &arguments)?;
    let document: Value = serde_json::from_str(&answer.stdout)
        .with_context(|| format!("{}{}", answer.stdout, answer.stderr))?;
    let list = |key: &str| {
        let texts = document["files"][0][key].as_array().cloned();
        let texts = texts.unwrap_or_default().into_iter();
        texts
            .map(|text| text.as_str().unwrap_or_default().to_owned())
            .collect()
    };
    Ok((list("errors"), list("notes")))
}

/// ADD and validate refuse it with these words.
fn both_refuse(scene: &Scene, network: &Value, code: u64, words: &[&str]) -> Result<()> {
    scene
        .refuses(network, &[code], words)
        .with_context(|| network.to_string())?;
    let (errors, _) = validated(scene, network)?;
    let all = errors.join("\n").to_lowercase();
    ensure!(
        words.iter().all(|word| all.contains(&word.to_lowercase())),
        "validate says of {network}: {errors:?}"
    );
    Ok(())
}

fn foreign(key: &str, value: &Value) -> Result<()> {
    /// CNI's code for a field that is not supported.
    const UNSUPPORTED: u64 = 2;
    let scene = Scene::new()?;
    let named = value.as_object().and_then(|map| map.keys().next_back());
    let word = match key {
        "runtimeConfig" => named.map_or(key, String::as_str),
        key => key,
    };
    for base in [
        json!({"attach": "move", "device": "nic0", "ipam": own_ipam(&json!({}))}),
        json!({"attach": "macvlan", "master": "nic0"}),
    ] {
        let mut keys = base.clone();
        keys[key] = value.clone();
        both_refuse(&scene, &scene.network(&keys), UNSUPPORTED, &[word])?;
    }
    Ok(())
}

/// The policy allows all other settings at first, then this one, too.
fn vf_setting(keys: &Value, allowed: &Value) -> Result<()> {
    const OTHERS: [&str; 5] = [
        "vlanProto",
        "trust",
        "spoofchk",
        "link_state",
        "max_tx_rate",
    ];
    let scene = Scene::new()?;
    let allowed = allowed.as_object().context("keys")?;
    let key = allowed.keys().find(|key| *key != "vlan");
    let key = key.map_or("vlan", String::as_str);
    let with = |mut base: Value| {
        base.as_object_mut()
            .context("base")?
            .extend(keys.as_object().cloned().unwrap_or_default());
        anyhow::Ok(scene.network(&base))
    };
    let moved = with(json!({"attach": "move", "device": "nic0"}))?;
    let mut policy: Map<String, Value> = OTHERS
        .iter()
        .filter(|other| **other != key)
        .map(|other| ((*other).into(), true.into()))
        .collect();
    policy.insert(
        "vlan".into(),
        if key == "vlan" {
            json!([6, "8-4094"])
        } else {
            json!([7])
        },
    );
    scene.allow(&json!({ "vf": policy }))?;
    both_refuse(&scene, &moved, DENIED, &[key, &format!("allow.vf.{key}")])?;
    policy.extend(allowed.clone());
    scene.allow(&json!({ "vf": policy }))?;
    scene.refuses(&moved, &[INVALID_NETWORK], &["not a virtual function"])?;
    let child = with(json!({"attach": "macvlan", "master": "nic0"}))?;
    both_refuse(
        &scene,
        &child,
        INVALID_NETWORK,
        &["no meaning for attach macvlan"],
    )
}

fn guid() -> Result<()> {
    let scene = Scene::new()?;
    let keys = json!({"attach": "move", "device": "nic0", "args": {"cni": {"guid": "02:00:00:00:00:00:00:01"}}});
    let network = scene.network(&keys);
    let denied = ["guid 0200:0000:0000:0001", "allow.vf.guid"];
    both_refuse(&scene, &network, DENIED, &denied)?;
    let range = |range: &str| scene.allow(&json!({"vf": {"guid": [range]}}));
    range("02:00:00:00:00:00:00:02-02:ff:ff:ff:ff:ff:ff:ff")?;
    both_refuse(&scene, &network, DENIED, &denied)?;
    range("02:00:00:00:00:00:00:00-02:ff:ff:ff:ff:ff:ff:ff")?;
    scene.refuses(&network, &[INVALID_NETWORK], &["guid", "not an InfiniBand"])
}

fn misspelt_key() -> Result<()> {
    let scene = Scene::new()?;
    let network = scene.network(&json!({"attach": "move", "device": "nic0", "vlann": 7}));
    both_refuse(&scene, &network, INVALID_NETWORK, &["vlann", "\"vlan\""])?;
    let mut child = scene.child();
    child["mtuu"] = json!(1400);
    both_refuse(&scene, &child, INVALID_NETWORK, &["mtuu", "\"mtu\""])
}

fn added(scene: &Scene, network: &Value) -> Result<Answer> {
    let answer = answer_of(&scene.call(), "ADD", network)?;
    answer.success().with_context(|| network.to_string())?;
    Ok(answer)
}

fn noted() -> Result<()> {
    let scene = Scene::new()?;
    let before = scene.host_state()?;
    for (key, value, note) in [
        ("logLevel", json!("debug"), "logLevel"),
        ("vlanId", json!(0), "vlanId"),
        ("promisc", json!(true), "promisc"),
    ] {
        let mut network = scene.child();
        network[key] = value;
        let answer = added(&scene, &network)?;
        ensure!(
            answer.stderr.contains(" warn ") && answer.stderr.contains(note),
            "{key}: the log says {}",
            answer.stderr
        );
        let (errors, notes) = validated(&scene, &network)?;
        ensure!(
            errors.is_empty() && notes.iter().any(|n| n.contains(note)),
            "{key}: {notes:?}"
        );
        scene.del_returns(&network, &before)?;
    }
    Ok(())
}

/// The pod starts and its interface sends nothing, so people must be told what sets the master up.
fn master_down() -> Result<()> {
    let scene = Scene::new()?;
    scene.on_host(&["link set nic0 down"])?;
    let words = ["nic0", "is down", "linkUp"];
    let has = |text: &str| words.iter().all(|word| text.contains(word));
    let network = scene.child();
    let answer = added(&scene, &network)?;
    ensure!(
        answer.stderr.contains(" warn ") && has(&answer.stderr),
        "the log says {:?}",
        answer.stderr
    );
    answer_of(&scene.call(), "DEL", &network)?.success()?;
    let (errors, notes) = validated_with(&scene, &["--on-host"], &network)?;
    ensure!(
        errors.is_empty() && notes.iter().any(|note| has(note)),
        "{errors:?} {notes:?}"
    );
    // One that is up is not mentioned.
    scene.on_host(&["link set nic0 up"])?;
    let (_, notes) = validated_with(&scene, &["--on-host"], &scene.child())?;
    ensure!(!notes.iter().any(|note| has(note)), "{notes:?}");
    let answer = added(&scene, &scene.child())?;
    ensure!(!has(&answer.stderr), "{}", answer.stderr);
    Ok(())
}

fn kinds() -> Result<()> {
    let scene = Scene::new()?;
    for (keys, word) in [
        (
            json!({"attach": "macvlan", "master": "nic0", "umcast": true}),
            "umcast",
        ),
        (
            json!({"attach": "macvlan", "master": "nic0", "pkey": "0x8001"}),
            "pkey",
        ),
        (
            json!({"attach": "macvlan", "master": "nic0", "rdma": "required"}),
            "rdma",
        ),
        (
            json!({"attach": "move", "device": "nic0", "bcqueuelen": 9}),
            "bcqueuelen",
        ),
        (
            json!({"attach": "macvlan", "master": "nic0", "mode": "passthru", "mac": "02:00:00:00:00:09"}),
            "passthru",
        ),
        (
            json!({"attach": "rdma-only", "ipam": own_ipam(&json!({})),
                "prevResult": {"cniVersion": "1.1.0", "interfaces": []}}),
            "ipam",
        ),
    ] {
        both_refuse(&scene, &scene.network(&keys), INVALID_NETWORK, &[word])?;
    }
    Ok(())
}

fn next_hops() -> Result<()> {
    let scene = Scene::new()?;
    let route = |route: Value| own_ipam(&json!({"routes": [route]}));
    for (ipam, word) in [
        (
            route(json!({"dst": "10.9.0.0/16", "gw": "10.99.0.1"})),
            "outside",
        ),
        (
            route(json!({"dst": "10.9.0.0/16", "gw": "10.66.0.0"})),
            "network address",
        ),
        (
            route(json!({"dst": "10.9.0.0/16", "gw": "10.66.0.255"})),
            "broadcast address",
        ),
        (
            route(json!({"dst": "10.9.0.0/16", "gw": "224.0.0.1"})),
            "not the address of a host",
        ),
        (
            route(json!({"dst": "10.9.0.0/16", "gw": "fd00::1"})),
            "outside",
        ),
        (
            route(json!({"dst": "fd01::/64", "gw": "10.66.0.1"})),
            "IPv6 route",
        ),
        (
            route(json!({"dst": "10.9.0.0/16", "gw": "10.66.0.1", "table": 255})),
            "table 255",
        ),
        (
            route(json!({"dst": "10.9.0.0/16", "scope": 254})),
            "scope 254",
        ),
        (own_ipam(&json!({"gateway": "10.99.0.1"})), "outside"),
        (
            json!({"type": "rdma-ipam", "ranges": {"0": {"range": "10.66.0.0/24"}},
                "routes": [{"dst": "10.9.0.0/16", "gw": "10.99.0.1"}]}),
            "outside",
        ),
    ] {
        let mut keys = json!({"attach": "macvlan", "master": "nic0", "ipam": ipam});
        if ipam["ranges"].is_object() {
            // Of a network for several NICs validate alone can be asked here.
            keys = json!({"attach": "macvlan", "devices": "all", "deviceID": "0000:3b:00.0", "ipam": ipam});
            let (errors, _) = validated(&scene, &scene.network(&keys))?;
            ensure!(
                errors.iter().any(|e| e.contains(word)),
                "{ipam}: {errors:?}"
            );
            continue;
        }
        both_refuse(&scene, &scene.network(&keys), INVALID_NETWORK, &[word])?;
    }
    Ok(())
}

fn other_family() -> Result<()> {
    let scene = Scene::new()?;
    let ipam = own_ipam(&json!({"gateway": "fd00::1"}));
    let network = scene.network(&json!({"attach": "macvlan", "master": "nic0", "ipam": ipam}));
    both_refuse(
        &scene,
        &network,
        INVALID_NETWORK,
        &["gateway", "another family"],
    )
}

fn via_ipv6() -> Result<()> {
    let scene = Scene::new()?;
    let before = scene.host_state()?;
    let routes = json!({"routes": [{"dst": "10.9.0.0/16", "gw": "fe80::1"}]});
    let network =
        scene.network(&json!({"attach": "macvlan", "master": "nic0", "ipam": own_ipam(&routes)}));
    let answer = added(&scene, &network)?;
    let there = scene.pod.ip("-4 route show 10.9.0.0/16")?;
    ensure!(there.contains("via inet6 fe80::1"), "{there}");
    let mut again = network.clone();
    again["prevResult"] = serde_json::from_str(&answer.stdout)?;
    answer_of(&scene.call(), "CHECK", &again)?.success()?;
    scene.del_returns(&network, &before)
}

fn small_mtu() -> Result<()> {
    let scene = Scene::new()?;
    let v6 = json!({"type": "rdma-ipam", "range": "fd66::/64"});
    for (mut keys, word) in [
        (json!({"ipam": v6}), "IPv6"),
        (
            json!({"ipam": own_ipam(&json!({})), "acceptRA": true}),
            "acceptRA",
        ),
        (json!({"linkLocal": true}), "linkLocal"),
    ] {
        for (key, value) in [("attach", "macvlan"), ("master", "nic0")] {
            keys[key] = value.into();
        }
        keys["mtu"] = 1279.into();
        both_refuse(
            &scene,
            &scene.network(&keys),
            INVALID_NETWORK,
            &["1279", "1280", word],
        )?;
    }
    let moved = json!({"attach": "move", "device": "nic0", "mtu": 1000});
    // Its IPv6 address is the host's: validate does not know it.
    scene.refuses(
        &scene.network(&moved),
        &[INVALID_NETWORK],
        &["1000", "1280"],
    )
}

fn small_master() -> Result<()> {
    let scene = Scene::new()?;
    scene.on_host(&["link set nic0 mtu 1000"])?;
    let ipam = json!({"type": "rdma-ipam", "range": "fd66::/64"});
    let network = scene.network(&json!({"attach": "macvlan", "master": "nic0", "ipam": ipam}));
    scene.refuses(&network, &[INVALID_NETWORK], &["1000", "1280"])
}

/// A setting of IPv6 or IPv4; empty where the interface has none, as without IPv6.
fn sysctl(netns: &Netns, key: &str) -> Result<String> {
    let path = format!("/proc/sys/net/{key}");
    let value = netns.enter(|| Ok(std::fs::read_to_string(path).unwrap_or_default()))?;
    Ok(value.trim().to_owned())
}

fn advertised() -> Result<()> {
    let scene = Scene::new()?;
    let before = scene.host_state()?;
    let network = |more: Value| {
        let mut keys = json!({"attach": "macvlan", "master": "nic0", "acceptRA": true});
        if let (Some(keys), Some(more)) = (keys.as_object_mut(), more.as_object()) {
            keys.extend(more.clone());
        }
        scene.network(&keys)
    };
    let follows = |network: &Value| -> Result<String> {
        added(&scene, network)?;
        let followed = sysctl(&scene.pod, "ipv6/conf/net1/accept_ra_defrtr")?;
        ensure!(
            sysctl(&scene.pod, "ipv6/conf/net1/accept_ra")? == "1",
            "accept_ra"
        );
        scene.del_returns(network, &before)?;
        Ok(followed)
    };
    assert_eq!(follows(&network(json!({})))?, "1", "the pod has no way out");
    scene.in_pod(&[
        "link add eth0 type veth peer name eth0peer",
        "link set eth0 up",
        "link set eth0peer up",
        "-6 addr add fd01::2/64 dev eth0 nodad",
        "-6 route add default via fd01::1 dev eth0",
    ])?;
    for keys in [json!({}), json!({"sourceRouting": true})] {
        assert_eq!(follows(&network(keys))?, "0", "the pod has a default route");
    }
    assert_eq!(
        follows(&network(json!({"sourceRouting": false})))?,
        "1",
        "asked for"
    );
    let (_, notes) = validated(&scene, &network(json!({})))?;
    ensure!(notes.iter().any(|n| n.contains("acceptRA")), "{notes:?}");
    Ok(())
}

fn lifetime(netns: &Netns, link: &str, address: &str) -> Result<Option<u64>> {
    let links = netns.ip_json(&format!("addr show dev {link}"))?;
    let all = links[0]["addr_info"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let found = all.iter().find(|info| info["local"] == address);
    Ok(found.and_then(|info| info["valid_life_time"].as_u64()))
}

const FOR_EVER: u64 = u32::MAX as u64;

fn fabric_addresses() -> Result<()> {
    let scene = Scene::with_hardware()?;
    scene.on_host(&[
        "-6 route del fd77::/32",
        "addr flush dev nic0",
        "addr add 10.128.0.7/20 dev nic0 valid_lft 4 preferred_lft 4",
        "route add 10.0.0.0/8 via 10.128.0.1 dev nic0 proto dhcp",
    ])?;
    let network = scene.network(&json!({"attach": "move", "device": "nic0"}));
    let answer = answer_of(&scene.call(), "ADD", &network)?;
    let (_, refused) = e2e::scene::refusal(&answer, &[], &["lifetime", "fabricAddresses"])?;
    answer_of(&scene.call(), "DEL", &network)?.success()?;
    scene.policy(&json!({}), &json!({"fabricAddresses": "static"}))?;
    added(&scene, &network).context(refused)?;
    assert_eq!(lifetime(&scene.pod, "net1", "10.128.0.7")?, Some(FOR_EVER));
    let routes = scene.pod.ip("route show dev net1")?;
    ensure!(routes.contains("10.0.0.0/8 via 10.128.0.1"), "{routes}");
    // Longer than the lease: on the host it is as it was all the same.
    std::thread::sleep(std::time::Duration::from_secs(5));
    assert_eq!(lifetime(&scene.pod, "net1", "10.128.0.7")?, Some(FOR_EVER));
    answer_of(&scene.call(), "DEL", &network)?.success()?;
    let left = lifetime(&scene.host.netns, "nic0", "10.128.0.7")?;
    ensure!(
        left.is_some_and(|left| (1..=4).contains(&left)),
        "lifetime {left:?}"
    );
    let routes = scene.host.netns.ip("route show dev nic0")?;
    ensure!(routes.contains("10.0.0.0/8 via 10.128.0.1"), "{routes}");
    Ok(())
}

fn other_word() -> Result<()> {
    let scene = Scene::with_hardware()?;
    scene.policy(&json!({}), &json!({"fabricAddresses": "dhcp"}))?;
    let answer = answer_of(&scene.call(), "ADD", &scene.moving())?;
    e2e::scene::refusal(
        &answer,
        &[e2e::scene::DENIED],
        &["fabricAddresses", "static"],
    )?;
    Ok(())
}

fn left_behind() -> Result<()> {
    let scene = Scene::with_hardware()?;
    scene.on_host(&["addr add 10.128.0.7/20 dev nic0 valid_lft 9000 preferred_lft 9000"])?;
    let network = scene.network(&json!({"attach": "move", "device": "nic0"}));
    let answer = added(&scene, &network)?;
    ensure!(
        answer.stderr.contains(" warn ") && answer.stderr.contains("10.128.0.7/20"),
        "the log says {}",
        answer.stderr
    );
    assert_eq!(lifetime(&scene.pod, "net1", "10.128.0.7")?, None);
    answer_of(&scene.call(), "DEL", &network)?.success()?;
    let (errors, notes) = validated(&scene, &network)?;
    ensure!(
        errors.is_empty() && notes.iter().any(|note| note.contains("fabricAddresses")),
        "{notes:?}"
    );
    Ok(())
}

fn shared_rdma_only() -> Result<()> {
    let scene = Scene::with_hardware()?;
    let before = scene.host_state()?;
    let link = format!(
        "link add link nic0 name net1 netns {} type macvlan mode bridge",
        scene.pod.name()
    );
    scene.on_host(&[&link])?;
    let result = json!({"cniVersion": "1.1.0",
        "interfaces": [{"name": "net1", "sandbox": scene.pod.path()}], "ips": []});
    let network = scene
        .network(&json!({"attach": "rdma-only", "rdmaDevice": "mlx5_0", "prevResult": result}));
    added(&scene, &network)?;
    answer_of(&scene.call(), "CHECK", &network)?
        .success()
        .context("CHECK")?;
    ensure!(scene.listed("pods")?.len() == 1, "not in the journal");
    // As a runtime repeats it.
    added(&scene, &network).context("ADD once more")?;
    scene.pod.ip("link del net1")?;
    answer_of(&scene.call(), "DEL", &network)?.success()?;
    ensure!(
        answer_of(&scene.call(), "CHECK", &network)?.refusal()?.0 == 104,
        "after DEL"
    );
    unchanged(&before, || scene.host_state(), "after DEL")
}

/// A network that may be wrong in a key or two.
fn random_network(random: &mut Random) -> Value {
    let moves = random.in_(3);
    let mut map = Map::new();
    match moves {
        true => map.insert("device".into(), "nic0".into()),
        false => map.insert("master".into(), "nic0".into()),
    };
    map.insert(
        "attach".into(),
        if moves { "move" } else { "macvlan" }.into(),
    );
    let keys: [(&str, u64, Vec<Value>); 14] = [
        (
            "mode",
            3,
            ["bridge", "private", "vepa", "passthru", "l2"]
                .map(Value::from)
                .to_vec(),
        ),
        ("mtu", 3, vec![json!(1000), json!(1280), json!(1400)]),
        ("mac", 4, vec![json!("02:00:00:00:00:99")]),
        ("bcqueuelen", 6, vec![json!(77)]),
        ("pkey", 30, vec![json!("0x8001")]),
        ("umcast", 30, vec![json!(false)]),
        ("linkLocal", 4, vec![json!(true), json!(false)]),
        ("acceptRA", 6, vec![json!(true)]),
        ("dad", 6, vec![json!(true)]),
        (
            "sourceRouting",
            3,
            vec![json!(true), json!(false), json!({"table": 700})],
        ),
        ("rdma", 9, vec![json!("off"), json!("required")]),
        ("vlan", 30, vec![json!(7), json!(0)]),
        ("logLevel", 30, vec![json!("debug")]),
        ("cni.dev/x", 9, vec![json!(1)]),
    ];
    for (key, one_of, values) in &keys {
        if random.in_(*one_of) {
            map.insert((*key).to_owned(), random.one(values).clone());
        }
    }
    let mut ipam = own_ipam(&json!({}));
    if random.in_(3) {
        ipam["ipRanges"] = json!([{"range": "fd66::/64"}]);
    }
    if random.in_(2) {
        let gateways = ["10.66.0.1", "fd66::1", "10.67.0.1", "10.66.0.255"];
        ipam["gateway"] = (*random.one(&gateways)).into();
    }
    let mut routes = Vec::new();
    while routes.len() < 3 && random.in_(2) {
        let dsts = [
            "10.70.0.0/16",
            "10.71.0.0/16",
            "fd70::/32",
            "0.0.0.0/0",
            "::/0",
        ];
        let mut route = json!({"dst": random.one(&dsts)});
        if random.in_(2) {
            let hops = ["10.66.0.1", "10.66.0.254", "fd66::1", "fe80::1", "10.9.9.9"];
            route["gw"] = (*random.one(&hops)).into();
        }
        for (key, values) in [
            ("table", [500, 255, 254]),
            ("scope", [0, 253, 254]),
            ("priority", [7, 8, 9]),
        ] {
            if random.in_(5) {
                route[key] = (*random.one(&values)).into();
            }
        }
        if routes
            .iter()
            .all(|other: &Value| other["dst"] != route["dst"])
        {
            routes.push(route);
        }
    }
    ipam["routes"] = routes.into();
    map.insert("ipam".into(), ipam);
    Value::Object(map)
}

fn in_full() -> Result<()> {
    const NETWORKS: u64 = 250;
    const ENOUGH: usize = 25;
    let scene = Scene::new()?;
    let before = scene.host_state()?;
    let mut done = 0;
    for number in 0..NETWORKS {
        let mut random = Random(0x5a1d ^ number << 20);
        let keys = random_network(&mut random);
        let network = scene.network(&keys);
        let (errors, notes) = validated(&scene, &network)?;
        if !errors.is_empty() || !notes.is_empty() {
            continue;
        }
        let answer = added(&scene, &network).with_context(|| format!("network {number}"))?;
        is_done(&scene, &network, &serde_json::from_str(&answer.stdout)?)
            .with_context(|| format!("network {number}: {network}"))?;
        scene
            .del_returns(&network, &before)
            .with_context(|| format!("network {number}"))?;
        done += 1;
    }
    ensure!(
        done >= ENOUGH,
        "only {done} networks of {NETWORKS} are accepted without a note"
    );
    Ok(())
}

/// Everything that the network says is so in the pod.
fn is_done(scene: &Scene, network: &Value, result: &Value) -> Result<()> {
    let link = scene.pod.ip_json("-d addr show dev net1")?[0].clone();
    let info = &link["linkinfo"]["info_data"];
    for (key, found) in [
        ("mtu", &link["mtu"]),
        ("mac", &link["address"]),
        ("mode", &info["mode"]),
        ("bcqueuelen", &info["bcqueuelen"]),
    ] {
        let asked = &network[key];
        ensure!(asked.is_null() || asked == found, "{key} is {found}");
    }
    let addresses = link["addr_info"].as_array().cloned().unwrap_or_default();
    let has = |start: &str| {
        let local = |a: &Value| a["local"].as_str().is_some_and(|l| l.starts_with(start));
        addresses.iter().any(local)
    };
    ensure!(has("10.66.0."), "no address of the range: {addresses:?}");
    let v6 = network["ipam"]["ipRanges"].is_array();
    ensure!(has("fd66::") == v6, "IPv6 addresses: {addresses:?}");
    if let Some(wanted) = network["linkLocal"].as_bool() {
        ensure!(has("fe80:") == wanted, "link-local: {addresses:?}");
    }
    let accept_ra = sysctl(&scene.pod, "ipv6/conf/net1/accept_ra")? == "1";
    ensure!(
        network["acceptRA"].as_bool().unwrap_or(false) == accept_ra,
        "accept_ra"
    );
    let dad = sysctl(&scene.pod, "ipv6/conf/net1/accept_dad")?;
    let detects = network["dad"].is_null() || !has("fd66::") || dad == "1";
    ensure!(detects, "accept_dad is {dad}");
    let rules = scene.pod.ip("rule show")?;
    match &network["sourceRouting"] {
        Value::Null => {}
        Value::Bool(wanted) => ensure!(rules.contains("oif net1") == *wanted, "{rules}"),
        _ => ensure!(rules.contains("oif net1 lookup 700"), "{rules}"),
    }
    for route in network["ipam"]["routes"].as_array().into_iter().flatten() {
        let dst = route["dst"].as_str().context("dst")?;
        let family = if dst.contains(':') { "-6" } else { "-4" };
        let table = route["table"]
            .as_u64()
            .map_or("all".to_owned(), |table| table.to_string());
        let listed = scene
            .pod
            .ip(&format!("{family} route show table {table} {dst} dev net1"))?;
        let gateway = &network["ipam"]["gateway"];
        let own = route["gw"].as_str();
        let by_ipam = || {
            let gateway = gateway.as_str()?;
            let of_link = route["scope"] == 253;
            (!of_link && gateway.contains(':') == dst.contains(':')).then_some(gateway)
        };
        let via = own.or_else(by_ipam).unwrap_or_default();
        let metric = route["priority"]
            .as_u64()
            .map_or(String::new(), |p| format!("metric {p}"));
        ensure!(
            listed
                .lines()
                .any(|line| line.contains(via) && line.contains(&metric)),
            "route {route} is not there: {listed:?}"
        );
    }
    let interface = &result["interfaces"][0];
    ensure!(
        interface["name"] == "net1" && interface["mac"] == link["address"],
        "{result}"
    );
    Ok(())
}

fn whereabouts(scene: &Scene, ipam: &Value) -> Value {
    let mut ipam = ipam.clone();
    ipam["type"] = json!("whereabouts");
    scene.network(&json!({"attach": "macvlan", "master": "nic0", "ipam": ipam}))
}

/// The address is the range's first, since nobody reads the key; so people must be told.
fn keys_of_whereabouts() -> Result<()> {
    let scene = Scene::new()?;
    let before = scene.host_state()?;
    let network = whereabouts(
        &scene,
        &json!({"range": "10.66.0.0/24", "rangeStart": "10.66.0.9", "gateway": "10.66.0.1",
            "ipRanges": [{"range": "fd66::/64", "omit": []}], "log_level": "debug"}),
    );
    let call = super::hostile_ipam::as_whereabouts(&scene)?;
    let answer = answer_of(&call, "ADD", &network)?;
    let added = answer.success()?;
    let (errors, notes) = validated(&scene, &network)?;
    ensure!(errors.is_empty(), "{errors:?}");
    for words in [
        &["ipam.rangeStart ", "\"range_start\""][..],
        &["ipam.ipRanges[0].omit "],
        &["10.66.0.1 is a gateway"],
        &["log_level"],
    ] {
        let has = |text: &str| words.iter().all(|word| text.contains(word));
        let mut lines = answer.stderr.lines();
        ensure!(
            lines.any(|line| line.contains(" warn ") && has(line)),
            "{words:?}: the log says {}",
            answer.stderr
        );
        ensure!(notes.iter().any(|note| has(note)), "{words:?}: {notes:?}");
    }
    let ip = &added["ips"][0]["address"];
    ensure!(ip == "10.66.0.2/24", "{ip}");
    scene.del_returns(&network, &before)
}

fn no_range() -> Result<()> {
    /// CNI's code for an answer that cannot be used.
    const UNREADABLE: u64 = 6;
    let scene = Scene::new()?;
    let call = super::hostile_ipam::as_whereabouts(&scene)?;
    let words = ["without an address", "range"];
    for ipam in [json!({}), json!({"ipRanges": [{}]})] {
        let network = whereabouts(&scene, &ipam);
        scene.refuses_call(&call, &network, &[UNREADABLE], &words)?;
        let (errors, _) = validated(&scene, &network)?;
        ensure!(
            words.iter().all(|word| errors.concat().contains(word)),
            "{errors:?}"
        );
    }
    Ok(())
}

/// Another IPAM plugin refuses a STATUS that its version does not have.
fn status_version() -> Result<()> {
    let scene = Scene::new()?;
    scene.allow(&json!({"ipam": ["canned"]}))?;
    let refuses =
        "echo '{\"cniVersion\":\"1.0.0\",\"code\":50,\"msg\":\"asked for its status\"}'; exit 1";
    super::cni_delegate::install(&scene.host, "canned", refuses)?;
    let directory = scene.host.directory().to_string_lossy().into_owned();
    let flags = ["--on-host", "--cni-path", &directory];
    let mut network =
        scene.network(&json!({"attach": "macvlan", "master": "nic0", "ipam": {"type": "canned"}}));
    let (errors, _) = validated_with(&scene, &flags, &network)?;
    ensure!(
        errors.concat().contains("asked for its status"),
        "{errors:?}"
    );
    network["cniVersion"] = json!("1.0.0");
    let (errors, notes) = validated_with(&scene, &flags, &network)?;
    ensure!(errors.is_empty(), "{errors:?}");
    ensure!(notes.iter().any(|note| note.contains("1.1.0")), "{notes:?}");
    // What needs no STATUS is checked in every version.
    network["master"] = json!("nic9");
    let (errors, _) = validated_with(&scene, &flags, &network)?;
    ensure!(errors.concat().contains("nic9"), "{errors:?}");
    Ok(())
}
