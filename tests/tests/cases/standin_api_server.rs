//! The API server that other cases stand on: what Kubernetes promises to its clients, it keeps.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use e2e::api_server::{ApiServer, Client, Patch, Response, Watch, WatchCache};
use e2e::case;
use e2e::harness::Case;
use serde_json::{Value, json};

pub(crate) const CASES: &[Case] = &[
    case!(one_of_many_contenders_creates_an_object, ApiServer),
    case!(a_stale_resource_version_is_refused, ApiServer),
    case!(an_object_against_its_schema_is_refused, ApiServer),
    case!(a_watch_has_every_change_in_order, ApiServer),
    case!(a_watch_from_a_compacted_version_gets_410, ApiServer),
    case!(
        a_compaction_alone_is_noticed_without_a_watch_cache,
        ApiServer
    ),
    case!(killed_servers_lose_nothing, ApiServer),
    case!(a_frozen_server_answers_later, ApiServer),
    case!(whoever_is_no_administrator_is_refused, ApiServer),
    case!(nodes_are_those_of_a_cluster, ApiServer),
    case!(a_watch_of_nodes_has_every_change, ApiServer),
];

const EVENT_TIMEOUT: Duration = Duration::from_secs(60);
const BLOCKS: &str = "/apis/e2e.example.com/v1/blocks";
const CRD: &str = r"
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: blocks.e2e.example.com
spec:
  group: e2e.example.com
  scope: Cluster
  names: {kind: Block, plural: blocks, singular: block}
  versions:
    - name: v1
      served: true
      storage: true
      subresources: {status: {}}
      schema:
        openAPIV3Schema:
          type: object
          required: [spec]
          properties:
            spec:
              type: object
              required: [node]
              properties:
                node: {type: string, minLength: 1}
            status:
              type: object
              properties:
                leases: {type: integer}
";

fn with_blocks() -> Result<ApiServer> {
    let server = ApiServer::start()?;
    server.apply_crd(CRD)?;
    Ok(server)
}

fn block(name: &str, node: &str) -> Value {
    json!({
        "apiVersion": "e2e.example.com/v1",
        "kind": "Block",
        "metadata": {"name": name},
        "spec": {"node": node},
    })
}

fn version_of(object: &Value) -> Result<&str> {
    object["metadata"]["resourceVersion"]
        .as_str()
        .context("a resourceVersion")
}

/// Type, name and object of the next event that is no bookmark.
fn next_change(watch: &Watch) -> Result<(String, String, Value)> {
    loop {
        let mut event = watch
            .next(EVENT_TIMEOUT)?
            .context("the server ended the watch")?;
        let kind = event["type"]
            .as_str()
            .context("an event's type")?
            .to_owned();
        if kind == "BOOKMARK" {
            continue;
        }
        let object = event["object"].take();
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        return Ok((kind, name.to_owned(), object));
    }
}

/// The next event says 410: the version is too old.
fn expect_gone(watch: &Watch) -> Result<()> {
    let (kind, _, status) = next_change(watch)?;
    assert_eq!(kind, "ERROR", "{status}");
    assert_eq!(status["code"], 410, "{status}");
    assert_eq!(status["reason"], "Expired", "{status}");
    Ok(())
}

fn watch_from(client: &Client, collection: &str, version: &str) -> Result<Watch> {
    client.watch(&format!(
        "{collection}?watch=1&allowWatchBookmarks=true&resourceVersion={version}"
    ))
}

fn one_of_many_contenders_creates_an_object() -> Result<()> {
    let server = with_blocks()?;
    let client = server.client();
    let answers: Vec<_> = thread::scope(|scope| {
        let contenders: Vec<_> = (0..8)
            .map(|n| scope.spawn(move || client.post(BLOCKS, &block("a", &format!("node-{n}")))))
            .collect();
        contenders
            .into_iter()
            .map(|contender| contender.join().expect("no panic"))
            .collect::<Result<_>>()
    })?;
    let winners: Vec<_> = answers
        .iter()
        .filter(|answer| answer.status == 201)
        .collect();
    assert_eq!(winners.len(), 1, "{answers:?}");
    for loser in answers.iter().filter(|answer| answer.status != 201) {
        assert_eq!((loser.status, loser.reason()), (409, "AlreadyExists"));
    }
    let stored = client.get(&format!("{BLOCKS}/a"))?.expect_success()?;
    assert_eq!(stored["spec"], winners[0].body["spec"]);
    Ok(())
}

