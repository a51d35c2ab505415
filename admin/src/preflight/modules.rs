//! Kernel, modules and drivers (M).

use std::collections::BTreeSet;

use hca::{PciAddress, RdmaDevice};
use netlink::release::{MINIMUM, version};

use super::check::{Findings, checks, need};
use super::context::Context;
use crate::verdict::{Finding, NO_NIC};
use rdma_device_plugin::candidate::RDMA_HALVES;
use rdma_device_plugin::files;

/// What is read.
#[derive(Debug, Clone, Default)]
pub(super) struct Facts {
    /// Release of the kernel, such as `6.1.0-23-amd64`.
    pub release: Option<String>,
    /// Modules in the kernel, loaded or built in.
    pub modules: BTreeSet<String>,
    /// Network functions whose driver can do RDMA, or whose vendor makes nothing else.
    pub functions: Vec<Function>,
    /// RDMA devices.
    pub devices: Vec<RdmaDevice>,
    /// A container installs the drivers: whether it says that it is done.
    pub driver_container: Option<bool>,
}

/// A PCI function that could do RDMA.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Function {
    /// Its address.
    pub address: PciAddress,
    /// The bound driver.
    pub driver: Option<String>,
    /// An RDMA device stands on it, here or in a pod.
    pub rdma: bool,
    /// Its netdev is a member of a bond whose other member has the RDMA device for both.
    pub in_lag: bool,
}

/// Mellanox, whose network functions all do RDMA.
const MELLANOX: u16 = 0x15b3;

/// Drivers that hold a function for a virtual machine or user space.
const GIVEN_AWAY: [&str; 4] = ["vfio-pci", "uio_pci_generic", "igb_uio", "pci-stub"];

checks! {
    "M01" "the RDMA core is in the kernel" m01_core;
    "M02" "NICs have their driver and its RDMA half" m02_drivers;
    "M03" "NICs with an RDMA driver have an RDMA device" m03_devices;
    "M04" "the driver container is done" m04_marker;
    "M08" "kernel version and features" m08_kernel;
}

/// Reads the host.
pub(super) fn read(context: &Context) -> Facts {
    let inventory = &context.snapshot.inventory;
    let proc = &context.host.proc;
    let names = files::names(&context.host.sys.join("module"));
    let mut modules: BTreeSet<String> = names.into_iter().collect();
    let loaded = files::text(&proc.join("modules")).unwrap_or_default();
    let loaded = loaded.lines().filter_map(|line| line.split(' ').next());
    modules.extend(loaded.map(str::to_owned));
    let drivers = context.path("/run/mellanox/drivers");
    Facts {
        release: files::text(&proc.join("sys/kernel/osrelease")),
        modules,
        functions: functions(context),
        devices: inventory.rdma_devices.clone(),
        driver_container: drivers
            .is_dir()
            .then(|| drivers.join(".driver-ready").exists()),
    }
}

fn functions(context: &Context) -> Vec<Function> {
    let inventory = &context.snapshot.inventory;
    let has_rdma = |address| inventory.rdma_on_pci(address).next().is_some();
    let is_in_lag = |netdev: &hca::Netdev| {
        let bond = netdev
            .master
            .as_deref()
            .and_then(|master| inventory.netdev(master));
        let members = bond.into_iter().flat_map(|bond| &bond.lowers);
        let mut members = members.filter_map(|lower| inventory.netdev(lower)?.pci);
        members.any(has_rdma)
    };
    let function = |name: &String| {
        let address = name.parse().ok()?;
        let function = hca::pci::read(&context.host, address).ok()?;
        let known = function
            .driver
            .as_deref()
            .is_some_and(|driver| half_of(driver).is_some());
        let could = function.class >> 16 == 0x02 && (known || function.vendor == MELLANOX);
        let mut hidden = inventory.hidden.iter();
        could.then(|| Function {
            address,
            driver: function.driver,
            rdma: has_rdma(address)
                || hidden.any(|one| one.pci.as_ref().is_some_and(|pci| pci.address == address)),
            in_lag: inventory.netdevs_on_pci(address).any(is_in_lag),
        })
    };
    let names = files::names(&context.host.sys.join("bus/pci/devices"));
    names.iter().filter_map(function).collect()
}

fn half_of(driver: &str) -> Option<(&'static str, bool)> {
    let known = RDMA_HALVES.iter().find(|(netdev, _, _)| *netdev == driver);
    known.map(|(_, half, bought_for_it)| (*half, *bought_for_it))
}

fn need_hardware(facts: &Facts) -> Result<(), Finding> {
    need(
        !facts.devices.is_empty() || !facts.functions.is_empty(),
        NO_NIC,
    )
}

