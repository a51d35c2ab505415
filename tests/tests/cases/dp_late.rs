//! Late binding: slots of a pod become the HCAs nearest to its GPUs, whatever happens to the daemon
//! and whoever asks.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use e2e::bin_under_test::product;
use e2e::case;
use e2e::daemon::{Daemon, Machine};
use e2e::harness::Case;
use e2e::kubelet::{Kubelet, Pod};
use e2e::locked::locked;
use e2e::unanswered::Unanswered;
use hca_trees::{Tree, machine};
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use node_wire::{
    BindQuestion, Bound, ClientError, CommitQuestion, FailureKind, Fault, StatusQuestion,
    UnbindQuestion, ask,
};
use serde_json::Value;

use super::cni_late_machine::{GPUS, NICS, uuid};
use crate::plugin::{Plugin, Script};

pub(crate) const CASES: &[Case] = &[
    case!(
        slots_are_listed_by_numa_node_and_answered_by_name_alone,
        Root
    ),
    case!(slots_that_are_not_the_pods_are_not_bound, Root),
    case!(a_gpu_that_is_not_known_is_refused_unless_not_strict, Root),
    case!(a_gpu_is_known_by_each_name_of_nvidias_plugin, Root),
    case!(
        a_daemon_killed_between_bind_and_commit_changes_nothing,
        Root
    ),
    case!(one_daemon_at_a_time_has_the_bindings, Root),
    case!(the_next_pod_on_the_same_hcas_starts_at_once, Root),
    case!(a_pod_deleted_by_force_has_its_hcas_while_it_runs, Root),
    case!(without_cgroups_two_lists_free_an_hca, Root),
    case!(
        a_new_sandbox_is_bound_anew_and_the_old_one_gets_nothing,
        Root
    ),
    case!(an_old_sandbox_is_unbound_once_its_record_is_gone, Root),
    case!(a_network_removed_from_a_running_pod_leaves_it_its_hca, Root),
    case!(a_container_starts_only_when_its_slots_are_bound, Root),
    case!(
        a_pod_without_attachment_is_bound_at_start_where_allowed,
        Root
    ),
    case!(
        what_a_container_started_with_stays_whatever_comes_later,
        Root
    ),
    case!(a_stale_cdi_file_never_reaches_a_container, Root),
    case!(a_cdi_directory_that_is_a_link_is_refused, Root),
    case!(device_nodes_are_those_of_the_moment_of_the_commit, Root),
    case!(a_pool_that_overlaps_or_has_no_cdi_is_withheld, Root),
    case!(a_bound_slot_is_listed_and_starts_after_a_restart, Root),
    case!(a_bound_slot_starts_after_its_pool_dropped_the_hca, Root),
    case!(topology_names_the_pod_of_a_bound_slot, Root),
    case!(a_gpu_driver_that_hangs_costs_only_pods_with_that_gpu, Root),
    case!(a_start_that_waits_for_a_gpu_driver_delays_no_other, Root),
    case!(a_state_directory_that_hangs_stops_no_daemon, Root, Fuse),
    case!(containers_get_one_gid_index_and_the_topology_file, Root),
];

const NIC: &str = "rdma/nic";
const GPU: &str = "nvidia.com/gpu";
const LATE: &str = "version: 1\npools:\n- resource: rdma/nic\n  mode: exclusive\n  binding: late\n  \
                    select: {linkTypes: [ether]}\n";
const WAIT_TIMEOUT: Duration = Duration::from_secs(20);
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

struct Node {
    machine: Machine,
    kubelet: Kubelet,
    daemon: Daemon,
    gpus: Plugin,
}

impl Node {
    fn new(config: &str) -> Result<Self> {
        Self::with_flags(config, &[])
    }

    fn with_flags(config: &str, flags: &[&str]) -> Result<Self> {
        Self::with(config, flags, |_| ())
    }

    /// With what `lay` changes on the machine.
    fn with(config: &str, flags: &[&str], lay: impl FnOnce(&Tree)) -> Result<Self> {
        let machine = Machine::laid(|tree| {
            machine::a4(tree);
            lay(tree);
        })?;
        let kubelet = machine.kubelet()?;
        let daemon = start_with(&machine, config, flags)?;
        let script = Script {
            options: kubelet_api::deviceplugin::DevicePluginOptions {
                get_preferred_allocation_available: true,
                ..Default::default()
            },
            ..Script::default()
        };
        let gpus = Plugin::serve(&machine.settings().device_plugins, "gpu.sock", script)?;
        let ids: Vec<String> = (0..8).map(uuid).collect();
        gpus.list_healthy(&ids.iter().map(String::as_str).collect::<Vec<_>>());
        gpus.register(GPU)?;
        let node = Self {
            machine,
            kubelet,
            daemon,
            gpus,
        };
        node.ready()?;
        node.kubelet.wait_allocatable(GPU, 8, WAIT_TIMEOUT)?;
        Ok(node)
    }

    fn ready(&self) -> Result<()> {
        let waited = self.kubelet.wait_allocatable(NIC, 8, WAIT_TIMEOUT);
        waited.with_context(|| self.daemon.log())?;
        self.until("the socket", || {
            Ok(std::os::unix::net::UnixStream::connect(self.machine.node_socket()).is_ok())
        })
    }

