//! The PodResources service: which container holds which devices.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use kubelet_api::podresources::pod_resources_lister_server::PodResourcesLister;
use kubelet_api::podresources::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, ContainerDevices,
    ContainerResources, GetPodResourcesRequest, GetPodResourcesResponse, ListPodResourcesRequest,
    ListPodResourcesResponse, NumaNode, PodResources, TopologyInfo,
};
use tonic::{Request, Response, Status};

use super::pod::Pod;
use super::shared::Shared;
use super::state::{NO_NUMA, State};

/// The service on `pod-resources/kubelet.sock`.
#[derive(Debug)]
pub(super) struct Lister {
    shared: Arc<Shared>,
    bucket: Mutex<Bucket>,
}

impl Lister {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            bucket: Mutex::new(Bucket {
                tokens: Bucket::BURST,
                at: Instant::now(),
            }),
        }
    }

    fn admit(&self) -> Result<(), Status> {
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        if bucket.take(Instant::now()) {
            return Ok(());
        }
        Err(Status::resource_exhausted("rejected by rate limit"))
    }
}

/// The kubelet's limit: 100 calls a second, 10 at once.
#[derive(Debug)]
struct Bucket {
    tokens: f64,
    at: Instant,
}

impl Bucket {
    const BURST: f64 = 10.0;
    const PER_SECOND: f64 = 100.0;

    fn take(&mut self, now: Instant) -> bool {
        let gained = now.duration_since(self.at).as_secs_f64() * Self::PER_SECOND;
        self.tokens = (self.tokens + gained).min(Self::BURST);
        self.at = now;
        let allowed = self.tokens >= 1.0;
        if allowed {
            self.tokens -= 1.0;
        }
        allowed
    }
}

#[tonic::async_trait]
impl PodResourcesLister for Lister {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        self.shared.lock().pod_lists += 1;
        self.admit()?;
        let inner = self.shared.lock();
        if inner.misbehaviour.lists_no_pods {
            return Ok(Response::new(ListPodResourcesResponse::default()));
        }
        let now = Instant::now();
        let is_added = |name: &String| inner.added.get(name).is_none_or(|at| *at <= now);
        let pods = inner.pods.iter().filter(|(name, _)| is_added(name));
        let pods = pods
            .map(|(_, pod)| pod)
            .map(|pod| pod_resources(pod, &inner.state));
        // Every node has some: it is how a network comes to a node.
        let of_a_daemon_set = PodResources {
            name: "node-network-x7k2p".into(),
            namespace: "kube-system".into(),
            ..PodResources::default()
        };
        Ok(Response::new(ListPodResourcesResponse {
            pod_resources: pods.chain([of_a_daemon_set]).collect(),
        }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        self.admit()?;
        let inner = self.shared.lock();
        let mut devices = Vec::new();
        for (resource, device) in inner.state.healthy_devices() {
            match &device.topology {
                None => devices.push(container_devices(resource, &device.id, NO_NUMA)),
                // One entry for each node; so a topology without nodes hides its device.
                Some(topology) => devices.extend(
                    topology
                        .nodes
                        .iter()
                        .map(|n| container_devices(resource, &device.id, n.id)),
                ),
            }
        }
        Ok(Response::new(AllocatableResourcesResponse {
            devices,
            ..Default::default()
        }))
    }

    async fn get(
        &self,
        request: Request<GetPodResourcesRequest>,
    ) -> Result<Response<GetPodResourcesResponse>, Status> {
        self.admit()?;
        let request = request.into_inner();
        let name = format!("{}/{}", request.pod_namespace, request.pod_name);
        let inner = self.shared.lock();
        let Some(pod) = inner.pods.get(&name) else {
            // A plain Go error, hence unknown.
            return Err(Status::unknown(format!(
                "pod {} in namespace {} not found",
                request.pod_name, request.pod_namespace
            )));
        };
        let pod_resources = Some(pod_resources(pod, &inner.state));
        Ok(Response::new(GetPodResourcesResponse { pod_resources }))
    }
}

/// App containers and sidecars, each with an entry for every device and NUMA node.
fn pod_resources(pod: &Pod, state: &State) -> PodResources {
    let sidecars = pod
        .spec
        .init_containers
        .iter()
        .filter(|init| init.is_sidecar());
    let containers = sidecars.chain(&pod.spec.containers).map(|container| {
        let held = state
            .assignments
            .iter()
            .filter(|held| held.pod_uid == pod.metadata.uid && held.container == container.name);
        let devices = held.flat_map(|held| {
            let by_node = held.devices.iter();
            by_node.flat_map(move |(&node, ids)| {
                ids.iter()
                    .map(move |id| container_devices(&held.resource, id, node))
            })
        });
        ContainerResources {
            name: container.name.clone(),
            devices: devices.collect(),
            ..ContainerResources::default()
        }
    });
    PodResources {
        name: pod.metadata.name.clone(),
        namespace: pod.metadata.namespace.clone(),
        containers: containers.collect(),
        ..PodResources::default()
    }
}

fn container_devices(resource: &str, id: &str, node: i64) -> ContainerDevices {
    ContainerDevices {
        resource_name: resource.to_owned(),
        device_ids: vec![id.to_owned()],
        topology: (node != NO_NUMA).then(|| TopologyInfo {
            nodes: vec![NumaNode { id: node }],
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn ten_calls_at_once_then_a_hundred_a_second() {
        let start = Instant::now();
        let mut bucket = Bucket {
            tokens: Bucket::BURST,
            at: start,
        };
        let at_once = (0..20).filter(|_| bucket.take(start)).count();
        assert_eq!(at_once, 10);
        assert!(!bucket.take(start + Duration::from_millis(5)));
        assert!(bucket.take(start + Duration::from_millis(25)));
    }
}
