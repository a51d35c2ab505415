//! What a container gets for the units it was given: a pure function of the snapshot.

use kubelet_api::deviceplugin::ContainerAllocateResponse;

use crate::binding::slot_specification;
use crate::deliver;
use crate::snapshot::{Health, Member, Snapshot, Unit};

/// Why units cannot be handed over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    /// The resource has no such unit.
    #[error("{resource} has no unit {unit:?}; the kubelet's list is older than this configuration")]
    Unknown {
        /// The resource.
        resource: String,
        /// The identity as it was asked for.
        unit: String,
    },
    /// The unit exists but cannot be used now.
    #[error("unit {unit} of {resource} cannot be used: {reason}")]
    Unhealthy {
        /// The resource.
        resource: String,
        /// The identity.
        unit: String,
        /// Why.
        reason: String,
    },
}

/// The answer for one container.
///
/// # Errors
/// [`Error`] names the first unit that cannot be handed over; nothing is handed over then.
pub(crate) fn allocate(
    snapshot: &Snapshot,
    ids: &[String],
) -> Result<ContainerAllocateResponse, Error> {
    let mut members: Vec<&Member> = Vec::new();
    let mut slots: Vec<&String> = Vec::new();
    for id in ids {
        let found = snapshot.unit(id).ok_or_else(|| Error::Unknown {
            resource: snapshot.resource().to_string(),
            unit: id.clone(),
        })?;
        let usable = match found {
            Unit::Member(member) => usable(snapshot, id, std::slice::from_ref(member))?,
            Unit::Slot(slot) => {
                if let Health::Unhealthy(reason) = &slot.health {
                    return Err(Error::Unhealthy {
                        resource: snapshot.resource().to_string(),
                        unit: id.clone(),
                        reason: reason.to_string(),
                    });
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
        for member in usable {
            if !members.iter().any(|known| known.hca.id == member.hca.id) {
                members.push(member);
            }
        }
    }
    if snapshot.late().is_some() {
        return Ok(slot_specification::response(&slots));
    }
    Ok(deliver::response(snapshot, &members))
}

/// The members that can be used; an error if none can.
fn usable<'s>(
    snapshot: &Snapshot,
    id: &str,
    members: &'s [Member],
) -> Result<Vec<&'s Member>, Error> {
    let healthy: Vec<&Member> = members.iter().filter(|m| m.health.is_healthy()).collect();
    if !healthy.is_empty() {
        return Ok(healthy);
    }
    let reasons: Vec<String> = members
        .iter()
        .filter_map(|member| match &member.health {
            Health::Healthy => None,
            Health::Unhealthy(unhealthy_reason) => {
                Some(format!("{}: {unhealthy_reason}", member.hca.id))
            }
        })
        .collect();
    Err(Error::Unhealthy {
        resource: snapshot.resource().to_string(),
        unit: id.into(),
        reason: reasons.join("; "),
    })
}
