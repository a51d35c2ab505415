//! Files of the RDMA shared device plugin: what each means here.

use std::time::Duration;

use super::*;
use crate::config::{Problems, parse};

/// A selector that chooses something.
const VENDOR: &str = r#""selectors": {"vendors": ["15b3"]}"#;

/// What a file should be read as: for each pool the resource, the units and the selector; then
/// words that its warnings contain.
type Expected<'a> = (&'a [(&'a str, Option<u32>, &'a str)], &'a [&'a str]);

fn one(entry: &str) -> String {
    format!(r#"{{"configList": [{entry}]}}"#)
}

fn check(text: &str, (pools, warnings): Expected<'_>) {
    let config = parse(text).unwrap_or_else(|problems| panic!("{text}: {problems}"));
    assert_eq!(config.format, Format::Rsdp);
    let read: Vec<_> = config
        .pools
        .iter()
        .map(|pool| {
            let Sharing::Pooled { units } = pool.sharing else {
                panic!("{:?}", pool.sharing)
            };
            let selector = pool.selectors[0].clone().without("functions");
            (pool.resource.to_string(), units, selector.to_string())
        })
        .collect();
    let expected: Vec<_> = pools
        .iter()
        .map(|(name, units, words)| (name.to_string(), *units, words.to_string()))
        .collect();
    assert_eq!(read, expected, "{text}");
    assert_eq!(
        config.warnings.len(),
        warnings.len(),
        "{text}: {:?}",
        config.warnings
    );
    for (warning, words) in config.warnings.iter().zip(warnings) {
        assert!(warning.contains(words), "{text}: {warning}");
    }
}

fn check_all(cases: &[(&str, Expected<'_>)]) {
    for (text, expected) in cases {
        check(text, *expected);
    }
}

fn refused(text: &str) -> Problems {
    parse(text)
        .map(|config| panic!("{text}: accepted as {config:?}"))
        .unwrap_err()
}

#[test]
fn every_key_is_read_and_a_prefix_may_be_left_out() {
    check_all(&[
        // Every key, as the plugin's own example writes them.
        (
            &one(
                r#"{"resourceName": "hca_a", "resourcePrefix": "example.com", "rdmaHcaMax": 1000,
                "selectors": {"vendors": ["15b3"], "deviceIDs": ["1017", "101b"],
                "drivers": ["mlx5_core"], "ifNames": ["ens1f0", "ens1f1"], "linkTypes": ["ether"]}}"#,
            ),
            (
                &[(
                    "example.com/hca_a",
                    Some(1000),
                    "ifNames: ens1f0 or ens1f1; vendors: 15b3; deviceIDs: 1017 or 101b; \
                     drivers: mlx5_core; linkTypes: ether",
                )],
                &[],
            ),
        ),
        // The prefix may be absent, null or empty.
        (
            &one(&format!(
                r#"{{"resourceName": "a", "rdmaHcaMax": 5, {VENDOR}}}"#
            )),
            (&[("rdma/a", Some(5), "vendors: 15b3")], &[]),
        ),
        (
            &one(&format!(
                r#"{{"resourceName": "a", "resourcePrefix": null, "rdmaHcaMax": 5, {VENDOR}}}"#
            )),
            (&[("rdma/a", Some(5), "vendors: 15b3")], &[]),
        ),
        (
            &one(&format!(
                r#"{{"resourceName": "a", "resourcePrefix": "", "rdmaHcaMax": 5, {VENDOR}}}"#
            )),
            (&[("rdma/a", Some(5), "vendors: 15b3")], &[]),
        ),
    ]);
}

#[test]
fn devices_are_names_of_netdevs() {
    check_all(&[
        // The old list of names.
        (
            &one(r#"{"resourceName": "a", "rdmaHcaMax": 5, "devices": ["ib0", "ib1"]}"#),
            (
                &[("rdma/a", Some(5), "ifNames: ib0 or ib1")],
                &["devices is deprecated"],
            ),
        ),
        // With a selectors object that says nothing, and with null in its place.
        (
            &one(r#"{"resourceName": "a", "rdmaHcaMax": 5, "devices": ["ib0"], "selectors": {}}"#),
            (&[("rdma/a", Some(5), "ifNames: ib0")], &["deprecated"]),
        ),
        (
            &one(
                r#"{"resourceName": "a", "rdmaHcaMax": 5, "devices": ["ib0"],
                "selectors": {"vendors": [], "ifNames": null}}"#,
            ),
            (&[("rdma/a", Some(5), "ifNames: ib0")], &["deprecated"]),
        ),
        (
            &one(&format!(
                r#"{{"resourceName": "a", "rdmaHcaMax": 5, "devices": [], {VENDOR}}}"#
            )),
            (&[("rdma/a", Some(5), "vendors: 15b3")], &[]),
        ),
        (
            &one(&format!(
                r#"{{"resourceName": "a", "rdmaHcaMax": 5, "devices": null, {VENDOR}}}"#
            )),
            (&[("rdma/a", Some(5), "vendors: 15b3")], &[]),
        ),
    ]);
}

#[test]
fn units_may_be_none_derived_or_too_many() {
    check_all(&[
        // No unit, said so and not said.
        (
            &one(&format!(
                r#"{{"resourceName": "a", "rdmaHcaMax": 0, {VENDOR}}}"#
            )),
            (&[("rdma/a", Some(0), "vendors: 15b3")], &["offers no unit"]),
        ),
        (
            &one(&format!(r#"{{"resourceName": "a", {VENDOR}}}"#)),
            (
                &[("rdma/a", None, "vendors: 15b3")],
                &["derived from the GID table"],
            ),
        ),
        // More than one message holds is lowered; -0 is an integer in Go.
        (
            &one(&format!(
                r#"{{"resourceName": "a", "rdmaHcaMax": 123001, {VENDOR}}}"#
            )),
            (
                &[("rdma/a", Some(123_000), "vendors: 15b3")],
                &["123000 units are offered"],
            ),
        ),
        (
            &one(&format!(
                r#"{{"resourceName": "a", "rdmaHcaMax": 99999999999, {VENDOR}}}"#
            )),
            (
                &[("rdma/a", Some(123_000), "vendors: 15b3")],
                &["123000 units are offered"],
            ),
        ),
    ]);
}

#[test]
fn keys_are_read_as_go_reads_them() {
    check_all(&[
        // Case of keys does not matter, that of values does.
        (
            r#"{"CONFIGLIST": [{"ResourceName": "A", "RDMAHCAMAX": 3, "Selectors": {"DeviceIds": ["1017"]}}]}"#,
            (&[("rdma/A", Some(3), "deviceIDs: 1017")], &[]),
        ),
        // Later keys win; null leaves a scalar as it was.
        (
            &one(&format!(
                r#"{{"resourceName": "a", "resourceName": "b", "rdmaHcaMax": 3, "rdmaHcaMax": null,
                {VENDOR}}}"#
            )),
            (&[("rdma/b", Some(3), "vendors: 15b3")], &[]),
        ),
        (
            &one(r#"{"resourceName": "a", "rdmaHcaMax": 3,
                "selectors": {"vendors": ["15b3"], "vendors": ["1077"]}}"#),
            (&[("rdma/a", Some(3), "vendors: 1077")], &[]),
        ),
        // Unknown keys are ignored, at each level, with a word about it.
        (
            r#"{"logLevel": 3, "configList": [{"resourceName": "a", "rdmaHcaMaxx": 9,
                "rdmaHcaMax": 3, "selectors": {"vendors": ["15b3"], "ifName": ["ib0"]}}]}"#,
            (
                &[("rdma/a", Some(3), "vendors: 15b3")],
                &[
                    "\"logLevel\"",
                    "did you mean \"rdmaHcaMax\"?",
                    "did you mean \"ifNames\"?",
                ],
            ),
        ),
    ]);
}

