//! What the daemon answers programs of the node on its socket, whatever other clients do.

use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use e2e::bin_under_test::standin;
use e2e::case;
use e2e::daemon::{Daemon, HCAS, Machine};
use e2e::harness::Case;
use e2e::kubelet::{CHECKPOINT_FILE, Kubelet, Pod};
use nix::sys::signal::Signal;
use node_wire::{Allocation, ClientError, FailureKind, PodUnits, pod_units};
use serde_json::{Value, json};

use crate::plugin::{Plugin, Script};

pub(crate) const CASES: &[Case] = &[
    case!(
        units_of_all_plugins_are_named_with_the_hcas_that_ours_stand_for,
        Root
    ),
    case!(pod_without_units_and_unknown_pod_are_distinguished, Root),
    case!(pod_admitted_a_moment_ago_is_known, Root),
    case!(namesake_with_another_uid_is_refused, Root),
    case!(
        units_are_answered_unchecked_without_a_readable_checkpoint,
        Root
    ),
    case!(kubelet_that_is_gone_or_silent_is_named_as_the_cause, Root),
    case!(two_hundred_clients_share_the_kubelets_lists, Root),
    case!(
        the_kubelet_is_asked_after_an_allocation_and_before_the_pods_first_question,
        Root
    ),
    case!(what_was_said_before_an_allocation_is_not_said_again, Root),
    case!(
        a_pod_that_ended_holds_nothing_though_the_checkpoint_has_it,
        Root
    ),
    case!(half_open_clients_delay_no_answer, Root),
    case!(malformed_questions_are_answered_by_name, Root),
    case!(peer_that_is_not_root_is_refused, Root),
    case!(restarted_daemon_answers_the_same, Root),
    case!(rollout_leaves_no_moment_without_an_answer, Root),
    case!(removed_socket_is_made_again, Root),
    case!(unusable_directory_is_a_note_and_stops_nothing_else, Root),
];

const EXCLUSIVE: &str =
    "version: 1\npools:\n- resource: rdma/nic\n  mode: exclusive\n  select: {linkTypes: [ether]}\n";
const NIC: &str = "rdma/nic";
/// Each unit stands for all HCAs of the pool and names none.
const POOLED: &str = r#"{"configList": [
    {"resourceName": "hca", "rdmaHcaMax": 300, "devices": ["rdma0", "rdma1"]}]}"#;
const POOLED_RESOURCE: &str = "rdma/hca";
const WAIT_TIMEOUT: Duration = Duration::from_secs(20);
/// What the CNI plugin allows.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

struct Node {
    machine: Machine,
    kubelet: Kubelet,
    daemon: Daemon,
    metrics: SocketAddr,
}

