//! Clients of the daemon's socket: many, slow, malformed, not root.

use std::fs::{self, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::bin_under_test::standin;
use e2e::case;
use e2e::harness::Case;
use node_wire::{FailureKind, Fault, ask};
use serde_json::Value;

use super::dp_node_socket::{
    CALL_TIMEOUT, NIC, Node, POOLED, POOLED_RESOURCE, WAIT_TIMEOUT, named, of,
};

pub(crate) const CASES: &[Case] = &[
    case!(two_hundred_clients_share_the_kubelets_lists, Root),
    case!(half_open_clients_delay_no_answer, Root),
    case!(malformed_questions_are_answered_by_name, Root),
    case!(peer_that_is_not_root_is_refused, Root),
];

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
                scope.spawn(move || ask(socket, pod, 5 * CALL_TIMEOUT))
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
        // The daemon may close one before it has read what was written.
        if let Err(error) = stream.read_to_string(&mut answer) {
            ensure!(error.kind() == ErrorKind::ConnectionReset, "{error}");
        }
        ensure!(
            answer.is_empty() || answer.contains("malformed"),
            "{answer}"
        );
    }
    let mut late = UnixStream::connect(&socket)?;
    thread::sleep(Duration::from_millis(700));
    late.write_all(&node_wire::Question::PodUnits(pod).encode())?;
    late.shutdown(Shutdown::Write)?;
    let mut answer = String::new();
    late.read_to_string(&mut answer)?;
    assert!(answer.contains("\"answer\""), "{answer}");
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
            br#"{"version": 1, "question": {"podUnits": {"namespace": "a"}}}"#,
            "malformed",
        ),
        (
            br#"{"version": 9, "question": {"podUnits": {}}}"#,
            "unsupportedVersion",
        ),
        (
            br#"{"version": 1, "question": {"bindSlots": {}}}"#,
            "unknownQuestion",
        ),
    ] {
        let answer = exchange(&node.machine.node_socket(), question)?;
        assert_eq!(answer["error"]["kind"], kind, "{answer}");
        assert_eq!(answer["version"], 1, "{answer}");
    }
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
    let log = node.daemon.log();
    assert_eq!(
        log.matches("refused to answer on the node's socket")
            .count(),
        1,
        "{log}"
    );
    // And our own client does not believe in it any more.
    let error = node.ask(&pod).unwrap_err();
    assert!(matches!(error.fault, Fault::NotTrusted(_)), "{error}");
    open(&socket, 0o600)?;
    node.answer(&pod)?;
    Ok(())
}
