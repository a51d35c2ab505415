//! The journal and the leases of this node, as far as they can be read.

use std::time::Duration;

use hca::wait;
use ipam::{lease::Lease, plugin::Plugin};
use node::policy::{Policy, PolicyError};

use crate::journal::Record;
use crate::listing::{self, Attachment};
use crate::node::{Node, Places};

/// How long a store may take.
const STORE_TIMEOUT: Duration = Duration::from_secs(4);

/// The journal and the leases of this node.
#[derive(Debug)]
pub struct Files {
    /// Attachments, or why they cannot be read.
    pub attachments: Result<Vec<Attachment>, String>,
    /// Leases of this node.
    pub leases: Result<Vec<Lease>, String>,
    /// What could not be read of either.
    pub notes: Vec<String>,
}

/// Reads the journal and the stores that the node's policy names.
pub fn read(places: &Places) -> Files {
    hca::host::show(&places.policy);
    let node_name = places.node.clone();
    let mut node = match Node::open_for_release(places, "status".into()) {
        Ok(node) => node,
        Err(error) => {
            let error = error.to_string();
            return Files {
                attachments: Err(error.clone()),
                leases: Err(error),
                notes: Vec::new(),
            };
        }
    };
    hca::host::show(&node.policy.values.state_dir);
    let mut notes: Vec<String> = node
        .policy
        .fault
        .iter()
        .map(PolicyError::with_remedy)
        .collect();
    let attachments: Result<Vec<Attachment>, String> = listing::records(&node)
        .map(|(records, complaints)| {
            notes.extend(complaints);
            let of_record = |(_, record): &(_, Record)| {
                let (all, unknown) = Attachment::all_of(record, &mut node);
                notes.extend(unknown.map(|why| {
                    let owner = record.owner();
                    format!("{owner}: which interface has which address is unknown: {why}")
                }));
                all
            };
            records.iter().flat_map(of_record).collect()
        })
        .map_err(|error| error.to_string());
    // By the node's name, by an attachment, or by machine and boot (below): the name may not be known here.
    let name = node.policy.values.node_name(node_name.as_deref());
    let attached: Vec<String> = attachments
        .iter()
        .flatten()
        .map(|one| one.container.clone())
        .collect();
    let (mut found, mut failed) = (None, Vec::new());
    for store in node.policy.values.stores.keys() {
        let (name, attached) = (name.clone(), attached.clone());
        let own = move |lease: &Lease| {
            lease.holder.node == name || attached.contains(&lease.holder.container)
        };
        match leases_in_time(&node.policy.values, places, store, own) {
            Ok(None) => {
                found.get_or_insert_with(Vec::new);
            }
            Ok(Some((leases, complaints))) => {
                found.get_or_insert_with(Vec::new).extend(leases);
                notes.extend(complaints);
            }
            Err(error) => failed.push(format!("leases of store {store:?}: {error}")),
        }
    }
    let leases = match found {
        Some(leases) => {
            notes.extend(failed);
            Ok(leases)
        }
        None if failed.is_empty() => Ok(Vec::new()),
        None => Err(failed.join("; ")),
    };
    Files {
        attachments,
        leases,
        notes,
    }
}

/// Leases, and what is to be said of those that cannot be read.
type Leases = (Vec<Lease>, Vec<String>);

/// The leases of one store that was used.
fn leases_in_time(
    policy: &Policy,
    places: &Places,
    store: &str,
    own: impl Fn(&Lease) -> bool + Send + 'static,
) -> Result<Option<Leases>, String> {
    let (policy, places, name) = (policy.clone(), places.clone(), store.to_owned());
    let read = move || {
        if let Some(store) = policy.stores.get(&name) {
            hca::host::show(&store.directory);
        }
        let ipam = Plugin::new(policy, &places.root, places.node.as_deref());
        leases_of(&ipam, &name, own)
    };
    wait("it", STORE_TIMEOUT, read).map_err(|late| late.to_string())?
}

fn leases_of(
    ipam: &Plugin,
    store: &str,
    own: impl Fn(&Lease) -> bool,
) -> Result<Option<Leases>, String> {
    let Some(open) = ipam
        .open_existing(store)
        .map_err(|error| error.to_string())?
    else {
        return Ok(None);
    };
    let (mut leases, mut complaints) = (Vec::new(), Vec::new());
    let findings = open.entries(true, |entry| {
        match entry.record {
            _ if entry.freed.is_some() => {}
            Ok(lease) if own(&lease) || lease.holder.is_of_this_boot(open.node()) => {
                leases.push(lease);
            }
            Ok(_) => {}
            Err(why) => complaints.push(format!("{}: {why}", entry.path.display())),
        }
        Ok(())
    });
    let findings = findings.map_err(|error| error.to_string())?;
    let findings = findings.into_iter();
    complaints.extend(findings.map(|found| format!("{}: {}", found.path.display(), found.what)));
    leases.sort_by_key(|lease| lease.address);
    Ok(Some((leases, complaints)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_journal_or_store_that_was_never_used_holds_nothing() {
        let place = tempfile::tempdir().unwrap();
        let (state, store) = (place.path().join("state"), place.path().join("store"));
        let policy = place.path().join("policy.json");
        let values = json!({"stateDir": state,
            "stores": {"default": {"type": "file", "directory": store}}});
        std::fs::write(&policy, values.to_string()).unwrap();
        let unused = read(&Places {
            root: "/".into(),
            policy,
            node: Some("n1".into()),
        });
        assert!(unused.attachments.unwrap().is_empty() && unused.leases.unwrap().is_empty());
    }
}
