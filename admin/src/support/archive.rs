//! The archive: a tar file in gzip, with one folder on top.

use std::collections::BTreeSet;
use std::io::{self, Write};

use flate2::Compression;
use flate2::write::GzEncoder;

pub(crate) struct Archive {
    tar: tar::Builder<GzEncoder<Box<dyn Write>>>,
    top: String,
    seconds: u64,
    files: BTreeSet<String>,
}

impl Archive {
    pub(crate) fn new(to: Box<dyn Write>, top: String, seconds: u64) -> Self {
        Self {
            tar: tar::Builder::new(GzEncoder::new(to, Compression::default())),
            top,
            seconds,
            files: BTreeSet::new(),
        }
    }

    /// Adds a file, and returns its path below the top.
    pub(crate) fn add(&mut self, mut file: String, bytes: &[u8]) -> io::Result<String> {
        while !self.files.insert(file.clone()) {
            file.push('_');
        }
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        header.set_mtime(self.seconds);
        let path = format!("{}/{file}", self.top);
        self.tar.append_data(&mut header, path, bytes)?;
        Ok(file)
    }

    /// Writes the end.
    pub(crate) fn finish(self) -> io::Result<()> {
        self.tar.into_inner()?.finish()?.flush()
    }
}

/// A path below the top. What others named (nodes, pods, containers) is one component of it, never a path.
pub(crate) fn path(components: &[&str]) -> String {
    let safe = |name: &&str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        let name = name
            .chars()
            .take(200)
            .map(|c| if plain(c) { c } else { '_' });
        let name: String = name.collect();
        match name.is_empty() || name.starts_with('.') {
            true => format!("_{name}"),
            false => name,
        }
    };
    components.iter().map(safe).collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_never_a_path() {
        for (name, expected) in [
            ("gpu-1.example", "nodes/gpu-1.example/status.json"),
            ("..", "nodes/_../status.json"),
            ("../../etc", "nodes/_.._.._etc/status.json"),
            ("/etc", "nodes/_etc/status.json"),
            ("", "nodes/_/status.json"),
            ("a\n\u{1b}\0ä", "nodes/a____/status.json"),
        ] {
            assert_eq!(path(&["nodes", name, "status.json"]), expected);
        }
        assert_eq!(path(&[&"x".repeat(999)]).len(), 200);
    }
}
