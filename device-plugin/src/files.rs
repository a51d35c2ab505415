//! Kernel files: absence is an answer, a refused read is not.

use std::fs;
use std::io::{ErrorKind, Read};
use std::path::Path;

/// Most of a file that is read: `/proc/kallsyms` is by far the largest and read line by line.
const MOST_BYTES: u64 = 4 << 20;

/// What a file says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Said {
    /// Its text without surrounding white space.
    Text(String),
    /// It is not there, or the driver offers nothing for this object.
    Absent,
    /// It is there but this process may not, or cannot, read it.
    Refused(String),
}

impl Said {
    /// The text, if there is one.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The text as another type; `None` also if it is not one.
    #[must_use]
    pub fn parsed<T: std::str::FromStr>(&self) -> Option<T> {
        self.text()?.parse().ok()
    }
}

/// Reads a small text file.
#[must_use]
pub fn read(path: &Path) -> Said {
    let mut bytes = Vec::new();
    let read = fs::File::open(path).and_then(|file| file.take(MOST_BYTES).read_to_end(&mut bytes));
    match read {
        Ok(_) => Said::Text(String::from_utf8_lossy(&bytes).trim().to_owned()),
        Err(error) => match error.kind() {
            ErrorKind::PermissionDenied => Said::Refused(error.to_string()),
            // sysfs answers EINVAL, ENODEV, EOPNOTSUPP for what an object does not have.
            _ => Said::Absent,
        },
    }
}

/// Reads a file's text; `None` if it cannot be read for whatever reason.
#[must_use]
pub fn text(path: &Path) -> Option<String> {
    read(path).text().map(str::to_owned)
}

/// Reads a file that holds one number or word.
#[must_use]
pub fn parsed<T: std::str::FromStr>(path: &Path) -> Option<T> {
    read(path).parsed()
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
        assert_eq!(read(Path::new("/nonexistent")), Said::Absent);
        assert_eq!(read(Path::new("/proc/self")), Said::Absent);
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
