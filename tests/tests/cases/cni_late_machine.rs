//! Late binding through the whole stack on a machine with eight GPUs, eight NICs and four switches:
//! the CNI plugin, the daemon, a kubelet and a plugin of GPUs, with netdevs that move.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use e2e::bin_under_test::product;
use e2e::cases;
use e2e::cni::{Answer, Call};
use e2e::daemon::{Daemon, make_nodes, renumber};
use e2e::host_state::unchanged;
use e2e::kubelet::{Kubelet, Pod, Settings};
use e2e::netns::Netns;
use e2e::random::Random;
use e2e::scene::{INVALID_NETWORK, Scene, TRY_AGAIN, answer_of};
use hca_trees::machine;
use kubelet_api::deviceplugin::DevicePluginOptions;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::cni_late::WAIT_TIMEOUT;
use crate::plugin::{Plugin, Script};

cases! {
    each_gpu_of_the_seeds_quadruples_has_a_nic_of_its_switch => quadruples();
    a_late_pod_costs_at_most_four_scans => scans();
    two_hundred_pods_come_and_go_under_killed_daemons => come_and_go();
}

pub(crate) const NIC: &str = "rdma/nic";
pub(crate) const GPU: &str = "nvidia.com/gpu";
pub(crate) const LATE: &str = "version: 1\nrescanInterval: 1s\npools:\n- resource: rdma/nic\n  mode: exclusive\n  \
                    binding: late\n  select: {linkTypes: [ether]}\n";
/// Where the daemon serves its pages, in the host's namespace.
pub(crate) const METRICS: &str = "127.0.0.1:9834";
/// GPUs, and as many NICs.
const COUNT: usize = 8;
/// PCI addresses of the GPUs, in order; below each two of them is a switch with two NICs.
pub(crate) const GPUS: [&str; COUNT] = [
    "0000:8f:00.0",
    "0000:90:00.0",
    "0000:96:00.0",
    "0000:97:00.0",
    "0000:c4:00.0",
    "0000:c5:00.0",
    "0000:cb:00.0",
    "0000:cc:00.0",
];
/// PCI addresses of the NICs, in order.
pub(crate) const NICS: [&str; COUNT] = [
    "0000:91:00.0",
    "0000:92:00.0",
    "0000:98:00.0",
    "0000:99:00.0",
    "0000:c6:00.0",
    "0000:c7:00.0",
    "0000:cd:00.0",
    "0000:ce:00.0",
];
/// Their netdevs.
pub(crate) const NETDEVS: [&str; COUNT] = [
    "gpu0rdma0",
    "gpu1rdma0",
    "gpu2rdma0",
    "gpu3rdma0",
    "gpu4rdma0",
    "gpu5rdma0",
    "gpu6rdma0",
    "gpu7rdma0",
];

pub(crate) fn uuid(gpu: usize) -> String {
    uuid_of(GPUS[gpu])
}

fn uuid_of(address: &str) -> String {
    format!("GPU-{}", address.replace([':', '.'], "-"))
}

/// The machine, with all that runs on a node.
pub(crate) struct Node {
    pub(crate) scene: Scene,
    pub(crate) kubelet: Kubelet,
    pub(crate) daemon: Daemon,
    /// The resource of its one pool.
    resource: String,
    gpus: Plugin,
    /// In order of PCI address.
    uuids: Vec<String>,
}

/// A pod that the kubelet admitted.
pub(crate) struct Admitted {
    name: String,
    gpus: Vec<usize>,
    pub(crate) slots: Vec<String>,
    pub(crate) netns: Netns,
    pub(crate) call: Call,
}

/// A binding, by its file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Binding {
    unit: String,
    pod: String,
    /// Addresses and classes of the GPUs.
    gpus: Vec<(String, String)>,
}

impl Node {
    pub(crate) fn new() -> Result<Self> {
        let lay = |tree: &hca_trees::Tree| {
            tree.rdma_core(true);
            machine::a4(tree);
        };
        let scene = Scene::laid(lay, &NETDEVS)?;
        let cdi = scene.host.directory().join("cdi");
        // The same addresses again, whatever a case does before.
        let keys = json!({"cdiDir": cdi, "ipam": {"cooldown": "0s"}});
        scene.policy(&json!({"unallocated": null}), &keys)?;
        Self::on(scene, LATE, NIC, COUNT)
    }

