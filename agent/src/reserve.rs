//! Addresses that are reserved while a range moves from another program to this one, decided on plain
//! data.
//!
//! *Hold* reserves what is free of a range, so that no node claims it while the other program still
//! leases there. *Import* makes reserved parts of that program's leases. *Unhold* frees what hold
//! reserved, and leaves the leases. An address whose lease ends while the range is held is held again.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipam::range::{bits, from_bits};
use ipam::subnet::{Change, Document, Part, piece};
use ipnetwork::IpNetwork;

/// The text of a part that is held.
pub const HELD: &str = "held by rdmactl addresses hold";
/// Behind the text of a lease, while the range is held.
const HELD_TOO: &str = " (held)";
/// With what the texts of leases begin.
pub const WHEREABOUTS: &str = "whereabouts: ";
pub const HOST_LOCAL: &str = "host-local: ";
/// A text in a document is no longer.
const MAX_TEXT_BYTES: usize = 256;

/// What an administrator wants of the reserved addresses of a range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reservation {
    Hold,
    Unhold,
    Import(Import),
}

/// Another program's leases of one subnet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Import {
    /// With what the texts of its parts begin, as `whereabouts: `.
    pub source: String,
    /// Who has which address, as `ml/worker-0`.
    pub leases: BTreeMap<IpAddr, String>,
    /// Addresses without a lease that nobody uses any more, and who had them.
    pub over: BTreeSet<(IpAddr, String)>,
}

/// What follows for a document.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// To be made of the document, in this order.
    pub changes: Vec<Change>,
    /// Addresses that are held, or reserved for leases of the source, newly and no longer.
    pub added: u64,
    pub removed: u64,
    /// Addresses that are reserved for leases of the source afterwards.
    pub left: u64,
    /// Those of them without a lease, and who had it.
    pub stale: Vec<(IpAddr, String)>,
    /// Leases that cannot be reserved, and why.
    pub refused: Vec<(IpAddr, String)>,
}

/// Whether a reserved part is held.
#[must_use]
pub fn is_held(text: &str) -> bool {
    text == HELD || text.ends_with(HELD_TOO)
}

fn is_lease(text: &str) -> bool {
    text.starts_with(WHEREABOUTS) || text.starts_with(HOST_LOCAL)
}

impl Reservation {
    /// Whether an address whose part has this text is one of those that are counted.
    fn counts(&self, text: Option<&str>) -> bool {
        text.is_some_and(|text| match self {
            Self::Hold | Self::Unhold => is_held(text),
            Self::Import(import) => text.starts_with(&import.source),
        })
    }
}

impl Import {
    /// The text of a lease's part. Who has it is not known of one that is too long.
    fn text(&self, lease: &str) -> String {
        let lease = match self.source.len() + lease.len() + HELD_TOO.len() {
            0..=MAX_TEXT_BYTES => lease,
            _ => "?",
        };
        format!("{}{lease}", self.source)
    }
}

/// Decides about the addresses of a network in one document.
#[must_use]
pub fn decide(document: &Document, network: IpNetwork, reservation: &Reservation) -> Outcome {
    let mut outcome = Outcome::default();
    let mut next = BTreeMap::new();
    for address in addresses(network) {
        let mut parts = document.parts.iter();
        let part = parts.find(|(piece, _)| piece.contains(address));
        let before = part.and_then(|(_, part)| part.reserved.clone());
        let after = match (reservation, part, &before) {
            (Reservation::Import(import), ..) => {
                outcome.import(import, address, part, before.as_deref())
            }
            (Reservation::Hold, None, _) => Some(HELD.to_owned()),
            (Reservation::Hold, _, Some(text)) if is_lease(text) && !is_held(text) => {
                Some(format!("{text}{HELD_TOO}"))
            }
            (Reservation::Unhold, _, Some(text)) if text == HELD => None,
            (Reservation::Unhold, _, Some(text)) => {
                Some(text.strip_suffix(HELD_TOO).unwrap_or(text).to_owned())
            }
            _ => before.clone(),
        };
        if after != before {
            let (was, is) = (
                reservation.counts(before.as_deref()),
                reservation.counts(after.as_deref()),
            );
            outcome.added += u64::from(is && !was);
            outcome.removed += u64::from(was && !is);
            next.insert(address, after);
        }
    }
    outcome.changes = rewrite(document, next);
    outcome
}

