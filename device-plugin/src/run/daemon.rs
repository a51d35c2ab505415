//! The loop that owns what changes.
//!
//! ```text
//!   start, timer, event, container, SIGHUP, other configuration      pods, binding, child, port due
//!                      │ want(reason)                                        │
//!                      ▼                                                     ▼
//!   idle ───────▶ scanning ──────── ended ─────▶ host = scan ───────────▶ replan: plan(), then act:
//!    ▲              │    ▲                                                files of the node, CDI files,
//!    │              │    └─ hangs at one object: scan again without it    sessions, linkUp
//!    │              └ late: the report says so                               │
//!    └──────────────── another scan if wanted ◀───────────── publish                  
//!
//!   SIGTERM, or a task that ended ──▶ sessions end
//! ```

mod configuration;
mod delivery;
mod scans;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use hca::HcaId;
use hca::host::Hung;
use node::file::FileId;
use node_wire::status::ConfigurationStatus;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tracing::Level;

use super::settings::Settings;
use crate::events::{Trigger, Triggers};
use crate::files::Files;
use crate::last_good::{REJECTED, Start};
use crate::links::Links;
use crate::node_socket::pods::Pods;
use crate::reader::{Reader, Readers};
use crate::reclaim::Counts;
use crate::remarks::Said;
use crate::report::{Report, ScanCounts};
use crate::scan::Scan;
use crate::sessions::Sessions;
use crate::watch::Watch;
use hca::Late;
use pools::binding::record::Bindings;
use pools::config::Config;
use pools::deliver::device_info;
use pools::history::Memory;
use pools::holdings::Holdings;
use pools::host_snapshot::HostSnapshot;
use pools::plan::{History, Plan, World};

/// How often the loop turns at least, and looks for reads that hang.
const PULSE_INTERVAL: Duration = Duration::from_secs(5);
/// How long a turn of the loop waits for a file. What takes longer is as it was before.
const FILE_TIMEOUT: Duration = Duration::from_secs(1);

/// What other tasks find out.
pub(super) struct Inputs {
    /// Events.
    pub(super) heard: mpsc::Receiver<Trigger>,
    /// Who holds what.
    pub(super) held: watch::Receiver<Option<Arc<Holdings>>>,
    /// What was cleaned up.
    pub(super) found: watch::Receiver<Counts>,
    /// What earlier daemons knew of HCAs, if that is not read yet.
    pub(super) unread: Option<oneshot::Receiver<Memory>>,
    /// Device information of units that were allocated.
    pub(super) allocated: mpsc::Receiver<device_info::Files>,
    /// HCAs that were removed for good.
    pub(super) removed: mpsc::Receiver<HcaId>,
    /// Which slot is which HCA; none until that was read.
    pub(super) bindings: watch::Receiver<Option<Arc<Bindings>>>,
}

/// One of them that is new.
enum Input {
    Heard(Trigger),
    /// Holdings or bindings.
    World,
    Found,
    Known(Memory),
    Allocated(device_info::Files),
    Removed(HcaId),
}

impl Inputs {
    /// Waits until one of them is new. Can be dropped at any time.
    async fn next(&mut self) -> Input {
        tokio::select! {
            Some(trigger) = self.heard.recv() => Input::Heard(trigger),
            Ok(()) = self.held.changed() => Input::World,
            Ok(()) = self.bindings.changed() => Input::World,
            Ok(()) = self.found.changed() => Input::Found,
            Some(memory) = read(&mut self.unread) => Input::Known(memory),
            Some(files) = self.allocated.recv() => Input::Allocated(files),
            Some(hca) = self.removed.recv() => Input::Removed(hca),
            else => std::future::pending().await,
        }
    }
}

/// What is read, once it is.
pub(super) async fn read(unread: &mut Option<oneshot::Receiver<Memory>>) -> Option<Memory> {
    let value = unread.as_mut()?.await;
    *unread = None;
    value.ok()
}

