//! `rdmactl topology`: GPUs and NICs of this node, and how far they are from each other.
//!
//! - `view`: the machine, its pods and the notes on it; also the JSON document
//! - `matrix`: the view as text

mod matrix;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::bail;
use hca::PciAddress;
use hca::topology::{Machine, Nic};
use node_wire::status::DaemonStatus;
use pools::rails::by_policy;

use crate::global::{Global, NODE};
use crate::node_state::Sources;
use crate::output::{Ended, Exit};
use matrix::text;
use view::View;
pub(crate) use view::nearest_nics;

/// Shows GPUs and NICs, how far they are from each other, and which pods have them.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "A pool with binding: late chooses a pod's NICs by these distances; rdmactl pods shows \
    what it chose."
)]
pub(crate) struct Topology {
    /// Also the distance matrix, like that of "nvidia-smi topo -m"
    #[arg(long, help_heading = NODE)]
    matrix: bool,
    #[command(flatten)]
    sources: Sources,
}

impl Topology {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        let view = self.view(global)?;
        global.say(view.document(), || text(&view, self.matrix));
        Ok(Exit::Good)
    }

    fn view(&self, global: &Global) -> anyhow::Result<View> {
        let scanned = global.scan(&[])?;
        if let Some(why) = scanned.machine_fault {
            bail!("read this host's GPUs and NICs: {why}");
        }
        let (machine, fault) = machine(scanned.machine, &global.policy);
        let mut view = View::of(&global.host(), machine);
        view.remarks.extend(fault);
        match self.sources.daemon() {
            Ok(daemon) => view.pods = pods(&daemon),
            // A node need not have a daemon to have a topology.
            Err(error) if matches!(error.fault, node_wire::Fault::NoSocket) => {}
            Err(error) => {
                let remark = format!("which pods have which NICs is not known: {error}");
                view.remarks.push(remark);
            }
        }
        Ok(view)
    }
}

/// Pods by what they have: HCAs, and GPUs that an HCA was bound to serve.
fn pods(daemon: &DaemonStatus) -> BTreeMap<String, BTreeSet<String>> {
    let mut pods: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut add = |device: &String, pod: String| {
        pods.entry(device.clone()).or_default().insert(pod);
    };
    for held in daemon
        .pools
        .iter()
        .flat_map(|pool| pool.held.iter().flatten())
    {
        for hca in &held.hcas {
            add(hca, format!("{}/{}", held.namespace, held.pod));
        }
    }
    for bound in daemon.bindings.iter().filter(|one| one.ended.is_none()) {
        for device in bound.gpus.iter().map(|gpu| &gpu.gpu).chain([&bound.hca]) {
            add(
                device,
                format!("{}/{}", bound.pod.namespace, bound.pod.name),
            );
        }
    }
    pods
}

/// The machine without VFs and sub-functions whose physical function is listed, with the rails of the
/// policy; why these are not known, if so.
pub(crate) fn machine(mut machine: Machine, policy: &Path) -> (Machine, Option<String>) {
    let whole = machine.nics.iter().filter(|nic| !nic.is_slice());
    let whole: BTreeSet<PciAddress> = whole.map(|nic| nic.place.address).collect();
    let slices = |nic: &Nic| nic.is_slice() && whole.contains(&nic.physical());
    machine.nics.retain(|nic| !slices(nic));
    let fault = by_policy(&mut machine, policy).err();
    if fault.is_some() {
        machine.nics.iter_mut().for_each(|nic| nic.rail = None);
    }
    let fault = fault.map(|why| format!("rails are not known: {why}"));
    (machine, fault)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use hca_trees::{Tree, machine, ports};

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        global: Global,
        #[command(flatten)]
        topology: Topology,
    }

    fn shown(lay: impl Fn(&Tree)) -> String {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        lay(&Tree::new(root));
        let common = ["topology", "--host-root", root.to_str().unwrap()];
        let kubelet = ["--kubelet-root-dir", root.to_str().unwrap()];
        let socket = root.join("node.sock");
        let socket = ["--node-socket", socket.to_str().unwrap()];
        let policy = root.join("policy.json");
        let policy = ["--policy", policy.to_str().unwrap()];
        let flags = [&common[..], &kubelet, &socket, &policy].concat();
        let line = Line::try_parse_from(flags).unwrap();
        let view = line.topology.view(&line.global).unwrap();
        text(&view, line.topology.matrix)
    }

    #[test]
    fn virtual_functions_of_a_listed_nic_are_left_out() {
        let lay = |tree: &Tree| {
            machine::a4(tree);
            let above = "pci0000:8c/0000:8c:00.0/0000:8d:00.0/0000:8e:02.0";
            let spec = hca_trees::PciSpec {
                address: "0000:91:00.2",
                above,
                ..hca_trees::PciSpec::MLX5
            };
            tree.vf("0000:91:00.0", 0, &spec);
            let on = hca_trees::On::Pci("0000:91:00.2");
            tree.rdma(&hca_trees::RdmaSpec {
                name: "mlx5_8",
                on,
                ..Default::default()
            });
        };
        assert!(!shown(lay).contains("mlx5_8"));
    }

    #[test]
    fn rails_are_those_of_the_policy_or_unknown() {
        let with = |policy: &'static str| {
            shown(|tree: &Tree| {
                machine::a4(tree);
                tree.file("/policy.json", policy);
            })
        };
        let policy = r#"{"rails": {"gpu0rdma0": 77}}"#;
        assert!(with(policy).contains("77"), "{}", with(policy));
        let wrong = with(r#"{"rails": {"gpu0rdma0": 777}}"#);
        assert!(wrong.contains("rails are not known"), "{wrong}");
    }

    #[test]
    fn an_hca_with_several_ports_is_one_nic_with_their_rate() {
        for (lay, name, rate) in [
            (ports::xdr_with_smi as fn(&Tree), "mlx5_0", "800"),
            (
                ports::four_planes,
                "eth_r0_p0,eth_r0_p1,eth_r0_p2,eth_r0_p3",
                "800",
            ),
            (ports::multiport_eswitch, "ens1f0np0,ens1f1np1", "200"),
            (ports::cabled_on_port_2, "ens1,ens1d1", "40"),
        ] {
            let text = shown(lay);
            assert!(text.contains(name) && text.contains(rate), "{text}");
            assert!(!text.contains("smi1"), "{text}");
        }
    }
}
