//! Late binding: asks the daemon which HCA a slot becomes, and tells it when the devices are in place
//! and when they are back.
//!
//! The runtime passes a slot, which names no HCA. The daemon binds all slots of the pod to the HCAs
//! nearest to the pod's GPUs. The attachment has the one that was passed, or with `devices: all`
//! every slot that the pod has of the same resource. The answer is authorized as any other request,
//! by the node's policy.
//! After the devices are in the pod, the daemon reads their device nodes and writes the CDI file
//! without which no container with the slot is created.
//!
//! After a kill anywhere: a binding without a record in the journal is the pod's next sandbox's, or
//! is freed by the daemon when the pod is gone. With a record, DEL undoes it without the daemon: the
//! CDI file is in the record. The binding is then freed by the daemon, which sees that the record
//! is gone.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use attachment::{
    cdi_file::{self, CdiDirectory},
    journal::record::Slot,
    node::Node,
};
use cni_wire::{Code, Request, text::list};
use hca::{HcaId, UnitId};
use node_wire::{
    BIND_TIMEOUT, BindQuestion, BoundSlot, ClientError, CommitQuestion, FailureKind, Pod,
    UnbindQuestion, client,
};

use crate::{
    allocation::{Allocated, pod_of},
    config::{Config, Devices},
    error::Error,
};

/// How long the daemon may take to write CDI files: it scans the host where a node is not there yet.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long it may take to free a binding; nobody waits for it longer, it frees by itself.
const UNBIND_TIMEOUT: Duration = Duration::from_secs(1);

/// The slots of an attachment, which are bound to its sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bound {
    pod: Pod,
    sandbox: String,
    slots: BTreeMap<HcaId, Slot>,
}

/// Binds the slot of a request, if it has one.
///
/// # Errors
/// Code 4: the runtime does not name the pod; code 101: the slot is not the pod's; code 11: there is no
/// HCA for it now, or the daemon does not answer.
pub(crate) fn bind(
    node: &Node,
    request: &Request,
    config: &Config,
) -> Result<Option<Bound>, Error> {
    let Some(allocation) = &config.allocation else {
        return Ok(None);
    };
    let UnitId::Slot { .. } = allocation.unit else {
        return Ok(None);
    };
    let pod = pod_of(&request.env.args)?;
    let sandbox = request.attachment()?.container_id.to_string();
    let unit = allocation.text.clone();
    let question = BindQuestion {
        pod: pod.clone(),
        sandbox: sandbox.clone(),
        unit: unit.clone(),
    };
    let answer = client::ask(&node.daemon_socket(), &question, BIND_TIMEOUT)
        .map_err(|e| refused(&format!("bind {unit} of pod {pod}"), &e))?;
    for warning in &answer.warnings {
        node.log.warn(warning);
    }
    let named = answer.slots.iter().find(|slot| slot.unit == unit);
    let resource = named.map(|named| named.resource.clone());
    let is_meant = |slot: &BoundSlot| match config.devices {
        Devices::One => slot.unit == unit,
        Devices::All => resource.as_ref() == Some(&slot.resource),
    };
    let mut slots = BTreeMap::new();
    for slot in answer.slots.into_iter().filter(is_meant) {
        let hca = slot.hca.parse::<HcaId>().ok();
        let hca = hca.filter(|_| cdi_file::is_name(&slot.cdi_file));
        let hca = hca.ok_or_else(|| incomplete(&unit, &pod))?;
        slots.insert(
            hca,
            Slot {
                unit: slot.unit,
                hca: slot.hca,
                cdi_file: slot.cdi_file,
            },
        );
    }
    if !slots.values().any(|slot: &Slot| slot.unit == unit) {
        return Err(incomplete(&unit, &pod));
    }
    let bound = Bound {
        pod,
        sandbox,
        slots,
    };
    Ok(Some(bound))
}

fn incomplete(unit: &str, pod: &Pod) -> Error {
    Error::advise(
        Code::TryAgain,
        format_args!("bind {unit} of pod {pod}: the daemon's answer has no HCA and file for it"),
        "install both programs of one release",
    )
}

impl Bound {
    /// The daemon's answer in the place of the kubelet's: it has asked the kubelet whether the pod holds
    /// the slots.
    pub(crate) fn allocated(&self) -> Allocated {
        Allocated {
            pod: format!("{}/{}", self.pod.namespace, self.pod.name),
            hcas: self.hcas(),
        }
    }

