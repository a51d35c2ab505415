//! The engine: what a check is, rows of the table, and the one rule for what cannot be read.
//!
//! A reader gives a [`Fact`]: a value, or why it is not known. A check that asks for a fact which
//! is not known is "unknown", with the missing right, mount or file; `?` does it.

use std::fmt::Display;

use serde::Serialize;

use super::context::Context;
use super::{gid, gpudirect, hcas, kubernetes, link, modules, pcie, qos, runtime};
use crate::verdict::{Finding, Outcome, Verdict};

/// Why a value is not known: the missing right, mount or file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unread(pub String);

/// What was read of the host.
pub(super) type Fact<T> = Result<T, Unread>;

/// What a check says about one object. Both sides are a finding, so that `?` ends a check early.
pub(super) type Judged = Result<Finding, Finding>;

/// The findings of a check; or the only one, of a check that cannot be made here.
pub(super) type Findings = Result<Vec<Finding>, Finding>;

impl From<Unread> for Finding {
    fn from(Unread(why): Unread) -> Self {
        Self::unknown(why)
    }
}

/// What a check is about.
pub(super) trait Object {
    /// What it is called in findings; `None` for the node or the container.
    fn name(&self) -> Option<String>;

    /// A reason or remedy with this object's names in it.
    fn fill(&self, template: &str) -> String {
        template.to_owned()
    }
}

/// The node, or with `--pod` the container.
impl Object for () {
    fn name(&self) -> Option<String> {
        None
    }
}

/// Its own name.
impl Object for String {
    fn name(&self) -> Option<String> {
        Some(self.clone())
    }
}

/// What has a name of its own.
impl<T> Object for (String, T) {
    fn name(&self) -> Option<String> {
        Some(self.0.clone())
    }
}

/// Objects of the node; or the finding that there is none, or why they are not known.
pub(super) type Objects<O> = fn(&Context) -> Result<Vec<&O>, Finding>;

/// Objects, or the finding why there is none.
pub(super) fn some<T>(
    objects: impl IntoIterator<Item = T>,
    none: &'static str,
) -> Result<Vec<T>, Finding> {
    let objects: Vec<T> = objects.into_iter().collect();
    match objects.is_empty() {
        true => Err(Finding::not_applicable(none)),
        false => Ok(objects),
    }
}

/// The one object of checks of the node as a whole.
pub(super) fn node(_: &Context) -> Result<Vec<&()>, Finding> {
    Ok(vec![&()])
}

/// The container that this runs in.
pub(super) fn container(context: &Context) -> Result<Vec<&()>, Finding> {
    match context.settings.in_pod {
        true => Ok(vec![&()]),
        false => Err(Finding::not_applicable(crate::verdict::FOR_THE_CONTAINER)),
    }
}

type Judge = Box<dyn Fn(&Context, &Check) -> Findings>;

/// One row of the catalogue.
#[derive(Serialize)]
pub(super) struct Check {
    /// Letter and number, such as `M01`.
    pub id: &'static str,
    /// What should be so.
    pub title: &'static str,
    /// What it is asked of, such as `port`.
    pub subject: &'static str,
    /// The files or requests that it reads.
    pub reads: &'static str,
    /// The worst verdict that it gives.
    pub severity: Verdict,
    /// What to do, where one remedy serves all its faults; the first step where not.
    pub remedy: &'static str,
    #[serde(skip)]
    judge: Judge,
}

/// Begins a row; [`Check::each`], [`Check::compare`] or [`Check::all`] end it.
pub(super) fn check(
    id: &'static str,
    subject: &'static str,
    severity: Verdict,
    title: &'static str,
) -> Check {
    Check {
        id,
        title,
        subject,
        reads: "",
        severity,
        remedy: "",
        judge: Box::new(|_, _| Ok(Vec::new())),
    }
}

impl Check {
    pub(super) fn reads(self, reads: &'static str) -> Self {
        Self { reads, ..self }
    }

    pub(super) fn remedy(self, remedy: &'static str) -> Self {
        Self { remedy, ..self }
    }

    /// Judges all objects together.
    pub(super) fn all(self, judge: impl Fn(&Context, &Self) -> Findings + 'static) -> Self {
        Self {
            judge: Box::new(judge),
            ..self
        }
    }

    /// Judges each object.
    pub(super) fn each<O: Object + 'static>(
        self,
        objects: Objects<O>,
        judge: impl Fn(&Context, &Self, &O) -> Judged + 'static,
    ) -> Self {
        self.all(move |context, check| {
            let objects = objects(context)?;
            each(objects, |object| judge(context, check, object))
        })
    }

    /// Compares one fact of each object with what it should be. `{fact}` in the reason is the value.
    pub(super) fn compare<O: Object + 'static, T: Display + 'static>(
        self,
        objects: Objects<O>,
        read: impl Fn(&Context, &O) -> Fact<T> + 'static,
        holds: impl Fn(&T) -> bool + 'static,
        why: &'static str,
    ) -> Self {
        self.each(objects, move |context, check, object| {
            let fact = read(context, object)?;
            let text = fact.to_string();
            let finding = match holds(&fact) {
                true => Finding::pass(&text),
                false => check.fault(object, &why.replace("{fact}", &text)),
            };
            Ok(finding.read(check.reads, text))
        })
    }

    /// A fault with the check's own severity and remedy.
    pub(super) fn fault(&self, object: &impl Object, why: &str) -> Finding {
        let (why, remedy) = (object.fill(why), object.fill(self.remedy));
        match self.severity {
            Verdict::Fail => Finding::fail(why, remedy),
            _ => Finding::warn(why, remedy),
        }
    }

    fn make(&self, context: &Context) -> Outcome {
        let mut findings = (self.judge)(context, self).unwrap_or_else(|only| vec![only]);
        if findings.is_empty() {
            findings.push(Finding::not_applicable("there is nothing here to check"));
        }
        Outcome::new(self.id, self.title, findings)
    }
}

