//! Metrics of what takes time to read: counters of ports and of CNI calls, and how full address pools are.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::time::Duration;

use hca::Host;
use ipam::plugin::Plugin;
use ipam::pool_usage::usage;
use node::calls::{self, BOUNDS, COMMANDS, Calls, Code, Command};
use node::policy::StoreKind;
use node_server::metrics::{Family, Histogram, Labels, Sample, counter, gauge, histogram, number};
use tokio_util::sync::CancellationToken;

use super::metrics::pod_labels;
use crate::node_paths::NodePaths;
use crate::reader::{Reader, Readers};

/// Time between two readings of what is on this node.
const INTERVAL: Duration = Duration::from_secs(30);
/// How long a reading may take before it is called late.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// The programs that count their calls.
const PROGRAMS: [&str; 2] = ["rdma-netdev", "rdma-ipam"];

/// Counters of ports that say something about the fabric
/// (`Documentation/ABI/stable/sysfs-class-infiniband` and the drivers' `hw_counters`). Which of them a port
/// has depends on its driver. Here: errors on the wire, and retries that follow from them.
const ERRORS: [&str; 11] = [
    "counters/symbol_error",
    "counters/link_downed",
    "counters/port_rcv_errors",
    "counters/link_error_recovery",
    "hw_counters/out_of_sequence",
    "hw_counters/packet_seq_err",
    "hw_counters/local_ack_timeout_err",
    "hw_counters/rnr_nak_retry_err",
    "hw_counters/implied_nak_seq_err",
    "hw_counters/roce_adp_retrans",
    "hw_counters/rx_icrc_encapsulated",
];
/// Drops for want of buffers, and notifications of congestion.
const CONGESTION: [&str; 3] = [
    "hw_counters/out_of_buffer",
    "hw_counters/np_cnp_sent",
    "hw_counters/rp_cnp_handled",
];

/// Of each direction, a label's value, the file of the kernel's counter with what one of its units is in those of
/// the metric, and that of drivers that have none of the kernel's.
type Traffic = [(&'static str, (&'static str, f64), &'static str); 2];
const BYTES: Traffic = [
    (
        "received",
        ("counters/port_rcv_data", WORD_BYTES),
        "hw_counters/rx_bytes",
    ),
    (
        "transmitted",
        ("counters/port_xmit_data", WORD_BYTES),
        "hw_counters/tx_bytes",
    ),
];
const PACKETS: Traffic = [
    (
        "received",
        ("counters/port_rcv_packets", 1.0),
        "hw_counters/rx_pkts",
    ),
    (
        "transmitted",
        ("counters/port_xmit_packets", 1.0),
        "hw_counters/tx_pkts",
    ),
];
const WORD_BYTES: f64 = 4.0;
const DIRECTION: &str = "direction";
/// RDMA devices with the pod that has each for itself: namespace and name.
pub(crate) type Holders = BTreeMap<String, (String, String)>;

type Read = fn(&NodePaths) -> Vec<Family>;

/// What is read: the name of the thread, what it is for people, and how.
const SOURCES: [(&str, &str, Read); 3] = [
    ("ports", "the measurement of port counters", ports),
    ("calls", "the measurement of CNI calls", calls),
    ("pools", "the measurement of address pools", pools),
];

/// Reads what is served.
#[derive(Debug)]
pub(crate) struct Measurements([Reader<Vec<Family>>; 3]);

impl Measurements {
    pub(crate) fn new(readers: &Readers) -> Self {
        Self(SOURCES.map(|(thread, what, _)| readers.reader(thread, what, READ_TIMEOUT)))
    }

    /// What was read last; nothing before the first time. `holders` has the pods that are named, by RDMA device.
    pub(super) fn families(&self, holders: &Holders) -> Vec<Family> {
        let read = self.0.iter().filter_map(Reader::last);
        let families = read.flat_map(|last| last.value);
        families.map(|family| attributed(family, holders)).collect()
    }

    /// Reads every now and then until `stop`. What has not ended is not started again.
    pub(crate) async fn keep_reading(
        self: Arc<Self>,
        paths: Arc<NodePaths>,
        stop: CancellationToken,
    ) {
        let mut ticks = tokio::time::interval(INTERVAL);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            for (reader, (_, _, read)) in self.0.iter().zip(SOURCES) {
                let paths = paths.clone();
                reader.start(move || read(&paths));
            }
        }
    }
}

