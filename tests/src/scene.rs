//! A host, a network that a tenant wrote, and a pod whose processes have `CAP_NET_ADMIN`: what
//! the hostile cases are written with.
//!
//! A case says what the host has, which network is asked for, what the pod does to its
//! interfaces, and what must hold then. The host's whole state is compared before and after.
//!
//! - `command`: how that is written; `running`: calls that have to end in time;
//!   `sprayer`: a process of a pod that forges netlink messages

mod command;
mod running;
mod sprayer;

pub use running::{CALL_TIMEOUT, Running, bounded};
pub use sprayer::Sprayer;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use hca_trees::{NetdevSpec, On, PciSpec, RdmaSpec, Tree};
use serde_json::{Value, json};

use crate::bin_under_test::product;
use crate::bpf_object;
use crate::cni::{Answer, Call};
use crate::cni_host::CniHost;
use crate::host_state::{State, state, unchanged};
use crate::netns::Netns;

/// CNI's code for a key or value that is not supported.
pub const UNSUPPORTED: u64 = 2;
/// CNI's code for an invalid network configuration.
pub const INVALID_NETWORK: u64 = 7;
/// CNI's code for an environment variable.
pub const INVALID_ENVIRONMENT: u64 = 4;
/// CNI's code for "later".
pub const TRY_AGAIN: u64 = 11;
/// CNI's code for what ADD would refuse, in an answer to STATUS.
pub const UNAVAILABLE: u64 = 50;
/// Our code for what the node's policy denies.
pub const DENIED: u64 = 101;
/// What the node keeps cannot be used.
pub const STATE: u64 = 105;

/// The PCI address of `nic0` on a host [with hardware](Scene::with_hardware).
pub const PCI: &str = "0000:3b:00.0";

/// The PCI address of `nicN` on a host [with several](Scene::with_nics).
#[must_use]
pub fn pci_of(number: u8) -> String {
    format!("0000:{:02x}:00.0", 0x3b + number)
}

/// A host with `nic0`, and a pod.
#[derive(Debug)]
pub struct Scene {
    /// The host; its `nic0` is one end of a veth pair, `peer0` the other.
    pub host: CniHost,
    /// The pod's namespace.
    pub pod: Netns,
    hardware: Option<Tree>,
}

impl Scene {
    /// A host whose policy allows what no kernel without RDMA can show: netdevs without an RDMA
    /// device, virtual ones, and no kubelet to ask.
    ///
    /// # Errors
    /// The plugin is not built, or the kernel has no veth.
    pub fn new() -> Result<Self> {
        let host = CniHost::new()?;
        let scene = Self {
            pod: quiet_pod(&host)?,
            host,
            hardware: None,
        };
        scene.allow(&json!({}))?;
        for section in ["xdp", "classifier"] {
            bpf_object::write(&scene.host.directory().join(section), section)?;
        }
        Ok(scene)
    }

    /// The same, with addresses, routes, rules, neighbours and settings as an administrator
    /// leaves them.
    ///
    /// # Errors
    /// As above.
    pub fn furnished() -> Result<Self> {
        let scene = Self::new()?;
        scene.on_host(&[
            "link set nic0 mtu 1450 txqueuelen 777",
            "link set nic0 alias rail-zero",
            "link property add dev nic0 altname enp59s0np0",
            "addr add 10.9.2.1/32 dev nic0",
            "route add 10.77.0.0/16 via 10.9.0.254 metric 50 mtu 1400",
            "route add default via 10.9.0.254 table 101",
            "route add fd77::/32 via fd09::fe metric 60",
            "rule add from 10.9.0.1 lookup 101 pref 1000",
            "rule add iif nic0 lookup 101 pref 1001",
            "neigh add 10.9.0.254 lladdr 02:00:00:00:00:fe dev nic0 nud permanent",
        ])?;
        scene.on_host(&[
            "sysctl ipv4/conf/nic0/rp_filter 2",
            "sysctl ipv4/conf/nic0/arp_ignore 1",
        ])?;
        Ok(scene)
    }

