//! What a container is started with, merged from the answers of its resources.

use std::collections::BTreeMap;

use kubelet_api::deviceplugin::{CdiDevice, ContainerAllocateResponse, DeviceSpec, Mount};

/// Devices, environment, mounts, annotations and CDI names of one container.
///
/// Where two resources contradict each other the first keeps its word, and the
/// contradiction is noted, as the kubelet does in its log.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunOptions {
    /// Device nodes, one for each path in the container.
    pub devices: Vec<DeviceSpec>,
    /// Environment.
    pub envs: BTreeMap<String, String>,
    /// Mounts, one for each path in the container.
    pub mounts: Vec<Mount>,
    /// Annotations of the container, for the runtime.
    pub annotations: BTreeMap<String, String>,
    /// Fully qualified CDI names, each once.
    pub cdi_devices: Vec<CdiDevice>,
    /// Contradictions between resources, in words.
    pub conflicts: Vec<String>,
}

impl RunOptions {
    /// Adds the answer for one more resource.
    pub(super) fn merge(&mut self, response: &ContainerAllocateResponse) {
        for device in &response.devices {
            let path = &device.container_path;
            match self
                .devices
                .iter()
                .find(|known| known.container_path == *path)
            {
                None => self.devices.push(device.clone()),
                Some(known) if known.host_path == device.host_path => {}
                Some(known) => self.conflicts.push(format!(
                    "device {path}: kept {}, not {}",
                    known.host_path, device.host_path
                )),
            }
        }
        for mount in &response.mounts {
            let path = &mount.container_path;
            match self
                .mounts
                .iter()
                .find(|known| known.container_path == *path)
            {
                None => self.mounts.push(mount.clone()),
                Some(known) if known.host_path == mount.host_path => {}
                Some(known) => self.conflicts.push(format!(
                    "mount {path}: kept {}, not {}",
                    known.host_path, mount.host_path
                )),
            }
        }
        merge_map(
            "environment variable",
            &mut self.envs,
            &response.envs,
            &mut self.conflicts,
        );
        merge_map(
            "annotation",
            &mut self.annotations,
            &response.annotations,
            &mut self.conflicts,
        );
        for device in &response.cdi_devices {
            if !self.cdi_devices.contains(device) {
                self.cdi_devices.push(device.clone());
            }
        }
    }
}

fn merge_map<'a>(
    what: &str,
    known: &mut BTreeMap<String, String>,
    more: impl IntoIterator<Item = (&'a String, &'a String)>,
    conflicts: &mut Vec<String>,
) {
    for (key, value) in more {
        let kept = known.entry(key.clone()).or_insert_with(|| value.clone());
        if kept != value {
            conflicts.push(format!("{what} {key}: kept {kept}, not {value}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(env: &str, host_path: &str, cdi: &str) -> ContainerAllocateResponse {
        ContainerAllocateResponse {
            envs: [("KEY".to_owned(), env.to_owned())].into(),
            mounts: vec![Mount {
                container_path: "/mount".to_owned(),
                host_path: host_path.to_owned(),
                read_only: false,
            }],
            devices: vec![DeviceSpec {
                container_path: "/dev/infiniband/rdma_cm".to_owned(),
                host_path: host_path.to_owned(),
                permissions: "rw".to_owned(),
            }],
            annotations: [("key".to_owned(), env.to_owned())].into(),
            cdi_devices: vec![CdiDevice {
                name: cdi.to_owned(),
            }],
        }
    }

    #[test]
    fn two_resources_that_agree_are_merged_without_a_word() {
        let mut options = RunOptions::default();
        options.merge(&response("x", "/dev/infiniband/rdma_cm", "v/c=1"));
        options.merge(&response("x", "/dev/infiniband/rdma_cm", "v/c=1"));
        assert_eq!(options.devices.len(), 1);
        assert_eq!(options.mounts.len(), 1);
        assert_eq!(options.cdi_devices.len(), 1);
        assert!(options.conflicts.is_empty());
    }

    #[test]
    fn the_first_of_two_that_contradict_wins_and_it_is_noted() {
        let mut options = RunOptions::default();
        options.merge(&response("first", "/a", "v/c=1"));
        options.merge(&response("second", "/b", "v/c=2"));
        assert_eq!(options.envs["KEY"], "first");
        assert_eq!(options.devices[0].host_path, "/a");
        assert_eq!(
            options.cdi_devices.len(),
            2,
            "CDI names cannot contradict each other"
        );
        assert_eq!(options.conflicts.len(), 4, "{:?}", options.conflicts);
    }
}
