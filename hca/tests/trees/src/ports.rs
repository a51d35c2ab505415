//! HCAs with several ports, or with RDMA devices that carry no data. Names, numbers of ports and states
//! are published; addresses are assumed.

use super::{NetdevSpec, On, PciSpec, PortSpec, RdmaSpec, Tree};

/// Bridges above the cards of this module.
const ABOVE: &str = "pci0000:3a/0000:3a:00.0";

/// The first function of each card of this module.
pub const CARD: &str = "0000:3b:00.0";

const XDR: PortSpec<'static> = PortSpec {
    rate: "800 Gb/sec (4X XDR)",
    ..PortSpec::INFINIBAND
};

/// A port of a plane, for the subnet manager alone.
const PLANE: PortSpec<'static> = PortSpec {
    rate: "200 Gb/sec (1X XDR)",
    ..PortSpec::INFINIBAND
};

/// A ConnectX-8 on XDR: `mlx5_0` carries data, `smi1` the subnet manager's packets of four planes.
pub fn xdr_with_smi(tree: &Tree) {
    tree.pci(&PciSpec {
        address: CARD,
        above: ABOVE,
        device: 0x1023,
        class: 0x02_0700,
        numa_node: 0,
        ..PciSpec::MLX5
    });
    let on = On::Pci(CARD);
    tree.netdev(&NetdevSpec {
        name: "ibs192",
        on,
        mac: "00:00:10:49:fe:80:00:00:00:00:00:00:b8:59:9f:03:00:00:00:01",
        link_type: 32,
        mtu: 2044,
        ..NetdevSpec::default()
    });
    tree.rdma(&RdmaSpec {
        name: "mlx5_0",
        on,
        ports: &[XDR],
        ..RdmaSpec::default()
    });
    tree.rdma(&RdmaSpec {
        name: "smi1",
        on,
        ports: &[PLANE; 4],
        verbs: false,
        ..RdmaSpec::default()
    });
}

const PLANE_GIDS: [[(u32, &str, &str, &str); 1]; 4] = [
    [(0, "fe80::ba59:9fff:fe00:0010", "RoCE v2", "eth_r0_p0")],
    [(0, "fe80::ba59:9fff:fe00:0011", "RoCE v2", "eth_r0_p1")],
    [(0, "fe80::ba59:9fff:fe00:0012", "RoCE v2", "eth_r0_p2")],
    [(0, "fe80::ba59:9fff:fe00:0013", "RoCE v2", "eth_r0_p3")],
];

/// A four-plane ConnectX-8 on Ethernet: one RDMA device with twelve ports, of which 3, 6, 9 and 12 carry
/// data. Each has its netdev on a function of its own.
pub fn four_planes(tree: &Tree) {
    let mut ports = Vec::new();
    for (plane, gids) in PLANE_GIDS.iter().enumerate() {
        let address = format!("0000:3b:00.{plane}");
        function(tree, &address, 0x1023);
        tree.netdev(&NetdevSpec {
            name: &format!("eth_r0_p{plane}"),
            on: On::Pci(&address),
            mac: &format!("b8:59:9f:00:00:1{plane}"),
            phys_port_name: &format!("p{plane}"),
            speed: 200_000,
            ..NetdevSpec::default()
        });
        ports.extend([PortSpec::DOWN; 2]);
        ports.push(PortSpec {
            rate: "200 Gb/sec (2X NDR)",
            gids,
            ..PortSpec::ROCE
        });
    }
    tree.rdma(&RdmaSpec {
        name: "mlx5_0",
        on: On::Pci(CARD),
        ports: &ports,
        ..RdmaSpec::default()
    });
}

/// A multiport e-switch: the RDMA device of the first function has the netdev of the second one at its
/// second port, and the second function has no RDMA device.
pub fn multiport_eswitch(tree: &Tree) {
    for (address, name, mac, phys_port_name) in [
        (CARD, "ens1f0np0", "b8:59:9f:00:00:10", "p0"),
        ("0000:3b:00.1", "ens1f1np1", "b8:59:9f:00:00:11", "p1"),
    ] {
        function(tree, address, 0x1021);
        let on = On::Pci(address);
        tree.netdev(&NetdevSpec {
            name,
            on,
            mac,
            phys_port_name,
            ..NetdevSpec::default()
        });
    }
    let ports = [
        (0, "fe80::ba59:9fff:fe00:0010", "RoCE v2", "ens1f0np0"),
        (0, "fe80::ba59:9fff:fe00:0011", "RoCE v2", "ens1f1np1"),
    ];
    let [first, second] = ports.map(|gid| [gid]);
    tree.rdma(&RdmaSpec {
        name: "mlx5_0",
        on: On::Pci(CARD),
        ports: &[
            PortSpec {
                gids: &first,
                ..PortSpec::ROCE
            },
            PortSpec {
                gids: &second,
                ..PortSpec::ROCE
            },
        ],
        ..RdmaSpec::default()
    });
}

/// A dual-port ConnectX-3, which has both ports on one function, with a cable at port 2 alone.
pub fn cabled_on_port_2(tree: &Tree) {
    tree.pci(&PciSpec {
        address: CARD,
        above: ABOVE,
        device: 0x1007,
        driver: "mlx4_core",
        numa_node: 0,
        ..PciSpec::MLX5
    });
    for (name, dev_port, mac) in [
        ("ens1", 0, "b8:59:9f:00:00:10"),
        ("ens1d1", 1, "b8:59:9f:00:00:11"),
    ] {
        tree.netdev(&NetdevSpec {
            name,
            on: On::Pci(CARD),
            mac,
            dev_port,
            speed: 40_000,
            ..NetdevSpec::default()
        });
    }
    tree.rdma(&RdmaSpec {
        name: "mlx4_0",
        on: On::Pci(CARD),
        ports: &[
            PortSpec {
                phys_state: "2: Polling",
                ..PortSpec::DOWN
            },
            PortSpec {
                rate: "40 Gb/sec (4X QDR)",
                ..PortSpec::ROCE
            },
        ],
        ..RdmaSpec::default()
    });
}

fn function(tree: &Tree, address: &str, device: u16) {
    tree.pci(&PciSpec {
        address,
        above: ABOVE,
        device,
        numa_node: 0,
        ..PciSpec::MLX5
    });
}
