//! Ports, their netdevs and their physical functions (L).

use std::collections::BTreeMap;

use hca::pci::Sriov;
use hca::{LinkLayer, Netdev, Port, PortState, RdmaDevice};
use node::policy::membership;

use super::check::{Findings, checks, need};
use super::context::{Context, Membership, port_name};
use crate::verdict::{Finding, NO_NIC};
use hca::uplink::Uplinks;
use rdma_device_plugin::candidate::without_node_guid;
use rdma_device_plugin::files;

/// What is read.
#[derive(Debug, Clone, Default)]
pub(super) struct Facts {
    /// All ports of RDMA devices.
    pub ports: Vec<PortFacts>,
    /// Why the node's uplinks are not known, if they are not.
    pub uplinks_unknown: Option<String>,
}

/// One port with its netdev.
#[derive(Debug, Clone)]
pub(super) struct PortFacts {
    /// Its RDMA device.
    pub device: RdmaDevice,
    /// The port as the inventory has it.
    pub port: Port,
    /// Its netdev, if it is in this namespace.
    pub netdev: Option<Netdev>,
    /// A signal on the netdev's wire; `None` while it is down.
    pub carrier: Option<bool>,
    /// Why the node itself needs the netdev, if it does.
    pub uplink: Option<String>,
    /// The bond, bridge or VRF that the netdev belongs to, with its kind.
    pub master: Option<(String, String)>,
    /// MTU of the physical function's netdev, of a VF.
    pub physical_mtu: Option<u32>,
    /// Pools that have it.
    pub pools: Vec<Membership>,
    /// Some pool may have it: there is no configuration, or it is in one.
    pub offered: bool,
}

impl PortFacts {
    /// The resource of a pool that gives it to one pod.
    fn exclusive_pool(&self) -> Option<&str> {
        let pool = self.pools.iter().find(|pool| !pool.shared)?;
        Some(&pool.resource)
    }

    fn sriov(&self) -> &Sriov {
        let pci = self.device.pci.as_ref();
        pci.map_or(&Sriov::None, |pci| &pci.sriov)
    }
}

checks! {
    "L01" "netdevs of RDMA ports are up" l01_netdev;
    "L02" "ports are active" l02_state;
    "L03" "links are up" l03_phys_state;
    "L04" "InfiniBand ports have a subnet manager" l04_subnet;
    "L05" "ports run at their rate" l05_rate;
    "L06" "MTUs agree" l06_mtu;
    "L07" "RoCE messages have their full size" l07_roce_mtu;
    "L08" "pools leave the node's uplink alone" l08_uplink;
    "L09" "bonds are given whole" l09_bond;
    "L10" "functions with VFs are not offered" l10_sriov;
    "L13" "InfiniBand ports are members of a partition" l13_partitions;
    "L14" "VFs have a node GUID" l14_node_guid;
}

/// Reads the host.
pub(super) fn read(context: &Context) -> Facts {
    let uplinks = context.uplinks();
    let inventory = &context.snapshot.inventory;
    let sys = &context.host.sys;
    let carrier = |netdev: &Netdev| {
        files::parsed::<u8>(&sys.join("class/net").join(&netdev.name).join("carrier"))
    };
    let master = |netdev: &Netdev| {
        let name = netdev.master.clone()?;
        let kind = inventory.netdev(&name).and_then(|one| one.kind.clone());
        Some((name, kind.unwrap_or_else(|| "master".to_owned())))
    };
    let devices = inventory.rdma_devices.iter();
    let ports = devices.flat_map(|device| device.ports.iter().map(move |port| (device, port)));
    let ports = ports.map(|(device, port)| {
        let netdev = port.netdev.as_deref();
        let netdev = netdev.and_then(|name| inventory.netdev(name));
        let vf = device.pci.as_ref().filter(|pci| pci.is_vf());
        let physical = vf.and_then(|pci| inventory.netdevs_on_pci(pci.physical()).next());
        let uplink = netdev.and_then(|netdev| uplinks.why(&netdev.name));
        PortFacts {
            device: device.clone(),
            port: port.clone(),
            netdev: netdev.cloned(),
            carrier: netdev.and_then(carrier).map(|carrier| carrier == 1),
            uplink: uplink.map(ToString::to_string),
            master: netdev.and_then(master),
            physical_mtu: physical.map(|physical| physical.mtu),
            pools: context.pools_of(&device.name).to_vec(),
            offered: context.offered(&device.name),
        }
    });
    Facts {
        ports: ports.collect(),
        uplinks_unknown: match uplinks {
            Uplinks::Known(_) => None,
            Uplinks::Unknown(reason) => Some(reason),
        },
    }
}

