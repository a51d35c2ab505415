//! GC: what the runtime does not know any more goes, of one network only.

use anyhow::Result;
use e2e::case;
use e2e::cni_host::CniHost;
use e2e::harness::Case;
use serde_json::{Value, json};

pub(crate) const CASES: &[Case] = &[
    case!(what_the_runtime_does_not_know_goes, Root, Netns, Macvlan),
    case!(silence_is_not_an_empty_list, Root, Netns, Macvlan),
    case!(
        addresses_of_an_add_that_began_after_gc_stay,
        Root,
        Netns,
        Macvlan
    ),
];

fn what_the_runtime_does_not_know_goes() -> Result<()> {
    let host = CniHost::new()?;
    let net = |name: &str| {
        host.config(&json!({
            "cniVersion": "1.1.0", "name": name, "attach": "macvlan", "master": "nic0",
        }))
    };
    let pods = [host.pod()?, host.pod()?, host.pod()?];
    for (pod, (container, network)) in
        pods.iter()
            .zip([("c1", "rail0"), ("c2", "rail0"), ("c3", "rail1")])
    {
        host.call(pod, container, "net1")
            .run("ADD", net(network).to_string().as_bytes())?
            .success()?;
    }
    let gc = |network: &str, key: &str, valid: Value| -> Result<()> {
        let mut config = net(network);
        config[key] = valid;
        let answer = host
            .call(&pods[0], "x", "x")
            .run("GC", config.to_string().as_bytes())?;
        assert_eq!(answer.success()?, Value::Null);
        Ok(())
    };
    let there = |index: usize| pods[index].ip("link show net1").is_ok();
    gc(
        "rail0",
        "cni.dev/valid-attachments",
        json!([{"containerID": "c1", "ifname": "net1"}]),
    )?;
    assert_eq!([there(0), there(1), there(2)], [true, false, true]);
    // The key libcni wrote before the specification had one.
    gc("rail0", "cni.dev/attachments", json!([]))?;
    assert_eq!([there(0), there(1), there(2)], [false, false, true]);
    gc("rail1", "cni.dev/valid-attachments", json!([]))?;
    assert!(!there(2));
    assert!(host.left_behind().is_empty(), "{:?}", host.left_behind());
    Ok(())
}

fn silence_is_not_an_empty_list() -> Result<()> {
    let host = CniHost::new()?;
    let pod = host.pod()?;
    let config = host.config(&json!({
        "cniVersion": "1.1.0", "attach": "macvlan", "master": "nic0",
    }));
    let call = host.call(&pod, "c1", "net1");
    call.run("ADD", config.to_string().as_bytes())?.success()?;
    call.run("GC", config.to_string().as_bytes())?.success()?;
    assert!(pod.ip("link show net1").is_ok());
    let mut wrong = config.clone();
    wrong["cni.dev/valid-attachments"] = json!([{"containerID": "c1"}]);
    assert_eq!(
        call.run("GC", wrong.to_string().as_bytes())?.refusal()?.0,
        7
    );
    assert!(pod.ip("link show net1").is_ok());
    Ok(())
}

/// The list of the runtime does not have the pod of an ADD that began after it.
fn addresses_of_an_add_that_began_after_gc_stay() -> Result<()> {
    let host = CniHost::new()?;
    let keys = json!({"nonRdma": true, "virtual": true, "unallocated": true,
        "ipam": ["rdma-ipam", "canned"]});
    host.policy(&json!({ "allow": keys }))?;
    // Its DEL takes its time, as that of a NIC in the pod does.
    super::cni_delegate::install(
        &host,
        "canned",
        "cd $(dirname $0)
         case $CNI_COMMAND in
         ADD) echo '{\"cniVersion\":\"1.1.0\",\"ips\":[{\"address\":\"10.8.0.7/24\"}]}';;
         DEL) touch deleting; until [ -e go ]; do sleep 0.01; done;;
         esac",
    )?;
    let net = |ipam: Value| {
        host.config(
            &json!({"cniVersion": "1.1.0", "attach": "macvlan", "master": "nic0", "ipam": ipam}),
        )
    };
    let (first, second) = (host.pod()?, host.pod()?);
    let mut call = host.call(&first, "c1", "net1");
    call.path = host.directory().as_os_str().to_owned();
    let canned = net(json!({"type": "canned"})).to_string();
    call.run("ADD", canned.as_bytes())?.success()?;
    let ours = net(host.own_ipam("10.9.0.0/24", "10.9.0.100", &json!({})));
    let mut gc = ours.clone();
    gc["cni.dev/valid-attachments"] = json!([]);
    let add = host.call(&second, "c2", "net1");
    let result = std::thread::scope(|scope| -> Result<Value> {
        let collect = host.call(&first, "x", "x");
        let gc = scope.spawn(move || collect.run("GC", gc.to_string().as_bytes()));
        while !host.directory().join("deleting").exists() && !gc.is_finished() {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let result = add.run("ADD", ours.to_string().as_bytes());
        std::fs::write(host.directory().join("go"), "")?;
        gc.join().expect("the thread of GC")?.success()?;
        result?.success()
    })?;
    assert!(first.ip("link show net1").is_err(), "c1 is not collected");
    let mut check = ours.clone();
    check["prevResult"] = result;
    add.run("CHECK", check.to_string().as_bytes())?.success()?;
    add.run("DEL", ours.to_string().as_bytes())?.success()?;
    Ok(())
}
