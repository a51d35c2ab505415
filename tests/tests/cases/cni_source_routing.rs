//! Source routing: a pod with several RDMA interfaces in one subnet, each used for its own addresses.

use std::net::UdpSocket;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use e2e::case;
use e2e::cni::Call;
use e2e::cni_host::{CniHost, same};
use e2e::harness::Case;
use e2e::netns::Netns;
use serde_json::{Value, json};

pub(crate) const CASES: &[Case] = &[
    case!(
        each_address_leaves_and_answers_through_its_own_interface,
        Root,
        Netns,
        Macvlan
    ),
    case!(
        the_pods_default_route_stays_where_it_is,
        Root,
        Netns,
        Macvlan
    ),
    case!(
        a_pod_without_a_default_route_has_that_of_its_first_network,
        Root,
        Netns,
        Macvlan
    ),
    case!(a_moved_nic_has_the_table_of_its_network, Root, Netns),
    case!(source_routing_can_be_switched_off, Root, Netns, Macvlan),
    case!(
        an_interface_too_small_for_ipv6_has_its_settings,
        Root,
        Netns,
        Macvlan
    ),
    case!(a_nic_without_carrier_is_a_warning, Root, Netns),
    case!(check_sees_a_missing_rule, Root, Netns, Macvlan),
];

fn run(call: &Call, command: &str, config: &Value) -> Result<Value> {
    call.run(command, config.to_string().as_bytes())?.success()
}

/// Two NICs of the host on one switch, which has 10.9.0.254 and `fd09::fe`.
fn on_one_switch() -> Result<(CniHost, Netns)> {
    let host = CniHost::new()?;
    host.add_nic("nic1", "peer1")?;
    let switch = Netns::new("cnis")?;
    switch.ip("link add br0 type bridge")?;
    switch.ip("link set br0 up")?;
    for peer in ["peer0", "peer1"] {
        host.netns
            .ip(&format!("link set {peer} netns {}", switch.name()))?;
        switch.ip(&format!("link set {peer} master br0 up"))?;
    }
    switch.ip("addr add 10.9.0.254/24 dev br0")?;
    switch.ip("-6 addr add fd09::fe/64 dev br0 nodad")?;
    Ok((host, switch))
}

/// A pod with a cluster network: `eth0` with 10.244.0.7 and the default route.
fn pod(host: &CniHost) -> Result<Netns> {
    let pod = host.pod()?;
    for command in [
        "link set lo up",
        "link add eth0 type veth peer name eth0p",
        "link set eth0p up",
        "link set eth0 up",
        "addr add 10.244.0.7/24 dev eth0",
        "route add default via 10.244.0.1",
    ] {
        pod.ip(command)?;
    }
    Ok(pod)
}

fn network(host: &CniHost, number: u32, more: &Value) -> Value {
    let mut ipam = host.own_ipam(
        "10.9.0.0/24",
        &format!("10.9.0.{}", 100 + number),
        &json!({"gateway": "10.9.0.254"}),
    );
    ipam["ipRanges"] = json!([{"range": "fd09::/64", "range_start": format!("fd09::{number}00")}]);
    let mut config = json!({"name": format!("rail{number}"), "cniVersion": "1.1.0", "attach": "macvlan",
        "master": format!("nic{number}"), "ipam": ipam});
    if let (Some(config), Some(more)) = (config.as_object_mut(), more.as_object()) {
        config.extend(more.clone());
    }
    host.config(&config)
}

fn ips(result: &Value) -> Result<[String; 2]> {
    let address = |index: usize| -> Result<String> {
        let text = result["ips"][index]["address"]
            .as_str()
            .context("address")?;
        Ok(text.split('/').next().unwrap_or_default().to_owned())
    };
    Ok([address(0)?, address(1)?])
}

fn sysctl(pod: &Netns, interface: &str, key: &str) -> Result<String> {
    let path = format!("/proc/sys/net/ipv4/conf/{interface}/{key}");
    Ok(e2e::netns::run(pod.command("cat").arg(path))?
        .trim()
        .to_owned())
}

fn mac(pod: &Netns, interface: &str) -> Result<String> {
    let link = pod.ip_json(&format!("link show {interface}"))?;
    Ok(link[0]["address"].as_str().context("address")?.to_owned())
}

/// The MAC address that a datagram to an address is sent to.
fn resolved(switch: &Netns, address: &str) -> Result<String> {
    switch.enter(|| Ok(UdpSocket::bind("10.9.0.254:0")?.send_to(b"?", (address, 9))?))?;
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(10) {
        let neighbours = switch.ip_json(&format!("neigh show {address}"))?;
        if let Some(mac) = neighbours[0]["lladdr"].as_str() {
            return Ok(mac.to_owned());
        }
        thread::sleep(Duration::from_millis(20));
    }
    bail!("no host answers for {address}")
}

