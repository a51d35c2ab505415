//! Ranges of which each node has a network (`perNode`).

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use ipam::block::AddressSpace;
use ipnetwork::IpNetwork;
use node_wire::FailureKind;
use serde_json::json;

use super::faults::{add, eventually, patient, refused, started};
use super::{Api, LATE, NODE_RANGE, check, with_api};

#[test]
fn a_node_has_one_network_and_keeps_it() {
    with_api(async |api| {
        // Empty blocks would go back at once.
        let keeping = async |number| {
            let mut machine = patient(&api, number).await;
            machine.kill().await;
            machine.timing.empty = Duration::from_millis(60);
            machine.start(&api);
            machine
        };
        let mut machines = Vec::new();
        for number in 1..5 {
            machines.push(keeping(number).await);
        }
        for machine in &mut machines {
            machine.add_of(NODE_RANGE).await.unwrap();
            let full = machine.add_of(NODE_RANGE).await;
            assert_eq!(full, Err(FailureKind::Exhausted));
            check(std::slice::from_ref(machine));
        }
        let one = &mut machines[0];
        let why = one.ask(&super::range(NODE_RANGE)).await.unwrap_err();
        let network = one.node_networks()[0];
        assert!(
            why.message
                .contains(&format!("pods in {network} are leased")),
            "{}",
            why.message
        );
        // Empty, and asked for by another node.
        one.del(0);
        tokio::time::sleep(one.timing.empty * 4).await;
        let mut fifth = keeping(5).await;
        assert_eq!(fifth.add_of(NODE_RANGE).await, Err(FailureKind::Exhausted));
        let one = &mut machines[0];
        one.kill().await;
        one.start(&api);
        eventually("it has the network after a restart", || {
            one.node_networks() == [network]
        })
        .await;
        one.add_of(NODE_RANGE).await.unwrap();
        // Made again, divided as it was.
        let name = AddressSpace::new("default", None).block_name(network);
        api.delete_blocks();
        eventually("its object is there again", || {
            api.names("addressblocks").contains(&name)
        })
        .await;
        assert_eq!(api.blocks()[&network.to_string()].as_deref(), Some("n1"));
        one.del(0);
        one.add_of(NODE_RANGE).await.unwrap();
        assert_eq!(one.node_networks(), [network]);
        // The network of a node that is gone goes to the one that had none.
        api.remove_node("n1");
        one.kill().await;
        one.del(0);
        let deadline = tokio::time::Instant::now() + LATE;
        while let Err(kind) = fifth.add_of(NODE_RANGE).await {
            assert!(tokio::time::Instant::now() < deadline, "{kind:?}");
        }
        assert_eq!(fifth.node_networks(), [network]);
    });
}

/// Its API answered late: it has the object after it said that it has none.
#[test]
fn a_network_that_was_claimed_late_stays_the_nodes_only_one() {
    with_api(async |api| {
        let mut one = started(&api, 1).await;
        one.add_of(NODE_RANGE).await.unwrap();
        let network = one.node_networks()[0];
        let space = AddressSpace::new("default", None);
        let object = api.object("addressblocks", &space.block_name(network));
        one.kill().await;
        // The one that it tries first, and another.
        let size = 1 << (32 - network.prefix());
        let IpAddr::V4(address) = network.network() else {
            unreachable!()
        };
        let other = Ipv4Addr::from_bits(address.to_bits() ^ size);
        for late in [
            network,
            IpNetwork::new(other.into(), network.prefix()).unwrap(),
        ] {
            let (mut object, name) = (object.clone(), space.block_name(late));
            object["metadata"]["name"] = json!(name);
            object["spec"]["block"] = json!(late);
            let api = Api::start().await;
            let mut one = started(&api, 1).await;
            // It has read its blocks.
            add(&mut one, 1).await;
            api.write_unseen("addressblocks", &name, &object);
            // A pod that asks for an address of another network does not get it.
            let far = Ipv4Addr::from_bits(address.to_bits() ^ (2 * size) | 1);
            let far = node_wire::BlockNeed {
                address: Some(far.into()),
                ..super::need(&super::range(NODE_RANGE))
            };
            let (asker, ..) = one.running.as_ref().unwrap();
            let refused = asker.ask(far).await.unwrap_err();
            assert_eq!(refused.kind, FailureKind::HeldByAnotherNode);
            one.add_of(NODE_RANGE).await.unwrap();
            assert_eq!(one.node_networks(), [late]);
            one.kill().await;
        }
    });
}

#[test]
fn an_object_that_cannot_be_read_costs_a_node_only_its_block() {
    with_api(async |api| {
        let mut one = started(&api, 1).await;
        one.add_of(NODE_RANGE).await.unwrap();
        let network = one.node_networks()[0];
        let name = AddressSpace::new("default", None).block_name(network);
        let mut object = api.object("addressblocks", &name);
        one.kill().await;
        let api = Api::start().await;
        let mut one = started(&api, 1).await;
        object["spec"]["epoch"] = json!("by hand");
        object["metadata"]["labels"] = json!({});
        api.write_unseen("addressblocks", &name, &object);
        one.add_of(NODE_RANGE).await.unwrap();
        assert_ne!(one.node_networks(), [network]);
    });
}

