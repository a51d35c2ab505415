//! The stand-in for Multus calls plugins as Multus does: what a CNI plugin
//! sees in a cluster is what ours sees in the lab.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use e2e::bin_under_test::standin;
use e2e::case;
use e2e::cni::{Answer, Call};
use e2e::harness::Case;
use e2e::kubelet::{Kubelet, Pod, Settings};
use e2e::need::REFERENCE_PLUGINS;
use e2e::netns::Netns;
use kubelet_api::deviceplugin::DevicePluginOptions;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::plugin::{Plugin, Script};

pub(crate) const CASES: &[Case] = &[
    case!(gives_a_pod_its_default_network_and_those_it_asks_for, Root, Netns, Macvlan, ReferencePlugins),
    case!(puts_device_ids_where_multus_puts_them, Root, Netns),
    case!(a_network_that_fails_takes_the_others_back, Root, Netns),
    case!(a_delete_goes_on_without_namespace_or_scratch_file, Root, Netns),
    case!(a_taken_interface_name_is_refused_before_the_plugin, Root, Netns),
    case!(check_status_and_gc_reach_no_secondary_network, Root, Netns),
];

const HCA: &str = "rdma/hca";

/// A host with a kubelet, a pod's namespace, and a plugin `recorder` that
/// writes down each call, and fails where the file `fail` names its interface.
struct World {
    host: Netns,
    pod_netns: Netns,
    kubelet: Kubelet,
    plugin: Plugin,
    root: TempDir,
}

impl World {
    fn new(default: &Value, networks: &str) -> Result<Self> {
        let root = tempfile::tempdir()?;
        let kubelet = Kubelet::start(Settings::below(&root.path().join("kubelet")))?;
        let options = DevicePluginOptions {
            get_preferred_allocation_available: true,
            ..DevicePluginOptions::default()
        };
        let preferred = vec!["0000:3b:00.0".to_owned()];
        let script = Script { options, preferred, ..Script::default() };
        let plugin = Plugin::serve(&kubelet.settings().device_plugins, "hca.sock", script)?;
        plugin.list_healthy(&["0000:3b:00.0", "0000:d8:00.0"]);
        plugin.register(HCA)?;
        kubelet.wait_allocatable(HCA, 2, Duration::from_secs(10))?;
        let world =
            Self { host: Netns::new("host")?, pod_netns: Netns::new("pod")?, kubelet, plugin, root };
        fs::create_dir(world.path("bin"))?;
        fs::create_dir(world.path("calls"))?;
        fs::write(world.path("default.conflist"), default.to_string())?;
        fs::write(world.path("networks.yaml"), networks)?;
        let recorder = world.path("bin/recorder");
        let calls = world.path("calls");
        fs::write(
            &recorder,
            format!(
                r#"#!/bin/sh
n=$(ls {calls} | wc -l)
cat > {calls}/$n.stdin.part
env | grep ^CNI_ > {calls}/$n.env.part
printf '{{"stdin": %s, "env": "%s"}}' "$(cat {calls}/$n.stdin.part)" "$(tr '\n' ' ' < {calls}/$n.env.part)" > {calls}/$n.part
rm {calls}/$n.stdin.part {calls}/$n.env.part
mv {calls}/$n.part {calls}/$n
if [ "$CNI_COMMAND $CNI_IFNAME" = "$(cat {calls}/../fail 2>/dev/null)" ]; then
    echo '{{"cniVersion": "1.0.0", "code": 11, "msg": "told to fail"}}'
    exit 1
fi
[ "$CNI_COMMAND" != ADD ] || echo '{{"cniVersion": "1.0.0",
    "interfaces": [{{"name": "'$CNI_IFNAME'", "mac": "02:00:00:00:00:01", "sandbox": "'$CNI_NETNS'"}}],
    "ips": [{{"address": "10.0.0.9/24", "interface": 0}}]}}'
"#,
                calls = calls.display()
            ),
        )?;
        fs::set_permissions(&recorder, fs::Permissions::from_mode(0o755))?;
        Ok(world)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// Admits a pod with this networks annotation and one unit of the resource a network.
    fn pod(&self, annotation: &str, units: u64) -> Result<Pod> {
        let mut pod = Pod::with_limits("pod", &[(HCA, units)])?;
        let key = "k8s.v1.cni.cncf.io/networks".to_owned();
        pod.metadata.annotations.insert(key, annotation.to_owned());
        self.kubelet.admit(pod.clone())?;
        Ok(pod)
    }

    fn call(&self, command: &str, pod: &Pod) -> Result<Answer> {
        self.call_in(command, pod, self.pod_netns.path())
    }

    fn call_in(&self, command: &str, pod: &Pod, netns: &Path) -> Result<Answer> {
        let mut call = Call::new(&standin("multus-standin")?, "sandbox1", netns, "eth0");
        call.path = std::env::join_paths([self.path("bin").as_path(), Path::new(REFERENCE_PLUGINS)])?;
        call.args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME={};K8S_POD_INFRA_CONTAINER_ID=sandbox1;K8S_POD_UID={}",
            pod.metadata.name, pod.metadata.uid
        );
        let conf = json!({
            "cniVersion": "1.0.0",
            "name": "node",
            "type": "multus-standin",
            "clusterNetwork": self.path("default.conflist"),
            "networks": [self.path("networks.yaml")],
            "pods": self.kubelet.settings().pods,
            "podResources": self.kubelet.pod_resources_socket(),
            "stateDir": self.path("state"),
            "deviceInfo": self.path("devinfo"),
        });
        call.on_host(&self.host).run(command, conf.to_string().as_bytes())
    }

    /// What the recorder was called with, in order: command and interface, and its stdin.
    fn calls(&self) -> Result<Vec<(String, Value, String)>> {
        let count = fs::read_dir(self.path("calls"))?.count();
        let mut calls = Vec::new();
        for n in 0..count {
            let text = fs::read_to_string(self.path("calls").join(n.to_string()))?;
            let call: Value = serde_json::from_str(&text)?;
            let env = call["env"].as_str().unwrap().to_owned();
            let of = |name: &str| {
                let found = env.split(' ').find_map(|pair| pair.strip_prefix(name));
                found.unwrap_or_default().to_owned()
            };
            let what = format!("{} {}", of("CNI_COMMAND="), of("CNI_IFNAME="));
            calls.push((what.trim().to_owned(), call["stdin"].clone(), of("CNI_ARGS=")));
        }
        Ok(calls)
    }

    fn names(&self) -> Result<Vec<String>> {
        Ok(self.calls()?.into_iter().map(|(what, ..)| what).collect())
    }
}

