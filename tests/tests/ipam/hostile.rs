//! What others may have put into a shared store, and stores that are not what
//! they should be.

use crate::support::{Attachment, Place, range};
use serde_json::json;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

fn c(name: &str) -> Attachment {
    Attachment::new(name)
}

fn mkfifo(path: &Path) {
    assert!(
        std::process::Command::new("mkfifo")
            .arg(path)
            .status()
            .unwrap()
            .success()
    );
}

/// A store with one lease, and its shard.
fn used() -> (Place, std::path::PathBuf) {
    let place = Place::new();
    assert_eq!(
        place.add(&c("a"), &range("10.0.0.0/24")).address(),
        "10.0.0.1/24"
    );
    let shard = place.store().join("leases/default/10.0.0.0-24");
    (place, shard)
}

#[test]
fn no_entry_at_a_lease_name_is_taken_for_free() {
    let (place, shard) = used();
    let target = place.path().join("target");
    std::fs::write(&target, "untouched").unwrap();
    symlink(&target, shard.join("10.0.0.2@1")).unwrap();
    std::fs::create_dir(shard.join("10.0.0.3@1")).unwrap();
    mkfifo(&shard.join("10.0.0.4@1"));
    std::fs::write(shard.join("10.0.0.5@1"), "").unwrap();
    std::fs::write(shard.join("10.0.0.6@1"), "{\"address\": \"10.0.").unwrap();
    std::fs::write(shard.join("10.0.0.7@1"), b"\xff\xfe\x00").unwrap();
    std::fs::write(shard.join("10.0.0.8@1"), "x").unwrap();
    std::os::unix::fs::chown(shard.join("10.0.0.8@1"), Some(65534), None).unwrap();
    std::fs::write(shard.join("10.0.0.9@18446744073709551615"), "").unwrap();
    std::fs::write(shard.join("10.0.0.10~18446744073709551615.5"), "").unwrap();
    assert_eq!(
        place.add(&c("b"), &range("10.0.0.0/24")).address(),
        "10.0.0.11/24"
    );
    assert_eq!(std::fs::read_to_string(&target).unwrap(), "untouched");

    let report = place.admin(&["fsck", "--json"]);
    assert_eq!(report.status, Some(1));
    let text = report.document.to_string();
    for name in [
        "10.0.0.2@1",
        "10.0.0.3@1",
        "10.0.0.4@1",
        "10.0.0.5@1",
        "10.0.0.6@1",
        "10.0.0.7@1",
        "10.0.0.8@1",
    ] {
        assert!(text.contains(name), "{name} is not reported: {text}");
    }
    assert_eq!(report.document["sound"], 2);
    // A lease of a node whose root the file server takes for another user.
    let squashed = shard.join("10.0.0.12@1");
    std::fs::copy(shard.join("10.0.0.1@1"), &squashed).unwrap();
    std::os::unix::fs::chown(&squashed, Some(65534), None).unwrap();
    // What is not a record is put aside; what might be a lease stays taken.
    let report = place.admin(&["fsck", "--repair"]).document.to_string();
    assert!(report.contains("no_root_squash"), "{report}");
    assert!(squashed.exists() && shard.join("10.0.0.8@1").exists());
    place.admin(&["fsck", "--repair", "--min-age", "0"]);
    assert!(squashed.exists(), "an address was lost");
    assert_eq!(
        place.add(&c("d"), &range("10.0.0.0/24")).address(),
        "10.0.0.2/24"
    );
    assert_eq!(
        place.add(&c("e"), &range("10.0.0.0/24")).address(),
        "10.0.0.3/24"
    );
    assert_eq!(
        place.add(&c("f"), &range("10.0.0.0/24")).address(),
        "10.0.0.4/24"
    );
    assert_eq!(
        place.add(&c("g"), &range("10.0.0.0/24")).address(),
        "10.0.0.8/24"
    );
    assert_eq!(std::fs::read_to_string(&target).unwrap(), "untouched");
    assert!(place.admin(&["release", "10.0.0.5", "--yes"]).ok());
    assert!(!place.held().contains(&"10.0.0.5".to_owned()));
}