    /// A machine of files whose daemon has this configuration, of one pool with so many units.
    pub(crate) fn on(scene: Scene, config: &str, resource: &str, units: usize) -> Result<Self> {
        let tree = scene.tree()?;
        make_nodes(tree)?;
        let mut uuids = Vec::new();
        for gpu in fs::read_dir(tree.path("/proc/driver/nvidia/gpus"))
            .into_iter()
            .flatten()
        {
            uuids.push(uuid_of(&gpu?.file_name().to_string_lossy()));
        }
        uuids.sort();
        fs::create_dir(scene.host.directory().join("pools"))?;
        fs::write(config_file(&scene), config)?;
        fs::create_dir_all(scene.host_root().join("run"))?;
        DirBuilder::new().mode(0o700).create(scene.host.state())?;
        let kubelet = Kubelet::start(settings(&scene))?;
        let daemon = start(&scene)?;
        let script = Script {
            options: DevicePluginOptions {
                get_preferred_allocation_available: true,
                ..Default::default()
            },
            ..Script::default()
        };
        let gpus = Plugin::serve(&settings(&scene).device_plugins, "gpu.sock", script)?;
        gpus.list_healthy(&uuids.iter().map(String::as_str).collect::<Vec<_>>());
        gpus.register(GPU)?;
        let node = Self {
            scene,
            kubelet,
            daemon,
            resource: resource.to_owned(),
            gpus,
            uuids,
        };
        let listed = node.kubelet.wait_allocatable(resource, units, WAIT_TIMEOUT);
        listed.with_context(|| node.daemon.log())?;
        node.listens()?;
        let gpus = node.uuids.len();
        node.kubelet.wait_allocatable(GPU, gpus, WAIT_TIMEOUT)?;
        Ok(node)
    }

