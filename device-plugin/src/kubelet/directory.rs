//! The kubelet's device-plugins directory.
//!
//! A kubelet that starts deletes every socket in it and then makes a new `kubelet.sock`; both are
//! what sessions have to notice. inotify reports it at once; the directory is also read at an
//! interval, because one that was itself replaced sends no events any more.
//!
//! It may be on a disk that hangs: a thread of its own does what is to be done in it.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kubelet_api::deviceplugin::KUBELET_SOCKET;
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
pub(crate) use node_server::socket::SocketId;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::session::SocketName;
use crate::reader::{Reader, Readers};
use crate::watch::Watch;

/// How often the directory is read without an event.
const READ_INTERVAL: Duration = Duration::from_secs(5);
/// How long each step in the directory may take.
const TIMEOUT: Duration = Duration::from_secs(1);

/// What was last seen in the directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Contents {
    /// When it was begun to be read.
    pub read: Instant,
    /// The kubelet's registration socket.
    pub kubelet: Option<SocketId>,
    /// The sockets that this program makes, by whichever process.
    pub ours: BTreeMap<String, SocketId>,
}

/// A socket that listens.
#[derive(Debug)]
pub(crate) struct Bound {
    pub id: SocketId,
    /// The kubelet's registration socket then.
    pub kubelet: Option<SocketId>,
    /// When both were read.
    pub at: Instant,
}

/// The directory.
#[derive(Debug, Clone)]
pub(crate) struct Directory {
    pub path: PathBuf,
    reader: Arc<Reader>,
    contents: watch::Receiver<Option<Contents>>,
}

/// Checks at start that the directory exists.
///
/// A kubelet makes it when it first starts and never removes it, and a DaemonSet's pod runs under a
/// kubelet. So a missing one is a wrong path or a forgotten mount: waiting for it would hide that
/// behind a resource that never appears. Once running, its absence is waited out.
///
/// # Errors
/// It is missing or is not a directory.
pub(crate) fn check(path: &Path) -> anyhow::Result<()> {
    let read = fs::read_dir(path).map(drop);
    read.map_err(|error| {
        anyhow::anyhow!(
            "the kubelet's device-plugins directory {} cannot be used: {error}; mount it into this \
             container, or name it with --device-plugin-dir (kubelets use \
             /var/lib/kubelet/device-plugins whatever their --root-dir)",
            path.display()
        )
    })
}

impl Directory {
    /// What is in the directory, once it was read.
    pub(crate) fn contents(&self) -> watch::Receiver<Option<Contents>> {
        self.contents.clone()
    }

    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Path) -> T + Send + 'static,
    ) -> io::Result<T> {
        let path = self.path.clone();
        let done = self.reader.run(move || {
            hca::host::show(&path);
            work(&path)
        });
        done.await.map_err(io::Error::other)
    }

    /// Binds a socket, after those that ended processes left for the same resource are removed.
    ///
    /// # Errors
    /// What the kernel said, or that the directory does not answer.
    pub(crate) async fn bind(&self, name: SocketName) -> io::Result<(UnixListener, Bound)> {
        let bound = self.run(move |directory| {
            sweep(directory, &name);
            let path = directory.join(name.as_str());
            let listener = UnixListener::bind(&path)?;
            listener.set_nonblocking(true)?;
            let id = SocketId::of(&path).ok_or(io::ErrorKind::NotFound)?;
            let kubelet = SocketId::of(&directory.join(KUBELET_SOCKET));
            // Last: what is read in the directory later is newer than all of this.
            let at = Instant::now();
            Ok((listener, Bound { id, kubelet, at }))
        });
        bound.await?
    }

    /// Removes a socket if it is still the one that was bound.
    pub(crate) async fn remove(&self, name: SocketName, id: SocketId) -> io::Result<()> {
        let removed = self.run(move |directory| {
            let path = directory.join(name.as_str());
            match SocketId::of(&path) == Some(id) {
                true => fs::remove_file(path),
                false => Ok(()),
            }
        });
        removed.await?
    }
}

/// The directory, which is watched until `stop` by the future.
pub(crate) fn watched(
    path: PathBuf,
    readers: &Readers,
    stop: CancellationToken,
) -> (Directory, impl Future<Output = ()> + use<>) {
    let what = format!("the work in {}", path.display());
    let (sender, contents) = watch::channel(None);
    let directory = Directory {
        path,
        reader: Arc::new(readers.reader("plugins", what, TIMEOUT)),
        contents,
    };
    (directory.clone(), keep_watch(directory, sender, stop))
}

