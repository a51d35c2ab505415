//! What a report has of the cluster: its objects as far as they are listed here, and of each node the answers,
//! the logs of our containers and the pods that request our resources.

use std::collections::BTreeSet;

use anyhow::Result;
use rdma_device_plugin::config;
use serde_json::Value;

use super::Flags;
use super::ask::{CONTAINER, Pod, chosen};
use crate::documents::{name_of, text_at};
use crate::kubectl::{BLOCKS, NETWORKS, NODES, RANGES};
use crate::output::chain;
use crate::support::{Collection, Form, LOG_BYTES, Part, path, questions};

/// Fields of our own DaemonSet and pods, by their template.
const OURS: &str = "spec.nodeName spec.updateStrategy spec.template.spec.nodeSelector \
    spec.template.spec.tolerations spec.template.spec.initContainers.args \
    spec.template.spec.containers.name spec.template.spec.containers.image \
    spec.template.spec.containers.args spec.template.spec.containers.resources \
    spec.template.spec.containers.env.name spec.template.spec.containers.env.valueFrom \
    spec.template.spec.volumes.hostPath spec.template.spec.volumes.configMap.name status";
/// Of pods that request our resources: their arguments and last words can have secrets.
const USERS: &str = "spec.nodeName spec.hostNetwork spec.containers.name spec.containers.image \
    spec.containers.resources spec.initContainers.name spec.initContainers.resources \
    status.phase status.reason status.message status.conditions \
    status.containerStatuses.name status.containerStatuses.restartCount \
    status.containerStatuses.state.waiting.reason status.containerStatuses.state.terminated.reason \
    status.containerStatuses.state.terminated.exitCode";
const NODE: &str = "spec.taints spec.unschedulable status.addresses status.allocatable \
    status.capacity status.conditions status.nodeInfo";
const EVENT: &str = "involvedObject type reason message count firstTimestamp lastTimestamp \
    eventTime source reportingComponent";

fn is_configuration(map: &Value, _: &Collection) -> bool {
    let has = |key: &str| map.pointer(key).is_some();
    has("/data/config.yaml") && has("/data/policy.json")
}

/// A pod that requests a resource of ours.
fn is_user(pod: &Value, collection: &Collection) -> bool {
    let containers = ["/spec/containers", "/spec/initContainers"].map(|list| items(pod, list));
    containers.into_iter().flatten().any(|container| {
        let limits = container.pointer("/resources/limits");
        let mut names = limits
            .and_then(Value::as_object)
            .into_iter()
            .flat_map(|limits| limits.keys());
        names.any(|name| collection.resources.contains(name))
    })
}

/// An event of our objects, or of a pod that requests a resource of ours.
fn is_of_interest(event: &Value, collection: &Collection) -> bool {
    let object = |key: &str| text_at(event, &format!("/involvedObject/{key}"));
    // Also of a pod that was replaced.
    let is_ours = object("apiVersion").starts_with("rdma-netdev.io/")
        || object("name").starts_with(&format!("{CONTAINER}-"));
    // What a user's probe or hook prints can have secrets.
    let of_output = [
        "Unhealthy",
        "ProbeWarning",
        "FailedPostStartHook",
        "FailedPreStopHook",
    ];
    let is_output = of_output.contains(&text_at(event, "/reason"));
    is_ours || (collection.uids.contains(object("uid")) && !is_output)
}

/// A network of other plugins can have their secrets.
fn is_network(definition: &Value, _: &Collection) -> bool {
    let config = text_at(definition, "/spec/config");
    ["rdma-netdev", "rdma-ipam"]
        .iter()
        .any(|ours| config.contains(ours))
}

fn items<'a>(value: &'a Value, list: &str) -> impl Iterator<Item = &'a Value> {
    let items = value.pointer(list).and_then(Value::as_array);
    items.into_iter().flatten()
}

fn part(flags: &Flags, file: &str, words: &[&str], form: Form) -> Part {
    let mut argv = vec![flags.kubectl.kubectl.clone()];
    argv.extend(flags.kubectl.arguments());
    argv.extend(words.iter().map(|&word| word.to_owned()));
    let file = file.to_owned();
    Part { file, argv, form }
}

