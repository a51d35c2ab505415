//! Our own format: what it means, and what it says when it is wrong.

use super::*;
use crate::config::model::NodeClass;
use crate::config::parse;

const HEAD: &str = "version: 1\npools:\n";

fn pool(lines: &str) -> String {
    format!(
        "{HEAD}- resource: rdma/a\n  {}\n",
        lines.replace('\n', "\n  ")
    )
}

fn shared(lines: &str) -> String {
    pool(&format!("mode: shared\n{lines}"))
}

fn accepted(text: &str) -> Config {
    parse(text).unwrap_or_else(|problems| panic!("{text}: {problems}"))
}

fn first(text: &str) -> PoolConfig {
    accepted(text).pools.remove(0)
}

#[test]
fn a_pool_of_shares_is_shared_over_its_hcas() {
    let read = first(&shared("shares: 16\nselect: { rdmaDevices: [mlx5_0] }"));
    assert_eq!(read.resource.as_str(), "rdma/a");
    assert_eq!(
        read.sharing,
        Sharing::Shares {
            per_hca: Some(16),
            policy: Policy::Spread
        }
    );
    assert_eq!(read.nodes, NodeRule::verbs());
    assert!(read.exclude.is_empty());
    assert!(!read.link_up);
    assert_eq!(
        (read.delivery, read.exclude_topology),
        (Delivery::DeviceSpecs, false)
    );
    assert_eq!(read.selectors[0].to_string(), "rdmaDevices: mlx5_0");
}

#[test]
fn every_choice_of_sharing_has_its_words() {
    let select = "select: { vendors: [15b3] }";
    let cases = [
        (
            "mode: exclusive",
            Sharing::Exclusive {
                policy: Policy::Spread,
            },
        ),
        (
            "mode: exclusive\npolicy: numa",
            Sharing::Exclusive {
                policy: Policy::Numa,
            },
        ),
        (
            "mode: exclusive\npolicy: pack",
            Sharing::Exclusive {
                policy: Policy::Pack,
            },
        ),
        (
            "mode: shared",
            Sharing::Shares {
                per_hca: None,
                policy: Policy::Spread,
            },
        ),
        (
            "mode: shared\npolicy: same-hca\nshares: 4",
            Sharing::Shares {
                per_hca: Some(4),
                policy: Policy::SameHca,
            },
        ),
        (
            "mode: shared\npolicy: all-hcas",
            Sharing::Pooled { units: None },
        ),
        (
            "mode: shared\npolicy: all-hcas\nshares: 1000",
            Sharing::Pooled { units: Some(1000) },
        ),
    ];
    for (lines, expected) in cases {
        assert_eq!(
            first(&pool(&format!("{lines}\n{select}"))).sharing,
            expected,
            "{lines}"
        );
    }
}

#[test]
fn every_selector_is_read() {
    let text = shared(
        "select:\n  vendors: [15B3, 0x1077]\n  deviceIDs: [1017]\n  drivers: [mlx5_*]\n  \
         ifNames: [ens1f0]\n  linkTypes: [ether]\n  pciAddresses: [\"0000:3b:*\"]\n  \
         acpiIndexes: [\"101\"]\n  pfNames: [\"ens2f0#0-3,7\", ens3]\n  \
         rootDevices: [\"0000:5e:00.0#2\"]\n  pKeys: [\"0x8001\"]\n  rdmaDevices: [\"mlx5_[0-3]\"]\n  \
         guids: [\"5054:00FF:fe00:0001\", \"0x505400fffe00*\"]\n  ports: [1]\n  numaNodes: [0-1, \"3\"]\n  \
         linkSpeed: [\">=200G\", \"100G\"]\n  firmware: [\"28.*\"]\n  boardIDs: [\"MT_0000000359\"]\n  \
         functions: [pf, vf]\n  not: { rdmaDevices: [mlx5_bond_0] }",
    );
    assert_eq!(
        first(&text).selectors[0].to_string(),
        "rdmaDevices: mlx5_[0-3]; ifNames: ens1f0; pciAddresses: 0000:3b:*; vendors: 15B3 or 0x1077; \
         deviceIDs: 1017; drivers: mlx5_*; acpiIndexes: 101; guids: 5054:00FF:fe00:0001 or \
         0x505400fffe00*; firmware: 28.*; boardIDs: MT_0000000359; functions: pf or vf; pfNames: \
         ens2f0#0-3,7 or ens3; rootDevices: 0000:5e:00.0#2; numaNodes: 0-1 or 3; linkTypes: ether; \
         ports: 1; linkSpeed: >=200G or 100G; pKeys: 0x8001; not: (rdmaDevices: mlx5_bond_0)"
    );
}

