//! Scans of the host: started, late, ended, and what follows from one.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use hca::HcaId;
use tokio::sync::mpsc;

use super::Daemon;
use crate::config::Gate;
use crate::events::{Trigger, Triggers};
use crate::host_snapshot::HostSnapshot;
use crate::kubelet::service::Waiting;
use crate::links;
use crate::pool_state::GATE_INTERVAL;
use crate::reader::Late;
use crate::run::node_files;
use crate::scan::Scan;
use crate::words::word;

/// How long events are gathered before a scan: a device that appears causes several.
const GATHER_INTERVAL: Duration = Duration::from_millis(10);
/// The same for the configuration's directory, where a file may be written in pieces.
const CONFIGURATION_GATHER_INTERVAL: Duration = Duration::from_millis(200);
/// Shortest time between two scans that events ask for.
const MIN_SCAN_INTERVAL: Duration = Duration::from_millis(50);

/// Tells those who wait for a scan what became of it. One that does not wait any more is passed over.
fn answer(waiting: impl Iterator<Item = Waiting>, outcome: &Result<(), String>) {
    waiting.for_each(|waiting| drop(waiting.send(outcome.clone())));
}

impl Daemon {
    /// Waits a moment for what follows an event, and keeps scans at a distance from each other. A
    /// new configuration outweighs all that is heard with it.
    pub(super) async fn gather(
        &self,
        first: Trigger,
        heard: &mut mpsc::Receiver<Trigger>,
    ) -> Trigger {
        let settle = match first {
            Trigger::Configuration => CONFIGURATION_GATHER_INTERVAL,
            _ => GATHER_INTERVAL.max(MIN_SCAN_INTERVAL.saturating_sub(self.scans.last.elapsed())),
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

    /// Starts a scan, or has one follow the present one.
    pub(super) fn want(&mut self, reason: Trigger) {
        if self.scans.current.is_some() {
            self.scans.wanted = Some(reason);
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
        let (host, addresses) = (&self.settings.paths.host, &self.settings.node_addresses);
        let readers = &self.readers.all;
        self.scans.hung = readers.hung();
        self.scans.current = Scan::start(reason, readers, host.clone(), addresses.clone(), gates);
    }

    /// A container that is about to start waits for a scan that begins now or later, unless there is
    /// one that does not come to its end.
    pub(super) fn wait_for_scan(&mut self, waiting: Waiting) {
        match &mut self.scans.current {
            Some(scan) if scan.is_late() => {
                let late = self.scans.counts.late.as_ref();
                let _ = waiting.send(Err(late.map_or_else(String::new, Late::to_string)));
            }
            Some(_) => {
                self.scans.waiting_next.push(waiting);
                self.scans.wanted.get_or_insert(Trigger::Container);
            }
            None => {
                self.scans.waiting.push(waiting);
                self.want(Trigger::Container);
            }
        }
    }

    /// Starts another scan without the object that the present one hangs at. Where there is no such
    /// object, reports to every waiting caller that the scan does not end, once it is late.
    pub(super) fn look_at_scan(&mut self) {
        let Some(scan) = &mut self.scans.current else {
            return;
        };
        if scan.leave() {
            let reason = scan.reason;
            self.scans.current = None;
            self.scans.counts.late = None;
            self.want(reason);
            return self.note_late_reads();
        }
        let Some(late) = scan.call_late() else {
            return;
        };
        let waiting = self
            .scans
            .waiting
            .drain(..)
            .chain(self.scans.waiting_next.drain(..));
        answer(waiting, &Err(late.to_string()));
        self.scans.counts.late = Some(late);
        self.publish();
        self.note_late_reads();
    }

    /// Logs what began or ceased to hang, and scans what a scan left out or could not pass.
    pub(super) fn note_late_reads(&mut self) {
        let late = self.readers.all.late();
        let is_in = |all: &[Late], one: &Late| {
            let mut all = all.iter();
            all.any(|known| (known.started, &known.what) == (one.started, &one.what))
        };
        for new in late.iter().filter(|one| !is_in(&self.readers.logged, one)) {
            tracing::error!("{new}; what was known stays in force, and the rest goes on");
        }
        for over in self.readers.logged.iter().filter(|one| !is_in(&late, one)) {
            tracing::info!(took = ?over.started.elapsed(), "{} was late and has ended", over.what);
        }
        self.readers.logged = late;
        match &self.scans.current {
            Some(scan) if scan.is_late() && scan.hangs_at_an_object() => self.look_at_scan(),
            None if self.scans.hung != self.readers.all.hung() => self.want(Trigger::Timer),
            _ => {}
        }
    }

    /// Takes in what a scan saw, and starts the one that was wanted meanwhile.
    pub(super) async fn scan_ended(
        &mut self,
        outcome: Result<HostSnapshot, String>,
        triggers: &Triggers,
    ) {
        let Some(scan) = self.scans.current.take() else {
            return;
        };
        let now = Instant::now();
        self.scans.last = now;
        *self.scans.counts.by_trigger.entry(scan.reason).or_default() += 1;
        self.scans.counts.last = scan.elapsed();
        self.scans.counts.late = None;
        let told = match outcome {
            Ok(seen) => {
                self.scans.counts.error = None;
                self.scans.counts.done = true;
                self.read_cdi_obstacle().await;
                self.take_in(&seen, now).await;
                self.set_links_up(&seen).await;
                self.scans.seen = Some(seen);
                Ok(())
            }
            Err(error) => {
                self.scan_failed(error.clone());
                Err(format!("cannot scan the host: {error}"))
            }
        };
        self.watch_nodes(triggers);
        tracing::debug!(reason = word(&scan.reason), took = ?self.scans.counts.last, "scanned the host");
        self.publish();
        answer(self.scans.waiting.drain(..), &told);
        self.scans.waiting = std::mem::take(&mut self.scans.waiting_next);
        if let Some(reason) = self.scans.wanted.take() {
            self.want(reason);
        }
    }

    fn scan_failed(&mut self, error: String) {
        self.scans.counts.failures += 1;
        if self.scans.counts.error.as_ref() != Some(&error) {
            tracing::error!(error, "cannot scan the host; what was known stays in force");
            self.scans.counts.error = Some(error);
        }
        let mut waiting = self.pool_states.handed_over();
        self.scans.due = waiting.next().map(|_| Instant::now() + GATE_INTERVAL);
    }

    /// Takes in what is not about the host, by what the last scan saw.
    pub(super) async fn replan(&mut self) {
        if let Some(seen) = self.scans.seen.take() {
            self.take_in(&seen, Instant::now()).await;
            self.scans.seen = Some(seen);
        }
        self.publish();
    }

    async fn take_in(&mut self, seen: &HostSnapshot, now: Instant) {
        self.scans.netns_mode = seen.inventory.netns_mode;
        let netdevs = seen.inventory.netdevs.iter();
        let indexes = netdevs.map(|netdev| netdev.ifindex).collect();
        self.watched.send_replace(indexes);
        self.take_newest_allocated();
        self.pool_states.allocated.clone_from(&self.allocated);
        let bindings = self.known.bindings.borrow_and_update().clone();
        self.pool_states.bindings_unread = bindings.is_none();
        self.pool_states.bindings = bindings.unwrap_or_default();
        self.scans.due = self.pool_states.update(&self.config, seen, now);
        self.scans.faults.clone_from(&seen.faults);
        self.write_state_files().await;
        let ready = self.write_specifications().await;
        self.sessions.show(&ready);
        self.pool_states.sent(Instant::now());
        if self.pool_states.handed_over().next().is_some() {
            self.known.ask.notify_one();
        }
    }

    /// Sets up what pools want up. The kernel reports the change, which triggers another scan.
    async fn set_links_up(&mut self, seen: &HostSnapshot) {
        let snapshots = &self.pool_states.snapshots;
        let netdevs = &seen.inventory.netdevs;
        let links = &mut self.links;
        let down = links.note(&self.config, snapshots, netdevs, &seen.uplinks);
        if down.is_empty() {
            return;
        }
        let paths = self.settings.paths.clone();
        let outcomes = self.readers.links.run(move || links::set_up(&paths, down));
        if let Ok(outcomes) = outcomes.await {
            self.links.tried(outcomes);
        }
    }

    /// Has the files of this node written. The CNI plugin knows which HCAs are of exclusive pools
    /// before the kubelet hears of them, or it is a fault that this cannot be written.
    async fn write_state_files(&mut self) {
        let exclusive: BTreeSet<HcaId> = self
            .pool_states
            .snapshots
            .iter()
            .filter(|snapshot| !snapshot.pool().sharing.is_shared())
            .flat_map(|snapshot| {
                snapshot
                    .members()
                    .iter()
                    .map(|member| member.hca.id.clone())
            })
            .chain(self.pool_states.handed_over().cloned())
            .chain(self.pool_states.reserved().cloned())
            .collect();
        let good = self
            .config_file
            .kept
            .path()
            .zip(self.config_file.keep.as_deref());
        let known = self.pool_states.memory.text();
        let files = node_files::wanted(&self.settings, &exclusive, known, good);
        match self.files.want(files) {
            true => self.files.settled().await,
            false => self.files.compare(),
        }
    }

    /// Watches the device nodes from the moment on that their directory exists.
    fn watch_nodes(&mut self, triggers: &Triggers) {
        let directory = self.settings.paths.host.dev.join("infiniband");
        let triggers = triggers.clone();
        // What is not reported by an event, the next scan finds.
        let _ = self
            .node_watch
            .renew(&directory, move || triggers.send(Trigger::Node));
    }
}
