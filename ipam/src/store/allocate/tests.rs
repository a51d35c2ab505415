//! Claims that meet, in one process: as many views of the store as there are nodes.

mod orders;

use super::*;
use crate::lease;
use crate::range::Spec;
use crate::store::tests::meeting::Meeting;
use crate::store::{CoolDown, Owned};
use node::identity::NodeIdentity;
use node::policy::{Policy, Profile, StorePolicy};
use std::collections::HashSet;
use std::path::Path;

mod claims;
mod limits;
mod releases;

#[test]
fn shards_ascend_and_skip_what_is_excluded() {
    let of = |spans: &[(u128, u128)]| {
        let spans: Vec<Span> = spans
            .iter()
            .map(|&(first, last)| Span { first, last })
            .collect();
        let next = spans.first().map(|span| span.first);
        Shards {
            spans: &spans,
            next,
        }
        .take(10)
        .collect::<Vec<_>>()
    };
    assert_eq!(of(&[(1, 254)]), [0]);
    assert_eq!(of(&[(1, 256)]), [0, 1]);
    assert_eq!(of(&[(250, 600), (700, 800)]), [0, 1, 2, 3]);
    assert_eq!(of(&[(5, 5), (0x1_0000, 0x1_0001)]), [0, 0x100]);
    assert_eq!(
        of(&[(0, 1), (u128::MAX - 1, u128::MAX)]),
        [0, u128::MAX >> 8]
    );
    assert_eq!(of(&[]), [0u128; 0]);
    assert_eq!(of(&[(0, u128::MAX)]).len(), 10);
}

impl Store {
    /// Leases the lowest free address of a range.
    pub(crate) fn allocate(&self, want: &Want<'_>, index: usize) -> Result<Lease, StoreError> {
        self.allocate_one(Search::new(self, want.clone(), Goal::Lowest, 0), index)
    }

    /// Leases one address of a range, and no other.
    fn allocate_this(
        &self,
        want: &Want<'_>,
        index: usize,
        address: IpAddr,
    ) -> Result<Lease, StoreError> {
        let search = Search::new(self, want.clone(), Goal::This(address), 0);
        self.allocate_one(search, index)
    }

    fn allocate_one(&self, search: Search<'_>, index: usize) -> Result<Lease, StoreError> {
        let mut made = Made::of(search.want.holder, index);
        match self.allocate_all(&mut [search], &mut made) {
            Ok(mut leases) => Ok(leases.pop().unwrap()),
            Err(failed) => {
                self.release_made(&made, &failed.error);
                Err(failed.error)
            }
        }
    }
}

fn policy(place: &Path) -> Policy {
    let store = StorePolicy::file(place.join("store"));
    std::fs::create_dir_all(place.join("store")).unwrap();
    let mut policy = Policy {
        state_dir: place.join("state"),
        ..Policy::default()
    };
    policy.stores.insert("default".into(), store);
    policy
}

fn open(place: &Path, node: &str) -> Store {
    let node = NodeIdentity::read(Path::new("/"), node).unwrap();
    Store::open(&policy(place), "default", node, Path::new("/")).unwrap()
}

fn holder(container: &str) -> Holder {
    let lease = crate::lease::tests::lease("10.0.0.5", "10.0.0.0/24");
    Holder {
        container: container.into(),
        node: "n1".into(),
        pod: None,
        ..lease.holder
    }
}

fn range(text: &str) -> Range {
    Range::new(
        &Spec {
            range: text,
            ..Spec::default()
        },
        Profile::Strict,
    )
    .unwrap()
}

/// For the first lease of a holder of the cluster's one space.
fn want<'a>(range: &'a Range, holder: &'a Holder) -> Want<'a> {
    Want {
        range,
        network_name: None,
        overlapping: true,
        holder,
    }
}

fn record(lease: &Lease) -> Record {
    Record::of(vec![lease.clone()]).unwrap()
}

fn claims(lease: &Lease, shard: &Rc<Dir>) -> [PlacedLease; 1] {
    let (lease, shard) = (lease.clone(), Rc::clone(shard));
    [PlacedLease { lease, shard }]
}

fn is_held(store: &Store, owned: &crate::store::Owned) -> bool {
    match &owned.content {
        Content::Record(record, meta) => {
            let mut leases = record.leases().iter();
            leases.any(|lease| store.is_held(lease, meta).unwrap())
        }
        other => panic!("{other:?}"),
    }
}

/// Names of a shard, but for those that withdrawn claims leave.
fn names(shard: &Dir) -> Vec<String> {
    let withdrawn = |name: &str| name.ends_with(".0");
    shard.names_that(|name| !withdrawn(name)).unwrap()
}

