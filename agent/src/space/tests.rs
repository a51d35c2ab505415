//! Agents of several nodes on one directory, with the leases that ADDs take.

use std::net::IpAddr;
use std::path::Path;

use ipam::lease;
use ipam::leases::{AddressRequest, LeaseError, Leased, Order, Ownership};
use ipam::range::Spec;
use ipam::space::single;
use ipam::subnet::Part;
use node::policy::Profile;
use node_wire::{Gateway, PerNode};

use super::*;
use crate::directory::Directory;
use crate::reserve::{Import, WHEREABOUTS};

/// Where a process dies: before or behind a call of the store, or of the node's file.
pub(super) mod kill {
    use std::cell::Cell;

    thread_local! {
        static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
    }

    /// The process dies at the point that comes behind so many.
    pub(in crate::space) fn after(points: u32) {
        LEFT.set(Some(points));
    }

    pub(in crate::space) fn never() {
        LEFT.set(None);
    }

    pub(in crate::space) fn is_dead() -> bool {
        LEFT.get() == Some(0)
    }

    pub(in crate::space) fn point() -> Result<(), String> {
        match LEFT.get() {
            None => Ok(()),
            Some(0) => Err("killed".to_owned()),
            Some(left) => {
                LEFT.set(Some(left - 1));
                Ok(())
            }
        }
    }
}

const BOOT: &str = "b1";
const LIMIT: Duration = Duration::from_secs(5);

fn address_space() -> AddressSpace {
    AddressSpace::new("shared", None)
}

fn range(text: &str) -> Range {
    let spec = Spec {
        range: text,
        ..Spec::default()
    };
    Range::new(&spec, Profile::Strict).unwrap()
}

/// Where syncing costs nothing, if there is such a file system.
fn in_memory() -> tempfile::TempDir {
    let shared = tempfile::tempdir_in("/dev/shm");
    shared.or_else(|_| tempfile::tempdir()).unwrap()
}

/// Whichever address of a range.
fn free_choice(range: &Range) -> AddressRequest {
    AddressRequest {
        range: range.clone(),
        same_host_number_as: None,
        requested: None,
    }
}

struct Machine {
    context: Arc<Context>,
    share: Directory,
    space: Space,
    _root: tempfile::TempDir,
}

impl Machine {
    fn new(share: &Path, name: &str, now: Instant) -> Self {
        let root = in_memory();
        let context = Arc::new(Context {
            node: ThisNode {
                name: name.into(),
                boot: BOOT.into(),
            },
            root: root.path().into(),
            state_dir: root.path().join("state"),
            cooldown: Duration::ZERO,
            grace: Duration::from_mins(5),
        });
        let share = Directory::new(share);
        let space = open(&context, &share, now);
        Self {
            context,
            share,
            space,
            _root: root,
        }
    }

    /// The process ends, and another one begins.
    fn restart(&mut self, now: Instant) {
        self.space = open(&self.context, &self.share, now);
    }

    fn leases(&self) -> Leases {
        Leases::open(&self.context.root, &self.context.node.boot).unwrap()
    }

    fn order(&self, container: &str, request: AddressRequest) -> Order {
        Order {
            holder: lease::Holder {
                network: "net".into(),
                pod: None,
                container: container.into(),
                interface: "net1".into(),
                node: self.context.node.name.clone(),
                netns: None,
                netns_inode: None,
                device: None,
            },
            profile: Profile::Strict,
            space: address_space(),
            overlapping: true,
            requests: vec![request],
            cooldown: Duration::ZERO,
        }
    }

    /// What an ADD of this node leases, or lacks.
    fn take(&self, container: &str, range: &Range, requested: Option<IpAddr>) -> Option<IpAddr> {
        let request = AddressRequest {
            requested,
            ..free_choice(range)
        };
        let ownership = Ownership::Parts {
            state_dir: &self.context.state_dir,
            last_resort: false,
        };
        match self
            .leases()
            .take(&self.order(container, request), &ownership)
        {
            Ok(leases) => Some(leases[0].address),
            Err(refused) => match refused.error {
                LeaseError::NeedsRoom(_) => None,
                other => panic!("{other}"),
            },
        }
    }

    fn release(&self, container: &str) {
        self.leases()
            .release(container, "net1", "net", Duration::ZERO)
            .unwrap();
    }

    /// Asks the agent, as an ADD does.
    fn ask(
        &mut self,
        range: &Range,
        room: Room,
        now: Instant,
    ) -> oneshot::Receiver<Result<(), Failure>> {
        let (reply, answer) = oneshot::channel();
        let waiting = Waiting {
            count: 1,
            deadline: now + LIMIT,
            reply,
        };
        self.space
            .ask(Message::Room(range.clone(), room, waiting), now);
        answer
    }

    fn parts(&self) -> Vec<String> {
        let owned = Owned::read(&self.context.state_dir, &address_space()).unwrap();
        owned.parts.keys().map(ToString::to_string).collect()
    }
}

