//! A host for calls of `rdma-netdev`: a namespace with a NIC, pods beside it, a policy, a state
//! directory, and a picture of everything an attachment could leave behind.
//!
//! The NIC is one end of a veth pair, `nic0`; the other end, `peer0`, stands for the switch. The
//! policy therefore allows netdevs without an RDMA device, and the IPAM programs of the cases, unless a
//! case writes another.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::bin_under_test;
use crate::cni::Call;
use crate::host_root;
use crate::need::REFERENCE_PLUGINS;
use crate::netns::Netns;

/// The IPAM programs that the cases' policy allows: the defaults, those of the reference plugins that
/// some cases need, and `canned`, the scripts of others.
const IPAM: [&str; 4] = ["rdma-ipam", "static", "host-local", "canned"];

/// A host with `nic0` (10.9.0.1/24 and `fd09::1/64`), and what belongs to it.
#[derive(Debug)]
pub struct CniHost {
    /// The host's namespace.
    pub netns: Netns,
    directory: TempDir,
    plugin: PathBuf,
}

impl CniHost {
    /// Sets one up.
    ///
    /// # Errors
    /// The plugin is not built, or the kernel has no veth.
    pub fn new() -> Result<Self> {
        let netns = Netns::new("cnih")?;
        let mut host = Self {
            netns,
            directory: TempDir::new()?,
            plugin: bin_under_test::product("rdma-netdev")?,
        };
        host.add_nic("nic0", "peer0")?;
        for command in [
            "addr add 10.9.0.1/24 dev nic0",
            "-6 addr add fd09::1/64 dev nic0 nodad",
        ] {
            host.netns.ip(command)?;
        }
        // The kernel makes the local route of an IPv6 address a moment later.
        let started = Instant::now();
        while !host
            .netns
            .ip("-6 route show table local dev nic0")?
            .contains("fd09::1")
        {
            if started.elapsed() > Duration::from_secs(10) {
                bail!("nic0 has no local route of its address");
            }
            thread::sleep(Duration::from_millis(10));
        }
        host.policy(&json!({}))?;
        host_root::make(&host.root())?;
        host.netns.set_root(host.root());
        Ok(host)
    }

