//! The one model that all three configuration formats are read into.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::resource::ResourceName;
use super::selector::Selector;
use super::value;

/// Interval of rescans when the file does not say one.
pub const DEFAULT_RESCAN_INTERVAL: Duration = Duration::from_secs(60);

/// Most units of one resource. The kubelet's gRPC client takes messages up to 4 MiB, which holds
/// this many of the longest identities of a pool of this size.
pub const MAX_UNITS: u32 = 50_000;

/// Most units of a pool whose units all stand for the whole pool: their short identities
/// (`pool_3e71787e_122999`, at most 35 bytes of the message with all that belongs to a unit) fit one
/// message of 4 MiB this often.
pub const MAX_POOLED_UNITS: u32 = 123_000;

/// Nodes of `needVhostNet`.
pub const VHOST_NET: &str = "/dev/vhost-net";
/// The other one.
pub const TUN: &str = "/dev/net/tun";

/// A configuration that passed every check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The format it was written in.
    pub format: Format,
    /// Time between rescans; `None` when switched off.
    pub rescan: Option<Duration>,
    /// How changes of ports are damped.
    pub damping: Damping,
    /// Pools, in file order.
    pub pools: Vec<PoolConfig>,
    /// What the file says about the machine that the host does not show.
    pub topology: TopologyConfig,
    /// What was tolerated but should be checked.
    pub warnings: Vec<String>,
}

/// What an administrator knows of GPUs and NICs and the host does not show. Late binding goes by it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct TopologyConfig {
    /// A NCCL topology file that has their places.
    #[serde(deserialize_with = "value::absolute")]
    pub nccl_topology: Option<PathBuf>,
    /// Resources of GPUs, beside those that are known.
    pub gpu_resources: Vec<ResourceName>,
}

/// How long a port has to stay as it is before that counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct Damping {
    /// Down for this long before its units are Unhealthy.
    #[serde(deserialize_with = "value::time")]
    pub down_delay: Duration,
    /// Up for this long before they are Healthy again.
    #[serde(deserialize_with = "value::time")]
    pub up_delay: Duration,
    /// Losses within `flap_window` from which on a port counts as flapping.
    #[serde(deserialize_with = "value::flaps")]
    pub flaps: u32,
    /// How far back losses count.
    #[serde(deserialize_with = "value::time")]
    pub flap_window: Duration,
    /// Up for this long before the units of a port that flapped are Healthy again.
    #[serde(deserialize_with = "value::time")]
    pub flap_hold: Duration,
}

impl Default for Damping {
    fn default() -> Self {
        Self {
            down_delay: Duration::ZERO,
            up_delay: Duration::from_secs(1),
            flaps: 3,
            flap_window: Duration::from_secs(60),
            flap_hold: Duration::from_secs(30),
        }
    }
}

/// Configuration formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// The RDMA shared device plugin's `configList`.
    Rsdp,
    /// The SR-IOV network device plugin's `resourceList`.
    Sriov,
    /// Our own, with `version`.
    Native,
}

impl fmt::Display for Format {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Format::Rsdp => "configList of the RDMA shared device plugin",
            Format::Sriov => "resourceList of the SR-IOV network device plugin",
            Format::Native => "version 1",
        })
    }
}

/// One resource and the HCAs behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolConfig {
    /// Name that pods ask for.
    pub resource: ResourceName,
    /// How HCAs become units.
    pub sharing: Sharing,
    /// Alternatives; an HCA that matches any of them is in the pool.
    pub selectors: Vec<Selector>,
    /// Which character devices a container gets.
    pub nodes: NodeRule,
    /// Whether units go without NUMA topology.
    pub exclude_topology: bool,
    /// How containers get their devices.
    pub delivery: Delivery,
    /// HCAs that are excluded although a selector chooses them.
    pub exclude: Vec<Exclude>,
    /// What the state of its ports says about an HCA.
    pub port_health: PortHealth,
    /// What has to be there before its units are offered.
    pub wait_for: Vec<Gate>,
    /// Whether a node without such an HCA is accepted: the resource is offered from the first
    /// HCA on, where others have it with 0 units.
    pub optional: bool,
    /// How many HCAs a node must have, for people: nothing is offered or withheld by it.
    pub expected: Option<u32>,
    /// Whether netdevs of its HCAs are set up when they appear.
    pub link_up: bool,
    /// MTU in bytes that they get before that.
    pub mtu: Option<u32>,
    /// Name the HCAs for communication libraries in the environment of containers.
    pub environment: bool,
    /// Further nodes that every container gets, as `/dev/vhost-net`.
    pub extra_nodes: Vec<String>,
    /// What an administrator wants said about HCAs in the environment, by identity or `*`.
    pub additional_info: BTreeMap<String, BTreeMap<String, String>>,
    /// How the resource's name is written in names of environment variables.
    pub variables: Variables,
}

