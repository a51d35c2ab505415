use hca::PortId;
use ipam::policy::Selector;

use super::*;
use crate::kernel::link::Link;

fn nic() -> Found {
    Found {
        link: Link {
            name: "eth1".into(),
            hardware: 1,
            ..Link::default()
        },
        rdma: vec![PortId {
            device: "mlx5_0".into(),
            port: 1,
        }],
        ..Found::default()
    }
}

fn ask(found: &Found, allow: &Allow) -> Result<(), Error> {
    check(found, Attach::Macvlan, allow, Path::new("/etc/policy.json"))
}

#[test]
fn the_default_takes_an_rdma_netdev_that_is_nobodys() {
    let default = Allow::default();
    ask(&nic(), &default).unwrap();
    // An address of its own is no hindrance: rails have them.
    ask(
        &Found {
            addresses: vec![[10, 0, 0, 1].into()],
            ..nic()
        },
        &default,
    )
    .unwrap();

    let uplink = Found {
        uplink: Some("it carries the default route".into()),
        ..nic()
    };
    let plain = Found {
        rdma: vec![],
        ..nic()
    };
    let member = Found {
        controller: Some(("bond0".into(), "bond".into())),
        ..nic()
    };
    let vrf = Found {
        controller: Some(("blue".into(), "vrf".into())),
        ..nic()
    };
    for (found, word) in [
        (&uplink, "default route"),
        (&plain, "no RDMA device"),
        (&member, "bond bond0"),
    ] {
        let error = ask(found, &default).unwrap_err();
        assert_eq!(error.code, Code::Policy);
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
    let plain = Found {
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
    let member = Found {
        controller: Some(("br0".into(), "bridge".into())),
        ..nic()
    };
    assert!(ask(&member, &all).is_err(), "a port can never serve");
}

#[test]
fn selectors_narrow_what_is_allowed() {
    let only = |selector: Selector| Allow {
        netdevs: Some(vec![selector]),
        ..Allow::default()
    };
    ask(
        &nic(),
        &only(Selector {
            if_names: vec!["eth*".into()],
            ..Selector::default()
        }),
    )
    .unwrap();
    let rdma = |name: &str| {
        only(Selector {
            rdma_devices: vec![name.into()],
            ..Selector::default()
        })
    };
    ask(&nic(), &rdma("mlx5_0")).unwrap();
    assert!(
        ask(&nic(), &rdma("mlx5_1"))
            .unwrap_err()
            .details
            .contains("allow.netdevs")
    );
    assert!(
        ask(
            &nic(),
            &Allow {
                netdevs: Some(vec![]),
                ..Allow::default()
            }
        )
        .is_err()
    );
}