/// As the agent opens it: with the documents that the store is found to have.
fn open(context: &Arc<Context>, share: &Directory, now: Instant) -> Space {
    let backend = Backend::Directory(share.clone());
    let found = share.documents("shared").unwrap_or_default();
    let space = Space::open(
        context.clone(),
        address_space(),
        backend,
        Arc::default(),
        now,
    );
    let mut space = space.unwrap();
    for one in found.iter().filter(|one| one.space == address_space()) {
        space.ask(Message::News(one.subnet), now);
    }
    space
}

/// Machines, and a time of their own.
struct Cluster {
    share: tempfile::TempDir,
    machines: Vec<Machine>,
    now: Instant,
}

impl Cluster {
    fn new(machines: usize) -> Self {
        let share = in_memory();
        ipam::directory::init(share.path()).unwrap();
        let now = Instant::now();
        let machines =
            (0..machines).map(|number| Machine::new(share.path(), &format!("n{number}"), now));
        Self {
            machines: machines.collect(),
            share,
            now,
        }
    }

    /// All machines do what is due; time goes on to what comes next.
    fn step(&mut self, most: Duration) {
        let mut wait = most;
        for machine in &mut self.machines {
            wait = wait.min(machine.space.step(self.now));
            if kill::is_dead() {
                kill::never();
                machine.restart(self.now);
                wait = Duration::ZERO;
            }
        }
        self.now += wait;
        self.check();
    }

    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.step(end - self.now);
        }
    }

    /// Nobody may lease what another node may lease, and no address has two holders.
    fn check(&self) {
        let mut owned: Vec<(IpNetwork, &str)> = Vec::new();
        for machine in &self.machines {
            let name = machine.context.node.name.as_str();
            let parts = Owned::read(&machine.context.state_dir, &address_space())
                .unwrap()
                .parts;
            let parts = parts
                .into_iter()
                .filter(|(_, part)| part.boot == machine.context.node.boot);
            for (piece, _) in parts {
                let other = owned
                    .iter()
                    .find(|(other, _)| ipam::space::overlap(*other, piece));
                assert!(
                    other.is_none(),
                    "{piece} of {name} is another's, too: {other:?}"
                );
                owned.push((piece, name));
            }
        }
    }

    /// An ADD with the runtime's attempts; the address, and how long it took.
    fn add(&mut self, at: usize, container: &str, range: &Range) -> (IpAddr, Duration) {
        let room = Room::Addresses(1);
        let (address, took) =
            self.try_add(at, container, range, None, room, Duration::from_mins(10));
        (address.unwrap(), took)
    }

    fn try_add(
        &mut self,
        at: usize,
        container: &str,
        range: &Range,
        requested: Option<IpAddr>,
        room: Room,
        limit: Duration,
    ) -> (Result<IpAddr, Failure>, Duration) {
        let begun = self.now;
        let mut last = Failure::new(FailureKind::Other, "not asked");
        while self.now < begun + limit {
            if let Some(address) = self.machines[at].take(container, range, requested) {
                return (Ok(address), self.now - begun);
            }
            let now = self.now;
            let mut answer = self.machines[at].ask(range, room, now);
            loop {
                match answer.try_recv() {
                    Ok(Ok(())) => break,
                    Ok(Err(failure)) => {
                        last = failure;
                        self.run(Duration::from_secs(1));
                        break;
                    }
                    // The agent died.
                    Err(oneshot::error::TryRecvError::Closed) => break,
                    Err(oneshot::error::TryRecvError::Empty) => self.step(LIMIT),
                }
            }
        }
        (Err(last), self.now - begun)
    }

    fn document(&self, text: &str) -> Document {
        let directory = Directory::new(self.share.path());
        directory
            .read(&address_space(), text.parse().unwrap())
            .unwrap()
            .document
    }

    fn edit(&self, text: &str, edit: impl FnOnce(&mut Document)) {
        let directory = Directory::new(self.share.path());
        let read = directory
            .read(&address_space(), text.parse().unwrap())
            .unwrap();
        let mut next = read.document;
        edit(&mut next);
        let swap = directory
            .swap(&address_space(), read.version, &next)
            .unwrap();
        assert_eq!(swap, Swap::Won(read.version + 1));
    }
}

fn owners(document: &Document) -> Vec<String> {
    let parts = document.parts.iter();
    parts
        .map(|(piece, part)| format!("{piece} {}", part.node))
        .collect()
}

#[test]
fn a_claim_grows_with_what_the_node_has() {
    let mut cluster = Cluster::new(1);
    let range = range("10.0.0.0/24");
    for pod in 0..40 {
        let (_, took) = cluster.add(0, &format!("p{pod}"), &range);
        assert!(took < Duration::from_secs(1), "{took:?}");
    }
    let parts = cluster.machines[0].parts();
    assert!(parts.len() <= 8, "{parts:?}");
}

