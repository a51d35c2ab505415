//! The states of pools over a host that changes.

use std::time::{Duration, SystemTime};

use hca_trees::{NetdevSpec, On, PciSpec, RdmaSpec, Tree};

use super::*;
use crate::config::{self, NodeClass};
use crate::example::scan;
use crate::history;
use crate::snapshot::{DeviceNode, Health, UnhealthyReason};
use node_wire::status::UnitCounts;

struct Node {
    tree: Tree,
    _dir: tempfile::TempDir,
}

impl Node {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let tree = Tree::new(dir.path());
        tree.rdma_core(true);
        tree.pci(&PciSpec::MLX5);
        tree.netdev(&NetdevSpec {
            name: "ens1",
            on: On::Pci("0000:3b:00.0"),
            ..NetdevSpec::default()
        });
        tree.rdma(&RdmaSpec {
            on: On::Pci("0000:3b:00.0"),
            ..RdmaSpec::default()
        });
        Self { tree, _dir: dir }
    }

    fn scan(&self) -> HostSnapshot {
        scan(&self.tree)
    }
}

/// A daemon that plans with each scan.
struct Daemon {
    world: World,
    history: History,
    plan: Plan,
}

impl Default for Daemon {
    /// One that knows that no pod holds anything.
    fn default() -> Self {
        let allocated = held(&[]);
        Self {
            world: World {
                allocated,
                ..World::default()
            },
            history: History::default(),
            plan: Plan::default(),
        }
    }
}

impl Daemon {
    fn new(memory: Memory) -> Self {
        Self {
            history: History::new(memory),
            ..Self::default()
        }
    }

    /// One that found no file of known HCAs.
    fn known() -> Self {
        Self::new(Memory::load(
            std::path::Path::new("/nonexistent"),
            String::new(),
        ))
    }

    /// One that knows who holds what.
    fn with(allocated: Option<Arc<Holdings>>) -> Self {
        let mut daemon = Self::default();
        daemon.world.allocated = allocated;
        daemon
    }

    fn update(&mut self, config: &Config, seen: &HostSnapshot, now: Instant) -> Option<Instant> {
        self.plan = plan(
            config,
            seen,
            &self.world,
            &mut self.history,
            now,
            SystemTime::now(),
        );
        self.plan.due.into_iter().chain(self.plan.scan_due).min()
    }
}

impl Node {
    /// In exclusive mode, with an RDMA device and its netdev in a pod's namespace. The device's verbs
    /// node stays in sight.
    fn take(&self) {
        self.tree.rdma_core(false);
        self.tree.hide_rdma("mlx5_0");
        self.tree.hide_netdev("ens1");
    }

    fn port(&self, state: &str) {
        self.tree.set_port_state("mlx5_0", 1, state, "2: Polling");
    }

    /// Writes what a daemon knows, as it does after each scan; the directory of the file.
    fn keep(&self, daemon: &Daemon) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join(history::FILE);
        node::file::replace(&file, daemon.history.memory.text().unwrap()).unwrap();
        directory
    }
}

const HCA: &str = "0000:3b:00.0";

/// One pod holds these units of `rdma/a`.
fn held(ids: &[&str]) -> Option<Arc<Holdings>> {
    held_of("rdma/a", ids)
}

fn held_of(resource: &str, ids: &[&str]) -> Option<Arc<Holdings>> {
    held_at(Instant::now(), resource, ids)
}

/// The same by an answer to a question of that time.
fn held_at(at: Instant, resource: &str, ids: &[&str]) -> Option<Arc<Holdings>> {
    let held = kubelet_api::client::Held {
        namespace: "ml".into(),
        pod: "train-0".into(),
        container: "worker".into(),
        resource: resource.into(),
        ids: ids.iter().map(ToString::to_string).collect(),
    };
    Some(Arc::new(Holdings::listed(vec![held], at)))
}

fn config(words: &str) -> Config {
    named("rdma/a", words)
}

fn named(resource: &str, words: &str) -> Config {
    config::parse(&format!(
        "version: 1\npools:\n- {{ resource: {resource}, {words} }}\n"
    ))
    .unwrap()
}

const BY_NAME: &str = "mode: exclusive, select: { ifNames: [ens1], linkSpeed: [100G] }";

fn counts(daemon: &Daemon) -> UnitCounts {
    daemon.plan.pools[0].count()
}

