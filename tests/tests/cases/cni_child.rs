//! Children made by `rdma-netdev`: macvlan on a host's NIC; `cni_child_addresses` has what they are
//! given.

use anyhow::{Context, Result};
use e2e::case;
use e2e::cni::Call;
use e2e::cni_host::{CniHost, same};
use e2e::harness::Case;
use e2e::netns::Netns;
use serde_json::{Value, json};

pub(crate) const CASES: &[Case] = &[
    case!(
        a_macvlan_in_every_version,
        Root,
        Netns,
        Macvlan,
        ReferencePlugins
    ),
    case!(modes_queue_and_mtu_reach_the_kernel, Root, Netns, Macvlan),
    case!(the_most_specific_mac_is_set, Root, Netns, Macvlan),
    case!(a_name_of_the_host_is_free_in_the_pod, Root, Netns, Macvlan),
    case!(
        a_taken_name_is_refused_and_left_alone,
        Root,
        Netns,
        Macvlan,
        ReferencePlugins
    ),
    case!(
        del_needs_no_master_and_no_namespace,
        Root,
        Netns,
        Macvlan,
        ReferencePlugins
    ),
    case!(
        check_sees_what_changed,
        Root,
        Netns,
        Macvlan,
        ReferencePlugins
    ),
    case!(without_a_master_it_is_the_way_out, Root, Netns, Macvlan),
    case!(two_kinds_of_children_are_not_tried, Root, Netns, Macvlan),
    case!(
        sixty_four_pods_at_once,
        Root,
        Netns,
        Macvlan,
        ReferencePlugins
    ),
];

pub(super) fn macvlan(host: &CniHost, keys: Value) -> Value {
    let mut all = json!({"attach": "macvlan", "master": "nic0"});
    if let (Some(all), Some(keys)) = (all.as_object_mut(), keys.as_object()) {
        all.extend(keys.clone());
    }
    host.config(&all)
}

pub(super) fn with_v4(host: &CniHost) -> Value {
    let ipam = host.host_local(&[("10.9.0.0/24", "10.9.0.100")], &json!({}));
    macvlan(host, json!({"ipam": ipam}))
}

pub(super) fn run(call: &Call, command: &str, config: &Value) -> Result<Value> {
    call.run(command, config.to_string().as_bytes())?.success()
}

pub(super) fn refused(call: &Call, command: &str, config: &Value) -> Result<(u64, String)> {
    call.run(command, config.to_string().as_bytes())?.refusal()
}

/// One link of a namespace, with its kind and addresses.
pub(super) fn link(netns: &Netns, name: &str) -> Result<Value> {
    let list = netns.ip_json(&format!("addr show dev {name}"))?;
    list.get(0)
        .cloned()
        .with_context(|| format!("no link {name}"))
}

pub(super) fn addresses(link: &Value) -> Vec<String> {
    let list = link["addr_info"].as_array().cloned().unwrap_or_default();
    list.iter()
        .map(|a| {
            format!(
                "{}/{}",
                a["local"].as_str().unwrap_or_default(),
                a["prefixlen"]
            )
        })
        .collect()
}

fn a_macvlan_in_every_version() -> Result<()> {
    let host = CniHost::new()?;
    let before = host.picture()?;
    for version in ["0.3.0", "0.3.1", "0.4.0", "1.0.0"] {
        let pod = host.pod()?;
        let call = host.call(&pod, "c1", "net1");
        let mut config = with_v4(&host);
        config["cniVersion"] = version.into();
        let result = run(&call, "ADD", &config)?;
        assert_eq!(result["cniVersion"], version);
        let child = link(&pod, "net1")?;
        assert_eq!(child["linkinfo"]["info_kind"], "macvlan");
        assert_eq!(child["linkinfo"]["info_data"]["mode"], "bridge");
        assert_eq!(addresses(&child).len(), 1, "{version}: {child}");
        let address = addresses(&child).swap_remove(0);
        let ip = &result["ips"][0];
        assert_eq!(ip["address"], address.as_str());
        assert_eq!(ip.get("version").is_some(), version < "1.0.0", "{result}");
        assert_eq!(ip["interface"], 0);
        let interface = &result["interfaces"][0];
        assert_eq!(interface["name"], "net1");
        assert_eq!(interface["mac"], child["address"]);
        assert_eq!(interface["sandbox"], pod.path().to_string_lossy().as_ref());
        assert_eq!(interface.get("mtu").is_some(), version >= "1.0.0");
        run(&call, "DEL", &config)?;
        assert!(link(&pod, "net1").is_err());
        assert_eq!(run(&call, "DEL", &config)?, Value::Null);
        same(&before, &host.picture()?, version)?;
    }
    Ok(())
}

