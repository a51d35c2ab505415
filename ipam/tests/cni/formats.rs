//! Stores of both formats, and the way from one to the other.

use crate::admin::{age_all, freed, see_earlier};
use crate::support::{Attachment, Place, edit_lease, network, range};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;

fn c(name: &str) -> Attachment {
    Attachment::new(name)
}

/// Two addresses of one range, and one of another.
fn three() -> Value {
    let ranges = ["10.0.0.0/24", "fd00::/64", "10.0.0.0/24"].map(|range| json!({"range": range}));
    network("rdma-ipam", json!({"ipRanges": ranges}))
}

fn keys(place: &Place) -> Vec<BTreeSet<String>> {
    let records = place.records();
    let keys = |record: &std::path::PathBuf| -> BTreeSet<String> {
        let text: Value = serde_json::from_slice(&std::fs::read(record).unwrap()).unwrap();
        text.as_object().unwrap().keys().cloned().collect()
    };
    records.iter().map(keys).collect()
}

#[test]
fn a_new_store_has_one_file_for_an_order() {
    let place = Place::new();
    let given = place.add(&c("a"), &three()).addresses();
    assert_eq!(given, ["10.0.0.1/24", "fd00::1/64", "10.0.0.2/24"]);
    assert_eq!(place.version(), 2);
    let records = place.records();
    assert_eq!(records.len(), 1, "{records:?}");
    let inode = |path: &std::path::PathBuf| std::fs::metadata(path).unwrap().ino();
    let leases = place.files("leases");
    assert_eq!(leases.len(), 3);
    assert!(
        leases
            .iter()
            .all(|lease| inode(lease) == inode(&records[0]))
    );
    assert_eq!(place.add(&c("a"), &three()).addresses(), given, "again");
    assert!(place.del(&c("a"), &three()).ok());
    assert_eq!((place.held().len(), place.records().len()), (0, 0));
}

/// Programs that know no other format read it: nothing in it is theirs to refuse.
#[test]
fn a_store_of_format_1_stays_one() {
    let place = Place::new();
    place.make_store_of_format_1();
    let given = place.add(&c("a"), &three()).addresses();
    assert_eq!(place.add(&c("a"), &three()).addresses(), given, "again");
    assert_eq!((place.version(), place.records().len()), (1, 3));
    for keys in keys(&place) {
        let single: Vec<&str> = keys.iter().map(String::as_str).collect();
        assert!(single.contains(&"address") && single.contains(&"generation"));
        assert!(
            !single.contains(&"leases") && !single.contains(&"part"),
            "{single:?}"
        );
    }
    assert!(place.del(&c("a"), &three()).ok());
    assert_eq!((place.held().len(), place.records().len()), (0, 0));
}

#[test]
fn upgrade_asks_first_and_keeps_what_pods_have() {
    let place = Place::new();
    assert_eq!(
        place.admin(&["upgrade", "--yes"]).status,
        Some(3),
        "never used"
    );
    place.make_store_of_format_1();
    let given = place.add(&c("a"), &three()).addresses();
    let asked = place.admin(&["upgrade"]);
    assert_eq!((asked.status, place.version()), (Some(1), 1));
    assert!(
        asked.stderr.contains("from format 1 to 2") && asked.stderr.contains("--yes"),
        "{}",
        asked.stderr
    );
    let raised = place.admin(&["upgrade", "--yes", "--json"]);
    assert_eq!(
        (&raised.document["from"], &raised.document["to"]),
        (&json!(1), &json!(2))
    );
    assert_eq!(place.version(), 2);
    // Its identity is the same, so no node has to adopt it.
    assert_eq!(raised.document["id"], "0123456789abcdef");
    let again = place.admin(&["upgrade"]);
    let text = again.document.as_str().unwrap_or_default();
    assert!(
        again.ok() && text.contains("already has format 2"),
        "{again:?}"
    );
    let pools = place.admin(&["pools", "--json"]).document;
    assert_eq!(pools["store"]["format"], 2);
    assert_eq!(
        place.add(&c("a"), &three()).addresses(),
        given,
        "another answer"
    );
    assert_eq!(place.add(&c("b"), &three()).addresses().len(), 3);
    assert_eq!(place.records().len(), 4);
    let checkup = place.admin(&["fsck", "--min-age", "0", "--json"]).document;
    assert_eq!(
        (&checkup["sound"], &checkup["findings"]),
        (&json!(6), &json!([]))
    );
    for name in ["a", "b"] {
        assert!(place.del(&c(name), &three()).ok());
    }
    assert_eq!((place.held().len(), place.records().len()), (0, 0));
}

