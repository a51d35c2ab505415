//! Prometheus metrics, made from a report when they are asked for.
//!
//! Every name begins with `rdma_device_plugin_`. Labels are resources, HCAs of this host, and pods
//! that hold units: what a person asks about, and bounded by what a node can have.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::node_socket;
use crate::report::Report;
use crate::snapshot::Health;

/// Content type of the text format of `OpenMetrics`.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The metrics of a report as text, with the names of pods or without them.
///
/// # Errors
/// Formatting into memory does not fail.
pub fn render(report: &Arc<Report>, pods: bool) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("rdma_device_plugin");
    registry.register_collector(Box::new(OfReport(report.clone(), pods)));
    let mut text = String::new();
    text::encode(&mut text, &registry)?;
    Ok(text)
}

#[derive(Debug)]
struct OfReport(Arc<Report>, bool);

/// One value with its labels.
type Sample = (Vec<(&'static str, String)>, f64);

impl Collector for OfReport {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for family in families(&self.0, self.1) {
            let kind = if family.counter {
                MetricType::Counter
            } else {
                MetricType::Gauge
            };
            let mut family_encoder =
                encoder.encode_descriptor(family.name, family.help, None, kind)?;
            for (labels, value) in &family.samples {
                if labels.is_empty() {
                    family.write(*value, family_encoder)?;
                    break;
                }
                family.write(*value, family_encoder.encode_family(labels)?)?;
            }
        }
        Ok(())
    }
}

/// A metric with all its samples.
struct Family {
    name: &'static str,
    help: &'static str,
    counter: bool,
    samples: Vec<Sample>,
}

impl Family {
    fn write(&self, value: f64, encoder: MetricEncoder<'_>) -> fmt::Result {
        if self.counter {
            ConstCounter::new(value).encode(encoder)
        } else {
            ConstGauge::new(value).encode(encoder)
        }
    }
}

fn gauge(name: &'static str, help: &'static str, samples: Vec<Sample>) -> Family {
    Family {
        name,
        help,
        counter: false,
        samples,
    }
}

fn counter(name: &'static str, help: &'static str, samples: Vec<Sample>) -> Family {
    Family {
        name,
        help,
        counter: true,
        samples,
    }
}

fn families(report: &Report, pods: bool) -> Vec<Family> {
    let mut families = vec![gauge(
        "build_info",
        "Version of the daemon, always 1",
        vec![(vec![("version", env!("CARGO_PKG_VERSION").into())], 1.0)],
    )];
    families.extend(of_units(report, pods));
    families.extend(of_hcas(report));
    families.extend(of_sessions(report));
    families.extend(of_daemon(report));
    families.extend(of_node_socket(report));
    families.retain(|family| !family.samples.is_empty());
    families
}

fn of_units(report: &Report, pods: bool) -> Vec<Family> {
    let mut units = Vec::new();
    let mut held = Vec::new();
    for pool in &report.pools {
        let resource = || ("resource", pool.resource.to_string());
        let counts = pool
            .snapshot
            .as_ref()
            .map(|one| one.count())
            .unwrap_or_default();
        for (health, count) in [("healthy", counts.healthy), ("unhealthy", counts.unhealthy)] {
            units.push((vec![resource(), ("health", health.into())], number(count)));
        }
        let mut by_pod = std::collections::BTreeMap::<_, u64>::new();
        for (_, holder) in report
            .holdings
            .iter()
            .flat_map(|held| held.of(&pool.resource))
        {
            let pod = pods.then(|| (holder.namespace.clone(), holder.pod.clone()));
            *by_pod.entry(pod).or_default() += 1;
        }
        held.extend(by_pod.into_iter().map(|(pod, count)| {
            let mut labels = vec![resource()];
            labels.extend(
                pod.into_iter()
                    .flat_map(|(namespace, pod)| [("namespace", namespace), ("pod", pod)]),
            );
            (labels, number(count))
        }));
    }
    vec![
        gauge("units", "Units of a resource, by health", units),
        gauge(
            "units_held",
            "Units that pods hold, as the kubelet says; by pod for those who may know",
            held,
        ),
    ]
}

fn of_hcas(report: &Report) -> Vec<Family> {
    let mut healthy = Vec::new();
    let mut reasons = Vec::new();
    for pool in &report.pools {
        for member in pool.snapshot.iter().flat_map(|snapshot| snapshot.members()) {
            let labels = || {
                vec![
                    ("resource", pool.resource.to_string()),
                    ("hca", member.id.to_string()),
                    ("rdma_device", member.rdma_devices.join(",")),
                ]
            };
            healthy.push((labels(), if member.health.is_healthy() { 1.0 } else { 0.0 }));
            if let Health::Unhealthy(ailment) = &member.health {
                let mut labels = labels();
                labels.push(("reason", ailment.word().into()));
                reasons.push((labels, 1.0));
            }
        }
    }
    let changes = report.transitions.iter().map(|((resource, to), count)| {
        (
            vec![("resource", resource.to_string()), ("to", (*to).to_owned())],
            number(*count),
        )
    });
    vec![
        gauge(
            "hca_healthy",
            "1 for an HCA that can be allocated, 0 for one that cannot",
            healthy,
        ),
        gauge(
            "hca_unhealthy",
            "Why an HCA cannot be allocated, 1 for the present reason",
            reasons,
        ),
        counter(
            "health_transitions",
            "Changes of an HCA's health",
            changes.collect(),
        ),
    ]
}

fn of_sessions(report: &Report) -> Vec<Family> {
    let mut registered = Vec::new();
    let mut registrations = Vec::new();
    let mut failures = Vec::new();
    let mut ages = Vec::new();
    let mut allocations = Vec::new();
    for pool in &report.pools {
        let resource = || ("resource", pool.resource.to_string());
        let state = pool.session.borrow();
        registered.push((vec![resource()], if state.registered { 1.0 } else { 0.0 }));
        registrations.push((vec![resource()], number(state.registrations)));
        failures.push((vec![resource()], number(state.failures)));
        if let Some(since) = state.streaming_since {
            ages.push((vec![resource()], since.elapsed().as_secs_f64()));
        }
        for (result, count) in [
            ("granted", &pool.allocations.granted),
            ("refused", &pool.allocations.refused),
        ] {
            let labels = vec![resource(), ("result", result.to_owned())];
            allocations.push((labels, number(count.load(Ordering::Relaxed))));
        }
    }
    vec![
        gauge(
            "registered",
            "1 while the kubelet has accepted the resource",
            registered,
        ),
        counter(
            "registrations",
            "Registrations that the kubelet accepted",
            registrations,
        ),
        counter(
            "registration_failures",
            "Registrations that failed",
            failures,
        ),
        gauge(
            "stream_age_seconds",
            "How long the kubelet has been listening",
            ages,
        ),
        counter(
            "allocations",
            "Containers that asked for units, by result",
            allocations,
        ),
    ]
}

fn of_daemon(report: &Report) -> Vec<Family> {
    let plain = |value: f64| vec![(Vec::new(), value)];
    let looks = report.looks.by_reason.iter();
    let looks = looks.map(|(reason, n)| (vec![("reason", reason.to_string())], number(*n)));
    let accepted = if report.config.error.is_none() {
        1.0
    } else {
        0.0
    };
    vec![
        gauge(
            "config_generation",
            "Configurations in force so far",
            plain(number(report.config.generation)),
        ),
        gauge(
            "config_accepted",
            "1 while the configuration file is in force as it is",
            plain(accepted),
        ),
        counter(
            "config_refused",
            "Configuration files that were refused",
            plain(number(report.config.refused)),
        ),
        counter(
            "looks",
            "Looks at the host, by what caused them",
            looks.collect(),
        ),
        counter(
            "look_failures",
            "Looks at the host that failed",
            plain(number(report.looks.failures)),
        ),
        gauge(
            "scan_late_seconds",
            "How long the present scan has been under way, once it is late; 0 if it is not",
            plain(
                report
                    .looks
                    .late
                    .as_ref()
                    .map_or(0.0, |late| late.started.elapsed().as_secs_f64()),
            ),
        ),
        gauge(
            "look_duration_seconds",
            "How long the last look took",
            plain(report.looks.last.as_secs_f64()),
        ),
        counter(
            "look_seconds",
            "How long all looks took",
            plain(report.looks.total.as_secs_f64()),
        ),
        gauge(
            "left_out",
            "HCAs that are chosen by a pool and not in it",
            plain(number(report.left_out.len() as u64)),
        ),
        counter(
            "reclaim_rounds",
            "Rounds of cleaning up behind pods",
            plain(number(report.reclaim.rounds)),
        ),
        counter(
            "reclaimed_attachments",
            "Attachments of dead pods that were undone",
            plain(number(report.reclaim.attachments)),
        ),
        counter(
            "reclaimed_leases",
            "Leases of dead pods that were freed beside their attachments",
            plain(number(report.reclaim.leases)),
        ),
        counter(
            "reclaim_failures",
            "Attachments of dead pods that could not be undone",
            plain(number(report.reclaim.failures)),
        ),
    ]
}

fn of_node_socket(report: &Report) -> Vec<Family> {
    let socket = &report.node_socket;
    if socket.path.is_none() {
        return Vec::new();
    }
    let listening = *socket.state.borrow() == node_socket::State::Listening;
    let results = socket.counts.all().into_iter();
    let results = results.map(|(result, count)| {
        let labels = vec![("result", result.as_str().to_owned())];
        (labels, number(count))
    });
    vec![
        gauge(
            "node_socket_listening",
            "1 while programs of the node can ask which pod holds what",
            vec![(Vec::new(), if listening { 1.0 } else { 0.0 })],
        ),
        counter(
            "node_socket_questions",
            "Questions of programs of the node, by result",
            results.collect(),
        ),
    ]
}

/// Exact up to 2^53, which no count here reaches.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
fn number(count: u64) -> f64 {
    count as f64
}
