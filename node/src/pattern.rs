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
    pub fn parse(word: &str) -> Result<Self, String> {
        if !word.contains(['*', '?', '[']) {
            return Ok(Pattern::Exact(word.into()));
        }
        // Two in a row are directories to the library.
        let mut source = word.to_owned();
        while source.contains("**") {
            source = source.replace("**", "*");
        }
        let refuse = |reason: &str| format!("pattern {word:?}: {reason}");
        if has_backward_range(&source) {
            return Err(refuse("a range in \"[]\" runs backwards"));
        }
        let glob = glob::Pattern::new(&source).map_err(|error| refuse(error.msg))?;
        Ok(Pattern::Glob(glob))
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
    type Error = String;

    fn try_from(word: String) -> Result<Self, String> {
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

/// The library takes one, which matches nothing: below `not` it would exclude nothing.
fn has_backward_range(glob: &str) -> bool {
    glob.split('[').skip(1).any(|set| {
        let set: Vec<char> = set.chars().take_while(|c| *c != ']').collect();
        let mut triples = set.windows(3);
        triples.any(|triple| matches!(triple, [low, '-', high] if high < low))
    })
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
        for pattern in ["[", "[]", "[!]", "a[9-0]", "[a"] {
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
