//! Numbered checks of what RDMA needs of a node, or of a container: what was read, the verdict,
//! why, and what to do.
//!
//! Nothing is changed and no packet is sent. Each subject is one module: what it looks at as
//! plain data, and one small pure function for each check.
//!
//! - [`verdict`]: what a check says; [`check`]: how checks are listed and chosen;
//!   [`context`]: what is looked at, for all of them
//! - [`modules`] (M), [`link`] (L), [`gid`] (G), [`pcie`] (P), [`gpudirect`] (D), [`runtime`] (R),
//!   [`rails`] (A), [`qos`] (Q), [`kubernetes`] (K): the subjects
//! - [`counters`]: error counters that must not grow while being watched
//! - [`files`], [`network`]: reading kernel files, and what they say of routes and addresses
//! - [`report`]: the faces

pub mod check;
pub mod context;
pub mod counters;
pub mod files;
pub mod gid;
pub mod gpudirect;
pub mod kubernetes;
pub mod link;
pub mod modules;
pub mod pcie;
pub mod qos;
pub mod rails;
pub mod report;
pub mod runtime;
pub mod verdict;

use check::{Outcome, Selection};
use context::Context;

/// Every check there is: id and title, in order.
#[must_use]
pub fn catalogue() -> Vec<(&'static str, &'static str)> {
    let mut all = Vec::new();
    all.extend(check::titles(modules::CHECKS));
    all.extend(check::titles(link::CHECKS));
    all.extend(check::titles(gid::CHECKS));
    all.extend(check::titles(pcie::CHECKS));
    all.extend(check::titles(gpudirect::CHECKS));
    all.extend(check::titles(runtime::CHECKS));
    all.extend(check::titles(rails::CHECKS));
    all.extend(check::titles(qos::CHECKS));
    all.extend(check::titles(kubernetes::CHECKS));
    // Counters belong to three subjects, but are watched together, once.
    all.extend(check::titles(counters::CHECKS));
    all.sort_by_key(|(id, _)| order(id));
    all
}

/// Subjects in the order people look: from the driver up to Kubernetes.
fn order(id: &str) -> (usize, String) {
    let letter = id.chars().next().unwrap_or_default();
    (
        "MLGPDRAQK".find(letter).unwrap_or(usize::MAX),
        id.to_owned(),
    )
}

/// Makes all chosen checks.
#[must_use]
pub fn run(context: &Context, selection: &Selection) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    let out = &mut outcomes;
    check::judge(modules::CHECKS, selection, || modules::read(context), out);
    check::judge(link::CHECKS, selection, || link::read(context), out);
    check::judge(gid::CHECKS, selection, || gid::read(context), out);
    check::judge(pcie::CHECKS, selection, || pcie::read(context), out);
    check::judge(
        gpudirect::CHECKS,
        selection,
        || gpudirect::read(context),
        out,
    );
    check::judge(runtime::CHECKS, selection, || runtime::read(context), out);
    check::judge(rails::CHECKS, selection, || rails::read(context), out);
    check::judge(qos::CHECKS, selection, || qos::read(context), out);
    check::judge(
        kubernetes::CHECKS,
        selection,
        || kubernetes::read(context),
        out,
    );
    check::judge(counters::CHECKS, selection, || counters::read(context), out);
    outcomes.sort_by_key(|outcome| order(outcome.id));
    outcomes
}

#[cfg(test)]
mod tests;
