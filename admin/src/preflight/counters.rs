//! Error counters that must not grow while they are watched (L12, P07, Q06).
//!
//! A count since boot says little: cables were pulled, drivers loaded. All counters are read twice,
//! some seconds apart. A counter that grew is a finding.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use super::check::Check;
use super::context::Context;
use super::qos::dcb;
use crate::verdict::{Finding, NO_NIC};
use rdma_device_plugin::{files, port_counters};

/// What is read.
#[derive(Debug, Clone, Default)]
pub(super) struct Facts {
    /// Counters of ports.
    pub ports: Vec<Watched>,
    /// Counters of PCIe errors.
    pub pcie: Vec<Watched>,
    /// Counters of packets dropped or paused.
    pub congestion: Vec<Watched>,
    /// For how long.
    pub window: Duration,
    /// There are RDMA devices at all.
    pub nics: bool,
}

/// Counters of one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Watched {
    /// The object.
    pub object: String,
    /// Names with the values before and after.
    pub counters: BTreeMap<String, (u64, u64)>,
}

/// Advanced error reporting in sysfs.
const AER: [&str; 3] = ["aer_dev_correctable", "aer_dev_nonfatal", "aer_dev_fatal"];

/// The checks.
pub(super) const CHECKS: &[Check<Facts>] = &[
    Check {
        id: "L12",
        title: "error counters of ports stand still",
        judge: l12_ports,
    },
    Check {
        id: "P07",
        title: "PCIe links report no new errors",
        judge: p07_pcie,
    },
    Check {
        id: "Q06",
        title: "nothing is dropped or paused",
        judge: q06_congestion,
    },
];

/// Reads all, waits, and reads again; there is no wait where there is nothing to watch.
#[must_use]
pub(super) fn read(context: &Context) -> Facts {
    let places = Places::of(context);
    let before = places.read(context);
    let window = context.settings.requirements.window;
    let nics = !context.snapshot.inventory.rdma_devices.is_empty();
    if before.iter().all(BTreeMap::is_empty) {
        return Facts {
            window,
            nics,
            ..Facts::default()
        };
    }
    thread::sleep(window);
    let after = places.read(context);
    let mut watched: Vec<Vec<Watched>> = before
        .into_iter()
        .zip(after)
        .map(|(before, after)| join(before, &after))
        .collect();
    let mut next = || {
        if watched.is_empty() {
            Vec::new()
        } else {
            watched.remove(0)
        }
    };
    Facts {
        ports: next(),
        pcie: next(),
        congestion: next(),
        window,
        nics,
    }
}

/// Values by object and counter.
type Reading = BTreeMap<(String, String), u64>;

fn join(before: Reading, after: &Reading) -> Vec<Watched> {
    let mut objects: BTreeMap<String, BTreeMap<String, (u64, u64)>> = BTreeMap::new();
    for ((object, counter), value) in before {
        let key = (object, counter);
        // A device that vanished meanwhile counts nothing.
        let later = after.get(&key).copied().unwrap_or(value);
        let (object, counter) = key;
        objects
            .entry(object)
            .or_default()
            .insert(counter, (value, later));
    }
    objects
        .into_iter()
        .map(|(object, counters)| Watched { object, counters })
        .collect()
}

/// Where counters are.
struct Places {
    /// Ports with their directories and netdevs.
    ports: Vec<(String, PathBuf, Option<String>)>,
    /// PCI functions, NICs' and of the ports above them, with their directories.
    functions: Vec<(String, PathBuf)>,
}

impl Places {
    fn of(context: &Context) -> Self {
        let sys = &context.host.sys;
        let mut functions = BTreeMap::new();
        for place in context
            .snapshot
            .machine
            .nics
            .iter()
            .filter(|n| !n.rdma_devices.is_empty())
            .map(|n| &n.place)
        {
            for address in &place.chain {
                let directory = sys.join("bus/pci/devices").join(address.to_string());
                functions.insert(address.to_string(), directory);
            }
        }
        let devices = context.snapshot.inventory.rdma_devices.iter();
        let ports = devices
            .filter(|device| context.offered(&device.name))
            .flat_map(|device| {
                device.ports.iter().map(|port| {
                    let place = format!("class/infiniband/{}/ports/{}", device.name, port.number);
                    (
                        format!("{}/{}", device.name, port.number),
                        sys.join(place),
                        port.netdev.clone(),
                    )
                })
            });
        Self {
            ports: ports.collect(),
            functions: functions.into_iter().collect(),
        }
    }

    fn read(&self, context: &Context) -> [Reading; 3] {
        let mut readings = [Reading::new(), Reading::new(), Reading::new()];
        let [ports, pcie, congestion] = &mut readings;
        for (port, directory, netdev) in &self.ports {
            read_named(ports, port, directory, &port_counters::ERRORS);
            read_named(congestion, port, directory, &port_counters::CONGESTION);
            let pauses = netdev.as_deref().filter(|_| context.live());
            if let Some((sent, received)) = pauses.and_then(|n| dcb::ask(n).ok()?.pauses) {
                congestion.insert((port.clone(), "pauses sent".to_owned()), sent);
                congestion.insert((port.clone(), "pauses received".to_owned()), received);
            }
        }
        for (address, directory) in &self.functions {
            for file in AER {
                if let Some(total) = files::text(&directory.join(file))
                    .as_deref()
                    .and_then(aer_total)
                {
                    pcie.insert((address.clone(), file.to_owned()), total);
                }
            }
        }
        readings
    }
}

