//! A stand-in for Multus 4: a node's default CNI plugin that gives a pod its default network, then
//! each network of its annotation. [`run`] is one call.
//!
//! The device ID of the pod's resource goes into every plugin of the list as `deviceID` and
//! `pciBusID`, and into `runtimeConfig` for those with the capability. `CNI_ARGS` carries every `K8S_*`
//! pair twice. DEL works from a scratch file, in reverse, to the end. CHECK reaches no secondary
//! network; STATUS and GC only the default one. Directories of manifests and of Pod objects stand for
//! the API server.

mod conf;
mod conflist;
mod definition;
mod delegate;
mod devices;
mod selection;

use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use nix::sys::statfs::{NSFS_MAGIC, PROC_SUPER_MAGIC, statfs};
use serde_json::{Value, json};

use crate::kubelet::Pod;
use conf::Conf;
use conflist::Runtime;
use definition::Definitions;
use delegate::Delegate;
use devices::PodDevices;

/// What the runtime gave in the environment.
#[derive(Debug, Clone)]
pub struct Call {
    /// `CNI_COMMAND`.
    pub command: String,
    /// `CNI_CONTAINERID`.
    pub container_id: String,
    /// `CNI_NETNS`.
    pub netns: String,
    /// `CNI_IFNAME`.
    pub ifname: String,
    /// `CNI_ARGS`.
    pub args: String,
    /// `CNI_PATH`.
    pub path: OsString,
}

impl Call {
    /// The call in this process's environment.
    #[must_use]
    pub fn from_env() -> Self {
        let text = |name: &str| std::env::var(name).unwrap_or_default();
        Self {
            command: text("CNI_COMMAND"),
            container_id: text("CNI_CONTAINERID"),
            netns: text("CNI_NETNS"),
            ifname: text("CNI_IFNAME"),
            args: text("CNI_ARGS"),
            path: std::env::var_os("CNI_PATH").unwrap_or_default(),
        }
    }

    /// A value of `CNI_ARGS`; empty if it is not there.
    fn arg(&self, key: &str) -> &str {
        let pairs = self.args.split(';').filter_map(|pair| pair.split_once('='));
        pairs
            .filter(|(name, _)| *name == key)
            .map(|(_, value)| value)
            .next()
            .unwrap_or_default()
    }

    /// `CNI_ARGS` for delegates: Multus writes its own pairs and then appends
    /// those it was called with, so each is there twice.
    fn delegate_args(&self) -> String {
        let own = [
            "K8S_POD_NAMESPACE",
            "K8S_POD_NAME",
            "K8S_POD_INFRA_CONTAINER_ID",
            "K8S_POD_UID",
        ]
        .map(|key| format!("{key}={}", self.arg(key)));
        let given = self
            .args
            .split(';')
            .filter(|pair| pair.contains('='))
            .map(str::to_owned);
        let first = std::iter::once("IgnoreUnknown=true".to_owned());
        first.chain(own).chain(given).collect::<Vec<_>>().join(";")
    }
}

/// Fulfils one call; returns what belongs on stdout, if anything.
///
/// # Errors
/// What Multus would fail for; all of its errors have code 999.
pub fn run(call: &Call, stdin: &[u8]) -> Result<Option<Value>> {
    if call.command == "VERSION" {
        let versions = [
            "0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0",
        ];
        return Ok(Some(
            json!({ "cniVersion": "1.1.0", "supportedVersions": versions }),
        ));
    }
    let conf = Conf::read(stdin)?;
    match call.command.as_str() {
        "ADD" => add(call, &conf).map(Some),
        "DEL" => del(call, &conf).map(|()| None),
        // Only delegates written out in Multus' own configuration are checked; we have none.
        "CHECK" => Ok(None),
        "STATUS" | "GC" => {
            let default = Delegate::cluster_default(&conf)?;
            default.forward(&call.command, call, &conf).map(|()| None)
        }
        other => bail!("CNI_COMMAND {other:?} is unknown"),
    }
}

/// The error object for stdout.
#[must_use]
pub fn error_object(error: &anyhow::Error) -> Value {
    json!({ "cniVersion": "1.0.0", "code": 999, "msg": format!("{error:#}") })
}

fn add(call: &Call, conf: &Conf) -> Result<Value> {
    let mut delegates = vec![Delegate::cluster_default(conf)?];
    let who = format!(
        "[{}/{}/{}]",
        call.arg("K8S_POD_NAMESPACE"),
        call.arg("K8S_POD_NAME"),
        call.arg("K8S_POD_UID")
    );
    if !call.arg("K8S_POD_NAME").is_empty() {
        let pod = read_pod(call, conf).context(who.clone())?;
        let secondary = secondary(&pod, conf).with_context(|| format!("{who}: load delegates"))?;
        delegates.extend(secondary);
    }
    let scratch = scratch(call, conf);
    fs::create_dir_all(&conf.state_dir)
        .and_then(|()| fs::write(&scratch, serde_json::to_vec(&delegates)?))
        .with_context(|| format!("save the delegates in {}", scratch.display()))?;

    let mut results = Vec::new();
    for (index, delegate) in delegates.iter().enumerate() {
        let runtime = delegate.runtime(index, call, conf);
        let added = validate_ifname(&runtime).and_then(|()| delegate.add(&runtime, conf));
        match added {
            Ok(result) => results.push(result),
            Err(error) => {
                // Those before it and it itself; a failing DEL is not heard of.
                let _ = del_delegates(call, conf, delegates.get(..=index).unwrap_or_default());
                return Err(error.context(format!(
                    "{who}: error adding container to network {:?}",
                    delegate.name
                )));
            }
        }
    }
    let statuses =
        delegates
            .iter()
            .zip(&results)
            .enumerate()
            .flat_map(|(index, (delegate, result))| {
                delegate.statuses(&delegate.runtime(index, call, conf), result)
            });
    let status = status_path(call, conf);
    fs::write(
        &status,
        serde_json::to_vec_pretty(&statuses.collect::<Vec<_>>())?,
    )
    .with_context(|| format!("write network status {}", status.display()))?;
    results
        .into_iter()
        .next()
        .context("the default network gave no result")
}

