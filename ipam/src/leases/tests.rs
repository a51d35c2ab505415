//! Calls on a directory of their own, also killed before each change that they make.

use super::dir::kill;
use super::*;
use crate::lease::Holder;
use crate::owned::{self, Owned, OwnedPart};
use crate::range::{Range, Spec};
use node::policy::Profile;
use std::collections::BTreeSet;
use std::sync::Arc;

const BOOT: &str = "b1";
const LONG: Duration = Duration::from_secs(3600);

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        // In memory, as /run is, where there is such a file system.
        let shared = tempfile::tempdir_in("/dev/shm");
        Self(shared.or_else(|_| tempfile::tempdir()).unwrap())
    }

    fn leases(&self) -> Leases {
        Leases::open(self.0.path(), BOOT).unwrap()
    }

    fn state(&self) -> PathBuf {
        self.0.path().join("state")
    }

    fn own(&self, parts: &[&str]) {
        let own = |owned: &mut Owned, _: &Leased<'_>| {
            owned.node = "n1".into();
            owned.parts.clear();
            for text in parts {
                let part = OwnedPart {
                    id: "7".into(),
                    boot: BOOT.into(),
                    ..OwnedPart::default()
                };
                owned.parts.insert(text.parse().unwrap(), part);
            }
        };
        owned::change(&self.leases(), &self.state(), &space(), own).unwrap();
    }

    /// The addresses whose names are there, with the record whose file each is.
    fn names(&self) -> BTreeMap<IpAddr, String> {
        let leases = self.leases();
        let mut names = BTreeMap::new();
        let each = |space: &LeaseSpace, address: IpAddr, used: Use| {
            if used == Use::Leased {
                let subnet = Subnet::of(address).name();
                let path = format!("{}/{subnet}/{}", space.directory(), name::leased(address));
                let file = leases.record_at(&path).unwrap().unwrap();
                names.insert(address, file.name);
            }
        };
        leases.entries(each).unwrap();
        names
    }
}

impl Leases {
    /// A subnet's directory, made.
    pub(crate) fn open_subnet_of_test(&self, space: &str, subnet: &str) -> PathBuf {
        let path = self.directory().join(space).join(subnet);
        std::fs::create_dir_all(&path).unwrap();
        path
    }
}

fn space() -> AddressSpace {
    AddressSpace::new("default", None)
}

fn request(range: &str) -> AddressRequest {
    let spec = Spec {
        range,
        ..Spec::default()
    };
    AddressRequest {
        range: Range::new(&spec, Profile::Strict).unwrap(),
        same_host_number_as: None,
        requested: None,
    }
}

fn order(container: &str, ranges: &[&str]) -> Order {
    let lease = crate::lease::tests::lease("10.0.0.5", "10.0.0.0/24");
    Order {
        holder: Holder {
            container: container.into(),
            node: "n1".into(),
            ..lease.holder
        },
        profile: Profile::Strict,
        space: space(),
        overlapping: true,
        requests: ranges.iter().map(|range| request(range)).collect(),
        cooldown: LONG,
    }
}

fn addresses(leases: &[Lease]) -> Vec<String> {
    leases
        .iter()
        .map(|lease| lease.address.to_string())
        .collect()
}

fn take(leases: &Leases, container: &str, ranges: &[&str]) -> Vec<String> {
    addresses(
        &leases
            .take(&order(container, ranges), &Ownership::All)
            .unwrap(),
    )
}

fn del(leases: &Leases, container: &str, cooldown: Duration) -> Vec<String> {
    addresses(
        &leases
            .release(container, "net1", "rail0", cooldown)
            .unwrap(),
    )
}

#[test]
fn an_attachment_gets_its_addresses_again_and_others_get_others() {
    let place = Place::new();
    let leases = place.leases();
    let ranges = ["10.0.0.0/24", "2001:db8::/64", "10.0.0.0/24"];
    let first = take(&leases, "a", &ranges);
    assert_eq!(first, ["10.0.0.1", "2001:db8::1", "10.0.0.2"]);
    assert_eq!(take(&leases, "a", &ranges), first);
    assert_eq!(
        take(&leases, "b", &ranges),
        ["10.0.0.3", "2001:db8::2", "10.0.0.4"]
    );
    assert_eq!(leases.held("a", "net1").unwrap().len(), 3);
    assert_eq!(del(&leases, "a", LONG), first);
    assert_eq!(del(&leases, "a", LONG), Vec::<String>::new());
    assert_eq!(
        take(&leases, "d", &ranges),
        ["10.0.0.5", "2001:db8::3", "10.0.0.6"]
    );
    assert_eq!(leases.list().unwrap().leases.len(), 6);
    assert_eq!(leases.check(|_| true).unwrap().sound, 6);
}

