//! What a person asks `rdmactl` on a node: `discover`, `preflight`, `status`, `pods`.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::bin_under_test::product;
use e2e::case;
use e2e::daemon::{Daemon, Machine};
use e2e::harness::Case;
use e2e::kubelet::{Kubelet, Pod};
use serde_json::{Value, json};

pub(crate) const CASES: &[Case] = &[
    case!(discover_names_the_resources_and_the_gids, Root),
    case!(preflight_says_each_fault_and_ends_with_1, Root),
    case!(preflight_waits_until_nothing_fails, Root),
    case!(the_init_container_of_the_docs_waits_for_all_ports, Root),
    case!(preflight_refuses_a_check_that_is_not_there),
    case!(preflight_lists_its_catalogue_as_a_document),
    case!(
        preflight_believes_no_process_by_its_name,
        Root,
        MountNamespace
    ),
    case!(preflight_without_rights_is_unknown_with_the_right, Root),
    case!(preflight_with_sysfs_alone_judges_nothing_unread, Root),
    case!(status_fails_where_nothing_answers),
    case!(status_joins_what_daemon_and_kubelet_say, Root),
    case!(status_is_from_any_source_that_answers, Root),
    case!(status_notes_a_wrong_policy, Root),
    case!(a_full_node_fits_a_screen, Root),
];

/// NICs that are in a pool have to be in order; of others only a warning is given.
pub(super) const POOLS: &str = "version: 1\npools:\n- {resource: rdma/hca, mode: shared, shares: 2, select: {linkTypes: [ether]}}\n";

fn plugin(arguments: &[&str]) -> Result<Command> {
    let mut command = Command::new(product("rdmactl")?);
    command.args(arguments).stdin(Stdio::null());
    Ok(command)
}

fn said(output: &Output) -> String {
    let text = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
    String::from_utf8_lossy(&text).into_owned()
}

pub(super) fn document(output: &Output) -> Result<Value> {
    serde_json::from_slice(&output.stdout).with_context(|| said(output))
}

fn discover_names_the_resources_and_the_gids() -> Result<()> {
    let machine = Machine::new()?;
    let host = machine.directory().join("host");
    let config = machine.directory().join("pools.yaml");
    fs::write(
        &config,
        POOLS.replace("linkTypes: [ether]", "rdmaDevices: [mlx5_0]"),
    )?;
    let discover = |arguments: &[&str]| -> Result<String> {
        let mut command = plugin(&["discover", "--host-root"])?;
        Ok(said(&command.arg(&host).args(arguments).output()?))
    };
    let named = ["--config-file", config.to_str().context("path")?];
    let text = discover(&named)?;
    let line = |device: &str| {
        text.lines()
            .find(|l| l.starts_with(&format!("{device} ")))
            .map(str::to_owned)
    };
    assert!(
        line("mlx5_0").is_some_and(|l| l.contains("rdma/hca")),
        "{text}"
    );
    assert!(
        line("mlx5_1").is_some_and(|l| !l.contains("rdma/hca")),
        "{text}"
    );
    // Without a configuration there are no pools to print; one that is named must be right.
    assert!(!discover(&[])?.contains("RESOURCES"));
    fs::write(&config, "version: 2\n")?;
    assert!(discover(&named)?.contains("version"));
    let port = "/sys/class/infiniband/mlx5_0/ports/1";
    for (file, text) in [
        ("gids/3", "0000:0000:0000:0000:0000:ffff:0a00:0007\n"),
        ("gid_attrs/types/3", "RoCE v2\n"),
        ("gid_attrs/ndevs/3", "rdma0\n"),
    ] {
        machine.tree.file(format!("{port}/{file}"), text);
    }
    let gids = discover(&["--gids"])?;
    let slot = ["mlx5_0", "1", "3", "RoCE", "v2", "rdma0", "10.0.0.7"];
    assert!(
        gids.lines().any(|l| l.split_whitespace().eq(slot)),
        "{gids}"
    );
    Ok(())
}

