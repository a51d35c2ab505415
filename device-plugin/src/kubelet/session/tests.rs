//! Sessions against a kubelet's registration server in this process.

use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use kubelet_api::deviceplugin::Empty;
use kubelet_api::deviceplugin::device_plugin_client::DevicePluginClient;
use kubelet_api::deviceplugin::registration_server::{Registration, RegistrationServer};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

use super::*;
use crate::binding::binder::tests::binder;
use crate::kubelet::directory;
use crate::kubelet::service::Helpers;
use crate::node_paths::NodePaths;
use crate::reader::Readers;
use hca::Hca;
use pools::config::{NodeClass, Policy, PoolConfig, Sharing};
use pools::example::{function, named};
use pools::snapshot::{DeviceNode, Member, Snapshot};

const FAST: Timing = Timing {
    register: Duration::from_secs(5),
    back_off: Duration::from_millis(10),
    back_off_max: Duration::from_millis(50),
    // Far longer than a test takes to open its stream on a busy machine: an unexpected
    // registration leaves the next reader dialling a socket on its way out.
    stream: Duration::from_secs(60),
};

/// A registration server that passes on each registration, after it dialled back as kubelets do.
struct FakeKubelet {
    directory: PathBuf,
    sender: mpsc::UnboundedSender<RegisterRequest>,
    /// How many registrations it still refuses, shared by all kubelets of a scene.
    refuses: Arc<AtomicU32>,
}

#[tonic::async_trait]
impl Registration for FakeKubelet {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let one_less = |left: u32| left.checked_sub(1);
        if self
            .refuses
            .fetch_update(Relaxed, Relaxed, one_less)
            .is_ok()
        {
            return Err(Status::unavailable("not now"));
        }
        let request = request.into_inner();
        let mut plugin = dial(&self.directory.join(&request.endpoint))
            .await
            .map_err(|error| Status::unavailable(error.to_string()))?;
        plugin.get_device_plugin_options(Empty {}).await?;
        self.sender
            .send(request)
            .map_err(|_| Status::aborted("the test is over"))?;
        Ok(Response::new(Empty {}))
    }
}

async fn dial(socket: &Path) -> Result<DevicePluginClient<Channel>, tonic::transport::Error> {
    DevicePluginClient::connect(format!("unix://{}", socket.display())).await
}

struct Scene {
    directory: tempfile::TempDir,
    received: mpsc::UnboundedReceiver<RegisterRequest>,
    sender: mpsc::UnboundedSender<RegisterRequest>,
    refuses: Arc<AtomicU32>,
    kubelet: Option<JoinHandle<()>>,
    _feed: watch::Sender<Option<Arc<Snapshot>>>,
    state: watch::Receiver<State>,
    stop: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
}

impl Scene {
    /// A session in an empty directory; there is no kubelet yet.
    fn set() -> Self {
        Self::with(FAST)
    }

