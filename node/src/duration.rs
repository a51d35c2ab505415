//! Durations as policies and configurations write them.

use std::time::Duration;

/// `0`, or a whole number with `ms`, `s`, `m` or `h`; none for another form, or for more seconds
/// than 64 bits hold.
#[must_use]
pub fn parse(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
    let number: u64 = number.parse().ok()?;
    match unit {
        "ms" => Some(Duration::from_millis(number)),
        "s" => Some(Duration::from_secs(number)),
        "m" => number.checked_mul(60).map(Duration::from_secs),
        "h" => number.checked_mul(3600).map(Duration::from_secs),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_a_number_and_a_unit() {
        for (text, seconds) in [("0", 0), ("30s", 30), ("0s", 0), ("5m", 300), ("2h", 7200)] {
            assert_eq!(parse(text), Some(Duration::from_secs(seconds)), "{text}");
        }
        assert_eq!(parse("500ms"), Some(Duration::from_millis(500)));
        for text in [
            "",
            "30",
            "s",
            "1d",
            "-1s",
            "1.5s",
            "1 s",
            "99999999999999999999s",
            "9999999999999999999h",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
