//! Claims, one step at a time: what each leaves to others, and when it withdraws.

use super::orders::{begun, order_of};
use super::*;

/// The rival's entry has the same name as this claim's, and a third has linked a claim of the
/// same address that it will withdraw.
#[test]
fn a_claim_that_is_lost_leaves_the_holders_entry_alone() {
    let begun = begun();
    let rival = holder("rival");
    let want = want(&begun.range, &rival);
    let lost = "10.0.0.1".parse().unwrap();
    begun.store.allocate_this(&want, 0, lost).unwrap();
    begun.shard.create("10.0.0.1@7", b"{}", false).unwrap();
    let taken = begun.store.claim(&begun.intent, &begun.claims).unwrap();
    assert_eq!(taken, [false, true, true]);
    let held = begun.store.held("rival", "net1").unwrap();
    assert_eq!(held.len(), 1, "the rival lost its address");
}

#[test]
fn claims_in_two_shards_are_compared_with_both() {
    let place = tempfile::tempdir().unwrap();
    let (store, holder) = (open(place.path(), "n1"), holder("c1"));
    let range = range("10.0.0.0/23");
    let leases = order_of(&holder, &range, &["10.0.0.1", "10.0.1.1", "10.0.0.2"]);
    let shards = ["10.0.0.0-24", "10.0.1.0-24"]
        .map(|shard| store.make_below(&["leases", "default", shard]).unwrap());
    shards[1].create("10.0.1.1@7", b"{}", false).unwrap();
    let intent = store.intend(&Record::of(leases.clone()).unwrap(), 0);
    let of_shard = leases.into_iter().zip([0, 1, 0]);
    let claims: Vec<PlacedLease> = of_shard
        .map(|(lease, shard)| PlacedLease {
            lease,
            shard: Rc::clone(&shards[shard]),
        })
        .collect();
    let taken = store.claim(&intent.unwrap(), &claims).unwrap();
    assert_eq!(taken, [true, false, true]);
    assert_eq!(names(&shards[1]), ["10.0.1.1@7"], "two hold 10.0.1.1");
}

/// Somebody removed it by hand: the address is free to all.
#[test]
fn an_add_whose_lease_entry_is_gone_answers_nothing() {
    let begun = begun();
    for claim in &begun.claims {
        assert!(begun.store.link_entry(&begun.intent, claim).unwrap());
    }
    begun.shard.unlink("10.0.0.2@1").unwrap();
    let answer = begun
        .store
        .confirm(&begun.intent, &begun.claims, vec![true; 3]);
    assert!(
        matches!(answer, Err(StoreError::Overtaken { .. })),
        "{answer:?}"
    );
    begun.store.give_back("c1", "net1", "rail0").unwrap();
    begun.nothing_is_left();
}

/// It lost its address, and DEL removed the record below: nothing would ever lead to it.
#[test]
fn a_further_record_without_an_address_goes_when_the_one_below_is_gone() {
    let begun = begun();
    begun.shard.create("10.0.0.2@7", b"{}", false).unwrap();
    begun.store.claim(&begun.intent, &begun.claims).unwrap();
    let below = begun.store.owned("c1", "net1").unwrap().remove(0);
    let leases = order_of(&begun.holder, &begun.range, &["10.0.0.9"]);
    begun.shard.create("10.0.0.9@1", b"{}", false).unwrap();
    let further = begun.store.intend(&record(&leases[0]), 1).unwrap();
    assert!(below.dir.unlink(&below.name).unwrap());
    let claims = claims(&leases[0], &begun.shard);
    let answer = begun.store.claim(&further, &claims);
    assert!(
        matches!(answer, Err(StoreError::Overtaken { .. })),
        "{answer:?}"
    );
    assert!(below.dir.names().unwrap().is_empty());
}

