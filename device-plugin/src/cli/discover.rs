//! `rdma-device-plugin discover`: the RDMA devices of this host, for people and for machines.

use std::io::Write;
use std::path::PathBuf;

use hca::port::Port;
use node::document::versioned;
use node::table::table;
use serde_json::json;

use super::HostRoot;
use crate::candidate::{Candidate, memory};
use crate::config;
use crate::host_snapshot::HostSnapshot;
use crate::pool::{self, Pools};

/// Shows the RDMA devices of this host.
#[derive(Debug, clap::Args)]
pub(super) struct Discover {
    /// Print JSON
    #[arg(long)]
    json: bool,
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
    defaults: super::Defaults,
    #[command(flatten)]
    host: HostRoot,
    #[command(flatten)]
    node: super::NodePolicy,
}

impl Discover {
    /// Reads once and prints.
    ///
    /// # Errors
    /// If sysfs, or a configuration that was named, cannot be read.
    pub(super) fn run(&self, out: &mut impl Write) -> anyhow::Result<()> {
        let seen = self.host.scan()?;
        let (candidates, unusable) = memory::list(&seen, &self.node.policy, &self.host.host());
        let pools = self.pools(&candidates, &seen)?;
        if self.json {
            let hcas: Vec<_> = candidates
                .iter()
                .map(|hca| entry(hca, &seen, pools.as_ref()))
                .collect();
            let unusable: Vec<_> = unusable
                .iter()
                .map(|one| json!({"rdmaDevice": one.rdma_device, "reason": one.reason}))
                .collect();
            let document = json!({"hcas": hcas, "unusable": unusable, "inventory": seen.inventory});
            return Ok(writeln!(out, "{:#}", versioned(document))?);
        }
        if candidates.is_empty() && unusable.is_empty() {
            writeln!(
                out,
                "no RDMA device: {} has none; is the driver loaded?",
                self.host.host().sys.join("class/infiniband").display()
            )?;
            return Ok(());
        }
        if self.brief {
            return Ok(out.write_all(brief(&candidates, &seen).as_bytes())?);
        }
        write!(out, "{}", ports(&candidates, &seen, pools.as_ref()))?;
        if self.gids {
            writeln!(out, "\n{}", gids(&seen))?;
        }
        for one in &unusable {
            writeln!(out, "{}: {}", one.rdma_device, one.reason)?;
        }
        match (seen.inventory.netns_mode, &seen.inventory.rdma_cm) {
            (mode, cm) if mode.is_some() || cm.is_some() => writeln!(
                out,
                "network namespace mode: {}; connection manager: {}",
                mode.map_or("unknown", mode_word),
                cm.as_ref()
                    .map_or("none (load rdma_ucm)".into(), |cm| format!(
                        "/dev/{} {}",
                        cm.dev_name(),
                        cm.number
                    )),
            )?,
            _ => {}
        }
        Ok(())
    }

    /// The pools, if there is a configuration. One that is merely at its usual place and wrong
    /// does not keep the hardware from being shown.
    fn pools(
        &self,
        candidates: &[Candidate],
        seen: &HostSnapshot,
    ) -> anyhow::Result<Option<Pools>> {
        let named = self.config_file.is_some();
        let Ok(file) = super::config_file(self.config_file.clone()) else {
            return Ok(None);
        };
        match config::load(&file, &self.defaults.read()) {
            Ok(config) => Ok(Some(pool::assemble(&config, candidates, seen, &[]))),
            Err(error) if named => Err(error.into()),
            Err(_) => Ok(None),
        }
    }
}

/// One line for each port, as `ibdev2netdev` prints it: scripts read its fifth word.
fn brief(candidates: &[Candidate], seen: &HostSnapshot) -> String {
    let mut text = String::new();
    for rdma in candidates.iter().flat_map(|hca| &hca.rdma_devices) {
        let Some(device) = seen.inventory.rdma_device(&rdma.name) else {
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
            members.any(|member| member.id == candidate.id)
        })
        .map(|snapshot| snapshot.resource().as_str())
        .collect()
}

