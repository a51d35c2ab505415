//! The daemon: wires looking, deciding and the kubelet sessions together, and ends them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use hca::Host;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::config::{self, Config};
use crate::kubelet::directory::{self, Contents};
use crate::kubelet::session::{SOCKET_PREFIX, Session, SocketName, State, Timing};
use crate::observe::Observation;
use crate::publish::{PATIENCE, Publisher};

/// What the daemon is started with.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Configuration file.
    pub config_file: PathBuf,
    /// What the command line says about configurations of the peers.
    pub defaults: config::Defaults,
    /// The kubelet's device-plugins directory.
    pub device_plugin_dir: PathBuf,
    /// Roots of the host's kernel file systems.
    pub host: Host,
}

/// Runs until a signal.
///
/// # Errors
/// At start, what makes running pointless: a configuration that is wrong, a device-plugins
/// directory that is not there. Later, only what should be impossible.
pub fn run(settings: Settings) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(2)
        .build()
        .context("start the runtime")?;
    runtime.block_on(serve(settings))
}

async fn serve(settings: Settings) -> anyhow::Result<()> {
    let started = Instant::now();
    directory::check(&settings.device_plugin_dir)?;
    let config = config::load(&settings.config_file, &settings.defaults)?;
    tracing::info!(
        file = %settings.config_file.display(), format = %config.format, pools = config.pools.len(),
        "configuration read"
    );
    for warning in &config.warnings {
        tracing::warn!("configuration: {warning}");
    }
    let stop = CancellationToken::new();
    let mut tasks = JoinSet::new();
    let contents = watch::Sender::new(Contents::default());
    let seen_there = contents.subscribe();
    tasks.spawn(directory::keep_watch(
        settings.device_plugin_dir.clone(),
        SOCKET_PREFIX,
        contents,
        stop.clone(),
    ));
    let mut publisher = Publisher::new(&config, started);
    look(&settings.host, &config, &mut publisher).await;
    let nonce = format!("{:x}", std::process::id() ^ nanoseconds());
    for pool in &config.pools {
        let Some(feed) = publisher.feed(&pool.resource) else {
            continue;
        };
        let session = Session {
            resource: pool.resource.clone(),
            directory: settings.device_plugin_dir.clone(),
            socket: SocketName::new(&pool.resource, &nonce),
            contents: seen_there.clone(),
            feed,
            state: watch::Sender::new(State::default()),
            allocations: Arc::default(),
            timing: Timing::default(),
            stop: stop.clone(),
        };
        tasks.spawn(session.run());
    }
    let ended = keep_looking(&settings, &config, &mut publisher, &mut tasks).await;
    stop.cancel();
    while tasks.join_next().await.is_some() {}
    ended
}

/// Looks again whenever there is a reason to, until a signal or the end of a task.
async fn keep_looking(
    settings: &Settings,
    config: &Config,
    publisher: &mut Publisher,
    tasks: &mut JoinSet<()>,
) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("wait for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("wait for SIGINT")?;
    let mut quit = signal(SignalKind::quit()).context("wait for SIGQUIT")?;
    let late = tokio::time::sleep(PATIENCE);
    tokio::pin!(late);
    let mut late_done = false;
    let mut rescan = config.rescan.map(|every| {
        let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + every, every);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        ticks
    });
    loop {
        let tick = async {
            match rescan.as_mut() {
                Some(ticks) => {
                    ticks.tick().await;
                }
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = terminate.recv() => return stopped("SIGTERM"),
            _ = interrupt.recv() => return stopped("SIGINT"),
            _ = quit.recv() => return stopped("SIGQUIT"),
            Some(ended) = tasks.join_next() => {
                ended.context("a task of the daemon failed")?;
                anyhow::bail!("a task of the daemon ended by itself");
            }
            () = &mut late, if !late_done => late_done = true,
            () = tick => {}
        }
        look(&settings.host, config, publisher).await;
    }
}

#[expect(
    clippy::unnecessary_wraps,
    reason = "the arm of a select whose other arms fail"
)]
fn stopped(signal: &str) -> anyhow::Result<()> {
    tracing::info!(signal, "stopping");
    Ok(())
}

/// Looks at the host off the runtime's thread and publishes what is seen.
async fn look(host: &Host, config: &Config, publisher: &mut Publisher) {
    let host = host.clone();
    let before = Instant::now();
    match tokio::task::spawn_blocking(move || Observation::make(&host)).await {
        Ok(Ok(seen)) => {
            let took: Duration = before.elapsed();
            tracing::debug!(
                devices = seen.inventory.rdma_devices.len(),
                ?took,
                "looked at the host"
            );
            publisher.publish(config, &seen, Instant::now());
        }
        Ok(Err(error)) => {
            tracing::error!(%error, "cannot look at the host; what was known stays in force");
        }
        Err(error) => tracing::error!(%error, "looking at the host failed"),
    }
}

/// Two processes of one pid namespace's number 1 differ in the moment they start.
fn nanoseconds() -> u32 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map(|since| since.subsec_nanos())
        .unwrap_or_default()
}
