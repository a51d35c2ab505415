//! Slices of nodes: who gives them up, and what is said when there is none.

use crate::support::{Attachment, Place, network};
use serde_json::{Value, json};

fn c(name: &str) -> Attachment {
    Attachment::new(name)
}

fn sliced(range: &str, size: &str) -> Value {
    network(
        "rdma-ipam",
        json!({"range": range, "node_slice_size": size}),
    )
}

/// Slice and node of each.
fn slices(place: &Place) -> Vec<(String, String)> {
    let pools = place.admin(&["pools", "--json"]).document;
    let text = |slice: &Value, key: &str| slice[key].as_str().unwrap().to_owned();
    let slices = pools["slices"].as_array().unwrap().iter();
    slices
        .map(|slice| (text(slice, "slice"), text(slice, "node")))
        .collect()
}

fn slice(slice: &str, node: &str) -> (String, String) {
    (slice.to_owned(), node.to_owned())
}

#[test]
fn release_of_one_pool_keeps_slices_of_others() {
    let place = Place::new();
    let (a, b) = (sliced("10.5.0.0/24", "/28"), sliced("10.6.0.0/24", "/28"));
    place.add(&c("a").node("n2"), &a).address();
    place.add(&c("b").node("n2"), &b).address();
    let pool = ["release", "--node", "n2", "--pool", "10.5.0.0/24", "--yes"];
    let released = place.admin(&pool);
    assert!(released.ok(), "{released:?}");
    let text = released.document.to_string();
    assert!(
        text.contains("10.5.0.0/28") && !text.contains("10.6.0.0"),
        "{text}"
    );
    assert_eq!(slices(&place), [slice("10.6.0.0/28", "n2")]);
    assert_eq!(
        place.add(&c("d").node("n3"), &b).address(),
        "10.6.0.17/24",
        "beside the lease that n2 has"
    );
    let again = place.admin(&pool);
    assert_eq!(again.status, Some(3), "{again:?}");
}

#[test]
fn release_of_a_node_shows_its_slices_before_it_asks() {
    let place = Place::new();
    let config = sliced("10.5.0.0/24", "/28");
    place.add(&c("a").node("n2"), &config).address();
    let asked = place.admin(&["release", "--node", "n2"]);
    assert_eq!(asked.status, Some(1));
    assert!(
        asked
            .stderr
            .contains("free this lease and give up this slice?"),
        "{asked:?}"
    );
    let text = asked.document.as_str().unwrap();
    assert!(
        text.contains("10.5.0.1") && text.contains("10.5.0.0/28"),
        "{text}"
    );
    assert_eq!(slices(&place), [slice("10.5.0.0/28", "n2")]);
    // The slice alone.
    assert!(place.del(&c("a").node("n2"), &config).ok());
    let asked = place.admin(&["release", "--node", "n2"]);
    assert!(asked.stderr.contains("give up this slice?"), "{asked:?}");
    let released = place.admin(&["release", "--node", "n2", "--yes", "--json"]);
    assert_eq!(released.document["slices"], json!(["10.5.0.0/28"]));
    assert!(slices(&place).is_empty());
}

#[test]
fn release_of_this_node_is_refused_while_it_has_leases() {
    let place = Place::new();
    let config = sliced("10.5.0.0/24", "/28");
    place.add(&c("a"), &config).address();
    let refused = place.admin(&["release", "--node", "n1", "--yes"]);
    assert_eq!(refused.status, Some(1), "{refused:?}");
    for part in ["n1", "this node", "--previous", "10.5.0.1"] {
        assert!(refused.stderr.contains(part), "{part}: {refused:?}");
    }
    assert_eq!(place.held(), ["10.5.0.1"]);
    assert_eq!(slices(&place).len(), 1);
    // Another pool's leases are not in the way of this one's slice.
    place.add(&c("b"), &sliced("10.6.0.0/24", "/28")).address();
    assert!(place.del(&c("a"), &config).ok());
    let pool = ["release", "--node", "n1", "--pool", "10.5.0.0/24", "--yes"];
    assert!(place.admin(&pool).ok());
    assert_eq!(slices(&place), [slice("10.6.0.0/28", "n1")]);
}

#[test]
fn the_command_that_gives_up_one_slice_is_named() {
    let place = Place::new();
    let config = sliced("10.5.0.0/24", "/28");
    let blue = network(
        "rdma-ipam",
        json!({"range": "10.5.0.0/24", "node_slice_size": "/28", "network_name": "blue"}),
    );
    place.add(&c("a").node("n2"), &config).address();
    place.add(&c("b").node("n2"), &blue).address();
    assert!(place.del(&c("a").node("n2"), &config).ok());
    let refused = place.admin(&["pools", "--drop", "10.5.0.0/24", "--yes"]);
    let command = "rdma-ipam release --node n2 --pool 10.5.0.0/24 --network-name \"\"";
    assert!(refused.stderr.contains(command), "{refused:?}");
    let arguments = [
        "release",
        "--node",
        "n2",
        "--pool",
        "10.5.0.0/24",
        "--network-name",
        "",
        "--yes",
    ];
    assert!(place.admin(&arguments).ok());
    assert!(
        place
            .admin(&["pools", "--drop", "10.5.0.0/24", "--yes"])
            .ok()
    );
    assert_eq!(place.held(), ["10.5.0.1"]);
    assert_eq!(slices(&place), [slice("10.5.0.0/28", "n2")]);
}

#[test]
fn slices_begin_where_the_range_begins() {
    let place = Place::new();
    let config = network(
        "rdma-ipam",
        json!({"range": "10.0.0.0/8", "range_start": "10.128.0.0", "node_slice_size": "/26"}),
    );
    assert_eq!(place.add(&c("a"), &config).address(), "10.128.0.1/8");
    assert_eq!(
        place.add(&c("b").node("n2"), &config).address(),
        "10.128.0.65/8"
    );
}

#[test]
fn a_full_slice_is_called_a_slice() {
    let place = Place::new();
    let config = sliced("10.0.0.0/8", "/32");
    place.add(&c("a"), &config).address();
    for verb in ["ADD", "STATUS"] {
        let answer = place.call(verb, &c("b"), &config);
        let (_, text) = answer.error();
        for part in [
            "slice 10.0.0.1/32 of range 10.0.0.0/8",
            "its only address 10.0.0.1 is leased",
            "larger node_slice_size",
        ] {
            assert!(text.contains(part), "{verb}: no {part:?} in {text}");
        }
        assert!(!text.contains("enlarge the range"), "{verb}: {text}");
    }
}

#[test]
fn a_range_without_a_free_slice_says_how_many_are_taken() {
    let place = Place::new();
    let config = network(
        "rdma-ipam",
        json!({"range": "10.0.0.0/24", "range_start": "10.0.0.128", "node_slice_size": "/25"}),
    );
    place.add(&c("a").node("n2"), &config).address();
    let (code, text) = place.add(&c("b"), &config).error();
    assert_eq!(code, 102);
    assert!(
        text.contains("every slice of /25 with a usable address is taken")
            && text.contains("1 of 2 slices"),
        "{text}"
    );
}
