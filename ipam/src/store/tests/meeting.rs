//! Where the threads of a test meet, so that they act at one moment.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A barrier that a thread which panics does not close for good: the others go on without it,
/// and the test fails by the panic.
pub(crate) struct Meeting {
    threads: usize,
    arrived: AtomicUsize,
}

/// How long a thread waits for the others.
const MEETING_TIMEOUT: Duration = Duration::from_secs(10);

impl Meeting {
    pub(crate) fn of(threads: usize) -> Self {
        let arrived = AtomicUsize::new(0);
        Self { threads, arrived }
    }

    /// Waits until all threads have come for the nth time, counted from 0.
    pub(crate) fn wait(&self, nth: usize) {
        let until = Instant::now() + MEETING_TIMEOUT;
        self.arrived.fetch_add(1, Ordering::SeqCst);
        while self.arrived.load(Ordering::SeqCst) < self.threads * (nth + 1)
            && Instant::now() < until
        {
            std::thread::yield_now();
        }
    }
}