fn a_stale_resource_version_is_refused() -> Result<()> {
    let server = with_blocks()?;
    let client = server.client();
    let path = format!("{BLOCKS}/a");
    let first = client
        .post(BLOCKS, &block("a", "node-1"))?
        .expect_success()?;

    let mut taken = first.clone();
    taken["spec"]["node"] = "node-2".into();
    let second = client.put(&path, &taken)?.expect_success()?;
    assert_ne!(version_of(&first)?, version_of(&second)?);

    let mut late = first.clone();
    late["spec"]["node"] = "node-3".into();
    let refused = client.put(&path, &late)?;
    assert_eq!((refused.status, refused.reason()), (409, "Conflict"));
    let refused = client.patch(
        &path,
        Patch::Merge,
        &json!({"metadata": {"resourceVersion": version_of(&first)?}, "spec": {"node": "node-3"}}),
    )?;
    assert_eq!((refused.status, refused.reason()), (409, "Conflict"));
    let refused = client.delete_if(
        &path,
        &json!({"preconditions": {"resourceVersion": version_of(&first)?}}),
    )?;
    assert_eq!((refused.status, refused.reason()), (409, "Conflict"));
    let refused = client.delete_if(&path, &json!({"preconditions": {"uid": "another"}}))?;
    assert_eq!((refused.status, refused.reason()), (409, "Conflict"));

    let stored = client.get(&path)?.expect_success()?;
    assert_eq!(stored, second);
    client
        .delete_if(
            &path,
            &json!({"preconditions": {"resourceVersion": version_of(&second)?}}),
        )?
        .expect_success()?;
    assert_eq!(client.get(&path)?.status, 404);
    Ok(())
}

fn an_object_against_its_schema_is_refused() -> Result<()> {
    let server = with_blocks()?;
    let client = server.client();
    let refused = client.post(BLOCKS, &block("a", ""))?;
    assert_eq!((refused.status, refused.reason()), (422, "Invalid"));
    let refused = client.post(BLOCKS, &block("No_Name", "node-1"))?;
    assert_eq!((refused.status, refused.reason()), (422, "Invalid"));

    // The status is written by its own path only.
    let mut object = block("a", "node-1");
    object["status"] = json!({"leases": 1});
    let created = client.post(BLOCKS, &object)?.expect_success()?;
    assert_eq!(created["status"], Value::Null);
    let status = json!({"status": {"leases": 2}, "spec": {"node": "node-2"}});
    let written = client
        .patch(&format!("{BLOCKS}/a/status"), Patch::Merge, &status)?
        .expect_success()?;
    assert_eq!(written["status"]["leases"], 2);
    assert_eq!(written["spec"]["node"], "node-1");
    assert_eq!(client.get("/apis/e2e.example.com/v2/blocks")?.status, 404);
    Ok(())
}

