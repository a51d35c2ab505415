//! Binds slots for the CNI plugin and for the kubelet: reads, decides ([`pools::binding::plan`]), acts.
//!
//! ```text
//!   free ── bind ──▶ bound ── commit: the journal has the move ──▶ attached ◀── commit ──┐
//!    ▲                │  └─ start, where bindAtStart allows it ──▶ started   └ unbind ▶ detached
//!    │                └─ unbind                                     │                     │
//!    └────────────────── over by evidence: binding_state ◀──────────┴─────────────────────┘
//! ```
//!
//! Kubelet and GPUs are asked first. Then a transaction on a thread of its own, one at a time, reads the
//! journal and cgroups, decides and acts. A killed daemon leaves some of a pod's bindings; the same
//! question again keeps them and adds the rest.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::commit::{Commit, commit};
use super::contexts::Holders;
use super::evidence;
use super::slot_files::remove_file;
use super::store::Store;
use crate::events::{Trigger, Triggers};
use crate::node_paths::NodePaths;
use crate::node_socket::pods::Pods;
use crate::reader::{Reader, Readers};
use crate::report::Report;
use hca::Host;
use hca::topology::Machine;
use node_wire::{
    BIND_TIMEOUT, BindQuestion, Bound, BoundSlot, CommitQuestion, Committed, Failure, FailureKind,
    Pod, PodUnits, UnbindQuestion, Unbound,
};
use pools::binding::plan::{BindPlan, NotBound, belongs, bind_plan, kept, late_pool, requests};
use pools::binding::record::{Binding, Bindings, ServedGpu, Stage};
use pools::binding::state::{Asker, Evidence, State, binding_state};
use pools::checkpoint;
use pools::config::TopologyConfig;
use pools::deliver::slot::file_name;
use pools::gpus::{self, Gpus, PodGpus};
use pools::holdings::Holdings;
use pools::nccl;
use pools::rails::by_policy;
use tokio::sync::watch;
use tokio::time::{sleep, timeout_at};

/// How long an answer waits for the GPUs, whose drivers are asked.
const GPUS_TIMEOUT: Duration = Duration::from_secs(1);
/// How long it waits for the work on files.
const FILES_TIMEOUT: Duration = Duration::from_secs(2);
/// How long it waits for the kubelet to say which pods are over.
const KUBELET_TIMEOUT: Duration = Duration::from_secs(1);
/// How long it waits for a scan to find an HCA as it must be.
const SCAN_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the start of a container waits for the end of processes: the kubelet gives it 30 s.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// How often it looks whether they have.
const PROCESSES_INTERVAL: Duration = Duration::from_millis(100);

/// Answers questions about bindings.
#[derive(Debug)]
pub(crate) struct Binder {
    pub(super) paths: Arc<NodePaths>,
    pub(crate) pods: Arc<Pods>,
    pub(super) reports: watch::Receiver<Arc<Report>>,
    triggers: Triggers,
    pub(super) store: Arc<Store>,
    /// Sandboxes that were unbound in the last [`BIND_TIMEOUT`].
    unbound: Arc<Mutex<Vec<(Instant, String)>>>,
    /// Which pods have or had HCAs for themselves.
    pub(crate) holders: Arc<Holders>,
    /// Held while the GPUs are read: one read serves all who wait for it.
    reading: tokio::sync::Mutex<()>,
    /// The transactions.
    files: Reader,
    gpus: Reader<Result<Arc<Gpus>, String>>,
}

