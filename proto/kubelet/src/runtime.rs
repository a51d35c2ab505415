//! Asks a container runtime what it is, over its CRI socket.

#[allow(
    missing_docs,
    unreachable_pub,
    clippy::doc_markdown,
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    reason = "generated code; the .proto files carry the documentation"
)]
mod v1 {
    tonic::include_proto!("runtime.v1");
}

use std::path::Path;

use tonic::Request;
use tonic::transport::Endpoint;

use self::v1::runtime_service_client::RuntimeServiceClient;
use self::v1::{StatusRequest, VersionRequest};
use crate::client::{Error, blocking};

/// What a container runtime says about itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Runtime {
    /// `containerd` or `cri-o`.
    pub name: String,
    /// Its version, such as `v2.1.4`.
    pub version: String,
    /// containerd's CRI configuration in force, as JSON.
    pub config: Option<String>,
}

/// Asks once. Needs no runtime around it; must not be called from inside of one.
///
/// # Errors
/// [`Error`] if nothing listens or it does not answer in three seconds.
pub fn ask(socket: &Path) -> Result<Runtime, Error> {
    blocking(socket, call(socket))
}

async fn call(socket: &Path) -> Result<Runtime, String> {
    let channel = Endpoint::from_shared(format!("unix://{}", socket.display()))
        .map_err(|error| error.to_string())?
        .connect()
        .await
        .map_err(|error| crate::root_cause(&error))?;
    let mut client = RuntimeServiceClient::new(channel);
    let failed = |status: tonic::Status| format!("{:?}: {}", status.code(), status.message());
    let version = client
        .version(Request::new(VersionRequest::default()))
        .await;
    let version = version.map_err(failed)?.into_inner();
    let status = client
        .status(Request::new(StatusRequest { verbose: true }))
        .await;
    let mut status = status.map_err(failed)?.into_inner();
    Ok(Runtime {
        name: version.runtime_name,
        version: version.runtime_version,
        config: status.info.remove("config"),
    })
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;
    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::transport::Server;
    use tonic::{Response, Status};

    use super::v1::runtime_service_server::{RuntimeService, RuntimeServiceServer};
    use super::v1::{StatusResponse, VersionResponse};
    use super::*;

    struct Containerd;

    #[tonic::async_trait]
    impl RuntimeService for Containerd {
        async fn version(
            &self,
            _: Request<VersionRequest>,
        ) -> Result<Response<VersionResponse>, Status> {
            Ok(Response::new(VersionResponse {
                runtime_name: "containerd".to_owned(),
                runtime_version: "v2.1.4".to_owned(),
                ..VersionResponse::default()
            }))
        }

        async fn status(
            &self,
            request: Request<StatusRequest>,
        ) -> Result<Response<StatusResponse>, Status> {
            let config = request
                .into_inner()
                .verbose
                .then(|| ("config".to_owned(), "{}".to_owned()));
            Ok(Response::new(StatusResponse {
                info: config.into_iter().collect(),
            }))
        }
    }

    #[test]
    fn a_runtime_says_what_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("containerd.sock");
        let path = socket.clone();
        let (ready, wait) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let listener = UnixListener::bind(&path).unwrap();
                ready.send(()).unwrap();
                let server = Server::builder().add_service(RuntimeServiceServer::new(Containerd));
                server
                    .serve_with_incoming(UnixListenerStream::new(listener))
                    .await
                    .unwrap();
            });
        });
        wait.recv().unwrap();
        let expected = Runtime {
            name: "containerd".to_owned(),
            version: "v2.1.4".to_owned(),
            config: Some("{}".to_owned()),
        };
        assert_eq!(ask(&socket), Ok(expected));
        assert!(ask(&directory.path().join("none")).is_err());
    }
}
