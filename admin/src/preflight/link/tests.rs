use hca::gid::GidTable;
use hca::port::Rate;
use hca::rdma::NodeType;
use hca::{Guid, PciAddress, PciFunction};

use super::super::tests::{Case, prove};
use super::*;
use crate::verdict::Verdict::{Fail, NotApplicable, Pass, Unknown, Warn};

fn netdev(name: &str) -> Netdev {
    Netdev {
        name: name.to_owned(),
        up: true,
        operstate: "up".to_owned(),
        mtu: 9000,
        speed_mbps: Some(400_000),
        ..Netdev::default()
    }
}

fn port(device: &str, name: &str) -> PortFacts {
    PortFacts {
        device: RdmaDevice {
            name: device.to_owned(),
            node_guid: Some(Guid(7)),
            node_type: NodeType::ChannelAdapter,
            board_id: Some("MT_0000000838".to_owned()),
            pci: Some(PciFunction::default()),
            ..RdmaDevice::default()
        },
        port: Port {
            number: 1,
            state: PortState::Active,
            phys_state: "LinkUp".to_owned(),
            rate: Some(Rate {
                mbps: 400_000,
                signalling: None,
            }),
            link_layer: LinkLayer::Ethernet,
            lid: 0,
            sm_lid: 0,
            active_mtu: Some(4096),
            gids: GidTable::default(),
            pkeys: Vec::new(),
            netdev: Some(name.to_owned()),
        },
        netdev: Some(netdev(name)),
        carrier: Some(true),
        uplink: None,
        master: None,
        physical_mtu: None,
        pools: Vec::new(),
        offered: true,
    }
}

/// Two rails, both in order, in no pool.
fn good() -> Facts {
    Facts {
        uplinks_unknown: None,
        ports: vec![port("mlx5_0", "rail0"), port("mlx5_1", "rail1")],
    }
}

/// The same, with the second port changed.
fn with(change: impl FnOnce(&mut PortFacts)) -> Facts {
    let mut facts = good();
    change(&mut facts.ports[1]);
    facts
}

fn netdev_with(change: impl FnOnce(&mut Netdev)) -> Facts {
    with(|port| change(port.netdev.as_mut().unwrap()))
}

fn pool(shared: bool) -> Vec<Membership> {
    vec![Membership {
        resource: "rdma/rails".to_owned(),
        shared,
        units: 1,
    }]
}

/// In an exclusive pool, so that faults count fully.
fn pooled(change: impl FnOnce(&mut PortFacts)) -> Facts {
    with(|port| {
        port.pools = pool(false);
        change(port);
    })
}

fn infiniband(lid: u32, sm_lid: u32) -> Facts {
    pooled(|port| {
        port.port.link_layer = LinkLayer::InfiniBand;
        port.port.lid = lid;
        port.port.sm_lid = sm_lid;
    })
}

fn l01() -> Vec<Case<Facts>> {
    vec![
        ("L01", good(), Pass, ""),
        (
            "L01",
            pooled(|port| port.netdev.as_mut().unwrap().up = false),
            Fail,
            "switched off",
        ),
        (
            "L01",
            pooled(|port| port.carrier = Some(false)),
            Fail,
            "no signal",
        ),
        (
            "L01",
            netdev_with(|netdev| netdev.up = false),
            Warn,
            "switched off",
        ),
        ("L01", with(|port| port.netdev = None), Pass, ""),
    ]
}

fn l02() -> Vec<Case<Facts>> {
    vec![
        ("L02", good(), Pass, ""),
        (
            "L02",
            pooled(|port| port.port.state = PortState::Down),
            Fail,
            "DOWN",
        ),
        (
            "L02",
            with(|port| port.port.state = PortState::Down),
            Warn,
            "DOWN",
        ),
        (
            "L02",
            Facts {
                uplinks_unknown: None,
                ports: vec![PortFacts {
                    port: Port {
                        state: PortState::Init,
                        link_layer: LinkLayer::InfiniBand,
                        ..port("", "").port
                    },
                    ..port("mlx5_0", "ib0")
                }],
            },
            Fail,
            "subnet manager",
        ),
    ]
}

