//! What the tool answers: exit statuses, and messages that say what is wrong and where.

use crate::support::{Attachment, Place, network, range};
use serde_json::json;

fn c(name: &str) -> Attachment {
    Attachment::new(name)
}

#[test]
fn nothing_found_is_exit_status_1() {
    let place = Place::new();
    place.add(&c("a"), &range("10.0.0.0/24")).address();
    let answer = place.admin(&["release", "--pod", "nope", "--yes"]);
    assert_eq!(answer.status, Some(1), "{answer:?}");
    assert!(answer.stderr.contains("no such lease"), "{answer:?}");
    assert_eq!(place.held(), ["10.0.0.1"]);
}

#[test]
fn flags_stand_before_a_sub_command_or_after_it() {
    let place = Place::new();
    place.add(&c("a"), &range("10.0.0.0/24")).address();
    let fsck = place.admin(&["--json", "--store", "default", "fsck"]);
    assert!(fsck.ok() && fsck.document["sound"] == 1, "{fsck:?}");
    let fsck = place.admin(&["fsck", "--json", "--store", "default"]);
    assert!(fsck.ok() && fsck.document["sound"] == 1, "{fsck:?}");
}

#[test]
fn a_wrong_type_is_said_with_key_and_expected_type() {
    let place = Place::new();
    for (ipam, part) in [
        (
            json!({"range": 5}),
            "ipam.range: expected a string, found the number 5",
        ),
        (
            json!({"range": "10.0.0.0/24", "exclude": "10.0.0.1"}),
            "ipam.exclude: expected a list",
        ),
        (
            json!({"range": "10.0.0.0/24", "exclude": ["10.0.0.1", 5]}),
            "ipam.exclude[1]: expected a string, found the number 5",
        ),
        (
            json!({"range": "10.0.0.0/24", "enable_overlapping_ranges": "no"}),
            "expected true or false",
        ),
        (
            json!({"ipRanges": [{"range": "10.0.0.0/24", "range_start": 7}]}),
            "ipam.ipRanges[0].range_start: expected a string, found the number 7",
        ),
    ] {
        let (code, text) = place.add(&c("a"), &network("rdma-ipam", ipam)).error();
        assert_eq!(code, 7);
        assert!(text.contains(part), "no {part:?} in {text}");
    }
}

#[test]
fn a_second_request_from_one_range_says_that_the_range_has_one() {
    let place = Place::new();
    let mut config = range("10.1.0.0/24");
    config["runtimeConfig"] = json!({"ips": ["10.1.0.5", "10.1.0.6"]});
    let (code, text) = place.add(&c("a"), &config).error();
    assert_eq!(code, 7);
    assert!(
        text.contains(
            "10.1.0.6 lies in range 10.1.0.0/24, from which 10.1.0.5 is asked for already"
        ),
        "{text}"
    );
    config["runtimeConfig"] = json!({"ips": ["10.2.0.5"]});
    let (_, text) = place.add(&c("a"), &config).error();
    assert!(text.contains("lies in none of the ranges"), "{text}");
}

/// A reader of the report decides by it whether to say `--yes`.
#[test]
fn reclaim_says_of_each_lease_why_it_is_over() {
    let place = Place::new();
    let directory = place.path().join("netns");
    std::fs::create_dir(&directory).unwrap();
    let gone = directory.join("gone");
    let config = range("10.0.0.0/24");
    place.add(&c("netns").netns(&gone), &config).address();
    let report = place.reclaim(&["--json"]).document;
    let waiting = report["waiting"].as_array().unwrap().iter();
    let mut because: Vec<(&str, &str)> = waiting
        .map(|one| {
            let container = one["lease"]["container"].as_str().unwrap();
            (container, one["because"].as_str().unwrap())
        })
        .collect();
    because.sort_unstable();
    assert_eq!(because, [("netns", "its network namespace is gone"),]);
}
