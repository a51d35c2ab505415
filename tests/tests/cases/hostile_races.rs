//! Calls at the same time, and calls that are killed: at the end there is an interface with its
//! lease or neither, and the host is as before.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use e2e::cases;
use e2e::cni::Call;
use e2e::host_state::unchanged;
use e2e::scene::{Running, Scene, answer_of, refusal};
use serde_json::{Value, json};

cases! {
    a_del_while_add_asks_its_ipam_leaves_both_or_neither: Macvlan => del_during_ipam("macvlan");
    a_del_while_a_move_asks_its_ipam_leaves_both_or_neither => del_during_ipam("move");
    a_dead_namespace_while_add_asks_its_ipam_leaves_no_lease: Macvlan => namespace_gone_during_ipam();
    a_gc_while_add_asks_its_ipam_leaves_both_or_neither: Macvlan => gc_during_ipam();
    a_reclaim_while_add_asks_its_ipam_leaves_it_alone => reclaim_during_ipam();
    of_two_adds_of_one_child_one_wins: Macvlan => two_adds("macvlan");
    of_two_adds_of_one_move_one_wins => two_adds("move");
    of_two_pods_that_want_one_nic_one_has_it => two_pods();
    a_child_added_while_a_move_asks_its_ipam_is_refused: Macvlan => child_during_move();
    a_nic_moved_while_a_child_asks_its_ipam_has_no_child: Macvlan => move_during_child();
    of_a_move_and_children_at_once_one_kind_wins: Macvlan => move_and_children();
    of_eight_pods_that_want_children_all_have_them: Macvlan => eight_pods();
    a_storm_of_killed_adds_and_dels_of_children_leaves_nothing: Macvlan => storm("macvlan");
    a_storm_of_killed_adds_and_dels_of_moves_leaves_nothing => storm("move");
    adds_and_dels_beside_a_reclaim_loop_lose_nothing: Macvlan => beside_reclaim();
}

/// A scene whose IPAM program gives one address, keeps the lease as a file, and takes its time.
fn with_slow_ipam(attach: &str) -> Result<(Scene, Call, Value)> {
    let scene = Scene::furnished()?;
    let plugins = scene.host.directory().join("plugins");
    fs::create_dir_all(&plugins)?;
    let program = plugins.join("slow");
    fs::write(
        &program,
        r#"#!/bin/sh
cd "$(dirname "$0")"
cat > /dev/null
case $CNI_COMMAND in
ADD)
	: > asked
	i=0
	while [ ! -e go ] && [ $i -lt 100 ]; do sleep 0.02; i=$((i+1)); done
	: > "lease-$CNI_CONTAINERID"
	echo '{"cniVersion":"1.0.0","ips":[{"address":"10.9.0.7/24"}]}' ;;
DEL) rm -f "lease-$CNI_CONTAINERID" ;;
esac
"#,
    )?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    scene.allow(&json!({"ipam": ["slow"]}))?;
    let mut call = scene.call();
    call.path = plugins.into();
    let key = if attach == "move" { "device" } else { "master" };
    let network = scene.network(&json!({"attach": attach, key: "nic0", "ipam": {"type": "slow"}}));
    Ok((scene, call, network))
}

fn there(scene: &Scene, name: &str) -> bool {
    scene.host.directory().join("plugins").join(name).exists()
}

fn start(call: &Call, command: &str, network: &Value) -> Result<Running> {
    Running::start(&mut call.command(command), network.to_string().as_bytes())
}

/// An ADD whose IPAM program has been asked and waits.
fn asking(scene: &Scene, call: &Call, network: &Value) -> Result<Running> {
    let running = start(call, "ADD", network)?;
    let started = Instant::now();
    while !there(scene, "asked") {
        ensure!(
            started.elapsed() < Duration::from_secs(10),
            "the IPAM program is not asked"
        );
        sleep(Duration::from_millis(2));
    }
    Ok(running)
}

fn go(scene: &Scene) -> Result<()> {
    Ok(fs::write(scene.host.directory().join("plugins/go"), "")?)
}

/// Interface and lease are both there or both not.
fn both_or_neither(scene: &Scene, when: &str) -> Result<bool> {
    let link = scene.pod.ip("link show net1").is_ok();
    let lease = there(scene, "lease-c1");
    ensure!(link == lease, "{when}: interface {link}, lease {lease}");
    Ok(link)
}

