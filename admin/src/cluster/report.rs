//! What a report has of the cluster: its objects as far as they are listed here, and of each node the answers,
//! the logs of our containers and the pods that request our resources.

use anyhow::Result;
use rdma_device_plugin::config;
use serde_json::Value;

use super::Flags;
use super::ask::{CONTAINER, Pod, chosen};
use crate::documents::name_of;
use crate::kubectl::{BLOCKS, NODES, RANGES};
use crate::output::chain;
use crate::support::{Collection, Form, LOG_BYTES, Part, path, questions};

/// Of our own objects.
const OURS: &str = "metadata.name metadata.namespace metadata.uid metadata.labels metadata.generation \
    metadata.creationTimestamp metadata.deletionTimestamp spec.nodeName spec.updateStrategy \
    spec.containers.name spec.containers.image spec.containers.args spec.containers.resources \
    spec.containers.env.name spec.containers.env.valueFrom spec.initContainers.args \
    spec.template.spec.nodeSelector spec.template.spec.tolerations spec.template.spec.initContainers.args \
    spec.template.spec.containers.name spec.template.spec.containers.image \
    spec.template.spec.containers.args spec.template.spec.containers.resources \
    spec.template.spec.containers.env.name spec.template.spec.containers.env.valueFrom \
    spec.template.spec.volumes.hostPath spec.template.spec.volumes.configMap.name status";
/// Of pods that request our resources: their arguments and last words can have secrets.
const USERS: &str = "metadata.name metadata.namespace metadata.uid metadata.labels metadata.creationTimestamp \
    metadata.deletionTimestamp metadata.annotations.k8s.v1.cni.cncf.io/networks \
    metadata.annotations.k8s.v1.cni.cncf.io/network-status spec.nodeName spec.hostNetwork \
    spec.containers.name spec.containers.image spec.containers.resources spec.initContainers.name \
    spec.initContainers.resources status.phase status.reason status.message status.conditions \
    status.containerStatuses.name status.containerStatuses.restartCount \
    status.containerStatuses.state.waiting status.containerStatuses.state.terminated.reason \
    status.containerStatuses.state.terminated.exitCode";
const NODE: &str = "metadata.name metadata.uid metadata.labels spec.taints spec.unschedulable status.addresses \
    status.allocatable status.capacity status.conditions status.nodeInfo";
const NETWORK: &str = "metadata.name metadata.namespace spec.config \
    metadata.annotations.k8s.v1.cni.cncf.io/resourceName";
const BLOCK: &str =
    "metadata.name metadata.uid metadata.creationTimestamp metadata.deletionTimestamp spec status";
const CONFIGURATION: &str = "metadata.name data.config.yaml data.policy.json";
const EVENT: &str = "metadata.namespace involvedObject type reason message count firstTimestamp lastTimestamp \
    eventTime source reportingComponent";
const NETWORKS: &str = "network-attachment-definitions.k8s.cni.cncf.io";

fn is_configuration(map: &Value, _: &Collection) -> bool {
    ["/data/config.yaml", "/data/policy.json"]
        .iter()
        .all(|key| map.pointer(key).is_some())
}

/// A pod that requests a resource of ours.
fn is_user(pod: &Value, collection: &Collection) -> bool {
    let containers = ["/spec/containers", "/spec/initContainers"].map(|list| items(pod, list));
    let limits = containers
        .into_iter()
        .flatten()
        .filter_map(|one| one.pointer("/resources/limits")?.as_object());
    limits
        .flat_map(|limits| limits.keys())
        .any(|resource| collection.resources.contains(resource))
}

/// An event of our objects, or of a pod that requests a resource of ours.
fn is_of_interest(event: &Value, collection: &Collection) -> bool {
    let object = |key: &str| {
        event
            .pointer(&format!("/involvedObject/{key}"))
            .map_or("", text)
    };
    collection.uids.contains(object("uid"))
        || object("apiVersion").starts_with("rdma-netdev.io/")
        // Of a pod that was replaced.
        || object("name").starts_with(&format!("{CONTAINER}-"))
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn items<'a>(value: &'a Value, list: &str) -> impl Iterator<Item = &'a Value> {
    value
        .pointer(list)
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
}

fn uids(lists: &[(String, Value)]) -> impl Iterator<Item = String> {
    let objects = lists.iter().flat_map(|(_, list)| items(list, "/items"));
    objects.filter_map(|object| Some(text(object.pointer("/metadata/uid")?).to_owned()))
}

fn part(flags: &Flags, file: String, words: &[&str], form: Form) -> Part {
    let mut argv = vec![flags.kubectl.kubectl.clone()];
    argv.extend(flags.kubectl.arguments());
    argv.extend(words.iter().map(|&word| word.to_owned()));
    Part { file, argv, form }
}

