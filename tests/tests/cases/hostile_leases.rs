//! An address is released when its interface is gone from the pod's namespace and from the host, not
//! before: whatever the kernel refuses, and whoever was killed.

use std::fs::File;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::cni::Answer;
use e2e::host_state::unchanged;
use e2e::netns::{Netns, run};
use e2e::scene::{Running, Scene, TRY_AGAIN, answer_of, refusal};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::gettid;
use serde_json::{Value, json};

use super::cni_faults::{Point, inject, trace};
use super::hostile_bytes::age;
use super::hostile_ipam::{executed, upon_nic0, with_program};

cases! {
    a_child_that_its_pod_deleted_frees_its_address: Macvlan => deleted_by_its_pod();
    a_child_that_its_pod_hid_frees_its_address: Macvlan => hidden_child();
    a_dead_pods_del_leaves_another_pods_child_with_its_mac: Macvlan => same_mac();
    a_nic_that_is_not_found_keeps_its_address => hidden_nic();
    a_request_that_the_kernel_refuses_frees_no_living_childs_address: Macvlan, Strace => refused_requests();
    an_ipam_that_outlives_a_killed_add_leases_nothing_after_del: Macvlan => outlives();
}

/// A thread of this process in a network namespace of its own, made from within another one.
pub(super) struct Holder {
    pub(super) tid: i32,
    end: Option<mpsc::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Holder {
    pub(super) fn start(netns: &Netns) -> Result<Self> {
        let outer = File::open(netns.path())?;
        let (end, ended) = mpsc::channel();
        let (started, tid) = mpsc::channel();
        let thread = thread::spawn(move || {
            let entered = nix::sched::setns(outer, CloneFlags::CLONE_NEWNET)
                .and_then(|()| unshare(CloneFlags::CLONE_NEWNET));
            let _ = started.send(entered.map(|()| gettid().as_raw()));
            let _ = ended.recv();
        });
        Ok(Self {
            tid: tid.recv()??,
            end: Some(end),
            thread: Some(thread),
        })
    }

    fn path(&self) -> PathBuf {
        format!("/proc/self/task/{}/ns/net", self.tid).into()
    }

    /// Ends the thread and keeps the namespace by an open file, to which no path leads.
    pub(super) fn hide(mut self) -> Result<File> {
        let file = File::open(self.path())?;
        self.stop();
        Ok(file)
    }

    fn stop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Runs `ip` in a namespace that is open.
pub(super) fn ip_in(namespace: File, arguments: &str) -> Result<String> {
    let arguments: Vec<String> = arguments.split(' ').map(str::to_owned).collect();
    let inside = thread::spawn(move || {
        nix::sched::setns(namespace, CloneFlags::CLONE_NEWNET)?;
        run(std::process::Command::new("ip").args(arguments))
    });
    inside.join().unwrap_or_else(|_| anyhow::bail!("panicked"))
}

/// The leases there are.
fn leases(scene: &Scene) -> Vec<String> {
    let all = scene.host.left_behind().into_keys();
    all.filter(|key| key.starts_with("lease")).collect()
}

/// A process of a pod.
struct Process(std::process::Child);

impl Process {
    fn start(pod: &Netns) -> Result<Self> {
        Ok(Self(pod.command("sleep").arg("600").spawn()?))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The network says the MAC address, and the pod comes again before the DEL.
fn same_mac() -> Result<()> {
    let scene = Scene::furnished()?;
    let mut network = scene.child();
    network["mac"] = "02:00:00:00:00:07".into();
    answer_of(&scene.call(), "ADD", &network)?.success()?;
    scene.pod.delete()?;
    let pod = scene.another_pod()?;
    let call = scene.call_of(&pod, "c2", "net1");
    eventually(|| Ok(answer_of(&call, "ADD", &network)?.status.success()))?;
    let process = Process::start(&pod)?;
    eventually(|| {
        let of = |process: String| std::fs::read_link(format!("/proc/{process}/ns/net"));
        Ok(of(process.0.id().to_string())? != of("self".to_owned())?)
    })?;
    answer_of(&scene.call(), "DEL", &network)?.success()?;
    pod.ip("link show net1")
        .context("the DEL of a dead pod took the interface of a living one")?;
    answer_of(&call, "DEL", &network)?.success()?;
    Ok(())
}

fn deleted_by_its_pod() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    scene.in_pod(&["link add cable type veth peer name end", "link del net1"])?;
    scene.del_returns(&scene.child(), &before)?;
    ensure!(
        scene.pod.ip("link show cable").is_ok(),
        "the pod's own link is gone"
    );
    Ok(())
}

/// It is gone from the pod's namespace, wherever else it is.
fn hidden_child() -> Result<()> {
    for pod_ends in [false, true] {
        let scene = Scene::furnished()?;
        let before = scene.host_state()?;
        answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
        let holder = Holder::start(&scene.pod)?;
        scene.in_pod(&[&format!("link set net1 netns {}", holder.tid)])?;
        if pod_ends {
            scene.pod.delete()?;
        }
        answer_of(&scene.call(), "DEL", &scene.child())?.success()?;
        unchanged(&before, || scene.host_state(), "after DEL")?;
    }
    Ok(())
}

/// A NIC with a lease.
pub(super) fn leased_nic(scene: &Scene) -> Value {
    let mut network = scene.moving();
    network["ipam"] = scene.host.own_ipam("10.9.0.0/24", "10.9.0.100", &json!({}));
    network
}

fn hidden_nic() -> Result<()> {
    let scene = Scene::furnished()?;
    // By what is left of its links, the host knows itself after nic0 ended.
    scene.host.add_nic("nic1", "peer1")?;
    let network = leased_nic(&scene);
    answer_of(&scene.call(), "ADD", &network)?.success()?;
    let holder = Holder::start(&scene.pod)?;
    scene.in_pod(&[&format!("link set net1 netns {}", holder.tid)])?;
    let namespace = holder.hide()?;
    let before = scene.host.left_behind();
    let refused = || {
        let answer = answer_of(&scene.call(), "DEL", &network)?;
        let words = ["nic0", "neither on the host nor in the pod"];
        refusal(&answer, &[TRY_AGAIN], &words)?;
        ensure!(
            scene.host.left_behind() == before,
            "{:?}",
            scene.host.left_behind()
        );
        Ok(())
    };
    refused()?;
    scene.pod.delete()?;
    refused().context("after the pod")?;
    age(&scene)?;
    ensure!(!scene.tool("rdmactl", &["reclaim"])?.status.success());
    ensure!(
        scene.host.left_behind() == before,
        "reclaim had no evidence"
    );
    // The veth that stands for the NIC ends with its last namespace.
    drop(namespace);
    eventually(|| Ok(scene.tool("rdmactl", &["reclaim"])?.status.success()))?;
    ensure!(
        scene.host.left_behind().is_empty(),
        "{:?}",
        scene.host.left_behind()
    );
    Ok(())
}

/// Namespaces end one after the other, those of other cases as well.
pub(super) fn eventually(mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let started = Instant::now();
    while !is_so()? {
        ensure!(
            started.elapsed() < Duration::from_secs(120),
            "it does not come"
        );
        thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Each request of a DEL is refused once: where the child stays, its lease stays.
fn refused_requests() -> Result<()> {
    let scene = Scene::furnished()?;
    let call = scene.call();
    let config = scene.child().to_string();
    answer_of(&call, "ADD", &scene.child())?.success()?;
    let points = trace(&scene.host, &call, "DEL", &config)?;
    let sent = points
        .iter()
        .filter(|point| point.syscall == "sendto")
        .count();
    ensure!(sent > 2, "{sent} requests");
    let mut kept = 0;
    for number in 1..=sent {
        answer_of(&call, "ADD", &scene.child())?.success()?;
        let leased = leases(&scene);
        let from = Point {
            syscall: "sendto".into(),
            number,
        };
        let answer: Answer = inject(&call, "DEL", &config, &from, "error=EBUSY")?;
        if scene.pod.ip("link show net1").is_ok() {
            ensure!(!answer.status.success(), "DEL succeeded, the child lives");
            ensure!(
                leases(&scene) == leased,
                "request {number}: the lease is gone"
            );
            kept += 1;
        }
        answer_of(&call, "DEL", &scene.child())?.success()?;
        ensure!(leases(&scene).is_empty());
    }
    ensure!(kept > 0, "no request of {sent} left the child");
    Ok(())
}

/// The runtime kills an ADD that takes too long, and asks for DEL.
fn outlives() -> Result<()> {
    const SLOW: &str = r#"if [ $CNI_COMMAND = ADD ]; then
        sleep 3
        echo leased >> "$(dirname "$0")/../executed"
        echo '{"cniVersion":"1.0.0","ips":[{"address":"10.9.0.7/24"}]}'
    fi"#;
    let (scene, call) = with_program("helper", SLOW)?;
    scene.allow(&json!({"ipam": ["helper"]}))?;
    let network = upon_nic0(&scene, &json!({"type": "helper"}));
    let mut add = Running::start(&mut call.command("ADD"), network.to_string().as_bytes())?;
    eventually(|| Ok(executed(&scene) == "ADD"))?;
    add.kill();
    drop(add.answer());
    answer_of(&call, "DEL", &network)?.success()?;
    ensure!(executed(&scene) == "ADD leased DEL", "{}", executed(&scene));
    Ok(())
}