fn m01_core(facts: &Facts) -> Findings {
    need_hardware(facts)?;
    let missing: Vec<&str> = ["ib_core", "ib_uverbs"]
        .into_iter()
        .filter(|module| !facts.modules.contains(*module))
        .collect();
    let finding = if !missing.is_empty() {
        let missing = missing.join(" and ");
        Finding::fail(
            format!("{missing} not in the kernel: there are no verbs"),
            "modprobe ib_uverbs, and list it in /etc/modules-load.d",
        )
        .read("/sys/module", format!("no {missing}"))
    } else if !facts.modules.contains("rdma_ucm") {
        Finding::warn(
            "rdma_ucm is not in the kernel: no rdma_cm node, so connections by address \
             (perftest -R, UCX, NVMe) fail",
            "modprobe rdma_ucm, and list it in /etc/modules-load.d",
        )
        .read("/sys/module", "ib_core, ib_uverbs, no rdma_ucm")
    } else {
        Finding::pass("verbs and the connection manager are there")
            .read("/sys/module", "ib_core, ib_uverbs, rdma_ucm")
    };
    Ok(vec![finding])
}

fn m02_drivers(facts: &Facts) -> Findings {
    need(!facts.functions.is_empty(), NO_NIC)?;
    let judge = |function: &Function| {
        let finding = match function.driver.as_deref() {
            None => Finding::fail(
                "no driver is bound",
                "load the NIC's driver (modprobe mlx5_core), and check dmesg for why it was unbound",
            ),
            Some(driver) if GIVEN_AWAY.contains(&driver) => Finding::not_applicable(format!(
                "{driver} holds it for a virtual machine or user space"
            )),
            Some(driver) => match half_of(driver) {
                _ if function.rdma => Finding::pass("both halves of the driver are at work"),
                Some((half, _)) if facts.modules.contains(half) => {
                    Finding::pass(format!("{driver} and {half} are in the kernel"))
                }
                Some((half, true)) => Finding::fail(
                    format!("{half} is not in the kernel: the NIC has no RDMA"),
                    format!("modprobe {half}, and list it in /etc/modules-load.d"),
                ),
                Some((half, false)) => {
                    Finding::not_applicable(format!("an Ethernet NIC unless {half} is loaded"))
                }
                None => Finding::unknown(format!("{driver} is not known to do RDMA")),
            },
        };
        let driver = function.driver.as_deref().unwrap_or("none");
        finding
            .on(function.address.to_string())
            .read("driver", driver)
    };
    Ok(facts.functions.iter().map(judge).collect())
}

fn m03_devices(facts: &Facts) -> Findings {
    need_hardware(facts)?;
    let judge = |function: &Function| {
        let (half, bought_for_it) = half_of(function.driver.as_deref()?)?;
        let finding = if !facts.modules.contains(half) {
            return None;
        } else if function.rdma {
            Finding::pass("an RDMA device uses it")
        } else if function.in_lag {
            Finding::pass("the other member of its bond has the RDMA device for both")
        } else {
            Finding::fail(
                format!("{half} made no RDMA device on it: its RDMA half is disabled"),
                "devlink dev param set pci/ADDRESS name enable_roce value true cmode \
                 driverinit; devlink dev reload pci/ADDRESS",
            )
            .softened(!bought_for_it)
        };
        Some(finding.on(function.address.to_string()))
    };
    let mut findings: Vec<Finding> = facts.functions.iter().filter_map(judge).collect();
    if findings.is_empty() && facts.devices.is_empty() {
        findings.push(
            Finding::fail(
                "no RDMA device on this node, though it has NICs that could do RDMA",
                "load the RDMA half of their driver, see M02",
            )
            .read("/sys/class/infiniband", "empty"),
        );
    } else if findings.is_empty() {
        let count = facts.devices.len();
        findings.push(Finding::pass(format!("{count} RDMA devices")));
    }
    Ok(findings)
}

fn m04_marker(facts: &Facts) -> Findings {
    let path = "/run/mellanox/drivers/.driver-ready";
    Ok(vec![match facts.driver_container {
        None => Finding::not_applicable("no driver container manages this node's drivers"),
        Some(true) => Finding::pass("the driver container is done").read(path, "exists"),
        Some(false) => Finding::fail(
            "the driver container is not done: drivers may be reloaded at any moment",
            "wait for it (--wait); check the logs of the OFED or DOCA driver pod of this node",
        )
        .read(path, "missing"),
    }])
}

fn m08_kernel(facts: &Facts) -> Findings {
    let Some(release) = &facts.release else {
        return Err(Finding::unknown("the kernel's release cannot be read"));
    };
    let finding = match version(release) {
        None => Finding::unknown("a release of an unknown form"),
        Some(version) if version < MINIMUM => Finding::fail(
            "before 5.14 links do not name the hardware below them, by which rdma-netdev knows a \
             NIC again after its pod; its STATUS says so, too",
            "install Linux 5.14 or newer",
        ),
        Some(_) => Finding::pass("RDMA namespaces and dma-buf registration are there"),
    };
    Ok(vec![finding.read("/proc/sys/kernel/osrelease", release)])
}

#[cfg(test)]
mod tests;
