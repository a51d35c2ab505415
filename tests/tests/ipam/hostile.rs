//! What a policy does not allow, and files that are not what they should be.

use crate::support::{Attachment, Place, range};
use serde_json::json;

fn c(name: &str) -> Attachment {
    Attachment::new(name)
}

/// Whatever has the name of a leased address keeps it taken, and fsck tells of it.
#[test]
fn a_file_in_the_place_of_a_lease_is_told_and_released_by_hand() {
    let place = Place::new();
    let config = range("10.0.0.0/24");
    place.add(&c("a"), &config).address();
    let subnet = place.leases().join("default+/10.0.0");
    std::fs::write(subnet.join("2"), "").unwrap();
    std::fs::create_dir(subnet.join("3")).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", subnet.join("4")).unwrap();
    std::fs::write(subnet.join("x"), "").unwrap();
    assert_eq!(place.add(&c("b"), &config).address(), "10.0.0.5/24");
    let report = place.admin(&["fsck", "--json"]);
    assert_eq!(report.status, Some(1), "{report:?}");
    assert_eq!(report.document["sound"], 2, "{report:?}");
    let text = report.document.to_string();
    for part in [
        "10.0.0.2 is leased by no record",
        "release 10.0.0.4",
        "unexpected file",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    for address in ["10.0.0.2", "10.0.0.4"] {
        assert!(place.admin(&["release", address, "--yes"]).ok());
    }
    assert!(place.del(&c("a"), &config).ok());
}

#[test]
fn a_record_that_cannot_be_read_is_an_error_for_its_attachment_alone() {
    let place = Place::new();
    let config = range("10.0.0.0/24");
    place.add(&c("a"), &config).address();
    let record = place.records().remove(0);
    for text in ["", "{", "\u{0}"] {
        std::fs::write(&record, text).unwrap();
        for answer in [place.add(&c("a"), &config), place.del(&c("a"), &config)] {
            let (code, text) = answer.error();
            assert!(code == 105 && text.contains("as a record"), "{code} {text}");
        }
    }
    assert_eq!(place.add(&c("b"), &config).address(), "10.0.0.2/24");
    assert!(place.admin(&["release", "10.0.0.1", "--yes"]).ok());
}

#[test]
fn a_directory_of_leases_that_others_can_write_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    let run = place.path().join("host/n1/run");
    std::fs::set_permissions(&run, PermissionsExt::from_mode(0o777)).unwrap();
    let (code, text) = place.add(&c("a"), &range("10.0.0.0/24")).error();
    assert!(
        code == 105 && text.contains("is writable for group or others"),
        "{code} {text}"
    );
}

/// Without the agent nothing says what this node owns of a shared directory.
#[test]
fn a_shared_store_leases_what_this_node_owns() {
    let place = Place::new();
    let config = range("10.0.0.0/24");
    name_store(&place, json!({"directory": place.path().join("store")}));
    let (code, text) = place.add(&c("a"), &config).error();
    assert!(code == 11 && text.contains("agent.sock"), "{code} {text}");
    assert_eq!(place.call("STATUS", &c("a"), &config).error().0, 50);
    let boot = node::identity::boot_id(std::path::Path::new("/proc"));
    let owned = json!({"format": 1, "store": "default", "node": "n1",
        "parts": {"10.0.0.64/31": {"id": "7", "boot": boot}}});
    std::fs::create_dir_all(place.state().join("owned")).unwrap();
    std::fs::write(place.state().join("owned/default"), owned.to_string()).unwrap();
    assert_eq!(place.add(&c("a"), &config).address(), "10.0.0.64/24");
    assert_eq!(place.add(&c("b"), &config).address(), "10.0.0.65/24");
    assert_eq!(place.add(&c("d"), &config).error().0, 11);
    let shown = place.admin(&["--json"]).document;
    assert_eq!(shown["parts"][0]["used"], 2, "{shown}");
    assert_eq!(shown["leasesOutside"], json!([]), "{shown}");
    assert!(place.admin(&["fsck"]).ok());
    // It was taken from the node.
    std::fs::remove_file(place.state().join("owned/default")).unwrap();
    let shown = place.admin(&["--json"]);
    assert_eq!(shown.status, Some(1), "{shown:?}");
    assert_eq!(shown.document["leasesOutside"].as_array().unwrap().len(), 2);
    assert_eq!(place.admin(&["fsck"]).status, Some(1));
    assert!(place.del(&c("a"), &config).ok(), "DEL needs nothing of it");
}

#[test]
fn an_address_of_this_node_is_leased_to_nobody() {
    let place = Place::new();
    // Profile strict refuses such a range as a whole.
    let config = crate::support::network("whereabouts", json!({"range": "127.0.0.0/29"}));
    assert_eq!(place.add(&c("a"), &config).error().0, 102);
    let (code, text) = place.add(&c("a").args("IP=127.0.0.1"), &config).error();
    assert!(
        code == 102 && text.contains("of this node"),
        "{code} {text}"
    );
    // whereabouts would lease ::1.
    let config = crate::support::network("whereabouts", json!({"range": "::/126"}));
    let added = place.add(&c("b"), &config);
    assert_eq!(added.address(), "::2/126");
    let noted = |line: &str| line.contains(" warn ") && line.ends_with("of this node: ::1");
    assert!(added.stderr.lines().any(noted), "{}", added.stderr);
}