fn del_during_ipam(attach: &str) -> Result<()> {
    let (scene, call, network) = with_slow_ipam(attach)?;
    let before = scene.host_state()?;
    let add = asking(&scene, &call, &network)?;
    let del = start(&call, "DEL", &network)?;
    sleep(Duration::from_millis(150));
    go(&scene)?;
    let (add, del) = (add.answer()?, del.answer()?);
    if !del.status.success() {
        refusal(&del, &[e2e::scene::TRY_AGAIN], &[]).context("the DEL")?;
    }
    let up = both_or_neither(&scene, "after ADD and DEL at once")?;
    ensure!(
        !up || add.status.success(),
        "an ADD that failed left its interface"
    );
    answer_of(&call, "DEL", &network)?.success()?;
    ensure!(
        !both_or_neither(&scene, "after another DEL")?,
        "it is still there"
    );
    unchanged(&before, || scene.host_state(), "after another DEL")
}

fn namespace_gone_during_ipam() -> Result<()> {
    let (scene, call, network) = with_slow_ipam("macvlan")?;
    let before = scene.host_state()?;
    let add = asking(&scene, &call, &network)?;
    scene.pod.delete()?;
    go(&scene)?;
    add.answer()?;
    answer_of(&call, "DEL", &network)?.success()?;
    ensure!(!there(&scene, "lease-c1"), "the lease is left");
    unchanged(&before, || scene.host_state(), "after DEL")
}

fn gc_during_ipam() -> Result<()> {
    let (scene, call, network) = with_slow_ipam("macvlan")?;
    let before = scene.host_state()?;
    let add = asking(&scene, &call, &network)?;
    let mut all = network.clone();
    all["cni.dev/valid-attachments"] = json!([]);
    let gc = start(&call, "GC", &all)?;
    sleep(Duration::from_millis(150));
    go(&scene)?;
    add.answer()?;
    gc.answer()?;
    both_or_neither(&scene, "after ADD and GC at once")?;
    answer_of(&call, "DEL", &network)?.success()?;
    ensure!(!there(&scene, "lease-c1"), "the lease is left");
    unchanged(&before, || scene.host_state(), "after DEL")
}

fn reclaim_during_ipam() -> Result<()> {
    let (scene, call, network) = with_slow_ipam("move")?;
    let before = scene.host_state()?;
    let add = asking(&scene, &call, &network)?;
    let reclaim = scene.tool("rdmactl", &["reclaim"])?;
    go(&scene)?;
    add.answer()?
        .success()
        .with_context(|| format!("ADD beside reclaim: {}", reclaim.stdout))?;
    ensure!(
        both_or_neither(&scene, "after ADD and reclaim at once")?,
        "reclaim took it"
    );
    answer_of(&call, "DEL", &network)?.success()?;
    ensure!(!there(&scene, "lease-c1"), "the lease is left");
    unchanged(&before, || scene.host_state(), "after DEL")
}

/// The network of `scene` with our own IPAM, allowed beside the slow one.
fn beside_slow(scene: &Scene, network: &Value) -> Result<Value> {
    scene.allow(&json!({"ipam": ["slow", "rdma-ipam"]}))?;
    let mut network = network.clone();
    network["name"] = "rail1".into();
    Ok(network)
}

/// The move holds the NIC when it is decided that nothing stands on it, until it has left.
fn child_during_move() -> Result<()> {
    let (scene, call, network) = with_slow_ipam("move")?;
    let child = beside_slow(&scene, &scene.child())?;
    let other = scene.another_pod()?;
    let theirs = scene.call_of(&other, "c2", "net1");
    let before = scene.host_state()?;
    let moving = asking(&scene, &call, &network)?;
    let adding = start(&theirs, "ADD", &child)?;
    sleep(Duration::from_millis(300));
    go(&scene)?;
    moving.answer()?.success().context("the move")?;
    refusal(&adding.answer()?, &[e2e::scene::TRY_AGAIN], &["nic0"])?;
    ensure!(
        scene.listed("addresses")?.is_empty(),
        "the refused child's address is leased"
    );
    answer_of(&theirs, "DEL", &child)?.success()?;
    answer_of(&call, "DEL", &network)?.success()?;
    unchanged(&before, || scene.host_state(), "after both")
}

