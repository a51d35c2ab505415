//! From pod to the runtime's messages, as a kubelet fills them in.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::cri::api;
use crate::kubelet::{Container, Pod, Propagation, RunOptions, SeccompType, expanded};

/// The cluster DNS that kubeadm sets up; nothing answers there in a lab.
const CLUSTER_DNS: &str = "10.96.0.10";

/// What an unprivileged container must not see of `/proc` and `/sys`.
const MASKED: [&str; 10] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
];
/// What it must not change there.
const READ_ONLY: [&str; 5] = [
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
];

/// One start of a container.
#[derive(Debug, Clone, Copy)]
pub(super) struct Instance<'a> {
    pub(super) pod: &'a Pod,
    pub(super) container: &'a Container,
    /// Counts restarts.
    pub(super) attempt: u32,
}

/// What the node adds.
#[derive(Debug)]
pub(super) struct Surroundings {
    /// The node's name.
    pub(super) node: String,
    /// The address it is known by.
    pub(super) address: IpAddr,
    /// Where the pod's volumes are on the host, by name.
    pub(super) volumes: BTreeMap<String, PathBuf>,
}

impl Instance<'_> {
    /// Where the pod's logs are.
    pub(super) fn log_directory(&self, logs: &Path) -> PathBuf {
        log_directory(self.pod, logs)
    }

    /// The log's path below that.
    pub(super) fn log_path(&self) -> String {
        format!("{}/{}.log", self.container.name, self.attempt)
    }
}

fn log_directory(pod: &Pod, logs: &Path) -> PathBuf {
    let pod = &pod.metadata;
    logs.join(format!("{}_{}_{}", pod.namespace, pod.name, pod.uid))
}

/// The pod's cgroup below the root, as the kubelet's driver `cgroupfs` names that of a pod with limits.
pub(super) fn cgroup(uid: &str) -> String {
    format!("kubepods/pod{uid}")
}

/// The sandbox: names, log directory, DNS, namespaces. The runtime passes name,
/// namespace and UID on to CNI.
pub(super) fn sandbox_config(pod: &Pod, logs: &Path) -> Result<api::PodSandboxConfig> {
    let metadata = &pod.metadata;
    let logs = log_directory(pod, logs);
    let mut labels = pod_labels(pod);
    labels.extend(metadata.labels.clone());
    let all = pod.spec.init_containers.iter().chain(&pod.spec.containers);
    Ok(api::PodSandboxConfig {
        metadata: Some(api::PodSandboxMetadata {
            name: metadata.name.clone(),
            uid: metadata.uid.clone(),
            namespace: metadata.namespace.clone(),
            attempt: 0,
        }),
        hostname: host_name(pod),
        log_directory: logs
            .to_str()
            .context("the log directory is not UTF-8")?
            .to_owned(),
        dns_config: Some(api::DnsConfig {
            servers: vec![CLUSTER_DNS.to_owned()],
            searches: vec![format!("{}.svc.cluster.local", metadata.namespace)],
            options: vec!["ndots:5".to_owned()],
        }),
        labels,
        annotations: metadata.annotations.clone().into_iter().collect(),
        linux: Some(api::LinuxPodSandboxConfig {
            cgroup_parent: format!("/{}", cgroup(&metadata.uid)),
            security_context: Some(api::LinuxSandboxSecurityContext {
                namespace_options: Some(namespaces(pod)),
                privileged: all
                    .clone()
                    .any(|container| container.security_context.privileged),
            }),
        }),
    })
}

/// In the host's network namespace a pod has the host's name, which must not be set.
fn host_name(pod: &Pod) -> String {
    if pod.spec.host_network {
        return String::new();
    }
    let own = pod.spec.hostname.as_ref();
    own.unwrap_or(&pod.metadata.name).clone()
}