/// A pod whose ADD took three addresses, by what every command and verb says of them.
#[test]
fn an_order_is_listed_checked_collected_and_reclaimed_whole() {
    let place = Place::new();
    let result = place.add(&c("a"), &three()).document;
    place.add(&c("b"), &three()).addresses();
    let listed = place
        .admin(&["list", "--pod", "default/a", "--json"])
        .document;
    assert_eq!(listed["leases"].as_array().unwrap().len(), 3);
    let shown = place.admin(&["show", "fd00::1", "--json"]).document;
    assert_eq!(shown["found"][0]["lease"]["container"], "a");
    let pools = place.admin(&["pools", "--json"]).document;
    let used = |n: usize| pools["pools"][n]["used"].as_u64().unwrap();
    assert_eq!(used(0) + used(1), 6, "{pools}");
    let mut check = three();
    check["prevResult"] = result;
    assert!(place.call("CHECK", &c("a"), &check).ok());
    let mut gc = three();
    gc["cni.dev/valid-attachments"] = json!([{"containerID": "b", "ifname": "net1"}]);
    assert!(place.call("GC", &c("a"), &gc).ok());
    assert!(!place.call("CHECK", &c("a"), &check).ok());
    assert_eq!((place.held().len(), place.records().len()), (3, 1));
    // Of another boot: reclaimed after a second reading.
    edit_lease(&place, "b", json!({"boot": "an-earlier-one"}));
    age_all(&place, 120);
    place.admin(&["reclaim", "--yes"]);
    see_earlier(&place);
    let report = place.admin(&["reclaim", "--yes", "--json"]).document;
    assert_eq!(freed(&report).len(), 3, "{report}");
    assert_eq!((place.held().len(), place.records().len()), (0, 0));
}

#[test]
fn the_next_sandbox_of_a_pod_gets_the_addresses_of_an_order() {
    let place = Place::new();
    let config = three();
    let sandbox = |name: &str| c(name).pod("default/pod");
    place.add(&c("other"), &config).addresses();
    let given = place.add(&sandbox("first"), &config).addresses();
    assert_eq!(place.add(&sandbox("second"), &config).addresses(), given);
    assert_eq!((place.held().len(), place.records().len()), (6, 2));
    assert!(place.del(&sandbox("first"), &config).ok());
    assert_eq!(place.add(&sandbox("second"), &config).addresses(), given);
}

#[test]
fn an_order_for_a_held_address_is_answered_with_its_holder() {
    let place = Place::new();
    let mut config = three();
    config["runtimeConfig"] = json!({"ips": ["10.0.0.7/24"]});
    let given = place.add(&c("a"), &config).addresses();
    assert!(given.contains(&"10.0.0.7/24".to_owned()), "{given:?}");
    let (code, text) = place.add(&c("b"), &config).error();
    assert!(
        code == 102 && text.contains("10.0.0.7 is held by pod default/a"),
        "{text}"
    );
    assert_eq!((place.held().len(), place.records().len()), (3, 1));
    let full = range("10.9.0.0/30");
    for name in ["x", "y"] {
        place.add(&c(name), &full).address();
    }
    let ranges = ["10.0.0.0/24", "10.9.0.0/30"].map(|range| json!({"range": range}));
    let config = network("rdma-ipam", json!({"ipRanges": ranges}));
    assert_eq!(place.add(&c("z"), &config).error().0, 102);
    assert_eq!(
        place.records().len(),
        3,
        "an order that cannot be served writes nothing"
    );
}
