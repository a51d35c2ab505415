//! One network of one pod.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::Call;
use super::conf::Conf;
use super::conflist::{self, Runtime};
use super::definition::{Definition, as_list};
use super::selection::Selection;

/// A list of plugins and what this pod adds to it; the scratch file is a list of these.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Delegate {
    /// `namespace/name` of the definition, or the default network's own name.
    pub(super) name: String,
    is_default: bool,
    conflist: Value,
    interface: Option<String>,
    /// What plugins with the capability get as `runtimeConfig`.
    capability_args: Map<String, Value>,
    /// The old way to ask for an address and a MAC, still in `CNI_ARGS`.
    legacy_args: Vec<String>,
    resource: Option<String>,
    device: Option<String>,
}

impl Delegate {
    /// The node's default network.
    pub(super) fn cluster_default(conf: &Conf) -> Result<Self> {
        let path = &conf.cluster_network;
        let text = fs::read(path).with_context(|| format!("read {}", path.display()))?;
        let config: Value =
            serde_json::from_slice(&text).with_context(|| format!("read {}", path.display()))?;
        let mut conflist = as_list(config, "default")?;
        if let Some(keys) = conflist.as_object_mut() {
            keys.entry("cniVersion")
                .or_insert_with(|| json!(conf.cni_version));
        }
        Ok(Self {
            name: conflist
                .get("name")
                .and_then(Value::as_str)
                .unwrap_or_default()
                .to_owned(),
            is_default: true,
            conflist,
            interface: None,
            capability_args: Map::new(),
            legacy_args: Vec::new(),
            resource: None,
            device: None,
        })
    }

    /// A network of the annotation, with the device it is to have.
    pub(super) fn secondary(
        selection: Selection,
        definition: &Definition,
        device: Option<(String, String)>,
    ) -> Result<Self> {
        let mut conflist = definition.conflist()?;
        let plugins = conflist.get_mut("plugins").and_then(Value::as_array_mut);
        for plugin in plugins
            .into_iter()
            .flatten()
            .filter_map(Value::as_object_mut)
        {
            if let Some((_, id)) = &device {
                plugin.insert("deviceID".to_owned(), json!(id));
                plugin.insert("pciBusID".to_owned(), json!(id));
            }
            if let Some(cni_args) = &selection.cni_args {
                let args = plugin.entry("args").or_insert_with(|| json!({}));
                let cni = args.as_object_mut().map(|args| args.entry("cni"));
                let cni = cni.map(|cni| cni.or_insert_with(|| json!({})));
                if let Some(cni) = cni.and_then(Value::as_object_mut) {
                    cni.extend(cni_args.clone());
                }
            }
        }
        let mut legacy_args = Vec::new();
        if let Some(mac) = &selection.mac {
            legacy_args.push(format!("MAC={mac}"));
        }
        if let Some(ips) = &selection.ips {
            legacy_args.push(format!("IP={}", ips.join(",")));
        }
        let mut capability_args = Map::new();
        let mut offer = |key: &str, value: Option<Value>| {
            if let Some(value) = value {
                capability_args.insert(key.to_owned(), value);
            }
        };
        offer("ips", selection.ips.map(Value::from));
        offer("mac", selection.mac.map(Value::from));
        offer("infinibandGUID", selection.infiniband_guid.map(Value::from));
        offer("deviceID", device.as_ref().map(|(_, id)| json!(id)));
        let (resource, device) = device.unzip();
        Ok(Self {
            name: format!("{}/{}", selection.namespace, selection.name),
            is_default: false,
            conflist,
            interface: selection.interface,
            capability_args,
            legacy_args,
            resource,
            device,
        })
    }

    /// What the plugins of the network are called with; `index` counts the pod's networks.
    pub(super) fn runtime(&self, index: usize, call: &Call, conf: &Conf) -> Runtime {
        let ifname = match &self.interface {
            Some(interface) => interface.clone(),
            None if self.is_default => call.ifname.clone(),
            None => format!("net{index}"),
        };
        let mut capability_args = self.capability_args.clone();
        if self.device.is_some() {
            let path = self.cni_device_info(&call.container_id, &ifname, conf);
            capability_args.insert("CNIDeviceInfoFile".to_owned(), json!(path));
        }
        let mut args = call.delegate_args();
        for pair in &self.legacy_args {
            args = format!("{args};{pair}");
        }
        let own = conf.bin_dir.iter().cloned();
        let path = own.chain(std::env::split_paths(&call.path));
        Runtime {
            container_id: call.container_id.clone(),
            netns: call.netns.clone(),
            ifname,
            args,
            path: path.collect(),
            capability_args,
            cache: conf.state_dir.join("results"),
        }
    }

    pub(super) fn add(&self, runtime: &Runtime, conf: &Conf) -> Result<Value> {
        if let (Some(resource), Some(device)) = (&self.resource, &self.device) {
            let name = format!("{resource}-{device}-device.json").replace('/', "-");
            let from = conf.device_info.join("dp").join(name);
            let to = self.cni_device_info(&runtime.container_id, &runtime.ifname, conf);
            // A device plugin need not write one; Multus goes on without.
            if from.is_file() {
                let directory = to.parent().context("device info has no directory")?;
                fs::create_dir_all(directory)
                    .and_then(|()| fs::copy(&from, &to))
                    .with_context(|| format!("copy {}", from.display()))?;
            }
        }
        conflist::add(&self.conflist, runtime)
    }

