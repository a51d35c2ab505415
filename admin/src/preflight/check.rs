//! How checks are listed, chosen and made.

use std::collections::BTreeSet;

use super::context::Context;
use super::{counters, gid, gpudirect, hcas, kubernetes, link, modules, pcie, qos, rails, runtime};
#[cfg(test)]
use crate::verdict::Verdict;
use crate::verdict::{Finding, Outcome};

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

/// The checks of one subject, and the function that reads the facts that all of them judge.
type Subject<F> = (&'static [Check<F>], fn(&Context) -> F);

/// A [`Subject`] whatever its facts are.
trait Checks: Sync {
    fn titles(&self) -> Vec<(&'static str, &'static str)>;

    /// Makes the chosen checks; reads only if there are any.
    fn make(&self, context: &Context, selection: &Selection) -> Vec<Outcome>;
}

impl<F: 'static> Checks for Subject<F> {
    fn titles(&self) -> Vec<(&'static str, &'static str)> {
        let titles = self.0.iter().map(|check| (check.id, check.title));
        titles.collect()
    }

    fn make(&self, context: &Context, selection: &Selection) -> Vec<Outcome> {
        let chosen = self.0.iter().filter(|check| selection.has(check.id));
        let chosen: Vec<&Check<F>> = chosen.collect();
        if chosen.is_empty() {
            return Vec::new();
        }
        let facts = (self.1)(context);
        let outcome = |check: &Check<F>| {
            let mut findings = (check.judge)(&facts).unwrap_or_else(|only| vec![only]);
            if findings.is_empty() {
                findings.push(Finding::not_applicable("there is nothing here to check"));
            }
            Outcome::new(check.id, check.title, findings)
        };
        chosen.into_iter().map(outcome).collect()
    }
}

/// The list of subjects, in the order of the catalogue; `counters` adds to those before.
macro_rules! subjects {
    ($($subject:ident)+) => { [$(&($subject::CHECKS, $subject::read as fn(&Context) -> $subject::Facts)),+] };
}
const SUBJECTS: [&dyn Checks; 11] = subjects! {
    modules hcas link gid pcie gpudirect runtime rails qos kubernetes counters
};

/// Ids and titles of all checks, by subject and number.
pub(super) fn catalogue() -> Vec<(&'static str, &'static str)> {
    let titles = SUBJECTS.iter().flat_map(|subject| subject.titles());
    let mut all: Vec<_> = titles.collect();
    all.sort_by_key(|(id, _)| order(id));
    all
}

/// Position of a check's subject, and its number.
fn order(id: &str) -> (Option<usize>, &str) {
    let of_letter = |subject: &&dyn Checks| {
        let titles = subject.titles();
        (titles.first()).is_some_and(|(first, _)| first.get(..1) == id.get(..1))
    };
    (SUBJECTS.iter().position(of_letter), id)
}

/// Makes the chosen checks.
pub(super) fn run(context: &Context, selection: &Selection) -> Vec<Outcome> {
    let made = SUBJECTS
        .iter()
        .flat_map(|subject| subject.make(context, selection));
    let mut outcomes: Vec<Outcome> = made.collect();
    outcomes.sort_by_key(|outcome| order(outcome.id));
    outcomes
}

/// Which checks to make.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Selection {
    only: BTreeSet<String>,
    skip: BTreeSet<String>,
}

/// A word that chooses no check.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no check {word}; preflight --list names all, and a letter ({letters}) means all of its subject"
)]
pub(super) struct NoSuchCheck {
    /// The word.
    pub word: String,
    /// The letters of the subjects.
    pub letters: String,
}

impl Selection {
    /// Reads ids (`M01`) and letters of subjects (`M`), in any case.
    ///
    /// # Errors
    /// [`NoSuchCheck`] for a word that chooses nothing: a mistyped check that is silently left
    /// out would pass for one that was made.
    pub(super) fn new(only: &[String], skip: &[String]) -> Result<Self, NoSuchCheck> {
        Ok(Self {
            only: expand(only)?,
            skip: expand(skip)?,
        })
    }

