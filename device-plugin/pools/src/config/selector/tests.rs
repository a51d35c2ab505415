//! Selectors against HCAs.

use std::collections::BTreeSet;

use super::*;
use crate::config::{Format, parse};
use crate::example::{infiniband, virtual_function};

/// The selector that our own format reads from these words.
fn selector(words: &str) -> Selector {
    let text = format!(
        "version: 1\npools:\n- resource: rdma/a\n  mode: shared\n  select: {{ {words} }}\n"
    );
    let mut config = parse(&text).unwrap_or_else(|problems| panic!("{words}: {problems}"));
    assert_eq!(config.format, Format::Native);
    config.pools.remove(0).selectors.remove(0)
}

fn is_match(selector: &Selector, hca: &Hca) -> bool {
    selector.matches(hca) == Match::Yes
}

#[test]
fn each_criterion_takes_and_refuses() {
    // Words, whether the VF matches, whether the InfiniBand HCA matches.
    let cases = [
        ("vendors: [15b3]", true, true),
        ("vendors: [8086]", false, false),
        ("vendors: [8086, 15b3]", true, true),
        ("deviceIDs: [101e]", true, false),
        ("drivers: [mlx5_core]", true, false),
        ("drivers: [\"mlx?_core\"]", true, true),
        ("ifNames: [ens1f0v3]", true, false),
        ("ifNames: [\"ens*\"]", true, false),
        ("linkTypes: [ether]", true, false),
        ("linkTypes: [infiniband]", false, true),
        ("linkTypes: [ether, infiniband]", true, true),
        ("pciAddresses: [\"0000:3b:00.5\"]", true, false),
        ("acpiIndexes: [\"7\"]", true, false),
        ("pfNames: [ens1f0np0]", true, false),
        ("pfNames: [\"ens1f0np0#0-3\"]", true, false),
        ("pfNames: [\"ens1f0np0#0-2,4\"]", false, false),
        ("rootDevices: [\"0000:3b:00.0#3\"]", true, false),
        // A physical function is its own root, and has no number.
        ("rootDevices: [\"0000:5e:00.0\"]", false, true),
        ("rootDevices: [\"0000:5e:00.0#0-7\"]", false, false),
        ("pKeys: [\"0xffff\"]", true, true),
        ("pKeys: [\"0x8003\"]", false, true),
        ("rdmaDevices: [mlx5_5]", true, false),
        ("rdmaDevices: [\"*\"]", true, true),
        ("guids: [\"5054:00ff:fe00:0005\"]", true, false),
        ("guids: [505400fffe0000a5]", true, false),
        ("guids: [\"506b*\"]", false, true),
        ("ports: [1]", true, true),
        ("ports: [2]", false, true),
        ("numaNodes: [0-3]", true, false),
        ("numaNodes: [0]", false, false),
        ("linkSpeed: [\">=100G\"]", true, false),
        ("linkSpeed: [\"40G-56G\"]", false, true),
        ("linkSpeed: [\"<=40G\", \"1T\"]", false, true),
        ("firmware: [\"28.*\"]", true, false),
        ("boardIDs: [MT_1090111019]", false, true),
        ("functions: [vf]", true, false),
        ("functions: [pf, sf]", false, true),
        ("functions: [software]", false, false),
        ("vendors: [15b3], not: { functions: [vf] }", false, true),
        (
            "vendors: [15b3], not: [{ ports: [2] }, { numaNodes: [1] }]",
            false,
            false,
        ),
        // Two criteria of one HCA.
        ("functions: [vf], vendors: [8086]", false, false),
    ];
    for Key { name, .. } in KEYS {
        let taken = cases
            .iter()
            .any(|(words, vf, ib)| words.starts_with(name) && (*vf || *ib));
        let refused = cases
            .iter()
            .any(|(words, vf, ib)| words.starts_with(name) && !(*vf && *ib));
        assert!(taken && refused, "{name} is not tried");
    }
    for (words, vf, ib) in cases {
        let selector = selector(words);
        assert_eq!(is_match(&selector, &virtual_function()), vf, "{words}: VF");
        assert_eq!(
            is_match(&selector, &infiniband()),
            ib,
            "{words}: InfiniBand"
        );
    }
}

