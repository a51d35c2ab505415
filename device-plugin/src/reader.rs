//! Reading what may hang: firmware, a driver, a disk whose server is gone.
//!
//! Nothing can interrupt such a read. So each thing has a [`Reader`]: it reads on a thread of its
//! own, one read at a time, and nothing waits for it longer than its limit. Who gives up leaves the
//! thread to end by itself, and the daemon ends without joining it.
//!
//! A read that hangs at an attribute of one object, such as an HCA, is abandoned: the next read
//! starts beside it, and that object is an error there ([`hca::host::with_progress`]). So there is
//! one thread at most for a thing, and one for each object that hangs. All readers of a process know
//! of each other's hung objects ([`Readers`]).

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use hca::host::{Hung, with_progress};
use hca::{Late, Progress};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::timeout;

/// How long the read of one attribute may take before its object hangs.
const ATTRIBUTE_TIMEOUT: Duration = Duration::from_secs(4);

/// A read under way.
#[derive(Debug)]
struct Read {
    what: String,
    limit: Duration,
    started: Instant,
    progress: Arc<Progress>,
}

impl Read {
    fn late(&self) -> Late {
        Late {
            what: self.what.clone(),
            started: self.started,
            path: self.progress.path(),
        }
    }

    fn is_late(&self) -> bool {
        self.started.elapsed() >= self.limit
    }

    fn hangs_for(&self, limit: Duration) -> bool {
        self.progress.hung_for(limit).is_some()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All reads under way, abandoned ones too.
#[derive(Debug, Clone, Default)]
pub(crate) struct Readers(Arc<Mutex<Vec<Weak<Read>>>>);

impl Readers {
    /// A reader of one thing. `thread` names its thread, `what` is the subject of a sentence.
    pub(crate) fn reader<T>(
        &self,
        thread: &'static str,
        what: impl Into<String>,
        limit: Duration,
    ) -> Reader<T> {
        Reader {
            thread,
            what: what.into(),
            limit,
            readers: self.clone(),
            turn: Arc::new(Semaphore::new(1)),
            state: Arc::default(),
        }
    }

    fn under_way(&self) -> Vec<Arc<Read>> {
        let mut all = lock(&self.0);
        all.retain(|read| read.strong_count() > 0);
        all.iter().filter_map(Weak::upgrade).collect()
    }

    /// The reads that are past their limits, oldest first.
    pub(crate) fn late(&self) -> Vec<Late> {
        let reads = self.under_way();
        let late = reads.iter().filter(|read| read.is_late());
        late.map(|read| read.late()).collect()
    }

    /// The objects that hang.
    pub(crate) fn hung(&self) -> Vec<Hung> {
        let reads = self.under_way();
        let hung = reads.iter();
        hung.filter_map(|read| read.progress.hung_for(ATTRIBUTE_TIMEOUT))
            .collect()
    }
}

/// Reads one thing.
#[derive(Debug)]
pub(crate) struct Reader<T = ()> {
    thread: &'static str,
    what: String,
    limit: Duration,
    readers: Readers,
    turn: Arc<Semaphore>,
    state: Arc<Mutex<State<T>>>,
}

#[derive(Debug)]
struct State<T> {
    /// The read whose turn it is.
    current: Option<(Arc<Read>, OwnedSemaphorePermit)>,
    last: Option<Reading<T>>,
}

/// A value, and when it was read.
#[derive(Debug, Clone)]
pub(crate) struct Reading<T> {
    pub value: T,
    pub at: Instant,
}

impl<T> Default for State<T> {
    fn default() -> Self {
        Self {
            current: None,
            last: None,
        }
    }
}

impl<T: Clone + Send + 'static> Reader<T> {
    /// Reads, and waits at most the limit, first for a read that is under way.
    ///
    /// # Errors
    /// What does not end. A read that was started goes on.
    pub(crate) async fn read(&self, read: impl FnOnce() -> T + Send + 'static) -> Result<T, Late> {
        self.run_and_keep(read, |value| Some(value.clone())).await
    }

    /// Starts a read unless one is under way.
    pub(crate) fn start(&self, read: impl FnOnce() -> T + Send + 'static) {
        self.begin_and_keep(read, |value| Some(value.clone()));
    }

    /// What was read last.
    pub(crate) fn last(&self) -> Option<Reading<T>> {
        lock(&self.state).last.clone()
    }
}

impl<T: Send + 'static> Reader<T> {
    /// The same as `read` for work whose value is not kept.
    ///
    /// # Errors
    /// What does not end.
    pub(crate) async fn run<R: Send + 'static>(
        &self,
        work: impl FnOnce() -> R + Send + 'static,
    ) -> Result<R, Late> {
        self.run_and_keep(work, |_| None).await
    }

    /// Starts work unless a read is under way. The receiver gets its value.
    pub(crate) fn begin<R: Send + 'static>(
        &self,
        work: impl FnOnce() -> R + Send + 'static,
    ) -> Option<oneshot::Receiver<R>> {
        self.begin_and_keep(work, |_| None)
    }

    async fn run_and_keep<R: Send + 'static>(
        &self,
        work: impl FnOnce() -> R + Send + 'static,
        keep: fn(&R) -> Option<T>,
    ) -> Result<R, Late> {
        if let Some(late) = self.late().filter(|_| !self.abandon()) {
            return Err(late);
        }
        let asked = Instant::now();
        let value = async {
            let turn = self.turn.clone().acquire_owned().await.ok()?;
            self.spawn(turn, work, keep).await.ok()
        };
        let value = timeout(self.limit, value).await.ok().flatten();
        value.ok_or_else(|| {
            let state = lock(&self.state);
            let current = state.current.as_ref().map(|(read, _)| read.late());
            current.unwrap_or(Late {
                what: self.what.clone(),
                started: asked,
                path: PathBuf::new(),
            })
        })
    }

    fn begin_and_keep<R: Send + 'static>(
        &self,
        work: impl FnOnce() -> R + Send + 'static,
        keep: fn(&R) -> Option<T>,
    ) -> Option<oneshot::Receiver<R>> {
        self.abandon();
        let turn = self.turn.clone().try_acquire_owned().ok()?;
        Some(self.spawn(turn, work, keep))
    }

    /// The read that is under way, if it is past its limit.
    pub(crate) fn late(&self) -> Option<Late> {
        let state = lock(&self.state);
        let (read, _) = state.current.as_ref()?;
        read.is_late().then(|| read.late())
    }

    /// Leaves a read to itself that is past its limit and hangs at one object. True if there was one.
    fn abandon(&self) -> bool {
        self.abandon_if(|read| read.is_late() && read.hangs_for(ATTRIBUTE_TIMEOUT))
    }

    /// The same for a read whose attribute has not answered for this long.
    pub(crate) fn abandon_after(&self, limit: Duration) -> bool {
        self.abandon_if(|read| read.hangs_for(limit))
    }

    fn abandon_if(&self, is_hung: impl Fn(&Read) -> bool) -> bool {
        let mut state = lock(&self.state);
        let hung = state.current.take_if(|(read, _)| is_hung(read));
        if let Some((read, _turn)) = &hung {
            read.progress.abandon();
        }
        hung.is_some()
    }

    fn spawn<R: Send + 'static>(
        &self,
        turn: OwnedSemaphorePermit,
        work: impl FnOnce() -> R + Send + 'static,
        keep: fn(&R) -> Option<T>,
    ) -> oneshot::Receiver<R> {
        let (sender, value) = oneshot::channel();
        let hung = self.readers.hung();
        let read = Arc::new(Read {
            what: self.what.clone(),
            limit: self.limit,
            started: Instant::now(),
            progress: Arc::default(),
        });
        lock(&self.readers.0).push(Arc::downgrade(&read));
        lock(&self.state).current = Some((read.clone(), turn));
        let (own, state) = (read.clone(), self.state.clone());
        let thread = std::thread::Builder::new().name(self.thread.into());
        let started = thread.spawn(move || {
            let value = with_progress(&own.progress, hung, work);
            lock(&state).end(&own, keep(&value));
            // Who asked may have given up.
            let _ = sender.send(value);
        });
        if let Err(error) = started {
            tracing::error!(what = self.what, %error, "cannot start a thread");
            lock(&self.state).end(&read, None);
        }
        value
    }
}

