//! All of preflight on hosts made of files: what is read, and how it is judged.

mod node_tree;

use std::fs;

use hca::pci::Sriov;
use hca::topology::Nic;
use hca::{LinkLayer, PortState};
use hca_trees::{NetdevSpec, On, PciSpec, RdmaSpec, Tree, cloud, machine};
use pools::host_snapshot::HostSnapshot;

use super::*;
use crate::verdict::{Finding, Verdict};
use Verdict::{Fail, NotApplicable, Pass, Unknown, Warn};
use node_tree::{KUBELET, Node, plugin_environment};

/// The context of a host without anything.
pub(super) fn empty_context(root: &Path) -> Context {
    let tree = Tree::new(root);
    let snapshot = HostSnapshot::scan(&tree.host(), &[], &[], hca::topology::gpu::read).unwrap();
    let settings = Settings {
        root: root.to_owned(),
        device_plugin_dir: root.join("var/lib/kubelet/device-plugins"),
        policy: root.join("policy.json"),
        in_pod: false,
        expected: None,
    };
    Context::new(settings, snapshot, false, None)
}

#[test]
fn a_fit_node_passes_what_a_tree_of_files_can_show() {
    let node = Node::fit();
    let verdicts = node.verdicts();
    let of = |wanted: Verdict| {
        let ids = verdicts
            .iter()
            .filter(|(_, verdict)| **verdict == wanted)
            .map(|(id, _)| *id);
        ids.collect::<Vec<_>>().join(" ")
    };
    assert_eq!(of(Fail), "");
    assert_eq!(of(Warn), "");
    // Only the running kernel shows flow control, and only a running runtime says what it reads.
    assert_eq!(of(Unknown), "Q02 R06");
    assert_eq!(of(NotApplicable), "H02 H03 L13 L14 P12 R02");
}

/// The check's worst finding is of this verdict, and says these words in its reason.
fn expect(id: &str, findings: &[Finding], (verdict, words): (Verdict, &str)) {
    let worst = findings.iter().max_by_key(|finding| finding.verdict);
    let worst = worst.unwrap_or_else(|| panic!("{id} found nothing"));
    assert_eq!(worst.verdict, verdict, "{id}: {findings:?}");
    assert!(
        worst.why.contains(words),
        "{id}: {findings:?} does not say {words:?}"
    );
    let helpless = findings
        .iter()
        .find(|f| f.verdict >= Warn && f.remedy.is_none());
    assert!(
        helpless.is_none(),
        "{id} does not say what to do: {helpless:?}"
    );
}

/// Changes one thing on a node, whose check then has this verdict, for these words.
type Change = (&'static str, fn(&Node), Verdict, &'static str);

/// On a node where all else is as it should be.
fn each_is_found(changes: &[Change]) {
    let node = Node::fit();
    for (id, change, verdict, words) in changes {
        change(&node);
        expect(
            id,
            &node.findings(id, node.settings(), None),
            (*verdict, words),
        );
        node.restore();
    }
    assert_eq!(node.complaints(), Vec::<&str>::new(), "all is as before");
}

/// The same of what was read of a node.
type Fact = (&'static str, fn(&mut Context), Verdict, &'static str);

fn each_is_judged(facts: &[Fact]) {
    let node = Node::fit();
    for (id, change, verdict, words) in facts {
        let mut context = node.context(node.settings(), None);
        change(&mut context);
        let only = [(*id).to_owned()];
        let outcomes = run(&context, &only, &[]);
        expect(id, &outcomes[0].findings, (*verdict, words));
    }
}

#[test]
fn what_is_wrong_with_modules_is_found() {
    each_is_found(&[
        (
            "M01",
            |n| n.take("/sys/class/infiniband_verbs"),
            Fail,
            "ib_uverbs not in the kernel",
        ),
        (
            "M01",
            |n| n.take("/sys/class/misc/rdma_cm"),
            Warn,
            "rdma_ucm",
        ),
        ("M02", |n| n.take("/sys/module"), Unknown, "/sys/module"),
        (
            "M02",
            |n| n.take("/sys/bus/pci/devices/0000:91:00.0/driver"),
            Fail,
            "no driver",
        ),
    ]);
}