#[test]
fn a_changed_network_or_namespace_is_another_order() {
    let place = Place::new();
    let leases = place.leases();
    take(&leases, "a", &["10.0.0.0/24"]);
    let mut elsewhere = order("a", &["10.0.0.0/24"]);
    elsewhere.holder.netns_inode = Some(1);
    let moved = leases.take(&elsewhere, &Ownership::All).unwrap();
    assert_eq!(addresses(&moved), ["10.0.0.2"]);
    let mut other = order("a", &["10.9.0.0/24"]);
    other.holder.network = "rail1".into();
    assert_eq!(
        addresses(&leases.take(&other, &Ownership::All).unwrap()),
        ["10.9.0.1"]
    );
    assert_eq!(place.names().len(), 1);
    // A late DEL of the first network.
    assert!(del(&leases, "a", LONG).is_empty());
    assert_eq!(place.names().len(), 1);
}

#[test]
fn the_address_that_cooled_longest_is_the_last_resort_of_a_whole_range() {
    let place = Place::new();
    let leases = place.leases();
    let range = "10.0.0.254-10.0.1.1/23";
    for name in ["a", "b", "d", "e"] {
        take(&leases, name, &[range]);
    }
    for name in ["d", "a"] {
        del(&leases, name, LONG);
        std::thread::sleep(Duration::from_millis(2));
    }
    let status = leases.has_room(&order("x", &[range, range]), &Ownership::All);
    assert!(status.is_ok(), "{status:?}");
    assert_eq!(take(&leases, "f", &[range]), ["10.0.1.0"]);
    assert_eq!(take(&leases, "g", &[range]), ["10.0.0.254"]);
    for call in [
        leases
            .take(&order("h", &[range]), &Ownership::All)
            .map(drop),
        leases.has_room(&order("h", &[range]), &Ownership::All),
    ] {
        let refused = call.unwrap_err();
        let says = refused.error.to_string();
        assert!(
            says.contains("all 4 addresses between 10.0.0.254 and 10.0.1.1 are leased"),
            "{says}"
        );
    }
    assert_eq!(place.names().len(), 4);
}

#[test]
fn what_need_not_cool_down_is_the_lowest_free_address_again() {
    let place = Place::new();
    let leases = place.leases();
    for number in 0..600 {
        let mut order = order(&format!("c{number}"), &["10.0.0.0/22"]);
        order.cooldown = Duration::ZERO;
        leases.take(&order, &Ownership::All).unwrap();
    }
    for number in [3, 500, 260] {
        del(&leases, &format!("c{number}"), Duration::ZERO);
    }
    for (name, address) in [("x", "10.0.0.4"), ("y", "10.0.1.5"), ("z", "10.0.1.245")] {
        assert_eq!(take(&leases, name, &["10.0.0.0/22"]), [address]);
    }
    assert_eq!(take(&leases, "w", &["10.0.0.0/22"]), ["10.0.2.89"]);
}

#[test]
fn a_request_is_served_or_refused_by_name() {
    let place = Place::new();
    let leases = place.leases();
    let ask = |container: &str, address: &str| {
        let mut order = order(container, &["10.0.0.0/24"]);
        order.requests[0].requested = Some(address.parse().unwrap());
        leases.take(&order, &Ownership::All)
    };
    assert_eq!(addresses(&ask("a", "10.0.0.50").unwrap()), ["10.0.0.50"]);
    assert_eq!(addresses(&ask("a", "10.0.0.50").unwrap()), ["10.0.0.50"]);
    let held = ask("b", "10.0.0.50").unwrap_err().error.to_string();
    assert!(held.contains("held by pod ml/train-0"), "{held}");
    del(&leases, "a", LONG);
    assert!(ask("b", "10.0.0.50").is_ok(), "a request does not wait");
    // The lowest address is still the next one.
    assert_eq!(take(&leases, "d", &["10.0.0.0/24"]), ["10.0.0.1"]);
}

