//! `rdmactl verify`: does RDMA between two pods or nodes work, and as fast as the hardware should?
//!
//! Each step needs the ones before it. The usual tools do the work (`place`: where they run); `ping`,
//! `perftest` and `nccl` read their output, `judge` and `causes` judge it. What an end has is read from
//! its own `/sys` (`ends`). `table` judges output that was kept in a file.

mod all;
mod causes;
mod ends;
mod judge;
mod nccl;
mod perftest;
mod ping;
mod place;
mod steps;
mod table;

use std::io::{IsTerminal as _, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use clap::builder::PossibleValuesParser;
use serde_json::json;

use crate::cluster;
use crate::documents::put;
use crate::global::Global;
use crate::output::{Ended, Outcome, block_on, style, text_of, wrong_usage};
use crate::report;
use judge::{Expected, Memory};
use place::Place;
use steps::Tested;
use table::judge_table;

/// Verifies RDMA between two pods or nodes, step by step: ping, rping, ib_write_bw, GPU memory,
/// NCCL.
#[derive(Debug, Clone, clap::Args)]
#[command(
    after_help = "SERVER and CLIENT: pod:[NAMESPACE/]NAME[/CONTAINER] (kubectl exec), ssh:[USER@]HOST, \
    netns:NAME, pid:NUMBER (a container's process on this host), local. The usual tools run \
    there: ping, rping, ib_write_bw, in an image with a shell. They load the network.\n\
    Examples:\n  \
    rdmactl verify pod:rdma-test-pod-1 pod:rdma-test-pod-2\n  \
    kubectl rdma verify --all --html result.html\n  \
    kubectl logs job/nccl-launcher | rdmactl verify --read - --line-rate 400\n\
    Exit status: 0 nothing failed, 1 something did (with --strict also for a warning; with --all also \
    if a node was not tested), 2 wrong usage."
)]
#[expect(clippy::doc_markdown, reason = "it is the help that people read")]
pub(crate) struct Verify {
    /// Where the servers run
    #[arg(
        value_name = "SERVER",
        required_unless_present_any = ["read", "all"],
        requires = "client"
    )]
    server: Option<Place>,
    /// Where the clients run
    #[arg(value_name = "CLIENT")]
    client: Option<Place>,
    /// Judge the output of ib_write_bw, NetPIPE or nccl-tests instead, "-" for standard input
    #[arg(long, value_name = "FILE", conflicts_with = "server")]
    read: Option<PathBuf>,
    /// Only this network interface of each end, such as net1 [default: all, paired by name]
    #[arg(long, value_name = "NAME")]
    interface: Option<String>,
    /// Only this RDMA device of each end
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Only these steps
    #[arg(long, value_name = "STEP,..", value_delimiter = ',', value_parser = step_names())]
    only: Vec<String>,
    /// Not these steps
    #[arg(long, value_name = "STEP,..", value_delimiter = ',', value_parser = step_names())]
    skip: Vec<String>,
    /// Also test the memory of this GPU (CUDA index) at both ends; with --read: the table is of GPU
    /// memory
    #[arg(long, value_name = "INDEX", num_args = 0..=1, default_missing_value = "0")]
    gpu: Option<u32>,
    /// GPU memory by dma-buf instead of nvidia_peermem
    #[arg(long)]
    dmabuf: bool,
    /// Rate of one NIC in Gb/s [default: the ports' rate; --read has none]
    #[arg(long, value_name = "GBPS")]
    line_rate: Option<f64>,
    /// NICs of each pod, for NCCL [default: as NCCL says, else one for each GPU]
    #[arg(long, value_name = "COUNT")]
    nics: Option<u32>,
    /// How long one tool may take, in seconds; with --all, everything together [default: 300, with
    /// --all 3600]
    #[arg(
        long,
        value_name = "SECONDS",
        default_value = "300",
        hide_default_value = true
    )]
    #[arg(default_value_if("all", "true", "3600"), value_parser = clap::value_parser!(u64).range(1..=86400))]
    timeout: u64,
    /// First TCP port of the tools
    #[arg(long, value_name = "PORT", default_value_t = 18515)]
    port: u16,
    /// The kubectl program
    #[arg(long, value_name = "PROGRAM", default_value = "kubectl")]
    kubectl: String,
    /// Also fail on warnings
    #[arg(long)]
    strict: bool,
    #[command(flatten)]
    all: all::Flags,
}

fn step_names() -> PossibleValuesParser {
    PossibleValuesParser::new(steps::CHOICE.map(|step| step.0))
}

impl Verify {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        if self.all.all {
            return Err(wrong_usage(
                "--all asks the cluster: run \"kubectl rdma verify --all\" where kubectl works",
            ));
        }
        self.run_pair(std::slice::from_ref(&self.kubectl), global)
    }

    /// As `kubectl rdma`.
    pub(crate) fn run_in_cluster(&self, flags: &cluster::Flags, global: &Global) -> Ended {
        match self.all.all {
            true => all::run(self, flags, global),
            false => self.run_pair(&flags.kubectl.words(), global),
        }
    }

    fn run_pair(&self, kubectl: &[String], global: &Global) -> Ended {
        let tested = match (&self.read, &self.server, &self.client) {
            (Some(file), ..) => self.judge(file)?,
            (None, Some(server), Some(client)) => self.test_pair(kubectl, [server, client])?,
            _ => bail!("two places are needed"),
        };
        let outcomes = &tested.outcomes;
        let mut document = report::document(outcomes);
        put(&mut document, "measurements", json!(tested.measurements));
        global.say(document, || report::text(outcomes, true, style()));
        let faults = report::faults(outcomes, self.strict);
        ensure!(
            faults.is_empty(),
            "not as it should be: {}",
            faults.join(" ")
        );
        Ok(Outcome::Good)
    }

    fn test_pair(&self, kubectl: &[String], ends: [&Place; 2]) -> anyhow::Result<Tested> {
        // For a person who waits; a log or a program that reads both streams has no use for it.
        let is_watched = std::io::stderr().is_terminal();
        let progress = |what: &str| {
            if is_watched {
                let _ = writeln!(std::io::stderr().lock(), "running {what}");
            }
        };
        block_on(steps::test_pair(self, kubectl, ends, None, &progress))
    }

    fn wants(&self, id: &str) -> bool {
        let named = |list: &[String]| list.iter().any(|word| word == id);
        (self.only.is_empty() || named(&self.only)) && !named(&self.skip)
    }

    fn judge(&self, file: &Path) -> anyhow::Result<Tested> {
        let expected = Expected {
            line_rate: self.line_rate,
            nics: self.nics,
            memory: self.gpu.map_or(Memory::Host, |_| Memory::Gpu),
        };
        judge_table(&text_of(file)?.1, expected).with_context(|| {
            format!(
                "{} has no table of ib_write_bw (\"BW average\"), NetPIPE (\"Mbps in\") or nccl-tests \
                 (\"busbw\")",
                file.display()
            )
        })
    }
}
