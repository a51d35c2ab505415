//! What a container gets for the units it was given: a pure function of the snapshot.

use std::collections::HashSet;

use hca::HcaId;
use kubelet_api::deviceplugin::ContainerAllocateResponse;

use crate::deliver;
use crate::snapshot::{Member, Snapshot, Unit};

/// The answer for one container.
///
/// # Errors
/// The first unit that cannot be handed over, and why; nothing is handed over then.
pub fn allocate(snapshot: &Snapshot, ids: &[String]) -> Result<ContainerAllocateResponse, String> {
    let mut members: Vec<&Member> = Vec::new();
    let mut chosen: HashSet<&HcaId> = HashSet::new();
    let mut slots: Vec<&String> = Vec::new();
    for id in ids {
        let found = snapshot.unit(id).ok_or_else(|| {
            let resource = snapshot.resource();
            format!(
                "{resource} has no unit {id:?}; the kubelet's list is older than this configuration"
            )
        })?;
        let usable = match found {
            Unit::Member(member) => usable(snapshot, id, std::slice::from_ref(member))?,
            Unit::Slot(slot) => {
                if let Some(reason) = slot.health.worst() {
                    return Err(unusable(snapshot, id, reason));
                }
                slots.push(id);
                continue;
            }
            Unit::Pool => {
                usable(snapshot, id, snapshot.members())?;
                // A port that is down now may be up again long before the container ends.
                snapshot
                    .members()
                    .iter()
                    .filter(|member| member.is_deliverable())
                    .collect()
            }
        };
        let usable = usable.into_iter();
        members.extend(usable.filter(|member| chosen.insert(&member.hca.id)));
    }
    if snapshot.late().is_some() {
        return Ok(deliver::slot::response(&slots));
    }
    Ok(deliver::response(snapshot, &members))
}

/// The members that can be used; an error if none can.
fn usable<'s>(
    snapshot: &Snapshot,
    id: &str,
    members: &'s [Member],
) -> Result<Vec<&'s Member>, String> {
    let healthy: Vec<&Member> = members.iter().filter(|m| m.health.is_healthy()).collect();
    if !healthy.is_empty() {
        return Ok(healthy);
    }
    let reasons = members.iter().filter_map(|member| {
        let reason = member.health.worst()?;
        Some(format!("{}: {reason}", member.hca.id))
    });
    let reasons: Vec<String> = reasons.collect();
    Err(unusable(snapshot, id, reasons.join("; ")))
}

fn unusable(snapshot: &Snapshot, id: &str, why: impl std::fmt::Display) -> String {
    let resource = snapshot.resource();
    format!("unit {id} of {resource} cannot be used: {why}")
}