/// Judges each object.
pub(super) fn each<'a, O: Object + 'a>(
    objects: impl IntoIterator<Item = &'a O>,
    judge: impl Fn(&O) -> Judged,
) -> Findings {
    let finding = |object: &O| {
        let finding = judge(object).unwrap_or_else(|early| early);
        match object.name() {
            Some(name) => finding.on(name),
            None => finding,
        }
    };
    Ok(objects.into_iter().map(finding).collect())
}

/// All checks, by subject and number.
pub(super) fn catalogue() -> Vec<Check> {
    let subjects = [
        modules::checks(),
        hcas::checks(),
        link::checks(),
        gid::checks(),
        pcie::checks(),
        gpudirect::checks(),
        runtime::checks(),
        qos::checks(),
        kubernetes::checks(),
    ];
    subjects.into_iter().flatten().collect()
}

/// Makes the chosen checks, all without any word.
pub(super) fn run(context: &Context, only: &[String], skip: &[String]) -> Vec<Outcome> {
    let is_chosen = |check: &&Check| {
        let is_named = |words: &[String]| words.iter().any(|word| names(word, check.id));
        (only.is_empty() || is_named(only)) && !is_named(skip)
    };
    let catalogue = catalogue();
    let chosen = catalogue.iter().filter(is_chosen);
    chosen.map(|check| check.make(context)).collect()
}

/// Whether a word is a check's id (`M01`) or the letter of its subject (`M`), in any case.
fn names(word: &str, id: &str) -> bool {
    let word = word.trim().to_uppercase();
    id == word || (word.len() == 1 && id.starts_with(&word))
}

/// A word that chooses checks.
///
/// # Errors
/// It chooses none.
pub(super) fn choice(word: &str) -> Result<String, String> {
    let catalogue = catalogue();
    if catalogue.iter().any(|check| names(word, check.id)) {
        return Ok(word.to_owned());
    }
    let mut letters: Vec<&str> = (catalogue.iter())
        .filter_map(|check| check.id.get(..1))
        .collect();
    letters.dedup();
    Err(format!(
        "unknown check {word}; preflight --list names all, and a letter ({}) means all of its subject",
        letters.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn checks_are_chosen_by_id_or_by_subject() {
        let tree = tempfile::tempdir().unwrap();
        let context = super::super::tests::empty_context(tree.path());
        let outcomes = run(&context, &words(&["m01", "L"]), &words(&["L05"]));
        let ids: Vec<&str> = outcomes.iter().map(|outcome| outcome.id).collect();
        assert_eq!(ids, ["M01", "L01", "L06", "L07", "L13", "L14"]);
    }

    #[test]
    fn a_word_that_chooses_nothing_is_refused() {
        // The numbers of a subject have gaps.
        for word in ["M99", "K04", ""] {
            let error = choice(word).unwrap_err();
            let end = "and a letter (M, H, L, G, P, D, R, Q, K) means all of its subject";
            assert!(
                error.contains(&format!("unknown check {word};")) && error.ends_with(end),
                "{error}"
            );
        }
    }

    #[test]
    fn each_check_has_an_id_of_its_own_and_a_whole_row() {
        let catalogue = catalogue();
        let ids: BTreeSet<&str> = catalogue.iter().map(|check| check.id).collect();
        assert_eq!(ids.len(), catalogue.len());
        for check in &catalogue {
            let texts = [check.title, check.subject, check.reads, check.remedy];
            assert!(texts.iter().all(|text| !text.is_empty()), "{}", check.id);
            assert!(check.severity >= Verdict::Warn, "{}", check.id);
        }
    }

    #[test]
    fn a_row_knows_pass_fault_and_unknown() {
        let tree = tempfile::tempdir().unwrap();
        let context = super::super::tests::empty_context(tree.path());
        let verdict = |fact: Fact<u32>| {
            let check = check("X01", "node", Verdict::Warn, "a number is seven")
                .reads("number")
                .remedy("make it seven")
                .compare(
                    node,
                    move |_, (): &()| fact.clone(),
                    |n| *n == 7,
                    "it is {fact}",
                );
            let mut outcome = check.make(&context);
            let finding = outcome.findings.remove(0);
            (finding.verdict, finding.why, finding.remedy)
        };
        assert_eq!(verdict(Ok(7)), (Verdict::Pass, "7".to_owned(), None));
        let remedy = Some("make it seven".to_owned());
        assert_eq!(
            verdict(Ok(8)),
            (Verdict::Warn, "it is 8".to_owned(), remedy)
        );
        let unread = Unread("number is not mounted".to_owned());
        assert_eq!(
            verdict(Err(unread)),
            (Verdict::Unknown, "number is not mounted".to_owned(), None)
        );
    }
}
