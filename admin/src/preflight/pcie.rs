//! PCIe links, access control, IOMMU, errors (P).

use std::collections::{BTreeMap, BTreeSet};
use std::thread;
use std::time::Duration;

use hca::PciAddress;
use hca::topology::{Class, Gpu, Machine, Nic, PciLocation};

use super::config_space::ConfigSpace;
use super::context::Context;
use super::engine::{Check, Fact, Findings, Judged, Object, check, each, some};
use super::function::{gpus_and_nics, hardware};
use super::platform::is_virtual_machine;
use super::read;
use crate::pcie_link::PcieLink;
use crate::verdict::Verdict::{Fail, Warn};
use crate::verdict::{Finding, words};

pub(super) fn checks() -> Vec<Check> {
    vec![
        check(
            "P01",
            "NIC",
            Fail,
            "PCIe links run as fast and wide as they can",
        )
        .reads("current_link_* and max_link_* of the NIC and the port above it, rate of its ports")
        .remedy("reseat the card, use a slot with all its lanes, update the firmware")
        .each(hardware, p01_link),
        check(
            "P03",
            "switch port",
            Warn,
            "switches let GPU and NIC talk directly",
        )
        .reads("ACS control in the PCI configuration space")
        .remedy(
            "switch ACS off in the firmware, on the kernel's command line \
                 (pci=config_acs=..., disable_acs_redir=...), or by setpci",
        )
        .all(p03_acs),
        check("P05", "NIC or GPU", Warn, "the IOMMU passes DMA through")
            .reads("iommu_group/type")
            .remedy("iommu=pt (x86) or iommu.passthrough=1 (Arm) on the kernel's command line")
            .all(p05_iommu),
        check(
            "P06",
            "NIC",
            Warn,
            "NICs read in large requests, in relaxed order",
        )
        .reads("device control in the PCI configuration space")
        .remedy(
            "mlxconfig PCI_WR_ORDERING=1 or the firmware set-up; for the size until the next \
                 boot setpci CAP_EXP+8.w, highest digit 5",
        )
        .each(hardware, p06_requests),
        check(
            "P07",
            "PCI function",
            Warn,
            "PCIe links report no new errors",
        )
        .reads("aer_dev_* of NICs and the bridges above them, twice")
        .remedy("reseat the card or riser; many correctable errors cost bandwidth as well")
        .all(p07_errors),
        check(
            "P12",
            "NIC",
            Warn,
            "a NIC's Data Direct function shares the GPU's IOMMU group",
        )
        .reads("iommu_group of the function and the GPUs on its switch")
        .remedy(DATA_DIRECT_REMEDY)
        .each(with_data_direct, p12_data_direct),
    ]
}

const DATA_DIRECT_REMEDY: &str =
    "the ACS settings that `rdma_topo check` of rdma-core prints for this machine";

/// What a switch port leads to, which decides the access control it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Below {
    /// A GPU or a NIC, which exchange requests and completions.
    Either,
    /// A Data Direct function: its requests must reach the GPU directly.
    DataDirect,
    /// The GPU beside one: its completions must go back directly.
    ItsGpu,
}

/// Peer-to-peer request and completion redirect, upstream forwarding (`PCI_ACS_RR`, `_CR`, `_UF`).
const ACS_REDIRECT: u16 = ACS_REQUEST | ACS_COMPLETION | 0x10;
const ACS_REQUEST: u16 = 0x04;
const ACS_COMPLETION: u16 = 0x08;
/// `PCI_EXP_DEVCTL_RELAX_EN`.
const RELAXED_ORDERING: u16 = 0x10;

/// Bridges below which the way from a GPU to a NIC on its switches runs: all but their common
/// stem, and its last member.
fn between(machine: &Machine) -> BTreeMap<PciAddress, Below> {
    let mut bridges = BTreeMap::new();
    for gpu in &machine.gpus {
        for nic in &machine.nics {
            let own = (&nic.place, [Below::Either, Below::Either]);
            let other = nic.place.data_direct.as_deref();
            let other = other.map(|place| (place, [Below::ItsGpu, Below::DataDirect]));
            for (place, below) in other.into_iter().chain([own]) {
                // Each by its own place: the second one is judged by itself.
                let place = PciLocation {
                    data_direct: None,
                    ..place.clone()
                };
                let class = machine.distance(&gpu.place, &place).class;
                if !matches!(class, Class::Pix | Class::Pxb) {
                    continue;
                }
                let (a, b) = (&gpu.place.chain, &place.chain);
                let common = a.iter().zip(b).take_while(|(x, y)| x == y).count();
                for (chain, below) in [a, b].into_iter().zip(below) {
                    let last = chain.len().saturating_sub(1);
                    for bridge in chain.get(common..last).unwrap_or_default() {
                        bridges.entry(*bridge).or_insert(below);
                    }
                }
            }
        }
    }
    bridges
}

