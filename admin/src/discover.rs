//! `rdmactl discover`: the RDMA devices of this host, for people and for machines.

use std::path::PathBuf;

use hca::port::Port;
use node::table::table;
use serde_json::json;

use rdma_device_plugin::candidate::{Candidate, memory};
use rdma_device_plugin::cli::{Defaults, config_file};
use rdma_device_plugin::config;
use rdma_device_plugin::host_snapshot::HostSnapshot;
use rdma_device_plugin::pool::{self, Pools};

use crate::global::{Global, NodeAddresses};
use crate::output::{Ended, Outcome, say, say_json};

/// Shows the RDMA devices of this host.
#[derive(Debug, clap::Args)]
pub(crate) struct Discover {
    /// One short line for each port, in the form of ibdev2netdev
    #[arg(long, conflicts_with_all = ["json", "gids"])]
    brief: bool,
    /// Also the filled slots of the GID tables, with the index that verbs programs ask for (-x)
    #[arg(long)]
    gids: bool,
    /// Configuration file, for the pools [default: as for "run", where there is one]
    #[arg(long, value_name = "FILE", env = "RDMA_CONFIG_FILE")]
    config_file: Option<PathBuf>,
    #[command(flatten)]
    defaults: Defaults,
    #[command(flatten)]
    addresses: NodeAddresses,
}

impl Discover {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        let scanned = global.scan(&self.addresses.node_addresses)?;
        let (candidates, unusable) = memory::list(&scanned, &global.policy, &global.host());
        let pools = self.pools(&candidates, &scanned)?;
        if global.json {
            let hcas: Vec<_> = candidates
                .iter()
                .map(|hca| entry(hca, &scanned, pools.as_ref()))
                .collect();
            let unusable: Vec<_> = unusable
                .iter()
                .map(|one| json!({"rdmaDevice": one.rdma_device, "reason": one.reason}))
                .collect();
            say_json(json!({"hcas": hcas, "unusable": unusable, "inventory": scanned.inventory}));
            return Ok(Outcome::Good);
        }
        if candidates.is_empty() && unusable.is_empty() {
            say(&format!(
                "no RDMA device: {} has none; is the driver loaded?\n",
                global.host().sys.join("class/infiniband").display()
            ));
            return Ok(Outcome::Good);
        }
        if self.brief {
            say(&brief(&candidates, &scanned));
            return Ok(Outcome::Good);
        }
        say(&ports(&candidates, &scanned, pools.as_ref()));
        if self.gids {
            say(&format!("\n{}\n", gids(&scanned)));
        }
        for one in &unusable {
            say(&format!("{}: {}\n", one.rdma_device, one.reason));
        }
        let (mode, cm) = (scanned.inventory.netns_mode, &scanned.inventory.rdma_cm);
        if mode.is_some() || cm.is_some() {
            let cm = cm
                .as_ref()
                .map(|cm| format!("/dev/{} {}", cm.dev_name(), cm.number));
            say(&format!(
                "network namespace mode: {}; connection manager: {}\n",
                mode.map_or("unknown", hca::NetnsMode::word),
                cm.unwrap_or_else(|| "none (load rdma_ucm)".to_owned()),
            ));
        }
        Ok(Outcome::Good)
    }

    /// The pools, if there is a configuration. One that is merely at its usual place and wrong
    /// does not keep the hardware from being shown.
    fn pools(
        &self,
        candidates: &[Candidate],
        scanned: &HostSnapshot,
    ) -> anyhow::Result<Option<Pools>> {
        let named = self.config_file.is_some();
        let Ok(file) = config_file(self.config_file.clone()) else {
            return Ok(None);
        };
        match config::load(&file, &self.defaults) {
            Ok(config) => Ok(Some(pool::assemble(&config, candidates, scanned, &[]))),
            Err(error) if named => Err(error.into()),
            Err(_) => Ok(None),
        }
    }
}