fn modes_queue_and_mtu_reach_the_kernel() -> Result<()> {
    let host = CniHost::new()?;
    host.policy(&json!({"allow": {"nonRdma": true, "passthru": true, "unallocated": true}}))?;
    for mode in ["private", "vepa", "passthru"] {
        let pod = host.pod()?;
        let call = host.call(&pod, "c1", "net1");
        let config = macvlan(
            &host,
            json!({"mode": mode, "mtu": 1400, "bcqueuelen": 5000}),
        );
        let result = run(&call, "ADD", &config)?;
        assert_eq!(result["interfaces"][0]["mtu"], 1400);
        let data = &link(&pod, "net1")?["linkinfo"]["info_data"];
        assert_eq!(data["mode"], mode);
        assert_eq!(data["bcqueuelen"], 5000);
        run(&call, "DEL", &config)?;
    }
    let pod = host.pod()?;
    let before = host.picture()?;
    for (keys, word) in [
        (json!({"mode": "source"}), "source"),
        (json!({"mode": "l2"}), "l2"),
        (json!({"mtu": 1501}), "1501"),
        (json!({"mtu": -1}), "mtu"),
        (json!({"pkey": "0x8001"}), "pkey"),
    ] {
        let (code, message) =
            refused(&host.call(&pod, "c1", "net1"), "ADD", &macvlan(&host, keys))?;
        assert_eq!(code, 7, "{message}");
        assert!(message.contains(word), "{message}");
    }
    same(&before, &host.picture()?, "after refusals")
}

fn the_most_specific_mac_is_set() -> Result<()> {
    let host = CniHost::new()?;
    for (keys, args, expected) in [
        (json!({"mac": "02:00:00:00:00:01"}), "", "02:00:00:00:00:01"),
        (
            json!({"mac": "02:00:00:00:00:01"}),
            "MAC=02:00:00:00:00:02",
            "02:00:00:00:00:02",
        ),
        (
            json!({"runtimeConfig": {"mac": "02:00:00:00:00:0A"}}),
            "MAC=02:00:00:00:00:02",
            "02:00:00:00:00:0a",
        ),
    ] {
        let pod = host.pod()?;
        let mut call = host.call(&pod, "c1", "net1");
        call.args = args.into();
        let config = macvlan(&host, keys);
        let result = run(&call, "ADD", &config)?;
        assert_eq!(result["interfaces"][0]["mac"], expected);
        assert_eq!(link(&pod, "net1")?["address"], expected);
        run(&call, "DEL", &config)?;
    }
    Ok(())
}

fn a_name_of_the_host_is_free_in_the_pod() -> Result<()> {
    let host = CniHost::new()?;
    let pod = host.pod()?;
    let call = host.call(&pod, "c1", "nic0");
    let config = macvlan(&host, json!({}));
    run(&call, "ADD", &config)?;
    assert_eq!(link(&pod, "nic0")?["linkinfo"]["info_kind"], "macvlan");
    assert_eq!(link(&host.netns, "nic0")?["linkinfo"]["info_kind"], "veth");
    run(&call, "DEL", &config)?;
    Ok(())
}

