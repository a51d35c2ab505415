//! Nodes that are gone: only who is short of addresses looks. Their parts are marked, and after a grace period
//! taken, if they are gone still; a node that is there takes the mark away.

use std::collections::BTreeSet;
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
        let is_over = |part: &Part| part.over.is_some() && part.network.is_none();
        let marked = document.parts.iter().filter(|(_, part)| is_over(part));
        let marked: Vec<(IpNetwork, Part)> =
            marked.map(|(piece, part)| (*piece, part.clone())).collect();
        let key = |piece: IpNetwork, part: &Part| (piece, part.id.clone());
        self.marks.retain(|(piece, id), _| {
            !piece::is_piece(document.subnet, *piece)
                || marked
                    .iter()
                    .any(|(other, part)| key(*other, part) == (*piece, id.clone()))
        });
        for (piece, part) in marked {
            let since = *self.marks.entry(key(piece, &part)).or_insert(now);
            let is_ripe = now.saturating_duration_since(since) >= self.context.grace;
            let is_other = part.node != self.context.node.name;
            // Once more, just before.
            if is_ripe
                && is_other
                && range.size_within(piece) > 0
                && self.gone(&part.node, Duration::ZERO, now)?.is_some()
            {
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