    /// A host on whose sysfs `nic0` is a port of a ConnectX at [`PCI`], with an RDMA device.
    ///
    /// # Errors
    /// As above.
    pub fn with_hardware() -> Result<Self> {
        let mut scene = Self::furnished()?;
        let root = scene.host_root();
        fs::create_dir(&root)?;
        let tree = Tree::new(&root);
        tree.pci(&PciSpec::MLX5);
        tree.rdma(&RdmaSpec {
            name: "mlx5_0",
            on: On::Pci(PCI),
            ..RdmaSpec::default()
        });
        fs::remove_dir_all(root.join("proc"))?;
        std::os::unix::fs::symlink("/proc", root.join("proc"))?;
        scene.hardware = Some(tree);
        scene.show_nic()?;
        Ok(scene)
    }

    /// A host on whose sysfs is what `lay` makes, as the machines of the field in `hca_trees::machine`
    /// are, with these netdevs. Its `/proc` shows no process.
    ///
    /// # Errors
    /// As above.
    pub fn laid(lay: impl FnOnce(&Tree), netdevs: &[&str]) -> Result<Self> {
        let mut scene = Self::new()?;
        let root = scene.host_root();
        fs::create_dir(&root)?;
        let tree = Tree::new(&root);
        lay(&tree);
        for name in netdevs {
            scene.host.add_nic(name, &format!("p-{name}"))?;
        }
        scene.hardware = Some(tree);
        scene.link_proc()?;
        Ok(scene)
    }

    /// Has `/proc` of the host's tree show no process: a container runtime that this machine runs is
    /// not the host's.
    ///
    /// # Errors
    /// The host has no tree.
    pub fn hide_processes(&self) -> Result<()> {
        let proc = self.host_root().join("proc");
        fs::remove_file(&proc)?;
        fs::create_dir(&proc)?;
        self.link_proc()
    }

    /// Links what `/proc` has beside processes into the tree, where the tree has nothing of the name.
    fn link_proc(&self) -> Result<()> {
        let proc = self.host_root().join("proc");
        fs::create_dir_all(&proc)?;
        for entry in fs::read_dir("/proc")? {
            let (name, path) = (entry?.file_name(), proc.clone());
            let is_process = name.to_string_lossy().bytes().all(|b| b.is_ascii_digit());
            if is_process || path.join(&name).symlink_metadata().is_ok() {
                continue;
            }
            std::os::unix::fs::symlink(PathBuf::from("/proc").join(&name), path.join(&name))?;
        }
        Ok(())
    }

    /// Lays `nic0` into the tree of files, at first or after [`Tree::hide_netdev`].
    ///
    /// # Errors
    /// The host has no hardware.
    pub fn show_nic(&self) -> Result<()> {
        self.tree()?.netdev(&NetdevSpec {
            name: "nic0",
            on: On::Pci(PCI),
            ..NetdevSpec::default()
        });
        Ok(())
    }

    /// A host with so many NICs, `nic0` and on: `nicN` is a port of the RDMA device `mlx5_N` at
    /// [`pci_of`] N and is up; from `nic1` on, it has 10.19.N.1/24.
    ///
    /// # Errors
    /// As above.
    pub fn with_nics(count: u8) -> Result<Self> {
        let scene = Self::with_hardware()?;
        for number in 1..count {
            let (name, address) = (format!("nic{number}"), pci_of(number));
            scene.host.add_nic(&name, &format!("peer{number}"))?;
            scene.on_host(&[&format!("addr add 10.19.{number}.1/24 dev {name}")])?;
            let root = address.trim_end_matches(":00.0");
            let tree = scene.tree()?;
            tree.pci(&PciSpec {
                address: &address,
                above: &format!("pci{root}/{root}:01.0"),
                ..PciSpec::MLX5
            });
            tree.rdma(&RdmaSpec {
                name: &format!("mlx5_{number}"),
                on: On::Pci(&address),
                node_guid: &format!("b859:9f03:0000:{number:04x}"),
                ..RdmaSpec::default()
            });
            tree.netdev(&NetdevSpec {
                name: &name,
                on: On::Pci(&address),
                ..NetdevSpec::default()
            });
        }
        Ok(scene)
    }

    /// The tree of files that stands for the host's root, where the host has hardware.
    ///
    /// # Errors
    /// It has none.
    pub fn tree(&self) -> Result<&Tree> {
        self.hardware.as_ref().context("a host without hardware")
    }

    /// Where that tree is.
    #[must_use]
    pub fn host_root(&self) -> PathBuf {
        self.host.directory().join("root")
    }