const PORT: &str = "/sys/class/infiniband/mlx5_1/ports/1";

#[test]
fn what_is_wrong_with_links_is_found() {
    each_is_found(&[
        (
            "L01",
            |n| n.put("/sys/class/net/gpu1rdma0/flags", "0x1002"),
            Warn,
            "switched off",
        ),
        (
            "L01",
            |n| n.put(&format!("{PORT}/state"), "1: DOWN"),
            Warn,
            "the port is DOWN",
        ),
        (
            "L01",
            |n| n.put(&format!("{PORT}/phys_state"), "2: Polling"),
            Warn,
            "Polling",
        ),
        (
            "L01",
            |n| n.take(&format!("{PORT}/phys_state")),
            Unknown,
            "phys_state",
        ),
        (
            "L05",
            |n| n.put("/sys/class/net/gpu1rdma0/speed", 100_000),
            Warn,
            "different speeds",
        ),
        (
            "L06",
            |n| n.put("/sys/class/net/gpu1rdma0/mtu", 4300),
            Warn,
            "others of its kind",
        ),
        (
            "L07",
            |n| n.put("/sys/class/net/gpu1rdma0/mtu", 1500),
            Warn,
            "only 1024 bytes",
        ),
        (
            "G01",
            |n| n.put(&format!("{PORT}/gid_attrs/types/3"), "IB/RoCE v1"),
            Fail,
            "no RoCE v2",
        ),
    ]);
}

fn infiniband(context: &mut Context) -> &mut link::PortFacts {
    let port = &mut context.ports[1];
    port.port.link_layer = LinkLayer::InfiniBand;
    (port.port.lid, port.port.sm_lid) = (7, 1);
    port
}

fn pkeys(context: &mut Context, keys: &[u16]) {
    let keys = keys.iter().zip(0..);
    let keys = keys.map(|(&key, index)| hca::port::Pkey { index, key });
    infiniband(context).port.pkeys = keys.collect();
}

#[test]
fn ports_are_judged_by_what_was_read() {
    each_is_judged(&[
        ("L01", |c| infiniband(c).physical_mtu = None, Pass, ""),
        (
            "L01",
            |c| infiniband(c).port.sm_lid = 0,
            Warn,
            "no subnet manager",
        ),
        (
            "L01",
            |c| infiniband(c).port.state = PortState::Init,
            Warn,
            "subnet manager has not",
        ),
        ("L01", |c| c.ports.clear(), NotApplicable, "no RDMA NIC"),
        ("L05", |c| c.ports[1].port.rate = None, Unknown, "rate"),
        (
            "L05",
            |c| {
                c.ports[1].port.rate = "200 Gb/sec".parse().ok();
                c.ports[1].netdev = None;
            },
            Warn,
            "others of its kind run at 400",
        ),
        (
            "L05",
            |c| {
                let port = infiniband(c);
                port.port.rate = "2.5 Gb/sec (1X SDR)".parse().ok();
                (port.device.board_id, port.netdev) = (None, None);
            },
            Warn,
            "quarter of its width",
        ),
        (
            "L06",
            |c| c.ports[1].physical_mtu = Some(1500),
            Warn,
            "larger than the 1500",
        ),
        ("L07", |c| c.ports[1].port.active_mtu = None, Unknown, "MTU"),
        ("L13", |c| pkeys(c, &[0x7fff, 0x8001]), Pass, "full"),
        ("L13", |c| pkeys(c, &[0x7fff, 0x0001]), Warn, "limited"),
        ("L13", |c| pkeys(c, &[]), Warn, "not a member"),
        (
            "L14",
            |c| {
                let (physical, index) = ("0000:3b:00.0".parse().unwrap(), Some(3));
                let device = &mut c.ports[1].device;
                device.node_guid = None;
                device.pci.as_mut().unwrap().sriov = Sriov::Virtual { physical, index };
            },
            Fail,
            "node GUID is zero",
        ),
        (
            "G01",
            |c| {
                let second = ("gpu1rdma0".to_owned(), "10.0.0.1".parse().unwrap());
                c.addresses.as_mut().unwrap().push(second);
            },
            Fail,
            "10.0.0.1 has none",
        ),
        (
            "G01",
            |c| c.addresses = Err(engine::Unread("another namespace".into())),
            Unknown,
            "another namespace",
        ),
        ("G06", |c| c.ports[1].port.gids.size = 0, Unknown, "size"),
    ]);
}

