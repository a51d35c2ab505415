//! The loop that owns what changes.
//!
//! ```text
//!   start, timer, event, container, SIGHUP, other configuration      pods, binding, child, port due
//!                      │ want(reason)                                        │
//!                      ▼                                                     ▼
//!   idle ───────▶ scanning ──────── ended ─────▶ host = scan ───────────▶ replan: plan(), then act:
//!    ▲              │    ▲                                                files of the node, CDI files,
//!    │              │    └─ hangs at one object: scan again without it    sessions, linkUp
//!    │              └ late: who waits gets the reason                        │
//!    └──────────────── another scan if wanted ◀───────────── publish, answer who waits
//!
//!   SIGTERM, or a task that ended ──▶ who waits is answered, sessions end
//! ```

mod configuration;
mod delivery;
mod scans;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use hca::host::Hung;
use node::file::FileId;
use node_wire::status::ConfigurationStatus;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Interval;
use tracing::Level;

use super::settings::Settings;
use crate::binding::store::Bindings;
use crate::candidate::memory::Memory;
use crate::config::Config;
use crate::config::last_good::{Kept, REJECTED, Start};
use crate::deliver::device_info;
use crate::events::{Trigger, Triggers};
use crate::host_snapshot::HostSnapshot;
use crate::kubelet::allocated::AllocatedUnits;
use crate::kubelet::service::Waiting;
use crate::links::Links;
use crate::node_socket::NodeSocket;
use crate::node_socket::pods::{self, Pods};
use crate::plan::{History, Plan, World};
use crate::reader::{Late, Reader, Readers};
use crate::reclaim::Counts;
use crate::remarks::Said;
use crate::report::{Report, ScanCounts};
use crate::scan::Scan;
use crate::sessions::Sessions;
use crate::state_files::StateFiles;
use crate::watch::Watch;

/// How often the loop turns at least, and looks for reads that hang.
const PULSE_INTERVAL: Duration = Duration::from_secs(5);
/// How long a turn of the loop waits for a file. What takes longer is as it was before.
const FILE_TIMEOUT: Duration = Duration::from_secs(1);

/// What other tasks find out beside the scans of the host.
pub(super) struct Known {
    /// Who holds what.
    pub(super) held: watch::Receiver<Option<Arc<AllocatedUnits>>>,
    /// Notified, that is found out soon.
    pub(super) ask: Arc<Notify>,
    /// What was cleaned up.
    pub(super) found: watch::Receiver<Counts>,
    /// Which slot is which HCA; none until that was read.
    pub(super) bindings: watch::Receiver<Option<Arc<Bindings>>>,
    /// How the node's socket is doing.
    pub(super) node_socket: NodeSocket,
    /// Asks the kubelet who holds what.
    pub(super) pods: Arc<Pods>,
    /// What may be late.
    pub(super) readers: Readers,
}

/// What a turn of the loop reads and writes that may hang.
struct LoopReaders {
    all: Readers,
    /// The reads that were logged as late.
    logged: Vec<Late>,
    configuration: Reader,
    cdi: Reader,
    leftovers: Reader,
    links: Reader,
}

impl LoopReaders {
    fn new(all: Readers, settings: &Settings) -> Self {
        let file = |thread, what: &str| all.reader(thread, what, FILE_TIMEOUT);
        Self {
            configuration: file("configuration", "the configuration"),
            cdi: file(
                "cdi",
                &format!("the work in {}", settings.paths.cdi_dir.display()),
            ),
            leftovers: file("tidy", "the removal of files that no pod uses"),
            links: file("links", "linkUp"),
            logged: Vec::new(),
            all,
        }
    }
}

/// The configuration file.
struct ConfigFile {
    /// Where it stands, for people.
    state: ConfigurationStatus,
    /// The file that was read last.
    read: Option<FileId>,
    watch: Watch,
    kept: Kept,
    /// The text to keep as the last good one, if it is one.
    keep: Option<String>,
}

/// The scan of the host, and those that are to follow it.
struct Scans {
    counts: ScanCounts,
    current: Option<Scan>,
    /// Why another scan is wanted once the present one has ended, if one is.
    wanted: Option<Trigger>,
    /// Who waits for the present scan, and who for the one after it.
    waiting: Vec<Waiting>,
    waiting_next: Vec<Waiting>,
    /// When the last one ended.
    last: Instant,
    /// What hung when it started.
    hung: Vec<Hung>,
}

