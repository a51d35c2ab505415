use super::*;

#[test]
fn each_node_is_asked_before_one_is_asked_twice() {
    let candidate = |part: &str, node: &str| {
        let part: IpNetwork = part.parse().unwrap();
        Candidate {
            subnet: "10.0.0.0/24".parse().unwrap(),
            part,
            node: node.into(),
            among: (part.network(), part.broadcast()),
        }
    };
    let mut all: Vec<Candidate> = (0..8)
        .map(|number| candidate(&format!("10.0.0.{}/29", 8 * number), "a"))
        .collect();
    all.insert(0, candidate("10.0.0.200/32", "b"));
    all.push(candidate("10.0.0.128/28", "c"));
    order(&mut all, "n");
    let nodes: Vec<&str> = all.iter().map(|one| &*one.node).take(4).collect();
    assert_eq!(nodes, ["c", "a", "b", "a"]);
}

fn want(size: u16, among: (&str, &str)) -> Want {
    Want {
        node: "b".into(),
        id: "b-1".into(),
        size,
        among: (among.0.parse().unwrap(), among.1.parse().unwrap()),
    }
}

fn busy_at(addresses: &[&str]) -> BTreeMap<IpAddr, Busy> {
    let leased = |text: &&str| (text.parse().unwrap(), Busy::Leased);
    addresses.iter().map(leased).collect()
}

#[test]
fn a_piece_that_is_handed_over_helps_and_has_no_address_in_use() {
    let of: IpNetwork = "10.0.0.8/29".parse().unwrap();
    let all = ("10.0.0.0", "10.0.0.255");
    for (size, among, busy, piece) in [
        (4, all, &[][..], Some("10.0.0.8/30")),
        (64, all, &[], Some("10.0.0.8/29")),
        (64, all, &["10.0.0.9"], Some("10.0.0.12/30")),
        (
            3,
            all,
            &["10.0.0.9", "10.0.0.12", "10.0.0.14"],
            Some("10.0.0.10/31"),
        ),
        (
            4,
            ("10.0.0.15", "10.0.0.15"),
            &["10.0.0.14"],
            Some("10.0.0.15/32"),
        ),
        (4, ("10.0.0.16", "10.0.0.255"), &[], None),
        (0, all, &["10.0.0.8"], Some("10.0.0.9/32")),
    ] {
        let found = piece_for(&want(size, among), of, size.max(1).into(), &busy_at(busy));
        assert_eq!(
            found,
            piece.map(|text| text.parse().unwrap()),
            "{size} {busy:?}"
        );
    }
}

#[test]
fn who_asks_gets_several_pieces_up_to_half_of_what_is_free() {
    let all = ("10.0.0.0", "10.0.0.255");
    // Every second address of a /28 is in use.
    let odd: Vec<String> = (1..16).step_by(2).map(|n| format!("10.0.0.{n}")).collect();
    let odd: Vec<&str> = odd.iter().map(String::as_str).collect();
    for (size, own, busy, given, left) in [
        (64, &["10.0.0.0/28"][..], &odd[..], 4, 12),
        (3, &["10.0.0.0/28"], &odd, 3, 13),
        (1, &["10.0.0.0/28"], &[], 1, 15),
        // A whole piece is not cut for half of what is free.
        (64, &["10.0.0.0/28"], &[], 16, 0),
        (64, &["10.0.0.0/30", "10.0.0.8/30"], &["10.0.0.0"], 4, 4),
        (
            4,
            &["10.0.0.0/30"],
            &["10.0.0.0", "10.0.0.1", "10.0.0.2", "10.0.0.3"],
            0,
            4,
        ),
    ] {
        let before: Vec<IpNetwork> = own.iter().map(|text| text.parse().unwrap()).collect();
        let part = |piece: &IpNetwork| (*piece, OwnedPart::default());
        let (mut own, busy) = (before.iter().map(part).collect(), busy_at(busy));
        let pieces = pieces_for(&want(size, all), &mut own, &busy, &|_| false);
        let pieces: Vec<IpNetwork> = pieces.into_values().flatten().collect();
        let own: Vec<IpNetwork> = own.into_keys().collect();
        let of = |pieces: &[IpNetwork]| pieces.iter().map(|one| piece::size(*one)).sum::<usize>();
        assert_eq!((of(&pieces), of(&own)), (given, left), "{size} {before:?}");
        let is_busy = |piece: &IpNetwork| busy.keys().any(|address| piece.contains(*address));
        assert!(!pieces.iter().any(is_busy), "{pieces:?}");
        let all: Vec<IpNetwork> = pieces.iter().chain(&own).copied().collect();
        let clashes = |(at, one): (usize, &IpNetwork)| {
            all.iter().skip(at + 1).any(|other| overlap(*one, *other))
        };
        assert!(!all.iter().enumerate().any(clashes), "{all:?}");
    }
}

