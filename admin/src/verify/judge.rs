//! Compares a result with what the hardware should give, and names the cause of a difference.
//!
//! The bands are those of published runs: `ib_write_bw` reaches 97 to 98 Gb/s of 100, 190 and more
//! of 200, 380 and more of 400; NCCL on one GPU with its own NIC of 400 Gb/s reaches 46.6 GB/s of
//! 50 when they share a PCIe switch and 29 to 32 when they do not, and on eight of each 260 and
//! more of 400. Pure functions.

use std::collections::BTreeSet;
use std::net::Ipv6Addr;

use crate::verdict::Finding;

use super::causes;
use super::nccl;
use super::perftest::{Row, Run};

/// From here on messages are large enough for the bandwidth to be the path's.
const LARGE_BYTES: u64 = 64 << 10;
/// Share of the line rate that a sound path gives.
const SOUND: f64 = 0.95;
/// Below this share something is wrong, not only worse.
const POOR: f64 = 0.8;

/// Whose memory the messages lie in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Memory {
    /// The host's.
    #[default]
    Host,
    /// A GPU's.
    Gpu,
}

/// What a table is judged by.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Expected {
    /// Rate of one NIC in Gb/s; `None`: what the table itself says of the link, if anything.
    pub line_rate: Option<f64>,
    /// NICs of each pod, for NCCL; `None`: as NCCL says, else one for each GPU.
    pub nics: Option<u32>,
    /// What the table of `ib_write_bw` is of.
    pub memory: Memory,
}

/// Judges a run of `ib_write_bw`. `line` is in Gb/s; `soft` means that there is no hardware whose
/// rate could be reached.
pub(super) fn bandwidth(run: &Run, line: Option<f64>, soft: bool, memory: Memory) -> Finding {
    let Some(last) = run.rows.last() else {
        return Finding::unknown("there is no line of results: the output was cut off");
    };
    let large = run.rows.iter().filter(|row| row.bytes >= LARGE_BYTES);
    let mut large: Vec<&Row> = large.collect();
    if large.is_empty() {
        large.push(last);
    }
    let best = large.iter().map(|row| row.average).fold(0.0, f64::max);
    let mut finding = judge(run, &large, best, line, soft, memory)
        .read("best average", format!("{best:.2} Gb/s"));
    if let Some(line) = line.filter(|_| !soft) {
        finding = finding.read("line rate", format!("{line} Gb/s"));
    }
    match run.mtu {
        Some(mtu) => finding.read("path MTU", format!("{mtu} bytes")),
        None => finding,
    }
}

fn judge(
    run: &Run,
    large: &[&Row],
    best: f64,
    line: Option<f64>,
    soft: bool,
    memory: Memory,
) -> Finding {
    if best <= 0.0 {
        return Finding::fail("nothing went over", "see the tool's own messages");
    }
    if soft {
        return Finding::pass(
            "data goes through a software driver, which has no rate to compare with",
        );
    }
    let Some(line) = line else {
        return Finding::unknown("the line rate is not known: give it with --line-rate");
    };
    let share = best / line;
    let percent = format!("{:.0} % of the line rate", share * 100.0);
    let ethernet = run.link.as_deref() != Some("IB");
    let small_mtu = ethernet && run.mtu.is_some_and(|mtu| mtu < 4096);
    let local = ethernet && run.gids.iter().any(Ipv6Addr::is_unicast_link_local);
    let (why, remedy) = if small_mtu {
        (
            "messages are cut into small packets because the interface's MTU is small",
            "set an MTU of 4200 or more, usually 9000, on the NIC, on the switch and in the \
             network's configuration",
        )
    } else if share >= SOUND {
        if local {
            return Finding::warn(
                format!("{percent}, over link-local GIDs: these reach no other subnet"),
                "give ib_write_bw the index of the address's RoCE v2 GID (-x), or let it be found",
            );
        }
        return Finding::pass(match memory {
            Memory::Host => percent,
            Memory::Gpu => format!("{percent}: as from host memory"),
        });
    } else if sawtooth(large) {
        (
            "it goes up and down from size to size: packets are dropped or held back",
            "check PFC and ECN on the NICs and the switch (preflight Q01 to Q04)",
        )
    } else if flat(run) && memory == Memory::Gpu {
        (
            "it is flat from 16 KiB on: the path between GPU and NIC is the limit, they are not \
             on one PCIe switch, or ACS sends their traffic by the processor",
            "set binding: late for the pool, see \"rdmactl topology\" for a NIC nearer to this GPU; and \
             preflight P03 and P05",
        )
    } else if flat(run) {
        (
            "it is flat from 16 KiB on: the NIC's PCIe link is the limit (fewer lanes, a lower \
             generation), or another pod uses the NIC",
            "see preflight P01 and P06, and \"rdmactl status\" for who holds it",
        )
    } else {
        (
            "it rises too slowly: processor, memory of the other NUMA node, or other traffic",
            "run both ends on the NIC's NUMA node and alone",
        )
    };
    let why = format!("{percent}: {why}");
    if share >= POOR {
        Finding::warn(why, remedy)
    } else {
        Finding::fail(why, remedy)
    }
}

