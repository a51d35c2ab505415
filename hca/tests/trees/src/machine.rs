//! Machines of the field as trees of files: GPUs, NICs, switches, NUMA nodes.
//!
//! Addresses of GPUs and the grouping by socket are published facts of these machines. Where
//! NIC addresses or bridge numbers are not, they are chosen so that the published matrix comes
//! out; the functions say so.

use super::{NetdevSpec, On, PciSpec, PortSpec, RdmaSpec, Tree};

const RATE_400: PortSpec<'static> = PortSpec {
    rate: "400 Gb/sec (4X NDR)",
    ..PortSpec::ROCE
};
const RATE_100: PortSpec<'static> = PortSpec::ROCE;

/// Neither Ethernet nor InfiniBand: the driver does not say.
const EFA: PortSpec<'static> = PortSpec {
    link_layer: "Unknown",
    ..PortSpec::ROCE
};

/// A switch with its endpoints: root complex, root port, upstream port, bus of the downstream
/// ports, NUMA node, GPUs and NICs.
struct Switch<'a> {
    root: &'a str,
    port: &'a str,
    upstream: &'a str,
    downstream_bus: &'a str,
    numa_node: i32,
    gpus: &'a [&'a str],
    nics: &'a [&'a [&'a str]],
}

impl Tree {
    /// Lays NUMA nodes of a machine with one node a socket, by their CPU lists.
    pub fn sockets(&self, cpus: &[&str]) {
        for (id, list) in cpus.iter().enumerate() {
            let node = format!("/sys/devices/system/node/node{id}");
            self.file(format!("{node}/cpulist"), list);
            let distances: Vec<&str> = (0..cpus.len())
                .map(|to| if to == id { "10" } else { "21" })
                .collect();
            self.file(format!("{node}/distance"), distances.join(" "));
            let first = list.split(['-', ',']).next().unwrap_or("0");
            let topology = format!("/sys/devices/system/cpu/cpu{first}/topology");
            self.file(format!("{topology}/physical_package_id"), id);
        }
    }

    /// Lays a GPU with its PCIe link and what the NVIDIA driver reports of it.
    pub fn gpu(&self, spec: &PciSpec<'_>, model: &str) {
        self.pci(spec);
        self.pcie_link(spec.address, "32.0 GT/s PCIe", 16);
        let directory = format!("/proc/driver/nvidia/gpus/{}", spec.address);
        let uuid = format!("GPU-{}", spec.address.replace([':', '.'], "-"));
        self.file(
            format!("{directory}/information"),
            format_args!("Model: \t\t {model}\nIRQ:   \t\t 430\nGPU UUID: \t {uuid}"),
        );
    }

    /// Lays a NIC function with its PCIe link, RDMA device and netdev (empty for none).
    pub fn nic(&self, spec: &PciSpec<'_>, rdma: &str, netdev: &str, ports: &[PortSpec<'_>]) {
        self.pci(spec);
        self.pcie_link(spec.address, "32.0 GT/s PCIe", 16);
        let on = On::Pci(spec.address);
        if !netdev.is_empty() {
            self.netdev(&NetdevSpec {
                name: netdev,
                on,
                speed: 400_000,
                ..NetdevSpec::default()
            });
        }
        self.rdma(&RdmaSpec {
            name: rdma,
            on,
            ports,
            ..RdmaSpec::default()
        });
    }

    /// Sets current and greatest speed and width of a function's PCIe link.
    pub fn pcie_link(&self, address: &str, speed: &str, width: u32) {
        let directory = format!("/sys/bus/pci/devices/{address}");
        for which in ["current", "max"] {
            self.file(format!("{directory}/{which}_link_speed"), speed);
            self.file(format!("{directory}/{which}_link_width"), width);
        }
    }

    fn switch(&self, switch: &Switch<'_>, first_nic: usize, netdev: &dyn Fn(usize) -> String) {
        let numa_node = switch.numa_node;
        let bridge = PciSpec {
            vendor: 0x1000,
            device: 0xc030,
            class: 0x06_0400,
            driver: "pcieport",
            numa_node,
            total_vfs: 0,
            ..PciSpec::GPU
        };
        let to_port = format!("{}/{}", switch.root, switch.port);
        let to_upstream = format!("{to_port}/{}", switch.upstream);
        self.pci(&PciSpec {
            address: switch.port,
            above: switch.root,
            ..bridge
        });
        self.pci(&PciSpec {
            address: switch.upstream,
            above: &to_port,
            ..bridge
        });
        let mut slot = 0;
        let mut downstream = || {
            let address = format!("0000:{}:{slot:02x}.0", switch.downstream_bus);
            slot += 1;
            self.pci(&PciSpec {
                address: &address,
                above: &to_upstream,
                ..bridge
            });
            format!("{to_upstream}/{address}")
        };
        for gpu in switch.gpus {
            let above = downstream();
            let spec = PciSpec {
                address: gpu,
                above: &above,
                numa_node,
                ..PciSpec::GPU
            };
            self.gpu(&spec, "NVIDIA GPU");
        }
        let mut number = first_nic;
        for card in switch.nics {
            let above = downstream();
            for function in *card {
                let spec = PciSpec {
                    address: function,
                    above: &above,
                    numa_node,
                    ..PciSpec::MLX5
                };
                self.nic(
                    &spec,
                    &format!("mlx5_{number}"),
                    &netdev(number),
                    &[RATE_400],
                );
                number += 1;
            }
        }
    }

    /// A function on a root complex of its own, directly or below a root port.
    fn alone(&self, spec: &PciSpec<'_>, rdma: Option<(&str, &str)>) {
        match rdma {
            Some((device, netdev)) => self.nic(spec, device, netdev, &[RATE_400]),
            None => self.gpu(spec, "NVIDIA GPU"),
        }
    }
}

