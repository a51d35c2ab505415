//! `rdmactl pods`: which pod has which HCAs, GPUs, interfaces and addresses.

use std::collections::BTreeSet;

use anyhow::bail;
use attachment::listing::Attachment;
use attachment::node::now;
use clap::Args;
use cni_wire::text::printable;
use hca::UnitId;
use node::table::{age, cell, table};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::global::Global;
use crate::node_state::{NodeState, Sources};
use crate::output::{Ended, Outcome, say, say_json};

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
    /// How far a late-binding pool has come with it: `bound`, `attached` or `started`.
    pub stage: Option<String>,
    /// The pod's GPUs that this HCA serves, with their distance; where the HCA was not bound to GPUs,
    /// all GPUs of the pod.
    pub gpus: Vec<String>,
    /// Whether the pod has an HCA that is farther from a GPU than it need be.
    pub misaligned: bool,
    /// The interface in the pod.
    pub interface: Option<String>,
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
        match global.json {
            true => say_json(json!(document)),
            false => say(&text(&document, global.is_wide())),
        }
        let faults = state.faults();
        match faults.is_empty() {
            true => Ok(Outcome::Good),
            false => bail!("{}", faults.join("\n")),
        }
    }
}

/// Units, bindings and attachments, joined by pod and HCA.
fn rows(state: &NodeState) -> Vec<Row> {
    let mut rows = Vec::new();
    let holders = state.holders();
    let misaligned: BTreeSet<&str> = state.misaligned.iter().map(|m| m.pod.as_str()).collect();
    let bindings = state.daemon.iter().flat_map(|daemon| &daemon.bindings);
    let bindings: Vec<_> = bindings.collect();
    for held in state.held() {
        let pod = format!("{}/{}", held.namespace, held.pod);
        let gpus = state.machine.gpus.iter();
        let gpus = gpus.filter(|gpu| holders.gpu(gpu).contains(&pod));
        let gpus: Vec<String> = gpus.map(|gpu| format!("GPU{}", gpu.ordinal)).collect();
        for id in held.ids {
            let bound = bindings
                .iter()
                .find(|one| one.unit == id && one.resource == held.resource);
            let named = id
                .parse::<UnitId>()
                .ok()
                .and_then(|unit| unit.hca().cloned());
            let hca = match bound {
                Some(bound) => Some(bound.hca.clone()),
                None => named.map(|hca| hca.to_string()),
            };
            let gpu = |gpu: &node_wire::status::ServedGpu| {
                let known = state.machine.gpus.iter();
                let mut known = known.filter(|one| one.place.address.to_string() == gpu.gpu);
                let name = known.next().map(|one| format!("GPU{}", one.ordinal));
                format!("{} {}", name.unwrap_or_else(|| gpu.gpu.clone()), gpu.class)
            };
            // Shares of one HCA in one container are one line.
            let same = rows.iter_mut().find(|row: &&mut Row| {
                row.pod.as_ref() == Some(&pod)
                    && row.container.as_ref() == Some(&held.container)
                    && row.resource.as_ref() == Some(&held.resource)
                    && row.hca == hca
            });
            match same {
                Some(row) => row.units.push(id),
                None => rows.push(Row {
                    pod: Some(pod.clone()),
                    container: Some(held.container.clone()),
                    resource: Some(held.resource.clone()),
                    units: vec![id],
                    stage: bound.map(|bound| bound.stage.clone()),
                    gpus: match bound {
                        Some(bound) if !bound.gpus.is_empty() => {
                            bound.gpus.iter().map(gpu).collect()
                        }
                        _ => gpus.clone(),
                    },
                    misaligned: misaligned.contains(pod.as_str()),
                    hca,
                    ..Row::default()
                }),
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
        let row = match free {
            Some(row) => row,
            None => {
                rows.push(Row {
                    pod: attachment.pod.clone(),
                    hca: hca.clone(),
                    ..Row::default()
                });
                let Some(row) = rows.last_mut() else { continue };
                row
            }
        };
        row.hca = row.hca.take().or(hca);
        row.interface = Some(attachment.interface.clone());
        row.kind.clone_from(&attachment.kind);
        row.netdev.clone_from(&attachment.netdev);
        row.addresses = state.addresses(attachment);
        row.netns = Some(attachment.netns.clone());
        row.netns_state = Some(attachment.netns_state.to_owned());
        row.created = Some(attachment.created);
    }
    rows.sort_by(|a, b| (&a.pod, &a.interface, &a.hca).cmp(&(&b.pod, &b.interface, &b.hca)));
    rows
}

/// The HCA of an attachment: by its PCI address, else by the netdev that the daemon knows.
fn hca_of(state: &NodeState, attachment: &Attachment) -> Option<String> {
    let hcas = state.daemon.iter().flat_map(|daemon| &daemon.pools);
    let mut hcas = hcas.flat_map(|pool| &pool.hcas);
    let netdev = attachment.netdev.as_ref();
    let by_netdev = hcas.find(|hca| netdev.is_some_and(|netdev| hca.netdevs.contains(netdev)));
    let id = by_netdev.map(|hca| hca.id.clone());
    id.or_else(|| attachment.pci_address.clone())
}

/// Columns of [`columns`].
pub(crate) const HEADER: [&str; 9] = [
    "POD",
    "CONTAINER",
    "RESOURCE",
    "HCA",
    "GPUS",
    "INTERFACE",
    "KIND",
    "ADDRESSES",
    "AGE",
];

/// One line.
pub(crate) fn columns(row: &Row) -> Vec<String> {
    let text = |text: &Option<String>| cell(text.as_deref().unwrap_or_default());
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
    let seconds = row.created.map(|created| now().saturating_sub(created));
    vec![
        text(&row.pod),
        text(&row.container),
        text(&row.resource),
        cell(&hca),
        cell(gpus.trim()),
        cell(&interface),
        text(&row.kind),
        cell(&row.addresses.join(" ")),
        seconds.map_or_else(
            || "-".to_owned(),
            |seconds| age(i64::try_from(seconds).unwrap_or(i64::MAX)),
        ),
    ]
}

fn text(document: &Document, is_wide: bool) -> String {
    let text = |text: &Option<String>| cell(text.as_deref().unwrap_or_default());
    let mut header = HEADER.to_vec();
    let mut rows: Vec<Vec<String>> = document.pods.iter().map(columns).collect();
    if is_wide {
        header.extend(["UNITS", "STAGE", "NETDEV", "NETNS"]);
        for (columns, row) in rows.iter_mut().zip(&document.pods) {
            columns.push(cell(&row.units.join(" ")));
            columns.push(text(&row.stage));
            columns.push(text(&row.netdev));
            columns.push(text(&row.netns));
        }
    }
    let mut all = match rows.is_empty() {
        true => "no pod has a unit or an attachment\n".to_owned(),
        false => table(&header, &rows),
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
            rail: None,
            cni_ifname: None,
            network: "rdma".into(),
            container: "4c".into(),
            kind: Some("macvlan".into()),
            netdev: Some(netdev.into()),
            pci_address: None,
            rdma_devices: Vec::new(),
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
        NodeState::for_tests(daemon, kubelet, attachments)
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
