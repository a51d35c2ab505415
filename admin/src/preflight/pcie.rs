//! PCIe links, access control, IOMMU, power (P).

pub(super) mod config_space;
mod platform;

use std::collections::BTreeMap;
use std::path::Path;

use hca::topology::{Class, Distance, Gpu, Lanes, Machine, PciLocation, PcieLink};
use hca::{PciAddress, RdmaDevice};

use self::config_space::{ConfigSpace, Register};
use self::platform::Platform;
use super::check::{Findings, checks, need};
use super::context::Context;
use crate::verdict::{Finding, NO_NIC};
use rdma_device_plugin::files;

/// What is read.
#[derive(Debug, Clone, Default)]
pub(super) struct Facts {
    /// NICs.
    pub nics: Vec<Function>,
    /// GPUs.
    pub gpus: Vec<Function>,
    /// The switch ports between each GPU and the NICs on its switches.
    pub bridges: Vec<Bridge>,
    /// CPU, kernel and hypervisor.
    pub platform: Platform,
    /// Each function has a root complex of its own: the hypervisor hides the switches.
    pub hides_switches: bool,
}

/// A NIC or GPU.
#[derive(Debug, Clone, Default)]
pub(super) struct Function {
    /// Its name: RDMA device or GPU number, with the address.
    pub name: String,
    /// Rate of its active ports together in Mb/s, of a NIC.
    pub rate_mbps: Option<u64>,
    /// A soft device stands on it: speed, ordering and power do not matter to RDMA.
    pub soft: bool,
    /// Its link.
    pub link: PcieLink,
    /// What the port above it can do.
    pub port_above: Option<Lanes>,
    /// Type of its IOMMU group (`identity`, `DMA`, `DMA-FQ`); `None` without an IOMMU.
    pub iommu: Option<String>,
    /// Device control register.
    pub device_control: Register,
    /// The nearest NIC, of a GPU.
    pub nearest: Option<Distance>,
    /// The nearest NIC reads and writes the GPU's memory without a copy through host memory.
    pub direct: bool,
    /// A GPU with a coherent link to its CPU.
    pub c2c: bool,
    /// The function that does a NIC's DMA to GPUs, where that is not the NIC itself.
    pub data_direct: Option<DataDirect>,
}

/// The Data Direct function of a NIC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DataDirect {
    /// Its address.
    pub address: PciAddress,
    /// Number of its IOMMU group.
    pub iommu_group: Option<u32>,
    /// GPUs on its switch, with their IOMMU groups.
    pub gpus: Vec<(String, Option<u32>)>,
}

/// A switch port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Bridge {
    /// Its address.
    pub address: PciAddress,
    /// Control of access control services.
    pub acs_control: Register,
    /// What hangs below it.
    pub below: Below,
}

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

checks! {
    "P01" "PCIe links run as fast and wide as they can" p01_link;
    "P03" "switches let GPU and NIC talk directly" p03_acs;
    "P05" "the IOMMU does not stand between GPU and NIC" p05_iommu;
    "P06" "NICs read in large requests, in relaxed order" p06_requests;
    "P08" "each GPU shares a switch with a NIC" p08_near;
    "P12" "a NIC's Data Direct function shares the GPU's IOMMU group" p12_data_direct;
}

/// Reads the host.
pub(super) fn read(context: &Context) -> Facts {
    let machine = &context.snapshot.machine;
    let inventory = &context.snapshot.inventory;
    let devices = context.host.sys.join("bus/pci/devices");
    let is_soft = |name: &String| inventory.rdma_device(name).is_some_and(RdmaDevice::is_soft);
    let nics = machine
        .nics
        .iter()
        .filter(|nic| !nic.rdma_devices.is_empty());
    let nics = nics.map(|nic| Function {
        rate_mbps: nic.rate_mbps,
        soft: nic.rdma_devices.iter().any(is_soft),
        data_direct: data_direct(machine, &devices, &nic.place),
        ..function(&devices, &nic.title(), &nic.place, nic.link)
    });
    let gpus = machine.gpus.iter().map(|gpu| {
        let near = machine.nics.iter();
        let nearest = near
            .map(|nic| machine.distance(&gpu.place, &nic.place))
            .min();
        Function {
            nearest,
            direct: nearest.is_some_and(|nearest| gpu.is_direct_at(nearest.class)),
            c2c: gpu.c2c,
            ..function(
                &devices,
                &format!("GPU{}", gpu.ordinal),
                &gpu.place,
                gpu.link,
            )
        }
    });
    let bridge = |(address, below): (PciAddress, Below)| Bridge {
        address,
        acs_control: config(&devices, address).acs_control(),
        below,
    };
    Facts {
        nics: nics.collect(),
        gpus: gpus.collect(),
        bridges: between(machine).into_iter().map(bridge).collect(),
        platform: platform::read(&context.host),
        hides_switches: machine.hides_switches(),
    }
}

