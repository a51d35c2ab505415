use super::super::tests::{Case, prove};
use super::*;
use crate::verdict::Verdict::{Fail, NotApplicable, Pass, Unknown, Warn};

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn set(arp_ignore: u8, arp_announce: u8, rp_filter: u8) -> Settings {
    Settings {
        arp_ignore: Some(arp_ignore),
        arp_announce: Some(arp_announce),
        rp_filter: Some(rp_filter),
    }
}

fn rail(number: u8) -> Rail {
    Rail {
        netdev: format!("rail{number}"),
        addresses: vec![format!("10.0.0.{number}/16").parse().unwrap()],
        settings: set(1, 2, 2),
    }
}

/// A pod with two rails in one subnet, made right.
fn good() -> Facts {
    let rule = |number: u8| ip(&format!("10.0.0.{number}"));
    Facts {
        in_pod: true,
        rails: vec![rail(1), rail(2)],
        all: set(0, 0, 0),
        elsewhere: false,
        uplinks: vec!["eth0".to_owned()],
        rules: Some(vec![rule(1), rule(2)]),
    }
}

fn with(change: impl FnOnce(&mut Facts)) -> Facts {
    let mut facts = good();
    change(&mut facts);
    facts
}

fn a01() -> Vec<Case<Facts>> {
    let own_subnets =
        || with(|facts| facts.rails[1].addresses = vec!["10.1.0.2/16".parse().unwrap()]);
    vec![
        ("A01", good(), Pass, ""),
        (
            "A01",
            with(|f| f.rails[1].settings.arp_ignore = Some(0)),
            Warn,
            "other rails' addresses",
        ),
        (
            "A01",
            with(|f| f.rails[1].settings.arp_ignore = None),
            Unknown,
            "",
        ),
        ("A01", own_subnets(), NotApplicable, ""),
    ]
}

fn a02() -> Vec<Case<Facts>> {
    vec![
        ("A02", good(), Pass, ""),
        (
            "A02",
            with(|f| f.rails[1].settings.arp_announce = Some(1)),
            Warn,
            "neighbours then learn",
        ),
    ]
}

fn a03() -> Vec<Case<Facts>> {
    vec![
        ("A03", good(), Pass, ""),
        (
            "A03",
            with(|f| f.rails[1].settings.rp_filter = Some(1)),
            Warn,
            "strict",
        ),
        (
            "A03",
            with(|f| {
                f.all.rp_filter = Some(1);
                f.rails[1].settings.rp_filter = Some(0);
            }),
            Warn,
            "strict",
        ),
        ("A03", with(|f| f.rails.truncate(1)), NotApplicable, ""),
        ("A03", with(|f| f.elsewhere = true), Unknown, "namespace"),
    ]
}

fn a04() -> Vec<Case<Facts>> {
    vec![]
}

fn a05() -> Vec<Case<Facts>> {
    vec![
        ("A05", good(), Pass, ""),
        (
            "A05",
            with(|f| f.rules = Some(Vec::new())),
            Warn,
            "no rule for 10.0.0.",
        ),
        ("A05", with(|f| f.rules = None), Unknown, ""),
    ]
}

fn a06() -> Vec<Case<Facts>> {
    vec![
        ("A06", good(), Pass, ""),
        (
            "A06",
            with(|f| f.uplinks.push("rail1".to_owned())),
            Fail,
            "rail1 carries it",
        ),
        ("A06", with(|f| f.in_pod = false), NotApplicable, "--pod"),
    ]
}

fn a07() -> Vec<Case<Facts>> {
    vec![]
}

fn a08() -> Vec<Case<Facts>> {
    vec![]
}

#[test]
fn each_check_says_what_is_wrong() {
    let cases = [a01(), a02(), a03(), a04(), a05(), a06(), a07(), a08()];
    prove(CHECKS, &cases.concat());
}

#[test]
fn a_strict_filter_for_all_wins_over_a_loose_one() {
    assert_eq!(effective(Some(1), Some(0)), Some(1));
    assert_eq!(effective(Some(1), Some(2)), Some(2));
    assert_eq!(effective(Some(0), None), None);
}