#[test]
fn a_port_is_healthy_again_after_its_delay_and_says_when() {
    let (node, config) = (Node::new(), config(BY_NAME));
    let (mut daemon, start) = (Daemon::default(), Instant::now());
    assert_eq!(daemon.update(&config, &node.scan(), start), None);
    assert_eq!(
        counts(&daemon),
        UnitCounts {
            healthy: 1,
            unhealthy: 0
        }
    );
    node.tree
        .set_port_state("mlx5_0", 1, "1: DOWN", "3: Disabled");
    assert_eq!(
        daemon.update(&config, &node.scan(), start + Duration::from_secs(10)),
        None
    );
    assert_eq!(
        counts(&daemon),
        UnitCounts {
            healthy: 0,
            unhealthy: 1
        }
    );
    node.tree
        .set_port_state("mlx5_0", 1, "4: ACTIVE", "5: LinkUp");
    let up = start + Duration::from_secs(20);
    let due = daemon.update(&config, &node.scan(), up).unwrap();
    assert_eq!(due, up + config.damping.up_delay);
    assert_eq!(
        counts(&daemon),
        UnitCounts {
            healthy: 0,
            unhealthy: 1
        }
    );
    assert_eq!(daemon.update(&config, &node.scan(), due), None);
    assert_eq!(
        counts(&daemon),
        UnitCounts {
            healthy: 1,
            unhealthy: 0
        }
    );
    let resource = config.pools[0].resource.clone();
    assert_eq!(
        daemon.history.transitions[&(resource.clone(), "unhealthy")],
        1
    );
    assert_eq!(daemon.history.transitions[&(resource, "healthy")], 1);
}

/// What a pod does with an HCA of these tests, and what the host sees of it.
enum Step {
    Taken,
    /// A pod has the netdev, and its port is down.
    DownInPod,
    /// The kernel has set the netdev down.
    Returned,
    /// The netdev is up, and its port is down.
    Down,
    Up,
}

/// Plays steps, each at a second; the seconds after which the HCA is unhealthy.
fn unhealthy_after(exclusive_mode: bool, steps: &[(u64, Step)]) -> Vec<u64> {
    const FLAGS: &str = "/sys/class/net/ens1/flags";
    let config = config("mode: exclusive, select: { functions: [pf] }");
    let (mut node, start) = (Node::new(), Instant::now());
    let mut daemon = Daemon::known();
    daemon.update(&config, &node.scan(), start);
    let mut unhealthy = Vec::new();
    for (second, step) in steps {
        daemon.world.allocated = match step {
            Step::Taken | Step::DownInPod => held(&[HCA]),
            _ => held(&[]),
        };
        match step {
            Step::Taken if exclusive_mode => node.take(),
            Step::Taken => node.tree.hide_netdev("ens1"),
            Step::DownInPod if exclusive_mode => {}
            Step::DownInPod => node.port("1: DOWN"),
            Step::Down => {
                node.tree.file(FLAGS, "0x1003");
                node.port("1: DOWN");
            }
            Step::Up => node.port("4: ACTIVE"),
            Step::Returned => {
                node = Node::new();
                node.tree.file(FLAGS, "0x1002");
                node.port("1: DOWN");
                if exclusive_mode {
                    node.tree.rdma_core(false);
                }
            }
        }
        daemon.update(&config, &node.scan(), start + Duration::from_secs(*second));
        if counts(&daemon).healthy == 0 {
            unhealthy.push(*second);
        }
    }
    unhealthy
}

#[test]
fn an_hca_that_returned_from_a_pod_is_healthy_while_its_link_comes_up() {
    use Step::{Down, DownInPod, Returned, Taken, Up};
    for exclusive_mode in [true, false] {
        let unhealthy = |steps: &[(u64, Step)]| unhealthy_after(exclusive_mode, steps);
        let up = [
            (1, Taken),
            (5, DownInPod),
            (6, Returned),
            (7, Down),
            (16, Up),
            (17, Up),
        ];
        assert_eq!(unhealthy(&up), [0; 0], "{exclusive_mode}");
        // Where it was up since, a loss counts at once.
        let lost = [
            (1, Taken),
            (6, Returned),
            (7, Down),
            (8, Up),
            (9, Down),
            (10, Up),
            (11, Up),
        ];
        assert_eq!(unhealthy(&lost), [9, 10], "{exclusive_mode}");
        // One that stays down is broken.
        let broken = [
            (1, Taken),
            (6, Returned),
            (7, Down),
            (21, Down),
            (22, Down),
            (30, Up),
            (31, Up),
        ];
        assert_eq!(unhealthy(&broken), [22, 30], "{exclusive_mode}");
        // Pods that follow each other do not make it a port that flaps.
        let turn = |at| {
            [
                (at, Taken),
                (at + 1, Returned),
                (at + 2, Down),
                (at + 3, Up),
            ]
        };
        let turns: Vec<_> = (1..40).step_by(4).flat_map(turn).collect();
        assert_eq!(unhealthy(&turns), [0; 0], "{exclusive_mode}");
    }
    // Where the host sees the port of an HCA whose netdev a pod has.
    let in_pod = [
        (1, Taken),
        (5, DownInPod),
        (19, DownInPod),
        (20, DownInPod),
        (30, Up),
        (31, Up),
    ];
    assert_eq!(unhealthy_after(false, &in_pod), [20, 30]);
}