#[test]
fn an_empty_part_goes_after_ten_minutes_but_for_one() {
    let mut cluster = Cluster::new(1);
    let range = range("10.0.0.0/24");
    for pod in 0..6 {
        cluster.add(0, &format!("p{pod}"), &range);
    }
    for pod in 0..6 {
        cluster.machines[0].release(&format!("p{pod}"));
    }
    let before = cluster.machines[0].parts().len();
    cluster.run(Duration::from_mins(9));
    assert_eq!(cluster.machines[0].parts().len(), before);
    cluster.run(Duration::from_mins(4));
    let after = cluster.machines[0].parts();
    // The documents agree with the node.
    assert_eq!(owners(&cluster.document("10.0.0.0/24")).len(), after.len());
    assert!(after.len() < before, "{after:?}");
}

#[test]
fn forty_nodes_share_sixty_two_addresses() {
    let mut cluster = Cluster::new(40);
    let range = range("10.0.0.0/26");
    let mut all = BTreeSet::new();
    for at in 0..40 {
        let (address, took) = cluster.add(at, "p", &range);
        assert!(took < Duration::from_secs(10), "{took:?}");
        assert!(all.insert(address), "{address} twice");
    }
    for at in 0..22 {
        let (address, _) = cluster.add(at, "q", &range);
        assert!(all.insert(address), "{address} twice");
    }
    let (full, _) = cluster.try_add(
        39,
        "q",
        &range,
        None,
        Room::Addresses(1),
        Duration::from_secs(20),
    );
    let full = full.unwrap_err();
    assert!(
        matches!(full.kind, FailureKind::Exhausted | FailureKind::TryAgain),
        "{full}"
    );
}

/// The same at one time, each agent on a thread as the program runs it.
#[test]
fn forty_nodes_claim_at_one_time() {
    let share = tempfile::tempdir().unwrap();
    ipam::directory::init(share.path()).unwrap();
    let range = range("10.0.0.0/26");
    let begun = Instant::now();
    let threads: Vec<_> = (0..40)
        .map(|number| {
            let (share, range) = (share.path().to_owned(), range.clone());
            std::thread::spawn(move || {
                let mut machine = Machine::new(&share, &format!("n{number}"), Instant::now());
                let mut answer = machine.ask(&range, Room::Addresses(1), Instant::now());
                loop {
                    if let Some(address) = machine.take("p", &range, None) {
                        return (address, machine);
                    }
                    match answer.try_recv() {
                        Err(oneshot::error::TryRecvError::Empty) => {
                            let wait = machine.space.step(Instant::now());
                            std::thread::sleep(wait.min(Duration::from_millis(50)));
                        }
                        _ => answer = machine.ask(&range, Room::Addresses(1), Instant::now()),
                    }
                }
            })
        })
        .collect();
    let machines: Vec<(IpAddr, Machine)> =
        threads.into_iter().map(|one| one.join().unwrap()).collect();
    let addresses: BTreeSet<IpAddr> = machines.iter().map(|(address, _)| *address).collect();
    assert_eq!(addresses.len(), 40);
    assert!(
        begun.elapsed() < Duration::from_secs(60),
        "{:?}",
        begun.elapsed()
    );
}

/// Pods of three nodes move on six addresses, and agents die anywhere.
fn pods_move(kills: bool, seed: u64) -> Duration {
    let mut cluster = Cluster::new(3);
    let range = range("10.0.0.0/29");
    let mut random = seed;
    let mut draw = move |most: u64| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % most
    };
    let mut pods: BTreeMap<String, (usize, IpAddr)> = BTreeMap::new();
    let mut longest = Duration::ZERO;
    for number in 0..40 {
        if pods.len() == 5 {
            let nth = usize::try_from(draw(5)).unwrap();
            let name = pods.keys().nth(nth).unwrap().clone();
            let (at, _) = pods.remove(&name).unwrap();
            cluster.machines[at].release(&name);
        }
        if kills {
            kill::after(u32::try_from(draw(30)).unwrap());
        }
        let at = usize::try_from(draw(3)).unwrap();
        let name = format!("p{number}");
        let (address, took) = cluster.add(at, &name, &range);
        longest = longest.max(took);
        assert!(
            pods.values().all(|(_, other)| *other != address),
            "{address} twice"
        );
        pods.insert(name, (at, address));
        kill::never();
    }
    longest
}

#[test]
fn pods_that_move_get_addresses_within_ten_seconds() {
    for seed in 0..8 {
        let longest = pods_move(false, seed);
        assert!(
            longest <= Duration::from_secs(10),
            "seed {seed}: {longest:?}"
        );
    }
}

#[test]
fn no_address_has_two_owners_when_agents_die_anywhere() {
    for seed in 100..110 {
        let longest = pods_move(true, seed);
        // What a killed agent had begun is ended by its successor.
        assert!(longest < Duration::from_mins(4), "seed {seed}: {longest:?}");
    }
}

