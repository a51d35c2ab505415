//! `rdmactl verify`: does RDMA between two pods work, and as fast as the hardware should?
//!
//! Each step needs the ones before it. The usual tools do the work, in the pods (`pod`); `ping` and
//! `perftest` read their output, `judge` and `causes` judge it. What an end has is read from its own
//! `/sys` (`ends`).

mod all;
mod causes;
mod ends;
mod judge;
mod perftest;
mod ping;
mod pod;
mod steps;

use std::io::{IsTerminal as _, Write};

use anyhow::{bail, ensure};
use clap::builder::PossibleValuesParser;
use serde_json::json;

use crate::cluster;
use crate::documents::put;
use crate::findings;
use crate::global::{Global, Kubectl};
use crate::output::{Ended, Exit, block_on, wrong_usage};
use pod::PodRef;
use steps::Tested;

/// Verifies RDMA between two pods, step by step: ping, rping, ib_write_bw, GPU memory.
#[derive(Debug, Clone, clap::Args)]
#[command(
    after_help = "SERVER and CLIENT: pod:[NAMESPACE/]NAME[/CONTAINER]. The usual tools run there, by \
    kubectl exec: ping, rping, ib_write_bw, in an image with a shell. They load the network. The \
    bandwidth that passes is that of published runs of ConnectX NICs.\n\
    Examples:\n  \
    rdmactl verify pod:rdma-test-pod-1 pod:rdma-test-pod-2\n  \
    kubectl rdma verify --all --html result.html\n\
    Exit status: 0 nothing failed, 1 something did (with --strict also for a warning; with --all also \
    if a node was not tested), 2 wrong usage."
)]
#[expect(clippy::doc_markdown, reason = "it is the help that people read")]
pub(crate) struct Verify {
    /// Where the servers run
    #[arg(
        value_name = "SERVER",
        required_unless_present = "all",
        requires = "client"
    )]
    server: Option<PodRef>,
    /// Where the clients run
    #[arg(value_name = "CLIENT")]
    client: Option<PodRef>,
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
    /// Also test the memory of this GPU (CUDA index) at both ends
    #[arg(long, value_name = "INDEX", num_args = 0..=1, default_missing_value = "0")]
    gpu: Option<u32>,
    /// GPU memory by dma-buf instead of nvidia_peermem
    #[arg(long)]
    dmabuf: bool,
    /// Rate of one NIC in Gb/s [default: the ports' rate; a software driver has none]
    #[arg(long, value_name = "GBPS")]
    line_rate: Option<f64>,
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
    #[command(flatten)]
    kubectl: Kubectl,
    /// Also fail on warnings
    #[arg(long)]
    strict: bool,
    #[command(flatten)]
    all: all::AllFlags,
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
        self.run_pair(global)
    }

    /// As `kubectl rdma`.
    pub(crate) fn run_in_cluster(&self, flags: &cluster::Flags, global: &Global) -> Ended {
        match self.all.all {
            true => all::run(self, flags, global),
            false => self.run_pair(global),
        }
    }

    fn run_pair(&self, global: &Global) -> Ended {
        let [Some(server), Some(client)] = [self.end(&self.server), self.end(&self.client)] else {
            bail!("two pods are needed");
        };
        // For a person who waits; a log or a program that reads both streams has no use for it.
        let is_watched = std::io::stderr().is_terminal();
        let progress = |what: &str| {
            if is_watched {
                let _ = writeln!(std::io::stderr().lock(), "running {what}");
            }
        };
        let kubectl = self.kubectl.words();
        let test = steps::test_pair(self, &kubectl, [&server, &client], None, &progress);
        let Tested {
            outcomes,
            measurements,
            ..
        } = block_on(test)?;
        let mut document = findings::document(&outcomes);
        put(&mut document, "measurements", json!(measurements));
        global.say(document, || findings::text(&outcomes, true));
        let faults = findings::faults(&outcomes, self.strict);
        ensure!(faults.is_empty(), "failed: {}", faults.join(" "));
        Ok(Exit::Good)
    }

    /// An end, in the namespace of the flags unless it names its own.
    fn end(&self, pod: &Option<PodRef>) -> Option<PodRef> {
        let pod = pod.clone()?;
        let namespace = pod.namespace.or_else(|| self.kubectl.namespace.clone());
        Some(PodRef { namespace, ..pod })
    }

    fn wants(&self, id: &str) -> bool {
        let named = |list: &[String]| list.iter().any(|word| word == id);
        (self.only.is_empty() || named(&self.only)) && !named(&self.skip)
    }
}
