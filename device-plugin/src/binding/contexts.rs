//! Processes of pods that have a verbs context of an HCA: RDMA netlink names them, where sysfs shows
//! nothing (`rdma resource show ctx`).
//!
//! A process in D state outlives its pod for the kubelet, and keeps the HCA. Processes of the host's own
//! services are left alone, and those of pods that never had the HCA for themselves: the administrator
//! lets them watch the node's HCAs. The kernel names a process only to a reader whose PID namespace has it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::sync::{Mutex, PoisonError};

use hca::{HcaId, Host};
use netlink::{Socket, rdma};

use super::containers::pod_uid;
use pools::binding::record::Bindings;
use pools::binding::state::Evidence;
use pools::host_snapshot::is_in_host_network;

/// A process of a pod and the HCA that it has a verbs context of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Context {
    pub hca: HcaId,
    pub pid: u32,
    /// Its name, as the process chose it.
    pub name: String,
    /// The UID of its pod.
    pub pod: String,
}

impl Context {
    fn holder(&self) -> (HcaId, String) {
        (self.hca.clone(), self.pod.clone())
    }
}

impl fmt::Display for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, name, pod, .. } = self;
        write!(
            f,
            "process {pid} ({name:?}) of the pod with UID {pod} still uses it; it ends with the process, \
             or with a reboot if the process hangs in the kernel"
        )
    }
}

/// The processes of pods that use these HCAs, which have these RDMA devices; empty where the kernel never
/// says it: before 5.12, or where this is another host's tree. `None` if it cannot be read now.
pub(crate) fn read(host: &Host, hcas: &BTreeMap<String, HcaId>) -> Option<Vec<Context>> {
    if hcas.is_empty() || !is_in_host_network(host) {
        return Some(Vec::new());
    }
    let asked = Socket::open_rdma().and_then(|socket| match socket {
        Some(mut socket) => rdma::contexts(&mut socket, |device| hcas.contains_key(device)),
        None => Ok(Vec::new()),
    });
    match asked {
        Ok(contexts) => Some(of_pods(host, hcas, contexts)),
        Err(error) => {
            tracing::debug!(%error, "cannot find processes that use HCAs");
            None
        }
    }
}

fn of_pods(
    host: &Host,
    hcas: &BTreeMap<String, HcaId>,
    contexts: Vec<(String, u32)>,
) -> Vec<Context> {
    let contexts = contexts.into_iter().filter_map(|(device, pid)| {
        let process = host.proc.join(pid.to_string());
        let cgroup = fs::read_to_string(process.join("cgroup")).ok()?;
        let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
        Some(Context {
            hca: hcas.get(&device)?.clone(),
            pid,
            name: name.trim_end().to_owned(),
            pod: pod_uid(&cgroup)?,
        })
    });
    contexts.collect()
}

/// Pods by UID that have an HCA for themselves, or had it and use it still.
#[derive(Debug, Default)]
pub(crate) struct Holders(Mutex<BTreeSet<(HcaId, String)>>);

impl Holders {
    /// Takes note of who has what. Returns the processes of pods that have or had the HCA that they use.
    pub(super) fn note(&self, used: Vec<Context>, evidence: &Evidence) -> Vec<Context> {
        let held = evidence.held.iter().flat_map(|held| held.exclusive_uids());
        let bound = evidence.bindings.all.values();
        let bound = bound.filter_map(|one| Some((one.hca.clone(), one.pod.uid.clone()?)));
        self.note_all(used, held.chain(bound))
    }

    fn note_all(
        &self,
        mut used: Vec<Context>,
        held: impl Iterator<Item = (HcaId, String)>,
    ) -> Vec<Context> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let using: BTreeSet<_> = used.iter().map(Context::holder).collect();
        known.retain(|one| using.contains(one));
        known.extend(held);
        used.retain(|one| known.contains(&one.holder()));
        used
    }

    /// Whether a process is of a pod that has or had the HCA that it uses.
    pub(crate) fn has(&self, context: &Context) -> bool {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.contains(&context.holder())
    }
}

