use super::super::tests::{Case, prove};
use super::*;
use crate::verdict::Verdict::{NotApplicable, Pass, Unknown, Warn};

const OPEN: &str = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\n\
    GCC version: gcc 13";
const CLOSED: &str = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12";

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// A node with eight B200, the open driver, and mlx5 with dma-buf.
fn good() -> Facts {
    Facts {
        nvidia_gpus: 8,
        nics: 8,
        nvidia_version: Some(OPEN.to_owned()),
        modules: set(&["nvidia", "nvidia_uvm", "ib_core"]),
        symbols: Some(set(&[GET_DMABUF, "mlx5_ib_reg_user_mr_dmabuf"])),
        all_nodes_to_gpu_pods: Some(false),
        ..Facts::default()
    }
}

/// The same with the closed driver on a kernel with `nvidia_peermem`.
fn peermem() -> Facts {
    Facts {
        nvidia_version: Some(CLOSED.to_owned()),
        modules: set(&["nvidia", "nvidia_uvm", "ib_core", "nvidia_peermem"]),
        symbols: Some(set(&[PEER_INTERFACE])),
        ..good()
    }
}

/// Neither way.
fn neither() -> Facts {
    Facts {
        nvidia_version: Some(CLOSED.to_owned()),
        symbols: Some(BTreeSet::new()),
        ..good()
    }
}

fn d01() -> Vec<Case<Facts>> {
    let amd = || Facts {
        nvidia_gpus: 0,
        other_gpus: 8,
        nvidia_version: None,
        ..good()
    };
    let old = |text: &str| Facts {
        nvidia_version: Some(text.to_owned()),
        ..good()
    };
    vec![
        ("D01", good(), Pass, ""),
        ("D01", peermem(), Warn, "closed driver"),
        (
            "D01",
            Facts {
                nvidia_version: None,
                ..good()
            },
            Warn,
            "without NVIDIA's driver",
        ),
        (
            "D01",
            old("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  510.47"),
            Warn,
            "515",
        ),
        ("D01", amd(), NotApplicable, "exports dma-bufs itself"),
        ("D01", Facts::default(), NotApplicable, "no GPU"),
    ]
}

fn d02() -> Vec<Case<Facts>> {
    vec![
        ("D02", good(), Pass, "dma-buf serves"),
        ("D02", peermem(), Pass, "can be registered"),
        ("D02", neither(), Warn, "GPUDirect RDMA is off"),
        (
            "D02",
            Facts {
                memory_peers: vec!["nv_mem".to_owned()],
                ..neither()
            },
            Pass,
            "",
        ),
    ]
}

fn d03() -> Vec<Case<Facts>> {
    let amd = || Facts {
        nvidia_gpus: 0,
        other_gpus: 8,
        nvidia_version: None,
        ..good()
    };
    vec![
        ("D03", good(), Pass, ""),
        ("D03", amd(), Pass, ""),
        ("D03", peermem(), Pass, "a peer memory module serves"),
        ("D03", neither(), Warn, "no dma-buf support"),
        (
            "D03",
            Facts {
                symbols: None,
                ..good()
            },
            Unknown,
            "",
        ),
    ]
}

fn d07() -> Vec<Case<Facts>> {
    vec![
        ("D07", good(), Pass, ""),
        (
            "D07",
            Facts {
                all_nodes_to_gpu_pods: Some(true),
                ..good()
            },
            Warn,
            "NICs of other pods",
        ),
        (
            "D07",
            Facts {
                all_nodes_to_gpu_pods: None,
                ..good()
            },
            Unknown,
            "hostPID",
        ),
    ]
}

#[test]
fn each_check_says_what_is_wrong() {
    let cases = [d01(), d02(), d03(), d07()];
    prove(CHECKS, &cases.concat());
}

#[test]
fn names_are_found_whether_or_not_addresses_are_shown() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kallsyms");
    let text = "0000000000000000 T ib_umem_dmabuf_get\t[ib_uverbs]\n\
        ffffffffc0a01000 t mlx5_ib_reg_user_mr_dmabuf\t[mlx5_ib]\n\
        0000000000000000 T printk\n\nbad\n";
    std::fs::write(&path, text).unwrap();
    assert_eq!(
        symbols(&path),
        Some(set(&[GET_DMABUF, "mlx5_ib_reg_user_mr_dmabuf"]))
    );
    assert_eq!(symbols(Path::new("/nonexistent")), None);
}

#[test]
fn one_variable_of_the_environment_is_asked_for() {
    assert!(hands_out_all_nodes(b"A=b\0MOFED_ENABLED=true\0"));
    assert!(!hands_out_all_nodes(
        b"A=MOFED_ENABLED=true\0MOFED_ENABLED=false\0"
    ));
    assert!(!hands_out_all_nodes(b""));
}

#[test]
fn a_core_without_the_peer_interface_is_named_in_the_remedy() {
    let remedy = |facts: &Facts| d02_peermem(facts).unwrap().remove(0).remedy.unwrap();
    assert!(remedy(&neither()).contains("does not load"));
    let with_interface = Facts {
        symbols: Some(set(&[PEER_INTERFACE])),
        ..neither()
    };
    assert!(remedy(&with_interface).starts_with("modprobe nvidia_peermem"));
}