#[test]
fn a_lost_answer_and_a_killed_give_back_are_ended_at_the_next_start() {
    let mut cluster = Cluster::new(1);
    let range = range("10.0.0.0/29");
    // A part of this disk that is not in its file.
    cluster.edit("10.0.0.0/24", |document| {
        let id = format!("{}-00000001", cluster.machines[0].space.ids.claimant);
        let part = Part::of(&cluster.machines[0].space.holder(&id));
        document.parts.insert("10.0.0.4/32".parse().unwrap(), part);
    });
    cluster.machines[0].restart(cluster.now);
    cluster.run(Duration::from_secs(11));
    assert!(owners(&cluster.document("10.0.0.0/24")).is_empty());
    // One of an earlier disk is marked first.
    cluster.edit("10.0.0.0/24", |document| {
        let part = Part::of(&cluster.machines[0].space.holder("other-1"));
        document.parts.insert("10.0.0.4/32".parse().unwrap(), part);
    });
    cluster.machines[0].restart(cluster.now);
    cluster.run(Duration::from_mins(4));
    let part = cluster
        .document("10.0.0.0/24")
        .parts
        .into_values()
        .next()
        .unwrap();
    assert_eq!(part.over.unwrap().why, "forgotten by n0");
    cluster.run(Duration::from_mins(2));
    assert!(owners(&cluster.document("10.0.0.0/24")).is_empty());
    cluster.add(0, "p", &range);
}

#[test]
fn a_marked_part_is_not_leased_from_until_its_node_says_it_is_there() {
    let mut cluster = Cluster::new(1);
    let range = range("10.0.0.0/29");
    let (address, _) = cluster.add(0, "p", &range);
    cluster.edit("10.0.0.0/24", |document| {
        let part = document.parts.values_mut().next().unwrap();
        part.over = Some(ipam::subnet::Over {
            since: String::new(),
            why: "node n0 is gone".into(),
        });
    });
    cluster.run(Duration::from_secs(11));
    let part = cluster
        .document("10.0.0.0/24")
        .parts
        .into_values()
        .next()
        .unwrap();
    assert_eq!(part.over, None);
    assert_eq!(cluster.machines[0].parts(), [single(address).to_string()]);
}

#[test]
fn parts_of_another_boot_are_confirmed_before_anything_is_claimed() {
    let mut cluster = Cluster::new(1);
    let range = range("10.0.0.0/29");
    let (address, _) = cluster.add(0, "p", &range);
    let context = Context::clone(&cluster.machines[0].context);
    let node = ThisNode {
        boot: "b2".into(),
        ..context.node.clone()
    };
    cluster.machines[0].context = Arc::new(Context { node, ..context });
    cluster.machines[0].restart(cluster.now);
    let (again, _) = cluster.add(0, "q", &range);
    assert_eq!(again, address, "the leases ended with the boot");
    assert_eq!(owners(&cluster.document("10.0.0.0/24")).len(), 1);
}

#[test]
fn several_adds_get_what_another_node_frees_one_after_the_other() {
    let mut cluster = Cluster::new(2);
    let range = range("10.0.0.0/29");
    for pod in 0..6 {
        cluster.add(1, &format!("b{pod}"), &range);
    }
    let now = cluster.now;
    let mut answers: Vec<_> = (0..3)
        .map(|_| cluster.machines[0].ask(&range, Room::Addresses(1), now))
        .collect();
    for pod in 0..3 {
        cluster.run(Duration::from_secs(1));
        cluster.machines[1].release(&format!("b{pod}"));
        let released = cluster.now;
        let mut answer = answers.remove(0);
        let answered = loop {
            match answer.try_recv() {
                Err(oneshot::error::TryRecvError::Empty) => {
                    assert!(cluster.now < released + LIMIT, "pod {pod} waits still");
                    cluster.step(Duration::from_millis(500));
                }
                // It asks again, as the runtime does.
                Ok(Err(_)) => {
                    let now = cluster.now;
                    answer = cluster.machines[0].ask(&range, Room::Addresses(1), now);
                }
                answered => break answered,
            }
        };
        assert_eq!(answered, Ok(Ok(())));
        let taken = cluster.machines[0].take(&format!("a{pod}"), &range, None);
        assert!(taken.is_some(), "pod {pod}");
    }
}

#[test]
fn what_pods_of_a_node_leased_before_it_shared_its_store_becomes_its_part() {
    let mut cluster = Cluster::new(2);
    let range = range("10.0.0.0/24");
    // Another node has some of it already.
    cluster.add(1, "b", &range);
    let theirs = cluster.machines[1].parts();
    let mut addresses = Vec::new();
    for pod in 0..5 {
        let order = cluster.machines[0].order(&format!("a{pod}"), free_choice(&range));
        let leases = cluster.machines[0].leases();
        addresses.push(leases.take(&order, &Ownership::All).unwrap()[0].address);
    }
    let now = cluster.now;
    cluster.machines[0].restart(now);
    cluster.run(Duration::from_secs(5));
    let mine: Vec<IpNetwork> = cluster.machines[0]
        .parts()
        .iter()
        .map(|part| part.parse().unwrap())
        .collect();
    for address in addresses {
        let is_theirs = theirs
            .iter()
            .any(|part| part.parse::<IpNetwork>().unwrap().contains(address));
        let is_mine = mine.iter().any(|part| part.contains(address));
        assert_eq!(is_mine, !is_theirs, "{address}: {mine:?}, {theirs:?}");
    }
    assert!(!mine.is_empty());
    assert_eq!(cluster.machines[1].parts(), theirs);
}

