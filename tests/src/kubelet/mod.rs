//! A stand-in for the kubelet: its device manager, its PodResources service
//! and its admission of pods, as strict as the real one and no stricter.
//!
//! Written after the behaviour of kubelets 1.26 to 1.34, not after our device
//! plugin: where the real one has a quirk (connections keyed by resource name,
//! a plugin's options in the request ignored, an empty topology hiding its
//! device) so has this one. It is not a container runtime; [`crate::node`] adds that.
//!
//! - [`Kubelet`]: start, stop, kill, read the node, admit and remove pods;
//! - `resource_name`, `state`, `run_options`: the rules, as pure functions;
//! - `checkpoint`: what survives the kubelet;
//! - `connection`, `registration`, `podresources`: the gRPC sides;
//! - `admission`: from pod to devices;
//! - `pod`: manifests.

mod admission;
mod checkpoint;
mod connection;
mod pod;
mod podresources;
mod probe;
mod registration;
mod resource_name;
mod run_options;
mod shared;
mod state;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use kubelet_api::deviceplugin::KUBELET_SOCKET;
use kubelet_api::deviceplugin::registration_server::RegistrationServer;
use kubelet_api::podresources::pod_resources_lister_server::PodResourcesListerServer;
use tokio::net::UnixListener;
use tokio::runtime::Handle;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

pub use admission::NotAdmitted;
pub use checkpoint::FILE as CHECKPOINT_FILE;
pub use pod::{ConfigMaps, Container, Pod, Propagation, SeccompType, Volume, expanded};
pub use resource_name::{NotExtended, check as check_resource_name};
pub use run_options::RunOptions;
pub use shared::{Misbehaviour, Registration, Settings};
pub use state::{Node, Quantity, Refused};

use registration::Registry;
use shared::{Inner, Shared};
use state::State;

/// The kubelet's first wait before it starts a container again (`pkg/kubelet/kubelet.go`,
/// `backOffPeriod`).
const START_BACK_OFF: Duration = Duration::from_secs(10);

/// A running kubelet. Its services live on a thread of their own; the methods
/// may be called from any other.
#[derive(Debug)]
pub struct Kubelet {
    shared: Arc<Shared>,
    runtime: Handle,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

impl Kubelet {
    /// Starts as a kubelet does: reads its checkpoint, deletes every socket in
    /// the device-plugins directory (and nothing else there), then serves.
    ///
    /// # Errors
    /// A directory cannot be made or read, or a socket cannot be bound.
    pub fn start(settings: Settings) -> Result<Self> {
        let pod_resources = settings.root.join("pod-resources");
        for directory in [&settings.device_plugins, &pod_resources, &settings.pods] {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o750)
                .create(directory)
                .with_context(|| format!("create {}", directory.display()))?;
        }
        let checkpoint = checkpoint::read(&settings.device_plugins).unwrap_or_else(|error| {
            tracing::warn!(
                error = format!("{error:#}"),
                "going on without the checkpoint"
            );
            checkpoint::Checkpoint::default()
        });
        let pods = read_pods(&settings.pods)?;
        let registered = checkpoint.registered.into_keys();
        let mut state = State::restored(checkpoint.assignments, registered, Instant::now());
        // Pods that went away while the kubelet was down hold nothing.
        state.assignments.retain(|held| {
            pods.values()
                .any(|pod: &Pod| pod.metadata.uid == held.pod_uid)
        });
        remove_sockets(&settings.device_plugins)?;
        fs::write(settings.device_plugins.join("DEPRECATION"), "")
            .context("write into the device-plugins directory")?;