fn recorded_default() -> Value {
    json!({"cniVersion": "1.0.0", "name": "default-net", "plugins": [{"type": "recorder"}]})
}

/// Definitions of networks with these configurations; the resource is everybody's.
fn definitions(configs: &[(&str, Value)]) -> String {
    let documents = configs.iter().map(|(name, config)| {
        json!({
            "apiVersion": "k8s.cni.cncf.io/v1",
            "kind": "NetworkAttachmentDefinition",
            "metadata": {
                "name": name,
                "annotations": {"k8s.v1.cni.cncf.io/resourceName": HCA},
            },
            "spec": {"config": config.to_string()},
        })
        .to_string()
    });
    documents.collect::<Vec<_>>().join("\n---\n")
}

fn recorder(capabilities: Value) -> Value {
    json!({"cniVersion": "1.0.0", "type": "recorder", "capabilities": capabilities})
}

fn gives_a_pod_its_default_network_and_those_it_asks_for() -> Result<()> {
    let leases = tempfile::tempdir()?;
    let default = json!({"cniVersion": "1.0.0", "name": "default-net", "plugins": [{
        "type": "bridge", "bridge": "cni0",
        "ipam": {"type": "host-local", "subnet": "10.244.0.0/24", "dataDir": leases.path()},
    }]});
    let macvlan = json!({"cniVersion": "1.0.0", "plugins": [{
        "type": "macvlan", "master": "up0", "mode": "bridge",
        "ipam": {"type": "host-local", "subnet": "192.168.111.0/24", "dataDir": leases.path()},
    }]});
    let world = World::new(&default, &definitions(&[("rail", macvlan)]))?;
    world.host.ip("link add up0 type veth peer name up1")?;
    world.host.ip("link set up0 up")?;
    let pod = world.pod("rail", 1)?;

    let result = world.call("ADD", &pod)?.success()?;
    assert_eq!(result["ips"][0]["address"], "10.244.0.2/24", "the default network's result");
    let links = world.pod_netns.ip_json("addr show")?;
    let name = |link: &Value| link["ifname"].as_str().unwrap().to_owned();
    let names: Vec<_> = links.as_array().unwrap().iter().map(name).collect();
    assert_eq!(names, ["lo", "eth0", "net1"]);
    assert_eq!(links[2]["linkinfo"]["info_kind"], "macvlan");
    assert_eq!(links[2]["addr_info"][0]["local"], "192.168.111.2");

    let status = fs::read(world.path("state/sandbox1.network-status"))?;
    let status: Value = serde_json::from_slice(&status)?;
    assert_eq!(status[1]["name"], "default/rail");
    assert_eq!(status[1]["interface"], "net1");
    assert_eq!(status[1]["ips"], json!(["192.168.111.2"]));

    world.call("DEL", &pod)?.success()?;
    assert_eq!(world.pod_netns.ip_json("link show")?.as_array().unwrap().len(), 1);
    for network in ["default-net", "rail"] {
        let left: Vec<_> = fs::read_dir(leases.path().join(network))?
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.starts_with(|c: char| c.is_ascii_digit()))
            .collect();
        assert!(left.is_empty(), "{network}: leases left: {left:?}");
    }
    assert_eq!(fs::read_dir(world.path("state/results"))?.count(), 0);
    assert!(!world.path("state/sandbox1").exists());
    world.call("DEL", &pod)?.success()?;
    Ok(())
}