    /// True if a check is chosen.
    pub(super) fn has(&self, id: &str) -> bool {
        (self.only.is_empty() || self.only.contains(id)) && !self.skip.contains(id)
    }
}

fn expand(words: &[String]) -> Result<BTreeSet<String>, NoSuchCheck> {
    let catalogue = catalogue();
    let mut chosen = BTreeSet::new();
    for word in words {
        let upper = word.trim().to_uppercase();
        let letter = upper.len() == 1;
        let ids = catalogue.iter().map(|(id, _)| *id);
        let found: Vec<&str> = ids
            .filter(|id| *id == upper || (letter && id.starts_with(&upper)))
            .collect();
        if found.is_empty() {
            let mut letters: Vec<&str> =
                catalogue.iter().filter_map(|(id, _)| id.get(..1)).collect();
            letters.dedup();
            return Err(NoSuchCheck {
                word: word.clone(),
                letters: letters.join(", "),
            });
        }
        chosen.extend(found.into_iter().map(str::to_owned));
    }
    Ok(chosen)
}

/// A case of a check's test: the check, the facts, the worst verdict, and words of its reason.
#[cfg(test)]
pub(super) type Case<F> = (&'static str, F, Verdict, &'static str);

/// Proves a subject's checks by cases, and that each check is seen both content and not.
#[cfg(test)]
pub(super) fn prove<F: std::fmt::Debug>(checks: &[Check<F>], cases: &[Case<F>]) {
    for (id, facts, verdict, words) in cases {
        let check = checks.iter().find(|check| check.id == *id).unwrap();
        let findings = (check.judge)(facts).unwrap_or_else(|only| vec![only]);
        let worst = findings.iter().max_by_key(|finding| finding.verdict);
        let said = worst.map_or(Verdict::NotApplicable, |finding| finding.verdict);
        assert_eq!(said, *verdict, "{id} of {facts:?}: {findings:?}");
        let named = worst.is_none_or(|finding| finding.why.contains(words));
        assert!(named, "{id}: {findings:?} does not say {words:?}");
        let helpless = findings
            .iter()
            .find(|f| f.verdict >= Verdict::Warn && f.remedy.is_none());
        assert!(
            helpless.is_none(),
            "{id} does not say what to do: {helpless:?}"
        );
    }
    for check in checks {
        let of = |wanted: fn(Verdict) -> bool| {
            cases
                .iter()
                .any(|(id, _, verdict, _)| *id == check.id && wanted(*verdict))
        };
        assert!(
            of(|verdict| verdict == Verdict::Pass),
            "{} is never seen to pass",
            check.id
        );
        assert!(
            of(|verdict| verdict >= Verdict::Warn),
            "{} is never seen to complain",
            check.id
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn checks_are_chosen_by_id_or_by_subject() {
        let all = Selection::default();
        assert!(all.has("M01"));
        let only = Selection::new(&words(&["m01", "L"]), &words(&["L03"])).unwrap();
        assert!(only.has("M01") && only.has("L01"));
        assert!(!only.has("M02") && !only.has("L03"));
    }

    #[test]
    fn a_word_that_chooses_nothing_is_refused() {
        // The numbers of a subject have gaps.
        for word in ["M99", "K04"] {
            let error = Selection::new(&words(&[word]), &[]).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!(
                    "there is no check {word}; preflight --list names all, and a letter (M, H, L, G, P, \
                     D, R, A, Q, K) means all of its subject"
                )
            );
        }
        assert!(Selection::new(&[], &words(&[""])).is_err());
    }

    #[test]
    fn the_worst_finding_is_the_verdict() {
        let findings = vec![
            Finding::pass(""),
            Finding::fail("", ""),
            Finding::unknown(""),
        ];
        let outcome = Outcome::new("M01", "", findings);
        assert_eq!(outcome.verdict, Verdict::Fail);
    }

    #[test]
    fn each_check_has_an_id_of_its_own() {
        let catalogue = super::catalogue();
        let ids: BTreeSet<&str> = catalogue.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids.len(), catalogue.len());
    }
}
