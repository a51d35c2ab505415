//! Orders taken again, taken over and taken up.

use super::*;
use crate::lease::Pod;

fn previous(node: &str, uid: Option<&str>) -> Lease {
    let mut lease = crate::lease::tests::lease("10.0.0.5", "10.0.0.0/24");
    lease.holder.node = node.into();
    lease.holder.pod = Some(Pod {
        namespace: "a".into(),
        name: "b".into(),
        uid: uid.map(str::to_owned),
    });
    lease
}

#[test]
fn an_address_goes_to_the_next_sandbox_of_the_same_pod_only() {
    let here = previous("n1", Some("u1")).holder;
    let anonymous = previous("n1", None).holder;
    let unknown = Netns::Unknown("");
    for (before, now, netns, strict, compatible) in [
        (previous("n1", Some("u1")), &here, &unknown, true, true),
        (previous("n1", Some("u1")), &here, &Netns::Gone, true, true),
        (
            previous("n1", Some("u1")),
            &here,
            &Netns::Present,
            false,
            false,
        ),
        (previous("n1", Some("u2")), &here, &unknown, false, false),
        (previous("n1", Some("u2")), &here, &Netns::Gone, true, true),
        (
            previous("n1", Some("u2")),
            &here,
            &Netns::Present,
            false,
            false,
        ),
        (previous("n2", Some("u1")), &here, &unknown, false, true),
        (previous("n2", Some("u2")), &here, &unknown, false, false),
        (previous("n1", None), &anonymous, &unknown, true, true),
        (
            previous("n1", None),
            &anonymous,
            &Netns::Present,
            false,
            false,
        ),
        (previous("n2", None), &anonymous, &unknown, false, true),
    ] {
        for (profile, expected) in [(Profile::Strict, strict), (Profile::Compatible, compatible)] {
            assert_eq!(
                may_take_over(profile, &before, now, netns),
                expected,
                "{profile:?} {netns:?} {before:?}"
            );
        }
    }
}

fn open(place: &std::path::Path) -> Store {
    use node::policy::{Policy, StorePolicy};
    std::fs::create_dir_all(place.join("store")).unwrap();
    let store = StorePolicy::file(place.join("store"));
    let mut policy = Policy {
        state_dir: place.join("state"),
        ..Policy::default()
    };
    policy.stores.insert("default".into(), store);
    let root = std::path::Path::new("/");
    let node = node::identity::NodeIdentity::read(root, "n1").unwrap();
    Store::open(&policy, "default", node, root).unwrap()
}

/// One part for each of these networks, whose addresses are to have one host number.
fn alike(ranges: &[&str]) -> Vec<Part> {
    let parts = ranges.iter().enumerate();
    parts
        .map(|(number, range)| Part {
            like: (number > 0).then_some(0),
            ..part(None, range, None)
        })
        .collect()
}

#[test]
fn parts_that_are_to_be_alike_have_one_host_number_where_it_is_free() {
    let networks = ["10.0.0.0/24", "10.0.1.0/24", "10.0.2.0/23"];
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path());
    let take = |container: &str, parts: Vec<Part>| {
        let mut order = order(parts);
        order.holder.container = container.to_owned();
        addresses(&store.take(&order).unwrap())
    };
    // Others have the lowest of the first network, and what would be alike in the last.
    for (container, range, address) in [
        ("c1", "10.0.0.0/24", "10.0.0.1"),
        ("c2", "10.0.2.0/23", "10.0.2.3"),
    ] {
        assert_eq!(
            take(container, vec![part(None, range, Some(address))]),
            [address]
        );
    }
    assert_eq!(
        take("c3", alike(&networks)),
        ["10.0.0.2", "10.0.1.2", "10.0.2.2"]
    );
    assert_eq!(
        take("c3", alike(&networks)),
        ["10.0.0.2", "10.0.1.2", "10.0.2.2"]
    );
    assert_eq!(
        take("c4", alike(&networks)),
        ["10.0.0.3", "10.0.1.3", "10.0.2.1"]
    );
    // A network that has no such number, and one of another family.
    let others = take("c5", alike(&["10.0.0.0/24", "10.9.0.0/30", "fd00::/64"]));
    assert_eq!(others, ["10.0.0.4", "10.9.0.1", "fd00::4"]);
}

