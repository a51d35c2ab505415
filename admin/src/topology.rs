//! `rdmactl topology`: GPUs and NICs of this node, and which NICs to take for which GPUs.
//!
//! - `alignment`: pods whose NICs are farther from their GPUs than they need be
//! - `holders`: which pod has which device, from the kubelet's device IDs
//! - `view`: the machine, its holders and the notes on it; also the JSON document
//! - `matrix`: the view as text

mod alignment;
mod holders;
mod matrix;
mod view;

pub(crate) use alignment::{Misaligned, alignment};
pub(crate) use holders::{Held, Holders};

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, anyhow, bail};
use hca::topology::{Machine, Request, Wanted, choose};
use hca::{Host, PciAddress};
use rdma_device_plugin::{Gpus, nccl, scan::SCAN};
use serde_json::Value;

use crate::global::{Global, within_limit};
use crate::node_state::Sources;
use crate::output::{Ended, Outcome, say, say_json};
use matrix::{text, text_with_matrix};
use view::View;

/// Shows how far GPUs and NICs are from each other, and chooses NICs for GPUs.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "A NIC is named by RDMA device, netdev, PCI address or position, a GPU by \
    position, PCI address or UUID.\nWith --strict, exit status 1 says that the NICs would be \
    farther than they need be."
)]
pub(crate) struct Topology {
    /// Also the matrix of all distances, as of "nvidia-smi topo -m"
    #[arg(long)]
    matrix: bool,
    /// Also NICs without RDMA, and virtual functions beside their physical function
    #[arg(long)]
    all: bool,
    /// Choose NICs for these GPUs
    #[arg(long, value_name = "GPU,..", value_delimiter = ',')]
    gpus: Vec<String>,
    /// How many NICs to choose [default: one for each GPU]
    #[arg(long, value_name = "COUNT")]
    nics: Option<usize>,
    /// NICs that have to be among the chosen
    #[arg(long, value_name = "NIC,..", value_delimiter = ',')]
    include: Vec<String>,
    /// NICs that cannot be chosen, beside those that pods have
    #[arg(long, value_name = "NIC,..", value_delimiter = ',')]
    taken: Vec<String>,
    /// Choose on these NUMA nodes only
    #[arg(long, value_name = "NODE,..", value_delimiter = ',')]
    numa: Vec<u32>,
    /// Let two pods have a port each of one card
    #[arg(long)]
    share_cards: bool,
    /// Refuse NICs that are farther than they need be
    #[arg(long)]
    strict: bool,
    /// Take places from a NCCL topology file
    #[arg(long, value_name = "FILE")]
    nccl_topology: Option<PathBuf>,
    /// Number a NIC's rail
    #[arg(long, value_name = "PCI=RAIL,..", value_delimiter = ',')]
    rail: Vec<Numbered>,
    #[command(flatten)]
    sources: Sources,
}

/// One part of `--rail`.
#[derive(Debug, Clone, Copy)]
struct Numbered(PciAddress, u32);

impl FromStr for Numbered {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text.split_once('=');
        let parsed =
            parts.and_then(|(nic, rail)| Some(Self(nic.parse().ok()?, rail.parse().ok()?)));
        parsed.ok_or("expected a physical function and a number such as 0000:3b:00.0=0")
    }
}

