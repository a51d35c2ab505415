//! Asking the node's broker for a block of addresses, when those of this node have no room.
//!
//! The only place where a call waits for another process, and for the cluster. Nothing that the
//! call took is held meanwhile: an attempt that needs a block has given back what it took.

use crate::store::{Need, Refused, StoreError};
use cni_wire::{Code, Error};
use node_wire::client::{self, ClientError};
use node_wire::{BlockNeed, BlocksGranted, FailureKind};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Where the broker listens, below the host's root.
pub(super) const BROKER_SOCKET: &str = "run/rdma-netdev/ipam.sock";
/// For all questions of one call together.
pub(super) const TIMEOUT: Duration = Duration::from_secs(5);
/// How many blocks one call may come to need: each part of an order one, some twice, where other
/// calls took what was granted.
const MAX_QUESTIONS: usize = 64;

/// The broker at its socket.
#[derive(Debug)]
pub(super) struct Broker {
    pub(super) socket: PathBuf,
}

/// Why an order was not served.
#[derive(Debug)]
pub(super) enum Fault {
    Store(Refused),
    /// By the broker, or because there is none.
    Broker(Error),
}

impl Broker {
    /// Makes an attempt, and another one each time the node has got the block that was missing.
    pub(super) fn supply<T>(
        &self,
        mut attempt: impl FnMut() -> Result<T, Refused>,
    ) -> Result<T, Fault> {
        let deadline = Instant::now() + TIMEOUT;
        let mut last: Option<(Need, BlocksGranted)> = None;
        for _ in 0..MAX_QUESTIONS {
            let refused = match attempt() {
                Ok(taken) => return Ok(taken),
                Err(refused) => refused,
            };
            let StoreError::NeedsBlock(need) = &refused.error else {
                return Err(Fault::Store(refused));
            };
            let answer = self.ask(need, deadline).map_err(Fault::Broker)?;
            let answered = (Need::clone(need), answer);
            // The same blocks did not help before.
            if last.as_ref() == Some(&answered) {
                return Err(Fault::Store(refused));
            }
            last = Some(answered);
        }
        attempt().map_err(Fault::Store)
    }

    fn ask(&self, need: &Need, deadline: Instant) -> Result<BlocksGranted, Error> {
        let left = deadline.saturating_duration_since(Instant::now());
        client::ask(&self.socket, &question(need), left).map_err(|error| refused(&error, need))
    }
}

fn question(need: &Need) -> BlockNeed {
    let v4 = need.range.subnet().is_ipv4();
    let spans = need.range.spans().iter();
    let spans: Vec<(IpAddr, IpAddr)> = spans.map(|span| span.addresses(v4)).collect();
    BlockNeed {
        store: need.space.store.clone(),
        network_name: need.space.network_name.clone(),
        range: need.range.subnet().to_string(),
        spans,
        per_node: need.range.per_node(),
        address: need.address,
        single: need.single,
        count: need.count,
    }
}

