//! One pool: all questions of this node about it, by one task.
//!
//! Questions that wait are answered together: one read of the pool, their reservations a few at a time,
//! and one patch with all their entries. Where the patch's tests do not hold, because others changed
//! an entry, the pool is read again and each question is decided anew.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use ipam::whereabouts::{offset, reservation_name};
use node::random::random64;
use node_wire::{AttachmentId, Failure, FailureKind};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::reservation::Reserved;
use super::{PoolKey, Shared, failure};
use crate::api::whereabouts::{Allocation, Lease, PoolObject};
use crate::api::{Changed, Created};
use crate::decide::pool::{Edit, Pool, operations};

/// How long what was read of a pool may decide which address is tried. What is taken by then is refused
/// by the API, and costs a request.
const VIEW_AGE: Duration = Duration::from_secs(1);
/// How long an address is passed over that was found reserved.
const TAKEN_AGE: Duration = Duration::from_secs(30);
/// When so many addresses were found reserved one by one, the names of all reservations are read.
const LIST_FROM: usize = 16;
/// The most questions that are answered together.
const MAX_BATCH: usize = 64;
/// How many reservations are made at a time.
const LANES: usize = 4;
/// How often a question is decided anew, should the clock not end it before.
const MAX_ROUNDS: usize = 200;

/// A question about a pool.
#[derive(Debug)]
pub(super) struct Job {
    /// Whose addresses.
    pub(super) attachment: AttachmentId,
    /// What is to be done.
    pub(super) ask: Ask,
    /// When it came.
    pub(super) at: Instant,
    /// Where the answer goes.
    pub(super) reply: oneshot::Sender<Result<Outcome, Failure>>,
}

/// What is to be done.
#[derive(Debug, Clone)]
pub(super) enum Ask {
    /// An address for the attachment.
    Take {
        pod: String,
        network: String,
        spans: Vec<(IpAddr, IpAddr)>,
        address: Option<IpAddr>,
    },
    /// Frees what the attachment has.
    Free,
    /// What the attachment has.
    Find,
    /// Removes this node's reservations without an entry. No question of this node is under way then.
    Sweep,
}

/// What was done.
#[derive(Debug, Clone, Default)]
pub(super) struct Outcome {
    /// The addresses.
    pub(super) addresses: Vec<IpAddr>,
    /// Whether the address was not the attachment's before.
    pub(super) fresh: bool,
}

/// The task of a pool.
#[derive(Debug)]
pub(super) struct PoolTask {
    shared: Rc<Shared>,
    key: PoolKey,
    name: String,
    node: String,
    view: Option<(Pool, Instant)>,
    /// Reserved, though the pool has no entry: by a pod of another range, or one that comes.
    taken: BTreeMap<IpAddr, Instant>,
    /// The names of all reservations, where several addresses in a row were found reserved.
    listed: Option<(BTreeSet<String>, Instant)>,
}

/// A question that is being answered.
#[derive(Debug)]
struct Open {
    job: Job,
    /// What it has reserved without an entry in the pool.
    reserved: Option<Lease>,
    /// Whether nothing free was found once, and what was found reserved is tried again.
    searched_again: bool,
}

/// What is to be done for a question by what the pool says.
#[derive(Debug)]
enum Plan {
    /// The pod has the entry; its reservation is made sure of.
    Keep {
        lease: Lease,
        key: String,
        was: String,
    },
    /// An address is tried.
    Try(Lease),
    /// The reservation is there, and the pool has no entry.
    Enter(Lease),
    /// The reservation is there, and another pod has the entry.
    GiveUp(Lease),
    /// Entries with their reservations, and reservations alone.
    Release {
        entries: Vec<(String, IpAddr, Allocation)>,
        alone: Vec<Lease>,
    },
    /// Nothing, but an answer.
    Answer(Result<Outcome, Failure>),
    /// Nothing free is known; what was found reserved is tried again.
    SearchAgain,
}

