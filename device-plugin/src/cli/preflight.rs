//! `rdma-device-plugin preflight`: is this node, or this container, fit for RDMA?

use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::ValueEnum;
use hca::NetnsMode;

use crate::config;
use crate::preflight::check::{Outcome, Selection};
use crate::preflight::context::{Context, Requirements, Scope, Settings, mounted};
use crate::preflight::verdict::Verdict;
use crate::preflight::{catalogue, report, run};

/// Checks what RDMA needs of this node: what was read, the verdict, and what to do.
#[derive(Debug, clap::Args)]
#[command(after_help = "Nothing is changed and no packet is sent.\n\
    Exit status: 0 no check failed, 1 at least one did (with --strict also for a warning), \
    2 wrong usage.")]
pub struct Preflight {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Say for every check what was read, not only for those that complain
    #[arg(long)]
    all: bool,
    /// List the checks and end
    #[arg(long)]
    list: bool,
    /// Only these checks: ids (M01) or letters of subjects (M)
    #[arg(long, value_name = "CHECK,..", value_delimiter = ',')]
    only: Vec<String>,
    /// Not these checks
    #[arg(long, value_name = "CHECK,..", value_delimiter = ',')]
    skip: Vec<String>,
    /// Fail on warnings, too
    #[arg(long)]
    strict: bool,
    /// Check again until nothing fails, at most this many seconds (0: for ever), as an init
    /// container does
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "0")]
    wait: Option<u64>,
    /// Check the container this runs in instead of the node
    #[arg(long)]
    pod: bool,
    /// How long error counters are watched, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 2)]
    window: u64,
    /// The device plugin's configuration: only NICs of its pools then have to be in order
    #[arg(long, value_name = "FILE", env = "RDMA_CONFIG_FILE")]
    config_file: Option<PathBuf>,
    #[command(flatten)]
    defaults: super::Defaults,
    /// How RDMA devices should relate to network namespaces
    #[arg(long, value_name = "MODE")]
    netns_mode: Option<Mode>,
    /// Rate that ports should have, in Gb/s
    #[arg(long, value_name = "GBPS")]
    rate: Option<u32>,
    /// Partition key that InfiniBand ports should have, such as 0x8001
    #[arg(long, value_name = "PKEY", value_parser = pkey)]
    pkey: Option<u16>,
    /// The node's object ("kubectl get node NAME -o json"), "-" for standard input
    #[arg(long, value_name = "FILE")]
    node_object: Option<PathBuf>,
    /// Networks ("kubectl get network-attachment-definitions -A -o json"), "-" for standard input
    #[arg(long, value_name = "FILE")]
    networks: Option<PathBuf>,
    #[command(flatten)]
    host: super::HostRoot,
    /// The kubelet's --root-dir [default: var/lib/kubelet below --host-root, or where the
    /// DaemonSet mounts it]
    #[arg(long, value_name = "DIR", env = "RDMA_KUBELET_ROOT_DIR")]
    kubelet_root_dir: Option<PathBuf>,
    /// Where the kubelet expects device plugins [default: var/lib/kubelet/device-plugins below
    /// --host-root, or where the DaemonSet mounts it]
    #[arg(long, value_name = "DIR", env = "RDMA_DEVICE_PLUGIN_DIR")]
    device_plugin_dir: Option<PathBuf>,
    /// Where CNI programs are [default: opt/cni/bin below --host-root]
    #[arg(long, value_name = "DIR")]
    cni_bin_dir: Option<PathBuf>,
    /// Where CNI configurations are [default: etc/cni/net.d below --host-root]
    #[arg(long, value_name = "DIR")]
    cni_conf_dir: Option<PathBuf>,
    /// The node policy [default: etc/rdma-netdev/policy.json below --host-root, or where the
    /// DaemonSet mounts it]
    #[arg(long, value_name = "FILE", env = "RDMA_NETDEV_POLICY")]
    policy: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Mode {
    Shared,
    Exclusive,
}

fn pkey(text: &str) -> Result<u16, String> {
    let digits = text
        .strip_prefix("0x")
        .ok_or("expected a number such as 0x8001")?;
    u16::from_str_radix(digits, 16).map_err(|error| error.to_string())
}

/// How long to wait between two rounds of checks.
const ROUND: Duration = Duration::from_secs(2);

