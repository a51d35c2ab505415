//! The output of nccl-tests (`all_reduce_perf`, `all_gather_perf` and the others), with NCCL's own
//! lines in between where `NCCL_DEBUG=INFO` is set.

use std::collections::BTreeSet;

/// A line of the list of devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rank {
    /// Name of the pod or host.
    pub host: String,
    /// PCI address of the GPU, lower case.
    pub gpu: String,
}

/// One size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Row {
    /// Size in bytes.
    pub bytes: u64,
    /// The better bus bandwidth of out-of-place and in-place, in GB/s.
    pub bus: f64,
    /// Elements that came out wrong; 0 where the tool did not check.
    pub wrong: u64,
}

/// One run.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Log {
    /// Ranks, in their order.
    pub ranks: Vec<Rank>,
    /// Sizes.
    pub rows: Vec<Row>,
    /// The closing verdict on the values: how many were out of bounds.
    pub out_of_bounds: Option<u64>,
    /// The tool's own average of the bus bandwidth over all sizes, GB/s.
    pub average: Option<f64>,
    /// `device:port` that NCCL said it uses.
    pub nics: BTreeSet<String>,
    /// NCCL said that it uses TCP sockets.
    pub sockets: bool,
}

impl Log {
    /// Hosts or pods that take part, in the order of their first ranks.
    pub(super) fn hosts(&self) -> Vec<(&str, Vec<&str>)> {
        let mut hosts: Vec<(&str, Vec<&str>)> = Vec::new();
        for rank in &self.ranks {
            match hosts.iter_mut().find(|(host, _)| *host == rank.host) {
                Some((_, gpus)) => gpus.push(&rank.gpu),
                None => hosts.push((&rank.host, vec![&rank.gpu])),
            }
        }
        hosts
    }
}

/// Reads what came out of the job; lines of others are passed over.
pub(super) fn read(text: &str) -> Log {
    let mut log = Log::default();
    for line in text.lines() {
        // mpirun -tag-output puts "[1,0]<stdout>:" before each line.
        let line = line.split_once("<stdout>:").map_or(line, |(_, rest)| rest);
        if let Some(row) = row(line) {
            log.rows.push(row);
        } else if let Some(rank) = rank(line) {
            log.ranks.push(rank);
        } else if let Some((_, rest)) = line.split_once("Out of bounds values :") {
            log.out_of_bounds = rest.split_whitespace().next().and_then(|n| n.parse().ok());
        } else if let Some((_, rest)) = line.split_once("Avg bus bandwidth") {
            log.average = rest.trim_matches([' ', ':']).parse().ok();
        } else if let Some((_, rest)) = line.split_once("NET/IB : Using ") {
            // [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
            let list = rest.split(';').next().unwrap_or_default();
            let names = list.split_whitespace().filter_map(|word| {
                let (_, name) = word.split_once(']')?;
                let (name, _) = name.split_once('/')?;
                Some(name.to_owned())
            });
            log.nics.extend(names);
        } else if line.contains("NCCL INFO Using network Socket") {
            log.sockets = true;
        }
    }
    log
}

fn row(line: &str) -> Option<Row> {
    let words: Vec<&str> = line.split_whitespace().collect();
    // size count type redop root, then time algbw busbw #wrong twice
    let [bytes, count, _, _, _, out @ ..] = words.as_slice() else {
        return None;
    };
    let [time, algorithm, bus, wrong, in_place @ ..] = out else {
        return None;
    };
    let _: (u64, f64, f64) = (
        count.parse().ok()?,
        time.parse().ok()?,
        algorithm.parse().ok()?,
    );
    let also = in_place.get(2).and_then(|bus| bus.parse::<f64>().ok());
    Some(Row {
        bytes: bytes.parse().ok()?,
        bus: bus.parse::<f64>().ok()?.max(also.unwrap_or_default()),
        wrong: number(wrong).saturating_add(in_place.get(3).map_or(0, |wrong| number(wrong))),
    })
}

/// `N/A` where nothing was compared; older builds print a fraction such as `0e+00`.
fn number(text: &str) -> u64 {
    text.parse()
        .unwrap_or_else(|_| u64::from(text.parse::<f64>().is_ok_and(|wrong| wrong > 0.0)))
}

/// `#  Rank  0 Group  0 Pid  23 on HOST device  0 [0000:cc:00] NVIDIA H200`; older builds print
/// `[0xcc]`, which is kept as it is.
fn rank(line: &str) -> Option<Rank> {
    let rest = line.trim_start().strip_prefix('#')?.trim_start();
    let (_, rest) = rest.strip_prefix("Rank")?.split_once(" on ")?;
    let mut words = rest.split_whitespace();
    let host = words.next()?.to_owned();
    let (_, rest) = rest.split_once('[')?;
    let (gpu, _) = rest.split_once(']')?;
    Some(Rank {
        host,
        gpu: gpu.to_ascii_lowercase(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_run_is_read() {
        let log = read(include_str!("captures/nccl-2x1-all-reduce.txt"));
        assert_eq!(log.ranks.len(), 2);
        assert_eq!(log.ranks[0].gpu, "0000:cc:00");
        assert_eq!(log.rows.len(), 24);
        let last = log.rows[23];
        assert_eq!(
            (last.bytes, last.bus, last.wrong),
            (8_589_934_592, 31.89, 0)
        );
        assert_eq!(log.out_of_bounds, Some(0));
        let log = read(include_str!("captures/nccl-2x8-all-gather.txt"));
        assert_eq!(log.hosts().len(), 2);
        assert_eq!(log.hosts()[1].1.len(), 8);
        assert_eq!(log.average, Some(59.3638));
        assert!((log.rows[21].bus - 268.59).abs() < f64::EPSILON);
    }

    #[test]
    fn lines_of_nccl_and_of_mpirun_are_understood() {
        let log = read(
            "[1,0]<stdout>:p0:12:31 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE \
             [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.1.0.4<0>\n\
             [1,0]<stdout>:  1073741824  268435456  float  sum  -1  1.0  20.00  20.00  3  1.0  \
             21.0  21.0  N/A\n\
             p0:12:31 [0] NCCL INFO Using network Socket\n\
             # Out of bounds values : 4 FAILED\n",
        );
        assert_eq!(
            log.nics.iter().map(String::as_str).collect::<Vec<_>>(),
            ["mlx5_0:1", "mlx5_1:1"]
        );
        assert_eq!(
            log.rows,
            [Row {
                bytes: 1 << 30,
                bus: 21.0,
                wrong: 3
            }]
        );
        assert!(log.sockets);
        assert_eq!(log.out_of_bounds, Some(4));
    }

    #[test]
    fn other_text_is_nothing() {
        assert_eq!(read("hello\n# Rank\n1 2 3 4 5 6 7 8\n"), Log::default());
    }
}
