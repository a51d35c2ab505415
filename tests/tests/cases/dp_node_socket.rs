//! What the daemon answers programs of the node on its socket, whatever other clients do.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use e2e::case;
use e2e::daemon::{Daemon, HCAS, Machine};
use e2e::harness::Case;
use e2e::kubelet::{CHECKPOINT_FILE, Kubelet, Pod};
use node_wire::{Allocation, ClientError, FailureKind, Fault, PodUnits, ask};
use serde_json::json;

use crate::plugin::{Plugin, Script};

pub(crate) const CASES: &[Case] = &[
    case!(units_of_all_plugins_are_named_with_the_hcas_of_ours, Root),
    case!(pod_without_units_and_unknown_pod_are_distinguished, Root),
    case!(pod_admitted_a_moment_ago_is_known, Root),
    case!(namesake_with_another_uid_is_refused, Root),
    case!(
        units_are_answered_unchecked_without_a_readable_checkpoint,
        Root
    ),
    case!(kubelet_that_is_gone_or_silent_is_named_as_the_cause, Root),
    case!(the_kubelet_is_asked_ahead_after_an_allocation, Root),
    case!(what_was_said_before_an_allocation_is_not_said_again, Root),
    case!(
        a_pod_that_ended_holds_nothing_though_the_checkpoint_has_it,
        Root
    ),
];

pub(super) const EXCLUSIVE: &str =
    "version: 1\npools:\n- resource: rdma/nic\n  mode: exclusive\n  select: {linkTypes: [ether]}\n";
pub(super) const NIC: &str = "rdma/nic";
/// Each unit stands for all HCAs of the pool and names none.
pub(super) const POOLED: &str = r#"{"configList": [
    {"resourceName": "hca", "rdmaHcaMax": 300, "devices": ["rdma0", "rdma1"]}]}"#;
pub(super) const POOLED_RESOURCE: &str = "rdma/hca";
pub(super) const WAIT_TIMEOUT: Duration = Duration::from_secs(20);
/// What the CNI plugin allows.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) struct Node {
    pub(super) machine: Machine,
    pub(super) kubelet: Kubelet,
    pub(super) daemon: Daemon,
    pub(super) metrics: SocketAddr,
}

pub(super) fn start(machine: &Machine, config: &str, metrics: SocketAddr) -> Result<Daemon> {
    let file = machine.directory().join("config");
    fs::write(&file, config)?;
    let (root, metrics) = (machine.settings().root, metrics.to_string());
    let flags = [
        "--metrics-addr".as_ref(),
        metrics.as_ref(),
        "--kubelet-root-dir".as_ref(),
        root.as_os_str(),
    ];
    machine.daemon_on(
        &file,
        &[&flags[..], &["--log-level".as_ref(), "debug".as_ref()]].concat(),
    )
}

pub(super) fn free_address() -> Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

impl Node {
    pub(super) fn new(config: &str, resource: &str, units: usize) -> Result<Self> {
        let machine = Machine::new()?;
        let (kubelet, metrics) = (machine.kubelet()?, free_address()?);
        let daemon = start(&machine, config, metrics)?;
        let node = Self {
            machine,
            kubelet,
            daemon,
            metrics,
        };
        node.registered(resource, units)?;
        node.listening()?;
        Ok(node)
    }

    pub(super) fn exclusive() -> Result<Self> {
        Self::new(EXCLUSIVE, NIC, 2)
    }

    pub(super) fn registered(&self, resource: &str, units: usize) -> Result<()> {
        let waited = self.kubelet.wait_allocatable(resource, units, WAIT_TIMEOUT);
        waited.with_context(|| self.daemon.log())
    }

    pub(super) fn listening(&self) -> Result<()> {
        self.until("the socket", || {
            Ok(UnixStream::connect(self.machine.node_socket()).is_ok())
        })
    }

