//! PCI functions: identity, place in the tree, SR-IOV.
//!
//! Facts come from sysfs alone: no pci.ids, no configuration space. The chain of bridges above a
//! function is the real path of its directory, so it costs no further reads.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

pub use crate::address::PciAddress;
use crate::host::{self, Host, Result};
use crate::json;

/// One PCI function as the kernel sees it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PciFunction {
    /// Its address.
    pub address: PciAddress,
    /// Vendor ID, for instance `0x15b3`.
    #[serde(serialize_with = "json::hex16", deserialize_with = "json::hex")]
    pub vendor: u16,
    /// Device ID, for instance `0x1021`.
    #[serde(serialize_with = "json::hex16", deserialize_with = "json::hex")]
    pub device: u16,
    /// Class code: base class, sub-class, programming interface (24 bits; `0x020000` Ethernet,
    /// `0x020700` InfiniBand).
    #[serde(serialize_with = "json::hex24", deserialize_with = "json::hex")]
    pub class: u32,
    /// The bound driver, such as `mlx5_core` or `vfio-pci`; `None` if unbound.
    pub driver: Option<String>,
    /// NUMA node; `None` where the firmware does not say (the kernel's -1).
    pub numa_node: Option<u32>,
    /// The firmware's instance number for the function (`_DSM`), where it gives one.
    pub acpi_index: Option<u32>,
    /// What it is in SR-IOV terms.
    pub sriov: Sriov,
    /// Name of the root complex, such as `pci0000:20`.
    pub root: Option<String>,
    /// Bridges from the root port down to the function itself, which is the last element.
    pub chain: Vec<PciAddress>,
}

impl PciFunction {
    /// True for a virtual function.
    #[must_use]
    pub fn is_vf(&self) -> bool {
        matches!(self.sriov, Sriov::Virtual { .. })
    }

    /// The physical function behind this one: itself, or for a VF its PF.
    #[must_use]
    pub fn physical(&self) -> PciAddress {
        match self.sriov {
            Sriov::Virtual { physical, .. } => physical,
            _ => self.address,
        }
    }
}

/// A VF of a PF.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct VirtualFunction {
    /// Its VF index.
    pub index: u32,
    /// The function that it is.
    pub address: PciAddress,
}

/// A function's part in SR-IOV.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "role", rename_all = "camelCase")]
pub enum Sriov {
    /// Neither a VF nor able to have any.
    #[default]
    None,
    /// A physical function that can have VFs.
    Physical {
        /// VFs the hardware allows.
        total: u32,
        /// VFs in being now, by VF index. Shorter than the index range if a VF was detached.
        functions: Vec<VirtualFunction>,
    },
    /// A virtual function.
    Virtual {
        /// Its physical function.
        physical: PciAddress,
        /// Its VF index there (`ip link set PF vf INDEX`); `None` if the PF is not visible,
        /// as for a VF passed into a virtual machine.
        index: Option<u32>,
    },
}

/// Reads one PCI function.
///
/// # Errors
/// [`host::Error::Missing`] if there is no such function; [`host::Error::Read`] if sysfs cannot
/// be read.
pub fn read(host: &Host, address: PciAddress) -> Result<PciFunction> {
    let directory = host.pci(address)?;
    let function = read_at(&directory, address)?;
    // All attributes of a function that went away meanwhile are absent: that is no function.
    host.pci(address)?;
    Ok(function)
}

/// All PCI functions in order of address, with their directories.
pub(crate) fn directories(host: &Host) -> Result<Vec<(PciAddress, PathBuf)>> {
    let names = host::unsorted_names(&host.sys.join("bus/pci/devices"))?;
    let mut addresses: Vec<PciAddress> = names.iter().filter_map(|n| n.parse().ok()).collect();
    addresses.sort_unstable();
    let mut found = Vec::new();
    for address in addresses {
        found.extend(host::present(host.pci(address))?.map(|directory| (address, directory)));
    }
    Ok(found)
}

/// Reads the function whose real sysfs directory is `directory`.
pub(crate) fn read_at(directory: &Path, address: PciAddress) -> Result<PciFunction> {
    let id = |name| -> Result<Option<u16>> {
        Ok(host::hexadecimal(directory, name)?.and_then(|id| u16::try_from(id).ok()))
    };
    let (root, chain) = place(directory);
    Ok(PciFunction {
        address,
        vendor: id("vendor")?.unwrap_or_default(),
        device: id("device")?.unwrap_or_default(),
        class: host::hexadecimal(directory, "class")?.unwrap_or_default(),
        driver: host::link_name(directory, "driver")?,
        // -1 means "unknown"; it does not parse as u32.
        numa_node: host::parsed(directory, "numa_node")?,
        acpi_index: host::parsed(directory, "acpi_index")?,
        sriov: sriov(directory, address)?,
        root,
        chain,
    })
}

fn sriov(directory: &Path, address: PciAddress) -> Result<Sriov> {
    if let Some(physical) = linked_function(directory, "physfn")? {
        let pf = host::follow(directory, "physfn")?;
        let vfs = pf.map(|pf| virtual_functions(&pf)).transpose()?;
        let own = vfs.iter().flatten().find(|vf| vf.address == address);
        let index = own.map(|vf| vf.index);
        return Ok(Sriov::Virtual { physical, index });
    }
    match host::parsed(directory, "sriov_totalvfs")? {
        None | Some(0) => Ok(Sriov::None),
        Some(total) => Ok(Sriov::Physical {
            total,
            functions: virtual_functions(directory)?,
        }),
    }
}

