//! ADD and DEL of `rdma-netdev` beside the reference plugins, as ratios of one interleaved run.
//!
//! Everything happens in a mount and network namespace of the bench's own, which plays the host:
//! veth pairs are its NICs and its uplink. Each plugin is started as a runtime starts it, by `posix_spawn` and
//! without a shell between; wall time is from there to the end of the process, CPU time is that
//! of the process and all it ran (`RUSAGE_CHILDREN`).
//!
//! Contestants take turns within each round, so that whatever else the machine does falls on
//! all of them. Times on a shared machine mean little; their ratios mean something.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use e2e::bin_under_test::product;
use e2e::host_root;
use e2e::measure::{Cost, Costs, Row, cost_of, row, table};
use e2e::need::REFERENCE_PLUGINS;
use e2e::netns::{Netns, run};
use e2e::node_socket::{NodeSocket, allocation_of_hcas};
use hca_trees::{NetdevSpec, On, PciSpec, Tree};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use node_wire::Pod;
use serde_json::{Value, json};
use tempfile::TempDir;

#[derive(Debug, Parser)]
#[command(about = "ADD and DEL of rdma-netdev beside the reference plugins, as ratios of one run")]
struct Arguments {
    /// Rounds of the usual contests
    #[arg(long, default_value_t = 60)]
    rounds: usize,
    /// The program `bench-floor`, built as the plugin is
    #[arg(long)]
    floor: PathBuf,
    /// Exit with a failure when a ratio is over its budget
    #[arg(long)]
    check: bool,
}

/// NICs of the host: those of a GPU node.
const NICS: usize = 8;

/// Pods of a full node.
const PODS: usize = 200;

/// The pod that has all NICs, as the daemon says.
const POD_ARGS: &str = "K8S_POD_NAMESPACE=bench;K8S_POD_NAME=all";

/// One side of a contest: a plugin with its configuration, and a pod for it.
struct Side {
    plugin: PathBuf,
    /// A tree of files in place of the host's root, for HCAs that the machine has not.
    host_root: Option<PathBuf>,
    config: String,
    pod: Netns,
    policy: PathBuf,
    add: Costs,
    del: Costs,
}

impl Side {
    fn call(&self, command: &str, container: &str) -> Result<Cost> {
        self.call_for(command, container, "net1", &self.config)
    }

