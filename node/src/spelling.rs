//! Key checking for strict JSON readers: an unknown key is refused, by name,
//! with the nearest known one.
//!
//! Pure. serde's `deny_unknown_fields` refuses too, but lists all keys instead
//! of the one that was meant, and stops at the first.

use serde_json::{Map, Value};

/// Keys of `object` that are not in `known`, each with the known key that was
/// probably meant.
pub fn unknown<'a>(
    object: &'a Map<String, Value>,
    known: &[&'static str],
) -> Vec<(&'a str, Option<&'static str>)> {
    object
        .keys()
        .filter(|key| !known.contains(&key.as_str()))
        .map(|key| (key.as_str(), nearest(key, known)))
        .collect()
}

/// The known word nearest to `word`, if it is near enough to be a slip: the
/// same but for case and separators, or at most a third of its letters away.
#[must_use]
pub fn nearest<'k>(word: &str, known: &[&'k str]) -> Option<&'k str> {
    let folded = fold(word);
    let limit = folded.chars().count() / 3;
    known
        .iter()
        .map(|candidate| (strsim::osa_distance(&folded, &fold(candidate)), *candidate))
        .filter(|(distance, _)| *distance <= limit)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

fn fold(word: &str) -> String {
    word.chars()
        .take(64)
        .filter(|c| !matches!(c, '_' | '-' | '.'))
        .flat_map(char::to_lowercase)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_the_key_that_was_meant() {
        let known = ["range", "range_start", "range_end", "exclude", "gateway"];
        for (typed, meant) in [
            ("rangeStart", "range_start"),
            ("rnage", "range"),
            ("excludes", "exclude"),
            ("GATEWAY", "gateway"),
            ("gatewya", "gateway"),
        ] {
            assert_eq!(nearest(typed, &known), Some(meant), "{typed}");
        }
    }

    #[test]
    fn suggests_nothing_for_an_unrelated_key() {
        assert_eq!(nearest("colour", &["range", "exclude"]), None);
        assert_eq!(nearest("", &["range"]), None);
        assert_eq!(nearest("x", &["y"]), None);
    }

    #[test]
    fn a_very_long_key_costs_nothing() {
        let long = "range".repeat(100_000);
        assert_eq!(nearest(&long, &["range"]), None);
    }
}
