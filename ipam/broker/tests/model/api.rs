//! An API server in this process, as strict as the real one in what brokers rely on: names decide,
//! `resourceVersion` and UID are preconditions, a list says as of when it is, a watch goes on behind it
//! in order. It loses requests and answers when told to.
//!
//! What only the real one can show (schemas, caches, compaction) is for the end-to-end cases.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

/// What becomes of one of the next requests that change something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It is not done, and there is no answer.
    Lost,
    /// It is done, and there is no answer.
    Unanswered,
    /// The same, some time later; a creation is done at once.
    Late,
}

/// How much later.
const LATER: Duration = Duration::from_millis(80);

#[derive(Debug, Default)]
struct State {
    version: u64,
    uids: u64,
    /// By collection and name.
    objects: BTreeMap<(String, String), Value>,
    events: Vec<(u64, &'static str, String, Value)>,
    faults: VecDeque<Option<Fault>>,
    /// How many of the next reads of a block have no answer.
    lost_reads: usize,
    /// Whether lists are refused.
    lists_forbidden: bool,
    /// Watches that have seen less than this have to list again.
    expired: u64,
    /// Whether connections are refused.
    down: bool,
}

/// The server.
#[derive(Debug, Clone)]
pub(crate) struct Api {
    state: Arc<Mutex<State>>,
    changed: Arc<Notify>,
    pub(crate) port: u16,
}

struct Request {
    method: String,
    path: String,
    query: BTreeMap<String, String>,
    body: Value,
}

impl Api {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let api = Self {
            state: Arc::default(),
            changed: Arc::default(),
            port: listener.local_addr().unwrap().port(),
        };
        let serving = api.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                if !serving.state.lock().unwrap().down {
                    tokio::spawn(serving.clone().converse(stream));
                }
            }
        });
        api
    }

    /// What becomes of the next changes.
    pub(crate) fn fail(&self, faults: impl IntoIterator<Item = Option<Fault>>) {
        self.state.lock().unwrap().faults.extend(faults);
    }

    /// So many of the next reads of a block have no answer.
    pub(crate) fn lose_reads(&self, count: usize) {
        self.state.lock().unwrap().lost_reads = count;
    }

    /// Refuses connections, or takes them again.
    pub(crate) fn set_down(&self, down: bool) {
        self.state.lock().unwrap().down = down;
        self.changed.notify_waiters();
    }

    /// Refuses lists, as without the right to them, or allows them again.
    pub(crate) fn forbid_lists(&self, forbidden: bool) {
        self.state.lock().unwrap().lists_forbidden = forbidden;
    }

    pub(crate) fn add_node(&self, name: &str) {
        let mut state = self.state.lock().unwrap();
        let object = json!({"metadata": {"name": name}, "spec": {}});
        state.put("nodes", name, object, true);
    }

    /// Changes an object, or makes it.
    pub(crate) fn write(&self, kind: &str, name: &str, patch: &Value) {
        let mut state = self.state.lock().unwrap();
        let key = (kind.to_owned(), name.to_owned());
        let before = state.objects.get(&key).cloned();
        let fresh = before.is_none();
        let mut object = before.unwrap_or_else(|| json!({"metadata": {"name": name}}));
        merge(&mut object, patch);
        state.put(kind, name, object, fresh);
        drop(state);
        self.changed.notify_waiters();
    }

    /// The same without an event: a watch is behind.
    pub(crate) fn write_unseen(&self, kind: &str, name: &str, object: &Value) {
        let mut state = self.state.lock().unwrap();
        state.put(kind, name, object.clone(), true);
        state.events.pop();
    }

    pub(crate) fn object(&self, kind: &str, name: &str) -> Value {
        let state = self.state.lock().unwrap();
        state.objects[&(kind.to_owned(), name.to_owned())].clone()
    }

    pub(crate) fn uid(&self, kind: &str, name: &str) -> String {
        let state = self.state.lock().unwrap();
        let object = &state.objects[&(kind.to_owned(), name.to_owned())];
        object["metadata"]["uid"].as_str().unwrap().to_owned()
    }

    /// The names of all objects of a kind.
    pub(crate) fn names(&self, kind: &str) -> Vec<String> {
        let state = self.state.lock().unwrap();
        let objects = state.objects.keys().filter(|(of, _)| of == kind);
        objects.map(|(_, name)| name.clone()).collect()
    }

    /// The ranges that are confirmed.
    pub(crate) fn confirmed(&self) -> Vec<String> {
        let state = self.state.lock().unwrap();
        let objects = state.objects.iter();
        objects
            .filter(|((of, _), object)| {
                of == "addressranges" && object["spec"]["confirmed"] == true
            })
            .map(|(_, object)| object["spec"]["range"].as_str().unwrap().to_owned())
            .collect()
    }

    /// Removes an object without an event.
    pub(crate) fn forget(&self, kind: &str, name: &str) {
        let mut state = self.state.lock().unwrap();
        state.objects.remove(&(kind.to_owned(), name.to_owned()));
    }

    /// All blocks that are marked as those of a node that is gone.
    pub(crate) fn marked(&self) -> usize {
        let state = self.state.lock().unwrap();
        let marked = state.objects.values();
        marked
            .filter(|object| object["spec"]["over"].is_object())
            .count()
    }

    /// The UIDs of the node of this name that its blocks have.
    pub(crate) fn uids_of(&self, node: &str) -> Vec<String> {
        let state = self.state.lock().unwrap();
        let objects = state.objects.iter();
        objects
            .filter(|((kind, _), object)| kind == "addressblocks" && object["spec"]["node"] == node)
            .map(|(_, object)| object["spec"]["nodeUID"].as_str().unwrap().to_owned())
            .collect()
    }

    pub(crate) fn remove_node(&self, name: &str) {
        let mut state = self.state.lock().unwrap();
        state.objects.remove(&("nodes".to_owned(), name.to_owned()));
    }

    /// As after a restore from a backup that is older than all blocks: they are gone without an
    /// event, and watches end.
    pub(crate) fn forget_blocks(&self) {
        let mut state = self.state.lock().unwrap();
        state.objects.retain(|(kind, _), _| kind != "addressblocks");
        state.version += 1;
        state.expired = state.version;
        drop(state);
        self.changed.notify_waiters();
    }

    /// Removes the objects of all blocks, as an administrator may.
    pub(crate) fn delete_blocks(&self) {
        let mut state = self.state.lock().unwrap();
        let names: Vec<String> = state
            .objects
            .keys()
            .filter(|(kind, _)| kind == "addressblocks")
            .map(|(_, name)| name.clone())
            .collect();
        for name in names {
            state.remove("addressblocks", &name);
        }
        drop(state);
        self.changed.notify_waiters();
    }

    /// All blocks: network and node.
    pub(crate) fn blocks(&self) -> BTreeMap<String, Option<String>> {
        let state = self.state.lock().unwrap();
        let blocks = state
            .objects
            .iter()
            .filter(|((kind, _), _)| kind == "addressblocks");
        blocks
            .map(|(_, object)| {
                let text = |key: &str| object["spec"][key].as_str().map(str::to_owned);
                (text("block").unwrap(), text("node"))
            })
            .collect()
    }

    async fn converse(self, mut stream: TcpStream) {
        while let Some(request) = read(&mut stream).await {
            if self.state.lock().unwrap().down {
                return;
            }
            if request.query.contains_key("watch") {
                return self.watch(stream, &request).await;
            }
            let changes = request.method != "GET";
            let fault = match changes {
                true => self.state.lock().unwrap().faults.pop_front().flatten(),
                false => None,
            };
            if fault == Some(Fault::Lost) || self.state.lock().unwrap().loses(&request) {
                return;
            }
            if fault == Some(Fault::Late) && request.method != "POST" {
                tokio::time::sleep(LATER).await;
            }
            let (code, body) = self.state.lock().unwrap().answer(&request);
            if changes {
                self.changed.notify_waiters();
            }
            if matches!(fault, Some(Fault::Unanswered | Fault::Late)) {
                return;
            }
            let body = body.to_string();
            let head = format!(
                "HTTP/1.1 {code} x\r\nContent-Length: {}\r\n\r\n",
                body.len()
            );
            if stream
                .write_all(format!("{head}{body}").as_bytes())
                .await
                .is_err()
            {
                return;
            }
        }
    }

    async fn watch(self, mut stream: TcpStream, request: &Request) {
        let mut seen: u64 = request.query["resourceVersion"].parse().unwrap();
        let selector = request.query["labelSelector"].clone();
        let head = "HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\n";
        if stream.write_all(head.as_bytes()).await.is_err() {
            return;
        }
        loop {
            let changed = self.changed.notified();
            let mut text = String::new();
            {
                let state = self.state.lock().unwrap();
                if state.down {
                    return;
                }
                if seen < state.expired {
                    let status = json!({"kind": "Status", "status": "Failure", "message": "too old",
                        "reason": "Expired", "code": 410});
                    text += &format!("{}\n", json!({"type": "ERROR", "object": status}));
                }
                for (version, kind, labels, object) in &state.events {
                    if *version > seen && *labels == selector {
                        text += &format!("{}\n", json!({"type": kind, "object": object}));
                    }
                }
                seen = state.version;
            }
            if !text.is_empty() {
                let chunk = format!("{:x}\r\n{text}\r\n", text.len());
                if stream.write_all(chunk.as_bytes()).await.is_err() {
                    return;
                }
            }
            let mut one = [0];
            tokio::select! {
                () = changed => {}
                // The client is gone.
                _ = stream.read(&mut one) => return,
            }
        }
    }
}