fn preflight(machine: &Machine, arguments: &[&str]) -> Result<Command> {
    let host = machine.directory().join("host");
    let config = machine.directory().join("pools.yaml");
    fs::write(&config, POOLS)?;
    let mut command = plugin(&["preflight", "--host-root"])?;
    command
        .arg(host)
        .arg("--config-file")
        .arg(config)
        .args(arguments);
    Ok(command)
}

fn port_state(machine: &Machine, state: &str) -> Result<()> {
    let ports = "/sys/class/infiniband/mlx5_0/ports/1/state";
    Ok(fs::write(machine.tree.path(ports), state)?)
}

fn preflight_says_each_fault_and_ends_with_1() -> Result<()> {
    let machine = Machine::new()?;
    let fine = preflight(&machine, &["--only", "L01,L06", "--json"])?.output()?;
    assert!(fine.status.success(), "{}", said(&fine));
    let checks = document(&fine)?;
    assert_eq!(checks["summary"]["pass"], 2, "{checks}");

    port_state(&machine, "1: DOWN\n")?;
    let down = preflight(&machine, &["--only", "L01,L06"])?.output()?;
    assert_eq!(down.status.code(), Some(1));
    let text = said(&down);
    for part in [
        "L01 FAIL",
        "mlx5_0/1",
        "DOWN",
        "do    ",
        "1 check failed: L01",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    assert!(!text.contains("mlx5_1"), "the other port is fine: {text}");
    let skipped = preflight(&machine, &["--only", "L01,L06", "--skip", "L01"])?.output()?;
    assert!(!said(&skipped).contains("L01"), "{}", said(&skipped));
    Ok(())
}

/// As the init container of a pod that must not start without its driver.
fn preflight_waits_until_nothing_fails() -> Result<()> {
    let machine = Machine::new()?;
    port_state(&machine, "1: DOWN\n")?;
    let given_up = preflight(&machine, &["--only", "L01", "--wait", "1"])?.output()?;
    assert_eq!(given_up.status.code(), Some(1), "{}", said(&given_up));

    let mut waiting = preflight(&machine, &["--only", "L01", "--wait", "60", "--json"])?;
    let waiting = waiting
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    thread::sleep(Duration::from_millis(500));
    port_state(&machine, "4: ACTIVE\n")?;
    let output = waiting.wait_with_output()?;
    assert!(output.status.success(), "{}", said(&output));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("waiting: L01"), "{stderr}");
    // What it said while it waited is not in the document.
    assert_eq!(document(&output)?["checks"][0]["verdict"], "pass");
    Ok(())
}

/// With its own arguments, and `/sys` alone, as it mounts it.
fn the_init_container_of_the_docs_waits_for_all_ports() -> Result<()> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("docs/install.md");
    let page = fs::read_to_string(page)?;
    let mut blocks = page.split("```yaml\n").skip(1);
    let block = blocks.find(|block| block.contains("initContainers:"));
    let text = block.and_then(|block| block.split("```").next());
    let pod: Value = serde_saphyr::from_str(text.context("no init container")?)?;
    let container = &pod["spec"]["initContainers"][0];
    assert_eq!(container["command"], json!(["rdmactl"]));
    assert_eq!(container["volumeMounts"][0]["mountPath"], "/host/sys");
    let root = json!({"name": "RDMA_HOST_ROOT", "value": "/host"});
    assert_eq!(container["env"], json!([root]));
    let arguments = container["args"].as_array().context("args")?;
    let arguments = arguments.iter().filter_map(Value::as_str);
    // Not for ten minutes, where it waits in vain.
    let arguments = arguments.map(|one| if one == "600" { "60" } else { one });

    let machine = Machine::laid(hca_trees::machine::a4)?;
    for directory in ["/proc", "/dev"] {
        fs::remove_dir_all(machine.tree.path(directory))?;
    }
    let port = "/sys/class/infiniband/mlx5_7/ports/1/state";
    machine.tree.file(port, "1: DOWN");
    let mut waiting = plugin(&[])?
        .args(arguments)
        .env("RDMA_HOST_ROOT", machine.tree.path("/"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let lines = BufReader::new(waiting.stderr.take().context("stderr")?).lines();
    let mut lines = lines.map_while(Result::ok);
    let first = lines.find(|line| line.contains("waiting: "));
    assert!(waiting.try_wait()?.is_none(), "{first:?}");
    let first = first.unwrap_or_default();
    ensure!(first.contains("L01"), "{first}");
    machine.tree.file(port, "4: ACTIVE");
    let rest: Vec<String> = lines.collect();
    let output = waiting.wait_with_output()?;
    ensure!(output.status.success(), "{rest:#?} {}", said(&output));
    Ok(())
}

fn preflight_refuses_a_check_that_is_not_there() -> Result<()> {
    let output = plugin(&["preflight", "--only", "L99"])?.output()?;
    let text = said(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("unknown check L99"), "{text}");
    let output = plugin(&["preflight", "--only", "L01", "--skip", "L"])?.output()?;
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("no check is chosen"), "{text}");
    Ok(())
}

