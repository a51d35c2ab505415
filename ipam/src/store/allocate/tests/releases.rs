//! DEL on what it may find: nothing, half a record, or what is not its own.

use super::orders::{begun, order_of};
use super::*;

/// A store, the directory of the owner's records, and the name of the first.
fn owner(place: &Path) -> (Store, Rc<Dir>, String) {
    let store = open(place, "n1");
    let (bucket, record) = name::owner("c1", "net1", 0);
    let owners = store.make_below(&["owners", "n1", &bucket]).unwrap();
    (store, owners, record)
}

/// The machine crashed before the record was on the disk: which addresses it has is not known.
#[test]
fn del_keeps_an_empty_record_that_has_an_address_and_names_it() {
    let place = tempfile::tempdir().unwrap();
    let (store, owners, record) = owner(place.path());
    let shard = store
        .make_below(&["leases", "default", "10.0.0.0-24"])
        .unwrap();
    owners.create(&record, b"", false).unwrap();
    assert!(owners.link(&record, &shard, "10.0.0.1@1").unwrap());
    let (freed, strange) = store.give_back("c1", "net1", "rail0").unwrap();
    assert_eq!(freed, []);
    assert_eq!(strange, ["c1:net1:0: the record is empty"]);
    assert_eq!(owners.names().unwrap(), [record]);
    assert_eq!(shard.names().unwrap(), ["10.0.0.1@1"]);
}

#[test]
fn del_frees_what_its_network_has() {
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path(), "n1");
    let range = range("10.0.0.0/24");
    let holder = holder("c1");
    for (network, count) in [("rail1", 0), ("rail0", 1)] {
        if store.held("c1", "net1").unwrap().is_empty() {
            store.allocate(&want(&range, &holder), 0).unwrap();
        }
        let (freed, _) = store.give_back("c1", "net1", network).unwrap();
        assert_eq!(freed.len(), count, "{network}");
        assert_eq!(store.held("c1", "net1").unwrap().len(), 1 - count);
    }
}

/// It listed the records; another DEL and the runtime's next ADD came and went, and that one
/// has a further record.
#[test]
fn a_del_that_sleeps_frees_no_record_of_the_next_add() {
    let begun = begun();
    let store = &begun.store;
    store.claim(&begun.intent, &begun.claims).unwrap();
    let listed = store.owned("c1", "net1").unwrap();
    store.give_back("c1", "net1", "rail0").unwrap();
    let next = ["10.0.0.7", "10.0.0.8"];
    for (index, lease) in (0..).zip(order_of(&begun.holder, &begun.range, &next)) {
        let intent = store.intend(&record(&lease), index).unwrap();
        let taken = store.claim(&intent, &claims(&lease, &begun.shard));
        assert_eq!(taken.unwrap(), [true]);
    }
    let (freed, _) = store.give_back_listed(&listed, "rail0").unwrap();
    assert_eq!(freed, []);
    assert_eq!(begun.held(), next);
    store.give_back("c1", "net1", "rail0").unwrap();
    begun.nothing_is_left();
}

/// Else the numbers would have a gap, and no DEL would find what stayed.
#[test]
fn a_record_below_one_that_cannot_be_released_stays() {
    let place = tempfile::tempdir().unwrap();
    let holder = holder("c1");
    for (index, text) in ["10.0.0.0/24", "10.0.1.0/24"].into_iter().enumerate() {
        let range = range(text);
        open(place.path(), "n1")
            .allocate(&want(&range, &holder), index)
            .unwrap();
    }
    let shard = place.path().join("store/leases/default/10.0.1.0-24");
    let aside = place.path().join("store/leases/aside");
    std::fs::rename(&shard, &aside).unwrap();
    std::os::unix::fs::symlink(&aside, &shard).unwrap();
    let give_back = || open(place.path(), "n1").give_back("c1", "net1", "rail0");
    give_back().unwrap_err();
    std::fs::remove_file(&shard).unwrap();
    std::fs::rename(&aside, &shard).unwrap();
    let (freed, _) = give_back().unwrap();
    assert_eq!(freed.len(), 1);
    assert_eq!(open(place.path(), "n1").held("c1", "net1").unwrap(), []);
}