/// A container with what its resources gave it, and nothing else of the host.
pub(super) fn container_config(
    instance: &Instance<'_>,
    options: &RunOptions,
    around: &Surroundings,
) -> Result<api::ContainerConfig> {
    let Instance {
        pod,
        container,
        attempt,
    } = *instance;
    let mut labels = pod_labels(pod);
    labels.insert(
        "io.kubernetes.container.name".to_owned(),
        container.name.clone(),
    );

    // The manifest counts where both set a variable.
    let named = |name: &String| container.env.iter().any(|variable| variable.name == *name);
    let given = options.envs.iter().filter(|(name, _)| !named(name));
    let given = given.map(|(key, value)| (key.clone(), value.clone()));
    // A variable may refer to those before it.
    let mut variables: Vec<(String, String)> = Vec::new();
    for variable in &container.env {
        let value = variable.value_in(pod, &around.node, around.address)?;
        let value = expanded(&value, &variables);
        variables.push((variable.name.clone(), value));
    }
    let envs = given.chain(variables.clone()).map(|(key, value)| {
        let value = value.into_bytes();
        api::KeyValue { key, value }
    });
    let words = |words: &[String]| -> Vec<String> {
        words
            .iter()
            .map(|word| expanded(word, &variables))
            .collect()
    };

    let mut mounts: Vec<_> = options
        .mounts
        .iter()
        .map(|mount| api::Mount {
            container_path: mount.container_path.clone(),
            host_path: mount.host_path.clone(),
            readonly: mount.read_only,
            propagation: api::MountPropagation::PropagationPrivate.into(),
        })
        .collect();
    for mount in &container.volume_mounts {
        let place = around.volumes.get(&mount.name);
        let place = place.with_context(|| format!("there is no volume {}", mount.name))?;
        mounts.push(api::Mount {
            container_path: mount.mount_path.clone(),
            host_path: place
                .to_str()
                .context("a volume's path is not UTF-8")?
                .to_owned(),
            readonly: mount.read_only,
            propagation: propagation(mount.mount_propagation).into(),
        });
    }

    let devices = options.devices.iter().map(|device| api::Device {
        container_path: device.container_path.clone(),
        host_path: device.host_path.clone(),
        permissions: device.permissions.clone(),
    });
    let cdi_devices = options.cdi_devices.iter();
    let security = &container.security_context;
    let paths = |paths: &[&str]| {
        let hidden = if security.privileged { &[] } else { paths };
        hidden.iter().map(|&path| path.to_owned()).collect()
    };
    Ok(api::ContainerConfig {
        metadata: Some(api::ContainerMetadata {
            name: container.name.clone(),
            attempt,
        }),
        image: Some(api::ImageSpec {
            image: container.image.clone(),
        }),
        command: words(&container.command),
        args: words(&container.args),
        working_dir: container.working_dir.clone().unwrap_or_default(),
        envs: envs.collect(),
        mounts,
        devices: devices.collect(),
        labels,
        annotations: options.annotations.clone().into_iter().collect(),
        log_path: instance.log_path(),
        linux: Some(api::LinuxContainerConfig {
            security_context: Some(api::LinuxContainerSecurityContext {
                capabilities: Some(api::Capability {
                    add_capabilities: security.capabilities.add.clone(),
                    drop_capabilities: security.capabilities.drop.clone(),
                }),
                privileged: security.privileged,
                namespace_options: Some(namespaces(pod)),
                run_as_user: security.run_as_user.map(|value| api::Int64Value { value }),
                readonly_rootfs: security.read_only_root_filesystem,
                no_new_privs: security.allow_privilege_escalation == Some(false),
                masked_paths: paths(&MASKED),
                readonly_paths: paths(&READ_ONLY),
                // A kubelet without seccompDefault confines only pods that ask for it.
                seccomp: Some(api::SecurityProfile {
                    profile_type: seccomp(security.seccomp_profile.as_ref().map(|p| p.r#type))
                        .into(),
                }),
            }),
        }),
        cdi_devices: cdi_devices
            .map(|cdi| api::CdiDevice {
                name: cdi.name.clone(),
            })
            .collect(),
    })
}

fn propagation(wanted: Option<Propagation>) -> api::MountPropagation {
    match wanted {
        None | Some(Propagation::None) => api::MountPropagation::PropagationPrivate,
        Some(Propagation::HostToContainer) => api::MountPropagation::PropagationHostToContainer,
        Some(Propagation::Bidirectional) => api::MountPropagation::PropagationBidirectional,
    }
}

fn seccomp(wanted: Option<SeccompType>) -> api::security_profile::ProfileType {
    match wanted {
        Some(SeccompType::RuntimeDefault) => api::security_profile::ProfileType::RuntimeDefault,
        None | Some(SeccompType::Unconfined) => api::security_profile::ProfileType::Unconfined,
    }
}

fn namespaces(pod: &Pod) -> api::NamespaceOption {
    let of = |host: bool, own: api::NamespaceMode| match host {
        true => api::NamespaceMode::Node,
        false => own,
    };
    let (of_pod, of_container) = (api::NamespaceMode::Pod, api::NamespaceMode::Container);
    api::NamespaceOption {
        network: of(pod.spec.host_network, of_pod).into(),
        pid: of(pod.spec.host_pid, of_container).into(),
        ipc: of(pod.spec.host_ipc, of_pod).into(),
    }
}

fn pod_labels(pod: &Pod) -> HashMap<String, String> {
    let pod = &pod.metadata;
    HashMap::from([
        ("io.kubernetes.pod.name".to_owned(), pod.name.clone()),
        (
            "io.kubernetes.pod.namespace".to_owned(),
            pod.namespace.clone(),
        ),
        ("io.kubernetes.pod.uid".to_owned(), pod.uid.clone()),
    ])
}

#[cfg(test)]
mod tests {
    use kubelet_api::deviceplugin::DeviceSpec;

    use super::*;

    const MANIFEST: &str = r"
apiVersion: v1
kind: Pod
metadata: {name: one, annotations: {k8s.v1.cni.cncf.io/networks: net}}
spec:
  volumes: [{name: data, hostPath: {path: /srv/data}}]
  containers:
  - name: main
    image: image
    env: [{name: OWN, value: manifest}]
    securityContext: {capabilities: {add: [IPC_LOCK]}}
    volumeMounts: [{name: data, mountPath: /data, readOnly: true}]
";

    fn configs() -> (api::PodSandboxConfig, api::ContainerConfig) {
        let pod = Pod::from_manifest(MANIFEST).unwrap().remove(0);
        let device = DeviceSpec {
            container_path: "/dev/infiniband/uverbs0".to_owned(),
            host_path: "/dev/infiniband/uverbs3".to_owned(),
            permissions: "rw".to_owned(),
        };
        let pairs = [("OWN", "plugin"), ("GIVEN", "plugin")];
        let options = RunOptions {
            devices: vec![device],
            envs: pairs
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .into(),
            ..RunOptions::default()
        };
        let instance = Instance {
            pod: &pod,
            container: &pod.spec.containers[0],
            attempt: 2,
        };
        let sandbox = sandbox_config(&pod, Path::new("/logs")).unwrap();
        let around = Surroundings {
            node: "node-7".to_owned(),
            address: [10, 0, 0, 7].into(),
            volumes: [("data".to_owned(), "/srv/data".into())].into(),
        };
        let config = container_config(&instance, &options, &around).unwrap();
        (sandbox, config)
    }

    #[test]
    fn the_runtime_gets_the_pods_identity_for_cni() {
        let (sandbox, _) = configs();
        let metadata = sandbox.metadata.unwrap();
        assert_eq!(
            (metadata.name.as_str(), metadata.namespace.as_str()),
            ("one", "default")
        );
        assert_eq!(sandbox.labels["io.kubernetes.pod.uid"], metadata.uid);
        assert_eq!(sandbox.annotations["k8s.v1.cni.cncf.io/networks"], "net");
    }

    #[test]
    fn a_container_has_the_devices_it_was_given_and_no_others() {
        let (_, container) = configs();
        assert_eq!(container.devices.len(), 1);
        assert_eq!(container.devices[0].host_path, "/dev/infiniband/uverbs3");
        assert_eq!(container.devices[0].permissions, "rw");
        assert_eq!(container.mounts.len(), 1);
        assert_eq!(container.mounts[0].host_path, "/srv/data");
        assert!(container.mounts[0].readonly);
        let security = container.linux.unwrap().security_context.unwrap();
        assert_eq!(
            security.capabilities.unwrap().add_capabilities,
            ["IPC_LOCK"]
        );
        assert_eq!(security.masked_paths.len(), MASKED.len());
        assert_eq!(container.log_path, "main/2.log");
    }

    #[test]
    fn a_variable_of_the_manifest_wins_over_the_plugins() {
        let (_, container) = configs();
        let mut envs: Vec<_> = container
            .envs
            .iter()
            .map(|env| format!("{}={}", env.key, String::from_utf8_lossy(&env.value)))
            .collect();
        envs.sort();
        assert_eq!(envs, ["GIVEN=plugin", "OWN=manifest"]);
    }
}