    pub(super) fn until(&self, what: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
        let started = Instant::now();
        while !done()? {
            ensure!(
                started.elapsed() < WAIT_TIMEOUT,
                "no {what} in {WAIT_TIMEOUT:?}: {}",
                self.daemon.log()
            );
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Admits a pod with these limits and gives it as the CNI plugin knows it.
    pub(super) fn admit(&self, name: &str, limits: &[(&str, u64)]) -> Result<node_wire::Pod> {
        let pod = Pod::with_limits(name, limits)?;
        let known = named(name, Some(&pod.metadata.uid));
        self.kubelet.admit(pod)?;
        Ok(known)
    }

    pub(super) fn ask(&self, pod: &node_wire::Pod) -> Result<PodUnits, ClientError> {
        ask(&self.machine.node_socket(), pod, CALL_TIMEOUT)
    }

    pub(super) fn answer(&self, pod: &node_wire::Pod) -> Result<PodUnits> {
        self.ask(pod).with_context(|| self.daemon.log())
    }

    pub(super) fn failure(&self, pod: &node_wire::Pod) -> Result<FailureKind> {
        match self.ask(pod) {
            Err(ClientError {
                fault: Fault::Failed(failure),
                ..
            }) => Ok(failure.kind),
            other => bail!("{other:?}; {}", self.daemon.log()),
        }
    }

    pub(super) fn get(&self, path: &str) -> Result<String> {
        let mut stream = TcpStream::connect(self.metrics)?;
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n"
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }
}

pub(super) fn named(name: &str, uid: Option<&str>) -> node_wire::Pod {
    node_wire::Pod {
        namespace: "default".into(),
        name: name.into(),
        uid: uid.map(str::to_owned),
    }
}

pub(super) fn of<'a>(units: &'a PodUnits, resource: &str) -> Result<&'a Allocation> {
    let mut all = units.allocations.iter();
    all.find(|one| one.resource == resource)
        .with_context(|| format!("no {resource} in {units:?}"))
}

fn units_of_all_plugins_are_named_with_the_hcas_of_ours() -> Result<()> {
    let node = Node::exclusive()?;
    let other = Plugin::serve(
        &node.kubelet.settings().device_plugins,
        "other.sock",
        Script::default(),
    )?;
    other.list_healthy(&["0000:5e:00.1", "GPU-7c2f"]);
    other.register("vendor.io/dev")?;
    node.registered("vendor.io/dev", 2)?;
    let pod = node.admit("pod", &[(NIC, 1), ("vendor.io/dev", 2)])?;
    let units = node.answer(&pod)?;
    assert!(units.uid_checked && units.uid_note.is_none(), "{units:?}");
    let ours = of(&units, NIC)?;
    assert_eq!(ours.container, "main");
    assert_eq!(
        ours.hcas.as_ref(),
        Some(&ours.units),
        "a unit of this pool is an HCA"
    );
    assert!(HCAS.contains(&ours.units[0].as_str()), "{ours:?}");
    assert_eq!(
        ours.pool.as_deref(),
        Some(&HCAS.map(str::to_owned)[..]),
        "all HCAs of the pool, whoever has them"
    );
    let theirs = of(&units, "vendor.io/dev")?;
    let mut ids = theirs.units.clone();
    ids.sort();
    assert_eq!(
        (ids, &theirs.hcas, &theirs.pool),
        (
            vec!["0000:5e:00.1".to_owned(), "GPU-7c2f".to_owned()],
            &None,
            &None
        )
    );
    assert_eq!(units.allocations.len(), 2);

    let node = Node::new(POOLED, POOLED_RESOURCE, 300)?;
    let pod = node.admit("pod", &[(POOLED_RESOURCE, 2)])?;
    let units = node.answer(&pod)?;
    let shares = of(&units, POOLED_RESOURCE)?;
    assert_eq!(shares.units.len(), 2);
    assert!(
        shares.units.iter().all(|unit| unit.starts_with("pool_")),
        "{shares:?}"
    );
    assert_eq!(shares.hcas.as_deref(), Some(&HCAS.map(str::to_owned)[..]));
    Ok(())
}

