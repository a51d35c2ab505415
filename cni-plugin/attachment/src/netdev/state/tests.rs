//! What is said of a netdev that is not as it was before its pod, and what its record is.

use super::*;

fn list(texts: &[&str]) -> Entries {
    let texts = texts.iter();
    texts
        .map(|text| ((*text).to_owned(), String::new()))
        .collect()
}

fn text(text: &str) -> Entries {
    map(&[("", text)])
}

fn map(entries: &[(&str, &str)]) -> Entries {
    let entries = entries.iter();
    let owned = entries.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    owned.collect()
}

/// A netdev with something of everything.
fn before() -> State {
    let values = [
        (ALTNAME, list(&["enp1s0"])),
        (MAC, text("02:00:00:00:00:07")),
        ("IPoIB mode", map(&[("2", "0100")])),
        ("mtu", text("9000")),
        ("txqueuelen", text("1000")),
        ("alias", text("")),
        ("flags", text("4096")),
        ("sysctl", map(&[("ipv4/conf/rp_filter", "2")])),
        ("up", text("true")),
        (ADDRESS, list(&["10.0.0.1/24", "10.0.0.2/24"])),
        (NEIGHBOUR, list(&["10.0.0.254 at 02:00:00:00:00:01"])),
        (ROUTE, list(&["10.9.0.0/16 via 10.0.0.254"])),
        (RULE, list(&["7: from 10.0.0.1/32 lookup 7"])),
    ];
    State(values.map(|(key, value)| (key.to_owned(), value)).into())
}

fn differences(before: &State, now: &State, expired: &[String]) -> Vec<String> {
    let of = |attribute: &Attribute| {
        let (before, now) = (before.entries(attribute.key), now.entries(attribute.key));
        attribute.differences(before, now, expired)
    };
    all().flat_map(of).collect()
}

/// What is said when one value is another now; none for one that is gone.
fn said(key: &str, value: Option<Entries>) -> Vec<String> {
    let before = before();
    let mut now = before.clone();
    now.0.remove(key);
    now.0.extend(value.map(|value| (key.to_owned(), value)));
    differences(&before, &now, &[])
}

#[test]
fn nothing_is_said_of_a_netdev_that_is_as_it_was() {
    assert_eq!(differences(&before(), &before(), &[]), [""; 0]);
}

/// A new row of the tables is missing above until it is there.
#[test]
fn each_attribute_that_differs_is_named() {
    for attribute in all() {
        let key = attribute.key;
        let changed = |(name, _): &(String, String)| (name.clone(), "77".to_owned());
        let value = before().entries(key).iter().map(changed).collect();
        let said = said(key, Some(value).filter(|_| !attribute.is_item()));
        assert!(!said.is_empty(), "{key}");
        assert!(said.iter().all(|said| said.starts_with(key)), "{said:?}");
    }
}

#[test]
fn both_values_are_named() {
    for (key, value, expected) in [
        ("mtu", Some(text("1500")), "mtu is 1500, was 9000"),
        ("up", None, "up is unreadable, was true"),
        (
            "sysctl",
            Some(map(&[("ipv4/conf/rp_filter", "0")])),
            "sysctl ipv4/conf/rp_filter is 0, was 2",
        ),
        (
            "sysctl",
            None,
            "sysctl ipv4/conf/rp_filter is unreadable, was 2",
        ),
        (
            ADDRESS,
            Some(list(&["10.0.0.1/24"])),
            "address 10.0.0.2/24 did not come back",
        ),
    ] {
        assert_eq!(said(key, value), [expected]);
    }
}

/// The host may have added an address or a route meanwhile.
#[test]
fn what_is_new_on_the_host_is_no_difference() {
    for (key, value) in [
        (
            ADDRESS,
            list(&["10.0.0.3/24", "10.0.0.1/24", "10.0.0.2/24"]),
        ),
        (
            ROUTE,
            list(&["10.9.0.0/16 via 10.0.0.254", "default via 10.0.0.253"]),
        ),
    ] {
        assert_eq!(said(key, Some(value)), [""; 0], "{key}");
    }
}

/// Of InfiniBand the queue pair before the port's GUID is another after each move.
#[test]
fn the_queue_pair_of_an_infiniband_address_is_no_difference() {
    let address = |queue_pair: &str| {
        let mut state = State::default();
        let guid = "fe:80:00:00:00:00:00:00:00:11:22:33:44:55:66:77";
        state.set(MAC, text(&format!("{queue_pair}:{guid}")));
        state
    };
    let (before, now) = (address("00:00:01:4b"), address("00:00:02:99"));
    assert_eq!(differences(&before, &now, &[]), [""; 0]);
}

#[test]
fn an_address_whose_lifetime_ended_is_not_missed() {
    let mut now = before();
    now.0.remove(ADDRESS);
    let expired = ["10.0.0.1/24".to_owned()];
    assert_eq!(
        differences(&before(), &now, &expired),
        ["address 10.0.0.2/24 did not come back"]
    );
}

#[test]
fn what_a_record_does_not_say_is_no_difference() {
    let mut now = before();
    now.0.retain(|key, _| key != ALTNAME);
    assert_eq!(differences(&State::default(), &now, &[]), [""; 0]);
}

#[test]
fn a_record_is_read_as_it_was_written_and_nothing_else_is() {
    let written = serde_json::to_string(&before()).unwrap();
    let read: State = serde_json::from_str(&written).unwrap();
    assert_eq!(read, before());
    for damaged in [r#"{"colour": []}"#, r#"{"mtu": "9000"}"#, r#"{"": []}"#] {
        assert!(serde_json::from_str::<State>(damaged).is_err(), "{damaged}");
    }
}
