use std::path::Path;

use hca::{Guid, PortId};
use hca_trees::{RdmaSpec, Tree};
use netlink::link::Link;
use netlink_packet_route::link::InfoKind;
use node::pattern::Pattern;
use node::policy::{Allow, Policy, Selector};

use super::*;
use crate::facts::{Movable, MovableState, RdmaOnly};
use crate::rdma::MovableRdma;

fn nic() -> HostLink {
    HostLink {
        link: Link {
            name: "eth1".into(),
            hardware: 1,
            ..Link::default()
        },
        rdma: vec![PortId {
            device: "mlx5_0".into(),
            port: 1,
        }],
        is_selected: true,
        ..HostLink::default()
    }
}

/// Asks about a NIC; `hcas` is what the kubelet allocated, none where it is not to be asked.
fn asked(
    found: &Found,
    config: &Config,
    allow: &Allow,
    hcas: Option<&[&str]>,
) -> Result<(), Error> {
    with_exclusive(found, config, allow, hcas, &[])
}

fn with_exclusive(
    found: &Found,
    config: &Config,
    allow: &Allow,
    hcas: Option<&[&str]>,
    exclusive: &[&str],
) -> Result<(), Error> {
    let policy = Policy {
        allow: allow.clone(),
        ..Policy::default()
    };
    let allocated = hcas.map(|hcas| {
        Ok(Allocated {
            pod: "ml/a".into(),
            hcas: hcas.iter().map(|hca| hca.parse().unwrap()).collect(),
        })
    });
    let facts = Facts {
        exclusive: exclusive.iter().map(|hca| hca.parse().unwrap()).collect(),
        allocated,
        ..Facts::without_pod(&policy, Path::new("/etc/policy.json"))
    };
    assert_eq!(
        hcas.is_none(),
        by_policy(config, found, &facts).is_err() || !needs_allocation(config, found, &facts),
        "whether the kubelet is asked"
    );
    if let Some(denied) = by_policy_alone(config, &facts).into_iter().next() {
        return Err(denied);
    }
    authorize(config, found, &facts)
}

fn macvlan(host: &HostLink) -> Found {
    Found::Child(ChildKind::Macvlan, Box::new(host.clone()))
}

fn ask(host: &HostLink, allow: &Allow) -> Result<(), Error> {
    asked(&macvlan(host), &Config::default(), allow, None)
}

#[test]
fn an_rdma_netdev_without_other_use_is_allowed_by_default() {
    let default = Allow::default();
    ask(&nic(), &default).unwrap();
    // An address of its own is no hindrance: rails have them.
    ask(
        &HostLink {
            addresses: vec![[10, 0, 0, 1].into()],
            ..nic()
        },
        &default,
    )
    .unwrap();

    let uplink = HostLink {
        uplink: Some("it carries the default route".into()),
        ..nic()
    };
    let plain = HostLink {
        rdma: vec![],
        ..nic()
    };
    let member = HostLink {
        controller: Some(("bond0".into(), "bond".into())),
        ..nic()
    };
    let vrf = HostLink {
        controller: Some(("blue".into(), "vrf".into())),
        ..nic()
    };
    for (found, word) in [
        (&uplink, "default route"),
        (&plain, "no RDMA device"),
        (&member, "bond bond0"),
    ] {
        let error = ask(found, &default).unwrap_err();
        assert!(
            error.msg.contains("eth1") && error.msg.contains(word),
            "{error}"
        );
        assert!(!error.details.is_empty());
    }
    ask(&vrf, &default).unwrap();
}

#[test]
fn each_rule_is_lifted_by_its_own_key_alone() {
    let all = Allow {
        non_rdma: true,
        uplinks: true,
        ..Allow::default()
    };
    let plain = HostLink {
        rdma: vec![],
        uplink: Some("x".into()),
        ..nic()
    };
    ask(&plain, &all).unwrap();
    assert!(
        ask(
            &plain,
            &Allow {
                uplinks: false,
                ..all.clone()
            }
        )
        .is_err()
    );
    assert!(
        ask(
            &plain,
            &Allow {
                non_rdma: false,
                ..all.clone()
            }
        )
        .is_err()
    );
    let member = HostLink {
        controller: Some(("br0".into(), "bridge".into())),
        ..nic()
    };
    assert!(ask(&member, &all).is_err(), "a port can never serve");
}

