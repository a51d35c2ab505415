//! Brokers of several nodes, their ADDs and DELs, against a model: no address is given to two pods, and
//! none is lost, whatever is killed or unanswered at whichever step.
#![allow(
    clippy::allow_attributes,
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "every line here is a test, which clippy cannot see in functions of their own"
)]

mod after;
mod api;
mod faults;
mod per_node;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use api::{Api, Fault};
use ipam::block::AddressSpace;
use ipam::lease::Holder;
use ipam::leases::{AddressRequest, LeaseError, Leases, Order, Ownership};
use ipam::range::{Range, Spec};
use ipnetwork::IpNetwork;
use node::identity::NodeIdentity;
use node::policy::{BlockLength, Policy, Profile, StoreBounds, StoreKind, StorePolicy};
use node_wire::{BlockNeed, Failure, FailureKind, Gateway, PerNode};
use proptest::prelude::*;
use rdma_ipam_broker::api::{Client, Endpoint, Transport};
use rdma_ipam_broker::broker::{self, Asker, Settings};
use rdma_ipam_broker::grants::Grants;
use rdma_ipam_broker::space::Timing;
use tempfile::TempDir;
use tokio::task::{JoinHandle, LocalSet};
use tokio_util::sync::CancellationToken;

const RANGE: &str = "10.7.0.0/26";
/// One that is cut into single addresses.
const SMALL_RANGE: &str = "10.7.1.16/29";
/// One of which each node has a network of its own, with one address for a pod.
const NODE_RANGE: &str = "10.7.2.0/29";
const PER_NODE: PerNode = PerNode {
    prefix: 31,
    gateway: Some(Gateway::First),
};
/// Part of the first one, and cut otherwise: one of the two is refused.
const OTHER_RANGE: &str = "10.7.0.16/29";
const NODES: usize = 3;
const LATE: Duration = Duration::from_secs(20);

/// A machine: its files outlive its broker, and even its Node object.
struct Machine {
    name: String,
    place: TempDir,
    policy: Policy,
    timing: Timing,
    /// Where its metrics are served, if a test reads them.
    metrics: Option<SocketAddr>,
    running: Option<(Asker, JoinHandle<()>, CancellationToken)>,
    /// Addresses by container, as ADDs answered.
    pods: BTreeMap<String, IpAddr>,
    next: u32,
}

impl Machine {
    fn new(number: usize) -> Self {
        let place = tempfile::tempdir().unwrap();
        std::fs::create_dir(place.path().join("leases")).unwrap();
        let store = StorePolicy {
            kind: StoreKind::Kubernetes {
                // 16 blocks of four addresses.
                blocks: BlockLength {
                    ipv4: 30,
                    ipv6: 126,
                },
                static_networks: Vec::new(),
                after: None,
            },
            bounds: StoreBounds::default(),
        };
        let mut policy = Policy {
            state_dir: place.path().join("state"),
            ..Policy::default()
        };
        policy.stores.insert("default".into(), store);
        policy.ipam.cooldown = Duration::ZERO;
        boot(place.path());
        Self {
            name: format!("n{number}"),
            place,
            policy,
            timing: Timing {
                tick: Duration::from_millis(20),
                new: Duration::from_millis(30),
                empty: Duration::from_millis(60),
                ask: Duration::from_millis(60),
                question: Duration::from_millis(300),
                retry: Duration::from_millis(100),
                agreed: Duration::from_millis(50),
                rest: Duration::from_millis(60),
                identity: Duration::from_secs(3600),
                sweep: Duration::from_millis(150),
                settle: Duration::from_millis(100),
                reread: Duration::from_millis(400),
                late_events: Duration::from_secs(60),
            },
            metrics: None,
            running: None,
            pods: BTreeMap::new(),
            next: 0,
        }
    }

    fn start(&mut self, api: &Api) {
        if self.running.is_some() {
            return;
        }
        let endpoint = Endpoint {
            base: format!("http://127.0.0.1:{}", api.port).parse().unwrap(),
            namespace: None,
            authorities: Vec::new(),
            certificate: None,
            token: None,
        };
        let settings = Settings {
            policy: self.policy.clone(),
            node: self.name.clone(),
            root: self.place.path().into(),
            client: Client::new(Transport::new(endpoint).unwrap(), "test"),
            socket: None,
            listen: self.metrics.into_iter().collect(),
            timing: self.timing,
        };
        let stop = CancellationToken::new();
        let (asker, asked) = broker::questions();
        let (questions, ended) = ((asker.clone(), asked), stop.clone());
        let task = tokio::task::spawn_local(async move {
            broker::run(settings, questions, ended).await.unwrap();
        });
        self.running = Some((asker, task, stop));
    }

