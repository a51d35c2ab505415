//! How many HCAs there are (H): other checks judge what they find, and find nothing to blame on a node
//! that has lost all of it.

use super::context::{Context, HostPool, PoolHca};
use super::engine::{Check, Findings, Judged, check, node};
use crate::verdict::Finding;
use crate::verdict::Verdict::Fail;

pub(super) fn checks() -> Vec<Check> {
    vec![
        check("H01", "node", Fail, "there is an HCA")
            .reads("/sys/class/infiniband")
            .remedy(
                "see M01 and M02 for a missing driver, and lspci for the NIC; check a node that \
                 is meant to have none with --skip H",
            )
            .each(node, h01_any),
        check("H02", "pool", Fail, "each pool has an HCA that can be used")
            .reads("the configuration, /sys/class/infiniband")
            .remedy(CHOSEN)
            .all(|context, _| h02_pools(context)),
        check(
            "H03",
            "node or pool",
            Fail,
            "as many HCAs as expected can be used",
        )
        .reads("--expect, expected of each pool, /sys/class/infiniband")
        .remedy("see the reasons; for ports run --only L; for missing HCAs check lspci, then M02")
        .all(h03_expected),
    ]
}

const CHOSEN: &str = "rdmactl validate --on-host shows what each selector leaves";

/// All HCAs of the host.
fn hcas(context: &Context) -> Vec<PoolHca> {
    let inventory = &context.snapshot.inventory;
    let for_pods = |hca: &&hca::Hca| hca.reserved().is_none();
    let of_hca = |hca: &hca::Hca| {
        let name = hca.rdma_names().join(",");
        let is_dark = !hca.elsewhere && !hca.ports().any(|(_, port)| port.is_active());
        let fault = hca.fault.as_deref();
        PoolHca::new(&name, fault.or(is_dark.then_some("no port is active")))
    };
    let others = inventory.unusable.iter();
    let others = others.map(|one| PoolHca::new(&one.device.name, Some(&one.reason)));
    let hcas = inventory.hcas.iter().filter(for_pods).map(of_hca);
    hcas.chain(others).collect()
}

fn h01_any(context: &Context, check: &Check, node: &()) -> Judged {
    if context.settings.in_pod {
        return Err(Finding::not_applicable("not checked with --pod"));
    }
    let hcas = hcas(context);
    let ids: Vec<&str> = hcas.iter().map(|hca| hca.id.as_str()).collect();
    Ok(match ids.len() {
        0 => check.fault(node, "no RDMA device, neither here nor in a pod"),
        count => Finding::pass(format!("{count} HCAs")).read("RDMA devices", ids.join(", ")),
    })
}

fn h02_pools(context: &Context) -> Findings {
    let Some(pools) = &context.pools else {
        return Err(Finding::not_applicable("no configuration (--config-file)"));
    };
    let all_empty = pools.by_resource.values().all(|pool| pool.hcas.is_empty());
    let judge = |(resource, pool): (&String, &HostPool)| {
        let hcas = &pool.hcas;
        let finding = if hcas.is_empty() && pool.optional {
            Finding::not_applicable("none here, and the pool is optional")
        } else if hcas.is_empty() && all_empty {
            Finding::fail(
                "no selector of any pool matches an HCA of this node",
                CHOSEN,
            )
        } else if hcas.is_empty() {
            Finding::warn("its selectors match no HCA of this node", CHOSEN)
        } else if usable(hcas) == 0 {
            Finding::fail(
                format!("none of its HCAs can be used: {}", faults(hcas)),
                "see the reasons above; for ports run --only L",
            )
        } else {
            Finding::pass(format!("{} of {} can be used", usable(hcas), hcas.len()))
        };
        finding.on(resource)
    };
    Ok(pools.by_resource.iter().map(judge).collect())
}

/// The node by `--expect`, each pool by its key `expected`.
fn h03_expected(context: &Context, check: &Check) -> Findings {
    let all = hcas(context);
    let node = context
        .settings
        .expected
        .map(|count| ("this node", &all, count));
    let pools = context.pools.iter().flat_map(|pools| &pools.by_resource);
    let pools = pools.filter_map(|(resource, pool)| {
        let wanted = pool
            .expected
            .filter(|_| !pool.optional || !pool.hcas.is_empty())?;
        Some((resource.as_str(), &pool.hcas, wanted))
    });
    let judge = |(of, hcas, wanted): (&str, &Vec<PoolHca>, usize)| {
        let (usable, here) = (usable(hcas), hcas.len());
        let reasons = match usable < here {
            true => format!(": {}", faults(hcas)),
            false => String::new(),
        };
        let finding = match usable >= wanted {
            true => Finding::pass(format!("{usable} can be used, {wanted} expected")),
            false => check.fault(
                &(),
                &format!("{usable} of {wanted} can be used, {here} are here{reasons}"),
            ),
        };
        finding.on(of)
    };
    Ok(node.into_iter().chain(pools).map(judge).collect())
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
