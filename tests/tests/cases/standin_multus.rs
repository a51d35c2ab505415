//! The stand-in for Multus calls plugins as Multus does: what a CNI plugin
//! sees in a cluster is what ours sees in the lab.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use e2e::case;
use e2e::cni::Answer;
use e2e::harness::Case;
use e2e::kubelet::Pod;
use e2e::netns::Netns;
use serde_json::{Value, json};

use crate::multus_node::MultusNode;

pub(crate) const CASES: &[Case] = &[
    case!(
        gives_a_pod_its_default_network_and_those_it_asks_for,
        Root,
        Netns,
        Macvlan,
        ReferencePlugins
    ),
    case!(puts_device_ids_where_multus_puts_them, Root, Netns),
    case!(a_network_that_fails_takes_the_others_back, Root, Netns),
    case!(
        a_delete_goes_on_without_namespace_or_scratch_file,
        Root,
        Netns
    ),
    case!(
        a_taken_interface_name_is_refused_before_the_plugin,
        Root,
        Netns
    ),
    case!(check_status_and_gc_reach_no_secondary_network, Root, Netns),
];

const HCA: &str = "rdma/hca";

/// A node with a plugin `recorder` that writes down each call, and fails where
/// the file `fail` names command and interface.
struct World {
    node: MultusNode,
    pod_netns: Netns,
}

impl World {
    fn new(default: &Value, networks: &str) -> Result<Self> {
        let node = MultusNode::new(HCA, &["0000:3b:00.0", "0000:d8:00.0"], default)?;
        fs::write(node.path("networks/networks.yaml"), networks)?;
        fs::create_dir(node.path("calls"))?;
        let recorder = node.path("bin/recorder");
        fs::write(
            &recorder,
            RECORDER.replace("CALLS", &node.path("calls").to_string_lossy()),
        )?;
        fs::set_permissions(&recorder, fs::Permissions::from_mode(0o755))?;
        Ok(Self {
            node,
            pod_netns: Netns::new("pod")?,
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.node.path(name)
    }

    /// Admits a pod with this networks annotation and so many units of the resource.
    fn pod(&self, annotation: &str, units: u64) -> Result<Pod> {
        let mut pod = Pod::with_limits("pod", &[(HCA, units)])?;
        let key = "k8s.v1.cni.cncf.io/networks".to_owned();
        pod.metadata.annotations.insert(key, annotation.to_owned());
        self.node.kubelet.admit(pod.clone())?;
        Ok(pod)
    }

    fn call(&self, command: &str, pod: &Pod) -> Result<Answer> {
        self.call_in(command, pod, self.pod_netns.path())
    }

    fn call_in(&self, command: &str, pod: &Pod, netns: &Path) -> Result<Answer> {
        self.node
            .multus(pod, netns)?
            .run(command, &self.node.multus_conf())
    }

    /// What the recorder was called with, in order: command and interface, stdin, `CNI_ARGS`.
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
            calls.push((
                what.trim().to_owned(),
                call["stdin"].clone(),
                of("CNI_ARGS="),
            ));
        }
        Ok(calls)
    }

    fn names(&self) -> Result<Vec<String>> {
        Ok(self.calls()?.into_iter().map(|(what, ..)| what).collect())
    }
}

const RECORDER: &str = r#"#!/bin/sh
n=$(ls CALLS | wc -l)
stdin=$(cat)
env=$(env | grep ^CNI_ | tr '\n' ' ')
printf '{"stdin": %s, "env": "%s"}' "$stdin" "$env" > CALLS/../part
mv CALLS/../part CALLS/$n
if [ "$CNI_COMMAND $CNI_IFNAME" = "$(cat CALLS/../fail 2>/dev/null)" ]; then
    echo '{"cniVersion": "1.0.0", "code": 11, "msg": "made to fail"}'
    exit 1
fi
[ "$CNI_COMMAND" != ADD ] || echo '{"cniVersion": "1.0.0",
    "interfaces": [{"name": "'$CNI_IFNAME'", "mac": "02:00:00:00:00:01", "sandbox": "'$CNI_NETNS'"}],
    "ips": [{"address": "10.0.0.9/24", "interface": 0}]}'
