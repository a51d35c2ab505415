//! The device plugin's daemon under test, on a host made of files.

use std::ffi::OsStr;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::bin_under_test::product;
use crate::kubelet::{Kubelet, Settings};
use anyhow::{Context, Result, bail};
use hca_trees::{PciSpec, PortSpec, Tree};
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::Pid;
use tempfile::TempDir;

/// A machine of files with two HCAs, `mlx5_0` on NUMA node 0 and `mlx5_1` on
/// node 1, and a place for a kubelet.
#[derive(Debug)]
pub struct Machine {
    /// The host's files.
    pub tree: Tree,
    root: TempDir,
}

/// PCI addresses of the two HCAs.
pub const HCAS: [&str; 2] = ["0000:3b:00.0", "0000:d8:00.0"];

impl Machine {
    /// One with the two HCAs.
    ///
    /// # Errors
    /// Files or device nodes cannot be made; nodes need root.
    pub fn new() -> Result<Self> {
        Self::with(&HCAS.map(str::to_owned))
    }

    /// One with this many HCAs, half of them on each NUMA node.
    ///
    /// # Errors
    /// As [`Machine::new`].
    pub fn with_hcas(count: u32) -> Result<Self> {
        let addresses: Vec<String> = (0..count)
            .map(|n| format!("{:04x}:{:02x}:00.0", n / 128, 0x10 + n % 128))
            .collect();
        Self::with(&addresses)
    }

    /// One that is laid like this, as the machines of the field in `hca_trees::machine` are.
    ///
    /// # Errors
    /// As [`Machine::new`].
    pub fn laid(lay: impl FnOnce(&Tree)) -> Result<Self> {
        let root = tempfile::tempdir()?;
        let host = root.path().join("host");
        fs::create_dir(&host)?;
        let tree = Tree::new(host);
        tree.rdma_core(true);
        lay(&tree);
        make_nodes(&tree)?;
        Ok(Self { tree, root })
    }

    fn with(addresses: &[String]) -> Result<Self> {
        Self::laid(|tree| Self::lay(tree, addresses))
    }

    fn lay(tree: &Tree, addresses: &[String]) {
        tree.sockets(&["0-7", "8-15"]);
        for (index, address) in addresses.iter().enumerate() {
            let second = index * 2 >= addresses.len();
            let above = if second {
                "pci0000:d7/0000:d7:00.0"
            } else {
                "pci0000:3a/0000:3a:00.0"
            };
            let spec = PciSpec {
                address,
                above,
                numa_node: i32::from(second),
                ..PciSpec::MLX5
            };
            let (rdma, netdev) = (format!("mlx5_{index}"), format!("rdma{index}"));
            tree.nic(&spec, &rdma, &netdev, &[PortSpec::ROCE]);
        }
    }

    /// Makes the device nodes of HCAs that were added to the tree.
    ///
    /// # Errors
    /// A node cannot be made.
    pub fn make_nodes(&self) -> Result<()> {
        make_nodes(&self.tree)
    }

    /// Gives a verbs or management node another number, as a reboot does.
    ///
    /// # Errors
    /// There is no such node.
    pub fn renumber(&self, from: &str, to: &str) -> Result<()> {
        renumber(&self.tree, from, to)
    }

    /// Where its kubelet keeps things.
    #[must_use]
    pub fn settings(&self) -> Settings {
        Settings::below(&self.root.path().join("kubelet"))
            .with_cgroups(self.tree.path("/sys/fs/cgroup"))
    }

    /// Starts a kubelet.
    ///
    /// # Errors
    /// Its sockets cannot be made.
    pub fn kubelet(&self) -> Result<Kubelet> {
        Kubelet::start(self.settings())
    }

