//! Questions to a person at the terminal.

use std::io::{self, BufRead, IsTerminal, Write};

/// Asks on the terminal and returns whether the person said yes. `question` is printable text.
///
/// # Errors
/// Standard input is not a terminal, or cannot be read.
pub fn confirm(program: &str, question: &str) -> io::Result<bool> {
    let stdin = io::stdin();
    if !stdin.is_terminal() {
        return Err(io::Error::other(format!(
            "{question} Standard input is not a terminal: give --yes"
        )));
    }
    writeln!(io::stderr().lock(), "{program}: {question} [y/N]")?;
    let mut answer = String::new();
    stdin.lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