    /// As SIGKILL: whatever it waits for, it does not come to do.
    async fn kill(&mut self) {
        if let Some((_, task, _)) = self.running.take() {
            task.abort();
            let _ = task.await;
        }
    }

    /// Off and on again: its pods ended, and the reclaim loop has released their addresses.
    async fn reboot(&mut self) {
        self.kill().await;
        while !self.pods.is_empty() {
            self.del(0);
        }
        boot(self.place.path());
    }

    /// As its kubelet does, if the cluster has no such Node.
    fn register(&self, api: &Api) {
        if !api.names("nodes").contains(&self.name) {
            api.add_node(&self.name);
        }
    }

    fn identity(&self) -> NodeIdentity {
        NodeIdentity::read(self.place.path(), &self.name).unwrap()
    }

    fn leases(&self) -> Leases {
        Leases::open(self.place.path(), &self.identity().boot).unwrap()
    }

    fn holder(&self, container: &str) -> Holder {
        Holder {
            network: "rail".into(),
            pod: None,
            container: container.into(),
            interface: "net1".into(),
            node: self.name.clone(),
            netns: None,
            netns_inode: None,
            device: None,
        }
    }

    /// An ADD: asks the broker for what is missing, as `rdma-ipam` does.
    async fn add(&mut self) -> Result<IpAddr, FailureKind> {
        self.add_of(RANGE).await
    }

    /// An ADD of another range.
    async fn add_of(&mut self, text: &str) -> Result<IpAddr, FailureKind> {
        let container = format!("c{}", self.next);
        self.next += 1;
        let range = range(text);
        let order = Order {
            holder: self.holder(&container),
            profile: Profile::Strict,
            space: AddressSpace::new("default", None),
            overlapping: true,
            requests: vec![AddressRequest {
                range: range.clone(),
                same_host_number_as: None,
                requested: None,
            }],
            cooldown: Duration::ZERO,
        };
        let state_dir = self.policy.state_dir.clone();
        let parts = Ownership::Parts {
            state_dir: &state_dir,
            last_resort: true,
        };
        for _ in 0..8 {
            match self.leases().take(&order, &parts) {
                Ok(leases) => {
                    let address = leases[0].address;
                    self.pods.insert(container, address);
                    return Ok(address);
                }
                Err(refused) => match refused.error {
                    LeaseError::NeedsRoom(_) => {
                        self.ask(&range).await.map_err(|failure| failure.kind)?;
                    }
                    other => panic!("{other}"),
                },
            }
        }
        Err(FailureKind::Other)
    }

    async fn ask(&self, range: &Range) -> Result<(), Failure> {
        let Some((asker, ..)) = &self.running else {
            return Err(Failure::new(FailureKind::Other, "no broker"));
        };
        asker.ask(need(range)).await.map(drop)
    }

    /// The blocks that its ADDs go by.
    fn granted(&self) -> Vec<IpNetwork> {
        let directory = rdma_ipam_broker::grants::directory(&self.policy.state_dir, "default");
        let grants = Grants::read(&directory, &AddressSpace::new("default", None)).unwrap();
        grants.networks()
    }

    /// Those of the range of which it has one.
    fn node_networks(&self) -> Vec<IpNetwork> {
        let range: IpNetwork = NODE_RANGE.parse().unwrap();
        let mut granted = self.granted();
        granted.retain(|block| range.contains(block.network()));
        granted
    }

    fn del(&mut self, which: usize) {
        let containers: Vec<String> = self.pods.keys().cloned().collect();
        let Some(container) = containers.get(which % containers.len().max(1)) else {
            return;
        };
        self.leases()
            .release(container, "net1", "rail", Duration::ZERO)
            .unwrap();
        self.pods.remove(container);
    }

    /// Another machine gets the name: nothing of this one is left.
    async fn replace(&mut self, number: usize) {
        self.kill().await;
        let next = self.next;
        *self = Self {
            next,
            ..Self::new(number)
        };
    }
}

