//! `rdmactl pods`: which pod has which HCAs, GPUs, interfaces and addresses.

use std::collections::BTreeSet;

use attachment::listing::Presence;
use attachment::node::now;
use clap::Args;
use hca::UnitId;
use node::table::{age, cell};
use node_wire::status::ServedGpu;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::findings::some_of;
use crate::global::Global;
use crate::node_state::{Answers, Sources};
use crate::output::{Ended, Exit, complain, optional, page, table};

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
pub(crate) struct PodsDocument {
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
    /// The pod's GPUs that this HCA was bound to serve, with their distance.
    pub gpus: Vec<String>,
    /// Whether a nearer HCA exists for one of the pod's GPUs.
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
    /// Whether the pod has the interface, by the kernel: `present`, `gone` or `unknown`; `None` where it
    /// should not.
    pub interface_state: Option<String>,
    /// Unix seconds of the ADD.
    pub created: Option<u64>,
    /// Seconds since the ADD by the node's clock; `None` where the clock says that it is still to come.
    pub age_seconds: Option<u64>,
}

impl Pods {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        let state = self.sources.read(global);
        let pods = rows(&state, now());
        let notes = state.gaps();
        let document = PodsDocument { pods, notes };
        global.say(json!(document), || text(&document, global.is_wide()));
        let faults = state.faults();
        faults.iter().for_each(|fault| complain(fault));
        Ok(Exit::good_if(faults.is_empty()))
    }
}

/// Units, bindings and attachments, joined by what identifies each: a unit and its binding by pod and
/// slot while the pod has the slot, an interface and a unit by pod and HCA. `now` in Unix seconds.
fn rows(state: &Answers, now: u64) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    let misaligned = state.misaligned();
    let served = |gpu: &ServedGpu| format!("{} {}", gpu.gpu, gpu.class);
    for held in state.held() {
        let pod = format!("{}/{}", held.namespace, held.pod);
        for id in held.ids {
            let mut bindings = state.daemon.iter().flat_map(|daemon| &daemon.bindings);
            let whose = (&held.resource, &id, &held.namespace, &held.pod);
            let bound = bindings.find(|one| {
                (&one.resource, &one.unit, &one.pod.namespace, &one.pod.name) == whose
                    && one.ended.is_none()
            });
            let unit = id.parse::<UnitId>().ok();
            let named = unit.and_then(|unit| Some(unit.hca()?.to_string()));
            let mut row = Row {
                pod: Some(pod.clone()),
                container: Some(held.container.clone()),
                resource: Some(held.resource.clone()),
                hca: bound.map(|bound| bound.hca.clone()).or(named),
                stage: bound.map(|bound| bound.stage.clone()),
                gpus: bound.map_or_else(Vec::new, |bound| bound.gpus.iter().map(served).collect()),
                misaligned: misaligned.contains_key(&pod),
                ..Row::default()
            };
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
        let hcas = state.hcas(attachment);
        // The kubelet lists a pod that lives: one of that name whose namespace is gone is another one.
        let is_gone = attachment.netns_state == GONE;
        let is_free = |row: &Row| {
            !is_gone
                && row.pod.is_some()
                && row.pod == attachment.pod
                && row.interface.is_none()
                && match &row.hca {
                    Some(hca) => hcas.contains(hca),
                    None => is_of_pool(state, row, &hcas),
                }
        };
        let mut own = Row {
            pod: attachment.pod.clone(),
            ..Row::default()
        };
        // A unit that names the HCA comes before one that stands for all of its pool.
        let names_hca = |row: &Row| is_free(row) && row.hca.is_some();
        let free = rows.iter().position(names_hca);
        let free = free.or_else(|| rows.iter().position(is_free));
        let row = free.and_then(|index| rows.get_mut(index));
        let is_own = row.is_none();
        let row = row.unwrap_or(&mut own);
        if row.hca.is_none() && !hcas.is_empty() {
            row.hca = Some(hcas.into_iter().collect::<Vec<_>>().join(" "));
        }
        row.interface = Some(attachment.interface.clone());
        row.network = Some(attachment.network.clone());
        row.sandbox = Some(attachment.container.clone());
        row.kind.clone_from(&attachment.kind);
        row.netdev.clone_from(&attachment.netdev);
        row.addresses = state.addresses(attachment);
        row.netns = Some(attachment.netns.clone());
        row.netns_state = Some(attachment.netns_state.to_owned());
        let state = |presence: &Presence| match presence {
            Presence::Present => "present".to_owned(),
            Presence::Gone => GONE.to_owned(),
            Presence::Unknown(_) => UNKNOWN.to_owned(),
        };
        row.interface_state = attachment.presence.as_ref().map(state);
        row.created = Some(attachment.created);
        row.age_seconds = now.checked_sub(attachment.created);
        rows.extend(is_own.then_some(own));
    }
    rows.sort_by(|a, b| (&a.pod, &a.interface, &a.hca).cmp(&(&b.pod, &b.interface, &b.hca)));
    rows
}

