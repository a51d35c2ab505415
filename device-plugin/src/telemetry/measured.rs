//! Metrics of what takes time to read; see [`Measured`].

use std::time::Duration;

use node::calls::{BOUNDS, COMMANDS, Calls, Code, Command};
use node_server::metrics::{Family, Histogram, counter, gauge, histogram, number};

use crate::measurements::{Measured, PoolFill};
use crate::port_counters::PortCounter;
use crate::reader::Reading;

fn values<T>(reading: &Option<Reading<Vec<T>>>) -> &[T] {
    reading.as_ref().map_or(&[], |reading| &reading.value)
}

/// The metrics of one set of measurements.
pub(super) fn families(measured: &Measured) -> Vec<Family> {
    let mut families = of_ports(values(&measured.ports));
    let own = values(&measured.own_pools).iter();
    families.extend(of_pools(own.chain(values(&measured.shared_pools))));
    families.push(failures(values(&measured.calls)));
    families.push(durations(values(&measured.calls)));
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

fn of_pools<'p>(pools: impl Iterator<Item = &'p PoolFill> + Clone) -> Vec<Family> {
    let samples = |value: fn(&PoolFill) -> f64| {
        let sample = |pool: &'p PoolFill| {
            let labels = vec![
                ("store", pool.store.clone()),
                ("range", pool.range.clone()),
                ("network_name", pool.network_name.clone()),
            ];
            (labels, value(pool))
        };
        pools.clone().map(sample).collect()
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
        Code::Other(_) => "other",
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
                    code => (code.to_string(), word(Code::from(code))),
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