fn p01_link(context: &Context, check: &Check, nic: &Nic) -> Judged {
    let link = PcieLink::read(&context.host, nic.place.address);
    let Some(current) = link.current else {
        return Err(Finding::unknown(
            "sysfs does not show the link (a VF or a virtual machine)",
        ));
    };
    let rate = nic.hca.rate_mbps().unwrap_or_default();
    let carries = || {
        let (link, ports) = (current.mbps() / 1000, rate / 1000);
        format!("the link carries {link} Gb/s, the ports {ports}")
    };
    let above = nic.place.chain.iter().rev().nth(1);
    let above = above.and_then(|port| PcieLink::read(&context.host, *port).most);
    let limits = link.most.into_iter().chain(above);
    let possible = limits.min_by_key(|lanes| lanes.mbps());
    let finding = if current.mbps() * 2 < rate {
        check.fault(nic, &carries())
    } else if let Some(possible) = possible.filter(|most| current.mbps() < most.mbps()) {
        Finding::warn(format!("{possible} would be possible"), check.remedy)
    } else if current.mbps() < rate {
        let remedy = "400 Gb/s need Gen5 x16, 200 need Gen4 x16, 100 need Gen3 x16";
        Finding::warn(carries(), remedy)
    } else {
        Finding::pass(current.to_string())
    };
    Ok(finding.read("current link", current))
}

fn p03_acs(context: &Context, check: &Check) -> Findings {
    let bridges = between(context.machine()?).into_iter();
    let bridges: Vec<_> = bridges.map(|port| (port.0.to_string(), port)).collect();
    if bridges.is_empty() {
        let (gpus, _) = gpus_and_nics(context)?;
        return Err(Finding::not_applicable(
            match gpus.iter().any(|gpu| gpu.c2c) {
                true => "NICs reach the GPUs over C2C, not through a switch",
                false => "no GPU shares a switch with a NIC",
            },
        ));
    }
    if is_virtual_machine(context)? {
        let why =
            "decided by the hypervisor: a virtual machine needs ATS (mlxconfig ATS_ENABLED=1)";
        return Err(Finding::not_applicable(why));
    }
    each(&bridges, |(_, (address, below))| {
        let (redirect, remedy) = match below {
            Below::Either => (ACS_REDIRECT, check.remedy),
            // Grace translates the rest, so that this port must keep its other controls.
            Below::DataDirect => (ACS_REQUEST, DATA_DIRECT_REMEDY),
            Below::ItsGpu => (ACS_COMPLETION, DATA_DIRECT_REMEDY),
        };
        let Some(control) = ConfigSpace::read(&context.pci(*address))?.acs_control() else {
            return Ok(Finding::pass("no access control"));
        };
        let finding = match control & redirect {
            0 => Finding::pass("no redirection"),
            _ => Finding::warn(
                "access control redirects peer-to-peer traffic through the CPU: less than half of the \
                 bandwidth is left",
                remedy,
            ),
        };
        Ok(finding.read("ACS control", format!("{control:#06x}")))
    })
}

fn p05_iommu(context: &Context, check: &Check) -> Findings {
    let (gpus, nics) = gpus_and_nics(context)?;
    let is_coherent = gpus.iter().all(|gpu| gpu.c2c);
    let nics = nics.iter().map(|nic| (nic.name(), nic.place.address));
    let functions = nics.chain(gpus.iter().map(|gpu| (gpu.name(), gpu.place.address)));
    let functions = functions.map(|(name, address)| (name.unwrap_or_default(), address));
    each(&functions.collect::<Vec<_>>(), |function| {
        let path = context.pci(function.1).join("iommu_group/type");
        let Some(kind) = read::text(context, &path)? else {
            return Ok(Finding::pass("no IOMMU"));
        };
        let finding = match kind.as_str() {
            "identity" => Finding::pass("passed through"),
            // The way is through the CPU anyway, and so through its SMMU.
            _ if is_coherent => {
                Finding::pass("translated on the way to the CPU's memory and, over C2C, the GPU's")
            }
            _ => check.fault(
                function,
                "addresses are translated: peer-to-peer traffic goes through the CPU",
            ),
        };
        Ok(finding.read(check.reads, kind))
    })
}

