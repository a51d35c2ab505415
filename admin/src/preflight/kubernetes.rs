//! The kubelet's alignment, and other plugins (K).

use std::path::Path;

use serde::Deserialize;

use super::context::Context;
use super::engine::{Check, Fact, Findings, Judged, Unread, each, judge, node};
use super::{host_process, read};
use crate::verdict::Verdict::{Fail, Warn};
use crate::verdict::{Finding, NO_NIC, words};
use rdma_device_plugin::registered;

pub(super) fn checks() -> Vec<Check> {
    vec![
        Check {
            id: "K03",
            title: "the kubelet aligns devices",
            subject: "node",
            reads: "flags, --config and --config-dir of the kubelet",
            severity: Warn,
            remedy: "topologyManagerPolicy: restricted or single-numa-node, topologyManagerScope: pod, \
                cpuManagerPolicy: static",
            judge: judge(node, k03_alignment),
        },
        Check {
            id: "K07",
            title: "no NIC is offered twice",
            subject: "NIC",
            reads: "kubelet_internal_checkpoint",
            severity: Fail,
            remedy: "take it out of one of the configurations (selectors), and restart that plugin",
            judge: Box::new(k07_twice),
        },
    ]
}

/// The part of `KubeletConfiguration` that decides on alignment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Policies {
    cpu_manager_policy: Option<String>,
    topology_manager_policy: Option<String>,
    topology_manager_scope: Option<String>,
}

impl Policies {
    /// What `later` says counts.
    fn or(self, later: Self) -> Self {
        let set = |value: Option<String>| value.filter(|value| !value.is_empty());
        Self {
            cpu_manager_policy: set(later.cpu_manager_policy).or(self.cpu_manager_policy),
            topology_manager_policy: set(later.topology_manager_policy)
                .or(self.topology_manager_policy),
            topology_manager_scope: set(later.topology_manager_scope)
                .or(self.topology_manager_scope),
        }
    }

    fn of_flags(flags: &[String]) -> Self {
        let value = |name| flag(flags, name).map(str::to_owned);
        Self {
            cpu_manager_policy: value("cpu-manager-policy"),
            topology_manager_policy: value("topology-manager-policy"),
            topology_manager_scope: value("topology-manager-scope"),
        }
    }
}

/// Settings of the running kubelet: its files in their order, then its flags.
fn policies(context: &Context) -> Fact<Policies> {
    let kubelets = host_process::find(context, &["kubelet"])?;
    let [kubelet] = kubelets.as_slice() else {
        return Err(Unread(format!("{} kubelets are running", kubelets.len())));
    };
    let line = read::required(context, &kubelet.directory.join("cmdline"))?;
    let flags: Vec<String> = line.split('\0').map(str::to_owned).collect();
    let mut policies = Policies::default();
    if let Some(file) = flag(&flags, "config") {
        policies = policies.or(file_of_kubelet(context, Path::new(file))?);
    }
    // Drop-in files of the kubelet, in the order of their names.
    if let Some(directory) = flag(&flags, "config-dir") {
        let names = read::names(context, &context.path(directory))?.unwrap_or_default();
        for name in names.iter().filter(|name| name.ends_with(".conf")) {
            policies = policies.or(file_of_kubelet(context, &Path::new(directory).join(name))?);
        }
    }
    Ok(policies.or(Policies::of_flags(&flags)))
}

fn file_of_kubelet(context: &Context, path: &Path) -> Fact<Policies> {
    let path = context.path(path);
    let text = read::required(context, &path)?;
    let parsed = serde_saphyr::from_str(&text);
    parsed.map_err(|error| Unread(format!("cannot read {}: {error}", path.display())))
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
    if context.snapshot.machine.numa.nodes_with_cpus() <= 1 {
        return Ok(Finding::pass("one NUMA node"));
    }
    let policies = policies(context)?;
    // The kubelet's defaults: all that could set these was read.
    let or = |value: Option<String>, default: &str| value.unwrap_or_else(|| default.to_owned());
    let topology = or(policies.topology_manager_policy, "none");
    let scope = or(policies.topology_manager_scope, "container");
    let cpu = or(policies.cpu_manager_policy, "none");
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
    let nics: Vec<String> = (context.snapshot.machine.nics.iter())
        .map(|nic| nic.hca.to_string())
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
        let file: Policies = serde_saphyr::from_str(file).unwrap();
        let with = |flags: &[&str]| {
            let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
            let Policies {
                cpu_manager_policy,
                topology_manager_policy,
                topology_manager_scope,
            } = file.clone().or(Policies::of_flags(&flags));
            [
                cpu_manager_policy,
                topology_manager_policy,
                topology_manager_scope,
            ]
            .map(Option::unwrap_or_default)
        };
        assert_eq!(with(&["kubelet", "--v=2"]), ["static", "best-effort", ""]);
        let flags = [
            "kubelet",
            "--topology-manager-policy",
            "restricted",
            "--topology-manager-scope=pod",
        ];
        assert_eq!(with(&flags), ["static", "restricted", "pod"]);
    }
}
