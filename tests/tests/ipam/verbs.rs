//! What each verb does, and what wrong input gets.

use crate::support::{Answer, Attachment, Place, feed, network, plugin, range};
use serde_json::{Value, json};
use std::process::Stdio;

fn c(name: &str) -> Attachment {
    Attachment::new(name)
}

#[test]
fn an_empty_range_gives_its_first_addresses_first() {
    let place = Place::new();
    let config = range("10.0.0.0/24");
    assert_eq!(place.add(&c("a"), &config).address(), "10.0.0.1/24");
    assert_eq!(place.add(&c("b"), &config).address(), "10.0.0.2/24");
    assert_eq!(place.held(), ["10.0.0.1", "10.0.0.2"]);
}

#[test]
fn the_same_container_and_interface_get_the_same_answer() {
    let place = Place::new();
    let config = network(
        "rdma-ipam",
        json!({"ipRanges": [{"range": "10.0.0.0/24"}, {"range": "fd99::/64"}]}),
    );
    let first = place.add(&c("a"), &config);
    assert_eq!(first.addresses(), ["10.0.0.1/24", "fd99::1/64"]);
    for _ in 0..3 {
        assert_eq!(place.add(&c("a"), &config).document, first.document);
    }
    assert_eq!(place.held().len(), 2);
    assert_eq!(
        place.add(&c("a").interface("net2"), &config).addresses()[0],
        "10.0.0.2/24"
    );
}

#[test]
fn del_frees_every_range_and_may_be_repeated() {
    let place = Place::new();
    let config = network(
        "rdma-ipam",
        json!({"ipRanges": [{"range": "10.0.0.0/24"}, {"range": "fd99::/64"}]}),
    );
    place.add(&c("a"), &config).addresses();
    place.add(&c("b"), &config).addresses();
    for _ in 0..2 {
        assert!(place.del(&c("a"), &config).ok());
        assert_eq!(place.held(), ["10.0.0.2", "fd99::2"]);
    }
    assert!(place.del(&c("nobody"), &config).ok());
}

#[test]
fn del_needs_neither_ranges_nor_namespace_nor_policy_in_order() {
    let place = Place::new();
    let config = range("10.0.0.0/24");
    place.add(&c("a"), &config).address();
    place.add(&c("b"), &config).address();
    let bare = json!({"cniVersion": "0.4.0", "name": "rail", "ipam": {"type": "rdma-ipam"}});
    assert!(place.del(&c("a"), &bare).ok());
    assert_eq!(place.held(), ["10.0.0.2"]);
    let broken = json!({"stateDir": place.state(), "typo": 1});
    std::fs::write(place.policy(), broken.to_string()).unwrap();
    let (code, text) = place.add(&c("x"), &config).error();
    assert!(code == 101 && text.contains("typo"), "{code} {text}");
    let mut gone = c("b");
    gone.netns = String::new();
    assert!(
        place
            .del(&gone, &json!({"cniVersion": "0.4.0", "name": "rail"}))
            .ok()
    );
    assert_eq!(place.held().len(), 0);
}

#[test]
fn del_of_a_store_that_never_was_is_done() {
    let place = Place::new();
    assert!(place.del(&c("a"), &range("10.0.0.0/24")).ok());
    assert!(!place.leases().exists(), "DEL made a directory");
    let elsewhere = network(
        "rdma-ipam",
        json!({"range": "10.0.0.0/24", "store": "nope"}),
    );
    assert!(place.del(&c("a"), &elsewhere).ok());
}

#[test]
fn every_version_gets_its_result() {
    let place = Place::new();
    for (number, version) in ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"]
        .iter()
        .enumerate()
    {
        let mut config = range("10.0.0.0/24");
        config["cniVersion"] = json!(version);
        config["ipam"]["gateway"] = json!("10.0.0.254");
        config["ipam"]["routes"] = json!([{"dst": "0.0.0.0/0"}]);
        config["ipam"]["dns"] = json!({"nameservers": ["10.0.0.53"]});
        let answer = place.add(&c(&format!("c{number}")), &config);
        assert!(answer.ok(), "{version}: {answer:?}");
        let result = &answer.document;
        assert_eq!(result["cniVersion"], *version);
        let address = format!("10.0.0.{}/24", number + 1);
        assert_eq!(result["ips"][0]["address"], address, "{version}");
        assert_eq!(result["ips"][0]["gateway"], "10.0.0.254", "{version}");
        assert_eq!(result["dns"]["nameservers"][0], "10.0.0.53");
        assert!(place.del(&c("none"), &config).ok());
    }
}

