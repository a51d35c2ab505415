//! NCCL topology files (`NCCL_TOPO_FILE`): a cloud's description of its machine.
//!
//! Vendors ship them for virtual machines, whose own PCI tree says nothing. The nesting of
//! `system`, `cpu` and `pci` elements is the tree; each `pci` element with children is one
//! switch. The file's other content (links, NVLink, net devices) does not matter here.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::Path;

use anyhow::{anyhow, ensure};
use hca::PciAddress;
use hca::topology::PciLocation;

/// The largest file read: the largest known describe a few hundred devices.
const MOST_BYTES: u64 = 4 << 20;

/// Reads the places of all devices out of a file.
///
/// # Errors
/// The path and the cause, with line and remedy.
pub fn read(file: &Path) -> anyhow::Result<BTreeMap<PciAddress, PciLocation>> {
    let read = || {
        let mut text = String::new();
        let opened = std::fs::File::open(file)?;
        opened.take(MOST_BYTES).read_to_string(&mut text)?;
        places(&text)
    };
    read().map_err(|cause| anyhow!("read the NCCL topology file {}: {cause}", file.display()))
}

fn places(text: &str) -> anyhow::Result<BTreeMap<PciAddress, PciLocation>> {
    let document = roxmltree::Document::parse(text).map_err(|error| anyhow!("not XML: {error}"))?;
    let system = document.root_element();
    let top = system.tag_name().name();
    ensure!(
        top == "system",
        "the top element is {top:?}, expected \"system\" as in a file that NCCL_TOPO_DUMP_FILE writes"
    );
    let mut places = BTreeMap::new();
    for (number, cpu) in children(system, "cpu").enumerate() {
        let numa = numa(cpu)?;
        let root = format!("cpu{number}");
        for pci in children(cpu, "pci") {
            descend(pci, &root, numa, &[], &mut places)?;
        }
    }
    ensure!(
        !places.is_empty(),
        "no pci element: the file describes no device"
    );
    Ok(places)
}

/// Adds a device, or a switch with what is below it. `above` are the bridges so far: the upstream
/// port of each switch and the downstream port that leads on. The file has one element for a
/// switch; its downstream ports are distinguished by what hangs below them, which gives them their
/// names.
fn descend(
    pci: roxmltree::Node<'_, '_>,
    root: &str,
    numa: Option<u32>,
    above: &[PciAddress],
    places: &mut BTreeMap<PciAddress, PciLocation>,
) -> anyhow::Result<()> {
    let address = address(pci)?;
    let mut chain = above.to_vec();
    if !above.is_empty() {
        chain.push(address);
    }
    chain.push(address);
    let mut below = children(pci, "pci").peekable();
    if below.peek().is_none() {
        let place = PciLocation {
            address,
            root: Some(root.to_owned()),
            chain,
            numa,
            data_direct: None,
        };
        let twice = places.insert(address, place).is_some();
        ensure!(
            !twice,
            "line {}: {address} is in this file twice",
            line(pci)
        );
        return Ok(());
    }
    below.try_for_each(|child| descend(child, root, numa, &chain, places))
}

fn children<'a, 'input>(
    node: roxmltree::Node<'a, 'input>,
    name: &'static str,
) -> impl Iterator<Item = roxmltree::Node<'a, 'input>> {
    node.children()
        .filter(move |child| child.has_tag_name(name))
}

/// `numaid`; -1 says that the node is not known.
fn numa(cpu: roxmltree::Node<'_, '_>) -> anyhow::Result<Option<u32>> {
    let value = cpu.attribute("numaid").unwrap_or_default();
    let known = value.parse().ok();
    ensure!(
        known.is_some() || value == "-1",
        "line {}: cpu has numaid={value:?}, expected the number of a NUMA node",
        line(cpu)
    );
    Ok(known)
}

fn address(pci: roxmltree::Node<'_, '_>) -> anyhow::Result<PciAddress> {
    let value = pci.attribute("busid").unwrap_or_default();
    value.parse().map_err(|_| {
        anyhow!(
            "line {}: pci has busid={value:?}, expected a PCI address such as 0000:3b:00.0",
            line(pci)
        )
    })
}

fn line(node: roxmltree::Node<'_, '_>) -> u32 {
    node.document().text_pos_at(node.range().start).row
}

#[cfg(test)]
mod tests {
    use super::*;
    use hca::topology::{Class, Numa, distance};