#[test]
fn a_host_number_that_is_cooling_down_is_left_alone() {
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path());
    let networks = ["10.0.0.0/24", "10.0.1.0/24"];
    let first = order(vec![part(None, networks[1], Some("10.0.1.1"))]);
    store.take(&first).unwrap();
    let Holder {
        container,
        interface,
        network,
        ..
    } = &first.holder;
    store.give_back(container, interface, network).unwrap();
    let mut second = order(alike(&networks));
    second.holder.container = "c3".to_owned();
    assert_eq!(
        addresses(&store.take(&second).unwrap()),
        ["10.0.0.1", "10.0.1.2"]
    );
}

fn part(interface: Option<&str>, range: &str, requested: Option<&str>) -> Part {
    let spec = crate::range::Spec {
        range,
        ..crate::range::Spec::default()
    };
    Part {
        interface: interface.map(str::to_owned),
        range: Range::new(&spec, Profile::Strict).unwrap(),
        space: Space {
            network_name: None,
            overlapping: true,
        },
        like: None,
        requested: requested.map(|address| address.parse().unwrap()),
    }
}

fn order(parts: Vec<Part>) -> Order {
    let mut holder = previous("n1", None).holder;
    holder.pod = None;
    Order {
        holder,
        profile: Profile::Strict,
        parts,
    }
}

fn addresses(leases: &[Lease]) -> Vec<String> {
    leases
        .iter()
        .map(|lease| lease.address.to_string())
        .collect()
}

#[test]
fn one_call_takes_the_addresses_of_several_interfaces_and_answers_them_again() {
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path());
    let order = order(vec![
        part(None, "10.0.0.0/24", None),
        part(Some("net2"), "10.0.0.0/24", Some("10.0.0.9")),
        part(Some("net2"), "fd00::/64", None),
        part(None, "10.0.1.0/24", None),
    ]);
    let expected = ["10.0.0.1", "10.0.0.9", "fd00::1", "10.0.1.1"];
    assert_eq!(addresses(&store.take(&order).unwrap()), expected);
    assert_eq!(addresses(&store.take(&order).unwrap()), expected, "again");
    let container = &order.holder.container;
    for (interface, count) in [("net1", 2), ("net2", 2)] {
        assert_eq!(store.held(container, interface).unwrap().len(), count);
        store.give_back(container, interface, "rail0").unwrap();
        assert!(store.owned(container, interface).unwrap().is_empty());
    }
}

#[test]
fn an_order_that_fails_takes_nothing() {
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path());
    store
        .take(&order(vec![part(None, "10.0.0.0/24", None)]))
        .unwrap();
    let mut rival = order(vec![part(None, "10.0.3.0/24", Some("10.0.3.7"))]);
    rival.holder.container = "rival".into();
    store.take(&rival).unwrap();
    let refused = store
        .take(&order(vec![
            part(None, "10.0.0.0/24", None),
            part(None, "10.0.1.0/24", None),
            part(Some("net2"), "10.0.2.0/24", None),
            part(Some("net2"), "10.0.3.0/24", Some("10.0.3.7")),
        ]))
        .unwrap_err();
    assert_eq!(refused.part, Some(3));
    assert!(matches!(refused.error, StoreError::Held { .. }));
    // What was never answered does not rest.
    let mut next = order(vec![part(None, "10.0.1.0/24", None)]);
    next.holder.container = "next".into();
    assert_eq!(addresses(&store.take(&next).unwrap()), ["10.0.1.1"]);
    let holder = &rival.holder;
    let container = &order(Vec::new()).holder.container;
    assert_eq!(
        addresses(&store.held(container, "net1").unwrap()),
        ["10.0.0.1"]
    );
    assert!(store.owned(container, "net2").unwrap().is_empty());
    assert_eq!(store.held(&holder.container, "net1").unwrap().len(), 1);
}