    /// Waits until the socket answers.
    fn listens(&self) -> Result<()> {
        let started = Instant::now();
        while UnixStream::connect(socket(&self.scene)).is_err() {
            ensure!(started.elapsed() < WAIT_TIMEOUT, "{}", self.daemon.log());
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Admits a pod with these GPUs and as many slots.
    pub(crate) fn admit(&self, name: &str, gpus: &[usize]) -> Result<Admitted> {
        let count = u64::try_from(gpus.len())?;
        self.admit_pod(Pod::with_limits(name, &[(GPU, count), (NIC, count)])?, gpus)
    }

    pub(crate) fn admit_pod(&self, pod: Pod, gpus: &[usize]) -> Result<Admitted> {
        let wanted: BTreeSet<String> = gpus.iter().map(|gpu| self.uuids[*gpu].clone()).collect();
        self.gpus.script.lock().unwrap().preferred = wanted.iter().cloned().collect();
        let (name, uid) = (pod.metadata.name.clone(), pod.metadata.uid.clone());
        let started = Instant::now();
        // A daemon that was started a moment ago has not registered yet.
        while let Err(refused) = self.kubelet.admit(pod.clone()) {
            let log = || format!("{refused}\n{}", self.daemon.log());
            ensure!(started.elapsed() < WAIT_TIMEOUT, "{}", log());
            thread::sleep(Duration::from_millis(20));
        }
        let assigned = self.kubelet.assigned(&format!("default/{name}"))?;
        let of = |resource: &str| -> Vec<String> {
            let own = assigned.iter().filter(|((_, one), _)| one == resource);
            own.flat_map(|(_, ids)| ids.clone()).collect()
        };
        let given: BTreeSet<String> = of(GPU).into_iter().collect();
        ensure!(
            given == wanted,
            "the kubelet gave {given:?}, not {wanted:?}"
        );
        let netns = self.scene.another_pod()?;
        let mut call = self.scene.call_of(&netns, &format!("c-{name}"), "net1");
        call.args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME={name};K8S_POD_UID={uid}"
        );
        Ok(Admitted {
            slots: of(&self.resource),
            gpus: gpus.to_vec(),
            netns,
            call,
            name,
        })
    }

    pub(crate) fn remove(&self, pod: &Admitted) -> Result<()> {
        self.kubelet.remove(&format!("default/{}", pod.name))
    }

    /// A network that brings all NICs of a pod, with the slot that Multus passes.
    pub(crate) fn network(&self, pod: &Admitted, keys: &Value) -> Value {
        let slot = pod.slots.first();
        let mut network = self
            .scene
            .network(&json!({"attach": "move", "devices": "all", "deviceID": slot}));
        if let (Some(network), Some(keys)) = (network.as_object_mut(), keys.as_object()) {
            network.extend(keys.clone());
        }
        network
    }

    /// ADD; on a busy machine the kubelet may be late, and the runtime tries again after DEL.
    pub(crate) fn add(&self, pod: &Admitted, keys: &Value) -> Result<Value> {
        self.add_by(&pod.call, &self.network(pod, keys))
    }

    pub(crate) fn add_by(&self, call: &Call, network: &Value) -> Result<Value> {
        for _ in 0..5 {
            let answer = answer_of(call, "ADD", network)?;
            if answer.status.success() || !is_late(&answer)? {
                return answer.success().with_context(|| self.daemon.log());
            }
            answer_of(call, "DEL", network)?.success().context("DEL")?;
        }
        bail!("the kubelet is late: {}", self.daemon.log())
    }

    pub(crate) fn del(&self, pod: &Admitted, keys: &Value) -> Result<()> {
        let answer = answer_of(&pod.call, "DEL", &self.network(pod, keys))?;
        answer.success().map(drop).context("DEL")
    }

    /// The daemon's socket.
    pub(crate) fn socket(&self) -> PathBuf {
        socket(&self.scene)
    }

    fn cdi(&self) -> PathBuf {
        self.scene.host.directory().join("cdi")
    }

    /// Bindings by HCA, by the files, but those that only wait for the end of their pod.
    fn bindings(&self) -> Result<BTreeMap<String, Binding>> {
        let mut bindings = BTreeMap::new();
        let files = fs::read_dir(socket(&self.scene).with_file_name("bindings"));
        for entry in files.into_iter().flatten() {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with('.') {
                continue;
            }
            let file: Value = serde_json::from_str(&fs::read_to_string(&path)?)?;
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let gpus = file["gpus"].as_array().into_iter().flatten();
            let binding = Binding {
                unit: text(&file["unit"]),
                pod: text(&file["pod"]["name"]),
                gpus: gpus
                    .map(|one| (text(&one["gpu"]), text(&one["class"])))
                    .collect(),
            };
            ensure!(text(&file["hca"]) == name, "{file:#}");
            if file["stage"] == "detached" {
                continue;
            }
            bindings.insert(name.into_owned(), binding);
        }
        Ok(bindings)
    }

    /// What a container runtime finds: slots with the paths of their nodes.
    pub(crate) fn cdi_devices(&self) -> Result<BTreeMap<String, Vec<String>>> {
        let mut devices = BTreeMap::new();
        for entry in fs::read_dir(self.cdi()).into_iter().flatten() {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let document: Value = serde_json::from_str(&fs::read_to_string(&path)?)?;
            for device in document["devices"].as_array().context("devices")? {
                let name = device["name"].as_str().context("name")?.to_owned();
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

    /// The directory of an HCA's PCI function.
    pub(crate) fn function(&self, hca: &str) -> Result<PathBuf> {
        let path = self
            .scene
            .tree()?
            .path(format!("/sys/bus/pci/devices/{hca}"));
        Ok(fs::canonicalize(path)?)
    }

    /// The verbs node that an HCA has now.
    pub(crate) fn verbs(&self, hca: &str) -> Result<String> {
        let mut names = fs::read_dir(self.function(hca)?.join("infiniband_verbs"))?;
        let name = names.next().context("a verbs node")??.file_name();
        Ok(name.to_string_lossy().into_owned())
    }

    /// Nothing is bound, and no container would start.
    pub(crate) fn nothing_is_left(&self) -> Result<()> {
        // A question whose client was killed is answered all the same, and then undone.
        let started = Instant::now();
        loop {
            let left = (self.bindings()?, self.cdi_devices()?);
            if left.0.is_empty() && left.1.is_empty() {
                return Ok(());
            }
            let log = || format!("{left:?} is left: {}", self.daemon.log());
            ensure!(started.elapsed() < Duration::from_secs(5), "{}", log());
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// HCAs of a pod, by the files.
    pub(crate) fn hcas(&self, pod: &Admitted) -> Result<BTreeSet<String>> {
        let own = self.bindings()?.into_iter();
        let own = own.filter(|(_, one)| one.pod == pod.name);
        Ok(own.map(|(hca, _)| hca).collect())
    }

    pub(crate) fn start_daemon(&mut self) -> Result<()> {
        self.daemon = start(&self.scene)?;
        self.listens()
    }

    /// Another daemon, with this configuration.
    pub(crate) fn restart(&mut self, config: &str) -> Result<()> {
        self.kill_daemon()?;
        fs::write(config_file(&self.scene), config)?;
        self.start_daemon()
    }

    pub(crate) fn kill_daemon(&mut self) -> Result<()> {
        self.daemon.signal(Signal::SIGKILL)?;
        self.daemon.ended(Duration::from_secs(5))?;
        Ok(())
    }
}

fn settings(scene: &Scene) -> Settings {
    Settings::below(&scene.host.directory().join("kubelet"))
        .with_cgroups(scene.host_root().join("sys/fs/cgroup"))
}

fn socket(scene: &Scene) -> PathBuf {
    scene.host_root().join("run/rdma-netdev/node.sock")
}

fn config_file(scene: &Scene) -> PathBuf {
    // Away from the daemon's log: it watches the directory.
    scene.host.directory().join("pools/config")
}

fn start(scene: &Scene) -> Result<Daemon> {
    let settings = settings(scene);
    let mut command = scene.host.netns.command(product("rdma-device-plugin")?);
    let flags: [(&str, &Path); 9] = [
        ("--metrics-addr", Path::new(METRICS)),
        ("--log-level", Path::new("debug")),
        ("--config-file", &config_file(scene)),
        ("--host-root", &scene.host_root()),
        ("--device-plugin-dir", &settings.device_plugins),
        ("--kubelet-root-dir", &settings.root),
        ("--node-socket", &socket(scene)),
        ("--policy", &scene.policy_file()),
        ("--cdi-dir", &scene.host.directory().join("cdi")),
    ];
    for (flag, path) in flags {
        command.arg(flag).arg(path);
    }
    Daemon::start(command, scene.host.directory())
}

/// Whether an ADD was refused because the kubelet or the daemon did not answer in time.
pub(crate) fn is_late(answer: &Answer) -> Result<bool> {
    let (code, text) = answer.refusal()?;
    Ok(code == TRY_AGAIN && text.contains("no answer within"))
}

/// Names of the links in a pod, but for `lo`.
pub(crate) fn links(pod: &Admitted) -> Result<BTreeSet<String>> {
    let links = pod.netns.ip_json("link show")?;
    let names = links.as_array().into_iter().flatten();
    let names = names.filter_map(|link| Some(link["ifname"].as_str()?.to_owned()));
    Ok(names.filter(|name| name != "lo").collect())
}

/// The netdevs of these HCAs.
fn netdevs(hcas: &BTreeSet<String>) -> BTreeSet<String> {
    let all = NICS.iter().zip(NETDEVS);
    all.filter(|(nic, _)| hcas.contains(**nic))
        .map(|(_, netdev)| netdev.to_owned())
        .collect()
}

/// A binding changes the plan, not the host.
fn scans() -> Result<()> {
    let mut node = Node::new()?;
    node.restart(&LATE.replace("rescanInterval: 1s", "rescanInterval: 0"))?;
    let node = node;
    let keys = json!({"names": "{host}"});
    let count = || node.daemon.log().matches("scanned the host").count();
    let settled = || -> Result<usize> {
        let started = Instant::now();
        let mut before = count();
        loop {
            thread::sleep(Duration::from_millis(700));
            if count() == before {
                return Ok(before);
            }
            before = count();
            ensure!(started.elapsed() < WAIT_TIMEOUT, "{}", node.daemon.log());
        }
    };
    let before = settled()?;
    let pod = node.admit("a", &[0])?;
    node.add(&pod, &keys)?;
    let name = format!("default/{}", pod.name);
    node.kubelet.run_options(&name, "main")?;
    node.del(&pod, &keys)?;
    node.remove(&pod)?;
    node.nothing_is_left()?;
    let scans = settled()? - before;
    ensure!(scans <= 4, "{scans}: {}", node.daemon.log());
    Ok(())
}

/// The GPUs of the pods that were measured: 22.2 GB/s and 11.2 GB/s with NICs that were given by
/// halves. Each GPU has a NIC below its own switch here, in both pods of a node at once.
fn quadruples() -> Result<()> {
    let node = Node::new()?;
    let before = node.scene.host_state()?;
    let keys = json!({"names": "{host}"});
    for (round, pair) in [
        [[0, 1, 6, 7], [2, 3, 4, 5]],
        [[0, 1, 2, 7], [3, 4, 5, 6]],
        [[0, 5, 6, 7], [1, 2, 3, 4]],
    ]
    .into_iter()
    .enumerate()
    {
        let mut pods = Vec::new();
        for (number, gpus) in pair.iter().enumerate() {
            let pod = node.admit(&format!("job{round}-{number}"), gpus)?;
            node.add(&pod, &keys)?;
            node.kubelet
                .run_options(&format!("default/{}", pod.name), "main")?;
            pods.push(pod);
        }
        for pod in &pods {
            let bindings = node.bindings()?;
            let own: Vec<&Binding> = bindings
                .values()
                .filter(|one| one.pod == pod.name)
                .collect();
            let mut served: Vec<(String, String)> =
                own.iter().flat_map(|one| one.gpus.clone()).collect();
            served.sort();
            let mut expected: Vec<(String, String)> = pod
                .gpus
                .iter()
                .map(|gpu| (GPUS[*gpu].to_owned(), "PIX".to_owned()))
                .collect();
            expected.sort();
            assert_eq!(served, expected, "{:?}: {own:?}", pod.gpus);
            assert_eq!(own.len(), 4);
            // What is in the pod is what is bound.
            assert_eq!(links(pod)?, netdevs(&node.hcas(pod)?));
        }
        assert_eq!(node.bindings()?.len(), COUNT);
        for pod in &pods {
            node.del(pod, &keys)?;
            node.remove(pod)?;
        }
        unchanged(&before, || node.scene.host_state(), "after both pods")?;
        node.nothing_is_left()?;
    }
    Ok(())
}

/// A NIC whose function is not on its bus any more.
struct Unplugged {
    hca: &'static str,
    function: PathBuf,
    aside: PathBuf,
}

impl Unplugged {
    fn new(node: &Node, hca: &'static str) -> Result<Self> {
        let function = node.function(hca)?;
        let aside = node.scene.host.directory().join(format!("aside-{hca}"));
        fs::rename(&function, &aside)?;
        Ok(Self {
            hca,
            function,
            aside,
        })
    }

    fn plug(self) -> Result<()> {
        Ok(fs::rename(self.aside, self.function)?)
    }
}

/// Two hundred pods with one to four GPUs, while the daemon is killed, device nodes get other numbers
/// and NICs are unplugged. No NIC is in two pods, no container would get another HCA's nodes than
/// its binding's, and nothing is left over.
fn come_and_go() -> Result<()> {
    const PODS: usize = 200;
    const SEED: u64 = 0x9e37_79b9_7f4a_7c15;
    let seed = match std::env::var("RDMA_E2E_SEED") {
        Ok(text) => text.parse().context("RDMA_E2E_SEED is a number")?,
        Err(_) => SEED,
    };
    println!("seed: RDMA_E2E_SEED={seed}");
    let mut random = Random(seed);
    let mut node = Node::new()?;
    let before = node.scene.host_state()?;
    let keys = json!({"names": "{host}"});
    let mut living: Vec<Admitted> = Vec::new();
    let mut unplugged: Option<Unplugged> = None;
    let (mut arrived, mut attached, mut verbs) = (0, 0, 100);
    while arrived < PODS {
        let used: BTreeSet<usize> = living.iter().flat_map(|pod| pod.gpus.clone()).collect();
        let mut free: Vec<usize> = (0..COUNT).filter(|gpu| !used.contains(gpu)).collect();
        let wanted = 1 + random.below(4).min(random.below(4));
        let slots = free.len() - usize::from(unplugged.is_some()).min(free.len());
        if random.below(3) > 0 && slots >= wanted {
            let gpus: Vec<usize> = (0..wanted)
                .map(|_| free.remove(random.below(free.len())))
                .collect();
            arrived += 1;
            let pod = node.admit(&format!("pod-{arrived}"), &gpus)?;
            let answer = answer_of(&pod.call, "ADD", &node.network(&pod, &keys))?;
            if answer.status.success() {
                attached += 1;
                living.push(pod);
            } else {
                // What is free is too far from the GPUs, or was unplugged before the daemon has seen it.
                let (code, text) = answer.refusal()?;
                let is_gone = |one: &Unplugged| code == INVALID_NETWORK && text.contains(one.hca);
                ensure!(
                    code == TRY_AGAIN || unplugged.as_ref().is_some_and(is_gone),
                    "{code} {text}\n{}",
                    node.daemon.log()
                );
                ensure!(links(&pod)?.is_empty(), "{:?}", links(&pod)?);
                node.del(&pod, &keys)?;
                node.remove(&pod)?;
                ensure!(node.hcas(&pod)?.is_empty(), "{}", node.daemon.log());
            }
        } else if !living.is_empty() {
            let pod = living.swap_remove(random.below(living.len()));
            // Some end while no daemon is there, and the next one finds out.
            let is_alone = random.below(12) == 0;
            if is_alone {
                node.kill_daemon()?;
            }
            node.del(&pod, &keys)?;
            ensure!(links(&pod)?.is_empty(), "{:?}", links(&pod)?);
            node.remove(&pod)?;
            if is_alone {
                node.start_daemon()?;
            }
        }
        check(&node, &living)?;
        match random.below(24) {
            0 | 4 => {
                let held: BTreeSet<String> = node.bindings()?.into_keys().collect();
                let free: Vec<&'static str> = NICS
                    .into_iter()
                    .filter(|hca| !held.contains(*hca))
                    .collect();
                if let (None, [_, ..]) = (&unplugged, free.as_slice()) {
                    unplugged = Some(Unplugged::new(&node, free[random.below(free.len())])?);
                }
            }
            1 | 5 => {
                if let Some(one) = unplugged.take() {
                    one.plug()?;
                }
            }
            2 | 6 => {
                // As a driver that is loaded again does, before the daemon has seen it.
                let hca = NICS[random.below(COUNT)];
                let is_free = !node.bindings()?.contains_key(hca);
                if is_free && unplugged.as_ref().is_none_or(|one| one.hca != hca) {
                    verbs += 1;
                    let (from, to) = (node.verbs(hca)?, format!("uverbs{verbs}"));
                    renumber(node.scene.tree()?, &from, &to)?;
                }
            }
            3 => {
                node.kill_daemon()?;
                node.start_daemon()?;
            }
            _ => {}
        }
    }
    if let Some(one) = unplugged {
        one.plug()?;
    }
    for pod in living {
        node.del(&pod, &keys)?;
        node.remove(&pod)?;
    }
    ensure!(
        attached > PODS / 2,
        "only {attached} of {PODS} pods had NICs"
    );
    unchanged(&before, || node.scene.host_state(), "after all pods")?;
    // What ended while no daemon was there is freed for the next pod that needs it.
    let last = node.admit("last", &(0..COUNT).collect::<Vec<_>>());
    let last = last.with_context(|| node.daemon.log())?;
    let started = Instant::now();
    loop {
        let answer = answer_of(&last.call, "ADD", &node.network(&last, &keys))?;
        if answer.status.success() {
            break;
        }
        let (_, text) = answer.refusal()?;
        if started.elapsed() > WAIT_TIMEOUT {
            bail!("{text}\n{}", node.daemon.log());
        }
        node.del(&last, &keys)?;
        thread::sleep(Duration::from_millis(200));
    }
    check(&node, std::slice::from_ref(&last))?;
    node.del(&last, &keys)?;
    node.remove(&last)?;
    unchanged(&before, || node.scene.host_state(), "after the last pod")?;
    node.nothing_is_left()
}

/// Each living pod has as many NICs as slots, no other pod has one of them, they and no others are in
/// its namespace, and each slot's CDI file has the nodes of its HCA.
fn check(node: &Node, living: &[Admitted]) -> Result<()> {
    let (bindings, devices) = (node.bindings()?, node.cdi_devices()?);
    let log = || format!("{bindings:#?}\n{devices:#?}\n{}", node.daemon.log());
    for pod in living {
        let own: BTreeMap<&String, &String> = bindings
            .iter()
            .filter(|(_, one)| one.pod == pod.name)
            .map(|(hca, one)| (&one.unit, hca))
            .collect();
        let slots: BTreeSet<&String> = pod.slots.iter().collect();
        ensure!(
            own.keys().copied().collect::<BTreeSet<_>>() == slots,
            "{} has slots {slots:?} and bindings {own:?}\n{}",
            pod.name,
            log()
        );
        let hcas: BTreeSet<String> = own.values().map(|hca| (*hca).clone()).collect();
        ensure!(links(pod)? == netdevs(&hcas), "{}\n{}", pod.name, log());
        for (slot, hca) in &own {
            let nodes = devices.get(*slot).cloned().unwrap_or_default();
            let expected = [
                format!("/dev/infiniband/{}", node.verbs(hca)?),
                "/dev/infiniband/rdma_cm".to_owned(),
            ];
            ensure!(
                nodes == expected,
                "{slot} of {} is {hca}, and a container gets {nodes:?}\n{}",
                pod.name,
                log()
            );
        }
    }
    // No file is without its pod.
    let slots: BTreeSet<&String> = living.iter().flat_map(|pod| &pod.slots).collect();
    let files: BTreeSet<&String> = devices.keys().collect();
    ensure!(
        files == slots,
        "files {files:?}, slots {slots:?}\n{}",
        log()
    );
    Ok(())
}
