//! All of preflight on hosts made of files: what is read, and not only how it is judged.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

use hca::network::Uplinks;
use hca::topology::{Machine, Wanted};
use hca::tree::{NetdevSpec, On, PciSpec, RdmaSpec, Tree, machine};

use super::*;
use crate::verdict::Verdict;

struct Node {
    directory: tempfile::TempDir,
    tree: Tree,
    sockets: Vec<UnixListener>,
    /// What was changed: the path, and where what was there waits, if anything was.
    changed: RefCell<Vec<(PathBuf, Option<PathBuf>)>>,
    aside: tempfile::TempDir,
}

impl Node {
    /// A host without anything.
    fn bare() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::new(directory.path());
        tree.file(
            "/proc/sys/kernel/random/boot_id",
            "11111111-2222-3333-4444-555555555555",
        );
        Self {
            directory,
            tree,
            sockets: Vec::new(),
            changed: RefCell::default(),
            aside: tempfile::tempdir().unwrap(),
        }
    }

    /// Removes something until [`Node::restore`].
    fn take(&self, path: &str) {
        let path = self.tree.path(path);
        let mut changed = self.changed.borrow_mut();
        let place = self.aside.path().join(changed.len().to_string());
        let was_there = fs::rename(&path, &place).is_ok();
        changed.push((path, was_there.then_some(place)));
    }

    /// Writes a file until [`Node::restore`].
    fn put(&self, path: &str, text: impl std::fmt::Display) {
        self.take(path);
        self.tree.file(path, text);
    }

    /// Undoes all changes.
    fn restore(&self) {
        for (path, place) in self.changed.borrow_mut().drain(..).rev() {
            if fs::remove_file(&path).is_err() {
                let _ = fs::remove_dir_all(&path);
            }
            if let Some(place) = place {
                fs::rename(place, path).unwrap();
            }
        }
    }

    /// An A4 where nothing is wrong.
    fn fit() -> Self {
        let mut node = Self::bare();
        machine::a4(&node.tree);
        node.tree.rdma_core(true);
        node.lay_modules();
        node.lay_functions();
        node.lay_ports();
        node.lay_network();
        node.lay_runtime();
        node.lay_kubelet();
        node.changed.borrow_mut().clear();
        node
    }

    fn lay_modules(&self) {
        let tree = &self.tree;
        let modules = [
            "ib_core",
            "ib_uverbs",
            "rdma_ucm",
            "mlx5_core",
            "mlx5_ib",
            "nvidia",
            "nvidia_uvm",
        ];
        for module in modules {
            tree.file(format!("/sys/module/{module}/refcnt"), 1);
        }
        tree.file("/proc/sys/kernel/osrelease", "6.8.0-45-generic");
        tree.file("/proc/cpuinfo", "flags\t\t: fpu vme");
        tree.file(
            "/proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06",
        );
        tree.file(
            "/proc/kallsyms",
            "0 T ib_umem_dmabuf_get\t[ib_uverbs]\n0 t mlx5_ib_reg_user_mr_dmabuf\t[mlx5_ib]",
        );
    }

    fn lay_functions(&self) {
        let names = fs::read_dir(self.tree.path("/sys/bus/pci/devices")).unwrap();
        for name in names.map(|entry| entry.unwrap().file_name().into_string().unwrap()) {
            let directory = format!("/sys/bus/pci/devices/{name}");
            self.config(&name, 0x5936, Some(0x0001));
            self.tree
                .file(format!("{directory}/power/runtime_status"), "active");
            self.tree.file(format!("{directory}/power/control"), "on");
            self.tree.file(
                format!("{directory}/aer_dev_correctable"),
                "RxErr 0\nTOTAL_ERR_COR 0",
            );
            self.tree
                .file(format!("{directory}/iommu_group/type"), "identity");
            self.tree.file(
                format!("{directory}/resource"),
                "0x00000000f8000000 0x00000000f8ffffff 0x0000000000040200\n\
                 0x0000380000000000 0x0000383fffffffff 0x000000000014220c",
            );
        }
    }

    fn config(&self, address: &str, device: u16, acs: Option<u16>) {
        let bytes = pcie::config_space::tests::space(device, acs, None);
        let path = format!("/sys/bus/pci/devices/{address}/config");
        self.take(&path);
        fs::write(self.tree.path(path), bytes).unwrap();
    }

    fn lay_ports(&self) {
        for number in 0..8 {
            let port = format!("/sys/class/infiniband/mlx5_{number}/ports/1");
            let ip = format!("0000:0000:0000:0000:0000:ffff:c0a8:{:02x}04", number + 1);
            for (index, kind) in [(2, "IB/RoCE v1"), (3, "RoCE v2")] {
                self.tree.file(format!("{port}/gids/{index}"), &ip);
                self.tree
                    .file(format!("{port}/gid_attrs/types/{index}"), kind);
                self.tree.file(
                    format!("{port}/gid_attrs/ndevs/{index}"),
                    format!("gpu{number}rdma0"),
                );
            }
            self.tree.file(format!("{port}/counters/symbol_error"), 0);
            self.tree
                .file(format!("{port}/hw_counters/out_of_buffer"), 0);
            self.tree.file(
                format!("/sys/kernel/config/rdma_cm/mlx5_{number}/ports/1/default_roce_tos"),
                106,
            );
            let netdev = format!("/sys/class/net/gpu{number}rdma0");
            self.tree.file(format!("{netdev}/carrier"), 1);
            self.tree.file(format!("{netdev}/name_assign_type"), 4);
            self.tree.file(format!("{netdev}/qos/trust"), "dscp");
            for (file, value) in [
                ("roce_rp/enable/3", 1),
                ("roce_np/enable/3", 1),
                ("roce_np/cnp_dscp", 48),
                ("roce_np/cnp_802p_prio", 6),
            ] {
                self.tree.file(format!("{netdev}/ecn/{file}"), value);
            }
            // The nodes of a tree are files; a link to a real character device is one.
            self.null_node(
                &format!("infiniband_verbs/uverbs{number}"),
                &format!("uverbs{number}"),
            );
        }
        self.null_node("misc/rdma_cm", "rdma_cm");
    }

    fn null_node(&self, class: &str, name: &str) {
        self.tree.file(format!("/sys/class/{class}/dev"), "1:3");
        let node = self.tree.path(format!("/dev/infiniband/{name}"));
        fs::remove_file(&node).unwrap();
        std::os::unix::fs::symlink("/dev/null", node).unwrap();
    }

    fn lay_network(&self) {
        let mut routes = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n\
            eth0 00000000 0100A8C0 0003 0 0 100 00000000 0 0 0\n"
            .to_owned();
        let mut trie = "Local:\n".to_owned();
        for number in 1..=8 {
            let network = u32::from_ne_bytes([192, 168, number, 0]);
            let mask = u32::from_ne_bytes([255, 255, 255, 0]);
            routes.push_str(&format!(
                "gpu{}rdma0 {network:08X} 00000000 0001 0 0 0 {mask:08X} 0 0 0\n",
                number - 1
            ));
            trie.push_str(&format!(
                "     |-- 192.168.{number}.4\n        /32 host LOCAL\n"
            ));
        }
        self.tree.file("/proc/1/net/route", routes);
        self.tree.file("/proc/1/net/fib_trie", trie);
        self.tree
            .file("/proc/sys/net/core/devconf_inherit_init_net", 0);
        for netdev in (0..8)
            .map(|n| format!("gpu{n}rdma0"))
            .chain(["all".to_owned()])
        {
            let conf = format!("/proc/sys/net/ipv4/conf/{netdev}");
            for (setting, value) in [("arp_ignore", 0), ("arp_announce", 0), ("rp_filter", 0)] {
                self.tree.file(format!("{conf}/{setting}"), value);
            }
        }
    }

    fn lay_runtime(&self) {
        for (pid, name) in [
            (1, "systemd"),
            (700, "containerd"),
            (800, "nvidia-device-p"),
            (900, "kubelet"),
        ] {
            self.tree.file(format!("/proc/{pid}/comm"), name);
        }
        self.tree.file(
            "/proc/700/limits",
            "Max locked memory         unlimited            unlimited            bytes",
        );
        self.tree.file("/proc/800/environ", "MOFED_ENABLED=false\0");
        self.tree
            .file("/etc/containerd/config.toml", "enable_cdi = true");
        fs::write(
            self.tree.path("/proc/900/cmdline"),
            "kubelet\0--config=/etc/kubelet.yaml\0--topology-manager-scope=pod\0",
        )
        .unwrap();
        self.tree.file(
            "/etc/kubelet.yaml",
            "cpuManagerPolicy: static\ntopologyManagerPolicy: single-numa-node",
        );
    }

    fn lay_kubelet(&mut self) {
        let plugins = self.tree.path("/var/lib/kubelet/device-plugins");
        fs::create_dir_all(&plugins).unwrap();
        self.sockets
            .push(UnixListener::bind(plugins.join("kubelet.sock")).unwrap());
        self.tree.file(
            "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint",
            r#"{"Data":{"RegisteredDevices":{"rdma/rails":["0000:91:00.0"]}}}"#,
        );
        self.tree.file("/etc/cni/net.d/00-multus.conf", "{}");
        for program in node::cni_program::NAMES {
            let path = format!("/opt/cni/bin/{program}");
            self.tree.file(
                &path,
                format!("#!/bin/sh\necho {program} {}", env!("CARGO_PKG_VERSION")),
            );
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            fs::set_permissions(self.tree.path(&path), mode).unwrap();
        }
    }

    fn settings(&self) -> Settings {
        let root = self.directory.path();
        Settings {
            node_addresses: Vec::new(),
            root: root.to_owned(),
            kubelet_root_dir: root.join("var/lib/kubelet"),
            device_plugin_dir: root.join("var/lib/kubelet/device-plugins"),
            cni_bin_dir: root.join("opt/cni/bin"),
            cni_conf_dir: root.join("etc/cni/net.d"),
            policy: root.join("etc/rdma-netdev/policy.json"),
            scope: Scope::Node,
            requirements: Requirements {
                window: Duration::ZERO,
                ..Requirements::default()
            },
            node_object: None,
            networks: None,
        }
    }

    /// The verdict of each check. PodResources is a real kubelet's, and left out.
    fn verdicts(&self) -> BTreeMap<&'static str, Verdict> {
        self.verdicts_with(self.settings(), None)
    }

    fn context(&self, settings: Settings, pools: Option<Pools>) -> Context {
        let host = self.tree.host();
        let inventory = hca::inventory(&host).unwrap();
        let snapshot = Snapshot {
            machine: Machine::read(&host, &inventory, &Wanted::default()).unwrap(),
            uplinks: Uplinks::of_host(&host, &[]),
            inventory,
            in_host_namespace: false,
        };
        Context::new(settings, snapshot, pools)
    }

    fn verdicts_with(
        &self,
        settings: Settings,
        pools: Option<Pools>,
    ) -> BTreeMap<&'static str, Verdict> {
        let selection = Selection::new(&[], &["K02".to_owned()]).unwrap();
        let outcomes = run(&self.context(settings, pools), &selection);
        outcomes
            .into_iter()
            .map(|outcome| (outcome.id, outcome.verdict))
            .collect()
    }

    /// Checks that complain.
    fn complaints(&self) -> Vec<&'static str> {
        let verdicts = self.verdicts().into_iter();
        verdicts
            .filter(|(_, verdict)| *verdict >= Verdict::Warn)
            .map(|(id, _)| id)
            .collect()
    }
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
    assert_eq!(of(Verdict::Fail), "");
    assert_eq!(of(Verdict::Warn), "");
    assert_eq!(
        of(Verdict::Unknown),
        // Rules, flow control and a duplicate IPv4 address are asked of the running kernel or of
        // the wire; labels and networks of the cluster.
        "A07 A08 K05 M05 Q02"
    );
    assert_eq!(
        of(Verdict::NotApplicable),
        "A01 A02 A05 A06 D04 D05 D08 G04 G05 K06 K10 L04 L09 M04 P04 R02 R03 R05 R07 R08"
    );
}

