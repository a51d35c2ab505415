//! NICs moved by `rdma-netdev`, and how they come back.
//!
//! A veth dies with its namespace, where hardware comes back to the host under the name it had
//! in the pod. `namespace_dies` does by hand what the kernel does for hardware; the lab does it
//! with a real NIC.

use anyhow::{Context, Result};
use e2e::case;
use e2e::cni::Call;
use e2e::cni_host::{CniHost, same};
use e2e::harness::Case;
use e2e::netns::Netns;
use hca_trees::{NetdevSpec, On, PciSpec, RdmaSpec, Tree};
use serde_json::{Value, json};

pub(crate) const CASES: &[Case] = &[
    case!(a_nic_goes_and_comes_back_as_it_was, Root, Netns),
    case!(its_addresses_and_routes_go_along, Root, Netns),
    case!(
        with_an_ipam_it_has_the_ipams_addresses,
        Root,
        Netns,
        ReferencePlugins
    ),
    case!(
        it_returns_when_the_namespace_is_gone_first,
        Root,
        Netns,
        ReferencePlugins
    ),
    case!(del_is_done_when_it_was_unplugged, Root, Netns),
    case!(a_late_del_leaves_the_next_pod_alone, Root, Netns),
    case!(a_nic_in_use_is_for_later, Root, Netns),
    case!(alternative_names_do_not_stand_in_the_way, Root, Netns),
    case!(found_by_every_name_it_has, Root, Netns),
    case!(nothing_to_move_is_refused, Root, Netns),
    case!(the_unit_names_the_netdev, Root, Netns, Macvlan),
    case!(mtu_and_mac_are_set_and_given_back, Root, Netns),
];

/// A host whose NIC has what NICs have: routes in two tables, a rule, a neighbour, MTU, names,
/// settings.
fn furnished() -> Result<CniHost> {
    let host = CniHost::new()?;
    for command in [
        "link set nic0 mtu 1450",
        "link set nic0 txqueuelen 777",
        "link set nic0 alias rail-zero",
        "link property add dev nic0 altname enp59s0np0",
        "addr add 10.9.1.1/24 dev nic0 valid_lft 9000 preferred_lft 8000",
        "addr add 10.9.2.1/32 dev nic0",
        "route add 10.77.0.0/16 via 10.9.0.254 metric 50 mtu 1400",
        "route add default via 10.9.0.254 table 101",
        "route add 10.78.0.0/16 dev nic0 scope link src 10.9.0.1",
        "-6 route add fd77::/32 via fd09::fe metric 60",
        "rule add from 10.9.0.1 lookup 101 pref 1000",
        "rule add iif nic0 lookup 101 pref 1001",
        "neigh add 10.9.0.254 lladdr 02:00:00:00:00:fe dev nic0 nud permanent",
    ] {
        host.netns.ip(command)?;
    }
    let mut sysctl = host.netns.command("sh");
    sysctl.args(["-c", "cd /proc/sys/net; echo 2 > ipv4/conf/nic0/rp_filter; echo 1 > ipv4/conf/nic0/arp_ignore; echo 0 > ipv6/conf/nic0/accept_ra"]);
    e2e::netns::run(&mut sysctl)?;
    Ok(host)
}

fn moved(host: &CniHost) -> Value {
    host.config(&json!({"attach": "move", "device": "nic0", "cniVersion": "1.1.0"}))
}

fn run(call: &Call, command: &str, config: &Value) -> Result<Value> {
    call.run(command, config.to_string().as_bytes())?.success()
}

fn refused(call: &Call, command: &str, config: &Value) -> Result<(u64, String)> {
    call.run(command, config.to_string().as_bytes())?.refusal()
}

/// The picture, without lifetimes, which run while a test does.
fn picture(host: &CniHost) -> Result<std::collections::BTreeMap<String, String>> {
    let mut picture = host.picture()?;
    for (key, value) in &mut picture {
        if key.starts_with("address nic0 10.9.1.1") {
            let left: Value = serde_json::from_str(value)?;
            let valid = left["valid_life_time"].as_u64().unwrap_or(0);
            assert!((8000..=9000).contains(&valid), "lifetime {valid}");
            *value = String::new();
        }
    }
    Ok(picture)
}

/// What the kernel does with hardware when its namespace ends: it comes back to the host, down,
/// without addresses, under the pod's name.
fn namespace_dies(host: &CniHost, pod: &Netns, ifname: &str) -> Result<()> {
    pod.ip(&format!("link set {ifname} netns {}", host.netns.name()))?;
    pod.delete()
}

