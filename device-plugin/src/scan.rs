//! One scan of the host at a time.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use hca::Host;
use tokio::sync::oneshot;

use crate::config::Gate;
use crate::events::Trigger;
use crate::host_snapshot::HostSnapshot;
use crate::reader::{Late, Reader, Readers};

/// How long a scan may take before it is called late. One of 8 HCAs takes 20 ms.
const SCAN_TIMEOUT: Duration = Duration::from_secs(5);
/// What a late scan is called.
pub(crate) const SCAN: &str = "the scan of the host";

/// A scan under way.
#[derive(Debug)]
pub(crate) struct Scan {
    /// What started it.
    pub reason: Trigger,
    started: Instant,
    reader: Reader,
    outcome: oneshot::Receiver<hca::Result<HostSnapshot>>,
    called_late: bool,
}

impl Scan {
    /// Starts a scan that leaves out what hangs. `None` if there is no thread.
    pub(crate) fn start(
        reason: Trigger,
        readers: &Readers,
        host: Host,
        node_addresses: Vec<IpAddr>,
        gates: Vec<Gate>,
    ) -> Option<Self> {
        let reader: Reader = readers.reader("scan", SCAN, SCAN_TIMEOUT);
        let outcome = reader.begin(move || HostSnapshot::scan(&host, &node_addresses, &gates))?;
        Some(Self {
            reason,
            started: Instant::now(),
            reader,
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

    /// Calls it late, unless the object that it hangs at can be left out.
    pub(crate) fn call_late(&mut self) -> Option<Late> {
        self.called_late = true;
        let late = self.reader.late();
        late.filter(|_| !self.reader.abandon())
    }

    /// Whether what it hangs at can be left out.
    pub(crate) fn hangs_at_an_object(&self) -> bool {
        self.reader.is_hung()
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
