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
        best = cheapest(&costs);
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

/// The columns whose costs have the least sum. Row after row takes the cheapest way to a free column; on
/// it lie columns whose owners go one column further (successive shortest paths, by Bellman and Ford).
fn cheapest(costs: &[Vec<i64>]) -> Vec<usize> {
    let columns = costs.first().map_or(0, Vec::len);
    let mut owners: Vec<Option<usize>> = vec![None; columns];
    for (row, own) in costs.iter().enumerate() {
        // To each column its cost, and the column whose owner goes there; none for this row itself.
        let mut ways: Vec<(i64, Option<usize>)> = own.iter().map(|cost| (*cost, None)).collect();
        for taken in (0..columns).flat_map(|_| 0..columns) {
            let owner = owners.get(taken).copied().flatten();
            let Some((owner, way)) = owner.and_then(|row| costs.get(row)).zip(ways.get(taken))
            else {
                continue;
            };
            let freed = way.0 - owner.get(taken).copied().unwrap_or_default();
            for (way, cost) in ways.iter_mut().zip(owner) {
                if freed + cost < way.0 {
                    *way = (freed + cost, Some(taken));
                }
            }
        }
        let free = owners.iter().zip(&ways).enumerate();
        let free = free.filter(|(_, (owner, _))| owner.is_none());
        let Some((mut column, _)) = free.min_by_key(|(_, (_, (cost, _)))| *cost) else {
            break;
        };
        while let Some((_, Some(from))) = ways.get(column) {
            owners.swap(column, *from);
            column = *from;
        }
        if let Some(owner) = owners.get_mut(column) {
            *owner = Some(row);
        }
    }
    let column_of = |row| owners.iter().position(|owner| *owner == Some(row));
    (0..costs.len()).filter_map(column_of).collect()
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
            let columns = cheapest(&costs);
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