#[test]
fn a_netdev_that_no_selector_has_is_denied() {
    let other = HostLink {
        is_selected: false,
        ..nic()
    };
    let denied = ask(&other, &Allow::default()).unwrap_err();
    assert!(denied.details.contains("allow.netdevs"), "{denied}");
}

fn hardware() -> HostLink {
    let mut nic = nic();
    nic.link.bus_device = Some("0000:3b:00.2".into());
    nic.hcas = BTreeSet::from(["0000:3b:00.2".parse().unwrap()]);
    nic
}

fn movable(link: HostLink) -> Found {
    Found::Move(Box::new(Movable {
        link,
        dependent: None,
        state: Ok(MovableState::default()),
    }))
}

fn move_it(nic: HostLink, allow: &Allow, hcas: Option<&[&str]>) -> Result<(), Error> {
    asked(&movable(nic), &Config::default(), allow, hcas)
}

#[test]
fn a_netdev_is_moved_for_the_pod_that_has_its_hca() {
    let default = Allow::default();
    move_it(
        hardware(),
        &default,
        Some(&["0000:5e:00.0", "0000:3b:00.2"]),
    )
    .unwrap();
    for other in [&[][..], &["0000:3b:00.3"]] {
        let denied = move_it(hardware(), &default, Some(other)).unwrap_err();
        assert!(
            denied.msg.contains("pod ml/a") && denied.msg.contains("0000:3b:00.2"),
            "{denied}"
        );
        assert!(denied.details.contains("allow.unallocated"), "{denied}");
    }
    let lifted = Allow {
        unallocated: true,
        ..Allow::default()
    };
    move_it(hardware(), &lifted, None).unwrap();
}

#[test]
fn a_netdev_with_upper_links_is_not_moved() {
    let all = Allow {
        unallocated: true,
        non_rdma: true,
        uplinks: true,
        virtual_links: true,
        passthru: true,
        ..Allow::default()
    };
    let nic = Found::Move(Box::new(Movable {
        link: hardware(),
        dependent: Some("vxlan vx0 is on it".into()),
        state: Ok(MovableState::default()),
    }));
    let denied = asked(&nic, &Config::default(), &all, None).unwrap_err();
    assert!(denied.msg.ends_with(": vxlan vx0 is on it"), "{denied}");
    assert!(denied.details.contains("remove it first"), "{denied}");
    ask(&hardware(), &all).unwrap();
    // Whose link it is says nothing to a pod that does not have the HCA.
    let hcas: &[&str] = &["0000:3b:00.3"];
    let denied = asked(&nic, &Config::default(), &Allow::default(), Some(hcas)).unwrap_err();
    assert!(!denied.msg.contains("vx0"), "{denied}");
}

#[test]
fn the_ipoib_netdev_of_a_port_is_hardware_and_its_children_are_not() {
    let mut parent = hardware();
    (parent.link.kind, parent.link.hardware) = (Some(InfoKind::Ipoib), 32);
    let allow = Allow {
        unallocated: true,
        ..Allow::default()
    };
    move_it(parent.clone(), &allow, None).unwrap();
    let mut child = parent.clone();
    child.link.parent = Some(4);
    let mut child_without_device = parent;
    child_without_device.link.bus_device = None;
    for child in [child, child_without_device] {
        let denied = move_it(child, &allow, None).unwrap_err();
        assert!(denied.msg.contains("ipoib"), "{denied}");
    }
}