    /// Writes the policy with these keys of `allow` over those of [`Scene::new`]; null takes one
    /// away.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn allow(&self, keys: &Value) -> Result<()> {
        self.policy(keys, &json!({}))
    }

    /// The same, with these keys beside `allow`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn policy(&self, allow: &Value, keys: &Value) -> Result<()> {
        let mut all = json!({"nonRdma": true, "virtual": true, "unallocated": true});
        if let (Some(all), Some(keys)) = (all.as_object_mut(), allow.as_object()) {
            all.extend(keys.clone());
            all.retain(|_, value| !value.is_null());
        }
        let mut policy = keys.clone();
        if let Some(policy) = policy.as_object_mut() {
            policy.insert("allow".to_owned(), all);
        }
        self.host.policy(&policy)
    }

    /// Where the policy is.
    #[must_use]
    pub fn policy_file(&self) -> PathBuf {
        self.host.directory().join("policy.json")
    }

    /// Does this to the host, as its administrator.
    ///
    /// # Errors
    /// A command failed.
    pub fn on_host(&self, commands: &[&str]) -> Result<()> {
        self.perform(&self.host.netns, commands)
    }

    /// Does this inside the pod, as a process with `CAP_NET_ADMIN`.
    ///
    /// # Errors
    /// A command failed.
    pub fn in_pod(&self, commands: &[&str]) -> Result<()> {
        self.perform(&self.pod, commands)
    }

    /// Does this to a namespace.
    ///
    /// # Errors
    /// A command failed.
    pub fn perform(&self, netns: &Netns, commands: &[&str]) -> Result<()> {
        command::perform(self.host.directory(), netns, commands)
    }

    /// Another pod.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn another_pod(&self) -> Result<Netns> {
        quiet_pod(&self.host)
    }

    /// Puts a pod in the pod's place that has a user namespace of its own, in which a process sends
    /// these forgeries to all netlink sockets of the pod until it is dropped.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn sprayed(&mut self, forgeries: &[&str]) -> Result<Sprayer> {
        let sprayer = Sprayer::start(forgeries)?;
        self.pod = sprayer.pausing(|| {
            let pod = Netns::of_process("cnip", sprayer.pid())?;
            quiet(&pod)?;
            Ok(pod)
        })?;
        Ok(sprayer)
    }

    /// The call for `net1` of the pod's container `c1`.
    #[must_use]
    pub fn call(&self) -> Call {
        self.call_of(&self.pod, "c1", "net1")
    }

    /// The call for an interface of a container.
    #[must_use]
    pub fn call_of(&self, pod: &Netns, container: &str, ifname: &str) -> Call {
        let call = self.host.call(pod, container, ifname);
        if self.hardware.is_none() {
            return call;
        }
        call.env("RDMA_HOST_ROOT", self.host_root())
    }

    /// What is compared of the host: its network, attachments and leases.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn host_state(&self) -> Result<State> {
        let mut all = state(&self.host.netns)?;
        let left_behind = self.host.left_behind();
        if left_behind.is_empty() {
            return Ok(all);
        }
        all.extend(left_behind);
        for (what, keys) in [
            ("pods", ["sandbox", "interface", "network"]),
            ("addresses", ["container", "interface", "address"]),
        ] {
            for entry in self.listed(what)? {
                let values =
                    keys.map(|key| entry.get(key).cloned().unwrap_or_default().to_string());
                all.insert(format!("{what}: {}", values.join(" ")), String::new());
            }
        }
        Ok(all)
    }

    /// The attachments that `rdmactl pods` shows, or the leases that `rdmactl addresses` shows.
    ///
    /// # Errors
    /// It printed no list.
    pub fn listed(&self, what: &str) -> Result<Vec<Value>> {
        let mut list = self.administrators(Command::new(product("rdmactl")?), &[what, "--json"]);
        let answer = self.host.netns.enter(|| bounded(&mut list, b""))?;
        // Without a daemon and a kubelet, pods fails and shows what the journal has.
        let document: Value =
            serde_json::from_str(&answer.stdout).with_context(|| answer.stderr.clone())?;
        let key = match what {
            "addresses" => "leases",
            _ => "pods",
        };
        let list = document.get(key).and_then(Value::as_array).cloned();
        let mut list = list.with_context(|| format!("{what} lists no list"))?;
        list.retain(|entry| !entry["interface"].is_null());
        Ok(list)
    }

    /// A call of an administrator on the host.
    ///
    /// # Errors
    /// It has no end within [`CALL_TIMEOUT`], or panicked.
    pub fn tool(&self, program: &str, arguments: &[&str]) -> Result<Answer> {
        let command = self.host.netns.command(product(program)?);
        bounded(&mut self.administrators(command, arguments), b"")
    }

    /// A command with an administrator's environment.
    #[must_use]
    pub fn administrators(&self, mut command: Command, arguments: &[&str]) -> Command {
        command
            .args(arguments)
            .env_clear()
            .envs(std::env::vars_os().filter(|(name, _)| name == "PATH"))
            .env("RDMA_NETDEV_POLICY", self.policy_file())
            .env("RDMA_NODE_NAME", "node-1");
        let root = match self.hardware {
            Some(_) => self.host_root(),
            None => self.host.root(),
        };
        command.env("RDMA_HOST_ROOT", root);
        command
    }

    /// The configuration of network `rail0`, newest version, with these keys.
    #[must_use]
    pub fn network(&self, keys: &Value) -> Value {
        let mut config = self.host.config(&json!({"cniVersion": "1.1.0"}));
        if let (Some(config), Some(keys)) = (config.as_object_mut(), keys.as_object()) {
            config.extend(keys.clone());
        }
        config
    }

    /// That network takes `nic0` into the pod.
    #[must_use]
    pub fn moving(&self) -> Value {
        self.network(&json!({"attach": "move", "device": "nic0"}))
    }

    /// That network puts a macvlan with a lease of our own IPAM upon `nic0`.
    #[must_use]
    pub fn child(&self) -> Value {
        let ipam = self.host.own_ipam("10.9.0.0/24", "10.9.0.100", &json!({}));
        self.network(&json!({"attach": "macvlan", "master": "nic0", "ipam": ipam}))
    }

    /// ADD of `net1` must be refused with one of these codes and a message or details with all
    /// these words; host and pod must be as before, also after the DEL that a runtime sends then.
    ///
    /// # Errors
    /// Something else happened.
    pub fn refuses(&self, network: &Value, codes: &[u64], words: &[&str]) -> Result<()> {
        self.refuses_call(&self.call(), network, codes, words)
    }

    /// The same for another call.
    ///
    /// # Errors
    /// Something else happened.
    pub fn refuses_call(
        &self,
        call: &Call,
        network: &Value,
        codes: &[u64],
        words: &[&str],
    ) -> Result<()> {
        let (host, pod) = (self.host_state()?, state(&self.pod)?);
        let answer = answer_of(call, "ADD", network)?;
        refusal(&answer, codes, words)?;
        unchanged(&host, || self.host_state(), "after the refused ADD")?;
        unchanged(
            &pod,
            || state(&self.pod),
            "in the pod, after the refused ADD",
        )?;
        answer_of(call, "DEL", network)?.success().context("DEL")?;
        unchanged(&host, || self.host_state(), "after DEL")?;
        unchanged(&pod, || state(&self.pod), "in the pod, after DEL")
    }

    /// ADD, then the pod does this to its interface, then DEL: the host must be as before.
    ///
    /// # Errors
    /// It is not.
    pub fn returns(&self, network: &Value, pod: &[&str]) -> Result<()> {
        let before = self.host_state()?;
        answer_of(&self.call(), "ADD", network)?
            .success()
            .context("ADD")?;
        self.in_pod(pod).context("in the pod")?;
        self.del_returns(network, &before)
    }

    /// DEL must succeed, once more, too, and leave the host as before and no `net1` in the pod.
    ///
    /// # Errors
    /// It does not.
    pub fn del_returns(&self, network: &Value, before: &State) -> Result<()> {
        for when in ["after DEL", "after another DEL"] {
            answer_of(&self.call(), "DEL", network)?
                .success()
                .context(when)?;
            unchanged(before, || self.host_state(), when)?;
            ensure!(
                self.pod.ip("link show net1").is_err(),
                "net1 is left in the pod {when}"
            );
        }
        Ok(())
    }

    /// Either ADD is refused and the message has one of these words, with nothing changed; or
    /// after ADD and DEL the host is as before.
    ///
    /// # Errors
    /// Neither.
    pub fn returns_or_refuses(&self, network: &Value, words: &[&str]) -> Result<()> {
        let before = self.host_state()?;
        let answer = answer_of(&self.call(), "ADD", network)?;
        if !answer.status.success() {
            let (code, message) = answer.refusal()?;
            let lowered = message.to_lowercase();
            ensure!(
                words
                    .iter()
                    .any(|word| lowered.contains(&word.to_lowercase())),
                "refused with {code}, but the message names none of {words:?}: {message}"
            );
            unchanged(&before, || self.host_state(), "after the refused ADD")?;
        }
        self.del_returns(network, &before)
    }

    /// What the kernel does with hardware when the pod's namespace ends: it comes back to the
    /// host, down, without addresses, under the name it has in the pod.
    ///
    /// # Errors
    /// `ip` failed.
    pub fn pod_dies(&self, ifname: &str) -> Result<()> {
        self.in_pod(&[&format!(
            "link set {ifname} netns {}",
            self.host.netns.name()
        )])?;
        self.pod.delete()
    }
}