fn p06_requests(context: &Context, check: &Check, nic: &Nic) -> Judged {
    let space = ConfigSpace::read(&context.pci(nic.place.address))?;
    let Some(control) = space.device_control() else {
        return Ok(Finding::pass("not a PCI Express function"));
    };
    // Bits 14 to 12: 128 bytes doubled as many times.
    let bytes = 128 << (control >> 12 & 7);
    let is_relaxed = control & RELAXED_ORDERING != 0;
    let order = if is_relaxed { "relaxed" } else { "strict" };
    let requests = format!("requests of {bytes} bytes, {order} order");
    let finding = match bytes >= 4096 && is_relaxed {
        true => Finding::pass(&requests),
        false => check.fault(
            nic,
            &format!(
                "{requests}: costs bandwidth on fast NICs, strict order most of all on AMD CPUs"
            ),
        ),
    };
    Ok(finding.read("device control", format!("{control:#06x}")))
}

/// How long error counters are watched.
const WINDOW: Duration = Duration::from_secs(if cfg!(test) { 0 } else { 2 });

/// Counters of a function's errors, by file.
type Counters = BTreeMap<&'static str, u64>;

fn errors(context: &Context, function: PciAddress) -> Fact<Counters> {
    let mut counters = Counters::new();
    for file in ["aer_dev_correctable", "aer_dev_nonfatal", "aer_dev_fatal"] {
        let text = read::text(context, &context.pci(function).join(file))?;
        counters.extend(aer_total(&text.unwrap_or_default()).map(|total| (file, total)));
    }
    Ok(counters)
}

/// The last line of a file of advanced error reporting.
fn aer_total(text: &str) -> Option<u64> {
    let total = text.lines().find(|line| line.starts_with("TOTAL"))?;
    total.split_whitespace().nth(1)?.parse().ok()
}

fn p07_errors(context: &Context, check: &Check) -> Findings {
    let nics = hardware(context)?;
    let functions: BTreeSet<PciAddress> = nics
        .iter()
        .flat_map(|nic| &nic.place.chain)
        .copied()
        .collect();
    let mut before = Vec::new();
    for function in functions {
        let counters = errors(context, function)?;
        if !counters.is_empty() {
            before.push((function.to_string(), (function, counters)));
        }
    }
    if before.is_empty() {
        return Err(Finding::unknown(
            "the kernel does not report PCIe errors (no AER)",
        ));
    }
    thread::sleep(WINDOW);
    each(&before, |(_, (function, before))| {
        Ok(grown(check, before, &errors(context, *function)?))
    })
}

fn grown(check: &Check, before: &Counters, after: &Counters) -> Finding {
    let seconds = WINDOW.as_secs();
    let growth = after.iter().filter_map(|(file, now)| {
        let new = now.checked_sub(*before.get(file)?).filter(|new| *new > 0)?;
        Some(format!("{file} +{new}"))
    });
    let growth: Vec<String> = growth.collect();
    let since_boot = after.iter().filter(|(_, count)| **count > 0);
    let since_boot = since_boot.map(|(file, count)| format!("{file} {count}"));
    let since_boot: Vec<String> = since_boot.collect();
    let finding = match growth.is_empty() {
        true => Finding::pass(format!("no new error in {seconds} s")),
        false => check.fault(&(), &format!("{} in {seconds} s", growth.join(", "))),
    };
    finding.read("since boot", words(&since_boot, ", "))
}

fn with_data_direct(context: &Context) -> Result<Vec<&Nic>, Finding> {
    let nics = hardware(context)?.into_iter();
    some(
        nics.filter(|nic| nic.place.data_direct.is_some()),
        "no NIC shows a Data Direct function (only root sees it)",
    )
}

/// Number of a function's IOMMU group: the name of what the link `iommu_group` leads to.
fn iommu_group(context: &Context, address: PciAddress) -> Fact<Option<String>> {
    let path = context.pci(address).join("iommu_group");
    let link = read::present(context, &path, std::fs::read_link(&path))?;
    Ok(link.and_then(|link| Some(link.file_name()?.to_str()?.to_owned())))
}

/// GPUs on the switch of a function.
fn gpus_beside<'a>(
    machine: &'a Machine,
    function: &'a PciLocation,
) -> impl Iterator<Item = &'a Gpu> {
    let distance = |gpu: &&Gpu| machine.distance(&gpu.place, function);
    let gpus = machine.gpus.iter();
    gpus.filter(move |gpu| distance(gpu).class.is_peer_to_peer())
}

