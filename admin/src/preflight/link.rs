//! Ports and their netdevs (L).

use std::collections::BTreeMap;

use hca::pci::Sriov;
use hca::{LinkLayer, Netdev, Port, PortState, RdmaDevice};
use node::policy::membership;
use pools::host_snapshot::HostSnapshot;

use super::context::{ConfiguredPools, Context, Membership};
use super::engine::{Check, Fact, Judged, Object, Unread, check, some};
use super::read;
use crate::node_guid;
use crate::verdict::Verdict::{Fail, Warn};
use crate::verdict::{Finding, NO_NIC};

/// One port with its netdev.
#[derive(Debug, Clone)]
pub(super) struct PortFacts {
    pub device: RdmaDevice,
    pub port: Port,
    /// Its netdev, if it is in this namespace.
    pub netdev: Option<Netdev>,
    /// MTU of the physical function's netdev, of a VF.
    pub physical_mtu: Option<u32>,
    /// Pools that have it.
    pub pools: Vec<Membership>,
    /// Some pool may have it: there is no configuration, or it is in one.
    pub offered: bool,
}

impl Object for PortFacts {
    fn name(&self) -> Option<String> {
        Some(format!("{}/{}", self.device.name, self.port.number))
    }

    fn fill(&self, template: &str) -> String {
        let netdev = self.port.netdev.as_deref().unwrap_or("NETDEV");
        template
            .replace("{netdev}", netdev)
            .replace("{device}", &self.device.name)
    }
}

impl PortFacts {
    fn is_infiniband(&self) -> bool {
        self.port.link_layer == LinkLayer::InfiniBand
    }
}

pub(super) fn checks() -> Vec<Check> {
    vec![
        check("L01", "port", Fail, "ports are active")
            .reads("flags of the netdev; state, phys_state, lid and sm_lid of the port")
            .remedy("check cable, transceiver and the switch's port (ethtool -m, mlxlink)")
            .each(ports_of_pools, l01_active),
        check("L05", "port", Warn, "ports run at their rate")
            .reads("rate of the port, speed of the netdev")
            .remedy(
                "check the cable and the switch port's setting; a link may train down on a bad \
                 cable",
            )
            .each(active_hardware, l05_rate),
        check("L06", "port", Warn, "MTUs agree")
            .reads("mtu of the netdev")
            .remedy("ip link set {netdev} mtu MTU, on all nodes alike")
            .each(with_netdev, l06_mtu),
        check("L07", "port", Warn, "RoCE packets carry 4096 bytes")
            .reads("path MTU that the netdev's mtu allows")
            .remedy("ip link set {netdev} mtu 9000 (8896 on Google's network), and the switches")
            .compare(
                roce,
                |_, port| {
                    let mtu = port.netdev.as_ref().and(port.port.active_mtu);
                    mtu.ok_or_else(|| {
                        Unread(
                            "its netdev's MTU is too small, or in another network namespace".into(),
                        )
                    })
                },
                |mtu| *mtu >= 4096,
                "only {fact} bytes a packet: 4096 need a netdev MTU of 4188 or more",
            ),
        check(
            "L13",
            "port",
            Fail,
            "InfiniBand ports are members of a partition",
        )
        .reads("pkeys of the port")
        .remedy("add the port's GUID to a partition as a full member (OpenSM: partitions.conf)")
        .each(infiniband, l13_partitions),
        check("L14", "port", Fail, "VFs have a node GUID")
            .reads("node_guid of the RDMA device")
            .remedy("ip link set PF vf N node_guid GUID, then bind the VF's driver again")
            .each(ports_of_pools, l14_node_guid),
    ]
}

/// The ports of a snapshot.
pub(super) fn ports(snapshot: &HostSnapshot, pools: Option<&ConfiguredPools>) -> Vec<PortFacts> {
    let inventory = &snapshot.inventory;
    let ports = inventory.hcas.iter().flat_map(hca::Hca::ports);
    ports
        .map(|(device, port)| {
            let netdev = port.netdev.as_deref();
            let vf = device.pci.as_ref().filter(|pci| pci.is_vf());
            let physical = vf.and_then(|pci| inventory.netdevs_on_pci(pci.physical()).next());
            let of_device = pools.and_then(|pools| pools.of_device.get(&device.name));
            PortFacts {
                device: device.clone(),
                port: port.clone(),
                netdev: netdev.and_then(|name| inventory.netdev(name)).cloned(),
                physical_mtu: physical.map(|physical| physical.mtu),
                pools: of_device.cloned().unwrap_or_default(),
                offered: pools.is_none() || of_device.is_some(),
            }
        })
        .collect()
}

