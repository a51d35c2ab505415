//! Character devices of the RDMA stack: `uverbs`, `umad`, `issm`, `ucm`, and `rdma_cm`.
//!
//! sysfs shows which node belongs to which RDMA device (`ibdev`, `port`) and its number (`dev`).
//! Numbers are read each time: `rdma_cm` has a dynamic minor, and the others are handed out
//! lowest-free whenever a device is registered, which a move between network namespaces does.

use std::collections::BTreeMap;
use std::fmt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::Serialize;

use crate::address::{Guid, ParseError};
use crate::host::{self, Host, Result};
use crate::json;
use crate::parent::Parent;
use crate::sub_device;
use crate::unit::HcaId;

/// A device number, displayed as `major:minor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceNumber {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

impl fmt::Display for DeviceNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

impl FromStr for DeviceNumber {
    type Err = ParseError;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        let numbers = text.split_once(':');
        let numbers = numbers.and_then(|(a, b)| a.parse().ok().zip(b.parse().ok()));
        let number = numbers.map(|(major, minor)| Self { major, minor });
        let number = number.filter(|number| number.to_string() == text);
        number.ok_or_else(|| ParseError::new(text, "a device number such as 231:192"))
    }
}

json::by_text!(DeviceNumber);

/// A character device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CharDevice {
    /// The kernel's name, such as `uverbs0`; the node is `infiniband/<name>` below the device
    /// directory (the kernel's own choice, which udev and devtmpfs follow).
    pub name: String,
    /// The node below [`Host::dev`].
    pub path: PathBuf,
    /// Its number.
    pub number: DeviceNumber,
    /// The port that a `umad` or `issm` node is of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u32>,
}

/// Whether a device node can be handed to a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Node {
    /// There, a character device, with the right number.
    Ready,
    /// Not there, or not a character device: neither devtmpfs nor udev made it.
    Missing,
    /// There, but it is another device by now.
    Stale {
        /// The number found.
        found: DeviceNumber,
    },
}

impl CharDevice {
    /// The node's name below any device directory: `infiniband/uverbs0`.
    #[must_use]
    pub fn dev_name(&self) -> String {
        format!("infiniband/{}", self.name)
    }

    /// Reads the node itself.
    #[must_use]
    pub fn node(&self) -> Node {
        match std::fs::metadata(&self.path) {
            Ok(meta) if meta.file_type().is_char_device() => match number_of(meta.rdev()) {
                found if found == self.number => Node::Ready,
                found => Node::Stale { found },
            },
            _ if self.is_unseen() => Node::Ready,
            _ => Node::Missing,
        }
    }

    /// Whether no device directory is shown here, as in the daemon's container. Then the kernel's own
    /// word is taken: devtmpfs makes a node with this name and number before the device's event
    /// (`device_add`, `drivers/base/core.c`).
    fn is_unseen(&self) -> bool {
        let directory = self.path.ancestors().nth(2);
        directory.is_some_and(|directory| !directory.is_dir())
    }
}

/// Splits a `dev_t` as user space sees it.
pub(crate) fn number_of(device: u64) -> DeviceNumber {
    // Both parts fit: the kernel has 12 bits of major, 20 of minor.
    DeviceNumber {
        major: libc::major(device),
        minor: libc::minor(device),
    }
}

/// The character devices of one RDMA device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct CharDevices {
    /// The verbs node; `None` if `ib_uverbs` is not loaded.
    pub uverbs: Option<CharDevice>,
    /// Management datagram nodes of ports; empty without `ib_umad`, and for devices without MAD
    /// support (iWARP).
    pub umad: Vec<CharDevice>,
    /// Subnet-manager nodes of ports; newer kernels have none on Ethernet ports.
    pub issm: Vec<CharDevice>,
    /// The old connection-manager node; gone since Linux 5.16.
    pub ucm: Option<CharDevice>,
}

impl CharDevices {
    /// All of them, verbs first.
    pub fn iter(&self) -> impl Iterator<Item = &CharDevice> {
        let of_ports = self.umad.iter().chain(&self.issm);
        self.uverbs.iter().chain(of_ports).chain(&self.ucm)
    }
}

/// The character devices of an HCA as they are at this moment, by the names of its RDMA devices that
/// carry data, in whichever network namespace these are: the classes of character devices are not
/// divided by namespaces. `rdma_devices` are the names by which an HCA is known that is on no bus.
///
/// It reads the directories of this HCA alone, and asks neither firmware nor driver.
///
/// # Errors
/// [`host::Error::Missing`] if the HCA is not on this host; [`host::Error::Read`] if sysfs cannot be
/// read.
pub fn of_hca(
    host: &Host,
    hca: &HcaId,
    rdma_devices: &[&str],
) -> Result<BTreeMap<String, CharDevices>> {
    if let HcaId::NodeGuid(guid) = hca {
        let mut found = at(host, &[host.sys.join("class")])?;
        found.retain(|name, _| rdma_devices.contains(&name.as_str()));
        for name in found.keys() {
            // One that cannot be seen from here has no GUID to compare.
            let known = host::parsed(&host.class("infiniband").join(name), "node_guid")?;
            if known.is_some_and(|known: Guid| known != *guid) {
                return Err(host.no_node_guid(*guid));
            }
        }
        return Ok(found);
    }
    let places = match Parent::of_hca(host, hca)? {
        Some(parent) => parent.class_places("infiniband_verbs")?,
        None => Vec::new(),
    };
    let places: Vec<PathBuf> = places.into_iter().map(|(place, _)| place).collect();
    let mut found = at(host, &places)?;
    let management = sub_device::among(found.keys().map(String::as_str));
    found.retain(|name, _| !management.contains(name));
    Ok(found)
}