fn a_nic_goes_and_comes_back_as_it_was() -> Result<()> {
    let host = furnished()?;
    let before = picture(&host)?;
    let pod = host.pod()?;
    let call = host.call(&pod, "c1", "net1");
    let result = run(&call, "ADD", &moved(&host))?;
    assert!(host.netns.ip("link show nic0").is_err(), "it left the host");
    let inside = &pod.ip_json("addr show dev net1")?[0];
    assert_eq!(inside["operstate"], "UP");
    assert_eq!(result["interfaces"][0]["mac"], inside["address"]);
    assert_eq!(result["interfaces"][0]["mtu"], 1450);
    assert_eq!(result["interfaces"][0]["name"], "net1");
    assert_eq!(run(&call, "DEL", &moved(&host))?, Value::Null);
    same(&before, &picture(&host)?, "after DEL")?;
    assert_eq!(
        run(&call, "DEL", &moved(&host))?,
        Value::Null,
        "a second DEL"
    );
    same(&before, &picture(&host)?, "after a second DEL")
}

fn its_addresses_and_routes_go_along() -> Result<()> {
    let host = furnished()?;
    let pod = host.pod()?;
    let call = host.call(&pod, "c1", "net1");
    let result = run(&call, "ADD", &moved(&host))?;
    let reported: Vec<_> = result["ips"]
        .as_array()
        .context("ips")?
        .iter()
        .map(|ip| ip["address"].clone())
        .collect();
    // Not the leased one, which nothing renews in the pod.
    assert_eq!(reported, ["10.9.0.1/24", "10.9.2.1/32", "fd09::1/64"]);
    let addresses = pod.ip("addr show net1")?;
    for address in ["10.9.0.1/24", "10.9.2.1/32", "fd09::1/64"] {
        assert!(addresses.contains(address), "no {address} in:\n{addresses}");
    }
    assert!(!addresses.contains("10.9.1.1"), "{addresses}");
    let routes = pod.ip("route show table all")? + &pod.ip("-6 route")?;
    for route in [
        "10.77.0.0/16 via 10.9.0.254 dev net1 metric 50 mtu 1400",
        "default via 10.9.0.254 dev net1 table 101",
        "10.78.0.0/16 dev net1 scope link src 10.9.0.1",
        "fd77::/32 via fd09::fe dev net1 metric 60",
    ] {
        assert!(
            routes.lines().any(|l| l.trim().starts_with(route)),
            "no {route} in:\n{routes}"
        );
    }
    let rules = pod.ip("rule")?;
    assert!(
        rules.contains("from 10.9.0.1 lookup 101") && rules.contains("iif net1 lookup 101"),
        "{rules}"
    );
    assert!(
        pod.ip("neigh")?
            .contains("10.9.0.254 dev net1 lladdr 02:00:00:00:00:fe PERMANENT")
    );
    let mut check = moved(&host);
    check["prevResult"] = result;
    run(&call, "CHECK", &check)?;
    run(&call, "DEL", &moved(&host))?;
    let rules = pod.ip("rule")?;
    assert!(
        !rules.contains("101"),
        "rules are left in the pod:\n{rules}"
    );
    Ok(())
}

fn with_an_ipam_it_has_the_ipams_addresses() -> Result<()> {
    let host = furnished()?;
    let before = picture(&host)?;
    let pod = host.pod()?;
    let call = host.call(&pod, "c1", "net1");
    let mut config = moved(&host);
    config["cniVersion"] = "1.0.0".into();
    config["ipam"] = host.host_local(&[("10.9.0.0/24", "10.9.0.100")], &json!({}));
    let result = run(&call, "ADD", &config)?;
    assert_eq!(result["ips"][0]["address"], "10.9.0.100/24");
    let addresses = pod.ip("-4 addr show net1")?;
    assert!(
        addresses.contains("10.9.0.100/24") && !addresses.contains("10.9.0.1/24"),
        "{addresses}"
    );
    run(&call, "DEL", &config)?;
    same(&before, &picture(&host)?, "after DEL")
}

fn it_returns_when_the_namespace_is_gone_first() -> Result<()> {
    let host = furnished()?;
    let before = picture(&host)?;
    let mut config = moved(&host);
    config["cniVersion"] = "1.0.0".into();
    config["ipam"] = host.host_local(&[("10.9.0.0/24", "10.9.0.100")], &json!({}));
    for netns in ["path", "empty", "file"] {
        let pod = host.pod()?;
        let mut call = host.call(&pod, "c1", "eth0");
        run(&call, "ADD", &config)?;
        namespace_dies(&host, &pod, "eth0")?;
        match netns {
            "empty" => call.netns = "".into(),
            "file" => std::fs::write(pod.path(), "")?,
            _ => {}
        }
        run(&call, "DEL", &config)?;
        if netns == "file" {
            std::fs::remove_file(pod.path())?;
        }
        same(&before, &picture(&host)?, netns)?;
    }
    Ok(())
}

