//! The journal and the leases of this node, as far as they can be read.

use ipam::{lease::Lease, plugin::Plugin};
use node::policy::PolicyError;

use crate::journal::Record;
use crate::listing::{self, Attachment};
use crate::node::{Node, Places};

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

/// Reads the journal and the leases.
pub fn read(places: &Places) -> Files {
    hca::host::show(&places.policy);
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
    let leases = match leases_of(&node.ipam) {
        Ok((leases, complaints)) => {
            notes.extend(complaints);
            Ok(leases)
        }
        Err(error) => Err(format!("the node's leases: {error}")),
    };
    Files {
        attachments,
        leases,
        notes,
    }
}

/// The leases, and what is to be said of those that cannot be read.
fn leases_of(ipam: &Plugin) -> Result<(Vec<Lease>, Vec<String>), String> {
    let Some(leases) = ipam.leases_if_any().map_err(|error| error.to_string())? else {
        return Ok((Vec::new(), Vec::new()));
    };
    let listed = leases.list().map_err(|error| error.to_string())?;
    let findings = listed.findings.into_iter();
    let complaints = findings.map(|found| format!("{}: {}", found.path.display(), found.what));
    Ok((listed.leases, complaints.collect()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_journal_or_store_that_was_never_used_holds_nothing() {
        let place = tempfile::tempdir().unwrap();
        let state = place.path().join("state");
        let policy = place.path().join("policy.json");
        let values = json!({"stateDir": state});
        std::fs::write(&policy, values.to_string()).unwrap();
        std::os::unix::fs::symlink("/proc", place.path().join("proc")).unwrap();
        let unused = read(&Places {
            root: place.path().into(),
            policy,
            node: Some("n1".into()),
        });
        assert!(unused.attachments.unwrap().is_empty() && unused.leases.unwrap().is_empty());
    }
}
