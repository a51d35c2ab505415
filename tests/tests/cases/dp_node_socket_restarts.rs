//! The daemon's socket over restarts of the daemon, and where it cannot be made.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use e2e::case;
use e2e::daemon::{Daemon, Machine};
use e2e::harness::Case;
use nix::sys::signal::Signal;
use node_wire::{Fault, ask};
use serde_json::Value;

use super::dp_node_socket::{
    CALL_TIMEOUT, EXCLUSIVE, NIC, Node, POOLED, POOLED_RESOURCE, WAIT_TIMEOUT, free_address, start,
};

pub(crate) const CASES: &[Case] = &[
    case!(restarted_daemon_answers_the_same, Root),
    case!(rollout_leaves_no_moment_without_an_answer, Root),
    case!(removed_socket_is_made_again, Root),
    case!(unusable_directory_is_a_note_and_stops_nothing_else, Root),
];

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
            Signal::SIGTERM => assert!(matches!(error.fault, Fault::NoSocket), "{error}"),
            _ => assert!(matches!(error.fault, Fault::Refused), "{error}"),
        }
        node.daemon = start(&node.machine, POOLED, node.metrics)?;
        node.listening()?;
        assert_eq!(node.answer(&pod)?, before, "from the first answer on");
        let names = e2e::daemon::sockets(socket.parent().context("parent")?)?;
        assert_eq!(names.len(), 1, "{names:?}");
    }
    Ok(())
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
                let answer = ask(&socket, &pod, 5 * CALL_TIMEOUT);
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

/// Which file it is.
fn inode(path: &Path) -> Option<u64> {
    fs::symlink_metadata(path).ok().map(|meta| meta.ino())
}