/// Whether a row's units each stand for all HCAs of their pool, and one of these is in it.
fn is_of_pool(state: &Answers, row: &Row, hcas: &BTreeSet<String>) -> bool {
    let stands_for_all = |unit: &String| matches!(unit.parse::<UnitId>(), Ok(UnitId::Pool { .. }));
    let mut pools = state.daemon.iter().flat_map(|daemon| &daemon.pools);
    row.units.iter().all(stands_for_all)
        && pools.any(|pool| {
            Some(&pool.resource) == row.resource.as_ref()
                && pool.hcas.iter().any(|hca| hcas.contains(&hca.id))
        })
}

/// States of a namespace and of an interface.
const GONE: &str = "gone";
const UNKNOWN: &str = "unknown";

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
    interface += match (row.netns_state.as_deref(), row.interface_state.as_deref()) {
        (Some(GONE), _) => " (orphaned)",
        (_, Some(GONE)) => " (gone from the pod)",
        (_, Some(UNKNOWN)) => " (unknown)",
        _ => "",
    };
    let since = |_| age(row.age_seconds.map_or(-1, u64::cast_signed));
    vec![
        optional(row.pod.as_deref()),
        optional(row.container.as_deref()),
        optional(row.resource.as_deref()),
        cell(&hca),
        cell(gpus.trim()),
        cell(&interface),
        optional(row.kind.as_deref()),
        cell(&row.addresses.join(" ")),
        optional(row.created.map(since)),
    ]
}

/// Units in a cell.
const MOST_UNITS: usize = 4;

