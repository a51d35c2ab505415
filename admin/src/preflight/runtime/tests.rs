use hca::DeviceNumber;

use super::super::tests::{Case, prove};
use super::*;
use crate::verdict::Verdict::{Fail, NotApplicable, Pass, Unknown, Warn};

fn node(device: Option<&str>, state: Node) -> NodeFacts {
    NodeFacts {
        name: if device.is_some() {
            "infiniband/uverbs0"
        } else {
            "infiniband/rdma_cm"
        }
        .to_owned(),
        device: device.map(str::to_owned),
        netdev_here: true,
        state,
        mode: (state != Node::Missing).then_some(0o666),
        opened: Some(Ok(())),
    }
}

/// A container with one NIC, as our plugin makes it.
fn good() -> Facts {
    Facts {
        in_pod: true,
        devices: 8,
        locked: vec![("this process".to_owned(), Some(Limit::Unlimited))],
        capabilities: Some(CAP_IPC_LOCK),
        nodes: vec![
            node(Some("mlx5_0"), Node::Ready),
            NodeFacts {
                netdev_here: false,
                ..node(Some("mlx5_1"), Node::Missing)
            },
            node(None, Node::Ready),
        ],
        allocated: Some(vec!["mlx5_0".to_owned()]),
        cdi: Cdi::On("config.toml".to_owned()),
    }
}

fn with(change: impl FnOnce(&mut Facts)) -> Facts {
    let mut facts = good();
    change(&mut facts);
    facts
}

fn limited() -> Facts {
    with(|facts| facts.locked[0].1 = Some(Limit::Bytes(8 << 20)))
}

fn on_node(change: impl FnOnce(&mut Facts)) -> Facts {
    with(|facts| {
        facts.in_pod = false;
        change(facts);
    })
}

fn r01() -> Vec<Case<Facts>> {
    vec![
        ("R01", good(), Pass, "without limit"),
        ("R01", limited(), Pass, "CAP_IPC_LOCK goes beyond"),
        (
            "R01",
            Facts {
                in_pod: false,
                ..limited()
            },
            Warn,
            "8192 KiB",
        ),
        (
            "R01",
            Facts {
                capabilities: Some(0),
                ..limited()
            },
            Warn,
            "8192 KiB",
        ),
        (
            "R01",
            on_node(|facts| facts.locked.clear()),
            Unknown,
            "hostPID",
        ),
        ("R01", Facts::default(), NotApplicable, ""),
    ]
}

fn r02() -> Vec<Case<Facts>> {
    vec![
        ("R02", good(), Pass, "in effect"),
        (
            "R02",
            Facts {
                capabilities: Some(0),
                ..good()
            },
            Pass,
            "no limit",
        ),
        (
            "R02",
            Facts {
                capabilities: Some(0),
                ..limited()
            },
            Warn,
            "not in effect",
        ),
        ("R02", on_node(|_| {}), NotApplicable, "--pod"),
    ]
}

fn r04() -> Vec<Case<Facts>> {
    let number = DeviceNumber {
        major: 231,
        minor: 193,
    };
    vec![
        ("R04", good(), Pass, ""),
        (
            "R04",
            with(|facts| facts.nodes[0].state = Node::Missing),
            Fail,
            "has the NIC but not",
        ),
        (
            "R04",
            with(|facts| facts.nodes[2].state = Node::Missing),
            Fail,
            "has the NIC but not",
        ),
        (
            "R04",
            with(|facts| facts.nodes[0].state = Node::Stale { found: number }),
            Fail,
            "device 231:193 by now",
        ),
        (
            "R04",
            with(|facts| facts.nodes[1].state = Node::Ready),
            Warn,
            "did not get",
        ),
        (
            "R04",
            with(|facts| facts.nodes[0].mode = Some(0o600)),
            Warn,
            "only root",
        ),
        ("R04", on_node(|_| {}), Fail, "neither devtmpfs nor udev"),
        (
            "R04",
            on_node(|facts| facts.nodes[1].state = Node::Ready),
            Pass,
            "",
        ),
    ]
}

fn r05() -> Vec<Case<Facts>> {
    vec![
        ("R05", good(), Pass, ""),
        (
            "R05",
            with(|facts| facts.nodes[0].opened = Some(Err("Operation not permitted".to_owned()))),
            Fail,
            "Operation not permitted",
        ),
    ]
}

fn r06() -> Vec<Case<Facts>> {
    vec![
        ("R06", good(), Pass, ""),
        (
            "R06",
            with(|facts| facts.cdi = Cdi::Silent("x".to_owned())),
            Pass,
            "from 2.0 on",
        ),
        (
            "R06",
            with(|facts| facts.cdi = Cdi::Off("x".to_owned())),
            Warn,
            "switched off",
        ),
        ("R06", Facts::default(), NotApplicable, ""),
    ]
}

#[test]
fn each_check_says_what_is_wrong() {
    let cases = [r01(), r02(), r04(), r05(), r06()];
    prove(CHECKS, &cases.concat());
}

#[test]
fn kernel_files_are_read_as_they_are_printed() {
    let limits = "Limit                     Soft Limit           Hard Limit           Units\n\
        Max locked memory         8388608              8388608              bytes\n";
    assert_eq!(locked(limits), Some(Limit::Bytes(8 << 20)));
    assert_eq!(
        locked("Max locked memory  unlimited unlimited bytes"),
        Some(Limit::Unlimited)
    );
    assert_eq!(locked(""), None);
    assert_eq!(
        capabilities("Name:\tx\nCapEff:\t0000000000004000\n"),
        Some(CAP_IPC_LOCK)
    );
    assert_eq!(capabilities(""), None);
}

#[test]
fn what_the_plugin_allocated_is_in_its_variables() {
    let variables = |pairs: &[(&str, &str)]| {
        let owned: Vec<(String, String)> = pairs
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect();
        allocated(owned.into_iter())
    };
    assert_eq!(
        variables(&[("RDMA_DEVICES_RDMA_A", "mlx5_0,mlx5_1"), ("PATH", "/bin")]),
        Some(vec!["mlx5_0".to_owned(), "mlx5_1".to_owned()])
    );
    assert_eq!(variables(&[("PATH", "/bin"), ("RDMA_DEVICES_X", "")]), None);
}
