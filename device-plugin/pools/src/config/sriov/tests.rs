//! Files of the SR-IOV network device plugin: what each means here.

use super::*;
use crate::config::selector::Match;
use crate::config::{Defaults, parse, parse_with};

fn one(entry: &str) -> String {
    format!(r#"{{"resourceList": [{entry}]}}"#)
}

fn with(selectors: &str) -> String {
    one(&format!(
        r#"{{"resourceName": "a", "selectors": {selectors}}}"#
    ))
}

fn aux(selectors: &str) -> String {
    one(&format!(
        r#"{{"resourceName": "a", "deviceType": "auxNetDevice", "selectors": {selectors}}}"#
    ))
}

/// The resources with the criteria of each alternative, without the function kinds that follow
/// from the device type; and the warnings.
fn read(text: &str) -> (Vec<(String, Vec<String>)>, Vec<String>) {
    let config = parse(text).unwrap_or_else(|problems| panic!("{text}: {problems}"));
    assert_eq!(config.format, Format::Sriov);
    let pools = config.pools.iter().map(|pool| {
        assert!(matches!(pool.sharing, Sharing::Exclusive { .. }));
        assert_eq!(pool.exclude, Exclude::IN_USE);
        let plain = |selector: &Selector| selector.clone().without("functions").to_string();
        (
            pool.resource.to_string(),
            pool.selectors.iter().map(plain).collect(),
        )
    });
    (pools.collect(), config.warnings)
}

/// A text; for each resource its name and the criteria of each alternative; how many warnings.
type Meant<'a> = (String, Vec<(&'a str, Vec<&'a str>)>, usize);

fn check_all(cases: &[Meant<'_>]) {
    for (text, expected, warnings) in cases {
        let (pools, warned) = read(text);
        let plain: Vec<(&str, Vec<&str>)> = pools
            .iter()
            .map(|(name, all)| (name.as_str(), all.iter().map(String::as_str).collect()))
            .collect();
        assert_eq!(plain, *expected, "{text}");
        assert_eq!(warned.len(), *warnings, "{text}: {warned:?}");
    }
}

#[test]
fn selectors_are_read() {
    check_all(&[
        // Every selector of a netDevice.
        (
            with(
                r#"{"vendors": ["15b3"], "devices": ["1018", "101e"], "drivers": ["mlx5_core"],
                "pciAddresses": ["0000:3b:00.2"], "acpiIndexes": ["101"], "pfNames": ["ens1f0#0-3,7"],
                "rootDevices": ["0000:3b:00.0"], "linkTypes": ["ether"], "pKeys": ["0x8001"],
                "isRdma": true}"#,
            ),
            vec![(
                "intel.com/a",
                vec![
                    "pciAddresses: 0000:3b:00.2; vendors: 15b3; deviceIDs: 1018 or 101e; drivers: \
                     mlx5_core; acpiIndexes: 101; pfNames: ens1f0#0-3,7; rootDevices: 0000:3b:00.0; \
                     linkTypes: ether; pKeys: 0x0001",
                ],
            )],
            0,
        ),
        // All RDMA functions.
        (
            with(r#"{"isRdma": true}"#),
            vec![("intel.com/a", vec![""])],
            0,
        ),
        // Alternatives, in order.
        (
            with(
                r#"[{"vendors": ["15b3"], "isRdma": true}, {"vendors": ["8086"], "isRdma": true}]"#,
            ),
            vec![("intel.com/a", vec!["vendors: 15b3", "vendors: 8086"])],
            0,
        ),
    ]);
}

#[test]
fn resources_have_their_names() {
    check_all(&[
        // Prefixes: own, null, empty.
        (
            one(
                r#"{"resourceName": "a", "resourcePrefix": "nvidia.com", "selectors": {"isRdma": true}},
                {"resourceName": "b", "resourcePrefix": null, "selectors": {"isRdma": true}},
                {"resourceName": "c", "resourcePrefix": "", "selectors": {"isRdma": true}}"#,
            ),
            vec![
                ("nvidia.com/a", vec![""]),
                ("intel.com/b", vec![""]),
                ("intel.com/c", vec![""]),
            ],
            0,
        ),
        // A hyphen in the name, whatever that plugin's documentation says of it.
        (
            one(r#"{"resourceName": "mlnx-sriov_1", "selectors": {"isRdma": true}}"#),
            vec![("intel.com/mlnx-sriov_1", vec![""])],
            0,
        ),
        // One name under two prefixes.
        (
            one(
                r#"{"resourceName": "a", "resourcePrefix": "x.io", "selectors": {"isRdma": true}},
                {"resourceName": "a", "resourcePrefix": "y.io", "selectors": {"isRdma": true}}"#,
            ),
            vec![("x.io/a", vec![""]), ("y.io/a", vec![""])],
            0,
        ),
    ]);
}

#[test]
fn device_types_decide_what_is_applied() {
    check_all(&[
        // The device type may be said, also as null.
        (
            one(
                r#"{"resourceName": "a", "deviceType": "netDevice", "selectors": {"isRdma": true}},
                {"resourceName": "b", "deviceType": null, "selectors": {"isRdma": true}}"#,
            ),
            vec![("intel.com/a", vec![""]), ("intel.com/b", vec![""])],
            0,
        ),
        // Scalable functions.
        (
            aux(r#"{"auxTypes": ["sf"], "pfNames": ["ens1f0#88-95"], "isRdma": true}"#),
            vec![("intel.com/a", vec!["pfNames: ens1f0#88-95"])],
            0,
        ),
        // What that plugin does not apply to them is not applied here.
        (
            aux(r#"{"auxTypes": ["sf"], "pciAddresses": ["0000:3b:00.0"], "isRdma": true}"#),
            vec![("intel.com/a", vec![""])],
            1,
        ),
        // auxTypes on a netDevice means nothing.
        (
            with(r#"{"auxTypes": ["sf"], "isRdma": true}"#),
            vec![("intel.com/a", vec![""])],
            1,
        ),
    ]);
}

#[test]
fn keys_are_read_as_go_reads_them() {
    check_all(&[
        // Keys in another case; the Go field isRdma has no tag of its own in old releases.
        (
            r#"{"ResourceList": [{"RESOURCENAME": "a", "Selectors": {"IsRdma": true, "PFNames": ["x"]}}]}"#
                .into(),
            vec![("intel.com/a", vec!["pfNames: x"])],
            0,
        ),
        // Lists that are null or empty impose nothing.
        (
            with(r#"{"vendors": null, "devices": [], "isRdma": true}"#),
            vec![("intel.com/a", vec![""])],
            0,
        ),
        // Later keys win; null leaves a scalar as it was.
        (
            with(r#"{"isRdma": true, "isRdma": null, "vendors": ["1"], "vendors": ["15b3"]}"#),
            vec![("intel.com/a", vec!["vendors: 15b3"])],
            0,
        ),
        // Unknown keys at each level.
        (
            r#"{"x": 1, "resourceList": [{"resourceName": "a", "y": 1,
                "selectors": {"isRdma": true, "vendor": ["15b3"]}}]}"#
                .into(),
            vec![("intel.com/a", vec![""])],
            3,
        ),
    ]);
}

#[test]
fn numbers_that_cannot_be_read_match_nothing() {
    check_all(&[
        // Ranges that cannot be read match nothing from there on.
        (
            with(r#"{"pfNames": ["ens1f0#0-1,x,3"], "isRdma": true}"#),
            vec![("intel.com/a", vec!["pfNames: ens1f0#0-1"])],
            1,
        ),
        (
            with(r#"{"rootDevices": ["0000:3b:00.0#5-2"], "isRdma": true}"#),
            vec![("intel.com/a", vec!["rootDevices: 0000:3b:00.0#"])],
            1,
        ),
        // A range that runs backwards is empty, and what follows counts.
        (
            with(r#"{"pfNames": ["ens1f0#3-1,5"], "isRdma": true}"#),
            vec![("intel.com/a", vec!["pfNames: ens1f0#5"])],
            1,
        ),
        // A space makes a part no number.
        (
            with(r#"{"pfNames": ["ens1f0#0, 3"], "isRdma": true}"#),
            vec![("intel.com/a", vec!["pfNames: ens1f0#0"])],
            1,
        ),
        (
            with(r#"{"pfNames": ["ens1f0#0#1"], "isRdma": true}"#),
            vec![("intel.com/a", vec!["pfNames: ens1f0#"])],
            1,
        ),
        // A word that is no partition key matches nothing, the others of the list count.
        (
            with(r#"{"isRdma": true, "pKeys": ["0xfffff", "0x8001"]}"#),
            vec![("intel.com/a", vec!["pKeys: 0x0000 or 0x0001"])],
            1,
        ),
        (
            with(r#"{"isRdma": true, "pKeys": ["none"]}"#),
            vec![("intel.com/a", vec!["pKeys: 0x0000"])],
            1,
        ),
    ]);
}

#[test]
fn what_is_odd_is_read_with_a_warning() {
    check_all(&[
        // Resources without RDMA stay with that plugin, whatever else is in them.
        (
            one(
                r#"{"resourceName": "dpdk", "selectors": {"drivers": ["vfio-pci"], "ddpProfiles": ["x"]}},
                {"resourceName": "fec", "deviceType": "accelerator"},
                {"resourceName": "vdpa", "selectors": [{"vdpaType": "vhost"}]},
                {"resourceName": "a", "selectors": {"isRdma": true}}"#,
            ),
            vec![("intel.com/a", vec![""])],
            3,
        ),
        // Two networks in one pool are legal and odd.
        (
            with(r#"{"linkTypes": ["ether", "infiniband"], "isRdma": true}"#),
            vec![("intel.com/a", vec!["linkTypes: ether or infiniband"])],
            1,
        ),
    ]);
}

/// Each text is refused, and the refusal contains the words.
fn refused_with(cases: &[(String, &str)]) {
    for (text, expected) in cases {
        let problems = parse(text)
            .map(|config| panic!("{text}: {config:?}"))
            .unwrap_err();
        assert!(
            problems.to_string().contains(expected),
            "{text}: {problems}"
        );
    }
}

#[test]
fn a_file_of_another_form_is_refused() {
    refused_with(&[
        (r#"{"resourceList": []}"#.into(), "resourceList is empty"),
        (r#"{"resourceList": null}"#.into(), "resourceList is empty"),
        (
            r#"{"resourceList": "x"}"#.into(),
            "resourceList: expected a list",
        ),
        (
            r#"{"resourceList": [1]}"#.into(),
            "resourceList[0]: expected an object",
        ),
        (r#"{"resourceList": [}"#.into(), "not valid JSON"),
        (
            one(r#"{"resourceName": "a"}"#),
            "resourceList[0].selectors is missing",
        ),
        (
            one(r#"{"resourceName": "a", "selectors": null}"#),
            "selectors is missing",
        ),
        (with("[]"), "is an empty list"),
        (with("3"), "resourceList[0].selectors: expected an object"),
        (with(r#"["x"]"#), "selectors[0]: expected an object"),
        (with(r#"{"isRdma": "true"}"#), "expected true or false"),
        (
            with(r#"{"isRdma": true, "vendors": "15b3"}"#),
            "vendors: expected a list",
        ),
        (
            one(
                r#"{"resourceName": "a", "additionalInfo": {"*": 1}, "selectors": {"isRdma": true}}"#,
            ),
            "additionalInfo.*: expected an object",
        ),
    ]);
}

#[test]
fn a_resource_name_that_kubernetes_refuses_is_refused() {
    refused_with(&[
        (
            one(r#"{"selectors": {"isRdma": true}}"#),
            "resourceName is missing",
        ),
        (
            one(r#"{"resourceName": "a.b", "selectors": {"isRdma": true}}"#),
            "character '.'",
        ),
        (
            one(r#"{"resourceName": "a b", "selectors": {"isRdma": true}}"#),
            "character ' '",
        ),
        (
            one(r#"{"resourceName": "a-", "selectors": {"isRdma": true}}"#),
            "begins and ends",
        ),
        (
            one(r#"{"resourceName": "a", "resourcePrefix": "x_y", "selectors": {"isRdma": true}}"#),
            "character '_' in the prefix",
        ),
        (
            one(r#"{"resourceName": "a", "selectors": {"isRdma": true}},
                {"resourceName": "a", "selectors": {"isRdma": true}}"#),
            "intel.com/a is configured twice",
        ),
    ]);
}

#[test]
fn what_is_not_served_here_is_refused_by_name() {
    refused_with(&[
        (with("{}"), "no resource of this file has RDMA"),
        (
            with(r#"{"isRdma": false}"#),
            "no resource of this file has RDMA",
        ),
        (
            with(r#"[{"isRdma": true}, {"vendors": ["8086"]}]"#),
            "resourceList[0].selectors[1]: isRdma is not true",
        ),
        (
            with(r#"[{"isRdma": true}, {"vdpaType": "vhost"}]"#),
            "vdpaType \"vhost\" is not served",
        ),
        (
            with(r#"{"isRdma": true, "vdpaType": "virtio"}"#),
            "vdpaType",
        ),
        (
            with(r#"{"isRdma": true, "ddpProfiles": ["GTPv1-C/U"]}"#),
            "ddpProfiles are not read",
        ),
        (
            one(r#"{"resourceName": "a", "deviceType": "accelerator", "selectors": {}}"#),
            "no resource of this file has RDMA",
        ),
        (
            one(
                r#"{"resourceName": "a", "deviceType": "NetDevice", "selectors": {"isRdma": true}}"#,
            ),
            "\"NetDevice\" is unknown",
        ),
        (aux(r#"{"isRdma": true}"#), "auxTypes is missing"),
        (
            aux(r#"{"isRdma": true, "auxTypes": ["eth"]}"#),
            "auxTypes \"eth\" is unknown",
        ),
    ]);
}

#[test]
fn an_empty_acpi_index_asks_for_functions_without_one() {
    let selector = |text: &str| parse(text).unwrap().pools[0].selectors[0].clone();
    let with_index = crate::example::virtual_function();
    let mut without = with_index.clone();
    without.pci.as_mut().unwrap().acpi_index = None;
    let none = selector(&with(r#"{"acpiIndexes": [""], "isRdma": true}"#));
    assert_eq!(none.matches(&without), Match::Yes);
    assert_eq!(none.matches(&with_index), Match::No);
    let seven = selector(&with(r#"{"acpiIndexes": ["7"], "isRdma": true}"#));
    assert_eq!(seven.matches(&with_index), Match::Yes);
    assert_eq!(seven.matches(&without), Match::No);
}

#[test]
fn a_file_with_one_wrong_resource_is_refused() {
    let problems = parse(&one(
        r#"{"resourceName": "a", "selectors": {"isRdma": true, "vendors": "15b3"}},
        {"resourceName": "b", "selectors": {"isRdma": true}}"#,
    ))
    .unwrap_err();
    assert_eq!(problems.iter().count(), 1, "{problems}");
    assert!(problems.to_string().contains("vendors: expected a list"));
}

#[test]
fn errors_of_all_resources_and_warnings_are_reported_at_once() {
    let problems = parse(&one(r#"{"resourceName": 1, "selectors": {"isRdma": true}},
        {"resourceName": "", "deviceType": "x", "selectors":
        [{"isRdma": true, "linkTypes": ["IB"]}, {}]}"#))
    .unwrap_err();
    assert_eq!(problems.iter().count(), 3, "{problems}");
}

#[test]
fn the_kind_of_function_follows_from_the_device_type() {
    let functions = |text: &str| parse(text).unwrap().pools[0].selectors[0].to_string();
    assert_eq!(
        functions(&with(r#"{"isRdma": true}"#)),
        "functions: pf or vf"
    );
    assert_eq!(
        functions(&aux(r#"{"isRdma": true, "auxTypes": ["sf"]}"#)),
        "functions: sf"
    );
}

#[test]
fn further_keys_reach_the_pool() {
    let text = one(r#"{"resourceName": "a", "excludeTopology": true,
        "additionalInfo": {"*": {"rail": "0"}, "0000:3b:00.2": {"rail": "1"}},
        "selectors": {"isRdma": true, "needVhostNet": true}}"#);
    let pool = &parse(&text).unwrap().pools[0];
    assert!(pool.exclude_topology);
    assert_eq!(pool.extra_nodes, ["/dev/vhost-net", "/dev/net/tun"]);
    assert_eq!(pool.additional_info["0000:3b:00.2"]["rail"], "1");
    assert_eq!(pool.additional_info["*"]["rail"], "0");
}

#[test]
fn the_command_line_names_the_prefix_and_the_delivery() {
    let defaults = Defaults {
        resource_prefix: "nvidia.com".into(),
        use_cdi: true,
        wait_for: Vec::new(),
    };
    let pool = &parse_with(&with(r#"{"isRdma": true}"#), &defaults)
        .unwrap()
        .pools[0];
    assert_eq!(pool.resource.as_str(), "nvidia.com/a");
    assert_eq!(pool.delivery, crate::config::Delivery::Cdi);
}

proptest::proptest! {
    #[test]
    fn no_text_makes_the_reader_panic(text in "\\PC{0,80}") {
        let _ = parse(&one(&text));
        let _ = parse(&with(&text));
    }
}
