//! A device plugin that follows a script, to try the kubelet's stand-in with.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result};
use hyper_util::rt::TokioIo;
use kubelet_api::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use kubelet_api::deviceplugin::registration_client::RegistrationClient;
use kubelet_api::deviceplugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse,
    ContainerPreferredAllocationResponse, Device, DevicePluginOptions, DeviceSpec, Empty, HEALTHY,
    ListAndWatchResponse, PreStartContainerRequest, PreStartContainerResponse,
    PreferredAllocationRequest, PreferredAllocationResponse, RegisterRequest, VERSION,
};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream, WatchStream};
use tokio_stream::{Stream, StreamExt};
use tokio_util::sync::CancellationToken;
use tonic::codegen::http;
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status};

/// What the plugin was asked, and what it shall answer.
#[derive(Debug, Default)]
pub(crate) struct Script {
    pub(crate) options: DevicePluginOptions,
    /// Answered to `GetPreferredAllocation`.
    pub(crate) preferred: Vec<String>,
    /// Error text of Allocate, instead of an answer.
    pub(crate) refuse_allocate: Option<String>,
    /// Device nodes that Allocate answers beside one for each unit.
    pub(crate) nodes: Vec<String>,
    pub(crate) allocated: Vec<AllocateRequest>,
    pub(crate) asked_preference: Vec<PreferredAllocationRequest>,
    pub(crate) pre_started: Vec<Vec<String>>,
    pub(crate) authorities: Vec<String>,
    pub(crate) options_asked: usize,
}

/// A served plugin; dropping it breaks its connections, as when a plugin is killed.
pub(crate) struct Plugin {
    pub(crate) script: Arc<Mutex<Script>>,
    devices: watch::Sender<Option<Vec<Device>>>,
    directory: PathBuf,
    endpoint: String,
    end_streams: CancellationToken,
    die: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

#[derive(Clone)]
struct Served {
    script: Arc<Mutex<Script>>,
    devices: watch::Receiver<Option<Vec<Device>>>,
    end_streams: CancellationToken,
}

impl Plugin {
    /// Serves on `endpoint` in the device-plugins directory. No list is sent before [`Plugin::list`].
    pub(crate) fn serve(directory: &Path, endpoint: &str, script: Script) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let devices = watch::Sender::new(None);
        let script = Arc::new(Mutex::new(script));
        let (end_streams, die) = (CancellationToken::new(), CancellationToken::new());
        let served = Served {
            script: Arc::clone(&script),
            devices: devices.subscribe(),
            end_streams: end_streams.clone(),
        };
        let seen = Arc::clone(&script);
        let authority = tower::util::MapRequestLayer::new(move |request: http::Request<_>| {
            let authority = request.uri().authority().map(ToString::to_string);
            seen.lock().unwrap().authorities.extend(authority);
            request
        });
        let listener = {
            let _inside = runtime.enter();
            UnixListener::bind(directory.join(endpoint))?
        };
        runtime.spawn(
            Server::builder()
                .layer(authority)
                .add_service(DevicePluginServer::new(served))
                .serve_with_incoming(UnixListenerStream::new(listener)),
        );
        let dead = die.clone();
        let thread = thread::spawn(move || runtime.block_on(dead.cancelled()));
        Ok(Self {
            script,
            devices,
            directory: directory.to_path_buf(),
            endpoint: endpoint.to_owned(),
            end_streams,
            die,
            thread: Some(thread),
        })
    }

    /// Sends this list, and keeps it for streams to come.
    pub(crate) fn list(&self, devices: Vec<Device>) {
        self.devices.send_replace(Some(devices));
    }

    /// Healthy devices of these IDs.
    pub(crate) fn list_healthy(&self, ids: &[&str]) {
        self.list(ids.iter().map(|id| healthy(id)).collect());
    }

    /// Registers the usual way.
    pub(crate) fn register(&self, resource: &str) -> Result<(), Status> {
        register(&self.directory, &request(resource, &self.endpoint))
    }