#[test]
fn ports_of_other_pools_may_have_another_mtu() {
    let node = Node::fit();
    let verdicts = |storage: &str| {
        let mut context = node.context(node.settings(), None);
        for (number, port) in (0..).zip(&mut context.ports) {
            let is_storage = number >= 5;
            let resource = if is_storage { storage } else { "rdma/rails" };
            port.pools = vec![member(resource, false)];
            port.netdev.as_mut().unwrap().mtu = if is_storage { 1500 } else { 9000 };
        }
        let outcomes = run(&context, &["L06".to_owned()], &[]);
        let findings = outcomes[0].findings.iter();
        findings.filter(|finding| finding.verdict == Warn).count()
    };
    assert_eq!((verdicts("rdma/rails"), verdicts("rdma/storage")), (3, 0));
}

/// The first NIC with an RDMA device.
fn nic(context: &mut Context) -> &mut Nic {
    let mut nics = context.snapshot.machine.nics.iter_mut();
    nics.find(|nic| !nic.hca.rdma_devices.is_empty()).unwrap()
}

/// Speed and width of the first NIC's PCIe link: `current` or `max`.
fn set_link(context: &mut Context, which: &str, speed: &str, width: &str) {
    let address = nic(context).place.address;
    let directory = context.pci(address);
    for (what, value) in [("speed", speed), ("width", width)] {
        fs::write(directory.join(format!("{which}_link_{what}")), value).unwrap();
    }
}

/// A NIC with a Data Direct function; its IOMMU group and that of all GPUs.
fn data_direct(context: &mut Context, groups: [&str; 2]) {
    let place = nic(context).place.clone();
    let gpus = context.snapshot.machine.gpus.iter();
    let gpus = gpus.map(|gpu| (gpu.place.address, groups[1]));
    for (address, group) in gpus.chain([(place.address, groups[0])]) {
        let link = context.pci(address).join("iommu_group");
        let _ = fs::remove_file(&link).or_else(|_| fs::remove_dir_all(&link));
        if !group.is_empty() {
            std::os::unix::fs::symlink(format!("/sys/kernel/iommu_groups/{group}"), link).unwrap();
        }
    }
    nic(context).place.data_direct = Some(Box::new(place));
}

