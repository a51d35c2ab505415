//! Questions and answers, and their JSON form.
//!
//! ```text
//! {"version": 1, "question": {"podUnits": {"namespace": "ml", "name": "train-0", "uid": "8f…"}}}
//! {"version": 1, "answer": {"uidChecked": true, "allocations": [
//!     {"container": "worker", "resource": "rdma/hca", "units": ["0000:3b:00.0"], "hcas": ["0000:3b:00.0"],
//!      "pool": ["0000:3b:00.0", "0000:5e:00.0"]}]}}
//! {"version": 1, "error": {"kind": "unknownPod", "message": "the kubelet knows no pod ml/train-0 …"}}
//! ```

use std::fmt;

use serde::de::{DeserializeOwned, Deserializer, Error as _};
use serde::{Deserialize, Serialize};

use crate::agent::{PartsChanged, PartsQuestion, RoomMade, RoomQuestion};
use crate::binding::{BindQuestion, Bound, CommitQuestion, Committed, UnbindQuestion, Unbound};
use crate::client::{Fault, Server};
use crate::status::{
    ChangeQuestion, DaemonStatus, ForgetQuestion, Forgotten, StatusChange, StatusQuestion,
};
use crate::{ANSWER_MAX_BYTES, QUESTION_MAX_BYTES, VERSION};

/// The longest name of a namespace, a pod or a UID: a DNS subdomain's.
const NAME_MAX_BYTES: usize = 253;
/// Most slots in one question: more than any machine has HCAs.
const MAX_SLOTS: usize = 1024;

/// What a program of the node wants to know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Question {
    /// To the daemon: which units of which resources does this pod hold?
    PodUnits(Pod),
    /// To the daemon: its state.
    Status(StatusQuestion),
    /// To the daemon: its state, once it is another one.
    Change(ChangeQuestion),
    /// To the daemon: this HCA was removed for good.
    Forget(ForgetQuestion),
    /// To the daemon: bind the slots of this pod.
    Bind(BindQuestion),
    /// To the daemon: the devices of these slots are in place.
    Commit(CommitQuestion),
    /// To the daemon: the devices of these slots are back.
    Unbind(UnbindQuestion),
    /// To the agent: this node's parts have no room.
    Room(RoomQuestion),
    /// To the agent: an administrator changes parts.
    Parts(PartsQuestion),
}

/// A pod, as a CNI plugin knows it from `CNI_ARGS`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Pod {
    /// `K8S_POD_NAMESPACE`.
    #[serde(deserialize_with = "name")]
    pub namespace: String,
    /// `K8S_POD_NAME`.
    #[serde(deserialize_with = "name")]
    pub name: String,
    /// `K8S_POD_UID`, where the runtime passes it. It distinguishes a pod from an earlier
    /// one of the same name.
    #[serde(
        default,
        deserialize_with = "optional_name",
        skip_serializing_if = "Option::is_none"
    )]
    pub uid: Option<String>,
}

/// A text that a name can be, so that no name can stand for all or be longer than any.
pub(crate) fn name<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let name = String::deserialize(from)?;
    match name.len() {
        1..=NAME_MAX_BYTES => Ok(name),
        bytes => Err(D::Error::custom(format!(
            "a name has {bytes} bytes, expected 1 to {NAME_MAX_BYTES}"
        ))),
    }
}

#[derive(Deserialize)]
struct Name(#[serde(deserialize_with = "name")] String);

fn optional_name<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    Ok(Option::<Name>::deserialize(from)?.map(|Name(name)| name))
}

/// Slots of one question.
pub(crate) fn units<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    let units = Vec::<Name>::deserialize(from)?;
    match units.len() {
        0..=MAX_SLOTS => Ok(units.into_iter().map(|Name(name)| name).collect()),
        many => Err(D::Error::custom(format!(
            "{many} units, at most {MAX_SLOTS}"
        ))),
    }
}

impl fmt::Display for Pod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)?;
        match &self.uid {
            Some(uid) => write!(f, " (UID {uid})"),
            None => Ok(()),
        }
    }
}

/// The answer to a question. Which one it is says the question.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Answer {
    /// To [`Question::Status`].
    Status(Box<DaemonStatus>),
    /// To [`Question::Change`].
    Change(Box<StatusChange>),
    /// To [`Question::PodUnits`].
    PodUnits(PodUnits),
    /// To [`Question::Forget`].
    Forgotten(Forgotten),
    /// To [`Question::Bind`].
    Bound(Bound),
    /// To [`Question::Commit`].
    Committed(Committed),
    /// To [`Question::Unbind`].
    Unbound(Unbound),
    /// To [`Question::Room`].
    Room(RoomMade),
    /// To [`Question::Parts`].
    Parts(PartsChanged),
}

