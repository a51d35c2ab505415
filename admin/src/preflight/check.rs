//! A check: its id, what should be so, and the function that judges.

use crate::verdict::Finding;

/// The findings of a check, at least one; or the only one, which says why there is nothing to judge.
pub(super) type Findings = Result<Vec<Finding>, Finding>;

/// One check over the facts of its subject.
#[derive(Debug)]
pub(super) struct Check<F> {
    /// Letter of the subject and number, such as `M01`.
    pub id: &'static str,
    /// What should be so.
    pub title: &'static str,
    /// Judges the facts.
    pub judge: fn(&F) -> Findings,
}

/// The table of a subject's checks.
macro_rules! checks {
    ($($id:literal $title:literal $judge:ident;)+) => {
        pub(super) const CHECKS: &[$crate::preflight::check::Check<Facts>] = &[
            $($crate::preflight::check::Check { id: $id, title: $title, judge: $judge }),+
        ];
    };
}
pub(super) use checks;

/// Ends a check that has nothing to judge.
pub(super) fn need(there: bool, why: &str) -> Result<(), Finding> {
    there
        .then_some(())
        .ok_or_else(|| Finding::not_applicable(why))
}
