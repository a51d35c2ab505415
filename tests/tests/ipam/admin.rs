//! The tool that a person runs.

use crate::support::{Attachment, Place, network, range};
use serde_json::{Value, json};
use std::path::PathBuf;

fn c(name: &str) -> Attachment {
    Attachment::new(name)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[test]
fn list_shows_who_holds_what() {
    let place = Place::new();
    assert!(place.admin(&[]).ok(), "an unused store has no leases");
    place
        .add(
            &c("aaaaaaaaaaaaaaaaaaaaaaaa").pod("ml/train-0"),
            &range("10.0.0.0/24"),
        )
        .address();
    place.add(&c("b"), &range("10.0.0.0/28")).address();
    place.add(&c("d").node("n2"), &range("fd99::/64")).address();
    let all = place.admin(&[]);
    let tables: Vec<&str> = text(&all.document).split("\n\n").collect();
    let [pools, leases] = tables[..] else {
        panic!("{tables:?}")
    };
    assert!(
        pools.starts_with("RANGE") && pools.lines().count() == 4,
        "{pools}"
    );
    let lines: Vec<&str> = leases.lines().collect();
    assert_eq!(lines.len(), 4, "{lines:?}");
    assert!(
        lines[1].starts_with("10.0.0.1/24") && lines[1].contains("ml/train-0"),
        "{lines:?}"
    );
    let all = place.admin(&["--json"]).document;
    let all = &all["leases"];
    assert_eq!(all.as_array().unwrap().len(), 3);
    for key in [
        "address",
        "prefix",
        "range",
        "network",
        "pod",
        "container",
        "interface",
        "node",
        "store",
        "netns",
        "created",
    ] {
        assert!(all[0].get(key).is_some(), "{key}: {}", all[0]);
    }
}

#[test]
fn pools_say_how_full_they_are() {
    let place = Place::new();
    for name in ["a", "b", "d"] {
        place.add(&c(name), &range("10.0.0.0/28")).address();
    }
    place.add(&c("e"), &range("10.0.0.0/24")).address();
    place.add(&c("f"), &range("fd99::/64")).address();
    assert!(place.del(&c("b"), &range("10.0.0.0/28")).ok());
    let pools = place.admin(&["--json"]).document;
    let of = |range: &str| {
        pools["pools"]
            .as_array()
            .unwrap()
            .iter()
            .find(|p| p["range"] == range)
            .unwrap()
            .clone()
    };
    let small = of("10.0.0.0/28");
    assert_eq!(
        (
            &small["size"],
            &small["used"],
            &small["coolingDown"],
            &small["free"]
        ),
        (&json!(14), &json!(2), &json!(1), &json!(10))
    );
    assert_eq!(small["usedByOtherRanges"], 1);
    let large = of("10.0.0.0/24");
    assert_eq!(
        (&large["used"], &large["usedByOtherRanges"]),
        (&json!(1), &json!(2))
    );
    assert_eq!(large["free"], 254 - 3 - 1);
    assert!(text(&place.admin(&[]).document).contains("2^64"));
    assert_eq!(pools["store"], "default");
}

/// Dates a lease back by `seconds`, in place.
fn age(place: &Place, container: &str, seconds: u64) {
    let records = place.records();
    let record = records
        .iter()
        .find(|r| r.to_str().unwrap().contains(&format!("/{container}:")))
        .unwrap();
    let mut lease: Value = serde_json::from_slice(&std::fs::read(record).unwrap()).unwrap();
    let taken = lease["sinceBootMs"].as_u64().unwrap();
    lease["sinceBootMs"] = json!(taken.saturating_sub(seconds * 1000));
    std::fs::write(record, lease.to_string()).unwrap();
}

/// The same for every lease.
pub(crate) fn age_all(place: &Place, seconds: u64) {
    for record in place.records() {
        let name = record.file_name().unwrap().to_str().unwrap();
        age(place, name.split(':').next().unwrap(), seconds);
    }
}

/// Dates back what a previous run recorded.
pub(crate) fn see_earlier(place: &Place) {
    let path = place.leases().join("seen");
    // Nothing was over.
    let Ok(text) = std::fs::read(&path) else {
        return;
    };
    let mut seen: Value = serde_json::from_slice(&text).unwrap();
    for (_, at) in seen.as_object_mut().unwrap() {
        *at = json!(at.as_u64().unwrap() - 10);
    }
    std::fs::write(&path, seen.to_string()).unwrap();
}

/// A namespace's file, as a runtime keeps them.
fn netns(place: &Place, name: &str) -> PathBuf {
    let directory = place.path().join("netns");
    std::fs::create_dir_all(&directory).unwrap();
    let path = directory.join(name);
    std::fs::write(&path, "").unwrap();
    path
}

pub(crate) fn freed(report: &Value) -> Vec<&str> {
    let mut freed: Vec<&str> = report["freed"]
        .as_array()
        .unwrap()
        .iter()
        .map(|freed| freed["lease"]["address"].as_str().unwrap())
        .collect();
    freed.sort_unstable();
    freed
}

#[test]
fn reclaim_frees_what_is_over_after_a_second_reading() {
    let place = Place::new();
    let config = range("10.0.0.0/24");
    let (gone, live) = (netns(&place, "gone"), netns(&place, "live"));
    place.add(&c("gone").netns(&gone), &config).address();
    place.add(&c("live").netns(&live), &config).address();
    place.add(&c("young").netns(&gone), &config).address();
    place
        .add(
            &c("blind").netns(&place.path().join("no/such/dir")),
            &config,
        )
        .address();
    std::fs::remove_file(&gone).unwrap();
    for name in ["gone", "live", "blind"] {
        age(&place, name, 120);
    }
    let first = place.reclaim(&["--json"]).document;
    assert_eq!(freed(&first).len(), 0);
    assert_eq!(
        place.reclaim(&["--json"]).document["freed"],
        json!([]),
        "too soon"
    );
    see_earlier(&place);
    let dry = place.reclaim(&["--dry-run", "--json"]).document;
    assert_eq!(freed(&dry), ["10.0.0.1"]);
    assert_eq!(place.held().len(), 4, "a dry run freed something");
    let second = place.reclaim(&["--json"]).document;
    assert_eq!(freed(&second), ["10.0.0.1"]);
    assert_eq!(second["waiting"][0]["lease"]["container"], "young");
    let kept = second["kept"].to_string();
    assert!(
        kept.contains("its network namespace is there") && kept.contains("does not exist here"),
        "{kept}"
    );
    assert_eq!(place.held(), ["10.0.0.2", "10.0.0.3", "10.0.0.4"]);
    assert!(place.del(&c("gone"), &config).ok());
}

#[test]
fn release_frees_by_hand_and_asks_first() {
    let place = Place::new();
    let config = range("10.0.0.0/24");
    for name in ["a", "b"] {
        place.add(&c(name), &config).address();
    }
    let refused = place.admin(&["release", "10.0.0.1"]);
    assert!(
        refused.status == Some(1) && refused.stderr.contains("--yes"),
        "{refused:?}"
    );
    assert_eq!(place.held().len(), 2);
    assert!(place.admin(&["release", "10.0.0.1", "--yes"]).ok());
    assert!(
        place
            .admin(&["release", "--pod", "default/b", "--yes"])
            .ok()
    );
    assert_eq!((place.held().len(), place.records().len()), (0, 0));
    assert_eq!(
        place.admin(&["release", "10.0.0.1", "--yes"]).status,
        Some(1)
    );
    assert_eq!(place.admin(&["release"]).status, Some(2));
    assert!(place.del(&c("a"), &config).ok());
}

#[test]
fn release_of_an_address_is_for_one_network_name() {
    let place = Place::new();
    let blue = network(
        "rdma-ipam",
        json!({"range": "10.0.0.0/24", "network_name": "blue"}),
    );
    let apart = network(
        "rdma-ipam",
        json!({"range": "10.0.1.0/24", "enable_overlapping_ranges": false}),
    );
    place
        .add(&c("a").pod("ml/a"), &range("10.0.0.0/24"))
        .address();
    place.add(&c("b").pod("ml/b"), &blue).address();
    place.add(&c("d"), &apart).address();
    place
        .add(&c("e").args("IP=10.0.1.1"), &range("10.0.0.0/16"))
        .address();
    let several = place.admin(&["release", "10.0.0.1", "--yes"]);
    assert_eq!(several.status, Some(1));
    for part in ["ml/a", "ml/b", "blue", "--network-name"] {
        assert!(several.stderr.contains(part), "{part}: {several:?}");
    }
    assert_eq!(place.held().len(), 4);
    let released = place.admin(&["release", "10.0.0.1", "--network-name", "", "--yes"]);
    assert!(released.ok(), "{released:?}");
    assert!(
        place.admin(&["release", "10.0.0.1", "--yes"]).ok(),
        "the last one"
    );
    assert_eq!(
        place.admin(&["release", "10.0.1.1", "--yes"]).status,
        Some(1)
    );
    let pool = ["release", "10.0.1.1", "--pool", "10.0.1.0/24", "--yes"];
    assert!(place.admin(&pool).ok());
    assert_eq!(place.held(), ["10.0.1.1"]);
    assert_eq!(place.records().len(), 1);
}

#[test]
fn releasing_one_of_two_addresses_keeps_the_other_in_reach_of_del() {
    let place = Place::new();
    let config = network(
        "rdma-ipam",
        json!({"ipRanges": [{"range": "10.0.0.0/24"}, {"range": "fd99::/64"}]}),
    );
    place.add(&c("a"), &config).addresses();
    assert!(place.admin(&["release", "10.0.0.1", "--yes"]).ok());
    assert_eq!(place.held(), ["fd99::1"]);
    assert!(place.del(&c("a"), &config).ok());
    assert_eq!((place.held().len(), place.records().len()), (0, 0));
}

#[test]
fn a_failing_command_says_so() {
    let place = Place::new();
    assert_eq!(place.admin(&["nonsense"]).status, Some(2));
    for command in [&["--store", "nope"][..], &["fsck", "--store", "nope"]] {
        let answer = place.admin(command);
        assert_eq!(answer.status, Some(1), "{command:?}");
        let message = "has no store \"nope\"; it has default; name one of them with --store";
        assert!(
            answer.stderr.contains(message),
            "{command:?}: {}",
            answer.stderr
        );
    }
}

#[test]
fn a_store_that_was_never_used_answers_like_an_empty_one() {
    for used in [false, true] {
        let place = Place::new();
        if used {
            let config = range("10.0.0.0/24");
            place.add(&c("a"), &config).address();
            assert!(place.del(&c("a"), &config).ok());
        }
        for (arguments, status) in [
            (&[][..], 0),
            (&["release", "10.0.0.9", "--yes"], 1),
            (&["fsck"], 0),
        ] {
            let answer = place.admin(arguments);
            assert_eq!(
                answer.status,
                Some(status),
                "{used} {arguments:?}: {answer:?}"
            );
            let said = answer.stderr.contains("has leased nothing");
            assert_eq!(said, !used, "{arguments:?}: {answer:?}");
            let arguments = [arguments, &["--json"]].concat();
            let answer = place.admin(&arguments);
            assert_eq!(
                answer.status,
                Some(status),
                "{used} {arguments:?}: {answer:?}"
            );
        }
    }
}

#[test]
fn a_policy_that_was_named_must_be_there() {
    let place = Place::new();
    let missing = place.path().join("none.json");
    let answer = place.admin(&["--policy", missing.to_str().unwrap()]);
    assert!(
        answer.status == Some(1) && answer.stderr.contains("is not there"),
        "{answer:?}"
    );
}

/// A program in the place of kubectl: `get` prints what the files have, `create` and `replace` keep what
/// they read, and let the files for the next time be those of now.
const KUBECTL: &str = r#"#!/bin/sh
cd "$(dirname "$0")" || exit 1
echo "$*" >>calls
case $3 in
get)
    name=${4%%.*}
    cat "$name.json"
    ;;
