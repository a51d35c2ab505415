//! The addresses of an order: one record for all of them.

use crate::admin::{age_all, freed, see_earlier};
use crate::support::{Attachment, Place, edit_lease, network, range};
use serde_json::{Value, json};
use std::os::unix::fs::MetadataExt;

fn c(name: &str) -> Attachment {
    Attachment::new(name)
}

/// Two addresses of one range, and one of another.
fn three() -> Value {
    let ranges = ["10.0.0.0/24", "fd99::/64", "10.0.0.0/24"].map(|range| json!({"range": range}));
    network("rdma-ipam", json!({"ipRanges": ranges}))
}

#[test]
fn an_order_has_one_record() {
    let place = Place::new();
    let given = place.add(&c("a"), &three()).addresses();
    assert_eq!(given, ["10.0.0.1/24", "fd99::1/64", "10.0.0.2/24"]);
    let records = place.records();
    assert_eq!(records.len(), 1, "{records:?}");
    let inode = |path: &std::path::PathBuf| std::fs::metadata(path).unwrap().ino();
    let mut leases = place.files("");
    leases.retain(|path| e2e::host_root::is_lease(path));
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

/// A pod whose ADD took three addresses, by what every command and verb says of them.
#[test]
fn an_order_is_listed_checked_collected_and_reclaimed_whole() {
    let place = Place::new();
    let result = place.add(&c("a"), &three()).document;
    place.add(&c("b"), &three()).addresses();
    let pools = place.admin(&["--json"]).document;
    let leases = pools["leases"].as_array().unwrap();
    let own = leases.iter().filter(|lease| lease["container"] == "a");
    assert_eq!(own.count(), 3);
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
    // Its namespace is gone: reclaimed after a second reading.
    edit_lease(&place, "b", json!({"netns": place.path().join("gone")}));
    age_all(&place, 120);
    place.reclaim(&[]);
    see_earlier(&place);
    let report = place.reclaim(&["--json"]).document;
    assert_eq!(freed(&report).len(), 3, "{report}");
    assert_eq!((place.held().len(), place.records().len()), (0, 0));
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
