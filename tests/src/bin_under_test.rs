//! Where the binaries under test are.
//!
//! The product's binaries come from the directory named by `RDMA_BIN_DIR` (a
//! release build, say), else from the profile directory of the running test
//! executable. The stand-ins belong to this crate and are always taken from
//! the latter.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// The environment variable naming the directory of the binaries under test.
pub const BIN_DIR: &str = "RDMA_BIN_DIR";

/// One of the product's binaries: `rdma-netdev`, `rdma-ipam` or `rdma-device-plugin`.
///
/// # Errors
/// The file is not there; the message says how to build it.
pub fn product(name: &str) -> Result<PathBuf> {
    match env::var_os(BIN_DIR) {
        Some(directory) => existing(Path::new(&directory), name)
            .with_context(|| format!("{BIN_DIR} is set to {}", directory.display())),
        None => existing(&profile_directory()?, name),
    }
}

/// One of this crate's stand-ins: `kubelet-standin`, `multus-standin` or `node-socket-peer`.
///
/// # Errors
/// The file is not there; the message says how to build it.
pub fn standin(name: &str) -> Result<PathBuf> {
    existing(&profile_directory()?, name)
}

fn existing(directory: &Path, name: &str) -> Result<PathBuf> {
    let path = directory.join(name);
    if !path.is_file() {
        bail!(
            "no {name} in {}: build it first (`cargo build --workspace`), \
             or set {BIN_DIR} to the directory that has it",
            directory.display()
        );
    }
    Ok(path)
}

/// `target/debug` of `target/debug/deps/e2e-0123456789abcdef`, whatever target
/// and profile the test was built for.
fn profile_directory() -> Result<PathBuf> {
    let executable = env::current_exe().context("find the running executable")?;
    let directory = executable
        .parent()
        .context("the running executable has no directory")?;
    let directory = match directory.file_name() {
        Some(name) if name == "deps" => directory.parent().unwrap_or(directory),
        _ => directory,
    };
    Ok(directory.to_path_buf())
}
