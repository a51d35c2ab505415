//! The matrix of each machine of the field, cell by cell, and the NICs chosen on them.

#![expect(
    clippy::unwrap_used,
    reason = "a machine that cannot be read fails its test"
)]

use std::collections::BTreeSet;

use hca::topology::{Choice, Class, Machine, PciLocation, Request, choose};
use hca_trees::{Tree, cloud, machine};

/// Scans the machine that `lay` makes.
fn scan(lay: impl Fn(&Tree)) -> Machine {
    let directory = tempfile::tempdir().unwrap();
    let tree = Tree::new(directory.path());
    lay(&tree);
    let inventory = hca::inventory(&tree.host()).unwrap();
    Machine::read(
        &tree.host(),
        &inventory,
        hca::topology::gpu::read(&tree.host()).unwrap(),
    )
    .unwrap()
}

fn rows<'a>(
    machine: &Machine,
    from: impl Iterator<Item = &'a PciLocation>,
    to: &[&PciLocation],
) -> Vec<String> {
    from.map(|a| {
        let cells: Vec<String> = to
            .iter()
            .map(|b| machine.distance(a, b).to_string())
            .collect();
        cells.join(" ")
    })
    .collect()
}

fn worst(choice: &Choice) -> Option<Class> {
    choice.pairs.iter().map(|pair| pair.distance.class).max()
}

/// One line for each GPU: its distance to each NIC.
fn gpu_nic(machine: &Machine) -> Vec<String> {
    let nics: Vec<&PciLocation> = machine.nics.iter().map(|nic| &nic.place).collect();
    rows(machine, machine.gpus.iter().map(|gpu| &gpu.place), &nics)
}

/// One line for each NIC: its distance to each NIC.
fn nic_nic(machine: &Machine) -> Vec<String> {
    let nics: Vec<&PciLocation> = machine.nics.iter().map(|nic| &nic.place).collect();
    rows(machine, nics.iter().copied(), &nics)
}

