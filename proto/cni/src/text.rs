//! Text of others in messages and logs: one line, printable, bounded.
//!
//! Names, configurations and what other programs write may hold anything. A line feed would forge
//! a line of the log, an escape sequence would command the terminal of whoever reads it, and a
//! megabyte would fill the disk.

use std::fmt::Write;

/// The text with every character escaped that is not printed as itself: control characters, those that
/// change line or direction (`U+2028`, `U+202E`, …) or are invisible, and those that YAML forbids.
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if commands(c) {
            // Writing to a String does not fail.
            let _ = write!(shown, "{}", c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}

fn commands(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{ad}'
                | '\u{61c}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{2069}'
                | '\u{feff}'
                | '\u{fffe}'
                | '\u{ffff}'
        )
}

/// All of a list, as in `a, b, c`.
pub fn list(words: impl IntoIterator<Item = impl ToString>) -> String {
    let words: Vec<String> = words.into_iter().map(|word| word.to_string()).collect();
    words.join(", ")
}

/// A list of choices, as in `a, b or c`.
pub fn one_of(words: impl IntoIterator<Item = impl ToString>) -> String {
    let mut words: Vec<String> = words.into_iter().map(|word| word.to_string()).collect();
    match (words.pop(), words.as_slice()) {
        (Some(last), [_, ..]) => format!("{} or {last}", words.join(", ")),
        (last, _) => last.unwrap_or_default(),
    }
}

/// A text of others, fit for a message: printable, and at most about `limit` bytes.
pub fn fit(text: &str, limit: usize) -> String {
    bounded(&printable(text), limit)
}

/// At most `limit` bytes of a text, and how many were cut.
pub fn bounded(text: &str, limit: usize) -> String {
    if text.len() <= limit {
        return text.to_owned();
    }
    let end = text.floor_char_boundary(limit);
    let start = text.get(..end).unwrap_or_default();
    format!("{start}… ({} bytes cut)", text.len() - end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_commands_a_terminal_or_forges_a_line() {
        assert_eq!(
            printable("a\nb\r\t\0\u{1b}[31m\u{7f}\u{9b}\u{202e}\u{2028}ä\\\"é"),
            "a\\nb\\r\\t\\u{0}\\u{1b}[31m\\u{7f}\\u{9b}\\u{202e}\\u{2028}ä\\\"é"
        );
    }

    #[test]
    fn nothing_is_invisible_or_forbidden_in_yaml() {
        for c in "\u{ad}\u{61c}\u{200b}\u{2060}\u{fffe}\u{ffff}".chars() {
            assert_eq!(printable(&c.to_string()), c.escape_default().to_string());
        }
    }

    #[test]
    fn a_long_text_is_cut_between_characters_and_says_so() {
        assert_eq!(bounded("abc", 3), "abc");
        assert_eq!(bounded("abcd", 3), "abc… (1 bytes cut)");
        assert_eq!(bounded("ääää", 3), "ä… (6 bytes cut)");
    }
}
