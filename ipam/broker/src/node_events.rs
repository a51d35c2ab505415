//! Events of this node's Node object, where an administrator looks first (`kubectl describe node`):
//! a resource without a healthy unit, an HCA that cannot be allocated, a range without an address.
//!
//! The daemon has no token, and the broker has: so the broker asks the daemon on the loopback
//! address what is wrong, and says it to the API. What is wrong in two readings one after the other
//! is reported, again each hour while it lasts, and once when it is over. A daemon that does not
//! answer says nothing new: what was wrong is neither repeated nor over.
//!
//! An event is a word to people and no state: nothing is read back, and one that cannot be created
//! is lost. Killed anywhere, the next broker reports anew what is wrong.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::metrics::Metrics;
use crate::space::Shared;

/// Between two readings.
const INTERVAL: Duration = Duration::from_secs(30);
/// How long the daemon may take.
const DAEMON_TIMEOUT: Duration = Duration::from_secs(5);
/// Events are forgotten by the API server after an hour, by default.
const REPEAT_INTERVAL: Duration = Duration::from_secs(3600);
/// Most of an answer that is read.
const MOST_BYTES: u64 = 64 << 20;
/// Most events of one reading: a switch that fails takes all ports of a node with it.
const MOST_EVENTS: usize = 20;
/// Most bytes of a message; the API allows 1024.
const MOST_MESSAGE_BYTES: usize = 1000;
/// Where events of nodes are.
const NAMESPACE: &str = "default";

/// Something that is wrong: the event's reason, and what it is about.
type Key = (&'static str, String);

/// One event to create.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Report {
    reason: &'static str,
    message: String,
    /// Over, not wrong.
    is_over: bool,
}

/// Reports until it is dropped, or may not.
pub(crate) async fn run(shared: Rc<Shared>, daemon: SocketAddr) {
    let mut news = News::default();
    let mut exhausted = shared.metrics.borrow().exhausted();
    loop {
        tokio::time::sleep(INTERVAL).await;
        let status = ask(daemon).await;
        let now_exhausted = shared.metrics.borrow().exhausted();
        let facts = facts(
            status.as_ref(),
            &shared.metrics.borrow(),
            now_exhausted > exhausted,
        );
        exhausted = now_exhausted;
        for report in news.turn(facts, status.is_some(), Instant::now()) {
            let event = event(&shared.name, &report, node::random::random64());
            if let Err(error) = shared.client.create_event(NAMESPACE, &event).await {
                if error.refusal().is_some_and(|(code, _)| code == 403) {
                    tracing::warn!(%error, "events of this node are not reported: the broker may not create them");
                    return;
                }
                tracing::debug!(%error, reason = report.reason, "an event is lost");
            }
        }
    }
}

/// What is reported, and since when.
#[derive(Debug, Default)]
struct News {
    /// Wrong in the reading before.
    seen: BTreeMap<Key, String>,
    /// Reported as wrong, when last, and whether only the daemon knows of it.
    reported: BTreeMap<Key, Instant>,
}

impl News {
    /// The events of one reading.
    fn turn(
        &mut self,
        facts: BTreeMap<Key, String>,
        daemon_answered: bool,
        now: Instant,
    ) -> Vec<Report> {
        let mut reports = Vec::new();
        for (key, message) in &facts {
            let due = match self.reported.get(key) {
                Some(at) => now.duration_since(*at) >= REPEAT_INTERVAL,
                // A refusal was an event already; a state has to last.
                None => key.0 == EXHAUSTED || self.seen.contains_key(key),
            };
            if due && reports.len() < MOST_EVENTS {
                self.reported.insert(key.clone(), now);
                reports.push(Report {
                    reason: key.0,
                    message: message.clone(),
                    is_over: false,
                });
            }
        }
        let over: Vec<Key> = self
            .reported
            .keys()
            .filter(|key| !facts.contains_key(*key) && (daemon_answered || !is_of_daemon(key.0)))
            .cloned()
            .collect();
        for key in over {
            self.reported.remove(&key);
            // That no pod was refused meanwhile does not say that there are addresses again.
            if key.0 != EXHAUSTED && reports.len() < MOST_EVENTS {
                reports.push(Report {
                    reason: OVER,
                    message: format!("{}: over ({})", key.1, key.0),
                    is_over: true,
                });
            }
        }
        if daemon_answered {
            self.seen = facts;
        } else {
            self.seen.retain(|key, _| is_of_daemon(key.0));
            self.seen.extend(facts);
        }
        reports
    }
}

const NO_HEALTHY_UNIT: &str = "RdmaNoHealthyUnit";
const NOT_REGISTERED: &str = "RdmaResourceNotRegistered";
const HCA_UNHEALTHY: &str = "RdmaHcaUnhealthy";
const EXHAUSTED: &str = "RdmaAddressesExhausted";
const NEARLY_EXHAUSTED: &str = "RdmaAddressesNearlyExhausted";
const CONFLICT: &str = "RdmaLeaseConflict";
const OVER: &str = "RdmaRecovered";

