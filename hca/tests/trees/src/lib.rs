//! Trees of files like a host's sysfs, for the tests of every room.
//!
//! A [`Tree`] lays files and links as the kernel does. Two things it cannot do: empty GID entries answer
//! `ENOENT` where sysfs answers `EINVAL`, and nodes in `/dev` are plain files.
//!
//! ```
//! use hca_trees::{On, PciSpec, RdmaSpec, Tree};
//!
//! let directory = tempfile::tempdir().unwrap();
//! let tree = Tree::new(directory.path());
//! tree.pci(&PciSpec { address: "0000:3b:00.0", numa_node: 0, ..PciSpec::MLX5 });
//! tree.rdma(&RdmaSpec { name: "mlx5_0", on: On::Pci("0000:3b:00.0"), ..RdmaSpec::default() });
//! assert_eq!(hca::inventory(&tree.host()).unwrap().rdma_devices().count(), 1);
//! ```
#![expect(
    clippy::expect_used,
    clippy::panic,
    reason = "support for tests: a tree that cannot be laid must stop the test"
)]

pub mod cloud;
pub mod machine;
pub mod ports;
mod spec;

use std::cell::{Cell, RefCell};
use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};

use hca::Host;
use hca::uplink::{self, DefaultRoute, Uplinks};

pub use spec::{NetdevSpec, On, PciSpec, PortSpec, RdmaSpec};

/// A host made of files.
#[derive(Debug)]
pub struct Tree {
    root: PathBuf,
    next_ifindex: Cell<u32>,
    next_node: Cell<u32>,
    default_routes: RefCell<Vec<DefaultRoute>>,
}

