//! An address is released when its interface is gone, not before: wherever the pod put the interface,
//! whatever the kernel refuses, and whoever was killed.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::bin_under_test::product;
use e2e::cases;
use e2e::cni::Answer;
use e2e::netns::{Netns, run};
use e2e::scene::{Running, Scene, TRY_AGAIN, answer_of, bounded, mac_of, refusal};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::gettid;
use serde_json::{Value, json};

use super::cni_faults::{Point, inject, trace};
use super::hostile_bytes::age;
use super::hostile_ipam::{executed, upon_nic0, with_program};
use super::hostile_stacked::Nameless;

cases! {
    a_child_in_a_threads_namespace_ends: Macvlan => in_a_thread("macvlan", &[]);
    a_child_that_was_changed_and_moved_to_a_thread_ends: Macvlan => in_a_thread("macvlan", &[
        "link set net1 address 02:aa:aa:aa:aa:aa",
        "link set net1 name evil",
    ]);
    an_ipvlan_in_a_threads_namespace_ends: Ipvlan => in_a_thread("ipvlan", &[]);
    a_child_without_index_and_address_of_its_own_ends: Macvlan => unrecognizable();
    an_address_stays_leased_while_its_child_may_live: Macvlan => hidden_child();
    an_address_stays_leased_after_its_pod_when_its_child_may_live: Macvlan => hidden_after_the_pod();
    a_child_that_its_pod_deleted_frees_its_address: Macvlan => deleted_by_its_pod();
    a_child_behind_a_namespace_that_ended_ends: Macvlan => way_ended(Scene::child);
    a_nic_behind_a_namespace_that_ended_returns => way_ended(Scene::moving);
    a_pod_whose_path_is_gone_and_whose_thread_lives_is_undone: Macvlan => path_gone();
    a_child_in_a_threads_namespace_ends_after_its_pod: Macvlan => in_a_thread_after_the_pod();
    a_child_in_a_namespace_with_the_number_of_its_pods_ends: Macvlan => number_again();
    a_child_of_a_dead_pod_is_not_taken_for_another_pods_with_its_mac: Macvlan => same_mac();
    a_namespace_that_cannot_be_entered_keeps_no_dead_pod: Macvlan => not_entered();
    a_nic_in_a_threads_namespace_returns => nic_in_a_thread(false);
    a_child_of_a_nic_in_a_threads_namespace_ends: Macvlan => nic_below_a_threads_child(false);
    a_child_of_a_nic_in_a_namespace_that_the_host_has_a_number_for_ends: Macvlan =>
        nic_below_a_threads_child(true);
    a_nic_that_another_process_keeps_after_its_pod_returns => nic_in_a_thread(true);
    a_nic_that_is_not_found_after_its_pod_keeps_its_address => hidden_nic();
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

    pub(super) fn ip(&self, arguments: &str) -> Result<String> {
        let path = format!("/proc/{}/task/{}/ns/net", std::process::id(), self.tid);
        let mut command = std::process::Command::new("nsenter");
        command.arg(format!("--net={path}")).arg("ip");
        run(command.args(arguments.split(' ')))
    }

    /// Ends the thread and keeps the namespace by an open file, which no search finds.
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

/// What another pod gets is not what the first one has.
fn another_gets_another(scene: &Scene, first: &Value) -> Result<()> {
    let pod = scene.another_pod()?;
    let call = scene.call_of(&pod, "c2", "net1");
    let second = answer_of(&call, "ADD", &scene.child())?.success()?;
    let address = |result: &Value| result["ips"][0]["address"].clone();
    ensure!(
        address(first) != Value::Null && address(first) != address(&second),
        "{second}"
    );
    answer_of(&call, "DEL", &scene.child())?.success()?;
    Ok(())
}

fn in_a_thread(attach: &str, pod: &[&str]) -> Result<()> {
    let scene = Scene::furnished()?;
    let mut network = scene.child();
    network["attach"] = attach.into();
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &network)?.success()?;
    scene.in_pod(&["link set net1 down"])?;
    scene.in_pod(pod)?;
    let name = if pod.is_empty() { "net1" } else { "evil" };
    let holder = Holder::start(&scene.pod)?;
    scene.in_pod(&[&format!("link set {name} netns {}", holder.tid)])?;
    holder.ip(&format!("link set {name} up"))?;
    scene.del_returns(&network, &before)?;
    ensure!(
        !holder.ip("-o link")?.contains(name),
        "the pod keeps {name}"
    );
    Ok(())
}

/// The first DEL comes after the pod's namespace has ended.
fn in_a_thread_after_the_pod() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    let holder = Holder::start(&scene.pod)?;
    scene.in_pod(&[&format!("link set net1 netns {}", holder.tid)])?;
    holder.ip("link set net1 up")?;
    scene.pod.delete()?;
    answer_of(&scene.call(), "DEL", &scene.child())?.success()?;
    ensure!(
        !holder.ip("-o link")?.contains("net1"),
        "a process keeps net1, and its address is free"
    );
    e2e::host_state::unchanged(&before, || scene.host_state(), "after DEL")
}