/// Google A4 and A3 Ultra: 8 GPUs, 8 NICs, 4 switches, 2 sockets. NIC addresses and bridge
/// numbers are assumed.
pub fn a4(tree: &Tree) {
    tree.sockets(&["0-55,112-167", "56-111,168-223"]);
    let switches = [
        ("8c", "8d", "8e", 0, ["8f", "90"], ["91", "92"]),
        ("93", "94", "95", 0, ["96", "97"], ["98", "99"]),
        ("c1", "c2", "c3", 1, ["c4", "c5"], ["c6", "c7"]),
        ("c8", "c9", "ca", 1, ["cb", "cc"], ["cd", "ce"]),
    ];
    for (number, (root, up, down, numa_node, gpus, nics)) in switches.into_iter().enumerate() {
        let address = |bus: &str| format!("0000:{bus}:00.0");
        let gpus = gpus.map(address);
        let nics = nics.map(address);
        tree.switch(
            &Switch {
                root: &format!("pci0000:{root}"),
                port: &address(root),
                upstream: &address(up),
                downstream_bus: down,
                numa_node,
                gpus: &gpus.each_ref().map(String::as_str),
                nics: &[&[nics[0].as_str()], &[nics[1].as_str()]],
            },
            number * 2,
            &|nic| format!("gpu{nic}rdma0"),
        );
    }
}

/// AWS p4d: on each of four root buses two GPUs and one EFA, without any bridge.
pub fn p4d(tree: &Tree) {
    tree.sockets(&["0-23,48-71", "24-47,72-95"]);
    for (number, (bus, numa_node)) in [("10", 0), ("20", 0), ("90", 1), ("a0", 1)]
        .into_iter()
        .enumerate()
    {
        let above = format!("pci0000:{bus}");
        let at = |slot: &str| format!("0000:{bus}:{slot}.0");
        for slot in ["1c", "1d"] {
            let gpu = PciSpec {
                address: &at(slot),
                above: &above,
                numa_node,
                ..PciSpec::GPU
            };
            tree.gpu(&gpu, "NVIDIA A100-SXM4-40GB");
        }
        let efa = PciSpec {
            address: &at("1b"),
            above: &above,
            vendor: 0x1d0f,
            device: 0xefa1,
            driver: "efa",
            numa_node,
            total_vfs: 0,
            ..PciSpec::MLX5
        };
        tree.nic(&efa, &format!("efa_{number}"), "", &[EFA]);
    }
}

/// The root of a PCI domain that Hyper-V passes through.
pub(super) fn vmbus_root(domain: &str) -> String {
    let bus = "LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00";
    format!("{bus}/00000041-0000-0000-3130-44453{domain}/pci{domain}:00")
}

/// Azure ND H100 v5: each GPU and each NIC on a VMBus root of its own.
pub fn nd_h100(tree: &Tree) {
    tree.sockets(&["0-47", "48-95"]);
    let gpus = [
        "0001", "0002", "0003", "0008", "0009", "000a", "000b", "000c",
    ];
    for (number, domain) in gpus.into_iter().enumerate() {
        let spec = PciSpec {
            address: &format!("{domain}:00:00.0"),
            above: &vmbus_root(domain),
            numa_node: i32::from(number >= 4),
            ..PciSpec::GPU
        };
        tree.alone(&spec, None);
    }
    for number in 0..8 {
        let domain = format!("010{}", number + 1);
        let spec = PciSpec {
            address: &format!("{domain}:00:00.0"),
            above: &vmbus_root(&domain),
            class: 0x02_0700,
            numa_node: i32::from(number >= 4),
            total_vfs: 0,
            ..PciSpec::MLX5
        };
        tree.nic(
            &spec,
            &format!("mlx5_{number}"),
            "",
            &[PortSpec::INFINIBAND],
        );
    }
}

