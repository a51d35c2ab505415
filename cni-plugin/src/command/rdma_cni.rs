//! Attachments that the RDMA CNI plugin made before this one took its place: its state files are
//! read, so that pods it served can end.

use std::{
    fs,
    path::{Path, PathBuf},
};

use attachment::{node::Node, rdma};
use cni_wire::{AttachmentId, Code, Request};
use netlink::Namespace;
use node::trust;
use serde::Deserialize;

use crate::error::Error;

/// What the RDMA CNI plugin wrote about an attachment: version 1.0 of its state.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct State {
    sandbox_rdma_dev_name: String,
    container_rdma_dev_name: String,
}

/// Its state has three short texts.
const MAX_BYTES: u64 = 64 << 10;

/// The file in which the RDMA CNI plugin kept an attachment.
fn state_file(root: &Path, network: &str, id: &AttachmentId) -> PathBuf {
    root.join("var/lib/cni/rdma")
        .join(format!("{network}-{}-{}", id.container_id, id.ifname))
}

/// Ends an attachment that the RDMA CNI plugin made before this one took its place. Without such
/// a file there is nothing to do.
///
/// # Errors
/// Code 5: the file cannot be read; the kernel's refusal.
pub(super) fn import(node: &Node, request: &Request, id: &AttachmentId) -> Result<(), Error> {
    let file = state_file(&node.root, &request.config.name, id);
    let text = trust::read(&file, MAX_BYTES).map_err(|e| Error::new(Code::Io, e.to_string()))?;
    let Some(text) = text else {
        return Ok(());
    };
    match serde_json::from_slice::<State>(&text) {
        Ok(state) => {
            let path = request.env.netns.as_deref().unwrap_or_default();
            let pod = Namespace::open(Path::new(path))?
                .filter(|pod| pod.id() != node.netns.namespace.id());
            rdma::return_device_by_name(
                node,
                &state.container_rdma_dev_name,
                &state.sandbox_rdma_dev_name,
                pod.as_ref(),
            )?;
        }
        Err(e) => node.log.warn(format_args!(
            "{} is not what the RDMA CNI plugin writes ({e}); removed",
            file.display()
        )),
    }
    fs::remove_file(&file)
        .map_err(|e| Error::new(Code::Io, format!("remove {}: {e}", file.display())))
}

#[cfg(test)]
mod tests {
    use cni_wire::{ContainerId, IfName};

    use super::*;

    #[test]
    fn the_state_of_the_rdma_plugin_is_found_and_read() {
        let id = AttachmentId {
            container_id: ContainerId::parse("c1").unwrap(),
            ifname: IfName::parse("net1").unwrap(),
        };
        assert_eq!(
            state_file(Path::new("/"), "sriov-net", &id),
            Path::new("/var/lib/cni/rdma/sriov-net-c1-net1")
        );
        let text = r#"{"version": "1.0", "deviceID": "0000:3b:00.2",
            "sandboxRdmaDevName": "mlx5_2", "containerRdmaDevName": "mlx5_2"}"#;
        let state: State = serde_json::from_str(text).unwrap();
        assert_eq!(state.sandbox_rdma_dev_name, "mlx5_2");
        assert_eq!(state.container_rdma_dev_name, "mlx5_2");
    }
}