fn start(machine: &Machine, config: &str, metrics: SocketAddr) -> Result<Daemon> {
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

fn free_address() -> Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

impl Node {
    fn new(config: &str, resource: &str, units: usize) -> Result<Self> {
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

    fn exclusive() -> Result<Self> {
        Self::new(EXCLUSIVE, NIC, 2)
    }

    fn registered(&self, resource: &str, units: usize) -> Result<()> {
        let waited = self.kubelet.wait_allocatable(resource, units, WAIT_TIMEOUT);
        waited.with_context(|| self.daemon.log())
    }

    fn listening(&self) -> Result<()> {
        self.until("the socket", || {
            Ok(UnixStream::connect(self.machine.node_socket()).is_ok())
        })
    }

    fn until(&self, what: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
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
    fn admit(&self, name: &str, limits: &[(&str, u64)]) -> Result<node_wire::Pod> {
        let pod = Pod::with_limits(name, limits)?;
        let known = named(name, Some(&pod.metadata.uid));
        self.kubelet.admit(pod)?;
        Ok(known)
    }

    fn ask(&self, pod: &node_wire::Pod) -> Result<PodUnits, ClientError> {
        pod_units(&self.machine.node_socket(), pod, CALL_TIMEOUT)
    }

    fn answer(&self, pod: &node_wire::Pod) -> Result<PodUnits> {
        self.ask(pod).with_context(|| self.daemon.log())
    }

    fn failure(&self, pod: &node_wire::Pod) -> Result<FailureKind> {
        match self.ask(pod) {
            Err(ClientError::Failed { failure, .. }) => Ok(failure.kind),
            other => bail!("{other:?}; {}", self.daemon.log()),
        }
    }

    fn get(&self, path: &str) -> Result<String> {
        let mut stream = TcpStream::connect(self.metrics)?;
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n"
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// Questions with this result so far.
    fn questions(&self, result: &str) -> Result<u64> {
        let name = format!("rdma_device_plugin_node_socket_requests_total{{result=\"{result}\"}} ");
        let text = self.get("/metrics")?;
        let line = text.lines().find_map(|line| line.strip_prefix(&name));
        let value = line.with_context(|| format!("no {name} in {text}"))?;
        // A count is written as `3` or as `3.0`.
        Ok(value.trim_end_matches(".0").parse()?)
    }
}

fn named(name: &str, uid: Option<&str>) -> node_wire::Pod {
    node_wire::Pod {
        namespace: "default".into(),
        name: name.into(),
        uid: uid.map(str::to_owned),
    }
}

fn of<'a>(units: &'a PodUnits, resource: &str) -> Result<&'a Allocation> {
    let mut all = units.allocations.iter();
    all.find(|one| one.resource == resource)
        .with_context(|| format!("no {resource} in {units:?}"))
}

fn units_of_all_plugins_are_named_with_the_hcas_that_ours_stand_for() -> Result<()> {
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
    let theirs = of(&units, "vendor.io/dev")?;
    let mut ids = theirs.units.clone();
    ids.sort();
    assert_eq!(
        (ids, &theirs.hcas),
        (
            vec!["0000:5e:00.1".to_owned(), "GPU-7c2f".to_owned()],
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
    assert_eq!(node.questions("answered")?, 1);
    assert_eq!(
        node.questions("unknown_pod")?,
        0,
        "every result has a series from the start on"
    );
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
    assert_eq!(node.questions("unknown_pod")?, 2);
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
    assert_eq!(node.questions("another_pod")?, 2);
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
    unchecked("No such file")?;
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
    let error = pod_units(&node.machine.node_socket(), &uid_free, CALL_TIMEOUT).unwrap_err();
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
    let error = pod_units(&node.machine.node_socket(), &uid_free, CALL_TIMEOUT).unwrap_err();
    assert_eq!(
        error.failure().map(|f| f.kind),
        Some(FailureKind::KubeletUnavailable),
        "{error}"
    );
    // Stuck: it accepts and says nothing. The answer still comes before the client gives up.
    let silent = UnixListener::bind(&socket)?;
    for _ in 0..2 {
        let started = Instant::now();
        let error = pod_units(&node.machine.node_socket(), &uid_free, CALL_TIMEOUT).unwrap_err();
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
    assert_eq!(node.questions("kubelet_unavailable")?, 4);
    Ok(())
}

fn two_hundred_clients_share_the_kubelets_lists() -> Result<()> {
    let node = Node::new(POOLED, POOLED_RESOURCE, 300)?;
    let pods: Vec<_> = (0..200)
        .map(|n| node.admit(&format!("pod-{n}"), &[(POOLED_RESOURCE, 1)]))
        .collect::<Result<_>>()?;
    let before = node.kubelet.pod_lists();
    let socket = &node.machine.node_socket();
    let failed: Vec<String> = thread::scope(|scope| {
        let asking: Vec<_> = pods
            .iter()
            .map(|pod| {
                // Longer than the plugin's own limit: two hundred threads start slowly here.
                scope.spawn(move || pod_units(socket, pod, 5 * CALL_TIMEOUT))
            })
            .collect();
        let answers = asking.into_iter().zip(&pods).map(|(asking, pod)| {
            match asking.join().expect("no panic") {
                Ok(units) if units.uid_checked && units.allocations.len() == 1 => None,
                other => Some(format!("{pod}: {other:?}")),
            }
        });
        answers.flatten().collect()
    });
    assert!(failed.is_empty(), "{failed:?}; {}", node.daemon.log());
    let lists = node.kubelet.pod_lists() - before;
    assert!(lists < 60, "{lists} lists for 200 questions");
    assert_eq!(node.questions("answered")?, 200);
    // The daemon lists for itself now and then.
    let before = node.kubelet.pod_lists();
    for pod in &pods[..20] {
        node.answer(pod)?;
    }
    let lists = node.kubelet.pod_lists() - before;
    assert!(
        lists <= 1,
        "{lists} lists, and nothing was allocated meanwhile"
    );
    Ok(())
}

fn the_kubelet_is_asked_after_an_allocation_and_before_the_pods_first_question() -> Result<()> {
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

fn half_open_clients_delay_no_answer() -> Result<()> {
    let node = Node::exclusive()?;
    let pod = node.admit("pod", &[(NIC, 1)])?;
    let socket = node.machine.node_socket();
    let mut silent = Vec::new();
    for n in 0..40 {
        let mut stream = UnixStream::connect(&socket)?;
        if n % 2 == 0 {
            // A question without an end.
            stream.write_all(br#"{"version": 1, "#)?;
        }
        silent.push(stream);
    }
    for _ in 0..3 {
        let started = Instant::now();
        of(&node.answer(&pod)?, NIC)?;
        assert!(
            started.elapsed() < Duration::from_secs(1),
            "{:?}",
            started.elapsed()
        );
    }
    // Those that go on saying nothing are closed; one that asks at last, while there is room, is not.
    for stream in &mut silent {
        stream.set_read_timeout(Some(WAIT_TIMEOUT))?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok();
        ensure!(
            answer.is_empty() || answer.contains("malformed"),
            "{answer}"
        );
    }
    assert_eq!(node.questions("timed_out")?, 40);
    let mut late = UnixStream::connect(&socket)?;
    thread::sleep(Duration::from_millis(700));
    late.write_all(&node_wire::Question::PodUnits(pod).encode())?;
    late.shutdown(Shutdown::Write)?;
    let mut answer = String::new();
    late.read_to_string(&mut answer)?;
    assert!(answer.contains("podUnits"), "{answer}");
    Ok(())
}

fn exchange(socket: &Path, question: &[u8]) -> Result<Value> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(WAIT_TIMEOUT))?;
    // The daemon may close before it has read all of it.
    let _ = stream.write_all(question);
    let _ = stream.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    if let Err(error) = stream.read_to_end(&mut answer) {
        ensure!(!answer.is_empty(), "{error}");
    }
    Ok(serde_json::from_slice(&answer)?)
}

fn malformed_questions_are_answered_by_name() -> Result<()> {
    let node = Node::exclusive()?;
    let long = vec![b' '; node_wire::QUESTION_MAX_BYTES * 4];
    let deep = "[".repeat(60_000);
    for (question, kind) in [
        (&b"\xff\xfe\x00"[..], "malformed"),
        (deep.as_bytes(), "malformed"),
        (&long, "malformed"),
        (
            br#"{"version": 1, "question": "podUnits", "pod": {"namespace": "a"}}"#,
            "malformed",
        ),
        (
            br#"{"version": 9, "question": "podUnits"}"#,
            "unsupportedVersion",
        ),
        (
            br#"{"version": 1, "question": "bindSlots"}"#,
            "unknownQuestion",
        ),
    ] {
        let answer = exchange(&node.machine.node_socket(), question)?;
        assert_eq!(answer["error"]["kind"], kind, "{answer}");
        assert_eq!(answer["version"], 1, "{answer}");
    }
    assert_eq!(node.questions("malformed")?, 4);
    assert_eq!(node.questions("unsupported_version")?, 1);
    assert_eq!(node.questions("unknown_question")?, 1);
    // A peer that asks and does not wait for the answer.
    for _ in 0..50 {
        let mut stream = UnixStream::connect(node.machine.node_socket())?;
        stream.write_all(&node_wire::Question::PodUnits(named("x", None)).encode())?;
    }
    assert_eq!(node.failure(&named("x", None))?, FailureKind::UnknownPod);
    Ok(())
}

fn peer_that_is_not_root_is_refused() -> Result<()> {
    let node = Node::exclusive()?;
    let pod = node.admit("pod", &[(NIC, 1)])?;
    let socket = node.machine.node_socket();
    let directory = socket.parent().context("a directory")?;
    let mode = |path: &Path| -> Result<u32> { Ok(fs::symlink_metadata(path)?.mode() & 0o7777) };
    assert_eq!((mode(directory)?, mode(&socket)?), (0o700, 0o600));
    // Where everybody can start it.
    let peer = node.machine.directory().join("node-socket-peer");
    fs::copy(standin("node-socket-peer")?, &peer)?;
    let ask = || -> Result<(bool, String)> {
        let mut child = Command::new(&peer)
            .arg(&socket)
            .uid(65534)
            .gid(65534)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let mut stdin = child.stdin.take().context("stdin")?;
        let _ = stdin.write_all(&node_wire::Question::PodUnits(pod.clone()).encode());
        drop(stdin);
        let output = child.wait_with_output()?;
        Ok((output.status.success(), String::from_utf8(output.stdout)?))
    };
    let open = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode));
    open(node.machine.directory(), 0o711)?;
    assert_eq!(ask()?, (false, String::new()), "it cannot even connect");
    // Somebody opened it.
    open(directory, 0o711)?;
    open(&socket, 0o666)?;
    for _ in 0..20 {
        let (connected, answer) = ask()?;
        assert!(connected, "{answer}");
        let answer: Value = serde_json::from_str(&answer)?;
        assert_eq!(answer["error"]["kind"], "notAllowed", "{answer}");
        assert!(
            answer["error"]["message"].to_string().contains("65534"),
            "{answer}"
        );
    }
    assert_eq!(node.questions("not_allowed")?, 20);
    let log = node.daemon.log();
    assert_eq!(
        log.matches("refused to answer on the node's socket")
            .count(),
        1,
        "{log}"
    );
    // And our own client does not believe in it any more.
    let error = node.ask(&pod).unwrap_err();
    assert!(matches!(error, ClientError::NotTrusted { .. }), "{error}");
    open(&socket, 0o600)?;
    node.answer(&pod)?;
    Ok(())
}

fn restarted_daemon_answers_the_same() -> Result<()> {
    let mut node = Node::new(POOLED, POOLED_RESOURCE, 300)?;
    let pod = node.admit("pod", &[(POOLED_RESOURCE, 1)])?;
    let before = node.answer(&pod)?;
    let socket = node.machine.node_socket();
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        node.daemon.signal(signal)?;
        node.daemon.ended(WAIT_TIMEOUT)?;
        let error = node.ask(&pod).unwrap_err();
        match signal {
            Signal::SIGTERM => assert!(matches!(error, ClientError::NoSocket { .. }), "{error}"),
            _ => assert!(matches!(error, ClientError::Refused { .. }), "{error}"),
        }
        node.daemon = start(&node.machine, POOLED, node.metrics)?;
        node.listening()?;
        assert_eq!(node.answer(&pod)?, before, "from the first answer on");
        let names: Vec<_> = fs::read_dir(socket.parent().context("parent")?)?.collect();
        assert_eq!(names.len(), 1, "{names:?}");
    }
    Ok(())
}

/// Which file it is.
fn inode(path: &Path) -> Option<u64> {
    fs::symlink_metadata(path).ok().map(|meta| meta.ino())
}

fn rollout_leaves_no_moment_without_an_answer() -> Result<()> {
    let mut node = Node::exclusive()?;
    let pod = node.admit("pod", &[(NIC, 1)])?;
    let socket = node.machine.node_socket();
    let old_inode = inode(&socket);
    let (over, asked) = (AtomicBool::new(false), std::sync::atomic::AtomicU64::new(0));
    let new = thread::scope(|scope| -> Result<Daemon> {
        let asking = scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let answer = pod_units(&socket, &pod, 5 * CALL_TIMEOUT);
                answer.map_err(|error| format!("after {asked:?} answers: {error}"))?;
                asked.fetch_add(1, Ordering::Relaxed);
            }
            Ok::<(), String>(())
        });
        let rolled = (|| {
            let new = start(&node.machine, EXCLUSIVE, free_address()?)?;
            node.until("socket of the new daemon", || {
                Ok(inode(&socket) != old_inode)
            })?;
            // Both live. The old one does not take the place back.
            let new_inode = inode(&socket);
            thread::sleep(Duration::from_millis(2500));
            assert_eq!(inode(&socket), new_inode);
            node.daemon.signal(Signal::SIGTERM)?;
            node.daemon.ended(WAIT_TIMEOUT)?;
            assert_eq!(
                inode(&socket),
                new_inode,
                "the old one's end removed nothing"
            );
            thread::sleep(Duration::from_millis(300));
            anyhow::Ok(new)
        })();
        over.store(true, Ordering::Relaxed);
        asking
            .join()
            .expect("no panic")
            .map_err(anyhow::Error::msg)?;
        rolled
    })?;
    assert!(asked.load(Ordering::Relaxed) > 100, "{asked:?}");

    // A rollout that is taken back: the newest daemon goes, by a signal or by its death, and the
    // older one has the place again.
    node.daemon = new;
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let before = inode(&socket);
        let mut newest = start(&node.machine, EXCLUSIVE, free_address()?)?;
        node.until("socket of the newest daemon", || {
            Ok(inode(&socket) != before)
        })?;
        newest.signal(signal)?;
        newest.ended(WAIT_TIMEOUT)?;
        node.until("answer of the older daemon", || Ok(node.ask(&pod).is_ok()))?;
    }
    Ok(())
}

