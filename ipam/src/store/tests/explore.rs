//! Every order in which the store's calls can meet, step by step.
//!
//! A call is the store's own code on a [`simulated`] directory. It depends only on what it is
//! answered, so a call is run again with the answers that it had, up to the next thing that it asks.
//! What it asks is done on a copy of the directory, for each call that may be next and for each
//! answer that the file system may give. A state that was reached before is not continued again.
//! In one place of each run, a call may be killed or a request may fail.
//!
//! What must hold:
//! - An answered address is its owner's alone, in every state until its release begins.
//! - Wherever the calls end, DEL releases what they left. If a DEL was killed or three calls of one
//!   owner met, fsck or reclaim may have to find it first.
//! - Wherever they end, the next ADD of each owner succeeds, and no record is left after its DEL.

use super::simulated::{self, Dirs, MOST_CALLS, Reply, Request, Text, World};
use crate::block::AddressSpace;
use crate::grants::{Grant, Grants};
use crate::lease::{Holder, Pod, Record};
use crate::range::{Range, Spec};
use crate::store::dir::Dir;
use crate::store::granted::BlockFiles;
use crate::store::name::LeaseName;
use crate::store::probe::FileSystem;
use crate::store::{CoolDown, Order, Part, Space, Store, StoreError};
use node::identity::NodeIdentity;
use node::policy::Profile;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{Hash, Hasher};
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

/// What a call does.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    /// ADD, of so many addresses.
    Add(usize),
    Del,
    /// Release of one address by hand.
    Free(&'static str),
    /// What reclaim does with a record that is over.
    Reclaim,
    /// What the broker does to give the node's only block back.
    GiveBack,
}

#[derive(Debug, Clone, Copy)]
struct Call {
    kind: Kind,
    owner: &'static str,
    /// The call that is over before this one begins.
    after: Option<usize>,
}

/// What may go wrong, once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Faults {
    None,
    /// A call is killed.
    Kill,
    /// That, or a request fails, or its answer is lost.
    Any,
}

#[derive(Debug, Clone)]
struct Scenario {
    /// Done one after the other, before the calls begin.
    before: Vec<Call>,
    calls: Vec<Call>,
    faults: Faults,
    /// By call, the NFS client it runs on; nothing for a local file system.
    clients: Option<[u8; MOST_CALLS]>,
    cooldown: Duration,
    /// Whether a listing may be older than the call.
    old_listings: bool,
    has_block: bool,
    /// A call makes no more records, for it may collide and try again without end.
    most_records: usize,
}

#[derive(Debug, Clone, PartialEq)]
enum Outcome {
    Answered(Vec<IpAddr>),
    Overtaken,
    Exhausted,
    Done,
    /// Another node may have the block.
    GivenBack,
    Failed(String),
}

fn add(owner: &'static str, addresses: usize) -> Call {
    call(Kind::Add(addresses), owner)
}

fn del(owner: &'static str) -> Call {
    call(Kind::Del, owner)
}

fn call(kind: Kind, owner: &'static str) -> Call {
    let after = None;
    Call { kind, owner, after }
}

impl Call {
    fn after(self, call: usize) -> Self {
        let after = Some(call);
        Self { after, ..self }
    }

    fn is_add(&self) -> bool {
        matches!(self.kind, Kind::Add(_))
    }

    /// Owners that begin with the same letter are sandboxes of one pod.
    fn takes_over(&self, owner: &str) -> bool {
        self.is_add() && owner != self.owner && owner[..1] == self.owner[..1]
    }

    fn run(self, store: &Store) -> Outcome {
        match self.kind {
            Kind::Add(addresses) => match store.take(&order(store, self.owner, addresses)) {
                Ok(leases) => Outcome::Answered(leases.iter().map(|l| l.address).collect()),
                Err(refused) => match refused.error {
                    StoreError::Overtaken { .. } => Outcome::Overtaken,
                    StoreError::Exhausted { .. } | StoreError::NeedsBlock(_) => Outcome::Exhausted,
                    error => Outcome::Failed(error.to_string()),
                },
            },
            Kind::Del => done(store.give_back(self.owner, "net1", "rail0")),
            Kind::Free(address) => done(free(store, address)),
            Kind::Reclaim => done(reclaim(store, self.owner)),
            Kind::GiveBack => give_back(store),
        }
    }
}