#[test]
fn a4_has_two_near_nics_a_gpu_and_four_on_each_socket() {
    let a4 = scan(machine::a4);
    let near_01 = "PIX PIX NODE NODE SYS SYS SYS SYS";
    let near_23 = "NODE NODE PIX PIX SYS SYS SYS SYS";
    let near_45 = "SYS SYS SYS SYS PIX PIX NODE NODE";
    let near_67 = "SYS SYS SYS SYS NODE NODE PIX PIX";
    assert_eq!(
        gpu_nic(&a4),
        [
            near_01, near_01, near_23, near_23, near_45, near_45, near_67, near_67
        ]
    );
    assert_eq!(
        nic_nic(&a4),
        [
            "X PIX NODE NODE SYS SYS SYS SYS",
            "PIX X NODE NODE SYS SYS SYS SYS",
            "NODE NODE X PIX SYS SYS SYS SYS",
            "NODE NODE PIX X SYS SYS SYS SYS",
            "SYS SYS SYS SYS X PIX NODE NODE",
            "SYS SYS SYS SYS PIX X NODE NODE",
            "SYS SYS SYS SYS NODE NODE X PIX",
            "SYS SYS SYS SYS NODE NODE PIX X",
        ]
    );
    let buses: Vec<String> = a4
        .gpus
        .iter()
        .map(|g| g.place.address.to_string())
        .collect();
    let expected = ["8f", "90", "96", "97", "c4", "c5", "cb", "cc"];
    assert_eq!(buses, expected.map(|bus| format!("0000:{bus}:00.0")));
    let rails = a4.nics.iter().filter_map(|nic| nic.rail.as_ref());
    let rails: Vec<u32> = rails.map(|rail| rail.number).collect();
    assert_eq!(rails, [0, 1, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn p4d_has_nothing_nearer_than_phb() {
    let p4d = scan(machine::p4d);
    assert_eq!(
        gpu_nic(&p4d),
        [
            "PHB NODE SYS SYS",
            "PHB NODE SYS SYS",
            "NODE PHB SYS SYS",
            "NODE PHB SYS SYS",
            "SYS SYS PHB NODE",
            "SYS SYS PHB NODE",
            "SYS SYS NODE PHB",
            "SYS SYS NODE PHB",
        ]
    );
    assert_eq!(
        nic_nic(&p4d),
        [
            "X NODE SYS SYS",
            "NODE X SYS SYS",
            "SYS SYS X NODE",
            "SYS SYS NODE X"
        ]
    );
    assert!(
        p4d.gpus
            .iter()
            .all(|gpu| p4d.nearest(gpu) == Some(Class::Phb))
    );
    // An EFA has no netdev and is a NIC all the same.
    assert!(
        p4d.nics
            .iter()
            .all(|nic| nic.hca.netdevs.is_empty() && nic.hca.rdma_devices.len() == 1)
    );
}

#[test]
fn nd_h100_shows_only_sockets() {
    let nd = scan(machine::nd_h100);
    let first = "NODE NODE NODE NODE SYS SYS SYS SYS";
    let second = "SYS SYS SYS SYS NODE NODE NODE NODE";
    assert_eq!(
        gpu_nic(&nd),
        [first, first, first, first, second, second, second, second]
    );
}

#[test]
fn azure_nd_gb300_has_node_at_best() {
    let azure = scan(cloud::azure_nd_gb300);
    let (first, second) = ("NODE NODE SYS SYS", "SYS SYS NODE NODE");
    assert_eq!(gpu_nic(&azure), [first, first, second, second]);
    // Which GPU a NIC is next to cannot be seen: one of the GPU's CPU is as near as can be had.
    let request = Request {
        gpus: set(&[0, 3]),
        count: 2,
        strict: true,
        ..Request::default()
    };
    assert_eq!(choose(&azure, &request).unwrap().nics, [0, 3]);
}

#[test]
fn gb200_has_node_at_best() {
    let gb200 = scan(machine::gb200);
    assert_eq!(
        gpu_nic(&gb200),
        [
            "NODE NODE SYS SYS",
            "NODE NODE SYS SYS",
            "SYS SYS NODE NODE",
            "SYS SYS NODE NODE",
        ]
    );
    let request = Request {
        gpus: set(&[1]),
        count: 1,
        strict: true,
        ..Request::default()
    };
    let choice = choose(&gb200, &request).unwrap();
    assert_eq!(choice.nics, [1], "by NUMA node, then by order");
    assert!(
        choice.pairs[0].aligned,
        "nothing nearer can be had on this machine"
    );
    assert!(choice.pairs[0].direct, "over C2C");
    let memory: Vec<_> = gb200.gpus.iter().map(|gpu| gpu.memory_node).collect();
    assert_eq!(memory, [Some(2), Some(10), Some(18), Some(26)]);
    assert!(gb200.gpus.iter().all(|gpu| gpu.c2c));
    assert_eq!(gb200.numa.nodes.len(), 34);
    assert_eq!(gb200.numa.nodes_with_cpus(), 2);

    let request = Request {
        count: 1,
        gpus: set(&[1]),
        include: set(&[3]),
        ..Request::default()
    };
    let far = choose(&gb200, &request).unwrap();
    assert!(!far.pairs[0].direct, "another CPU's NIC");
}

#[test]
fn gb300_has_each_nic_next_to_the_gpu_that_its_data_direct_function_is_next_to() {
    let gb300 = scan(machine::gb300);
    assert_eq!(
        gpu_nic(&gb300),
        [
            "NODE PIX SYS SYS",
            "PIX NODE SYS SYS",
            "SYS SYS NODE PIX",
            "SYS SYS PIX NODE",
        ]
    );
    let request = Request {
        gpus: set(&[0, 1, 2, 3]),
        count: 4,
        strict: true,
        ..Request::default()
    };
    let choice = choose(&gb300, &request).unwrap();
    let other = Request {
        gpus: set(&[0]),
        count: 1,
        include: set(&[0]),
        strict: true,
        ..Request::default()
    };
    assert!(
        choose(&gb300, &other).is_err(),
        "another GPU's NIC is a detour"
    );
    let pairs: Vec<_> = choice
        .pairs
        .iter()
        .map(|pair| (pair.gpu, pair.nic))
        .collect();
    assert_eq!(pairs, [(0, 1), (1, 0), (2, 3), (3, 2)]);
    // Whoever may not read vital product data sees the same machine as a GB200.
    let blind = scan(|tree| {
        machine::gb300(tree);
        for nic in ["0000", "0002", "0010", "0012"] {
            tree.remove(format!("/sys/bus/pci/devices/{nic}:03:00.0/vpd"));
        }
    });
    assert_eq!(gpu_nic(&blind)[0], "NODE NODE SYS SYS");
}

#[test]
fn oci_h100_has_both_ports_of_a_card_at_one_gpu() {
    let oci = scan(machine::oci_h100);
    for (gpu, row) in gpu_nic(&oci).iter().enumerate() {
        let cells: Vec<&str> = row.split(' ').collect();
        assert_eq!(cells.len(), 16);
        for (nic, cell) in cells.iter().enumerate() {
            let expected = if nic / 2 == gpu {
                "PIX"
            } else if nic / 8 == gpu / 4 {
                "NODE"
            } else {
                "SYS"
            };
            assert_eq!(*cell, expected, "GPU {gpu}, port {nic}");
        }
    }
    let between = oci.distance(&oci.nics[0].place, &oci.nics[1].place);
    assert_eq!(between.class, Class::Pix);
    let cards: Vec<_> = oci
        .nics
        .iter()
        .map(|nic| nic.place.address.card())
        .collect();
    assert_eq!(cards[0], cards[1]);
}

#[test]
fn egx_has_no_gpu_on_the_nics_switch() {
    let egx = scan(machine::egx);
    assert_eq!(
        gpu_nic(&egx),
        ["NODE NODE", "SYS SYS", "SYS SYS", "SYS SYS"]
    );
    assert_eq!(nic_nic(&egx), ["X PIX", "PIX X"]);
}

#[test]
fn servers_where_few_gpus_share_a_root_with_a_nic() {
    let one = scan(machine::one_gpu_in_four_near_a_nic);
    assert_eq!(
        gpu_nic(&one),
        ["PHB SYS", "NODE SYS", "SYS NODE", "SYS NODE"]
    );
    let none = scan(machine::no_gpu_near_a_nic);
    assert_eq!(gpu_nic(&none), ["SYS", "NODE"]);
    let cascaded = scan(machine::cascaded_switches);
    assert_eq!(
        gpu_nic(&cascaded),
        [
            "PIX PXB SYS SYS",
            "PXB PIX SYS SYS",
            "SYS SYS PIX PXB",
            "SYS SYS PXB PIX"
        ]
    );
}

fn set(indices: &[usize]) -> BTreeSet<usize> {
    indices.iter().copied().collect()
}

/// NICs for these GPUs, with only some of the NICs free.
fn pick(
    machine: &Machine,
    gpus: &[usize],
    count: usize,
    free: &[usize],
    include: &[usize],
) -> Vec<usize> {
    let request = Request {
        gpus: set(gpus),
        count,
        taken: (0..machine.nics.len())
            .filter(|nic| !free.contains(nic))
            .collect(),
        include: set(include),
        ..Request::default()
    };
    choose(machine, &request).unwrap().nics
}

#[test]
fn the_nics_of_an_a4_for_gpus() {
    let a4 = scan(machine::a4);
    type Case<'a> = (&'a [usize], usize, &'a [usize], &'a [usize]);
    let all = &[0, 1, 2, 3, 4, 5, 6, 7];
    let cases: &[Case<'_>] = &[
        (&[0], 1, all, &[0]),
        (&[7], 1, all, &[7]),
        (&[3], 1, all, &[3]),
        (&[0, 1, 6, 7], 4, all, &[0, 1, 6, 7]),
        (&[3, 4, 5, 6], 4, all, &[3, 4, 5, 6]),
        (&[0, 1], 2, &[1, 2, 3, 4, 5, 6, 7], &[1, 2]),
        (&[0, 1, 2, 3], 2, all, &[0, 2]),
        (&[0], 2, all, &[0, 1]),
        (&[0], 4, all, &[0, 1, 2, 3]),
        (&[4, 5], 2, &[0, 1, 2, 3, 6, 7], &[6, 7]),
        (&[0], 1, &[4, 5, 6, 7], &[4]),
        (&[3, 4], 2, all, &[3, 4]),
    ];
    for (gpus, count, free, expected) in cases {
        assert_eq!(
            pick(&a4, gpus, *count, free, &[]),
            *expected,
            "GPUs {gpus:?}, {count} of {free:?}"
        );
    }
}

#[test]
fn the_nics_of_an_a4_without_gpus_keep_the_rest_whole() {
    let a4 = scan(machine::a4);
    type Case<'a> = (usize, &'a [usize], &'a [usize], &'a [usize]);
    let all = &[0, 1, 2, 3, 4, 5, 6, 7];
    let broken = &[1, 2, 3, 4, 5, 6, 7];
    let cases: &[Case<'_>] = &[
        (4, all, &[], &[0, 1, 2, 3]),
        (4, broken, &[], &[4, 5, 6, 7]),
        (2, broken, &[], &[2, 3]),
        (1, broken, &[], &[1]),
        (3, all, &[], &[0, 1, 2]),
        (2, all, &[5], &[4, 5]),
        (8, all, &[], all),
        (0, all, &[], &[]),
    ];
    for (count, free, include, expected) in cases {
        assert_eq!(
            pick(&a4, &[], *count, free, include),
            *expected,
            "{count} of {free:?}, {include:?}"
        );
    }
}

#[test]
fn two_pods_on_an_a4_never_fight_for_a_nic() {
    let a4 = scan(machine::a4);
    let quadruples = [
        [0, 1, 6, 7],
        [0, 1, 2, 7],
        [0, 5, 6, 7],
        [3, 4, 5, 6],
        [1, 2, 3, 4],
        [2, 3, 4, 5],
    ];
    for gpus in quadruples {
        let request = Request {
            gpus: set(&gpus),
            count: 4,
            ..Request::default()
        };
        let first = choose(&a4, &request).unwrap();
        assert_eq!(worst(&first), Some(Class::Pix), "{gpus:?}");
        assert!(first.pairs.iter().all(|pair| pair.direct));
        let beside = Request {
            gpus: (0..8).filter(|gpu| !gpus.contains(gpu)).collect(),
            count: 4,
            taken: set(&first.nics),
            ..Request::default()
        };
        assert_eq!(
            worst(&choose(&a4, &beside).unwrap()),
            Some(Class::Pix),
            "beside {gpus:?}"
        );
    }
}

#[test]
fn each_gpu_of_any_set_on_an_a4_gets_its_own_nic() {
    let a4 = scan(machine::a4);
    for mask in 1_u32..256 {
        let gpus: BTreeSet<usize> = (0..8).filter(|gpu| mask & 1 << gpu != 0).collect();
        let request = Request {
            count: gpus.len(),
            gpus,
            ..Request::default()
        };
        let choice = choose(&a4, &request).unwrap();
        assert_eq!(worst(&choice), Some(Class::Pix), "{:?}", request.gpus);
        assert!(
            choice.pairs.iter().all(|pair| pair.gpu == pair.nic),
            "{:?}",
            request.gpus
        );
    }
}

#[test]
fn strictness_refuses_a_far_nic_and_says_what_could_be_had() {
    let a4 = scan(machine::a4);
    let request = Request {
        gpus: set(&[0]),
        count: 1,
        taken: set(&[0, 1, 2, 3]),
        strict: true,
        ..Request::default()
    };
    assert_eq!(
        choose(&a4, &request).unwrap_err().to_string(),
        "the nearest free NIC for GPU 0 is mlx5_4 at SYS, where PIX can be had on this machine"
    );
}

#[test]
fn a_gpu_gets_the_whole_card_beside_it() {
    let oci = scan(machine::oci_h100);
    let request = Request {
        gpus: set(&[5]),
        count: 2,
        ..Request::default()
    };
    assert_eq!(choose(&oci, &request).unwrap().nics, [10, 11]);
    // Without GPUs two ports are a card, too.
    let request = Request {
        count: 2,
        ..Request::default()
    };
    assert_eq!(choose(&oci, &request).unwrap().nics, [0, 1]);
}

#[test]
fn contradictory_requirements_are_refused_by_name() {
    let a4 = scan(machine::a4);
    let refused = |include, taken, count| {
        let request = Request {
            include: set(include),
            taken: set(taken),
            count,
            ..Request::default()
        };
        choose(&a4, &request).unwrap_err().to_string()
    };
    assert_eq!(
        refused(&[1, 2], &[], 1),
        "2 NICs have to be included, but only 1 are wanted"
    );
    assert_eq!(
        refused(&[1], &[1], 1),
        "mlx5_1 has to be included, but it is taken or unhealthy"
    );
}

/// A guest with two NUMA nodes, two switches a node, two NICs and a display device a switch;
/// with soft RoCE that names the NIC as its parent device, and with the kernel's own, which only
/// names the netdev.
#[test]
fn a_captured_guest_with_four_switches() {
    for capture in [
        include_str!("fixtures/sysfs-6.1-topology-rxe-with-parent.txt"),
        include_str!("fixtures/sysfs-6.1-topology-stock-rxe.txt"),
    ] {
        let guest = scan(|tree| tree.replay(capture));
        assert_eq!(
            gpu_nic(&guest),
            [
                "PIX PIX PHB PHB SYS SYS SYS SYS",
                "PHB PHB PIX PIX SYS SYS SYS SYS",
                "SYS SYS SYS SYS PIX PIX PHB PHB",
                "SYS SYS SYS SYS PHB PHB PIX PIX",
            ],
            "both switches of a node hang below one host bridge"
        );
        assert_eq!(guest.unplaced, Vec::<String>::new());
        assert_eq!(guest.gpus[0].title(), "AMD 5046");
    }
}

#[test]
fn a_nic_whose_devices_a_pod_has_keeps_its_place() {
    let lay = |tree: &Tree| {
        machine::a4(tree);
        tree.rdma_core(false);
        tree.hide_rdma("mlx5_3");
        tree.hide_netdev("gpu3rdma0");
    };
    let a4 = scan(lay);
    assert_eq!(a4.nics.len(), 8);
    let third = &a4.nics[3];
    assert!(third.hca.elsewhere && third.hca.netdevs.is_empty());
    assert_eq!(third.title(), "mlx5_3");
}
