//! The inventory of hosts whose sysfs was captured from running kernels.

#![expect(clippy::unwrap_used, reason = "a test may stop at what it cannot do")]

use hca::unit::HcaId;
use hca::{Inventory, LinkLayer, NetnsMode, PortId, PortState};
use hca_trees::Tree;

/// Lays a capture, checks what holds for every host, and gives its inventory.
fn captured(name: &str) -> (tempfile::TempDir, Tree, Inventory) {
    let path = format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"));
    let capture = std::fs::read_to_string(&path).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let tree = Tree::new(directory.path());
    tree.replay(&capture);
    let inventory = hca::inventory(&tree.host()).unwrap();
    for device in inventory.rdma_devices() {
        for port in &device.ports {
            let Some(netdev) = &port.netdev else { continue };
            let found = hca::lookup::hardware_of_netdev(&tree.host(), netdev).unwrap();
            let own = |one: &PortId| (&one.device, one.port) == (&device.name, port.number);
            assert!(
                found.ports.iter().any(own),
                "{} is not on {netdev}",
                device.name
            );
        }
    }
    (directory, tree, inventory)
}

#[test]
fn soft_roce_without_a_parent_has_its_netdev() {
    let (_directory, tree, inventory) = captured("sysfs-6.1-topology-stock-rxe.txt");

    assert_eq!(inventory.rdma_devices().count(), 8);
    assert_eq!(inventory.netns_mode, Some(NetnsMode::Shared));
    let rxe4 = inventory.rdma_device("rxe4").unwrap();
    assert!(rxe4.is_soft());
    assert_eq!(rxe4.pci, None);
    assert_eq!(rxe4.driver.as_deref(), Some("rdma_rxe"));
    assert_eq!(rxe4.firmware, None, "an empty attribute is none");
    assert_eq!(rxe4.netdevs().collect::<Vec<_>>(), ["eth4"]);
    assert_eq!(
        HcaId::of(rxe4).unwrap().to_string(),
        "guid-505400fffe000000"
    );

    let uverbs = rxe4.char_devices.uverbs.as_ref().unwrap();
    assert_eq!(
        (uverbs.name.as_str(), uverbs.number.to_string()),
        ("uverbs4", "231:196".into())
    );
    assert_eq!(uverbs.path, tree.path("/dev/infiniband/uverbs4"));
    assert!(rxe4.char_devices.umad.is_empty(), "ib_umad was not loaded");

    let port = rxe4.port(1).unwrap();
    assert_eq!(
        (port.state, port.link_layer),
        (PortState::Active, LinkLayer::Ethernet)
    );
    assert_eq!(port.rate.as_ref().unwrap().mbps, 100_000);
    assert_eq!(
        port.active_mtu,
        Some(1024),
        "what an MTU of 1500 leaves room for"
    );
    let [pkey] = port.pkeys.as_slice() else {
        panic!("{:?}", port.pkeys)
    };
    assert_eq!((pkey.index, pkey.key), (0, 0xffff));
    let gids: Vec<_> = port
        .gids
        .entries
        .iter()
        .map(|e| (e.index, e.gid.ip().to_string()))
        .collect();
    assert_eq!(
        gids,
        [(0, "fe80::5054:ff:fe00:0".into()), (1, "10.1.4.1".into())]
    );
}

#[test]
fn a_virtio_nic_is_placed_at_the_function_above_it() {
    let (_directory, tree, inventory) = captured("sysfs-6.1-topology-stock-rxe.txt");
    let eth4 = inventory.netdev("eth4").unwrap();
    assert_eq!(eth4.pci.unwrap().to_string(), "0000:23:00.0");
    assert_eq!(eth4.speed_mbps, Some(200_000));

    let function = hca::pci::read(&tree.host(), eth4.pci.unwrap()).unwrap();
    assert_eq!((function.numa_node, function.vendor), (Some(0), 0x1af4));
    assert_eq!(function.root.as_deref(), Some("pci0000:20"));
    let chain: Vec<_> = function.chain.iter().map(ToString::to_string).collect();
    assert_eq!(
        chain,
        [
            "0000:20:00.0",
            "0000:21:00.0",
            "0000:22:00.0",
            "0000:23:00.0"
        ]
    );

    let found = hca::lookup::on_hca(&tree.host(), &HcaId::Pci(function.address)).unwrap();
    assert_eq!(found.netdevs[0].name, "eth4");
    assert_eq!(
        found.rdma_devices,
        ["rxe4"],
        "soft RoCE on the function's netdev"
    );
}

