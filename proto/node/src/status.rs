//! The daemon's state, as it answers it on its socket and at `/status`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::Pod;

/// Asks the daemon for its state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StatusQuestion {}

/// Asks the daemon for its state as soon as it is another one than the asker knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ChangeQuestion {
    /// [`StatusChange::state`] of the last answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen: Option<u64>,
    /// How long the daemon waits for a change, at most a minute.
    pub within_ms: u32,
}

/// The answer to [`ChangeQuestion`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StatusChange {
    /// Stands for the state. Another number is another state.
    pub state: u64,
    /// The state, [lasting](DaemonStatus::lasting).
    pub status: DaemonStatus,
}

/// Asks the daemon to forget an HCA that is missing: it was removed for good.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForgetQuestion {
    /// As unit IDs name it.
    pub hca: String,
}

/// The answer to [`ForgetQuestion`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forgotten {}

/// What the daemon serves, to whom, and how it is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DaemonStatus {
    /// Version of the program.
    pub program_version: String,
    /// Seconds since its start.
    pub uptime_seconds: u64,
    /// Whether the kubelet has the lists of all resources.
    pub ready: bool,
    /// Why it is not ready.
    pub unready: Vec<String>,
    /// What is worth knowing and does not make it unready.
    pub notes: Vec<String>,
    /// The configuration in force.
    pub configuration: ConfigurationStatus,
    /// The pools' `health.flapHold`, in milliseconds.
    pub flap_hold_ms: u64,
    /// `shared` or `exclusive`; `None` where the kernel does not say it.
    pub netns_mode: Option<String>,
    /// The socket on which programs of the node ask.
    pub node_socket: SocketStatus,
    /// One entry for each resource, in the order of the configuration.
    pub pools: Vec<PoolStatus>,
    /// HCAs of the host, but virtual and scalable functions that no pool has.
    pub hcas: Vec<HostHca>,
    /// HCAs that were here and are not.
    pub missing: Vec<MissingHca>,
    /// Slots that are bound to an HCA.
    pub bindings: Vec<BindingStatus>,
    /// Pods whose slots could not be bound in the last ten minutes.
    pub refused: Vec<RefusedBinding>,
    /// How well the HCAs of pods with bound slots fit their GPUs.
    pub alignment: Vec<PodAlignment>,
}

/// An HCA that was here, in this boot or an earlier one, and is not.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MissingHca {
    /// As unit IDs name it.
    pub id: String,
    /// Its RDMA devices when it was here.
    pub rdma_devices: Vec<String>,
    /// Since when, in Unix seconds.
    pub since: u64,
    /// The resource that it was of.
    pub resource: Option<String>,
    /// Its rail when it was here.
    pub rail: Option<u32>,
}

/// The hardware of an HCA. Of one that a pod has, what was last known of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HostHca {
    /// As unit IDs name it.
    pub id: String,
    /// `pf`, `vf`, `sf` or `software`.
    pub function: String,
    /// PCI vendor and device, as `15b3:1021`.
    pub device: Option<String>,
    /// Its RDMA devices.
    pub rdma_devices: Vec<String>,
    /// Board type, such as the PSID.
    pub board: Option<String>,
    /// Firmware version.
    pub firmware: Option<String>,
    /// Its NUMA node, where the firmware says it.
    pub numa_node: Option<u32>,
    /// Its rail.
    pub rail: Option<u32>,
    /// The GPUs that are nearest to it.
    pub gpus: Vec<NearGpu>,
    /// Its ports that carry data.
    pub ports: Vec<HostPort>,
}

/// A GPU near an HCA.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NearGpu {
    /// Its PCI address.
    pub gpu: String,
    /// Their distance, as `nvidia-smi topo -m` writes it.
    pub class: String,
}

/// A port of an HCA.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HostPort {
    /// Its RDMA device and number, as `mlx5_0:1`.
    pub name: String,
    /// Its netdev on the host.
    pub netdev: Option<String>,
    /// `ether`, `infiniband` or `other`.
    pub link_layer: String,
    /// `ACTIVE`, `DOWN` and so on; `UNKNOWN` in a pod.
    pub state: String,
    /// Its rate, or that before it went down.
    pub rate_mbps: Option<u32>,
    /// MTU of its netdev in bytes.
    pub mtu: Option<u32>,
    /// The port's GUID on InfiniBand, else that of the RDMA device.
    pub guid: Option<String>,
}

/// The configuration in force.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigurationStatus {
    /// The file.
    pub file: PathBuf,
    /// Whose format it has.
    pub format: String,
    /// How many configurations have been in force since the start.
    pub generation: u64,
    /// Why the file as it is now is not in force, or not all of it.
    pub error: Option<String>,
}

/// The daemon's socket.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketStatus {
    /// Where it is.
    pub path: PathBuf,
    /// `starting`, `listening`, `displaced` (another daemon has its place) or `failed`.
    pub state: String,
    /// Why it failed.
    pub error: Option<String>,
}