/// The same at all sizes from 16 KiB on.
fn flat(run: &Run) -> bool {
    let rows = run.rows.iter().filter(|row| row.bytes >= 16 << 10);
    let averages: Vec<f64> = rows.map(|row| row.average).collect();
    let most = averages.iter().copied().fold(0.0, f64::max);
    let least = averages.iter().copied().fold(f64::INFINITY, f64::min);
    averages.len() >= 4 && most - least <= 0.04 * most
}

/// Falls by a tenth, twice and more.
fn sawtooth(large: &[&Row]) -> bool {
    let falls = large
        .windows(2)
        .filter(|pair| matches!(pair, [one, next] if next.average < 0.9 * one.average));
    falls.count() >= 2
}

/// Sizes from which on a collective's bandwidth is judged.
const COLLECTIVE_BYTES: u64 = 1 << 30;
/// And if there are none of these.
const COLLECTIVE_MIN_BYTES: u64 = 64 << 20;

/// Judges the output of nccl-tests; `text` is the output as a whole.
pub(super) fn collective(text: &str, expected: Expected) -> Finding {
    let log = nccl::read(text);
    let mut finding = judge_collective(&log, text, expected);
    let best = log.rows.iter().map(|row| row.bus).fold(0.0, f64::max);
    if !log.rows.is_empty() {
        finding = finding.read("best bus bandwidth", format!("{best:.2} GB/s"));
    }
    if let Some(average) = log.average {
        finding = finding.read("average over all sizes", format!("{average:.2} GB/s"));
    }
    let shape: Vec<usize> = log.hosts().iter().map(|(_, gpus)| gpus.len()).collect();
    match shape.is_empty() {
        true => finding,
        false => finding.read("GPUs of each host", format!("{shape:?}")),
    }
}

