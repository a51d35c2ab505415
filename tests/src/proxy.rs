//! A proxy before the API server: it counts what passes, and does what a network and an overloaded
//! control plane do. One for each node cuts that node off alone.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context as TaskContext, Poll};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{fs, thread};

use anyhow::{Context, Result, anyhow, bail};
use http::header::{CONNECTION, HOST, TRANSFER_ENCODING};
use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::{Body as HttpBody, Bytes, Frame, Incoming, SizeHint};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use kube::Client;
use kube::client::Body;
use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use serde_json::json;
use tokio::runtime::{Builder, Runtime};
use tokio::time::{Sleep, sleep};
use tokio_util::sync::CancellationToken;

use crate::random::Random;

/// The longest time for which a watch is open that is cut.
const MAX_CUT_MS: u64 = 3000;

/// What happens to requests, each in how many of a thousand.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    /// Answered with 409, 410, 429, 500 or 504; the last two are sometimes done nevertheless.
    pub refused: u64,
    /// Done, and the connection ends without an answer.
    pub lost: u64,
    /// Watches that end after some seconds.
    pub cut: u64,
    /// Lists from the server's cache that are older than the last one.
    pub old: u64,
}

/// Whether the server can be reached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Reach {
    #[default]
    Open,
    /// Connections are accepted, and no request is answered.
    Hangs,
    /// Connections end.
    Cut,
}

/// Kinds of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Of one subnet.
    Read,
    /// Of subnets.
    List,
    Watch,
    Write,
    /// Of Nodes.
    Nodes,
    /// Of events.
    Event,
}

/// What passed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    pub requests: u64,
    pub accepted: u64,
    /// Answered with 409.
    pub conflicts: u64,
    /// Of bodies of requests.
    pub sent: u64,
    /// Of bodies of answers.
    pub bytes: u64,
}

#[derive(Debug)]
struct State {
    faults: Faults,
    reach: Reach,
    /// Ends the connections of the present reach.
    connections: CancellationToken,
    counts: BTreeMap<Kind, Count>,
    /// Lists from the cache, by path and query.
    lists: BTreeMap<String, Bytes>,
    random: Random,
}

impl State {
    /// True in so many of a thousand.
    fn happens(&mut self, of_thousand: u64) -> bool {
        of_thousand > 0 && self.below(1000) < of_thousand
    }

    fn below(&mut self, end: u64) -> u64 {
        let end = usize::try_from(end).unwrap_or(usize::MAX);
        self.random.below(end) as u64
    }
}

/// Serves until it is dropped.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A client as a kubeconfig file says. Within a runtime.
///
/// # Errors
/// The file is not one.
pub async fn client(kubeconfig: &Path) -> Result<Client> {
    let file = Kubeconfig::read_from(kubeconfig)?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

impl Proxy {
    /// Before the server of a kubeconfig file, whose credentials all requests have then.
    ///
    /// # Errors
    /// The file is not one, or nothing can be listened on.
    pub fn start(kubeconfig: &Path, seed: u64) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let client = runtime.block_on(client(kubeconfig))?;
        let state = State {
            faults: Faults::default(),
            reach: Reach::Open,
            connections: CancellationToken::new(),
            counts: BTreeMap::new(),
            lists: BTreeMap::new(),
            random: Random(seed),
        };
        let (state, stop) = (Arc::new(Mutex::new(state)), CancellationToken::new());
        let serving = (state.clone(), stop.clone());
        let thread =
            thread::spawn(move || serve(&runtime, listener, &client, &serving.0, &serving.1));
        Ok(Self {
            address,
            state,
            stop,
            thread: Some(thread),
        })
    }

    /// Writes a kubeconfig file with the proxy as the server.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn kubeconfig(&self, path: PathBuf) -> Result<PathBuf> {
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "proxy",
            "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "proxy"}}],
            "clusters": [{"name": "proxy", "cluster": {"server": format!("http://{}", self.address)}}],
            "users": [{"name": "proxy", "user": {}}],
        });
        fs::write(&path, config.to_string()).with_context(|| path.display().to_string())?;
        Ok(path)
    }

    pub fn set_faults(&self, faults: Faults) {
        lock(&self.state).faults = faults;
    }

    /// Ends all connections; later ones find it so.
    pub fn set_reach(&self, reach: Reach) {
        let mut state = lock(&self.state);
        state.reach = reach;
        std::mem::take(&mut state.connections).cancel();
    }

    /// What passed since the last call.
    #[must_use]
    pub fn take_counts(&self) -> BTreeMap<Kind, Count> {
        std::mem::take(&mut lock(&self.state).counts)
    }
}

fn serve(
    runtime: &Runtime,
    listener: TcpListener,
    client: &Client,
    state: &Arc<Mutex<State>>,
    stop: &CancellationToken,
) {
    let serving = async {
        let Ok(listener) = tokio::net::TcpListener::from_std(listener) else {
            return;
        };
        while let Ok((stream, _)) = listener.accept().await {
            let (reach, until) = {
                let state = lock(state);
                (state.reach, state.connections.clone())
            };
            if reach == Reach::Cut {
                continue;
            }
            let (client, state) = (client.clone(), state.clone());
            tokio::spawn(async move {
                let service = service_fn(|request| pass(&client, &state, request));
                let connection = hyper::server::conn::http1::Builder::new();
                let connection = connection.serve_connection(TokioIo::new(stream), service);
                tokio::select! {
                    // A client that goes away is not an error of a test.
                    _ = connection => {}
                    () = until.cancelled() => {}
                }
            });
        }
    };
    let _ = runtime.block_on(stop.run_until_cancelled(serving));
}

