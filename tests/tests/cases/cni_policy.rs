//! What a node's policy keeps from configurations that a namespace's user may write.

use anyhow::Result;
use e2e::case;
use e2e::cni_host::{CniHost, same};
use e2e::harness::Case;
use serde_json::{Value, json};

pub(crate) const CASES: &[Case] = &[
    case!(
        only_rdma_netdevs_unless_the_policy_says,
        Root,
        Netns,
        Macvlan
    ),
    case!(the_nodes_own_link_is_never_given, Root, Netns, Macvlan),
    case!(
        what_stands_below_a_port_of_the_nodes_bridge_is_not_given,
        Root,
        Netns,
        Macvlan
    ),
    case!(
        what_stands_below_an_address_of_the_node_is_not_given,
        Root,
        Netns,
        Macvlan
    ),
    case!(ports_of_a_bridge_are_refused, Root, Netns),
    case!(selectors_narrow_the_choice, Root, Netns, Macvlan),
    case!(
        an_unwritable_state_directory_changes_nothing,
        Root,
        Netns,
        Macvlan,
        ReferencePlugins
    ),
    case!(a_missing_master_is_named, Root, Netns),
];

/// The answers to a macvlan on `nic0` and to moving it.
fn ask(host: &CniHost) -> Result<[Result<Value, (u64, String)>; 2]> {
    let pod = host.pod()?;
    let call = host.call(&pod, "c1", "net1");
    let mut answers = Vec::new();
    for keys in [
        json!({"attach": "macvlan", "master": "nic0"}),
        json!({"attach": "move", "device": "nic0"}),
    ] {
        let config = host.config(&keys).to_string();
        let answer = call.run("ADD", config.as_bytes())?;
        answers.push(match answer.status.success() {
            true => Ok(answer.success()?),
            false => Err(answer.refusal()?),
        });
        call.run("DEL", config.as_bytes())?.success()?;
    }
    Ok(answers.try_into().expect("two answers"))
}

fn all_refused(host: &CniHost, word: &str) -> Result<()> {
    let before = host.picture()?;
    for answer in ask(host)? {
        let (code, message) = answer.expect_err("refused");
        assert_eq!(code, 101, "{message}");
        assert!(
            message.contains("nic0") && message.contains(word),
            "{message}"
        );
    }
    same(&before, &host.picture()?, "after refusals")
}

fn all_given(host: &CniHost) -> Result<()> {
    let before = host.picture()?;
    for answer in ask(host)? {
        if let Err((code, message)) = answer {
            panic!("refused with {code}: {message}");
        }
    }
    same(&before, &host.picture()?, "after ADD and DEL")
}

fn only_rdma_netdevs_unless_the_policy_says() -> Result<()> {
    let host = CniHost::new()?;
    host.policy(&json!({"allow": {"virtual": true, "unallocated": true}}))?;
    all_refused(&host, "RDMA")?;
    host.policy(&json!({"allow": {"nonRdma": true, "virtual": true, "unallocated": true}}))?;
    all_given(&host)
}

fn the_nodes_own_link_is_never_given() -> Result<()> {
    let host = CniHost::new()?;
    // Another table's default route is a rail's policy routing, and an address alone its subnet.
    host.netns
        .ip("route add default via 10.9.0.254 table 101")?;
    all_given(&host)?;
    host.netns
        .ip("route add default via 10.9.0.254 metric 4000")?;
    all_refused(&host, "default route")?;
    host.policy(
        &json!({"allow": {"nonRdma": true, "uplinks": true, "virtual": true, "unallocated": true}}),
    )?;
    all_given(&host)?;
    host.policy(&json!({}))?;
    host.netns.ip("route del default")?;
    host.netns.ip("-6 route add default via fd09::fe")?;
    all_refused(&host, "default route")?;
    host.netns.ip("-6 route del default")?;
    // The default route is elsewhere, but the node speaks with this link's address.
    host.add_nic("nic1", "peer1")?;
    host.netns.ip("addr add 10.8.0.1/24 dev nic1")?;
    host.netns
        .ip("route add default via 10.8.0.254 src 10.9.0.1")?;
    all_refused(&host, "10.9.0.1")?;
    host.netns.ip("route del default")?;
    all_given(&host)?;
    // The cluster knows the node by it.
    std::fs::write(
        host.state().join("node-addresses"),
        "192.168.0.1\n10.9.0.1\n",
    )?;
    all_refused(&host, "10.9.0.1")
}