/// Collects everything. What cannot be read is a part that is missing.
///
/// # Errors
/// The archive cannot be written.
pub(super) async fn collect(flags: &Flags, to: &mut Collection) -> Result<()> {
    (to.timeout, to.parallel) = (flags.timeout(), usize::from(flags.parallel));
    let selector = format!("--selector={}", flags.selector);
    let every = |_: &Value, _: &Collection| true;
    let get = |what: &str, scope: &[&str], fields, is_meant| {
        let name = what.split('.').next().unwrap_or_default();
        let words = [&["get", what], scope, &["--output=json"]].concat();
        let file = format!("cluster/{name}.json");
        part(flags, &file, &words, Form::Objects(fields, is_meant))
    };
    let version = ["version", "--output=json"];
    let (here, ours, everywhere): (&[_], _, &[_]) = (&[], &[&*selector][..], &["--all-namespaces"]);
    let objects = to.gather(vec![
        part(flags, "cluster/version.json", &version, Form::Document),
        get("daemonsets", ours, OURS, every),
        get("pods", ours, OURS, every),
        get(
            "configmaps",
            here,
            "data.config.yaml data.policy.json",
            is_configuration,
        ),
        get(NODES, here, NODE, every),
        get(NETWORKS, everywhere, "spec.config", is_network),
        get(RANGES, here, "spec status", every),
        get(BLOCKS, here, "spec status", every),
    ]);
    let objects = objects.await?;
    let list = |name: &str| {
        objects
            .iter()
            .find(|(file, _)| file == name)
            .map(|(_, list)| list)
    };
    let configurations = list("cluster/configmaps.json")
        .into_iter()
        .flat_map(|list| items(list, "/items"));
    for map in configurations {
        // A wrong configuration is in the archive, and offers nothing.
        let pools = config::parse(text_at(map, "/data/config.yaml")).map(|config| config.pools);
        let pools = pools.into_iter().flatten();
        to.resources
            .extend(pools.map(|pool| pool.resource.to_string()));
    }
    let mut of_interest = to
        .gather(vec![users_of(flags, "cluster/pending-pods.json", "")])
        .await?;
    if let Some(list) = list("cluster/pods.json") {
        match chosen(flags, list) {
            Ok(pods) => of_interest.extend(collect_nodes(flags, &pods, list, to).await?),
            Err(error) => to.lack("nodes", "the daemon's pods", &chain(&error)),
        }
    }
    of_interest.extend(objects);
    let of_interest = of_interest
        .iter()
        .flat_map(|(_, list)| items(list, "/items"));
    to.uids = of_interest
        .map(|object| text_at(object, "/metadata/uid").to_owned())
        .collect();
    let events = get("events", everywhere, EVENT, is_of_interest);
    to.gather(vec![events]).await.map(drop)
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
        // A node has several while they are replaced.
        let is_alone = pods.iter().filter(|other| other.node == pod.node).count() == 1;
        let folder = match is_alone {
            true => pod.node.clone(),
            false => format!("{}-{}", pod.node, pod.name),
        };
        let exec = ["exec", &pod.name, "--container", CONTAINER, "--", "rdmactl"];
        let exec = part(flags, "", &exec, Form::Text).argv;
        let mut questions = questions(&folder, &exec);
        match &pod.obstacle {
            Some(why) => to.lack(&path(&["nodes", &folder]), &exec.join(" "), why),
            None => {
                rest.extend(questions.split_off(1));
                first.extend(questions);
            }
        }
        let users = path(&["nodes", &folder, "users.json"]);
        parts.push(users_of(flags, &users, &pod.node));
        let objects = items(list, "/items").filter(|object| name_of(object) == pod.name);
        parts.extend(objects.flat_map(|object| logs(flags, pod, object)));
    }
    // A node that does not answer costs its time once.
    let answered: BTreeSet<_> = to
        .gather(first)
        .await?
        .iter()
        .map(|(file, _)| directory(file))
        .collect();
    rest.retain(|part: &Part| answered.contains(&directory(&part.file)));
    parts.extend(rest);
    to.gather(parts).await
}

fn directory(file: &str) -> String {
    file.rsplit_once('/').unwrap_or_default().0.to_owned()
}

/// Pods that request our resources and are on this node; on no node yet for "".
fn users_of(flags: &Flags, file: &str, node: &str) -> Part {
    let node = format!("--field-selector=spec.nodeName={node}");
    let get = ["get", "pods", "--all-namespaces", &node, "--output=json"];
    part(flags, file, &get, Form::Objects(USERS, is_user))
}

/// Logs of a pod's containers, as far as they ran.
fn logs(flags: &Flags, pod: &Pod, object: &Value) -> Vec<Part> {
    let lists = ["/status/initContainerStatuses", "/status/containerStatuses"];
    let mut parts = Vec::new();
    for status in lists.into_iter().flat_map(|list| items(object, list)) {
        let name = text_at(status, "/name");
        let has = |state: &str| status.pointer(state).is_some();
        let ended = has("/lastState/terminated");
        let ran = ended || has("/state/running") || has("/state/terminated");
        let (bytes, container) = (
            format!("--limit-bytes={LOG_BYTES}"),
            format!("--container={name}"),
        );
        let mut add = |previous: &str, end: &str| {
            let words = [
                "logs",
                "--tail=20000",
                &bytes,
                previous,
                &container,
                "--",
                &pod.name,
            ];
            let file = path(&[
                "nodes",
                &pod.node,
                "logs",
                &pod.name,
                &format!("{name}.{end}"),
            ]);
            parts.push(part(flags, &file, &words, Form::Text));
        };
        if ran {
            add("--previous=false", "log");
        }
        if ended {
            add("--previous=true", "previous.log");
        }
    }
    parts
}
