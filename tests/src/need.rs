//! What a case needs of the machine it runs on.
//!
//! A need is probed once per run, by doing the thing in a namespace of its
//! own, not by reading version numbers.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::{env, thread};

use nix::sched::{CloneFlags, unshare};
use nix::unistd::Uid;

/// Where Debian puts the reference CNI plugins.
pub const REFERENCE_PLUGINS: &str = "/usr/lib/cni";

/// Something a case cannot do without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Need {
    /// The effective user is root.
    Root,
    /// Network namespaces can be made, and `ip` is there to fill them.
    Netns,
    /// Mount namespaces can be made.
    MountNamespace,
    /// User namespaces can be made, each with a network namespace of its own.
    UserNamespace,
    /// The kernel has macvlan links.
    Macvlan,
    /// The kernel has ipvlan links.
    Ipvlan,
    /// The kernel has vlan links.
    Vlan,
    /// The kernel has dummy links.
    Dummy,
    /// The kernel has VRF devices.
    Vrf,
    /// The kernel has links of this kind, which need no further arguments.
    Kind(&'static str),
    /// The kernel shows at least one RDMA device.
    RdmaDevice,
    /// FUSE file systems can be mounted.
    Fuse,
    /// `strace` is there and may trace (fault injection).
    Strace,
    /// Debian's reference CNI plugins are installed in [`REFERENCE_PLUGINS`].
    ReferencePlugins,
    /// containerd answers on its usual socket.
    Containerd,
    /// `tests/api-server/build` has made an API server, and `openssl` and `curl` are there.
    ApiServer,
    /// A real peer named by an environment variable.
    Peer(&'static str),
}

impl Need {
    /// True for what the CI machine must have: there, a case skipped for lack of it is a failure.
    #[must_use]
    pub fn is_due_in_ci(self) -> bool {
        matches!(
            self,
            Self::Root
                | Self::Netns
                | Self::MountNamespace
                | Self::UserNamespace
                | Self::Macvlan
                | Self::Strace
                | Self::ReferencePlugins
        )
    }

    /// Why this machine does not serve, or nothing if it does.
    #[must_use]
    pub fn unmet(self) -> Option<String> {
        static SEEN: OnceLock<Mutex<HashMap<Need, Option<String>>>> = OnceLock::new();
        let mut seen = SEEN
            .get_or_init(Mutex::default)
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        seen.entry(self)
            .or_insert_with(|| self.probe().err())
            .clone()
    }

    fn probe(self) -> Result<(), String> {
        match self {
            Self::Root if Uid::effective().is_root() => Ok(()),
            Self::Root => Err("not root".to_owned()),
            Self::Netns => {
                in_fresh_namespace(CloneFlags::CLONE_NEWNET, "network namespace", || {
                    output("ip", &["link", "set", "lo", "up"])
                })
            }
            Self::MountNamespace => {
                in_fresh_namespace(CloneFlags::CLONE_NEWNS, "mount namespace", || Ok(()))
            }
            Self::UserNamespace => {
                output("unshare", &["--user", "--map-root-user", "--net", "true"])
            }
            Self::Macvlan => child_link("macvlan", &["link", "veth0", "type", "macvlan"]),
            Self::Ipvlan => child_link("ipvlan", &["link", "veth0", "type", "ipvlan"]),
            Self::Vlan => child_link("vlan", &["link", "veth0", "type", "vlan", "id", "7"]),
            Self::Dummy => child_link("dummy", &["type", "dummy"]),
            Self::Kind("macsec") => child_link("macsec", &["link", "veth0", "type", "macsec"]),
            Self::Kind(kind) => child_link(kind, &["type", kind]),
            Self::Vrf => child_link("vrf", &["type", "vrf", "table", "7"]),
            Self::RdmaDevice => {
                let devices = std::fs::read_dir("/sys/class/infiniband");
                match devices.map(|mut entries| entries.next().is_some()) {
                    Ok(true) => Ok(()),
                    _ => Err("no RDMA device in /sys/class/infiniband".to_owned()),
                }
            }
            Self::Fuse => OpenOptions::new()
                .read(true)
                .write(true)
                .open("/dev/fuse")
                .map(drop)
                .map_err(|error| format!("/dev/fuse: {error}")),
            Self::Strace => output("strace", &["-f", "-o", "/dev/null", "true"]),
            Self::ReferencePlugins => {
                let missing: Vec<_> = ["bridge", "macvlan", "host-device", "host-local", "static"]
                    .into_iter()
                    .filter(|name| !Path::new(REFERENCE_PLUGINS).join(name).is_file())
                    .collect();
                if missing.is_empty() {
                    return Ok(());
                }
                Err(format!("no {} in {REFERENCE_PLUGINS}", missing.join(", ")))
            }
            Self::Containerd => {
                let socket = "/run/containerd/containerd.sock";
                std::os::unix::net::UnixStream::connect(socket)
                    .map(drop)
                    .map_err(|error| format!("containerd on {socket}: {error}"))
            }
            Self::ApiServer => {
                output("openssl", &["version"])?;
                output("curl", &["--version"])?;
                crate::api_server::programs()
                    .map(drop)
                    .map_err(|error| format!("{error:#}"))
            }
            Self::Peer(variable) => match env::var_os(variable) {
                Some(_) => Ok(()),
                None => Err(format!("{variable} is not set")),
            },
        }
    }
}

fn child_link(kind: &str, arguments: &[&str]) -> Result<(), String> {
    in_fresh_namespace(CloneFlags::CLONE_NEWNET, "network namespace", || {
        output(
            "ip",
            &[
                "link", "add", "veth0", "type", "veth", "peer", "name", "veth1",
            ],
        )?;
        let add: Vec<_> = ["link", "add", "child0"]
            .iter()
            .chain(arguments)
            .copied()
            .collect();
        output("ip", &add).map_err(|error| format!("no {kind} links: {error}"))
    })
}

/// Runs `probe` on a thread of its own in new namespaces, which end with it.
fn in_fresh_namespace(
    flags: CloneFlags,
    what: &str,
    probe: impl FnOnce() -> Result<(), String> + Send,
) -> Result<(), String> {
    thread::scope(|scope| {
        let probing = scope.spawn(|| {
            unshare(flags).map_err(|errno| format!("no new {what}: {errno}"))?;
            probe()
        });
        probing
            .join()
            .unwrap_or_else(|_| Err(format!("the probe of {what} panicked")))
    })
}

fn output(program: &str, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.lines().next().unwrap_or("no message");
    Err(format!("`{program} {}`: {said}", arguments.join(" ")))
}
