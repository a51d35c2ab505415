//! Pods of a manifest: read, and refused where the API server would or the stand-in cannot.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value};

use super::{ConfigMaps, Pod, whole};

impl Pod {
    /// The Pods of a manifest, each with a UID of its own, of each DaemonSet the one it has on a
    /// node, and of each `StatefulSet` the first. What each ConfigMap holds goes with them, other
    /// kinds are passed over.
    ///
    /// # Errors
    /// Not YAML, a field the stand-in cannot honour, or requests the API server would refuse.
    pub fn from_manifest(text: &str) -> Result<Vec<Self>> {
        let objects: Vec<Value> =
            serde_saphyr::from_multiple(text).context("read the manifest as YAML")?;
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
            let kinds = [
                volume.host_path.is_some(),
                volume.config_map.is_some(),
                volume.projected.is_some(),
                volume.empty_dir.is_some(),
            ];
            if kinds.into_iter().filter(|is| *is).count() != 1 {
                bail!("pod {pod}: volume {} is not of one kind", volume.name);
            }
            for source in volume.config_maps() {
                if !source.optional && !self.config_maps.contains_key(&source.name) {
                    bail!(
                        "pod {pod}: ConfigMap {} is not in its manifest",
                        source.name
                    );
                }
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

pub(super) fn new_uid() -> Result<String> {
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
    fn a_daemon_set_is_its_pod_with_its_config_maps() {
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
      volumes:
      - name: settings
        projected: {sources: [{configMap: {name: settings}}, {configMap: {name: more, optional: true}}]}
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
    fn names_what_it_cannot_honour() {
        for (from, to, word) in [
            (
                "restartPolicy: Never",
                "shareProcessNamespace: true",
                "shareProcessNamespace",
            ),
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
}
