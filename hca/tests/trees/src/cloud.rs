//! Nodes of clouds and racks as a daemon finds them: NICs of the fabric, and beside them those that
//! are not for pods. Facts are published; assumptions are marked.

use std::net::Ipv6Addr;

use super::machine::{a4, nd_h100, oci_h100, vmbus_root};
use super::{NetdevSpec, On, PciSpec, PortSpec, RdmaSpec, Tree};

/// A function that is not a fabric's NIC: address, PCI IDs, driver.
fn plain(address: &str, id: (u16, u16), driver: &str, lay: impl FnOnce(&PciSpec<'_>)) {
    let domain = address.split_at(4).0;
    lay(&PciSpec {
        address,
        above: &format!("pci{domain}:00"),
        vendor: id.0,
        device: id.1,
        driver,
        numa_node: 0,
        total_vfs: 0,
        ..PciSpec::MLX5
    });
}

impl Tree {
    /// Lays a netdev on a PCI function without RDMA.
    fn plain_nic(&self, address: &str, id: (u16, u16), driver: &str, netdev: &str) {
        plain(address, id, driver, |spec| self.pci(spec));
        self.netdev(&NetdevSpec {
            name: netdev,
            on: On::Pci(address),
            mtu: 1500,
            ..NetdevSpec::default()
        });
    }

    /// Makes one netdev the master of another one, as a bond and Hyper-V's netvsc are.
    fn enslave(&self, master: &str, member: &str) {
        let [above, below] =
            [master, member].map(|name| self.resolved(format!("/sys/class/net/{name}")));
        self.link(above.join(format!("lower_{member}")), &below);
        self.link(below.join(format!("upper_{master}")), &above);
        self.link(below.join("master"), &above);
    }

    /// Lays Hyper-V's netdev `eth0`, which carries the node.
    fn netvsc(&self) {
        self.netdev(&NetdevSpec {
            name: "eth0",
            on: On::Vmbus("000d3a01-0203-000d-3a01-0203000d3a01", "hv_netvsc"),
            mtu: 1500,
            ..NetdevSpec::default()
        });
        self.default_route("eth0");
    }

    /// Gives the host IPv6 default routes that were learned from router advertisements.
    fn advertised_routes(&self, netdevs: &[String]) {
        for netdev in netdevs {
            self.route(netdev, Ipv6Addr::UNSPECIFIED.into(), true);
        }
    }

    /// Takes away what only a physical function has: a VM sees its VFs as plain functions.
    fn pass_through(&self, address: &str, device: &str) {
        let directory = format!("/sys/bus/pci/devices/{address}");
        self.remove(format!("{directory}/sriov_totalvfs"));
        self.remove(format!("{directory}/sriov_numvfs"));
        self.file(format!("{directory}/device"), device);
    }
}

/// GKE A3 Ultra and A4: the eight NICs are `ConnectX-7` VFs (15b3:101e, which Open MPI prints as part
/// 4126 in the MPI example of the DRANET project), named `gpu0rdma0` to `gpu7rdma0`; two gVNICs
/// (1ae0:0042, driver `gve`) carry the node. Addresses of the gVNICs are assumed.
pub fn gke(tree: &Tree) {
    a4(tree);
    for bus in ["91", "92", "98", "99", "c6", "c7", "cd", "ce"] {
        tree.pass_through(&format!("0000:{bus}:00.0"), "0x101e");
    }
    tree.plain_nic("0000:00:04.0", (0x1ae0, 0x0042), "gve", "eth0");
    tree.plain_nic("0000:00:05.0", (0x1ae0, 0x0042), "gve", "eth1");
    tree.default_route("eth0");
}

/// Azure ND H100 v5: InfiniBand functions in domains 0101 to 0108 (`ndv5-topo.xml` of
/// Azure/azhpc-images), and Accelerated Networking: a netvsc netdev with an mlx5 VF below it (Azure
/// docs, "How Accelerated Networking works"). The VF's domain is assumed.
pub fn azure_nd_h100(tree: &Tree) {
    nd_h100(tree);
    let vf = "0100:00:02.0";
    plain(vf, (0x15b3, 0x101a), "mlx5_core", |spec| {
        tree.nic(spec, "mlx5_an0", "enP256s1", &[PortSpec::ROCE]);
    });
    tree.netvsc();
    tree.enslave("eth0", "enP256s1");
}

/// Azure ND GB300 v6 (`Standard_ND128isr_GB300_v6`, 128 cores), as `examples/azure_aks_examples/gb300`
/// in kubernetes-sigs/dranet lists a live node: two NUMA nodes, GPUs at 0008:06:00.0 to 0019:06:00.0,
/// and in domains 0101 to 0104 `ConnectX` VFs with InfiniBand of 800 Gb/s and without a netdev.
/// Assumed: bridges above the GPUs as in a bare tray, VMBus roots as on ND H100 v5, which cores are of
/// which node. Not published, thus absent: a VF below `eth0`, NUMA nodes of the GPUs' memory, functions
/// of Data Direct.
pub fn azure_nd_gb300(tree: &Tree) {
    tree.sockets(&["0-63", "64-127"]);
    for (domain, numa_node) in [("0008", 0), ("0009", 0), ("0018", 1), ("0019", 1)] {
        let gpu = PciSpec {
            address: &format!("{domain}:06:00.0"),
            above: &format!("pci{domain}:00/{domain}:00:00.0/{domain}:01:00.0/{domain}:02:03.0"),
            device: 0x31c2,
            numa_node,
            ..PciSpec::GPU
        };
        tree.gpu(&gpu, "NVIDIA GB300");
    }
    for (number, numa_node) in [0, 0, 1, 1].into_iter().enumerate() {
        let domain = format!("010{}", number + 1);
        let port = PortSpec {
            rate: "800 Gb/sec (4X XDR)",
            ..PortSpec::INFINIBAND
        };
        tree.nic(
            &PciSpec {
                address: &format!("{domain}:00:00.0"),
                above: &vmbus_root(&domain),
                device: 0x101e,
                class: 0x02_0700,
                numa_node,
                total_vfs: 0,
                ..PciSpec::MLX5
            },
            &format!("mlx5_{number}"),
            "",
            &[port],
        );
    }
    tree.netvsc();
}

/// OCI BM.GPU.H100: sixteen RoCE ports on eight cards, each of which learns a default route from
/// router advertisements, with one VF each as oracle-quickstart/oci-hpc-oke makes them; and a NIC for
/// the VCN. Names of VFs and of the VCN's netdev are assumed.
pub fn oci(tree: &Tree) {
    oci_h100(tree);
    let ports = ["0c", "2a", "41", "58", "86", "a5", "bd", "d5"];
    let ports = ports.into_iter().flat_map(|bus| [(bus, 0), (bus, 1)]);
    for (number, (bus, function)) in ports.enumerate() {
        let pf = format!("0000:{bus}:00.{function}");
        let address = format!("0000:{bus}:0{}.2", function + 1);
        let above = std::fs::canonicalize(tree.path(format!("/sys/bus/pci/devices/{pf}/..")));
        let above = above.expect("the port was laid");
        let above = above.strip_prefix(tree.path("/sys/devices"));
        tree.vf(
            &pf,
            0,
            &PciSpec {
                address: &address,
                above: &above.expect("below the devices").to_string_lossy(),
                device: 0x101e,
                numa_node: i32::from(number >= 8),
                ..PciSpec::MLX5
            },
        );
        let on = On::Pci(&address);
        tree.netdev(&NetdevSpec {
            name: &format!("rdma{number}v0"),
            on,
            mtu: 4220,
            ..NetdevSpec::default()
        });
        tree.rdma(&RdmaSpec {
            name: &format!("mlx5_{}", number + 16),
            on,
            ..RdmaSpec::default()
        });
    }
    tree.plain_nic("0000:1f:00.0", (0x14e4, 0x1750), "bnxt_en", "eth0");
    tree.default_route("eth0");
    let of = |number| [format!("rdma{number}"), format!("rdma{number}v0")];
    tree.advertised_routes(&(0..16).flat_map(of).collect::<Vec<_>>());
}

/// An EFA as the driver shows it: neither Ethernet nor InfiniBand, without a node GUID.
fn efa(tree: &Tree, address: &str, above: &str, numa_node: i32, name: &str) {
    tree.pci(&PciSpec {
        address,
        above,
        vendor: 0x1d0f,
        device: 0xefa2,
        driver: "efa",
        numa_node,
        total_vfs: 0,
        ..PciSpec::MLX5
    });
    tree.rdma(&RdmaSpec {
        name,
        on: On::Pci(address),
        node_guid: "0000:0000:0000:0000",
        node_type: "7: unspecified",
        vendor_attributes: false,
        mad: false,
        ports: &[PortSpec {
            link_layer: "Unknown",
            gid_entries: 1,
            ..PortSpec::ROCE
        }],
        ..RdmaSpec::default()
    });
}

/// AWS P5: on each of eight switches four EFA and one GPU (`p5.48xl-topo.xml` of aws/aws-ofi-nccl;
/// names as the EFA device plugin lists them in aws/eks-charts), and an ENA for the node. The generation
/// of the EFA is assumed.
pub fn p5(tree: &Tree) {
    tree.sockets(&["0-47,96-143", "48-95,144-191"]);
    for number in 0..8_u8 {
        let first = 0x4f + 0x11 * number;
        let numa_node = i32::from(number >= 4);
        let port = format!("pci0000:{:02x}/0000:{:02x}:00.0", first - 3, first - 3);
        let upstream = format!("{port}/0000:{:02x}:00.0", first - 2);
        let below = |slot: u8| format!("{upstream}/0000:{:02x}:{slot:02x}.0", first - 1);
        let bridge = PciSpec {
            vendor: 0x1000,
            device: 0xc030,
            class: 0x06_0400,
            driver: "pcieport",
            numa_node,
            ..PciSpec::GPU
        };
        for slot in 0..5 {
            let address = format!("0000:{:02x}:{slot:02x}.0", first - 1);
            tree.pci(&PciSpec {
                address: &address,
                above: &upstream,
                ..bridge
            });
        }
        for slot in 0..4 {
            let bus = first + slot;
            let address = format!("0000:{bus:02x}:00.0");
            let name = format!("rdmap{bus}s0");
            efa(tree, &address, &below(slot), numa_node, &name);
        }
        let gpu = PciSpec {
            address: &format!("0000:{:02x}:00.0", first + 4),
            above: &below(4),
            numa_node,
            ..PciSpec::GPU
        };
        tree.gpu(&gpu, "NVIDIA H100 80GB HBM3");
    }
    tree.plain_nic("0000:00:05.0", (0x1d0f, 0xec20), "ena", "ens5");
    tree.default_route("ens5");
}

/// An RDMA function and the NIC whose traffic it carries: a GID, and the netdev that the table names,
/// lead to the NIC.
struct Apart<'a> {
    nic: (&'a str, (u16, u16), &'a str, &'a str),
    rdma: (&'a str, (u16, u16), &'a str, &'a str),
    node_type: &'a str,
    gid: (&'a str, &'a str),
}

impl Tree {
    fn apart(&self, spec: &Apart<'_>) {
        let (address, id, driver, netdev) = spec.nic;
        self.plain_nic(address, id, driver, netdev);
        let (address, id, driver, name) = spec.rdma;
        plain(address, id, driver, |function| self.pci(function));
        self.rdma(&RdmaSpec {
            name,
            on: On::Pci(address),
            node_type: spec.node_type,
            vendor_attributes: false,
            mad: false,
            ports: &[PortSpec {
                gids: &[(0, spec.gid.0, "RoCE v2", spec.gid.1)],
                ..PortSpec::ROCE
            }],
            ..RdmaSpec::default()
        });
    }
}

/// Alibaba ECS with eRDMA (1ded:107f, README of the erdma driver): it stands beside the virtio NIC of
/// its elastic network interface; a second interface is for pods. It is an iWARP device whose one GID
/// is the NIC's address (`erdma_query_gid`). PCI addresses are assumed.
pub fn erdma(tree: &Tree) {
    tree.plain_nic("0000:00:05.0", (0x1af4, 0x1000), "virtio-pci", "eth0");
    tree.file("/sys/class/net/eth0/address", "00:16:3e:00:00:05");
    tree.apart(&Apart {
        nic: ("0000:00:06.0", (0x1af4, 0x1000), "virtio-pci", "eth1"),
        rdma: ("0000:00:07.0", (0x1ded, 0x107f), "erdma", "erdma_0"),
        node_type: "4: RNIC",
        gid: ("b859:9f00:0001:0000:0000:0000:0000:0000", ""),
    });
    tree.default_route("eth0");
}

/// `VMware` with a paravirtual RDMA adapter (15ad:0820, `vmw_pvrdma`), function 1 of a vmxnet3.
pub fn pvrdma(tree: &Tree) {
    tree.plain_nic("0000:03:00.0", (0x15ad, 0x07b0), "vmxnet3", "ens160");
    tree.apart(&Apart {
        nic: ("0000:0b:00.0", (0x15ad, 0x07b0), "vmxnet3", "ens192"),
        rdma: (
            "0000:0b:00.1",
            (0x15ad, 0x0820),
            "vmw_pvrdma",
            "vmw_pvrdma0",
        ),
        node_type: "1: CA",
        gid: ("fe80::ba59:9fff:fe00:1", "ens192"),
    });
    tree.default_route("ens160");
}

/// HGX B200 on premises: each GPU's switch has an InfiniBand NIC (400 Gb/s), four `ConnectX-7`
/// functions manage the `NVSwitch` chips, known by `SMDL=SW_MNG` in their vital product data (NVIDIA
/// Fabric Manager user guide, "NVLink subnet manager"), and two Ethernet ports are a bond for storage,
/// of which RDMA LAG makes one device. PCI addresses are assumed; those of the switches are lowest.
pub fn hgx_b200(tree: &Tree) {
    tree.sockets(&["0-55,112-167", "56-111,168-223"]);
    let at = |bus: &str| format!("0000:{bus}:00.0");
    for (number, bus) in ["05", "06", "07", "08"].into_iter().enumerate() {
        let spec = PciSpec {
            address: &at(bus),
            above: "pci0000:01/0000:01:01.0",
            class: 0x02_0700,
            numa_node: 0,
            ..PciSpec::MLX5
        };
        tree.nic(
            &spec,
            &format!("mlx5_{number}"),
            "",
            &[PortSpec::INFINIBAND],
        );
        let vpd = format!("/sys/bus/pci/devices/{}/vpd", spec.address);
        tree.bytes(
            vpd,
            b"\x82\x0a\0ConnectX-7\x90\x13\0VA\x10MODL:SMDL=SW_MNG\x78",
        );
    }
    for (number, bus) in [0x18_u8, 0x29, 0x3a, 0x4b, 0x9a, 0xab, 0xbc, 0xcd]
        .into_iter()
        .enumerate()
    {
        let numa_node = i32::from(number >= 4);
        let above = format!("pci0000:{:02x}/0000:{:02x}:01.0", bus - 3, bus - 3);
        let below = |slot: u8| format!("{above}/0000:{:02x}:{slot:02x}.0", bus - 1);
        let nic = PciSpec {
            address: &format!("0000:{bus:02x}:00.0"),
            above: &below(0),
            class: 0x02_0700,
            numa_node,
            ..PciSpec::MLX5
        };
        let name = format!("mlx5_{}", number + 4);
        tree.nic(&nic, &name, "", &[PortSpec::INFINIBAND]);
        // A NIC of the same kind has vital product data as well, without that word.
        tree.bytes(
            format!("/sys/bus/pci/devices/{}/vpd", nic.address),
            b"\x82\x0a\0ConnectX-7\x90\x07\0PN\x04CX75\x78",
        );
        let gpu = PciSpec {
            address: &format!("0000:{:02x}:00.0", bus + 1),
            above: &below(1),
            device: 0x2901,
            numa_node,
            ..PciSpec::GPU
        };
        tree.gpu(&gpu, "NVIDIA B200");
    }
    for (function, name) in [(0, "ens6f0np0"), (1, "ens6f1np1")] {
        let address = format!("0000:5d:00.{function}");
        tree.pci(&PciSpec {
            address: &address,
            above: "pci0000:5a/0000:5a:01.0",
            numa_node: 0,
            ..PciSpec::MLX5
        });
        tree.netdev(&NetdevSpec {
            name,
            on: On::Pci(&address),
            speed: 200_000,
            ..NetdevSpec::default()
        });
    }
    tree.netdev(&NetdevSpec {
        name: "bond0",
        kind: "bond",
        lowers: &["ens6f0np0", "ens6f1np1"],
        ..NetdevSpec::default()
    });
    tree.rdma(&RdmaSpec {
        name: "mlx5_bond_0",
        on: On::Pci("0000:5d:00.0"),
        ports: &[PortSpec {
            rate: "400 Gb/sec (8X HDR)",
            gids: &[(0, "fe80::ba59:9fff:fe00:1", "RoCE v2", "bond0")],
            ..PortSpec::ROCE
        }],
        ..RdmaSpec::default()
    });
    tree.plain_nic("0000:02:00.0", (0x8086, 0x1563), "ixgbe", "eno1");
    tree.default_route("eno1");
}

/// One NIC each of Broadcom Thor 2 (14e4:1760), AMD Pollara (1dd8:1002) and Intel E810 (8086:1592),
/// with the PCI drivers and RDMA names of the kernel's `bnxt_re`, `ionic_rdma` and `irdma`.
pub fn other_vendors(tree: &Tree) {
    for (address, id, driver, netdev, rdma) in [
        (
            "0000:21:00.0",
            (0x14e4, 0x1760),
            "bnxt_en",
            "ens1np0",
            "bnxt_re0",
        ),
        ("0000:41:00.0", (0x1dd8, 0x1002), "ionic", "ens2", "ionic_0"),
        ("0000:61:00.0", (0x8086, 0x1592), "ice", "ens3f0", "irdma0"),
    ] {
        tree.plain_nic(address, id, driver, netdev);
        tree.rdma(&RdmaSpec {
            name: rdma,
            on: On::Pci(address),
            ports: &[PortSpec {
                rate: "400 Gb/sec (4X NDR)",
                ..PortSpec::ROCE
            }],
            mad: false,
            ..RdmaSpec::default()
        });
    }
}

/// A PF with two VFs of which the second one has no node GUID, as a driver makes them before an
/// administrator sets it.
pub fn vf_without_guid(tree: &Tree) {
    let pf = "0000:3b:00.0";
    tree.nic(&PciSpec::MLX5, "mlx5_0", "ens1np0", &[PortSpec::ROCE]);
    for (index, guid) in [(0, "b859:9f03:0000:0010"), (1, "0000:0000:0000:0000")] {
        let address = format!("0000:3b:00.{}", index + 2);
        tree.vf(
            pf,
            index,
            &PciSpec {
                address: &address,
                device: 0x101e,
                ..PciSpec::MLX5
            },
        );
        tree.netdev(&NetdevSpec {
            name: &format!("ens1v{index}"),
            on: On::Pci(&address),
            ..NetdevSpec::default()
        });
        tree.rdma(&RdmaSpec {
            name: &format!("mlx5_{}", index + 1),
            on: On::Pci(&address),
            node_guid: guid,
            ..RdmaSpec::default()
        });
    }
}