/// What was done for a question, but for the pool's entry.
#[derive(Debug)]
enum Step {
    /// The pool is to be changed; then this is the answer.
    Edit(Vec<Edit>, Outcome),
    /// The address is reserved by another pod.
    Taken(IpAddr, String),
    /// To be decided anew.
    Again,
    /// This is the answer.
    Answer(Result<Outcome, Failure>),
}

impl PoolTask {
    pub(super) fn new(shared: Rc<Shared>, key: PoolKey, node: &str) -> Self {
        Self {
            name: key.name(),
            shared,
            key,
            node: node.to_owned(),
            view: None,
            taken: BTreeMap::new(),
            listed: None,
        }
    }

    /// Answers until nobody can ask any more.
    pub(super) async fn run(mut self, mut jobs: mpsc::UnboundedReceiver<Job>) {
        let mut waiting = VecDeque::new();
        loop {
            if waiting.is_empty() {
                let next = match timeout(VIEW_AGE, jobs.recv()).await {
                    Ok(next) => next,
                    Err(_) => {
                        // A pool may be large, and questions may be rare.
                        self.view = None;
                        self.listed = None;
                        jobs.recv().await
                    }
                };
                match next {
                    Some(job) => waiting.push_back(job),
                    None => return,
                }
            }
            while let Ok(job) = jobs.try_recv() {
                waiting.push_back(job);
            }
            let batch = next_batch(&mut waiting);
            self.serve(batch).await;
        }
    }

    async fn serve(&mut self, batch: Vec<Job>) {
        // What an attachment has, others may have changed; what is free, the API decides.
        if batch.iter().any(|job| !matches!(job.ask, Ask::Take { .. })) {
            self.view = None;
        }
        let mut open: Vec<Open> = batch.into_iter().map(Open::new).collect();
        for round in 0..MAX_ROUNDS {
            self.expire(&mut open).await;
            if open.is_empty() {
                return;
            }
            if self.taken.len() >= LIST_FROM && self.listed.is_none() {
                // Without the list each of them costs a request.
                if let Err(failure) = self.list().await {
                    return self.fail(open, &failure).await;
                }
            }
            if round > 2 {
                // Others want the same addresses at the same time.
                tokio::time::sleep(Duration::from_millis(5 + random64() % 25)).await;
            }
            if let Err(failure) = self.read(&open).await {
                return self.fail(open, &failure).await;
            }
            open = self.round(open).await;
        }
        let why = format!("IPPool {} is changed by others all the time", self.name);
        let failure = Failure::new(FailureKind::ClusterUnavailable, why);
        self.fail(open, &failure).await;
    }

    async fn list(&mut self) -> Result<(), Failure> {
        let mut names = BTreeSet::new();
        let listed = self.shared.objects.each_reservation_name(|name| {
            names.insert(name);
        });
        listed.await.map_err(|error| failure(&error))?;
        self.listed = Some((names, Instant::now()));
        Ok(())
    }

    /// Whether an address was found reserved, though the pool has no entry for it.
    fn is_taken(&self, address: IpAddr) -> bool {
        let name = || reservation_name(address, self.key.network_name.as_deref());
        let listed = self.listed.as_ref();
        self.taken.contains_key(&address)
            || listed.is_some_and(|(names, _)| names.contains(&name()))
    }

    /// Answers questions that have waited for too long.
    async fn expire(&self, open: &mut Vec<Open>) {
        let limit = self.shared.timing.question;
        let late: Vec<Open> = open
            .extract_if(.., |one| one.job.at.elapsed() >= limit)
            .collect();
        let why = format!(
            "the Kubernetes API did not answer in time about IPPool {}",
            self.name
        );
        let failure = Failure::new(FailureKind::ClusterUnavailable, why);
        self.fail(late, &failure).await;
    }

    async fn fail(&self, open: Vec<Open>, failure: &Failure) {
        for one in open {
            // What cannot be withdrawn now, the runtime's DEL or the sweep removes.
            if let Some(lease) = &one.reserved {
                let _ = self.shared.reservations.withdraw(lease).await;
            }
            drop(one.job.reply.send(Err(failure.clone())));
        }
    }

