//! The loop that owns what changes.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use diagnostics::container_runtime;
use hca::HcaId;
use hca::inventory::Inventory;
use notify::RecommendedWatcher;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Interval;

use super::{Settings, Signals, node_files};
use crate::config::last_good::{Kept, Start};
use crate::config::{self, Config, Delivery, Gate};
use crate::deliver::choice::{self, Choice};
use crate::deliver::{cdi, device_info};
use crate::events::{Trigger, Triggers, Watched};
use crate::host_snapshot::HostSnapshot;
use crate::kubelet::allocated::{self, AllocatedUnits};
use crate::kubelet::service::Waiting;
use crate::links::{self, Links};
use crate::node_socket::NodeSocket;
use crate::pool_state::PoolStates;
use crate::reclaim::{Counts, Findings};
use crate::report::{Configuration, Pool, Report, ScanCounts};
use crate::scan::Scan;
use crate::sessions::{Sessions, Withhold};
use crate::snapshot::{Shape, Snapshot};
use crate::state_files::StateFiles;

/// How long after the start an incomplete pool is withheld from the kubelet; see [`Withhold`].
const START_GRACE_PERIOD: Duration = Duration::from_secs(30);
/// How long after the host booted its ports may still be training.
const BOOT_GRACE_PERIOD: Duration = Duration::from_secs(180);
/// How long the kubelet may take to say who holds what, before a configuration is used.
const HOLDINGS_TIMEOUT: Duration = Duration::from_secs(1);
/// How long events are gathered before a scan: a device that appears causes several.
const GATHER_INTERVAL: Duration = Duration::from_millis(10);
/// The same for the configuration's directory, where a file may be written in pieces.
const CONFIGURATION_GATHER_INTERVAL: Duration = Duration::from_millis(200);
/// Shortest time between two scans that events ask for.
const MIN_SCAN_INTERVAL: Duration = Duration::from_millis(50);

/// What other tasks find out beside the scans of the host.
pub(super) struct Known {
    /// What the kubelet's gRPC client calls itself.
    pub(super) client: watch::Receiver<Option<String>>,
    /// Who holds what.
    pub(super) held: watch::Receiver<Option<Arc<AllocatedUnits>>>,
    /// What was cleaned up, and what pods have.
    pub(super) found: watch::Receiver<Findings>,
    /// How the node's socket is doing.
    pub(super) node_socket: NodeSocket,
}

/// The state of the daemon.
pub(super) struct Daemon {
    settings: Settings,
    config: Config,
    pool_states: PoolStates,
    sessions: Sessions,
    watched: Watched,
    known: Known,
    scans: ScanCounts,
    configuration: Configuration,
    netns_mode: Option<hca::NetnsMode>,
    started: Instant,
    /// Whether the host booted a moment before.
    booted_now: bool,
    last_scan: Instant,
    scan: Option<Scan>,
    /// Why another scan is wanted once the present one has ended, if one is.
    wanted: Option<Trigger>,
    /// Who waits for the present scan, and who for the one after it.
    waiting: Vec<Waiting>,
    waiting_next: Vec<Waiting>,
    allocated: Option<Arc<AllocatedUnits>>,
    kept: Kept,
    /// The text of the configuration to keep as the last good one, if it is one.
    keep: Option<String>,
    /// Files for the CNI plugin, Node Feature Discovery and the next daemon.
    files: StateFiles,
    /// The file that was read last.
    config_read: Option<FileId>,
    config_watch: Option<(FileId, RecommendedWatcher)>,
    /// Why the configuration's directory is not watched, as it was logged last.
    config_unwatched: Option<String>,
    /// When to scan again because a port will have been up or down for long enough.
    due: Option<Instant>,
    nodes: Option<RecommendedWatcher>,
    /// The HCAs of exclusive pools, as they were to be written for the CNI plugin last.
    exclusive: Option<BTreeSet<HcaId>>,
    /// How pools are delivered that state nothing.
    choice: Choice,
    links: Links,
    /// What could not be read at the last scan, beside RDMA devices.
    faults: Vec<String>,
    report: watch::Sender<Arc<Report>>,
}

