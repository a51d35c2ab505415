//! Probes and metrics over HTTP.
//!
//! Each page is made at the moment of the question; nothing is collected beforehand.
//!
//! Any client that reaches the port may be untrusted. So there are few connections at a time, each
//! for one question, with a small head that has to come soon; where all places are taken, the oldest
//! one that has still not asked goes. What names pods is for those who ask on the loopback address,
//! unless the administrator opens it.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub trait Pages: Send + Sync + 'static {
    /// The paths that there are.
    fn paths(&self) -> &'static [&'static str];

    /// The page of one of them. With `in_full` the client may see all of it.
    fn page(&self, path: &str, in_full: bool) -> Answer;
}

/// Most connections at a time.
const MAX_CONNECTIONS: usize = 32;
/// Longest head of a request.
const MAX_HEAD_BYTES: usize = 8 * 1024;
/// How long a request's head may take to come.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the answer may take to be read.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait before a port that is taken is tried again.
const BIND_INTERVAL: Duration = Duration::from_secs(10);
/// How long to wait when the kernel gives no connection, for want of descriptors for instance.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);

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

/// A connection that has a place.
struct Place {
    task: tokio::task::AbortHandle,
    /// True from the moment on that the question is there.
    asked: watch::Receiver<bool>,
}

async fn accept<P: Pages>(listener: TcpListener, details: Details, pages: Arc<P>) {
    let mut tasks = JoinSet::new();
    let mut places: VecDeque<Place> = VecDeque::new();
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(_) => {
                    // Places that are taken may free a descriptor.
                    let fewer = places.len().saturating_sub(1);
                    make_room(&mut places, &mut tasks, fewer).await;
                    tokio::time::sleep(ACCEPT_RETRY_INTERVAL).await;
                    continue;
                }
            },
            Some(_) = tasks.join_next() => {
                places.retain(|place| !place.task.is_finished());
                continue;
            }
        };
        make_room(&mut places, &mut tasks, MAX_CONNECTIONS - 1).await;
        if places.len() >= MAX_CONNECTIONS {
            // All of them are being answered, which takes a moment.
            drop(stream);
            continue;
        }
        let asked = watch::Sender::new(false);
        let place = asked.subscribe();
        let pages = pages.clone();
        let task = tasks.spawn(async move { converse(stream, details, &*pages, &asked).await });
        places.push_back(Place { task, asked: place });
    }
}

/// Ends the oldest connections that have not asked yet, until at most this many are left.
async fn make_room(places: &mut VecDeque<Place>, tasks: &mut JoinSet<()>, most: usize) {
    places.retain(|place| !place.task.is_finished());
    while places.len() > most {
        let Some(idle) = places.iter().position(|place| !*place.asked.borrow()) else {
            return;
        };
        if let Some(place) = places.remove(idle) {
            place.task.abort();
        }
        // The aborted one gives its descriptor back here.
        let _ = tasks.join_next().await;
    }
}

async fn converse(
    mut stream: TcpStream,
    details: Details,
    pages: &impl Pages,
    asked: &watch::Sender<bool>,
) {
    let to_loopback = stream
        .local_addr()
        .is_ok_and(|address| address.ip().to_canonical().is_loopback());
    let in_full = details == Details::EveryClient || to_loopback;
    let head = tokio::time::timeout(HEAD_TIMEOUT, read_head(&mut stream)).await;
    let answer = match head {
        Ok(Ok(head)) => answer(&head, in_full, pages),
        Ok(Err(Refusal::TooLarge)) => Answer::text(431, "the head of the request is too large\n"),
        Ok(Err(Refusal::Gone)) => return,
        Err(_) => Answer::text(408, "the request did not come in time\n"),
    };
    asked.send_replace(true);
    let text = answer.message();
    let write = async {
        stream.write_all(text.as_bytes()).await?;
        stream.shutdown().await
    };
    // A client that does not read it does not get it.
    let _ = tokio::time::timeout(ANSWER_TIMEOUT, write).await;
}

enum Refusal {
    TooLarge,
    Gone,
}

