//! Prometheus metrics, made from a report when they are asked for.
//!
//! Every name begins with `rdma_device_plugin_`. Labels are resources, HCAs of this host, and pods
//! that hold units: what a person asks about, and bounded by what a node can have.

use std::sync::atomic::Ordering;

use node_server::metrics::{Family, Sample, counter, gauge, number};

use crate::kubelet::service::State;
use crate::node_socket;
use crate::report::{Pool, Report};
use pools::binding::alignment;
use pools::host_snapshot::SCAN;
use pools::words::word;

/// The metrics of a report, with the names of pods or without them.
pub(super) fn families(report: &Report, pods: bool) -> Vec<Family> {
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
    families
}

/// The labels of a pod, by namespace and name.
pub(super) fn pod_labels((namespace, name): (String, String)) -> [(&'static str, String); 2] {
    [("pod_namespace", namespace), ("pod_name", name)]
}

fn of_units(report: &Report, pods: bool) -> Vec<Family> {
    let mut units = Vec::new();
    let mut allocated = Vec::new();
    for pool in &report.pools {
        let resource = || ("resource", pool.resource.to_string());
        let counts = pool.units();
        for (health, count) in [("healthy", counts.healthy), ("unhealthy", counts.unhealthy)] {
            units.push((vec![resource(), ("health", health.into())], number(count)));
        }
        let mut by_pod = std::collections::BTreeMap::<_, u64>::new();
        for (_, holder) in report
            .allocated
            .iter()
            .flat_map(|held| held.of(&pool.resource))
        {
            let pod = pods.then(|| (holder.namespace.clone(), holder.pod.clone()));
            *by_pod.entry(pod).or_default() += 1;
        }
        allocated.extend(by_pod.into_iter().map(|(pod, count)| {
            let mut labels = vec![resource()];
            labels.extend(pod.into_iter().flat_map(pod_labels));
            (labels, number(count))
        }));
    }
    let free_aligned = report.bindings.free_aligned.iter();
    let free_aligned = free_aligned
        .map(|(resource, free)| (vec![("resource", resource.clone())], number(*free as u64)));
    let aligned = alignment::of_pods(&report.bindings).into_iter();
    let aligned = aligned.filter_map(|one| {
        let mut labels = vec![("resource", one.resource)];
        if pods {
            labels.extend(pod_labels((one.namespace, one.pod)));
        }
        Some((labels, one.score?))
    });
    // Without names of pods: the pod that is off worst.
    let mut alignment: Vec<Sample> = aligned.collect();
    alignment.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
    alignment.dedup_by(|a, b| a.0 == b.0);
    vec![
        gauge(
            "alignment",
            "Fraction of a pod's GPUs whose HCA reaches their memory directly, in late-binding \
             pools; by pod where pod names are served, else of the worst pod",
            alignment,
        ),
        gauge(
            "free_aligned_hcas",
            "HCAs of a late-binding pool that are free and near a GPU of the node",
            free_aligned.collect(),
        ),
        gauge("units", "Units of a resource, by health", units),
        gauge(
            "allocated_units",
            "Units that the kubelet allocated; by pod where pod names are served",
            allocated,
        ),
    ]
}

fn of_hcas(report: &Report) -> Vec<Family> {
    let mut reasons = Vec::new();
    for pool in &report.pools {
        for member in pool.snapshot.iter().flat_map(|snapshot| snapshot.members()) {
            for reason in member.health.reasons() {
                let labels = vec![
                    ("resource", pool.resource.to_string()),
                    ("hca", member.hca.id.to_string()),
                    ("rdma_device", member.hca.rdma_names().join(",")),
                    ("reason", word(reason)),
                ];
                reasons.push((labels, 1.0));
            }
        }
    }
    let missing = report.missing.iter().map(|hca| {
        let labels = vec![
            ("hca", hca.id.to_string()),
            ("rdma_device", hca.rdma_devices.join(",")),
        ];
        (labels, 1.0)
    });
    let changes = report.transitions.iter().map(|((resource, to), count)| {
        (
            vec![("resource", resource.to_string()), ("to", (*to).to_owned())],
            number(*count),
        )
    });
    let counts = |value: fn((usize, usize)) -> usize| {
        let count = |pool: &Pool| value(report.hca_counts(pool)) as u64;
        let pools = report.pools.iter();
        let sample = |pool: &Pool| {
            (
                vec![("resource", pool.resource.to_string())],
                number(count(pool)),
            )
        };
        pools.map(sample).collect()
    };
    vec![
        gauge(
            "hcas",
            "HCAs of a resource that are on this host",
            counts(|(here, _)| here),
        ),
        gauge(
            "expected_hcas",
            "HCAs of a resource that must be on this host: by the configuration, else those that were",
            counts(|(_, expected)| expected),
        ),
        gauge(
            "hca_unhealthy",
            "1 for each HCA that the kubelet may not allocate, with the reason",
            reasons,
        ),
        gauge(
            "hca_missing",
            "1 for each HCA that was on this host and is not",
            missing.collect(),
        ),
        counter(
            "health_transitions",
            "Changes of an HCA's health",
            changes.collect(),
        ),
    ]
}

fn of_sessions(report: &Report) -> Vec<Family> {
    let per_pool = |value: fn(&State) -> Option<f64>| -> Vec<Sample> {
        let pools = report.pools.iter().filter_map(|pool| {
            let labels = vec![("resource", pool.resource.to_string())];
            Some((labels, value(&pool.session.borrow())?))
        });
        pools.collect()
    };
    let allocations = report.pools.iter().flat_map(|pool| {
        let counts = &pool.allocations;
        let counts = [
            ("allocated", &counts.answered),
            ("refused", &counts.refused),
        ];
        counts.map(|(result, count)| {
            let resource = ("resource", pool.resource.to_string());
            let labels = vec![resource, ("result", result.to_owned())];
            (labels, number(count.load(Ordering::Relaxed)))
        })
    });
    vec![
        gauge(
            "registered",
            "1 while the kubelet has accepted the resource",
            per_pool(|state| Some(number(state.registered.into()))),
        ),
        counter(
            "registrations",
            "Registrations that the kubelet accepted",
            per_pool(|state| Some(number(state.registrations))),
        ),
        counter(
            "registration_failures",
            "Registrations that failed",
            per_pool(|state| Some(number(state.failures))),
        ),
        gauge(
            "stream_age_seconds",
            "Age of the present ListAndWatch stream",
            per_pool(|state| Some(state.streaming_since?.elapsed().as_secs_f64())),
        ),
        counter(
            "allocations",
            "Allocate requests for a container, by result",
            allocations.collect(),
        ),
    ]
}

fn of_daemon(report: &Report) -> Vec<Family> {
    let plain = |value: f64| vec![(Vec::new(), value)];
    let late = report.readers.late().into_iter();
    let late = late.filter(|late| late.what == SCAN);
    let late = late.map(|late| late.started.elapsed().as_secs_f64());
    let scans = report.scans.by_trigger.iter();
    let scans = scans.map(|(trigger, n)| (vec![("trigger", word(trigger))], number(*n)));
    vec![
        gauge(
            "config_accepted",
            "1 while the configuration file is in force, 0 while an older one is",
            plain(number(report.config.error.is_none().into())),
        ),
        counter("scans", "Scans of the host, by trigger", scans.collect()),
        counter(
            "scan_failures",
            "Scans of the host that failed",
            plain(number(report.scans.failures)),
        ),
        gauge(
            "scan_late_seconds",
            "Age of the oldest scan that is past its deadline, because a read does not end, else 0",
            plain(late.fold(0.0, f64::max)),
        ),
        gauge(
            "last_scan_duration_seconds",
            "Duration of the last scan",
            plain(report.scans.last.as_secs_f64()),
        ),
        gauge(
            "excluded_hcas",
            "HCAs that a pool's selectors match and that it does not offer",
            plain(number(report.excluded.len() as u64)),
        ),
        counter(
            "reclaimed_attachments",
            "Attachments of dead pods that were undone",
            plain(number(report.reclaim.attachments)),
        ),
        counter(
            "reclaimed_leases",
            "Leases of dead pods that were released",
            plain(number(report.reclaim.leases)),
        ),
        counter(
            "reclaim_failures",
            "Attachments of dead pods that could not be undone, and parts of a round that failed or are late",
            plain(number(report.reclaim.failures)),
        ),
    ]
}

fn of_node_socket(report: &Report) -> Vec<Family> {
    let listening = *report.node_socket.state.borrow() == node_socket::State::Listening;
    vec![gauge(
        "node_socket_listening",
        "1 while the daemon listens for the programs of the node",
        vec![(Vec::new(), number(listening.into()))],
    )]
}