    /// Ends the streams, but goes on serving.
    pub(crate) fn end_streams(&self) {
        self.end_streams.cancel();
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        self.die.cancel();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// A registration as every plugin sends it.
pub(crate) fn request(resource: &str, endpoint: &str) -> RegisterRequest {
    RegisterRequest {
        version: VERSION.to_owned(),
        endpoint: endpoint.to_owned(),
        resource_name: resource.to_owned(),
        options: None,
    }
}

/// Sends a registration to the kubelet of this device-plugins directory.
pub(crate) fn register(directory: &Path, request: &RegisterRequest) -> Result<(), Status> {
    let channel = Client::connect(&directory.join("kubelet.sock"))
        .map_err(|error| Status::unavailable(format!("{error:#}")))?;
    let mut client = RegistrationClient::new(channel.channel.clone());
    channel
        .runtime
        .block_on(client.register(request.clone()))
        .map(drop)
}

/// A connection to a unix socket with a runtime to use it.
pub(crate) struct Client {
    pub(crate) channel: tonic::transport::Channel,
    pub(crate) runtime: tokio::runtime::Runtime,
}

impl Client {
    pub(crate) fn connect(socket: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let path = socket.to_path_buf();
        let connector = tower::service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        let endpoint = Endpoint::from_static("http://localhost");
        let channel = runtime
            .block_on(endpoint.connect_with_connector(connector))
            .with_context(|| format!("connect to {}", socket.display()))?;
        Ok(Self { channel, runtime })
    }
}

pub(crate) fn healthy(id: &str) -> Device {
    Device {
        id: id.to_owned(),
        health: HEALTHY.to_owned(),
        topology: None,
    }
}

#[tonic::async_trait]
impl DevicePlugin for Served {
    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        let mut script = self.script.lock().unwrap();
        script.options_asked += 1;
        Ok(Response::new(script.options))
    }

    type ListAndWatchStream =
        Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn list_and_watch(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let lists = WatchStream::new(self.devices.clone()).filter_map(|devices| devices);
        let lists = lists.map(|devices| Some(Ok(ListAndWatchResponse { devices })));
        let lists = lists.merge(last_word(self.end_streams.clone()));
        Ok(Response::new(Box::pin(lists.map_while(|list| list))))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let mut script = self.script.lock().unwrap();
        script.asked_preference.push(request.into_inner());
        let device_i_ds = script.preferred.clone();
        let container_responses = vec![ContainerPreferredAllocationResponse { device_i_ds }];
        Ok(Response::new(PreferredAllocationResponse {
            container_responses,
        }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let request = request.into_inner();
        let mut script = self.script.lock().unwrap();
        script.allocated.push(request.clone());
        if let Some(text) = &script.refuse_allocate {
            return Err(Status::failed_precondition(text.clone()));
        }
        let number = script.allocated.len();
        let responses = request.container_requests.iter().map(|container| {
            let ids = container.devices_ids.join(",");
            let units = container.devices_ids.iter().map(|id| format!("/dev/{id}"));
            let devices = units.chain(script.nodes.clone()).map(|path| DeviceSpec {
                container_path: path.clone(),
                host_path: path,
                permissions: "rw".to_owned(),
            });
            ContainerAllocateResponse {
                envs: HashMap::from([
                    ("IDS".to_owned(), ids),
                    ("CALL".to_owned(), number.to_string()),
                ]),
                devices: devices.collect(),
                ..ContainerAllocateResponse::default()
            }
        });
        Ok(Response::new(AllocateResponse {
            container_responses: responses.collect(),
        }))
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        self.script
            .lock()
            .unwrap()
            .pre_started
            .push(request.into_inner().devices_ids);
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

/// A stream with nothing to say until `end`, and then one `None`.
fn last_word<T: Send + 'static>(end: CancellationToken) -> impl Stream<Item = Option<T>> + Send {
    let (say, heard) = mpsc::channel(1);
    tokio::spawn(async move {
        tokio::select! {
            () = end.cancelled() => drop(say.send(None).await),
            () = say.closed() => {}
        }
    });
    ReceiverStream::new(heard)
}
