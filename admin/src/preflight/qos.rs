//! Lossless Ethernet, as far as the host shows it (Q). The switch's half cannot be read.
//!
//! The usual agreement: RoCE packets carry DSCP 26, which is priority 3, the only one with flow
//! control; congestion notifications carry DSCP 48, priority 6.

pub(super) mod dcb;

use hca::{Port, RdmaDevice};

use self::dcb::Dcb;
use super::check::{Findings, checks, need};
use super::context::{Context, port_name};
use crate::verdict::{Finding, words};
use rdma_device_plugin::files;

/// What is read.
#[derive(Debug, Clone, Default)]
pub(super) struct Facts {
    /// RoCE ports of NICs.
    pub ports: Vec<PortFacts>,
}

/// A RoCE port.
#[derive(Debug, Clone, Default)]
pub(super) struct PortFacts {
    /// `mlx5_0/1`.
    pub id: String,
    /// `qos/trust` of NVIDIA's driver stack.
    pub trust: Option<String>,
    /// What the kernel says; `None` if the driver does not do it, or another kernel is read.
    pub dcb: Option<Dcb>,
    /// Explicit congestion notification on priority 3: reaction and notification point.
    pub ecn: Option<(bool, bool)>,
    /// Type of service that RDMA connections start with.
    pub tos: Option<u8>,
}

const PRIORITY: u8 = 3;
const DSCP: u16 = 26;

checks! {
    "Q01" "NICs sort packets by DSCP" q01_trust;
    "Q02" "flow control is on priority 3 only" q02_pfc;
    "Q03" "congestion is notified on priority 3" q03_ecn;
    "Q04" "RDMA connections use the lossless class" q04_tos;
}

/// Reads the host.
pub(super) fn read(context: &Context) -> Facts {
    let ports = context.ports(&context.snapshot.inventory);
    let roce = ports.filter(|(device, port)| !device.is_soft() && device.is_roce(port));
    Facts {
        ports: roce
            .map(|(device, port)| read_port(context, device, port))
            .collect(),
    }
}

fn read_port(context: &Context, device: &RdmaDevice, port: &Port) -> PortFacts {
    let sys = &context.host.sys;
    let netdev = port.netdev.as_deref();
    let netdev_file = |file: &str| -> Option<String> {
        files::text(&sys.join("class/net").join(netdev?).join(file))
    };
    let flag = |file: &str| netdev_file(file).map(|value| value == "1");
    let (name, number) = (&device.name, port.number);
    let configured = format!("kernel/config/rdma_cm/{name}/ports/{number}/default_roce_tos");
    let class = format!("class/infiniband/{name}/tc/{number}/traffic_class");
    PortFacts {
        id: port_name(device, port),
        trust: netdev_file("qos/trust"),
        dcb: netdev
            .filter(|_| context.live)
            .and_then(|netdev| dcb::ask(netdev).ok()),
        ecn: flag("ecn/roce_rp/enable/3").zip(flag("ecn/roce_np/enable/3")),
        tos: files::parsed(&sys.join(configured))
            .or_else(|| traffic_class(&files::text(&sys.join(class))?)),
    }
}

/// `Global tclass=106`, or the number alone.
fn traffic_class(text: &str) -> Option<u8> {
    text.rsplit('=').next()?.trim().parse().ok()
}

fn each(facts: &Facts, judge: impl Fn(&PortFacts) -> Finding) -> Findings {
    need(!facts.ports.is_empty(), "no RoCE NIC on this node")?;
    let ports = facts.ports.iter();
    Ok(ports.map(|port| judge(port).on(&port.id)).collect())
}

fn q01_trust(facts: &Facts) -> Findings {
    each(facts, |port| {
        let remedy = "mlnx_qos -i NETDEV --trust=dscp, or dcb app add dev NETDEV dscp-prio 26:3";
        match (port.trust.as_deref(), &port.dcb) {
            (Some("dscp"), _) => Finding::pass("trust is dscp").read("qos/trust", "dscp"),
            (Some(other), _) => Finding::warn(
                "DSCP is not used: RoCE packets share the class of all others",
                remedy,
            )
            .read("qos/trust", other),
            (None, Some(dcb)) if dcb.by_dscp.is_empty() => Finding::warn(
                "no DSCP has a priority: RoCE packets share the class of all others",
                remedy,
            ),
            (None, Some(dcb)) => match dcb.by_dscp.iter().find(|(dscp, _)| *dscp == DSCP) {
                Some((_, PRIORITY)) => Finding::pass("DSCP 26 is priority 3"),
                Some((_, other)) => {
                    Finding::warn(format!("DSCP 26 is priority {other}, not 3"), remedy)
                }
                None => Finding::warn("DSCP 26 has no priority", remedy),
            },
            (None, None) => Finding::unknown("neither the driver nor the kernel reports it"),
        }
    })
}