pub(super) fn unavailable(why: impl std::fmt::Display) -> Failure {
    Failure::new(FailureKind::BindingsUnavailable, why.to_string())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Binder {
    pub(crate) fn new(
        readers: &Readers,
        paths: Arc<NodePaths>,
        pods: Arc<Pods>,
        reports: watch::Receiver<Arc<Report>>,
        triggers: Triggers,
        store: Arc<Store>,
    ) -> Self {
        Self {
            paths,
            pods,
            reports,
            triggers,
            store,
            unbound: Arc::default(),
            holders: Arc::default(),
            reading: tokio::sync::Mutex::default(),
            files: readers.reader("binder", "the work on bindings", FILES_TIMEOUT),
            gpus: readers.reader("gpus", "the read of the GPUs", GPUS_TIMEOUT),
        }
    }

    pub(super) fn report(&self) -> Arc<Report> {
        self.reports.borrow().clone()
    }

    /// The bindings as they are.
    pub(crate) fn bindings(&self) -> Arc<Bindings> {
        let known = self.store.subscribe();
        let known = known.borrow();
        known.clone().unwrap_or_default()
    }

    /// Runs what waits for a disk, one at a time.
    pub(super) async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Failure> {
        self.files.run(work).await.map_err(unavailable)
    }

    /// Reads the evidence on the thread of a transaction.
    pub(super) fn evidence(
        &self,
        held: Option<Arc<Holdings>>,
        asker: Option<Asker>,
    ) -> impl FnOnce() -> Result<Evidence, Failure> + Send + 'static {
        let (paths, store) = (self.paths.clone(), self.store.clone());
        move || {
            let bindings = store.load().map_err(unavailable)?;
            evidence::read(&paths, bindings, held, asker).map_err(unavailable)
        }
    }

    /// Binds all slots of a pod to a sandbox. The same question again has the same answer.
    ///
    /// # Errors
    /// The unit is not the pod's, or there are no HCAs as they must be; nothing is bound then that
    /// was not before.
    pub(crate) async fn bind(&self, question: BindQuestion) -> Result<Bound, Failure> {
        let asked = Instant::now();
        let BindQuestion { pod, sandbox, unit } = question;
        let units = self.pods.units(&pod).await?;
        let needed = [unit];
        let bound = self.bind_pod(&pod, Some(sandbox), &needed, &units, asked);
        let bound = bound.await;
        let refused = bound.as_ref().err().map(|refused| &refused.failure);
        let refused = refused.filter(|failure| failure.kind == FailureKind::CannotBind);
        let why = refused.map(|failure| failure.message.clone());
        let name = format!("{}/{}", pod.namespace, pod.name);
        if why.is_some() || self.bindings().refused.contains_key(&name) {
            let store = self.store.clone();
            self.blocking(move || store.note_refused(pod, why)).await?;
        }
        bound.map_err(|refused| {
            // What was refused may be mended by now: the runtime tries again soon.
            self.triggers.send(Trigger::World);
            refused.failure
        })
    }

    async fn bind_pod(
        &self,
        pod: &Pod,
        sandbox: Option<String>,
        needed: &[String],
        units: &PodUnits,
        asked: Instant,
    ) -> Result<Bound, NotBound> {
        let report = self.report();
        let snapshots = report.snapshots();
        for unit in needed {
            belongs(pod, unit, units, &snapshots)?;
        }
        let pools = requests(units, &snapshots);
        let slots = pools.iter().flat_map(|pool| pool.slots().cloned());
        let asker = Asker {
            pod: pod.clone(),
            sandbox,
            slots: slots.collect(),
        };
        let evidence = self.blocking(self.evidence(None, Some(asker.clone())));
        let evidence = evidence.await??;
        let mut slots = asker.slots.iter();
        // What is bound asks neither the kubelet nor a GPU driver again.
        let (placed, held) = match slots.all(|slot| kept(&evidence, &asker, slot).is_some()) {
            true => (None, None),
            false => (
                Some(self.placed(pod, units, &report).await?),
                // Units of a time before the pool had slots name HCAs.
                self.listed(&evidence).await.or(report.allocated.clone()),
            ),
        };
        let (read, reports) = (
            self.evidence(held, Some(asker.clone())),
            self.reports.clone(),
        );
        let (store, paths) = (self.store.clone(), self.paths.clone());
        let (unbound, all_units) = (self.unbound.clone(), units.clone());
        let transaction = move || -> Result<(Vec<Binding>, Vec<String>), NotBound> {
            is_awaited(&lock(&unbound), asker.sandbox.as_deref(), asked)?;
            // An HCA may have left the pool meanwhile.
            let pools = requests(&all_units, &reports.borrow().snapshots());
            let plan = bind_plan(&asker, &pools, placed.as_ref(), &read()?)?;
            apply(&store, &paths, &plan)?;
            Ok(([plan.keep, plan.adopt, plan.create].concat(), plan.warnings))
        };
        let (mut slots, mut warnings) = self.blocking(transaction).await??;
        if let (Some(_), false, Some(note)) = (&pod.uid, units.uid_checked, &units.uid_note) {
            let first = format!(
                "the units of pod {pod} are those of a pod of this name; its UID was not checked: \
                 {note}"
            );
            warnings.insert(0, first);
        }
        slots.sort_by(|a, b| (a.rail, &a.hca).cmp(&(b.rail, &b.hca)));
        Ok(Bound {
            slots: slots.iter().map(answer_of).collect(),
            warnings,
        })
    }

    /// What the kubelet lists now, where it matters: another pod has a binding that the journal lacks.
    async fn listed(&self, evidence: &Evidence) -> Option<Arc<Holdings>> {
        let mut others = evidence.bindings.all.values();
        let is_own = |one: &Binding| {
            evidence
                .asker
                .as_ref()
                .is_some_and(|own| one.is_of(&own.pod))
        };
        others.find(|one| !is_own(one) && !evidence.attached.has(one))?;
        self.pods.holdings_of_now(KUBELET_TIMEOUT).await.ok()
    }

    /// The GPUs of a pod; they are read again if one is not found among the known ones.
    async fn gpus_of(
        &self,
        pod: &Pod,
        units: &PodUnits,
        report: &Report,
    ) -> Result<(PodGpus, Arc<Gpus>), Failure> {
        let more: Vec<String> = report
            .topology
            .gpu_resources
            .iter()
            .map(|resource| resource.as_str().to_owned())
            .collect();
        let resolve = |gpus: Arc<Gpus>| {
            let (units, more) = (units.clone(), more.clone());
            let directory = self.paths.device_plugin_dir.clone();
            self.blocking(move || {
                let nodes = |resource: &str, id: &str| {
                    let has = |ids: &BTreeSet<&String>| ids.contains(&id.to_owned());
                    let kept = checkpoint::allocated_nodes(&directory, resource, has);
                    kept.unwrap_or_default().into_iter().flatten().collect()
                };
                gpus::of_pod(&units, &gpus, &more, &nodes)
            })
        };
        if let Some(Ok(known)) = self.gpus.last().map(|last| last.value) {
            let found = resolve(known.clone()).await?;
            if found.unknown.is_empty() {
                return Ok((found, known));
            }
        }
        let host = self.paths.host.clone();
        let read = move || read_gpus(&host);
        let cannot = |why: String| {
            Failure::new(
                FailureKind::CannotBind,
                format!("read the GPUs of this node for pod {pod}: {why}"),
            )
        };
        let asked = Instant::now();
        let _reading = self.reading.lock().await;
        let gpus = match self.gpus.last().filter(|last| last.at >= asked) {
            Some(last) => last.value,
            None => {
                let read = self.gpus.read(read).await;
                read.map_err(|late| cannot(late.to_string()))?
            }
        };
        let gpus = gpus.map_err(cannot)?;
        Ok((resolve(gpus.clone()).await?, gpus))
    }

    /// The GPUs that were read last; they are read for the next round if there are none. None without a pool
    /// that needs them.
    pub(super) fn known_gpus(&self) -> Option<Arc<Gpus>> {
        let snapshots = self.report().snapshots();
        snapshots.iter().find(|one| one.late().is_some())?;
        let known = self.gpus.last().and_then(|last| last.value.ok());
        if known.is_none() {
            let host = self.paths.host.clone();
            self.gpus.start(move || read_gpus(&host));
        }
        known
    }

    /// The GPUs of a pod, and the machine with all GPUs where the administrator says they are.
    async fn placed(
        &self,
        pod: &Pod,
        units: &PodUnits,
        report: &Report,
    ) -> Result<(PodGpus, Machine), Failure> {
        let (of_pod, gpus) = self.gpus_of(pod, units, report).await?;
        let snapshots = report.snapshots();
        let late = snapshots.iter().find(|one| one.late().is_some());
        let read = late.map(|snapshot| snapshot.machine().clone());
        let machine = gpus.in_machine(&read.unwrap_or_default());
        let (paths, topology) = (self.paths.clone(), report.topology.clone());
        let placed = self.blocking(move || placed(machine, &topology, &paths));
        let placed = placed.await?;
        let machine = placed.map_err(|why| Failure::new(FailureKind::CannotBind, why))?;
        Ok((of_pod, machine))
    }

    /// Frees slots of a sandbox that the CNI plugin's journal does not have any more. Of those that were
    /// attached containers may have the device nodes: they stay the pod's until it is over.
    ///
    /// # Errors
    /// Journal or bindings cannot be read.
    pub(crate) async fn unbind(&self, question: UnbindQuestion) -> Result<Unbound, Failure> {
        let UnbindQuestion { sandbox, units } = question;
        let (read, unbound) = (self.evidence(None, None), self.unbound.clone());
        let (store, paths) = (self.store.clone(), self.paths.clone());
        let transaction = move || {
            let mut unbound = lock(&unbound);
            unbound.retain(|(at, _)| at.elapsed() < BIND_TIMEOUT);
            unbound.push((Instant::now(), sandbox.clone()));
            drop(unbound);
            let evidence = read()?;
            let mut hcas = Vec::new();
            for one in evidence.bindings.all.values().filter(|one| {
                one.sandbox.as_deref() == Some(sandbox.as_str())
                    && (units.is_empty() || units.contains(&one.unit))
                    && !evidence.attached.has(one)
            }) {
                let is_over = matches!(binding_state(one, &evidence), State::Over(_));
                match one.stage {
                    Stage::Attached if !is_over => detach(&store, &paths, one)?,
                    Stage::Bound | Stage::Attached => {
                        free(&store, &paths, one, "its sandbox is over")?;
                        hcas.push(one.hca.to_string());
                    }
                    // A later call for the sandbox that fails does not take these away.
                    Stage::Detached | Stage::Started => {}
                }
            }
            Ok(Unbound { hcas })
        };
        self.blocking(transaction).await?
    }

    /// Writes what containers get for slots whose devices are in place.
    ///
    /// # Errors
    /// A slot is not bound to this sandbox, or its HCA cannot be given.
    pub(crate) async fn commit(&self, question: CommitQuestion) -> Result<Committed, Failure> {
        let CommitQuestion {
            pod,
            sandbox,
            units,
            gid_indexes,
        } = question;
        self.write(Commit {
            pod,
            units,
            attached: Some((sandbox, gid_indexes)),
        })
        .await
    }

    /// The gate before a container starts: its slots are bound to its pod, and their files say what
    /// is true now. A pod without network attachment is bound here, where its pool allows it.
    ///
    /// # Errors
    /// Why the container must not start.
    pub(crate) async fn start(&self, resource: &str, ids: &[String]) -> Result<(), Failure> {
        let started = Instant::now();
        let pod = self.pods.holder(resource, ids).await?;
        let store = self.store.clone();
        let bindings = self.blocking(move || store.load()).await?;
        let bindings = bindings.map_err(unavailable)?;
        let late = late_pool(resource, &self.report().snapshots());
        let may_bind = late.is_some_and(|(_, late)| late.bind_at_start);
        let is_unbound = |id: &&String| match bindings.newest(&pod, id).map(|one| one.stage) {
            // Other slots of the pod have attachments, this one has none.
            Some(Stage::Bound | Stage::Detached) => !may_bind,
            Some(Stage::Attached | Stage::Started) => false,
            None => true,
        };
        let unbound: Vec<String> = ids.iter().filter(is_unbound).cloned().collect();
        if !unbound.is_empty() && !may_bind {
            return Err(Failure::new(
                FailureKind::NotBound,
                format!(
                    "{} of {resource} is bound to no HCA, so pod {pod} has no network attachment for \
                     it: name a network with this resource in k8s.v1.cni.cncf.io/networks, or set \
                     bindAtStart for this pool",
                    unbound.join(", ")
                ),
            ));
        }
        while !unbound.is_empty() {
            let units = self.pods.units(&pod).await?;
            let bound = self.bind_pod(&pod, None, &unbound, &units, Instant::now());
            match bound.await {
                Ok(bound) => {
                    for warning in bound.warnings {
                        tracing::warn!(%pod, warning, "a pod is bound at the start of a container");
                    }
                    break;
                }
                Err(refused) if refused.is_ending && started.elapsed() < START_TIMEOUT => {
                    sleep(PROCESSES_INTERVAL).await;
                }
                Err(refused) => return Err(refused.failure),
            }
        }
        self.write(Commit {
            pod,
            units: ids.to_vec(),
            attached: None,
        })
        .await
        .map(drop)
    }

    /// Commits. What the last scan does not explain, the next one may: an RDMA device with another name,
    /// a node that udev has not made yet.
    async fn write(&self, question: Commit) -> Result<Committed, Failure> {
        let deadline = tokio::time::Instant::now() + SCAN_TIMEOUT;
        let mut reports = self.reports.clone();
        let mut is_first = true;
        loop {
            let report = reports.borrow_and_update().clone();
            let (store, paths) = (self.store.clone(), self.paths.clone());
            let question = question.clone();
            let written = self.blocking(move || commit(&question, &store, &paths, &report));
            match written.await? {
                Err(refused) if refused.kind == FailureKind::CannotBind => {
                    if std::mem::take(&mut is_first) {
                        self.triggers.send(Trigger::Container);
                    }
                    match timeout_at(deadline, reports.changed()).await {
                        Ok(Ok(())) => {}
                        _ => return Err(refused),
                    }
                }
                written => return written,
            }
        }
    }
}