#[test]
fn addresses_cool_down_for_their_time_since_the_boot() {
    let seconds = Duration::from_secs;
    let at = |text: &str| text.parse::<IpAddr>().unwrap();
    let uses = [
        (at("10.0.0.1"), Use::Leased),
        (at("10.0.0.2"), Use::Freed(seconds(70))),
        (at("10.0.0.3"), Use::Freed(seconds(69))),
    ];
    let busy = busy(&uses, seconds(99), seconds(30));
    let expected = [
        (at("10.0.0.1"), Busy::Leased),
        (at("10.0.0.2"), Busy::CoolingDown),
    ];
    assert_eq!(busy, BTreeMap::from(expected));
}

#[test]
fn pauses_double_up_to_a_minute_and_backoffs_up_to_ten_seconds() {
    let pauses = [1, 2, 3, 7, 100, u32::MAX].map(pause);
    let expected = [1, 2, 4, 60, 60, 60].map(Duration::from_secs);
    assert_eq!(pauses, expected);
    for (lost, most) in [(0, 1), (1, 2), (3, 8), (4, 10), (u32::MAX, 10)] {
        assert!(
            backoff(lost, u64::MAX) < Duration::from_secs(most),
            "{lost}"
        );
        assert_eq!(backoff(lost, 999), Duration::from_millis(999));
    }
}

fn document(parts: &[(&str, Part)]) -> Document {
    let mut document = Document::empty("s", "", "10.0.0.0/24".parse().unwrap());
    let parts = parts
        .iter()
        .map(|(piece, part)| (piece.parse().unwrap(), part.clone()));
    document.parts.extend(parts);
    document
}

#[test]
fn a_want_that_stood_for_two_minutes_is_removed_by_the_owner() {
    let node = ThisNode {
        name: "a".into(),
        boot: "b1".into(),
    };
    let holder = Holder {
        node: "a".into(),
        id: "a-1".into(),
    };
    let mut part = Part::of(&holder);
    part.wanted.push(want(1, ("10.0.0.1", "10.0.0.1")));
    let document = document(&[("10.0.0.1/32", part)]);
    let mut owned = Owned::default();
    let own = OwnedPart {
        id: "a-1".into(),
        ..OwnedPart::default()
    };
    owned.parts.insert("10.0.0.1/32".parse().unwrap(), own);
    let busy = busy_at(&["10.0.0.1"]);
    let (mut history, begun) = (History::default(), Instant::now());
    let mut ids = Ids {
        claimant: "a".into(),
        next: 7,
    };
    let mut at = |now| {
        let inputs = Inputs {
            node: &node,
            document: &document,
            owned: &owned,
            busy: &busy,
            pending: &BTreeSet::new(),
            in_use: &[],
            now,
            time: "",
            mode: Mode::Usual,
        };
        decide(&inputs, &mut history, &mut ids)
    };
    let first = at(begun);
    assert!(first.changes.is_empty() && first.is_asked, "{first:?}");
    assert_eq!(first.parts.values().next().unwrap().boot, "b1");
    assert!(at(begun + WANT_LIMIT / 2).changes.is_empty());
    let ids = vec!["b-1".to_owned()];
    assert_eq!(at(begun + WANT_LIMIT).changes, [Change::Unwant { ids }]);
}