#[test]
fn version_is_answered_before_anything_else() {
    let mut command = plugin();
    command
        .env_clear()
        .env("CNI_COMMAND", "VERSION")
        .env("RDMA_NETDEV_POLICY", "/nonexistent/dir/policy.json")
        .stdin(Stdio::null());
    let answer = Answer::of(command.output().unwrap());
    assert!(answer.ok());
    assert_eq!(
        answer.document["supportedVersions"]
            .as_array()
            .unwrap()
            .len(),
        5
    );
}

#[test]
fn requests_are_heeded_in_their_order_and_tracked() {
    let place = Place::new();
    let plain = range("10.0.0.0/24");
    let mut runtime = plain.clone();
    runtime["runtimeConfig"] = json!({"ips": ["10.0.0.50"]});
    runtime["args"] = json!({"cni": {"ips": ["10.0.0.60/24"]}});
    let mut annotation = plain.clone();
    annotation["args"] = json!({"cni": {"ips": ["10.0.0.60/24"]}});
    assert_eq!(
        place.add(&c("a").args("IP=10.0.0.70"), &runtime).address(),
        "10.0.0.50/24"
    );
    assert_eq!(
        place
            .add(&c("b").args("IP=10.0.0.70"), &annotation)
            .address(),
        "10.0.0.60/24"
    );
    assert_eq!(
        place.add(&c("c").args("IP=10.0.0.70"), &plain).address(),
        "10.0.0.70/24"
    );
    assert_eq!(place.held(), ["10.0.0.50", "10.0.0.60", "10.0.0.70"]);
    // Again by the same, and by another.
    assert_eq!(place.add(&c("a"), &runtime).address(), "10.0.0.50/24");
    let (code, text) = place.add(&c("thief").pod("x/thief"), &runtime).error();
    assert!(
        code == 102 && text.contains("10.0.0.50") && text.contains("default/a"),
        "{code} {text}"
    );
    assert!(place.del(&c("a"), &plain).ok());
    assert_eq!(
        place.add(&c("heir"), &runtime).address(),
        "10.0.0.50/24",
        "a request does not wait"
    );
}

#[test]
fn requests_that_cannot_be_met_are_refused() {
    let place = Place::new();
    let mut config = range("10.0.0.0/24");
    config["ipam"]["gateway"] = json!("10.0.0.254");
    for (ip, part) in [
        ("10.9.0.5", "none of the ranges"),
        ("fd99::5", "none of the ranges"),
        ("10.0.0.0", "first or last"),
        ("10.0.0.255", "first or last"),
        ("10.0.0.254", "gateway"),
        ("10.0.0.5/16", "prefix length"),
        ("ten", "not an address"),
    ] {
        let mut config = config.clone();
        config["runtimeConfig"] = json!({"ips": [ip]});
        let (code, text) = place.add(&c("a"), &config).error();
        assert!(code == 7 && text.contains(part), "{ip}: {code} {text}");
    }
    let mut two = config.clone();
    two["runtimeConfig"] = json!({"ips": ["10.0.0.5", "10.0.0.6"]});
    assert_eq!(place.add(&c("a"), &two).error().0, 7, "two of one range");
    assert_eq!(place.held().len(), 0);
    assert_eq!(place.records().len(), 0);
}

#[test]
fn two_ranges_are_leased_both_or_not_at_all() {
    let place = Place::new();
    let one = json!([{"range": "10.0.0.0/24"}, {"range": "10.1.0.0/30"}, {"range": "10.1.0.0/30"}]);
    let config = network("rdma-ipam", json!({"ipRanges": one}));
    // The second range has two addresses: two for the first container, none for the next.
    assert_eq!(place.add(&c("a"), &config).addresses().len(), 3);
    let (code, text) = place.add(&c("b"), &config).error();
    assert!(code == 102 && text.contains("10.1.0.0/30"), "{code} {text}");
    assert_eq!(place.held(), ["10.0.0.1", "10.1.0.1", "10.1.0.2"]);
    assert_eq!(place.records().len(), 1, "one record for the order");
}

