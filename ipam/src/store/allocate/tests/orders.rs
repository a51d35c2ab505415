//! Orders of several addresses: one record that meets other ADDs, a DEL, fsck and an
//! administrator between any two of its steps.

use super::*;

/// Leases of one order at these addresses, each by number 1.
pub(super) fn order_of(holder: &Holder, range: &Range, addresses: &[&str]) -> Vec<Lease> {
    let want = want(range, holder);
    let candidate = |address: &&str| Candidate {
        address: bits(address.parse().unwrap()),
        generation: 1,
        other_class: None,
    };
    let candidates = addresses.iter().map(candidate);
    (0..)
        .zip(candidates)
        .map(|(part, candidate)| want.lease(candidate, false, part))
        .collect()
}

/// A store and an order of three that is about to be linked.
pub(super) struct Begun {
    _place: tempfile::TempDir,
    pub(super) store: Store,
    pub(super) holder: Holder,
    pub(super) range: Range,
    pub(super) shard: Rc<Dir>,
    pub(super) claims: Vec<PlacedLease>,
    pub(super) intent: Intent,
}

const THREE: [&str; 3] = ["10.0.0.1", "10.0.0.2", "10.0.0.3"];

pub(super) fn begun() -> Begun {
    let place = tempfile::tempdir().unwrap();
    let (store, holder, range) = (open(place.path(), "n1"), holder("c1"), range("10.0.0.0/24"));
    let shard = store
        .make_below(&["leases", "default", "10.0.0.0-24"])
        .unwrap();
    let leases = order_of(&holder, &range, &THREE);
    let intent = store
        .intend(&Record::of(leases.clone()).unwrap(), 0)
        .unwrap();
    let claims = leases.into_iter().map(|lease| PlacedLease {
        lease,
        shard: Rc::clone(&shard),
    });
    Begun {
        claims: claims.collect(),
        _place: place,
        store,
        holder,
        range,
        shard,
        intent,
    }
}

impl Begun {
    pub(super) fn held(&self) -> Vec<String> {
        let held = self.store.held("c1", "net1").unwrap();
        held.iter().map(|lease| lease.address.to_string()).collect()
    }

    /// No lease entry is held by anybody, and no record is left.
    pub(super) fn nothing_is_left(&self) {
        let names = self.shard.names().unwrap();
        assert!(!names.iter().any(|name| name.contains('@')), "{names:?}");
        assert!(self.store.owned("c1", "net1").unwrap().is_empty());
        let mut records = 0;
        let strange = self.store.records_of("n1", |_| {
            records += 1;
            Ok(())
        });
        assert_eq!((strange.unwrap(), records), (Vec::new(), 0));
    }

    fn search(&self, part: usize) -> Search<'_> {
        Search::new(
            &self.store,
            want(&self.range, &self.holder),
            Goal::Lowest,
            part,
        )
    }

    /// The first record, whose addresses were released: there it is still.
    fn released(&self) -> (Owned, Record, Meta) {
        let first = self.store.owned("c1", "net1").unwrap().remove(0);
        let Content::Record(read, meta) = &first.content else {
            panic!("{first:?}")
        };
        let (read, meta) = (read.clone(), *meta);
        for lease in read.leases() {
            let from_now = CoolDown::FromNow;
            self.store.release_address(lease, &meta, from_now).unwrap();
        }
        (first, read, meta)
    }

    /// What the order has lost is taken by another record.
    fn take_lost(&self, parts: &[usize]) -> Result<Vec<Lease>, Failed> {
        let mut made = Made::of(&self.holder, 1);
        let mut searches: Vec<_> = parts.iter().map(|part| self.search(*part)).collect();
        self.store.allocate_all(&mut searches, &mut made)
    }
}

