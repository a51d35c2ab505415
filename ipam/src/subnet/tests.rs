use super::*;
use crate::range::Spec;
use node::policy::Profile;
use node_wire::{Gateway, PerNode};
use proptest::prelude::*;
use serde_json::{Value, json};

pub(super) fn net(text: &str) -> IpNetwork {
    text.parse().unwrap()
}

pub(super) fn holder(node: &str, id: &str) -> Holder {
    Holder {
        node: node.into(),
        id: id.into(),
    }
}

pub(super) fn range(text: &str) -> crate::range::Range {
    let spec = Spec {
        range: text,
        ..Spec::default()
    };
    crate::range::Range::new(&spec, Profile::Strict).unwrap()
}

fn per_node(text: &str, prefix: u8) -> crate::range::Range {
    let gateway = Some(Gateway::First);
    range(text)
        .divided(Some(PerNode { prefix, gateway }))
        .unwrap()
}

pub(super) fn claim(node: &str, id: &str, size: u16, range: &crate::range::Range) -> Change {
    Change::Claim {
        by: holder(node, id),
        what: Wanted::Size {
            size,
            range: range.clone(),
        },
    }
}

pub(super) fn want(node: &str, id: &str, size: u16) -> Want {
    Want {
        node: node.into(),
        id: id.into(),
        size,
        among: ("10.56.3.1".parse().unwrap(), "10.56.3.254".parse().unwrap()),
    }
}

pub(super) fn over() -> Over {
    Over {
        since: "2026-01-01T00:00:00Z".into(),
        why: "node is gone".into(),
    }
}

pub(super) fn empty() -> Document {
    Document::empty("default", "", net("10.56.3.0/24"))
}

/// Makes changes one after the other, each of which must succeed.
fn make(document: &mut Document, changes: &[Change]) -> Vec<IpNetwork> {
    let mut made = Vec::new();
    for one in changes {
        let changed = change(document, one).unwrap_or_else(|why| panic!("{one:?}: {why}"));
        made.extend(changed.piece);
        *document = changed.document.unwrap_or_else(|| document.clone());
    }
    made
}

#[test]
fn a_document_has_the_documented_form() {
    let form = json!({
        "store": "default", "networkName": "", "subnet": "10.56.3.0/24",
        "parts": {
            "10.56.3.0/28": {"node": "gpu-17", "id": "7f3a91"},
            "10.56.3.16/31": {"node": "gpu-18", "id": "90ab02", "wanted": [
                {"node": "gpu-20", "id": "11c0de", "size": 1, "among": ["10.56.3.1", "10.56.3.254"]}]},
            "10.56.3.32/27": {"node": "gpu-19", "id": "77de55",
                              "over": {"since": "2026-01-01T00:00:00Z", "why": "node is gone"}},
            "10.56.3.64/31": {"node": "gpu-20", "id": "5ec0a4", "network": {"gateway": "10.56.3.64"}},
            "10.56.3.96/27": {"node": "gpu-21", "network": {}},
            "10.56.3.128/32": {"reserved": "whereabouts: ml/worker-0"},
        },
    });
    let document: Document = serde_json::from_value(form.clone()).unwrap();
    assert_eq!(document.in_doubt(), BTreeSet::new());
    assert_eq!(serde_json::to_value(&document).unwrap(), form);
    let six = json!({"store": "s", "networkName": "blue", "subnet": "fd00::100/120",
                     "parts": {"fd00::180/121": {"node": "a", "id": "1"}}});
    let document: Document = serde_json::from_value(six.clone()).unwrap();
    assert_eq!(document.in_doubt(), BTreeSet::new());
    assert_eq!(serde_json::to_value(&document).unwrap(), six);
}

