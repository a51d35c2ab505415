//! What the kubelet may allocate, so that no HCA is allocated by two pools.
//!
//! The kubelet allocates by the list that it was sent last, and says who holds what only when asked. So
//! an HCA that a pool ceases to offer is offered on other terms only once the kubelet was asked
//! again: that answer has what it allocated until then.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hca::HcaId;

use crate::config::ResourceName;
use crate::snapshot::{Member, Snapshot, UnhealthyReason};

/// How long after the kubelet was sent a list an allocation by the list before may take.
const ALLOCATION_TIMEOUT: Duration = Duration::from_secs(1);

/// Offers of HCAs that stand, or that the kubelet may have used before they were withdrawn.
#[derive(Debug, Default)]
pub(super) struct Offers(BTreeMap<HcaId, Vec<Offer>>);

#[derive(Debug)]
struct Offer {
    resource: ResourceName,
    terms: Terms,
    is_late: bool,
    state: State,
}

/// How an HCA is allocated: shared, or by one resource alone. By different terms it must not be allocated at
/// once.
type Terms = Option<(ResourceName, bool)>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Standing,
    /// Not in the new lists, which were not sent yet.
    Withdrawn,
    /// The lists without it were sent then.
    WithdrawnAt(Instant),
}

impl Offers {
    /// Takes note of what is offered, without the HCAs that were offered on other terms since the
    /// kubelet was `asked` who holds what, and without all of them while that is not known. Returns
    /// whether there are such.
    pub(super) fn note(
        &mut self,
        snapshots: &mut [Snapshot],
        asked: Option<Instant>,
        bindings_read: bool,
    ) -> bool {
        for offers in self.0.values_mut() {
            offers.retain(|offer| match offer.state {
                // Which HCA a slot stands for, the kubelet does not say.
                State::WithdrawnAt(_) if !bindings_read && offer.is_late => true,
                State::WithdrawnAt(sent) => asked.is_none_or(|at| at < sent + ALLOCATION_TIMEOUT),
                State::Standing | State::Withdrawn => true,
            });
            for offer in offers.iter_mut().filter(|o| o.state == State::Standing) {
                offer.state = State::Withdrawn;
            }
        }
        let mut waits = false;
        for snapshot in snapshots {
            let (resource, is_late) = (snapshot.resource().clone(), snapshot.late().is_some());
            let is_shared = snapshot.pool().sharing.is_shared();
            let terms: Terms = (!is_shared).then(|| (resource.clone(), is_late));
            // A unit of a whole pool delivers an HCA with a port that is down as well.
            let is_offered = match snapshot.is_pooled() {
                true => Member::is_deliverable,
                false => |member: &Member| member.health.is_healthy(),
            };
            for member in snapshot
                .members_mut()
                .iter_mut()
                .filter(|one| is_offered(one))
            {
                if asked.is_none() {
                    let why =
                        "offered once the kubelet or its checkpoint has said which pods hold it";
                    member.health.add(UnhealthyReason::Handover(why.into()));
                    waits = true;
                    continue;
                }
                let offers = self.0.entry(member.hca.id.clone()).or_default();
                if let Some(other) = offers.iter().find(|offer| offer.terms != terms) {
                    member.health.add(UnhealthyReason::Handover(format!(
                        "offered as {} until a moment ago; offered again once the kubelet has said \
                         which pods hold it",
                        other.resource
                    )));
                    waits = true;
                    continue;
                }
                match offers.iter_mut().find(|offer| offer.resource == resource) {
                    Some(offer) => offer.state = State::Standing,
                    None => offers.push(Offer {
                        resource: resource.clone(),
                        terms: terms.clone(),
                        is_late,
                        state: State::Standing,
                    }),
                }
            }
        }
        self.0.retain(|_, offers| !offers.is_empty());
        waits
    }

    /// The kubelet was sent the lists that were noted last.
    pub(super) fn sent(&mut self, now: Instant) {
        for offer in self.0.values_mut().flatten() {
            if offer.state == State::Withdrawn {
                offer.state = State::WithdrawnAt(now);
            }
        }
    }

    /// Whether the kubelet may have allocated an HCA by a resource, as far as is not known yet.
    pub(super) fn has(&self, resource: &str, hca: &HcaId) -> bool {
        let mut all = self.0.get(hca).into_iter().flatten();
        all.any(|offer| offer.resource.as_str() == resource)
    }
}