    fn until(&self, what: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
        let started = Instant::now();
        while !done()? {
            ensure!(
                started.elapsed() < WAIT_TIMEOUT,
                "no {what} in {WAIT_TIMEOUT:?}: {}",
                self.daemon.log()
            );
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Admits a pod with these GPUs and this many slots.
    fn admit(&self, name: &str, gpus: &[usize], slots: u64) -> Result<Admitted> {
        self.gpus.script.lock().unwrap().preferred = gpus.iter().map(|gpu| uuid(*gpu)).collect();
        let mut limits = Vec::new();
        if !gpus.is_empty() {
            limits.push((GPU, u64::try_from(gpus.len())?));
        }
        if slots > 0 {
            limits.push((NIC, slots));
        }
        let admitted = self.admitted(Pod::with_limits(name, &limits)?)?;
        let assigned = self.kubelet.assigned(&format!("default/{name}"))?;
        let given = assigned.get(&("main".to_owned(), GPU.to_owned())).cloned();
        let mut wanted: Vec<String> = gpus.iter().map(|gpu| uuid(*gpu)).collect();
        let mut given = given.unwrap_or_default();
        wanted.sort();
        given.sort();
        ensure!(
            given == wanted,
            "the kubelet gave {given:?}, not {wanted:?}"
        );
        Ok(admitted)
    }

    fn admitted(&self, pod: Pod) -> Result<Admitted> {
        let known = node_wire::Pod {
            namespace: "default".into(),
            name: pod.metadata.name.clone(),
            uid: Some(pod.metadata.uid.clone()),
        };
        self.kubelet.admit(pod)?;
        let assigned = self.kubelet.assigned(&format!("default/{}", known.name))?;
        let slots = assigned.get(&("main".to_owned(), NIC.to_owned())).cloned();
        Ok(Admitted {
            pod: known,
            slots: slots.unwrap_or_default(),
        })
    }

    fn remove(&self, admitted: &Admitted) -> Result<()> {
        self.kubelet
            .remove(&format!("default/{}", admitted.pod.name))
    }

    fn bind(&self, admitted: &Admitted, sandbox: &str) -> Result<Bound, ClientError> {
        let unit = admitted.slots.first().cloned().unwrap_or_default();
        self.bind_unit(&admitted.pod, sandbox, &unit)
    }

    fn bind_unit(
        &self,
        pod: &node_wire::Pod,
        sandbox: &str,
        unit: &str,
    ) -> Result<Bound, ClientError> {
        let question = BindQuestion {
            pod: pod.clone(),
            sandbox: sandbox.into(),
            unit: unit.into(),
        };
        ask(&self.machine.node_socket(), &question, CALL_TIMEOUT)
    }

    fn commit(&self, admitted: &Admitted, sandbox: &str) -> Result<Vec<String>, ClientError> {
        self.commit_gids(admitted, sandbox, &[])
    }

    /// `indexes` are those of the pod's slots, in order.
    fn commit_gids(
        &self,
        admitted: &Admitted,
        sandbox: &str,
        indexes: &[u32],
    ) -> Result<Vec<String>, ClientError> {
        let indexes = indexes.iter().copied();
        let question = CommitQuestion {
            pod: admitted.pod.clone(),
            sandbox: sandbox.into(),
            units: admitted.slots.clone(),
            gid_indexes: admitted.slots.iter().cloned().zip(indexes).collect(),
        };
        ask(&self.machine.node_socket(), &question, CALL_TIMEOUT).map(|done| done.cdi_files)
    }

    fn unbind(&self, sandbox: &str) -> Result<Vec<String>, ClientError> {
        let question = UnbindQuestion {
            sandbox: sandbox.into(),
            units: Vec::new(),
        };
        ask(&self.machine.node_socket(), &question, CALL_TIMEOUT).map(|done| done.hcas)
    }

    fn start_container(&self, admitted: &Admitted) -> Result<Vec<String>> {
        let name = format!("default/{}", admitted.pod.name);
        let options = self.kubelet.run_options(&name, "main")?;
        let of_ours = |one: &&kubelet_api::deviceplugin::DeviceSpec| {
            one.host_path.starts_with("/dev/infiniband")
        };
        let nodes = options.devices.iter().find(of_ours);
        ensure!(nodes.is_none(), "{options:?}");
        Ok(options
            .cdi_devices
            .into_iter()
            .map(|one| one.name)
            .collect())
    }

    /// The CNI plugin's record of a sandbox's attachment.
    fn record(&self, sandbox: &str) -> Result<PathBuf> {
        let directory = self.machine.state().join("attachments");
        fs::create_dir_all(&directory)?;
        Ok(directory.join(format!("rail0@{sandbox}@net1")))
    }

    /// The slot of each HCA that is bound, by the files.
    fn bindings(&self) -> Result<BTreeMap<String, String>> {
        let mut bindings = BTreeMap::new();
        for entry in fs::read_dir(self.machine.bindings()).into_iter().flatten() {
            let text = match fs::read_to_string(entry?.path()) {
                // Freed between the two reads.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                text => text?,
            };
            let binding: Value = serde_json::from_str(&text)?;
            let text = |key: &str| binding[key].as_str().map(str::to_owned).context("text");
            bindings.insert(text("hca")?, text("unit")?);
        }
        Ok(bindings)
    }

    fn cdi(&self) -> PathBuf {
        self.machine.directory().join("cdi")
    }

    /// What a container runtime finds: CDI device names with the paths of their nodes.
    fn cdi_devices(&self) -> Result<BTreeMap<String, Vec<String>>> {
        let mut devices = BTreeMap::new();
        for entry in fs::read_dir(self.cdi())? {
            let path = entry?.path();
            let text = fs::read_to_string(&path)?;
            let document: Value = serde_json::from_str(&text)?;
            let kind = document["kind"].as_str().context("kind")?.to_owned();
            for device in document["devices"].as_array().context("devices")? {
                let name = format!("{kind}={}", device["name"].as_str().context("name")?);
                let nodes = device["containerEdits"]["deviceNodes"].as_array();
                let paths = nodes.context("nodes")?.iter();
                let paths = paths.filter_map(|node| Some(node["path"].as_str()?.to_owned()));
                ensure!(
                    devices.insert(name, paths.collect()).is_none(),
                    "a runtime refuses a device that two files name"
                );
            }
        }
        Ok(devices)
    }
}

fn start(machine: &Machine, config: &str) -> Result<Daemon> {
    start_with(machine, config, &[])
}

fn start_with(machine: &Machine, config: &str, more: &[&str]) -> Result<Daemon> {
    let file = machine.directory().join("config");
    fs::write(&file, config)?;
    let (root, cdi) = (machine.settings().root, machine.directory().join("cdi"));
    let flags = [
        "--kubelet-root-dir".as_ref(),
        root.as_os_str(),
        "--cdi-dir".as_ref(),
        cdi.as_os_str(),
    ];
    let more = more.iter().map(|flag| flag.as_ref());
    let flags: Vec<&OsStr> = flags.into_iter().chain(more).collect();
    machine.daemon_on(&file, &flags)
}

struct Admitted {
    pod: node_wire::Pod,
    slots: Vec<String>,
}

fn hcas(bound: &Bound) -> Vec<&str> {
    bound.slots.iter().map(|slot| slot.hca.as_str()).collect()
}

fn kind<T: std::fmt::Debug>(answer: Result<T, ClientError>) -> Result<FailureKind> {
    match answer {
        Err(ClientError {
            fault: Fault::Failed(failure),
            ..
        }) => Ok(failure.kind),
        other => bail!("{other:?}"),
    }
}

fn slots_are_listed_by_numa_node_and_answered_by_name_alone() -> Result<()> {
    let node = Node::new(LATE)?;
    let mut by_node: BTreeMap<i64, usize> = BTreeMap::new();
    for (id, device) in node.kubelet.devices(NIC) {
        ensure!(id.starts_with("slot_"), "{id}");
        let nodes = device.topology.context("topology")?.nodes;
        *by_node.entry(nodes[0].id).or_default() += 1;
    }
    assert_eq!(by_node, BTreeMap::from([(0, 4), (1, 4)]));
    // A pod whose GPU is on node 1 is given whichever slot; the counts follow its NIC.
    let pod = node.admit("a", &[6], 1)?;
    let bound = node.bind(&pod, "s1")?;
    assert_eq!(hcas(&bound), [NICS[6]]);
    let slot = pod.slots[0].clone();
    node.until("slot listed where its NIC is", || {
        let devices = node.kubelet.devices(NIC);
        let tag = devices[&slot].topology.clone().map(|one| one.nodes[0].id);
        let free = devices.iter().filter(|(id, _)| **id != slot);
        let on_zero = free
            .filter(|(_, device)| {
                device
                    .topology
                    .as_ref()
                    .is_some_and(|one| one.nodes[0].id == 0)
            })
            .count();
        Ok(tag == Some(1) && on_zero == 4)
    })?;
    node.commit(&pod, "s1")?;
    let names = node.start_container(&pod)?;
    assert_eq!(names, [format!("rdma-device-plugin/slot={slot}")]);
    let devices = node.cdi_devices()?;
    assert_eq!(devices.len(), 1);
    assert_eq!(
        devices[&names[0]],
        ["/dev/infiniband/uverbs6", "/dev/infiniband/rdma_cm"]
    );
    Ok(())
}

fn slots_that_are_not_the_pods_are_not_bound() -> Result<()> {
    let node = Node::new(LATE)?;
    let (a, b) = (node.admit("a", &[0], 1)?, node.admit("b", &[7], 1)?);
    let (own, foreign) = (&a.slots[0], &b.slots[0]);
    let mut all = node.kubelet.devices(NIC).into_keys();
    let free = all.find(|id| id != own && id != foreign);
    let free = free.context("a free slot")?;
    for unit in [
        foreign.as_str(),
        &free,
        "slot_00000000_0",
        "0000:91:00.0",
        "GPU-0",
        "../../etc/passwd",
    ] {
        let refused = kind(node.bind_unit(&a.pod, "s1", unit))?;
        assert_eq!(refused, FailureKind::NotAllocated, "{unit}");
    }
    // A device of the pod that is no slot.
    let gpu = kind(node.bind_unit(&a.pod, "s1", &uuid(0)))?;
    assert_eq!(gpu, FailureKind::CannotBind);
    // Another pod of its name.
    let namesake = node_wire::Pod {
        uid: Some("forged".into()),
        ..a.pod.clone()
    };
    let refused = kind(node.bind_unit(&namesake, "s1", own))?;
    assert_eq!(refused, FailureKind::AnotherPod);
    // What is bound to one pod is not written for another one, nor for another sandbox of its own.
    node.bind(&a, "s1")?;
    assert_eq!(kind(node.commit(&b, "s1"))?, FailureKind::NotBound);
    assert_eq!(kind(node.commit(&a, "s2"))?, FailureKind::NotBound);
    assert_eq!(node.cdi_devices()?.len(), 0);
    Ok(())
}

fn a_gpu_that_is_not_known_is_refused_unless_not_strict() -> Result<()> {
    let node = Node::new(LATE)?;
    let information = format!("/proc/driver/nvidia/gpus/{}/information", GPUS[2]);
    // As the driver writes it before the GPU is initialized.
    node.machine.tree.file(
        &information,
        "Model: \t NVIDIA B200\nGPU UUID: \t GPU-????????-????-????-????-????????????",
    );
    let pod = node.admit("a", &[2], 1)?;
    let refused = node.bind(&pod, "s1");
    let text = refused
        .as_ref()
        .map_err(ToString::to_string)
        .unwrap_err()
        .clone();
    ensure!(text.contains(&uuid(2)) && text.contains("strict"), "{text}");
    assert_eq!(kind(refused)?, FailureKind::CannotBind);
    let status = || {
        ask(
            &node.machine.node_socket(),
            &StatusQuestion {},
            WAIT_TIMEOUT,
        )
    };
    let [refused] = status()?
        .refused
        .try_into()
        .map_err(|all| anyhow!("{all:?}"))?;
    ensure!(
        refused.pod == pod.pod && text.contains(&refused.message),
        "{refused:?}"
    );
    // Nothing was bound for it, and once the GPU is known it is.
    assert_eq!(node.bindings()?.len(), 0);
    node.machine
        .tree
        .file(&information, format!("GPU UUID: \t {}", uuid(2)));
    assert_eq!(hcas(&node.bind(&pod, "s1")?), [NICS[2]]);
    ensure!(status()?.refused.is_empty());

    let relaxed = Node::new(&LATE.replace("binding: late", "binding: late\n  strict: false"))?;
    relaxed
        .machine
        .tree
        .file(&information, "Model: \t NVIDIA B200");
    let pod = relaxed.admit("a", &[2], 1)?;
    let bound = relaxed.bind(&pod, "s1")?;
    assert_eq!(bound.slots.len(), 1);
    ensure!(bound.warnings[0].contains(&uuid(2)), "{:?}", bound.warnings);
    Ok(())
}

/// As driver 570 writes it.
fn information(address: &str, uuid: &str, minor: usize) -> String {
    format!(
        "Model: \t\t NVIDIA B200\nIRQ:   \t\t 1024\nGPU UUID: \t {uuid}\nVideo BIOS: \t 97.00.82.00.0f\n\
         Bus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\n\
         Bus Location: \t {address}\nDevice Minor: \t {minor}\nGPU Firmware: \t 570.86.15\n\
         GPU Excluded:\t No\n"
    )
}

/// A whole GPU, a share of time slicing, slices of MIG in both forms: each pod gets the NIC of its GPU. The
/// minor numbers run against the PCI addresses, as on boards that number GPUs by module.
fn a_gpu_is_known_by_each_name_of_nvidias_plugin() -> Result<()> {
    let uuid = |gpu: usize| format!("GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16{gpu}");
    let node = Node::with(LATE, &[], |tree| {
        for (gpu, address) in GPUS.iter().enumerate() {
            let path = format!("/proc/driver/nvidia/gpus/{address}/information");
            tree.file(path, information(address, &uuid(gpu), 7 - gpu));
        }
    })?;
    let directory = node.machine.settings().device_plugins;
    let slice = "MIG-fc17df2b-5b8b-5e5c-9d1e-4f5d3a2b1c0d".to_owned();
    let caps = [
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-caps/nvidia-cap12",
    ];
    let caps = caps.map(str::to_owned);
    for (resource, gpu, id) in [
        (GPU, 0, uuid(0)),
        ("nvidia.com/gpu.shared", 2, format!("{}::3", uuid(2))),
        ("nvidia.com/mig-1g.23gb", 5, slice),
        ("nvidia.com/mig-2g.45gb", 6, format!("MIG-{}/2/0", uuid(6))),
    ] {
        let mut script = Script::default();
        script.nodes.push(format!("/dev/nvidia{}", 7 - gpu));
        script.nodes.extend(caps.clone());
        let name = format!("nvidia-{gpu}");
        let plugin = Plugin::serve(&directory, &format!("{name}.sock"), script)?;
        plugin.list_healthy(&[&id]);
        plugin.register(resource)?;
        node.kubelet.wait_allocatable(resource, 1, WAIT_TIMEOUT)?;
        let pod = Pod::with_limits(&name, &[(resource, 1), (NIC, 1)])?;
        let bound = node.bind(&node.admitted(pod)?, &name);
        let bound = bound.with_context(|| format!("{id}: {}", node.daemon.log()))?;
        assert_eq!(hcas(&bound), [NICS[gpu]], "{id}");
        ensure!(bound.warnings.is_empty(), "{:?}", bound.warnings);
    }
    Ok(())
}

fn a_daemon_killed_between_bind_and_commit_changes_nothing() -> Result<()> {
    let mut node = Node::new(LATE)?;
    let pod = node.admit("a", &[1, 6], 2)?;
    let bound = node.bind(&pod, "s1")?;
    // What it did not get to is done as it would have been.
    for missing in [None, Some(hcas(&bound)[1])] {
        node.daemon.signal(Signal::SIGKILL)?;
        node.daemon.ended(Duration::from_secs(5))?;
        if let Some(hca) = missing {
            fs::remove_file(node.machine.bindings().join(hca))?;
        }
        node.daemon = start(&node.machine, LATE)?;
        node.ready()?;
        node.until("answer of the new daemon", || {
            Ok(node.bind(&pod, "s1").is_ok())
        })?;
        assert_eq!(node.bind(&pod, "s1")?, bound);
    }
    // Another pod does not get what the killed one had bound.
    let other = node.admit("b", &[0], 1)?;
    let others = node.bind(&other, "s2")?;
    ensure!(
        hcas(&others).iter().all(|hca| !hcas(&bound).contains(hca)),
        "{others:?}"
    );
    let mut files = node.commit(&pod, "s1")?;
    files.sort();
    let mut expected: Vec<String> = bound.slots.iter().map(|one| one.cdi_file.clone()).collect();
    expected.sort();
    assert_eq!(files, expected);
    node.start_container(&pod)?;
    Ok(())
}

/// As of an old daemon that does not end.
fn one_daemon_at_a_time_has_the_bindings() -> Result<()> {
    let mut node = Node::new(LATE)?;
    let pod = node.admit("a", &[1], 1)?;
    let bound = node.bind(&pod, "s1")?;
    node.daemon.signal(Signal::SIGKILL)?;
    node.daemon.ended(Duration::from_secs(5))?;
    let held = locked(&node.machine.bindings().with_file_name("bindings.lock"))?;
    node.daemon = start(&node.machine, LATE)?;
    node.ready()?;
    node.until("refusal that names the lock", || {
        let asked = [
            node.bind(&pod, "s1").map(drop),
            node.commit(&pod, "s1").map(drop),
            node.unbind("s1").map(drop),
        ];
        let named = asked.iter().all(|answer| {
            let refused = answer.as_ref().map_err(ToString::to_string);
            refused.is_err_and(|why| why.contains("bindings.lock"))
        });
        ensure!(asked.into_iter().all(|answer| answer.is_err()), "answered");
        Ok(named)
    })?;
    assert_eq!(node.bindings()?.len(), 1);
    assert_eq!(node.cdi_devices()?, BTreeMap::new());
    drop(held);
    node.until("answer", || Ok(node.bind(&pod, "s1").is_ok()))?;
    assert_eq!(node.bind(&pod, "s1")?, bound);
    node.commit(&pod, "s1")?;
    Ok(())
}

fn a_new_sandbox_is_bound_anew_and_the_old_one_gets_nothing() -> Result<()> {
    let node = Node::new(LATE)?;
    let pod = node.admit("a", &[5], 1)?;
    let old = node.bind(&pod, "s1")?;
    node.commit(&pod, "s1")?;
    let new = node.bind(&pod, "s2")?;
    assert_eq!(hcas(&new), hcas(&old), "the nearest is free again");
    assert_eq!(
        node.cdi_devices()?.len(),
        0,
        "the old sandbox's file is gone"
    );
    assert_eq!(kind(node.commit(&pod, "s1"))?, FailureKind::NotBound);
    node.commit(&pod, "s2")?;
    // The old sandbox's DEL comes late.
    assert_eq!(node.unbind("s1")?, Vec::<String>::new());
    node.start_container(&pod)?;
    assert_eq!(node.unbind("s2")?, Vec::<String>::new());
    assert_eq!(node.cdi_devices()?.len(), 0);
    Ok(())
}

/// Its record is there still when the next sandbox is bound, as where a DEL could not return the NIC.
fn an_old_sandbox_is_unbound_once_its_record_is_gone() -> Result<()> {
    let node = Node::new(LATE)?;
    let pod = node.admit("a", &[5], 1)?;
    let old = node.bind(&pod, "s1")?;
    let record = node.record("s1")?;
    fs::write(&record, "of an attachment")?;
    node.commit(&pod, "s1")?;
    let new = node.bind(&pod, "s2")?;
    node.commit(&pod, "s2")?;
    assert_ne!(hcas(&new), hcas(&old));
    assert_eq!(node.unbind("s1")?, Vec::<String>::new());
    fs::remove_file(record)?;
    assert_eq!(node.unbind("s1")?, hcas(&old));
    assert_eq!(node.bindings()?.len(), 1);
    Ok(())
}

/// As Multus' dynamic networks controller does. The container that runs has the device nodes.
fn a_network_removed_from_a_running_pod_leaves_it_its_hca() -> Result<()> {
    let node = Node::new(LATE)?;
    let pod = node.admit("a", &[5], 1)?;
    let bound = node.bind(&pod, "s1")?;
    node.commit(&pod, "s1")?;
    node.start_container(&pod)?;
    for _ in 0..2 {
        assert_eq!(node.unbind("s1")?, Vec::<String>::new());
        assert_eq!(node.cdi_devices()?.len(), 0);
    }
    let refused = format!("{:#}", node.start_container(&pod).unwrap_err());
    ensure!(refused.contains("no network attachment"), "{refused}");
    // This pod gets each that is free.
    let other = node.admit("b", &[], 7)?;
    let others = node.bind(&other, "s2")?;
    ensure!(!hcas(&others).contains(&NICS[5]), "{others:?}");
    // The network is attached again, and that fails the first time.
    for commits in [false, true] {
        assert_eq!(node.bind(&pod, "s1")?, bound);
        if commits {
            node.commit(&pod, "s1")?;
            node.start_container(&pod)?;
        }
        node.unbind("s1")?;
        assert!(node.bindings()?.contains_key(NICS[5]));
    }
    node.remove(&pod)?;
    let next = node.admit("c", &[5], 1)?;
    assert_eq!(hcas(&node.bind(&next, "s3")?), [NICS[5]]);
    Ok(())
}

fn a_container_starts_only_when_its_slots_are_bound() -> Result<()> {
    let node = Node::new(LATE)?;
    let pod = node.admit("a", &[4], 1)?;
    let refused = format!("{:#}", node.start_container(&pod).unwrap_err());
    ensure!(refused.contains("no network attachment"), "{refused}");
    node.bind(&pod, "s1")?;
    let refused = format!("{:#}", node.start_container(&pod).unwrap_err());
    ensure!(refused.contains("no network attachment"), "{refused}");
    node.commit(&pod, "s1")?;
    node.start_container(&pod)?;
    // Restarted in its sandbox, after somebody emptied the directory.
    for entry in fs::read_dir(node.cdi())? {
        fs::remove_file(entry?.path())?;
    }
    node.start_container(&pod)?;
    assert_eq!(node.cdi_devices()?.len(), 1);
    Ok(())
}

fn a_pod_without_attachment_is_bound_at_start_where_allowed() -> Result<()> {
    let config = LATE.replace(
        "binding: late",
        "binding: late\n  bindAtStart: true\n  environment: true",
    );
    let node = Node::new(&config)?;
    let pod = node.admit("a", &[3, 4], 2)?;
    assert_eq!(node.start_container(&pod)?.len(), 2);
    let nodes: BTreeSet<String> = node.cdi_devices()?.into_values().flatten().collect();
    let expected = ["rdma_cm", "uverbs3", "uverbs4"].map(|name| format!("/dev/infiniband/{name}"));
    assert_eq!(nodes, expected.into());
    for entry in fs::read_dir(node.cdi())? {
        let text = fs::read_to_string(entry?.path())?;
        ensure!(text.contains("NCCL_IB_HCA==mlx5_3:1,mlx5_4:1"), "{text}");
    }
    // Its next container is given the same.
    let before = node.cdi_devices()?;
    node.start_container(&pod)?;
    assert_eq!(node.cdi_devices()?, before);
    Ok(())
}

const AT_START: &str = "binding: late\n  bindAtStart: true";

/// As of a `StatefulSet`: the next pod has the name and all slots of one that ended a moment ago.
fn the_next_pod_on_the_same_hcas_starts_at_once() -> Result<()> {
    let node = Node::new(&LATE.replace("binding: late", AT_START))?;
    let gpus: Vec<usize> = (0..8).collect();
    for round in 0..4 {
        let pod = node.admit("train-0", &gpus, 8)?;
        // The kubelet does not try again.
        let asked = Instant::now();
        node.start_container(&pod)
            .with_context(|| format!("{round}: {}", node.daemon.log()))?;
        let took = asked.elapsed();
        ensure!(took < Duration::from_secs(1), "{round}: {took:?}");
        node.wait_pods(|rows| {
            rows.len() == 8 && rows.iter().all(|row| row.ends_with(" \"started\""))
        })?;
        node.remove(&pod)?;
    }
    // Without a next pod they are free as well.
    node.until("end of all bindings", || Ok(node.bindings()?.is_empty()))
}

fn a_pod_deleted_by_force_has_its_hcas_while_it_runs() -> Result<()> {
    let node = Node::new(&LATE.replace("binding: late", AT_START))?;
    let gpus: Vec<usize> = (0..8).collect();
    let hangs = node.admit("a", &gpus, 8)?;
    node.start_container(&hangs)?;
    let bound = node.bindings()?;
    node.kubelet.remove_by_force("default/a")?;
    let next = node.admit("b", &gpus, 8)?;
    let refused = node.bind(&next, "s2").err().context("bound")?.to_string();
    ensure!(
        refused.contains("default/a") && refused.contains("processes of it run"),
        "{refused}"
    );
    let ended = thread::scope(|scope| {
        let kubelet = &node.kubelet;
        let started = scope.spawn(|| {
            kubelet.run_options("default/b", "main")?;
            anyhow::Ok(Instant::now())
        });
        thread::sleep(Duration::from_secs(3));
        ensure!(!started.is_finished(), "{}", node.daemon.log());
        assert_eq!(node.bindings()?, bound);
        let ended = Instant::now();
        node.kubelet
            .end_processes(hangs.pod.uid.as_deref().context("a UID")?)?;
        let started = started.join().map_err(|_| anyhow::anyhow!("panicked"))?;
        Ok(started?.duration_since(ended))
    })?;
    ensure!(ended < Duration::from_secs(1), "{ended:?}");
    assert_eq!(node.bindings()?.len(), 8);
    Ok(())
}

fn without_cgroups_two_lists_free_an_hca() -> Result<()> {
    let config = LATE.replace("binding: late", AT_START);
    let node = Node::with_flags(&config, &["--cgroup-dir", "/nonexistent"])?;
    let pod = node.admit("a", &[0], 1)?;
    node.start_container(&pod)?;
    node.kubelet.remove_by_force("default/a")?;
    let removed = Instant::now();
    while !node.bindings()?.is_empty() {
        let log = || node.daemon.log();
        ensure!(removed.elapsed() < Duration::from_secs(60), "{}", log());
        thread::sleep(Duration::from_millis(200));
    }
    let took = removed.elapsed();
    ensure!(
        took > Duration::from_secs(10),
        "one list was enough: {took:?}"
    );
    Ok(())
}

fn what_a_container_started_with_stays_whatever_comes_later() -> Result<()> {
    let config = LATE.replace("binding: late", "binding: late\n  bindAtStart: true");
    let node = Node::new(&config)?;
    // One pod without a network attachment; of another a slot has one and a slot has none.
    let bare = node.admit("bare", &[3, 4], 2)?;
    let mixed = node.admit("mixed", &[0, 7], 2)?;
    node.start_container(&bare)?;
    let only = |pod: &Admitted, slot: usize| Admitted {
        pod: pod.pod.clone(),
        slots: vec![pod.slots[slot].clone()],
    };
    node.bind(&mixed, "s2")?;
    node.commit(&only(&mixed, 0), "s2")?;
    node.start_container(&mixed)?;
    let started = node.bindings()?;
    assert_eq!(started.len(), 4);
    // Networks are attached to the running pods, and that fails or is undone.
    for (pod, sandbox) in [(&bare, "s1"), (&mixed, "s2")] {
        let bound = node.bind(pod, sandbox)?;
        let slots = bound.slots.iter();
        let known = slots.map(|slot| (slot.hca.clone(), slot.unit.clone()));
        let of_pod = |(_, unit): &(String, String)| pod.slots.contains(unit);
        let expected: BTreeMap<_, _> = started.clone().into_iter().filter(of_pod).collect();
        assert_eq!(known.collect::<BTreeMap<_, _>>(), expected);
        let unattached = only(pod, 1);
        node.unbind(sandbox)?;
        node.commit(&unattached, sandbox)?;
        node.unbind(sandbox)?;
        assert!(
            node.bindings()?
                .values()
                .any(|unit| *unit == unattached.slots[0])
        );
    }
    // The containers start again, with the same, and no two files name one device.
    node.start_container(&bare)?;
    assert_eq!(node.cdi_devices()?.len(), 3);
    assert_eq!(node.bindings()?, started);
    Ok(())
}

fn a_stale_cdi_file_never_reaches_a_container() -> Result<()> {
    let node = Node::new(LATE)?;
    let pod = node.admit("a", &[0], 1)?;
    // Left by an earlier pod that had this slot, with another HCA's nodes.
    let stale = format!("rdma-device-plugin-{}-0123456789abcdef.json", pod.slots[0]);
    let text = format!(
        r#"{{"cdiVersion": "0.5.0", "kind": "rdma-device-plugin/slot", "devices": [
            {{"name": "{}", "containerEdits": {{"deviceNodes": [
                {{"path": "/dev/infiniband/uverbs7"}}]}}}}]}}"#,
        pod.slots[0]
    );
    fs::write(node.cdi().join(&stale), &text)?;
    // Without a binding the container is not started, whatever the file says.
    assert!(node.start_container(&pod).is_err());
    node.bind(&pod, "s1")?;
    assert!(node.start_container(&pod).is_err());
    node.commit(&pod, "s1")?;
    ensure!(!node.cdi().join(&stale).exists());
    let name = format!("rdma-device-plugin/slot={}", pod.slots[0]);
    assert_eq!(node.cdi_devices()?[&name][0], "/dev/infiniband/uverbs0");
    // Its own file, with other content.
    let own = fs::read_dir(node.cdi())?.next().context("a file")??.path();
    fs::write(&own, &text)?;
    node.start_container(&pod)?;
    assert_eq!(node.cdi_devices()?[&name][0], "/dev/infiniband/uverbs0");
    // And one without any binding goes by itself.
    let free = "rdma-device-plugin-slot_0badcafe_7-0123456789abcdef.json";
    fs::write(node.cdi().join(free), &text)?;
    let started = Instant::now();
    while node.cdi().join(free).exists() {
        ensure!(
            started.elapsed() < Duration::from_secs(40),
            "{}",
            node.daemon.log()
        );
        thread::sleep(Duration::from_millis(200));
    }
    ensure!(own.exists());
    Ok(())
}

