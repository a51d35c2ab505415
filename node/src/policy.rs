//! The node's policy, `/etc/rdma-netdev/policy.json`: what root lets network
//! configurations do here. Read by both CNI binaries and by the daemon.
//!
//! The CNI plugins run as root on input that a namespace's user may write, so
//! which netdevs may be taken, which directories hold leases and where logs go
//! stand in a file that is trusted ([`crate::trust`]).
//!
//! A missing file means the defaults. A wrong one stops ADD and STATUS; DEL
//! uses [`Policy::load_for_release`], which takes from a wrong file whatever
//! can still be read, because an attachment must come down even then.
//!
//! Nothing here writes.

mod error;
mod rails;
mod read;
mod selector;

pub use error::PolicyError;
pub use rails::{MAX_RAIL, RailCandidate, Rails};
pub use selector::{Candidate, Selector};

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cni_wire::json::Value;
use ipnetwork::IpNetwork;
use serde::Deserialize;

use crate::trust;

/// Where the policy lies unless `RDMA_NETDEV_POLICY` says otherwise.
pub const DEFAULT_PATH: &str = "/etc/rdma-netdev/policy.json";
/// Where container runtimes read CDI files, unless `cdiDir` says otherwise.
pub const DEFAULT_CDI_DIRECTORY: &str = "/var/run/cdi";
/// IEEE 802.1Q reserves 4095.
pub const MAX_VLAN: u16 = 4094;
/// A policy is a page of text; more is a mistake.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The node's policy. Every field has a default; see [`Policy::default`].
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Policy {
    /// Always 1.
    #[serde(deserialize_with = "read::version")]
    pub version: u64,
    /// `node`: this node's name in leases and logs. See [`Policy::node_name`].
    #[serde(deserialize_with = "read::name")]
    pub node: Option<String>,
    /// `stateDir`: where attachments are journalled.
    #[serde(deserialize_with = "read::absolute_path")]
    pub state_dir: PathBuf,
    /// `cdiDir`: the container runtime's directory of CDI files, which the daemon writes to.
    #[serde(deserialize_with = "read::absolute_path")]
    pub cdi_dir: PathBuf,
    /// `stores`: the lease stores a network configuration may name.
    #[serde(deserialize_with = "read::stores")]
    pub stores: BTreeMap<String, StorePolicy>,
    /// `ipam`: how addresses are chosen.
    pub ipam: Ipam,
    /// `allow`: which netdevs may be taken or used as a master.
    pub allow: Allow,
    /// `rails`: which rail of the fabric each NIC is on.
    pub rails: Rails,
    /// `block`: the part of the fabric that this node is in, a label for schedulers.
    #[serde(deserialize_with = "read::label")]
    pub block: Option<String>,
    /// `pkeys`: InfiniBand partitions by the names that networks have for them.
    #[serde(deserialize_with = "read::partition_names")]
    pub pkeys: BTreeMap<String, u16>,
    /// `fabricAddresses`: whose the addresses of RDMA NICs are that have a lifetime.
    pub fabric_addresses: FabricAddresses,
    /// `log`: where the CNI binaries log to; `None` is stderr.
    pub log: Log,
}

/// Whose an address is that a NIC has for a time, by DHCP.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FabricAddresses {
    /// The host's, whose client renews it: it does not go into a pod. The key is left out for it.
    #[default]
    #[serde(skip)]
    Leased,
    /// `"static"`: the node's for as long as it lives. It goes into a pod without a lifetime.
    Static,
}

/// A store of the policy: who owns which addresses.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "read::StoreKeys")]
pub struct StorePolicy {
    /// `type`, with the keys that only it has.
    pub kind: StoreKind,
    /// Which networks may use it.
    pub bounds: StoreBounds,
}

impl StorePolicy {
    /// With default keys.
    #[must_use]
    pub fn of(kind: StoreKind) -> Self {
        Self {
            kind,
            bounds: StoreBounds::default(),
        }
    }
}

/// Whom the addresses of a store are unique among.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreKind {
    /// `"type": "file"`: the pods of this node.
    Node,
    /// The same with a `directory`: the nodes that mount it. Its documents say which node owns which
    /// addresses.
    Directory(PathBuf),
    /// `"type": "kubernetes"`: the nodes of the cluster. Documents in its API say which node owns which
    /// addresses.
    Kubernetes,
}

