//! The program: a task for each store, a thread for each space, the socket. What it shows is in [`pages`],
//! how ranges move from other programs in [`migrate`].

mod migrate;
mod pages;

use std::collections::BTreeMap;
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ipam::leases::Leases;
use ipam::owned::{self, Owned};
use ipam::range::Range;
use ipam::space::AddressSpace;
use ipnetwork::IpNetwork;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};
use node::policy::{Policy, StoreKind};
use node_server::http::{self, Details};
use node_server::socket::Socket;
use node_server::socket::connections::{Answers, Connections};
use node_wire::{
    Answer, Failure, FailureKind, PartsChange, PartsQuestion, Question, Room, RoomMade, RoomNeed,
    RoomQuestion,
};
use tokio::sync::oneshot;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use self::pages::{AgentPages, hung};
use crate::api::{Api, News};
use crate::backend::Backend;
use crate::directory::Directory;
use crate::goal::Waiting;
use crate::node_marks::Wanted;
use crate::node_object::{Progress, Writer};
use crate::reserve::Reservation;
use crate::space::{Context, Message, Space, SpaceStatus};
use node_wire::rdma_node::OwnedAddresses;

/// The longest time that an asker may wait.
const MAX_WAIT: Duration = Duration::from_mins(1);
/// By so much an answer is earlier than the asker's limit: it has the reason, which an asker that gives up on
/// a busy node does not.
const MARGIN: Duration = Duration::from_millis(500);
/// How long an administrator waits.
const PARTS_LIMIT: Duration = Duration::from_secs(30);
/// More spaces than this are not served: who writes networks chooses how many there are.
const MAX_SPACES: usize = 256;
/// How often another agent's end is waited for, and a store that does not answer is asked again.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// How long a store that goes on failing is left alone, at most.
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(30);
const LOCK: &str = ".lock";

/// What an agent is to do.
#[expect(missing_debug_implementations, reason = "kube's client has none")]
pub struct Settings {
    pub policy: Policy,
    pub context: Context,
    /// For stores of type kubernetes, and the node's object.
    pub client: Option<kube::Client>,
    /// The daemon's socket, if the node's object is written.
    pub node_socket: Option<PathBuf>,
    /// What is written to the Node beside it.
    pub marks: Wanted,
    /// Of node-feature-discovery.
    pub features_dir: PathBuf,
    /// Where ADDs ask.
    pub socket: PathBuf,
    /// Where probes and metrics are served.
    pub listen: Vec<SocketAddr>,
}