fn l03() -> Vec<Case<Facts>> {
    vec![
        ("L03", good(), Pass, ""),
        (
            "L03",
            pooled(|port| port.port.phys_state = "Polling".to_owned()),
            Fail,
            "Polling",
        ),
    ]
}

fn l04() -> Vec<Case<Facts>> {
    vec![
        ("L04", good(), NotApplicable, "Ethernet"),
        ("L04", infiniband(7, 1), Pass, "a subnet manager is there"),
        ("L04", infiniband(0, 0), Fail, "no subnet manager"),
    ]
}

fn l05() -> Vec<Case<Facts>> {
    vec![
        ("L05", good(), Pass, ""),
        (
            "L05",
            with(|port| {
                port.port.rate = Some(Rate {
                    mbps: 200_000,
                    signalling: None,
                })
            }),
            Warn,
            "different speeds",
        ),
        (
            "L05",
            with(|port| {
                port.port.rate = Some(Rate {
                    mbps: 200_000,
                    signalling: None,
                });
                port.netdev.as_mut().unwrap().speed_mbps = Some(200_000);
            }),
            Warn,
            "others of its kind run at 400",
        ),
        ("L05", with(|port| port.port.rate = None), Unknown, ""),
    ]
}

fn l06() -> Vec<Case<Facts>> {
    // Eight compute rails, and beside them four storage ports of the same board with another MTU.
    let storage = |change: &dyn Fn(&mut PortFacts)| {
        let mut facts = good();
        facts.ports = (0..12)
            .map(|n| {
                let mut port = port(&format!("mlx5_{n}"), &format!("rail{n}"));
                port.pools = pool(false);
                if n >= 8 {
                    port.netdev.as_mut().unwrap().mtu = 1500;
                    change(&mut port);
                }
                port
            })
            .collect();
        facts
    };
    vec![
        ("L06", good(), Pass, ""),
        (
            "L06",
            netdev_with(|netdev| netdev.mtu = 1500),
            Warn,
            "others of its kind",
        ),
        (
            "L06",
            storage(&|_| {}),
            Warn,
            "8 others of its kind have 9000",
        ),
        (
            "L06",
            storage(&|port| {
                port.pools[0].resource = "rdma/storage".to_owned();
            }),
            Pass,
            "",
        ),
        (
            "L06",
            storage(&|port| {
                port.pools.clear();
                port.offered = false;
            }),
            Pass,
            "",
        ),
        (
            "L06",
            with(|port| port.physical_mtu = Some(1500)),
            Warn,
            "larger than the 1500",
        ),
    ]
}

#[test]
fn the_few_ports_of_another_mtu_are_told_to_change_it() {
    let facts = l06().swap_remove(2).1;
    let warned = l06_mtu(&facts).unwrap();
    let warned = warned.iter().filter(|finding| finding.verdict == Warn);
    assert_eq!(warned.count(), 4);
}

fn l07() -> Vec<Case<Facts>> {
    vec![
        ("L07", good(), Pass, ""),
        (
            "L07",
            with(|port| port.port.active_mtu = Some(1024)),
            Warn,
            "only 1024",
        ),
        ("L07", with(|port| port.port.active_mtu = None), Unknown, ""),
    ]
}

fn l08() -> Vec<Case<Facts>> {
    vec![
        ("L08", good(), Pass, "is free"),
        (
            "L08",
            pooled(|port| port.uplink = Some("it carries the node's default route".into())),
            Fail,
            "the node would lose its network",
        ),
        (
            "L08",
            with(|port| {
                port.uplink = Some("it carries the node's default route".into());
                port.pools = pool(true);
            }),
            Warn,
            "share its bandwidth",
        ),
        (
            "L08",
            with(|port| port.uplink = Some("it carries the node's default route".into())),
            Pass,
            "",
        ),
        (
            "L08",
            pooled(|port| {
                port.master = Some(("br0".to_owned(), "bridge".to_owned()));
            }),
            Fail,
            "bridge br0",
        ),
    ]
}

