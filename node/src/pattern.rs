//! What one entry of a selector list compares with: a literal word or a glob.

use std::fmt;

use serde::Deserialize;

/// One entry of a selector list.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Pattern {
    /// Equal byte for byte; the peers' only form.
    Exact(String),
    /// Equal without regard to ASCII case (the SR-IOV plugin's PF names and root devices).
    Folded(String),
    /// `*` any run, `?` any one character, `[a-z0]` one of a set, `[!…]` none of it.
    Glob(glob::Pattern),
}

impl Pattern {
    /// A word of our own format: a glob if it has a wildcard, else a literal.
    pub fn parse(word: &str) -> Result<Self, GlobError> {
        if !word.contains(['*', '?', '[']) {
            return Ok(Pattern::Exact(word.into()));
        }
        // Two in a row are directories to the library.
        let mut source = word.to_owned();
        while source.contains("**") {
            source = source.replace("**", "*");
        }
        match glob::Pattern::new(&source) {
            Ok(glob) => Ok(Pattern::Glob(glob)),
            Err(error) => Err(GlobError {
                pattern: word.into(),
                reason: error.msg,
            }),
        }
    }

    pub fn matches(&self, text: &str) -> bool {
        match self {
            Pattern::Exact(word) => word == text,
            Pattern::Folded(word) => word.eq_ignore_ascii_case(text),
            Pattern::Glob(glob) => glob.matches(text),
        }
    }
}

impl TryFrom<String> for Pattern {
    type Error = GlobError;

    fn try_from(word: String) -> Result<Self, GlobError> {
        Self::parse(&word)
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Pattern::Exact(word) | Pattern::Folded(word) => word,
            Pattern::Glob(glob) => glob.as_str(),
        })
    }
}

/// Why a glob cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("pattern {pattern:?}: {reason}")]
pub struct GlobError {
    pattern: String,
    reason: &'static str,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn glob(pattern: &str, text: &str) -> bool {
        Pattern::parse(pattern).unwrap().matches(text)
    }

    #[test]
    fn a_word_without_wildcards_is_exact() {
        assert_eq!(
            Pattern::parse("ens1f0").unwrap(),
            Pattern::Exact("ens1f0".into())
        );
        assert!(!glob("ens1f0", "ENS1F0"));
        assert!(Pattern::Folded("ens1f0".into()).matches("ENS1F0"));
    }

    #[test]
    fn globs_match_the_whole_word() {
        for (pattern, text) in [
            ("*", ""),
            ("mlx5_*", "mlx5_0"),
            ("*f0", "ens1f0"),
            ("ens*f?", "ens1f0f1"),
            ("0000:3b:00.[0-3]", "0000:3b:00.3"),
            ("e[!n]p", "exp"),
            ("a*b*c", "aXbXbc"),
            ("[a-]x", "-x"),
            ("ens*f?*", "ens1f0np0"),
            ("a**b", "ab"),
            ("0000:3b:00.*", "0000:3b:00.1"),
        ] {
            assert!(glob(pattern, text), "{pattern} {text}");
        }
        for (pattern, text) in [
            ("mlx5_?", "mlx5_10"),
            ("*f0", "ens1f01"),
            ("[0-3]", "4"),
            ("[!a]", "a"),
            ("a*b*c", "acb"),
            ("?", ""),
            ("ens*f?", "ens1f0np0"),
            ("", "x"),
        ] {
            assert!(!glob(pattern, text), "{pattern} {text}");
        }
    }

    #[test]
    fn bad_sets_are_refused() {
        for pattern in ["[", "[]", "[!]", "[a"] {
            assert!(Pattern::parse(pattern).is_err(), "{pattern}");
        }
    }

    #[test]
    fn many_stars_stay_cheap() {
        let pattern = "*a".repeat(30) + "b";
        assert!(!glob(&pattern, &"a".repeat(2000)));
    }

    proptest::proptest! {
        #[test]
        fn never_panics_and_a_star_takes_everything(pattern in "\\PC{0,12}", text in "\\PC{0,20}") {
            if let Ok(pattern) = Pattern::parse(&pattern) {
                let _ = pattern.matches(&text);
            }
            proptest::prop_assert!(glob("*", &text));
        }
    }
}