fn done<T>(result: Result<T, StoreError>) -> Outcome {
    match result {
        Ok(_) => Outcome::Done,
        Err(error) => Outcome::Failed(error.to_string()),
    }
}

fn free(store: &Store, address: &str) -> Result<(), StoreError> {
    for entry in store.entries_at(address.parse().unwrap())? {
        if entry.freed.is_none() {
            store.release_entry(&entry)?;
        }
    }
    Ok(())
}

fn reclaim(store: &Store, owner: &str) -> Result<(), StoreError> {
    let mut result = Ok(());
    store.records_of("n1", |owned| {
        let of_owner = |lease: &crate::lease::Lease| lease.holder.container == owner;
        if owned.leases().first().is_some_and(of_owner)
            && let Err(error) = store.release(&owned, CoolDown::FromNow)
        {
            result = Err(error);
        }
        Ok(())
    })?;
    result
}

/// The node's file of blocks, with the one that has the range, or without.
fn grants(has_block: bool) -> Vec<u8> {
    let mut grants = Grants::none(&AddressSpace::new("default", None));
    grants.blocks.extend(has_block.then(|| Grant {
        block: "10.0.0.0/30".parse().unwrap(),
        uid: "8f".to_owned(),
        epoch: 1,
        per_node: None,
        except: Vec::new(),
        boot: node().boot,
    }));
    serde_json::to_vec(&grants).unwrap()
}

fn give_back(store: &Store) -> Outcome {
    simulated::set_grants(&grants(false));
    match store.block_use(None, "10.0.0.0/30".parse().unwrap()) {
        Ok(used) if used.held.is_empty() => Outcome::GivenBack,
        used => {
            simulated::set_grants(&grants(true));
            done(used)
        }
    }
}

/// Releases held entries that no record leads to, as reclaim does once in each boot.
fn sweep(store: &Store) -> Result<(), StoreError> {
    let strange = store.entries(true, |entry| {
        if entry.freed.is_none() && !store.has_owner(&entry)? {
            store.release_entry(&entry)?;
        }
        Ok(())
    })?;
    assert!(strange.is_empty(), "{strange:?}");
    Ok(())
}

fn node() -> NodeIdentity {
    thread_local! {
        static NODE: NodeIdentity = NodeIdentity::read(Path::new("/"), "n1").unwrap();
    }
    NODE.with(NodeIdentity::clone)
}

fn range() -> Range {
    let range = "10.0.0.0/30";
    let spec = Spec {
        range,
        ..Spec::default()
    };
    Range::new(&spec, Profile::Strict).unwrap()
}

fn order(store: &Store, owner: &str, addresses: usize) -> Order {
    let pod = owner.len() > 1;
    let part = Part {
        interface: None,
        range: range(),
        space: Space {
            network_name: None,
            overlapping: true,
        },
        like: None,
        requested: None,
    };
    Order {
        holder: Holder {
            container: owner.to_owned(),
            interface: "net1".to_owned(),
            network: "rail0".to_owned(),
            node: store.node().name.clone(),
            boot: store.node().boot.clone(),
            machine: store.node().machine.clone(),
            netns: None,
            netns_inode: None,
            device: None,
            pod: pod.then(|| Pod {
                namespace: "default".to_owned(),
                name: owner[..1].to_owned(),
                uid: None,
            }),
        },
        profile: Profile::Strict,
        parts: vec![part; addresses],
    }
}

impl Scenario {
    fn of(calls: &[Call]) -> Self {
        Self {
            before: Vec::new(),
            calls: calls.to_vec(),
            faults: Faults::None,
            clients: None,
            cooldown: Duration::ZERO,
            old_listings: false,
            has_block: false,
            most_records: 1,
        }
    }

