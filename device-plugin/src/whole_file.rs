//! Files that others read at any moment: they see the old one or the new one, never half of either.

use std::fs;
use std::io;
use std::path::Path;

/// Puts a file in place by a rename. The one beside it, `.NAME.new`, is passed over by those who
/// read the directory: its name begins with a dot and ends as none of theirs. One that a killed
/// process left is overwritten.
///
/// # Errors
/// What the kernel said; the file is as it was.
pub fn put(path: &Path, content: &str) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let beside = path.with_file_name(format!(".{}.new", name.display()));
    fs::write(&beside, content)
        .and_then(|()| fs::rename(&beside, path))
        .inspect_err(|_| {
            let _ = fs::remove_file(&beside);
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_put_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        put(&path, "1").unwrap();
        put(&path, "2").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "2");
        // What a killed process left is no hindrance.
        fs::write(dir.path().join(".b.new"), "half").unwrap();
        fs::create_dir_all(dir.path().join("b/full")).unwrap();
        put(&dir.path().join("b"), "3").unwrap_err();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
