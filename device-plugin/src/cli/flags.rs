//! Flags that several commands share, and Go-style flags with one dash (`-config-file=...`), as the
//! manifests of the replaced plugins have them.

use std::ffi::OsString;

/// Gives long flags their second dash, and `-v`, which asks the RDMA shared device plugin for its
/// version, its full name. Everything behind `--` stays as it is.
pub(super) fn with_double_dashes(args: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut literal = false;
    args.into_iter()
        .map(|arg| {
            literal |= arg == "--";
            let Some(text) = arg.to_str() else { return arg };
            let Some(flag) = text.strip_prefix('-').filter(|_| !literal) else {
                return arg;
            };
            if flag == "v" {
                return "--version".into();
            }
            match flag.as_bytes() {
                [first, _, ..] if first.is_ascii_alphabetic() => format!("-{text}").into(),
                _ => arg,
            }
        })
        .collect()
}

/// The directory of the node's sockets.
pub(super) const RUN_DIR: &str = "/run/rdma-netdev";
#[cfg(test)]
mod tests {
    use super::*;

    fn given(args: &[&str]) -> Vec<String> {
        with_double_dashes(args.iter().map(OsString::from))
            .into_iter()
            .map(|arg| arg.into_string().unwrap())
            .collect()
    }

    #[test]
    fn flags_of_the_peers_manifests_are_understood() {
        assert_eq!(
            given(&[
                "x",
                "-config-file=/a",
                "-config-file",
                "-b",
                "--host-root=/h",
                "-v"
            ]),
            [
                "x",
                "--config-file=/a",
                "--config-file",
                "-b",
                "--host-root=/h",
                "--version"
            ]
        );
    }

    #[test]
    fn what_follows_two_dashes_is_left_alone() {
        assert_eq!(
            given(&["x", "--", "-config-file"]),
            ["x", "--", "-config-file"]
        );
    }
}
