//! The blocks of this node, from the first list on: the one watch of a broker.
//!
//! The list is consistent, the watch begins behind it, and goes on behind the last event after an
//! interruption. So no event is older than what was known before, and a block that was given back
//! does not come back. Where the server no longer has the events since (410), the list is read again.

use std::time::Duration;

use kube_core::WatchEvent;
use kube_core::watch::Bookmark;
use node::random::random64;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::client::Client;
use super::document::{BlockObject, NamedObject};
use super::items::MAX_ITEM_BYTES;
use super::transport::ApiError;

/// How long one watch lasts. kube-core allows less than 295 seconds.
const WATCH_SECONDS: std::ops::Range<u64> = 230..290;
/// How long after its end a watch is given up that the server does not end.
const GRACE_PERIOD: Duration = Duration::from_secs(30);
/// A watch without an event that lasts so long is in order.
const QUIET_WATCH: Duration = Duration::from_secs(30);
/// The wait after the first failure; it doubles up to the longest that [`run`] is told.
const FIRST_WAIT: Duration = Duration::from_millis(250);

/// What happened to a block of this node.
#[derive(Debug)]
pub enum Event {
    /// All of them, as they are now.
    Listed(Vec<BlockObject>),
    /// One came or was changed.
    Changed(Box<BlockObject>),
    /// One was removed, or is another node's.
    Gone(Box<BlockObject>),
    /// The watch goes on after an interruption.
    Watching,
    /// The API does not answer, for this reason. What was known stays true as far as it goes.
    Interrupted(String),
}

#[derive(Debug)]
enum End {
    /// By the server or its time limit; another one goes on.
    Over,
    /// By the server, long before its time limit and without an event.
    OverAtOnce,
    /// The server no longer has what comes next: the list is read again.
    Expired,
    Failed(ApiError),
    /// Nobody wants events any more.
    Unwanted,
}

/// Sends events until the receiver is dropped. After failures it waits at most `longest`.
pub async fn run(client: Client, node: String, events: mpsc::Sender<Event>, longest: Duration) {
    let mut failures = 0u32;
    // Of the last event; `None` before the list was read.
    let mut version = None;
    loop {
        let failure = match follow(&client, &node, &mut version, &events, &mut failures).await {
            End::Unwanted => return,
            End::Over => continue,
            End::Expired => {
                version = None;
                "the server no longer has the changes since the last one".to_owned()
            }
            End::OverAtOnce => {
                failures = failures.saturating_add(1);
                "the server ended the watch without an event".to_owned()
            }
            End::Failed(error) => {
                failures = failures.saturating_add(1);
                error.to_string()
            }
        };
        if events.send(Event::Interrupted(failure)).await.is_err() {
            return;
        }
        tokio::time::sleep(wait(failures.max(1), longest, random64())).await;
    }
}

/// Reads the list, unless that was read, and watches once behind the last event.
async fn follow(
    client: &Client,
    node: &str,
    version: &mut Option<String>,
    events: &mpsc::Sender<Event>,
    failures: &mut u32,
) -> End {
    let version = match version {
        Some(version) => version,
        None => {
            let mut blocks = Vec::new();
            let listed = client.blocks_of_node(node, |block| blocks.push(block));
            match listed.await {
                Err(error) => return End::Failed(error),
                Ok(listed) => {
                    *failures = 0;
                    if events.send(Event::Listed(blocks)).await.is_err() {
                        return End::Unwanted;
                    }
                    version.insert(listed)
                }
            }
        }
    };
    watch(client, node, version, events, failures).await
}

