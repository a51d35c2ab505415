//! Binds slots for the CNI plugin and for the kubelet: reads, decides ([`super::decide`]), acts.
//!
//! ```text
//!   free ── bind ──▶ bound ── commit: the journal has the move ──▶ attached ◀── commit ──┐
//!    ▲                │  └─ start, where bindAtStart allows it ──▶ started   └ unbind ▶ detached
//!    │                └─ unbind                                     │                     │
//!    └────────────────── a new sandbox, or evidence that the pod is over ◀──────────────┘
//! ```
//!
//! Bindings change under a lock of the kernel, so two daemons of a rolling update do not cross. Only
//! files of bindings are read and written under it. Kubelet, GPUs and device nodes are read before.
//!
//! A killed daemon leaves some of a pod's bindings; the same question again keeps them and adds the
//! rest. A binding whose client has given up is freed like any other.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::evidence::{is_given_up, is_superseded};
use super::gpus::{self, Gpus, PodGpus};
use super::pod_slots::{Asked, belongs, binding, choose, placed, pools_of, slots_of};
use super::release::files_of_slots;
use super::slot_specification::file_name;
use super::store::{Binding, BindingDirectory, Bindings, ServedGpu, Stage};
use crate::events::{Trigger, Triggers};
use crate::kubelet::checkpoint;
use crate::kubelet::service::Requests;
use crate::node_paths::NodePaths;
use crate::node_socket::pods::Pods;
use crate::reader::{Reader, Readers};
use crate::report::Report;
use attachment::cdi_file::CdiDirectory;
use attachment::journal::Lock;
use hca::HcaId;
use hca::topology::Machine;
use node_wire::{
    BIND_TIMEOUT, BindQuestion, Bound, BoundSlot, Failure, FailureKind, Pod, PodUnits,
    UnbindQuestion, Unbound,
};
use tokio::sync::{Mutex, MutexGuard, watch};

/// How long an answer waits for the GPUs, whose drivers are asked.
const GPUS_TIMEOUT: Duration = Duration::from_secs(1);
/// How long it waits for each step on files.
const FILES_TIMEOUT: Duration = Duration::from_secs(2);
/// How long it waits for the kubelet to say which pods are over.
const KUBELET_TIMEOUT: Duration = Duration::from_millis(500);

/// Answers questions about bindings.
#[derive(Debug)]
pub(crate) struct Binder {
    pub(super) paths: Arc<NodePaths>,
    pods: Arc<Pods>,
    reports: watch::Receiver<Arc<Report>>,
    pub(super) requests: Requests,
    pub(super) triggers: Triggers,
    /// Held while bindings change.
    gate: Mutex<()>,
    /// Sandboxes that were unbound in the last [`BIND_TIMEOUT`].
    unbound: Mutex<Vec<(Instant, String)>>,
    /// Held while the GPUs are read: one read serves all who wait for it.
    reading: Mutex<()>,
    /// Bindings, the journal, CDI files and device nodes.
    files: Reader,
    gpus: Reader<Result<Arc<Gpus>, String>>,
}

pub(super) fn unavailable(why: impl std::fmt::Display) -> Failure {
    Failure::new(FailureKind::BindingsUnavailable, why.to_string())
}

impl Binder {
    pub(crate) fn new(
        readers: &Readers,
        paths: Arc<NodePaths>,
        pods: Arc<Pods>,
        reports: watch::Receiver<Arc<Report>>,
        requests: Requests,
        triggers: Triggers,
    ) -> Self {
        Self {
            paths,
            pods,
            reports,
            requests,
            triggers,
            gate: Mutex::default(),
            unbound: Mutex::default(),
            reading: Mutex::default(),
            files: readers.reader("binder", "the work on bindings", FILES_TIMEOUT),
            gpus: readers.reader("gpus", "the read of the GPUs", GPUS_TIMEOUT),
        }
    }

    pub(super) fn report(&self) -> Arc<Report> {
        self.reports.borrow().clone()
    }

