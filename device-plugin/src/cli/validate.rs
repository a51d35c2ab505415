//! `rdma-device-plugin validate`: what a configuration means, before the kubelet hears of it.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use node::document::versioned;
use serde_json::json;

use crate::candidate::gather;
use crate::config::{self, Config, PoolConfig, Problems, Sharing, nic_cluster_policy};
use crate::pool::{self, Pools, Reason};

/// Checks a configuration and shows how it is understood.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit status: 0 the file is in order, 1 it is not or a resource of it is refused, \
    2 wrong usage. With --on-host \
    an HCA that two pools choose is a mistake, unless both are shared."
)]
pub(super) struct Validate {
    /// Configuration file [default: as for "run"]
    #[arg(value_name = "FILE", conflicts_with = "config_file")]
    file: Option<PathBuf>,
    /// The same as a flag
    #[arg(long, value_name = "FILE", env = "RDMA_CONFIG_FILE")]
    config_file: Option<PathBuf>,
    /// Read an operator's `NicClusterPolicy` ("kubectl get nicclusterpolicies -o yaml"), "-" for
    /// standard input, and print values for our chart
    #[arg(long, value_name = "FILE", conflicts_with_all = ["file", "on_host"])]
    from_nic_cluster_policy: Option<PathBuf>,
    /// Scan this host's hardware, too: which HCAs each pool has here
    #[arg(long)]
    on_host: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    defaults: super::Defaults,
    #[command(flatten)]
    host: super::HostRoot,
}

impl Validate {
    /// Reads the file as `run` would, and prints every resource and every warning.
    ///
    /// # Errors
    /// Everything that is wrong with the file.
    pub(super) fn run(&self, out: &mut impl Write) -> anyhow::Result<()> {
        if let Some(policy) = &self.from_nic_cluster_policy {
            return self.take_over(policy, out);
        }
        let named = self.file.clone().or(self.config_file.clone());
        let path = match super::config_file(named) {
            Ok(path) => path,
            Err(error) => return self.fail(None, error, &[], out),
        };
        let config = match config::load(&path, &self.defaults.read()) {
            Ok(config) => config,
            Err(config::Error::Invalid { path, problems }) => {
                return self.refuse(&path, &problems, out);
            }
            Err(error) => return self.fail(Some(&path), error.into(), &[], out),
        };
        let here = match self.on_host.then(|| self.pools(&config)).transpose() {
            Ok(here) => here,
            Err(error) => return self.fail(Some(&path), error, &config.warnings, out),
        };
        let contested = here.iter().flat_map(|here| &here.excluded);
        let contested = contested.filter(|one| matches!(one.reason, Reason::Claimed(_)));
        let contested = contested.map(ToString::to_string);
        let mistakes: Vec<String> = config.refused.iter().cloned().chain(contested).collect();
        self.print(&path, &config, here.as_ref(), &mistakes, out)?;
        if mistakes.is_empty() {
            return Ok(());
        }
        bail!("{}", mistakes.join("\n"))
    }

    /// Prints the values that an operator's policy comes to, once the configuration in it was read.
    fn take_over(&self, path: &Path, out: &mut impl Write) -> anyhow::Result<()> {
        let text = match super::text_of(path) {
            Ok(text) => text,
            Err(error) => return self.fail(Some(path), error, &[], out),
        };
        let read = nic_cluster_policy::read(&text);
        let from = match read {
            Ok(from) => from,
            Err(problems) => return self.refuse(path, &problems, out),
        };
        let config = match config::parse(&from.config) {
            Ok(config) => config,
            Err(problems) => return self.refuse(path, &problems, out),
        };
        if self.json {
            let document = json!({
                "file": path, "valid": config.refused.is_empty(), "errors": config.refused,
                "warnings": config.warnings, "from": format!("spec.{}", from.field),
                "values": from.values_file(), "notes": from.notes,
            });
            writeln!(out, "{:#}", versioned(document)).context("print")?;
        } else {
            for note in from.notes.iter().chain(&config.warnings) {
                writeln!(out, "# {note}")?;
            }
            out.write_all(from.values_file().as_bytes())?;
        }
        match config.refused.is_empty() {
            true => Ok(()),
            false => bail!("{}", config.refused.join("\n")),
        }
    }

    /// A refused file with every problem and every warning, in text each on a line of its own.
    fn refuse(&self, path: &Path, problems: &Problems, out: &mut impl Write) -> anyhow::Result<()> {
        let errors: Vec<String> = problems.iter().map(str::to_owned).collect();
        let warnings: Vec<String> = problems.warnings().map(str::to_owned).collect();
        self.print_failure(Some(path), &errors, &warnings, out)?;
        let errors = errors.iter().map(|problem| format!("\nerror: {problem}"));
        let warnings = warnings.iter().map(|text| format!("\nwarning: {text}"));
        let lines: String = errors.chain(warnings).collect();
        bail!("configuration {} is refused{lines}", path.display())
    }