fn a_watch_has_every_change_in_order() -> Result<()> {
    let server = with_blocks()?;
    let client = server.client();
    client
        .post(BLOCKS, &block("a", "node-1"))?
        .expect_success()?;
    let list = client.get(BLOCKS)?.expect_success()?;
    assert_eq!(list["items"].as_array().map(Vec::len), Some(1));
    let watch = watch_from(client, BLOCKS, version_of(&list)?)?;

    client
        .post(BLOCKS, &block("b", "node-1"))?
        .expect_success()?;
    let spec = json!({"spec": {"node": "node-2"}});
    client
        .patch(&format!("{BLOCKS}/a"), Patch::Merge, &spec)?
        .expect_success()?;
    client.delete(&format!("{BLOCKS}/b"))?.expect_success()?;
    let mut seen = Vec::new();
    let mut last = 0;
    for _ in 0..3 {
        let (kind, name, object) = next_change(&watch)?;
        let version: u64 = version_of(&object)?.parse()?;
        assert!(version > last, "{version} after {last}");
        last = version;
        seen.push(format!("{kind} {name}"));
    }
    assert_eq!(seen, ["ADDED b", "MODIFIED a", "DELETED b"]);

    // A later watch from the same version has the same.
    let again = watch_from(client, BLOCKS, version_of(&list)?)?;
    assert_eq!(next_change(&again)?.1, "b");

    // What there is, then a bookmark that says so.
    let initial = client.watch(&format!(
        "{BLOCKS}?watch=1&allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan"
    ))?;
    let first = initial.next(EVENT_TIMEOUT)?.context("an event")?;
    assert_eq!(first["type"], "ADDED");
    assert_eq!(first["object"]["spec"]["node"], "node-2");
    let bookmark = initial.next(EVENT_TIMEOUT)?.context("a bookmark")?;
    assert_eq!(bookmark["type"], "BOOKMARK");
    assert_eq!(
        bookmark["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"],
        "true"
    );
    assert!(version_of(&bookmark["object"])?.parse::<u64>()? >= last);
    Ok(())
}

fn a_watch_from_a_compacted_version_gets_410() -> Result<()> {
    let mut server = with_blocks()?;
    let first = server.client().post(BLOCKS, &block("a", "node-1"))?;
    let first = first.expect_success()?;
    server
        .client()
        .post(BLOCKS, &block("b", "node-1"))?
        .expect_success()?;
    server
        .client()
        .post(BLOCKS, &block("c", "node-1"))?
        .expect_success()?;

    server.forget_history()?;
    let client = server.client();
    expect_gone(&watch_from(client, BLOCKS, version_of(&first)?)?)?;

    // As a client does then: list, and watch from there.
    let list = client.get(BLOCKS)?.expect_success()?;
    assert_eq!(list["items"].as_array().map(Vec::len), Some(3));
    let watch = watch_from(client, BLOCKS, version_of(&list)?)?;
    client.delete(&format!("{BLOCKS}/b"))?.expect_success()?;
    let (kind, name, _) = next_change(&watch)?;
    assert_eq!((kind.as_str(), name.as_str()), ("DELETED", "b"));
    Ok(())
}

fn a_compaction_alone_is_noticed_without_a_watch_cache() -> Result<()> {
    let server = ApiServer::start_with(WatchCache::Off)?;
    server.apply_crd(CRD)?;
    let client = server.client();
    let first = client
        .post(BLOCKS, &block("a", "node-1"))?
        .expect_success()?;
    client
        .post(BLOCKS, &block("b", "node-1"))?
        .expect_success()?;
    let page = client.get(&format!("{BLOCKS}?limit=1"))?.expect_success()?;
    let next = page["metadata"]["continue"]
        .as_str()
        .context("a next page")?;
    client
        .post(BLOCKS, &block("c", "node-1"))?
        .expect_success()?;

    let early = watch_from(client, BLOCKS, version_of(&first)?)?;
    assert_eq!(next_change(&early)?.1, "b");
    assert!(server.compact()? > version_of(&first)?.parse()?);
    expect_gone(&watch_from(client, BLOCKS, version_of(&first)?)?)?;
    let late = client.get(&format!("{BLOCKS}?limit=1&continue={next}"))?;
    assert_eq!((late.status, late.reason()), (410, "Expired"));

    // A watch that is open already goes on.
    assert_eq!(next_change(&early)?.1, "c");
    client.delete(&format!("{BLOCKS}/c"))?.expect_success()?;
    assert_eq!(next_change(&early)?.0, "DELETED");
    Ok(())
}

/// Asks until the answer has this status.
fn wait_for_status(status: u16, ask: impl Fn() -> Result<Response>) -> Result<()> {
    let mut last = None;
    for _ in 0..300 {
        let answer = ask()?;
        if answer.status == status {
            return Ok(());
        }
        last = Some(answer);
        thread::sleep(Duration::from_millis(100));
    }
    bail!("not {status}: {last:?}")
}

