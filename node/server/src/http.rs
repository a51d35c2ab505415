//! Probes and metrics over HTTP.
//!
//! Each page is made at the moment of the question; nothing is collected beforehand.
//!
//! Any client that reaches the port may be untrusted. So there are few connections at a time, each
//! for one question, with a small head that has to come soon ([`Crowd`]). What names pods is for those who ask on the loopback address,
//! unless the administrator opens it.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::crowd::{Asked, Crowd};

pub trait Pages: Send + Sync + 'static {
    /// The paths that there are.
    fn paths(&self) -> &'static [&'static str];

    /// The page of one of them. With `in_full` the client may see all of it.
    fn page(&self, path: &str, in_full: bool) -> Page;
}

/// Longest head of a request; the least that the library takes.
const MAX_HEAD_BYTES: usize = 8 * 1024;
/// How long a request's head may take to come.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a connection may take, until its answer is read.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(15);
/// How long to wait before a port that is taken is tried again.
const BIND_INTERVAL: Duration = Duration::from_secs(10);
/// What a server says to whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Details {
    /// All of it to those on the loopback address alone.
    Loopback,
    /// All of it to every client.
    EveryClient,
}

/// Serves an address until `stop`. A port that is taken is tried again: metrics are no reason for pods
/// to go without HCAs.
pub async fn serve<P: Pages>(
    address: SocketAddr,
    details: Details,
    pages: Arc<P>,
    stop: CancellationToken,
) {
    let mut logged = false;
    let listener = loop {
        match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(error) if !logged => {
                tracing::error!(
                    %address, %error,
                    "metrics and probes are not served; will try again; choose another address with \
                     --metrics-addr"
                );
                logged = true;
            }
            Err(_) => {}
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(BIND_INTERVAL) => {}
        }
    };
    tracing::info!(address = %listener.local_addr().unwrap_or(address), "serving metrics");
    tokio::select! {
        () = stop.cancelled() => {}
        () = accept(listener, details, pages) => {}
    }
}

async fn accept<P: Pages>(mut listener: TcpListener, details: Details, pages: Arc<P>) {
    let converse = |stream, asked| converse(stream, details, pages.clone(), asked);
    let mut crowd = Crowd::default();
    crowd.serve(&mut listener, converse).await;
}

async fn converse(stream: TcpStream, details: Details, pages: Arc<impl Pages>, asked: Asked) {
    let to_loopback = stream
        .local_addr()
        .is_ok_and(|address| address.ip().to_canonical().is_loopback());
    let in_full = details == Details::EveryClient || to_loopback;
    let service = service_fn(|request: Request<Incoming>| {
        asked.set();
        let answer = answer(request.method(), request.uri().path(), in_full, &*pages);
        std::future::ready(Ok::<_, Infallible>(answer.response()))
    });
    let connection = http1::Builder::new()
        .keep_alive(false)
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    // A client that does not read its answer does not get it.
    let _ = tokio::time::timeout(CONNECTION_TIMEOUT, connection).await;
}

#[derive(Debug, PartialEq, Eq)]
pub struct Page {
    pub status: u16,
    pub kind: &'static str,
    pub body: String,
}

impl Page {
    pub fn text(status: u16, body: impl Into<String>) -> Self {
        Self {
            status,
            kind: "text/plain; charset=utf-8",
            body: body.into(),
        }
    }

    /// A text of [`crate::metrics`].
    pub fn metrics(body: String) -> Self {
        Self {
            status: 200,
            kind: "application/openmetrics-text; version=1.0.0; charset=utf-8",
            body,
        }
    }

    fn response(self) -> Response<Full<Bytes>> {
        let mut response = Response::new(Full::from(self.body));
        *response.status_mut() =
            StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let kind = HeaderValue::from_static(self.kind);
        response.headers_mut().insert(CONTENT_TYPE, kind);
        response
    }
}

/// The answer to a question: no header changes it.
fn answer(method: &Method, path: &str, in_full: bool, pages: &impl Pages) -> Page {
    if !pages.paths().contains(&path) {
        let paths = pages.paths().join(", ");
        return Page::text(404, format!("there are {paths}\n"));
    }
    match *method {
        Method::GET | Method::HEAD => pages.page(path, in_full),
        _ => Page::text(405, "ask with GET\n"),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::crowd::MAX_CONNECTIONS;

    #[derive(Debug)]
    struct Health;

    impl Pages for Health {
        fn paths(&self) -> &'static [&'static str] {
            &["/healthz", "/secret"]
        }

        fn page(&self, path: &str, in_full: bool) -> Page {
            match path {
                "/secret" if !in_full => Page::text(403, "no\n"),
                _ => Page::text(200, "ok\n"),
            }
        }
    }

    #[tokio::test]
    async fn wrong_requests_are_refused_and_a_full_server_makes_room() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(accept(listener, Details::Loopback, Arc::new(Health)));
        let mut idle = Vec::new();
        for _ in 0..MAX_CONNECTIONS * 3 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(b"GET /healthz").await.unwrap();
            idle.push(stream);
        }
        let long = format!("GET /{} HTTP/1.1\r\n", "x".repeat(MAX_HEAD_BYTES));
        for (request, status) in [
            ("GET /healthz HTTP/1.1\r\n\r\n", "HTTP/1.1 200"),
            ("GET /healthz?x=1 HTTP/1.0\r\n\r\n", "HTTP/1.0 200"),
            ("HEAD /healthz HTTP/1.1\r\n\r\n", "HTTP/1.1 200"),
            ("GET /secret HTTP/1.1\r\n\r\n", "HTTP/1.1 200"),
            ("POST /healthz HTTP/1.1\r\n\r\n", "HTTP/1.1 405"),
            ("GET /etc/passwd HTTP/1.1\r\n\r\n", "HTTP/1.1 404"),
            ("GET /healthz\r\n\r\n", "HTTP/1.1 400"),
            ("GET / HTTP/1.1 x\r\n\r\n", "HTTP/1.1 400"),
            (&long, "HTTP/1.1 431"),
        ] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut said = vec![0; status.len()];
            stream.read_exact(&mut said).await.unwrap();
            assert_eq!(String::from_utf8_lossy(&said), status, "{request}");
            let mut rest = String::new();
            stream.read_to_string(&mut rest).await.unwrap();
            let has_body = status.ends_with("200") && request.starts_with("GET");
            assert_eq!(rest.ends_with("\r\n\r\nok\n"), has_body, "{rest}");
        }
        serving.abort();
    }
}
