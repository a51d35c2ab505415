//! `rdmactl discover`: the RDMA devices of this host, for people and for machines.

use std::net::IpAddr;
use std::path::PathBuf;

use hca::RdmaDevice;
use hca::chardev::CharDevice;
use hca::gid::GidEntry;
use hca::inventory::Unusable;
use hca::port::Port;
use hca::uplink::Uplinks;
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage, AddressScope};
use node::table::cell;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use pools::config;
use pools::config::flags::{Defaults, NodeAddresses, config_file};
use pools::host_snapshot::HostSnapshot;
use pools::pool::Pools;
use pools::snapshot::Snapshot;

use crate::global::{Global, NODE};
use crate::on_host::OnHost;
use crate::output::{Ended, Exit, optional, table};
use crate::plan::read::PlanNode;
use crate::topology;
use crate::verdict::words;

/// Shows the RDMA devices of this host.
#[derive(Debug, clap::Args)]
pub(crate) struct Discover {
    /// Also the entries of the GID tables, with their indexes (-x of verbs programs)
    #[arg(long, help_heading = NODE)]
    gids: bool,
    /// Configuration file, for the pools [default: as for "run", where there is one]
    #[arg(long, help_heading = NODE, value_name = "FILE", env = "RDMA_CONFIG_FILE")]
    config_file: Option<PathBuf>,
    #[command(flatten, next_help_heading = NODE)]
    defaults: Defaults,
    #[command(flatten, next_help_heading = NODE)]
    addresses: NodeAddresses,
}

impl Discover {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        let host = OnHost::scan(global, &self.addresses.node_addresses, &global.policy)?;
        let pools = self.pools(&host)?;
        let OnHost {
            scanned,
            hcas: candidates,
            unusable,
        } = host;
        let addresses = HostAddress::list(&scanned);
        let (machine, _) = topology::machine(scanned.machine.clone(), &global.policy);
        let hca = |hca: &hca::Hca| HcaDocument::of(hca, &scanned, pools.as_ref());
        let document = DiscoverDocument {
            hcas: candidates.iter().map(hca).collect(),
            unusable,
            inventory: json!(scanned.inventory),
            facts: PlanNode::of(&scanned, &candidates, &machine, addresses.clone()),
            addresses,
        };
        global.say(json!(document), || {
            let mut text = String::new();
            if candidates.is_empty() && document.unusable.is_empty() {
                let directory = global.host().sys.join("class/infiniband");
                let directory = directory.display();
                return format!("no RDMA device: {directory} has none; is the driver loaded?\n");
            }
            text += &ports(&candidates, &scanned, pools.as_ref());
            if self.gids {
                text += &format!("\n{}\n", gids(&scanned));
            }
            for one in &document.unusable {
                text += &format!("{}: {}\n", one.device.name, one.reason);
            }
            text + &mode(&scanned)
        });
        Ok(Exit::Good)
    }

    /// The pools, if there is a configuration. One that is merely at its usual place and wrong
    /// does not keep the hardware from being shown.
    fn pools(&self, host: &OnHost) -> anyhow::Result<Option<Pools>> {
        let named = self.config_file.is_some();
        let Ok(file) = config_file(self.config_file.clone()) else {
            return Ok(None);
        };
        match config::load(&file, &self.defaults) {
            Ok(config) => Ok(Some(host.pools(&config))),
            Err(error) if named => Err(error),
            Err(_) => Ok(None),
        }
    }
}

fn mode(scanned: &HostSnapshot) -> String {
    let (mode, cm) = (scanned.inventory.netns_mode, &scanned.inventory.rdma_cm);
    if mode.is_none() && cm.is_none() {
        return String::new();
    }
    let mode = mode.map_or("unknown", hca::NetnsMode::word);
    let cm = cm
        .as_ref()
        .map(|cm| format!("/dev/{} {}", cm.dev_name(), cm.number));
    let cm = cm.unwrap_or_else(|| "none (load rdma_ucm)".to_owned());
    format!("network namespace mode: {mode}; connection manager: {cm}\n")
}

/// Resources that an HCA is offered as.
fn offered<'p>(candidate: &hca::Hca, pools: Option<&'p Pools>) -> Vec<&'p str> {
    let is_member = |snapshot: &&'p Snapshot| {
        let mut members = snapshot.members().iter();
        members.any(|member| member.hca.id == candidate.id)
    };
    let snapshots = pools.into_iter().flat_map(|pools| &pools.snapshots);
    let offering = snapshots.filter(is_member);
    offering
        .map(|snapshot| snapshot.resource().as_str())
        .collect()
}