fn move_during_child() -> Result<()> {
    let (scene, call, network) = with_slow_ipam("macvlan")?;
    let moving = beside_slow(&scene, &scene.moving())?;
    let other = scene.another_pod()?;
    let theirs = scene.call_of(&other, "c2", "net1");
    let before = scene.host_state()?;
    let adding = asking(&scene, &call, &network)?;
    answer_of(&theirs, "ADD", &moving)?
        .success()
        .context("the move")?;
    go(&scene)?;
    refusal(&adding.answer()?, &[e2e::scene::TRY_AGAIN], &["nic0"])?;
    ensure!(
        !both_or_neither(&scene, "after the refused ADD")?,
        "it is there"
    );
    answer_of(&theirs, "DEL", &moving)?.success()?;
    unchanged(&before, || scene.host_state(), "after both")
}

fn move_and_children() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let pods = [
        scene.another_pod()?,
        scene.another_pod()?,
        scene.another_pod()?,
    ];
    let attached = ["macvlan", "move", "macvlan"];
    for round in 0..8 {
        let mut running = Vec::new();
        for (number, (pod, attach)) in pods.iter().zip(attached).enumerate() {
            let call = scene.call_of(pod, &format!("c{number}"), "net1");
            let network = network_of(&scene, attach);
            running.push((start(&call, "ADD", &network)?, call, network, attach));
        }
        let mut won = Vec::new();
        let mut calls = Vec::new();
        for (adding, call, network, attach) in running {
            won.extend(adding.answer()?.status.success().then_some(attach));
            calls.push((call, network));
        }
        won.dedup();
        ensure!(
            won.len() == 1,
            "round {round}: on one NIC there are {won:?}"
        );
        for (call, network) in &calls {
            answer_of(call, "DEL", network)?.success()?;
        }
        unchanged(
            &before,
            || scene.host_state(),
            &format!("after round {round}"),
        )?;
    }
    Ok(())
}

fn network_of(scene: &Scene, attach: &str) -> Value {
    let mut network = if attach == "move" {
        scene.moving()
    } else {
        scene.child()
    };
    network["ipam"] = scene.host.own_ipam("10.9.0.0/24", "10.9.0.100", &json!({}));
    network
}

fn two_adds(attach: &str) -> Result<()> {
    let scene = Scene::furnished()?;
    let network = network_of(&scene, attach);
    for round in 0..6 {
        let before = scene.host_state()?;
        let both = [
            start(&scene.call(), "ADD", &network)?,
            start(&scene.call(), "ADD", &network)?,
        ];
        let mut won = Vec::new();
        for running in both {
            let answer = running.answer()?;
            if answer.status.success() {
                won.push(answer.success()?);
            } else {
                refusal(&answer, &[], &[])?;
            }
        }
        ensure!(
            won.len() == 1,
            "round {round}: {} of two ADDs succeeded",
            won.len()
        );
        let address = won[0]["ips"][0]["address"].as_str().context("no address")?;
        let shown = scene
            .pod
            .ip("addr show net1")
            .context("the winner's interface is gone")?;
        ensure!(
            shown.contains(address),
            "the winner's address {address} is not on {shown}"
        );
        let leases = scene.listed("addresses")?;
        ensure!(leases.len() == 1, "round {round}: leases {leases:?}");
        let bare = address.split('/').next().unwrap_or_default();
        ensure!(
            leases[0]["address"].to_string().contains(bare),
            "{leases:?} and not {bare}"
        );
        scene.del_returns(&network, &before)?;
    }
    Ok(())
}

fn two_pods() -> Result<()> {
    let scene = Scene::furnished()?;
    let pods = [scene.another_pod()?, scene.another_pod()?];
    let calls = [
        scene.call_of(&pods[0], "c1", "net1"),
        scene.call_of(&pods[1], "c2", "net1"),
    ];
    let network = network_of(&scene, "move");
    for round in 0..6 {
        let before = scene.host_state()?;
        let both = [
            start(&calls[0], "ADD", &network)?,
            start(&calls[1], "ADD", &network)?,
        ];
        let mut won = 0;
        for running in both {
            let answer = running.answer()?;
            if answer.status.success() {
                won += 1;
            } else {
                refusal(&answer, &[e2e::scene::TRY_AGAIN], &[])?;
            }
        }
        let has = pods
            .iter()
            .filter(|pod| pod.ip("link show net1").is_ok())
            .count();
        ensure!(
            (won, has) == (1, 1),
            "round {round}: {won} ADDs succeeded, {has} pods have it"
        );
        for call in &calls {
            answer_of(call, "DEL", &network)?.success()?;
        }
        unchanged(
            &before,
            || scene.host_state(),
            &format!("after round {round}"),
        )?;
    }
    Ok(())
}