/// Who writes a network takes the address of a router neither by a range nor by a request.
#[test]
fn the_address_of_a_gateway_or_next_hop_is_leased_to_nobody() {
    let place = Place::with(json!({"allow": {"requestExcluded": true}}));
    for kind in ["rdma-ipam", "whereabouts"] {
        for keys in [
            json!({"gateway": "10.0.0.1"}),
            json!({"routes": [{"dst": "0.0.0.0/0", "gw": "10.0.0.1"}]}),
        ] {
            let with = |range: &str| {
                let mut ipam = keys.clone();
                ipam["range"] = json!(range);
                crate::support::network(kind, ipam)
            };
            let (code, text) = place.add(&c("a"), &with("10.0.0.1/32")).error();
            assert!(
                code == 7 && text.contains("10.0.0.1"),
                "{kind} {keys}: {code} {text}"
            );
            let asked = place.add(&c("a").args("IP=10.0.0.1"), &with("10.0.0.0/24"));
            let (code, text) = asked.error();
            assert!(
                code == 4 && text.contains("gateway"),
                "{kind} {keys}: {code} {text}"
            );
        }
    }
    assert_eq!(place.held().len(), 0);
}

#[test]
fn what_tenants_invent_leaves_no_files() {
    let place = Place::with(json!({"ipam": {"cooldown": "0"}}));
    let names = || -> Vec<String> {
        let entries = std::fs::read_dir(place.leases()).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    let network = |number: usize, range: &str| {
        let mut config = crate::support::network(
            "whereabouts",
            json!({"range": range, "network_name": format!("invented-{number}"),
                "enable_overlapping_ranges": number.is_multiple_of(2)}),
        );
        config["name"] = json!(format!("network-{number}"));
        config
    };
    // No address of it can be leased.
    assert_eq!(
        place.add(&c("a"), &network(0, "127.0.0.0/29")).error().0,
        102
    );
    assert_eq!(names(), ["lock"]);
    for number in 0..8 {
        let config = network(number, &format!("10.{number}.0.0/22"));
        place.add(&c("a"), &config).address();
        assert!(place.del(&c("a"), &config).ok());
    }
    assert!(place.reclaim(&[]).ok());
    assert_eq!(names(), ["lock", "records"]);
    assert_eq!(place.records().len(), 0);
}

/// A call was killed between the addresses of its record.
#[test]
fn fsck_says_what_a_record_does_not_hold_and_changes_nothing() {
    let place = Place::new();
    let config = range("10.0.0.0/24");
    place.add(&c("a"), &config).address();
    std::fs::remove_file(place.leases().join("default+/10.0.0/1")).unwrap();
    let files = place.files("");
    let report = place.admin(&["fsck"]);
    assert_eq!(report.status, Some(1), "{report:?}");
    let text = format!("{}{}", report.document, report.stderr);
    for part in ["10.0.0.1, which it does not hold", "DEL or reclaim"] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    assert_eq!(place.files(""), files);
    assert!(place.del(&c("a"), &config).ok());
    assert!(place.admin(&["fsck"]).ok());
}

/// The store of the place's policy, with more keys.
fn name_store(place: &Place, more: serde_json::Value) {
    let mut store = json!({"type": "file"});
    store
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    let policy = json!({"stateDir": place.state(), "stores": {"default": store}});
    std::fs::write(place.policy(), policy.to_string()).unwrap();
}

#[test]
fn a_network_name_that_no_record_could_hold_is_refused() {
    let place = Place::new();
    let mut config = range("10.0.0.0/24");
    config["name"] = json!("x".repeat(70_000));
    for _ in 0..2 {
        let (code, text) = place.add(&c("a"), &config).error();
        assert!(code == 7 && text.contains("too long"), "{code} {text}");
    }
    assert_eq!((place.held().len(), place.records().len()), (0, 0));
}

#[test]
fn a_store_is_for_the_ranges_and_network_names_of_the_policy() {
    let place = Place::new();
    name_store(
        &place,
        json!({"ranges": ["10.0.0.0/16", "fd99::/48"], "networkNames": ["", "blue"]}),
    );
    let ask = |container: &str, ipam: serde_json::Value| {
        place.add(&c(container), &crate::support::network("rdma-ipam", ipam))
    };
    for ipam in [
        json!({"range": "10.1.0.0/24"}),
        json!({"range": "10.0.0.0/15"}),
        json!({"range": "fd01::/64"}),
        json!({"range": "10.0.0.0/24", "network_name": "red"}),
        json!({"ipRanges": [{"range": "10.0.0.0/24"}, {"range": "192.168.0.0/24"}]}),
        // It would lease what a pod of another range has.
        json!({"range": "10.0.0.0/25", "enable_overlapping_ranges": false}),
        json!({"range": "10.0.0.0/24", "addresses": [{"address": "172.16.0.1/12"}]}),
    ] {
        let (code, text) = ask("a", ipam.clone()).error();
        assert!(
            code == 101 && text.contains("does not allow"),
            "{ipam}: {code} {text}"
        );
    }
    assert_eq!(place.held().len(), 0);
    ask("a", json!({"range": "10.0.7.0/24", "network_name": "blue"})).address();
    ask("b", json!({"range": "fd99::/64"})).address();
}