async fn watch(
    client: &Client,
    node: &str,
    version: &mut String,
    events: &mpsc::Sender<Event>,
    failures: &mut u32,
) -> End {
    let seconds = WATCH_SECONDS.start + random64() % (WATCH_SECONDS.end - WATCH_SECONDS.start);
    let limit = Duration::from_secs(seconds) + GRACE_PERIOD;
    let begun = client
        .watch_blocks_of_node(node, version, u32::try_from(seconds).unwrap_or(u32::MAX))
        .await;
    let mut answer = match begun {
        Ok(answer) => answer,
        Err(error) if error.refusal().is_some_and(|(code, _)| code == 410) => return End::Expired,
        Err(error) => return End::Failed(error),
    };
    if *failures > 0 && events.send(Event::Watching).await.is_err() {
        return End::Unwanted;
    }
    let watching = Instant::now();
    let mut has_news = false;
    let mut rest = Vec::new();
    loop {
        let piece = tokio::select! {
            piece = answer.piece(limit) => piece,
            () = events.closed() => return End::Unwanted,
        };
        let piece = match piece {
            Ok(Some(piece)) => piece,
            Ok(None) if has_news || watching.elapsed() >= QUIET_WATCH => return End::Over,
            Ok(None) => return End::OverAtOnce,
            Err(error) => return End::Failed(error),
        };
        rest.extend_from_slice(&piece);
        if rest.len() > MAX_ITEM_BYTES {
            return End::Failed(answer.malformed("an event is too long"));
        }
        while let Some(line) = next_line(&mut rest) {
            let (newer, event) = match read(&line) {
                Ok(News::Of(newer, event)) => (newer, event),
                Ok(News::Expired) => return End::Expired,
                Err(why) => return End::Failed(answer.malformed(why)),
            };
            *version = newer;
            *failures = 0;
            has_news = true;
            if let Some(event) = event
                && events.send(event).await.is_err()
            {
                return End::Unwanted;
            }
        }
    }
}

/// Takes the first line of what has arrived, once it is whole.
fn next_line(rest: &mut Vec<u8>) -> Option<Vec<u8>> {
    let end = rest.iter().position(|byte| *byte == b'\n')?;
    let mut line: Vec<u8> = rest.drain(..=end).collect();
    line.pop();
    Some(line)
}

#[derive(Debug)]
enum News {
    /// The `resourceVersion` to go on from, and what happened to a block.
    Of(String, Option<Event>),
    Expired,
}

/// # Errors
/// It is not an event, or the server's failure.
fn read(line: &[u8]) -> Result<News, String> {
    let event = serde_json::from_slice::<WatchEvent<Value>>(line);
    let event = event.map_err(|error| error.to_string())?;
    let (object, is_there) = match event {
        WatchEvent::Added(object) | WatchEvent::Modified(object) => (object, true),
        WatchEvent::Deleted(object) => (object, false),
        WatchEvent::Bookmark(Bookmark { metadata, .. }) => {
            return Ok(News::Of(metadata.resource_version, None));
        }
        WatchEvent::Error(status) if status.code == 410 => return Ok(News::Expired),
        WatchEvent::Error(status) => return Err(status.to_string()),
    };
    let named = serde_json::from_value(object.clone());
    let NamedObject { metadata } = named.map_err(|error| error.to_string())?;
    // Of an object that this version cannot read, only that object is passed over.
    let event = match serde_json::from_value::<Box<BlockObject>>(object) {
        Ok(block) if is_there => Some(Event::Changed(block)),
        Ok(block) => Some(Event::Gone(block)),
        Err(error) => {
            tracing::warn!(
                object = metadata.name, %error,
                "an AddressBlock cannot be read and is passed over; correct or remove it"
            );
            None
        }
    };
    Ok(News::Of(metadata.resource_version, event))
}

