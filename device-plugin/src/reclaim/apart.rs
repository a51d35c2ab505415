//! Parts of a round, each on a thread of its own.
//!
//! A call on a hard mount whose server does not answer waits without end, and nothing can
//! interrupt it. So a round waits for its parts a moment, and goes on without those that have not
//! ended. A part that is under way is not started again beside itself: there is one thread of a
//! store at most. What it did is counted by the round that finds it done; one that is not done by
//! its deadline is called late.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// What one thread works on.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    /// Attachments without leases in a store of ours.
    NoStore,
    /// A store of the policy, and attachments with leases in it.
    Store(String),
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoStore => f.write_str("attachments without leases"),
            Self::Store(name) => write!(f, "store {name:?}"),
        }
    }
}

/// How a part of a round ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ended<T> {
    /// What it did, in this round or since an earlier one.
    Done(T),
    /// It has not ended, and is past its deadline.
    Late {
        /// Whether it is called late for the first time.
        news: bool,
        /// How long it has been under way.
        elapsed: Duration,
    },
    /// It panicked, or has no thread.
    Failed(String),
}

struct UnderWay<T> {
    started: Instant,
    done: Receiver<T>,
    called_late: bool,
}

/// The parts that are under way.
pub(super) struct Apart<T> {
    under_way: BTreeMap<Part, UnderWay<T>>,
}

impl<T> Default for Apart<T> {
    fn default() -> Self {
        Self {
            under_way: BTreeMap::new(),
        }
    }
}

impl<T: Send + 'static> Apart<T> {
    /// Starts every part of `work` that is not under way, and waits for those at most `wait`
    /// to end. Those that have not ended `timeout` after their start are called late.
    pub(super) fn run<W, F>(
        &mut self,
        work: BTreeMap<Part, W>,
        wait: Duration,
        timeout: Duration,
        make: impl Fn(Part, W) -> F,
    ) -> Vec<(Part, Ended<T>)>
    where
        F: FnOnce() -> T + Send + 'static,
    {
        let mut ended = Vec::new();
        let now = Instant::now();
        for (part, work) in work {
            if self.under_way.contains_key(&part) {
                continue;
            }
            let (sender, done) = channel();
            let job = make(part.clone(), work);
            let thread = std::thread::Builder::new().name("reclaim".into());
            // The receiver is gone when the daemon ends.
            let started = thread.spawn(move || drop(sender.send(job())));
            match started {
                Ok(_) => {
                    let under_way = UnderWay {
                        started: now,
                        done,
                        called_late: false,
                    };
                    self.under_way.insert(part, under_way);
                }
                Err(error) => {
                    let error = format!("start a thread: {error}");
                    ended.push((part, Ended::Failed(error)));
                }
            }
        }
        self.under_way.retain(|part, under_way| {
            let left = match under_way.started == now {
                true => wait.saturating_sub(now.elapsed()),
                false => Duration::ZERO,
            };
            let (outcome, is_under_way) = match under_way.done.recv_timeout(left) {
                Ok(done) => (Ended::Done(done), false),
                Err(RecvTimeoutError::Disconnected) => {
                    let error = "it panicked; see the lines before this one";
                    (Ended::Failed(error.to_owned()), false)
                }
                Err(RecvTimeoutError::Timeout) => {
                    let elapsed = under_way.started.elapsed();
                    if elapsed < timeout {
                        return true;
                    }
                    let news = !std::mem::replace(&mut under_way.called_late, true);
                    (Ended::Late { news, elapsed }, true)
                }
            };
            ended.push((part.clone(), outcome));
            is_under_way
        });
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::mpsc::Sender;

    const WAIT: Duration = Duration::from_millis(200);
    const TIMEOUT: Duration = Duration::from_millis(400);

    fn store(name: &str) -> Part {
        Part::Store(name.into())
    }

    /// A round over two stores and no store; the work on store `hung` waits for a word.
    struct Scene {
        apart: Apart<u64>,
        started: Arc<AtomicU64>,
        hung: Option<Receiver<()>>,
    }

    impl Scene {
        fn new() -> (Self, Sender<()>) {
            let (answer, hung) = channel();
            let scene = Self {
                apart: Apart::default(),
                started: Arc::default(),
                hung: Some(hung),
            };
            (scene, answer)
        }

        fn round(&mut self) -> BTreeMap<Part, Ended<u64>> {
            let parts = [Part::NoStore, store("hung"), store("local")];
            let mut work: BTreeMap<Part, Option<Receiver<()>>> =
                parts.into_iter().map(|part| (part, None)).collect();
            let under_way = self.apart.under_way.contains_key(&store("hung"));
            if !under_way {
                work.insert(store("hung"), self.hung.take());
            }
            let started = self.started.clone();
            let ended = self.apart.run(work, WAIT, TIMEOUT, |_, hung| {
                let started = started.clone();
                move || {
                    started.fetch_add(1, Ordering::SeqCst);
                    if let Some(hung) = hung {
                        let _ = hung.recv();
                    }
                    1
                }
            });
            ended.into_iter().collect()
        }
    }

    #[test]
    fn a_store_that_hangs_delays_nothing_and_is_late_once() {
        let (mut scene, answer) = Scene::new();
        let mut news = Vec::new();
        for round in 1..=4 {
            let ended = scene.round();
            assert_eq!(ended[&Part::NoStore], Ended::Done(1));
            assert_eq!(ended[&store("local")], Ended::Done(1));
            news.push(match ended.get(&store("hung")) {
                None => None,
                Some(Ended::Late { news, .. }) => Some(*news),
                other => panic!("{other:?}"),
            });
            assert_eq!(scene.apart.under_way.len(), 1, "one thread of it at most");
            assert_eq!(scene.started.load(Ordering::SeqCst), 1 + 2 * round);
            if round == 2 {
                std::thread::sleep(TIMEOUT);
            }
        }
        // The first round waits; the second does not, and the deadline is not over.
        assert_eq!(news, [None, None, Some(true), Some(false)]);
        // The server answers: what was done meanwhile counts, and the next round starts anew.
        answer.send(()).unwrap();
        while scene.round().get(&store("hung")) != Some(&Ended::Done(1)) {}
        assert!(scene.apart.under_way.is_empty());
        assert_eq!(scene.round()[&store("hung")], Ended::Done(1));
    }

    #[test]
    fn work_that_panics_is_a_failure_of_its_part_alone() {
        let mut apart: Apart<u64> = Apart::default();
        let work = BTreeMap::from([(store("a"), true), (store("b"), false)]);
        let ended = apart.run(work, Duration::from_secs(10), TIMEOUT, |_, panics| {
            move || {
                assert!(!panics, "on purpose");
                7
            }
        });
        let ended: BTreeMap<_, _> = ended.into_iter().collect();
        assert!(matches!(ended[&store("a")], Ended::Failed(_)));
        assert_eq!(ended[&store("b")], Ended::Done(7));
        assert!(apart.under_way.is_empty());
    }
}