    fn call_for(&self, command: &str, container: &str, ifname: &str, config: &str) -> Result<Cost> {
        let mut process = Command::new(&self.plugin);
        process
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", container)
            .env("CNI_NETNS", self.pod.path())
            .env("CNI_IFNAME", ifname)
            .env("CNI_PATH", REFERENCE_PLUGINS)
            .env("RDMA_NETDEV_POLICY", &self.policy)
            .env("RDMA_HOST_ROOT", self.policy.with_file_name("host"));
        if let Some(root) = &self.host_root {
            process
                .env("RDMA_HOST_ROOT", root)
                .env("CNI_ARGS", POD_ARGS);
        }
        let (cost, output) = cost_of(&mut process, config.as_bytes())?;
        ensure!(
            output.status.success(),
            "{} {command}: {}{}",
            self.plugin.display(),
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(cost)
    }

    /// Attaches the pod, which goes to `kept`.
    fn attach(self, container: &str, kept: &mut Vec<Netns>) -> Result<()> {
        self.call("ADD", container)?;
        kept.push(self.pod);
        Ok(())
    }
}

/// ADD and DEL of each side in turns. The first round is not measured.
fn in_turns(sides: &mut [Side], rounds: usize) -> Result<()> {
    for round in 0..=rounds {
        for side in &mut *sides {
            let container = format!("bench-{round}");
            let add = side.call("ADD", &container)?;
            let del = side.call("DEL", &container)?;
            if round > 0 {
                side.add.0.push(add);
                side.del.0.push(del);
            }
        }
    }
    Ok(())
}

/// What the bench works with.
struct Fixture {
    directory: TempDir,
    netdev: PathBuf,
}

impl Fixture {
    fn new() -> Result<Self> {
        unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS)
            .context("make namespaces (needs root)")?;
        // A sysfs of this network namespace alone. Pods are made with ip, which
        // shares its mounts, so only /sys is cut off from the rest.
        let none = None::<&str>;
        mount(
            none,
            "/sys",
            none,
            MsFlags::MS_REC | MsFlags::MS_SLAVE,
            none,
        )
        .or_else(|_| mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none))
        .context("keep mounts to ourselves")?;
        mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), none)
            .context("mount a sysfs of the namespace")?;
        for command in [
            "link set lo up",
            "link add nic0 type veth peer name peer0",
            "link set nic0 up",
            "link set peer0 up",
            "addr add 10.9.0.1/16 dev nic0",
            // As on any node, the way out is another NIC.
            "link add uplink0 type veth peer name outside0",
            "link set uplink0 up",
            "link set outside0 up",
            "addr add 10.8.0.2/24 dev uplink0",
            "route add default via 10.8.0.1 dev uplink0",
        ] {
            run(Command::new("ip").args(command.split_whitespace()))?;
        }
        for number in 1..NICS {
            for command in [
                format!("link add nic{number} type veth peer name peer{number}"),
                format!("link set nic{number} up"),
                format!("link set peer{number} up"),
            ] {
                run(Command::new("ip").args(command.split_whitespace()))?;
            }
        }
        let directory = TempDir::new()?;
        host_root::make(&directory.path().join("host"))?;
        Ok(Fixture {
            directory,
            netdev: product("rdma-netdev")?,
        })
    }

    fn policy(&self) -> Result<PathBuf> {
        let directory = self.directory.path();
        let policy = json!({
            "stateDir": directory.join("state"),
            "ipam": {"cooldown": "0s"},
            "allow": {"nonRdma": true, "virtual": true, "unallocated": true, "ipam": ["rdma-ipam", "host-local"]},
        });
        let path = directory.join("policy.json");
        fs::write(&path, policy.to_string())?;
        Ok(path)
    }

    fn side(&self, plugin: &Path, name: &str, keys: &Value) -> Result<Side> {
        let mut config = json!({"cniVersion": "1.0.0", "name": name, "type": "bench"});
        if let (Some(config), Some(keys)) = (config.as_object_mut(), keys.as_object()) {
            config.extend(keys.clone());
        }
        Ok(Side {
            plugin: plugin.to_owned(),
            host_root: None,
            config: config.to_string(),
            pod: Netns::new("bench")?,
            policy: self.policy()?,
            add: Costs::default(),
            del: Costs::default(),
        })
    }

    /// A pod with eight interfaces, one after the other as Multus makes them. The configuration's
    /// master is counted up.
    fn eight(&self, side: &mut Side, container: &str, timed: bool) -> Result<()> {
        let mut total = [Cost::default(), Cost::default()];
        for (command, total) in ["ADD", "DEL"].into_iter().zip(&mut total) {
            for number in 0..NICS {
                let config = side.config.replace("nic0", &format!("nic{number}"));
                let cost =
                    side.call_for(command, container, &format!("net{}", number + 1), &config)?;
                total.wall += cost.wall;
                total.cpu += cost.cpu;
            }
        }
        if timed {
            let [add, del] = total;
            side.add.0.push(add);
            side.del.0.push(del);
        }
        Ok(())
    }

    /// A root on whose sysfs each NIC is a function of its own, and the daemon's socket there: the pod
    /// has a unit of each.
    fn hardware(&self) -> Result<(PathBuf, NodeSocket)> {
        let root = self.directory.path().join("root");
        fs::create_dir(&root)?;
        let tree = Tree::new(&root);
        let pci: Vec<String> = (0..NICS).map(pci_of).collect();
        for (number, address) in pci.iter().enumerate() {
            tree.pci(&PciSpec {
                address,
                above: "pci0000:00/0000:00:01.0",
                ..PciSpec::MLX5
            });
            tree.netdev(&NetdevSpec {
                name: &format!("nic{number}"),
                on: On::Pci(address),
                ..NetdevSpec::default()
            });
        }
        fs::remove_dir_all(root.join("proc"))?;
        std::os::unix::fs::symlink("/proc", root.join("proc"))?;
        let socket = NodeSocket::start(&root.join("run/rdma-netdev/node.sock"))?;
        let pci: Vec<&str> = pci.iter().map(String::as_str).collect();
        let mut units = allocation_of_hcas("main", "rdma/nic", &pci, &pci);
        units.pool.clone_from(&units.hcas);
        let pod = Pod {
            namespace: "bench".into(),
            name: "all".into(),
            uid: None,
        };
        socket.hold(&pod, vec![units]);
        Ok((root, socket))
    }

    /// Ours and the reference's, in turns.
    fn contest(&self, ours: &Value, peer: (&str, &Value), rounds: usize) -> Result<(Side, Side)> {
        let plugin = Path::new(REFERENCE_PLUGINS).join(peer.0);
        let mut sides = [
            self.side(&self.netdev, "ours", ours)?,
            self.side(&plugin, "theirs", peer.1)?,
        ];
        in_turns(&mut sides, rounds)?;
        let [ours, theirs] = sides;
        Ok((ours, theirs))
    }

    fn host_local(&self, ranges: &[&str], routes: &Value) -> Value {
        let ranges: Vec<Value> = ranges
            .iter()
            .map(|subnet| json!([{"subnet": subnet}]))
            .collect();
        json!({
            "type": "host-local",
            "dataDir": self.directory.path().join("host-local"),
            "ranges": ranges,
            "routes": routes,
        })
    }
}