    fn after(self, before: &[Call]) -> Self {
        let before = before.to_vec();
        Self { before, ..self }
    }

    fn on_nfs(self, clients: [u8; MOST_CALLS]) -> Self {
        let clients = Some(clients);
        Self { clients, ..self }
    }

    /// In a Kubernetes store whose node has one block.
    fn with_block(self) -> Self {
        let has_block = true;
        Self { has_block, ..self }
    }

    fn with_old_listings(self) -> Self {
        let old_listings = true;
        Self {
            old_listings,
            ..self
        }
    }

    fn with_records(self, most_records: usize) -> Self {
        Self {
            most_records,
            ..self
        }
    }

    fn with_kills(self) -> Self {
        let faults = Faults::Kill;
        Self { faults, ..self }
    }

    fn with_faults(self) -> Self {
        let faults = Faults::Any;
        Self { faults, ..self }
    }

    fn store(&self) -> Store {
        Store {
            root: Dir::simulated(),
            dirs: Default::default(),
            id: String::new(),
            file_system: FileSystem {
                name: String::new(),
                shared: self.clients.is_some(),
                warning: None,
            },
            node: node(),
            previous_names: Vec::new(),
            cooldown: self.cooldown,
            blocks: self.has_block.then(|| BlockFiles {
                store: "default".to_owned(),
                directory: Default::default(),
                static_networks: Vec::new(),
            }),
            warnings: Vec::new(),
        }
    }

    fn alone(&self, world: &mut World, call: Call) -> Outcome {
        simulated::alone(world, || call.run(&self.store()))
    }

    /// Runs it; answers how many states it has.
    fn explore(&self) -> usize {
        let mut world = World::new(self.clients);
        world.grants = self.has_block.then(|| (1, Text::of(grants(true))));
        // All directories are there.
        for call in self.before.iter().chain(&self.calls) {
            for call in [add(call.owner, 1), del(call.owner)] {
                let outcome = self.alone(&mut world, call);
                assert!(!matches!(outcome, Outcome::Failed(_)), "{outcome:?}");
            }
        }
        world.forget_files();
        let mut answers = BTreeMap::new();
        for call in &self.before {
            match self.alone(&mut world, *call) {
                Outcome::Answered(addresses) => drop(answers.insert(call.owner, addresses)),
                Outcome::Done => drop(answers.remove(call.owner)),
                other => panic!("{other:?}"),
            }
        }
        if self.old_listings {
            world.remember();
        }
        let state = State {
            calls: vec![Progress::default(); self.calls.len()],
            answers,
            faults: self.faults,
            needs_repair: false,
            is_given_back: false,
            world,
        };
        let mut explorer = Explorer {
            scenario: self,
            dirs: state.world.directories(),
            runs: vec![vec![]; self.calls.len()],
            seen: HashSet::new(),
            owners: HashMap::new(),
            lease_names: HashMap::new(),
            trace: Vec::new(),
            ends: HashSet::new(),
            leases: Text::of("/leases/default/10.0.0.0-24"),
        };
        explorer.visit(state);
        explorer.seen.len()
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
enum Stage {
    #[default]
    Waiting,
    Running,
    Over,
}

/// How far a call has come.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Progress {
    stage: Stage,
    /// Its run so far.
    run: usize,
    /// Whether nobody listens to its answer any longer.
    is_stale: bool,
    /// Whether another call of its owner ran at the same time.
    has_met: bool,
    /// Whether an address was released by hand meanwhile.
    has_met_release: bool,
    /// Whether a request of it went wrong.
    is_faulted: bool,
    /// Whether its last request changed something: there it may be killed.
    has_changed: bool,
}

#[derive(Clone, Hash)]
struct State {
    world: World,
    calls: Vec<Progress>,
    /// Addresses that were answered, and are not being released.
    answers: BTreeMap<&'static str, Vec<IpAddr>>,
    faults: Faults,
    /// Whether what is left may be out of the owner's reach.
    needs_repair: bool,
    /// Whether the addresses may be another node's.
    is_given_back: bool,
}

/// A call with the answers that it had.
#[derive(Clone)]
struct Run {
    before: Option<(usize, Reply)>,
    /// How many it has made.
    records: usize,
    closed: Vec<u32>,
    next: Result<Outcome, Request>,
    further: HashMap<Reply, usize>,
}

/// A hash that two of a million states do not have in common by chance, and that is fast without
/// optimization.
struct Wide(u128);

impl Hasher for Wide {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_ne_bytes(word));
        }
    }

    fn write_u64(&mut self, word: u64) {
        let mixed =
            (self.0 ^ u128::from(word)).wrapping_mul(0x2360_ed05_1fc6_5da4_4385_df64_9fcc_f645);
        self.0 = mixed ^ (mixed >> 61);
    }

    fn write_u8(&mut self, word: u8) {
        self.write_u64(word.into());
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(word.into());
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }

    fn finish(&self) -> u64 {
        panic!("read as a whole")
    }
}

