//! What is said of a netdev that is not as it was before its pod.

use super::*;

fn name(text: &str) -> Name {
    text.into()
}

fn message(text: &str) -> Message {
    Message {
        text: text.to_owned(),
        message: String::new(),
    }
}

/// A netdev with something of everything.
fn before() -> Snapshot {
    let mut before = Snapshot {
        name: name("eth1"),
        altnames: vec![name("enp1s0")],
        mtu: 9000,
        tx_queue_length: 1000,
        up: true,
        flags: LinkFlags::Multicast.bits(),
        settings: [("group".to_owned(), 7)].into(),
        broadcast: Some("ffffffffffff".to_owned()),
        token: Some("::7".parse().unwrap()),
        sysctls: [("net/ipv4/conf/rp_filter".to_owned(), "2".to_owned())].into(),
        promiscuity: 1,
        mode: [(1, "04000000".to_owned())].into(),
        addresses: vec![message("10.0.0.1/24"), message("10.0.0.2/24")],
        routes: vec![message("10.9.0.0/16 via 10.0.0.254")],
        rules: vec![message("from 10.0.0.1 lookup 7")],
        neighbours: vec![message("10.0.0.254 lladdr 02:00:00:00:00:01")],
        proxies: vec![message("proxy 10.0.0.9")],
        ..Snapshot::default()
    };
    before.identity.mac = "02:00:00:00:00:07".to_owned();
    before
}

/// What is said when this was changed.
fn said(change: impl FnOnce(&mut Snapshot)) -> Vec<String> {
    let before = before();
    let mut now = before.clone();
    change(&mut now);
    differences(&before, &now, &[])
}

#[test]
fn nothing_is_said_of_a_netdev_that_is_as_it_was() {
    assert_eq!(said(|_| {}), [""; 0]);
}

#[test]
fn a_setting_that_is_not_restored_is_named_with_both_values() {
    type Changed = fn(&mut Snapshot);
    let cases: [(Changed, &str); 13] = [
        (|now| now.mtu = 1500, "mtu is 1500, was 9000"),
        (
            |now| now.identity.mac = "02:00:00:00:00:08".to_owned(),
            "MAC address is 02:00:00:00:00:08, was 02:00:00:00:00:07",
        ),
        (|now| now.up = false, "up is false, was true"),
        (|now| now.tx_queue_length = 1, "txqueuelen is 1, was 1000"),
        (
            |now| now.alias = Some(name("rail")),
            "alias is rail, was none",
        ),
        (
            |now| now.flags = (LinkFlags::Multicast | LinkFlags::Noarp).bits(),
            "flags is LinkFlags(Noarp | Multicast), was LinkFlags(Multicast)",
        ),
        (
            |now| now.settings.extend([("group".to_owned(), 0)]),
            "group is 0, was 7",
        ),
        (
            |now| now.broadcast = None,
            "broadcast address is none, was ffffffffffff",
        ),
        (|now| now.token = None, "token is none, was ::7"),
        (
            |now| now.token = Some("::8".parse().unwrap()),
            "token is ::8, was ::7",
        ),
        (
            |now| now.sysctls.clear(),
            "net/ipv4/conf/rp_filter is unreadable, was 2",
        ),
        (
            |now| {
                let key = "net/ipv4/conf/rp_filter".to_owned();
                now.sysctls.extend([(key, "0".to_owned())]);
            },
            "net/ipv4/conf/rp_filter is 0, was 2",
        ),
        (
            |now| now.mode.extend([(1, "08000000".to_owned())]),
            "the mode of its kind is not as it was",
        ),
    ];
    for (change, expected) in cases {
        assert_eq!(said(change), [expected]);
    }
}

#[test]
fn what_did_not_come_back_is_named_and_what_did_is_not() {
    type Changed = fn(&mut Snapshot);
    let cases: [(Changed, &str); 6] = [
        (
            |now| drop(now.addresses.remove(1)),
            "address 10.0.0.2/24 did not come back",
        ),
        (
            |now| now.routes.clear(),
            "route 10.9.0.0/16 via 10.0.0.254 did not come back",
        ),
        (
            |now| now.rules.clear(),
            "rule from 10.0.0.1 lookup 7 did not come back",
        ),
        (
            |now| now.neighbours.clear(),
            "neighbour 10.0.0.254 lladdr 02:00:00:00:00:01 did not come back",
        ),
        (
            |now| now.proxies.clear(),
            "proxy proxy 10.0.0.9 did not come back",
        ),
        (
            |now| now.altnames.clear(),
            "alternative name enp1s0 did not come back",
        ),
    ];
    for (change, expected) in cases {
        assert_eq!(said(change), [expected]);
    }
}

#[test]
fn an_alternative_name_of_the_pod_that_stayed_is_named() {
    assert_eq!(
        said(|now| now.altnames.push(name("evil0"))),
        ["alternative name evil0 is not the host's"]
    );
}

/// The host may have added an address or a route meanwhile: that is its own affair.
#[test]
fn what_is_new_on_the_host_is_no_difference() {
    let added = said(|now| {
        now.addresses.insert(0, message("10.0.0.3/24"));
        now.routes.push(message("default via 10.0.0.253"));
    });
    assert_eq!(added, [""; 0]);
}

#[test]
fn an_address_whose_lifetime_ended_is_not_missed() {
    let before = before();
    let mut now = before.clone();
    now.addresses.clear();
    let expired = [before.addresses[0].clone()];
    assert_eq!(
        differences(&before, &now, &expired),
        ["address 10.0.0.2/24 did not come back"]
    );
}

#[test]
fn promiscuity_that_stayed_is_named() {
    for (users, expected) in [
        (0, None),
        (1, None),
        (
            3,
            Some("promiscuity is 3, was 1: something still listens to all of it"),
        ),
    ] {
        let said = said(|now| now.promiscuity = users);
        assert_eq!(said.first().map(String::as_str), expected, "{users:?}");
    }
}

/// What a kernel did not say is not compared.
#[test]
fn what_a_record_does_not_say_is_no_difference() {
    let mut before = before();
    (before.broadcast, before.token) = (None, None);
    before.settings.clear();
    before.sysctls.clear();
    let now = Snapshot {
        name: before.name.clone(),
        ..self::before()
    };
    assert_eq!(differences(&before, &now, &[]), [""; 0]);
}
