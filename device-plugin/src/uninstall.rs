//! Takes away what this project put on a node: the CNI programs, the journal, the policy; and gives the
//! addresses that the node owns in a shared directory back.
//!
//! Refused while a pod has something of it: a pod that still runs needs the programs, the journal
//! and the policy to end, and a NIC in a pod comes back by them alone. What cannot be read is no
//! evidence that there is nothing.
//!
//! Of the state directory the entries go that this project makes. The policy goes last, for it names the other places: killed anywhere, the command is given again and does the rest.

use std::fmt;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use attachment::cdi_file;
use attachment::journal;
use attachment::node::{EXCLUSIVE_HCAS, NODE_ADDRESSES};
use ipam::owned::{self, Owned};
use ipam::plugin::Plugin;
use nix::errno::Errno;
use node::cni_program;
use node::features;
use node::file::is_leftover_name;
use node::policy::{Policy, StoreKind};
use node_wire::{PartsChange, PartsChanged, PartsQuestion, client};

use crate::binding::store as bindings;
use crate::last_good;
use crate::reclaim;
use attachment::node_files;
use pools::binding::record::{Binding, Stage};
use pools::history;

/// The file whose bytes are the journal's locks.
const LOCK: &str = "lock";
/// What of the state directory is ours; other entries stay, and with them the directory.
const STATE_ENTRIES: [&str; 9] = [
    "attachments",
    "devices",
    LOCK,
    "blocks",
    ipam::owned::DIRECTORY,
    EXCLUSIVE_HCAS,
    NODE_ADDRESSES,
    history::FILE,
    last_good::FILE,
];
/// In the directory of sockets.
const AGENT_SOCKET: &str = "agent.sock";
/// The agent answers earlier.
const AGENT_LIMIT: Duration = Duration::from_secs(35);

/// Where things are, as this process sees them.
#[derive(Debug, Clone)]
pub(crate) struct Places {
    pub node: attachment::node::Places,
    /// Directory of CNI programs.
    pub cni_bin: PathBuf,
    /// The directory of sockets.
    pub run: PathBuf,
    /// Directory of CDI files.
    pub cdi: PathBuf,
    /// Directory of node-feature-discovery.
    pub features: PathBuf,
}

impl Places {
    fn policy(&self) -> Policy {
        Policy::load_for_release(&self.node.policy).0
    }
}

/// What there is may belong to a pod.
fn unknown(why: impl fmt::Display) -> anyhow::Error {
    anyhow!("it is not known whether a pod still uses it: {why}")
}

/// Attachments or leases are there.
fn in_use(what: impl fmt::Display) -> anyhow::Error {
    anyhow!(
        "{what}; delete the pods that use it. What pods left that ended without DEL goes by \
         rdmactl reclaim on this node"
    )
}

/// Whether the node may be cleaned.
///
/// # Errors
/// Why it may not.
pub(crate) fn check(places: &Places) -> anyhow::Result<()> {
    let socket = places.run.join("node.sock");
    ensure!(
        std::os::unix::net::UnixStream::connect(&socket).is_err(),
        "the daemon still runs on this node: replace it by helm upgrade --reuse-values --set \
         uninstall.enabled=true or by the component manifests/components/uninstall, or delete its \
         DaemonSet"
    );
    let root = &places.node.root;
    ensure!(
        root.join("proc/self").exists(),
        unknown(format_args!(
            "{} has no proc: name the directory that has the host's with --host-root",
            root.display()
        ))
    );
    let found = node_files::read(&places.node);
    let attachments = found.attachments.map_err(unknown)?;
    let leases = found.leases.map_err(unknown)?;
    // A policy or a record that cannot be read.
    ensure!(found.notes.is_empty(), unknown(found.notes.join("; ")));
    let pods = attachments.iter().map(|one| match &one.pod {
        Some(pod) => format!("{pod} ({})", one.interface),
        None => format!("container {} ({})", one.container, one.interface),
    });
    let held = leases
        .iter()
        .map(|lease| format!("{} ({})", lease.address, lease.holder));
    let (pods, held): (Vec<String>, Vec<String>) = (pods.collect(), held.collect());
    let lock = places.policy().state_dir.join(LOCK);
    journal::hold_all(&lock).map_err(|error| {
        let lock = lock.display();
        in_use(format_args!(
            "a call of a CNI program may run: lock {lock}: {error} (fuser -v lists the calls)"
        ))
    })?;
    for (what, list) in [
        ("attachments are there", pods),
        ("addresses are leased", held),
    ] {
        let list_of = named(&list);
        ensure!(list.is_empty(), in_use(format_args!("{what}: {list_of}")));
    }
    Ok(())
}