/// Units that a pod holds, of all device plugins.
///
/// The kubelet lists app containers and restartable init containers. Units that only an ordinary
/// init container has are not in the list.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodUnits {
    /// True if the kubelet's checkpoint shows that every unit listed belongs to the UID that was
    /// asked for. False if the question has no UID or the checkpoint cannot be read: the list is
    /// then that of *a* pod with this namespace and name.
    pub uid_checked: bool,
    /// Why `uid_checked` is false, for a person.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid_note: Option<String>,
    /// One entry for each container and resource of which the pod holds units.
    pub allocations: Vec<Allocation>,
    /// Devices that the pod has by resource claims (dynamic resource allocation). No checkpoint is
    /// read for them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claims: Vec<ClaimedDevice>,
}

/// A device that a container has by a resource claim.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimedDevice {
    /// Name of the container.
    pub container: String,
    /// Name of the driver, such as `gpu.nvidia.com`.
    pub driver: String,
    /// Name of the device in the driver's pool, such as `gpu-0`.
    pub device: String,
}

/// Units of one resource that one container holds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Allocation {
    /// Name of the container.
    pub container: String,
    /// Name of the resource, such as `rdma/hca_shared_devices_a` or `nvidia.com/gpu`.
    pub resource: String,
    /// IDs of the units, as the resource's device plugin names them.
    pub units: Vec<String>,
    /// HCAs that the units together stand for, as `0000:3b:00.0`, `mlx5_core.sf.4` or
    /// `guid-505400fffe000001`: the form in which unit IDs name them. Absent if the resource is
    /// not one of the daemon's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hcas: Option<Vec<String>>,
    /// All HCAs of the resource's pool on this node, whoever has them, in the order of their
    /// identities: the order that numbers rails. Absent if the resource is not one of the daemon's,
    /// and from daemons that do not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<Vec<String>>,
}

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "camelCase")]
#[error("{message}")]
pub struct Failure {
    /// For a program.
    pub kind: FailureKind,
    /// For a person.
    pub message: String,
}

impl Failure {
    /// A failure of this kind.
    pub fn new(kind: FailureKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }
}

/// Why there is no answer, for a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum FailureKind {
    /// The question's `version` is not one of the daemon's.
    UnsupportedVersion,
    /// The daemon does not know the question.
    UnknownQuestion,
    /// The question is no whole, valid document.
    Malformed,
    /// The peer is not root.
    NotAllowed,
    /// The kubelet lists no pod of this namespace and name.
    UnknownPod,
    /// The pod of this namespace and name has another UID.
    AnotherPod,
    /// The kubelet lists several pods of this namespace and name, and what distinguishes them
    /// is missing: the question's UID, or a readable checkpoint of the kubelet.
    AmbiguousPod,
    /// The kubelet's PodResources service did not answer.
    KubeletUnavailable,
    /// The kubelet did not allocate this unit to the pod.
    NotAllocated,
    /// There is no HCA to bind, or none that may be bound.
    CannotBind,
    /// The slot is not bound to this sandbox.
    NotBound,
    /// No HCA of this name is missing.
    UnknownHca,
    /// A file of the bindings cannot be read or written.
    BindingsUnavailable,
    /// The answer is longer than [`ANSWER_MAX_BYTES`].
    AnswerTooLarge,
    /// Every address of the range is leased, cools down or is another node's.
    Exhausted,
    /// The address that is wanted is in another node's part.
    HeldByAnotherNode,
    /// Other nodes were asked for room, or the store of the documents does not answer.
    TryAgain,
    /// The network's range, the node's policy or an administrator's word cannot be served as they are.
    Mismatch,
    /// A kind that this version of the crate does not know.
    #[serde(other)]
    Other,
}

/// Whom to ask, and what comes back.
pub trait Ask: Clone {
    /// The answer.
    type Answer: DeserializeOwned;
    /// The program that answers.
    const SERVER: Server;

    /// As what it is sent.
    fn question(&self) -> Question;
}

macro_rules! asks {
    ($($question:ident: $variant:ident, $answer:ident, $server:ident;)*) => {$(
        impl Ask for $question {
            type Answer = $answer;
            const SERVER: Server = Server::$server;

            fn question(&self) -> Question {
                Question::$variant(self.clone())
            }
        }
    )*};
}

