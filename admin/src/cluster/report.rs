//! What a report has of the cluster: its objects as far as they are listed here, and of each node the answers,
//! the logs of our containers and the pods that request our resources.

use anyhow::Result;
use rdma_device_plugin::config;
use serde_json::Value;

use super::Flags;
use super::ask::{CONTAINER, Pod, chosen};
use crate::documents::name_of;
use crate::kubectl::{BLOCKS, RANGES};
use crate::output::chain;
use crate::support::archive::path;
use crate::support::{Collection, Form, LOG_BYTES, Part, QUESTIONS, Source, questions};

/// Fields of our own DaemonSet and pods. Values of environment variables are left out.
const OURS: [&str; 31] = [
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "metadata.labels",
    "metadata.creationTimestamp",
    "metadata.deletionTimestamp",
    "metadata.generation",
    "spec.nodeName",
    "spec.hostNetwork",
    "spec.updateStrategy",
    "spec.initContainers.name",
    "spec.initContainers.image",
    "spec.initContainers.args",
    "spec.containers.name",
    "spec.containers.image",
    "spec.containers.args",
    "spec.containers.env.name",
    "spec.containers.env.valueFrom",
    "spec.containers.resources",
    "spec.template.spec.nodeSelector",
    "spec.template.spec.tolerations",
    "spec.template.spec.initContainers.args",
    "spec.template.spec.containers.name",
    "spec.template.spec.containers.image",
    "spec.template.spec.containers.args",
    "spec.template.spec.containers.env.name",
    "spec.template.spec.containers.env.valueFrom",
    "spec.template.spec.containers.resources",
    "spec.template.spec.volumes.configMap.name",
    "spec.template.spec.volumes.hostPath",
    "status",
];
/// Fields of pods that request our resources. Their arguments and last words can have secrets.
const PODS: [&str; 24] = [
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "metadata.labels",
    "metadata.creationTimestamp",
    "metadata.deletionTimestamp",
    "metadata.annotations.k8s.v1.cni.cncf.io/networks",
    "metadata.annotations.k8s.v1.cni.cncf.io/network-status",
    "spec.nodeName",
    "spec.hostNetwork",
    "spec.containers.name",
    "spec.containers.image",
    "spec.containers.resources",
    "spec.initContainers.name",
    "spec.initContainers.resources",
    "status.phase",
    "status.reason",
    "status.message",
    "status.conditions",
    "status.containerStatuses.name",
    "status.containerStatuses.restartCount",
    "status.containerStatuses.state.waiting",
    "status.containerStatuses.state.terminated.reason",
    "status.containerStatuses.state.terminated.exitCode",
];
const NODES: [&str; 10] = [
    "metadata.name",
    "metadata.uid",
    "metadata.labels",
    "spec.taints",
    "spec.unschedulable",
    "status.addresses",
    "status.allocatable",
    "status.capacity",
    "status.conditions",
    "status.nodeInfo",
];
const NETWORKS: [&str; 4] = [
    "metadata.name",
    "metadata.namespace",
    "metadata.annotations.k8s.v1.cni.cncf.io/resourceName",
    "spec.config",
];
const BLOCK: [&str; 6] = [
    "metadata.name",
    "metadata.uid",
    "metadata.creationTimestamp",
    "metadata.deletionTimestamp",
    "spec",
    "status",
];
const CONFIGURATION: [&str; 4] = [
    "metadata.name",
    "metadata.namespace",
    "data.config.yaml",
    "data.policy.json",
];
const EVENTS: [&str; 11] = [
    "metadata.namespace",
    "involvedObject",
    "type",
    "reason",
    "message",
    "count",
    "firstTimestamp",
    "lastTimestamp",
    "eventTime",
    "source",
    "reportingComponent",
];

fn every(_: &Value, _: &Collection) -> bool {
    true
}

/// A pod that requests a resource of ours.
fn is_user(pod: &Value, collection: &Collection) -> bool {
    let containers = ["/spec/containers", "/spec/initContainers"].map(|list| items(pod, list));
    let requests = containers
        .into_iter()
        .flatten()
        .filter_map(|one| one.pointer("/resources/limits")?.as_object());
    requests
        .flat_map(|limits| limits.keys())
        .any(|resource| collection.resources.contains(resource))
}

