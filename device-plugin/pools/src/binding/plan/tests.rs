use std::time::{Duration, Instant};

use hca_trees::{Tree, machine};
use kubelet_api::client::Held;
use proptest::prelude::*;

use super::*;
use crate::binding::record::{Bindings, Stage};
use crate::binding::state::Attached;
use crate::binding::state::Processes;
use crate::config::{PoolConfig, ResourceName, Sharing};
use crate::example::named;
use crate::holdings::Holdings;
use crate::snapshot::{Health, UnhealthyReason};

/// A node with eight HCAs, and pods of which each has some slots and GPUs.
struct Node {
    machine: Machine,
    snapshot: Arc<Snapshot>,
    bindings: Bindings,
    /// Pods that the kubelet lists.
    pods: BTreeMap<u32, (BTreeSet<u32>, BTreeSet<usize>)>,
}

impl Node {
    fn new(late: Late) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::new(directory.path());
        machine::a4(&tree);
        let inventory = hca::inventory(&tree.host()).unwrap();
        let gpus = hca::topology::gpu::read(&tree.host()).unwrap();
        let machine = Machine::read(&tree.host(), &inventory, gpus).unwrap();
        let members = machine.nics.iter();
        let members =
            members.map(|nic| Member::example(named(&nic.hca.id.to_string(), &["mlx5_0"])));
        let resource = ResourceName::parse("rdma/nic").unwrap();
        let pool = PoolConfig::new(resource, Sharing::Late(late), Vec::new());
        let snapshot = Snapshot::new(Arc::new(pool), 0, members.collect(), Arc::default());
        Self {
            machine,
            snapshot: Arc::new(snapshot),
            bindings: Bindings::default(),
            pods: BTreeMap::new(),
        }
    }

    fn pod(number: u32) -> Pod {
        Pod {
            namespace: "ml".into(),
            name: format!("pod-{number}"),
            uid: Some(format!("u{number}")),
        }
    }

    fn evidence(&self, asker: Option<Asker>, running: &BTreeSet<HcaId>) -> Evidence {
        let held = self.pods.iter().map(|(number, (slots, _))| Held {
            namespace: "ml".into(),
            pod: format!("pod-{number}"),
            container: "main".into(),
            resource: "rdma/nic".into(),
            ids: slots
                .iter()
                .map(|slot| self.snapshot.slot_name(*slot))
                .collect(),
        });
        let processes = self.bindings.all.keys().map(|hca| {
            let processes = match running.contains(hca) {
                true => Processes::Running,
                false => Processes::Ended,
            };
            (hca.clone(), processes)
        });
        let now = Instant::now() + Duration::from_secs(120);
        Evidence {
            bindings: Arc::new(self.bindings.clone()),
            attached: Attached::default(),
            held: Some(Arc::new(Holdings::listed(held.collect(), now))),
            allocated: BTreeMap::new(),
            processes: processes.collect(),
            asker,
            cgroup: None,
            now,
            seconds: 1000,
        }
    }

    fn plan(&self, number: u32, running: &BTreeSet<HcaId>) -> Result<BindPlan, NotBound> {
        let (slots, gpus) = &self.pods[&number];
        let slots: Vec<String> = slots
            .iter()
            .map(|slot| self.snapshot.slot_name(*slot))
            .collect();
        let asker = Asker {
            pod: Self::pod(number),
            sandbox: Some(format!("s{number}")),
            slots: slots.iter().cloned().collect(),
        };
        let container = Container {
            name: "main".into(),
            slots,
            ..Container::default()
        };
        let request = PoolRequest {
            strict: self.snapshot.late().unwrap().strict,
            snapshot: self.snapshot.clone(),
            containers: vec![container],
        };
        let of_pod = PodGpus {
            of_container: BTreeMap::from([("main".to_owned(), gpus.clone())]),
            ..PodGpus::default()
        };
        let evidence = self.evidence(Some(asker.clone()), running);
        bind_plan(
            &asker,
            &[request],
            Some(&(of_pod, self.machine.clone())),
            &evidence,
        )
    }

    /// Does the first steps of a plan. Returns whether that were all of them.
    fn apply(&mut self, plan: &BindPlan, steps: usize) -> bool {
        let freed = plan.free.iter().map(|one| (one, true));
        let written = plan
            .adopt
            .iter()
            .chain(&plan.create)
            .map(|one| (one, false));
        let all: Vec<_> = freed.chain(written).collect();
        for (one, is_freed) in all.iter().take(steps) {
            match is_freed {
                true => drop(self.bindings.all.remove(&one.hca)),
                false => drop(self.bindings.all.insert(one.hca.clone(), (*one).clone())),
            }
        }
        steps >= all.len()
    }

    /// The slots and HCAs of a pod.
    fn bound(&self, number: u32) -> BTreeMap<String, HcaId> {
        let all = self.bindings.all.values();
        let own = all.filter(|one| one.is_of(&Self::pod(number)));
        own.map(|one| (one.unit.clone(), one.hca.clone())).collect()
    }
}

