//! The program: one task for each address space, the watch, the socket, and what passes between them.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::{grants, leases};
use anyhow::Context as _;
use ipam::block::AddressSpace;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};
use node::policy::Policy;
use node_server::http::{self, Details, Page, Pages};
use node_server::socket::Socket;
use node_server::socket::connections::{Answers, Connections};
use node_wire::{Answer, BlockNeed, Failure, FailureKind, Question};
use tokio::sync::{mpsc, oneshot, watch as watch_channel};
use tokio::task::LocalSet;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use crate::api::watch::{self, Event};
use crate::api::{BlockObject, Client};
use crate::metrics::Metrics;
use crate::space::{Asked, Message, Shared, Timing, Worker};
use crate::sweep;

/// How often the metrics are made anew where nothing happens.
const METRICS_INTERVAL: Duration = Duration::from_secs(10);
/// How often another broker's end is waited for.
const LOCK_INTERVAL: Duration = Duration::from_secs(1);
/// In the directory of the stores, whose names do not begin with a dot.
const LOCK: &str = ".lock";

/// What a broker is to do.
#[derive(Debug)]
pub struct Settings {
    pub policy: Policy,
    /// The node's name in the cluster.
    pub node: String,
    /// Prefix of `/proc` and `/etc`.
    pub root: PathBuf,
    pub client: Client,
    /// Where ADDs ask; `None` for a broker of which only this process asks.
    pub socket: Option<PathBuf>,
    /// Where probes and metrics are served.
    pub listen: Vec<SocketAddr>,
    pub timing: Timing,
}

/// Asks a broker in this process.
#[derive(Debug, Clone)]
pub struct Asker(mpsc::Sender<Asked>);

/// What an [`Asker`] asks, for [`run`].
pub type Questions = mpsc::Receiver<Asked>;

impl Asker {
    /// As an ADD does over the socket.
    ///
    /// # Errors
    /// The failure that the ADD is answered with.
    pub async fn ask(&self, need: BlockNeed) -> Result<Answer, Failure> {
        let (reply, answer) = oneshot::channel();
        let at = Instant::now();
        let sent = self.0.send(Asked { need, at, reply }).await;
        sent.map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }
}

fn ended() -> Failure {
    Failure::new(FailureKind::ClusterUnavailable, "the broker ends")
}

impl Answers for Asker {
    async fn answer(&self, question: Question) -> Result<Answer, Failure> {
        match question {
            Question::Block(need) => self.ask(need).await,
            other => Err(other.not_mine()),
        }
    }
}

/// A channel of questions: its one end goes to [`run`], the other to who asks.
#[must_use]
pub fn questions() -> (Asker, Questions) {
    let (asker, questions) = mpsc::channel(64);
    (Asker(asker), questions)
}

/// Makes sure that one broker only writes below the state directory; waits for another one's end.
async fn lock(directory: &Path) -> anyhow::Result<Flock<File>> {
    node::file::make_directories(directory)
        .with_context(|| format!("make {}", directory.display()))?;
    let path = directory.join(LOCK);
    let mut said = false;
    loop {
        let file = node::trust::open(&path, OFlag::O_CREAT | OFlag::O_WRONLY)?;
        let file = file.context("the lock file is gone")?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((_, Errno::EWOULDBLOCK)) => {}
            Err((_, errno)) => {
                return Err(errno).with_context(|| format!("lock {}", path.display()));
            }
        }
        if !said {
            tracing::info!(lock = %path.display(), "another broker runs on this node; waiting for its end");
            said = true;
        }
        tokio::time::sleep(LOCK_INTERVAL).await;
    }
}

/// Serves until `stop`.
///
/// # Errors
/// The state directory cannot be used, or which blocks the node has cannot be read.
pub async fn run(
    settings: Settings,
    questions: (Asker, Questions),
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let local = LocalSet::new();
    local.run_until(serve(settings, questions, stop)).await
}

