//! Binds slots for the CNI plugin and for the kubelet: reads, decides ([`super::decide`]), acts.
//!
//! Questions are served one at a time. Two daemons at once, as in a rolling update, are kept apart by
//! the files of [`super::store`], which only one process can create. A daemon that is killed leaves
//! some of a pod's bindings; the same question again keeps them and adds the rest. What a client
//! gave up on is done all the same, and freed as any other binding.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use attachment::cdi_file::CdiDirectory;
use attachment::journal;
use diagnostics::topology::nccl;
use hca::topology::Machine;
use hca::topology::rail::{Rail, Source};
use hca::{HcaId, Host};
use node::identity::boot_id;
use node::policy::Policy;
use node_wire::{
    BindQuestion, Bound, BoundSlot, CommitQuestion, Committed, Failure, FailureKind, Pod, PodUnits,
    UnbindQuestion, Unbound,
};
use tokio::sync::{Mutex, watch};
use tokio::time::timeout;

use super::decide::{self, Assigned, Container};
use super::evidence::{Attached, was_detached};
use super::gpus::{self, Gpus, PodGpus};
use super::slot_specification;
use super::store::{Binding, Bindings, ServedGpu, Stage, Store};
use crate::config::{Late, TopologyConfig};
use crate::events::{Trigger, Triggers};
use crate::kubelet::checkpoint;
use crate::kubelet::service::Requests;
use crate::node_socket::pods::Pods;
use crate::report::Report;
use crate::snapshot::{Health, Member, Snapshot};

/// How long reading the GPUs may take: their drivers are asked.
const GPUS_TIMEOUT: Duration = Duration::from_secs(1);

/// Where things are.
#[derive(Debug, Clone)]
pub(crate) struct Places {
    /// Roots of the host's kernel file systems.
    pub host: Host,
    /// The node's policy, which names the state directory.
    pub policy: PathBuf,
    /// Where CDI files go.
    pub cdi_dir: PathBuf,
    /// The kubelet's device-plugins directory, which has its checkpoint.
    pub device_plugin_dir: PathBuf,
}

impl Places {
    fn state_dir(&self) -> PathBuf {
        Policy::load_for_release(&self.policy).0.state_dir
    }

    /// The bindings of this boot.
    pub(crate) fn store(&self) -> Store {
        Store::at(&self.state_dir(), &boot_id(&self.host.proc))
    }

    /// What the CNI plugin's journal has.
    ///
    /// # Errors
    /// The journal cannot be listed.
    pub(crate) fn attached(&self) -> Result<Attached, String> {
        let (records, unreadable) = journal::Store::at(&self.state_dir())
            .records()
            .map_err(|error| error.to_string())?;
        let unreadable = unreadable
            .into_iter()
            .map(|one| one.id.container_id.to_string())
            .collect();
        let slots = records.into_iter().flat_map(|(_, record)| {
            let sandbox = record.container_id;
            let parts = record.parts.into_iter();
            // A NIC that a record has is in use, by whatever unit it got there.
            let hcas = parts.flat_map(|part| {
                let slots = part.slots.into_iter().map(|slot| slot.hca);
                slots.chain(part.hcas)
            });
            let hcas: Vec<String> = hcas.collect();
            hcas.into_iter().map(move |hca| (sandbox.clone(), hca))
        });
        Ok(Attached {
            slots: slots.collect(),
            unreadable,
        })
    }
}

/// Answers questions about bindings.
#[derive(Debug)]
pub(crate) struct Binder {
    places: Places,
    pods: Arc<Pods>,
    reports: watch::Receiver<Arc<Report>>,
    requests: Requests,
    triggers: Triggers,
    /// Held while a question is served; the GPUs as they were read last.
    gate: Mutex<Arc<Gpus>>,
}

/// A pool with late binding, and what the pod has of it.
struct Asked {
    snapshot: Arc<Snapshot>,
    late: Late,
    /// Containers of the pod, those without slots of this pool included.
    containers: Vec<Container>,
}

fn failure(kind: FailureKind, why: impl Into<String>) -> Failure {
    Failure::new(kind, why)
}

