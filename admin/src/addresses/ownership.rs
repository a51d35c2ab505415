//! Who owns which addresses, by an administrator's word: a directory for the documents, parts that are
//! assigned, released and given back. The node's agent makes the changes.

use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use clap::Args;
use ipam::plugin::AGENT_SOCKET;
use ipnetwork::IpNetwork;
use node::policy::StoreKind;
use node_wire::client;
use node_wire::{PartsChange, PartsChanged, PartsQuestion};
use serde_json::json;

use super::Scope;
use crate::output::{Ended, Exit, complain, confirmed};

/// The agent answers earlier.
const LIMIT: Duration = Duration::from_secs(35);

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
pub(super) struct Assign {
    /// The network, as 10.56.3.16/28
    part: IpNetwork,
    /// The node whose own network it is (perNode)
    #[arg(long, value_name = "NODE")]
    node: String,
    /// The network name of its space
    #[arg(long)]
    network_name: Option<String>,
}

impl Assign {
    pub(super) fn run(&self, scope: &Scope<'_>) -> Ended {
        let change = PartsChange::Assign {
            part: self.part.to_string(),
            node: self.node.clone(),
        };
        change_parts(scope, self.network_name.as_deref(), change, "assigned")
    }
}

#[derive(Debug, Args)]
pub(super) struct GiveBack {
    /// The network name of the space
    #[arg(long)]
    network_name: Option<String>,
}

impl GiveBack {
    pub(super) fn run(&self, scope: &Scope<'_>) -> Ended {
        let network_name = self.network_name.as_deref();
        change_parts(scope, network_name, PartsChange::GiveBack, "given back")
    }
}

/// Releases parts, whoever has them.
pub(super) fn release(
    scope: &Scope<'_>,
    network_name: Option<&str>,
    change: PartsChange,
    yes: bool,
) -> Ended {
    let what = match &change {
        PartsChange::ReleaseNode(node) => format!("all parts of node {node}"),
        PartsChange::ReleasePart(part) => part.clone(),
        PartsChange::GiveBack | PartsChange::Assign { .. } => String::new(),
    };
    let question = format!(
        "release {what}? Pods that still have addresses of it will share them with the next."
    );
    match confirmed(yes, &question)? {
        true => change_parts(scope, network_name, change, "released"),
        false => Ok(Exit::Found),
    }
}

fn change_parts(
    scope: &Scope<'_>,
    network_name: Option<&str>,
    change: PartsChange,
    done: &str,
) -> Ended {
    let PartsChanged { changed, kept } = ask(scope, network_name, change)?;
    let document = json!({"changed": changed, "kept": kept});
    scope.global.say(document, || {
        let lines = changed.iter().map(|part| format!("{part} {done}\n"));
        lines.collect()
    });
    for (part, why) in &kept {
        complain(&format!("{part} stays: {why}"));
    }
    match kept.is_empty() {
        true => Ok(Exit::Good),
        false => Ok(Exit::Found),
    }
}

fn ask(scope: &Scope<'_>, network_name: Option<&str>, change: PartsChange) -> Result<PartsChanged> {
    let question = PartsQuestion {
        store: scope.store.to_owned(),
        network_name: network_name
            .filter(|name| !name.is_empty())
            .map(str::to_owned),
        change,
    };
    let socket = scope.global.host_root.join(AGENT_SOCKET);
    client::ask(&socket, &question, LIMIT).map_err(|error| anyhow!(error))
}