#[test]
fn what_is_wrong_with_pcie_is_found() {
    each_is_found(&[
        (
            "P01",
            |n| n.put("/sys/bus/pci/devices/0000:91:00.0/current_link_width", 8),
            Warn,
            "Gen5 x16 would be possible",
        ),
        (
            "P03",
            |n| n.config("0000:8e:02.0", 0x2810, Some(0x001d)),
            Warn,
            "through the CPU",
        ),
        ("P03", |n| n.config("0000:8e:02.0", 0x2810, None), Pass, ""),
        (
            "P03",
            |n| n.short_config("0000:8e:02.0"),
            Unknown,
            "needs CAP_SYS_ADMIN",
        ),
        ("P03", |n| n.take("/proc/cpuinfo"), Unknown, "cpuinfo"),
        (
            "P03",
            |n| n.put("/proc/cpuinfo", "flags : hypervisor"),
            NotApplicable,
            "hypervisor",
        ),
        (
            "P05",
            |n| {
                n.put(
                    "/sys/bus/pci/devices/0000:91:00.0/iommu_group/type",
                    "DMA-FQ",
                )
            },
            Warn,
            "translated",
        ),
        (
            "P05",
            |n| n.take("/sys/bus/pci/devices/0000:91:00.0/iommu_group"),
            Pass,
            "",
        ),
        (
            "P06",
            |n| n.config("0000:91:00.0", 0x2936, None),
            Warn,
            "512 bytes",
        ),
        (
            "P06",
            |n| n.config("0000:91:00.0", 0x5926, None),
            Warn,
            "strict order",
        ),
        (
            "P06",
            |n| n.short_config("0000:91:00.0"),
            Unknown,
            "needs CAP_SYS_ADMIN",
        ),
    ]);
    each_is_judged(&[
        (
            "P01",
            |c| set_link(c, "current", "16.0 GT/s PCIe", "8"),
            Fail,
            "the link carries 126 Gb/s, the ports 400",
        ),
        (
            "P01",
            |c| {
                for which in ["current", "max"] {
                    set_link(c, which, "16.0 GT/s PCIe", "16");
                }
            },
            Warn,
            "the link carries 252 Gb/s",
        ),
        (
            "P01",
            |c| set_link(c, "current", "Unknown", "0"),
            Unknown,
            "does not show the link",
        ),
        (
            "P05",
            |c| c.snapshot.machine.gpus.clear(),
            NotApplicable,
            "no GPU",
        ),
        (
            "P12",
            |c| data_direct(c, ["8", "7"]),
            Warn,
            "is in another IOMMU group",
        ),
        ("P12", |c| data_direct(c, ["7", "7"]), Pass, "IOMMU group 7"),
        (
            "P12",
            |c| data_direct(c, ["", ""]),
            Unknown,
            "no IOMMU groups",
        ),
        (
            "P12",
            |c| {
                data_direct(c, ["7", "7"]);
                c.snapshot.machine.gpus.clear();
            },
            Warn,
            "no GPU shares its switch",
        ),
    ]);
}

#[test]
fn a_coherent_gpu_needs_no_pass_through() {
    let node = Node::fit();
    node.put(
        "/sys/bus/pci/devices/0000:91:00.0/iommu_group/type",
        "DMA-FQ",
    );
    let mut context = node.context(node.settings(), None);
    for gpu in &mut context.snapshot.machine.gpus {
        gpu.c2c = true;
    }
    let outcomes = run(&context, &["P05".to_owned()], &[]);
    expect("P05", &outcomes[0].findings, (Pass, ""));
}

const CLOSED: &str = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12";
const OLD: &str = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  510.47";
const VERSION: &str = "/proc/driver/nvidia/version";

#[test]
fn what_is_wrong_with_gpudirect_is_found() {
    each_is_found(&[
        ("D01", |n| n.take(VERSION), Warn, "without NVIDIA's driver"),
        ("D01", |n| n.put(VERSION, CLOSED), Warn, "closed GPU driver"),
        ("D01", |n| n.put(VERSION, OLD), Warn, "before 515"),
        (
            "D01",
            |n| n.put("/proc/kallsyms", "0 T printk"),
            Warn,
            "no dma-buf support",
        ),
        (
            "D01",
            |n| {
                n.put(VERSION, CLOSED);
                n.take("/sys/module/nvidia_peermem");
                n.put("/sys/module/nvidia_peermem/refcnt", 0);
            },
            Pass,
            "through nvidia_peermem",
        ),
        ("D01", |n| n.take("/proc"), Unknown, "is not mounted here"),
        (
            "D07",
            |n| n.put(&plugin_environment(), "MOFED_ENABLED=true\0"),
            Warn,
            "all verbs nodes",
        ),
        ("D07", |n| n.take(&plugin_environment()), Unknown, "environ"),
        (
            "D07",
            |n| n.take("/var/lib/kubelet/device-plugins"),
            Unknown,
            "is not mounted here",
        ),
    ]);
}

const LIMIT: &str = "Max locked memory         8388608 8388608 bytes";

#[test]
fn what_is_wrong_with_runtime_is_found() {
    each_is_found(&[
        (
            "R01",
            |n| n.put("/proc/700/limits", LIMIT),
            Warn,
            "8192 KiB",
        ),
        (
            "R01",
            |n| n.take("/proc/700/comm"),
            Unknown,
            "no containerd",
        ),
        (
            "R01",
            |n| n.take("/proc/1/ns"),
            Unknown,
            "shows no process 1",
        ),
        (
            "R04",
            |n| n.take("/dev/infiniband/uverbs3"),
            Fail,
            "neither devtmpfs nor udev",
        ),
        ("R04", |n| n.take("/dev"), Unknown, "is not mounted here"),
        ("R06", |_| (), Unknown, "run/containerd/containerd.sock"),
    ]);
}

