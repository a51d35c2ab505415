//! A stand-in for the daemon's socket, for tests of programs that ask it.
//!
//! It keeps to the daemon's rules: a directory that only its owner can write to, mode 0600 of the
//! socket, the peer's user, the limits and the version of the documents. What the daemon has from
//! the kubelet it has from the test.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use nix::unistd::geteuid;
use node_wire::document::encode_answer;
use node_wire::{
    Allocation, Answer, Failure, FailureKind, Pod, PodUnits, QUESTION_MAX_BYTES, Question,
};

/// How long a peer may take to write its question and to read its answer.
const PEER_TIMEOUT: Duration = Duration::from_secs(2);
/// How often the server is ready to accept or to stop.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(2);

/// How questions are treated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Behaviour {
    /// As the daemon does with a readable checkpoint of the kubelet.
    Answer,
    /// As the daemon does without one: no UID is checked.
    AnswerUnchecked,
    /// The same as [`Behaviour::Answer`], this much later.
    AnswerAfter(Duration),
    /// With this failure, whatever is asked. [`FailureKind::NotAllowed`] refuses the peer.
    Fail(Failure),
    /// With these bytes, whatever is asked.
    Bytes(Vec<u8>),
    /// With nothing: the connection is closed.
    Close,
}

/// A socket that answers from a list of pods; dropping it removes the socket.
#[derive(Debug)]
pub struct NodeSocket {
    path: PathBuf,
    shared: Arc<Shared>,
    server: Option<Server>,
}

#[derive(Debug)]
struct Shared(Mutex<State>);

#[derive(Debug)]
struct State {
    behaviour: Behaviour,
    /// By namespace and name: UID and what the pod holds.
    pods: BTreeMap<(String, String), (Option<String>, Vec<Allocation>)>,
    questions: Vec<Pod>,
}

#[derive(Debug)]
struct Server {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl NodeSocket {
    /// Serves at `path`, which holds nothing yet. The directory is made if it is missing.
    ///
    /// # Errors
    /// The directory is a link, belongs to somebody else or can be written to by others; or the
    /// socket cannot be made.
    pub fn start(path: &Path) -> Result<Self> {
        let state = State {
            behaviour: Behaviour::Answer,
            pods: BTreeMap::new(),
            questions: Vec::new(),
        };
        let mut socket = Self {
            path: path.into(),
            shared: Arc::new(Shared(Mutex::new(state))),
            server: None,
        };
        socket.serve()?;
        Ok(socket)
    }

    /// The kubelet knows this pod from now on, and it holds exactly this. A UID that is not given
    /// is any UID.
    pub fn hold(&self, pod: &Pod, allocations: Vec<Allocation>) {
        let key = (pod.namespace.clone(), pod.name.clone());
        let held = (pod.uid.clone(), allocations);
        self.shared.lock().pods.insert(key, held);
    }

    /// The kubelet knows this pod no more.
    pub fn forget(&self, pod: &Pod) {
        let key = (pod.namespace.clone(), pod.name.clone());
        self.shared.lock().pods.remove(&key);
    }

    /// Treats questions like this from now on.
    pub fn behave(&self, behaviour: Behaviour) {
        self.shared.lock().behaviour = behaviour;
    }

    /// The pods that were asked for, in order.
    #[must_use]
    pub fn questions(&self) -> Vec<Pod> {
        self.shared.lock().questions.clone()
    }

    /// There is no daemon and no socket.
    ///
    /// # Errors
    /// The socket cannot be removed.
    pub fn be_absent(&mut self) -> Result<()> {
        self.be_dead();
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(error).with_context(|| format!("remove {}", self.path.display()))
            }
            _ => Ok(()),
        }
    }

    /// The daemon was killed: its socket stays behind.
    pub fn be_dead(&mut self) {
        if let Some(server) = self.server.take() {
            server.stop.store(true, Ordering::Relaxed);
            // A panic in there has been printed already.
            let _ = server.thread.join();
        }
    }

    /// The daemon is back after [`NodeSocket::be_absent`] or [`NodeSocket::be_dead`].
    ///
    /// # Errors
    /// As [`NodeSocket::start`].
    pub fn come_back(&mut self) -> Result<()> {
        self.be_absent()?;
        self.serve()
    }

    fn serve(&mut self) -> Result<()> {
        let directory = self.path.parent().context("a socket without a directory")?;
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .with_context(|| format!("create {}", directory.display()))?;
        let meta = fs::symlink_metadata(directory)?;
        let own = meta.uid() == 0 || meta.uid() == geteuid().as_raw();
        if !meta.is_dir() || !own || meta.mode() & 0o022 != 0 {
            bail!(
                "{} is not a directory that only root or this user can write to",
                directory.display()
            );
        }
        let listener = UnixListener::bind(&self.path)
            .with_context(|| format!("bind {}", self.path.display()))?;
        fs::set_permissions(&self.path, Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, shared) = (Arc::clone(&stop), Arc::clone(&self.shared));
        let thread = thread::Builder::new()
            .name("node-socket".to_owned())
            .spawn(move || {
                while !stopped.load(Ordering::Relaxed) {
                    match listener.accept() {
                        Ok((stream, _)) => {
                            let shared = Arc::clone(&shared);
                            thread::spawn(move || answer(stream, &shared));
                        }
                        Err(_) => thread::sleep(ACCEPT_INTERVAL),
                    }
                }
            })?;
        self.server = Some(Server { stop, thread });
        Ok(())
    }
}

