//! The loop that owns what changes.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use hca::inventory::Inventory;
use notify::RecommendedWatcher;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::Interval;

use super::{Settings, Signals};
use crate::board::Board;
use crate::config::{self, Config, Delivery};
use crate::deliver::{cdi, device_info, features};
use crate::events::{Bell, Reason, Watched};
use crate::kubelet::holdings::{self, Holdings};
use crate::links::{self, Links};
use crate::observe::Observation;
use crate::reclaim::{Counts, Findings};
use crate::report::{Configuration, Looks, Pool, Report};
use crate::sessions::Sessions;
use crate::snapshot::Snapshot;

/// How long after the start a pool without HCAs tells the kubelet nothing at all.
///
/// Drivers may still be loading. An empty list would set the node's capacity to zero at once,
/// while a stream without a message leaves what the kubelet knew from before.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long events are gathered before a look: a device that appears rings several times.
const GATHER: Duration = Duration::from_millis(10);
/// The same for the configuration's directory, where a file may be written in pieces.
const GATHER_CONFIGURATION: Duration = Duration::from_millis(200);
/// Shortest time between two looks that events ask for.
const SPACING: Duration = Duration::from_millis(50);

/// What others find out beside the looks at the host.
pub(super) struct Known {
    /// Who holds what.
    pub(super) held: watch::Receiver<Option<Arc<Holdings>>>,
    /// What was cleaned up, and what pods have.
    pub(super) found: watch::Receiver<Findings>,
}

/// The state of the daemon.
pub(super) struct Daemon {
    settings: Settings,
    config: Config,
    board: Board,
    sessions: Sessions,
    watched: Watched,
    known: Known,
    looks: Looks,
    configuration: Configuration,
    netns_mode: Option<hca::NetnsMode>,
    started: Instant,
    last_look: Instant,
    /// When to look again because a port will have been up or down for long enough.
    due: Option<Instant>,
    nodes: Option<RecommendedWatcher>,
    /// What Node Feature Discovery was told last, or why it could not be.
    features: Option<Result<String, String>>,
    links: Links,
    report: watch::Sender<Arc<Report>>,
}

impl Daemon {
    pub(super) fn new(
        settings: Settings,
        config: Config,
        mut sessions: Sessions,
        watched: Watched,
        known: Known,
    ) -> Self {
        let started = Instant::now();
        let configuration = Configuration {
            file: settings.config_file.clone(),
            format: config.format,
            generation: 1,
            refused: 0,
            error: None,
        };
        log_configuration(&settings.config_file, &config);
        sessions.follow(&config);
        let report = watch::Sender::new(Arc::new(Report {
            started,
            config: configuration.clone(),
            looks: Looks::default(),
            netns_mode: None,
            pools: Vec::new(),
            left_out: Vec::new(),
            remarks: Vec::new(),
            transitions: Default::default(),
            holdings: None,
            reclaim: Counts::default(),
        }));
        Self {
            settings,
            config,
            board: Board::default(),
            sessions,
            watched,
            known,
            looks: Looks::default(),
            configuration,
            netns_mode: None,
            started,
            last_look: started,
            due: None,
            nodes: None,
            features: None,
            links: Links::default(),
            report,
        }
    }

    pub(super) fn report(&self) -> watch::Receiver<Arc<Report>> {
        self.report.subscribe()
    }