/// Gives the parts of subnets back that this node owns in stores that nodes share: it asks the node's agent.
/// [`check`] comes before.
///
/// # Errors
/// No agent answers, or a part stays.
pub(crate) fn give_back(places: &Places) -> anyhow::Result<()> {
    let policy = places.policy();
    for space in owned::spaces(&policy.state_dir).map_err(unknown)? {
        let store = policy.stores.get(&space.store);
        let is_shared = store.is_some_and(|store| !matches!(store.kind, StoreKind::Node));
        let mut parts = Owned::read(&policy.state_dir, &space)
            .map_err(unknown)?
            .parts;
        // Its own networks are kept for a node of this name, until an administrator releases them.
        parts.retain(|_, part| part.network.is_none());
        if !is_shared || parts.is_empty() {
            continue;
        }
        let question = PartsQuestion {
            store: space.store.clone(),
            network_name: space.network_name.clone(),
            change: PartsChange::GiveBack,
        };
        let stays = match client::ask(&places.run.join(AGENT_SOCKET), &question, AGENT_LIMIT) {
            Ok(PartsChanged { mut kept, .. }) => {
                kept.retain(|(part, _)| parts.keys().any(|own| own.to_string() == *part));
                if kept.is_empty() {
                    continue;
                }
                let kept = kept.iter().map(|(part, why)| format!("{part}: {why}"));
                named(&kept.collect::<Vec<String>>())
            }
            Err(error) => format!("run rdma-agent on this node: {error}"),
        };
        let parts: Vec<String> = parts.keys().map(ToString::to_string).collect();
        let file = owned::path(&policy.state_dir, &space);
        bail!(
            "addresses of {space} are this node's: {}: {stays}; or release them on another node by \
             rdmactl addresses release --node, and remove {}",
            named(&parts),
            file.display()
        );
    }
    Ok(())
}

/// Frees the leases of pods that ended without DEL, by the daemon's rules: evidence has to last from
/// one call to the next. For the wait after [`check`]; attachments of such pods are not undone here, which needs the rights of the daemon.
///
/// Returns a line for each lease that was freed or could not be.
pub(crate) fn free_leases(places: &Places) -> Vec<String> {
    let node = &places.node;
    let plugin = Plugin::load(&node.policy, &node.root, node.node.as_deref());
    let proc = node.root.join("proc");
    let mut said = Vec::new();
    match reclaim::free_leases(&plugin, &proc) {
        Ok(report) => {
            let freed = report.freed.iter().map(|(lease, why)| {
                let why = why.as_str();
                format!("freed: {} of {}: {why}", lease.address, lease.holder)
            });
            said.extend(freed);
            said.extend(report.failed);
        }
        Err(error) => said.push(format!("leases: {error}")),
    }
    said
}

/// The first few of a list.
fn named(list: &[String]) -> String {
    const NAMED: usize = 5;
    let first: Vec<&str> = list.iter().take(NAMED).map(String::as_str).collect();
    match list.len().checked_sub(NAMED) {
        Some(more) if more > 0 => format!("{} and {more} more", first.join(", ")),
        _ => first.join(", "),
    }
}