fn a_cdi_directory_that_is_a_link_is_refused() -> Result<()> {
    let node = Node::new(LATE)?;
    let pod = node.admit("a", &[0], 1)?;
    node.bind(&pod, "s1")?;
    let (real, victim) = (node.cdi(), node.machine.directory().join("victim"));
    fs::create_dir(&victim)?;
    fs::rename(&real, real.with_extension("moved"))?;
    symlink(&victim, &real)?;
    let refused = node.commit(&pod, "s1");
    let text = refused
        .as_ref()
        .map_err(ToString::to_string)
        .unwrap_err()
        .clone();
    ensure!(text.contains("it is a link"), "{text}");
    // A scan may have seen it already: the pool has nothing to offer meanwhile.
    let kind = kind(refused)?;
    ensure!(
        [FailureKind::BindingsUnavailable, FailureKind::CannotBind].contains(&kind),
        "{kind:?}"
    );
    assert_eq!(fs::read_dir(&victim)?.count(), 0);
    assert!(node.start_container(&pod).is_err());
    fs::remove_file(&real)?;
    fs::rename(real.with_extension("moved"), &real)?;
    node.commit(&pod, "s1")?;
    node.start_container(&pod)?;
    Ok(())
}

fn device_nodes_are_those_of_the_moment_of_the_commit() -> Result<()> {
    let node = Node::new(LATE)?;
    let pod = node.admit("a", &[0], 1)?;
    node.bind(&pod, "s1")?;
    // A move to the pod's namespace gives the verbs node another number.
    node.machine.renumber("uverbs0", "uverbs40")?;
    node.commit(&pod, "s1")?;
    let name = format!("rdma-device-plugin/slot={}", pod.slots[0]);
    assert_eq!(node.cdi_devices()?[&name][0], "/dev/infiniband/uverbs40");
    // And so has a restart of the container after the number changed once more.
    node.machine.renumber("uverbs40", "uverbs41")?;
    node.start_container(&pod)?;
    assert_eq!(node.cdi_devices()?[&name][0], "/dev/infiniband/uverbs41");
    Ok(())
}