/// An event of our objects, or of a pod that requests a resource of ours.
fn is_of_interest(event: &Value, collection: &Collection) -> bool {
    let object = |key: &str| {
        let value = event.pointer(&format!("/involvedObject/{key}"));
        value.and_then(Value::as_str).unwrap_or_default()
    };
    collection.uids.contains(object("uid"))
        || object("apiVersion").starts_with("rdma-netdev.io/")
        // Of a pod that was replaced.
        || object("name").starts_with(&format!("{CONTAINER}-"))
}

fn items<'a>(value: &'a Value, list: &str) -> impl Iterator<Item = &'a Value> {
    value
        .pointer(list)
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
}

fn uids(value: &Value) -> impl Iterator<Item = String> {
    let uid = |item: &Value| item.pointer("/metadata/uid")?.as_str().map(str::to_owned);
    items(value, "/items").filter_map(uid)
}

fn part(file: &str, arguments: &[&str], form: Form) -> Part {
    Part {
        file: file.to_owned(),
        arguments: arguments.iter().map(|&word| word.to_owned()).collect(),
        form,
    }
}

fn get(file: &str, what: &[&str], form: Form) -> Part {
    part(file, &[&["get"], what, &["--output=json"]].concat(), form)
}

/// Collects everything. What cannot be read is a part that is missing.
///
/// # Errors
/// The archive cannot be written.
pub(super) async fn collect(flags: &Flags, to: &mut Collection) -> Result<()> {
    let source = Source {
        program: flags.kubectl.kubectl.clone(),
        flags: flags.kubectl.arguments(),
        timeout: flags.timeout(),
        parallel: usize::from(flags.parallel),
    };
    let selector = format!("--selector={}", flags.selector);
    let ours = |kind: &'static str| {
        let get = get(
            &format!("cluster/{kind}.json"),
            &[kind, &selector],
            Form::Objects(every, &OURS),
        );
        vec![get]
    };
    let sets = to.gather(&source, ours("daemonsets")).await?;
    let pods = to.gather(&source, ours("pods")).await?;
    to.uids = sets
        .iter()
        .chain(&pods)
        .flat_map(|(_, list)| uids(list))
        .collect();
    collect_configurations(&source, &sets, to).await?;

    let networks = "network-attachment-definitions.k8s.cni.cncf.io";
    let objects = vec![
        part(
            "cluster/version.json",
            &["version", "--output=json"],
            Form::Document,
        ),
        get(
            "cluster/nodes.json",
            &["nodes"],
            Form::Objects(every, &NODES),
        ),
        get(
            "cluster/networks.json",
            &[networks, "--all-namespaces"],
            Form::Objects(every, &NETWORKS),
        ),
        get(
            "cluster/addressranges.json",
            &[RANGES],
            Form::Objects(every, &BLOCK),
        ),
        get(
            "cluster/addressblocks.json",
            &[BLOCKS],
            Form::Objects(every, &BLOCK),
        ),
        pods_of("cluster/pending-pods.json", ""),
    ];
    let mut users = to.gather(&source, objects).await?;
    users.retain(|(file, _)| file.ends_with("-pods.json"));
    for (_, list) in &pods {
        users.extend(collect_nodes(flags, &source, list, to).await?);
    }

    to.uids
        .extend(users.iter().flat_map(|(_, list)| uids(list)));
    let events = |file, scope: &[&str]| {
        get(
            file,
            &[&["events"], scope].concat(),
            Form::Objects(is_of_interest, &EVENTS),
        )
    };
    let of_pods = [
        "--all-namespaces",
        "--field-selector=involvedObject.kind=Pod",
    ];
    let events = vec![
        events("cluster/events.json", &[]),
        events("cluster/pod-events.json", &of_pods),
    ];
    to.gather(&source, events).await.map(drop)
}

