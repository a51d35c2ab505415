//! The table of `ib_write_bw`.
//!
//! Read from text, not from `--out_json`: builds that are in use for years have no JSON.

use std::net::Ipv6Addr;

use serde::Serialize;

/// One size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PerftestRow {
    /// Size of a message in bytes.
    pub bytes: u64,
    /// Messages sent.
    pub iterations: u64,
    /// Best, in Gb/s.
    pub peak: f64,
    /// Average, in Gb/s.
    pub average: f64,
}

/// One run of the tool.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Run {
    /// Path MTU in bytes.
    pub mtu: Option<u32>,
    /// `Ethernet` or `IB`.
    pub link: Option<String>,
    /// The GIDs, ours first.
    pub gids: Vec<Ipv6Addr>,
    /// The sizes, in the tool's order.
    pub rows: Vec<PerftestRow>,
}

/// Reads what the tool wrote; lines of others in between are passed over.
pub(super) fn read(text: &str) -> Run {
    let mut run = Run::default();
    // perftest counts a megabyte as 2^20 bytes, whether it calls it MB or MiB.
    let mut factor = 8.0 * 1_048_576.0 / 1e9;
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let line = words.join(" ");
        if line.starts_with("#bytes") {
            if line.contains("Gb/sec") {
                factor = 1.0;
            }
            continue;
        }
        if let Some(row) = row(&words, factor) {
            run.rows.push(row);
            continue;
        }
        let after = |key: &str| {
            let (_, rest) = line.split_once(key)?;
            rest.split(' ').next().map(str::to_owned)
        };
        run.link = run.link.or_else(|| after("Link type : "));
        let mtu = || after("Mtu : ")?.strip_suffix("[B]")?.parse().ok();
        run.mtu = run.mtu.or_else(mtu);
        run.gids.extend(line.strip_prefix("GID: ").and_then(gid));
    }
    run
}

fn row(words: &[&str], factor: f64) -> Option<PerftestRow> {
    let [bytes, iterations, peak, average, ..] = words else {
        return None;
    };
    Some(PerftestRow {
        bytes: bytes.parse().ok()?,
        iterations: iterations.parse().ok()?,
        peak: peak.parse::<f64>().ok()? * factor,
        average: average.parse::<f64>().ok()? * factor,
    })
}

/// Sixteen bytes, each as a decimal number of at least two digits.
fn gid(text: &str) -> Option<Ipv6Addr> {
    let bytes = text.trim().split(':').map(|byte| byte.parse().ok());
    let bytes: Vec<u8> = bytes.collect::<Option<_>>()?;
    Some(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST_MEMORY: &str = include_str!("captures/write-bw-100g-host.txt");

    #[test]
    fn a_whole_table_is_read() {
        let run = read(HOST_MEMORY);
        assert_eq!(run.mtu, Some(4096));
        assert_eq!(run.link.as_deref(), Some("Ethernet"));
        assert_eq!(
            run.gids,
            [
                "::ffff:192.168.111.2".parse::<Ipv6Addr>().unwrap(),
                "::ffff:192.168.111.1".parse().unwrap()
            ]
        );
        assert_eq!(run.rows.len(), 23);
        assert_eq!(
            run.rows[11],
            PerftestRow {
                bytes: 4096,
                iterations: 5000,
                peak: 96.15,
                average: 90.05
            }
        );
    }

    #[test]
    fn megabytes_become_gigabits() {
        let run = read(
            " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n \
             65536      1000             11500.00            11444.09             0.183105\n",
        );
        assert!((run.rows[0].average - 96.0).abs() < 0.01, "{run:?}");
    }

    #[test]
    fn what_is_no_table_is_no_row() {
        for text in [
            "",
            "Couldn't connect to 10.0.0.1:18515\n",
            "1 2 three 4\n",
            "-1 2 3 4\n",
            "GID: 1:2:3\n",
        ] {
            assert_eq!(read(text), Run::default(), "{text}");
        }
    }
}