fn read_gpus(host: &Host) -> Result<Arc<Gpus>, String> {
    match gpus::read(host) {
        Ok(gpus) => Ok(Arc::new(gpus)),
        Err(error) => Err(error.to_string()),
    }
}

/// Whether the ADD that asked still waits: a binding for one that is over would keep HCAs from other
/// pods.
fn is_awaited(
    unbound: &[(Instant, String)],
    sandbox: Option<&str>,
    asked: Instant,
) -> Result<(), Failure> {
    let is_over = |(at, of): &(Instant, String)| *at >= asked && Some(of.as_str()) == sandbox;
    match sandbox.is_some() && (asked.elapsed() >= BIND_TIMEOUT || unbound.iter().any(is_over)) {
        true => Err(unavailable("the ADD that asked for the binding is over")),
        false => Ok(()),
    }
}

/// Does what is planned. What fails leaves nothing that was created.
fn apply(store: &Store, paths: &NodePaths, plan: &BindPlan) -> Result<(), Failure> {
    for one in &plan.free {
        free(store, paths, one, "its pod is over, or has a new sandbox")?;
    }
    for one in &plan.adopt {
        // The file's name has the sandbox in it, and no two files name one device: the commit, or the
        // next start of a container, writes the new one.
        let before = Binding {
            sandbox: None,
            ..one.clone()
        };
        remove_file(&paths.cdi_dir, &before).map_err(unavailable)?;
        store.put(one, Some(&before)).map_err(unavailable)?;
    }
    for (done, one) in plan.create.iter().enumerate() {
        if let Err(why) = store.put(one, None) {
            for made in plan.create.iter().take(done) {
                store.remove(&made.hca).map_err(unavailable)?;
            }
            return Err(unavailable(why));
        }
    }
    for one in &plan.create {
        tracing::info!(
            pod = %one.pod, unit = one.unit, hca = %one.hca, rail = one.rail,
            gpus = served(&one.gpus), "slot bound"
        );
    }
    Ok(())
}

