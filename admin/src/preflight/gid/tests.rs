use super::super::tests::{Case, prove};
use super::*;
use crate::verdict::Verdict::{Fail, NotApplicable, Pass, Unknown, Warn};

fn entry(index: u32, ip: &str, kind: &str, netdev: Option<&str>) -> GidEntry {
    GidEntry {
        index,
        gid: ip.parse::<IpAddr>().unwrap().into(),
        kind: Some(kind.to_owned()),
        netdev: netdev.map(str::to_owned),
    }
}

fn port(id: &str, index: u32) -> PortFacts {
    let ip = "192.168.1.4";
    PortFacts {
        id: id.to_owned(),
        active: true,
        gids: GidTable {
            slots: 256,
            entries: vec![
                entry(index - 1, ip, "IB/RoCE v1", Some("rail0")),
                entry(index, ip, ROCE_V2, Some("rail0")),
            ],
        },
        addresses: vec![ip.parse().unwrap()],
        children: 0,
    }
}

fn good() -> Facts {
    Facts {
        ports: vec![port("mlx5_0/1", 3), port("mlx5_1/1", 3)],
        in_pod: true,
        elsewhere: false,
    }
}

fn with(change: impl FnOnce(&mut PortFacts)) -> Facts {
    let mut facts = good();
    change(&mut facts.ports[1]);
    facts
}

#[test]
fn each_check_says_what_is_wrong() {
    let v1_only = || with(|port| port.gids.entries.truncate(1));
    let second_address = || with(|port| port.addresses.push("10.0.0.1".parse().unwrap()));
    let cases: Vec<Case<Facts>> = vec![
        ("G01", good(), Pass, ""),
        ("G01", v1_only(), Fail, "no RoCE v2 GID at all"),
        ("G01", second_address(), Fail, "10.0.0.1 has none"),
        ("G01", with(|port| port.active = false), Pass, ""),
        ("G03", good(), Pass, "3 everywhere"),
        (
            "G03",
            Facts {
                ports: vec![port("a", 3), port("b", 5)],
                ..Facts::default()
            },
            Warn,
            "differs",
        ),
        ("G03", Facts::default(), NotApplicable, ""),
        (
            "G01",
            Facts {
                elsewhere: true,
                ..good()
            },
            Unknown,
            "namespace",
        ),
        ("G06", good(), Pass, "about 63"),
        ("G06", with(|port| port.children = 1000), Warn, "1000 units"),
        ("G06", with(|port| port.gids.slots = 0), Unknown, ""),
    ];
    prove(CHECKS, &cases);
}