    /// The same with waits of the test's own.
    fn with(timing: Timing) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (sender, received) = mpsc::unbounded_channel();
        let stop = CancellationToken::new();
        let feed = watch::Sender::new(Some(Arc::new(snapshot())));
        let state = watch::Sender::new(State::default());
        let (watched, resource) = (state.subscribe(), ResourceName::parse("rdma/a").unwrap());
        let readers = Readers::default();
        let (plugins, watching) =
            directory::watched(directory.path().into(), &readers, stop.clone());
        let paths = Arc::new(NodePaths::all_in(directory.path()));
        let (binder, files) = (Arc::new(binder(&paths)), mpsc::channel(1).0);
        let helpers = Helpers::new(&readers, &paths, files, binder);
        let socket = SocketName::new(&resource, "one");
        let plugin = Plugin::new(resource, true, feed.subscribe(), helpers);
        let session = Session {
            plugin: Arc::new(plugin),
            directory: plugins,
            socket,
            state,
            timing,
            stop: stop.clone(),
        };
        let tasks = vec![tokio::spawn(watching), tokio::spawn(session.run())];
        Self {
            directory,
            received,
            sender,
            refuses: Arc::default(),
            kubelet: None,
            _feed: feed,
            state: watched,
            stop,
            tasks,
        }
    }

    /// Starts a kubelet as one starts: sockets in the directory are deleted first.
    fn start_kubelet(&mut self) {
        for entry in std::fs::read_dir(self.directory.path()).unwrap().flatten() {
            if entry.file_type().unwrap().is_socket() {
                std::fs::remove_file(entry.path()).unwrap();
            }
        }
        let listener = UnixListener::bind(self.directory.path().join(KUBELET_SOCKET)).unwrap();
        let service = FakeKubelet {
            directory: self.directory.path().into(),
            sender: self.sender.clone(),
            refuses: self.refuses.clone(),
        };
        let server = Server::builder()
            .add_service(RegistrationServer::new(service))
            .serve_with_incoming(UnixListenerStream::new(listener));
        self.kubelet = Some(tokio::spawn(async { server.await.unwrap() }));
    }

    fn stop_kubelet(&mut self) {
        self.kubelet.take().unwrap().abort();
    }

    async fn registered(&mut self) -> DevicePluginClient<Channel> {
        let received = tokio::time::timeout(Duration::from_secs(30), self.received.recv());
        let request = received.await.expect("a registration").unwrap();
        assert_eq!(
            (request.version.as_str(), request.resource_name.as_str()),
            ("v1beta1", "rdma/a")
        );
        dial(&self.directory.path().join(request.endpoint))
            .await
            .unwrap()
    }

    async fn end(self) {
        self.stop.cancel();
        for task in self.tasks {
            task.await.unwrap();
        }
        let left: Vec<_> = std::fs::read_dir(self.directory.path())
            .unwrap()
            .flatten()
            .filter(|entry| entry.file_name() != KUBELET_SOCKET)
            .collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

fn snapshot() -> Snapshot {
    let member = Member {
        nodes: vec![DeviceNode {
            class: NodeClass::Uverbs,
            path: "/dev/infiniband/uverbs0".into(),
        }],
        ..Member::example(Hca {
            pci: Some(function("0000:3b:00.0", Some(1))),
            ..named("0000:3b:00.0", &["mlx5_0"])
        })
    };
    let sharing = Sharing::Exclusive {
        policy: Policy::Spread,
    };
    let resource = ResourceName::parse("rdma/a").unwrap();
    let pool = PoolConfig::new(resource, sharing, Vec::new());
    Snapshot::new(Arc::new(pool), 0, vec![member], Arc::default())
}

#[tokio::test]
async fn streams_that_end_at_once_cause_no_storm_of_registrations() {
    const FIRST: Duration = Duration::from_millis(100);
    let mut scene = Scene::with(Timing {
        back_off: FIRST,
        back_off_max: Duration::from_secs(60),
        ..FAST
    });
    scene.start_kubelet();
    let started = Instant::now();
    for _ in 0..4 {
        let mut plugin = scene.registered().await;
        drop(plugin.list_and_watch(Empty {}).await.unwrap());
    }
    // Half of 1, 2 and 4.
    let took = started.elapsed();
    assert!(took >= FIRST * 7 / 2, "{took:?}");
    // Another kubelet is not kept waiting for that.
    scene.stop_kubelet();
    scene.start_kubelet();
    let _plugin = scene.registered().await;
    scene.end().await;
}

/// As after a long outage, when the waits between attempts have grown.
#[tokio::test]
async fn a_new_kubelet_that_refuses_is_asked_again_soon() {
    const REFUSALS: u64 = 6;
    let mut scene = Scene::with(Timing {
        back_off: Duration::from_millis(100),
        back_off_max: Duration::from_secs(60),
        ..FAST
    });
    scene.refuses.store(u32::MAX, Relaxed);
    scene.start_kubelet();
    let refused = scene.state.wait_for(|state| state.failures >= REFUSALS);
    drop(refused.await.unwrap());
    // The next attempt is at least 3.2 s away now.
    scene.stop_kubelet();
    scene.refuses.store(1, Relaxed);
    let started = Instant::now();
    scene.start_kubelet();
    let _plugin = scene.registered().await;
    assert!(
        started.elapsed() < Duration::from_secs(2),
        "{:?}",
        started.elapsed()
    );
    scene.end().await;
}

#[tokio::test]
async fn removes_what_a_killed_process_left_and_nothing_else() {
    let scene = Scene::set();
    let resource = ResourceName::parse("rdma/a").unwrap();
    let path = |nonce| {
        scene
            .directory
            .path()
            .join(SocketName::new(&resource, nonce).as_str())
    };
    let (dead, alive) = (path("dead"), path("alive"));
    drop(UnixListener::bind(&dead).unwrap());
    let _serving = UnixListener::bind(&alive).unwrap();
    let own = path("one");
    tokio::time::sleep(Duration::from_millis(100)).await;
    std::fs::remove_file(&own).unwrap();
    // The session binds again, and sweeps before it does.
    for _ in 0..100 {
        if own.exists() && !dead.exists() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(own.exists() && !dead.exists() && alive.exists());
    std::fs::remove_file(&alive).unwrap();
    scene.end().await;
}

#[test]
fn waits_grow_to_a_bound_and_are_not_all_alike() {
    let timing = Timing::default();
    let mut back_off = BackOff::new(timing);
    let waits: Vec<Duration> = (0..12).map(|_| back_off.next()).collect();
    assert!(waits[0] >= timing.back_off / 2 && waits[0] <= timing.back_off);
    assert!(waits[11] >= timing.back_off_max / 2 && waits[11] <= timing.back_off_max);
    back_off.reset();
    assert!(back_off.next() <= timing.back_off);
}

#[test]
fn socket_names_fit_a_unix_address_however_long_the_resource() {
    let long = format!("{}/{}", "p".repeat(240), "n".repeat(63));
    let name = SocketName::new(&ResourceName::parse(&long).unwrap(), "7fffffff");
    let path = Path::new("/var/lib/kubelet/device-plugins").join(name.as_str());
    assert!(path.as_os_str().len() < 108, "{}", path.display());
}
