//! Which checks there are, and making those that are chosen.

use super::check::{Checks, Selection, Subject};
use super::context::Context;
use super::{counters, gid, gpudirect, hcas, kubernetes, link, modules, pcie, qos, rails, runtime};
use crate::verdict::Outcome;

/// The subjects, in the order of a search for a fault: from the driver up to Kubernetes. Counters
/// come last: they belong to three subjects, but are watched together, once.
const SUBJECTS: &[&dyn Checks] = &[
    &Subject {
        checks: modules::CHECKS,
        read: modules::read,
    },
    &Subject {
        checks: hcas::CHECKS,
        read: hcas::read,
    },
    &Subject {
        checks: link::CHECKS,
        read: link::read,
    },
    &Subject {
        checks: gid::CHECKS,
        read: gid::read,
    },
    &Subject {
        checks: pcie::CHECKS,
        read: pcie::read,
    },
    &Subject {
        checks: gpudirect::CHECKS,
        read: gpudirect::read,
    },
    &Subject {
        checks: runtime::CHECKS,
        read: runtime::read,
    },
    &Subject {
        checks: rails::CHECKS,
        read: rails::read,
    },
    &Subject {
        checks: qos::CHECKS,
        read: qos::read,
    },
    &Subject {
        checks: kubernetes::CHECKS,
        read: kubernetes::read,
    },
    &Subject {
        checks: counters::CHECKS,
        read: counters::read,
    },
];

/// Every check there is: id and title, in order.
#[must_use]
pub(super) fn catalogue() -> Vec<(&'static str, &'static str)> {
    let mut all: Vec<_> = SUBJECTS
        .iter()
        .flat_map(|subject| subject.titles())
        .collect();
    all.sort_by_key(|(id, _)| order(id));
    all
}

/// By subject, then by number.
fn order(id: &str) -> (Option<usize>, &str) {
    let letter = id.get(..1);
    let subject = SUBJECTS.iter().position(|subject| {
        let titles = subject.titles();
        titles
            .first()
            .is_some_and(|(first, _)| first.get(..1) == letter)
    });
    (subject, id)
}

/// Makes all chosen checks.
#[must_use]
pub(super) fn run(context: &Context, selection: &Selection) -> Vec<Outcome> {
    let mut outcomes: Vec<Outcome> = SUBJECTS
        .iter()
        .flat_map(|subject| subject.make(context, selection))
        .collect();
    outcomes.sort_by_key(|outcome| order(outcome.id));
    outcomes
}