/// Frees an HCA: its CDI file first, so that none names an HCA that is free.
pub(super) fn free(
    store: &Store,
    paths: &NodePaths,
    one: &Binding,
    why: &str,
) -> Result<(), Failure> {
    remove_file(&paths.cdi_dir, one).map_err(unavailable)?;
    store.remove(&one.hca).map_err(unavailable)?;
    tracing::info!(pod = %one.pod, unit = one.unit, hca = %one.hca, why, "slot unbound");
    Ok(())
}

/// Takes note that the devices of a binding are back on the host.
fn detach(store: &Store, paths: &NodePaths, one: &Binding) -> Result<(), Failure> {
    remove_file(&paths.cdi_dir, one).map_err(unavailable)?;
    let (pod, hca) = (&one.pod, &one.hca);
    tracing::info!(%pod, unit = one.unit, %hca, "slot detached, and its HCA stays the pod's");
    let detached = Binding {
        stage: Stage::Detached,
        gid_index: None,
        ..one.clone()
    };
    store.put(&detached, Some(one)).map_err(unavailable)
}

/// Puts GPUs and NICs where the administrator says, and NICs on the rails of the node's policy.
pub(super) fn placed(
    mut machine: Machine,
    topology: &TopologyConfig,
    paths: &NodePaths,
) -> Result<Machine, String> {
    if let Some(file) = &topology.nccl_topology {
        let places = nccl::read(file).map_err(|error| format!("{error:#}"))?;
        machine.place(&places);
    }
    by_policy(&mut machine, &paths.node.policy)?;
    Ok(machine)
}

fn answer_of(binding: &Binding) -> BoundSlot {
    BoundSlot {
        unit: binding.unit.clone(),
        resource: binding.resource.clone(),
        container: binding.container.clone(),
        hca: binding.hca.to_string(),
        rail: binding.rail,
        cdi_file: file_name(binding),
    }
}

/// GPUs with their classes, for people: `0000:8f:00.0 PIX, 0000:90:00.0 PXB`.
fn served(gpus: &[ServedGpu]) -> String {
    let gpus = gpus.iter().map(|one| format!("{} {}", one.gpu, one.class));
    gpus.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
pub(crate) mod tests;