    pub(super) fn del(&self, runtime: &Runtime, conf: &Conf) -> Result<()> {
        let deleted = conflist::del(&self.conflist, runtime);
        if self.device.is_some() {
            let path = self.cni_device_info(&runtime.container_id, &runtime.ifname, conf);
            let _ = fs::remove_file(path);
        }
        deleted
    }

    /// STATUS or GC, which need no attachment.
    pub(super) fn forward(&self, command: &str, call: &Call, conf: &Conf) -> Result<()> {
        let runtime = self.runtime(0, call, conf);
        let valid = conf.valid_attachments.clone();
        conflist::without_attachment(command, &self.conflist, &runtime, valid)
    }

    /// The entries for the pod's network-status annotation, as `CreateNetworkStatuses()` of Multus 4
    /// makes them: one for each interface inside the pod.
    pub(super) fn statuses(&self, runtime: &Runtime, result: &Value) -> Vec<Value> {
        let info = runtime
            .capability_args
            .get("CNIDeviceInfoFile")
            .and_then(Value::as_str);
        let info = info.and_then(|path| fs::read(path).ok());
        let info = info.and_then(|text| serde_json::from_slice::<Value>(&text).ok());
        statuses(&self.name, self.is_default, info.as_ref(), result)
    }

    fn cni_device_info(&self, container_id: &str, ifname: &str, conf: &Conf) -> PathBuf {
        let name = format!("{}-{container_id}_{ifname}", self.name).replace('/', "-");
        conf.device_info.join("cni").join(name)
    }
}

/// The entries of a network called `name`. All have one device information and DNS; of several
/// interfaces each has its own addresses, and the last those that are of none.
fn statuses(name: &str, is_default: bool, info: Option<&Value>, result: &Value) -> Vec<Value> {
    let list = |key: &str| {
        result
            .get(key)
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
    };
    let is_inside = |interface: &Value| {
        let sandbox = interface.get("sandbox").and_then(Value::as_str);
        sandbox.is_some_and(|sandbox| !sandbox.is_empty())
    };
    let inside: Vec<(usize, &Value)> = list("interfaces")
        .enumerate()
        .filter(|(_, interface)| is_inside(interface))
        .collect();
    let last = inside.last().map(|(number, _)| *number);
    let entry = |interface: Option<(usize, &Value)>| {
        let of = |key: &str| {
            interface
                .and_then(|(_, interface)| interface.get(key))
                .cloned()
        };
        let is_own = |ip: &&Value| {
            let number = ip.get("interface").and_then(Value::as_u64);
            let number = number.and_then(|number| usize::try_from(number).ok());
            let own = interface.map(|(number, _)| number);
            inside.len() < 2 || number.or(last) == own
        };
        let ips = list("ips").filter(is_own);
        let ips = ips.filter_map(|ip| ip.get("address")?.as_str());
        let ips: Vec<_> = ips.map(|ip| ip.split('/').next().unwrap_or(ip)).collect();
        let mut status = json!({ "name": name, "ips": ips, "default": is_default });
        if let Some(status) = status.as_object_mut() {
            let optional = [
                ("interface", of("name")),
                ("mac", of("mac")),
                ("mtu", of("mtu")),
                ("dns", result.get("dns").cloned()),
                ("device-info", info.cloned()),
            ];
            let given = optional
                .into_iter()
                .filter_map(|(key, value)| Some((key, value?)));
            status.extend(given.map(|(key, value)| (key.to_owned(), value)));
        }
        status
    };
    match inside.is_empty() {
        true => vec![entry(None)],
        false => inside.iter().map(|one| entry(Some(*one))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_interface_of_a_result_has_an_entry_with_its_addresses() {
        let result = json!({
            "interfaces": [
                {"name": "veth0"},
                {"name": "net1-0", "sandbox": "/run/netns/a", "mac": "02:00:00:00:00:01"},
                {"name": "net1-1", "sandbox": "/run/netns/a"},
            ],
            "ips": [
                {"address": "10.0.0.7/24", "interface": 1},
                {"address": "10.0.1.7/24", "interface": 2},
                {"address": "fd01::7/64"},
            ],
        });
        let entries = statuses("ml/rails", false, None, &result);
        let shown: Vec<_> = entries
            .iter()
            .map(|e| (&e["interface"], &e["ips"]))
            .collect();
        assert_eq!(
            shown,
            [
                (&json!("net1-0"), &json!(["10.0.0.7"])),
                (&json!("net1-1"), &json!(["10.0.1.7", "fd01::7"])),
            ]
        );
        assert_eq!(entries[0]["mac"], "02:00:00:00:00:01");
        let one = json!({"interfaces": [{"name": "net1", "sandbox": "x"}], "ips": [{"address": "10.0.0.7/24"}]});
        let [entry] = statuses("a", false, None, &one).try_into().unwrap();
        assert_eq!(
            (&entry["interface"], &entry["ips"]),
            (&json!("net1"), &json!(["10.0.0.7"]))
        );
        let none = json!({"ips": [{"address": "10.0.0.7/24"}]});
        assert_eq!(statuses("a", true, None, &none).len(), 1);
    }
}