#[test]
fn what_an_earlier_boot_had_is_leased_anew() {
    let place = tempfile::tempdir().unwrap();
    let mut store = open(place.path());
    store.node.machine = "m1".into();
    let mut order = order(vec![
        part(None, "10.0.0.0/24", None),
        part(None, "10.0.1.0/24", None),
    ]);
    order.holder.machine = "m1".into();
    order.holder.boot = "earlier".into();
    store.take(&order).unwrap();
    order.holder.boot.clone_from(&store.node.boot);
    let answered = addresses(&store.take(&order).unwrap());
    let held = store.held(&order.holder.container, "net1").unwrap();
    assert_eq!(addresses(&held), answered);
    for lease in held {
        assert_eq!(
            lease.holder.boot, store.node.boot,
            "reclaim frees {lease:?}"
        );
    }
    assert_eq!(addresses(&store.take(&order).unwrap()), answered, "again");
}

/// As after a runtime was killed and starts the container again, without DEL.
#[test]
fn an_attachment_in_another_netns_keeps_its_addresses_and_records_that_netns() {
    for (path, inode) in [("/run/netns/y", 7), ("/run/netns/x", 8)] {
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path());
        let mut order = order(vec![
            part(None, "10.0.0.0/24", None),
            part(None, "10.0.1.0/24", Some("10.0.1.9")),
            part(None, "10.0.0.0/24", None),
        ]);
        order.holder.boot.clone_from(&store.node.boot);
        order.holder.netns = Some("/run/netns/x".into());
        order.holder.netns_inode = Some(7);
        let mut other = order.clone();
        other.holder.container = "other".into();
        other.parts.truncate(1);
        assert_eq!(addresses(&store.take(&other).unwrap()), ["10.0.0.1"]);
        let answered = addresses(&store.take(&order).unwrap());
        assert_eq!(answered, ["10.0.0.2", "10.0.1.9", "10.0.0.3"]);
        store.give_back("other", "net1", "rail0").unwrap();

        order.holder.netns = Some(path.into());
        order.holder.netns_inode = Some(inode);
        for _ in 0..2 {
            assert_eq!(addresses(&store.take(&order).unwrap()), answered);
            let held = store.held(&order.holder.container, "net1").unwrap();
            assert_eq!(addresses(&held), answered);
            for lease in held {
                assert_eq!(lease.holder, order.holder, "reclaim frees it");
                assert_eq!(lease.generation, 2, "leased once more, not each time");
            }
        }
    }
}

/// The network's range was changed meanwhile, too.
#[test]
fn an_attachment_in_another_netns_keeps_no_address_beyond_its_range() {
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path());
    let mut first = order(vec![part(None, "10.0.0.5-10.0.0.9/24", None)]);
    first.holder.boot.clone_from(&store.node.boot);
    assert_eq!(addresses(&store.take(&first).unwrap()), ["10.0.0.5"]);
    for (range, expected) in [
        ("10.0.0.7-10.0.0.9/24", "10.0.0.7"),
        ("10.0.0.6-10.0.0.9/25", "10.0.0.6"),
    ] {
        let mut next = order(vec![part(None, range, None)]);
        next.holder.boot.clone_from(&store.node.boot);
        next.holder.netns = Some(format!("/run/netns/{expected}"));
        assert_eq!(addresses(&taken(&store, &next)), [expected], "{range}");
    }
}

