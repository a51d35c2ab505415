//! Which GPU gets which NIC of a given set: a minimum-cost assignment.
//!
//! The best assignment has the least worst class, then the least sum of classes, then leaves the
//! NICs nearest to any GPU over, then keeps rail numbers near GPU numbers. The worst class is
//! found by trying classes from the nearest up; the rest are one cost each, added with weights
//! wide enough that no sum of the lesser reaches one of the greater.

use super::distance::Class;

/// What one GPU–NIC pair costs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Edge {
    /// Its class.
    pub(super) class: Class,
    /// Distance from the NIC to the nearest of all GPUs asked for: what is saved if the NIC
    /// serves a GPU and is not a surplus.
    pub(super) nearest: Class,
    /// Difference between rail number and GPU number.
    pub(super) mismatch: u32,
}

impl Edge {
    /// Sums of up to a thousand pairs stay apart: 20 bits each.
    fn cost(self) -> i64 {
        let class = i64::from(self.class.rank()) << 40;
        let kept = i64::from(Class::Sys.rank() - self.nearest.rank().min(Class::Sys.rank())) << 20;
        class + kept + i64::from(self.mismatch.min(1_000))
    }
}

/// More than any assignment costs.
const NEVER: i64 = 1 << 52;

/// Gives each row (GPU) a column (NIC) of its own; `columns` is at least the number of rows.
/// Returns the column of each row.
pub(super) fn assign(rows: &[Vec<Edge>]) -> Vec<usize> {
    let mut classes: Vec<Class> = rows.iter().flatten().map(|edge| edge.class).collect();
    classes.sort_unstable();
    classes.dedup();
    let mut best = Vec::new();
    for limit in classes {
        let costs: Vec<Vec<i64>> = rows
            .iter()
            .map(|row| {
                row.iter()
                    .map(|e| if e.class <= limit { e.cost() } else { NEVER })
                    .collect()
            })
            .collect();
        best = hungarian(&costs);
        let possible = best
            .iter()
            .zip(rows)
            .all(|(column, row)| row.get(*column).is_some_and(|edge| edge.class <= limit));
        if possible {
            break;
        }
    }
    best
}

/// The Hungarian method with potentials, O(rows² · columns) (Kuhn 1955; Jonker and Volgenant
/// 1987). Rows and columns are numbered from 1 inside, 0 standing for "none".
fn hungarian(costs: &[Vec<i64>]) -> Vec<usize> {
    let columns = costs.first().map_or(0, Vec::len);
    let at = |vector: &[i64], index: usize| vector.get(index).copied().unwrap_or_default();
    let mut row_potential = vec![0_i64; costs.len() + 1];
    let mut column_potential = vec![0_i64; columns + 1];
    let mut row_of = vec![0_usize; columns + 1];
    for row in 1..=costs.len() {
        set(&mut row_of, 0, row);
        let mut slack = vec![i64::MAX; columns + 1];
        let mut before = vec![0_usize; columns + 1];
        let mut used = vec![false; columns + 1];
        let mut column = 0;
        loop {
            set(&mut used, column, true);
            let here = row_of.get(column).copied().unwrap_or_default();
            if here == 0 {
                break;
            }
            let mut delta = i64::MAX;
            let mut next = 0;
            for j in 1..=columns {
                if used.get(j).copied().unwrap_or(true) {
                    continue;
                }
                let cost = costs.get(here - 1).map_or(NEVER, |row| at(row, j - 1));
                let reduced = cost - at(&row_potential, here) - at(&column_potential, j);
                if reduced < at(&slack, j) {
                    set(&mut slack, j, reduced);
                    set(&mut before, j, column);
                }
                if at(&slack, j) < delta {
                    delta = at(&slack, j);
                    next = j;
                }
            }
            if next == 0 {
                break;
            }
            for j in 0..=columns {
                if used.get(j).copied().unwrap_or(true) {
                    let owner = row_of.get(j).copied().unwrap_or_default();
                    add(&mut row_potential, owner, delta);
                    add(&mut column_potential, j, -delta);
                } else {
                    add(&mut slack, j, -delta);
                }
            }
            column = next;
        }
        while column != 0 {
            let previous = before.get(column).copied().unwrap_or_default();
            let owner = row_of.get(previous).copied().unwrap_or_default();
            set(&mut row_of, column, owner);
            column = previous;
        }
    }
    let mut assigned = vec![0; costs.len()];
    for (column, row) in row_of.iter().enumerate().skip(1) {
        if let Some(slot) = row.checked_sub(1).and_then(|row| assigned.get_mut(row)) {
            *slot = column - 1;
        }
    }
    assigned
}

fn set<T>(vector: &mut [T], index: usize, value: T) {
    if let Some(slot) = vector.get_mut(index) {
        *slot = value;
    }
}

fn add(vector: &mut [i64], index: usize, value: i64) {
    if let Some(slot) = vector.get_mut(index) {
        *slot = slot.saturating_add(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The least sum over all ways to give rows distinct columns.
    fn brute_force(costs: &[Vec<i64>], used: u32) -> i64 {
        let Some((row, rest)) = costs.split_first() else {
            return 0;
        };
        row.iter()
            .enumerate()
            .filter(|(column, _)| used & (1 << column) == 0)
            .map(|(column, cost)| cost + brute_force(rest, used | 1 << column))
            .min()
            .unwrap()
    }

    proptest! {
        #[test]
        fn no_other_assignment_is_cheaper(
            costs in (1_usize..6, 0_usize..3).prop_flat_map(|(rows, more)| {
                prop::collection::vec(prop::collection::vec(0_i64..50, rows + more), rows)
            })
        ) {
            let columns = hungarian(&costs);
            let mut distinct = columns.clone();
            distinct.sort_unstable();
            distinct.dedup();
            prop_assert_eq!(distinct.len(), costs.len(), "{:?}", columns);
            let sum: i64 = columns.iter().zip(&costs).map(|(column, row)| row[*column]).sum();
            prop_assert_eq!(sum, brute_force(&costs, 0));
        }
    }

    #[test]
    fn the_worst_class_counts_before_the_sum() {
        let edge = |class| Edge {
            class,
            nearest: Class::Pix,
            mismatch: 0,
        };
        // PIX + SYS is 7, PHB + PHB is 6, NODE + PIX is 5 but its worst is NODE.
        let rows = [
            vec![edge(Class::Pix), edge(Class::Phb)],
            vec![edge(Class::Phb), edge(Class::Node)],
        ];
        assert_eq!(assign(&rows), [1, 0]);
    }

    #[test]
    fn no_rows_is_nothing_to_assign() {
        assert!(assign(&[]).is_empty());
    }
}
