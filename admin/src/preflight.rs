//! `rdmactl preflight`: what RDMA needs of a node, or of a container, and does not have.
//!
//! Checks are rows of a catalogue: subject, reader, predicate, verdict, remedy. What cannot be read is
//! "unknown", with the missing right, mount or file.
//!
//! - `engine`: rows, facts, the choice of checks; `context`: what all of them read from
//! - `modules` (M), `hcas` (H), `link` (L), `gid` (G), `pcie` (P), `gpudirect` (D), `runtime` (R),
//!   `qos` (Q), `kubernetes` (K): the rows
//! - `read`, `config_space`, `dcb`, `platform`, `host_process`: readers; `function`: NICs and GPUs

mod config_space;
mod context;
mod dcb;
mod engine;
mod function;
mod gid;
mod gpudirect;
mod hcas;
mod host_process;
mod kubernetes;
mod link;
mod modules;
mod pcie;
mod platform;
mod qos;
mod read;
mod runtime;
#[cfg(test)]
mod tests;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::ensure;
use attachment::reclaim::in_host_namespace;
use pools::config::flags::{Defaults, NodeAddresses};
use pools::config::{self, Config, Delivery, Sharing};
use serde_json::json;

use crate::findings;
use crate::global::{Global, NODE};
use crate::on_host::OnHost;
use crate::output::{Ended, Exit};
use crate::verdict;
use context::{ConfiguredPools, Context, HostPool, Membership, PoolHca, Settings, mounted};
use engine::{catalogue, choice, run};

/// Checks what RDMA needs of this node: what was read, the verdict, and what to do.
#[derive(Debug, clap::Args)]
#[command(after_help = "Nothing is changed and no packet is sent.\n\
    Exit status: 0 no check failed, 1 at least one did (with --strict also for a warning), \
    2 wrong usage.")]
pub(crate) struct Preflight {
    /// Show what each check read, not only those that found something
    #[arg(long)]
    all: bool,
    /// List the checks and exit; with --json also what each reads, its severity and remedy
    #[arg(long)]
    list: bool,
    /// Only these checks: ids (M01) or letters of subjects (M)
    #[arg(long, value_name = "CHECK,..", value_delimiter = ',', value_parser = choice)]
    only: Vec<String>,
    /// Skip these checks
    #[arg(long, value_name = "CHECK,..", value_delimiter = ',', value_parser = choice)]
    skip: Vec<String>,
    /// Also fail on warnings
    #[arg(long)]
    strict: bool,
    /// Check again until nothing fails, at most this many seconds (0: for ever), as an init
    /// container does
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "0")]
    wait: Option<u64>,
    /// The number of usable HCAs that this node should have; of a pool, key expected of the
    /// configuration says it
    #[arg(long = "expect", value_name = "NUMBER")]
    expected: Option<usize>,
    /// Check the container this runs in instead of the node
    #[arg(long, help_heading = NODE)]
    pod: bool,
    /// Check only the NICs of this configuration's pools
    #[arg(long, help_heading = NODE, value_name = "FILE", env = "RDMA_CONFIG_FILE")]
    config_file: Option<PathBuf>,
    #[command(flatten, next_help_heading = NODE)]
    defaults: Defaults,
    #[command(flatten, next_help_heading = NODE)]
    addresses: NodeAddresses,
    /// Where the kubelet expects device plugins [default: var/lib/kubelet/device-plugins below
    /// --host-root, or where the DaemonSet mounts it]
    #[arg(long, help_heading = NODE, value_name = "DIR", env = "RDMA_DEVICE_PLUGIN_DIR")]
    device_plugin_dir: Option<PathBuf>,
}

/// How long to wait between two rounds of checks.
const ROUND_INTERVAL: Duration = Duration::from_secs(2);

