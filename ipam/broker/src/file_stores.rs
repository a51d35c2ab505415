//! Leases of nodes that are gone, in file stores that nodes share.
//!
//! In each file store of the policy that this node uses, the broker announces that the node is a Node
//! object of the cluster ([`ipam::store::AnnouncedNode`]). From time to time it asks the cluster about
//! the others that did; the leases of one that is gone for longer than the cool-down are freed
//! ([`ipam::reclaim::of_gone_node`]). A store that this node uses alone has no others.
//!
//! Nothing is freed on a failure: the nodes are listed, the list has this node, and each node that it
//! lacks is asked for by itself just before its leases are freed. Nor are leases of a node that this
//! broker never saw in the list: it may be of another cluster. Which it saw is in a file of its state
//! directory, without which it frees less. Since when a node is gone is in its memory: killed anywhere,
//! the next one begins anew. Several brokers may free the same leases at one time, which each lease's
//! rename decides.
//!
//! Directories may be on a server that does not answer, so they are read on threads of their own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use ipam::reclaim::{self, Report};
use ipam::store::{AnnouncedNode, Store, StoreError};
use jiff::Timestamp;
use node::identity::NodeIdentity;
use node::policy::StoreKind;
use node::random::random64;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::api::{ApiError, NodeObject};
use crate::decide::departed::{self, Departures, Key, Since};
use crate::space::Shared;

/// In the directory of the stores' grants, whose names do not begin with a dot.
const SEEN: &str = ".nodes.json";
const VERSION: u64 = 1;

