//! What a configuration of pools means, before the kubelet hears of it.

use pools::config::flags::Defaults;
use pools::config::{self, Config, PoolConfig, Sharing};
use pools::pool::{Excluded, Pools, Reason};
use pools::snapshot::{Member, Snapshot, UnhealthyReason};
use pools::words::word;
use serde_json::{Value, json};

use super::Checked;
use crate::on_host::OnHost;

/// Checks the text of a configuration, and with a scan of a host and the HCAs of it what its pools have
/// there: an HCA that two pools choose is then a mistake, unless both are shared.
pub(super) fn check(
    place: &str,
    text: &str,
    defaults: &Defaults,
    host: Option<&OnHost>,
) -> Checked {
    let config = match config::parse_with(text, defaults) {
        Ok(config) => config,
        Err(problems) => {
            let warnings = &problems.warnings;
            return Checked {
                text: warnings
                    .iter()
                    .map(|one| format!("warning: {one}\n"))
                    .collect(),
                errors: problems.iter().map(str::to_owned).collect(),
                document: json!({"warnings": warnings}),
            };
        }
    };
    let here = host.map(|host| host.pools(&config));
    let here = here.as_ref();
    let contested = here.into_iter().flat_map(|here| &here.excluded);
    let contested = contested.filter(|one| matches!(one.reason, Reason::Claimed(_)));
    let contested = contested.map(ToString::to_string);
    let snapshots = here.into_iter().flat_map(|here| &here.snapshots);
    let overlapping = snapshots.filter_map(|snapshot| {
        let mut reasons = snapshot
            .members()
            .iter()
            .flat_map(|one| one.health.reasons());
        let reason = reasons.find(|reason| is_overlap(reason))?;
        Some(format!("{}: {reason}", snapshot.resource()))
    });
    let required = config.pools.iter().filter(|pool| !pool.optional);
    let unusable = here.map(|here| required.filter_map(|pool| unusable(pool, here)));
    let errors: Vec<String> = (contested.chain(overlapping))
        .chain(unusable.into_iter().flatten())
        .collect();
    let pools: Vec<_> = config.pools.iter().map(|pool| entry(pool, here)).collect();
    let document = json!({
        "format": config.format.to_string(),
        "rescanSeconds": config.rescan.map(|every| every.as_secs()),
        "pools": pools, "warnings": config.warnings,
        "excluded": here.map(excluded), "remarks": here.map(|here| &here.remarks),
    });
    Checked {
        text: text_of(place, &config, here),
        errors,
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
            Some(here) if here.is_empty() => {
                text += "    on this host: none (rdmactl explain HCA shows why)\n"
            }
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
    members_of(pool, here).iter().map(title).collect()
}

fn members_of<'a>(pool: &PoolConfig, here: &'a Pools) -> &'a [Member] {
    let mut snapshots = here.snapshots.iter();
    let snapshot = snapshots.find(|snapshot| *snapshot.resource() == pool.resource);
    snapshot.map(Snapshot::members).unwrap_or_default()
}

fn is_overlap(reason: &UnhealthyReason) -> bool {
    matches!(reason, UnhealthyReason::Overlap(_))
}

fn title(member: &Member) -> String {
    let names = member.hca.rdma_names().join(" ");
    let title = format!("{names} ({})", member.hca.id);
    let reasons = member.health.reasons().iter();
    let reasons: Vec<String> = reasons.map(ToString::to_string).collect();
    match reasons.is_empty() {
        true => title,
        false => format!("{title} unhealthy: {}", reasons.join("; ")),
    }
}

/// Why no pod can get an HCA of this pool here, unless another error says it.
fn unusable(pool: &PoolConfig, here: &Pools) -> Option<String> {
    let members = members_of(pool, here);
    let is_said = |member: &Member| member.health.is_healthy() || member.health.has(is_overlap);
    let excluded = here.excluded.iter();
    let excluded = excluded.filter(|one| one.resource == pool.resource);
    let excluded: Vec<&Excluded> = excluded.collect();
    let is_claimed = |one: &&Excluded| matches!(one.reason, Reason::Claimed(_));
    if members.iter().any(is_said) || excluded.iter().any(is_claimed) {
        return None;
    }
    let why: Vec<String> = match (members, excluded.as_slice()) {
        ([], []) => vec!["its selectors match none (rdmactl explain HCA shows why)".to_owned()],
        ([], excluded) => excluded.iter().map(ToString::to_string).collect(),
        (members, _) => members.iter().map(title).collect(),
    };
    Some(format!(
        "{} has no healthy HCA on this host: {}; if that is intended, set optional: true",
        pool.resource,
        why.join("; ")
    ))
}

fn entry(pool: &PoolConfig, here: Option<&Pools>) -> Value {
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
        Sharing::Shares { per_hca, policy } => {
            let shares = number(per_hca, "its");
            format!(
                "{shares} shares of each HCA, chosen by policy {}",
                word(&policy)
            )
        }
        Sharing::Exclusive { policy } => {
            format!(
                "each HCA for one container alone, chosen by policy {}",
                word(&policy)
            )
        }
        Sharing::Late(late) => {
            let strict = match late.strict {
                true => "strict: binding fails if a nearer HCA exists",
                false => "not strict",
            };
            format!(
                "each HCA for one container alone, bound to the pod's GPUs when its network is \
                 made; {strict}"
            )
        }
    }
}