/// One line for each filled entry.
fn gids(scanned: &HostSnapshot) -> String {
    let devices = scanned.inventory.rdma_devices();
    let ports = devices.flat_map(|device| device.ports.iter().map(move |port| (device, port)));
    let entries = ports.flat_map(|(device, port)| {
        let entries = port.gids.entries.iter();
        entries.map(move |entry| (device, port, entry))
    });
    let row = |(device, port, entry): (&RdmaDevice, &Port, &GidEntry)| {
        // On InfiniBand a GID is not an IP address.
        let address = match entry.netdev {
            Some(_) => entry.gid.ip().to_string(),
            None => entry.gid.to_string(),
        };
        vec![
            device.name.clone(),
            port.number.to_string(),
            entry.index.to_string(),
            optional(entry.kind.as_ref()),
            optional(entry.netdev.as_deref()),
            address,
        ]
    };
    table(
        "DEVICE  PORT  INDEX  TYPE  NETDEV  ADDRESS",
        entries.map(row),
    )
}

/// One line for each port; for a device whose ports are not seen here, one by what is known of it.
fn ports(candidates: &[hca::Hca], scanned: &HostSnapshot, pools: Option<&Pools>) -> String {
    let mut header =
        "DEVICE  PORT  STATE  LINK  RATE  NETDEV  HCA  KIND  NUMA  DRIVER  NODES".to_owned();
    header += if pools.is_some() { "  RESOURCES" } else { "" };
    let devices = candidates.iter().flat_map(|hca| {
        let all = hca.rdma_devices.iter().chain(&hca.sub_devices);
        all.map(move |rdma| (hca, rdma))
    });
    let rows = devices.flat_map(|(candidate, rdma)| {
        let device = scanned.inventory.rdma_device(&rdma.name);
        let driver = device.and_then(|device| device.driver.as_deref());
        let mut common = vec![
            candidate.id.to_string(),
            candidate.function().to_string(),
            optional(candidate.numa_node()),
            optional(driver),
            nodes(rdma, scanned),
        ];
        if pools.is_some() {
            common.push(cell(&offered(candidate, pools).join(" ")));
        }
        let away = away(candidate, scanned);
        let is_sub = candidate.sub_devices.contains(rdma);
        let of_port = |port: &Port| {
            let in_a_pod = || Some(format!("{} (in a pod)", away.as_ref()?));
            [
                port.number.to_string(),
                format!("{} {}", port.state, port.phys_state),
                format!("{:?}", port.link_layer),
                optional(port.rate.as_ref()),
                optional(port.netdev.clone().or_else(in_a_pod)),
            ]
        };
        let ports: Vec<[String; 5]> = match device {
            Some(device) => (device.ports.iter())
                .filter(|port| port.carries_data)
                .map(of_port)
                .collect(),
            None => {
                let known = rdma.ports.first();
                let state = if is_sub {
                    "for management alone"
                } else {
                    "in another netns"
                };
                vec![[
                    "-".into(),
                    state.into(),
                    optional(known.map(|port| format!("{:?}", port.link_layer))),
                    optional(known.and_then(|port| port.rate.as_ref())),
                    optional(away.clone().filter(|_| !is_sub)),
                ]]
            }
        };
        let row = |port: [String; 5]| [std::slice::from_ref(&rdma.name), &port, &common].concat();
        ports.into_iter().map(row).collect::<Vec<_>>()
    });
    table(&header, rows)
}

/// The netdev of an HCA with one port, where another network namespace has it.
fn away(candidate: &hca::Hca, scanned: &HostSnapshot) -> Option<String> {
    let [device] = candidate.rdma_devices.as_slice() else {
        return None;
    };
    let is_away = |name: &&str| device.ports.len() == 1 && scanned.inventory.netdev(name).is_none();
    candidate.netdev_names().find(is_away).map(str::to_owned)
}

/// Why the node itself needs a netdev of this HCA.
pub(crate) fn uplink(candidate: &hca::Hca, scanned: &HostSnapshot) -> Option<String> {
    let is_here = |name: &&str| scanned.inventory.netdev(name).is_some();
    let mut netdevs = candidate.netdev_names().filter(is_here);
    match &scanned.uplinks {
        Uplinks::Known(uplinks) => {
            netdevs.find_map(|name| Some(format!("{name}: {}", uplinks.get(name)?)))
        }
        Uplinks::Unknown(reason) => netdevs
            .next()
            .map(|name| format!("whether the node needs {name} is not known: {reason}")),
    }
}

