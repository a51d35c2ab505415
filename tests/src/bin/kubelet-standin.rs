//! A node without a cluster: `serve` stands for the kubelet, the other
//! sub-commands ask it what `kubectl` would ask a cluster.

#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use e2e::kubelet::{Pod, Settings};
use e2e::node::control::{Reply, Request, ask, serve};
use e2e::node::{Node, PodView};

#[derive(Parser)]
#[command(about = "A node without a cluster: the kubelet's stand-in")]
struct Cli {
    /// Socket by which the node is driven.
    #[arg(long, global = true, default_value = "/run/kubelet-standin.sock")]
    control: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Be the node until killed.
    Serve(Serve),
    /// Print the node's extended resources.
    Node {
        /// As JSON.
        #[arg(long)]
        json: bool,
        /// Wait until so much is allocatable first: RESOURCE=COUNT.
        #[arg(long, value_name = "RESOURCE=COUNT")]
        wait: Option<String>,
        /// How long to wait.
        #[arg(long = "patience", default_value_t = 30, value_name = "SECONDS")]
        timeout_seconds: u64,
    },
    /// Print the pods.
    Pods {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Run the Pods of manifests; other kinds of objects are passed over.
    RunPod {
        /// Make a sandbox again while the runtime fails to, for so long.
        #[arg(long, default_value_t = 0, value_name = "SECONDS")]
        retry_seconds: u64,
        /// YAML files.
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Run a command in a pod's container; its exit status is this one's.
    Exec {
        /// NAME or NAMESPACE/NAME.
        pod: String,
        /// The first container unless named.
        #[arg(short, long)]
        container: Option<String>,
        /// How long the command may take.
        #[arg(long, default_value_t = 120)]
        seconds: u64,
        /// Program and arguments.
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Stop and remove pods.
    DeletePod {
        /// Free their devices only: their processes run on, as hung ones do after a forced deletion.
        #[arg(long)]
        force: bool,
        /// NAME or NAMESPACE/NAME.
        #[arg(required = true)]
        pods: Vec<String>,
    },
    /// Stop a container and start it again, with the devices it has.
    RestartContainer {
        /// NAME or NAMESPACE/NAME.
        pod: String,
        /// The container.
        container: String,
    },
    /// Kill the kubelet and start it again; pods run on.
    RestartKubelet,
    /// Print the Pods of manifests, each with a UID, one JSON document a line; asks no node.
    Objects {
        /// YAML files.
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
}

#[derive(Args)]
struct Serve {
    /// The device-plugins directory.
    #[arg(long, default_value = "/var/lib/kubelet/device-plugins")]
    device_plugin_dir: PathBuf,
    /// The kubelet's root directory; PodResources is served below it.
    #[arg(long, default_value = "/var/lib/kubelet")]
    root: PathBuf,
    /// Where Pod objects are kept, in place of an API server [default: ROOT/api/pods].
    #[arg(long)]
    pods: Option<PathBuf>,
    /// The container runtime.
    #[arg(long, default_value = "/run/containerd/containerd.sock")]
    runtime: PathBuf,
}

fn main() -> Result<ExitCode> {
    let Cli { control, command } = Cli::parse();
    match command {
        Command::Serve(arguments) => serve_node(arguments, &control)?,
        Command::Node {
            json,
            wait,
            timeout_seconds,
        } => {
            if let Some(wait) = wait {
                wait_allocatable(&control, &wait, Duration::from_secs(timeout_seconds))?;
            }
            print_node(&control, json)?;
        }
        Command::Pods { json } => print_pods(&ask(&control, &Request::Pods)?, json)?,
        Command::RunPod {
            retry_seconds,
            files,
        } => {
            for file in files {
                let manifest = std::fs::read_to_string(&file)
                    .with_context(|| format!("read {}", file.display()))?;
                let request = Request::RunPod {
                    manifest,
                    retry_seconds,
                };
                print_pods(&ask(&control, &request)?, false)?;
            }
        }
        Command::Exec {
            pod,
            container,
            seconds,
            command,
        } => {
            let request = Request::Exec {
                pod: full_name(&pod),
                container,
                command,
                seconds,
            };
            return exec(&control, &request);
        }
        Command::DeletePod { force, pods } => {
            for pod in pods {
                let pod = full_name(&pod);
                ask(&control, &Request::DeletePod { pod, force })?;
            }
        }
        Command::RestartContainer { pod, container } => {
            let pod = full_name(&pod);
            ask(&control, &Request::RestartContainer { pod, container })?;
        }
        Command::Objects { files } => {
            for file in files {
                let manifest = std::fs::read_to_string(&file)
                    .with_context(|| format!("read {}", file.display()))?;
                for pod in Pod::from_manifest(&manifest)? {
                    say(&format!("{}\n", serde_json::to_string(&pod)?));
                }
            }
        }
        Command::RestartKubelet => drop(ask(&control, &Request::RestartKubelet)?),
    }
    Ok(ExitCode::SUCCESS)
}

fn serve_node(arguments: Serve, control: &Path) -> Result<()> {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .init();
    let mut settings = Settings::below(&arguments.root);
    settings.device_plugins = arguments.device_plugin_dir;
    if let Some(pods) = arguments.pods {
        settings.pods = pods;
    }
    serve(Node::start(settings, &arguments.runtime)?, control)
}

fn wait_allocatable(control: &Path, wanted: &str, timeout: Duration) -> Result<()> {
    let (resource, count) = wanted
        .split_once('=')
        .context("--wait takes RESOURCE=COUNT")?;
    let count: usize = count.parse().context("--wait takes RESOURCE=COUNT")?;
    let end = Instant::now() + timeout;
    loop {
        let Reply::Node(node) = ask(control, &Request::Node)? else {
            bail!("unexpected reply")
        };
        let allocatable = node
            .get(resource)
            .map_or(0, |quantity| quantity.allocatable);
        if allocatable == count {
            return Ok(());
        }
        if Instant::now() > end {
            bail!("{resource}: {allocatable} allocatable after {timeout:?}, not {count}");
        }
        thread::sleep(Duration::from_millis(100));
    }
}

fn exec(control: &Path, request: &Request) -> Result<ExitCode> {
    let Reply::Output(output) = ask(control, request)? else {
        bail!("unexpected reply")
    };
    say(&output.stdout);
    complain(&output.stderr);
    Ok(u8::try_from(output.exit_code).map_or(ExitCode::FAILURE, ExitCode::from))
}

fn print_node(control: &Path, json: bool) -> Result<()> {
    let Reply::Node(node) = ask(control, &Request::Node)? else {
        bail!("unexpected reply")
    };
    if json {
        say(&format!("{}\n", serde_json::to_string_pretty(&node)?));
        return Ok(());
    }
    let width = node
        .keys()
        .map(String::len)
        .max()
        .unwrap_or_default()
        .max("RESOURCE".len());
    say(&format!(
        "{:width$}  CAPACITY  ALLOCATABLE  IN USE\n",
        "RESOURCE"
    ));
    for (resource, quantity) in node {
        let (capacity, allocatable) = (quantity.capacity, quantity.allocatable);
        say(&format!(
            "{resource:width$}  {capacity:<8}  {allocatable:<11}  {}\n",
            quantity.in_use
        ));
    }
    Ok(())
}

fn print_pods(reply: &Reply, json: bool) -> Result<()> {
    let Reply::Pods(pods) = reply else {
        bail!("unexpected reply")
    };
    if json {
        say(&format!("{}\n", serde_json::to_string_pretty(pods)?));
        return Ok(());
    }
    for PodView {
        name,
        ip,
        containers,
        devices,
        ..
    } in pods
    {
        let states: Vec<_> = containers
            .iter()
            .map(|(c, state)| format!("{c} {state}"))
            .collect();
        let ip = if ip.is_empty() { "no address" } else { ip };
        say(&format!("{name}: {}; {ip}\n", states.join(", ")));
        for (container, resources) in devices {
            for (resource, ids) in resources {
                say(&format!(
                    "  {container} has {resource}: {}\n",
                    ids.join(", ")
                ));
            }
        }
    }
    Ok(())
}

fn full_name(pod: &str) -> String {
    if pod.contains('/') {
        pod.to_owned()
    } else {
        format!("default/{pod}")
    }
}

#[expect(clippy::print_stdout, reason = "the answer to the person who asked")]
fn say(text: &str) {
    print!("{text}");
}

#[expect(
    clippy::print_stderr,
    reason = "the standard error of a command run elsewhere"
)]
fn complain(text: &str) {
    eprint!("{text}");
}
