//! What lets a NIC reach GPU memory (D).

use std::collections::BTreeSet;
use std::os::fd::AsRawFd;
use std::path::Path;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket, sockopt,
};

use super::context::Context;
use super::engine::{Check, Fact, Judged, Unread, check};
use super::function::gpus_and_nics;
use super::{modules, read};
use crate::verdict::Verdict::Warn;
use crate::verdict::{Finding, words};

pub(super) fn checks() -> Vec<Check> {
    vec![
        check(
            "D01",
            "node",
            Warn,
            "NICs reach GPU memory (GPUDirect RDMA)",
        )
        .reads(
            "/proc/driver/nvidia/version, /proc/kallsyms, /sys/module, \
                 /sys/kernel/mm/memory_peers",
        )
        .remedy(
            "the open NVIDIA driver 515 or later (the GPU operator's \
                 driver.kernelModuleType=open), or modprobe nvidia_peermem (driver.rdma.enabled)",
        )
        .each(gpu_node, d01_path),
        check(
            "D07",
            "node",
            Warn,
            "GPU pods get only the verbs nodes that they requested",
        )
        .reads("environment of NVIDIA's device plugin")
        .remedy("set MOFED_ENABLED=false there (the GPU operator's devicePlugin.env)")
        .each(gpu_node, d07_isolation),
    ]
}

/// The node, if it has GPUs and NICs.
fn gpu_node(context: &Context) -> Result<Vec<&()>, Finding> {
    gpus_and_nics(context).map(|_| vec![&()])
}

const NVIDIA: u16 = 0x10de;
const GET_DMABUF: &str = "ib_umem_dmabuf_get";
const DRIVER_DMABUF: &str = "_reg_user_mr_dmabuf";
const PEER_INTERFACE: &str = "ib_register_peer_memory_client";
/// Of `/proc/kallsyms`, which has a line for each of some 200,000 names.
const MOST_SYMBOL_BYTES: u64 = 64 << 20;
const PEER_MODULES: [&str; 2] = ["nvidia_peermem", "nv_peer_mem"];

/// Names of interest among the kernel's; addresses may be hidden, names are not.
fn symbols(context: &Context) -> Fact<BTreeSet<String>> {
    let path = context.host.proc.join("kallsyms");
    let text = read::present(context, &path, read::up_to(&path, MOST_SYMBOL_BYTES))?;
    let text = text.ok_or_else(|| Unread("the kernel has no /proc/kallsyms".into()))?;
    let is_wanted =
        |name: &str| name == GET_DMABUF || name == PEER_INTERFACE || name.ends_with(DRIVER_DMABUF);
    let text = String::from_utf8_lossy(&text);
    let names = text.lines().filter_map(|line| {
        let name = line.split_whitespace().nth(2)?;
        is_wanted(name).then(|| name.to_owned())
    });
    Ok(names.collect())
}

/// A module through which GPU memory can be registered, if one is loaded.
fn peer_module(context: &Context) -> Fact<Option<String>> {
    let modules = modules::modules(context)?;
    let module = PEER_MODULES
        .iter()
        .find(|module| modules.contains(**module));
    let clients = read::names(context, &context.host.sys.join("kernel/mm/memory_peers"))?;
    let client = clients.unwrap_or_default().into_iter().next();
    Ok(module.map(|module| (*module).to_owned()).or(client))
}

/// Why the NVIDIA driver does not export dma-bufs; `None` if it does.
fn no_export(context: &Context) -> Fact<Option<&'static str>> {
    let mut gpus = context.machine()?.gpus.iter();
    if !gpus.any(|gpu| gpu.vendor == NVIDIA) {
        // Drivers of others export them.
        return Ok(None);
    }
    let path = context.host.proc.join("driver/nvidia/version");
    let Some(version) = read::text(context, &path)? else {
        return Ok(Some("NVIDIA GPUs without NVIDIA's driver"));
    };
    let line = version.lines().next().unwrap_or_default();
    let mut numbers = line
        .split_whitespace()
        .filter_map(|word| word.split_once('.'));
    let major: Option<u32> = numbers.find_map(|(major, _)| major.parse().ok());
    let major = major.ok_or_else(|| Unread(format!("{} has no version", path.display())))?;
    Ok(match line.contains("Open Kernel Module") {
        true if major >= 515 => None,
        true => Some("the GPU driver is too old to export dma-bufs (before 515)"),
        false => Some("the closed GPU driver does not export dma-bufs"),
    })
}