#[test]
fn a_container_has_its_own_limits_and_capabilities() {
    let node = Node::fit();
    let settings = || Settings {
        in_pod: true,
        ..node.settings()
    };
    let checked = |id: &str| node.findings(id, settings(), None);
    node.put("/proc/self/limits", LIMIT);
    node.put("/proc/self/status", "Name:\tx\nCapEff:\t0000000000000000");
    expect("R01", &checked("R01"), (NotApplicable, "see R02"));
    expect("R02", &checked("R02"), (Warn, "without CAP_IPC_LOCK"));
    node.put("/proc/self/status", "Name:\tx\nCapEff:\t0000000000004000");
    expect("R02", &checked("R02"), (Pass, "with CAP_IPC_LOCK"));
    node.take("/proc/self/status");
    expect("R02", &checked("R02"), (Unknown, "status"));
    // Another NIC's node that is missing is not missed; a node of a NIC with its netdev here is.
    expect("R04", &checked("R04"), (Pass, ""));
    node.take("/dev/infiniband/uverbs3");
    expect(
        "R04",
        &checked("R04"),
        (Fail, "has the NIC but not its node"),
    );
    expect("H01", &checked("H01"), (NotApplicable, "--pod"));
}

#[test]
fn what_is_wrong_with_qos_is_found() {
    each_is_found(&[
        (
            "Q01",
            |n| n.put("/sys/class/net/gpu1rdma0/qos/trust", "pcp"),
            Warn,
            "share the class",
        ),
        (
            "Q01",
            |n| n.take("/sys/class/net/gpu1rdma0/qos/trust"),
            Unknown,
            "DCB",
        ),
        (
            "Q03",
            |n| n.put("/sys/class/net/gpu1rdma0/ecn/roce_np/enable/3", 0),
            Warn,
            "roce_np 0",
        ),
        (
            "Q03",
            |n| n.take("/sys/class/net/gpu1rdma0/ecn"),
            Unknown,
            "NVIDIA's driver stack",
        ),
        (
            "Q04",
            |n| {
                n.put(
                    "/sys/kernel/config/rdma_cm/mlx5_1/ports/1/default_roce_tos",
                    0,
                )
            },
            Warn,
            "not DSCP 26",
        ),
        ("Q04", |n| n.take("/sys/kernel/config"), Unknown, "configfs"),
    ]);
}

#[test]
fn what_is_wrong_with_kubernetes_is_found() {
    const CHECKPOINT: &str = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint";
    const TWICE: &str =
        r#"{"Data":{"RegisteredDevices":{"a/x":["0000:91:00.0"],"a/y":["0000:91:00.0"]}}}"#;
    each_is_found(&[
        (
            "K03",
            |n| {
                n.put(
                    "/etc/kubelet.yaml",
                    "kind: KubeletConfiguration\ntopologyManagerPolicy: none",
                )
            },
            Warn,
            "different NUMA",
        ),
        (
            "K03",
            |n| {
                n.put(
                    "/etc/kubelet.yaml",
                    "kind: KubeletConfiguration\ntopologyManagerPolicy: restricted",
                )
            },
            Warn,
            "cpuManagerPolicy is not static",
        ),
        (
            "K03",
            |n| {
                n.put(
                    KUBELET,
                    "kubelet\0--config=/etc/kubelet.yaml\0--config-dir=/etc/kubelet.d",
                );
                n.put(
                    "/etc/kubelet.d/10-x.conf",
                    "kind: KubeletConfiguration\ntopologyManagerPolicy: none",
                );
            },
            Warn,
            "different NUMA",
        ),
        (
            "K07",
            |n| n.put(CHECKPOINT, TWICE),
            Fail,
            "two resources offer it",
        ),
        ("K07", |n| n.put(CHECKPOINT, "{"), Unknown, "cannot read"),
    ]);
}