/// Over any number of steps: the node's bridge, its port, the NIC below that.
fn what_stands_below_a_port_of_the_nodes_bridge_is_not_given() -> Result<()> {
    let host = CniHost::new()?;
    for words in [
        "link add up0 link nic0 type macvlan mode passthru",
        "link add br0 type bridge",
        "link set up0 master br0",
        "link set up0 up",
        "link set br0 up",
        "addr add 10.7.0.1/24 dev br0",
        "route add default via 10.7.0.254",
    ] {
        host.netns.ip(words)?;
    }
    all_refused(&host, "up0")
}

/// The default route is elsewhere, and what is on top of the NIC has an address of the node.
fn what_stands_below_an_address_of_the_node_is_not_given() -> Result<()> {
    let host = CniHost::new()?;
    for words in [
        "link add up0 link nic0 type macvlan mode bridge",
        "link set up0 up",
        "addr add 10.7.0.1/24 dev up0",
    ] {
        host.netns.ip(words)?;
    }
    std::fs::create_dir_all(host.state())?;
    std::fs::write(host.state().join("node-addresses"), "10.7.0.1\n")?;
    all_refused(&host, "up0")
}

fn ports_of_a_bridge_are_refused() -> Result<()> {
    let host = CniHost::new()?;
    host.policy(
        &json!({"allow": {"nonRdma": true, "uplinks": true, "virtual": true, "unallocated": true}}),
    )?;
    host.netns.ip("link add br0 type bridge")?;
    host.netns.ip("link set nic0 master br0")?;
    all_refused(&host, "br0")
}

fn selectors_narrow_the_choice() -> Result<()> {
    let host = CniHost::new()?;
    let select = |names: &str| {
        host.policy(&json!({"allow": {"nonRdma": true, "virtual": true, "unallocated": true, "netdevs": [{"ifNames": [names]}]}}))
    };
    select("nic*")?;
    all_given(&host)?;
    select("ens*")?;
    all_refused(&host, "selectors")
}

fn an_unwritable_state_directory_changes_nothing() -> Result<()> {
    let host = CniHost::new()?;
    let before = host.picture()?;
    // A directory below a file cannot be made, not even by root.
    host.policy(&json!({"stateDir": host.directory().join("policy.json/state")}))?;
    let ipam = host.host_local(&[("10.9.0.0/24", "10.9.0.100")], &json!({}));
    for keys in [
        json!({"attach": "macvlan", "master": "nic0", "ipam": ipam}),
        json!({"attach": "move", "device": "nic0", "ipam": ipam}),
    ] {
        let pod = host.pod()?;
        let call = host.call(&pod, "c1", "net1");
        let config = host.config(&keys).to_string();
        let (code, message) = call.run("ADD", config.as_bytes())?.refusal()?;
        assert_eq!(code, 105, "{message}");
        assert!(message.contains("policy.json/state"), "{message}");
        assert!(pod.ip("link show net1").is_err());
        same(&before, &host.picture()?, "after the refusal")?;
    }
    Ok(())
}

fn a_missing_master_is_named() -> Result<()> {
    let host = CniHost::new()?;
    let pod = host.pod()?;
    let call = host.call(&pod, "c1", "net1");
    for (keys, word) in [
        (json!({"attach": "macvlan", "master": "nic9"}), "nic9"),
        (json!({"attach": "macvlan"}), "master"),
        (json!({"attach": "macvlan", "master": "../nic0"}), "../nic0"),
    ] {
        let (code, message) = call
            .run("ADD", host.config(&keys).to_string().as_bytes())?
            .refusal()?;
        assert_eq!(code, 7, "{keys}: {message}");
        assert!(
            message.contains(word) || word == "master",
            "{keys}: {message}"
        );
    }
    let (code, message) = call
        .run(
            "ADD",
            host.config(&json!({"attach": "macvlan", "master": "lo"}))
                .to_string()
                .as_bytes(),
        )?
        .refusal()?;
    assert_eq!(code, 101, "{message}");
    Ok(())
}