fn del_is_done_when_it_was_unplugged() -> Result<()> {
    let host = furnished()?;
    let pod = host.pod()?;
    let call = host.call(&pod, "c1", "net1");
    run(&call, "ADD", &moved(&host))?;
    host.netns.ip("link del peer0")?;
    run(&call, "DEL", &moved(&host))?;
    assert!(host.left_behind().is_empty(), "{:?}", host.left_behind());
    Ok(())
}

fn a_late_del_leaves_the_next_pod_alone() -> Result<()> {
    let host = furnished()?;
    let before = picture(&host)?;
    let (first, second) = (host.pod()?, host.pod()?);
    let calls = [
        host.call(&first, "c1", "net1"),
        host.call(&second, "c2", "net1"),
    ];
    run(&calls[0], "ADD", &moved(&host))?;
    namespace_dies(&host, &first, "net1")?;
    // The second ADD returns it for the first, then takes it with its addresses.
    run(&calls[1], "ADD", &moved(&host))?;
    let held = second.ip("addr show net1")?;
    assert!(held.contains("10.9.0.1/24"), "{held}");
    run(&calls[0], "DEL", &moved(&host))?;
    assert!(
        second.ip("addr show net1")?.contains("10.9.0.1/24"),
        "the late DEL touched it"
    );
    run(&calls[1], "DEL", &moved(&host))?;
    same(&before, &picture(&host)?, "after both")
}

fn a_nic_in_use_is_for_later() -> Result<()> {
    let host = furnished()?;
    let (first, second) = (host.pod()?, host.pod()?);
    let mut call = host.call(&first, "c1", "net1");
    call.args = "IgnoreUnknown=1;K8S_POD_NAMESPACE=ml;K8S_POD_NAME=worker-0".into();
    run(&call, "ADD", &moved(&host))?;
    let (code, message) = refused(&host.call(&second, "c2", "net1"), "ADD", &moved(&host))?;
    assert_eq!(code, 11, "{message}");
    assert!(
        message.contains("nic0") && message.contains("ml/worker-0"),
        "{message}"
    );
    run(&host.call(&second, "c2", "net1"), "DEL", &moved(&host))?;
    assert!(first.ip("link show net1").is_ok());
    run(&call, "DEL", &moved(&host))?;
    run(&host.call(&second, "c2", "net1"), "ADD", &moved(&host))?;
    Ok(())
}

fn alternative_names_do_not_stand_in_the_way() -> Result<()> {
    let host = furnished()?;
    let before = picture(&host)?;
    let pod = host.pod()?;
    pod.ip("link add other type veth peer name enp59s0np0")?;
    let call = host.call(&pod, "c1", "net1");
    // By the alternative name, too.
    let mut config = moved(&host);
    config["device"] = "enp59s0np0".into();
    run(&call, "ADD", &config)?;
    run(&call, "DEL", &config)?;
    same(&before, &picture(&host)?, "after DEL")
}

/// A sysfs in which `nic0` is a ConnectX's port, with an RDMA device and a function beside it.
fn with_hardware(host: &CniHost) -> Result<Tree> {
    std::fs::create_dir(host.directory().join("root"))?;
    let tree = Tree::new(host.directory().join("root"));
    tree.pci(&PciSpec::MLX5);
    tree.netdev(&NetdevSpec {
        name: "nic0",
        on: On::Pci("0000:3b:00.0"),
        ..NetdevSpec::default()
    });
    tree.rdma(&RdmaSpec {
        name: "mlx5_0",
        on: On::Pci("0000:3b:00.0"),
        ..RdmaSpec::default()
    });
    let proc = host.directory().join("root/proc");
    std::fs::remove_dir_all(&proc)?;
    std::os::unix::fs::symlink("/proc", proc)?;
    Ok(tree)
}

fn found_by_every_name_it_has() -> Result<()> {
    let host = furnished()?;
    let before = picture(&host)?;
    let _tree = with_hardware(&host)?;
    let mac = host.netns.ip_json("link show nic0")?[0]["address"].clone();
    for keys in [
        json!({"attach": "move", "pciBusID": "0000:3B:00.0"}),
        json!({"attach": "move", "deviceID": "0000:3b:00.0", "pciBusID": "0000:3b:00.0"}),
        json!({"attach": "move", "runtimeConfig": {"deviceID": "0000:3b:00.0"}}),
        json!({"attach": "move", "rdmaDevice": "mlx5_0"}),
        json!({"attach": "move", "deviceID": "guid-b8599f0300000001"}),
    ] {
        let pod = host.pod()?;
        let call = host
            .call(&pod, "c1", "net1")
            .env("RDMA_HOST_ROOT", host.directory().join("root"));
        let config = host.config(&keys);
        run(&call, "ADD", &config).with_context(|| keys.to_string())?;
        assert!(pod.ip("link show net1").is_ok(), "{keys}");
        run(&call, "DEL", &config)?;
        same(&before, &picture(&host)?, &keys.to_string())?;
    }
    // By MAC address, in the real sysfs.
    let pod = host.pod()?;
    let call = host.call(&pod, "c1", "net1");
    let config = host.config(&json!({"attach": "move", "hwaddr": mac}));
    run(&call, "ADD", &config)?;
    run(&call, "DEL", &config)?;
    same(&before, &picture(&host)?, "hwaddr")
}

