//! Go-style flags: the peers' manifests say `-config-file=...` with one dash.

use std::ffi::OsString;

/// Long flags that are known with a single dash.
const LONG: [&str; 14] = [
    "cdi-dir",
    "device-info-dir",
    "metrics-addr",
    "config-file",
    "device-plugin-dir",
    "host-root",
    "kubelet-root-dir",
    "log-format",
    "log-level",
    "node-socket",
    "resource-prefix",
    "use-cdi",
    "version",
    "help",
];

/// Gives known long flags their second dash, and `-v`, which asks the RDMA shared device plugin
/// for its version, its full name. Everything behind `--` stays as it is.
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
            let name = flag.split('=').next().unwrap_or(flag);
            if LONG.contains(&name) {
                format!("-{text}").into()
            } else {
                arg
            }
        })
        .collect()
}

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
