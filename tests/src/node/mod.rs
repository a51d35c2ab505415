//! A node: the kubelet's stand-in together with a container runtime, so that
//! a Pod manifest becomes running containers the way a kubelet makes them so.
//!
//! Admission and Allocate, sandbox (the runtime calls CNI), then containers
//! with exactly the devices, environment and mounts of the Allocate answers.
//! Nothing is kept here about running pods: the runtime is asked, so a node
//! that was killed finds its pods again.
//!
//! - [`Node`]: run, read, enter and delete pods;
//! - `cri`: the runtime's gRPC side;
//! - `container_config`: from pod to the runtime's messages, pure; `volume`: the pod's volumes;
//! - [`control`]: the socket by which the demo and scenarios drive a node.

mod container_config;
pub mod control;
mod cri;
mod volume;

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::kubelet::{Container, Kubelet, Node as Resources, Pod, Settings};
use container_config::{Instance, Surroundings, cgroup, container_config, sandbox_config};
use cri::{Runtime, api};

/// How long a container is watched after its start for an early end.
const SETTLE_INTERVAL: Duration = Duration::from_millis(500);
/// How long a container may take to become ready.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// How long an init container may take.
const INIT_TIMEOUT: Duration = Duration::from_secs(120);
/// Between two attempts at a sandbox; a kubelet's back-off begins with a second.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// How long a stopped sandbox may resist its removal.
const COLLECT_TIMEOUT: Duration = Duration::from_secs(20);
/// Between asking a container to end and killing it, unless the pod says otherwise. A kubelet
/// waits 30 s; `sleep infinity` as process 1 never listens, and a demo's spectator does wait.
const GRACE_SECONDS: i64 = 2;

/// A kubelet and its container runtime.
#[derive(Debug)]
pub struct Node {
    /// Nothing only while it is being restarted.
    kubelet: Mutex<Option<Kubelet>>,
    runtime: Runtime,
    logs: PathBuf,
    /// What belongs to pods: their ConfigMap volumes.
    pods: PathBuf,
}

/// A pod as `pods` lists it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PodView {
    /// `namespace/name`.
    pub name: String,
    /// The runtime's ID of its sandbox, if it has one.
    pub sandbox: Option<String>,
    /// Address on the default network.
    pub ip: String,
    /// State of each container: `running`, `exited (1)`, ...
    pub containers: BTreeMap<String, String>,
    /// Device IDs by container and resource.
    pub devices: BTreeMap<String, BTreeMap<String, Vec<String>>>,
}

/// What a command in a container printed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Output {
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// Exit status.
    pub exit_code: i32,
}

/// The address the node is known by: the first that is not its own alone.
fn address() -> IpAddr {
    let all = nix::ifaddrs::getifaddrs().into_iter().flatten();
    let v4 = all.filter_map(|one| Some(one.address?.as_sockaddr_in()?.ip()));
    let mut outward = v4.filter(|ip| !ip.is_loopback() && !ip.is_link_local());
    outward.next().unwrap_or(Ipv4Addr::LOCALHOST).into()
}

/// Waits until a container says that it has started. The kubelet kills one that does not within its
/// probe's time.
fn expect_started(container: &Container, at: IpAddr) -> Result<()> {
    let Some(probe) = &container.startup_probe else {
        return Ok(());
    };
    thread::sleep(Duration::from_secs(probe.initial_delay_seconds));
    let mut failures = 0;
    while let Err(error) = probe.ask(container, at) {
        failures += 1;
        if failures >= probe.failure_threshold {
            return Err(error.context(format!("{} does not start", container.name)));
        }
        thread::sleep(Duration::from_secs(probe.period_seconds));
    }
    Ok(())
}