#[test]
fn nothing_is_offered_while_it_is_not_known_who_holds_it() {
    let (node, config) = (Node::new(), config(BY_NAME));
    let (mut daemon, now) = (Daemon::with(None), Instant::now());
    // Soon it is planned again.
    let due = daemon.update(&config, &node.scan(), now);
    assert_eq!(due, now.checked_add(GATE_INTERVAL));
    assert_eq!(counts(&daemon).healthy, 0);
    assert_eq!(daemon.plan.handed_over().count(), 1);
    daemon.world.allocated = held(&[]);
    daemon.update(&config, &node.scan(), now);
    assert_eq!(counts(&daemon).healthy, 1);
}

#[test]
fn an_unchanged_pool_is_no_news() {
    let (node, config) = (Node::new(), config(BY_NAME));
    let (mut daemon, now) = (Daemon::known(), Instant::now());
    daemon.update(&config, &node.scan(), now);
    let before = daemon.plan.pools[0].clone();
    daemon.update(&config, &node.scan(), now);
    assert!(Arc::ptr_eq(&before, &daemon.plan.pools[0]));
}

/// What the host shows is the RDMA device alone: in shared mode it stays when its netdev goes.
#[test]
fn a_pf_in_a_pod_stays_healthy_whatever_selects_it() {
    for selector in [
        "pfNames: [ens1]",
        "ifNames: [ens1]",
        "linkTypes: [ether], pfNames: [ens1]",
        "not: { pfNames: [ens2] }",
    ] {
        let node = Node::new();
        let config = config(&format!("mode: exclusive, select: {{ {selector} }}"));
        let (mut daemon, now) = (Daemon::known(), Instant::now());
        daemon.update(&config, &node.scan(), now);
        node.tree.hide_netdev("ens1");
        daemon.update(&config, &node.scan(), now);
        assert_eq!(counts(&daemon).healthy, 1, "{selector}");
        // The daemon starts anew.
        let kept = node.keep(&daemon);
        let mut daemon = Daemon::new(Memory::load(kept.path(), String::new()));
        daemon.update(&config, &node.scan(), now);
        assert_eq!(counts(&daemon).healthy, 1, "{selector}");
    }
}

/// Every selector that needs what the host cannot see.
const HIDDEN: [&str; 9] = [
    "linkSpeed: [100G]",
    "firmware: [\"28.*\"]",
    "guids: [\"b859:9f03:0000:0001\"]",
    "boardIDs: [MT_0000000838]",
    "ports: [1]",
    "ifNames: [ens1]",
    "pfNames: [ens1]",
    "linkTypes: [ether]",
    "not: { linkSpeed: [200G] }",
];

#[test]
fn a_held_hca_keeps_all_attributes_over_a_restart() {
    for selector in HIDDEN {
        let node = Node::new();
        let config = config(&format!("mode: exclusive, select: {{ {selector} }}"));
        let (mut daemon, now) = (Daemon::known(), Instant::now());
        daemon.update(&config, &node.scan(), now);
        assert_eq!(counts(&daemon).healthy, 1, "{selector}");
        let kept = node.keep(&daemon);
        node.take();
        for boot in [String::new(), "another boot".into()] {
            let is_same_boot = boot.is_empty();
            let mut daemon = Daemon::new(Memory::load(kept.path(), boot));
            daemon.update(&config, &node.scan(), now);
            let healthy = u64::from(is_same_boot);
            assert_eq!(counts(&daemon).healthy, healthy, "{selector}");
            if is_same_boot {
                let member = &daemon.plan.pools[0].members()[0];
                let verbs = |node: &&DeviceNode| node.class == NodeClass::Uverbs;
                let mut paths = member.nodes.iter().filter(verbs).map(|node| &node.path);
                assert_eq!(
                    paths.next().unwrap(),
                    "/dev/infiniband/uverbs0",
                    "{selector}"
                );
            }
        }
    }
}

