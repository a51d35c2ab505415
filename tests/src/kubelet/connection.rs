//! Dialling a device plugin as the kubelet does.

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

/// How long the kubelet tries to reach a plugin that registers.
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);

/// Connects to the plugin's socket, and waits until it speaks.
///
/// The kubelet dials blockingly: a connection counts once the server's first
/// HTTP/2 frame is there, so a socket that is bound but not yet served fails
/// the registration after ten seconds. It sends `localhost` as authority.
pub(super) async fn dial(socket: &Path, client: &str) -> Result<Channel, String> {
    let mut last = String::from("no answer on the socket; it must be served before registering");
    let attempts = async {
        loop {
            match attempt(socket, client).await {
                Ok((channel, spoke)) => {
                    spoke.notified().await;
                    return channel;
                }
                Err(error) => last = error,
            }
            sleep(Duration::from_millis(200)).await;
        }
    };
    let reached = timeout(DIAL_TIMEOUT, attempts).await;
    reached.map_err(|_| {
        format!(
            "failed to dial device plugin on {} in {DIAL_TIMEOUT:?}: {last}",
            socket.display()
        )
    })
}

async fn attempt(socket: &Path, client: &str) -> Result<(Channel, Arc<Notify>), String> {
    let spoke = Arc::new(Notify::new());
    let stream = UnixStream::connect(socket)
        .await
        .map_err(|error| error.to_string())?;
    let mut stream = Some(Listening {
        inner: stream,
        spoke: Arc::clone(&spoke),
    });
    // The connection is made once: the kubelet never redials a plugin.
    let connector = service_fn(move |_| {
        let stream = stream.take().map(TokioIo::new);
        async move { stream.ok_or_else(|| io::Error::other("the connection has ended")) }
    });
    let endpoint = Endpoint::from_static("http://localhost")
        .user_agent(client)
        .map_err(|error| error.to_string())?;
    let channel = endpoint.connect_with_connector(connector).await;
    channel
        .map(|channel| (channel, spoke))
        .map_err(|error| error.to_string())
}

/// A stream that notifies when the other side has sent its first byte.
struct Listening {
    inner: UnixStream,
    spoke: Arc<Notify>,
}

impl AsyncRead for Listening {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.inner).poll_read(context, buffer);
        if buffer.filled().len() > before {
            self.spoke.notify_one();
        }
        read
    }
}

impl AsyncWrite for Listening {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}