#[test]
fn parts_that_overlap_or_do_not_fit_are_in_doubt_and_the_others_are_not() {
    let form: Value = json!({"store": "s", "subnet": "10.56.3.0/24", "parts": {
        "10.56.3.0/28": {"node": "a", "id": "1"}, "10.56.3.8/32": {"node": "b", "id": "2"},
        "10.56.3.17/31": {"node": "a", "id": "3"}, "10.56.4.0/28": {"node": "a", "id": "4"},
        "10.56.3.64/28": {"node": "a", "id": "5", "reserved": "x"}, "10.56.3.96/28": {},
        "10.56.3.128/28": {"node": "a", "id": "6"}}});
    let document: Document = serde_json::from_value(form).unwrap();
    let doubt = document.in_doubt();
    assert_eq!(doubt.len(), 6);
    assert!(document.confirms(&holder("a", "6"), net("10.56.3.130/31")));
    assert!(!document.confirms(&holder("a", "1"), net("10.56.3.0/28")));
    // What is in doubt is not free.
    let claimed = change(&document, &claim("c", "7", 64, &range("10.56.3.0/24"))).unwrap();
    assert_eq!(claimed.piece, Some(net("10.56.3.192/26")));
}

#[test]
fn a_claim_takes_the_smallest_free_piece_with_usable_addresses() {
    let mut document = empty();
    let all = range("10.56.3.0/24");
    let made = make(
        &mut document,
        &[
            claim("a", "1", 2, &all),
            claim("b", "2", 16, &all),
            claim("c", "3", 1, &all),
            claim("d", "4", 128, &all),
            claim("d", "5", 128, &all),
            // What was done is done.
            claim("d", "5", 128, &all),
        ],
    );
    let expected = [
        "10.56.3.0/31",
        "10.56.3.16/28",
        "10.56.3.2/32",
        "10.56.3.128/25",
    ];
    assert_eq!(made[..4], expected.map(net));
    assert_eq!(made[4..], ["10.56.3.64/26"; 2].map(net));
    // The network's address alone is of no use.
    let mut small = empty();
    let made = make(&mut small, &[claim("a", "1", 1, &range("10.56.3.0/29"))]);
    assert_eq!(made, [net("10.56.3.1/32")]);
    let other = change(&small, &claim("a", "2", 1, &range("10.56.4.0/24")));
    assert!(matches!(other, Err(Refused::NoRoom { .. })), "{other:?}");
}

#[test]
fn two_hundred_and_fifty_nodes_share_a_subnet() {
    let mut document = empty();
    let all = range("10.56.3.0/24");
    for node in 0..254 {
        make(
            &mut document,
            &[claim(&format!("n{node}"), &format!("{node}"), 1, &all)],
        );
    }
    let full = change(&document, &claim("x", "x", 4, &all));
    assert!(matches!(full, Err(Refused::NoRoom { .. })));
    let text = serde_json::to_vec(&document).unwrap();
    assert!(text.len() < 50_000, "{}", text.len());
}

#[test]
fn a_network_of_a_node_has_the_asked_length_and_is_never_taken() {
    let mut document = empty();
    let range = per_node("10.56.0.0/16", 29);
    let network = |node: &str, id: &str| Change::Claim {
        by: holder(node, id),
        what: Wanted::Network(range.clone()),
    };
    let made = make(&mut document, &[network("a", "1"), network("b", "2")]);
    assert_eq!(made, ["10.56.3.0/29", "10.56.3.8/29"].map(net));
    let gateway = document.parts[&made[1]].network.clone().unwrap().gateway;
    assert_eq!(gateway, Some("10.56.3.9".parse().unwrap()));
    let marked = Change::Over {
        part: made[0],
        id: Some("1".into()),
        over: over(),
    };
    let asked = Change::Want {
        part: made[0],
        want: want("c", "3", 1),
    };
    let exact = Change::Claim {
        by: holder("c", "3"),
        what: Wanted::Exact(net("10.56.3.3/32")),
    };
    for refused in [marked, asked, exact] {
        let refused = change(&document, &refused).unwrap_err();
        assert_eq!(refused.to_string(), "10.56.3.0/29 is the network of node a");
    }
}

