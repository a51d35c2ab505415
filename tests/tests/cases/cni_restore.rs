//! NICs and virtual links that `rdma-netdev` moved: each returns as itself, with what the host had.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::host_state::unchanged;
use e2e::scene::{DENIED, Scene, answer_of, index_of, mac_of};
use serde_json::{Value, json};

cases! {
    veths_of_one_address_return_each_as_itself => twins("veth");
    vlans_of_one_nic_return_each_as_itself: Vlan => twins("vlan");
    a_veth_is_not_taken_for_one_of_the_pod => decoy();
    a_veth_with_an_address_of_the_network_returns_with_its_own => other_address();
    a_veth_hidden_in_a_namespace_of_the_pod_returns => hidden();
    a_link_that_the_pod_deleted_is_gone => deleted();
    an_interface_named_like_the_nic_returns => same_name();
    a_nic_whose_name_is_its_altname_in_the_pod_returns_at_once => own_altname();
    addresses_with_a_lifetime_stay_with_the_host => leased();
    an_address_whose_lifetime_ended_does_not_return => ended();
    a_nic_with_leased_addresses_alone_is_not_moved_without_an_ipam => only_leased();
    programs_that_the_pod_holds_by_links_are_detached => programs();
    children_of_the_pod_end_before_the_nic_returns: Macvlan => children();
}

fn moving(scene: &Scene, name: &str, device: &str) -> Value {
    let mut network = scene.network(&json!({"attach": "move", "device": device}));
    network["name"] = name.into();
    network
}

fn moved(
    scene: &Scene,
    container: &str,
    ifname: &str,
    network: &Value,
    command: &str,
) -> Result<()> {
    let call = scene.call_of(&scene.pod, container, ifname);
    answer_of(&call, command, network)?
        .success()
        .context(command.to_owned())?;
    Ok(())
}

/// Two links that only their kind's own numbers distinguish, in one pod, which exchanges whatever
/// it can: names, addresses, and the order in which they return.
fn twins(kind: &str) -> Result<()> {
    let scene = Scene::new()?;
    for (number, name) in [(1, "a0"), (2, "b0")] {
        let make = match kind {
            "veth" => format!("link add {name} type veth peer name peer{name}"),
            _ => format!("link add {name} link nic0 type vlan id {number}"),
        };
        scene.on_host(&[
            make.as_str(),
            &format!("link set {name} address 02:00:00:00:00:77"),
            &format!("addr add 10.8.{number}.1/24 dev {name}"),
        ])?;
    }
    let before = scene.host_state()?;
    let networks = [moving(&scene, "rail0", "a0"), moving(&scene, "rail1", "b0")];
    moved(&scene, "c1", "net1", &networks[0], "ADD")?;
    moved(&scene, "c1", "net2", &networks[1], "ADD")?;
    scene.in_pod(&[
        "link set net1 down",
        "link set net2 down",
        "link set net1 name x",
        "link set net2 name net1",
        "link set x name net2",
        "link set net1 address 02:00:00:00:00:01",
        "link set net2 address 02:00:00:00:00:72",
        "link set net1 address 02:00:00:00:00:71",
    ])?;
    moved(&scene, "c1", "net1", &networks[0], "DEL")?;
    let addresses = scene.host.netns.ip("addr show dev a0")?;
    ensure!(addresses.contains("10.8.1.1/24"), "{addresses}");
    ensure!(
        scene.host.netns.ip("link show dev b0").is_err(),
        "the other one returned, too"
    );
    moved(&scene, "c1", "net2", &networks[1], "DEL")?;
    unchanged(&before, || scene.host_state(), "after both")
}

/// A host with another pair of links.
fn with_veth() -> Result<Scene> {
    let scene = Scene::new()?;
    scene.on_host(&[
        "link add v0 type veth peer name far0",
        "sysctl ipv6/conf/v0/accept_dad 0",
        "sysctl ipv6/conf/far0/accept_dad 0",
        "link set far0 up",
        "link set v0 up",
    ])?;
    Ok(scene)
}

/// A veth of the pod's own has the address and the name of the host's.
fn decoy() -> Result<()> {
    let scene = with_veth()?;
    let mac = mac_of(&scene.host.netns, "v0")?;
    scene.returns(
        &moving(&scene, "rail0", "v0"),
        &[
            "link set net1 down",
            "link set net1 name hidden",
            "link set hidden address 02:00:00:00:00:01",
            "link add net2 type veth peer name own2",
            "link set own2 up",
            &format!("link set net2 address {mac}"),
            "link set net2 up",
        ],
    )
}

fn other_address() -> Result<()> {
    let scene = with_veth()?;
    let before = scene.host_state()?;
    let mut network = moving(&scene, "rail0", "v0");
    network["mac"] = "02:00:00:00:00:99".into();
    moved(&scene, "c1", "net1", &network, "ADD")?;
    ensure!(mac_of(&scene.pod, "net1")? == "02:00:00:00:00:99");
    scene.del_returns(&network, &before)
}

