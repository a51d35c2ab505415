//! What lets a NIC reach GPU memory (D): the drivers' halves of GPUDirect RDMA.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::Path;

use super::check::{Findings, checks, need};
use super::context::Context;
use crate::verdict::{Finding, NO_NIC, words};
use rdma_device_plugin::files;

/// What is read.
#[derive(Debug, Clone, Default)]
pub(super) struct Facts {
    /// GPUs of NVIDIA.
    pub nvidia_gpus: usize,
    /// GPUs of others.
    pub other_gpus: usize,
    /// RDMA devices that are hardware.
    pub nics: usize,
    /// The driver's version by itself (`/proc/driver/nvidia/version`).
    pub nvidia_version: Option<String>,
    /// Modules in the kernel.
    pub modules: BTreeSet<String>,
    /// Clients of the old peer memory interface (`/sys/kernel/mm/memory_peers`).
    pub memory_peers: Vec<String>,
    /// Names of kernel functions that matter here; `None` if they cannot be read.
    pub symbols: Option<BTreeSet<String>>,
    /// NVIDIA's device plugin hands all verbs nodes to GPU containers; `None` if no process of it
    /// is in sight.
    pub all_nodes_to_gpu_pods: Option<bool>,
}

checks! {
    "D01" "the GPU driver can export dma-bufs" d01_driver;
    "D02" "a peer memory module is loaded, or not needed" d02_peermem;
    "D03" "NICs can register dma-bufs" d03_dmabuf;
    "D07" "GPU pods get no verbs nodes unasked" d07_isolation;
}

const GET_DMABUF: &str = "ib_umem_dmabuf_get";
const DRIVER_DMABUF: &str = "_reg_user_mr_dmabuf";
const PEER_INTERFACE: &str = "ib_register_peer_memory_client";
const PEER_MODULES: [&str; 2] = ["nvidia_peermem", "nv_peer_mem"];
const NVIDIA: u16 = 0x10de;

/// Reads the host.
pub(super) fn read(context: &Context) -> Facts {
    let (sys, proc) = (&context.host.sys, &context.host.proc);
    let machine = &context.snapshot.machine;
    let nvidia_gpus = machine
        .gpus
        .iter()
        .filter(|gpu| gpu.vendor == NVIDIA)
        .count();
    let inventory = &context.snapshot.inventory;
    let processes = files::processes(proc);
    let plugin = processes
        .iter()
        .find(|process| process.name.starts_with("nvidia-device-p"));
    Facts {
        nvidia_gpus,
        other_gpus: machine.gpus.len() - nvidia_gpus,
        nics: inventory
            .rdma_devices
            .iter()
            .filter(|device| !device.is_soft())
            .count(),
        nvidia_version: files::text(&proc.join("driver/nvidia/version")),
        modules: files::names(&sys.join("module")).into_iter().collect(),
        memory_peers: files::names(&sys.join("kernel/mm/memory_peers")),
        symbols: symbols(&proc.join("kallsyms")),
        all_nodes_to_gpu_pods: plugin.map(|process| {
            let environment = std::fs::read(proc.join(process.pid.to_string()).join("environ"));
            hands_out_all_nodes(&environment.unwrap_or_default())
        }),
    }
}

/// Names of interest among the kernel's; addresses may be hidden, names are not.
fn symbols(path: &Path) -> Option<BTreeSet<String>> {
    let file = std::fs::File::open(path).ok()?;
    let wanted =
        |name: &str| name == GET_DMABUF || name == PEER_INTERFACE || name.ends_with(DRIVER_DMABUF);
    let lines = BufReader::new(file).lines().map_while(Result::ok);
    let names = lines.filter_map(|line| {
        let name = line.split_whitespace().nth(2)?;
        wanted(name).then(|| name.to_owned())
    });
    Some(names.collect())
}

/// The one variable that says so; nothing else of the environment is kept.
fn hands_out_all_nodes(environment: &[u8]) -> bool {
    let mut variables = environment.split(|byte| *byte == 0);
    variables.any(|variable| variable == b"MOFED_ENABLED=true" || variable == b"MOFED_ENABLED=1")
}

fn need_gpu_and_nic(facts: &Facts) -> Result<(), Finding> {
    need(
        facts.nvidia_gpus + facts.other_gpus > 0,
        "no GPU on this node",
    )?;
    need(facts.nics > 0, NO_NIC)
}

fn need_nvidia(facts: &Facts) -> Result<(), Finding> {
    need_gpu_and_nic(facts)?;
    let why = "no NVIDIA GPU: the driver exports dma-bufs itself";
    need(facts.nvidia_gpus > 0, why)
}

/// Major number of NVIDIA's driver, and whether it is the open one.
fn nvidia_driver(facts: &Facts) -> Option<(u32, bool)> {
    let text = facts.nvidia_version.as_ref()?;
    let line = text.lines().next()?;
    let words = line.split_whitespace();
    let major = words
        .filter_map(|word| word.split_once('.')?.0.parse().ok())
        .next()?;
    Some((major, line.contains("Open Kernel Module")))
}