/// Some records name no namespace, and of another boot's the boot says enough.
#[test]
fn a_record_without_a_netns_is_of_any() {
    let holder = |boot: &str, netns: Option<&str>| Holder {
        boot: boot.into(),
        netns: netns.map(str::to_owned),
        ..previous("n1", None).holder
    };
    let now = holder("b", Some("/x"));
    for (before, another) in [
        (holder("b", Some("/x")), false),
        (holder("b", Some("/y")), true),
        (holder("b", None), false),
        (holder("", Some("/y")), false),
        (holder("a", Some("/y")), false),
    ] {
        assert_eq!(is_of_another_netns(&before, &now), another, "{before:?}");
    }
}

/// What an order is answered, and what the attachment holds then.
fn taken(store: &Store, order: &Order) -> Vec<Lease> {
    let mut taken = store.take(order).unwrap();
    let mut held = store.held(&order.holder.container, "net1").unwrap();
    taken.sort_by_key(|lease| lease.address);
    held.sort_by_key(|lease| lease.address);
    assert_eq!(addresses(&taken), addresses(&held));
    taken
}

#[test]
fn a_part_that_was_changed_is_leased_anew() {
    let first = part(None, "10.0.0.0/24", None);
    let changed = [
        part(None, "10.0.0.0/25", None),
        Part {
            space: Space {
                network_name: Some("blue".into()),
                ..first.space.clone()
            },
            ..first.clone()
        },
        Part {
            space: Space {
                overlapping: false,
                ..first.space.clone()
            },
            ..first.clone()
        },
    ];
    for part in changed {
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path());
        store.take(&order(vec![first.clone()])).unwrap();
        let lease = store.take(&order(vec![part.clone()])).unwrap().remove(0);
        let space = Space {
            network_name: lease.network_name,
            overlapping: lease.overlapping,
        };
        assert_eq!((lease.range, space), (part.range.subnet(), part.space));
    }
}

#[test]
fn an_address_that_is_asked_for_takes_the_place_of_another() {
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path());
    let before = taken(&store, &order(vec![part(None, "10.0.0.0/24", None)]));
    assert_eq!(addresses(&before), ["10.0.0.1"]);
    let asked = order(vec![part(None, "10.0.0.0/24", Some("10.0.0.9"))]);
    let after = taken(&store, &asked);
    assert_eq!(addresses(&after), ["10.0.0.9"]);
    assert_eq!(taken(&store, &asked), after, "it is kept, not leased anew");
}

#[test]
fn an_address_beyond_the_bounds_of_its_range_is_kept_by_the_compatible_profile_only() {
    for (profile, expected) in [
        (Profile::Strict, "10.0.0.7"),
        (Profile::Compatible, "10.0.0.5"),
    ] {
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path());
        let of = |range| Order {
            profile,
            ..order(vec![part(None, range, None)])
        };
        let before = taken(&store, &of("10.0.0.5-10.0.0.9/24"));
        assert_eq!(addresses(&before), ["10.0.0.5"]);
        let after = taken(&store, &of("10.0.0.7-10.0.0.9/24"));
        assert_eq!(addresses(&after), [expected], "{profile:?}");
    }
}

#[test]
fn ranges_in_another_order_keep_their_addresses() {
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path());
    let parts = ["10.0.0.0/24", "10.0.1.0/24"].map(|range| part(None, range, None));
    let mut order = order(parts.to_vec());
    let before = taken(&store, &order);
    order.parts.reverse();
    let after = store.take(&order).unwrap();
    assert_eq!(addresses(&after), ["10.0.1.1", "10.0.0.1"]);
    assert_eq!(addresses(&taken(&store, &order)), addresses(&before));
    assert!(after.iter().all(|lease| lease.generation == 1), "{after:?}");
}

