//! fsck: what it names, what it puts right, and what it leaves alone.

use crate::support::{Answer, Attachment, Place, network, range};
use serde_json::{Value, json};
use std::os::unix::fs::{chown, symlink};
use std::path::{Path, PathBuf};

fn c(name: &str) -> Attachment {
    Attachment::new(name)
}

/// A store in which each of these containers has an address, and the shard.
fn used(containers: &[&str]) -> (Place, PathBuf) {
    let place = Place::new();
    for name in containers {
        place.add(&c(name), &range("10.0.0.0/24")).address();
    }
    let shard = place.store().join("leases/default/10.0.0.0-24");
    (place, shard)
}

/// The owner's record of a container, by its number.
fn record(place: &Place, container: &str, number: usize) -> PathBuf {
    let name = format!("/{container}:net1:{number}");
    let mut records = place.records().into_iter();
    let of_container = records.find(|record| record.to_str().unwrap().ends_with(&name));
    of_container.unwrap_or_else(|| panic!("no record {name}"))
}

/// A look at everything, however young.
fn all(place: &Place, more: &[&str]) -> Answer {
    let mut arguments = vec!["fsck", "--json", "--min-age", "0"];
    arguments.extend(more);
    place.admin(&arguments)
}

/// What was found of a file, and whether it was put right.
fn found(answer: &Answer, path: &Path) -> Vec<(String, bool)> {
    let findings = answer.document["findings"].as_array().unwrap().iter();
    let of_path = findings.filter(|finding| finding["file"] == json!(path));
    of_path
        .map(|finding| {
            let what = finding["what"].as_str().unwrap().to_owned();
            (what, finding["repaired"].as_bool().unwrap())
        })
        .collect()
}

fn names(place: &Place) -> Vec<PathBuf> {
    place.files("")
}

#[test]
fn fsck_without_repair_changes_nothing() {
    let (place, shard) = used(&["a", "b"]);
    symlink("/etc/passwd", shard.join("10.0.0.7@1")).unwrap();
    std::fs::remove_file(record(&place, "a", 0)).unwrap();
    std::fs::remove_file(shard.join("10.0.0.2@1")).unwrap();
    std::fs::write(place.store().join("probe-0123"), "").unwrap();
    let before = names(&place);
    let report = all(&place, &[]);
    assert_eq!(report.status, Some(1), "{report:?}");
    assert_eq!(report.document["repaired"], json!(0));
    assert_eq!(found(&report, &shard.join("10.0.0.7@1")).len(), 1);
    assert_eq!(names(&place), before);
}

#[test]
fn what_the_file_system_itself_keeps_in_a_store_is_no_finding() {
    let (place, _) = used(&["a"]);
    std::fs::create_dir(place.store().join("lost+found")).unwrap();
    std::fs::create_dir(place.store().join(".snapshot")).unwrap();
    std::fs::write(place.store().join(".nfs0000000000ab"), "").unwrap();
    let report = all(&place, &["--repair"]);
    assert!(report.ok(), "{report:?}");
    let stray = place.store().join("nfs0000000000ab");
    std::fs::write(&stray, "").unwrap();
    let report = all(&place, &["--repair"]);
    assert_eq!(
        found(&report, &stray),
        [("unexpected file".to_owned(), false)]
    );
}

#[test]
fn another_file_is_no_record_of_the_lease() {
    let (place, shard) = used(&["a"]);
    let record = record(&place, "a", 0);
    let copy = place.path().join("copy");
    std::fs::copy(&record, &copy).unwrap();
    std::fs::rename(&copy, &record).unwrap();
    let entry = shard.join("10.0.0.1@1");
    let report = all(&place, &[]);
    let (what, _) = found(&report, &entry).pop().unwrap();
    assert!(what.contains("no record of its owner"), "{report:?}");
    let (what, _) = found(&report, &record).pop().unwrap();
    assert!(what.contains("holds nothing of 10.0.0.1"), "{report:?}");
    all(&place, &["--repair"]);
    assert!(place.del(&c("a"), &range("10.0.0.0/24")).ok());
    assert_eq!(place.held(), [""; 0], "DEL does not find the address");
}