fn each_address_leaves_and_answers_through_its_own_interface() -> Result<()> {
    let (host, switch) = on_one_switch()?;
    let before = host.picture()?;
    let pod = pod(&host)?;
    let mut calls = Vec::new();
    let mut addresses = Vec::new();
    let rules_before = pod.ip("rule")?;
    for number in [0, 1] {
        let call = host.call(&pod, "c1", &format!("net{}", number + 1));
        let config = network(&host, number, &json!({}));
        addresses.push(ips(&run(&call, "ADD", &config)?)?);
        calls.push((call, config));
    }
    for (index, [v4, v6]) in addresses.iter().enumerate() {
        let interface = format!("net{}", index + 1);
        for (family, near, from) in [("-4", "10.9.0.254", v4), ("-6", "fd09::fe", v6)] {
            let way = pod.ip(&format!("{family} route get {near} from {from}"))?;
            assert!(way.contains(&format!("dev {interface} ")), "{way}");
        }
        // Each has its rules from the start, so another network's subnet is reached by the gateway.
        for by in [format!("from {v4}"), format!("oif {interface}")] {
            let way = pod.ip(&format!("route get 192.0.2.1 {by}"))?;
            let expected = format!("via 10.9.0.254 dev {interface} ");
            assert!(way.contains(&expected), "{by}: {way}");
        }
        assert_eq!(sysctl(&pod, &interface, "rp_filter")?, "2");
        // What is asked of the address is answered with its own interface's MAC address alone.
        assert_eq!(
            resolved(&switch, v4)?,
            mac(&pod, &interface)?,
            "who answers for {v4}"
        );
        assert_eq!(sysctl(&pod, &interface, "arp_ignore")?, "1");
        assert_eq!(sysctl(&pod, &interface, "arp_announce")?, "2");
    }
    assert!(
        pod.ip("route get 192.0.2.1")?
            .contains("via 10.244.0.1 dev eth0")
    );
    let main = pod.ip("route show table main")?;
    assert!(main.contains(&format!(
        "10.9.0.0/24 dev net2 proto kernel scope link src {}",
        addresses[1][0]
    )));

    for (call, config) in calls.iter().rev() {
        run(call, "DEL", config)?;
    }
    assert_eq!(pod.ip("rule")?, rules_before, "a living pod keeps nothing");
    same(&before, &host.picture()?, "after DEL")
}

