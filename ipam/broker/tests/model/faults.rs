//! Faults in a certain order, against the same API as the model.

use std::net::SocketAddr;
use std::time::Duration;

use ipam::block::{AddressSpace, hash};
use ipnetwork::IpNetwork;
use node::policy::StoreKind;
use node_wire::{Failure, FailureKind};
use rdma_ipam_broker::api::document::{NODE_LABEL, label_hash};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::{Api, Fault, LATE, Machine, check, with_api};

pub(crate) async fn started(api: &Api, number: usize) -> Machine {
    let mut machine = Machine::new(number);
    api.add_node(&machine.name);
    machine.start(api);
    machine
}

/// One that answers late rather than never, and keeps its blocks.
pub(crate) async fn patient(api: &Api, number: usize) -> Machine {
    let mut machine = Machine::new(number);
    machine.timing.question = Duration::from_millis(4500);
    machine.timing.empty = Duration::from_secs(3600);
    api.add_node(&machine.name);
    machine.start(api);
    machine
}

pub(crate) async fn eventually(what: &str, check: impl FnMut() -> bool) {
    within(LATE, what, check).await;
}

async fn within(time: Duration, what: &str, mut check: impl FnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + time;
    while !check() {
        assert!(tokio::time::Instant::now() < deadline, "not so: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The refusal of a question, which is asked again until it is of this kind.
pub(crate) async fn refused<T: std::fmt::Debug>(
    kind: FailureKind,
    ask: impl AsyncFn() -> Result<T, Failure>,
) -> Failure {
    let deadline = tokio::time::Instant::now() + LATE;
    loop {
        let refused = ask().await.unwrap_err();
        if refused.kind == kind {
            return refused;
        }
        assert!(tokio::time::Instant::now() < deadline, "{refused:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// An address on which nothing listens.
fn free_address() -> SocketAddr {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    free.local_addr().unwrap()
}

/// What a broker serves over HTTP; empty until it listens.
async fn get(address: SocketAddr, path: &str) -> String {
    let mut answer = String::new();
    if let Ok(mut stream) = TcpStream::connect(address).await {
        let request = format!("GET {path} HTTP/1.1\r\nHost: node\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        stream.read_to_string(&mut answer).await.unwrap();
    }
    answer
}

/// Waits until a page has this text.
async fn until_page(address: SocketAddr, path: &str, text: &str) {
    let mut answer = String::new();
    let says = async {
        while !answer.contains(text) {
            tokio::time::sleep(Duration::from_millis(50)).await;
            answer = get(address, path).await;
        }
    };
    let says = tokio::time::timeout(Duration::from_secs(120), says).await;
    assert!(says.is_ok(), "{path} has no {text:?}: {answer}");
}

/// As a runtime: an ADD that did not get its answer in time is made again.
pub(crate) async fn add(machine: &mut Machine, count: usize) {
    let deadline = tokio::time::Instant::now() + LATE;
    for _ in 0..count {
        while let Err(kind) = machine.add().await {
            assert!(tokio::time::Instant::now() < deadline, "{kind:?}");
        }
    }
}

/// A node with as many pods of the range, in a scenario of its own.
pub(crate) fn with_pods(pods: usize, scenario: impl AsyncFnOnce(Api, Machine)) {
    with_api(async |api| {
        let mut one = started(&api, 1).await;
        add(&mut one, pods).await;
        scenario(api, one).await;
    });
}

/// All that others can have of the range.
async fn take_the_rest(machine: &mut Machine) {
    let mut refused = 0;
    while refused < 10 {
        refused += usize::from(machine.add().await.is_err());
    }
}

/// Whether the API says that a node has the blocks of its pods' addresses.
fn has_its_addresses(api: &Api, machine: &Machine) -> bool {
    let all = api.blocks();
    let own = all
        .iter()
        .filter(|(_, node)| node.as_deref() == Some(&machine.name));
    let own: Vec<IpNetwork> = own.map(|(block, _)| block.parse().unwrap()).collect();
    let mut addresses = machine.pods.values();
    addresses.all(|address| own.iter().any(|block| block.contains(*address)))
}

/// A node with ten pods, after what took its blocks: it has them again, and no other node gets an
/// address of theirs.
fn blocks_outlast(loss: impl AsyncFnOnce(&Api, &mut Machine)) {
    with_pods(10, async |api, mut one| {
        loss(&api, &mut one).await;
        eventually("the node has its blocks again", || {
            let granted = one.granted();
            let is_granted = |address| granted.iter().any(|block| block.contains(address));
            has_its_addresses(&api, &one) && one.pods.values().copied().all(is_granted)
        })
        .await;
        let mut two = started(&api, 2).await;
        take_the_rest(&mut two).await;
        check(&[one, two]);
    });
}

#[test]
fn a_claim_of_lost_blocks_that_the_api_does_not_answer_is_tried_again() {
    blocks_outlast(async |api, one| {
        one.kill().await;
        let blocks = one.granted().len();
        api.forget_blocks();
        // An API server that has just come back.
        api.fail(std::iter::repeat_n(Some(Fault::Lost), blocks + 2));
        one.start(api);
    });
}

#[test]
fn blocks_with_leases_outlast_a_restore_of_the_clusters_data() {
    blocks_outlast(async |api, _| api.forget_blocks());
}

#[test]
fn blocks_with_leases_outlast_the_removal_of_objects_that_cannot_be_read() {
    blocks_outlast(async |api, one| {
        api.lose_reads(one.granted().len());
        api.delete_blocks();
    });
}

#[test]
fn blocks_with_leases_outlast_the_loss_of_grants_and_uid_though_the_api_fails() {
    blocks_outlast(async |api, one| {
        one.kill().await;
        // The state directory is lost, the leases are elsewhere; and the Node was made anew.
        std::fs::remove_dir_all(one.policy.state_dir.join("blocks")).unwrap();
        api.remove_node("n1");
        api.add_node("n1");
        api.fail([
            Some(Fault::Lost),
            Some(Fault::Unanswered),
            Some(Fault::Lost),
        ]);
        one.start(api);
    });
}

/// A broker was killed while it gave a block back: the request to remove it can reach the API later.
#[test]
fn a_late_removal_does_not_remove_a_block_that_is_granted_again() {
    with_api(async |api| {
        let mut one = patient(&api, 1).await;
        add(&mut one, 1).await;
        let block = one.granted()[0];
        let name = AddressSpace::new("default", None).block_name(block);
        let before = api.object("addressblocks", &name);
        one.del(0);
        one.kill().await;
        std::fs::remove_dir_all(rdma_ipam_broker::grants::directory(
            &one.policy.state_dir,
            "default",
        ))
        .unwrap();
        std::fs::remove_dir_all(one.policy.state_dir.join(ipam::owned::DIRECTORY)).unwrap();
        one.start(&api);
        eventually("it is granted again", || one.granted() == [block]).await;
        let now = api.object("addressblocks", &name);
        assert_eq!(now["metadata"]["uid"], before["metadata"]["uid"]);
        assert_eq!(
            now["spec"]["epoch"], 2,
            "as the removal was asked for: {now}"
        );
    });
}

#[test]
fn a_copy_of_a_blocks_object_under_another_name_takes_nothing() {
    with_api(async |api| {
        let mut one = patient(&api, 1).await;
        add(&mut one, 1).await;
        let blocks = one.granted();
        let name = AddressSpace::new("default", None).block_name(blocks[0]);
        let mut copy = api.object("addressblocks", &name);
        copy["metadata"]["name"] = json!("zz-copy");
        api.write("addressblocks", "zz-copy", &copy);
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(one.granted(), blocks);
        one.kill().await;
        one.start(&api);
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(one.granted(), blocks);
    });
}

#[test]
fn a_block_without_leases_whose_object_was_removed_is_no_longer_granted() {
    with_pods(1, async |api, mut one| {
        one.del(0);
        let before = one.granted();
        api.delete_blocks();
        eventually("the block is not granted", || one.granted() != before).await;
    });
}

#[test]
fn a_node_that_cannot_write_what_it_has_claims_no_more() {
    with_pods(1, async |api, one| {
        let before = api.blocks().len();
        // A rename fails here, as where the disk is full.
        let file =
            rdma_ipam_broker::grants::directory(&one.policy.state_dir, "default").join("default");
        std::fs::remove_file(&file).unwrap();
        std::fs::create_dir(&file).unwrap();
        let range = super::range(super::RANGE);
        for _ in 0..12 {
            one.ask(&range).await.unwrap_err();
        }
        assert!(api.blocks().len() <= before + 1, "{:?}", api.blocks());
        // It goes on as soon as it can.
        std::fs::remove_dir(&file).unwrap();
        eventually("what was claimed is granted", || !one.granted().is_empty()).await;
    });
}

#[test]
fn full_ranges_do_not_keep_others_waiting() {
    with_api(async |api| {
        let mut two = started(&api, 2).await;
        let full: Vec<String> = (0..12)
            .map(|number| format!("10.8.{number}.0/30"))
            .collect();
        for range in &full {
            two.add_of(range).await.unwrap();
            two.add_of(range).await.unwrap();
        }
        let mut one = Machine::new(1);
        one.timing.ask = Duration::from_secs(2);
        one.timing.question = Duration::from_millis(4500);
        api.add_node(&one.name);
        one.start(&api);
        add(&mut one, 1).await;
        let asker = one.running.as_ref().unwrap().0.clone();
        let asked = full
            .iter()
            .map(|range| asker.ask(super::need(&super::range(range))));
        let others = async {
            let answers = futures_util::future::join_all(asked).await;
            assert!(answers.iter().all(Result::is_err));
        };
        let served = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            let range = super::range("10.7.1.0/24");
            let answer = asker.ask(super::need(&range));
            // An ADD waits five seconds.
            tokio::time::timeout(Duration::from_secs(4), answer).await
        };
        let (_, served) = futures_util::future::join(others, served).await;
        served.expect("in time").expect("a block");
    });
}

fn label(text: &str) -> String {
    format!("{:016x}", hash(text))
}

#[test]
fn an_object_that_cannot_be_read_does_not_matter_to_the_others() {
    with_pods(1, async |api, mut one| {
        let by_hand = json!({
            "metadata": {"labels": {
                "rdma-netdev.io/node-hash": label("n1"),
                "rdma-netdev.io/space-hash": label("default.default"),
            }},
            "spec": {"store": "default", "block": "10.7.0/30", "node": "n1", "nodeUID": "u"},
        });
        // It comes as an event, and then in the lists of a start.
        api.write("addressblocks", "by-hand", &by_hand);
        add(&mut one, 10).await;
        one.kill().await;
        one.start(&api);
        take_the_rest(&mut one).await;
        assert_eq!(one.pods.len(), 62);
    });
}

#[test]
fn an_object_of_another_length_is_not_granted() {
    with_pods(1, async |api, one| {
        let before = one.granted();
        let uid = api.uid("nodes", "n1");
        let by_hand = json!({
            "apiVersion": "rdma-netdev.io/v1alpha1", "kind": "AddressBlock",
            "metadata": {"labels": {
                "rdma-netdev.io/node-hash": label("n1"),
                "rdma-netdev.io/space-hash": label("default.default"),
            }},
            "spec": {"store": "default", "block": "10.7.0.0/26", "node": "n1", "nodeUID": uid, "epoch": 1},
        });
        api.write("addressblocks", "default.default.10.7.0.0-26", &by_hand);
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(one.granted(), before);
    });
}

#[test]
fn the_mark_of_a_node_that_was_out_of_service_is_taken_off() {
    with_api(async |api| {
        let mut one = started(&api, 1).await;
        take_the_rest(&mut one).await;
        assert_eq!(one.pods.len(), 62);
        let mut two = Machine::new(2);
        two.policy.ipam.cooldown = Duration::from_secs(3600);
        api.add_node(&two.name);
        two.start(&api);
        let taint = json!({"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"});
        api.write("nodes", "n1", &json!({"spec": {"taints": [taint]}}));
        let _ = two.add().await;
        assert!(api.marked() > 0);
        api.write("nodes", "n1", &json!({"spec": {"taints": null}}));
        eventually("no block is marked", || api.marked() == 0).await;
    });
}

const OBJECT: &str = "default.default.10.7.0.0-26";

/// The object of a range, as somebody may write it by hand.
fn by_hand(range: &str, block_prefix: u8) -> serde_json::Value {
    json!({
        "apiVersion": "rdma-netdev.io/v1alpha1", "kind": "AddressRange",
        "spec": {"store": "default", "range": range, "blockPrefix": block_prefix, "static": [],
            "confirmed": true},
    })
}

#[test]
fn a_range_that_was_begun_anew_with_another_length_is_not_cut_by_the_old_one() {
    with_pods(1, async |api, mut one| {
        one.del(0);
        let before = one.granted();
        api.delete_blocks();
        eventually("the block is not granted", || one.granted() != before).await;
        api.forget("addressranges", OBJECT);
        api.write("addressranges", OBJECT, &by_hand("10.7.0.0/26", 28));
        tokio::time::sleep(2 * one.timing.agreed).await;
        add(&mut one, 1).await;
        let granted = one.granted();
        assert!(
            granted.iter().all(|block| block.prefix() == 28),
            "{granted:?}"
        );
    });
}

#[test]
fn the_first_use_of_a_range_fixes_how_it_is_cut_whatever_other_policies_say() {
    with_pods(1, async |api, one| {
        let mut two = Machine::new(2);
        let store = two.policy.stores.get_mut("default").unwrap();
        if let StoreKind::Kubernetes { blocks, .. } = &mut store.kind {
            blocks.ipv4 = 32;
        }
        api.add_node("n2");
        two.start(&api);
        add(&mut two, 1).await;
        assert_eq!(two.granted()[0].prefix(), 30);
        // Blocks that are there say it, though the object is gone.
        api.forget("addressranges", OBJECT);
        tokio::time::sleep(2 * two.timing.agreed).await;
        add(&mut two, 8).await;
        assert!(two.granted().iter().all(|block| block.prefix() == 30));
        check(&[one, two]);
    });
}

#[test]
fn a_range_that_is_shortened_or_extended_keeps_its_blocks_or_is_refused_with_a_remedy() {
    with_api(async |api| {
        let mut one = patient(&api, 1).await;
        add(&mut one, 1).await;
        // Cut alike: both have the blocks that they have in common.
        one.add_of("10.7.0.0/25").await.unwrap();
        // Of less than 16 blocks.
        let refused = one.ask(&super::range("10.7.0.0/27")).await.unwrap_err();
        assert_eq!(refused.kind, FailureKind::Mismatch, "{}", refused.message);
        for says in [
            "/30",
            "/32",
            "AddressRange default.default.10.7.0.0-2",
            "end the pods",
        ] {
            assert!(refused.message.contains(says), "{}", refused.message);
        }
        // Other bounds of the same network are the same range.
        let bounds = ipam::range::Spec {
            range: "10.7.0.0/26",
            start: Some("10.7.0.4"),
            end: Some("10.7.0.9"),
            ..Default::default()
        };
        let bounds = ipam::range::Range::new(&bounds, node::policy::Profile::Strict).unwrap();
        for _ in 0..2 {
            one.ask(&bounds).await.unwrap();
        }
        let full = one.ask(&bounds).await.unwrap_err();
        assert!(
            full.message.contains("was cut when it was longer"),
            "{}",
            full.message
        );
    });
}

#[test]
fn of_two_ranges_that_contradict_each_other_one_at_most_is_confirmed() {
    with_api(async |api| {
        let mut machines = Vec::new();
        for number in 1..5 {
            machines.push(started(&api, number).await);
        }
        let ranges = [super::RANGE, super::OTHER_RANGE].map(super::range);
        for round in 0..40 {
            for name in api.names("addressranges") {
                api.forget("addressranges", &name);
            }
            api.fail([
                None,
                [None, Some(Fault::Lost), Some(Fault::Unanswered)][round % 3],
            ]);
            // As long as what they read is not believed any longer.
            tokio::time::sleep(2 * machines[0].timing.agreed).await;
            let asked = machines.iter().enumerate().map(async |(number, machine)| {
                tokio::time::sleep(Duration::from_micros(300 * (round * number % 7) as u64)).await;
                machine.ask(&ranges[number % 2]).await
            });
            let watched = async {
                for _ in 0..100 {
                    assert!(api.confirmed().len() < 2, "{:?}", api.confirmed());
                    tokio::time::sleep(Duration::from_micros(200)).await;
                }
            };
            let _ =
                futures_util::future::join(futures_util::future::join_all(asked), watched).await;
            let confirmed = api.confirmed();
            assert!(confirmed.len() < 2, "{confirmed:?}");
            let expected = match confirmed.first().map(String::as_str) {
                Some(super::OTHER_RANGE) => 32,
                _ => 30,
            };
            let blocks = api.blocks();
            let fits = |block: &String| block.ends_with(&format!("/{expected}"));
            assert!(blocks.keys().all(fits), "{confirmed:?} {blocks:?}");
            api.delete_blocks();
            eventually("no node has a block", || {
                machines.iter().all(|machine| machine.granted().is_empty())
            })
            .await;
            eventually("no block is there", || api.blocks().is_empty()).await;
        }
    });
}

#[test]
fn a_range_that_a_killed_broker_left_unconfirmed_is_in_nobodys_way() {
    with_api(async |api| {
        let mut left = by_hand(super::OTHER_RANGE, 32);
        left["spec"]["confirmed"] = false.into();
        let name = "default.default.10.7.0.16-29";
        api.write("addressranges", name, &left);
        let mut one = patient(&api, 1).await;
        add(&mut one, 1).await;
        assert_eq!(api.confirmed(), [super::RANGE]);
        // The next one is confirmed by whoever needs it.
        let mut left = by_hand("10.8.0.0/26", 30);
        left["spec"]["confirmed"] = false.into();
        api.write("addressranges", "default.default.10.8.0.0-26", &left);
        one.add_of("10.8.0.0/26").await.unwrap();
        assert_eq!(api.confirmed().len(), 2);
    });
}

#[test]
fn ranges_by_hand_that_contradict_each_other_give_no_block() {
    with_api(async |api| {
        api.write("addressranges", OBJECT, &by_hand("10.7.0.0/26", 30));
        let name = "default.default.10.7.0.16-29";
        api.write("addressranges", name, &by_hand(super::OTHER_RANGE, 32));
        // Under another range's name it is not believed.
        api.write("addressranges", "by-hand", &by_hand("10.7.0.0/24", 27));
        let one = patient(&api, 1).await;
        for range in [super::RANGE, super::OTHER_RANGE] {
            let refused = one.ask(&super::range(range)).await.unwrap_err();
            assert_eq!(refused.kind, FailureKind::Mismatch, "{}", refused.message);
        }
        assert!(api.blocks().is_empty());
        api.forget("addressranges", name);
        // A refusal is remembered for a moment.
        tokio::time::sleep(one.timing.ask).await;
        one.ask(&super::range(super::RANGE)).await.unwrap();
    });
}

#[test]
fn a_static_address_is_given_by_itself_as_its_range_was_cut() {
    with_api(async |api| {
        let single = |address: &str, single: bool| node_wire::BlockNeed {
            address: Some(address.parse().unwrap()),
            single,
            ..super::need(&super::range("10.7.0.0/25"))
        };
        let with_static = |number: usize, fixed: &str| {
            let mut machine = Machine::new(number);
            let store = machine.policy.stores.get_mut("default").unwrap();
            if let StoreKind::Kubernetes {
                static_networks, ..
            } = &mut store.kind
            {
                *static_networks = vec![fixed.parse().unwrap()];
            }
            machine.timing.question = Duration::from_millis(4500);
            machine.timing.empty = Duration::from_secs(3600);
            api.add_node(&machine.name);
            machine.start(&api);
            machine
        };
        let one = with_static(1, "10.7.0.4/32");
        let asker = one.running.as_ref().unwrap().0.clone();
        asker.ask(single("10.7.0.4", true)).await.unwrap();
        assert_eq!(one.granted(), ["10.7.0.4/32".parse().unwrap()]);
        // The addresses beside it have no owner.
        let refused = asker.ask(single("10.7.0.5", false)).await.unwrap_err();
        assert!(
            refused.message.contains("with static addresses"),
            "{}",
            refused.message
        );
        // A policy that says otherwise later changes nothing for other addresses.
        let two = with_static(2, "10.7.0.8/32");
        let asker = two.running.as_ref().unwrap().0.clone();
        let refused = asker.ask(single("10.7.0.8", true)).await.unwrap_err();
        assert_eq!(refused.kind, FailureKind::Mismatch);
        assert!(
            refused.message.contains("end the pods"),
            "{}",
            refused.message
        );
        two.ask(&super::range("10.7.0.0/25")).await.unwrap();
        assert!(two.granted().iter().all(|block| block.prefix() == 30));
    });
}

#[test]
fn a_range_without_blocks_leaves_nothing() {
    with_pods(1, async |api, mut one| {
        one.kill().await;
        one.timing.late_events = Duration::from_millis(100);
        one.start(&api);
        assert_eq!(api.names("addressranges"), [OBJECT]);
        one.del(0);
        one.leases().tidy(Duration::ZERO).unwrap();
        let file =
            rdma_ipam_broker::grants::directory(&one.policy.state_dir, "default").join("default");
        eventually("the range is removed", || {
            api.names("addressranges").is_empty() && !file.exists()
        })
        .await;
        // And comes again with the next ADD.
        add(&mut one, 1).await;
        assert!(has_its_addresses(&api, &one));
        assert_eq!(api.names("addressranges"), [OBJECT]);
    });
}

#[test]
fn a_range_that_no_broker_uses_any_longer_is_swept_by_another_ones_broker() {
    with_pods(3, async |api, mut one| {
        one.kill().await;
        api.remove_node("n1");
        let _two = started(&api, 2).await;
        eventually(
            "blocks and range of the node that is gone are removed",
            || api.blocks().is_empty() && api.names("addressranges").is_empty(),
        )
        .await;
    });
}

/// Another node may have read the range before the note, and claim a block of it.
#[test]
fn a_range_that_a_wrong_clock_noted_as_long_empty_rests_before_it_is_removed() {
    with_api(async |api| {
        let mut long_empty = by_hand("10.7.0.0/26", 30);
        long_empty["status"] = json!({"emptySince": "2020-01-01T00:00:00Z"});
        api.write("addressranges", OBJECT, &long_empty);
        let mut one = Machine::new(1);
        one.timing.rest = Duration::from_secs(2);
        api.add_node("n1");
        let started = std::time::Instant::now();
        one.start(&api);
        eventually("the range is removed", || {
            api.names("addressranges").is_empty()
        })
        .await;
        assert!(started.elapsed() >= one.timing.rest, "{started:?}");
    });
}

#[test]
fn a_node_registered_anew_renews_its_blocks_while_its_pods_run() {
    with_api(async |api| {
        let mut one = Machine::new(1);
        one.timing.identity = Duration::from_millis(50);
        api.add_node("n1");
        one.start(&api);
        add(&mut one, 10).await;
        api.remove_node("n1");
        api.add_node("n1");
        let uid = api.uid("nodes", "n1");
        within(
            Duration::from_secs(5),
            "its blocks have the new UID",
            || {
                let uids = api.uids_of("n1");
                !uids.is_empty() && uids.iter().all(|of| *of == uid)
            },
        )
        .await;
        let mut two = started(&api, 2).await;
        take_the_rest(&mut two).await;
        check(&[one, two]);
    });
}

#[test]
fn blocks_of_a_node_registered_anew_are_not_taken_while_its_broker_is_away() {
    with_pods(10, async |api, mut one| {
        one.kill().await;
        api.remove_node("n1");
        // Somebody marks them while there is no such node.
        let mut two = started(&api, 2).await;
        two.timing.rest = Duration::from_secs(3600);
        two.kill().await;
        two.start(&api);
        take_the_rest(&mut two).await;
        eventually("they are marked", || api.marked() > 0).await;
        two.kill().await;
        two.timing.rest = Duration::ZERO;
        api.add_node("n1");
        two.start(&api);
        take_the_rest(&mut two).await;
        assert!(has_its_addresses(&api, &one), "{:?}", api.blocks());
        one.start(&api);
        eventually("its broker takes the marks off", || api.marked() == 0).await;
        check(&[one, two]);
    });
}

#[test]
fn a_block_marked_by_a_clock_that_is_behind_rests_by_the_takers_own() {
    with_api(async |api| {
        let mut one = started(&api, 1).await;
        take_the_rest(&mut one).await;
        one.kill().await;
        api.remove_node("n1");
        let over = json!({"since": "2001-01-01T00:00:00Z", "by": "n9", "why": "gone"});
        for name in api.names("addressblocks") {
            api.write("addressblocks", &name, &json!({"spec": {"over": over}}));
        }
        let mut two = Machine::new(2);
        two.timing.rest = Duration::from_secs(2);
        api.add_node("n2");
        two.start(&api);
        let began = tokio::time::Instant::now();
        add(&mut two, 1).await;
        assert!(began.elapsed() >= two.timing.rest, "{:?}", began.elapsed());
    });
}

#[test]
fn what_an_administrator_took_rests_also_from_its_node_under_another_uid() {
    with_api(async |api| {
        let mut one = Machine::new(1);
        one.policy.ipam.cooldown = Duration::from_secs(3600);
        api.add_node("n1");
        one.start(&api);
        add(&mut one, 1).await;
        let block = one.granted()[0];
        let name = AddressSpace::new("default", None).block_name(block);
        let over = json!({"since": jiff::Timestamp::now(), "by": "an administrator", "why": "so",
            "administrator": true});
        api.write("addressblocks", &name, &json!({"spec": {"over": over}}));
        eventually("the node drops it", || one.granted().is_empty()).await;
        one.kill().await;
        api.remove_node("n1");
        api.add_node("n1");
        one.start(&api);
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(!one.granted().contains(&block));
        // It is anybody's after that. A pod of this node still has an address of it, which no other pod
        // gets while the node has the block.
        one.kill().await;
        one.policy.ipam.cooldown = Duration::ZERO;
        one.start(&api);
        eventually("the block of the pod's address comes back", || {
            one.granted().contains(&block)
        })
        .await;
    });
}

#[test]
fn a_lease_in_another_nodes_block_gets_its_block_once_that_node_is_gone() {
    with_pods(1, async |api, mut one| {
        let block = one.granted()[0];
        one.kill().await;
        std::fs::remove_dir_all(rdma_ipam_broker::grants::directory(
            &one.policy.state_dir,
            "default",
        ))
        .unwrap();
        std::fs::remove_dir_all(one.policy.state_dir.join(ipam::owned::DIRECTORY)).unwrap();
        api.add_node("n2");
        let name = AddressSpace::new("default", None).block_name(block);
        let labels = json!({NODE_LABEL: label_hash("n2")});
        let spec = json!({"node": "n2", "nodeUID": api.uid("nodes", "n2")});
        api.write(
            "addressblocks",
            &name,
            &json!({"metadata": {"labels": labels}, "spec": spec}),
        );
        one.start(&api);
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(one.granted(), []);
        api.remove_node("n2");
        eventually("the lease's block is this node's", || {
            one.granted().contains(&block)
        })
        .await;
    });
}

#[test]
fn a_range_without_a_free_block_is_said_while_it_is_so() {
    with_api(async |api| {
        let mut one = Machine::new(1);
        api.add_node(&one.name);
        let address = free_address();
        one.metrics = Some(address);
        one.start(&api);
        take_the_rest(&mut one).await;
        // Ranges in use are read twice a minute, and the metrics are made six times.
        let until = async |count: u64| {
            let line = format!(
                "rdma_ipam_broker_ranges_without_free_block{{store=\"default\",network_name=\"\"}} {count}"
            );
            until_page(address, "/metrics", &line).await;
        };
        until(1).await;
        while !one.pods.is_empty() {
            one.del(0);
        }
        until(0).await;
        one.kill().await;
    });
}

#[test]
fn readyz_waits_for_the_api_once_and_healthz_never() {
    with_api(async |api| {
        let mut one = Machine::new(1);
        let address = free_address();
        one.metrics = Some(address);
        one.start(&api);
        until_page(address, "/readyz", "the cluster has no Node \"n1\"").await;
        assert!(get(address, "/readyz").await.contains("503"));
        assert!(get(address, "/healthz").await.contains("200 OK"));
        api.add_node("n1");
        until_page(address, "/readyz", "200 OK").await;
        // Pods start without the API while there is room.
        api.set_down(true);
        until_page(address, "/metrics", "rdma_ipam_broker_api_watched 0").await;
        assert!(get(address, "/readyz").await.contains("200 OK"));
        one.kill().await;
        one.start(&api);
        until_page(address, "/readyz", "503").await;
        one.kill().await;
    });
}

#[test]
fn readyz_says_which_rights_are_missing() {
    with_api(async |api| {
        let mut one = Machine::new(1);
        let address = free_address();
        one.metrics = Some(address);
        api.add_node("n1");
        api.forbid_lists(true);
        one.start(&api);
        until_page(address, "/readyz", "blocks are not listed: ").await;
        until_page(address, "/readyz", "403").await;
        api.forbid_lists(false);
        until_page(address, "/readyz", "200 OK").await;
        one.kill().await;
    });
}

#[test]
fn a_broker_that_waits_for_another_answers_healthz() {
    with_api(async |api| {
        let mut one = started(&api, 1).await;
        eventually("the first one has the lock", || {
            one.place.path().join("state/blocks/.lock").exists()
        })
        .await;
        let mut two = Machine::new(1);
        two.policy = one.policy.clone();
        let address = free_address();
        two.metrics = Some(address);
        two.start(&api);
        until_page(address, "/healthz", "200 OK").await;
        until_page(address, "/readyz", "locked by another broker").await;
        one.kill().await;
        until_page(address, "/readyz", "200 OK").await;
        two.kill().await;
    });
}

#[test]
fn nothing_to_do_in_the_api_is_ready() {
    with_api(async |api| {
        let mut one = Machine::new(1);
        one.policy.stores.clear();
        let address = free_address();
        one.metrics = Some(address);
        api.set_down(true);
        one.start(&api);
        until_page(address, "/readyz", "200 OK").await;
        one.kill().await;
    });
}

#[test]
fn a_machine_with_another_nodes_name_gets_no_block() {
    with_pods(1, async |api, mut one| {
        one.kill().await;
        api.write(
            "nodes",
            "n1",
            &json!({"status": {"nodeInfo": {"bootID": "another"}}}),
        );
        let mut copy = Machine::new(1);
        copy.timing.question = Duration::from_millis(4500);
        copy.start(&api);
        let refused = copy.ask(&super::range(super::RANGE)).await.unwrap_err();
        assert!(
            refused.message.contains("another machine"),
            "{}",
            refused.message
        );
        assert_eq!(copy.granted(), []);
    });
}

#[test]
fn a_machine_that_returns_leases_nothing_of_a_block_that_was_taken() {
    with_pods(1, async |api, mut one| {
        one.reboot().await;
        api.remove_node("n1");
        let mut two = started(&api, 2).await;
        // All of the range.
        add(&mut two, 62).await;
        api.add_node("n1");
        // Its broker does not run yet.
        let _ = one.add().await;
        check(&[one, two]);
    });
}

#[test]
fn a_machine_that_returns_leases_from_its_block_once_its_broker_has_seen_the_api() {
    with_api(async |api| {
        let mut one = patient(&api, 1).await;
        add(&mut one, 1).await;
        let blocks = one.granted();
        one.reboot().await;
        one.add().await.unwrap_err();
        api.set_down(true);
        one.start(&api);
        let asked = one.add();
        let back = async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            api.set_down(false);
        };
        // The question that waited does not cost another block.
        let (leased, ()) = tokio::join!(asked, back);
        leased.unwrap();
        assert_eq!(one.granted(), blocks);
        one.kill().await;
        add(&mut one, 1).await;
    });
}

#[test]
fn a_machine_that_returns_waits_for_its_kubelet_and_keeps_its_blocks() {
    with_api(async |api| {
        let says = |one: &Machine| {
            let status = json!({"nodeInfo": {"bootID": one.identity().boot}});
            api.write("nodes", "n1", &json!({"status": status}));
        };
        let mut one = patient(&api, 1).await;
        // No tick helps the ADD.
        one.kill().await;
        one.timing.tick = Duration::from_secs(3600);
        one.start(&api);
        says(&one);
        add(&mut one, 1).await;
        let blocks = one.granted();
        one.reboot().await;
        one.start(&api);
        one.add().await.unwrap_err();
        says(&one);
        one.add().await.unwrap();
        assert_eq!(one.granted(), blocks);
    });
}

#[test]
fn a_block_that_is_marked_as_over_is_not_leased_from_after_a_reboot() {
    with_api(async |api| {
        let mut one = patient(&api, 1).await;
        add(&mut one, 1).await;
        one.reboot().await;
        let out_of_service =
            json!([{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]);
        api.write("nodes", "n1", &json!({"spec": {"taints": out_of_service}}));
        let blocks = one.granted();
        let name = AddressSpace::new("default", None).block_name(blocks[0]);
        let over = json!({"since": jiff::Timestamp::now(), "by": "n9", "why": "out of service"});
        api.write("addressblocks", &name, &json!({"spec": {"over": over}}));
        one.start(&api);
        tokio::time::sleep(Duration::from_millis(300)).await;
        one.kill().await;
        one.add().await.unwrap_err();
        api.write("nodes", "n1", &json!({"spec": {"taints": []}}));
        one.start(&api);
        eventually("the mark is off", || api.marked() == 0).await;
        add(&mut one, 1).await;
        assert_eq!(one.granted(), blocks);
    });
}

#[test]
fn a_broker_restarted_without_the_api_does_not_stop_adds() {
    with_pods(1, async |api, mut one| {
        one.kill().await;
        api.set_down(true);
        one.start(&api);
        tokio::time::sleep(Duration::from_millis(200)).await;
        one.add().await.unwrap();
    });
}