#[test]
fn a_link_in_place_of_a_shard_is_not_followed() {
    let (place, shard) = used();
    let elsewhere = place.path().join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    std::fs::rename(&shard, place.path().join("kept")).unwrap();
    symlink(&elsewhere, &shard).unwrap();
    // The rest of the range is given out.
    assert_eq!(
        place.add(&c("b"), &range("10.0.0.0/23")).address(),
        "10.0.1.0/23"
    );
    assert_eq!(place.add(&c("d"), &range("10.0.0.0/24")).error().0, 102);
    assert_eq!(
        std::fs::read_dir(&elsewhere).unwrap().count(),
        0,
        "something was written there"
    );
    assert!(
        place
            .admin(&["fsck"])
            .document
            .to_string()
            .contains("10.0.0.0-24")
    );
}

#[test]
fn a_strange_record_of_an_owner_is_an_error_for_him_alone() {
    let (place, _) = used();
    let record = place.records().pop().unwrap();
    let other = record.with_file_name("a:net2:0");
    symlink("/etc/passwd", &other).unwrap();
    let (code, text) = place
        .add(&c("a").interface("net2"), &range("10.0.0.0/24"))
        .error();
    assert!(
        code == 105 && text.contains("as a record: it is a symbolic link"),
        "{code} {text}"
    );
    assert!(
        place
            .del(&c("a").interface("net2"), &range("10.0.0.0/24"))
            .ok()
    );
    assert!(other.is_symlink(), "DEL removed what it does not know");
    assert_eq!(
        place.add(&c("b"), &range("10.0.0.0/24")).address(),
        "10.0.0.2/24"
    );
}

#[test]
fn a_record_cannot_lead_del_to_another_owners_lease() {
    let (place, shard) = used();
    place.add(&c("victim"), &range("10.0.0.0/24")).address();
    // The attacker's record claims the victim's address, as a copy of his record.
    let records = place.records();
    let of = |name: &str| {
        records
            .iter()
            .find(|r| r.to_str().unwrap().contains(name))
            .unwrap()
    };
    let forged = std::fs::read_to_string(of("victim:")).unwrap();
    std::fs::remove_file(of("/a:")).unwrap();
    std::fs::write(of("/a:"), forged).unwrap();
    assert!(place.del(&c("a"), &range("10.0.0.0/24")).ok());
    assert!(
        shard.join("10.0.0.2@1").exists(),
        "the victim lost his address"
    );
}

#[test]
fn another_store_or_none_in_the_known_place_is_refused() {
    let (place, _) = used();
    // The share is not mounted: an empty directory is left.
    let away = place.path().join("away");
    std::fs::rename(place.store(), &away).unwrap();
    std::fs::create_dir(place.store()).unwrap();
    let (code, text) = place.add(&c("b"), &range("10.0.0.0/24")).error();
    assert!(
        code == 105 && text.contains("no store") && text.contains("mount"),
        "{code} {text}"
    );
    assert!(
        !place.del(&c("a"), &range("10.0.0.0/24")).ok(),
        "the lease is not freed yet"
    );
    assert_eq!(
        std::fs::read_dir(place.store()).unwrap().count(),
        0,
        "a new store was made"
    );
    std::fs::remove_dir(place.store()).unwrap();
    std::fs::rename(&away, place.store()).unwrap();
    assert_eq!(
        place.add(&c("b"), &range("10.0.0.0/24")).address(),
        "10.0.0.2/24"
    );

    // A new store, put there on purpose.
    std::fs::remove_dir_all(place.store()).unwrap();
    assert_eq!(place.add(&c("b"), &range("10.0.0.0/24")).error().0, 105);
    let other = Place::new();
    other.add(&c("x"), &range("10.0.0.0/24")).address();
    std::fs::rename(other.store(), place.store()).unwrap();
    assert_eq!(place.add(&c("b"), &range("10.0.0.0/24")).error().0, 105);
    assert!(place.admin(&["fsck", "--adopt"]).ok());
    assert_eq!(
        place.add(&c("b"), &range("10.0.0.0/24")).address(),
        "10.0.0.2/24"
    );
}