/// As many threads as writers, each with its own view of the store, lease as
/// many addresses at once. Answers all addresses and each search's collisions.
fn crowd(place: &Path, range: &Range, writers: usize, each: usize) -> (Vec<IpAddr>, Vec<usize>) {
    let start = Meeting::of(writers);
    let all = std::sync::Mutex::new((Vec::new(), Vec::new()));
    std::thread::scope(|scope| {
        for writer in 0..writers {
            let (start, all) = (&start, &all);
            scope.spawn(move || {
                let store = open(place, &format!("n{writer}"));
                for number in 0..each {
                    let holder = holder(&format!("c{writer}-{number}"));
                    let want = want(range, &holder);
                    start.wait(number);
                    let mut search = [Search::new(&store, want, Goal::Lowest, 0)];
                    let mut made = Made::of(&holder, 0);
                    let leases = store.allocate_all(&mut search, &mut made);
                    let leases = leases.map_err(|failed| failed.error).unwrap();
                    let mut all = all.lock().unwrap();
                    all.0.push(leases[0].address);
                    all.1.push(search[0].collisions);
                }
            });
        }
    });
    all.into_inner().unwrap()
}

fn check_crowd(range_text: &str, fill: usize, writers: usize, each: usize) {
    let place = tempfile::tempdir().unwrap();
    let range = range(range_text);
    let store = open(place.path(), "filler");
    for number in 0..fill {
        let holder = holder(&format!("fill{number}"));
        let want = want(&range, &holder);
        store.allocate(&want, 0).unwrap();
    }
    let (addresses, collisions) = crowd(place.path(), &range, writers, each);
    let distinct: HashSet<_> = addresses.iter().collect();
    assert_eq!(distinct.len(), writers * each, "an address was given twice");
    let sum: usize = collisions.iter().sum();
    let worst = collisions.iter().max().copied().unwrap_or(0);
    // One meeting is the price of lowest first; after it the writers part.
    // With few addresses left each of them goes to somebody, so the last
    // writer can meet all others.
    assert!(worst <= writers, "{worst} collisions in one search");
    assert!(
        sum <= 3 * collisions.len(),
        "{sum} collisions in {} searches",
        collisions.len()
    );
}

#[test]
fn writers_part_on_a_small_range() {
    check_crowd("10.0.0.0/28", 0, 14, 1);
}

#[test]
fn writers_part_on_a_large_range() {
    check_crowd("10.0.0.0/16", 0, 16, 8);
}

#[test]
fn writers_find_the_last_addresses_of_a_nearly_full_range() {
    check_crowd("10.0.0.0/22", 1006, 16, 1);
}

#[test]
fn a_claim_by_an_old_listing_is_withdrawn() {
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path(), "n1");
    let range = range("10.0.0.0/24");
    let lease_for = |container: &str| {
        let holder = holder(container);
        let want = want(&range, &holder);
        store
            .allocate_this(&want, 0, "10.0.0.9".parse().unwrap())
            .unwrap()
    };
    // One ADD listed the shard when the address had never been used, and sleeps.
    let sleeper = holder("sleeper");
    let want = want(&range, &sleeper);
    let candidate = Candidate {
        address: bits("10.0.0.9".parse().unwrap()),
        generation: 1,
        other_class: None,
    };
    let wakes = |expected: bool| {
        assert_eq!(wakes_with(&store, &want, candidate), expected);
    };
    // Meanwhile it was held, freed, held, freed and held by others.
    lease_for("first");
    wakes(false);
    store.give_back("first", "net1", "rail0").unwrap();
    wakes(false);
    lease_for("second");
    wakes(false);
    store.give_back("second", "net1", "rail0").unwrap();
    assert_eq!(lease_for("third").generation, 3);
    wakes(false);
    assert_eq!(
        store.held("third", "net1").unwrap().len(),
        1,
        "the holder lost its lease"
    );
    assert!(store.held("sleeper", "net1").unwrap().is_empty());
}