#[test]
fn a_node_gives_of_all_its_parts_whichever_was_asked() {
    let node = ThisNode {
        name: "a".into(),
        boot: "b1".into(),
    };
    let holder = |id: String| Holder {
        node: "a".into(),
        id,
    };
    let (mut parts, mut owned) = (Vec::new(), Owned::default());
    let pieces: Vec<String> = (1..=5).map(|n| format!("10.0.0.{n}/32")).collect();
    for (n, piece) in pieces.iter().enumerate() {
        let own = OwnedPart {
            id: format!("a-{n}"),
            ..OwnedPart::default()
        };
        parts.push((piece.as_str(), Part::of(&holder(own.id.clone()))));
        owned.parts.insert(piece.parse().unwrap(), own);
    }
    // The one that is asked has no free address, and the last one is of no use.
    parts[0].1.wanted.push(want(8, ("10.0.0.1", "10.0.0.4")));
    let mut document = document(&parts);
    let (read, busy, none) = (document.clone(), busy_at(&["10.0.0.1"]), BTreeSet::new());
    let begun = Instant::now();
    let inputs = |now| Inputs {
        node: &node,
        document: &read,
        owned: &owned,
        busy: &busy,
        pending: &none,
        in_use: &[],
        now,
        time: "",
        mode: Mode::Usual,
    };
    let mut ids = Ids {
        claimant: "a".into(),
        next: 7,
    };
    // An ADD may wait for what has just come.
    let mut history = History::default();
    let new = decide(&inputs(begun), &mut history, &mut ids);
    assert!(new.is_asked && new.changes.is_empty(), "{new:?}");
    let decision = decide(&inputs(begun + NEW_REST), &mut history, &mut ids);
    for one in &decision.changes {
        let changed = ipam::subnet::change(&document, one).unwrap();
        document = changed.document.unwrap();
    }
    let of_b = document.pieces_of(&Holder {
        node: "b".into(),
        id: "b-1".into(),
    });
    assert_eq!(
        of_b.len(),
        2,
        "half of what is free, rounded up: {document:?}"
    );
    assert_eq!(document.parts.len(), 5);
    let kept: Vec<IpNetwork> = decision.parts.keys().copied().collect();
    assert!(kept.iter().all(|piece| !of_b.contains(piece)), "{kept:?}");
    assert_eq!(kept.len(), 3);
}

/// Parts of node a, all owned, each with an ID and the wants that stand on it.
fn owned_parts(parts: &[(&str, &str, Vec<Want>)]) -> (Document, Owned) {
    let (mut entries, mut owned) = (Vec::new(), Owned::default());
    for (piece, id, wanted) in parts {
        let own = OwnedPart {
            id: (*id).to_owned(),
            boot: "b1".into(),
            ..OwnedPart::default()
        };
        owned.parts.insert(piece.parse().unwrap(), own);
        let mut part = Part::of(&Holder {
            node: "a".into(),
            id: (*id).to_owned(),
        });
        part.wanted.clone_from(wanted);
        entries.push((*piece, part));
    }
    (document(&entries), owned)
}

/// What node a decides when nothing of it is new any more.
fn decided(document: &Document, owned: &Owned) -> Decision {
    let node = ThisNode {
        name: "a".into(),
        boot: "b1".into(),
    };
    let mut ids = Ids {
        claimant: "a".into(),
        next: 7,
    };
    let (mut history, begun) = (History::default(), Instant::now());
    let mut at = |now| {
        let inputs = Inputs {
            node: &node,
            document,
            owned,
            busy: &BTreeMap::new(),
            pending: &BTreeSet::new(),
            in_use: &[],
            now,
            time: "",
            mode: Mode::Usual,
        };
        decide(&inputs, &mut history, &mut ids)
    };
    at(begun);
    at(begun + NEW_REST)
}