    /// Waits until this question alone is served on this node: no binding changes between its reading
    /// and its writing.
    ///
    /// # Errors
    /// Another daemon serves one for too long.
    pub(super) async fn turn(&self) -> Result<(Lock, MutexGuard<'_, ()>), Failure> {
        let gate = self.gate.lock().await;
        let store = self.paths.store();
        let lock = self.blocking(move || store.lock()).await?;
        Ok((lock.map_err(unavailable)?, gate))
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
        let needed = std::slice::from_ref(&unit);
        let bound = self
            .bind_pod(&pod, Some(sandbox), needed, &units, asked)
            .await;
        if bound.is_err() {
            // What was refused may be mended by now: the runtime tries again soon.
            self.triggers.send(Trigger::Binding);
        }
        bound
    }

    async fn bind_pod(
        &self,
        pod: &Pod,
        sandbox: Option<String>,
        needed: &[String],
        units: &PodUnits,
        asked: Instant,
    ) -> Result<Bound, Failure> {
        let (report, slots) = self.slots(pod, needed, units)?;
        let is_whole = |slots: &[Asked], bindings: &Bindings| {
            slots.iter().flat_map(slots_of).all(|slot| {
                bindings.all.values().any(|one| {
                    one.is_of(pod)
                        && one.unit == slot
                        && (sandbox.is_none() || one.sandbox == sandbox)
                })
            })
        };
        // What is bound asks no GPU driver again.
        let known = self.bindings().await.unwrap_or_default();
        let (placed, ended) = match is_whole(&slots, &known) {
            true => {
                let changed = unavailable("the pod's bindings changed meanwhile");
                (Err(changed), Vec::new())
            }
            false => (
                self.placed(pod, units, &report).await,
                self.ended(&known).await,
            ),
        };
        let _turn = self.turn().await?;
        self.is_awaited(sandbox.as_deref(), asked).await?;
        // An HCA may have left the pool meanwhile.
        let (report, slots) = self.slots(pod, needed, units)?;
        let (paths, owner, of_sandbox) = (self.paths.clone(), pod.clone(), sandbox.clone());
        let wanted: BTreeSet<String> = slots.iter().flat_map(slots_of).collect();
        let held_elsewhere = report.allocated.as_ref().map(|held| held.hcas());
        let read = move || kept_and_taken(&paths, &owner, of_sandbox.as_deref(), &wanted, &ended);
        let (bindings, mut taken) = self.blocking(read).await??;
        // Units of a time before this pool had slots name HCAs.
        taken.extend(held_elsewhere.unwrap_or_default().into_keys());
        let kept = |slot: &str| {
            let all = bindings.all.values();
            // At the start of a container the pod's sandbox is not known, and whatever the pod has
            // stays its own.
            let of_sandbox = |one: &&Binding| sandbox.is_none() || one.sandbox == sandbox;
            all.filter(|one| one.is_of(pod) && one.unit == slot)
                .filter(of_sandbox)
                .max_by_key(|one| one.created)
        };
        let mut warnings = Vec::new();
        if let (Some(_), false, Some(note)) = (&pod.uid, units.uid_checked, &units.uid_note) {
            warnings.push(format!(
                "the units of pod {pod} are those of a pod of this name; its UID was not checked: \
                 {note}"
            ));
        }
        let mut fresh = Vec::new();
        if !is_whole(&slots, &bindings) {
            let (of_pod, machine) = placed?;
            warnings.extend(of_pod.warnings.iter().cloned());
            for asked in &slots {
                let made = choose(
                    asked,
                    &machine,
                    &of_pod,
                    &bindings,
                    &taken,
                    kept,
                    &mut warnings,
                )?;
                fresh.extend(
                    made.into_iter()
                        .filter(|one| kept(&one.slot).is_none())
                        .map(|one| {
                            binding(&one, asked, pod, sandbox.as_deref(), &machine, &bindings)
                        }),
                );
            }
        }
        let store = self.paths.store();
        let created = fresh.clone();
        self.blocking(move || create_all(&store, &created))
            .await??;
        if !fresh.is_empty() {
            for one in &fresh {
                tracing::info!(
                    pod = %one.pod, unit = one.unit, hca = one.hca, rail = one.rail,
                    gpus = served(&one.gpus), "slot bound"
                );
            }
            self.triggers.send(Trigger::Binding);
        }
        let all = slots.iter().flat_map(slots_of).filter_map(|slot| {
            let made = fresh.iter().find(|one| one.unit == slot);
            made.or_else(|| kept(&slot)).cloned()
        });
        let mut all: Vec<Binding> = all.collect();
        all.sort_by(|a, b| (a.rail, &a.hca).cmp(&(b.rail, &b.hca)));
        Ok(Bound {
            slots: all.iter().map(answer_of).collect(),
            warnings,
        })
    }