/// How long to wait after so many failures in a row, at most, by a random number: brokers that lost one server
/// at one time do not come back at one time.
fn wait(failures: u32, longest: Duration, random: u64) -> Duration {
    let doubled = FIRST_WAIT.saturating_mul(1 << failures.saturating_sub(1).min(10));
    let longest = u64::try_from(doubled.min(longest).as_millis()).unwrap_or(u64::MAX);
    Duration::from_millis(longest / 2 + random % (longest / 2 + 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn events_that_arrive_in_pieces_are_whole() {
        let mut rest = Vec::new();
        let mut found = Vec::new();
        for piece in "one\ntw"
            .as_bytes()
            .chunks(2)
            .chain([&b"o\n"[..], b"\nrest"])
        {
            rest.extend_from_slice(piece);
            while let Some(line) = next_line(&mut rest) {
                found.push(String::from_utf8(line).unwrap());
            }
        }
        assert_eq!(found, ["one", "two", ""]);
        assert_eq!(rest, b"rest");
    }

    fn news(document: &Value) -> Result<News, String> {
        read(document.to_string().as_bytes())
    }

    #[test]
    fn bookmarks_errors_and_objects_are_told_apart() {
        let block = json!({"apiVersion": "rdma-netdev.io/v1alpha1", "kind": "AddressBlock",
            "metadata": {"name": "a", "uid": "u", "resourceVersion": "8"},
            "spec": {"store": "default", "block": "10.0.0.0/28", "node": "n", "nodeUID": "u"}});
        for (kind, there) in [("ADDED", true), ("MODIFIED", true), ("DELETED", false)] {
            match news(&json!({"type": kind, "object": block})) {
                Ok(News::Of(_, Some(Event::Changed(_)))) => assert!(there),
                Ok(News::Of(_, Some(Event::Gone(_)))) => assert!(!there),
                other => panic!("{other:?}"),
            }
        }
        let bookmark = json!({"type": "BOOKMARK", "object": {"apiVersion": "rdma-netdev.io/v1alpha1",
            "kind": "AddressBlock", "metadata": {"resourceVersion": "12"},
            "spec": {"store": "", "block": "0.0.0.0/0"}}});
        let is_only = |document, wanted| matches!(news(document), Ok(News::Of(version, None)) if version == wanted);
        assert!(is_only(&bookmark, "12"));
        let gone = json!({"type": "ERROR", "object": {"kind": "Status", "status": "Failure",
            "message": "too old resource version", "reason": "Expired", "code": 410}});
        assert!(matches!(news(&gone), Ok(News::Expired)));
        let other =
            json!({"type": "ERROR", "object": {"status": "Failure", "message": "x", "code": 500}});
        assert!(news(&other).is_err());
        // Written by hand.
        let mut unreadable = json!({"type": "MODIFIED", "object": block});
        unreadable["object"]["spec"]["block"] = "10.0.0/28".into();
        assert!(is_only(&unreadable, "8"));
        assert!(read(b"{").is_err());
    }

    /// How many watches begin in a second, if the server answers each one with this text and ends it.
    async fn watches_in_a_second(text: &str) -> usize {
        use super::super::{Endpoint, Transport};
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = Endpoint {
            base: format!("http://{}", listener.local_addr().unwrap())
                .parse()
                .unwrap(),
            namespace: None,
            authorities: Vec::new(),
            certificate: None,
            token: None,
        };
        let client = Client::new(Transport::new(endpoint).unwrap(), "test");
        let (sender, mut receiver) = mpsc::channel(1000);
        let mut watches = 0;
        let serve = async {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = vec![0; 4096];
                let length = stream.read(&mut request).await.unwrap();
                let is_watch = String::from_utf8_lossy(&request[..length]).contains("watch=true");
                watches += usize::from(is_watch);
                let list = json!({"kind": "AddressBlockList", "apiVersion": "rdma-netdev.io/v1alpha1",
                    "metadata": {"resourceVersion": "5"}, "items": []});
                let body = if is_watch {
                    text.to_owned()
                } else {
                    list.to_string()
                };
                let head = format!(
                    "HTTP/1.1 200 x\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                    body.len()
                );
                stream.write_all((head + &body).as_bytes()).await.unwrap();
            }
        };
        let drain = async { while receiver.recv().await.is_some() {} };
        tokio::select! {
            () = run(client, "n1".into(), sender, LONGEST_WAIT) => {}
            () = serve => {}
            () = drain => {}
            () = tokio::time::sleep(Duration::from_secs(1)) => {}
        }
        watches
    }

    #[tokio::test]
    async fn watches_that_end_at_once_back_off() {
        let error =
            json!({"type": "ERROR", "object": {"status": "Failure", "message": "x", "code": 500}});
        for text in [String::new(), format!("{error}\n")] {
            let watches = watches_in_a_second(&text).await;
            assert!((1..=4).contains(&watches), "{watches}: {text}");
        }
    }

    const LONGEST_WAIT: Duration = Duration::from_secs(30);

    #[test]
    fn waits_double_and_differ_and_end_at_the_longest() {
        assert!(
            wait(1, LONGEST_WAIT, 0) >= FIRST_WAIT / 2
                && wait(1, LONGEST_WAIT, u64::MAX) <= FIRST_WAIT
        );
        for failures in 1..200 {
            for random in [0, 1, 12_345, u64::MAX] {
                assert!(wait(failures, LONGEST_WAIT, random) <= LONGEST_WAIT);
            }
        }
        assert!(wait(100, LONGEST_WAIT, 0) >= LONGEST_WAIT / 2);
        assert_ne!(wait(5, LONGEST_WAIT, 17), wait(5, LONGEST_WAIT, 4711));
    }
}
