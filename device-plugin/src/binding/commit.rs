//! Writes what containers get for slots whose devices are in place.
//!
//! The device nodes are read at that moment, for the HCAs of the containers alone: a scan of the
//! host reads every GID and every partition key, and the pod's network waits for the answer. Only
//! what this reading cannot explain is left to a whole scan: an HCA that the last scan did not find
//! as it must be, a node that udev has not made yet, an RDMA device with another name.

use std::collections::BTreeMap;

use attachment::cdi_file::CdiDirectory;
use hca::{HcaId, Host};
use node_wire::{CommitQuestion, Committed, Failure, FailureKind, Pod};

use super::binder::{Binder, unavailable};
use super::pod_slots::late_pool;
use super::slot_specification;
use super::store::{Binding, Stage};
use crate::config::NodeRule;
use crate::device_nodes::HcaDevices;
use crate::events::Trigger;
use crate::node_paths::NodePaths;
use crate::report::Report;
use crate::snapshot::{Member, UnhealthyReason};

/// A slot's file to be written.
struct SlotFile {
    binding: Binding,
    text: String,
}

/// The HCAs of a sandbox with their device nodes of now, or why they cannot be given.
type Current = BTreeMap<HcaId, Result<Member, String>>;

impl Binder {
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
        let (sandbox, stage) = (Some(sandbox), Stage::Attached);
        self.write(&pod, sandbox, &units, stage, Some(&gid_indexes))
            .await
    }

    pub(super) async fn write(
        &self,
        pod: &Pod,
        sandbox: Option<String>,
        units: &[String],
        stage: Stage,
        gid_indexes: Option<&BTreeMap<String, u32>>,
    ) -> Result<Committed, Failure> {
        let bindings = self.bindings().await?;
        let of_sandbox: Vec<Binding> = bindings
            .all
            .into_values()
            .filter(|one| one.sandbox == sandbox && one.is_of(pod))
            .collect();
        for unit in units {
            if !of_sandbox.iter().any(|one| one.unit == *unit) {
                return Err(Failure::new(
                    FailureKind::NotBound,
                    format!(
                        "{unit} is not bound for pod {pod} and sandbox {}: its binding was freed, or \
                         is another sandbox's",
                        sandbox.as_deref().unwrap_or("(none)")
                    ),
                ));
            }
        }
        let mut attached = of_sandbox.clone();
        for one in attached.iter_mut().filter(|one| units.contains(&one.unit)) {
            if let Some(indexes) = gid_indexes {
                one.gid_index = indexes.get(&one.unit).copied();
            }
        }
        let files = match self.files(units, &attached, stage).await {
            Ok(files) => files,
            Err(refused) => {
                let why = refused.message;
                tracing::debug!(%pod, why, "the host is scanned before slots are refused");
                self.requests.scan().await.map_err(|status| {
                    Failure::new(
                        FailureKind::CannotBind,
                        format!("scan the host after the move: {}", status.message()),
                    )
                })?;
                self.files(units, &attached, stage).await?
            }
        };
        let has_news = files.iter().any(|file| !of_sandbox.contains(&file.binding));
        let paths = self.paths.clone();
        let _turn = self.turn().await?;
        let written = self
            .blocking(move || write_all(&paths, files, &of_sandbox))
            .await?;
        if has_news {
            self.triggers.send(Trigger::Binding);
        }
        written.map(|cdi_files| Committed { cdi_files })
    }

    /// The files of slots, with the device nodes of now.
    async fn files(
        &self,
        units: &[String],
        of_sandbox: &[Binding],
        stage: Stage,
    ) -> Result<Vec<SlotFile>, Failure> {
        let report = self.report();
        let (host, bindings) = (self.paths.host.clone(), of_sandbox.to_vec());
        let known = report.clone();
        let current = self
            .blocking(move || current(&host, &bindings, &known))
            .await?;
        let mut files = Vec::new();
        for unit in units {
            files.extend(file_of(unit, of_sandbox, &report, &current, stage)?);
        }
        Ok(files)
    }
}

/// Reads the device nodes of the HCAs of a sandbox.
fn current(host: &Host, of_sandbox: &[Binding], report: &Report) -> Current {
    let members = of_sandbox.iter().filter_map(|binding| {
        let (snapshot, _) = late_pool(&binding.resource, report)?;
        let mut members = snapshot.members().iter();
        let known = members.find(|member| member.hca.id.to_string() == binding.hca)?;
        let read = HcaDevices::read(host, &known.hca);
        let member = match read {
            Ok(devices) => with_devices(known, &devices, &snapshot.pool().nodes),
            Err(error) => Err(error.to_string()),
        };
        Some((known.hca.id.clone(), member))
    });
    members.collect()
}