fn puts_device_ids_where_multus_puts_them() -> Result<()> {
    let chain = json!({"cniVersion": "1.0.0", "name": "own-name", "plugins": [
        {"type": "recorder", "capabilities": {"deviceID": true, "CNIDeviceInfoFile": true}},
        {"type": "recorder", "capabilities": {"deviceID": false, "mac": true}},
    ]});
    let single = recorder(json!({}));
    let networks = definitions(&[("chain", chain), ("single", single)]);
    let world = World::new(&recorded_default(), &networks)?;
    let dp = world.path("devinfo/dp");
    fs::create_dir_all(&dp)?;
    for id in ["0000:3b:00.0", "0000:d8:00.0"] {
        fs::write(dp.join(format!("rdma-hca-{id}-device.json")), format!("{{\"id\": \"{id}\"}}"))?;
    }
    let annotation = r#"[{"name": "chain", "mac": "02:00:00:00:00:07"},
        {"name": "single", "interface": "rail9", "cni-args": {"rail": 9}}]"#;
    let pod = world.pod(annotation, 2)?;
    let held = world.kubelet.assigned("default/pod")?.into_values().next().unwrap();
    world.call("ADD", &pod)?.success()?;

    let calls = world.calls()?;
    let names: Vec<_> = calls.iter().map(|(what, ..)| what.as_str()).collect();
    assert_eq!(names, ["ADD eth0", "ADD net1", "ADD net1", "ADD rail9"]);
    let [(_, default, _), (_, first, args), (_, second, _), (_, single, _)] = calls.as_slice()
    else {
        panic!("{names:?}");
    };
    assert!(default.get("deviceID").is_none() && default.get("runtimeConfig").is_none());
    assert_eq!(default["name"], "default-net");

    assert_eq!(first["name"], "own-name");
    assert_eq!(first["deviceID"], first["pciBusID"]);
    assert_eq!(first["deviceID"], second["deviceID"], "every plugin of the list has it");
    assert_eq!(first["runtimeConfig"]["deviceID"], first["deviceID"]);
    assert!(second["runtimeConfig"].get("deviceID").is_none());
    assert_eq!(second["runtimeConfig"]["mac"], "02:00:00:00:00:07");
    assert_eq!(second["prevResult"]["interfaces"][0]["name"], "net1");
    let info = first["runtimeConfig"]["CNIDeviceInfoFile"].as_str().unwrap();
    assert_eq!(info, world.path("devinfo/cni/default-chain-sandbox1_net1").to_str().unwrap());
    let copied: Value = serde_json::from_slice(&fs::read(info)?)?;
    assert_eq!(copied["id"], first["deviceID"]);
    assert!(args.ends_with(";MAC=02:00:00:00:00:07"), "{args}");
    assert_eq!(args.matches("K8S_POD_NAME=pod").count(), 2, "each pair twice: {args}");
    assert!(args.starts_with("IgnoreUnknown=true;"), "{args}");

    assert_eq!(single["name"], "single", "the definition's name where there is no other");
    assert_ne!(single["deviceID"], first["deviceID"], "the next device of the resource");
    assert_eq!(single["args"]["cni"]["rail"], 9);
    let mut seen = [&first["deviceID"], &single["deviceID"]].map(|id| id.as_str().unwrap());
    seen.sort_unstable();
    assert_eq!(seen, held.as_slice());

    world.call("DEL", &pod)?.success()?;
    assert_eq!(world.names()?[4..], ["DEL rail9", "DEL net1", "DEL net1", "DEL eth0"]);
    let del = &world.calls()?[6].1;
    assert_eq!(del["deviceID"], first["deviceID"]);
    assert_eq!(del["prevResult"]["ips"][0]["address"], "10.0.0.9/24", "the list's whole result");
    assert!(!Path::new(info).exists());
    drop(world.plugin);
    Ok(())
}