        let times = (1..).map(|count| Instant::now() + settings.adds_pods_every * count);
        let inner = Inner {
            state,
            added: pods.keys().cloned().zip(times).collect(),
            pods,
            ..Inner::default()
        };
        let shared = Arc::new(Shared::new(settings, inner));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("start the kubelet's runtime")?;
        let registry = RegistrationServer::new(Registry(Arc::clone(&shared)));
        let lister = podresources::Lister::new(Arc::clone(&shared));
        let lister = PodResourcesListerServer::new(lister);
        {
            let _inside = runtime.enter();
            let plugins = listen(&shared.settings.device_plugins.join(KUBELET_SOCKET))?;
            runtime.spawn(
                Server::builder()
                    .add_service(registry)
                    .serve_with_incoming(plugins),
            );
            let resources = listen(&pod_resources.join(KUBELET_SOCKET))?;
            runtime.spawn(
                Server::builder()
                    .add_service(lister)
                    .serve_with_incoming(resources),
            );
        }

        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let handle = runtime.handle().clone();
        let thread = std::thread::Builder::new()
            .name("kubelet".to_owned())
            // Dropping the runtime here ends every task and connection at once.
            .spawn(move || runtime.block_on(stopped.cancelled()))
            .context("start the kubelet's thread")?;
        Ok(Self {
            shared,
            runtime: handle,
            stop,
            thread: Some(thread),
        })
    }

    /// Ends as on SIGTERM: sockets are removed, the checkpoint stays.
    pub fn stop(self) {
        let sockets = [self.socket(), self.pod_resources_socket()];
        drop(self);
        for socket in sockets {
            // Gone already is as good.
            let _ = fs::remove_file(socket);
        }
    }

    /// Ends as on SIGKILL: connections break, sockets stay behind without a listener.
    pub fn kill(self) {
        drop(self);
    }

    /// Kills the kubelet and starts it anew on the same directories.
    ///
    /// # Errors
    /// As [`Kubelet::start`].
    pub fn restart(self) -> Result<Self> {
        let settings = self.shared.settings.clone();
        self.kill();
        Self::start(settings)
    }

