//! `rdma-device-plugin validate`: what a configuration means, before the kubelet hears of it.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use serde_json::json;

use crate::config::{self, PoolConfig, Sharing};

/// Checks a configuration and shows how it is understood; looks at no hardware.
#[derive(Debug, clap::Args)]
pub struct Validate {
    /// Configuration file [default: as for "run"]
    #[arg(value_name = "FILE", conflicts_with = "config_file")]
    file: Option<PathBuf>,
    /// The same as a flag
    #[arg(long, value_name = "FILE", env = "RDMA_CONFIG_FILE")]
    config_file: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    defaults: super::Defaults,
}

impl Validate {
    /// Reads the file as `run` would, and prints every resource and every warning.
    ///
    /// # Errors
    /// Everything that is wrong with the file.
    pub fn run(&self, out: &mut impl Write) -> anyhow::Result<()> {
        let path = super::config_file(self.file.clone().or(self.config_file.clone()))?;
        let config = config::load(&path, &self.defaults.read())?;
        let rescan = config.rescan.map(|every| every.as_secs());
        if self.json {
            let pools: Vec<_> = config.pools.iter().map(entry).collect();
            let document = json!({
                "file": path, "format": config.format.to_string(), "rescanSeconds": rescan,
                "pools": pools, "warnings": config.warnings,
            });
            return writeln!(out, "{document:#}").context("print");
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
        }
        for warning in &config.warnings {
            writeln!(out, "warning: {warning}")?;
        }
        Ok(())
    }
}

fn entry(pool: &PoolConfig) -> serde_json::Value {
    let selectors: Vec<_> = pool.selectors.iter().map(ToString::to_string).collect();
    json!({
        "resource": pool.resource.as_str(), "units": units(pool.sharing), "selectors": selectors,
        "excludeTopology": pool.exclude_topology,
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
