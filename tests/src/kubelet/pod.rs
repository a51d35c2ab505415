//! Pod manifests, as far as the stand-in can honour them.
//!
//! A field that is not here is refused by name: a test that passed because a
//! field was overlooked would prove nothing.

use std::collections::BTreeMap;
use std::net::IpAddr;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::probe::{ContainerPort, Probe};

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
    /// Host name inside; the pod's name unless given.
    #[serde(default)]
    pub hostname: Option<String>,
    /// Honoured only as `Never`: the stand-in restarts a container when told to.
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
    /// The pod runs only once this is answered.
    #[serde(default)]
    pub readiness_probe: Option<Probe>,
    /// Asked once, after that: nothing here lives long enough to be restarted for it.
    #[serde(default)]
    pub liveness_probe: Option<Probe>,
}

/// An environment variable.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EnvVar {
    /// Name.
    pub name: String,
    /// Value.
    #[serde(default)]
    pub value: String,
    /// A field of the pod instead.
    #[serde(default)]
    pub value_from: Option<ValueFrom>,
}

/// Where a variable's value comes from.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ValueFrom {
    /// A field of the pod.
    pub field_ref: FieldRef,
}

/// A field of the pod.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FieldRef {
    /// `spec.nodeName`, `status.hostIP`, `metadata.name`, `metadata.namespace` or `metadata.uid`.
    pub field_path: String,
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

/// A directory or file of the host, or the files of a ConfigMap.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Volume {
    /// Name by which containers mount it.
    pub name: String,
    /// A path of the host.
    #[serde(default)]
    pub host_path: Option<HostPath>,
    /// Files of a ConfigMap of the same manifest.
    #[serde(default)]
    pub config_map: Option<ConfigMapSource>,
    /// A directory of the pod's own.
    #[serde(default)]
    pub empty_dir: Option<EmptyDir>,
}

/// A directory of the pod's own, wherever the kubelet keeps such: neither is honoured.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EmptyDir {
    /// `Memory`, or the disk.
    #[serde(default)]
    pub medium: String,
    /// The most that fits.
    #[serde(default)]
    pub size_limit: Option<Value>,
}

/// Which ConfigMap.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfigMapSource {
    /// Its name.
    pub name: String,
}

/// A path of the host.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostPath {
    /// The path.
    pub path: String,
    /// `Directory`, `File`, `DirectoryOrCreate`, ...
    #[serde(default)]
    pub r#type: Option<String>,
}

/// Where a container sees a volume.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VolumeMount {
    /// The volume.
    pub name: String,
    /// The path inside.
    pub mount_path: String,
    /// Not writable.
    #[serde(default)]
    pub read_only: bool,
    /// Whether later mounts are seen across.
    #[serde(default)]
    pub mount_propagation: Option<Propagation>,
}

/// Which later mounts are seen across a volume's border.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Propagation {
    /// None.
    None,
    /// The host's, by the container.
    HostToContainer,
    /// Both ways.
    Bidirectional,
}

fn default_namespace() -> String {
    "default".to_owned()
}

impl Pod {
    /// The Pods of a manifest, each with a UID of its own, of each DaemonSet the one it has on a
    /// node, and of each `StatefulSet` the first. What each ConfigMap holds goes with them, other
    /// kinds are passed over.
    ///
    /// # Errors
    /// Not YAML, a field the stand-in cannot honour, or requests the API server would refuse.
    pub fn from_manifest(text: &str) -> Result<Vec<Self>> {
        let objects: Result<Vec<Value>, _> = serde_yaml_ng::Deserializer::from_str(text)
            .map(Value::deserialize)
            .collect();
        let objects = objects.context("read the manifest as YAML")?;
        let config_maps = objects
            .iter()
            .filter(|object| kind(object) == Some("ConfigMap"))
            .map(config_map)
            .collect::<Result<ConfigMaps>>()?;
        let mut pods = Vec::new();
        for object in objects {
            let object = match kind(&object) {
                Some("Pod") => object,
                Some("DaemonSet") => {
                    of_template(&object, "").context("a DaemonSet without a pod")?
                }
                Some("StatefulSet") => {
                    of_template(&object, "-0").context("a StatefulSet without a pod")?
                }
                _ => continue,
            };
            let name = object.pointer("/metadata/name").and_then(Value::as_str);
            let name = name.unwrap_or("?");
            let context = format!("read pod {name}");
            let mut pod: Self = serde_json::from_value(object).context(context)?;
            pod.config_maps.clone_from(&config_maps);
            if pod.metadata.uid.is_empty() {
                pod.metadata.uid = new_uid()?;
            }
            pod.check()?;
            pods.push(pod);
        }
        Ok(pods)
    }

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

