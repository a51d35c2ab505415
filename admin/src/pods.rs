//! `rdmactl pods`: which pod has which HCAs, GPUs, interfaces and addresses.

use anyhow::ensure;
use attachment::listing::Attachment;
use attachment::node::now;
use clap::Args;
use cni_wire::text::printable;
use hca::UnitId;
use node::table::{age, cell};
use node_wire::status::ServedGpu;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::global::Global;
use crate::node_state::{NodeState, Sources};
use crate::output::{Ended, Outcome, optional, table};

/// Shows one line for each HCA or interface of a pod: units, HCA, GPUs and how near they are,
/// interface and addresses.
#[derive(Debug, Args)]
#[command(
    after_help = "Exit status: 0 the daemon or the kubelet answered, 1 neither did or a read hangs, \
    2 wrong usage."
)]
pub(crate) struct Pods {
    #[command(flatten)]
    sources: Sources,
}

/// What is printed.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Document {
    /// One entry for each HCA or interface of a pod, sorted by pod.
    pub pods: Vec<Row>,
    /// What is missing and what is worth knowing.
    pub notes: Vec<String>,
}

/// An HCA of a pod, an interface of it, or both.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Row {
    /// `namespace/name`; `None` where the runtime did not say it.
    pub pod: Option<String>,
    /// The container that holds the unit.
    pub container: Option<String>,
    /// The resource.
    pub resource: Option<String>,
    /// Units of it that this line is about.
    pub units: Vec<String>,
    /// The HCA, as unit IDs name it.
    pub hca: Option<String>,
    /// How far a late-binding pool has come with it: `bound`, `attached`, `detached` or `started`.
    pub stage: Option<String>,
    /// The pod's GPUs that this HCA serves, with their distance; where the HCA was not bound to GPUs,
    /// all GPUs of the pod.
    pub gpus: Vec<String>,
    /// Whether the pod has an HCA that is farther from a GPU than it need be.
    pub misaligned: bool,
    /// The interface in the pod.
    pub interface: Option<String>,
    /// Its network's name.
    pub network: Option<String>,
    /// The pod's sandbox, by which the runtime knows it (`CNI_CONTAINERID`).
    pub sandbox: Option<String>,
    /// `move`, `macvlan`, ….
    pub kind: Option<String>,
    /// The host's netdev: the moved one, or the child's master.
    pub netdev: Option<String>,
    /// Its leased addresses, with prefix lengths.
    pub addresses: Vec<String>,
    /// Path of the pod's network namespace.
    pub netns: Option<String>,
    /// `alive`, `gone` or `unknown`.
    pub netns_state: Option<String>,
    /// Unix seconds of the ADD.
    pub created: Option<u64>,
}

impl Pods {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        let state = self.sources.read(global);
        let document = Document {
            pods: rows(&state),
            notes: state.gaps(),
        };
        global.say(json!(document), || text(&document, global.is_wide()));
        let faults = state.faults();
        ensure!(faults.is_empty(), "{}", faults.join("\n"));
        Ok(Outcome::Good)
    }
}

