//! Admitting pods: whether they fit, and the calls to plugins that give them devices.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use kubelet_api::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerPreferredAllocationRequest,
    PreStartContainerRequest, PreferredAllocationRequest,
};
use thiserror::Error;
use tokio::time::timeout;

use super::pod::{Container, Pod};
use super::run_options::RunOptions;
use super::shared::{Plugin, Shared};
use super::state::{Choice, Open};

/// The only call to a plugin that has a deadline.
const PRE_START_TIMEOUT: Duration = Duration::from_secs(30);

/// Why a pod does not run.
#[derive(Debug, Error)]
pub enum NotAdmitted {
    /// The scheduler would leave it pending.
    #[error(
        "pod {pod} stays pending: insufficient {resource}: it asks for {wanted}, the node has {free} left"
    )]
    Unschedulable {
        /// `namespace/name`.
        pod: String,
        /// The resource.
        resource: String,
        /// Units asked for.
        wanted: u64,
        /// Units allocatable and not asked for by other pods.
        free: u64,
    },
    /// The kubelet failed to get the devices. The pod has failed for good.
    #[error("pod {pod}: UnexpectedAdmissionError: {cause:#}")]
    Unexpected {
        /// `namespace/name`.
        pod: String,
        /// What went wrong.
        cause: anyhow::Error,
    },
}

impl Shared {
    /// Whether the scheduler would place the pod here: by counts alone, knowing no device.
    pub(super) fn fits(&self, pod: &Pod) -> Result<(), NotAdmitted> {
        let node = self.node();
        let inner = self.lock();
        for (resource, wanted) in pod.requests() {
            let allocatable = node
                .get(&resource)
                .map_or(0, |quantity| quantity.allocatable as u64);
            let others = inner
                .pods
                .values()
                .filter(|other| other.metadata.uid != pod.metadata.uid);
            let taken: u64 = others
                .filter_map(|other| other.requests().remove(&resource))
                .sum();
            let free = allocatable.saturating_sub(taken);
            if wanted > free {
                return Err(NotAdmitted::Unschedulable {
                    pod: pod.full_name(),
                    resource,
                    wanted,
                    free,
                });
            }
        }
        Ok(())
    }

    /// Gets every container its devices: init containers first, whose devices
    /// the others use again. What was given before a failure is freed.
    pub(super) async fn allocate(&self, pod: &Pod) -> Result<(), NotAdmitted> {
        let _serial = self.admission.lock().await;
        let uid = &pod.metadata.uid;
        let mut reusable: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        let init = pod
            .spec
            .init_containers
            .iter()
            .map(|container| (container, true));
        let app = pod
            .spec
            .containers
            .iter()
            .map(|container| (container, false));
        for (container, is_init) in init.chain(app) {
            let keeps_running = !is_init || container.is_sidecar();
            for (resource, wanted) in container.extended_limits() {
                let reuse = reusable.entry(resource.clone()).or_default();
                let given = self
                    .allocate_resource(uid, container, &resource, wanted, reuse)
                    .await;
                if let Err(cause) = given {
                    self.lock().state.release(uid);
                    return Err(NotAdmitted::Unexpected {
                        pod: pod.full_name(),
                        cause,
                    });
                }
                let held = self.held(uid, container, &resource);
                if keeps_running {
                    reuse.retain(|id| !held.contains(id));
                } else {
                    reuse.extend(held);
                }
            }
        }
        self.checkpoint().map_err(|cause| NotAdmitted::Unexpected {
            pod: pod.full_name(),
            cause,
        })
    }

    fn held(&self, uid: &str, container: &Container, resource: &str) -> BTreeSet<String> {
        let inner = self.lock();
        let held = inner.state.held(uid, &container.name, resource);
        held.map(super::state::Assignment::ids).unwrap_or_default()
    }

