//! Who owns which addresses, by an administrator's word: a directory for the documents, parts that are
//! assigned, released and given back, ranges that move from another program. The node's agent makes the
//! changes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use ipam::plugin::AGENT_SOCKET;
use ipnetwork::IpNetwork;
use node::policy::StoreKind;
use node_wire::client;
use node_wire::{OldLeases, PartsChange, PartsChanged, PartsQuestion, Reserved};
use serde_json::json;

use super::Scope;
use crate::output::{Ended, Exit, complain, confirmed, say};

/// The agent answers earlier about parts. A range may have thousands of subnets.
const LIMIT: Duration = Duration::from_secs(35);
const RANGE_LIMIT: Duration = Duration::from_mins(30);
/// host-local makes it beside its leases.
const HOST_LOCAL_LOCK: &str = "lock";

/// Makes the store's directory one for the documents of all nodes that mount it.
pub(super) fn init(scope: &Scope<'_>) -> Ended {
    let policy = scope.global.policy()?;
    let store = policy.stores.get(scope.store).map(|store| &store.kind);
    let Some(StoreKind::Directory(directory)) = store else {
        bail!(
            "the policy has no store {:?} with a directory; name one with --store",
            scope.store
        );
    };
    ipam::directory::init(directory)?;
    scope.global.say(json!({"directory": directory}), || {
        format!("{} is for all nodes that mount it\n", directory.display())
    });
    Ok(Exit::Good)
}

#[derive(Debug, Args)]
pub(super) struct Space {
    /// The network name of the space
    #[arg(long)]
    network_name: Option<String>,
}

#[derive(Debug, Args)]
pub(super) struct Assign {
    /// The network, as 10.56.3.16/28
    part: IpNetwork,
    /// The node whose own network it is (perNode)
    #[arg(long, value_name = "NODE", value_parser = node_name)]
    node: String,
    #[command(flatten)]
    space: Space,
}

fn node_name(text: &str) -> Result<String, &'static str> {
    let is_name = node::identity::is_name(text);
    is_name.then(|| text.to_owned()).ok_or("not a node's name")
}

impl Assign {
    pub(super) fn run(&self, scope: &Scope<'_>) -> Ended {
        let (part, node) = (self.part.to_string(), self.node.clone());
        let change = PartsChange::Assign { part, node };
        change_parts(scope, &self.space, change, "assigned")
    }
}

pub(super) fn give_back(scope: &Scope<'_>, space: &Space) -> Ended {
    change_parts(scope, space, PartsChange::GiveBack, "given back")
}

/// Releases parts, whoever has them.
pub(super) fn release(
    scope: &Scope<'_>,
    network_name: Option<String>,
    change: PartsChange,
    what: &str,
    yes: bool,
) -> Ended {
    let question = format!(
        "release {what}? Pods that still have addresses of it will share them with the next."
    );
    match confirmed(yes, &question)? {
        true => change_parts(scope, &Space { network_name }, change, "released"),
        false => Ok(Exit::Found),
    }
}

#[derive(Debug, Args)]
pub(super) struct Ranges {
    /// The range, as 10.56.0.0/20: at most 4,096 times 256 addresses
    #[arg(required = true, value_name = "RANGE")]
    ranges: Vec<IpNetwork>,
    #[command(flatten)]
    space: Space,
}

impl Ranges {
    pub(super) fn change(
        &self,
        scope: &Scope<'_>,
        change: impl Fn(String) -> PartsChange,
        text: impl Fn(&Reserved) -> String,
    ) -> Ended {
        let mut documents = Vec::new();
        for range in &self.ranges {
            let changed = ask(scope, &self.space, change(range.to_string()), RANGE_LIMIT)
                .with_context(|| range.to_string())?;
            let reserved = changed.reserved.unwrap_or_default();
            if !scope.global.json {
                say(&format!("{range}: {}\n", text(&reserved)));
            }
            for (address, why) in &changed.kept {
                complain(&format!("{address}: {why}"));
            }
            documents.push(
                json!({"range": range, "added": reserved.added, "removed": reserved.removed,
                "left": reserved.left, "kept": changed.kept}),
            );
        }
        scope.global.say(json!({"ranges": documents}), String::new);
        Ok(Exit::Good)
    }
}