/// A space's thread.
#[derive(Debug)]
struct Worker {
    messages: mpsc::Sender<Message>,
    thread: JoinHandle<()>,
    status: Arc<Mutex<SpaceStatus>>,
    /// What hangs if it does not answer, and why that may be.
    store: (String, &'static str),
}

/// A store of the policy.
#[derive(Debug)]
struct Store {
    backend: Backend,
    /// Why it is not known yet where this node has parts in it, or what changes there.
    fault: Mutex<Option<String>>,
}

/// What answers: the threads of all spaces.
#[derive(Debug)]
pub struct Agent {
    context: Arc<Context>,
    stores: BTreeMap<String, Store>,
    workers: Mutex<BTreeMap<AddressSpace, Worker>>,
    questions: Mutex<BTreeMap<&'static str, u64>>,
    /// What is known of the API is known of all that is in it.
    api: Option<Api>,
    /// Of the node's object, if it is written.
    object: Option<Arc<Mutex<Progress>>>,
    /// Why it does not serve yet.
    unready: Mutex<Option<String>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves until `stop`.
///
/// # Errors
/// The state directory cannot be used.
pub async fn run(settings: Settings, stop: CancellationToken) -> anyhow::Result<()> {
    let mut agent = Agent::new(&settings.policy, settings.context, settings.client.as_ref());
    agent.object = settings.node_socket.is_some().then(Arc::default);
    let agent = Arc::new(agent);
    let mut services = tokio::task::JoinSet::new();
    for address in settings.listen {
        let pages = AgentPages(agent.clone());
        services.spawn(http::serve(
            address,
            Details::Loopback,
            Arc::new(pages),
            stop.clone(),
        ));
    }
    let directory = agent.context.state_dir.join(owned::DIRECTORY);
    let _lock = tokio::select! {
        lock = lock_directory(&directory) => lock?,
        () = stop.cancelled() => return Ok(()),
    };
    let mut spaces = owned::spaces(&agent.context.state_dir)?;
    // Also those of which nothing is owned: the store was this node's alone when they were leased.
    let leases = Leases::open_existing(&agent.context.root, &agent.context.node.boot)?;
    if let Some(leases) = leases {
        let leases = leases.list()?.leases.into_iter();
        spaces.extend(leases.map(|one| AddressSpace::new(&one.store, one.network_name.as_deref())));
    }
    for space in spaces {
        // Spaces of other stores are another program's.
        let Some(store) = agent.stores.get(&space.store) else {
            continue;
        };
        if let Backend::Api(api) = &store.backend
            && let Ok(owned) = Owned::read(&agent.context.state_dir, &space)
        {
            let versions = owned.versions.values();
            versions.for_each(|version| api.remember(*version));
        }
        agent.begin(&space, None);
    }
    for name in agent.stores.keys() {
        tokio::spawn(follow(agent.clone(), name.clone()));
    }
    if let (Some(socket), Some(api), Some(progress)) =
        (settings.node_socket, &agent.api, &agent.object)
    {
        let owner = agent.clone();
        let writer = Writer {
            api: api.clone(),
            node: agent.context.node.clone(),
            socket,
            progress: progress.clone(),
            marks: settings.marks,
            features_dir: settings.features_dir,
            block: settings.policy.block.clone(),
            addresses: move || owner.addresses(),
        };
        tokio::spawn(writer.run());
    }
    *lock(&agent.unready) = None;
    let socket = Socket {
        path: settings.socket,
        flag: "--socket",
        nonce: format!("{:016x}", node::random::random64()),
        state: tokio::sync::watch::Sender::default(),
        connections: Connections::new(Asker(agent)),
    };
    socket.serve(&stop).await;
    let over = async { while services.join_next().await.is_some() {} };
    let _ = timeout(Duration::from_secs(3), over).await;
    Ok(())
}

/// Makes sure that one agent only writes for this node; waits for another one's end.
async fn lock_directory(directory: &Path) -> anyhow::Result<Flock<File>> {
    node::file::make_directories(directory)
        .with_context(|| format!("make {}", directory.display()))?;
    let path = directory.join(LOCK);
    let mut is_logged = false;
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
        if !is_logged {
            tracing::info!(lock = %path.display(), "another agent runs on this node; waiting for its end");
            is_logged = true;
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}

/// Finds the documents of a store in which this node has parts, also those that its disk has forgotten, and
/// hears what changes in them.
async fn follow(agent: Arc<Agent>, name: String) {
    let Some(store) = agent.stores.get(&name) else {
        return;
    };
    let mut wait = RETRY_INTERVAL;
    loop {
        let begun = Instant::now();
        let followed = match &store.backend {
            Backend::Api(api) => agent.hear(store, api).await,
            Backend::Directory(directory) => match agent.find(&name, directory.clone()).await {
                // A directory tells of no change.
                Ok(()) => return *lock(&store.fault) = None,
                fault => fault,
            },
        };
        if let Err(fault) = followed {
            let before = lock(&store.fault).replace(fault.clone());
            if before.as_ref() != Some(&fault) {
                tracing::warn!(store = name, fault, "cannot use the store; trying again");
            }
        }
        // Only a watch that lasted makes the pause short again.
        if begun.elapsed() > MAX_RETRY_INTERVAL {
            wait = RETRY_INTERVAL;
        }
        // Agents that a restart of the API hit at one time do not come back at one time.
        tokio::time::sleep(wait.mul_f64(0.5 + random())).await;
        wait = (2 * wait).min(MAX_RETRY_INTERVAL);
    }
}

/// From 0 to 1.
pub(crate) fn random() -> f64 {
    f64::from(u32::try_from(node::random::random64() >> 32).unwrap_or(0)) / f64::from(u32::MAX)
}

impl Agent {
    async fn find(&self, name: &str, directory: Directory) -> Result<(), String> {
        let name = name.to_owned();
        let found = tokio::task::spawn_blocking(move || directory.documents(&name));
        let found = found.await.map_err(|error| error.to_string())?;
        for News { space, subnet } in found.map_err(|error| error.to_string())? {
            self.begin(&space, Some(Message::News(subnet)));
        }
        Ok(())
    }

    /// Starts the thread of a space of which this node may have something. One that cannot be served stops no
    /// other one.
    fn begin(&self, space: &AddressSpace, message: Option<Message>) {
        if let Err(failure) = self.tell(space, message) {
            tracing::warn!(%space, why = failure.message, "a space is not served");
        }
    }

    /// Passes on what the API tells, until the watch ends.
    async fn hear(&self, store: &Store, api: &Api) -> Result<(), String> {
        let tell = |News { space, subnet }: News| {
            // Of another store of the API, or of a space that it does not use any more: nothing waits here.
            if self.stores.contains_key(&space.store) {
                self.begin(&space, Some(Message::News(subnet)));
            }
        };
        let found = api.documents().await;
        let (found, from) = found.map_err(|error| error.to_string())?;
        api.look().await.map_err(|error| error.to_string())?;
        *lock(&store.fault) = None;
        for (space, worker) in &*lock(&self.workers) {
            if self
                .stores
                .get(&space.store)
                .is_some_and(|of| std::ptr::eq(of, store))
            {
                let _ = worker.messages.send(Message::Missed);
            }
        }
        // After that, so that each document is read once.
        found.into_iter().for_each(tell);
        let watch = api.watch(&from, tell).await;
        watch.map_err(|error| error.to_string())
    }

    /// Of a node with this policy; no thread runs yet. Within a runtime.
    #[must_use]
    pub fn new(policy: &Policy, context: Context, client: Option<&kube::Client>) -> Self {
        let stores = policy.stores.iter();
        let api = client.map(|client| {
            let runtime = tokio::runtime::Handle::current();
            Api::new(client.clone(), runtime, &context.node.name)
        });
        let backend = |(name, store): (&String, &node::policy::StorePolicy)| {
            let backend = match &store.kind {
                StoreKind::Directory(path) => Backend::Directory(Directory::new(path)),
                StoreKind::Kubernetes => Backend::Api(api.clone()?),
                StoreKind::Node => return None,
            };
            let fault = Mutex::new(Some("it has not answered yet".to_owned()));
            Some((name.clone(), Store { backend, fault }))
        };
        Self {
            context: Arc::new(context),
            stores: stores.filter_map(backend).collect(),
            api,
            object: None,
            workers: Mutex::default(),
            questions: Mutex::default(),
            unready: Mutex::new(Some("another agent runs on this node".to_owned())),
        }
    }

    /// Sends a message to the thread of a space; starts it if need be.
    fn tell(&self, space: &AddressSpace, message: Option<Message>) -> Result<(), Failure> {
        let mismatch = |why: String| Failure::new(FailureKind::Mismatch, why);
        let Some(Store { backend, .. }) = self.stores.get(&space.store) else {
            return Err(mismatch(format!(
                "the agent's policy has no store {:?} that nodes share; if the policy changed, restart the DaemonSet's pod",
                space.store
            )));
        };
        if let Some(name) = space
            .network_name
            .as_ref()
            .filter(|name| !node::identity::is_name(name))
        {
            return Err(mismatch(format!("network_name {name:?} is not a name")));
        }
        let mut workers = lock(&self.workers);
        workers.retain(|_, worker| !worker.thread.is_finished());
        if let Some(worker) = workers.get(space) {
            let status = lock(&worker.status);
            if !status.is_over {
                // It does not end before it has read this.
                if let Some(message) = message {
                    let _ = worker.messages.send(message);
                }
                return Ok(());
            }
        }
        if workers.len() >= MAX_SPACES {
            let why = format!("this node uses {MAX_SPACES} address spaces already");
            return Err(Failure::new(FailureKind::TryAgain, why));
        }
        let status = Arc::new(Mutex::new(SpaceStatus::default()));
        let (sender, messages) = mpsc::channel();
        let (context, own, backend) = (self.context.clone(), space.clone(), backend.clone());
        let store = backend.name();
        let noted = status.clone();
        let thread = std::thread::Builder::new().name("space".to_owned());
        let thread = thread.spawn(move || {
            let open = || {
                let now = Instant::now();
                Space::open(
                    context.clone(),
                    own.clone(),
                    backend.clone(),
                    noted.clone(),
                    now,
                )
            };
            work(open, &noted, &messages);
        });
        let thread = thread.map_err(|error| {
            let why = format!("cannot start a thread: {error}");
            Failure::new(FailureKind::TryAgain, why)
        })?;
        if let Some(message) = message {
            let _ = sender.send(message);
        }
        let worker = Worker {
            messages: sender,
            thread,
            status,
            store,
        };
        workers.insert(space.clone(), worker);
        Ok(())
    }

    async fn make_room(&self, question: RoomQuestion) -> Result<RoomMade, Failure> {
        let limit = Duration::from_millis(question.within_ms.into()).min(MAX_WAIT);
        let limit = limit.saturating_sub(MARGIN);
        let deadline = Instant::now() + limit;
        let mut answers = Vec::new();
        for need in &question.needs {
            let (space, range) = parse(need)?;
            let (reply, answer) = oneshot::channel();
            let count = match need.room {
                Room::Addresses(count) => u64::from(count.max(1)),
                Room::Exact(_) | Room::Network(_) => 1,
            };
            let waiting = Waiting {
                count,
                deadline,
                reply,
            };
            self.tell(&space, Some(Message::Room(range, need.room, waiting)))?;
            answers.push((space, answer));
        }
        for (space, answer) in answers {
            let left = deadline.saturating_duration_since(Instant::now()) + MARGIN / 2;
            match timeout(left, answer).await {
                Ok(Ok(made)) => made?,
                Ok(Err(_)) => return Err(Failure::new(FailureKind::TryAgain, "the agent ends")),
                Err(_) => return Err(self.late(&space)),
            }
        }
        Ok(RoomMade {})
    }

    async fn change_parts(&self, question: PartsQuestion) -> Result<Answer, Failure> {
        let space = AddressSpace::new(&question.store, question.network_name.as_deref());
        let changed = match question.change {
            PartsChange::Hold(range) => self.hold(&space, &range, Reservation::Hold).await,
            PartsChange::Unhold(range) => self.hold(&space, &range, Reservation::Unhold).await,
            PartsChange::Import { range, leases } => self.import(&space, &range, leases).await,
            change => {
                let message = |reply| Message::Parts(change, reply);
                self.ask_space(&space, message).await
            }
        };
        changed.map(Answer::Parts)
    }

    /// An administrator's question to a space's thread.
    async fn ask_space<T>(
        &self,
        space: &AddressSpace,
        message: impl FnOnce(oneshot::Sender<Result<T, Failure>>) -> Message,
    ) -> Result<T, Failure> {
        let (reply, answer) = oneshot::channel();
        self.tell(space, Some(message(reply)))?;
        match timeout(PARTS_LIMIT, answer).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(Failure::new(FailureKind::TryAgain, "the agent ends")),
            Err(_) => Err(self.late(space)),
        }
    }

    /// Why a space's thread does not answer.
    fn late(&self, space: &AddressSpace) -> Failure {
        let workers = lock(&self.workers);
        let hung = workers
            .get(space)
            .and_then(|worker| hung(worker, Duration::ZERO));
        let why = hung.unwrap_or_else(|| format!("{space}: the agent is busy; try again"));
        Failure::new(FailureKind::TryAgain, why)
    }

    /// What the node owns in each space.
    fn addresses(&self) -> Vec<OwnedAddresses> {
        let workers = lock(&self.workers);
        let of = |(space, worker): (&AddressSpace, &Worker)| {
            let status = lock(&worker.status);
            OwnedAddresses {
                store: space.store.clone(),
                network_name: space.network_name.clone().unwrap_or_default(),
                parts: status.parts,
                addresses: status.addresses,
            }
        };
        let owned = workers.iter().map(of);
        owned.filter(|owned| owned.parts > 0).collect()
    }
}

/// A space's thread, which ends when nothing of the node is in it: questions first.
fn work(
    open: impl Fn() -> anyhow::Result<Space>,
    status: &Mutex<SpaceStatus>,
    messages: &mpsc::Receiver<Message>,
) {
    let mut space = loop {
        let fault = match open() {
            Ok(space) => break space,
            Err(error) => format!("{error:#}"),
        };
        tracing::error!(
            fault,
            "cannot read or write the files of this node; trying again"
        );
        lock(status).fault = Some(fault.clone());
        match messages.recv_timeout(RETRY_INTERVAL) {
            Ok(message) => message.refuse(Failure::new(FailureKind::TryAgain, fault)),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => return,
        }
    };
    lock(status).fault = None;
    let mut wait = Duration::ZERO;
    loop {
        match messages.recv_timeout(wait) {
            Ok(message) => space.ask(message, Instant::now()),
            Err(mpsc::RecvTimeoutError::Timeout) if !wait.is_zero() && space.is_idle() => {
                let mut status = lock(status);
                let Ok(message) = messages.try_recv() else {
                    // Who asks later starts another thread.
                    status.is_over = true;
                    drop(status);
                    return space.close();
                };
                drop(status);
                space.ask(message, Instant::now());
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => return,
        }
        while let Ok(message) = messages.try_recv() {
            space.ask(message, Instant::now());
        }
        wait = space.step(Instant::now());
    }
}

fn parse(need: &RoomNeed) -> Result<(AddressSpace, Range), Failure> {
    let malformed = |why: String| {
        Failure::new(
            FailureKind::Malformed,
            format!("a need is malformed: {why}"),
        )
    };
    let network: IpNetwork = need
        .range
        .parse()
        .map_err(|_| malformed(format!("range {:?} is not a network", need.range)))?;
    let per_node = match need.room {
        Room::Network(per_node) => Some(per_node),
        Room::Addresses(_) | Room::Exact(_) => None,
    };
    let range = Range::of_parts(network, &need.spans)
        .map_err(|why| malformed(why.to_owned()))?
        .divided(per_node)
        .map_err(malformed)?;
    if let Some(per_node) =
        per_node.filter(|of| of.prefix < if network.is_ipv4() { 24 } else { 120 })
    {
        let why = format!(
            "perNode: prefix {} is shorter than that of a subnet, 24 or 120: a node's network is in one subnet",
            per_node.prefix
        );
        return Err(Failure::new(FailureKind::Mismatch, why));
    }
    Ok((
        AddressSpace::new(&need.store, need.network_name.as_deref()),
        range,
    ))
}

/// Answers the programs of the node.
#[derive(Debug)]
struct Asker(Arc<Agent>);

impl Answers for Asker {
    async fn answer(&self, question: Question) -> Result<Answer, Failure> {
        match question {
            Question::Room(question) => {
                let made = self.0.make_room(question).await;
                let result = match &made {
                    Ok(_) => "made",
                    Err(failure) => match failure.kind {
                        FailureKind::Exhausted => "exhausted",
                        FailureKind::HeldByAnotherNode => "held_by_another_node",
                        FailureKind::TryAgain => "try_again",
                        _ => "refused",
                    },
                };
                *lock(&self.0.questions).entry(result).or_default() += 1;
                made.map(Answer::Room)
            }
            Question::Parts(question) => self.0.change_parts(question).await,
            other => Err(other.not_mine()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::ThisNode;
    use ipam::owned::Owned;
    use node::policy::StorePolicy;
    use node_wire::client;

    fn policy(share: &Path) -> Policy {
        let mut policy = Policy::default();
        let store = StorePolicy::of(StoreKind::Directory(share.to_owned()));
        policy.stores.insert("shared".to_owned(), store);
        policy
    }

    fn context(root: &Path) -> Context {
        Context {
            node: ThisNode {
                name: "n1".into(),
                boot: "b1".into(),
            },
            root: root.to_owned(),
            state_dir: root.join("state"),
            cooldown: Duration::ZERO,
            grace: Duration::from_mins(5),
        }
    }

    fn need(store: &str, room: Room) -> RoomNeed {
        RoomNeed {
            store: store.into(),
            network_name: None,
            range: "10.0.0.0/24".into(),
            spans: vec![([10, 0, 0, 1].into(), [10, 0, 0, 254].into())],
            room,
        }
    }

    fn question(needs: Vec<RoomNeed>) -> RoomQuestion {
        RoomQuestion {
            within_ms: 5000,
            needs,
        }
    }

    #[tokio::test]
    async fn an_add_that_asks_over_the_socket_finds_its_part_in_the_file() {
        let (root, share) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        ipam::directory::init(share.path()).unwrap();
        let (stop, socket) = (CancellationToken::new(), root.path().join("agent.sock"));
        let settings = Settings {
            policy: policy(share.path()),
            context: context(root.path()),
            client: None,
            node_socket: None,
            marks: Wanted::default(),
            features_dir: root.path().join("features"),
            socket: socket.clone(),
            listen: Vec::new(),
        };
        let serving = tokio::spawn(run(settings, stop.clone()));
        let needs = vec![
            need("shared", Room::Addresses(3)),
            need("shared", Room::Exact([10, 0, 0, 200].into())),
        ];
        let asked = tokio::task::spawn_blocking(move || {
            while !socket.exists() {
                std::thread::sleep(Duration::from_millis(10));
            }
            client::ask(&socket, &question(needs), Duration::from_secs(5))
        });
        assert_eq!(asked.await.unwrap().unwrap(), RoomMade {});
        let space = AddressSpace::new("shared", None);
        let owned = Owned::read(&root.path().join("state"), &space).unwrap();
        let size: u128 = owned
            .parts
            .keys()
            .map(|part| ipam::range::Span::of(*part).size())
            .sum();
        assert!(size >= 4, "{owned:?}");
        stop.cancel();
        serving.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn questions_that_cannot_be_served_are_refused_by_their_reason() {
        let (root, share) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let agent = Agent::new(&policy(share.path()), context(root.path()), None);
        let per_node = |prefix| {
            Room::Network(node_wire::PerNode {
                prefix,
                gateway: None,
            })
        };
        let outside = RoomNeed {
            spans: vec![([10, 0, 1, 1].into(), [10, 0, 1, 1].into())],
            ..need("shared", Room::Addresses(1))
        };
        let wide = RoomNeed {
            range: "10.0.0.0/16".into(),
            ..need("shared", per_node(20))
        };
        let named = RoomNeed {
            network_name: Some("../x".into()),
            ..need("shared", Room::Addresses(1))
        };
        for (need, kind, why) in [
            (
                need("default", Room::Addresses(1)),
                FailureKind::Mismatch,
                "no store \"default\" that nodes share",
            ),
            (outside, FailureKind::Malformed, "a span is not in it"),
            (wide, FailureKind::Mismatch, "perNode: prefix 20 is shorter"),
            (named, FailureKind::Mismatch, "is not a name"),
            // The share is not mounted.
            (
                need("shared", Room::Addresses(1)),
                FailureKind::TryAgain,
                "mount the share",
            ),
        ] {
            let mut question = question(vec![need]);
            question.within_ms = 700;
            let failure = agent.make_room(question).await.unwrap_err();
            assert_eq!(failure.kind, kind, "{failure}");
            assert!(failure.message.contains(why), "{failure}");
        }
        let faults = agent.faults().join("\n");
        assert!(faults.contains("mount the share"), "{faults}");
        let metrics = agent.metrics();
        assert!(metrics.contains("rdma_agent_store_failing{"), "{metrics}");
    }

    #[tokio::test]
    async fn a_range_of_several_subnets_moves_from_host_local() {
        let (root, share) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        ipam::directory::init(share.path()).unwrap();
        let agent = Agent::new(&policy(share.path()), context(root.path()), None);
        let ask = async |change| {
            let question = PartsQuestion {
                store: "shared".into(),
                network_name: None,
                change,
            };
            match agent.change_parts(question).await {
                Ok(Answer::Parts(changed)) => Ok(changed.reserved.unwrap()),
                Ok(other) => panic!("{other:?}"),
                Err(failure) => Err(failure),
            }
        };
        let counts = |added, removed, left| node_wire::Reserved {
            added,
            removed,
            left,
        };
        let range = "10.0.0.0/22".to_owned();
        let import = |lasts: &[u8]| PartsChange::Import {
            range: range.clone(),
            leases: node_wire::OldLeases::HostLocal {
                network: "rail1".into(),
                leases: lasts
                    .iter()
                    .map(|last| ([10, 0, *last, *last].into(), "c1".into()))
                    .collect(),
            },
        };
        assert_eq!(
            ask(PartsChange::Hold(range.clone())).await.unwrap(),
            counts(1024, 0, 0)
        );
        assert_eq!(
            ask(PartsChange::Hold(range.clone())).await.unwrap(),
            counts(0, 0, 0)
        );
        assert_eq!(ask(import(&[1, 3, 77])).await.unwrap(), counts(2, 0, 2));
        assert_eq!(
            ask(PartsChange::Unhold(range.clone())).await.unwrap(),
            counts(0, 1024, 0)
        );
        let backend = &agent.stores["shared"].backend;
        let read = |subnet: &str| {
            let space = AddressSpace::new("shared", None);
            backend
                .read(&space, subnet.parse().unwrap())
                .unwrap()
                .document
                .parts
        };
        let parts = read("10.0.3.0/24");
        let text = parts.values().next().unwrap().reserved.as_deref();
        assert_eq!(text, Some("host-local: n1/rail1/c1"));
        // The node's own files say that it is over.
        assert_eq!(ask(import(&[3])).await.unwrap(), counts(0, 1, 1));
        assert_eq!(ask(import(&[])).await.unwrap(), counts(0, 1, 0));
        assert!(read("10.0.1.0/24").is_empty() && read("10.0.3.0/24").is_empty());
        let whereabouts = PartsChange::Import {
            range: range.clone(),
            leases: node_wire::OldLeases::Whereabouts {
                namespace: "kube-system".into(),
            },
        };
        let refused = ask(whereabouts).await.unwrap_err();
        assert_eq!(refused.kind, FailureKind::Mismatch);
        assert!(
            refused.message.contains("is not of type kubernetes"),
            "{refused}"
        );
    }
}