fn q02_pfc(facts: &Facts) -> Findings {
    each(facts, |port| {
        let Some(enabled) = port.dcb.as_ref().and_then(|dcb| dcb.pfc) else {
            return Finding::unknown("neither the driver nor the kernel reports it");
        };
        let on = (0..8).filter(|bit| enabled & 1 << bit != 0);
        let on: Vec<String> = on.map(|bit: u8| bit.to_string()).collect();
        let remedy = "mlnx_qos -i NETDEV --pfc 0,0,0,1,0,0,0,0, or dcb pfc set dev NETDEV \
                      prio-pfc all:off 3:on, and the switch alike";
        let finding = match enabled {
            0 => Finding::warn("off: packets are dropped under congestion", remedy),
            _ if enabled == 1 << PRIORITY => Finding::pass("it is"),
            _ => Finding::warn(
                "on other priorities: a paused one stops ordinary traffic, or RoCE is not covered",
                remedy,
            ),
        };
        finding.read("PFC", words(&on, " "))
    })
}

fn q03_ecn(facts: &Facts) -> Findings {
    each(facts, |port| match port.ecn {
        None => Finding::unknown("only NVIDIA's driver stack reports it (ecn/roce_rp/enable/3)"),
        Some((true, true)) => Finding::pass("on both sides"),
        Some((reaction, _)) => Finding::warn(
            if reaction {
                "received marks are not answered"
            } else {
                "notifications are not heeded"
            },
            "echo 1 > /sys/class/net/NETDEV/ecn/roce_{rp,np}/enable/3",
        ),
    })
}

fn q04_tos(facts: &Facts) -> Findings {
    each(facts, |port| match port.tos {
        None => Finding::unknown(
            "nothing is set in rdma_cm's configfs; applications may choose it (NCCL_IB_TC=106)",
        ),
        Some(tos) if u16::from(tos >> 2) == DSCP => {
            Finding::pass("DSCP 26").read("type of service", tos)
        }
        Some(tos) => Finding::warn(
            format!(
                "DSCP {}: outside of the lossless class, unless the fabric has another",
                tos >> 2
            ),
            "cma_roce_tos -d DEVICE -t 106, and NCCL_IB_TC=106 for NCCL",
        )
        .read("type of service", tos),
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Case, prove};
    use super::*;
    use crate::verdict::Verdict::{NotApplicable, Pass, Unknown, Warn};

    fn port(change: impl FnOnce(&mut PortFacts)) -> Facts {
        let mut port = PortFacts {
            id: "mlx5_0/1".to_owned(),
            trust: Some("dscp".to_owned()),
            dcb: Some(Dcb {
                pfc: Some(8),
                pauses: None,
                by_dscp: vec![(26, 3)],
            }),
            ecn: Some((true, true)),
            tos: Some(106),
        };
        change(&mut port);
        Facts { ports: vec![port] }
    }

    fn by_kernel(by_dscp: Vec<(u16, u8)>) -> Facts {
        port(|port| {
            port.trust = None;
            port.dcb = Some(Dcb {
                by_dscp,
                ..Dcb::default()
            });
        })
    }

    fn pfc(enabled: u8) -> Facts {
        port(|port| {
            port.dcb = Some(Dcb {
                pfc: Some(enabled),
                ..Dcb::default()
            })
        })
    }

    #[test]
    fn each_check_says_what_is_wrong() {
        let good = || port(|_| {});
        let silent = || Facts {
            ports: vec![PortFacts::default()],
        };
        let cases: Vec<Case<Facts>> = vec![
            ("Q01", good(), Pass, "dscp"),
            (
                "Q01",
                port(|port| port.trust = Some("pcp".to_owned())),
                Warn,
                "share the class",
            ),
            ("Q01", by_kernel(vec![(26, 3)]), Pass, "priority 3"),
            ("Q01", by_kernel(vec![(26, 0)]), Warn, "priority 0, not 3"),
            (
                "Q01",
                by_kernel(vec![(46, 5)]),
                Warn,
                "DSCP 26 has no priority",
            ),
            ("Q01", by_kernel(Vec::new()), Warn, "share the class"),
            ("Q01", silent(), Unknown, ""),
            ("Q01", Facts::default(), NotApplicable, ""),
            ("Q02", good(), Pass, ""),
            ("Q02", pfc(0), Warn, "dropped under congestion"),
            ("Q02", pfc(0x18), Warn, "other priorities"),
            ("Q02", silent(), Unknown, ""),
            ("Q03", good(), Pass, ""),
            (
                "Q03",
                port(|port| port.ecn = Some((false, true))),
                Warn,
                "not heeded",
            ),
            (
                "Q03",
                port(|port| port.ecn = Some((true, false))),
                Warn,
                "not answered",
            ),
            ("Q03", silent(), Unknown, ""),
            ("Q04", good(), Pass, ""),
            ("Q04", port(|port| port.tos = Some(0)), Warn, "DSCP 0"),
            ("Q04", silent(), Unknown, ""),
        ];
        prove(CHECKS, &cases);
    }

    #[test]
    fn a_traffic_class_is_read_in_both_forms() {
        assert_eq!(traffic_class("Global tclass=106"), Some(106));
        assert_eq!(traffic_class("106"), Some(106));
        assert_eq!(traffic_class(""), None);
    }
}
