//! Modules and drivers (M).

use std::collections::BTreeSet;

use hca::PciAddress;

use super::context::Context;
use super::engine::{Check, Fact, Findings, Judged, Object, Unread, check, each, node};
use super::read;
use crate::verdict::Verdict::Fail;
use crate::verdict::{Finding, NO_NIC};

pub(super) fn checks() -> Vec<Check> {
    vec![
        check("M01", "node", Fail, "the RDMA core is in the kernel")
            .reads("/sys/class/infiniband, infiniband_verbs, misc/rdma_cm")
            .remedy("modprobe ib_uverbs, and list it in /etc/modules-load.d")
            .each(node, m01_core),
        check(
            "M02",
            "PCI function",
            Fail,
            "each NIC has its driver and an RDMA device",
        )
        .reads("/sys/bus/pci/devices, /sys/module, /sys/class/infiniband")
        .remedy("load the NIC's driver and its RDMA half, such as mlx5_core and mlx5_ib")
        .all(|context, _| m02_drivers(context)),
    ]
}

/// A PCI function that could do RDMA.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Candidate {
    address: PciAddress,
    driver: Option<String>,
    /// An RDMA device stands on it, here or in a pod.
    rdma: bool,
    /// Its netdev is a member of a bond whose other member has the RDMA device for both.
    in_lag: bool,
}

impl Object for Candidate {
    fn name(&self) -> Option<String> {
        Some(self.address.to_string())
    }
}

/// Mellanox, whose network functions all do RDMA.
const MELLANOX: u16 = 0x15b3;

/// Netdev drivers with the module that adds RDMA to them, and whether the NICs are bought for it.
const RDMA_HALVES: [(&str, &str, bool); 14] = [
    ("mlx5_core", "mlx5_ib", true),
    ("mlx4_core", "mlx4_ib", true),
    ("efa", "efa", true),
    ("erdma", "erdma", true),
    ("bnxt_en", "bnxt_re", false),
    ("ice", "irdma", false),
    ("i40e", "irdma", false),
    ("idpf", "irdma", false),
    ("cxgb4", "iw_cxgb4", false),
    ("qede", "qedr", false),
    ("hns3", "hns_roce_hw_v2", false),
    ("ionic", "ionic_rdma", false),
    ("mana", "mana_ib", false),
    ("be2net", "ocrdma", false),
];

/// Drivers that hold a function for a virtual machine or user space.
const PASSED_THROUGH: [&str; 4] = ["vfio-pci", "uio_pci_generic", "igb_uio", "pci-stub"];

/// Modules in the kernel, loaded or built in.
pub(super) fn modules(context: &Context) -> Fact<BTreeSet<String>> {
    let names = read::names(context, &context.host.sys.join("module"))?;
    let names = names.ok_or_else(|| Unread("/sys/module does not exist".into()))?;
    Ok(names.into_iter().collect())
}

fn candidates(context: &Context) -> Fact<Vec<Candidate>> {
    let inventory = &context.snapshot.inventory;
    let has_rdma = |address| inventory.hca(&hca::HcaId::Pci(address)).is_some();
    let is_in_lag = |netdev: &hca::Netdev| {
        let bond = netdev.master.as_deref();
        let bond = bond.and_then(|master| inventory.netdev(master));
        let members = bond.into_iter().flat_map(|bond| &bond.lowers);
        let mut members = members.filter_map(|lower| inventory.netdev(lower)?.pci);
        members.any(has_rdma)
    };
    let candidate = |name: String| {
        let address = name.parse().ok()?;
        let function = hca::pci::read(&context.host, address).ok()?;
        let is_known = function.driver.as_deref().and_then(half_of).is_some();
        let could = function.class >> 16 == 0x02 && (is_known || function.vendor == MELLANOX);
        could.then(|| Candidate {
            address,
            driver: function.driver,
            rdma: has_rdma(address),
            in_lag: inventory.netdevs_on_pci(address).any(is_in_lag),
        })
    };
    let names = read::names(context, &context.host.sys.join("bus/pci/devices"))?;
    Ok(names
        .unwrap_or_default()
        .into_iter()
        .filter_map(candidate)
        .collect())
}

fn half_of(driver: &str) -> Option<(&'static str, bool)> {
    let known = RDMA_HALVES.iter().find(|(netdev, _, _)| *netdev == driver);
    known.map(|(_, half, bought_for_it)| (*half, *bought_for_it))
}

/// Modules of the RDMA core, and the class or device below `/sys/class` that each makes: one that is built in has
/// no directory in `/sys/module` unless it has parameters (`kernel/params.c`).
const CORE: [(&str, &str); 3] = [
    ("ib_core", "infiniband"),
    ("ib_uverbs", "infiniband_verbs"),
    ("rdma_ucm", "misc/rdma_cm"),
];