#[test]
fn an_assigned_part_is_taken_up_by_its_node_alone() {
    let mut document = empty();
    let piece = net("10.56.3.16/28");
    let part = Part {
        node: "a".into(),
        network: Some(OwnNetwork::default()),
        ..Part::default()
    };
    let assign = Change::Reserve { piece, part };
    let take_up = |node: &str| Change::NotOver {
        part: piece,
        was: None,
        by: holder(node, "1"),
    };
    make(&mut document, &[assign.clone(), assign]);
    assert!(change(&document, &take_up("b")).is_err());
    make(&mut document, &[take_up("a"), take_up("a")]);
    assert!(document.confirms(&holder("a", "1"), piece));
    let held = change(&document, &claim_exact("b", "10.56.3.20/32"));
    assert!(matches!(held, Err(Refused::Network { .. })));
}

fn claim_exact(node: &str, piece: &str) -> Change {
    Change::Claim {
        by: holder(node, "exact"),
        what: Wanted::Exact(net(piece)),
    }
}

#[test]
fn an_exact_claim_says_who_has_the_address() {
    let mut document = empty();
    let reserved = Part {
        reserved: Some("whereabouts: ml/worker-0".into()),
        ..Part::default()
    };
    let reserve = Change::Reserve {
        piece: net("10.56.3.128/32"),
        part: reserved.clone(),
    };
    make(
        &mut document,
        &[claim("a", "1", 16, &range("10.56.3.0/24")), reserve],
    );
    for (piece, why) in [
        ("10.56.3.5/32", "10.56.3.0/28 is a part of node a"),
        (
            "10.56.3.128/32",
            "10.56.3.128/32 is reserved: whereabouts: ml/worker-0",
        ),
        (
            "10.56.4.1/32",
            "10.56.4.1/32 is not a piece of 10.56.3.0/24",
        ),
    ] {
        let refused = change(&document, &claim_exact("b", piece)).unwrap_err();
        assert_eq!(refused.to_string(), why);
    }
    let unreserve = Change::Unreserve {
        piece: net("10.56.3.128/32"),
        part: reserved,
    };
    make(
        &mut document,
        &[
            unreserve.clone(),
            unreserve,
            claim_exact("b", "10.56.3.128/32"),
        ],
    );
}