    /// What a pod has of pools with late binding, as they are now.
    fn slots(
        &self,
        pod: &Pod,
        needed: &[String],
        units: &PodUnits,
    ) -> Result<(Arc<Report>, Vec<Asked>), Failure> {
        let report = self.report();
        for unit in needed {
            belongs(pod, unit, units, &report)?;
        }
        let slots = pools_of(units, &report);
        Ok((report, slots))
    }

    /// Bindings whose devices are back on the host and whose pods are over, as the kubelet says now.
    async fn ended(&self, known: &Bindings) -> Vec<Binding> {
        let paths = self.paths.clone();
        let files = self.blocking(move || files_of_slots(&paths)).await;
        let files = files.ok().and_then(Result::ok).flatten();
        let names = files.map(|(_, names)| names).unwrap_or_default();
        let detached = known.all.values().filter(|one| match one.stage {
            Stage::Detached => true,
            // DEL removes the file, also where no daemon hears of it.
            Stage::Attached => !names.contains(&file_name(one)),
            Stage::Bound | Stage::Started => false,
        });
        if detached.clone().next().is_none() {
            return Vec::new();
        }
        // The checkpoint is read where the kubelet takes too long.
        let listed = self.pods.allocated(KUBELET_TIMEOUT);
        let listed = tokio::time::timeout(2 * KUBELET_TIMEOUT, listed).await;
        let Ok(Ok(listed)) = listed else {
            return Vec::new();
        };
        let ended = detached.filter(|one| is_given_up(one, &listed));
        ended.cloned().collect()
    }