/// One address is another's already, of another there is a second claim: both are taken anew,
/// and answered again in their places.
#[test]
fn what_an_order_loses_is_in_a_further_record() {
    let begun = begun();
    let rival = holder("rival");
    let want = want(&begun.range, &rival);
    let lost: IpAddr = "10.0.0.1".parse().unwrap();
    begun.store.allocate_this(&want, 0, lost).unwrap();
    begun.shard.create("10.0.0.2@7", b"{}", false).unwrap();
    let taken = begun.store.claim(&begun.intent, &begun.claims).unwrap();
    assert_eq!(taken, [false, false, true]);
    let taken = begun
        .take_lost(&[0, 1])
        .map_err(|failed| failed.error)
        .unwrap();
    let addresses: Vec<String> = taken.iter().map(|l| l.address.to_string()).collect();
    assert_eq!(addresses, ["10.0.0.4", "10.0.0.5"]);
    assert_eq!(begun.store.owned("c1", "net1").unwrap().len(), 2);
    assert_eq!(begun.held(), ["10.0.0.3", "10.0.0.4", "10.0.0.5"]);
    let checkup = begun.store.fsck(true, Duration::ZERO).unwrap();
    let of_order = |problem: &crate::store::Problem| problem.finding.what.contains("c1");
    assert!(!checkup.findings.iter().any(of_order), "{checkup:?}");
    // The order again.
    let part = |interface: Option<&str>| crate::store::Part {
        interface: interface.map(str::to_owned),
        range: begun.range.clone(),
        space: crate::store::Space {
            network_name: None,
            overlapping: true,
        },
        like: None,
        requested: None,
    };
    let order = crate::store::Order {
        holder: begun.holder.clone(),
        profile: Profile::Strict,
        parts: vec![part(None), part(None), part(Some("net1"))],
    };
    let again = begun.store.take(&order).unwrap();
    let addresses: Vec<String> = again.iter().map(|l| l.address.to_string()).collect();
    assert_eq!(addresses, ["10.0.0.4", "10.0.0.5", "10.0.0.3"]);
    begun.store.give_back("c1", "net1", "rail0").unwrap();
    assert_eq!(begun.held(), [""; 0]);
    assert!(begun.store.owned("c1", "net1").unwrap().is_empty());
    let rivals = begun.store.held("rival", "net1").unwrap();
    assert_eq!(rivals[0].address, lost, "the rival lost its address");
}

/// The record names what it lost for as long as it lives: an inode that is used again must
/// never be found there.
#[test]
fn a_name_that_was_withdrawn_is_nobodys_again() {
    let begun = begun();
    begun.shard.create("10.0.0.2@7", b"{}", false).unwrap();
    begun.store.claim(&begun.intent, &begun.claims).unwrap();
    begun.shard.unlink("10.0.0.2@7").unwrap();
    let next = holder("next");
    let next =
        begun
            .store
            .allocate_this(&want(&begun.range, &next), 0, "10.0.0.2".parse().unwrap());
    assert_eq!(next.unwrap().generation, 2);
    begun.store.give_back("c1", "net1", "rail0").unwrap();
    assert_eq!(begun.store.held("next", "net1").unwrap().len(), 1);
}

/// DEL comes when the first record is claimed and the one for what was lost is not made yet.
#[test]
fn a_further_record_is_not_made_above_one_that_is_gone() {
    let begun = begun();
    begun.shard.create("10.0.0.2@7", b"{}", false).unwrap();
    begun.store.claim(&begun.intent, &begun.claims).unwrap();
    begun.store.give_back("c1", "net1", "rail0").unwrap();
    let failed = begun.take_lost(&[1]).map(drop).unwrap_err();
    assert!(matches!(failed.error, StoreError::Overtaken { .. }));
    begun.shard.unlink("10.0.0.2@7").unwrap();
    begun.nothing_is_left();
}

