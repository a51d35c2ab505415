//! Kernel files that may not be there.

use std::fs;
use std::io::Read as _;
use std::path::Path;

/// Most of a file that is read: `/proc/kallsyms` is by far the largest and read line by line.
const MOST_BYTES: u64 = 4 << 20;

/// Reads a small text file without surrounding white space; `None` if it cannot be read for whatever
/// reason.
#[must_use]
pub fn text(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    let file = fs::File::open(path).ok()?;
    file.take(MOST_BYTES).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// Reads a file that holds one number or word.
#[must_use]
pub fn parsed<T: std::str::FromStr>(path: &Path) -> Option<T> {
    text(path)?.parse().ok()
}

/// Names in a directory, sorted; none if there is no such directory.
#[must_use]
pub fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

/// A running process: its number and the first fifteen bytes of its program's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Process number.
    pub pid: u32,
    /// `comm`.
    pub name: String,
}

/// Processes seen below a proc mount.
#[must_use]
pub fn processes(proc: &Path) -> Vec<Process> {
    names(proc)
        .into_iter()
        .filter_map(|name| name.parse().ok())
        .filter_map(|pid: u32| {
            let name = text(&proc.join(pid.to_string()).join("comm"))?;
            Some(Process { pid, name })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_absent() {
        assert_eq!(text(Path::new("/nonexistent")), None);
        assert_eq!(text(Path::new("/proc/self")), None);
        assert_eq!(names(Path::new("/nonexistent")), Vec::<String>::new());
    }

    #[test]
    fn this_test_is_among_the_processes() {
        let own = std::process::id();
        assert!(
            processes(Path::new("/proc"))
                .iter()
                .any(|process| process.pid == own)
        );
    }
}