/// A key that our format reads and that no criterion matches would select everything.
#[test]
fn every_key_of_our_format_is_a_criterion() {
    let text =
        "version: 1\npools:\n- resource: rdma/a\n  mode: shared\n  select: { qqqqqqqqqqqq: 1 }\n";
    let refusal = parse(text).unwrap_err().to_string();
    let (_, keys) = refusal.split_once("known keys: ").unwrap();
    let read: BTreeSet<&str> = keys.trim().split(", ").collect();
    assert_eq!(read, NAMES.iter().copied().collect());
}

#[test]
fn port_criteria_hold_for_one_and_the_same_port() {
    // Port 1 is fast, port 2 has the partition: no port has both.
    assert!(!is_match(
        &selector("linkSpeed: [56G], pKeys: [\"0x3\"]"),
        &infiniband()
    ));
    assert!(is_match(
        &selector("linkSpeed: [40G], pKeys: [\"0x3\"]"),
        &infiniband()
    ));
    assert!(!is_match(
        &selector("ports: [1], linkSpeed: [40G]"),
        &infiniband()
    ));
}

#[test]
fn any_pf_entry_counts_and_the_first_in_peers_files() {
    let ours = selector("pfNames: [\"ens1f0np0#0\", \"ens1f0np0#3\"]");
    assert!(is_match(&ours, &virtual_function()));
    let theirs = parse(
        r#"{"resourceList": [{"resourceName": "a", "selectors":
        {"isRdma": true, "pfNames": ["ens1f0np0#0", "ENS1F0NP0#3"]}}]}"#,
    );
    let theirs = &theirs.unwrap().pools[0].selectors[0];
    assert!(!is_match(theirs, &virtual_function()));
}

#[test]
fn the_peers_compare_pf_names_without_case_and_nothing_else() {
    let text = |key: &str, word: &str| {
        format!(
            r#"{{"resourceList": [{{"resourceName": "a", "selectors":
            {{"isRdma": true, "{key}": ["{word}"]}}}}]}}"#
        )
    };
    let matches = |key, word| {
        let read = parse(&text(key, word)).unwrap();
        is_match(&read.pools[0].selectors[0], &virtual_function())
    };
    assert!(matches("pfNames", "ENS1F0NP0"));
    assert!(matches("rootDevices", "0000:3B:00.0"));
    assert!(!matches("pciAddresses", "0000:3B:00.5"));
    assert!(!matches("vendors", "15B3"));
}

#[test]
fn a_mismatch_names_criterion_wanted_and_found() {
    let cases = [
        (
            "vendors: [8086, 1077]",
            "vendors: wanted 8086 or 1077, found 15b3",
        ),
        ("ifNames: [ib0]", "ifNames: wanted ib0, found ens1f0v3"),
        (
            "pfNames: [\"ens1f0np0#0-2\"]",
            "pfNames: wanted ens1f0np0#0-2, found ens1f0np0#3",
        ),
        ("functions: [pf]", "functions: wanted pf, found vf"),
        ("numaNodes: [0]", "numaNodes: wanted 0, found 1"),
        (
            "linkSpeed: [\">=200G\"]",
            "linkSpeed: wanted >=200G, found 100G",
        ),
        (
            "not: { functions: [vf] }",
            "excluded by \"not\": functions: vf",
        ),
    ];
    for (words, expected) in cases {
        let mismatch = selector(words).why_not(&virtual_function());
        assert_eq!(mismatch.as_deref(), Some(expected));
    }
    let none = selector("ifNames: [ib0]").why_not(&infiniband());
    assert_eq!(none.as_deref(), Some("ifNames: wanted ib0, found none"));
}

#[test]
fn speeds_are_written_as_people_do() {
    for (text, low, high) in [
        ("100G", 100_000, 100_000),
        ("2500M", 2_500, 2_500),
        ("1T", 1_000_000, 1_000_000),
        (" 100G - 400 Gb/s ", 100_000, 400_000),
        (">=200G", 200_000, u32::MAX),
        ("<=40Gbit/s", 0, 40_000),
    ] {
        assert_eq!(
            speed_range(text),
            Some(RangeSet::from_to(low, high)),
            "{text}"
        );
    }
    for text in [
        "",
        "100",
        "G",
        "-1G",
        "99999999999T",
        "1.5G",
        ">=",
        "2G-1G",
        "1G-",
    ] {
        assert_eq!(speed_range(text), None, "{text:?}");
    }
}