#[test]
fn a_requested_address_is_claimed_handed_over_or_refused_by_name() {
    let mut cluster = Cluster::new(2);
    let range = range("10.0.0.0/24");
    let exact = |text: &str| -> IpAddr { text.parse().unwrap() };
    let add = |cluster: &mut Cluster, at, pod: &str, text: &str| {
        let address = exact(text);
        let room = Room::Exact(address);
        cluster
            .try_add(
                at,
                pod,
                &range,
                Some(address),
                room,
                Duration::from_secs(15),
            )
            .0
    };
    assert_eq!(
        add(&mut cluster, 0, "a", "10.0.0.77"),
        Ok(exact("10.0.0.77"))
    );
    assert_eq!(cluster.machines[0].parts(), ["10.0.0.77/32"]);
    // Another node's, and leased there.
    let held = add(&mut cluster, 1, "b", "10.0.0.77").unwrap_err();
    assert_eq!(held.message, "10.0.0.0/24: asked n0 for room; try again");
    cluster.machines[0].release("a");
    assert_eq!(
        add(&mut cluster, 1, "b", "10.0.0.77"),
        Ok(exact("10.0.0.77"))
    );
    cluster.edit("10.0.0.0/24", |document| {
        let part = Part {
            reserved: Some("whereabouts: ml/worker-0".into()),
            ..Part::default()
        };
        document.parts.insert("10.0.0.99/32".parse().unwrap(), part);
    });
    let reserved = add(&mut cluster, 1, "c", "10.0.0.99").unwrap_err();
    assert_eq!(
        reserved.message,
        "10.0.0.99/32 is reserved: whereabouts: ml/worker-0"
    );
    assert_eq!(reserved.kind, FailureKind::HeldByAnotherNode);
}

#[test]
fn a_node_has_one_network_of_a_range_which_outlives_its_disk() {
    let mut cluster = Cluster::new(2);
    let per_node = PerNode {
        prefix: 29,
        gateway: Some(Gateway::First),
    };
    let range = range("10.0.0.0/16").divided(Some(per_node)).unwrap();
    let room = Room::Network(per_node);
    let add = |cluster: &mut Cluster, at, pod: &str| {
        cluster
            .try_add(at, pod, &range, None, room, Duration::from_secs(15))
            .0
    };
    let first = add(&mut cluster, 0, "a").unwrap();
    for pod in ["b", "c", "d", "e"] {
        add(&mut cluster, 0, pod).unwrap();
    }
    let network = cluster.machines[0].parts();
    let full = add(&mut cluster, 0, "f").unwrap_err();
    assert_eq!(
        full.message,
        format!("the network {} of this node is used up", network[0])
    );
    assert!(!network.contains(&add(&mut cluster, 1, "a").unwrap().to_string()));
    // Reinstalled: same name, another disk.
    let name = cluster.machines[0].context.node.name.clone();
    cluster.machines[0] = Machine::new(cluster.share.path(), &name, cluster.now);
    assert_eq!(add(&mut cluster, 0, "a"), Ok(first));
    assert_eq!(cluster.machines[0].parts(), network);
}

#[test]
fn an_assigned_network_is_its_nodes_with_the_gateway_of_the_range() {
    let mut cluster = Cluster::new(1);
    let word = |cluster: &mut Cluster, change: PartsChange| {
        let now = cluster.now;
        cluster.machines[0].space.administer(&change, now)
    };
    let part = "10.0.7.16/29".to_owned();
    let assign = PartsChange::Assign {
        part: part.clone(),
        node: "n0".into(),
    };
    let changed = word(&mut cluster, assign.clone()).unwrap();
    assert_eq!(changed.changed, std::slice::from_ref(&part));
    let per_node = PerNode {
        prefix: 29,
        gateway: Some(Gateway::First),
    };
    let range = range("10.0.0.0/16").divided(Some(per_node)).unwrap();
    let room = Room::Network(per_node);
    let (address, _) = cluster.try_add(0, "a", &range, None, room, Duration::from_secs(15));
    assert_eq!(address, Ok("10.0.7.18".parse().unwrap()));
    let busy = word(&mut cluster, PartsChange::ReleasePart(part.clone())).unwrap_err();
    assert!(busy.message.contains("are leased or cool down"), "{busy}");
    cluster.machines[0].release("a");
    let kept = word(&mut cluster, PartsChange::GiveBack).unwrap().kept;
    assert_eq!(
        kept,
        [(part.clone(), "it is this node's network".to_owned())]
    );
    let changed = word(&mut cluster, PartsChange::ReleasePart(part.clone())).unwrap();
    assert_eq!(changed.changed, [part]);
    let wrong = word(&mut cluster, PartsChange::ReleasePart("10.0.0.0/8".into())).unwrap_err();
    assert!(
        wrong.message.contains("is not a part of one subnet"),
        "{wrong}"
    );
}

