//! The hardware a class device (netdev, RDMA device, char device) stands on.
//!
//! `/sys/class/net/X/device` and `/sys/class/infiniband/X/device` lead to the parent, which is
//! not always the PCI function itself: virtio NICs hang one level below theirs, sub-functions
//! stand on an auxiliary device, soft devices have no parent at all.

use std::path::{Path, PathBuf};

use crate::host::{self, Host, Result};
use crate::pci::PciAddress;
use crate::sub_device;
use crate::unit::{HcaId, is_number, is_subfunction};

/// A class device's parent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Parent {
    /// Real directory of the immediate parent.
    pub(crate) directory: PathBuf,
    /// Name of the auxiliary device, if the immediate parent is one (`mlx5_core.sf.4`).
    pub(crate) auxiliary: Option<String>,
    /// The PCI function at or above the parent, with its directory.
    pub(crate) pci: Option<(PciAddress, PathBuf)>,
}

impl Parent {
    /// The parent of the class device in `directory`; `None` for soft devices.
    pub(crate) fn of(host: &Host, directory: &Path) -> Result<Option<Self>> {
        let parent = host::follow(directory, "device")?;
        parent.map(|parent| Self::at(host, parent)).transpose()
    }

    /// The hardware of an HCA; `None` for one that is on no bus.
    pub(crate) fn of_hca(host: &Host, hca: &HcaId) -> Result<Option<Self>> {
        let directory = match hca {
            HcaId::Pci(address) => host.pci(*address)?,
            HcaId::Auxiliary(name) => host.auxiliary(name)?,
            HcaId::NodeGuid(_) => return Ok(None),
        };
        Self::at(host, directory).map(Some)
    }

    /// The name that units have for the hardware; `None` for hardware on another bus.
    pub(crate) fn hca(&self) -> Option<HcaId> {
        let pci = self.pci.as_ref().map(|(address, _)| *address);
        HcaId::of_place(pci, self.auxiliary.as_deref())
    }

    /// Describes a directory that is known to be a parent.
    pub(crate) fn at(host: &Host, directory: PathBuf) -> Result<Self> {
        let auxiliary = match subsystem(&directory)?.as_deref() {
            Some("auxiliary") => file_name(&directory),
            _ => None,
        };
        // Climb to the first directory of the PCI bus; /sys/devices is the end of the tree.
        let top = host.sys.join("devices");
        let mut pci = None;
        for ancestor in directory
            .ancestors()
            .take_while(|a| **a != top && a.parent().is_some())
        {
            if subsystem(ancestor)?.as_deref() == Some("pci") {
                pci = file_name(ancestor)
                    .and_then(|name| name.parse().ok())
                    .map(|address| (address, ancestor.to_owned()));
                break;
            }
        }
        Ok(Self {
            directory,
            auxiliary,
            pci,
        })
    }

    /// The driver bound to the immediate parent: `mlx5_core`, or `virtio_net` where the PCI
    /// function above has `virtio-pci`.
    pub(crate) fn driver(&self) -> Result<Option<String>> {
        host::link_name(&self.directory, "driver")
    }

    /// Directories whose class devices belong to the same hardware as this parent's, nearest
    /// first: the parent itself, and unless it is a sub-function its PCI function. A
    /// sub-function is a NIC of its own; the function above it is another one's.
    pub(crate) fn hardware(&self) -> Vec<&Path> {
        let mut directories = vec![self.directory.as_path()];
        let own_nic = self.auxiliary.as_deref().is_some_and(is_subfunction);
        if let Some((_, pci)) = &self.pci
            && !own_nic
            && *pci != self.directory
        {
            directories.push(pci);
        }
        directories
    }

    /// Netdevs on this hardware, in order of name.
    pub(crate) fn netdevs(&self) -> Result<Vec<String>> {
        self.class_devices("net")
    }

    /// RDMA devices on this hardware that carry data, in order of name.
    pub(crate) fn rdma_devices(&self) -> Result<Vec<String>> {
        let mut names = self.class_devices("infiniband")?;
        let management = sub_device::among(names.iter().map(String::as_str));
        names.retain(|name| !management.contains(name));
        Ok(names)
    }

    /// Directories that have devices of a class, with the names of these: the hardware's own
    /// directory, else those of its facets.
    pub(crate) fn class_places(&self, class: &str) -> Result<Vec<(PathBuf, Vec<String>)>> {
        for directory in self.hardware() {
            let own = host::names(&directory.join(class))?;
            if !own.is_empty() {
                return Ok(vec![(directory.to_owned(), own)]);
            }
            let mut places = Vec::new();
            for child in host::names(directory)?.iter().filter(|name| is_facet(name)) {
                let facet = directory.join(child);
                let names = host::names(&facet.join(class))?;
                if !names.is_empty() {
                    places.push((facet, names));
                }
            }
            if !places.is_empty() {
                return Ok(places);
            }
        }
        Ok(Vec::new())
    }

    /// Devices of a class directly below the hardware, else below its facets.
    fn class_devices(&self, class: &str) -> Result<Vec<String>> {
        let places = self.class_places(class)?;
        Ok(places.into_iter().flat_map(|(_, names)| names).collect())
    }
}

/// True for the name of a bus device that only passes on what the function above it can do: a
/// virtio device, or an auxiliary one that is no sub-function (`mlx5_core.eth.0`, `ice.roce.0`).
fn is_facet(name: &str) -> bool {
    let mut parts = name.rsplit('.');
    let auxiliary = parts.next().is_some_and(is_number) && parts.count() == 2;
    (auxiliary && !is_subfunction(name)) || name.strip_prefix("virtio").is_some_and(is_number)
}

/// The bus or class a sysfs device directory belongs to.
fn subsystem(directory: &Path) -> Result<Option<String>> {
    host::link_name(directory, "subsystem")
}

fn file_name(path: &Path) -> Option<String> {
    path.file_name()
        .and_then(|name| name.to_str())
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facets_are_distinguished_from_sub_functions_and_from_functions() {
        for name in ["virtio6", "mlx5_core.eth.0", "ice.roce.12"] {
            assert!(is_facet(name) && !is_subfunction(name), "{name}");
        }
        assert!(is_subfunction("mlx5_core.sf.4") && !is_facet("mlx5_core.sf.4"));
        for name in [
            "0000:3b:00.1",
            "virtio",
            "net",
            "msi_irqs",
            "mlx5_core.sf.x",
            "a.b",
        ] {
            assert!(!is_facet(name) && !is_subfunction(name), "{name}");
        }
    }
}