    /// One resource of one container: one Allocate with one container request.
    /// Neither it nor `GetPreferredAllocation` has a deadline, as in the kubelet.
    async fn allocate_resource(
        &self,
        uid: &str,
        container: &Container,
        resource: &str,
        wanted: u64,
        reusable: &BTreeSet<String>,
    ) -> Result<()> {
        let wanted = usize::try_from(wanted).context("more devices than a node can have")?;
        let choice = self
            .lock()
            .state
            .choose(uid, &container.name, resource, wanted, reusable)?;
        let ids = match choice {
            Choice::Held => return Ok(()),
            Choice::Reused(ids) => ids,
            Choice::Open(open) => {
                let preferred = self.preferred(resource, &open).await?;
                open.settle(&preferred)
            }
        };
        let mut client = self.live_plugin(resource)?;
        let request = ContainerAllocateRequest {
            devices_ids: ids.iter().cloned().collect(),
        };
        let answer = client
            .allocate(AllocateRequest {
                container_requests: vec![request],
            })
            .await;
        let answer = answer.map_err(|status| {
            anyhow!("Allocate failed: {:?}: {}", status.code(), status.message())
        })?;
        let first = answer.into_inner().container_responses.into_iter().next();
        let response = first.context("no containers in the answer to Allocate")?;
        self.lock()
            .state
            .assign(uid, &container.name, resource, ids, response);
        self.notify();
        Ok(())
    }

    async fn preferred(&self, resource: &str, open: &Open) -> Result<Vec<String>> {
        if !self
            .plugin(resource)?
            .options
            .get_preferred_allocation_available
        {
            return Ok(Vec::new());
        }
        let mut client = self.live_plugin(resource)?;
        let request = ContainerPreferredAllocationRequest {
            available_device_i_ds: open.available.iter().cloned().collect(),
            must_include_device_i_ds: open.must_include.iter().cloned().collect(),
            allocation_size: i32::try_from(open.size).context("too many devices for one call")?,
        };
        let request = PreferredAllocationRequest {
            container_requests: vec![request],
        };
        let answer = client
            .get_preferred_allocation(request)
            .await
            .map_err(|status| {
                anyhow!(
                    "GetPreferredAllocation failed: {:?}: {}",
                    status.code(),
                    status.message()
                )
            })?;
        let first = answer.into_inner().container_responses.into_iter().next();
        Ok(first
            .map(|response| response.device_i_ds)
            .unwrap_or_default())
    }

    /// What a container is to be started or restarted with: the answers of its
    /// admission, however long ago. Only `PreStartContainer` is called anew.
    pub(super) async fn run_options(&self, pod: &Pod, container: &str) -> Result<RunOptions> {
        let uid = &pod.metadata.uid;
        let known = pod.spec.init_containers.iter().chain(&pod.spec.containers);
        if !known.clone().any(|known| known.name == container) {
            bail!("pod {} has no container {container}", pod.full_name());
        }
        let mut options = RunOptions::default();
        let assignments: Vec<_> = {
            let inner = self.lock();
            let all = inner.state.assignments.iter();
            all.filter(|held| held.pod_uid == *uid && held.container == container)
                .cloned()
                .collect()
        };
        for held in assignments {
            let resource = &held.resource;
            if self
                .plugin(resource)
                .is_ok_and(|plugin| plugin.options.pre_start_required)
            {
                let mut client = self.live_plugin(resource)?;
                let request = PreStartContainerRequest {
                    devices_ids: held.ids().into_iter().collect(),
                };
                timeout(PRE_START_TIMEOUT, client.pre_start_container(request))
                    .await
                    .map_err(|_| anyhow!("{resource}: PreStartContainer: no answer in 30 s"))?
                    .map_err(|status| {
                        anyhow!("{resource}: PreStartContainer failed: {}", status.message())
                    })?;
            }
            options.merge(&held.response);
        }
        for conflict in &options.conflicts {
            tracing::warn!(
                pod = pod.full_name(),
                container,
                conflict,
                "resources contradict"
            );
        }
        Ok(options)
    }

    fn plugin(&self, resource: &str) -> Result<Plugin> {
        let plugin = self.lock().plugins.get(resource).cloned();
        plugin.with_context(|| format!("endpoint not found in cache for {resource}"))
    }

    fn live_plugin(
        &self,
        resource: &str,
    ) -> Result<
        kubelet_api::deviceplugin::device_plugin_client::DevicePluginClient<
            tonic::transport::Channel,
        >,
    > {
        let plugin = self.plugin(resource)?;
        plugin
            .client
            .with_context(|| format!("endpoint of {resource} has been stopped"))
    }
}
