//! The plugin, called as a runtime calls it, on a store and a policy of its own.

use e2e::bin_under_test::product;
use e2e::host_root;
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The plugin under test.
pub(crate) fn plugin() -> Command {
    Command::new(product("rdma-ipam").unwrap())
}

/// A store, a policy and a state directory, gone when dropped.
pub(crate) struct Place {
    dir: tempfile::TempDir,
    policy: std::sync::Mutex<Value>,
    /// Whether the store is of type kubernetes.
    blocks: bool,
}

/// One attachment, and which node its calls come from.
#[derive(Clone)]
pub(crate) struct Attachment {
    pub(crate) container: String,
    pub(crate) interface: String,
    pub(crate) pod: Option<String>,
    pub(crate) node: String,
    /// Which machine's policy and state directory; the node's name unless set.
    pub(crate) machine: String,
    pub(crate) netns: String,
    /// More of `CNI_ARGS`.
    pub(crate) args: String,
}

/// What a call answered.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: Option<i32>,
    pub(crate) document: Value,
    pub(crate) stderr: String,
}

impl Attachment {
    pub(crate) fn new(container: &str) -> Self {
        Self {
            container: container.into(),
            interface: "net1".into(),
            pod: Some(format!("default/{container}")),
            node: "n1".into(),
            machine: "n1".into(),
            netns: "/run/netns/none".into(),
            args: String::new(),
        }
    }

    pub(crate) fn interface(mut self, name: &str) -> Self {
        self.interface = name.into();
        self
    }

    pub(crate) fn pod(mut self, pod: &str) -> Self {
        self.pod = Some(pod.into());
        self
    }

    /// The same of a machine that is called otherwise.
    pub(crate) fn node(mut self, node: &str) -> Self {
        self.node = node.into();
        self
    }

    pub(crate) fn args(mut self, args: &str) -> Self {
        self.args = args.into();
        self
    }

    pub(crate) fn netns(mut self, path: &Path) -> Self {
        self.netns = path.to_str().unwrap().into();
        self
    }
}

impl Place {
    /// With the default policy but for the directories.
    pub(crate) fn new() -> Self {
        Self::with(json!({}))
    }

    /// With keys of the policy.
    pub(crate) fn with(policy: Value) -> Self {
        let place = Self {
            // On a disk, as a store is.
            dir: tempfile::tempdir_in("/var/tmp").unwrap(),
            policy: std::sync::Mutex::default(),
            blocks: false,
        };
        place.set_policy(policy);
        place
    }

    /// A Kubernetes store of which each node has all addresses: what the cluster decides is
    /// tested elsewhere, and here that nothing else is different.
    pub(crate) fn with_all_blocks() -> Self {
        Self {
            blocks: true,
            ..Self::new()
        }
    }

    /// Gives a machine all addresses of the space that a configuration is for.
    fn grant(&self, who: &Attachment, config: &Value) {
        let name = ["/ipam/network_name", "/network_name"];
        let name = name.iter().find_map(|key| config.pointer(key)?.as_str());
        let directory = self.state_of(&who.machine).join("owned");
        std::fs::create_dir_all(&directory).unwrap();
        let file = name.map_or_else(|| "default".to_owned(), |name| format!("default+{name}"));
        let boot = node::identity::boot_id(Path::new("/proc"));
        let part = json!({"id": "7", "boot": boot});
        let mut owned = json!({"format": 1, "store": "default", "node": who.node,
            "parts": {"0.0.0.0/0": part, "::/0": part}});
        if let Some(name) = name {
            owned["networkName"] = json!(name);
        }
        // A name that is no file's is refused.
        let _ = std::fs::write(directory.join(file), owned.to_string());
    }

    /// The policy of every machine: the same but for the state directory.
    pub(crate) fn set_policy(&self, mut policy: Value) {
        let kind = if self.blocks { "kubernetes" } else { "file" };
        if policy.get("stores").is_none() {
            policy["stores"] = json!({"default": {"type": kind}});
        }
        *self.policy.lock().unwrap() = policy;
        self.write_policy("n1");
    }