impl Outcome {
    /// What the text of an address' reserved part becomes.
    fn import(
        &mut self,
        import: &Import,
        address: IpAddr,
        part: Option<(&IpNetwork, &Part)>,
        before: Option<&str>,
    ) -> Option<String> {
        let lease = import.leases.get(&address);
        let (Some((piece, part)), lease) = (part, lease) else {
            self.left += u64::from(lease.is_some());
            return lease.map(|lease| import.text(lease));
        };
        let held = if before.is_some_and(is_held) {
            HELD_TOO
        } else {
            ""
        };
        let lease_before = before.and_then(|text| text.strip_prefix(&import.source));
        let is_ours = before == Some(HELD) || lease_before.is_some();
        match (lease, lease_before) {
            (Some(lease), _) if !is_ours => {
                let whose = match &part.reserved {
                    Some(text) => format!("reserved: {text}"),
                    None => format!("a part of node {}, which may have leased it", part.node),
                };
                let why = format!(
                    "{}{lease} has it, and it is in {piece}, {whose}: let that lease end",
                    import.source
                );
                self.refused.push((address, why));
            }
            (Some(lease), _) => {
                self.left += 1;
                // Also one that another pod has now.
                return Some(import.text(lease) + held);
            }
            (None, Some(lease)) => {
                let stale = (
                    address,
                    lease.strip_suffix(HELD_TOO).unwrap_or(lease).to_owned(),
                );
                if import.over.contains(&stale) {
                    return (!held.is_empty()).then(|| HELD.to_owned());
                }
                self.left += 1;
                self.stale.push(stale);
            }
            (None, None) => {}
        }
        before.map(str::to_owned)
    }
}

/// The changes by which addresses have other texts, or none. Other addresses of their parts keep theirs.
fn rewrite(document: &Document, mut next: BTreeMap<IpAddr, Option<String>>) -> Vec<Change> {
    let mut changes = Vec::new();
    for (piece, part) in &document.parts {
        if part.reserved.is_some() && next.keys().any(|address| piece.contains(*address)) {
            for address in addresses(*piece) {
                next.entry(address).or_insert_with(|| part.reserved.clone());
            }
            let (piece, part) = (*piece, part.clone());
            changes.push(Change::Unreserve { piece, part });
        }
    }
    let texts: BTreeSet<String> = next.values().flatten().cloned().collect();
    for text in texts {
        let has_it = |address: IpAddr| {
            next.get(&address)
                .is_some_and(|of| of.as_ref() == Some(&text))
        };
        let pieces = piece::cover(document.subnet, &has_it).into_iter();
        changes.extend(pieces.map(|piece| {
            let reserved = Some(text.clone());
            let part = Part {
                reserved,
                ..Part::default()
            };
            Change::Reserve { piece, part }
        }));
    }
    changes
}