impl State {
    fn put(&mut self, kind: &str, name: &str, mut object: Value, fresh: bool) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        if fresh {
            self.uids += 1;
            object["metadata"]["uid"] = format!("uid-{}", self.uids).into();
        }
        let key = (kind.to_owned(), name.to_owned());
        let before = self.objects.insert(key, object.clone());
        let (old, new) = (before.as_ref().map(labels), labels(&object));
        let kind = match old.as_ref() == Some(&new) {
            true => "MODIFIED",
            false => "ADDED",
        };
        // Who selects by a label that the object no longer has sees it go.
        if let Some(old) = old.filter(|old| *old != new) {
            self.events
                .push((self.version, "DELETED", old, object.clone()));
        }
        self.events.push((self.version, kind, new, object.clone()));
        object
    }

    fn remove(&mut self, kind: &str, name: &str) {
        let key = (kind.to_owned(), name.to_owned());
        let mut object = self.objects.remove(&key).unwrap();
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        let label = labels(&object);
        self.events.push((self.version, "DELETED", label, object));
    }

    fn loses(&mut self, request: &Request) -> bool {
        let is_read = request.method == "GET" && request.path.contains("/addressblocks/");
        let is_lost = is_read && self.lost_reads > 0;
        self.lost_reads -= usize::from(is_lost);
        is_lost
    }

    fn answer(&mut self, request: &Request) -> (u16, Value) {
        let parts: Vec<&str> = request.path.trim_matches('/').split('/').collect();
        let at = match parts.as_slice() {
            ["api", "v1", rest @ ..] => rest,
            [
                "apis",
                "rdma-netdev.io",
                "v1alpha1",
                "namespaces",
                "test",
                rest @ ..,
            ] => rest,
            [
                "apis",
                "whereabouts.cni.cncf.io",
                "v1alpha1",
                "namespaces",
                "kube-system",
                rest @ ..,
            ] => rest,
            _ => return refused(404, ""),
        };
        let key = |kind: &str, name: &str| (kind.to_owned(), name.to_owned());
        match (request.method.as_str(), at) {
            ("GET", [_]) if self.lists_forbidden => refused(403, "Forbidden"),
            ("GET", [kind]) => {
                let selector = request.query.get("labelSelector");
                let items = self.objects.iter().filter(|((of, _), _)| of == kind);
                let items = items.map(|(_, object)| object);
                let items: Vec<&Value> = items
                    .filter(|object| {
                        selector.is_none_or(|selector| all_labels(object).contains(selector))
                    })
                    .collect();
                let version = self.version.to_string();
                (
                    200,
                    json!({"metadata": {"resourceVersion": version}, "items": items}),
                )
            }
            ("GET", [kind, name]) => match self.objects.get(&key(kind, name)) {
                Some(object) => (200, object.clone()),
                None => refused(404, "NotFound"),
            },
            ("POST", [kind]) => {
                let name = request.body["metadata"]["name"]
                    .as_str()
                    .unwrap()
                    .to_owned();
                if self.objects.contains_key(&key(kind, &name)) {
                    return refused(409, "AlreadyExists");
                }
                (201, self.put(kind, &name, request.body.clone(), true))
            }
            ("PATCH", [kind, name, ..]) => {
                let Some(object) = self.objects.get(&key(kind, name)) else {
                    return refused(404, "NotFound");
                };
                let meta = &request.body["metadata"];
                if !is_same(object, &meta["uid"], &meta["resourceVersion"]) {
                    return refused(409, "Conflict");
                }
                let mut changed = object.clone();
                merge(&mut changed, &request.body);
                (200, self.put(kind, name, changed, false))
            }
            ("DELETE", [kind, name]) => {
                let Some(object) = self.objects.get(&key(kind, name)) else {
                    return refused(404, "NotFound");
                };
                let same = &request.body["preconditions"];
                if !is_same(object, &same["uid"], &same["resourceVersion"]) {
                    return refused(409, "Conflict");
                }
                self.remove(kind, name);
                (200, json!({"status": "Success"}))
            }
            _ => refused(405, ""),
        }
    }
}