fn function(devices: &Path, name: &str, place: &PciLocation, link: PcieLink) -> Function {
    let config = config(devices, place.address);
    let above = place.chain.iter().rev().nth(1);
    let above = above.and_then(|port| PcieLink::read(&devices.join(port.to_string())).ok());
    let iommu = format!("{}/iommu_group/type", place.address);
    Function {
        name: format!("{name} {}", place.address),
        link,
        port_above: above.and_then(|link| link.most),
        iommu: files::text(&devices.join(iommu)),
        device_control: config.device_control(),
        ..Function::default()
    }
}

/// Number of a function's IOMMU group: the name of what the link `iommu_group` leads to.
fn iommu_group(devices: &Path, address: PciAddress) -> Option<u32> {
    let link = devices.join(address.to_string()).join("iommu_group");
    let group = std::fs::read_link(link).ok()?;
    group.file_name()?.to_str()?.parse().ok()
}

fn data_direct(machine: &Machine, devices: &Path, nic: &PciLocation) -> Option<DataDirect> {
    let function = nic.data_direct.as_deref()?;
    let beside = |gpu: &&Gpu| {
        machine
            .distance(&gpu.place, function)
            .class
            .is_peer_to_peer()
    };
    let group = |gpu: &Gpu| {
        let group = iommu_group(devices, gpu.place.address);
        (format!("GPU{}", gpu.ordinal), group)
    };
    Some(DataDirect {
        address: function.address,
        iommu_group: iommu_group(devices, function.address),
        gpus: machine.gpus.iter().filter(beside).map(group).collect(),
    })
}

fn config(devices: &Path, address: PciAddress) -> ConfigSpace {
    let file = devices.join(address.to_string()).join("config");
    ConfigSpace::new(std::fs::read(file).unwrap_or_default())
}

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

/// One finding for each function.
fn each<'f>(
    functions: impl IntoIterator<Item = &'f Function>,
    judge: impl Fn(&Function) -> Finding,
) -> Findings {
    let functions = functions.into_iter();
    Ok(functions
        .map(|function| judge(function).on(&function.name))
        .collect())
}

fn unreadable() -> Finding {
    Finding::unknown("only root reads configuration space beyond 64 bytes")
}

fn need_gpu(facts: &Facts) -> Result<(), Finding> {
    need(!facts.gpus.is_empty(), "no GPU on this node")
}

fn hardware(facts: &Facts) -> impl Iterator<Item = &Function> {
    facts.nics.iter().filter(|nic| !nic.soft)
}

fn p01_link(facts: &Facts) -> Findings {
    need(!facts.nics.is_empty(), NO_NIC)?;
    each(hardware(facts), |nic| {
        let Some(current) = nic.link.current else {
            return Finding::unknown("sysfs does not show the link (a VF or a virtual machine)");
        };
        let possible = nic.link.most.into_iter().chain(nic.port_above);
        let possible = possible.min_by_key(|lanes| lanes.mbps());
        let rate = nic.rate_mbps.unwrap_or_default();
        let carries = || {
            let (link, ports) = (current.mbps() / 1000, rate / 1000);
            format!("the link carries {link} Gb/s, the ports {ports}")
        };
        let remedy = "reseat the card, use a slot with all its lanes, update the firmware";
        let finding = if current.mbps() * 2 < rate {
            Finding::fail(carries(), remedy)
        } else if let Some(possible) = possible.filter(|most| current.mbps() < most.mbps()) {
            Finding::warn(format!("{possible} would be possible"), remedy)
        } else if current.mbps() < rate {
            let remedy = "400 Gb/s need Gen5 x16, 200 need Gen4 x16, 100 need Gen3 x16";
            Finding::warn(carries(), remedy)
        } else {
            Finding::pass("as fast and wide as it can")
        };
        finding.read("current link", current)
    })
}

fn p03_acs(facts: &Facts) -> Findings {
    let why =
        "a question for the hypervisor: a virtual machine needs ATS (ATS_ENABLED=1 in mlxconfig)";
    need(!facts.platform.virtual_machine, why)?;
    let why = match facts.gpus.iter().any(|gpu| gpu.c2c) {
        true => "NICs reach the GPUs over C2C, not through a switch",
        false => "no GPU shares a switch with a NIC",
    };
    need(!facts.bridges.is_empty(), why)?;
    let judge = |bridge: &Bridge| {
        let (redirect, remedy) = match bridge.below {
            Below::Either => (
                ACS_REDIRECT,
                "switch ACS off in the firmware, or on the kernel's command line \
                 (pci=config_acs=..., disable_acs_redir=...), or by setpci",
            ),
            // Grace translates the rest, so that this port must keep its other controls.
            Below::DataDirect => (ACS_REQUEST, DATA_DIRECT_REMEDY),
            Below::ItsGpu => (ACS_COMPLETION, DATA_DIRECT_REMEDY),
        };
        let finding = match bridge.acs_control {
            Register::None => Finding::pass("it has no access control"),
            Register::Unreadable => unreadable(),
            Register::Value(control) => match control & redirect {
                0 => Finding::pass("no redirection"),
                _ => Finding::warn(
                    "access control redirects peer-to-peer traffic through the CPU: less than half \
                     of the bandwidth is left",
                    remedy,
                ),
            }
            .read("ACS control", format!("{control:#06x}")),
        };
        finding.on(bridge.address.to_string())
    };
    Ok(facts.bridges.iter().map(judge).collect())
}

