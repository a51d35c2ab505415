//! Columns for a terminal.

use cni_wire::text::{bounded, printable};

/// Of a cell.
const MAX_CELL_BYTES: usize = 256;

/// Rows below a header, each column as wide as its widest cell.
#[must_use]
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows
            .iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count());
        cells
            .chain(header.get(column).map(|title| title.len()))
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut line = String::new();
        for (cell, width) in cells.zip(&widths) {
            line += &format!("{cell:<width$}  ");
        }
        format!("{}\n", line.trim_end())
    };
    let mut text = line(&mut header.iter().copied());
    for row in rows {
        text += &line(&mut row.iter().map(String::as_str));
    }
    text
}

/// A cell's text: nothing that could steer a terminal, not longer than a line, "-" for nothing.
#[must_use]
pub fn cell(text: &str) -> String {
    if text.is_empty() {
        "-".to_owned()
    } else {
        printable(&bounded(text, MAX_CELL_BYTES))
    }
}

/// How long ago, as kubectl shows it; unknown where the clock says that it is still to come: another
/// clock wrote the time, or this one was set back.
#[must_use]
pub fn age(seconds: i64) -> String {
    match seconds {
        ..0 => "unknown".to_owned(),
        0..120 => format!("{seconds}s"),
        120..7_200 => format!("{}m", seconds / 60),
        7_200..172_800 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [
            vec!["10.0.0.1".to_owned(), "a".to_owned()],
            vec!["b".to_owned(), "cc".to_owned()],
        ];
        assert_eq!(
            table(&["ADDRESS", "X"], &rows),
            "ADDRESS   X\n10.0.0.1  a\nb         cc\n"
        );
    }

    #[test]
    fn cells_steer_no_terminal() {
        assert_eq!(cell("\u{1b}[2J"), "\\u{1b}[2J");
        assert_eq!(cell(""), "-");
    }

    #[test]
    fn a_long_cell_is_cut() {
        let rows = [vec![cell(&"a".repeat(70_000)), "b".to_owned()]];
        let text = table(&["A", "B"], &rows);
        assert!(text.contains("a… (69744 bytes cut)  b\n"), "{}", text.len());
    }

    #[test]
    fn ages_are_short() {
        for (seconds, text) in [
            (5, "5s"),
            (300, "5m"),
            (7_200, "2h"),
            (864_000, "10d"),
            (-9, "unknown"),
        ] {
            assert_eq!(age(seconds), text);
        }
    }
}