#[test]
fn alternatives_are_a_list() {
    let text =
        shared("select:\n- { vendors: [15b3] }\n- { vendors: [1077], not: [{ ports: [2] }] }");
    assert_eq!(first(&text).selectors.len(), 2);
}

#[test]
fn words_that_other_readers_guess_about_stay_words() {
    // 0123 is no octal number, 1e10 no float, no no boolean.
    let text = shared("select: { vendors: [0123, 1e10], ifNames: [no, 1e3, ~x] }");
    assert_eq!(
        first(&text).selectors[0].to_string(),
        "ifNames: no or 1e3 or ~x; vendors: 0123 or 1e10"
    );
}

#[test]
fn json_is_read_as_well() {
    let text = r#"{"version": 1, "rescanInterval": "5m", "pools": [
        {"resource": "rdma/a", "mode": "exclusive", "select": {"functions": ["vf"]}}]}"#;
    let config = accepted(text);
    assert_eq!(config.format, Format::Native);
    assert_eq!(config.rescan, Some(Duration::from_secs(300)));
    assert_eq!(config.pools[0].exclude, Exclude::IN_USE);
}

#[test]
fn nodes_delivery_and_exclusions_can_be_said() {
    let text = shared(
        "nodes: { required: [uverbs], optional: [rdma_cm, umad] }\ndelivery: cdi\n\
         excludeTopology: true\nexclude: [uplinks]\nlinkUp: true\nselect: { functions: [pf] }",
    );
    let read = first(&text);
    assert!(read.link_up);
    assert_eq!(read.nodes.required, [NodeClass::Uverbs]);
    assert_eq!(read.nodes.optional, [NodeClass::RdmaCm, NodeClass::Umad]);
    assert_eq!(
        (read.delivery, read.exclude_topology),
        (Delivery::Cdi, true)
    );
    assert_eq!(read.exclude, [Exclude::Uplinks]);
    let optional_only = shared("nodes: { optional: [umad] }\nselect: { functions: [pf] }");
    assert_eq!(
        first(&optional_only).nodes.required,
        NodeRule::verbs().required
    );
}

#[test]
fn link_up_may_name_an_mtu() {
    let read = |value: &str| {
        parse(&shared(&format!(
            "linkUp: {value}\nselect: {{ functions: [pf] }}"
        )))
    };
    let pool = |value: &str| read(value).unwrap().pools.remove(0);
    let both = |value: &str| (pool(value).link_up, pool(value).mtu);
    assert_eq!(both("{mtu: 4200}"), (true, Some(4200)));
    assert_eq!(both("true"), (true, None));
    assert_eq!(both("false"), (false, None));
    for (value, words) in [
        ("{mtu: 40}", "between 68 and 65535"),
        ("{mtu: jumbo}", "write true, false or {mtu: NUMBER}"),
        ("{}", "write true, false or {mtu: NUMBER}"),
        (
            "{mtu: 4200, txqueuelen: 1}",
            "write true, false or {mtu: NUMBER}",
        ),
        ("sometimes", "write true, false or {mtu: NUMBER}"),
    ] {
        let refused = read(value).unwrap_err().to_string();
        assert!(refused.contains(words), "{value}: {refused}");
        assert!(refused.contains("line"), "{value}: {refused}");
    }
}

#[test]
fn health_has_defaults_and_times() {
    let text = |health: &str| {
        format!(
            "version: 1\n{health}pools:\n- resource: rdma/a\n  mode: shared\n  select: {{ functions: [pf] }}\n"
        )
    };
    assert_eq!(accepted(&text("")).damping, Damping::default());
    let said =
        "health: { downDelay: 250ms, upDelay: 5s, flaps: 4, flapWindow: 2m, flapHold: 1m }\n";
    assert_eq!(
        accepted(&text(said)).damping,
        Damping {
            down_delay: Duration::from_millis(250),
            up_delay: Duration::from_secs(5),
            flaps: 4,
            flap_window: Duration::from_secs(120),
            flap_hold: Duration::from_secs(60),
        }
    );
}

