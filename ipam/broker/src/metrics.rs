//! Counts of the broker, and their text for Prometheus.

use std::collections::BTreeMap;
use std::fmt;

use ipam::block::AddressSpace;
use node_wire::Failure;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::api::transport::Requests;

/// Content type of the text format of `OpenMetrics`.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

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

    pub fn render(&self, requests: Requests) -> Result<String, fmt::Error> {
        let mut registry = Registry::with_prefix("rdma_ipam_broker");
        let metrics = self.clone();
        registry.register_collector(Box::new(Of { metrics, requests }));
        let mut text = String::new();
        text::encode(&mut text, &registry)?;
        Ok(text)
    }
}

#[derive(Debug)]
struct Of {
    metrics: Metrics,
    requests: Requests,
}

type Sample = (Vec<(&'static str, String)>, f64);

impl Of {
    fn families(&self) -> Vec<(&'static str, &'static str, bool, Vec<Sample>)> {
        let of_space = |value: fn(&SpaceSummary) -> u64| -> Vec<Sample> {
            let spaces = self.metrics.spaces.iter();
            spaces
                .map(|(space, summary)| {
                    let name = space.network_name.clone().unwrap_or_default();
                    let labels = vec![("store", space.store.clone()), ("network_name", name)];
                    (labels, number(value(summary)))
                })
                .collect()
        };
        let claims = self.metrics.claims.iter();
        let claims =
            claims.map(|(result, count)| (vec![("result", (*result).to_owned())], number(*count)));
        let requests = self.requests.iter().map(|((verb, code), count)| {
            let labels = vec![("verb", verb.clone()), ("code", code.to_string())];
            (labels, number(*count))
        });
        let watching = f64::from(u8::from(self.metrics.interrupted.is_none()));
        let watching = vec![(Vec::new(), watching)];
        vec![
            (
                "blocks",
                "Blocks of addresses that the node has",
                false,
                of_space(|of| of.blocks),
            ),
            (
                "addresses",
                "Addresses of these blocks",
                false,
                of_space(|of| of.addresses),
            ),
            (
                "used_addresses",
                "Leases in these blocks",
                false,
                of_space(|of| of.used),
            ),
            (
                "conflicts",
                "Leases in blocks that the node lost: another node may give the same addresses",
                false,
                of_space(|of| of.conflicts),
            ),
            (
                "ranges_without_free_block",
                "Ranges in use of which the node wants another block, and none is free",
                false,
                of_space(|of| of.ranges_without_free_block),
            ),
            (
                "claims",
                "Questions of ADDs for a block, by result",
                true,
                claims.collect(),
            ),
            (
                "api_requests",
                "Requests to the Kubernetes API; code 0 means no answer",
                true,
                requests.collect(),
            ),
            (
                "api_watched",
                "1 while the node's blocks are watched in the Kubernetes API",
                false,
                watching,
            ),
        ]
    }
}

impl Collector for Of {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for (name, help, counter, samples) in self.families() {
            if samples.is_empty() {
                continue;
            }
            let kind = match counter {
                true => MetricType::Counter,
                false => MetricType::Gauge,
            };
            let mut family = encoder.encode_descriptor(name, help, None, kind)?;
            for (labels, value) in &samples {
                if labels.is_empty() {
                    write(counter, *value, family)?;
                    break;
                }
                write(counter, *value, family.encode_family(labels)?)?;
            }
        }
        Ok(())
    }
}

fn write(counter: bool, value: f64, encoder: MetricEncoder<'_>) -> fmt::Result {
    match counter {
        true => ConstCounter::new(value).encode(encoder),
        false => ConstGauge::new(value).encode(encoder),
    }
}

/// Exact up to 2^53, which no count here reaches.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
fn number(count: u64) -> f64 {
    count as f64
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
        let text = metrics.render(requests).unwrap();
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