/// Pods of a node, each with a veth to the host, a process, and an attachment to the network of
/// `side`.
struct Pods {
    processes: Vec<std::process::Child>,
    _namespaces: Vec<Netns>,
}

impl Drop for Pods {
    fn drop(&mut self) {
        for process in &mut self.processes {
            // It may have ended.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

impl Pods {
    fn start(side: &Side) -> Result<Self> {
        let mut pods = Pods {
            processes: Vec::new(),
            _namespaces: Vec::new(),
        };
        for number in 0..PODS {
            let pod = Netns::new("bench")?;
            pod.ip(&format!("link add eth0 type veth peer name pod{number}"))?;
            pod.ip(&format!(
                "link set pod{number} netns {}",
                std::process::id()
            ))?;
            pod.ip("link set eth0 up")?;
            let process = pod.command("sleep").arg("600").spawn();
            pods.processes
                .push(process.context("start a pod's process")?);
            Side {
                pod,
                plugin: side.plugin.clone(),
                host_root: None,
                config: side.config.clone(),
                policy: side.policy.clone(),
                add: Costs::default(),
                del: Costs::default(),
            }
            .attach(&format!("pod-{number}"), &mut pods._namespaces)?;
        }
        Ok(pods)
    }
}

/// An empty `main`, built as the plugin is: what starting a process costs at the least.
fn no_op(fixture: &Fixture) -> Result<PathBuf> {
    let source = fixture.directory.path().join("no_op.rs");
    let program = fixture.directory.path().join("no-op");
    fs::write(&source, "fn main() {}\n")?;
    let build = |target: &[&str]| {
        run(Command::new("rustc")
            .args(target)
            .args([
                "-O",
                "-Cpanic=abort",
                "-Cstrip=symbols",
                "-Clto=fat",
                "-Ccodegen-units=1",
                "-o",
            ])
            .arg(&program)
            .arg(&source))
    };
    let musl = format!("--target={}-unknown-linux-musl", std::env::consts::ARCH);
    // The same C library as the plugin under test, or the comparison is of those.
    match is_static(&fixture.netdev)? {
        true => build(&[&musl])?,
        false => build(&[])?,
    };
    Ok(program)
}

fn is_static(program: &Path) -> Result<bool> {
    let bytes = fs::read(program)?;
    // An ELF that names no interpreter needs no dynamic linker.
    Ok(!bytes
        .windows(7)
        .take(8192)
        .any(|window| window == b"/ld-lin"))
}

fn versions(fixture: &Fixture, rounds: usize) -> Result<Row> {
    let no_op = no_op(fixture)?;
    let (mut ours, mut nothing) = (Costs::default(), Costs::default());
    for round in 0..=rounds * 5 {
        let version = Command::new(&fixture.netdev)
            .env_clear()
            .env("CNI_COMMAND", "VERSION")
            .cost()?;
        let empty = Command::new(&no_op).env_clear().cost()?;
        if round > 0 {
            ours.0.push(version);
            nothing.0.push(empty);
        }
    }
    Ok(row(
        "VERSION, beside a program that does nothing",
        &ours,
        &nothing,
        [Some(1.3), None],
    ))
}

/// Beside a program that makes the same requests of the kernel and nothing else: what journal,
/// policy, addresses and JSON cost.
fn floor(
    fixture: &Fixture,
    bare: &Path,
    own: &dyn Fn(Value) -> Value,
    rounds: usize,
) -> Result<Row> {
    let mut ours = fixture.side(
        &fixture.netdev,
        "floor",
        &own(json!({"range": "10.9.0.0/16", "range_start": "10.9.1.0"})),
    )?;
    let mut requests = Costs::default();
    let pod = Netns::new("bench")?;
    for round in 0..=rounds {
        let container = format!("floor-{round}");
        let add = ours.call("ADD", &container)?;
        ours.call("DEL", &container)?;
        let arguments = ["nic0", "net1", "10.9.2.1/16"];
        let least = Command::new(bare)
            .env_clear()
            .arg(pod.path())
            .args(arguments)
            .cost()?;
        pod.ip("link del net1")?;
        if round > 0 {
            ours.add.0.push(add);
            requests.0.push(least);
        }
    }
    Ok(row(
        "ADD macvlan + IPAM, beside its netlink requests alone",
        &ours.add,
        &requests,
        [Some(1.25), None],
    ))
}

/// The PCI address of a NIC.
fn pci_of(number: usize) -> String {
    format!("0000:3b:{number:02x}.0")
}

/// All NICs in one attachment beside one of them, and beside the reference pair called for each
/// (`theirs`).
fn all_nics(
    fixture: &Fixture,
    theirs: &Side,
    own: &dyn Fn(Value) -> Value,
    rounds: usize,
) -> Result<Vec<Row>> {
    let (root, _socket) = fixture.hardware()?;
    let side = |name: &str, devices: &str| -> Result<Side> {
        let mut keys = own(json!({"range": "10.9.0.0/16", "range_start": "10.9.1.0"}));
        if let Some(keys) = keys.as_object_mut() {
            keys.remove("master");
            keys.insert("devices".into(), devices.into());
            keys.insert("deviceID".into(), pci_of(0).into());
        }
        Ok(Side {
            host_root: Some(root.clone()),
            ..fixture.side(&fixture.netdev, name, &keys)?
        })
    };
    let mut sides = [side("all", "all")?, side("one", "one")?];
    in_turns(&mut sides, rounds.min(30))?;
    let [all, one] = sides;
    Ok(vec![
        row(
            "ADD of eight NICs in one attachment, beside one NIC",
            &all.add,
            &one.add,
            [None, Some(2.5)],
        ),
        row("DEL of the same", &all.del, &one.del, [None, None]),
        row(
            "ADD of eight NICs in one attachment, beside macvlan + host-local called eight times",
            &all.add,
            &theirs.add,
            [Some(0.1), None],
        ),
    ])
}

/// Attachments on a full node beside the same on an empty one, and beside the reference plugins on the
/// full one; then while a pod changes its links all the time.
fn full_node(
    fixture: &Fixture,
    own: &dyn Fn(Value) -> Value,
    macvlan: &dyn Fn(Value) -> Value,
    rounds: usize,
) -> Result<Vec<Row>> {
    let child = own(json!({"range": "10.9.0.0/16", "range_start": "10.9.1.0"}));
    let moved = json!({"attach": "move", "device": "nic7"});
    let host_device = json!({"attach": "move", "device": "nic7"});
    let theirs = macvlan(fixture.host_local(&["10.9.0.0/16"], &json!([])));
    let contests = || -> Result<_> {
        Ok([
            fixture.contest(&moved, ("host-device", &host_device), rounds)?,
            fixture.contest(&child, ("macvlan", &theirs), rounds)?,
        ])
    };
    let empty = contests()?;
    let pods = Pods::start(&fixture.side(&fixture.netdev, "pods", &child)?)?;
    add_routes(fixture)?;
    start_threads()?;
    let full = contests()?;
    let changing = ChangingPod::start(fixture)?;
    let changed = contests()?;
    drop((pods, changing));

    let what = format!("{PODS} pods, {ROUTES} routes, {THREADS} threads");
    let changes = format!("{what}, a pod that changes its {LINKS} links");
    let mut rows = Vec::new();
    for (node, contests) in [(what, &full), (changes, &changed)] {
        let pairs = ["move", "macvlan"].into_iter().zip(&empty).zip(contests);
        for ((kind, (empty, _)), (full, theirs)) in pairs {
            for (command, empty, full, theirs) in [
                ("ADD", &empty.add, &full.add, &theirs.add),
                ("DEL", &empty.del, &full.del, &theirs.del),
            ] {
                let what = format!("{command} {kind} with {node}");
                rows.push(row(
                    &format!("{what}, beside an empty node"),
                    full,
                    empty,
                    [None, Some(1.2)],
                ));
                rows.push(row(
                    &format!("{what}, beside the reference plugin there"),
                    full,
                    theirs,
                    [None, None],
                ));
            }
        }
    }
    Ok(rows)
}

/// Routes of a node of a large cluster beside its default route.
const ROUTES: usize = 20_000;

fn add_routes(fixture: &Fixture) -> Result<()> {
    let batch = fixture.directory.path().join("routes");
    let lines =
        (0..ROUTES).map(|n| format!("route add 20.{}.{}.0/24 via 10.8.0.1\n", n >> 8, n & 255));
    fs::write(&batch, lines.collect::<String>())?;
    run(Command::new("ip").arg("-batch").arg(&batch))?;
    Ok(())
}

/// Threads of the node's processes.
const THREADS: usize = 10_000;

/// Starts threads that wait until this process ends.
fn start_threads() -> Result<()> {
    for _ in 0..THREADS {
        std::thread::Builder::new()
            .stack_size(16 << 10)
            .spawn(|| {
                loop {
                    std::thread::park();
                }
            })
            .context("start a thread")?;
    }
    Ok(())
}

/// Links of a pod that changes them.
const LINKS: usize = 10_000;

/// A pod with many links and a veth to the host, which creates and deletes three links until the end.
struct ChangingPod {
    process: std::process::Child,
    _pod: Netns,
}

impl ChangingPod {
    fn start(fixture: &Fixture) -> Result<Self> {
        let pod = Netns::new("bench")?;
        pod.ip("link add eth0 type veth peer name changing")?;
        pod.ip(&format!("link set changing netns {}", std::process::id()))?;
        let batch = |name: &str, lines: String| -> Result<PathBuf> {
            let path = fixture.directory.path().join(name);
            fs::write(&path, lines)?;
            Ok(path)
        };
        let pairs = (0..LINKS / 2).map(|n| format!("link add d{n} type veth peer name e{n}\n"));
        let links = batch("links", pairs.collect())?;
        run(pod.command("ip").arg("-batch").arg(links))?;
        let changes =
            (0..3).map(|n| format!("link add c{n} type veth peer name p{n}\nlink del c{n}\n"));
        let changes = batch("changes", changes.collect())?;
        let process = pod
            .command("sh")
            .args(["-c", "while ip -batch \"$0\"; do :; done"])
            .arg(changes)
            .spawn()
            .context("start the program that changes links")?;
        Ok(ChangingPod { process, _pod: pod })
    }
}

impl Drop for ChangingPod {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

trait CostOf {
    fn cost(&mut self) -> Result<Cost>;
}

impl CostOf for Command {
    fn cost(&mut self) -> Result<Cost> {
        let (cost, output) = cost_of(self, b"")?;
        if !output.status.success() {
            bail!("{self:?} failed: {}", output.status);
        }
        Ok(cost)
    }
}

fn rows(fixture: &Fixture, bare: &Path, rounds: usize) -> Result<Vec<Row>> {
    let macvlan = |ipam: Value| json!({"attach": "macvlan", "master": "nic0", "mode": "bridge", "ipam": ipam});
    let own = |more: Value| {
        let mut ipam = json!({"type": "rdma-ipam"});
        if let (Some(ipam), Some(more)) = (ipam.as_object_mut(), more.as_object()) {
            ipam.extend(more.clone());
        }
        let mut config = macvlan(ipam);
        if let Some(config) = config.as_object_mut() {
            config.insert("attach".into(), "macvlan".into());
        }
        config
    };
    let mut rows = vec![versions(fixture, rounds)?];

    let (ours, theirs) = fixture.contest(
        &own(json!({"range": "10.9.0.0/16", "range_start": "10.9.1.0"})),
        (
            "macvlan",
            &macvlan(fixture.host_local(&["10.9.0.0/16"], &json!([]))),
        ),
        rounds,
    )?;
    rows.push(row(
        "ADD macvlan + IPAM, beside macvlan + host-local",
        &ours.add,
        &theirs.add,
        [Some(0.29), Some(0.25)],
    ));
    rows.push(row(
        "DEL of the same",
        &ours.del,
        &theirs.del,
        [None, Some(0.25)],
    ));

    rows.push(floor(fixture, bare, &own, rounds)?);

    let mut sides = [
        fixture.side(
            &fixture.netdev,
            "eight-ours",
            &own(json!({"range": "10.9.0.0/16", "range_start": "10.9.1.0"})),
        )?,
        fixture.side(
            &Path::new(REFERENCE_PLUGINS).join("macvlan"),
            "eight-theirs",
            &macvlan(fixture.host_local(&["10.9.0.0/16"], &json!([]))),
        )?,
    ];
    for round in 0..=rounds.min(15) {
        for side in &mut sides {
            fixture.eight(side, &format!("eight-{round}"), round > 0)?;
        }
    }
    let [ours, theirs] = sides;
    rows.push(row(
        "ADD of a pod's eight interfaces, beside the same peers",
        &ours.add,
        &theirs.add,
        [Some(0.29), Some(0.25)],
    ));
    rows.push(row(
        "DEL of the same",
        &ours.del,
        &theirs.del,
        [None, Some(0.25)],
    ));

    rows.extend(all_nics(fixture, &theirs, &own, rounds)?);

    let both = own(json!({
        "ipRanges": [{"range": "10.9.0.0/16", "range_start": "10.9.1.0"}, {"range": "fd09::/64"}],
        "gateway": "fd09::1",
        "routes": [{"dst": "fd77::/32", "gw": "fd09::1"}],
    }));
    let route = json!([{"dst": "fd77::/32", "gw": "fd09::1"}]);
    let (dual, theirs) = fixture.contest(
        &both,
        (
            "macvlan",
            &macvlan(fixture.host_local(&["10.9.0.0/16", "fd09::/64"], &route)),
        ),
        rounds.min(5),
    )?;
    rows.push(row(
        "ADD with an IPv6 gateway, beside the same peers",
        &dual.add,
        &theirs.add,
        [None, None],
    ));
    // In turns again, with the addresses of one family and of both.
    let mut sides = [
        fixture.side(&fixture.netdev, "dual", &both)?,
        fixture.side(
            &fixture.netdev,
            "single",
            &own(json!({"range": "10.9.0.0/16", "range_start": "10.9.1.0"})),
        )?,
    ];
    for round in 0..rounds {
        for side in &mut sides {
            let container = format!("family-{round}");
            let cost = side.call("ADD", &container)?;
            side.add.0.push(cost);
            side.call("DEL", &container)?;
        }
    }
    let [dual, single] = sides;
    rows.push(row(
        "ADD with IPv4 and IPv6, beside IPv4 alone",
        &dual.add,
        &single.add,
        [Some(1.3), None],
    ));

    let (ours, theirs) = fixture.contest(
        &json!({"attach": "move", "device": "nic0"}),
        ("host-device", &json!({"attach": "move", "device": "nic0"})),
        rounds.min(20),
    )?;
    rows.push(row(
        "ADD by moving the NIC, beside host-device",
        &ours.add,
        &theirs.add,
        [None, None],
    ));
    rows.push(row("DEL of the same", &ours.del, &theirs.del, [None, None]));
    let sum = |side: &Side| {
        Costs(
            side.add
                .0
                .iter()
                .zip(&side.del.0)
                .map(|(add, del)| Cost {
                    wall: add.wall + del.wall,
                    cpu: add.cpu + del.cpu,
                })
                .collect(),
        )
    };
    rows.push(row(
        "there and back",
        &sum(&ours),
        &sum(&theirs),
        [Some(1.05), Some(0.9)],
    ));
    rows.extend(full_node(fixture, &own, &macvlan, rounds.min(20))?);
    Ok(rows)
}

#[expect(clippy::print_stdout, reason = "the table is what this program is for")]
fn report(fixture: &Fixture, rows: &[Row]) -> Result<()> {
    println!("{}", table(rows));
    for name in ["rdma-netdev", "rdma-ipam"] {
        let bytes = fs::metadata(fixture.netdev.with_file_name(name))?.len();
        println!("{name}: {} KiB", bytes / 1024);
    }
    Ok(())
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let fixture = Fixture::new()?;
    let rows = rows(&fixture, &arguments.floor, arguments.rounds)?;
    report(&fixture, &rows)?;
    let over = rows.iter().filter(|row| !row.within()).count();
    Ok(match arguments.check && over > 0 {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    })
}