fn hidden() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    moved(&scene, "c1", "net1", &scene.moving(), "ADD")?;
    let nested = scene.another_pod()?;
    scene.in_pod(&[&format!("link set net1 netns {}", nested.name())])?;
    scene.del_returns(&scene.moving(), &before)
}

fn deleted() -> Result<()> {
    let scene = Scene::new()?;
    let before = scene.host_state()?;
    scene.on_host(&["link add v0 type veth peer name far0"])?;
    let network = moving(&scene, "rail0", "v0");
    moved(&scene, "c1", "net1", &network, "ADD")?;
    scene.in_pod(&["link del net1"])?;
    scene.del_returns(&network, &before)
}

fn same_name() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let call = scene.call_of(&scene.pod, "c1", "nic0");
    answer_of(&call, "ADD", &scene.moving())?.success()?;
    answer_of(&call, "DEL", &scene.moving())?.success()?;
    unchanged(&before, || scene.host_state(), "after DEL")?;
    // Also when the name is the host's altname, and when another netdev has the name meanwhile.
    let call = scene.call_of(&scene.pod, "c2", "enp59s0np0");
    answer_of(&call, "ADD", &scene.moving())?.success()?;
    answer_of(&call, "DEL", &scene.moving())?.success()?;
    unchanged(&before, || scene.host_state(), "after DEL of the altname")
}

fn own_altname() -> Result<()> {
    let scene = Scene::furnished()?;
    scene.returns(
        &scene.moving(),
        &[
            "link property add dev net1 altname nic0",
            "link property add dev net1 altname peer0",
        ],
    )
}

fn leased() -> Result<()> {
    let scene = Scene::furnished()?;
    scene.on_host(&[
        "addr add 10.44.0.1/24 dev nic0 valid_lft 9000 preferred_lft 8000",
        "route add 10.45.0.0/16 via 10.44.0.254",
        "route add 10.46.0.0/16 dev nic0 src 10.44.0.1",
        "rule add from 10.44.0.1 lookup 101 pref 1002",
    ])?;
    let before = scene.host_state()?;
    moved(&scene, "c1", "net1", &scene.moving(), "ADD")?;
    let inside = scene.pod.ip("addr show dev net1")?;
    ensure!(
        inside.contains("10.9.0.1/24") && !inside.contains("10.44"),
        "{inside}"
    );
    let inside = scene.pod.ip("route show table all")? + &scene.pod.ip("rule")?;
    ensure!(
        !inside.contains("10.44") && !inside.contains("10.45"),
        "{inside}"
    );
    thread::sleep(Duration::from_millis(2100));
    scene.del_returns(&scene.moving(), &before)?;
    let shown = scene.host.netns.ip_json("addr show dev nic0")?;
    let addresses = shown[0]["addr_info"].as_array().context("addresses")?;
    let leased = addresses
        .iter()
        .find(|address| address["local"] == "10.44.0.1");
    let valid = leased
        .and_then(|leased| leased["valid_life_time"].as_u64())
        .context("a lifetime")?;
    ensure!(
        (8900..=8998).contains(&valid),
        "the time in the pod does not count: {valid}"
    );
    Ok(())
}

fn ended() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    scene.on_host(&["addr add 10.44.0.1/24 dev nic0 valid_lft 3 preferred_lft 3"])?;
    moved(&scene, "c1", "net1", &scene.moving(), "ADD")?;
    thread::sleep(Duration::from_millis(3100));
    let answer = answer_of(&scene.call(), "DEL", &scene.moving())?;
    ensure!(
        !answer.stderr.contains("10.44.0.1"),
        "an expected end is no warning: {}",
        answer.stderr
    );
    answer.success()?;
    unchanged(&before, || scene.host_state(), "after DEL")
}

fn only_leased() -> Result<()> {
    let scene = Scene::new()?;
    scene.on_host(&[
        "addr flush dev nic0 scope global",
        "addr add 10.44.0.1/24 dev nic0 valid_lft 9000 preferred_lft 8000",
    ])?;
    let words = ["nic0", "10.44.0.1/24", "ipam"];
    scene.refuses(&scene.moving(), &[DENIED], &words)?;
    let mut network = scene.moving();
    network["ipam"] = scene
        .host
        .own_ipam("10.44.0.0/24", "10.44.0.100", &json!({}));
    scene.returns(&network, &[])
}

/// A macvlan on a NIC stays where it is when the NIC changes namespaces.
fn children() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    moved(&scene, "c1", "net1", &scene.moving(), "ADD")?;
    scene.in_pod(&[
        "link add mv0 link net1 type macvlan mode bridge",
        "link add mv1 link net1 type macvlan mode private",
    ])?;
    scene.del_returns(&scene.moving(), &before)?;
    let left = scene.pod.ip("link")?;
    ensure!(
        !left.contains("mv0") && !left.contains("mv1"),
        "still on the host's wire:\n{left}"
    );
    Ok(())
}