fn hash_of(value: &impl Hash) -> u128 {
    let mut hasher = Wide(1);
    value.hash(&mut hasher);
    hasher.0
}

#[derive(Debug)]
#[expect(dead_code, reason = "shown where something does not hold")]
enum Step {
    /// Whether it was a fault.
    Asked(usize, Request, Reply, bool),
    Ended(usize, Outcome),
    Killed(usize),
}

struct Explorer<'s> {
    scenario: &'s Scenario,
    dirs: Dirs,
    /// By call.
    runs: Vec<Vec<Run>>,
    seen: HashSet<u128>,
    /// By content of a record.
    owners: HashMap<Text, String>,
    lease_names: HashMap<Text, Option<LeaseName>>,
    trace: Vec<Step>,
    ends: HashSet<u128>,
    leases: Text,
}

impl Explorer<'_> {
    fn visit(&mut self, state: State) {
        if !self.seen.insert(hash_of(&state)) {
            return;
        }
        self.check_answers(&state);
        let mut is_over = true;
        for call in 0..state.calls.len() {
            let progress = &state.calls[call];
            let after = self.scenario.calls[call].after;
            let may_begin = after.is_none_or(|after| state.calls[after].stage == Stage::Over);
            match progress.stage {
                Stage::Running => {}
                Stage::Waiting if may_begin => {}
                Stage::Waiting | Stage::Over => continue,
            }
            is_over = false;
            self.step(&state, call);
        }
        if is_over {
            self.check_end(&state);
        }
    }

    /// What may be next if this call goes on.
    fn step(&mut self, state: &State, call: usize) {
        let mut state = state.clone();
        if state.calls[call].stage == Stage::Waiting {
            self.begin(&mut state, call);
        }
        let run = &self.runs[call][state.calls[call].run];
        let Err(request) = run.next.clone() else {
            panic!("a call without a request: {}", self.told());
        };
        for (world, reply) in state.world.answer(call, &request) {
            self.go_on(&state, call, &request, world, reply, false);
        }
        if state.faults == Faults::Any {
            for (world, reply) in simulated::faults(&state.world, call, &request) {
                self.go_on(&state, call, &request, world, reply, true);
            }
        }
        if state.faults != Faults::None && state.calls[call].has_changed {
            let mut state = state.clone();
            self.fault(&mut state, call);
            state.calls[call].stage = Stage::Over;
            state.world.end(call);
            self.trace.push(Step::Killed(call));
            self.visit(state);
            self.trace.pop();
        }
    }

    /// A DEL that is killed between the removal of the record and the second reading leaves what an
    /// ADD linked meanwhile out of its owner's reach. So does an ADD that is killed before it withdraws
    /// what it linked after a DEL removed its record, or the one below.
    fn fault(&self, state: &mut State, call: usize) {
        state.faults = Faults::None;
        let progress = &mut state.calls[call];
        progress.is_faulted = true;
        state.needs_repair |= progress.has_met || progress.has_met_release;
    }

    fn go_on(
        &mut self,
        state: &State,
        call: usize,
        request: &Request,
        world: World,
        reply: Reply,
        is_fault: bool,
    ) {
        let mut state = State {
            world,
            calls: state.calls.clone(),
            answers: state.answers.clone(),
            ..*state
        };
        if is_fault {
            self.fault(&mut state, call);
        }
        self.trace
            .push(Step::Asked(call, request.clone(), reply.clone(), is_fault));
        let progress = &mut state.calls[call];
        progress.has_changed = request.changes() && !is_fault;
        progress.run = self.run(call, progress.run, reply);
        let run = &self.runs[call][progress.run];
        for inode in run.closed.clone() {
            state.world.close(call, inode);
        }
        match run.next.clone() {
            // As if it was killed here.
            Err(Request::Create(..)) if run.records == self.scenario.most_records => {
                state.world.end(call);
                state.calls[call].stage = Stage::Over;
                state.needs_repair |= state.calls[call].has_met;
                self.visit(state);
            }
            Ok(outcome) => {
                self.end(&mut state, call, outcome);
                self.visit(state);
            }
            Err(next) if next.is_private() || next.reads_what_was_opened_by(request) => {
                let request = next;
                for (world, reply) in state.world.answer(call, &request) {
                    self.go_on(&state, call, &request, world, reply, false);
                }
            }
            Err(_) => self.visit(state),
        }
        self.trace.pop();
    }

    /// The run of a call with one more answer.
    fn run(&mut self, call: usize, before: usize, reply: Reply) -> usize {
        if let Some(run) = self.runs[call][before].further.get(&reply) {
            return *run;
        }
        let run = self.replay(call, Some((before, reply.clone())));
        self.runs[call][before].further.insert(reply, run);
        run
    }

    fn replay(&mut self, call: usize, before: Option<(usize, Reply)>) -> usize {
        let mut history = Vec::new();
        let mut at = before.clone();
        while let Some((run, reply)) = at {
            history.push(reply);
            at = self.runs[call][run].before.clone();
        }
        history.reverse();
        let made = |(run, _): &(usize, Reply)| {
            let run = &self.runs[call][*run];
            run.records + usize::from(matches!(run.next, Err(Request::Create(..))))
        };
        let records = before.as_ref().map_or(0, made);
        let scenario = self.scenario;
        let what = scenario.calls[call];
        let replayed = simulated::replay(call, &self.dirs, history, || what.run(&scenario.store()));
        self.runs[call].push(Run {
            before,
            records,
            closed: replayed.closed,
            next: replayed.next,
            further: HashMap::new(),
        });
        self.runs[call].len() - 1
    }

    fn begin(&mut self, state: &mut State, call: usize) {
        let calls = &self.scenario.calls;
        let this = calls[call];
        let running = |other: usize| other != call && state.calls[other].stage == Stage::Running;
        let running: Vec<usize> = (0..calls.len()).filter(|other| running(*other)).collect();
        for other in running.iter().copied() {
            let is_owners = calls[other].owner == this.owner;
            if is_owners {
                // The third.
                state.needs_repair |= state.calls[other].has_met;
                state.calls[call].has_met = true;
                state.calls[other].has_met = true;
                // The runtime gave it up.
                state.calls[other].is_stale |= calls[other].is_add();
                state.calls[call].is_stale |= !calls[other].is_add();
            }
            for (one, other) in [(call, other), (other, call)] {
                if let Kind::Free(_) = calls[one].kind {
                    state.calls[one].has_met_release = true;
                    state.calls[other].has_met_release = true;
                }
                state.calls[other].is_stale |= calls[one].takes_over(calls[other].owner);
            }
        }
        if running
            .iter()
            .filter(|other| calls[**other].owner == this.owner)
            .count()
            > 1
        {
            state.needs_repair = true;
        }
        match this.kind {
            Kind::Add(_) => state.answers.retain(|owner, _| !this.takes_over(owner)),
            Kind::Del | Kind::Reclaim => drop(state.answers.remove(this.owner)),
            Kind::GiveBack => {}
            Kind::Free(address) => {
                let address: IpAddr = address.parse().unwrap();
                state.answers.retain(|_, of| !of.contains(&address));
            }
        }
        state.calls[call].stage = Stage::Running;
        if self.runs[call].is_empty() {
            self.replay(call, None);
        }
    }

    fn end(&mut self, state: &mut State, call: usize, outcome: Outcome) {
        self.trace.push(Step::Ended(call, outcome.clone()));
        let what = self.scenario.calls[call];
        state.world.end(call);
        let progress = &mut state.calls[call];
        progress.stage = Stage::Over;
        progress.run = 0;
        match outcome {
            Outcome::Answered(_) if progress.is_stale => {}
            Outcome::Answered(_) if progress.has_met_release => {}
            Outcome::Answered(addresses) => {
                if let Some(before) = state.answers.get(what.owner)
                    && *before != addresses
                {
                    panic!("answered otherwise than before: {}", self.told());
                }
                state.answers.insert(what.owner, addresses);
            }
            Outcome::Overtaken if progress.has_met || progress.is_faulted => {}
            Outcome::Overtaken if progress.has_met_release => {}
            Outcome::Failed(_) if progress.is_faulted => {}
            Outcome::Exhausted | Outcome::Done => {}
            Outcome::GivenBack => state.is_given_back = true,
            Outcome::Overtaken | Outcome::Failed(_) => panic!("{}", self.told()),
        }
        self.trace.pop();
    }

    fn told(&self) -> String {
        {
            let steps = self.trace.iter().map(|step| format!("{step:?}\n"));
            format!("{:?}\n{}", self.scenario, steps.collect::<String>())
        }
    }

    /// Each answered address has a held entry of its owner, and no other has the address.
    fn check_answers(&mut self, state: &State) {
        if state.answers.is_empty() {
            return;
        }
        let held = self.held(&state.world);
        let mut all: Vec<IpAddr> = state.answers.values().flatten().copied().collect();
        all.sort_unstable();
        if state.is_given_back || all.windows(2).any(|pair| pair[0] == pair[1]) {
            panic!("two have an address: {:?} {}", state.answers, self.told());
        }
        for (owner, addresses) in &state.answers {
            for address in addresses {
                if !held.iter().any(|(held, of)| held == address && of == owner) {
                    panic!("{owner} lost {address}: {held:?} {}", self.told());
                }
            }
        }
    }

    /// Held addresses, and whose they are.
    fn held(&mut self, world: &World) -> Vec<(IpAddr, String)> {
        let mut held = Vec::new();
        for (name, content) in world.files_in(self.leases) {
            let parsed = self.lease_names.entry(name);
            let parsed = parsed.or_insert_with(|| LeaseName::parse(&name.text()));
            if let Some(name) = parsed.filter(|name| name.freed.is_none()) {
                let owner = self.owners.entry(content).or_insert_with(|| {
                    let record = Record::decode(&content.bytes()).ok();
                    record.map_or(String::new(), |record| {
                        record.leases()[0].holder.container.clone()
                    })
                });
                held.push((name.address, owner.clone()));
            }
        }
        held
    }

    /// Whatever the calls left, the next calls finish it.
    fn check_end(&mut self, state: &State) {
        let State {
            world,
            answers,
            needs_repair,
            ..
        } = state;
        if !self.ends.insert(hash_of(&(world, answers, needs_repair))) {
            return;
        }
        let mut state = state.clone();
        state.is_given_back = false;
        state.world.grants = self
            .scenario
            .has_block
            .then(|| (u32::MAX, Text::of(grants(true))));
        let state = &state;
        let calls = self.scenario.before.iter().chain(&self.scenario.calls);
        let mut owners: Vec<&'static str> = calls.map(|call| call.owner).collect();
        owners.sort_unstable();
        owners.dedup();
        let repair = |explorer: &Self, world: &mut World, by_fsck: bool| {
            if state.needs_repair {
                simulated::alone(world, || {
                    let store = explorer.scenario.store();
                    match by_fsck {
                        true => store.fsck(true, Duration::ZERO).map(drop),
                        false => {
                            let reclaimed = owners.iter().map(|owner| reclaim(&store, owner));
                            reclaimed
                                .collect::<Result<(), _>>()
                                .and_then(|()| sweep(&store))
                        }
                    }
                    .unwrap();
                });
            }
        };
        for by_fsck in [true, false] {
            if !by_fsck && !state.needs_repair {
                continue;
            }
            let mut world = state.world.clone();
            for again in [false, true] {
                for owner in &owners {
                    self.expect(&mut world, del(owner), &Outcome::Done);
                }
                if !again {
                    repair(self, &mut world, by_fsck);
                }
            }
            let held = self.held(&world);
            assert!(held.is_empty(), "left: {held:?} {}", self.told());
            if state.needs_repair {
                let fsck = || self.scenario.store().fsck(true, Duration::ZERO).map(drop);
                simulated::alone(&mut world, fsck).unwrap();
            }
            let records = world.below("/owners");
            assert!(records.is_empty(), "left: {records:?} {}", self.told());
            for owner in ["x", "y"] {
                let answer = self.scenario.alone(&mut world, add(owner, 1));
                assert!(
                    matches!(answer, Outcome::Answered(_)),
                    "{answer:?} {}",
                    self.told()
                );
            }
        }
        let mut world = state.world.clone();
        repair(self, &mut world, true);
        let mut answers = state.answers.clone();
        let adds = self
            .scenario
            .calls
            .iter()
            .filter(|call| call.is_add())
            .count();
        let has_two = self
            .scenario
            .calls
            .iter()
            .any(|call| call.kind == Kind::Add(2));
        for call in self.scenario.calls.iter().filter(|call| call.is_add()) {
            let answer = self.scenario.alone(&mut world, *call);
            match answer {
                Outcome::Answered(addresses) => {
                    answers.retain(|owner, _| !call.takes_over(owner));
                    let before = answers.insert(call.owner, addresses.clone());
                    if !state.needs_repair && before.is_some_and(|before| before != addresses) {
                        panic!("answered otherwise than before: {}", self.told());
                    }
                }
                // The others have all.
                Outcome::Exhausted if owners.len() > 2 || has_two => {}
                Outcome::Exhausted if state.needs_repair || adds > owners.len() => {}
                other => panic!("{other:?} {}", self.told()),
            }
        }
        self.check_answers(&State {
            answers,
            world,
            ..state.clone()
        });
    }

    fn expect(&self, world: &mut World, call: Call, outcome: &Outcome) {
        let found = self.scenario.alone(world, call);
        assert_eq!(found, *outcome, "{call:?} {}", self.told());
    }
}