/// One line for each port, as `ibdev2netdev` prints it: scripts read its fifth word.
fn brief(candidates: &[Candidate], scanned: &HostSnapshot) -> String {
    let mut text = String::new();
    for rdma in candidates.iter().flat_map(|hca| &hca.rdma_devices) {
        let Some(device) = scanned.inventory.rdma_device(&rdma.name) else {
            text += &format!("{} in another netns\n", rdma.name);
            continue;
        };
        for port in &device.ports {
            let netdev = port.netdev.as_deref().unwrap_or("-");
            let state = if port.is_active() { "Up" } else { "Down" };
            let (name, number) = (&device.name, port.number);
            text += &format!("{name} port {number} ==> {netdev} ({state})\n");
        }
    }
    text
}

/// Resources that an HCA is offered as.
fn offered<'p>(candidate: &Candidate, pools: Option<&'p Pools>) -> Vec<&'p str> {
    let snapshots = pools.into_iter().flat_map(|pools| &pools.snapshots);
    snapshots
        .filter(|snapshot| {
            let mut members = snapshot.members().iter();
            members.any(|member| member.hca.id == candidate.id)
        })
        .map(|snapshot| snapshot.resource().as_str())
        .collect()
}

/// One line for each filled slot.
fn gids(scanned: &HostSnapshot) -> String {
    let mut rows = Vec::new();
    let ports = scanned.inventory.rdma_devices.iter().flat_map(|device| {
        let with_device = |port: &'_ Port| (device.name.clone(), port.clone());
        device.ports.iter().map(with_device).collect::<Vec<_>>()
    });
    for (device, port) in ports {
        for entry in &port.gids.entries {
            let kind = entry.kind.as_ref().map(ToString::to_string);
            // On InfiniBand a GID is no IP address.
            let address = match entry.netdev {
                Some(_) => entry.gid.ip().to_string(),
                None => entry.gid.to_string(),
            };
            rows.push(vec![
                device.clone(),
                port.number.to_string(),
                entry.index.to_string(),
                kind.unwrap_or("-".into()),
                entry.netdev.clone().unwrap_or("-".into()),
                address,
            ]);
        }
    }
    let header = ["DEVICE", "PORT", "INDEX", "TYPE", "NETDEV", "ADDRESS"];
    table(&header, &rows)
}

/// One line for each port.
fn ports(candidates: &[Candidate], scanned: &HostSnapshot, pools: Option<&Pools>) -> String {
    let mut header = vec![
        "DEVICE", "PORT", "STATE", "LINK", "RATE", "NETDEV", "HCA", "KIND", "NUMA", "DRIVER",
        "NODES",
    ];
    header.extend(pools.map(|_| "RESOURCES"));
    let mut rows = Vec::new();
    for candidate in candidates {
        for rdma in &candidate.rdma_devices {
            let device = scanned.inventory.rdma_device(&rdma.name);
            let driver = device.and_then(|device| device.driver.clone());
            let numa = candidate
                .numa_node()
                .map_or("-".into(), |node| node.to_string());
            let mut common = vec![
                candidate.id.to_string(),
                candidate.function().to_string(),
                numa,
                driver.unwrap_or("-".into()),
                nodes(candidate, &rdma.name, scanned),
            ];
            if pools.is_some() {
                let resources = offered(candidate, pools).join(" ");
                let none = resources.is_empty();
                common.push(if none { "-".into() } else { resources });
            }
            let away = away(candidate, scanned);
            let Some(device) = device else {
                let known = rdma.ports.first();
                let link = known.map(|port| port.link_layer.to_string());
                let rate = known.and_then(|port| Some(port.rate.as_ref()?.to_string()));
                let known = [link, rate, away].map(|known| known.unwrap_or("-".into()));
                let place = [rdma.name.clone(), "-".into(), "in another netns".into()];
                rows.push(place.into_iter().chain(known).chain(common).collect());
                continue;
            };
            for port in &device.ports {
                let facts = [
                    rdma.name.clone(),
                    port.number.to_string(),
                    format!("{} {}", port.state, port.phys_state),
                    port.link_layer.to_string(),
                    port.rate.as_ref().map_or("-".into(), ToString::to_string),
                    port.netdev
                        .clone()
                        .or_else(|| Some(format!("{} (in a pod)", away.as_ref()?)))
                        .unwrap_or("-".into()),
                ];
                rows.push(facts.into_iter().chain(common.clone()).collect());
            }
        }
    }
    table(&header, &rows)
}