async fn keep_watch(
    directory: Directory,
    contents: watch::Sender<Option<Contents>>,
    stop: CancellationToken,
) {
    let (wake, mut woken) = mpsc::channel::<()>(1);
    let mut watch = Watch::default();
    let mut ticks = tokio::time::interval(READ_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => {}
            _ = woken.recv() => {}
        }
        let (wake, mut taken) = (wake.clone(), std::mem::take(&mut watch));
        let done = directory.run(move |path| {
            // A full channel already holds a wake-up that has not been taken.
            let unwatched = taken.renew(path, move || {
                let _ = wake.try_send(());
            });
            (taken, unwatched, read(path))
        });
        // One that does not answer is in the log, and is read again.
        let Ok((taken, unwatched, now)) = done.await else {
            continue;
        };
        watch = taken;
        if let Some(error) = unwatched {
            tracing::warn!(
                directory = %directory.path.display(), error,
                "cannot watch the device-plugins directory; reading it every {} s", READ_INTERVAL.as_secs()
            );
        }
        contents.send_replace(Some(now));
    }
}

fn read(path: &Path) -> Contents {
    let read = Instant::now();
    let ours = our_sockets(path, |_| true);
    Contents {
        read,
        kubelet: SocketId::of(&path.join(KUBELET_SOCKET)),
        ours: ours.collect(),
    }
}

/// Sockets of this program whose names are wanted.
fn our_sockets(
    path: &Path,
    is_wanted: impl Fn(&str) -> bool,
) -> impl Iterator<Item = (String, SocketId)> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries.filter_map(move |entry| {
        let name = entry.file_name().into_string().ok()?;
        let is_wanted = SocketName::is_ours(&name) && is_wanted(&name);
        Some((name, SocketId::of(&entry.path()).filter(|_| is_wanted)?))
    })
}

/// Removes the sockets of a resource that have no server: a killed process leaves its own.
fn sweep(directory: &Path, own: &SocketName) {
    for (name, _) in our_sockets(directory, |name| own.is_same_resource(name)) {
        let path = directory.join(&name);
        if name == own.as_str() || is_dead(&path) {
            tracing::debug!(socket = %path.display(), "removing a socket without a server");
            let _ = fs::remove_file(path);
        }
    }
}

/// Whether nobody listens on a socket. A server that accepts nothing, because it is stopped, does.
fn is_dead(path: &Path) -> bool {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let dialled = UnixAddr::new(path).and_then(|address| {
        let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        connect(socket.as_raw_fd(), &address)
    });
    dialled == Err(Errno::ECONNREFUSED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_directory_is_named_with_the_remedy() {
        let message = check(Path::new("/nonexistent/device-plugins"))
            .unwrap_err()
            .to_string();
        assert!(message.contains("/nonexistent/device-plugins"), "{message}");
        assert!(message.contains("--device-plugin-dir"), "{message}");
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(check(file.path()).is_err());
    }

    #[test]
    fn a_socket_made_anew_under_its_name_is_another_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(KUBELET_SOCKET);
        assert_eq!(SocketId::of(&path), None);
        let _first = UnixListener::bind(&path).unwrap();
        let first = SocketId::of(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let _second = UnixListener::bind(&path).unwrap();
        assert_ne!(SocketId::of(&path), Some(first));
        let plain = dir.path().join("plain");
        fs::write(&plain, "").unwrap();
        assert_eq!(SocketId::of(&plain), None);
    }

    #[test]
    fn a_read_finds_our_sockets_and_the_kubelets() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()).kubelet, None);
        let _kubelet = UnixListener::bind(dir.path().join(KUBELET_SOCKET)).unwrap();
        let _own = UnixListener::bind(dir.path().join("rdma-1.sock")).unwrap();
        let _other = UnixListener::bind(dir.path().join("other.sock")).unwrap();
        fs::write(dir.path().join("rdma-2.sock"), "").unwrap();
        let seen = read(dir.path());
        assert!(seen.kubelet.is_some());
        assert_eq!(seen.ours.keys().collect::<Vec<_>>(), ["rdma-1.sock"]);
    }

    #[test]
    fn a_server_that_accepts_nothing_is_alive_and_delays_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rdma-1.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let address = UnixAddr::new(&path).unwrap();
        let mut waiting = Vec::new();
        // Until its queue is full.
        loop {
            let flags = SockFlag::SOCK_NONBLOCK;
            let one = socket(AddressFamily::Unix, SockType::Stream, flags, None).unwrap();
            if connect(one.as_raw_fd(), &address).is_err() {
                break;
            }
            waiting.push(one);
        }
        let asked = Instant::now();
        assert!(!is_dead(&path));
        assert!(asked.elapsed() < Duration::from_secs(1));
        drop(listener);
        assert!(is_dead(&path));
    }
}