/// Waits until a container says that it is ready, and asks whether it lives.
fn expect_ready(container: &Container, at: IpAddr) -> Result<()> {
    expect_started(container, at)?;
    let Some(probe) = &container.readiness_probe else {
        return Ok(());
    };
    let end = Instant::now() + READY_TIMEOUT;
    while let Err(error) = probe.ask(container, at) {
        if Instant::now() > end {
            return Err(error.context(format!("{} does not become ready", container.name)));
        }
        thread::sleep(Duration::from_millis(200));
    }
    let living = container.liveness_probe.as_ref();
    living
        .map_or(Ok(()), |probe| probe.ask(container, at))
        .with_context(|| format!("whether {} lives", container.name))
}

impl Node {
    /// Starts the kubelet and checks that the runtime answers.
    ///
    /// # Errors
    /// Either fails to.
    pub fn start(settings: Settings, runtime_socket: &Path) -> Result<Self> {
        let logs = settings.root.join("logs");
        let pods = settings.root.join("pods");
        let runtime = Runtime::connect(runtime_socket)?;
        let version = runtime.version()?;
        tracing::info!(
            runtime = version.runtime_name,
            version = version.runtime_version,
            "container runtime"
        );
        let kubelet = Mutex::new(Some(Kubelet::start(settings)?));
        Ok(Self {
            kubelet,
            runtime,
            logs,
            pods,
        })
    }

    /// The Node object's extended resources.
    ///
    /// # Errors
    /// The kubelet is not running.
    pub fn resources(&self) -> Result<Resources> {
        self.with_kubelet(|kubelet| Ok(kubelet.node()))
    }

    /// Kills the kubelet and starts it anew; pods run on.
    ///
    /// # Errors
    /// It does not start.
    pub fn restart_kubelet(&self) -> Result<()> {
        let mut kubelet = self.lock();
        let old = kubelet.take().context("the kubelet is not running")?;
        *kubelet = Some(old.restart()?);
        Ok(())
    }

    /// Admits a pod and runs it; its init containers have ended well, and its
    /// containers still run half a second after their start. A sandbox that the
    /// runtime fails to make is tried again for `retry`.
    ///
    /// # Errors
    /// It is not admitted, or the runtime fails; then nothing of it is left,
    /// except what a failing CNI DEL leaves.
    pub fn run_pod(&self, pod: &Pod, retry: Duration) -> Result<PodView> {
        let name = pod.full_name();
        self.check_images(pod)?;
        self.with_kubelet(|kubelet| Ok(kubelet.admit(pod.clone())?))?;
        let running = self
            .run_admitted(pod, retry)
            .with_context(|| format!("run pod {name}"));
        if running.is_err()
            && let Err(error) = self.delete_pod(&name)
        {
            tracing::warn!(pod = name, error = format!("{error:#}"), "not cleaned up");
        }
        running?;
        self.view(pod)
    }

    /// The pods of the node.
    ///
    /// # Errors
    /// The runtime fails.
    pub fn pods(&self) -> Result<Vec<PodView>> {
        let pods = self.with_kubelet(|kubelet| Ok(kubelet.pods()))?;
        pods.values().map(|pod| self.view(pod)).collect()
    }

    /// Runs a command in a container (the first, unless named) to its end.
    ///
    /// # Errors
    /// No such pod or container, the runtime fails, or `timeout` is over.
    pub fn exec(
        &self,
        pod: &str,
        container: Option<&str>,
        command: &[String],
        timeout: Duration,
    ) -> Result<Output> {
        let pod = self.pod(pod)?;
        let container = match container {
            Some(name) => name,
            None => pod
                .spec
                .containers
                .first()
                .map(|first| first.name.as_str())
                .unwrap_or_default(),
        };
        let running = self.container(&pod, container)?.with_context(|| {
            format!(
                "pod {} has no running container {container}",
                pod.full_name()
            )
        })?;
        let output = self.runtime.exec(&running.id, command, timeout)?;
        Ok(Output {
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            exit_code: output.exit_code,
        })
    }