#[test]
fn addresses_are_unique_among_overlapping_ranges_of_a_network_name() {
    let place = Place::new();
    let ask = |who: &str, ipam: Value| place.add(&c(who), &network("rdma-ipam", ipam)).address();
    assert_eq!(ask("a", json!({"range": "10.0.0.0/24"})), "10.0.0.1/24");
    assert_eq!(ask("b", json!({"range": "10.0.0.0/28"})), "10.0.0.2/28");
    // Another network name is another world.
    assert_eq!(
        ask("c", json!({"range": "10.0.0.0/24", "network_name": "blue"})),
        "10.0.0.1/24"
    );
    // A range for itself sees no other network, and the others do not see it.
    let alone = json!({"range": "10.0.0.0/25", "enable_overlapping_ranges": false});
    assert_eq!(ask("d", alone.clone()), "10.0.0.1/25");
    assert_eq!(ask("e", alone), "10.0.0.2/25");
    assert_eq!(ask("f", json!({"range": "10.0.0.0/25"})), "10.0.0.3/25");
    let alone = json!({"range": "10.0.0.0/24", "enable_overlapping_ranges": false});
    assert_eq!(
        ask("g", alone),
        "10.0.0.1/24",
        "such a range is compared with no other network"
    );
}

#[test]
fn a_freed_address_rests_unless_nothing_else_is_free() {
    let place = Place::new();
    let config = range("10.0.0.0/29");
    for n in 1..=5 {
        place.add(&c(&format!("c{n}")), &config).address();
    }
    assert!(place.del(&c("c4"), &config).ok());
    // The file system's clock has ticks of some milliseconds.
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert!(place.del(&c("c2"), &config).ok());
    assert_eq!(place.add(&c("d1"), &config).address(), "10.0.0.6/29");
    assert_eq!(
        place.add(&c("d2"), &config).address(),
        "10.0.0.4/29",
        "it has rested longest"
    );
    assert_eq!(place.add(&c("d3"), &config).address(), "10.0.0.2/29");
    assert_eq!(place.add(&c("d4"), &config).error().0, 102);
    let place = Place::with(json!({"ipam": {"cooldown": "0"}}));
    place.add(&c("a"), &config).address();
    assert!(place.del(&c("a"), &config).ok());
    assert_eq!(place.add(&c("b"), &config).address(), "10.0.0.1/29");
}

#[test]
fn a_repeated_add_leaves_an_address_that_is_no_longer_given() {
    let place = Place::new();
    let with = |keys: Value| {
        let mut config = range("10.0.0.0/24");
        for (key, value) in keys.as_object().unwrap() {
            config["ipam"][key] = value.clone();
        }
        config
    };
    let mut before = String::new();
    for keys in [
        json!({}),
        json!({"exclude": ["10.0.0.1"]}),
        json!({"exclude": ["10.0.0.1"], "gateway": "10.0.0.2"}),
        json!({"range_start": "10.0.0.9"}),
        json!({"range_start": "10.0.0.9", "addresses": [{"address": "10.0.0.9/24"}]}),
    ] {
        let config = with(keys.clone());
        let addresses = place.add(&c("a"), &config).addresses();
        assert_ne!(addresses[0], before, "{keys}");
        assert_eq!(place.add(&c("a"), &config).addresses(), addresses, "{keys}");
        assert_eq!(place.held().len(), 1, "{keys}");
        before.clone_from(&addresses[0]);
    }
    assert!(place.del(&c("a"), &with(json!({}))).ok());
}

