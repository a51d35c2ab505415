//! The boot's clock.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

use super::{Error, Result};

/// Time since the boot, suspension included (`CLOCK_BOOTTIME`). It cannot be set, and leases run on
/// while a machine sleeps; what is measured with it does not outlive the boot, as the journal's
/// netdevs do not.
pub fn since_boot() -> Result<Duration> {
    clock_gettime(ClockId::CLOCK_BOOTTIME)
        .map(Duration::from)
        .map_err(|e| Error::call("read the boot's clock", e))
}
