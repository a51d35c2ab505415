//! Reads the kubelet's directories, PodResources, the CNI directories and the node's policy.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use ipam::store::Store;
use kubelet_api::client;
use nix::unistd::{AccessFlags, access};
use node::cni_program;
use node::identity::NodeIdentity;
use node::policy::Policy;
use serde::Deserialize;

use super::{Facts, Opened, PluginDir, Policies};
use crate::preflight::context::{Context, Settings, mounted};
use rdma_device_plugin::{files, registered};

/// Reads the host.
pub(crate) fn read(context: &Context) -> Facts {
    let settings = &context.settings;
    let nics = context.snapshot.machine.nics.iter();
    let program = |name: &&str| {
        let version = cni_program::version_of(&settings.cni_bin_dir.join(name));
        ((*name).to_owned(), version)
    };
    Facts {
        kubelet: settings.kubelet_root_dir.is_dir(),
        plugin_dir: plugin_dir(&settings.device_plugin_dir),
        pod_resources: client::ask(&settings.kubelet_root_dir).map(drop),
        policies: policies(context),
        numa_nodes_with_cpus: context.snapshot.machine.numa.nodes_with_cpus(),
        programs_in_sight: in_sight(settings, &settings.cni_bin_dir),
        configurations_in_sight: in_sight(settings, &settings.cni_conf_dir),
        registered: registered(&settings.device_plugin_dir),
        nics: nics.map(|nic| nic.hca.to_string()).collect(),
        programs: cni_program::NAMES.iter().map(program).collect(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        cni_configurations: files::names(&settings.cni_conf_dir),
        stores: stores(context),
    }
}

/// In a container only what is mounted is in sight: a directory that is not there says nothing
/// about the node.
fn in_sight(settings: &Settings, directory: &Path) -> bool {
    settings.root == Path::new("/") || directory.is_dir()
}

fn plugin_dir(path: &Path) -> Option<PluginDir> {
    let socket = std::fs::metadata(path.join(kubelet_api::deviceplugin::KUBELET_SOCKET));
    path.is_dir().then(|| PluginDir {
        path: path.display().to_string(),
        writable: access(path, AccessFlags::W_OK).is_ok(),
        socket: socket.is_ok_and(|meta| meta.file_type().is_socket()),
    })
}

/// The part of `KubeletConfiguration` that matters here.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct KubeletConfiguration {
    cpu_manager_policy: Option<String>,
    topology_manager_policy: Option<String>,
    topology_manager_scope: Option<String>,
}

/// Settings from the kubelet's flags, and where those are silent from its file.
fn policies(context: &Context) -> Option<Policies> {
    let proc = &context.host.proc;
    let mut processes = files::processes(proc).into_iter();
    let kubelet = processes.find(|process| process.name == "kubelet");
    let flags = kubelet.and_then(|process| {
        let line = std::fs::read(proc.join(process.pid.to_string()).join("cmdline")).ok()?;
        let words = line.split(|byte| *byte == 0).map(String::from_utf8_lossy);
        Some(words.map(String::from).collect::<Vec<String>>())
    });
    let file = flags.as_deref().and_then(|flags| flag(flags, "config"));
    let file = match file {
        Some(file) => context.path(file),
        None => context.settings.kubelet_root_dir.join("config.yaml"),
    };
    let configuration = files::text(&file);
    if flags.is_none() && configuration.is_none() {
        return None;
    }
    let configuration = configuration.and_then(|text| serde_saphyr::from_str(&text).ok());
    let flags = flags.unwrap_or_default();
    Some(settings(&flags, &configuration.unwrap_or_default()))
}

fn settings(flags: &[String], file: &KubeletConfiguration) -> Policies {
    let chosen = |name: &str, value: &Option<String>, default: &str| {
        let value = flag(flags, name).or(value.as_deref());
        value
            .filter(|v| !v.is_empty())
            .unwrap_or(default)
            .to_owned()
    };
    let (cpu, topology) = (&file.cpu_manager_policy, &file.topology_manager_policy);
    Policies {
        cpu: chosen("cpu-manager-policy", cpu, "none"),
        topology: chosen("topology-manager-policy", topology, "none"),
        scope: chosen(
            "topology-manager-scope",
            &file.topology_manager_scope,
            "container",
        ),
    }
}

/// The value of `--name=value` or `--name value`.
fn flag<'a>(flags: &'a [String], name: &str) -> Option<&'a str> {
    let mut rest = flags.iter();
    while let Some(word) = rest.next() {
        match word
            .strip_prefix("--")
            .and_then(|word| word.strip_prefix(name))
        {
            Some("") => return rest.next().map(String::as_str),
            Some(value) if value.starts_with('=') => return value.get(1..),
            _ => {}
        }
    }
    None
}

/// Opens each store of the policy, without writing to it.
fn stores(context: &Context) -> Result<Vec<(String, Opened)>, String> {
    let mut policy = Policy::load(&context.settings.policy).map_err(|error| error.to_string())?;
    let root = &context.settings.root;
    for store in policy.stores.values_mut() {
        store.directory = mounted(root, &store.directory);
    }
    policy.state_dir = mounted(root, &policy.state_dir);
    let node = NodeIdentity::read(&context.settings.root, &policy.node_name(None));
    let open = |name: &String| -> Opened {
        let remedy = "mount the host's /proc, or name the node in its policy";
        let node = (node.as_ref()).map_err(|error| (error.to_string(), remedy.to_owned()))?;
        match Store::open_existing(&policy, name, node.clone()) {
            Ok(Some(_)) => Ok("it is there, and it is the one this node knows".to_owned()),
            Ok(None) => Ok("none yet: it is made at the first use".to_owned()),
            Err(error) => Err((error.to_string(), error.remedy().to_owned())),
        }
    };
    let stores = policy.stores.keys();
    Ok(stores.map(|name| (name.clone(), open(name))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn flags_of_the_kubelet_beat_its_file() {
        let file = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
            cpuManagerPolicy: static\ntopologyManagerPolicy: best-effort\n";
        let file: KubeletConfiguration = serde_saphyr::from_str(file).unwrap();
        let read = settings(&words(&["kubelet", "--v=2"]), &file);
        assert_eq!(
            (read.cpu.as_str(), read.topology.as_str()),
            ("static", "best-effort")
        );
        assert_eq!(read.scope, "container");
        let flags = [
            "kubelet",
            "--topology-manager-policy",
            "restricted",
            "--topology-manager-scope=pod",
        ];
        let read = settings(&words(&flags), &file);
        assert_eq!(
            (read.topology.as_str(), read.scope.as_str()),
            ("restricted", "pod")
        );
    }
}