#[test]
fn a_pinned_store_is_never_made() {
    let place = Place::new();
    let stores = json!({"default": {"type": "file", "directory": place.store(), "id": "abc"}});
    let policy = json!({"stateDir": place.state(), "stores": stores});
    std::fs::write(place.policy(), policy.to_string()).unwrap();
    let (code, text) = place.add(&c("a"), &range("10.0.0.0/24")).error();
    assert!(code == 105 && text.contains("abc"), "{code} {text}");
    assert!(!place.store().join("FORMAT").exists());
}

/// The store of the place's policy, with more keys.
fn name_store(place: &Place, more: serde_json::Value) {
    let mut store = json!({"type": "file", "directory": place.store()});
    store
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    let policy = json!({"stateDir": place.state(), "stores": {"default": store}});
    std::fs::write(place.policy(), policy.to_string()).unwrap();
}

#[test]
fn a_directory_that_the_policy_names_is_never_created() {
    let place = Place::new();
    std::fs::remove_dir(place.store()).unwrap();
    let (code, text) = place.add(&c("a"), &range("10.0.0.0/24")).error();
    assert!(
        code == 105 && text.contains("mount the share"),
        "{code} {text}"
    );
    assert_eq!(
        place
            .call("STATUS", &c("a"), &range("10.0.0.0/24"))
            .error()
            .0,
        50
    );
    assert_eq!(place.admin(&["init"]).status, Some(1));
    assert!(!place.store().exists());
    assert!(
        place.del(&c("a"), &range("10.0.0.0/24")).ok(),
        "nothing was ever leased"
    );
    std::fs::create_dir(place.store()).unwrap();
    place.add(&c("a"), &range("10.0.0.0/24")).address();
    std::fs::remove_dir_all(place.store()).unwrap();
    assert!(
        !place.del(&c("a"), &range("10.0.0.0/24")).ok(),
        "its lease is elsewhere"
    );
}

#[test]
fn a_shared_store_is_refused_on_a_local_file_system() {
    let place = Place::new();
    name_store(&place, json!({"shared": true}));
    let (code, text) = place.add(&c("a"), &range("10.0.0.0/24")).error();
    assert!(
        code == 105 && text.contains("this machine alone"),
        "{code} {text}"
    );
    assert_eq!(place.admin(&["init"]).status, Some(1));
    assert_eq!(place.files("").len(), 0);
    assert!(
        place.del(&c("a"), &range("10.0.0.0/24")).ok(),
        "nothing was ever leased"
    );
    // Nor one that was made there before the policy said so.
    name_store(&place, json!({}));
    place.add(&c("a"), &range("10.0.0.0/24")).address();
    name_store(&place, json!({"shared": true}));
    assert_eq!(place.add(&c("b"), &range("10.0.0.0/24")).error().0, 105);
    assert!(!place.del(&c("a"), &range("10.0.0.0/24")).ok());
}

#[test]
fn a_pinned_store_is_made_by_init_alone() {
    let place = Place::new();
    name_store(&place, json!({"id": "rail-leases"}));
    assert_eq!(place.add(&c("a"), &range("10.0.0.0/24")).error().0, 105);
    let made = place.admin(&["init", "--json"]);
    assert_eq!(
        (made.status, &made.document["id"]),
        (Some(0), &json!("rail-leases")),
        "{made:?}"
    );
    assert!(place.admin(&["init"]).ok(), "again");
    place.add(&c("a"), &range("10.0.0.0/24")).address();
    name_store(&place, json!({"id": "another"}));
    assert_eq!(
        place.admin(&["init"]).status,
        Some(1),
        "it is another store"
    );
}