/// The document afterwards, if every change can be made.
fn made(mut document: Document, changes: &[Change]) -> Document {
    for one in changes {
        let changed = ipam::subnet::change(&document, one).unwrap();
        document = changed.document.unwrap();
    }
    document
}

#[test]
fn each_who_asks_gets_a_piece_whichever_part_it_asked() {
    let of = |node: &str| Want {
        node: node.into(),
        id: format!("{node}-1"),
        ..want(1, ("10.0.0.1", "10.0.0.2"))
    };
    let parts = [
        ("10.0.0.1/32", "a-1", vec![of("c")]),
        ("10.0.0.2/32", "a-2", vec![of("b")]),
    ];
    let (document, owned) = owned_parts(&parts);
    let after = made(document.clone(), &decided(&document, &owned).changes);
    let owners: BTreeSet<&str> = after.parts.values().map(|one| &*one.node).collect();
    assert_eq!(owners, BTreeSet::from(["b", "c"]));
}

#[test]
fn who_asks_in_two_runs_of_its_range_is_served_once() {
    let parts = [
        (
            "10.0.0.1/32",
            "a-1",
            vec![want(1, ("10.0.0.1", "10.0.0.2"))],
        ),
        (
            "10.0.0.9/32",
            "a-2",
            vec![want(1, ("10.0.0.8", "10.0.0.9"))],
        ),
    ];
    let (document, owned) = owned_parts(&parts);
    let after = made(document.clone(), &decided(&document, &owned).changes);
    let of_b = after.parts.values().filter(|part| part.node == "b");
    assert_eq!((of_b.count(), after.parts.len()), (1, 2));
    assert!(after.parts.values().all(|part| part.wanted.is_empty()));
}

#[test]
fn what_has_one_id_with_a_part_in_doubt_is_not_given_away() {
    let parts = [
        ("10.0.0.0/29", "a-1", Vec::new()),
        (
            "10.0.0.8/32",
            "a-1",
            vec![want(1, ("10.0.0.1", "10.0.0.8"))],
        ),
    ];
    let (mut document, owned) = owned_parts(&parts);
    let part = Part::of(&Holder {
        node: "b".into(),
        id: "b-9".into(),
    });
    document.parts.insert("10.0.0.1/32".parse().unwrap(), part);
    let decision = decided(&document, &owned);
    assert_eq!(decision.changes, []);
    let kept: Vec<String> = decision.parts.keys().map(ToString::to_string).collect();
    assert_eq!(kept, ["10.0.0.8/32"]);
}

#[test]
fn a_part_that_another_overlaps_is_neither_owned_nor_given_back() {
    let node = ThisNode {
        name: "a".into(),
        boot: "b1".into(),
    };
    let part = |node: &str, id: &str| {
        Part::of(&Holder {
            node: node.into(),
            id: id.into(),
        })
    };
    let document = document(&[
        ("10.0.0.0/28", part("a", "a-1")),
        ("10.0.0.1/32", part("b", "b-1")),
    ]);
    let mut owned = Owned::default();
    let own = OwnedPart {
        id: "a-1".into(),
        boot: "b1".into(),
        ..OwnedPart::default()
    };
    owned.parts.insert("10.0.0.0/28".parse().unwrap(), own);
    let mut ids = Ids {
        claimant: "a".into(),
        next: 7,
    };
    let inputs = Inputs {
        node: &node,
        document: &document,
        owned: &owned,
        busy: &busy_at(&["10.0.0.2"]),
        pending: &BTreeSet::new(),
        in_use: &[],
        now: Instant::now(),
        time: "",
        mode: Mode::Usual,
    };
    let decision = decide(&inputs, &mut History::default(), &mut ids);
    assert_eq!((decision.parts, decision.changes), Default::default());
}