#[test]
fn mistakes_are_reported_with_line_and_remedy() {
    let select = "select: { functions: [pf] }";
    let cases = [
        ("pools: []".into(), "version is missing"),
        ("version: 2\npools: []".into(), "line 1, column 10: version is 2; this program reads version 1"),
        ("version: one\npools: []".into(), "line 1, column 10: "),
        ("version: 1\n".into(), "missing field `pools`"),
        ("version: 1\npools: []".into(), "line 2, column 8: pools is empty"),
        ("version: 1\nversion: 1\npools: []".into(), "line 2, column 1: duplicate mapping key: version"),
        ("version: 1\npool: []".into(), "line 2, column 1: unknown key \"pool\"; did you mean \"pools\"?"),
        ("version: 1\npools: [".into(), "line 2"),
        ("\tversion: 1".into(), "line 1"),
        (pool(select), "missing field `mode`"),
        (pool("mode: sharde\nselect: { functions: [pf] }"), "line 4, column 9: unknown variant `sharde`"),
        (shared("shares: 0\nselect: { functions: [pf] }"), "line 5, column 11: shares is 0"),
        (shared("shares: -1\nselect: { functions: [pf] }"), "line 5, column 11: shares is -1; give a number between 1 and 50000"),
        (shared("expected: 0\nselect: { functions: [pf] }"), "line 5, column 13: expected is 0; give a number between 1 and 10000"),
        (shared("expected: 99999999999\nselect: { functions: [pf] }"), "expected is 99999999999"),
        (shared("shares: 60000\nselect: { functions: [pf] }"), "between 1 and 50000"),
        (shared("sharess: 3\nselect: { functions: [pf] }"), "unknown key \"sharess\"; did you mean \"shares\"?"),
        (shared("colour: red\nselect: { functions: [pf] }"), "unknown key \"colour\"; known keys: resource"),
        (pool(&format!("mode: exclusive\nshares: 3\n{select}")), "shares requires mode shared"),
        (pool(&format!("mode: exclusive\npolicy: all-hcas\n{select}")), "policy all-hcas requires mode shared"),
        (pool(&format!("mode: exclusive\npolicy: same-hca\n{select}")), "policy same-hca needs several"),
        (shared("policy: random\nselect: { functions: [pf] }"), "unknown variant `random`"),
        (shared(""), "missing field `select`"),
        (shared("select: {}"), "a selector without criteria"),
        (shared("select: []"), "select is empty"),
        (shared("select: [{ functions: [pf] }, {}]"), "a selector without criteria"),
        (shared("select: mlx5_0"), "a selector or a list of selectors"),
        (shared("select: { ifName: [x] }"), "unknown key \"ifName\"; did you mean \"ifNames\"?"),
        (shared("select: { vendors: [mellanox] }"), "\"mellanox\" is not four hex digits"),
        (shared("select: { vendors: [15b3a] }"), "not four hex digits"),
        (shared("select: { linkTypes: [Ethernet] }"), "\"Ethernet\" is unknown; known are ether"),
        (shared("select: { rdmaDevices: [\"mlx5_[\"] }"), "pattern \"mlx5_[\""),
        (shared("select: { pfNames: [\"ens1#3-1\"] }"), "range \"3-1\": runs backwards"),
        (shared("select: { numaNodes: [x] }"), "range \"x\": not a number"),
        (shared("select: { pKeys: [\"0\"] }"), "partition key \"0\""),
        (shared("select: { guids: [\"1234\"] }"), "GUID \"1234\" is not sixteen hex digits"),
        (shared("select: { linkSpeed: [fast] }"), "link speed \"fast\": write 100G"),
        (shared("select: { linkSpeed: [\"400G-100G\"] }"), "link speed"),
        (shared("nodes: { required: [] }\nselect: { functions: [pf] }"), "nodes names no class"),
        (shared("nodes: { required: [uverb] }\nselect: { functions: [pf] }"), "unknown variant `uverb`"),
        (shared("delivery: annotations\nselect: { functions: [pf] }"), "unknown variant `annotations`"),
        (
            "version: 1\npools:\n- resource: hca\n  mode: shared\n  select: { functions: [pf] }\n".into(),
            "line 3, column 13: resource name \"hca\": no \"/\"",
        ),
        (
            "version: 1\npools:\n- &a { resource: rdma/a, mode: shared, select: { functions: [pf] } }\n- *a\n".into(),
            "rdma/a is configured twice",
        ),
        (format!("rescanInterval: 1\n{}", shared(select)), "rescanInterval \"1\": write a number and"),
        (
            format!("health: {{ flaps: 1 }}\n{}", shared(select)),
            "flaps is 1; one loss is not flapping",
        ),
        (format!("health: {{ upDelay: soon }}\n{}", shared(select)), "time \"soon\""),
    ];
    for (text, expected) in cases {
        let problems = parse(&text)
            .map(|config| panic!("{text}: {config:?}"))
            .unwrap_err();
        assert!(
            problems.to_string().contains(expected),
            "{text}---\n{problems}"
        );
    }
}