#[derive(Debug, Args)]
pub(super) struct Import {
    #[command(flatten)]
    ranges: Ranges,
    /// Namespace of whereabouts' objects
    #[arg(long, default_value = "kube-system")]
    namespace: String,
    /// Import what host-local leases on this node, from its directory, as /var/lib/cni/networks/rail1
    #[arg(long, value_name = "DIR", conflicts_with = "namespace")]
    host_local: Option<PathBuf>,
}

impl Import {
    pub(super) fn run(&self, scope: &Scope<'_>) -> Ended {
        let leases = match &self.host_local {
            None => OldLeases::Whereabouts {
                namespace: self.namespace.clone(),
            },
            Some(directory) => {
                let path = directory.strip_prefix("/").unwrap_or(directory);
                let path = scope.global.host_root.join(path);
                host_local(&path).with_context(|| format!("read {}", path.display()))?
            }
        };
        let change = |range| PartsChange::Import {
            range,
            leases: leases.clone(),
        };
        self.ranges.change(scope, change, |of| {
            format!(
                "{} added, {} removed, {} left",
                of.added, of.removed, of.left
            )
        })
    }
}

/// The leases in a directory of host-local: a file for each, which has its container's ID.
fn host_local(directory: &Path) -> Result<OldLeases> {
    // Without it an empty directory says nothing.
    let lock = std::fs::metadata(directory.join(HOST_LOCAL_LOCK));
    lock.context("it is not a directory of host-local's leases: its file lock")?;
    let network = directory.file_name().and_then(|name| name.to_str());
    let mut leases = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let Some(address) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        let Some(text) = node::trust::read(&entry.path(), 4096)? else {
            continue;
        };
        let text = String::from_utf8_lossy(&text);
        let container: String = text
            .chars()
            .take_while(char::is_ascii_alphanumeric)
            .take(12)
            .collect();
        leases.push((address, container));
    }
    leases.sort_unstable();
    Ok(OldLeases::HostLocal {
        network: network.context("it has no name")?.to_owned(),
        leases,
    })
}

fn change_parts(scope: &Scope<'_>, space: &Space, change: PartsChange, done: &str) -> Ended {
    let PartsChanged { changed, kept, .. } = ask(scope, space, change, LIMIT)?;
    let document = json!({"changed": changed, "kept": kept});
    scope.global.say(document, || {
        let lines = changed.iter().map(|part| format!("{part} {done}\n"));
        lines.collect()
    });
    for (part, why) in &kept {
        complain(&format!("{part} stays: {why}"));
    }
    Ok(Exit::good_if(kept.is_empty()))
}

fn ask(
    scope: &Scope<'_>,
    space: &Space,
    change: PartsChange,
    limit: Duration,
) -> Result<PartsChanged> {
    let network_name = space.network_name.clone().filter(|name| !name.is_empty());
    let question = PartsQuestion {
        store: scope.store.to_owned(),
        network_name,
        change,
    };
    let socket = scope.global.host_root.join(AGENT_SOCKET);
    client::ask(&socket, &question, limit).map_err(|error| anyhow!(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_locals_leases_are_read_from_its_directory_only() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("rail1");
        std::fs::create_dir(&directory).unwrap();
        let why = format!("{:#}", host_local(&directory).unwrap_err());
        assert!(
            why.contains("not a directory of host-local's leases"),
            "{why}"
        );
        for (name, text) in [
            ("lock", ""),
            ("last_reserved_ip.0", "10.0.0.5"),
            ("10.0.0.5", "0123456789abcdef\r\nnet1"),
            ("10.0.0.6", ""),
        ] {
            std::fs::write(directory.join(name), text).unwrap();
        }
        let lease =
            |address: &str, container: &str| (address.parse().unwrap(), container.to_owned());
        let expected = OldLeases::HostLocal {
            network: "rail1".into(),
            leases: vec![lease("10.0.0.5", "0123456789ab"), lease("10.0.0.6", "")],
        };
        assert_eq!(host_local(&directory).unwrap(), expected);
    }

    #[test]
    fn a_part_is_assigned_to_the_name_of_a_node_only() {
        assert_eq!(node_name("gpu-17").unwrap(), "gpu-17");
        for wrong in ["", "a b", "../x"] {
            assert!(node_name(wrong).is_err(), "{wrong}");
        }
    }
}
