//! Ranges of several shards: the files of 256 addresses each lie in a directory of their own.

use crate::support::{Attachment, Place, network};
use serde_json::{Value, json};
use std::time::Duration;

fn c(name: &str) -> Attachment {
    Attachment::new(name)
}

/// Two addresses at the end of one shard and two at the beginning of the next.
fn config() -> Value {
    network(
        "rdma-ipam",
        json!({
            "range": "10.0.0.0/23", "range_start": "10.0.0.254", "range_end": "10.0.1.1",
        }),
    )
}

#[test]
fn the_address_released_first_is_leased_first_in_any_shard() {
    for released in [["d", "a"], ["a", "d"]] {
        let place = Place::new();
        let mut address_of = std::collections::BTreeMap::new();
        for name in ["a", "b", "d", "e"] {
            let address = place.add(&c(name), &config()).address();
            address_of.insert(name, address.trim_end_matches("/23").to_owned());
        }
        for name in released {
            assert!(place.del(&c(name), &config()).ok());
            std::thread::sleep(Duration::from_millis(20));
        }
        let [first, second] = released.map(|name| address_of[name].clone());
        for (name, expected) in [("f", first), ("g", second)] {
            let address = place.add(&c(name), &config()).address();
            assert_eq!(address, format!("{expected}/23"));
        }
    }
}

/// The first range's address is the one that was released first, in whichever shard; the second
/// range has one address only.
#[test]
fn status_fails_where_the_first_range_would_get_the_only_address_of_the_second() {
    for (first, second, served) in [
        ("10.0.0.255", "10.0.1.0", true),
        ("10.0.1.0", "10.0.0.255", false),
    ] {
        let place = Place::new();
        let mut holders = std::collections::BTreeMap::new();
        for name in ["a", "b", "d", "e"] {
            let address = place.add(&c(name), &config()).address();
            holders.insert(address.trim_end_matches("/23").to_owned(), name);
        }
        for released in [first, second] {
            assert!(place.del(&c(holders[released]), &config()).ok());
            std::thread::sleep(Duration::from_millis(20));
        }
        let range = |start: &str, end: &str| json!({"range": "10.0.0.0/23", "range_start": start, "range_end": end});
        let ranges = [
            range("10.0.0.254", "10.0.1.1"),
            range("10.0.1.0", "10.0.1.0"),
        ];
        let both = network("rdma-ipam", json!({"ipRanges": ranges}));
        let status = place.call("STATUS", &c("x"), &both);
        assert_eq!(status.ok(), served, "{status:?}");
        assert_eq!(place.add(&c("f"), &both).ok(), served, "{first}");
    }
}
