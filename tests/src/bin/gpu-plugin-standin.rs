//! A GPU vendor's device plugin without GPUs: offers a machine's display devices by their PCI
//! addresses, as AMD's plugin names its GPUs, or by UUIDs, as NVIDIA's. A container gets nothing of them.

#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::pin::Pin;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use hyper_util::rt::TokioIo;
use kubelet_api::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use kubelet_api::deviceplugin::registration_client::RegistrationClient;
use kubelet_api::deviceplugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, Device, DevicePluginOptions,
    Empty, HEALTHY, ListAndWatchResponse, NumaNode, PreStartContainerRequest,
    PreStartContainerResponse, PreferredAllocationRequest, PreferredAllocationResponse,
    RegisterRequest, TopologyInfo, VERSION,
};
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status};

/// Display devices by the PCI specification's class codes (`PCI_BASE_CLASS_DISPLAY`).
const DISPLAY_CLASS: &str = "0x03";
/// Name of its socket in the device-plugins directory.
const ENDPOINT: &str = "gpu-plugin-standin.sock";

#[derive(Parser)]
#[command(about = "A GPU device plugin's stand-in: a machine's display devices by PCI address")]
struct Cli {
    /// What the units are called.
    #[arg(long, default_value = "amd.com/gpu")]
    resource: String,
    /// The kubelet's device-plugins directory.
    #[arg(long, default_value = "/var/lib/kubelet/device-plugins")]
    device_plugin_dir: PathBuf,
    /// Where sysfs is.
    #[arg(long, default_value = "/sys")]
    sys: PathBuf,
    /// Where NVIDIA's driver has its files, such as /proc/driver/nvidia: units are then named by UUID, as
    /// NVIDIA's plugin names them.
    #[arg(long)]
    nvidia: Option<PathBuf>,
}

#[derive(Debug)]
struct Gpus(Vec<Device>);

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let cli = Cli::parse();
    let gpus = gpus(&cli.sys, cli.nvidia.as_deref())?;
    ensure!(!gpus.is_empty(), "this machine has no display device");
    let socket = cli.device_plugin_dir.join(ENDPOINT);
    // Left by one that was killed.
    let _ = fs::remove_file(&socket);
    let listener =
        UnixListener::bind(&socket).with_context(|| format!("bind {}", socket.display()))?;
    let served = Server::builder()
        .add_service(DevicePluginServer::new(Gpus(gpus)))
        .serve_with_incoming(UnixListenerStream::new(listener));
    let served = tokio::spawn(served);
    register(&cli.device_plugin_dir.join("kubelet.sock"), cli.resource).await?;
    served.await?.context("serve the device plugin")
}

async fn register(kubelet: &Path, resource_name: String) -> Result<()> {
    let path = kubelet.to_owned();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://localhost");
    let channel = endpoint.connect_with_connector(connector).await;
    let channel = channel.with_context(|| format!("connect to {}", kubelet.display()))?;
    let request = RegisterRequest {
        version: VERSION.to_owned(),
        endpoint: ENDPOINT.to_owned(),
        resource_name,
        options: None,
    };
    let registered = RegistrationClient::new(channel).register(request).await;
    registered.context("register").map(drop)
}

/// Display devices with their NUMA nodes, in the order of their addresses.
fn gpus(sys: &Path, nvidia: Option<&Path>) -> Result<Vec<Device>> {
    let directory = sys.join("bus/pci/devices");
    let entries =
        fs::read_dir(&directory).with_context(|| format!("list {}", directory.display()))?;
    let mut gpus = Vec::new();
    for entry in entries {
        let entry = entry?;
        let text = |file: &str| fs::read_to_string(entry.path().join(file)).unwrap_or_default();
        if !text("class").starts_with(DISPLAY_CLASS) {
            continue;
        }
        // -1 where the firmware says nothing.
        let node = text("numa_node").trim().parse().ok();
        let node = node.filter(|node: &i64| *node >= 0);
        let address = entry.file_name().to_string_lossy().into_owned();
        gpus.push(Device {
            id: match nvidia {
                Some(driver) => uuid(&driver.join("gpus").join(&address))?,
                None => address,
            },
            health: HEALTHY.to_owned(),
            topology: node.map(|id| TopologyInfo {
                nodes: vec![NumaNode { id }],
            }),
        });
    }
    gpus.sort_by(|one, other| one.id.cmp(&other.id));
    Ok(gpus)
}

/// The UUID of the GPU whose files are in this directory.
fn uuid(directory: &Path) -> Result<String> {
    let file = directory.join("information");
    let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
    let line = text.lines().find_map(|line| line.strip_prefix("GPU UUID:"));
    Ok(line.context("no GPU UUID")?.trim().to_owned())
}

#[tonic::async_trait]
impl DevicePlugin for Gpus {
    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions::default()))
    }

    type ListAndWatchStream =
        Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn list_and_watch(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let devices = self.0.clone();
        let list = tokio_stream::once(Ok(ListAndWatchResponse { devices }));
        // The devices stay: the stream never ends by itself.
        Ok(Response::new(Box::pin(list.chain(tokio_stream::pending()))))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("no preference"))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let containers = request.into_inner().container_requests.into_iter();
        let nothing = containers.map(|_| ContainerAllocateResponse::default());
        Ok(Response::new(AllocateResponse {
            container_responses: nothing.collect(),
        }))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse {}))
    }
}
