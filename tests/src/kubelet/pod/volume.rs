//! Volumes of a pod and where its containers see them.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A directory or file of the host, or the files of `ConfigMaps`.
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
    /// Files of several `ConfigMaps`; those of a later one replace those of an earlier one.
    #[serde(default)]
    pub projected: Option<Projected>,
    /// A directory of the pod's own.
    #[serde(default)]
    pub empty_dir: Option<EmptyDir>,
}

impl Volume {
    /// The `ConfigMaps` whose files it shows, in order.
    pub fn config_maps(&self) -> impl Iterator<Item = &ConfigMapSource> {
        let projected = self.projected.iter().flat_map(|volume| &volume.sources);
        self.config_map
            .iter()
            .chain(projected.map(|source| &source.config_map))
    }
}

/// Sources of a volume.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Projected {
    /// In order.
    pub sources: Vec<ProjectedSource>,
}

/// `ConfigMaps` alone: there is no API server that could give a token.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ProjectedSource {
    /// Which.
    pub config_map: ConfigMapSource,
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
    /// The pod starts without it.
    #[serde(default)]
    pub optional: bool,
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