/// The character devices of `rdma_device`. They are children of its parent like itself; those
/// of a soft device are found in the class directory.
pub(crate) fn of_device(
    host: &Host,
    rdma_device: &str,
    parent: Option<&Path>,
) -> Result<CharDevices> {
    let place = match parent {
        Some(directory) => directory.to_owned(),
        None => host.sys.join("class"),
    };
    Ok(at(host, &[place])?.remove(rdma_device).unwrap_or_default())
}

/// The character devices in the class directories of each place, by the RDMA devices that they are
/// of.
fn at(host: &Host, places: &[PathBuf]) -> Result<BTreeMap<String, CharDevices>> {
    let mut found: BTreeMap<String, CharDevices> = BTreeMap::new();
    for place in places {
        for class in ["infiniband_verbs", "infiniband_mad", "infiniband_cm"] {
            for (owner, device) in entries(host, &place.join(class))? {
                let devices = found.entry(owner).or_default();
                match class {
                    "infiniband_verbs" => devices.uverbs = Some(device),
                    "infiniband_cm" => devices.ucm = Some(device),
                    _ if device.name.starts_with("issm") => devices.issm.push(device),
                    _ => devices.umad.push(device),
                }
            }
        }
    }
    Ok(found)
}

/// All devices of a class directory, each with its owner (`ibdev`).
fn entries(host: &Host, directory: &Path) -> Result<Vec<(String, CharDevice)>> {
    let mut entries = Vec::new();
    for name in host::names(directory)? {
        let entry = directory.join(&name);
        // Also skips `abi_version`, a file of the class itself.
        let (Some(owner), Some(number)) = (
            host::attribute(&entry, "ibdev")?,
            host::parsed(&entry, "dev")?,
        ) else {
            continue;
        };
        let device = CharDevice {
            port: host::parsed(&entry, "port")?,
            ..char_device(host, name, number)
        };
        entries.push((owner, device));
    }
    Ok(entries)
}

/// The verbs nodes of all RDMA devices, with the names of these. Other than the devices
/// themselves, they are seen from every network namespace in exclusive mode, too.
///
/// # Errors
/// [`host::Error::Read`] if sysfs cannot be read.
pub fn verbs(host: &Host) -> Result<Vec<(String, CharDevice)>> {
    entries(host, &host.class("infiniband_verbs"))
}

/// The connection manager's node, `rdma_cm`; `None` if `rdma_ucm` is not loaded.
///
/// # Errors
/// [`host::Error::Read`] if sysfs cannot be read.
pub fn rdma_cm(host: &Host) -> Result<Option<CharDevice>> {
    let directory = host.class("misc").join("rdma_cm");
    Ok(host::parsed(&directory, "dev")?.map(|number| char_device(host, "rdma_cm".into(), number)))
}

fn char_device(host: &Host, name: String, number: DeviceNumber) -> CharDevice {
    CharDevice {
        path: host.dev.join("infiniband").join(&name),
        name,
        number,
        port: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_device_directory_the_kernel_is_believed() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::at(root.path());
        let number = DeviceNumber {
            major: 231,
            minor: 192,
        };
        let device = char_device(&host, "uverbs0".into(), number);
        assert_eq!(device.node(), Node::Ready);
        std::fs::create_dir(&host.dev).unwrap();
        assert_eq!(device.node(), Node::Missing);
    }

    #[test]
    fn numbers_read_as_the_kernel_writes_them() {
        assert_eq!(
            "231:192".parse(),
            Ok(DeviceNumber {
                major: 231,
                minor: 192
            })
        );
        for text in ["", "231", "231:", ":1", "+1:2", "1:2:3", "-1:0"] {
            assert!(text.parse::<DeviceNumber>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_dev_t_splits_into_its_number() {
        assert_eq!(
            number_of(libc::makedev(231, 192)),
            DeviceNumber {
                major: 231,
                minor: 192
            }
        );
        assert_eq!(
            number_of(libc::makedev(10, 260)),
            DeviceNumber {
                major: 10,
                minor: 260
            }
        );
    }

    #[test]
    fn a_node_that_is_another_device_is_not_ready() {
        let mut device = CharDevice {
            name: "null".into(),
            path: "/dev/null".into(),
            number: DeviceNumber { major: 1, minor: 3 },
            port: None,
        };
        assert_eq!(device.node(), Node::Ready);
        device.number.minor = 5;
        assert_eq!(
            device.node(),
            Node::Stale {
                found: DeviceNumber { major: 1, minor: 3 }
            }
        );
        device.path = "/dev/nonexistent".into();
        assert_eq!(device.node(), Node::Missing);
    }
}
