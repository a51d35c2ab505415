//! How many HCAs there are (H): other checks judge what they find, and find nothing to blame on a node
//! that has lost all of it.

use std::collections::{BTreeMap, BTreeSet};

use hca::PciAddress;

use super::check::{Findings, checks, need};
use super::context::{Context, Expected, PoolHca};
use crate::verdict::Finding;

/// What is read.
#[derive(Debug, Clone, Default)]
pub(super) struct Facts {
    /// The container's checks are made.
    pub in_pod: bool,
    /// All HCAs of the host.
    pub hcas: Vec<PoolHca>,
    /// Those of each pool; none without a configuration.
    pub pools: Option<BTreeMap<String, Vec<PoolHca>>>,
    /// Pools of which a node may have no HCA.
    pub optional: BTreeSet<String>,
    /// What should be so.
    pub expected: Vec<Expected>,
}

checks! {
    "H01" "there is an HCA" h01_any;
    "H02" "each pool has an HCA that can be used" h02_pools;
    "H03" "as many HCAs as expected can be used" h03_expected;
}

/// Reads the host.
pub(super) fn read(context: &Context) -> Facts {
    let inventory = &context.snapshot.inventory;
    // RDMA devices of one function are one HCA.
    let mut hcas: BTreeMap<String, PoolHca> = BTreeMap::new();
    let key = |function: Option<PciAddress>, name: &str| {
        function.map_or_else(|| name.to_owned(), |function| function.to_string())
    };
    let for_pods = |device: &&hca::RdmaDevice| device.reserved.is_none();
    for device in inventory.rdma_devices.iter().filter(for_pods) {
        let function = device.pci.as_ref().map(|pci| pci.address);
        let hca = hcas.entry(key(function, &device.name));
        let hca = hca.or_insert_with(|| PoolHca::new(&device.name, Some("no port is active")));
        if device.ports.iter().any(hca::Port::is_active) {
            hca.fault = None;
        }
    }
    for hidden in &inventory.hidden {
        let function = hidden.pci.as_ref().map(|pci| pci.address);
        let hca = PoolHca::new(&hidden.rdma_device, hidden.fault.as_deref());
        hcas.insert(key(function, &hidden.rdma_device), hca);
    }
    Facts {
        in_pod: context.settings.in_pod,
        hcas: hcas.into_values().collect(),
        pools: context.pools.as_ref().map(|pools| pools.hcas.clone()),
        optional: (context.pools.as_ref()).map_or_else(BTreeSet::new, |p| p.optional.clone()),
        expected: context.settings.expected.clone(),
    }
}

fn h01_any(facts: &Facts) -> Findings {
    need(!facts.in_pod, "not checked with --pod")?;
    let ids: Vec<&str> = facts.hcas.iter().map(|hca| hca.id.as_str()).collect();
    Ok(vec![match ids.len() {
        0 => Finding::fail(
            "no RDMA device, neither here nor in a pod",
            "see M01 to M03 for a driver that is missing, and lspci for the NIC; a node that is meant \
             to have none is checked with --skip H",
        ),
        count => Finding::pass(format!("{count} of them")).read("RDMA devices", ids.join(", ")),
    }])
}

fn h02_pools(facts: &Facts) -> Findings {
    let Some(pools) = &facts.pools else {
        let why = "no configuration says which pools there are";
        return Err(Finding::not_applicable(why));
    };
    let all_empty = pools.values().all(Vec::is_empty);
    let judge = |(resource, hcas): (&String, &Vec<PoolHca>)| {
        let chosen = "rdmactl validate --on-host says what each selector leaves";
        let finding = if hcas.is_empty() && facts.optional.contains(resource) {
            Finding::not_applicable("none here, and the pool is optional")
        } else if hcas.is_empty() {
            let what = "its selectors choose no HCA of this node";
            match all_empty {
                true => Finding::fail(format!("{what}, nor do those of any other pool"), chosen),
                false => Finding::warn(what, chosen),
            }
        } else if usable(hcas) == 0 {
            Finding::fail(
                format!("none of its HCAs can be used: {}", faults(hcas)),
                "what each of them lacks is named; L01 to L04 say more of ports",
            )
        } else {
            Finding::pass(format!("{} of {} can be used", usable(hcas), hcas.len()))
        };
        finding.on(resource)
    };
    Ok(pools.iter().map(judge).collect())
}

fn h03_expected(facts: &Facts) -> Findings {
    let judge = |expected: &Expected| {
        let none = Vec::new();
        let (of, hcas) = match (&expected.resource, &facts.pools) {
            (None, _) => ("this node".to_owned(), &facts.hcas),
            (Some(resource), Some(pools)) => match pools.get(resource) {
                None if expected.hcas > 0 => {
                    let names: Vec<&str> = pools.keys().map(String::as_str).collect();
                    return Finding::fail(
                        "no pool has this resource",
                        format!("the configuration has {}", names.join(", ")),
                    )
                    .on(resource);
                }
                pool => (resource.clone(), pool.unwrap_or(&none)),
            },
            // What waits for the HCAs of a pool must not go on without any.
            (Some(resource), None) => {
                return Finding::fail(
                    "no configuration says which HCAs are of this pool",
                    "name the device plugin's configuration by --config-file",
                )
                .on(resource);
            }
        };
        let (usable, wanted) = (usable(hcas), expected.hcas);
        let finding = if usable >= wanted {
            Finding::pass(format!("{usable} can be used, {wanted} are expected"))
        } else {
            let mut why = format!("{usable} of {wanted} can be used, {} are here", hcas.len());
            if usable < hcas.len() {
                why = format!("{why}: {}", faults(hcas));
            }
            Finding::fail(
                why,
                "what is here and cannot be used is named; of what is not here, M02, M03 and lspci \
                 tell driver and hardware apart",
            )
        };
        finding.on(of)
    };
    Ok(facts.expected.iter().map(judge).collect())
}

fn usable(hcas: &[PoolHca]) -> usize {
    hcas.iter().filter(|hca| hca.fault.is_none()).count()
}

fn faults(hcas: &[PoolHca]) -> String {
    let faulty = hcas
        .iter()
        .filter_map(|hca| Some(format!("{}: {}", hca.id, hca.fault.as_deref()?)));
    faulty.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests;