    /// Where it keeps its things.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.shared.settings
    }

    /// The registration socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.shared.settings.device_plugins.join(KUBELET_SOCKET)
    }

    /// The PodResources socket.
    #[must_use]
    pub fn pod_resources_socket(&self) -> PathBuf {
        self.shared
            .settings
            .root
            .join("pod-resources")
            .join(KUBELET_SOCKET)
    }

    /// For those who must wait for something else on the kubelet's runtime.
    #[must_use]
    pub fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// The Node object's extended resources as of now.
    #[must_use]
    pub fn node(&self) -> Node {
        self.shared.node()
    }

    /// Health and NUMA nodes of every device in a resource's last list, by ID.
    #[must_use]
    pub fn devices(&self, resource: &str) -> BTreeMap<String, kubelet_api::deviceplugin::Device> {
        self.shared.lock().state.devices(resource)
    }

    /// Every call of Register since the start, refused ones too.
    #[must_use]
    pub fn registrations(&self) -> Vec<Registration> {
        self.shared.lock().registrations.clone()
    }

    /// Calls of PodResources List since the start, refused ones too.
    #[must_use]
    pub fn pod_lists(&self) -> u64 {
        self.shared.lock().pod_lists
    }

    /// Waits until `condition` holds for the node and the registrations so far.
    ///
    /// # Errors
    /// It did not within `timeout`; the message has what there was instead.
    pub fn wait(
        &self,
        what: &str,
        timeout: Duration,
        mut condition: impl FnMut(&Node, &[Registration]) -> bool,
    ) -> Result<()> {
        let mut changes = self.shared.changes();
        let content = async {
            while !condition(&self.node(), &self.registrations()) {
                if changes.changed().await.is_err() {
                    break;
                }
            }
        };
        let waited = self
            .runtime
            .block_on(async { tokio::time::timeout(timeout, content).await });
        if waited.is_err() {
            bail!(
                "waited {timeout:?} for {what}; node: {:?}; registrations: {:?}",
                self.node(),
                self.registrations()
            );
        }
        Ok(())
    }

    /// Waits until exactly `count` devices of the resource are allocatable.
    ///
    /// # Errors
    /// They were not within `timeout`.
    pub fn wait_allocatable(&self, resource: &str, count: usize, timeout: Duration) -> Result<()> {
        self.wait(&format!("{count} of {resource}"), timeout, |node, _| {
            node.get(resource)
                .is_some_and(|quantity| quantity.allocatable == count)
        })
    }

    /// Schedules and admits a pod: from here on it holds its devices.
    ///
    /// # Errors
    /// There are not enough, or a plugin failed; then the pod holds nothing.
    pub fn admit(&self, pod: Pod) -> Result<(), NotAdmitted> {
        let name = pod.full_name();
        let unexpected = |cause| NotAdmitted::Unexpected {
            pod: name.clone(),
            cause,
        };
        if self.shared.lock().pods.contains_key(&name) {
            return Err(unexpected(anyhow::anyhow!(
                "there is a pod of that name already"
            )));
        }
        self.shared.fits(&pod)?;
        self.runtime.block_on(self.shared.allocate(&pod))?;
        write_pod(&self.shared.settings.pods, &pod).map_err(unexpected)?;
        self.populate(&pod.metadata.uid, false)
            .map_err(unexpected)?;
        self.shared.lock().pods.insert(name, pod);
        Ok(())
    }

    /// Admits a pod once more, as after a reboot of the node: it keeps its
    /// devices if they are there and healthy, and fails for good if not.
    ///
    /// # Errors
    /// As [`Kubelet::admit`]; or there is no such pod.
    pub fn readmit(&self, pod: &str) -> Result<()> {
        let pod = self.pod(pod)?;
        Ok(self.runtime.block_on(self.shared.allocate(&pod))?)
    }

    /// What a container is to be started, or restarted, with.
    ///
    /// # Errors
    /// There is no such pod or container, or `PreStartContainer` failed.
    pub fn run_options(&self, pod: &str, container: &str) -> Result<RunOptions> {
        let pod = self.pod(pod)?;
        let options = self
            .runtime
            .block_on(self.shared.run_options(&pod, container))?;
        self.populate(&pod.metadata.uid, true)?;
        Ok(options)
    }

    /// The pod's cgroup, which has processes or not.
    fn populate(&self, uid: &str, populated: bool) -> Result<()> {
        let Some(root) = &self.shared.settings.cgroups else {
            return Ok(());
        };
        let cgroup = cgroup(root, uid);
        fs::create_dir_all(&cgroup)?;
        fs::write(root.join("cgroup.controllers"), "cpu memory pids\n")?;
        let events = format!("populated {}\nfrozen 0\n", u8::from(populated));
        Ok(fs::write(cgroup.join("cgroup.events"), events)?)
    }

    /// The last process of a pod ends, and its cgroup goes.
    ///
    /// # Errors
    /// There is no such cgroup.
    pub fn end_processes(&self, uid: &str) -> Result<()> {
        self.populate(uid, false)?;
        match &self.shared.settings.cgroups {
            Some(root) => Ok(fs::remove_dir_all(cgroup(root, uid))?),
            None => Ok(()),
        }
    }

    /// Starts a container again as the kubelet does: where that fails, it waits as long as after the
    /// first crash, and twice as long each time. Returns how long that took as well.
    ///
    /// # Errors
    /// It fails three times.
    pub fn restart_container(&self, pod: &str, container: &str) -> Result<(RunOptions, Duration)> {
        let started = Instant::now();
        let mut back_off = START_BACK_OFF;
        loop {
            match self.run_options(pod, container) {
                Ok(options) => return Ok((options, started.elapsed())),
                Err(error) if back_off > 2 * START_BACK_OFF => return Err(error),
                Err(_) => std::thread::sleep(back_off),
            }
            back_off *= 2;
        }
    }

    /// The pods of the node by `namespace/name`.
    #[must_use]
    pub fn pods(&self) -> BTreeMap<String, Pod> {
        self.shared.lock().pods.clone()
    }

    /// One of them.
    ///
    /// # Errors
    /// There is no such pod.
    pub fn pod(&self, name: &str) -> Result<Pod> {
        let pod = self.shared.lock().pods.get(name).cloned();
        pod.with_context(|| format!("there is no pod {name}"))
    }

    /// Device IDs a pod holds, by container and resource.
    ///
    /// # Errors
    /// There is no such pod.
    pub fn assigned(&self, pod: &str) -> Result<BTreeMap<(String, String), Vec<String>>> {
        let uid = self.pod(pod)?.metadata.uid;
        let inner = self.shared.lock();
        let held = inner
            .state
            .assignments
            .iter()
            .filter(|held| held.pod_uid == uid);
        let entry = |held: &state::Assignment| {
            let key = (held.container.clone(), held.resource.clone());
            (key, held.ids().into_iter().collect())
        };
        Ok(held.map(entry).collect())
    }

    /// Removes a pod and frees its devices.
    ///
    /// # Errors
    /// There is no such pod, or its object cannot be removed.
    pub fn remove(&self, pod: &str) -> Result<()> {
        let uid = self.pod(pod)?.metadata.uid;
        self.end_processes(&uid)?;
        self.remove_by_force(pod)
    }

    /// Removes a pod whose processes may hang: it holds nothing from here on.
    ///
    /// # Errors
    /// There is no such pod.
    pub fn remove_by_force(&self, pod: &str) -> Result<()> {
        let pod = self.pod(pod)?;
        let path = pod_path(&self.shared.settings.pods, &pod);
        fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
        let mut inner = self.shared.lock();
        inner.pods.remove(&pod.full_name());
        inner.state.release(&pod.metadata.uid);
        drop(inner);
        self.shared.notify();
        // The checkpoint has the pod until the next allocation: a kubelet writes it then
        // (`pkg/kubelet/cm/devicemanager/manager.go`, `UpdateAllocatedDevices`).
        Ok(())
    }

    /// From now on, go wrong like this.
    pub fn misbehave(&self, misbehaviour: Misbehaviour) {
        self.shared.lock().misbehaviour = misbehaviour;
    }

    /// Closes the connection to the plugin of a resource, which must then come back by itself.
    pub fn disconnect(&self, resource: &str) {
        self.shared.lock().disconnect(resource);
        self.shared.notify();
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            // A panic in there has been printed already.
            let _ = thread.join();
        }
    }
}