/// GPUs of a Grace tray by PCI domain: the NUMA node of their CPU and that of their memory, which
/// has seven further ones without memory behind it, for slices of the GPU (MIG).
const GRACE_GPUS: [(&str, i32, usize); 4] = [
    ("0008", 0, 2),
    ("0009", 0, 10),
    ("0018", 1, 18),
    ("0019", 1, 26),
];

impl Tree {
    /// Lays the NUMA nodes of two Grace CPUs and their four GPUs. The distances are assumed.
    fn grace(&self) {
        let of = |node: usize| match node {
            0 | 1 => node,
            2..18 => 0,
            _ => 1,
        };
        let distance = |from: usize, to: usize| match (from.min(1) == from, to.min(1) == to) {
            _ if from == to => 10,
            (true, true) => 40,
            (false, false) => 160,
            _ if of(from) == of(to) => 80,
            _ => 120,
        };
        for node in 0..34 {
            let directory = format!("/sys/devices/system/node/node{node}");
            let cpus = ["0-71", "72-143"].get(node).copied().unwrap_or_default();
            self.file(format!("{directory}/cpulist"), cpus);
            let distances: Vec<String> = (0..34).map(|to| distance(node, to).to_string()).collect();
            self.file(format!("{directory}/distance"), distances.join(" "));
        }
        for (cpu, package) in [(0, 0), (72, 1)] {
            let topology = format!("/sys/devices/system/cpu/cpu{cpu}/topology");
            self.file(format!("{topology}/physical_package_id"), package);
        }
        self.file(
            "/proc/cpuinfo",
            "processor\t: 0\nFeatures\t: fp asimd aes pmull sha1 sha2 atomics sve2\n\
             CPU implementer\t: 0x41\nCPU part\t: 0xd4f",
        );
        // 64 KiB pages: a huge page is 512 MiB.
        let huge = "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size";
        self.file(huge, 536_870_912);
    }

    /// Lays a GPU that is joined to a Grace CPU by a coherent link, its memory a NUMA node.
    fn grace_gpu(&self, spec: &PciSpec<'_>, model: &str, memory_node: usize) {
        self.gpu(spec, model);
        self.file(
            format!("/proc/driver/nvidia/gpus/{}/numa_status", spec.address),
            format_args!("Node:      {memory_node}\nStatus:    online\nSize:      2e8000000"),
        );
    }

    /// Lays a function's vital product data: a name, and the UUID that functions of one card share.
    fn vital_product_data(&self, address: &str, uuid: &str) {
        let keyword = format!(
            "V3{}{uuid}",
            char::from(u8::try_from(uuid.len()).unwrap_or(0))
        );
        let section = |tag: char, text: &str| {
            let length = char::from(u8::try_from(text.len()).unwrap_or(0));
            format!("{tag}{length}\0{text}")
        };
        // As bytes: the tags are above 0x7f.
        let text = section('\u{82}', "ConnectX-8") + &section('\u{90}', &keyword) + "x";
        let bytes: Vec<u8> = text.chars().filter_map(|c| u8::try_from(c).ok()).collect();
        self.bytes(format!("/sys/bus/pci/devices/{address}/vpd"), &bytes);
    }
}

/// NVIDIA GB200 compute tray: GPUs and NICs in PCI domains of their own, two of each a socket.
/// NIC domains are assumed.
pub fn gb200(tree: &Tree) {
    tree.grace();
    for (domain, numa_node, memory_node) in GRACE_GPUS {
        let spec = PciSpec {
            address: &format!("{domain}:01:00.0"),
            above: &format!("pci{domain}:00/{domain}:00:00.0"),
            device: 0x2941,
            numa_node,
            ..PciSpec::GPU
        };
        tree.grace_gpu(&spec, "NVIDIA GB200", memory_node);
    }
    let nics = [("0000", 0), ("0002", 0), ("0010", 1), ("0012", 1)];
    for (number, (domain, numa_node)) in nics.into_iter().enumerate() {
        let spec = PciSpec {
            address: &format!("{domain}:03:00.0"),
            above: &format!("pci{domain}:00/{domain}:00:00.0/{domain}:01:00.0/{domain}:02:00.0"),
            numa_node,
            ..PciSpec::MLX5
        };
        tree.nic(
            &spec,
            &format!("mlx5_{number}"),
            &format!("ib{number}"),
            &[RATE_400],
        );
    }
}

