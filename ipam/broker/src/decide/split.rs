//! When a cell that is split into single addresses can be a block again.
//!
//! A single address may be granted only while the cell around it is split; otherwise two nodes could
//! give one address. Nothing in the API compares two objects in one step, so it takes an order:
//!
//! - Who claims a single address first makes its object, then reads the cell's object, and grants the
//!   address if the cell is split and open. A closed cell it opens first.
//! - Who wants the cell back closes it (`over`) when a list has no single address of it. It removes the
//!   cell when a later list has the cell closed and still no single address, on the condition that the
//!   cell's object was not changed since that list.
//!
//! Then no address is granted below a cell that is removed. Its object was either made before that
//! list, which would have it; or later, and then its claimer reads the cell after the list too: closed
//! from there to its removal, and no split cell afterwards unless another claimer splits it anew.
//! The list may be as old as it likes, but must be of one moment.

use std::collections::BTreeSet;

use ipam::block::Blocks;
use ipnetwork::IpNetwork;

use crate::api::document::BlockObject;

/// What to do with a split cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CellStep {
    /// It has no single address: mark it.
    Close,
    /// It was closed, and an address came: take off the mark.
    Open,
    /// It was closed, and no address came: it can be a block.
    Remove,
}

/// The split cells of a list, and whether they have single addresses.
#[derive(Debug, Default)]
pub struct SplitCells {
    cells: Vec<BlockObject>,
    singles: BTreeSet<IpNetwork>,
}

impl SplitCells {
    /// Takes an object of the list into account.
    pub fn note(&mut self, object: &BlockObject) {
        if !object.is_well_named() {
            return;
        }
        let block = object.spec.block;
        if object.spec.split {
            self.cells.push(object.clone());
        } else if block == ipam::block::single(block.network()) {
            self.singles.insert(block);
        }
    }

    /// What to do with the cells, once the list is at its end.
    pub fn steps(&self) -> impl Iterator<Item = (&BlockObject, CellStep)> {
        self.cells.iter().filter_map(|cell| {
            let step = match (cell.spec.over.is_some(), self.has_single(cell.spec.block)) {
                (false, false) => CellStep::Close,
                (true, true) => CellStep::Open,
                (true, false) => CellStep::Remove,
                (false, true) => return None,
            };
            Some((cell, step))
        })
    }

    /// Addresses of `blocks`' range that nobody has by themselves, in split cells: at most `most` of each
    /// cell, from a drawn place on.
    pub fn free_singles<'s>(
        &'s self,
        blocks: &'s Blocks,
        most: usize,
        mut random: impl FnMut() -> u64 + 's,
    ) -> impl Iterator<Item = IpNetwork> + 's {
        let is_block = |cell: IpNetwork| blocks.around(cell.network()) == Some(cell);
        let cells = self.cells.iter().map(|cell| cell.spec.block);
        let cells = cells.filter(move |cell| is_block(*cell));
        cells.flat_map(move |cell| {
            let singles = ipam::block::addresses_from(cell, random());
            let singles = singles.map(ipam::block::single);
            singles
                .filter(|single| !self.singles.contains(single))
                .filter(move |single| blocks.around(single.network()) == Some(cell))
                .take(most)
        })
    }

    fn has_single(&self, cell: IpNetwork) -> bool {
        let first = ipam::block::single(cell.network());
        let last = ipam::block::single(cell.broadcast());
        self.singles.range(first..=last).next().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::document::{NodeId, Over};
    use ipam::block::AddressSpace;
    use jiff::Timestamp;

    fn steps(cells: &[(&str, bool)], singles: &[&str]) -> Vec<(String, CellStep)> {
        let space = AddressSpace::new("default", None);
        let now = Timestamp::UNIX_EPOCH;
        let node = NodeId {
            name: "n1".into(),
            uid: "u1".into(),
        };
        let mut noted = SplitCells::default();
        for single in singles {
            let single = single.parse().unwrap();
            noted.note(&BlockObject::new(&space, single, &node, 1, now));
        }
        for (cell, closed) in cells {
            let mut cell = BlockObject::split(&space, cell.parse().unwrap(), now);
            cell.spec.over = closed.then(|| Over {
                since: now,
                by: "n1".into(),
                why: "empty".into(),
                administrator: false,
            });
            noted.note(&cell);
        }
        noted
            .steps()
            .map(|(cell, step)| (cell.spec.block.to_string(), step))
            .collect()
    }

    #[test]
    fn a_cell_is_removed_only_if_it_was_closed_and_stayed_empty() {
        let cell = "10.0.0.16/28";
        let step = |step| vec![(cell.to_owned(), step)];
        assert_eq!(steps(&[(cell, false)], &[]), step(CellStep::Close));
        assert_eq!(steps(&[(cell, true)], &[]), step(CellStep::Remove));
        assert_eq!(
            steps(&[(cell, true)], &["10.0.0.31/32"]),
            step(CellStep::Open)
        );
        assert_eq!(steps(&[(cell, false)], &["10.0.0.16/32"]), []);
    }

    #[test]
    fn free_single_addresses_are_those_of_split_cells_that_nobody_has() {
        let space = AddressSpace::new("default", None);
        let now = Timestamp::UNIX_EPOCH;
        let node = NodeId {
            name: "n1".into(),
            uid: "u1".into(),
        };
        let mut noted = SplitCells::default();
        for cell in ["10.0.0.16/28", "10.9.0.0/28"] {
            noted.note(&BlockObject::split(&space, cell.parse().unwrap(), now));
        }
        for last in 16..30 {
            let single = format!("10.0.0.{last}/32").parse().unwrap();
            noted.note(&BlockObject::new(&space, single, &node, 1, now));
        }
        let first = 0x0a00_0000;
        let span = ipam::range::Span {
            first,
            last: first + 255,
        };
        let length = node::policy::BlockLength::default();
        let blocks = Blocks::of_spans(true, &[span], length, &[]);
        for random in [0, 7, u64::MAX] {
            let free: BTreeSet<String> = noted
                .free_singles(&blocks, 4, || random)
                .map(|single| single.to_string())
                .collect();
            assert_eq!(
                free,
                BTreeSet::from(["10.0.0.30/32".to_owned(), "10.0.0.31/32".to_owned()])
            );
        }
    }

    #[test]
    fn neighbours_of_a_cell_do_not_count() {
        let cell = "fd00::40/122";
        let step = steps(
            &[(cell, true)],
            &["fd00::3f/128", "fd00::80/128", "10.0.0.1/32"],
        );
        assert_eq!(step, [(cell.to_owned(), CellStep::Remove)]);
        // A block of another length is not a single address.
        let step = steps(&[(cell, true)], &["fd00::40/127"]);
        assert_eq!(step, [(cell.to_owned(), CellStep::Remove)]);
    }
}