impl Scans {
    fn new(started: Instant) -> Self {
        Self {
            counts: ScanCounts::default(),
            current: None,
            wanted: None,
            waiting: Vec::new(),
            waiting_next: Vec::new(),
            last: started,
            hung: Vec::new(),
        }
    }
}

/// The state of the daemon.
pub(super) struct Daemon {
    settings: Settings,
    started: Instant,
    config: Config,
    config_file: ConfigFile,
    scans: Scans,
    /// The last scan.
    host: Option<Arc<HostSnapshot>>,
    world: World,
    history: History,
    plan: Plan,
    sessions: Sessions,
    /// Interface indexes whose link changes matter.
    watched: watch::Sender<BTreeSet<u32>>,
    node_watch: Watch,
    links: Links,
    /// Files for the CNI plugin and the next daemon.
    files: StateFiles,
    known: Known,
    readers: LoopReaders,
    /// When the loop turned last.
    turned: watch::Sender<Instant>,
    said: Said,
    report: watch::Sender<Arc<Report>>,
}

impl Daemon {
    pub(super) fn new(
        settings: Settings,
        start: Start,
        mut sessions: Sessions,
        watched: watch::Sender<BTreeSet<u32>>,
        known: Known,
        files: StateFiles,
        memory: Memory,
    ) -> Self {
        let readers = known.readers.clone();
        let started = Instant::now();
        let Start {
            config,
            keep,
            error,
        } = start;
        if let Some(error) = &error {
            tracing::error!(error, "{REJECTED}");
        }
        let state = ConfigurationStatus {
            file: settings.config_file.clone(),
            format: config.format.to_string(),
            generation: 1,
            error,
        };
        let config_file = ConfigFile {
            state: state.clone(),
            read: FileId::of(&settings.config_file),
            watch: Watch::default(),
            kept: Kept::in_directory(settings.state_dir.as_deref()),
            keep,
        };
        sessions.follow(&config);
        let allocated = known.held.borrow().clone();
        let node_socket = known.node_socket.clone();
        let report = Report::new(started, state, node_socket, readers.clone());
        let daemon = Self {
            readers: LoopReaders::new(readers, &settings),
            settings,
            started,
            config,
            config_file,
            scans: Scans::new(started),
            host: None,
            world: World {
                allocated,
                ..World::default()
            },
            history: History::new(memory),
            plan: Plan::default(),
            sessions,
            watched,
            node_watch: Watch::default(),
            links: Links::default(),
            files,
            known,
            turned: watch::Sender::new(started),
            said: Said::default(),
            report: watch::Sender::new(Arc::new(report)),
        };
        daemon.log_configuration();
        daemon
    }

    pub(super) fn report(&self) -> watch::Receiver<Arc<Report>> {
        self.report.subscribe()
    }