/// The kernel gives the number of a namespace that ended to the next one; a tenant can make namespaces
/// until it is the pod's.
fn number_again() -> Result<()> {
    let scene = Scene::furnished()?;
    answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    let holder = Holder::start(&scene.pod)?;
    scene.in_pod(&[&format!("link set net1 netns {}", holder.tid)])?;
    scene.pod.delete()?;
    let inode = std::fs::metadata(holder.path())?.ino();
    for entry in std::fs::read_dir(scene.host.state().join("attachments"))? {
        let path = entry?.path();
        let mut record: Value = serde_json::from_slice(&std::fs::read(&path)?)?;
        record["netns"]["inode"] = inode.into();
        std::fs::write(&path, record.to_string())?;
    }
    answer_of(&scene.call(), "DEL", &scene.child())?.success()?;
    ensure!(
        !holder.ip("-o link")?.contains("net1"),
        "a process keeps net1, and its address is free"
    );
    Ok(())
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

/// A program without `CAP_SYS_ADMIN`, as the daemon, can open the namespace of a pod that has no
/// capabilities either.
fn not_entered() -> Result<()> {
    let scene = Scene::furnished()?;
    answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    let _holder = Holder::start(&scene.another_pod()?)?;
    scene.pod.delete()?;
    age(&scene)?;
    let mut command = scene.host.netns.command("setpriv");
    command
        .args(["--bounding-set=-sys_admin", "--inh-caps=-sys_admin", "--"])
        .arg(product("rdmactl")?);
    let mut reclaim = scene.administrators(command, &["reclaim"]);
    let answer = bounded(&mut reclaim, b"")?;
    ensure!(answer.status.success(), "{}", answer.stderr);
    ensure!(scene.listed("pods")?.is_empty(), "{}", answer.stdout);
    Ok(())
}

/// Its index is another link's, and its MAC address another one, in its pod's own namespace.
fn unrecognizable() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    let index = e2e::scene::index_of(&scene.pod, "net1")?;
    let holder = Holder::start(&scene.pod)?;
    scene.in_pod(&[
        "link set net1 down",
        "link set net1 address 02:aa:aa:aa:aa:aa",
    ])?;
    scene.in_pod(&[&format!("link set net1 netns {}", holder.tid)])?;
    scene.in_pod(&[&format!("link add decoy index {index} type bridge")])?;
    let path = scene.pod.path().display().to_string();
    let mut back = std::process::Command::new("nsenter");
    let own = format!(
        "--net=/proc/{}/task/{}/ns/net",
        std::process::id(),
        holder.tid
    );
    back.arg(own)
        .args(["ip", "link", "set", "net1", "name", "evil", "netns"]);
    run(back.arg(scene.pod.name())).with_context(|| path)?;
    ensure!(e2e::scene::index_of(&scene.pod, "evil")? != index);
    scene.del_returns(&scene.child(), &before)?;
    ensure!(
        scene.pod.ip("link show evil").is_err(),
        "the pod keeps its child"
    );
    ensure!(
        scene.pod.ip("link show decoy").is_ok(),
        "a link of the pod is gone"
    );
    Ok(())
}

/// ADD, then the child is moved to a namespace that no search finds.
fn hide(scene: &Scene) -> Result<(Value, File)> {
    let result = answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    let holder = Holder::start(&scene.pod)?;
    scene.in_pod(&[&format!("link set net1 netns {}", holder.tid)])?;
    holder.ip("link set net1 up")?;
    Ok((result, holder.hide()?))
}

fn hidden_child() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let (result, namespace) = hide(&scene)?;
    let leased = leases(&scene);
    for _ in 0..2 {
        let answer = answer_of(&scene.call(), "DEL", &scene.child())?;
        refusal(&answer, &[TRY_AGAIN], &["macvlan net1", "nic0"])?;
        ensure!(
            !leased.is_empty() && leases(&scene) == leased,
            "the lease is gone"
        );
    }
    another_gets_another(&scene, &result)?;
    drop(namespace);
    eventually(|| {
        Ok(answer_of(&scene.call(), "DEL", &scene.child())?
            .status
            .success())
    })?;
    scene.del_returns(&scene.child(), &before)
}

/// The runtime gets on after the pod, and the address stays leased.
fn hidden_after_the_pod() -> Result<()> {
    let scene = Scene::furnished()?;
    let (result, namespace) = hide(&scene)?;
    let leased = leases(&scene);
    let answer = answer_of(&scene.call(), "DEL", &scene.child())?;
    refusal(&answer, &[TRY_AGAIN], &[])?;
    scene.pod.delete()?;
    answer_of(&scene.call(), "DEL", &scene.child())?.success()?;
    ensure!(leases(&scene) == leased, "the lease is gone: {leased:?}");
    another_gets_another(&scene, &result)?;
    drop(namespace);
    Ok(())
}

fn deleted_by_its_pod() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let holder = Holder::start(&scene.pod)?;
    answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    // A namespace that the pod's has a number for, and that is found.
    scene.in_pod(&["link add cable type veth peer name end"])?;
    scene.in_pod(&[
        &format!("link set end netns {}", holder.tid),
        "link del net1",
    ])?;
    scene.del_returns(&scene.child(), &before)?;
    ensure!(
        scene.pod.ip("link show cable").is_ok(),
        "the pod's own link is gone"
    );
    Ok(())
}