#[test]
fn pools_without_cdi_ask_nothing_of_the_runtime() {
    let node = Node::fit();
    let with = |cdi| {
        let pools = ConfiguredPools {
            cdi,
            ..ConfiguredPools::default()
        };
        node.findings("R06", node.settings(), Some(pools))
    };
    expect(
        "R06",
        &with(false),
        (NotApplicable, "no pool delivers by CDI"),
    );
    expect(
        "R06",
        &with(true),
        (Unknown, "no container runtime listens"),
    );
}

/// A file that was not read says nothing about what the kubelet does.
#[test]
fn an_unreadable_configuration_of_the_kubelet_is_unknown() {
    each_is_found(&[
        (
            "K03",
            |n| n.take("/etc/kubelet.yaml"),
            Unknown,
            "is not mounted here",
        ),
        (
            "K03",
            |n| n.put("/etc/kubelet.yaml", "a: ["),
            Unknown,
            "kubelet.yaml",
        ),
        (
            "K03",
            |n| n.put("/etc/kubelet.yaml", "root:*:19000:0:99999:7:::"),
            Unknown,
            "is not a KubeletConfiguration",
        ),
        (
            "K03",
            |n| n.put("/proc/900/cmdline", "kubelet\0--config=/etc"),
            Unknown,
            "it is not a regular file",
        ),
        ("K03", |n| n.take("/proc/900/comm"), Unknown, "no kubelet"),
    ]);
}

/// Without the PCI tree no check says that there is no GPU, no NIC or one NUMA node.
#[test]
fn a_gpu_that_cannot_be_read_makes_checks_of_the_pci_tree_unknown() {
    let ids = [
        "P01", "P03", "P05", "P06", "P07", "D01", "D07", "K03", "K07",
    ];
    let node = Node::fit();
    node.take("/sys/bus/pci/devices/0000:8f:00.0/class");
    // A directory in its place.
    node.put("/sys/bus/pci/devices/0000:8f:00.0/class/x", "");
    for id in ids {
        let findings = node.findings(id, node.settings(), None);
        expect(id, &findings, (Unknown, "PCI tree: "));
    }
}

/// Any pod can have a process with the name of a host program.
#[test]
fn a_process_of_a_pod_is_not_the_kubelet() {
    each_is_found(&[
        (
            "K03",
            |n| n.link("/proc/900/ns/pid", "pid:[4026532999]"),
            Unknown,
            "no kubelet",
        ),
        (
            "K03",
            |n| n.link("/proc/900/ns/mnt", "mnt:[4026532999]"),
            Unknown,
            "no kubelet",
        ),
        (
            "K03",
            |n| n.put("/proc/900/status", "Uid:\t1000\t1000\t1000\t1000"),
            Unknown,
            "no kubelet",
        ),
        (
            "R01",
            |n| n.link("/proc/700/ns/pid", "pid:[4026532999]"),
            Unknown,
            "no containerd",
        ),
        (
            "K03",
            |n| {
                n.process(77, "/usr/local/bin/kubelet");
                n.put("/proc/77/cmdline", "kubelet\0--config=/fifo");
                n.link("/proc/77/ns/pid", "pid:[4026532999]");
            },
            Pass,
            "",
        ),
    ]);
}

#[test]
fn a_fifo_in_place_of_a_configuration_is_not_opened() {
    let node = Node::fit();
    node.take("/etc/kubelet.yaml");
    let fifo = node.tree.path("/etc/kubelet.yaml");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let found = node.findings("K03", node.settings(), None);
    expect("K03", &found, (Unknown, "it is not a regular file"));
}

#[test]
fn a_refused_read_names_the_right() {
    let directory = tempfile::tempdir().unwrap();
    let context = empty_context(directory.path());
    let refused = |path: &str| {
        let error = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
        let path = directory.path().join(path);
        read::present::<()>(&context, &path, Err(error))
            .unwrap_err()
            .0
    };
    assert!(refused("proc/1/ns/pid").contains("needs CAP_SYS_PTRACE"));
    assert!(refused("etc/kubelet.yaml").contains("needs root"));
}