#[test]
fn virtual_links_are_moved_by_a_key_of_their_own() {
    let mut vlan = hardware();
    (vlan.link.kind, vlan.link.bus_device) = (Some(InfoKind::Vlan), None);
    vlan.link.parent = Some(3);
    let allow = Allow {
        unallocated: true,
        ..Allow::default()
    };
    let denied = move_it(vlan.clone(), &allow, None).unwrap_err();
    assert!(denied.msg.contains("vlan"), "{denied}");
    assert!(denied.details.contains("allow.virtual"), "{denied}");
    let allow = Allow {
        virtual_links: true,
        ..allow
    };
    move_it(vlan, &allow, None).unwrap();
}

#[test]
fn a_link_that_a_pod_could_imitate_is_not_moved() {
    let allow = Allow {
        unallocated: true,
        virtual_links: true,
        ..Allow::default()
    };
    for (kind, parent, word) in [
        (Some(InfoKind::MacVlan), Some(3), "macvlan"),
        (Some(InfoKind::Dummy), None, "dummy"),
        (Some(InfoKind::Vlan), None, "vlan"),
        (None, None, "names no hardware"),
    ] {
        let mut nic = hardware();
        (nic.link.kind, nic.link.bus_device, nic.link.parent) = (kind, None, parent);
        let denied = move_it(nic, &allow, None).unwrap_err();
        assert!(denied.msg.contains(word), "{denied}");
        assert!(denied.msg.contains("cannot be told from"), "{denied}");
    }
}

#[test]
fn passthru_needs_its_key_and_the_hca() {
    let config = Config {
        mode: Some("passthru".into()),
        ..Config::default()
    };
    let default = Allow::default();
    let passthru =
        |allow: &Allow, hcas: &[&str]| asked(&macvlan(&hardware()), &config, allow, Some(hcas));
    let denied = passthru(&default, &["0000:3b:00.2"]).unwrap_err();
    assert!(denied.details.contains("allow.passthru"), "{denied}");
    let allow = Allow {
        passthru: true,
        ..Allow::default()
    };
    assert!(passthru(&allow, &[]).is_err());
    passthru(&allow, &["0000:3b:00.2"]).unwrap();
}

#[test]
fn a_vf_setting_needs_the_policy() {
    let mut config = Config::default();
    config.vf.node_guid = Some(Guid(0x0200_0000_0000_0008));
    config.vf.trust = Some(true);
    let mut allow = Allow::default();
    let ask = |allow: &Allow| {
        let hcas: &[&str] = &["0000:3b:00.2"];
        asked(&movable(hardware()), &config, allow, Some(hcas))
    };
    let denied = ask(&allow).unwrap_err();
    assert!(denied.msg.contains("0200:0000:0000:0008"), "{denied}");
    assert!(denied.details.contains("allow.vf.guid"), "{denied}");
    allow.vf.guid = vec![0x0200_0000_0000_0000..=0x0200_0000_0000_0008];
    let denied = ask(&allow).unwrap_err();
    assert!(denied.msg.contains("trust on"), "{denied}");
    assert!(denied.details.contains("allow.vf.trust"), "{denied}");
    allow.vf.trust = true;
    ask(&allow).unwrap();
}

#[test]
fn a_child_is_in_a_partition_that_the_policy_lists() {
    let mut parent = hardware();
    (parent.link.kind, parent.link.hardware) = (Some(InfoKind::Ipoib), 32);
    let child = Found::Child(ChildKind::Ipoib, Box::new(parent));
    let in_partition = |pkey, allow: &Allow| {
        let config = Config {
            pkey: Some(pkey),
            ..Config::default()
        };
        asked(&child, &config, allow, None)
    };
    let listed = Allow {
        pkeys: Some(vec![0x8001, 0x0002]),
        ..Allow::default()
    };
    // With and without the bit of a full member.
    for pkey in [0x8001, 0x0001, 0x8002] {
        in_partition(pkey, &listed).unwrap();
    }
    let denied = in_partition(0xffff, &listed).unwrap_err();
    assert!(denied.msg.contains("0xffff") && denied.msg.contains("0x8001, 0x0002"));
    assert!(denied.details.contains("allow.pkeys"), "{denied}");
    in_partition(0xffff, &Allow::default()).unwrap();
}