    /// A directory of the machine's own, beside the host's files.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.root.path()
    }

    /// The state directory that its node's policy names.
    #[must_use]
    pub fn state(&self) -> PathBuf {
        self.root.path().join("state-of-node")
    }

    /// Its node's policy.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn policy(&self) -> Result<PathBuf> {
        let file = self.root.path().join("policy.json");
        let state = self.state();
        match fs::DirBuilder::new().mode(0o700).create(&state) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(error.into());
            }
            _ => {}
        }
        let policy = serde_json::json!({"stateDir": state});
        fs::write(&file, policy.to_string())?;
        Ok(file)
    }

    /// Where its daemon answers programs of the node.
    #[must_use]
    pub fn node_socket(&self) -> PathBuf {
        self.root.path().join("rdma-netdev/node.sock")
    }

    /// Where its daemon keeps the bindings of slots.
    #[must_use]
    pub fn bindings(&self) -> PathBuf {
        self.node_socket().with_file_name("bindings")
    }

    /// Starts the daemon with this configuration.
    ///
    /// # Errors
    /// The program is not built.
    pub fn daemon(&self, config: &str) -> Result<Daemon> {
        let file = self.root.path().join("config");
        fs::write(&file, config)?;
        self.daemon_on(&file, &[])
    }

    /// Starts the daemon on a configuration file, with further flags.
    ///
    /// # Errors
    /// The program is not built.
    pub fn daemon_on(&self, file: &Path, flags: &[&OsStr]) -> Result<Daemon> {
        let policy = self.policy()?;
        let mut command = Command::new(product("rdma-device-plugin")?);
        command
            .arg("--config-file")
            .arg(file)
            .arg("--host-root")
            .arg(self.root.path().join("host"))
            .arg("--device-plugin-dir")
            .arg(self.settings().device_plugins)
            .arg("--node-socket")
            .arg(self.node_socket())
            .arg("--policy")
            .arg(policy)
            .args(flags);
        Daemon::start(command, self.root.path())
    }
}

/// Gives a verbs or management node another number, as a reboot or a move to another network
/// namespace does.
///
/// # Errors
/// There is no such node.
pub fn renumber(tree: &Tree, from: &str, to: &str) -> Result<()> {
    let class = match from.starts_with("uverbs") {
        true => Path::new("/sys/class/infiniband_verbs"),
        false => Path::new("/sys/class/infiniband_mad"),
    };
    let real = fs::canonicalize(tree.path(class.join(from)))?;
    let renamed = real.with_file_name(to);
    fs::rename(&real, &renamed)?;
    tree.remove(class.join(from));
    let root = fs::canonicalize(tree.path("/"))?;
    tree.link(
        class.join(to),
        Path::new("/").join(renamed.strip_prefix(root)?),
    );
    let nodes = tree.path("/dev/infiniband");
    Ok(fs::rename(nodes.join(from), nodes.join(to))?)
}

/// Puts character devices where the tree has plain files: a node counts only if
/// it is the device that the kernel says. Nothing opens them. Needs root.
///
/// # Errors
/// A node cannot be made.
pub fn make_nodes(tree: &Tree) -> Result<()> {
    let mut devices = vec![tree.path("/sys/class/misc/rdma_cm")];
    for class in ["infiniband_verbs", "infiniband_mad"] {
        // Not there on a machine without an HCA.
        let entries = fs::read_dir(tree.path(format!("/sys/class/{class}")));
        for entry in entries.into_iter().flatten() {
            devices.push(entry?.path());
        }
    }
    for device in devices {
        let Ok(number) = fs::read_to_string(device.join("dev")) else {
            continue;
        };
        let (major, minor) = number.trim().split_once(':').context("a device number")?;
        let name = device.file_name().context("a device's name")?;
        let path = tree.path("/dev/infiniband").join(name);
        fs::remove_file(&path)?;
        let number = makedev(major.parse()?, minor.parse()?);
        mknod(
            &path,
            SFlag::S_IFCHR,
            Mode::from_bits_truncate(0o666),
            number,
        )?;
    }
    Ok(())
}

/// A page of the daemon or the agent: its status and text.
///
/// # Errors
/// Nothing answers there.
pub fn page(address: SocketAddr, path: &str) -> Result<(u16, String)> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, text) = answer.split_once("\r\n\r\n").context("no head")?;
    let status = head.split(' ').nth(1).context("no status")?;
    Ok((status.parse()?, text.to_owned()))
}

/// A running daemon; dropping it kills it.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    log: PathBuf,
}

impl Daemon {
    /// Starts it with a log in this directory.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(mut command: Command, directory: &Path) -> Result<Self> {
        let mut log = tempfile::Builder::new();
        let log = log
            .prefix("daemon-")
            .suffix(".log")
            .tempfile_in(directory)?;
        let (log, path) = log.keep()?;
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("start the daemon")?;
        Ok(Daemon { child, log: path })
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// It has ended.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(
            Pid::from_raw(i32::try_from(self.child.id())?),
            signal,
        )?)
    }

    /// Its process ID.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It goes on.
    pub fn ended(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let end = Instant::now() + timeout;
        while Instant::now() < end {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        bail!(
            "the daemon still runs after {timeout:?}; it said: {}",
            self.log()
        )
    }

    /// What it has said so far.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Names of the sockets in a directory, but the kubelet's.
///
/// # Errors
/// It cannot be listed.
pub fn sockets(directory: &Path) -> Result<Vec<String>> {
    use std::os::unix::fs::FileTypeExt;
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_socket() && name != "kubelet.sock" {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}