/// NVIDIA GB300 compute tray: as GB200, but each GPU has a switch with the function that does the
/// DMA of one `ConnectX-8` (Data Direct). Which NIC belongs to which GPU is as `rdma_topo` prints
/// it for such a tray; slots of switches are assumed.
pub fn gb300(tree: &Tree) {
    tree.grace();
    for (domain, numa_node, memory_node) in GRACE_GPUS {
        let upstream = format!("pci{domain}:00/{domain}:00:00.0/{domain}:01:00.0");
        let bridge = PciSpec {
            vendor: 0x15b3,
            device: 0x197c,
            class: 0x06_0400,
            driver: "pcieport",
            numa_node,
            total_vfs: 0,
            ..PciSpec::GPU
        };
        tree.pci(&PciSpec {
            address: &format!("{domain}:00:00.0"),
            above: &format!("pci{domain}:00"),
            vendor: 0x10de,
            device: 0x22b1,
            ..bridge
        });
        tree.pci(&PciSpec {
            address: &format!("{domain}:01:00.0"),
            above: &format!("pci{domain}:00/{domain}:00:00.0"),
            ..bridge
        });
        for slot in ["00", "03"] {
            tree.pci(&PciSpec {
                address: &format!("{domain}:02:{slot}.0"),
                above: &upstream,
                ..bridge
            });
        }
        let dma = format!("{domain}:03:00.0");
        tree.pci(&PciSpec {
            address: &dma,
            above: &format!("{upstream}/{domain}:02:00.0"),
            device: 0x2100,
            class: 0x08_0100,
            driver: "mlx5_ib",
            ..bridge
        });
        tree.vital_product_data(&dma, &format!("uuid-of-{domain}"));
        let gpu = PciSpec {
            address: &format!("{domain}:06:00.0"),
            above: &format!("{upstream}/{domain}:02:03.0"),
            device: 0x31c2,
            numa_node,
            ..PciSpec::GPU
        };
        tree.grace_gpu(&gpu, "NVIDIA GB300", memory_node);
    }
    // Crosswise: the first NIC belongs to the second GPU of its CPU.
    let nics = [
        ("0000", "0009", 0),
        ("0002", "0008", 0),
        ("0010", "0019", 1),
        ("0012", "0018", 1),
    ];
    for (number, (domain, gpu, numa_node)) in nics.into_iter().enumerate() {
        let address = format!("{domain}:03:00.0");
        let spec = PciSpec {
            address: &address,
            above: &format!("pci{domain}:00/{domain}:00:00.0/{domain}:01:00.0/{domain}:02:00.0"),
            device: 0x1023,
            numa_node,
            ..PciSpec::MLX5
        };
        let name = format!("mlx5_{number}");
        tree.nic(&spec, &name, &format!("ib{number}"), &[RATE_400]);
        tree.vital_product_data(&address, &format!("uuid-of-{gpu}"));
    }
}

/// OCI BM.GPU.H100: 8 GPUs, 8 dual-port cards, 4 of each a socket. That each card shares a
/// switch with one GPU, and the bridge numbers, are assumed.
pub fn oci_h100(tree: &Tree) {
    tree.sockets(&["0-55,112-167", "56-111,168-223"]);
    let cards = ["0c", "2a", "41", "58", "86", "a5", "bd", "d5"];
    let gpus = ["0f", "2d", "44", "5b", "89", "a8", "c0", "d8"];
    for (number, (card, gpu)) in cards.into_iter().zip(gpus).enumerate() {
        let bus = u8::from_str_radix(card, 16).unwrap_or_default();
        let ports = [format!("0000:{card}:00.0"), format!("0000:{card}:00.1")];
        tree.switch(
            &Switch {
                root: &format!("pci0000:{:02x}", bus - 3),
                port: &format!("0000:{:02x}:01.0", bus - 3),
                upstream: &format!("0000:{:02x}:00.0", bus - 2),
                downstream_bus: &format!("{:02x}", bus - 1),
                numa_node: i32::from(number >= 4),
                gpus: &[&format!("0000:{gpu}:00.0")],
                nics: &[&ports.each_ref().map(String::as_str)],
            },
            number * 2,
            &|nic| format!("rdma{nic}"),
        );
    }
}