#[test]
fn one_name_may_stand_under_two_prefixes() {
    check_all(&[
        // One name under two prefixes; order is that of the file.
        (
            &one(&format!(
                r#"{{"resourceName": "z", "resourcePrefix": "b.io", "rdmaHcaMax": 1, {VENDOR}}},
                {{"resourceName": "z", "resourcePrefix": "a.io", "rdmaHcaMax": 2, {VENDOR}}}"#
            )),
            (
                &[
                    ("b.io/z", Some(1), "vendors: 15b3"),
                    ("a.io/z", Some(2), "vendors: 15b3"),
                ],
                &[],
            ),
        ),
    ]);
}

#[test]
fn values_are_compared_as_they_are_written() {
    check(
        &one(
            r#"{"resourceName": "a", "rdmaHcaMax": 1, "selectors": {"vendors": ["0x15b3"],
            "deviceIDs": ["101E"], "drivers": ["mlx5_ib"], "linkTypes": ["IB"]}}"#,
        ),
        (
            &[(
                "rdma/a",
                Some(1),
                "vendors: 0x15b3; deviceIDs: 101E; drivers: mlx5_ib; linkTypes: IB",
            )],
            &[],
        ),
    );
}

#[test]
fn a_pattern_is_a_literal() {
    // Patterns are not patterns there.
    let text = one(r#"{"resourceName": "a", "rdmaHcaMax": 1, "selectors": {"ifNames": ["ens*"]}}"#);
    check(&text, (&[("rdma/a", Some(1), "ifNames: ens*")], &[]));
    let selector = &parse(&text).unwrap().pools[0].selectors[0];
    let literal = Selector::of([("ifNames", vec![Matcher::exact("ens*")])]);
    assert_eq!(selector.clone().without("functions"), literal);
}

fn named(name: &str) -> String {
    one(&format!(
        r#"{{"resourceName": "{name}", "rdmaHcaMax": 1, {VENDOR}}}"#
    ))
}

/// Each text is refused, and the refusal contains the words.
fn refused_with(cases: &[(String, &str)]) {
    for (text, expected) in cases {
        let message = refused(text).to_string();
        assert!(message.contains(expected), "{text}: {message}");
    }
}

#[test]
fn a_file_of_another_form_is_refused() {
    refused_with(&[
        (r#"{"configList": []}"#.into(), "configList is empty"),
        (r#"{"configList": null}"#.into(), "configList is empty"),
        (
            r#"{"configList": {}}"#.into(),
            "configList: expected a list, found an object",
        ),
        (
            r#"{"configList": [3]}"#.into(),
            "configList[0]: expected an object, found the number 3",
        ),
        (r#"{"configList": [{}]"#.into(), "not valid JSON"),
        (r#"{"configList": []} x"#.into(), "not valid JSON"),
        (
            r#"{"configlist": [], "resourceList": []}"#.into(),
            "both configList and resourceList",
        ),
        (
            r#"{"version": 1, "configList": []}"#.into(),
            "together with a peer's list",
        ),
        ("{}".into(), "the format is unknown"),
        ("null".into(), "the format is unknown"),
        ("[]".into(), "the format is unknown"),
    ]);
}

#[test]
fn a_resource_name_that_kubernetes_refuses_is_refused() {
    refused_with(&[
        (named("hca-a"), "character '-'"),
        (named("hca.a"), "character '.'"),
        (named("hca a"), "character ' '"),
        (named("rdma/hca"), "character '/'"),
        (named(""), "resourceName is missing"),
        (named("hca_"), "begins and ends with a letter or digit"),
        (named(&"a".repeat(64)), "at most 63"),
        (
            one(&format!(
                r#"{{"resourceName": "a", "resourcePrefix": "Rdma_x", "rdmaHcaMax": 1, {VENDOR}}}"#
            )),
            "character 'R' in the prefix",
        ),
        (
            one(&format!(
                r#"{{"resourceName": "a", "rdmaHcaMax": 1, {VENDOR}}},
                {{"resourceName": "a", "rdmaHcaMax": 2, {VENDOR}}}"#
            )),
            "resource rdma/a is configured twice",
        ),
    ]);
}

#[test]
fn a_pool_without_selector_or_with_a_wrong_one_is_refused() {
    refused_with(&[
        (
            one(r#"{"resourceName": "a", "rdmaHcaMax": 1}"#),
            "no selector",
        ),
        (
            one(&format!(r#"{{"resourceName": "a", {VENDOR}, {VENDOR}}}"#)),
            "configList[0].selectors: the key is there twice",
        ),
        (
            one(r#"{"resourceName": "a", "rdmaHcaMax": 1, "selectors": {}}"#),
            "no selector",
        ),
        (
            one(r#"{"resourceName": "a", "rdmaHcaMax": 1, "selectors": {"vendors": []}}"#),
            "no selector",
        ),
        (
            one(&format!(
                r#"{{"resourceName": "a", "rdmaHcaMax": 1, "devices": ["ib0"], {VENDOR}}}"#
            )),
            "both devices and selectors",
        ),
        (
            one(r#"{"resourceName": "a", "rdmaHcaMax": 1, "selectors": {"vendors": "15b3"}}"#),
            "configList[0].selectors.vendors: expected a list",
        ),
        (
            one(r#"{"resourceName": "a", "rdmaHcaMax": 1, "selectors": {"vendors": [15]}}"#),
            "selectors.vendors[0]: expected a string, found the number 15",
        ),
    ]);
}

#[test]
fn a_number_that_is_none_is_refused() {
    refused_with(&[
        (
            one(&format!(
                r#"{{"resourceName": "a", "rdmaHcaMax": -1, {VENDOR}}}"#
            )),
            "rdmaHcaMax is -1",
        ),
        (
            one(&format!(
                r#"{{"resourceName": "a", "rdmaHcaMax": "8", {VENDOR}}}"#
            )),
            "configList[0].rdmaHcaMax: expected an integer",
        ),
        (
            one(&format!(
                r#"{{"resourceName": "a", "rdmaHcaMax": 1.5, {VENDOR}}}"#
            )),
            "expected an integer",
        ),
        (
            format!(
                r#"{{"periodicUpdateInterval": -5, "configList": [{{"resourceName": "a", {VENDOR}}}]}}"#
            ),
            "periodicUpdateInterval is -5",
        ),
    ]);
}

#[test]
fn every_problem_of_a_file_is_reported_at_once() {
    let problems = refused(
        r#"{"periodicUpdateInterval": -1, "configList": [
            {"resourceName": "a b", "rdmaHcaMax": -1}, {"resourceName": "c", "rdmaHcaMax": 1}]}"#,
    );
    let words = [
        "periodicUpdateInterval",
        "character ' '",
        "rdmaHcaMax is -1",
        "no selector",
        "no selector",
    ];
    assert_eq!(problems.iter().count(), words.len(), "{problems}");
    for (problem, words) in problems.iter().zip(words) {
        assert!(problem.contains(words), "{problem}");
    }
}

#[test]
fn the_interval_has_a_default_and_can_be_switched_off() {
    let text = |interval: &str| {
        format!(
            r#"{{{interval}"configList": [{{"resourceName": "a", "rdmaHcaMax": 1, "devices": ["x"]}}]}}"#
        )
    };
    let rescan = |interval| parse(&text(interval)).unwrap().rescan;
    assert_eq!(rescan(""), Some(Duration::from_secs(60)));
    assert_eq!(
        rescan(r#""periodicUpdateInterval": null, "#),
        Some(Duration::from_secs(60))
    );
    assert_eq!(
        rescan(r#""periodicUpdateInterval": 300, "#),
        Some(Duration::from_secs(300))
    );
    assert_eq!(rescan(r#""periodicUpdateInterval": 0, "#), None);
    assert_eq!(
        rescan(r#""periodicUpdateInterval": 9223372036854775807, "#),
        Some(Duration::from_secs(86_400))
    );
}

#[test]
fn an_old_vendor_selector_does_not_take_scalable_functions() {
    let functions = |selector: &str| {
        let text = one(&format!(
            r#"{{"resourceName": "a", "rdmaHcaMax": 1, {selector}}}"#
        ));
        parse(&text).unwrap().pools[0].selectors[0].to_string()
    };
    assert!(!functions(r#""selectors": {"vendors": ["15b3"]}"#).contains(" or sf"));
    assert!(functions(r#""selectors": {"ifNames": ["enp8s0f0s88"]}"#).contains(" or sf"));
}

#[test]
fn soft_roce_joins_only_by_its_driver() {
    let functions = |selectors: &str| {
        let text = one(&format!(
            r#"{{"resourceName": "a", "rdmaHcaMax": 1, "selectors": {{{selectors}}}}}"#
        ));
        let selector = parse(&text).unwrap().pools[0].selectors[0].to_string();
        selector.contains("software")
    };
    assert!(!functions(r#""ifNames": ["ens2f0"]"#));
    assert!(!functions(r#""linkTypes": ["ether"]"#));
    assert!(functions(
        r#""ifNames": ["ens2f0"], "drivers": ["rdma_rxe"]"#
    ));
}

#[test]
fn a_file_with_one_wrong_resource_is_refused() {
    let problems = refused(&one(
        r#"{"resourceName": "a-b", "rdmaHcaMax": 1, "devices": ["x"]},
           {"resourceName": "c", "rdmaHcaMax": 1, "devices": ["y"]}"#,
    ));
    assert_eq!(problems.iter().count(), 1, "{problems}");
    assert!(problems.to_string().contains("configList[0]"), "{problems}");
}

#[test]
fn errors_of_all_resources_and_warnings_are_reported_at_once() {
    let problems = refused(&one(
        r#"{"resourceName": 3, "rdmaHcaMax": "x", "selectors": {"vendors": "15b3", "drivers": 1}},
           {"resourceName": "b", "rdmaHcaMax": -1, "selectors": {"linkTypes": ["IB"], "vendor": []}}"#,
    ));
    let errors: Vec<&str> = problems.iter().collect();
    assert_eq!(errors.len(), 2, "{errors:#?}");
    let warnings = &problems.warnings;
    assert_eq!(warnings.len(), 1, "{warnings:#?}");
}

#[test]
fn containers_get_what_that_plugin_gives_and_units_have_no_topology() {
    let text = one(r#"{"resourceName": "a", "rdmaHcaMax": 1, "devices": ["x"]}"#);
    let pool = &parse(&text).unwrap().pools[0];
    assert_eq!(pool.nodes, crate::config::NodeRule::everything());
    assert!(pool.exclude_topology);
}

proptest::proptest! {
    #[test]
    fn no_text_makes_the_reader_panic(text in "\\PC{0,80}") {
        let _ = parse(&text);
        let _ = parse(&one(&text));
    }
}
