//! The PCI function through which a `ConnectX-8` moves data to and from a GPU (Data Direct).
//!
//! A Grace CPU does not translate addresses for PCI functions (ATS), so a NIC on it cannot reach a
//! GPU's PCI window. A `ConnectX-8` therefore has a second function, below the GPU's own switch in
//! another PCI domain, that does nothing but DMA. Which NIC it belongs to is in the vital product
//! data of both: the same UUID under the vendor's keyword `V3` (as `rdma_topo` of rdma-core 64
//! pairs them; the driver asks the firmware for the same, `drivers/infiniband/hw/mlx5/data_direct.c`).

use std::collections::BTreeMap;
use std::path::Path;

use super::distance::PciLocation;
use super::nic::Nic;
use crate::host::{self, Host, Result};
use crate::pci::{self, PciFunction};

const MELLANOX: u16 = 0x15b3;
/// The function for DMA alone (`mlx5_data_direct_pci_table`).
const DMA_FUNCTION: u16 = 0x2100;
/// NICs that have one: `ConnectX-8` and `ConnectX-9`.
const NICS: [u16; 2] = [0x1023, 0x1025];

/// Large resource data types of vital product data (PCI Local Bus 3.0, appendix I).
const LARGE: u8 = 0x80;
const READ_ONLY: u8 = 0x90;
const END: u8 = 0x78;

/// Notes the function of each NIC that has one. Vital product data is read only where there are NICs
/// to match by it: a device takes milliseconds to give it.
///
/// # Errors
/// [`host::Error::Read`] if sysfs cannot be read.
pub(super) fn assign(host: &Host, nics: &mut [Nic]) -> Result<()> {
    let is_possible = |nic: &PciFunction| nic.vendor == MELLANOX && NICS.contains(&nic.device);
    let possible = |nic: &&mut Nic| nic.hca.pci.as_ref().is_some_and(is_possible);
    let mut nics = nics.iter_mut().filter(possible).peekable();
    let by_uuid = match nics.peek() {
        Some(_) => read(host)?,
        None => return Ok(()),
    };
    for nic in nics.filter(|_| !by_uuid.is_empty()) {
        let uuid = uuid_of(&host.pci(nic.place.address)?)?;
        let function = uuid.and_then(|uuid| by_uuid.get(&uuid));
        nic.place.data_direct = function.cloned().map(Box::new);
    }
    Ok(())
}

/// The places of these functions, by UUID. A function whose UUID cannot be read is left out: only
/// root reads vital product data.
fn read(host: &Host) -> Result<BTreeMap<String, PciLocation>> {
    let mut places = BTreeMap::new();
    for (address, directory) in pci::directories(host)? {
        let id = |name| host::hexadecimal(&directory, name);
        if id("device")? != Some(u32::from(DMA_FUNCTION))
            || id("vendor")? != Some(u32::from(MELLANOX))
        {
            continue;
        }
        if let Some(uuid) = uuid_of(&directory)? {
            places.insert(uuid, PciLocation::of(&pci::read_at(&directory, address)?));
        }
    }
    Ok(places)
}

/// The UUID in a function's vital product data; `None` if it has none, or this process may not
/// read it.
fn uuid_of(directory: &Path) -> Result<Option<String>> {
    Ok(pci::vital_product_data(directory)?
        .as_deref()
        .and_then(uuid))
}

/// The value of keyword `V3` in the read-only section.
fn uuid(data: &[u8]) -> Option<String> {
    let mut rest = data;
    loop {
        let (tag, item) = match *rest {
            [tag, low, high, ref tail @ ..] if tag & LARGE != 0 => (
                tag,
                tail.split_at_checked(usize::from(u16::from_le_bytes([low, high])))?,
            ),
            [END, ..] => return None,
            [tag, ref tail @ ..] => (tag, tail.split_at_checked(usize::from(tag & 0x07))?),
            [] => return None,
        };
        if tag == READ_ONLY {
            return keyword(item.0, *b"V3");
        }
        rest = item.1;
    }
}

/// The text of one keyword: two letters, a length, the value.
fn keyword(section: &[u8], wanted: [u8; 2]) -> Option<String> {
    let mut rest = section;
    while let [first, second, length, tail @ ..] = rest {
        let (value, next) = tail.split_at_checked(usize::from(*length))?;
        if [*first, *second] == wanted {
            let text = std::str::from_utf8(value).ok()?;
            let text = text.trim_matches(['\0', ' ']);
            return (!text.is_empty()).then(|| text.to_owned());
        }
        rest = next;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn section(tag: u8, content: &[u8]) -> Vec<u8> {
        let length = u16::try_from(content.len()).unwrap().to_le_bytes();
        [&[tag], length.as_slice(), content].concat()
    }

    #[test]
    fn the_uuid_is_the_v3_of_the_read_only_section() {
        let read_only = b"PN\x05C8280SN\x03MT1V3\x06aa-8f7RV\x01\x00";
        let data = |content: &[u8]| {
            [
                section(0x82, b"ConnectX-8"),
                section(READ_ONLY, content),
                vec![END],
            ]
            .concat()
        };
        assert_eq!(uuid(&data(read_only)).as_deref(), Some("aa-8f7"));
        assert_eq!(uuid(&data(b"PN\x02C8")), None, "no such keyword");
        assert_eq!(uuid(&data(b"V3\xf0short")), None, "cut off");
        assert_eq!(
            uuid(&section(0x91, b"V3\x02aa")),
            None,
            "writable: not the vendor's word"
        );
        assert_eq!(uuid(&[]), None);
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_panic(data: Vec<u8>) {
            let _ = uuid(&data);
        }
    }
}