fn del(call: &Call, conf: &Conf) -> Result<()> {
    if !call.netns.is_empty() {
        match statfs(Path::new(&call.netns)) {
            Ok(found) if found.filesystem_type() == NSFS_MAGIC => {}
            Ok(found) if found.filesystem_type() == PROC_SUPER_MAGIC => {}
            Ok(_) => bail!(
                "failed to open netns {:?}: not a network namespace",
                call.netns
            ),
            Err(nix::errno::Errno::ENOENT) => {}
            Err(errno) => bail!("failed to open netns {:?}: {errno}", call.netns),
        }
    }
    let scratch = scratch(call, conf);
    let delegates: Vec<Delegate> = match fs::read(&scratch) {
        Ok(text) => serde_json::from_slice(&text).or_else(|error| {
            // Multus removes the file all the same, so that the next DEL goes by the pod.
            let _ = fs::remove_file(&scratch);
            Err(error).with_context(|| format!("load {}", scratch.display()))
        })?,
        // Nothing to go by: an error would keep the sandbox for ever.
        Err(error) if error.kind() == ErrorKind::NotFound => match read_pod(call, conf) {
            Err(_) => return Ok(()),
            Ok(pod) => {
                let mut delegates = vec![Delegate::cluster_default(conf)?];
                delegates.extend(secondary(&pod, conf).unwrap_or_default());
                delegates
            }
        },
        Err(_) => return Ok(()),
    };
    let deleted = del_delegates(call, conf, &delegates);
    // Gone even after a failure, as in Multus: a second DEL starts from the pod.
    let _ = fs::remove_file(&scratch);
    let _ = fs::remove_file(status_path(call, conf));
    deleted
}

/// In reverse, all of them, whatever fails on the way.
fn del_delegates(call: &Call, conf: &Conf, delegates: &[Delegate]) -> Result<()> {
    let mut errors = Vec::new();
    for (index, delegate) in delegates.iter().enumerate().rev() {
        let runtime = delegate.runtime(index, call, conf);
        if let Err(error) = delegate.del(&runtime, conf) {
            errors.push(format!("{error:#}"));
        }
    }
    if errors.is_empty() {
        return Ok(());
    }
    bail!(errors.join(" / "))
}

fn secondary(pod: &Pod, conf: &Conf) -> Result<Vec<Delegate>> {
    let Some(annotation) = pod.metadata.annotations.get("k8s.v1.cni.cncf.io/networks") else {
        return Ok(Vec::new());
    };
    let selections = selection::parse(annotation, &pod.metadata.namespace)?;
    let definitions = Definitions::read(&conf.networks)?;
    let mut devices = None;
    let mut delegates = Vec::new();
    for selection in selections {
        let definition = definitions.get(&selection.namespace, &selection.name)?;
        let device = match definition.resource_name() {
            None => None,
            Some(resource) => {
                let devices = match &mut devices {
                    Some(devices) => devices,
                    none => none.insert(PodDevices::ask(&conf.pod_resources, pod)?),
                };
                devices.next(resource).map(|id| (resource.to_owned(), id))
            }
        };
        delegates.push(Delegate::secondary(selection, definition, device)?);
    }
    Ok(delegates)
}

fn read_pod(call: &Call, conf: &Conf) -> Result<Pod> {
    let (namespace, name) = (call.arg("K8S_POD_NAMESPACE"), call.arg("K8S_POD_NAME"));
    let path = conf.pods.join(format!("{namespace}_{name}.json"));
    let text = fs::read(&path).with_context(|| format!("get the pod from {}", path.display()))?;
    let pod: Pod = serde_json::from_slice(&text)
        .with_context(|| format!("get the pod from {}", path.display()))?;
    let uid = call.arg("K8S_POD_UID");
    if !uid.is_empty() && pod.metadata.uid != uid {
        bail!("expected pod UID {uid:?} but got {:?}", pod.metadata.uid);
    }
    Ok(pod)
}

/// Refuses an interface name that is taken, before the plugin is called.
fn validate_ifname(runtime: &Runtime) -> Result<()> {
    let shown = std::process::Command::new("nsenter")
        .arg(format!("--net={}", runtime.netns))
        .args(["ip", "link", "show", "dev", &runtime.ifname])
        .output()
        .context("search for the interface's name with nsenter and ip")?;
    if shown.status.success() {
        bail!("interface name {} already exists", runtime.ifname);
    }
    Ok(())
}

fn scratch(call: &Call, conf: &Conf) -> PathBuf {
    conf.state_dir.join(&call.container_id)
}

fn status_path(call: &Call, conf: &Conf) -> PathBuf {
    conf.state_dir
        .join(format!("{}.network-status", call.container_id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delegates_get_every_pair_twice_as_from_multus() {
        let call = Call {
            command: "ADD".to_owned(),
            container_id: "c".to_owned(),
            netns: String::new(),
            ifname: "eth0".to_owned(),
            args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=pod".to_owned(),
            path: OsString::new(),
        };
        assert_eq!(
            call.delegate_args(),
            "IgnoreUnknown=true;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=pod;\
             K8S_POD_INFRA_CONTAINER_ID=;K8S_POD_UID=;\
             IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=pod"
        );
    }
}