    /// Makes a machine that has not called yet.
    pub(crate) fn make(&self, machine: &str) {
        if !self.policy_of(machine).exists() {
            self.write_policy(machine);
        }
    }

    fn write_policy(&self, machine: &str) {
        let mut policy = self.policy.lock().unwrap().clone();
        policy["stateDir"] = json!(self.state_of(machine));
        std::fs::create_dir_all(self.dir.path().join("etc")).unwrap();
        std::fs::write(self.policy_of(machine), policy.to_string()).unwrap();
        host_root::make(&self.root(machine)).unwrap();
    }

    /// The directory that stands for the root of a machine.
    pub(crate) fn root(&self, machine: &str) -> PathBuf {
        self.dir.path().join("host").join(machine)
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The policy file of the machine that n1 is.
    pub(crate) fn policy(&self) -> PathBuf {
        self.policy_of("n1")
    }

    pub(crate) fn policy_of(&self, machine: &str) -> PathBuf {
        self.dir.path().join("etc").join(machine)
    }

    /// The state directory of the machine that n1 is.
    pub(crate) fn state(&self) -> PathBuf {
        self.state_of("n1")
    }

    fn state_of(&self, machine: &str) -> PathBuf {
        self.dir.path().join("state").join(machine)
    }

    /// The leases of the machine that n1 is.
    pub(crate) fn leases(&self) -> PathBuf {
        host_root::leases(&self.root("n1"))
    }

    /// The environment of one call; the program is the caller's.
    pub(crate) fn environment(&self, command: &mut Command, verb: &str, who: &Attachment) {
        self.make(&who.machine);
        let mut args = String::from("IgnoreUnknown=1");
        if let Some((namespace, name)) = who.pod.as_deref().and_then(|pod| pod.split_once('/')) {
            args += &format!(";K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name}");
        }
        if !who.args.is_empty() {
            args += &format!(";{}", who.args);
        }
        command
            .env_clear()
            .env("RDMA_NETDEV_POLICY", self.policy_of(&who.machine))
            .env("RDMA_NODE_NAME", &who.node)
            .env("RDMA_HOST_ROOT", self.root(&who.machine))
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", &who.container)
            .env("CNI_IFNAME", &who.interface)
            .env("CNI_NETNS", &who.netns)
            .env("CNI_PATH", "/opt/cni/bin")
            .env("CNI_ARGS", args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
    }

    pub(crate) fn call(&self, verb: &str, who: &Attachment, config: &Value) -> Answer {
        if self.blocks {
            self.grant(who, config);
        }
        let mut command = plugin();
        self.environment(&mut command, verb, who);
        Answer::of(feed(command, config.to_string().as_bytes()))
    }

    pub(crate) fn add(&self, who: &Attachment, config: &Value) -> Answer {
        self.call("ADD", who, config)
    }

    pub(crate) fn del(&self, who: &Attachment, config: &Value) -> Answer {
        self.call("DEL", who, config)
    }

    /// `rdmactl addresses` with these arguments.
    pub(crate) fn admin(&self, arguments: &[&str]) -> Answer {
        Answer::of(self.admin_command(arguments).output().unwrap())
    }

    /// The same on another machine.
    pub(crate) fn admin_of(&self, machine: &str, arguments: &[&str]) -> Answer {
        let command = self.rdmactl(machine, "addresses", arguments).output();
        Answer::of(command.unwrap())
    }

    /// `rdmactl reclaim`.
    pub(crate) fn reclaim(&self, arguments: &[&str]) -> Answer {
        Answer::of(self.rdmactl("n1", "reclaim", arguments).output().unwrap())
    }

    pub(crate) fn admin_command(&self, arguments: &[&str]) -> Command {
        self.rdmactl("n1", "addresses", arguments)
    }

    fn rdmactl(&self, machine: &str, word: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(product("rdmactl").unwrap());
        command
            .env_clear()
            .env("RDMA_NETDEV_POLICY", self.policy_of(machine))
            .env("RDMA_NODE_NAME", machine)
            .env("RDMA_HOST_ROOT", self.root(machine))
            .arg(word)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// The addresses that are held, by the names of their files.
    pub(crate) fn held(&self) -> Vec<String> {
        let files = self.files("").into_iter();
        let mut held: Vec<String> = files
            .filter(|path| host_root::is_lease(path))
            .map(|path| {
                let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
                let (subnet, byte) = (name(path.parent().unwrap()), name(&path));
                match subnet.parse::<std::net::Ipv6Addr>() {
                    Ok(first) => {
                        let bits = first.to_bits() | u128::from(byte.parse::<u8>().unwrap());
                        std::net::Ipv6Addr::from_bits(bits).to_string()
                    }
                    Err(_) => format!("{subnet}.{byte}"),
                }
            })
            .collect();
        held.sort_by_key(|a| a.parse::<std::net::IpAddr>().unwrap());
        held
    }

    /// The records.
    pub(crate) fn records(&self) -> Vec<PathBuf> {
        self.files("records")
    }

    /// All files below a directory of the leases.
    pub(crate) fn files(&self, below: &str) -> Vec<PathBuf> {
        host_root::files(&self.leases().join(below))
    }
}

/// Changes keys of a container's record in place.
pub(crate) fn edit_lease(place: &Place, container: &str, keys: Value) {
    let records = place.records();
    let mut of_container = records
        .iter()
        .filter(|r| r.to_str().unwrap().contains(&format!("/{container}:")));
    let record = of_container.next().unwrap();
    let mut lease: Value = serde_json::from_slice(&std::fs::read(record).unwrap()).unwrap();
    lease
        .as_object_mut()
        .unwrap()
        .extend(keys.as_object().unwrap().clone());
    std::fs::write(record, lease.to_string()).unwrap();
}

/// Runs a command with something on its standard input.
pub(crate) fn feed(mut command: Command, stdin: &[u8]) -> Output {
    let mut child = command.spawn().unwrap();
    // A call that reads nothing has closed its end already.
    let _ = child.stdin.take().unwrap().write_all(stdin);
    child.wait_with_output().unwrap()
}

impl Answer {
    pub(crate) fn of(output: Output) -> Self {
        let stdout = String::from_utf8(output.stdout).unwrap();
        let document = match stdout.trim() {
            "" => Value::Null,
            text => serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned())),
        };
        let stderr = String::from_utf8(output.stderr).unwrap();
        Self {
            status: output.status.code(),
            document,
            stderr,
        }
    }

    pub(crate) fn ok(&self) -> bool {
        self.status == Some(0)
    }

    /// The addresses of an ADD's result, with prefix length.
    pub(crate) fn addresses(&self) -> Vec<String> {
        assert!(self.ok(), "{self:?}");
        let text = |ip: &Value| ip["address"].as_str().unwrap().to_owned();
        self.document["ips"]
            .as_array()
            .map(|ips| ips.iter().map(text).collect())
            .unwrap_or_default()
    }

    /// The one address of an ADD's result.
    pub(crate) fn address(&self) -> String {
        let addresses = self.addresses();
        assert_eq!(addresses.len(), 1, "{self:?}");
        addresses[0].clone()
    }

    /// Code and text of an error.
    pub(crate) fn error(&self) -> (u64, String) {
        assert!(!self.ok(), "{self:?}");
        let code = self.document["code"]
            .as_u64()
            .unwrap_or_else(|| panic!("{self:?}"));
        (
            code,
            format!("{} | {}", self.document["msg"], self.document["details"]),
        )
    }
}

/// A network configuration with an `ipam` object; the type chooses the profile.
pub(crate) fn network(kind: &str, mut ipam: Value) -> Value {
    ipam["type"] = json!(kind);
    json!({"cniVersion": "1.1.0", "name": "rail", "type": "macvlan", "ipam": ipam})
}

/// The common case: strict, one range.
pub(crate) fn range(range: &str) -> Value {
    network("rdma-ipam", json!({"range": range}))
}