    /// Makes sure that what the pool says is known; makes the pool where an address is wanted.
    async fn read(&mut self, open: &[Open]) -> Result<(), Failure> {
        let known = self.view.as_ref();
        if known.is_some_and(|(_, read)| read.elapsed() < VIEW_AGE) {
            return Ok(());
        }
        let objects = &self.shared.objects;
        let read = objects.pool(&self.name).await;
        let mut object = read.map_err(|error| failure(&error))?;
        let is_wanted = open
            .iter()
            .any(|one| matches!(one.job.ask, Ask::Take { .. }));
        if object.is_none() && is_wanted {
            let new = PoolObject::new(&self.name, &self.key.range.to_string());
            let created = objects.create_pool(&new).await;
            object = match created.map_err(|error| failure(&error))? {
                Created::New(object) => Some(object),
                Created::Taken => {
                    let read = objects.pool(&self.name).await;
                    read.map_err(|error| failure(&error))?
                }
            };
        }
        self.see(object)
    }

    fn see(&mut self, object: Option<PoolObject>) -> Result<(), Failure> {
        let pool = match object {
            Some(object) => Pool::read(object, self.key.range)
                .map_err(|why| Failure::new(FailureKind::Mismatch, why))?,
            None => Pool::empty(self.key.range),
        };
        self.view = Some((pool, Instant::now()));
        Ok(())
    }

    /// Decides, reserves and changes the pool once; what is left is to be decided anew.
    async fn round(&mut self, open: Vec<Open>) -> Vec<Open> {
        self.taken.retain(|_, since| since.elapsed() < TAKEN_AGE);
        let listed = self.listed.take();
        self.listed = listed.filter(|(_, since)| since.elapsed() < TAKEN_AGE);
        let plans = self.plans(&open);
        let steps = self.act(&open, plans).await;
        let (mut again, mut edits, mut changed) = (Vec::new(), Vec::new(), Vec::new());
        for (mut one, step) in open.into_iter().zip(steps) {
            match step {
                Step::Edit(of_one, outcome) => {
                    if let (true, [address]) = (outcome.fresh, &*outcome.addresses) {
                        one.reserved = self.lease(&one.job, *address);
                    }
                    edits.extend(of_one);
                    changed.push((one, outcome));
                }
                Step::Taken(address, by) => {
                    let taken = self.taken.insert(address, Instant::now());
                    if taken.is_none() {
                        tracing::debug!(%address, pool = self.name, by, "reserved by another pod");
                    }
                    // Who has it, may have many more by now.
                    self.view = None;
                    again.push(one);
                }
                Step::Again => {
                    one.searched_again |= one.reserved.is_none();
                    one.reserved = None;
                    self.view = None;
                    again.push(one);
                }
                Step::Answer(answer) => {
                    if answer.is_err() {
                        self.view = None;
                    }
                    drop(one.job.reply.send(answer));
                }
            }
        }
        again.extend(self.change(edits, changed).await);
        again
    }

    fn plans(&mut self, open: &[Open]) -> Vec<Plan> {
        let empty = Pool::empty(self.key.range);
        let pool = self.view.as_ref().map_or(&empty, |(pool, _)| pool);
        let mut chosen = BTreeSet::new();
        let mut plans = Vec::new();
        let mut forget = false;
        for one in open {
            let plan = self.plan(pool, one, &mut chosen);
            forget |= matches!(plan, Plan::SearchAgain);
            plans.push(plan);
        }
        if forget {
            self.taken.clear();
            self.listed = None;
        }
        plans
    }