fn preflight_lists_its_catalogue_as_a_document() -> Result<()> {
    let output = plugin(&["preflight", "--list", "--json"])?.output()?;
    let catalogue = document(&output)?;
    let checks = catalogue["checks"].as_array().context("checks")?;
    let keys = ["id", "title", "subject", "reads", "severity", "remedy"];
    for check in checks {
        assert!(keys.iter().all(|key| check[key].is_string()), "{check}");
    }
    let text = said(&plugin(&["preflight", "--list"])?.output()?);
    assert_eq!(text.lines().count(), checks.len(), "{text}");
    Ok(())
}

/// The verdict and reason of a check that finds one thing.
fn found(output: &Output, id: &str) -> Result<(String, String)> {
    let document = document(output)?;
    let checks = document["checks"].as_array().context("checks")?;
    let check = checks.iter().find(|check| check["id"] == id);
    let check = check.with_context(|| format!("no {id} in {document}"))?;
    let why = check["findings"][0]["why"].as_str().unwrap_or_default();
    Ok((
        check["verdict"].as_str().unwrap_or_default().to_owned(),
        why.to_owned(),
    ))
}

/// Shows this machine's processes below the machine of files.
fn with_processes_of_the_host(machine: &Machine) -> Result<()> {
    let proc = machine.tree.path("/proc");
    fs::remove_dir_all(&proc)?;
    Ok(std::os::unix::fs::symlink("/proc", proc)?)
}

/// A pod's process that is called kubelet names a FIFO as its configuration: whoever opens it waits.
fn preflight_believes_no_process_by_its_name() -> Result<()> {
    let machine = Machine::new()?;
    with_processes_of_the_host(&machine)?;
    let program = machine.directory().join("kubelet");
    fs::copy(fs::canonicalize("/bin/sh")?, &program)?;
    let fifo = machine.tree.path("/config.yaml");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU)?;
    let mut pod = Command::new("unshare")
        .args(["--pid", "--mount", "--fork", "--kill-child"])
        .arg(&program)
        .args(["-c", "echo ready; read line", "kubelet"])
        .arg("--config=/config.yaml")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut ready = [0];
    pod.stdout
        .as_mut()
        .context("stdout")?
        .read_exact(&mut ready)?;
    let mut asked = preflight(&machine, &["--only", "K03", "--json"])?
        .stdout(Stdio::piped())
        .spawn()?;
    let started = Instant::now();
    let in_time = loop {
        if asked.try_wait()?.is_some() {
            break true;
        }
        if started.elapsed() > Duration::from_secs(20) {
            asked.kill()?;
            break false;
        }
        thread::sleep(Duration::from_millis(20));
    };
    let output = asked.wait_with_output()?;
    drop(pod.stdin.take());
    pod.wait()?;
    assert!(in_time, "preflight opened the FIFO");
    let (verdict, why) = found(&output, "K03")?;
    assert_eq!(verdict, "unknown", "{why}");
    Ok(())
}