fn a_network_that_fails_takes_the_others_back() -> Result<()> {
    let networks = definitions(&[("a", recorder(json!({}))), ("b", recorder(json!({})))]);
    let world = World::new(&recorded_default(), &networks)?;
    let pod = world.pod("a, b", 1)?;
    fs::write(world.path("fail"), "ADD net2")?;
    let (code, message) = world.call("ADD", &pod)?.refusal()?;
    assert_eq!(code, 999);
    assert!(message.contains("told to fail (code 11)") && message.contains("default/b"), "{message}");
    let expected = ["ADD eth0", "ADD net1", "ADD net2", "DEL net2", "DEL net1", "DEL eth0"];
    assert_eq!(world.names()?, expected);

    fs::write(world.path("fail"), "DEL net1")?;
    let (_, message) = world.call("DEL", &pod)?.refusal()?;
    assert!(message.contains("told to fail"), "{message}");
    assert_eq!(world.names()?[6..], ["DEL net2", "DEL net1", "DEL eth0"], "all, whatever fails");
    Ok(())
}

fn a_delete_goes_on_without_namespace_or_scratch_file() -> Result<()> {
    let networks = definitions(&[("a", recorder(json!({})))]);
    let world = World::new(&recorded_default(), &networks)?;
    let pod = world.pod("a", 1)?;
    world.call("ADD", &pod)?.success()?;
    world.pod_netns.delete()?;
    world.call("DEL", &pod)?.success()?;
    assert_eq!(world.names()?[2..], ["DEL net1", "DEL eth0"]);

    world.call_in("DEL", &pod, Path::new(""))?.success()?;
    assert_eq!(world.names()?[4..], ["DEL net1", "DEL eth0"], "from the pod's annotation");
    world.kubelet.remove("default/pod")?;
    world.call_in("DEL", &pod, Path::new(""))?.success()?;
    assert_eq!(world.names()?.len(), 6, "nothing to go by, and no error");

    let no_namespace = world.path("regular-file");
    fs::write(&no_namespace, "")?;
    let (_, message) = world.call_in("DEL", &pod, &no_namespace)?.refusal()?;
    assert!(message.contains("failed to open netns"), "{message}");
    Ok(())
}

fn a_taken_interface_name_is_refused_before_the_plugin() -> Result<()> {
    let networks = definitions(&[("a", recorder(json!({})))]);
    let world = World::new(&recorded_default(), &networks)?;
    let pod = world.pod("a@taken", 1)?;
    world.pod_netns.ip("link add taken type veth peer name other")?;
    let (_, message) = world.call("ADD", &pod)?.refusal()?;
    assert!(message.contains("taken already exists"), "{message}");
    assert_eq!(world.names()?, ["ADD eth0", "DEL taken", "DEL eth0"]);
    Ok(())
}

fn check_status_and_gc_reach_no_secondary_network() -> Result<()> {
    let networks = definitions(&[("a", recorder(json!({})))]);
    let default =
        json!({"cniVersion": "1.1.0", "name": "default-net", "plugins": [{"type": "recorder"}]});
    let world = World::new(&default, &networks)?;
    let pod = world.pod("a", 1)?;
    world.call("ADD", &pod)?.success()?;
    for command in ["CHECK", "STATUS", "GC"] {
        assert_eq!(world.call(command, &pod)?.success()?, Value::Null);
    }
    assert_eq!(world.names()?, ["ADD eth0", "ADD net1", "STATUS eth0", "GC eth0"]);
    let versions = world.call("VERSION", &pod)?.success()?;
    assert_eq!(versions["supportedVersions"].as_array().unwrap().len(), 7);
    Ok(())
}