/// What the loop asks of others and says to them.
pub(super) struct Outputs {
    pub(super) report: watch::Sender<Arc<Report>>,
    /// Asks the kubelet who holds what.
    pub(super) pods: Arc<Pods>,
    /// What may be late.
    pub(super) readers: Readers,
}

/// The configuration file.
struct ConfigFile {
    /// Where it stands, for people.
    state: ConfigurationStatus,
    /// The file that was read last.
    read: Option<FileId>,
    reader: Reader,
    watch: Watch,
    /// The text to keep as the last good one, if it is one.
    keep: Option<String>,
}

/// The scan of the host, and those that are to follow it.
struct Scans {
    counts: ScanCounts,
    current: Option<Scan>,
    /// Why another scan is wanted once the present one has ended, if one is.
    wanted: Option<Trigger>,
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
            last: started,
            hung: Vec::new(),
        }
    }
}

/// The state of the daemon.
pub(super) struct Daemon {
    settings: Settings,
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
    links_reader: Reader,
    /// Files for other programs and the next daemon.
    files: Files,
    /// Device information of units that were allocated a moment ago, by the names of files.
    allocated: BTreeMap<String, (String, Instant)>,
    outputs: Outputs,
    inputs: Inputs,
    /// When the loop turns at the latest.
    pulse: Instant,
    /// When the host is scanned without an event.
    rescan: Option<Instant>,
    /// The reads that were logged as late.
    logged: Vec<Late>,
    /// When the loop turned last.
    turned: watch::Sender<Instant>,
    said: Said,
}

impl Daemon {
    pub(super) fn new(
        settings: Settings,
        start: Start,
        mut sessions: Sessions,
        watched: watch::Sender<BTreeSet<u32>>,
        (inputs, outputs): (Inputs, Outputs),
        files: Files,
        memory: Memory,
    ) -> Self {
        let started = Instant::now();
        if let Some(error) = &start.error {
            tracing::error!(error, "{REJECTED}");
        }
        let reader = |thread, what: &str| outputs.readers.reader(thread, what, FILE_TIMEOUT);
        let config_file = ConfigFile {
            state: start.status(&settings.config_file),
            read: FileId::of(&settings.config_file),
            reader: reader("configuration", "the configuration"),
            watch: Watch::default(),
            keep: start.keep,
        };
        sessions.follow(&start.config);
        let allocated = inputs.held.borrow().clone();
        let daemon = Self {
            links_reader: reader("links", "linkUp"),
            logged: Vec::new(),
            settings,
            config: start.config,
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
            allocated: BTreeMap::new(),
            outputs,
            inputs,
            pulse: started,
            rescan: None,
            turned: watch::Sender::new(started),
            said: Said::default(),
        };
        daemon.log_configuration();
        daemon
    }

    pub(super) fn report(&self) -> watch::Receiver<Arc<Report>> {
        self.outputs.report.subscribe()
    }

    /// When the loop turned last.
    pub(super) fn turned(&self) -> watch::Receiver<Instant> {
        self.turned.subscribe()
    }

    /// Decides whenever there is a reason to, until a signal or the end of a task.
    pub(super) async fn run(
        mut self,
        triggers: &Triggers,
        signals: &mut Signals,
        services: &mut JoinSet<()>,
    ) -> anyhow::Result<()> {
        self.watch_configuration(triggers).await;
        self.rescan = after(self.config.rescan);
        self.want(Trigger::Start);
        let ended = loop {
            self.turned.send_replace(Instant::now());
            let due = self.next_due();
            let trigger = tokio::select! {
                signal = signals.next() => match signal {
                    Some(signal) => {
                        tracing::info!(signal, "stopping");
                        break Ok(());
                    }
                    None => Some(Trigger::Signal),
                },
                outcome = Scan::ended(&mut self.scans.current) => {
                    self.scan_ended(outcome, triggers).await
                }
                input = self.inputs.next() => self.take_in(input).await,
                () = tokio::time::sleep_until(due.into()) => self.turn(),
                Some(()) = self.sessions.ended() => None,
                Some(_) = services.join_next() => {
                    break Err(anyhow::anyhow!("a task of the daemon ended by itself"));
                }
            };
            match trigger {
                Some(Trigger::World) => {
                    self.replan().await;
                    self.publish();
                }
                Some(trigger) => {
                    let asked_for = matches!(trigger, Trigger::Configuration | Trigger::Signal);
                    let changed = self.watch_configuration(triggers).await;
                    if (asked_for || changed) && self.reload().await {
                        self.rescan = after(self.config.rescan);
                    }
                    self.want(trigger);
                }
                None => {}
            }
        };
        self.sessions.end().await;
        ended
    }

