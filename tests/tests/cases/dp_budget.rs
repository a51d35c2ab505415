//! What the daemon uses of the node, as far as a loaded machine does not change it.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::case;
use e2e::daemon::{Daemon, Machine};
use e2e::harness::Case;
use e2e::kubelet::{Kubelet, Pod};

pub(crate) const CASES: &[Case] = &[case!(
    eight_hcas_in_three_pools_take_at_most_twelve_threads,
    Root
)];

const MAX_THREADS: usize = 12;
const PODS: usize = 6;
/// CNI plugins that ask at a time.
const CLIENTS: usize = 16;
const WAIT_TIMEOUT: Duration = Duration::from_secs(20);
const UNITS: [(&str, usize); 3] = [("rdma/late", 4), ("rdma/whole", 2), ("rdma/shared", 2000)];

const CONFIG: &str = r#"
version: 1
rescanInterval: 1s
pools:
- resource: rdma/late
  mode: exclusive
  binding: late
  bindAtStart: true
  select: {rdmaDevices: [mlx5_0, mlx5_1, mlx5_2, mlx5_3]}
- resource: rdma/whole
  mode: exclusive
  select: {rdmaDevices: [mlx5_4, mlx5_5]}
- resource: rdma/shared
  mode: shared
  shares: 1000
  select: {rdmaDevices: [mlx5_6, mlx5_7]}
"#;

fn eight_hcas_in_three_pools_take_at_most_twelve_threads() -> Result<()> {
    let machine = Machine::with_hcas(8)?;
    let kubelet = machine.kubelet()?;
    let file = machine.directory().join("config");
    fs::write(&file, CONFIG)?;
    let (root, cdi) = (machine.settings().root, machine.directory().join("cdi"));
    fs::create_dir(&cdi)?;
    let flags: [&OsStr; 6] = [
        "--kubelet-root-dir".as_ref(),
        root.as_os_str(),
        "--cdi-dir".as_ref(),
        cdi.as_os_str(),
        "--metrics-addr".as_ref(),
        "127.0.0.1:0".as_ref(),
    ];
    let daemon = machine.daemon_on(&file, &flags)?;
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let most = scope.spawn(|| most_threads(&daemon, &is_over));
        let worked = pods_come_and_go(&machine.node_socket(), kubelet)
            .and_then(|kubelet| {
                fs::write(&file, CONFIG.replace("1000", "500"))?;
                kubelet.wait_allocatable("rdma/shared", 1000, WAIT_TIMEOUT)
            })
            .with_context(|| daemon.log());
        is_over.store(true, Ordering::Relaxed);
        let most = most.join().ok().context("panicked")??;
        worked?;
        ensure!(most.len() <= MAX_THREADS, "{}: {most:?}", most.len());
        Ok(())
    })
}

/// The names of its threads when they were most.
fn most_threads(daemon: &Daemon, is_over: &AtomicBool) -> Result<Vec<String>> {
    let mut most = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        let threads = fs::read_dir(format!("/proc/{}/task", daemon.id()))?;
        // One that ends meanwhile counts, and has no name.
        let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm"));
        let names = threads.flatten().map(|task| name(task).unwrap_or_default());
        let names: Vec<_> = names.map(|name| name.trim_end().to_owned()).collect();
        if names.len() > most.len() {
            most = names;
        }
        thread::sleep(Duration::from_micros(200));
    }
    Ok(most)
}

fn pods_come_and_go(socket: &Path, mut kubelet: Kubelet) -> Result<Kubelet> {
    for number in 0..PODS {
        for (resource, units) in UNITS {
            kubelet.wait_allocatable(resource, units, WAIT_TIMEOUT)?;
        }
        let mut names = Vec::new();
        for (resource, _) in UNITS {
            let name = format!("{}-{number}", resource.trim_start_matches("rdma/"));
            let pod = Pod::with_limits(&name, &[(resource, 1)])?;
            let asked = node_wire::Pod {
                namespace: pod.metadata.namespace.clone(),
                name: pod.metadata.name.clone(),
                uid: Some(pod.metadata.uid.clone()),
            };
            kubelet.admit(pod)?;
            thread::scope(|scope| -> Result<()> {
                let ask = || node_wire::ask(socket, &asked, WAIT_TIMEOUT);
                let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(ask)).collect();
                for client in clients {
                    client.join().ok().context("panicked")??;
                }
                Ok(())
            })?;
            names.push(format!("default/{name}"));
        }
        for name in &names {
            kubelet.run_options(name, "main")?;
        }
        for name in &names {
            kubelet.remove(name)?;
        }
        if number == PODS / 2 {
            kubelet = kubelet.restart()?;
        }
    }
    Ok(kubelet)
}