fn d01_path(context: &Context, check: &Check, node: &()) -> Judged {
    if let Some(module) = peer_module(context)? {
        return Ok(Finding::pass(format!("through {module}")).read("loaded", module));
    }
    if let Some(why) = no_export(context)? {
        let why = format!("GPUDirect RDMA is off: {why}, and no peer-memory module is loaded");
        return Ok(check.fault(node, &why));
    }
    let symbols = symbols(context)?;
    let registers =
        symbols.contains(GET_DMABUF) && symbols.iter().any(|name| name.ends_with(DRIVER_DMABUF));
    let finding = match registers {
        true => Finding::pass("through dma-buf"),
        false => Finding::warn(
            "GPUDirect RDMA is off: no dma-buf support in kernel and NIC driver, and no peer-memory \
             module loaded",
            match symbols.contains(PEER_INTERFACE) {
                true => "modprobe nvidia_peermem (the GPU operator's driver.rdma.enabled)",
                false => {
                    "a NIC driver with dma-buf (mlx5, irdma, bnxt_re, efa), or one with a peer memory \
                     interface (DOCA-OFED, Ubuntu's kernel): without it nvidia_peermem does not load"
                }
            },
        ),
    };
    let symbols: Vec<&str> = symbols.iter().map(String::as_str).collect();
    Ok(finding.read("/proc/kallsyms", words(&symbols, " ")))
}

/// The plugin is the process that listens on its socket in the kubelet's directory: a name proves
/// nothing, and only root can make a socket there.
fn d07_isolation(context: &Context, check: &Check, node: &()) -> Judged {
    let directory = &context.settings.device_plugin_dir;
    let names = read::names(context, directory)?.unwrap_or_default();
    let is_plugins = |name: &&String| name.starts_with("nvidia-") && name.ends_with(".sock");
    let Some(name) = names.iter().find(is_plugins) else {
        let why = format!(
            "NVIDIA's device plugin has no socket in {}",
            directory.display()
        );
        return Err(Finding::not_applicable(why));
    };
    let listener = listener(&directory.join(name))?;
    let path = context.host.proc.join(listener.to_string()).join("environ");
    let environment = read::present(context, &path, read::bytes(&path))?;
    let Some(environment) = environment else {
        return Err(Finding::unknown(format!(
            "{} does not exist",
            path.display()
        )));
    };
    let mut variables = environment.split(|byte| *byte == 0);
    let hands_out_all =
        variables.any(|variable| matches!(variable, b"MOFED_ENABLED=true" | b"MOFED_ENABLED=1"));
    Ok(match hands_out_all {
        false => Finding::pass("MOFED_ENABLED is not set"),
        true => check.fault(
            node,
            "NVIDIA's device plugin hands all verbs nodes to every GPU pod, those of other pods' NICs \
             as well (MOFED_ENABLED=true)",
        ),
    })
}

/// The process that listens on a socket (`SO_PEERCRED`, unix(7)).
fn listener(path: &Path) -> Fact<i32> {
    let ask = || -> Result<i32, Errno> {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
        Ok(getsockopt(&socket, sockopt::PeerCredentials)?.pid())
    };
    match ask() {
        Ok(0) => Err(Unread(format!(
            "{} is served from another PID namespace: run rdmactl on the node",
            path.display()
        ))),
        Ok(pid) => Ok(pid),
        Err(error) => Err(Unread(format!(
            "connect to {}: {}",
            path.display(),
            error.desc()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_socket_leads_to_the_process_that_listens() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nvidia-gpu.sock");
        assert!(listener(&path).is_err());
        let _listener = UnixListener::bind(&path).unwrap();
        assert_eq!(listener(&path).unwrap().unsigned_abs(), std::process::id());
    }
}