    fn plan(&self, pool: &Pool, one: &Open, chosen: &mut BTreeSet<IpAddr>) -> Plan {
        let id = &one.job.attachment;
        let (pod, spans, wanted) = match &one.job.ask {
            Ask::Take {
                pod,
                spans,
                address,
                ..
            } => (pod, spans, *address),
            Ask::Find => {
                let entries = pool.of_attachment(id);
                return Plan::Answer(Ok(Outcome {
                    addresses: entries.iter().map(|entry| entry.address).collect(),
                    fresh: false,
                }));
            }
            Ask::Free => {
                let entries = pool.of_attachment(id).into_iter();
                let entries = entries
                    .map(|entry| (entry.key.clone(), entry.address, entry.lease.clone()))
                    .collect();
                let own = self.shared.reservations.of(id).into_iter();
                let alone = own.filter(|lease| self.is_alone(pool, lease)).collect();
                return Plan::Release { entries, alone };
            }
            Ask::Sweep => {
                let own = self.shared.reservations.all().into_iter();
                let alone = own
                    .map(|(_, lease)| lease)
                    .filter(|lease| self.is_alone(pool, lease))
                    .collect();
                return Plan::Release {
                    entries: Vec::new(),
                    alone,
                };
            }
        };
        let refuse = |kind, why: String| Plan::Answer(Err(Failure::new(kind, why)));
        if let Some(entry) = pool.of_pod(pod, &id.interface) {
            if let Some(wanted) = wanted.filter(|wanted| *wanted != entry.address) {
                let why = format!(
                    "{wanted} is wanted, and pod {pod} has {} for {} (IPPool {}); end the pod that has it first",
                    entry.address, id.interface, self.name
                );
                return refuse(FailureKind::HeldByAnotherNode, why);
            }
            let Some(lease) = self.lease(&one.job, entry.address) else {
                return Plan::SearchAgain;
            };
            return match &one.reserved {
                Some(other) if *other != lease => Plan::GiveUp(other.clone()),
                _ => Plan::Keep {
                    lease,
                    key: entry.key.clone(),
                    was: entry.lease.id.clone(),
                },
            };
        }
        if let Some(lease) = &one.reserved {
            return match pool.at(lease.address) {
                None => Plan::Enter(lease.clone()),
                Some(_) => Plan::GiveUp(lease.clone()),
            };
        }
        let address = match wanted {
            Some(wanted) => {
                if let Some(other) = pool.at(wanted) {
                    let why = format!(
                        "{wanted} is leased by pod {} (IPPool {})",
                        other.podref, self.name
                    );
                    return refuse(FailureKind::HeldByAnotherNode, why);
                }
                Some(wanted).filter(|wanted| !chosen.contains(wanted))
            }
            None => pool.lowest_free(spans, |address| {
                chosen.contains(&address) || self.is_taken(address)
            }),
        };
        let lease = address.and_then(|address| self.lease(&one.job, address));
        match lease {
            Some(lease) => {
                chosen.insert(lease.address);
                Plan::Try(lease)
            }
            None if wanted.is_some() || !one.searched_again => Plan::SearchAgain,
            None => {
                let why = format!(
                    "every address of {} that may be given is leased (IPPool {}) or reserved \
                     (OverlappingRangeIPReservations)",
                    self.key.range, self.name
                );
                refuse(FailureKind::Exhausted, why)
            }
        }
    }

    /// Whether a reservation of this node is of this pool, which has no entry for it. An entry of
    /// another container is the pod's next one, which the reservation stands for by now.
    fn is_alone(&self, pool: &Pool, lease: &Lease) -> bool {
        PoolKey::of_lease(lease).as_ref() == Some(&self.key) && pool.at(lease.address).is_none()
    }

    fn lease(&self, job: &Job, address: IpAddr) -> Option<Lease> {
        let Ask::Take { network, .. } = &job.ask else {
            return None;
        };
        Some(Lease {
            node: self.node.clone(),
            container: job.attachment.container.clone(),
            network: network.clone(),
            network_name: self.key.network_name.clone(),
            range: self.key.range.to_string(),
            address,
        })
    }

