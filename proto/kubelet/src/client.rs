//! A client of PodResources: which container holds which devices, and which there are.
//!
//! [`ask`] is for commands, which ask once and end; [`Lister`] for a program with a runtime.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::podresources::pod_resources_lister_client::PodResourcesListerClient;
use crate::podresources::{AllocatableResourcesRequest, ContainerDevices, ListPodResourcesRequest};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

/// How long the kubelet may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// The kubelet's own limit for a message of this API.
const MOST_BYTES: usize = 16 << 20;
/// The kubelet answers a hundred questions a second, ten at once, whoever asks
/// (`pkg/kubelet/apis/podresources/constants.go`), and refuses the rest.
const REFUSED_RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// How often it is asked again: for a second, well within [`ANSWER_TIMEOUT`].
const TRIES: u32 = 20;

/// Devices of one resource in one container.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Held {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Name of the container.
    pub container: String,
    /// The resource, such as `rdma/hca_shared_devices_a`.
    pub resource: String,
    /// IDs of the devices.
    pub ids: Vec<String>,
}

/// A pod that the kubelet lists, also one without devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodDevices {
    /// Its namespace.
    pub namespace: String,
    /// Its name. The service does not know UIDs.
    pub name: String,
    /// What its containers hold, in the kubelet's order. A device with several NUMA nodes comes
    /// once for each of them.
    pub held: Vec<Held>,
    /// What its containers have by resource claims.
    pub claimed: Vec<Claimed>,
}

/// A device that a container has by a resource claim (dynamic resource allocation).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Claimed {
    /// Name of the container.
    pub container: String,
    /// Name of the driver, such as `gpu.nvidia.com`.
    pub driver: String,
    /// Name of the device in the driver's pool.
    pub device: String,
}

/// The kubelet's answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Devices {
    /// What containers hold.
    pub held: Vec<Held>,
    /// Healthy devices by resource, taken or not.
    pub allocatable: Vec<(String, Vec<String>)>,
}

/// Why nobody answered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// There is no socket.
    #[error("{0} does not exist: no kubelet runs here, or its root directory is another one")]
    NoSocket(PathBuf),
    /// The call failed.
    #[error("ask {socket}: {cause}")]
    Call {
        /// The socket.
        socket: PathBuf,
        /// What came back.
        cause: String,
    },
}

/// The socket below the kubelet's root directory.
#[must_use]
pub fn socket(kubelet_root: &Path) -> PathBuf {
    kubelet_root.join("pod-resources/kubelet.sock")
}

/// Asks once. Needs no runtime around it; must not be called from inside of one.
///
/// # Errors
/// [`Error`] if there is no kubelet or it does not answer in three seconds.
pub fn ask(kubelet_root: &Path) -> Result<Devices, Error> {
    let socket = socket(kubelet_root);
    if !socket.exists() {
        return Err(Error::NoSocket(socket));
    }
    blocking(&socket, call(&socket))
}

/// Runs one call, with a runtime of its own and a limit.
pub(crate) fn blocking<T>(
    socket: &Path,
    call: impl Future<Output = Result<T, String>>,
) -> Result<T, Error> {
    let failed = |cause: String| Error::Call {
        socket: socket.to_owned(),
        cause,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| failed(error.to_string()))?;
    let answer = runtime.block_on(async { tokio::time::timeout(ANSWER_TIMEOUT, call).await });
    match answer {
        Ok(answer) => answer.map_err(failed),
        Err(_) => Err(failed(format!(
            "no answer in {} seconds",
            ANSWER_TIMEOUT.as_secs()
        ))),
    }
}

/// Lists pods again and again, over one connection as long as it lasts.
#[derive(Debug)]
pub struct Lister {
    socket: PathBuf,
    client: Option<PodResourcesListerClient<Channel>>,
}

impl Lister {
    /// For the service on this socket. Nothing is connected yet.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        Self {
            socket,
            client: None,
        }
    }

    /// The pods of the node as of now. A connection that a restarted kubelet left behind is
    /// replaced.
    ///
    /// # Errors
    /// What came back instead of an answer.
    pub async fn pods(&mut self) -> Result<Vec<PodDevices>, String> {
        // Taken, so that a call that is given up half-way leaves none behind.
        if let Some(client) = self.client.take()
            && let Ok(pods) = list(&client).await
        {
            self.client = Some(client);
            return Ok(pods);
        }
        let client = client(&self.socket).await?;
        let pods = list(&client).await?;
        self.client = Some(client);
        Ok(pods)
    }
}