impl Daemon {
    pub(super) fn new(
        settings: Settings,
        start: Start,
        mut sessions: Sessions,
        watched: Watched,
        known: Known,
        files: StateFiles,
    ) -> Self {
        let started = Instant::now();
        let booted_now = uptime(&settings.host).is_some_and(|uptime| uptime < BOOT_GRACE_PERIOD);
        let Start {
            config,
            keep,
            error,
        } = start;
        if let Some(error) = &error {
            tracing::error!(
                error,
                "THE CONFIGURATION IS REFUSED; the last good one, which is kept on this node, is in \
                 force until the file is mended"
            );
        }
        let configuration = Configuration {
            file: settings.config_file.clone(),
            format: config.format,
            generation: 1,
            refused: u64::from(error.is_some()),
            error,
        };
        let kept = Kept::in_directory(settings.state_dir.as_deref());
        let config_read = FileId::of(&settings.config_file);
        let allocated = known.held.borrow().clone();
        log_configuration(&settings.config_file, &config);
        sessions.follow(&config);
        let report = watch::Sender::new(Arc::new(Report {
            started,
            config: configuration.clone(),
            scans: ScanCounts::default(),
            netns_mode: None,
            pools: Vec::new(),
            excluded: Vec::new(),
            remarks: Vec::new(),
            transitions: Default::default(),
            allocated: None,
            reclaim: Counts::default(),
            node_socket: known.node_socket.clone(),
        }));
        Self {
            settings,
            config,
            pool_states: PoolStates::default(),
            sessions,
            watched,
            known,
            scans: ScanCounts::default(),
            configuration,
            netns_mode: None,
            started,
            booted_now,
            last_scan: started,
            scan: None,
            wanted: None,
            waiting: Vec::new(),
            waiting_next: Vec::new(),
            allocated,
            kept,
            keep,
            files,
            config_read,
            config_watch: None,
            config_unwatched: None,
            due: None,
            nodes: None,
            exclusive: None,
            choice: Choice::default(),
            links: Links::default(),
            faults: Vec::new(),
            report,
        }
    }

    pub(super) fn report(&self) -> watch::Receiver<Arc<Report>> {
        self.report.subscribe()
    }

