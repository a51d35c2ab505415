//! NICs that `rdma-netdev` moved: each returns with what the host had, and with nothing of the pod's.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::host_state::unchanged;
use e2e::scene::{DENIED, Scene, answer_of, index_of};
use serde_json::json;

cases! {
    addresses_with_a_lifetime_stay_with_the_host => leased();
    a_nic_with_leased_addresses_alone_is_not_moved_without_an_ipam => only_leased();
    programs_that_the_pod_holds_by_links_are_detached => programs();
    children_of_the_pod_end_before_the_nic_returns: Macvlan => children();
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
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
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
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
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
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
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