async fn client(socket: &Path) -> Result<PodResourcesListerClient<Channel>, String> {
    let channel = Endpoint::from_shared(format!("unix://{}", socket.display()))
        .map_err(|error| error.to_string())?
        .connect()
        .await
        .map_err(|error| crate::root_cause(&error))?;
    Ok(PodResourcesListerClient::new(channel).max_decoding_message_size(MOST_BYTES))
}

/// Asks again for a while if the kubelet is asked too much just now.
async fn ask_until_admitted<T, Answer>(mut question: impl FnMut() -> Answer) -> Result<T, Status>
where
    Answer: Future<Output = Result<T, Status>>,
{
    for _ in 0..TRIES {
        match question().await {
            Err(status) if status.code() == Code::ResourceExhausted => {
                tokio::time::sleep(REFUSED_RETRY_INTERVAL).await;
            }
            answer => return answer,
        }
    }
    question().await
}

async fn list(client: &PodResourcesListerClient<Channel>) -> Result<Vec<PodDevices>, String> {
    let question = || {
        let mut client = client.clone();
        async move { client.list(ListPodResourcesRequest {}).await }
    };
    let list = ask_until_admitted(question)
        .await
        .map_err(|status| format!("{:?}: {}", status.code(), status.message()))?
        .into_inner();
    let pods = list.pod_resources.into_iter().map(|pod| {
        let (mut held, mut claimed) = (Vec::new(), Vec::new());
        for container in pod.containers {
            let claims = container.dynamic_resources.into_iter();
            claimed.extend(
                claims
                    .flat_map(|claim| claim.claim_resources)
                    .map(|device| Claimed {
                        container: container.name.clone(),
                        driver: device.driver_name,
                        device: device.device_name,
                    }),
            );
            held.extend(container.devices.into_iter().map(|devices| Held {
                namespace: pod.namespace.clone(),
                pod: pod.name.clone(),
                container: container.name.clone(),
                resource: devices.resource_name,
                ids: devices.device_ids,
            }));
        }
        PodDevices {
            namespace: pod.namespace,
            name: pod.name,
            held,
            claimed,
        }
    });
    Ok(pods.collect())
}

async fn call(socket: &Path) -> Result<Devices, String> {
    let client = client(socket).await?;
    let pods = list(&client).await?;
    let held = pods.into_iter().flat_map(|pod| pod.held).collect();
    let question = || {
        let mut client = client.clone();
        async move {
            let all = AllocatableResourcesRequest {};
            client.get_allocatable_resources(all).await
        }
    };
    // Kubelets before 1.23 do not know this call; what is held matters more.
    let allocatable = match ask_until_admitted(question).await {
        Ok(answer) => by_resource(answer.into_inner().devices),
        Err(_) => Vec::new(),
    };
    Ok(Devices { held, allocatable })
}

/// The kubelet lists each device of a resource by itself.
fn by_resource(devices: Vec<ContainerDevices>) -> Vec<(String, Vec<String>)> {
    let mut resources: Vec<(String, Vec<String>)> = Vec::new();
    for one in devices {
        match resources
            .iter_mut()
            .find(|(name, _)| *name == one.resource_name)
        {
            Some((_, ids)) => ids.extend(one.device_ids),
            None => resources.push((one.resource_name, one.device_ids)),
        }
    }
    resources
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_gathered_by_resource() {
        let one = |resource: &str, id: &str| ContainerDevices {
            resource_name: resource.to_owned(),
            device_ids: vec![id.to_owned()],
            topology: None,
        };
        let gathered = by_resource(vec![one("a/x", "1"), one("a/y", "2"), one("a/x", "3")]);
        assert_eq!(
            gathered,
            [
                ("a/x".to_owned(), vec!["1".to_owned(), "3".to_owned()]),
                ("a/y".to_owned(), vec!["2".to_owned()])
            ]
        );
    }

    #[test]
    fn missing_socket_of_the_kubelet_is_named() {
        let error = ask(Path::new("/nonexistent")).unwrap_err();
        assert_eq!(
            error,
            Error::NoSocket("/nonexistent/pod-resources/kubelet.sock".into())
        );
    }

    #[test]
    fn a_dead_kubelets_socket_is_reported_with_the_kernels_message() {
        let directory = tempfile::tempdir().unwrap();
        let socket = socket(directory.path());
        std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        let error = ask(directory.path()).unwrap_err().to_string();
        assert!(error.contains("Connection refused"), "{error}");
    }
}
