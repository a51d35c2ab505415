//! The daemon: wires scans, decisions and the kubelet sessions together, and ends them.
//!
//! ```text
//! tasks, all on one thread                      ─ channel ─▶ who reads it
//! listen ×3: links, devices, RDMA; file watches ─ triggers ▶ loop
//! pods::Pods: asks the kubelet and its files    ─ holdings ▶ loop, binder, garbage, start of containers
//! binder (no task): bind, commit, start, unbind ─ bindings ▶ loop, garbage
//! garbage::keep_tidy, reclaim::keep_reclaiming  ─ found ───▶ loop
//! node_socket: questions of the CNI, rdmactl    ─ removed ─▶ loop
//! loop: scan thread, then plan, then act        ─ lists ───▶ one session for each resource ─▶ kubelet
//!                                               ─ report ──▶ node_socket, http, binder
//! sessions: Allocate                            ─ files ───▶ loop
//! threads: 1, one for each read that may hang while it lasts (`reader`), 1 for each watch of files
//! ```
//!
//! One loop owns all state that changes. Everything else that runs either reads what the loop
//! publishes or sends it a trigger. What is on disk (CDI specifications, device information, the node's
//! state) is replaced whole: a daemon killed at any point is followed by one that finds the host as it is.

mod daemon;
mod settings;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use node::identity::boot_id;
use node_server::http;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::binding::binder::Binder;
use crate::binding::{garbage, store};
use crate::events::Triggers;
use crate::events::netlink::{Source, listen};
use crate::files::Files;
use crate::kubelet::directory;
use crate::kubelet::service::Helpers;
use crate::last_good;
use crate::node_socket::pods::Pods;
use crate::node_socket::{self, NodeSocket};
use crate::reader::{Reader, Readers};
use crate::reclaim;
use crate::report::Report;
use crate::sessions::Sessions;
use crate::telemetry::http::ReportPages;
use crate::telemetry::measured::Measurements;
use daemon::{Daemon, Inputs, Outputs, Signals};
use pools::history::Memory;
pub(crate) use settings::Settings;

/// How long the kubelet may take at the start to say who holds what.
const FIRST_HOLDINGS_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the start waits for files of the node.
const FIRST_FILES_TIMEOUT: Duration = Duration::from_secs(1);
/// How long tasks may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// Runs until a signal.
///
/// # Errors
/// At start, what makes running pointless: a configuration that is wrong where no good one is kept, a
/// device-plugins directory that is not there. Later, only what should be impossible.
pub(crate) fn run(settings: Settings) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // Reads of the kubelet's checkpoint; what else may hang has a reader.
        .max_blocking_threads(8)
        .build()
        .context("start the runtime")?;
    let ended = runtime.block_on(serve(settings));
    // A thread that is stuck in a read cannot be joined; the process ends without it.
    runtime.shutdown_background();
    ended
}