/// Which ranges and network names a store may be used for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoreBounds {
    /// `ranges`: networks that a range must lie in; `None` is any.
    pub ranges: Option<Vec<IpNetwork>>,
    /// `networkNames`: what `network_name` may be; the empty one stands for none.
    /// `None` is any.
    pub network_names: Option<Vec<String>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Ipam {
    /// `profile`; `None` leaves it to the configuration's `type`.
    pub profile: Option<Profile>,
    /// `cooldown`: how long a freed address rests before it is given again.
    #[serde(deserialize_with = "read::cooldown")]
    pub cooldown: Duration,
    /// `flatFile`: where whereabouts' flat file is; `None` searches where whereabouts does.
    #[serde(deserialize_with = "read::absolute_path")]
    pub flat_file: Option<PathBuf>,
}

impl Default for Ipam {
    fn default() -> Self {
        Ipam {
            profile: None,
            cooldown: Duration::from_secs(30),
            flat_file: None,
        }
    }
}

/// How a range is read: as whereabouts does, or without its traps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// Mistakes are refused, the gateway is never given to a pod, /31, /127
    /// and single addresses are usable.
    Strict,
    Compatible,
}

/// `allow` of the policy: the default takes only netdevs of RDMA devices that
/// carry neither the default route nor an address of the node, and gives to a
/// pod only what the kubelet allocated to it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Allow {
    /// `nonRdma`: netdevs without an RDMA device are allowed too.
    pub non_rdma: bool,
    /// `uplinks`: netdevs by which the node reaches the outside are allowed too.
    pub uplinks: bool,
    /// `netdevs`: when present, only netdevs that one of these selects.
    #[serde(deserialize_with = "read::selectors")]
    pub netdevs: Option<Vec<Selector>>,
    /// `ipam`: the programs that a network's `ipam.type` may name.
    #[serde(deserialize_with = "read::ipam_programs")]
    pub ipam: Vec<String>,
    /// `passthru`: macvlans of mode `passthru`, with which a pod changes the
    /// MAC address of the host's netdev.
    pub passthru: bool,
    /// `virtual`: links without a hardware parent (VLANs, veths, dummies) may be
    /// moved into a pod.
    #[serde(rename = "virtual")]
    pub virtual_links: bool,
    /// `unallocated`: a pod may be given what the kubelet did not allocate to
    /// it. For runtimes without a kubelet.
    pub unallocated: bool,
    /// `requestExcluded`: a pod may ask for an address that its network's range
    /// excludes, or that is beyond the range's bounds.
    pub request_excluded: bool,
    /// `pkeys`: when present, only children in one of these InfiniBand partitions.
    #[serde(deserialize_with = "read::partitions")]
    pub pkeys: Option<Vec<u16>>,
    /// `inactivePartitions`: IPoIB children without a carrier, also in a partition that their port
    /// is not a member of.
    pub inactive_partitions: bool,
    /// `vf`: what a network may set of a VF through its PF.
    pub vf: AllowVf,
}

/// `allow.vf`, by the names that the keys have in a network. The default allows nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct AllowVf {
    #[serde(deserialize_with = "read::guids")]
    pub guid: Vec<RangeInclusive<u64>>,
    /// 0 is for a VF without a VLAN.
    #[serde(deserialize_with = "read::vlans")]
    pub vlan: Vec<RangeInclusive<u16>>,
    #[serde(rename = "vlanQoS")]
    pub vlan_qos: bool,
    #[serde(rename = "vlanProto")]
    pub vlan_proto: bool,
    pub trust: bool,
    pub spoofchk: bool,
    pub link_state: bool,
    pub min_tx_rate: bool,
    pub max_tx_rate: bool,
    pub mac: bool,
}

/// A port's GUID as people write it, in groups of two or four digits or without groups; not all zeros
/// or ones.
#[must_use]
pub fn port_guid(text: &str) -> Option<u64> {
    let width = match text.len() {
        16 => 16,
        19 => 4,
        23 => 2,
        _ => return None,
    };
    let fits = |group: &str| group.len() == width && group.bytes().all(|b| b.is_ascii_hexdigit());
    let guid = u64::from_str_radix(&text.replace(':', ""), 16).ok()?;
    let is_one = !matches!(guid, 0 | u64::MAX);
    (is_one && text.split(':').all(fits)).then_some(guid)
}