/// A pod whose own links have their link-local addresses at once.
fn quiet_pod(host: &CniHost) -> Result<Netns> {
    let pod = host.pod()?;
    quiet(&pod)?;
    Ok(pod)
}

fn quiet(pod: &Netns) -> Result<()> {
    pod.enter(|| {
        Ok(fs::write(
            "/proc/sys/net/ipv6/conf/default/accept_dad",
            "0",
        )?)
    })
}

/// One call with a configuration.
///
/// # Errors
/// It has no end within [`CALL_TIMEOUT`], or panicked.
pub fn answer_of(call: &Call, command: &str, network: &Value) -> Result<Answer> {
    answer_to(call, command, network.to_string().as_bytes())
}

/// One call with these bytes as configuration.
///
/// # Errors
/// It has no end within [`CALL_TIMEOUT`], or panicked.
pub fn answer_to(call: &Call, command: &str, stdin: &[u8]) -> Result<Answer> {
    bounded(&mut call.command(command), stdin).with_context(|| command.to_owned())
}

/// Code and message with details of a refused call.
///
/// # Errors
/// It succeeded, gave another code, or does not say these words.
pub fn refusal(answer: &Answer, codes: &[u64], words: &[&str]) -> Result<(u64, String)> {
    let (code, message) = answer.refusal()?;
    let document: Value = serde_json::from_str(&answer.stdout)?;
    let details = document
        .get("details")
        .and_then(Value::as_str)
        .unwrap_or_default();
    let text = format!("{message} {details}");
    ensure!(
        codes.is_empty() || codes.contains(&code),
        "code {code} and not one of {codes:?}: {text}"
    );
    for word in words {
        let known = text.to_lowercase().contains(&word.to_lowercase());
        ensure!(known, "the refusal ({code}) does not say {word:?}: {text}");
    }
    ensure!(code != 0, "code 0 is no error: {text}");
    Ok((code, text))
}

