//! Connections of the socket: who may ask, and how long it may take.
//!
//! Peers are root, so none is an attacker; but each may hang, and none may keep the others from
//! an answer. So a connection has time limits, and when all are in use, those that have not asked
//! anything for a while are closed ([`Crowd`]).

use std::sync::Arc;
use std::time::Duration;

use nix::unistd::geteuid;
use node_wire::document::encode_answer;
use node_wire::{Answer, Failure, FailureKind, QUESTION_MAX_BYTES, Question};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::{Instant, timeout};

use crate::crowd::{Asked, Crowd};

/// How long a peer may take to write its question, and then to read its answer.
const PEER_TIMEOUT: Duration = Duration::from_secs(2);
/// The shortest time between two log lines about refused peers.
const REFUSED_LOG_INTERVAL: Duration = Duration::from_secs(10);

pub trait Answers: Send + Sync + 'static {
    /// The answer to a question.
    fn answer(&self, question: Question) -> impl Future<Output = Result<Answer, Failure>> + Send;
}

/// The connections of a socket.
#[derive(Debug)]
pub struct Connections<A> {
    answers: Arc<A>,
    crowd: Crowd,
    refused: RefusedPeers,
}

impl<A: Answers> Connections<A> {
    pub fn new(answers: A) -> Self {
        Self {
            answers: Arc::new(answers),
            crowd: Crowd::default(),
            refused: RefusedPeers::default(),
        }
    }

    /// Serves until it is dropped. Connections that are open then stay open.
    pub async fn serve(&mut self, listener: &mut UnixListener) {
        let own_uid = geteuid().as_raw();
        let converse = |stream: UnixStream, asked| {
            let may_ask = match stream.peer_cred() {
                Ok(peer) if peer.uid() == 0 || peer.uid() == own_uid => true,
                Ok(peer) => {
                    self.refused.note(peer.uid(), peer.pid());
                    refuse(&stream, peer.uid());
                    false
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot read who connected to the node's socket");
                    false
                }
            };
            let answers = self.answers.clone();
            async move {
                if may_ask {
                    serve_one(stream, answers, asked).await;
                }
            }
        };
        self.crowd.serve(listener, converse).await;
    }

    /// Waits for the answers to questions that have been asked.
    pub async fn drain(self) {
        let _ = timeout(PEER_TIMEOUT, self.crowd.drain()).await;
    }
}

/// Says no without waiting: a fresh connection has room for it.
fn refuse(stream: &UnixStream, uid: u32) {
    let why = format!("uid {uid} may not ask: only root may");
    let failure = Failure::new(FailureKind::NotAllowed, why);
    let _ = stream.try_write(&encode_answer(&Err(failure)));
}

/// Log lines about refused peers, at a bounded rate.
#[derive(Debug, Default)]
struct RefusedPeers {
    logged: Option<Instant>,
    since: u64,
}

impl RefusedPeers {
    fn note(&mut self, uid: u32, pid: Option<i32>) {
        self.since += 1;
        if self
            .logged
            .is_some_and(|at| at.elapsed() < REFUSED_LOG_INTERVAL)
        {
            return;
        }
        tracing::warn!(
            uid,
            pid,
            refused = self.since,
            "refused to answer on the node's socket: only root may ask"
        );
        (self.logged, self.since) = (Some(Instant::now()), 0);
    }
}

async fn serve_one<A: Answers>(mut stream: UnixStream, answers: Arc<A>, asked: Asked) {
    let started = Instant::now();
    let question = match timeout(PEER_TIMEOUT, read(&mut stream)).await {
        // Another server that finds out whether this one is alive, for instance.
        Ok(Ok(document)) if document.is_empty() => return,
        Ok(Ok(document)) => Question::decode(&document),
        Ok(Err(error)) => return late(stream, &error.to_string()).await,
        Err(_) => return late(stream, "the time is over").await,
    };
    asked.set();
    let answer = match &question {
        Ok(question) => answers.answer(question.clone()).await,
        Err(failure) => Err(failure.clone()),
    };
    tracing::debug!(
        question = ?question.as_ref().ok(),
        failure = answer.as_ref().err().map(tracing::field::display),
        took = ?started.elapsed(),
        "question on the node's socket"
    );
    let document = encode_answer(&answer);
    // A peer that went away is no matter.
    let _ = timeout(PEER_TIMEOUT, stream.write_all(&document)).await;
}

/// Says that the question did not arrive.
async fn late(mut stream: UnixStream, why: &str) {
    tracing::debug!(why, "no question on the node's socket");
    let why = format!(
        "no whole question within {PEER_TIMEOUT:?}: {why}; shut the writing side down behind it"
    );
    let failure = Failure::new(FailureKind::Malformed, why);
    let document = encode_answer(&Err(failure));
    let _ = timeout(PEER_TIMEOUT, stream.write_all(&document)).await;
}

/// The whole question, or one byte more than the longest.
async fn read(stream: &mut UnixStream) -> std::io::Result<Vec<u8>> {
    let mut document = Vec::new();
    let most = u64::try_from(QUESTION_MAX_BYTES).unwrap_or(u64::MAX);
    stream
        .take(most.saturating_add(1))
        .read_to_end(&mut document)
        .await?;
    Ok(document)
}