/// A move takes the port down, and a scan may come between.
#[test]
fn a_port_that_is_down_keeps_the_rate_it_had() {
    let node = Node::new();
    let config = config("mode: exclusive, select: { linkSpeed: [100G] }");
    let (mut daemon, now) = (Daemon::known(), Instant::now());
    daemon.update(&config, &node.scan(), now);
    node.tree
        .set_port_state("mlx5_0", 1, "1: DOWN", "3: Disabled");
    let rate = "/sys/class/infiniband/mlx5_0/ports/1/rate";
    node.tree.file(rate, "40 Gb/sec (4X QDR)");
    node.tree.hide_netdev("ens1");
    daemon.update(&config, &node.scan(), now);
    let member = &daemon.plan.pools[0].members()[0];
    let is_port = member
        .health
        .has(|reason| matches!(reason, UnhealthyReason::Port(_)));
    assert!(is_port, "no pod has it: {:?}", member.health);
    let kept = node.keep(&daemon);
    node.tree.rdma_core(false);
    node.tree.hide_rdma("mlx5_0");
    let mut daemon = Daemon::new(Memory::load(kept.path(), String::new()));
    daemon.update(&config, &node.scan(), now);
    assert_eq!(counts(&daemon).healthy, 1);
    // A port that is up has another rate now.
    let node = Node::new();
    let mut daemon = Daemon::new(Memory::load(kept.path(), String::new()));
    node.tree.file(rate, "40 Gb/sec (4X QDR)");
    daemon.update(&config, &node.scan(), now);
    assert_eq!(counts(&daemon), UnitCounts::default());
}

/// Nothing is known of the HCA but where it is: the first daemon of this boot.
#[test]
fn what_is_not_visible_is_neither_match_nor_mismatch() {
    let negated = HIDDEN.map(|selector| format!("not: {{ {selector} }}"));
    let all = HIDDEN.map(str::to_owned).into_iter().chain(negated);
    for selector in all {
        let node = Node::new();
        node.take();
        let config = config(&format!("mode: exclusive, select: {{ {selector} }}"));
        let mut daemon = Daemon::default();
        daemon.update(&config, &node.scan(), Instant::now());
        assert_eq!(counts(&daemon), UnitCounts::default(), "{selector}");
        // The kubelet's allocation says that it is this pool's.
        let mut daemon = Daemon::with(held(&[HCA]));
        daemon.update(&config, &node.scan(), Instant::now());
        assert_eq!(counts(&daemon).healthy, 1, "{selector}");
    }
    // What is visible decides all the same.
    let node = Node::new();
    node.take();
    for (selector, healthy) in [
        ("vendors: [15b3], functions: [pf]", 1),
        ("vendors: [8086], linkSpeed: [100G]", 0),
        (
            "pciAddresses: [\"0000:3b:00.0\"], not: { vendors: [15b3] }",
            0,
        ),
    ] {
        let config = config(&format!("mode: exclusive, select: {{ {selector} }}"));
        let mut daemon = Daemon::default();
        daemon.update(&config, &node.scan(), Instant::now());
        assert_eq!(counts(&daemon).healthy, healthy, "{selector}");
    }
}

#[test]
fn a_name_that_is_another_netdevs_now_is_not_the_held_hcas() {
    let node = Node::new();
    let config = config("mode: exclusive, exclude: [uplinks], select: { vendors: [15b3] }");
    let (mut daemon, now) = (Daemon::known(), Instant::now());
    daemon.update(&config, &node.scan(), now);
    node.tree.hide_netdev("ens1");
    node.tree.pci(&PciSpec {
        address: "0000:86:00.0",
        above: "pci0000:85",
        ..PciSpec::MLX5
    });
    node.tree.netdev(&NetdevSpec {
        name: "ens1",
        on: On::Pci("0000:86:00.0"),
        ..NetdevSpec::default()
    });
    let mut seen = node.scan();
    let why = hca::uplink::Why::DefaultRoute;
    seen.uplinks = hca::uplink::Uplinks::Known([("ens1".to_owned(), why)].into());
    daemon.update(&config, &seen, now);
    assert_eq!(counts(&daemon).healthy, 1);
    assert!(daemon.plan.pools[0].members()[0].hca.netdevs.is_empty());
}

#[test]
fn an_hca_plugged_in_the_place_of_another_has_none_of_its_attributes() {
    let node = Node::new();
    let config = config("mode: exclusive, select: { ifNames: [ens1] }");
    let (mut daemon, now) = (Daemon::known(), Instant::now());
    daemon.update(&config, &node.scan(), now);
    assert_eq!(counts(&daemon).healthy, 1);
    let kept = node.keep(&daemon);
    node.tree.hide_netdev("ens1");
    let device = format!("/sys/bus/pci/devices/{HCA}/device");
    std::fs::write(node.tree.path(device), "0x1017\n").unwrap();
    let anew = Daemon::new(Memory::load(kept.path(), String::new()));
    for mut daemon in [daemon, anew] {
        daemon.update(&config, &node.scan(), now);
        assert_eq!(counts(&daemon).healthy, 0);
    }
}