/// Removes everything, and says on `out` what became of each path that was there. [`check`] comes before.
///
/// # Errors
/// The first path that cannot be removed; the command may be given again.
pub(crate) fn remove(places: &Places, out: &mut impl Write) -> anyhow::Result<()> {
    let (state, run, policy) = (places.policy().state_dir, &places.run, &places.node.policy);
    let lock = state.join(LOCK);
    let _no_call = journal::hold_all(&lock).with_context(|| format!("lock {}", lock.display()))?;
    let programs = cni_program::NAMES.into_iter().chain(["rdmactl"]);
    let is_cdi_file = |name: &str| {
        [cdi_file::POOL_PREFIX, cdi_file::PREFIX]
            .iter()
            .any(|own| name.starts_with(own))
    };
    let of_run = |name: &str| {
        [".sock", ".calls", ".lock"]
            .iter()
            .any(|end| name.ends_with(end))
    };
    let first: Vec<PathBuf> = programs
        .map(|name| places.cni_bin.join(name))
        .chain(entries(&places.cdi, is_cdi_file))
        .chain([places.features.join(features::FILE)])
        .chain(entries(&places.features, |name| {
            is_leftover_name(name) && name.starts_with(&format!(".{}.", features::FILE))
        }))
        .chain(STATE_ENTRIES.map(|name| state.join(name)))
        .chain(entries(&state, is_leftover_name))
        .collect();
    for path in &first {
        remove_path(path, None, out)?;
    }
    remove_path(&state, is_kept(&state), out)?;
    remove_path(
        &run.join(bindings::DIRECTORY),
        bindings_to_keep(places),
        out,
    )?;
    remove_path(&run.join("leases"), None, out)?;
    for path in entries(run, of_run) {
        remove_path(&path, None, out)?;
    }
    remove_path(policy, None, out)?;
    match policy
        .parent()
        .filter(|directory| is_kept(directory).is_none())
    {
        Some(directory) => remove_path(directory, None, out),
        None => Ok(()),
    }
}

fn is_kept(directory: &Path) -> Option<&'static str> {
    let rest = fs::read_dir(directory).is_ok_and(|mut rest| rest.next().is_some());
    rest.then_some("it is not empty")
}

/// Removes what is there unless it is `kept`, and says so.
fn remove_path(path: &Path, kept: Option<&str>, out: &mut impl Write) -> anyhow::Result<()> {
    if path.symlink_metadata().is_err() {
        return Ok(());
    }
    let shown = path.display();
    let what = match kept {
        Some(why) => format!("stays: {why}"),
        None => take_away(path)
            .with_context(|| format!("remove {shown}"))?
            .to_owned(),
    };
    // The rest goes also where nobody reads this any more.
    let _ = writeln!(out, "{shown}: {what}");
    Ok(())
}

/// Returns what became of it: a directory that is a mount point here stays, empty.
fn take_away(path: &Path) -> io::Result<&'static str> {
    if !path.symlink_metadata()?.is_dir() {
        fs::remove_file(path)?;
        return Ok("removed");
    }
    for entry in fs::read_dir(path)? {
        let path = entry?.path();
        match path.symlink_metadata()?.is_dir() {
            true => fs::remove_dir_all(&path)?,
            false => fs::remove_file(&path)?,
        }
    }
    let mount_point = [Errno::EBUSY, Errno::EROFS].map(|errno| Some(errno as i32));
    match fs::remove_dir(path) {
        Ok(()) => Ok("removed"),
        // In a container it is a mount point, below a root that may be read-only.
        Err(error) if mount_point.contains(&error.raw_os_error()) => Ok("emptied"),
        Err(error) => Err(error),
    }
}

/// Why the bindings of slots stay. A pod without a network attachment has its HCAs by nothing else, and
/// the next daemon frees them when the pod is gone.
fn bindings_to_keep(places: &Places) -> Option<&'static str> {
    let held = match bindings::read(&places.run) {
        Ok(found) => {
            let is_running = |one: &Binding| {
                use Stage::{Detached, Started};
                matches!(one.stage, Detached | Started)
            };
            !found.unreadable.is_empty() || found.all.values().any(is_running)
        }
        Err(_) => true,
    };
    held.then_some("pods without an interface may still have these HCAs; a reboot removes them")
}