async fn serve(
    settings: Settings,
    (asker, mut asked): (Asker, Questions),
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let directory = settings.policy.state_dir.join("blocks");
    let shared = Rc::new(Shared {
        client: settings.client,
        policy: settings.policy,
        root: settings.root,
        name: settings.node,
        me: RefCell::default(),
        nodes: RefCell::default(),
        marks: RefCell::default(),
        timing: settings.timing,
        metrics: RefCell::new(Metrics::new()),
    });
    let pages = Arc::new(BrokerPages::new(&shared, &directory));
    let mut services = tokio::task::JoinSet::new();
    for address in settings.listen {
        let stop = stop.clone();
        services.spawn(http::serve(address, Details::Loopback, pages.clone(), stop));
    }
    let _lock = tokio::select! {
        lock = lock(&directory) => lock?,
        () = stop.cancelled() => return Ok(()),
    };
    let mut broker = Broker {
        shared: shared.clone(),
        stores: shared.policy.kubernetes_stores(),
        workers: BTreeMap::new(),
        unlisted: watch_channel::Sender::new(Some("not read yet".to_owned())),
    };
    let (events, mut news) = mpsc::channel(64);
    let mut tasks = Vec::new();
    if broker.stores.is_empty() {
        // Nothing is watched, so nothing is interrupted.
        shared.metrics.borrow_mut().interrupted = None;
        tracing::info!("the node's policy has no store of type kubernetes: there is nothing to do");
        pages.set_unready(None);
    } else {
        let (client, retry) = (shared.client.clone(), shared.timing.retry);
        let watch = watch::run(client, shared.name.clone(), events, retry);
        tasks.push(tokio::task::spawn_local(watch));
        tasks.push(tokio::task::spawn_local(sweep::run(shared.clone())));
        tasks.push(tokio::task::spawn_local(shared.clone().reread_me()));
        let ready = become_ready(shared.clone(), broker.unlisted.subscribe(), pages.clone());
        tasks.push(tokio::task::spawn_local(ready));
    }
    for store in &broker.stores.clone() {
        let all = grants::read_all(&grants::directory(&shared.policy.state_dir, store), store)?;
        let granted = all.into_iter();
        let granted = granted.filter(|(_, grants)| !grants.blocks.is_empty());
        let granted = granted.map(|(space, _)| space);
        for space in granted.chain(broker.spaces_outside(store)) {
            broker.worker(&space)?;
        }
    }
    // Only now: the first question finds the grants read.
    if let Some(path) = settings.socket {
        let socket = Socket {
            path,
            flag: "--socket",
            nonce: format!("{:016x}", node::random::random64()),
            state: tokio::sync::watch::Sender::default(),
            connections: Connections::new(asker),
        };
        let stop = stop.clone();
        services.spawn(async move { socket.serve(&stop).await });
    }
    let mut ticks = tokio::time::interval(METRICS_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some(asked) = asked.recv() => broker.route(asked),
            Some(event) = news.recv() => broker.event(event),
            _ = ticks.tick() => {}
        }
        *lock_page(&pages.metrics) = render(&shared);
    }
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
    let over = async { while services.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(Duration::from_secs(3), over).await;
    Ok(())
}

fn render(shared: &Shared) -> String {
    let requests = shared.client.transport().requests();
    shared.metrics.borrow().render(&requests)
}

/// Makes `/readyz` ready once the API has answered with this node's object and its blocks, and ends.
///
/// Ready means that the broker can do its work in this cluster: its credentials, rights, resource
/// definitions and node name are right. It stays ready while the API does not answer: pods start
/// without the API while the node's blocks have room, and another broker would not reach it either.
/// A rollout that breaks one of these stops at its first nodes.
async fn become_ready(
    shared: Rc<Shared>,
    mut unlisted: watch_channel::Receiver<Option<String>>,
    pages: Arc<BrokerPages>,
) {
    let mut logged = None;
    while let Err(Failure { message, .. }) = shared.read_me().await {
        if logged.as_ref() != Some(&message) {
            tracing::warn!(
                error = message,
                "cannot read this node's object; trying again"
            );
        }
        pages.set_unready(Some(message.clone()));
        logged = Some(message);
        tokio::time::sleep(shared.timing.retry).await;
    }
    loop {
        let why = unlisted.borrow_and_update().clone();
        let is_listed = why.is_none();
        pages.set_unready(why.map(|why| format!("the node's blocks are not listed: {why}")));
        if is_listed || unlisted.changed().await.is_err() {
            return;
        }
    }
}

struct Broker {
    shared: Rc<Shared>,
    /// Those of type kubernetes.
    stores: Vec<String>,
    workers: BTreeMap<AddressSpace, mpsc::UnboundedSender<Message>>,
    /// Why the API's first list was not passed on; `None` once it was.
    unlisted: watch_channel::Sender<Option<String>>,
}

impl Broker {
    /// The spaces with leases in no block of this node.
    fn spaces_outside(&self, store: &str) -> BTreeSet<AddressSpace> {
        let outside = || -> anyhow::Result<BTreeSet<AddressSpace>> {
            let directory = grants::directory(&self.shared.policy.state_dir, store);
            let granted = grants::read_all(&directory, store)?.into_iter().collect();
            let outside = leases::outside(&self.shared.leases()?, &granted)?.into_iter();
            let outside = outside.map(|(space, _)| space);
            Ok(outside.filter(|space| space.store == store).collect())
        };
        match outside() {
            Ok(spaces) => spaces,
            // Each ADD says it, too.
            Err(error) => {
                tracing::error!(store, %error, "cannot read which leases this node has");
                BTreeSet::new()
            }
        }
    }