/// A pod that attaches programs by BPF links, and as plain ones, and keeps the links open.
fn programs() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    moved(&scene, "c1", "net1", &scene.moving(), "ADD")?;
    let index = u32::try_from(index_of(&scene.pod, "net1")?)?;
    let held = scene.pod.enter(|| {
        let (sched, xdp) = (bpf::load(bpf::SCHED_CLS)?, bpf::load(bpf::XDP)?);
        bpf::attach(&sched, index, bpf::TCX_INGRESS).context("a plain tcx program")?;
        let links = [
            bpf::link(&sched, index, bpf::TCX_EGRESS, 0).context("a tcx link")?,
            bpf::link(&xdp, index, bpf::XDP_LINK, bpf::GENERIC).context("an XDP link")?,
        ];
        Ok((sched, xdp, links))
    })?;
    ensure!(
        scene.pod.ip("link show dev net1")?.contains("prog/xdp"),
        "nothing attached"
    );
    let answer = answer_of(&scene.call(), "DEL", &scene.moving())?;
    answer.success()?;
    unchanged(&before, || scene.host_state(), "after DEL")?;
    let index = u32::try_from(index_of(&scene.host.netns, "nic0")?)?;
    for direction in [bpf::TCX_INGRESS, bpf::TCX_EGRESS] {
        let left = scene.host.netns.enter(|| bpf::count(index, direction))?;
        ensure!(left == 0, "{left} tcx programs are left");
    }
    drop(held);
    // The host's own keep a NIC from being moved.
    let held = scene.host.netns.enter(|| {
        let sched = bpf::load(bpf::SCHED_CLS)?;
        bpf::attach(&sched, index, bpf::TCX_INGRESS)?;
        Ok(sched)
    })?;
    scene.refuses(
        &scene.moving(),
        &[DENIED],
        &["nic0", "tcx ingress program", "bpftool"],
    )?;
    drop(held);
    Ok(())
}

/// The few calls of bpf(2) that ip(8) and tc(8) do not make.
mod bpf {
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    use anyhow::Result;
    use nix::libc;

    pub(super) const SCHED_CLS: u32 = 3;
    pub(super) const XDP: u32 = 6;
    pub(super) const TCX_INGRESS: u32 = 46;
    pub(super) const TCX_EGRESS: u32 = 47;
    pub(super) const XDP_LINK: u32 = 37;
    pub(super) const GENERIC: u32 = 2;

    fn call(command: i32, words: &[(usize, u64, usize)]) -> Result<(i32, [u8; 128])> {
        let mut attributes = [0u8; 128];
        for (at, value, bytes) in words {
            attributes[*at..at + bytes].copy_from_slice(&value.to_le_bytes()[..*bytes]);
        }
        // SAFETY: the kernel reads and writes the 128 bytes of `attributes`, and buffers named in it
        // that outlive the call.
        let done = unsafe {
            libc::syscall(
                libc::SYS_bpf,
                command,
                attributes.as_mut_ptr(),
                attributes.len(),
            )
        };
        if done < 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        Ok((i32::try_from(done)?, attributes))
    }

    fn file(done: i32) -> OwnedFd {
        // SAFETY: the call has just made this descriptor.
        unsafe { OwnedFd::from_raw_fd(done) }
    }

    fn number(fd: &OwnedFd) -> u64 {
        u64::try_from(fd.as_raw_fd()).unwrap()
    }

    /// A program that returns 2, which lets every packet pass.
    pub(super) fn load(kind: u32) -> Result<OwnedFd> {
        let code: [u8; 16] = [0xb7, 0, 0, 0, 2, 0, 0, 0, 0x95, 0, 0, 0, 0, 0, 0, 0];
        let license = *b"GPL\0";
        let (code, license) = (
            code.as_ptr().expose_provenance(),
            license.as_ptr().expose_provenance(),
        );
        let words = [
            (0, u64::from(kind), 4),
            (4, 2, 4),
            (8, code as u64, 8),
            (16, license as u64, 8),
        ];
        Ok(file(call(5, &words)?.0))
    }

    pub(super) fn attach(program: &OwnedFd, index: u32, to: u32) -> Result<()> {
        call(
            8,
            &[
                (0, index.into(), 4),
                (4, number(program), 4),
                (8, to.into(), 4),
            ],
        )?;
        Ok(())
    }

    pub(super) fn link(program: &OwnedFd, index: u32, to: u32, flags: u32) -> Result<OwnedFd> {
        let words = [
            (0, number(program), 4),
            (4, index.into(), 4),
            (8, to.into(), 4),
            (12, flags.into(), 4),
        ];
        Ok(file(call(28, &words)?.0))
    }

    /// How many programs an interface has in one direction.
    pub(super) fn count(index: u32, to: u32) -> Result<u32> {
        let (_, answer) = call(16, &[(0, index.into(), 4), (4, to.into(), 4)])?;
        Ok(u32::from_le_bytes(answer[24..28].try_into()?))
    }
}
