//! What becomes of RDMA devices, as far as a kernel without RDMA shows it: the subsystem here is
//! a tree of files in shared mode. The lab moves real ones.

use std::fs;
use std::path::PathBuf;

use anyhow::Result;
use e2e::case;
use e2e::cni::Call;
use e2e::cni_host::{CniHost, same};
use e2e::harness::Case;
use e2e::netns::Netns;
use hca_trees::{NetdevSpec, On, PciSpec, PortSpec, RdmaSpec, Tree};
use serde_json::{Value, json};

pub(crate) const CASES: &[Case] = &[
    case!(function_device_and_gid_are_written_for_multus, Root, Netns),
    case!(
        behind_another_plugin_its_result_is_passed_on,
        Root,
        Netns,
        Macvlan
    ),
    case!(what_cannot_be_had_is_refused, Root, Netns),
];

const FILES: &str = "run/k8s.cni.cncf.io/devinfo/cni";

/// `nic0` is an `mlx5` NIC; the port has a GID of 10.9.0.1 on `net1`.
fn with_hardware() -> Result<CniHost> {
    let host = CniHost::new()?;
    host.policy(&json!({"allow": {"virtual": true, "unallocated": true}}))?;
    let root = host.directory().join("root");
    fs::create_dir_all(root.join(FILES))?;
    // As on most hosts; Multus names the file by this path.
    fs::create_dir_all(root.join("var"))?;
    std::os::unix::fs::symlink("../run", root.join("var/run"))?;
    let tree = Tree::new(&root);
    tree.pci(&PciSpec::MLX5);
    tree.netdev(&NetdevSpec {
        name: "nic0",
        on: On::Pci("0000:3b:00.0"),
        ..NetdevSpec::default()
    });
    let gids = [
        (
            2,
            "0000:0000:0000:0000:0000:ffff:0a09:0001",
            "IB/RoCE v1",
            "net1",
        ),
        (
            5,
            "0000:0000:0000:0000:0000:ffff:0a09:0001",
            "RoCE v2",
            "net1",
        ),
    ];
    let port = PortSpec {
        gids: &gids,
        ..PortSpec::ROCE
    };
    tree.rdma(&RdmaSpec {
        on: On::Pci("0000:3b:00.0"),
        ports: &[port],
        ..RdmaSpec::default()
    });
    let proc = root.join("proc");
    fs::remove_dir_all(&proc)?;
    std::os::unix::fs::symlink("/proc", proc)?;
    Ok(host)
}

fn call(host: &CniHost, pod: &Netns) -> Call {
    host.call(pod, "c1", "net1")
        .env("RDMA_HOST_ROOT", host.directory().join("root"))
}

fn run(call: &Call, command: &str, config: &Value) -> Result<Value> {
    call.run(command, config.to_string().as_bytes())?.success()
}

fn refused(call: &Call, command: &str, config: &Value) -> Result<(u64, String)> {
    call.run(command, config.to_string().as_bytes())?.refusal()
}

fn file(host: &CniHost, name: &str) -> PathBuf {
    host.directory().join("root").join(FILES).join(name)
}

fn moving(host: &CniHost, info: &str) -> Value {
    host.config(
        &json!({"attach": "move", "deviceID": "0000:3b:00.0", "pciBusID": "0000:3b:00.0",
        "runtimeConfig": {"CNIDeviceInfoFile": info}}),
    )
}

fn function_device_and_gid_are_written_for_multus() -> Result<()> {
    let host = with_hardware()?;
    let pod = host.pod()?;
    let call = call(&host, &pod);
    let own = file(&host, "ns-rail0-c1_net1");
    // Multus puts the device plugin's there.
    let given = json!({"type": "pci", "version": "1.1.0",
        "pci": {"pci-address": "0000:3b:00.0", "pf-pci-address": "0000:3b:00.7"}});
    fs::write(&own, given.to_string())?;
    let config = moving(&host, &format!("/var/{FILES}/ns-rail0-c1_net1"));
    run(&call, "ADD", &config)?;
    let written: Value = serde_json::from_str(&fs::read_to_string(&own)?)?;
    assert_eq!(
        written,
        json!({"type": "pci", "version": "1.1.0",
            "pci": {"pci-address": "0000:3b:00.0", "pf-pci-address": "0000:3b:00.7", "rdma-device": "mlx5_0"},
            "rdma-gids": [{"device": "mlx5_0", "port": 1, "address": "10.9.0.1", "gidIndex": 5}]})
    );
    run(&call, "DEL", &config)?;
    Ok(())
}

