//! Key checking for strict JSON readers: an unknown key is refused, by name,
//! with the nearest known one.
//!
//! Pure. serde's `deny_unknown_fields` refuses too, but lists all keys instead
//! of the one that was meant, and stops at the first.

use serde_json::{Map, Value};

/// Keys of `object` that are not in `known`, each with the known key that was
/// probably meant.
pub(crate) fn unknown<'a>(
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
pub fn nearest(word: &str, known: &[&'static str]) -> Option<&'static str> {
    let folded = fold(word);
    let limit = folded.len() / 3;
    known
        .iter()
        .map(|candidate| (distance(&folded, &fold(candidate)), *candidate))
        .filter(|(distance, _)| *distance <= limit)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

fn fold(word: &str) -> Vec<char> {
    word.chars()
        .take(64)
        .filter(|c| !matches!(c, '_' | '-' | '.'))
        .flat_map(char::to_lowercase)
        .collect()
}

/// Damerau's distance with adjacent transpositions (optimal string alignment).
fn distance(a: &[char], b: &[char]) -> usize {
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, y) in b.iter().enumerate() {
            let at = |row: &[usize], k: usize| row.get(k).copied().unwrap_or(usize::MAX / 2);
            let mut best = (at(&last, j) + usize::from(x != y))
                .min(at(&last, j + 1) + 1)
                .min(at(&row, j) + 1);
            if i > 0 && j > 0 && a.get(i - 1) == Some(y) && b.get(j - 1) == Some(x) {
                best = best.min(at(&before, j - 1) + 1);
            }
            row.push(best);
        }
        before = std::mem::replace(&mut last, row);
    }
    last.last().copied().unwrap_or(a.len())
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
    fn suggests_nothing_for_a_stranger() {
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