fn l09() -> Vec<Case<Facts>> {
    vec![
        ("L09", good(), NotApplicable, ""),
        (
            "L09",
            netdev_with(|netdev| {
                netdev.kind = Some("bond".to_owned());
                netdev.lowers = vec!["ens1f0".to_owned(), "ens1f1".to_owned()];
            }),
            Pass,
            "as a whole",
        ),
        (
            "L09",
            pooled(|port| {
                port.master = Some(("bond0".to_owned(), "bond".to_owned()));
            }),
            Fail,
            "a member of bond0",
        ),
    ]
}

fn l10() -> Vec<Case<Facts>> {
    let physical: PciAddress = "0000:3b:00.0".parse().unwrap();
    vec![
        (
            "L10",
            with(|port| {
                port.device.pci.as_mut().unwrap().sriov = Sriov::Virtual {
                    physical,
                    index: Some(0),
                }
            }),
            Pass,
            "a VF of",
        ),
        (
            "L10",
            pooled(|port| {
                port.device.pci.as_mut().unwrap().sriov = Sriov::Physical {
                    total: 8,
                    functions: vec![hca::pci::VirtualFunction {
                        index: 0,
                        address: physical,
                    }],
                };
            }),
            Warn,
            "it has 1 VFs",
        ),
        (
            "L10",
            netdev_with(|netdev| netdev.phys_port_name = Some("pf0vf3".to_owned())),
            Fail,
            "host side of a VF",
        ),
    ]
}

fn l13() -> Vec<Case<Facts>> {
    let mut narrow = infiniband(1, 1);
    narrow.ports[1].port.rate = "2.5 Gb/sec (1X SDR)".parse().ok();
    narrow.ports[1].device.board_id = None;
    narrow.ports[1].netdev = None;
    let member = |keys: &[u16]| {
        let mut facts = infiniband(1, 1);
        let keys = keys.iter().zip(0..);
        let keys = keys.map(|(&key, index)| hca::port::Pkey { index, key });
        facts.ports[1].port.pkeys = keys.collect();
        facts
    };
    vec![
        ("L05", narrow, Warn, "quarter of its width"),
        ("L13", good(), NotApplicable, "link layer Ethernet"),
        ("L13", member(&[0x7fff, 0x8001]), Pass, "full"),
        ("L13", member(&[0x7fff, 0x0001]), Warn, "limited"),
        ("L13", member(&[]), Fail, "not a member"),
    ]
}

fn l14() -> Vec<Case<Facts>> {
    let vf = |node_guid| {
        pooled(|port| {
            port.device.pci.as_mut().unwrap().sriov = Sriov::Virtual {
                physical: "0000:3b:00.0".parse().unwrap(),
                index: Some(3),
            };
            port.device.node_guid = node_guid;
        })
    };
    vec![
        ("L14", good(), NotApplicable, "not a VF"),
        ("L14", vf(Some(Guid(7))), Pass, "it has one"),
        ("L14", vf(None), Fail, "zero"),
        // As a VM shows its VFs.
        (
            "L14",
            pooled(|port| port.device.node_guid = None),
            Fail,
            "zero",
        ),
    ]
}

#[test]
fn each_check_says_what_is_wrong() {
    let cases = [
        l01(),
        l02(),
        l03(),
        l04(),
        l05(),
        l06(),
        l07(),
        l08(),
        l09(),
        l10(),
        l13(),
        l14(),
    ];
    prove(CHECKS, &cases.concat());
}

#[test]
fn a_port_of_no_pool_is_no_fault() {
    let facts = with(|port| {
        port.offered = false;
        port.port.state = PortState::Down;
    });
    let findings = l02_state(&facts).unwrap();
    assert_eq!(findings[1].verdict, NotApplicable);
    assert_eq!(findings[1].object.as_deref(), Some("mlx5_1/1"));
}

#[test]
fn a_node_whose_every_port_is_down_fails_even_without_a_configuration() {
    let mut facts = good();
    for port in &mut facts.ports {
        port.port.state = PortState::Down;
    }
    assert!(
        l02_state(&facts)
            .unwrap()
            .iter()
            .all(|finding| finding.verdict == Fail)
    );
}
