//! A cluster of agents whose API server refuses, loses answers, cuts watches, serves old lists, hangs
//! and is away, while agents are killed, nodes reboot, and pods come and go.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::api_server::ApiServer;
use e2e::case;
use e2e::cluster::{AgentNode, api_server, eventually, parts, parts_of, subnets};
use e2e::harness::Case;
use e2e::proxy::{Faults, Proxy, Reach};
use e2e::random::Random;
use serde_json::json;

pub(crate) const CASES: &[Case] = &[case!(
    no_address_is_leased_twice_or_lost_whatever_the_api_does,
    ApiServer
)];

/// Fourteen addresses for three nodes: most claims are handed over.
const RANGE: &str = "10.9.0.0/28";
const MOST_PODS: usize = 10;
const LENGTH: Duration = Duration::from_secs(75);
const LATE: Duration = Duration::from_secs(150);

struct Machine {
    node: AgentNode,
    proxy: Proxy,
}

/// The node of each pod, and its address.
type Pods = BTreeMap<String, (usize, String)>;

impl Machine {
    fn new(server: &ApiServer, name: &str, seed: u64) -> Result<Self> {
        let proxy = Proxy::start(server.kubeconfig(), seed)?;
        let mut node = AgentNode::new(server, name)?;
        node.set_kubeconfig(&proxy.kubeconfig(node.root().join("kubeconfig"))?);
        node.start()?;
        Ok(Self { node, proxy })
    }
}

fn trouble(machine: &mut Machine, random: &mut Random) -> Result<&'static str> {
    Ok(match random.below(7) {
        0 => {
            machine.node.kill()?;
            machine.node.start()?;
            "agent killed"
        }
        1 => {
            machine.proxy.set_reach(Reach::Cut);
            "cut off"
        }
        2 => {
            machine.proxy.set_reach(Reach::Hangs);
            "the API hangs"
        }
        _ => {
            machine.proxy.set_reach(Reach::Open);
            "reachable"
        }
    })
}

fn no_address_is_leased_twice_or_lost_whatever_the_api_does() -> Result<()> {
    let mut server = api_server()?;
    let mut machines = Vec::new();
    for (name, seed) in [("n1", 11), ("n2", 12), ("n3", 13)] {
        machines.push(Machine::new(&server, name, seed)?);
    }
    for machine in &machines {
        machine.proxy.set_faults(Faults {
            refused: 100,
            lost: 80,
            cut: 500,
            old: 300,
        });
    }
    let mut random = Random(7);
    let (mut pods, mut story): (Pods, Vec<String>) = (Pods::new(), Vec::new());
    let (mut number, mut added) = (0, 0);
    let begun = Instant::now();
    while begun.elapsed() < LENGTH {
        let at = random.below(machines.len());
        match random.below(12) {
            0 => {
                let what = trouble(&mut machines[at], &mut random)?;
                story.push(format!("n{}: {what}", at + 1));
            }
            1 if random.in_(3) => {
                machines[at].node.reboot()?;
                pods.retain(|_, (on, _)| *on != at);
                machines[at].node.start()?;
                story.push(format!("n{}: rebooted", at + 1));
            }
            2 if random.in_(4) => {
                server.kill_api_server()?;
                thread::sleep(Duration::from_millis(700));
                server.start_api_server()?;
                story.push("API server killed".to_owned());
            }
            3..=6 if !pods.is_empty() => {
                let names: Vec<String> = pods.keys().cloned().collect();
                let name = random.one(&names);
                let (on, address) = pods.remove(name).context("a pod")?;
                machines[on].node.del(name, RANGE)?;
                story.push(format!("n{}: {name} gone from {address}", on + 1));
            }
            _ if pods.len() < MOST_PODS => {
                number += 1;
                let name = format!("pod-{number}");
                // Refused while the node has none and gets none; what is given counts.
                let Ok(address) = machines[at].node.add(&name, RANGE) else {
                    machines[at].node.del(&name, RANGE)?;
                    continue;
                };
                added += 1;
                story.push(format!("n{}: {name} has {address}", at + 1));
                let twice = pods.iter().find(|(_, (_, other))| *other == address);
                ensure!(twice.is_none(), "{twice:?} has {address}: {story:#?}");
                pods.insert(name, (at, address));
            }
            _ => {}
        }
    }
    ensure!(added >= 15, "only {added} of {number} ADDs: {story:#?}");
    for machine in &machines {
        machine.proxy.set_faults(Faults::default());
        machine.proxy.set_reach(Reach::Open);
    }
    // No lease is outside of what its node owns, and API and disks say the same.
    for (at, machine) in machines.iter().enumerate() {
        let node = &machine.node;
        eventually("disk and API say the same", LATE, || {
            Ok(node.owned()? == parts_of(&server, node.name())?)
        })
        .with_context(|| format!("{:?} {:?}", node.owned(), parts(&server)))?;
        let listed = node.addresses(&["--json"])?;
        let document: serde_json::Value = serde_json::from_str(&listed.stdout)?;
        ensure!(
            document["leasesOutside"] == json!([]),
            "{document} {story:#?}"
        );
        let leases = document["leases"].as_array().map_or(0, Vec::len);
        let here = pods.values().filter(|(on, _)| *on == at).count();
        ensure!(leases == here, "{leases} leases, {here} pods: {document}");
    }
    // No address is lost: when all pods are gone, every node gives all of its parts back.
    for (name, (on, _)) in &pods {
        machines[*on].node.del(name, RANGE)?;
    }
    for machine in &machines {
        eventually("the node gives all back", LATE, || {
            let given = machine.node.addresses(&["give-back"])?;
            Ok(given.status.success())
        })?;
    }
    eventually("no part is left", LATE, || Ok(subnets(&server)?.is_empty()))
        .with_context(|| format!("{:?}", parts(&server)))
}