fn read_named(reading: &mut Reading, object: &str, port: &Path, counters: &[&'static str]) {
    for counter in counters {
        if let Some(value) = port_counters::value(port, counter) {
            let name = port_counters::name(counter).to_owned();
            reading.insert((object.to_owned(), name), value);
        }
    }
}

/// The sum of an AER file, whose last line is `TOTAL_ERR_COR 3`.
fn aer_total(text: &str) -> Option<u64> {
    let total = text.lines().find(|line| line.starts_with("TOTAL"))?;
    total.split_whitespace().nth(1)?.parse().ok()
}

fn judge(facts: &Facts, watched: &[Watched], why: &str, remedy: &str) -> Vec<Finding> {
    if watched.is_empty() {
        let why = if facts.nics {
            "the driver offers none of these counters"
        } else {
            NO_NIC
        };
        return vec![Finding::not_applicable(why)];
    }
    let seconds = facts.window.as_secs_f32();
    watched
        .iter()
        .map(|object| {
            let grown: Vec<String> = object
                .counters
                .iter()
                .filter(|(_, (before, after))| after > before)
                .map(|(name, (before, after))| format!("{name} +{}", after - before))
                .collect();
            let since_boot: Vec<String> = object
                .counters
                .iter()
                .filter(|(_, (_, after))| *after > 0)
                .map(|(name, (_, after))| format!("{name} {after}"))
                .collect();
            let finding = if grown.is_empty() {
                Finding::pass(format!("no growth in {seconds} s"))
            } else {
                Finding::warn(
                    format!("{} in {seconds} s: {why}", grown.join(", ")),
                    remedy,
                )
            };
            let all = if since_boot.is_empty() {
                "all zero".to_owned()
            } else {
                since_boot.join(", ")
            };
            finding.on(&object.object).read("since boot", all)
        })
        .collect()
}

fn l12_ports(facts: &Facts) -> Vec<Finding> {
    judge(
        facts,
        &facts.ports,
        "packets are lost or come out of order",
        "check cable and transceiver (mlxlink, ethtool -m), then flow control (Q02) and the switch's counters",
    )
}

fn p07_pcie(facts: &Facts) -> Vec<Finding> {
    judge(
        facts,
        &facts.pcie,
        "the PCIe link has errors",
        "reseat the card or riser; correctable errors in numbers cost bandwidth as well",
    )
}

fn q06_congestion(facts: &Facts) -> Vec<Finding> {
    judge(
        facts,
        &facts.congestion,
        "the network is congested, or receivers are too slow",
        "under load this is normal in small numbers; otherwise see Q01 to Q03",
    )
}

#[cfg(test)]
mod tests {
    use super::super::check::{Case, prove};
    use super::*;
    use crate::verdict::Verdict::{NotApplicable, Pass, Warn};

    fn watched(object: &str, before: u64, after: u64) -> Vec<Watched> {
        let counters = [("symbol_error".to_owned(), (before, after))].into();
        vec![Watched {
            object: object.to_owned(),
            counters,
        }]
    }

    fn facts(before: u64, after: u64) -> Facts {
        Facts {
            ports: watched("mlx5_0/1", before, after),
            pcie: watched("0000:3b:00.0", before, after),
            congestion: watched("mlx5_0/1", before, after),
            window: Duration::from_secs(2),
            nics: true,
        }
    }

    #[test]
    fn only_counters_that_grow_are_reported() {
        let mut cases: Vec<Case<Facts>> = Vec::new();
        for id in ["L12", "P07", "Q06"] {
            cases.push((id, facts(7, 7), Pass, "no growth in 2 s"));
            cases.push((id, facts(7, 9), Warn, "symbol_error +2 in 2 s"));
            // A counter that was reset meanwhile did not grow.
            cases.push((id, facts(7, 0), Pass, ""));
            cases.push((id, Facts::default(), NotApplicable, ""));
        }
        prove(CHECKS, &cases);
    }

    #[test]
    fn the_total_of_an_aer_file_is_its_last_line() {
        assert_eq!(aer_total("RxErr 0\nBadTLP 3\nTOTAL_ERR_COR 3"), Some(3));
        assert_eq!(aer_total("Undefined 0\nTOTAL_ERR_FATAL 0"), Some(0));
        assert_eq!(aer_total(""), None);
    }

    #[test]
    fn an_object_that_vanishes_is_no_error() {
        let key = ("mlx5_0/1".to_owned(), "symbol_error".to_owned());
        let joined = join([(key, 7)].into(), &Reading::new());
        assert_eq!(joined, watched("mlx5_0/1", 7, 7));
    }
}
