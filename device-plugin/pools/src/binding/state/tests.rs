use kubelet_api::client::Held;

use super::*;
use crate::binding::record::Since;
use crate::checkpoint::Owners;

const SLOT: &str = "slot_3e71787e_0";

fn pod(name: &str, uid: &str) -> Pod {
    Pod {
        namespace: "ml".into(),
        name: name.into(),
        uid: Some(uid.into()),
    }
}

fn binding() -> Binding {
    Binding {
        resource: "rdma/nic".into(),
        created: 100,
        stage: Stage::Started,
        since: Since(Some(Instant::now())),
        ..Binding::new(
            &"0000:3b:00.0".parse().unwrap(),
            SLOT,
            &pod("a", "u1"),
            Some("s1"),
        )
    }
}

/// What a kubelet lists that gave the slot to this pod, if to any.
fn list(holder: Option<(&str, &str)>, at: Instant) -> Holdings {
    let held = holder.map(|(namespace, pod)| Held {
        namespace: namespace.into(),
        pod: pod.into(),
        container: "main".into(),
        resource: "rdma/nic".into(),
        ids: vec![SLOT.into()],
    });
    Holdings::listed(held.into_iter().collect(), at)
}

/// A minute after the binding, by a list of that time.
fn evidence(one: &Binding, holder: Option<(&str, &str)>, processes: Processes) -> Evidence {
    let now = one.since.0.unwrap() + 2 * ADD_TIMEOUT;
    let all = BTreeMap::from([(one.hca.clone(), one.clone())]);
    Evidence {
        bindings: Arc::new(Bindings {
            all,
            ..Bindings::default()
        }),
        attached: Attached::default(),
        held: Some(Arc::new(list(holder, now))),
        allocated: BTreeMap::new(),
        processes: BTreeMap::from([(one.hca.clone(), processes)]),
        asker: None,
        cgroup: None,
        now,
        seconds: 1000,
    }
}

fn is_over(one: &Binding, evidence: &Evidence) -> bool {
    matches!(binding_state(one, evidence), State::Over(_))
}

fn is_in_use(one: &Binding, evidence: &Evidence) -> bool {
    matches!(binding_state(one, evidence), State::InUse(_))
}

#[test]
fn a_binding_is_over_when_list_and_cgroup_say_so() {
    use Processes::{Ended, Running, Unknown};
    let own = Some(("ml", "a"));
    for (holder, processes, is_expected) in [
        (own, Running, false),
        // A container is restarted, or the pod has no process yet.
        (own, Ended, false),
        (own, Unknown, false),
        (Some(("", "u1")), Ended, false),
        (None, Ended, true),
        (Some(("ml", "b")), Ended, true),
        (Some(("", "u2")), Ended, true),
        // Deleted by force: the list is silent, and the containers run.
        (None, Running, false),
        (Some(("ml", "b")), Running, false),
        // One list alone is not enough.
        (None, Unknown, false),
        (Some(("ml", "b")), Unknown, false),
    ] {
        let one = binding();
        let evidence = evidence(&one, holder, processes);
        assert_eq!(
            is_over(&one, &evidence),
            is_expected,
            "{holder:?} {processes:?}"
        );
    }
}

#[test]
fn what_the_journal_has_is_in_use_whatever_else_is_said() {
    let one = binding();
    let mut evidence = evidence(&one, None, Processes::Ended);
    let attached = |sandbox: &str, hca: &str| Attached {
        slots: BTreeSet::from([(sandbox.to_owned(), hca.parse().unwrap())]),
        ..Attached::default()
    };
    let unreadable = Attached {
        unreadable: BTreeSet::from(["s1".to_owned()]),
        ..Attached::default()
    };
    for (journal, is_expected) in [
        (attached("s1", "0000:3b:00.0"), true),
        (unreadable, true),
        (attached("s1", "0000:3b:00.1"), false),
        (attached("s2", "0000:3b:00.0"), false),
    ] {
        evidence.attached = journal;
        assert_eq!(
            is_in_use(&one, &evidence),
            is_expected,
            "{:?}",
            evidence.attached
        );
    }
}

#[test]
fn without_a_cgroup_two_lists_decide() {
    let one = binding();
    let mut evidence = evidence(&one, None, Processes::Unknown);
    assert!(matches!(binding_state(&one, &evidence), State::Unknown(_)));
    let note = |evidence: &mut Evidence| {
        let ended = ended(evidence);
        evidence.bindings = Arc::new(Bindings {
            ended,
            ..Bindings::clone(&evidence.bindings)
        });
    };
    note(&mut evidence);
    // The same list again, and one that came too soon.
    assert!(!is_over(&one, &evidence));
    let later = |by: Duration| Some(Arc::new(list(None, evidence.now + by)));
    let (soon, late) = (later(Duration::from_secs(14)), later(LIST_INTERVAL));
    let mut again = Evidence {
        held: soon,
        ..evidence.clone()
    };
    assert!(!is_over(&one, &again));
    // The first one counts.
    note(&mut again);
    let again = Evidence {
        held: late,
        ..again
    };
    assert!(is_over(&one, &again));
    // It was bound anew, or the pod was listed in between.
    let anew = Binding {
        since: Since(Some(evidence.now + Duration::from_secs(1))),
        ..one.clone()
    };
    assert!(!is_over(&anew, &again));
    evidence.held = Some(Arc::new(list(Some(("ml", "a")), evidence.now)));
    assert_eq!(ended(&evidence), BTreeMap::new());
}