/// With the rights of the daemon's container.
fn preflight_without_rights_is_unknown_with_the_right() -> Result<()> {
    let machine = Machine::laid(hca_trees::machine::a4)?;
    with_processes_of_the_host(&machine)?;
    // What sysfs shows of a function with capabilities to a process without CAP_SYS_ADMIN.
    let mut space = [0_u8; 64];
    (space[0x06], space[0x34]) = (0x10, 0x40);
    for function in fs::read_dir(machine.tree.path("/sys/bus/pci/devices"))? {
        fs::write(function?.path().join("config"), space)?;
    }
    let plugins = machine.tree.path("/var/lib/kubelet/device-plugins");
    fs::create_dir_all(&plugins)?;
    let _plugin = UnixListener::bind(plugins.join("nvidia-gpu.sock"))?;
    let checks = ["K03", "P06", "D07"];
    let command = preflight(&machine, &["--only", &checks.join(","), "--json"])?;
    let mut limited = Command::new("setpriv");
    limited
        .args(["--bounding-set=-all,+net_admin", "--inh-caps=-all"])
        .arg(command.get_program())
        .args(command.get_args());
    let output = limited.stdin(Stdio::null()).output()?;
    for id in checks {
        let (verdict, why) = found(&output, id)?;
        let right = if id.starts_with('P') {
            "CAP_SYS_ADMIN"
        } else {
            "CAP_SYS_PTRACE"
        };
        assert_eq!(verdict, "unknown", "{id}: {why}");
        assert!(why.contains(&format!("needs {right}")), "{id}: {why}");
    }
    Ok(())
}

/// As an init container that mounts `/sys` alone.
fn preflight_with_sysfs_alone_judges_nothing_unread() -> Result<()> {
    let machine = Machine::laid(hca_trees::machine::a4)?;
    for directory in ["/proc", "/dev"] {
        fs::remove_dir_all(machine.tree.path(directory))?;
    }
    let checks = ["D01", "R01", "R04", "K03"];
    let output = preflight(
        &machine,
        &["--strict", "--only", &checks.join(","), "--json"],
    )?
    .output()?;
    for id in checks {
        let (verdict, why) = found(&output, id)?;
        assert_eq!(verdict, "unknown", "{id}: {why}");
        assert!(why.contains("is not mounted here"), "{id}: {why}");
    }
    assert!(output.status.success(), "{}", said(&output));
    Ok(())
}

fn status_fails_where_nothing_answers() -> Result<()> {
    let machine = Machine::new()?;
    let directory = machine.directory();
    let policy = json!({
        "stateDir": directory.join("state"),
    });
    fs::write(directory.join("policy.json"), policy.to_string())?;
    let output = ask(&machine, "status", &[])?;
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("neither the daemon nor the kubelet answers"),
        "{text}"
    );
    // What a journal says may be of any age: it is shown, and it is no success.
    fs::create_dir_all(directory.join("state/attachments"))?;
    let output = ask(&machine, "pods", &[])?;
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("no pod has a unit or an attachment"),
        "{text}"
    );
    Ok(())
}

/// `status` or `pods` of a node.
fn ask(machine: &Machine, what: &str, arguments: &[&str]) -> Result<Output> {
    let mut command = plugin(&[what, "--policy"])?;
    command
        .arg(machine.directory().join("policy.json"))
        .arg("--node-socket")
        .arg(machine.node_socket())
        .arg("--kubelet-root-dir")
        .arg(machine.settings().root)
        .args(arguments);
    Ok(command.output()?)
}

/// A node whose kubelet gave a unit to a pod, with its daemon, which reclaims nothing.
struct Answering {
    machine: Machine,
    kubelet: Kubelet,
    daemon: Daemon,
}

impl Answering {
    fn new() -> Result<Self> {
        Self::on(Machine::new()?, POOLS, 4)
    }

    /// With pools of this many units.
    fn on(machine: Machine, pools: &str, units: usize) -> Result<Self> {
        let state = json!({"stateDir": machine.directory().join("state")});
        fs::write(machine.directory().join("policy.json"), state.to_string())?;
        let config = machine.directory().join("config.yaml");
        fs::write(&config, pools)?;
        let kubelet = machine.kubelet()?;
        let root = machine.settings().root;
        let daemon = machine.daemon_on(
            &config,
            &[
                "--kubelet-root-dir".as_ref(),
                root.as_ref(),
                "--reclaim-interval".as_ref(),
                "0".as_ref(),
            ],
        )?;
        kubelet
            .wait_allocatable("rdma/hca", units, Duration::from_secs(20))
            .with_context(|| daemon.log())?;
        kubelet.admit(Pod::with_limits("pod", &[("rdma/hca", 1)])?)?;
        Ok(Self {
            machine,
            kubelet,
            daemon,
        })
    }