impl PoolConfig {
    /// A pool with what both peers do with their HCAs.
    pub fn new(resource: ResourceName, sharing: Sharing, selectors: Vec<Selector>) -> Self {
        Self {
            resource,
            sharing,
            selectors,
            nodes: NodeRule::everything(),
            exclude_topology: false,
            delivery: Delivery::default(),
            exclude: Vec::new(),
            port_health: PortHealth::Ignored,
            wait_for: Vec::new(),
            optional: false,
            expected: None,
            link_up: false,
            mtu: None,
            environment: false,
            extra_nodes: Vec::new(),
            additional_info: BTreeMap::new(),
            variables: Variables::Shell,
        }
    }

    /// Whether containers get HCAs by the pool's CDI file, which says what is true now. Slots have files of
    /// their own.
    pub fn has_file(&self) -> bool {
        self.delivery == Delivery::Cdi && !matches!(self.sharing, Sharing::Late(_))
    }
}

/// How a resource's name is written in names of environment variables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Variables {
    /// So that every shell can use them: what is neither letter nor digit becomes `_`.
    #[default]
    Shell,
    /// As the SR-IOV plugin writes them, which keeps `-`; in the form for shells as well.
    Sriov,
}

/// How containers get their devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Delivery {
    /// Paths and permissions in the response.
    #[default]
    DeviceSpecs,
    /// Names of devices in CDI specifications that this program writes.
    Cdi,
}

/// Something of the host that a pool waits for: a driver container that builds and loads drivers says
/// when it is done.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Gate {
    /// This file is there, as this process sees it.
    File(#[serde(deserialize_with = "value::absolute")] PathBuf),
    /// This kernel module is loaded.
    Module(#[serde(deserialize_with = "value::module")] String),
}

impl fmt::Display for Gate {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Gate::File(path) => write!(formatter, "file {}", path.display()),
            Gate::Module(name) => write!(formatter, "module {name}"),
        }
    }
}

impl FromStr for Gate {
    type Err = String;

    /// `file:/run/mellanox/drivers/.driver-ready`, `module:mlx5_ib`.
    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("file", path)) => value::absolute_path(path).map(Gate::File),
            Some(("module", name)) => value::module_name(name).map(Gate::Module),
            _ => Err(format!(
                "{text:?}: write file:/ABSOLUTE/PATH or module:NAME"
            )),
        }
    }
}

/// What the state of its ports says about the health of an HCA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortHealth {
    /// Nothing, as in both peers: they offer VFs that are down until a CNI plugin sets them up, and
    /// InfiniBand VFs whose ports stay down until they have a GUID.
    Ignored,
    /// At least one port must be active.
    Active,
    /// At least one port must be active, or wait for the CNI plugin: its netdev is administratively
    /// down. A port whose netdev is up and has no carrier counts as lost.
    ActiveUnlessSetDown,
}

/// HCAs that a pool leaves out, whatever its selectors say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Exclude {
    /// Physical functions that have virtual ones: those are offered instead.
    PfsWithVfs,
    /// HCAs whose netdev carries the default route.
    Uplinks,
}

impl Exclude {
    /// What would take something away from the host or from other units.
    pub const IN_USE: [Self; 2] = [Self::PfsWithVfs, Self::Uplinks];
}