#[test]
fn a_part_is_cut_and_a_piece_of_it_is_handed_over() {
    let mut document = empty();
    let whole = net("10.56.3.0/28");
    let (first, second) = (want("b", "2", 1), want("c", "3", 4));
    let ask = |want: &Want| Change::Want {
        part: whole,
        want: want.clone(),
    };
    make(
        &mut document,
        &[
            claim("a", "1", 16, &range("10.56.3.0/24")),
            ask(&first),
            ask(&first),
            ask(&second),
        ],
    );
    let keep = ["10.56.3.0/30", "10.56.3.8/29"].map(net).to_vec();
    let hand_over = Change::Give {
        by: holder("a", "1"),
        keep: keep.clone(),
        to: Some(Handover {
            pieces: vec![net("10.56.3.4/32")],
            want: first.clone(),
        }),
    };
    make(&mut document, &[hand_over.clone(), hand_over]);
    let owners: Vec<String> = document
        .parts
        .iter()
        .map(|(piece, part)| format!("{piece} {} {}", part.node, part.id.as_ref().unwrap()))
        .collect();
    assert_eq!(
        owners,
        ["10.56.3.0/30 a 1", "10.56.3.4/32 b 2", "10.56.3.8/29 a 1"]
    );
    let left = std::slice::from_ref(&second);
    assert_eq!(document.parts[&keep[1]].wanted, left);
    // A piece for whom nobody asks, or too large a one, is not handed over.
    let hand_over = |pieces: &[&str], want: &Want| Change::Give {
        by: holder("a", "1"),
        keep: vec![net("10.56.3.0/30")],
        to: Some(Handover {
            pieces: pieces.iter().copied().map(net).collect(),
            want: want.clone(),
        }),
    };
    for refused in [
        hand_over(&["10.56.3.8/30"], &want("d", "4", 4)),
        hand_over(&["10.56.3.8/29"], &second),
        hand_over(&["10.56.3.8/30", "10.56.3.12/32"], &second),
        hand_over(&["10.56.3.8/31", "10.56.3.16/31"], &second),
    ] {
        let refused = change(&document, &refused);
        assert!(matches!(refused, Err(Refused::Stale { .. })), "{refused:?}");
    }
    for clash in [
        ["10.56.3.8/31", "10.56.3.9/32"],
        ["10.56.3.0/31", "10.56.3.8/31"],
    ] {
        let refused = change(&document, &hand_over(&clash, &second));
        assert!(
            matches!(refused, Err(Refused::NotAPiece { .. })),
            "{refused:?}"
        );
    }
    let pieces = ["10.56.3.8/31", "10.56.3.12/31"];
    let handed = change(&document, &hand_over(&pieces, &second)).unwrap();
    let handed = handed.document.unwrap();
    assert_eq!(handed.pieces_of(&holder("c", "3")), pieces.map(net));
    assert!(handed.parts.values().all(|part| part.wanted.is_empty()));
    let all = Change::Give {
        by: holder("a", "1"),
        keep: Vec::new(),
        to: None,
    };
    make(&mut document, &[all.clone(), all]);
    assert_eq!(document.parts.len(), 1);
}

#[test]
fn a_marked_part_is_kept_by_its_node_or_taken_by_another() {
    let mut document = empty();
    let part = net("10.56.3.0/30");
    let mark = |id: &str| Change::Over {
        part,
        id: Some(id.into()),
        over: over(),
    };
    let take = |id: &str| Change::Take {
        part,
        id: Some(id.into()),
        by: holder("b", "9"),
    };
    make(&mut document, &[claim("a", "1", 4, &range("10.56.3.0/24"))]);
    assert!(change(&document, &take("1")).is_err(), "it is not marked");
    make(&mut document, &[mark("1"), mark("1")]);
    assert!(!document.confirms(&holder("a", "1"), part));
    let keep = Change::NotOver {
        part,
        was: Some("1".into()),
        by: holder("a", "2"),
    };
    make(&mut document, &[keep.clone(), keep]);
    assert!(document.confirms(&holder("a", "2"), part));
    assert!(change(&document, &take("1")).is_err(), "it changed");
    assert!(change(&document, &mark("1")).is_err(), "it changed");
    make(&mut document, &[mark("2"), take("2"), take("2")]);
    assert!(document.confirms(&holder("b", "9"), part));
}

#[test]
fn at_most_four_wants_stand_on_a_part_one_of_each_node() {
    let mut document = empty();
    let part = net("10.56.3.0/32");
    make(&mut document, &[claim_exact("a", "10.56.3.0/32")]);
    for node in ["b", "c", "d", "e", "b"] {
        let want = want(node, &format!("of-{node}"), 1);
        make(&mut document, &[Change::Want { part, want }]);
    }
    let want = want("f", "6", 1);
    let crowded = change(&document, &Change::Want { part, want });
    assert_eq!(crowded, Err(Refused::Crowded { part }));
    let ids = ["of-b", "of-c", "of-d", "of-e"].map(String::from).to_vec();
    make(&mut document, &[Change::Unwant { ids }]);
    assert!(document.parts[&part].wanted.is_empty());
}

