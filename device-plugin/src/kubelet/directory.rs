//! Watches the kubelet's device-plugins directory.
//!
//! A kubelet that starts deletes every socket in it and then makes a new `kubelet.sock`; both are
//! what sessions have to notice. inotify reports it at once; the directory is also read at an
//! interval, because one that was itself replaced sends no events any more.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kubelet_api::deviceplugin::KUBELET_SOCKET;
pub(crate) use node_server::socket::SocketId;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::watch::Watch;

/// How often the directory is read without an event.
const READ_INTERVAL: Duration = Duration::from_secs(5);

/// What was last seen in the directory.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Contents {
    /// The kubelet's registration socket.
    pub kubelet: Option<SocketId>,
    /// Names of the sockets that this program makes, by whichever process.
    pub ours: BTreeSet<String>,
    /// Counts the reads after which a session may have to act.
    pub reads: u64,
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

/// Keeps `contents` true until `stop`.
pub(crate) async fn keep_watch(
    path: PathBuf,
    socket_prefix: &'static str,
    contents: watch::Sender<Contents>,
    stop: CancellationToken,
) {
    let (wake, mut woken) = mpsc::channel::<()>(1);
    let mut watched = Watch::default();
    let mut ticks = tokio::time::interval(READ_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let changed = tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => false,
            _ = woken.recv() => true,
        };
        let wake = wake.clone();
        // A full channel already holds a wake-up that has not been taken.
        let unwatched = watched.renew(&path, move || {
            let _ = wake.try_send(());
        });
        if let Some(error) = unwatched {
            tracing::warn!(
                directory = %path.display(), error,
                "cannot watch the device-plugins directory; reading it every {} s", READ_INTERVAL.as_secs()
            );
        }
        contents.send_if_modified(|seen| read(&path, socket_prefix, changed, seen));
    }
}

/// Reads the directory; true if a session may have to act.
fn read(path: &Path, socket_prefix: &str, asked: bool, seen: &mut Contents) -> bool {
    let kubelet = SocketId::of(&path.join(KUBELET_SOCKET));
    let ours: BTreeSet<String> = fs::read_dir(path)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.starts_with(socket_prefix) && name.ends_with(".sock"))
        .collect();
    let differs = asked || kubelet != seen.kubelet || ours != seen.ours;
    seen.kubelet = kubelet;
    seen.ours = ours;
    seen.reads += u64::from(differs);
    differs
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

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
    fn a_read_reports_what_changed_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let mut seen = Contents::default();
        assert!(!read(dir.path(), "rdma-", false, &mut seen));
        let _kubelet = UnixListener::bind(dir.path().join(KUBELET_SOCKET)).unwrap();
        assert!(read(dir.path(), "rdma-", false, &mut seen));
        assert!(!read(dir.path(), "rdma-", false, &mut seen));
        let _own = UnixListener::bind(dir.path().join("rdma-1.sock")).unwrap();
        fs::write(dir.path().join("other.sock"), "").unwrap();
        assert!(read(dir.path(), "rdma-", false, &mut seen));
        assert_eq!(
            seen.ours.iter().map(String::as_str).collect::<Vec<_>>(),
            ["rdma-1.sock"]
        );
        assert!(read(dir.path(), "rdma-", true, &mut seen));
        assert_eq!(seen.reads, 3);
    }
}
