//! `rdmactl topology`: the lists and the matrix, by the program.

use std::fs;
use std::process::Command;

use anyhow::{Result, ensure};
use e2e::bin_under_test::product;
use e2e::case;
use e2e::harness::Case;
use hca_trees::{Tree, machine};
use tempfile::TempDir;

pub(crate) const CASES: &[Case] = &[case!(the_lists_and_the_matrix_are_printed)];

struct Host {
    directory: TempDir,
}

impl Host {
    fn new(lay: fn(&Tree)) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let root = directory.path().join("host");
        fs::create_dir(&root)?;
        lay(&Tree::new(&root));
        Ok(Self { directory })
    }

    fn topology(&self, arguments: &[&str]) -> Result<String> {
        let output = Command::new(product("rdmactl")?)
            .args(["topology", "--host-root"])
            .arg(self.directory.path().join("host"))
            .args(arguments)
            .output()?;
        ensure!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8(output.stdout)?)
    }
}

fn the_lists_and_the_matrix_are_printed() -> Result<()> {
    let host = Host::new(machine::a4)?;
    let matrix = host.topology(&["--matrix"])?;
    for word in ["PIX", "NODE", "SYS"] {
        ensure!(matrix.contains(word), "no {word}: {matrix}");
    }
    let lists = host.topology(&[])?;
    ensure!(
        lists.contains("PIX mlx5_0 mlx5_1") && lists.contains("gpu0rdma0"),
        "{lists}"
    );
    Ok(())
}