fn chosen<'a>(
    context: &'a Context,
    none: &'static str,
    is_meant: impl Fn(&&PortFacts) -> bool,
) -> Result<Vec<&'a PortFacts>, Finding> {
    let ports = some(&context.ports, NO_NIC)?.into_iter();
    let offered = some(ports.filter(|port| port.offered), "no port is in a pool")?;
    some(offered.into_iter().filter(is_meant), none)
}

/// The ports that a pool may have.
fn ports_of_pools(context: &Context) -> Result<Vec<&PortFacts>, Finding> {
    chosen(context, NO_NIC, |_| true)
}

fn with_netdev(context: &Context) -> Result<Vec<&PortFacts>, Finding> {
    chosen(context, "no port has a netdev here", |port| {
        port.netdev.is_some()
    })
}

/// Those whose messages go by RoCE. iWARP runs over Ethernet as well.
pub(super) fn roce(context: &Context) -> Result<Vec<&PortFacts>, Finding> {
    chosen(context, "no RoCE port on this node", |port| {
        port.device.is_roce(&port.port)
    })
}

fn infiniband(context: &Context) -> Result<Vec<&PortFacts>, Finding> {
    chosen(context, "no InfiniBand port on this node", |port| {
        port.is_infiniband()
    })
}

fn active_hardware(context: &Context) -> Result<Vec<&PortFacts>, Finding> {
    chosen(context, "no port of a NIC is active", |port| {
        !port.device.is_soft() && port.port.is_active()
    })
}

/// Whether a port that does not work is a lesser fault: no pool has it, and another one of this
/// node works.
fn is_spare(context: &Context, port: &PortFacts) -> bool {
    port.pools.is_empty() && context.ports.iter().any(|other| other.port.is_active())
}

/// The worst of netdev, port state, link and subnet manager.
fn l01_active(context: &Context, check: &Check, port: &PortFacts) -> Judged {
    let state = port.port.state;
    let manager =
        "check that a subnet manager runs on this fabric (sminfo, systemctl status opensm)";
    let is_active = matches!(state, PortState::Active | PortState::ActiveDefer);
    let has_lid = port.port.lid != 0 && port.port.sm_lid != 0;
    let link = port.port.phys_state.as_str();
    let finding = match &port.netdev {
        Some(netdev) if !netdev.up => Finding::fail(
            port.fill("{netdev} is switched off"),
            port.fill(
                "ip link set {netdev} up in the node's network set-up, or linkUp: true in its pool",
            ),
        ),
        _ if link == "Unknown" || state == PortState::Unknown => {
            return Err(Finding::unknown(
                "the driver does not report state and phys_state",
            ));
        }
        _ if link != "LinkUp" => check.fault(port, &format!("the link is in state {link}")),
        _ if port.is_infiniband() && matches!(state, PortState::Init | PortState::Armed) => {
            Finding::fail("the subnet manager has not brought it up", manager)
        }
        _ if !is_active => check.fault(port, &format!("the port is {state}")),
        _ if port.is_infiniband() && !has_lid => Finding::fail(
            "no subnet manager gave it an address: the link layer alone is only a firmware setting",
            "start a subnet manager, or set the port to Ethernet (mlxconfig LINK_TYPE_P1=2)",
        ),
        _ if port.is_infiniband() => Finding::pass("active, with a subnet manager"),
        _ => Finding::pass("active"),
    };
    let finding = finding.softened(is_spare(context, port));
    let mut finding = finding.read("state", state).read("phys_state", link);
    if port.is_infiniband() {
        finding = finding
            .read("lid", port.port.lid)
            .read("sm_lid", port.port.sm_lid);
    }
    Ok(finding)
}

fn l05_rate(context: &Context, check: &Check, port: &PortFacts) -> Judged {
    let Some(rate) = &port.port.rate else {
        return Err(Finding::unknown("the driver does not report the rate"));
    };
    let board = &port.device.board_id;
    let alike = context
        .ports
        .iter()
        .filter(|other| other.device.board_id == *board);
    let rates = alike.filter_map(|other| Some(other.port.rate.as_ref()?.mbps));
    let fastest = rates
        .max()
        .filter(|fastest| board.is_some() && rate.mbps < *fastest);
    let speed = port.netdev.as_ref().and_then(|netdev| netdev.speed_mbps);
    let differs = |speed: u32| speed > 0 && speed.abs_diff(rate.mbps) > rate.mbps / 10;
    let signalling = rate.signalling().unwrap_or_default();
    let finding = if speed.is_some_and(differs) {
        check.fault(port, "netdev and port report different speeds")
    } else if let Some(fastest) = fastest {
        check.fault(
            port,
            &format!("others of its kind run at {} Gb/s", fastest / 1000),
        )
    } else if port.is_infiniband() && signalling.starts_with("1X") {
        // An InfiniBand link has four lanes or two.
        check.fault(port, "the link runs at a quarter of its width")
    } else {
        Finding::pass(rate.to_string())
    };
    let speed = speed.map_or("not reported".to_owned(), |speed| format!("{speed} Mb/s"));
    Ok(finding.read("rate", rate).read("speed", speed))
}

