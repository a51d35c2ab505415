//! The store against a plain map, over random sequences of calls for one address or
//! several, some of which are killed while they run; on stores of both formats.

use crate::support::{Attachment, Place, network, plugin};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::time::Duration;

/// One step. Containers are numbers.
#[derive(Debug, Clone)]
enum Step {
    Add(u8),
    Del(u8),
    /// The runtime lists those of these containers that are attached.
    Gc(Vec<u8>),
    /// Killed after so many microseconds, or finished before.
    KilledAdd(u8, u64),
    KilledDel(u8, u64),
}

/// What is known of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Holds(Vec<String>),
    /// Its last call was killed: it holds some addresses or none.
    Unknown,
}

const CONTAINERS: u8 = 8;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let container = 0..CONTAINERS;
    let micros = 0u64..6_000;
    let step = prop_oneof![
        5 => container.clone().prop_map(Step::Add),
        4 => container.clone().prop_map(Step::Del),
        1 => prop::collection::vec(container.clone(), 0..5).prop_map(Step::Gc),
        2 => (container.clone(), micros.clone()).prop_map(|(c, after)| Step::KilledAdd(c, after)),
        2 => (container, micros).prop_map(|(c, after)| Step::KilledDel(c, after)),
    ];
    prop::collection::vec(step, 1..30)
}

struct Model {
    place: Place,
    config: Value,
    /// All addresses of the range, ascending.
    range: Vec<String>,
    /// How many an ADD takes.
    parts: usize,
    known: BTreeMap<u8, State>,
}

impl Model {
    fn new(range: &str, addresses: impl Iterator<Item = String>, parts: usize) -> Self {
        let ranges = vec![json!({"range": range}); parts];
        Self {
            // Without rest the lowest free address is always the next.
            place: Place::with(json!({"ipam": {"cooldown": "0"}})),
            config: network("rdma-ipam", json!({"ipRanges": ranges})),
            range: addresses.collect(),
            parts,
            known: BTreeMap::new(),
        }
    }

    fn who(container: u8) -> Attachment {
        Attachment::new(&format!("c{container}"))
    }

    fn kill(&self, verb: &str, container: u8, after: u64) {
        let mut command = plugin();
        self.place
            .environment(&mut command, verb, &Self::who(container));
        let mut child = command.spawn().unwrap();
        child
            .stdin
            .take()
            .unwrap()
            .write_all(self.config.to_string().as_bytes())
            .unwrap();
        std::thread::sleep(Duration::from_micros(after));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match step {
            Step::Add(container) => self.add(*container)?,
            Step::Del(container) => {
                prop_assert!(self.place.del(&Self::who(*container), &self.config).ok());
                self.known.remove(container);
            }
            Step::Gc(listed) => {
                let valid: Vec<Value> = listed
                    .iter()
                    .map(|c| json!({"containerID": format!("c{c}"), "ifname": "net1"}))
                    .collect();
                let mut config = self.config.clone();
                config["cni.dev/valid-attachments"] = json!(valid);
                let answer = self.place.call("GC", &Self::who(0), &config);
                prop_assert!(answer.ok(), "{answer:?}");
                // A record without a lease entry is nothing to the map, and GC may leave it.
                self.known.retain(|container, _| listed.contains(container));
            }
            Step::KilledAdd(container, after) => {
                self.kill("ADD", *container, *after);
                // An ADD of a holder changes nothing, killed or not.
                self.known.entry(*container).or_insert(State::Unknown);
            }
            Step::KilledDel(container, after) => {
                self.kill("DEL", *container, *after);
                if let Some(state) = self.known.get_mut(container) {
                    *state = State::Unknown;
                }
            }
        }
        self.compare()
    }

    fn add(&mut self, container: u8) -> Result<(), TestCaseError> {
        let before = self.place.held();
        let answer = self.place.add(&Self::who(container), &self.config);
        let certain = !self.known.values().any(|state| *state == State::Unknown);
        if !answer.ok() {
            prop_assert_eq!(answer.error().0, 102);
            let free = self.range.len() - before.len();
            prop_assert!(free < self.parts, "sent away with {free} addresses left");
            prop_assert!(self.place.held().len() <= before.len(), "took some");
            return Ok(());
        }
        let given = answer.addresses();
        let given: Vec<String> = given
            .iter()
            .map(|address| address.split('/').next().unwrap().to_owned())
            .collect();
        prop_assert_eq!(given.len(), self.parts);
        match self.known.get(&container) {
            Some(State::Holds(addresses)) => {
                prop_assert_eq!(&given, addresses, "another answer");
            }
            _ if certain => {
                let free = self
                    .range
                    .iter()
                    .filter(|address| !before.contains(address));
                let lowest: Vec<String> = free.take(self.parts).cloned().collect();
                prop_assert_eq!(&given, &lowest, "not the lowest that were free");
            }
            _ => {}
        }
        self.known.insert(container, State::Holds(given));
        Ok(())
    }

    /// What the store holds is what the map says, give or take what is unknown.
    fn compare(&self) -> Result<(), TestCaseError> {
        let listed = self.place.admin(&["--json"]).document;
        let mut held: BTreeMap<String, String> = BTreeMap::new();
        for lease in listed["leases"].as_array().unwrap() {
            let (address, container) = (
                lease["address"].as_str().unwrap(),
                lease["container"].as_str().unwrap(),
            );
            let twice = held.insert(address.to_owned(), container.to_owned());
            prop_assert!(twice.is_none(), "{address} has two holders");
        }
        let mut unknown = 0;
        for (container, state) in &self.known {
            let name = format!("c{container}");
            match state {
                State::Holds(addresses) => {
                    for address in addresses {
                        let of = held.remove(address);
                        prop_assert_eq!(of.as_ref(), Some(&name), "{} was lost", address);
                    }
                }
                State::Unknown => {
                    unknown += 1;
                    held.retain(|_, of| *of != name);
                }
            }
        }
        prop_assert!(held.is_empty(), "leaked: {held:?}, {unknown} unknown");
        Ok(())
    }

    /// Everybody leaves; nothing stays.
    fn end(&self) -> Result<(), TestCaseError> {
        for container in 0..CONTAINERS {
            prop_assert!(self.place.del(&Self::who(container), &self.config).ok());
        }
        prop_assert_eq!(self.place.held(), Vec::<String>::new());
        prop_assert_eq!(self.place.records(), Vec::<std::path::PathBuf>::new());
        Ok(())
    }
}

/// Each case is a few dozen processes; `PROPTEST_CASES` asks for more of them.
fn cases() -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok();
    ProptestConfig {
        cases: asked.and_then(|cases| cases.parse().ok()).unwrap_or(48),
        max_shrink_iters: 40,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn the_store_behaves_like_a_map(
        steps in steps(),
        v6 in any::<bool>(),
        parts in prop_oneof![Just(1usize), Just(3)],
    ) {
        let mut model = match (v6, parts) {
            (false, 1) => Model::new("10.0.0.0/29", (1..=6).map(|n| format!("10.0.0.{n}")), 1),
            (true, 1) => Model::new("fd99::/125", (1..=6).map(|n| format!("fd99::{n}")), 1),
            (false, n) => Model::new("10.0.0.0/28", (1..=14).map(|n| format!("10.0.0.{n}")), n),
            (true, n) => Model::new("fd99::/124", (1..=14).map(|n| format!("fd99::{n:x}")), n),
        };
        for step in &steps {
            model.step(step)?;
        }
        model.end()?;
    }
}