    /// An error that is none of the file's contents.
    fn fail(
        &self,
        path: Option<&Path>,
        error: anyhow::Error,
        warnings: &[String],
        out: &mut impl Write,
    ) -> anyhow::Result<()> {
        self.print_failure(path, &[super::chain(&error)], warnings, out)?;
        Err(error)
    }

    /// With `--json` there is a document whatever is wrong.
    fn print_failure(
        &self,
        path: Option<&Path>,
        errors: &[String],
        warnings: &[String],
        out: &mut impl Write,
    ) -> anyhow::Result<()> {
        if !self.json {
            return Ok(());
        }
        let document = json!({
            "file": path, "valid": false, "errors": errors, "warnings": warnings,
        });
        writeln!(out, "{:#}", versioned(document)).context("print")
    }

    fn pools(&self, config: &Config) -> anyhow::Result<Pools> {
        let seen = self.host.scan()?;
        let (candidates, _) = gather::list(&seen.inventory, &seen.functions);
        Ok(pool::assemble(config, &candidates, &seen, &[]))
    }

    fn print(
        &self,
        path: &Path,
        config: &Config,
        here: Option<&Pools>,
        mistakes: &[String],
        out: &mut impl Write,
    ) -> anyhow::Result<()> {
        let rescan = config.rescan.map(|every| every.as_secs());
        if self.json {
            let pools: Vec<_> = config.pools.iter().map(|pool| entry(pool, here)).collect();
            let document = json!({
                "file": path, "valid": mistakes.is_empty(), "errors": mistakes,
                "format": config.format.to_string(), "rescanSeconds": rescan,
                "pools": pools, "warnings": config.warnings, "refused": config.refused,
                "excluded": here.map(excluded), "remarks": here.map(|here| &here.remarks),
            });
            return writeln!(out, "{:#}", versioned(document)).context("print");
        }
        let rescan = rescan.map_or("off".into(), |seconds| format!("every {seconds} s"));
        writeln!(
            out,
            "{}: {}, rescan {rescan}",
            path.display(),
            config.format
        )?;
        for pool in &config.pools {
            writeln!(out, "  {}: {}", pool.resource, units(pool.sharing))?;
            for selector in &pool.selectors {
                writeln!(out, "    HCAs with {selector}")?;
            }
            match here.map(|here| members(pool, here)) {
                Some(here) if here.is_empty() => writeln!(out, "    on this host: none")?,
                Some(here) => writeln!(out, "    on this host: {}", here.join(", "))?,
                None => {}
            }
        }
        let excluded = here.map(excluded).unwrap_or_default();
        let remarks = here.iter().flat_map(|here| &here.remarks);
        for warning in config.warnings.iter().chain(&excluded).chain(remarks) {
            writeln!(out, "warning: {warning}")?;
        }
        Ok(())
    }
}

/// Why HCAs are not in a pool that chooses them, but for what is a mistake of the configuration.
fn excluded(here: &Pools) -> Vec<String> {
    let others = here.excluded.iter();
    let others = others.filter(|one| !matches!(one.reason, Reason::Claimed(_)));
    others.map(ToString::to_string).collect()
}

fn members(pool: &PoolConfig, here: &Pools) -> Vec<String> {
    let snapshot = here.snapshots.iter();
    let mut snapshot = snapshot.filter(|snapshot| *snapshot.resource() == pool.resource);
    let members = snapshot.next().map(|snapshot| snapshot.members());
    let named = members.unwrap_or_default().iter().map(|member| {
        let names = member.rdma_devices.join(" ");
        format!("{names} ({})", member.id)
    });
    named.collect()
}

fn entry(pool: &PoolConfig, here: Option<&Pools>) -> serde_json::Value {
    let selectors: Vec<_> = pool.selectors.iter().map(ToString::to_string).collect();
    json!({
        "resource": pool.resource.as_str(), "units": units(pool.sharing), "selectors": selectors,
        "excludeTopology": pool.exclude_topology,
        "onHost": here.map(|here| members(pool, here)),
    })
}

fn units(sharing: Sharing) -> String {
    let number = |units: Option<u32>, of: &str| match units {
        Some(units) => units.to_string(),
        None => format!("as many as {of} GID table allows"),
    };
    match sharing {
        Sharing::Pooled { units } => {
            format!("{} units, each with all HCAs", number(units, "the"))
        }
        Sharing::Slots { per_hca, policy } => {
            let slots = number(per_hca, "its");
            format!(
                "{slots} slots of each HCA, chosen by policy {}",
                policy.word()
            )
        }
        Sharing::Exclusive { policy } => {
            format!(
                "each HCA for one container alone, chosen by policy {}",
                policy.word()
            )
        }
    }
}
