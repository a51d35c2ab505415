//! `rdmactl topology`: GPUs and NICs of this node, and which NICs to take for which GPUs.
//!
//! - `view`: the machine, its holders and the notes on it; also the JSON document
//! - `matrix`: the view as text

mod matrix;
mod view;

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::Context;
use hca::topology::{Machine, Nic, Request, choose};
use hca::{Host, PciAddress};
use kubelet_api::client::Held;
use rdma_device_plugin::nccl;

use crate::global::Global;
use crate::holders::{self, Holders};
use crate::node_state::{Sources, hardware};
use crate::output::{Ended, Outcome};
use matrix::text;
use view::View;

/// Shows how far GPUs and NICs are from each other, and chooses NICs for GPUs.
#[derive(Debug, clap::Args)]
#[command(after_help = "A GPU is named by position, PCI address or UUID.")]
pub(crate) struct Topology {
    /// Also the distance matrix, like that of "nvidia-smi topo -m"
    #[arg(long)]
    matrix: bool,
    /// Choose NICs for these GPUs
    #[arg(long, value_name = "GPU,..", value_delimiter = ',')]
    gpus: Vec<String>,
    /// How many NICs to choose [default: one for each GPU]
    #[arg(long, value_name = "COUNT")]
    nics: Option<usize>,
    /// Take PCI locations from an NCCL topology file
    #[arg(long, value_name = "FILE")]
    nccl_topology: Option<PathBuf>,
    #[command(flatten)]
    sources: Sources,
}

impl Topology {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        let host = global.host();
        let view = self.view(&host)?;
        global.say(view.document(), || text(&view, self.matrix));
        Ok(Outcome::Good)
    }

    fn view(&self, host: &Host) -> anyhow::Result<View> {
        let read = hardware(host.clone())?;
        let (mut machine, gpus) = read.context("read this host's GPUs and NICs")?;
        leave_out_slices(&mut machine);
        let mut view = View {
            machine,
            ..View::default()
        };
        if let Some(file) = &self.nccl_topology {
            let absent = view.machine.place(&nccl::read(file)?);
            let file = file.display();
            let remark = format!("PCI locations are from {file}, not from the PCI tree");
            view.remarks.push(remark);
            if !absent.is_empty() {
                let absent: Vec<String> = absent.iter().map(ToString::to_string).collect();
                let absent = absent.join(", ");
                let remark =
                    format!("{file} also speaks of {absent}, which this node does not have");
                view.remarks.push(remark);
            }
        }
        let mut held = self.bound(&mut view.remarks);
        match self.sources.kubelet() {
            Ok(devices) => held.extend(devices.held),
            // A node need not have a kubelet to have a topology.
            Err(kubelet_api::client::Error::NoSocket(_)) => {}
            Err(error) => {
                let remark = format!("which pod has what is not known: {error}");
                view.remarks.push(remark);
            }
        }
        view.holders = Holders::collect(&gpus, held);
        if self.nics.is_some() || !self.gpus.is_empty() {
            let request = self.request(&view)?;
            view.choice = Some(choose(&view.machine, &request).context("choose NICs")?);
        }
        Ok(view)
    }

    /// Pods with the HCAs that their slots are bound to: the kubelet knows the slots alone.
    fn bound(&self, remarks: &mut Vec<String>) -> Vec<Held> {
        match self.sources.daemon() {
            Ok(daemon) => holders::bound(&daemon).collect(),
            // A node need not have a daemon to have a topology.
            Err(error) if matches!(error.fault, node_wire::Fault::NoSocket) => Vec::new(),
            Err(error) => {
                remarks.push(format!("which slot is which NIC is not known: {error}"));
                Vec::new()
            }
        }
    }

    fn request(&self, view: &View) -> anyhow::Result<Request> {
        let machine = &view.machine;
        let gpus = self.gpus.iter().map(|name| {
            let gpu = machine.gpu_named(name);
            gpu.with_context(|| {
                format!(
                    "there is no GPU {name}: this node has {}",
                    machine.gpus.len()
                )
            })
        });
        let gpus: BTreeSet<usize> = gpus.collect::<anyhow::Result<_>>()?;
        // Shares of a NIC that pods have do not take the NIC itself; a moved one is gone.
        let is_taken = |nic: &Nic| nic.elsewhere || view.holders.nic_as_a_whole(nic);
        let nics = machine.nics.iter().enumerate();
        let taken = nics
            .filter(|(_, nic)| is_taken(nic))
            .map(|(index, _)| index);
        Ok(Request {
            count: self.nics.unwrap_or(gpus.len()),
            gpus,
            taken: taken.collect(),
            ..Request::default()
        })
    }
}