/// All addresses of a network in one subnet.
fn addresses(network: IpNetwork) -> impl Iterator<Item = IpAddr> {
    let v4 = network.is_ipv4();
    (bits(network.network())..=bits(network.broadcast())).map(move |bits| from_bits(v4, bits))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipam::subnet::change;

    const SUBNET: &str = "10.0.0.0/24";

    fn net(text: &str) -> IpNetwork {
        text.parse().unwrap()
    }

    fn import(leases: &[(&str, &str)], over: &[(&str, &str)]) -> Reservation {
        let pair = |(address, pod): &(&str, &str)| (address.parse().unwrap(), (*pod).to_owned());
        Reservation::Import(Import {
            source: WHEREABOUTS.to_owned(),
            leases: leases.iter().map(pair).collect(),
            over: over.iter().map(pair).collect(),
        })
    }

    fn apply(document: &mut Document, network: &str, reservation: &Reservation) -> Outcome {
        let outcome = decide(document, net(network), reservation);
        for one in &outcome.changes {
            if let Some(next) = change(document, one).unwrap().document {
                *document = next;
            }
        }
        assert!(document.in_doubt().is_empty(), "{document:?}");
        let again = decide(document, net(network), reservation);
        assert_eq!(again.changes, [], "it is done once");
        outcome
    }

    fn document(parts: &[(&str, &str)]) -> Document {
        let mut document = Document::empty("default", "", net(SUBNET));
        for (piece, owner) in parts {
            let part = match owner.strip_prefix("node ") {
                Some(node) => Part {
                    node: node.to_owned(),
                    id: Some("a-1".to_owned()),
                    ..Part::default()
                },
                None => Part {
                    reserved: Some((*owner).to_owned()),
                    ..Part::default()
                },
            };
            document.parts.insert(net(piece), part);
        }
        document
    }

    fn counts(outcome: &Outcome) -> (u64, u64, u64) {
        (outcome.added, outcome.removed, outcome.left)
    }

    #[test]
    fn a_range_is_held_its_leases_are_imported_and_the_rest_is_freed() {
        let before = document(&[
            ("10.0.0.64/26", "node a"),
            ("10.0.0.255/32", "for the router"),
        ]);
        let mut held = before.clone();
        let outcome = apply(&mut held, SUBNET, &Reservation::Hold);
        assert_eq!(counts(&outcome), (256 - 64 - 1, 0, 0));
        assert!(
            net(SUBNET)
                .iter()
                .all(|address| held.parts.keys().any(|part| part.contains(address)))
        );
        let leases = [
            ("10.0.0.5", "ml/a"),
            ("10.0.0.6", "ml/b"),
            ("10.0.0.200", "ml/a"),
        ];
        let outcome = apply(&mut held, SUBNET, &import(&leases, &[]));
        assert_eq!(counts(&outcome), (3, 0, 3));
        let outcome = apply(&mut held, SUBNET, &Reservation::Unhold);
        assert_eq!(counts(&outcome), (0, 256 - 64 - 1, 0));
        let after = document(&[
            ("10.0.0.5/32", "whereabouts: ml/a"),
            ("10.0.0.6/32", "whereabouts: ml/b"),
            ("10.0.0.64/26", "node a"),
            ("10.0.0.200/32", "whereabouts: ml/a"),
            ("10.0.0.255/32", "for the router"),
        ]);
        assert_eq!(held, after);
        // Without leases it is as it was.
        let over = leases.map(|(address, pod)| (address, pod));
        let outcome = apply(&mut held, SUBNET, &import(&[], &over));
        assert_eq!(counts(&outcome), (0, 3, 0));
        assert_eq!(held, before);
    }

    #[test]
    fn a_lease_that_ends_stays_reserved_while_its_pod_is_there() {
        let mut document = document(&[]);
        apply(
            &mut document,
            SUBNET,
            &import(&[("10.0.0.5", "ml/a"), ("10.0.0.7", "ml/b")], &[]),
        );
        let outcome = apply(&mut document, SUBNET, &import(&[("10.0.0.7", "ml/b")], &[]));
        assert_eq!(counts(&outcome), (0, 0, 2));
        let stale = ("10.0.0.5".parse().unwrap(), "ml/a".to_owned());
        assert_eq!(outcome.stale, [stale]);
        // Another pod that had it is not meant.
        let others = import(&[("10.0.0.7", "ml/b")], &[("10.0.0.5", "ml/c")]);
        assert_eq!(counts(&apply(&mut document, SUBNET, &others)), (0, 0, 2));
        let gone = import(&[("10.0.0.7", "ml/b")], &[("10.0.0.5", "ml/a")]);
        assert_eq!(counts(&apply(&mut document, SUBNET, &gone)), (0, 1, 1));
        assert!(!document.parts.contains_key(&net("10.0.0.5/32")));
        // Its address has a next lease.
        apply(
            &mut document,
            SUBNET,
            &import(&[("10.0.0.7", "ml/next")], &[]),
        );
        let text = document.parts[&net("10.0.0.7/32")].reserved.as_deref();
        assert_eq!(text, Some("whereabouts: ml/next"));
    }

    #[test]
    fn a_lease_that_ends_while_the_range_is_held_is_held_again() {
        let mut document = document(&[("10.0.0.128/25", "node a")]);
        let all: Vec<String> = (0..128).map(|last| format!("10.0.0.{last}")).collect();
        let all: Vec<(&str, &str)> = all
            .iter()
            .map(|address| (address.as_str(), "ml/a"))
            .collect();
        apply(&mut document, SUBNET, &import(&all, &[]));
        let outcome = apply(&mut document, SUBNET, &Reservation::Hold);
        assert_eq!(counts(&outcome), (128, 0, 0), "also what is leased");
        let outcome = apply(&mut document, SUBNET, &import(&all[..127], &all[127..]));
        assert_eq!(counts(&outcome), (0, 1, 127));
        let held = document.parts[&net("10.0.0.127/32")].reserved.as_deref();
        assert_eq!(held, Some(HELD));
        apply(&mut document, SUBNET, &Reservation::Unhold);
        assert!(!document.parts.contains_key(&net("10.0.0.127/32")));
        let kept = document
            .parts
            .values()
            .filter_map(|part| part.reserved.as_deref());
        assert!(kept.into_iter().all(|text| text == "whereabouts: ml/a"));
    }

    #[test]
    fn what_another_has_is_reported_by_its_address_and_stays() {
        let before = document(&[
            ("10.0.0.0/28", "node gpu-17"),
            ("10.0.0.16/28", "for the router"),
            ("10.0.0.32/32", "host-local: gpu-18/rail1/0123"),
        ]);
        let mut after = before.clone();
        let leases = [
            ("10.0.0.3", "ml/a"),
            ("10.0.0.17", "ml/b"),
            ("10.0.0.32", "ml/c"),
        ];
        let outcome = apply(&mut after, SUBNET, &import(&leases, &[]));
        assert_eq!(after, before);
        let reasons: Vec<String> = outcome
            .refused
            .iter()
            .map(|(at, why)| format!("{at}: {why}"))
            .collect();
        assert_eq!(reasons.len(), 3);
        for (reason, says) in reasons
            .iter()
            .zip(["node gpu-17", "for the router", "gpu-18/rail1"])
        {
            assert!(reason.contains(says), "{reason}");
        }
        assert!(
            reasons[0].starts_with("10.0.0.3: whereabouts: ml/a has it"),
            "{reasons:?}"
        );
        // Nor does a hold or its end touch it.
        apply(&mut after, SUBNET, &Reservation::Hold);
        apply(&mut after, SUBNET, &Reservation::Unhold);
        assert_eq!(after, before);
    }

    #[test]
    fn a_part_of_a_held_range_is_freed_alone() {
        let mut document = document(&[]);
        apply(&mut document, SUBNET, &Reservation::Hold);
        let outcome = apply(&mut document, "10.0.0.0/26", &Reservation::Unhold);
        assert_eq!(counts(&outcome), (0, 64, 0));
        let parts: Vec<String> = document.parts.keys().map(ToString::to_string).collect();
        assert_eq!(parts, ["10.0.0.64/26", "10.0.0.128/25"]);
    }

    #[test]
    fn the_pod_of_a_text_that_is_too_long_is_not_known() {
        let mut document = document(&[]);
        let pod = format!("ml/{}", "x".repeat(253));
        let leases = import(&[("10.0.0.5", &pod)], &[]);
        apply(&mut document, SUBNET, &Reservation::Hold);
        apply(&mut document, SUBNET, &leases);
        let outcome = apply(&mut document, SUBNET, &import(&[], &[]));
        assert_eq!(outcome.stale[0].1, "?");
        let longest = document
            .parts
            .values()
            .filter_map(|part| part.reserved.as_ref());
        assert!(longest.into_iter().all(|text| text.len() <= MAX_TEXT_BYTES));
    }

    #[test]
    fn an_ipv6_range_is_held_and_freed() {
        let mut document = Document::empty("default", "", net("fd00::/120"));
        apply(&mut document, "fd00::/120", &Reservation::Hold);
        let outcome = apply(
            &mut document,
            "fd00::/120",
            &import(&[("fd00::5", "ml/a")], &[]),
        );
        assert_eq!(counts(&outcome), (1, 0, 1));
        apply(&mut document, "fd00::/120", &Reservation::Unhold);
        let parts: Vec<String> = document.parts.keys().map(ToString::to_string).collect();
        assert_eq!(parts, ["fd00::5/128"]);
    }
}