impl Preflight {
    /// Checks and prints.
    ///
    /// # Errors
    /// If a check failed, or the host cannot be looked at.
    pub fn run(&self, out: &mut impl Write) -> anyhow::Result<()> {
        if self.list {
            for (id, title) in catalogue() {
                writeln!(out, "{id} {title}")?;
            }
            return Ok(());
        }
        let selection = Selection::new(&self.only, &self.skip)?;
        let settings = self.settings()?;
        let started = Instant::now();
        let outcomes = loop {
            let outcomes = self.check(&settings, &selection)?;
            if self.content(&outcomes) || !self.may_wait(started.elapsed()) {
                break outcomes;
            }
            // Not among what is printed: with --json that is one document.
            let waiting = failing(&outcomes, self.least_fault());
            let _ = writeln!(std::io::stderr().lock(), "waiting: {waiting}");
            thread::sleep(ROUND);
        };
        if self.json {
            writeln!(out, "{:#}", report::document(&outcomes))?;
        } else {
            out.write_all(report::text(&outcomes, self.all).as_bytes())?;
        }
        if self.content(&outcomes) {
            Ok(())
        } else {
            bail!(
                "not fit for RDMA: {}",
                failing(&outcomes, self.least_fault())
            )
        }
    }

    fn check(&self, settings: &Settings, selection: &Selection) -> anyhow::Result<Vec<Outcome>> {
        let context = Context::read(settings.clone()).context("look at this host")?;
        Ok(run(&context, selection))
    }

    fn content(&self, outcomes: &[Outcome]) -> bool {
        outcomes
            .iter()
            .all(|outcome| outcome.verdict < self.least_fault())
    }

    fn least_fault(&self) -> Verdict {
        if self.strict {
            Verdict::Warn
        } else {
            Verdict::Fail
        }
    }

    fn may_wait(&self, waited: Duration) -> bool {
        self.wait
            .is_some_and(|most| most == 0 || waited < Duration::from_secs(most))
    }

    fn settings(&self) -> anyhow::Result<Settings> {
        if self.node_object.as_deref() == Some(Path::new("-"))
            && self.networks.as_deref() == Some(Path::new("-"))
        {
            bail!("--node-object and --networks cannot both be standard input");
        }
        let root = self.host.host_root.clone();
        let or = |given: &Option<PathBuf>, place: &str| {
            given.clone().unwrap_or_else(|| root.join(place))
        };
        let or_mounted = |given: &Option<PathBuf>, place: &str| {
            given
                .clone()
                .unwrap_or_else(|| mounted(&root, Path::new(place)))
        };
        let defaults = self.defaults.read();
        let config = self
            .config_file
            .as_deref()
            .map(|file| config::load(file, &defaults));
        let config = config.transpose()?;
        Ok(Settings {
            kubelet_root_dir: or_mounted(&self.kubelet_root_dir, "var/lib/kubelet"),
            device_plugin_dir: or_mounted(
                &self.device_plugin_dir,
                "var/lib/kubelet/device-plugins",
            ),
            cni_bin_dir: or(&self.cni_bin_dir, "opt/cni/bin"),
            cni_conf_dir: or(&self.cni_conf_dir, "etc/cni/net.d"),
            policy: or_mounted(&self.policy, "etc/rdma-netdev/policy.json"),
            scope: if self.pod { Scope::Pod } else { Scope::Node },
            requirements: Requirements {
                netns_mode: self.netns_mode.map(|mode| match mode {
                    Mode::Shared => NetnsMode::Shared,
                    Mode::Exclusive => NetnsMode::Exclusive,
                }),
                rate: self.rate,
                pkey: self.pkey,
                window: Duration::from_secs(self.window),
            },
            config,
            node_object: self.node_object.as_deref().map(json).transpose()?,
            networks: self.networks.as_deref().map(json).transpose()?,
            node_addresses: self.host.node_addresses.clone(),
            root,
        })
    }
}

/// Ids of the checks that stand in the way.
fn failing(outcomes: &[Outcome], least: Verdict) -> String {
    let ids = outcomes
        .iter()
        .filter(|outcome| outcome.verdict >= least)
        .map(|outcome| outcome.id);
    ids.collect::<Vec<_>>().join(" ")
}

fn json(file: &Path) -> anyhow::Result<serde_json::Value> {
    let text = super::text_of(file)?;
    serde_json::from_str(&text)
        .with_context(|| format!("read {}, which should be JSON", file.display()))
}
