//! Compares a result with what the hardware should give, and names the cause of a difference.
//!
//! The bands are those of published runs: `ib_write_bw` reaches 97 to 98 Gb/s of 100, 190 and more
//! of 200, 380 and more of 400. Pure functions.

use std::net::Ipv6Addr;

use crate::verdict::Finding;

use super::perftest::{PerftestRow, Run};

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

/// Judges a run of `ib_write_bw`. `line` is in Gb/s.
pub(super) fn bandwidth(run: &Run, line: Option<f64>, memory: Memory) -> Finding {
    let Some(last) = run.rows.last() else {
        return Finding::unknown("there is no line of results: the output was cut off");
    };
    let large = run.rows.iter().filter(|row| row.bytes >= LARGE_BYTES);
    let mut large: Vec<&PerftestRow> = large.collect();
    if large.is_empty() {
        large.push(last);
    }
    let best = large.iter().map(|row| row.average).fold(0.0, f64::max);
    let mut finding =
        judge(run, &large, best, line, memory).read("best average", format!("{best:.2} Gb/s"));
    if let Some(line) = line {
        finding = finding.read("line rate", format!("{line} Gb/s"));
    }
    match run.mtu {
        Some(mtu) => finding.read("path MTU", format!("{mtu} bytes")),
        None => finding,
    }
}

fn judge(
    run: &Run,
    large: &[&PerftestRow],
    best: f64,
    line: Option<f64>,
    memory: Memory,
) -> Finding {
    if best <= 0.0 {
        return Finding::fail("no data was transferred", "see the tool's own messages");
    }
    let Some(line) = line else {
        return Finding::unsure(
            "data was transferred; the line rate is unknown",
            "a software driver has no line rate; of another device give it with --line-rate",
        );
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
            "bandwidth grows too slowly with message size: processor, memory of the other NUMA node, or \
             other traffic",
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
fn sawtooth(large: &[&PerftestRow]) -> bool {
    let falls = large
        .windows(2)
        .filter(|pair| matches!(pair, [one, next] if next.average < 0.9 * one.average));
    falls.count() >= 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::Verdict;
    use crate::verify::perftest;
    use proptest::prelude::*;

    fn write_bw(text: &str, memory: Memory) -> Finding {
        bandwidth(&perftest::read(text), Some(100.0), memory)
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
    }

    fn table(averages: &[(u64, f64)], mtu: u32) -> Run {
        Run {
            mtu: Some(mtu),
            rows: averages
                .iter()
                .map(|&(bytes, average)| PerftestRow {
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
            bandwidth(&table(&rows, mtu), Some(400.0), Memory::Host)
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
        assert!(slow.why.contains("grows too slowly"), "{slow:?}");
        let fine = with([381.; 7], 4096);
        assert_eq!(fine.verdict, Verdict::Pass);
    }

    #[test]
    fn an_unknown_line_rate_never_passes() {
        let run = table(&[(65_536, 1.2)], 1024);
        let finding = bandwidth(&run, None, Memory::Host);
        assert_eq!(finding.verdict, Verdict::Unknown);
        assert!(finding.why.contains("data was transferred"), "{finding:?}");
        let cut_off = bandwidth(&Run::default(), Some(100.0), Memory::Host);
        assert_eq!(cut_off.verdict, Verdict::Unknown);
    }

    #[test]
    fn link_local_gids_are_reported() {
        let mut run = table(&[(65_536, 98.0)], 4096);
        run.gids = vec!["fe80::1".parse().unwrap()];
        let finding = bandwidth(&run, Some(100.0), Memory::Host);
        assert_eq!(finding.verdict, Verdict::Warn);
        assert!(finding.why.contains("link-local"));
    }

    proptest! {
        /// What a pod prints is anything.
        #[test]
        fn no_text_is_too_much(
            text in "(\\PC{0,20}|[0-9.e-]{1,12}|#bytes|GID: |[ :#/]|\n){0,60}",
            line in prop::option::of(0.0..1000.0f64),
        ) {
            let _ = bandwidth(&perftest::read(&text), line, Memory::Gpu);
            let _ = crate::verify::ends::read(&text, None, None);
            let _ = crate::verify::ping::read(&text);
        }
    }
}
