//! The subjects, and how checks are listed, chosen and made.

use std::collections::BTreeSet;

use super::check::Check;
use super::context::Context;
use super::{counters, gid, gpudirect, hcas, kubernetes, link, modules, pcie, qos, rails, runtime};
use crate::verdict::{Finding, Outcome};

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

impl Selection {
    /// Reads ids (`M01`) and letters of subjects (`M`), in any case.
    ///
    /// # Errors
    /// There is a word that chooses nothing: a mistyped check that is silently left
    /// out would pass for one that was made.
    pub(super) fn new(only: &[String], skip: &[String]) -> Result<Self, String> {
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

fn expand(words: &[String]) -> Result<BTreeSet<String>, String> {
    let catalogue = catalogue();
    let mut chosen = BTreeSet::new();
    for word in words {
        let upper = word.trim().to_uppercase();
        let is_it = |id: &&str| *id == upper || (upper.len() == 1 && id.starts_with(&upper));
        let found: Vec<&str> = catalogue.iter().map(|(id, _)| *id).filter(is_it).collect();
        if found.is_empty() {
            let letters = catalogue.iter().filter_map(|(id, _)| id.get(..1));
            let mut letters: Vec<&str> = letters.collect();
            letters.dedup();
            return Err(format!(
                "there is no check {word}; preflight --list names all, and a letter ({}) means all \
                 of its subject",
                letters.join(", ")
            ));
        }
        chosen.extend(found.into_iter().map(str::to_owned));
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::Verdict;

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
                error,
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