#[test]
fn each_broken_file_is_found_by_its_check() {
    type Break = fn(&Node);
    let cases: &[(&str, Break)] = &[
        ("M01", |node| node.take("/sys/module/rdma_ucm")),
        ("M02", |node| {
            node.take("/sys/bus/pci/devices/0000:91:00.0/driver")
        }),
        ("M04", |node| {
            node.take("/run/mellanox");
            node.put("/run/mellanox/drivers/other", "");
        }),
        ("M06", |node| {
            node.put("/sys/class/infiniband/mlx5_3/fw_ver", "28.40.1000")
        }),
        ("M08", |node| {
            node.put("/proc/sys/kernel/osrelease", "5.4.0-190-generic")
        }),
        ("L01", |node| {
            node.put("/sys/class/net/gpu1rdma0/carrier", 0)
        }),
        ("L02", |node| {
            node.put("/sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN")
        }),
        ("L03", |node| {
            node.put(
                "/sys/class/infiniband/mlx5_1/ports/1/phys_state",
                "2: Polling",
            )
        }),
        ("L05", |node| {
            node.put("/sys/class/net/gpu1rdma0/speed", 100_000)
        }),
        ("L06", |node| node.put("/sys/class/net/gpu1rdma0/mtu", 4300)),
        ("L07", |node| node.put("/sys/class/net/gpu1rdma0/mtu", 1500)),
        ("L11", |node| {
            node.put("/sys/class/net/gpu1rdma0/name_assign_type", 1)
        }),
        ("G01", |node| {
            node.put(
                "/sys/class/infiniband/mlx5_1/ports/1/gid_attrs/types/3",
                "IB/RoCE v1",
            )
        }),
        ("G02", |node| {
            node.put(
                "/sys/class/infiniband/mlx5_1/ports/1/gid_attrs/ndevs/3",
                "gpu2rdma0",
            );
        }),
        ("P01", |node| {
            node.put("/sys/bus/pci/devices/0000:91:00.0/current_link_width", 8)
        }),
        ("P02", |node| {
            node.put("/sys/bus/pci/devices/0000:91:00.0/numa_node", -1)
        }),
        ("P03", |node| {
            node.config("0000:8e:02.0", 0x2810, Some(0x001d))
        }),
        ("P05", |node| {
            node.put(
                "/sys/bus/pci/devices/0000:91:00.0/iommu_group/type",
                "DMA-FQ",
            )
        }),
        ("P06", |node| node.config("0000:91:00.0", 0x2936, None)),
        ("P09", |node| {
            let small = "0x0 0x0 0x0\n0x00000000c0000000 0x00000000cfffffff 0x000000000014220c";
            node.put("/sys/bus/pci/devices/0000:8f:00.0/resource", small);
        }),
        ("P10", |node| {
            node.put(
                "/sys/bus/pci/devices/0000:91:00.0/power/runtime_status",
                "suspended",
            )
        }),
        ("D01", |node| node.take("/proc/driver/nvidia/version")),
        ("D03", |node| node.put("/proc/kallsyms", "0 T printk")),
        ("D06", |node| node.take("/sys/module/nvidia_uvm")),
        ("D07", |node| {
            node.put("/proc/800/environ", "MOFED_ENABLED=true\0")
        }),
        ("D08", |node| {
            node.take("/sys/bus/pci/devices/0000:05:00.0");
            let spec = PciSpec {
                address: "0000:05:00.0",
                above: "pci0000:04",
                class: 0x06_8000,
                ..PciSpec::GPU
            };
            node.tree.pci(&spec);
        }),
        ("R01", |node| {
            node.put(
                "/proc/700/limits",
                "Max locked memory         8388608 8388608 bytes",
            );
        }),
        ("R04", |node| node.take("/dev/infiniband/uverbs3")),
        ("R06", |node| {
            node.put("/etc/containerd/config.toml", "enable_cdi = false")
        }),
        ("R07", |node| {
            node.put("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", 64);
            node.put(
                "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages",
                0,
            );
        }),
        ("R08", |node| {
            node.put(
                "/sys/fs/cgroup/kubepods.slice/rdma.max",
                "mlx5_0 hca_handle=2 hca_object=max",
            );
        }),
        ("A03", |node| {
            node.put("/proc/sys/net/ipv4/conf/gpu1rdma0/rp_filter", 1)
        }),
        ("A04", |node| {
            node.put("/proc/sys/net/ipv4/conf/all/rp_filter", 1)
        }),
        ("Q01", |node| {
            node.put("/sys/class/net/gpu1rdma0/qos/trust", "pcp")
        }),
        ("Q03", |node| {
            node.put("/sys/class/net/gpu1rdma0/ecn/roce_np/enable/3", 0)
        }),
        ("Q04", |node| {
            node.put(
                "/sys/kernel/config/rdma_cm/mlx5_1/ports/1/default_roce_tos",
                0,
            )
        }),
        ("Q05", |node| {
            node.put("/sys/class/net/gpu1rdma0/ecn/roce_np/cnp_dscp", 0)
        }),
        ("K01", |node| {
            node.take("/var/lib/kubelet/device-plugins/kubelet.sock")
        }),
        ("K03", |node| {
            node.put("/etc/kubelet.yaml", "topologyManagerPolicy: none")
        }),
        ("K07", |node| {
            let text =
                r#"{"Data":{"RegisteredDevices":{"a/x":["0000:91:00.0"],"a/y":["0000:91:00.0"]}}}"#;
            node.put(
                "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint",
                text,
            );
        }),
        ("K08", |node| node.take("/opt/cni/bin/rdma-ipam")),
        ("K09", |node| node.put("/etc/rdma-netdev/policy.json", "{")),
    ];
    let node = Node::fit();
    for (id, break_it) in cases {
        break_it(&node);
        let selection = Selection::new(&[(*id).to_owned()], &[]).unwrap();
        let outcomes = run(&node.context(node.settings(), None), &selection);
        assert!(
            outcomes[0].verdict >= Verdict::Warn,
            "{id} does not see it: {outcomes:?}"
        );
        node.restore();
    }
    assert_eq!(node.complaints(), Vec::<&str>::new(), "all is as before");
}