fn l06_mtu(context: &Context, _: &Check, port: &PortFacts) -> Judged {
    let Some(Netdev { name, mtu, .. }) = &port.netdev else {
        return Err(Finding::not_applicable("no netdev here"));
    };
    let finding = match (port.physical_mtu, more_usual_mtu(context, port, *mtu)) {
        (Some(physical), _) if *mtu > physical => Finding::warn(
            format!("larger than the {physical} of its physical function: packets are dropped"),
            format!("ip link set {name} mtu {physical}"),
        ),
        (_, Some((other, ports))) => Finding::warn(
            format!(
                "{ports} others of its kind have {other}: rails of different MTU hang in large messages"
            ),
            format!("ip link set {name} mtu {other}, on all nodes alike"),
        ),
        _ => Finding::pass(format!("{mtu}, like the others")),
    };
    Ok(finding.read(format!("mtu of {name}"), mtu))
}

/// Another MTU that at least as many of the ports have which work together with this one, with their
/// number.
fn more_usual_mtu(context: &Context, port: &PortFacts, mtu: u32) -> Option<(u32, usize)> {
    let mut ports_by_mtu: BTreeMap<u32, usize> = BTreeMap::new();
    let mates = context.ports.iter().filter(|other| are_mates(port, other));
    for netdev in mates.filter_map(|mate| mate.netdev.as_ref()) {
        *ports_by_mtu.entry(netdev.mtu).or_default() += 1;
    }
    let same = ports_by_mtu.remove(&mtu).unwrap_or_default();
    let most = ports_by_mtu.into_iter().max_by_key(|(_, ports)| *ports);
    most.filter(|(_, ports)| *ports >= same)
}

/// Whether two ports should be alike, being of one pool. Without pools that say so, those of one board
/// should.
fn are_mates(port: &PortFacts, other: &PortFacts) -> bool {
    let of_one_pool = |membership: &Membership| {
        let mut others = other.pools.iter();
        others.any(|o| o.resource == membership.resource)
    };
    let alike = match (port.pools.as_slice(), other.pools.as_slice()) {
        ([], []) => {
            let (own, others) = (&port.device.board_id, &other.device.board_id);
            own.is_some() && own == others
        }
        (pools, _) => pools.iter().any(of_one_pool),
    };
    alike && other.offered && port.port.link_layer == other.port.link_layer
}

fn l13_partitions(context: &Context, check: &Check, port: &PortFacts) -> Judged {
    let keys: Vec<u16> = port.port.pkeys.iter().map(|pkey| pkey.key).collect();
    let finding = if keys.is_empty() {
        let fault = check.fault(
            port,
            "it is not a member of a partition: no packet leaves it",
        );
        fault.softened(is_spare(context, port))
    } else if !keys.iter().any(|key| key & 0x8000 != 0) {
        let why = "it is a limited member: other limited members do not reach it";
        Finding::warn(why, check.remedy)
    } else {
        Finding::pass("it is a full member")
    };
    let shown: Vec<String> = keys.into_iter().map(membership).collect();
    Ok(finding.read("PKeys", shown.join(", ")))
}

fn l14_node_guid(_: &Context, _: &Check, port: &PortFacts) -> Judged {
    if let Some((why, remedy)) = node_guid::missing(&port.device) {
        return Ok(Finding::fail(why, remedy));
    }
    let sriov = port.device.pci.as_ref().map(|pci| &pci.sriov);
    Ok(match (sriov, port.device.node_guid) {
        (Some(Sriov::Virtual { .. }), Some(guid)) => Finding::pass(format!("node GUID {guid}")),
        _ => Finding::not_applicable("not a VF"),
    })
}

/// The file of a port's netdev.
pub(super) fn netdev_file(context: &Context, port: &PortFacts, file: &str) -> Fact<Option<String>> {
    match &port.port.netdev {
        Some(netdev) => read::text(
            context,
            &context.host.sys.join("class/net").join(netdev).join(file),
        ),
        None => Ok(None),
    }
}