fn member(resource: &str, shared: bool) -> Membership {
    Membership {
        resource: resource.to_owned(),
        shared,
        units: 1000,
    }
}

#[test]
fn a_configuration_says_which_nics_have_to_be_in_order() {
    let node = Node::fit();
    node.tree
        .set_port_state("mlx5_7", 1, "1: DOWN", "2: Polling");
    let with_pool = |devices: &[&str]| {
        let of_device = devices
            .iter()
            .map(|device| ((*device).to_owned(), vec![member("rdma/rails", true)]));
        let pools = ConfiguredPools {
            of_device: of_device.collect(),
            ..ConfiguredPools::default()
        };
        node.verdicts_with(node.settings(), Some(pools))
    };
    let without = with_pool(&["mlx5_0"]);
    assert_eq!(without["L01"], Pass, "the port that is down is in no pool");
    assert_eq!(without["G06"], Warn, "1000 units do not fit");
    assert_eq!(with_pool(&["mlx5_0", "mlx5_7"])["L01"], Fail);
    assert_eq!(
        node.verdicts()["L01"],
        Warn,
        "no pool has it, and others work"
    );
}

#[test]
fn pools_are_judged_by_their_hcas() {
    let node = Node::fit();
    let hcas = |number: usize, faulty: usize| {
        let fault = |n: usize| (n < faulty).then_some("port 1 is down");
        let hca = |n: usize| PoolHca::new(&format!("mlx5_{n}"), fault(n));
        (0..number).map(hca).collect::<Vec<_>>()
    };
    let pools = |pools: &[(&str, usize, usize)]| ConfiguredPools {
        by_resource: (pools.iter().copied())
            .map(|(resource, number, faulty)| {
                let pool = HostPool {
                    hcas: hcas(number, faulty),
                    optional: resource == "rdma/vf",
                    expected: None,
                };
                (resource.to_owned(), pool)
            })
            .collect(),
        ..ConfiguredPools::default()
    };
    let h02 =
        |list: &[(&str, usize, usize)]| node.findings("H02", node.settings(), Some(pools(list)));
    expect(
        "H02",
        &node.findings("H02", node.settings(), None),
        (NotApplicable, "no configuration"),
    );
    expect("H02", &h02(&[("rdma/a", 8, 1)]), (Pass, "7 of 8"));
    expect("H02", &h02(&[("rdma/a", 1, 1)]), (Fail, "port 1 is down"));
    expect(
        "H02",
        &h02(&[("rdma/a", 8, 0), ("rdma/b", 0, 0)]),
        (Warn, "match no HCA"),
    );
    expect(
        "H02",
        &h02(&[("rdma/a", 0, 0)]),
        (Fail, "no selector of any pool"),
    );
    expect(
        "H02",
        &h02(&[("rdma/vf", 0, 0)]),
        (NotApplicable, "optional"),
    );
    let h03 = |expected, faulty| {
        let mut pools = pools(&[("rdma/a", 2, faulty)]);
        if let Some(pool) = pools.by_resource.get_mut("rdma/a") {
            pool.expected = expected;
        }
        node.findings("H03", node.settings(), Some(pools))
    };
    expect("H03", &h03(Some(2), 0), (Pass, "2 can be used"));
    expect(
        "H03",
        &h03(Some(2), 1),
        (Fail, "1 of 2 can be used, 2 are here: mlx5_0: port 1"),
    );
    expect("H03", &h03(None, 1), (NotApplicable, "nothing here"));
}

#[test]
fn a_node_that_lost_an_hca_is_not_fit() {
    let node = Node::fit();
    let expecting = |number: usize| {
        let mut settings = node.settings();
        settings.expected = Some(number);
        let verdicts = node.verdicts_with(settings, None);
        (verdicts["H01"], verdicts["H03"])
    };
    let all = node.context(node.settings(), None).snapshot;
    let all = all.inventory.rdma_devices().count();
    assert_eq!(expecting(all).1, Pass);
    node.tree
        .set_port_state("mlx5_7", 1, "1: DOWN", "2: Polling");
    assert_eq!(expecting(all).1, Fail);
    assert_eq!(expecting(all - 1).1, Pass);
    node.take("/sys/class/infiniband");
    assert_eq!(expecting(1), (Fail, Fail));
}