impl Topology {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        let (text, document) = self.printed(global)?;
        match global.json {
            true => say_json(document),
            false => say(&text),
        }
        Ok(Outcome::Good)
    }

    /// The text and the document.
    fn printed(&self, global: &Global) -> anyhow::Result<(String, Value)> {
        let host = global.host();
        let mut view = self.view(&host)?;
        if self.nics.is_some() || !self.gpus.is_empty() {
            let request = self.request(&view)?;
            view.choice = Some(choose(&view.machine, &request).context("choose NICs")?);
        } else if !self.include.is_empty() || self.strict {
            bail!("--include and --strict belong to --gpus or --nics: there is nothing to choose");
        }
        let text = match self.matrix {
            true => text_with_matrix(&view),
            false => text(&view),
        };
        Ok((text, view.document()))
    }

    fn view(&self, host: &Host) -> anyhow::Result<View> {
        let wanted = Wanted {
            without_rdma: self.all,
            rails: self
                .rail
                .iter()
                .map(|Numbered(nic, rail)| (*nic, *rail))
                .collect(),
        };
        let read_host = host.clone();
        let read = move || {
            let inventory = hca::inventory(&read_host).context("scan this host")?;
            Machine::read(&read_host, &inventory, &wanted).context("read this host's PCI tree")
        };
        let mut machine = within_limit(SCAN, read)??;
        self.refuse_unknown_rails(&machine)?;
        if !self.all {
            leave_out_slices(&mut machine);
        }
        let mut view = View {
            machine,
            ..View::default()
        };
        if let Some(file) = &self.nccl_topology {
            let absent = view.machine.place(&nccl::read(file)?);
            view.override_source = Some(file.display().to_string());
            if !absent.is_empty() {
                let absent: Vec<String> = absent.iter().map(ToString::to_string).collect();
                view.remarks.push(format!(
                    "{} also speaks of {}, which this node does not have",
                    file.display(),
                    absent.join(", ")
                ));
            }
        }
        let mut held = self.bound(&mut view.remarks);
        match self.sources.kubelet() {
            Ok(devices) => held.extend(devices.held.into_iter().flat_map(|held| {
                let pod = format!("{}/{}", held.namespace, held.pod);
                held.ids.into_iter().map(move |id| Held {
                    pod: pod.clone(),
                    resource: held.resource.clone(),
                    id,
                })
            })),
            // A node need not have a kubelet to have a topology.
            Err(kubelet_api::client::Error::NoSocket(_)) => {}
            Err(error) => view
                .remarks
                .push(format!("which pod has what is not known: {error}")),
        }
        let gpus = Gpus::on(host, view.machine.gpus.clone());
        view.holders = Holders::collect(&gpus, held);
        Ok(view)
    }

    /// Pods with the HCAs that their slots are bound to: the kubelet knows the slots alone.
    fn bound(&self, remarks: &mut Vec<String>) -> Vec<Held> {
        match self.sources.daemon() {
            Ok(daemon) => {
                let bindings = daemon.bindings.into_iter();
                bindings
                    .map(|one| Held {
                        pod: format!("{}/{}", one.pod.namespace, one.pod.name),
                        resource: one.resource,
                        id: one.hca,
                    })
                    .collect()
            }
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
            machine.gpu_named(name).ok_or_else(|| {
                anyhow!(
                    "there is no GPU {name}: this node has {}",
                    machine.gpus.len()
                )
            })
        });
        let gpus: BTreeSet<usize> = gpus.collect::<anyhow::Result<_>>()?;
        let include = named_nics(machine, &self.include)?;
        let mut taken = named_nics(machine, &self.taken)?;
        // Shares of a NIC that pods have do not take the NIC itself; a moved one is gone.
        let gone = machine
            .nics
            .iter()
            .enumerate()
            .filter(|(_, nic)| nic.elsewhere);
        taken.extend(gone.map(|(index, _)| index));
        let held = machine
            .nics
            .iter()
            .enumerate()
            .filter(|(_, nic)| view.holders.nic_as_a_whole(nic));
        taken.extend(held.map(|(index, _)| index));
        Ok(Request {
            count: self.nics.unwrap_or(gpus.len()),
            gpus,
            include,
            taken,
            barred: BTreeSet::new(),
            numa: (!self.numa.is_empty()).then(|| self.numa.iter().copied().collect()),
            share_cards: self.share_cards,
            strict: self.strict,
        })
    }

    fn refuse_unknown_rails(&self, machine: &Machine) -> anyhow::Result<()> {
        for Numbered(address, rail) in &self.rail {
            if !machine.nics.iter().any(|nic| nic.physical == *address) {
                bail!("--rail {address}={rail}: {address} is not a NIC of this node");
            }
        }
        Ok(())
    }
}

fn named_nics(machine: &Machine, names: &[String]) -> anyhow::Result<BTreeSet<usize>> {
    let nics = names.iter().map(|name| {
        machine.nic_named(name).ok_or_else(|| {
            let known: Vec<String> = machine.nics.iter().map(hca::topology::Nic::title).collect();
            anyhow!("there is no NIC {name}: this node has {}", known.join(", "))
        })
    });
    nics.collect()
}

/// Leaves out VFs and sub-functions whose physical function is listed.
fn leave_out_slices(machine: &mut Machine) {
    let whole: BTreeSet<PciAddress> = machine
        .nics
        .iter()
        .filter(|nic| !nic.is_slice())
        .map(|nic| nic.place.address)
        .collect();
    machine
        .nics
        .retain(|nic| !nic.is_slice() || !whole.contains(&nic.physical));
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
        let printed = line.topology.printed(&line.global);
        Ok(printed.map_err(|error| format!("{error:#}"))?.0)
    }

    #[test]
    fn nics_are_chosen_for_gpus_by_any_of_their_names() {
        for gpus in ["0,7", "0000:8f:00.0,0000:cc:00.0", "GPU-0000-8f-00-0,7"] {
            let text = run(machine::a4, &["--gpus", gpus]).unwrap();
            assert!(text.contains("\nchosen: mlx5_0 mlx5_7\n"), "{text}");
        }
        let text = run(machine::a4, &["--nics", "2", "--include", "gpu5rdma0"]).unwrap();
        assert!(text.contains("\nchosen: mlx5_4 mlx5_5\n"), "{text}");
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_known_ones() {
        let error = run(machine::egx, &["--gpus", "9"]).unwrap_err();
        assert_eq!(error, "there is no GPU 9: this node has 4");
        let error = run(machine::egx, &["--nics", "1", "--taken", "mlx5_7"]).unwrap_err();
        assert_eq!(
            error,
            "there is no NIC mlx5_7: this node has mlx5_0, mlx5_1"
        );
        let error = run(machine::egx, &["--rail", "0000:01:00.0=1"]).unwrap_err();
        assert_eq!(
            error,
            "--rail 0000:01:00.0=1: 0000:01:00.0 is not a NIC of this node"
        );
        assert!(
            run(machine::egx, &["--strict"])
                .unwrap_err()
                .contains("nothing to choose")
        );
    }

    #[test]
    fn strict_refuses_what_is_farther_than_need_be() {
        let flags = ["--gpus", "0", "--taken", "0,1", "--strict"];
        let error = run(machine::a4, &flags).unwrap_err();
        assert_eq!(
            error,
            "choose NICs: the nearest free NIC for GPU 0 is mlx5_2 at NODE, where PIX can be had \
             on this machine"
        );
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
        assert!(run(lay, &["--all"]).unwrap().contains("mlx5_8"));
    }
}