const SAME: [u8; MOST_CALLS] = [0; MOST_CALLS];
const APART: [u8; MOST_CALLS] = [0, 1, 2, 0];

/// The recursion is as deep as the calls are long.
fn explore(scenarios: Vec<Scenario>) {
    let explorer = std::thread::Builder::new().stack_size(512 << 20);
    let explorer = explorer.spawn(move || {
        for scenario in scenarios {
            let states = scenario.explore();
            assert!(states > 100, "{states} states of {scenario:?}");
        }
    });
    if let Err(panic) = explorer.unwrap().join() {
        std::panic::resume_unwind(panic);
    }
}

#[test]
fn two_adds_never_have_one_address() {
    let (a, b) = (add("a", 1), add("b", 1));
    explore(vec![
        Scenario::of(&[a, b])
            .with_old_listings()
            .with_records(2)
            .with_faults(),
        Scenario::of(&[a, b])
            .on_nfs(APART)
            .with_old_listings()
            .with_records(2)
            .with_kills(),
        Scenario::of(&[add("a", 2), b]).with_kills(),
        Scenario::of(&[add("a", 2), b]).with_records(2),
        Scenario::of(&[a, b, add("c", 1)]),
    ]);
}

#[test]
fn an_add_and_a_del_of_one_attachment() {
    let (a, del) = (add("a", 1), del("a"));
    explore(vec![
        Scenario::of(&[a, del]).with_faults(),
        Scenario::of(&[a, del]).on_nfs(SAME).with_faults(),
        Scenario::of(&[a, del]).with_records(2),
        Scenario::of(&[a, del]).after(&[a]).with_kills(),
        Scenario::of(&[add("a", 2), del]).with_kills(),
        // Of two records.
        Scenario::of(&[del]).after(&[a, add("a", 2)]).with_faults(),
    ]);
}