/// HCAs that nobody has, by a list of the kubelet that is newer than the contexts, and the process that
/// uses each.
pub(crate) fn in_use<H>(
    contexts: &[Context],
    held: &BTreeMap<HcaId, H>,
    bindings: &Bindings,
) -> BTreeMap<HcaId, String> {
    let is_free = |one: &&Context| !held.contains_key(&one.hca) && !bindings.has(&one.hca);
    let free = contexts.iter().filter(is_free);
    free.map(|one| (one.hca.clone(), one.to_string())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_processes_of_pods_are_said_to_use_an_hca() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        let uid = "0a5f8e1c-6b0d-4a3e-9f2d-1c2b3a4d5e6f";
        for (pid, name, cgroup) in [
            (
                4711,
                "python3",
                format!("0::/kubepods/burstable/pod{uid}/c1\n"),
            ),
            (1, "opensm", "0::/system.slice/opensm.service\n".to_owned()),
        ] {
            let process = host.proc.join(pid.to_string());
            fs::create_dir_all(&process).unwrap();
            fs::write(process.join("cgroup"), cgroup).unwrap();
            fs::write(process.join("comm"), format!("{name}\n")).unwrap();
        }
        let hca: HcaId = "0000:3b:00.0".parse().unwrap();
        let hcas = BTreeMap::from([("mlx5_0".to_owned(), hca.clone())]);
        // One has ended since, and one is of an HCA of another pool.
        let contexts = [
            ("mlx5_0", 1),
            ("mlx5_0", 4711),
            ("mlx5_0", 9),
            ("mlx5_1", 4711),
        ];
        let contexts = contexts.map(|(device, pid)| (device.to_owned(), pid));
        let found = of_pods(&host, &hcas, contexts.into());
        let [one] = found.as_slice() else {
            panic!("{found:?}")
        };
        assert_eq!((&one.hca, one.pid), (&hca, 4711));
        let text = one.to_string();
        assert!(
            text.contains("4711 (\"python3\")") && text.contains(uid),
            "{text}"
        );
        // The next pod has the HCA: it is not unhealthy for it.
        let (none, free) = (BTreeMap::<HcaId, ()>::new(), Bindings::default());
        let held = BTreeMap::from([(hca.clone(), ())]);
        assert_eq!(in_use(&found, &none, &free), BTreeMap::from([(hca, text)]));
        assert_eq!(in_use(&found, &held, &free), BTreeMap::new());
    }

    #[test]
    fn a_pod_that_never_had_the_hca_is_left_alone() {
        let hca: HcaId = "0000:3b:00.0".parse().unwrap();
        let context = |pod: &str| Context {
            hca: hca.clone(),
            pid: 1,
            name: "x".into(),
            pod: pod.into(),
        };
        let holders = Holders::default();
        let pods = |used: &[&str], held: &[&str]| -> Vec<String> {
            let held = held.iter().map(|uid| (hca.clone(), (*uid).to_owned()));
            let used = used.iter().map(|pod| context(pod)).collect();
            let said = holders.note_all(used, held);
            said.into_iter().map(|one| one.pod).collect()
        };
        // The first one watches all HCAs of the node, the second one has this one.
        assert_eq!(pods(&["watch", "a"], &["a"]), ["a"]);
        assert!(!holders.has(&context("watch")));
        // It ended, and a process of it hangs; then the next pod has the HCA.
        assert_eq!(pods(&["watch", "a"], &[]), ["a"]);
        assert_eq!(pods(&["watch", "a", "b"], &["b"]), ["a", "b"]);
        assert!(holders.has(&context("a")));
        // It does not hang any more.
        assert_eq!(pods(&["watch", "b"], &["b"]), ["b"]);
        assert!(!holders.has(&context("a")));
    }
}