/// The nodes of an RDMA device; what cannot be handed over is marked.
fn nodes(device: &RdmaDevice, scanned: &HostSnapshot) -> String {
    let word = |device: &CharDevice| match scanned.obstacle(device) {
        None => device.name.clone(),
        Some(_) => format!("{}(missing)", device.name),
    };
    let found: Vec<String> = device.char_devices.iter().map(word).collect();
    words(&found, " ")
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct DiscoverDocument {
    hcas: Vec<HcaDocument>,
    unusable: Vec<Unusable>,
    /// An [`hca::Inventory`].
    inventory: Value,
    /// For `kubectl rdma plan`.
    facts: PlanNode,
    /// Addresses of the host's network namespace.
    addresses: Vec<HostAddress>,
}

/// An address of the host, not a link-local one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostAddress {
    /// Its netdev, if that is one of the inventory.
    pub netdev: Option<String>,
    pub address: IpAddr,
    /// Length of its network's prefix.
    pub prefix: u8,
    /// It has a lifetime: DHCP or router advertisements gave it.
    pub dynamic: bool,
}

impl HostAddress {
    /// Those of the network namespace that was scanned, as far as they can be listed.
    fn list(scanned: &HostSnapshot) -> Vec<Self> {
        // Where uplinks are not known, this process may be in another network namespace.
        let Uplinks::Known(_) = scanned.uplinks else {
            return Vec::new();
        };
        let messages = netlink::Socket::open()
            .and_then(|mut socket| netlink::address::list(&mut socket, 0))
            .unwrap_or_default();
        let messages = messages.iter();
        messages.filter_map(|one| Self::of(one, scanned)).collect()
    }