fn a_pool_that_overlaps_or_has_no_cdi_is_withheld() -> Result<()> {
    let overlapping = format!(
        "{LATE}- resource: rdma/shared\n  mode: shared\n  shares: 4\n  \
         select: {{rdmaDevices: [mlx5_0]}}\n"
    );
    let machine = Machine::laid(machine::a4)?;
    let kubelet = machine.kubelet()?;
    let daemon = start(&machine, &overlapping)?;
    let wait = |resource: &str, count: usize| {
        let waited = kubelet.wait_allocatable(resource, count, WAIT_TIMEOUT);
        waited.with_context(|| daemon.log())
    };
    wait("rdma/shared", 4)?;
    let withheld = |devices: BTreeMap<String, kubelet_api::deviceplugin::Device>| {
        devices.len() == 8 && devices.values().all(|device| device.health != "Healthy")
    };
    let started = Instant::now();
    while !withheld(kubelet.devices(NIC)) {
        ensure!(started.elapsed() < WAIT_TIMEOUT, "{}", daemon.log());
        thread::sleep(Duration::from_millis(20));
    }
    ensure!(
        daemon.log().contains("is chosen by rdma/shared, too"),
        "{}",
        daemon.log()
    );
    Ok(())
}

/// The pool asks for what the host cannot see while the pod has the HCA.
fn a_bound_slot_is_listed_and_starts_after_a_restart() -> Result<()> {
    let config = LATE.replace("linkTypes: [ether]", "linkSpeed: [\">=100G\"]");
    let mut node = Node::new(&config)?;
    let pod = node.admit("a", &[2], 1)?;
    let bound = node.bind(&pod, "s1")?;
    node.commit(&pod, "s1")?;
    node.start_container(&pod)?;
    let index = NICS.iter().position(|nic| *nic == hcas(&bound)[0]);
    let tree = &node.machine.tree;
    tree.file("/sys/module/ib_core/parameters/netns_mode", "N");
    tree.hide_rdma(&format!("mlx5_{}", index.context("a NIC")?));
    node.daemon.signal(Signal::SIGKILL)?;
    node.daemon.ended(WAIT_TIMEOUT)?;
    node.daemon = start(&node.machine, &config)?;
    node.ready()?;
    node.start_container(&pod)?;
    // The other NIC of that switch is free, and this one is not.
    let other = node.admit("b", &[3], 1)?;
    let second = node.bind(&other, "s2")?;
    assert_ne!(hcas(&second), hcas(&bound));
    Ok(())
}

