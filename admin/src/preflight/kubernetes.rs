//! The kubelet's alignment, and other plugins (K).

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::context::Context;
use super::engine::{Check, Fact, Findings, Judged, Unread, check, each, node};
use super::{host_process, read};
use crate::verdict::Verdict::{Fail, Warn};
use crate::verdict::{Finding, NO_NIC, words};
use pools::checkpoint::registered;

pub(super) fn checks() -> Vec<Check> {
    vec![
        check("K03", "node", Warn, "the kubelet aligns devices")
            .reads("flags, --config and --config-dir of the kubelet")
            .remedy(
                "topologyManagerPolicy: restricted or single-numa-node, topologyManagerScope: \
                 pod, cpuManagerPolicy: static",
            )
            .each(node, k03_alignment),
        check("K07", "NIC", Fail, "no NIC is offered twice")
            .reads("kubelet_internal_checkpoint")
            .remedy("take it out of one of the configurations (selectors), and restart that plugin")
            .all(k07_twice),
    ]
}

/// Key of `KubeletConfiguration`, flag, and the kubelet's default of each setting that decides on
/// alignment.
const SETTINGS: [[&str; 3]; 3] = [
    ["topologyManagerPolicy", "topology-manager-policy", "none"],
    [
        "topologyManagerScope",
        "topology-manager-scope",
        "container",
    ],
    ["cpuManagerPolicy", "cpu-manager-policy", "none"],
];

/// What the running kubelet was started with: its flags, and its files in their order.
fn configuration(context: &Context) -> Fact<(Vec<String>, Vec<Value>)> {
    let kubelets = host_process::find(context, &["kubelet"])?;
    let [kubelet] = kubelets.as_slice() else {
        return Err(Unread(format!("{} kubelets are running", kubelets.len())));
    };
    let line = read::required(context, &kubelet.directory.join("cmdline"))?;
    let flags: Vec<String> = line.split('\0').map(str::to_owned).collect();
    let mut paths: Vec<PathBuf> = flag(&flags, "config")
        .map(PathBuf::from)
        .into_iter()
        .collect();
    if let Some(directory) = flag(&flags, "config-dir") {
        let names = read::names(context, &context.path(directory))?.unwrap_or_default();
        let names = names.iter().filter(|name| name.ends_with(".conf"));
        paths.extend(names.map(|name| Path::new(directory).join(name)));
    }
    let file = |path: PathBuf| {
        let path = context.path(path);
        let parsed = serde_saphyr::from_str(&read::required(context, &path)?);
        let is_it = |value: &Value| value["kind"] == "KubeletConfiguration";
        let parsed: Option<Value> = parsed.ok().filter(is_it);
        parsed.ok_or_else(|| Unread(format!("{} is not a KubeletConfiguration", path.display())))
    };
    let files: Fact<Vec<Value>> = paths.into_iter().map(file).collect();
    Ok((flags, files?))
}

/// Flags win over files, later files over earlier ones.
fn settings(flags: &[String], files: &[Value]) -> [String; 3] {
    SETTINGS.map(|[key, name, default]| {
        let in_file = |file: &Value| Some(file.get(key)?.as_str()?.to_owned());
        let in_files = || files.iter().rev().find_map(in_file);
        let value = flag(flags, name).map(str::to_owned).or_else(in_files);
        let value = value.filter(|value| !value.is_empty());
        value.unwrap_or_else(|| default.to_owned())
    })
}

/// The value of `--name=value` or `--name value`.
fn flag<'a>(flags: &'a [String], name: &str) -> Option<&'a str> {
    let mut rest = flags.iter();
    while let Some(word) = rest.next() {
        let word = word
            .strip_prefix("--")
            .and_then(|word| word.strip_prefix(name));
        match word {
            Some("") => return rest.next().map(String::as_str),
            Some(value) if value.starts_with('=') => return value.get(1..),
            _ => {}
        }
    }
    None
}

fn k03_alignment(context: &Context, check: &Check, node: &()) -> Judged {
    if context.settings.in_pod {
        return Err(Finding::not_applicable("not checked with --pod"));
    }
    if context.machine()?.numa.nodes_with_cpus() <= 1 {
        return Ok(Finding::pass("one NUMA node"));
    }
    let (flags, files) = configuration(context)?;
    let [topology, scope, cpu] = settings(&flags, &files);
    let is_strict = ["restricted", "single-numa-node"].contains(&topology.as_str());
    let finding = if is_strict && cpu == "static" {
        Finding::pass("CPUs, GPUs and NICs of a container come from one NUMA node")
    } else if is_strict {
        Finding::warn(
            "devices are aligned, CPUs are not: cpuManagerPolicy is not static",
            "cpuManagerPolicy: static in the kubelet's configuration",
        )
    } else {
        check.fault(node, "GPU and NIC of a pod can be on different NUMA nodes")
    };
    Ok(finding
        .read("topologyManagerPolicy", topology)
        .read("topologyManagerScope", scope)
        .read("cpuManagerPolicy", cpu))
}

/// Resources that have a device of the same hardware.
fn k07_twice(context: &Context, check: &Check) -> Findings {
    let nics: Vec<String> = (context.machine()?.nics.iter())
        .map(|nic| nic.hca.id.to_string())
        .collect();
    if nics.is_empty() {
        return Err(Finding::not_applicable(NO_NIC));
    }
    let directory = &context.settings.device_plugin_dir;
    let file = directory.join("kubelet_internal_checkpoint");
    let registered = read::present(context, &file, registered(directory))?;
    let Some(registered) = registered else {
        let why = format!("no kubelet: {} has no checkpoint", directory.display());
        return Err(Finding::not_applicable(why));
    };
    let is_of = |id: &String, nic: &str| {
        let unit = id.parse::<hca::UnitId>().ok();
        unit.is_some_and(|unit| unit.hca().is_some_and(|hca| hca.to_string() == nic))
    };
    each(&nics, |nic| {
        let offers = |ids: &Vec<String>| ids.iter().any(|id| is_of(id, nic));
        let by = registered.iter().filter(|(_, ids)| offers(ids));
        let whole = by.clone().any(|(_, ids)| ids.contains(nic));
        let by: Vec<&str> = by.map(|(resource, _)| resource.as_str()).collect();
        let why = "two resources offer it, at least one of them whole: two pods could get it";
        let finding = match by.len() > 1 && whole {
            true => check.fault(nic, why),
            false => Finding::pass("offered once, or shared by all"),
        };
        Ok(finding.read("resources", words(&by, ", ")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_the_kubelet_beat_its_file() {
        let file = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
            cpuManagerPolicy: static\ntopologyManagerPolicy: best-effort\n";
        let file: Value = serde_saphyr::from_str(file).unwrap();
        let with = |flags: &[&str]| {
            let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
            settings(&flags, std::slice::from_ref(&file))
        };
        assert_eq!(
            with(&["kubelet", "--v=2"]),
            ["best-effort", "container", "static"]
        );
        let flags = [
            "kubelet",
            "--topology-manager-policy",
            "restricted",
            "--topology-manager-scope=pod",
        ];
        assert_eq!(with(&flags), ["restricted", "pod", "static"]);
    }
}
