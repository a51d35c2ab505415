//! A NIC that others stand on, and what the host had on it: it is not moved away beneath them,
//! and what it had comes back.

use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use e2e::cases;
use e2e::host_state::{state, unchanged};
use e2e::netns::{Netns, run};
use e2e::scene::{DENIED, PCI, Scene, TRY_AGAIN, answer_of, bounded, index_of, mac_of, refusal};
use hca_trees::{NetdevSpec, On, PciSpec, RdmaSpec};
use nix::libc;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use serde_json::{Value, json};

use super::hostile_leases::{eventually, leased_nic};
use super::hostile_netlink::traced;

/// What is said of a child in another namespace.
const HIDDEN: &str = "nic0 carries a macvlan or ipvlan in another network namespace";
/// How long the other end of a veth may have its carrier after this one is down.
const CARRIER_TIMEOUT: Duration = Duration::from_secs(10);

cases! {
    a_macvlan_of_ours_in_another_pod_holds_its_nic: Macvlan => child_of_ours();
    a_macvlan_of_ours_with_the_runtimes_record_lost_holds_its_nic: Macvlan => child_of_unknown_record();
    a_macvlan_of_another_plugin_in_another_pod_holds_its_nic: Macvlan =>
        in_another_pod("link add theirs link nic0 type macvlan mode bridge", "theirs");
    a_macvtap_in_another_pod_holds_its_nic: Macvlan =>
        in_another_pod("link add theirs link nic0 type macvtap mode bridge", "theirs");
    pods_whose_links_never_stand_still_stop_no_other_pod: Macvlan => beside_busy_pods();
    threads_of_a_process_stop_no_pod: Macvlan => beside_threads();
    an_ipvlan_in_another_pod_holds_its_nic: Ipvlan =>
        in_another_pod("link add theirs link nic0 type ipvlan mode l2", "theirs");
    a_macvlan_on_the_host_holds_its_nic: Macvlan =>
        on_the_host(&["link add mine link nic0 type macvlan mode bridge"], "mine");
    a_macvtap_on_the_host_holds_its_nic: Macvlan =>
        on_the_host(&["link add mine link nic0 type macvtap mode bridge"], "mine");
    an_ipvlan_on_the_host_holds_its_nic: Ipvlan =>
        on_the_host(&["link add mine link nic0 type ipvlan mode l2"], "mine");
    a_vlan_on_the_host_holds_its_nic: Vlan =>
        on_the_host(&["link add mine link nic0 type vlan id 66"], "mine");
    a_vlan_that_is_down_and_nameless_holds_its_nic: Vlan =>
        on_the_host(&["link add m\\xffne link nic0 type vlan id 66"], "nic0");
    a_vxlan_on_the_host_holds_its_nic =>
        on_the_host(&["link add mine type vxlan id 66 dev nic0 dstport 4789"], "mine");
    a_macsec_on_the_host_holds_its_nic: Kind("macsec") =>
        on_the_host(&["link add mine link nic0 type macsec"], "mine");
    a_bridge_holds_its_port =>
        on_the_host(&["link add mine type bridge", "link set nic0 master mine"], "mine");
    a_bond_holds_its_port: Kind("bond") => on_the_host(
        &["link set nic0 down", "link add mine type bond", "link set nic0 master mine"],
        "mine",
    );
    a_team_holds_its_port: Kind("team") => on_the_host(
        &["link set nic0 down", "link add mine type team", "link set nic0 master mine"],
        "mine",
    );
    a_vrf_holds_its_member: Vrf =>
        on_the_host(&["link add mine type vrf table 66", "link set nic0 master mine"], "mine");
    a_nic_with_a_child_upon_a_child_names_what_stands_on_it: Macvlan => on_the_host(
        &["link add mine link nic0 type macvlan mode private", "link add top type bridge", "link set mine master top"],
        "mine",
    );
    children_of_a_nic_do_not_hold_other_nics: Macvlan => others_are_free();
    a_nic_is_free_when_its_last_child_is_gone: Macvlan => last_child();
    a_namespace_that_cannot_be_opened_stops_no_pod: Macvlan, Strace => unreadable();
    an_address_that_a_nic_receives_for_holds_it => received_address();
    a_packet_socket_of_the_host_does_not_hold_its_nic => packet_socket();
    a_nic_with_a_hidden_macvlan_waits_for_its_end: Macvlan => hidden_child("macvlan mode bridge", "up");
    a_nic_with_a_hidden_macvlan_that_is_down_waits_for_its_end: Macvlan =>
        hidden_child("macvlan mode private", "down");
    a_nic_with_a_hidden_macvtap_waits_for_its_end: Macvlan => hidden_child("macvtap mode vepa", "down");
    a_nic_with_a_hidden_ipvlan_waits_for_its_end: Ipvlan => hidden_child("ipvlan mode l2", "up");
    a_nic_with_a_hidden_ipvlan_that_is_down_waits_for_its_end: Ipvlan =>
        hidden_child("ipvlan mode l3", "down");
    a_nic_with_a_hidden_child_is_returned_by_the_next_add: Macvlan => hidden_of_a_dead_pod();
    a_nic_without_a_child_is_asked_without_a_trace: Macvlan => asked_without_a_trace();
    a_pf_with_vfs_is_not_moved => pf_with_vfs();
    a_vf_of_such_a_pf_is_moved => vf_of_pf();
    a_pf_without_vfs_is_moved => pf_without_vfs();

    a_root_qdisc_of_the_host_comes_back => had(
        &["tc qdisc replace dev nic0 root handle 7: tbf rate 1gbit burst 100k latency 50ms"],
        &["qdisc", "tbf"],
    );
    a_class_tree_of_the_host_comes_back => had(
        &[
            "tc qdisc replace dev nic0 root handle 7: htb default 1",
            "tc class add dev nic0 parent 7: classid 7:1 htb rate 1gbit",
            "tc filter add dev nic0 parent 7: protocol ip u32 match ip dst 10.9.0.1/32 classid 7:1",
        ],
        &["qdisc", "htb"],
    );
    an_empty_clsact_of_the_host_comes_back => had(&["tc qdisc add dev nic0 clsact"], &["clsact", "qdisc"]);
    tc_filters_of_the_host_come_back => had(
        &[
            "tc qdisc add dev nic0 clsact",
            "tc filter add dev nic0 ingress protocol ip u32 match ip dst 10.9.0.1/32 classid 1:1",
        ],
        &["clsact", "filter", "qdisc"],
    );
    tc_programs_of_the_host_come_back => had(
        &[
            "tc qdisc add dev nic0 clsact",
            "tc filter add dev nic0 egress bpf da obj {classifier} sec classifier",
        ],
        &["clsact", "filter", "program", "qdisc"],
    );
    an_ingress_qdisc_of_the_host_comes_back =>
        had(&["tc qdisc add dev nic0 ingress"], &["ingress", "qdisc"]);
    an_xdp_program_of_the_host_comes_back =>
        had(&["link set nic0 xdpdrv obj {xdp} sec xdp"], &["xdp"]);
    a_generic_xdp_program_of_the_host_comes_back =>
        had(&["link set nic0 xdpgeneric obj {xdp} sec xdp"], &["xdp"]);
    a_nic_in_a_multipath_route_is_refused_by_name => multipath();
    nexthop_objects_static_multicast_and_proxies_do_not_keep_a_nic => lost();
    routes_with_every_property_come_back => had(
        &[
            "route add 10.88.0.0/16 via 10.9.0.254 table 200 metric 7 mtu lock 1400 advmss 1300 initcwnd 10 proto static",
            "route add 10.89.0.0/16 dev nic0 scope link src 10.9.0.1 proto 77 quickack 1",
            "route add 10.90.0.0/16 via 10.55.0.254 dev nic0 onlink tos 0x10",
            "-6 route add fd88::/32 via fd09::fe table 200 metric 7 pref high",
            "route add 10.91.0.0/16 via inet6 fd09::fe dev nic0",
        ],
        &["route"],
    );
    rules_with_every_property_come_back => had(
        &[
            "rule add pref 500 iif nic0 tos 0x10 fwmark 0x7/0xff lookup 200",
            "rule add pref 501 oif nic0 lookup 201 suppress_prefixlength 0",
            "-6 rule add pref 502 iif nic0 lookup 200",
        ],
        &["rule"],
    );
    addresses_with_every_property_come_back => had(
        &[
            "addr add 10.44.0.1 peer 10.44.0.2/32 dev nic0 label nic0:p2p",
            "addr add 10.45.0.1/24 broadcast 10.45.0.99 dev nic0 scope site noprefixroute",
            "addr add 10.46.0.1/24 dev nic0 metric 77",
            "addr add fd46::1/64 dev nic0 nodad home metric 77",
            "addr add 10.9.0.3/24 dev nic0",
            "addr add 10.9.0.2/24 dev nic0",
        ],
        &["address"],
    );
    ipv6_addresses_keep_their_order => order_of_ipv6();
    a_nic_that_was_down_is_down_again => had(&["link set nic0 down"], &["down"]);
    flags_of_the_host_come_back =>
        had(&["link set nic0 allmulticast on multicast off"], &["flags"]);
    settings_of_neighbours_come_back => had(
        &["sysctl ipv4/neigh/nic0/gc_stale_time 7", "sysctl ipv6/neigh/nic0/ucast_solicit 9"],
        &["neigh"],
    );
    address_generation_of_the_host_comes_back =>
        had(&["link set nic0 addrgenmode none", "addr flush dev nic0 scope link"], &["addr"]);
    a_macvlan_of_the_host_stays_upon_its_nic: Macvlan => macvlan_refused();
}

