//! Processes of pods that have a verbs context of an HCA: RDMA netlink names them, where sysfs shows
//! nothing (`rdma resource show ctx`).
//!
//! A process in D state outlives its pod for the kubelet, and keeps the HCA. Processes of the host's own
//! services are left alone. The kernel names a process only to a reader whose PID namespace has it.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;

use hca::{HcaId, Host};
use netlink::{Socket, rdma};

use super::containers::pod_uid;
use pools::binding::record::Bindings;
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

/// The processes of pods that use these HCAs, which have these RDMA devices. None where the kernel does
/// not say it: before 5.12, or where this is another host's tree.
pub(crate) fn read(host: &Host, hcas: &BTreeMap<String, HcaId>) -> Vec<Context> {
    if hcas.is_empty() || !is_in_host_network(host) {
        return Vec::new();
    }
    let asked = Socket::open_rdma().and_then(|socket| match socket {
        Some(mut socket) => rdma::contexts(&mut socket, |device| hcas.contains_key(device)),
        None => Ok(Vec::new()),
    });
    match asked {
        Ok(contexts) => of_pods(host, hcas, contexts),
        Err(error) => {
            tracing::debug!(%error, "cannot find processes that use HCAs");
            Vec::new()
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
}