    /// Stops a container and starts it again with the devices it was admitted with.
    ///
    /// # Errors
    /// No such pod or container, or the runtime fails.
    pub fn restart_container(&self, pod: &str, container: &str) -> Result<()> {
        let pod = self.pod(pod)?;
        let spec = pod
            .spec
            .containers
            .iter()
            .find(|spec| spec.name == container);
        let spec =
            spec.with_context(|| format!("pod {} has no container {container}", pod.full_name()))?;
        let sandbox = self.sandbox(&pod)?.context("its sandbox is gone")?;
        let attempt = match self.container(&pod, container)? {
            None => 0,
            Some(old) => {
                // It is removed with the pod, as a kubelet leaves it to its garbage collection.
                self.runtime.stop_container(&old.id, grace(&pod))?;
                old.metadata.map_or(0, |metadata| metadata.attempt) + 1
            }
        };
        let id = self.start_container(&pod, spec, &sandbox.id, attempt)?;
        self.expect_running(&pod, spec, &id, attempt)
    }

    /// Stops and removes a pod as a kubelet does: containers, sandbox (the
    /// runtime calls CNI DEL), then its devices are free.
    ///
    /// # Errors
    /// The runtime fails, as when a CNI DEL does; the pod is then still there
    /// with its devices, and can be deleted again.
    pub fn delete_pod(&self, pod: &str) -> Result<()> {
        let pod = self.pod(pod)?;
        for sandbox in self.sandboxes(&pod)? {
            for container in self.runtime.containers(&sandbox.id)? {
                self.runtime.stop_container(&container.id, grace(&pod))?;
            }
            self.runtime.stop_sandbox(&sandbox.id)?;
            self.collect(&sandbox.id)?;
        }
        // Its sandboxes' are gone.
        let cgroup = Path::new("/sys/fs/cgroup").join(cgroup(&pod.metadata.uid));
        let _ = fs::remove_dir(cgroup);
        self.with_kubelet(|kubelet| kubelet.remove(&pod.full_name()))
    }

    /// Frees the devices of a pod whose processes hang, as a kubelet does that restarts after a forced
    /// deletion. The runtime still has the pod.
    ///
    /// # Errors
    /// There is no such pod.
    pub fn forget_pod(&self, pod: &str) -> Result<()> {
        self.with_kubelet(|kubelet| kubelet.remove_by_force(pod))
    }

    /// Removes a stopped sandbox with its containers. The runtime may take one
    /// that was killed for running a moment longer; a kubelet's garbage
    /// collection comes back, too.
    fn collect(&self, sandbox: &str) -> Result<()> {
        let end = Instant::now() + COLLECT_TIMEOUT;
        loop {
            let containers = self.runtime.containers(sandbox)?;
            let removed = containers
                .iter()
                .try_for_each(|container| self.runtime.remove_container(&container.id))
                .and_then(|()| self.runtime.remove_sandbox(sandbox));
            if removed.is_ok() || Instant::now() > end {
                return removed;
            }
            thread::sleep(Duration::from_millis(200));
        }
    }

    /// A sandbox of the pod. As a kubelet does, the next attempt at one that failed has another
    /// number, and so another ID of the runtime.
    fn make_sandbox(&self, pod: &Pod, retry: Duration) -> Result<String> {
        let config = sandbox_config(pod, &self.logs)?;
        std::fs::create_dir_all(&config.log_directory)
            .with_context(|| format!("create {}", config.log_directory))?;
        let end = Instant::now() + retry;
        let mut attempt = 0;
        loop {
            let mut config = config.clone();
            if let Some(metadata) = &mut config.metadata {
                metadata.attempt = attempt;
            }
            let made = self.runtime.run_sandbox(config);
            if made.is_ok() || Instant::now() >= end {
                return made;
            }
            attempt += 1;
            thread::sleep(RETRY_INTERVAL);
        }
    }