impl Preflight {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        if self.list {
            let catalogue = catalogue();
            let line = |check: &engine::Check| format!("{} {}\n", check.id, check.title);
            let text = || catalogue.iter().map(line).collect();
            global.say(json!({ "checks": catalogue }), text);
            return Ok(Exit::Good);
        }
        let settings = self.settings(global);
        let config = self.config()?;
        let started = Instant::now();
        let outcomes = loop {
            let outcomes = self.check(global, &settings, config.as_ref())?;
            let faults = findings::faults(&outcomes, self.strict);
            if faults.is_empty() || !self.may_wait(started.elapsed()) {
                break outcomes;
            }
            // Not among what is printed: with --json that is one document.
            let _ = writeln!(std::io::stderr().lock(), "waiting: {}", faults.join(" "));
            thread::sleep(ROUND_INTERVAL);
        };
        ensure!(
            !outcomes.is_empty(),
            "no check is chosen: --skip has all that --only chooses"
        );
        let text = || findings::text(&outcomes, self.all);
        global.say(findings::document(&outcomes), text);
        let faults = findings::faults(&outcomes, self.strict);
        let number = findings::counted(faults.len(), "check");
        ensure!(faults.is_empty(), "{number} failed: {}", faults.join(" "));
        Ok(Exit::Good)
    }

    fn check(
        &self,
        global: &Global,
        settings: &Settings,
        config: Option<&Config>,
    ) -> anyhow::Result<Vec<verdict::Outcome>> {
        // Without sysfs a scan finds an empty host.
        let sys = global.host().sys.join("class");
        ensure!(
            sys.is_dir(),
            "{} does not exist: mount the host's /sys",
            sys.display()
        );
        let host = OnHost::scan(global, &self.addresses.node_addresses, &settings.policy)?;
        let pools = config.map(|config| pools(config, &host));
        let in_host_namespace = in_host_namespace(&global.host()).is_ok();
        let context = Context::new(settings.clone(), host.scanned, in_host_namespace, pools);
        Ok(run(&context, &self.only, &self.skip))
    }

    fn config(&self) -> anyhow::Result<Option<Config>> {
        let file = self.config_file.as_deref();
        let defaults = &self.defaults;
        file.map(|file| config::load(file, defaults)).transpose()
    }

    fn may_wait(&self, waited: Duration) -> bool {
        self.wait
            .is_some_and(|most| most == 0 || waited < Duration::from_secs(most))
    }

    fn settings(&self, global: &Global) -> Settings {
        let root = global.host_root.clone();
        let or_mounted = |given: &Option<PathBuf>, path: &str| {
            let mounted = || mounted(&root, Path::new(path));
            given.clone().unwrap_or_else(mounted)
        };
        let plugins = "var/lib/kubelet/device-plugins";
        Settings {
            device_plugin_dir: or_mounted(&self.device_plugin_dir, plugins),
            policy: or_mounted(&global.named_policy(), "etc/rdma-netdev/policy.json"),
            in_pod: self.pod,
            expected: self.expected,
            root,
        }
    }
}

/// The pools that the daemon would make of this configuration on this host.
fn pools(config: &Config, host: &OnHost) -> ConfiguredPools {
    let assembled = host.pools(config);
    let mut pools = ConfiguredPools {
        cdi: (config.pools.iter()).any(|pool| pool.delivery == Delivery::Cdi),
        ..ConfiguredPools::default()
    };
    for (pool, snapshot) in config.pools.iter().zip(&assembled.snapshots) {
        let resource = pool.resource.as_str();
        let mut of_pool = HostPool {
            hcas: Vec::new(),
            optional: pool.optional,
            expected: pool.expected.map(|count| count as usize),
        };
        for member in snapshot.members() {
            let names = member.hca.rdma_names();
            of_pool.hcas.push(PoolHca {
                id: names
                    .first()
                    .map_or_else(|| member.hca.id.to_string(), |&name| name.to_owned()),
                fault: member.health.worst().map(ToString::to_string),
            });
            let units = match pool.sharing {
                Sharing::Pooled { .. } => snapshot.shared_units(),
                Sharing::Shares { .. } => member.shares,
                Sharing::Exclusive { .. } | Sharing::Late(_) => 1,
            };
            for device in names {
                let of_device = pools.of_device.entry(device.to_owned()).or_default();
                of_device.push(Membership {
                    resource: resource.to_owned(),
                    shared: pool.sharing.is_shared(),
                    units,
                });
            }
        }
        pools.by_resource.insert(resource.to_owned(), of_pool);
    }
    pools
}