    pub(crate) fn hcas(&self) -> BTreeSet<HcaId> {
        self.slots.keys().cloned().collect()
    }

    /// The slot that became an HCA.
    pub(crate) fn slot(&self, hca: &HcaId) -> Option<&Slot> {
        self.slots.get(hca)
    }

    fn units(&self) -> Vec<String> {
        self.slots.values().map(|slot| slot.unit.clone()).collect()
    }

    /// Has the CDI files written, all or none: the devices are in place.
    ///
    /// # Errors
    /// Code 11: the daemon does not answer, a binding was freed, or an HCA has no device nodes.
    pub(crate) fn commit(
        &self,
        node: &Node,
        gid_indexes: BTreeMap<String, u32>,
    ) -> Result<(), Error> {
        let question = CommitQuestion {
            pod: self.pod.clone(),
            sandbox: self.sandbox.clone(),
            units: self.units(),
            gid_indexes,
        };
        let (hcas, units) = (list(self.slots.keys()), list(self.units()));
        let pod = &self.pod;
        let what = format!("write the device nodes of {hcas} for {units} of pod {pod}");
        client::ask(&node.daemon_socket(), &question, COMMIT_TIMEOUT)
            .map(drop)
            .map_err(|e| refused(&what, &e))
    }

    /// Frees the slots of an ADD that failed.
    pub(crate) fn unbind(&self, node: &Node) {
        unbind(node, &self.sandbox, self.units());
    }
}

/// Tells the daemon that a sandbox does not have these slots any more. It finds out by itself where it
/// cannot be told.
pub(crate) fn unbind(node: &Node, sandbox: &str, units: Vec<String>) {
    if !units.is_empty() {
        free(node, sandbox, units);
    }
}

/// The same for an ADD that died before its record. With `devices: all` the request shows only one of the
/// slots: the daemon frees all of the sandbox.
pub(crate) fn unbind_unrecorded(node: &Node, sandbox: &str, request: &Request) {
    let runtime = request.config.runtime_config().ok();
    let text = |key: &str| request.config.root().text(key).ok().flatten();
    let of_runtime = runtime.and_then(|section| section.text("deviceID").ok().flatten());
    if let Some(slot) = of_runtime.or_else(|| text("deviceID"))
        && let Ok(UnitId::Slot { .. }) = slot.parse()
    {
        match text("devices") == Some(Devices::All.as_str()) {
            true => free(node, sandbox, Vec::new()),
            false => free(node, sandbox, vec![slot.to_owned()]),
        }
    }
}

fn free(node: &Node, sandbox: &str, units: Vec<String>) {
    let question = UnbindQuestion {
        sandbox: sandbox.to_owned(),
        units,
    };
    if let Err(error) = client::ask(&node.daemon_socket(), &question, UNBIND_TIMEOUT) {
        node.log.info(format_args!(
            "the daemon frees the slots of container {sandbox} later: {error}"
        ));
    }
}

/// That the files are there by which containers get the slots of an attachment.
///
/// # Errors
/// Code 104 naming the one that is not.
pub(crate) fn check(node: &Node, slots: &[Slot]) -> Result<(), Error> {
    if slots.is_empty() {
        return Ok(());
    }
    let differs = |what: String| Error::new(Code::Differs, what);
    let directory = CdiDirectory::open(&node.policy.values.cdi_dir)
        .map_err(|error| differs(error.to_string()))?;
    for slot in slots {
        let text = directory.read(&slot.cdi_file);
        if text.map_err(|error| differs(error.to_string()))?.is_none() {
            return Err(differs(format!(
                "the CDI file {} of {} is gone: its containers cannot start again",
                slot.cdi_file, slot.unit
            )));
        }
    }
    Ok(())
}

fn refused(what: &str, error: &ClientError) -> Error {
    let (code, remedy) = match error.failure().map(|failure| failure.kind) {
        Some(FailureKind::AnotherPod | FailureKind::NotAllocated) => (
            Code::Policy,
            "a slot is for the pod that the kubelet allocated it to; let Multus pass the deviceID \
             (k8s.v1.cni.cncf.io/resourceName)",
        ),
        Some(FailureKind::UnknownQuestion) => {
            (Code::TryAgain, "install both programs of one release")
        }
        // Another pod may end, a GPU be initialized, a daemon come back.
        _ => (
            Code::TryAgain,
            "the runtime tries again; rdmactl status shows what is bound to whom",
        ),
    };
    Error::advise(code, format_args!("{what}: {error}"), remedy)
}