/// A member of the last scan with the device nodes of now.
fn with_devices(known: &Member, devices: &HcaDevices, rule: &NodeRule) -> Result<Member, String> {
    let (nodes, lacking) = devices.nodes(rule);
    let names: Vec<&str> = devices.rdma_devices().collect();
    if lacking.is_none() && names != known.hca.rdma_names() {
        return Err(format!(
            "its RDMA devices are [{}] by now, and the last scan found [{}]",
            names.join(", "),
            known.hca.rdma_names().join(", ")
        ));
    }
    let mut health = known.health.clone();
    // A node that the last scan missed may be there.
    health.remove(|reason| matches!(reason, UnhealthyReason::DeviceNode(_)));
    if let Some(lacking) = lacking {
        health.add(UnhealthyReason::DeviceNode(lacking));
    }
    let member = Member {
        nodes,
        health,
        ..known.clone()
    };
    match slot_specification::obstacle(&member) {
        Some(why) => Err(why),
        None => Ok(member),
    }
}

/// The file of a slot.
fn file_of(
    unit: &str,
    of_sandbox: &[Binding],
    report: &Report,
    current: &Current,
    stage: Stage,
) -> Result<Option<SlotFile>, Failure> {
    let Some(binding) = of_sandbox.iter().find(|one| one.unit == unit) else {
        return Ok(None);
    };
    let cannot = |why: String| {
        Failure::new(
            FailureKind::CannotBind,
            format!("give {} to a container as {unit}: {why}", binding.hca),
        )
    };
    let Some((snapshot, _)) = late_pool(&binding.resource, report) else {
        return Err(cannot(format!(
            "{} is not a pool with binding late of this node any more",
            binding.resource
        )));
    };
    let member = |hca: &str| {
        let hca: HcaId = hca.parse().ok()?;
        current.get(&hca)
    };
    let own = match member(&binding.hca) {
        Some(Ok(own)) => own,
        Some(Err(why)) => return Err(cannot(why.clone())),
        None => return Err(cannot("it is not in the pool any more".to_owned())),
    };
    let mut of_container: Vec<&Binding> = of_sandbox
        .iter()
        .filter(|one| one.container == binding.container && one.resource == binding.resource)
        .collect();
    of_container.sort_by(|a, b| (a.rail, &a.hca).cmp(&(b.rail, &b.hca)));
    let gid_index = common_gid_index(&of_container).unwrap_or_else(|why| {
        if snapshot.pool().environment {
            let pod = &binding.pod;
            tracing::info!(%pod, unit, "NCCL_IB_GID_INDEX is not set: {why}");
        }
        None
    });
    let of_container: Vec<&Member> = of_container
        .into_iter()
        .filter_map(|one| member(&one.hca)?.as_ref().ok())
        .collect();
    Ok(Some(SlotFile {
        text: slot_specification::text(
            unit,
            snapshot.pool(),
            own,
            &of_container,
            gid_index,
            report.topology.nccl_topology.as_deref(),
        ),
        binding: Binding {
            stage: match binding.stage {
                // A container runs with it. An attachment that is made later and undone does not
                // take it away.
                Stage::Started => Stage::Started,
                // The start of a container may have read it before it was attached.
                Stage::Attached => Stage::Attached,
                Stage::Bound | Stage::Detached => stage,
            },
            ..binding.clone()
        },
    }))
}

/// The GID index of all HCAs of a container: NCCL takes one. None where no HCA has one, as on InfiniBand.
///
/// # Errors
/// HCAs differ, or one is not attached or has none.
fn common_gid_index(of_container: &[&Binding]) -> Result<Option<u32>, String> {
    let mut indexes = of_container.iter().map(|one| one.gid_index);
    let first = indexes.next().flatten();
    if indexes.all(|other| other == first) {
        return Ok(first);
    }
    let index = |one: &&Binding| match one.gid_index {
        Some(index) => format!("{} has GID index {index}", one.hca),
        None => format!("{} has none yet", one.hca),
    };
    let all: Vec<String> = of_container.iter().map(index).collect();
    Err(all.join(", "))
}

/// Writes files and notes that they are there, if the bindings are as they were `known`. The note comes
/// first: a file without its note would outlive evidence that is looked for by it.
fn write_all(
    paths: &NodePaths,
    files: Vec<SlotFile>,
    known: &[Binding],
) -> Result<Vec<String>, Failure> {
    let store = paths.store();
    let bindings = store.read().map_err(unavailable)?;
    let is_as_known = |one: &Binding| bindings.all.values().any(|now| now == one);
    let is_written = |one: &&Binding| files.iter().any(|file| file.binding.unit == one.unit);
    if let Some(one) = known
        .iter()
        .filter(is_written)
        .find(|one| !is_as_known(one))
    {
        return Err(Failure::new(
            FailureKind::NotBound,
            format!(
                "the binding of {} was changed in this moment; try again",
                one.unit
            ),
        ));
    }
    let directory = CdiDirectory::create(&paths.cdi_dir).map_err(unavailable)?;
    let mut names = Vec::new();
    for SlotFile { binding, text } in files {
        store.replace(&binding).map_err(unavailable)?;
        let name = slot_specification::write(&directory, &binding, &text);
        names.push(name.map_err(unavailable)?);
    }
    Ok(names)
}
