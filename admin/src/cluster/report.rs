//! What a report has of the cluster: our objects, and of each node the answers and the logs of our containers.

use std::collections::BTreeSet;

use anyhow::Result;
use serde_json::{Value, json};

use super::Flags;
use super::ask::{CONTAINER, Pod, chosen, silent_nodes};
use crate::documents::{name_of, plugins, put, text_at};
use crate::kubectl::{NETWORKS, RDMA_NODES, SUBNETS};
use crate::output::chain;
use crate::report::{Collection, Form, LOG_BYTES, ReportPart, keep, path, questions};

/// Our containers. Those that others put into our pods are left out, with their logs.
const CONTAINERS: [&str; 3] = [CONTAINER, "rdma-agent", "install"];
/// Fields of our DaemonSet and pods, by their template.
const OURS: &str = "spec.nodeName spec.updateStrategy spec.template.spec.nodeSelector \
    spec.template.spec.tolerations spec.template.spec.initContainers.name \
    spec.template.spec.initContainers.args \
    spec.template.spec.containers.name spec.template.spec.containers.image \
    spec.template.spec.containers.args spec.template.spec.containers.resources \
    spec.template.spec.containers.env.name spec.template.spec.containers.env.valueFrom \
    spec.template.spec.volumes.hostPath spec.template.spec.volumes.configMap.name \
    spec.template.spec.volumes.projected.sources.configMap.name status";

fn ours(object: &Value) -> Option<Value> {
    let mut kept = keep(object, OURS);
    for list in [
        "/spec/template/spec/containers",
        "/spec/template/spec/initContainers",
        "/status/containerStatuses",
        "/status/initContainerStatuses",
    ] {
        if let Some(Value::Array(containers)) = kept.pointer_mut(list) {
            containers.retain(|one| CONTAINERS.contains(&text_at(one, "/name")));
        }
    }
    Some(kept)
}

fn configuration(map: &Value) -> Option<Value> {
    let has = |key: &str| map.pointer(key).is_some();
    let is_ours = has("/data/pools.json") && has("/data/policy.json");
    is_ours.then(|| keep(map, "data.pools.json data.policy.json"))
}

fn whole(object: &Value) -> Option<Value> {
    Some(keep(object, "spec status"))
}

/// Of a network what our plugins read: those of others can have secrets in their keys.
fn network(definition: &Value) -> Option<Value> {
    let read = |plugin: &Value| {
        let ipam = plugin.get("ipam").unwrap_or(&Value::Null);
        let [of_plugin, of_ipam] = [plugin, ipam].map(|one| text_at(one, "/type"));
        let is_ours = of_ipam == "rdma-ipam";
        let mut read = match of_plugin {
            "rdma-netdev" => known(plugin, &rdma_netdev::config::keys()),
            _ if is_ours => json!({"type": of_plugin}),
            _ => return None,
        };
        let ipam = if is_ours {
            known(ipam, &ipam::config::KEYS)
        } else {
            json!({"type": of_ipam})
        };
        put(&mut read, "ipam", ipam);
        Some(read)
    };
    let plugins: Vec<Value> = plugins(definition).iter().filter_map(read).collect();
    let mut kept = keep(definition, "");
    put(&mut kept, "plugins", json!(plugins));
    (!plugins.is_empty()).then_some(kept)
}

/// The keys that a program reads. `args`, `runtimeConfig` and `prevResult` are other programs' text.
fn known(section: &Value, keys: &[&str]) -> Value {
    const FOREIGN: [&str; 3] = ["args", "runtimeConfig", "prevResult"];
    let is_among = |key: &str, keys: &[&str]| keys.iter().any(|one| one.eq_ignore_ascii_case(key));
    let mut section = section.clone();
    if let Some(entries) = section.as_object_mut() {
        entries.retain(|key, _| is_among(key, keys) && !is_among(key, &FOREIGN));
    }
    section
}

fn items<'a>(value: &'a Value, list: &str) -> impl Iterator<Item = &'a Value> {
    let items = value.pointer(list).and_then(Value::as_array);
    items.into_iter().flatten()
}

fn part(flags: &Flags, file: &str, words: &[&str], form: Form) -> ReportPart {
    let mut argv = vec![flags.kubectl.kubectl.clone()];
    argv.extend(flags.kubectl.arguments());
    argv.extend(words.iter().map(|&word| word.to_owned()));
    let file = file.to_owned();
    ReportPart { file, argv, form }
}

/// Collects everything. What cannot be read is a part that is missing.
///
/// # Errors
/// The archive cannot be written.
pub(super) async fn collect(flags: &Flags, to: &mut Collection) -> Result<()> {
    (to.timeout, to.parallel) = (flags.timeout(), usize::from(flags.parallel));
    let selector = format!("--selector={}", flags.selector);
    let get = |what: &str, scope: &[&str], kept| {
        let name = what.split('.').next().unwrap_or_default();
        let words = [&["get", what], scope, &["--output=json"]].concat();
        let file = format!("cluster/{name}.json");
        part(flags, &file, &words, Form::Objects(kept))
    };
    let version = ["version", "--output=json"];
    let objects = to.gather(vec![
        part(flags, "cluster/version.json", &version, Form::Document),
        get("daemonsets", &[&selector], ours),
        get("pods", &[&selector], ours),
        get("configmaps", &[], configuration),
        get(NETWORKS, &["--all-namespaces"], network),
        get(SUBNETS, &[], whole),
        get(RDMA_NODES, &[], whole),
    ]);
    let objects = objects.await?;
    let mut lists = objects.iter();
    let Some((_, list)) = lists.find(|(file, _)| file == "cluster/pods.json") else {
        return Ok(());
    };
    match chosen(flags, list, &silent_nodes(flags).await) {
        Ok(pods) => collect_nodes(flags, &pods, list, to).await,
        Err(error) => {
            to.lack("nodes", "the daemon's pods", &chain(&error));
            Ok(())
        }
    }
}

/// What each node has.
async fn collect_nodes(
    flags: &Flags,
    pods: &[Pod],
    list: &Value,
    to: &mut Collection,
) -> Result<()> {
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
    rest.retain(|part: &ReportPart| answered.contains(&directory(&part.file)));
    parts.extend(rest);
    to.gather(parts).await.map(drop)
}

fn directory(file: &str) -> String {
    file.rsplit_once('/').unwrap_or_default().0.to_owned()
}

/// Logs of a pod's containers, as far as they ran.
fn logs(flags: &Flags, pod: &Pod, object: &Value) -> Vec<ReportPart> {
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
