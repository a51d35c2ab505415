//! Judges a bandwidth table that a tool printed earlier.

use super::causes;
use super::judge::{self, Expected, Memory};
use super::perftest;
use super::place::plain;
use super::steps::{self, Measurement, Tested};
use crate::verdict::Outcome;

/// Judges the output of `ib_write_bw`, `NetPIPE` or `nccl-tests`; `None` for text with no table of
/// these and without a message that ends a collective.
pub(super) fn judge_table(text: &str, expected: Expected) -> Option<Tested> {
    let text = plain(text);
    let mut measurements = Vec::new();
    let ((id, title), finding) = if text.contains("BW average") || text.contains(" Mbps in ") {
        let step = match expected.memory {
            Memory::Gpu => steps::GPU,
            Memory::Host if text.contains("BW average") => steps::WRITE_BW,
            Memory::Host => steps::MPI,
        };
        let run = perftest::read(&text);
        let finding = judge::bandwidth(&run, expected.line_rate, false, expected.memory);
        measurements.push(Measurement {
            step: step.0,
            object: "table".into(),
            rows: run.rows,
        });
        (step, finding)
    } else if text.contains("busbw")
        || text.contains("# Using devices")
        || causes::of_collective(&text).is_some()
    {
        (steps::NCCL, judge::collective(&text, expected))
    } else {
        return None;
    };
    Some(Tested {
        outcomes: vec![Outcome::new(id, title, vec![finding])],
        measurements,
        ..Tested::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::Verdict;

    #[test]
    fn the_step_and_the_rows_are_those_of_the_tool() {
        let netpipe = "14:   65536 bytes  200 times -->  9000.00 Mbps in  58.25 usec\n";
        let perftest =
            " #bytes #iterations BW peak[Gb/sec] BW average[Gb/sec]\n 65536 200 9.0 9.0\n";
        for (text, step) in [(netpipe, "mpi"), (perftest, "write-bw")] {
            let judged = judge_table(text, Expected::default()).unwrap();
            assert_eq!(judged.outcomes[0].id, step);
            let [table] = judged.measurements.as_slice() else {
                panic!("{judged:?}");
            };
            assert_eq!((table.step, table.rows[0].average), (step, 9.0));
        }
    }

    #[test]
    fn an_error_of_a_gpu_is_recognised_without_a_table() {
        for (text, remedy) in [
            (
                "nccl-gib-test-4w-3: Test CUDA failure common.cu:1030 'invalid device ordinal'\n",
                "restarting the node",
            ),
            (
                "nccl-gib-4w-1: transport/nvls.cc:598 NCCL WARN Cuda failure 1 'invalid argument'\n",
                "NCCL_NVLS_ENABLE=0",
            ),
        ] {
            let judged = judge_table(text, Expected::default()).unwrap();
            let finding = &judged.outcomes[0].findings[0];
            assert_eq!(finding.verdict, Verdict::Fail, "{finding:?}");
            assert!(
                finding.remedy.as_ref().unwrap().contains(remedy),
                "{finding:?}"
            );
        }
        assert!(judge_table("nothing of either\n", Expected::default()).is_none());
    }
}