/// A partition key as people write it, a number or a text such as `0x8001`; none for anything else,
/// and for partition 0, which is none (InfiniBand Architecture 10.9.1.1).
#[must_use]
pub fn partition_key(value: &Value) -> Option<u16> {
    let number = match value {
        Value::String(text) => {
            let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
            u16::from_str_radix(digits.unwrap_or(text), 16).ok()
        }
        Value::Number(number) => number
            .as_u64()
            .and_then(|number| u16::try_from(number).ok()),
        _ => None,
    };
    number.filter(|key| partition(*key) != 0)
}

/// The number of the partition in a key, without the bit of the membership.
#[must_use]
pub fn partition(key: u16) -> u16 {
    key & 0x7fff
}

/// A partition key with its membership, for messages: the highest bit is set for a full member
/// (InfiniBand Architecture 10.9.1.1).
#[must_use]
pub fn membership(key: u16) -> String {
    let membership = if key & 0x8000 == 0 { "limited" } else { "full" };
    format!("{key:#06x} ({membership})")
}

/// The IPAM programs that are allowed unless the policy names others: ours, and
/// the reference plugin that hands out what the network itself lists.
pub const DEFAULT_IPAM: [&str; 2] = ["rdma-ipam", "static"];

impl Allow {
    /// Whether a network may say itself which addresses a pod has: nobody leases them then.
    #[must_use]
    pub fn unleased_addresses(&self) -> bool {
        self.ipam.iter().any(|kind| kind == "static")
    }
}

impl Default for Allow {
    fn default() -> Self {
        Allow {
            non_rdma: false,
            uplinks: false,
            netdevs: None,
            ipam: DEFAULT_IPAM.map(str::to_owned).to_vec(),
            passthru: false,
            virtual_links: false,
            unallocated: false,
            request_excluded: false,
            pkeys: None,
            inactive_partitions: false,
            vf: AllowVf::default(),
        }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Log {
    /// `file`: absolute path; `None` is stderr, which runtimes show for failures.
    #[serde(deserialize_with = "read::absolute_path")]
    pub file: Option<PathBuf>,
    pub level: LogLevel,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    Error,
    /// And what an administrator should check.
    #[default]
    Warn,
    /// And every change of state.
    Info,
    Debug,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            version: 1,
            node: None,
            state_dir: PathBuf::from("/var/lib/rdma-netdev"),
            cdi_dir: PathBuf::from(DEFAULT_CDI_DIRECTORY),
            stores: BTreeMap::from([("default".to_owned(), StorePolicy::of(StoreKind::Node))]),
            ipam: Ipam::default(),
            allow: Allow::default(),
            rails: Rails::default(),
            block: None,
            pkeys: BTreeMap::new(),
            fabric_addresses: FabricAddresses::default(),
            log: Log::default(),
        }
    }
}

impl Allow {
    /// Whether the selectors, if there are any, admit `candidate`. The caller
    /// checks `non_rdma` and `uplinks` itself: they need data from the kernel.
    #[must_use]
    pub fn selects(&self, candidate: &Candidate<'_>) -> bool {
        self.netdevs
            .as_ref()
            .is_none_or(|list| list.iter().any(|s| s.matches(candidate)))
    }
}

/// A policy that an administrator named is missing.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the policy {} is not there: name the node's with --policy, which is {DEFAULT_PATH} unless \
     rdma-device-plugin install was given another",
    .0.display()
)]
pub struct NamedPolicyMissing(PathBuf);

impl Policy {
    /// Whether the policy that an administrator's command goes by is there: without one the defaults
    /// count, but one that was named is meant to be there.
    pub fn check_named(path: &Path) -> Result<(), NamedPolicyMissing> {
        if path != Path::new(DEFAULT_PATH) && !path.exists() {
            return Err(NamedPolicyMissing(path.to_owned()));
        }
        Ok(())
    }

    /// Reads the policy at `path`; a missing file means the defaults.
    ///
    /// # Errors
    /// [`PolicyError`]: unreadable, not trusted, or not in order.
    pub fn load(path: &Path) -> Result<Self, PolicyError> {
        match read_trusted(path)? {
            Some(text) => read::policy(path, &text),
            None => Ok(Self::default()),
        }
    }