/// The same the other way round: DEL saw no further record, and removes the first one after
/// the further one was claimed.
#[test]
fn a_del_frees_the_further_record_that_was_made_while_it_slept() {
    let begun = begun();
    begun.shard.create("10.0.0.2@7", b"{}", false).unwrap();
    begun.store.claim(&begun.intent, &begun.claims).unwrap();
    let (asleep, read, meta) = begun.released();
    assert!(begun.take_lost(&[1]).is_ok());
    // As it goes on: it had looked for the further record before.
    assert!(asleep.dir.unlink(&asleep.name).unwrap());
    let freed = begun.store.remove_released(&asleep, &read, &meta).unwrap();
    assert_eq!(freed.len(), 1);
    begun.shard.unlink("10.0.0.2@7").unwrap();
    begun.nothing_is_left();
}

/// The same, where the further record is there before DEL removes the first one.
#[test]
fn a_del_frees_the_further_record_that_was_made_after_it_listed() {
    let begun = begun();
    begun.shard.create("10.0.0.2@7", b"{}", false).unwrap();
    begun.store.claim(&begun.intent, &begun.claims).unwrap();
    let listed = begun.store.owned("c1", "net1").unwrap();
    assert!(begun.take_lost(&[1]).is_ok());
    let (freed, _) = begun.store.give_back_listed(&listed, "rail0").unwrap();
    assert_eq!(freed.len(), 3);
    begun.shard.unlink("10.0.0.2@7").unwrap();
    begun.nothing_is_left();
}

#[test]
fn orders_that_meet_part_and_keep_their_answers() {
    const WRITERS: usize = 6;
    let place = tempfile::tempdir().unwrap();
    let range = range("10.0.0.0/26");
    let start = Meeting::of(WRITERS);
    let all = std::sync::Mutex::new(Vec::new());
    let order = |writer: usize| crate::store::Order {
        holder: holder(&format!("c{writer}")),
        profile: Profile::Strict,
        parts: vec![
            crate::store::Part {
                interface: None,
                range: range.clone(),
                space: crate::store::Space {
                    network_name: None,
                    overlapping: true,
                },
                like: None,
                requested: None,
            };
            8
        ],
    };
    for round in 0..5 {
        all.lock().unwrap().clear();
        std::thread::scope(|scope| {
            for writer in 0..WRITERS {
                let (start, all, order, place) = (&start, &all, &order, place.path());
                scope.spawn(move || {
                    let store = open(place, "n1");
                    start.wait(round);
                    let leases = store.take(&order(writer)).unwrap();
                    all.lock().unwrap().push((writer, leases));
                });
            }
        });
        let store = open(place.path(), "n1");
        let taken = all.lock().unwrap();
        let distinct: HashSet<IpAddr> = taken
            .iter()
            .flat_map(|(_, leases)| leases.iter().map(|lease| lease.address))
            .collect();
        assert_eq!(distinct.len(), 8 * WRITERS, "an address was given twice");
        for (writer, leases) in taken.iter() {
            let again = store.take(&order(*writer)).unwrap();
            let [first, again] =
                [leases, &again].map(|leases| leases.iter().map(|l| l.address).collect::<Vec<_>>());
            assert_eq!(first, again, "another answer");
            let container = format!("c{writer}");
            assert_eq!(store.held(&container, "net1").unwrap().len(), 8);
        }
        let checkup = store.fsck(true, Duration::ZERO).unwrap();
        assert_eq!((checkup.sound, checkup.findings), (8 * WRITERS, Vec::new()));
        for (writer, _) in taken.iter() {
            let (freed, _) = store
                .give_back(&format!("c{writer}"), "net1", "rail0")
                .unwrap();
            assert_eq!(freed.len(), 8);
        }
        let mut records = 0;
        store
            .records_of("n1", |_| {
                records += 1;
                Ok(())
            })
            .unwrap();
        assert_eq!(records, 0);
    }
}

