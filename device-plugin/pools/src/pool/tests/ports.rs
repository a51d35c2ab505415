//! HCAs with several ports, and sub-devices that carry no data.

use hca_trees::ports::{CARD, cabled_on_port_2, four_planes, multiport_eswitch, xdr_with_smi};

use super::*;

const SHARED: &str = "resource: rdma/a, mode: shared, shares: 2, select: { rdmaDevices: [\"*\"] }, \
                      nodes: { required: [uverbs, rdma_cm], optional: [umad, issm] }";
const EXCLUSIVE: &str = "resource: rdma/a, mode: exclusive, environment: true, \
                         select: { rdmaDevices: [\"*\"] }";

/// The only HCA of the only pool.
fn member(node: &Node, pool: &str) -> Member {
    let pools = node.pools(&native(&[pool]));
    let [member] = pools.snapshots[0].members() else {
        panic!("{:?}", pools.snapshots[0].members());
    };
    assert_eq!(member.hca.id.to_string(), CARD);
    member.clone()
}

/// The variable of an early exclusive pool's container.
fn variable(lay: fn(&Tree), name: &str) -> String {
    let pools = Node::new(lay).pools(&native(&[EXCLUSIVE]));
    let answer = allocate(&pools.snapshots[0], &[CARD.to_owned()]).unwrap();
    answer.envs[name].clone()
}

fn selects(lay: fn(&Tree), words: &str) -> bool {
    let pool = format!("resource: rdma/a, mode: exclusive, select: {{ {words} }}");
    let pools = Node::new(lay).pools(&native(&[&pool]));
    !pools.snapshots[0].members().is_empty()
}

#[test]
fn variables_name_the_active_data_ports() {
    for (lay, ports) in [
        (xdr_with_smi as fn(&Tree), "mlx5_0:1"),
        (four_planes, "mlx5_0:3,mlx5_0:6,mlx5_0:9,mlx5_0:12"),
        (multiport_eswitch, "mlx5_0:1,mlx5_0:2"),
        (cabled_on_port_2, "mlx4_0:2"),
    ] {
        assert_eq!(variable(lay, "NCCL_IB_HCA"), format!("={ports}"));
        for name in ["UCX_NET_DEVICES", "NVSHMEM_HCA_LIST"] {
            assert_eq!(variable(lay, name), ports, "{name}");
        }
    }
    assert_eq!(variable(xdr_with_smi, "RDMA_DEVICES_RDMA_A"), "mlx5_0");
}

#[test]
fn a_sub_device_has_no_part_in_nodes_health_and_selectors() {
    let node = Node::new(xdr_with_smi);
    let nodes = member(&node, SHARED).nodes;
    let nodes: Vec<&str> = nodes.iter().map(|node| node.path.as_str()).collect();
    let expected = ["uverbs0", "rdma_cm", "umad0", "issm0"];
    assert_eq!(
        nodes,
        expected.map(|name| format!("/dev/infiniband/{name}"))
    );
    node.tree
        .set_port_state("mlx5_0", 1, "1: DOWN", "2: Polling");
    let health = member(&node, SHARED).health;
    let reason = health.worst().unwrap().to_string();
    assert!(
        reason.contains("mlx5_0/1") && !reason.contains("smi1"),
        "{reason}"
    );
    assert!(!selects(xdr_with_smi, "rdmaDevices: [\"smi*\"]"));
    assert!(!selects(xdr_with_smi, "linkSpeed: [200G]"));
    assert!(selects(xdr_with_smi, "linkSpeed: [800G]"));
}

#[test]
fn health_is_that_of_the_ports_that_carry_data() {
    let node = Node::new(four_planes);
    assert!(member(&node, SHARED).health.is_healthy());
    for port in [3, 6, 9] {
        node.tree
            .set_port_state("mlx5_0", port, "1: DOWN", "3: Disabled");
    }
    assert!(member(&node, SHARED).health.is_healthy(), "a plane is left");
    // A port of the switch inside the HCA says nothing.
    node.tree
        .set_port_state("mlx5_0", 12, "1: DOWN", "3: Disabled");
    node.tree
        .set_port_state("mlx5_0", 1, "4: ACTIVE", "5: LinkUp");
    let health = member(&node, SHARED).health;
    let reason = health.worst().unwrap().to_string();
    assert!(
        reason.contains("mlx5_0/12") && !reason.contains("mlx5_0/1 "),
        "{reason}"
    );
    assert!(
        member(&Node::new(cabled_on_port_2), SHARED)
            .health
            .is_healthy()
    );
}

#[test]
fn selectors_ask_for_the_netdevs_of_all_ports() {
    assert!(selects(four_planes, "ifNames: [eth_r0_p3]"));
    assert!(selects(multiport_eswitch, "ifNames: [ens1f1np1]"));
    assert!(selects(four_planes, "ports: [9]"));
    assert!(!selects(four_planes, "ports: [1]"));
    assert!(selects(cabled_on_port_2, "ports: [2], linkSpeed: [40G]"));
}

#[test]
fn an_uplink_on_another_function_keeps_the_hca() {
    let node = Node::new(multiport_eswitch);
    node.tree.default_route("ens1f1np1");
    let pools = node.pools(&native(&[EXCLUSIVE]));
    assert!(pools.snapshots[0].members().is_empty());
    assert!(pools.excluded[0].to_string().contains("ens1f1np1"));
}

#[test]
fn the_ports_of_a_pods_hca_stay_known() {
    let node = Node::new(four_planes);
    let directory = tempfile::tempdir().unwrap();
    let mut memory = crate::history::Memory::load(directory.path(), "boot".into());
    memory.list(&node.scan(), std::time::SystemTime::now());
    node.tree.rdma_core(false);
    node.tree.hide_rdma("mlx5_0");
    for plane in 0..4 {
        node.tree.hide_netdev(&format!("eth_r0_p{plane}"));
    }
    let (hcas, _) = memory.list(&node.scan(), std::time::SystemTime::now());
    let names = ["mlx5_0:3", "mlx5_0:6", "mlx5_0:9", "mlx5_0:12"];
    assert_eq!(hcas[0].port_names(), names);
    assert!(hcas[0].elsewhere && hcas[0].netdevs.len() == 4);
}