fn entries(directory: &Path, is_meant: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_str().is_some_and(&is_meant))
        .map(|entry| entry.path())
        .collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use nix::fcntl::{FcntlArg, fcntl};
    use serde_json::json;

    use super::*;

    struct NodeFiles(tempfile::TempDir);

    impl NodeFiles {
        fn new(stores: &serde_json::Value) -> Self {
            let node = Self(tempfile::tempdir().unwrap());
            for directory in [
                "bin",
                "etc",
                "state/attachments",
                "run/bindings",
                "run/leases/b1",
                "cdi",
                "features",
            ] {
                fs::create_dir_all(node.path(directory)).unwrap();
            }
            let policy = json!({"stateDir": node.path("state"), "stores": stores});
            for (file, text) in [
                ("etc/policy.json", policy.to_string()),
                ("bin/rdma-netdev", "x".to_owned()),
                ("bin/macvlan", "x".to_owned()),
                ("state/exclusive-hcas", String::new()),
                ("state/known-hcas", String::new()),
                ("state/.known-hcas.0123456789abcdef.new", String::new()),
                ("cdi/rdma-device-plugin-pool-a.json", "{}".to_owned()),
                ("cdi/rdma-device-plugin-slot_a-0.json", "{}".to_owned()),
                ("cdi/nvidia.com-gpu.json", "{}".to_owned()),
                ("run/rdma-netdev.calls", "x".to_owned()),
                ("features/rdma-netdev", "x".to_owned()),
                ("features/.rdma-netdev.0123456789abcdef.new", "x".to_owned()),
                ("features/other", "x".to_owned()),
            ] {
                fs::write(node.path(file), text).unwrap();
            }
            node
        }

        fn path(&self, path: &str) -> PathBuf {
            self.0.path().join(path)
        }

        fn places(&self) -> Places {
            Places {
                node: attachment::node::Places {
                    root: "/".into(),
                    policy: self.path("etc/policy.json"),
                    node: Some("n1".into()),
                },
                cni_bin: self.path("bin"),
                run: self.path("run"),
                cdi: self.path("cdi"),
                features: self.path("features"),
            }
        }

        fn remove(&self) {
            remove(&self.places(), &mut io::sink()).unwrap();
        }
    }

    #[test]
    fn what_is_ours_goes_and_what_is_not_stays() {
        let node = NodeFiles::new(&json!({}));
        fs::write(node.path("state/notes.txt"), "an administrator's").unwrap();
        node.remove();
        for gone in [
            "bin/rdma-netdev",
            "run/leases",
            "state/attachments",
            "etc",
            "cdi/rdma-device-plugin-pool-a.json",
            "cdi/rdma-device-plugin-slot_a-0.json",
            "run/rdma-netdev.calls",
            "run/bindings",
            "features/rdma-netdev",
            "features/.rdma-netdev.0123456789abcdef.new",
        ] {
            assert!(!node.path(gone).exists(), "{gone}");
        }
        for stays in [
            "bin/macvlan",
            "cdi/nvidia.com-gpu.json",
            "state/notes.txt",
            "features/other",
        ] {
            assert!(node.path(stays).exists(), "{stays}");
        }
    }

    #[test]
    fn a_state_directory_with_nothing_else_in_it_goes() {
        let node = NodeFiles::new(&json!({}));
        node.remove();
        assert!(!node.path("state").exists());
    }

    #[test]
    fn the_hca_of_a_pod_without_an_interface_stays_bound() {
        let node = NodeFiles::new(&json!({}));
        let pod = node_wire::Pod {
            namespace: "team".into(),
            name: "worker-0".into(),
            uid: None,
        };
        let hca = "0000:01:00.0".parse().unwrap();
        let mut binding = Binding::new(&hca, "slot_0", &pod, Some("c1"));
        binding.stage = Stage::Started;
        let store = bindings::Store::at(&node.path("run"));
        store.put(&binding, None).unwrap();
        node.remove();
        assert!(bindings::read(&node.path("run")).unwrap().has(&hca));
    }

    #[test]
    fn a_call_that_runs_keeps_everything() {
        let node = NodeFiles::new(&json!({}));
        let path = node.path("state/lock");
        fs::write(&path, "").unwrap();
        let call = fs::File::options().write(true).open(&path).unwrap();
        let byte = nix::libc::flock {
            l_type: nix::libc::F_WRLCK.try_into().unwrap(),
            l_whence: 0,
            l_start: 1 << 40,
            l_len: 1,
            l_pid: 0,
        };
        fcntl(&call, FcntlArg::F_OFD_SETLK(&byte)).unwrap();
        let held = journal::hold_all(&path);
        assert_eq!(held.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(call);
        node.remove();
        assert!(!path.exists());
    }

    #[test]
    fn what_cannot_be_read_is_no_evidence() {
        let node = NodeFiles::new(&json!({}));
        fs::write(node.path("etc/policy.json"), "{").unwrap();
        let refused = check(&node.places()).unwrap_err().to_string();
        assert!(refused.contains("not known whether a pod"), "{refused}");
    }
}