    fn run_admitted(&self, pod: &Pod, retry: Duration) -> Result<()> {
        let sandbox = self.make_sandbox(pod, retry)?;
        for init in &pod.spec.init_containers {
            let id = self.start_container(pod, init, &sandbox, 0)?;
            if init.is_sidecar() {
                self.expect_running(pod, init, &id, 0)?;
            } else {
                self.expect_success(pod, init, &id)?;
            }
        }
        let mut started = Vec::new();
        for container in &pod.spec.containers {
            started.push((
                container,
                self.start_container(pod, container, &sandbox, 0)?,
            ));
        }
        started
            .iter()
            .try_for_each(|(container, id)| self.expect_running(pod, container, id, 0))?;
        let at = match pod.spec.host_network {
            true => address(),
            false => {
                let ip = self.runtime.sandbox_ip(&sandbox)?;
                ip.parse()
                    .with_context(|| format!("the pod's address {ip:?}"))?
            }
        };
        let containers = pod.spec.containers.iter();
        containers
            .into_iter()
            .try_for_each(|container| expect_ready(container, at))
    }

    fn start_container(
        &self,
        pod: &Pod,
        container: &Container,
        sandbox: &str,
        attempt: u32,
    ) -> Result<String> {
        let options =
            self.with_kubelet(|kubelet| kubelet.run_options(&pod.full_name(), &container.name))?;
        let instance = Instance {
            pod,
            container,
            attempt,
        };
        let config = container_config(&instance, &options, &self.around(pod)?)?;
        let sandbox_config = sandbox_config(pod, &self.logs)?;
        let log = Path::new(&sandbox_config.log_directory).join(&config.log_path);
        if let Some(directory) = log.parent() {
            std::fs::create_dir_all(directory)
                .with_context(|| format!("create {}", directory.display()))?;
        }
        let id = self
            .runtime
            .create_container(sandbox, config, sandbox_config)
            .with_context(|| format!("create container {}", container.name))?;
        self.runtime
            .start_container(&id)
            .with_context(|| format!("start container {}", container.name))?;
        Ok(id)
    }

    fn around(&self, pod: &Pod) -> Result<Surroundings> {
        let volumes = pod.spec.volumes.iter().map(|volume| {
            let place = volume::make(pod, volume, &self.pods);
            let place = place.with_context(|| format!("volume {}", volume.name))?;
            Ok((volume.name.clone(), place))
        });
        let node = nix::unistd::gethostname().context("ask for the host name")?;
        Ok(Surroundings {
            node: node.to_string_lossy().into_owned(),
            address: address(),
            volumes: volumes.collect::<Result<_>>()?,
        })
    }

    /// One that has ended well within [`SETTLE_INTERVAL`] is content too.
    fn expect_running(
        &self,
        pod: &Pod,
        container: &Container,
        id: &str,
        attempt: u32,
    ) -> Result<()> {
        let end = Instant::now() + SETTLE_INTERVAL;
        while Instant::now() < end {
            thread::sleep(Duration::from_millis(50));
            let status = self.runtime.container_status(id)?;
            if status.state() == api::ContainerState::ContainerExited && status.exit_code != 0 {
                bail!(
                    "container {} ended at once: {}; its last words: {}",
                    container.name,
                    state_words(&status),
                    self.last_words(pod, container, attempt)
                );
            }
        }
        Ok(())
    }

    fn expect_success(&self, pod: &Pod, container: &Container, id: &str) -> Result<()> {
        let end = Instant::now() + INIT_TIMEOUT;
        while Instant::now() < end {
            let status = self.runtime.container_status(id)?;
            if status.state() == api::ContainerState::ContainerExited {
                if status.exit_code == 0 {
                    return Ok(());
                }
                bail!(
                    "init container {}: {}; its last words: {}",
                    container.name,
                    state_words(&status),
                    self.last_words(pod, container, 0)
                );
            }
            thread::sleep(Duration::from_millis(50));
        }
        bail!(
            "init container {} has not ended in {INIT_TIMEOUT:?}",
            container.name
        )
    }

    fn last_words(&self, pod: &Pod, container: &Container, attempt: u32) -> String {
        let instance = Instance {
            pod,
            container,
            attempt,
        };
        let path = instance.log_directory(&self.logs).join(instance.log_path());
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let lines: Vec<_> = text.lines().rev().take(5).collect();
        // Each line is `time stream tag text`.
        let words = lines
            .iter()
            .rev()
            .filter_map(|line| line.splitn(4, ' ').nth(3));
        words.collect::<Vec<_>>().join(" | ")
    }