fn exports_dmabuf(facts: &Facts) -> bool {
    facts.nvidia_gpus == 0 || matches!(nvidia_driver(facts), Some((major, true)) if major >= 515)
}

/// Whether NICs can register dma-bufs; `None` if that is not known.
fn registers_dmabuf(facts: &Facts) -> Option<bool> {
    let symbols = facts.symbols.as_ref()?;
    let of_driver = || symbols.iter().any(|name| name.ends_with(DRIVER_DMABUF));
    Some(symbols.contains(GET_DMABUF) && of_driver())
}

fn peer_module(facts: &Facts) -> Option<String> {
    let module = PEER_MODULES
        .iter()
        .find(|module| facts.modules.contains(**module));
    module
        .map(|module| (*module).to_owned())
        .or_else(|| facts.memory_peers.first().cloned())
}

fn by_dmabuf(facts: &Facts) -> bool {
    exports_dmabuf(facts) && registers_dmabuf(facts) == Some(true)
}

fn d01_driver(facts: &Facts) -> Findings {
    need_nvidia(facts)?;
    let finding = match nvidia_driver(facts) {
        None => Finding::warn(
            "NVIDIA GPUs without NVIDIA's driver",
            "wait for the GPU operator's driver pod, or install the driver",
        ),
        Some((major, true)) if major >= 515 => Finding::pass("the open driver exports dma-bufs"),
        Some((_, true)) => Finding::warn(
            "too old to export dma-bufs: that came with 515",
            "update the driver, or use nvidia_peermem",
        ),
        Some((_, false)) => Finding::warn(
            "the closed driver does not export dma-bufs: all depends on nvidia_peermem",
            "use the open kernel modules (the GPU operator's driver.kernelModuleType=open)",
        ),
    };
    let version = facts
        .nvidia_version
        .as_deref()
        .and_then(|text| text.lines().next());
    let read = "/proc/driver/nvidia/version";
    Ok(vec![finding.read(read, version.unwrap_or("missing"))])
}

fn d02_peermem(facts: &Facts) -> Findings {
    need_nvidia(facts)?;
    Ok(vec![match peer_module(facts) {
        Some(module) => {
            Finding::pass("GPU memory can be registered through it").read("loaded", module)
        }
        None if by_dmabuf(facts) => Finding::pass("none is loaded, dma-buf serves instead"),
        None => {
            let symbols = facts.symbols.as_ref();
            let can_load = symbols.is_none_or(|symbols| symbols.contains(PEER_INTERFACE));
            let remedy = match can_load {
                true => {
                    "modprobe nvidia_peermem (the GPU operator's driver.rdma.enabled), or see D01 and D03"
                }
                false => {
                    "use dma-buf (D01, D03), or a driver stack with a peer memory interface (DOCA-OFED, \
                     Ubuntu's kernel): without it nvidia_peermem does not load"
                }
            };
            let why = "GPUDirect RDMA is off: neither a peer memory module nor dma-buf";
            let read = "neither nvidia_peermem nor nv_peer_mem";
            Finding::warn(why, remedy).read("/sys/module", read)
        }
    }])
}

fn d03_dmabuf(facts: &Facts) -> Findings {
    need_gpu_and_nic(facts)?;
    let remedy = "a kernel of 5.12 or later and a NIC driver with dma-buf (mlx5, irdma, bnxt_re, efa), \
        or nvidia_peermem";
    let finding = match registers_dmabuf(facts) {
        None => Finding::unknown("the kernel's names cannot be read"),
        Some(true) => Finding::pass("kernel and NIC driver have it"),
        Some(false) if peer_module(facts).is_some() => {
            Finding::pass("they cannot, a peer memory module serves instead")
        }
        Some(false) => Finding::warn(
            "no dma-buf support and no peer-memory module loaded",
            remedy,
        ),
    };
    let symbols = facts.symbols.iter().flatten();
    let symbols: Vec<&str> = symbols.map(String::as_str).collect();
    Ok(vec![finding.read("/proc/kallsyms", words(&symbols, " "))])
}

fn d07_isolation(facts: &Facts) -> Findings {
    need_nvidia(facts)?;
    Ok(vec![match facts.all_nodes_to_gpu_pods {
        None => Finding::unknown("NVIDIA's device plugin is not in sight (hostPID shows it)"),
        Some(false) => Finding::pass("NVIDIA's device plugin hands out GPUs only"),
        Some(true) => Finding::warn(
            "NVIDIA's device plugin hands all verbs nodes to every GPU pod: NICs of other pods too",
            "set MOFED_ENABLED=false there (the GPU operator's devicePlugin.env)",
        )
        .read("environment of nvidia-device-plugin", "MOFED_ENABLED=true"),
    }])
}

#[cfg(test)]
mod tests;