/// An edge server: four GPUs and one dual-port NIC, each below a root complex of its own.
pub fn egx(tree: &Tree) {
    tree.sockets(&["0-19", "20-39"]);
    let place = |bus: &str, function: u8| {
        let above = u8::from_str_radix(bus, 16).unwrap_or_default() - 1;
        (
            format!("0000:{bus}:00.{function}"),
            format!("pci0000:{above:02x}/0000:{above:02x}:00.0"),
        )
    };
    for (bus, numa_node) in [("12", 0), ("86", 1), ("af", 1), ("d8", 1)] {
        let (address, above) = place(bus, 0);
        let spec = PciSpec {
            address: &address,
            above: &above,
            numa_node,
            ..PciSpec::GPU
        };
        tree.gpu(&spec, "Tesla T4");
    }
    for function in 0..2 {
        let (address, above) = place("37", function);
        let spec = PciSpec {
            address: &address,
            above: &above,
            numa_node: 0,
            ..PciSpec::MLX5
        };
        let netdev = format!("ens2f{function}");
        tree.nic(&spec, &format!("mlx5_{function}"), &netdev, &[RATE_100]);
    }
}

/// Four GPUs on root complexes of their own, of which one also has a NIC; another NIC is alone
/// on the second socket. The shape of a Dell XE8640; all addresses are assumed.
pub fn one_gpu_in_four_near_a_nic(tree: &Tree) {
    tree.sockets(&["0-31", "32-63"]);
    for (bus, numa_node) in [("19", 0), ("4d", 0), ("9b", 1), ("cb", 1)] {
        let spec = PciSpec {
            address: &format!("0000:{bus}:00.0"),
            above: &format!("pci0000:{bus}/0000:{bus}:01.0"),
            numa_node,
            ..PciSpec::GPU
        };
        tree.alone(&spec, None);
    }
    for (number, (root, bus, numa_node)) in [("19", "1a", 0), ("b0", "b1", 1)].iter().enumerate() {
        let spec = PciSpec {
            address: &format!("0000:{bus}:00.0"),
            above: &format!("pci0000:{root}/0000:{root}:03.0"),
            numa_node: *numa_node,
            ..PciSpec::MLX5
        };
        tree.alone(
            &spec,
            Some((&format!("mlx5_{number}"), &format!("ens{number}"))),
        );
    }
}

/// Two GPUs, one a socket, and a NIC with a root complex of its own. The shape of a Dell
/// R760xa; all addresses are assumed.
pub fn no_gpu_near_a_nic(tree: &Tree) {
    tree.sockets(&["0-31", "32-63"]);
    for (bus, numa_node) in [("17", 0), ("ca", 1)] {
        let spec = PciSpec {
            address: &format!("0000:{bus}:00.0"),
            above: &format!("pci0000:{bus}/0000:{bus}:01.0"),
            numa_node,
            ..PciSpec::GPU
        };
        tree.alone(&spec, None);
    }
    let spec = PciSpec {
        address: "0000:9f:00.0",
        above: "pci0000:9e/0000:9e:01.0",
        numa_node: 1,
        ..PciSpec::MLX5
    };
    tree.alone(&spec, Some(("mlx5_0", "ens5np0")));
}

/// On each socket two switches below one root port: the near one has a GPU and a NIC and the far
/// one below it. The shape of servers with cascaded switches; all addresses are assumed.
pub fn cascaded_switches(tree: &Tree) {
    tree.sockets(&["0-31", "32-63"]);
    for (socket, base) in [0x20_u8, 0xa0].into_iter().enumerate() {
        let numa_node = i32::from(socket == 1);
        let at = |bus: u8, slot: u8| format!("0000:{:02x}:{slot:02x}.0", base + bus);
        let near = format!("pci0000:{base:02x}/{}/{}", at(0, 1), at(1, 0));
        let far = format!("{near}/{}/{}", at(2, 2), at(5, 0));
        let number = socket * 2;
        for (above, gpu, nic, which) in [
            (&near, (2, 0, 3), (2, 1, 4), 0),
            (&far, (6, 0, 7), (6, 1, 8), 1),
        ] {
            let below =
                |(bus, slot, own): (u8, u8, u8)| (at(own, 0), format!("{above}/{}", at(bus, slot)));
            let (address, above) = below(gpu);
            let spec = PciSpec {
                address: &address,
                above: &above,
                numa_node,
                ..PciSpec::GPU
            };
            tree.alone(&spec, None);
            let (address, above) = below(nic);
            let spec = PciSpec {
                address: &address,
                above: &above,
                numa_node,
                ..PciSpec::MLX5
            };
            let number = number + which;
            tree.alone(
                &spec,
                Some((&format!("mlx5_{number}"), &format!("rail{number}"))),
            );
        }
    }
}
