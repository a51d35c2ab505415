//! Stores whose leases are whereabouts' objects: nodes with whereabouts and nodes with this broker
//! share their ranges.
//!
//! # Who has an address
//! The name of a reservation decides: it stands for the address in all ranges of its network name, and
//! the API creates it once. whereabouts enters its pool first and makes the reservation then; so an
//! address whose reservation is ours may be in a pool as another pod's. Therefore our entry is only made
//! where the pool has none, by a patch that tests this, and an ADD is answered after both. Of two that
//! want one address in one pool, the pool's patch lets one through; in two pools, the reservation does.
//!
//! # Killed at any point
//! ADD makes the reservation first. Killed before the pool's entry, it leaves a reservation that names
//! this node, container and interface. The next ADD of the pod's interface takes it over, DEL removes
//! it, and so does the sweep at the broker's start.
//! DEL removes the reservation first, and the entry last. Killed in between, it leaves the entry, by which
//! the runtime's next DEL finds what is left. The other order would leave a reservation that whereabouts
//! made, and nothing that leads to it.
//! whereabouts' reconciler removes either remainder once the pod is gone. It judges by pods, so it and
//! this broker do not contradict each other.
//!
//! - [`pool`]: one pool, of which one task changes the entries;
//! - [`reservation`]: one address among all ranges.

mod pool;
mod reservation;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use ipnetwork::IpNetwork;
use node::random::random64;
use node_wire::{
    AddressAction, AddressQuestion, Addresses, Answer, AttachmentId, Failure, FailureKind, Holding,
    Taking,
};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use crate::api::transport::ApiError;
use crate::api::whereabouts::{Lease, Objects};
use crate::decide::pool::key_of;
use crate::space::Timing;
use pool::{Ask, Job, Outcome, PoolTask};
use reservation::Reservations;

/// How often reservations that an ADD left behind are searched.
const SWEEP_INTERVAL: Duration = Duration::from_secs(600);
/// How soon again after a failure.
const SWEEP_RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// A question for addresses, and where its answer goes.
#[derive(Debug)]
pub struct Asked {
    /// What is to be done.
    pub question: AddressQuestion,
    /// When it came.
    pub at: Instant,
    /// Where the answer goes.
    pub reply: oneshot::Sender<Result<Answer, Failure>>,
}

/// Which pool: it is named by both.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PoolKey {
    /// The range's network.
    pub(crate) range: IpNetwork,
    /// `network_name`, if the network has one.
    pub(crate) network_name: Option<String>,
}

impl PoolKey {
    fn new(range: &str, network_name: Option<&str>) -> Result<Self, Failure> {
        let wrong = || {
            let why = format!("addresses is malformed: {range:?} is no network");
            Failure::new(FailureKind::Malformed, why)
        };
        let range: IpNetwork = range.parse().map_err(|_| wrong())?;
        if range.ip() != range.network() {
            return Err(wrong());
        }
        Ok(Self {
            range,
            network_name: network_name.map(str::to_owned),
        })
    }

    fn of_lease(lease: &Lease) -> Option<Self> {
        Self::new(&lease.range, lease.network_name.as_deref()).ok()
    }

    /// The name of its object.
    pub(crate) fn name(&self) -> String {
        ipam::whereabouts::pool_name(self.range, self.network_name.as_deref())
    }
}

/// What the tasks of a store have in common.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) objects: Objects,
    pub(crate) reservations: Reservations,
    pub(crate) timing: Timing,
}

/// One such store.
#[derive(Debug)]
pub struct Store {
    node: String,
    shared: Rc<Shared>,
    pools: RefCell<BTreeMap<PoolKey, mpsc::UnboundedSender<Job>>>,
}

impl Store {
    /// Of a node. The sweep starts with it.
    pub(crate) fn start(objects: Objects, node: &str, timing: Timing) -> Rc<Self> {
        let store = Rc::new(Self {
            node: node.to_owned(),
            shared: Rc::new(Shared {
                reservations: Reservations::new(objects.clone(), node),
                objects,
                timing,
            }),
            pools: RefCell::default(),
        });
        let swept = Rc::downgrade(&store);
        tokio::task::spawn_local(async move {
            while let Some(store) = swept.upgrade() {
                let pause = store.sweep().await;
                drop(store);
                tokio::time::sleep(pause).await;
            }
        });
        store
    }

    /// The answer to a question.
    pub(crate) async fn answer(
        &self,
        question: AddressQuestion,
        at: Instant,
    ) -> Result<Answer, Failure> {
        let addresses = match question.action {
            AddressAction::Take(taking) => self.take(&question.network, taking, at).await?,
            AddressAction::Free(holding) => self.free(holding, at).await?,
            AddressAction::Find(holding) => self.find(&holding, at).await?,
            AddressAction::KeepOnly(valid) => self.keep_only(&question.network, &valid, at).await?,
            AddressAction::Probe => {
                self.shared.objects.probe().await.map_err(|e| failure(&e))?;
                Vec::new()
            }
        };
        Ok(Answer::Addresses(Addresses { addresses }))
    }