/// The document of a machine alone.
#[cfg(test)]
pub(crate) fn document_of(mut machine: Machine) -> serde_json::Value {
    leave_out_slices(&mut machine);
    let view = View {
        machine,
        ..View::default()
    };
    view.document()
}

/// Leaves out VFs and sub-functions whose physical function is listed.
fn leave_out_slices(machine: &mut Machine) {
    let whole = machine.nics.iter().filter(|nic| !nic.is_slice());
    let whole: BTreeSet<PciAddress> = whole.map(|nic| nic.place.address).collect();
    let slices = |nic: &Nic| nic.is_slice() && whole.contains(&nic.physical);
    machine.nics.retain(|nic| !slices(nic));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    use clap::Parser;
    use hca_trees::{Tree, machine};

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        global: Global,
        #[command(flatten)]
        topology: Topology,
    }

    fn run(lay: impl Fn(&Tree), flags: &[&str]) -> Result<String, String> {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        lay(&Tree::new(root));
        let common = ["topology", "--host-root", root.to_str().unwrap()];
        let kubelet = ["--kubelet-root-dir", root.to_str().unwrap()];
        let socket = root.join("node.sock");
        let socket = ["--node-socket", socket.to_str().unwrap()];
        let flags: Vec<&str> = common
            .into_iter()
            .chain(kubelet)
            .chain(socket)
            .chain(flags.to_vec())
            .collect();
        let line = Line::try_parse_from(flags).map_err(|error| error.to_string())?;
        let view = line.topology.view(&line.global.host());
        let view = view.map_err(|error| format!("{error:#}"))?;
        Ok(text(&view, line.topology.matrix))
    }

    #[test]
    fn nics_are_chosen_for_gpus_by_any_of_their_names() {
        for gpus in ["0,7", "0000:8f:00.0,0000:cc:00.0", "GPU-0000-8f-00-0,7"] {
            let text = run(machine::a4, &["--gpus", gpus]).unwrap();
            assert!(text.contains("\nchosen: mlx5_0 mlx5_7\n"), "{text}");
        }
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_known_ones() {
        let error = run(machine::egx, &["--gpus", "9"]).unwrap_err();
        assert_eq!(error, "there is no GPU 9: this node has 4");
    }

    #[test]
    fn a_topology_file_shows_what_the_hypervisor_hides() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("topology.xml");
        let pair = |gpu: &str, nic: &str, n: u8| {
            format!(
                "<pci busid='ffff:ff:0{n}.0'><pci busid='{gpu}:00:00.0'/>\
                 <pci busid='{nic}:00:00.0'/></pci>"
            )
        };
        let pairs = [
            pair("0001", "0102", 1),
            pair("0002", "0101", 2),
            pair("0004", "0103", 3),
        ];
        let text = format!("<system><cpu numaid='0'>{}</cpu></system>", pairs.concat());
        fs::write(&file, text).unwrap();
        let flags = ["--nccl-topology", file.to_str().unwrap(), "--gpus", "0"];
        let text = run(machine::nd_h100, &flags).unwrap();
        assert!(text.contains("chosen: mlx5_1\n"), "{text}");
        assert!(
            text.contains("also speaks of 0004:00:00.0, which this node does not have"),
            "{text}"
        );

        fs::write(&file, "<system/>").unwrap();
        let error = run(machine::nd_h100, &flags).unwrap_err();
        assert!(error.contains("topology.xml: no pci element"), "{error}");
    }

    #[test]
    fn virtual_functions_are_shown_only_when_asked_for() {
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
        assert!(!run(lay, &[]).unwrap().contains("mlx5_8"));
    }
}