    /// Looks whenever there is a reason to, until a signal or the end of a task.
    pub(super) async fn run(
        mut self,
        bell: &Bell,
        mut heard: mpsc::Receiver<Reason>,
        mut asked: mpsc::Receiver<oneshot::Sender<()>>,
        signals: &mut Signals,
        services: &mut JoinSet<()>,
    ) -> anyhow::Result<()> {
        let configuration = bell.clone();
        let _configuration_watch = self.watch_configuration(move || {
            configuration.ring(Reason::Configuration);
        });
        self.look(Reason::Start, bell).await;
        let mut rescan = interval(self.config.rescan);
        let mut tidy = None;
        let mut patience = Some(tokio::time::Instant::from_std(self.started + PATIENCE));
        let ended = loop {
            let reason = tokio::select! {
                signal = signals.next() => match signal {
                    Some(signal) => {
                        tracing::info!(signal, "stopping");
                        break Ok(());
                    }
                    None => Reason::Signal,
                },
                Some(reason) = heard.recv() => self.gather(reason, &mut heard).await,
                Some(waiting) = asked.recv() => {
                    let mut all = vec![waiting];
                    while let Ok(another) = asked.try_recv() {
                        all.push(another);
                    }
                    self.look(Reason::Container, bell).await;
                    all.into_iter().for_each(|waiting| { let _ = waiting.send(()); });
                    continue;
                }
                () = until(tidy) => {
                    tidy = None;
                    self.tidy().await;
                    continue;
                }
                () = until(patience) => {
                    patience = None;
                    Reason::Timer
                }
                () = until(self.due.map(tokio::time::Instant::from_std)) => Reason::Damping,
                () = tick(&mut rescan) => Reason::Timer,
                Ok(()) = self.known.held.changed() => {
                    self.tidy().await;
                    self.publish();
                    continue;
                }
                Ok(()) = self.known.found.changed() => {
                    self.publish();
                    continue;
                }
                Some(ended) = self.sessions.ended() => {
                    if let Err(error) = ended {
                        break Err(error).context("a kubelet session failed");
                    }
                    continue;
                }
                Some(ended) = services.join_next() => {
                    break match ended {
                        Ok(()) => Err(anyhow::anyhow!("a task of the daemon ended by itself")),
                        Err(error) => Err(error).context("a task of the daemon failed"),
                    };
                }
            };
            if matches!(reason, Reason::Configuration | Reason::Signal) && self.reload() {
                rescan = interval(self.config.rescan);
                // Once it is known what pods held when it changed.
                tidy = Some(tokio::time::Instant::now() + holdings::UP_TO_DATE);
            }
            self.look(reason, bell).await;
        };
        self.sessions.end().await;
        ended
    }

    /// Waits a moment for what follows an event, and keeps looks apart from each other. A new
    /// configuration outweighs all that is heard with it.
    async fn gather(&self, first: Reason, heard: &mut mpsc::Receiver<Reason>) -> Reason {
        let settle = match first {
            Reason::Configuration => GATHER_CONFIGURATION,
            _ => GATHER.max(SPACING.saturating_sub(self.last_look.elapsed())),
        };
        tokio::time::sleep(settle).await;
        let mut reason = first;
        while let Ok(another) = heard.try_recv() {
            if another == Reason::Configuration {
                reason = another;
            }
        }
        reason
    }

    /// Reads the configuration again. A wrong one changes nothing; true if another one is in force.
    fn reload(&mut self) -> bool {
        match config::load(&self.settings.config_file, &self.settings.defaults) {
            Ok(config) => {
                self.configuration.error = None;
                if config == self.config {
                    return false;
                }
                let old = std::mem::replace(&mut self.config, config);
                let pool = |config: &Config, name: &_| {
                    config
                        .pools
                        .iter()
                        .find(|pool| pool.resource == *name)
                        .cloned()
                };
                let new = &self.config;
                self.board
                    .keep_only(|name| pool(&old, name) == pool(new, name));
                self.sessions.follow(&self.config);
                self.configuration.format = self.config.format;
                self.configuration.generation += 1;
                log_configuration(&self.settings.config_file, &self.config);
                true
            }
            Err(error) => {
                let error = error.to_string();
                if self.configuration.error.as_ref() != Some(&error) {
                    tracing::error!(
                        error,
                        "configuration refused; the one before stays in force"
                    );
                    self.configuration.refused += 1;
                    self.configuration.error = Some(error);
                }
                false
            }
        }
    }