async fn read_head(stream: &mut TcpStream) -> Result<Vec<u8>, Refusal> {
    let mut head = Vec::new();
    let mut piece = [0; 1024];
    loop {
        let read = stream.read(&mut piece).await.map_err(|_| Refusal::Gone)?;
        let read = piece.get(..read).unwrap_or_default();
        if read.is_empty() {
            return Err(Refusal::Gone);
        }
        head.extend_from_slice(read);
        if head.len() > MAX_HEAD_BYTES {
            return Err(Refusal::TooLarge);
        }
        if head.windows(4).any(|end| end == b"\r\n\r\n") {
            return Ok(head);
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub kind: &'static str,
    pub body: String,
}

impl Answer {
    pub fn text(status: u16, body: impl Into<String>) -> Self {
        Self {
            status,
            kind: "text/plain; charset=utf-8",
            body: body.into(),
        }
    }

    fn message(&self) -> String {
        let reason = match self.status {
            200 => "OK",
            400 => "Bad Request",
            403 => "Forbidden",
            404 => "Not Found",
            405 => "Method Not Allowed",
            408 => "Request Timeout",
            431 => "Request Header Fields Too Large",
            503 => "Service Unavailable",
            _ => "Internal Server Error",
        };
        format!(
            "HTTP/1.1 {} {reason}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}",
            self.status,
            self.kind,
            self.body.len(),
            self.body
        )
    }
}

/// What is asked, by the request line alone (RFC 9112 3): no header changes an answer.
pub fn answer(head: &[u8], in_full: bool, pages: &impl Pages) -> Answer {
    let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let Some([method, target, version]) = std::str::from_utf8(line)
        .ok()
        .map(|line| line.split(' ').collect::<Vec<_>>())
        .and_then(|words| <[&str; 3]>::try_from(words).ok())
    else {
        return Answer::text(400, "not an HTTP request\n");
    };
    if !version.starts_with("HTTP/1.") {
        return Answer::text(400, "HTTP/1 is spoken here\n");
    }
    let path = target.split('?').next().unwrap_or_default();
    if !pages.paths().contains(&path) {
        let paths = pages.paths().join(", ");
        return Answer::text(404, format!("there are {paths}\n"));
    }
    if method != "GET" && method != "HEAD" {
        return Answer::text(405, "ask with GET\n");
    }
    let mut answer = pages.page(path, in_full);
    if method == "HEAD" {
        answer.body.clear();
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Health;

    impl Pages for Health {
        fn paths(&self) -> &'static [&'static str] {
            &["/healthz", "/secret"]
        }

        fn page(&self, path: &str, in_full: bool) -> Answer {
            match path {
                "/secret" if !in_full => Answer::text(403, "no\n"),
                _ => Answer::text(200, "ok\n"),
            }
        }
    }

    fn ask(line: &str, in_full: bool) -> (u16, String) {
        let head = format!("{line}\r\nHost: node\r\n\r\n");
        let answer = answer(head.as_bytes(), in_full, &Health);
        (answer.status, answer.body)
    }

    #[test]
    fn what_is_no_request_is_refused() {
        for (line, status) in [
            ("", 400),
            ("GET /healthz", 400),
            ("GET /healthz HTTP/2.0", 400),
            ("POST /healthz HTTP/1.1", 405),
            ("GET /etc/passwd HTTP/1.1", 404),
            ("GET / HTTP/1.1 x", 400),
        ] {
            assert_eq!(ask(line, true).0, status, "{line}");
        }
        assert_eq!(ask("HEAD /healthz HTTP/1.1", true), (200, String::new()));
    }

    #[tokio::test]
    async fn large_heads_are_refused_and_a_full_server_makes_room() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(accept(listener, Details::Loopback, Arc::new(Health)));
        let mut idle = Vec::new();
        for _ in 0..MAX_CONNECTIONS * 3 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(b"GET /healthz").await.unwrap();
            idle.push(stream);
        }
        for (request, status) in [
            ("GET /healthz HTTP/1.1\r\n\r\n".to_owned(), "HTTP/1.1 200"),
            (
                format!("GET /{} HTTP/1.1\r\n", "x".repeat(MAX_HEAD_BYTES)),
                "HTTP/1.1 431",
            ),
        ] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut said = vec![0; status.len()];
            stream.read_exact(&mut said).await.unwrap();
            assert_eq!(String::from_utf8_lossy(&said), status);
        }
        serving.abort();
    }
}