fn eight_pods() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let pods = (0..8)
        .map(|_| scene.another_pod())
        .collect::<Result<Vec<_>>>()?;
    let network = network_of(&scene, "macvlan");
    for command in ["ADD", "DEL"] {
        let mut running = Vec::new();
        for (index, pod) in pods.iter().enumerate() {
            running.push(start(
                &scene.call_of(pod, &format!("c{index}"), "net1"),
                command,
                &network,
            )?);
        }
        for one in running {
            one.answer()?.success()?;
        }
        let leases = scene.listed("addresses")?.len();
        ensure!(
            leases == if command == "ADD" { 8 } else { 0 },
            "{leases} leases after {command}"
        );
    }
    unchanged(&before, || scene.host_state(), "after all")
}

/// A pseudo-random sequence of numbers; the seed is in the message of a failure.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

const ROUNDS: usize = 50;

/// Two attachments, each with one call under way at a time or two, killed at any moment.
fn storm(attach: &str) -> Result<()> {
    let scene = Scene::furnished()?;
    scene.host.add_nic("nic1", "peer1")?;
    let before = scene.host_state()?;
    let seed = u64::from(SystemTime::now().duration_since(UNIX_EPOCH)?.subsec_nanos());
    let mut dice = Dice(seed);
    let pods = [scene.another_pod()?, scene.another_pod()?];
    let calls = [
        scene.call_of(&pods[0], "c1", "net1"),
        scene.call_of(&pods[1], "c2", "net1"),
    ];
    let networks = ["nic0", "nic1"].map(|nic| {
        let mut network = network_of(&scene, attach);
        network["name"] = format!("net-{nic}").into();
        network[if attach == "move" { "device" } else { "master" }] = nic.into();
        network
    });
    for _ in 0..ROUNDS {
        let mut running = Vec::new();
        for _ in 0..=dice.below(2) {
            let which = usize::try_from(dice.below(2))?;
            let command = if dice.below(2) == 0 { "ADD" } else { "DEL" };
            running.push(start(&calls[which], command, &networks[which])?);
        }
        sleep(Duration::from_millis(dice.below(25)));
        for one in &mut running {
            if dice.below(3) != 0 {
                one.kill();
            }
        }
        for one in running {
            let answer = one.answer()?;
            if answer.status.code().is_some_and(|code| code != 0) {
                refusal(&answer, &[], &[]).with_context(|| format!("seed {seed}"))?;
            }
        }
    }
    for (call, network) in calls.iter().zip(&networks) {
        del_until_done(call, network).with_context(|| format!("seed {seed}"))?;
    }
    for pod in &pods {
        ensure!(
            pod.ip("link show net1").is_err(),
            "net1 is left in a pod; seed {seed}"
        );
    }
    unchanged(
        &before,
        || scene.host_state(),
        &format!("after all, seed {seed}"),
    )
}

/// A runtime sends DEL again after "try again".
fn del_until_done(call: &Call, network: &Value) -> Result<()> {
    for _ in 0..20 {
        let answer = answer_of(call, "DEL", network)?;
        if answer.status.success() {
            return Ok(());
        }
        refusal(&answer, &[e2e::scene::TRY_AGAIN], &[])?;
        sleep(Duration::from_millis(50));
    }
    bail!("DEL is never done")
}

fn beside_reclaim() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let network = network_of(&scene, "macvlan");
    for round in 0..10 {
        let add = start(&scene.call(), "ADD", &network)?;
        let mut command = scene
            .host
            .netns
            .command(e2e::bin_under_test::product("rdmactl")?);
        command
            .arg("reclaim")
            .env("RDMA_NETDEV_POLICY", scene.policy_file())
            .env("RDMA_NODE_NAME", "node-1");
        let reclaim = Running::start(&mut command, b"")?;
        add.answer()?
            .success()
            .with_context(|| format!("ADD of round {round}"))?;
        reclaim.answer()?;
        ensure!(
            scene.pod.ip("link show net1").is_ok(),
            "round {round}: reclaim took it"
        );
        ensure!(
            scene.listed("addresses")?.len() == 1,
            "round {round}: reclaim took the lease"
        );
        answer_of(&scene.call(), "DEL", &network)?.success()?;
    }
    unchanged(&before, || scene.host_state(), "after all")
}