fn pod_without_units_and_unknown_pod_are_distinguished() -> Result<()> {
    let node = Node::exclusive()?;
    let pod = node.admit("plain", &[])?;
    assert_eq!(node.answer(&pod)?.allocations, []);
    assert_eq!(
        node.failure(&named("nobody", None))?,
        FailureKind::UnknownPod
    );
    let elsewhere = node_wire::Pod {
        namespace: "kube-system".into(),
        ..pod
    };
    assert_eq!(node.failure(&elsewhere)?, FailureKind::UnknownPod);
    Ok(())
}

/// No answer about another pod, and no earlier answer about this one, hides it.
fn pod_admitted_a_moment_ago_is_known() -> Result<()> {
    let node = Node::exclusive()?;
    for round in 0..20 {
        let name = format!("pod-{round}");
        assert_eq!(node.failure(&named(&name, None))?, FailureKind::UnknownPod);
        let pod = node.admit(&name, &[(NIC, 1)])?;
        assert_eq!(of(&node.answer(&pod)?, NIC)?.units.len(), 1);
        node.kubelet.remove(&format!("default/{name}"))?;
        assert_eq!(node.failure(&named(&name, None))?, FailureKind::UnknownPod);
    }
    Ok(())
}

fn namesake_with_another_uid_is_refused() -> Result<()> {
    let node = Node::exclusive()?;
    let first = node.admit("pod", &[(NIC, 2)])?;
    assert!(node.answer(&first)?.uid_checked);
    assert_eq!(
        node.failure(&named("pod", Some("forged")))?,
        FailureKind::AnotherPod
    );
    let unchecked = node.answer(&named("pod", None))?;
    assert!(!unchecked.uid_checked, "{unchecked:?}");
    node.kubelet.remove("default/pod")?;
    let second = node.admit("pod", &[(NIC, 2)])?;
    // The first one's answer may be given for a second more, to the first one.
    assert!(node.answer(&second)?.uid_checked);
    thread::sleep(Duration::from_millis(1100));
    assert_eq!(node.failure(&first)?, FailureKind::AnotherPod);
    Ok(())
}

fn units_are_answered_unchecked_without_a_readable_checkpoint() -> Result<()> {
    let node = Node::exclusive()?;
    let pod = node.admit("pod", &[(NIC, 1)])?;
    let checkpoint = node.kubelet.settings().device_plugins.join(CHECKPOINT_FILE);
    let unchecked = |part: &str| -> Result<()> {
        let units = node.answer(&pod)?;
        assert!(!units.uid_checked, "{units:?}");
        let note = units.uid_note.clone().unwrap_or_default();
        ensure!(note.contains(part), "{note}");
        assert_eq!(of(&units, NIC)?.units.len(), 1);
        Ok(())
    };
    let whole = fs::read(&checkpoint)?;
    fs::remove_file(&checkpoint)?;
    unchecked("does not exist")?;
    fs::write(&checkpoint, &whole[..whole.len() / 2])?;
    unchecked("EOF")?;
    fs::write(
        &checkpoint,
        json!({"Data": {"PodDeviceEntries": null}, "Checksum": 0}).to_string(),
    )?;
    unchecked("does not have all of these units")?;
    fs::remove_file(&checkpoint)?;
    fs::write(&checkpoint, whole)?;
    assert!(node.answer(&pod)?.uid_checked);
    Ok(())
}