impl Tree {
    /// An empty host below `root`: sysfs, device and proc directories, no RDMA.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> Self {
        // Links are resolved against the real root, so that a root below a link still works.
        let root = fs::canonicalize(root.into()).expect("the tree's root exists");
        let tree = Self {
            root,
            next_ifindex: Cell::new(2),
            next_node: Cell::new(0),
            default_routes: RefCell::default(),
        };
        for directory in [
            "sys/class/net",
            "sys/bus/pci/devices",
            "sys/devices",
            "dev",
            "proc",
        ] {
            fs::create_dir_all(tree.root.join(directory)).expect("lay the roots");
        }
        // Whoever reads the tree is in the host's network namespace.
        tree.verbatim_link(Path::new("/proc/1/net"), Path::new("/proc/self/net"));
        tree
    }

    /// The roots to inspect.
    #[must_use]
    pub fn host(&self) -> Host {
        Host::at(&self.root)
    }

    /// A path of the host, such as `/sys/class/net`, in the tree.
    #[must_use]
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Gives the host a default route, which is in no file.
    pub fn default_route(&self, netdev: &str) {
        self.route(netdev, Ipv4Addr::UNSPECIFIED.into(), false);
    }

    fn route(&self, netdev: &str, destination: IpAddr, advertised: bool) {
        self.default_routes.borrow_mut().push(DefaultRoute {
            netdevs: vec![netdev.to_owned()],
            destination: (destination, 0),
            table: 254,
            metric: 100,
            source: None,
            advertised,
        });
    }

    /// The uplinks by its default routes.
    #[must_use]
    pub fn uplinks(&self) -> Uplinks {
        let network = uplink::Network {
            defaults: self.default_routes.borrow().clone(),
            ..uplink::Network::default()
        };
        let lowers = |name: &str| match hca::netdev::read(&self.host(), name) {
            Ok(netdev) => Ok(netdev.lowers),
            Err(error) if error.is_missing() => Ok(Vec::new()),
            Err(error) => Err(error),
        };
        Uplinks::Known(uplink::uplinks(&network, lowers).expect("netdevs of the tree can be read"))
    }

    /// Writes a file, and a newline after its text as sysfs does.
    pub fn file(&self, path: impl AsRef<Path>, text: impl std::fmt::Display) {
        self.bytes(path, format!("{text}\n").as_bytes());
    }

    /// Writes a binary file.
    pub fn bytes(&self, path: impl AsRef<Path>, bytes: &[u8]) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().expect("a file has a directory")).expect("make parents");
        fs::write(&path, bytes).unwrap_or_else(|e| panic!("write {path:?}: {e}"));
    }

    /// Makes a relative symbolic link from one host path to another; the target need not exist.
    pub fn link(&self, path: impl AsRef<Path>, target: impl AsRef<Path>) {
        let (path, target) = (path.as_ref(), target.as_ref());
        let from = path.parent().expect("a link has a directory");
        let shared = from
            .components()
            .zip(target.components())
            .take_while(|(a, b)| a == b)
            .count()
            // As the kernel writes them: a link always ends in the target's name.
            .min(target.components().count() - 1);
        let mut relative = PathBuf::new();
        for _ in shared..from.components().count() {
            relative.push("..");
        }
        relative.extend(target.components().skip(shared));
        self.verbatim_link(path, &relative);
    }

    fn verbatim_link(&self, path: &Path, target: &Path) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().expect("a link has a directory")).expect("make parents");
        // Lets a test point a link elsewhere.
        let _ = fs::remove_file(&path);
        std::os::unix::fs::symlink(target, &path)
            .unwrap_or_else(|e| panic!("link {path:?} -> {target:?}: {e}"));
    }

    /// Removes a file, link or directory with what is in it; nothing there is fine.
    pub fn remove(&self, path: impl AsRef<Path>) {
        let path = self.path(path);
        if fs::remove_file(&path).is_err() && path.is_dir() {
            fs::remove_dir_all(&path).unwrap_or_else(|e| panic!("remove {path:?}: {e}"));
        }
    }

    /// Lays a captured tree, one entry a line: `LINK -> TARGET`, `FILE:one line of its content`
    /// (repeated for more lines). Lines about `/dev` become empty files.
    pub fn replay(&self, capture: &str) {
        for line in capture.lines().filter(|line| line.starts_with('/')) {
            if line.starts_with("/dev/") {
                if let Some((node, "c")) = line
                    .split_once(' ')
                    .map(|(n, rest)| (n, rest.split(' ').next().unwrap_or("")))
                {
                    self.file(node, "");
                }
            } else if let Some((link, target)) = line.split_once(" -> ") {
                self.verbatim_link(Path::new(link), Path::new(target));
            } else {
                let (path, text) = split_content(line);
                let before = fs::read_to_string(self.path(path)).unwrap_or_default();
                self.file(path, format_args!("{before}{text}"));
            }
        }
    }

    /// Lays a PCI function.
    pub fn pci(&self, spec: &PciSpec<'_>) {
        let directory = format!("/sys/devices/{}/{}", spec.above, spec.address);
        for (name, text) in [
            ("vendor", format!("{:#06x}", spec.vendor)),
            ("device", format!("{:#06x}", spec.device)),
            ("class", format!("{:#08x}", spec.class)),
            ("numa_node", spec.numa_node.to_string()),
        ] {
            self.file(format!("{directory}/{name}"), text);
        }
        if spec.total_vfs > 0 {
            self.file(format!("{directory}/sriov_totalvfs"), spec.total_vfs);
            self.file(format!("{directory}/sriov_numvfs"), 0);
        }
        if !spec.driver.is_empty() {
            self.link(
                format!("{directory}/driver"),
                format!("/sys/bus/pci/drivers/{}", spec.driver),
            );
        }
        self.link(format!("{directory}/subsystem"), "/sys/bus/pci");
        self.link(format!("/sys/bus/pci/devices/{}", spec.address), &directory);
    }

    /// Lays a VF of a PF laid before, with its links both ways.
    pub fn vf(&self, pf: &str, index: u32, spec: &PciSpec<'_>) {
        self.pci(&PciSpec {
            total_vfs: 0,
            ..*spec
        });
        let (pf, vf) = (
            self.directory(On::Pci(pf)),
            self.directory(On::Pci(spec.address)),
        );
        self.link(vf.join("physfn"), &pf);
        self.link(pf.join(format!("virtfn{index}")), &vf);
        let vfs = fs::read_dir(self.path(&pf))
            .expect("list the PF")
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().starts_with("virtfn"))
            .count();
        self.file(pf.join("sriov_numvfs"), vfs);
    }

    /// Lays a sub-function, such as `mlx5_core.sf.4`, on a PCI function laid before.
    pub fn subfunction(&self, pci: &str, name: &str, number: u32) {
        let directory = self.directory(On::Pci(pci)).join(name);
        self.file(directory.join("sfnum"), number);
        self.link(directory.join("subsystem"), "/sys/bus/auxiliary");
        self.link(
            directory.join("driver"),
            "/sys/bus/auxiliary/drivers/mlx5_core.sf",
        );
        self.link(format!("/sys/bus/auxiliary/devices/{name}"), &directory);
    }

    /// Lays a netdev.
    pub fn netdev(&self, spec: &NetdevSpec<'_>) {
        let directory = self.class_device("net", spec.name, spec.on);
        let ifindex = next(&self.next_ifindex);
        let iflink = if spec.lowers.len() == 1 && spec.kind != "bond" {
            self.ifindex(spec.lowers)
        } else {
            ifindex
        };
        let flags: u32 = if spec.up { 0x1003 } else { 0x1002 };
        let mut uevent = format!("INTERFACE={}\nIFINDEX={ifindex}", spec.name);
        if !spec.kind.is_empty() {
            uevent = format!("DEVTYPE={}\n{uevent}", spec.kind);
        }
        for (name, text) in [
            ("address", spec.mac.to_owned()),
            ("addr_assign_type", "0".to_owned()),
            ("mtu", spec.mtu.to_string()),
            ("operstate", if spec.up { "up" } else { "down" }.to_owned()),
            ("flags", format!("{flags:#x}")),
            ("ifindex", ifindex.to_string()),
            ("iflink", iflink.to_string()),
            ("type", spec.link_type.to_string()),
            ("dev_port", spec.dev_port.to_string()),
            ("dev_id", "0x0".to_owned()),
            ("uevent", uevent),
        ] {
            self.file(directory.join(name), text);
        }
        if spec.up {
            self.file(directory.join("speed"), spec.speed);
        }
        if !spec.phys_port_name.is_empty() {
            self.file(directory.join("phys_port_name"), spec.phys_port_name);
        }
        for lower in spec.lowers {
            let below = self.resolved(format!("/sys/class/net/{lower}"));
            self.link(directory.join(format!("lower_{lower}")), &below);
            self.link(below.join(format!("upper_{}", spec.name)), &directory);
            if spec.kind == "bond" || spec.kind == "bridge" {
                self.link(below.join("master"), &directory);
            }
            if spec.kind == "bond" {
                let own = fs::read_to_string(self.path(below.join("address"))).unwrap_or_default();
                self.file(below.join("bonding_slave/perm_hwaddr"), own.trim());
                self.file(below.join("address"), spec.mac);
                self.file(below.join("addr_assign_type"), 3);
            }
        }
    }

    fn ifindex(&self, lowers: &[&str]) -> u32 {
        lowers
            .iter()
            .filter_map(|lower| {
                fs::read_to_string(self.path(format!("/sys/class/net/{lower}/ifindex"))).ok()
            })
            .find_map(|text| text.trim().parse().ok())
            .unwrap_or(0)
    }

    /// Lays an RDMA device with its ports and character devices.
    pub fn rdma(&self, spec: &RdmaSpec<'_>) {
        let directory = self.class_device("infiniband", spec.name, spec.on);
        self.file(directory.join("node_guid"), spec.node_guid);
        self.file(directory.join("sys_image_guid"), spec.node_guid);
        self.file(directory.join("node_type"), spec.node_type);
        self.file(directory.join("node_desc"), spec.name);
        if spec.vendor_attributes {
            self.file(directory.join("fw_ver"), "28.39.1002");
            self.file(directory.join("board_id"), "MT_0000000838");
            self.file(directory.join("hca_type"), "MT4129");
        }
        if !spec.soft_parent.is_empty() {
            self.file(directory.join("parent"), spec.soft_parent);
        }
        let node = next(&self.next_node);
        if spec.verbs {
            let name = format!("uverbs{node}");
            self.node("infiniband_verbs", &name, spec, None, 192 + node);
        }
        for (number, port) in (1..).zip(spec.ports) {
            self.port(&directory.join(format!("ports/{number}")), port);
            if spec.mad {
                let umad = node * 2 + number - 1;
                self.node(
                    "infiniband_mad",
                    &format!("umad{umad}"),
                    spec,
                    Some(number),
                    umad,
                );
                self.node(
                    "infiniband_mad",
                    &format!("issm{umad}"),
                    spec,
                    Some(number),
                    64 + umad,
                );
            }
        }
    }

    fn port(&self, directory: &Path, spec: &PortSpec<'_>) {
        for (name, text) in [
            ("state", spec.state.to_owned()),
            ("phys_state", spec.phys_state.to_owned()),
            ("rate", spec.rate.to_owned()),
            ("link_layer", spec.link_layer.to_owned()),
            ("lid", format!("{:#x}", spec.lid)),
            ("sm_lid", format!("{:#x}", u16::from(spec.lid != 0))),
        ] {
            self.file(directory.join(name), text);
        }
        for index in 0..spec.gid_entries {
            self.file(directory.join(format!("gids/{index}")), hca::Gid([0; 16]));
        }
        for (index, key) in spec.pkeys.iter().enumerate() {
            self.file(
                directory.join(format!("pkeys/{index}")),
                format!("{key:#06x}"),
            );
        }
        for (index, gid, kind, netdev) in spec.gids {
            self.file(directory.join(format!("gids/{index}")), gid);
            self.file(directory.join(format!("gid_attrs/types/{index}")), kind);
            if !netdev.is_empty() {
                self.file(directory.join(format!("gid_attrs/ndevs/{index}")), netdev);
            }
        }
    }

    fn node(&self, class: &str, name: &str, owner: &RdmaSpec<'_>, port: Option<u32>, minor: u32) {
        let directory = self.class_device(class, name, owner.on);
        self.file(directory.join("ibdev"), owner.name);
        self.file(directory.join("dev"), format!("231:{minor}"));
        if let Some(port) = port {
            self.file(directory.join("port"), port);
        }
        self.file(format!("/dev/infiniband/{name}"), "");
    }

    /// Lays what `ib_core` and `rdma_ucm` add when loaded: netns mode and the `rdma_cm` node.
    pub fn rdma_core(&self, shared: bool) {
        let mode = if shared { "Y" } else { "N" };
        self.file("/sys/module/ib_core/parameters/netns_mode", mode);
        self.file("/sys/class/misc/rdma_cm/dev", "10:124");
        self.file("/dev/infiniband/rdma_cm", "");
    }

    /// Sets a port's logical and physical state as sysfs says them.
    pub fn set_port_state(&self, device: &str, port: u32, state: &str, phys_state: &str) {
        let directory = format!("/sys/class/infiniband/{device}/ports/{port}");
        self.file(format!("{directory}/state"), state);
        self.file(format!("{directory}/phys_state"), phys_state);
    }

    /// Moves an RDMA device out of sight, as into another network namespace in exclusive mode:
    /// its character devices stay.
    pub fn hide_rdma(&self, device: &str) {
        let real = self.resolved(format!("/sys/class/infiniband/{device}"));
        self.remove(format!("/sys/class/infiniband/{device}"));
        self.remove(real);
    }

    /// Moves a netdev out of sight, as into another network namespace.
    pub fn hide_netdev(&self, name: &str) {
        let real = self.resolved(format!("/sys/class/net/{name}"));
        self.remove(format!("/sys/class/net/{name}"));
        self.remove(real);
    }

    /// Directory of a class device below what it stands on, with the links that belong to it.
    fn class_device(&self, class: &str, name: &str, on: On<'_>) -> PathBuf {
        let directory = match on {
            On::Nothing => PathBuf::from("/sys/devices/virtual").join(class).join(name),
            _ => self.directory(on).join(class).join(name),
        };
        self.link(directory.join("subsystem"), format!("/sys/class/{class}"));
        if on != On::Nothing {
            self.link(directory.join("device"), self.directory(on));
        }
        self.link(format!("/sys/class/{class}/{name}"), &directory);
        directory
    }

    fn directory(&self, on: On<'_>) -> PathBuf {
        match on {
            On::Pci(address) => self.resolved(format!("/sys/bus/pci/devices/{address}")),
            On::Auxiliary(name) => self.resolved(format!("/sys/bus/auxiliary/devices/{name}")),
            On::Virtio(address, device) => {
                let directory = self.directory(On::Pci(address)).join(device);
                self.link(directory.join("subsystem"), "/sys/bus/virtio");
                self.link(
                    directory.join("driver"),
                    "/sys/bus/virtio/drivers/virtio_net",
                );
                directory
            }
            On::Vmbus(channel, driver) => {
                let directory = Path::new("/sys/devices/LNXSYSTM:00/VMBUS:00").join(channel);
                self.link(directory.join("subsystem"), "/sys/bus/vmbus");
                self.link(
                    directory.join("driver"),
                    format!("/sys/bus/vmbus/drivers/{driver}"),
                );
                directory
            }
            On::Nothing => PathBuf::from("/sys/devices/virtual"),
        }
    }

    /// The host path that a link of the tree leads to.
    fn resolved(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        let real = fs::canonicalize(self.path(path))
            .unwrap_or_else(|e| panic!("{path:?} was not laid: {e}"));
        Path::new("/").join(
            real.strip_prefix(&self.root)
                .expect("links stay in the tree"),
        )
    }
}