fn child_of_ours() -> Result<()> {
    let scene = Scene::furnished()?;
    let other = scene.another_pod()?;
    let call = scene.call_of(&other, "c2", "net7");
    answer_of(&call, "ADD", &scene.child())?.success()?;
    let inside = state(&other)?;
    scene.refuses(&scene.moving(), &[TRY_AGAIN, DENIED], &["net7"])?;
    unchanged(&inside, || state(&other), "in the other pod")?;
    answer_of(&call, "DEL", &scene.child())?.success()?;
    scene.returns(&scene.moving(), &[])
}

fn child_of_unknown_record() -> Result<()> {
    let scene = Scene::furnished()?;
    let other = scene.another_pod()?;
    let call = scene.call_of(&other, "c2", "net7");
    let network = scene.network(&json!({"attach": "macvlan", "master": "nic0"}));
    answer_of(&call, "ADD", &network)?.success()?;
    std::fs::remove_dir_all(scene.host.state())?;
    scene.refuses(&scene.moving(), &[TRY_AGAIN, DENIED], &["nic0"])
}

/// Also while it is down.
fn in_another_pod(make: &str, name: &str) -> Result<()> {
    let scene = Scene::furnished()?;
    let other = scene.another_pod()?;
    scene.on_host(&[make, &format!("link set {name} netns {}", other.name())])?;
    for up in ["down", "up"] {
        scene.perform(&other, &[&format!("link set {name} {up}")])?;
        let inside = state(&other)?;
        scene.refuses(&scene.moving(), &[TRY_AGAIN, DENIED], &[HIDDEN])?;
        unchanged(&inside, || state(&other), "in the other pod")?;
    }
    Ok(())
}