    fn check_images(&self, pod: &Pod) -> Result<()> {
        for container in pod.spec.init_containers.iter().chain(&pod.spec.containers) {
            if !self.runtime.has_image(&container.image)? {
                bail!(
                    "pod {}: the runtime has no image {}, and nothing is pulled here; import it \
                     (`ctr -n k8s.io image import FILE`)",
                    pod.full_name(),
                    container.image
                );
            }
        }
        Ok(())
    }

    fn view(&self, pod: &Pod) -> Result<PodView> {
        let assigned = self.with_kubelet(|kubelet| kubelet.assigned(&pod.full_name()))?;
        let mut devices: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
        for ((container, resource), ids) in assigned {
            devices.entry(container).or_default().insert(resource, ids);
        }
        let mut view = PodView {
            name: pod.full_name(),
            sandbox: None,
            ip: String::new(),
            containers: BTreeMap::new(),
            devices,
        };
        let Some(sandbox) = self.sandbox(pod)? else {
            return Ok(view);
        };
        let mut containers = self.runtime.containers(&sandbox.id)?;
        // Of one that was restarted the last counts.
        containers.sort_by_key(attempt);
        for container in containers {
            let status = self.runtime.container_status(&container.id)?;
            let name = container
                .metadata
                .map(|metadata| metadata.name)
                .unwrap_or_default();
            view.containers.insert(name, state_words(&status));
        }
        view.ip = self.runtime.sandbox_ip(&sandbox.id)?;
        view.sandbox = Some(sandbox.id);
        Ok(view)
    }

    fn container(&self, pod: &Pod, name: &str) -> Result<Option<api::Container>> {
        let Some(sandbox) = self.sandbox(pod)? else {
            return Ok(None);
        };
        let containers = self.runtime.containers(&sandbox.id)?.into_iter();
        let named = containers.filter(|container| {
            container
                .metadata
                .as_ref()
                .is_some_and(|metadata| metadata.name == name)
        });
        Ok(named.max_by_key(attempt))
    }

    fn sandbox(&self, pod: &Pod) -> Result<Option<api::PodSandbox>> {
        let ready = api::PodSandboxState::SandboxReady;
        Ok(self
            .sandboxes(pod)?
            .into_iter()
            .find(|sandbox| sandbox.state() == ready))
    }

    fn sandboxes(&self, pod: &Pod) -> Result<Vec<api::PodSandbox>> {
        let mut sandboxes = self.runtime.sandboxes()?;
        sandboxes.retain(|sandbox| {
            sandbox
                .metadata
                .as_ref()
                .is_some_and(|metadata| metadata.uid == pod.metadata.uid)
        });
        Ok(sandboxes)
    }

    fn pod(&self, name: &str) -> Result<Pod> {
        self.with_kubelet(|kubelet| kubelet.pod(name))
    }

    /// The lock is held while pods are admitted: admission is serial anyway.
    fn with_kubelet<T>(&self, ask: impl FnOnce(&Kubelet) -> Result<T>) -> Result<T> {
        ask(self.lock().as_ref().context("the kubelet is not running")?)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Kubelet>> {
        self.kubelet.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn attempt(container: &api::Container) -> u32 {
    container
        .metadata
        .as_ref()
        .map_or(0, |metadata| metadata.attempt)
}

fn grace(pod: &Pod) -> i64 {
    pod.spec
        .termination_grace_period_seconds
        .unwrap_or(GRACE_SECONDS)
}

fn state_words(status: &api::ContainerStatus) -> String {
    match status.state() {
        api::ContainerState::ContainerCreated => "created".to_owned(),
        api::ContainerState::ContainerRunning => "running".to_owned(),
        api::ContainerState::ContainerUnknown => "unknown".to_owned(),
        api::ContainerState::ContainerExited => {
            let why = [status.reason.as_str(), status.message.as_str()].join(" ");
            format!("exited ({}) {}", status.exit_code, why.trim())
                .trim_end()
                .to_owned()
        }
    }
}