asks! {
    Pod: PodUnits, PodUnits, Daemon;
    StatusQuestion: Status, DaemonStatus, Daemon;
    ChangeQuestion: Change, StatusChange, Daemon;
    ForgetQuestion: Forget, Forgotten, Daemon;
    BindQuestion: Bind, Bound, Daemon;
    CommitQuestion: Commit, Committed, Daemon;
    UnbindQuestion: Unbind, Unbound, Daemon;
    RoomQuestion: Room, RoomMade, Agent;
    PartsQuestion: Parts, PartsChanged, Agent;
}

/// What every version of a document has.
#[derive(Deserialize)]
struct Head {
    version: u64,
}

/// The document of a question.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct QuestionDocument<Q> {
    version: u64,
    question: Q,
}

impl Question {
    /// The failure with which a server answers a question that is another server's.
    #[must_use]
    pub fn not_mine(&self) -> Failure {
        let why = "this program does not answer that question: install all programs of one release";
        Failure::new(FailureKind::UnknownQuestion, why)
    }

    /// The document.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        encode(&QuestionDocument {
            version: VERSION,
            question: self,
        })
    }

    /// Reads a document, as a server does.
    ///
    /// # Errors
    /// The failure to answer with: too long, not JSON, another version, another question, a field
    /// that is unknown, missing or out of its limits.
    pub fn decode(document: &[u8]) -> Result<Self, Failure> {
        let malformed = |why: String| {
            // serde's words for a variant that there is not.
            let kind = match why.starts_with("unknown variant") {
                true => FailureKind::UnknownQuestion,
                false => FailureKind::Malformed,
            };
            let why =
                format!("the question is malformed: {why}; install all programs of one release");
            Failure::new(kind, why)
        };
        if document.len() > QUESTION_MAX_BYTES {
            return Err(malformed(format!(
                "it is longer than {QUESTION_MAX_BYTES} bytes"
            )));
        }
        // The version first: only then is it known which fields there may be.
        let head: Head =
            serde_json::from_slice(document).map_err(|error| malformed(error.to_string()))?;
        if head.version != VERSION {
            return Err(Failure::new(
                FailureKind::UnsupportedVersion,
                format!(
                    "the question has version {}, this program knows version {VERSION}: install all \
                     programs of one release",
                    head.version
                ),
            ));
        }
        let document: QuestionDocument<Self> =
            serde_json::from_slice(document).map_err(|error| malformed(error.to_string()))?;
        Ok(document.question)
    }
}