/// The pod's namespace has no number for the one that its interface is in: the one between them took
/// it along.
fn way_ended(network: fn(&Scene) -> Value) -> Result<()> {
    let mut scene = Scene::furnished()?;
    let (network, before) = (network(&scene), scene.host_state()?);
    let process =
        Nameless::of(std::process::Command::new("unshare").args(["-Urn", "sleep", "60"]))?;
    scene.pod = Netns::of_process("cnip", process.pid())?;
    let [user, net] =
        ["user", "net"].map(|kind| format!("--{kind}=/proc/{}/ns/{kind}", process.pid()));
    let nested = |flags| {
        let mut command = std::process::Command::new("nsenter");
        Nameless::of(
            command
                .args([&user, &net])
                .args(["unshare", flags, "sleep", "60"]),
        )
    };
    let (between, last) = (nested("-n")?, nested("-Urn")?);
    answer_of(&scene.call(), "ADD", &network)?.success()?;
    scene.in_pod(&[&format!("link set net1 netns {}", between.pid())])?;
    between.ip(&format!("link set net1 netns {}", last.pid()))?;
    drop(between);
    eventually(|| Ok(scene.pod.ip("netns list-id")?.lines().count() < 2))?;
    scene.del_returns(&network, &before)?;
    ensure!(!last.links()?.contains("net1"), "the pod keeps net1");
    Ok(())
}

fn path_gone() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    let inside = File::open(scene.pod.path())?;
    let (end, ended) = mpsc::channel::<()>();
    let (entered, is_in) = mpsc::channel();
    let thread = thread::spawn(move || {
        let _ =
            entered.send(nix::sched::setns(inside, CloneFlags::CLONE_NEWNET).map(|()| gettid()));
        let _ = ended.recv();
    });
    let tid = is_in.recv()??;
    scene.pod.delete()?;
    answer_of(&scene.call(), "DEL", &scene.child())?.success()?;
    e2e::host_state::unchanged(&before, || scene.host_state(), "after DEL")?;
    let path = format!("--net=/proc/{}/task/{tid}/ns/net", std::process::id());
    let links = run(std::process::Command::new("nsenter").args([&path, "ip", "-o", "link"]))?;
    drop(end);
    let _ = thread.join();
    ensure!(!links.contains("net1"), "the child lives: {links}");
    Ok(())
}

/// A NIC with a lease.
fn leased_nic(scene: &Scene) -> Value {
    let mut network = scene.moving();
    network["ipam"] = scene.host.own_ipam("10.9.0.0/24", "10.9.0.100", &json!({}));
    network
}

fn nic_in_a_thread(pod_ends: bool) -> Result<()> {
    let scene = Scene::furnished()?;
    let network = leased_nic(&scene);
    let mac = mac_of(&scene.host.netns, "nic0")?;
    answer_of(&scene.call(), "ADD", &network)?.success()?;
    let holder = Holder::start(&scene.pod)?;
    scene.in_pod(&[&format!("link set net1 netns {}", holder.tid)])?;
    if pod_ends {
        scene.pod.delete()?;
    }
    answer_of(&scene.call(), "DEL", &network)?.success()?;
    ensure!(mac_of(&scene.host.netns, "nic0")? == mac, "another nic0");
    ensure!(
        scene
            .host
            .netns
            .ip("addr show nic0")?
            .contains("10.9.0.1/24")
    );
    ensure!(
        scene.host.left_behind().is_empty(),
        "{:?}",
        scene.host.left_behind()
    );
    Ok(())
}

/// The host has a number for a namespace that has the other end of a pair.
fn nic_below_a_threads_child(is_numbered: bool) -> Result<()> {
    let scene = Scene::furnished()?;
    let network = scene.moving();
    let holder = Holder::start(&scene.pod)?;
    if is_numbered {
        let tid = holder.tid;
        scene.on_host(&[&format!(
            "link add pair0 type veth peer name pair1 netns {tid}"
        )])?;
        ensure!(
            scene
                .host
                .netns
                .ip("link show pair0")?
                .contains("link-netnsid")
        );
    }
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &network)?.success()?;
    let tid = holder.tid;
    scene.in_pod(&[&format!(
        "link add link net1 name evil netns {tid} type macvlan"
    )])?;
    ensure!(holder.ip("-o link")?.contains("evil"));
    scene.del_returns(&network, &before)?;
    ensure!(
        !holder.ip("-o link")?.contains("evil"),
        "it is on the host's wire"
    );
    Ok(())
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
    let answer = answer_of(&scene.call(), "DEL", &network)?;
    refusal(&answer, &[TRY_AGAIN], &["nic0"])?;
    scene.pod.delete()?;
    answer_of(&scene.call(), "DEL", &network)?
        .success()
        .context("after the pod")?;
    ensure!(
        scene.host.left_behind() == before,
        "{:?}",
        scene.host.left_behind()
    );
    super::hostile_bytes::age(&scene)?;
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
fn eventually(mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
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