/// Traffic with the pod that has its device for itself. Errors stay one series while pods come and go: alerts
/// ask how they grow.
fn attributed(family: Family, holders: &Holders) -> Family {
    family.with_labels(|labels| {
        let value = |name| labels.iter().find(|(label, _)| *label == name);
        let device = value(DIRECTION).and(value("rdma_device"));
        let pod = device.and_then(|(_, device)| holders.get(device));
        pod.cloned().map(pod_labels).into_iter().flatten().collect()
    })
}

/// The driver may ask the firmware for each counter: reading takes milliseconds.
fn ports(paths: &NodePaths) -> Vec<Family> {
    let host = &paths.host;
    let inventory = hca::inventory(host).inspect_err(|error| {
        tracing::debug!(%error, "counters of ports are not read");
    });
    let devices = inventory.iter().flat_map(hca::Inventory::rdma_devices);
    let ports: Vec<(&str, u32)> = devices
        .flat_map(|one| one.ports.iter().map(|port| (&*one.name, port.number)))
        .collect();
    let sample = |(device, port): (&str, u32), label, value: &str, count| {
        let labels = vec![
            ("rdma_device", device.to_owned()),
            ("port", port.to_string()),
            (label, value.to_owned()),
        ];
        (labels, count)
    };
    let counted = |counters: &[&'static str]| -> Vec<Sample> {
        let samples = ports.iter().flat_map(|&port| {
            counters.iter().filter_map(move |path| {
                let counter = path.rsplit('/').next()?;
                let count = number(port_counter(host, port, path)?);
                Some(sample(port, "counter", counter, count))
            })
        });
        samples.collect()
    };
    let traffic = |of: &Traffic| -> Vec<Sample> {
        let samples = ports.iter().flat_map(|&port| {
            of.iter()
                .filter_map(move |(direction, (path, unit), other)| {
                    let count = |path| port_counter(host, port, path).map(number);
                    let count = count(path)
                        .map(|count| count * unit)
                        .or_else(|| count(other))?;
                    Some(sample(port, DIRECTION, direction, count))
                })
        });
        samples.collect()
    };
    vec![
        counter(
            "port_errors",
            "Errors and retries of a port, by the kernel's counters",
            counted(&ERRORS),
        ),
        counter(
            "port_congestion",
            "Drops and notifications of congestion of a port, by the kernel's counters",
            counted(&CONGESTION),
        ),
        counter(
            "port_bytes",
            "Bytes of a port; with the pod that has it for itself where pod names are served",
            traffic(&BYTES),
        ),
        counter(
            "port_packets",
            "Packets of a port; with the pod that has it for itself where pod names are served",
            traffic(&PACKETS),
        ),
    ]
}

fn port_counter(host: &Host, (device, port): (&str, u32), path: &str) -> Option<u64> {
    let directory = host.sys.join("class/infiniband").join(device);
    let file = directory.join(format!("ports/{port}/{path}"));
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// How full the ranges in use are whose addresses this node has alone.
fn pools(paths: &NodePaths) -> Vec<Family> {
    let plugin = Plugin::new(paths.policy(), &paths.node.root, paths.node.node.as_deref());
    let [all, free] = pool_samples(&plugin).unwrap_or_else(|error| {
        tracing::debug!(%error, "how full pools are is not known");
        Default::default()
    });
    vec![
        gauge(
            "ipam_pool_addresses",
            "Addresses of a pool of a file store",
            all,
        ),
        gauge(
            "ipam_pool_free_addresses",
            "Addresses of a pool of a file store that are neither leased nor cooling down",
            free,
        ),
    ]
}

/// The addresses of each pool, and those that are free.
fn pool_samples(plugin: &Plugin) -> anyhow::Result<[Vec<Sample>; 2]> {
    let Some(leases) = plugin.leases_if_any()? else {
        return Ok(Default::default());
    };
    let policy = plugin.policy();
    let mut pools = leases.pools()?;
    pools.retain(|pool| {
        let store = policy.stores.get(&pool.space.space.store);
        store.is_some_and(|store| store.kind == StoreKind::Node)
    });
    let used = usage(&leases, &pools, policy.ipam.cooldown)?;
    let [mut all, mut free] = [Vec::new(), Vec::new()];
    for (pool, usage) in pools.iter().zip(used) {
        let space = &pool.space.space;
        let labels = vec![
            ("store", space.store.clone()),
            ("range", pool.range.to_string()),
            (
                "network_name",
                space.network_name.clone().unwrap_or_default(),
            ),
        ];
        all.push((labels.clone(), rounded(pool.size())));
        free.push((labels, rounded(usage.free(pool))));
    }
    Ok([all, free])
}

/// Exact up to 2^53; a larger pool of IPv6 is never nearly full.
#[expect(
    clippy::cast_precision_loss,
    reason = "a metric is a floating-point number"
)]
fn rounded(count: u128) -> f64 {
    count as f64
}

