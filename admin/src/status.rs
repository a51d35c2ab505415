//! `rdma-device-plugin status`: units, who holds them, attachments, health, from each source that
//! answers.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, bail};
use attachment::node::now;
use node::document::versioned;
use node::table::{age, cell, table};
use serde_json::Value;

use super::within_limit;
use crate::scan::SCAN;
use crate::status::{Files, Status as Answers, files, misaligned};

/// How long the daemon may take.
const DAEMON_TIMEOUT: Duration = Duration::from_secs(3);
/// Thousands of units are far below this.
const MOST_BYTES: u64 = 64 << 20;
/// Where the manifests let the daemon serve.
const PORT: u16 = 9834;

/// Shows resources, who holds what, attachments and health: from the daemon, the kubelet, the
/// journal and the leases, whichever answer.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit status: 0 the daemon or the kubelet answered, 1 neither did or a read \
    hangs, 2 wrong usage."
)]
pub(super) struct Status {
    /// Where the daemon serves metrics; of several addresses the loopback one is asked [default:
    /// 127.0.0.1:9834]
    #[arg(
        long,
        value_name = "ADDRESS:PORT,…",
        env = "RDMA_METRICS_ADDR",
        value_delimiter = ',',
        value_parser = super::address
    )]
    metrics_addr: Vec<SocketAddr>,
    #[command(flatten)]
    kubelet: super::KubeletRoot,
    #[command(flatten)]
    host: super::HostRoot,
    #[command(flatten)]
    node: super::NodePolicy,
    /// Also the paths of the pods' network namespaces, beyond 80 columns
    #[arg(long)]
    wide: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Status {
    /// Asks and prints.
    ///
    /// # Errors
    /// Neither the daemon nor the kubelet answers.
    pub(super) fn run(&self, out: &mut impl Write) -> anyhow::Result<()> {
        let usual = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
        let mut addresses = self.metrics_addr.iter();
        let loopback = addresses.find(|address| address.ip().is_loopback());
        let first = self.metrics_addr.first();
        let address = loopback.or(first).copied().unwrap_or(usual);
        let daemon = ask(address)
            .with_context(|| format!("no answer at {address} (--metrics-addr)"))
            .map_err(|error| format!("{error:#}"));
        let (root, policy) = (self.host.host_root.clone(), self.node.policy.clone());
        let node = self.node.name();
        let read = move || files(&root, &policy, node);
        let mut late = Vec::new();
        let Files {
            attachments,
            leases,
            mut notes,
        } = within_limit("the read of the journal and the leases", read).unwrap_or_else(|error| {
            let hangs = error.to_string();
            late.push(hangs.clone());
            Files {
                attachments: Err(hangs.clone()),
                leases: Err(hangs),
                notes: Vec::new(),
            }
        });
        let kubelet = kubelet_api::client::ask(&self.kubelet.kubelet_root_dir)
            .map_err(|error| error.to_string());
        let judged = kubelet.as_ref().ok().map(|devices| {
            let (host, devices) = (self.host.host(), devices.clone());
            within_limit(SCAN, move || misaligned(&host, &devices))
        });
        let judged = judged.map(|judged| match judged {
            Ok(judged) => judged.map_err(|error| error.to_string()),
            Err(error) => {
                late.push(error.to_string());
                Err(error.to_string())
            }
        });
        let misaligned = judged.unwrap_or(Ok(Vec::new())).unwrap_or_else(|error| {
            notes.push(format!("which pods are misaligned is not known: {error}"));
            Vec::new()
        });
        let answers = Answers {
            daemon,
            kubelet,
            attachments,
            leases,
            misaligned,
            notes,
        };
        if self.json {
            writeln!(out, "{:#}", versioned(answers.document()))?;
        } else {
            print(&answers, self.wide, out)?;
        }
        if answers.unanswered() {
            late.push(
                "neither the daemon nor the kubelet answers: what is shown of this node is what \
                 its files say"
                    .to_owned(),
            );
        }
        match late.is_empty() {
            true => Ok(()),
            false => bail!("{}", late.join("\n")),
        }
    }
}

/// One question over HTTP/1.0, which ends with the answer.
fn ask(address: SocketAddr) -> anyhow::Result<Value> {
    let mut stream = TcpStream::connect_timeout(&address, DAEMON_TIMEOUT)?;
    stream.set_read_timeout(Some(DAEMON_TIMEOUT))?;
    stream.set_write_timeout(Some(DAEMON_TIMEOUT))?;
    write!(
        stream,
        "GET /status HTTP/1.0\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.take(MOST_BYTES).read_to_string(&mut answer)?;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .context("not an HTTP answer")?;
    if head.split(' ').nth(1) != Some("200") {
        bail!("it answered {:?}", head.lines().next().unwrap_or_default());
    }
    serde_json::from_str(body).context("read the daemon's answer")
}

fn print(answers: &Answers, wide: bool, out: &mut impl Write) -> anyhow::Result<()> {
    if let Ok(daemon) = &answers.daemon {
        let at = |path: &str| daemon.pointer(path).map_or_else(|| "-".into(), text);
        writeln!(
            out,
            "version {}, up {} s, configuration {} (generation {}), netns mode {}\n",
            at("/programVersion"),
            at("/uptimeSeconds"),
            at("/configuration/file"),
            at("/configuration/generation"),
            at("/netnsMode"),
        )?;
    }
    let mut blocks = vec![units(answers)];
    if let Ok(daemon) = &answers.daemon {
        blocks.push(hcas(daemon));
    }
    blocks.push(held(answers));
    if let Ok(daemon) = &answers.daemon {
        blocks.push(bindings(daemon));
    }
    blocks.push(attachments(answers, wide));
    blocks.push(
        answers
            .notes()
            .iter()
            .map(|line| format!("{line}\n"))
            .collect(),
    );
    blocks.retain(|block| !block.is_empty());
    out.write_all(blocks.join("\n").as_bytes())?;
    Ok(())
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => cell(text),
        Value::Null => "-".into(),
        other => other.to_string(),
    }
}