    /// The directory that stands for the host's root.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.directory().join("host")
    }

    /// One more NIC, up, with its link-local address settled.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn add_nic(&self, name: &str, peer: &str) -> Result<()> {
        self.netns
            .ip(&format!("link add {name} type veth peer name {peer}"))?;
        for link in [name, peer] {
            // No detection: a picture taken at once has no tentative address in it.
            let path = format!("/proc/sys/net/ipv6/conf/{link}/accept_dad");
            self.netns
                .enter(|| fs::write(&path, "0").context(path.clone()))?;
            self.netns.ip(&format!("link set {link} up"))?;
        }
        let started = Instant::now();
        // The kernel makes the local route of an address a moment after it.
        let has_route = |link: &str| -> Result<bool> {
            let routes = format!("-6 route show table local dev {link}");
            Ok(self.netns.ip(&routes)?.contains("local fe80"))
        };
        while !(has_route(name)? && has_route(peer)?) {
            if started.elapsed() > Duration::from_secs(10) {
                bail!("{name} gets no link-local address");
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// A directory of the case's own.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Where attachments are journalled.
    #[must_use]
    pub fn state(&self) -> PathBuf {
        self.directory().join("state")
    }

    /// Writes the policy: the defaults of these tests, with `keys` over them.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn policy(&self, keys: &Value) -> Result<()> {
        let mut policy = json!({
            "stateDir": self.state(),
            "allow": {"nonRdma": true, "virtual": true, "unallocated": true, "ipam": IPAM},
        });
        if let (Some(policy), Some(keys)) = (policy.as_object_mut(), keys.as_object()) {
            policy.extend(keys.clone());
        }
        fs::write(self.directory().join("policy.json"), policy.to_string())
            .context("write the policy")
    }

    /// A pod's namespace.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn pod(&self) -> Result<Netns> {
        Netns::new("cnip")
    }

    /// A call for an interface of a pod.
    #[must_use]
    pub fn call(&self, pod: &Netns, container: &str, ifname: &str) -> Call {
        let mut call = Call::new(&self.plugin, container, pod.path(), ifname)
            .on_host(&self.netns)
            .env("RDMA_NETDEV_POLICY", self.directory().join("policy.json"))
            .env("RDMA_NODE_NAME", "node-1")
            .env("RDMA_HOST_ROOT", self.root());
        call.path.push(":");
        call.path.push(REFERENCE_PLUGINS);
        call
    }

    /// A configuration of network `rail0`, version 1.0.0, with these keys over it.
    #[must_use]
    pub fn config(&self, keys: &Value) -> Value {
        let mut config = json!({"cniVersion": "1.0.0", "name": "rail0", "type": "rdma-netdev"});
        if let (Some(config), Some(keys)) = (config.as_object_mut(), keys.as_object()) {
            config.extend(keys.clone());
        }
        config
    }

    /// Our own IPAM, in the plugin's process, for a range or several.
    #[must_use]
    pub fn own_ipam(&self, range: &str, first: &str, more: &Value) -> Value {
        let mut ipam = json!({"type": "rdma-ipam", "range": range, "range_start": first});
        if let (Some(ipam), Some(more)) = (ipam.as_object_mut(), more.as_object()) {
            ipam.extend(more.clone());
        }
        ipam
    }

    /// The reference plugin `host-local` for a subnet or two, with its files in the case's directory.
    #[must_use]
    pub fn host_local(&self, ranges: &[(&str, &str)], more: &Value) -> Value {
        let ranges: Vec<Value> = ranges
            .iter()
            .map(|(subnet, start)| json!([{"subnet": subnet, "rangeStart": start}]))
            .collect();
        let mut ipam = json!({
            "type": "host-local",
            "dataDir": self.directory().join("host-local"),
            "ranges": ranges,
        });
        if let (Some(ipam), Some(more)) = (ipam.as_object_mut(), more.as_object()) {
            ipam.extend(more.clone());
        }
        ipam
    }

    /// Everything an attachment could leave: links with MTU, MAC, flags and names, addresses,
    /// routes of all tables, rules, permanent neighbours, the NIC's sysctls, leases, journal.
    ///
    /// # Errors
    /// `ip` failed.
    pub fn picture(&self) -> Result<BTreeMap<String, String>> {
        self.wait_for_local_routes()?;
        let mut picture = BTreeMap::new();
        for link in list(&self.netns.ip_json("link show")?) {
            let name = text(&link, "ifname");
            for key in [
                "mtu",
                "address",
                "txqlen",
                "ifalias",
                "altnames",
                "flags",
                "promiscuity",
            ] {
                picture.insert(format!("link {name} {key}"), field(&link, key).to_string());
            }
        }
        for link in list(&self.netns.ip_json("addr show")?) {
            for address in list(field(&link, "addr_info")) {
                let key = format!(
                    "address {} {}",
                    text(&link, "ifname"),
                    text(&address, "local")
                );
                let fields = address.as_object().into_iter().flatten();
                // Whether detection was skipped is not part of what an address is.
                let compared: BTreeMap<&String, &Value> = fields
                    .filter(|(key, _)| !["nodad", "tentative", "protocol"].contains(&key.as_str()))
                    .collect();
                picture.insert(key, json!(compared).to_string());
            }
        }
        for family in ["-4", "-6"] {
            for route in self
                .netns
                .ip(&format!("{family} route show table all"))?
                .lines()
            {
                // The kernel makes it when it is done with detection, some time after the address.
                if !route.starts_with("local fe80:") {
                    picture.insert(format!("route {family} {}", route.trim()), String::new());
                }
            }
            for rule in self.netns.ip(&format!("{family} rule show"))?.lines() {
                picture.insert(format!("rule {family} {}", rule.trim()), String::new());
            }
            for neighbour in self
                .netns
                .ip(&format!("{family} neigh show nud permanent"))?
                .lines()
            {
                picture.insert(format!("neighbour {}", neighbour.trim()), String::new());
            }
        }
        let mut sysctls = self.netns.command("sh");
        sysctls.args([
            "-c",
            "grep -rs '' /proc/sys/net/ipv4/conf/nic0 /proc/sys/net/ipv6/conf/nic0; true",
        ]);
        for line in crate::netns::run(&mut sysctls)?.lines() {
            let (key, value) = line.split_once(':').unwrap_or((line, ""));
            picture.insert(key.to_owned(), value.to_owned());
        }
        picture.extend(self.left_behind());
        Ok(picture)
    }

    /// The kernel makes the local route of an IPv6 address a moment after the address, from a work
    /// queue (`net/ipv6/addrconf.c`, `addrconf_dad_completed`). A route that does not come is seen in
    /// the picture.
    fn wait_for_local_routes(&self) -> Result<()> {
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(5) {
            let routes = self.netns.ip("-6 route show table local")?;
            let links = list(&self.netns.ip_json("-6 addr show up")?);
            let up = links
                .iter()
                .filter(|link| text(link, "operstate") == "UP")
                .map(|link| (text(link, "ifname"), list(field(link, "addr_info"))));
            let missing = up.flat_map(|(link, addresses)| {
                addresses
                    .into_iter()
                    .filter(|address| {
                        let route = format!("local {} dev {link} ", text(address, "local"));
                        !routes.contains(&route)
                    })
                    .collect::<Vec<_>>()
            });
            if missing.count() == 0 {
                break;
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Journal, claims and leases there are.
    #[must_use]
    pub fn left_behind(&self) -> BTreeMap<String, String> {
        let mut found = BTreeMap::new();
        for (what, directory) in [
            ("journal", self.state().join("attachments")),
            ("claim", self.state().join("devices")),
            ("host-local", self.directory().join("host-local/rail0")),
        ] {
            for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                if name != "lock" && !name.starts_with("last_reserved_ip") {
                    found.insert(format!("{what} {name}"), String::new());
                }
            }
        }
        for root in [self.root(), self.directory().join("root")] {
            for path in host_root::files(&host_root::leases(&root)) {
                if host_root::is_lease(&path) || path.to_string_lossy().contains("/records/") {
                    found.insert(format!("lease {}", path.display()), String::new());
                }
            }
        }
        found
    }
}

/// The differences between two pictures, a line each; none when they are the same.
#[must_use]
pub fn differences(
    before: &BTreeMap<String, String>,
    after: &BTreeMap<String, String>,
) -> Vec<String> {
    let mut lines = Vec::new();
    for (key, value) in before {
        match after.get(key) {
            None => lines.push(format!("gone: {key} {value}")),
            Some(now) if now != value => lines.push(format!("changed: {key}: {value} -> {now}")),
            Some(_) => {}
        }
    }
    lines.extend(
        after
            .keys()
            .filter(|key| !before.contains_key(*key))
            .map(|key| format!("new: {key}")),
    );
    lines
}

/// Fails with the differences between two pictures.
///
/// # Errors
/// There are some.
pub fn same(
    before: &BTreeMap<String, String>,
    after: &BTreeMap<String, String>,
    when: &str,
) -> Result<()> {
    let lines = differences(before, after);
    if lines.is_empty() {
        return Ok(());
    }
    bail!(
        "{when}, the host is not as before:\n  {}",
        lines.join("\n  ")
    )
}

fn list(value: &Value) -> Vec<Value> {
    value.as_array().cloned().unwrap_or_default()
}

fn field<'a>(value: &'a Value, key: &str) -> &'a Value {
    value.get(key).unwrap_or(&Value::Null)
}

fn text(value: &Value, key: &str) -> String {
    value
        .get(key)
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_owned()
}