fn a_bound_slot_starts_after_its_pool_dropped_the_hca() -> Result<()> {
    let node = Node::new(LATE)?;
    let pod = node.admit("a", &[0], 1)?;
    let bound = node.bind(&pod, "s1")?;
    node.commit(&pod, "s1")?;
    node.start_container(&pod)?;
    let without = format!(
        "linkTypes: [ether], not: {{pciAddresses: [\"{}\"]}}",
        hcas(&bound)[0]
    );
    let file = node.machine.directory().join("config");
    fs::write(file, LATE.replace("linkTypes: [ether]", &without))?;
    let waited = node.kubelet.wait_allocatable(NIC, 7, WAIT_TIMEOUT);
    waited.with_context(|| node.daemon.log())?;
    node.start_container(&pod)?;
    Ok(())
}

fn topology_names_the_pod_of_a_bound_slot() -> Result<()> {
    let node = Node::new(LATE)?;
    let pod = node.admit("a", &[0], 1)?;
    let bound = node.bind(&pod, "s1")?;
    let nic = hcas(&bound)[0];
    let shown = node.shown("topology")?;
    let nics = shown["nics"].as_array().context("nics")?;
    let held = nics
        .iter()
        .find(|one| one["hca"] == nic)
        .context("the NIC")?;
    assert_eq!(held["pod"], serde_json::json!(["default/a"]), "{held}");
    Ok(())
}