#[test]
fn the_size_of_a_claim_follows_from_range_and_nodes() {
    for (usable, nodes, own, size) in [
        (6, None, 0, 1),
        (62, None, 0, 1),
        (254, None, 0, 2),
        (65_534, None, 0, 16),
        (65_534, Some(5_000), 0, 4),
        (254, Some(250), 0, 1),
        (254, None, 2, 2),
        (254, None, 3, 2),
        (65_534, Some(5_000), 4, 4),
        (65_534, None, 300, 64),
        (0, Some(0), 0, 1),
        (u128::MAX, Some(u64::MAX), 0, 16),
    ] {
        assert_eq!(
            claim_size(usable, nodes, own),
            size,
            "{usable} {nodes:?} {own}"
        );
    }
}

#[test]
fn a_node_looks_into_each_subnet_once_from_a_start_of_its_own() {
    for (text, count) in [
        ("10.56.3.0/29", 1),
        ("10.56.0.0/22", 4),
        ("10.56.3.200-10.56.5.10/16", 3),
        ("10.0.0.0/8", 4096),
        ("fd00::/64", 4096),
    ] {
        let all: Vec<IpNetwork> = subnets(&range(text), "gpu-17", 0).collect();
        let distinct: BTreeSet<&IpNetwork> = all.iter().collect();
        assert_eq!((all.len(), distinct.len()), (count, count), "{text}");
        let span = range(text);
        assert!(
            all.iter().all(|subnet| span.within(&[*subnet]).size() > 0),
            "{text}"
        );
    }
    let first = |node: &str| subnets(&range("10.56.0.0/16"), node, 0).next();
    assert_ne!(first("gpu-17"), first("gpu-18"));
}

#[test]
fn kept_addresses_are_covered_by_the_fewest_pieces() {
    let keep = |address: IpAddr| !["10.56.3.6", "10.56.3.7"].contains(&&*address.to_string());
    let covered = piece::cover(net("10.56.3.0/28"), &keep);
    assert_eq!(
        covered,
        ["10.56.3.0/30", "10.56.3.4/31", "10.56.3.8/29"].map(net)
    );
    assert_eq!(piece::cover(net("10.56.3.0/28"), &|_| false), []);
}

/// A change of one of three nodes, of pieces and IDs of which there are few.
fn any_change() -> impl Strategy<Value = Change> {
    let piece = || {
        (0u8..16, 28u8..=32).prop_map(|(at, prefix)| {
            let address = IpAddr::from([10, 56, 3, at]);
            network_around(address, prefix).unwrap()
        })
    };
    let id = || (0u8..6).prop_map(|id| id.to_string());
    let by = || (0u8..3, id()).prop_map(|(node, id)| holder(&format!("n{node}"), &id));
    let want = || (by(), 1u16..5).prop_map(|(by, size)| want(&by.node, &by.id, size));
    let network = proptest::bool::ANY.prop_map(|is| is.then(OwnNetwork::default));
    prop_oneof![
        4 => (by(), 1u16..9).prop_map(|(by, size)| Change::Claim {
            by,
            what: Wanted::Size { size, range: range("10.56.3.0/28") },
        }),
        2 => (by(), piece()).prop_map(|(by, piece)| Change::Claim { by, what: Wanted::Exact(piece) }),
        1 => (by()).prop_map(|by| Change::Claim { by, what: Wanted::Network(per_node("10.56.3.0/28", 30)) }),
        3 => (by(), proptest::collection::vec(piece(), 0..3), proptest::option::of((proptest::collection::vec(piece(), 0..3), want())))
            .prop_map(|(by, keep, to)| Change::Give {
                by, keep, to: to.map(|(pieces, want)| Handover { pieces, want }),
            }),
        2 => (piece(), want()).prop_map(|(part, want)| Change::Want { part, want }),
        1 => proptest::collection::vec(id(), 0..3).prop_map(|ids| Change::Unwant { ids }),
        2 => (piece(), id()).prop_map(|(part, id)| Change::Over { part, id: Some(id), over: over() }),
        2 => (piece(), id(), by()).prop_map(|(part, id, by)| Change::NotOver { part, was: Some(id), by }),
        2 => (piece(), id(), by()).prop_map(|(part, id, by)| Change::Take { part, id: Some(id), by }),
        1 => (piece(), "n[0-2]", network).prop_map(|(piece, node, network)| Change::Reserve {
            piece, part: Part { node, network, ..Part::default() },
        }),
    ]
}

