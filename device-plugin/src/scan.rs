//! One scan of the host at a time.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use hca::Host;
use hca::topology::gpu;
use tokio::sync::oneshot;

use crate::events::Trigger;
use crate::reader::{Reader, Readers};
use hca::Late;
use pools::config::Gate;
use pools::host_snapshot::{HostSnapshot, SCAN};
use pools::rails::by_policy;

/// How long a scan may take before it is called late. One of 8 HCAs takes 20 ms.
const SCAN_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a scan under way is looked at.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// How long an attribute may take while another HCA hangs already: many hang at once where they have
/// firmware in common, and each is found by a scan of its own.
const NEXT_ATTRIBUTE_TIMEOUT: Duration = Duration::from_millis(750);

/// A scan under way.
#[derive(Debug)]
pub(crate) struct Scan {
    /// What started it.
    pub reason: Trigger,
    started: Instant,
    reader: Reader,
    outcome: oneshot::Receiver<hca::Result<HostSnapshot>>,
    /// When to look at it next.
    pub look: Instant,
    /// How long an attribute may take.
    limit: Duration,
}

impl Scan {
    /// Starts a scan that leaves out what hangs. `None` if there is no thread.
    pub(crate) fn start(
        reason: Trigger,
        readers: &Readers,
        host: Host,
        node_addresses: Vec<IpAddr>,
        gates: Vec<Gate>,
        policy: PathBuf,
    ) -> Option<Self> {
        let reader: Reader = readers.reader("scan", SCAN, SCAN_TIMEOUT);
        let limit = match readers.hung().is_empty() {
            true => SCAN_TIMEOUT,
            false => NEXT_ATTRIBUTE_TIMEOUT,
        };
        let outcome = reader.begin(move || {
            let mut seen = HostSnapshot::scan(&host, &node_addresses, &gates, gpu::places)?;
            // A binding is refused for that; here, rails are shown.
            if let Err(error) = by_policy(&mut seen.machine, &policy) {
                tracing::debug!(error, "rails are those of names or PCI addresses");
            }
            Ok(seen)
        })?;
        let started = Instant::now();
        Some(Self {
            reason,
            started,
            reader,
            outcome,
            look: started + LOOK_INTERVAL,
            limit,
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

    /// Leaves it to itself if it hangs at an object that can be left out.
    pub(crate) fn leave(&self) -> bool {
        self.reader.abandon_after(self.limit)
    }

    /// Looks at it: whether it is late.
    pub(crate) fn look(&mut self) -> Option<Late> {
        self.look = Instant::now() + LOOK_INTERVAL;
        self.reader.late()
    }

    /// How long it has been under way.
    pub(crate) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }
}