/// One resource.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolStatus {
    /// Its name, such as `rdma/hca_shared_devices_a`.
    pub resource: String,
    /// `shared`, `exclusive` or `late`; `None` before the first list.
    pub mode: Option<String>,
    /// HCAs that are here.
    pub present: usize,
    /// HCAs that there must be by the configuration, else those that are here or missing.
    pub expected: usize,
    /// Units that the kubelet was sent.
    pub units: UnitCounts,
    /// How containers get the devices; `None` before the first list.
    pub delivery: Option<String>,
    /// Its HCAs.
    pub hcas: Vec<HcaStatus>,
    /// Late binding: HCAs that are free and near a GPU of the node; `None` while that is not known.
    #[serde(default)]
    pub free_aligned: Option<usize>,
    /// Units that containers hold, by the kubelet's last list; `None` before that.
    pub held: Option<Vec<HeldUnits>>,
    /// Whether the kubelet accepted the registration.
    pub registered: bool,
    /// Whether the kubelet reads the list of units.
    pub streaming: bool,
    /// Whether the kubelet was sent the list of units.
    pub listed: bool,
    /// Registrations since the start.
    pub registrations: u64,
    /// The last error of its session with the kubelet.
    pub last_error: Option<String>,
    /// Allocate calls.
    pub allocations: AllocationCounts,
}

/// Units of a resource.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnitCounts {
    /// Units that can be allocated or are.
    pub healthy: u64,
    /// Units that cannot.
    pub unhealthy: u64,
}

/// Allocate calls since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllocationCounts {
    /// Those that were answered.
    pub granted: u64,
    /// Those that were refused.
    pub refused: u64,
}

/// An HCA of a pool.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HcaStatus {
    /// As unit IDs name it.
    pub id: String,
    /// Its RDMA devices.
    pub rdma_devices: Vec<String>,
    /// Its netdevs.
    pub netdevs: Vec<String>,
    /// Its NUMA node, where the firmware says it.
    pub numa_node: Option<u32>,
    /// Paths of the device nodes that a container gets.
    pub nodes: Vec<String>,
    /// Whether its units are healthy.
    pub healthy: bool,
    /// Why they are not, worst first.
    pub reasons: Vec<String>,
    /// The word for the worst of them, as in metrics.
    pub reason: Option<String>,
}

impl DaemonStatus {
    /// Without what counts or changes by itself.
    #[must_use]
    pub fn lasting(mut self) -> Self {
        for pool in &mut self.pools {
            pool.registrations = 0;
            pool.allocations = AllocationCounts::default();
            pool.last_error = None;
        }
        Self {
            uptime_seconds: 0,
            ready: false,
            unready: Vec::new(),
            notes: Vec::new(),
            node_socket: SocketStatus::default(),
            configuration: ConfigurationStatus {
                generation: 0,
                ..self.configuration
            },
            ..self
        }
    }
}

/// Units that a container holds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldUnits {
    /// Their IDs.
    pub units: Vec<String>,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Name of the container.
    pub container: String,
    /// UID of the pod, where the kubelet's checkpoint has one for all of them.
    pub uid: Option<String>,
    /// HCAs that they stand for.
    pub hcas: Vec<String>,
}

/// A pod whose slots could not be bound a moment ago.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedBinding {
    /// The pod.
    pub pod: Pod,
    /// Why, and what was free.
    pub message: String,
}

/// A slot that is bound to an HCA.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BindingStatus {
    /// The resource that the slot is of.
    pub resource: String,
    /// The slot.
    pub unit: String,
    /// The HCA, as unit IDs name it.
    pub hca: String,
    /// The pod.
    pub pod: Pod,
    /// Name of the container that asked for it.
    pub container: String,
    /// `bound`, `attached`, `detached` or `started`.
    pub stage: String,
    /// The HCA's rail.
    pub rail: u32,
    /// The GPUs that it serves.
    pub gpus: Vec<ServedGpu>,
    /// Why the pod does not have the slot any more; none while it has.
    pub ended: Option<String>,
}

/// A GPU that an HCA serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServedGpu {
    /// Its PCI address.
    pub gpu: String,
    /// Their distance, as `nvidia-smi topo -m` writes it.
    pub class: String,
    /// Whether the HCA reaches the GPU's memory directly, without a copy through host memory.
    pub peer_to_peer: bool,
    /// Whether no HCA of the node is nearer.
    pub aligned: bool,
}

/// The HCAs of a pod, of one resource.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PodAlignment {
    /// The resource.
    pub resource: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// The farthest of its GPUs from the HCA that serves it, as `nvidia-smi topo -m` writes it; `None`
    /// for a pod without GPUs.
    pub worst: Option<String>,
    /// Fraction of its GPUs whose HCA reaches their memory directly, from 0 to 1; `None` for a pod
    /// without GPUs.
    pub score: Option<f64>,
}
