//! Scans of the host: started, late, ended, and what follows from one.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::Daemon;
use crate::events::{Trigger, Triggers};
use crate::links;
use crate::scan::Scan;
use hca::Late;
use pools::config::Gate;
use pools::host_snapshot::HostSnapshot;
use pools::plan::{GATE_INTERVAL, plan};
use pools::words::word;

/// How long events are gathered before a scan: a device that appears causes several.
const GATHER_INTERVAL: Duration = Duration::from_millis(10);
/// The same for the configuration's directory, where a file may be written in pieces.
const CONFIGURATION_GATHER_INTERVAL: Duration = Duration::from_millis(200);
/// Shortest time between two scans that events ask for.
const MIN_SCAN_INTERVAL: Duration = Duration::from_millis(50);

impl Daemon {
    /// Waits a moment for what follows an event, and keeps scans at a distance from each other. A
    /// new configuration outweighs all that is heard with it.
    pub(super) async fn gather(&mut self, first: Trigger) -> Trigger {
        let settle = match first {
            Trigger::Configuration => CONFIGURATION_GATHER_INTERVAL,
            _ => GATHER_INTERVAL.max(MIN_SCAN_INTERVAL.saturating_sub(self.scans.last.elapsed())),
        };
        tokio::time::sleep(settle).await;
        // The one that asks for most.
        let weight = |reason: Trigger| (reason == Trigger::Configuration, reason != Trigger::World);
        let mut reason = first;
        while let Ok(another) = self.inputs.heard.try_recv() {
            if weight(another) > weight(reason) {
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
        let readers = &self.outputs.readers;
        self.scans.hung = readers.hung();
        let policy = self.settings.paths.node.policy.clone();
        self.scans.current = Scan::start(
            reason,
            readers,
            host.clone(),
            addresses.clone(),
            gates,
            policy,
        );
    }

    /// Starts another scan without the object that the present one hangs at. Where there is no such
    /// object, reports that the scan does not end, once it is late.
    pub(super) fn look_at_scan(&mut self) {
        let Some(scan) = &mut self.scans.current else {
            return;
        };
        if scan.leave() {
            let reason = scan.reason;
            self.scans.current = None;
            self.scans.counts.late = None;
            self.want(reason);
        } else {
            let late = scan.look();
            let was_late = std::mem::replace(&mut self.scans.counts.late, late).is_some();
            if was_late || self.scans.counts.late.is_none() {
                return;
            }
            self.publish();
        }
        self.note_late_reads();
    }

    /// Logs what began or ceased to hang, and scans what a scan left out or could not pass.
    pub(super) fn note_late_reads(&mut self) {
        let late = self.outputs.readers.late();
        let is_in = |all: &[Late], one: &Late| {
            let mut all = all.iter();
            all.any(|known| (known.started, &known.what) == (one.started, &one.what))
        };
        for new in late.iter().filter(|one| !is_in(&self.logged, one)) {
            tracing::error!("{new}; what was known stays in force, and the rest goes on");
        }
        for over in self.logged.iter().filter(|one| !is_in(&late, one)) {
            tracing::info!(took = ?over.started.elapsed(), "{} was late and has ended", over.what);
        }
        self.logged = late;
        if self.scans.current.is_none() && self.scans.hung != self.outputs.readers.hung() {
            self.want(Trigger::Timer);
        }
    }

    /// Takes in what a scan saw, and returns why another was wanted meanwhile, if one was.
    pub(super) async fn scan_ended(
        &mut self,
        outcome: Result<HostSnapshot, String>,
        triggers: &Triggers,
    ) -> Option<Trigger> {
        let scan = self.scans.current.take()?;
        let now = Instant::now();
        self.scans.last = now;
        *self.scans.counts.by_trigger.entry(scan.reason).or_default() += 1;
        self.scans.counts.last = scan.elapsed();
        self.scans.counts.late = None;
        match outcome {
            Ok(seen) => {
                self.scans.counts.error = None;
                self.scans.counts.done = true;
                let netdevs = seen.inventory.netdevs.iter();
                let indexes = netdevs.map(|netdev| netdev.ifindex).collect();
                self.watched.send_replace(indexes);
                self.host = Some(Arc::new(seen));
                self.replan().await;
            }
            Err(error) => self.scan_failed(error),
        }
        self.watch_nodes(triggers);
        tracing::debug!(reason = word(&scan.reason), took = ?self.scans.counts.last, "scanned the host");
        self.publish();
        match self.scans.wanted.take() {
            // As far from this one as from any other: a slow move of a NIC makes events all the time.
            Some(reason) => Some(self.gather(reason).await),
            None => None,
        }
    }

    fn scan_failed(&mut self, error: String) {
        self.scans.counts.failures += 1;
        if self.scans.counts.error.as_ref() != Some(&error) {
            tracing::error!(error, "cannot scan the host; what was known stays in force");
            self.scans.counts.error = Some(error);
        }
        // No other event may come for what it was to find.
        self.plan.scan_due = Instant::now().checked_add(GATE_INTERVAL);
    }

    /// Decides anew by the last scan, and acts on it: files, lists, links.
    pub(super) async fn replan(&mut self) {
        let Some(host) = self.host.clone() else {
            return;
        };
        self.take_newest_allocated();
        let bindings = self.inputs.bindings.borrow_and_update().clone();
        self.world.bindings_unread = bindings.is_none();
        self.world.bindings = bindings.unwrap_or_default();
        let now = Instant::now();
        let plan = |daemon: &mut Self| {
            let (world, history) = (&daemon.world, &mut daemon.history);
            plan(
                &daemon.config,
                &host,
                world,
                history,
                now,
                SystemTime::now(),
            )
        };
        self.plan = plan(self);
        // Containers would start without a device node: the kubelet does not hear of such units.
        if self.write_files().await {
            self.plan = plan(self);
        }
        self.sessions.show(&self.plan.pools);
        self.history.sent(Instant::now());
        // What was not read is tried again.
        if self.world.bindings_unread {
            let again = now.checked_add(super::PULSE_INTERVAL);
            self.plan.due = self.plan.due.into_iter().chain(again).min();
        }
        if self.plan.handed_over().next().is_some() {
            self.outputs.pods.ask_soon();
        }
        self.set_links_up(&host).await;
    }

    /// Sets up what pools want up. The kernel reports the change, which triggers another scan.
    async fn set_links_up(&mut self, seen: &HostSnapshot) {
        let snapshots = &self.plan.pools;
        let netdevs = &seen.inventory.netdevs;
        let links = &mut self.links;
        let down = links.note(snapshots, netdevs, &seen.uplinks);
        if down.is_empty() {
            return;
        }
        let paths = self.settings.paths.clone();
        let outcomes = self.links_reader.run(move || links::set_up(&paths, down));
        if let Ok(outcomes) = outcomes.await {
            self.links.tried(outcomes);
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
