//! Addresses, routes and announcements of a macvlan.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use e2e::case;
use e2e::cni_host::{CniHost, same};
use e2e::harness::Case;
use e2e::netns::Netns;
use serde_json::{Value, json};

use super::cni_child::{addresses, link, macvlan, refused, run, with_v4};

pub(crate) const CASES: &[Case] = &[
    case!(our_ipam_gives_and_takes_addresses, Root, Netns, Macvlan),
    case!(an_unusable_store_leaves_nothing, Root, Netns, Macvlan),
    case!(
        without_ipam_it_is_up_and_has_no_address,
        Root,
        Netns,
        Macvlan
    ),
    case!(
        ipv6_is_usable_at_once_and_follows_no_router,
        Root,
        Netns,
        Macvlan,
        ReferencePlugins
    ),
    case!(
        link_local_addresses_only_where_they_serve,
        Root,
        Netns,
        Macvlan,
        ReferencePlugins
    ),
    case!(every_field_of_a_route_is_honoured, Root, Netns, Macvlan),
    case!(
        a_previous_result_keeps_its_numbers,
        Root,
        Netns,
        Macvlan,
        ReferencePlugins
    ),
    case!(
        addresses_are_announced,
        Root,
        Netns,
        Macvlan,
        ReferencePlugins
    ),
];

fn our_ipam_gives_and_takes_addresses() -> Result<()> {
    let host = CniHost::new()?;
    let before = host.picture()?;
    let routes = json!({"routes": [{"dst": "10.50.0.0/16"}], "gateway": "10.9.0.1", "range_end": "10.9.0.101"});
    let ipam = host.own_ipam("10.9.0.0/24", "10.9.0.100", &routes);
    let config = macvlan(&host, json!({"ipam": ipam, "cniVersion": "1.1.0"}));
    let pods = [host.pod()?, host.pod()?, host.pod()?];
    let call = |index: usize| host.call(&pods[index], &format!("c{index}"), "net1");
    for (index, pod) in pods.iter().enumerate().take(2) {
        let result = run(&call(index), "ADD", &config)?;
        let address = result["ips"][0]["address"]
            .as_str()
            .context("address")?
            .to_owned();
        assert_eq!(addresses(&link(pod, "net1")?), [address]);
        assert!(
            pod.ip("route")?
                .contains("10.50.0.0/16 via 10.9.0.1 dev net1")
        );
        let mut check = config.clone();
        check["prevResult"] = result;
        run(&call(index), "CHECK", &check)?;
    }
    let between = host.picture()?;
    let (code, message) = refused(&call(2), "ADD", &config)?;
    assert_eq!(code, 102, "{message}");
    assert!(link(&pods[2], "net1").is_err());
    same(&between, &host.picture()?, "after the pool was exhausted")?;
    // The runtime's clean-up, with the first pod's namespace gone.
    pods[0].delete()?;
    for index in 0..3 {
        run(&call(index), "DEL", &config)?;
    }
    same(&before, &host.picture()?, "after DEL")
}

fn an_unusable_store_leaves_nothing() -> Result<()> {
    let host = CniHost::new()?;
    let before = host.picture()?;
    std::fs::write(host.root().join("run/rdma-netdev"), "")?;
    let pod = host.pod()?;
    let ipam = host.own_ipam("10.9.0.0/24", "10.9.0.100", &json!({}));
    let config = macvlan(&host, json!({"ipam": ipam}));
    let (code, message) = refused(&host.call(&pod, "c1", "net1"), "ADD", &config)?;
    assert_eq!(code, 105, "{message}");
    assert!(message.contains("run/rdma-netdev/leases"), "{message}");
    assert!(link(&pod, "net1").is_err());
    same(&before, &host.picture()?, "after the refusal")
}

fn without_ipam_it_is_up_and_has_no_address() -> Result<()> {
    let host = CniHost::new()?;
    for ipam in [Value::Null, json!({})] {
        let pod = host.pod()?;
        let call = host.call(&pod, "c1", "net1");
        let config = macvlan(&host, json!({"ipam": ipam, "cniVersion": "1.1.0"}));
        let result = run(&call, "ADD", &config)?;
        assert!(result.get("ips").is_none(), "{result}");
        assert_eq!(result["interfaces"][0]["mtu"], 1500);
        let child = link(&pod, "net1")?;
        assert_eq!(child["operstate"], "UP");
        assert!(addresses(&child).is_empty(), "{child}");
        run(&call, "DEL", &config)?;
    }
    Ok(())
}