impl Drop for NodeSocket {
    fn drop(&mut self) {
        // A socket that stays behind does no harm in a test's own directory.
        let _ = self.be_absent();
    }
}

/// What a container holds of a resource whose device plugin is another one, or whose unit IDs name
/// their HCAs.
#[must_use]
pub fn allocation(container: &str, resource: &str, units: &[&str]) -> Allocation {
    Allocation {
        container: container.to_owned(),
        resource: resource.to_owned(),
        units: units.iter().map(|&unit| unit.to_owned()).collect(),
        hcas: None,
        pool: None,
    }
}

/// What a container holds of one of our device plugin's resources, with the HCAs that the units
/// stand for.
#[must_use]
pub fn allocation_of_hcas(
    container: &str,
    resource: &str,
    units: &[&str],
    hcas: &[&str],
) -> Allocation {
    Allocation {
        hcas: Some(hcas.iter().map(|&hca| hca.to_owned()).collect()),
        ..allocation(container, resource, units)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One connection. A peer that goes away is no matter.
fn answer(mut stream: UnixStream, shared: &Shared) {
    let _ = stream.set_nonblocking(false);
    let _ = stream.set_read_timeout(Some(PEER_TIMEOUT));
    let _ = stream.set_write_timeout(Some(PEER_TIMEOUT));
    if let Some(bytes) = answer_to(&mut stream, shared) {
        let _ = stream.write_all(&bytes);
    }
}

fn answer_to(stream: &mut UnixStream, shared: &Shared) -> Option<Vec<u8>> {
    let peer = getsockopt(stream, PeerCredentials).ok()?;
    if peer.uid() != 0 && peer.uid() != geteuid().as_raw() {
        let why = format!("uid {} may not ask", peer.uid());
        return Some(encode_answer(&Err(Failure::new(
            FailureKind::NotAllowed,
            why,
        ))));
    }
    let mut document = Vec::new();
    let most = u64::try_from(QUESTION_MAX_BYTES).ok()? + 1;
    if let Err(error) = stream.take(most).read_to_end(&mut document) {
        let why = format!("no whole question: {error}");
        return Some(encode_answer(&Err(Failure::new(
            FailureKind::Malformed,
            why,
        ))));
    }
    let pod = match Question::decode(&document) {
        Ok(Question::PodUnits(pod)) => pod,
        Ok(question) => {
            return Some(encode_answer(&Err(question.not_mine())));
        }
        Err(failure) => return Some(encode_answer(&Err(failure))),
    };
    let behaviour = {
        let mut state = shared.lock();
        state.questions.push(pod.clone());
        state.behaviour.clone()
    };
    let checked = match behaviour {
        Behaviour::Answer => true,
        Behaviour::AnswerUnchecked => false,
        Behaviour::AnswerAfter(wait) => {
            thread::sleep(wait);
            true
        }
        Behaviour::Fail(failure) => return Some(encode_answer(&Err(failure))),
        Behaviour::Bytes(bytes) => return Some(bytes),
        Behaviour::Close => return None,
    };
    let answer = shared.lock().units_of(&pod, checked);
    Some(encode_answer(&answer.map(Answer::PodUnits)))
}

impl State {
    fn units_of(&self, pod: &Pod, checked: bool) -> Result<PodUnits, Failure> {
        let key = (pod.namespace.clone(), pod.name.clone());
        let Some((uid, allocations)) = self.pods.get(&key) else {
            let why = format!("the kubelet knows no pod {}/{}", pod.namespace, pod.name);
            return Err(Failure::new(FailureKind::UnknownPod, why));
        };
        let uid_note = match &pod.uid {
            None => Some("the question has no UID".to_owned()),
            Some(_) if !checked => Some("the kubelet's checkpoint cannot be read".to_owned()),
            Some(asked) if uid.as_ref().is_some_and(|uid| uid != asked) => {
                let why = format!("the units of {pod} belong to another pod of this name");
                return Err(Failure::new(FailureKind::AnotherPod, why));
            }
            Some(_) => None,
        };
        Ok(PodUnits {
            uid_checked: uid_note.is_none(),
            uid_note,
            allocations: allocations.clone(),
            claims: Vec::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use node_wire::{Fault, ask};
    use tempfile::TempDir;

    use super::*;

    const CALL_TIMEOUT: Duration = Duration::from_secs(2);

    fn pod(uid: Option<&str>) -> Pod {
        Pod {
            namespace: "ml".into(),
            name: "train-0".into(),
            uid: uid.map(str::to_owned),
        }
    }

    fn started() -> (TempDir, PathBuf, NodeSocket) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rdma-netdev/node.sock");
        let socket = NodeSocket::start(&path).unwrap();
        (directory, path, socket)
    }

    #[test]
    fn client_trusts_it_and_gets_what_the_pod_holds() {
        let (_directory, path, socket) = started();
        let held = allocation_of_hcas("main", "rdma/a", &["pool_3e71787e_0"], &["0000:3b:00.0"]);
        socket.hold(&pod(Some("u1")), vec![held.clone()]);
        let units = ask(&path, &pod(Some("u1")), CALL_TIMEOUT).unwrap();
        assert_eq!((units.uid_checked, units.allocations), (true, vec![held]));
        assert!(!ask(&path, &pod(None), CALL_TIMEOUT).unwrap().uid_checked);
        let another = ask(&path, &pod(Some("u2")), CALL_TIMEOUT).unwrap_err();
        assert_eq!(another.failure().unwrap().kind, FailureKind::AnotherPod);
        socket.behave(Behaviour::AnswerUnchecked);
        let unchecked = ask(&path, &pod(Some("u2")), CALL_TIMEOUT).unwrap();
        assert!(!unchecked.uid_checked && unchecked.uid_note.is_some());
        socket.forget(&pod(None));
        let unknown = ask(&path, &pod(None), CALL_TIMEOUT).unwrap_err();
        assert_eq!(unknown.failure().unwrap().kind, FailureKind::UnknownPod);
        assert_eq!(socket.questions().len(), 5);
    }

    #[test]
    fn it_is_slow_broken_dead_and_absent_on_request() {
        let (_directory, path, mut socket) = started();
        socket.hold(&pod(None), Vec::new());
        let ask = |limit| ask(&path, &pod(None), limit);
        socket.behave(Behaviour::AnswerAfter(Duration::from_millis(300)));
        let started = Instant::now();
        assert!(ask(CALL_TIMEOUT).is_ok() && started.elapsed() >= Duration::from_millis(300));
        let late = ask(Duration::from_millis(50)).unwrap_err();
        assert!(matches!(late.fault, Fault::TimedOut { .. }), "{late}");
        let failure = Failure::new(FailureKind::NotAllowed, "no");
        socket.behave(Behaviour::Fail(failure.clone()));
        assert_eq!(ask(CALL_TIMEOUT).unwrap_err().failure(), Some(&failure));
        socket.behave(Behaviour::Bytes(b"{}".to_vec()));
        let malformed = ask(CALL_TIMEOUT).unwrap_err();
        assert!(
            matches!(malformed.fault, Fault::Malformed { .. }),
            "{malformed}"
        );
        socket.behave(Behaviour::Close);
        let closed = ask(CALL_TIMEOUT).unwrap_err();
        assert!(matches!(closed.fault, Fault::Closed { .. }), "{closed}");
        socket.behave(Behaviour::Answer);
        socket.be_dead();
        let refused = ask(CALL_TIMEOUT).unwrap_err();
        assert!(matches!(refused.fault, Fault::Refused { .. }), "{refused}");
        socket.be_absent().unwrap();
        let none = ask(CALL_TIMEOUT).unwrap_err();
        assert!(matches!(none.fault, Fault::NoSocket { .. }), "{none}");
        socket.come_back().unwrap();
        assert!(ask(CALL_TIMEOUT).is_ok());
    }

    #[test]
    fn a_directory_that_others_can_write_to_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), Permissions::from_mode(0o777)).unwrap();
        assert!(NodeSocket::start(&directory.path().join("node.sock")).is_err());
    }
}
