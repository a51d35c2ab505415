//! Where an order's addresses come from: from all that the network asks for, or from what this node
//! owns; and asking for more of that, when it is used up.
//!
//! The only place where a call waits for another process. It holds no lock meanwhile, and has taken
//! nothing.

use crate::lease::Lease;
use crate::leases::{LeaseError, Leases, Need, Order, Ownership, Refused};
use cni_wire::{Code, Error};
use node::policy::{Policy, StoreKind};
use node_wire::FailureKind;
use node_wire::agent::{Room, RoomMade, RoomNeed, RoomQuestion};
use node_wire::client::{self, ClientError};
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Where the agent listens.
pub const AGENT_SOCKET: &str = "run/rdma-netdev/agent.sock";
/// For all questions of one call together.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How often one call may ask: others may take what was granted.
const MAX_QUESTIONS: usize = 64;

/// Where the addresses of a store come from.
#[derive(Debug)]
pub(super) struct Supply<'p> {
    state_dir: &'p Path,
    source: Source,
}

#[derive(Debug)]
enum Source {
    /// The node has its addresses alone.
    Node,
    /// `rdma-agent`, for what this node owns of what nodes share.
    Agent { socket: PathBuf },
}

/// Why an order was not served.
#[derive(Debug)]
pub(super) enum Fault {
    Leases(Refused),
    /// The answer of who was asked for more.
    Supplier(Error),
}

impl<'p> Supply<'p> {
    /// That of a store of the policy. `root` is the directory below which the host's files are.
    pub(super) fn of(policy: &'p Policy, store: &str, root: &Path) -> Result<Self, LeaseError> {
        let Some(known) = policy.stores.get(store) else {
            return Err(LeaseError::unknown_store(policy, store));
        };
        let source = match &known.kind {
            StoreKind::Node => Source::Node,
            StoreKind::Directory(_) | StoreKind::Kubernetes => Source::Agent {
                socket: root.join(AGENT_SOCKET),
            },
        };
        Ok(Self {
            state_dir: &policy.state_dir,
            source,
        })
    }

    /// Whether the node has all addresses of its networks by itself.
    fn is_node_alone(&self) -> bool {
        matches!(self.source, Source::Node)
    }

    fn ownership(&self, last_resort: bool) -> Ownership<'_> {
        match self.source {
            Source::Node => Ownership::All,
            Source::Agent { .. } => Ownership::Parts {
                state_dir: self.state_dir,
                last_resort,
            },
        }
    }

    /// Leases an order, and asks for what this node lacks. Addresses of the host that were passed over
    /// go into `of_host`.
    ///
    /// # Errors
    /// Why it was refused, or the answer of who was asked.
    pub(super) fn lease(
        &self,
        order: &Order,
        leases: &Leases,
        of_host: &mut BTreeSet<IpAddr>,
    ) -> Result<Vec<Lease>, Fault> {
        let deadline = Instant::now() + TIMEOUT;
        // The agent is asked before an address is leased that cools down.
        let mut last_resort = false;
        let mut refusal = None;
        for _ in 0..MAX_QUESTIONS {
            let refused = match leases.take_noting(order, &self.ownership(last_resort), of_host) {
                Ok(taken) => return Ok(taken),
                Err(refused) => refused,
            };
            let LeaseError::NeedsRoom(needs) = &refused.error else {
                return Err(Fault::Leases(refused));
            };
            if let Some(refusal) = refusal {
                return Err(Fault::Supplier(refusal));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let Source::Agent { socket } = &self.source else {
                return Err(Fault::Leases(refused));
            };
            if let Err(error) = ask(socket, order, needs, left) {
                refusal = Some(error);
                last_resort = true;
            }
        }
        leases
            .take_noting(order, &self.ownership(last_resort), of_host)
            .map_err(Fault::Leases)
    }

    /// Whether an ADD would find an address for each request, or somebody who can be asked for more.
    /// Asks nobody, changes nothing.
    pub(super) fn check(&self, order: &Order, leases: Option<&Leases>) -> Result<(), LeaseError> {
        let room = match leases {
            Some(leases) => leases.has_room(order, &self.ownership(true)),
            None if self.is_node_alone() => Ok(()),
            None => Err(Refused {
                request: None,
                error: LeaseError::NeedsRoom(order.needs()),
            }),
        };
        let Err(Refused { error, .. }) = room else {
            return Ok(());
        };
        let socket = match &self.source {
            Source::Node => return Err(error),
            Source::Agent { socket } => socket,
        };
        match &error {
            LeaseError::NeedsRoom(_) if socket.exists() => Ok(()),
            _ => Err(error),
        }
    }
}

fn ask(socket: &Path, order: &Order, needs: &[Need], left: Duration) -> Result<RoomMade, Error> {
    let need = |need: &Need| RoomNeed {
        store: order.space.store.clone(),
        network_name: order.space.network_name.clone(),
        range: need.range.subnet().to_string(),
        spans: spans(need),
        room: match (need.range.per_node(), need.address) {
            (Some(network), _) => Room::Network(network),
            (None, Some(address)) => Room::Exact(address),
            (None, None) => Room::Addresses(need.count),
        },
    };
    let question = RoomQuestion {
        within_ms: u32::try_from(left.as_millis()).unwrap_or(u32::MAX),
        needs: needs.iter().map(need).collect(),
    };
    client::ask(socket, &question, left).map_err(|error| refused(&error, needs))
}

