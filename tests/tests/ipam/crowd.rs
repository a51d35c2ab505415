//! Many callers on three nodes that share a directory; the calls of half of them are killed.

use crate::agent::{Agent, add, on, shared, start};
use crate::support::{Answer, Attachment, Place, network, plugin};
use e2e::random::Random;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

const NODES: [&str; 3] = ["n1", "n2", "n3"];
const WORKERS: usize = 16;
/// A worker has at most so many pods: 96 on the 126 addresses of the range.
const PODS: usize = 6;
const RANGE: &str = "10.0.0.0/25";
/// After so many pods a worker goes to the next node, so that addresses must, too.
const STINT: usize = 40;
/// After so many calls of all workers an agent is killed.
const CALLS_OF_AGENT: usize = 1000;
/// An ADD has an address by then, also where the machine is busy.
const LIMIT: Duration = Duration::from_mins(2);

/// Calls of all workers; `RDMA_E2E_CALLS` asks for more or fewer.
fn calls() -> usize {
    let text = std::env::var("RDMA_E2E_CALLS").ok();
    text.and_then(|text| text.parse().ok()).unwrap_or(5000)
}

/// What all workers know.
struct Crowd {
    place: Place,
    config: Value,
    /// Who has an address, from the answer to its ADD to the beginning of its DEL.
    holders: Mutex<BTreeMap<String, String>>,
    calls: AtomicUsize,
    killed: AtomicUsize,
    /// ADDs that found no room at the first attempt.
    refused: AtomicUsize,
    longest: Mutex<Duration>,
}

struct Worker<'c> {
    crowd: &'c Crowd,
    number: usize,
    random: Random,
    /// How long a call takes; a call is killed within this time.
    usual: Duration,
    pods: Vec<(Attachment, String)>,
}

impl Worker<'_> {
    /// A call to its end, or killed at some moment of it.
    fn call(&mut self, verb: &str, who: &Attachment, kill: bool) -> Option<Answer> {
        let mut command = plugin();
        self.crowd.place.environment(&mut command, verb, who);
        self.crowd.calls.fetch_add(1, Ordering::Relaxed);
        let begun = Instant::now();
        let mut child = command.spawn().unwrap();
        let config = self.crowd.config.to_string();
        let _ = child.stdin.take().unwrap().write_all(config.as_bytes());
        if kill {
            let micros = usize::try_from(self.usual.as_micros()).unwrap();
            std::thread::sleep(Duration::from_micros(self.random.below(micros) as u64));
            child.kill().unwrap();
        }
        let output = child.wait_with_output().unwrap();
        if kill && output.status.code().is_none() {
            self.crowd.killed.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        self.usual = begun.elapsed().min(Duration::from_millis(100));
        Some(Answer::of(output))
    }

    /// Whether the next call is one that is killed.
    fn kills(&mut self) -> bool {
        self.number.is_multiple_of(2) && self.random.in_(2)
    }

    fn add(&mut self, who: Attachment) {
        let begun = Instant::now();
        let mut attempts = 0;
        let address = loop {
            let kill = self.kills();
            let answer = self.call("ADD", &who, kill);
            attempts += 1;
            match answer {
                Some(answer) if answer.ok() => {
                    let address = answer.address();
                    break address.split('/').next().unwrap().to_owned();
                }
                Some(answer) => {
                    let (code, text) = answer.error();
                    assert!(matches!(code, 11 | 102), "{code} {text}");
                    assert!(begun.elapsed() < LIMIT, "{}: {code} {text}", who.container);
                    std::thread::sleep(Duration::from_millis(200));
                }
                // A runtime makes an ADD anew, or ends the sandbox.
                None if self.random.in_(2) => self.del(&who),
                None => {}
            }
        };
        self.crowd
            .refused
            .fetch_add(usize::from(attempts > 1), Ordering::Relaxed);
        let mut longest = self.crowd.longest.lock().unwrap();
        *longest = (*longest).max(begun.elapsed());
        let mut holders = self.crowd.holders.lock().unwrap();
        let before = holders.insert(address.clone(), who.container.clone());
        assert_eq!(before, None, "{address} twice: {}, too", who.container);
        self.pods.push((who, address));
    }

    fn del(&mut self, who: &Attachment) {
        loop {
            let kill = self.kills();
            if let Some(answer) = self.call("DEL", who, kill) {
                assert!(answer.ok(), "{}: {answer:?}", who.container);
                return;
            }
        }
    }

    fn remove(&mut self) {
        let (who, address) = self.pods.remove(self.random.below(self.pods.len()));
        let holder = self.crowd.holders.lock().unwrap().remove(&address);
        assert_eq!(holder.as_ref(), Some(&who.container), "{address}");
        self.del(&who);
    }

    /// Until so many calls were made by all.
    fn run(&mut self, total: usize) {
        let mut pod = 0;
        loop {
            if self.crowd.calls.load(Ordering::Relaxed) >= total {
                return;
            }
            if self.pods.len() == PODS || (!self.pods.is_empty() && self.random.in_(3)) {
                self.remove();
            } else {
                let node = NODES[(self.number + pod / STINT) % NODES.len()];
                self.add(on(node, &format!("w{}-{pod}", self.number)));
                pod += 1;
            }
        }
    }
}

