//! Giving back and losing blocks, with an API that does not answer.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::rc::Rc;

use crate::grants::{Grant, Grants, MAX_BLOCKS};
use ipam::block::AddressSpace;
use ipam::lease::Holder;
use ipam::leases::{AddressRequest, Leases, Order, Ownership};
use ipam::range::{Range, Spec};
use node::policy::{BlockLength, Policy, Profile, StoreBounds, StoreKind, StorePolicy};
use node_wire::FailureKind;

use super::*;
use crate::api::document::RangeSpec;
use crate::api::{Client, Endpoint, RangeObject, Transport};
use crate::metrics::Metrics;
use crate::space::{Shared, Timing};

/// A node with one block, whose API does not answer.
fn worker(place: &Path) -> Worker {
    let kernel = place.join("proc/sys/kernel/random");
    std::fs::create_dir_all(&kernel).unwrap();
    std::fs::write(kernel.join("boot_id"), "b1").unwrap();
    let store = StorePolicy {
        kind: StoreKind::Kubernetes {
            blocks: BlockLength::default(),
            static_networks: Vec::new(),
            after: None,
        },
        bounds: StoreBounds::default(),
    };
    let policy = Policy {
        node: Some("n1".into()),
        state_dir: place.join("state"),
        stores: BTreeMap::from([("default".to_owned(), store)]),
        ..Policy::default()
    };
    let endpoint = Endpoint {
        base: "http://127.0.0.1:1".parse().unwrap(),
        namespace: None,
        authorities: Vec::new(),
        certificate: None,
        token: None,
    };
    let me = NodeId {
        name: "n1".into(),
        uid: "u1".into(),
    };
    let shared = Shared {
        client: Client::new(Transport::new(endpoint).unwrap(), "test"),
        policy,
        root: place.into(),
        name: "n1".into(),
        me: RefCell::new(Some(me.clone())),
        nodes: RefCell::default(),
        marks: RefCell::default(),
        timing: Timing::default(),
        metrics: RefCell::new(Metrics::new()),
    };
    let space = AddressSpace::new("default", None);
    let mut worker = Worker::new(Rc::new(shared), space.clone()).unwrap();
    let now = jiff::Timestamp::now();
    let mut object = BlockObject::new(&space, block(), &me, 1, now);
    object.metadata.uid = "o1".into();
    worker.keep(object);
    worker
}

/// As after reading that a range is cut into blocks of 16.
fn agree(worker: &mut Worker, range: &str) {
    agree_on(worker, range, 28);
}

fn agree_on(worker: &mut Worker, range: &str, prefix: u8) {
    let mut spec = RangeSpec::new(&worker.space, range.parse().unwrap(), prefix, &[]);
    spec.confirmed = true;
    let ranges = vec![RangeObject::new(spec)];
    worker.grids = Some((Instant::now(), Rc::new(ranges)));
}

fn block() -> IpNetwork {
    "10.0.0.0/28".parse().unwrap()
}

fn granted(worker: &Worker) -> Vec<Grant> {
    Grants::read(worker.grants.directory(), &worker.space)
        .unwrap()
        .blocks
}

fn leases(worker: &Worker) -> Leases {
    worker.shared.leases().unwrap()
}

fn lease(worker: &Worker) {
    let spec = Spec {
        range: "10.0.0.0/24",
        ..Spec::default()
    };
    let request = AddressRequest {
        range: Range::new(&spec, Profile::Strict).unwrap(),
        same_host_number_as: None,
        requested: None,
    };
    let holder = Holder {
        network: "rail".into(),
        pod: None,
        container: "c1".into(),
        interface: "net1".into(),
        node: "n1".into(),
        netns: None,
        netns_inode: None,
        device: None,
    };
    let order = Order {
        holder,
        profile: Profile::Strict,
        space: worker.space.clone(),
        overlapping: true,
        requests: vec![request],
        cooldown: worker.shared.policy.ipam.cooldown,
    };
    let parts = Ownership::Parts {
        state_dir: &worker.shared.policy.state_dir,
        last_resort: true,
    };
    leases(worker).take(&order, &parts).unwrap();
}