fn spans(need: &Need) -> Vec<(IpAddr, IpAddr)> {
    let v4 = need.range.subnet().is_ipv4();
    let spans = need.range.spans().iter();
    spans.map(|span| span.addresses(v4)).collect()
}

fn refused(error: &ClientError, needs: &[Need]) -> Error {
    let needs: Vec<String> = needs.iter().map(ToString::to_string).collect();
    let what = format!("{}, and the agent got no more: {error}", needs.join("; "));
    let (code, remedy) = match (&error.fault, error.failure().map(|failure| failure.kind)) {
        (_, Some(FailureKind::Exhausted)) => (
            Code::Exhausted,
            "see kubectl rdma addresses, and rdmactl reclaim on nodes that have many; enlarge the range",
        ),
        (_, Some(FailureKind::HeldByAnotherNode)) => (
            Code::Exhausted,
            "ask for another address, or for none; or let the pod run on that node",
        ),
        (_, Some(FailureKind::Mismatch)) => (
            Code::Policy,
            "correct the network's range, or stores in /etc/rdma-netdev/policy.json, the same on all nodes",
        ),
        (node_wire::Fault::QuestionTooLarge(_), _) => {
            (Code::InvalidConfig, "shorten the list in exclude")
        }
        _ => (
            Code::TryAgain,
            "the runtime tries again; if it goes on: kubectl -n kube-system logs ds/rdma-netdev --all-containers on this node",
        ),
    };
    Error::new(code, what).with_details(remedy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leases::AddressRequest;
    use crate::owned::{self, Owned, OwnedPart};
    use crate::range::{Range, Spec};
    use crate::space::AddressSpace;
    use node::policy::{Profile, StorePolicy};
    use node_wire::document::encode_answer;
    use node_wire::{Answer, Failure, Question};
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    struct Scene {
        place: tempfile::TempDir,
        policy: Policy,
        leases: Leases,
        order: Order,
    }

    impl Scene {
        fn new() -> Self {
            let place = tempfile::tempdir().unwrap();
            std::fs::create_dir_all(place.path().join("run/rdma-netdev")).unwrap();
            let mut policy = Policy {
                state_dir: place.path().join("state"),
                ..Policy::default()
            };
            let store = StorePolicy::of(StoreKind::Directory("/nowhere".into()));
            policy.stores.insert("shared".into(), store);
            let spec = Spec {
                range: "10.0.0.0/24",
                exclude: &["10.0.0.8"],
                ..Spec::default()
            };
            let order = Order {
                holder: crate::lease::Holder {
                    node: "n1".into(),
                    ..crate::lease::tests::lease("10.0.0.5", "10.0.0.0/24").holder
                },
                profile: Profile::Strict,
                space: AddressSpace::new("shared", Some("blue")),
                overlapping: true,
                requests: vec![AddressRequest {
                    range: Range::new(&spec, Profile::Strict).unwrap(),
                    same_host_number_as: None,
                    requested: None,
                }],
                cooldown: Duration::from_secs(30),
            };
            let leases = Leases::open(place.path(), "b1").unwrap();
            Self {
                place,
                policy,
                leases,
                order,
            }
        }

        fn own(&self, part: &str) {
            self.own_as(part, None);
        }

        fn own_network(&self, part: &str) {
            self.own_as(part, Some(owned::OwnedNetwork::default()));
        }

        fn own_as(&self, part: &str, network: Option<owned::OwnedNetwork>) {
            let own = |owned: &mut Owned, _: &crate::leases::Leased<'_>| {
                owned.node = "n1".into();
                let new = OwnedPart {
                    id: "7".into(),
                    boot: "b1".into(),
                    network,
                };
                owned.parts.insert(part.parse().unwrap(), new);
            };
            owned::change(&self.leases, &self.policy.state_dir, &self.order.space, own).unwrap();
        }

        fn supply(&self) -> Supply<'_> {
            Supply::of(&self.policy, "shared", self.place.path()).unwrap()
        }

        /// Answers one question; what it was, and what the order came to.
        fn ask(&self, answer: Result<&str, Failure>) -> (RoomQuestion, Result<String, Error>) {
            let (question, taken) = self.ask_for(|scene| answer.map(|part| scene.own(part)));
            (question, taken.map_err(supplier))
        }

        fn ask_for(
            &self,
            answer: impl FnOnce(&Self) -> Result<(), Failure> + Send,
        ) -> (RoomQuestion, Result<String, Fault>) {
            let listener = UnixListener::bind(self.place.path().join(AGENT_SOCKET)).unwrap();
            std::thread::scope(|scope| {
                let server = scope.spawn(move || {
                    let (mut stream, _) = listener.accept().unwrap();
                    let mut question = Vec::new();
                    stream.read_to_end(&mut question).unwrap();
                    let answer = answer(self).map(|()| Answer::Room(RoomMade {}));
                    stream.write_all(&encode_answer(&answer)).unwrap();
                    match Question::decode(&question) {
                        Ok(Question::Room(question)) => question,
                        other => panic!("{other:?}"),
                    }
                });
                let taken = self
                    .supply()
                    .lease(&self.order, &self.leases, &mut BTreeSet::new());
                let taken = taken.map(|taken| taken[0].address.to_string());
                (server.join().unwrap(), taken)
            })
        }
    }

    fn supplier(fault: Fault) -> Error {
        match fault {
            Fault::Supplier(error) => error,
            Fault::Leases(refused) => panic!("{refused:?}"),
        }
    }

    #[test]
    fn an_order_with_room_asks_nobody() {
        let scene = Scene::new();
        scene.own("10.0.0.64/28");
        let taken = scene
            .supply()
            .lease(&scene.order, &scene.leases, &mut BTreeSet::new())
            .unwrap();
        assert_eq!(taken[0].address.to_string(), "10.0.0.64");
    }

    #[test]
    fn room_that_is_missing_is_asked_for() {
        let scene = Scene::new();
        let (question, taken) = scene.ask(Ok("10.0.0.32/30"));
        assert_eq!(taken.unwrap(), "10.0.0.32");
        let [need] = question.needs.as_slice() else {
            panic!("{question:?}")
        };
        assert_eq!(
            (need.range.as_str(), need.room),
            ("10.0.0.0/24", Room::Addresses(1))
        );
        assert_eq!(need.network_name.as_deref(), Some("blue"));
        let spans: Vec<String> = need.spans.iter().map(|(a, b)| format!("{a}-{b}")).collect();
        assert_eq!(spans, ["10.0.0.1-10.0.0.7", "10.0.0.9-10.0.0.254"]);
    }

    #[test]
    fn a_requested_address_of_a_divided_range_is_one_of_the_nodes_network() {
        let mut scene = Scene::new();
        let per_node = node_wire::PerNode {
            prefix: 30,
            gateway: None,
        };
        for (address, taken) in [
            ("10.0.0.33", Ok("10.0.0.33")),
            ("10.0.0.77", Err("10.0.0.77 is not in 10.0.0.32/30")),
        ] {
            scene.place = Scene::new().place;
            scene.leases = Leases::open(scene.place.path(), "b1").unwrap();
            scene.policy.state_dir = scene.place.path().join("state");
            let request = &mut scene.order.requests[0];
            request.range = request.range.clone().divided(Some(per_node)).unwrap();
            request.requested = Some(address.parse().unwrap());
            let (question, came_to) = scene.ask_for(|scene| {
                scene.own_network("10.0.0.32/30");
                Ok(())
            });
            assert_eq!(question.needs[0].room, Room::Network(per_node));
            match (came_to, taken) {
                (Ok(leased), Ok(address)) => assert_eq!(leased, address),
                (Err(Fault::Leases(refused)), Err(network)) => {
                    let message = refused.error.to_string();
                    assert!(message.contains(network), "{message}");
                }
                (other, _) => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn an_address_that_cools_down_is_leased_where_there_is_no_other_room() {
        let scene = Scene::new();
        scene.own("10.0.0.32/32");
        scene
            .supply()
            .lease(&scene.order, &scene.leases, &mut BTreeSet::new())
            .unwrap();
        let holder = &scene.order.holder;
        let cooldown = scene.order.cooldown;
        let freed = scene
            .leases
            .release(&holder.container, "net1", "rail0", cooldown);
        assert_eq!(freed.unwrap().len(), 1);
        let failure = Failure::new(FailureKind::Exhausted, "so it is");
        assert_eq!(scene.ask(Err(failure)).1.unwrap(), "10.0.0.32");
    }

    #[test]
    fn what_the_agent_answers_has_its_code() {
        for (kind, code) in [
            (FailureKind::Exhausted, Code::Exhausted),
            (FailureKind::HeldByAnotherNode, Code::Exhausted),
            (FailureKind::Mismatch, Code::Policy),
            (FailureKind::TryAgain, Code::TryAgain),
        ] {
            let error = Scene::new()
                .ask(Err(Failure::new(kind, "so it is")))
                .1
                .unwrap_err();
            assert_eq!(error.code, code);
            let says = error.msg.contains("so it is") && error.msg.contains("10.0.0.0/24");
            assert!(says, "{error}");
        }
    }

    #[test]
    fn without_an_agent_the_runtime_tries_again() {
        let scene = Scene::new();
        let refused = scene
            .supply()
            .lease(&scene.order, &scene.leases, &mut BTreeSet::new());
        let error = supplier(refused.unwrap_err());
        assert_eq!(error.code, Code::TryAgain);
        assert!(error.msg.contains("agent.sock"), "{error}");
        let status = scene.supply().check(&scene.order, Some(&scene.leases));
        assert!(
            matches!(status, Err(LeaseError::NeedsRoom(_))),
            "{status:?}"
        );
    }
}