/// How the HCAs of a pool become units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// Every unit stands for all HCAs of the pool, as in the RDMA shared device plugin.
    Pooled {
        /// Units in all; `None` derives the number from the ports' GID tables.
        units: Option<u32>,
    },
    /// Each HCA has shares, and a unit is one share of one HCA.
    Shares {
        /// Shares of each HCA; `None` derives the number from the port's GID table.
        per_hca: Option<u32>,
        /// Which free shares are preferred.
        policy: Policy,
    },
    /// Each HCA is one unit.
    Exclusive {
        /// Which free HCAs are preferred.
        policy: Policy,
    },
    /// As many units as HCAs, each good for one HCA. Which one it is, is decided when the pod's
    /// network is made.
    Late(Late),
}

/// How units of a pool with late binding become HCAs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Late {
    /// Reject a pod if a closer HCA exists but is not free.
    pub strict: bool,
    /// Bind pods that have no network attachment when their first container starts.
    pub bind_at_start: bool,
    /// Mount the file of [`TopologyConfig::nccl_topology`] in containers, and name it to NCCL.
    pub nccl_topology: bool,
}

impl Default for Late {
    fn default() -> Self {
        Self {
            strict: true,
            bind_at_start: false,
            nccl_topology: false,
        }
    }
}

impl Sharing {
    /// Its word in the daemon's status.
    pub fn word(self) -> &'static str {
        match self {
            Sharing::Pooled { .. } | Sharing::Shares { .. } => "shared",
            Sharing::Exclusive { .. } => "exclusive",
            Sharing::Late(_) => "late",
        }
    }

    /// Whether several pods may use one HCA.
    pub fn is_shared(self) -> bool {
        match self {
            Sharing::Pooled { .. } | Sharing::Shares { .. } => true,
            Sharing::Exclusive { .. } | Sharing::Late(_) => false,
        }
    }
}

/// Which units the kubelet is advised to take for a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Least used HCAs first, a different one for each unit.
    #[default]
    Spread,
    /// Most used HCAs first, so that others stay free, still a different one for each unit.
    Pack,
    /// One NUMA node if it can be, then as `Spread`.
    Numa,
    /// All units on one HCA if it can be.
    SameHca,
}

/// A class of character devices below `/dev/infiniband`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeClass {
    /// `uverbsN`: verbs of one RDMA device.
    Uverbs,
    /// `rdma_cm`: the connection manager, one for the host.
    RdmaCm,
    /// `umadN`: management datagrams of one port.
    Umad,
    /// `issmN`: announces a subnet manager on one port.
    Issm,
    /// `ucmN`: the old connection manager of one RDMA device.
    Ucm,
}

impl NodeClass {
    /// All of them.
    pub const ALL: [NodeClass; 5] = [
        NodeClass::Uverbs,
        NodeClass::RdmaCm,
        NodeClass::Umad,
        NodeClass::Issm,
        NodeClass::Ucm,
    ];
}

/// Which classes of character devices a container gets.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NodeRule {
    /// An HCA without one of these is Unhealthy.
    pub required: Vec<NodeClass>,
    /// Handed over where they exist.
    pub optional: Vec<NodeClass>,
}

impl Default for NodeRule {
    fn default() -> Self {
        Self::verbs()
    }
}

impl NodeRule {
    /// Verbs and the connection manager: what an application needs, and nothing that lets it speak
    /// to the fabric's management.
    pub fn verbs() -> Self {
        Self {
            required: vec![NodeClass::Uverbs, NodeClass::RdmaCm],
            optional: Vec::new(),
        }
    }

    /// What the RDMA shared device plugin hands over. It also makes `umad` a condition, which has
    /// emptied many a pool; here it is given where it exists.
    pub fn everything() -> Self {
        Self {
            required: vec![NodeClass::Uverbs, NodeClass::RdmaCm],
            optional: vec![NodeClass::Umad, NodeClass::Issm, NodeClass::Ucm],
        }
    }

    /// Whether nodes of the class are handed over at all.
    pub fn includes(&self, class: NodeClass) -> bool {
        self.required.contains(&class) || self.optional.contains(&class)
    }
}