proptest! {
    #[test]
    fn parts_are_disjoint_after_any_changes_and_what_is_done_is_done_once(
        changes in proptest::collection::vec(any_change(), 1..40),
    ) {
        let mut document = empty();
        for one in &changes {
            let before = document.clone();
            let Ok(changed) = change(&before, one) else { continue };
            document = changed.document.unwrap_or(before.clone());
            prop_assert!(document.in_doubt().is_empty(), "{one:?}\n{before:?}\n{document:?}");
            // An ID is one node's, and who has a part by it asks for no other one.
            for part in document.parts.values() {
                prop_assert!(part.wanted.len() <= MAX_WANTS);
                let same = |other: &&Part| other.id.is_some() && other.id == part.id;
                prop_assert!(document.parts.values().filter(same).all(|other| other.node == part.node));
                prop_assert!(part.wanted.iter().all(|want| document.by_id(&want.id).is_none()), "{document:?}");
            }
            // Its answer was lost: made again, it changes nothing.
            if let Ok(again) = change(&document, one) {
                prop_assert!(again.document.is_none(), "{one:?}\n{document:?}\n{again:?}");
            }
            // A part goes from its node by that node's word, or after a mark.
            for (piece, part) in &before.parts {
                let kept = document.parts.iter().any(|(whole, now)| now.node == part.node && piece::covers(*whole, *piece));
                let by_word = matches!(one, Change::Give { by, .. } if by.node == part.node);
                let after_mark = matches!(one, Change::Take { .. }) && part.over.is_some() && part.network.is_none();
                prop_assert!(kept || by_word || after_mark, "{one:?} {piece}");
            }
        }
    }

    #[test]
    fn a_document_is_read_as_it_was_written(changes in proptest::collection::vec(any_change(), 1..20)) {
        let mut document = empty();
        for one in &changes {
            if let Ok(Changed { document: Some(next), .. }) = change(&document, one) { document = next; }
        }
        let text = serde_json::to_vec(&document).unwrap();
        prop_assert_eq!(serde_json::from_slice::<Document>(&text).unwrap(), document);
    }
}

#[test]
fn what_cannot_be_read_of_a_document_does_not_hide_the_rest() {
    let text = r#"{"store": "s", "subnet": "10.0.0.0/24", "parts": {
        "10.0.0.0/28": {"node": "a", "id": "a-1", "wanted": [
            {"node": "b", "id": "b-1", "size": 1, "among": ["x", "y"]},
            {"node": "c", "id": "c-1", "size": 1, "among": ["10.0.0.1", "10.0.0.2"]}]},
        "10.0.0.16/28": {"node": "a", "id": "a-2", "network": {"gateway": "x"}},
        "999.0.0.0/28": {"node": "a", "id": "a-3"},
        "10.9.0.0/28": {"node": "a", "id": "a-4"}}}"#;
    let document: Document = serde_json::from_str(text).unwrap();
    let piece = |text: &str| text.parse::<IpNetwork>().unwrap();
    let first = &document.parts[&piece("10.0.0.0/28")];
    let wanted: Vec<&str> = first.wanted.iter().map(|want| &*want.node).collect();
    assert_eq!((&*first.node, wanted), ("a", vec!["c"]));
    let second = &document.parts[&piece("10.0.0.16/28")];
    assert!(second.node.is_empty() && second.reserved.is_some());
    assert_eq!(document.parts.len(), 3);
    assert_eq!(document.in_doubt(), [piece("10.9.0.0/28")].into());
}