#[test]
fn a_software_device_in_a_pod_is_known_by_its_name() {
    let node = Node::new();
    node.tree.rdma_core(false);
    node.tree.rdma(&RdmaSpec {
        name: "rxe0",
        node_guid: "5054:00ff:fe00:0001",
        ..RdmaSpec::default()
    });
    let config = config("mode: exclusive, select: { functions: [software], linkSpeed: [100G] }");
    let (mut daemon, now) = (Daemon::known(), Instant::now());
    daemon.update(&config, &node.scan(), now);
    let kept = node.keep(&daemon);
    node.tree.hide_rdma("rxe0");
    daemon.update(&config, &node.scan(), now);
    assert_eq!(counts(&daemon).healthy, 1);
    let mut daemon = Daemon::new(Memory::load(kept.path(), String::new()));
    daemon.update(&config, &node.scan(), now);
    assert_eq!(counts(&daemon).healthy, 1);
}

#[test]
fn a_damaged_file_of_known_hcas_is_not_believed() {
    let node = Node::new();
    let config = config("mode: exclusive, select: { linkSpeed: [100G] }");
    let (mut daemon, now) = (Daemon::known(), Instant::now());
    daemon.update(&config, &node.scan(), now);
    let kept = node.keep(&daemon);
    let file = kept.path().join(history::FILE);
    let text = std::fs::read_to_string(&file).unwrap();
    node.take();
    let healthy = || {
        let mut daemon = Daemon::new(Memory::load(kept.path(), String::new()));
        daemon.update(&config, &node.scan(), now);
        counts(&daemon).healthy
    };
    assert_eq!(healthy(), 1);
    let newer = text.replace("\"version\":1", "\"version\":2");
    for wrong in ["", "{", "[]", &text[..text.len() / 2], &newer] {
        std::fs::write(&file, wrong).unwrap();
        assert_eq!(healthy(), 0, "{wrong}");
    }
    std::fs::write(&file, text).unwrap();
    assert_eq!(healthy(), 1);
}

#[test]
fn a_pool_that_is_configured_anew_forgets_what_it_had() {
    let node = Node::new();
    let (mut daemon, now) = (Daemon::known(), Instant::now());
    daemon.update(&config(BY_NAME), &node.scan(), now);
    let other = config("mode: exclusive, select: { ifNames: [ens2] }");
    daemon.history.keep_only(|_| false);
    daemon.update(&other, &node.scan(), now);
    assert!(daemon.plan.pools[0].members().is_empty());
    // Without that, an HCA is never dropped.
    let mut daemon = Daemon::default();
    daemon.update(&config(BY_NAME), &node.scan(), now);
    daemon.update(&other, &node.scan(), now);
    assert_eq!(
        daemon.plan.pools[0].members()[0].health,
        Health::from([UnhealthyReason::Excluded])
    );
}

#[test]
fn an_hca_that_changes_pools_waits_until_the_kubelet_said_who_has_it() {
    let node = Node::new();
    let now = Instant::now();
    let at = |seconds| now + Duration::from_secs(seconds);
    let shares = "mode: shared, shares: 2, select: { ifNames: [ens1] }";
    let whole = "mode: shared, policy: all-hcas, shares: 2, select: { ifNames: [ens1] }";
    let tag = hca::unit::PoolTag::of("rdma/a");
    let units = |words: &str| match words {
        BY_NAME => HCA.to_owned(),
        _ if words == whole => format!("pool_{tag}_0"),
        _ => format!("{HCA}_{tag}_0"),
    };
    let health = |daemon: &Daemon| {
        let mut members = daemon.plan.pools[0].members().iter();
        members.next().map(|member| member.health.clone())
    };
    for (first, resource, then, waits) in [
        (BY_NAME, "rdma/b", BY_NAME, true),
        (BY_NAME, "rdma/b", shares, true),
        (BY_NAME, "rdma/b", whole, true),
        (shares, "rdma/b", BY_NAME, true),
        (whole, "rdma/b", BY_NAME, true),
        // Of the same name, with other units.
        (shares, "rdma/a", BY_NAME, true),
        (whole, "rdma/a", BY_NAME, true),
        (shares, "rdma/b", shares, false),
        (whole, "rdma/b", shares, false),
        (BY_NAME, "rdma/a", BY_NAME, false),
    ] {
        for is_held in [false, true] {
            let what = format!("{first}; {resource} {then}; {is_held}");
            let mut daemon = Daemon::known();
            daemon.world.allocated = held_at(at(0), "rdma/a", &[]);
            daemon.update(&config(first), &node.scan(), now);
            assert_eq!(health(&daemon), Some(Health::default()), "{what}");
            daemon.history.sent(at(1));
            daemon.history.keep_only(|_| false);
            // The kubelet is asked before it was sent the new list, and half a second later.
            for millis in [2000, 10_500] {
                let asked = now + Duration::from_millis(millis);
                daemon.world.allocated = held_at(asked, "rdma/a", &[]);
                let due = daemon.update(&named(resource, then), &node.scan(), now);
                assert_eq!(due.is_some(), waits, "{what}");
                let is_offered = health(&daemon) == Some(Health::default());
                assert_eq!(is_offered, !waits, "{what}");
                assert_eq!(
                    daemon.plan.handed_over().count(),
                    usize::from(waits),
                    "{what}"
                );
                // Once more after each scan.
                daemon.history.sent(at(millis / 1000 + 8));
            }
            let unit = units(first);
            let held: &[&str] = if is_held { &[&unit] } else { &[] };
            daemon.world.allocated = held_at(at(12), "rdma/a", held);
            daemon.update(&named(resource, then), &node.scan(), now);
            assert_eq!(daemon.plan.handed_over().count(), 0, "{what}");
            let is_offered = health(&daemon) == Some(Health::default());
            assert_eq!(is_offered, !(is_held && waits), "{what}");
        }
    }
}