#[test]
fn an_order_larger_than_the_nodes_network_is_refused_at_once() {
    with_api(async |api| {
        let mut one = started(&api, 1).await;
        for says in ["1 of 1 for pods", "1 of 1 for pods", "are leased"] {
            if says == "are leased" {
                one.add_of(NODE_RANGE).await.unwrap();
            }
            let two = node_wire::BlockNeed {
                count: 2,
                ..super::need(&super::range(NODE_RANGE))
            };
            let (asker, ..) = one.running.as_ref().unwrap();
            let refused = asker.ask(two).await.unwrap_err();
            assert_eq!(refused.kind, FailureKind::Exhausted);
            assert!(refused.message.contains(says), "{}", refused.message);
        }
    });
}

/// An `AddressRange` that a person or a killed broker wrote.
fn write_range(api: &Api, block_prefix: u8, gateway: &str) -> String {
    let space = AddressSpace::new("default", None);
    let name = space.block_name(NODE_RANGE.parse().unwrap());
    let spec = serde_json::json!({"store": "default", "range": NODE_RANGE, "blockPrefix": block_prefix,
        "perNode": {"prefix": 31, "gateway": gateway}, "static": [], "confirmed": false});
    let object = serde_json::json!({"apiVersion": "rdma-netdev.io/v1alpha1", "kind": "AddressRange", "spec": spec});
    api.write("addressranges", &name, &object);
    name
}

#[test]
fn a_range_whose_blocks_are_not_networks_of_nodes_is_refused() {
    with_api(async |api| {
        let one = started(&api, 1).await;
        let name = write_range(&api, 30, "first");
        let refused = one.ask(&super::range(NODE_RANGE)).await.unwrap_err();
        assert_eq!(refused.kind, FailureKind::Mismatch, "{}", refused.message);
        let says = format!("AddressRange {name} cannot be used");
        assert!(refused.message.contains(&says), "{}", refused.message);
        assert_eq!(one.node_networks(), []);
    });
}

#[test]
fn an_unconfirmed_range_with_another_per_node_is_removed() {
    with_api(async |api| {
        let mut one = started(&api, 1).await;
        write_range(&api, 31, "last");
        let refused = one.ask(&super::range(NODE_RANGE)).await.unwrap_err();
        assert_eq!(refused.kind, FailureKind::ClusterUnavailable);
        one.add_of(NODE_RANGE).await.unwrap();
    });
}

#[test]
fn a_block_with_another_per_node_than_its_range_is_named() {
    with_api(async |api| {
        let mut one = started(&api, 1).await;
        one.add_of(NODE_RANGE).await.unwrap();
        let network = one.node_networks()[0];
        let name = AddressSpace::new("default", None).block_name(network);
        let last = serde_json::json!({"spec": {"perNode": {"prefix": 31, "gateway": "last"}}});
        api.write("addressblocks", &name, &last);
        let ask = async || one.ask(&super::range(NODE_RANGE)).await;
        let refused = refused(FailureKind::Mismatch, ask).await;
        let says = format!("AddressBlock {name} of this node");
        assert!(refused.message.contains(&says), "{}", refused.message);
    });
}

#[test]
fn a_range_stays_divided_as_at_its_first_use() {
    with_api(async |api| {
        let mut one = started(&api, 1).await;
        one.add_of(NODE_RANGE).await.unwrap();
        let range = super::range(NODE_RANGE);
        let last = node_wire::PerNode {
            gateway: Some(node_wire::Gateway::Last),
            ..super::PER_NODE
        };
        let wider = super::range("10.7.2.0/28")
            .divided(Some(super::PER_NODE))
            .unwrap();
        for (range, says) in [
            (
                range.clone().divided(Some(last)).unwrap(),
                "\"gateway\":\"last\"}, but range 10.7.2.0/29 is cut into networks by perNode",
            ),
            (
                range.divided(None).unwrap(),
                "has no perNode, but range 10.7.2.0/29",
            ),
            (wider, "range 10.7.2.0/28 overlaps range 10.7.2.0/29"),
        ] {
            let refused = one.ask(&range).await.unwrap_err();
            assert_eq!(refused.kind, FailureKind::Mismatch, "{}", refused.message);
            assert!(refused.message.contains(says), "{}", refused.message);
        }
        one.add().await.unwrap();
        let divided = super::range(super::RANGE)
            .divided(Some(super::PER_NODE))
            .unwrap();
        let refused = one.ask(&divided).await.unwrap_err();
        assert!(
            refused.message.contains("is cut into blocks of /30"),
            "{}",
            refused.message
        );
        // An address that was asked for is of the node's network.
        let asked = node_wire::BlockNeed {
            address: Some([10, 7, 2, 7].into()),
            ..super::need(&super::range(NODE_RANGE))
        };
        let network = one.node_networks()[0];
        let (asker, ..) = one.running.as_ref().unwrap();
        if !network.contains([10, 7, 2, 7].into()) {
            let refused = asker.ask(asked).await.unwrap_err();
            assert_eq!(refused.kind, FailureKind::HeldByAnotherNode);
            assert!(
                refused.message.contains(&format!("is not in {network}")),
                "{}",
                refused.message
            );
        }
    });
}