fn the_pods_default_route_stays_where_it_is() -> Result<()> {
    let (host, _switch) = on_one_switch()?;
    let pod = pod(&host)?;
    let call = host.call(&pod, "c1", "net1");
    let mut config = network(&host, 0, &json!({}));
    config["ipam"]["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "10.50.0.0/16"}]);
    let result = run(&call, "ADD", &config)?;
    let [v4, _] = ips(&result)?;
    let defaults = pod.ip("route show default table main")?;
    assert_eq!(defaults.trim(), "default via 10.244.0.1 dev eth0");
    assert!(
        pod.ip("route get 10.50.0.1")?.contains("dev net1"),
        "other routes serve everybody"
    );
    let way = pod.ip(&format!("route get 192.0.2.1 from {v4}"))?;
    assert!(way.contains("via 10.9.0.254 dev net1"), "{way}");
    let table = result["routes"][0]["table"]
        .as_u64()
        .context("the result names the table")?;
    assert!(
        pod.ip(&format!("route show table {table}"))?
            .contains("default via 10.9.0.254 dev net1")
    );
    let mut check = config.clone();
    check["prevResult"] = result;
    run(&call, "CHECK", &check)?;
    run(&call, "DEL", &config)?;

    // A version that cannot name a table does not promise the route.
    config["cniVersion"] = "0.4.0".into();
    let result = run(&call, "ADD", &config)?;
    assert_eq!(
        result["routes"].as_array().map(Vec::len),
        Some(1),
        "{result}"
    );
    check = config.clone();
    check["prevResult"] = result;
    run(&call, "CHECK", &check)?;
    run(&call, "DEL", &config)?;
    Ok(())
}

fn a_pod_without_a_default_route_has_that_of_its_first_network() -> Result<()> {
    let (host, _switch) = on_one_switch()?;
    let pod = host.pod()?;
    let mut addresses = Vec::new();
    for number in [0, 1] {
        let call = host.call(&pod, "c1", &format!("net{}", number + 1));
        let mut config = network(&host, number, &json!({}));
        config["ipam"]["routes"] = json!([{"dst": "0.0.0.0/0"}]);
        let result = run(&call, "ADD", &config)?;
        let table = &result["routes"][0]["table"];
        assert_eq!(table.is_null(), number == 0, "{result}");
        addresses.push(ips(&result)?);
        config["prevResult"] = result;
        run(&call, "CHECK", &config)?;
    }
    let defaults = pod.ip("route show default table main")?;
    assert_eq!(defaults.lines().count(), 1, "{defaults}");
    assert!(defaults.contains("via 10.9.0.254 dev net1"), "{defaults}");
    let way = pod.ip(&format!("route get 192.0.2.1 from {}", addresses[1][0]))?;
    assert!(way.contains("via 10.9.0.254 dev net2"), "{way}");
    Ok(())
}

fn a_moved_nic_has_the_table_of_its_network() -> Result<()> {
    let host = CniHost::new()?;
    host.add_nic("nic1", "peer1")?;
    let before = host.picture()?;
    let pod = pod(&host)?;
    let call = host.call(&pod, "c1", "net1");
    let config = host.config(
        &json!({"attach": "move", "device": "nic0", "cniVersion": "1.1.0",
        "sourceRouting": {"table": 77, "priority": 300}}),
    );
    run(&call, "ADD", &config)?;
    let rules = pod.ip("rule")?;
    assert!(rules.contains("300:\tfrom 10.9.0.1 lookup 77"), "{rules}");
    assert!(
        pod.ip("route show table 77")?
            .contains("10.9.0.0/24 dev net1")
    );
    // The table is this interface's: another one cannot ask for it.
    let second = host.call(&pod, "c1", "net2");
    let mut other = network(&host, 1, &json!({"sourceRouting": {"table": 77}}));
    let (code, message) = second.run("ADD", other.to_string().as_bytes())?.refusal()?;
    assert_eq!(code, 7);
    assert!(
        message.contains("table") && message.contains("77"),
        "{message}"
    );
    other["sourceRouting"] = json!({"table": 78});
    run(&second, "ADD", &other)?;
    run(&second, "DEL", &other)?;
    run(&call, "DEL", &config)?;
    assert!(!pod.ip("rule")?.contains("lookup 77"));
    same(&before, &host.picture()?, "after DEL")
}

fn source_routing_can_be_switched_off() -> Result<()> {
    let (host, _switch) = on_one_switch()?;
    let pod = pod(&host)?;
    let rules = pod.ip("rule")?;
    for number in [0, 1] {
        let call = host.call(&pod, "c1", &format!("net{}", number + 1));
        run(
            &call,
            "ADD",
            &network(&host, number, &json!({"sourceRouting": false})),
        )?;
    }
    assert_eq!(pod.ip("rule")?, rules);
    assert_eq!(
        sysctl(&pod, "net2", "arp_ignore")?,
        sysctl(&pod, "default", "arp_ignore")?
    );
    Ok(())
}

/// The kernel takes IPv6 away from an interface whose MTU is below 1280 (RFC 8200 5), and refuses a
/// request that has a setting of it.
fn an_interface_too_small_for_ipv6_has_its_settings() -> Result<()> {
    let (host, _switch) = on_one_switch()?;
    let pod = pod(&host)?;
    let call = host.call(&pod, "c1", "net1");
    let ipam = json!({"type": "rdma-ipam", "range": "10.9.0.0/24"});
    run(
        &call,
        "ADD",
        &network(&host, 0, &json!({"mtu": 1000, "ipam": ipam})),
    )?;
    ensure!(
        pod.ip("-6 addr show dev net1")?.is_empty(),
        "the kernel gives it IPv6 all the same"
    );
    for (key, value) in [
        ("arp_ignore", "1"),
        ("arp_announce", "2"),
        ("arp_notify", "1"),
    ] {
        assert_eq!(sysctl(&pod, "net1", key)?, value, "{key}");
    }
    Ok(())
}

/// Without a carrier the kernel drops an announcement. ADD does not wait for one.
fn a_nic_without_carrier_is_a_warning() -> Result<()> {
    let host = CniHost::new()?;
    let pod = host.pod()?;
    let call = host.call(&pod, "c1", "net1");
    let ipam = host.own_ipam("10.9.0.0/24", "10.9.0.100", &json!({}));
    let config = host.config(&json!({"attach": "move", "device": "nic0", "ipam": ipam}));
    let warnings = || -> Result<usize> {
        let answer = call.run("ADD", config.to_string().as_bytes())?;
        answer.success()?;
        run(&call, "DEL", &config)?;
        Ok(answer.stderr.matches("net1 has no carrier").count())
    };
    assert_eq!(warnings()?, 0);
    host.netns.ip("link set peer0 down")?;
    assert_eq!(warnings()?, 1);
    Ok(())
}

fn check_sees_a_missing_rule() -> Result<()> {
    let (host, _switch) = on_one_switch()?;
    let pod = pod(&host)?;
    let call = host.call(&pod, "c1", "net1");
    let mut config = network(&host, 0, &json!({"sourceRouting": {"priority": 300}}));
    let result = run(&call, "ADD", &config)?;
    config["prevResult"] = result;
    run(&call, "CHECK", &config)?;
    pod.ip("rule del pref 300 oif net1")?;
    let (code, message) = call
        .run("CHECK", config.to_string().as_bytes())?
        .refusal()?;
    assert_eq!(code, 104);
    assert!(
        message.contains("rule") && message.contains("oif net1"),
        "{message}"
    );
    Ok(())
}