    fn ask(&self, what: &str, flags: &[&str]) -> Result<Output> {
        ask(&self.machine, what, flags)
    }
}

fn status_joins_what_daemon_and_kubelet_say() -> Result<()> {
    let node = Answering::new()?;
    // It is known after the daemon's first read of the journal.
    let idle = "nothing is cleaned up behind pods: turned off by --reclaim-interval 0";
    let started = Instant::now();
    let text = loop {
        let text = said(&node.ask("status", &[])?);
        if text.contains(idle) || started.elapsed() > Duration::from_secs(20) {
            break text;
        }
        thread::sleep(Duration::from_millis(100));
    };
    for part in [idle, "version ", "rdma/hca", "mlx5_0", "healthy"] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    // The daemon's answer may be older than the pod, and the kubelet limits its callers.
    for _ in 0..40 {
        let answer = document(&node.ask("status", &["--json"])?)?;
        assert_eq!(
            answer["state"]["resources"][0]["allocatedUnits"], 1,
            "{answer}"
        );
        let answer = document(&node.ask("pods", &["--json"])?)?;
        assert_eq!(answer["pods"][0]["pod"], "default/pod", "{answer}");
    }
    Ok(())
}

fn status_is_from_any_source_that_answers() -> Result<()> {
    let Answering {
        machine,
        kubelet,
        daemon,
    } = Answering::new()?;
    // Without the daemon the kubelet still knows who has what.
    drop(daemon);
    let output = ask(&machine, "status", &["--json"])?;
    assert!(output.status.success(), "{}", said(&output));
    let answer = document(&output)?;
    assert_eq!(answer["daemon"], Value::Null);
    assert_eq!(
        answer["state"]["resources"][0]["allocatedUnits"], 1,
        "{answer}"
    );
    let notes = answer["notes"].to_string();
    assert!(notes.contains("the daemon: ask "), "{notes}");
    // And without both, the journal does; that is a failure.
    drop(kubelet);
    let output = ask(&machine, "pods", &[])?;
    assert_eq!(output.status.code(), Some(1));
    let text = said(&output);
    assert!(
        text.contains("the daemon: ") && text.contains("the kubelet: "),
        "{text}"
    );
    assert!(
        text.contains("no pod has a unit or an attachment"),
        "{text}"
    );
    Ok(())
}

/// It hides nothing that can still be read, and is reported with what to do.
fn status_notes_a_wrong_policy() -> Result<()> {
    let node = Answering::new()?;
    fs::write(
        node.machine.directory().join("policy.json"),
        r#"{"stateDirr": "/x"}"#,
    )?;
    let output = node.ask("status", &[])?;
    let text = said(&output);
    for part in [
        "rdma/hca",
        r#"unknown key "stateDirr"; did you mean "stateDir"?"#,
        "correct the file",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        !stderr.contains("stateDirr"),
        "a note, not a log line: {stderr}"
    );
    Ok(())
}

/// Eight HCAs and twenty pods on a terminal of 120 columns and 50 lines.
fn a_full_node_fits_a_screen() -> Result<()> {
    let pools = POOLS.replace("shares: 2", "shares: 4");
    let node = Answering::on(Machine::with_hcas(8)?, &pools, 32)?;
    for number in 1..20 {
        let pod = Pod::with_limits(&format!("worker-{number}"), &[("rdma/hca", 1)])?;
        node.kubelet.admit(pod)?;
    }
    for command in ["status", "pods", "preflight"] {
        let output = match command {
            "preflight" => preflight(&node.machine, &[])?.output()?,
            _ => node.ask(command, &[])?,
        };
        let text = String::from_utf8(output.stdout)?;
        let lines = text
            .lines()
            .map(|line| line.chars().count().max(1).div_ceil(120));
        let lines: usize = lines.sum();
        assert!(lines <= 50, "{command}: {lines} lines\n{text}");
    }
    Ok(())
}