#[test]
fn what_is_wrong_between_keys_is_reported_for_all_pools_at_once() {
    let text = "version: 1
pools:
- { resource: rdma/a, mode: exclusive, shares: 3, strict: true, select: { functions: [pf] } }
- { resource: rdma/e, mode: shared, select: { functions: [pf] } }
- { resource: rdma/e, mode: shared, select: { functions: [pf] } }
";
    let problems = parse(text).unwrap_err();
    let expected = [
        "line 3, column 15: rdma/a: strict requires binding: late",
        "line 3, column 15: rdma/a: shares requires mode shared",
        "rdma/e is configured twice",
    ];
    let errors: Vec<&str> = problems.iter().collect();
    assert_eq!(errors.len(), expected.len(), "{errors:#?}");
    for (problem, expected) in errors.iter().zip(expected) {
        assert!(problem.contains(expected), "{expected}: {errors:#?}");
    }
}

#[test]
fn a_document_that_explodes_is_refused() {
    let mut text = String::from("version: 1\na: &a [x, x, x, x, x, x, x, x, x]\n");
    for (this, last) in ["b", "c", "d", "e", "f", "g", "h", "i"]
        .iter()
        .zip(["a", "b", "c", "d", "e", "f", "g", "h"])
    {
        text += &format!(
            "{this}: &{this} [{}]\n",
            vec![format!("*{last}"); 9].join(", ")
        );
    }
    assert!(parse(&text).is_err());
}

proptest::proptest! {
    #[test]
    fn no_text_makes_the_reader_panic(text in "\\PC{0,80}", lines in "[ -~\n]{0,80}") {
        let _ = parse(&text);
        let _ = parse(&shared(&lines));
    }
}

proptest::proptest! {
    #[test]
    fn a_time_is_refused_or_the_daemon_can_count_with_it(
        key in 0_usize..5,
        number: u64,
        shift in 0_u32..64,
        unit in "ms|s|m|h",
    ) {
        let time = format!("{}{unit}", number >> shift);
        let keys = ["rescanInterval", "downDelay", "upDelay", "flapWindow", "flapHold"];
        let pool = "pools: [{ resource: rdma/a, mode: shared, select: { vendors: [15b3] } }]";
        let text = match keys[key] {
            "rescanInterval" => format!("version: 1\nrescanInterval: {time}\n{pool}\n"),
            key => format!("version: 1\nhealth: {{ {key}: {time} }}\n{pool}\n"),
        };
        let day = Duration::from_secs(86_400);
        if let Ok(config) = parse(&text) {
            let damping = config.damping;
            let in_bounds = |every| (Duration::from_secs(1)..=day).contains(&every);
            proptest::prop_assert!(config.rescan.is_none_or(in_bounds));
            let times = [damping.down_delay, damping.up_delay, damping.flap_window, damping.flap_hold];
            proptest::prop_assert!(times.iter().all(|time| *time <= day));
        }
    }
}

#[test]
fn absurd_times_are_refused_with_their_line() {
    let pool = "pools: [{ resource: rdma/a, mode: shared, select: { vendors: [15b3] } }]";
    let cases = [
        (
            "rescanInterval: 1ms",
            "line 2, column 17: rescanInterval \"1ms\": give a time between 1s and 24h",
        ),
        ("rescanInterval: 25h", "between 1s and 24h"),
        (
            "health: { upDelay: 5000000000000000h }",
            "time \"5000000000000000h\": give at most 24h",
        ),
        ("health: { flapWindow: 1441m }", "give at most 24h"),
    ];
    for (line, expected) in cases {
        let problems = parse(&format!("version: 1\n{line}\n{pool}\n")).unwrap_err();
        assert!(problems.to_string().contains(expected), "{problems}");
    }
}

