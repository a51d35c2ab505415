//! Values that can never match, with the spelling that can: both peers compare text, so `0x15b3`
//! or `IB` selects nothing there, without a message.

use hca::{LinkLayer, PciAddress};

use crate::candidate;

/// What is wrong with PCI vendor and device IDs, link types, PCI addresses and drivers.
pub(super) fn warnings<'w>(
    ids: impl Iterator<Item = &'w String>,
    link_types: &'w [String],
    addresses: &'w [String],
    drivers: &'w [String],
) -> impl Iterator<Item = String> {
    let ids = ids.filter_map(|word| pci_id(word));
    let link_types = link_types.iter().filter_map(|word| link_type(word));
    let addresses = addresses.iter().filter_map(|word| pci_address(word));
    let drivers = drivers.iter().filter_map(|word| driver(word));
    ids.chain(link_types).chain(addresses).chain(drivers)
}

/// What is wrong with a PCI vendor or device ID, if anything is.
fn pci_id(word: &str) -> Option<String> {
    let is_id = |text: &str| {
        text.len() == 4
            && text
                .bytes()
                .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    };
    if is_id(word) {
        return None;
    }
    let lower = word.trim().to_ascii_lowercase();
    let digits = lower.strip_prefix("0x").unwrap_or(&lower);
    Some(if is_id(digits) {
        format!("{word:?} matches no HCA; write {digits:?}")
    } else {
        format!("{word:?} matches no HCA; write four lower-case hex digits, as \"15b3\"")
    })
}

/// What is wrong with a link type, if anything is.
fn link_type(word: &str) -> Option<String> {
    let words = [LinkLayer::Ethernet, LinkLayer::InfiniBand].map(candidate::link_type);
    if words.contains(&word) {
        return None;
    }
    let meant = match word.trim().to_ascii_lowercase().as_str() {
        "ib" | "infiniband" | "ipoib" => Some(LinkLayer::InfiniBand),
        "eth" | "ether" | "ethernet" | "roce" | "rocev2" => Some(LinkLayer::Ethernet),
        _ => None,
    };
    Some(match meant {
        Some(meant) => format!(
            "link type {word:?} matches no HCA; write {:?}",
            candidate::link_type(meant)
        ),
        None => format!(
            "link type {word:?} matches no HCA; the words are {}",
            words.join(" and ")
        ),
    })
}

/// What is wrong with a PCI address, if anything is.
fn pci_address(word: &str) -> Option<String> {
    let canonical = |text: &str| {
        let address: PciAddress = text.parse().ok()?;
        Some(address.to_string())
    };
    if canonical(word).as_deref() == Some(word) {
        return None;
    }
    let lower = word.trim().to_ascii_lowercase();
    let meant = canonical(&lower).or_else(|| canonical(&format!("0000:{lower}")));
    Some(match meant {
        Some(meant) => format!("PCI address {word:?} matches no HCA; write {meant:?}"),
        None => format!(
            "PCI address {word:?} matches no HCA; write domain, bus, device and function, as \
             \"0000:3b:00.0\""
        ),
    })
}

/// What is wrong with the name of a PCI driver, if anything is.
pub(super) fn driver(word: &str) -> Option<String> {
    let word = word.trim();
    let of_module = candidate::RDMA_HALVES
        .iter()
        .filter(|(driver, module, _)| *module == word && *driver != word);
    let drivers: Vec<String> = of_module
        .map(|(driver, ..)| format!("{driver:?}"))
        .collect();
    (!drivers.is_empty()).then(|| {
        format!(
            "driver {word:?} matches no HCA: it is a module on top of the PCI driver; write {}",
            drivers.join(" or ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_can_never_match_is_named_with_the_right_spelling() {
        let cases: [(Option<String>, &str); 12] = [
            (pci_id("0x15b3"), "write \"15b3\""),
            (pci_id("15B3"), "write \"15b3\""),
            (pci_id("mellanox"), "four lower-case hex digits"),
            (link_type("IB"), "write \"infiniband\""),
            (link_type("Ethernet"), "write \"ether\""),
            (link_type("hdr"), "the words are"),
            (pci_address("3B:00.1"), "write \"0000:3b:00.1\""),
            (pci_address("mlx5_0"), "domain, bus"),
            (driver("mlx5_ib"), "write \"mlx5_core\""),
            (driver("bnxt_re"), "write \"bnxt_en\""),
            (driver("ionic_rdma"), "write \"ionic\""),
            (driver("irdma"), "write \"ice\" or \"i40e\" or \"idpf\""),
        ];
        for (said, expected) in cases {
            let said = said.unwrap_or_default();
            assert!(said.contains(expected), "{expected}: {said}");
        }
    }

    #[test]
    fn a_value_that_can_match_is_left_alone() {
        assert_eq!(pci_id("101e"), None);
        assert_eq!(driver("mlx5_core"), None);
        assert_eq!(driver("efa"), None);
        assert_eq!(link_type("ether"), None);
        assert_eq!(link_type("infiniband"), None);
        assert_eq!(pci_address("0000:3b:00.2"), None);
    }
}