fn is_of_daemon(reason: &str) -> bool {
    [NO_HEALTHY_UNIT, NOT_REGISTERED, HCA_UNHEALTHY].contains(&reason)
}

/// What is wrong, by the daemon's `/status` (docs/JSON.md) and by the broker's own counts.
fn facts(status: Option<&Value>, metrics: &Metrics, refused: bool) -> BTreeMap<Key, String> {
    let mut facts = BTreeMap::new();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    for pool in status
        .map(|status| list(at(status, "pools")))
        .unwrap_or_default()
    {
        let resource = at(&pool, "resource")
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let units = |health: &str| at(at(&pool, "units"), health).as_u64().unwrap_or(0);
        if units("healthy") == 0 && units("unhealthy") > 0 {
            let message =
                format!("{resource} has no healthy unit: no pod that asks for it starts here");
            facts.insert((NO_HEALTHY_UNIT, resource.clone()), message);
        }
        if at(&pool, "registered") == &Value::Bool(false) {
            let why = at(&pool, "lastError").as_str().unwrap_or("not yet");
            let message = format!("{resource} is not registered with the kubelet: {why}");
            facts.insert((NOT_REGISTERED, resource.clone()), message);
        }
        for hca in list(at(&pool, "hcas")) {
            let (Some(id), Some(reason)) = (at(&hca, "id").as_str(), at(&hca, "reason").as_str())
            else {
                continue;
            };
            let devices: Vec<String> = list(at(&hca, "rdmaDevices"))
                .iter()
                .filter_map(|d| Some(d.as_str()?.to_owned()))
                .collect();
            let object = format!("HCA {id} ({}) of {resource}", devices.join(", "));
            let message = format!("{object} cannot be allocated: {reason}");
            facts.insert((HCA_UNHEALTHY, object), message);
        }
    }
    if refused {
        let message = "no block of addresses can be had for this node, so pods do not start: the range is \
            full (rdma-ipam-broker blocks)";
        facts.insert((EXHAUSTED, "addresses".to_owned()), message.to_owned());
    }
    for (space, ranges) in metrics.ranges_without_free_block() {
        let message = format!(
            "no block is free any more in {ranges} ranges of {space}: once this node's own addresses are used, \
             pods do not start; make the range longer, or look who uses it (rdma-ipam-broker blocks)"
        );
        facts.insert((NEARLY_EXHAUSTED, space), message);
    }
    for (space, conflicts) in metrics.conflicts() {
        let message = format!(
            "{conflicts} leases of {space} are in blocks that this node lost, so another node may give the \
             same addresses (rdma-ipam-broker fsck)"
        );
        facts.insert((CONFLICT, space), message);
    }
    facts
}

/// A field; null where there is none.
fn at<'v>(value: &'v Value, key: &str) -> &'v Value {
    value.get(key).unwrap_or(&Value::Null)
}

/// The object, as the kubelet makes those of its node: `kubectl describe node` searches by the
/// node's name in place of a UID.
fn event(node: &str, report: &Report, random: u64) -> Value {
    let now = Timestamp::now()
        .round(jiff::Unit::Second)
        .unwrap_or(Timestamp::UNIX_EPOCH)
        .to_string();
    let mut message = report.message.clone();
    while message.len() > MOST_MESSAGE_BYTES {
        message.pop();
    }
    // Names of nodes and of events are DNS subdomains of at most 253 bytes; the node's is ASCII.
    let name: String = node.chars().take(200).collect();
    json!({
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": format!("{}.{random:016x}", name.trim_end_matches(['-', '.'])), "namespace": NAMESPACE},
        "involvedObject": {"kind": "Node", "name": node, "uid": node},
        "reason": report.reason,
        "message": message,
        "type": if report.is_over { "Normal" } else { "Warning" },
        "source": {"component": "rdma-device-plugin", "host": node},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
        "reportingComponent": "rdma-device-plugin",
        "reportingInstance": node,
    })
}

/// The daemon's status; `None` if it does not answer, which is no fact about the hardware.
async fn ask(daemon: SocketAddr) -> Option<Value> {
    tokio::time::timeout(DAEMON_TIMEOUT, read_status(daemon))
        .await
        .ok()?
        .ok()?
}