impl Node {
    /// What `rdmactl` shows of the node.
    fn shown(&self, command: &str) -> Result<Value> {
        let output = Command::new(product("rdmactl")?)
            .args([command, "--json", "--host-root"])
            .arg(self.machine.tree.path("/"))
            .arg("--kubelet-root-dir")
            .arg(self.machine.settings().root)
            .arg("--node-socket")
            .arg(self.machine.node_socket())
            .output()?;
        ensure!(output.status.success(), "{output:?}");
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// Waits until `rdmactl pods` has these lines, each as `HCA STAGE`; `null` for what is not known.
    fn wait_pods(&self, is_expected: impl Fn(&BTreeSet<String>) -> bool) -> Result<()> {
        let started = Instant::now();
        loop {
            let shown = self.shown("pods")?;
            let rows = shown["pods"].as_array().context("pods")?;
            let row = |row: &Value| format!("{} {}", row["hca"], row["stage"]);
            if is_expected(&rows.iter().map(row).collect()) {
                return Ok(());
            }
            if started.elapsed() > Duration::from_secs(20) {
                bail!("{shown:#} {:#}", self.shown("status")?["daemon"]);
            }
            thread::sleep(Duration::from_millis(100));
        }
    }
}

/// The daemon scans each second.
fn rescanned() -> String {
    LATE.replace("pools:", "rescanInterval: 1s\npools:")
}

impl Node {
    /// Twelve binds, more than there are threads for what blocks, fail in bounded time.
    fn refuses(&self, admitted: &Admitted, path: &str) -> Result<()> {
        for _ in 0..12 {
            let asked = Instant::now();
            let refused = self.bind(admitted, "s1").err().context("bound")?;
            let took = asked.elapsed();
            ensure!(took < Duration::from_secs(3), "{took:?}: {refused}");
            if refused.to_string().contains(path) {
                return Ok(());
            }
        }
        bail!("no bind names {path}: {}", self.daemon.log())
    }