fn a_taken_name_is_refused_and_left_alone() -> Result<()> {
    let host = CniHost::new()?;
    let pod = host.pod()?;
    pod.ip("link add net1 type veth peer name other")?;
    let before = host.picture()?;
    let call = host.call(&pod, "c1", "net1");
    let (code, message) = refused(&call, "ADD", &with_v4(&host))?;
    assert_eq!(code, 103, "{message}");
    assert!(message.contains("net1"), "{message}");
    same(&before, &host.picture()?, "after the refusal")?;
    // The runtime cleans up after a failed ADD.
    run(&call, "DEL", &with_v4(&host))?;
    assert_eq!(link(&pod, "net1")?["linkinfo"]["info_kind"], "veth");
    // The same by an alternative name.
    pod.ip("link property add dev other altname net2")?;
    let (code, _) = refused(&host.call(&pod, "c1", "net2"), "ADD", &with_v4(&host))?;
    assert_eq!(code, 103);
    // And twice the same attachment.
    let twice = host.call(&pod, "c2", "net3");
    run(&twice, "ADD", &with_v4(&host))?;
    let (code, message) = refused(&twice, "ADD", &with_v4(&host))?;
    assert_eq!(code, 103, "{message}");
    assert_eq!(
        addresses(&link(&pod, "net3")?).len(),
        1,
        "the first one lives on"
    );
    assert_eq!(
        host.left_behind()
            .keys()
            .filter(|k| k.starts_with("host-local"))
            .count(),
        1
    );
    run(&twice, "DEL", &with_v4(&host))?;
    Ok(())
}

fn del_needs_no_master_and_no_namespace() -> Result<()> {
    let host = CniHost::new()?;
    host.add_nic("nic1", "peer1")?;
    let before = host.left_behind();
    let mut config = with_v4(&host);
    config["master"] = "nic1".into();
    for gone in ["nothing", "namespace", "empty", "master"] {
        if host.netns.ip("link show nic1").is_err() {
            host.add_nic("nic1", "peer1")?;
        }
        let pod = host.pod()?;
        let mut call = host.call(&pod, "c1", "net1");
        run(&call, "ADD", &config)?;
        match gone {
            "namespace" => pod.delete()?,
            "empty" => call.netns = "".into(),
            "master" => drop(host.netns.ip("link del nic1")?),
            _ => {}
        }
        run(&call, "DEL", &config)?;
        run(&call, "DEL", &config)?;
        same(&before, &host.left_behind(), gone)?;
    }
    // DEL of what never was, with a configuration that says nothing.
    let pod = host.pod()?;
    run(
        &host.call(&pod, "c9", "net1"),
        "DEL",
        &host.config(&json!({})),
    )?;
    Ok(())
}

fn check_sees_what_changed() -> Result<()> {
    let host = CniHost::new()?;
    let routes = json!({"routes": [{"dst": "10.50.0.0/16", "gw": "10.9.0.254"}]});
    let ipam = host.host_local(&[("10.9.0.0/24", "10.9.0.100")], &routes);
    let config = macvlan(&host, json!({"ipam": ipam}));
    let with_result = |result: &Value| {
        let mut config = config.clone();
        config["prevResult"] = result.clone();
        config
    };
    for (change, word) in [
        ("", ""),
        ("link set net1 mtu 1400", "MTU"),
        ("addr flush dev net1", "address"),
        ("route del 10.50.0.0/16", "route"),
        ("link set net1 down", "down"),
        ("link set net1 address 02:00:00:00:00:99", "MAC"),
        ("link del net1", "gone"),
    ] {
        let pod = host.pod()?;
        let call = host.call(&pod, "c1", "net1");
        let result = run(&call, "ADD", &config)?;
        let (code, _) = refused(&call, "CHECK", &config)?;
        assert_eq!(code, 7, "CHECK needs a prevResult");
        let other = json!({"cniVersion": "1.0.0", "interfaces": [], "ips": []});
        let (code, message) = refused(&call, "CHECK", &with_result(&other))?;
        let netns = pod.path().display().to_string();
        assert!(
            code == 104 && message.ends_with(&format!("no interface net1 in {netns}")),
            "{message}"
        );
        // What others add is no difference.
        pod.ip("addr add 10.200.0.1/32 dev net1")?;
        if change.is_empty() {
            assert_eq!(run(&call, "CHECK", &with_result(&result))?, Value::Null);
        } else {
            pod.ip(change)?;
            let (code, message) = refused(&call, "CHECK", &with_result(&result))?;
            assert_eq!(code, 104, "{change}: {message}");
            assert!(message.contains(word), "{change}: {message}");
        }
        run(&call, "DEL", &with_result(&result))?;
    }
    Ok(())
}