#[test]
fn rails_in_one_subnet_need_settings_of_their_own() {
    let node = Node::fit();
    let routes = fs::read_to_string(node.tree.path("/proc/1/net/route")).unwrap();
    let mask = u32::from_ne_bytes([255, 255, 0, 0]);
    let network = u32::from_ne_bytes([192, 168, 0, 0]);
    let shared: Vec<String> = routes
        .lines()
        .map(|line| match line.split(' ').next() {
            Some(netdev) if netdev.starts_with("gpu") => {
                format!("{netdev} {network:08X} 00000000 0001 0 0 0 {mask:08X} 0 0 0")
            }
            _ => line.to_owned(),
        })
        .collect();
    node.tree.file("/proc/1/net/route", shared.join("\n"));
    let complaints = node.complaints();
    assert!(
        complaints.contains(&"A01") && complaints.contains(&"A02"),
        "{complaints:?}"
    );
}

#[test]
fn a_configuration_says_which_nics_have_to_be_in_order() {
    let node = Node::fit();
    node.tree
        .set_port_state("mlx5_7", 1, "1: DOWN", "2: Polling");
    let with_pool = |devices: &[&str]| {
        let membership = Membership {
            resource: "rdma/rails".to_owned(),
            shared: true,
            units: 1000,
        };
        let of_device = devices
            .iter()
            .map(|device| ((*device).to_owned(), vec![membership.clone()]));
        let pools = Pools {
            resources: vec![membership.resource.clone()],
            of_device: of_device.collect(),
        };
        node.verdicts_with(node.settings(), Some(pools))
    };
    let without = with_pool(&["mlx5_0"]);
    assert_eq!(
        without["L02"],
        Verdict::Pass,
        "the port that is down is in no pool"
    );
    assert_eq!(without["G06"], Verdict::Warn, "1000 units do not fit");
    assert_eq!(with_pool(&["mlx5_0", "mlx5_7"])["L02"], Verdict::Fail);
}