"#;

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
    world.node.host.ip("link add up0 type veth peer name up1")?;
    world.node.host.ip("link set up0 up")?;
    let pod = world.pod("rail", 1)?;

    let result = world.call("ADD", &pod)?.success()?;
    assert_eq!(
        result["ips"][0]["address"], "10.244.0.2/24",
        "the default network's result"
    );
    let links = world.pod_netns.ip_json("addr show")?;
    let name = |link: &Value| link["ifname"].as_str().unwrap().to_owned();
    let names: Vec<_> = links.as_array().unwrap().iter().map(name).collect();
    assert_eq!(names, ["lo", "eth0", "net1"]);
    assert_eq!(links[2]["linkinfo"]["info_kind"], "macvlan");
    assert_eq!(links[2]["addr_info"][0]["local"], "192.168.111.2");

    let status = fs::read(world.path("state/sandbox-pod.network-status"))?;
    let status: Value = serde_json::from_slice(&status)?;
    assert_eq!(status[1]["name"], "default/rail");
    assert_eq!(status[1]["interface"], "net1");
    assert_eq!(status[1]["ips"], json!(["192.168.111.2"]));

    world.call("DEL", &pod)?.success()?;
    assert_eq!(
        world
            .pod_netns
            .ip_json("link show")?
            .as_array()
            .unwrap()
            .len(),
        1
    );
    for network in ["default-net", "rail"] {
        let left: Vec<_> = fs::read_dir(leases.path().join(network))?
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.starts_with(|c: char| c.is_ascii_digit()))
            .collect();
        assert!(left.is_empty(), "{network}: leases left: {left:?}");
    }
    assert_eq!(fs::read_dir(world.path("state/results"))?.count(), 0);
    assert!(!world.path("state/sandbox-pod").exists());
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
        fs::write(
            dp.join(format!("rdma-hca-{id}-device.json")),
            format!("{{\"id\": \"{id}\"}}"),
        )?;
    }
    let annotation = r#"[{"name": "chain", "mac": "02:00:00:00:00:07"},
        {"name": "single", "interface": "rail9", "cni-args": {"rail": 9}}]"#;
    let pod = world.pod(annotation, 2)?;
    let held = world
        .node
        .kubelet
        .assigned("default/pod")?
        .into_values()
        .next()
        .unwrap();
    world.call("ADD", &pod)?.success()?;

    let calls = world.calls()?;
    let names: Vec<_> = calls.iter().map(|(what, ..)| what.as_str()).collect();
    assert_eq!(names, ["ADD eth0", "ADD net1", "ADD net1", "ADD rail9"]);
    let [
        (_, default, _),
        (_, first, args),
        (_, second, _),
        (_, single, _),
    ] = calls.as_slice()
    else {
        panic!("{names:?}");
    };
    assert!(default.get("deviceID").is_none() && default.get("runtimeConfig").is_none());
    assert_eq!(default["name"], "default-net");

    assert_eq!(first["name"], "own-name");
    assert_eq!(first["deviceID"], first["pciBusID"]);
    assert_eq!(
        first["deviceID"], second["deviceID"],
        "every plugin of the list has it"
    );
    assert_eq!(first["runtimeConfig"]["deviceID"], first["deviceID"]);
    assert!(second["runtimeConfig"].get("deviceID").is_none());
    assert_eq!(second["runtimeConfig"]["mac"], "02:00:00:00:00:07");
    assert_eq!(second["prevResult"]["interfaces"][0]["name"], "net1");
    let info = first["runtimeConfig"]["CNIDeviceInfoFile"]
        .as_str()
        .unwrap();
    assert_eq!(
        info,
        world
            .path("devinfo/cni/default-chain-sandbox-pod_net1")
            .to_str()
            .unwrap()
    );
    let copied: Value = serde_json::from_slice(&fs::read(info)?)?;
    assert_eq!(copied["id"], first["deviceID"]);
    assert!(args.ends_with(";MAC=02:00:00:00:00:07"), "{args}");
    assert_eq!(
        args.matches("K8S_POD_NAME=pod").count(),
        2,
        "each pair twice: {args}"
    );
    assert!(args.starts_with("IgnoreUnknown=true;"), "{args}");

    assert_eq!(
        single["name"], "single",
        "the definition's name where there is no other"
    );
    assert_ne!(
        single["deviceID"], first["deviceID"],
        "the next device of the resource"
    );
    assert_eq!(single["args"]["cni"]["rail"], 9);
    let mut seen = [&first["deviceID"], &single["deviceID"]].map(|id| id.as_str().unwrap());
    seen.sort_unstable();
    assert_eq!(seen, held.as_slice());

    world.call("DEL", &pod)?.success()?;
    assert_eq!(
        world.names()?[4..],
        ["DEL rail9", "DEL net1", "DEL net1", "DEL eth0"]
    );
    let del = &world.calls()?[6].1;
    assert_eq!(del["deviceID"], first["deviceID"]);
    assert_eq!(
        del["prevResult"]["ips"][0]["address"], "10.0.0.9/24",
        "the list's whole result"
    );
    assert!(!Path::new(info).exists());
    Ok(())
}

fn a_network_that_fails_takes_the_others_back() -> Result<()> {
    let networks = definitions(&[("a", recorder(json!({}))), ("b", recorder(json!({})))]);
    let world = World::new(&recorded_default(), &networks)?;
    let pod = world.pod("a, b", 1)?;
    fs::write(world.path("fail"), "ADD net2")?;
    let (code, message) = world.call("ADD", &pod)?.refusal()?;
    assert_eq!(code, 999);
    assert!(
        message.contains("made to fail (code 11)") && message.contains("default/b"),
        "{message}"
    );
    let expected = [
        "ADD eth0", "ADD net1", "ADD net2", "DEL net2", "DEL net1", "DEL eth0",
    ];
    assert_eq!(world.names()?, expected);

    fs::write(world.path("fail"), "DEL net1")?;
    let (_, message) = world.call("DEL", &pod)?.refusal()?;
    assert!(message.contains("made to fail"), "{message}");
    assert_eq!(
        world.names()?[6..],
        ["DEL net2", "DEL net1", "DEL eth0"],
        "all, whatever fails"
    );
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
    assert_eq!(
        world.names()?[4..],
        ["DEL net1", "DEL eth0"],
        "from the pod's annotation"
    );
    world.node.kubelet.remove("default/pod")?;
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
    world
        .pod_netns
        .ip("link add taken type veth peer name other")?;
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
    assert_eq!(
        world.names()?,
        ["ADD eth0", "ADD net1", "STATUS eth0", "GC eth0"]
    );
    let versions = world.call("VERSION", &pod)?.success()?;
    assert_eq!(versions["supportedVersions"].as_array().unwrap().len(), 7);
    Ok(())
}