fn text(document: &PodsDocument, is_wide: bool) -> String {
    let mut header = HEADER.to_owned();
    let mut rows: Vec<Vec<String>> = document.pods.iter().map(columns).collect();
    if is_wide {
        header += "  UNITS  STAGE  NETWORK  NETDEV  NETNS";
        for (columns, row) in rows.iter_mut().zip(&document.pods) {
            columns.push(cell(&some_of(&row.units, MOST_UNITS, " ")));
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
    let table = match rows.is_empty() {
        true => "no pod has a unit or an attachment\n".to_owned(),
        false => table(&header, rows),
    };
    page(vec![table], &document.notes)
}

#[cfg(test)]
mod tests {
    use attachment::listing::Attachment;
    use attachment::node_files::Files;
    use ipam::lease::Lease;
    use kubelet_api::client::{Devices, Held};
    use node_wire::status::{BindingStatus, DaemonStatus, HcaStatus, PoolStatus};

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
            ifname: interface.into(),
            lease_numbers: None,
            hcas: BTreeSet::new(),
            netns: "/proc/7/ns/net".into(),
            netns_state: "alive",
            presence: Some(Presence::Present),
            created: 0,
            warning: None,
        }
    }

    fn state(held: Vec<Held>, attachments: Vec<Attachment>) -> Answers {
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
        Answers::new(Ok(daemon), Ok(kubelet), files)
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
        let found: Vec<_> = rows(&state, 0)
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
        let rows = rows(&state, 0);
        assert_eq!(rows.len(), 2, "{rows:?}");
        assert_eq!((&rows[0].interface, &rows[1].resource), (&None, &None));
    }

    #[test]
    fn shares_of_one_hca_in_a_container_are_one_line() {
        let tag = hca::unit::PoolTag::of("rdma/a");
        let ids = [0, 1].map(|share| format!("0000:3b:00.0_{tag}_{share}"));
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        let rows = rows(&state(vec![held("a", "rdma/a", &ids)], Vec::new()), 0);
        assert_eq!(rows.len(), 1, "{rows:?}");
        assert_eq!(rows[0].units.len(), 2);
    }

    fn lease(ifname: &str, part: usize, address: &str) -> Lease {
        let lease = json!({
            "network": "rdma", "container": "4c", "interface": ifname, "node": "n1",
            "address": address, "prefix": 24, "range": "10.0.0.0/16", "store": "default",
            "part": part, "created": "2026-01-01T00:00:00Z",
        });
        serde_json::from_value(lease).unwrap()
    }

    fn binding(uid: &str, hca: &str, ended: Option<&str>) -> BindingStatus {
        BindingStatus {
            resource: "rdma/a".into(),
            unit: slot(),
            hca: hca.into(),
            pod: node_wire::Pod {
                namespace: "ml".into(),
                name: "a".into(),
                uid: Some(uid.into()),
            },
            container: "worker".into(),
            stage: "attached".into(),
            rail: 0,
            gpus: vec![ServedGpu {
                gpu: "0000:8f:00.0".into(),
                class: "PIX".into(),
                peer_to_peer: true,
                aligned: true,
            }],
            ended: ended.map(str::to_owned),
        }
    }

    fn slot() -> String {
        let pool = hca::unit::PoolTag::of("rdma/a");
        UnitId::Slot { pool, slot: 0 }.to_string()
    }

    #[test]
    fn each_interface_of_all_devices_has_its_own_addresses() {
        let interface = |name: &str, netdev: &str, numbers: &[usize]| Attachment {
            ifname: "net1".into(),
            lease_numbers: Some(numbers.iter().copied().collect()),
            ..attachment("a", name, netdev)
        };
        let mut state = state(
            Vec::new(),
            vec![
                interface("rail0", "ens1", &[0, 1]),
                interface("rail1", "ens2", &[2]),
            ],
        );
        let other_network = Lease {
            holder: ipam::lease::Holder {
                network: "other".into(),
                ..lease("net1", 0, "10.0.0.9").holder
            },
            ..lease("net1", 0, "10.0.0.9")
        };
        state.leases = Ok(vec![
            lease("net1", 0, "10.0.0.1"),
            lease("net1", 1, "10.0.1.1"),
            lease("net1", 2, "10.0.2.1"),
            lease("net2", 0, "10.0.3.1"),
            other_network,
        ]);
        let found: Vec<_> = rows(&state, 0).iter().map(columns).collect();
        assert_eq!(found[0][7], "10.0.0.1/24 10.0.1.1/24");
        assert_eq!(found[1][7], "10.0.2.1/24");
    }

    /// Every column, of a pod that has its predecessor's name and slot.
    #[test]
    fn a_late_pod_shows_its_own_hca_not_the_dead_pods() {
        let of = |bindings: Vec<BindingStatus>| {
            let attached = Attachment {
                hcas: ["0000:5e:00.0".to_owned()].into(),
                created: 100,
                ..attachment("a", "net1", "ens2")
            };
            let dead = Attachment {
                hcas: ["0000:3b:00.0".to_owned()].into(),
                netns_state: GONE,
                presence: None,
                created: 100,
                container: "dead".into(),
                ..attachment("a", "net1", "ens1")
            };
            let mut state = state(vec![held("a", "rdma/a", &[&slot()])], vec![dead, attached]);
            state.leases = Ok(vec![lease("net1", 0, "10.0.0.1")]);
            if let Ok(daemon) = &mut state.daemon {
                daemon.bindings = bindings;
            }
            let document = PodsDocument {
                pods: rows(&state, 130),
                notes: Vec::new(),
            };
            text(&document, true)
        };
        let ended = binding("u1", "0000:3b:00.0", Some("the slot is another pod's"));
        let slot = slot();
        assert_eq!(
            of(vec![ended.clone(), binding("u2", "0000:5e:00.0", None)]),
            format!(
                "POD   CONTAINER  RESOURCE  HCA           GPUS              INTERFACE        KIND     ADDRESSES    AGE  UNITS            STAGE     NETWORK  NETDEV  NETNS\n\
                 ml/a  -          -         0000:3b:00.0  -                 net1 (orphaned)  macvlan  -            30s  -                -         rdma     ens1    /proc/7/ns/net (gone)\n\
                 ml/a  worker     rdma/a    0000:5e:00.0  0000:8f:00.0 PIX  net1             macvlan  10.0.0.1/24  30s  {slot}  attached  rdma     ens2    /proc/7/ns/net (alive)\n"
            )
        );
        let unbound = of(vec![ended]);
        let line = unbound
            .lines()
            .find(|line| line.contains("worker"))
            .unwrap();
        assert!(
            line.contains("1 unit") && !line.contains("0000:"),
            "{unbound}"
        );
    }

    #[test]
    fn an_interface_joins_a_unit_of_the_whole_pool_only_on_its_hcas() {
        let pool = hca::unit::PoolTag::of("rdma/a");
        let unit = UnitId::Pool { pool, share: 0 }.to_string();
        let of = |netdev: &str| {
            let held = vec![held("a", "rdma/a", &[&unit])];
            rows(&state(held, vec![attachment("a", "net1", netdev)]), 0)
        };
        assert_eq!(of("ens2").len(), 1);
        assert_eq!(of("eth9").len(), 2);
    }

    #[test]
    fn an_interface_that_is_not_in_its_pod_is_marked() {
        let of = |presence| {
            let one = Attachment {
                presence: Some(presence),
                ..attachment("a", "net1", "ens2")
            };
            let state = state(Vec::new(), vec![one]);
            (columns(&rows(&state, 0)[0])[5].clone(), state.gaps())
        };
        let (cell, notes) = of(Presence::Gone);
        assert_eq!(cell, "net1 (gone from the pod)");
        assert!(notes[0].starts_with("ml/a: net1 is gone from the pod"));
        let (cell, notes) = of(Presence::Unknown("it is locked".into()));
        assert_eq!(cell, "net1 (unknown)");
        let note =
            "whether these are still in their pods is unknown, because it is locked: ml/a (net1)";
        assert_eq!(notes, [note]);
        assert_eq!(of(Presence::Present), ("net1".into(), Vec::new()));
    }

    #[test]
    fn an_age_in_the_future_is_unknown() {
        let future = Attachment {
            created: 100,
            ..attachment("a", "net1", "ens1")
        };
        let rows = rows(&state(Vec::new(), vec![future]), 99);
        assert_eq!(columns(&rows[0])[8], "unknown");
    }
}