fn removed_socket_is_made_again() -> Result<()> {
    let node = Node::exclusive()?;
    let pod = node.admit("pod", &[(NIC, 1)])?;
    let socket = node.machine.node_socket();
    fs::remove_file(&socket)?;
    node.until("new socket", || Ok(node.ask(&pod).is_ok()))?;
    fs::remove_dir_all(socket.parent().context("parent")?)?;
    node.until("new directory", || Ok(node.ask(&pod).is_ok()))?;
    fs::remove_file(&socket)?;
    fs::write(&socket, "")?;
    node.until("socket in place of the file", || Ok(node.ask(&pod).is_ok()))?;
    Ok(())
}

fn unusable_directory_is_a_note_and_stops_nothing_else() -> Result<()> {
    let machine = Machine::new()?;
    let socket = machine.node_socket();
    let directory = socket.parent().context("parent")?;
    let elsewhere = machine.directory().join("elsewhere");
    fs::create_dir(&elsewhere)?;
    symlink(&elsewhere, directory)?;
    let (kubelet, metrics) = (machine.kubelet()?, free_address()?);
    let daemon = start(&machine, EXCLUSIVE, metrics)?;
    let node = Node {
        machine,
        kubelet,
        daemon,
        metrics,
    };
    node.registered(NIC, 2)?;
    let pod = node.admit("pod", &[(NIC, 1)])?;
    node.until("note", || {
        Ok(node
            .get("/readyz")?
            .contains("cannot ask which pod holds what"))
    })?;
    let ready = node.get("/readyz")?;
    assert!(
        ready.starts_with("HTTP/1.1 200"),
        "units are handed out all the same: {ready}"
    );
    assert!(
        ready.contains(directory.to_str().context("path")?) && ready.contains("it is a link"),
        "{ready}"
    );
    assert!(
        node.get("/metrics")?
            .contains("\nrdma_device_plugin_node_socket_listening 0")
    );
    assert_eq!(fs::read_dir(&elsewhere)?.count(), 0, "no link was followed");
    // Repaired, without a restart.
    fs::remove_file(directory)?;
    node.until("socket", || Ok(node.ask(&pod).is_ok()))?;
    assert!(!node.get("/readyz")?.contains("cannot ask"));
    assert!(
        node.get("/metrics")?
            .contains("\nrdma_device_plugin_node_socket_listening 1")
    );
    let status: Value = serde_json::from_str(
        node.get("/status")?
            .split_once("\r\n\r\n")
            .context("body")?
            .1,
    )?;
    assert_eq!(status["nodeSocket"]["state"], "listening");
    Ok(())
}