fn cgroup(root: &Path, uid: &str) -> PathBuf {
    let name = format!("kubepods-pod{}.slice", uid.replace('-', "_"));
    root.join("kubepods.slice").join(name)
}

/// Binds a socket, in place of one left by a kubelet that was killed.
fn listen(path: &Path) -> Result<UnixListenerStream> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("remove {}", path.display()));
        }
        _ => {}
    }
    let listener = UnixListener::bind(path).with_context(|| format!("bind {}", path.display()))?;
    Ok(UnixListenerStream::new(listener))
}

fn remove_sockets(directory: &Path) -> Result<()> {
    let context = || format!("clean {}", directory.display());
    for entry in fs::read_dir(directory).with_context(context)? {
        let entry = entry.with_context(context)?;
        if entry.file_type().is_ok_and(|kind| kind.is_socket()) {
            match fs::remove_file(entry.path()) {
                // A plugin removes its own socket when its stream has ended.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                removed => removed.with_context(context)?,
            }
        }
    }
    Ok(())
}

fn pod_path(directory: &Path, pod: &Pod) -> PathBuf {
    directory.join(format!(
        "{}_{}.json",
        pod.metadata.namespace, pod.metadata.name
    ))
}

fn write_pod(directory: &Path, pod: &Pod) -> Result<()> {
    let path = pod_path(directory, pod);
    fs::write(&path, serde_json::to_vec(pod)?).with_context(|| format!("write {}", path.display()))
}

fn read_pods(directory: &Path) -> Result<BTreeMap<String, Pod>> {
    let mut pods = BTreeMap::new();
    for entry in fs::read_dir(directory).with_context(|| format!("read {}", directory.display()))? {
        let path = entry
            .with_context(|| format!("read {}", directory.display()))?
            .path();
        let text = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        let pod: Pod =
            serde_json::from_slice(&text).with_context(|| format!("read {}", path.display()))?;
        pods.insert(pod.full_name(), pod);
    }
    Ok(pods)
}
