//! A search at its limits: many collisions, the end of a range.

use super::*;

fn why(error: StoreError) -> String {
    match error {
        StoreError::Exhausted { why, .. } => why,
        other => panic!("{other}"),
    }
}

fn search<'a>(store: &'a Store, range: &'a Range, holder: &'a Holder) -> Search<'a> {
    Search::new(store, want(range, holder), Goal::Lowest, 0)
}

#[test]
fn an_overtaken_add_asks_for_another_address() {
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path(), "n1");
    let (range, holder) = (range("10.0.0.0/24"), holder("slower"));
    let mut search = search(&store, &range, &holder);
    let first = bits("10.0.0.9".parse().unwrap());
    let free: Vec<Candidate> = (0..100)
        .map(|last| Candidate {
            address: first + last,
            generation: 1,
            other_class: None,
        })
        .collect();
    assert_eq!(search.pick(&free), free.first().copied());
    search.collided().unwrap();
    // A hundred times the lowest of a hundred by chance: never.
    let picked: HashSet<u128> = (0..100)
        .map(|_| search.pick(&free).unwrap().address)
        .collect();
    assert!(picked.len() > 1, "all writers would meet again");
}

#[test]
fn a_range_that_is_full_after_a_collision_is_exhausted() {
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path(), "n1");
    let range = range("10.0.0.0/30");
    for container in ["one", "two"] {
        let holder = holder(container);
        store.allocate(&want(&range, &holder), 0).unwrap();
    }
    let late = holder("late");
    let mut search = search(&store, &range, &late);
    search.collided().unwrap();
    let Err(error) = search.propose(&Proposed::default()) else {
        panic!("both addresses are leased")
    };
    let why = why(error);
    assert!(why.starts_with("all 2 addresses between"), "{why}");
}

#[test]
fn an_add_that_never_stops_to_be_overtaken_says_so() {
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path(), "n1");
    let (range, holder) = (range("10.0.0.0/24"), holder("slower"));
    let mut search = search(&store, &range, &holder);
    for _ in 0..MAX_COLLISIONS {
        search.collided().expect("it goes on");
    }
    let overtaken = why(search.collided().unwrap_err());
    assert!(
        overtaken.starts_with("another ADD was faster"),
        "{overtaken}"
    );
}

#[test]
fn a_range_that_ends_with_a_shard_reads_no_shard_beyond() {
    for (text, shards) in [
        ("10.0.0.0/24", 1),
        ("10.0.0.0-10.0.0.255/16", 1),
        ("fd00::1-fd00::1ff/64", 2),
    ] {
        let (range, holder) = (range(text), holder("c1"));
        assert_eq!(want(&range, &holder).shards().count(), shards, "{text}");
    }
}
