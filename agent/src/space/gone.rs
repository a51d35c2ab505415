//! Nodes that are gone: only who is short of addresses looks. Their parts are marked, and after a grace period
//! taken, if they are gone still; a node that is there takes the mark away.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use ipam::range::Range;
use ipam::subnet::{Change, Document, Over, Part, piece};
use ipnetwork::IpNetwork;
use node_wire::Failure;

use super::{Fault, Space};
use crate::decide::Candidate;

/// How many nodes are asked for at once whether they are gone.
const MAX_NODES: usize = 16;
/// How long an answer to that is believed.
const NODE_REST: Duration = Duration::from_mins(1);

impl Space {
    /// Those whose nodes are there. The parts of the others are marked, to be taken later.
    pub(super) fn without_gone(
        &mut self,
        candidates: Vec<Candidate>,
        now: Instant,
    ) -> Vec<Candidate> {
        let mut asked = BTreeSet::new();
        let mut there = Vec::new();
        for one in candidates {
            let is_asked = asked.contains(&one.node) || asked.len() < MAX_NODES;
            asked.insert(one.node.clone());
            // A node of which nothing is known is asked.
            let gone = match is_asked {
                true => self.gone(&one.node, NODE_REST, now).unwrap_or(None),
                false => None,
            };
            let is_marked = gone.is_some_and(|why| self.mark(&one, why).is_ok());
            if !is_marked {
                there.push(one);
            }
        }
        there
    }

    fn mark(&mut self, one: &Candidate, why: String) -> Result<(), Failure> {
        let over = Over {
            since: jiff::Timestamp::now().to_string(),
            why,
        };
        self.edit(one.subnet, |document| {
            let part = document.parts.get(&one.part);
            let part = part.filter(|part| part.node == one.node);
            let change = part.map(|part| Change::Over {
                part: one.part,
                id: part.id.clone(),
                over: over.clone(),
            });
            Ok(change.into_iter().collect())
        })
    }

    /// Why a node is gone, by an answer that is not older than this.
    fn gone(
        &mut self,
        node: &str,
        believed: Duration,
        now: Instant,
    ) -> Result<Option<String>, Fault> {
        self.nodes
            .retain(|_, (at, _)| now.saturating_duration_since(*at) < NODE_REST);
        let known = self.nodes.get(node);
        let known = known.filter(|(at, _)| now.saturating_duration_since(*at) < believed);
        if let Some((_, gone)) = known {
            return Ok(gone.clone());
        }
        let gone = self.call(|backend| backend.gone(node))?;
        self.nodes.insert(node.to_owned(), (now, gone.clone()));
        Ok(gone)
    }

    /// A part of a node that is gone, which is marked for long enough and has room.
    pub(super) fn part_to_take(
        &mut self,
        document: &Document,
        range: &Range,
        now: Instant,
    ) -> Result<Option<Change>, Fault> {
        for (piece, part) in self.marks.ripe(document, range, self.context.grace, now) {
            let is_other = part.node != self.context.node.name;
            // Once more, just before.
            if is_other && self.gone(&part.node, Duration::ZERO, now)?.is_some() {
                let id = self.ids.new_id();
                return Ok(Some(Change::Take {
                    part: piece,
                    id: part.id,
                    by: self.holder(&id),
                }));
            }
        }
        Ok(None)
    }
}

/// When each mark of a part was seen first.
#[derive(Debug, Default)]
pub(super) struct Marks(BTreeMap<(IpNetwork, Option<String>), Instant>);

impl Marks {
    /// Notes the marks of a document; returns the parts of a range that have been marked for long enough.
    fn ripe(
        &mut self,
        document: &Document,
        range: &Range,
        grace: Duration,
        now: Instant,
    ) -> Vec<(IpNetwork, Part)> {
        let marked = document.parts.iter();
        let marked = marked.filter(|(_, part)| part.over.is_some() && part.network.is_none());
        let marked: BTreeMap<_, _> = marked
            .map(|(piece, part)| ((*piece, part.id.clone()), part))
            .collect();
        self.0
            .retain(|key, _| !piece::is_piece(document.subnet, key.0) || marked.contains_key(key));
        let mut ripe = Vec::new();
        for (key, part) in marked {
            let piece = key.0;
            let since = *self.0.entry(key).or_insert(now);
            if now.saturating_duration_since(since) >= grace && range.size_within(piece) > 0 {
                ripe.push((piece, part.clone()));
            }
        }
        ripe
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipam::range::Spec;
    use ipam::subnet::OwnNetwork;
    use node::policy::Profile;

    fn document(subnet: &str, parts: &[(&str, &str, bool)]) -> Document {
        let mut document = Document::empty("s", "", subnet.parse().unwrap());
        for (piece, id, is_marked) in parts {
            let over = is_marked.then(|| Over {
                since: "then".into(),
                why: "node gone".into(),
            });
            let part = Part {
                node: "gone".into(),
                id: Some((*id).into()),
                over,
                ..Part::default()
            };
            document.parts.insert(piece.parse().unwrap(), part);
        }
        document
    }

    #[test]
    fn a_mark_counts_from_when_it_was_seen_and_only_while_it_stands() {
        let spec = Spec {
            range: "10.0.0.0/25",
            ..Spec::default()
        };
        let range = Range::new(&spec, Profile::Strict).unwrap();
        let (grace, begun) = (Duration::from_mins(5), Instant::now());
        let (early, late) = (begun + grace / 2, begun + grace);
        let mut marks = Marks::default();
        let mut ripe = |document: &Document, at| {
            let ripe = marks.ripe(document, &range, grace, at).into_iter();
            let pieces = ripe.map(|(piece, _)| piece.to_string());
            pieces.collect::<Vec<String>>()
        };
        let marked = document(
            "10.0.0.0/24",
            &[
                ("10.0.0.0/30", "a-1", true),
                ("10.0.0.8/30", "a-2", true),
                ("10.0.0.16/30", "a-3", false),
                // Outside of the range.
                ("10.0.0.128/30", "a-4", true),
            ],
        );
        assert!(ripe(&marked, begun).is_empty());
        // One mark is taken away and comes back; one part has another owner, which is gone, too.
        let meanwhile = document(
            "10.0.0.0/24",
            &[("10.0.0.0/30", "a-1", false), ("10.0.0.8/30", "b-1", true)],
        );
        assert!(ripe(&meanwhile, early).is_empty());
        assert!(ripe(&marked, late).is_empty());
        // Documents of other subnets say nothing of it.
        assert!(ripe(&document("10.0.1.0/24", &[]), late).is_empty());
        assert_eq!(ripe(&marked, late + grace), ["10.0.0.0/30", "10.0.0.8/30"]);
        let mut network = marked;
        for part in network.parts.values_mut() {
            part.network = Some(OwnNetwork::default());
        }
        assert!(ripe(&network, late + grace).is_empty());
    }
}
