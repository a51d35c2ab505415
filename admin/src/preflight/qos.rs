//! Lossless Ethernet, as far as the host shows it (Q). The switch's half cannot be read.
//!
//! The usual agreement: RoCE packets carry DSCP 26, which is priority 3, the only one with flow
//! control; congestion notifications carry DSCP 48, priority 6.

use super::context::Context;
use super::dcb::{self, Dcb};
use super::engine::{Check, Fact, Unread, check, some};
use super::link::{PortFacts, netdev_file, roce};
use super::read;
use crate::verdict::Finding;
use crate::verdict::Verdict::Warn;

const DSCP: u16 = 26;

pub(super) fn checks() -> Vec<Check> {
    vec![
        check("Q01", "port", Warn, "NICs sort packets by DSCP")
            .reads("qos/trust of the netdev, or the kernel's DCB application table")
            .remedy("mlnx_qos -i {netdev} --trust=dscp, or dcb app add dev {netdev} dscp-prio 26:3")
            .compare(
                hardware_roce,
                trust,
                |trust| trust == "dscp" || trust == "DSCP 26 is priority 3",
                "{fact}: RoCE packets share the class of all others",
            ),
        check("Q02", "port", Warn, "flow control is on priority 3 only")
            .reads("PFC of the netdev (RTM_GETDCB)")
            .remedy(
                "mlnx_qos -i {netdev} --pfc 0,0,0,1,0,0,0,0, or dcb pfc set dev {netdev} prio-pfc \
                 all:off 3:on, and the switch alike",
            )
            .compare(
                hardware_roce,
                |context, port| priorities(&ask(context, port)?),
                |priorities| priorities == "priority 3",
                "PFC on {fact}: RoCE packets are dropped under congestion, or ordinary traffic is \
                 paused",
            ),
        check("Q03", "port", Warn, "congestion is notified on priority 3")
            .reads("ecn/roce_rp/enable/3 and ecn/roce_np/enable/3 of the netdev")
            .remedy("echo 1 > /sys/class/net/{netdev}/ecn/roce_{rp,np}/enable/3")
            .compare(
                hardware_roce,
                ecn,
                |ecn| ecn == "roce_rp 1, roce_np 1",
                "{fact}: marks are not answered, or notifications are not obeyed",
            ),
        check(
            "Q04",
            "port",
            Warn,
            "RDMA connections use the lossless class",
        )
        .reads("default_roce_tos of rdma_cm's configfs, or traffic_class of the port")
        .remedy("cma_roce_tos -d {device} -t 106, and NCCL_IB_TC=106 for NCCL")
        .compare(
            hardware_roce,
            tos,
            |tos| u16::from(tos >> 2) == DSCP,
            "type of service {fact} is not DSCP 26: outside of the lossless class, unless the \
                 fabric has another",
        ),
    ]
}

fn hardware_roce(context: &Context) -> Result<Vec<&PortFacts>, Finding> {
    let ports = roce(context)?.into_iter();
    some(
        ports.filter(|port| !port.device.is_soft()),
        "no RoCE NIC on this node",
    )
}

fn ask(context: &Context, port: &PortFacts) -> Fact<Dcb> {
    let netdev = port.netdev.as_ref().filter(|_| context.live);
    let Some(netdev) = netdev else {
        return Err(Unread(
            "DCB: this process is not in the netdev's network namespace".into(),
        ));
    };
    dcb::ask(&netdev.name).map_err(|error| Unread(format!("DCB: {error}")))
}

fn trust(context: &Context, port: &PortFacts) -> Fact<String> {
    match netdev_file(context, port, "qos/trust")? {
        Some(trust) => Ok(trust),
        None => Ok(priority_of_roce(&ask(context, port)?)),
    }
}

fn priority_of_roce(dcb: &Dcb) -> String {
    let of_roce = dcb.by_dscp.iter().find(|(dscp, _)| *dscp == DSCP);
    match of_roce {
        Some((_, priority)) => format!("DSCP 26 is priority {priority}"),
        None => "DSCP 26 has no priority".to_owned(),
    }
}

/// Priorities with flow control, in words.
fn priorities(dcb: &Dcb) -> Fact<String> {
    let bits = dcb
        .pfc
        .ok_or_else(|| Unread("the driver does not report PFC".into()))?;
    let on = (0..8).filter(|bit| bits & 1 << bit != 0);
    let on: Vec<String> = on.map(|bit: u8| bit.to_string()).collect();
    Ok(match on.as_slice() {
        [] => "no priority".to_owned(),
        [only] => format!("priority {only}"),
        several => format!("priorities {}", several.join(" ")),
    })
}

fn ecn(context: &Context, port: &PortFacts) -> Fact<String> {
    let enabled = |point: &str| {
        let value = netdev_file(context, port, &format!("ecn/{point}/enable/3"))?;
        let value = value.ok_or_else(|| Unread("only NVIDIA's driver stack reports ECN".into()))?;
        Ok(format!("{point} {value}"))
    };
    Ok([enabled("roce_rp")?, enabled("roce_np")?].join(", "))
}

fn tos(context: &Context, port: &PortFacts) -> Fact<u8> {
    let (sys, device, number) = (&context.host.sys, &port.device.name, port.port.number);
    let configured = format!("kernel/config/rdma_cm/{device}/ports/{number}/default_roce_tos");
    let class = format!("class/infiniband/{device}/tc/{number}/traffic_class");
    let text = match read::text(context, &sys.join(configured))? {
        Some(tos) => Some(tos),
        None => read::text(context, &sys.join(class))?,
    };
    text.as_deref().and_then(traffic_class).ok_or_else(|| {
        Unread(
            "rdma_cm's configfs has no setting; applications may choose it (NCCL_IB_TC=106)".into(),
        )
    })
}

/// `Global tclass=106`, or the number alone.
fn traffic_class(text: &str) -> Option<u8> {
    text.rsplit('=').next()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dcb(pfc: Option<u8>, by_dscp: &[(u16, u8)]) -> Dcb {
        Dcb {
            pfc,
            by_dscp: by_dscp.to_vec(),
        }
    }

    #[test]
    fn a_traffic_class_is_read_in_both_forms() {
        assert_eq!(traffic_class("Global tclass=106"), Some(106));
        assert_eq!(traffic_class("106"), Some(106));
        assert_eq!(traffic_class(""), None);
    }

    #[test]
    fn what_the_kernel_says_of_priorities_is_a_phrase() {
        let shown = |pfc| priorities(&dcb(Some(pfc), &[])).unwrap();
        assert_eq!(
            (shown(0), shown(8)),
            ("no priority".into(), "priority 3".into())
        );
        assert_eq!(shown(0x18), "priorities 3 4");
        assert!(priorities(&dcb(None, &[])).is_err());
        assert_eq!(
            priority_of_roce(&dcb(None, &[(46, 5), (26, 3)])),
            "DSCP 26 is priority 3"
        );
        assert_eq!(
            priority_of_roce(&dcb(None, &[(46, 5)])),
            "DSCP 26 has no priority"
        );
    }
}