#[test]
fn a_release_and_another_call() {
    let (a, b, del) = (add("a", 1), add("b", 1), del("a"));
    let (by_hand, reclaim) = (
        call(Kind::Free("10.0.0.1"), "hand"),
        call(Kind::Reclaim, "a"),
    );
    explore(vec![
        Scenario::of(&[del, b])
            .after(&[a])
            .with_old_listings()
            .with_records(2)
            .with_faults(),
        Scenario::of(&[del, b])
            .after(&[a])
            .on_nfs(APART)
            .with_faults(),
        Scenario::of(&[by_hand, a]).after(&[a]).with_kills(),
        Scenario::of(&[by_hand, b]).after(&[a]).with_kills(),
        Scenario::of(&[by_hand, add("a", 2)]),
        Scenario::of(&[reclaim, del]).after(&[a]).with_faults(),
        Scenario::of(&[reclaim, a]).after(&[a]).with_kills(),
        Scenario::of(&[del, del]).after(&[a]).with_faults(),
    ]);
}

#[test]
fn a_repeated_add_and_a_new_sandbox() {
    let (first, new) = (add("a0", 1), add("a1", 1));
    explore(vec![
        Scenario::of(&[add("a", 1), add("a", 1)])
            .with_records(2)
            .with_kills(),
        Scenario::of(&[new, del("a0")]).after(&[first]).with_kills(),
        Scenario::of(&[new, add("b", 1)])
            .after(&[first])
            .with_old_listings()
            .with_kills(),
    ]);
}

