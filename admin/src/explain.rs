//! `rdmactl explain NAME`: why an HCA is, or is not, in each pool.

use std::path::PathBuf;

use anyhow::Context;
use serde_json::{Value, json};

use rdma_device_plugin::candidate::{Candidate, memory};
use rdma_device_plugin::cli::{Defaults, config_file};
use rdma_device_plugin::config::{self, PoolConfig};
use rdma_device_plugin::pool::{self, Pools};
use rdma_device_plugin::snapshot::Health;

use crate::global::{Global, NodeAddresses};
use crate::output::{Ended, Outcome, say, say_json};

/// Says of one device why it is or is not in each pool.
#[derive(Debug, clap::Args)]
pub(crate) struct Explain {
    /// RDMA device, netdev, PCI address, auxiliary device, node GUID or unit of a pool
    name: String,
    /// Configuration file [default: as for "run"]
    #[arg(long, value_name = "FILE", env = "RDMA_CONFIG_FILE")]
    config_file: Option<PathBuf>,
    #[command(flatten)]
    defaults: Defaults,
    #[command(flatten)]
    addresses: NodeAddresses,
}

impl Explain {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        let path = config_file(self.config_file.clone())?;
        let config = config::load(&path, &self.defaults)?;
        let scanned = global.scan(&self.addresses.node_addresses)?;
        let (candidates, unusable) = memory::list(&scanned, &global.policy, &global.host());
        if let Some(one) = unusable.iter().find(|one| one.rdma_device == self.name) {
            anyhow::bail!("{} cannot be in any pool: {}", one.rdma_device, one.reason);
        }
        let candidate = find(&candidates, &self.name).with_context(|| {
            let known: Vec<String> = candidates.iter().map(title).collect();
            let known = if known.is_empty() {
                "none".into()
            } else {
                known.join(", ")
            };
            format!(
                "no HCA of this host has the name {:?}; there are: {known}",
                self.name
            )
        })?;
        let pools = pool::assemble(&config, &candidates, &scanned, &[]);
        let verdicts: Vec<Verdict> = config
            .pools
            .iter()
            .map(|pool| judge(pool, candidate, &pools))
            .collect();
        if global.json {
            say_json(json!({
                "hca": candidate.id.to_string(),
                "rdmaDevices": candidate.rdma_names(),
                "pools": verdicts.iter().map(Verdict::to_json).collect::<Vec<_>>(),
            }));
            return Ok(Outcome::Good);
        }
        let mut text = format!("{}\n", title(candidate));
        for verdict in &verdicts {
            text += &format!("  {}: {}\n", verdict.resource, verdict.summary());
            for reason in &verdict.reasons {
                text += &format!("    {reason}\n");
            }
        }
        for warning in &config.warnings {
            text += &format!("warning: {warning}\n");
        }
        say(&text);
        Ok(Outcome::Good)
    }
}

fn title(candidate: &Candidate) -> String {
    format!("{} ({})", candidate.rdma_names().join(", "), candidate.id)
}

/// The HCA that has a name, whichever of its names that is.
fn find<'c>(candidates: &'c [Candidate], name: &str) -> Option<&'c Candidate> {
    let plain = |text: &str| text.to_ascii_lowercase().replace(':', "");
    let of_unit = name
        .parse::<hca::UnitId>()
        .ok()
        .and_then(|unit| unit.hca().cloned());
    candidates.iter().find(|candidate| {
        candidate.id.to_string() == name
            || of_unit.as_ref() == Some(&candidate.id)
            || candidate.rdma_devices.iter().any(|device| {
                device.name == name
                    || device
                        .node_guid
                        .is_some_and(|guid| plain(name) == plain(&guid.to_string()))
            })
            || candidate.netdev_names().any(|netdev| netdev == name)
    })
}

/// What one pool makes of the HCA.
#[derive(Debug)]
struct Verdict {
    resource: String,
    /// Whether its selectors choose it, and whether it is in the pool.
    chosen: bool,
    member: bool,
    healthy: bool,
    reasons: Vec<String>,
}

impl Verdict {
    fn summary(&self) -> &'static str {
        match (self.chosen, self.member, self.healthy) {
            (_, true, true) => "in the pool",
            (_, true, false) => "in the pool, unhealthy",
            (true, false, _) => "chosen, but excluded",
            (false, false, _) => "not chosen",
        }
    }

    fn to_json(&self) -> Value {
        json!({
            "resource": self.resource, "chosen": self.chosen, "member": self.member,
            "healthy": self.healthy, "reasons": self.reasons,
        })
    }
}

fn judge(pool: &PoolConfig, candidate: &Candidate, pools: &Pools) -> Verdict {
    let snapshot = pools
        .snapshots
        .iter()
        .find(|one| *one.resource() == pool.resource);
    let member = snapshot
        .into_iter()
        .flat_map(|snapshot| snapshot.members())
        .find(|member| member.hca.id == candidate.id);
    let mut reasons = Vec::new();
    let mut chosen = false;
    for (index, selector) in pool.selectors.iter().enumerate() {
        let which = if pool.selectors.len() > 1 {
            format!("alternative {}: ", index + 1)
        } else {
            String::new()
        };
        match selector.why_not(candidate) {
            None => {
                chosen = true;
                let criteria = if selector.is_empty() {
                    "anything".into()
                } else {
                    selector.to_string()
                };
                reasons.push(format!("{which}matches {criteria}"));
            }
            Some(mismatch) => reasons.push(format!("{which}{mismatch}")),
        }
    }
    let excluded = pools
        .excluded
        .iter()
        .filter(|one| one.resource == pool.resource && one.id == candidate.id);
    reasons.extend(excluded.map(ToString::to_string));
    let health = member.map(|member| &member.health);
    if let Some(Health::Unhealthy(unhealthy_reason)) = health {
        reasons.push(unhealthy_reason.to_string());
    }
    Verdict {
        resource: pool.resource.to_string(),
        chosen,
        member: member.is_some(),
        healthy: health == Some(&Health::Healthy),
        reasons,
    }
}

#[cfg(test)]
mod tests {
    use hca_trees::{Tree, machine};
    use rdma_device_plugin::candidate::gather;
    use rdma_device_plugin::host_snapshot::HostSnapshot;

    use super::*;

    #[test]
    fn an_hca_is_found_by_any_of_its_names() {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::new(directory.path());
        machine::egx(&tree);
        let scanned = HostSnapshot::make(&tree.host(), &[]).unwrap();
        let (all, _) = gather::list(&scanned.inventory, &scanned.functions);
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
