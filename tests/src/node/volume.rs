//! Volumes, made as a kubelet makes them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::kubelet::{Pod, Volume};

/// Makes a pod's volume, if it is not there, and says where on the host it is. `pods` is the
/// kubelet's directory of what belongs to pods.
pub(super) fn make(pod: &Pod, volume: &Volume, pods: &Path) -> Result<PathBuf> {
    if volume.config_map.is_some() || volume.projected.is_some() {
        let of_pod = pods.join(&pod.metadata.uid);
        let directory = of_pod
            .join("volumes/kubernetes.io~configmap")
            .join(&volume.name);
        fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
        let maps = volume.config_maps();
        let found = maps.filter_map(|source| pod.config_maps.get(&source.name));
        for (name, text) in found.flatten() {
            let file = directory.join(name);
            fs::write(&file, text).with_context(|| file.display().to_string())?;
        }
        return Ok(directory);
    }
    if volume.empty_dir.is_some() {
        let of_pod = pods.join(&pod.metadata.uid);
        let directory = of_pod
            .join("volumes/kubernetes.io~empty-dir")
            .join(&volume.name);
        fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
        return Ok(directory);
    }
    let source = volume.host_path.as_ref();
    let source = source.with_context(|| format!("volume {} is of no kind", volume.name))?;
    let path = PathBuf::from(&source.path);
    let kind = source.r#type.as_deref().unwrap_or_default();
    let right = match kind {
        "DirectoryOrCreate" => {
            fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
            true
        }
        "Directory" => path.is_dir(),
        // An empty file where there is nothing, in a directory that has to be there.
        "FileOrCreate" => {
            let file = fs::OpenOptions::new().append(true).create(true).open(&path);
            file.with_context(|| format!("create {}", path.display()))?;
            path.is_file()
        }
        "File" => path.is_file(),
        "" => path.exists(),
        _ => bail!(
            "volume {}: hostPath type {kind} is not known here",
            volume.name
        ),
    };
    ensure!(
        right,
        "hostPath type check failed: {} is not a {kind}",
        path.display()
    );
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_must_be_there_is_not_made() {
        let directory = tempfile::tempdir().unwrap();
        let pod = Pod::with_limits("a", &[]).unwrap();
        let make = |name: &str, kind: &str| {
            let path = directory.path().join(name);
            let volume = serde_json::json!({"name": "v", "hostPath": {"path": path, "type": kind}});
            make(
                &pod,
                &serde_json::from_value(volume).unwrap(),
                directory.path(),
            )
        };
        assert!(make("a", "Directory").is_err());
        assert!(make("a", "DirectoryOrCreate").unwrap().is_dir());
        assert!(make("a", "Directory").is_ok());
        assert!(make("a", "File").is_err());
        assert!(make("a", "FileOrCreate").is_err());
        assert!(make("b/c", "FileOrCreate").is_err());
        let file = make("b", "FileOrCreate").unwrap();
        std::fs::write(&file, "kept").unwrap();
        make("b", "FileOrCreate").unwrap();
        assert_eq!(std::fs::read_to_string(file).unwrap(), "kept");
        assert!(make("b", "Socket").is_err());
    }
}
