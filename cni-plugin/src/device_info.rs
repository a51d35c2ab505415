//! The device information file of an attachment (Network Plumbing Working Group, device-info
//! specification 1.1.0): which PCI function and RDMA device the interface has. Multus names the
//! file, having put the device plugin's there, and shows it in the pod's network status.
//!
//! The file's name comes with the network configuration, whose `runtimeConfig` a namespace's user
//! can write, so it must be this attachment's own in the one directory for such files. It only
//! reports: what cannot be written is a warning.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use cni_wire::AttachmentId;
use node::{file, trust};
use serde_json::{Map, Value, json};

use crate::gids::Ready;

/// The specification's directory, by the path that Multus writes and by the one it is on hosts whose
/// `/var/run` is a link; on others these are two.
const DIRECTORIES: [&str; 2] = [
    "/var/run/k8s.cni.cncf.io/devinfo/cni",
    "/run/k8s.cni.cncf.io/devinfo/cni",
];
const VERSION: &str = "1.1.0";
/// More than any such file has.
const MAX_FILE_BYTES: u64 = 1 << 16;

#[derive(Clone, Debug, Default)]
pub(crate) struct Report<'a> {
    /// PCI address of the function, of the parent's for a child; none leaves the device plugin's.
    pub pci: Option<&'a str>,
    pub rdma: Vec<&'a str>,
    /// The GIDs of its addresses.
    pub gids: &'a [Ready],
}

/// The file, if it is this attachment's.
///
/// # Errors
/// Why it is not written, as text.
pub(crate) fn place(root: &Path, named: &str, id: &AttachmentId) -> Result<PathBuf, String> {
    let path = Path::new(named);
    let known = DIRECTORIES
        .iter()
        .find(|directory| path.parent() == Some(Path::new(directory)));
    let Some(directory) = known else {
        return Err(format!("{named} is not a file in {}", DIRECTORIES[0]));
    };
    let name = path
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    // As Multus makes it: <network>-<container>_<interface>.
    let of_attachment = name.ends_with(&format!("-{}_{}", id.container_id, id.ifname));
    if !of_attachment || name.chars().any(char::is_control) {
        return Err(format!("{named} is not the file of {id}"));
    }
    Ok(root.join(directory.trim_start_matches('/')).join(name))
}

/// Completes what is in the file. Nothing is written for an interface without a PCI function:
/// the specification has no word for it.
pub(crate) fn write(file: &Path, report: &Report<'_>) -> io::Result<()> {
    let known = read(file);
    let named = known
        .get("pci")
        .and_then(|pci| pci.get("pci-address")?.as_str());
    let Some(pci) = report.pci.or(named).map(str::to_owned) else {
        return Ok(());
    };
    let text = merge(known, &pci, report).to_string();
    // A runtime that names the file need not have made its directory.
    if let Some(directory) = file.parent() {
        fs::create_dir_all(directory)?;
    }
    file::replace(file, text)
}

/// What another wrote there; nothing where that is no such document.
fn read(file: &Path) -> Map<String, Value> {
    // Neither a link nor a FIFO is what the device plugin wrote.
    let text = trust::read(file, MAX_FILE_BYTES).ok().flatten();
    let parsed = text.and_then(|text| serde_json::from_slice(&text).ok());
    match parsed {
        Some(Value::Object(map)) => map,
        _ => Map::new(),
    }
}

fn merge(mut known: Map<String, Value>, pci: &str, report: &Report<'_>) -> Value {
    let mut about = match known.remove("pci") {
        Some(Value::Object(map)) => map,
        _ => Map::new(),
    };
    about.insert("pci-address".into(), pci.into());
    if !report.rdma.is_empty() {
        about.insert("rdma-device".into(), report.rdma.join(",").into());
    }
    known.insert("type".into(), "pci".into());
    known.insert("version".into(), VERSION.into());
    known.insert("pci".into(), Value::Object(about));
    if !report.gids.is_empty() {
        let gids: Vec<Value> = report.gids.iter().map(Ready::to_json).collect();
        known.insert("rdma-gids".into(), json!(gids));
    }
    Value::Object(known)
}

#[cfg(test)]
mod tests {
    use cni_wire::{ContainerId, IfName};
    use hca::PortId;

    use super::*;

    fn id() -> AttachmentId {
        AttachmentId {
            container_id: ContainerId::parse("c1").unwrap(),
            ifname: IfName::parse("net1").unwrap(),
        }
    }

    #[test]
    fn only_the_attachments_own_file_is_written() {
        let place = |named: &str| place(Path::new("/"), named, &id());
        for directory in ["/run", "/var/run"] {
            let named = format!("{directory}/k8s.cni.cncf.io/devinfo/cni/ns-rail0-c1_net1");
            assert_eq!(place(&named).unwrap(), Path::new(&named));
        }
        for wrong in [
            "/etc/passwd",
            "/etc/c1_net1",
            "/run/k8s.cni.cncf.io/devinfo/cni/x-c2_net1",
            "/run/k8s.cni.cncf.io/devinfo/cni/../../../../etc/c1_net1",
            "/run/k8s.cni.cncf.io/devinfo/cni/",
            "run/k8s.cni.cncf.io/devinfo/cni/c1_net1",
            "",
        ] {
            assert!(place(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_the_device_plugin_wrote_is_kept_and_completed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("rail0-c1_net1");
        let elsewhere = dir.path().join("made/c1_net1");
        let function = Report {
            pci: Some("0000:3b:00.0"),
            ..Report::default()
        };
        write(&elsewhere, &function).unwrap();
        assert!(fs::read_to_string(&elsewhere).unwrap().contains("3b:00.0"));
        fs::remove_dir_all(dir.path().join("made")).unwrap();
        fs::write(
            &file,
            r#"{"type": "pci", "version": "1.0.0", "pci": {"pci-address": "0000:3b:00.0", "pf-pci-address": "0000:3b:00.7"}}"#,
        )
        .unwrap();
        let gids = [Ready {
            port: PortId {
                device: "mlx5_0".into(),
                port: 1,
            },
            address: "10.0.0.5".parse().unwrap(),
            index: 3,
        }];
        let report = Report {
            pci: Some("0000:3b:00.0"),
            rdma: vec!["mlx5_0", "mlx5_1"],
            gids: &gids,
        };
        write(&file, &report).unwrap();
        let now: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        assert_eq!(
            now,
            json!({"type": "pci", "version": "1.1.0",
                "pci": {"pci-address": "0000:3b:00.0", "pf-pci-address": "0000:3b:00.7", "rdma-device": "mlx5_0,mlx5_1"},
                "rdma-gids": [{"device": "mlx5_0", "port": 1, "address": "10.0.0.5", "gidIndex": 3}]})
        );
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        write(&dir.path().join("none"), &Report::default()).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
