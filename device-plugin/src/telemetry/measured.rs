//! Metrics of what takes time to read; see [`Measured`].

use std::time::Duration;

use node::calls::{BOUNDS, COMMANDS, Calls, Code, Command};
use node_server::metrics::{Family, Histogram, counter, gauge, histogram, number};

use crate::measurements::{Measured, PoolFill};
use crate::port_counters::PortCounter;

/// The metrics of one set of measurements.
pub(super) fn families(measured: &Measured) -> Vec<Family> {
    let mut families = of_ports(&measured.ports);
    families.extend(of_pools(&measured.pools));
    families.push(failures(&measured.calls));
    families.push(durations(&measured.calls));
    families
}

fn of_ports(counters: &[PortCounter]) -> Vec<Family> {
    let samples = |is_congestion: bool| {
        let of_kind = counters
            .iter()
            .filter(|one| one.is_congestion == is_congestion);
        let sample = |one: &PortCounter| {
            let labels = vec![
                ("rdma_device", one.rdma_device.clone()),
                ("port", one.port.to_string()),
                ("counter", one.counter.to_owned()),
            ];
            (labels, number(one.value))
        };
        of_kind.map(sample).collect()
    };
    vec![
        counter(
            "port_errors",
            "Errors and retries of a port, by the kernel's counters",
            samples(false),
        ),
        counter(
            "port_congestion",
            "Drops and notifications of congestion of a port, by the kernel's counters",
            samples(true),
        ),
    ]
}

fn of_pools(pools: &[PoolFill]) -> Vec<Family> {
    let samples = |value: fn(&PoolFill) -> f64| {
        let sample = |pool: &PoolFill| {
            let labels = vec![
                ("store", pool.store.clone()),
                ("range", pool.range.clone()),
                ("network_name", pool.network_name.clone()),
            ];
            (labels, value(pool))
        };
        pools.iter().map(sample).collect()
    };
    vec![
        gauge(
            "ipam_pool_addresses",
            "Addresses of a pool of a file store",
            samples(|pool| pool.size),
        ),
        gauge(
            "ipam_pool_free_addresses",
            "Addresses of a pool of a file store that are neither leased nor cooling down",
            samples(|pool| pool.free),
        ),
    ]
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

fn labels(program: &str, command: Command) -> Vec<(&'static str, String)> {
    vec![
        ("program", program.to_owned()),
        ("command", command.as_str().to_owned()),
    ]
}

fn failures(programs: &[(&'static str, Calls)]) -> Family {
    let mut failures = Vec::new();
    for (program, calls) in programs {
        for command in COMMANDS {
            for (code, count) in calls.of_command(command).failures {
                let (code, reason) = match code {
                    0 => ("other".to_owned(), "other"),
                    code => (code.to_string(), word(Code(code))),
                };
                let mut labels = labels(program, command);
                labels.extend([("code", code), ("reason", reason.to_owned())]);
                failures.push((labels, number(count)));
            }
        }
    }
    counter(
        "cni_failures",
        "Calls of a CNI program that failed since the node booted, by code",
        failures,
    )
}

/// ADD and DEL only: the others are not waited for by a pod.
fn durations(programs: &[(&'static str, Calls)]) -> Family {
    let mut all = Vec::new();
    for (program, calls) in programs {
        for command in [Command::Add, Command::Del] {
            let calls = calls.of_command(command);
            let bounds = BOUNDS.iter().map(|bound| bound.as_secs_f64());
            let bounds = bounds.chain(std::iter::once(f64::INFINITY));
            all.push(Histogram {
                labels: labels(program, command),
                buckets: bounds.zip(calls.buckets).collect(),
                sum: Duration::from_micros(calls.micros).as_secs_f64(),
            });
        }
    }
    histogram(
        "cni_call_duration_seconds",
        "Duration of the calls of a CNI program since the node booted",
        all,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use node_server::metrics::text;

    #[test]
    fn calls_pools_and_ports_are_served() {
        let place = tempfile::tempdir().unwrap();
        let file = node::calls::file_in(place.path(), "rdma-netdev");
        let count = |code, ms| {
            node::calls::count(&file, Command::Add, code, Duration::from_millis(ms));
        };
        count(None, 8);
        count(Some(Code::Exhausted), 40_000);
        let calls = Calls::read(&file).unwrap().unwrap();
        let all = Measured {
            ports: vec![PortCounter {
                rdma_device: "mlx5_0".into(),
                port: 1,
                counter: "link_downed",
                is_congestion: false,
                value: 3,
            }],
            calls: vec![("rdma-netdev", calls)],
            pools: vec![PoolFill {
                store: "default".into(),
                range: "10.0.0.0/24".into(),
                network_name: String::new(),
                size: 253.0,
                free: 50.0,
            }],
        };
        let served = text("x", families(&all));
        for line in [
            r#"x_port_errors_total{rdma_device="mlx5_0",port="1",counter="link_downed"} 3.0"#,
            r#"x_ipam_pool_free_addresses{store="default",range="10.0.0.0/24",network_name=""} 50.0"#,
            r#"x_cni_failures_total{program="rdma-netdev",command="ADD",code="102",reason="exhausted"} 1.0"#,
            r#"x_cni_call_duration_seconds_bucket{le="0.01",program="rdma-netdev",command="ADD"} 1"#,
            r#"x_cni_call_duration_seconds_bucket{le="+Inf",program="rdma-netdev",command="ADD"} 2"#,
            r#"x_cni_call_duration_seconds_sum{program="rdma-netdev",command="ADD"} 40.008"#,
        ] {
            assert!(served.contains(line), "no {line}\n{served}");
        }
    }

    #[test]
    fn nothing_is_served_before_anything_was_read() {
        let served = text("x", families(&Measured::default()));
        assert_eq!(served, "# EOF\n");
    }
}