    /// The policy that `text` states; `path` is where it comes from, for messages. For text
    /// that is not yet in its place, whose trust is therefore the caller's concern.
    pub fn parse(path: &Path, text: &[u8]) -> Result<Self, PolicyError> {
        read::policy(path, text)
    }

    /// Whether a policy may have this key.
    #[must_use]
    pub fn has_key(key: &str) -> bool {
        read::has_key(key)
    }

    /// For DEL and GC: the policy as far as it can be read, and what is wrong
    /// with it. A file that is not trusted counts as missing.
    #[must_use]
    pub fn load_for_release(path: &Path) -> (Self, Option<PolicyError>) {
        match read_trusted(path) {
            Ok(Some(text)) => match read::policy(path, &text) {
                Ok(policy) => (policy, None),
                Err(error) => (read::salvage(&text), Some(error)),
            },
            Ok(None) => (Self::default(), None),
            Err(error) => (Self::default(), Some(error)),
        }
    }

    /// Whether a store is of type `kubernetes`.
    #[must_use]
    pub fn uses_kubernetes(&self) -> bool {
        let mut stores = self.stores.values();
        stores.any(|store| store.kind == StoreKind::Kubernetes)
    }

    /// The node's name: `node` of the policy, else `RDMA_NODE_NAME` (given by
    /// `environment`), else the host name.
    #[must_use]
    pub fn node_name(&self, environment: Option<&str>) -> String {
        if let Some(node) = &self.node {
            return node.clone();
        }
        if let Some(node) = environment.filter(|node| !node.is_empty()) {
            return node.to_owned();
        }
        nix::unistd::gethostname()
            .ok()
            .map(|name| name.to_string_lossy().into_owned())
            .filter(|name| !name.is_empty())
            .unwrap_or_else(|| "localhost".to_owned())
    }
}

fn read_trusted(path: &Path) -> Result<Option<Vec<u8>>, PolicyError> {
    let text = trust::read(path, MAX_FILE_BYTES)?;
    if text.is_some() {
        trust::check_directory(trust::parent(path))?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn place(text: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("policy.json");
        std::fs::write(&path, text).unwrap();
        chmod(&path, 0o644);
        (dir, path)
    }

    fn chmod(path: &Path, mode: u32) {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_missing_file_means_the_defaults() {
        let dir = tempfile::tempdir().unwrap();
        let policy = Policy::load(&dir.path().join("policy.json")).unwrap();
        assert_eq!(policy, Policy::default());
        assert_eq!(policy.ipam.cooldown, Duration::from_secs(30));
        assert!(!policy.allow.non_rdma && !policy.allow.uplinks);
    }

    #[test]
    fn a_file_of_another_user_is_refused() {
        let (_dir, path) = place(r#"{"stores": {"default": {"type": "file", "directory": "/"}}}"#);
        // Needs root; without it chown fails and nothing is to be shown.
        if std::os::unix::fs::chown(&path, Some(65534), None).is_ok() {
            let error = Policy::load(&path).unwrap_err();
            assert!(
                error.to_string().contains("does not belong to root"),
                "{error}"
            );
            let (policy, why) = Policy::load_for_release(&path);
            assert_eq!(policy, Policy::default(), "an untrusted file was believed");
            assert!(why.is_some());
        }
    }

    #[test]
    fn an_oversized_file_is_refused() {
        let (_dir, path) = place(&" ".repeat(1_048_577));
        let error = Policy::load(&path).unwrap_err();
        assert!(
            error.to_string().contains("larger than 1048576 bytes"),
            "{error}"
        );
        assert!(error.remedy().starts_with("let root own"), "{error}");
    }

    #[test]
    fn the_node_is_named_by_file_then_environment_then_host() {
        let named = Policy {
            node: Some("a".into()),
            ..Policy::default()
        };
        assert_eq!(named.node_name(Some("b")), "a");
        assert_eq!(Policy::default().node_name(Some("b")), "b");
        assert!(!Policy::default().node_name(Some("")).is_empty());
        assert!(!Policy::default().node_name(None).is_empty());
    }
}