/// The PF's VFs by their `virtfn<index>` links, in order of index.
fn virtual_functions(pf: &Path) -> Result<Vec<VirtualFunction>> {
    let mut functions = Vec::new();
    for name in host::unsorted_names(pf)? {
        let Some(index) = name.strip_prefix("virtfn").and_then(|i| i.parse().ok()) else {
            continue;
        };
        if let Some(address) = linked_function(pf, &name)? {
            functions.push(VirtualFunction { index, address });
        }
    }
    functions.sort_unstable();
    Ok(functions)
}

fn linked_function(directory: &Path, link: &str) -> Result<Option<PciAddress>> {
    Ok(host::link_name(directory, link)?.and_then(|name| name.parse().ok()))
}

/// Splits the real path into the last PCI root and the addresses below it.
///
/// There may be platform, ACPI or Hyper-V components before the root, and VMD puts a root of its
/// own below another PCI function, so the last one counts.
fn place(directory: &Path) -> (Option<String>, Vec<PciAddress>) {
    let mut root = None;
    let mut chain = Vec::new();
    for component in directory.iter().filter_map(|c| c.to_str()) {
        if is_root(component) {
            root = Some(component.to_owned());
            chain.clear();
        } else if let Ok(address) = component.parse() {
            chain.push(address);
        }
    }
    (root, chain)
}

/// True for `pci<domain>:<bus>`.
fn is_root(component: &str) -> bool {
    let bus = component.strip_prefix("pci");
    bus.is_some_and(|bus| format!("{bus}:00.0").parse::<PciAddress>().is_ok())
}

/// A device takes milliseconds to give vital product data, and gives the same all the time.
static VITAL_PRODUCT_DATA: Mutex<BTreeMap<PathBuf, Arc<[u8]>>> = Mutex::new(BTreeMap::new());

/// The vital product data of the function in this directory, read once; `None` if it has none, or this
/// process may not read it.
pub(crate) fn vital_product_data(directory: &Path) -> Result<Option<Arc<[u8]>>> {
    let known = || {
        VITAL_PRODUCT_DATA
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    };
    if let Some(data) = known().get(directory) {
        return Ok(Some(data.clone()));
    }
    let Some(data) = host::bytes_if_permitted(directory, "vpd")? else {
        return Ok(None);
    };
    let data: Arc<[u8]> = data.into();
    known().insert(directory.to_owned(), data.clone());
    Ok(Some(data))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn address(text: &str) -> PciAddress {
        text.parse().unwrap()
    }

    #[test]
    fn vital_product_data_is_read_once() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(vital_product_data(directory.path()).unwrap(), None);
        std::fs::write(directory.path().join("vpd"), "SW_MNG").unwrap();
        let read = || vital_product_data(directory.path()).unwrap().unwrap();
        assert_eq!(&*read(), b"SW_MNG");
        std::fs::remove_file(directory.path().join("vpd")).unwrap();
        assert_eq!(&*read(), b"SW_MNG");
    }

    proptest! {
        #[test]
        fn an_address_reads_back_as_written(domain: u32, bus: u8, device in 0_u8..32, function in 0_u8..8) {
            let address = PciAddress { domain, bus, device, function };
            prop_assert_eq!(address.to_string().parse(), Ok(address));
        }

        #[test]
        fn what_is_accepted_is_the_kernels_spelling_but_for_case(text in "[0-9a-fA-F]{0,9}:[0-9a-fA-F]{1,3}:[0-9a-fA-F]{1,3}[.][0-9a-f]{1,2}") {
            if let Ok(address) = text.parse::<PciAddress>() {
                prop_assert_eq!(address.to_string(), text.to_lowercase());
            }
        }

        #[test]
        fn no_text_makes_the_reader_panic(text in "\\PC*") {
            let _ = text.parse::<PciAddress>();
        }
    }

    #[test]
    fn wrong_addresses_are_refused_with_an_example() {
        for text in [
            "",
            "3b:00.0",
            "0000:3b:00",
            "0000:3b:20.0",
            "0000:3b:00.8",
            "0000:+b:00.0",
            "00000:3b:00.0",
        ] {
            let error = text.parse::<PciAddress>().unwrap_err();
            assert!(
                error
                    .to_string()
                    .ends_with("is not a PCI address such as 0000:3b:00.0"),
                "{text}"
            );
        }
    }

    #[test]
    fn the_chain_starts_below_the_last_root() {
        let (root, chain) = place(Path::new(
            "/sys/devices/pci0000:20/0000:20:00.0/0000:21:00.0/0000:22:01.0/0000:24:00.0",
        ));
        assert_eq!(root.as_deref(), Some("pci0000:20"));
        assert_eq!(
            chain,
            [
                "0000:20:00.0",
                "0000:21:00.0",
                "0000:22:01.0",
                "0000:24:00.0"
            ]
            .map(address)
        );

        let vmd = "/sys/devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0/10000:e1:00.0";
        let (root, chain) = place(Path::new(vmd));
        assert_eq!(root.as_deref(), Some("pci10000:e0"));
        assert_eq!(chain, ["10000:e0:06.0", "10000:e1:00.0"].map(address));

        let vmbus = "/sys/devices/LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/47505500-0001-0000-\
                     3130-444531334632/pci0101:00/0101:00:00.0";
        assert_eq!(place(Path::new(vmbus)).1, [address("0101:00:00.0")]);
    }
}