#[test]
fn addresses_of_this_host_are_leased_to_nobody() {
    let place = Place::new();
    let leases = place.leases();
    let mut order = order("a", &["10.0.0.0/24"]);
    order.requests[0].range = Range::whole("127.0.0.0/30".parse().unwrap());
    let refused = leases.take(&order, &Ownership::All).unwrap_err();
    assert!(
        matches!(refused.error, LeaseError::Exhausted { .. }),
        "{refused:?}"
    );
    order.requests[0].requested = Some("127.0.0.1".parse().unwrap());
    let refused = leases.take(&order, &Ownership::All).unwrap_err();
    assert!(
        matches!(refused.error, LeaseError::OfThisNode { .. }),
        "{refused:?}"
    );
    assert!(place.names().is_empty());
}

#[test]
fn a_rail_gets_the_host_number_of_the_first() {
    let place = Place::new();
    let leases = place.leases();
    let mut order = order("a", &["10.0.0.0/24", "10.1.0.0/16", "10.2.0.0/24"]);
    order.requests[0].requested = Some("10.0.0.77".parse().unwrap());
    order.requests[1].same_host_number_as = Some(0);
    order.requests[2].same_host_number_as = Some(0);
    let mut taken = order.clone();
    taken.holder.container = "b".into();
    taken.requests.remove(0);
    taken.requests.remove(0);
    taken.requests[0].requested = Some("10.2.0.77".parse().unwrap());
    leases.take(&taken, &Ownership::All).unwrap();
    let given = addresses(&leases.take(&order, &Ownership::All).unwrap());
    assert_eq!(given, ["10.0.0.77", "10.1.0.77", "10.2.0.1"]);
}

#[test]
fn a_range_of_its_own_is_compared_with_no_other() {
    let place = Place::new();
    let leases = place.leases();
    take(&leases, "a", &["10.0.0.0/24"]);
    let mut alone = order("b", &["10.0.0.0/24", "10.0.0.0/25"]);
    alone.overlapping = false;
    let given = addresses(&leases.take(&alone, &Ownership::All).unwrap());
    assert_eq!(given, ["10.0.0.1", "10.0.0.1"]);
    assert_eq!(leases.list().unwrap().leases.len(), 3);
    let of = LeaseSpace::of(&space(), &alone.requests[1].range, false);
    assert!(
        leases
            .release_address(&of, "10.0.0.1".parse().unwrap(), LONG)
            .unwrap()
    );
    assert_eq!(leases.held("b", "net1").unwrap().len(), 1);
    assert_eq!(del(&leases, "b", LONG).len(), 1);
}

#[test]
fn a_node_leases_from_its_parts_and_says_what_it_needs() {
    let place = Place::new();
    let leases = place.leases();
    let state = place.state();
    let parts = |last_resort| Ownership::Parts {
        state_dir: &state,
        last_resort,
    };
    let range = "10.0.0.0/24";
    let needs = |order: &Order, last_resort| match leases.take(order, &parts(last_resort)) {
        Err(Refused {
            error: LeaseError::NeedsRoom(needs),
            ..
        }) => needs,
        other => panic!("{other:?}"),
    };
    let two = order("a", &[range, "2001:db8::/64", range]);
    let needed = needs(&two, false);
    assert_eq!((needed.len(), needed[0].count, needed[1].count), (2, 2, 1));
    place.own(&["10.0.0.64/31", "10.0.0.16/31"]);
    let take = |container: &str, last_resort| {
        let taken = leases.take(&order(container, &[range]), &parts(last_resort));
        addresses(&taken.unwrap())
    };
    assert_eq!(take("a", false), ["10.0.0.16"]);
    assert_eq!(take("b", false), ["10.0.0.17"]);
    assert_eq!(take("d", false), ["10.0.0.64"]);
    del(&leases, "a", LONG);
    assert_eq!(take("e", false), ["10.0.0.65"]);
    let full = order("f", &[range]);
    assert_eq!(needs(&full, false)[0].count, 1);
    assert_eq!(take("f", true), ["10.0.0.16"]);
    let mut asked = order("g", &[range]);
    asked.requests[0].requested = Some("10.0.0.99".parse().unwrap());
    assert_eq!(needs(&asked, true)[0].address, asked.requests[0].requested);
}

