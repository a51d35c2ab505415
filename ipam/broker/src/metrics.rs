//! Counts of the broker, and their text for Prometheus.

use std::collections::BTreeMap;

use ipam::block::AddressSpace;
use node_server::metrics::{Sample, counter, gauge, number, text};
use node_wire::Failure;

use crate::api::transport::Requests;

/// One address space on this node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SpaceSummary {
    /// Blocks that the node has.
    pub blocks: u64,
    pub addresses: u64,
    pub used: u64,
    /// Leases in blocks that the node lost.
    pub conflicts: u64,
    /// Ranges that are nearly full: the node's own blocks are used for three quarters, and no other
    /// one is free.
    pub ranges_without_free_block: u64,
}

#[derive(Debug, Clone, Default)]
pub struct Metrics {
    spaces: BTreeMap<AddressSpace, SpaceSummary>,
    claims: BTreeMap<&'static str, u64>,
    /// Why the API is not watched, while it is not.
    pub interrupted: Option<String>,
}

impl Metrics {
    /// Of a broker that has not reached the API yet.
    #[must_use]
    pub fn new() -> Self {
        Self {
            interrupted: Some("not read yet".to_owned()),
            ..Self::default()
        }
    }

    /// Replaces what is said of a space.
    pub fn space(&mut self, space: &AddressSpace, summary: SpaceSummary) {
        self.spaces.insert(space.clone(), summary);
    }

    /// Says nothing more of a space.
    pub fn forget(&mut self, space: &AddressSpace) {
        self.spaces.remove(space);
    }

    /// Counts a question by its result.
    pub fn claim<T>(&mut self, result: &Result<T, Failure>) {
        let result = match result {
            Ok(_) => "granted",
            Err(failure) => match failure.kind {
                node_wire::FailureKind::Exhausted => "exhausted",
                node_wire::FailureKind::HeldByAnotherNode => "held_by_another_node",
                node_wire::FailureKind::ClusterUnavailable => "cluster_unavailable",
                node_wire::FailureKind::Mismatch => "mismatch",
                _ => "refused",
            },
        };
        *self.claims.entry(result).or_default() += 1;
    }

    #[must_use]
    pub fn render(&self, requests: &Requests) -> String {
        let of_space = |value: fn(&SpaceSummary) -> u64| -> Vec<Sample> {
            let spaces = self.spaces.iter();
            spaces
                .map(|(space, summary)| {
                    let name = space.network_name.clone().unwrap_or_default();
                    let labels = vec![("store", space.store.clone()), ("network_name", name)];
                    (labels, number(value(summary)))
                })
                .collect()
        };
        let claims = self.claims.iter();
        let claims =
            claims.map(|(result, count)| (vec![("result", (*result).to_owned())], number(*count)));
        let requests = requests.iter().map(|((verb, code), count)| {
            let labels = vec![("verb", verb.clone()), ("code", code.to_string())];
            (labels, number(*count))
        });
        let families = vec![
            gauge(
                "blocks",
                "Blocks of addresses that the node has",
                of_space(|of| of.blocks),
            ),
            gauge(
                "addresses",
                "Addresses of these blocks",
                of_space(|of| of.addresses),
            ),
            gauge(
                "used_addresses",
                "Leases in these blocks",
                of_space(|of| of.used),
            ),
            gauge(
                "conflicts",
                "Leases in blocks that the node lost: another node may give the same addresses",
                of_space(|of| of.conflicts),
            ),
            gauge(
                "ranges_without_free_block",
                "Ranges in use of which the node wants another block, and none is free",
                of_space(|of| of.ranges_without_free_block),
            ),
            counter(
                "claims",
                "Questions of ADDs for a block, by result",
                claims.collect(),
            ),
            counter(
                "api_requests",
                "Requests to the Kubernetes API; code 0 means no answer",
                requests.collect(),
            ),
            gauge(
                "api_watched",
                "1 while the node's blocks are watched in the Kubernetes API",
                vec![(Vec::new(), number(self.interrupted.is_none().into()))],
            ),
        ];
        text("rdma_ipam_broker", families)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use node_wire::FailureKind;

    #[test]
    fn metrics_have_their_documented_names() {
        let mut metrics = Metrics::default();
        let space = AddressSpace::new("default", Some("blue"));
        metrics.space(
            &space,
            SpaceSummary {
                blocks: 2,
                addresses: 32,
                used: 5,
                conflicts: 1,
                ranges_without_free_block: 0,
            },
        );
        metrics.claim(&Ok(()));
        let failure = Failure::new(FailureKind::Exhausted, "full");
        metrics.claim::<()>(&Err(failure));
        let requests = Requests::from([(("POST".to_owned(), 201), 3)]);
        let text = metrics.render(&requests);
        for line in [
            "rdma_ipam_broker_blocks{store=\"default\",network_name=\"blue\"} 2",
            "rdma_ipam_broker_conflicts{store=\"default\",network_name=\"blue\"} 1",
            "rdma_ipam_broker_claims_total{result=\"exhausted\"} 1",
            "rdma_ipam_broker_api_requests_total{verb=\"POST\",code=\"201\"} 3",
            "rdma_ipam_broker_api_watched 1",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
