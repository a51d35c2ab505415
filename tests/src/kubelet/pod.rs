//! Pods, as far as the stand-in can honour them.
//!
//! A field that is not here is refused by name: a test that passed because a
//! field was overlooked would prove nothing.

mod environment;
mod manifest;
mod volume;

use std::collections::BTreeMap;

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use environment::expanded;
pub use volume::{Propagation, Volume};

use super::probe::{ContainerPort, Probe};
use environment::EnvVar;
use manifest::new_uid;
use volume::VolumeMount;

/// A Pod object.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Pod {
    /// `v1`.
    pub api_version: String,
    /// `Pod`.
    pub kind: String,
    /// Who it is.
    pub metadata: Metadata,
    /// What it runs.
    pub spec: Spec,
    /// Each ConfigMap of the same manifest.
    #[serde(default)]
    pub config_maps: ConfigMaps,
}

/// Each ConfigMap by its name: files by name.
pub type ConfigMaps = BTreeMap<String, BTreeMap<String, String>>;

/// A Pod's metadata.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Metadata {
    /// Name, a DNS subdomain.
    pub name: String,
    /// Namespace; `default` unless named.
    #[serde(default = "default_namespace")]
    pub namespace: String,
    /// Given by the API server; the stand-in fills it in.
    #[serde(default)]
    pub uid: String,
    /// Labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Annotations; `k8s.v1.cni.cncf.io/networks` among them.
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
}

/// A Pod's spec.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Spec {
    /// Run in order before the others, each to its end (unless it restarts always).
    #[serde(default)]
    pub init_containers: Vec<Container>,
    /// Run together.
    pub containers: Vec<Container>,
    /// Directories for containers to mount.
    #[serde(default)]
    pub volumes: Vec<Volume>,
    /// In the host's network namespace: no CNI at all.
    #[serde(default)]
    pub host_network: bool,
    /// In the host's IPC namespace.
    #[serde(default, rename = "hostIPC")]
    pub host_ipc: bool,
    /// Whether it sees the host's processes.
    #[serde(default, rename = "hostPID")]
    pub host_pid: bool,
    /// Host name inside; the pod's name unless given.
    #[serde(default)]
    pub hostname: Option<String>,
    /// Honoured only as `Never`: the stand-in restarts a container on request.
    #[serde(default)]
    pub restart_policy: Option<String>,
    /// Seconds between asking and killing.
    #[serde(default)]
    pub termination_grace_period_seconds: Option<i64>,
    /// For the scheduler, of which there is none here; every pod runs on this node.
    #[serde(default)]
    pub affinity: Option<Value>,
    /// As `affinity`.
    #[serde(default)]
    pub node_selector: Option<Value>,
    /// As `affinity`.
    #[serde(default)]
    pub tolerations: Option<Value>,
    /// For admission when a node is full, which this one never is.
    #[serde(default)]
    pub priority_class_name: Option<String>,
    /// No pod here asks a name server for anything.
    #[serde(default)]
    pub dns_policy: Option<String>,
    /// Whose token a pod would get.
    #[serde(default)]
    pub service_account_name: Option<String>,
    /// Honoured only as `false`: there is no API server to give a token.
    #[serde(default)]
    pub automount_service_account_token: Option<bool>,
    /// There are no Services.
    #[serde(default)]
    pub enable_service_links: Option<bool>,
}

/// One container of a Pod.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Container {
    /// Name, unique in the pod.
    pub name: String,
    /// Image reference; must be present in the runtime, nothing is pulled.
    #[serde(default)]
    pub image: String,
    /// Any policy but `Always` can be honoured without pulling.
    #[serde(default)]
    pub image_pull_policy: Option<String>,
    /// Replaces the image's entry point.
    #[serde(default)]
    pub command: Vec<String>,
    /// Replaces the image's arguments.
    #[serde(default)]
    pub args: Vec<String>,
    /// Working directory.
    #[serde(default)]
    pub working_dir: Option<String>,
    /// Environment: plain values, and fields of the pod.
    #[serde(default)]
    pub env: Vec<EnvVar>,
    /// What it asks for.
    #[serde(default)]
    pub resources: Resources,
    /// Capabilities and privilege.
    #[serde(default)]
    pub security_context: SecurityContext,
    /// Volumes it sees.
    #[serde(default)]
    pub volume_mounts: Vec<VolumeMount>,
    /// `Always` makes an init container a sidecar.
    #[serde(default)]
    pub restart_policy: Option<String>,
    /// Ports that it names.
    #[serde(default)]
    pub ports: Vec<ContainerPort>,
    /// The other probes are asked only once this is answered.
    #[serde(default)]
    pub startup_probe: Option<Probe>,
    /// The pod runs only once this is answered.
    #[serde(default)]
    pub readiness_probe: Option<Probe>,
    /// Asked once, after that: nothing here lives long enough to be restarted for it.
    #[serde(default)]
    pub liveness_probe: Option<Probe>,
}

/// Limits and requests by resource name.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resources {
    /// The most it may use; for extended resources, what it gets.
    #[serde(default)]
    pub limits: BTreeMap<String, Value>,
    /// What it is promised; for extended resources equal to the limit.
    #[serde(default)]
    pub requests: BTreeMap<String, Value>,
}

