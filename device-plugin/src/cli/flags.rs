//! Flags that several commands share, and Go-style flags with one dash (`-config-file=...`), as the
//! manifests of the replaced plugins have them.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;

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

/// Addresses of the node, by which its uplinks are known.
#[derive(Debug, Clone, Args)]
pub struct NodeAddresses {
    /// The node's addresses: a netdev that has one is an uplink
    #[arg(
        long,
        value_name = "ADDRESS,…",
        env = "RDMA_NODE_ADDRESSES",
        value_delimiter = ','
    )]
    pub node_addresses: Vec<IpAddr>,
}

/// Where the kubelet keeps things.
#[derive(Debug, Clone, Args)]
pub struct KubeletRoot {
    /// The kubelet's --root-dir
    #[arg(
        long,
        value_name = "DIR",
        env = "RDMA_KUBELET_ROOT_DIR",
        default_value = "/var/lib/kubelet"
    )]
    pub kubelet_root_dir: PathBuf,
}

/// The directory of the node's sockets.
pub(super) const RUN_DIR: &str = "/run/rdma-netdev";
/// The configuration files that are tried when none is named: ours, then the peers'.
const CONFIG_FILES: [&str; 3] = [
    "/etc/rdma-netdev/pools.json",
    "/k8s-rdma-shared-dev-plugin/config.json",
    "/etc/pcidp/config.json",
];

/// The file that is named, else the first that exists of the usual ones.
pub fn config_file(named: Option<PathBuf>) -> anyhow::Result<PathBuf> {
    let usual = || {
        CONFIG_FILES
            .iter()
            .map(PathBuf::from)
            .find(|path| path.exists())
    };
    named.or_else(usual).ok_or_else(|| {
        anyhow::anyhow!(
            "no configuration: --config-file is not given, and none of {} exists",
            CONFIG_FILES.join(", ")
        )
    })
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