/// One finding for each port that some pool may have.
fn each(facts: &Facts, judge: impl Fn(&PortFacts) -> Option<Finding>) -> Findings {
    need(!facts.ports.is_empty(), NO_NIC)?;
    let finding = |port: &PortFacts| {
        let finding = match port.offered {
            true => judge(port)?,
            false => Finding::not_applicable("in no pool"),
        };
        Some(finding.on(port_name(&port.device, &port.port)))
    };
    Ok(facts.ports.iter().filter_map(finding).collect())
}

/// The same for ports with a netdev.
fn each_netdev(facts: &Facts, judge: impl Fn(&PortFacts, &Netdev) -> Finding) -> Findings {
    each(facts, |port| Some(judge(port, port.netdev.as_ref()?)))
}

/// Whether a port that does not work is a lesser fault: no pool has it, and another one of this
/// node works.
fn may_rest(facts: &Facts, port: &PortFacts) -> bool {
    port.pools.is_empty() && facts.ports.iter().any(|other| other.port.is_active())
}

fn l01_netdev(facts: &Facts) -> Findings {
    each(facts, |port| {
        let Some(netdev) = &port.netdev else {
            let why = "it has no netdev in this namespace";
            return Some(Finding::not_applicable(why));
        };
        let (name, operstate) = (&netdev.name, netdev.operstate.as_str());
        let has_signal = port.carrier != Some(false) && ["up", "unknown"].contains(&operstate);
        let finding = match (netdev.up, has_signal) {
            (false, _) => Finding::fail(
                format!("{name} is switched off"),
                format!(
                    "ip link set {name} up, and have the node's network set-up do it, or linkUp: true \
                     in its pool"
                ),
            ),
            (true, false) => Finding::fail(
                format!("{name} has no signal"),
                "check cable, transceiver and the switch's port (ethtool -m, mlxlink)",
            ),
            (true, true) => Finding::pass(format!("{name} is up")),
        };
        let carrier = port.carrier.map(|up| u8::from(up).to_string());
        let carrier = carrier.as_deref().unwrap_or("unreadable");
        let finding = finding
            .read("operstate", operstate)
            .read("carrier", carrier);
        Some(finding.softened(may_rest(facts, port)))
    })
}

fn l02_state(facts: &Facts) -> Findings {
    each(facts, |port| {
        let finding = match port.port.state {
            PortState::Active | PortState::ActiveDefer => Finding::pass("active"),
            PortState::Init | PortState::Armed if port.port.link_layer == LinkLayer::InfiniBand => {
                Finding::fail(
                    "the subnet manager has not brought it up",
                    "check that a subnet manager runs on this fabric (sminfo, systemctl status opensm)",
                )
            }
            state => Finding::fail(
                format!("the port is {state}"),
                "bring its netdev up (L01), check the link (L03)",
            ),
        };
        let finding = finding.read("state", port.port.state);
        Some(finding.softened(may_rest(facts, port)))
    })
}

fn l03_phys_state(facts: &Facts) -> Findings {
    each(facts, |port| {
        let finding = if port.port.phys_state == "LinkUp" {
            Finding::pass("link up")
        } else {
            Finding::fail(
                format!("the link is in state {}", port.port.phys_state),
                "check cable, transceiver and the switch's port; Disabled means switched off here",
            )
        };
        let finding = finding.read("phys_state", &port.port.phys_state);
        Some(finding.softened(may_rest(facts, port)))
    })
}

fn l04_subnet(facts: &Facts) -> Findings {
    each(facts, |port| {
        let finding = match port.port.link_layer {
            LinkLayer::InfiniBand if port.port.lid == 0 || port.port.sm_lid == 0 => Finding::fail(
                "no subnet manager gave it an address: the link layer alone is only a firmware setting",
                "start a subnet manager, or set the port to Ethernet (mlxconfig LINK_TYPE_P1=2)",
            )
            .softened(may_rest(facts, port)),
            LinkLayer::InfiniBand => Finding::pass("a subnet manager is there"),
            layer => Finding::not_applicable(format!("link layer {layer:?}")),
        };
        let finding = finding.read("Base lid", port.port.lid);
        Some(finding.read("SM lid", port.port.sm_lid))
    })
}