/// Units, bindings and attachments, joined by pod and HCA.
fn rows(state: &NodeState) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    let holders = state.holders();
    let all_gpus = &state.machine.gpus;
    let served = |gpu: &ServedGpu| {
        let mut known = all_gpus.iter();
        let known = known.find(|one| one.place.address.to_string() == gpu.gpu);
        let name = known.map_or_else(|| gpu.gpu.clone(), |one| format!("GPU{}", one.ordinal));
        format!("{name} {}", gpu.class)
    };
    for held in state.held() {
        let pod = format!("{}/{}", held.namespace, held.pod);
        let gpus = all_gpus
            .iter()
            .filter(|gpu| holders.gpu(gpu).contains(&pod));
        let gpus: Vec<String> = gpus.map(|gpu| format!("GPU{}", gpu.ordinal)).collect();
        for id in held.ids {
            let mut bindings = state.daemon.iter().flat_map(|daemon| &daemon.bindings);
            let bound = bindings.find(|one| one.unit == id && one.resource == held.resource);
            let unit = id.parse::<UnitId>().ok();
            let named = unit.and_then(|unit| Some(unit.hca()?.to_string()));
            let mut row = Row {
                pod: Some(pod.clone()),
                container: Some(held.container.clone()),
                resource: Some(held.resource.clone()),
                hca: bound.map(|bound| bound.hca.clone()).or(named),
                stage: bound.map(|bound| bound.stage.clone()),
                gpus: gpus.clone(),
                misaligned: state.misaligned.contains_key(&pod),
                ..Row::default()
            };
            if let Some(bound) = bound.filter(|bound| !bound.gpus.is_empty()) {
                row.gpus = bound.gpus.iter().map(served).collect();
            }
            let whose =
                |row: &Row| [&row.pod, &row.container, &row.resource, &row.hca].map(Clone::clone);
            // Shares of one HCA in one container are one line.
            match rows.iter_mut().find(|known| whose(known) == whose(&row)) {
                Some(known) => known.units.push(id),
                None => {
                    row.units.push(id);
                    rows.push(row);
                }
            }
        }
    }
    for attachment in state.attachments.iter().flatten() {
        let hca = hca_of(state, attachment);
        let free = rows.iter_mut().find(|row| {
            row.pod.is_some()
                && row.pod == attachment.pod
                && row.interface.is_none()
                && (row.hca.is_none() || hca.is_none() || row.hca == hca)
        });
        let mut own = Row {
            pod: attachment.pod.clone(),
            ..Row::default()
        };
        let is_own = free.is_none();
        let row = free.unwrap_or(&mut own);
        row.hca = row.hca.take().or(hca);
        row.interface = Some(attachment.interface.clone());
        row.network = Some(attachment.network.clone());
        row.sandbox = Some(attachment.container.clone());
        row.kind.clone_from(&attachment.kind);
        row.netdev.clone_from(&attachment.netdev);
        row.addresses = state.addresses(attachment);
        row.netns = Some(attachment.netns.clone());
        row.netns_state = Some(attachment.netns_state.to_owned());
        row.created = Some(attachment.created);
        rows.extend(is_own.then_some(own));
    }
    rows.sort_by(|a, b| (&a.pod, &a.interface, &a.hca).cmp(&(&b.pod, &b.interface, &b.hca)));
    rows
}

/// The HCA of an attachment: by its PCI address, else by the netdev that the daemon knows.
fn hca_of(state: &NodeState, attachment: &Attachment) -> Option<String> {
    let pools = state.daemon.iter().flat_map(|daemon| &daemon.pools);
    let mut hcas = pools.flat_map(|pool| &pool.hcas);
    let by_netdev = attachment.netdev.as_ref().and_then(|netdev| {
        let hca = hcas.find(|hca| hca.netdevs.contains(netdev))?;
        Some(hca.id.clone())
    });
    by_netdev.or_else(|| attachment.pci_address.clone())
}

/// Columns of [`columns`].
pub(crate) const HEADER: &str =
    "POD  CONTAINER  RESOURCE  HCA  GPUS  INTERFACE  KIND  ADDRESSES  AGE";

/// One line.
pub(crate) fn columns(row: &Row) -> Vec<String> {
    let hca = match (&row.hca, row.units.len()) {
        (Some(hca), _) => hca.clone(),
        (None, 0) => String::new(),
        (None, 1) => "1 unit".to_owned(),
        (None, units) => format!("{units} units"),
    };
    let mut gpus = row.gpus.join(", ");
    if row.misaligned {
        gpus += " (misaligned)";
    }
    let mut interface = row.interface.clone().unwrap_or_default();
    if row.netns_state.as_deref() == Some("gone") {
        interface += " (orphaned)";
    }
    let age = |created| age(now().saturating_sub(created).cast_signed());
    vec![
        optional(row.pod.as_deref()),
        optional(row.container.as_deref()),
        optional(row.resource.as_deref()),
        cell(&hca),
        cell(gpus.trim()),
        cell(&interface),
        optional(row.kind.as_deref()),
        cell(&row.addresses.join(" ")),
        optional(row.created.map(age)),
    ]
}