fn killed_servers_lose_nothing() -> Result<()> {
    let mut server = with_blocks()?;
    let url = server.url().to_owned();
    let created = server.client().post(BLOCKS, &block("a", "node-1"))?;
    let created = created.expect_success()?;
    let uid = server.add_node("node-1")?;
    let watch = watch_from(server.client(), BLOCKS, version_of(&created)?)?;

    server.kill_api_server()?;
    assert!(watch.next(EVENT_TIMEOUT)?.is_none(), "the watch goes on");
    assert!(server.client().get(BLOCKS).is_err());
    server.kill_etcd()?;
    server.start_etcd()?;
    server.start_api_server()?;
    assert_eq!(server.url(), url);
    let stored = server.client().get(&format!("{BLOCKS}/a"))?;
    assert_eq!(stored.expect_success()?, created);
    assert_eq!(server.node_uid("node-1")?, Some(uid));

    // etcd alone, with the API server waiting for it.
    server.kill_etcd()?;
    let client = server.client().clone();
    // What it says is as old as its last look at etcd.
    wait_for_status(500, || client.get("/readyz"))?;
    server.start_etcd()?;
    wait_for_status(200, || client.get("/readyz"))?;
    client
        .post(BLOCKS, &block("b", "node-1"))?
        .expect_success()?;

    server.stop_api_server()?;
    server.start_api_server()?;
    let list = server.client().get(BLOCKS)?.expect_success()?;
    assert_eq!(list["items"].as_array().map(Vec::len), Some(2));
    Ok(())
}

fn a_frozen_server_answers_later() -> Result<()> {
    let server = with_blocks()?;
    let client = server.client();
    server.freeze_api_server()?;
    let answer = thread::scope(|scope| {
        let asked = scope.spawn(|| client.post(BLOCKS, &block("a", "node-1")));
        thread::sleep(Duration::from_secs(1));
        assert!(!asked.is_finished(), "a frozen server answers");
        server.thaw_api_server()?;
        asked.join().expect("no panic")
    })?;
    assert_eq!(answer.status, 201, "{}", answer.body);
    Ok(())
}

fn whoever_is_no_administrator_is_refused() -> Result<()> {
    let server = with_blocks()?;
    let nobody = server.client_of("somebody", &["tenants"])?;
    let refused = nobody.get(BLOCKS)?;
    assert_eq!((refused.status, refused.reason()), (403, "Forbidden"));
    let refused = nobody.post("/api/v1/nodes", &json!({}))?;
    assert_eq!((refused.status, refused.reason()), (403, "Forbidden"));
    let refused = server.anonymous_client().get("/api/v1/nodes")?;
    assert_eq!((refused.status, refused.reason()), (403, "Forbidden"));
    assert_eq!(server.anonymous_client().get("/readyz")?.status, 200);

    let config: Value = serde_json::from_slice(&std::fs::read(server.kubeconfig())?)?;
    assert_eq!(config["clusters"][0]["cluster"]["server"], server.url());
    let other = server.kubeconfig_of("another", &["tenants", "system:masters"])?;
    assert!(other.exists());
    let master = server.client_of("another", &["tenants", "system:masters"])?;
    assert_eq!(master.get(BLOCKS)?.status, 200);
    Ok(())
}