    fn of(message: &AddressMessage, scanned: &HostSnapshot) -> Option<Self> {
        let mut netdevs = scanned.inventory.netdevs.iter();
        let header = &message.header;
        let flags = message.attributes.iter().find_map(|one| match one {
            AddressAttribute::Flags(flags) => Some(*flags),
            _ => None,
        });
        let is_lasting = flags.is_some_and(|flags| flags.contains(AddressFlags::Permanent));
        (header.scope == AddressScope::Universe).then_some(())?;
        Some(Self {
            netdev: (netdevs.find(|one| one.ifindex == header.index)).map(|one| one.name.clone()),
            address: netlink::address::own(message)?,
            prefix: header.prefix_len,
            dynamic: !is_lasting,
        })
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct HcaDocument {
    id: String,
    rdma_devices: Vec<String>,
    /// RDMA devices of it for management alone, which no container gets.
    sub_devices: Vec<String>,
    netdevs: Vec<String>,
    function: &'static str,
    function_number: Option<u32>,
    pci_address: Option<String>,
    pf: Option<String>,
    numa_node: Option<u32>,
    in_another_netns: bool,
    nodes: Vec<DeviceNode>,
    /// Why the node itself needs it, or that this is not known.
    uplink: Option<String>,
    /// Resources that offer it; `None` without a configuration.
    resources: Option<Vec<String>>,
}

#[derive(Debug, Serialize)]
struct DeviceNode {
    path: String,
    number: String,
    /// Why it cannot be used.
    obstacle: Option<String>,
}

impl HcaDocument {
    fn of(candidate: &hca::Hca, scanned: &HostSnapshot, pools: Option<&Pools>) -> Self {
        let owned = |names: Vec<&str>| names.into_iter().map(str::to_owned).collect();
        let devices = candidate.rdma_devices.iter();
        let node = |device: &CharDevice| DeviceNode {
            path: format!("/dev/{}", device.dev_name()),
            number: device.number.to_string(),
            obstacle: scanned.obstacle(device),
        };
        Self {
            id: candidate.id.to_string(),
            nodes: devices
                .flat_map(|device| device.char_devices.iter())
                .map(node)
                .collect(),
            rdma_devices: owned(candidate.rdma_names()),
            sub_devices: candidate
                .sub_devices
                .iter()
                .map(|one| one.name.clone())
                .collect(),
            netdevs: candidate.netdev_names().map(str::to_owned).collect(),
            function: candidate.function().kind.word(),
            function_number: candidate.function().index,
            pci_address: candidate.pci.as_ref().map(|pci| pci.address.to_string()),
            pf: candidate.pf().map(|pf| pf.to_string()),
            numa_node: candidate.numa_node(),
            in_another_netns: candidate.elsewhere,
            uplink: uplink(candidate, scanned),
            resources: pools.map(|_| owned(offered(candidate, pools))),
        }
    }
}

#[cfg(test)]
mod tests {
    use hca_trees::{NetdevSpec, On, PciSpec, PortSpec, RdmaSpec, Tree};

    use pools::history;

    use super::*;

    /// An HCA with its netdev, which a pod takes after the daemon has written what it knows.
    fn taken(rdma: &RdmaSpec<'_>, take: impl Fn(&Tree)) -> String {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::new(directory.path());
        tree.rdma_core(true);
        tree.pci(&PciSpec::MLX5);
        tree.netdev(&NetdevSpec {
            name: "ibs1",
            on: On::Pci("0000:3b:00.0"),
            link_type: 32,
            mac: "00:00:10:49:fe:80:00:00:00:00:00:00:b8:59:9f:03:00:00:00:01",
            ..NetdevSpec::default()
        });
        tree.rdma(rdma);
        let state = tempfile::tempdir().unwrap();
        let policy = state.path().join("policy.json");
        let text = json!({"stateDir": state.path()}).to_string();
        std::fs::write(&policy, text).unwrap();
        let host = tree.host();
        let scanned = HostSnapshot::scan(&host, &[], &[], hca::topology::gpu::read).unwrap();
        let mut memory = history::Memory::load(state.path(), node::identity::boot_id(&host.proc));
        memory.list(&scanned, std::time::SystemTime::now());
        std::fs::write(state.path().join(history::FILE), memory.text().unwrap()).unwrap();
        take(&tree);
        let scanned = HostSnapshot::scan(&host, &[], &[], hca::topology::gpu::read).unwrap();
        let (candidates, _) = history::list(&scanned, &policy, &host);
        ports(&candidates, &scanned, None)
    }

    #[test]
    fn an_infiniband_hca_in_a_pod_keeps_its_row() {
        let hca = RdmaSpec {
            on: On::Pci("0000:3b:00.0"),
            ports: &[PortSpec::INFINIBAND],
            ..RdmaSpec::default()
        };
        let shared = taken(&hca, |tree| tree.hide_netdev("ibs1"));
        assert!(shared.contains("ibs1 (in a pod)"), "{shared}");
        let exclusive = taken(&hca, |tree| {
            tree.rdma_core(false);
            tree.hide_rdma("mlx5_0");
            tree.hide_netdev("ibs1");
        });
        let row = exclusive.lines().find(|line| line.contains("mlx5_0"));
        let words: Vec<&str> = row.unwrap().split_whitespace().collect();
        let wanted = "mlx5_0 - in another netns InfiniBand";
        assert_eq!(words[..6].join(" "), wanted, "{exclusive}");
        assert!(words.contains(&"ibs1"), "{exclusive}");
    }

    /// The rows of a host: device, port and netdev.
    fn rows(lay: fn(&Tree)) -> Vec<String> {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::new(directory.path());
        tree.rdma_core(true);
        lay(&tree);
        let host = tree.host();
        let scanned = HostSnapshot::scan(&host, &[], &[], hca::topology::gpu::read).unwrap();
        let text = ports(&scanned.inventory.hcas, &scanned, None);
        let rows = text.lines().skip(1).map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let netdev = words.iter().find(|word| word.starts_with(['e', 'i']));
            format!("{} {} {}", words[0], words[1], netdev.unwrap_or(&"-"))
        });
        rows.collect()
    }

    #[test]
    fn each_data_port_has_a_row_and_a_sub_device_is_named() {
        let planes = [(3, 0), (6, 1), (9, 2), (12, 3)];
        let planes = planes.map(|(port, plane)| format!("mlx5_0 {port} eth_r0_p{plane}"));
        assert_eq!(rows(hca_trees::ports::four_planes), planes);
        let eswitch = ["mlx5_0 1 ens1f0np0", "mlx5_0 2 ens1f1np1"];
        assert_eq!(rows(hca_trees::ports::multiport_eswitch), eswitch);
        let dual = ["mlx4_0 1 ens1", "mlx4_0 2 ens1d1"];
        assert_eq!(rows(hca_trees::ports::cabled_on_port_2), dual);
        let xdr = rows(hca_trees::ports::xdr_with_smi);
        assert_eq!((xdr.len(), xdr[0].as_str()), (2, "mlx5_0 1 ibs192"));
        assert!(xdr[1].starts_with("smi1 -"), "{xdr:?}");
    }
}