    /// Looks at the host off the runtime's thread, and publishes what is seen.
    async fn look(&mut self, reason: Reason, bell: &Bell) {
        let host = self.settings.host.clone();
        let node_addresses = self.settings.node_addresses.clone();
        let before = Instant::now();
        let made =
            tokio::task::spawn_blocking(move || Observation::scan(&host, &node_addresses)).await;
        let now = Instant::now();
        self.last_look = now;
        *self.looks.by_reason.entry(reason).or_default() += 1;
        self.looks.last = now - before;
        self.looks.total += self.looks.last;
        let failure = match made {
            Ok(Ok(seen)) => {
                self.looks.error = None;
                self.take_in(&seen, now).await;
                None
            }
            Ok(Err(error)) => Some(error.to_string()),
            Err(error) => Some(error.to_string()),
        };
        if let Some(error) = failure {
            self.looks.failures += 1;
            if self.looks.error.as_ref() != Some(&error) {
                tracing::error!(
                    error,
                    "cannot look at the host; what was known stays in force"
                );
                self.looks.error = Some(error);
            }
            self.due = None;
        }
        self.watch_nodes(bell);
        tracing::debug!(%reason, took = ?self.looks.last, "looked at the host");
        self.publish();
    }

    async fn take_in(&mut self, seen: &Observation, now: Instant) {
        self.netns_mode = seen.inventory.netns_mode;
        self.watched.set(
            seen.inventory
                .netdevs
                .iter()
                .map(|netdev| netdev.ifindex)
                .collect(),
        );
        self.tell_features(&seen.inventory).await;
        let taken = self.known.found.borrow_and_update().taken.clone();
        self.board.memory_mut().note_taken(taken.iter().cloned());
        self.due = self.board.update(&self.config, seen, now);
        self.set_links_up(&seen.inventory).await;
        let ready = self.write_specifications().await;
        self.sessions
            .show(&ready, self.started.elapsed() < PATIENCE);
    }