/// Writes a new boot ID, where a machine's programs read it.
fn boot(root: &Path) {
    let directory = root.join("proc/sys/kernel/random");
    std::fs::create_dir_all(&directory).unwrap();
    let id = format!("{:016x}", node::random::random64());
    std::fs::write(directory.join("boot_id"), id).unwrap();
}

#[derive(Debug, Clone)]
enum Step {
    Add(usize),
    /// Of the range that is cut into single addresses.
    AddSmall(usize),
    /// Of the range that contradicts the first one.
    AddOther(usize),
    /// Of the range with networks of nodes.
    AddNetwork(usize),
    /// On all nodes at one time, so many on each.
    AddAll(usize),
    Del(usize, usize),
    Kill(usize),
    Start(usize),
    /// The next changes in the API are lost or unanswered.
    Fail(Vec<Option<Fault>>),
    /// The API is away for some steps.
    Down(bool),
    /// The Node object goes with its machine, and another machine of its name comes.
    Replace(usize),
    /// The machine is switched off, and its Node object is deleted.
    Off(usize),
    /// It is started: until its broker is, ADDs go by its files alone.
    On(usize),
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let fault = prop_oneof![
        Just(None),
        Just(Some(Fault::Lost)),
        Just(Some(Fault::Unanswered)),
        Just(Some(Fault::Late))
    ];
    prop_oneof![
        12 => (0..NODES).prop_map(Step::Add),
        4 => (0..NODES).prop_map(Step::AddSmall),
        4 => (0..NODES).prop_map(Step::AddOther),
        4 => (0..NODES).prop_map(Step::AddNetwork),
        6 => (1usize..12).prop_map(Step::AddAll),
        8 => (0..NODES, any::<usize>()).prop_map(|(node, which)| Step::Del(node, which)),
        2 => (0..NODES).prop_map(Step::Kill),
        4 => (0..NODES).prop_map(Step::Start),
        2 => proptest::collection::vec(fault, 1..4).prop_map(Step::Fail),
        1 => Just(Step::Down(true)),
        2 => Just(Step::Down(false)),
        1 => (0..NODES).prop_map(Step::Replace),
        1 => (0..NODES).prop_map(Step::Off),
        2 => (0..NODES).prop_map(Step::On),
        3 => (0u64..120).prop_map(Step::Wait),
    ]
}

/// The question for an address of a range.
fn need(range: &Range) -> BlockNeed {
    let spans = range.spans().iter();
    BlockNeed {
        store: "default".into(),
        network_name: None,
        range: range.subnet().to_string(),
        spans: spans.map(|span| span.addresses(true)).collect(),
        per_node: range.per_node(),
        address: None,
        single: false,
        count: 1,
    }
}

fn range(text: &str) -> Range {
    let spec = Spec {
        range: text,
        per_node: (text == NODE_RANGE).then_some(PER_NODE),
        ..Spec::default()
    };
    Range::new(&spec, Profile::Strict).unwrap()
}

fn is_even(address: IpAddr) -> bool {
    ipam::range::bits(address).is_multiple_of(2)
}

/// No address twice, and no two ranges in force that cut an address differently.
fn check_all(api: &Api, machines: &[Machine]) {
    let confirmed = api.confirmed();
    let both = [RANGE, OTHER_RANGE].map(|range| confirmed.iter().any(|other| other == range));
    assert_ne!(both, [true; 2], "{confirmed:?}");
    check(machines);
}

fn check(machines: &[Machine]) {
    let mut all = BTreeSet::new();
    for machine in machines {
        for address in machine.pods.values() {
            assert!(all.insert(*address), "{address} is given twice");
        }
        let networks = machine.node_networks();
        assert!(networks.len() <= 1, "{networks:?}");
        let mut pods = machine.pods.values();
        let range: IpNetwork = NODE_RANGE.parse().unwrap();
        assert!(pods.all(|address| !range.contains(*address) || !is_even(*address)));
    }
}