fn ipv6_is_usable_at_once_and_follows_no_router() -> Result<()> {
    let host = CniHost::new()?;
    let pod = host.pod()?;
    let call = host.call(&pod, "c1", "eth0.100");
    let ipam = host.host_local(
        &[("fd09::/64", "fd09::100")],
        &json!({"routes": [{"dst": "::/0", "gw": "fd09::1"}]}),
    );
    let config = macvlan(&host, json!({"ipam": ipam}));
    run(&call, "ADD", &config)?;
    let tentative = |scope: &str| -> Result<Vec<Value>> {
        let child = link(&pod, "eth0.100")?;
        let mut tentative = child["addr_info"].as_array().context("addresses")?.clone();
        tentative.retain(|a| a["scope"] == scope && a.get("tentative").is_some());
        Ok(tentative)
    };
    assert_eq!(tentative("global")?, [] as [Value; 0]);
    // The kernel makes this one itself, and says of it a moment later that it is no longer
    // tentative (`addrconf_dad_work()`); detection would take a second.
    let until = Instant::now() + Duration::from_millis(700);
    while !tentative("link")?.is_empty() && Instant::now() < until {
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(tentative("link")?, [] as [Value; 0]);
    assert!(pod.ip("-6 route")?.contains("default via fd09::1"));
    let read = |key: &str| -> Result<String> {
        let path = format!("/proc/sys/net/ipv6/conf/eth0.100/{key}");
        Ok(e2e::netns::run(pod.command("cat").arg(path))?
            .trim()
            .to_owned())
    };
    assert_eq!(read("accept_ra")?, "0");
    assert_eq!(read("keep_addr_on_down")?, "1");
    run(&call, "DEL", &config)?;
    Ok(())
}

fn link_local_addresses_only_where_they_serve() -> Result<()> {
    let host = CniHost::new()?;
    let v6 = [("10.9.0.0/24", "10.9.0.100"), ("fd09::/64", "fd09::100")];
    for (ranges, keys, expected) in [
        (&v6[..1], json!({}), false),
        (&v6[..1], json!({"linkLocal": true}), true),
        (&v6[..], json!({}), true),
        (&v6[..], json!({"linkLocal": false}), false),
    ] {
        let pod = host.pod()?;
        let call = host.call(&pod, "c1", "net1");
        let mut config = macvlan(&host, keys.clone());
        config["ipam"] = host.host_local(ranges, &json!({}));
        run(&call, "ADD", &config)?;
        let has = addresses(&link(&pod, "net1")?)
            .iter()
            .any(|a| a.starts_with("fe80"));
        assert_eq!(has, expected, "{keys} with {} ranges", ranges.len());
        run(&call, "DEL", &config)?;
    }
    Ok(())
}

fn every_field_of_a_route_is_honoured() -> Result<()> {
    let host = CniHost::new()?;
    let pod = host.pod()?;
    let answer = json!({
        "cniVersion": "1.1.0",
        "ips": [{"address": "10.9.0.7/32", "gateway": "10.9.0.1"}],
        "routes": [
            {"dst": "10.60.0.0/16", "mtu": 1300, "advmss": 1200, "priority": 77, "table": 1000},
            {"dst": "10.61.0.0/16", "scope": 253},
            {"dst": "10.62.0.0/16", "gw": "10.9.0.8"},
            {"dst": "10.62.0.0/16", "gw": "10.9.0.9"},
        ],
        "dns": {"nameservers": ["10.9.0.53"]},
    });
    super::cni_delegate::install(
        &host,
        "canned",
        &format!("[ $CNI_COMMAND = ADD ] && echo '{answer}'; true"),
    )?;
    let mut call = host.call(&pod, "c1", "net1");
    call.path = host.directory().as_os_str().to_owned();
    let config = macvlan(
        &host,
        json!({"ipam": {"type": "canned"}, "cniVersion": "1.1.0"}),
    );
    let result = run(&call, "ADD", &config)?;
    let mut answered = answer["routes"].clone();
    answered[0]["gw"] = "10.9.0.1".into();
    assert_eq!(result["routes"], answered, "with its next hop");
    assert_eq!(result["dns"], answer["dns"]);
    let routes = pod.ip("route show table all")?;
    for expected in [
        "10.60.0.0/16 via 10.9.0.1 dev net1 table 1000 proto static metric 77 onlink mtu 1300 advmss 1200",
        "10.61.0.0/16 dev net1 proto static scope link src 10.9.0.7",
        "10.62.0.0/16 via 10.9.0.8 dev net1 proto static src 10.9.0.7 onlink",
        "10.62.0.0/16 via 10.9.0.9 dev net1 proto static src 10.9.0.7 onlink",
    ] {
        assert!(
            routes.lines().any(|l| l.trim() == expected),
            "no {expected} in:\n{routes}"
        );
    }
    let mut again = config.clone();
    again["prevResult"] = result;
    run(&call, "CHECK", &again)?;
    run(&call, "DEL", &config)?;
    Ok(())
}

fn a_previous_result_keeps_its_numbers() -> Result<()> {
    let host = CniHost::new()?;
    let pod = host.pod()?;
    let call = host.call(&pod, "c1", "net1");
    let mut config = with_v4(&host);
    // Key case as libcni writes it.
    config["prevResult"] = json!({
        "CNIVersion": "1.0.0",
        "Interfaces": [{"Name": "br0"}, {"Name": "eth0", "Sandbox": pod.path()}],
        "IPs": [{"Address": "10.244.0.5/24", "Interface": 1}],
        "Routes": [{"Dst": "0.0.0.0/0"}],
    });
    let result = run(&call, "ADD", &config)?;
    let names: Vec<_> = (0..3)
        .map(|i| result["interfaces"][i]["name"].clone())
        .collect();
    assert_eq!(names, ["br0", "eth0", "net1"]);
    assert_eq!(result["ips"][0]["address"], "10.244.0.5/24");
    assert_eq!(result["ips"][0]["interface"], 1);
    assert_eq!(result["ips"][1]["interface"], 2);
    assert!(
        !pod.ip("route")?.contains("default"),
        "the previous plugin's route is its own"
    );
    let mut check = config.clone();
    check["prevResult"] = result;
    pod.ip("link add eth0 type veth peer name eth0p")?;
    run(&call, "CHECK", &check)?;
    run(&call, "DEL", &config)?;
    config["prevResult"]["IPs"][0]["Interface"] = 7.into();
    assert_eq!(refused(&call, "ADD", &config)?.0, 7);
    Ok(())
}

fn addresses_are_announced() -> Result<()> {
    let host = CniHost::new()?;
    let pod = host.pod()?;
    let ipam = host.host_local(
        &[("10.9.0.0/24", "10.9.0.100"), ("fd09::/64", "fd09::100")],
        &json!({}),
    );
    let config = macvlan(&host, json!({"ipam": ipam}));
    // The far side knows the addresses at another place.
    let wire = Netns::new("wire")?;
    host.netns
        .ip(&format!("link set peer0 netns {}", wire.name()))?;
    wire.ip("link set peer0 up")?;
    wire.ip("addr add 10.9.0.2/24 dev peer0")?;
    wire.ip("-6 addr add fd09::2/64 dev peer0 nodad")?;
    for address in ["10.9.0.100", "fd09::100"] {
        wire.ip(&format!(
            "neigh replace {address} lladdr 02:00:00:00:de:ad dev peer0 nud stale"
        ))?;
    }
    let started = std::time::Instant::now();
    while !host.netns.ip("link show nic0")?.contains("LOWER_UP") {
        anyhow::ensure!(started.elapsed().as_secs() < 10, "no carrier");
    }
    let call = host.call(&pod, "c1", "net1");
    let result = run(&call, "ADD", &config)?;
    let mac = result["interfaces"][0]["mac"]
        .as_str()
        .context("mac")?
        .to_owned();
    let started = std::time::Instant::now();
    loop {
        let known = wire.ip("neigh")?;
        if known.matches(mac.as_str()).count() >= 2 {
            break;
        }
        anyhow::ensure!(started.elapsed().as_secs() < 5, "still:\n{known}");
    }
    run(&call, "DEL", &config)?;
    Ok(())
}