fn is_same(object: &Value, uid: &Value, version: &Value) -> bool {
    let meta = &object["metadata"];
    (uid.is_null() || *uid == meta["uid"])
        && (version.is_null() || *version == meta["resourceVersion"])
}

fn refused(code: u16, reason: &str) -> (u16, Value) {
    (
        code,
        json!({"status": "Failure", "code": code, "reason": reason, "message": "no"}),
    )
}

/// The selector of its node that an object has.
fn labels(object: &Value) -> String {
    let label = "rdma-netdev.io/node-hash";
    let value = object["metadata"]["labels"][label]
        .as_str()
        .unwrap_or_default();
    format!("{label}={value}")
}

fn all_labels(object: &Value) -> Vec<String> {
    let labels = object["metadata"]["labels"]
        .as_object()
        .into_iter()
        .flatten();
    labels
        .map(|(key, value)| format!("{key}={}", value.as_str().unwrap()))
        .collect()
}

/// RFC 7396.
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        return *target = patch.clone();
    };
    if !target.is_object() {
        *target = json!({});
    }
    let fields = target.as_object_mut().unwrap();
    for (key, value) in patch {
        if value.is_null() {
            fields.remove(key);
        } else {
            merge(fields.entry(key.clone()).or_insert(Value::Null), value);
        }
    }
}