#[test]
fn an_emptied_note_of_the_store_is_no_licence_to_make_another() {
    let (place, _) = used();
    std::fs::write(place.state().join("stores/default"), "").unwrap();
    let away = place.path().join("away");
    std::fs::rename(place.store(), &away).unwrap();
    std::fs::create_dir(place.store()).unwrap();
    for answer in [
        place.add(&c("b"), &range("10.0.0.0/24")),
        place.del(&c("a"), &range("10.0.0.0/24")),
    ] {
        let (code, text) = answer.error();
        assert!(
            code == 105 && text.contains("fsck --adopt"),
            "{code} {text}"
        );
    }
    assert_eq!(std::fs::read_dir(place.store()).unwrap().count(), 0);
    std::fs::remove_dir(place.store()).unwrap();
    std::fs::rename(&away, place.store()).unwrap();
    assert!(
        place.del(&c("a"), &range("10.0.0.0/24")).ok(),
        "its lease is there"
    );
    assert_eq!(place.add(&c("b"), &range("10.0.0.0/24")).error().0, 105);
    assert!(place.admin(&["fsck", "--adopt"]).ok());
    place.add(&c("b"), &range("10.0.0.0/24")).address();
}

/// A file server that takes this node's root for another user, since yesterday.
#[test]
fn a_node_that_would_not_believe_its_own_files_gives_no_address() {
    let (place, _) = used();
    let store = place.store();
    let owned = std::process::Command::new("chown")
        .args(["-R", "65534"])
        .arg(&store)
        .status();
    assert!(owned.unwrap().success());
    let again = c("a").interface("net2");
    let (code, text) = place.add(&again, &range("10.0.0.0/24")).error();
    assert!(
        code == 105 && text.contains("squashes") && text.contains("no_root_squash"),
        "{code} {text}"
    );
    assert_eq!(place.records().len(), 1, "a record was left");
    assert_eq!(place.held(), ["10.0.0.1"]);
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
        json!({"ranges": ["10.0.0.0/16", "fd00::/48"], "networkNames": ["", "blue"]}),
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
    ask("b", json!({"range": "fd00::/64"})).address();
}

#[test]
fn a_newer_store_is_refused_untouched() {
    let (place, _) = used();
    let format = place.store().join("FORMAT");
    let text = std::fs::read_to_string(&format)
        .unwrap()
        .replace("\"version\": 2", "\"version\": 3");
    std::fs::write(&format, &text).unwrap();
    let before = place.files("");
    let (code, message) = place.add(&c("b"), &range("10.0.0.0/24")).error();
    assert!(
        code == 105 && message.contains("version 3"),
        "{code} {message}"
    );
    assert!(!place.del(&c("a"), &range("10.0.0.0/24")).ok());
    assert_eq!(place.files(""), before);
    assert_eq!(std::fs::read_to_string(&format).unwrap(), text);
}

/// What a network says of its store names no file of a pod.
#[test]
fn a_store_of_a_network_is_no_path() {
    let (place, _) = used();
    let forged = place.path().join("volume");
    let known = json!({"id": "x", "directory": "/nonexistent", "filesystem": "ext4"});
    std::fs::write(&forged, known.to_string()).unwrap();
    let forged = forged.to_str().unwrap();
    let up = format!("../../{}", forged.trim_start_matches('/'));
    for store in [forged, &up, "../stores/default"] {
        let config = json!({"range": "10.0.0.0/24", "store": store});
        let config = crate::support::network("rdma-ipam", config);
        assert!(place.del(&c("a"), &config).ok(), "{store}");
        assert_eq!(place.held(), ["10.0.0.1"], "{store}");
    }
}

