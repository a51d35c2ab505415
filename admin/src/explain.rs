//! `rdmactl explain NAME`: why an HCA is, or is not, in each pool.

use std::path::PathBuf;

use anyhow::Context;
use serde::Serialize;
use serde_json::json;

use hca::Hca;
use pools::config::flags::{Defaults, NodeAddresses, config_file};
use pools::config::{self, PoolConfig};
use pools::pool::Pools;
use pools::snapshot::Health;

use crate::global::{Global, NODE};
use crate::node_guid;
use crate::on_host::OnHost;
use crate::output::{Ended, Exit};
use crate::verdict::words;

/// Says of one device why it is or is not in each pool.
#[derive(Debug, clap::Args)]
pub(crate) struct Explain {
    /// RDMA device, netdev, PCI address, auxiliary device, node GUID or unit of a pool
    name: String,
    /// Configuration file [default: as for "run"]
    #[arg(long, help_heading = NODE, value_name = "FILE", env = "RDMA_CONFIG_FILE")]
    config_file: Option<PathBuf>,
    #[command(flatten, next_help_heading = NODE)]
    defaults: Defaults,
    #[command(flatten, next_help_heading = NODE)]
    addresses: NodeAddresses,
}

impl Explain {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        let path = config_file(self.config_file.clone())?;
        let config = config::load(&path, &self.defaults)?;
        let host = OnHost::scan(global, &self.addresses.node_addresses, &global.policy)?;
        if let Some(one) = host
            .unusable
            .iter()
            .find(|one| one.device.name == self.name)
        {
            anyhow::bail!("{} cannot be in any pool: {}", one.device.name, one.reason);
        }
        let candidate = find(&host.hcas, &self.name).with_context(|| {
            let known: Vec<String> = host.hcas.iter().map(title).collect();
            let (name, known) = (&self.name, words(&known, ", "));
            format!("no HCA of this host has the name {name:?}; there are: {known}")
        })?;
        let notes = notes(candidate);
        let pools = host.pools(&config);
        let verdicts = config
            .pools
            .iter()
            .map(|pool| judge(pool, candidate, &pools));
        let verdicts: Vec<PoolVerdict> = verdicts.collect();
        let document = json!({
            "hca": candidate.id.to_string(),
            "rdmaDevices": candidate.rdma_names(),
            "notes": notes,
            "pools": verdicts,
        });
        global.say(document, || {
            let mut text = format!("{}\n", title(candidate));
            for verdict in &verdicts {
                text += &format!("  {}: {}\n", verdict.resource, verdict.summary());
                let reasons = verdict.reasons.iter();
                text.extend(reasons.map(|reason| format!("    {reason}\n")));
            }
            let warnings = config.warnings.iter().chain(&notes);
            text.extend(warnings.map(|warning| format!("warning: {warning}\n")));
            text
        });
        Ok(Exit::Good)
    }
}

/// What does not work with an HCA, whatever pool it is in.
fn notes(candidate: &Hca) -> Vec<String> {
    let devices = candidate.rdma_devices.iter();
    let without = devices.filter_map(|device| Some((device, node_guid::missing(device)?)));
    without
        .map(|(device, (why, remedy))| format!("{}: {why}; {remedy}", device.name))
        .collect()
}

fn title(candidate: &Hca) -> String {
    format!("{} ({})", candidate.rdma_names().join(", "), candidate.id)
}

/// The HCA that has a name, whichever of its names that is.
fn find<'c>(candidates: &'c [Hca], name: &str) -> Option<&'c Hca> {
    let plain = |text: &str| text.to_ascii_lowercase().replace(':', "");
    let unit = name.parse::<hca::UnitId>().ok();
    let of_unit = unit.as_ref().and_then(|unit| unit.hca());
    candidates.iter().find(|candidate| {
        let mut devices = candidate.rdma_devices.iter();
        candidate.id.to_string() == name
            || of_unit == Some(&candidate.id)
            || candidate.netdev_names().any(|netdev| netdev == name)
            || devices.any(|device| {
                let guid = device.node_guid.map(|guid| plain(&guid.to_string()));
                device.name == name || guid.is_some_and(|guid| guid == plain(name))
            })
    })
}

