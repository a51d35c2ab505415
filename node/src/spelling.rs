//! The word that a misspelt one was meant to be.

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
