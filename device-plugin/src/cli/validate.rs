//! `rdma-device-plugin validate`: what a configuration means, before the kubelet hears of it.

use std::io::Write;
use std::path::PathBuf;

use anyhow::bail;
use node::document::versioned;
use serde_json::{Value, json};

use super::flags::config_file;
use crate::candidate::Candidate;
use crate::config::{self, Config, Defaults, PoolConfig, Sharing};
use crate::host_snapshot::HostSnapshot;
use crate::pool::{self, Pools, Reason};
use crate::snapshot::{Health, UnhealthyReason};

/// Checks a configuration and shows how it is understood.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "rdmactl validate checks policies and networks, too, and what pools have on a host.\n\
    Exit status: 0 the file is in order, 1 it is not or a resource of it is refused, 2 wrong usage."
)]
pub(super) struct Validate {
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
    defaults: Defaults,
}

impl Validate {
    /// Reads the file as `run` would, and prints every resource and every warning.
    ///
    /// # Errors
    /// Everything that is wrong with the file.
    pub(super) fn run(&self, out: &mut impl Write) -> anyhow::Result<()> {
        let path = config_file(self.file.clone().or(self.config_file.clone()))?;
        let place = path.display().to_string();
        let checked = check(&place, &config::text(&path)?, &self.defaults, None);
        match self.json {
            true => writeln!(out, "{:#}", versioned(checked.document()))?,
            false => out.write_all(checked.text.as_bytes())?,
        }
        match checked.errors.is_empty() {
            true => Ok(()),
            false => bail!("configuration {place} is refused\n{}", checked.faults()),
        }
    }
}

/// What a configuration means, and what is wrong with it.
#[derive(Debug)]
pub struct Checked {
    /// How it is understood, for a person; empty if it is not.
    pub text: String,
    /// Every mistake.
    pub errors: Vec<String>,
    /// What is worth knowing.
    pub warnings: Vec<String>,
    document: Value,
}

impl Checked {
    /// The same for a program.
    #[must_use]
    pub fn document(&self) -> Value {
        self.document.clone()
    }

    /// Mistakes and, where it is refused as a whole, warnings: a line each.
    #[must_use]
    pub fn faults(&self) -> String {
        let errors = self.errors.iter().map(|error| format!("error: {error}"));
        let warnings = self.warnings.iter().filter(|_| self.text.is_empty());
        let warnings = warnings.map(|text| format!("warning: {text}"));
        errors.chain(warnings).collect::<Vec<_>>().join("\n")
    }
}

/// Checks the text of a configuration, and with a scan of a host and the HCAs of it what its pools have
/// there: an HCA that two pools choose is then a mistake, unless both are shared.
#[must_use]
pub fn check(
    place: &str,
    text: &str,
    defaults: &Defaults,
    host: Option<&(HostSnapshot, Vec<Candidate>)>,
) -> Checked {
    let config = match config::parse_with(text, defaults) {
        Ok(config) => config,
        Err(problems) => {
            let errors: Vec<String> = problems.iter().map(str::to_owned).collect();
            let warnings: Vec<String> = problems.warnings().map(str::to_owned).collect();
            return Checked {
                text: String::new(),
                document: json!({
                    "file": place, "valid": false, "errors": errors, "warnings": warnings,
                }),
                errors,
                warnings,
            };
        }
    };
    let here = host.map(|(host, hcas)| pool::assemble(&config, hcas, host, &[]));
    let here = here.as_ref();
    let contested = here.into_iter().flat_map(|here| &here.excluded);
    let contested = contested.filter(|one| matches!(one.reason, Reason::Claimed(_)));
    let contested = contested.map(ToString::to_string);
    let snapshots = here.into_iter().flat_map(|here| &here.snapshots);
    let overlapping = snapshots.filter_map(|snapshot| {
        snapshot.members().iter().find_map(|one| match &one.health {
            Health::Unhealthy(UnhealthyReason::Overlap(reason)) => {
                Some(format!("{}: {reason}", snapshot.resource()))
            }
            _ => None,
        })
    });
    let refused = config.refused.iter().cloned();
    let errors: Vec<String> = refused.chain(contested).chain(overlapping).collect();
    let pools: Vec<_> = config.pools.iter().map(|pool| entry(pool, here)).collect();
    let document = json!({
        "file": place, "valid": errors.is_empty(), "errors": errors,
        "format": config.format.to_string(),
        "rescanSeconds": config.rescan.map(|every| every.as_secs()),
        "pools": pools, "warnings": config.warnings, "refused": config.refused,
        "excluded": here.map(excluded), "remarks": here.map(|here| &here.remarks),
    });
    Checked {
        text: text_of(place, &config, here),
        errors,
        warnings: config.warnings,
        document,
    }
}

fn text_of(place: &str, config: &Config, here: Option<&Pools>) -> String {
    let rescan = config
        .rescan
        .map(|every| format!("every {} s", every.as_secs()));
    let rescan = rescan.unwrap_or_else(|| "off".to_owned());
    let mut text = format!("{place}: {}, rescan {rescan}\n", config.format);
    for pool in &config.pools {
        text += &format!("  {}: {}\n", pool.resource, units(pool.sharing));
        for selector in &pool.selectors {
            text += &format!("    HCAs with {selector}\n");
        }
        match here.map(|here| members(pool, here)) {
            Some(here) if here.is_empty() => text += "    on this host: none\n",
            Some(here) => text += &format!("    on this host: {}\n", here.join(", ")),
            None => {}
        }
    }
    let excluded = here.map(excluded).unwrap_or_default();
    let remarks = here.into_iter().flat_map(|here| &here.remarks);
    for warning in config.warnings.iter().chain(&excluded).chain(remarks) {
        text += &format!("warning: {warning}\n");
    }
    text
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
        let names = member.hca.rdma_names().join(" ");
        format!("{names} ({})", member.hca.id)
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
        Sharing::Late(late) => {
            let strict = match late.strict {
                true => "refused where farther than need be",
                false => "however far",
            };
            format!(
                "each HCA for one container alone, bound to the pod's GPUs when its network is \
                 made, {strict}"
            )
        }
    }
}