#[test]
fn two_names_whose_units_would_have_the_same_ids_are_refused() {
    let pool = |name: &str| {
        format!("- {{ resource: {name}, mode: shared, select: {{ vendors: [15b3] }} }}\n")
    };
    let (a, b) = ("rdma/rail7029", "rdma/rail53432");
    let problems = parse(&format!("version: 1\npools:\n{}{}", pool(a), pool(b))).unwrap_err();
    assert!(
        problems.to_string().contains("would have the same IDs"),
        "{problems}"
    );
}

#[test]
fn late_binding_has_its_own_keys() {
    let select = "select: { vendors: [15b3] }";
    let read = first(&pool(&format!("mode: exclusive\nbinding: late\n{select}")));
    assert_eq!(read.sharing, Sharing::Late(Late::default()));
    assert_eq!(read.delivery, Delivery::Cdi);
    assert!(!read.sharing.is_shared());
    let read = first(&pool(&format!(
        "mode: exclusive\nbinding: late\nstrict: false\nbindAtStart: true\nenvironment: true\n\
         delivery: cdi\n{select}"
    )));
    let late = Late {
        strict: false,
        bind_at_start: true,
        nccl_topology: false,
    };
    assert_eq!(read.sharing, Sharing::Late(late));
    assert!(read.environment);
    let early = "mode: exclusive\nbinding: early\nenvironment: true\n";
    let early = first(&pool(&format!("{early}{select}")));
    assert!(matches!(early.sharing, Sharing::Exclusive { .. }) && early.environment);
    for (keys, words) in [
        ("mode: shared\nbinding: late", "requires mode exclusive"),
        (
            "mode: exclusive\nbinding: late\nshares: 2",
            "shares cannot be set",
        ),
        (
            "mode: exclusive\nbinding: late\npolicy: numa",
            "policy cannot be set",
        ),
        (
            "mode: exclusive\nbinding: late\ndelivery: deviceSpecs",
            "leave delivery out",
        ),
        (
            "mode: exclusive\nstrict: true",
            "strict requires binding: late",
        ),
        (
            "mode: exclusive\nbindAtStart: true",
            "bindAtStart requires binding: late",
        ),
        (
            "mode: shared\nenvironment: true",
            "environment requires mode: exclusive",
        ),
        (
            "mode: shared\nncclTopology: true",
            "ncclTopology requires binding: late",
        ),
        (
            "mode: exclusive\nbinding: late\nncclTopology: true",
            "ncclTopology requires topology.ncclTopology",
        ),
        (
            "mode: exclusive\nbinding: soon",
            "expected one of early, late",
        ),
    ] {
        let refused = parse(&pool(&format!("{keys}\n{select}"))).unwrap_err();
        let refused = refused.to_string();
        assert!(
            refused.contains(words) && refused.contains("line"),
            "{keys}: {refused}"
        );
    }
}

#[test]
fn what_the_host_does_not_show_is_read_and_refused_by_name() {
    let pools =
        "pools: [{resource: rdma/a, mode: exclusive, binding: late, select: {vendors: [15b3]}}]";
    let read = |topology: &str| parse(&format!("version: 1\ntopology: {topology}\n{pools}\n"));
    let all = read("{gpuResources: [example.com/accelerator]}");
    let all = all.unwrap().topology;
    assert_eq!(all.gpu_resources[0].as_str(), "example.com/accelerator");
    let mounted = format!(
        "version: 1\ntopology: {{ncclTopology: /etc/topo.xml}}\n{}\n",
        pools.replace("binding: late", "binding: late, ncclTopology: true")
    );
    let sharing = first(&mounted).sharing;
    assert!(matches!(sharing, Sharing::Late(late) if late.nccl_topology));
    for (topology, words) in [
        ("{ncclTopology: topo.xml}", "absolute"),
        (
            "{rails: [\"0000:3b:00.0=1\"]}",
            "unknown key \"rails\"; write `rails` in /etc/rdma-netdev/policy.json",
        ),
        ("{gpuResources: [gpu]}", "gpu"),
        ("{preset: a4}", "preset"),
    ] {
        let refused = read(topology).unwrap_err().to_string();
        assert!(refused.contains(words), "{topology}: {refused}");
    }
}