#[test]
fn a_fixed_address_and_a_next_hop_of_the_range_are_leased_to_nobody() {
    let place = Place::with(json!({"allow": {"requestExcluded": true}}));
    let mut config = range("10.0.0.0/29");
    config["ipam"]["addresses"] = json!([{"address": "10.0.0.2/29"}]);
    config["ipam"]["routes"] = json!([{"dst": "0.0.0.0/0", "gw": "10.0.0.1"}]);
    let leased: Vec<String> = ["a", "b", "c", "d"]
        .iter()
        .map(|name| place.add(&c(name), &config).addresses()[0].clone())
        .collect();
    assert_eq!(
        leased,
        ["10.0.0.3/29", "10.0.0.4/29", "10.0.0.5/29", "10.0.0.6/29"]
    );
    for wanted in ["10.0.0.1", "10.0.0.2"] {
        let asked = c("e").args(&format!("IP={wanted}"));
        assert_eq!(place.add(&asked, &config).error().0, 4, "{wanted}");
    }
    assert_eq!(place.add(&c("e"), &config).error().0, 102);
}

#[test]
fn gc_with_a_null_in_its_list_frees_nothing() {
    let place = Place::new();
    let config = range("10.0.0.0/29");
    place.add(&c("a"), &config).address();
    let mut gc = config.clone();
    for list in [
        json!([null]),
        json!([null, {"containerID": "b", "ifname": "net1"}]),
    ] {
        gc["cni.dev/valid-attachments"] = list;
        assert_eq!(place.call("GC", &c("x"), &gc).error().0, 7);
    }
    assert_eq!(place.add(&c("b"), &config).address(), "10.0.0.2/29");
}

#[test]
fn check_compares_leases_with_the_result() {
    let place = Place::new();
    let config = range("10.0.0.0/24");
    let result = place.add(&c("a"), &config).document;
    let mut with = config.clone();
    with["prevResult"] = result.clone();
    assert!(place.call("CHECK", &c("a"), &with).ok());
    assert_eq!(
        place.call("CHECK", &c("a"), &config).error().0,
        7,
        "no prevResult"
    );
    assert_eq!(place.call("CHECK", &c("b"), &with).error().0, 104);
    let mut other = with.clone();
    other["prevResult"]["ips"][0]["address"] = json!("10.0.0.9/24");
    assert_eq!(place.call("CHECK", &c("a"), &other).error().0, 104);
    assert!(place.del(&c("a"), &config).ok());
    assert_eq!(place.call("CHECK", &c("a"), &with).error().0, 104);
    with["cniVersion"] = json!("0.3.1");
    assert_eq!(place.call("CHECK", &c("a"), &with).error().0, 1);
}

#[test]
fn status_says_what_add_would() {
    let place = Place::new();
    let config = range("10.0.0.0/30");
    let status = |place: &Place, config: &Value| place.call("STATUS", &c("x"), config);
    assert!(status(&place, &config).ok());
    place.add(&c("a"), &config).address();
    place.add(&c("b"), &config).address();
    let (code, text) = status(&place, &config).error();
    assert!(code == 50 && text.contains("exhausted"), "{code} {text}");
    assert!(place.del(&c("a"), &config).ok());
    assert!(
        status(&place, &config).ok(),
        "a resting address is given when nothing else is free"
    );
    assert_eq!(status(&place, &range("10.0.0.0/99")).error().0, 50);
}

/// An ADD takes an address of each range, so one that is left is not enough for two of them.
#[test]
fn status_fails_where_two_ranges_have_one_address_left() {
    for [first, second] in [["10.1.0.0/30"; 2], ["10.1.0.0/30", "10.1.0.0-10.1.0.2/24"]] {
        let place = Place::new();
        let ranges = json!([{"range": first}, {"range": second}]);
        let config = network("rdma-ipam", json!({"ipRanges": ranges}));
        let status = || place.call("STATUS", &c("x"), &config);
        assert!(status().ok(), "both addresses are free");
        place.add(&c("a"), &range(first)).address();
        let (code, text) = status().error();
        assert!(code == 50 && text.contains("exhausted"), "{code} {text}");
        assert_eq!(place.add(&c("b"), &config).error().0, 102);
        assert!(place.del(&c("a"), &range(first)).ok());
        assert!(status().ok(), "one is free, one is cooling down");
        assert_eq!(place.add(&c("b"), &config).addresses().len(), 2);
    }
}