fn relaxed() -> Late {
    Late {
        strict: false,
        ..Late::default()
    }
}

#[test]
fn the_next_pod_has_the_hcas_of_one_that_ended_at_once() {
    let mut node = Node::new(Late::default());
    let all: BTreeSet<u32> = (0..8).collect();
    let gpus: BTreeSet<usize> = (0..8).collect();
    for number in 0..3 {
        node.pods = BTreeMap::from([(number, (all.clone(), gpus.clone()))]);
        let plan = node.plan(number, &BTreeSet::new()).unwrap();
        assert_eq!(plan.create.len(), 8);
        node.apply(&plan, usize::MAX);
        for one in node.bindings.all.values_mut() {
            one.stage = Stage::Started;
        }
        assert_eq!(node.bound(number).len(), 8);
    }
}

#[test]
fn a_refusal_names_who_has_each_hca() {
    let mut node = Node::new(relaxed());
    let half = |from: u32| (from..from + 4).collect::<BTreeSet<u32>>();
    node.pods.insert(0, (half(0), (0..4).collect()));
    let plan = node.plan(0, &BTreeSet::new()).unwrap();
    node.apply(&plan, usize::MAX);
    for one in node.bindings.all.values_mut() {
        one.stage = Stage::Started;
    }
    // It was deleted by force, and one of the others is broken.
    node.pods.clear();
    node.pods.insert(1, (half(4), (4..8).collect()));
    let running = node.bindings.all.keys().cloned().collect();
    let mut snapshot = Snapshot::clone(&node.snapshot);
    snapshot.members_mut()[7].health =
        Health::from([UnhealthyReason::Port("no active port".into())]);
    node.snapshot = Arc::new(snapshot);
    let refused = node.plan(1, &running).unwrap_err();
    let text = refused.failure.message;
    assert!(refused.is_ending);
    assert!(
        text.contains("4 HCAs are asked for, and 3 ") && text.contains("no active port"),
        "{text}"
    );
    assert_eq!(text.matches("pod ml/pod-0").count(), 4, "{text}");
    // Once its processes are gone, the HCAs are free.
    assert_eq!(node.plan(1, &BTreeSet::new()).unwrap().free.len(), 4);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn no_hca_is_bound_twice_and_what_is_bound_stays(
        steps in proptest::collection::vec(
            (0_u32..6, 1_usize..4, proptest::collection::btree_set(0_usize..8, 0..4), 0_usize..6,
                any::<bool>()),
            1..24,
        ),
    ) {
        let mut node = Node::new(relaxed());
        for (number, count, gpus, crash, hangs) in steps {
            if node.pods.remove(&number).is_some() {
                // It ended, or was deleted by force and hangs.
                for one in node.bindings.all.values_mut() {
                    one.stage = Stage::Started;
                }
                if !hangs {
                    continue;
                }
            }
            let taken: BTreeSet<u32> = node.pods.values().flat_map(|(slots, _)| slots.clone()).collect();
            let slots: BTreeSet<u32> = (0..8).filter(|slot| !taken.contains(slot)).take(count).collect();
            // A pod that comes again has another UID.
            let number = number + 100 * u32::try_from(node.bindings.all.len()).unwrap();
            if slots.is_empty() || node.pods.contains_key(&number) {
                continue;
            }
            node.pods.insert(number, (slots.clone(), gpus));
            let running: BTreeSet<HcaId> = match hangs {
                true => node.bindings.all.keys().cloned().collect(),
                false => node.pods.keys().flat_map(|pod| node.bound(*pod).into_values()).collect(),
            };
            let others: Vec<_> = node.pods.keys().filter(|other| **other != number).copied().collect();
            let before: Vec<_> = others.iter().map(|other| node.bound(*other)).collect();
            let Ok(plan) = node.plan(number, &running) else {
                node.pods.remove(&number);
                continue;
            };
            // Killed at any step, the same question again keeps what is there and does the rest.
            let planned: BTreeMap<String, HcaId> =
                plan.create.iter().map(|one| (one.unit.clone(), one.hca.clone())).collect();
            let is_whole = node.apply(&plan, crash);
            let done = node.bound(number);
            if !is_whole {
                let again = node.plan(number, &running).unwrap();
                node.apply(&again, usize::MAX);
            }
            prop_assert_eq!(node.bound(number).len(), slots.len());
            prop_assert_eq!(&node.bound(number), &planned);
            prop_assert!(done.iter().all(|(slot, hca)| planned.get(slot) == Some(hca)));
            let after: Vec<_> = others.iter().map(|other| node.bound(*other)).collect();
            prop_assert_eq!(before, after, "others keep theirs");
            prop_assert!(running.iter().all(|hca| !planned.values().any(|one| one == hca)));
            let last = node.plan(number, &running).unwrap();
            prop_assert!(last.create.is_empty() && last.free.is_empty());
        }
    }
}