fn without_a_master_it_is_the_way_out() -> Result<()> {
    let host = CniHost::new()?;
    host.netns
        .ip("route add default via 10.9.0.254 metric 100")?;
    let pod = host.pod()?;
    let call = host.call(&pod, "c1", "net1");
    let config = host.config(&json!({"attach": "macvlan"}));
    let (code, message) = refused(&call, "ADD", &config)?;
    assert_eq!(code, 7);
    assert!(
        message.contains("no netdev is selected"),
        "uplinks are not given: {message}"
    );
    host.policy(&json!({"allow": {"nonRdma": true, "uplinks": true}}))?;
    run(&call, "ADD", &config)?;
    assert_eq!(link(&pod, "net1")?["linkinfo"]["info_kind"], "macvlan");
    // Whatever became of the route.
    host.netns.ip("route del default")?;
    run(&call, "DEL", &config)?;
    assert!(link(&pod, "net1").is_err());
    Ok(())
}

/// No kernel with ipvlan is needed to see it: nothing is asked of the kernel.
fn two_kinds_of_children_are_not_tried() -> Result<()> {
    let host = CniHost::new()?;
    let (first, second) = (host.pod()?, host.pod()?);
    run(
        &host.call(&first, "c1", "net1"),
        "ADD",
        &macvlan(&host, json!({})),
    )?;
    let between = host.picture()?;
    let ipvlan = macvlan(
        &host,
        json!({"attach": "ipvlan", "ipam": host.own_ipam("10.9.0.0/24", "10.9.0.100", &json!({}))}),
    );
    let call = host.call(&second, "c2", "net1");
    let (code, message) = refused(&call, "ADD", &ipvlan)?;
    assert_eq!(code, 7, "{message}");
    assert!(
        message.contains("macvlan") && message.contains("container c1"),
        "{message}"
    );
    same(&between, &host.picture()?, "after the refusal")?;
    run(
        &host.call(&first, "c1", "net1"),
        "DEL",
        &macvlan(&host, json!({})),
    )?;

    host.netns
        .ip("link add mv0 link nic0 type macvlan mode bridge")?;
    let (code, message) = refused(&call, "ADD", &ipvlan)?;
    assert_eq!(code, 7, "{message}");
    assert!(message.contains("mv0 of the host"), "{message}");
    // Of one kind there may be more.
    run(&call, "ADD", &macvlan(&host, json!({})))?;
    Ok(())
}

/// Five rounds with addresses of our own IPAM, then one with those of another program.
fn sixty_four_pods_at_once() -> Result<()> {
    let host = CniHost::new()?;
    let before = host.picture()?;
    let pods: Vec<Netns> = (0..64).map(|_| host.pod()).collect::<Result<_>>()?;
    let all = |command: &str, config: &Value| -> Result<Vec<Value>> {
        std::thread::scope(|scope| {
            let running: Vec<_> = pods
                .iter()
                .enumerate()
                .map(|(index, pod)| {
                    let call = host.call(pod, &format!("c{index}"), "net1");
                    scope.spawn(move || run(&call, command, config))
                })
                .collect();
            running
                .into_iter()
                .map(|thread| thread.join().expect("no panic"))
                .collect()
        })
    };
    let own = macvlan(
        &host,
        json!({"ipam": host.own_ipam("10.9.0.0/24", "10.9.0.100", &json!({}))}),
    );
    let other = with_v4(&host);
    for round in 0..=5 {
        let config = if round < 5 { &own } else { &other };
        let results = all("ADD", config)?;
        let distinct = |value: &dyn Fn(&Value) -> Value| {
            let mut seen: Vec<String> = results.iter().map(|r| value(r).to_string()).collect();
            seen.sort();
            seen.dedup();
            seen.len()
        };
        assert_eq!(
            distinct(&|r| r["interfaces"][0]["mac"].clone()),
            64,
            "round {round}"
        );
        assert_eq!(
            distinct(&|r| r["ips"][0]["address"].clone()),
            64,
            "round {round}"
        );
        all("DEL", config)?;
        same(&before, &host.picture()?, &format!("after round {round}"))?;
    }
    Ok(())
}
