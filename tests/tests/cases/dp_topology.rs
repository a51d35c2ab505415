//! `rdmactl topology --svg`: the picture, as a renderer of such pictures shows it.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use e2e::bin_under_test::product;
use e2e::case;
use e2e::harness::Case;
use hca_trees::{Tree, machine};
use serde_json::Value;
use tempfile::TempDir;

pub(crate) const CASES: &[Case] = &[
    case!(every_device_can_be_seen_in_the_picture, Renderer),
    case!(the_matrix_and_the_choice_are_printed),
];

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

    fn picture(&self) -> Result<String> {
        let file = self.directory.path().join("picture.svg");
        self.topology(&["--svg", file.to_str().context("path")?])?;
        Ok(fs::read_to_string(file)?)
    }
}

/// The picture as pixels.
fn rendered(svg: &str, at: &Path) -> Result<Vec<u8>> {
    let (from, to) = (at.join("one.svg"), at.join("one.png"));
    fs::write(&from, svg)?;
    let output = Command::new("rsvg-convert")
        .arg("--output")
        .arg(&to)
        .arg(&from)
        .stdin(Stdio::null())
        .output()?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let png = fs::read(to)?;
    ensure!(png.starts_with(b"\x89PNG"), "no PNG");
    Ok(png)
}

/// Each label is visible: without any one of them the picture is another.
fn every_device_can_be_seen_in_the_picture() -> Result<()> {
    for (name, lay, devices) in [
        ("a4", machine::a4 as fn(&Tree), 16),
        ("p4d", machine::p4d, 12),
        ("nd_h100", machine::nd_h100, 16),
        ("oci_h100", machine::oci_h100, 24),
        ("gb200", machine::gb200, 8),
        ("egx", machine::egx, 6),
    ] {
        let host = Host::new(lay)?;
        let printed: Value = serde_json::from_str(&host.topology(&["--json"])?)?;
        let mut labels = Vec::new();
        for list in ["gpus", "nics"] {
            for device in printed[list]
                .as_array()
                .with_context(|| printed.to_string())?
            {
                let words = [&device["hca"], &device["place"]["address"]];
                let label = words.into_iter().find_map(Value::as_str);
                labels.push(label.with_context(|| device.to_string())?.to_owned());
            }
        }
        ensure!(labels.len() >= devices, "{name}: {labels:?}");
        let svg = host.picture()?;
        let whole = rendered(&svg, host.directory.path())?;
        for label in labels {
            let text = format!(">{label}</text>");
            let Some(end) = svg.find(&text) else {
                bail!("{name}: {label} is not in the picture");
            };
            let start = svg[..end].rfind("<text").context("no text")?;
            let without = format!("{}{}", &svg[..start], &svg[end + text.len()..]);
            ensure!(
                rendered(&without, host.directory.path())? != whole,
                "{name}: {label} is written, but cannot be seen"
            );
        }
    }
    Ok(())
}

fn the_matrix_and_the_choice_are_printed() -> Result<()> {
    let host = Host::new(machine::a4)?;
    let matrix = host.topology(&["--matrix"])?;
    for word in ["PIX", "NODE", "SYS"] {
        ensure!(matrix.contains(word), "no {word}: {matrix}");
    }
    let choice = host.topology(&["--gpus", "0,7", "--nics", "2"])?;
    ensure!(
        choice.contains("gpu0rdma0") || choice.contains("mlx5_0"),
        "{choice}"
    );
    Ok(())
}