#[test]
fn the_parts_of_a_dead_node_are_released_by_an_administrator() {
    let mut cluster = Cluster::new(2);
    let range = range("10.0.0.0/24");
    let (address, _) = cluster.add(0, "a", &range);
    cluster.add(1, "a", &range);
    let now = cluster.now;
    let release = PartsChange::ReleaseNode("n0".into());
    assert!(cluster.machines[0].space.administer(&release, now).is_err());
    let changed = cluster.machines[1]
        .space
        .administer(&release, now)
        .unwrap()
        .changed;
    assert_eq!(changed.len(), 1);
    assert_eq!(owners(&cluster.document("10.0.0.0/24")).len(), 1);
    // A name that is not spelled right is told.
    let again = cluster.machines[1].space.administer(&release, now);
    let failure = again.unwrap_err();
    assert!(failure.message.contains("node n0 has no part"), "{failure}");
    // If it lives nevertheless, it has no more than its pods, as long as nobody else has that.
    cluster.run(Duration::from_secs(11));
    assert_eq!(cluster.machines[0].parts(), [single(address).to_string()]);
}

#[test]
fn a_node_that_leaves_gives_all_back_that_has_no_lease() {
    let mut cluster = Cluster::new(1);
    let range = range("10.0.0.0/24");
    for pod in ["a", "b", "c"] {
        cluster.add(0, pod, &range);
    }
    cluster.machines[0].release("a");
    cluster.machines[0].release("b");
    let now = cluster.now;
    let changed = cluster.machines[0]
        .space
        .administer(&PartsChange::GiveBack, now)
        .unwrap();
    assert_eq!(changed.kept.len(), 1, "{changed:?}");
    assert!(!changed.changed.is_empty());
    assert_eq!(owners(&cluster.document("10.0.0.0/24")).len(), 1);
}

#[test]
fn what_a_node_gives_back_is_free_though_others_change_the_document_meanwhile() {
    let mut cluster = Cluster::new(1);
    let range = range("10.0.0.0/24");
    let share = Directory::new(cluster.share.path());
    let subnet = "10.0.0.0/24".parse().unwrap();
    let piece = "10.0.0.254/32".parse().unwrap();
    let reserved = Part {
        reserved: Some("for others".into()),
        ..Part::default()
    };
    for _ in 0..20 {
        cluster.add(0, "a", &range);
        cluster.machines[0].release("a");
        let (now, space) = (cluster.now, &mut cluster.machines[0].space);
        let given = std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..20 {
                    let read = share.read(&address_space(), subnet).unwrap();
                    let mut next = read.document;
                    if next.parts.remove(&piece).is_none() {
                        next.parts.insert(piece, reserved.clone());
                    }
                    share.swap(&address_space(), read.version, &next).unwrap();
                }
            });
            space.administer(&PartsChange::GiveBack, now)
        });
        let mut left = owners(&cluster.document("10.0.0.0/24"));
        left.retain(|owner| owner.contains("n0"));
        assert!(given.is_err() || left.is_empty(), "{left:?}");
        // What another one was faster with is given back then.
        cluster.run(Duration::from_secs(30));
    }
}

#[test]
fn an_old_document_is_not_believed_and_the_node_keeps_what_it_has() {
    let mut cluster = Cluster::new(2);
    let range = range("10.0.0.0/24");
    let backup = cluster.share.path().join("default/10.0.0.0-24");
    cluster.add(1, "a", &range);
    let old: Vec<(std::path::PathBuf, Vec<u8>)> = std::fs::read_dir(&backup)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.clone(), std::fs::read(path).unwrap()))
        .collect();
    let (address, _) = cluster.add(0, "a", &range);
    std::fs::remove_dir_all(&backup).unwrap();
    std::fs::create_dir(&backup).unwrap();
    for (path, text) in old {
        std::fs::write(path, text).unwrap();
    }
    cluster.run(Duration::from_secs(30));
    let document = cluster.document("10.0.0.0/24");
    let (whole, part) = document
        .parts
        .iter()
        .find(|(part, _)| part.contains(address))
        .unwrap();
    assert_eq!(part.node, "n0");
    assert_eq!(cluster.machines[0].parts(), [whole.to_string()]);
    let refused = cluster.try_add(
        0,
        "b",
        &range,
        None,
        Room::Addresses(8),
        Duration::from_secs(3),
    );
    drop(refused);
    cluster.run(Duration::from_mins(16));
    cluster.add(0, "c", &range);
}

#[test]
fn what_moved_since_the_backup_goes_back_to_who_has_it() {
    let mut cluster = Cluster::new(2);
    let range = range("10.0.0.0/24");
    let backup = cluster.share.path().join("default/10.0.0.0-24");
    let (address, _) = cluster.add(1, "a", &range);
    let old: Vec<(std::path::PathBuf, Vec<u8>)> = std::fs::read_dir(&backup)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.clone(), std::fs::read(path).unwrap()))
        .collect();
    cluster.machines[1].release("a");
    let now = cluster.now;
    let given = cluster.machines[1]
        .space
        .administer(&PartsChange::GiveBack, now);
    assert!(!given.unwrap().changed.is_empty());
    let exact = Room::Exact(address);
    let limit = Duration::from_secs(30);
    let (taken, _) = cluster.try_add(0, "z", &range, Some(address), exact, limit);
    assert_eq!(taken, Ok(address));
    std::fs::remove_dir_all(&backup).unwrap();
    std::fs::create_dir(&backup).unwrap();
    for (path, text) in old {
        std::fs::write(path, text).unwrap();
    }
    let now = cluster.now;
    cluster.machines[1].restart(now);
    cluster.run(Duration::from_mins(3));
    let document = cluster.document("10.0.0.0/24");
    let of = document.parts.get(&single(address)).map(|part| &*part.node);
    assert_eq!(of, Some("n0"), "{:?}", owners(&document));
    assert_eq!(cluster.machines[0].parts(), [single(address).to_string()]);
}