#[test]
fn an_hca_that_left_a_whole_pool_is_not_of_units_allocated_later() {
    let node = Node::new();
    let address = "0000:86:00.0";
    node.tree.pci(&PciSpec {
        address,
        above: "pci0000:85",
        ..PciSpec::MLX5
    });
    node.tree.netdev(&NetdevSpec {
        name: "ens2",
        on: On::Pci(address),
        ..NetdevSpec::default()
    });
    node.tree.rdma(&RdmaSpec {
        name: "mlx5_1",
        on: On::Pci(address),
        ..RdmaSpec::default()
    });
    let whole = |names: &str| {
        format!(
            "version: 1\npools:\n- {{ resource: rdma/a, mode: shared, policy: all-hcas, shares: 2, \
             select: {{ ifNames: [{names}] }} }}\n"
        )
    };
    let before = config::parse(&whole("ens1, ens2")).unwrap();
    let after = "- { resource: rdma/b, mode: exclusive, select: { ifNames: [ens2] } }\n";
    let after = config::parse(&(whole("ens1") + after)).unwrap();
    let now = Instant::now();
    let at = |seconds| now + Duration::from_secs(seconds);
    let mut daemon = Daemon::known();
    daemon.world.allocated = held_at(at(0), "rdma/a", &[]);
    daemon.update(&before, &node.scan(), now);
    daemon.history.sent(at(1));
    daemon.history.keep_only(|_| false);
    daemon.update(&after, &node.scan(), now);
    assert_eq!(daemon.plan.handed_over().count(), 1);
    daemon.history.sent(at(2));
    let unit = format!("pool_{}_0", hca::unit::PoolTag::of("rdma/a"));
    for (seconds, held) in [(4, vec![]), (5, vec![unit.as_str()])] {
        daemon.world.allocated = held_at(at(seconds), "rdma/a", &held);
        daemon.update(&after, &node.scan(), now);
        let members = daemon.plan.pools[1].members();
        assert_eq!(members[0].health, Health::default(), "{held:?}");
    }
}

#[test]
fn an_unreadable_attribute_makes_its_hca_alone_unhealthy() {
    let (node, config) = (
        Node::new(),
        config("mode: shared, shares: 1, select: { functions: [pf, software] }"),
    );
    node.tree.pci(&PciSpec {
        address: "0000:86:00.0",
        above: "pci0000:85",
        ..PciSpec::MLX5
    });
    node.tree.rdma(&RdmaSpec {
        name: "mlx5_1",
        on: On::Pci("0000:86:00.0"),
        ..RdmaSpec::default()
    });
    node.tree.rdma(&RdmaSpec {
        name: "rxe0",
        node_guid: "5054:00ff:fe00:0001",
        ..RdmaSpec::default()
    });
    // Reading a directory fails as firmware that does not answer does, with another number.
    let state = "/sys/class/infiniband/mlx5_1/ports/1/state";
    let spoil = |path: &str| {
        node.tree.remove(path);
        node.tree.file(format!("{path}/x"), "");
    };
    let health = |daemon: &Daemon| -> Vec<String> {
        let members = daemon.plan.pools[0].members().iter();
        members
            .map(|member| match member.health.worst() {
                None => String::new(),
                Some(unhealthy_reason) => {
                    format!(
                        "{}: {unhealthy_reason}",
                        crate::words::word(unhealthy_reason)
                    )
                }
            })
            .collect()
    };
    // It was there before.
    let (mut daemon, now) = (Daemon::known(), Instant::now());
    daemon.update(&config, &node.scan(), now);
    assert_eq!(health(&daemon), ["", "", ""]);
    spoil(state);
    spoil("/sys/class/infiniband/rxe0/node_guid");
    daemon.update(&config, &node.scan(), now);
    let said = health(&daemon);
    assert_eq!(said[0], "");
    for (said, attribute) in said[1..].iter().zip(["ports/1/state", "rxe0/node_guid"]) {
        let named = said.starts_with("unreadable: read ") && said.contains(attribute);
        assert!(named && said.contains("Is a directory"), "{said}");
    }
    // The daemon starts with it: its place is known, and so is its pool.
    let mut daemon = Daemon::default();
    daemon.update(&config, &node.scan(), now);
    assert_eq!(health(&daemon)[0], "");
    assert!(health(&daemon)[1].contains("ports/1/state"));
    node.tree.remove(state);
    node.tree.file(state, "4: ACTIVE");
    daemon.update(&config, &node.scan(), now);
    assert_eq!(health(&daemon), ["", ""]);
}