#[test]
fn marks_and_empty_directories_go_when_addresses_have_cooled_down() {
    let place = Place::new();
    let leases = place.leases();
    std::fs::create_dir(place.0.path().join(DIRECTORY).join("b0")).unwrap();
    for (name, range) in [
        ("a", "10.0.0.0/24"),
        ("b", "10.9.0.0/24"),
        ("d", "2001:db8::/64"),
    ] {
        take(&leases, name, &[range]);
    }
    del(&leases, "a", LONG);
    del(&leases, "d", LONG);
    leases.tidy(LONG).unwrap();
    assert_eq!(leases.pools().unwrap().len(), 3);
    leases.tidy(Duration::ZERO).unwrap();
    let pools = leases.pools().unwrap();
    assert_eq!(
        (pools.len(), pools[0].range.to_string()),
        (1, "10.9.0.0/24".to_owned())
    );
    assert_eq!(take(&leases, "e", &["10.0.0.0/24"]), ["10.0.0.1"]);
    del(&leases, "b", LONG);
    del(&leases, "e", LONG);
    leases.tidy(Duration::ZERO).unwrap();
    let left = leases.dir.names(".").unwrap().unwrap();
    assert_eq!(
        BTreeSet::from_iter(left),
        BTreeSet::from([LOCK.into(), RECORDS.into()])
    );
    let boots = std::fs::read_dir(place.0.path().join(DIRECTORY)).unwrap();
    assert_eq!(boots.count(), 1);
}

#[test]
fn who_waits_in_vain_for_the_lock_names_its_holder() {
    let place = Place::new();
    let path = place.leases().directory().join(LOCK);
    let held = Lock::take(&path, LONG).unwrap();
    let error = Lock::take(&path, Duration::from_millis(5))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains(&format!("process {}", std::process::id())),
        "{error}"
    );
    let waiting = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| Lock::take(&path, LONG).map(drop));
        std::thread::sleep(Duration::from_millis(20));
        drop(held);
        waiter.join().unwrap()
    });
    waiting.unwrap();
}

#[test]
fn many_calls_at_once_give_no_address_twice() {
    let place = Place::new();
    let leases = Arc::new(place.leases());
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let leases = leases.clone();
            scope.spawn(move || {
                for round in 0..40 {
                    let name = format!("c{thread}x{}", round % 5);
                    take(&leases, &name, &["10.0.0.0/24", "2001:db8::/64"]);
                    if round % 3 == 0 {
                        del(&leases, &name, Duration::ZERO);
                    }
                }
            });
        }
    });
    let listed = leases.list().unwrap();
    let held: BTreeSet<IpAddr> = listed.leases.iter().map(|lease| lease.address).collect();
    assert_eq!(held.len(), listed.leases.len());
    let checkup = leases.check(|_| true).unwrap();
    assert_eq!((checkup.sound, checkup.findings), (held.len(), Vec::new()));
}

/// What must be so after any call, killed or not.
fn check(place: &Place, known: &BTreeMap<&str, Vec<String>>) {
    let leases = place.leases();
    // Each name leads to a record, and each attachment that was answered has all of its addresses.
    let names = place.names();
    for (address, record) in &names {
        assert!(leases.record(record).unwrap().is_some(), "{address}");
    }
    for (container, given) in known {
        let held = addresses(&leases.held(container, "net1").unwrap());
        assert_eq!(&held, given, "{container}");
    }
}