#[test]
fn a_killed_adds_record_is_removed_once_old() {
    let (place, _) = used(&["a"]);
    let killed = record(&place, "a", 0).with_file_name("killed:net1:0");
    std::fs::write(&killed, "").unwrap();
    let young = place.admin(&["fsck", "--repair"]);
    assert!(young.ok(), "it may be of a call that still runs: {young:?}");
    let report = all(&place, &[]);
    let (what, repaired) = found(&report, &killed).pop().unwrap();
    assert!(
        what.starts_with("an ADD that was killed") && !repaired,
        "{report:?}"
    );
    assert!(killed.exists());
    let report = all(&place, &["--repair"]);
    assert!(found(&report, &killed).pop().unwrap().1, "{report:?}");
    assert!(!killed.exists());
    assert_eq!(place.held(), ["10.0.0.1"]);
}

/// A crash of the machine emptied it; a pod that lives may have the address.
#[test]
fn an_emptied_record_that_has_an_address_is_never_removed() {
    // A named pod's record has a third name, by which its next sandbox finds the address.
    for pod in [Some("default/a".to_owned()), None] {
        let place = Place::new();
        let attachment = Attachment { pod, ..c("a") };
        place.add(&attachment, &range("10.0.0.0/24")).address();
        let record = record(&place, "a", 0);
        std::fs::write(&record, "").unwrap();
        let report = all(&place, &["--repair"]);
        assert_eq!(found(&report, &record), [], "it is no ADD that was killed");
        let entry = place.store().join("leases/default/10.0.0.0-24/10.0.0.1@1");
        let (what, repaired) = found(&report, &entry).pop().unwrap();
        assert!(
            what.contains("rdmactl addresses release 10.0.0.1"),
            "{what}"
        );
        assert!(!repaired && record.exists(), "{report:?}");
        assert_eq!(place.held(), ["10.0.0.1"]);
    }
}

/// The numbering of an owner's records must have no gap, or DEL would not find the next.
#[test]
fn a_record_that_holds_nothing_stays_below_one_that_holds_an_address() {
    let place = Place::new();
    let ranges = json!([{"range": "10.0.0.0/24"}, {"range": "10.1.0.0/24"}]);
    let config: Value = network("rdma-ipam", json!({"ipRanges": ranges}));
    // What a changed network asks for besides has a further record.
    place.add(&c("a"), &range("10.0.0.0/24")).address();
    assert_eq!(place.add(&c("a"), &config).addresses().len(), 2);
    assert_eq!(place.records().len(), 2);
    let lower = record(&place, "a", 0);
    let held = place.held();
    let of_lower = std::fs::read_to_string(&lower).unwrap();
    let (lost, kept) = match of_lower.contains(&format!("\"{}\"", held[0])) {
        true => (&held[0], &held[1]),
        false => (&held[1], &held[0]),
    };
    let mut entries = place.files("leases").into_iter();
    let entry = entries.find(|entry| {
        let name = entry.file_name().unwrap().to_str().unwrap();
        name.starts_with(&format!("{lost}@"))
    });
    std::fs::remove_file(entry.unwrap()).unwrap();
    let report = all(&place, &["--repair"]);
    assert_eq!(found(&report, &lower), [], "it goes with the one above");
    assert!(lower.exists());
    assert_eq!(place.held(), [kept.as_str()]);
    assert!(place.del(&c("a"), &config).ok());
    assert_eq!((place.held().len(), place.records().len()), (0, 0));
}

/// A node whose root the file server takes for another user made these, as far as anybody can
/// say: they have a second name, as a lease has.
#[test]
fn a_file_of_another_user_with_two_names_keeps_the_address() {
    let (place, shard) = used(&["a"]);
    let large = "x".repeat(1 << 20);
    let cases = [
        ("10.0.0.5@1", "garbage", 2),
        ("10.0.0.6@1", large.as_str(), 2),
        ("10.0.0.7@1", "garbage", 1),
        ("10.0.0.8@1", large.as_str(), 1),
        ("10.0.0.9@1", "garbage", 3),
        ("10.0.0.10@1", large.as_str(), 3),
    ];
    for (name, content, links) in cases {
        let entry = shard.join(name);
        std::fs::write(&entry, content).unwrap();
        chown(&entry, Some(65534), None).unwrap();
        for link in 1..links {
            std::fs::hard_link(&entry, place.path().join(format!("{name}.{link}"))).unwrap();
        }
    }
    let report = all(&place, &["--repair"]);
    for (name, content, links) in cases {
        let entry = shard.join(name);
        let (what, repaired) = found(&report, &entry).pop().unwrap();
        let may_be_a_lease = links > 1;
        let case = format!("{name}, {} bytes, {links} names: {what}", content.len());
        assert_eq!(entry.exists(), may_be_a_lease, "{case}");
        assert_eq!(repaired, !may_be_a_lease, "{case}");
        assert_eq!(what.contains("no_root_squash"), may_be_a_lease, "{case}");
    }
}