fn next(counter: &Cell<u32>) -> u32 {
    counter.replace(counter.get() + 1)
}

/// Splits `FILE:content`. Directories of sysfs have colons too (`pci0000:00`, `0000:3b:00.0`),
/// but then the whole component between two slashes is of that form.
fn split_content(line: &str) -> (&str, &str) {
    let mut start = 0;
    for component in line.split_inclusive('/') {
        let end = start + component.len();
        let name = component.trim_end_matches('/');
        let is_directory = component.ends_with('/')
            && name
                .bytes()
                .all(|b| b.is_ascii_hexdigit() || b"pci:.".contains(&b));
        if !is_directory && let Some(colon) = component.find(':') {
            let (path, text) = line.split_at(start + colon);
            return (path, text.strip_prefix(':').unwrap_or(text));
        }
        start = end;
    }
    (line, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_captured_line_is_split_at_its_content() {
        for (line, path, text) in [
            (
                "/sys/class/infiniband/rxe0/fw_ver:",
                "/sys/class/infiniband/rxe0/fw_ver",
                "",
            ),
            (
                "/sys/devices/pci0000:80/0000:80:01.0/vendor:0x1b36",
                "/sys/devices/pci0000:80/0000:80:01.0/vendor",
                "0x1b36",
            ),
            (
                "/sys/x/gid_attrs/types/0:IB/RoCE v1",
                "/sys/x/gid_attrs/types/0",
                "IB/RoCE v1",
            ),
            (
                "/sys/x/address:52:54:00:00:00:01",
                "/sys/x/address",
                "52:54:00:00:00:01",
            ),
            ("/sys/x/dev:231:192", "/sys/x/dev", "231:192"),
        ] {
            assert_eq!(split_content(line), (path, text), "{line}");
        }
    }
}
