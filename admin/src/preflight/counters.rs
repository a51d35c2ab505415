//! Counters of errors (L12, P07) and of congestion (Q06), read twice: they must not grow meanwhile.

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use super::check::{Findings, checks, need};
use super::context::{Context, port_name};
use super::qos::dcb;
use crate::verdict::{Finding, NO_NIC, words};
use rdma_device_plugin::{files, port_counters};

/// What is read.
#[derive(Debug, Clone, Default)]
pub(super) struct Facts {
    /// Errors of ports.
    pub ports: Watched,
    /// Errors of PCIe links.
    pub pcie: Watched,
    /// Congestion of ports.
    pub congestion: Watched,
    /// There are RDMA devices.
    pub nics: bool,
}

/// How long they are watched.
const WINDOW_SECONDS: u64 = if cfg!(test) { 0 } else { 2 };

/// Counters of objects by name, before and after.
type Watched = BTreeMap<String, BTreeMap<String, (u64, u64)>>;

checks! {
    "L12" "error counters of ports stand still" l12_ports;
    "P07" "PCIe links report no new errors" p07_pcie;
    "Q06" "nothing is dropped or paused" q06_congestion;
}

/// Reads the host twice, unless it has no counters.
pub(super) fn read(context: &Context) -> Facts {
    let mut facts = Facts {
        nics: !context.snapshot.inventory.rdma_devices.is_empty(),
        ..Facts::default()
    };
    read_once(context, &mut facts);
    if ![&facts.ports, &facts.pcie, &facts.congestion]
        .iter()
        .all(|watched| watched.is_empty())
    {
        thread::sleep(Duration::from_secs(WINDOW_SECONDS));
        read_once(context, &mut facts);
    }
    facts
}

fn read_once(context: &Context, facts: &mut Facts) {
    let inventory = &context.snapshot.inventory;
    let counters = port_counters::read(&context.host, inventory).into_iter();
    for counter in counters.filter(|counter| context.offered(&counter.rdma_device)) {
        let watched = match counter.is_congestion {
            true => &mut facts.congestion,
            false => &mut facts.ports,
        };
        let object = format!("{}/{}", counter.rdma_device, counter.port);
        note(watched, &object, counter.counter, counter.value);
    }
    for (device, port) in context.ports(inventory) {
        let object = port_name(device, port);
        let netdev = port.netdev.as_deref().filter(|_| context.live);
        if let Some((sent, received)) = netdev.and_then(|netdev| dcb::ask(netdev).ok()?.pauses) {
            note(&mut facts.congestion, &object, "pauses sent", sent);
            note(&mut facts.congestion, &object, "pauses received", received);
        }
    }
    let nics = context.snapshot.machine.nics.iter();
    let nics = nics.filter(|nic| !nic.rdma_devices.is_empty());
    for address in nics
        .flat_map(|nic| &nic.place.chain)
        .map(ToString::to_string)
    {
        let directory = context.host.sys.join("bus/pci/devices").join(&address);
        for file in ["aer_dev_correctable", "aer_dev_nonfatal", "aer_dev_fatal"] {
            let text = files::text(&directory.join(file)).unwrap_or_default();
            if let Some(total) = aer_total(&text) {
                note(&mut facts.pcie, &address, file, total);
            }
        }
    }
}

/// The first value of a counter is the one before; an object that vanishes keeps it.
fn note(watched: &mut Watched, object: &str, counter: &str, value: u64) {
    let counters = watched.entry(object.to_owned()).or_default();
    let values = counters.entry(counter.to_owned());
    values
        .and_modify(|values| values.1 = value)
        .or_insert((value, value));
}

/// The last line of a file of advanced error reporting.
fn aer_total(text: &str) -> Option<u64> {
    let total = text.lines().find(|line| line.starts_with("TOTAL"))?;
    total.split_whitespace().nth(1)?.parse().ok()
}

fn judge(facts: &Facts, watched: &Watched, why: &str, remedy: &str) -> Findings {
    need(facts.nics || !watched.is_empty(), NO_NIC)?;
    let none = "the driver offers none of these counters";
    need(!watched.is_empty(), none)?;
    let judge = |(object, counters): (&String, &BTreeMap<String, (u64, u64)>)| {
        let (mut grown, mut since_boot) = (Vec::new(), Vec::new());
        for (name, (before, after)) in counters {
            grown.extend((after > before).then(|| format!("{name} +{}", after - before)));
            since_boot.extend((*after > 0).then(|| format!("{name} {after}")));
        }
        let finding = match grown.is_empty() {
            true => Finding::pass(format!("no growth in {WINDOW_SECONDS} s")),
            false => Finding::warn(
                format!("{} in {WINDOW_SECONDS} s: {why}", grown.join(", ")),
                remedy,
            ),
        };
        finding
            .on(object)
            .read("since boot", words(&since_boot, ", "))
    };
    Ok(watched.iter().map(judge).collect())
}

fn l12_ports(facts: &Facts) -> Findings {
    judge(
        facts,
        &facts.ports,
        "packets are lost or come out of order",
        "check cable and transceiver (mlxlink, ethtool -m), then flow control (Q02) and the switch's counters",
    )
}

fn p07_pcie(facts: &Facts) -> Findings {
    judge(
        facts,
        &facts.pcie,
        "the PCIe link has errors",
        "reseat the card or riser; correctable errors in numbers cost bandwidth as well",
    )
}

fn q06_congestion(facts: &Facts) -> Findings {
    judge(
        facts,
        &facts.congestion,
        "the network is congested, or receivers are too slow",
        "under load this is normal in small numbers; otherwise see Q01 to Q03",
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Case, prove};
    use super::*;
    use crate::verdict::Verdict::{NotApplicable, Pass, Warn};

    fn watched(object: &str, before: u64, after: u64) -> Watched {
        let counters = [("symbol_error".to_owned(), (before, after))].into();
        [(object.to_owned(), counters)].into()
    }

    fn facts(before: u64, after: u64) -> Facts {
        Facts {
            ports: watched("mlx5_0/1", before, after),
            pcie: watched("0000:3b:00.0", before, after),
            congestion: watched("mlx5_0/1", before, after),
            nics: true,
        }
    }

    #[test]
    fn only_counters_that_grow_are_reported() {
        let mut cases: Vec<Case<Facts>> = Vec::new();
        for id in ["L12", "P07", "Q06"] {
            cases.push((id, facts(7, 7), Pass, "no growth in 0 s"));
            cases.push((id, facts(7, 9), Warn, "symbol_error +2 in 0 s"));
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
    fn the_first_value_is_kept_and_the_last_follows() {
        let mut counters = Watched::new();
        note(&mut counters, "mlx5_0/1", "symbol_error", 7);
        assert_eq!(counters, watched("mlx5_0/1", 7, 7));
        note(&mut counters, "mlx5_0/1", "symbol_error", 9);
        assert_eq!(counters, watched("mlx5_0/1", 7, 9));
    }
}