/// Its own DEL may come yet, and must not free what is in use.
#[test]
fn a_lease_of_another_network_is_left_to_that_networks_del() {
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path());
    let first = order(vec![part(None, "10.0.0.0/24", None)]);
    let mut second = first.clone();
    second.holder.network = "rail1".into();
    assert_eq!(addresses(&store.take(&first).unwrap()), ["10.0.0.1"]);
    for _ in 0..2 {
        assert_eq!(addresses(&store.take(&second).unwrap()), ["10.0.0.2"]);
    }
    assert_eq!(addresses(&store.take(&first).unwrap()), ["10.0.0.1"]);
    let container = &first.holder.container;
    store.give_back(container, "net1", "rail0").unwrap();
    let held = store.held(container, "net1").unwrap();
    assert_eq!(addresses(&held), ["10.0.0.2"]);
}

/// An order for the pod `a/b`, by a container.
fn of_pod(container: &str, parts: Vec<Part>) -> Order {
    let mut order = order(parts);
    order.holder.pod = previous("n1", None).holder.pod;
    order.holder.container = container.into();
    order
}

#[test]
fn a_previous_sandboxs_address_beyond_the_bounds_goes_on_in_the_compatible_profile_only() {
    for (profile, range, expected) in [
        (Profile::Strict, "10.0.0.0/24", "10.0.0.5"),
        (Profile::Strict, "10.0.0.7-10.0.0.9/24", "10.0.0.7"),
        (Profile::Compatible, "10.0.0.7-10.0.0.9/24", "10.0.0.5"),
    ] {
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path());
        let asked = part(None, "10.0.0.0/24", Some("10.0.0.5"));
        taken(&store, &of_pod("one", vec![asked]));
        let next = Order {
            profile,
            ..of_pod("two", vec![part(None, range, None)])
        };
        let next = taken(&store, &next);
        assert_eq!(addresses(&next), [expected], "{profile:?} {range}");
    }
}

/// The first sandbox of a pod is still there when the second comes: the third goes by the
/// second.
#[test]
fn the_last_sandbox_of_a_pod_is_the_previous_one() {
    use std::os::unix::fs::MetadataExt;
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path());
    let present = place.path().join("netns");
    std::fs::write(&present, "").unwrap();
    let inode = std::fs::metadata(&present).unwrap().ino();
    let gone = place.path().join("gone");
    let mut taken = Vec::new();
    for (container, netns) in [("one", &present), ("two", &gone), ("three", &gone)] {
        let mut order = of_pod(container, vec![part(None, "10.0.0.0/24", None)]);
        order.holder.boot.clone_from(&store.node.boot);
        order.holder.netns = netns.to_str().map(str::to_owned);
        order.holder.netns_inode = Some(inode);
        taken.extend(addresses(&store.take(&order).unwrap()));
    }
    assert_eq!(taken, ["10.0.0.1", "10.0.0.2", "10.0.0.2"]);
}

#[test]
fn an_address_that_was_released_by_hand_is_leased_anew_below_another() {
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path());
    let order = order(vec![part(None, "10.0.0.0/24", None); 2]);
    assert_eq!(addresses(&taken(&store, &order)), ["10.0.0.1", "10.0.0.2"]);
    let entries = store.entries_at("10.0.0.1".parse().unwrap()).unwrap();
    store.release_entry(&entries[0]).unwrap();
    let again = store.take(&order).unwrap();
    assert_eq!(addresses(&again), ["10.0.0.3", "10.0.0.2"]);
}

/// fsck gives a lease a record where the owner's numbers have a gap.
#[test]
fn a_record_of_two_numbers_gives_each_part_an_address_of_its_own() {
    let place = tempfile::tempdir().unwrap();
    let store = open(place.path());
    let one = part(None, "10.0.0.0/24", None);
    let first = order(vec![one.clone()]);
    store.take(&first).unwrap();
    let (container, interface) = (&first.holder.container, &first.holder.interface);
    let owned = store.owned(container, interface).unwrap().remove(0);
    let next = super::super::name::next_owned(&owned.name).unwrap();
    assert!(owned.dir.link(&owned.name, &owned.dir, &next).unwrap());
    let taken = addresses(&store.take(&order(vec![one.clone(), one])).unwrap());
    assert_eq!(taken, ["10.0.0.1", "10.0.0.2"]);
}
