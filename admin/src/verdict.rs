//! What a check or a step found: findings, each with a verdict.

use serde::Serialize;

/// Why most checks do not apply on most nodes.
pub(crate) const NO_NIC: &str = "no RDMA NIC on this node";

/// Why some checks of containers do not apply to a node.
pub(crate) const FOR_THE_CONTAINER: &str = "a question for the container (--pod)";

/// How it stands, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Verdict {
    /// The question does not arise on this node.
    NotApplicable,
    /// As it should be.
    Pass,
    /// What would answer it cannot be read.
    Unknown,
    /// It works, but worse than it could, or until something changes.
    Warn,
    /// RDMA in pods will not work this way.
    Fail,
}

impl Verdict {
    /// As people read it.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::NotApplicable => "n/a",
            Self::Pass => "pass",
            Self::Unknown => "unknown",
            Self::Warn => "WARN",
            Self::Fail => "FAIL",
        }
    }
}

/// What one check says about one object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Finding {
    /// The verdict.
    pub verdict: Verdict,
    /// What it is about: an RDMA device with its port, a netdev, a PCI address; `None` for the
    /// node or container as a whole.
    pub object: Option<String>,
    /// What was read, as `where: content`.
    pub read: Vec<String>,
    /// Why this verdict.
    pub why: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl Finding {
    fn new(verdict: Verdict, why: impl Into<String>, remedy: Option<String>) -> Self {
        Self {
            verdict,
            object: None,
            read: Vec::new(),
            why: why.into(),
            remedy,
        }
    }

    /// As it should be.
    pub(crate) fn pass(why: impl Into<String>) -> Self {
        Self::new(Verdict::Pass, why, None)
    }

    /// The question does not arise.
    pub(crate) fn not_applicable(why: impl Into<String>) -> Self {
        Self::new(Verdict::NotApplicable, why, None)
    }

    /// It cannot be read.
    pub(crate) fn unknown(why: impl Into<String>) -> Self {
        Self::new(Verdict::Unknown, why, None)
    }

    /// The same; what to do.
    pub(crate) fn unsure(why: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(Verdict::Unknown, why, Some(remedy.into()))
    }

    /// Worse than it could be; what to do.
    pub(crate) fn warn(why: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(Verdict::Warn, why, Some(remedy.into()))
    }

    /// Wrong; what to do.
    pub(crate) fn fail(why: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(Verdict::Fail, why, Some(remedy.into()))
    }

    /// Names the object.
    pub(crate) fn on(self, object: impl Into<String>) -> Self {
        Self {
            object: Some(object.into()),
            ..self
        }
    }

    /// Adds what was read.
    pub(crate) fn read(
        mut self,
        place: impl std::fmt::Display,
        content: impl std::fmt::Display,
    ) -> Self {
        self.read.push(format!("{place}: {content}"));
        self
    }

    /// Makes a fault a lesser one: a warning where the object matters less.
    pub(crate) fn softened(mut self, soften: bool) -> Self {
        if soften && self.verdict == Verdict::Fail {
            self.verdict = Verdict::Warn;
        }
        self
    }
}

/// What one check, or one step, found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Outcome {
    /// Identifies the check or step, such as `M01` or `rping`.
    pub id: &'static str,
    /// What should be so.
    pub title: &'static str,
    /// The worst of the findings' verdicts.
    pub verdict: Verdict,
    /// What was found, object by object.
    pub findings: Vec<Finding>,
}

impl Outcome {
    pub(crate) fn new(id: &'static str, title: &'static str, findings: Vec<Finding>) -> Self {
        let worst = findings.iter().map(|finding| finding.verdict).max();
        Self {
            id,
            title,
            verdict: worst.unwrap_or(Verdict::NotApplicable),
            findings,
        }
    }
}

/// The words of a list, or "none".
pub(crate) fn words(list: &[impl std::borrow::Borrow<str>], between: &str) -> String {
    match list {
        [] => "none".to_owned(),
        list => list.join(between),
    }
}
