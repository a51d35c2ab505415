//! A search at its limits: many collisions, the end of a range.

use super::*;

/// A store, and an address that another ADD leased after this one chose it.
fn overtaken(place: &Path) -> (Store, Candidate) {
    let store = open(place, "n1");
    let range = range("10.0.0.0/24");
    let faster = holder("faster");
    let address = "10.0.0.9".parse().unwrap();
    store
        .allocate_this(&want(&range, &faster), address)
        .unwrap();
    let candidate = Candidate {
        address: bits(address),
        generation: 1,
        other_class: None,
    };
    (store, candidate)
}

fn why(error: StoreError) -> String {
    match error {
        StoreError::Exhausted { why, .. } => why,
        other => panic!("{other}"),
    }
}

#[test]
fn an_add_that_was_overtaken_does_not_ask_for_the_lowest_address_again() {
    let place = tempfile::tempdir().unwrap();
    let (store, candidate) = overtaken(place.path());
    let (range, holder) = (range("10.0.0.0/24"), holder("slower"));
    let want = want(&range, &holder);
    let mut search = search(&store, &want);
    let free: Vec<Candidate> = (1..=100)
        .map(|last| Candidate {
            address: candidate.address + last,
            ..candidate
        })
        .collect();
    assert_eq!(search.pick(&free), free.first().copied());
    let number = name::shard_number(candidate.address);
    let taken = search.take(None, number, candidate, false).unwrap();
    assert!(taken.is_none());
    assert_eq!(search.collisions, 1);
    // A hundred times the lowest of a hundred by chance: never.
    let picked: HashSet<u128> = (0..100)
        .map(|_| search.pick(&free).unwrap().address)
        .collect();
    assert!(picked.len() > 1, "all writers would meet again");
    search.finish(Err(search_over())).unwrap_err();
}

#[test]
fn a_range_that_is_full_after_a_collision_is_exhausted() {
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path(), "n1");
    let range = range("10.0.0.0/30");
    for container in ["one", "two"] {
        let holder = holder(container);
        store.allocate(&want(&range, &holder)).unwrap();
    }
    let late = holder("late");
    let want = want(&range, &late);
    let mut search = search(&store, &want);
    search.collisions = 1;
    let error = search.run().unwrap_err();
    let why = why(error);
    assert!(why.starts_with("all 2 addresses between"), "{why}");
}

#[test]
fn an_add_that_never_stops_to_be_overtaken_says_so() {
    let place = tempfile::tempdir().unwrap();
    let (store, candidate) = overtaken(place.path());
    let (range, holder) = (range("10.0.0.0/24"), holder("slower"));
    let want = want(&range, &holder);
    let mut search = search(&store, &want);
    let number = name::shard_number(candidate.address);
    search.collisions = MAX_COLLISIONS - 1;
    let taken = search.take(None, number, candidate, false).unwrap();
    assert!(taken.is_none(), "it goes on");
    let all_leased = why(search.exhausted());
    assert!(all_leased.starts_with("all 254 addresses"), "{all_leased}");
    let error = search.take(None, number, candidate, false).unwrap_err();
    let overtaken = why(error);
    assert!(
        overtaken.starts_with("another ADD was faster"),
        "{overtaken}"
    );
    search.finish(Err(search_over())).unwrap_err();
    assert!(store.owned("slower", "net1").unwrap().is_empty());
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