#[test]
fn gc_frees_what_is_not_listed_of_this_node_and_network() {
    let place = Place::new();
    let config = range("10.0.0.0/24");
    let mut other = config.clone();
    other["name"] = json!("other");
    for name in ["a", "b", "c"] {
        place.add(&c(name), &config).address();
    }
    place.add(&c("d"), &other).address();
    let mut gc = config.clone();
    assert!(
        place.call("GC", &c("x"), &gc).ok(),
        "no list, nothing freed"
    );
    assert_eq!(place.held().len(), 4);
    gc["cni.dev/valid-attachments"] = json!([{"containerID": "b", "ifname": "net1"}]);
    gc["cni.dev/attachments"] = json!([]);
    assert!(place.call("GC", &c("x"), &gc).ok());
    assert_eq!(place.held(), ["10.0.0.2", "10.0.0.4"]);
    gc["cniVersion"] = json!("1.0.0");
    assert_eq!(place.call("GC", &c("x"), &gc).error().0, 1);
}

#[test]
fn wrong_input_gets_its_code_and_changes_nothing() {
    let place = Place::new();
    let call = |verb: &str, stdin: &str| {
        let mut command = plugin();
        place.environment(&mut command, verb, &c("a"));
        Answer::of(feed(command, stdin.as_bytes())).error()
    };
    let with = |ipam: Value| network("rdma-ipam", ipam).to_string();
    for (stdin, code, part) in [
        (String::new(), 6, "empty"),
        ("{".into(), 6, "not JSON"),
        ("[]".into(), 6, "not a JSON object"),
        (r#"{"cniVersion":"9.9.9","name":"a"}"#.into(), 1, "9.9.9"),
        (
            r#"{"cniVersion":"1.0.0","ipam":{"type":"rdma-ipam"}}"#.into(),
            7,
            "name",
        ),
        (
            r#"{"cniVersion":"1.0.0","name":"a","ipam":{"type":"host-local"}}"#.into(),
            7,
            "another plugin",
        ),
        (
            r#"{"cniVersion":"1.0.0","name":"a"}"#.into(),
            7,
            "ipam.type",
        ),
        (with(json!({})), 7, "neither range"),
        (with(json!({"range": "10.0.0.0/33"})), 7, "10.0.0.0/33"),
        (
            with(json!({"range": "10.0.0.0/24", "excluded": []})),
            2,
            "exclude",
        ),
        (
            with(json!({"range": "10.0.0.0/24", "exclude": ["10.0.0.0/24"]})),
            7,
            "leave no address",
        ),
        (
            with(json!({"range": "10.0.0.0/24", "perNode": {"prefix": 31}})),
            7,
            "needs a store of several nodes",
        ),
        (
            with(json!({"range": "10.0.0.0/24", "store": "nope"})),
            101,
            "default",
        ),
        (
            with(json!({"range": "10.0.0.0/24", "store": "../../etc"})),
            101,
            "no store",
        ),
        (
            with(json!({"range": "10.0.0.0/24", "network_name": "../x"})),
            7,
            "network_name",
        ),
    ] {
        let (got, text) = call("ADD", &stdin);
        assert!(got == code && text.contains(part), "{stdin}: {got} {text}");
    }
    assert_eq!(call("FOO", "{}").0, 4);
    assert!(place.files("").is_empty(), "something was written");
}

#[test]
fn a_wrong_policy_stops_add_and_status() {
    let place = Place::new();
    let config = range("10.0.0.0/24");
    std::fs::write(place.policy(), "{").unwrap();
    for verb in ["ADD", "STATUS"] {
        let answer = place.call(verb, &c("a"), &config);
        assert!(matches!(answer.error().0, 101 | 50), "{answer:?}");
    }
    assert!(place.files("").is_empty());
}

#[test]
fn an_exhausted_range_is_named() {
    let place = Place::new();
    let config = range("10.0.0.0/30");
    place.add(&c("a"), &config).address();
    place.add(&c("b"), &config).address();
    let (code, text) = place.add(&c("c"), &config).error();
    assert!(
        code == 102 && text.contains("10.0.0.0/30") && text.contains("all 2 addresses"),
        "{text}"
    );
    assert_eq!(
        place.records().len(),
        2,
        "a record of the failed ADD is left"
    );
}

#[test]
fn whole_networks_of_ipv6_cost_nothing_and_work_to_their_end() {
    let place = Place::new();
    let ask = |who: &str, ipam: Value| place.add(&c(who), &network("rdma-ipam", ipam)).address();
    assert_eq!(ask("a", json!({"range": "fd00::/8"})), "fd00::1/8");
    let upper = json!({"range": "2001:db8::/64", "range_start": "2001:db8::8000:0:0:1"});
    assert_eq!(ask("b", upper.clone()), "2001:db8::8000:0:0:1/64");
    assert_eq!(ask("c", upper), "2001:db8::8000:0:0:2/64");
    let last = json!({"range": "2001:db8::/64", "range_start": "2001:db8::ffff:ffff:ffff:fffe"});
    assert_eq!(ask("d", last.clone()), "2001:db8::ffff:ffff:ffff:fffe/64");
    let answer = place.add(&c("e"), &network("rdma-ipam", last));
    assert_eq!(answer.error().0, 102);
    let hole = json!({"range": "::/0", "exclude": ["::/1"], "network_name": "all"});
    let hole = network("whereabouts", hole);
    assert_eq!(place.add(&c("f"), &hole).address(), "8000::/0");
}

#[test]
fn a_host_name_that_changes_does_not_lose_leases() {
    let place = Place::new();
    let config = range("10.0.0.0/24");
    let at = |name: &str, node: &str| c(name).node(node);
    place.add(&at("a", "localhost"), &config).address();
    place.add(&at("b", "gpu-7"), &config).address();
    assert_eq!(
        place.add(&at("a", "gpu-7"), &config).address(),
        "10.0.0.1/24"
    );
    assert!(place.del(&at("a", "gpu-7"), &config).ok());
    assert_eq!(place.held(), ["10.0.0.2"]);
}

#[test]
fn a_range_for_points_and_single_addresses_is_used_whole() {
    let place = Place::new();
    let ask = |who: &str, range_text: &str| place.add(&c(who), &range(range_text));
    assert_eq!(ask("a", "10.0.0.4/31").address(), "10.0.0.4/31");
    assert_eq!(ask("b", "10.0.0.4/31").address(), "10.0.0.5/31");
    assert_eq!(ask("c", "10.0.0.4/31").error().0, 102);
    assert_eq!(ask("d", "fd99::7/128").address(), "fd99::7/128");
    assert_eq!(ask("e", "fd99::7/128").error().0, 102);
}

#[test]
fn lowest_first_holds_over_many_shards() {
    let place = Place::with(json!({"ipam": {"cooldown": "0"}}));
    let config = range("10.0.0.0/22");
    for n in 0..600 {
        place.add(&c(&format!("c{n}")), &config).address();
    }
    for n in [3, 500, 260] {
        assert!(place.del(&c(&format!("c{n}")), &config).ok());
    }
    let next = |who: &str| place.add(&c(who), &config).address();
    assert_eq!(next("x"), "10.0.0.4/22");
    assert_eq!(next("y"), "10.0.1.5/22");
    assert_eq!(next("z"), "10.0.1.245/22");
    assert_eq!(next("w"), "10.0.2.89/22");
}

#[test]
fn a_requested_address_obeys_exclude_and_bounds_unless_the_policy_lifts_them() {
    let place = Place::new();
    let config = network(
        "rdma-ipam",
        json!({"range": "10.0.0.0/24", "range_start": "10.0.0.10", "range_end": "10.0.0.20",
               "exclude": ["10.0.0.12/32"]}),
    );
    let ask = |name: &str, ip: &str| place.add(&c(name).args(&format!("IP={ip}")), &config);
    for ip in ["10.0.0.12", "10.0.0.9", "10.0.0.21"] {
        let (code, text) = ask("a", ip).error();
        assert!(
            code == 4 && text.contains("allow.requestExcluded"),
            "{ip}: {code} {text}"
        );
    }
    assert_eq!(ask("a", "10.0.0.15").address(), "10.0.0.15/24");
    place.set_policy(json!({"allow": {"requestExcluded": true}}));
    assert_eq!(ask("b", "10.0.0.12").address(), "10.0.0.12/24");
    assert_eq!(ask("d", "10.0.0.21").address(), "10.0.0.21/24");
}
