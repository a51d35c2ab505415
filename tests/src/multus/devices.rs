//! Which devices the kubelet gave to the pod, asked over `PodResources`.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use hyper_util::rt::TokioIo;
use kubelet_api::podresources::ListPodResourcesRequest;
use kubelet_api::podresources::pod_resources_lister_client::PodResourcesListerClient;
use tokio::net::UnixStream;
use tokio::time::timeout;
use tonic::transport::Endpoint;

use crate::kubelet::Pod;

/// As in Multus.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
const RECEIVE_LIMIT_BYTES: usize = 16 * 1024 * 1024;

/// The pod's device IDs by resource, over all its containers, and how many have been used.
#[derive(Debug, Default)]
pub(super) struct PodDevices {
    by_resource: BTreeMap<String, (Vec<String>, usize)>,
}

impl PodDevices {
    /// Lists all pods and keeps what belongs to this one. (Multus does not use `Get`.)
    pub(super) fn ask(socket: &Path, pod: &Pod) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let path = socket.to_path_buf();
        let connector = tower::service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        let list = runtime.block_on(async {
            let endpoint = Endpoint::from_static("http://localhost");
            let asked = async {
                let channel = endpoint.connect_with_connector(connector).await?;
                let mut client = PodResourcesListerClient::new(channel)
                    .max_decoding_message_size(RECEIVE_LIMIT_BYTES);
                anyhow::Ok(client.list(ListPodResourcesRequest {}).await?.into_inner())
            };
            timeout(ANSWER_TIMEOUT, asked).await.context("no answer")?
        });
        let list = list.with_context(|| format!("list pod resources on {}", socket.display()))?;
        let mut devices = Self::default();
        let (name, namespace) = (&pod.metadata.name, &pod.metadata.namespace);
        let of_pod = |found: &&_| -> bool {
            let found: &kubelet_api::podresources::PodResources = found;
            found.name == *name && found.namespace == *namespace
        };
        for container in list
            .pod_resources
            .iter()
            .filter(of_pod)
            .flat_map(|pod| &pod.containers)
        {
            for entry in &container.devices {
                let (ids, _) = devices
                    .by_resource
                    .entry(entry.resource_name.clone())
                    .or_default();
                ids.extend(entry.device_ids.iter().cloned());
            }
        }
        Ok(devices)
    }

    /// The resource's next device; nothing if the pod has no more of it, which
    /// Multus passes over in silence.
    pub(super) fn next(&mut self, resource: &str) -> Option<String> {
        let (ids, used) = self.by_resource.get_mut(resource)?;
        let id = ids.get(*used).cloned();
        *used += 1;
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_network_of_a_resource_takes_the_next_device() {
        let ids = vec!["a".to_owned(), "b".to_owned()];
        let mut devices = PodDevices {
            by_resource: [("rdma/hca".to_owned(), (ids, 0))].into(),
        };
        assert_eq!(devices.next("rdma/hca").as_deref(), Some("a"));
        assert_eq!(devices.next("rdma/other"), None);
        assert_eq!(devices.next("rdma/hca").as_deref(), Some("b"));
        assert_eq!(devices.next("rdma/hca"), None);
    }
}
