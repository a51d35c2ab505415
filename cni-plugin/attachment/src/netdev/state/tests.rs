//! What of a netdev is written again, and what its record is.

use super::*;

fn entries(entries: &[(&str, &str)]) -> Entries {
    let entries = entries.iter();
    let owned = entries.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    owned.collect()
}

#[test]
fn a_value_is_written_where_it_differs_or_is_not_read() {
    let before = entries(&[("rp_filter", "2"), ("forwarding", "0"), ("tag", "7")]);
    assert!(differing("sysctl", &before, &before).is_empty());
    let now = entries(&[("rp_filter", "0"), ("forwarding", "0"), ("new", "1")]);
    assert_eq!(
        differing("sysctl", &before, &now),
        entries(&[("rp_filter", "2"), ("tag", "7")])
    );
    assert_eq!(differing("sysctl", &before, &[]), before);
    assert!(
        differing("sysctl", &[], &now).is_empty(),
        "a record without it"
    );
}

/// Of InfiniBand the queue pair before the port's GUID is another after each move.
#[test]
fn the_queue_pair_of_an_infiniband_address_is_no_difference() {
    let address = |queue_pair: &str, guid: u8| {
        let address =
            format!("{queue_pair}:fe:80:00:00:00:00:00:00:00:11:22:33:44:55:66:{guid:02x}");
        entries(&[("", address.as_str())])
    };
    let (before, now) = (address("00:00:01:4b", 7), address("00:00:02:99", 7));
    assert!(differing(MAC, &before, &now).is_empty());
    assert_eq!(differing(MAC, &before, &address("00:00:01:4b", 8)), before);
}

#[test]
fn keys_of_rows_are_unique() {
    let mut keys: Vec<&str> = VALUES.iter().chain(ITEMS).map(|row| row.key).collect();
    let rows = keys.len();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), rows);
}

#[test]
fn a_record_is_read_as_it_was_written() {
    let mut state = State::default();
    state.set("mtu", entries(&[("", "9000")]));
    state.set(
        ADDRESS,
        entries(&[("10.0.0.1/24", "00"), ("10.0.0.2/24", "01")]),
    );
    let written = serde_json::to_string(&state).unwrap();
    assert_eq!(serde_json::from_str::<State>(&written).unwrap(), state);
    for damaged in [r#"{"mtu": "9000"}"#, r#"{"mtu": [["9000"]]}"#] {
        assert!(serde_json::from_str::<State>(damaged).is_err(), "{damaged}");
    }
}