async fn run(api: Api, steps: Vec<Step>) {
    let mut machines: Vec<Machine> = (0..NODES).map(Machine::new).collect();
    for machine in &mut machines {
        api.add_node(&machine.name);
        machine.start(&api);
    }
    for step in steps {
        match step {
            Step::Add(node) => drop(machines[node].add().await),
            Step::AddSmall(node) => drop(machines[node].add_of(SMALL_RANGE).await),
            Step::AddOther(node) => drop(machines[node].add_of(OTHER_RANGE).await),
            Step::AddNetwork(node) => drop(machines[node].add_of(NODE_RANGE).await),
            Step::AddAll(count) => {
                let adds = machines.iter_mut().map(async |machine| {
                    for _ in 0..count {
                        let _ = machine.add().await;
                    }
                    // Their blocks are empty now and then, while others ask for them.
                    for which in 0..count {
                        machine.del(which);
                        let _ = machine.add().await;
                    }
                    while machine.pods.len() > 8 {
                        machine.del(0);
                        tokio::task::yield_now().await;
                    }
                });
                futures_util::future::join_all(adds).await;
            }
            Step::Del(node, which) => machines[node].del(which),
            Step::Kill(node) => machines[node].kill().await,
            Step::Start(node) => machines[node].start(&api),
            Step::Fail(faults) => api.fail(faults),
            Step::Down(down) => api.set_down(down),
            Step::Replace(node) => {
                machines[node].replace(node).await;
                let name = machines[node].name.clone();
                api.remove_node(&name);
                api.add_node(&name);
                machines[node].start(&api);
            }
            Step::Off(node) => {
                machines[node].reboot().await;
                api.remove_node(&machines[node].name);
            }
            Step::On(node) => machines[node].register(&api),
            Step::Wait(millis) => tokio::time::sleep(Duration::from_millis(millis)).await,
        }
        check_all(&api, &machines);
    }
    // In the end all is well again, and every address can be had: none was lost.
    api.set_down(false);
    api.fail([]);
    for machine in &mut machines {
        machine.register(&api);
        machine.start(&api);
        while !machine.pods.is_empty() {
            machine.del(0);
        }
    }
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    // The range is refused until the one that contradicts it has had no block for a while.
    while api.confirmed().iter().any(|range| range == OTHER_RANGE) {
        assert!(tokio::time::Instant::now() < deadline, "{:?}", api.blocks());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    while machines[0].pods.len() < 62 {
        let _ = machines[0].add().await;
        check_all(&api, &machines);
        assert!(
            tokio::time::Instant::now() < deadline,
            "{} of 62 addresses, blocks {:?}",
            machines[0].pods.len(),
            api.blocks()
        );
    }
    for machine in &mut machines {
        machine.kill().await;
    }
}

/// A scenario with an API of its own, on one thread.
fn with_api(scenario: impl AsyncFnOnce(Api)) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let local = LocalSet::new();
    local.block_on(&runtime, async { scenario(Api::start().await).await });
}

#[test]
fn every_address_goes_from_node_to_node() {
    let mut steps: Vec<Step> = (0..62).map(|_| Step::Add(1)).collect();
    steps.extend((0..62).map(|_| Step::Del(1, 0)));
    steps.push(Step::Add(2));
    with_api(async |api| run(api, steps).await);
}

#[test]
fn addresses_of_a_machine_that_is_off_are_not_lost() {
    let mut steps: Vec<Step> = (0..30).map(|_| Step::Add(1)).collect();
    steps.push(Step::Off(1));
    steps.extend((0..62).map(|_| Step::Add(2)));
    steps.push(Step::On(1));
    steps.extend((0..4).map(|_| Step::Add(1)));
    with_api(async |api| run(api, steps).await);
}

#[test]
fn a_replaced_machines_blocks_are_not_lost() {
    let mut steps: Vec<Step> = (0..30).map(|_| Step::Add(1)).collect();
    steps.push(Step::Replace(1));
    steps.extend((0..40).map(|_| Step::Add(2)));
    with_api(async |api| run(api, steps).await);
}

/// Histories that mostly wait, in tests of their own: they run at a time.
macro_rules! no_address_is_given_twice_and_none_is_lost {
    ($($name:ident)*) => {
        proptest! {
            #![proptest_config(ProptestConfig { cases: 2, max_shrink_iters: 40, ..ProptestConfig::default() })]
            $(#[test]
            fn $name(steps in proptest::collection::vec(step(), 1..80)) {
                with_api(async |api| run(api, steps).await);
            })*
        }
    };
}
no_address_is_given_twice_and_none_is_lost! {
    no_address_is_given_twice_and_none_is_lost_in_two_histories
    nor_in_two_others
    nor_in_a_third_pair
    nor_in_a_fourth_pair
}