#[tokio::test]
async fn a_lease_that_came_after_the_decision_keeps_the_block() {
    let place = tempfile::tempdir().unwrap();
    let mut worker = worker(place.path());
    worker.refresh(None).unwrap();
    assert!(worker.own_blocks().iter().all(|own| own.block == block()));
    lease(&worker);
    worker.give_back(block()).await.unwrap();
    assert_eq!(granted(&worker).len(), 1);
    assert!(
        worker.shared.client.transport().requests().is_empty(),
        "nothing was removed"
    );
    assert_eq!(worker.blocks.own[&block()].empty_since, None);
}

#[tokio::test]
async fn a_block_is_not_given_back_while_an_address_cools_down() {
    let place = tempfile::tempdir().unwrap();
    let mut worker = worker(place.path());
    worker.refresh(None).unwrap();
    lease(&worker);
    leases(&worker)
        .release("c1", "net1", "rail", worker.shared.policy.ipam.cooldown)
        .unwrap();
    worker.give_back(block()).await.unwrap();
    assert_eq!(granted(&worker).len(), 1);
    assert!(worker.shared.client.transport().requests().is_empty());
}

#[tokio::test]
async fn a_grant_whose_write_failed_half_way_is_revoked_on_disk() {
    let place = tempfile::tempdir().unwrap();
    let mut worker = worker(place.path());
    let object = worker.blocks.own[&block()].object.clone();
    worker.grants.revoke(block()).unwrap();
    let file = worker.grants.directory().join("default");
    // As where the directory cannot be synced after the rename.
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir_all(file.join("full")).unwrap();
    worker.grant(block()).unwrap_err();
    std::fs::remove_dir_all(&file).unwrap();
    let mut there = worker.grants.noted.clone();
    there.blocks.push(Own::new(object).grant(Vec::new(), ""));
    there
        .write(worker.grants.directory(), &worker.space)
        .unwrap();
    worker.grants.revoke(block()).unwrap();
    assert_eq!(granted(&worker), []);
}

#[tokio::test]
async fn a_block_that_contradicts_its_range_is_not_used() {
    let place = tempfile::tempdir().unwrap();
    let mut worker = worker(place.path());
    lease(&worker);
    let object = worker.blocks.own[&block()].object.clone();
    agree_on(&mut worker, "10.0.0.0/16", 27);
    worker.check_grants().await.unwrap();
    assert_eq!(granted(&worker), []);
    assert_eq!(
        worker.blocks.lost[&block()],
        1,
        "its leases are in conflict"
    );
    worker.changed(object.clone()).await;
    worker.all_listed(vec![object]).await;
    worker.grant_all().unwrap();
    assert_eq!(granted(&worker), []);
    // An administrator corrected the range.
    agree(&mut worker, "10.0.0.0/16");
    worker.grant_all().unwrap();
    assert_eq!(granted(&worker).len(), 1);
}

#[tokio::test]
async fn a_range_that_disagrees_with_its_own_takes_no_block_out_of_use() {
    let place = tempfile::tempdir().unwrap();
    let mut worker = worker(place.path());
    lease(&worker);
    agree(&mut worker, "10.0.0.0/24");
    let own = worker.grids.clone().unwrap().1;
    agree_on(&mut worker, "10.0.0.0/16", 27);
    let (_, ranges) = worker.grids.as_mut().unwrap();
    *ranges = own
        .iter()
        .chain(ranges.iter())
        .cloned()
        .collect::<Vec<_>>()
        .into();
    worker.check_grants().await.unwrap();
    assert_eq!(granted(&worker).len(), 1);
    assert!(worker.blocks.lost.is_empty());
}

#[tokio::test]
async fn a_block_in_doubt_is_not_answered_as_granted() {
    let place = tempfile::tempdir().unwrap();
    let mut worker = worker(place.path());
    agree(&mut worker, "10.0.0.0/24");
    let address: IpAddr = "10.0.0.5".parse().unwrap();
    let range = Range::whole("10.0.0.0/24".parse().unwrap());
    let late = Instant::now() + Timing::default().question;
    let granted = worker.claim_address(&range, address, false, late).await;
    assert_eq!(granted.unwrap(), block());
    worker.grants.revoke(block()).unwrap();
    worker.doubt(block(), Doubt::Whose);
    let doubted = worker.claim_address(&range, address, false, late).await;
    assert_eq!(doubted.unwrap_err().kind, FailureKind::ClusterUnavailable);
}