#[test]
fn a_share_that_is_not_mounted_is_named_and_nothing_is_written() {
    let mut cluster = Cluster::new(1);
    std::fs::remove_file(cluster.share.path().join("FORMAT")).unwrap();
    let range = range("10.0.0.0/24");
    let (refused, _) = cluster.try_add(
        0,
        "a",
        &range,
        None,
        Room::Addresses(1),
        Duration::from_secs(6),
    );
    let refused = refused.unwrap_err();
    assert_eq!(refused.kind, FailureKind::TryAgain);
    assert!(refused.message.contains("mount the share"), "{refused}");
    assert_eq!(std::fs::read_dir(cluster.share.path()).unwrap().count(), 0);
}

#[test]
fn questions_for_more_ranges_than_a_node_claims_for_are_refused() {
    let mut cluster = Cluster::new(1);
    let now = cluster.now;
    let mut answers = Vec::new();
    for third in 0..=MAX_GOALS {
        let range = range(&format!("10.{}.{}.0/24", third / 256, third % 256));
        answers.push(cluster.machines[0].ask(&range, Room::Addresses(1), now));
    }
    let last = answers.pop().unwrap().try_recv().unwrap().unwrap_err();
    assert_eq!(last.kind, FailureKind::TryAgain);
}

#[test]
fn the_lease_of_a_part_that_is_cut_stays() {
    let mut cluster = Cluster::new(2);
    let range = range("10.0.0.0/29");
    let mut all = BTreeSet::new();
    for pod in ["a", "b", "c", "d", "e", "f"] {
        all.insert(cluster.add(0, pod, &range).0);
    }
    assert_eq!(all.len(), 6);
    cluster.machines[0].release("c");
    let (address, took) = cluster.add(1, "g", &range);
    assert!(took <= Duration::from_secs(10), "{took:?}");
    let leased = |_: &mut Owned, leased: &Leased<'_>| leased.of(single(address)).unwrap();
    let machine = &cluster.machines[0];
    let uses = owned::change(
        &machine.leases(),
        &machine.context.state_dir,
        &address_space(),
        leased,
    );
    assert!(
        !uses
            .unwrap()
            .iter()
            .any(|(_, used)| *used == ipam::leases::Use::Leased)
    );
}

#[test]
fn a_space_without_anything_of_the_node_is_idle() {
    let mut cluster = Cluster::new(1);
    cluster.run(Duration::from_secs(30));
    assert!(cluster.machines[0].space.is_idle());
}

#[test]
fn a_space_of_which_the_node_has_nothing_leaves_no_file() {
    let mut cluster = Cluster::new(2);
    let used_up = range("10.0.0.1/32");
    cluster.add(0, "c1", &used_up);
    let room = Room::Addresses(1);
    let (refused, _) = cluster.try_add(1, "c2", &used_up, None, room, LIMIT);
    refused.unwrap_err();
    cluster.run(Duration::from_mins(5));
    let Machine {
        context,
        space,
        _root,
        ..
    } = cluster.machines.remove(1);
    assert!(space.is_idle());
    space.close();
    let spaces = owned::spaces(&context.state_dir).unwrap();
    assert!(spaces.is_empty(), "{spaces:?}");
    let Machine {
        context,
        space,
        _root,
        ..
    } = cluster.machines.remove(0);
    space.close();
    let spaces = owned::spaces(&context.state_dir).unwrap();
    assert_eq!(spaces, [address_space()]);
}

/// What whereabouts leases, from one host number to another.
fn whereabouts(numbers: std::ops::RangeInclusive<u8>) -> Import {
    let lease = |number| {
        (
            IpAddr::from([10, 0, 0, number]),
            format!("ml/worker-{number}"),
        )
    };
    Import {
        source: WHEREABOUTS.to_owned(),
        leases: numbers.map(lease).collect(),
        over: BTreeSet::new(),
    }
}