/// The administrator renamed a store, or moved it, while pods have its addresses.
#[test]
fn del_frees_in_the_stores_that_this_node_used_before() {
    let policy = |place: &Place, stores: serde_json::Value| {
        let policy = json!({"stateDir": place.state(), "stores": stores});
        std::fs::write(place.policy(), policy.to_string()).unwrap();
    };
    let config = |store: &str| {
        crate::support::network("rdma-ipam", json!({"range": "10.0.0.0/24", "store": store}))
    };
    let place = Place::new();
    let of = |directory: &Path| json!({"type": "file", "directory": directory});
    policy(&place, json!({"rails": of(&place.store())}));
    for name in ["a", "b", "d"] {
        place.add(&c(name), &config("rails")).address();
    }
    // Renamed: the name is no store's any more.
    policy(&place, json!({"tracks": of(&place.store())}));
    assert!(place.del(&c("a"), &config("rails")).ok());
    assert_eq!(place.held(), ["10.0.0.2", "10.0.0.3"]);
    // Another directory by the same name, in use already.
    let other = place.path().join("other");
    std::fs::create_dir(&other).unwrap();
    policy(&place, json!({"rails": of(&other)}));
    place.add(&c("e"), &config("rails")).address();
    assert!(place.del(&c("b"), &config("rails")).ok());
    assert_eq!(place.held(), ["10.0.0.3"]);
    // What cannot be reached is no success where it is all that is known.
    let away = place.path().join("away");
    std::fs::rename(place.store(), &away).unwrap();
    assert!(
        place.del(&c("never"), &config("rails")).ok(),
        "the store in use has nothing"
    );
    std::fs::remove_dir_all(&other).unwrap();
    policy(&place, json!({}));
    assert!(!place.del(&c("d"), &config("rails")).ok());
    std::fs::rename(&away, place.store()).unwrap();
    assert!(place.del(&c("d"), &config("rails")).ok());
    assert_eq!(place.held().len(), 0);
}

#[test]
fn del_that_cannot_know_where_leases_are_says_so() {
    let (place, _) = used();
    let policy = std::fs::read(place.policy()).unwrap();
    // Directories of the test's own: those of the defaults may be in use on this machine.
    let elsewhere = place.path().join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let wrong = json!({
        "stateDir": elsewhere.join("state"),
        "stores": {"default": {"type": "file", "directory": elsewhere}},
        "typo": 1,
    });
    std::fs::write(place.policy(), wrong.to_string()).unwrap();
    let (code, text) = place.del(&c("a"), &range("10.0.0.0/24")).error();
    assert!(
        code == 11 && text.contains("nothing was found to free"),
        "{code} {text}"
    );
    std::fs::write(place.policy(), policy).unwrap();
    assert!(place.del(&c("a"), &range("10.0.0.0/24")).ok());
    assert_eq!(place.held().len(), 0);
}

#[test]
fn a_directory_that_is_no_store_is_not_taken_over() {
    let place = Place::new();
    std::fs::write(place.store().join("10.0.0.5"), "container").unwrap();
    let (code, text) = place.add(&c("a"), &range("10.0.0.0/24")).error();
    assert!(
        code == 105 && text.contains("not a store and is not empty"),
        "{code} {text}"
    );
    assert_eq!(place.files("").len(), 1);
}

#[test]
fn a_store_others_can_write_is_refused() {
    let place = Place::new();
    std::fs::set_permissions(place.store(), PermissionsExt::from_mode(0o777)).unwrap();
    let (code, text) = place.add(&c("a"), &range("10.0.0.0/24")).error();
    assert!(
        code == 105 && text.contains("writable") && text.contains("chmod go-w"),
        "{code} {text}"
    );
}

/// As a loss of power left it. Another directory would have no lease of the pods that run.
#[test]
fn an_emptied_format_is_to_be_put_back() {
    let place = Place::new();
    place.add(&c("a"), &range("10.0.0.0/24")).address();
    std::fs::write(place.store().join("FORMAT"), "").unwrap();
    let (code, text) = place.add(&c("b"), &range("10.0.0.0/24")).error();
    assert!(
        code == 105 && text.contains("from a copy") && !text.contains("of its own"),
        "{code} {text}"
    );
    assert_eq!(place.files("leases").len(), 1);
}

#[test]
fn a_store_that_cannot_be_made_or_written_is_named() {
    let place = Place::new();
    std::fs::remove_dir(place.store()).unwrap();
    std::fs::write(place.store(), "a file").unwrap();
    let (code, text) = place.add(&c("a"), &range("10.0.0.0/24")).error();
    assert!(code == 105 && text.contains("store"), "{code} {text}");
    assert_eq!(std::fs::read_to_string(place.store()).unwrap(), "a file");
}
