//! The Registration service and the life of a plugin's connection.

use std::sync::Arc;
use std::time::Instant;

use kubelet_api::deviceplugin::device_plugin_client::DevicePluginClient;
use kubelet_api::deviceplugin::registration_server::Registration as Service;
use kubelet_api::deviceplugin::{Empty, RegisterRequest, VERSION};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

use super::connection::dial;
use super::resource_name;
use super::shared::{Plugin, Registration, Shared};

/// gRPC's default, which the kubelet does not change.
const RECEIVE_LIMIT_BYTES: usize = 4 * 1024 * 1024;

/// The service on `kubelet.sock`.
#[derive(Debug)]
pub(super) struct Registry(pub(super) Arc<Shared>);

#[tonic::async_trait]
impl Service for Registry {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        let at = Instant::now();
        let accepted = self.accept(&request).await;
        let registration = Registration {
            resource: request.resource_name,
            endpoint: request.endpoint,
            at,
            refused: accepted.as_ref().err().cloned(),
        };
        tracing::info!(
            resource = %registration.resource,
            endpoint = %registration.endpoint,
            refused = registration.refused,
            "registration"
        );
        self.0.lock().registrations.push(registration);
        self.0.notify();
        // The kubelet's refusals are plain Go errors, which gRPC calls unknown.
        accepted
            .map(|()| Response::new(Empty {}))
            .map_err(Status::unknown)
    }
}

impl Registry {
    async fn accept(&self, request: &RegisterRequest) -> Result<(), String> {
        let misbehaviour = {
            let mut inner = self.0.lock();
            let now = inner.misbehaviour.clone();
            inner.misbehaviour.refuse = now.refuse.saturating_sub(1);
            now
        };
        tokio::time::sleep(misbehaviour.delay).await;
        if misbehaviour.refuse > 0 {
            return Err("refused as the test asked for".to_owned());
        }
        if request.version != VERSION {
            return Err(format!(
                "requested API version {:?} is not supported by kubelet; supported version is {VERSION:?}",
                request.version
            ));
        }
        resource_name::check(&request.resource_name).map_err(|error| {
            format!(
                "the ResourceName {:?} is invalid: {error}",
                request.resource_name
            )
        })?;
        connect(&self.0, &request.resource_name, &request.endpoint).await
    }
}

/// Dials back and asks for the options; the plugin must serve already. The
/// device list follows later, on its own time.
async fn connect(shared: &Arc<Shared>, resource: &str, endpoint: &str) -> Result<(), String> {
    // Joined as Go joins: an absolute endpoint stays below the directory.
    let socket = shared
        .settings
        .device_plugins
        .join(endpoint.trim_start_matches('/'));
    let ended = CancellationToken::new();
    shared
        .lock()
        .connections
        .insert(resource.to_owned(), ended.clone());

    let options = async {
        let channel = dial(&socket, &shared.settings.client).await?;
        let mut client =
            DevicePluginClient::new(channel).max_decoding_message_size(RECEIVE_LIMIT_BYTES);
        let options = client.get_device_plugin_options(Empty {}).await;
        let options = options.map_err(|status| {
            format!("failed to get device plugin options: {}", status.message())
        })?;
        Ok((client, options.into_inner()))
    };
    let (client, options) = match options.await {
        Ok(connected) => connected,
        Err(error) => {
            shared.lock().connections.remove(resource);
            return Err(error);
        }
    };

    let never_watch = {
        let mut inner = shared.lock();
        let plugin = Plugin {
            client: Some(client.clone()),
            options,
        };
        inner.plugins.insert(resource.to_owned(), plugin);
        inner.state.connected(resource);
        inner.misbehaviour.never_watch
    };
    let (shared, resource) = (Arc::clone(shared), resource.to_owned());
    tokio::spawn(async move {
        tokio::select! {
            () = ended.cancelled() => {}
            () = watch(&shared, &resource, client), if !never_watch => {}
        }
        shared.lock().disconnect(&resource);
        shared.notify();
    });
    Ok(())
}

/// Takes in device lists until the stream ends, for whatever reason.
async fn watch(shared: &Shared, resource: &str, mut client: DevicePluginClient<Channel>) {
    let end = async {
        let mut lists = client.list_and_watch(Empty {}).await?.into_inner();
        while let Some(list) = lists.message().await? {
            tracing::info!(resource, devices = list.devices.len(), "device list");
            shared.lock().state.snapshot(resource, list.devices);
            if let Err(error) = shared.checkpoint() {
                tracing::warn!(error = format!("{error:#}"), "checkpoint not written");
            }
            shared.notify();
        }
        Ok::<_, Status>(())
    };
    let end = end.await;
    tracing::info!(
        resource,
        reason = end.err().map(|s| s.to_string()),
        "device list ended"
    );
}