fn nothing_to_move_is_refused() -> Result<()> {
    let host = furnished()?;
    let _tree = with_hardware(&host)?;
    let pod = host.pod()?;
    let before = picture(&host)?;
    let call = host
        .call(&pod, "c1", "net1")
        .env("RDMA_HOST_ROOT", host.directory().join("root"));
    for (keys, word) in [
        (json!({"attach": "move"}), "no netdev is selected"),
        (json!({"attach": "move", "device": "nic9"}), "nic9"),
        (
            json!({"attach": "move", "pciBusID": "0000:99:00.0"}),
            "0000:99:00.0",
        ),
        (json!({"attach": "move", "rdmaDevice": "mlx5_9"}), "mlx5_9"),
        (
            json!({"attach": "move", "hwaddr": "02:99:99:99:99:99"}),
            "02:99:99:99:99:99",
        ),
        (
            json!({"attach": "move", "deviceID": "pool_3e71787e_1"}),
            "pool_3e71787e_1",
        ),
        (
            json!({"attach": "move", "pciBusID": "0000:3b:00.0", "port": 2}),
            "port 2",
        ),
    ] {
        let (code, message) = refused(&call, "ADD", &host.config(&keys))?;
        assert_eq!(code, 7, "{keys}: {message}");
        assert!(message.contains(word), "{keys}: {message}");
        run(&call, "DEL", &host.config(&keys))?;
    }
    same(&before, &picture(&host)?, "after refusals")
}

fn the_unit_names_the_netdev() -> Result<()> {
    let host = furnished()?;
    let _tree = with_hardware(&host)?;
    // With an RDMA device behind it the default policy allows the move.
    host.policy(&json!({"allow": {"virtual": true, "unallocated": true}}))?;
    for (keys, kind) in [
        (
            json!({"attach": "move", "deviceID": "0000:3b:00.0"}),
            "veth",
        ),
        (
            json!({"attach": "macvlan", "deviceID": "0000:3b:00.0_3e71787e_17"}),
            "macvlan",
        ),
        (
            json!({"attach": "macvlan", "deviceID": "pool_3e71787e_17", "master": "nic0"}),
            "macvlan",
        ),
        (
            json!({"attach": "macvlan", "deviceID": "0000:3b:00.0"}),
            "macvlan",
        ),
    ] {
        let pod = host.pod()?;
        let call = host
            .call(&pod, "c1", "net1")
            .env("RDMA_HOST_ROOT", host.directory().join("root"));
        let config = host.config(&keys);
        run(&call, "ADD", &config).with_context(|| keys.to_string())?;
        let link = &pod.ip_json("link show net1")?[0];
        assert_eq!(link["linkinfo"]["info_kind"], kind, "{keys}");
        run(&call, "DEL", &config)?;
    }
    let pod = host.pod()?;
    let call = host
        .call(&pod, "c1", "net1")
        .env("RDMA_HOST_ROOT", host.directory().join("root"));
    let (code, message) = refused(
        &call,
        "ADD",
        &host.config(&json!({"attach": "macvlan", "deviceID": "pool_3e71787e_17"})),
    )?;
    assert_eq!(code, 7);
    assert!(message.contains("pool_3e71787e_17"), "{message}");
    Ok(())
}

fn mtu_and_mac_are_set_and_given_back() -> Result<()> {
    let host = furnished()?;
    let before = picture(&host)?;
    let pod = host.pod()?;
    let call = host.call(&pod, "c1", "net1");
    let mut config = moved(&host);
    config["mtu"] = 9000.into();
    config["mac"] = "02:00:00:00:00:77".into();
    let result = run(&call, "ADD", &config)?;
    assert_eq!(result["interfaces"][0]["mtu"], 9000);
    assert_eq!(result["interfaces"][0]["mac"], "02:00:00:00:00:77");
    let link = &pod.ip_json("link show net1")?[0];
    assert_eq!(
        (&link["mtu"], &link["address"]),
        (&json!(9000), &json!("02:00:00:00:00:77"))
    );
    run(&call, "DEL", &config)?;
    same(&before, &picture(&host)?, "after DEL")
}
