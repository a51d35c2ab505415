//! `rdma-ipam export`: leases into whereabouts' objects.

use super::list::List;
use super::{Global, Outcome, complain, say, say_json};
use crate::lease::Lease;
use crate::whereabouts::{self, GROUP};
use anyhow::{Context, Result, bail};
use clap::Args;
use ipnetwork::IpNetwork;
use serde_json::{Value, json};
use std::io::Write;
use std::process::{Command, Output, Stdio};

/// How often the objects are read again, where others change them meanwhile.
const ROUNDS: usize = 5;

#[derive(Debug, Args)]
pub(super) struct Export {
    /// Into whereabouts' objects of the cluster
    #[arg(long, required = true)]
    whereabouts: bool,
    /// Namespace of these objects
    #[arg(long, value_name = "NAME", default_value = "kube-system")]
    namespace: String,
    /// Only leases of this range, as in 10.0.0.0/24; may be repeated
    #[arg(long)]
    range: Vec<IpNetwork>,
    /// Leases that list --json printed, of one node or of all; "-" is stdin [default: this node's store]
    #[arg(long, value_name = "FILE")]
    leases: Option<String>,
    /// The program that stands for kubectl
    #[arg(long, value_name = "PROGRAM", default_value = "kubectl")]
    kubectl: String,
    /// Write them; without this only their number is shown
    #[arg(long, short)]
    yes: bool,
}

impl Export {
    pub(super) fn run(self, global: &Global) -> Result<Outcome> {
        let mut leases = match self.leases.as_deref() {
            Some("-") => read(&std::io::read_to_string(std::io::stdin())?)?,
            Some(path) => {
                let text = std::fs::read_to_string(path).with_context(|| format!("read {path}"))?;
                read(&text).with_context(|| format!("read {path}"))?
            }
            None => match global.open_used()?.1 {
                Some(store) => List::default().leases(&store)?,
                None => Vec::new(),
            },
        };
        leases.retain(|lease| self.range.is_empty() || self.range.contains(&lease.range));
        let mut export = self.compare(&leases)?;
        let missing = export.missing;
        let mut rounds = 0;
        while self.yes && export.missing > 0 {
            rounds += 1;
            let written = self
                .send("replace", export.replace)
                .and_then(|()| self.send("create", export.create));
            // Others may have changed the objects meanwhile: what they are now says what is left.
            match written {
                Err(error) if rounds == ROUNDS => return Err(error),
                _ if rounds > ROUNDS => bail!("whereabouts' objects do not keep what is written"),
                _ => export = self.compare(&leases)?,
            }
        }
        let refused = &export.refused;
        let there = leases.len().saturating_sub(missing + refused.len());
        if global.json {
            say_json(
                json!({"dryRun": !self.yes, "leases": leases.len(), "exported": missing,
                "refused": refused}),
            );
        } else {
            say(&match self.yes {
                true => format!("{missing} exported, {there} were there\n"),
                false => format!("{missing} to export; nothing was written, say --yes\n"),
            });
        }
        for why in refused {
            complain(why);
        }
        Ok(match refused.is_empty() {
            true => Outcome::Done,
            false => Outcome::Found,
        })
    }

    fn compare(&self, leases: &[Lease]) -> Result<whereabouts::Export> {
        let pools = self.objects("ippools")?;
        let reservations = self.objects("overlappingrangeipreservations")?;
        Ok(whereabouts::export(leases, &pools, &reservations))
    }

    fn objects(&self, plural: &str) -> Result<Vec<Value>> {
        let kind = format!("{plural}.{GROUP}");
        let output = self.kubectl(&["get", &kind, "--output=json"], b"")?;
        let mut list: Value = serde_json::from_slice(&output.stdout)
            .with_context(|| format!("read what kubectl get {kind} printed"))?;
        match list.get_mut("items").map(Value::take) {
            Some(Value::Array(items)) => Ok(items),
            _ => bail!("kubectl get {kind} printed no list"),
        }
    }

    /// `create` or `replace`: each object is written as the API has it now, or not at all.
    fn send(&self, verb: &str, objects: Vec<Value>) -> Result<()> {
        if objects.is_empty() {
            return Ok(());
        }
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
        self.kubectl(&[verb, "--filename=-"], list.to_string().as_bytes())
            .map(drop)
    }

    fn kubectl(&self, arguments: &[&str], input: &[u8]) -> Result<Output> {
        let program = &self.kubectl;
        let attempt = || format!("{program} {}", arguments.join(" "));
        let mut child = Command::new(program)
            .arg(format!("--namespace={}", self.namespace))
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("start {program}"))?;
        let stdin = child.stdin.take();
        let output = std::thread::scope(|scope| {
            // One that ends without reading says why.
            scope.spawn(move || stdin.map(|mut stdin| stdin.write_all(input)));
            child.wait_with_output()
        });
        let output = output.with_context(attempt)?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("{}: {}", attempt(), said.trim());
        }
        Ok(output)
    }
}

/// The leases in what `list --json` printed on one node, or in one document of the answers of all. All
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
            "address": "10.0.0.5", "prefix": 24, "range": "10.0.0.0/24", "generation": 1, "part": 0,
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