#[test]
fn fsck_restores_an_orders_owner_and_removes_an_empty_one() {
    let begun = begun();
    begun.store.claim(&begun.intent, &begun.claims).unwrap();
    let owned = begun.store.owned("c1", "net1").unwrap().remove(0);
    assert!(owned.dir.unlink(&owned.name).unwrap());
    let checkup = begun.store.fsck(true, Duration::ZERO).unwrap();
    assert_eq!((checkup.sound, checkup.repaired()), (2, 1), "{checkup:?}");
    assert_eq!(begun.store.owned("c1", "net1").unwrap().len(), 1);
    let checkup = begun.store.fsck(true, Duration::ZERO).unwrap();
    assert_eq!((checkup.sound, checkup.findings.len()), (3, 0));
    for claim in &begun.claims {
        let held = name::LeaseName::of(&claim.lease);
        let freed = name::LeaseName {
            freed: Some(7),
            ..held
        };
        assert!(begun.shard.rename(&held.name(), &freed.name()).unwrap());
    }
    let checkup = begun.store.fsck(true, Duration::ZERO).unwrap();
    assert_eq!((checkup.sound, checkup.repaired()), (0, 1), "{checkup:?}");
    begun.nothing_is_left();
}

/// An address is released by hand; its record was the last one when that was looked for.
#[test]
fn a_further_record_takes_the_place_of_one_that_is_removed_meanwhile() {
    let begun = begun();
    begun.shard.create("10.0.0.2@7", b"{}", false).unwrap();
    begun.store.claim(&begun.intent, &begun.claims).unwrap();
    let (first, read, meta) = begun.released();
    assert!(begun.take_lost(&[1]).is_ok());
    assert!(first.dir.unlink(&first.name).unwrap());
    assert!(
        begun
            .store
            .remove_unless_held(&first, &read, &meta)
            .unwrap()
    );
    assert_eq!(begun.held().len(), 1);
    begun.store.give_back("c1", "net1", "rail0").unwrap();
    begun.shard.unlink("10.0.0.2@7").unwrap();
    begun.nothing_is_left();
}

/// The first ADD slept between two links while the runtime called ADD again.
#[test]
fn an_add_that_wakes_up_changes_no_answer() {
    let begun = begun();
    let part = || crate::store::Part {
        interface: None,
        range: begun.range.clone(),
        space: crate::store::Space {
            network_name: None,
            overlapping: true,
        },
        like: None,
        requested: None,
    };
    let order = crate::store::Order {
        holder: begun.holder.clone(),
        profile: Profile::Strict,
        parts: vec![part(), part(), part()],
    };
    assert!(
        begun
            .store
            .link_entry(&begun.intent, &begun.claims[0])
            .unwrap()
    );
    let addresses = || {
        let leases = begun.store.take(&order).unwrap();
        leases.iter().map(|lease| lease.address).collect::<Vec<_>>()
    };
    let others = ["10.0.0.2@9", "10.0.0.3@9"];
    for other in others {
        begun.shard.create(other, b"{}", false).unwrap();
    }
    let given = addresses();
    assert_eq!(given[0], begun.claims[0].lease.address);
    for other in others {
        begun.shard.unlink(other).unwrap();
    }
    // It goes on with what nobody else has, which is held until DEL.
    let woken = begun.store.claim(&begun.intent, &begun.claims).unwrap();
    assert_eq!(woken, [true; 3]);
    assert_eq!(addresses(), given);
    begun.store.give_back("c1", "net1", "rail0").unwrap();
    begun.nothing_is_left();
}