    /// What the API server would refuse, or the stand-in cannot do.
    fn check(&self) -> Result<()> {
        let pod = self.full_name();
        if self.spec.containers.is_empty() {
            bail!("pod {pod} has no container");
        }
        if let Some(policy) = &self.spec.restart_policy
            && !["Always", "OnFailure", "Never"].contains(&policy.as_str())
        {
            bail!("pod {pod}: restartPolicy {policy} is none of Always, OnFailure, Never");
        }
        if self.spec.automount_service_account_token == Some(true) {
            bail!("pod {pod}: there is no API server here that could give it a token");
        }
        for volume in &self.spec.volumes {
            match (&volume.host_path, &volume.config_map, &volume.empty_dir) {
                (Some(_), None, None) | (None, None, Some(_)) => {}
                (None, Some(source), None) if self.config_maps.contains_key(&source.name) => {}
                (None, Some(source), None) => {
                    bail!(
                        "pod {pod}: ConfigMap {} is not in its manifest",
                        source.name
                    )
                }
                _ => bail!("pod {pod}: volume {} is not of one kind", volume.name),
            }
        }
        for container in self
            .spec
            .init_containers
            .iter()
            .chain(&self.spec.containers)
        {
            let what = format!("pod {pod}, container {}", container.name);
            let limits = &container.resources.limits;
            for (resource, amount) in limits.iter().filter(|(name, _)| name.contains('/')) {
                if whole(amount).is_none() {
                    bail!("{what}: {resource} must be a whole number, not {amount}");
                }
            }
            for (resource, amount) in &container.resources.requests {
                if !resource.contains('/') {
                    continue;
                }
                match limits.get(resource).and_then(whole) {
                    Some(limit) if Some(limit) == whole(amount) => {}
                    Some(limit) => bail!(
                        "{what}: {resource} requests {amount} but limits {limit}; \
                         an extended resource cannot be overcommitted"
                    ),
                    None => bail!("{what}: {resource} is requested, but has no limit"),
                }
            }
            if container.image_pull_policy.as_deref() == Some("Always") {
                bail!(
                    "{what}: imagePullPolicy Always: nothing is pulled here; import the image and use IfNotPresent"
                );
            }
            for mount in &container.volume_mounts {
                if !self
                    .spec
                    .volumes
                    .iter()
                    .any(|volume| volume.name == mount.name)
                {
                    bail!("{what}: there is no volume {}", mount.name);
                }
            }
        }
        Ok(())
    }
}

impl EnvVar {
    /// Its value in a pod on the node of this name and address; references to other variables
    /// are still in it.
    ///
    /// # Errors
    /// It is taken from a field that the stand-in does not know.
    pub fn value_in(&self, pod: &Pod, node: &str, address: IpAddr) -> Result<String> {
        let Some(from) = &self.value_from else {
            return Ok(self.value.clone());
        };
        let metadata = &pod.metadata;
        Ok(match from.field_ref.field_path.as_str() {
            "spec.nodeName" => node.to_owned(),
            "status.hostIP" => address.to_string(),
            "metadata.name" => metadata.name.clone(),
            "metadata.namespace" => metadata.namespace.clone(),
            "metadata.uid" => metadata.uid.clone(),
            other => bail!("variable {}: no field {other} is known here", self.name),
        })
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

/// Puts values in the place of `$(NAME)`; `$$` stands for a dollar sign, and a name that is not
/// known stays as it is, as the kubelet has it.
#[must_use]
pub fn expanded(text: &str, known: &[(String, String)]) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        out.push_str(before);
        if let Some(after) = after.strip_prefix('$') {
            out.push('$');
            rest = after;
            continue;
        }
        let named = after.strip_prefix('(').and_then(|a| a.split_once(')'));
        let value = named.and_then(|(name, after)| {
            let (_, value) = known.iter().rev().find(|(known, _)| known == name)?;
            Some((value, after))
        });
        match value {
            Some((value, after)) => {
                out.push_str(value);
                rest = after;
            }
            None => {
                out.push('$');
                rest = after;
            }
        }
    }
    out + rest
}

fn kind(object: &Value) -> Option<&str> {
    object.get("kind").and_then(Value::as_str)
}

/// A pod of a template, under its owner's name.
fn of_template(object: &Value, suffix: &str) -> Option<Value> {
    let mut pod = object.pointer("/spec/template")?.clone();
    let fields = pod.as_object_mut()?;
    fields.insert("apiVersion".to_owned(), "v1".into());
    fields.insert("kind".to_owned(), "Pod".into());
    let metadata = fields
        .entry("metadata")
        .or_insert_with(|| Value::Object(Map::new()));
    for key in ["name", "namespace"] {
        if let Some(value) = object.pointer(&format!("/metadata/{key}")) {
            let value = match key {
                "name" => format!("{}{suffix}", value.as_str()?).into(),
                _ => value.clone(),
            };
            metadata.as_object_mut()?.insert(key.to_owned(), value);
        }
    }
    Some(pod)
}