/// What is wrong with a call, in a word to alert on (docs/troubleshooting.md, error codes).
fn word(code: Code) -> &'static str {
    match code {
        Code::IncompatibleVersion => "incompatible_version",
        Code::UnsupportedField => "unsupported_field",
        Code::UnknownContainer => "unknown_container",
        Code::InvalidEnvironment => "invalid_environment",
        Code::Io => "io",
        Code::Decode => "decode",
        Code::InvalidConfig => "invalid_config",
        Code::InvalidNetns => "invalid_netns",
        Code::TryAgain => "try_again",
        Code::Unavailable => "unavailable",
        Code::UnavailableLimited => "unavailable_limited",
        Code::Kernel => "kernel",
        Code::Policy => "policy",
        Code::Exhausted => "exhausted",
        Code::Exists => "exists",
        Code::Differs => "differs",
        Code::State => "state",
        Code::Internal => "internal",
        _ => "other",
    }
}

/// Failures of each command; durations of ADD and DEL only: the others are not waited for by a pod.
fn calls(paths: &NodePaths) -> Vec<Family> {
    let (mut failures, mut durations) = (Vec::new(), Vec::new());
    for program in PROGRAMS {
        let file = calls::file_in(&paths.run_dir, program);
        let calls = Calls::read(&file).unwrap_or_else(|error| {
            tracing::debug!(file = %file.display(), %error, "calls are not read");
            None
        });
        let Some(calls) = calls else { continue };
        for command in COMMANDS {
            let labels: Labels = vec![
                ("program", program.to_owned()),
                ("command", command.as_str().to_owned()),
            ];
            let calls = calls.of_command(command);
            for (code, count) in calls.failures {
                let (code, reason) = match code {
                    0 => ("other".to_owned(), "other"),
                    code => (code.to_string(), word(Code(code))),
                };
                let mut labels = labels.clone();
                labels.extend([("code", code), ("reason", reason.to_owned())]);
                failures.push((labels, number(count)));
            }
            if matches!(command, Command::Add | Command::Del) {
                let bounds = BOUNDS.iter().map(|bound| bound.as_secs_f64());
                let bounds = bounds.chain(std::iter::once(f64::INFINITY));
                durations.push(Histogram {
                    labels,
                    buckets: bounds.zip(calls.buckets).collect(),
                    sum: Duration::from_micros(calls.micros).as_secs_f64(),
                });
            }
        }
    }
    vec![
        counter(
            "cni_failures",
            "Calls of a CNI program that failed since the node booted, by code",
            failures,
        ),
        histogram(
            "cni_call_duration_seconds",
            "Duration of the calls of a CNI program since the node booted",
            durations,
        ),
    ]
}

#[cfg(test)]
mod tests {
    use hca_trees::{Tree, machine};
    use node_server::metrics::text;
    use serde_json::json;

    use super::*;

