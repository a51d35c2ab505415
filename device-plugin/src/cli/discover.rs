//! `rdma-device-plugin discover`: the RDMA devices of this host, for people and for machines.

use std::io::Write;

use anyhow::Context;
use comfy_table::{ContentArrangement, Table, presets};
use serde_json::json;

use super::HostRoot;
use crate::candidate::{Candidate, gather};
use crate::observe::Observation;

/// Shows the RDMA devices of this host.
#[derive(Debug, clap::Args)]
pub struct Discover {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: HostRoot,
}

impl Discover {
    /// Looks once and prints.
    ///
    /// # Errors
    /// If sysfs cannot be read.
    pub fn run(&self, out: &mut impl Write) -> anyhow::Result<()> {
        let seen = Observation::make(&self.host.host()).context("look at this host")?;
        let (candidates, unusable) = gather::list(&seen.inventory, &seen.functions);
        if self.json {
            let hcas: Vec<_> = candidates.iter().map(|hca| entry(hca, &seen)).collect();
            let unusable: Vec<_> = unusable
                .iter()
                .map(|one| json!({"rdmaDevice": one.rdma_device, "reason": one.reason}))
                .collect();
            let document = json!({"hcas": hcas, "unusable": unusable, "inventory": seen.inventory});
            return Ok(writeln!(out, "{document:#}")?);
        }
        if candidates.is_empty() && unusable.is_empty() {
            writeln!(
                out,
                "no RDMA device: {} has none; is the driver loaded?",
                self.host.host().sys.join("class/infiniband").display()
            )?;
            return Ok(());
        }
        writeln!(out, "{}", table(&candidates, &seen).trim_fmt())?;
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
}

fn mode_word(mode: hca::NetnsMode) -> &'static str {
    match mode {
        hca::NetnsMode::Shared => "shared",
        hca::NetnsMode::Exclusive => "exclusive",
    }
}

/// One line for each port.
fn table(candidates: &[Candidate], seen: &Observation) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled);
    table.set_header([
        "DEVICE", "PORT", "STATE", "LINK", "RATE", "NETDEV", "HCA", "KIND", "NUMA", "DRIVER",
        "NODES",
    ]);
    for candidate in candidates {
        for rdma in &candidate.rdma_devices {
            let device = seen.inventory.rdma_device(&rdma.name);
            let driver = device.and_then(|device| device.driver.clone());
            let numa = candidate
                .numa_node
                .map_or("-".into(), |node| node.to_string());
            let common = [
                candidate.id.to_string(),
                candidate.function.to_string(),
                numa,
                driver.unwrap_or("-".into()),
                nodes(candidate, &rdma.name, seen),
            ];
            let Some(device) = device else {
                let place = [rdma.name.clone(), "-".into(), "in another netns".into()];
                let blank = ["-", "-", "-"].map(String::from);
                table.add_row(place.into_iter().chain(blank).chain(common));
                continue;
            };
            for port in &device.ports {
                let facts = [
                    rdma.name.clone(),
                    port.number.to_string(),
                    format!("{} {}", port.state, port.phys_state),
                    port.link_layer.to_string(),
                    port.rate.as_ref().map_or("-".into(), ToString::to_string),
                    port.netdev.clone().unwrap_or("-".into()),
                ];
                table.add_row(facts.into_iter().chain(common.clone()));
            }
        }
    }
    table
}

/// The nodes of an RDMA device; what cannot be handed over is marked.
fn nodes(candidate: &Candidate, rdma_device: &str, seen: &Observation) -> String {
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

fn entry(candidate: &Candidate, seen: &Observation) -> serde_json::Value {
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
    })
}