#[test]
fn rdma_devices_with_a_parent_carry_its_numa_node_and_switch() {
    let (_directory, tree, inventory) = captured("sysfs-6.1-topology-rxe-with-parent.txt");
    let places: Vec<_> = inventory
        .rdma_devices()
        .map(|device| {
            let pci = device.pci.as_ref().unwrap();
            let netdev = device.ports[0].netdev.clone().unwrap();
            (netdev, pci.address.to_string(), pci.numa_node.unwrap())
        })
        .collect();
    let expected = [
        ("eth0", "0000:83:00.0", 1),
        ("eth1", "0000:84:00.0", 1),
        ("eth2", "0000:88:00.0", 1),
        ("eth3", "0000:89:00.0", 1),
        ("eth4", "0000:23:00.0", 0),
        ("eth5", "0000:24:00.0", 0),
        ("eth6", "0000:28:00.0", 0),
        ("eth7", "0000:29:00.0", 0),
    ];
    assert_eq!(
        places,
        expected.map(|(n, p, numa)| (n.to_owned(), p.to_owned(), numa))
    );

    // The display device of a switch shares its chain up to the upstream port.
    let display = hca::pci::read(&tree.host(), "0000:25:00.0".parse().unwrap()).unwrap();
    let nic = inventory.rdma_device("rxe4").unwrap().pci.as_ref().unwrap();
    assert_eq!(display.class, 0x03_0000);
    assert_eq!(display.chain[..2], nic.chain[..2]);
    assert_ne!(display.chain[2], nic.chain[2]);
}

#[test]
fn virtual_functions_know_their_physical_one_and_back() {
    let (_directory, _tree, inventory) = captured("sysfs-6.1-sriov-igb.txt");
    let function = |name: &str| inventory.rdma_device(name).unwrap().pci.clone().unwrap();

    let pf = function("rxe0");
    assert_eq!(pf.numa_node, None, "the kernel's -1");
    let hca::pci::Sriov::Physical { total, functions } = &pf.sriov else {
        panic!("{:?}", pf.sriov)
    };
    assert_eq!(*total, 7);
    let vfs: Vec<_> = functions
        .iter()
        .map(|vf| (vf.index, vf.address.to_string()))
        .collect();
    assert_eq!(
        vfs,
        [
            (0, "0000:01:10.0"),
            (1, "0000:01:10.2"),
            (2, "0000:01:10.4"),
            (3, "0000:01:10.6")
        ]
        .map(|(i, vf)| (i, vf.to_owned()))
    );

    let vf = function("rxe2");
    assert!(vf.is_vf());
    assert_eq!(vf.driver.as_deref(), Some("igbvf"));
    assert_eq!(vf.physical(), pf.address);
    assert_eq!(
        vf.sriov,
        hca::pci::Sriov::Virtual {
            physical: pf.address,
            index: Some(1)
        }
    );
    assert_eq!(
        inventory.netdev("eth2").unwrap().permanent_mac,
        None,
        "a random VF address"
    );
    assert!(inventory.netdev("eth0").unwrap().permanent_mac.is_some());
}

#[test]
fn management_nodes_are_those_the_kernel_has() {
    let (_directory, _tree, old) = captured("sysfs-6.1-rxe.txt");
    let nodes = &old.rdma_device("rxe0").unwrap().char_devices;
    let all: Vec<_> = nodes
        .iter()
        .map(|d| (d.name.as_str(), d.number.to_string()))
        .collect();
    assert_eq!(
        all,
        [
            ("uverbs0", "231:192"),
            ("umad0", "231:0"),
            ("issm0", "231:64")
        ]
        .map(|(name, number)| (name, number.to_owned()))
    );
    assert_eq!(nodes.umad[0].port, Some(1), "its port");

    let (_directory, _tree, new) = captured("sysfs-7.2-rxe.txt");
    let nodes = &new.rdma_device("rxe0").unwrap().char_devices;
    assert!(nodes.issm.is_empty(), "gone for Ethernet ports");
    assert_eq!(nodes.umad.len(), 1);
}