/// Why nothing was freed.
#[derive(Debug, thiserror::Error)]
enum RoundError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Identity(#[from] node::identity::IdentityError),
    #[error("{0}; nothing is freed by it")]
    Nodes(String),
    #[error("the thread that reads the store ended: {0}")]
    Thread(#[from] tokio::task::JoinError),
}

/// Serves until it is dropped.
pub(crate) async fn run(shared: Rc<Shared>) {
    let stores = shared.policy.stores.iter();
    let stores: Vec<String> = stores
        .filter(|(_, store)| matches!(store.kind, StoreKind::File { .. }))
        .map(|(name, _)| name.clone())
        .collect();
    if stores.is_empty() {
        return;
    }
    let cooldown = shared.policy.ipam.cooldown;
    let mut known = Known::read(shared.policy.state_dir.join("blocks").join(SEEN));
    let mut wait = Duration::from_millis(2_000 + random64() % 8_000);
    loop {
        tokio::time::sleep(wait).await;
        let nodes = match round(&shared, &stores, &mut known).await {
            Ok(nodes) => nodes,
            Err(error) => {
                known.departures.clear();
                tracing::warn!(%error, "cannot ask for the nodes that share a store of leases");
                0
            }
        };
        let now = Instant::now();
        let interval = departed::interval(nodes);
        // Brokers that start together do not ask together.
        let jitter = interval.mul_f64(0.5).as_millis().max(1);
        let jitter = u64::try_from(jitter).map_or(0, |jitter| random64() % jitter);
        let interval = interval.mul_f64(0.75) + Duration::from_millis(jitter);
        let next = known.departures.next(now, cooldown).map(|next| next - now);
        wait = next.map_or(interval, |next| next.min(interval));
    }
}

/// What a broker knows of the nodes that share its stores.
struct Known {
    path: PathBuf,
    /// Those that it saw in the cluster.
    seen: BTreeSet<Key>,
    /// Those of them that are gone.
    departures: Departures,
}

#[derive(Serialize, Deserialize)]
struct SeenText {
    version: u64,
    nodes: BTreeSet<Key>,
}

impl Known {
    /// A file that is not there or not ours has nobody.
    fn read(path: PathBuf) -> Self {
        let text: Option<SeenText> = std::fs::read(&path)
            .ok()
            .and_then(|text| serde_json::from_slice(&text).ok());
        let text = text.filter(|text| text.version == VERSION);
        Self {
            path,
            seen: text.map(|text| text.nodes).unwrap_or_default(),
            departures: Departures::default(),
        }
    }

    fn see(&mut self, seen: BTreeSet<Key>) {
        if seen == self.seen {
            return;
        }
        self.seen = seen;
        let text = SeenText {
            version: VERSION,
            nodes: self.seen.clone(),
        };
        let written = serde_json::to_vec(&text)
            .map_err(std::io::Error::from)
            .and_then(|text| node::file::replace(&self.path, text));
        if let Err(error) = written {
            tracing::warn!(file = %self.path.display(), %error, "cannot write which nodes share a store of leases");
        }
    }
}

/// Announces this node, asks for the others, and frees what is theirs. Answers how many use the stores.
async fn round(shared: &Shared, stores: &[String], known: &mut Known) -> Result<usize, RoundError> {
    let name = &shared.name;
    let Some(own) = shared.client.node(name).await? else {
        return Err(RoundError::Nodes(format!(
            "the cluster has no Node {name:?}; name it as the cluster does: node in the policy, --node, or \
             RDMA_NODE_NAME"
        )));
    };
    let mut users: BTreeSet<Key> = BTreeSet::new();
    let mut all = 0;
    for store in stores {
        let announced = announced(shared, store, &own).await?;
        all = all.max(announced.len());
        let others = announced.into_iter().filter(|node| node.name != *name);
        users.extend(others.map(|node| (store.clone(), node)));
    }
    if users.is_empty() {
        known.departures.clear();
        return Ok(all);
    }
    let mut nodes: BTreeMap<String, NodeObject> = BTreeMap::new();
    let listed = shared.client.nodes(|node| {
        nodes.insert(node.metadata.name.clone(), node);
    });
    listed.await?;
    departed::check(&nodes, &own.id()).map_err(RoundError::Nodes)?;
    known.see(departed::seen(&known.seen, &users, &nodes));
    let is_gone = |node: &AnnouncedNode| departed::end(node, nodes.get(&node.name)).is_some();
    users.retain(|key| known.seen.contains(key) && is_gone(&key.1));
    let now = Since {
        instant: Instant::now(),
        time: Timestamp::now(),
    };
    known.departures.note(&users, now);
    for ((store, node), since) in known
        .departures
        .ripe(now.instant, shared.policy.ipam.cooldown)
    {
        // The list is some seconds old.
        let object = shared.client.node(&node.name).await?;
        let Some(why) = departed::end(&node, object.as_ref()) else {
            continue;
        };
        let report = free(shared, &store, &node, since.time).await?;
        say(&store, &node, &why, &report);
    }
    Ok(all)
}

/// This machine by its name in the cluster, as its leases have it.
fn identity(shared: &Shared) -> Result<NodeIdentity, RoundError> {
    Ok(NodeIdentity::read(&shared.root, &shared.name)?)
}

/// Announces this node in a store, and reads who did; nobody in one that this node never used.
async fn announced(
    shared: &Shared,
    store: &str,
    own: &NodeObject,
) -> Result<Vec<AnnouncedNode>, RoundError> {
    let (policy, store) = (shared.policy.clone(), store.to_owned());
    let identity = identity(shared)?;
    let machine = own.machine();
    // Then the leases of this machine are by a name that is another one's.
    let is_mine = machine.is_empty() || machine == identity.machine;
    if !is_mine {
        tracing::warn!(
            node = shared.name,
            machine,
            ours = identity.machine,
            "the Node of this name is another machine, so the leases of this one stay when it is gone; set node \
             in the policy to the name that the cluster has for it"
        );
    }
    let uid = own.metadata.uid.clone();
    let read = move || {
        let Some(store) = Store::open_existing(&policy, &store, identity)? else {
            return Ok(Vec::new());
        };
        if is_mine && !store.announce_node(&uid)? {
            tracing::warn!(
                "this machine has no /etc/machine-id, so its leases in shared stores stay when it is gone"
            );
        }
        store.announced_nodes()
    };
    Ok(tokio::task::spawn_blocking(read).await??)
}

async fn free(
    shared: &Shared,
    store: &str,
    node: &AnnouncedNode,
    since: Timestamp,
) -> Result<Report, RoundError> {
    let (policy, store, node) = (shared.policy.clone(), store.to_owned(), node.clone());
    let identity = identity(shared)?;
    let free = move || match Store::open_existing(&policy, &store, identity)? {
        Some(store) => reclaim::of_gone_node(&store, &node, since),
        None => Ok(Report::default()),
    };
    Ok(tokio::task::spawn_blocking(free).await??)
}

fn say(store: &str, node: &AnnouncedNode, why: &str, report: &Report) {
    for (lease, _) in &report.freed {
        tracing::info!(
            store, why, address = %lease.address, holder = %lease.holder,
            "freed the lease of a node that is gone"
        );
    }
    for (lease, because) in &report.kept {
        tracing::warn!(
            store, why, because, address = %lease.address, holder = %lease.holder,
            "kept the lease of a node that is gone; rdma-ipam release --node frees it by your word"
        );
    }
    for error in &report.failed {
        tracing::warn!(
            store,
            node = node.name,
            error,
            "cannot free a lease of a node that is gone"
        );
    }
}