/// A container's security context.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SecurityContext {
    /// All capabilities and all devices.
    #[serde(default)]
    pub privileged: bool,
    /// Capabilities beside the runtime's own.
    #[serde(default)]
    pub capabilities: Capabilities,
    /// The user its process runs as; the image's unless given.
    #[serde(default)]
    pub run_as_user: Option<i64>,
    /// Whether a program may gain what its caller has not.
    #[serde(default)]
    pub allow_privilege_escalation: Option<bool>,
    /// Nothing outside of volumes can be written.
    #[serde(default)]
    pub read_only_root_filesystem: bool,
    /// Which system calls are let through.
    #[serde(default)]
    pub seccomp_profile: Option<SeccompProfile>,
}

/// Which system calls are let through.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SeccompProfile {
    /// The kind; there are no profiles of the node's own.
    pub r#type: SeccompType,
}

/// The kinds of seccomp profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SeccompType {
    /// The runtime's own.
    RuntimeDefault,
    /// All of them.
    Unconfined,
}

/// Capabilities to add to and drop from the runtime's own, without `CAP_`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Capabilities {
    /// To add.
    #[serde(default)]
    pub add: Vec<String>,
    /// To drop.
    #[serde(default)]
    pub drop: Vec<String>,
}

fn default_namespace() -> String {
    "default".to_owned()
}

impl Pod {
    /// A pod of one container with these limits, for tests of the kubelet alone.
    ///
    /// # Errors
    /// No UID could be made.
    pub fn with_limits(name: &str, limits: &[(&str, u64)]) -> Result<Self> {
        let container = Container::with_limits("main", limits);
        Self::of_containers(name, Vec::new(), vec![container])
    }

    /// A pod of these containers.
    ///
    /// # Errors
    /// No UID could be made.
    pub fn of_containers(
        name: &str,
        init_containers: Vec<Container>,
        containers: Vec<Container>,
    ) -> Result<Self> {
        Ok(Self {
            api_version: "v1".to_owned(),
            kind: "Pod".to_owned(),
            metadata: Metadata {
                name: name.to_owned(),
                namespace: default_namespace(),
                uid: new_uid()?,
                ..Metadata::default()
            },
            spec: Spec {
                init_containers,
                containers,
                ..Spec::default()
            },
            config_maps: ConfigMaps::new(),
        })
    }

    /// `namespace/name`.
    #[must_use]
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.metadata.namespace, self.metadata.name)
    }

    /// How much of each extended resource the scheduler counts for the pod: the
    /// sum of what runs together, or the largest init container if that is more.
    #[must_use]
    pub fn requests(&self) -> BTreeMap<String, u64> {
        let mut together: BTreeMap<String, u64> = BTreeMap::new();
        let mut largest: BTreeMap<String, u64> = BTreeMap::new();
        let sidecars = self
            .spec
            .init_containers
            .iter()
            .filter(|init| init.is_sidecar());
        for container in self.spec.containers.iter().chain(sidecars) {
            for (resource, count) in container.extended_limits() {
                *together.entry(resource).or_default() += count;
            }
        }
        for init in self
            .spec
            .init_containers
            .iter()
            .filter(|init| !init.is_sidecar())
        {
            for (resource, count) in init.extended_limits() {
                let entry = largest.entry(resource).or_default();
                *entry = count.max(*entry);
            }
        }
        for (resource, count) in largest {
            let entry = together.entry(resource).or_default();
            *entry = count.max(*entry);
        }
        together
    }
}

impl Container {
    /// A container with these limits.
    #[must_use]
    pub fn with_limits(name: &str, limits: &[(&str, u64)]) -> Self {
        let limits = limits
            .iter()
            .map(|&(resource, count)| (resource.to_owned(), count.into()));
        Self {
            name: name.to_owned(),
            resources: Resources {
                limits: limits.collect(),
                requests: BTreeMap::new(),
            },
            ..Self::default()
        }
    }

    /// True for an init container that keeps running beside the others.
    #[must_use]
    pub fn is_sidecar(&self) -> bool {
        self.restart_policy.as_deref() == Some("Always")
    }

    /// Limits of extended resources. For those, limits are what counts.
    pub fn extended_limits(&self) -> impl Iterator<Item = (String, u64)> {
        let limits = self
            .resources
            .limits
            .iter()
            .filter(|(name, _)| name.contains('/'));
        limits.filter_map(|(name, amount)| Some((name.clone(), whole(amount)?)))
    }
}

/// A whole number, written as one or as a string.
fn whole(amount: &Value) -> Option<u64> {
    amount.as_u64().or_else(|| amount.as_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_what_runs_together_or_the_largest_init_container() {
        let mut sidecar = Container::with_limits("sidecar", &[("rdma/a", 1)]);
        sidecar.restart_policy = Some("Always".to_owned());
        let init = vec![
            Container::with_limits("init", &[("rdma/a", 1), ("rdma/b", 5)]),
            sidecar,
        ];
        let app = vec![
            Container::with_limits("one", &[("rdma/a", 2), ("rdma/b", 1)]),
            Container::with_limits("two", &[("rdma/b", 1)]),
        ];
        let pod = Pod::of_containers("pod", init, app).unwrap();
        let expected = [("rdma/a".to_owned(), 3), ("rdma/b".to_owned(), 5)];
        assert_eq!(pod.requests(), expected.into());
    }
}
