//! `rdmactl addresses export`: leases into whereabouts' objects.

use anyhow::{Context, Result, bail};
use clap::Args;
use ipam::lease::Lease;
use ipam::whereabouts::{self, GROUP};
use ipnetwork::IpNetwork;
use serde_json::{Value, json};
use std::path::PathBuf;

use super::{Scope, leases};
use crate::global::Kubectl;
use crate::output::{Ended, Exit, block_on, complain, text_of};

/// How often the objects are read again, where others change them meanwhile.
const ROUNDS: usize = 5;

#[derive(Debug, Args)]
pub(super) struct Export {
    /// Into whereabouts' objects of the cluster
    #[arg(long, required = true)]
    whereabouts: bool,
    /// Only leases of this range, as in 10.0.0.0/24; may be repeated
    #[arg(long)]
    range: Vec<IpNetwork>,
    /// Leases that `rdmactl addresses --json` printed, or `kubectl rdma`; "-" is standard input
    /// [default: this node's store]
    #[arg(long, value_name = "FILE")]
    leases: Option<PathBuf>,
    #[command(flatten)]
    kubectl: Kubectl,
    /// Write them; without this only their number is shown
    #[arg(long, short)]
    yes: bool,
}

impl Export {
    pub(super) fn run(&self, scope: &Scope<'_>) -> Ended {
        let mut leases = match &self.leases {
            Some(file) => {
                let (place, text) = text_of(file)?;
                read(&text).with_context(|| format!("read {place}"))?
            }
            None => match scope.open_used()?.1 {
                Some(leases) => leases::read(&leases, scope.store)?,
                None => Vec::new(),
            },
        };
        leases.retain(|lease| self.range.is_empty() || self.range.contains(&lease.range));
        let mut export = self.compare(&leases)?;
        let missing = export.missing;
        let mut rounds = 0;
        while self.yes && export.missing > 0 {
            rounds += 1;
            let written = block_on(async {
                self.kubectl.write("replace", &export.replace).await?;
                self.kubectl.write("create", &export.create).await
            })?;
            // Others may have changed the objects meanwhile: what they are now says what is left.
            match written {
                Err(error) if rounds == ROUNDS => return Err(error),
                _ if rounds > ROUNDS => bail!("whereabouts' objects do not keep what is written"),
                _ => export = self.compare(&leases)?,
            }
        }
        let refused = &export.refused;
        let there = leases.len().saturating_sub(missing + refused.len());
        let document = json!({"dryRun": !self.yes, "leases": leases.len(), "exported": missing,
            "refused": refused});
        scope.global.say(document, || match self.yes {
            true => format!("{missing} exported, {there} were there\n"),
            false => format!("{missing} to export; nothing was written, give --yes\n"),
        });
        for why in refused {
            complain(why);
        }
        Ok(Exit::good_if(refused.is_empty()))
    }

    fn compare(&self, leases: &[Lease]) -> Result<whereabouts::Export> {
        let objects = |plural: &str| {
            let resource = format!("{plural}.{GROUP}");
            block_on(async { self.kubectl.objects(&[&resource]).await })?
        };
        let pools = objects("ippools")?;
        let reservations = objects("overlappingrangeipreservations")?;
        Ok(whereabouts::export(leases, &pools, &reservations))
    }
}

/// The leases in what `rdmactl addresses --json` printed on one node, or `kubectl rdma addresses --json` for all. All
/// nodes must have answered: the addresses of one that is not there would be leased twice.
fn read(text: &str) -> Result<Vec<Lease>> {
    let document: Value = serde_json::from_str(text).context("it is not JSON")?;
    let Some(nodes) = document.get("nodes").and_then(Value::as_array) else {
        return leases_of(&document);
    };
    let mut leases = Vec::new();
    for node in nodes {
        let name = node.get("node").and_then(Value::as_str).unwrap_or_default();
        if let Some(why) = node.get("error").and_then(Value::as_str) {
            bail!("node {name} did not answer: {why}");
        }
        let document = node.get("document").unwrap_or(&Value::Null);
        leases.extend(leases_of(document).with_context(|| format!("node {name}"))?);
    }
    Ok(leases)
}

fn leases_of(document: &Value) -> Result<Vec<Lease>> {
    let leases = document.get("leases").context("it has no leases")?;
    serde_json::from_value(leases.clone()).context("its leases cannot be read")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_of_all_nodes_are_read_and_of_some_refused() {
        let lease = json!({
            "address": "10.0.0.5", "prefix": 24, "range": "10.0.0.0/24", "store": "default", "part": 0,
            "network": "rail", "container": "c", "interface": "net1", "node": "n1",
            "created": "2026-01-01T00:00:00Z",
        });
        let one = json!({"version": 1, "leases": [lease]});
        assert_eq!(read(&one.to_string()).unwrap().len(), 1);
        let node = |error: Value, document: Value| json!({"node": "n1", "error": error, "document": document});
        let all = json!({"nodes": [node(Value::Null, one.clone()), node(Value::Null, one)]});
        assert_eq!(read(&all.to_string()).unwrap().len(), 2);
        for (wrong, says) in [
            (json!({"nodes": [node(json!("gone"), Value::Null)]}), "gone"),
            (
                json!({"nodes": [node(Value::Null, json!({}))]}),
                "no leases",
            ),
            (json!({"blocks": []}), "no leases"),
        ] {
            let error = format!("{:#}", read(&wrong.to_string()).unwrap_err());
            assert!(error.contains(says), "{error}");
        }
    }
}