    /// When the loop turned last.
    pub(super) fn turned(&self) -> watch::Receiver<Instant> {
        self.turned.subscribe()
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
        self.watch_configuration(triggers).await;
        self.want(Trigger::Start);
        let mut rescan = interval(self.config.rescan);
        let mut tidy = None;
        let mut pulse = interval(Some(PULSE_INTERVAL));
        let ended = loop {
            self.turned.send_replace(Instant::now());
            let late = self.scans.current.as_ref().and_then(Scan::deadline);
            let due = self.due();
            let reason = tokio::select! {
                signal = signals.next() => match signal {
                    Some(signal) => {
                        tracing::info!(signal, "stopping");
                        break Ok(());
                    }
                    None => Trigger::Signal,
                },
                outcome = Scan::ended(&mut self.scans.current) => {
                    self.scan_ended(outcome, triggers).await;
                    continue;
                }
                () = until(late.map(Into::into)) => {
                    self.look_at_scan();
                    continue;
                }
                () = tick(&mut pulse) => {
                    self.note_late_reads();
                    self.files.compare();
                    self.publish();
                    continue;
                }
                Some(reason) = heard.recv() => self.gather(reason, &mut heard).await,
                Some(waiting) = asked.recv() => {
                    self.wait_for_scan(waiting);
                    continue;
                }
                () = until(tidy) => {
                    tidy = None;
                    self.tidy();
                    continue;
                }
                () = until(due.map(Into::into)) => self.reason_due(),
                () = tick(&mut rescan) => Trigger::Timer,
                Ok(()) = self.known.held.changed() => {
                    self.tidy();
                    // What was too new to be removed is not any more by then.
                    let later = device_info::ALLOCATION_GRACE_PERIOD + pods::UP_TO_DATE_INTERVAL;
                    tidy = Some(tokio::time::Instant::now() + later);
                    Trigger::Pods
                }
                Ok(()) = self.known.found.changed() => {
                    let children = self.known.found.borrow().children.clone();
                    if children == self.world.children {
                        self.publish();
                        continue;
                    }
                    self.world.children = children;
                    Trigger::Child
                }
                Ok(()) = self.known.bindings.changed() => Trigger::Binding,
                Some(()) = self.sessions.ended() => continue,
                Some(_) = services.join_next() => {
                    break Err(anyhow::anyhow!("a task of the daemon ended by itself"));
                }
            };
            if !reason.is_of_host() {
                self.replan().await;
                self.publish();
                continue;
            }
            let asked_for = matches!(reason, Trigger::Configuration | Trigger::Signal);
            let changed = self.watch_configuration(triggers).await;
            if (asked_for || changed) && self.reload().await {
                rescan = interval(self.config.rescan);
                // Once it is known what pods held when it changed.
                tidy = Some(tokio::time::Instant::now() + pods::UP_TO_DATE_INTERVAL);
            }
            self.want(reason);
        };
        // Calls that wait for a scan end now; the scan itself cannot be ended.
        drop((
            std::mem::take(&mut self.scans.waiting),
            std::mem::take(&mut self.scans.waiting_next),
        ));
        drop(asked);
        self.sessions.end().await;
        ended
    }

    /// Publishes the state, and logs the remarks that are new.
    fn publish(&mut self) {
        let pools = self.config.pools.iter();
        let pools = pools.filter_map(|pool| self.sessions.report(&pool.resource));
        let excluded = &self.plan.excluded;
        let host = self.host.as_deref();
        let remarks = [
            self.plan.remarks.as_slice(),
            self.links.faults(),
            host.map_or(&[], |host| &host.faults),
            &self.files.faults(),
        ]
        .concat();
        let said = excluded
            .iter()
            .map(|one| (one.reason.level(), one.to_string()));
        let said = said.chain(remarks.iter().map(|one| (Level::WARN, one.clone())));
        self.said.say(said.collect());
        self.report.send_replace(Arc::new(Report {
            started: self.started,
            config: self.config_file.state.clone(),
            scans: self.scans.counts.clone(),
            netns_mode: host.and_then(|host| host.inventory.netns_mode),
            pools: pools.collect(),
            excluded: excluded.iter().map(ToString::to_string).collect(),
            remarks,
            transitions: self.history.transitions.clone(),
            allocated: self.world.allocated.clone(),
            reclaim: self.known.found.borrow().clone(),
            node_socket: self.known.node_socket.clone(),
            readers: self.readers.all.clone(),
            topology: self.config.topology.clone(),
            bindings: self.world.bindings.clone(),
        }));
    }
}

/// Signals that the daemon acts on.
#[derive(Debug)]
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    quit: Signal,
    hang_up: Signal,
}

impl Signals {
    pub(super) fn new() -> anyhow::Result<Self> {
        let wait = |kind| signal(kind).context("wait for signals");
        Ok(Self {
            terminate: wait(SignalKind::terminate())?,
            interrupt: wait(SignalKind::interrupt())?,
            quit: wait(SignalKind::quit())?,
            hang_up: wait(SignalKind::hangup())?,
        })
    }

    /// The name of a signal that ends the daemon, or `None` for the one that makes it read its
    /// configuration again.
    async fn next(&mut self) -> Option<&'static str> {
        tokio::select! {
            _ = self.terminate.recv() => Some("SIGTERM"),
            _ = self.interrupt.recv() => Some("SIGINT"),
            _ = self.quit.recv() => Some("SIGQUIT"),
            _ = self.hang_up.recv() => None,
        }
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
