//! Lists of GPUs and NICs, no wider than 80 columns but for the names of pods, and the matrix, like
//! that of `nvidia-smi topo -m`, which is wider on a node with eight of each.

use std::fmt::Write;

use hca::Hca;
use hca::port::LinkLayer;
use hca::topology::{Class, Gpu, Nic, PciLocation};
use node::table::cell;

use super::view::{View, nearest_nics};
use crate::findings::some_of;
use crate::output::{optional, table};
use crate::pcie_link::{Lanes, PcieLink};

/// What the classes mean, nearest first.
const LEGEND: [(Class, &str); 6] = [
    (Class::X, "itself"),
    (Class::Pix, "at most one PCIe switch between them"),
    (Class::Pxb, "several PCIe switches, no host bridge"),
    (Class::Phb, "through a host bridge"),
    (Class::Node, "between host bridges of one NUMA node"),
    (Class::Sys, "between NUMA nodes"),
];

/// GPUs and NICs, and the notes; before them the matrix, if asked for.
pub(super) fn text(view: &View, with_matrix: bool) -> String {
    let machine = &view.machine;
    let mut text = String::new();
    if machine.gpus.is_empty() && machine.nics.is_empty() {
        text.push_str("neither a GPU nor an RDMA NIC on this node\n");
    } else {
        if with_matrix {
            let _ = writeln!(text, "{}", matrix(view));
        }
        if !machine.gpus.is_empty() {
            let _ = writeln!(text, "{}", gpus(view));
        }
        if !machine.nics.is_empty() {
            let _ = writeln!(text, "{}", nics(view));
        }
        for (class, meaning) in LEGEND {
            let _ = writeln!(text, "{:4} {meaning}", class.label());
        }
    }
    let notes = view.notes();
    if !notes.is_empty() {
        text.push('\n');
    }
    for note in notes {
        let _ = writeln!(text, "note: {note}");
    }
    text
}

fn matrix(view: &View) -> String {
    let machine = &view.machine;
    let gpus = machine.gpus.iter();
    let gpus = gpus.map(|gpu| (format!("GPU{}", gpu.ordinal), &gpu.place));
    let nics = machine.nics.iter().enumerate();
    let nics = nics.map(|(index, nic)| (format!("NIC{index}"), &nic.place));
    let all: Vec<(String, &PciLocation)> = gpus.chain(nics).collect();
    let row = |(name, place): &(String, &PciLocation)| {
        let distances = all
            .iter()
            .map(|(_, other)| machine.distance(place, other).to_string());
        let node = place.numa.and_then(|id| machine.numa.node(id));
        let cpus = optional(node.map(|node| &node.cpus));
        let name = std::iter::once(name.clone());
        name.chain(distances)
            .chain([optional(place.numa), cpus])
            .collect()
    };
    let titles: String = all.iter().map(|(name, _)| format!("  {name}")).collect();
    table(&format!("{titles}  NUMA  CPUs"), all.iter().map(row))
}

fn gpus(view: &View) -> String {
    let row = |gpu: &Gpu| {
        let near = view
            .names(&nearest_nics(&view.machine, &gpu.place))
            .join(" ");
        let class = view.machine.nearest(gpu).map_or("-", Class::label);
        let without = if gpu.driver.is_some() {
            ""
        } else {
            " (no driver)"
        };
        vec![
            format!("GPU{}", gpu.ordinal),
            gpu.place.address.to_string(),
            gpu.title() + without,
            link(view.link(&gpu.place)),
            format!("{class} {near}"),
            cell(&some_of(&view.pods_with(gpu.place.address), 1, "")),
        ]
    };
    let rows = view.machine.gpus.iter().map(row);
    table("GPU  PCI  MODEL  PCIE  NEAREST NICS  POD", rows)
}

fn nics(view: &View) -> String {
    let row = |(index, nic): (usize, &Nic)| {
        let hca = &nic.hca;
        let netdevs = match hca.elsewhere {
            true => "in a pod".to_owned(),
            false => hca.netdev_names().collect::<Vec<_>>().join(","),
        };
        vec![
            format!("NIC{index}"),
            cell(&hca.rdma_names().join(",")),
            cell(&netdevs),
            hca.id.to_string(),
            link_layer(hca.link_layer()).to_owned(),
            rate(hca),
            link(view.link(&nic.place)),
            optional(nic.rail.as_ref().map(|rail| rail.number)),
            cell(&some_of(&view.pods_with(&hca.id), 1, "")),
        ]
    };
    let rows = view.machine.nics.iter().enumerate().map(row);
    table("NIC  RDMA  NETDEV  HCA  LINK  RATE  PCIE  RAIL  POD", rows)
}

