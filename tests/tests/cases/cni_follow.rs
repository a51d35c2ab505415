//! An exclusive pod that follows another on the same NIC. The kubelet frees a unit before the runtime
//! calls DEL, so the NIC may still be in the earlier pod when the next one's ADD starts.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::cni::Call;
use e2e::host_state::unchanged;
use e2e::netns::Netns;
use e2e::node_socket::{NodeSocket, allocation};
use e2e::scene::{DENIED, PCI, Running, Scene, TRY_AGAIN, answer_of, refusal};
use node_wire::Pod;
use serde_json::{Value, json};

cases! {
    add_waits_for_the_nic_of_a_pod_that_is_being_deleted => follows();
    add_waits_three_seconds_at_most_for_another_pods_nic => is_late();
    add_does_not_wait_for_a_nic_that_is_not_its_pods => is_held();
}

/// The limit of the wait.
const WAIT: Duration = Duration::from_secs(3);
/// Beside the limit, on a busy machine.
const SLACK: Duration = Duration::from_millis(500);

fn pod_named(name: &str) -> Pod {
    Pod {
        namespace: "ml".into(),
        name: name.into(),
        uid: Some(format!("{name}-uid")),
    }
}

/// Pod `a`, which has the NIC, and pod `b`, to which the kubelet allocates it.
struct Pair {
    scene: Scene,
    socket: NodeSocket,
    network: Value,
    b: Netns,
}

impl Pair {
    fn new() -> Result<Self> {
        let scene = Scene::with_hardware()?;
        scene.allow(&json!({"unallocated": null}))?;
        let socket = NodeSocket::start(&scene.host_root().join("run/rdma-netdev/node.sock"))?;
        let pair = Self {
            network: scene.network(&json!({"attach": "move", "deviceID": PCI})),
            b: scene.another_pod()?,
            scene,
            socket,
        };
        pair.allocate("a");
        answer_of(&pair.call("a"), "ADD", &pair.network)?.success()?;
        pair.allocate("b");
        Ok(pair)
    }

    fn allocate(&self, name: &str) {
        let unit = allocation("main", "rdma/rail", &[PCI]);
        self.socket.hold(&pod_named(name), vec![unit]);
    }

    fn call(&self, name: &str) -> Call {
        let pod = match name {
            "a" => &self.scene.pod,
            _ => &self.b,
        };
        let mut call = self.scene.call_of(pod, name, "net1");
        call.args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=ml;K8S_POD_NAME={name};K8S_POD_UID={name}-uid"
        );
        call
    }

    fn start(&self, name: &str, command: &str) -> Result<Running> {
        let network = self.network.to_string();
        Running::start(&mut self.call(name).command(command), network.as_bytes())
    }

    /// ADD of pod `b` fails with 11 and names pod `a`; how long it took.
    fn refused(&self) -> Result<Duration> {
        let started = Instant::now();
        let answer = self.start("b", "ADD")?.answer()?;
        let took = started.elapsed();
        refusal(&answer, &[TRY_AGAIN], &["nic0", "ml/a"])?;
        ensure!(
            self.scene.pod.ip("link show net1").is_ok(),
            "pod a lost its NIC"
        );
        Ok(took)
    }
}

fn follows() -> Result<()> {
    let pair = Pair::new()?;
    pair.socket.forget(&pod_named("a"));
    let adding = pair.start("b", "ADD")?;
    sleep(Duration::from_secs(1));
    answer_of(&pair.call("a"), "DEL", &pair.network)?.success()?;
    adding.answer()?.success().context("the first ADD")?;
    pair.b.ip("link show net1").context("pod b has no NIC")?;
    // What the next DEL restores is the host's state, not pod a's.
    answer_of(&pair.call("b"), "DEL", &pair.network)?.success()?;
    let before = pair.scene.host_state()?;
    for command in ["ADD", "DEL"] {
        answer_of(&pair.call("b"), command, &pair.network)?.success()?;
    }
    unchanged(&before, || pair.scene.host_state(), "after both pods")
}

fn is_late() -> Result<()> {
    let pair = Pair::new()?;
    pair.socket.forget(&pod_named("a"));
    let took = pair.refused()?;
    ensure!(took > WAIT - SLACK && took < 3 * WAIT, "took {took:?}");
    Ok(())
}

/// The kubelet says that the earlier pod has the unit as well: no DEL of it is to be expected.
fn is_held() -> Result<()> {
    let pair = Pair::new()?;
    pair.socket.hold(&pod_named("b"), vec![]);
    let started = Instant::now();
    let answer = pair.start("b", "ADD")?.answer()?;
    let took = started.elapsed();
    refusal(&answer, &[DENIED], &["nic0", "ml/b"])?;
    ensure!(took < WAIT - SLACK, "took {took:?}");
    Ok(())
}