/// A pod with a veth to the host, as each has, and so many pairs of links, of which three are made and
/// deleted all the time. No list of its links is consistent.
struct Busy {
    _pod: Netns,
    changing: Vec<std::process::Child>,
}

impl Busy {
    fn start(scene: &Scene, number: usize, pairs: usize) -> Result<Self> {
        let pod = scene.another_pod()?;
        scene.on_host(&[&format!(
            "link add cali{number} type veth peer name eth0 netns {}",
            pod.name()
        )])?;
        scene.perform(&pod, &["link set eth0 up"])?;
        let numbers = pod.ip("netns list-id")?;
        ensure!(numbers.contains("nsid"), "the pod does not know the host");
        let files = tempfile::tempdir()?;
        let batch = |name: &str, lines: String| -> Result<Command> {
            let file = files.path().join(name);
            std::fs::write(&file, lines)?;
            let mut command = pod.command("ip");
            command.args(["-force", "-batch"]).arg(file);
            Ok(command)
        };
        let made = (0..pairs).map(|n| format!("link add a{n} type veth peer name b{n}\n"));
        run(&mut batch("pairs", made.collect())?)?;
        let changes = |n: u8| format!("link add x{n} type veth peer name y{n}\nlink del x{n}\n");
        let mut changing = Vec::new();
        for n in 0..3 {
            let lines = changes(n).repeat(50_000);
            changing.push(batch(&format!("changes{n}"), lines)?.spawn()?);
        }
        // They have read their files.
        for n in 0..3 {
            let started = Instant::now();
            while pod.ip(&format!("link show x{n}")).is_err() {
                ensure!(started.elapsed() < CARRIER_TIMEOUT, "x{n} is not made");
            }
        }
        Ok(Self {
            _pod: pod,
            changing,
        })
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        for child in &mut self.changing {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// ADD and DEL of a child and of a NIC, of a pod that lives and of one that is dead.
fn attaches_and_returns(scene: &Scene) -> Result<()> {
    for network in [scene.child(), scene.moving()] {
        for _ in 0..3 {
            scene.returns(&network, &[])?;
        }
    }
    for (number, network) in [scene.child(), scene.moving()].iter().enumerate() {
        let pod = scene.another_pod()?;
        let call = scene.call_of(&pod, &format!("dead{number}"), "net1");
        let before = scene.host_state()?;
        answer_of(&call, "ADD", network)?.success()?;
        // The kernel returns hardware of a dead pod; the veth that stands for it would end.
        if number == 1 {
            let host = scene.host.netns.name();
            scene.perform(&pod, &[&format!("link set net1 netns {host}")])?;
        }
        pod.delete()?;
        answer_of(&call, "DEL", network)?.success()?;
        unchanged(
            &before,
            || scene.host_state(),
            "after the DEL of a pod that ended",
        )?;
    }
    Ok(())
}

fn beside_busy_pods() -> Result<()> {
    let scene = Scene::furnished()?;
    let mut busy = Vec::new();
    for (number, pairs) in [5000, 1500, 1500].into_iter().enumerate() {
        busy.push(Busy::start(&scene, number, pairs)?);
    }
    attaches_and_returns(&scene)
}

fn beside_threads() -> Result<()> {
    let scene = Scene::furnished()?;
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let ended = &std::sync::Mutex::new(ended);
    let scene = &scene;
    thread::scope(move |scope| {
        for _ in 0..10_000 {
            let wait = move || drop(ended.lock().map(|ended| ended.recv()));
            let builder = thread::Builder::new().stack_size(16 << 10);
            builder.spawn_scoped(scope, wait)?;
        }
        let attached = attaches_and_returns(scene);
        drop(end);
        attached
    })
}

/// A process in a network namespace that has no name, until it is dropped.
pub(super) struct Nameless(std::process::Child);

impl Nameless {
    /// In a namespace of its own; the process is a child of one in `netns`.
    pub(super) fn start(netns: &str) -> Result<Self> {
        let mut command = std::process::Command::new("ip");
        command.args(["netns", "exec", netns, "unshare", "-n", "sleep", "60"]);
        Self::of(&mut command)
    }

    /// Of a command that becomes `sleep` in a namespace of its own.
    pub(super) fn of(command: &mut std::process::Command) -> Result<Self> {
        let nameless = Self(command.spawn()?);
        let own = std::fs::read_link("/proc/self/ns/net")?;
        let outer = std::fs::read_link(format!("/proc/{}/ns/net", nameless.0.id()))?;
        // It is in the pod's namespace first.
        let started = std::time::Instant::now();
        loop {
            let now = std::fs::read_link(format!("/proc/{}/ns/net", nameless.0.id()))?;
            let name = std::fs::read(format!("/proc/{}/comm", nameless.0.id()))?;
            if now != own && name.starts_with(b"sleep") {
                return Ok(nameless);
            }
            ensure!(
                started.elapsed().as_secs() < 10,
                "{} is still in {}",
                now.display(),
                outer.display()
            );
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    }

    pub(super) fn pid(&self) -> u32 {
        self.0.id()
    }

    pub(super) fn links(&self) -> Result<String> {
        let pid = self.pid().to_string();
        e2e::netns::run(
            std::process::Command::new("nsenter").args(["-t", &pid, "-n", "ip", "-o", "link"]),
        )
    }

    pub(super) fn ip(&self, arguments: &str) -> Result<()> {
        let pid = self.pid().to_string();
        let mut command = std::process::Command::new("nsenter");
        command
            .args(["-t", &pid, "-n", "ip"])
            .args(arguments.split(' '));
        e2e::netns::run(&mut command).map(drop)
    }
}

impl Drop for Nameless {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Every ADD and DEL goes on beside it.
fn unreadable() -> Result<()> {
    let scene = Scene::furnished()?;
    let other = scene.another_pod()?;
    let path = other.path().to_string_lossy();
    let inject = "inject=openat:error=EIO";
    let options = ["-f", "-qq", "-o", "/dev/null", "-P", &path, "-e", inject].map(str::to_owned);
    for network in [scene.moving(), scene.child()] {
        let before = scene.host_state()?;
        for command in ["ADD", "DEL"] {
            let mut call = traced(&scene.call(), command, &options);
            bounded(&mut call, network.to_string().as_bytes())?.success()?;
        }
        unchanged(&before, || scene.host_state(), "after DEL")?;
    }
    Ok(())
}

/// As lldpd, ptp4l and DHCP clients have them on each netdev that they serve.
fn packet_socket() -> Result<()> {
    const ALL: u16 = 0x0003;
    let scene = Scene::furnished()?;
    let index = i32::try_from(index_of(&scene.host.netns, "nic0")?)?;
    let _held = scene.host.netns.enter(move || bind(index, ALL))?;
    scene.returns(&scene.moving(), &[])
}

/// A packet socket on a link of the thread's namespace.
fn bind(index: i32, protocol: u16) -> Result<OwnedFd> {
    let kind = SockType::Raw;
    let fd = socket(AddressFamily::Packet, kind, SockFlag::SOCK_CLOEXEC, None)?;
    let address = libc::sockaddr_ll {
        sll_family: u16::try_from(libc::AF_PACKET)?,
        sll_protocol: protocol.to_be(),
        sll_ifindex: index,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let length = libc::socklen_t::try_from(size_of_val(&address))?;
    // SAFETY: the pointer is to a whole `sockaddr_ll`, whose size is given.
    let bound = unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length) };
    ensure!(bound == 0, "bind: {}", std::io::Error::last_os_error());
    Ok(fd)
}

fn received_address() -> Result<()> {
    let scene = Scene::furnished()?;
    let fdb = |verb: &str| {
        let mut bridge = std::process::Command::new("bridge");
        bridge.args([
            "-netns",
            scene.host.netns.name(),
            "fdb",
            verb,
            "02:00:00:00:77:77",
            "dev",
            "nic0",
            "self",
        ]);
        e2e::netns::run(&mut bridge).map(drop)
    };
    fdb("add")?;
    scene.refuses(
        &scene.moving(),
        &[TRY_AGAIN, DENIED],
        &["nic0", "02:00:00:00:77:77"],
    )?;
    fdb("del")?;
    scene.returns(&scene.moving(), &[])
}

/// ADD of `nic0` with a lease, then the pod puts a child of it into a namespace that no process of the
/// pod is in.
fn with_hidden_child(scene: &Scene, kind: &str, state: &str) -> Result<(Value, Nameless)> {
    let network = leased_nic(scene);
    answer_of(&scene.call(), "ADD", &network)?.success()?;
    let nameless = Nameless::start(scene.pod.name())?;
    scene.in_pod(&[&format!("link add hidden link net1 type {kind}")])?;
    scene.in_pod(&[&format!("link set hidden netns {}", nameless.pid())])?;
    nameless.ip(&format!("link set hidden {state}"))?;
    Ok((network, nameless))
}

/// The DEL has returned the NIC, and nobody gets it or stands on it.
fn is_kept_from_others(scene: &Scene) -> Result<()> {
    let other = scene.another_pod()?;
    let call = scene.call_of(&other, "c2", "net1");
    for network in [scene.moving(), scene.child()] {
        let words = [HIDDEN, "c1"];
        scene.refuses_call(&call, &network, &[TRY_AGAIN], &words)?;
    }
    let reclaimed = scene.tool("rdmactl", &["attachments", "reclaim"])?;
    ensure!(!reclaimed.status.success(), "{}", reclaimed.stdout);
    Ok(())
}

/// Otherwise it would receive what the host, or the next pod, receives, for as long as it is there.
fn hidden_child(kind: &str, up: &str) -> Result<()> {
    let scene = Scene::furnished()?;
    let (all, host) = (scene.host_state()?, state(&scene.host.netns)?);
    let (network, nameless) = with_hidden_child(&scene, kind, up)?;
    for when in ["after DEL", "after another DEL"] {
        answer_of(&scene.call(), "DEL", &network)?.success()?;
        unchanged(&host, || state(&scene.host.netns), when)?;
        let left = scene.host.left_behind().into_keys();
        let leases: Vec<_> = left.filter(|key| key.starts_with("lease")).collect();
        ensure!(leases.is_empty(), "{when}: {leases:?}");
        is_kept_from_others(&scene)?;
    }
    ensure!(nameless.links()?.contains("hidden"));
    drop(nameless);
    eventually(|| Ok(scene.tool("rdmactl", &["reclaim"])?.status.success()))?;
    unchanged(&all, || scene.host_state(), "after its end")?;
    scene.returns(&scene.moving(), &[])?;
    scene.returns(&scene.child(), &[])
}

/// The kernel returned the NIC, and no DEL came.
fn hidden_of_a_dead_pod() -> Result<()> {
    let scene = Scene::furnished()?;
    let (network, nameless) = with_hidden_child(&scene, "macvlan mode bridge", "up")?;
    scene.in_pod(&[&format!("link set net1 netns {}", scene.host.netns.name())])?;
    scene.pod.delete()?;
    let other = scene.another_pod()?;
    let call = scene.call_of(&other, "c2", "net1");
    let refused = answer_of(&call, "ADD", &scene.moving())?;
    refusal(&refused, &[TRY_AGAIN], &[HIDDEN])?;
    drop(nameless);
    eventually(|| Ok(answer_of(&call, "ADD", &scene.moving())?.status.success()))?;
    answer_of(&call, "DEL", &scene.moving())?.success()?;
    answer_of(&scene.call(), "DEL", &network)?.success()?;
    ensure!(
        scene.host.left_behind().is_empty(),
        "{:?}",
        scene.host.left_behind()
    );
    Ok(())
}

/// No link is made to ask for a child, so no daemon of the host hears of one.
fn asked_without_a_trace() -> Result<()> {
    let scene = Scene::furnished()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    let mut monitor = scene.host.netns.command("ip");
    monitor
        .args(["-d", "monitor", "link"])
        .stdout(Stdio::piped());
    let mut monitor = monitor.spawn()?;
    // It listens.
    thread::sleep(Duration::from_secs(1));
    let answer = answer_of(&scene.call(), "DEL", &scene.moving())?;
    answer.success()?;
    thread::sleep(Duration::from_millis(500));
    monitor.kill()?;
    let heard = monitor.wait_with_output()?.stdout;
    let heard = String::from_utf8_lossy(&heard);
    ensure!(heard.contains("nic0"), "nothing heard: {heard}");
    ensure!(!heard.contains("macvlan"), "{heard}");
    Ok(())
}

fn on_the_host(make: &[&str], word: &str) -> Result<()> {
    let scene = Scene::furnished()?;
    scene.allow(&json!({"uplinks": true}))?;
    scene.on_host(make)?;
    scene.refuses(&scene.moving(), &[TRY_AGAIN, DENIED], &[word])
}

fn others_are_free() -> Result<()> {
    let scene = Scene::furnished()?;
    scene.host.add_nic("nic1", "peer1")?;
    scene.on_host(&["link add mine link nic1 type macvlan mode bridge"])?;
    scene.returns(&scene.moving(), &[])
}

fn last_child() -> Result<()> {
    let scene = Scene::furnished()?;
    scene.on_host(&["link add mine link nic0 type macvlan mode bridge"])?;
    scene.refuses(&scene.moving(), &[TRY_AGAIN, DENIED], &["mine"])?;
    scene.on_host(&["link del mine"])?;
    scene.returns(&scene.moving(), &[])
}

/// `nic0` is a PF with two VFs, the first of which is `vf0`.
fn with_vfs() -> Result<Scene> {
    let scene = Scene::with_hardware()?;
    scene.host.add_nic("vf0", "vfpeer0")?;
    let tree = scene.tree()?;
    tree.pci(&PciSpec {
        total_vfs: 8,
        ..PciSpec::MLX5
    });
    for index in 0..2 {
        let address = format!("0000:3b:00.{}", index + 2);
        tree.vf(
            PCI,
            index,
            &PciSpec {
                address: &address,
                device: 0x101e,
                ..PciSpec::MLX5
            },
        );
    }
    let mac = mac_of(&scene.host.netns, "vf0")?;
    tree.netdev(&NetdevSpec {
        name: "vf0",
        mac: &mac,
        on: On::Pci("0000:3b:00.2"),
        ..NetdevSpec::default()
    });
    tree.rdma(&RdmaSpec {
        name: "mlx5_2",
        on: On::Pci("0000:3b:00.2"),
        ..RdmaSpec::default()
    });
    Ok(scene)
}

fn pf_with_vfs() -> Result<()> {
    let scene = with_vfs()?;
    for keys in [
        json!({"attach": "move", "device": "nic0"}),
        json!({"attach": "move", "deviceID": PCI}),
        json!({"attach": "move", "rdmaDevice": "mlx5_0"}),
    ] {
        scene.refuses(&scene.network(&keys), &[TRY_AGAIN, DENIED], &["nic0", "PF"])?;
    }
    Ok(())
}

fn vf_of_pf() -> Result<()> {
    let scene = with_vfs()?;
    for keys in [
        json!({"attach": "move", "device": "vf0"}),
        json!({"attach": "move", "deviceID": "0000:3b:00.2"}),
    ] {
        scene.returns(&scene.network(&keys), &["link set net1 mtu 400"])?;
    }
    Ok(())
}

fn pf_without_vfs() -> Result<()> {
    let scene = Scene::with_hardware()?;
    scene.tree()?.pci(&PciSpec {
        total_vfs: 8,
        ..PciSpec::MLX5
    });
    scene.returns(
        &scene.network(&json!({"attach": "move", "deviceID": PCI})),
        &[],
    )
}

/// What the host set up is there again after DEL, or ADD was refused beforehand.
fn had(host: &[&str], words: &[&str]) -> Result<()> {
    let scene = Scene::furnished()?;
    scene.on_host(host)?;
    // The other end of a veth learns of it a moment later (net/core/link_watch.c).
    let link = |name: &str| scene.host.netns.ip(&format!("link show dev {name}"));
    let is_up = link("nic0")?.contains(",UP");
    let started = Instant::now();
    while !is_up && !link("peer0")?.contains("LOWERLAYERDOWN") {
        ensure!(started.elapsed() < CARRIER_TIMEOUT, "peer0 has its carrier");
        thread::sleep(Duration::from_millis(10));
    }
    scene.returns_or_refuses(&scene.moving(), words)?;
    // Also when the pod removed everything.
    let before = scene.host_state()?;
    let answer = answer_of(&scene.call(), "ADD", &scene.moving())?;
    if answer.status.success() {
        scene.in_pod(&[
            "addr flush dev net1",
            "link set net1 down",
            "link set net1 up",
        ])?;
    } else {
        refusal(&answer, &[TRY_AGAIN, DENIED], &["nic0"])?;
    }
    scene.del_returns(&scene.moving(), &before)
}

/// Of either family; with all next hops through it, too.
fn multipath() -> Result<()> {
    let scene = Scene::furnished()?;
    scene.host.add_nic("nic1", "peer1")?;
    scene.on_host(&[
        "addr add 10.8.0.1/24 dev nic1",
        "addr add fd08::1/64 dev nic1 nodad",
    ])?;
    for (route, hops) in [
        ("10.88.0.0/16", ["10.9.0.254", "10.8.0.254"]),
        ("10.88.0.0/16", ["10.9.0.254", "10.9.0.253"]),
        ("fd88::/32", ["fd09::fe", "fd08::fe"]),
    ] {
        let [first, second] = hops;
        scene.on_host(&[&format!(
            "route add {route} nexthop via {first} nexthop via {second}"
        )])?;
        let words = ["nic0", "multipath route", route, "ip route replace"];
        scene.refuses(&scene.moving(), &[DENIED], &words)?;
        scene.on_host(&[&format!("route del {route}")])?;
    }
    scene.returns(&scene.moving(), &[])
}

/// A move removes them; the route that it removes with a nexthop object is named.
fn lost() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    scene.on_host(&[
        "nexthop add id 7 via 10.9.0.254 dev nic0",
        "route add 10.88.0.0/16 nhid 7",
        "maddr add 33:33:00:00:77:77 dev nic0",
        "neigh add proxy 10.9.0.77 dev nic0",
    ])?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    let inside = scene.pod.ip("route")?;
    ensure!(!inside.contains("10.88"), "{inside}");
    let answer = answer_of(&scene.call(), "DEL", &scene.moving())?;
    answer.success()?;
    let warned = answer
        .stderr
        .lines()
        .any(|line| line.contains("restore route 10.88.0.0/16"));
    ensure!(warned, "{}", answer.stderr);
    unchanged(&before, || scene.host_state(), "after DEL")
}

fn order_of_ipv6() -> Result<()> {
    let scene = Scene::furnished()?;
    scene.on_host(&[
        "addr add fd09::3/64 dev nic0 nodad",
        "addr add fd09::2/64 dev nic0 nodad",
    ])?;
    let shown = || scene.host.netns.ip("-6 -o addr show dev nic0 scope global");
    let before = shown()?;
    scene.returns(&scene.moving(), &[])?;
    let after = shown()?;
    ensure!(
        before
            .lines()
            .map(|line| line.split_whitespace().nth(3))
            .eq(after.lines().map(|line| line.split_whitespace().nth(3))),
        "the order was\n{before}\nand is\n{after}"
    );
    Ok(())
}

fn macvlan_refused() -> Result<()> {
    let scene = Scene::furnished()?;
    scene.on_host(&[
        "link add mine link nic0 type macvlan mode private",
        "sysctl ipv6/conf/mine/accept_dad 0",
        "link set mine up",
        "addr add 10.9.0.44/24 dev mine",
    ])?;
    let network = scene.network(&json!({"attach": "move", "device": "mine"}));
    scene.refuses(&network, &[DENIED], &["mine", "macvlan", "cannot be told"])
}