fn p12_data_direct(context: &Context, check: &Check, nic: &Nic) -> Judged {
    let Some(function) = nic.place.data_direct.as_deref() else {
        return Err(Finding::not_applicable("no Data Direct function"));
    };
    let group = iommu_group(context, function.address)?;
    let (mut any, mut other) = (false, None);
    for gpu in gpus_beside(context.machine()?, function) {
        any = true;
        if iommu_group(context, gpu.place.address)? != group {
            other = Some(gpu.ordinal);
        }
    }
    let finding = match (other, &group) {
        _ if !any => Finding::warn(
            "no GPU shares its switch: GPUDirect goes over C2C",
            "see topology; rdma_topo of rdma-core shows what belongs together",
        ),
        (Some(gpu), _) => {
            let why = "is in another IOMMU group: NVIDIA's driver refuses the way between them";
            check.fault(nic, &format!("GPU{gpu} {why}"))
        }
        (None, None) => {
            let why = "no IOMMU groups: the SMMU is off, or sysfs does not show them";
            return Err(Finding::unknown(why));
        }
        (None, Some(group)) => Finding::pass(format!("both are in IOMMU group {group}")),
    };
    Ok(finding.read("Data Direct function", function.address))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::Verdict::Pass;

    fn machine(lay: fn(&hca_trees::Tree)) -> Machine {
        let directory = tempfile::tempdir().unwrap();
        let tree = hca_trees::Tree::new(directory.path());
        lay(&tree);
        let inventory = hca::inventory(&tree.host()).unwrap();
        let gpus = hca::topology::gpu::read(&tree.host()).unwrap();
        Machine::read(&tree.host(), &inventory, gpus).unwrap()
    }

    #[test]
    fn the_total_of_an_aer_file_is_its_last_line() {
        assert_eq!(aer_total("RxErr 0\nBadTLP 3\nTOTAL_ERR_COR 3"), Some(3));
        assert_eq!(aer_total("Undefined 0\nTOTAL_ERR_FATAL 0"), Some(0));
        assert_eq!(aer_total(""), None);
    }

    #[test]
    fn only_errors_that_grow_are_reported() {
        let check = checks()
            .into_iter()
            .find(|check| check.id == "P07")
            .unwrap();
        let counters = |total: u64| -> Counters { [("aer_dev_fatal", total)].into() };
        let verdict = |before, after| {
            let finding = grown(&check, &counters(before), &counters(after));
            (finding.verdict, finding.why)
        };
        assert_eq!(verdict(7, 7), (Pass, "no new error in 0 s".to_owned()));
        assert_eq!(verdict(7, 9), (Warn, "aer_dev_fatal +2 in 0 s".to_owned()));
        // A counter that was reset meanwhile did not grow.
        assert_eq!(verdict(7, 0).0, Pass);
    }

    #[test]
    fn ports_between_gpu_and_nic_are_those_below_the_switch() {
        let machine = machine(hca_trees::machine::cascaded_switches);
        let ports: Vec<String> = between(&machine).keys().map(ToString::to_string).collect();
        let first_socket: Vec<&String> = ports
            .iter()
            .filter(|port| port.starts_with("0000:2"))
            .collect();
        // Both downstream ports of both switches, the port that leads to the second and its own
        // upstream port; neither root port nor the first switch's upstream port.
        assert_eq!(
            first_socket,
            [
                "0000:22:00.0",
                "0000:22:01.0",
                "0000:22:02.0",
                "0000:25:00.0",
                "0000:26:00.0",
                "0000:26:01.0"
            ]
        );
    }

    #[test]
    fn ports_of_a_data_direct_function_and_its_gpu_are_distinguished() {
        let machine = machine(hca_trees::machine::gb300);
        let ports = between(&machine);
        assert_eq!(ports.len(), 8);
        assert_eq!(ports[&"0009:02:00.0".parse().unwrap()], Below::DataDirect);
        assert_eq!(ports[&"0009:02:03.0".parse().unwrap()], Below::ItsGpu);
        let nic = &machine.nics[0];
        let function = nic.place.data_direct.as_deref().unwrap();
        assert_eq!(function.address.to_string(), "0009:03:00.0");
        let gpus: Vec<u32> = gpus_beside(&machine, function)
            .map(|gpu| gpu.ordinal)
            .collect();
        assert_eq!(gpus, [1]);
    }
}
