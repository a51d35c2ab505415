//! Whether the node's policy lets a netdev be taken or built upon.
//!
//! This process is root and its input may come from a namespace's user, so the default is
//! narrow: RDMA-capable netdevs that are nobody else's and do not carry the node itself. Pure.

use std::path::Path;

use cni_wire::{Code, Error};
use ipam::policy::{Allow, Candidate};

use crate::{config::Attach, find::Found};

/// Refuses a netdev the policy does not give away.
///
/// # Errors
/// Code 101 with the rule and what to change.
pub fn check(found: &Found, attach: Attach, allow: &Allow, policy: &Path) -> Result<(), Error> {
    let name = &found.link.name;
    let refuse = |why: String, remedy: String| {
        Err(Error::new(
            Code::Policy,
            format!("{} netdev {name} is refused: {why}", verb(attach)),
        )
        .with_details(remedy))
    };
    if name == "lo" {
        return refuse(
            "it is the loopback device".into(),
            "name a netdev of an RDMA device".into(),
        );
    }
    if let Some((controller, kind)) = &found.controller
        && kind != "vrf"
    {
        return refuse(
            format!("it is a port of {kind} {controller}"),
            format!("name {controller} itself, or take {name} out of it"),
        );
    }
    if !allow.uplinks
        && let Some(why) = &found.uplink
    {
        return refuse(
            why.clone(),
            format!(
                "name another netdev; if pods may have the node's own link, set allow.uplinks in {}",
                policy.display()
            ),
        );
    }
    if !allow.non_rdma && found.rdma.is_empty() {
        return refuse(
            "no RDMA device has it as its port".into(),
            format!(
                "name a netdev of an RDMA device (rdma-device-plugin discover lists them), or set \
                 allow.nonRdma in {}",
                policy.display()
            ),
        );
    }
    if !selected(found, allow) {
        return refuse(
            "none of the policy's selectors has it".into(),
            format!("add it to allow.netdevs in {}", policy.display()),
        );
    }
    Ok(())
}

fn verb(attach: Attach) -> &'static str {
    match attach {
        Attach::Move => "moving",
        Attach::Macvlan => "a macvlan on",
        Attach::Ipvlan => "an ipvlan on",
        Attach::Ipoib => "an IPoIB child of",
        Attach::RdmaOnly => "moving the RDMA device of",
    }
}

fn selected(found: &Found, allow: &Allow) -> bool {
    let netdev = found.netdev.as_ref();
    let name = found.link.name.to_string();
    let address = netdev.and_then(|n| n.auxiliary.clone().or(n.pci.map(|pci| pci.to_string())));
    let link_type = match found.link.hardware {
        1 => Some("ether"),
        32 => Some("infiniband"),
        _ => None,
    };
    let candidate = |rdma_device| Candidate {
        if_name: &name,
        pci_address: address.as_deref(),
        vendor: found.pci_ids.as_ref().map(|(vendor, _)| vendor.as_str()),
        device_id: found.pci_ids.as_ref().map(|(_, device)| device.as_str()),
        driver: netdev.and_then(|n| n.driver.as_deref()),
        link_type,
        rdma_device,
    };
    if found.rdma.is_empty() {
        return allow.selects(&candidate(None));
    }
    found
        .rdma
        .iter()
        .any(|port| allow.selects(&candidate(Some(&port.device))))
}

#[cfg(test)]
mod tests {
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
}