/// Collects everything. What cannot be read is a part that is missing.
///
/// # Errors
/// The archive cannot be written.
pub(super) async fn collect(flags: &Flags, to: &mut Collection) -> Result<()> {
    (to.timeout, to.parallel) = (flags.timeout(), usize::from(flags.parallel));
    let selector = format!("--selector={}", flags.selector);
    let get = |file: &str, words: &[&str], fields, is_meant| {
        let words = [&["get"], words, &["--output=json"]].concat();
        part(
            flags,
            format!("cluster/{file}.json"),
            &words,
            Form::Objects(fields, is_meant),
        )
    };
    let every = |_: &Value, _: &Collection| true;
    let ours = to.gather(vec![
        get("daemonsets", &["daemonsets", &selector], OURS, every),
        get("pods", &["pods", &selector], OURS, every),
    ]);
    let ours = ours.await?;
    let configurations = vec![get(
        "configmaps",
        &["configmaps"],
        CONFIGURATION,
        is_configuration,
    )];
    for (_, list) in to.gather(configurations).await? {
        let texts = items(&list, "/items").filter_map(|map| map.pointer("/data/config.yaml"));
        // A wrong configuration is in the archive, and offers nothing.
        let pools = texts
            .filter_map(|yaml| config::parse(text(yaml)).ok())
            .flat_map(|config| config.pools);
        to.resources
            .extend(pools.map(|pool| pool.resource.to_string()));
    }
    let version = ["version", "--output=json"];
    let rest = vec![
        part(
            flags,
            "cluster/version.json".to_owned(),
            &version,
            Form::Document,
        ),
        get("nodes", &[NODES], NODE, every),
        get("networks", &[NETWORKS, "--all-namespaces"], NETWORK, every),
        get("addressranges", &[RANGES], BLOCK, every),
        get("addressblocks", &[BLOCKS], BLOCK, every),
    ];
    to.gather(rest).await?;
    let mut users = to
        .gather(vec![users_of(
            flags,
            "cluster/pending-pods.json".to_owned(),
            "",
        )])
        .await?;
    if let Some((_, list)) = ours.iter().find(|(file, _)| file == "cluster/pods.json") {
        match chosen(flags, list) {
            Ok(pods) => users.extend(collect_nodes(flags, &pods, list, to).await?),
            Err(error) => to.lack("nodes", "the daemon's pods", &chain(&error)),
        }
    }
    to.uids = uids(&ours).chain(uids(&users)).collect();
    let of_pods = [
        "events",
        "--all-namespaces",
        "--field-selector=involvedObject.kind=Pod",
    ];
    let events = to.gather(vec![
        get("events", &["events"], EVENT, is_of_interest),
        get("pod-events", &of_pods, EVENT, is_of_interest),
    ]);
    events.await.map(drop)
}

/// What each node has; returns its pods that request our resources.
async fn collect_nodes(
    flags: &Flags,
    pods: &[Pod],
    list: &Value,
    to: &mut Collection,
) -> Result<Vec<(String, Value)>> {
    let (mut first, mut rest, mut parts) = (Vec::new(), Vec::new(), Vec::new());
    for pod in pods {
        let exec = ["exec", &pod.name, "--container", CONTAINER, "--", "rdmactl"];
        let exec = part(flags, String::new(), &exec, Form::Text).argv;
        match &pod.obstacle {
            Some(why) => to.lack(&path(&["nodes", &pod.node]), &exec.join(" "), why),
            None => {
                let mut questions = questions(&pod.node, &exec).into_iter();
                let question = questions.next();
                rest.push((question.as_ref().map(|part| part.file.clone()), questions));
                first.extend(question);
            }
        }
        parts.push(users_of(
            flags,
            path(&["nodes", &pod.node, "users.json"]),
            &pod.node,
        ));
        let object = items(list, "/items").find(|object| name_of(object) == pod.name);
        parts.extend(
            object
                .into_iter()
                .flat_map(|object| logs(flags, pod, object)),
        );
    }
    // A node that does not answer costs its time once.
    let answered = to.gather(first).await?;
    rest.retain(|(first, _)| {
        answered
            .iter()
            .any(|(file, _)| Some(file) == first.as_ref())
    });
    parts.extend(rest.into_iter().flat_map(|(_, questions)| questions));
    to.gather(parts).await
}

/// Pods that request our resources and are on this node; on no node yet for "".
fn users_of(flags: &Flags, file: String, node: &str) -> Part {
    let node = format!("--field-selector=spec.nodeName={node}");
    let get = ["get", "pods", "--all-namespaces", &node, "--output=json"];
    part(flags, file, &get, Form::Objects(USERS, is_user))
}

/// Logs of a pod's containers, as far as they ran.
fn logs(flags: &Flags, pod: &Pod, object: &Value) -> Vec<Part> {
    let lists = ["/status/initContainerStatuses", "/status/containerStatuses"];
    let mut parts = Vec::new();
    for status in lists.into_iter().flat_map(|list| items(object, list)) {
        let container = status.get("name").map_or("", text);
        let has = |state: &str| status.pointer(state).is_some();
        let ended = has("/lastState/terminated");
        let ran = ended || has("/state/running") || has("/state/terminated");
        for (end, flag, _) in [("log", "", ran), ("previous.log", "--previous", ended)]
            .into_iter()
            .filter(|log| log.2)
        {
            let (bytes, named) = (
                format!("--limit-bytes={LOG_BYTES}"),
                format!("--container={container}"),
            );
            let words = [
                "logs",
                "--tail=20000",
                &bytes,
                &named,
                flag,
                "--",
                &pod.name,
            ];
            let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
            let file = path(&[
                "nodes",
                &pod.node,
                "logs",
                &pod.name,
                &format!("{container}.{end}"),
            ]);
            parts.push(part(flags, file, &words, Form::Text));
        }
    }
    parts
}