/// What a claim leaves whose listing was made while another's names changed,
/// and showed neither: a held entry of a low number beside freed ones of higher.
#[test]
fn a_holder_by_a_low_number_keeps_the_address() {
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path(), "n1");
    let range = range("10.0.0.0/24");
    let address: IpAddr = "10.0.0.9".parse().unwrap();
    let holders = ["first", "second"].map(holder);
    let want = |holder| want(&range, holder);
    let lease = store.allocate_this(&want(&holders[0]), 0, address).unwrap();
    assert_eq!(lease.generation, 1);
    let shard = store.shard_of(&lease).unwrap().unwrap();
    let freed = name::LeaseName::parse("10.0.0.9~7.1").unwrap();
    shard.create(&freed.name(), b"{}", false).unwrap().unwrap();

    let refused = store.allocate_this(&want(&holders[1]), 0, address);
    assert!(
        matches!(refused, Err(StoreError::Held { .. })),
        "{refused:?}"
    );
    // Also to an ADD that listed the shard before the address was leased.
    let second = want(&holders[1]);
    let candidate = Candidate {
        address: bits(address),
        generation: 8,
        other_class: None,
    };
    assert!(!wakes_with(&store, &second, candidate));

    // Its ADD repeated finds it, and its end makes it free, by a number beyond all.
    let owned = store.owned("first", "net1").unwrap();
    assert!(is_held(&store, &owned[0]));
    store.give_back("first", "net1", "rail0").unwrap();
    let next = store.allocate_this(&want(&holders[1]), 0, address).unwrap();
    // A number that was withdrawn is used.
    assert!(next.generation >= 8, "{next:?}");
}

/// Two claims of one address, as two ADDs leave them that were killed before they listed the names:
/// a store, and both records.
fn contested(place: &Path) -> (Store, [Lease; 2]) {
    let store = open(place, "n1");
    let range = range("10.0.0.0/24");
    let shard = store
        .make_below(&["leases", "default", "10.0.0.0-24"])
        .unwrap();
    let leases = [("first", 1), ("second", 2)].map(|(container, generation)| {
        let holder = holder(container);
        let candidate = Candidate {
            address: bits("10.0.0.9".parse().unwrap()),
            generation,
            other_class: None,
        };
        let lease = want(&range, &holder).lease(candidate, false, 0);
        store.intend(&record(&lease), 0).unwrap();
        let (bucket, record) = name::owner(container, "net1", 0);
        let owners = store.make_below(&["owners", "n1", &bucket]).unwrap();
        let entry = name::LeaseName::of(&lease).name();
        assert!(owners.link(&record, &shard, &entry).unwrap());
        lease
    });
    (store, leases)
}

#[test]
fn a_full_shard_is_contended_by_the_clock_of_the_file_server() {
    let contended = |ages: &[i64]| {
        let shards = (0..).zip(ages).map(|(n, age)| (n, 1000 - age)).collect();
        Full { next: None, shards }.contended(1000)
    };
    // A server whose clock moved meanwhile stamps ahead of the time asked for.
    assert_eq!(contended(&[0, 60, 61, -5]), [0, 1, 3]);
    assert_eq!(contended(&[1001 + i64::from(i32::MAX)]), []);
    assert_eq!(contended(&[]), []);
}

#[test]
fn a_claim_whose_contender_stays_is_given_up() {
    let place = tempfile::tempdir().unwrap();
    let (store, [first, _]) = contested(place.path());
    let shard = store.shard_of(&first).unwrap().unwrap();
    let held = |container: &str| {
        let owned = store.owned(container, "net1").unwrap();
        is_held(&store, &owned[0])
    };
    assert!(!held("first"));
    assert_eq!(names(&shard), ["10.0.0.9@2"]);
    assert!(!held("first"), "it does not come back");
    assert!(held("second"));
}

/// One ADD has an address of a range where it overlaps others; another, where it
/// does not, had linked its claim of the same address and was killed.
#[test]
fn a_killed_claim_yields_to_a_holder_of_the_other_class() {
    for killed_overlaps in [true, false] {
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path(), "n1");
        let range = range("10.0.0.0/24");
        let address: IpAddr = "10.0.0.9".parse().unwrap();
        let (keeps, killed) = (holder("keeps"), holder("killed"));
        let first = Want {
            overlapping: !killed_overlaps,
            ..want(&range, &keeps)
        };
        store.allocate_this(&first, 0, address).unwrap();
        let second = Want {
            overlapping: killed_overlaps,
            ..want(&range, &killed)
        };
        let candidate = Candidate {
            address: bits(address),
            generation: 1,
            other_class: None,
        };
        let lease = second.lease(candidate, false, 0);
        store.intend(&record(&lease), 0).unwrap();
        let (bucket, record) = name::owner("killed", "net1", 0);
        let owners = store.make_below(&["owners", "n1", &bucket]).unwrap();
        let shard = store.shard_of(&lease).unwrap().unwrap();
        assert!(
            owners
                .link(&record, &shard, &name::LeaseName::of(&lease).name())
                .unwrap()
        );
        let owned = store.owned("killed", "net1").unwrap();
        assert!(!is_held(&store, &owned[0]), "two hold {address}");
        let owned = store.owned("keeps", "net1").unwrap();
        assert!(is_held(&store, &owned[0]));
        assert_eq!(names(&shard).len(), 1);
    }
}