fn kind(method: &Method, path: &str, query: &str) -> Kind {
    match (method, path) {
        (_, path) if path.starts_with("/api/v1/nodes") => Kind::Nodes,
        (_, path) if path.ends_with("/events") => Kind::Event,
        (&Method::GET, _) if query.contains("watch=") => Kind::Watch,
        (&Method::GET, path) if path.ends_with("/addresssubnets") => Kind::List,
        (&Method::GET, _) => Kind::Read,
        _ => Kind::Write,
    }
}

/// The body of an answer on its way.
struct Passing {
    inner: Body,
    kind: Kind,
    state: Arc<Mutex<State>>,
    cut: Option<Pin<Box<Sleep>>>,
}

impl HttpBody for Passing {
    type Data = Bytes;
    type Error = kube::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut TaskContext<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, kube::Error>>> {
        if let Some(cut) = &mut self.cut
            && cut.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(None);
        }
        let frame = Pin::new(&mut self.inner).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &frame
            && let Some(data) = frame.data_ref()
        {
            let mut state = lock(&self.state);
            state.counts.entry(self.kind).or_default().bytes += data.len() as u64;
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

async fn pass(
    client: &Client,
    state: &Arc<Mutex<State>>,
    request: Request<Incoming>,
) -> Result<Response<Passing>> {
    let (mut parts, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let uri = parts.uri.to_string();
    let kind = kind(
        &parts.method,
        parts.uri.path(),
        parts.uri.query().unwrap_or_default(),
    );
    let is_from_cache = kind == Kind::List && uri.contains("resourceVersion=0");
    let answer = |status: StatusCode, body: Body, cut| {
        let inner = Response::builder()
            .status(status)
            .header("content-type", "application/json");
        let passing = Passing {
            inner: body,
            kind,
            state: state.clone(),
            cut,
        };
        inner.body(passing).map_err(anyhow::Error::from)
    };
    let (reach, refused, is_lost, cut, old) = {
        let mut state = lock(state);
        let count = state.counts.entry(kind).or_default();
        count.requests += 1;
        count.sent += body.len() as u64;
        let faults = state.faults;
        let refused = match (state.happens(faults.refused), kind) {
            (false, _) => None,
            (true, Kind::Write) => Some([409, 429, 500, 504]),
            (true, Kind::List | Kind::Watch) => Some([410, 429, 500, 504]),
            (true, Kind::Read | Kind::Nodes | Kind::Event) => Some([429, 429, 500, 504]),
        };
        let refused = refused.map(|codes| {
            let [one, other, third, last] = codes;
            // Of those that may be done, each second one is.
            match state.below(6) {
                0 => (one, false),
                1 => (other, false),
                2 => (third, false),
                3 => (third, true),
                4 => (last, false),
                _ => (last, true),
            }
        });
        let cut = (kind == Kind::Watch && state.happens(faults.cut)).then(|| {
            let after = state.below(MAX_CUT_MS);
            Box::pin(sleep(Duration::from_millis(after)))
        });
        let is_old = is_from_cache && state.happens(faults.old);
        let old = state.lists.get(&uri).filter(|_| is_old).cloned();
        (state.reach, refused, state.happens(faults.lost), cut, old)
    };
    match reach {
        Reach::Open => {}
        Reach::Hangs => std::future::pending().await,
        Reach::Cut => bail!("cut off"),
    }
    if let Some(old) = old {
        return answer(StatusCode::OK, Body::from(old.to_vec()), None);
    }
    if let Some((code, false)) = refused {
        return answer(StatusCode::from_u16(code)?, refusal(code), None);
    }
    for name in [HOST, CONNECTION] {
        parts.headers.remove(name);
    }
    let request = Request::from_parts(parts, Body::from(body.to_vec()));
    let response = client.send(request).await?;
    let status = response.status();
    {
        let mut state = lock(state);
        let count = state.counts.entry(kind).or_default();
        count.accepted += u64::from(status.is_success());
        count.conflicts += u64::from(status == StatusCode::CONFLICT);
    }
    if is_lost {
        return Err(anyhow!("its answer is lost"));
    }
    if let Some((code, _)) = refused {
        return answer(StatusCode::from_u16(code)?, refusal(code), None);
    }
    if is_from_cache && status.is_success() {
        let list = response.into_body().collect().await?.to_bytes();
        lock(state).lists.insert(uri, list.clone());
        return answer(status, Body::from(list.to_vec()), None);
    }
    let (mut parts, inner) = response.into_parts();
    parts.headers.remove(TRANSFER_ENCODING);
    let passing = Passing {
        inner,
        kind,
        state: state.clone(),
        cut,
    };
    Ok(Response::from_parts(parts, passing))
}

fn refusal(code: u16) -> Body {
    let reason = match code {
        409 => "Conflict",
        410 => "Expired",
        429 => "TooManyRequests",
        504 => "Timeout",
        _ => "InternalError",
    };
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": "the proxy's", "reason": reason, "code": code});
    Body::from(status.to_string().into_bytes())
}