async fn read(stream: &mut TcpStream) -> Option<Request> {
    let mut text = Vec::new();
    let mut piece = [0; 4096];
    let head = loop {
        if let Some(end) = text.windows(4).position(|four| four == b"\r\n\r\n") {
            break end;
        }
        match stream.read(&mut piece).await {
            Ok(0) | Err(_) => return None,
            Ok(count) => text.extend_from_slice(&piece[..count]),
        }
    };
    let lines = String::from_utf8(text[..head].to_vec()).unwrap();
    let length = lines
        .lines()
        .find_map(|line| {
            line.to_ascii_lowercase()
                .strip_prefix("content-length:")
                .map(|n| n.trim().parse().unwrap())
        })
        .unwrap_or(0usize);
    while text.len() < head + 4 + length {
        match stream.read(&mut piece).await {
            Ok(0) | Err(_) => return None,
            Ok(count) => text.extend_from_slice(&piece[..count]),
        }
    }
    let body = &text[head + 4..head + 4 + length];
    let mut words = lines.split(' ');
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    Some(Request {
        method,
        path: path.to_owned(),
        query: pairs
            .map(|(key, value)| {
                (
                    key.to_owned(),
                    value.replace("%2F", "/").replace("%3D", "="),
                )
            })
            .collect(),
        body: serde_json::from_slice(body).unwrap_or(Value::Null),
    })
}