/// A call that is killed before its n-th change, for every n, then every call that may follow, killed or
/// not: the answers that were given stand, no name is without its record, and in the end all is free.
#[test]
fn a_call_may_be_killed_before_any_change() {
    let ranges = ["10.0.0.0/29", "10.0.0.0/29"];
    #[derive(Clone, Copy, Debug)]
    enum Call {
        Add(&'static str),
        Del(&'static str, Duration),
        Tidy,
        Release,
    }
    use Call::*;
    let run = |place: &Place, call: Call| -> Option<Vec<String>> {
        let leases = place.leases();
        match call {
            Add(name) => {
                let taken = leases.take(&order(name, &ranges), &Ownership::All);
                Some(taken.map(|taken| addresses(&taken)).unwrap_or_default())
            }
            Del(name, cooldown) => {
                del(&leases, name, cooldown);
                None
            }
            Tidy => {
                leases.tidy(Duration::ZERO).unwrap();
                None
            }
            Release => {
                let of = LeaseSpace::of(&space(), &request(ranges[0]).range, true);
                leases
                    .release_address(&of, "10.0.0.3".parse().unwrap(), LONG)
                    .unwrap();
                None
            }
        }
    };
    let calls = [
        Add("a"),
        Add("b"),
        Del("a", LONG),
        Del("a", Duration::ZERO),
        Del("b", LONG),
        Tidy,
        Release,
    ];
    let mut runs = 0;
    for before in [
        &[][..],
        &[Add("a")],
        &[Add("b"), Add("a")],
        &[Add("a"), Del("a", LONG)],
    ] {
        for killed in calls {
            for number in 0.. {
                let mut ended = false;
                for next in calls {
                    for then in [Add("a"), Del("a", LONG)] {
                        let place = Place::new();
                        let mut known = BTreeMap::new();
                        let mut note = |call: Call, answer: Option<Vec<String>>, killed: bool| {
                            match (call, answer) {
                                (Add(name), Some(given)) if !killed && !given.is_empty() => {
                                    known.insert(name, given);
                                }
                                // An ADD of a holder changes nothing, killed or not.
                                (Add(name), _) if killed && !known.contains_key(name) => {}
                                (Add(_) | Tidy, _) => {}
                                (Del(name, _), _) => drop(known.remove(name)),
                                // Whoever had it has it no more.
                                (Release, _) => known.retain(|_, given: &mut Vec<String>| {
                                    !given.contains(&"10.0.0.3".to_owned())
                                }),
                            }
                            known.clone()
                        };
                        for call in before {
                            let answer = run(&place, *call);
                            note(*call, answer, false);
                        }
                        let answer = kill::before(number, || run(&place, killed));
                        ended = answer.is_some();
                        let known = note(killed, answer.flatten(), !ended);
                        check(&place, &known);
                        let answer = run(&place, next);
                        let known = note(next, answer, false);
                        check(&place, &known);
                        let answer = run(&place, then);
                        let known = note(then, answer, false);
                        check(&place, &known);
                        for name in ["a", "b"] {
                            del(&place.leases(), name, Duration::ZERO);
                        }
                        place.leases().tidy(Duration::ZERO).unwrap();
                        assert!(place.names().is_empty(), "{killed:?} {number} {next:?}");
                        let given = take(&place.leases(), "x", &ranges);
                        assert_eq!(
                            given,
                            ["10.0.0.1", "10.0.0.2"],
                            "{killed:?} {number} {next:?}"
                        );
                        runs += 1;
                    }
                }
                if ended {
                    break;
                }
            }
        }
    }
    assert!(runs > 1000, "{runs}");
}

/// Giving a part back while an ADD leases in it, each killed anywhere: never is an address leased that
/// the node does not own.
#[test]
fn a_part_that_is_given_back_has_no_leases_wherever_a_call_is_killed() {
    for number in 0..20 {
        let place = Place::new();
        place.own(&["10.0.0.0/30"]);
        let state = place.state();
        let parts = Ownership::Parts {
            state_dir: &state,
            last_resort: true,
        };
        let add = |container: &str| {
            let taken = place
                .leases()
                .take(&order(container, &["10.0.0.0/24"]), &parts);
            taken.map(|taken| addresses(&taken)).ok()
        };
        let give = || {
            owned::change(&place.leases(), &state, &space(), |owned, leased| {
                let uses = leased.of("10.0.0.0/30".parse().unwrap()).unwrap();
                if uses.iter().all(|(_, used)| *used != Use::Leased) {
                    owned.parts.clear();
                }
            })
        };
        kill::before(number, || add("a"));
        give().unwrap();
        let owned = Owned::read(&state, &space()).unwrap();
        let answered = add("a").is_some();
        assert_eq!(answered, !owned.parts.is_empty(), "{number}");
        let leased = place.leases().list().unwrap().leases.len();
        assert_eq!(leased, usize::from(answered), "{number}");
    }
}

#[test]
fn what_one_network_is_called_stops_no_other_add() {
    let place = Place::new();
    let leases = place.leases();
    let mut long = order("c1", &[]);
    long.requests = (0..64)
        .map(|n| request(&format!("10.{n}.0.0/24")))
        .collect();
    long.holder.network = "n".repeat(40_000);
    assert_eq!(leases.take(&long, &Ownership::All).unwrap().len(), 64);
    assert_eq!(take(&leases, "c2", &["10.99.0.0/24"]), ["10.99.0.1"]);
}