#[test]
fn an_add_two_releases_and_another_add() {
    let (a, b, c) = (add("a", 1), add("b", 1), add("c", 1));
    explore(vec![
        Scenario::of(&[a, del("a").after(0), b]).with_kills(),
        Scenario::of(&[a, a.after(0), b])
            .with_old_listings()
            .with_kills(),
        Scenario::of(&[a, del("a"), b]),
        Scenario::of(&[a, del("a"), a.after(1)]),
        Scenario::of(&[del("a"), b, c]).after(&[a]),
    ]);
}

#[test]
fn two_releases_and_an_add() {
    let (a, b, c) = (add("a", 1), add("b", 1), add("c", 1));
    let (by_hand, reclaim) = (
        call(Kind::Free("10.0.0.1"), "hand"),
        call(Kind::Reclaim, "a"),
    );
    explore(vec![
        Scenario::of(&[reclaim, del("a"), b]).after(&[a]),
        Scenario::of(&[by_hand, a, b]).after(&[a]),
        Scenario::of(&[del("a"), del("b"), c]).after(&[a, b]),
        Scenario::of(&[a, a, b]),
    ]);
}

#[test]
fn a_block_that_is_given_back_has_no_address_in_use() {
    let (a, b, give_back) = (add("a", 1), add("b", 1), call(Kind::GiveBack, "broker"));
    explore(vec![
        Scenario::of(&[a, give_back]).with_block().with_faults(),
        Scenario::of(&[a, del("a"), give_back]).with_block(),
        Scenario::of(&[a, b, give_back]).with_block(),
        Scenario::of(&[del("a"), b, give_back])
            .after(&[a])
            .with_block(),
    ]);
}
