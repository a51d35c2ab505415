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
    Glob(Glob),
}

impl Pattern {
    /// A word of our own format: a glob if it has a wildcard, else a literal.
    pub fn parse(word: &str) -> Result<Self, GlobError> {
        if word.contains(['*', '?', '[']) {
            Glob::parse(word).map(Pattern::Glob)
        } else {
            Ok(Pattern::Exact(word.into()))
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
        match self {
            Pattern::Exact(word) | Pattern::Folded(word) => formatter.write_str(word),
            Pattern::Glob(glob) => formatter.write_str(&glob.source),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glob {
    source: String,
    tokens: Vec<Token>,
}

/// Why a glob cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("pattern {pattern:?}: {reason}")]
pub struct GlobError {
    pattern: String,
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    Literal(char),
    AnyOne,
    AnyRun,
    Set {
        negated: bool,
        ranges: Vec<(char, char)>,
    },
}

impl Token {
    fn takes(&self, c: char) -> bool {
        match self {
            Token::Literal(literal) => *literal == c,
            Token::AnyOne | Token::AnyRun => true,
            Token::Set { negated, ranges } => {
                ranges.iter().any(|(low, high)| (*low..=*high).contains(&c)) != *negated
            }
        }
    }
}

impl Glob {
    /// Reads a glob; a set that is empty, unclosed or backwards is an error.
    pub fn parse(pattern: &str) -> Result<Self, GlobError> {
        let refuse = |reason| GlobError {
            pattern: pattern.into(),
            reason,
        };
        let mut tokens = Vec::new();
        let mut rest = pattern.chars();
        while let Some(c) = rest.next() {
            tokens.push(match c {
                '*' if tokens.last() == Some(&Token::AnyRun) => continue,
                '*' => Token::AnyRun,
                '?' => Token::AnyOne,
                '[' => parse_set(&mut rest).map_err(refuse)?,
                literal => Token::Literal(literal),
            });
        }
        Ok(Self {
            source: pattern.into(),
            tokens,
        })
    }

    /// Whether the whole of `text` is matched. Linear in the text for each `*`: on a mismatch only
    /// the last `*` is widened, so no pattern can make it explode.
    pub fn matches(&self, text: &str) -> bool {
        let text: Vec<char> = text.chars().collect();
        let (mut token, mut at) = (0, 0);
        let mut star: Option<(usize, usize)> = None;
        loop {
            match (self.tokens.get(token), text.get(at)) {
                (Some(Token::AnyRun), _) => {
                    star = Some((token, at));
                    token += 1;
                }
                (Some(one), Some(c)) if one.takes(*c) => {
                    token += 1;
                    at += 1;
                }
                (None, None) => return true,
                _ => match star {
                    Some((after, from)) if from < text.len() => {
                        star = Some((after, from + 1));
                        token = after + 1;
                        at = from + 1;
                    }
                    _ => return false,
                },
            }
        }
    }
}

fn parse_set(rest: &mut std::str::Chars<'_>) -> Result<Token, &'static str> {
    let mut ranges = Vec::new();
    let mut negated = false;
    let mut first = true;
    loop {
        let c = rest.next().ok_or("\"[\" without \"]\"")?;
        match c {
            '!' | '^' if first => negated = true,
            ']' if ranges.is_empty() => return Err("an empty \"[]\" matches nothing"),
            ']' => return Ok(Token::Set { negated, ranges }),
            low => {
                let mut ahead = rest.clone();
                let high = match (ahead.next(), ahead.next()) {
                    (Some('-'), Some(high)) if high != ']' => {
                        *rest = ahead;
                        high
                    }
                    _ => low,
                };
                if high < low {
                    return Err("a range in \"[]\" runs backwards");
                }
                ranges.push((low, high));
            }
        }
        first = false;
    }
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
