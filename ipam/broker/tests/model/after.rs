//! Blocks that come after whereabouts: what it leases is not leased by blocks.

use std::time::Duration;

use ipam::whereabouts::pool_name;
use node::policy::StoreKind;
use node_wire::FailureKind;
use serde_json::{Value, json};

use super::faults::{eventually, refused};
use super::{Api, LATE, Machine, NODE_RANGE, check, need, range, with_api};

fn after(api: &Api, number: usize) -> Machine {
    let mut machine = Machine::new(number);
    let store = machine.policy.stores.get_mut("default").unwrap();
    if let StoreKind::Kubernetes { after, .. } = &mut store.kind {
        *after = Some("kube-system".into());
    }
    api.add_node(&machine.name);
    machine
}

/// Leases of whereabouts in a range, by the distance to its network address; `false` ends one.
fn lease_before(api: &Api, range: &str, leases: impl IntoIterator<Item = (u32, bool)>) {
    lease_in_pool_of(None, api, range, leases);
}

/// The same in the pool of a node's slice or of a network name.
fn lease_in_pool_of(
    owner: Option<&str>,
    api: &Api,
    range: &str,
    leases: impl IntoIterator<Item = (u32, bool)>,
) {
    let leases = leases.into_iter().map(|(offset, is_there)| {
        let lease = json!({"id": "c", "podref": "default/old", "ifname": "net1"});
        (
            offset.to_string(),
            if is_there { lease } else { Value::Null },
        )
    });
    let leases: serde_json::Map<String, Value> = leases.collect();
    let pool = json!({"apiVersion": "whereabouts.cni.cncf.io/v1alpha1", "kind": "IPPool",
        "spec": {"range": range, "allocations": leases}});
    let name = pool_name(range.parse().unwrap(), owner);
    api.write("ippools", &name, &pool);
}

/// One address of a range, when the node has waited.
async fn add_after(machine: &mut Machine, range: &str) -> u8 {
    let deadline = tokio::time::Instant::now() + LATE;
    loop {
        if let Ok(address) = machine.add_of(range).await {
            return address
                .to_string()
                .rsplit('.')
                .next()
                .unwrap()
                .parse()
                .unwrap();
        }
        assert!(
            tokio::time::Instant::now() < deadline,
            "no address of {range}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[test]
fn each_range_waits_and_is_read_when_it_comes_to_blocks() {
    with_api(async |api| {
        let mut one = after(&api, 1);
        one.start(&api);
        add_after(&mut one, "10.7.0.0/26").await;
        // Another network is still whereabouts', and comes to blocks later.
        lease_before(&api, "10.8.0.0/26", (1..61).map(|offset| (offset, true)));
        let refused = one.add_of("10.8.0.0/26").await;
        assert_eq!(refused, Err(FailureKind::ClusterUnavailable));
        // An ADD that was on its way.
        lease_before(&api, "10.8.0.0/26", [(61, true)]);
        assert_eq!(add_after(&mut one, "10.8.0.0/26").await, 62);
    });
}

#[test]
fn a_network_whose_gateway_is_leased_is_not_taken_for_an_address_either() {
    with_api(async |api| {
        let mut one = after(&api, 1);
        lease_before(&api, NODE_RANGE, [(2, true)]);
        one.start(&api);
        tokio::time::sleep(one.timing.settle * 2).await;
        let of_its_network = node_wire::BlockNeed {
            address: Some([10, 7, 2, 3].into()),
            ..need(&range(NODE_RANGE))
        };
        let (asker, ..) = one.running.as_ref().unwrap();
        let ask = async || asker.ask(of_its_network.clone()).await;
        let refused = refused(FailureKind::HeldByAnotherNode, ask).await;
        let gateway = "whereabouts leases 10.7.2.2";
        assert!(refused.message.contains(gateway), "{}", refused.message);
    });
}

#[test]
fn networks_that_went_back_to_the_store_before_can_come_again() {
    with_api(async |api| {
        let mut one = after(&api, 1);
        one.start(&api);
        add_after(&mut one, "10.7.0.16/29").await;
        one.del(0);
        eventually("the node has no block", || one.granted().is_empty()).await;
        lease_before(&api, "10.7.0.16/29", (1..5).map(|offset| (offset, true)));
        tokio::time::sleep(one.timing.reread).await;
        let refused = one.add_of("10.7.0.16/29").await;
        assert_eq!(refused, Err(FailureKind::ClusterUnavailable));
        lease_before(&api, "10.7.0.16/29", [(5, true)]);
        assert_eq!(add_after(&mut one, "10.7.0.16/29").await, 22);
    });
}

#[test]
fn addresses_whose_leases_ended_are_given_by_a_node_without_blocks() {
    with_api(async |api| {
        let mut one = after(&api, 1);
        lease_before(&api, "10.7.0.0/26", (1..63).map(|offset| (offset, true)));
        one.start(&api);
        tokio::time::sleep(one.timing.settle).await;
        for _ in 0..4 {
            one.add().await.unwrap_err();
            tokio::time::sleep(one.timing.settle / 2).await;
        }
        assert!(api.blocks().is_empty(), "{:?}", api.blocks());
        lease_before(&api, "10.7.0.0/26", [(40, false)]);
        assert_eq!(add_after(&mut one, "10.7.0.0/26").await, 40);
    });
}

#[test]
fn a_block_whose_addresses_are_all_leased_is_no_answer_to_who_asks_others() {
    with_api(async |api| {
        let mut one = after(&api, 1);
        one.start(&api);
        // The first eight blocks of 16.
        lease_before(&api, "10.7.0.0/26", (1..32).map(|offset| (offset, true)));
        add_after(&mut one, "10.7.0.0/26").await;
        while one.pods.len() < 31 {
            let _ = one.add().await;
        }
        let mut two = after(&api, 2);
        two.start(&api);
        let ask = async || two.ask(&range(super::RANGE)).await;
        let refused = refused(FailureKind::Exhausted, ask).await;
        assert!(
            refused
                .message
                .contains("whereabouts leases 31 of its addresses"),
            "{}",
            refused.message
        );
        assert_eq!(two.granted(), []);
        check(&[one, two]);
    });
}

#[test]
fn leases_in_the_slice_of_a_node_count_and_those_of_another_network_name_do_not() {
    with_api(async |api| {
        let mut one = after(&api, 1);
        let slice = Some(one.name.as_str());
        lease_in_pool_of(slice, &api, "10.7.0.0/26", (1..62).map(|at| (at, true)));
        lease_in_pool_of(Some("blue"), &api, "10.7.0.0/26", [(62, true)]);
        one.start(&api);
        assert_eq!(add_after(&mut one, "10.7.0.0/26").await, 62);
    });
}

#[test]
fn a_range_whose_blocks_an_administrator_removed_waits_again() {
    with_api(async |api| {
        let mut one = after(&api, 1);
        one.timing.reread = Duration::from_secs(3600);
        one.timing.empty = Duration::from_secs(3600);
        one.start(&api);
        add_after(&mut one, "10.7.0.16/29").await;
        one.del(0);
        eventually("the node has no block", || {
            // Until the address has cooled down, the node claims them again.
            api.delete_blocks();
            one.granted().is_empty()
        })
        .await;
        lease_before(&api, "10.7.0.16/29", (1..6).map(|offset| (offset, true)));
        let refused = one.add_of("10.7.0.16/29").await;
        assert_eq!(refused, Err(FailureKind::ClusterUnavailable));
        assert_eq!(add_after(&mut one, "10.7.0.16/29").await, 22);
    });
}