    /// The task of a space; starts it if need be, also after it ended for want of work.
    fn worker(&mut self, space: &AddressSpace) -> anyhow::Result<&mpsc::UnboundedSender<Message>> {
        let worker = self.workers.get(space);
        if worker.is_none_or(mpsc::UnboundedSender::is_closed) {
            let worker = Worker::new(self.shared.clone(), space.clone())?;
            let (sender, receiver) = mpsc::unbounded_channel();
            if self.unlisted.borrow().is_none() {
                // The list had no block of it.
                let _ = sender.send(Message::Listed(Vec::new()));
            }
            tokio::task::spawn_local(worker.run(receiver));
            self.workers.insert(space.clone(), sender);
        }
        self.workers.get(space).context("the space's task is gone")
    }

    fn route(&mut self, asked: Asked) {
        let need = &asked.need;
        let space = AddressSpace::new(&need.store, need.network_name.as_deref());
        let refused = match &need.network_name {
            Some(name) if !node::identity::is_name(name) => Some(Failure::new(
                FailureKind::Malformed,
                format!("block is malformed: network_name {name:?} is not a name"),
            )),
            _ if !self.stores.contains(&need.store) => Some(Failure::new(
                FailureKind::Mismatch,
                format!(
                    "the broker's policy has no store {:?} of type kubernetes; it was started with an older \
                     policy: restart its DaemonSet's pod",
                    need.store
                ),
            )),
            _ => None,
        };
        if let Some(failure) = refused {
            return drop(asked.reply.send(Err(failure)));
        }
        match self.worker(&space) {
            Ok(worker) => drop(worker.send(Message::Asked(asked))),
            Err(error) => {
                let failure = Failure::new(FailureKind::Other, format!("{error:#}"));
                drop(asked.reply.send(Err(failure)));
            }
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Listed(blocks) => {
                let mut by_space: BTreeMap<AddressSpace, Vec<BlockObject>> = BTreeMap::new();
                for block in blocks {
                    by_space.entry(block.space()).or_default().push(block);
                }
                self.workers.retain(|_, worker| !worker.is_closed());
                let known: Vec<AddressSpace> = self.workers.keys().cloned().collect();
                for space in known {
                    by_space.entry(space).or_default();
                }
                for (space, blocks) in by_space {
                    self.pass_on(&space, Message::Listed(blocks));
                }
                self.unlisted.send_replace(None);
                self.shared.metrics.borrow_mut().interrupted = None;
            }
            Event::Changed(block) => self.pass_on(&block.space(), Message::Changed(block)),
            Event::Gone(block) => self.pass_on(&block.space(), Message::Gone(block)),
            Event::Interrupted(why) => {
                let mut metrics = self.shared.metrics.borrow_mut();
                if metrics.interrupted.as_ref() != Some(&why) {
                    tracing::warn!(
                        error = why,
                        "the node's blocks are not watched; trying again"
                    );
                }
                metrics.interrupted = Some(why.clone());
                if self.unlisted.borrow().is_some() {
                    self.unlisted.send_replace(Some(why));
                }
            }
            Event::Watching => self.shared.metrics.borrow_mut().interrupted = None,
        }
    }

    fn pass_on(&mut self, space: &AddressSpace, message: Message) {
        match self.worker(space) {
            Ok(worker) => drop(worker.send(message)),
            Err(error) => tracing::error!(
                %space, error = format!("{error:#}"),
                "this node has blocks that cannot be cared for; end its pods that have leases there, then \
                 kubectl delete its addressblocks of the store"
            ),
        }
    }
}

/// What is served over HTTP: made by the tasks that know, read by those that answer.
#[derive(Debug)]
struct BrokerPages {
    metrics: Mutex<String>,
    /// Why the broker is not ready, until it is.
    unready: Mutex<Option<String>>,
}

fn lock_page<T>(page: &Mutex<T>) -> MutexGuard<'_, T> {
    page.lock().unwrap_or_else(PoisonError::into_inner)
}

impl BrokerPages {
    /// Of a broker that waits for the lock on the directory of the blocks.
    fn new(shared: &Shared, directory: &Path) -> Self {
        let directory = directory.display();
        let unready = format!("{directory} is locked by another broker, or cannot be locked");
        Self {
            metrics: Mutex::new(render(shared)),
            unready: Mutex::new(Some(unready)),
        }
    }

    fn set_unready(&self, why: Option<String>) {
        *lock_page(&self.unready) = why;
    }

    /// The reasons name objects of the cluster and files: an untrusted client learns only whether.
    fn ready(&self, in_full: bool) -> Page {
        match &*lock_page(&self.unready) {
            None => Page::text(200, "ready\n"),
            Some(why) if in_full => Page::text(503, format!("not ready\n{why}\n")),
            Some(_) => Page::text(503, "not ready\n"),
        }
    }
}

impl Pages for BrokerPages {
    fn paths(&self) -> &'static [&'static str] {
        &["/healthz", "/readyz", "/metrics"]
    }

    fn page(&self, path: &str, in_full: bool) -> Page {
        match path {
            "/metrics" => Page::metrics(lock_page(&self.metrics).clone()),
            "/readyz" => self.ready(in_full),
            _ => Page::text(200, "ok\n"),
        }
    }
}