fn units(answers: &Answers) -> String {
    let count =
        |count: Option<u64>| count.map_or_else(|| "?".to_owned(), |count| count.to_string());
    let rows: Vec<Vec<String>> = answers
        .units()
        .into_iter()
        .map(|units| {
            vec![
                units.resource,
                count(units.healthy),
                count(units.unhealthy),
                count(units.held),
                units.kubelet,
            ]
        })
        .collect();
    block(
        &["RESOURCE", "HEALTHY", "UNHEALTHY", "HELD", "KUBELET"],
        &rows,
    )
}

fn hcas(daemon: &Value) -> String {
    let list = |value: &Value| {
        let words: Vec<String> = value.as_array().into_iter().flatten().map(text).collect();
        if words.is_empty() {
            "-".to_owned()
        } else {
            words.join(" ")
        }
    };
    let mut rows = Vec::new();
    for pool in daemon["pools"].as_array().into_iter().flatten() {
        for hca in pool["hcas"].as_array().into_iter().flatten() {
            let health = match &hca["reason"] {
                Value::String(reason) => cell(reason),
                _ => "healthy".into(),
            };
            rows.push(vec![
                text(&pool["resource"]),
                text(&hca["id"]),
                list(&hca["rdmaDevices"]),
                list(&hca["netdevs"]),
                text(&hca["numaNode"]),
                health,
            ]);
        }
    }
    block(
        &["RESOURCE", "HCA", "DEVICE", "NETDEV", "NUMA", "HEALTH"],
        &rows,
    )
}

fn held(answers: &Answers) -> String {
    let rows: Vec<Vec<String>> = answers
        .held()
        .into_iter()
        .map(|held| {
            let far = if answers.is_misaligned(&held) {
                " (misaligned)"
            } else {
                ""
            };
            vec![
                cell(&held.resource),
                cell(&held.ids.join(" ")),
                cell(&format!("{}/{}{far}", held.namespace, held.pod)),
                cell(&held.container),
            ]
        })
        .collect();
    if rows.is_empty() && (answers.kubelet.is_ok() || answers.daemon.is_ok()) {
        return "no container holds a unit\n".into();
    }
    block(&["RESOURCE", "UNITS", "POD", "CONTAINER"], &rows)
}

/// Slots that are bound, with the GPUs that each HCA serves; and how well each pod is off.
fn bindings(daemon: &Value) -> String {
    let of_pod = |one: &Value, key: &str| one.pointer(&format!("/pod/{key}")).cloned();
    let alignment = |one: &Value| {
        let of_pod = daemon["alignment"].as_array()?.iter().find(|pod| {
            pod["resource"] == one["resource"]
                && Some(&pod["namespace"]) == of_pod(one, "namespace").as_ref()
                && Some(&pod["pod"]) == of_pod(one, "name").as_ref()
        })?;
        let worst = of_pod["worst"].as_str()?;
        let score = of_pod["score"].as_f64()?;
        Some(format!("{worst} {:.0} %", score * 100.0))
    };
    let pod = |one: &Value| {
        let word = |key: &str| of_pod(one, key).map_or_else(|| "-".into(), |name| text(&name));
        format!("{}/{}", word("namespace"), word("name"))
    };
    let bindings = daemon["bindings"].as_array().into_iter().flatten();
    let rows: Vec<Vec<String>> = bindings
        .map(|one| {
            let gpus = one["gpus"].as_array().into_iter().flatten();
            let gpus: Vec<String> = gpus
                .map(|gpu| format!("{} {}", text(&gpu["gpu"]), text(&gpu["class"])))
                .collect();
            vec![
                cell(&pod(one)),
                text(&one["container"]),
                text(&one["unit"]),
                text(&one["hca"]),
                text(&one["stage"]),
                if gpus.is_empty() {
                    "-".into()
                } else {
                    gpus.join(", ")
                },
                alignment(one).unwrap_or_else(|| "-".into()),
            ]
        })
        .collect();
    block(
        &[
            "POD",
            "CONTAINER",
            "SLOT",
            "HCA",
            "STAGE",
            "GPUS",
            "ALIGNMENT",
        ],
        &rows,
    )
}

fn attachments(answers: &Answers, wide: bool) -> String {
    let now = now();
    let rows: Vec<Vec<String>> = answers
        .attachments
        .iter()
        .flatten()
        .map(|one| {
            let named = |text: &Option<String>| cell(text.as_deref().unwrap_or_default());
            let seconds = now.saturating_sub(one.created);
            let mut row = vec![
                named(&one.pod),
                cell(&one.interface),
                named(&one.kind),
                named(&one.netdev),
                cell(&answers.addresses(one).join(" ")),
                one.netns_state.to_owned(),
                age(i64::try_from(seconds).unwrap_or(i64::MAX)),
            ];
            row.extend(wide.then(|| cell(&one.netns)));
            row
        })
        .collect();
    if rows.is_empty() && answers.attachments.is_ok() {
        return "no pod has an attachment\n".into();
    }
    let mut header = vec![
        "POD",
        "INTERFACE",
        "KIND",
        "NETDEV",
        "ADDRESSES",
        "NETNS",
        "AGE",
    ];
    header.extend(wide.then_some("PATH"));
    block(&header, &rows)
}

/// A table, or nothing where there are no rows.
fn block(header: &[&str], rows: &[Vec<String>]) -> String {
    if rows.is_empty() {
        String::new()
    } else {
        table(header, rows)
    }
}