/// The netdev of an HCA with one port, where another network namespace has it.
fn away(candidate: &Candidate, scanned: &HostSnapshot) -> Option<String> {
    let [device] = candidate.rdma_devices.as_slice() else {
        return None;
    };
    let is_away = |name: &&str| device.ports.len() == 1 && scanned.inventory.netdev(name).is_none();
    candidate.netdev_names().find(is_away).map(str::to_owned)
}

/// The nodes of an RDMA device; what cannot be handed over is marked.
fn nodes(candidate: &Candidate, rdma_device: &str, scanned: &HostSnapshot) -> String {
    let here = scanned.inventory.rdma_device(rdma_device);
    let away = scanned
        .inventory
        .elsewhere
        .iter()
        .filter(|away| away.rdma_device == rdma_device);
    let devices = here
        .into_iter()
        .flat_map(|device| device.char_devices.iter())
        .chain(
            away.map(|away| &away.uverbs)
                .filter(|_| candidate.elsewhere),
        );
    let words: Vec<String> = devices
        .map(|device| match scanned.obstacle(device) {
            None => device.name.clone(),
            Some(_) => format!("{}(missing)", device.name),
        })
        .collect();
    if words.is_empty() {
        "none".into()
    } else {
        words.join(" ")
    }
}

fn entry(
    candidate: &Candidate,
    scanned: &HostSnapshot,
    pools: Option<&Pools>,
) -> serde_json::Value {
    let names = candidate.rdma_names();
    let netdevs: Vec<&str> = candidate.netdev_names().collect();
    let devices = names
        .iter()
        .filter_map(|name| scanned.inventory.rdma_device(name));
    let nodes: Vec<_> = devices
        .flat_map(|device| device.char_devices.iter())
        .map(|device| {
            json!({
                "path": format!("/dev/{}", device.dev_name()),
                "number": device.number.to_string(),
                "obstacle": scanned.obstacle(device),
            })
        })
        .collect();
    json!({
        "id": candidate.id.to_string(),
        "rdmaDevices": names,
        "netdevs": netdevs,
        "function": candidate.function().kind.word(),
        "functionNumber": candidate.function().index,
        "pciAddress": candidate.pci.as_ref().map(|pci| &pci.address),
        "pf": candidate.pf(),
        "numaNode": candidate.numa_node(),
        "inAnotherNetns": candidate.elsewhere,
        "nodes": nodes,
        "resources": pools.map(|_| offered(candidate, pools)),
    })
}

#[cfg(test)]
mod tests {
    use hca_trees::{NetdevSpec, On, PciSpec, PortSpec, RdmaSpec, Tree, machine};

    use super::*;
    use rdma_device_plugin::candidate::gather;

    #[test]
    fn the_brief_form_is_that_of_ibdev2netdev() {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::new(directory.path());
        machine::egx(&tree);
        let scanned = HostSnapshot::make(&tree.host(), &[]).unwrap();
        let (candidates, _) = gather::list(&scanned.inventory, &scanned.functions);
        let text = brief(&candidates, &scanned);
        let first = text.lines().next().unwrap();
        let words: Vec<&str> = first.split(' ').collect();
        assert_eq!(words[..4], ["mlx5_0", "port", "1", "==>"], "{text}");
        assert_eq!(words[5], "(Up)", "{text}");
        assert_eq!(
            scanned.inventory.rdma_device("mlx5_0").unwrap().ports[0]
                .netdev
                .as_deref(),
            Some(words[4])
        );
    }

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
        let scanned = HostSnapshot::make(&host, &[]).unwrap();
        let mut memory = memory::Memory::load(state.path(), node::identity::boot_id(&host.proc));
        memory.list(&scanned);
        std::fs::write(state.path().join(memory::FILE), memory.text().unwrap()).unwrap();
        take(&tree);
        let scanned = HostSnapshot::make(&host, &[]).unwrap();
        let (candidates, _) = memory::list(&scanned, &policy, &host);
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
}