#[test]
fn an_add_in_a_held_range_fails_by_the_hold_and_has_an_address_behind_it() {
    let mut cluster = Cluster::new(2);
    let (range, subnet) = (range("10.0.0.0/24"), "10.0.0.0/24".parse().unwrap());
    let space = &mut cluster.machines[0].space;
    space.reserve(subnet, &Reservation::Hold).unwrap();
    let five = IpAddr::from([10, 0, 0, 5]);
    for (requested, room) in [(None, Room::Addresses(1)), (Some(five), Room::Exact(five))] {
        let limit = Duration::from_secs(3);
        let (refused, _) = cluster.try_add(1, "a", &range, requested, room, limit);
        let refused = refused.unwrap_err();
        assert_eq!(refused.kind, FailureKind::TryAgain);
        assert!(
            refused
                .message
                .contains("rdmactl addresses unhold 10.0.0.0/24"),
            "{refused}"
        );
    }
    let space = &mut cluster.machines[0].space;
    let import = Reservation::Import(whereabouts(1..=200));
    assert_eq!(space.reserve(subnet, &import).unwrap().left, 200);
    space.reserve(subnet, &Reservation::Unhold).unwrap();
    for at in 0..2 {
        let (address, _) = cluster.add(at, "b", &range);
        assert!(address > IpAddr::from([10, 0, 0, 200]), "{address}");
    }
    let (refused, _) = cluster.try_add(1, "c", &range, Some(five), Room::Exact(five), LIMIT);
    let refused = refused.unwrap_err();
    assert_eq!(refused.kind, FailureKind::HeldByAnotherNode);
    assert!(
        refused.message.contains("whereabouts: ml/worker-5"),
        "{refused}"
    );
}

#[test]
fn a_lease_in_a_part_of_a_node_is_reported_and_the_part_stays() {
    let mut cluster = Cluster::new(2);
    let (range, subnet) = (range("10.0.0.0/24"), "10.0.0.0/24".parse().unwrap());
    let (address, _) = cluster.add(1, "a", &range);
    let before = cluster.document("10.0.0.0/24");
    let mut import = whereabouts(0..=0);
    import.leases = BTreeMap::from([(address, "ml/a".to_owned())]);
    let space = &mut cluster.machines[0].space;
    let outcome = space.reserve(subnet, &Reservation::Import(import)).unwrap();
    let (found, why) = &outcome.refused[0];
    assert_eq!(*found, address);
    assert!(
        why.contains("ml/a has it") && why.contains("node n1"),
        "{why}"
    );
    assert_eq!(cluster.document("10.0.0.0/24"), before);
}

#[test]
fn a_range_moves_though_the_agent_dies_at_each_point() {
    let subnet = "10.0.0.0/24".parse().unwrap();
    let steps = [
        Reservation::Hold,
        Reservation::Import(whereabouts(5..=7)),
        Reservation::Unhold,
    ];
    for points in 0..24 {
        let mut cluster = Cluster::new(1);
        kill::after(points);
        for step in &steps {
            while cluster.machines[0].space.reserve(subnet, step).is_err() {
                assert!(kill::is_dead());
                kill::never();
                cluster.machines[0].restart(cluster.now);
            }
        }
        kill::never();
        let document = cluster.document("10.0.0.0/24");
        let parts: Vec<String> = document.parts.keys().map(ToString::to_string).collect();
        assert_eq!(
            parts,
            ["10.0.0.5/32", "10.0.0.6/32", "10.0.0.7/32"],
            "{points}"
        );
    }
}

#[test]
fn two_nodes_import_and_a_third_one_claims_at_one_time() {
    let share = in_memory();
    ipam::directory::init(share.path()).unwrap();
    let subnet: IpNetwork = "10.0.0.0/24".parse().unwrap();
    let machine = |name: &str| Machine::new(share.path(), name, Instant::now());
    std::thread::scope(|scope| {
        for number in 0..2 {
            let mut machine = machine(&format!("n{number}"));
            scope.spawn(move || {
                for last in 1..=60 {
                    let import = Reservation::Import(whereabouts(1..=last));
                    machine.space.reserve(subnet, &import).unwrap();
                }
            });
        }
        let mut machine = machine("n2");
        scope.spawn(move || {
            let range = range("10.0.0.0/24");
            for pod in 0..20 {
                let pod = format!("p{pod}");
                while machine.take(&pod, &range, None).is_none() {
                    drop(machine.ask(&range, Room::Addresses(1), Instant::now()));
                    machine.space.step(Instant::now());
                }
            }
        });
    });
    let mut last = machine("n3");
    let outcome = last
        .space
        .reserve(subnet, &Reservation::Import(whereabouts(1..=60)))
        .unwrap();
    assert_eq!(outcome.left + outcome.refused.len() as u64, 60, "each once");
    let read = last.share.read(&address_space(), subnet).unwrap().document;
    assert!(read.in_doubt().is_empty(), "{read:?}");
    let ours: usize = read
        .parts
        .iter()
        .filter(|(_, part)| part.node == "n2")
        .map(|(piece, _)| piece::size(*piece))
        .sum();
    assert!(ours >= 20, "{read:?}");
}

#[test]
fn a_part_is_not_assigned_to_what_is_not_a_name() {
    let mut cluster = Cluster::new(1);
    for node in ["", "a b", "../x"] {
        let assign = PartsChange::Assign {
            part: "10.0.0.0/28".into(),
            node: node.into(),
        };
        let now = cluster.now;
        let refused = cluster.machines[0]
            .space
            .administer(&assign, now)
            .unwrap_err();
        assert!(
            refused.message.contains("is not a node's name"),
            "{refused}"
        );
    }
    assert!(cluster.document("10.0.0.0/24").parts.is_empty());
}
