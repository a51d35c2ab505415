//! One scan of the host at a time, on a thread of its own.
//!
//! A read of sysfs can wait for firmware without end, and nothing can interrupt it. So no task
//! waits for a scan: the daemon goes on, says that the scan is late and which path it reads, and
//! ends without joining the thread. No second scan is started beside a late one, which would be
//! stuck at the same place.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hca::{Host, Progress};
use tokio::sync::oneshot;

use crate::config::Gate;
use crate::events::Trigger;
use crate::host_snapshot::HostSnapshot;

/// How long a scan may take before it is called late. One of 8 HCAs takes 20 ms.
pub(crate) const SCAN_TIMEOUT: Duration = Duration::from_secs(5);

/// A scan under way.
#[derive(Debug)]
pub(crate) struct Scan {
    /// What started it.
    pub reason: Trigger,
    started: Instant,
    progress: Arc<Progress>,
    outcome: oneshot::Receiver<hca::Result<HostSnapshot>>,
    called_late: bool,
}

/// A scan that does not come to its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Late {
    /// Since when it runs.
    pub started: Instant,
    /// What it reads.
    pub path: PathBuf,
}

impl fmt::Display for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the scan of the host is late: the read of {} has not ended for {} s; firmware or a \
             driver does not answer",
            self.path.display(),
            self.started.elapsed().as_secs()
        )
    }
}

impl Scan {
    /// Starts a scan.
    ///
    /// # Errors
    /// The kernel gives no thread.
    pub(crate) fn start(
        reason: Trigger,
        host: Host,
        node_addresses: Vec<IpAddr>,
        gates: Vec<Gate>,
    ) -> std::io::Result<Self> {
        let (sender, outcome) = oneshot::channel();
        let progress = Arc::new(Progress::default());
        let shown = progress.clone();
        std::thread::Builder::new()
            .name("scan".into())
            .spawn(move || {
                let scan = || HostSnapshot::scan(&host, &node_addresses, &gates);
                // The receiver is gone when the daemon ends.
                let _ = sender.send(hca::host::with_progress(&shown, scan));
            })?;
        Ok(Self {
            reason,
            started: Instant::now(),
            progress,
            outcome,
            called_late: false,
        })
    }

    /// Waits for its end; without end if there is none.
    ///
    /// # Errors
    /// Why there is no result.
    pub(crate) async fn ended(scan: &mut Option<Self>) -> Result<HostSnapshot, String> {
        match scan {
            Some(scan) => match (&mut scan.outcome).await {
                Ok(outcome) => outcome.map_err(|error| error.to_string()),
                Err(_) => Err("the scan failed; see the lines before this one".into()),
            },
            None => std::future::pending().await,
        }
    }

    /// When it has to be called late, unless it was.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        (!self.called_late).then(|| self.started + SCAN_TIMEOUT)
    }

    /// Calls it late.
    pub(crate) fn call_late(&mut self) -> Late {
        self.called_late = true;
        Late {
            started: self.started,
            path: self.progress.path(),
        }
    }

    /// Whether it was called late.
    pub(crate) fn is_late(&self) -> bool {
        self.called_late
    }

    /// How long it has been under way.
    pub(crate) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }
}