fn text(document: &Document, is_wide: bool) -> String {
    let mut header = HEADER.to_owned();
    let mut rows: Vec<Vec<String>> = document.pods.iter().map(columns).collect();
    if is_wide {
        header += "  UNITS  STAGE  NETWORK  NETDEV  NETNS";
        for (columns, row) in rows.iter_mut().zip(&document.pods) {
            columns.push(cell(&row.units.join(" ")));
            columns.push(optional(row.stage.as_deref()));
            columns.push(optional(row.network.as_deref()));
            columns.push(optional(row.netdev.as_deref()));
            let netns = row.netns.iter().zip(&row.netns_state);
            columns.push(optional(
                netns
                    .map(|(path, state)| format!("{path} ({state})"))
                    .next(),
            ));
        }
    }
    let mut all = match rows.is_empty() {
        true => "no pod has a unit or an attachment\n".to_owned(),
        false => table(&header, rows),
    };
    if !document.notes.is_empty() {
        all += "\n";
    }
    for note in &document.notes {
        all += &format!("{}\n", printable(note));
    }
    all
}

#[cfg(test)]
mod tests {
    use kubelet_api::client::{Devices, Held};
    use node_wire::status::{DaemonStatus, HcaStatus, PoolStatus};
    use rdma_device_plugin::node_files::Files;

    use super::*;

    fn held(pod: &str, resource: &str, ids: &[&str]) -> Held {
        Held {
            namespace: "ml".into(),
            pod: pod.into(),
            container: "worker".into(),
            resource: resource.into(),
            ids: ids.iter().map(|&id| id.to_owned()).collect(),
        }
    }

    fn attachment(pod: &str, interface: &str, netdev: &str) -> Attachment {
        Attachment {
            pod: Some(format!("ml/{pod}")),
            interface: interface.into(),
            network: "rdma".into(),
            container: "4c".into(),
            kind: Some("macvlan".into()),
            netdev: Some(netdev.into()),
            pci_address: None,
            netns: "/proc/7/ns/net".into(),
            netns_state: "alive",
            created: 0,
            warning: None,
        }
    }

    fn state(held: Vec<Held>, attachments: Vec<Attachment>) -> NodeState {
        let hca = |id: &str, netdev: &str| HcaStatus {
            id: id.into(),
            netdevs: vec![netdev.into()],
            ..HcaStatus::default()
        };
        let pool = PoolStatus {
            resource: "rdma/a".into(),
            hcas: vec![hca("0000:3b:00.0", "ens1"), hca("0000:5e:00.0", "ens2")],
            ..PoolStatus::default()
        };
        let daemon = DaemonStatus {
            pools: vec![pool],
            ..DaemonStatus::default()
        };
        let kubelet = Devices {
            held,
            allocatable: Vec::new(),
        };
        let files = Files {
            attachments: Ok(attachments),
            leases: Ok(Vec::new()),
            notes: Vec::new(),
        };
        NodeState::new(Ok(daemon), Ok(kubelet), files)
    }

    #[test]
    fn an_interface_is_on_the_line_of_its_hca() {
        let state = state(
            vec![held("a", "rdma/a", &["0000:3b:00.0", "0000:5e:00.0"])],
            vec![
                attachment("a", "net1", "ens2"),
                attachment("a", "net2", "ens1"),
            ],
        );
        let found: Vec<_> = rows(&state)
            .into_iter()
            .map(|row| (row.interface.unwrap(), row.hca.unwrap()))
            .collect();
        let expected = [("net1", "0000:5e:00.0"), ("net2", "0000:3b:00.0")];
        let expected = expected.map(|(name, hca)| (name.to_owned(), hca.to_owned()));
        assert_eq!(found, expected);
    }

    #[test]
    fn an_attachment_without_a_unit_is_a_line_of_its_own() {
        let state = state(
            vec![held("a", "rdma/a", &["0000:3b:00.0"])],
            vec![attachment("b", "net1", "ens2")],
        );
        let rows = rows(&state);
        assert_eq!(rows.len(), 2, "{rows:?}");
        assert_eq!((&rows[0].interface, &rows[1].resource), (&None, &None));
    }

    #[test]
    fn shares_of_one_hca_in_a_container_are_one_line() {
        let tag = hca::unit::PoolTag::of("rdma/a");
        let ids = [0, 1].map(|share| format!("0000:3b:00.0_{tag}_{share}"));
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        let rows = rows(&state(vec![held("a", "rdma/a", &ids)], Vec::new()));
        assert_eq!(rows.len(), 1, "{rows:?}");
        assert_eq!(rows[0].units.len(), 2);
    }
}