fn l05_rate(facts: &Facts) -> Findings {
    let fastest = |port: &PortFacts| {
        let of_its_board = |other: &&PortFacts| other.device.board_id == port.device.board_id;
        let alike = facts.ports.iter().filter(of_its_board);
        let rates = alike.filter_map(|other| Some(other.port.rate.as_ref()?.mbps));
        rates.max().filter(|_| port.device.board_id.is_some())
    };
    each(facts, |port| {
        if port.device.is_soft() || !port.port.is_active() {
            return Some(Finding::not_applicable("a soft device, or not active"));
        }
        let Some(rate) = &port.port.rate else {
            return Some(Finding::unknown("the driver does not report the rate"));
        };
        let speed = port.netdev.as_ref().and_then(|netdev| netdev.speed_mbps);
        let why = match (speed, fastest(port)) {
            (Some(speed), _) if speed > 0 && speed.abs_diff(rate.mbps) > rate.mbps / 10 => {
                Some("netdev and port report different speeds".to_owned())
            }
            (_, Some(fastest)) if rate.mbps < fastest => {
                Some(format!("others of its kind run at {} Gb/s", fastest / 1000))
            }
            _ if is_narrow(port) => Some("the link runs at a quarter of its width".to_owned()),
            _ => None,
        };
        let remedy =
            "check the cable and the switch port's setting; a link may train down on a bad cable";
        let finding = match why {
            Some(why) => Finding::warn(why, remedy),
            None => Finding::pass("at its rate"),
        };
        let speed = speed.map_or("unknown".to_owned(), |speed| format!("{speed} Mb/s"));
        Some(finding.read("rate", rate).read("speed", speed))
    })
}

/// Whether an InfiniBand link, which has four lanes or two, came up with one.
fn is_narrow(port: &PortFacts) -> bool {
    let rate = port.port.rate.as_ref();
    let signalling = rate.and_then(|rate| rate.signalling.as_deref());
    port.port.link_layer == LinkLayer::InfiniBand
        && signalling.is_some_and(|signalling| signalling.starts_with("1X"))
}

fn l06_mtu(facts: &Facts) -> Findings {
    each_netdev(facts, |port, netdev| {
        let (name, mtu) = (&netdev.name, netdev.mtu);
        let finding = match (port.physical_mtu, more_usual_mtu(facts, port, mtu)) {
            (Some(physical), _) if mtu > physical => Finding::warn(
                format!("larger than the {physical} of its physical function: packets are dropped"),
                format!("ip link set {name} mtu {physical}"),
            ),
            (_, Some((other, ports))) => Finding::warn(
                format!(
                    "{ports} others of its kind have {other}: rails of different MTU hang in large \
                     messages"
                ),
                format!("ip link set {name} mtu {other}, on all nodes alike"),
            ),
            _ => Finding::pass("as the others"),
        };
        finding.read(format!("mtu of {name}"), mtu)
    })
}