fn kubelet_that_is_gone_or_silent_is_named_as_the_cause() -> Result<()> {
    let mut node = Node::exclusive()?;
    let pod = node.admit("pod", &[(NIC, 1)])?;
    let uid_free = named("pod", None);
    node.answer(&uid_free)?;
    let (settings, socket) = (
        node.kubelet.settings().clone(),
        node.kubelet.pod_resources_socket(),
    );
    // Killed: the socket stays without a listener.
    node.kubelet.kill();
    let error = ask(&node.machine.node_socket(), &uid_free, CALL_TIMEOUT).unwrap_err();
    assert_eq!(
        error.failure().map(|f| f.kind),
        Some(FailureKind::KubeletUnavailable),
        "{error}"
    );
    assert!(
        error.to_string().contains(socket.to_str().context("path")?),
        "{error}"
    );
    // Stopped: no socket.
    fs::remove_file(&socket)?;
    let error = ask(&node.machine.node_socket(), &uid_free, CALL_TIMEOUT).unwrap_err();
    assert_eq!(
        error.failure().map(|f| f.kind),
        Some(FailureKind::KubeletUnavailable),
        "{error}"
    );
    // Stuck: it accepts and says nothing. The answer still comes before the client gives up.
    let silent = UnixListener::bind(&socket)?;
    for _ in 0..2 {
        let started = Instant::now();
        let error = ask(&node.machine.node_socket(), &uid_free, CALL_TIMEOUT).unwrap_err();
        assert_eq!(
            error.failure().map(|f| f.kind),
            Some(FailureKind::KubeletUnavailable),
            "{error}"
        );
        assert!(error.to_string().contains("no answer within"), "{error}");
        assert!(started.elapsed() < CALL_TIMEOUT);
    }
    drop(silent);
    node.kubelet = Kubelet::start(settings)?;
    node.until("answer of the new kubelet", || Ok(node.ask(&pod).is_ok()))?;
    Ok(())
}

fn the_kubelet_is_asked_ahead_after_an_allocation() -> Result<()> {
    let node = Node::new(POOLED, POOLED_RESOURCE, 300)?;
    let mut number = 0;
    // Not each time: a slow machine may have the question first, and the daemon lists for itself.
    node.until("first question without a list of its own", || {
        number += 1;
        let before = node.kubelet.pod_lists();
        let pod = node.admit(&format!("pod-{number}"), &[(POOLED_RESOURCE, 1)])?;
        node.until("list after an allocation", || {
            Ok(node.kubelet.pod_lists() > before)
        })?;
        thread::sleep(Duration::from_millis(100));
        let listed = node.kubelet.pod_lists();
        let units = node.answer(&pod)?;
        ensure!(
            units.uid_checked && units.allocations.len() == 1,
            "{units:?}"
        );
        Ok(node.kubelet.pod_lists() == listed)
    })
}

fn what_was_said_before_an_allocation_is_not_said_again() -> Result<()> {
    let node = Node::exclusive()?;
    let first = node.admit("train-0", &[(NIC, 2)])?;
    assert_eq!(node.answer(&first)?.allocations.len(), 1);
    assert_eq!(node.answer(&first)?.allocations.len(), 1);
    // Its units go to the next pod of its name.
    node.kubelet.remove("default/train-0")?;
    let second = node.admit("train-0", &[(NIC, 1)])?;
    let units = node.answer(&second)?;
    assert!(units.uid_checked, "{units:?}");
    assert_eq!(units.allocations[0].units.len(), 1);
    assert_eq!(node.failure(&first)?, FailureKind::AnotherPod);
    // A pod without a UID is never answered from memory: it may be any of its name.
    let before = node.kubelet.pod_lists();
    let unnamed = node_wire::Pod {
        uid: None,
        ..second
    };
    assert!(!node.answer(&unnamed)?.uid_checked);
    assert!(node.kubelet.pod_lists() > before);
    Ok(())
}

/// The kubelet drops a pod from its checkpoint at the next allocation only.
fn a_pod_that_ended_holds_nothing_though_the_checkpoint_has_it() -> Result<()> {
    let node = Node::exclusive()?;
    let pod = node.admit("train-0", &[(NIC, 1)])?;
    assert_eq!(node.answer(&pod)?.allocations.len(), 1);
    node.kubelet.remove("default/train-0")?;
    node.until("answer that the pod is unknown", || {
        // Each question is asked of the kubelet anew once what it said is two seconds old.
        thread::sleep(Duration::from_millis(500));
        Ok(node
            .failure(&pod)
            .is_ok_and(|kind| kind == FailureKind::UnknownPod))
    })
}