fn m01_core(context: &Context, check: &Check, node: &()) -> Judged {
    if context.snapshot.inventory.rdma_devices().next().is_none() && candidates(context)?.is_empty()
    {
        return Err(Finding::not_applicable(NO_NIC));
    }
    let mut missing = Vec::new();
    for (module, made) in CORE {
        let made = context.host.sys.join("class").join(made);
        if read::names(context, &made)?.is_none() {
            missing.push(module);
        }
    }
    Ok(match missing.as_slice() {
        [] => Finding::pass("ib_core, ib_uverbs and rdma_ucm are in the kernel"),
        ["rdma_ucm"] => Finding::warn(
            "rdma_ucm is not in the kernel: connections by address (perftest -R, UCX, NVMe) fail",
            "modprobe rdma_ucm, and list it in /etc/modules-load.d",
        ),
        core => check.fault(
            node,
            &format!(
                "{} not in the kernel: there are no verbs",
                core.join(" and ")
            ),
        ),
    })
}

fn m02_drivers(context: &Context) -> Findings {
    let (modules, candidates) = (modules(context)?, candidates(context)?);
    let none = context.snapshot.inventory.rdma_devices().next().is_none();
    if candidates.is_empty() {
        let count = context.snapshot.inventory.rdma_devices().count();
        return match none {
            true => Err(Finding::not_applicable(NO_NIC)),
            false => Ok(vec![Finding::pass(format!("{count} RDMA devices"))]),
        };
    }
    let mut findings = each(&candidates, |candidate| {
        let driver = candidate.driver.as_deref().unwrap_or("none");
        Ok(driver_of(candidate, &modules).read("driver", driver))
    })?;
    if none && !findings.iter().any(|finding| finding.verdict == Fail) {
        findings.push(
            Finding::fail(
                "no RDMA device on this node, though it has NICs that could do RDMA",
                "load the RDMA half of their driver, such as irdma for ice",
            )
            .read("/sys/class/infiniband", "empty"),
        );
    }
    Ok(findings)
}

fn driver_of(candidate: &Candidate, modules: &BTreeSet<String>) -> Finding {
    let Some(driver) = candidate.driver.as_deref() else {
        return Finding::fail(
            "no driver is bound",
            "load the NIC's driver (modprobe mlx5_core), and check dmesg for why it was unbound",
        );
    };
    if candidate.rdma {
        return Finding::pass("it has an RDMA device");
    }
    if PASSED_THROUGH.contains(&driver) {
        return Finding::not_applicable(format!(
            "{driver} holds it for a virtual machine or user space"
        ));
    }
    match half_of(driver) {
        None => Finding::unknown(format!("{driver} is not known to do RDMA")),
        Some((half, true)) if !modules.contains(half) => Finding::fail(
            format!("{half} is not in the kernel: the NIC has no RDMA"),
            format!("modprobe {half}, and list it in /etc/modules-load.d"),
        ),
        Some((half, false)) if !modules.contains(half) => {
            Finding::not_applicable(format!("an Ethernet NIC unless {half} is loaded"))
        }
        Some(_) if candidate.in_lag => {
            Finding::pass("the other member of its bond has the RDMA device for both")
        }
        Some((half, bought_for_it)) => Finding::fail(
            format!("{half} made no RDMA device on it: its RDMA half is disabled"),
            "devlink dev param set pci/ADDRESS name enable_roce value true cmode driverinit; \
             devlink dev reload pci/ADDRESS",
        )
        .softened(!bought_for_it),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::Verdict::{NotApplicable, Pass, Unknown, Warn};

    #[test]
    fn a_function_is_judged_by_its_driver_and_its_rdma_half() {
        let loaded = ["ib_core", "mlx5_ib", "irdma"];
        for (driver, rdma, in_lag, modules, verdict, words) in [
            (
                Some("mlx5_core"),
                true,
                false,
                &loaded[..],
                Pass,
                "has an RDMA device",
            ),
            (None, false, false, &loaded, Fail, "no driver"),
            (
                Some("mlx5_core"),
                false,
                false,
                &[],
                Fail,
                "mlx5_ib is not in the kernel",
            ),
            (Some("mlx5_core"), false, false, &loaded, Fail, "disabled"),
            (Some("mlx5_core"), false, true, &loaded, Pass, "bond"),
            (
                Some("vfio-pci"),
                false,
                false,
                &loaded,
                NotApplicable,
                "virtual machine",
            ),
            (
                Some("i40e"),
                false,
                false,
                &[],
                NotApplicable,
                "unless irdma",
            ),
            (
                Some("ice"),
                false,
                false,
                &loaded,
                Warn,
                "irdma made no RDMA device",
            ),
            (Some("mlxfw"), false, false, &loaded, Unknown, "mlxfw"),
        ] {
            let candidate = Candidate {
                address: "0000:3b:00.0".parse().unwrap(),
                driver: driver.map(str::to_owned),
                rdma,
                in_lag,
            };
            let modules = modules.iter().map(|module| (*module).to_owned()).collect();
            let finding = driver_of(&candidate, &modules);
            assert_eq!(finding.verdict, verdict, "{candidate:?}: {finding:?}");
            assert!(finding.why.contains(words), "{finding:?}");
        }
    }
}
