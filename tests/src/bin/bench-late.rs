//! What late binding adds to an ADD: a NIC that a slot becomes beside one that the kubelet's unit
//! names, both moved by `rdma-netdev`, with one daemon and the kubelet's stand-in, in turns.
//!
//! Both ask the daemon whether the pod holds the HCA. The slot's side also has it choose an HCA, and
//! read the device nodes and write the CDI file after the move. So the difference of the two is what late
//! binding costs; a ratio alone would hide it behind the kernel's change of namespace.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use e2e::bin_under_test::product;
use e2e::cni::Call;
use e2e::daemon::{Daemon, make_nodes};
use e2e::kubelet::{Kubelet, Pod, Settings};
use e2e::measure::{Cost, Costs, cost_of, row, table};
use e2e::netns::Netns;
use e2e::scene::Scene;
use serde_json::json;

#[derive(Debug, Parser)]
#[command(about = "What late binding adds to an ADD of rdma-netdev, in one interleaved run")]
struct Arguments {
    /// Rounds
    #[arg(long, default_value_t = 40)]
    rounds: usize,
    /// Exit with a failure when something is over its budget
    #[arg(long)]
    check: bool,
}

/// The most that late binding may add to an ADD.
const BUDGET: Duration = Duration::from_millis(3);
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// From a pod's admission to its first CNI call at least: the daemon has heard of the pod by then.
const SANDBOX: Duration = Duration::from_millis(300);
/// NICs of the host: the first is as an administrator furnished it, the others are alike.
const NICS: u8 = 8;
/// A slot's pool has all NICs but the first two, of which one is the other side's.
const CONFIG: &str = "version: 1\npools:\n\
    - {resource: rdma/late, mode: exclusive, binding: late, select: {rdmaDevices: [\"mlx5_[2-7]\"]}}\n\
    - {resource: rdma/early, mode: exclusive, select: {rdmaDevices: [mlx5_1]}}\n";

/// A pod with a unit, and its calls.
struct Side {
    call: Call,
    /// The pod's namespace, which is removed with it.
    _pod: Netns,
    network: String,
    add: Costs,
    del: Costs,
}

struct Fixture {
    scene: Scene,
    kubelet: Kubelet,
    _daemon: Daemon,
}

impl Fixture {
    fn new() -> Result<Self> {
        let scene = Scene::with_nics(NICS)?;
        scene.hide_processes()?;
        for number in 1..NICS {
            // Files have no GID of an address, and ADD would wait for it.
            scene.on_host(&[&format!("addr del 10.19.{number}.1/24 dev nic{number}")])?;
        }
        let tree = scene.tree()?;
        tree.rdma_core(true);
        make_nodes(tree)?;
        let directory = scene.host.directory().to_owned();
        let cdi = directory.join("cdi");
        scene.policy(&json!({"unallocated": null}), &json!({"cdiDir": cdi}))?;
        fs::create_dir_all(scene.host_root().join("run"))?;
        DirBuilder::new().mode(0o700).create(scene.host.state())?;
        let settings = || Settings::below(&directory.join("kubelet"));
        let kubelet = Kubelet::start(settings())?;
        let config = directory.join("config");
        fs::write(&config, CONFIG)?;
        let socket = scene.host_root().join("run/rdma-netdev/node.sock");
        let mut command = Command::new(product("rdma-device-plugin")?);
        let flags: [(&str, PathBuf); 7] = [
            ("--config-file", config),
            ("--host-root", scene.host_root()),
            ("--device-plugin-dir", settings().device_plugins),
            ("--kubelet-root-dir", settings().root),
            ("--node-socket", socket.clone()),
            ("--policy", scene.policy_file()),
            ("--cdi-dir", cdi),
        ];
        for (flag, path) in flags {
            command.arg(flag).arg(path);
        }
        let daemon = Daemon::start(command, &directory)?;
        let listed = kubelet
            .wait_allocatable("rdma/late", usize::from(NICS) - 2, WAIT_TIMEOUT)
            .and_then(|()| kubelet.wait_allocatable("rdma/early", 1, WAIT_TIMEOUT));
        listed.with_context(|| daemon.log())?;
        let started = Instant::now();
        while UnixStream::connect(&socket).is_err() {
            ensure!(started.elapsed() < WAIT_TIMEOUT, "{}", daemon.log());
            thread::sleep(Duration::from_millis(20));
        }
        Ok(Self {
            scene,
            kubelet,
            _daemon: daemon,
        })
    }

    /// A pod that was allocated a unit of a resource, and a network that moves it.
    fn side(&self, name: &str, resource: &str) -> Result<Side> {
        let pod = Pod::with_limits(name, &[(resource, 1)])?;
        let uid = pod.metadata.uid.clone();
        self.kubelet.admit(pod)?;
        let assigned = self.kubelet.assigned(&format!("default/{name}"))?;
        let unit = assigned.into_values().flatten().next().context("a unit")?;
        let pod = self.scene.another_pod()?;
        let mut call = self.scene.call_of(&pod, name, "net1");
        call.args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME={name};K8S_POD_UID={uid}"
        );
        // Called in the host's namespace, without a program between.
        call.host = None;
        let network = self
            .scene
            .network(&json!({"attach": "move", "deviceID": unit}));
        Ok(Side {
            call,
            _pod: pod,
            network: network.to_string(),
            add: Costs::default(),
            del: Costs::default(),
        })
    }

    fn cost(&self, side: &Side, command: &str) -> Result<Cost> {
        let netns = &self.scene.host.netns;
        let called =
            netns.enter(|| cost_of(&mut side.call.command(command), side.network.as_bytes()));
        let (cost, output) = called?;
        ensure!(
            output.status.success(),
            "{command} of {}: {}",
            side.call.container_id,
            String::from_utf8_lossy(&output.stdout)
        );
        Ok(cost)
    }
}

#[expect(clippy::print_stdout, reason = "the table is what this program is for")]
fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let fixture = Fixture::new()?;
    let mut sides = [
        fixture.side("late", "rdma/late")?,
        fixture.side("early", "rdma/early")?,
    ];
    thread::sleep(SANDBOX);
    // The first round warms what is to be warm.
    for round in 0..=arguments.rounds {
        for side in &mut sides {
            let add = fixture.cost(side, "ADD")?;
            let del = fixture.cost(side, "DEL")?;
            if round > 0 {
                side.add.0.push(add);
                side.del.0.push(del);
            }
        }
    }
    let [late, early] = &sides;
    let rows = [
        row(
            "ADD of a slot, beside a unit that names its NIC",
            &late.add,
            &early.add,
            [None, None],
        ),
        row("DEL of the same", &late.del, &early.del, [None, None]),
    ];
    println!("{}", table(&rows));
    let added = late.add.wall().saturating_sub(early.add.wall());
    println!(
        "late binding adds {:.2} ms to an ADD (≤ {} ms), and {:.2} ms to a DEL",
        added.as_secs_f64() * 1e3,
        BUDGET.as_millis(),
        late.del
            .wall()
            .saturating_sub(early.del.wall())
            .as_secs_f64()
            * 1e3
    );
    Ok(match arguments.check && added > BUDGET {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    })
}