    async fn take(
        &self,
        network: &str,
        taking: Taking,
        at: Instant,
    ) -> Result<Vec<IpAddr>, Failure> {
        let network_name = taking.network_name.as_deref();
        let mut keys = Vec::new();
        for wanted in &taking.ranges {
            keys.push(PoolKey::new(&wanted.range, network_name)?);
        }
        let ranges: Vec<IpNetwork> = keys.iter().map(|key| key.range).collect();
        ipam::whereabouts::check(&ranges, network_name, true, false)
            .map_err(|why| Failure::new(FailureKind::Malformed, why.to_string()))?;
        let mut addresses = Vec::new();
        let mut fresh = Vec::new();
        for (key, wanted) in keys.into_iter().zip(taking.ranges) {
            let ask = Ask::Take {
                pod: taking.pod.clone(),
                network: network.to_owned(),
                spans: wanted.spans,
                address: wanted.address,
            };
            match self.pool(&key, &taking.attachment, ask, at).await {
                Ok(outcome) => {
                    addresses.extend(outcome.addresses);
                    if outcome.fresh {
                        fresh.push(key);
                    }
                }
                Err(failure) => {
                    // All or none. What cannot be freed now is the runtime's DEL's to free.
                    for key in fresh {
                        let _ = self
                            .pool(&key, &taking.attachment, Ask::Free, Instant::now())
                            .await;
                    }
                    return Err(failure);
                }
            }
        }
        Ok(addresses)
    }

    /// The pools in which an attachment may have addresses: those of its configuration, and those of
    /// its own reservations, should the configuration have been changed.
    async fn pools_of(&self, holding: &Holding) -> Result<BTreeSet<PoolKey>, Failure> {
        let mut keys = BTreeSet::new();
        for range in &holding.ranges {
            keys.insert(PoolKey::new(range, holding.network_name.as_deref())?);
        }
        if holding.ranges.is_empty() {
            let objects = &self.shared.objects;
            let id = &holding.attachment;
            let listed = objects.each_pool(|pool| {
                let mut leases = pool.spec.allocations.values();
                if leases.any(|lease| lease.id == id.container && lease.ifname == id.interface)
                    && let Some((range, network_name)) = key_of(&pool)
                {
                    keys.insert(PoolKey {
                        range,
                        network_name,
                    });
                }
            });
            listed.await.map_err(|error| failure(&error))?;
        }
        self.shared.reservations.know().await?;
        let own = self.shared.reservations.of(&holding.attachment);
        keys.extend(own.iter().filter_map(PoolKey::of_lease));
        Ok(keys)
    }

    async fn free(&self, holding: Holding, at: Instant) -> Result<Vec<IpAddr>, Failure> {
        let mut freed = Vec::new();
        for key in self.pools_of(&holding).await? {
            let outcome = self.pool(&key, &holding.attachment, Ask::Free, at).await?;
            freed.extend(outcome.addresses);
        }
        Ok(freed)
    }

    async fn find(&self, holding: &Holding, at: Instant) -> Result<Vec<IpAddr>, Failure> {
        let mut found = Vec::new();
        for range in &holding.ranges {
            let key = PoolKey::new(range, holding.network_name.as_deref())?;
            let outcome = self.pool(&key, &holding.attachment, Ask::Find, at).await?;
            found.extend(outcome.addresses);
        }
        Ok(found)
    }

    async fn keep_only(
        &self,
        network: &str,
        valid: &[AttachmentId],
        at: Instant,
    ) -> Result<Vec<IpAddr>, Failure> {
        self.shared.reservations.list().await?;
        let stale = self.shared.reservations.all();
        let stale = stale.into_iter().filter(|(id, lease)| {
            lease.node == self.node && lease.network == network && !valid.contains(id)
        });
        let mut freed = Vec::new();
        for (id, lease) in stale {
            let Some(key) = PoolKey::of_lease(&lease) else {
                continue;
            };
            let outcome = self.pool(&key, &id, Ask::Free, at).await?;
            freed.extend(outcome.addresses);
        }
        Ok(freed)
    }

    /// Asks the task of a pool.
    async fn pool(
        &self,
        key: &PoolKey,
        attachment: &AttachmentId,
        ask: Ask,
        at: Instant,
    ) -> Result<Outcome, Failure> {
        let (reply, outcome) = oneshot::channel();
        let job = Job {
            attachment: attachment.clone(),
            ask,
            at,
            reply,
        };
        let ended = || Failure::new(FailureKind::ClusterUnavailable, "the broker ends");
        self.task(key).send(job).map_err(|_| ended())?;
        outcome.await.map_err(|_| ended())?
    }

    fn task(&self, key: &PoolKey) -> mpsc::UnboundedSender<Job> {
        let mut pools = self.pools.borrow_mut();
        let task = pools.entry(key.clone()).or_insert_with(|| {
            let (sender, jobs) = mpsc::unbounded_channel();
            let task = PoolTask::new(self.shared.clone(), key.clone(), &self.node);
            tokio::task::spawn_local(task.run(jobs));
            sender
        });
        task.clone()
    }

    /// Removes reservations of this node that no pool has an entry for; how long to wait until the
    /// next time.
    async fn sweep(&self) -> Duration {
        let swept = async {
            self.shared.reservations.list().await?;
            let own = self.shared.reservations.all();
            let keys: BTreeSet<PoolKey> = own
                .iter()
                .filter(|(_, lease)| lease.node == self.node)
                .filter_map(|(_, lease)| PoolKey::of_lease(lease))
                .collect();
            let nobody = AttachmentId {
                container: String::new(),
                interface: String::new(),
            };
            for key in keys {
                let at = Instant::now();
                let outcome = self.pool(&key, &nobody, Ask::Sweep, at).await?;
                for address in outcome.addresses {
                    tracing::info!(%address, pool = key.name(), "a reservation without an entry in its pool was removed");
                }
            }
            Ok::<_, Failure>(())
        };
        let pause = match swept.await {
            Ok(()) => SWEEP_INTERVAL,
            Err(failure) => {
                tracing::warn!(error = failure.message, "cannot sweep whereabouts' objects");
                SWEEP_RETRY_INTERVAL
            }
        };
        // Brokers that start at one time do not sweep at one time.
        pause + Duration::from_millis(random64() % 30_000)
    }
}

/// The failure to answer with.
pub(crate) fn failure(error: &ApiError) -> Failure {
    crate::space::failure(error)
}