#[test]
fn functions_of_nvswitches_are_not_counted_as_hcas() {
    let node = Node::bare();
    cloud::hgx_b200(&node.tree);
    let usable = |number: usize| {
        let mut settings = node.settings();
        settings.expected = Some(number);
        node.verdicts_with(settings, None)["H03"]
    };
    // Eight NICs and the bond for storage.
    assert_eq!((usable(9), usable(10)), (Pass, Fail));
}

#[test]
fn a_node_without_any_of_it_fails_for_that_alone() {
    let node = Node::bare();
    let tree = &node.tree;
    let on = On::Pci("0000:00:03.0");
    let spec = PciSpec {
        address: "0000:00:03.0",
        above: "pci0000:00",
        vendor: 0x1af4,
        device: 0x1041,
        driver: "virtio-pci",
        total_vfs: 0,
        ..PciSpec::MLX5
    };
    tree.pci(&spec);
    tree.netdev(&NetdevSpec {
        name: "eth0",
        on,
        ..NetdevSpec::default()
    });
    assert_eq!(node.complaints(), ["H01"]);
}

#[test]
fn soft_roce_on_a_plain_nic_does_not_fail() {
    let node = Node::bare();
    let tree = &node.tree;
    tree.rdma_core(true);
    tree.file("/sys/module/rdma_rxe/refcnt", 1);
    tree.netdev(&NetdevSpec {
        name: "eth1",
        mtu: 1500,
        ..NetdevSpec::default()
    });
    let gids: &[(u32, &str, &str, &str)] = &[(
        0,
        "fe80:0000:0000:0000:5054:00ff:fe00:0001",
        "RoCE v2",
        "eth1",
    )];
    let ports = &[hca_trees::PortSpec {
        gids,
        ..hca_trees::PortSpec::ROCE
    }];
    tree.rdma(&RdmaSpec {
        name: "rxe0",
        soft_parent: "eth1",
        ports,
        ..RdmaSpec::default()
    });
    node.null_node("infiniband_verbs/uverbs0", "uverbs0");
    node.null_node("misc/rdma_cm", "rdma_cm");
    let failed: Vec<&str> = node
        .verdicts()
        .into_iter()
        .filter(|(_, v)| *v == Fail)
        .map(|(id, _)| id)
        .collect();
    assert_eq!(failed, Vec::<&str>::new());
}

#[test]
fn the_pools_of_a_configuration_name_their_devices_and_units() {
    let directory = tempfile::tempdir().unwrap();
    let tree = Tree::new(directory.path());
    machine::a4(&tree);
    let config = config::parse(
        r#"{"configList": [
            {"resourceName": "rails", "rdmaHcaMax": 1000,
             "selectors": {"ifNames": ["gpu0rdma0", "gpu7rdma0"]}},
            {"resourceName": "none", "rdmaHcaMax": 1, "selectors": {"ifNames": ["eth9"]}}]}"#,
    );
    let scanned = HostSnapshot::scan(&tree.host(), &[], &[], hca::topology::gpu::read).unwrap();
    let host = OnHost {
        hcas: scanned.inventory.hcas.clone(),
        unusable: Vec::new(),
        scanned,
    };
    let pools = pools(&config.unwrap(), &host);
    let devices: Vec<&str> = pools.of_device.keys().map(String::as_str).collect();
    assert_eq!(devices, ["mlx5_0", "mlx5_7"]);
    let expected = Membership {
        resource: "rdma/rails".to_owned(),
        shared: true,
        units: 1000,
    };
    assert_eq!(pools.of_device["mlx5_7"], [expected]);
    let hcas = |resource: &str| pools.by_resource[resource].hcas.len();
    assert_eq!((hcas("rdma/rails"), hcas("rdma/none")), (2, 0));
}