fn p05_iommu(facts: &Facts) -> Findings {
    need_gpu(facts)?;
    let coherent = facts.gpus.iter().all(|gpu| gpu.c2c);
    let remedy = match facts.platform.arm {
        true => "iommu.passthrough=1 on the kernel's command line",
        false => "iommu=pt on the kernel's command line",
    };
    each(hardware(facts).chain(&facts.gpus), |function| {
        let Some(kind) = &function.iommu else {
            return Finding::pass("no IOMMU, or it is off");
        };
        let finding = match kind.as_str() {
            "identity" => Finding::pass("passed through"),
            // The way is through the CPU anyway, and so through its SMMU.
            _ if coherent => Finding::pass(
                "the SMMU translates on the way to the CPU's memory and, over C2C, the GPU's",
            ),
            _ => Finding::warn(
                "addresses are translated: peer-to-peer traffic takes the way through the CPU",
                remedy,
            ),
        };
        finding.read("type", kind)
    })
}

fn p06_requests(facts: &Facts) -> Findings {
    need(!facts.nics.is_empty(), NO_NIC)?;
    each(hardware(facts), |nic| {
        let Register::Value(control) = nic.device_control else {
            return unreadable();
        };
        // Bits 14 to 12: 128 bytes doubled as many times.
        let request = 128_u32 << (control >> 12 & 7);
        let relaxed = control & RELAXED_ORDERING != 0;
        let finding = match (request >= 4096, relaxed) {
            (true, true) => Finding::pass("requests of 4096 bytes, relaxed order"),
            (false, _) => Finding::warn(
                format!("requests of {request} bytes cost bandwidth on fast NICs"),
                "mlxconfig or the firmware set-up; for now setpci CAP_EXP+8.w, highest digit 5",
            ),
            (true, false) => Finding::warn(
                "strict ordering costs bandwidth, most of all on AMD CPUs",
                "mlxconfig PCI_WR_ORDERING=1, or the firmware set-up",
            ),
        };
        finding.read("device control", format!("{control:#06x}"))
    })
}

fn p08_near(facts: &Facts) -> Findings {
    need_gpu(facts)?;
    need(!facts.nics.is_empty(), NO_NIC)?;
    let hidden = match facts.hides_switches {
        true => " (the hypervisor hides the switches)",
        false => "",
    };
    each(&facts.gpus, |gpu| {
        let Some(nearest) = gpu.nearest else {
            return Finding::unknown("no NIC is on a PCI device");
        };
        let finding = if nearest.class.is_peer_to_peer() {
            Finding::pass("it does")
        } else if gpu.direct {
            Finding::pass("no, but they share a CPU, which is joined to the GPU by C2C")
        } else if gpu.c2c {
            Finding::warn(
                format!(
                    "the nearest NIC is at {nearest}, on another CPU: C2C does not reach that far"
                ),
                "see topology; this tray has no NIC with an RDMA driver on the GPU's own CPU",
            )
        } else {
            Finding::warn(
                format!("the nearest NIC is at {nearest}{hidden}: NCCL copies through host memory"),
                "see topology; NCCL_NET_GDR_LEVEL, or a topology file where switches are hidden",
            )
        };
        finding.read("nearest NIC", nearest)
    })
}

const DATA_DIRECT_REMEDY: &str =
    "the ACS settings that `rdma_topo check` of rdma-core prints for this machine";

fn p12_data_direct(facts: &Facts) -> Findings {
    let with_one = facts.nics.iter();
    let with_one: Vec<_> = with_one.filter(|nic| nic.data_direct.is_some()).collect();
    let why = "no NIC with a Data Direct function, or only root could see it";
    need(!with_one.is_empty(), why)?;
    each(with_one, |nic| {
        let Some(function) = &nic.data_direct else {
            return Finding::not_applicable(why);
        };
        let other = |(_, group): &&(String, Option<u32>)| *group != function.iommu_group;
        let finding = if function.gpus.is_empty() {
            Finding::warn(
                "no GPU shares its switch: GPUDirect goes over C2C",
                "see topology; rdma_topo of rdma-core shows what belongs together",
            )
        } else if let Some((gpu, _)) = function.gpus.iter().find(other) {
            Finding::warn(
                format!(
                    "{gpu} is in another IOMMU group: NVIDIA's driver refuses the way between them"
                ),
                DATA_DIRECT_REMEDY,
            )
        } else if function.iommu_group.is_none() {
            Finding::unknown(
                "there are no IOMMU groups: the SMMU is off, or sysfs does not show them",
            )
        } else {
            Finding::pass("they share one")
        };
        finding.read("Data Direct function", function.address)
    })
}

#[cfg(test)]
mod tests;
