//! `rdma-agent` of several nodes on one directory, with the ADDs and DELs of their pods.

use crate::support::{Attachment, Place, network};
use e2e::bin_under_test::product;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A node's agent; killed when dropped.
pub(crate) struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn start(place: &Place, node: &str) -> Agent {
    place.make(node);
    let root = place.root(node);
    let socket = root.join("run/rdma-netdev/agent.sock");
    std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
    let mut command = Command::new(product("rdma-agent").unwrap());
    command
        .env_clear()
        .arg("--policy")
        .arg(place.policy_of(node))
        .arg("--host-root")
        .arg(&root)
        .args(["--node", node, "--socket"])
        .arg(&socket)
        .stdin(Stdio::null())
        .stderr(Stdio::null());
    Agent(command.spawn().unwrap())
}

pub(crate) fn shared() -> Place {
    let place = Place::new();
    let directory = place.path().join("store");
    std::fs::create_dir_all(&directory).unwrap();
    place.set_policy(json!({
        "stores": {"default": {"type": "file", "directory": directory}},
        "ipam": {"cooldown": "0s"},
    }));
    place
}

pub(crate) fn on(node: &str, container: &str) -> Attachment {
    let mut attachment = Attachment::new(container).node(node);
    attachment.machine = node.to_owned();
    attachment
}

/// An ADD as the kubelet has it made again and again; the address, and how long it took.
pub(crate) fn add(place: &Place, who: &Attachment, config: &Value) -> (String, Duration) {
    let begun = Instant::now();
    loop {
        let answer = place.add(who, config);
        if answer.ok() {
            return (answer.address(), begun.elapsed());
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{answer:?}");
        std::thread::sleep(Duration::from_millis(300));
    }
}

#[test]
fn a_directory_is_made_ready_once_and_nodes_share_it() {
    let place = shared();
    let config = network("rdma-ipam", json!({"range": "10.0.0.0/26"}));
    let _agents = ["n1", "n2"].map(|node| start(&place, node));
    let begun = Instant::now();
    let (code, text) = loop {
        let (code, text) = place.add(&on("n1", "a"), &config).error();
        if text.contains("addresses init") || begun.elapsed() > Duration::from_secs(20) {
            break (code, text);
        }
    };
    assert!(
        code == 11 && text.contains("addresses init"),
        "{code} {text}"
    );
    for _ in 0..2 {
        let made = place.admin(&["init"]);
        assert!(made.ok(), "{made:?}");
    }
    let (one, _) = add(&place, &on("n1", "a"), &config);
    let (other, _) = add(&place, &on("n2", "a"), &config);
    assert_ne!(one, other);
    // An administrator assigns, releases and gives back.
    let assigned = place.admin(&["assign", "10.0.9.0/28", "--node", "n2", "--json"]);
    assert_eq!(
        assigned.document["changed"],
        json!(["10.0.9.0/28"]),
        "{assigned:?}"
    );
    let own = place.admin(&["release", "--node", "n1", "--yes"]);
    assert!(own.stderr.contains("give-back"), "{own:?}");
    let released = place.admin(&["release", "--part", "10.0.9.0/28", "--yes", "--json"]);
    assert_eq!(
        released.document["changed"],
        json!(["10.0.9.0/28"]),
        "{released:?}"
    );
    let kept = place.admin(&["give-back", "--json"]);
    assert_eq!(kept.status, Some(1), "{kept:?}");
    assert!(place.del(&on("n1", "a"), &config).ok());
    let given = place.admin(&["give-back", "--json"]);
    assert!(
        given.ok() && given.document["changed"] != json!([]),
        "{given:?}"
    );
    let dead = place.admin(&["release", "--node", "n2", "--yes", "--json"]);
    assert!(
        dead.ok() && dead.document["changed"] != json!([]),
        "{dead:?}"
    );
}

#[test]
fn pods_that_move_on_a_small_range_get_addresses_though_agents_die() {
    const NODES: [&str; 3] = ["n1", "n2", "n3"];
    let place = shared();
    assert!(place.admin(&["init"]).ok());
    let config = network("rdma-ipam", json!({"range": "10.0.0.0/29"}));
    let mut agents: BTreeMap<&str, Agent> = NODES.map(|node| (node, start(&place, node))).into();
    let mut pods: Vec<(Attachment, String)> = Vec::new();
    let mut longest = Duration::ZERO;
    for number in 0..16 {
        if pods.len() == 5 {
            let (gone, _) = pods.remove(number * 7 % 5);
            assert!(place.del(&gone, &config).ok());
        }
        if number % 3 == 2 {
            let node = NODES[number % 2];
            drop(agents.remove(node));
            agents.insert(node, start(&place, node));
        }
        let who = on(NODES[number * 5 % 7 % 3], &format!("p{number}"));
        let (address, took) = add(&place, &who, &config);
        longest = longest.max(took);
        let twice = pods.iter().find(|(_, other)| *other == address);
        assert!(twice.is_none(), "{address} twice");
        pods.push((who, address));
    }
    assert!(longest < Duration::from_secs(20), "{longest:?}");
}

#[test]
fn a_node_that_is_uninstalled_gives_its_addresses_back() {
    let place = shared();
    assert!(place.admin(&["init"]).ok());
    let config = network("rdma-ipam", json!({"range": "10.0.0.0/26"}));
    let agent = start(&place, "n1");
    let pod = on("n1", "a");
    add(&place, &pod, &config);
    let root = place.root("n1");
    let uninstall = || {
        let mut command = Command::new(product("rdma-device-plugin").unwrap());
        command.args(["uninstall", "--yes", "--node", "n1", "--policy"]);
        command.arg(place.policy_of("n1"));
        let run = root.join("run/rdma-netdev");
        for (flag, path) in [
            ("--host-root", &root),
            ("--cni-bin-dir", &root.join("bin")),
            ("--cdi-dir", &root.join("cdi")),
            ("--run-dir", &run),
        ] {
            command.arg(flag).arg(path);
        }
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        (output.status.success(), said)
    };
    let document = || {
        let subnet = place.path().join("store/default/10.0.0.0-24");
        let files = std::fs::read_dir(subnet).unwrap();
        let names = files.map(|file| file.unwrap().path());
        let number = |path: &std::path::PathBuf| path.file_name()?.to_str()?.parse::<u64>().ok();
        let last = names.max_by_key(number).unwrap();
        std::fs::read_to_string(last).unwrap()
    };

    let (ok, said) = uninstall();
    assert!(!ok && said.contains("addresses are leased"), "{said}");
    assert!(place.del(&pod, &config).ok());
    drop(agent);
    let (ok, said) = uninstall();
    assert!(
        !ok && said.contains("run rdma-agent on this node"),
        "{said}"
    );
    assert!(place.policy_of("n1").exists() && document().contains("n1"));
    let _agent = start(&place, "n1");
    let begun = Instant::now();
    while let (false, said) = uninstall() {
        assert!(begun.elapsed() < Duration::from_secs(20), "{said}");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(!place.policy_of("n1").exists() && !root.join("run/rdma-netdev/leases").exists());
    assert!(!document().contains("n1"), "{}", document());
}