fn unavailable(why: impl std::fmt::Display) -> Failure {
    failure(FailureKind::BindingsUnavailable, why.to_string())
}

impl Binder {
    pub(crate) fn new(
        places: Places,
        pods: Arc<Pods>,
        reports: watch::Receiver<Arc<Report>>,
        requests: Requests,
        triggers: Triggers,
    ) -> Self {
        Self {
            places,
            pods,
            reports,
            requests,
            triggers,
            gate: Mutex::default(),
        }
    }

    fn report(&self) -> Arc<Report> {
        self.reports.borrow().clone()
    }

    /// Binds all slots of a pod to a sandbox. The same question again has the same answer.
    ///
    /// # Errors
    /// The unit is not the pod's, or there are no HCAs as they must be; nothing is bound then that
    /// was not before.
    pub(crate) async fn bind(&self, question: BindQuestion) -> Result<Bound, Failure> {
        let mut gpus = self.gate.lock().await;
        let BindQuestion { pod, sandbox, unit } = question;
        let units = self.pods.units(&pod).await?;
        let needed = std::slice::from_ref(&unit);
        let bound = self.bind_pod(&pod, Some(sandbox), needed, &units, &mut gpus);
        let bound = bound.await;
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
        known: &mut Arc<Gpus>,
    ) -> Result<Bound, Failure> {
        let report = self.report();
        for unit in needed {
            belongs(pod, unit, units, &report)?;
        }
        let slots = pools_of(units, &report);
        let (places, owner, of_sandbox) = (self.places.clone(), pod.clone(), sandbox.clone());
        let wanted: BTreeSet<String> = slots.iter().flat_map(slots_of).collect();
        let held_elsewhere = report.allocated.as_ref().map(|held| held.hcas());
        let read = move || kept_and_taken(&places, &owner, of_sandbox.as_deref(), &wanted);
        let (bindings, mut taken) = blocking(read).await??;
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
        let is_whole = slots
            .iter()
            .flat_map(slots_of)
            .all(|slot| kept(&slot).is_some());
        if !is_whole {
            let of_pod = self.gpus_of(pod, units, &report, known).await?;
            warnings.extend(of_pod.warnings.iter().cloned());
            let machine = self.machine(&report, known).await?;
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
                        .map(|one| binding(&one, asked, pod, sandbox.as_deref(), &machine)),
                );
            }
        }
        let store = self.places.store();
        let created = fresh.clone();
        blocking(move || create_all(&store, &created)).await??;
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

    /// The GPUs of a pod; they are read again if one is not found among the known ones.
    async fn gpus_of(
        &self,
        pod: &Pod,
        units: &PodUnits,
        report: &Report,
        known: &mut Arc<Gpus>,
    ) -> Result<PodGpus, Failure> {
        let more: Vec<String> = report
            .topology
            .gpu_resources
            .iter()
            .map(|resource| resource.as_str().to_owned())
            .collect();
        let resolve = |gpus: Arc<Gpus>| {
            let (units, more) = (units.clone(), more.clone());
            let directory = self.places.device_plugin_dir.clone();
            blocking(move || {
                let nodes = |resource: &str, id: &str| {
                    let kept = checkpoint::allocated_nodes(&directory, resource, &[id.to_owned()]);
                    kept.unwrap_or_default().into_iter().flatten().collect()
                };
                gpus::of_pod(&units, &gpus, &more, &nodes)
            })
        };
        if !known.all.is_empty() {
            let found = resolve(known.clone()).await?;
            if found.unknown.is_empty() {
                return Ok(found);
            }
        }
        let host = self.places.host.clone();
        let read = timeout(GPUS_TIMEOUT, blocking(move || gpus::read(&host)));
        let cannot = |why: String| {
            failure(
                FailureKind::CannotBind,
                format!("read the GPUs of this node for pod {pod}: {why}"),
            )
        };
        let read = match read.await {
            Ok(read) => read?.map_err(|error| cannot(error.to_string()))?,
            Err(_) => return Err(cannot(format!("no answer within {GPUS_TIMEOUT:?}"))),
        };
        *known = Arc::new(read);
        resolve(known.clone()).await
    }

    /// The machine with its GPUs, and with what the administrator says about their places.
    async fn machine(&self, report: &Report, gpus: &Gpus) -> Result<Machine, Failure> {
        let snapshots = report
            .pools
            .iter()
            .filter_map(|pool| pool.snapshot.as_ref());
        let late = snapshots.clone().find(|one| one.terms().late.is_some());
        let read = late.map(|snapshot| snapshot.machine().clone());
        let machine = gpus.in_machine(&read.unwrap_or_default());
        let topology = report.topology.clone();
        let placed = blocking(move || placed(machine, &topology)).await?;
        placed.map_err(|why| failure(FailureKind::CannotBind, why))
    }

    /// Writes what containers get for slots whose devices are in place.
    ///
    /// # Errors
    /// A slot is not bound to this sandbox, or its HCA cannot be given.
    pub(crate) async fn commit(&self, question: CommitQuestion) -> Result<Committed, Failure> {
        let _one_at_a_time = self.gate.lock().await;
        let CommitQuestion {
            pod,
            sandbox,
            units,
        } = question;
        self.write(&pod, Some(sandbox), &units, Stage::Attached)
            .await
    }

    async fn write(
        &self,
        pod: &Pod,
        sandbox: Option<String>,
        units: &[String],
        stage: Stage,
    ) -> Result<Committed, Failure> {
        let places = self.places.clone();
        let bindings = blocking(move || places.store().read()).await?;
        let bindings = bindings.map_err(unavailable)?;
        let of_sandbox: Vec<Binding> = bindings
            .all
            .into_values()
            .filter(|one| one.sandbox == sandbox && one.is_of(pod))
            .collect();
        for unit in units {
            if !of_sandbox.iter().any(|one| one.unit == *unit) {
                return Err(failure(
                    FailureKind::NotBound,
                    format!(
                        "{unit} is not bound for pod {pod} and sandbox {}: its binding was freed, or \
                         is another sandbox's",
                        sandbox.as_deref().unwrap_or("(none)")
                    ),
                ));
            }
        }
        // The numbers of device nodes are those of now only after a scan that begins now.
        self.requests.scan().await.map_err(|status| {
            failure(
                FailureKind::CannotBind,
                format!("scan the host after the move: {}", status.message()),
            )
        })?;
        let report = self.report();
        let mut files = Vec::new();
        for unit in units {
            files.extend(file_of(unit, &of_sandbox, &report, stage)?);
        }
        let places = self.places.clone();
        let written = blocking(move || write_all(&places, files)).await?;
        written.map(|cdi_files| Committed { cdi_files })
    }

    /// Frees slots of a sandbox that the CNI plugin's journal does not have any more.
    ///
    /// # Errors
    /// Journal or bindings cannot be read.
    pub(crate) async fn unbind(&self, question: UnbindQuestion) -> Result<Unbound, Failure> {
        let _one_at_a_time = self.gate.lock().await;
        let places = self.places.clone();
        let freed = blocking(move || {
            let bindings = places.store().read().map_err(unavailable)?;
            let attached = places.attached().map_err(unavailable)?;
            let UnbindQuestion { sandbox, units } = question;
            let over = bindings.all.into_values().filter(|one| {
                one.sandbox.as_deref() == Some(sandbox.as_str())
                    && (units.is_empty() || units.contains(&one.unit))
                    && !attached.has(one)
            });
            let over: Vec<Binding> = over.collect();
            for one in &over {
                free(&places, one).map_err(unavailable)?;
            }
            Ok(over)
        });
        let freed: Vec<Binding> = freed.await??;
        for one in &freed {
            tracing::info!(pod = %one.pod, unit = one.unit, hca = one.hca, "slot unbound");
        }
        if !freed.is_empty() {
            self.triggers.send(Trigger::Binding);
        }
        Ok(Unbound {
            hcas: freed.into_iter().map(|one| one.hca).collect(),
        })
    }

    /// The gate before a container starts: its slots are bound to its pod, and their files say what
    /// is true now. A pod without network attachment is bound here, where its pool allows it.
    ///
    /// # Errors
    /// Why the container must not start.
    pub(crate) async fn start(&self, resource: &str, ids: &[String]) -> Result<(), Failure> {
        let mut gpus = self.gate.lock().await;
        let pod = self.pods.holder(resource, ids).await?;
        let places = self.places.clone();
        let bindings = blocking(move || places.store().read()).await?;
        let bindings = bindings.map_err(unavailable)?;
        let of_slot = |id: &String| {
            let of_pod = bindings.all.values();
            of_pod
                .filter(|one| one.unit == *id && one.is_of(&pod))
                .max_by_key(|one| one.created)
                .cloned()
        };
        let report = self.report();
        let may_bind = report.pools.iter().any(|pool| {
            let late = pool.snapshot.as_ref().and_then(|one| one.terms().late);
            pool.resource.as_str() == resource && late.is_some_and(|late| late.bind_at_start)
        });
        let mut unbound = Vec::new();
        let mut by_sandbox: BTreeMap<Option<String>, Vec<(String, Stage)>> = BTreeMap::new();
        for id in ids {
            match of_slot(id) {
                Some(one) if one.stage == Stage::Bound => match may_bind {
                    // Other slots of the pod have attachments, this one has none.
                    true => by_sandbox
                        .entry(one.sandbox)
                        .or_default()
                        .push((id.clone(), Stage::Started)),
                    false => unbound.push(id.clone()),
                },
                Some(one) => by_sandbox
                    .entry(one.sandbox)
                    .or_default()
                    .push((id.clone(), one.stage)),
                None => unbound.push(id.clone()),
            }
        }
        if !unbound.is_empty() && !may_bind {
            return Err(failure(
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
            let bound = self
                .bind_pod(&pod, None, &unbound, &units, &mut gpus)
                .await?;
            for warning in bound.warnings {
                tracing::warn!(pod = %pod, warning, "a pod is bound at the start of a container");
            }
            let started = unbound.into_iter().map(|id| (id, Stage::Started));
            by_sandbox.entry(None).or_default().extend(started);
        }
        for (sandbox, slots) in by_sandbox {
            for stage in [Stage::Attached, Stage::Started] {
                let of_stage = slots.iter().filter(|(_, known)| *known == stage);
                let units: Vec<String> = of_stage.map(|(id, _)| id.clone()).collect();
                if !units.is_empty() {
                    self.write(&pod, sandbox.clone(), &units, stage).await?;
                }
            }
        }
        Ok(())
    }

    /// Frees bindings that are over, if they are still as they were when that was found out. Returns
    /// those that were freed.
    pub(crate) async fn free_all(&self, over: Vec<Binding>) -> Vec<Binding> {
        let _one_at_a_time = self.gate.lock().await;
        let places = self.places.clone();
        let freed = blocking(move || {
            let Ok(bindings) = places.store().read() else {
                return Vec::new();
            };
            let unchanged = over
                .into_iter()
                .filter(|one| bindings.all.values().any(|known| known == one));
            unchanged
                .filter(|one| match free(&places, one) {
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

    /// Where things are.
    pub(crate) fn places(&self) -> &Places {
        &self.places
    }

    /// What is known of the node now.
    pub(crate) fn now(&self) -> Arc<Report> {
        self.report()
    }
}

/// Runs what waits for a disk.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    tokio::task::spawn_blocking(work).await.map_err(unavailable)
}

/// Refuses a unit that the kubelet did not allocate to the pod, or that is no slot of ours.
fn belongs(pod: &Pod, unit: &str, units: &PodUnits, report: &Report) -> Result<(), Failure> {
    let held = units
        .allocations
        .iter()
        .find(|one| one.units.iter().any(|id| id == unit));
    let Some(held) = held else {
        return Err(failure(
            FailureKind::NotAllocated,
            format!("the kubelet did not allocate {unit} to pod {pod}"),
        ));
    };
    match late_pool(&held.resource, report) {
        Some((snapshot, _)) if snapshot.slot_number(unit).is_some() => Ok(()),
        Some(_) => Err(failure(
            FailureKind::NotAllocated,
            format!("{unit} is no slot of {}", held.resource),
        )),
        None => Err(failure(
            FailureKind::CannotBind,
            format!(
                "{} is no pool with binding late of this node now, or its HCAs have not been \
                 scanned yet",
                held.resource
            ),
        )),
    }
}

fn late_pool(resource: &str, report: &Report) -> Option<(Arc<Snapshot>, Late)> {
    let pool = report
        .pools
        .iter()
        .find(|pool| pool.resource.as_str() == resource)?;
    let snapshot = pool.snapshot.clone()?;
    let late = snapshot.terms().late?;
    Some((snapshot, late))
}

/// What a pod has of each pool with late binding, by resource.
fn pools_of(units: &PodUnits, report: &Report) -> Vec<Asked> {
    let resources: BTreeSet<&str> = units
        .allocations
        .iter()
        .map(|one| one.resource.as_str())
        .collect();
    let pools = resources.into_iter().filter_map(|resource| {
        let (snapshot, late) = late_pool(resource, report)?;
        let mut containers: BTreeMap<&str, Container> = BTreeMap::new();
        let claimed = units.claims.iter().map(|claim| claim.container.as_str());
        let allocated = units.allocations.iter().map(|one| one.container.as_str());
        for name in allocated.chain(claimed) {
            let container = containers.entry(name).or_default();
            container.name = name.to_owned();
        }
        for one in units
            .allocations
            .iter()
            .filter(|one| one.resource == resource)
        {
            if let Some(container) = containers.get_mut(one.container.as_str()) {
                container.slots.extend(one.units.iter().cloned());
            }
        }
        for container in containers.values_mut() {
            container
                .slots
                .retain(|slot| snapshot.slot_number(slot).is_some());
            container
                .slots
                .sort_by_key(|slot| snapshot.slot_number(slot));
        }
        Some(Asked {
            snapshot,
            late,
            containers: containers.into_values().collect(),
        })
    });
    pools.collect()
}

fn slots_of(asked: &Asked) -> Vec<String> {
    let containers = asked.containers.iter();
    containers
        .flat_map(|one| one.slots.iter().cloned())
        .collect()
}

/// The bindings as they are, after those of earlier sandboxes of the pod are freed, and HCAs that are
/// in use by the CNI plugin's journal.
fn kept_and_taken(
    places: &Places,
    pod: &Pod,
    sandbox: Option<&str>,
    slots: &BTreeSet<String>,
) -> Result<(Bindings, BTreeSet<HcaId>), Failure> {
    let store = places.store();
    let mut bindings = store.read().map_err(unavailable)?;
    let attached = places.attached().map_err(unavailable)?;
    // A pod has one sandbox at a time. What the journal has is still in the old one's namespace. What
    // it has no more, of whichever pod, was returned while no daemon was told.
    let is_earlier = |one: &Binding| {
        sandbox.is_some()
            && one.sandbox.as_deref() != sandbox
            && one.is_of(pod)
            && slots.contains(&one.unit)
            && !attached.has(one)
    };
    let earlier: Vec<(HcaId, Binding)> = bindings
        .all
        .iter()
        .filter(|(_, one)| is_earlier(one) || was_detached(one, &attached))
        .map(|(hca, one)| (hca.clone(), one.clone()))
        .collect();
    for (hca, one) in earlier {
        free(places, &one).map_err(unavailable)?;
        tracing::info!(
            pod = %one.pod, unit = one.unit, hca = one.hca,
            "slot unbound: its attachment was undone, or the pod has a new sandbox"
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

/// Decides for one pool.
fn choose<'b>(
    asked: &Asked,
    machine: &Machine,
    of_pod: &PodGpus,
    bindings: &Bindings,
    taken: &BTreeSet<HcaId>,
    kept: impl Fn(&str) -> Option<&'b Binding>,
    warnings: &mut Vec<String>,
) -> Result<Vec<Assigned>, Failure> {
    let resource = asked.snapshot.resource();
    let cannot = |why: String| failure(FailureKind::CannotBind, format!("bind {resource}: {why}"));
    if !of_pod.unknown.is_empty() {
        let why = format!(
            "GPUs of the pod are not known: {}",
            of_pod.unknown.join("; ")
        );
        if asked.late.strict {
            return Err(cannot(format!(
                "{why}; strict: false for this pool binds all the same"
            )));
        }
        warnings.push(why);
    }
    let elsewhere = |hca: &HcaId| {
        let nic = machine.nics.iter().find(|nic| nic.hca == *hca);
        nic.is_some_and(|nic| nic.elsewhere)
    };
    let is_usable = |member: &&Member| {
        let hca = &member.id;
        member.health.is_healthy() && !bindings.has(hca) && !taken.contains(hca) && !elsewhere(hca)
    };
    let members = asked.snapshot.members().iter();
    let usable: Vec<HcaId> = members
        .filter(is_usable)
        .map(|one| one.id.clone())
        .collect();
    let mut kept_hcas = BTreeMap::new();
    for slot in slots_of(asked) {
        if let Some(hca) = kept(&slot).and_then(|one| one.hca.parse().ok()) {
            kept_hcas.insert(slot, hca);
        }
    }
    let mut containers = asked.containers.clone();
    for container in &mut containers {
        let gpus = of_pod.of_container.get(&container.name);
        container.gpus = gpus.cloned().unwrap_or_default();
    }
    decide::decide(machine, &usable, &kept_hcas, &containers, asked.late.strict).map_err(
        |refused| {
            let why = match &refused {
                decide::Refused::TooFew { .. } => unhealthy(asked.snapshot.members()),
                decide::Refused::NoPlace(_) | decide::Refused::Choice(_) => String::new(),
            };
            cannot(format!("{refused}{why}"))
        },
    )
}

/// Why HCAs of a pool cannot be given, each reason once.
fn unhealthy(members: &[Member]) -> String {
    let reasons = members.iter().filter_map(|member| match &member.health {
        Health::Healthy => None,
        Health::Unhealthy(reason) => Some(reason.to_string()),
    });
    let reasons: BTreeSet<String> = reasons.collect();
    reasons.iter().map(|reason| format!("; {reason}")).collect()
}

fn binding(
    one: &Assigned,
    asked: &Asked,
    pod: &Pod,
    sandbox: Option<&str>,
    machine: &Machine,
) -> Binding {
    let gpus = one.pairs.iter().filter_map(|pair| {
        let gpu = machine.gpus.get(pair.gpu)?;
        Some(ServedGpu {
            gpu: gpu.place.address.to_string(),
            class: pair.distance.class.label().to_owned(),
            peer_to_peer: pair.direct,
            aligned: pair.aligned,
        })
    });
    Binding {
        resource: asked.snapshot.resource().to_string(),
        container: one.container.clone(),
        rail: one.rail,
        gpus: gpus.collect(),
        ..Binding::new(&one.hca, &one.slot, pod, sandbox)
    }
}

/// Puts GPUs and NICs where the administrator says.
fn placed(mut machine: Machine, topology: &TopologyConfig) -> Result<Machine, String> {
    if let Some(file) = &topology.nccl_topology {
        let places = nccl::read(file).map_err(|error| format!("{error:#}"))?;
        machine.place(&places);
    }
    if let Some(pairing) = &topology.pair {
        machine.pair(pairing).map_err(|error| error.to_string())?;
    }
    for nic in &mut machine.nics {
        if let Some(number) = topology.rails.get(&nic.physical) {
            nic.rail = Some(Rail {
                number: *number,
                source: Source::Explicit,
                differs: None,
            });
        }
    }
    Ok(machine)
}

/// Creates all bindings, or none: an HCA that another process bound meanwhile stops it.
fn create_all(store: &Store, bindings: &[Binding]) -> Result<(), Failure> {
    for (done, one) in bindings.iter().enumerate() {
        let Err(error) = store.create(one) else {
            continue;
        };
        for made in bindings.iter().take(done) {
            store.remove(made).map_err(unavailable)?;
        }
        return Err(match error.kind() {
            std::io::ErrorKind::AlreadyExists => failure(
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

/// Frees an HCA: its CDI files first, so that none names an HCA that is free.
fn free(places: &Places, binding: &Binding) -> Result<(), String> {
    match CdiDirectory::open(&places.cdi_dir) {
        Ok(directory) => {
            let name = slot_specification::file_name(&binding.unit, binding.sandbox.as_deref());
            directory.remove(&name).map_err(|error| error.to_string())?;
        }
        // Emptied by a reboot, or never made: nothing is in it.
        Err(error) if error.is_missing() => {}
        Err(error) => return Err(error.to_string()),
    }
    places
        .store()
        .remove(binding)
        .map_err(|error| format!("free {}: {error}", binding.hca))
}

/// A slot's file to be written.
struct SlotFile {
    binding: Binding,
    text: String,
}

/// The file of a slot, from the members as they are now.
fn file_of(
    unit: &str,
    of_sandbox: &[Binding],
    report: &Report,
    stage: Stage,
) -> Result<Option<SlotFile>, Failure> {
    let Some(binding) = of_sandbox.iter().find(|one| one.unit == unit) else {
        return Ok(None);
    };
    let cannot = |why: String| {
        failure(
            FailureKind::CannotBind,
            format!("give {} to a container as {unit}: {why}", binding.hca),
        )
    };
    let Some((snapshot, _)) = late_pool(&binding.resource, report) else {
        return Err(cannot(format!(
            "{} is no pool with binding late of this node any more",
            binding.resource
        )));
    };
    let member = |hca: &str| {
        let members = snapshot.members().iter();
        members.clone().find(|member| member.id.to_string() == hca)
    };
    let Some(own) = member(&binding.hca) else {
        return Err(cannot("it is not in the pool any more".to_owned()));
    };
    if let Some(why) = slot_specification::obstacle(own) {
        return Err(cannot(why));
    }
    let mut of_container: Vec<&Binding> = of_sandbox
        .iter()
        .filter(|one| one.container == binding.container && one.resource == binding.resource)
        .collect();
    of_container.sort_by(|a, b| (a.rail, &a.hca).cmp(&(b.rail, &b.hca)));
    let of_container: Vec<&Member> = of_container
        .into_iter()
        .filter_map(|one| member(&one.hca))
        .collect();
    Ok(Some(SlotFile {
        text: slot_specification::text(unit, snapshot.terms(), own, &of_container),
        binding: Binding {
            stage,
            ..binding.clone()
        },
    }))
}

/// Writes files and notes that they are there. The note comes first: a file without its note would
/// outlive evidence that is looked for by it.
fn write_all(places: &Places, files: Vec<SlotFile>) -> Result<Vec<String>, Failure> {
    let store = places.store();
    let directory = CdiDirectory::create(&places.cdi_dir).map_err(unavailable)?;
    let mut names = Vec::new();
    for SlotFile { binding, text } in files {
        store.replace(&binding).map_err(unavailable)?;
        let sandbox = binding.sandbox.as_deref();
        let name = slot_specification::write(&directory, &binding.unit, sandbox, &text);
        names.push(name.map_err(unavailable)?);
    }
    Ok(names)
}

fn answer_of(binding: &Binding) -> BoundSlot {
    BoundSlot {
        unit: binding.unit.clone(),
        resource: binding.resource.clone(),
        container: binding.container.clone(),
        hca: binding.hca.clone(),
        rail: binding.rail,
        cdi_file: slot_specification::file_name(&binding.unit, binding.sandbox.as_deref()),
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

/// Whether a CDI directory can have files of slots: why not, if it cannot.
pub(crate) fn directory_obstacle(path: &Path) -> Option<String> {
    let opened = CdiDirectory::create(path).err()?;
    Some(format!(
        "{opened}; mount the host's CDI directory there, or name it with --cdi-dir"
    ))
}