/// A link's MAC address, as `ip` writes it.
///
/// # Errors
/// There is no such link.
pub fn mac_of(netns: &Netns, link: &str) -> Result<String> {
    let links = netns.ip_json(&format!("link show dev {link}"))?;
    let address = links
        .get(0)
        .and_then(|link| link.get("address"))
        .and_then(Value::as_str);
    address
        .map(str::to_owned)
        .with_context(|| format!("{link} has no address"))
}

/// A link's index.
///
/// # Errors
/// There is no such link.
pub fn index_of(netns: &Netns, link: &str) -> Result<u64> {
    let links = netns.ip_json(&format!("link show dev {link}"))?;
    let index = links
        .get(0)
        .and_then(|link| link.get("ifindex"))
        .and_then(Value::as_u64);
    index.with_context(|| format!("{link} has no index"))
}

/// `cases! { fact: Need, Need => expression; … }`: a module's cases, each an expression that is
/// a `Result<()>`, named after the fact that it proves.
#[macro_export]
macro_rules! cases {
    ($($name:ident $(: $($need:ident $(($argument:expr))?),*)? => $body:expr;)*) => {
        pub(crate) const CASES: &[$crate::harness::Case] = {
            $(fn $name() -> anyhow::Result<()> { $body })*
            &[$($crate::case!($name, Root, Netns $($(, $need $(($argument))?)*)?)),*]
        };
    };
}