    /// Health still reaches the kubelet, and SIGTERM ends the daemon.
    fn goes_on(&mut self) -> Result<()> {
        let state = "/sys/class/infiniband/mlx5_7/ports/1/state";
        self.machine.tree.file(state, "1: DOWN");
        let waited = self.kubelet.wait_allocatable(NIC, 7, WAIT_TIMEOUT);
        waited.with_context(|| self.daemon.log())?;
        let asked = Instant::now();
        self.daemon.signal(Signal::SIGTERM)?;
        self.daemon.ended(Duration::from_secs(5))?;
        let took = asked.elapsed();
        ensure!(took < Duration::from_secs(3), "{took:?}");
        Ok(())
    }
}

/// A FIFO blocks its reader as a driver that does not answer does.
fn a_gpu_driver_that_hangs_costs_only_pods_with_that_gpu() -> Result<()> {
    let mut node = Node::new(&rescanned())?;
    let information = format!("/proc/driver/nvidia/gpus/{}/information", GPUS[0]);
    node.machine.tree.remove(&information);
    mkfifo(&node.machine.tree.path(&information), Mode::S_IRUSR)?;
    let hangs = node.admit("a", &[0], 1)?;
    node.refuses(&hangs, &information)?;
    for _ in 0..12 {
        ensure!(node.bind(&hangs, "s1").is_err(), "bound");
    }
    let answers = node.admit("b", &[6], 1)?;
    node.until("binding of a pod with another GPU", || {
        thread::sleep(Duration::from_millis(200));
        Ok(node.bind(&answers, "s2").is_ok())
    })?;
    node.goes_on()
}

fn a_start_that_waits_for_a_gpu_driver_delays_no_other() -> Result<()> {
    let config = LATE.replace("binding: late", "binding: late\n  bindAtStart: true");
    let node = Node::new(&config)?;
    let runs = node.admit("runs", &[], 1)?;
    node.start_container(&runs)?;
    // The driver that knows this GPU is asked when it is bound.
    let information = format!("/proc/driver/nvidia/gpus/{}/information", GPUS[0]);
    node.machine.tree.remove(&information);
    mkfifo(&node.machine.tree.path(&information), Mode::S_IRUSR)?;
    let unknown = uuid(0).replace("GPU-", "GPU-f");
    node.gpus.list_healthy(&[&unknown]);
    node.kubelet.wait_allocatable(GPU, 1, WAIT_TIMEOUT)?;
    let pod = Pod::with_limits("hangs", &[(GPU, 1), (NIC, 1)])?;
    node.kubelet.admit(pod)?;
    thread::scope(|scope| {
        let hangs = scope.spawn(|| node.kubelet.run_options("default/hangs", "main"));
        thread::sleep(Duration::from_millis(100));
        let asked = Instant::now();
        node.start_container(&runs)?;
        let took = asked.elapsed();
        ensure!(!hangs.is_finished(), "the driver answered");
        ensure!(took < Duration::from_millis(500), "{took:?}");
        let hangs = hangs
            .join()
            .map_err(|_| anyhow::anyhow!("the kubelet failed"))?;
        ensure!(hangs.is_err(), "it started");
        Ok(())
    })
}

fn a_state_directory_that_hangs_stops_no_daemon() -> Result<()> {
    let mut node = Node::new(&rescanned())?;
    let pod = node.admit("a", &[6], 1)?;
    let directory = node.machine.state();
    let _mount = Unanswered::on(&directory)?;
    node.refuses(&pod, directory.to_str().context("path")?)?;
    for _ in 0..12 {
        ensure!(node.bind(&pod, "s1").is_err(), "bound");
    }
    node.goes_on()?;
    // Another daemon starts without it.
    node.machine
        .tree
        .file("/sys/class/infiniband/mlx5_7/ports/1/state", "4: ACTIVE");
    node.daemon = start(&node.machine, &rescanned())?;
    node.ready()
}

fn containers_get_one_gid_index_and_the_topology_file() -> Result<()> {
    // Its devices are not those of the machine.
    let topology = tempfile::NamedTempFile::new()?;
    let other =
        "<system version=\"1\"><cpu numaid=\"0\"><pci busid=\"0000:01:00.0\"/></cpu></system>";
    fs::write(topology.path(), other)?;
    let file = topology.path().display().to_string();
    let config = LATE.replace(
        "binding: late",
        "binding: late\n  environment: true\n  ncclTopology: true",
    );
    let node = Node::new(&format!("{config}topology: {{ncclTopology: {file}}}\n"))?;
    let edits = |slot: &str| -> Result<Value> {
        for entry in fs::read_dir(node.cdi())? {
            let read: Value = serde_json::from_str(&fs::read_to_string(entry?.path())?)?;
            if read["devices"][0]["name"] == slot {
                return Ok(read["devices"][0]["containerEdits"].clone());
            }
        }
        bail!("no file of {slot}")
    };
    let pod = node.admit("a", &[0, 1], 2)?;
    node.bind(&pod, "s1")?;
    let has = |slot: &str, variable: &str| -> Result<bool> {
        let edits = edits(slot)?;
        let variables = edits["env"].as_array().context("env")?.iter();
        Ok(variables
            .filter_map(Value::as_str)
            .any(|one| one.starts_with(variable)))
    };
    for (indexes, expected) in [(&[3, 3][..], true), (&[3, 5], false), (&[3], false)] {
        node.commit_gids(&pod, "s1", indexes)?;
        for slot in &pod.slots {
            let said = has(slot, "NCCL_IB_GID_INDEX=3")?;
            ensure!(said == expected, "{indexes:?}: {}", edits(slot)?);
        }
    }
    ensure!(
        node.daemon.log().contains("NCCL_IB_GID_INDEX is not set"),
        "{}",
        node.daemon.log()
    );
    let slot = &pod.slots[0];
    ensure!(has(slot, &format!("NCCL_TOPO_FILE={file}"))?);
    ensure!(edits(slot)?["mounts"][0]["hostPath"] == file.as_str());
    Ok(())
}