    /// Whether the ADD that asked still waits: a binding for one that is over would keep HCAs from
    /// other pods.
    async fn is_awaited(&self, sandbox: Option<&str>, asked: Instant) -> Result<(), Failure> {
        let unbound = self.unbound.lock().await;
        let over = |(at, of): &(Instant, String)| *at >= asked && Some(of.as_str()) == sandbox;
        match sandbox.is_some() && (asked.elapsed() >= BIND_TIMEOUT || unbound.iter().any(over)) {
            true => Err(unavailable("the ADD that asked for the binding is over")),
            false => Ok(()),
        }
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
        let read = move || match gpus::read(&host) {
            Ok(gpus) => Ok(Arc::new(gpus)),
            Err(error) => Err(error.to_string()),
        };
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

    /// The GPUs of a pod, and the machine with all GPUs where the administrator says they are.
    async fn placed(
        &self,
        pod: &Pod,
        units: &PodUnits,
        report: &Report,
    ) -> Result<(PodGpus, Machine), Failure> {
        let (of_pod, gpus) = self.gpus_of(pod, units, report).await?;
        let snapshots = report
            .pools
            .iter()
            .filter_map(|pool| pool.snapshot.as_ref());
        let late = snapshots.clone().find(|one| one.late().is_some());
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
        let _turn = self.turn().await?;
        let mut unbound = self.unbound.lock().await;
        unbound.retain(|(at, _)| at.elapsed() < BIND_TIMEOUT);
        unbound.push((Instant::now(), question.sandbox.clone()));
        drop(unbound);
        let paths = self.paths.clone();
        let freed = self.blocking(move || {
            let bindings = paths.store().read().map_err(unavailable)?;
            let attached = paths.attached().map_err(unavailable)?;
            let UnbindQuestion { sandbox, units } = question;
            let of_sandbox = bindings.all.values().filter(|one| {
                one.sandbox.as_deref() == Some(sandbox.as_str())
                    && (units.is_empty() || units.contains(&one.unit))
                    && !attached.has(one)
            });
            let mut freed = Vec::new();
            for one in of_sandbox {
                match one.stage {
                    Stage::Attached if !is_superseded(one, &bindings) => {
                        detach(&paths, one.clone()).map_err(unavailable)?;
                    }
                    Stage::Bound | Stage::Attached => {
                        free(&paths, one).map_err(unavailable)?;
                        tracing::info!(pod = %one.pod, unit = one.unit, hca = one.hca, "slot unbound");
                        freed.push(one.hca.clone());
                    }
                    // A later call for the sandbox that fails does not take these away.
                    Stage::Detached | Stage::Started => {}
                }
            }
            Ok(freed)
        });
        let hcas: Vec<String> = freed.await??;
        if !hcas.is_empty() {
            self.triggers.send(Trigger::Binding);
        }
        Ok(Unbound { hcas })
    }

    /// The bindings as they are on disk.
    pub(crate) async fn bindings(&self) -> Result<Bindings, Failure> {
        let store = self.paths.store();
        self.blocking(move || store.read())
            .await?
            .map_err(unavailable)
    }

    /// The gate before a container starts: its slots are bound to its pod, and their files say what
    /// is true now. A pod without network attachment is bound here, where its pool allows it.
    ///
    /// # Errors
    /// Why the container must not start.
    pub(crate) async fn start(&self, resource: &str, ids: &[String]) -> Result<(), Failure> {
        let pod = self.pods.holder(resource, ids).await?;
        let bindings = self.bindings().await?;
        let of_slot = |id: &String| {
            let of_pod = bindings.all.values();
            of_pod
                .filter(|one| one.unit == *id && one.is_of(&pod))
                .max_by_key(|one| one.created)
                .cloned()
        };
        let report = self.report();
        let may_bind = report.pools.iter().any(|pool| {
            let late = pool.snapshot.as_ref().and_then(|one| one.late());
            pool.resource.as_str() == resource && late.is_some_and(|late| late.bind_at_start)
        });
        let mut unbound = Vec::new();
        let mut bound: BTreeMap<(Option<String>, Stage), Vec<String>> = BTreeMap::new();
        for id in ids {
            let stage = match of_slot(id) {
                // Other slots of the pod have attachments, this one has none.
                Some(one) if matches!(one.stage, Stage::Bound | Stage::Detached) => {
                    may_bind.then_some((one.sandbox, Stage::Started))
                }
                Some(one) => Some((one.sandbox, one.stage)),
                None => None,
            };
            match stage {
                Some(stage) => bound.entry(stage).or_default().push(id.clone()),
                None => unbound.push(id.clone()),
            }
        }
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
        if !unbound.is_empty() {
            let units = self.pods.units(&pod).await?;
            let made = self
                .bind_pod(&pod, None, &unbound, &units, Instant::now())
                .await?;
            for warning in made.warnings {
                tracing::warn!(pod = %pod, warning, "a pod is bound at the start of a container");
            }
            bound
                .entry((None, Stage::Started))
                .or_default()
                .extend(unbound);
        }
        for ((sandbox, stage), units) in bound {
            self.write(&pod, sandbox, &units, stage, None).await?;
        }
        Ok(())
    }

    /// Frees bindings that are over, if they are still as they were when that was found out. Returns
    /// those that were freed.
    pub(crate) async fn free_all(&self, over: Vec<Binding>) -> Vec<Binding> {
        let Ok(_turn) = self.turn().await else {
            return Vec::new();
        };
        let paths = self.paths.clone();
        let freed = self.blocking(move || {
            let Ok(bindings) = paths.store().read() else {
                return Vec::new();
            };
            let unchanged = over
                .into_iter()
                .filter(|one| bindings.all.values().any(|known| known == one));
            unchanged
                .filter(|one| match free(&paths, one) {
                    Ok(()) => true,
                    Err(error) => {
                        tracing::warn!(hca = one.hca, %error, "cannot free a binding");
                        false
                    }
                })
                .collect()
        });
        let freed = freed.await.unwrap_or_default();
        if !freed.is_empty() {
            self.triggers.send(Trigger::Binding);
        }
        freed
    }

    /// Runs what waits for a disk or for hardware.
    pub(super) async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Failure> {
        self.files.run(work).await.map_err(unavailable)
    }

    /// Where things are.
    pub(crate) fn paths(&self) -> &Arc<NodePaths> {
        &self.paths
    }
}

/// The bindings as they are, after those of slots that are the pod's now and those that `ended` are
/// freed, and HCAs that are in use by the CNI plugin's journal.
fn kept_and_taken(
    paths: &NodePaths,
    pod: &Pod,
    sandbox: Option<&str>,
    slots: &BTreeSet<String>,
    ended: &[Binding],
) -> Result<(Bindings, BTreeSet<HcaId>), Failure> {
    let store = paths.store();
    let mut bindings = store.read().map_err(unavailable)?;
    let attached = paths.attached().map_err(unavailable)?;
    if let Some(sandbox) = sandbox {
        adopt(paths, pod, sandbox, slots, &mut bindings)?;
    }
    // By the kubelet's word the slots are the pod's, and a pod has one sandbox at a time. What the
    // journal has is still in the old one's namespace.
    let is_earlier = |one: &Binding| {
        slots.contains(&one.unit)
            && match one.is_of(pod) {
                true => sandbox.is_some() && one.sandbox.as_deref() != sandbox,
                false => matches!(one.stage, Stage::Attached | Stage::Detached),
            }
    };
    let earlier: Vec<(HcaId, Binding)> = bindings
        .all
        .iter()
        .filter(|(_, one)| (is_earlier(one) || ended.contains(one)) && !attached.has(one))
        .map(|(hca, one)| (hca.clone(), one.clone()))
        .collect();
    for (hca, one) in earlier {
        free(paths, &one).map_err(unavailable)?;
        tracing::info!(
            pod = %one.pod, unit = one.unit, hca = one.hca,
            "slot unbound: its pod is over, or has a new sandbox"
        );
        bindings.all.remove(&hca);
    }
    let others = attached
        .slots
        .into_iter()
        .filter(|(container, _)| Some(container.as_str()) != sandbox);
    let taken = others.filter_map(|(_, hca)| hca.parse().ok()).collect();
    Ok((bindings, taken))
}

/// Gives the sandbox of a pod what its containers started with before it was known: a network that is
/// attached to a running pod takes the HCA that the pod has.
fn adopt(
    paths: &NodePaths,
    pod: &Pod,
    sandbox: &str,
    slots: &BTreeSet<String>,
    bindings: &mut Bindings,
) -> Result<(), Failure> {
    let started = bindings.all.values_mut().filter(|one| {
        one.sandbox.is_none()
            && one.stage == Stage::Started
            && one.is_of(pod)
            && slots.contains(&one.unit)
    });
    for binding in started {
        // The file's name has the sandbox in it, and no two files name one device: the commit, or the
        // next start of a container, writes the new one.
        remove_file(paths, binding).map_err(unavailable)?;
        binding.sandbox = Some(sandbox.to_owned());
        let replaced = paths.store().replace(binding);
        replaced.map_err(|error| unavailable(format_args!("bind {}: {error}", binding.hca)))?;
    }
    Ok(())
}

/// Creates all bindings, or none: an HCA that another process bound meanwhile stops it.
fn create_all(store: &BindingDirectory, bindings: &[Binding]) -> Result<(), Failure> {
    for (done, one) in bindings.iter().enumerate() {
        let Err(error) = store.create(one) else {
            continue;
        };
        for made in bindings.iter().take(done) {
            store.remove(made).map_err(unavailable)?;
        }
        return Err(match error.kind() {
            std::io::ErrorKind::AlreadyExists => Failure::new(
                FailureKind::CannotBind,
                format!(
                    "{} was bound by another process in this moment; try again",
                    one.hca
                ),
            ),
            _ => unavailable(format_args!("bind {}: {error}", one.hca)),
        });
    }
    Ok(())
}

/// Frees an HCA: its CDI file first, so that none names an HCA that is free.
fn free(paths: &NodePaths, binding: &Binding) -> Result<(), String> {
    remove_file(paths, binding)?;
    paths
        .store()
        .remove(binding)
        .map_err(|error| format!("free {}: {error}", binding.hca))
}

/// Takes note that the devices of a binding are back on the host.
fn detach(paths: &NodePaths, mut binding: Binding) -> Result<(), String> {
    remove_file(paths, &binding)?;
    binding.stage = Stage::Detached;
    binding.gid_index = None;
    let (pod, hca) = (&binding.pod, &binding.hca);
    tracing::info!(%pod, unit = binding.unit, hca, "slot detached, and its HCA stays the pod's");
    let replaced = paths.store().replace(&binding);
    replaced.map_err(|error| format!("detach {hca}: {error}"))
}

/// Removes the CDI file of a binding.
fn remove_file(paths: &NodePaths, binding: &Binding) -> Result<(), String> {
    match CdiDirectory::open(&paths.cdi_dir) {
        Ok(directory) => {
            let removed = directory.remove(&file_name(binding));
            removed.map_err(|error| error.to_string())
        }
        // Emptied by a reboot, or never made: nothing is in it.
        Err(error) if error.is_missing() => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

fn answer_of(binding: &Binding) -> BoundSlot {
    BoundSlot {
        unit: binding.unit.clone(),
        resource: binding.resource.clone(),
        container: binding.container.clone(),
        hca: binding.hca.clone(),
        rail: binding.rail,
        cdi_file: file_name(binding),
    }
}

/// GPUs with their classes, for people: `0000:8f:00.0 PIX, 0000:90:00.0 PXB`.
pub(crate) fn served(gpus: &[ServedGpu]) -> String {
    let gpus: Vec<String> = gpus
        .iter()
        .map(|one| format!("{} {}", one.gpu, one.class))
        .collect();
    gpus.join(", ")
}

#[cfg(test)]
mod tests {
    use node_server::socket::NodeSocket;

    use super::*;
    use crate::node_socket::pods::{Caller, pods};

    /// A binder of a node whose kubelet does not answer: what would call it is not run.
    fn binder(paths: &Arc<NodePaths>) -> (Binder, Caller) {
        let readers = Readers::default();
        let (pods, caller) = pods(&readers, paths, "n1".into(), Arc::default());
        let (socket, _) = NodeSocket::new("node.sock".into());
        let report = Report::new(Instant::now(), Default::default(), socket, readers.clone());
        let binder = Binder::new(
            &readers,
            paths.clone(),
            Arc::new(pods),
            watch::channel(Arc::new(report)).1,
            Requests::new().0,
            Triggers::new().0,
        );
        (binder, caller)
    }

    #[tokio::test]
    async fn no_lock_is_held_while_the_kubelet_is_asked() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Arc::new(NodePaths::all_in(dir.path()));
        let (binder, _caller) = binder(&paths);
        let pod = Pod {
            namespace: "a".into(),
            name: "b".into(),
            uid: None,
        };
        let question = BindQuestion {
            pod,
            sandbox: "s".into(),
            unit: "slot_3e71787e_0".into(),
        };
        let slots = ["slot_3e71787e_0".to_owned()];
        let (bind, start) = (binder.bind(question), binder.start("rdma/nic", &slots));
        tokio::pin!(bind, start);
        tokio::select! {
            bound = &mut bind => panic!("{bound:?}"),
            started = &mut start => panic!("{started:?}"),
            () = tokio::time::sleep(Duration::from_millis(300)) => {}
        }
        // Another daemon waits for it for a second and a half.
        assert!(paths.store().lock().is_ok());
    }

    #[tokio::test]
    async fn nothing_is_bound_for_an_add_that_is_over() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Arc::new(NodePaths::all_in(dir.path()));
        let (binder, _caller) = binder(&paths);
        let before = Instant::now();
        let question = UnbindQuestion {
            sandbox: "s".into(),
            units: Vec::new(),
        };
        binder.unbind(question).await.unwrap();
        let now = Instant::now();
        let is_awaited = |sandbox, asked| binder.is_awaited(sandbox, asked);
        assert!(is_awaited(Some("s"), before).await.is_err());
        assert!(is_awaited(Some("s"), now).await.is_ok(), "a later ADD");
        assert!(is_awaited(Some("other"), before).await.is_ok());
        let long_ago = now.checked_sub(BIND_TIMEOUT).unwrap();
        assert!(is_awaited(Some("other"), long_ago).await.is_err());
        assert!(
            is_awaited(None, long_ago).await.is_ok(),
            "the start of a container"
        );
    }
}