    /// Scans whenever there is a reason to, until a signal or the end of a task.
    pub(super) async fn run(
        mut self,
        triggers: &Triggers,
        mut heard: mpsc::Receiver<Trigger>,
        mut asked: mpsc::Receiver<Waiting>,
        signals: &mut Signals,
        services: &mut JoinSet<()>,
    ) -> anyhow::Result<()> {
        self.want(Trigger::Start, triggers);
        let mut rescan = interval(self.config.rescan);
        let mut tidy = None;
        let mut withhold_ends = Some(tokio::time::Instant::from_std(
            self.started + START_GRACE_PERIOD,
        ));
        let ended = loop {
            let late = self.scan.as_ref().and_then(Scan::deadline);
            let reason = tokio::select! {
                signal = signals.next() => match signal {
                    Some(signal) => {
                        tracing::info!(signal, "stopping");
                        break Ok(());
                    }
                    None => Trigger::Signal,
                },
                outcome = Scan::ended(&mut self.scan) => {
                    self.scan_ended(outcome, triggers).await;
                    continue;
                }
                () = until(late.map(Into::into)) => {
                    self.scan_is_late();
                    continue;
                }
                Some(reason) = heard.recv() => self.gather(reason, &mut heard).await,
                Some(waiting) = asked.recv() => {
                    self.wait_for_scan(waiting, triggers);
                    continue;
                }
                () = until(tidy) => {
                    tidy = None;
                    self.tidy().await;
                    continue;
                }
                () = until(withhold_ends) => {
                    withhold_ends = None;
                    Trigger::Timer
                }
                // Set anew by the scan that it asks for.
                () = until(self.due.map(Into::into)) => {
                    self.due = None;
                    Trigger::Damping
                }
                () = tick(&mut rescan) => Trigger::Timer,
                Ok(()) = self.known.client.changed() => {
                    if !self.choose_delivery().await {
                        continue;
                    }
                    Trigger::Delivery
                }
                Ok(()) = self.known.held.changed() => {
                    self.allocated = self.known.held.borrow_and_update().clone();
                    self.tidy().await;
                    // What was too new to be removed is not any more by then.
                    let later = device_info::ALLOCATION_GRACE_PERIOD + allocated::UP_TO_DATE_INTERVAL;
                    tidy = Some(tokio::time::Instant::now() + later);
                    Trigger::Pods
                }
                Ok(()) = self.known.found.changed() => {
                    self.publish();
                    continue;
                }
                () = self.files.changed() => {
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
            let asked_for = matches!(reason, Trigger::Configuration | Trigger::Signal);
            // Events can be missed: a directory that was replaced sends none.
            let changed = FileId::of(&self.settings.config_file) != self.config_read;
            if (asked_for || changed) && self.reload().await {
                rescan = interval(self.config.rescan);
                // Once it is known what pods held when it changed.
                tidy = Some(tokio::time::Instant::now() + allocated::UP_TO_DATE_INTERVAL);
            }
            if asked_for {
                self.choose_delivery().await;
            }
            self.want(reason, triggers);
        };
        // Calls that wait for a scan end now; the scan itself cannot be ended.
        drop((
            std::mem::take(&mut self.waiting),
            std::mem::take(&mut self.waiting_next),
        ));
        drop(asked);
        self.sessions.end().await;
        ended
    }

    /// Starts a scan, or has one follow the present one.
    fn want(&mut self, reason: Trigger, triggers: &Triggers) {
        self.watch_configuration(triggers);
        if let Some(scan) = &mut self.scan {
            if scan.is_late() {
                self.scans.late = Some(scan.call_late());
                self.publish();
            }
            self.wanted = Some(reason);
            return;
        }
        let mut gates: Vec<Gate> = self
            .config
            .pools
            .iter()
            .flat_map(|pool| pool.wait_for.iter().cloned())
            .collect();
        gates.sort();
        gates.dedup();
        let (host, addresses) = (&self.settings.host, &self.settings.node_addresses);
        match Scan::start(reason, host.clone(), addresses.clone(), gates) {
            Ok(scan) => self.scan = Some(scan),
            Err(error) => {
                self.scan_failed(format!("start a thread: {error}"));
                self.waiting.clear();
                self.publish();
            }
        }
    }

    /// A container that is about to start waits for a scan that begins now or later, unless there is
    /// one that does not come to its end.
    fn wait_for_scan(&mut self, waiting: Waiting, triggers: &Triggers) {
        match &mut self.scan {
            Some(scan) if scan.is_late() => {
                let _ = waiting.send(Err(scan.call_late().to_string()));
            }
            Some(_) => {
                self.waiting_next.push(waiting);
                self.wanted.get_or_insert(Trigger::Container);
            }
            None => {
                self.waiting.push(waiting);
                self.want(Trigger::Container, triggers);
            }
        }
    }

    /// Reports to every waiting caller that the present scan does not end.
    fn scan_is_late(&mut self) {
        let Some(scan) = &mut self.scan else { return };
        let late = scan.call_late();
        tracing::error!("{late}; what was known stays in force");
        let waiting = self.waiting.drain(..).chain(self.waiting_next.drain(..));
        waiting.for_each(|waiting| {
            let _ = waiting.send(Err(late.to_string()));
        });
        self.scans.late = Some(late);
        self.publish();
    }

    /// Chooses how pools are delivered that state nothing, when the kubelet or the configuration is
    /// another one, and on SIGHUP. True if it is another delivery than before.
    ///
    /// What pods have stays as it is: the kubelet keeps its answers, CDI files of pods stay in place
    /// and true, and a start with nodes is compared with the nodes of now.
    async fn choose_delivery(&mut self) -> bool {
        let kubelet = self.known.client.borrow_and_update().clone();
        let (host, directory) = (self.settings.host.clone(), self.settings.cdi_dir.clone());
        let read = move || {
            let root = host.sys.parent().unwrap_or(Path::new("/"));
            choice::choose(&choice::Facts {
                kubelet,
                runtime: container_runtime::of_running_runtime(root, &host.proc),
                directory: choice::directory_obstacle(&directory, root == Path::new("/")),
            })
        };
        let chosen = match tokio::task::spawn_blocking(read).await {
            Ok(chosen) => chosen,
            Err(error) => {
                tracing::error!(%error, "choosing a delivery failed");
                return false;
            }
        };
        let is_another = chosen.delivery != self.choice.delivery;
        if chosen != self.choice && self.config.pools.iter().any(|pool| pool.delivery.is_none()) {
            tracing::info!(
                delivery = chosen.delivery.word(),
                reason = chosen.reason,
                "delivery of exclusive pools that state none"
            );
        }
        self.choice = chosen;
        self.pool_states
            .set_automatic_delivery(self.choice.delivery);
        is_another
    }

    /// Waits a moment for what follows an event, and keeps scans at a distance from each other. A
    /// new configuration outweighs all that is heard with it.
    async fn gather(&self, first: Trigger, heard: &mut mpsc::Receiver<Trigger>) -> Trigger {
        let settle = match first {
            Trigger::Configuration => CONFIGURATION_GATHER_INTERVAL,
            _ => GATHER_INTERVAL.max(MIN_SCAN_INTERVAL.saturating_sub(self.last_scan.elapsed())),
        };
        tokio::time::sleep(settle).await;
        let mut reason = first;
        while let Ok(another) = heard.try_recv() {
            if another == Trigger::Configuration {
                reason = another;
            }
        }
        reason
    }

    /// Reads the configuration again. A wrong one changes nothing, and so does one that is wrong in
    /// part: what is in force is better. True if another one is in force.
    async fn reload(&mut self) -> bool {
        let file = self.settings.config_file.clone();
        self.config_read = FileId::of(&file);
        let read = config::text(&file).and_then(|text| {
            let config = config::check(&file, &text, &self.settings.defaults)?;
            Ok((text, config))
        });
        let error = match read {
            Ok((_, config)) if config == self.config => {
                self.configuration.error = None;
                return false;
            }
            Ok((text, config)) if config.refused.is_empty() => {
                self.keep = Some(text);
                self.follow(config).await;
                return true;
            }
            Ok((_, config)) => config.refused.join("; "),
            Err(error) => error.to_string(),
        };
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

    /// Puts a configuration in force. Who holds what is asked first: an HCA that a pod has for itself
    /// must not be offered by another pool.
    async fn follow(&mut self, config: Config) {
        if let Ok(allocated) = allocated::ask(&self.settings.sources(), HOLDINGS_TIMEOUT).await {
            let allocated = allocated.with_names_of(self.allocated.as_deref());
            self.allocated = Some(Arc::new(allocated));
        }
        self.configuration.error = None;
        let old = std::mem::replace(&mut self.config, config);
        let pool = |config: &Config, name: &_| {
            config
                .pools
                .iter()
                .find(|pool| pool.resource == *name)
                .cloned()
        };
        let new = &self.config;
        self.pool_states
            .keep_only(|name| pool(&old, name) == pool(new, name));
        self.sessions.follow(&self.config);
        self.configuration.format = self.config.format;
        self.configuration.generation += 1;
        log_configuration(&self.settings.config_file, &self.config);
    }

    /// Takes in what a scan saw, and starts the one that was wanted meanwhile.
    async fn scan_ended(&mut self, outcome: Result<HostSnapshot, String>, triggers: &Triggers) {
        let Some(scan) = self.scan.take() else { return };
        let now = Instant::now();
        self.last_scan = now;
        *self.scans.by_trigger.entry(scan.reason).or_default() += 1;
        self.scans.last = scan.elapsed();
        self.scans.total += self.scans.last;
        if self.scans.late.take().is_some() {
            tracing::info!(took = ?self.scans.last, "the scan that was late has ended");
        }
        match outcome {
            Ok(seen) => {
                self.scans.error = None;
                self.scans.done = true;
                self.take_in(&seen, now).await;
            }
            Err(error) => self.scan_failed(error),
        }
        self.watch_nodes(triggers);
        tracing::debug!(reason = %scan.reason, took = ?self.scans.last, "scanned the host");
        self.publish();
        for waiting in self.waiting.drain(..) {
            // A container that does not wait any more is none of our business.
            let _ = waiting.send(Ok(()));
        }
        self.waiting = std::mem::take(&mut self.waiting_next);
        if let Some(reason) = self.wanted.take() {
            self.want(reason, triggers);
        }
    }

    fn scan_failed(&mut self, error: String) {
        self.scans.failures += 1;
        if self.scans.error.as_ref() != Some(&error) {
            tracing::error!(error, "cannot scan the host; what was known stays in force");
            self.scans.error = Some(error);
        }
        self.due = None;
    }

    async fn take_in(&mut self, seen: &HostSnapshot, now: Instant) {
        self.netns_mode = seen.inventory.netns_mode;
        self.watched.set(
            seen.inventory
                .netdevs
                .iter()
                .map(|netdev| netdev.ifindex)
                .collect(),
        );
        let taken = self.known.found.borrow_and_update().taken.clone();
        self.pool_states
            .memory_mut()
            .note_taken(taken.iter().cloned());
        self.pool_states.set_holdings(self.allocated.clone());
        self.due = self.pool_states.update(&self.config, seen, now);
        self.faults.clone_from(&seen.faults);
        self.set_links_up(&seen.inventory).await;
        self.write_state_files(&seen.inventory).await;
        let ready = self.write_specifications().await;
        let withhold = match self.started.elapsed() < START_GRACE_PERIOD {
            true if self.booted_now => Withhold::DriversAndPorts,
            true => Withhold::Drivers,
            false => Withhold::Over,
        };
        self.sessions.show(&ready, withhold);
    }

    /// Sets up what pools want up. The kernel reports the change, which triggers another scan.
    async fn set_links_up(&mut self, inventory: &Inventory) {
        let snapshots = self.pool_states.snapshots();
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

    /// Has the files of this node written. The CNI plugin knows which HCAs are of exclusive pools
    /// before the kubelet hears of them, or it is a fault that this cannot be written.
    async fn write_state_files(&mut self, inventory: &Inventory) {
        let exclusive: BTreeSet<HcaId> = self
            .pool_states
            .snapshots()
            .iter()
            .filter(|snapshot| matches!(snapshot.shape(), Shape::Exclusive { .. }))
            .flat_map(|snapshot| snapshot.members().iter().map(|member| member.id.clone()))
            .collect();
        let good = self.kept.path().zip(self.keep.as_deref());
        let files = node_files::wanted(&self.settings, &exclusive, inventory, good);
        self.files.want(files);
        if self.exclusive.as_ref() != Some(&exclusive) {
            self.files.settled().await;
            self.exclusive = Some(exclusive);
        }
    }

    /// Puts CDI specifications in place, before the kubelet hears of the units in them. A pool
    /// whose specification cannot be written has nothing to give.
    async fn write_specifications(&self) -> Vec<Arc<Snapshot>> {
        let snapshots = self.pool_states.snapshots().to_vec();
        let directory = self.settings.cdi_dir.clone();
        let has_no_file = |snapshot: &Arc<Snapshot>| {
            snapshot.terms().delivery != Delivery::Cdi
                && !cdi::exists(&directory, snapshot.resource())
        };
        if snapshots.iter().all(has_no_file) {
            return snapshots;
        }
        let stated: BTreeSet<_> = self
            .config
            .pools
            .iter()
            .filter(|pool| pool.delivery.is_some())
            .map(|pool| pool.resource.clone())
            .collect();
        let write = move |snapshots: Vec<Arc<Snapshot>>| {
            let written = snapshots.into_iter().map(|snapshot| {
                let by_cdi = snapshot.terms().delivery == Delivery::Cdi;
                // Of a pool that was delivered by CDI before, pods may still hold names.
                if !by_cdi && !cdi::exists(&directory, snapshot.resource()) {
                    return snapshot;
                }
                match cdi::write(&directory, &snapshot) {
                    Ok(_) => snapshot,
                    Err(error) if by_cdi && stated.contains(snapshot.resource()) => {
                        tracing::error!(resource = %snapshot.resource(), %error, "units cannot be delivered");
                        Arc::new(snapshot.undeliverable(&error.to_string()))
                    }
                    Err(error) => {
                        tracing::error!(resource = %snapshot.resource(), %error, "device nodes are delivered instead");
                        Arc::new(snapshot.by_device_nodes())
                    }
                }
            });
            written.collect()
        };
        tokio::task::spawn_blocking(move || write(snapshots))
            .await
            .unwrap_or_default()
    }

    /// Removes what was put in place for units that no pod holds any more.
    async fn tidy(&self) {
        // What is no news is in the newest answer alone, and says until when it is none.
        let newest = self.known.held.borrow().clone();
        let known = [newest, self.allocated.clone()].into_iter().flatten();
        let Some(allocated) = known.max_by_key(|allocated| allocated.asked()) else {
            return;
        };
        let asked = allocated.asked();
        let of_cdi = self
            .config
            .pools
            .iter()
            .filter(|pool| pool.delivery != Some(Delivery::DeviceSpecs));
        let used: BTreeSet<_> = of_cdi
            .map(|pool| pool.resource.clone())
            .chain(allocated.resources())
            .collect();
        let pools = self.config.pools.iter();
        let held: Vec<_> = pools
            .map(|pool| (pool.resource.clone(), allocated.units(&pool.resource)))
            .collect();
        let (cdi_dir, info_dir) = (
            self.settings.cdi_dir.clone(),
            self.settings.device_info_dir.clone(),
        );
        let tidied = tokio::task::spawn_blocking(move || {
            cdi::remove_unused(&cdi_dir, &used);
            device_info::remove_unallocated(&info_dir, &held, asked);
        });
        if let Err(error) = tidied.await {
            tracing::warn!(%error, "tidying failed");
        }
    }

    fn publish(&self) {
        let mut sessions: BTreeMap<_, _> = self
            .sessions
            .reports()
            .map(|session| (session.resource, session))
            .collect();
        let pools = self.config.pools.iter().filter_map(|pool| {
            let session = sessions.remove(&pool.resource)?;
            Some(Pool {
                resource: pool.resource.clone(),
                delivery_reason: match pool.delivery {
                    Some(_) => "as configured".to_owned(),
                    None => self.choice.reason.clone(),
                },
                snapshot: session.shown,
                session: session.state,
                allocations: session.allocations,
            })
        });
        self.report.send_replace(Arc::new(Report {
            started: self.started,
            config: self.configuration.clone(),
            scans: self.scans.clone(),
            netns_mode: self.netns_mode,
            pools: pools.collect(),
            excluded: self
                .pool_states
                .excluded()
                .iter()
                .map(ToString::to_string)
                .collect(),
            remarks: [
                self.pool_states.remarks(),
                self.links.faults(),
                &self.faults,
                &self.files.faults(),
            ]
            .concat(),
            transitions: self.pool_states.transitions().clone(),
            allocated: self.allocated.clone(),
            reclaim: self.known.found.borrow().counts.clone(),
            node_socket: self.known.node_socket.clone(),
        }));
    }

    /// Watches the directory of the configuration file: a ConfigMap is replaced by a renamed link
    /// beside it. A directory that was itself replaced is watched anew.
    fn watch_configuration(&mut self, triggers: &Triggers) {
        let file = &self.settings.config_file;
        let parent = file
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        let directory = parent.unwrap_or(Path::new("."));
        let now = FileId::of_directory(directory);
        if now == self.config_watch.as_ref().map(|(id, _)| *id) {
            return;
        }
        self.config_watch = None;
        let Some(id) = now else { return };
        let triggers = triggers.clone();
        match crate::watch::directory(directory, move || triggers.send(Trigger::Configuration)) {
            Ok(watcher) => {
                self.config_watch = Some((id, watcher));
                self.config_unwatched = None;
            }
            Err(error) => {
                let error = error.to_string();
                if self.config_unwatched.as_ref() != Some(&error) {
                    tracing::warn!(
                        file = %file.display(), error,
                        "cannot watch the configuration; it is read before each scan"
                    );
                    self.config_unwatched = Some(error);
                }
            }
        }
    }

    /// Watches the device nodes from the moment on that their directory exists.
    fn watch_nodes(&mut self, triggers: &Triggers) {
        let directory = self.settings.host.dev.join("infiniband");
        if !directory.is_dir() {
            self.nodes = None;
        } else if self.nodes.is_none() {
            let triggers = triggers.clone();
            self.nodes =
                crate::watch::directory(&directory, move || triggers.send(Trigger::Node)).ok();
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

/// A file or directory, distinguished from its successor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileId {
    device: u64,
    inode: u64,
    /// Size and time of change; zero for a directory, which changes with what is in it.
    version: (u64, i64, i64),
}

impl FileId {
    fn of(path: &Path) -> Option<Self> {
        let meta = std::fs::metadata(path).ok()?;
        Some(Self {
            device: meta.dev(),
            inode: meta.ino(),
            version: (meta.len(), meta.mtime(), meta.mtime_nsec()),
        })
    }

    fn of_directory(path: &Path) -> Option<Self> {
        Some(Self {
            version: (0, 0, 0),
            ..Self::of(path)?
        })
    }
}

/// How long ago the host booted (`/proc/uptime`, proc(5)).
fn uptime(host: &hca::Host) -> Option<Duration> {
    let text = std::fs::read_to_string(host.proc.join("uptime")).ok()?;
    let seconds: f64 = text.split(' ').next()?.trim().parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
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