fn judge_collective(log: &nccl::Log, text: &str, expected: Expected) -> Finding {
    let wrong: u64 = log.rows.iter().map(|row| row.wrong).sum();
    if wrong > 0 || log.out_of_bounds.is_some_and(|count| count > 0) {
        return Finding::fail(
            format!("{wrong} values came out wrong: data is damaged on its way"),
            "take the node out of use; check ECC errors of GPUs and memory and the NIC's \
             firmware, and try NCCL_NET_GDR_LEVEL=LOC to separate the GPU's path from the network's",
        );
    }
    let large = |least: u64| -> Vec<f64> {
        let rows = log.rows.iter().filter(|row| row.bytes >= least);
        rows.map(|row| row.bus).collect()
    };
    let mut judged = large(COLLECTIVE_BYTES);
    if judged.is_empty() {
        judged = large(COLLECTIVE_MIN_BYTES);
    }
    let best = judged.iter().copied().fold(0.0, f64::max);
    if let Some(cause) = causes::of_collective(text)
        && (log.rows.is_empty() || cause.message.starts_with("NET/IB"))
    {
        return Finding::fail(cause.why, cause.remedy);
    }
    if log.sockets {
        return Finding::fail(
            "NCCL talks TCP, not RDMA",
            "does the container ask for the resource, is NCCL_IB_DISABLE unset, and does \
             NCCL_IB_HCA name devices that it has?",
        );
    }
    let hosts = log.hosts();
    if judged.is_empty() {
        return match astride(&hosts) {
            Some(pods) => Finding::warn(
                format!(
                    "the table was cut off, so there is no bandwidth to judge; but {pods} have \
                     GPUs of both halves of the node: some of these are far from the pod's NICs"
                ),
                HALVES,
            ),
            None => {
                Finding::unknown("there is no line of 64 MiB or more: smaller ones measure latency")
            }
        };
    }
    if hosts.len() == 1 {
        return Finding::unknown("all ranks are on one host: the network was not used");
    }
    let Some(line) = expected.line_rate else {
        return Finding::unknown("the NICs' rate is not known: give it with --line-rate");
    };
    let gpus = hosts.iter().map(|(_, gpus)| gpus.len()).min().unwrap_or(1);
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let said = Some(number(log.nics.len())).filter(|&count| count > 0);
    let count = expected.nics.or(said).unwrap_or_else(|| number(gpus));
    let limit = line * f64::from(count) / 8.0;
    let share = best / limit;
    let percent = format!("{:.0} % of {limit:.0} GB/s", share * 100.0);
    // Several GPUs of a host share its links and NVSwitches: less of the sum can be reached.
    let sound = if gpus > 1 { 0.6 } else { 0.85 };
    if share >= sound {
        return Finding::pass(percent);
    }
    if share < 0.1 {
        return Finding::fail(
            format!("{percent}: as slow as TCP"),
            "set NCCL_DEBUG=INFO and find \"NET/IB : Using\" in the log; without it NCCL found no RDMA \
             device in the container",
        );
    }
    let (why, remedy) = if let Some(pods) = astride(&hosts) {
        (
            format!("{pods} have GPUs of both halves of the node"),
            HALVES,
        )
    } else if positions(&hosts) > 1 {
        (
            "the GPUs are at different places of their nodes, so one NIC chosen by its name is \
             near to some of them only"
                .to_owned(),
            "set binding: late for the pool: then each pod gets the NICs next to its GPUs",
        )
    } else {
        (
            "GPU and NIC are not on one PCIe switch, or GPUDirect is not in use".to_owned(),
            "set binding: late for the pool, see \"rdmactl topology\"; and preflight D01, P03, \
             P05",
        )
    };
    let why = format!("{percent}: {why}");
    if share >= sound / 2.0 {
        Finding::warn(why, remedy)
    } else {
        Finding::fail(why, remedy)
    }
}

const HALVES: &str = "set binding: late for the pool, so that each GPU has a NIC next to it; or give a \
    pod the GPUs of one half: the kubelet's topologyManagerPolicy single-numa-node with scope pod";

/// How many different sets of GPUs the hosts have.
fn positions(hosts: &[(&str, Vec<&str>)]) -> usize {
    let sets: BTreeSet<Vec<&str>> = hosts.iter().map(|(_, gpus)| gpus.clone()).collect();
    sets.len()
}