    /// Does what is planned, but for the pool's entries; a few at a time.
    async fn act(&self, open: &[Open], plans: Vec<Plan>) -> Vec<Step> {
        let mut steps: Vec<Step> = Vec::new();
        steps.resize_with(plans.len(), || Step::Again);
        let mut todo = open
            .iter()
            .zip(plans)
            .map(|(one, plan)| {
                let (shared, key) = (self.shared.clone(), self.key.clone());
                let (id, ask) = (one.job.attachment.clone(), one.job.ask.clone());
                async move { act(&shared, &key, &id, &ask, plan).await }
            })
            .enumerate();
        let mut lanes = JoinSet::new();
        let mut next = |lanes: &mut JoinSet<(usize, Step)>| {
            if let Some((number, work)) = todo.next() {
                lanes.spawn_local(async move { (number, work.await) });
            }
        };
        for _ in 0..LANES {
            next(&mut lanes);
        }
        while let Some(done) = lanes.join_next().await {
            if let Ok((number, step)) = done
                && let Some(place) = steps.get_mut(number)
            {
                *place = step;
            }
            next(&mut lanes);
        }
        steps
    }

    /// Changes the pool for all of them at once, and answers; those that have to be decided anew.
    async fn change(&mut self, edits: Vec<Edit>, changed: Vec<(Open, Outcome)>) -> Vec<Open> {
        if changed.is_empty() {
            return Vec::new();
        }
        let done = match edits.is_empty() {
            true => Ok(Changed::Done(None)),
            false => {
                let objects = &self.shared.objects;
                let patched = objects.patch_pool(&self.name, &operations(&edits)).await;
                patched.map(|changed| match changed {
                    Changed::Done(object) => Changed::Done(Some(object)),
                    Changed::Conflict => Changed::Conflict,
                    Changed::Gone => Changed::Gone,
                })
            }
        };
        match done {
            Ok(Changed::Done(object)) => {
                if let Some(object) = object
                    && self.see(Some(object)).is_err()
                {
                    self.view = None;
                }
                for (one, outcome) in changed {
                    drop(one.job.reply.send(Ok(outcome)));
                }
                Vec::new()
            }
            Ok(Changed::Conflict | Changed::Gone) => {
                self.view = None;
                changed.into_iter().map(|(one, _)| one).collect()
            }
            // It may have been done: reading the pool says so.
            Err(error) if error.is_uncertain() => {
                tracing::debug!(%error, "the pool is read again");
                self.view = None;
                changed.into_iter().map(|(one, _)| one).collect()
            }
            Err(error) => {
                self.view = None;
                let open = changed.into_iter().map(|(one, _)| one).collect();
                self.fail(open, &failure(&error)).await;
                Vec::new()
            }
        }
    }
}

impl Open {
    fn new(job: Job) -> Self {
        Self {
            job,
            reserved: None,
            searched_again: false,
        }
    }
}

/// Questions that can be answered together: each of another attachment and pod's interface. A sweep is
/// answered alone.
fn next_batch(waiting: &mut VecDeque<Job>) -> Vec<Job> {
    let mut batch: Vec<Job> = Vec::new();
    let mut seen = BTreeSet::new();
    while let Some(job) = waiting.front() {
        let sweep = matches!(job.ask, Ask::Sweep);
        if !batch.is_empty() && (sweep || batch.len() >= MAX_BATCH) {
            break;
        }
        let id = &job.attachment;
        let mut whose = vec![(id.container.clone(), id.interface.clone())];
        if let Ask::Take { pod, .. } = &job.ask {
            whose.push((pod.clone(), id.interface.clone()));
        }
        if whose.iter().any(|one| seen.contains(one)) {
            break;
        }
        seen.extend(whose);
        batch.extend(waiting.pop_front());
        if sweep {
            break;
        }
    }
    batch
}