/// Another MTU that at least as many of the ports have which work together with this one, with their
/// number.
fn more_usual_mtu(facts: &Facts, port: &PortFacts, mtu: u32) -> Option<(u32, usize)> {
    let mut ports_by_mtu: BTreeMap<u32, usize> = BTreeMap::new();
    let mates = facts.ports.iter().filter(|other| are_mates(port, other));
    for netdev in mates.filter_map(|mate| mate.netdev.as_ref()) {
        *ports_by_mtu.entry(netdev.mtu).or_default() += 1;
    }
    let own = ports_by_mtu.remove(&mtu).unwrap_or_default();
    let most = ports_by_mtu.into_iter().max_by_key(|(_, ports)| *ports);
    most.filter(|(_, ports)| *ports >= own)
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

fn l07_roce_mtu(facts: &Facts) -> Findings {
    each_netdev(facts, |port, netdev| {
        if !port.device.is_roce(&port.port) {
            return Finding::not_applicable("not RoCE");
        }
        let name = &netdev.name;
        let finding = match port.port.active_mtu {
            Some(mtu) if mtu >= 4096 => Finding::pass("messages of 4096 bytes a packet"),
            Some(mtu) => Finding::warn(
                format!("only {mtu} bytes a packet: 4096 need a netdev MTU of 4188 or more"),
                format!("ip link set {name} mtu 9000 (8896 on Google's network), and the switches"),
            ),
            None => Finding::unknown("the netdev's MTU is too small for any, or not known"),
        };
        finding.read(format!("mtu of {name}"), netdev.mtu)
    })
}

fn l08_uplink(facts: &Facts) -> Findings {
    each_netdev(facts, |port, netdev| {
        let name = &netdev.name;
        if let Some(reason) = &facts.uplinks_unknown {
            let why = format!("whether the node itself needs {name} is not known: {reason}");
            return Finding::unknown(why);
        }
        let bound = match (&port.master, &port.uplink) {
            (_, Some(why)) => format!("{name} is the node's own: {why}"),
            (Some((master, kind)), _) if kind != "bond" => {
                format!("{name} belongs to the {kind} {master}")
            }
            _ => return Finding::pass(format!("{name} is free")),
        };
        match (port.exclusive_pool(), port.pools.first()) {
            (Some(pool), _) => Finding::fail(
                format!("{bound}, and {pool} offers it: the node would lose its network"),
                format!("leave {name} out of {pool} (ifNames or pciAddresses)"),
            ),
            (None, Some(Membership { resource, .. })) => Finding::warn(
                format!("{bound}, and pods of {resource} share its bandwidth with the node"),
                "give RDMA traffic a port of its own, or rate-limit it",
            ),
            (None, None) => {
                Finding::not_applicable(format!("{bound}; keep it out of exclusive pools"))
            }
        }
    })
}

fn l09_bond(facts: &Facts) -> Findings {
    each_netdev(facts, |port, netdev| {
        if netdev.kind.as_deref() == Some("bond") && !netdev.lowers.is_empty() {
            let members = netdev.lowers.join(" ");
            return Finding::pass("the bond as a whole").read("members", members);
        }
        let Some((bond, _)) = port.master.as_ref().filter(|(_, kind)| kind == "bond") else {
            return Finding::not_applicable("not in a bond");
        };
        let name = &netdev.name;
        match port.exclusive_pool() {
            Some(pool) => Finding::fail(
                format!(
                    "{name} is a member of {bond}: it cannot be moved into a pod, as {pool} would"
                ),
                format!("offer {bond} in a shared pool (macvlan, ipvlan), or take the bond apart"),
            ),
            None => Finding::pass(format!(
                "a member of {bond}, shared or in no exclusive pool"
            )),
        }
    })
}

fn l10_sriov(facts: &Facts) -> Findings {
    each(facts, |port| {
        if let Some(netdev) = port
            .netdev
            .as_ref()
            .filter(|netdev| netdev.is_representor())
        {
            let name = &netdev.name;
            let why =
                format!("{name} is the host side of a VF: it carries no RDMA traffic of its own");
            return Some(Finding::fail(why, "choose the VF itself"));
        }
        Some(match port.sriov() {
            Sriov::None => Finding::not_applicable("without SR-IOV"),
            Sriov::Virtual { physical, .. } => Finding::pass(format!("a VF of {physical}")),
            Sriov::Physical { functions, .. } => {
                let count = functions.len();
                let finding = match port.exclusive_pool().filter(|_| count > 0) {
                    None => Finding::pass("a physical function"),
                    Some(pool) => Finding::warn(
                        format!(
                            "it has {count} VFs, which lose their uplink settings when a pod gets it by \
                             {pool}"
                        ),
                        "choose the VFs or the physical function, not both (isVf in a selector)",
                    ),
                };
                finding.read("sriov_numvfs", count)
            }
        })
    })
}

fn l13_partitions(facts: &Facts) -> Findings {
    each(facts, |port| {
        let layer = port.port.link_layer;
        if layer != LinkLayer::InfiniBand {
            return Some(Finding::not_applicable(format!("link layer {layer:?}")));
        }
        let keys: Vec<u16> = port.port.pkeys.iter().map(|pkey| pkey.key).collect();
        let is_full = |key: &u16| key & 0x8000 != 0;
        let remedy =
            "add the port's GUID to a partition as a full member (OpenSM: partitions.conf)";
        let finding = if keys.is_empty() {
            let why = "it is not a member of a partition: no packet leaves it";
            Finding::fail(why, remedy).softened(may_rest(facts, port))
        } else if !keys.iter().any(is_full) {
            Finding::warn(
                "it is a limited member: other limited members do not reach it",
                remedy,
            )
        } else {
            Finding::pass("it is a full member")
        };
        let shown: Vec<String> = keys.iter().copied().map(membership).collect();
        Some(finding.read("PKeys", shown.join(", ")))
    })
}

fn l14_node_guid(facts: &Facts) -> Findings {
    each(facts, |port| {
        if let Some((why, remedy)) = without_node_guid(&port.device) {
            return Some(Finding::fail(why, remedy));
        }
        Some(match (port.sriov(), port.device.node_guid) {
            (Sriov::Virtual { .. }, Some(guid)) => {
                Finding::pass("it has one").read("node GUID", guid)
            }
            _ => Finding::not_applicable("not a VF"),
        })
    })
}

#[cfg(test)]
mod tests;