    fn class(places: &BTreeMap<PciAddress, PciLocation>, a: &str, b: &str) -> Class {
        let at = |text: &str| &places[&text.parse::<PciAddress>().unwrap()];
        distance::distance(at(a), at(b), &Numa::default()).class
    }

    /// The shape of the file that goes with a VM of eight GPU–NIC pairs on two sockets.
    fn pairs() -> String {
        let pair = |n: usize| {
            let (gpu, nic) = (n + 1, 0x101 + n);
            format!(
                "<pci busid='ffff:ff:{:02x}.0' class='0x060400' link_speed='32.0 GT/s PCIe' \
                 link_width='16'><pci busid='{gpu:04x}:00:00.0' class='0x030200'/>\
                 <pci busid='{nic:04x}:00:00.0' class='0x020700'/></pci>\n",
                n + 1
            )
        };
        let cpu = |id: usize| {
            let pairs: String = (id * 4..id * 4 + 4).map(pair).collect();
            format!("<cpu numaid='{id}' affinity='ffff' arch='x86_64'>\n{pairs}</cpu>\n")
        };
        format!("<system version='1'>\n{}{}</system>", cpu(0), cpu(1))
    }

    #[test]
    fn what_shares_a_switch_is_pix() {
        let places = places(&pairs()).unwrap();
        assert_eq!(places.len(), 16);
        assert_eq!(class(&places, "0001:00:00.0", "0101:00:00.0"), Class::Pix);
        assert_eq!(class(&places, "0001:00:00.0", "0102:00:00.0"), Class::Phb);
        assert_eq!(class(&places, "0004:00:00.0", "0105:00:00.0"), Class::Sys);
        assert_eq!(class(&places, "0008:00:00.0", "0108:00:00.0"), Class::Pix);
    }

    #[test]
    fn each_nested_element_is_one_switch() {
        let text = "<system><cpu numaid='0'>
            <pci busid='0000:01:00.0'>
              <pci busid='0000:02:00.0'/>
              <pci busid='0000:03:00.0'><pci busid='0000:04:00.0'/><pci busid='0000:05:00.0'/></pci>
              <pci busid='0000:06:00.0'><pci busid='0000:07:00.0'/></pci>
            </pci>
            <pci busid='0000:08:00.0'/>
          </cpu></system>";
        let places = places(text).unwrap();
        assert_eq!(class(&places, "0000:04:00.0", "0000:05:00.0"), Class::Pix);
        assert_eq!(class(&places, "0000:02:00.0", "0000:04:00.0"), Class::Pxb);
        assert_eq!(class(&places, "0000:04:00.0", "0000:07:00.0"), Class::Pxb);
        assert_eq!(class(&places, "0000:04:00.0", "0000:08:00.0"), Class::Phb);
    }

    #[test]
    fn a_file_that_is_something_else_is_refused_with_its_line() {
        for (text, expected) in [
            ("{}", "not XML: "),
            ("<html/>", "the top element is \"html\""),
            ("<system/>", "no pci element"),
            (
                "<system>\n<cpu/></system>",
                "line 2: cpu has numaid=\"\", expected the number",
            ),
            (
                "<system><cpu numaid='x'/></system>",
                "line 1: cpu has numaid=\"x\"",
            ),
            (
                "<system>\n<cpu numaid='0'>\n<pci busid='8f:00'/></cpu></system>",
                "line 3: pci has busid=\"8f:00\", expected a PCI address such as 0000:3b:00.0",
            ),
            (
                "<system><cpu numaid='0'><pci busid='0000:01:00.0'/>\n<pci busid='0000:01:00.0'/>\
                 </cpu></system>",
                "line 2: 0000:01:00.0 is in this file twice",
            ),
        ] {
            let error = places(text).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{text}: {error}");
        }
    }

    #[test]
    fn an_unknown_numa_node_stays_unknown() {
        let text = "<system><cpu numaid='-1'><pci busid='0000:01:00.0'/></cpu></system>";
        let places = places(text).unwrap();
        assert!(places.values().all(|place| place.numa.is_none()));
    }

    #[test]
    fn entities_are_not_expanded_from_outside() {
        let bomb = "<!DOCTYPE system [<!ENTITY a 'x'><!ENTITY b '&a;&a;'>]><system>&b;</system>";
        let error = places(bomb).unwrap_err().to_string();
        assert!(error.starts_with("not XML: "), "{error}");
    }
}
