//! The container runtime over CRI, one method a call, each with a kubelet's deadline.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::runtime::Handle;
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::{Channel, Endpoint};
use tonic::{Response, Status};

use api::image_service_client::ImageServiceClient;
use api::runtime_service_client::RuntimeServiceClient;

/// Generated from `api/cri.proto`.
#[allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    clippy::doc_markdown,
    clippy::enum_variant_names,
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    reason = "generated code; the .proto file carries the documentation"
)]
pub(super) mod api {
    tonic::include_proto!("runtime.v1");
}

/// A kubelet's deadline for most calls.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);
/// The kubelet's, for a sandbox: the runtime runs CNI in it.
const SANDBOX_TIMEOUT: Duration = Duration::from_secs(240);
/// The kubelet's receive limit on this connection.
const RECEIVE_LIMIT_BYTES: usize = 16 * 1024 * 1024;

/// A container runtime.
#[derive(Debug)]
pub(super) struct Runtime {
    socket: PathBuf,
    runtime: RuntimeServiceClient<Channel>,
    images: ImageServiceClient<Channel>,
    handle: Handle,
    /// Ends the thread that drives the connection.
    _end: DropGuard,
}

impl Runtime {
    pub(super) fn connect(socket: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let handle = runtime.handle().clone();
        let end = CancellationToken::new();
        let ended = end.clone();
        thread::Builder::new()
            .name("cri".to_owned())
            .spawn(move || runtime.block_on(ended.cancelled()))?;
        let path = socket.to_path_buf();
        let connector = tower::service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        let endpoint = Endpoint::from_static("http://localhost");
        let channel = handle
            .block_on(endpoint.connect_with_connector(connector))
            .with_context(|| format!("connect to the container runtime on {}", socket.display()))?;
        Ok(Self {
            socket: socket.to_path_buf(),
            runtime: RuntimeServiceClient::new(channel.clone())
                .max_decoding_message_size(RECEIVE_LIMIT_BYTES),
            images: ImageServiceClient::new(channel),
            handle,
            _end: end.drop_guard(),
        })
    }