fn behind_another_plugin_its_result_is_passed_on() -> Result<()> {
    let host = with_hardware()?;
    let before = host.picture()?;
    let pod = host.pod()?;
    let call = call(&host, &pod);
    host.netns.ip(&format!(
        "link add link nic0 name net1 netns {} type macvlan mode bridge",
        pod.name()
    ))?;
    let result = json!({"cniVersion": "1.0.0",
        "interfaces": [{"name": "host0"}, {"name": "net1", "sandbox": pod.path(), "mac": "02:00:00:00:00:01"}],
        "ips": [{"address": "10.9.0.1/24", "interface": 1}]});
    let config = host
        .config(&json!({"attach": "rdma-only", "deviceID": "0000:3b:00.0", "prevResult": result}));
    assert_eq!(run(&call, "ADD", &config)?, result);
    // An interface does not name an RDMA device.
    let unnamed = host.config(&json!({"attach": "rdma-only", "prevResult": result}));
    run(&call, "DEL", &config)?;
    let (code, message) = refused(&call, "ADD", &unnamed)?;
    assert_eq!(code, 7, "{message}");
    assert!(message.contains("no RDMA device is selected"), "{message}");
    run(&call, "DEL", &unnamed)?;
    let by_name =
        host.config(&json!({"attach": "rdma-only", "rdmaDevice": "mlx5_0", "prevResult": result}));
    assert_eq!(run(&call, "ADD", &by_name)?, result);
    run(&call, "DEL", &config)?;
    assert!(
        pod.ip("link show net1").is_ok(),
        "the interface is the other plugin's"
    );
    pod.delete()?;
    run(&call, "DEL", &config)?;
    same(&before, &host.picture()?, "after DEL")
}

fn what_cannot_be_had_is_refused() -> Result<()> {
    let host = with_hardware()?;
    let pod = host.pod()?;
    let before = host.picture()?;
    let call = call(&host, &pod);
    let result =
        json!({"cniVersion": "1.1.0", "interfaces": [{"name": "lo", "sandbox": pod.path()}]});
    for (keys, code, word) in [
        (
            json!({"attach": "rdma-only", "deviceID": "0000:3b:00.0"}),
            7,
            "prevResult",
        ),
        (
            json!({"attach": "rdma-only", "prevResult": result}),
            7,
            "no RDMA device",
        ),
        (
            json!({"attach": "rdma-only", "deviceID": "0000:99:00.0", "prevResult": result}),
            7,
            "0000:99:00.0",
        ),
        (
            json!({"attach": "rdma-only", "deviceID": "0000:3b:00.0", "rdma": "required", "prevResult": result}),
            50,
            "shared mode",
        ),
        (
            json!({"type": "rdma", "deviceID": "0000:3b:00.0", "prevResult": result}),
            50,
            "shared mode",
        ),
        (
            json!({"attach": "move", "device": "nic0", "rdma": "required"}),
            50,
            "shared mode",
        ),
        (
            json!({"attach": "macvlan", "master": "nic0", "rdma": "required"}),
            7,
            "no meaning for attach macvlan",
        ),
    ] {
        let (found, message) = refused(&call, "ADD", &host.config(&keys))?;
        assert_eq!(found, code, "{keys}: {message}");
        assert!(message.contains(word), "{keys}: {message}");
    }
    let status = host.config(
        &json!({"attach": "move", "cniVersion": "1.1.0", "device": "nic0", "rdma": "required"}),
    );
    assert_eq!(refused(&call, "STATUS", &status)?.0, 50);
    same(&before, &host.picture()?, "after refusals")
}
