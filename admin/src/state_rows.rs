//! Rows of a node's state: of this node by its daemon, of all nodes by the `RdmaNode`s of the API.

use node::table::cell;
use node_wire::rdma_node::{HcaState, NodeState, ResourceState};
use node_wire::status::NearGpu;

use crate::output::optional;

/// Columns of [`resources`].
pub(crate) const RESOURCES: &str = "RESOURCE  MODE  NICS  EXPECTED  HEALTHY  UNITS  ALLOCATED";

/// One for each resource.
pub(crate) fn resources(state: &NodeState) -> Vec<Vec<String>> {
    state.resources.iter().map(resource).collect()
}

fn resource(one: &ResourceState) -> Vec<String> {
    // The kubelet, where it is the only one to answer, knows units alone.
    let hcas = |count: usize| optional((!one.mode.is_empty()).then_some(count));
    let units = match (one.healthy_units, one.units) {
        (healthy, all) if healthy == all => all.to_string(),
        (healthy, all) => format!("{healthy} of {all}"),
    };
    vec![
        cell(&one.name),
        cell(&one.mode),
        hcas(one.nics),
        hcas(one.expected),
        hcas(one.healthy),
        units,
        one.allocated_units.to_string(),
    ]
}

/// Columns of [`hcas`].
pub(crate) const HCAS: &str =
    "HCA  DEVICE  NETDEV  NUMA  RAIL  LINK  RATE  STATE  RESOURCE  POD  HEALTH";

/// One for each HCA, also for those that are missing.
pub(crate) fn hcas(state: &NodeState) -> Vec<Vec<String>> {
    let missing = state.missing.iter().map(|one| {
        let unknown = || "-".to_owned();
        vec![
            cell(&one.id),
            cell(&one.rdma_devices.join(" ")),
            unknown(),
            unknown(),
            optional(one.rail),
            unknown(),
            unknown(),
            unknown(),
            optional(one.resource.as_deref()),
            unknown(),
            cell(&format!("missing since {}", one.since)),
        ]
    });
    state.hcas.iter().map(hca).chain(missing).collect()
}

fn hca(one: &HcaState) -> Vec<String> {
    let hardware = &one.hardware;
    let ports = &hardware.ports;
    let each = |values: Vec<&str>| {
        let mut values = values;
        values.dedup();
        cell(&values.join(" "))
    };
    let health = match (one.healthy, &one.message) {
        (_, Some(why)) => why,
        (Some(_), None) => "healthy",
        (None, None) => "",
    };
    vec![
        cell(&hardware.id),
        cell(&hardware.rdma_devices.join(" ")),
        each(
            ports
                .iter()
                .filter_map(|port| port.netdev.as_deref())
                .collect(),
        ),
        optional(hardware.numa_node),
        optional(hardware.rail),
        each(ports.iter().map(|port| &*port.link_layer).collect()),
        rate(one),
        each(ports.iter().map(|port| &*port.state).collect()),
        optional(one.resource.as_deref()),
        optional(one.pod.as_deref()),
        cell(health),
    ]
}

/// Of the active ports together; of one in a pod, what it was before.
fn rate(one: &HcaState) -> String {
    let of = |state: &str| -> u64 {
        let ports = one.hardware.ports.iter().filter(|port| port.state == state);
        ports.filter_map(|port| port.rate_mbps).map(u64::from).sum()
    };
    let mbps = [of("ACTIVE"), of("UNKNOWN")]
        .into_iter()
        .find(|mbps| *mbps > 0);
    optional(mbps.map(|mbps| format!("{} Gb/s", mbps / 1000)))
}

/// Columns of [`topology`].
pub(crate) const TOPOLOGY: &str = "HCA  DEVICE  NUMA  RAIL  NEAREST GPUS  POD";

/// One for each HCA, with the GPUs that are nearest to it.
pub(crate) fn topology(state: &NodeState) -> Vec<Vec<String>> {
    let row = |one: &HcaState| {
        let hardware = &one.hardware;
        vec![
            cell(&hardware.id),
            cell(&hardware.rdma_devices.join(" ")),
            optional(hardware.numa_node),
            optional(hardware.rail),
            cell(&gpus(&hardware.gpus)),
            optional(one.pod.as_deref()),
        ]
    };
    state.hcas.iter().map(row).collect()
}

/// GPUs by their distance, as `PIX 0000:8f:00.0 0000:90:00.0`.
pub(crate) fn gpus(near: &[NearGpu]) -> String {
    let mut words: Vec<&str> = Vec::new();
    let mut class = "";
    for one in near {
        if one.class != class {
            class = &one.class;
            words.push(class);
        }
        words.push(&one.gpu);
    }
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use node_wire::rdma_node::MissingState;
    use node_wire::status::{HostHca, HostPort};

    use super::*;

    fn port(state: &str) -> HostPort {
        HostPort {
            state: state.into(),
            link_layer: "ether".into(),
            rate_mbps: Some(400_000),
            ..HostPort::default()
        }
    }

    #[test]
    fn the_rate_is_that_of_ports_that_can_be_used() {
        for (ports, expected) in [
            (vec![port("ACTIVE"), port("ACTIVE")], "800 Gb/s"),
            (vec![port("ACTIVE"), port("DOWN")], "400 Gb/s"),
            (vec![port("DOWN")], "-"),
            (vec![port("UNKNOWN")], "400 Gb/s"),
        ] {
            let hardware = HostHca {
                ports,
                ..HostHca::default()
            };
            let hca = HcaState {
                hardware,
                ..HcaState::default()
            };
            assert_eq!(rate(&hca), expected);
        }
    }

    #[test]
    fn an_hca_that_is_missing_is_a_row_with_its_time() {
        let missing = MissingState {
            id: "0000:9d:00.0".into(),
            since: "2026-01-01T09:12:00Z".into(),
            rail: Some(3),
            ..MissingState::default()
        };
        let state = NodeState {
            missing: vec![missing],
            ..NodeState::default()
        };
        let rows = hcas(&state);
        assert_eq!(rows[0].len(), HCAS.split("  ").count());
        assert_eq!(
            (&*rows[0][4], &*rows[0][10]),
            ("3", "missing since 2026-01-01T09:12:00Z")
        );
    }

    #[test]
    fn gpus_are_listed_by_their_distance() {
        let near = |gpu: &str, class: &str| NearGpu {
            gpu: gpu.into(),
            class: class.into(),
        };
        let all = [near("8f", "PIX"), near("90", "PIX"), near("ce", "SYS")];
        assert_eq!(gpus(&all), "PIX 8f 90 SYS ce");
        assert_eq!(gpus(&[]), "");
    }
}