    /// When something happens without anything new.
    fn next_due(&self) -> Instant {
        let look = self.scans.current.as_ref().map(|scan| scan.look);
        let times = [look, self.plan.due, self.plan.scan_due, self.rescan];
        times.into_iter().flatten().fold(self.pulse, Instant::min)
    }

    /// Does what is due, and returns why to decide anew, if so.
    fn turn(&mut self) -> Option<Trigger> {
        let now = Instant::now();
        let is_due = |at: &mut Option<Instant>| at.take_if(|at| *at <= now).is_some();
        if self
            .scans
            .current
            .as_ref()
            .is_some_and(|scan| scan.look <= now)
        {
            self.look_at_scan();
        }
        // What is taken here is set anew by what follows.
        if is_due(&mut self.plan.scan_due) {
            return Some(Trigger::Timer);
        }
        if is_due(&mut self.rescan) {
            self.rescan = after(self.config.rescan);
            return Some(Trigger::Timer);
        }
        let mut is_plan_due = is_due(&mut self.plan.due);
        if self.pulse <= now {
            self.pulse = now + PULSE_INTERVAL;
            self.note_late_reads();
            is_plan_due |= self.compare_files();
            if !is_plan_due {
                self.publish();
            }
        }
        is_plan_due.then_some(Trigger::World)
    }

    /// Takes in what is new, and returns why to decide anew, if so.
    async fn take_in(&mut self, input: Input) -> Option<Trigger> {
        let trigger = match input {
            Input::Heard(trigger) => trigger,
            Input::World => Trigger::World,
            Input::Allocated(files) => {
                self.note_allocated(files);
                return None;
            }
            Input::Known(memory) => {
                self.history.memory.recall(memory);
                Trigger::World
            }
            Input::Removed(hca) => {
                self.history.memory.forget(&hca);
                return Some(Trigger::World);
            }
            Input::Found => {
                let children = self.inputs.found.borrow().children.clone();
                if children == self.world.children {
                    self.publish();
                    return None;
                }
                self.world.children = children;
                return Some(Trigger::World);
            }
        };
        Some(self.gather(trigger).await)
    }

    /// Publishes the state, and logs the remarks that are new.
    fn publish(&mut self) {
        let pools = self.config.pools.iter();
        let pools = pools.filter_map(|pool| self.sessions.report(&pool.resource));
        let excluded = &self.plan.excluded;
        let host = self.host.as_deref();
        let missing = self.plan.missing.iter().map(ToString::to_string);
        let missing: Vec<String> = missing.collect();
        let remarks = [
            self.plan.remarks.as_slice(),
            &missing,
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
        let before = self.outputs.report.borrow().clone();
        self.outputs.report.send_replace(Arc::new(Report {
            config: self.config_file.state.clone(),
            flap_hold: self.config.damping.flap_hold,
            scans: self.scans.counts.clone(),
            netns_mode: host.and_then(|host| host.inventory.netns_mode),
            pools: pools.collect(),
            excluded: excluded.iter().map(ToString::to_string).collect(),
            hcas: self.plan.hcas.clone(),
            missing: self.plan.missing.clone(),
            remarks,
            transitions: self.history.transitions.clone(),
            allocated: self.world.allocated.clone(),
            reclaim: self.inputs.found.borrow().clone(),
            topology: self.config.topology.clone(),
            bindings: self.world.bindings.clone(),
            ..Report::clone(&before)
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

/// That long from now; never where the clock cannot hold it.
fn after(time: Option<Duration>) -> Option<Instant> {
    Instant::now().checked_add(time?)
}