fn nodes_are_those_of_a_cluster() -> Result<()> {
    let server = ApiServer::start()?;
    let client = server.client();
    assert_eq!(server.node_uid("node-1")?, None);
    let missing = client.get("/api/v1/nodes/node-1")?;
    assert_eq!((missing.status, missing.reason()), (404, "NotFound"));
    assert_eq!(client.get("/api/v1/pods")?.status, 404);

    let uid = server.add_node("node-1")?;
    server.add_node("node-2")?;
    let node = client.get("/api/v1/nodes/node-1")?.expect_success()?;
    assert_eq!(
        (&node["kind"], &node["apiVersion"]),
        (&json!("Node"), &json!("v1"))
    );
    let again = json!({"metadata": {"name": "node-1"}});
    let refused = client.post("/api/v1/nodes", &again)?;
    assert_eq!((refused.status, refused.reason()), (409, "AlreadyExists"));
    let refused = client.post("/api/v1/nodes", &json!({"metadata": {"name": "Node_1"}}))?;
    assert_eq!((refused.status, refused.reason()), (422, "Invalid"));

    server.taint_node(
        "node-1",
        "node.kubernetes.io/out-of-service",
        "nodeshutdown",
        "NoExecute",
    )?;
    server.taint_node("node-1", "example.com/other", "", "NoSchedule")?;
    server.taint_node("node-1", "example.com/other", "again", "NoSchedule")?;
    let tainted = client.get("/api/v1/nodes/node-1")?.expect_success()?;
    assert_eq!(
        tainted["spec"]["taints"],
        json!([
            {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"},
            {"key": "example.com/other", "value": "again", "effect": "NoSchedule"},
        ])
    );
    assert_eq!(tainted["metadata"]["uid"], json!(uid));
    assert!(
        server
            .taint_node("node-1", "example.com/other", "", "Never")
            .is_err()
    );
    let mut stale = node.clone();
    stale["metadata"]["labels"]["late"] = "true".into();
    let refused = client.put("/api/v1/nodes/node-1", &stale)?;
    assert_eq!((refused.status, refused.reason()), (409, "Conflict"));
    let status = json!({"status": {"phase": "Running"}, "spec": {"unschedulable": true}});
    let written = client
        .patch("/api/v1/nodes/node-1/status", Patch::Merge, &status)?
        .expect_success()?;
    assert_eq!(written["status"]["phase"], "Running");
    assert_eq!(written["spec"]["unschedulable"], Value::Null);

    let selected = client
        .get("/api/v1/nodes?fieldSelector=metadata.name%3Dnode-2")?
        .expect_success()?;
    assert_eq!(selected["kind"], "NodeList");
    assert_eq!(selected["items"].as_array().map(Vec::len), Some(1));
    let renewed = server.renew_node("node-1")?;
    assert_ne!(renewed, uid);
    assert_eq!(server.node_uid("node-1")?, Some(renewed));
    server.delete_node("node-1")?;
    assert_eq!(server.node_uid("node-1")?, None);
    assert!(server.delete_node("node-1").is_err());
    Ok(())
}

fn a_watch_of_nodes_has_every_change() -> Result<()> {
    const NODES: &str = "/api/v1/nodes";
    let mut server = ApiServer::start()?;
    server.add_node("node-1")?;
    let list = server.client().get(NODES)?.expect_success()?;
    let version = version_of(&list)?;
    let watch = watch_from(server.client(), NODES, version)?;
    let uid = server.add_node("node-2")?;
    server.taint_node("node-1", "example.com/drain", "", "NoExecute")?;
    let renewed = server.renew_node("node-2")?;
    let mut seen = Vec::new();
    for _ in 0..4 {
        let (kind, name, object) = next_change(&watch)?;
        if name == "node-2" {
            let is = object["metadata"]["uid"].as_str().context("a UID")?;
            assert_eq!(is, if seen.len() < 3 { &uid } else { &renewed });
        }
        seen.push(format!("{kind} {name}"));
    }
    assert_eq!(
        seen,
        [
            "ADDED node-2",
            "MODIFIED node-1",
            "DELETED node-2",
            "ADDED node-2"
        ]
    );
    // A watch ends by its time. Bookmarks may come before that, which nobody promises.
    let short = server.client().watch(&format!(
        "{NODES}?watch=1&allowWatchBookmarks=true&timeoutSeconds=4&resourceVersion={version}"
    ))?;
    let mut changes = 0;
    while let Some(event) = short.next(EVENT_TIMEOUT)? {
        changes += usize::from(event["type"] != "BOOKMARK");
    }
    assert_eq!(changes, seen.len());

    server.forget_history()?;
    expect_gone(&watch_from(server.client(), NODES, version)?)
}