/// One question over HTTP/1.0, which ends with the answer.
async fn read_status(daemon: SocketAddr) -> std::io::Result<Option<Value>> {
    let mut stream = TcpStream::connect(daemon).await?;
    let request = format!("GET /status HTTP/1.0\r\nHost: {daemon}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.take(MOST_BYTES).read_to_end(&mut answer).await?;
    let answer = String::from_utf8_lossy(&answer);
    let Some((head, body)) = answer.split_once("\r\n\r\n") else {
        return Ok(None);
    };
    let is_fine = head.split(' ').nth(1) == Some("200");
    Ok(is_fine.then(|| serde_json::from_str(body).ok()).flatten())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(unhealthy: &[&str]) -> Value {
        let hca = |id: &str| {
            let reason = unhealthy.contains(&id).then_some("port 1 is DOWN");
            json!({"id": id, "rdmaDevices": ["mlx5_0"], "reason": reason})
        };
        let healthy = 2 - unhealthy.len();
        json!({"pools": [{
            "resource": "rdma/a", "registered": true, "hcas": [hca("x"), hca("y")],
            "units": {"healthy": healthy, "unhealthy": unhealthy.len()},
        }]})
    }

    fn reasons(reports: &[Report]) -> Vec<&'static str> {
        reports.iter().map(|report| report.reason).collect()
    }

    fn of(status: &Value) -> BTreeMap<Key, String> {
        facts(Some(status), &Metrics::new(), false)
    }

    #[test]
    fn what_lasts_is_reported_once_an_hour_and_once_when_it_is_over() {
        let (mut news, start) = (News::default(), Instant::now());
        let at = |minutes: u64| start + Duration::from_secs(60 * minutes);
        let down = of(&status(&["x"]));
        assert_eq!(
            reasons(&news.turn(down.clone(), true, at(0))),
            [""; 0],
            "it may flap"
        );
        let reports = news.turn(down.clone(), true, at(1));
        assert_eq!(reasons(&reports), [HCA_UNHEALTHY]);
        assert_eq!(
            reports[0].message,
            "HCA x (mlx5_0) of rdma/a cannot be allocated: port 1 is DOWN"
        );
        assert!(news.turn(down.clone(), true, at(30)).is_empty());
        assert_eq!(
            reasons(&news.turn(down.clone(), true, at(62))),
            [HCA_UNHEALTHY]
        );
        assert!(
            news.turn(facts(None, &Metrics::new(), false), false, at(63))
                .is_empty(),
            "no evidence"
        );
        let over = news.turn(of(&status(&[])), true, at(64));
        assert_eq!(reasons(&over), [OVER]);
        assert!(over[0].is_over);
        assert!(news.turn(of(&status(&[])), true, at(65)).is_empty());
    }

    #[test]
    fn a_resource_without_a_unit_and_a_refusal_are_reported() {
        let mut news = News::default();
        let all = of(&status(&["x", "y"]));
        news.turn(all.clone(), true, Instant::now());
        let reports = news.turn(all, true, Instant::now());
        assert_eq!(
            reasons(&reports),
            [HCA_UNHEALTHY, HCA_UNHEALTHY, NO_HEALTHY_UNIT]
        );
        let refused = facts(None, &Metrics::new(), true);
        assert_eq!(
            reasons(&News::default().turn(refused, false, Instant::now())),
            [EXHAUSTED],
            "at once"
        );
    }

    #[test]
    fn what_the_broker_knows_is_reported_without_the_daemon() {
        let mut metrics = Metrics::new();
        let summary = crate::metrics::SpaceSummary {
            ranges_without_free_block: 2,
            ..Default::default()
        };
        metrics.space(&ipam::block::AddressSpace::new("default", None), summary);
        let full = || facts(None, &metrics, false);
        let mut news = News::default();
        assert!(news.turn(full(), false, Instant::now()).is_empty());
        let reports = news.turn(full(), false, Instant::now());
        assert_eq!(reasons(&reports), [NEARLY_EXHAUSTED]);
        assert!(
            reports[0].message.contains("2 ranges of store default"),
            "{}",
            reports[0].message
        );
        let over = news.turn(BTreeMap::new(), false, Instant::now());
        assert_eq!(reasons(&over), [OVER]);
    }

    #[test]
    fn a_node_that_loses_all_sends_a_bounded_number_of_events() {
        let hcas: Vec<Value> = (0..200)
            .map(|n| json!({"id": n.to_string(), "rdmaDevices": [], "reason": "gone"}))
            .collect();
        let all = json!({"pools": [{"resource": "rdma/a", "registered": true, "hcas": hcas}]});
        let mut news = News::default();
        news.turn(of(&all), true, Instant::now());
        assert_eq!(news.turn(of(&all), true, Instant::now()).len(), MOST_EVENTS);
    }

    #[test]
    fn an_event_is_one_that_the_api_takes_and_kubectl_finds() {
        let report = Report {
            reason: HCA_UNHEALTHY,
            message: "é".repeat(900),
            is_over: false,
        };
        let node = "n".repeat(253);
        let event = event(&node, &report, 7);
        let name = event["metadata"]["name"].as_str().unwrap();
        assert!(
            name.len() <= 253 && name.ends_with(".0000000000000007"),
            "{name}"
        );
        assert!(event["message"].as_str().unwrap().len() <= MOST_MESSAGE_BYTES);
        assert_eq!(event["involvedObject"]["uid"], node);
        assert_eq!(event["type"], "Warning");
    }
}