#[test]
fn an_exclusive_netdev_is_a_master_for_its_own_pod_only() {
    let default = Allow::default();
    let child = |hcas: &[&str]| {
        let found = macvlan(&hardware());
        let exclusive = ["0000:3b:00.2"];
        with_exclusive(&found, &Config::default(), &default, Some(hcas), &exclusive)
    };
    assert!(child(&["0000:3b:00.3"]).is_err());
    child(&["0000:3b:00.2"]).unwrap();
}

/// The RDMA device `mlx5_2` of an HCA, with these netdevs, which leaves the host or is only reported.
fn rdma_only(hca: Option<&str>, netdevs: Vec<HostLink>, leaves: bool) -> Found {
    let dir = tempfile::tempdir().unwrap();
    let tree = Tree::new(dir.path());
    tree.rdma(&RdmaSpec {
        name: "mlx5_2",
        ..RdmaSpec::default()
    });
    Found::RdmaOnly(Box::new(RdmaOnly {
        devices: vec![RdmaTarget {
            device: hca::rdma::read(&tree.host(), "mlx5_2").unwrap(),
            hca: hca.map(|hca| hca.parse().unwrap()),
            netdevs,
        }],
        moving: leaves.then(|| Ok(MovableRdma::default())),
    }))
}

#[test]
fn only_rdma_devices_that_leave_need_an_allocation() {
    let device = |hca: Option<&str>, leaves| rdma_only(hca, Vec::new(), leaves);
    let (default, config) = (Allow::default(), Config::default());
    asked(&device(None, false), &config, &default, None).unwrap();
    let ask = |hca, hcas: &[&str]| asked(&device(hca, true), &config, &default, Some(hcas));
    ask(Some("0000:3b:00.2"), &["0000:3b:00.2"]).unwrap();
    assert!(ask(Some("0000:3b:00.2"), &[]).is_err());
    let denied = ask(None, &["0000:3b:00.2"]).unwrap_err();
    assert!(denied.msg.contains("is not an RDMA device"), "{denied}");
}

#[test]
fn an_rdma_device_that_leaves_takes_its_netdevs_so_their_rules_hold() {
    let of = |netdevs: Vec<HostLink>, leaves| rdma_only(Some("0000:3b:00.2"), netdevs, leaves);
    let ask = |found: &Found, allow: &Allow, is_asked: bool| {
        let hcas: &[&str] = &["0000:3b:00.2"];
        asked(found, &Config::default(), allow, is_asked.then_some(hcas))
    };
    let default = Allow::default();
    let uplink = |leaves| {
        let netdev = HostLink {
            uplink: Some("it carries the default route".into()),
            ..hardware()
        };
        of(vec![netdev], leaves)
    };
    let denied = ask(&uplink(true), &default, false).unwrap_err();
    assert!(denied.msg.contains("default route"), "{denied}");
    ask(&uplink(false), &default, false).unwrap();
    ask(&of(vec![hardware()], true), &default, true).unwrap();

    let only = |name: &str| Allow {
        netdevs: Some(vec![Selector {
            rdma_devices: vec![Pattern::parse(name).unwrap()],
            ..Selector::default()
        }]),
        ..Allow::default()
    };
    let bare = of(vec![], true);
    ask(&bare, &only("mlx5_2"), true).unwrap();
    let denied = ask(&bare, &only("mlx5_0"), false).unwrap_err();
    assert!(
        denied.msg.contains("RDMA device mlx5_2") && denied.details.contains("allow.netdevs"),
        "{denied}"
    );
}

#[test]
fn the_loopback_device_serves_for_nothing() {
    let mut lo = hardware();
    lo.link.name = "lo".into();
    let all = Allow {
        unallocated: true,
        non_rdma: true,
        uplinks: true,
        virtual_links: true,
        passthru: true,
        ..Allow::default()
    };
    assert!(ask(&lo, &all).unwrap_err().msg.contains("loopback"));
    assert!(move_it(lo, &all, None).is_err());
}
