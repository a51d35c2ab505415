//! A node made of files on which nothing is wrong, and what is made wrong on it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use hca_trees::{Tree, machine};
use pools::host_snapshot::HostSnapshot;

use super::super::*;
use crate::verdict::{Finding, Verdict};

/// The kubelet's command line.
pub(super) const KUBELET: &str = "/proc/900/cmdline";

/// Where the environment of NVIDIA's plugin is, whose socket this process serves.
pub(super) fn plugin_environment() -> String {
    format!("/proc/{}/environ", std::process::id())
}

/// A node, as files.
pub(super) struct Node {
    directory: tempfile::TempDir,
    pub(super) tree: Tree,
    sockets: Vec<UnixListener>,
    /// What was changed: the path, and where what was there waits, if anything was.
    changed: RefCell<Vec<(PathBuf, Option<PathBuf>)>>,
    aside: tempfile::TempDir,
}

impl Node {
    /// A host without anything.
    pub(super) fn bare() -> Self {
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
    pub(super) fn take(&self, path: &str) {
        let path = self.tree.path(path);
        let mut changed = self.changed.borrow_mut();
        let place = self.aside.path().join(changed.len().to_string());
        let was_there = fs::rename(&path, &place).is_ok();
        changed.push((path, was_there.then_some(place)));
    }

    /// Writes a file until [`Node::restore`].
    pub(super) fn put(&self, path: &str, text: impl std::fmt::Display) {
        self.take(path);
        self.tree.file(path, text);
    }

    /// Undoes all changes.
    pub(super) fn restore(&self) {
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
    pub(super) fn fit() -> Self {
        let mut node = Self::bare();
        machine::a4(&node.tree);
        node.tree.rdma_core(true);
        node.lay_modules();
        node.lay_functions();
        node.lay_ports();
        node.lay_runtime();
        node.lay_kubelet();
        node.changed.borrow_mut().clear();
        node
    }

    fn lay_modules(&self) {
        let tree = &self.tree;
        let modules = ["mlx5_core", "mlx5_ib", "nvidia"];
        for module in modules {
            tree.file(format!("/sys/module/{module}/refcnt"), 1);
        }
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
            self.tree.file(
                format!("{directory}/aer_dev_correctable"),
                "RxErr 0\nTOTAL_ERR_COR 0",
            );
            self.tree
                .file(format!("{directory}/iommu_group/type"), "identity");
        }
    }

    pub(super) fn config(&self, address: &str, device: u16, acs: Option<u16>) {
        let bytes = config_space::tests::space(device, acs);
        let path = format!("/sys/bus/pci/devices/{address}/config");
        self.take(&path);
        fs::write(self.tree.path(path), bytes).unwrap();
    }

    /// What a process without `CAP_SYS_ADMIN` reads of a configuration space.
    pub(super) fn short_config(&self, address: &str) {
        self.config(address, 0x5936, Some(0x0001));
        let path = self
            .tree
            .path(format!("/sys/bus/pci/devices/{address}/config"));
        fs::OpenOptions::new()
            .write(true)
            .open(path)
            .unwrap()
            .set_len(64)
            .unwrap();
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
            self.tree.file(
                format!("/sys/kernel/config/rdma_cm/mlx5_{number}/ports/1/default_roce_tos"),
                106,
            );
            let netdev = format!("/sys/class/net/gpu{number}rdma0");
            self.tree.file(format!("{netdev}/qos/trust"), "dscp");
            for (file, value) in [("roce_rp/enable/3", 1), ("roce_np/enable/3", 1)] {
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

    pub(super) fn null_node(&self, class: &str, name: &str) {
        self.tree.file(format!("/sys/class/{class}/dev"), "1:3");
        let node = self.tree.path(format!("/dev/infiniband/{name}"));
        fs::remove_file(&node).unwrap();
        std::os::unix::fs::symlink("/dev/null", node).unwrap();
    }

    /// A process; `program` is below the host's root, and the namespaces are the host's.
    pub(super) fn process(&self, pid: u32, program: &str) {
        let (tree, name) = (&self.tree, program.rsplit('/').next().unwrap());
        tree.file(format!("/proc/{pid}/comm"), &name[..name.len().min(15)]);
        tree.file(format!("/proc/{pid}/status"), "Name:\tx\nUid:\t0\t0\t0\t0");
        tree.file(program, "");
        self.link(&format!("/proc/{pid}/exe"), program);
        for (name, number) in [("pid", 4026531836_u32), ("mnt", 4026531841)] {
            self.link(
                &format!("/proc/{pid}/ns/{name}"),
                &format!("{name}:[{number}]"),
            );
        }
    }

    /// A symbolic link until [`Node::restore`].
    pub(super) fn link(&self, path: &str, target: &str) {
        self.take(path);
        let path = self.tree.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(target, path).unwrap();
    }

    fn lay_runtime(&self) {
        for (pid, program) in [
            (1, "/usr/lib/systemd/systemd"),
            (700, "/usr/bin/containerd"),
            (900, "/usr/bin/kubelet"),
        ] {
            self.process(pid, program);
        }
        self.tree.file(
            "/proc/700/limits",
            "Max locked memory         unlimited            unlimited            bytes",
        );
        self.put(
            KUBELET,
            "kubelet\0--config=/etc/kubelet.yaml\0--topology-manager-scope=pod\0",
        );
        self.tree.file(
            "/etc/kubelet.yaml",
            "kind: KubeletConfiguration\ncpuManagerPolicy: static\ntopologyManagerPolicy: single-numa-node",
        );
    }

    fn lay_kubelet(&mut self) {
        let plugins = self.tree.path("/var/lib/kubelet/device-plugins");
        fs::create_dir_all(&plugins).unwrap();
        let socket = plugins.join("nvidia-gpu.sock");
        self.sockets.push(UnixListener::bind(socket).unwrap());
        self.tree
            .file(plugin_environment(), "MOFED_ENABLED=false\0");
        self.tree.file(
            "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint",
            r#"{"Data":{"RegisteredDevices":{"rdma/rails":["0000:91:00.0"]}}}"#,
        );
    }

    pub(super) fn settings(&self) -> Settings {
        let root = self.directory.path();
        Settings {
            root: root.to_owned(),
            device_plugin_dir: root.join("var/lib/kubelet/device-plugins"),
            policy: root.join("etc/rdma-netdev/policy.json"),
            in_pod: false,
            expected: None,
        }
    }

    /// The verdict of each check.
    pub(super) fn verdicts(&self) -> BTreeMap<&'static str, Verdict> {
        self.verdicts_with(self.settings(), None)
    }

    pub(super) fn context(&self, settings: Settings, pools: Option<ConfiguredPools>) -> Context {
        let host = self.tree.host();
        let mut snapshot = HostSnapshot::scan(&host, &[], &[], hca::topology::gpu::read).unwrap();
        snapshot.uplinks = self.tree.uplinks();
        let mut context = Context::new(settings, snapshot, false, pools);
        let addresses = (0..8).map(|number| {
            let ip = format!("192.168.{}.4", number + 1).parse().unwrap();
            (format!("gpu{number}rdma0"), ip)
        });
        context.addresses = Ok(addresses.collect());
        context
    }

    pub(super) fn verdicts_with(
        &self,
        settings: Settings,
        pools: Option<ConfiguredPools>,
    ) -> BTreeMap<&'static str, Verdict> {
        let outcomes = run(&self.context(settings, pools), &[], &[]);
        outcomes
            .into_iter()
            .map(|outcome| (outcome.id, outcome.verdict))
            .collect()
    }

    /// The findings of one check.
    pub(super) fn findings(
        &self,
        id: &str,
        settings: Settings,
        pools: Option<ConfiguredPools>,
    ) -> Vec<Finding> {
        let mut outcomes = run(&self.context(settings, pools), &[id.to_owned()], &[]);
        outcomes.remove(0).findings
    }

    /// Checks that complain.
    pub(super) fn complaints(&self) -> Vec<&'static str> {
        let verdicts = self.verdicts().into_iter();
        verdicts
            .filter(|(_, verdict)| *verdict >= Verdict::Warn)
            .map(|(id, _)| id)
            .collect()
    }
}