#[test]
fn fsck_reports_claims_that_met_and_removes_none() {
    let place = tempfile::tempdir().unwrap();
    let (store, [first, _]) = contested(place.path());
    let notes = |min_age| {
        let checkup = store.fsck(true, Duration::from_secs(min_age)).unwrap();
        let findings = checkup.findings.into_iter();
        findings
            .map(|problem| problem.finding.what)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        notes(60),
        [""; 0],
        "young ones may be of a call that still runs"
    );
    let findings = notes(0);
    assert_eq!(findings.len(), 2, "{findings:?}");
    for (finding, container) in findings.iter().zip(["first", "second"]) {
        assert!(
            finding.starts_with("one of several claims of 10.0.0.9: ")
                && finding.contains(container),
            "{finding}"
        );
    }
    let shard = store.shard_of(&first).unwrap().unwrap();
    assert_eq!(shard.names().unwrap().len(), 2);
}

/// fsck has read a record that holds nothing; then its ADD goes on.
#[test]
fn fsck_removes_no_record_whose_add_went_on() {
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path(), "n1");
    let range = range("10.0.0.0/24");
    let holder = holder("c1");
    let want = want(&range, &holder);
    let candidate = Candidate {
        address: bits("10.0.0.1".parse().unwrap()),
        generation: 1,
        other_class: None,
    };
    let lease = want.lease(candidate, false, 0);
    let intent = store.intend(&record(&lease), 0).unwrap();
    let checkup = store.fsck(true, super::super::FSCK_MIN_AGE).unwrap();
    assert_eq!(checkup.findings, [], "it may be of a call that still runs");
    let shard = store
        .make_below(&["leases", "default", "10.0.0.0-24"])
        .unwrap();
    assert_eq!(
        store.claim(&intent, &claims(&lease, &shard)).unwrap(),
        [true]
    );
    let checkup = store.fsck(true, Duration::ZERO).unwrap();
    assert_eq!((checkup.sound, checkup.findings.len()), (1, 0));
    // Without its place in the shard for longer, the record goes and nothing else.
    let (entry, aside) = (name::LeaseName::of(&lease).name(), "10.0.0.2@1");
    assert!(shard.rename(&entry, aside).unwrap());
    let checkup = store.fsck(true, super::super::FSCK_MIN_AGE).unwrap();
    assert_eq!(checkup.repaired(), 0, "{checkup:?}");
    assert_eq!(store.owned("c1", "net1").unwrap().len(), 1);
    let checkup = store.fsck(true, Duration::ZERO).unwrap();
    assert!(checkup.repaired() > 0, "{checkup:?}");
    assert_eq!(store.owned("c1", "net1").unwrap().len(), 0);
    assert_eq!(shard.names().unwrap(), [aside]);
}

/// A host that changed its name while it ran has records under both.
#[test]
fn an_attachment_is_freed_under_all_names_of_its_node() {
    let place = tempfile::tempdir().unwrap();
    let range = range("10.0.0.0/24");
    let [before, after] = ["localhost", "gpu-7"].map(|node| Holder {
        node: node.into(),
        ..holder("c1")
    });
    open(place.path(), "localhost")
        .allocate(&want(&range, &before), 0)
        .unwrap();
    let store = open(place.path(), "gpu-7");
    store.allocate(&want(&range, &after), 0).unwrap();
    assert_eq!(store.held("c1", "net1").unwrap().len(), 2);
    store.give_back("c1", "net1", "rail0").unwrap();
    assert!(store.held("c1", "net1").unwrap().is_empty());
    assert!(store.owned("c1", "net1").unwrap().is_empty());
}

/// Whether an ADD gets what it chose a while ago.
fn wakes_with(store: &Store, want: &Want<'_>, candidate: Candidate) -> bool {
    let lease = want.lease(candidate, false, 0);
    let shard = store
        .make_below(&["leases", "default", "10.0.0.0-24"])
        .unwrap();
    let intent = store.intend(&record(&lease), 0).unwrap();
    let taken = store.claim(&intent, &claims(&lease, &shard)).unwrap();
    store
        .give_back(&want.holder.container, &want.holder.interface, "rail0")
        .unwrap();
    taken[0]
}