async fn serve(settings: Settings) -> anyhow::Result<()> {
    // Number 1 of a pid namespace does not end by a signal that it has no handler for.
    let mut signals = Signals::new()?;
    let paths = settings.paths.clone();
    directory::check(&paths.device_plugin_dir)?;
    let state_dir = settings.state_dir.as_deref();
    let start = last_good::start(&settings.config_file, &settings.defaults, state_dir)?;
    let stop = CancellationToken::new();
    let mut services = JoinSet::new();
    let (triggers, heard) = Triggers::new();
    let (watched, links) = watch::channel(BTreeSet::new());
    let readers = Readers::default();

    let nonce = format!("{:x}", std::process::id() ^ nanoseconds());
    let plugins = paths.device_plugin_dir.clone();
    let (directory, watching) = directory::watched(plugins, &readers, stop.clone());
    services.spawn(watching);
    for source in [Source::Links(links), Source::Devices, Source::Rdma] {
        services.spawn(listen(source, triggers.clone(), stop.clone()));
    }
    // Who holds what is known before anything is offered, where the kubelet says so.
    let node_files: Reader = readers.reader("node", "the node's files", FIRST_FILES_TIMEOUT);
    let known = paths.clone();
    let policy = node_files.run(move || known.policy());
    let node = paths.node.node.as_deref();
    let node = policy.await.unwrap_or_default().node_name(node);
    let pods = Arc::new(Pods::new(&readers, &paths, node));
    services.spawn(pods.clone().run(stop.clone()));
    // What is not known in time is not offered yet.
    let _ = pods.holdings_of_now(FIRST_HOLDINGS_TIMEOUT).await;
    let known = pods.holdings();
    // What pods have is known before the first scan, so that none of it seems to be gone.
    let known_hcas = paths.clone();
    let reader: Reader = readers.reader("known", "the file of known HCAs", FIRST_FILES_TIMEOUT);
    let mut unread =
        reader.begin(move || Memory::load(&known_hcas.state_dir(), boot_id(&known_hcas.host.proc)));
    // On a node that boots it can take longer than the start waits.
    let memory = daemon::read(&mut unread);
    let memory = tokio::time::timeout(FIRST_FILES_TIMEOUT, memory).await;
    let memory = memory.ok().flatten().unwrap_or_default();
    let reclaimed = watch::Sender::new(reclaim::Counts::default());
    let found = reclaimed.subscribe();
    services.spawn(reclaim::keep_reclaiming(
        paths.clone(),
        settings.reclaim_interval,
        readers.clone(),
        reclaimed,
        stop.clone(),
    ));

    let bindings = Arc::new(store::Store::at(&paths.run_dir));
    let first = bindings.clone();
    // Who is bound is known before the first scan; what fails the rounds try again.
    let _ = node_files.run(move || first.load()).await;
    let files = Files::new(paths.clone(), &readers);
    let socket_path = settings.node_socket.clone();
    let (node_socket, state) = NodeSocket::new(socket_path.clone());
    let (addresses, details) = (settings.metrics_addrs.clone(), settings.details);
    let (remove, removed) = mpsc::channel(16);
    let config = start.status(&settings.config_file);
    let report = Report::new(config, node_socket, readers.clone());
    let report = watch::Sender::new(Arc::new(report));
    let binder = Arc::new(Binder::new(
        &readers,
        paths.clone(),
        pods.clone(),
        report.subscribe(),
        triggers.clone(),
        bindings.clone(),
    ));
    let (written, unwritten) = mpsc::channel(256);
    let helpers = Helpers::new(&readers, &paths, written, binder.clone());
    let daemon = Daemon::new(
        settings,
        start,
        Sessions::new(directory, nonce.clone(), helpers),
        watched,
        (
            Inputs {
                heard,
                held: known.clone(),
                found,
                unread,
                allocated: unwritten,
                removed,
                bindings: bindings.subscribe(),
            },
            Outputs {
                report,
                pods: pods.clone(),
                readers: readers.clone(),
            },
        ),
        files,
        memory,
    );
    services.spawn(garbage::keep_tidy(binder.clone(), known, stop.clone()));
    services.spawn(node_socket::keep_serving(
        (socket_path, nonce),
        (pods, binder, remove),
        daemon.report(),
        state,
        stop.clone(),
    ));
    let measured = Arc::new(Measurements::new(&readers));
    if !addresses.is_empty() {
        services.spawn(measured.clone().keep_reading(paths.clone(), stop.clone()));
    }
    for address in addresses {
        let pages = ReportPages {
            reports: daemon.report(),
            measured: measured.clone(),
            turned: daemon.turned(),
        };
        let pages = Arc::new(pages);
        services.spawn(http::serve(address, details, pages, stop.clone()));
    }
    let ended = daemon.run(&triggers, &mut signals, &mut services).await;
    stop.cancel();
    let over = async { while services.join_next().await.is_some() {} };
    if tokio::time::timeout(END_TIMEOUT, over).await.is_err() {
        tracing::warn!("a task does not end; the daemon ends without it");
    }
    ended
}

/// Two processes that are number 1 of their pid namespaces differ in the moment they start.
fn nanoseconds() -> u32 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map(|since| since.subsec_nanos())
        .unwrap_or_default()
}