fn refused(error: &ClientError, need: &Need) -> Error {
    let what = format!("{need}, and its broker got no more: {error}");
    let (code, remedy) = match (&error.fault, error.failure().map(|failure| failure.kind)) {
        (_, Some(FailureKind::Exhausted)) => (
            Code::Exhausted,
            "see kubectl get addressblocks -A, and rdmactl reclaim on nodes that have many; enlarge the range",
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
            "the runtime tries again; if it goes on: kubectl -n kube-system logs ds/rdma-netdev -c rdma-ipam-broker on this node",
        ),
    };
    Error::new(code, what).with_details(remedy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::AddressSpace;
    use crate::range::{Range, Spec};
    use node::policy::Profile;
    use node_wire::document::encode_answer;
    use node_wire::{Answer, Failure, Question};
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    fn need(address: Option<&str>) -> Refused {
        let spec = Spec {
            range: "10.0.0.0/24",
            exclude: &["10.0.0.8"],
            ..Spec::default()
        };
        let need = Need {
            space: AddressSpace::new("default", Some("blue")),
            range: Range::new(&spec, Profile::Strict).unwrap(),
            address: address.map(|address| address.parse().unwrap()),
            single: false,
            count: 2,
        };
        Refused {
            part: Some(0),
            error: StoreError::NeedsBlock(Box::new(need)),
        }
    }

    /// Answers as many questions as there are answers; returns the questions.
    fn serve(
        answers: Vec<Result<Answer, Failure>>,
        attempt: impl FnMut() -> Result<u8, Refused>,
    ) -> (Result<u8, Fault>, Vec<BlockNeed>) {
        let place = tempfile::tempdir().unwrap();
        let socket = place.path().join("ipam.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        std::thread::scope(|scope| {
            let server = scope.spawn(move || {
                let mut needs = Vec::new();
                for answer in answers {
                    let (mut stream, _) = listener.accept().unwrap();
                    let mut question = Vec::new();
                    stream.read_to_end(&mut question).unwrap();
                    stream.write_all(&encode_answer(&answer)).unwrap();
                    match Question::decode(&question) {
                        Ok(Question::Block(need)) => needs.push(need),
                        other => panic!("{other:?}"),
                    }
                }
                needs
            });
            let result = Broker { socket }.supply(attempt);
            (result, server.join().unwrap())
        })
    }

    fn granted() -> Result<Answer, Failure> {
        let blocks = vec!["10.0.0.0/28".to_owned()];
        Ok(Answer::Block(BlocksGranted { blocks }))
    }

    #[test]
    fn an_attempt_with_room_asks_nobody() {
        let broker = Broker {
            socket: "/nowhere/ipam.sock".into(),
        };
        assert!(matches!(broker.supply(|| Ok(7)), Ok(7)));
    }

    #[test]
    fn each_block_that_is_missing_is_asked_for() {
        let mut attempts = 0;
        let (result, needs) = serve(vec![granted(), granted()], || {
            attempts += 1;
            match attempts {
                1 => Err(need(None)),
                2 => Err(need(Some("10.0.0.77"))),
                _ => Ok(9),
            }
        });
        assert!(matches!(result, Ok(9)), "{result:?}");
        let spans: Vec<String> = needs[0]
            .spans
            .iter()
            .map(|(a, b)| format!("{a}-{b}"))
            .collect();
        assert_eq!(spans, ["10.0.0.1-10.0.0.7", "10.0.0.9-10.0.0.254"]);
        assert_eq!((&*needs[0].range, needs[0].count), ("10.0.0.0/24", 2));
        assert_eq!(needs[0].network_name.as_deref(), Some("blue"));
        assert_eq!(needs[1].address, Some("10.0.0.77".parse().unwrap()));
    }

    #[test]
    fn an_order_ends_when_the_same_blocks_come_twice() {
        let (result, needs) = serve(vec![granted(), granted()], || Err(need(None)));
        let Err(Fault::Store(refused)) = result else {
            panic!("{result:?}");
        };
        assert!(matches!(refused.error, StoreError::NeedsBlock(_)));
        assert_eq!(needs.len(), 2);
    }

    #[test]
    fn what_the_broker_says_has_its_code() {
        for (kind, code) in [
            (FailureKind::Exhausted, Code::Exhausted),
            (FailureKind::HeldByAnotherNode, Code::Exhausted),
            (FailureKind::Mismatch, Code::Policy),
            (FailureKind::ClusterUnavailable, Code::TryAgain),
        ] {
            let failure = Failure::new(kind, "so it is");
            let (result, _) = serve(vec![Err(failure)], || Err(need(None)));
            let Err(Fault::Broker(error)) = result else {
                panic!("{result:?}");
            };
            assert_eq!(error.code, code);
            assert!(
                error.msg.contains("so it is") && error.msg.contains("10.0.0.0/24"),
                "{error}"
            );
        }
    }

    #[test]
    fn without_a_broker_the_runtime_tries_again() {
        let socket = "/nowhere/ipam.sock".into();
        let result = Broker { socket }.supply(|| Err::<u8, _>(need(None)));
        let Err(Fault::Broker(error)) = result else {
            panic!("{result:?}");
        };
        assert_eq!(error.code, Code::TryAgain);
        assert!(
            error.msg.contains("address broker at /nowhere/ipam.sock"),
            "{error}"
        );
    }
}