    /// Tells Node Feature Discovery, where that is asked for and there is news. What cannot be
    /// written is tried again at the next look.
    async fn tell_features(&mut self, inventory: &Inventory) {
        let Some(directory) = self.settings.features_dir.clone() else {
            return;
        };
        let lines = features::lines(inventory);
        if matches!(&self.features, Some(Ok(told)) if *told == lines) {
            return;
        }
        let text = lines.clone();
        let put = tokio::task::spawn_blocking(move || features::put(&directory, &text)).await;
        let told = match put {
            Ok(Ok(())) => Ok(lines),
            Ok(Err(error)) => Err(error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        if let Err(error) = &told
            && !matches!(&self.features, Some(Err(before)) if before == error)
        {
            tracing::warn!(error, "cannot write node features; see --features-dir");
        }
        self.features = Some(told);
    }

    /// Sets up what pools want up. The kernel tells of the change, which makes the daemon look again.
    async fn set_links_up(&mut self, inventory: &Inventory) {
        let snapshots = self.board.snapshots();
        let down = self.links.note(&self.config, snapshots, &inventory.netdevs);
        if down.is_empty() {
            return;
        }
        let settings = self.settings.reclaim.clone();
        match tokio::task::spawn_blocking(move || links::set_up(&settings, down)).await {
            Ok(outcomes) => self.links.tried(outcomes),
            Err(error) => tracing::error!(%error, "setting links up failed"),
        }
    }

    /// Puts CDI specifications in place, before the kubelet hears of the units in them. A pool
    /// whose specification cannot be written has nothing to give.
    async fn write_specifications(&self) -> Vec<Arc<Snapshot>> {
        let snapshots = self.board.snapshots().to_vec();
        if snapshots
            .iter()
            .all(|snapshot| snapshot.terms().delivery != Delivery::Cdi)
        {
            return snapshots;
        }
        let directory = self.settings.cdi_dir.clone();
        let write = move |snapshots: Vec<Arc<Snapshot>>| {
            let written = snapshots.into_iter().map(|snapshot| {
                if snapshot.terms().delivery != Delivery::Cdi {
                    return snapshot;
                }
                match cdi::write(&directory, &snapshot) {
                    Ok(_) => snapshot,
                    Err(error) => {
                        tracing::error!(resource = %snapshot.resource(), %error, "units cannot be delivered");
                        Arc::new(snapshot.undeliverable(&error.to_string()))
                    }
                }
            });
            written.collect()
        };
        tokio::task::spawn_blocking(move || write(snapshots))
            .await
            .unwrap_or_default()
    }

    /// Removes what was put in place for units that nobody holds any more.
    async fn tidy(&self) {
        let Some(holdings) = self.known.held.borrow().clone() else {
            return;
        };
        let of_cdi = self
            .config
            .pools
            .iter()
            .filter(|pool| pool.delivery == Delivery::Cdi);
        let used: BTreeSet<_> = of_cdi
            .map(|pool| pool.resource.clone())
            .chain(holdings.resources())
            .collect();
        let pools = self.config.pools.iter();
        let held: Vec<_> = pools
            .map(|pool| (pool.resource.clone(), holdings.units(&pool.resource)))
            .collect();
        let (cdi_dir, info_dir) = (
            self.settings.cdi_dir.clone(),
            self.settings.device_info_dir.clone(),
        );
        let tidied = tokio::task::spawn_blocking(move || {
            cdi::remove_unused(&cdi_dir, &used);
            device_info::remove_unheld(&info_dir, &held);
        });
        if let Err(error) = tidied.await {
            tracing::warn!(%error, "tidying failed");
        }
    }

    fn publish(&self) {
        let snapshots = self.board.snapshots();
        let sessions: Vec<_> = self.sessions.states().collect();
        let pools = self.config.pools.iter().filter_map(|pool| {
            let session = sessions.iter().find(|(name, ..)| **name == pool.resource)?;
            Some(Pool {
                resource: pool.resource.clone(),
                snapshot: snapshots
                    .iter()
                    .find(|one| *one.resource() == pool.resource)
                    .cloned(),
                session: session.1.clone(),
                allocations: session.2.clone(),
            })
        });
        self.report.send_replace(Arc::new(Report {
            started: self.started,
            config: self.configuration.clone(),
            looks: self.looks.clone(),
            netns_mode: self.netns_mode,
            pools: pools.collect(),
            left_out: self
                .board
                .left_out()
                .iter()
                .map(ToString::to_string)
                .collect(),
            remarks: [self.board.remarks(), self.links.faults()].concat(),
            transitions: self.board.transitions().clone(),
            holdings: self.known.held.borrow().clone(),
            reclaim: self.known.found.borrow().counts.clone(),
        }));
    }

    /// Watches the directory of the configuration file: a ConfigMap is replaced by a renamed link
    /// beside it.
    fn watch_configuration(&self, wake: impl Fn() + Send + 'static) -> Option<RecommendedWatcher> {
        let file = &self.settings.config_file;
        let parent = file
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        match crate::watch::directory(parent.unwrap_or(Path::new(".")), wake) {
            Ok(watcher) => Some(watcher),
            Err(error) => {
                tracing::warn!(
                    file = %file.display(), %error,
                    "cannot watch the configuration; send SIGHUP after changing it"
                );
                None
            }
        }
    }

    /// Watches the device nodes from the moment on that their directory exists.
    fn watch_nodes(&mut self, bell: &Bell) {
        let directory = self.settings.host.dev.join("infiniband");
        if !directory.is_dir() {
            self.nodes = None;
        } else if self.nodes.is_none() {
            let bell = bell.clone();
            self.nodes = crate::watch::directory(&directory, move || bell.ring(Reason::Node)).ok();
        }
    }
}

fn log_configuration(file: &Path, config: &Config) {
    tracing::info!(
        file = %file.display(), format = %config.format, pools = config.pools.len(),
        "configuration in force"
    );
    for warning in &config.warnings {
        tracing::warn!("configuration: {warning}");
    }
    for refused in &config.refused {
        tracing::error!("configuration: {refused}; this resource is not served, the others are");
    }
}

fn interval(every: Option<Duration>) -> Option<Interval> {
    let every = every?;
    let first = tokio::time::Instant::now().checked_add(every)?;
    let mut ticks = tokio::time::interval_at(first, every);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    Some(ticks)
}

async fn tick(interval: &mut Option<Interval>) {
    match interval {
        Some(ticks) => {
            ticks.tick().await;
        }
        None => std::future::pending().await,
    }
}

async fn until(moment: Option<tokio::time::Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment).await,
        None => std::future::pending().await,
    }
}