*)
    cat >"$3.json"
    if [ -e conflict ]; then
        rm conflict
        echo 'Error from server (Conflict): the object has been modified' >&2
        exit 1
    fi
    for file in later/*; do [ ! -e "$file" ] || mv "$file" .; done
    ;;
esac
"#;

#[test]
fn export_writes_what_whereabouts_objects_do_not_have() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    place.add(&c("a"), &range("10.0.0.0/24")).address();
    place.add(&c("b"), &range("10.0.1.0/24")).address();
    let directory = place.path().join("cluster");
    std::fs::create_dir_all(directory.join("later")).unwrap();
    let put = |name: &str, document: Value| {
        std::fs::write(directory.join(name), document.to_string()).unwrap();
    };
    let program = directory.join("kubectl");
    std::fs::write(&program, KUBECTL).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let pool = |version: &str, allocations: Value| {
        json!({"items": [{"apiVersion": "whereabouts.cni.cncf.io/v1alpha1", "kind": "IPPool",
            "metadata": {"name": "10.0.0.0-24", "resourceVersion": version},
            "spec": {"range": "10.0.0.0/24", "allocations": allocations}}]})
    };
    let theirs = json!({"id": "x", "podref": "ml/x", "ifname": "net1"});
    put("ippools.json", pool("7", json!({"9": theirs})));
    put("overlappingrangeipreservations.json", json!({"items": []}));
    let export = |more: &[&str]| {
        let kubectl = format!("--kubectl={}", program.display());
        let always = [
            "export",
            "--whereabouts",
            "--json",
            "--range",
            "10.0.0.0/24",
            &kubectl,
        ];
        place.admin(&[&always[..], more].concat())
    };
    let plan = export(&[]);
    let expected = json!({"version": 1, "dryRun": true, "leases": 1, "exported": 1, "refused": []});
    assert_eq!(plan.document, expected, "{plan:?}");
    assert!(!directory.join("replace.json").exists());
    // Another one changes the pool meanwhile: it is read again.
    std::fs::write(directory.join("conflict"), "").unwrap();
    let lease = json!({"id": "a", "podref": "default/a", "ifname": "net1"});
    let written = json!({"1": lease, "9": theirs});
    put("later/ippools.json", pool("8", written.clone()));
    let reservation = json!({"apiVersion": "whereabouts.cni.cncf.io/v1alpha1",
        "kind": "OverlappingRangeIPReservation", "metadata": {"name": "10.0.0.1"},
        "spec": {"podref": "default/a", "ifname": "net1"}});
    put(
        "later/overlappingrangeipreservations.json",
        json!({"items": [reservation]}),
    );
    let done = export(&["--yes"]);
    assert!(done.ok() && done.document["exported"] == 1, "{done:?}");
    let calls = std::fs::read_to_string(directory.join("calls")).unwrap();
    assert_eq!(calls.matches("replace --filename=-").count(), 2, "{calls}");
    let sent: Value =
        serde_json::from_str(&std::fs::read_to_string(directory.join("replace.json")).unwrap())
            .unwrap();
    assert_eq!(sent["items"], pool("7", written)["items"]);
    let again = export(&["--yes"]);
    assert!(again.ok() && again.document["exported"] == 0, "{again:?}");
    // An address that another pod has got there.
    put("ippools.json", pool("9", json!({"1": theirs})));
    let refused = export(&["--yes"]);
    assert_eq!(refused.status, Some(1), "{refused:?}");
    assert!(
        refused.stderr.contains("10.0.0.1 of pod default/a"),
        "{refused:?}"
    );
}