    #[test]
    fn counters_that_a_driver_has_are_served() {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::new(directory.path());
        machine::egx(&tree);
        let port = "/sys/class/infiniband/mlx5_1/ports/1";
        tree.file(format!("{port}/counters/link_downed"), 3);
        tree.file(format!("{port}/hw_counters/np_cnp_sent"), 7);
        tree.file(format!("{port}/hw_counters/packet_seq_err"), "none");
        tree.file(format!("{port}/counters/port_rcv_data"), 25);
        tree.file(format!("{port}/counters/port_xmit_packets"), 7);
        let other = "/sys/class/infiniband/mlx5_0/ports/1";
        tree.file(format!("{other}/hw_counters/tx_bytes"), 9);
        let mut paths = NodePaths::all_in(directory.path());
        paths.host = tree.host();
        let served = text("x", ports(&paths));
        let labels = r#"rdma_device="mlx5_1",port="1""#;
        for line in [
            format!(r#"x_port_errors_total{{{labels},counter="link_downed"}} 3.0"#),
            format!(r#"x_port_congestion_total{{{labels},counter="np_cnp_sent"}} 7.0"#),
            format!(r#"x_port_bytes_total{{{labels},direction="received"}} 100.0"#),
            format!(r#"x_port_packets_total{{{labels},direction="transmitted"}} 7.0"#),
            r#"x_port_bytes_total{rdma_device="mlx5_0",port="1",direction="transmitted"} 9.0"#
                .into(),
        ] {
            assert!(served.contains(&line), "no {line}\n{served}");
        }
        assert!(!served.contains("packet_seq_err"), "{served}");
    }

    #[test]
    fn traffic_has_the_pod_that_holds_the_device_and_errors_have_none() {
        let samples = |label| {
            let labels = |device: &str| vec![("rdma_device", device.into()), (label, "x".into())];
            vec![(labels("mlx5_0"), 1.0), (labels("mlx5_1"), 2.0)]
        };
        let pod = ("ml".to_owned(), "train-0".to_owned());
        let holders = Holders::from([("mlx5_0".to_owned(), pod)]);
        let served = |label| {
            text(
                "x",
                vec![attributed(counter("n", "n", samples(label)), &holders)],
            )
        };
        let traffic = served(DIRECTION);
        for line in [
            r#"x_n_total{rdma_device="mlx5_0",direction="x",pod_namespace="ml",pod_name="train-0"} 1.0"#,
            r#"x_n_total{rdma_device="mlx5_1",direction="x"} 2.0"#,
        ] {
            assert!(traffic.contains(line), "no {line}\n{traffic}");
        }
        assert!(!served("counter").contains("train-0"));
    }

    #[test]
    fn calls_are_served_by_code_and_duration() {
        let place = tempfile::tempdir().unwrap();
        let paths = NodePaths::all_in(place.path());
        fs::create_dir_all(&paths.run_dir).unwrap();
        let file = node::calls::file_in(&paths.run_dir, "rdma-netdev");
        let count = |code, ms| {
            node::calls::count(&file, Command::Add, code, Duration::from_millis(ms));
        };
        count(None, 8);
        count(Some(Code::Exhausted), 40_000);
        let served = text("x", calls(&paths));
        for line in [
            r#"x_cni_failures_total{program="rdma-netdev",command="ADD",code="102",reason="exhausted"} 1.0"#,
            r#"x_cni_call_duration_seconds_bucket{le="0.01",program="rdma-netdev",command="ADD"} 1"#,
            r#"x_cni_call_duration_seconds_bucket{le="+Inf",program="rdma-netdev",command="ADD"} 2"#,
            r#"x_cni_call_duration_seconds_sum{program="rdma-netdev",command="ADD"} 40.008"#,
        ] {
            assert!(served.contains(line), "no {line}\n{served}");
        }
    }

    #[test]
    fn a_node_that_leased_nothing_has_no_pools_and_no_calls() {
        let place = tempfile::tempdir().unwrap();
        let policy = place.path().join("policy.json");
        let values = json!({"stateDir": place.path().join("state")});
        fs::write(&policy, values.to_string()).unwrap();
        let mut paths = NodePaths::all_in(place.path());
        paths.node.root = place.path().to_owned();
        let families = [pools(&paths), calls(&paths)].into_iter().flatten();
        assert_eq!(text("x", families.collect()), "# EOF\n");
    }

    #[test]
    fn nothing_is_served_before_anything_was_read() {
        assert!(
            Measurements::new(&Readers::default())
                .families(&Holders::new())
                .is_empty()
        );
    }
}