    fn call<T>(
        &self,
        what: &str,
        deadline: Duration,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T> {
        let answered = self
            .handle
            .block_on(async { timeout(deadline, call).await });
        let answered = answered.map_err(|_| {
            anyhow!(
                "{what}: no answer from {} in {deadline:?}",
                self.socket.display()
            )
        })?;
        let answer = answered
            .map_err(|status| anyhow!("{what}: {:?}: {}", status.code(), status.message()))?;
        Ok(answer.into_inner())
    }

    pub(super) fn version(&self) -> Result<api::VersionResponse> {
        let request = api::VersionRequest {
            version: "0.1.0".to_owned(),
        };
        let mut client = self.runtime.clone();
        self.call("Version", CALL_TIMEOUT, client.version(request))
    }

    pub(super) fn has_image(&self, image: &str) -> Result<bool> {
        let request = api::ImageStatusRequest {
            image: Some(api::ImageSpec {
                image: image.to_owned(),
            }),
        };
        let mut client = self.images.clone();
        let status = self.call("ImageStatus", CALL_TIMEOUT, client.image_status(request))?;
        Ok(status.image.is_some())
    }

    pub(super) fn run_sandbox(&self, config: api::PodSandboxConfig) -> Result<String> {
        let request = api::RunPodSandboxRequest {
            config: Some(config),
        };
        let mut client = self.runtime.clone();
        let answer = self.call(
            "RunPodSandbox",
            SANDBOX_TIMEOUT,
            client.run_pod_sandbox(request),
        )?;
        Ok(answer.pod_sandbox_id)
    }

    pub(super) fn sandboxes(&self) -> Result<Vec<api::PodSandbox>> {
        let request = api::ListPodSandboxRequest {};
        let mut client = self.runtime.clone();
        Ok(self
            .call(
                "ListPodSandbox",
                CALL_TIMEOUT,
                client.list_pod_sandbox(request),
            )?
            .items)
    }

    /// Address on the default network.
    pub(super) fn sandbox_ip(&self, sandbox: &str) -> Result<String> {
        let request = api::PodSandboxStatusRequest {
            pod_sandbox_id: sandbox.to_owned(),
            verbose: false,
        };
        let mut client = self.runtime.clone();
        let answer = self.call(
            "PodSandboxStatus",
            CALL_TIMEOUT,
            client.pod_sandbox_status(request),
        )?;
        let network = answer.status.and_then(|status| status.network);
        Ok(network.map(|network| network.ip).unwrap_or_default())
    }

    pub(super) fn stop_sandbox(&self, sandbox: &str) -> Result<()> {
        let request = api::StopPodSandboxRequest {
            pod_sandbox_id: sandbox.to_owned(),
        };
        let mut client = self.runtime.clone();
        self.call(
            "StopPodSandbox",
            SANDBOX_TIMEOUT,
            client.stop_pod_sandbox(request),
        )
        .map(drop)
    }

    pub(super) fn remove_sandbox(&self, sandbox: &str) -> Result<()> {
        let request = api::RemovePodSandboxRequest {
            pod_sandbox_id: sandbox.to_owned(),
        };
        let mut client = self.runtime.clone();
        self.call(
            "RemovePodSandbox",
            CALL_TIMEOUT,
            client.remove_pod_sandbox(request),
        )
        .map(drop)
    }

    pub(super) fn create_container(
        &self,
        sandbox: &str,
        config: api::ContainerConfig,
        sandbox_config: api::PodSandboxConfig,
    ) -> Result<String> {
        let request = api::CreateContainerRequest {
            pod_sandbox_id: sandbox.to_owned(),
            config: Some(config),
            sandbox_config: Some(sandbox_config),
        };
        let mut client = self.runtime.clone();
        let answer = self.call(
            "CreateContainer",
            CALL_TIMEOUT,
            client.create_container(request),
        )?;
        Ok(answer.container_id)
    }

    pub(super) fn start_container(&self, id: &str) -> Result<()> {
        let request = api::StartContainerRequest {
            container_id: id.to_owned(),
        };
        let mut client = self.runtime.clone();
        self.call(
            "StartContainer",
            CALL_TIMEOUT,
            client.start_container(request),
        )
        .map(drop)
    }

    pub(super) fn containers(&self, sandbox: &str) -> Result<Vec<api::Container>> {
        let filter = api::ContainerFilter {
            pod_sandbox_id: sandbox.to_owned(),
        };
        let request = api::ListContainersRequest {
            filter: Some(filter),
        };
        let mut client = self.runtime.clone();
        Ok(self
            .call(
                "ListContainers",
                CALL_TIMEOUT,
                client.list_containers(request),
            )?
            .containers)
    }

    pub(super) fn container_status(&self, id: &str) -> Result<api::ContainerStatus> {
        let request = api::ContainerStatusRequest {
            container_id: id.to_owned(),
        };
        let mut client = self.runtime.clone();
        let answer = self.call(
            "ContainerStatus",
            CALL_TIMEOUT,
            client.container_status(request),
        )?;
        answer
            .status
            .with_context(|| format!("ContainerStatus of {id}: no status"))
    }

    pub(super) fn stop_container(&self, id: &str, grace_seconds: i64) -> Result<()> {
        let request = api::StopContainerRequest {
            container_id: id.to_owned(),
            timeout: grace_seconds,
        };
        let grace = Duration::from_secs(u64::try_from(grace_seconds).unwrap_or_default());
        let mut client = self.runtime.clone();
        self.call(
            "StopContainer",
            CALL_TIMEOUT + grace,
            client.stop_container(request),
        )
        .map(drop)
    }

    pub(super) fn remove_container(&self, id: &str) -> Result<()> {
        let request = api::RemoveContainerRequest {
            container_id: id.to_owned(),
        };
        let mut client = self.runtime.clone();
        self.call(
            "RemoveContainer",
            CALL_TIMEOUT,
            client.remove_container(request),
        )
        .map(drop)
    }

    pub(super) fn exec(
        &self,
        id: &str,
        command: &[String],
        timeout: Duration,
    ) -> Result<api::ExecSyncResponse> {
        let request = api::ExecSyncRequest {
            container_id: id.to_owned(),
            cmd: command.to_vec(),
            timeout: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        };
        let mut client = self.runtime.clone();
        // The runtime ends the command; its answer then needs a moment more.
        self.call(
            "ExecSync",
            timeout + Duration::from_secs(15),
            client.exec_sync(request),
        )
    }
}
