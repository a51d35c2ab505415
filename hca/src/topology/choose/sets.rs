//! Sets of a number of NICs, interchangeable ones counted once.

/// Sets tried one by one before the search becomes a guided one: a tenth of a second's work.
pub(super) const MOST_SETS: u64 = 20_000;

/// Interchangeable NICs, in the order they are taken.
#[derive(Debug, Default)]
pub(super) struct Group {
    /// Whether it need not be taken, and the NIC.
    pub(super) nics: Vec<(bool, usize)>,
    /// How many of them have to be taken.
    pub(super) forced: usize,
}

/// How many sets of `count` NICs there are, up to a little more than [`MOST_SETS`].
pub(super) fn number_of_sets(groups: &[Group], count: usize) -> u64 {
    let mut ways = vec![0_u64; count + 1];
    if let Some(none) = ways.first_mut() {
        *none = 1;
    }
    for group in groups {
        let mut next = vec![0_u64; count + 1];
        for (taken, so_far) in ways.iter().enumerate().filter(|(_, n)| **n > 0) {
            for more in group.forced..=group.nics.len().min(count - taken) {
                if let Some(slot) = next.get_mut(taken + more) {
                    *slot = slot.saturating_add(*so_far).min(MOST_SETS + 1);
                }
            }
        }
        ways = next;
    }
    ways.last().copied().unwrap_or_default()
}

/// Calls `visit` with each set of `count` NICs.
pub(super) fn each_set(
    groups: &[Group],
    count: usize,
    set: &mut Vec<usize>,
    visit: &mut dyn FnMut(&[usize]),
) {
    let Some((group, rest)) = groups.split_first() else {
        if set.len() == count {
            visit(set);
        }
        return;
    };
    let before = set.len();
    let possible: usize = rest.iter().map(|group| group.nics.len()).sum();
    for taken in group.forced..=group.nics.len().min(count - before) {
        if before + taken + possible < count {
            continue;
        }
        set.extend(group.nics.iter().take(taken).map(|(_, nic)| *nic));
        each_set(rest, count, set, visit);
        set.truncate(before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_sets_is_counted_without_making_them() {
        let group = |size, forced| Group {
            nics: vec![(false, 0); size],
            forced,
        };
        let single: Vec<Group> = (0..8).map(|_| group(1, 0)).collect();
        assert_eq!(number_of_sets(&single, 4), 70);
        let many: Vec<Group> = (0..64).map(|_| group(1, 0)).collect();
        assert_eq!(number_of_sets(&many, 32), MOST_SETS + 1);
        assert_eq!(number_of_sets(&[group(3, 1), group(1, 0)], 2), 2);
        let mut sets = 0;
        each_set(&single, 4, &mut Vec::new(), &mut |_| sets += 1);
        assert_eq!(sets, 70);
    }
}
