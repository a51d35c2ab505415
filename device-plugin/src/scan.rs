//! One scan of the host at a time.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use hca::Host;
use tokio::sync::oneshot;

use crate::events::Trigger;
use crate::reader::{Reader, Readers};
use hca::Late;
use pools::config::Gate;
use pools::host_snapshot::{HostSnapshot, SCAN};

/// How long a scan may take before it is called late. One of 8 HCAs takes 20 ms.
const SCAN_TIMEOUT: Duration = Duration::from_secs(5);
/// How long an attribute may take, and how often that is looked at, while another HCA hangs already:
/// many hang at once where they have firmware in common, and each is found by a scan of its own.
const NEXT_ATTRIBUTE_TIMEOUT: Duration = Duration::from_secs(1);

/// A scan under way.
#[derive(Debug)]
pub(crate) struct Scan {
    /// What started it.
    pub reason: Trigger,
    started: Instant,
    reader: Reader,
    outcome: oneshot::Receiver<hca::Result<HostSnapshot>>,
    /// When to look at it next; `None` once it was called late.
    look: Option<Instant>,
    /// Whether another object hung already when it started.
    another_hangs: bool,
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
        let another_hangs = !readers.hung().is_empty();
        let first_look = match another_hangs {
            true => NEXT_ATTRIBUTE_TIMEOUT,
            false => SCAN_TIMEOUT,
        };
        let outcome = reader.begin(move || {
            HostSnapshot::scan(&host, &node_addresses, &gates, |_| Ok(Vec::new()))
        })?;
        let started = Instant::now();
        Some(Self {
            reason,
            started,
            reader,
            outcome,
            look: Some(started + first_look),
            another_hangs,
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

    /// When it has to be looked at, unless it was called late.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.look
    }

    /// Leaves it to itself if it hangs at an object that can be left out.
    pub(crate) fn leave(&self) -> bool {
        match self.another_hangs {
            true => self.reader.abandon_after(NEXT_ATTRIBUTE_TIMEOUT * 3 / 4),
            false => self.reader.abandon(),
        }
    }

    /// Calls it late if it is.
    pub(crate) fn call_late(&mut self) -> Option<Late> {
        let late = self.reader.late();
        self.look = match late {
            Some(_) => None,
            None => Some(Instant::now() + NEXT_ATTRIBUTE_TIMEOUT),
        };
        late
    }

    /// Whether what it hangs at can be left out.
    pub(crate) fn hangs_at_an_object(&self) -> bool {
        self.reader.is_hung()
    }

    /// Whether it was called late.
    pub(crate) fn is_late(&self) -> bool {
        self.look.is_none()
    }

    /// How long it has been under way.
    pub(crate) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }
}