/// One line for each filled slot.
fn gids(seen: &HostSnapshot) -> String {
    let mut rows = Vec::new();
    let ports = seen.inventory.rdma_devices.iter().flat_map(|device| {
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

fn mode_word(mode: hca::NetnsMode) -> &'static str {
    match mode {
        hca::NetnsMode::Shared => "shared",
        hca::NetnsMode::Exclusive => "exclusive",
    }
}

/// One line for each port.
fn ports(candidates: &[Candidate], seen: &HostSnapshot, pools: Option<&Pools>) -> String {
    let mut header = vec![
        "DEVICE", "PORT", "STATE", "LINK", "RATE", "NETDEV", "HCA", "KIND", "NUMA", "DRIVER",
        "NODES",
    ];
    header.extend(pools.map(|_| "RESOURCES"));
    let mut rows = Vec::new();
    for candidate in candidates {
        for rdma in &candidate.rdma_devices {
            let device = seen.inventory.rdma_device(&rdma.name);
            let driver = device.and_then(|device| device.driver.clone());
            let numa = candidate
                .numa_node
                .map_or("-".into(), |node| node.to_string());
            let mut common = vec![
                candidate.id.to_string(),
                candidate.function.to_string(),
                numa,
                driver.unwrap_or("-".into()),
                nodes(candidate, &rdma.name, seen),
            ];
            if pools.is_some() {
                let resources = offered(candidate, pools).join(" ");
                let none = resources.is_empty();
                common.push(if none { "-".into() } else { resources });
            }
            let away = away(candidate, seen);
            let Some(device) = device else {
                let known = rdma.ports.first();
                let link = known.map(|port| port.link_type.word().to_owned());
                let rate =
                    known.and_then(|port| Some(format!("{} Gb/sec", port.rate_mbps? / 1000)));
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
fn away(candidate: &Candidate, seen: &HostSnapshot) -> Option<String> {
    let [device] = candidate.rdma_devices.as_slice() else {
        return None;
    };
    let mut away = candidate.netdevs.iter().map(|netdev| &netdev.name);
    let is_away = |name: &&String| device.ports.len() == 1 && seen.inventory.netdev(name).is_none();
    away.find(is_away).cloned()
}

/// The nodes of an RDMA device; what cannot be handed over is marked.
fn nodes(candidate: &Candidate, rdma_device: &str, seen: &HostSnapshot) -> String {
    let here = seen.inventory.rdma_device(rdma_device);
    let away = seen
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
        .map(|device| match seen.obstacle(device) {
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

fn entry(candidate: &Candidate, seen: &HostSnapshot, pools: Option<&Pools>) -> serde_json::Value {
    let names: Vec<&str> = candidate
        .rdma_devices
        .iter()
        .map(|d| d.name.as_str())
        .collect();
    let netdevs: Vec<&str> = candidate.netdevs.iter().map(|n| n.name.as_str()).collect();
    let devices = names
        .iter()
        .filter_map(|name| seen.inventory.rdma_device(name));
    let nodes: Vec<_> = devices
        .flat_map(|device| device.char_devices.iter())
        .map(|device| {
            json!({
                "path": format!("/dev/{}", device.dev_name()),
                "number": device.number.to_string(),
                "obstacle": seen.obstacle(device),
            })
        })
        .collect();
    json!({
        "id": candidate.id.to_string(),
        "rdmaDevices": names,
        "netdevs": netdevs,
        "function": candidate.function.word(),
        "functionNumber": candidate.function.index(),
        "pciAddress": candidate.pci.as_ref().map(|pci| &pci.address),
        "pf": candidate.pf.as_ref().map(|pf| &pf.address),
        "numaNode": candidate.numa_node,
        "inAnotherNetns": candidate.elsewhere,
        "nodes": nodes,
        "resources": pools.map(|_| offered(candidate, pools)),
    })
}

#[cfg(test)]
mod tests {
    use hca::tree::{NetdevSpec, On, PciSpec, PortSpec, RdmaSpec, Tree, machine};

    use super::*;
    use crate::candidate::gather;

    #[test]
    fn the_brief_form_is_that_of_ibdev2netdev() {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::new(directory.path());
        machine::egx(&tree);
        let seen = HostSnapshot::make(&tree.host(), &[]).unwrap();
        let (candidates, _) = gather::list(&seen.inventory, &seen.functions);
        let text = brief(&candidates, &seen);
        let first = text.lines().next().unwrap();
        let words: Vec<&str> = first.split(' ').collect();
        assert_eq!(words[..4], ["mlx5_0", "port", "1", "==>"], "{text}");
        assert_eq!(words[5], "(Up)", "{text}");
        assert_eq!(
            seen.inventory.rdma_device("mlx5_0").unwrap().ports[0]
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
        let seen = HostSnapshot::make(&host, &[]).unwrap();
        let (mut candidates, mut unusable) = gather::list(&seen.inventory, &seen.functions);
        let mut memory = memory::Memory::load(state.path(), node::identity::boot_id(&host.proc));
        memory.complete(&mut candidates, &mut unusable, &seen.inventory);
        std::fs::write(state.path().join(memory::FILE), memory.text().unwrap()).unwrap();
        take(&tree);
        let seen = HostSnapshot::make(&host, &[]).unwrap();
        let (candidates, _) = memory::list(&seen, &policy, &host);
        ports(&candidates, &seen, None)
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
        let wanted = "mlx5_0 - in another netns infiniband";
        assert_eq!(words[..6].join(" "), wanted, "{exclusive}");
        assert!(words.contains(&"ibs1"), "{exclusive}");
    }
}