/// The pods that have GPUs of both halves of a node, if the ranks show several pods on a node:
/// then all pods together show more GPUs than each has.
fn astride(hosts: &[(&str, Vec<&str>)]) -> Option<String> {
    let all: BTreeSet<&str> = hosts.iter().flat_map(|(_, gpus)| gpus.clone()).collect();
    let half = all.len() / 2;
    let lower: Vec<&str> = all.into_iter().take(half).collect();
    if half < 2 || hosts.iter().any(|(_, gpus)| gpus.len() != half) {
        return None;
    }
    let is_astride = |(_, gpus): &&(&str, Vec<&str>)| {
        let low = gpus.iter().filter(|gpu| lower.contains(gpu)).count();
        low != 0 && low != half
    };
    let astride = hosts.iter().filter(is_astride).map(|(host, _)| *host);
    let astride: Vec<&str> = astride.collect();
    (!astride.is_empty()).then(|| astride.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::Verdict;
    use crate::verify::perftest;
    use proptest::prelude::*;

    fn write_bw(text: &str, memory: Memory) -> Finding {
        bandwidth(&perftest::read(text), Some(100.0), false, memory)
    }

    /// Published runs and what is known of each.
    #[test]
    fn known_runs_have_their_known_verdicts() {
        let host = write_bw(
            include_str!("captures/write-bw-100g-host.txt"),
            Memory::Host,
        );
        assert_eq!(host.verdict, Verdict::Pass, "{host:?}");
        assert!(host.read.contains(&"best average: 98.03 Gb/s".to_owned()));
        let gpu = write_bw(include_str!("captures/write-bw-100g-gpu.txt"), Memory::Gpu);
        assert_eq!(gpu.verdict, Verdict::Warn, "{gpu:?}");
        assert!(
            gpu.why.contains("flat") && gpu.why.contains("82 %"),
            "{gpu:?}"
        );

        let expected = Expected {
            line_rate: Some(400.0),
            nics: None,
            ..Expected::default()
        };
        let one = collective(include_str!("captures/nccl-2x1-all-reduce.txt"), expected);
        assert_eq!(one.verdict, Verdict::Warn, "{one:?}");
        assert!(one.why.contains("64 % of 50 GB/s"), "{one:?}");
        assert!(one.why.contains("different places"), "{one:?}");
        let eight = collective(include_str!("captures/nccl-2x8-all-gather.txt"), expected);
        assert_eq!(eight.verdict, Verdict::Pass, "{eight:?}");
        assert!(
            eight
                .read
                .contains(&"best bus bandwidth: 268.59 GB/s".to_owned())
        );
        for text in [
            include_str!("captures/nccl-4x4-all-gather.txt"),
            include_str!("captures/nccl-4x4-all-gather-worse.txt"),
        ] {
            let four = collective(text, expected);
            assert_eq!(four.verdict, Verdict::Warn, "{four:?}");
            assert!(four.why.contains("both halves"), "{four:?}");
            assert!(four.why.contains("worker-0, worker-1, worker-2, worker-3"));
        }
    }

    fn table(averages: &[(u64, f64)], mtu: u32) -> Run {
        Run {
            mtu: Some(mtu),
            rows: averages
                .iter()
                .map(|&(bytes, average)| Row {
                    bytes,
                    iterations: 1,
                    peak: average,
                    average,
                })
                .collect(),
            ..Run::default()
        }
    }

    #[test]
    fn the_likely_cause_is_named() {
        let sizes = [16, 32, 64, 128, 256, 512, 1024].map(|kib: u64| kib << 10);
        let with = |averages: [f64; 7], mtu| {
            let rows: Vec<_> = sizes.into_iter().zip(averages).collect();
            bandwidth(&table(&rows, mtu), Some(400.0), false, Memory::Host)
        };
        let saw = with([200., 210., 390., 300., 380., 290., 370.], 4096);
        assert!(saw.why.contains("up and down") || saw.verdict == Verdict::Pass);
        let saw = with([200., 210., 350., 280., 340., 270., 340.], 4096);
        assert!(saw.why.contains("up and down"), "{saw:?}");
        let small = with([300.; 7], 1024);
        assert!(small.why.contains("MTU"), "{small:?}");
        assert_eq!(small.verdict, Verdict::Fail);
        let flat = with([200.; 7], 4096);
        assert!(flat.why.contains("PCIe link"), "{flat:?}");
        let slow = with([100., 120., 140., 160., 180., 200., 220.], 4096);
        assert!(slow.why.contains("rises"), "{slow:?}");
        let fine = with([381.; 7], 4096);
        assert_eq!(fine.verdict, Verdict::Pass);
    }

    #[test]
    fn soft_roce_and_unknown_rates_are_not_compared() {
        let run = table(&[(65_536, 1.2)], 1024);
        assert_eq!(
            bandwidth(&run, Some(2.5), true, Memory::Host).verdict,
            Verdict::Pass
        );
        assert_eq!(
            bandwidth(&run, None, false, Memory::Host).verdict,
            Verdict::Unknown
        );
        assert_eq!(
            bandwidth(&Run::default(), Some(100.0), false, Memory::Host).verdict,
            Verdict::Unknown
        );
    }

    #[test]
    fn link_local_gids_are_reported() {
        let mut run = table(&[(65_536, 98.0)], 4096);
        run.gids = vec!["fe80::1".parse().unwrap()];
        let finding = bandwidth(&run, Some(100.0), false, Memory::Host);
        assert_eq!(finding.verdict, Verdict::Warn);
        assert!(finding.why.contains("link-local"));
    }

    fn ranks(hosts: &[(&str, &[&str])]) -> String {
        let mut text = String::new();
        for (host, gpus) in hosts {
            for gpu in *gpus {
                text.push_str(&format!(
                    "#  Rank 0 Group 0 Pid 1 on {host} device 0 [{gpu}] X\n"
                ));
            }
        }
        text
    }

    fn row(bus: f64, wrong: &str) -> String {
        format!("1073741824 1 float sum -1 1.0 {bus} {bus} {wrong} 1.0 {bus} {bus} 0\n")
    }

    #[test]
    fn collectives_that_are_not_what_they_seem() {
        let two = ranks(&[("a", &["0:1"]), ("b", &["0:1"])]);
        let expected = Expected {
            line_rate: Some(400.0),
            nics: None,
            ..Expected::default()
        };
        let judge = |text: String| collective(&text, expected);
        let fine = judge(two.clone() + &row(46.6, "0"));
        assert_eq!(fine.verdict, Verdict::Pass, "{fine:?}");
        let tcp = judge(two.clone() + &row(1.9, "0"));
        assert_eq!(tcp.verdict, Verdict::Fail);
        assert!(tcp.why.contains("TCP"), "{tcp:?}");
        let said = judge(two.clone() + "NCCL INFO Using network Socket\n" + &row(46.0, "0"));
        assert_eq!(said.verdict, Verdict::Fail);
        let wrong = judge(two.clone() + &row(46.6, "7"));
        assert!(wrong.why.contains("7 values"), "{wrong:?}");
        let one = judge(ranks(&[("a", &["0:1", "0:2"])]) + &row(300.0, "0"));
        assert_eq!(one.verdict, Verdict::Unknown);
        let path = judge(two.clone() + &row(25.0, "0"));
        assert!(path.why.contains("GPUDirect"), "{path:?}");
        assert_eq!(path.verdict, Verdict::Warn);
        let gpu = judge(two + "x: Test CUDA failure common.cu:1030 'invalid device ordinal'\n");
        assert!(gpu.why.contains("GPU"), "{gpu:?}");
        assert_eq!(judge(String::new()).verdict, Verdict::Unknown);
    }

    #[test]
    fn nics_are_counted_as_nccl_says() {
        let text = ranks(&[("a", &["0:1", "0:2"]), ("b", &["0:1", "0:2"])])
            + "NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:1<0>\n"
            + &row(40.0, "0");
        let expected = Expected {
            line_rate: Some(400.0),
            nics: None,
            ..Expected::default()
        };
        assert!(collective(&text, expected).why.contains("80 % of 50 GB/s"));
    }

    proptest! {
        /// What a pod prints is anything.
        #[test]
        fn no_text_is_too_much(
            text in "(\\PC{0,20}|[0-9.e-]{1,12}|busbw|# Rank 0 on a|\\[|\\]|[ :#/]|\n){0,60}",
            line in prop::option::of(0.0..1000.0f64),
        ) {
            let expected = Expected {
                line_rate: line,
                ..Expected::default()
            };
            let _ = collective(&text, expected);
            let _ = bandwidth(&perftest::read(&text), line, false, Memory::Gpu);
            let _ = crate::verify::ends::read(&text, None, None);
            let _ = crate::verify::ping::read(&text);
        }
    }
}