#[test]
fn what_the_cluster_knows_is_taken_from_its_objects() {
    let node = Node::fit();
    let object = |wait: &str| {
        serde_json::json!({
            "metadata": {"labels": {"network.nvidia.com/operator.mofed.wait": wait}},
            "status": {"allocatable": {"rdma/rails": "8"}}
        })
    };
    let network = |resource: &str| {
        serde_json::json!({"metadata": {"name": "rail", "annotations": {
            "k8s.v1.cni.cncf.io/resourceName": resource}}})
    };
    let verdicts = |wait: &str, resource: &str| {
        let (node_object, networks) = (Some(object(wait)), Some(network(resource)));
        let settings = Settings {
            node_object,
            networks,
            ..node.settings()
        };
        node.verdicts_with(settings, None)
    };
    let good = verdicts("false", "rdma/rails");
    assert_eq!((good["M05"], good["K05"]), (Verdict::Pass, Verdict::Pass));
    let bad = verdicts("true", "rdma/other");
    assert_eq!((bad["M05"], bad["K05"]), (Verdict::Fail, Verdict::Fail));
}

#[test]
fn a_node_without_any_of_it_does_not_fail() {
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
    assert_eq!(node.complaints(), Vec::<&str>::new());
}

#[test]
fn soft_roce_on_a_plain_nic_does_not_fail() {
    let node = Node::bare();
    let tree = &node.tree;
    tree.rdma_core(true);
    for module in ["ib_core", "ib_uverbs", "rdma_ucm", "rdma_rxe"] {
        tree.file(format!("/sys/module/{module}/refcnt"), 1);
    }
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
    let ports = &[hca::tree::PortSpec {
        gids,
        ..hca::tree::PortSpec::ROCE
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
        .filter(|(_, v)| *v == Verdict::Fail)
        .map(|(id, _)| id)
        .collect();
    assert_eq!(failed, Vec::<&str>::new());
}