#[test]
fn a_removed_virtual_function_is_not_listed_for_ever() {
    let node = Node::new();
    let vf = PciSpec {
        address: "0000:3b:00.2",
        ..PciSpec::MLX5
    };
    node.tree.vf(PciSpec::MLX5.address, 0, &vf);
    node.tree.rdma(&RdmaSpec {
        name: "mlx5_2",
        on: On::Pci(vf.address),
        ..RdmaSpec::default()
    });
    let config = config("mode: exclusive, select: { functions: [vf] }");
    let (mut daemon, start) = (Daemon::default(), Instant::now());
    daemon.update(&config, &node.scan(), start);
    assert_eq!(counts(&daemon).healthy, 1);
    node.tree.hide_rdma("mlx5_2");
    let later = |seconds| start + Duration::from_secs(seconds);
    // Gone, but not for long; then for long, but held, or not known; then for good.
    for (seconds, allocated, listed) in [
        (10, held(&[]), 1),
        (700, held(&[vf.address]), 1),
        (710, None, 1),
        (720, held(&[]), 0),
        (730, held(&[]), 0),
    ] {
        daemon.world.allocated = allocated;
        daemon.update(&config, &node.scan(), later(seconds));
        let counts = counts(&daemon);
        assert_eq!((counts.healthy, counts.unhealthy), (0, listed), "{seconds}");
    }
}

#[test]
fn what_a_pod_holds_by_another_name_is_not_offered() {
    let node = Node::new();
    let exclusive = config("mode: exclusive, select: { functions: [pf] }");
    let shared = config("mode: shared, shares: 2, select: { functions: [pf] }");
    let tag = hca::unit::PoolTag::of("rdma/b");
    let slot = format!("0000:3b:00.0_{tag}_0");
    let members = |config: &Config, resource: &str, unit: &str| {
        let mut daemon = Daemon::with(held_of(resource, &[unit]));
        daemon.update(config, &node.scan(), Instant::now());
        daemon.plan.pools[0].members().len()
    };
    let hca = "0000:3b:00.0";
    // By its own name, and shared beside shared.
    assert_eq!(members(&exclusive, "rdma/a", hca), 1);
    assert_eq!(members(&shared, "rdma/b", &slot), 1);
    // The SR-IOV device plugin's pod, a pod of the pool as it was before, shared beside exclusive.
    assert_eq!(members(&exclusive, "intel.com/sriov", hca), 0);
    assert_eq!(members(&shared, "rdma/a", hca), 0);
    assert_eq!(members(&exclusive, "rdma/b", &slot), 0);
    // A unit that names no HCA of ours has no effect.
    assert_eq!(members(&exclusive, "nvidia.com/gpu", "GPU-1"), 1);
}

#[test]
fn what_was_bound_late_is_no_unit_of_the_pool_without_late_binding() {
    let node = Node::new();
    let members = |words: &str| {
        let pod = node_wire::Pod {
            namespace: "ml".into(),
            name: "a".into(),
            uid: Some("u1".into()),
        };
        let hca = HCA.parse().unwrap();
        let binding = crate::binding::record::Binding {
            resource: "rdma/a".into(),
            ..crate::binding::record::Binding::new(&hca, "slot_3e71787e_0", &pod, Some("s1"))
        };
        let mut bindings = Bindings::default();
        bindings.all.insert(hca, binding);
        let mut daemon = Daemon::default();
        daemon.world.bindings = Arc::new(bindings);
        let config = config(&format!("{words}, select: {{ functions: [pf] }}"));
        daemon.update(&config, &node.scan(), Instant::now());
        daemon.plan.pools[0].members().len()
    };
    assert_eq!(members("mode: exclusive, binding: late"), 1);
    assert_eq!(members("mode: exclusive"), 0);
}