impl<T> State<T> {
    /// Ends the turn of a read. One that was abandoned has none, and what it read is not whole.
    fn end(&mut self, read: &Arc<Read>, value: Option<T>) {
        let is_ours = |(current, _): &mut (Arc<Read>, _)| Arc::ptr_eq(current, read);
        if self.current.take_if(is_ours).is_some() {
            let at = Instant::now();
            self.last = value
                .map(|value| Reading { value, at })
                .or(self.last.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc;

    use super::*;

    const LIMIT: Duration = Duration::from_millis(200);

    fn hang() {
        hca::host::show("/share/state".as_ref());
        loop {
            std::thread::park();
        }
    }

    #[tokio::test]
    async fn a_read_that_hangs_has_one_thread_and_keeps_nobody_waiting() {
        let readers = Readers::default();
        let reader: Reader = readers.reader("x", "the read of x", LIMIT);
        let late = reader.read(hang).await.unwrap_err();
        assert_eq!(late.path, PathBuf::from("/share/state"));
        let asked = Instant::now();
        let started = Arc::new(AtomicU32::new(0));
        for _ in 0..50 {
            let started = started.clone();
            let read = reader.read(move || started.store(1, Ordering::SeqCst));
            assert!(read.await.unwrap_err().to_string().contains("/share/state"));
        }
        assert!(asked.elapsed() < LIMIT, "{:?}", asked.elapsed());
        assert_eq!(started.load(Ordering::SeqCst), 0);
        assert!(reader.last().is_none());
        assert_eq!(readers.late().len(), 1);
        // Another thing is read meanwhile.
        let other: Reader<u32> = readers.reader("y", "the read of y", LIMIT);
        assert_eq!(other.read(|| 7).await, Ok(7));
        assert_eq!(other.last().map(|last| last.value), Some(7));
    }

    #[tokio::test]
    async fn reads_take_turns_and_the_last_value_stays() {
        let reader: Reader<u32> = Readers::default().reader("x", "x", Duration::from_secs(30));
        let (answer, hung) = mpsc::channel();
        reader.start(move || hung.recv().unwrap());
        reader.start(|| panic!("a second read beside the first one"));
        let next = reader.read(|| 2);
        answer.send(1).unwrap();
        assert_eq!(next.await, Ok(2));
        assert_eq!(reader.last().map(|last| last.value), Some(2));
        assert!(reader.late().is_none());
    }
}