/// Does what is planned for one question, but for the pool's entry.
async fn act(shared: &Shared, key: &PoolKey, id: &AttachmentId, ask: &Ask, plan: Plan) -> Step {
    let done = match plan {
        Plan::Answer(answer) => return Step::Answer(answer),
        Plan::SearchAgain => return Step::Again,
        Plan::Enter(lease) => Ok(enter(key, id, ask, &lease)),
        Plan::Try(lease) => reserve(shared, id, ask, &lease)
            .await
            .map(|reserved| match reserved {
                Reserved::Held => enter(key, id, ask, &lease),
                Reserved::Taken(by) => taken(ask, &lease, by),
            }),
        Plan::Keep {
            lease,
            key: at,
            was,
        } => reserve(shared, id, ask, &lease)
            .await
            .map(|reserved| match reserved {
                Reserved::Held => {
                    // Also where it is the same: the patch's test says whether the entry is still there.
                    let renew = Edit::Renew {
                        key: at,
                        was,
                        id: id.container.clone(),
                    };
                    let outcome = Outcome {
                        addresses: vec![lease.address],
                        fresh: false,
                    };
                    Step::Edit(vec![renew], outcome)
                }
                Reserved::Taken(by) => Step::Answer(Err(conflict(key, &lease, &by))),
            }),
        Plan::GiveUp(lease) => shared
            .reservations
            .withdraw(&lease)
            .await
            .map(|()| Step::Again),
        Plan::Release { entries, alone } => release(shared, key, entries, alone).await,
    };
    done.unwrap_or_else(|failure| Step::Answer(Err(failure)))
}

async fn reserve(
    shared: &Shared,
    id: &AttachmentId,
    ask: &Ask,
    lease: &Lease,
) -> Result<Reserved, Failure> {
    let pod = match ask {
        Ask::Take { pod, .. } => pod.as_str(),
        Ask::Free | Ask::Find | Ask::Sweep => "",
    };
    let reservations = &shared.reservations;
    reservations.reserve(pod, &id.interface, lease).await
}

fn enter(key: &PoolKey, id: &AttachmentId, ask: &Ask, lease: &Lease) -> Step {
    let Ask::Take { pod, .. } = ask else {
        return Step::Again;
    };
    match offset(key.range, lease.address) {
        Ok(offset) => {
            let add = Edit::Add {
                offset,
                lease: Allocation {
                    id: id.container.clone(),
                    podref: pod.clone(),
                    ifname: id.interface.clone(),
                },
            };
            let outcome = Outcome {
                addresses: vec![lease.address],
                fresh: true,
            };
            Step::Edit(vec![add], outcome)
        }
        Err(why) => {
            let failure = Failure::new(FailureKind::Malformed, why.to_string());
            Step::Answer(Err(failure))
        }
    }
}

fn taken(ask: &Ask, lease: &Lease, by: String) -> Step {
    match ask {
        Ask::Take {
            address: Some(wanted),
            ..
        } => {
            let name = reservation_name(*wanted, lease.network_name.as_deref());
            let why =
                format!("{wanted} is reserved by pod {by} (OverlappingRangeIPReservation {name})");
            let failure = Failure::new(FailureKind::HeldByAnotherNode, why);
            Step::Answer(Err(failure))
        }
        _ => Step::Taken(lease.address, by),
    }
}

fn conflict(key: &PoolKey, lease: &Lease, by: &str) -> Failure {
    let name = reservation_name(lease.address, lease.network_name.as_deref());
    let why = format!(
        "IPPool {} has {} as this pod's, and OverlappingRangeIPReservation {name} as pod {by}'s: one of them is \
         wrong; end the pod that does not have the address, or remove its entry",
        key.name(),
        lease.address
    );
    Failure::new(FailureKind::Mismatch, why)
}

async fn release(
    shared: &Shared,
    key: &PoolKey,
    entries: Vec<(String, IpAddr, Allocation)>,
    alone: Vec<Lease>,
) -> Result<Step, Failure> {
    let mut outcome = Outcome::default();
    for lease in alone {
        shared.reservations.withdraw(&lease).await?;
        outcome.addresses.push(lease.address);
    }
    let mut edits = Vec::new();
    for (at, address, entry) in entries {
        let name = reservation_name(address, key.network_name.as_deref());
        let reservations = &shared.reservations;
        reservations
            .release(&name, &entry.podref, &entry.ifname)
            .await?;
        edits.push(Edit::Remove {
            key: at,
            id: entry.id,
        });
        outcome.addresses.push(address);
    }
    Ok(Step::Edit(edits, outcome))
}