/// What one pool makes of the HCA.
#[derive(Debug, Serialize)]
struct PoolVerdict {
    resource: String,
    /// Whether its selectors choose it, and whether it is in the pool.
    chosen: bool,
    member: bool,
    healthy: bool,
    reasons: Vec<String>,
}

impl PoolVerdict {
    fn summary(&self) -> &'static str {
        match (self.chosen, self.member, self.healthy) {
            (_, true, true) => "in the pool",
            (_, true, false) => "in the pool, unhealthy",
            (true, false, _) => "chosen, but excluded",
            (false, false, _) => "not chosen",
        }
    }
}

fn judge(pool: &PoolConfig, candidate: &Hca, pools: &Pools) -> PoolVerdict {
    let mut snapshots = pools.snapshots.iter();
    let snapshot = snapshots.find(|one| *one.resource() == pool.resource);
    let mut members = snapshot.into_iter().flat_map(|snapshot| snapshot.members());
    let member = members.find(|member| member.hca.id == candidate.id);
    let mut reasons = Vec::new();
    let mut chosen = false;
    for (index, selector) in pool.selectors.iter().enumerate() {
        let which = match pool.selectors.len() {
            1 => String::new(),
            _ => format!("alternative {}: ", index + 1),
        };
        let mismatch = selector.why_not(candidate);
        chosen |= mismatch.is_none();
        reasons.push(match mismatch {
            None if selector.is_empty() => format!("{which}matches anything"),
            None => format!("{which}matches {selector}"),
            Some(mismatch) => format!("{which}{mismatch}"),
        });
    }
    let excluded = pools.excluded.iter();
    let excluded = excluded.filter(|one| one.resource == pool.resource && one.id == candidate.id);
    reasons.extend(excluded.map(ToString::to_string));
    let health = member.map(|member| &member.health);
    let unhealthy = health.into_iter().flat_map(Health::reasons);
    reasons.extend(unhealthy.map(ToString::to_string));
    PoolVerdict {
        resource: pool.resource.to_string(),
        chosen,
        member: member.is_some(),
        healthy: health.is_some_and(Health::is_healthy),
        reasons,
    }
}

#[cfg(test)]
mod tests {
    use hca_trees::{Tree, cloud, machine};
    use pools::host_snapshot::HostSnapshot;

    use super::*;

    fn candidates(lay: impl Fn(&Tree)) -> Vec<Hca> {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::new(directory.path());
        lay(&tree);
        let scanned = HostSnapshot::scan(&tree.host(), &[], &[], hca::topology::gpu::read).unwrap();
        scanned.inventory.hcas
    }

    #[test]
    fn a_vf_without_a_node_guid_has_a_note_with_the_remedy() {
        let all = candidates(cloud::vf_without_guid);
        let told: Vec<String> = all.iter().flat_map(notes).collect();
        assert_eq!(
            told,
            [
                "mlx5_2: its node GUID is zero: verbs work, programs that use rdma_cm crash; ip link \
                 set PF vf 1 node_guid GUID, with the netdev of 0000:3b:00.0 as PF, or echo GUID > \
                 /sys/bus/pci/devices/0000:3b:00.0/sriov/1/node; then bind the VF's driver again"
            ]
        );
        assert!(
            candidates(cloud::p5)
                .iter()
                .all(|efa| notes(efa).is_empty())
        );
    }

    #[test]
    fn an_hca_is_found_by_any_of_its_names() {
        let all = candidates(machine::egx);
        let first = &all[0];
        let guid = first.rdma_devices[0].node_guid.unwrap().to_string();
        let unit = format!("{}_3e71787e_17", first.id);
        for name in [
            first.id.to_string().as_str(),
            first.rdma_devices[0].name.as_str(),
            first.netdevs[0].name.as_str(),
            guid.to_uppercase().as_str(),
            guid.replace(':', "").as_str(),
            unit.as_str(),
        ] {
            let found = find(&all, name).map(|candidate| &candidate.id);
            assert_eq!(found, Some(&first.id), "{name}");
        }
        for name in ["", "mlx5_9", "0000:00:00.0"] {
            assert!(find(&all, name).is_none(), "{name}");
        }
    }
}