#[test]
fn a_lease_removes_the_freed_entries_of_its_address_and_no_others() {
    let place = tempfile::tempdir().unwrap();
    let (store, holder) = (open(place.path(), "n1"), holder("c1"));
    let shard = store
        .make_below(&["leases", "default", "10.0.0.0-24"])
        .unwrap();
    let others = ["10.0.0.1+0a0b0c0d~1.5", "10.0.0.2~1.5"];
    for name in ["10.0.0.1~1.5", "10.0.0.1~2.7"].iter().chain(&others) {
        shard.create(name, b"{}", false).unwrap();
    }
    let (range, address) = (range("10.0.0.0/24"), "10.0.0.1".parse().unwrap());
    let want = want(&range, &holder);
    store.allocate_this(&want, 0, address).unwrap();
    let mut names = shard.names().unwrap();
    names.sort();
    assert_eq!(names, [others[0], "10.0.0.1@3", others[1]]);
}

#[test]
fn the_largest_record_that_is_read_is_written() {
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path(), "n1");
    let of = |path: usize| {
        let mut lease = crate::lease::tests::lease("10.0.0.5", "10.0.0.0/24");
        lease.holder.node = "n1".into();
        lease.holder.netns = Some("/".repeat(path));
        record(&lease)
    };
    let most = usize::try_from(lease::MAX_BYTES).unwrap();
    let path = most - of(0).encode().len();
    let refused = store.intend(&of(path + 1), 0);
    assert!(
        matches!(&refused, Err(StoreError::Oversize { bytes, .. }) if *bytes == most + 1),
        "{refused:?}"
    );
    let lease = of(path).leases()[0].clone();
    store.intend(&of(path), 0).unwrap();
    let read = store
        .owned(&lease.holder.container, &lease.holder.interface)
        .unwrap();
    assert_eq!(read[0].leases()[0].holder, lease.holder);
}

/// A shard of another file system: a link to it fails by another error than that of a record
/// that is gone.
fn claims_of_which_one_fails(begun: &super::orders::Begun) -> [PlacedLease; 2] {
    let elsewhere = Rc::new(Dir::open_path(Path::new("/sys")).unwrap());
    let claim = |n: usize, shard: &Rc<Dir>| PlacedLease {
        lease: begun.claims[n].lease.clone(),
        shard: Rc::clone(shard),
    };
    [claim(0, &begun.shard), claim(1, &elsewhere)]
}

#[test]
fn an_add_that_cannot_link_says_why_and_leaves_what_it_did_to_del() {
    let begun = begun();
    let claims = claims_of_which_one_fails(&begun);
    let failed = begun.store.claim(&begun.intent, &claims);
    assert!(matches!(failed, Err(StoreError::Dir(_))), "{failed:?}");
    assert_eq!(begun.held(), ["10.0.0.1"]);
    begun.store.give_back("c1", "net1", "rail0").unwrap();
    begun.nothing_is_left();
}

#[test]
fn an_add_that_cannot_link_and_was_overtaken_withdraws() {
    let begun = begun();
    let claims = claims_of_which_one_fails(&begun);
    let owned = begun.store.owned("c1", "net1").unwrap().remove(0);
    assert!(begun.store.link_entry(&begun.intent, &claims[0]).unwrap());
    assert!(owned.dir.unlink(&owned.name).unwrap());
    let failed = begun.store.claim(&begun.intent, &claims);
    assert!(
        matches!(failed, Err(StoreError::Overtaken { .. })),
        "{failed:?}"
    );
    begun.nothing_is_left();
}

#[test]
fn a_lease_and_a_freed_address_say_since_when() {
    let place = tempfile::tempdir().unwrap();
    let (store, holder) = (open(place.path(), "n1"), holder("c1"));
    let range = range("10.0.0.0/24");
    let before = now();
    let lease = store.allocate(&want(&range, &holder), 0).unwrap();
    let created = u64::try_from(lease.created.as_millisecond()).unwrap();
    let leased = now();
    store.give_back("c1", "net1", "rail0").unwrap();
    let shard = store.shard_of(&lease).unwrap().unwrap();
    let name = shard.names().unwrap().remove(0);
    let freed = name::LeaseName::parse(&name).unwrap().freed.unwrap();
    assert!(before > 1_700_000_000_000, "this machine's clock");
    assert!((before..=leased).contains(&created), "{created}");
    assert!((leased..=now()).contains(&freed), "{freed}");
}