#[tokio::test]
async fn a_block_whose_removal_has_no_answer_is_not_granted_until_there_is_one() {
    let place = tempfile::tempdir().unwrap();
    let mut worker = worker(place.path());
    worker.give_back(block()).await.unwrap_err();
    assert_eq!(granted(&worker), []);
    assert_eq!(worker.blocks.own[&block()].doubt, Some(Doubt::Removed));
    // An event from before, or the next list, does not change that.
    let object = worker.blocks.own[&block()].object.clone();
    worker.changed(object.clone()).await;
    worker.all_listed(vec![object]).await;
    assert_eq!(granted(&worker), []);
    assert_eq!(worker.blocks.own[&block()].doubt, Some(Doubt::Removed));
}

#[tokio::test]
async fn late_news_of_a_block_that_was_given_back_is_not_believed() {
    let place = tempfile::tempdir().unwrap();
    let mut worker = worker(place.path());
    let object = worker.blocks.own[&block()].object.clone();
    worker.note_removed(object.metadata.uid.clone(), None);
    worker.blocks.own.remove(&block());
    worker.grants.revoke(block()).unwrap();
    worker.changed(object.clone()).await;
    assert_eq!(granted(&worker), []);
    // The same block under another object was claimed anew.
    agree(&mut worker, "10.0.0.0/24");
    let mut anew = object;
    anew.metadata.uid = "o2".into();
    worker.blocks.own.insert(block(), Own::new(anew.clone()));
    worker.changed(anew).await;
    assert_eq!(granted(&worker).len(), 1);
}

#[tokio::test]
async fn a_foreign_block_is_neither_kept_nor_returned_while_the_store_cannot_be_read() {
    let place = tempfile::tempdir().unwrap();
    let mut worker = worker(place.path());
    let me = worker.shared.me.borrow().clone().unwrap();
    lease(&worker);
    // No boot ID: whose leases there are is not known.
    std::fs::remove_file(place.path().join("proc/sys/kernel/random/boot_id")).unwrap();
    assert!(worker.open_store().is_err());
    let other = NodeId {
        name: "n1".into(),
        uid: "u0".into(),
    };
    let network = "10.0.0.16/28".parse().unwrap();
    let object = BlockObject::new(&worker.space, network, &other, 1, jiff::Timestamp::now());
    worker.keep_or_return(object.clone(), &me).await;
    assert!(worker.blocks.foreign.is_empty() && !worker.blocks.own.contains_key(&network));
    assert_eq!(worker.blocks.unread, [object]);
}

#[tokio::test]
async fn a_node_has_no_more_blocks_than_can_be_noted() {
    let place = tempfile::tempdir().unwrap();
    let mut worker = worker(place.path());
    let me = NodeId {
        name: "n1".into(),
        uid: "u1".into(),
    };
    *worker.shared.me.borrow_mut() = Some(me.clone());
    let now = jiff::Timestamp::now();
    for number in 1..u32::try_from(MAX_BLOCKS).unwrap() {
        let address = std::net::Ipv4Addr::from(0x0a01_0000 + number);
        let network = ipam::block::single(address.into());
        let object = BlockObject::new(&worker.space, network, &me, 1, now);
        worker.blocks.own.insert(network, Own::new(object));
    }
    // Noted, but for the file.
    worker.grants.noted.blocks = worker
        .blocks
        .own
        .values()
        .map(|own| own.grant(Vec::new(), worker.grants.boot()))
        .collect();
    agree(&mut worker, "10.9.0.0/24");
    let need = node_wire::BlockNeed {
        store: "default".into(),
        network_name: None,
        range: "10.9.0.0/24".into(),
        spans: vec![([10, 9, 0, 1].into(), [10, 9, 0, 254].into())],
        per_node: None,
        address: None,
        single: false,
        count: 1,
    };
    let (reply, answer) = tokio::sync::oneshot::channel();
    let at = Instant::now();
    worker
        .asked
        .push_back(super::super::Asked { need, at, reply });
    worker.serve_group().await;
    let refused = answer.await.unwrap().unwrap_err();
    assert_eq!(refused.kind, FailureKind::Exhausted, "{}", refused.message);
    // And those that are empty go back at once.
    worker.refresh(None).unwrap();
    assert!(worker.own_blocks().iter().all(|own| own.wanted));
}