#[derive(Serialize, Deserialize)]
struct AnswerDocument<A> {
    version: u64,
    #[serde(flatten)]
    outcome: Outcome<A>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Outcome<A> {
    Answer(A),
    Error(Failure),
}

/// The document of an answer or of a failure, at most [`ANSWER_MAX_BYTES`] long: an answer that
/// would be longer becomes the failure [`FailureKind::AnswerTooLarge`].
#[must_use]
pub fn encode_answer(answer: &Result<Answer, Failure>) -> Vec<u8> {
    let document = |outcome| {
        encode(&AnswerDocument {
            version: VERSION,
            outcome,
        })
    };
    let bytes = document(match answer {
        Ok(answer) => Outcome::Answer(answer),
        Err(failure) => Outcome::Error(failure.clone()),
    });
    if bytes.len() <= ANSWER_MAX_BYTES {
        return bytes;
    }
    let why = format!(
        "the answer has {} bytes, more than {ANSWER_MAX_BYTES}",
        bytes.len()
    );
    document(Outcome::Error(Failure::new(
        FailureKind::AnswerTooLarge,
        why,
    )))
}

/// Reads the answer to a question, as a client does.
///
/// # Errors
/// The server's failure; the document is malformed, of another version, or the answer to another
/// question.
pub fn decode_answer<A: DeserializeOwned>(document: &[u8]) -> Result<A, Fault> {
    let malformed = |error: serde_json::Error| Fault::Malformed(error.to_string());
    let head: Head = serde_json::from_slice(document).map_err(malformed)?;
    if head.version != VERSION {
        return Err(Fault::Version(head.version));
    }
    let document: AnswerDocument<A> = serde_json::from_slice(document).map_err(malformed)?;
    match document.outcome {
        Outcome::Answer(answer) => Ok(answer),
        Outcome::Error(failure) => Err(Fault::Failed(failure)),
    }
}

/// Structs of strings, numbers and lists: serialization into memory does not fail.
fn encode(document: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(document).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn pod() -> Pod {
        Pod {
            namespace: "ml".into(),
            name: "train-0".into(),
            uid: Some("8f".into()),
        }
    }

    fn failure_in(document: &[u8]) -> Failure {
        match decode_answer::<PodUnits>(document).unwrap_err() {
            Fault::Failed(failure) => failure,
            fault => panic!("{fault}"),
        }
    }

    fn failure_of(document: &Value) -> Failure {
        Question::decode(document.to_string().as_bytes()).unwrap_err()
    }

    #[test]
    fn question_has_the_documented_form() {
        let question = Question::PodUnits(pod());
        let document: Value = serde_json::from_slice(&question.encode()).unwrap();
        assert_eq!(
            document,
            json!({"version": 1, "question": {"podUnits":
                   {"namespace": "ml", "name": "train-0", "uid": "8f"}}})
        );
        assert_eq!(Question::decode(&question.encode()), Ok(question));
        let without = json!({"version": 1, "question": {"podUnits":
                             {"namespace": "ml", "name": "train-0"}}});
        let Ok(Question::PodUnits(pod)) = Question::decode(without.to_string().as_bytes()) else {
            panic!("a UID is optional");
        };
        assert_eq!(pod.uid, None);
    }

    #[test]
    fn answers_have_the_documented_form() {
        let units = PodUnits {
            uid_checked: true,
            uid_note: None,
            claims: Vec::new(),
            allocations: vec![
                Allocation {
                    container: "worker".into(),
                    resource: "rdma/hca".into(),
                    units: vec!["0000:3b:00.0".into()],
                    hcas: Some(vec!["0000:3b:00.0".into()]),
                    pool: Some(vec!["0000:3b:00.0".into(), "0000:5e:00.0".into()]),
                },
                Allocation {
                    container: "worker".into(),
                    resource: "nvidia.com/gpu".into(),
                    units: vec!["GPU-7".into()],
                    hcas: None,
                    pool: None,
                },
            ],
        };
        let bytes = encode_answer(&Ok(Answer::PodUnits(units.clone())));
        let document: Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(
            document,
            json!({"version": 1, "answer": {"uidChecked": true, "allocations": [
                {"container": "worker", "resource": "rdma/hca",
                 "units": ["0000:3b:00.0"], "hcas": ["0000:3b:00.0"],
                 "pool": ["0000:3b:00.0", "0000:5e:00.0"]},
                {"container": "worker", "resource": "nvidia.com/gpu", "units": ["GPU-7"]}]}})
        );
        assert_eq!(decode_answer::<PodUnits>(&bytes).unwrap(), units);

        let failure = Failure::new(FailureKind::UnknownPod, "no such pod");
        let bytes = encode_answer(&Err(failure.clone()));
        let document: Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(
            document,
            json!({"version": 1, "error": {"kind": "unknownPod", "message": "no such pod"}})
        );
        assert_eq!(failure_in(&bytes), failure);
    }

    #[test]
    fn unknown_version_question_and_field_are_refused_by_name() {
        let version = failure_of(&json!({"version": 2, "question": ["new", "form"]}));
        assert_eq!(version.kind, FailureKind::UnsupportedVersion);
        assert!(version.message.contains("version 2"), "{version}");
        let question = failure_of(&json!({"version": 1, "question": {"bindSlots": {}}}));
        assert_eq!(question.kind, FailureKind::UnknownQuestion);
        assert!(question.message.contains("bindSlots"), "{question}");
        for (document, named) in [
            (
                json!({"version": 1, "question": {"podUnits": pod()}, "node": "x"}),
                "node",
            ),
            (
                json!({"version": 1, "question": {"podUnits": {"namespace": "a", "name": "b", "sandbox": "c"}}}),
                "sandbox",
            ),
            (
                json!({"version": 1, "question": {"podUnits": {"name": "b"}}}),
                "namespace",
            ),
            (
                json!({"version": 1, "question": {"podUnits": {"namespace": "", "name": "b"}}}),
                "a name has 0 bytes",
            ),
            (
                json!({"version": 1, "question": {"podUnits": {"namespace": "a", "name": "b", "uid": "u".repeat(300)}}}),
                "a name has 300 bytes",
            ),
            (json!({"question": {"podUnits": pod()}}), "version"),
            (
                json!({"version": "1", "question": {"podUnits": pod()}}),
                "expected u64",
            ),
            (json!([1]), "malformed"),
        ] {
            let failure = failure_of(&document);
            assert_eq!(failure.kind, FailureKind::Malformed, "{document}");
            assert!(failure.message.contains(named), "{document}: {failure}");
        }
        let twice =
            r#"{"version":1,"version":1,"question":{"podUnits":{"namespace":"a","name":"b"}}}"#;
        let failure = Question::decode(twice.as_bytes()).unwrap_err();
        assert_eq!(failure.kind, FailureKind::Malformed);
    }

    #[test]
    fn question_over_its_limit_is_refused() {
        let mut long = Question::PodUnits(pod()).encode();
        long.resize(QUESTION_MAX_BYTES, b' ');
        assert!(Question::decode(&long).is_ok(), "at the limit");
        long.push(b' ');
        let failure = Question::decode(&long).unwrap_err();
        assert_eq!(failure.kind, FailureKind::Malformed);
    }

    #[test]
    fn kind_of_a_newer_daemon_is_read_as_other() {
        let document = br#"{"version":1,"error":{"kind":"moonPhase","message":"full"},"more":1}"#;
        assert_eq!(
            failure_in(document),
            Failure::new(FailureKind::Other, "full")
        );
    }

    #[test]
    fn answer_that_is_no_answer_is_refused() {
        let units = r#""answer":{"uidChecked":true,"allocations":[]}"#;
        for document in [
            String::new(),
            "null".into(),
            r#"{"version":1}"#.into(),
            format!(r#"{{"version":1,{units}"#),
            format!(r#"{{"version":1,{units}}}{{}}"#),
        ] {
            let refused = decode_answer::<PodUnits>(document.as_bytes());
            assert!(
                matches!(refused, Err(Fault::Malformed(_))),
                "{document}: {refused:?}"
            );
        }
        let newer = decode_answer::<PodUnits>(br#"{"version":7,"shape":"new"}"#);
        assert!(matches!(newer, Err(Fault::Version(7))), "{newer:?}");
    }

    #[test]
    fn answer_over_its_limit_becomes_a_failure_within_it() {
        let units = PodUnits {
            allocations: vec![Allocation {
                units: vec!["x".repeat(ANSWER_MAX_BYTES)],
                ..Allocation::default()
            }],
            ..PodUnits::default()
        };
        let bytes = encode_answer(&Ok(Answer::PodUnits(units)));
        assert!(bytes.len() < ANSWER_MAX_BYTES);
        assert_eq!(failure_in(&bytes).kind, FailureKind::AnswerTooLarge);
    }

    #[test]
    fn the_questions_to_the_agent_have_the_documented_form() {
        use crate::agent::*;
        let need = |room| RoomNeed {
            store: "shared".into(),
            network_name: Some("blue".into()),
            range: "10.0.0.0/24".into(),
            spans: vec![([10, 0, 0, 1].into(), [10, 0, 0, 254].into())],
            room,
        };
        let per_node = crate::PerNode {
            prefix: 28,
            gateway: Some(crate::Gateway::First),
        };
        let rooms = [
            (Room::Addresses(2), json!({"addresses": 2})),
            (
                Room::Exact([10, 0, 0, 7].into()),
                json!({"exact": "10.0.0.7"}),
            ),
            (
                Room::Network(per_node),
                json!({"network": {"prefix": 28, "gateway": "first"}}),
            ),
        ];
        for (room, form) in rooms {
            let question = Question::Room(RoomQuestion {
                within_ms: 4000,
                needs: vec![need(room)],
            });
            let document: Value = serde_json::from_slice(&question.encode()).unwrap();
            let needs = json!([{"store": "shared", "networkName": "blue", "range": "10.0.0.0/24",
                                "spans": [["10.0.0.1", "10.0.0.254"]], "room": form}]);
            let whole =
                json!({"version": 1, "question": {"room": {"withinMs": 4000, "needs": needs}}});
            assert_eq!(document, whole);
            assert_eq!(Question::decode(&question.encode()), Ok(question));
        }
        let answer = encode_answer(&Ok(Answer::Room(RoomMade {})));
        assert_eq!(decode_answer::<RoomMade>(&answer).unwrap(), RoomMade {});
        let release = json!({"version": 1, "question": {"parts": {"store": "shared",
            "change": {"releaseNode": "gpu-17"}}}});
        let question = Question::decode(release.to_string().as_bytes()).unwrap();
        let again: Value = serde_json::from_slice(&question.encode()).unwrap();
        assert_eq!(again, release);
        for (document, named) in [
            (
                json!({"room": {"withinMs": 1, "needs": []}}),
                "0 needs, expected 1 to 256",
            ),
            (
                json!({"parts": {"store": "", "change": "giveBack"}}),
                "a name has 0 bytes",
            ),
            (
                json!({"parts": {"store": "a", "change": "giveBack", "node": "b"}}),
                "node",
            ),
        ] {
            let failure = failure_of(&json!({"version": 1, "question": document}));
            assert_eq!(failure.kind, FailureKind::Malformed, "{document}");
            assert!(failure.message.contains(named), "{named}: {failure}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let _ = Question::decode(&bytes);
            let _ = decode_answer::<PodUnits>(&bytes);
        }

        #[test]
        fn no_damaged_question_makes_the_reader_panic(
            damage in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..6),
            end in any::<proptest::sample::Index>(),
        ) {
            let mut bytes = Question::PodUnits(pod()).encode();
            for (at, byte) in damage {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            bytes.truncate(end.index(bytes.len()) + 1);
            let _ = Question::decode(&bytes);
        }

        #[test]
        fn no_nesting_makes_the_reader_panic(depth in 0_usize..30_000, open in "[\\[{]") {
            let text = format!(r#"{{"version":1,"question":{}"#, open.repeat(depth));
            prop_assert!(Question::decode(text.as_bytes()).is_err());
        }

        #[test]
        fn every_question_is_read_back(
            namespace in "[a-z0-9-]{1,63}",
            name in "[a-z0-9.-]{1,253}",
            uid in proptest::option::of("[a-f0-9-]{1,36}"),
        ) {
            let question = Question::PodUnits(Pod { namespace, name, uid });
            prop_assert_eq!(Question::decode(&question.encode()), Ok(question));
        }
    }

    #[test]
    fn bindings_are_asked_for_in_the_documented_form() {
        use crate::binding::*;
        let bind = Question::Bind(BindQuestion {
            pod: pod(),
            sandbox: "4c".into(),
            unit: "slot_3e71787e_0".into(),
        });
        let document: Value = serde_json::from_slice(&bind.encode()).unwrap();
        assert_eq!(
            document,
            json!({"version": 1, "question": {"bind": {
                "pod": {"namespace": "ml", "name": "train-0", "uid": "8f"},
                "sandbox": "4c", "unit": "slot_3e71787e_0"}}})
        );
        let commit = Question::Commit(CommitQuestion {
            pod: pod(),
            sandbox: "4c".into(),
            units: vec!["slot_3e71787e_0".into()],
            gid_indexes: [("slot_3e71787e_0".into(), 3)].into(),
        });
        let unbind = Question::Unbind(UnbindQuestion {
            sandbox: "4c".into(),
            units: Vec::new(),
        });
        for question in [&bind, &commit, &unbind] {
            assert_eq!(Question::decode(&question.encode()).as_ref(), Ok(question));
        }
        let bound = Bound {
            slots: vec![BoundSlot {
                unit: "slot_3e71787e_0".into(),
                resource: "rdma/nic".into(),
                container: "worker".into(),
                hca: "0000:3b:00.0".into(),
                rail: 2,
                cdi_file: "x.json".into(),
            }],
            warnings: Vec::new(),
        };
        let bytes = encode_answer(&Ok(Answer::Bound(bound.clone())));
        assert_eq!(decode_answer::<Bound>(&bytes).unwrap(), bound);
        let other = decode_answer::<Committed>(&bytes);
        assert!(matches!(other, Err(Fault::Malformed(_))), "{other:?}");
        for (document, named) in [
            (
                json!({"version": 1, "question": {"bind": {"pod": pod(), "sandbox": "",
                    "unit": "x"}}}),
                "a name has 0 bytes",
            ),
            (
                json!({"version": 1, "question": {"commit": {"pod": pod(), "sandbox": "a",
                    "units": ["u".repeat(300)]}}}),
                "a name has 300 bytes",
            ),
            (
                json!({"version": 1, "question": {"commit": {"pod": pod(), "sandbox": "a",
                    "units": vec!["u"; 1025]}}}),
                "1025 units",
            ),
            (
                json!({"version": 1, "question": {"unbind": {"sandbox": "a", "all": true}}}),
                "all",
            ),
        ] {
            let failure = failure_of(&document);
            assert_eq!(failure.kind, FailureKind::Malformed, "{document}");
            assert!(failure.message.contains(named), "{named}: {failure}");
        }
    }
}