fn config_map(object: &Value) -> Result<(String, BTreeMap<String, String>)> {
    let name = object.pointer("/metadata/name").and_then(Value::as_str);
    let name = name.context("a ConfigMap without a name")?;
    let data = object.get("data").cloned().unwrap_or_default();
    let data = serde_json::from_value(data).with_context(|| format!("read ConfigMap {name}"))?;
    Ok((name.to_owned(), data))
}

/// A whole number, written as one or as a string.
fn whole(amount: &Value) -> Option<u64> {
    amount.as_u64().or_else(|| amount.as_str()?.parse().ok())
}

fn new_uid() -> Result<String> {
    let path = "/proc/sys/kernel/random/uuid";
    let uid = std::fs::read_to_string(path).with_context(|| format!("read {path}"))?;
    Ok(uid.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANIFEST: &str = r#"
apiVersion: k8s.cni.cncf.io/v1
kind: NetworkAttachmentDefinition
metadata: {name: net}
---
apiVersion: v1
kind: Pod
metadata:
  name: one
  annotations: {k8s.v1.cni.cncf.io/networks: net}
spec:
  restartPolicy: Never
  containers:
  - name: main
    image: image
    command: [sleep, infinity]
    securityContext: {capabilities: {add: [IPC_LOCK]}}
    resources: {limits: {rdma/hca: "1", memory: 1Gi}, requests: {rdma/hca: 1}}
"#;

    #[test]
    fn reads_the_pods_of_a_manifest_and_passes_over_other_kinds() {
        let pods = Pod::from_manifest(MANIFEST).unwrap();
        assert_eq!(pods.len(), 1);
        assert_eq!(pods[0].full_name(), "default/one");
        assert_eq!(pods[0].requests(), [("rdma/hca".to_owned(), 1)].into());
        assert_eq!(pods[0].metadata.uid.len(), 36);
    }

    #[test]
    fn a_daemon_set_is_its_pod_with_the_config_maps_of_the_manifest() {
        let manifest = r"
apiVersion: v1
kind: ConfigMap
metadata: {name: settings}
data: {a: '1'}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: agent, namespace: kube-system}
spec:
  template:
    metadata: {labels: {app: agent}}
    spec:
      containers:
      - name: main
        env: [{name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]
        volumeMounts: [{name: settings, mountPath: /etc/agent}]
      volumes: [{name: settings, configMap: {name: settings}}]
";
        let pod = Pod::from_manifest(manifest).unwrap().remove(0);
        assert_eq!(pod.full_name(), "kube-system/agent");
        assert_eq!(pod.metadata.labels["app"], "agent");
        assert_eq!(pod.config_maps["settings"]["a"], "1");
        let variable = &pod.spec.containers[0].env[0];
        assert_eq!(
            variable
                .value_in(&pod, "node-7", [10, 0, 0, 7].into())
                .unwrap(),
            "node-7"
        );

        let without = manifest.replace("name: settings}\ndata", "name: other}\ndata");
        let error = Pod::from_manifest(&without).unwrap_err();
        assert!(error.to_string().contains("ConfigMap settings"), "{error}");
    }

    #[test]
    fn a_stateful_set_is_its_first_pod() {
        let manifest = r"
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: worker}
spec:
  serviceName: worker
  template:
    spec:
      containers:
      - name: main
        volumeMounts: [{name: shm, mountPath: /dev/shm}]
      volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 1Gi}}]
";
        let pod = Pod::from_manifest(manifest).unwrap().remove(0);
        assert_eq!(pod.full_name(), "default/worker-0");
        assert!(pod.spec.volumes[0].empty_dir.is_some());
    }

    #[test]
    fn variables_are_put_in() {
        let known = [
            ("A".to_owned(), "1".to_owned()),
            ("B".to_owned(), "2".to_owned()),
        ];
        for (text, wanted) in [
            ("$(A):9834", "1:9834"),
            ("$(A)$(B)", "12"),
            ("$(C) $A $", "$(C) $A $"),
            ("$$(A)", "$(A)"),
        ] {
            assert_eq!(expanded(text, &known), wanted);
        }
    }

    #[test]
    fn names_what_it_cannot_honour() {
        for (from, to, word) in [
            ("restartPolicy: Never", "hostPID: true", "hostPID"),
            ("restartPolicy: Never", "restartPolicy: Once", "Once"),
            ("{rdma/hca: 1}", "{rdma/hca: 2}", "overcommitted"),
            ("{rdma/hca: 1}", "{rdma/other: 2}", "no limit"),
            ("rdma/hca: \"1\"", "rdma/hca: \"1k\"", "whole number"),
            ("image: image", "imagePullPolicy: Always", "Always"),
            (
                "image: image",
                "volumeMounts: [{name: shm, mountPath: /dev/shm}]",
                "no volume shm",
            ),
        ] {
            let error = format!(
                "{:#}",
                Pod::from_manifest(&MANIFEST.replace(from, to)).unwrap_err()
            );
            assert!(error.contains(word), "{to}: {error}");
        }
    }

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