/// The first ADD slept before its first link, and wakes up when the runtime's next ADD has
/// made its record, and has linked nothing yet.
#[test]
fn an_add_that_wakes_up_takes_nothing_back_from_the_next_one() {
    let first = begun();
    let store = &first.store;
    store
        .release(
            &store.owned("c1", "net1").unwrap().remove(0),
            CoolDown::FromNow,
        )
        .unwrap();
    let record = Record::of(order_of(&first.holder, &first.range, &THREE)).unwrap();
    let next = store.intend(&record, 0).unwrap();
    let woken = store.link_entry(&first.intent, &first.claims[0]);
    let given = store.claim(&next, &first.claims).unwrap();
    let woken = store.confirm(
        &first.intent,
        &first.claims,
        vec![woken.unwrap_or(false), false, false],
    );
    assert!(
        matches!(woken, Err(StoreError::Overtaken { .. })),
        "{woken:?}"
    );
    assert_eq!(
        first.held().len(),
        given.iter().filter(|given| **given).count(),
        "an address that was given is free"
    );
    store.give_back("c1", "net1", "rail0").unwrap();
    first.nothing_is_left();
}

/// An ADD found the record below its own still there, and the DEL that had looked for a higher one
/// before removed it next: nothing leads to what the ADD took from then on.
#[test]
fn a_del_that_makes_a_gap_releases_all_records_above_it() {
    const RECORDS: usize = 5;
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path(), "n1");
    let (range, holder) = (range("10.0.0.0/27"), holder("c1"));
    for index in 0..RECORDS {
        store.allocate(&want(&range, &holder), index).unwrap();
    }
    let listed = store.owned("c1", "net1").unwrap();
    assert_eq!(listed.len(), RECORDS);
    let Content::Record(record, meta) = &listed[1].content else {
        panic!("no record");
    };
    store
        .release_address(&record.leases()[0], meta, CoolDown::FromNow)
        .unwrap();
    assert!(listed[1].dir.unlink(&listed[1].name).unwrap());
    store.remove_released(&listed[1], record, meta).unwrap();
    let mut left = Vec::new();
    store
        .records_of("n1", |owned| {
            left.push(owned.name);
            Ok(())
        })
        .unwrap();
    assert_eq!(left, [listed[0].name.clone()], "records above the gap");
    assert_eq!(store.held("c1", "net1").unwrap().len(), 1);
    let mut held = 0;
    store
        .entries(false, |entry| {
            held += usize::from(entry.freed.is_none());
            Ok(())
        })
        .unwrap();
    assert_eq!(held, 1);
}

/// A runtime gave up waiting for an ADD that still runs: the ADD may fail, and when both have
/// ended, one more DEL leaves nothing, also where the range has too few addresses for all.
#[test]
fn an_add_and_a_del_of_one_owner_that_meet_leave_nothing() {
    const CONTAINERS: usize = 4;
    let place = tempfile::tempdir().unwrap();
    let range = range("10.0.0.0/27");
    let order = |container: usize| crate::store::Order {
        holder: holder(&format!("c{container}")),
        profile: Profile::Strict,
        parts: vec![
            crate::store::Part {
                interface: None,
                range: range.clone(),
                space: crate::store::Space {
                    network_name: None,
                    overlapping: true,
                },
                like: None,
                requested: None,
            };
            8
        ],
    };
    let store = open(place.path(), "n1");
    let start = Meeting::of(2 * CONTAINERS);
    for round in 0..60 {
        std::thread::scope(|scope| {
            for thread in 0..2 * CONTAINERS {
                let (start, order, place) = (&start, &order, place.path());
                scope.spawn(move || {
                    let store = open(place, "n1");
                    let container = thread % CONTAINERS;
                    start.wait(round);
                    match thread / CONTAINERS {
                        0 => drop(store.take(&order(container))),
                        _ => drop(store.give_back(&format!("c{container}"), "net1", "rail0")),
                    }
                });
            }
        });
        for container in 0..CONTAINERS {
            store
                .give_back(&format!("c{container}"), "net1", "rail0")
                .unwrap();
        }
        let mut left = Vec::new();
        store
            .entries(false, |entry| {
                left.extend(entry.freed.is_none().then_some(entry.path));
                Ok(())
            })
            .unwrap();
        store
            .records_of("n1", |owned| {
                left.push(owned.path());
                Ok(())
            })
            .unwrap();
        assert!(left.is_empty(), "round {round}: {left:?}");
    }
}