#[test]
fn a_list_that_is_older_than_the_binding_says_nothing() {
    let one = binding();
    let mut evidence = evidence(&one, None, Processes::Ended);
    for held in [None, Some(Arc::new(list(None, one.since.0.unwrap())))] {
        evidence.held = held;
        assert!(matches!(binding_state(&one, &evidence), State::Unknown(_)));
        assert_eq!(why_ended(&one, &evidence), None);
    }
}

#[test]
fn an_add_has_time_to_start_its_pod() {
    let one = Binding {
        stage: Stage::Bound,
        ..binding()
    };
    let mut evidence = evidence(&one, None, Processes::Ended);
    assert!(is_over(&one, &evidence));
    evidence.now = one.since.0.unwrap() + ADD_TIMEOUT / 2;
    assert!(!is_over(&one, &evidence));
}

#[test]
fn a_pod_of_the_same_name_with_another_uid_is_another_one() {
    let one = binding();
    for (uid, is_expected) in [("u1", false), ("u2", true)] {
        let mut evidence = evidence(&one, None, Processes::Ended);
        let owners = Owners::of(&[(uid, "rdma/nic", SLOT)]);
        let list = list(Some(("ml", "a")), evidence.now).with_owners(owners);
        evidence.held = Some(Arc::new(list));
        assert_eq!(is_over(&one, &evidence), is_expected, "{uid}");
    }
}

#[test]
fn the_asker_has_its_slots_by_the_kubelets_word() {
    let one = binding();
    let mut evidence = evidence(&one, Some(("ml", "a")), Processes::Ended);
    let mut asked = |pod: Pod, sandbox: Option<&str>| {
        evidence.asker = Some(Asker {
            pod,
            sandbox: sandbox.map(str::to_owned),
            slots: BTreeSet::from([SLOT.to_owned()]),
        });
        binding_state(&one, &evidence)
    };
    assert!(matches!(asked(pod("a", "u1"), Some("s1")), State::InUse(_)));
    assert!(matches!(asked(pod("a", "u1"), None), State::InUse(_)));
    assert_eq!(asked(pod("a", "u1"), Some("s2")), State::Over(NEW_SANDBOX));
    // The checkpoint was not read, and the list has only the name.
    assert!(matches!(asked(pod("a", "u2"), Some("s2")), State::Over(_)));
}

/// The journal still had the earlier one when the slot was bound again.
#[test]
fn a_slot_that_was_bound_again_has_the_newer_binding_alone() {
    let one = binding();
    let newer = Binding {
        hca: "0000:3b:00.1".parse().unwrap(),
        sandbox: Some("s2".into()),
        created: 101,
        ..binding()
    };
    let mut evidence = evidence(&one, Some(("ml", "a")), Processes::Running);
    let mut all = Bindings::clone(&evidence.bindings);
    all.all.insert(newer.hca.clone(), newer.clone());
    evidence.bindings = Arc::new(all);
    assert!(is_over(&one, &evidence) && !is_over(&newer, &evidence));
    evidence.attached.slots = BTreeSet::from([("s1".to_owned(), one.hca.clone())]);
    assert!(!is_over(&one, &evidence));
}

#[test]
fn an_owner_is_named_with_the_reason() {
    let one = binding();
    let mut evidence = evidence(&one, None, Processes::Running);
    let said = |evidence: &Evidence, hca: &str| {
        let hca: HcaId = hca.parse().unwrap();
        let owner = owner(&hca, evidence);
        (owner.is_free(), owner.is_ending(), owner.to_string())
    };
    let (is_free, is_ending, text) = said(&evidence, "0000:3b:00.0");
    assert!(!is_free && is_ending && text.contains("pod ml/a"), "{text}");
    let mut all = Bindings::clone(&evidence.bindings);
    let id = |hca: &str| -> HcaId { hca.parse().unwrap() };
    all.unreadable
        .insert(id("0000:3b:00.1"), "it is damaged".into());
    all.in_use.insert(id("0000:3b:00.2"), "process 4711".into());
    evidence.bindings = Arc::new(all);
    evidence.attached.slots = BTreeSet::from([("s9".to_owned(), id("0000:3b:00.3"))]);
    for (hca, word) in [
        ("0000:3b:00.1", "damaged"),
        ("0000:3b:00.2", "process 4711"),
        ("0000:3b:00.3", "journal"),
    ] {
        let (is_free, is_ending, text) = said(&evidence, hca);
        assert!(!is_free && !is_ending && text.contains(word), "{text}");
    }
    assert!(said(&evidence, "0000:3b:00.4").0);
}