#[test]
fn a_physical_function_that_does_not_come_back_is_missing_until_it_does() {
    let node = Node::new();
    let config = config("mode: exclusive, select: { functions: [pf] }");
    let (mut daemon, now) = (Daemon::known(), Instant::now());
    daemon.update(&config, &node.scan(), now);
    assert_eq!(daemon.plan.missing, []);
    // In a pod it is not missing.
    let kept = node.keep(&daemon);
    node.take();
    daemon.update(&config, &node.scan(), now);
    assert_eq!(daemon.plan.missing, []);
    // After a reboot it is not there at all.
    let without = {
        let dir = tempfile::tempdir().unwrap();
        let tree = Tree::new(dir.path());
        tree.rdma_core(true);
        scan(&tree)
    };
    let mut daemon = Daemon::new(Memory::load(kept.path(), "another boot".into()));
    daemon.update(&config, &without, now);
    let [missing] = daemon.plan.missing.as_slice() else {
        panic!("{:?}", daemon.plan.missing)
    };
    assert_eq!(missing.id.to_string(), HCA);
    assert_eq!(missing.rdma_devices, ["mlx5_0"]);
    let resource = config.pools[0].resource.to_string();
    assert_eq!(
        (missing.resource.as_ref(), missing.rail),
        (Some(&resource), Some(0))
    );
    let said = missing.to_string();
    assert!(
        said.contains("mlx5_0) was here and is missing since 20"),
        "{said}"
    );
    // The next daemon knows since when.
    let kept = node.keep(&daemon);
    let mut daemon = Daemon::new(Memory::load(kept.path(), "another boot".into()));
    daemon.update(&config, &without, now);
    assert_eq!(daemon.plan.missing, std::slice::from_ref(missing));
    daemon.update(&config, &Node::new().scan(), now);
    assert_eq!(daemon.plan.missing, []);
    // Removed for good, which says nothing about the one that takes its place.
    let id = HCA.parse().unwrap();
    daemon.history.memory.forget(&id);
    daemon.update(&config, &without, now);
    assert_eq!(daemon.plan.missing.len(), 1, "it was here");
    daemon.history.memory.forget(&id);
    daemon.update(&config, &without, now);
    assert_eq!(daemon.plan.missing, []);
    daemon.update(&config, &Node::new().scan(), now);
    daemon.update(&config, &without, now);
    assert_eq!(daemon.plan.missing.len(), 1, "it was here again");
}

#[test]
fn what_an_earlier_daemon_knew_may_come_late() {
    let node = Node::new();
    let config = config("mode: exclusive, select: { functions: [pf] }");
    let (mut daemon, now) = (Daemon::known(), Instant::now());
    daemon.update(&config, &node.scan(), now);
    let kept = node.keep(&daemon);
    let earlier = || Memory::load(kept.path(), String::new());
    // The NIC is not there any more.
    let without = {
        let dir = tempfile::tempdir().unwrap();
        let tree = Tree::new(dir.path());
        tree.rdma_core(true);
        scan(&tree)
    };
    let mut daemon = Daemon::default();
    daemon.update(&config, &without, now);
    assert_eq!(daemon.plan.missing, []);
    assert_eq!(daemon.history.memory.text(), None, "the file stays");
    daemon.history.memory.recall(earlier());
    daemon.update(&config, &without, now);
    assert_eq!(daemon.plan.missing.len(), 1);
    assert!(daemon.history.memory.text().is_some());
    // It is there, and a pod takes it after the first scan: it stays in its pool.
    let mut daemon = Daemon::default();
    daemon.update(&config, &node.scan(), now);
    daemon.history.memory.recall(earlier());
    node.take();
    daemon.update(&config, &node.scan(), now);
    assert_eq!(daemon.plan.missing, []);
    assert_eq!(daemon.plan.pools[0].members().len(), 1);
}

#[test]
fn what_was_known_before_a_pod_took_the_netdev_is_not_lost_by_reading_it_late() {
    let node = Node::new();
    let config = config("mode: exclusive, select: { ifNames: [ens1] }");
    let (mut daemon, now) = (Daemon::known(), Instant::now());
    daemon.update(&config, &node.scan(), now);
    let kept = node.keep(&daemon);
    // In shared mode the RDMA device stays in sight.
    node.tree.hide_netdev("ens1");
    let mut daemon = Daemon::default();
    daemon.update(&config, &node.scan(), now);
    assert_eq!(daemon.plan.pools[0].members().len(), 0);
    daemon
        .history
        .memory
        .recall(Memory::load(kept.path(), String::new()));
    daemon.update(&config, &node.scan(), now);
    assert_eq!(daemon.plan.pools[0].members().len(), 1);
}