/// The leases of all nodes: address and container.
fn leases(place: &Place) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for node in NODES {
        let listed = place.admin_of(node, &["--json"]);
        let outside = &listed.document["leasesOutside"];
        assert_eq!(*outside, json!([]), "{node}: {listed:?}");
        for lease in listed.document["leases"].as_array().unwrap() {
            let text = |key: &str| lease[key].as_str().unwrap().to_owned();
            let twice = all.insert(text("address"), text("container"));
            assert_eq!(twice, None, "{} is leased twice", text("address"));
        }
        let checked = place.admin_of(node, &["fsck", "--json"]);
        assert_eq!(
            checked.document["findings"],
            json!([]),
            "{node}: {checked:?}"
        );
    }
    all
}

#[test]
fn no_address_is_doubled_or_lost_though_calls_and_agents_are_killed() {
    let place = shared();
    assert!(place.admin(&["init"]).ok());
    let mut agents: Vec<Agent> = NODES.iter().map(|node| start(&place, node)).collect();
    let crowd = Crowd {
        place,
        config: network("rdma-ipam", json!({"range": RANGE})),
        holders: Mutex::default(),
        calls: AtomicUsize::new(0),
        killed: AtomicUsize::new(0),
        refused: AtomicUsize::new(0),
        longest: Mutex::default(),
    };
    let total = calls();
    let begun = Instant::now();
    let mut pods: Vec<(Attachment, String)> = std::thread::scope(|scope| {
        let workers = (0..WORKERS).map(|number| {
            let mut worker = Worker {
                crowd: &crowd,
                number,
                random: Random(number as u64),
                usual: Duration::from_millis(4),
                pods: Vec::new(),
            };
            scope.spawn(move || {
                worker.run(total);
                worker.pods
            })
        });
        let workers: Vec<_> = workers.collect();
        // The agents are killed in turn meanwhile.
        let mut kills = 0;
        while !workers.iter().all(ScopedJoinHandle::is_finished) {
            std::thread::sleep(Duration::from_millis(100));
            if crowd.calls.load(Ordering::Relaxed) / CALLS_OF_AGENT > kills {
                let at = kills % NODES.len();
                drop(agents.remove(at));
                agents.insert(at, start(&crowd.place, NODES[at]));
                kills += 1;
            }
        }
        let each = workers.into_iter().map(|worker| worker.join().unwrap());
        each.flatten().collect()
    });
    println!(
        "{} calls in {} s, {} of them killed, {} ADDs tried again, the longest ADD {:?}",
        crowd.calls.load(Ordering::Relaxed),
        begun.elapsed().as_secs(),
        crowd.killed.load(Ordering::Relaxed),
        crowd.refused.load(Ordering::Relaxed),
        *crowd.longest.lock().unwrap(),
    );
    let held = std::mem::take(&mut *crowd.holders.lock().unwrap());
    assert_eq!(
        leases(&crowd.place),
        held,
        "what nodes lease, and what pods have"
    );
    for (who, _) in pods.drain(..) {
        assert!(crowd.place.del(&who, &crowd.config).ok());
    }
    assert_eq!(leases(&crowd.place), BTreeMap::new());
    // Every address is free again: one node can have them all.
    for node in NODES {
        let given = crowd.place.admin_of(node, &["give-back", "--json"]);
        assert!(given.ok(), "{node}: {given:?}");
    }
    for number in 0..126 {
        let who = on("n1", &format!("all{number}"));
        add(&crowd.place, &who, &crowd.config);
    }
}