/// As short as people say it.
fn link_layer(layer: LinkLayer) -> &'static str {
    match layer {
        LinkLayer::Ethernet => "Eth",
        LinkLayer::InfiniBand => "IB",
        LinkLayer::Unknown => "-",
    }
}

/// Rate of the active ports together.
fn rate(hca: &Hca) -> String {
    match hca.rate_mbps() {
        Some(mbps) => format!("{} Gb/s", mbps / 1000),
        None if hca.elsewhere => "-".to_owned(),
        None => "down".to_owned(),
    }
}

/// What the link runs at, and what it could where that is more. An idle GPU slows its link down
/// to save power, so of a GPU the possible is shown.
fn link(link: PcieLink) -> String {
    let narrower = |current: Lanes, most: Lanes| current.width < most.width;
    match (link.current, link.most) {
        (Some(current), Some(most)) if narrower(current, most) => format!("{current} of {most}"),
        (_, Some(most)) => most.to_string(),
        (Some(current), None) => current.to_string(),
        (None, None) => "-".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hca::topology::Machine;
    use hca_trees::{Tree, machine};

    fn view(lay: impl Fn(&Tree)) -> View {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::new(directory.path());
        lay(&tree);
        let inventory = hca::inventory(&tree.host()).unwrap();
        let machine = Machine::read(
            &tree.host(),
            &inventory,
            hca::topology::gpu::read(&tree.host()).unwrap(),
        )
        .unwrap();
        View::of(&tree.host(), machine)
    }

    fn lines(text: &str) -> Vec<String> {
        text.lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect()
    }

    #[test]
    fn the_matrix_reads_like_that_of_nvidia_smi() {
        let text = text(&view(machine::egx), true);
        let lines = lines(&text);
        assert_eq!(lines[0], "GPU0 GPU1 GPU2 GPU3 NIC0 NIC1 NUMA CPUs");
        assert_eq!(lines[1], "GPU0 X SYS SYS SYS NODE NODE 0 0-19");
        assert_eq!(lines[5], "NIC0 NODE SYS SYS SYS X PIX 0 0-19");
        assert!(
            text.contains("NODE between host bridges of one NUMA node"),
            "{text}"
        );
    }

    #[test]
    fn each_gpu_and_nic_is_listed_with_its_pod() {
        let mut view = view(machine::a4);
        for device in ["0000:8f:00.0", "0000:91:00.0"] {
            view.pods
                .insert(device.into(), ["team/train-0".into()].into());
        }
        let lines = lines(&text(&view, false));
        assert!(lines.contains(
            &"GPU0 0000:8f:00.0 NVIDIA GPU Gen5 x16 PIX mlx5_0 mlx5_1 team/train-0".to_owned()
        ));
        assert!(lines.contains(
            &"NIC0 mlx5_0 gpu0rdma0 0000:91:00.0 Eth 400 Gb/s Gen5 x16 0 team/train-0".to_owned()
        ));
    }

    #[test]
    fn the_lists_fit_a_terminal_of_80_columns() {
        for lay in [machine::a4, machine::egx, machine::p4d] {
            let mut view = view(lay);
            view.pods
                .insert("0000:91:00.0".into(), ["t/a-0".into()].into());
            let text = text(&view, false);
            assert!(!text.contains("GPU0  X"), "no matrix: {text}");
            let lists = text.split("\nX    itself").next().unwrap();
            for line in lists.lines() {
                assert!(line.chars().count() <= 80, "{line}");
            }
        }
    }

    #[test]
    fn a_hypervisor_that_hides_the_switches_is_noted() {
        let notes = |lay: fn(&Tree)| view(lay).notes().join(" ");
        assert!(notes(machine::nd_h100).contains("the hypervisor hides the switches"));
        assert!(!notes(machine::a4).contains("hypervisor"));
    }

    #[test]
    fn a_node_without_anything_says_so() {
        assert_eq!(
            text(&View::default(), false),
            "neither a GPU nor an RDMA NIC on this node\n"
        );
    }

    #[test]
    fn the_document_has_every_cell() {
        let document = view(machine::a4).document();
        assert_eq!(document["distances"]["gpuNic"][0][1]["class"], "PIX");
        assert_eq!(document["distances"]["gpuNic"][7][0]["class"], "SYS");
        assert_eq!(
            document["gpus"][0]["nearestNics"],
            serde_json::json!([0, 1])
        );
        assert_eq!(document["nics"][3]["rail"]["number"], 3);
        assert_eq!(document["nics"][3]["hca"], "0000:99:00.0");
    }
}