/// Our configurations, and which resources they offer.
async fn collect_configurations(
    source: &Source,
    sets: &[(String, Value)],
    to: &mut Collection,
) -> Result<()> {
    let sets = sets.iter().flat_map(|(_, list)| items(list, "/items"));
    let volumes = sets.flat_map(|set| items(set, "/spec/template/spec/volumes"));
    let mut names: Vec<&str> = volumes
        .filter_map(|volume| volume.pointer("/configMap/name")?.as_str())
        .collect();
    names.sort_unstable();
    names.dedup();
    let form = Form::Objects(every, &CONFIGURATION);
    let part = |name: &&str| Part {
        file: path(&["cluster", &format!("configmap-{name}.json")]),
        arguments: ["get", "configmaps", "--output=json", "--", name]
            .map(str::to_owned)
            .into(),
        form,
    };
    for (_, list) in to.gather(source, names.iter().map(part).collect()).await? {
        for text in
            items(&list, "/items").filter_map(|map| map.pointer("/data/config.yaml")?.as_str())
        {
            // A wrong configuration is in the archive, and offers nothing.
            let pools = config::parse(text)
                .map(|config| config.pools)
                .unwrap_or_default();
            to.resources
                .extend(pools.iter().map(|pool| pool.resource.to_string()));
        }
    }
    Ok(())
}

/// What each node has; returns its pods that request our resources.
async fn collect_nodes(
    flags: &Flags,
    source: &Source,
    list: &Value,
    to: &mut Collection,
) -> Result<Vec<(String, Value)>> {
    let pods = match chosen(flags, list) {
        Ok(pods) => pods,
        Err(error) => {
            to.add(
                "nodes".to_owned(),
                "the daemon's pods".to_owned(),
                Err(chain(&error)),
                None,
            )?;
            return Ok(Vec::new());
        }
    };
    let ask = |pod: &Pod, list: &[&str]| {
        let exec = ["exec", &pod.name, "--container", CONTAINER, "--", "rdmactl"];
        questions(&pod.node, list, &exec)
    };
    let (first, rest) = QUESTIONS.split_at(1);
    let mut asked = Vec::new();
    for pod in &pods {
        match &pod.obstacle {
            None => asked.extend(ask(pod, first)),
            Some(why) => {
                let file = path(&["nodes", &pod.node, "answers"]);
                to.add(file, format!("pod {}", pod.name), Err(why.clone()), None)?;
            }
        }
    }
    // A node that does not answer costs its time once.
    let files: Vec<String> = asked.iter().map(|part| part.file.clone()).collect();
    let answered = to.gather(source, asked).await?;
    let mut parts = Vec::new();
    let reachable = pods.iter().filter(|pod| pod.obstacle.is_none());
    for (pod, file) in reachable.zip(&files) {
        if answered.iter().any(|(answered, _)| answered == file) {
            parts.extend(ask(pod, rest));
        }
    }
    for pod in &pods {
        parts.push(pods_of(
            &path(&["nodes", &pod.node, "users-pods.json"]),
            &pod.node,
        ));
        let object = items(list, "/items").find(|object| name_of(object) == pod.name);
        parts.extend(object.into_iter().flat_map(|object| logs(pod, object)));
    }
    to.gather(source, parts).await
}

/// Pods that request our resources and are on this node; on no node yet for "".
fn pods_of(file: &str, node: &str) -> Part {
    let node = format!("--field-selector=spec.nodeName={node}");
    get(
        file,
        &["pods", "--all-namespaces", &node],
        Form::Objects(is_user, &PODS),
    )
}

/// Logs of a pod's containers, as far as they ran.
fn logs(pod: &Pod, object: &Value) -> Vec<Part> {
    let lists = ["/status/initContainerStatuses", "/status/containerStatuses"];
    let mut parts = Vec::new();
    for status in lists.into_iter().flat_map(|list| items(object, list)) {
        let name = status["name"].as_str().unwrap_or_default();
        let ended = status.pointer("/lastState/terminated").is_some();
        let runs = ["/state/running", "/state/terminated"];
        let ran = ended || runs.iter().any(|state| status.pointer(state).is_some());
        for (log, flag) in [("log", None), ("previous.log", Some("--previous"))] {
            if !ran || (flag.is_some() && !ended) {
                continue;
            }
            let container = format!("--container={name}");
            let bytes = format!("--limit-bytes={LOG_BYTES}");
            let before = ["logs", "--tail=20000", &bytes, &container];
            let words = before.into_iter().chain(flag).chain(["--", &pod.name]);
            let file = path(&[
                "nodes",
                &pod.node,
                "logs",
                &pod.name,
                &format!("{name}.{log}"),
            ]);
            parts.push(part(&file, &words.collect::<Vec<_>>(), Form::Text));
        }
    }
    parts
}
